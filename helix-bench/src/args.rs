//! Command line: commands, flags and value formats. `load` interprets the flags.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use helix_client::{Compression, TlsOptions};
use helix_proto::address;
use serde::Serialize;

use crate::connections::ConnectionsArgs;
use crate::group::GroupBenchArgs;
use crate::omb::OmbArgs;
use crate::perf::PerfArgs;
use crate::pubsub::PubsubArgs;
use crate::rate_limit::RateLimitArgs;
use crate::sequencer::SequencerArgs;

/// Benchmarks Helix: throughput, latency and end-to-end delivery.
#[derive(Debug, Parser)]
#[command(name = "helix-bench", version, after_help = EXIT_CODES)]
pub(crate) struct BenchCli {
    /// Show no progress
    #[arg(long, global = true)]
    pub(crate) quiet: bool,
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

const EXIT_CODES: &str = "Exit codes: 0 success; 1 failure, no request succeeded, or --verify was \
                          not possible; 2 usage error; 11 acked records are missing, changed or \
                          doubled; 130 interrupted.";

/// Longest duration that may be given; adding it to a point in time must not overflow.
const DURATION_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Append batches and wait for their acks
    Write(LoadArgs),
    /// Fetch records, or subscribe with --stream
    Read(LoadArgs),
    /// Append one record and fetch it back, repeatedly
    Latency(LoadArgs),
    /// Publish records and time their delivery to subscribers
    E2e(LoadArgs),
    /// Measure publish/subscribe over payload sizes
    Pubsub(PubsubArgs),
    /// Measure or check a stream that several nodes publish to
    Sequencer(SequencerArgs),
    /// Measure requests over many connections at once
    Connections(ConnectionsArgs),
    /// Measure consumer groups
    Group(GroupBenchArgs),
    /// Find the highest rate whose p99 stays within a bound
    Limit(RateLimitArgs),
    /// Run a workload file of the OpenMessaging Benchmark
    Omb(OmbArgs),
    /// Send records as Kafka's producer performance test
    Perf(PerfArgs),
    /// Write to helix-wal directly, without network or Raft
    Wal(WalArgs),
    /// Run a load against a service that stores nothing
    Ceiling(CeilingArgs),
    /// Alternate runs against the ceiling and a server
    Compare(CompareArgs),
    /// Draw plots of results
    Plot(PlotArgs),
    /// Print tables of results as Markdown
    Tables(TablesArgs),
    /// Write a page with tables and plots of results
    Report(ReportArgs),
}

/// Flags of `plot`.
#[derive(Debug, Clone, Args)]
pub(crate) struct PlotArgs {
    /// Results in JSON; those of one mode share a plot
    #[arg(required = true, value_name = "RESULT.json")]
    pub(crate) results: Vec<PathBuf>,
    /// Directory to write SVG files to
    #[arg(long, default_value = ".")]
    pub(crate) dir: PathBuf,
}

/// Flags of `report`.
#[derive(Debug, Clone, Args)]
pub(crate) struct ReportArgs {
    /// Results in JSON
    #[arg(required = true, value_name = "RESULT.json")]
    pub(crate) results: Vec<PathBuf>,
    /// HTML file to write
    #[arg(long, short, default_value = "report.html", value_name = "FILE")]
    pub(crate) output: PathBuf,
}

/// Flags of `tables`.
#[derive(Debug, Clone, Args)]
pub(crate) struct TablesArgs {
    /// Results in JSON
    #[arg(required = true, value_name = "RESULT.json")]
    pub(crate) results: Vec<PathBuf>,
}

/// Kind of load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
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

/// Files of TLS.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct TlsFilesArgs {
    /// CAs of the nodes, PEM; turns TLS on
    #[arg(long, value_name = "FILE", env = "HELIX_TLS_CA")]
    pub(crate) tls_ca: Option<PathBuf>,
    /// Certificate of the clients, PEM
    #[arg(long, value_name = "FILE", env = "HELIX_TLS_CERT", requires_all = ["tls_ca", "tls_key"])]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Private key of the certificate, PEM
    #[arg(long, value_name = "FILE", env = "HELIX_TLS_KEY", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
}

impl TlsFilesArgs {
    /// Returns the settings of the clients; `None` without TLS.
    pub(crate) fn options(&self) -> Option<TlsOptions> {
        let options = TlsOptions::new(self.tls_ca.clone()?);
        Some(match (&self.tls_cert, &self.tls_key) {
            (Some(cert), Some(key)) => options.with_certificate(cert, key),
            _ => options,
        })
    }
}

/// Flags of a load. A flag that does not apply to the command is rejected.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct LoadArgs {
    /// Node addresses [default: 127.0.0.1:9092]
    #[arg(
        long,
        value_name = "HOST:PORT,..",
        value_delimiter = ',',
        value_parser = parse_address
    )]
    pub(crate) addr: Vec<String>,
    #[command(flatten)]
    pub(crate) tls: TlsFilesArgs,
    #[arg(long, default_value = "default")]
    pub(crate) topic: String,
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
    /// Write the result to this file as JSON; "-" prints JSON, not the table
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Write plots to this directory as SVG
    #[arg(long, value_name = "DIR")]
    pub(crate) plot: Option<PathBuf>,
}

/// Ack level that a write waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
pub(crate) enum AckLevel {
    #[value(name = "all")]
    #[serde(rename = "all")]
    All,
    #[value(name = "quorum-written")]
    #[serde(rename = "quorum-written")]
    QuorumWritten,
    #[value(name = "1")]
    #[serde(rename = "1")]
    One,
    #[value(name = "none", alias = "0")]
    #[serde(rename = "none")]
    None,
}

impl AckLevel {
    /// Returns the value as written on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::QuorumWritten => "quorum-written",
            Self::One => "1",
            Self::None => "none",
        }
    }
}

/// Contents of record values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PayloadKind {
    Random,
    Text,
    Zero,
}

/// Compression of batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
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

/// Flags of `wal`.
#[derive(Debug, Clone, Args)]
pub(crate) struct WalArgs {
    /// Directory to write in; must be empty or missing [default: a temporary one in the working
    /// directory]
    #[arg(long)]
    pub(crate) dir: Option<PathBuf>,
    #[arg(long, default_value = "disk")]
    pub(crate) storage: WalStorageKind,
    /// Write through the page cache, not with direct I/O
    #[arg(long)]
    pub(crate) buffered: bool,
    /// Preparation of segments until they are recycled
    #[arg(long, default_value = "auto")]
    pub(crate) prepare: SegmentPreparation,
    /// Bytes of one append, which becomes one group
    #[arg(long, default_value = "1MiB", value_parser = bytes)]
    pub(crate) group_size: usize,
    /// Bytes of one entry
    #[arg(long, default_value = "100KiB", value_parser = bytes)]
    pub(crate) entry_size: usize,
    /// Appends in flight
    #[arg(long, default_value_t = 2)]
    pub(crate) in_flight: usize,
    /// Bytes of a segment
    #[arg(long, default_value = "64MiB", value_parser = bytes)]
    pub(crate) segment_size: usize,
    /// Bytes kept before the log is trimmed, so that segments are recycled. The warm-up lasts at
    /// least until twice as much is written. 0 never trims: the files of a fresh log grow
    #[arg(long, default_value = "512MiB", value_parser = bytes)]
    pub(crate) keep: usize,
    /// Length of the measured phase
    #[arg(long, default_value = "5s", value_parser = duration)]
    pub(crate) duration: Duration,
    /// Shortest warm-up
    #[arg(long, default_value = "1s", value_parser = duration)]
    pub(crate) warmup: Duration,
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Write the result to this file as JSON; "-" prints JSON, not the table
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// Storage of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum WalStorageKind {
    Disk,
    Memory,
}

/// Preparation of the log's segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum SegmentPreparation {
    /// Zero-filled while the disk has idle bandwidth, otherwise allocated
    Auto,
    /// Zero-filled
    Zero,
    /// Allocated
    Allocate,
}

impl From<SegmentPreparation> for helix_wal::Preparation {
    fn from(preparation: SegmentPreparation) -> Self {
        match preparation {
            SegmentPreparation::Auto => Self::Auto,
            SegmentPreparation::Zero => Self::Zero,
            SegmentPreparation::Allocate => Self::Allocate,
        }
    }
}

/// Flags of `ceiling`.
#[derive(Debug, Clone, Args)]
pub(crate) struct CeilingArgs {
    /// Load to run against the service
    #[arg(long, default_value = "write")]
    pub(crate) mode: LoadMode,
    /// Serve at this address until interrupted
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) serve: Option<String>,
    /// Exit when standard input closes, which is when the parent exits
    #[arg(long, hide = true, requires = "serve")]
    pub(crate) end_with_stdin: bool,
    /// Runtime threads of the service [default: cores - 1, at least 1, as the server]
    #[arg(long)]
    pub(crate) server_threads: Option<usize>,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// Flags of `compare`.
#[derive(Debug, Clone, Args)]
pub(crate) struct CompareArgs {
    /// Load to run
    #[arg(long, default_value = "write")]
    pub(crate) mode: LoadMode,
    /// Runs against each side
    #[arg(long, default_value_t = 5)]
    pub(crate) runs: usize,
    /// Runtime threads of the ceiling [default: cores - 1, at least 1, as the server]
    #[arg(long)]
    pub(crate) server_threads: Option<usize>,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// Parses the address of a node; the port may be missing.
fn parse_address(text: &str) -> Result<String, String> {
    address::parse(text, Some(address::PORT_DEFAULT))
}

/// Parses "1500ms", "2s", "1m" or "1h"; a bare number counts seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split_unit(text);
    let seconds = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err("expected a number and us, ms, s, m or h".to_owned()),
    };
    let number: f64 = number.parse().map_err(|_| "expected a number first".to_owned())?;
    let duration = Duration::try_from_secs_f64(number * seconds).map_err(|error| error.to_string());
    match duration? {
        duration if duration > DURATION_MAX => Err("at most 365 days".to_owned()),
        duration => Ok(duration),
    }
}

/// Parses "1024", "64KiB", "1MiB" or "2GB".
pub(crate) fn bytes(text: &str) -> Result<usize, String> {
    let (number, unit) = split_unit(text);
    let factor: usize = match unit {
        "" | "B" => 1,
        "KB" | "kB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return Err("expected a number and B, KiB, MiB, GiB, KB, MB or GB".to_owned()),
    };
    let number: usize = number.parse().map_err(|_| "expected a whole number first".to_owned())?;
    number.checked_mul(factor).ok_or_else(|| "too large".to_owned())
}

fn split_unit(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    text.split_at(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_sizes_have_units() {
        assert_eq!(duration("1500ms"), Ok(Duration::from_millis(1500)));
        assert_eq!(duration("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert!(duration("2d").is_err() && duration("-1s").is_err() && duration("s").is_err());
        assert!(duration("1e18s").is_err());
        assert_eq!(bytes("64KiB"), Ok(65536));
        assert_eq!(bytes("2GB"), Ok(2_000_000_000));
        assert!(bytes("1.5MiB").is_err() && bytes("99999999999GiB").is_err());
    }

    #[test]
    fn addresses_are_checked_where_they_are_given() {
        let parse = |addr| BenchCli::try_parse_from(["helix-bench", "read", "--addr", addr]);
        let BenchCommand::Read(args) = parse("n1, http://n2:1").unwrap().command else {
            panic!("read")
        };
        assert_eq!(args.addr, ["n1:9092", "n2:1"]);
        for wrong in ["n1:99999", "n1:", "n1:0", "n1,,n2", "http://n1/a"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn ack_names_round_trip() {
        for acks in AckLevel::value_variants() {
            assert_eq!(AckLevel::from_str(acks.name(), false), Ok(*acks));
            assert_eq!(serde_json::to_value(acks).unwrap(), acks.name());
        }
        assert_eq!(AckLevel::from_str("0", false), Ok(AckLevel::None));
    }

    #[test]
    fn documented_commands_parse() {
        for line in [
            "helix-bench write --records 100000 --size 1024 --batch-size 100 --clients 4",
            "helix-bench read --records 100000 --batch-size 100 --clients 4",
            "helix-bench latency --ops 1000 --size 1024",
            "helix-bench write --clients 64 --batch-size 1 --partition -1 --create-topic 1000",
            "helix-bench compare --addr 127.0.0.1:1,127.0.0.1:2 --runs 5 --mode stream",
            "helix-bench ceiling --mode read --duration 2s --acks 1",
            "helix-bench wal --group-size 1MiB",
            "helix-bench e2e --rate 1000 --subscribers 2",
            "helix-bench write --addr localhost:1,localhost:2,localhost:3 --clients 4 --acks 1",
            "helix-bench write --topic new --partitions 12 --replication-factor 3 --acks none",
            "helix-bench write --acks quorum-written",
            "helix-bench write --acks 0",
            "helix-bench write --payload text --compression lz4",
            "helix-bench pubsub --producers 2 --consumers 4 --topics 2 --payload 256B,1KiB",
            "helix-bench sequencer --duration 2s --size 64,256 --plot plots",
            "helix-bench sequencer --check --records 1000",
            "helix-bench connections --count 100,1000 --rate 1000",
            "helix-bench group --parts read,commit --runs 5 --committers 8",
            "helix-bench limit --mode write --max-p99 5ms --clients 4",
            "helix-bench plot one.json two.json --dir plots",
            "helix-bench tables one.json",
            "helix-bench report one.json two.json -o report.html",
        ] {
            BenchCli::try_parse_from(line.split(' '))
                .unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }
}
