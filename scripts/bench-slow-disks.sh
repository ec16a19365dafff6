#!/usr/bin/env bash
# Compares the log on new segments (--keep 0), for each way to prepare them, with recycled ones, on
# slow disks. Prints medians of RUNS (5) alternating runs: MB/s, its ratio to recycled segments,
# p99, and bytes to disk per byte of records. Groups of 1.6 MB are those of 16 clients.
#   RUNS=5 SECONDS_EACH=5 scripts/bench-slow-disks.sh     less than ten minutes after the build
# HELIX_BENCH_NO_BUILD=1 uses the program of the last build. scripts/goals.sh measures whole nodes.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
bench=$target/dist/helix-bench
[ -n "${HELIX_BENCH_NO_BUILD:-}" ] || cargo build --profile dist -p helix-bench
if [ ! -x "$bench" ]; then
    echo "bench-slow-disks: there is no $bench; run without HELIX_BENCH_NO_BUILD" >&2
    exit 1
fi
work=$(mktemp -d "$target/slow-disks.XXXXXX")
trap 'rm -rf "$work"' EXIT
run() { # RATE GROUP NAME FLAGS...
    local rate=$1 group=$2 name=$3
    shift 3
    scripts/slow-disk.sh "$rate" 1000 "$bench" wal --dir "$work/log" --group-size "$group" \
        --duration "${SECONDS_EACH:-5}s" --warmup 1s --quiet --json "$work/result.json" "$@" \
        > "$work/result.txt" 2>&1 || {
        cat "$work/result.txt" >&2
        exit 1
    }
    rm -rf "$work/log"
    awk -f scripts/numbers.awk "$work/result.json" | awk -v name="$name" '
        { value[$1] = $2 }
        END {
            print name, value["mb_per_sec"], value["latency_us.p99"] / 1000,
                value["zeroed_bytes"] / value["bytes"] + 1
        }
    ' >> "$work/runs"
}
median() { # NAME COLUMN
    awk -v name="$1" -v column="$2" '$1 == name { print $column }' "$work/runs" | sort -g | awk '
        { value[NR] = $1 }
        END { print (value[int((NR + 1) / 2)] + value[int(NR / 2) + 1]) / 2 }
    '
}
for rate in 125 500; do
    for group in 100KiB 1600KiB; do
        : > "$work/runs"
        for _ in $(seq "${RUNS:-5}"); do
            run $rate $group recycled --keep 128MiB
            for prepare in auto zero allocate; do
                run $rate $group $prepare --keep 0 --prepare $prepare
            done
        done
        echo "$rate MB/s, sync 1 ms, groups of $group"
        for name in recycled auto zero allocate; do
            echo "$name $(median $name 2) $(median recycled 2) $(median $name 3) $(median $name 4)"
        done | awk '{
            printf "  %-9s %7.1f MB/s  %4.2f  p99 %6.1f ms  %4.2f bytes\n", $1, $2, $2 / $3, $4, $5
        }'
    done
done
