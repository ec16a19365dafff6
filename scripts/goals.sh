#!/usr/bin/env bash
# Measures the goals of the append path and of compression against new nodes on this machine, and
# prints a table: medians of rounds with their range, beside the goal. A round runs each side once,
# every second round in the other order, because the speed of the host drifts. A ratio is that of
# one round.
#   scripts/goals.sh           five rounds, about fifteen minutes after the build
#   scripts/goals.sh --quick   three rounds of shorter runs, about eight minutes
#   scripts/goals.sh --dry     one round of debug builds, which shows only that everything runs
#   scripts/goals.sh --table   only prints the table of the last run again
# The disks are that of this machine, and two that scripts/slow-disk.c makes of it: 125 and 500 MB/s
# with syncs of 1 ms. They need a C compiler and glibc. The results stay in target/goals/ as JSON.
# The nodes use the twenty ports after HELIX_BENCH_PORT (19440). HELIX_BENCH_NO_BUILD=1 uses the
# programs of the last build. A run that fails is named, the others go on, and the script ends with
# 1. A goal that is not met is no failure.
set -Eeuo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/.."

rounds=5 seconds=3 settle=8s warmup=1s filled=1500000 keep=128MiB profile=dist
case ${1:-} in
    "" | --table) ;;
    --quick) rounds=3 seconds=2 settle=6s ;;
    --dry) rounds=1 seconds=0.3 settle=0.3s warmup=100ms filled=20000 keep=16MiB profile=dev ;;
    *)
        echo "usage: scripts/goals.sh [--quick | --dry | --table]" >&2
        exit 2
        ;;
esac
target=${CARGO_TARGET_DIR:-target}
programs=$target/$([ "$profile" = dev ] && echo debug || echo dist)
results=$target/goals
port=${HELIX_BENCH_PORT:-19440}
say() { printf '%(%H:%M:%S)T  %s\n' -1 "$*" >&2; }

# Variables of the caller must not change nodes or clients.
for variable in "${!HELIX_@}"; do
    case $variable in
        HELIX_BENCH_*) ;;
        *) unset "$variable" ;;
    esac
done
trap 'echo "goals: FAILED in line $LINENO: $BASH_COMMAND" >&2' ERR

# --- The table ---

# row GOAL WANTED UNIT VALUE [LIMIT...]: the ratio of a value to the lowest limit of its round, or
# the value itself. Values and limits are names in values.tsv, or "NAME/DIVISOR".
row() {
    awk -F '\t' -v goal="$1" -v wanted="$2" -v unit="$3" -v names="${*:4}" '
        function sort(values, count,    i, j, value) {
            for (i = 2; i <= count; i++) {
                value = values[i]
                for (j = i - 1; j >= 1 && values[j] > value; j--) values[j + 1] = values[j]
                values[j + 1] = value
            }
        }
        function median(values, count) {
            sort(values, count)
            return (values[int((count + 1) / 2)] + values[int(count / 2) + 1]) / 2
        }
        BEGIN {
            columns = split(names, name, " ")
            for (i = 1; i <= columns; i++) {
                divisor[i] = split(name[i], part, "/") > 1 ? part[2] : 1
                name[i] = part[1]
            }
        }
        {
            for (i = 1; i <= columns; i++) if ($2 == name[i]) value[i, $1] = $3 / divisor[i]
            if ($1 > rounds) rounds = $1
        }
        END {
            for (round = 1; round <= rounds; round++) {
                is_whole = (1, round) in value
                limit = columns > 1 ? -1 : 1
                for (i = 2; i <= columns; i++) {
                    if (!((i, round) in value)) is_whole = 0
                    else if (limit < 0 || value[i, round] < limit) limit = value[i, round]
                }
                if (!is_whole || limit <= 0) continue
                values[++count] = value[1, round]
                limits[count] = limit
                ratios[count] = value[1, round] / limit
            }
            if (!count) {
                printf "| %s | %s | not measured | | | |\n", goal, wanted
                exit
            }
            middle = median(ratios, count)
            met = "-"
            if (split(wanted, word, " ") > 2) {
                is_met = word[2] == "least" ? middle >= word[3] + 0 : middle <= word[3] + 0
                met = is_met ? "yes" : "no"
            }
            if (columns > 1) {
                sides = sprintf("%.4g / %.4g ", median(values, count), median(limits, count)) unit
                unit = ""
            }
            printf "| %s | %s | %.2f%s | %.2f to %.2f | %s | %s |\n", goal, wanted, middle,
                (unit ? " " unit : ""), ratios[1], ratios[count], sides, met
        }
    ' "$results/values.tsv"
}

disk_name() { [ "$1" = own ] && echo "this disk" || echo "$1 MB/s"; }

print_table() {
    local d on
    echo "| goal | wanted | median | lowest to highest | medians of the sides | met |"
    echo "|---|---|---|---|---|---|"
    for d in 125 500 own; do
        # A fast disk has idle bandwidth, from which segments are zero-filled.
        row "bytes to disk per byte of records, new segments, 16 clients, $(disk_name "$d")" \
            "$([ "$d" = own ] && echo - || echo at most 1.1)" MB \
            "$d-new-16.written/1000000" "$d-new-16.sent/1000000"
    done
    for d in 125 500 own; do
        row "throughput with new segments over recycled ones, 16 clients, $(disk_name "$d")" \
            "at least 0.9" MB/s "$d-new-16.mb_per_sec" "$d-one-16.mb_per_sec"
    done
    row "p99 with new segments over recycled ones, 4 clients, this disk" "at most 1.2" ms \
        own-new-4.latency_us.p99/1000 own-one-4.latency_us.p99/1000
    for d in 125 500 own; do
        row "one node, 16 clients, over the lower of ceiling and log alone, $(disk_name "$d")" \
            "at least 0.9" MB/s "$d-one-16.mb_per_sec" "$d-ceiling-16.mb_per_sec" \
            "$d-log.mb_per_sec"
    done
    for d in 500 own; do
        on="three nodes on one disk, 16 clients, $(disk_name "$d")"
        row "$on, over a third of the log alone" "at least 0.9" MB/s \
            "$d-three-16.mb_per_sec" "$d-log.mb_per_sec/3"
        row "$on, p99" "at most 15 ms" ms "$d-three-16.latency_us.p99/1000"
    done
    row "CPU of a durable append, one client, over that without busy polling" "at most 1.1" µs \
        own-one-1.cpu.server_us_per_request own-without-polling-1.cpu.server_us_per_request
    row "CPU of an append in memory, one client, over the ceiling's" "at most 1.8" µs \
        own-memory-1.cpu.server_us_per_request own-ceiling-1.cpu.server_us_per_request
    row "text with LZ4 over none, one node, 16 clients, 125 MB/s" "at least 1.5" MB/s \
        125-one-text-lz4.mb_per_sec 125-one-text-none.mb_per_sec
    row "text with LZ4 over none, three nodes on one disk, 16 clients, 125 MB/s" "at least 1.5" \
        MB/s 125-three-text-lz4.mb_per_sec 125-three-text-none.mb_per_sec
    row "random data with adaptive compression over none, 16 clients, in memory" "at least 0.97" \
        MB/s own-random-adaptive.mb_per_sec own-random-none.mb_per_sec
    row "CPU of a read of a batch with LZ4 over that of the same batch without" "at most 1" µs \
        own-read-lz4.cpu.server_us_per_request own-read-none.cpu.server_us_per_request
}

if [ "${1:-}" = --table ]; then
    if [ ! -s "$results/values.tsv" ]; then
        echo "goals: $results has no values of a run" >&2
        exit 1
    fi
    print_table
    exit 0
fi

# --- Nodes ---

work= disk= on=()
declare -A pids=()

# use_disk own|MB_PER_S: the disk of all programs that are started from here on.
use_disk() {
    disk=$1 on=()
    [ "$disk" != own ] || return 0
    on=(env LD_PRELOAD="$work/slow-disk.so" HELIX_DISK_RATE=$((disk * 1000000))
        HELIX_DISK_SYNC_US=1000 HELIX_DISK_CLOCK="$work/clock")
}

addr_of() { echo "127.0.0.1:$((port + $1))"; }

# start NAME ID FLAGS...: a new node in the background.
start() {
    local name=$1 id=$2
    shift 2
    "${on[@]}" "$programs/helix-server" --node-id "$id" --data-dir "$work/$name" \
        --admin-addr off --listen-addr "$(addr_of "$id")" --peer-addr "$(addr_of $((id + 10)))" \
        --memory-limit 3GiB --topic default:4 "$@" 2> "$work/$name.log" &
    pids[$name]=$!
}

# stop NAME...: kills nodes, because nothing of them is kept.
stop() {
    local name
    for name in "$@"; do
        [ -n "${pids[$name]:-}" ] || continue
        { kill -9 "${pids[$name]}" && wait "${pids[$name]}"; } 2>/dev/null || true
        unset "pids[$name]"
        rm -rf "${work:?}/$name"
    done
}

# serves ADDR: waits until nodes serve. A failure ends the script, because most rows need them.
serves() {
    local give_up_at=$((SECONDS + 30))
    until timeout 20 "$programs/helix-bench" latency --quiet --ops 1 --addr "$1" \
        > "$results/start.txt" 2>&1; do
        if [ "$SECONDS" -ge "$give_up_at" ]; then
            cat "$results/start.txt" >&2
            tail -n 20 "$work"/*.log >&2
            echo "goals: the nodes at $1 do not serve" >&2
            exit 1
        fi
        sleep 0.2
    done
}

retained=(--default-retention-bytes 512MiB)

# fill ADDR: writes until segments are recycled.
fill() {
    serves "$1"
    timeout 300 "$programs/helix-bench" write --addr "$1" --records "$filled" --clients 4 \
        --in-flight 4 --warmup 0s --quiet > "$results/fill.txt" 2>&1 && return
    cat "$results/fill.txt" >&2
    echo "goals: cannot fill the nodes at $1" >&2
    exit 1
}

# Prints the bytes that a node has sent to its disk.
written() { awk '$1 == "write_bytes:" { print $2 }' "/proc/${pids[$1]}/io"; }

# --- Runs ---

round=0 failed=

miss() {
    say "FAILED: $*"
    failed=1
}

# keep_value NAME VALUE: adds a value of this round.
keep_value() { printf '%s\t%s\t%s\n' "$round" "$disk-$1" "$2" >> "$results/values.tsv"; }

# bench SIDE MODE FLAGS...: one run, and its values. Returns 1 if it failed.
bench() {
    local side=$1 json=$results/$disk-$1-$round.json name value errors=0
    shift
    say "$(disk_name "$disk"), round $round of $rounds: helix-bench $*"
    # Only the log alone writes to the disk.
    timeout --foreground -k 10 60 "${on[@]}" "$programs/helix-bench" "$@" --quiet \
        --duration "${seconds}s" --warmup "$warmup" --json "$json" > "$json.txt" 2>&1 || {
        cat "$json.txt" >&2
        miss "$disk-$side of round $round"
        return 1
    }
    while read -r name value; do
        [ "$name" != errors ] || errors=$value
        keep_value "$side.$name" "$value"
    done < <(awk -f scripts/numbers.awk "$json")
    [ "$errors" = 0 ] || miss "$disk-$side of round $round has $errors failed requests"
}

# alternate COMMAND...: runs each side of the round once.
alternate() {
    local i words
    for ((i = 1; i <= $#; i++)); do
        if [ $((round % 2)) = 1 ]; then
            read -ra words <<< "${@:i:1}"
        else
            read -ra words <<< "${@:$#+1-i:1}"
        fi
        # A failed run is noted.
        "${words[@]}" || true
    done
}

three_addr=$(addr_of 3),$(addr_of 4),$(addr_of 5)

log_alone() {
    rm -rf "$work/log"
    bench log wal --dir "$work/log" --keep "$keep" || true
    rm -rf "$work/log"
}
ceiling() { bench "ceiling-$1" ceiling --clients "$1"; }
one_node() { bench "one-$1" write --addr "$(addr_of 1)" --clients "$1"; }
three_nodes() { bench three-16 write --addr "$three_addr" --clients 16; }
without_polling() { bench without-polling-1 write --addr "$(addr_of 6)" --clients 1; }
in_memory() { bench memory-1 write --addr "$(addr_of 7)" --clients 1; }
one_text() {
    bench "one-text-$1" write --addr "$(addr_of 1)" --clients 16 --payload text --compression "$1"
}
three_text() {
    bench "three-text-$1" write --addr "$three_addr" --clients 16 --payload text --compression "$1"
}
random_data() { bench "random-$1" write --addr "$(addr_of 8)" --clients 16 --compression "$1"; }
read_text() { bench "read-$1" read --addr "$(addr_of 8)" --clients 4 --topic "text-$1"; }

# A new node, which has no segments to recycle. It writes for seconds first: its first segments are
# zero-filled, and it has yet to learn what limits the disk.
new_node() {
    local addr before after sent
    addr=$(addr_of 2)
    start new 2
    serves "$addr"
    timeout 60 "$programs/helix-bench" write --addr "$addr" --clients 16 --duration "$settle" \
        --warmup 0s --quiet > "$results/settle.txt" 2>&1 || miss "$disk: the new node did not settle"
    bench new-4 write --addr "$addr" --clients 4 || true
    before=$(written new)
    if bench new-16 write --addr "$addr" --clients 16; then
        after=$(written new)
        # The bytes of the result are without the warm-up.
        sent=$(awk -f scripts/numbers.awk "$results/$disk-new-16-$round.json" | awk '
            { value[$1] = $2 }
            END { printf "%.0f", value["bytes"] * (1 + value["warmup.records"] / value["records"]) }
        ')
        keep_value new-16.written $((after - before))
        keep_value new-16.sent "$sent"
    fi
    stop new
    # The file system frees the blocks.
    sleep 0.5
}

# start_three COMMAND: three nodes, and what is done with their addresses then.
start_three() {
    local id peers=()
    for id in 3 4 5; do peers+=(--peer "$id=$(addr_of $((id + 10)))"); done
    for id in 3 4 5; do start "three-$id" "$id" "${retained[@]}" "${peers[@]}"; done
    "$1" "$three_addr"
}

# measure_disk own|MB_PER_S: new and recycled segments, one node and three nodes; compression where
# the disk is the limit.
measure_disk() {
    local sides=(log_alone "ceiling 16" "one_node 16" new_node)
    use_disk "$1"
    start one 1 "${retained[@]}"
    fill "$(addr_of 1)"
    [ "$disk" != own ] || sides+=("one_node 4")
    if [ "$disk" = 125 ]; then
        # Three copies of what 16 clients have in flight take longer than 15 ms here.
        start_three serves
        sides+=("one_text none" "one_text lz4" "three_text none" "three_text lz4")
    else
        start_three fill
        sides+=(three_nodes)
    fi
    for ((round = 1; round <= rounds; round++)); do alternate "${sides[@]}"; done
    stop three-3 three-4 three-5
    [ "$disk" = own ] || stop one
}

# CPU of requests of one client: the node that `measure_disk own` left, one that does not poll, and
# one in memory.
measure_cpu() {
    local sides=("ceiling 1" in_memory "one_node 1") quota
    use_disk own
    # Under a CPU quota a node does not poll. It only sees this one: nothing enforces it. The worker
    # threads are those of a node without it.
    quota="$(($(nproc) * 100000 - 1000)) 100000"
    on=(unshare --mount sh -c "mount -t tmpfs cgroup /sys/fs/cgroup &&
        echo '$quota' > /sys/fs/cgroup/cpu.max && exec \"\$@\"" sh)
    [ "$(id -u)" = 0 ] || on=(unshare --map-root-user "${on[@]:1}")
    if "${on[@]}" true 2> "$results/unshare.txt"; then
        start without-polling 6 --worker-threads $(($(nproc) > 1 ? $(nproc) - 1 : 1)) \
            "${retained[@]}"
        sides+=(without_polling)
    else
        cat "$results/unshare.txt" >&2
        miss "a node without busy polling: it needs a mount namespace"
    fi
    on=()
    [ -z "${pids[without-polling]:-}" ] || fill "$(addr_of 6)"
    start memory 7 --storage memory "${retained[@]}"
    fill "$(addr_of 7)"
    for ((round = 1; round <= rounds; round++)); do alternate "${sides[@]}"; done
    stop one without-polling memory
}

# Compression where nothing but the CPUs is a limit.
measure_compression() {
    local codec addr
    use_disk own
    addr=$(addr_of 8)
    start codecs 8 --storage memory --default-retention-bytes 128MiB
    serves "$addr"
    for codec in none lz4; do
        timeout 120 "$programs/helix-bench" write --addr "$addr" --topic "text-$codec" \
            --create-topic 4 --payload text --compression "$codec" --records $((filled / 15)) \
            --clients 4 --warmup 0s --quiet > "$results/text.txt" 2>&1 ||
            miss "the text with compression $codec"
    done
    for ((round = 1; round <= rounds; round++)); do
        alternate "random_data none" "random_data adaptive" "read_text none" "read_text lz4"
    done
    stop codecs
}

# --- The run ---

[ -n "${HELIX_BENCH_NO_BUILD:-}" ] ||
    cargo build --profile "$profile" -p helix-server -p helix-bench
for program in helix-server helix-bench; do
    if [ ! -x "$programs/$program" ]; then
        echo "goals: there is no $programs/$program; run without HELIX_BENCH_NO_BUILD" >&2
        exit 1
    fi
done
SECONDS=0
rm -rf "$results"
mkdir -p "$results"
: > "$results/values.tsv"
work=$(realpath "$(mktemp -d "$target/goals-nodes.XXXXXX")")
clean_up() {
    stop "${!pids[@]}"
    rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

free_kib=$(df -Pk "$work" | awk 'NR == 2 { print $4 }')
[ "$free_kib" -ge $((20 << 20)) ] ||
    say "warning: $((free_kib >> 20)) GiB are free in $target; the nodes may need 20"
say "load average before the run: $(cut -d' ' -f1 /proc/loadavg)"
if cc -O2 -shared -fPIC -o "$work/slow-disk.so" scripts/slow-disk.c -ldl; then
    truncate -s 8 "$work/clock"
    measure_disk 125
    measure_disk 500
else
    miss "the slow disks: they need a C compiler"
fi
measure_disk own
measure_cpu
measure_compression
say "took $SECONDS s without the build"
print_table | tee "$results/goals.md"
[ -z "$failed" ] || exit 1
