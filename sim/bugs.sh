#!/usr/bin/env bash
# Plants the bugs of bugs/ in a copy of the tree, builds that once with a switch for each, and runs
# seeds with one after the other alive until one fails. Prints a line for each bug; fails if one is
# not found in its time, or if a seed fails with none alive.
#   bugs.sh [--seconds S] [--jobs N] [--from SEED] [NAME...]   at most S seconds of runs for each
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=120 jobs=2 from=1
names=()
while [ $# -gt 0 ]; do
    case "$1" in
        --seconds) seconds=$2; shift 2 ;;
        --jobs) jobs=$2; shift 2 ;;
        --from) from=$2; shift 2 ;;
        *) names+=("$1"); shift ;;
    esac
done
if [ ${#names[@]} = 0 ]; then
    # Every switch that any patch has.
    mapfile -t names < <(grep -ho 'planted::is("[a-z-]*")' sim/bugs/*.patch | cut -d'"' -f2 | sort -u)
fi

# One folder for what is built, so that the libraries are not built again; the copy has a place of
# its own in it.
target=${CARGO_TARGET_DIR:-$PWD/target}
copy=$target/bugs
bash sim/bugs/plant.sh "$copy"
(cd "$copy/sim" && CARGO_TARGET_DIR="$target" cargo build -q) || exit 1
program=$copy/helix-sim
cp "$target/debug/helix-sim" "$program"

simulate() {
    HELIX_BUG=$1 "$program" --from "$from" --jobs "$jobs" "${@:2}" 2>&1
}
if ! out=$(simulate "" --seeds 4); then
    echo "with no bug alive: $(grep -m1 '^FAILED' <<< "$out" || tail -n 1 <<< "$out")"
    exit 1
fi
found=0
for name in "${names[@]}"; do
    begin=$(date +%s)
    if out=$(simulate "$name" --seconds "$seconds"); then
        echo "$name: NOT FOUND in $seconds s"
    else
        line=$(grep -m1 '^FAILED' <<< "$out" || tail -n 1 <<< "$out")
        echo "$name: found in $(($(date +%s) - begin)) s: ${line:0:200}"
        found=$((found + 1))
    fi
done
echo "$found of ${#names[@]} planted bugs were found"
[ "$found" = "${#names[@]}" ]
