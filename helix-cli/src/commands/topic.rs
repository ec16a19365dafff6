//! `helix topic`: create, list, describe, alter, add-partitions, trim, fence and delete.
//! Commands that delete records ask for confirmation, unless --yes is given.

use std::time::Duration;

use anyhow::Context;
use futures_util::{StreamExt, TryStreamExt, stream};
use helix_client::proto::log::v1 as proto;
use helix_client::{Client, NewTopic, ReadSource, TopicRef};
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::timeout;

use crate::api_duration::ApiDuration;
use crate::args::{GlobalArgs, SettingChange, TopicCreateArgs, TopicSettings, TopicSubcommand};
use crate::batch_format::format_name;
use crate::cleanup::cleanup_name;
use crate::commands::compression_sample::{self, TopicCompression};
use crate::commands::confirm::confirm;
use crate::commands::group::topic_lag::{self, TopicGroupRow};
use crate::compression::allowed_name;
use crate::connect::connect;
use crate::durability::durability_name;
use crate::exit::{CliError, Exit};
use crate::offset_lookup::PartitionBounds;
use crate::output::{Output, message};
use crate::position::PositionArg;
use crate::{offset_lookup, units};

/// Time for the leaders of a topic that seems to be empty to confirm it.
const COUNT_MAX: Duration = Duration::from_secs(3);

/// Partitions that are trimmed at the same time.
const TRIMS_MAX: usize = 64;

pub(crate) async fn run(global: &GlobalArgs, command: &TopicSubcommand) -> anyhow::Result<()> {
    let client = connect(global).await?;
    let output = Output { format: global.output };
    match command {
        TopicSubcommand::Create(args) => output.show(&create(&client, args).await?),
        TopicSubcommand::List { prefix } => {
            let topics = client.admin().topics(prefix).await.context("list topics")?;
            if topics.is_empty() && !global.quiet {
                match prefix.as_str() {
                    "" => message!("no topics"),
                    prefix => message!("no topic begins with {prefix}"),
                }
            }
            output.show(&topics.into_iter().map(TopicRow::from).collect::<Vec<_>>())
        }
        TopicSubcommand::Describe { topic } => {
            let found = client.admin().topic(topic).await;
            let found = found.with_context(|| format!("describe {topic}"))?;
            let (groups, compression) = tokio::join!(
                topic_lag::of_topic(&client, &found, global.quiet),
                compression_sample::of_topic(&client, &found),
            );
            let (compression, verdict) = match compression {
                Ok(compression) => (compression, Ok(())),
                Err(why) => {
                    let what = format!("the compression of {topic} is not known");
                    (None, Err(CliError::new(Exit::Partly, what).why(why).into()))
                }
            };
            let described = TopicDescription { compression, groups: Some(groups), ..found.into() };
            output.show_with_verdict(&described, verdict)
        }
        TopicSubcommand::Alter { topic, settings } => {
            output.show(&alter(&client, topic, settings).await?)
        }
        TopicSubcommand::AddPartitions { topic, total } => {
            let changed = client.admin().add_partitions(topic, *total).await;
            let changed = changed.with_context(|| format!("add partitions to {topic}"))?;
            output.show(&TopicRow::from(changed))
        }
        TopicSubcommand::Trim { topic, to, partitions, yes } => {
            output.show(&trim(&client, topic, to, partitions, *yes).await?)
        }
        TopicSubcommand::Fence { topic, partition, token, expect } => {
            let expected = expect.as_deref();
            let fenced = client.admin().set_fencing_token(topic, *partition, expected, token).await;
            let watermarks = fenced.with_context(|| format!("fence {topic}/{partition}"))?.into();
            output.show(&FencedPartition {
                partition: *partition,
                fencing_token: token.clone(),
                watermarks,
            })
        }
        TopicSubcommand::Delete { topic, yes } => {
            delete(&client, topic, *yes).await?;
            if !global.quiet {
                message!("deleted {topic}");
            }
            Ok(())
        }
    }
}

async fn create(client: &Client, args: &TopicCreateArgs) -> anyhow::Result<TopicRow> {
    let topic = NewTopic {
        replication_factor: args.replication_factor,
        config: config(&args.settings)?.0,
        validate_only: args.dry_run,
        ..NewTopic::new(&args.topic, args.partitions)
    };
    let created = client.admin().create_topic(&topic).await;
    Ok(created.with_context(|| format!("create {}", args.topic))?.into())
}

async fn alter(
    client: &Client,
    topic: &str,
    settings: &TopicSettings,
) -> anyhow::Result<TopicDescription> {
    let (config, fields) = config(settings)?;
    if fields.is_empty() {
        let failure = CliError::new(Exit::Usage, "no setting is given");
        return Err(failure.hint("helix topic alter --help").into());
    }
    let changed = client.admin().update_topic(topic, &config, &fields).await;
    Ok(changed.with_context(|| format!("alter {topic}"))?.into())
}

/// Returns the given settings and their names. Settings to reset are named but unset.
///
/// # Errors
/// A duration does not fit the wire: unset, it would be the default.
fn config(settings: &TopicSettings) -> anyhow::Result<(proto::TopicConfig, Vec<&'static str>)> {
    fn value<T>(setting: Option<SettingChange<T>>) -> Option<T> {
        match setting {
            Some(SettingChange::Value(value)) => Some(value),
            Some(SettingChange::Default) | None => None,
        }
    }
    let duration = |flag: &str, time: Option<Duration>| {
        let wire = time.map(prost_types::Duration::try_from).transpose();
        wire.map_err(|_| {
            let failure = CliError::new(Exit::Usage, format!("{flag} is too long"));
            failure.hint("use 0 for no limit, or a duration of up to 213503982 days")
        })
    };
    let config = proto::TopicConfig {
        retention_time: duration("--retention-time", value(settings.retention_time))?,
        retention_bytes: value(settings.retention_bytes),
        max_batch_bytes: value(settings.max_batch_bytes),
        max_record_bytes: value(settings.max_record_bytes),
        min_durability: value(settings.min_durability).map_or(0, Into::into),
        default_durability: value(settings.default_durability).map_or(0, Into::into),
        allowed_compression: value(settings.compression).map_or(0, Into::into),
        validate_records: value(settings.validate_records),
        cleanup: value(settings.cleanup).map_or(0, Into::into),
        tombstone_retention_time: duration(
            "--tombstone-retention-time",
            value(settings.tombstone_retention_time),
        )?,
        batch_format: value(settings.batch_format).map_or(0, Into::into),
    };
    let given = [
        ("retention_time", settings.retention_time.is_some()),
        ("retention_bytes", settings.retention_bytes.is_some()),
        ("max_batch_bytes", settings.max_batch_bytes.is_some()),
        ("max_record_bytes", settings.max_record_bytes.is_some()),
        ("min_durability", settings.min_durability.is_some()),
        ("default_durability", settings.default_durability.is_some()),
        ("allowed_compression", settings.compression.is_some()),
        ("validate_records", settings.validate_records.is_some()),
        ("cleanup", settings.cleanup.is_some()),
        ("tombstone_retention_time", settings.tombstone_retention_time.is_some()),
        ("batch_format", settings.batch_format.is_some()),
    ];
    let fields = given.into_iter().filter_map(|(field, is_given)| is_given.then_some(field));
    Ok((config, fields.collect()))
}

async fn trim(
    client: &Client,
    topic: &str,
    to: &PositionArg,
    partitions: &[u32],
    yes: bool,
) -> anyhow::Result<Vec<TrimmedPartition>> {
    let name = topic;
    let topic = offset_lookup::topic(client, name).await?;
    let bounds =
        offset_lookup::partition_bounds(client, topic, partitions, ReadSource::Leader).await?;
    // Before anything is deleted.
    let offsets = offset_lookup::existing_offsets(client, topic, &bounds, to).await;
    let offsets = offsets.with_context(|| format!("trim {name}"))?;
    let dropped = |(bounds, offset): (&PartitionBounds, &u64)| {
        offset.saturating_sub(bounds.watermarks.log_start_offset)
    };
    let dropped: u64 = bounds.iter().zip(&offsets).map(dropped).sum();
    if dropped > 0 && !yes {
        confirm(
            "topic",
            name,
            &format!("this deletes {} of {name}", units::counted(dropped, "record")),
        )
        .await?;
    }
    let trims = bounds.iter().zip(offsets).map(|(bounds, offset)| async move {
        let PartitionBounds { partition, watermarks } = *bounds;
        let watermarks = match offset > watermarks.log_start_offset {
            true => client.admin().trim(topic, partition, offset).await,
            false => Ok(watermarks),
        };
        let watermarks = watermarks.with_context(|| format!("trim {name}/{partition}"))?.into();
        anyhow::Ok(TrimmedPartition { partition, watermarks })
    });
    stream::iter(trims).buffered(TRIMS_MAX).try_collect().await
}

async fn delete(client: &Client, topic: &str, yes: bool) -> anyhow::Result<()> {
    let found = client.admin().topic(topic).await.with_context(|| format!("delete {topic}"))?;
    // Deletes the topic whose records are counted, not a topic that is created meanwhile.
    let counted = TopicRef::with_id(topic, found.topic_id);
    if !yes {
        let records = match TopicRow::from(found).record_count {
            // The called node may lag; only the leaders are sure of it.
            Some(0) => leaders_count(client, counted).await,
            records => records,
        };
        let what = match records {
            Some(0) => None,
            Some(records) => Some(units::counted(records, "record")),
            None => {
                Some("all of its records; a part is not served now, and not counted".to_owned())
            }
        };
        if let Some(what) = what {
            confirm("topic", topic, &format!("this deletes {topic} with {what}")).await?;
        }
    }
    client.admin().delete_topic(counted).await.with_context(|| format!("delete {topic}"))
}

/// Counts the records of a topic at the leaders of its partitions; None if one does not answer.
async fn leaders_count(client: &Client, topic: TopicRef<'_>) -> Option<u64> {
    let bounds = offset_lookup::partition_bounds(client, topic, &[], ReadSource::Leader);
    let bounds = timeout(COUNT_MAX, bounds).await.ok()?.ok()?;
    let count = |it: &PartitionBounds| {
        it.watermarks.high_watermark.saturating_sub(it.watermarks.log_start_offset)
    };
    Some(bounds.iter().map(count).sum())
}

/// Summary of a topic.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct TopicRow {
    name: String,
    partition_count: usize,
    replication_factor: u32,
    /// Records between start and end offset; compaction by key may have removed some. Null while
    /// the called node does not serve a partition of the topic.
    record_count: Option<u64>,
    /// Null while the called node does not serve a partition of the topic.
    live_bytes: Option<u64>,
    retention_time: Option<ApiDuration>,
    retention_bytes: Option<u64>,
    #[schemars(extend("x-wide" = true))]
    min_durability: &'static str,
    #[schemars(extend("x-wide" = true))]
    default_durability: &'static str,
    #[schemars(extend("x-wide" = true))]
    allowed_compression: &'static str,
    #[schemars(extend("x-wide" = true))]
    cleanup: &'static str,
}

/// Returns the records between start and end offset; None if the called node does not know them.
pub(crate) fn record_count(partition: &proto::PartitionInfo) -> Option<u64> {
    let proto::Watermarks { log_start_offset, high_watermark } = partition.watermarks?;
    Some(high_watermark.saturating_sub(log_start_offset))
}

impl From<proto::Topic> for TopicRow {
    fn from(topic: proto::Topic) -> Self {
        let config = Config::from(topic.config.unwrap_or_default());
        Self {
            name: topic.name,
            partition_count: topic.partitions.len(),
            replication_factor: topic.replication_factor,
            record_count: topic.partitions.iter().map(record_count).sum(),
            live_bytes: topic.partitions.iter().map(|partition| partition.live_bytes).sum(),
            retention_time: config.retention_time,
            retention_bytes: config.retention_bytes,
            min_durability: config.min_durability,
            default_durability: config.default_durability,
            allowed_compression: config.allowed_compression,
            cleanup: config.cleanup,
        }
    }
}

/// Settings and partitions of a topic.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct TopicDescription {
    name: String,
    /// A topic that was deleted and created again has another id.
    topic_id: u64,
    replication_factor: u32,
    config: Config,
    /// Compression of the newest batches of up to eight partitions; absent after a change of
    /// settings, and if the caller may not read the topic.
    #[serde(skip_serializing_if = "Option::is_none")]
    compression: Option<TopicCompression>,
    partitions: Vec<Partition>,
    /// Groups that have committed offsets; absent after a change of settings.
    #[serde(skip_serializing_if = "Option::is_none")]
    groups: Option<Vec<TopicGroupRow>>,
}

/// Settings of a topic; None means unlimited.
#[derive(Debug, Serialize, JsonSchema)]
struct Config {
    retention_time: Option<ApiDuration>,
    retention_bytes: Option<u64>,
    max_batch_bytes: Option<u32>,
    max_record_bytes: Option<u32>,
    min_durability: &'static str,
    default_durability: &'static str,
    /// Compressions that appends may use.
    allowed_compression: &'static str,
    /// False if batches may have any content. None from nodes of earlier versions.
    validate_records: Option<bool>,
    /// Cleanup of old records: delete, compact or compact+delete.
    cleanup: &'static str,
    /// Time that readers have to see deletions; None if the topic is not compacted.
    tombstone_retention_time: Option<ApiDuration>,
    /// Batches that appends may send: helix, kafka or any.
    batch_format: &'static str,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Partition {
    partition: u32,
    shard_id: u32,
    leader: Option<Leader>,
    replicas: Vec<u64>,
    /// Null, as both sizes, while the called node does not serve the partition.
    watermarks: Option<Watermarks>,
    live_bytes: Option<u64>,
    #[schemars(extend("x-wide" = true))]
    held_bytes: Option<u64>,
    /// None if no token is set.
    fencing_token: Option<String>,
    /// Offset up to which it is compacted by key; None if it never was.
    #[schemars(extend("x-wide" = true))]
    clean_offset: Option<u64>,
    /// The node cannot compact it by key now; `helix cluster health` says why.
    #[schemars(extend("x-wide" = true))]
    is_uncleanable: bool,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Leader {
    node_id: u64,
    #[schemars(extend("x-wide" = true))]
    endpoint: String,
    #[schemars(extend("x-wide" = true))]
    term: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Watermarks {
    log_start_offset: u64,
    high_watermark: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct TrimmedPartition {
    partition: u32,
    watermarks: Watermarks,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct FencedPartition {
    partition: u32,
    fencing_token: String,
    watermarks: Watermarks,
}

impl From<proto::Topic> for TopicDescription {
    fn from(topic: proto::Topic) -> Self {
        Self {
            name: topic.name,
            topic_id: topic.topic_id,
            replication_factor: topic.replication_factor,
            config: topic.config.unwrap_or_default().into(),
            partitions: topic.partitions.into_iter().map(Partition::from).collect(),
            compression: None,
            groups: None,
        }
    }
}

impl From<proto::TopicConfig> for Config {
    fn from(config: proto::TopicConfig) -> Self {
        let retention_time = config.retention_time.and_then(ApiDuration::new);
        let tombstones = config.tombstone_retention_time.and_then(ApiDuration::new);
        Self {
            retention_time: retention_time.filter(|time| !time.is_zero()),
            retention_bytes: config.retention_bytes.filter(|bytes| *bytes > 0),
            max_batch_bytes: config.max_batch_bytes,
            max_record_bytes: config.max_record_bytes,
            min_durability: durability_name(config.min_durability()),
            default_durability: durability_name(config.default_durability()),
            allowed_compression: allowed_name(config.allowed_compression()),
            validate_records: config.validate_records,
            cleanup: cleanup_name(config.cleanup()),
            tombstone_retention_time: tombstones
                .filter(|_| cleanup_name(config.cleanup()) != "delete"),
            batch_format: format_name(config.batch_format()),
        }
    }
}

impl From<proto::PartitionInfo> for Partition {
    fn from(partition: proto::PartitionInfo) -> Self {
        let leader = partition.leader.filter(|leader| leader.node_id != 0);
        Self {
            partition: partition.partition,
            shard_id: partition.shard_id,
            leader: leader.map(|proto::LeaderHint { node_id, endpoint, term }| Leader {
                node_id,
                endpoint,
                term,
            }),
            replicas: partition.replicas,
            watermarks: partition.watermarks.map(Watermarks::from),
            live_bytes: partition.live_bytes,
            held_bytes: partition.held_bytes,
            fencing_token: partition.fencing_token,
            clean_offset: partition.clean_offset,
            is_uncleanable: partition.is_uncleanable,
        }
    }
}

impl From<proto::Watermarks> for Watermarks {
    fn from(watermarks: proto::Watermarks) -> Self {
        let proto::Watermarks { log_start_offset, high_watermark } = watermarks;
        Self { log_start_offset, high_watermark }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNCHANGED: TopicSettings = TopicSettings {
        batch_format: None,
        retention_time: None,
        retention_bytes: None,
        max_batch_bytes: None,
        max_record_bytes: None,
        min_durability: None,
        default_durability: None,
        cleanup: None,
        tombstone_retention_time: None,
        compression: None,
        validate_records: None,
    };

    #[test]
    fn names_only_given_settings() {
        assert_eq!(config(&UNCHANGED).unwrap(), (proto::TopicConfig::default(), Vec::new()));
        let settings = TopicSettings {
            retention_time: Some(SettingChange::Value(Duration::from_secs(60))),
            retention_bytes: Some(SettingChange::Default),
            min_durability: Some(SettingChange::Value(proto::Durability::QuorumSynced)),
            ..UNCHANGED
        };
        let (config, fields) = config(&settings).unwrap();
        assert_eq!(fields, ["retention_time", "retention_bytes", "min_durability"]);
        assert_eq!(config.retention_time.unwrap().seconds, 60);
        assert_eq!(config.retention_bytes, None);
        assert_eq!(config.min_durability(), proto::Durability::QuorumSynced);
        assert_eq!(config.default_durability(), proto::Durability::Unspecified);
    }

    #[test]
    fn a_duration_that_the_wire_cannot_have_is_refused() {
        for time in [Duration::MAX, Duration::from_secs(1 << 63)] {
            let time = Some(SettingChange::Value(time));
            for settings in [
                TopicSettings { retention_time: time, ..UNCHANGED },
                TopicSettings { tombstone_retention_time: time, ..UNCHANGED },
            ] {
                let error = config(&settings).unwrap_err();
                assert_eq!(crate::exit::of(&error), Exit::Usage, "{error}");
            }
        }
    }

    #[test]
    fn unlimited_settings_are_null() {
        let zero = proto::TopicConfig {
            retention_time: Some(prost_types::Duration::default()),
            retention_bytes: Some(0),
            ..proto::TopicConfig::default()
        };
        let config = Config::from(zero);
        assert_eq!((config.retention_time, config.retention_bytes), (None, None));
    }
}
