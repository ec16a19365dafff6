#!/usr/bin/env bash
# Runs the reference benchmarks against new nodes on this machine, and writes their tables and plots
# into docs/benchmarks/reference.md and docs/benchmarks/.
#   scripts/benchmarks.sh             about an hour after the build
#   scripts/benchmarks.sh --quick     less than ten minutes: two seconds a row, and fewer rows
#   scripts/benchmarks.sh --dry       short runs of debug builds, nothing is written to docs/
#   scripts/benchmarks.sh --publish   only writes the results of the last run into docs/ again
# The results stay in target/benchmarks/ as JSON. The nodes use the ten ports after
# HELIX_BENCH_PORT (19400). HELIX_BENCH_NO_BUILD=1 uses the programs of the last build.
# A row that fails or takes too long is noted in its section, the others go on, and the script ends
# with 1. The rows of containers need Docker and the image HELIX_IMAGE (helix:latest), which
# `just compose-local` makes.
set -Eeuo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/.."

seconds=10 warmup=2s pubsub_seconds=20 profile=dist docs=docs step_max=1200 run_max=14400 start_max=60
payloads=256B,512B,1KiB,4KiB,8KiB,16KiB,32KiB,64KiB,128KiB stream_sizes=64,256,1400
readers=(1 4 16) counts=(100 1000 10000) tls_pairs=3 access_pairs=5 perf_records=2000000
omb_seconds=30s
case ${1:-} in
    "" | --publish) ;;
    --quick)
        seconds=2 warmup=500ms pubsub_seconds=3 step_max=100 run_max=560 start_max=20
        payloads=256B,1KiB,16KiB,128KiB stream_sizes=64,256
        readers=(1 4) tls_pairs=2 access_pairs=3 perf_records=500000 omb_seconds=5s
        ;;
    --dry)
        seconds=0.3 warmup=100ms pubsub_seconds=0.3 profile=dev
        step_max=150 payloads=256B,1KiB,16KiB,128KiB counts=(10 20)
        readers=(4) tls_pairs=1 access_pairs=1 perf_records=2000 omb_seconds=1s
        ;;
    *)
        echo "usage: scripts/benchmarks.sh [--quick | --dry | --publish]" >&2
        exit 2
        ;;
esac
groups=(--runs 5 --duration "${seconds}s")
case ${1:-} in
    --quick)
        groups=(--runs 2 --duration "${seconds}s" --records 200000 --leaves 20 --groups 200
            --heartbeat 1500ms --steady-session-timeout 4s)
        ;;
    --dry)
        groups=(--runs 1 --duration 1200ms --records 2000 --committers 4 --leaves 3 --groups 4
            --members 3 --heartbeat 400ms --empty-groups 100)
        ;;
esac
# Updates for a table; the default is 10 million of 100,000 keys.
tables=()
case ${1:-} in
    --quick) tables=(--updates 1000000 --keys 10000 --settle 40s) ;;
    --dry) tables=(--updates 20000 --keys 200 --rate 20000 --settle 1m) ;;
esac
target=${CARGO_TARGET_DIR:-target}
programs=$target/$([ "$profile" = dev ] && echo debug || echo dist)
results=$target/benchmarks
[ "$profile" = dist ] || docs=$results/docs
port=${HELIX_BENCH_PORT:-19400}
image=${HELIX_IMAGE:-helix:latest}
say() { printf '%(%H:%M:%S)T  %s\n' -1 "$*"; }

# Variables of the caller must not change nodes or clients.
for variable in "${!HELIX_@}"; do
    case $variable in
        HELIX_BENCH_*) ;;
        *) unset "$variable" ;;
    esac
done
trap 'echo "benchmarks: FAILED in line $LINENO: $BASH_COMMAND" >&2' ERR

# miss WHAT WHY: notes that a row is missing or not as it should be.
miss() {
    say "FAILED: $1 $2" >&2
    printf '%s\t%s\n' "$1" "$2" >> "$results/missed.txt"
}

# --- The state of the machine ---

# Prints ticks of all CPUs since the boot: used, taken by the host, and all.
cpu_ticks() {
    awk '$1 == "cpu" {
        used = $2 + $3 + $4 + $7 + $8 + $9
        printf "%.0f %.0f %.0f\n", used, $9, used + $5 + $6
    }' /proc/stat
}

# percent_used BEFORE AFTER, percent_taken BEFORE AFTER: shares of all CPUs between two readings.
percent_used() {
    awk '{ all = $6 - $3; print int(all > 0 ? 100 * ($4 - $1) / all + 0.5 : 0) }' <<< "$1 $2"
}
percent_taken() {
    awk '{ all = $6 - $3; print int(all > 0 ? 100 * ($5 - $2) / all + 0.5 : 0) }' <<< "$1 $2"
}

# use_of_others SECONDS: prints the percentage of all CPUs in use, while no node runs.
use_of_others() {
    local before
    before=$(cpu_ticks)
    sleep "$1"
    percent_used "$before" "$(cpu_ticks)"
}

# Percentage of all CPUs up to which a machine is quiet.
busy_max=5
used_before=0 used_between=0 load_before=
# Waits some seconds for a quiet machine: a build has just ended. The load average would still
# count that build.
check_quiet() {
    local attempt
    for attempt in 1 2 3 4 5; do
        used_before=$(use_of_others 3)
        [ "$used_before" -gt "$busy_max" ] || break
        say "other processes use $used_before % of the CPUs, check $attempt of 5"
    done
    load_before=$(cut -d' ' -f1 /proc/loadavg)
    [ "$used_before" -le "$busy_max" ] ||
        say "warning: the machine is busy, the figures will be too low"
}

# Writes the machine and its state, for the page.
note_machine() {
    local taken cpu gib disk
    taken=$(percent_taken "$ticks_before" "$(cpu_ticks)")
    cpu=$(sed -n '/^model name/{s/^[^:]*: *//p;q}' /proc/cpuinfo)
    gib=$(awk '$1 == "MemTotal:" { printf "%d", $2 / 1048576 }' /proc/meminfo)
    disk=$(df --output=fstype,source "$results" | awk 'NR == 2 { print $1 " on " $2 }')
    {
        echo "$(nproc) CPUs (${cpu:-of an unknown model}), $gib GiB of memory, Linux $(uname -r)," \
            "$disk."
        [ "$used_before" -le "$busy_max" ] && [ "$used_between" -le "$((2 * busy_max))" ] &&
            [ "$taken" -le "$busy_max" ] || echo "**The machine was busy.**"
        echo "Other processes used $used_before % of the CPUs before the run, at most" \
            "$used_between % between its parts."
        echo "The host took $taken % during the run. Load average before it: $load_before."
    } > "$results/machine.txt"
}

# --- Nodes ---

work= sockets= compose=()
# has_ended PID: true once a process holds no ports, even if no process has waited for it. Its first
# thread can be a zombie while others still hold files.
has_ended() {
    local threads
    [ -d "/proc/$1" ] || return 0
    grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null || return 1
    threads=("/proc/$1/task/"*)
    [ "${#threads[@]}" -le 1 ]
}

# is_node PID: the number of an ended node may belong to another process by now.
is_node() {
    grep -qaF "$work/" "/proc/$1/cmdline" 2>/dev/null ||
        grep -q "^PPid:.$$\$" "/proc/$1/status" 2>/dev/null
}

# Kills all nodes, because nothing of them is kept.
stop_nodes() {
    local file pid waits
    for file in "$work"/pid.*; do
        [ -s "$file" ] || continue
        pid=$(< "$file")
        is_node "$pid" || continue
        kill -9 "$pid" 2>/dev/null || true
        for ((waits = 0; waits < 500; waits++)); do
            ! has_ended "$pid" || break
            sleep 0.02
        done
    done
    rm -rf "${work:?}"/*
}

stop_compose() {
    [ "${#compose[@]}" = 0 ] || "${compose[@]}" down -v >/dev/null 2>&1 ||
        echo "benchmarks: cannot remove the containers: ${compose[*]} down -v" >&2
    compose=()
}

# Prints the ends of the nodes' logs.
show_logs() {
    local log
    for log in "$work"/*.log; do
        [ ! -s "$log" ] || { echo "the end of $log:" && tail -n "${1:-5}" "$log"; } >&2
    done
}

# serves FLAGS...: waits until nodes serve. Fails after `start_max` s, or if a node has ended.
serves() {
    local give_up_at=$((SECONDS + start_max)) file
    until timeout 20 "$programs/helix-bench" latency --quiet --ops 1 "$@" \
        > "$results/start.txt" 2>&1; do
        for file in "$work"/pid.*; do
            [ ! -s "$file" ] || ! has_ended "$(< "$file")" || give_up_at=0
        done
        if [ "$SECONDS" -ge "$give_up_at" ]; then
            cat "$results/start.txt" >&2
            show_logs 20
            return 1
        fi
        sleep 0.2
    done
}

# start_node ID PORT FLAGS...: one node in the background.
start_node() {
    local id=$1 node_port=$2
    shift 2
    local command=("$programs/helix-server" --node-id "$id" --data-dir "$work/$id"
        --admin-addr off --listen-addr "127.0.0.1:$node_port"
        --peer-addr "127.0.0.1:$((node_port + 3))" --default-retention-bytes 512MiB
        --memory-limit 3GiB --topic default:4 "$@")
    printf '%q ' "${command[@]}" > "$work/command.$id"
    "${command[@]}" 2>> "$work/$id.log" &
    echo $! > "$work/pid.$id"
    # Otherwise the shell reports its end.
    disown $!
}

# start NAME COUNT FLAGS...: COUNT new nodes; `addr` is their addresses, `name` their setup. `up` is
# empty if they do not serve.
start() {
    stop_nodes
    local count=$2 id used peers=()
    name=$1 addr='' up=
    shift 2
    # The rows of these nodes are then noted as missing.
    [ "$SECONDS" -lt "$run_max" ] || return 0
    used=$(use_of_others 1)
    [ "$used" -le "$used_between" ] || used_between=$used
    for id in $(seq "$count"); do
        addr=$addr${addr:+,}127.0.0.1:$((port + id))
        [ "$count" = 1 ] || peers+=(--peer "$id=127.0.0.1:$((port + 3 + id))")
    done
    for id in $(seq "$count"); do
        start_node "$id" $((port + id)) "${peers[@]}" "$@"
    done
    if serves --addr "$addr"; then up=1; else say "FAILED: the nodes of $name do not serve" >&2; fi
}

# --- Runs ---

# bench RESULT MODE FLAGS...: one run, with its result in RESULT.json. A failed run may still have a
# result, which its section then shows with a note.
bench() {
    local row=$1 json=$results/$1.json code=0 limit=$((run_max - SECONDS)) why
    shift
    if [ "$limit" -lt 5 ]; then
        miss "$row" "was not measured: the time of the run was over"
        return 0
    fi
    [ "$limit" -le "$step_max" ] || limit=$step_max
    timeout --foreground -k 10 "$limit" "$programs/helix-bench" "$@" --quiet --json "$json" \
        > "$json.txt" 2> "$json.err" || code=$?
    if [ "$code" = 0 ]; then return 0; fi
    case $code in
        11) why="lost, doubled or reordered messages" ;;
        124 | 137) why="took longer than $limit s" ;;
        *) why="ended with code $code" ;;
    esac
    cat "$json.txt" "$json.err" >&2
    show_logs
    [ -s "$json" ] || rm -f "$json"
    miss "$row" "$why"
}

# run RESULT MODE FLAGS...: one run against the nodes, with its result in RESULT-SETUP.json.
run() {
    local row=$1-$name
    shift
    if [ -z "$up" ]; then
        miss "$row" "was not measured: the nodes did not start"
        return 0
    fi
    say "$name: helix-bench $*"
    local disk=()
    # The log alone was measured on the disk of these nodes. Workload results have no such field.
    [ "$1" = omb ] || [ "$name" = compose ] || [ ! -s "$results/wal.json" ] ||
        disk=(--nodes-disk "$results/wal.json")
    bench "$row" "$@" --addr "$addr" "${disk[@]}"
}

limit() {
    say "limit: helix-bench ${*:2}"
    bench "$@"
}

timed=(--duration "${seconds}s" --warmup "$warmup")

# The load of the first report: writes, reads and end to end, over clients and over record sizes.
loads() {
    local clients size
    for clients in 1 4 16; do
        run "write-$clients" write --clients "$clients" "${timed[@]}"
    done
    # Before the end-to-end loads, which leave batches of one record at the end of the partition.
    for clients in "${readers[@]}"; do
        run "read-$clients" read --clients "$clients" "${timed[@]}" --offset -2000
    done
    for clients in "${readers[@]}"; do
        run "e2e-$clients" e2e --clients "$clients" "${timed[@]}"
    done
    for size in 256 4096 16384; do
        run "write-size-$size" write --clients 4 --size "$size" "${timed[@]}"
    done
}

# The log alone, and the ceilings. Tables have the ratio to the lower one.
measure_limits() {
    local clients size
    limit wal wal --dir "$work/wal" "${timed[@]}" \
        --keep "$([ "$profile" = dev ] && echo 16MiB || echo 512MiB)"
    rm -rf "$work/wal"
    for clients in 1 4 16; do
        limit "ceiling-$clients" ceiling --clients "$clients" "${timed[@]}"
    done
    for clients in "${readers[@]}"; do
        limit "ceiling-read-$clients" ceiling --mode read --clients "$clients" "${timed[@]}"
    done
    for size in 256 4096 16384; do
        limit "ceiling-size-$size" ceiling --clients 4 --size "$size" "${timed[@]}"
    done
}

measure_one_node() {
    local pubsub=(pubsub --payload "$payloads" --batch-bytes 128KiB --warmup "$warmup"
        --duration "${pubsub_seconds}s")
    local sequencer=(sequencer "${timed[@]}" --size "$stream_sizes") files_max
    start memory 1 --storage memory --listen-socket "unix:$sockets/memory"
    run pubsub "${pubsub[@]}"
    run sequencer "${sequencer[@]}" --socket "unix:$sockets/memory" --embedded
    loads
    start durable 1 --listen-socket "unix:$sockets/durable"
    run pubsub "${pubsub[@]}"
    run sequencer "${sequencer[@]}" --socket "unix:$sockets/durable" --embedded-dir "$work"
    loads
    files_max=$(ulimit -Hn)
    if [ "$files_max" != unlimited ] && [ "$files_max" -lt 10100 ]; then
        say "note: no row of 10,000 connections, the limit of open files is $files_max"
        counts=("${counts[@]:0:2}")
    fi
    run connections connections --count "$(IFS=,; echo "${counts[*]}")" "${timed[@]}"
    run perf perf --topic perf --create-topic 1 --num-records "$perf_records" \
        --record-size 1024 --throughput -1 --batch-size 65536 --reporting-interval 500
    run omb omb helix-bench/workloads/1-topic-16-partitions-1kb.yaml \
        --duration "$omb_seconds" --warmup "$warmup"
}

# one_side SETUP PAIR: `plain` or `tls`.
one_side() {
    name=$1 addr=$plain
    local trust=() count=200
    [ "$name" = plain ] || { addr=$encrypted; trust=(--tls-ca "$work/tls/ca.pem"); }
    [ "$profile" = dist ] || count=20
    run "tls-write-$2" write --clients 4 "${timed[@]}" "${trust[@]}"
    run "tls-stream-$2" write --clients 4 --stream --in-flight 16 "${timed[@]}" "${trust[@]}"
    [ "$2" != 1 ] ||
        run "tls-connections-$2" connections --count "$count" "${timed[@]}" "${trust[@]}"
}

# Two nodes of their own clusters, one of them with TLS, measured in turns.
measure_tls() {
    local pair side sides tls=$work/tls
    start plain 1
    plain=$addr encrypted=127.0.0.1:$((port + 7))
    if ! { "$programs/helix" cert ca --dir "$tls" &&
        "$programs/helix" cert node 2 --host 127.0.0.1 --ca-dir "$tls" --dir "$tls"; } \
        > "$results/cert.txt" 2>&1; then
        cat "$results/cert.txt" >&2
        miss tls-write-1-tls "was not measured: there are no certificates"
        return 0
    fi
    start_node 2 $((port + 7)) --tls-cert "$tls/node-2.pem" --tls-key "$tls/node-2.key" \
        --tls-ca "$tls/ca.pem"
    serves --addr "$encrypted" --tls-ca "$tls/ca.pem" || up=
    for pair in $(seq "$tls_pairs"); do
        # The first side alternates, because the speed of the host drifts.
        sides=(plain tls)
        [ $((pair % 2)) = 1 ] || sides=(tls plain)
        for side in "${sides[@]}"; do one_side "$side" "$pair"; done
    done
}

# access_side SIDE PAIR: `open` or `guarded`. Records are small, so that the checks of a call are as
# large a part of it as they can be.
access_side() {
    name=$1 addr=$open
    local credentials=()
    [ "$name" = open ] || { addr=$guarded; credentials=(--token-file "$work/bench-token"); }
    run "access-write-$2" write --clients 4 --size 64 --batch-size 1 "${timed[@]}" \
        "${credentials[@]}"
}

# Two nodes in memory, one of which checks tokens and rules, measured in turns.
measure_access() {
    local pair side sides
    start open 1 --storage memory
    open=$addr guarded=127.0.0.1:$((port + 7))
    start_node 2 $((port + 7)) --storage memory --auth required \
        --admin-token-file "$work/admin-token"
    serves --addr "$guarded" --token-file "$work/admin-token" || up=
    if ! (umask 077 && "$programs/helix" token create bench --role producer:default \
        --allow topic:default=read --allow cluster=describe --addr "$guarded" \
        --token-file "$work/admin-token" > "$work/bench-token" 2> "$results/token.txt"); then
        cat "$results/token.txt" >&2
        miss access-write-1-guarded "was not measured: there is no token"
        return 0
    fi
    for pair in $(seq "$access_pairs"); do
        sides=(open guarded)
        [ $((pair % 2)) = 1 ] || sides=(guarded open)
        for side in "${sides[@]}"; do access_side "$side" "$pair"; done
    done
}

measure_three_nodes() {
    start three-nodes 3
    run check sequencer --check
    loads
}

# Each part is a run of its own: a failed call ends it. Parts wait for session timeouts.
measure_groups() {
    local part
    start groups 1
    for part in read commit handover heartbeat memory; do
        run "group-$part" group --parts "$part" "${groups[@]}"
    done
    # The commands see only the environment; a restarted node is not this shell's child.
    cat > "$work/restart" <<END
$(declare -f has_ended)
kill -9 "\$(cat "$work/pid.1")"
until has_ended "\$(cat "$work/pid.1")"; do sleep 0.01; done
$(cat "$work/command.1") 2>> "$work/1.log" &
echo \$! > "$work/pid.1"
END
    run group-restart group --parts restart --restart-command "bash $work/restart" "${groups[@]}"
    start three-shards 3 --shards 3
    run group-coordinator group --parts coordinator "${groups[@]}" \
        --kill-command "kill -9 \$(cat $work/pid.\$HELIX_NODE_ID)"
}

# The last updates wait for the lag of the cleaner.
measure_compaction() {
    start compaction 1 --cleaner-lag 5s
    run compaction-durable compaction "${tables[@]}"
}

# Three nodes in containers; a note where that is not possible.
measure_containers() {
    local clients why='' tool=(docker compose)
    stop_nodes
    docker compose version >/dev/null 2>&1 || tool=(docker-compose)
    if ! timeout 20 docker info >/dev/null 2>&1; then
        why="no Docker engine responds"
    elif ! "${tool[@]}" version >/dev/null 2>&1; then
        why="neither docker compose nor docker-compose is installed"
    elif ! docker image inspect "$image" >/dev/null 2>&1; then
        why="there is no image $image"
    fi
    if [ -n "$why" ]; then
        say "note: no rows of nodes in containers: $why"
        echo "Not measured: $why." > "$results/no-compose.txt"
        return 0
    fi
    export HELIX_IMAGE=$image HELIX_PORT_1=$((port + 1)) HELIX_PORT_2=$((port + 2))
    export HELIX_PORT_3=$((port + 3)) HELIX_ADMIN_PORT_1=$((port + 4))
    export HELIX_ADMIN_PORT_2=$((port + 5)) HELIX_ADMIN_PORT_3=$((port + 6))
    compose=("${tool[@]}" -p "helix-benchmarks-$$")
    name=compose up=1
    addr=localhost:$HELIX_PORT_1,localhost:$HELIX_PORT_2,localhost:$HELIX_PORT_3
    timeout 120 "${compose[@]}" up -d --no-build > "$results/compose.txt" 2>&1 || {
        cat "$results/compose.txt" >&2
        up=
    }
    [ -z "$up" ] || serves --addr "$addr" || up=
    for clients in 1 4 16; do
        run "containers-write-$clients" write --clients "$clients" "${timed[@]}"
    done
    stop_compose
}

# --- Pages ---

# Sections of the page, each from its own line to the next line "benchmarks: end".
sections=(machine pubsub sequencer connections tls access group compaction write write-sizes read
    e2e compose perf omb)

# Fails unless the page has all sections: no run is to end without them.
check_sections() {
    local section expected found
    expected=$(for section in "${sections[@]}"; do
        printf '<!-- benchmarks: %s -->\n<!-- benchmarks: end -->\n' "$section"
    done)
    found=$(grep '^<!-- benchmarks: ' docs/benchmarks/reference.md || true)
    [ "$found" = "$expected" ] || {
        echo "benchmarks: docs/benchmarks/reference.md must have these lines, in this order:" >&2
        echo "$expected" >&2
        exit 1
    }
}

# section NAME: replaces the section of the page with standard input.
section() {
    local begin="<!-- benchmarks: $1 -->" text
    text=$(cat)
    TEXT=$text awk -v begin="$begin" '
        $0 == begin { print; print ENVIRON["TEXT"]; skipping = 1 }
        $0 == "<!-- benchmarks: end -->" { skipping = 0 }
        !skipping { print }
    ' "$docs/benchmarks/reference.md" > "$docs/benchmarks/reference.md.new"
    mv "$docs/benchmarks/reference.md.new" "$docs/benchmarks/reference.md"
}

# publish plots|tables SECTION PATTERN...: writes a section with the results whose names match.
publish() {
    local kind=$1 name=$2 pattern file row why found=() page=$results/section.md
    shift 2
    : > "$page"
    for pattern in "$@"; do
        for file in "$results"/$pattern.json; do
            [ ! -s "$file" ] || found+=("$file")
        done
        # Only rows of this section.
        while IFS=$'\t' read -r row why; do
            # shellcheck disable=SC2053
            [[ $row != $pattern ]] || echo "- \`$row\` $why." >> "$page"
        done < "$results/missed.txt"
    done
    [ ! -s "$page" ] || echo >> "$page"
    if [ "${#found[@]}" = 0 ]; then
        [ -s "$page" ] || echo "Not measured." >> "$page"
        section "$name" < "$page"
        return 0
    fi
    if ! "$programs/helix-bench" tables "${found[@]}" "${limits[@]}" >> "$page"; then
        miss "the section $name" "has no tables"
        return 0
    fi
    [ "$kind" = tables ] || add_plots "$name" "${found[@]}"
    section "$name" < "$page"
}

# add_plots SECTION RESULT...: draws plots, and adds them to the section's text.
add_plots() {
    local section=$1 plot
    shift
    "$programs/helix-bench" plot "$@" --dir "$docs/benchmarks" > "$results/plots.txt" 2>&1 || {
        cat "$results/plots.txt" >&2
        miss "the section $section" "has no plots"
    }
    for plot in $(sed -n 's/^wrote \(.*\.svg\)$/\1/p' "$results/plots.txt"); do
        plot=${plot##*/}
        echo "![${plot%.svg}]($plot)" >> "$results/section.md"
    done
}

# publish_text SECTION ROW: the same for a run that prints lines.
publish_text() {
    local page=$results/section.md
    grep "^$2"$'\t' "$results/missed.txt" | sed 's/^\(.*\)\t\(.*\)$/- `\1` \2.\n/' > "$page" || true
    if [ -s "$results/$2.json" ]; then
        # Without the lines of the intervals, which the plots show.
        { echo '```'; grep -v 'max latency\.$' "$results/$2.json.txt"; echo '```'; echo; } >> "$page"
        add_plots "$1" "$results/$2.json"
    fi
    [ -s "$page" ] || echo "Not measured." >> "$page"
    section "$1" < "$page"
}

publish_all() {
    local file reported=()
    limits=()
    mkdir -p "$docs/benchmarks"
    for file in "$results"/wal.json "$results"/ceiling-*.json; do
        [ ! -s "$file" ] || limits+=(--limit "$file")
    done
    section machine < "$results/machine.txt"
    publish plots pubsub 'pubsub-*'
    publish plots sequencer 'sequencer-*' 'check-*'
    publish plots connections 'connections-*'
    publish plots group 'group-*'
    publish plots compaction 'compaction-*'
    publish plots write 'write-[0-9]*'
    publish plots write-sizes 'write-4-*' 'write-size-*'
    publish plots read 'read-*'
    publish plots e2e 'e2e-*'
    publish tables tls 'tls-*-plain' 'tls-*-tls'
    publish tables access 'access-*-open' 'access-*-guarded'
    if [ -s "$results/no-compose.txt" ]; then
        section compose < "$results/no-compose.txt"
    else
        publish tables compose 'containers-*'
    fi
    publish_text perf perf-durable
    publish_text omb omb-durable
    for file in "$results"/{pubsub,sequencer,check,connections,group,write,read,e2e}-*.json; do
        [ ! -s "$file" ] || reported+=("$file")
    done
    if [ "${#reported[@]}" != 0 ] && ! "$programs/helix-bench" report "${reported[@]}" \
        "${limits[@]}" --quiet -o "$results/report.html"; then
        miss "the page $results/report.html" "was not written"
    fi
    say "wrote $docs/benchmarks/reference.md, $docs/benchmarks/ and $results/report.html"
}

# Ends the script.
report_missed() {
    [ -s "$results/missed.txt" ] || exit 0
    say "FAILED, or not as it should be:" >&2
    sed 's/^/  /' "$results/missed.txt" >&2
    exit 1
}

# --- The run ---

check_sections
if [ "${1:-}" = --publish ]; then
    if [ ! -s "$results/machine.txt" ]; then
        echo "benchmarks: $results has no results of a run" >&2
        exit 1
    fi
    sed -i '/^the /d' "$results/missed.txt"
    publish_all
    report_missed
fi

[ -n "${HELIX_BENCH_NO_BUILD:-}" ] ||
    cargo build --profile "$profile" -p helix-server -p helix-bench -p helix-cli
for program in helix-server helix-bench helix; do
    if [ ! -x "$programs/$program" ]; then
        echo "benchmarks: there is no $programs/$program; run without HELIX_BENCH_NO_BUILD" >&2
        exit 1
    fi
done
SECONDS=0
rm -rf "$results"
mkdir -p "$results"
: > "$results/missed.txt"
if [ "$docs" != docs ]; then
    mkdir -p "$docs"
    mkdir -p "$docs/benchmarks"
    cp docs/benchmarks/reference.md "$docs/benchmarks/"
fi
work=$(realpath "$(mktemp -d "$target/benchmarks-nodes.XXXXXX")")
# Short, because the path of a socket is.
sockets=$(mktemp -d)
# An aborted run can be published, too.
clean_up() {
    stop_compose
    stop_nodes
    rm -rf "$work" "$sockets"
    [ -s "$results/machine.txt" ] || note_machine
}
trap clean_up EXIT
trap 'exit 130' INT TERM

free_kib=$(df -Pk "$work" | awk 'NR == 2 { print $4 }')
[ "$free_kib" -ge $((20 << 20)) ] ||
    say "warning: $((free_kib >> 20)) GiB are free in $target; the nodes may need 20"
ticks_before=$(cpu_ticks)
check_quiet
ticks_before=$(cpu_ticks)
measure_limits
measure_one_node
measure_tls
measure_access
measure_three_nodes
measure_groups
measure_compaction
measure_containers
stop_nodes
note_machine
cat "$results/machine.txt"
publish_all
say "the log alone: $results/wal.json.txt"
say "took $SECONDS s without the build"
report_missed
