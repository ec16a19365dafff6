#!/usr/bin/env bash
# Makes a copy of the tree in which all bugs of this folder are planted, each behind a switch: the
# one that HELIX_BUG names is alive.
#   plant.sh FOLDER
set -euo pipefail
copy=$(realpath -m "$1")
cd "$(dirname "$0../.."

rm -rf "$copy"
mkdir -p "$copy"
# What git knows or would take in, as it is now.
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    if [ -e "$file" ]; then printf '%s\0' "$file"; fi
done | tar --null -T - -cf - | tar -xf - -C "$copy"
cp -r testing/sim/bugs/planted "$copy/planted"
for crate in helix-wal helix-server helix-client; do
    sed -i '/^\[dependencies\]/a planted = { path = "../planted" }' "$copy/$crate/Cargo.toml"
done
for patch in testing/sim/bugs/*.patch; do
    patch -s -p1 -d "$copy" < "$patch" || { echo "$patch does not fit any more"; exit 1; }
done
