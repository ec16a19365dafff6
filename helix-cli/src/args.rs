//! The command line as clap parses it: commands, flags, defaults and help texts.
//! The arguments are parsed here; no command runs here.

mod access;
mod backup;
mod cert;
mod cluster;
mod config;
mod context;
mod debug;
mod dev;
mod global;
mod group;
mod quota;
mod records;
mod server;
mod topic;
mod trace;
mod wal;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use crate::completion::CompletedProgram;
use crate::{completion, context as contexts, exit};
pub(crate) use access::{AclChangeArgs, AclSubcommand, TokenSubcommand, rule_text};
pub(crate) use backup::{BackupArgs, BackupSubcommand, RestoreArgs};
pub(crate) use cert::{CaArgs, CertSubcommand, ClientCertArgs, NodeCertArgs};
pub(crate) use cluster::{ClusterSubcommand, HealthArgs, WaitArgs};
pub(crate) use config::ConfigSubcommand;
pub(crate) use context::ContextSubcommand;
pub(crate) use debug::{BundleArgs, DebugSubcommand, TopArgs};
#[cfg(test)]
pub(crate) use dev::DevPortArgs;
pub(crate) use dev::{DemoArgs, DevArgs, DevStartArgs, DevSubcommand};
pub(crate) use dev::{KAFKA_PORT_STEP, NODES_MAX, PEER_PORT_STEP, RECORD_BYTES_MIN};
pub(crate) use dev::{NodeSettingArg, ignored_variables};
pub(crate) use global::{GlobalArgs, TlsArgs};
pub(crate) use group::{GroupResetArgs, GroupSeekArgs, GroupSubcommand, OffsetChangeArgs};
pub(crate) use quota::QuotaSubcommand;
pub(crate) use records::{ConsumeArgs, OffsetsArgs, ProduceArgs, TailArgs};
pub(crate) use server::ServerArgs;
pub(crate) use topic::{SettingChange, TopicCreateArgs, TopicSettings, TopicSubcommand};
pub(crate) use trace::{TraceAppendArgs, TraceSubcommand};
pub(crate) use wal::{DroppablePart, WalSubcommand};

const EXAMPLES: &str = "\
Examples:
  helix dev                                     run a local cluster
  helix cluster health
  helix topic create orders --partitions 4
  echo hello | helix produce orders
  helix consume orders --from earliest
  helix cheat                                   print more examples";

/// Helix: a replicated append-only log service with a gRPC API
#[derive(Debug, Parser)]
#[command(name = "helix", version, after_help = after_help())]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: GlobalArgs,
    #[command(subcommand)]
    pub(crate) command: CliCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CliCommand {
    /// Run a self-check: write, kill a leader, read back, verify
    ///
    /// Starts temporary nodes and writes records to them. Kills a leader half way (kill -9) and
    /// restarts it while writing continues. Then reads every record back and compares it with the
    /// acks.
    Demo(DemoArgs),
    /// Run a local cluster until Ctrl-C
    Dev(DevArgs),
    /// Run one node
    Server(ServerArgs),
    /// Inspect and manage the cluster
    #[command(subcommand)]
    Cluster(ClusterSubcommand),
    /// Manage topics
    #[command(subcommand)]
    Topic(TopicSubcommand),
    /// Manage consumer groups
    #[command(subcommand)]
    Group(GroupSubcommand),
    /// Manage tokens
    #[command(subcommand)]
    Token(TokenSubcommand),
    /// Manage rules: the rights of principals
    #[command(subcommand)]
    Acl(AclSubcommand),
    /// Manage quotas: the limits of principals
    #[command(subcommand)]
    Quota(QuotaSubcommand),
    /// Show the principal of this client and its rules
    Whoami,
    /// Append the lines of standard input to a topic
    Produce(ProduceArgs),
    /// Print the records of a topic
    Consume(ConsumeArgs),
    /// Print the newest records of a topic
    Tail(TailArgs),
    /// Show the start and end offsets of partitions
    Offsets(OffsetsArgs),
    /// Show where the time of an append goes
    #[command(subcommand)]
    Trace(TraceSubcommand),
    /// Inspect, verify and repair the log of a stopped node
    #[command(subcommand)]
    Wal(WalSubcommand),
    /// Back up topics to a directory
    ///
    /// If the directory already has a backup of this cluster, only newer records are added.
    #[command(after_help = BACKUP)]
    Backup(BackupArgs),
    /// Restore topics from a backup
    #[command(after_help = RESTORE)]
    Restore(RestoreArgs),
    /// Check addresses, versions, disks and health of all nodes
    Check,
    /// Watch nodes, shards, topics and groups on the whole terminal
    ///
    /// Press ? for the keys.
    Top(TopArgs),
    /// Collect facts about a problem
    #[command(subcommand)]
    Debug(DebugSubcommand),
    /// Manage contexts
    #[command(subcommand, after_help = contexts::HELP)]
    Context(ContextSubcommand),
    /// Make certificates for TLS
    #[command(subcommand)]
    Cert(CertSubcommand),
    /// List and explain the settings of a node
    #[command(subcommand)]
    Config(ConfigSubcommand),
    /// Explain an error reason, or list all reasons
    Explain {
        /// Reason, as shown in brackets after an error: NO_LEADER
        #[arg(add = completion::reasons())]
        reason: Option<String>,
    },
    /// Print examples of every command
    Cheat,
    /// Print shell completions
    #[command(after_help = COMPLETIONS)]
    Completions {
        /// Shell
        shell: Shell,
        /// Program whose words are completed
        #[arg(long, value_enum, default_value_t)]
        program: CompletedProgram,
    },
    /// Print the versions of this program and the nodes
    Version,
}

const BACKUP: &str = "\
A backup is consistent per partition: it contains the records that were acknowledged before it
started, and none that were appended later. Writers are not blocked. To continue an interrupted
backup, run the command again. Records that are deleted before they are copied leave a gap, which is
listed in the backup; the exit code is then 5.";

const RESTORE: &str = "\
Every file is verified first, and nothing is restored if one is damaged. An existing topic must be
empty. Offsets start at 0 in the restored topic, unless --keep-offsets is given. Append times are
new; keys, values, headers and event times are preserved.";

const COMPLETIONS: &str = "\
Completes commands and flags, and topics, groups and contexts as they are. With --program
helix-server, completes the flags of a node; `helix` must be installed next to it.

Installation:
  helix completions bash > ~/.local/share/bash-completion/completions/helix
  helix completions zsh > ~/.zfunc/_helix     with fpath+=~/.zfunc before compinit in ~/.zshrc
  helix completions fish > ~/.config/fish/completions/helix.fish";

impl CliCommand {
    /// Returns the topic that the command is about, for error texts.
    pub(crate) fn topic(&self) -> Option<&str> {
        match self {
            Self::Produce(args) => Some(&args.topic),
            Self::Consume(args) => Some(&args.topic),
            Self::Tail(args) => Some(&args.topic),
            Self::Offsets(args) => Some(&args.topic),
            Self::Trace(TraceSubcommand::Append(args)) => Some(&args.topic),
            Self::Backup(args) => args.create.topics.first().map(String::as_str),
            Self::Restore(args) => args.topics.first().map(String::as_str),
            Self::Topic(command) => match command {
                TopicSubcommand::Create(args) => Some(&args.topic),
                TopicSubcommand::Describe { topic }
                | TopicSubcommand::Alter { topic, .. }
                | TopicSubcommand::AddPartitions { topic, .. }
                | TopicSubcommand::Trim { topic, .. }
                | TopicSubcommand::Fence { topic, .. }
                | TopicSubcommand::Delete { topic, .. } => Some(topic),
                TopicSubcommand::List { .. } => None,
            },
            Self::Group(command) => command.topic(),
            Self::Demo(_)
            | Self::Dev(_)
            | Self::Server(_)
            | Self::Cluster(_)
            | Self::Token(_)
            | Self::Acl(_)
            | Self::Quota(_)
            | Self::Whoami
            | Self::Wal(_)
            | Self::Check
            | Self::Top(_)
            | Self::Debug(_)
            | Self::Config(_)
            | Self::Context(_)
            | Self::Cert(_)
            | Self::Explain { .. }
            | Self::Cheat
            | Self::Completions { .. }
            | Self::Version => None,
        }
    }

    /// Returns the consumer group that the command is about, for error texts.
    pub(crate) fn group(&self) -> Option<&str> {
        match self {
            Self::Group(command) => command.group(),
            _ => None,
        }
    }

    /// Returns true if the command connects to an existing cluster.
    pub(crate) fn needs_cluster(&self) -> bool {
        match self {
            Self::Cluster(_)
            | Self::Topic(_)
            | Self::Group(_)
            | Self::Token(_)
            | Self::Acl(_)
            | Self::Quota(_)
            | Self::Whoami
            | Self::Produce(_)
            | Self::Consume(_)
            | Self::Tail(_)
            | Self::Offsets(_)
            | Self::Trace(_)
            | Self::Restore(_)
            | Self::Check
            | Self::Top(_)
            | Self::Debug(_)
            | Self::Version => true,
            Self::Backup(args) => args.command.is_none(),
            Self::Demo(_)
            | Self::Dev(_)
            | Self::Server(_)
            | Self::Wal(_)
            | Self::Config(_)
            | Self::Context(_)
            | Self::Cert(_)
            | Self::Explain { .. }
            | Self::Cheat
            | Self::Completions { .. } => false,
        }
    }
}

/// Returns the words of the command whose schema `--schema` requests. Required arguments may be
/// missing.
pub(crate) fn schema_request() -> Option<Vec<String>> {
    let words: Vec<_> = std::env::args_os().collect();
    let before_end = words.iter().take_while(|word| *word != "--");
    if !before_end.clone().any(|word| word == "--schema") {
        return None;
    }
    let mut matches = &without_required_args(Cli::command()).get_matches_from(&words);
    let mut path = Vec::new();
    while let Some((name, inner)) = matches.subcommand() {
        path.push(name.to_owned());
        matches = inner;
    }
    Some(path)
}

/// Returns true if the words select JSON output, also where they are not valid otherwise.
pub(crate) fn is_json_requested(words: impl Iterator<Item = String>) -> bool {
    let mut words = words.take_while(|word| word != "--").peekable();
    while let Some(word) = words.next() {
        let value = match word.as_str() {
            "-o" | "--output" => words.peek().cloned().unwrap_or_default(),
            word => {
                let short = word.strip_prefix("-o").filter(|_| !word.starts_with("--"));
                let value = word.strip_prefix("--output=").or(short);
                value.unwrap_or_default().trim_start_matches('=').to_owned()
            }
        };
        if matches!(value.as_str(), "json" | "jsonl") {
            return true;
        }
    }
    false
}

/// Makes all arguments of a command optional.
fn without_required_args(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| arg.required(false)).subcommand_required(false);
    command.arg_required_else_help(false).mut_subcommands(without_required_args)
}

fn after_help() -> String {
    format!("{EXAMPLES}\n\n{}\n\n{}", contexts::HELP, exit::help())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use helix_proto::log::v1::Durability;

    use super::*;
    use crate::position::PositionArg;

    fn parse(line: &str) -> Result<CliCommand, clap::Error> {
        Cli::try_parse_from(line.split(' ')).map(|cli| cli.command)
    }

    #[test]
    fn clap_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn positions_may_start_with_a_hyphen() {
        let command =
            parse("helix consume orders --from -100 --until @-15m -n 5 -p 0,2-3").unwrap();
        let CliCommand::Consume(args) = command else { panic!("consume") };
        let range = args.range().unwrap();
        assert_eq!(range.from, Some(PositionArg::BeforeEnd(100)));
        assert_eq!(range.until, Some(PositionArg::Ago(Duration::from_secs(900))));
        assert_eq!((args.max_records, args.partitions.to_vec()), (Some(5), vec![0, 2, 3]));
    }

    #[test]
    fn range_sets_both_ends_and_rejects_a_second_end() {
        let range = |line| match parse(line).unwrap() {
            CliCommand::Consume(args) => args.range(),
            other => panic!("{other:?}"),
        };
        let both = range("helix consume orders --from 10..20").unwrap();
        assert_eq!(both.from, Some(PositionArg::Offset(10)));
        assert_eq!(both.until, Some(PositionArg::Offset(20)));
        assert!(range("helix consume orders --from 10..20 --until 30").is_err());
        assert!(range("helix consume orders --from 10.. --until 30").is_ok());
    }

    #[test]
    fn short_flags_have_one_meaning() {
        let CliCommand::Tail(args) = parse("helix tail orders -n 3 -F -f %o").unwrap() else {
            panic!("tail")
        };
        assert!(args.follow && args.format.is_some() && args.max_records == 3);
        let CliCommand::Consume(args) = parse("helix consume orders -F -f %o").unwrap() else {
            panic!("consume")
        };
        assert!(args.follow && args.format.is_some());
        // -p selects partitions in every command, so it is not their number.
        assert!(parse("helix topic create orders -p 4").is_err());
    }

    #[test]
    fn dev_parses_start_options_and_subcommands() {
        let CliCommand::Dev(args) = parse("helix dev --nodes 1 --port 9300").unwrap() else {
            panic!("dev")
        };
        assert!(args.command.is_none());
        assert_eq!((args.start.nodes, args.start.base.port), (1, 9300));
        let CliCommand::Dev(args) = parse("helix dev kill 2 --port 9300").unwrap() else {
            panic!("dev")
        };
        let Some(DevSubcommand::Kill { node, base }) = args.command else { panic!("kill") };
        assert_eq!((node, base.port), (2, 9300));
    }

    #[test]
    fn addresses_take_blanks_and_a_default_port() {
        let line = ["helix", "topic", "list", "--addr", "n1:1, n2 ,http://n3"];
        let parsed = Cli::try_parse_from(line).unwrap();
        assert_eq!(parsed.global.addr, ["n1:1", "n2:9092", "n3:9092"]);
    }

    #[test]
    fn settings_take_units_and_can_be_reset() {
        let line = "helix topic alter orders --retention-time 7d --retention-bytes default \
                    --min-durability quorum-synced";
        let CliCommand::Topic(TopicSubcommand::Alter { settings, .. }) = parse(line).unwrap()
        else {
            panic!("alter")
        };
        let week = Duration::from_secs(7 * 24 * 3600);
        assert_eq!(settings.retention_time, Some(SettingChange::Value(week)));
        assert_eq!(settings.retention_bytes, Some(SettingChange::Default));
        assert_eq!(settings.min_durability, Some(SettingChange::Value(Durability::QuorumSynced)));
        assert_eq!(settings.max_batch_bytes, None);
    }

    #[test]
    fn invalid_values_are_usage_errors() {
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
            "helix group seek g",
            "helix group seek g orders",
            "helix group seek g orders --to first",
            "helix group seek g orders --to latest --undo",
            "helix group seek g --undo --partitions 1",
            "helix group reset g",
            "helix topic list --addr n1:99999",
            "helix topic list --addr n1:",
            "helix topic list --addr n1:0",
            "helix topic list --addr n1,,n2",
            "helix topic list --addr http://n1:9092/path",
            "helix debug bundle --admin-addr n1:99999",
            "helix debug bundle --admin-addr n1",
            "helix context add dev --addr ::1",
            "helix cluster add-node 2 n2",
            "helix cluster replace-node 2 --by 3 --peer-addr n2:0",
            "helix completions tcsh",
            "helix nonsense",
        ] {
            assert_eq!(parse(line).unwrap_err().exit_code(), 2, "{line}");
        }
    }
}
