# Recipes beside `cargo test` and `helix demo`. `just --list` shows them.

# What every change must pass.
verify:
    bash .ci/run

# Formats and applies what clippy can fix by itself.
fix:
    cargo clippy --workspace --all-targets --fix --allow-dirty
    cargo fmt --all

# All tests.
test *args:
    cargo test --workspace {{args}}

# The WAL's model and crash tests at length, so many times over: `just soak-wal 10`.
soak-wal rounds="10":
    HELIX_ROUNDS={{rounds}} cargo test --profile soak -p helix-wal --test it -- --nocapture

# Crashes short sequences of actions on a log in every way: `just explore-wal 5000000`.
explore-wal states="1000000":
    HELIX_STATES={{states}} MALLOC_TRIM_THRESHOLD_=1073741824 \
        cargo test --profile soak -p helix-wal --test it -- short_sequences --nocapture

# Damages each version of a log's files: every bit and length (1), or one in so many.
corruption-matrix share="1":
    HELIX_SHARE={{share}} MALLOC_TRIM_THRESHOLD_=1073741824 \
        cargo test --profile soak -p helix-wal --test it -- matrix --nocapture

# The log's threads in many orders, so many thousand each: `just interleavings 10`.
interleavings rounds="1":
    RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/shuttle HELIX_ROUNDS={{rounds}} \
        cargo test -p helix-wal --test it -- interleavings

# Plants known bugs in a copy of the tree: after how many orders each is found.
interleavings-bugs rounds="10":
    bash helix-wal/tests/bugs/run.sh {{rounds}}

# A fuzz target (testing/fuzz/src/lib.rs lists them): `just fuzz wal_damage --seconds 600`.
fuzz target *args:
    bash testing/fuzz/runner/run.sh {{target}} {{args}}

# Kills a real node at random moments: `just soak-kill 500`.
soak-kill kills="500":
    HELIX_KILLS={{kills}} cargo test --release -p helix-server --test it -- kill --nocapture

# The bench, e.g. `just bench write --clients 4 --duration 5s`.
bench *args:
    cargo run --release -p helix-bench -- {{args}}

# Criterion benchmarks.
criterion:
    cargo bench -p helix-wal
    cargo bench -p helix-server

# Every kind of fault on three real nodes, in rounds that end with all nodes dead: docs/testing.md.
chaos *args:
    cargo run --release -p helix-chaos -- run --kills 120 --pauses 60 --partitions 60 --duration-max 3h {{args}}

# All nodes killed at once, again and again.
chaos-massacre *args:
    cargo run --release -p helix-chaos -- massacre {{args}}

# Retries forced by swallowed answers and killed leaders.
chaos-retries *args:
    cargo run --release -p helix-chaos -- retries {{args}}

# Time from a leader's death to the next ack at a client.
chaos-failover *args:
    cargo run --release -p helix-chaos -- failover {{args}}

# Whole clusters in simulation: `just sim --seed 7`, `just sim --seconds 600 --jobs 2 --marks`.
sim *args:
    cd testing/sim && cargo run -- {{args}}

# Plants known bugs in a copy of the tree, and shows which seed finds each: `just sim-bugs --seconds 60`.
sim-bugs *args:
    bash testing/sim/bugs.sh {{args}}

# Known bugs planted in a copy of the tree: which of them real processes show, and after how long.
chaos-bugs *args:
    bash testing/chaos/bugs.sh {{args}}

# More clients than a node wants, with room for few of them and then for all: memory below its limit,
# others served.
flood *args:
    cargo run --release -p helix-chaos -- flood {{args}}
    cargo run --release -p helix-chaos -- flood --memory-limit-mib 3072 {{args}}

# How fast a node that lacks purged log gets the records, beside writers: `just refill --gib 10`.
refill *args:
    cargo run --release -p helix-chaos -- refill --topic-partitions 1 {{args}}

# Space and reads with compaction, on a log of so many MiB: `just bench-compaction 1280`.
bench-compaction mib="1280":
    HELIX_COMPACTION_MIB={{mib}} cargo bench -p helix-wal --bench wal_compaction

# One node after the other drained (or with --plain not), restarted and taken back under load; p99 before
# and during. `--pause 0s`: the next one at once.
chaos-rolling *args:
    cargo run --release -p helix-chaos -- rolling --p99-factor-max 3 {{args}}

# One node to five, a lost disk replaced, five to three, under load.
chaos-grow *args:
    cargo run --release -p helix-chaos -- grow {{args}}

# The .proto files by buf's rules: helix-proto/buf.yaml.
proto-lint:
    bash .ci/buf lint helix-proto

# Whether the .proto files still speak with those of a commit, on the wire and in JSON.
proto-breaking ref="HEAD":
    bash .ci/buf breaking helix-proto --against '.git#ref={{ref}},subdir=helix-proto'

# Licences, bans and sources of the dependencies.
deny:
    cargo deny check bans licenses sources

# Three nodes in containers: docs/operating.md.
compose-up:
    docker compose up -d --build

# The image without a registry: from programs built here, or in FOLDER.
compose-local *folder:
    bash scripts/docker/local-image.sh {{folder}}

# Stops, kills and cuts off nodes of a compose cluster while it is written to.
compose-test:
    bash scripts/docker/compose-test.sh
