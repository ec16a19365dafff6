#!/usr/bin/env bash
# Builds the image of docker-compose.yml without an image registry: the Dockerfile's last stage on a
# base from Debian's package mirror, with programs that were built on this machine.
#   scripts/docker/local-image.sh           builds the release programs first
#   scripts/docker/local-image.sh DIR       takes helix-server, helix, helix-bench and helix-kafka
#                                           from DIR
# HELIX_IMAGE names the result (helix:latest), DEBIAN_MIRROR the mirror. Building the base needs root
# and debootstrap, once. The programs must not need a newer C library than that of the base; the last
# step runs one of them to check.
set -euo pipefail
cd "$(dirname "$0")/../.."

image=${HELIX_IMAGE:-helix:latest}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
base=$(awk '$1 == "FROM" { last = $2 } END { print last }' Dockerfile)
suite=${base#debian:}
suite=${suite%-slim}

fail() {
    echo "local-image: $*" >&2
    exit 1
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Builds a base like debian:*-slim: a minimal system without documentation and package lists.
make_base() {
    command -v debootstrap >/dev/null || fail "no image $base; install debootstrap to build it"
    [ "$(id -u)" = 0 ] || fail "no image $base; building it needs root"
    echo "building $base from $mirror"
    debootstrap --variant=minbase "$suite" "$work/root" "$mirror" >"$work/log" 2>&1 \
        || { tail -n 20 "$work/log" >&2; fail "debootstrap failed"; }
    (cd "$work/root" && rm -rf usr/share/{doc,info,locale,man}/* \
        var/cache/apt/*.bin var/cache/apt/archives/*.deb var/lib/apt/lists/* var/log/*.log)
    tar -C "$work/root" --numeric-owner -c . \
        | docker import --change 'CMD ["bash"]' - "$base" >/dev/null
    rm -rf "$work/root"
}

docker info >/dev/null 2>&1 || fail "no Docker engine responds"
docker image inspect "$base" >/dev/null 2>&1 \
    || docker pull --quiet "$base" 2>/dev/null \
    || make_base

from=${1:-}
if [ -z "$from" ]; then
    cargo build --profile dist --locked -p helix-server -p helix-cli -p helix-bench \
        --features helix-server/otlp,helix-cli/otlp
    cargo build --profile dist --locked -p helix-kafka
    from=${CARGO_TARGET_DIR:-target}/dist
fi

mkdir -p "$work/context/programs"
for program in helix-server helix helix-bench helix-kafka; do
    [ -f "$from/$program" ] || fail "$from/$program does not exist"
    strip --strip-debug -o "$work/context/programs/$program" "$from/$program"
done
# The last stage, which copies the programs from the context instead of the first stage.
awk '$1 == "FROM" { stage = "" } { stage = stage $0 "\n" } END { printf "%s", stage }' Dockerfile \
    | sed 's|^COPY --from=build /programs/|COPY programs/|' >"$work/context/Dockerfile"
grep -q '^COPY programs/' "$work/context/Dockerfile" || fail "the Dockerfile no longer has COPY --from=build /programs/"

docker build --quiet --tag "$image" "$work/context" >/dev/null
docker run --rm "$image" helix-server --version
echo "built $image"
