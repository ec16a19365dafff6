//! Arguments of `helix topic`.

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use helix_proto::log::v1::{AllowedCompression, BatchFormat, CleanupPolicy, Durability};

use crate::batch_format;
use crate::cleanup;
use crate::completion;
use crate::compression;
use crate::durability::DurabilityArg;
use crate::partitions::PartitionList;
use crate::position::PositionArg;
use crate::units;

#[derive(Debug, Subcommand)]
pub(crate) enum TopicSubcommand {
    /// Create a topic
    ///
    /// Creating a topic again with equal settings succeeds.
    Create(TopicCreateArgs),
    /// List topics
    List {
        /// List only names that start with this prefix
        #[arg(long, default_value = "")]
        prefix: String,
    },
    /// Show the settings and partitions of a topic
    Describe {
        /// Name of the topic
        #[arg(add = completion::topics())]
        topic: String,
    },
    /// Change settings of a topic
    ///
    /// The value `default` resets a setting to the cluster's default.
    Alter {
        /// Name of the topic
        #[arg(add = completion::topics())]
        topic: String,
        #[command(flatten)]
        settings: TopicSettings,
    },
    /// Add partitions to a topic
    ///
    /// Keys may map to other partitions afterwards.
    AddPartitions {
        /// Name of the topic
        #[arg(add = completion::topics())]
        topic: String,
        /// New number of partitions, at most 100,000
        #[arg(long, value_name = "COUNT", value_parser = partition_count())]
        total: u32,
    },
    /// Delete the oldest records of a topic
    Trim {
        /// Name of the topic
        #[arg(add = completion::topics())]
        topic: String,
        /// First record to keep: a position as in `consume --from`
        ///
        /// The position `latest` deletes all records.
        #[arg(long, visible_alias = "before", value_name = "POSITION", allow_hyphen_values = true)]
        to: PositionArg,
        /// Partitions [default: all]
        #[arg(short, long, value_name = "N-M,...", default_value = "", hide_default_value = true)]
        partitions: PartitionList,
        /// Skip the confirmation
        #[arg(long)]
        yes: bool,
    },
    /// Set the fencing token of a partition
    ///
    /// From then on, appends that carry another token are rejected.
    Fence {
        /// Name of the topic
        #[arg(add = completion::topics())]
        topic: String,
        /// Partition
        partition: u32,
        /// New token, at most 64 bytes; empty to remove the token
        #[arg(long)]
        token: String,
        /// Required current token; empty to require none
        #[arg(long, value_name = "TOKEN")]
        expect: Option<String>,
    },
    /// Delete a topic and its records
    Delete {
        /// Name of the topic
        #[arg(add = completion::topics())]
        topic: String,
        /// Skip the confirmation
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct TopicCreateArgs {
    /// Name of the topic
    pub(crate) topic: String,
    /// Number of partitions, at most 100,000
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = partition_count())]
    pub(crate) partitions: u32,
    /// Replicas of each partition: 1, 3 or 5 [default: the cluster's]
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "COUNT")]
    pub(crate) replication_factor: u32,
    #[command(flatten)]
    pub(crate) settings: TopicSettings,
    /// Check only; create nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// A new value of a setting, or a reset to the cluster's default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SettingChange<T> {
    Default,
    Value(T),
}

/// Changes to the settings of a topic; absent ones stay as they are.
#[derive(Debug, Clone, Args)]
pub(crate) struct TopicSettings {
    /// Retention time: 12h, 7d; 0s for unlimited
    ///
    /// A segment is deleted when all of its batches are older.
    #[arg(long, value_parser = setting(units::parse_duration), value_name = "TIME")]
    pub(crate) retention_time: Option<SettingChange<Duration>>,
    /// Retention size of a partition: 512MiB, 10GB; 0 for unlimited
    ///
    /// A partition keeps this much, and at most a segment more.
    #[arg(long, value_parser = setting(units::parse_bytes), value_name = "BYTES")]
    pub(crate) retention_bytes: Option<SettingChange<u64>>,
    /// Maximum size of a batch
    #[arg(long, value_parser = setting(parse_u32_bytes), value_name = "BYTES")]
    pub(crate) max_batch_bytes: Option<SettingChange<u32>>,
    /// Maximum size of a record
    #[arg(long, value_parser = setting(parse_u32_bytes), value_name = "BYTES")]
    pub(crate) max_record_bytes: Option<SettingChange<u32>>,
    /// Minimum durability; weaker requests are raised to it
    #[arg(long, value_parser = setting(parse_durability), value_name = "DURABILITY")]
    pub(crate) min_durability: Option<SettingChange<Durability>>,
    /// Durability of appends that request none
    #[arg(long, value_parser = setting(parse_durability), value_name = "DURABILITY")]
    pub(crate) default_durability: Option<SettingChange<Durability>>,
    /// Compressions that appends may use: any, none, lz4, zstd
    ///
    /// Uncompressed batches are always allowed.
    #[arg(long, value_parser = setting(compression::parse_allowed), value_name = "COMPRESSION")]
    pub(crate) compression: Option<SettingChange<AllowedCompression>>,
    /// Reject batches whose content is no records: on, off
    #[arg(long, value_parser = setting(parse_switch), value_name = "SWITCH")]
    pub(crate) validate_records: Option<SettingChange<bool>>,
    /// Cleanup of old records: delete, compact, compact+delete
    ///
    /// `delete` deletes by retention. `compact` keeps the latest record of each key, and every
    /// record needs a key.
    #[arg(long, value_parser = setting(cleanup::parse_cleanup), value_name = "POLICY")]
    pub(crate) cleanup: Option<SettingChange<CleanupPolicy>>,
    /// Time that readers of a compacted topic have to see deletions
    #[arg(long, value_parser = setting(units::parse_duration), value_name = "TIME")]
    pub(crate) tombstone_retention_time: Option<SettingChange<Duration>>,
    /// Batches that appends may send: helix, kafka, any
    ///
    /// `kafka` stores Kafka record batches, also those of native clients, so that Kafka clients
    /// read them as they are stored.
    #[arg(long, value_parser = setting(batch_format::parse_format), value_name = "FORMAT")]
    pub(crate) batch_format: Option<SettingChange<BatchFormat>>,
}

/// Parses a partition count up to the server's limit.
fn partition_count() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=100_000)
}

fn setting<T>(
    parse: fn(&str) -> Result<T, String>,
) -> impl Fn(&str) -> Result<SettingChange<T>, String> + Clone {
    move |text| match text {
        "default" => Ok(SettingChange::Default),
        _ => parse(text).map(SettingChange::Value),
    }
}

fn parse_u32_bytes(text: &str) -> Result<u32, String> {
    let bytes = units::parse_bytes(text)?;
    u32::try_from(bytes).map_err(|_| format!("{text} is over the limit of 4 GiB"))
}

fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("use on or off".to_owned()),
    }
}

fn parse_durability(text: &str) -> Result<Durability, String> {
    DurabilityArg::from_str(text, true)
        .map(Durability::from)
        .map_err(|_| "use quorum-synced, quorum-written, leader-written or none".to_owned())
}
