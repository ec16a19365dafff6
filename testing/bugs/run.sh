#!/usr/bin/env bash
# Plants known bugs in a copy of the tree, each behind a switch, builds the copy once, and runs a
# test suite with one bug enabled at a time. Prints a line per bug and a summary. Fails if the suite
# fails without a bug, or if a bug is not found (chaos: not all can be found there).
#
#   run.sh SUITE [OPTIONS] [NAME...]     all bugs of the suite, or these
#
# SUITE:
#   sim             simulated clusters; cluster/*.patch
#     --seconds S     at most S seconds of runs per bug (120)
#     --jobs N        seeds in parallel (2)
#     --from SEED     first seed (1)
#     --duration D    simulated seconds with faults per run (20)
#     --fair          ignore the themes in hints, like a normal series
#   chaos           real processes; cluster/*.patch
#     --seconds S     at most S seconds of faults per bug (120)
#     --seed SEED     seed of the faults (1)
#   interleavings   threads of the log under shuttle; log-threads/*.patch
#     --rounds R      R thousand orders of each kind (10)
# All suites:
#   --build         build only
#   --built         run the previous build
set -euo pipefail
cd "$(dirname "$0")/../.."

suite=${1:-}
case "$suite" in
    sim | chaos) patches=testing/bugs/cluster target=${CARGO_TARGET_DIR:-$PWD/target} ;;
    interleavings) patches=testing/bugs/log-threads target=${CARGO_TARGET_DIR:-$PWD/target/shuttle} ;;
    *) echo "usage: run.sh sim|chaos|interleavings [options] [NAME...]" >&2 && exit 2 ;;
esac
shift
seconds=120 jobs=2 from=1 duration=20 seed=1 rounds=10 fair='' does=all
names=()
while [ $# -gt 0 ]; do
    case "$1" in
        --seconds) seconds=$2; shift 2 ;;
        --jobs) jobs=$2; shift 2 ;;
        --from) from=$2; shift 2 ;;
        --duration) duration=$2; shift 2 ;;
        --seed) seed=$2; shift 2 ;;
        --rounds) rounds=$2; shift 2 ;;
        --fair) fair=yes; shift ;;
        --build) does=build; shift ;;
        --built) does=run; shift ;;
        -*) echo "unknown option $1" >&2 && exit 2 ;;
        *) names+=("$1"); shift ;;
    esac
done
if [ ${#names[@]} = 0 ]; then
    mapfile -t names < <(
        grep -ho 'planted::is("[a-z-]*")' "$patches"/*.patch | cut -d'"' -f2 | sort -u
    )
fi

# The copy shares the target directory, so that dependencies are not built again.
export CARGO_TARGET_DIR=$target
copy=$target/bugs/$suite

# Copies the tree and applies all patches of the suite.
plant() {
    rm -rf "$copy"
    mkdir -p "$copy"
    # All files that git tracks or would add, in their current state.
    git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
        if [ -e "$file" ]; then printf '%s\0' "$file"; fi
    done | tar --null -T - -cf - | tar -xf - -C "$copy"
    for crate in $(sed -n 's|^+++ b/\([^/]*\)/.*|\1|p' "$patches"/*.patch | sort -u); do
        sed -i '/^\[dependencies\]/a planted = { path = "../testing/bugs/planted" }' \
            "$copy/$crate/Cargo.toml"
    done
    for patch in "$patches"/*.patch; do
        patch -s -p1 -d "$copy" < "$patch" || { echo "$patch no longer applies"; exit 1; }
    done
}

# Builds the tests of helix-wal in the copy. Prints the path of the program.
build_log_tests() {
    (cd "$copy" && cargo test -q -p helix-wal --test it --no-run --message-format json "$@" |
        sed -n 's/.*"name":"it".*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
}

# Each suite: build_SUITE; check_SUITE runs it without a bug; try_SUITE NAME runs it with a bug and
# fails if it finds one; detail_SUITE extracts the cause from the output.

# Succeeds if one of the bugs is found by the log's own tests.
needs_log_tests() {
    local name
    for name in "${names[@]}"; do
        if [ "$(hint "$name")" = log ]; then return 0; fi
    done
    return 1
}
hint() {
    sed -n "s/^$1 //p" testing/bugs/hints
}
run_log_tests() {
    (cd "$copy/helix-wal" && HELIX_BUG=$1 timeout "$seconds" "$copy/log-tests" -q model:: faults:: 2>&1)
}
simulate() {
    HELIX_BUG=$1 "$copy/helix-sim" --from "$from" --jobs "$jobs" --duration "$duration" "${@:2}" 2>&1
}
build_sim() {
    (cd "$copy/testing/sim" && cargo build -q)
    cp "$target/debug/helix-sim" "$copy/helix-sim"
    if needs_log_tests; then cp "$(build_log_tests --profile soak)" "$copy/log-tests"; fi
}
check_sim() {
    if needs_log_tests; then run_log_tests "" || return 1; fi
    simulate "" --seeds 4
}
try_sim() {
    local theme=()
    if [ "$(hint "$1")" = log ]; then
        run_log_tests "$1"
        return
    fi
    if [ -z "$fair" ] && [ -n "$(hint "$1")" ]; then theme=(--theme "$(hint "$1")"); fi
    simulate "$1" --seconds "$seconds" "${theme[@]}"
}
detail_sim() {
    grep -am1 -E '^FAILED|panicked at' || echo "no result in $seconds s"
}

build_chaos() {
    # Passes the bug to the nodes too, which get only HELIX_LOG of the caller's variables otherwise.
    local file=$copy/testing/chaos/src/node_process.rs
    sed -i 's/name != "HELIX_LOG"/name != "HELIX_LOG" \&\& name != "HELIX_BUG"/' "$file"
    grep -q HELIX_BUG "$file" || { echo "$file no longer matches the sed pattern"; exit 1; }
    (cd "$copy" && cargo build -q -p helix-chaos)
    cp "$target/debug/helix-chaos" "$copy/helix-chaos"
}
check_chaos() {
    try_chaos ""
}
try_chaos() {
    rm -rf "$copy/run-$1"
    HELIX_BUG=$1 "$copy/helix-chaos" run --short --check-every 5 --seed "$seed" --log-kib 512 \
        --duration-max "${seconds}s" --keep "$copy/run-$1" \
        --kills 200 --pauses 60 --partitions 60 --absences 30 --trims 40 --deletions 10 \
        --drains 20 --wipes 20 --members 20 --failed-syncs 30 --stalls 30 --full-disks 20 \
        --damages 40 --restores 20 2>&1
}
detail_chaos() {
    local output
    output=$(cat)
    grep -m1 -E '^ *(VIOLATION|NO |NOT |STUCK|Error)' <<< "$output" || tail -n 1 <<< "$output"
}

build_interleavings() {
    local program
    program=$(RUSTFLAGS="--cfg shuttle" build_log_tests)
    cp "$program" "$copy/log-tests"
}
check_interleavings() {
    try_interleavings ""
}
try_interleavings() {
    (cd "$copy/helix-wal" &&
        HELIX_ROUNDS=$rounds HELIX_BUG=$1 "$copy/log-tests" --test-threads 1 interleavings 2>&1)
}
detail_interleavings() {
    local output
    output=$(cat)
    paste -d' ' \
        <(sed -n 's/^test interleavings::\(.*\) \.\.\. FAILED$/\1/p' <<< "$output") \
        <(sed -n 's/^order \([0-9]*\) failed.*/(order \1)/p' <<< "$output") | paste -sd,
}

if [ "$does" != run ]; then
    plant
    "build_$suite"
fi
if [ "$does" = build ]; then exit 0; fi
if ! output=$("check_$suite"); then
    echo "no bug: FAILED: $("detail_$suite" <<< "$output")"
    exit 1
fi
echo "no bug: nothing found"
found=0
for name in "${names[@]}"; do
    begin=$(date +%s)
    if output=$("try_$suite" "$name"); then
        echo "$name: NOT FOUND in $(($(date +%s) - begin)) s"
    else
        detail=$("detail_$suite" <<< "$output")
        echo "$name: found in $(($(date +%s) - begin)) s: ${detail:0:200}"
        found=$((found + 1))
    fi
done
echo "$found of ${#names[@]} planted bugs were found"
[ "$suite" = chaos ] || [ "$found" = "${#names[@]}" ]
