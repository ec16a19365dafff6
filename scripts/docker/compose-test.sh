#!/usr/bin/env bash
# docker-compose.yml for real: three nodes, of which one after the other is stopped, killed and cut
# off the network while helix-bench writes. Every write run reads back what was acked and fails if
# a record is missing, doubled or changed.
#   scripts/docker/compose-test.sh            about two minutes
# HELIX_IMAGE (helix:latest) must be there: `docker compose build` or scripts/docker/local-image.sh.
# HELIX_TEST_SECONDS (8) is the length of one write run; its fault comes in the middle.
# Says so and ends with 0 where there is no engine, no Compose or no image.
set -euo pipefail
cd "$(dirname "$0")/../.."

export HELIX_IMAGE=${HELIX_IMAGE:-helix:latest}
# Ports of its own: a cluster of the user's goes on beside it.
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
docker info >/dev/null 2>&1 || skip "no Docker engine answers"
if docker compose version >/dev/null 2>&1; then
    compose=(docker compose)
elif command -v docker-compose >/dev/null; then
    compose=(docker-compose)
else
    skip "neither docker compose nor docker-compose is here"
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
    compose down -v >/dev/null 2>&1 || echo "compose-test: $project could not be removed" >&2
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

# What the image brings, where the nodes' addresses hold: on the host.
on_host() { docker run --rm --network host -e HELIX_ADDR="$addr" "$HELIX_IMAGE" "$@"; }
# The container of a node, running or not, whatever this Compose calls it.
container() { compose ps -a -q "helix-$1"; }

# Repeats a command until it succeeds, for at most a minute.
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
# Every node answers, every shard has a leader, every replica has caught up.
cluster_is_healthy() { on_host helix cluster health; }
all_well() {
    for node in 1 2 3; do within_a_minute "helix-$node healthy" is_healthy "$node"; done
    within_a_minute "the cluster healthy" cluster_is_healthy
}
# The node that leads partition 0: the first that the description names.
leader() {
    local answer
    answer=$(on_host helix -o json topic describe "$topic")
    grep -m 1 '"node_id"' <<<"$answer" | grep -oE '[0-9]+' || fail "no leader in: $answer"
}

# bench NAME ARGS..: writes, reads back what was acked, and counts it. The report goes to a file.
bench() {
    local report=$work/$1
    shift
    docker run --rm --name "$project-bench" --network host "$HELIX_IMAGE" \
        helix-bench write --addr "$addr" --topic "$topic" --partition -1 --clients 4 \
        --batch-size 10 --size 256 --verify "$@" >"$report" 2>&1 || { cat "$report" >&2; return 1; }
}
# What was read back, one copy of each; a run whose every write failed is none.
verified() { sed -n 's/^verified: \([0-9,]*\) records.*/\1/p' "$work/$1" | tr -d ,; }
count() {
    local records
    records=$(verified "$1")
    [ "${records:-0}" -ge "$2" ] || { cat "$work/$1" >&2; fail "fewer than $2 records acked"; }
    written=$((written + records))
    grep -E '^ *(records/s|write  *[0-9]|verified)' "$work/$1"
}
# write FAULT ARGS..: writes with the fault in the middle, then, while it lasts, to every partition.
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
cut() { docker network disconnect "$network" "$(container "$1")"; }
heal() { docker network connect --alias "helix-$1" "$network" "$(container "$1")"; }
say "three nodes, ${compose[*]}"
compose up -d --no-build >/dev/null 2>&1 || { compose up -d --no-build || fail "up failed"; }
all_well
for node in 1 2 3; do
    docker run --rm --network "$network" "$HELIX_IMAGE" getent hosts "helix-$node" >/dev/null \
        || fail "helix-$node has no name in the network"
done
on_host helix topic create "$topic" --partitions 12 --replication-factor 3
say "nothing happens"
write true

node=$(leader)
say "docker stop helix-$node, which leads partition 0"
write stop "$node"
[ "$(docker inspect -f '{{.State.ExitCode}}' "$(container "$node")")" = 0 ] \
    || fail "helix-$node did not end with 0"
start "$node"
all_well

node=$(leader)
say "docker kill helix-$node, which leads partition 0"
write kill_node "$node"
start "$node"
all_well

node=$(leader)
say "docker network disconnect helix-$node, which leads partition 0"
write cut "$node"
heal "$node"
all_well

say "down and up with the same volumes, now with addresses for clients in the network"
compose down >/dev/null 2>&1
files+=(-f scripts/docker/inside.yml)
compose up -d --no-build >/dev/null 2>&1 || fail "up after down failed"
for node in 1 2 3; do within_a_minute "helix-$node healthy" is_healthy "$node"; done
in_node() { docker exec "$(container 2)" "$@"; }
within_a_minute "the cluster healthy" in_node helix cluster health
# Two reads of everything: the bench checks checksums and offsets, the CLI counts.
in_node helix-bench read --addr helix-1:9092 --topic "$topic" --partition -1 --clients 12 \
    --records "$((written * 12))" --warmup 0s --batch-size 1000 --size 256 --verify \
    >"$work/read" 2>&1 || { cat "$work/read" >&2; fail "what was written cannot be read"; }
[ "$(verified read)" = "$written" ] || fail "$written written, $(verified read) read by the bench"
lines=$(in_node helix -q -o json consume "$topic" | wc -l)
[ "$lines" = "$written" ] || fail "$written written, $lines read by the CLI"
say "done: $written records, none missing, none twice"
