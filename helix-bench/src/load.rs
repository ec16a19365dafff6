//! Load: its flags and their validated result.
//!
//! `budget` hands out the sends and the command modules make them.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::{Args, ValueEnum};
use helix_client::Compression;
use helix_client::contexts::ChosenCluster;
use helix_proto::log::v1::Durability;
use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use crate::budget::PhaseLimits;
use crate::completion;
use crate::host::cores;
use crate::options::{AckLevel, OutputOptions, RowOptions, TargetOptions, bytes, duration};
use crate::payload::PayloadKind;
use crate::stamp::STAMP_BYTES;

/// Kind of load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum LoadMode {
    Write,
    Read,
    Latency,
    /// Same as `write --stream`.
    Stream,
    #[value(skip)]
    E2e,
}

impl LoadMode {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
            Self::Latency => "latency",
            Self::Stream => "stream",
            Self::E2e => "e2e",
        }
    }
}

/// Flags of a load. A flag that does not apply to the command is rejected.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct LoadArgs {
    #[command(flatten)]
    pub(crate) cluster: TargetOptions,
    /// Topic [default: default, which a load that writes creates]
    #[arg(long, add = completion::topics())]
    pub(crate) topic: Option<String>,
    /// Partition; -1 spreads over all partitions of the topic
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) partition: i64,
    /// read: start offset [default: 0]; -N starts N records before the end
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) offset: Option<i64>,
    /// Records in the measured phase, over all clients [default: 100000; e2e: 10000; none with
    /// --duration]
    #[arg(long)]
    pub(crate) records: Option<u64>,
    /// latency: operations [default: 1000; none with --duration]
    #[arg(long)]
    pub(crate) ops: Option<u64>,
    /// Length of the measured phase: "10s", "500ms", "2m". The phase ends at this or at the record
    /// limit, whichever is reached first
    #[arg(long, value_parser = duration)]
    pub(crate) duration: Option<Duration>,
    /// Length of the warm-up, which is not measured [default: 1s with --duration, otherwise a tenth
    /// of the records, at most 10s]
    #[arg(long, value_parser = duration)]
    pub(crate) warmup: Option<Duration>,
    /// Bytes of a record value [default: 1024]
    #[arg(long, value_parser = bytes)]
    pub(crate) size: Option<usize>,
    /// Records per batch [default: 100; latency and e2e: 1]
    #[arg(long)]
    pub(crate) batch_size: Option<u32>,
    /// Concurrent clients
    #[arg(long, default_value_t = 1)]
    pub(crate) clients: usize,
    /// Connections per node, shared by the clients [default: one per client]
    #[arg(long)]
    pub(crate) connections: Option<usize>,
    /// Requests in flight per client; with --stream, batches per stream
    #[arg(long, default_value_t = 1)]
    pub(crate) in_flight: usize,
    /// write, e2e: use AppendStream, not Append; read: Subscribe, not Fetch
    #[arg(long)]
    pub(crate) stream: bool,
    /// Open loop: records per second over all clients. Latency counts from the scheduled send time,
    /// however late the send is
    #[arg(long, value_name = "RECORDS_PER_SEC")]
    pub(crate) rate: Option<f64>,
    /// Ack to wait for: all = synced on a majority, quorum-written = in the logs of a majority, 1 =
    /// in the leader's log, none = received [default: all]. After a write with less than all, the
    /// partitions must have grown by the acked records
    #[arg(long, value_name = "all|quorum-written|1|none")]
    pub(crate) acks: Option<AckLevel>,
    /// Contents of record values [default: random]
    #[arg(long)]
    pub(crate) payload: Option<PayloadKind>,
    /// write, e2e: compression of the batches [default: none]
    #[arg(long)]
    pub(crate) compression: Option<BatchCompression>,
    /// write: send without a producer identity. A batch with an unknown outcome is then not retried
    #[arg(long)]
    pub(crate) no_idempotence: bool,
    /// write: stamp every record, read everything back and compare. read: check checksums and
    /// offsets
    #[arg(long)]
    pub(crate) verify: bool,
    /// e2e: subscribers; each receives every record [default: 1]
    #[arg(long)]
    pub(crate) subscribers: Option<usize>,
    /// Create the topic first with this many partitions. An existing topic must have the same
    /// number
    #[arg(long, visible_alias = "partitions", value_name = "PARTITIONS")]
    pub(crate) create_topic: Option<u32>,
    /// Replicas of the created topic [default: the cluster's]
    #[arg(long, requires = "create_topic", value_name = "COUNT")]
    pub(crate) replication_factor: Option<u32>,
    /// Seed of payloads and retries
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Runtime threads of this process [default: one per core; 1 with one request in flight]
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

impl LoadArgs {
    /// Returns the flags of a load that is one row of a mode.
    pub(crate) fn of_row(rows: &RowOptions) -> Self {
        Self {
            cluster: rows.cluster.clone(),
            duration: Some(rows.duration),
            warmup: Some(rows.warmup),
            acks: rows.acks,
            seed: rows.seed,
            threads: rows.threads,
            ..Self::default()
        }
    }
}

/// Compression of batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum BatchCompression {
    None,
    Lz4,
    Zstd,
    Adaptive,
}

impl From<BatchCompression> for Compression {
    fn from(compression: BatchCompression) -> Self {
        match compression {
            BatchCompression::None => Self::None,
            BatchCompression::Lz4 => Self::Lz4,
            BatchCompression::Zstd => Self::Zstd,
            BatchCompression::Adaptive => Self::Adaptive,
        }
    }
}

/// Complete description of a run.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(crate) struct BenchLoad {
    pub(crate) mode: LoadMode,
    /// Only the addresses are shown in results.
    #[serde(rename = "addr", serialize_with = "addresses")]
    #[schemars(with = "Vec<String>")]
    pub(crate) cluster: ChosenCluster,
    pub(crate) topic: String,
    /// Creates a missing topic, because no option names one.
    #[serde(skip)]
    pub(crate) creates_default_topic: bool,
    /// `None` selects all partitions of the topic.
    pub(crate) partition: Option<u32>,
    /// Negative values count records back from the end.
    pub(crate) offset: i64,
    pub(crate) size: usize,
    pub(crate) batch_size: u32,
    pub(crate) clients: usize,
    pub(crate) connections: usize,
    pub(crate) in_flight: usize,
    pub(crate) stream: bool,
    /// Records per second; `None` is a closed loop.
    pub(crate) rate: Option<f64>,
    pub(crate) acks: AckLevel,
    pub(crate) payload: PayloadKind,
    pub(crate) compression: BatchCompression,
    pub(crate) idempotent: bool,
    pub(crate) verify: bool,
    pub(crate) subscribers: usize,
    pub(crate) create_topic: Option<u32>,
    pub(crate) replication_factor: Option<u32>,
    pub(crate) seed: u64,
    /// Runtime threads of this process.
    pub(crate) threads: usize,
    pub(crate) warmup: PhaseLimits,
    pub(crate) run: PhaseLimits,
}

fn addresses<S: Serializer>(
    cluster: &ChosenCluster,
    out: S,
) -> std::result::Result<S::Ok, S::Error> {
    cluster.addr.serialize(out)
}

/// Warm-up of a run that is bounded by time.
const WARMUP_DEFAULT: Duration = Duration::from_secs(1);
/// Divisor for the warm-up's records in a run that is bounded by records.
const WARMUP_SHARE: u64 = 10;
/// Longest warm-up of a run that is bounded by records.
const WARMUP_MAX: Duration = Duration::from_secs(10);
/// Fewest warm-up batches per request in flight; the first ones look up the leaders.
const WARMUP_ROUNDS: u64 = 5;

/// Topic of a load that names none.
pub(crate) const DEFAULT_TOPIC: &str = "default";

/// Highest value of the flags for clients, connections and requests in flight.
pub(crate) const COUNT_MAX: usize = 65_536;
/// Most requests in flight over all clients.
const LANES_MAX: usize = 1 << 20;
/// Most records per second, above any rate that can be timed here.
const RATE_MAX: f64 = 1e9;

/// Checks the value of a count flag.
///
/// # Errors
/// The flag is out of range.
pub(crate) fn check_count(flag: &str, count: usize) -> Result<()> {
    ensure!((1..=COUNT_MAX).contains(&count), "{flag} must be from 1 to {COUNT_MAX}");
    Ok(())
}

impl BenchLoad {
    /// Builds and validates the load.
    ///
    /// # Errors
    /// A flag is missing, out of range or not valid for the command.
    pub(crate) fn new(mode: LoadMode, args: &LoadArgs) -> Result<Self> {
        reject_unused_flags(mode, args)?;
        let partition = match args.partition {
            -1 => None,
            number => match u32::try_from(number) {
                Ok(number) => Some(number),
                Err(_) => bail!("--partition must be -1 (all partitions) or a partition number"),
            },
        };
        let batch_size_default = match mode {
            LoadMode::Latency | LoadMode::E2e => 1,
            LoadMode::Write | LoadMode::Stream | LoadMode::Read => 100,
        };
        let subscribers = if mode == LoadMode::E2e { args.subscribers.unwrap_or(1) } else { 0 };
        let load = Self {
            mode,
            cluster: args.cluster.choose()?,
            topic: args.topic.clone().unwrap_or_else(|| DEFAULT_TOPIC.to_owned()),
            creates_default_topic: args.topic.is_none() && mode != LoadMode::Read,
            partition,
            offset: args.offset.unwrap_or(0),
            size: args.size.unwrap_or(1024),
            batch_size: args.batch_size.unwrap_or(batch_size_default),
            clients: args.clients,
            connections: args.connections.unwrap_or(args.clients.saturating_add(subscribers)),
            in_flight: args.in_flight,
            stream: args.stream || mode == LoadMode::Stream,
            rate: args.rate,
            acks: args.acks.unwrap_or(AckLevel::All),
            payload: args.payload.unwrap_or(PayloadKind::Random),
            compression: args.compression.unwrap_or(BatchCompression::None),
            idempotent: !args.no_idempotence,
            verify: args.verify,
            subscribers,
            create_topic: args.create_topic,
            replication_factor: args.replication_factor,
            seed: args.seed,
            threads: args.threads.unwrap_or_else(|| threads(mode, args)),
            warmup: warmup(mode, args, batch_size_default),
            run: PhaseLimits { records: records(mode, args), duration: args.duration },
        };
        load.check()?;
        Ok(load)
    }

    /// Builds a load whose flags must suit the ceiling, too.
    ///
    /// # Errors
    /// As [`Self::new`], or the ceiling cannot do what a flag demands.
    pub(crate) fn with_ceiling(mode: LoadMode, args: &LoadArgs) -> Result<Self> {
        ensure!(!args.verify, "--verify is not valid here: the ceiling stores nothing");
        Self::new(mode, args)
    }

    fn check(&self) -> Result<()> {
        check_count("--clients", self.clients)?;
        check_count("--in-flight", self.in_flight)?;
        ensure!(
            self.lanes() <= LANES_MAX,
            "--clients times --in-flight must be at most {LANES_MAX}"
        );
        if self.mode == LoadMode::E2e {
            check_count("--subscribers", self.subscribers)?;
        }
        ensure!(
            (1..=2 * COUNT_MAX).contains(&self.connections),
            "--connections must be from 1 to {}",
            2 * COUNT_MAX
        );
        check_count("--threads", self.threads)?;
        ensure!(self.batch_size > 0, "--batch-size must be at least 1");
        ensure!(self.run.records != Some(0), "--records and --ops must be above 0");
        ensure!(self.run.duration != Some(Duration::ZERO), "--duration must be above 0");
        ensure!(
            self.rate.is_none_or(|rate| rate > 0.0 && rate <= RATE_MAX),
            "--rate must be above 0 and at most {RATE_MAX}"
        );
        let is_stamped = self.verify && self.is_write() || self.mode == LoadMode::E2e;
        ensure!(
            !is_stamped || self.size >= STAMP_BYTES,
            "--size must be at least {STAMP_BYTES}: records carry a stamp of that size"
        );
        ensure!(
            self.mode != LoadMode::Latency || self.in_flight == 1,
            "latency allows one request in flight per client; use --clients"
        );
        ensure!(
            self.mode != LoadMode::Latency
                || matches!(self.acks, AckLevel::All | AckLevel::QuorumWritten),
            "latency fetches what it wrote at the offset in the ack, which only --acks all and \
             quorum-written have"
        );
        Ok(())
    }

    pub(crate) fn is_write(&self) -> bool {
        matches!(self.mode, LoadMode::Write | LoadMode::Stream)
    }

    /// Returns the requests in flight over all clients.
    pub(crate) fn lanes(&self) -> usize {
        self.clients.saturating_mul(self.in_flight)
    }

    /// Caps the warm-up at the number of records that are available to read.
    pub(crate) fn with_available_records(&self, there: u64) -> Self {
        let mut load = self.clone();
        load.warmup.records = load.warmup.records.map(|records| records.min(there));
        load
    }

    pub(crate) fn durability(&self) -> Durability {
        match self.acks {
            AckLevel::All => Durability::QuorumSynced,
            AckLevel::QuorumWritten => Durability::QuorumWritten,
            AckLevel::One => Durability::LeaderWritten,
            AckLevel::None => Durability::None,
        }
    }
}

/// Returns the default number of runtime threads.
///
/// One request at a time keeps only one thread busy. With a second thread the executor sometimes
/// moves the task between cores, and medians of the same run then differ by up to 20%.
fn threads(mode: LoadMode, args: &LoadArgs) -> usize {
    let is_one_at_a_time = args.clients == 1
        && args.in_flight == 1
        && !args.stream
        && matches!(mode, LoadMode::Write | LoadMode::Read | LoadMode::Latency);
    if is_one_at_a_time { 1 } else { cores() }
}

fn records(mode: LoadMode, args: &LoadArgs) -> Option<u64> {
    let default = match mode {
        LoadMode::Latency => 1_000,
        LoadMode::E2e => 10_000,
        LoadMode::Write | LoadMode::Stream | LoadMode::Read => 100_000,
    };
    let asked = args.records.or(args.ops);
    asked.or_else(|| args.duration.is_none().then_some(default))
}

fn warmup(mode: LoadMode, args: &LoadArgs, batch_size_default: u32) -> PhaseLimits {
    match (args.warmup, args.duration, records(mode, args)) {
        (Some(duration), _, _) => PhaseLimits { records: None, duration: Some(duration) },
        (None, None, Some(records)) => {
            let batch = u64::from(args.batch_size.unwrap_or(batch_size_default));
            let lanes = (args.clients as u64).saturating_mul(args.in_flight as u64);
            let least = batch.saturating_mul(lanes).saturating_mul(WARMUP_ROUNDS);
            let records = (records / WARMUP_SHARE).max(least);
            PhaseLimits { records: Some(records), duration: Some(WARMUP_MAX) }
        }
        (None, _, _) => PhaseLimits { records: None, duration: Some(WARMUP_DEFAULT) },
    }
}

/// Rejects flags without effect, because the report would claim a setting that was not used.
fn reject_unused_flags(mode: LoadMode, args: &LoadArgs) -> Result<()> {
    let is_write = matches!(mode, LoadMode::Write | LoadMode::Stream);
    let writes = mode != LoadMode::Read;
    let useless = [
        ("--offset", args.offset.is_some() && writes),
        ("--ops", args.ops.is_some() && mode != LoadMode::Latency),
        ("--records", args.records.is_some() && mode == LoadMode::Latency),
        (
            "--batch-size",
            args.batch_size.is_some_and(|size| size != 1) && mode == LoadMode::Latency,
        ),
        ("--stream", args.stream && mode == LoadMode::Latency),
        ("--rate", args.rate.is_some() && !writes),
        ("--acks", args.acks.is_some() && !writes),
        ("--payload", args.payload.is_some() && (!writes || mode == LoadMode::E2e)),
        ("--payload with --verify", args.payload.is_some() && args.verify),
        ("--compression", args.compression.is_some() && !is_write && mode != LoadMode::E2e),
        ("--no-idempotence", args.no_idempotence && !writes),
        ("--verify", args.verify && !(is_write || mode == LoadMode::Read)),
        ("--subscribers", args.subscribers.is_some() && mode != LoadMode::E2e),
        ("--in-flight with --stream", args.stream && args.in_flight > 1 && mode == LoadMode::Read),
    ];
    for (flag, is_useless) in useless {
        ensure!(!is_useless, "{flag} is not valid for {}", mode.name());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> LoadArgs {
        let cluster = TargetOptions::of_node("n1:1");
        LoadArgs { cluster, clients: 1, in_flight: 1, ..LoadArgs::default() }
    }

    #[test]
    fn write_defaults_to_a_record_limit() {
        let load = BenchLoad::new(LoadMode::Write, &args()).unwrap();
        assert_eq!(load.run, PhaseLimits { records: Some(100_000), duration: None });
        assert_eq!(load.warmup, PhaseLimits { records: Some(10_000), duration: Some(WARMUP_MAX) });
        assert_eq!((load.batch_size, load.size, load.partition), (100, 1024, Some(0)));
    }

    #[test]
    fn duration_replaces_the_default_record_limit() {
        let duration = Some(Duration::from_secs(3));
        let load = BenchLoad::new(LoadMode::Read, &LoadArgs { duration, ..args() }).unwrap();
        assert_eq!(load.run, PhaseLimits { records: None, duration });
        assert_eq!(load.warmup, PhaseLimits { records: None, duration: Some(WARMUP_DEFAULT) });
        let both = LoadArgs { duration, records: Some(7), ..args() };
        let load = BenchLoad::new(LoadMode::Write, &both).unwrap();
        assert_eq!(load.run, PhaseLimits { records: Some(7), duration });
    }

    #[test]
    fn one_request_at_a_time_uses_one_thread() {
        for mode in [LoadMode::Write, LoadMode::Read, LoadMode::Latency] {
            assert_eq!(BenchLoad::new(mode, &args()).unwrap().threads, 1);
        }
        let many = [
            (LoadMode::Write, LoadArgs { clients: 2, ..args() }),
            (LoadMode::Write, LoadArgs { in_flight: 2, ..args() }),
            (LoadMode::Read, LoadArgs { stream: true, ..args() }),
            (LoadMode::E2e, args()),
        ];
        for (mode, args) in many {
            assert_eq!(BenchLoad::new(mode, &args).unwrap().threads, cores());
            let asked = LoadArgs { threads: Some(3), ..args };
            assert_eq!(BenchLoad::new(mode, &asked).unwrap().threads, 3);
        }
        assert!(BenchLoad::new(LoadMode::Write, &LoadArgs { threads: Some(0), ..args() }).is_err());
    }

    #[test]
    fn rejects_flags_without_effect() {
        let offset = LoadArgs { offset: Some(1), ..args() };
        assert!(BenchLoad::new(LoadMode::Write, &offset).is_err());
        assert!(BenchLoad::new(LoadMode::Read, &offset).is_ok());
        let rate = LoadArgs { rate: Some(10.0), ..args() };
        assert!(BenchLoad::new(LoadMode::Read, &rate).is_err());
        let lz4 = LoadArgs { compression: Some(BatchCompression::Lz4), ..args() };
        assert!(BenchLoad::new(LoadMode::Write, &lz4).is_ok());
        assert!(BenchLoad::new(LoadMode::Read, &lz4).is_err());
        let tiny = LoadArgs { verify: true, size: Some(8), ..args() };
        assert!(BenchLoad::new(LoadMode::Write, &tiny).is_err());
        assert!(BenchLoad::new(LoadMode::Write, &LoadArgs { partition: -2, ..args() }).is_err());
    }

    #[test]
    fn rejects_values_out_of_range() {
        let odd = [
            LoadArgs { rate: Some(0.0), ..args() },
            LoadArgs { rate: Some(1e300), ..args() },
            LoadArgs { rate: Some(f64::NAN), ..args() },
            LoadArgs { clients: 0, ..args() },
            LoadArgs { clients: COUNT_MAX + 1, ..args() },
            LoadArgs { in_flight: 0, ..args() },
            LoadArgs { in_flight: usize::MAX, ..args() },
            LoadArgs { clients: COUNT_MAX, in_flight: COUNT_MAX, ..args() },
            LoadArgs { connections: Some(usize::MAX), ..args() },
            LoadArgs { records: Some(0), ..args() },
            LoadArgs { duration: Some(Duration::ZERO), ..args() },
        ];
        for args in odd {
            assert!(BenchLoad::new(LoadMode::Write, &args).is_err(), "{args:?}");
        }
        let slow = LoadArgs { rate: Some(1e-20), clients: COUNT_MAX, ..args() };
        assert!(BenchLoad::new(LoadMode::Write, &slow).is_ok());
        let many = LoadArgs { subscribers: Some(COUNT_MAX + 1), ..args() };
        assert!(BenchLoad::new(LoadMode::E2e, &many).is_err());
    }

    #[test]
    fn warm_up_is_bounded() {
        let many = LoadArgs { records: Some(10_000_000_000), ..args() };
        let load = BenchLoad::new(LoadMode::Read, &many).unwrap().with_available_records(300);
        assert_eq!(load.warmup, PhaseLimits { records: Some(300), duration: Some(WARMUP_MAX) });
    }
}
