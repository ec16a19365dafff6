# helix-server, helix, helix-bench and helix-kafka on Debian. No cache mounts, so that the legacy
# builder works too. scripts/docker/local-image.sh uses the last stage as it is.

# The manifests with empty sources: the input of the dependency layer.
# (`{ }`, because find replaces `{}` with the file name.)
FROM rust:1.95-bookworm AS manifests
WORKDIR /src
COPY . .
RUN find . -type f ! -name 'Cargo.*' ! -path './*/build.rs' ! -path './*/src/lib.rs' \
        ! -path './*/src/main.rs' ! -path './*/benches/*.rs' -delete \
    && find . -name '*.rs' -exec sh -c 'echo "fn main() { }" > "$1"' - '{}' ';' \
    && find . -type d -empty -delete

FROM rust:1.95-bookworm AS build
WORKDIR /src
# Dependencies are a layer of their own, cached while the manifests are unchanged.
COPY --from=manifests /src .
# Copied files keep their old times: without the last step cargo would treat the builds of the
# empty sources as current.
RUN cargo build --profile dist --locked -p helix-server -p helix-cli -p helix-bench \
        --features helix-server/otlp,helix-cli/otlp \
    && cargo build --profile dist --locked -p helix-kafka \
    && rm -rf target/dist/.fingerprint/helix-*
COPY . .
# The gateway is built apart, so that the other programs have none of its features.
RUN cargo build --profile dist --locked -p helix-server -p helix-cli -p helix-bench \
        --features helix-server/otlp,helix-cli/otlp \
    && cargo build --profile dist --locked -p helix-kafka \
    && mkdir /programs \
    && for program in helix-server helix helix-bench helix-kafka; do \
        strip --strip-debug -o /programs/$program target/dist/$program || exit 1; \
    done

FROM debian:bookworm-slim
LABEL org.opencontainers.image.title="Helix" \
      org.opencontainers.image.description="Replicated append-only logs over gRPC" \
      org.opencontainers.image.licenses="Apache-2.0"
# An empty volume takes the owner of the directory that it covers.
RUN groupadd --gid 10001 helix \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/helix \
        --shell /usr/sbin/nologin helix \
    && install -d -o helix -g helix -m 0750 /var/lib/helix
COPY --from=build /programs/ /usr/local/bin/
# Listens on every address of the container's network. The advertised address is set per node; this
# default fits one node whose port 9092 is published unchanged. It has no TLS and no access control,
# so that network must be trusted; scripts/docker/secure.yml has both.
ENV HELIX_INSECURE=true \
    HELIX_LISTEN_ADDR=0.0.0.0:9092 \
    HELIX_ADVERTISE_ADDR=localhost:9092 \
    HELIX_PEER_ADDR=0.0.0.0:9192 \
    HELIX_ADMIN_ADDR=0.0.0.0:9644 \
    HELIX_DATA_DIR=/var/lib/helix
USER 10001:10001
WORKDIR /var/lib/helix
VOLUME /var/lib/helix
# Clients; other nodes; probes and metrics; Kafka's clients, and the metrics of the gateway.
EXPOSE 9092 9192 9644 9292 9844
# On SIGTERM a node transfers its leaderships, syncs and exits with 0.
STOPSIGNAL SIGTERM
# Lists topics at this node: it answers once it is part of a cluster. Other nodes' state does not
# make this one unhealthy.
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
    CMD ["helix", "--quiet", "--addr", "127.0.0.1:9092", "topic", "list"]
# No entry point, so that `docker run IMAGE helix-bench write ...` runs the other programs.
CMD ["helix-server"]
