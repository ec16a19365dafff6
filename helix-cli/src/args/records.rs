//! Arguments of the commands that write and read records: produce, consume, tail and offsets.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::SystemTime;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use helix_client::proto::log::v1::Header;
use helix_client::{OnRecreate, ReadSource, StartPolicy};
use helix_proto::time;
use prost_types::Timestamp;

use crate::clock;
use crate::completion;
use crate::compression::CompressionArg;
use crate::durability::DurabilityArg;
use crate::exit::{CliError, Exit};
use crate::line_parser::LineParser;
use crate::partitions::PartitionList;
use crate::position::{self, PositionArg, PositionRange};
use crate::template::{self, Template};

#[derive(Debug, Args)]
pub(crate) struct ProduceArgs {
    /// Name of the topic
    #[arg(add = completion::topics())]
    pub(crate) topic: String,
    /// File with the records, one per line [default: standard input]
    pub(crate) file: Option<PathBuf>,
    /// Partition of all records [default: by hash of the key; without keys, in turn]
    #[arg(short, long, value_name = "N")]
    pub(crate) partition: Option<u32>,
    /// Key of records for which the input has none
    #[arg(short, long, value_name = "TEXT")]
    pub(crate) key: Option<String>,
    /// Separator of key and value; a line without it has no key
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) key_separator: Option<String>,
    /// Header of every record; may be repeated
    #[arg(short = 'H', long = "header", value_name = "NAME=VALUE", value_parser = header)]
    pub(crate) headers: Vec<Header>,
    /// Event time of records for which the input has none: 2026-01-31T10:00:00Z, or now
    #[arg(long, value_name = "TIME")]
    pub(crate) event_time: Option<EventTimeArg>,
    /// Append one record without a value, which deletes the key; reads no input
    #[arg(
        long,
        requires = "key",
        conflicts_with_all = [
            "file", "key_separator", "format", "jsonl", "base64", "null_separated"
        ]
    )]
    pub(crate) tombstone: bool,
    /// Read lines of this format: '%k\t%v\n'
    #[arg(
        short,
        long,
        value_name = "FORMAT",
        conflicts_with_all = ["jsonl", "base64", "key_separator"],
        long_help = read_format_help()
    )]
    pub(crate) format: Option<LineParser>,
    /// Read JSON lines, as `consume -o jsonl` prints them
    ///
    /// A line's partition is used, unless --partition is given. Topic, offset and append time are
    /// ignored.
    #[arg(long, conflicts_with_all = ["base64", "key_separator"])]
    pub(crate) jsonl: bool,
    /// Decode keys and values from base64
    #[arg(long)]
    pub(crate) base64: bool,
    /// Records end with a NUL byte instead of a newline
    #[arg(short = '0', long)]
    pub(crate) null_separated: bool,
    /// Name of the producer: a run that fails can be resumed
    ///
    /// A second producer of the same name ends the first one. Lines without a key go to the
    /// partitions in turn, 1,000 each.
    #[arg(long, value_name = "NAME")]
    pub(crate) producer: Option<String>,
    /// Append only what the last run of the producer did not append
    ///
    /// Needs the same input and options as that run, on the same machine. Another input is refused
    /// before anything is appended, and so is a run that has appended all of its input.
    #[arg(long, requires = "producer")]
    pub(crate) resume: bool,
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
    #[arg(add = completion::topics())]
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
        add = completion::groups(),
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
    #[arg(
        short = 'n',
        long,
        value_name = "COUNT",
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub(crate) max_records: Option<u64>,
    /// Partitions [default: all]
    #[arg(short, long, value_name = "N-M,...", default_value = "", hide_default_value = true)]
    pub(crate) partitions: PartitionList,
    /// Keep running and print new records
    #[arg(short = 'F', long)]
    pub(crate) follow: bool,
    /// Skip batches whose content is not records, and name them
    ///
    /// Without it, the read ends with exit code 4 after the records before such a batch. A member
    /// of a group commits them, and with this flag also what it skips.
    #[arg(long)]
    pub(crate) skip_undecodable: bool,
    #[command(flatten)]
    pub(crate) recreate: RecreateArgs,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    /// Print records in this format: '%p %o %t %k %v\n'
    #[arg(short, long, value_name = "FORMAT", long_help = format_help())]
    pub(crate) format: Option<Template>,
}

#[derive(Debug, Args)]
pub(crate) struct TailArgs {
    /// Name of the topic
    #[arg(add = completion::topics())]
    pub(crate) topic: String,
    /// Number of records over all partitions
    #[arg(
        short = 'n',
        long,
        default_value = "10",
        value_name = "COUNT",
        value_parser = at_least_one
    )]
    pub(crate) max_records: usize,
    /// Partitions [default: all]
    #[arg(short, long, value_name = "N-M,...", default_value = "", hide_default_value = true)]
    pub(crate) partitions: PartitionList,
    /// Keep running and print new records
    #[arg(short = 'F', long)]
    pub(crate) follow: bool,
    /// Skip batches whose content is not records, and name them
    #[arg(long)]
    pub(crate) skip_undecodable: bool,
    #[command(flatten)]
    pub(crate) recreate: RecreateArgs,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    /// Print records in this format: '%p %o %t %k %v\n'
    #[arg(short, long, value_name = "FORMAT", long_help = format_help())]
    pub(crate) format: Option<Template>,
}

#[derive(Debug, Args)]
pub(crate) struct OffsetsArgs {
    /// Name of the topic
    #[arg(add = completion::topics())]
    pub(crate) topic: String,
    /// Position to resolve to an offset in each partition
    #[arg(
        value_name = "POSITION",
        allow_hyphen_values = true,
        long_help = position::help("Position to resolve to an offset")
    )]
    pub(crate) position: Option<PositionArg>,
    /// Partitions [default: all]
    #[arg(short, long, value_name = "N-M,...", default_value = "", hide_default_value = true)]
    pub(crate) partitions: PartitionList,
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
    /// Fails if both --from and --until give an end, or if the end is before the start wherever
    /// records are.
    pub(crate) fn range(&self) -> Result<PositionRange, CliError> {
        let PositionRange { from, until } =
            self.from.clone().unwrap_or(PositionRange { from: None, until: None });
        match (until, self.until.clone()) {
            (Some(_), Some(_)) => {
                let failure = CliError::new(Exit::Usage, "two end positions are given");
                let failure = failure.why("both --from A..B and --until set the end");
                Err(failure.hint("use either --from A..B or --until B"))
            }
            (until, other) => {
                let range = PositionRange { from, until: until.or(other) };
                match range.is_reversed() {
                    None => Ok(range),
                    Some((from, until)) => {
                        let what = format!("the end {until} is before the start {from}");
                        let failure = CliError::new(Exit::Usage, what);
                        Err(failure.hint(format!("use --from {until}..{from}")))
                    }
                }
            }
        }
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(0) => Err("must be at least 1".to_owned()),
        parsed => parsed.map_err(|error| error.to_string()),
    }
}

fn from_help() -> String {
    let purpose = "Start position [default: earliest, with --follow latest]";
    let help = position::help(purpose);
    format!("{help}\nA..B starts at A and stops before B")
}

/// The event time of produced records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EventTimeArg(pub(crate) SystemTime);

impl FromStr for EventTimeArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "now" {
            return Ok(Self(clock::now()));
        }
        let parsed = text.parse::<Timestamp>().map_err(|error| error.to_string());
        let time = parsed.and_then(|time| time::system_time(time).map_err(|it| it.to_string()));
        time.map(Self)
            .map_err(|_| format!("invalid time {text:?}; use now or 2026-01-31T10:00:00Z"))
    }
}

/// Parses NAME=VALUE.
fn header(text: &str) -> Result<Header, String> {
    let (name, value) = text.split_once('=').ok_or("a header must be NAME=VALUE")?;
    if name.is_empty() {
        return Err("the name of a header is empty".to_owned());
    }
    Ok(Header { name: name.to_owned(), value: value.to_owned().into() })
}

fn read_format_help() -> String {
    format!(
        "Read lines of this format: '%k\\t%v\\n'\n{}\nA field ends at the next text of the \
         format. Fields that the service sets are skipped.",
        template::HELP
    )
}

fn format_help() -> String {
    format!("Print records in this format: '%p %o %t %k %v\\n'\n{}", template::HELP)
}
