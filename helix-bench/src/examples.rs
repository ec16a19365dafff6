//! Examples of each command, for its help. A test parses them.

pub(crate) const WRITE: &str = "Examples:
  helix-bench write
  helix-bench write --clients 4 --duration 10s
  helix-bench write --topic many --create-topic 1000 --partition -1 --clients 64 --batch-size 1
  helix-bench write --acks 1 --payload text --compression lz4
  helix-bench write --rate 10000 --verify --json write.json";

pub(crate) const READ: &str = "Examples:
  helix-bench read --records 100000 --clients 4
  helix-bench read --stream --offset -16000 --duration 10s
  helix-bench read --topic orders --partition -1 --verify";

pub(crate) const LATENCY: &str = "Examples:
  helix-bench latency
  helix-bench latency --ops 8000 --size 256 --acks quorum-written";

pub(crate) const E2E: &str = "Examples:
  helix-bench e2e --rate 1000
  helix-bench e2e --subscribers 2 --stream --duration 10s --plot plots";

pub(crate) const PUBSUB: &str = "Examples:
  helix-bench pubsub
  helix-bench pubsub --producers 2 --consumers 4 --topics 2 --payload 256B,1KiB
  helix-bench pubsub --rate 1000 --batch-size 1 --duration 60s --plot plots";

pub(crate) const SEQUENCER: &str = "Examples:
  helix-bench sequencer
  helix-bench sequencer --duration 2s --size 64,256 --plot plots
  helix-bench sequencer --check --records 1000";

pub(crate) const CONNECTIONS: &str = "Examples:
  helix-bench connections --count 100,1000 --rate 1000
  helix-bench connections --count 10000 --active-percent 1 --json connections.json";

pub(crate) const GROUP: &str = "Examples:
  helix-bench group
  helix-bench group --parts read,commit --runs 3 --committers 8
  helix-bench group --parts restart --restart-command ./restart-node";

pub(crate) const COMPACTION: &str = "Examples:
  helix-bench compaction
  helix-bench compaction --updates 1000000 --keys 10000 --rate 50000 --settle 1m
  helix-bench compaction --runs 5 --clients 16 --json compaction.json --plot plots";

pub(crate) const LIMIT: &str = "Examples:
  helix-bench limit --max-p99 5ms
  helix-bench limit --mode write --clients 4 --batch-size 1 --start 500";

pub(crate) const OMB: &str = "Examples:
  helix-bench omb helix-bench/workloads/1-topic-1-partition-100b.yaml
  helix-bench omb workload.yaml --duration 2m --warmup 30s -o result.json";

pub(crate) const PERF: &str = "Examples:
  helix-bench perf --topic t --num-records 1000000 --record-size 1024 --create-topic 4
  helix-bench perf --topic t --num-records 50000 --record-size 100 --throughput 5000
  helix-bench perf --topic t --num-records 9 --record-size 1 --producer-props acks=1 linger.ms=5";

pub(crate) const WAL: &str = "Examples:
  helix-bench wal
  helix-bench wal --group-size 256KiB --entry-size 1KiB --duration 10s
  helix-bench wal --dir /mnt/disk/log --keep 0 --json wal.json";

pub(crate) const CEILING: &str = "Examples:
  helix-bench ceiling --clients 4 --duration 2s
  helix-bench ceiling --mode read
  helix-bench ceiling --serve 127.0.0.1:9192";

pub(crate) const COMPARE: &str = "Examples:
  helix-bench compare --mode stream --clients 4 --in-flight 16 --duration 2s
  helix-bench compare --addr n1,n2,n3 --runs 9 --mode latency --ops 8000";

pub(crate) const PLOT: &str = "Examples:
  helix-bench plot before.json after.json --dir plots";

pub(crate) const TABLES: &str = "Examples:
  helix-bench tables write-1.json write-4.json --limit ceiling.json --limit wal.json";

pub(crate) const REPORT: &str = "Examples:
  helix-bench report one.json two.json -o report.html";

pub(crate) const SCHEMA: &str = "Examples:
  helix-bench schema write
  helix-bench schema pubsub";
