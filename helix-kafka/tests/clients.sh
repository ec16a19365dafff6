#!/usr/bin/env bash
# Runs Kafka's clients against a cluster of three nodes with a gateway beside each:
#   helix-kafka/tests/clients.sh [CLIENT...]
# Clients are kcat, confluent-old, confluent-new, kafka-python-2, kafka-python-3 and aiokafka; all of
# them by default. HELIX and HELIX_KAFKA name the programs. Python clients are installed into
# target/kafka-clients. What cannot be installed is skipped, and the last line says so.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
helix=${HELIX:-$target/debug/helix}
gateway=${HELIX_KAFKA:-$target/debug/helix-kafka}
venvs=${KAFKA_CLIENTS:-$target/kafka-clients}
port=${HELIX_TEST_PORT:-19092}
seed=${HELIX_TEST_SEED:-$RANDOM}
all=(kcat confluent-old confluent-new kafka-python-2 kafka-python-3 aiokafka)
clients=("$@")
[ ${#clients[@]} -gt 0 ] || clients=("${all[@]}")

for program in "$helix" "$gateway"; do
  [ -x "$program" ] || { echo "no program $program; build it, or set HELIX and HELIX_KAFKA" >&2; exit 2; }
done

work=$(mktemp -d)
pids=()
stop() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  rm -rf "$work"
}
trap stop EXIT
fail() {
  echo "FAILED: $*" >&2
  tail -n 20 "$work"/gateway-*.log >&2 || true
  exit 1
}

"$helix" dev --port "$port" --dir "$work/data" >"$work/dev.log" 2>&1 &
pids+=($!)
for _ in $(seq 300); do grep -q 'nodes ready' "$work/dev.log" && break; sleep 0.1; done
grep -q 'nodes ready' "$work/dev.log" || { cat "$work/dev.log" >&2; fail "the cluster did not start"; }
export HELIX_ADDR="127.0.0.1:$port,127.0.0.1:$((port + 1)),127.0.0.1:$((port + 2))"

table=""
for node in 1 2 3; do table+="${table:+,}$node=127.0.0.1:$((port + 200 + node))"; done
gateway_pids=()
for node in 1 2 3; do
  "$gateway" --listen-addr "127.0.0.1:$((port + 200 + node))" --gateways "$table" \
    >"$work/gateway-$node.log" 2>&1 &
  pids+=($!)
  gateway_pids+=($!)
done
bootstrap="127.0.0.1:$((port + 201)),127.0.0.1:$((port + 202)),127.0.0.1:$((port + 203))"
for node in 1 2 3; do
  for _ in $(seq 100); do grep -q listening "$work/gateway-$node.log" && break; sleep 0.1; done
done
echo "seed $seed, bootstrap $bootstrap"

# Installs a client. Fails if it cannot be had.
install() {
  local venv=$venvs/$1
  [ -x "$venv/bin/python" ] && [ -f "$venv/installed" ] && return 0
  python3 -m venv "$venv" >/dev/null 2>&1 || return 1
  "$venv/bin/pip" -q install "${@:2}" >/dev/null 2>&1 || return 1
  touch "$venv/installed"
}

run_python() { # CLIENT LIBRARY PACKAGE...
  if ! install "$1" "${@:3}"; then skipped+=("$1"); return 0; fi
  timeout 120 "$venvs/$1/bin/python" "$here/clients/check.py" "$2" "$bootstrap" "$1" "$seed" \
    "$helix" || fail "$1"
}

run_kcat() {
  command -v kcat >/dev/null || { skipped+=(kcat); return 0; }
  "$helix" topic create kcat --partitions 1 --batch-format any >/dev/null || fail "topic for kcat"
  seq 1 200 | sed 's/.*/key&:value &/' >"$work/in"
  for codec in none gzip snappy lz4 zstd; do
    kcat -b "$bootstrap" -t kcat -P -K: -z $codec -X acks=all "$work/in" -l || fail "kcat -z $codec"
  done
  timeout 20 kcat -b "$bootstrap" -t kcat -C -e -q -o beginning -f '%k:%s\n' >"$work/out" ||
    fail "kcat -C"
  for _ in 1 2 3 4 5; do cat "$work/in"; done | cmp - "$work/out" || fail "kcat reads other records"
  echo "native" | "$helix" produce kcat >/dev/null || fail "native append"
  timeout 20 kcat -b "$bootstrap" -t kcat -C -e -q -o -1 -f '%o %s\n' >"$work/out" || fail "kcat -o"
  [ "$(cat "$work/out")" = "1000 native" ] || fail "kcat reads $(cat "$work/out")"
  echo "kcat: ok"
}

skipped=()
for client in "${clients[@]}"; do
  case $client in
    kcat) run_kcat ;;
    confluent-old) run_python "$client" confluent confluent-kafka==2.0.2 ;;
    confluent-new) run_python "$client" confluent confluent-kafka ;;
    kafka-python-2) run_python "$client" kafka-python 'kafka-python<3' ;;
    kafka-python-3) run_python "$client" kafka-python 'kafka-python>=3' ;;
    aiokafka) run_python "$client" aiokafka aiokafka ;;
    *) fail "unknown client $client; clients are ${all[*]}" ;;
  esac
done
if [ ${#skipped[@]} -gt 0 ]; then echo "SKIPPED, not installed: ${skipped[*]}"; else echo "all clients passed"; fi
