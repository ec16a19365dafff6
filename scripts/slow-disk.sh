#!/usr/bin/env bash
# Runs a command whose disk writes at most MB_PER_S and takes at least SYNC_US for a sync:
#   scripts/slow-disk.sh 125 1000 target/dist/helix-bench wal --keep 0
# The command and its children share the disk. Needs a C compiler and glibc; no privileges. A disk
# that is slower by itself stays so.
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: scripts/slow-disk.sh MB_PER_S SYNC_US COMMAND..." >&2
    exit 2
fi
here=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cc -O2 -shared -fPIC -o "$work/slow-disk.so" "$here/slow-disk.c" -ldl
truncate -s 8 "$work/clock"
export HELIX_DISK_RATE=$(($1 * 1000000)) HELIX_DISK_SYNC_US=$2 HELIX_DISK_CLOCK=$work/clock
shift 2
LD_PRELOAD=$work/slow-disk.so "$@"
