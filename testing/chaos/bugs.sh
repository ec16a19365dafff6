#!/usr/bin/env bash
# Plants the bugs of testing/sim/bugs in a copy of the tree, builds `helix-chaos` there once, and runs it
# with one after the other alive until it fails. Prints a line for each bug, and for none.
#   bugs.sh [--seconds S] [--seed SEED] [NAME...]     at most S seconds of faults for each
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds=120 seed=1
names=()
while [ $# -gt 0 ]; do
    case "$1" in
        --seconds) seconds=$2; shift 2 ;;
        --seed) seed=$2; shift 2 ;;
        *) names+=("$1"); shift ;;
    esac
done
if [ ${#names[@]} = 0 ]; then
    mapfile -t names < <(
        grep -ho 'planted::is("[a-z-]*")' testing/sim/bugs/*.patch | cut -d'"' -f2 | sort -u
    )
fi

target=${CARGO_TARGET_DIR:-$PWD/target}
copy=$target/chaos-bugs
bash testing/sim/bugs/plant.sh "$copy"
# Nodes are told of the bug, too: else what the caller has set is not meant for them.
file=$copy/testing/chaos/src/node.rs
sed -i 's/name != "HELIX_LOG"/name != "HELIX_LOG" \&\& name != "HELIX_BUG"/' "$file"
grep -q HELIX_BUG "$file" || { echo "$file does not look as it did"; exit 1; }
(cd "$copy" && CARGO_TARGET_DIR="$target" cargo build -q -p helix-chaos) || exit 1
program=$copy/helix-chaos-with-bugs
cp "$target/debug/helix-chaos" "$program"

# Many of all kinds, and often checked.
chaos() {
    HELIX_BUG=$1 "$program" run --short --check-every 5 --seed "$seed" --log-kib 512 \
        --duration-max "${seconds}s" --keep "$copy/run-$1" \
        --kills 200 --pauses 60 --partitions 60 --absences 30 --trims 40 --deletions 10 \
        --drains 20 --wipes 20 --members 20 --failed-syncs 30 --stalls 30 --full-disks 20 \
        --damages 40 --restores 20 2>&1
}
found=0
for name in "" "${names[@]}"; do
    rm -rf "$copy/run-$name"
    begin=$(date +%s)
    if out=$(chaos "$name"); then
        echo "${name:-no bug}: not found in $(($(date +%s) - begin)) s"
    else
        line=$(grep -m1 -E '^ *(VIOLATION|NO |NOT |STUCK|Error)' <<< "$out" || tail -n 1 <<< "$out")
        echo "${name:-no bug}: found in $(($(date +%s) - begin)) s: ${line:0:200}"
        if [ -z "$name" ]; then exit 1; fi
        found=$((found + 1))
    fi
done
echo "$found of ${#names[@]} planted bugs were found"
