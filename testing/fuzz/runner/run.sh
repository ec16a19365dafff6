#!/usr/bin/env bash
# Runs a fuzz target: testing/fuzz/runner/run.sh NAME [--seconds S] [--minimize]
# Needs a C++ compiler for libFuzzer. New inputs stay in the target directory; --minimize adds the
# fewest inputs with the same coverage to testing/fuzz/corpus.pack.
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
corpus() {
    cargo run -q --manifest-path ../../../Cargo.toml -p helix-fuzz --example corpus -- "$@"
}
target="${CARGO_TARGET_DIR:-$PWD/../../../target/fuzz}"
host="$(rustc -vV | sed -n 's/^host: //p')"
seeds="$target/seeds"
rm -rf "$seeds"
corpus unpack "$seeds"
CARGO_TARGET_DIR="$target" RUSTC_WRAPPER="$PWD/instrument" \
    cargo build --release --locked --target "$host"
found="$target/corpus/$name"
mkdir -p "$found" "$seeds/$name" "artifacts/$name"
export HELIX_FUZZ_TARGET="$name"
run=("$target/$host/release/fuzz" -rss_limit_mb=640 -timeout=30 -max_len=4096)
if [ -n "$minimize" ]; then
    fewest="$(mktemp -d)"
    "${run[@]}" -merge=1 "$fewest" "$seeds/$name" "$found"
    rm -r "$seeds/${name:?}"
    mv "$fewest" "$seeds/$name"
    corpus pack "$seeds"
    exit
fi
# A crash ends the run. Its input is in artifacts/; add it to the corpus with the fix.
"${run[@]}" -max_total_time="$seconds" -print_final_stats=1 -artifact_prefix="artifacts/$name/" \
    "$found" "$seeds/$name"
