#!/usr/bin/env bash
# Measures what docs/benchmarks.md shows first, draws it into docs/benchmarks/ and prints its table.
#   scripts/pictures.sh [--parts peers,sizes,faults,facts,draw] [--rounds N] [--seconds S] [--quick]
# The results are JSON files in target/pictures/. Drawing needs python3 and installs matplotlib.
#
# peers: appends of Helix beside other logs on this machine, in turns, with the same load: records of
# 1 KiB in batches of 100, each client with one batch in flight. Redis (streams) and NATS (JetStream)
# are measured if redis-server and nats-server are installed; a program that is missing is said. The
# ceiling is our service that checks batches and stores nothing, with Helix's client; the table has
# each ratio to it. Each server runs alone, and its data are deleted after its turn. Each turn writes
# with 1, 4 and 16 clients as fast as possible, then with 16 clients at a part of that rate (an open
# loop, latency from the intended send).
# sizes: throughput over the size of records. faults: a load through kill -9 and a rolling restart.
# facts: failover, start, memory, bytes written, and many partitions on one node.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

rounds=2 seconds=5 shares=(0.1 0.3 0.5 0.7 0.9) parts=peers,sizes,faults,facts,draw
sizes=(64 256 1024 4096 16384 65536) load_seconds=40 repeats=5 partitions=(10000 100000 999999)
while [ $# -gt 0 ]; do
    case $1 in
        --rounds) rounds=$2; shift ;;
        --seconds) seconds=$2; shift ;;
        --parts) parts=$2; shift ;;
        --quick)
            rounds=1 seconds=2 shares=(0.5) sizes=(256 4096) repeats=2 partitions=(1000 10000)
            ;;
        *) sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
    shift
done
target=${CARGO_TARGET_DIR:-target}
programs=${HELIX_PROGRAMS:-$target/dist}
results=$(realpath -m "$target/pictures")
port=${HELIX_PICTURES_PORT:-19700}
say() { printf '%(%H:%M:%S)T  %s\n' -1 "$*"; }

for program in helix helix-server helix-bench helix-chaos; do
    [ -x "$programs/$program" ] || cargo build --profile dist -p helix-server -p helix-cli \
        -p helix-bench -p helix-chaos --bins
done
cargo build -q --release --locked --manifest-path testing/peers/Cargo.toml --target-dir "$target/peers-build"
load=$target/peers-build/release/helix-peers

mkdir -p "$results"
work=$(realpath "$(mktemp -d "$target/pictures-data.XXXXXX")")
pids=() node_pids=() peers=()
# gone PID: waits until a process has ended.
gone() {
    while kill -0 "$1" 2>/dev/null; do sleep 0.01; done
}
stop() {
    local pid
    for pid in "${pids[@]}"; do kill -9 "$pid" 2>/dev/null || true; done
    for pid in "${pids[@]}"; do gone "$pid"; done
    pids=()
    rm -rf "${work:?}"/*
}
trap 'stop; rm -rf "$work"' EXIT

# serve COMMAND...: starts a server in the background.
serve() {
    "$@" > "$work/log.${#pids[@]}" 2>&1 &
    pids+=($!)
    # Otherwise the shell reports its end.
    disown $!
}

# reachable PORT: waits until a server listens.
reachable() {
    local tries
    for ((tries = 0; tries < 200; tries++)); do
        if (exec 3<> "/dev/tcp/127.0.0.1/$1") 2>/dev/null; then return 0; fi
        sleep 0.1
    done
    echo "pictures: nothing listens at port $1:" >&2
    tail -n 20 "$work"/log.* >&2
    return 1
}

addr_of() {
    local addr=127.0.0.1:$port
    [[ $1 =~ ^(ceiling|helix)$ ]] || addr=$addr,127.0.0.1:$((port + 1)),127.0.0.1:$((port + 2))
    echo "$addr"
}

# now_ms: time of the monotonic clock.
now_ms() { awk '{ printf "%.0f", $1 * 1000 }' /proc/uptime; }

# --- Setups: each starts its servers, and has a function that runs one load ---

setups=(ceiling helix helix-three-nodes)
if command -v redis-server >/dev/null; then
    setups+=(redis-always redis-everysec)
else
    say "note: Redis is not measured, redis-server is not installed"
fi
if command -v nats-server >/dev/null; then
    setups+=(jetstream)
    # Releases before 2.10 do not know the value.
    printf 'jetstream { store_dir: "%s", sync_interval: always }\n' "$work/js" > "$work/always.conf"
    if nats-server -t -c "$work/always.conf" >/dev/null 2>&1; then
        setups+=(jetstream-always)
    else
        say "note: JetStream is not measured with syncs, $(nats-server --version) does not have sync_interval: always"
    fi
else
    say "note: JetStream is not measured, nats-server is not installed"
fi
# start_node ID [FLAGS...]: one node of Helix, which may have data.
start_node() {
    local id=$1
    shift
    serve "$programs/helix-server" --node-id "$id" --data-dir "$work/$id" --admin-addr off \
        --listen-addr "127.0.0.1:$((port + id - 1))" --peer-addr "127.0.0.1:$((port + 10 + id))" \
        --topic default:1 --default-retention-bytes 512MiB "$@"
    node_pids[id]=${pids[-1]}
}

start() {
    local id
    stop
    peers=()
    case $1 in
        ceiling) serve "$programs/helix-bench" ceiling --serve "127.0.0.1:$port" ;;
        helix) start_node 1 ;;
        helix-three-nodes)
            for id in 1 2 3; do peers+=(--peer "$id=127.0.0.1:$((port + 10 + id))"); done
            for id in 1 2 3; do start_node "$id" "${peers[@]}"; done
            ;;
        redis-*)
            serve redis-server --port "$port" --bind 127.0.0.1 --dir "$work" --save '' \
                --appendonly yes --appendfsync "${1#redis-}"
            ;;
        jetstream | jetstream-always)
            {
                echo "listen: \"127.0.0.1:$port\""
                echo "jetstream { store_dir: \"$work/js\""
                [ "$1" = jetstream ] || echo 'sync_interval: always'
                echo '}'
            } > "$work/nats.conf"
            serve nats-server -c "$work/nats.conf"
            ;;
    esac
    reachable "$port"
}

# run SETUP CLIENTS NAME [RATE]: one load, into NAME.json.
run() {
    local setup=$1 clients=$2 json=$results/$3.json rate=()
    [ -z "${4:-}" ] || rate=(--rate "$4")
    case $setup in
        ceiling | helix | helix-three-nodes)
            "$programs/helix-bench" write --quiet --addr "$(addr_of "$setup")" --clients "$clients" \
                --duration "${seconds}s" --warmup 1s --partition 0 "${rate[@]}" --json "$json" \
                > "$work/bench.txt" 2>&1 || { cat "$work/bench.txt" >&2; return 1; }
            ;;
        redis-*)
            "$load" redis --addr "127.0.0.1:$port" --clients "$clients" --seconds "$seconds" \
                --warmup 1 --label "$setup" "${rate[@]}" --json "$json" > "$work/bench.txt"
            ;;
        jetstream*)
            "$load" jetstream --addr "127.0.0.1:$port" --clients "$clients" --seconds "$seconds" \
                --warmup 1 --label "$setup" "${rate[@]}" --json "$json" > "$work/bench.txt"
            ;;
    esac
}

# turn SETUP ROUND: all loads of one setup.
turn() {
    local setup=$1 round=$2 clients part most rate
    start "$setup"
    # A log that recycles its segments, and a server that has its memory.
    run "$setup" 4 warm-up
    for clients in 1 4 16; do
        run "$setup" "$clients" "$setup.closed-$clients.$round"
    done
    most=$(awk -F'[:,]' '/^  "records_per_sec"/ { print $2 }' "$results/$setup.closed-16.$round.json")
    # The ceiling is a limit, and not a log that is compared.
    [ "$setup" != ceiling ] || { stop; return; }
    for part in "${shares[@]}"; do
        rate=$(awk "BEGIN { printf \"%.0f\", $most * $part }")
        run "$setup" 16 "$setup.open-$part.$round" "$rate"
    done
    stop
    rm -f "$results/warm-up.json"
}

measure_peers() {
    local round setup
    rm -f "$results"/*.closed-* "$results"/*.open-*
    for ((round = 1; round <= rounds; round++)); do
        for setup in "${setups[@]}"; do
            say "round $round: $setup"
            turn "$setup" "$round" || say "FAILED: $setup, round $round"
        done
    done
}

measure_sizes() {
    local setup size
    for setup in helix helix-three-nodes; do
        start "$setup"
        run "$setup" 4 warm-up
        for size in "${sizes[@]}"; do
            say "sizes: $setup, $size bytes"
            "$programs/helix-bench" write --quiet --addr "$(addr_of "$setup")" --clients 4 \
                --size "$size" --batch-size "$((size < 102400 ? 102400 / size : 1))" \
                --duration "${seconds}s" --warmup 1s --partition 0 \
                --json "$results/$setup.size-$size.json" > "$work/bench.txt" 2>&1
        done
        stop
    done
    rm -f "$results/warm-up.json"
}

leader() {
    "$programs/helix" --addr "$(addr_of three)" topic describe default -o json |
        awk -F'[:,]' '/"node_id"/ { print $2 + 0; exit }'
}

# mark WHAT: notes a time of the run.
mark() {
    marks="$marks${marks:+, }{\"at_seconds\": $(awk "BEGIN { print ($(now_ms) - $began) / 1000 }"), \"what\": \"$1\"}"
    say "faults: $1"
}

# A third of the highest rate, so that what waited can be written beside what arrives.
measure_faults() {
    local began marks='' id bench most rate killed
    start helix-three-nodes
    run helix-three-nodes 16 faults-most
    most=$(awk -F'[:,]' '/^  "records_per_sec"/ { print $2 }' "$results/faults-most.json")
    rate=$(awk "BEGIN { printf \"%.0f\", $most / 3 }")
    began=$(now_ms)
    "$programs/helix-bench" write --quiet --addr "$(addr_of three)" --clients 16 --rate "$rate" \
        --duration "${load_seconds}s" --warmup 0s --partition 0 --json "$results/faults.json" \
        > "$work/bench.txt" 2>&1 &
    bench=$!
    sleep 8
    killed=$(leader)
    kill -9 "${node_pids[killed]}"
    mark "kill -9, leader"
    sleep 4
    start_node "$killed" "${peers[@]}"
    mark restart
    sleep 6
    for id in 1 2 3; do
        kill "${node_pids[id]}"
        gone "${node_pids[id]}"
        mark "node $id"
        start_node "$id" "${peers[@]}"
        sleep 5
    done
    wait "$bench" || { cat "$work/bench.txt" >&2; return 1; }
    echo "[$marks]" > "$results/faults-marks.json"
    rm -f "$results/faults-most.json"
    stop
}

# join NUMBERS...: as a JSON list.
join() { local IFS=,; echo "[$*]"; }

# first_ack SINCE: waits until a node takes an append, and prints the ms since then.
first_ack() {
    until "$programs/helix-bench" latency --quiet --ops 1 --addr "127.0.0.1:$port" \
        > "$work/first.txt" 2>&1; do sleep 0.01; done
    echo $(($(now_ms) - $1))
}

resident_mib() { awk '/^VmRSS/ { printf "%.1f", $2 / 1024 }' "/proc/$1/status"; }
written() { awk '/^write_bytes/ { print $2 }' "/proc/$1/io"; }

measure_facts() {
    local id since before ratios=() starts=() idle=() rows=() count made create mib p50 p99
    start helix-three-nodes
    reachable $((port + 2))
    sleep 5
    for id in 1 2 3; do idle+=("$(resident_mib "${node_pids[id]}")"); done
    start helix
    run helix 4 warm-up
    for ((made = 0; made < repeats; made++)); do
        before=$(written "${node_pids[1]}")
        run helix 4 facts
        ratios+=("$(awk -F'[:,]' -v from="$before" -v to="$(written "${node_pids[1]}")" '
            /^  "bytes"/ { bytes = $2 }
            /^  "warmup"/ { warm = 1 }
            warm && /"records"/ { warm_up = $2; warm = 0 }
            END { printf "%.3f", (to - from) / (bytes + warm_up * 1024) }' "$results/facts.json")")
        kill -9 "${node_pids[1]}"
        gone "${node_pids[1]}"
        since=$(now_ms)
        start_node 1
        starts+=("$(first_ack "$since")")
    done
    stop
    say "facts: failover"
    "$programs/helix-chaos" failover --kills "$((repeats * 4))" --json > "$work/failover.json" \
        2> "$work/chaos.txt"
    p50=$(grep -o '"p50_ms":[0-9]*' "$work/failover.json" | cut -d: -f2)
    p99=$(grep -o '"p99_ms":[0-9]*' "$work/failover.json" | cut -d: -f2)
    for count in "${partitions[@]}"; do
        say "facts: $count partitions"
        start helix
        since=$(now_ms)
        for ((made = 0; made < count; made += 100000)); do
            "$programs/helix" --addr "127.0.0.1:$port" topic create "many-$made" -q \
                --partitions "$((count - made < 100000 ? count - made : 100000))" > /dev/null
        done
        create=$(($(now_ms) - since))
        mib=$(resident_mib "${node_pids[1]}")
        kill -9 "${node_pids[1]}"
        gone "${node_pids[1]}"
        since=$(now_ms)
        start_node 1
        rows+=("{\"partitions\": $count, \"create_s\": $(awk "BEGIN { print $create / 1000 }"), \"restart_s\": $(awk "BEGIN { print $(first_ack "$since") / 1000 }"), \"mib\": $mib}")
    done
    stop
    cat > "$results/facts.json" <<END
{"failover_ms": [$p50, $p50, $p99], "start_ms": $(join "${starts[@]}"), "idle_mib": $(join "${idle[@]}"),
 "written_per_byte": $(join "${ratios[@]}"), "partitions": $(join "${rows[@]}")}
END
    rm -f "$results/warm-up.json"
}

measure_draw() {
    local venv=$target/pictures-venv
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    "$venv/bin/pip" install -q 'matplotlib>=3.9,<4'
    "$venv/bin/python" scripts/pictures.py "$results" docs/benchmarks
}

{
    echo "$(nproc) CPUs ($(sed -n '/^model name/{s/^[^:]*: *//p;q}' /proc/cpuinfo)), $(date -u +%F)"
    "$programs/helix-server" --version
    redis-server --version 2>/dev/null | cut -d' ' -f1-3 || true
    nats-server --version 2>/dev/null || true
} > "$results/machine.txt"
for part in ${parts//,/ }; do
    "measure_$part"
done
