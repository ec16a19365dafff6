//! Which offsets a read covers: positions resolved to one span for each partition.
//! Asks the cluster; `consume`, `tail`, `offsets` and `trim` build on it.

use anyhow::Context;
use helix_client::proto::log::v1::{ResolvedOffset, Watermarks};
use helix_client::{
    Batches, Client, FetchOptions, Position as ClientPosition, ReadOptions, ReadSource, Start,
};

use crate::clock;
use crate::position::Position;

/// A partition, as it was when it was asked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) partition: u32,
    pub(crate) watermarks: Watermarks,
}

/// Extents of some partitions of a topic; none named: of all. As their leaders know them, or as
/// any replica does, which may lag.
pub(crate) async fn extents(
    client: &Client,
    topic: &str,
    partitions: &[u32],
    source: ReadSource,
) -> anyhow::Result<Vec<Extent>> {
    let resolved = resolve(client, topic, partitions, &ClientPosition::Latest, source).await?;
    let extent = |resolved: ResolvedOffset| Extent {
        partition: resolved.partition,
        watermarks: resolved.watermarks.unwrap_or_default(),
    };
    Ok(resolved.into_iter().map(extent).collect())
}

async fn resolve(
    client: &Client,
    topic: &str,
    partitions: &[u32],
    position: &ClientPosition,
    source: ReadSource,
) -> anyhow::Result<Vec<ResolvedOffset>> {
    let resolved = match source {
        ReadSource::Leader => client.admin().resolve_offsets(topic, partitions, position).await,
        ReadSource::AnyReplica => begin(client, topic, partitions, position).await,
    };
    resolved.with_context(|| format!("look up the offsets of {topic}"))
}

/// Where a read of any replica begins: a leader alone resolves offsets.
async fn begin(
    client: &Client,
    topic: &str,
    partitions: &[u32],
    position: &ClientPosition,
) -> helix_client::Result<Vec<ResolvedOffset>> {
    let partitions = match partitions {
        [] => (0..client.partition_count(topic).await?).collect(),
        named => named.to_vec(),
    };
    let start = |partition: u32| Start::new(topic, partition, position.clone());
    let starts: Vec<_> = partitions.into_iter().map(start).collect();
    let read = ReadOptions { clamp: true, source: ReadSource::AnyReplica, ..Default::default() };
    let options = FetchOptions { bytes_max: Some(1), read, ..Default::default() };
    let begun = client.consumer().fetch_encoded(&starts, &options).await?;
    let resolved = |begun: Batches| ResolvedOffset {
        partition: begun.partition,
        offset: begun.start_offset,
        watermarks: Some(begun.watermarks),
    };
    Ok(begun.into_iter().map(resolved).collect())
}

/// Offset of a position in each of the extents, between their ends.
pub(crate) async fn offsets(
    client: &Client,
    topic: &str,
    extents: &[Extent],
    position: &Position,
    source: ReadSource,
) -> anyhow::Result<Vec<u64>> {
    let known = |extent: &Extent| {
        let Watermarks { log_start_offset, high_watermark } = extent.watermarks;
        match position {
            Position::Earliest => Some(log_start_offset),
            Position::Latest => Some(high_watermark),
            Position::Offset(offset) => Some((*offset).clamp(log_start_offset, high_watermark)),
            Position::AfterStart(records) => {
                Some(log_start_offset.saturating_add(*records).min(high_watermark))
            }
            Position::BeforeEnd(records) => {
                Some(high_watermark.saturating_sub(*records).max(log_start_offset))
            }
            Position::At(_) | Position::Ago(_) => None,
        }
    };
    let now = clock::now();
    let Some(time) = position.time(now) else {
        // Every other kind lies between the two ends that are known.
        return Ok(extents.iter().filter_map(known).collect());
    };
    let partitions: Vec<_> = extents.iter().map(|extent| extent.partition).collect();
    let position = ClientPosition::Timestamp(time);
    let resolved = resolve(client, topic, &partitions, &position, source).await?;
    let offset = |extent: &Extent| {
        let found = resolved.iter().find(|resolved| resolved.partition == extent.partition);
        // What has come since the extents were taken does not count.
        let end = extent.watermarks.high_watermark;
        found.map_or(end, |resolved| resolved.offset.min(end))
    };
    Ok(extents.iter().map(offset).collect())
}
