//! The command line as clap sees it: every command, flag, default and help text.
//! Values are parsed here into what the commands work with; nothing is done here.

mod backup;
mod dev;
mod records;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use helix_proto::log::v1::Durability;

use crate::commands::server::ServerArgs;
use crate::output::Format;
use crate::position::Position;
use crate::{context, exit, units};
pub(crate) use backup::{BackupArgs, BackupCommand, RestoreArgs};
#[cfg(test)]
pub(crate) use dev::DevBase;
pub(crate) use dev::{DemoArgs, DevArgs, DevCommand, DevStartArgs};
pub(crate) use dev::{NODES_MAX, PEER_PORT_STEP};
pub(crate) use records::{ConsumeArgs, OffsetsArgs, ProduceArgs, TailArgs};

const EXAMPLES: &str = "\
Examples:
  helix dev                                     a cluster to try things with
  helix cluster health
  helix topic create orders --partitions 4
  echo hello | helix produce orders
  helix consume orders --from earliest
  helix cheat                                   more of these";

/// Helix: a replicated append-only log service with a gRPC API
#[derive(Debug, Parser)]
#[command(name = "helix", version, after_help = after_help())]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// Nodes to begin with [env: HELIX_ADDR] [default: the context's, or 127.0.0.1:9092]
    #[arg(long, global = true, value_delimiter = ',', value_name = "HOST:PORT,...")]
    pub(crate) addr: Vec<String>,
    /// Cluster to speak to, as `helix context add` named it
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) context: Option<String>,
    /// How results are printed: for people, or with the field names of the API
    #[arg(short, long, global = true, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: Format,
    /// Print the JSON Schema of the command's results, and do nothing else
    #[arg(long, global = true)]
    pub(crate) schema: bool,
    /// Say nothing beside the results and errors
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
    /// Who named the addresses.
    #[arg(skip)]
    pub(crate) addr_source: String,
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
    /// Copy topics into a folder, or what has come since the last time
    #[command(after_help = BACKUP)]
    Backup(BackupArgs),
    /// Make topics again from a backup
    #[command(after_help = RESTORE)]
    Restore(RestoreArgs),
    /// Dial every node, and look at versions, disks, addresses and health
    Check,
    /// Keep names for clusters, and choose the one that commands speak to
    #[command(subcommand, after_help = context::HELP)]
    Context(ContextCommand),
    /// List the settings of a node, and explain them
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Explain the reason of an error, as NO_LEADER; without one, list them
    Explain {
        /// Reason, as it stands in brackets behind an error
        reason: Option<String>,
    },
    /// Print examples of everything, on one page
    Cheat,
    /// Print a shell's completions of this command line
    #[command(after_help = COMPLETIONS)]
    Completions {
        /// Shell
        shell: Shell,
    },
    /// Print the versions of this program and of the cluster's nodes
    Version,
}

const BACKUP: &str = "\
The backup is consistent per partition: it has all that was acknowledged when it began, and nothing
later. Writers are not held up. One that is interrupted goes on when it is run again.";

const RESTORE: &str = "\
Every file is checked first, and nothing is restored from a damaged one. A topic that is there must
be empty. Offsets begin at 0 in the restored topic, unless --keep-offsets is given. Append times are
new; keys, values, headers and event times are as they were.";

const COMPLETIONS: &str = "\
Where they go:
  helix completions bash > ~/.local/share/bash-completion/completions/helix
  helix completions zsh > ~/.zfunc/_helix     with fpath+=~/.zfunc before compinit in ~/.zshrc
  helix completions fish > ~/.config/fish/completions/helix.fish";

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// List the settings with their defaults
    List,
    /// Explain a setting
    Explain {
        /// Key in the file, flag, or environment variable
        #[arg(allow_hyphen_values = true)]
        key: String,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ContextCommand {
    /// Add a context, or change its addresses: those of --addr
    Add {
        /// Name of the context
        name: String,
        /// Use it from now on; the first context is used at once
        #[arg(long = "use")]
        make_current: bool,
    },
    /// Use a context from now on; `-` is the one before
    Use {
        /// Name of the context
        #[arg(allow_hyphen_values = true)]
        name: String,
    },
    /// List the contexts
    List,
    /// Remove a context
    Remove {
        /// Name of the context
        name: String,
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
    /// Add a node that was started with an empty folder, or change a member's peer address
    AddNode {
        /// Node id
        #[arg(value_name = "NODE")]
        node: u64,
        /// Address at which the other nodes dial it
        #[arg(value_name = "HOST:PORT")]
        peer_addr: String,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Remove a node: its leads go elsewhere, then its replicas
    RemoveNode {
        /// Node id
        #[arg(value_name = "NODE")]
        node: u64,
        /// It does not answer and will not come back
        #[arg(long)]
        lost: bool,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Put a node with an empty folder in the place of one that is lost
    ReplaceNode {
        /// Node that is lost
        #[arg(value_name = "NODE")]
        node: u64,
        /// Node that takes its place [default: the same, with an empty folder]
        #[arg(long, value_name = "NODE", requires = "peer_addr")]
        by: Option<u64>,
        /// Address at which the other nodes dial it [default: as before]
        #[arg(long, value_name = "HOST:PORT")]
        peer_addr: Option<String>,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Have a node lead nothing, and wait until it does not: before maintenance
    Drain {
        /// Node id
        #[arg(value_name = "NODE")]
        node: u64,
        /// Check only
        #[arg(long)]
        dry_run: bool,
    },
    /// Let a drained node lead again
    Undrain {
        /// Node id
        #[arg(value_name = "NODE")]
        node: u64,
    },
    /// Have every shard led by the node that should lead it, now
    Balance,
}

/// How a change of the nodes is made.
#[derive(Debug, Args)]
pub(crate) struct WaitArgs {
    /// Check only, and say what is in the way
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Begin it, and do not wait for its end
    #[arg(long)]
    pub(crate) no_wait: bool,
    /// Wait no longer than this; the change goes on [default: until it is done]
    #[arg(long, value_name = "TIME", value_parser = units::parse_duration)]
    pub(crate) timeout: Option<Duration>,
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
        /// New number of partitions, up to 100,000
        #[arg(long, value_name = "COUNT", value_parser = partitions())]
        total: u32,
    },
    /// Drop records from the front
    Trim {
        /// Name of the topic
        topic: String,
        /// First record to keep: a position as for `consume --from`; `latest` drops all
        #[arg(long, visible_alias = "before", value_name = "POSITION", allow_hyphen_values = true)]
        to: Position,
        /// Partitions [default: all]
        #[arg(short, long = "partitions", value_delimiter = ',', value_name = "N,...")]
        partitions: Vec<u32>,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
    /// Put a fencing token in force: whoever demands another one is refused from then on
    Fence {
        /// Name of the topic
        topic: String,
        /// Partition
        partition: u32,
        /// New token, up to 64 bytes; empty: none
        #[arg(long)]
        token: String,
        /// Only if this token is in force now; empty: if there is none
        #[arg(long, value_name = "TOKEN")]
        expect: Option<String>,
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
    /// Number of partitions, up to 100,000
    #[arg(short, long, default_value_t = 1, value_name = "COUNT", value_parser = partitions())]
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
    /// Drop batches that are older, a segment's together: 12h, 7d; 0s for never
    #[arg(long, value_parser = setting(units::parse_duration), value_name = "TIME")]
    pub(crate) retention_time: Option<Setting<Duration>>,
    /// Keep this much of each partition, and up to a segment more: 512MiB, 10GB; 0 for all
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
    /// Give up the damaged end of a log that no other node has; without --drop, say what that is
    #[command(after_help = WAL_REPAIR)]
    Repair {
        /// Data folder of a node, or one of its shard-N
        dir: PathBuf,
        /// What to give up
        #[arg(long, requires = "yes")]
        drop: Option<Droppable>,
        /// Do it: what is dropped cannot be had back
        #[arg(long, requires = "drop")]
        yes: bool,
    },
}

/// What a log can be without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Droppable {
    /// Everything from the first damaged byte on of what is not sealed
    End,
}

const WAL_REPAIR: &str = "\
The last resort of a shard with one replica. In a cluster of several nodes it is never needed: a
damaged replica is filled anew by the others, and one that was cut would have forgotten what it had
acknowledged. Copy the folder first. Records that are dropped had been acknowledged, and their
offsets will be given to other records.

A log that does not open for another reason (its state file, a segment that is gone) cannot be
repaired: restore a backup. Damage in a sealed segment does not keep a log from opening; trim the
partitions past it, as `helix wal verify` and the errors of readers name it.";

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
            Self::Backup(args) => args.create.topics.first().map(String::as_str),
            Self::Restore(args) => args.topics.first().map(String::as_str),
            Self::Topic(command) => match command {
                TopicCommand::Create(args) => Some(&args.topic),
                TopicCommand::Describe { topic }
                | TopicCommand::Alter { topic, .. }
                | TopicCommand::AddPartitions { topic, .. }
                | TopicCommand::Trim { topic, .. }
                | TopicCommand::Fence { topic, .. }
                | TopicCommand::Delete { topic, .. } => Some(topic),
                TopicCommand::List { .. } => None,
            },
            Self::Demo(_)
            | Self::Dev(_)
            | Self::Server(_)
            | Self::Cluster(_)
            | Self::Wal(_)
            | Self::Check
            | Self::Config(_)
            | Self::Context(_)
            | Self::Explain { .. }
            | Self::Cheat
            | Self::Completions { .. }
            | Self::Version => None,
        }
    }

    /// Whether it speaks to a cluster that is there already.
    pub(crate) fn has_cluster(&self) -> bool {
        match self {
            Self::Cluster(_)
            | Self::Topic(_)
            | Self::Produce(_)
            | Self::Consume(_)
            | Self::Tail(_)
            | Self::Offsets(_)
            | Self::Restore(_)
            | Self::Check
            | Self::Version => true,
            Self::Backup(args) => args.command.is_none(),
            Self::Demo(_)
            | Self::Dev(_)
            | Self::Server(_)
            | Self::Wal(_)
            | Self::Config(_)
            | Self::Context(_)
            | Self::Explain { .. }
            | Self::Cheat
            | Self::Completions { .. } => false,
        }
    }
}

/// The words of the command whose schema is asked for, if one is. What the command needs otherwise
/// may be left out.
pub(crate) fn schema_asked_for() -> Option<Vec<String>> {
    let words: Vec<_> = std::env::args_os().collect();
    let before_end = words.iter().take_while(|word| *word != "--");
    if !before_end.clone().any(|word| word == "--schema") {
        return None;
    }
    let mut matches = &lenient(Cli::command()).get_matches_from(&words);
    let mut path = Vec::new();
    while let Some((name, inner)) = matches.subcommand() {
        path.push(name.to_owned());
        matches = inner;
    }
    Some(path)
}

/// A command that can be parsed without what it requires.
fn lenient(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| arg.required(false)).subcommand_required(false);
    command.arg_required_else_help(false).mut_subcommands(lenient)
}

fn after_help() -> String {
    format!("{EXAMPLES}\n\n{}\n\n{}", context::HELP, exit::help())
}

/// As many as a topic can have: the server's limit.
fn partitions() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=100_000)
}

fn setting<T>(
    parse: fn(&str) -> Result<T, String>,
) -> impl Fn(&str) -> Result<Setting<T>, String> + Clone {
    move |text| match text {
        "default" => Ok(Setting::Default),
        _ => parse(text).map(Setting::Value),
    }
}

fn size(text: &str) -> Result<u32, String> {
    let bytes = units::parse_bytes(text)?;
    u32::try_from(bytes).map_err(|_| format!("{text} is more than 4 GiB"))
}

fn durability(text: &str) -> Result<Durability, String> {
    DurabilityName::from_str(text, true)
        .map(Durability::from)
        .map_err(|_| "write quorum-synced, quorum-written, leader-written or none".to_owned())
}

#[cfg(test)]
mod tests {
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
        let range = args.range().unwrap();
        assert_eq!(range.from, Some(Position::BeforeEnd(100)));
        assert_eq!(range.until, Some(Position::Ago(Duration::from_secs(900))));
        assert_eq!((args.max_records, args.partitions), (Some(5), vec![0, 2]));
    }

    #[test]
    fn a_range_names_both_ends_and_no_end_is_named_twice() {
        let range = |line| match parse(line).unwrap() {
            Command::Consume(args) => args.range(),
            other => panic!("{other:?}"),
        };
        let both = range("helix consume orders --from 10..20").unwrap();
        assert_eq!(both.from, Some(Position::Offset(10)));
        assert_eq!(both.until, Some(Position::Offset(20)));
        assert!(range("helix consume orders --from 10..20 --until 30").is_err());
        assert!(range("helix consume orders --from 10.. --until 30").is_ok());
    }

    #[test]
    fn tail_follows_with_the_letter_that_tail_has_always_had() {
        let Command::Tail(args) = parse("helix tail orders -n 3 -f -F %o").unwrap() else {
            panic!("tail")
        };
        assert!(args.follow && args.format.is_some() && args.max_records == 3);
        for line in ["helix consume orders -f %o", "helix consume orders -F %o"] {
            let Command::Consume(args) = parse(line).unwrap() else { panic!("consume") };
            assert!(args.format.is_some() && !args.follow);
        }
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
            "helix topic create orders --partitions 100001",
            "helix topic add-partitions orders --total 100001",
            "helix topic alter orders --retention-time 7",
            "helix demo --size 3",
            "helix demo --nodes 2",
            "helix dev --port 0",
            "helix dev --port 65500",
            "helix dev kill",
            "helix dev --nodes 3 kill 2",
            "helix cluster health --exit-when-healthy",
            "helix cluster transfer-leader --to 2",
            "helix consume orders -f %z",
            "helix completions tcsh",
            "helix nonsense",
        ] {
            assert_eq!(parse(line).unwrap_err().exit_code(), 2, "{line}");
        }
    }
}
