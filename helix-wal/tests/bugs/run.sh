#!/usr/bin/env bash
# Plants the bugs of this folder in a copy of the tree, builds the test of the log's threads there
# with a switch for each, and runs it with one after the other alive. Prints a line for each bug:
# which test found it, after how many orders. Fails if one is not found, or if anything fails with
# none alive.
#   run.sh [ROUNDS]   so many thousand orders of each kind
set -euo pipefail
cd "$(dirname "$0")/../../.."
export HELIX_ROUNDS="${1:-10}"

# What is built stays where the test's own build is; the copy has a place of its own in it.
target=${CARGO_TARGET_DIR:-$PWD/target/shuttle}
copy=$target/bugs
rm -rf "$copy"
mkdir -p "$copy"
# What git knows or would take in, as it is now.
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    if [ -e "$file" ]; then printf '%s\0' "$file"; fi
done | tar --null -T - -cf - | tar -xf - -C "$copy"
cp -r testing/sim/bugs/planted "$copy/planted"
sed -i 's/^exclude = \[/exclude = ["planted", /' "$copy/Cargo.toml"
sed -i '/^\[dependencies\]/a planted = { path = "../planted" }' "$copy/helix-wal/Cargo.toml"
for patch in helix-wal/tests/bugs/*.patch; do
    patch -s -p1 -d "$copy" < "$patch" || { echo "$patch does not fit any more"; exit 1; }
done
program=$(cd "$copy" && RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR="$target" \
    cargo test -q -p helix-wal --test it --no-run --message-format json |
    sed -n 's/.*"name":"it".*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)

try() {
    (cd "$copy/helix-wal" && HELIX_BUG=$1 "$program" --test-threads 1 interleavings 2>&1)
}
if ! out=$(try ""); then
    echo "with no bug alive: $out"
    exit 1
fi
mapfile -t names < <(grep -ho 'planted::is("[a-z-]*")' helix-wal/tests/bugs/*.patch |
    cut -d'"' -f2 | sort -u)
found=0
for name in "${names[@]}"; do
    if out=$(try "$name"); then
        echo "$name: NOT FOUND"
    else
        tests=$(sed -n 's/^test interleavings::\(.*\) \.\.\. FAILED$/\1/p' <<< "$out")
        orders=$(sed -n 's/^order \([0-9]*\) failed.*/\1/p' <<< "$out")
        echo "$name: found by $(paste -d' ' <(echo "$tests") <(sed 's/.*/(order &)/' <<< "$orders") | paste -sd, )"
        found=$((found + 1))
    fi
done
echo "$found of ${#names[@]} planted bugs were found"
[ "$found" = "${#names[@]}" ]
