#!/usr/bin/env bash
# Copies what a release archive has beside the programs: the documentation with everything that it
# links to, and the .proto files of the public API. Fails if a link of a copied page is dead. A
# directory cannot have the name of a program: helix, helix-server, helix-bench or helix-kafka.
#   bash scripts/packed-docs.sh DIRECTORY
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1
mkdir -p "$out"
cp LICENSE README.md CHANGELOG.md SECURITY.md CONTRIBUTING.md docker-compose.yml "$out/"
cp -R docs "$out/"
for path in clients/python/*.md clients/python/*.py clients/python/examples clients/ruby \
    packaging/kubernetes helix-client/examples \
    scripts/docker helix-proto/proto/helix/log; do
    mkdir -p "$out/$(dirname "$path")"
    cp -R "$path" "$out/$path"
done
bash scripts/dead-links.sh "$out"
