#!/usr/bin/env bash
# Makes the certificates of scripts/docker/secure.yml: a CA, a directory for each node with its
# files, and one for the client `app`.
#   scripts/docker/certificates.sh [DIR]       DIR is ./tls by default; it must not exist
# A directory is mounted, not a file: a file that is replaced would stay the old one in a container.
# Programs come from the image HELIX_IMAGE (helix:latest). Files belong to user 10001, as which
# containers run.
set -euo pipefail

image=${HELIX_IMAGE:-helix:latest}
dir=${1:-./tls}
[ ! -e "$dir" ] || { echo "certificates: $dir exists already" >&2; exit 1; }
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
docker run --rm -i --user 0 -v "$dir:/tls" "$image" sh -eu <<'MAKE'
cd /tls
helix -q cert ca --cluster compose --dir . >/dev/null
for node in 1 2 3; do
    hosts="localhost,127.0.0.1,helix-$node"
    helix -q cert node "$node" --host "$hosts" --dir "node-$node" >/dev/null
    mv "node-$node/node-$node.pem" "node-$node/node.pem"
    mv "node-$node/node-$node.key" "node-$node/node.key"
    cp ca.pem "node-$node/"
done
helix -q cert client app --dir client >/dev/null
mv client/client-app.pem client/client.pem
mv client/client-app.key client/client.key
cp ca.pem client/
chown -R 10001:10001 node-1 node-2 node-3 client
MAKE
echo "certificates: made $dir; move $dir/ca.key to a safe place" >&2
