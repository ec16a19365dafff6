#!/usr/bin/env bash
# Makes the image of docker-compose.yml where no image can be pulled: the Dockerfile's last stage
# on a base from Debian's package mirror, with programs that were built on this machine.
#   scripts/docker/local-image.sh             builds the release programs first
#   scripts/docker/local-image.sh FOLDER      takes helix-server, helix and helix-bench from FOLDER
# HELIX_IMAGE names the result (helix:latest), DEBIAN_MIRROR the mirror. The base needs root and
# debootstrap, once. The programs must come from a system whose C library is not newer than the
# base's; the last step runs one of them to see.
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

# What debian:*-slim is: a minimal system without documentation and package lists.
make_base() {
    command -v debootstrap >/dev/null || fail "$base is not here; apt-get install debootstrap"
    [ "$(id -u)" = 0 ] || fail "$base is not here; debootstrap needs root"
    echo "making $base from $mirror"
    debootstrap --variant=minbase "$suite" "$work/root" "$mirror" >"$work/log" 2>&1 \
        || { tail -n 20 "$work/log" >&2; fail "debootstrap failed"; }
    (cd "$work/root" && rm -rf usr/share/{doc,info,locale,man}/* \
        var/cache/apt/*.bin var/cache/apt/archives/*.deb var/lib/apt/lists/* var/log/*.log)
    tar -C "$work/root" --numeric-owner -c . \
        | docker import --change 'CMD ["bash"]' - "$base" >/dev/null
    rm -rf "$work/root"
}

docker info >/dev/null 2>&1 || fail "no Docker engine answers"
docker image inspect "$base" >/dev/null 2>&1 \
    || docker pull --quiet "$base" 2>/dev/null \
    || make_base

from=${1:-}
if [ -z "$from" ]; then
    cargo build --release --locked -p helix-server -p helix-cli -p helix-bench
    from=${CARGO_TARGET_DIR:-target}/release
fi

mkdir -p "$work/context/programs"
for program in helix-server helix helix-bench; do
    [ -f "$from/$program" ] || fail "$from/$program is not there"
    strip --strip-debug -o "$work/context/programs/$program" "$from/$program"
done
# The last stage, with its one copy from the first taken from the context instead.
awk '$1 == "FROM" { stage = "" } { stage = stage $0 "\n" } END { printf "%s", stage }' Dockerfile \
    | sed 's|^COPY --from=build /programs/|COPY programs/|' >"$work/context/Dockerfile"
grep -q '^COPY programs/' "$work/context/Dockerfile" || fail "the Dockerfile has changed shape"

docker build --quiet --tag "$image" "$work/context" >/dev/null
docker run --rm "$image" helix-server --version
echo "made $image"
