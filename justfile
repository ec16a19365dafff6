# Recipes beside the two commands of the README. `just --list` shows them.

# What every submission must pass.
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
    HELIX_ROUNDS={{rounds}} cargo test --release -p helix-wal --test it -- --nocapture

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

# Kills, pauses and partitions on three real nodes: docs/testing.md.
chaos *args:
    cargo run --release -p helix-chaos -- run --kills 60 --pauses 30 --partitions 30 {{args}}

# All nodes killed at once, again and again.
chaos-massacre *args:
    cargo run --release -p helix-chaos -- massacre {{args}}

# Retries forced by swallowed answers and killed leaders.
chaos-retries *args:
    cargo run --release -p helix-chaos -- retries {{args}}

# Time from a leader's death to the next ack at a client.
chaos-failover *args:
    cargo run --release -p helix-chaos -- failover {{args}}

# Licences, bans and sources of the dependencies.
deny:
    cargo deny check bans licenses sources

# Three nodes in containers: docs/operating.md.
compose-up:
    docker compose up -d --build

# The image without a registry: from programs built here, or in FOLDER.
compose-local *folder:
    bash docker/local-image.sh {{folder}}

# Stops, kills and cuts off nodes of a compose cluster while it is written to.
compose-test:
    bash docker/compose-test.sh
