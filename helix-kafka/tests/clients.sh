#!/usr/bin/env bash
# Runs Kafka's clients against a cluster of three nodes with a gateway beside each:
#   helix-kafka/tests/clients.sh [CLIENT...]
# Clients are kcat, confluent-old, confluent-new, kafka-python-2, kafka-python-3, kafka-python-1.4 and
# aiokafka. Scenarios with the newest confluent-kafka are dev, old, seek, mixed, partitions, login and
# failures. All of them run by default. HELIX and HELIX_KAFKA name the programs, HELIX_PARTITIONS is
# the number of partitions in the scenario of that name. Python clients are installed into
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
all=(kcat confluent-old confluent-new kafka-python-2 kafka-python-3 kafka-python-1.4 aiokafka)
all+=(dev old seek mixed partitions login failures)
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
    --metrics-addr "127.0.0.1:$((port + 300 + node))" \
    >"$work/gateway-$node.log" 2>&1 &
  pids+=($!)
  gateway_pids+=($!)
done
bootstrap="127.0.0.1:$((port + 201)),127.0.0.1:$((port + 202)),127.0.0.1:$((port + 203))"
for node in 1 2 3; do
  for _ in $(seq 100); do grep -q "listening addr" "$work/gateway-$node.log" && break; sleep 0.1; done
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

run_scenario() { # SCENARIO ARGUMENT...
  if ! install confluent-new confluent-kafka; then skipped+=("$1"); return 0; fi
  timeout 100 "$venvs/confluent-new/bin/python" "$here/clients/scenarios.py" "$1" "$bootstrap" \
    "$helix" "${@:2}" || fail "$1"
}

# Starts a node that checks credentials, and a gateway with TLS and logins.
run_login() {
  command -v openssl >/dev/null || { skipped+=(login); return 0; }
  local dir=$work/login node=127.0.0.1:$((port + 20)) bootstrap=localhost:$((port + 220)) x
  mkdir "$dir"
  (
    cd "$dir"
    "$helix" cert ca --cluster kafka --dir . && "$helix" cert node 1 --host localhost
    openssl genpkey -algorithm ed25519 -out jwt.key
    x=$(openssl pkey -in jwt.key -pubout -outform DER | tail -c 32 | base64 | tr '+/' '-_' | tr -d =)
    echo '{"keys":[{"kty":"OKP","crv":"Ed25519","kid":"k","use":"sig","alg":"EdDSA","x":"'"$x"'"}]}' \
      >jwks.json
  ) >"$dir/log" 2>&1 || { cat "$dir/log" >&2; fail "certificates"; }
  "$helix" server --data-dir "$dir/data" --listen-addr "$node" --admin-addr off --auth required \
    --jwt-jwks "$dir/jwks.json" --jwt-issuer clients --jwt-audience helix >"$dir/node.log" 2>&1 &
  pids+=($!)
  local admin=(--addr "$node" --token-file "$dir/data/admin-token")
  for _ in $(seq 100); do "$helix" whoami "${admin[@]}" >/dev/null 2>&1 && break; sleep 0.1; done
  "$helix" topic create secret --partitions 1 --batch-format kafka "${admin[@]}" >/dev/null &&
    "$helix" token create app --role producer:secret --role consumer:secret \
      --role group-member:secret-reader "${admin[@]}" \
      >"$dir/token" 2>"$dir/log" &&
    "$helix" acl allow jwt:app 'topic:secret=read,write' "${admin[@]}" >/dev/null ||
    { cat "$dir"/*log >&2; fail "setup of login"; }
  "$gateway" --listen-addr "127.0.0.1:$((port + 220))" --advertised-addr "$bootstrap" \
    --addr "$node" --metrics-addr off --sasl --tls-cert "$dir/node-1.pem" --tls-key "$dir/node-1.key" \
    >"$work/gateway-login.log" 2>&1 &
  pids+=($!)
  for _ in $(seq 100); do grep -q 'listening addr' "$work/gateway-login.log" && break; sleep 0.1; done
  run_scenario login "$dir/ca.pem" "$(cat "$dir/token")" "$dir/jwt.key"
}

# Starts a dev cluster with gateways, and writes and reads through one of them.
run_dev() {
  command -v kcat >/dev/null || { skipped+=(dev); return 0; }
  local base=$((port + 40)) dev_pid addr
  PATH="$(dirname "$gateway"):$PATH" "$helix" dev --kafka --memory --nodes 1 --port "$base" \
    >"$work/dev-kafka.log" 2>&1 &
  dev_pid=$!
  pids+=("$dev_pid")
  for _ in $(seq 100); do grep -q '^Ctrl-C' "$work/dev-kafka.log" 2>/dev/null && break; sleep 0.1; done
  addr=$(sed -n "s/^For Kafka's clients, bootstrap.servers is //p" "$work/dev-kafka.log")
  [ -n "$addr" ] || { cat "$work/dev-kafka.log" >&2; fail "helix dev --kafka"; }
  "$helix" topic create events --batch-format any --addr "127.0.0.1:$base" >/dev/null
  echo hello | kcat -b "$addr" -P -t events || fail "dev: kcat -P"
  [ "$(timeout 20 kcat -b "$addr" -C -e -q -t events)" = hello ] || fail "dev: kcat -C"
  kill -INT "$dev_pid" && wait "$dev_pid" || true
  # The gateway ends with the cluster.
  kcat -b "$addr" -L -m 2 >/dev/null 2>&1 && fail "dev: the gateway runs on"
  echo "dev: ok"
}

# The gateways are ready, and no client has violated the protocol. One of them may have been killed.
check_metrics() {
  command -v curl >/dev/null || return 0
  local page node
  for node in 1 3; do
    page=$(curl -sf "http://127.0.0.1:$((port + 300 + node))/metrics") || fail "no metrics"
    grep -q '^helix_kafka_ready 1$' <<<"$page" || fail "gateway $node is not ready"
    grep -q '^helix_kafka_protocol_errors_total 0$' <<<"$page" || fail "violations at gateway $node"
  done
}

skipped=()
for client in "${clients[@]}"; do
  case $client in
    kcat) run_kcat ;;
    confluent-old) run_python "$client" confluent confluent-kafka==2.0.2 ;;
    confluent-new) run_python "$client" confluent confluent-kafka ;;
    kafka-python-2) run_python "$client" kafka-python 'kafka-python<3' ;;
    kafka-python-3) run_python "$client" kafka-python 'kafka-python>=3' ;;
    kafka-python-1.4) run_python "$client" kafka-python-old kafka-python==1.4.7 ;;
    aiokafka) run_python "$client" aiokafka aiokafka ;;
    dev) run_dev ;;
    old | seek) run_scenario "$client" ;;
    mixed) run_scenario mixed $((port + 301)) $((port + 302)) $((port + 303)) ;;
    partitions) run_scenario partitions "${HELIX_PARTITIONS:-1000}" ;;
    login) run_login ;;
    failures)
      # Its end is not reported by this shell.
      disown "${gateway_pids[1]}"
      run_scenario failures "${gateway_pids[1]}" "$port"
      ;;
    *) fail "unknown client $client; clients are ${all[*]}" ;;
  esac
done
check_metrics
if [ ${#skipped[@]} -gt 0 ]; then echo "SKIPPED, not installed: ${skipped[*]}"; else echo "all clients passed"; fi
