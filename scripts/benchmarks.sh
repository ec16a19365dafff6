#!/usr/bin/env bash
# Runs the reference benchmarks against new nodes on this machine, and writes their tables and plots
# into docs/benchmarks.md and docs/benchmarks/.
#   scripts/benchmarks.sh             about 40 minutes after the build
#   scripts/benchmarks.sh --quick     about ten minutes: two seconds a row
#   scripts/benchmarks.sh --dry       short runs of debug builds, nothing is written to docs/
# The results stay in target/benchmarks/ as JSON. HELIX_BENCH_PORT (19400) is the first of ten ports.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=10 warmup=2s pubsub_seconds=60 profile=release docs=docs
case ${1:-} in
    "") ;;
    --quick) seconds=2 warmup=1s pubsub_seconds=2 ;;
    --dry) seconds=0.3 warmup=100ms pubsub_seconds=0.3 profile=dev docs=target/benchmarks/docs ;;
    *) echo "usage: scripts/benchmarks.sh [--quick | --dry]" >&2; exit 2 ;;
esac
target=${CARGO_TARGET_DIR:-target}
programs=$target/$([ "$profile" = dev ] && echo debug || echo release)
results=$target/benchmarks
port=${HELIX_BENCH_PORT:-19400}
say() { printf '%(%H:%M:%S)T  %s\n' -1 "$*"; }

[ -n "${HELIX_BENCH_NO_BUILD:-}" ] || cargo build --profile "$profile" -p helix-server -p helix-bench
rm -rf "$results"
mkdir -p "$results" "$docs/benchmarks"
[ "$docs" = docs ] || cp docs/benchmarks.md "$docs/"

# A table of a busy machine says so.
load=$(cut -d' ' -f1 /proc/loadavg)
quiet="load average before the run: $load"
if awk -v load="$load" 'BEGIN { exit !(load > 0.5) }'; then
    quiet="**The machine was busy**: $quiet"
    say "warning: the machine is busy, load average $load; the figures will be too low"
fi

work=$(mktemp -d "$target/benchmarks-nodes.XXXXXX")
nodes=()
stop_nodes() {
    for node in "${nodes[@]}"; do
        kill "$node" 2>/dev/null || true
        wait "$node" 2>/dev/null || true
    done
    nodes=()
    rm -rf "${work:?}"/*
}
trap 'stop_nodes; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

# start NAME COUNT FLAGS...: COUNT new nodes; `addr` is their addresses, `name` their setup.
start() {
    stop_nodes
    name=$1
    local count=$2 id peers=()
    shift 2
    addr=
    for id in $(seq "$count"); do
        addr=$addr${addr:+,}127.0.0.1:$((port + id))
        [ "$count" = 1 ] || peers+=(--peer "$id=127.0.0.1:$((port + 3 + id))")
    done
    for id in $(seq "$count"); do
        "$programs/helix-server" --node-id "$id" --data-dir "$work/$id" --admin-addr off \
            --listen-addr "127.0.0.1:$((port + id))" --peer-addr "127.0.0.1:$((port + 3 + id))" \
            --default-retention-bytes 512MiB --memory-limit 3GiB --topic default:4 \
            "${peers[@]}" "$@" \
            2> "$work/$id.log" &
        nodes+=($!)
        echo $! > "$work/pid.$id"
    done
    local deadline=$((SECONDS + 60))
    until "$programs/helix-bench" latency --quiet --addr "$addr" --ops 1 >/dev/null 2>&1; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            echo "benchmarks: the nodes did not start; the ends of their logs:" >&2
            tail -n 20 "$work"/*.log >&2
            exit 1
        fi
        sleep 0.2
    done
}

# run RESULT MODE FLAGS...: one run against the nodes, with its result in RESULT-SETUP.json.
run() {
    local result=$results/$1-$name.json
    shift
    say "$name: helix-bench $*"
    "$programs/helix-bench" "$@" --quiet --addr "$addr" --json "$result" > "$result.txt" || {
        local code=$?
        cat "$result.txt" >&2
        echo "benchmarks: helix-bench $* ended with code $code" >&2
        exit "$code"
    }
}

# publish SECTION RESULT...: tables and plots of results, into the section of the page.
publish() {
    local section=$1 text plots plot
    shift
    plots=$("$programs/helix-bench" plot "$@" --dir "$docs/benchmarks" 2>&1 |
        sed -n 's/^wrote \(.*\.svg\)$/\1/p')
    text=$(
        echo "$quiet."
        echo
        "$programs/helix-bench" tables "$@" "${limits[@]}"
        for plot in $plots; do
            echo "![$(basename "$plot" .svg)](benchmarks/$(basename "$plot"))"
        done
    )
    # Replaces what is between the section's marks.
    TEXT=$text awk -v begin="<!-- benchmarks: $section -->" '
        $0 == begin { print; print ENVIRON["TEXT"]; skipping = 1 }
        $0 == "<!-- benchmarks: end -->" { skipping = 0 }
        !skipping { print }
    ' "$docs/benchmarks.md" > "$docs/benchmarks.md.new"
    mv "$docs/benchmarks.md.new" "$docs/benchmarks.md"
}

# The load of the first report: writes, reads and end to end, over clients and over record sizes.
loads() {
    local clients size
    for clients in 1 4 16; do
        run "write-$clients" write --clients "$clients" --duration "${seconds}s" --warmup $warmup
        run "read-$clients" read --clients "$clients" --duration "${seconds}s" --warmup $warmup \
            --offset -2000
        run "e2e-$clients" e2e --clients "$clients" --duration "${seconds}s" --warmup $warmup
    done
    for size in 256 4096 16384; do
        run "write-size-$size" write --clients 4 --size $size --duration "${seconds}s" \
            --warmup $warmup
    done
}

# The limits first: the log alone, and the ceilings. Tables have the ratio to the lower one.
limits=()
limit() {
    local result=$results/$1.json
    shift
    say "limit: helix-bench $*"
    "$programs/helix-bench" "$@" --quiet --json "$result" > "$result.txt"
    limits+=(--limit "$result")
}
limit wal wal --dir "$work/wal" --duration "${seconds}s" --warmup $warmup \
    --keep "$([ "$profile" = dev ] && echo 16MiB || echo 512MiB)"
rm -rf "$work/wal"
timed=(--duration "${seconds}s" --warmup $warmup)
for clients in 1 4 16; do
    limit "ceiling-$clients" ceiling --clients "$clients" "${timed[@]}"
    limit "ceiling-read-$clients" ceiling --mode read --clients "$clients" "${timed[@]}"
done
for size in 256 4096 16384; do
    limit "ceiling-size-$size" ceiling --clients 4 --size $size "${timed[@]}"
done

start memory 1 --storage memory
run pubsub pubsub --duration "${pubsub_seconds}s" --warmup $warmup
run sequencer sequencer --duration "${seconds}s" --warmup $warmup
loads
start durable 1
run pubsub pubsub --duration "${pubsub_seconds}s" --warmup $warmup
run sequencer sequencer --duration "${seconds}s" --warmup $warmup
loads
counts=100,1000,10000
if [ "$(ulimit -Hn)" != unlimited ] && [ "$(ulimit -Hn)" -lt 10100 ]; then
    say "note: no row of 10,000 connections, the limit of open files is $(ulimit -Hn)"
    counts=100,1000
fi
[ "$profile" = release ] || counts=10,20
run connections connections --count $counts --duration "${seconds}s" --warmup $warmup
groups=(--runs 5 --duration "${seconds}s")
if [ "$profile" != release ]; then
    groups=(--runs 1 --duration 1200ms --records 2000 --committers 4 --leaves 3 --groups 4 --members 3
        --heartbeat 400ms --empty-groups 100)
fi
start groups 1
run group group "${groups[@]}"
# The commands see only the environment; the node that is restarted is not this shell's child.
cat > "$work/restart" <<END
kill -9 \$(cat "$work/pid.1")
# Until its ports are closed; this script is its parent and may not have waited for it.
while grep -q '^State:.[^Z]' "/proc/\$(cat "$work/pid.1")/status" 2>/dev/null; do sleep 0.01; done
"$programs/helix-server" --node-id 1 --data-dir "$work/1" --admin-addr off --memory-limit 3GiB \\
    --listen-addr "$addr" --peer-addr "127.0.0.1:$((port + 4))" 2>> "$work/1.log" &
echo \$! > "$work/pid.1"
END
run group-restart group --parts restart --restart-command "sh $work/restart" "${groups[@]}"
nodes+=("$(cat "$work/pid.1")")
start three-shards 3 --shards 3
run group-coordinator group --parts coordinator "${groups[@]}" \
    --kill-command "kill -9 \$(cat $work/pid.\$HELIX_NODE_ID)"
start three-nodes 3
run check sequencer --check
loads
stop_nodes

publish pubsub "$results"/pubsub-*.json
publish sequencer "$results"/sequencer-*.json "$results"/check-*.json
publish connections "$results"/connections-*.json
publish group "$results"/group-*.json
publish write "$results"/write-[0-9]*.json
publish write-sizes "$results"/write-4-*.json "$results"/write-size-*.json
publish read "$results"/read-*.json
publish e2e "$results"/e2e-*.json
"$programs/helix-bench" report "$results"/{pubsub,sequencer,check,connections,write,read,e2e}-*.json \
    "${limits[@]}" --quiet -o "$results/report.html"
say "wrote $docs/benchmarks.md, $results/report.html and $docs/benchmarks/; the log alone: $results/wal.json.txt"
