#!/usr/bin/env bash
# Runs the reference benchmarks against new nodes on this machine, and writes their tables and plots
# into docs/benchmarks.md and docs/benchmarks/.
#   scripts/benchmarks.sh             about 50 minutes after the build
#   scripts/benchmarks.sh --quick     less than ten minutes: two seconds a row, and fewer rows
#   scripts/benchmarks.sh --dry       short runs of debug builds, nothing is written to docs/
# The results stay in target/benchmarks/ as JSON. The nodes use the ten ports after
# HELIX_BENCH_PORT (19400).
# A step that fails or takes too long ends the run, with its output and the ends of the nodes' logs.
# The rows of containers need Docker and the image HELIX_IMAGE (helix:latest): `just compose-local`.
set -Eeuo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/.."

seconds=10 warmup=2s pubsub_seconds=60 profile=release docs=docs step_max=1200 quick=
payloads=256B,512B,1KiB,4KiB,8KiB,16KiB,32KiB,64KiB,128KiB
others=(1 4 16) tls_pairs=3 perf_records=2000000 omb_seconds=30s
case ${1:-} in
    "") ;;
    --quick | --dry)
        seconds=2 warmup=1s pubsub_seconds=2 step_max=150 quick=1
        payloads=256B,1KiB,16KiB,128KiB others=(4) tls_pairs=2 perf_records=500000 omb_seconds=5s
        ;;
    *) echo "usage: scripts/benchmarks.sh [--quick | --dry]" >&2; exit 2 ;;
esac
if [ "${1:-}" = --dry ]; then
    seconds=0.3 warmup=100ms pubsub_seconds=0.3 profile=dev docs=target/benchmarks/docs quick=
    tls_pairs=1 perf_records=2000 omb_seconds=1s
fi
target=${CARGO_TARGET_DIR:-target}
programs=$target/$([ "$profile" = dev ] && echo debug || echo release)
results=$target/benchmarks
port=${HELIX_BENCH_PORT:-19400}
say() { printf '%(%H:%M:%S)T  %s\n' -1 "$*"; }

[ -n "${HELIX_BENCH_NO_BUILD:-}" ] ||
    cargo build --profile "$profile" -p helix-server -p helix-bench -p helix-cli
SECONDS=0
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

work=$(realpath "$(mktemp -d "$target/benchmarks-nodes.XXXXXX")")
# Short, because the path of a socket is.
sockets=$(mktemp -d)
nodes=()
compose=()
stop_nodes() {
    for node in "${nodes[@]}"; do
        kill "$node" 2>/dev/null || true
        wait "$node" 2>/dev/null || true
    done
    nodes=()
    rm -rf "${work:?}"/*
}
stop_compose() {
    [ "${#compose[@]}" = 0 ] || "${compose[@]}" down -v >/dev/null 2>&1 ||
        echo "benchmarks: cannot remove the containers: ${compose[*]} down -v" >&2
    compose=()
}
trap 'stop_compose; stop_nodes; rm -rf "$work" "$sockets"' EXIT
trap 'exit 130' INT TERM
trap 'echo "benchmarks: FAILED in line $LINENO: $BASH_COMMAND" >&2' ERR

# fail CODE MESSAGE: ends the run.
fail() {
    trap - ERR
    local log
    for log in "$work"/*.log; do
        [ ! -s "$log" ] || { echo "the end of $log:" && tail -n 20 "$log"; } >&2
    done
    echo "benchmarks: FAILED after $SECONDS s: $2" >&2
    exit "$1"
}

# bench RESULT SECONDS MODE FLAGS...: one run of at most SECONDS, with its result in RESULT.json.
bench() {
    local result=$results/$1.json seconds_max=$2 code=0
    shift 2
    timeout --foreground -k 10 "$seconds_max" "$programs/helix-bench" "$@" --quiet \
        --json "$result" > "$result.txt" || code=$?
    [ "$code" != 0 ] || return 0
    cat "$result.txt" >&2
    [ "$code" != 124 ] || fail 1 "helix-bench $* took longer than $seconds_max s"
    fail "$code" "helix-bench $* ended with code $code"
}

# run RESULT MODE FLAGS...: one run against the nodes, with its result in RESULT-SETUP.json.
run() {
    local result=$1-$name
    shift
    say "$name: helix-bench $*"
    bench "$result" "$step_max" "$@" --addr "$addr"
}

# answers FLAGS...: waits until the nodes serve.
answers() {
    local deadline=$((SECONDS + 60))
    until timeout 20 "$programs/helix-bench" latency --quiet --ops 1 "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$deadline" ] || fail 1 "the nodes did not serve within 60 s: $*"
        sleep 0.2
    done
}

# start_node ID PORT FLAGS...: one node in the background.
start_node() {
    local id=$1 node_port=$2
    shift 2
    "$programs/helix-server" --node-id "$id" --data-dir "$work/$id" --admin-addr off \
        --listen-addr "127.0.0.1:$node_port" --peer-addr "127.0.0.1:$((node_port + 3))" \
        --default-retention-bytes 512MiB --memory-limit 3GiB --topic default:4 \
        "$@" 2> "$work/$id.log" &
    nodes+=($!)
    echo $! > "$work/pid.$id"
}

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
        start_node "$id" $((port + id)) "${peers[@]}" "$@"
    done
    answers --addr "$addr"
}

# section NAME: replaces the section of the page with standard input.
section() {
    local begin="<!-- benchmarks: $1 -->" text
    text=$(echo "$quiet."; echo; cat)
    grep -qxF "$begin" "$docs/benchmarks.md" || fail 1 "$docs/benchmarks.md has no line $begin"
    TEXT=$text awk -v begin="$begin" '
        $0 == begin { print; print ENVIRON["TEXT"]; skipping = 1 }
        $0 == "<!-- benchmarks: end -->" { skipping = 0 }
        !skipping { print }
    ' "$docs/benchmarks.md" > "$docs/benchmarks.md.new"
    mv "$docs/benchmarks.md.new" "$docs/benchmarks.md"
}

# publish_tables SECTION RESULT...: tables of results, into the section of the page.
publish_tables() {
    local name=$1
    shift
    "$programs/helix-bench" tables "$@" "${limits[@]}" > "$results/tables.md" ||
        fail 1 "cannot make the tables of $*"
    section "$name" < "$results/tables.md"
}

# publish SECTION RESULT...: the same with plots.
publish() {
    local name=$1 plot
    shift
    "$programs/helix-bench" plot "$@" --dir "$docs/benchmarks" > "$results/plots.txt" 2>&1 || {
        cat "$results/plots.txt" >&2
        fail 1 "cannot draw the plots of $*"
    }
    "$programs/helix-bench" tables "$@" "${limits[@]}" > "$results/tables.md" ||
        fail 1 "cannot make the tables of $*"
    for plot in $(sed -n 's/^wrote \(.*\.svg\)$/\1/p' "$results/plots.txt"); do
        plot=${plot##*/}
        echo "![${plot%.svg}](benchmarks/$plot)" >> "$results/tables.md"
    done
    section "$name" < "$results/tables.md"
}

timed=(--duration "${seconds}s" --warmup "$warmup")

# The load of the first report: writes, reads and end to end, over clients and over record sizes.
loads() {
    local clients size
    for clients in 1 4 16; do
        run "write-$clients" write --clients "$clients" "${timed[@]}"
    done
    for clients in "${others[@]}"; do
        run "read-$clients" read --clients "$clients" "${timed[@]}" --offset -2000
        run "e2e-$clients" e2e --clients "$clients" "${timed[@]}"
    done
    for size in 256 4096 16384; do
        run "write-size-$size" write --clients 4 --size $size "${timed[@]}"
    done
}

# The limits first: the log alone, and the ceilings. Tables have the ratio to the lower one.
limits=()
limit() {
    say "limit: helix-bench ${*:2}"
    bench "$1" "$step_max" "${@:2}"
    limits+=(--limit "$results/$1.json")
}
limit wal wal --dir "$work/wal" "${timed[@]}" \
    --keep "$([ "$profile" = dev ] && echo 16MiB || echo 512MiB)"
rm -rf "$work/wal"
for clients in 1 4 16; do
    limit "ceiling-$clients" ceiling --clients "$clients" "${timed[@]}"
done
for clients in "${others[@]}"; do
    limit "ceiling-read-$clients" ceiling --mode read --clients "$clients" "${timed[@]}"
done
for size in 256 4096 16384; do
    limit "ceiling-size-$size" ceiling --clients 4 --size $size "${timed[@]}"
done

pubsub=(pubsub --payload "$payloads" --duration "${pubsub_seconds}s" --warmup "$warmup")
start memory 1 --storage memory --listen-socket "unix:$sockets/memory"
run pubsub "${pubsub[@]}"
run sequencer sequencer "${timed[@]}" --socket "unix:$sockets/memory" --embedded
loads
start durable 1 --listen-socket "unix:$sockets/durable"
run pubsub "${pubsub[@]}"
run sequencer sequencer "${timed[@]}" --socket "unix:$sockets/durable" --embedded-dir "$work"
loads
counts=100,1000,10000
if [ "$(ulimit -Hn)" != unlimited ] && [ "$(ulimit -Hn)" -lt 10100 ]; then
    say "note: no row of 10,000 connections, the limit of open files is $(ulimit -Hn)"
    counts=100,1000
fi
[ "$profile" = release ] || counts=10,20
run connections connections --count $counts "${timed[@]}"
run perf perf --topic perf --create-topic 1 --num-records "$perf_records" --record-size 1024 \
    --throughput -1 --batch-size 65536
run omb omb helix-bench/workloads/1-topic-16-partitions-1kb.yaml --duration "$omb_seconds" \
    --warmup "$warmup"

# Two nodes of their own clusters, one of them with TLS, measured in turns.
tls=$work/tls
start plain 1
plain=$addr encrypted=127.0.0.1:$((port + 7))
"$programs/helix" cert ca --dir "$tls" > "$results/cert.txt"
"$programs/helix" cert node 2 --host 127.0.0.1 --ca-dir "$tls" --dir "$tls" >> "$results/cert.txt"
start_node 2 $((port + 7)) --tls-cert "$tls/node-2.pem" --tls-key "$tls/node-2.key" \
    --tls-ca "$tls/ca.pem"
answers --addr "$encrypted" --tls-ca "$tls/ca.pem"
# one_side SETUP PAIR
one_side() {
    name=$1 addr=$plain
    local trust=() count=200
    [ "$name" = plain ] || { addr=$encrypted; trust=(--tls-ca "$tls/ca.pem"); }
    [ "$profile" = release ] || count=20
    run "tls-write-$2" write --clients 4 "${timed[@]}" "${trust[@]}"
    run "tls-stream-$2" write --clients 4 --stream --in-flight 16 "${timed[@]}" "${trust[@]}"
    [ "$2" != 1 ] ||
        run "tls-connections-$2" connections --count $count "${timed[@]}" "${trust[@]}"
}
for pair in $(seq "$tls_pairs"); do
    # The first side alternates, because the speed of the host drifts.
    sides=(plain tls)
    [ $((pair % 2)) = 1 ] || sides=(tls plain)
    for side in "${sides[@]}"; do one_side "$side" "$pair"; done
done

groups=(--runs 5 --duration "${seconds}s")
[ -z "$quick" ] || groups=(--runs 2 --leaves 30 --duration "${seconds}s")
if [ "$profile" != release ]; then
    groups=(--runs 1 --duration 1200ms --records 2000 --committers 4 --leaves 3 --groups 4
        --members 3 --heartbeat 400ms --empty-groups 100)
fi
# Its parts wait for session timeouts.
step_max=$((2 * step_max))
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

# Three nodes in containers; a note where that is not possible.
image=${HELIX_IMAGE:-helix:latest} no_compose=
if ! timeout 20 docker info >/dev/null 2>&1; then
    no_compose="no Docker engine responds"
elif ! docker compose version >/dev/null 2>&1; then
    no_compose="docker compose is not installed"
elif ! docker image inspect "$image" >/dev/null 2>&1; then
    no_compose="there is no image $image"
else
    export HELIX_IMAGE=$image HELIX_PORT_1=$((port + 1)) HELIX_PORT_2=$((port + 2))
    export HELIX_PORT_3=$((port + 3)) HELIX_ADMIN_PORT_1=$((port + 4))
    export HELIX_ADMIN_PORT_2=$((port + 5)) HELIX_ADMIN_PORT_3=$((port + 6))
    compose=(docker compose -p "helix-benchmarks-$$")
    name=compose addr=localhost:$HELIX_PORT_1,localhost:$HELIX_PORT_2,localhost:$HELIX_PORT_3
    timeout 120 "${compose[@]}" up -d --no-build > "$results/compose.txt" 2>&1 || {
        cat "$results/compose.txt" >&2
        fail 1 "the containers did not start"
    }
    answers --addr "$addr"
    for clients in 1 4 16; do
        run "containers-write-$clients" write --clients "$clients" "${timed[@]}"
    done
    stop_compose
fi

publish pubsub "$results"/pubsub-*.json
publish sequencer "$results"/sequencer-*.json "$results"/check-*.json
publish connections "$results"/connections-*.json
publish group "$results"/group-*.json
publish write "$results"/write-[0-9]*.json
publish write-sizes "$results"/write-4-*.json "$results"/write-size-*.json
publish read "$results"/read-*.json
publish e2e "$results"/e2e-*.json
publish_tables tls "$results"/tls-*-plain.json "$results"/tls-*-tls.json
if [ -z "$no_compose" ]; then
    publish_tables compose "$results"/containers-*.json
else
    say "note: no rows of nodes in containers: $no_compose"
    echo "Not measured: $no_compose." | section compose
fi
for format in perf omb; do
    { echo '```'; cat "$results/$format-durable.json.txt"; echo '```'; } | section "$format"
done
reported=("$results"/{pubsub,sequencer,check,connections,write,read,e2e}-*.json)
"$programs/helix-bench" report "${reported[@]}" "${limits[@]}" --quiet -o "$results/report.html" ||
    fail 1 "cannot write the report"
say "wrote $docs/benchmarks.md, $docs/benchmarks/ and $results/report.html"
say "the log alone: $results/wal.json.txt"
say "took $SECONDS s without the build"
[ -z "$quick" ] || [ "$SECONDS" -lt 600 ] ||
    say "warning: --quick took more than ten minutes; the machine is slow or was busy"
