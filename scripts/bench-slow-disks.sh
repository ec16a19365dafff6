#!/usr/bin/env bash
# Compares the log on new segments (--keep 0), for each way to prepare them, with recycled ones, on
# slow disks. Prints medians of RUNS (5) alternating runs: MB/s, its ratio to recycled segments, p99,
# and bytes to disk per byte of records. Groups of 1.6 MB are those of 16 clients.
#   HELIX_BENCH=target/release/helix-bench RUNS=5 SECONDS_EACH=5 scripts/bench-slow-disks.sh
set -euo pipefail
cd "$(dirname "$0")/.."
bench=${HELIX_BENCH:-}
if [ -z "$bench" ]; then
    cargo build --release -p helix-bench
    bench=${CARGO_TARGET_DIR:-target}/release/helix-bench
fi
work=$(mktemp -d ./slow-disks.XXXXXX)
trap 'rm -rf "$work"' EXIT
run() { # RATE SYNC GROUP NAME FLAGS...
    local rate=$1 sync=$2 group=$3 name=$4
    shift 4
    scripts/slow-disk.sh "$rate" "$sync" "$bench" wal --dir "$work/log" --group-size "$group" \
        --duration "${SECONDS_EACH:-5}s" --warmup 1s --json - "$@" 2>/dev/null \
        | jq -c --arg name "$name" '{name: $name, mb: .mb_per_sec, p99: (.latency_us.p99 / 1000),
            bytes: ((.zeroed_bytes / .bytes) + 1)}' >>"$work/results"
    rm -rf "$work/log"
}
for rate in 125 500; do
    for group in 100KiB 1600KiB; do
        : >"$work/results"
        for _ in $(seq "${RUNS:-5}"); do
            run $rate 1000 $group recycled --keep 128MiB
            for prepare in auto zero allocate; do
                run $rate 1000 $group $prepare --keep 0 --prepare $prepare
            done
        done
        echo "$rate MB/s, sync 1 ms, groups of $group"
        jq -rs 'def median: sort | .[length / 2 | floor];
            group_by(.name) | map({name: .[0].name, mb: (map(.mb) | median),
                p99: (map(.p99) | median), bytes: (map(.bytes) | median)})
            | (map(select(.name == "recycled"))[0].mb) as $base | .[]
            | [.name, .mb, .mb / $base, .p99, .bytes] | @tsv' "$work/results" \
            | awk -F'\t' '{ printf "  %-9s %7.1f MB/s  %4.2f  p99 %6.1f ms  %4.2f bytes\n", $1, $2, $3, $4, $5 }'
    done
done
