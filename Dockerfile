# helix-server, helix and helix-bench on Debian. Builds with BuildKit and with the legacy builder,
# which is why nothing here mounts a cache. scripts/docker/local-image.sh takes the last stage as it is.

# What decides about the dependencies: the manifests, with empty sources beside them.
# (`{ }`: find would put the name of the file in place of `{}`.)
FROM rust:1.95-bookworm AS manifests
WORKDIR /src
COPY . .
RUN find . -type f ! -name 'Cargo.*' ! -path './*/build.rs' ! -path './*/src/lib.rs' \
        ! -path './*/src/main.rs' ! -path './*/benches/*.rs' -delete \
    && find . -name '*.rs' -exec sh -c 'echo "fn main() { }" > "$1"' - '{}' ';' \
    && find . -type d -empty -delete

FROM rust:1.95-bookworm AS build
WORKDIR /src
# The dependencies are a layer of their own, which stays while those files do.
COPY --from=manifests /src .
# Files that are copied keep their old times: without the last step cargo would take what it has
# made of the empty sources for current.
RUN cargo build --release --locked -p helix-server -p helix-cli -p helix-bench \
    && rm -rf target/release/.fingerprint/helix-*
COPY . .
RUN cargo build --release --locked -p helix-server -p helix-cli -p helix-bench \
    && mkdir /programs \
    && for program in helix-server helix helix-bench; do \
        strip --strip-debug -o /programs/$program target/release/$program || exit 1; \
    done

FROM debian:bookworm-slim
LABEL org.opencontainers.image.title="Helix" \
      org.opencontainers.image.description="Replicated append-only logs over gRPC" \
      org.opencontainers.image.licenses="Apache-2.0"
# A volume that is empty takes the owner of the folder it covers.
RUN groupadd --gid 10001 helix \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/helix \
        --shell /usr/sbin/nologin helix \
    && install -d -o helix -g helix -m 0750 /var/lib/helix
COPY --from=build /programs/ /usr/local/bin/
# In a container all addresses means: whatever network it is given. What clients dial is said
# per node; this default is right for one node whose port 9092 is published as it is.
# What is not there yet, TLS and authentication, is to be made up for by that network.
ENV HELIX_INSECURE=true \
    HELIX_LISTEN_ADDR=0.0.0.0:9092 \
    HELIX_ADVERTISE_ADDR=localhost:9092 \
    HELIX_PEER_ADDR=0.0.0.0:9192 \
    HELIX_ADMIN_ADDR=0.0.0.0:9644 \
    HELIX_DATA_DIR=/var/lib/helix
USER 10001:10001
WORKDIR /var/lib/helix
VOLUME /var/lib/helix
# Clients, the other nodes, and probes and scrapers.
EXPOSE 9092 9192 9644
# A node that gets it hands its leaderships over, syncs and ends with 0.
STOPSIGNAL SIGTERM
# Asks this node for the cluster's topics: it answers once it is part of a cluster. The state of
# the other nodes does not make this one unhealthy.
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
    CMD ["helix", "--quiet", "--addr", "127.0.0.1:9092", "topic", "list"]
# No entry point: `docker run IMAGE helix-bench write ...` runs the other programs.
CMD ["helix-server"]
