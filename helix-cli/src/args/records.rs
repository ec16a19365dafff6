//! Arguments of the commands that write and read records: produce, consume, tail and offsets.
//! Values are parsed here; nothing is done here.

use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use helix_client::ReadSource;

use super::DurabilityName;
use crate::exit::{Exit, Failure};
use crate::position::{self, Position, PositionRange};
use crate::template::{self, Template};

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
        long_help = from_help()
    )]
    pub(crate) from: Option<PositionRange>,
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
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    /// Print records in this form: '%p %o %t %k %v\n'
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
    /// How many records, over all partitions
    #[arg(short = 'n', long, default_value_t = 10, value_name = "COUNT")]
    pub(crate) max_records: usize,
    /// Partitions [default: all]
    #[arg(short, long = "partitions", value_delimiter = ',', value_name = "N,...")]
    pub(crate) partitions: Vec<u32>,
    /// Go on with new records as they come
    #[arg(short, long)]
    pub(crate) follow: bool,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    /// Print records in this form: '%p %o %t %k %v\n'
    #[arg(short = 'F', long, value_name = "FORMAT", long_help = format_help())]
    pub(crate) format: Option<Template>,
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
    #[command(flatten)]
    pub(crate) source: SourceArgs,
}

/// Which nodes may answer a read.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct SourceArgs {
    /// Let any replica answer, also while there is no leader: what it knows to be committed
    #[arg(long)]
    any_replica: bool,
}

impl From<SourceArgs> for ReadSource {
    fn from(args: SourceArgs) -> Self {
        if args.any_replica { Self::AnyReplica } else { Self::Leader }
    }
}

impl ConsumeArgs {
    /// Where to begin and where to stop.
    ///
    /// # Errors
    /// The end is given twice.
    pub(crate) fn range(&self) -> Result<PositionRange, Failure> {
        let PositionRange { from, until } =
            self.from.clone().unwrap_or(PositionRange { from: None, until: None });
        match (until, self.until.clone()) {
            (Some(_), Some(_)) => {
                let failure = Failure::new(Exit::Usage, "the end is given twice");
                Err(failure.why("--from A..B names it, and so does --until"))
            }
            (until, other) => Ok(PositionRange { from, until: until.or(other) }),
        }
    }
}

fn from_help() -> String {
    let purpose = "Where to begin [default: earliest, with --follow latest]";
    let help = position::help(purpose);
    format!("{help}\nA..B begins at A and stops before B")
}

fn format_help() -> String {
    format!("Print records in this form: '%p %o %t %k %v\\n'\n{}", template::HELP)
}
