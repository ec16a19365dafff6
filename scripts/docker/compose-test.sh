#!/usr/bin/env bash
# Tests docker-compose.yml: stops, kills and isolates one of three nodes at a time while helix-bench
# writes. Every write run reads acknowledged records back, and fails if a record is missing,
# duplicated or changed. Ends with the secure variant, scripts/docker/secure.yml.
#   scripts/docker/compose-test.sh            about two minutes
# HELIX_IMAGE (helix:latest) must exist: `docker compose build` or scripts/docker/local-image.sh.
# HELIX_TEST_SECONDS (8) is the duration of a write run; its fault comes in the middle.
# Exits with 0 and a note if there is no engine, no Compose or no image.
set -euo pipefail
cd "$(dirname "$0")/../.."

export HELIX_IMAGE=${HELIX_IMAGE:-helix:latest}
# Separate ports, so that a running cluster is not affected.
export HELIX_PORT_1=${HELIX_PORT_1:-19092} HELIX_PORT_2=${HELIX_PORT_2:-19093}
export HELIX_PORT_3=${HELIX_PORT_3:-19094}
export HELIX_ADMIN_PORT_1=${HELIX_ADMIN_PORT_1:-19644}
export HELIX_ADMIN_PORT_2=${HELIX_ADMIN_PORT_2:-19645}
export HELIX_ADMIN_PORT_3=${HELIX_ADMIN_PORT_3:-19646}
addr=localhost:$HELIX_PORT_1,localhost:$HELIX_PORT_2,localhost:$HELIX_PORT_3
seconds=${HELIX_TEST_SECONDS:-8}
project=helix-test-$$
network=${project}_default
topic=orders
written=0

skip() {
    echo "compose-test: SKIPPED, nothing was tested: $*" >&2
    exit 0
}
docker info >/dev/null 2>&1 || skip "no Docker engine responds"
if docker compose version >/dev/null 2>&1; then
    compose=(docker compose)
elif command -v docker-compose >/dev/null; then
    compose=(docker-compose)
else
    skip "neither docker compose nor docker-compose is installed"
fi
docker image inspect "$HELIX_IMAGE" >/dev/null 2>&1 \
    || skip "no image $HELIX_IMAGE; see scripts/docker/local-image.sh"
files=(-f docker-compose.yml)
compose() { "${compose[@]}" -p "$project" "${files[@]}" "$@"; }

work=$(mktemp -d)
end() {
    status=$?
    if [ "$status" != 0 ]; then
        echo "compose-test: FAILED; the end of the nodes' logs:" >&2
        docker ps -a --filter "label=com.docker.compose.project=$project" >&2 || true
        compose logs --tail=40 --no-color >&2 || true
    fi
    docker rm -f "$project-bench" >/dev/null 2>&1 || true
    # Its files belong to the containers' user.
    [ ! -d "$work/tls" ] || docker run --rm --user 0 -v "$work:/mnt" "$HELIX_IMAGE" \
        rm -rf /mnt/tls || true
    compose down -v >/dev/null 2>&1 || echo "compose-test: cannot remove $project" >&2
    rm -rf "$work"
    exit "$status"
}
trap end EXIT
trap 'exit 130' INT TERM

say() { printf '%(%H:%M:%S)T  %s\n' -1 "$*"; }
fail() {
    echo "compose-test: $*" >&2
    exit 1
}

# Runs a program of the image on the host network, where the nodes' addresses are valid.
on_host() { docker run --rm --network host -e HELIX_ADDR="$addr" "$HELIX_IMAGE" "$@"; }
# Prints the container id of a node, running or not.
container() { compose ps -a -q "helix-$1"; }

# Retries a command until it succeeds, for at most a minute.
within_a_minute() {
    local what=$1 deadline=$((SECONDS + 60))
    shift
    until "$@" >"$work/last" 2>&1; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            cat "$work/last" >&2
            fail "not within a minute: $what"
        fi
        sleep 0.5
    done
}
is_healthy() {
    local state
    state=$(docker inspect -f '{{.State.Health.Status}}' "$(container "$1")")
    echo "helix-$1 is $state"
    [ "$state" = healthy ]
}
# Succeeds if every node responds, every shard has a leader, and every replica has caught up.
cluster_is_healthy() { on_host helix cluster health; }
wait_healthy() {
    for node in 1 2 3; do within_a_minute "helix-$node healthy" is_healthy "$node"; done
    within_a_minute "the cluster healthy" cluster_is_healthy
}
# Prints the leader of partition 0: the first node id in the description.
leader() {
    local topic_json
    topic_json=$(on_host helix -o json topic describe "$topic")
    grep -m 1 '"node_id"' <<<"$topic_json" | grep -oE '[0-9]+' || fail "no leader in: $topic_json"
}

# bench NAME ARGS..: writes, then reads acknowledged records back. The report goes to file NAME.
bench() {
    local report=$work/$1
    shift
    docker run --rm --name "$project-bench" --network host "$HELIX_IMAGE" \
        helix-bench write --addr "$addr" --topic "$topic" --partition -1 --clients 4 \
        --batch-size 10 --size 256 --verify "$@" >"$report" 2>&1 || { cat "$report" >&2; return 1; }
}
# Prints the number of verified records of a report.
verified() { sed -n 's/^verified: \([0-9,]*\) records.*/\1/p' "$work/$1" | tr -d ,; }
count() {
    local records
    records=$(verified "$1")
    [ "${records:-0}" -ge "$2" ] || { cat "$work/$1" >&2; fail "fewer than $2 records acked"; }
    written=$((written + records))
    grep -E '^ *(records/s|write  *[0-9]|verified)' "$work/$1"
}
# write FAULT ARGS..: writes with the fault in the middle, then to every partition during the fault.
write() {
    bench during --rate 1000 --duration "${seconds}s" &
    local pid=$!
    sleep "$((seconds / 2))"
    "$@"
    wait "$pid" || fail "writing through '$*' failed"
    count during 1000
    bench after --records 2000 || fail "writing after '$*' failed"
    count after 2000
}
stop() { compose stop "helix-$1" >/dev/null 2>&1; }
kill_node() { docker kill "$(container "$1")" >/dev/null; }
start() { compose start "helix-$1" >/dev/null 2>&1; }
isolate() { docker network disconnect "$network" "$(container "$1")"; }
heal() { docker network connect --alias "helix-$1" "$network" "$(container "$1")"; }
say "three nodes, ${compose[*]}"
compose up -d --no-build >/dev/null 2>&1 || { compose up -d --no-build || fail "up failed"; }
wait_healthy
for node in 1 2 3; do
    docker run --rm --network "$network" "$HELIX_IMAGE" getent hosts "helix-$node" >/dev/null \
        || fail "helix-$node has no name in the network"
done
on_host helix topic create "$topic" --partitions 12 --replication-factor 3
say "no fault"
write true

node=$(leader)
say "docker stop helix-$node, the leader of partition 0"
write stop "$node"
[ "$(docker inspect -f '{{.State.ExitCode}}' "$(container "$node")")" = 0 ] \
    || fail "helix-$node did not exit with 0"
start "$node"
wait_healthy

node=$(leader)
say "docker kill helix-$node, the leader of partition 0"
write kill_node "$node"
start "$node"
wait_healthy

node=$(leader)
say "docker network disconnect helix-$node, the leader of partition 0"
write isolate "$node"
heal "$node"
wait_healthy

say "down and up with the same volumes, with addresses for clients in the network"
compose down >/dev/null 2>&1
files+=(-f scripts/docker/inside.yml)
compose up -d --no-build >/dev/null 2>&1 || fail "up after down failed"
for node in 1 2 3; do within_a_minute "helix-$node healthy" is_healthy "$node"; done
in_node() { docker exec "$(container 2)" "$@"; }
within_a_minute "the cluster healthy" in_node helix cluster health
# Two reads of everything: the bench checks checksums and offsets, the CLI counts.
in_node helix-bench read --addr helix-1:9092 --topic "$topic" --partition -1 --clients 12 \
    --records "$((written * 12))" --warmup 0s --batch-size 1000 --size 256 --verify \
    >"$work/read" 2>&1 || { cat "$work/read" >&2; fail "cannot read the written records"; }
[ "$(verified read)" = "$written" ] || fail "$written written, $(verified read) read by the bench"
lines=$(in_node helix -q -o json consume "$topic" | wc -l)
[ "$lines" = "$written" ] || fail "$written written, $lines read by the CLI"

say "the secure variant, with new volumes"
compose down -v >/dev/null 2>&1
export HELIX_TLS_DIR=$work/tls
scripts/docker/certificates.sh "$HELIX_TLS_DIR" 2>/dev/null || fail "no certificates"
files=(-f docker-compose.yml -f scripts/docker/secure.yml)
compose up -d --no-build >/dev/null 2>&1 || fail "up of the secure variant failed"
for node in 1 2 3; do within_a_minute "helix-$node healthy" is_healthy "$node"; done
if on_host helix topic list >"$work/last" 2>&1; then fail "a client without TLS was served"; fi
grep -q "requires TLS" "$work/last" || { cat "$work/last" >&2; fail "the error has no reason"; }
tools() {
    docker run --rm -i --network host -e HELIX_ADDR="$addr" -e HELIX_TOKEN \
        -v "$HELIX_TLS_DIR/client:/tls:ro" \
        -e HELIX_TLS_CA=/tls/ca.pem -e HELIX_TLS_CERT=/tls/client.pem \
        -e HELIX_TLS_KEY=/tls/client.key "$HELIX_IMAGE" "$@"
}
within_a_minute "the secure cluster healthy" tools helix cluster health
tools helix topic create "$topic" --partitions 3 --replication-factor 3 >/dev/null
seq 100 | tools helix -q produce "$topic" >/dev/null
lines=$(tools helix -q -o json consume "$topic" | wc -l)
[ "$lines" = 100 ] || fail "100 written over TLS, $lines read"

say "the secure variant with rules"
export HELIX_AUTH=required
compose up -d --no-build >/dev/null 2>&1 || fail "up with HELIX_AUTH=required failed"
for node in 1 2 3; do within_a_minute "helix-$node healthy" is_healthy "$node"; done
if seq 100 | tools helix -q produce "$topic" >"$work/last" 2>&1; then
    fail "a client without rights was served"
fi
grep -q "may not describe" "$work/last" || { cat "$work/last" >&2; fail "the error has no reason"; }
# One node has the file.
admin_token() {
    local node
    for node in 1 2 3; do
        docker exec "$(container "$node")" cat /var/lib/helix/admin-token 2>/dev/null && return
    done
    return 1
}
within_a_minute "the first token" admin_token
token=$(admin_token)
HELIX_TOKEN=$token tools helix acl allow app "topic:$topic=read,write" >/dev/null
seq 100 | tools helix -q produce "$topic" >/dev/null
lines=$(tools helix -q -o json consume "$topic" | wc -l)
[ "$lines" = 200 ] || fail "200 written with rights, $lines read"
say "done: $written records, none missing or duplicated"
