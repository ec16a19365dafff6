//! The command line: commands, flags, and how values are written.
//! Parses only; what a load becomes of the flags is decided in `load`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;

/// Measures Helix: throughput, latency and delivery, with percentiles that are never averaged.
#[derive(Debug, Parser)]
#[command(name = "helix-bench", version, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 done; 1 failed, not one request succeeded, or --verify was \
                          not possible; 2 wrong usage; 11 what was acked is not there, or not as \
                          it was acked; 130 interrupted.";

/// Longest duration: what is added to a moment must be one.
const DURATION_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Appends batches and waits for their acks.
    Write(LoadArgs),
    /// Fetches records; with --stream, subscribes to them.
    Read(LoadArgs),
    /// Appends one record and fetches it back, over and over.
    Latency(LoadArgs),
    /// Publishes records and measures when a subscriber has them.
    E2e(LoadArgs),
    /// Writes to helix-wal itself, without network or Raft.
    Wal(WalArgs),
    /// Runs a load against a service that only decodes, checks and answers.
    Ceiling(CeilingArgs),
    /// Runs a load by turns against the ceiling and a server, and prints medians and ratios.
    Compare(CompareArgs),
}

/// What a run does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mode {
    Write,
    Read,
    Latency,
    /// As `write --stream`.
    Stream,
    #[value(skip)]
    E2e,
}

impl Mode {
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

/// What a load is made of. Flags that a command has no use for are refused.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct LoadArgs {
    /// Addresses of nodes [default: 127.0.0.1:9092].
    #[arg(long, value_name = "HOST:PORT,..", value_delimiter = ',')]
    pub(crate) addr: Vec<String>,
    #[arg(long, default_value = "default")]
    pub(crate) topic: String,
    /// Partition; -1 spreads over all of the topic's partitions.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) partition: i64,
    /// read: offset to begin at [default: 0]; -N begins N records before the end.
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) offset: Option<i64>,
    /// Records of the measured part, over all clients [default: 100000; e2e: 10000; none with
    /// --duration].
    #[arg(long)]
    pub(crate) records: Option<u64>,
    /// latency: operations [default: 1000; none with --duration].
    #[arg(long)]
    pub(crate) ops: Option<u64>,
    /// Length of the measured part: "10s", "500ms", "2m". Whichever of this and the number of
    /// records is reached first ends it.
    #[arg(long, value_parser = duration)]
    pub(crate) duration: Option<Duration>,
    /// Length of the warm-up, whose requests do not count [default: 1s with --duration, otherwise
    /// a tenth of the records, for 10s at most].
    #[arg(long, value_parser = duration)]
    pub(crate) warmup: Option<Duration>,
    /// Bytes of a record's value [default: 1024].
    #[arg(long, value_parser = bytes)]
    pub(crate) size: Option<usize>,
    /// Records in a batch [default: 100; latency and e2e: 1].
    #[arg(long)]
    pub(crate) batch_size: Option<u32>,
    /// Clients that work side by side.
    #[arg(long, default_value_t = 1)]
    pub(crate) clients: usize,
    /// Connections to each node, shared by the clients in turn [default: one per client].
    #[arg(long)]
    pub(crate) connections: Option<usize>,
    /// Requests in flight per client; with --stream, batches in flight per stream.
    #[arg(long, default_value_t = 1)]
    pub(crate) in_flight: usize,
    /// write and e2e: AppendStream instead of Append. read: Subscribe instead of Fetch.
    #[arg(long)]
    pub(crate) stream: bool,
    /// Open loop: records per second over all clients, sent when their time has come. Latency
    /// counts from that time, however late the send.
    #[arg(long, value_name = "RECORDS_PER_SEC")]
    pub(crate) rate: Option<f64>,
    /// Ack to wait for: all = synced on a majority, quorum-written = in the logs of a majority,
    /// 1 = in the leader's log, none = received [default: all]. After a write with less than all
    /// the partitions must have grown by what was acked.
    #[arg(long, value_name = "all|quorum-written|1|none")]
    pub(crate) acks: Option<Acks>,
    /// What values consist of [default: random].
    #[arg(long)]
    pub(crate) payload: Option<Payload>,
    /// write: send without producer identity. A batch whose fate is unknown is then not sent
    /// again.
    #[arg(long)]
    pub(crate) no_idempotence: bool,
    /// write: stamp every record, read everything back and compare. read: check checksums and
    /// offsets.
    #[arg(long)]
    pub(crate) verify: bool,
    /// e2e: subscribers, each of which gets every record [default: 1].
    #[arg(long)]
    pub(crate) subscribers: Option<usize>,
    /// Create the topic first, with this many partitions. One that is there must have as many.
    #[arg(long, visible_alias = "partitions", value_name = "PARTITIONS")]
    pub(crate) create_topic: Option<u32>,
    /// Replicas of the topic that is created [default: the cluster's].
    #[arg(long, requires = "create_topic", value_name = "COUNT")]
    pub(crate) replication_factor: Option<u32>,
    /// Seed of payloads and retries.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Threads of this process's runtime [default: one per core; 1 where one request at a time is
    /// in flight].
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    /// Write the result to this file as JSON; "-" prints it instead of the table.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// Ack that a write waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
pub(crate) enum Acks {
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

impl Acks {
    /// As it is written on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::QuorumWritten => "quorum-written",
            Self::One => "1",
            Self::None => "none",
        }
    }
}

/// What values consist of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Payload {
    Random,
    Text,
    Zero,
}

/// The log alone.
#[derive(Debug, Clone, Args)]
pub(crate) struct WalArgs {
    /// Folder to write in; must be empty or missing [default: a temporary one in this folder].
    #[arg(long)]
    pub(crate) dir: Option<PathBuf>,
    #[arg(long, default_value = "disk")]
    pub(crate) storage: StorageKind,
    /// Write through the page cache instead of past it.
    #[arg(long)]
    pub(crate) buffered: bool,
    /// Bytes of one append, which becomes one group.
    #[arg(long, default_value = "1MiB", value_parser = bytes)]
    pub(crate) group_size: usize,
    /// Bytes of one entry.
    #[arg(long, default_value = "100KiB", value_parser = bytes)]
    pub(crate) entry_size: usize,
    /// Appends under way at the same time.
    #[arg(long, default_value_t = 2)]
    pub(crate) in_flight: usize,
    /// Bytes of a segment.
    #[arg(long, default_value = "64MiB", value_parser = bytes)]
    pub(crate) segment_size: usize,
    /// Bytes kept before the log is trimmed, so that segments recycle. The warm-up lasts at least
    /// until twice as much is written. 0 never trims: a fresh log, whose files grow.
    #[arg(long, default_value = "512MiB", value_parser = bytes)]
    pub(crate) keep: usize,
    /// Length of the measured part.
    #[arg(long, default_value = "5s", value_parser = duration)]
    pub(crate) duration: Duration,
    /// Shortest warm-up.
    #[arg(long, default_value = "1s", value_parser = duration)]
    pub(crate) warmup: Duration,
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Write the result to this file as JSON; "-" prints it instead of the table.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// Where a log lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum StorageKind {
    Disk,
    Memory,
}

/// The service that stores nothing.
#[derive(Debug, Clone, Args)]
pub(crate) struct CeilingArgs {
    /// Load to run against it.
    #[arg(long, default_value = "write")]
    pub(crate) mode: Mode,
    /// Be the service, at this address, until interrupted.
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) serve: Option<String>,
    /// End when standard input does: with the parent process.
    #[arg(long, hide = true, requires = "serve")]
    pub(crate) end_with_stdin: bool,
    /// Threads of the service's runtime [default: cores - 1, at least 1, as the server's].
    #[arg(long)]
    pub(crate) server_threads: Option<usize>,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// The ceiling and a server by turns.
#[derive(Debug, Clone, Args)]
pub(crate) struct CompareArgs {
    /// Load to run.
    #[arg(long, default_value = "write")]
    pub(crate) mode: Mode,
    /// Runs against each.
    #[arg(long, default_value_t = 5)]
    pub(crate) runs: usize,
    /// Threads of the ceiling's runtime [default: cores - 1, at least 1, as the server's].
    #[arg(long)]
    pub(crate) server_threads: Option<usize>,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// "1500ms", "2s", "1m", "1h"; a bare number counts seconds.
fn duration(text: &str) -> Result<Duration, String> {
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

/// "1024", "64KiB", "1MiB", "2GB".
fn bytes(text: &str) -> Result<usize, String> {
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
    fn acks_are_written_as_they_are_read() {
        for acks in Acks::value_variants() {
            assert_eq!(Acks::from_str(acks.name(), false), Ok(*acks));
            assert_eq!(serde_json::to_value(acks).unwrap(), acks.name());
        }
        assert_eq!(Acks::from_str("0", false), Ok(Acks::None));
    }

    #[test]
    fn the_promised_commands_parse() {
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
        ] {
            Cli::try_parse_from(line.split(' ')).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }
}
