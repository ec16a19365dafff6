#!/usr/bin/env bash
# Measures the gateway: appends of a native client and of confluent-kafka through the gateway, in
# turns and with the same batches, each ack synced on a majority; then its memory with idle
# connections. librdkafka compares the messages in flight of an idempotent producer with a limit of
# five requests, so such a producer has one batch in flight for each partition. It is compared with
# a native client that has one in flight.
#   helix-kafka/tests/measure.sh DIRECTORY [ROUNDS]
# DIRECTORY has helix, helix-bench and helix-kafka, built with --profile dist. Each round writes for
# SECONDS_EACH (10) seconds on each path. RECORDS (100) of SIZE (1024) bytes are a batch, IN_FLIGHT
# (5) batches of a producer without idempotence are in flight, and IDLE (1000) connections are idle.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
programs=${1:?usage: measure.sh DIRECTORY [ROUNDS]}
rounds=${2:-3}
seconds=${SECONDS_EACH:-10} records=${RECORDS:-100} size=${SIZE:-1024} in_flight=${IN_FLIGHT:-5}
idle=${IDLE:-1000}
venv=${KAFKA_CLIENTS:-${CARGO_TARGET_DIR:-$root/target}/kafka-clients}/confluent-new
port=${HELIX_TEST_PORT:-21092}
for program in helix helix-bench helix-kafka; do
  [ -x "$programs/$program" ] || { echo "no program $programs/$program" >&2; exit 2; }
done
if [ ! -f "$venv/installed" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" -q install confluent-kafka && touch "$venv/installed"
fi

work=$(mktemp -d)
pids=()
stop() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  rm -rf "$work"
}
trap stop EXIT

"$programs/helix" dev --port "$port" --dir "$work/data" >"$work/dev.log" 2>&1 &
pids+=($!)
for _ in $(seq 300); do grep -q 'nodes ready' "$work/dev.log" && break; sleep 0.1; done
grep -q 'nodes ready' "$work/dev.log" || { cat "$work/dev.log" >&2; exit 1; }
export HELIX_ADDR="127.0.0.1:$port,127.0.0.1:$((port + 1)),127.0.0.1:$((port + 2))"
bootstrap=127.0.0.1:$((port + 200))
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"
"$programs/helix-kafka" --listen-addr "$bootstrap" --metrics-addr off >"$work/gateway.log" 2>&1 &
gateway=$!
pids+=("$gateway")
for _ in $(seq 100); do grep -q 'listening addr' "$work/gateway.log" && break; sleep 0.1; done
for topic in native kafka; do
  "$programs/helix" topic create "$topic" --partitions 1 --batch-format kafka >/dev/null
done

native() {
  "$programs/helix-bench" write --quiet --topic native --duration "${seconds}s" --size "$size" \
    --batch-size "$records" --stream --in-flight "$1" --json - 2>/dev/null ||
    { echo "helix-bench failed" >&2; exit 1; }
}
through_gateway() {
  "$venv/bin/python" "$here/clients/load.py" write "$bootstrap" kafka "$seconds" "$size" \
    "$records" "$@"
}

echo "batches of $records records of $size bytes, acks synced on a majority"
for round in $(seq "$rounds"); do
  native "$in_flight" >"$work/native-plain-$round.json"
  through_gateway "$in_flight" >"$work/kafka-plain-$round.json"
  native 1 >"$work/native-idempotent-$round.json"
  through_gateway 1 idempotent >"$work/kafka-idempotent-$round.json"
done
"$venv/bin/python" - "$work" "$rounds" "$in_flight" <<'PYTHON'
import json, statistics, sys
work, rounds, in_flight = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def measure(name, label):
    rows = []
    for round in range(1, rounds + 1):
        native, kafka = (json.load(open(f"{work}/{path}-{name}-{round}.json"))
                         for path in ("native", "kafka"))
        rates = native["records_per_sec"], kafka["records_per_sec"]
        p50s = native["latency_us"]["p50"], kafka["p50_us"]
        rows.append((*rates, *p50s))
        print(f"{label}, round {round}: native {rates[0]:,.0f} records/s, p50 {p50s[0]:,.0f} us; "
              f"gateway {rates[1]:,.0f} records/s, p50 {p50s[1]:,.0f} us")
    rate = statistics.median(row[1] / row[0] for row in rows)
    p50 = statistics.median(row[3] / row[2] for row in rows)
    print(f"gateway / native: {rate:.2f} of the records (goal 0.6), {p50:.2f} of p50 (goal 2)")

measure("plain", f"{in_flight} in flight")
measure("idempotent", "idempotent, one in flight")
PYTHON

memory() { awk '/^VmRSS/ { printf "%.1f", $2 / 1024 }' "/proc/$gateway/status"; }
# A gateway of its own: the other one has buffers of the load.
kill "$gateway"; wait "$gateway" 2>/dev/null || true
"$programs/helix-kafka" --listen-addr "$bootstrap" --metrics-addr off >"$work/idle.log" 2>&1 &
gateway=$!
pids+=("$gateway")
for _ in $(seq 100); do grep -q 'listening addr' "$work/idle.log" 2>/dev/null && break; sleep 0.1; done
before=$(memory)
mkfifo "$work/hold"
"$venv/bin/python" "$here/clients/load.py" idle "$bootstrap" "$idle" <"$work/hold" >"$work/idle.out" &
pids+=($!)
exec 7>"$work/hold"
for _ in $(seq 300); do grep -q open "$work/idle.out" && break; sleep 0.1; done
grep -q open "$work/idle.out" || { echo "the connections were not opened" >&2; exit 1; }
echo "memory: $before MiB without connections, $(memory) MiB with $idle idle ones (goal 64)"
exec 7>&-
