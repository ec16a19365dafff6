//! Arguments of the commands that write and read records: produce, consume, tail and offsets.

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use helix_client::{OnRecreate, ReadSource, StartPolicy};

use crate::compression::CompressionArg;
use crate::durability::DurabilityArg;
use crate::exit::{CliError, Exit};
use crate::position::{self, PositionArg, PositionRange};
use crate::template::{self, Template};

#[derive(Debug, Args)]
pub(crate) struct ProduceArgs {
    /// Name of the topic
    pub(crate) topic: String,
    /// Partition of all records [default: by hash of the key; without keys, in turn]
    #[arg(short, long, value_name = "N")]
    pub(crate) partition: Option<u32>,
    /// Separator of key and value; a line without it has no key
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) key_separator: Option<String>,
    /// Required durability of an ack [default: the topic's]
    #[arg(long, value_enum)]
    pub(crate) durability: Option<DurabilityArg>,
    /// Compression of the batches
    #[arg(long, value_enum, default_value_t = CompressionArg::None)]
    pub(crate) compression: CompressionArg,
}

#[derive(Debug, Args)]
pub(crate) struct ConsumeArgs {
    /// Name of the topic; with --group also a pattern, '*' stands for any characters
    pub(crate) topic: String,
    /// Read as a member of this consumer group
    ///
    /// Starts at the group's offsets, shares the partitions with other members, and commits records
    /// once they are written to standard output. Ctrl-C commits, leaves the group and ends with
    /// exit code 130. Exit code 4 means that a committed offset is no longer readable, 3 that the
    /// topic was created again: see --start.
    #[arg(
        short,
        long,
        value_name = "GROUP",
        conflicts_with_all = ["from", "until", "partitions", "any_replica", "on_recreate"]
    )]
    pub(crate) group: Option<String>,
    /// Start where the group has no usable offset
    ///
    /// safe reads from the first record where the group has never committed, else fails. fail fails
    /// there too.
    #[arg(long, value_name = "POLICY", value_enum, default_value_t, requires = "group")]
    pub(crate) start: StartArg,
    /// Start position [default: earliest, with --follow latest]
    #[arg(
        long,
        value_name = "POSITION",
        allow_hyphen_values = true,
        long_help = from_help()
    )]
    pub(crate) from: Option<PositionRange>,
    /// End position, exclusive [default: the current end]
    #[arg(long, value_name = "POSITION", allow_hyphen_values = true)]
    pub(crate) until: Option<PositionArg>,
    /// Stop after this many records
    #[arg(short = 'n', long, value_name = "COUNT")]
    pub(crate) max_records: Option<u64>,
    /// Partitions [default: all]
    #[arg(short, long = "partitions", value_delimiter = ',', value_name = "N,...")]
    pub(crate) partitions: Vec<u32>,
    /// Keep running and print new records
    #[arg(long)]
    pub(crate) follow: bool,
    #[command(flatten)]
    pub(crate) recreate: RecreateArgs,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    /// Print records in this format: '%p %o %t %k %v\n'
    #[arg(
        short = 'f',
        long,
        value_name = "FORMAT",
        visible_short_alias = 'F',
        long_help = format_help()
    )]
    pub(crate) format: Option<Template>,
}

#[derive(Debug, Args)]
pub(crate) struct TailArgs {
    /// Name of the topic
    pub(crate) topic: String,
    /// Number of records over all partitions
    #[arg(short = 'n', long, default_value_t = 10, value_name = "COUNT")]
    pub(crate) max_records: usize,
    /// Partitions [default: all]
    #[arg(short, long = "partitions", value_delimiter = ',', value_name = "N,...")]
    pub(crate) partitions: Vec<u32>,
    /// Keep running and print new records
    #[arg(short, long)]
    pub(crate) follow: bool,
    #[command(flatten)]
    pub(crate) recreate: RecreateArgs,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    /// Print records in this format: '%p %o %t %k %v\n'
    #[arg(short = 'F', long, value_name = "FORMAT", long_help = format_help())]
    pub(crate) format: Option<Template>,
}

#[derive(Debug, Args)]
pub(crate) struct OffsetsArgs {
    /// Name of the topic
    pub(crate) topic: String,
    /// Position to resolve to an offset in each partition
    #[arg(
        value_name = "POSITION",
        allow_hyphen_values = true,
        long_help = position::help("Position to resolve to an offset")
    )]
    pub(crate) position: Option<PositionArg>,
    /// Partitions [default: all]
    #[arg(short, long = "partitions", value_delimiter = ',', value_name = "N,...")]
    pub(crate) partitions: Vec<u32>,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
}

/// Start of a group's member in partitions without a usable offset.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum StartArg {
    #[default]
    Safe,
    Fail,
    Earliest,
    Latest,
}

impl From<StartArg> for StartPolicy {
    fn from(start: StartArg) -> Self {
        match start {
            StartArg::Safe => Self::Safe,
            StartArg::Fail => Self::Fail,
            StartArg::Earliest => Self::Earliest,
            StartArg::Latest => Self::Latest,
        }
    }
}

/// Selects the reaction to a topic that is deleted and created again during a read.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct RecreateArgs {
    /// With --follow, reaction to a topic that is created again
    ///
    /// fail ends with exit code 3. restart reports it and reads the new topic from its beginning;
    /// it waits half a minute for the new topic.
    #[arg(long, value_name = "REACTION", value_enum, default_value_t)]
    on_recreate: RecreateReaction,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum RecreateReaction {
    #[default]
    Fail,
    Restart,
}

impl From<RecreateArgs> for OnRecreate {
    fn from(args: RecreateArgs) -> Self {
        match args.on_recreate {
            RecreateReaction::Fail => Self::Fail,
            RecreateReaction::Restart => Self::Restart,
        }
    }
}

/// Selects the nodes that may serve a read.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct SourceArgs {
    /// Read from any replica, even without a leader
    ///
    /// A replica serves the records that it knows to be committed.
    #[arg(long)]
    any_replica: bool,
}

impl From<SourceArgs> for ReadSource {
    fn from(args: SourceArgs) -> Self {
        if args.any_replica { Self::AnyReplica } else { Self::Leader }
    }
}

impl ConsumeArgs {
    /// Returns the start and end position.
    ///
    /// # Errors
    /// Fails if both --from and --until give an end.
    pub(crate) fn range(&self) -> Result<PositionRange, CliError> {
        let PositionRange { from, until } =
            self.from.clone().unwrap_or(PositionRange { from: None, until: None });
        match (until, self.until.clone()) {
            (Some(_), Some(_)) => {
                let failure = CliError::new(Exit::Usage, "two end positions are given");
                let failure = failure.why("both --from A..B and --until set the end");
                Err(failure.hint("use either --from A..B or --until B"))
            }
            (until, other) => Ok(PositionRange { from, until: until.or(other) }),
        }
    }
}

fn from_help() -> String {
    let purpose = "Start position [default: earliest, with --follow latest]";
    let help = position::help(purpose);
    format!("{help}\nA..B starts at A and stops before B")
}

fn format_help() -> String {
    format!("Print records in this format: '%p %o %t %k %v\\n'\n{}", template::HELP)
}
