#!/usr/bin/env bash
# Runs a fuzz target: testing/fuzz/runner/run.sh NAME [--seconds S] [--minimize]
# Needs a C++ compiler, for libFuzzer. What is found stays in the target folder, beside the build;
# --minimize puts the fewest inputs that reach all of it into the corpus of the repository.
set -euo pipefail
cd "$(dirname "$0")"
name="${1:?name a target: see testing/fuzz/src/lib.rs}"
shift
seconds=60
minimize=
while [ $# -gt 0 ]; do
    case "$1" in
    --seconds) seconds="$2" && shift 2 ;;
    --minimize) minimize=yes && shift ;;
    *) echo "unknown argument $1" >&2 && exit 2 ;;
    esac
done
target="${CARGO_TARGET_DIR:-$PWD/../../../target/fuzz}"
host="$(rustc -vV | sed -n 's/^host: //p')"
CARGO_TARGET_DIR="$target" RUSTC_WRAPPER="$PWD/instrument" \
    cargo build --release --locked --target "$host"
found="$target/corpus/$name"
mkdir -p "$found" "../corpus/$name" "artifacts/$name"
export HELIX_FUZZ_TARGET="$name"
run=("$target/$host/release/fuzz" -rss_limit_mb=640 -timeout=30 -max_len=4096)
if [ -n "$minimize" ]; then
    fewest="$(mktemp -d)"
    "${run[@]}" -merge=1 "$fewest" "../corpus/$name" "$found"
    rm -r "../corpus/$name"
    mv "$fewest" "../corpus/$name"
    chmod 755 "../corpus/$name"
    exit
fi
# A crash ends the run; its input is in artifacts/ and becomes part of the corpus with the fix.
"${run[@]}" -max_total_time="$seconds" -print_final_stats=1 -artifact_prefix="artifacts/$name/" \
    "$found" "../corpus/$name"
