#!/usr/bin/env bash
# Plants each bug of bugs/ in a copy of the tree, builds it, and runs seeds until one finds it.
# Prints a line for each bug; fails if one is not found in its time.
#   bugs.sh [--seconds S] [NAME...]     S seconds of runs for each bug, two seeds at a time
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=120
names=()
while [ $# -gt 0 ]; do
    case "$1" in
        --seconds) seconds=$2; shift 2 ;;
        *) names+=("$1"); shift ;;
    esac
done
if [ ${#names[@]} = 0 ]; then
    for patch in sim/bugs/*.patch; do names+=("$(basename "$patch" .patch)"); done
fi

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
target=${CARGO_TARGET_DIR:-$PWD/target}/bugs
# What git knows or would take in, as it is now.
git ls-files -z --cached --others --exclude-standard | tar --null -T - -cf - | tar -xf - -C "$copy"

found=0
for name in "${names[@]}"; do
    patch -s -p1 -d "$copy" < "sim/bugs/$name.patch"
    if ! (cd "$copy/sim" && CARGO_TARGET_DIR="$target" cargo build -q 2> "$copy/build.log"); then
        echo "$name: DOES NOT BUILD"
        tail -n 20 "$copy/build.log"
        patch -s -R -p1 -d "$copy" < "sim/bugs/$name.patch"
        continue
    fi
    begin=$(date +%s)
    if out=$("$target/debug/helix-sim" --from 1 --seconds "$seconds" 2>&1); then
        echo "$name: NOT FOUND in $seconds s"
    else
        line=$(grep -m1 '^FAILED seed' <<< "$out" || tail -n 1 <<< "$out")
        echo "$name: found in $(($(date +%s) - begin)) s: ${line:0:160}"
        found=$((found + 1))
    fi
    patch -s -R -p1 -d "$copy" < "sim/bugs/$name.patch"
done
echo "$found of ${#names[@]} planted bugs were found"
[ "$found" = "${#names[@]}" ]
