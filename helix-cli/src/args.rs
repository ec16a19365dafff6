//! The command line as clap sees it: every command, flag, default and help text.
//! Values are parsed here into what the commands work with; nothing is done here.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use helix_proto::log::v1::Durability;

use crate::commands::server::ServerArgs;
use crate::output::Format;
use crate::position::Position;
use crate::{exit, position, units};

const EXAMPLES: &str = "\
Examples:
  helix dev                                     a cluster to try things with
  helix cluster health
  helix topic create orders --partitions 4
  echo hello | helix produce orders
  helix consume orders --from earliest";

/// Helix: a replicated append-only log service with a gRPC API
#[derive(Debug, Parser)]
#[command(name = "helix", version, after_help = format!("{EXAMPLES}\n\n{}", exit::HELP))]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// Nodes to begin with; the others are learned from them
    #[arg(
        long,
        global = true,
        env = "HELIX_ADDR",
        default_value = "127.0.0.1:9092",
        value_delimiter = ',',
        value_name = "HOST:PORT,..."
    )]
    pub(crate) addr: Vec<String>,
    /// How results are printed: for people, or with the field names of the API
    #[arg(short, long, global = true, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: Format,
    /// Say nothing beside the results and errors
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Write to three nodes, kill a leader, go on, restart it, read everything back, check it
    Demo(DemoArgs),
    /// Run three nodes to try things with, until Ctrl-C
    Dev(DevArgs),
    /// Run one node
    Server(ServerArgs),
    /// Ask about the cluster: its health, nodes, shards; move leaders
    #[command(subcommand)]
    Cluster(ClusterCommand),
    /// Create, list, describe, change and delete topics
    #[command(subcommand)]
    Topic(TopicCommand),
    /// Append the lines of standard input to a topic
    Produce(ProduceArgs),
    /// Print the records of a topic
    Consume(ConsumeArgs),
    /// Print the newest records of a topic
    Tail(TailArgs),
    /// Show where the partitions of a topic begin and end
    Offsets(OffsetsArgs),
    /// Look into the log of a stopped node
    #[command(subcommand)]
    Wal(WalCommand),
    /// Print the versions of this program and of the cluster's nodes
    Version,
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Records to write
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) records: u64,
    /// Bytes of each record
    #[arg(long, default_value = "256", value_parser = record_bytes, value_name = "BYTES")]
    pub(crate) size: usize,
    /// Partitions to spread them over
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) partitions: u32,
    /// Nodes to start: 1, 3 or 5
    #[arg(long, default_value_t = 3, value_parser = cluster_size)]
    pub(crate) nodes: u8,
    /// Folder to make the nodes' temporary folder in [default: the system's]
    #[arg(long)]
    pub(crate) dir: Option<PathBuf>,
    /// Seed of the records' bytes
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// Most nodes of a cluster on one machine.
pub(crate) const NODES_MAX: u8 = 5;

/// From a node's port to that on which the others reach it.
pub(crate) const PEER_PORT_STEP: u16 = 100;

/// Highest port of the first node: the other nodes' and all peer ports lie above it.
const BASE_PORT_MAX: u16 = u16::MAX - PEER_PORT_STEP - NODES_MAX as u16;

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "HELIX_LOG=info shows what the nodes say."
)]
pub(crate) struct DevArgs {
    #[command(subcommand)]
    pub(crate) command: Option<DevCommand>,
    #[command(flatten)]
    pub(crate) start: DevStartArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DevStartArgs {
    /// Nodes to start: 1, 3 or 5
    #[arg(long, default_value_t = 3, value_parser = cluster_size)]
    pub(crate) nodes: u8,
    #[command(flatten)]
    pub(crate) base: DevBase,
    /// Keep everything in memory: nothing survives, nothing is synced
    #[arg(long, conflicts_with_all = ["keep", "dir"])]
    pub(crate) memory: bool,
    /// Keep the folder at the end
    #[arg(long)]
    pub(crate) keep: bool,
    /// Folder of the data. One that exists is used as it is, and kept
    #[arg(long, alias = "data-dir", default_value = "helix-dev")]
    pub(crate) dir: PathBuf,
}

/// Which dev cluster.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct DevBase {
    /// Port of the first node on 127.0.0.1; the others follow, and peer ports are 100 higher
    #[arg(
        long,
        default_value_t = 9092,
        value_parser = clap::value_parser!(u16).range(1..=i64::from(BASE_PORT_MAX))
    )]
    pub(crate) port: u16,
}

/// What can be asked of a dev cluster from another terminal.
#[derive(Debug, Subcommand)]
pub(crate) enum DevCommand {
    /// Kill a node as a crash would (kill -9)
    Kill {
        /// Node id
        node: u64,
        #[command(flatten)]
        base: DevBase,
    },
    /// Start a node again on its data; one that runs is stopped first
    Restart {
        /// Node id
        node: u64,
        #[command(flatten)]
        base: DevBase,
    },
    /// Show the nodes' processes
    Status {
        #[command(flatten)]
        base: DevBase,
    },
    /// Stop the cluster, as Ctrl-C does
    Stop {
        #[command(flatten)]
        base: DevBase,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Show its id and how much there is of everything
    Info,
    /// Say whether all is well; exit code 1 if not
    Health(HealthArgs),
    /// Show the nodes, with what each says of itself
    Nodes,
    /// Show each shard's replicas and how far they are
    Shards,
    /// Move a shard's leadership to another node
    TransferLeader {
        /// Shard id
        #[arg(long, value_name = "N")]
        shard: u32,
        /// Node that is to lead [default: the one that is furthest]
        #[arg(long, value_name = "NODE")]
        to: Option<u64>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct HealthArgs {
    /// Go on, and show it again each time it changes
    #[arg(long)]
    pub(crate) watch: bool,
    /// End with the first time that all is well
    #[arg(long, requires = "watch")]
    pub(crate) exit_when_healthy: bool,
    /// Give up after this time [default: never]
    #[arg(long, requires = "watch", value_name = "TIME", value_parser = units::parse_duration)]
    pub(crate) timeout: Option<Duration>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TopicCommand {
    /// Create a topic. Repeating it with equal settings succeeds
    Create(TopicCreateArgs),
    /// List topics
    List {
        /// Only names that begin with this
        #[arg(long, default_value = "")]
        prefix: String,
    },
    /// Show a topic's settings and partitions
    Describe {
        /// Name of the topic
        topic: String,
    },
    /// Change settings; `default` sets one back to the cluster's default
    Alter {
        /// Name of the topic
        topic: String,
        #[command(flatten)]
        settings: Settings,
    },
    /// Raise the number of partitions. Keys may move to other partitions
    AddPartitions {
        /// Name of the topic
        topic: String,
        /// New number of partitions
        #[arg(long, value_name = "COUNT")]
        total: u32,
    },
    /// Drop records from the front
    Trim {
        /// Name of the topic
        topic: String,
        /// First record to keep: a position as for `consume --from`; `latest` drops all
        #[arg(long, value_name = "POSITION", allow_hyphen_values = true)]
        to: Position,
        /// Partitions [default: all]
        #[arg(short, long = "partitions", value_delimiter = ',', value_name = "N,...")]
        partitions: Vec<u32>,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
    /// Delete a topic and its records
    Delete {
        /// Name of the topic
        topic: String,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct TopicCreateArgs {
    /// Name of the topic
    pub(crate) topic: String,
    /// Number of partitions
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) partitions: u32,
    /// Replicas of each partition [default: the cluster's]
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "COUNT")]
    pub(crate) replication_factor: u32,
    #[command(flatten)]
    pub(crate) settings: Settings,
    /// Only check whether it could be created
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// A setting that may also be set back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Setting<T> {
    Default,
    Value(T),
}

/// Settings of a topic; those that are not given stay as they are.
#[derive(Debug, Clone, Args)]
pub(crate) struct Settings {
    /// Drop batches that are older: 12h, 7d; 0s for never
    #[arg(long, value_parser = setting(units::parse_duration), value_name = "TIME")]
    pub(crate) retention_time: Option<Setting<Duration>>,
    /// Keep at most this much of each partition: 512MiB, 10GB; 0 for no bound
    #[arg(long, value_parser = setting(units::parse_bytes), value_name = "BYTES")]
    pub(crate) retention_bytes: Option<Setting<u64>>,
    /// Largest batch
    #[arg(long, value_parser = setting(size), value_name = "BYTES")]
    pub(crate) max_batch_bytes: Option<Setting<u32>>,
    /// Largest record
    #[arg(long, value_parser = setting(size), value_name = "BYTES")]
    pub(crate) max_record_bytes: Option<Setting<u32>>,
    /// Weakest durability that a producer gets; weaker requests are raised to it
    #[arg(long, value_parser = setting(durability), value_name = "DURABILITY")]
    pub(crate) min_durability: Option<Setting<Durability>>,
    /// Durability of appends that name none
    #[arg(long, value_parser = setting(durability), value_name = "DURABILITY")]
    pub(crate) default_durability: Option<Setting<Durability>>,
}

#[derive(Debug, Args)]
pub(crate) struct ProduceArgs {
    /// Name of the topic
    pub(crate) topic: String,
    /// Partition for all records [default: by the key's hash; without a key one after the other]
    #[arg(short, long, value_name = "N")]
    pub(crate) partition: Option<u32>,
    /// What stands between key and value. A line without it is a value without a key
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) key_separator: Option<String>,
    /// What an ack has to mean [default: the topic's default]
    #[arg(long, value_enum)]
    pub(crate) durability: Option<DurabilityName>,
}

#[derive(Debug, Args)]
pub(crate) struct ConsumeArgs {
    /// Name of the topic
    pub(crate) topic: String,
    /// Where to begin [default: earliest, with --follow latest]
    #[arg(
        long,
        value_name = "POSITION",
        allow_hyphen_values = true,
        long_help = position::help("Where to begin [default: earliest, with --follow latest]")
    )]
    pub(crate) from: Option<Position>,
    /// Where to stop: before this record [default: at the end as it is now]
    #[arg(long, value_name = "POSITION", allow_hyphen_values = true)]
    pub(crate) until: Option<Position>,
    /// Stop after this many records
    #[arg(short = 'n', long, value_name = "COUNT")]
    pub(crate) max_records: Option<u64>,
    /// Partitions [default: all]
    #[arg(short, long = "partitions", value_delimiter = ',', value_name = "N,...")]
    pub(crate) partitions: Vec<u32>,
    /// Go on with new records as they come
    #[arg(long)]
    pub(crate) follow: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TailArgs {
    /// Name of the topic
    pub(crate) topic: String,
    /// How many records, over all partitions
    #[arg(short = 'n', long, default_value_t = 10, value_name = "COUNT")]
    pub(crate) max_records: usize,
    /// Partitions [default: all]
    #[arg(short, long = "partitions", value_delimiter = ',', value_name = "N,...")]
    pub(crate) partitions: Vec<u32>,
    /// Go on with new records as they come
    #[arg(short, long)]
    pub(crate) follow: bool,
}

#[derive(Debug, Args)]
pub(crate) struct OffsetsArgs {
    /// Name of the topic
    pub(crate) topic: String,
    /// Also show the offset of this position in each partition
    #[arg(
        value_name = "POSITION",
        allow_hyphen_values = true,
        long_help = position::help("Also show the offset of this position")
    )]
    pub(crate) position: Option<Position>,
    /// Partitions [default: all]
    #[arg(short, long = "partitions", value_delimiter = ',', value_name = "N,...")]
    pub(crate) partitions: Vec<u32>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum WalCommand {
    /// Show the segments of a log
    Inspect {
        /// Data folder of a node, or one of its shard-N
        dir: PathBuf,
    },
    /// Read every byte of a log and check it; exit code 11 if anything is damaged
    Verify {
        /// Data folder of a node, or one of its shard-N
        dir: PathBuf,
    },
}

/// What an ack means, as it is written on a command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DurabilityName {
    /// A majority has synced it to stable storage
    QuorumSynced,
    /// A majority has it in its log, not necessarily synced
    QuorumWritten,
    /// The leader has it in its log; a crash can lose it
    LeaderWritten,
    /// Nothing is waited for
    None,
}

impl From<DurabilityName> for Durability {
    fn from(name: DurabilityName) -> Self {
        match name {
            DurabilityName::QuorumSynced => Self::QuorumSynced,
            DurabilityName::QuorumWritten => Self::QuorumWritten,
            DurabilityName::LeaderWritten => Self::LeaderWritten,
            DurabilityName::None => Self::None,
        }
    }
}

impl Command {
    /// The topic that the command is about, for the texts of errors.
    pub(crate) fn topic(&self) -> Option<&str> {
        match self {
            Self::Produce(args) => Some(&args.topic),
            Self::Consume(args) => Some(&args.topic),
            Self::Tail(args) => Some(&args.topic),
            Self::Offsets(args) => Some(&args.topic),
            Self::Topic(command) => match command {
                TopicCommand::Create(args) => Some(&args.topic),
                TopicCommand::Describe { topic }
                | TopicCommand::Alter { topic, .. }
                | TopicCommand::AddPartitions { topic, .. }
                | TopicCommand::Trim { topic, .. }
                | TopicCommand::Delete { topic, .. } => Some(topic),
                TopicCommand::List { .. } => None,
            },
            Self::Demo(_)
            | Self::Dev(_)
            | Self::Server(_)
            | Self::Cluster(_)
            | Self::Wal(_)
            | Self::Version => None,
        }
    }
}

fn setting<T>(
    parse: fn(&str) -> Result<T, String>,
) -> impl Fn(&str) -> Result<Setting<T>, String> + Clone {
    move |text| match text {
        "default" => Ok(Setting::Default),
        _ => parse(text).map(Setting::Value),
    }
}

fn cluster_size(text: &str) -> Result<u8, String> {
    match text.parse() {
        Ok(nodes @ (1 | 3 | NODES_MAX)) => Ok(nodes),
        _ => Err("a cluster has 1, 3 or 5 nodes".to_owned()),
    }
}

fn size(text: &str) -> Result<u32, String> {
    let bytes = units::parse_bytes(text)?;
    u32::try_from(bytes).map_err(|_| format!("{text} is more than 4 GiB"))
}

fn record_bytes(text: &str) -> Result<usize, String> {
    use crate::demo::workload::RECORD_BYTES_MIN;
    let bytes = units::parse_bytes(text)?;
    match usize::try_from(bytes) {
        Ok(bytes) if (RECORD_BYTES_MIN..=1 << 19).contains(&bytes) => Ok(bytes),
        _ => Err(format!("a record of the demo has {RECORD_BYTES_MIN} bytes to 512 KiB")),
    }
}

fn durability(text: &str) -> Result<Durability, String> {
    DurabilityName::from_str(text, true)
        .map(Durability::from)
        .map_err(|_| "write quorum-synced, quorum-written, leader-written or none".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<Command, clap::Error> {
        Cli::try_parse_from(line.split(' ')).map(|cli| cli.command)
    }

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn positions_may_begin_with_a_hyphen() {
        let command = parse("helix consume orders --from -100 --until @-15m -n 5 -p 0,2").unwrap();
        let Command::Consume(args) = command else { panic!("consume") };
        assert_eq!(args.from, Some(Position::BeforeEnd(100)));
        assert_eq!(args.until, Some(Position::Ago(Duration::from_secs(900))));
        assert_eq!((args.max_records, args.partitions), (Some(5), vec![0, 2]));
    }

    #[test]
    fn a_dev_cluster_is_started_and_spoken_to() {
        let Command::Dev(args) = parse("helix dev --nodes 1 --port 9300").unwrap() else {
            panic!("dev")
        };
        assert!(args.command.is_none());
        assert_eq!((args.start.nodes, args.start.base.port), (1, 9300));
        let Command::Dev(args) = parse("helix dev kill 2 --port 9300").unwrap() else {
            panic!("dev")
        };
        let Some(DevCommand::Kill { node, base }) = args.command else { panic!("kill") };
        assert_eq!((node, base.port), (2, 9300));
    }

    #[test]
    fn settings_take_units_and_can_be_set_back() {
        let line = "helix topic alter orders --retention-time 7d --retention-bytes default \
                    --min-durability quorum-synced";
        let Command::Topic(TopicCommand::Alter { settings, .. }) = parse(line).unwrap() else {
            panic!("alter")
        };
        let week = Duration::from_secs(7 * 24 * 3600);
        assert_eq!(settings.retention_time, Some(Setting::Value(week)));
        assert_eq!(settings.retention_bytes, Some(Setting::Default));
        assert_eq!(settings.min_durability, Some(Setting::Value(Durability::QuorumSynced)));
        assert_eq!(settings.max_batch_bytes, None);
    }

    #[test]
    fn wrong_values_are_usage_errors() {
        for line in [
            "helix consume orders --from first",
            "helix topic create orders --partitions 0",
            "helix topic alter orders --retention-time 7",
            "helix demo --size 3",
            "helix demo --nodes 2",
            "helix dev --port 0",
            "helix dev --port 65500",
            "helix dev kill",
            "helix dev --nodes 3 kill 2",
            "helix cluster health --exit-when-healthy",
            "helix cluster transfer-leader --to 2",
            "helix nonsense",
        ] {
            assert_eq!(parse(line).unwrap_err().exit_code(), 2, "{line}");
        }
    }
}
