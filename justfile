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

# The WAL's model and crash tests at length: `just soak-wal 200000`.
soak-wal sequences="200000":
    HELIX_WAL_SEQUENCES={{sequences}} cargo test --release -p helix-wal --test it -- --nocapture

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

# Licences, bans and sources of the dependencies.
deny:
    cargo deny check bans licenses sources
