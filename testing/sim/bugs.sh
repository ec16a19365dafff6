#!/usr/bin/env bash
# Plants the bugs of bugs/ in a copy of the tree, builds that once with a switch for each, and runs
# seeds with one after the other alive until one fails. Prints a line for each bug; fails if one is
# not found in its time, or if a seed fails with none alive.
#   bugs.sh [--seconds S] [--jobs N] [--from SEED] [--duration D] [--fair] [NAME...]
#     --seconds   at most so many seconds of runs for each (120)
#     --duration  each run breaks its cluster for so many simulated seconds (20)
#     --fair      without the themes of bugs/hints, as any series runs
#     --build     builds only; --built: what was built before is run as it is
# What only happens within one log, and hardly ever where others take over, bugs/hints gives to the
# tests of helix-wal: some seconds of random operations and failing disks.
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds=120 jobs=2 from=1 duration=20 fair='' does=all
names=()
while [ $# -gt 0 ]; do
    case "$1" in
        --seconds) seconds=$2; shift 2 ;;
        --jobs) jobs=$2; shift 2 ;;
        --from) from=$2; shift 2 ;;
        --duration) duration=$2; shift 2 ;;
        --fair) fair=yes; shift ;;
        --build) does=build; shift ;;
        --built) does=run; shift ;;
        *) names+=("$1"); shift ;;
    esac
done
if [ ${#names[@]} = 0 ]; then
    # Every switch that any patch has.
    switches=$(grep -ho 'planted::is("[a-z-]*")' testing/sim/bugs/*.patch | cut -d'"' -f2 | sort -u)
    mapfile -t names <<< "$switches"
fi

# One folder for what is built, so that the libraries are not built again; the copy has a place of
# its own in it.
target=${CARGO_TARGET_DIR:-$PWD/target}
copy=$target/bugs
program=$copy/helix-sim log_tests=$copy/log-tests
if [ "$does" != run ]; then
    bash testing/sim/bugs/plant.sh "$copy"
    (cd "$copy/sim" && CARGO_TARGET_DIR="$target" cargo build -q) || exit 1
    cp "$target/debug/helix-sim" "$program"
    built=$(cd "$copy" && CARGO_TARGET_DIR="$target" \
        cargo test --profile soak -p helix-wal --test it --no-run 2>&1) || { echo "$built"; exit 1; }
    cp "$(sed -n 's/.*Executable .*(\(.*\))$/\1/p' <<< "$built")" "$log_tests"
fi
if [ "$does" = build ]; then exit 0; fi

simulate() {
    HELIX_BUG=$1 "$program" --from "$from" --jobs "$jobs" --duration "$duration" "${@:2}" 2>&1
}
try_log() {
    (cd helix-wal && HELIX_BUG=$1 timeout "$seconds" "$log_tests" -q model:: faults:: 2>&1)
}
if ! out=$(try_log ""); then
    echo "with no bug alive the log's tests fail: $(tail -n 5 <<< "$out")"
    exit 1
fi
if ! out=$(simulate "" --seeds 4); then
    echo "with no bug alive: $(grep -m1 '^FAILED' <<< "$out" || tail -n 1 <<< "$out")"
    exit 1
fi
found=0
for name in "${names[@]}"; do
    theme=()
    hint=$(sed -n "s/^$name //p" testing/sim/bugs/hints)
    begin=$(date +%s)
    if [ "$hint" = log ]; then
        if out=$(try_log "$name"); then
            echo "$name: NOT FOUND by the log's own tests"
        else
            line=$(grep -am1 'panicked at' <<< "$out" || echo "they do not come to an end")
            echo "$name: found in $(($(date +%s) - begin)) s by the log's own tests: $line"
            found=$((found + 1))
        fi
        continue
    fi
    if [ -z "$fair" ] && [ -n "$hint" ]; then theme=(--theme "$hint"); fi
    if out=$(simulate "$name" --seconds "$seconds" "${theme[@]}"); then
        echo "$name: NOT FOUND in $seconds s, $(grep -c ' ok in ' <<< "$out") seeds ${theme[*]}"
    else
        line=$(grep -m1 '^FAILED' <<< "$out" || tail -n 1 <<< "$out")
        echo "$name: found in $(($(date +%s) - begin)) s ${theme[*]}: ${line:0:200}"
        found=$((found + 1))
    fi
done
echo "$found of ${#names[@]} planted bugs were found"
[ "$found" = "${#names[@]}" ]
