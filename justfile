# Long tests, benchmarks and tools. `just --list` shows them.

# Run the checks that every change must pass.
verify:
    bash .ci/run

# Format, and apply clippy's automatic fixes.
fix:
    cargo clippy --workspace --all-targets --fix --allow-dirty
    cargo fmt --all

# Run all tests.
test *args:
    cargo test --workspace {{args}}

# Run the WAL's model and crash tests many times: `just soak-wal 10`.
soak-wal rounds="10":
    HELIX_ROUNDS={{rounds}} cargo test --profile soak -p helix-wal --test it -- --nocapture

# Explore crashes of short action sequences on a log: `just explore-wal 5000000`.
explore-wal states="1000000":
    HELIX_STATES={{states}} MALLOC_TRIM_THRESHOLD_=1073741824 \
        cargo test --profile soak -p helix-wal --test it -- short_sequences --nocapture

# Damage each format version of a log: every bit and length (1), or one in N.
corruption-matrix share="1":
    HELIX_SHARE={{share}} MALLOC_TRIM_THRESHOLD_=1073741824 \
        cargo test --profile soak -p helix-wal --test it -- matrix --nocapture

# Run the log's threads in thousands of orders: `just interleavings 10`.
interleavings rounds="1":
    RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/shuttle HELIX_ROUNDS={{rounds}} \
        cargo test -p helix-wal --test it -- interleavings

# Plant bugs of the log's threads; report the order that finds each: `--rounds 10`.
interleavings-bugs *args:
    bash testing/bugs/run.sh interleavings {{args}}

# Run a fuzz target (listed in testing/fuzz/src/lib.rs): `just fuzz wal_damage --seconds 600`.
fuzz target *args:
    bash testing/fuzz/runner/run.sh {{target}} {{args}}

# Kill a real node at random moments: `just soak-kill 500`.
soak-kill kills="500":
    HELIX_KILLS={{kills}} cargo test --release -p helix-server --test it -- kill --nocapture

# Build a release archive with checksums: `TARGET=x86_64-unknown-linux-musl just dist`.
dist:
    bash scripts/dist.sh

# Check the manifests of Kubernetes against its published schemas (installs kubernetes-validate).
kubernetes-check version="1.31":
    python3 -m venv target/kubernetes-venv
    target/kubernetes-venv/bin/pip install -q kubernetes-validate
    target/kubernetes-venv/bin/kubernetes-validate --strict -k {{version}} packaging/kubernetes/*.yml

# Run the shell blocks of the README with the release build.
readme:
    bash scripts/readme.sh

# Build the wheel of the Python client into target/wheels; not published.
python-wheel:
    bash clients/python/wheel.sh target/python-venv release target/wheels

# Build the Python client and test it against three real nodes.
python-test *args:
    bash clients/python/tests/run.sh target/python-test-venv target/debug/helix {{args}}

# Run the bench: `just bench write --clients 4 --duration 5s`.
bench *args:
    cargo run --profile dist -p helix-bench -- {{args}}

# Run the reference benchmarks; write tables and plots into docs/ (about an hour).
benchmarks:
    bash scripts/benchmarks.sh

# The same within ten minutes, with two seconds a row and fewer rows.
benchmarks-quick:
    bash scripts/benchmarks.sh --quick

# Measure the goals of appends and compression; print a table (15 minutes; `--quick`: eight).
goals *args:
    bash scripts/goals.sh {{args}}

# Run a command with a slow disk, in MB/s and µs a sync: `just slow-disk 125 1000 helix-server ...`.
slow-disk rate sync *command:
    bash scripts/slow-disk.sh {{rate}} {{sync}} {{command}}

# Compare the log on new and on recycled segments, on disks of 125 and 500 MB/s that sync in 1 ms.
bench-slow-disks:
    bash scripts/bench-slow-disks.sh

# Measure Helix beside Redis and JetStream, through faults, and draw it (20 minutes; `--quick`).
pictures *args:
    bash scripts/pictures.sh {{args}}

# Run the Criterion benchmarks.
criterion:
    cargo bench -p helix-proto
    cargo bench -p helix-transport
    cargo bench -p helix-tls --features issue
    cargo bench -p helix-wal
    cargo bench -p helix-server

# Inject every kind of fault into three real nodes (docs/testing.md).
chaos *args:
    cargo run --release -p helix-chaos -- run --kills 120 --pauses 60 --partitions 60 --duration-max 3h {{args}}

# Kill all nodes at once, repeatedly.
chaos-kill-all *args:
    cargo run --release -p helix-chaos -- kill-all {{args}}

# Kill members, coordinators and leaders of a group for 15 minutes: `just chaos-groups --seed 7`.
chaos-groups *args:
    cargo run --release -p helix-chaos -- groups --topic-partitions 12 --duration-max 15m {{args}}

# Upgrade and roll back nodes of an older release: `just chaos-upgrade --old PATH/helix-server`.
chaos-upgrade *args:
    cargo run --release -p helix-chaos -- upgrade {{args}}

# Force retries by dropped responses and killed leaders.
chaos-retries *args:
    cargo run --release -p helix-chaos -- retries {{args}}

# Measure the time from a killed leader to a client's next ack: `--kills 200 --pauses 20`.
chaos-failover *args:
    cargo run --release -p helix-chaos -- failover --p99-max 750ms --failed-percent-max 1 {{args}}

# Flip bits of running nodes; measure repairs and waiting appends: `--mib 512`.
chaos-repairs *args:
    cargo run --release -p helix-chaos -- repairs {{args}}

# Simulate whole clusters: `just sim --seed 7`, `just sim --seconds 600 --jobs 2 --marks`.
sim *args:
    cd testing/sim && cargo run -- {{args}}

# Simulate long series, built for speed: `just sim-soak --seconds 36000 --jobs 2 --keep-going`.
sim-soak *args:
    cd testing/sim && cargo run --profile soak -- {{args}}

# Plant known bugs in a copy of the tree; report the seed that finds each.
sim-bugs *args:
    bash testing/bugs/run.sh sim {{args}}

# Run the planted bugs under real processes; report which are found.
chaos-bugs *args:
    bash testing/bugs/run.sh chaos {{args}}

# Overload a node; check its memory limit and that other clients are served.
flood *args:
    cargo run --release -p helix-chaos -- flood {{args}}
    cargo run --release -p helix-chaos -- flood --memory-limit-mib 3072 {{args}}

# Overload a node by one principal with a quota; check that another principal is served.
flood-tenant *args:
    cargo run --release -p helix-chaos -- flood --quota-mib 16 --connections 0 --readers 0 --abusive-clients 0 --half-open 0 {{args}}

# Measure record fetch of a node that lacks purged log: `just refill --gib 10`.
refill *args:
    cargo run --release -p helix-chaos -- refill --topic-partitions 1 {{args}}

# Measure space and reads with compaction, on a log of N MiB.
bench-compaction mib="1280":
    HELIX_COMPACTION_MIB={{mib}} cargo bench -p helix-wal --bench wal_compaction

# Rolling restart under load, p99 before and during; `--plain` without drain, `--pause 0s`.
chaos-rolling *args:
    cargo run --release -p helix-chaos -- rolling --p99-factor-max 3 {{args}}

# Grow one node to five, replace a lost disk, shrink to three, under load: `--most 9 --kill`.
chaos-grow *args:
    cargo run --release -p helix-chaos -- grow {{args}}

# Lint the .proto files (helix-proto/buf.yaml).
proto-lint:
    bash .ci/buf lint helix-proto

# Check that the .proto files are compatible with those of a commit, on the wire and in JSON.
proto-breaking ref="HEAD":
    bash .ci/buf breaking helix-proto --against '.git#ref={{ref}},subdir=helix-proto'

# Check licences, bans and sources of dependencies.
deny:
    cargo deny check bans licenses sources

# Start three nodes in containers (docs/operating.md).
compose-up:
    docker compose up -d --build

# Make the image without a registry, from programs built here or in DIR.
compose-local *dir:
    bash scripts/docker/local-image.sh {{dir}}

# Stop, kill and isolate nodes of a compose cluster under load.
compose-test:
    bash scripts/docker/compose-test.sh
