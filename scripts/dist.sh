#!/usr/bin/env bash
# Builds a release: an archive with programs, documentation, systemd unit, completions and a list of
# all dependencies, and the checksums of what was built. With cargo-deb also a Debian package; with
# cargo-cyclonedx also an SBOM of each program in CycloneDX form. TARGET selects the platform:
#   TARGET=x86_64-unknown-linux-musl bash scripts/dist.sh
set -euo pipefail
cd "$(dirname "$0")/.."
target=${TARGET:-$(rustc -vV | sed -n 's/^host: //p')}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
target_dir=${CARGO_TARGET_DIR:-target}
name=helix-$version-$target
out=dist/$name
# Times in the archive are those of the commit, so that equal sources give equal archives.
epoch=$(git log -1 --format=%ct 2>/dev/null || date +%s)

cargo build --profile dist --locked --target "$target" -p helix-server -p helix-cli -p helix-bench --bins \
    --features helix-server/otlp,helix-cli/otlp
# Apart from the others, so that their dependencies have none of its features.
cargo build --profile dist --locked --target "$target" -p helix-kafka --bins
rm -rf "$out"
mkdir -p "$out/completions"
for program in helix helix-server helix-bench helix-kafka; do
    cp "$target_dir/$target/dist/$program" "$out/"
    strip --strip-debug "$out/$program" 2>/dev/null || true
done
bash scripts/packed-docs.sh "$out"
cp packaging/helix-server.service packaging/server.toml packaging/helix-kafka.service \
    packaging/kafka.env "$out/"
# The programs of another platform do not run here.
if "$out/helix" --version >/dev/null 2>&1; then
    for shell in bash zsh fish; do
        for program in helix helix-server; do
            "$out/helix" completions "$shell" --program "$program" \
                > "$out/completions/$program.$shell"
        done
    done
fi
cargo tree --locked --target "$target" -e normal --prefix none -p helix-server -p helix-cli \
    -p helix-bench -p helix-kafka | sed 's/ (.*//' | sort -u > "$out/DEPENDENCIES"
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$epoch" -C dist -cf - "$name" |
    gzip -9n > "dist/$name.tar.gz"

if command -v cargo-cyclonedx >/dev/null; then
    # Writes a file beside the manifest of every crate of the workspace.
    cargo cyclonedx --format json --target "$target" --override-filename helix-sbom
    for crate in helix-server helix-cli helix-bench helix-kafka; do
        mv "$crate/helix-sbom.json" "dist/$name.$crate.cdx.json"
    done
    find . -path ./target -prune -o -name helix-sbom.json -exec rm {} +
else
    echo "note: no SBOM was made, cargo-cyclonedx is not installed; DEPENDENCIES lists all crates"
fi
if command -v cargo-deb >/dev/null; then
    # Named by the target: packages of the same architecture would replace each other.
    cargo deb --no-build --profile dist --target "$target" -p helix-server --output "dist/$name.deb"
else
    echo "note: no Debian package was made, cargo-deb is not installed"
fi
# Only the files of this target: those of another one may be built again without this one.
(cd dist && find . -maxdepth 1 -type f -name "$name.*" ! -name '*.sha256' -printf '%P\n' | sort |
    xargs sha256sum > "$name.sha256")
echo "dist/$name.tar.gz"
cat "dist/$name.sha256"
