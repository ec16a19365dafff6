//! Which offsets a read covers: positions resolved to one span for each partition.
//! Asks the cluster; `consume`, `tail`, `offsets` and `trim` build on it.

use anyhow::Context;
use helix_client::proto::log::v1::{ResolvedOffset, Watermarks};
use helix_client::{Client, Position as ClientPosition};

use crate::clock;
use crate::position::Position;

/// A partition, as it was when it was asked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) partition: u32,
    pub(crate) watermarks: Watermarks,
}

/// Extents of some partitions of a topic; none named: of all.
pub(crate) async fn extents(
    client: &Client,
    topic: &str,
    partitions: &[u32],
) -> anyhow::Result<Vec<Extent>> {
    let admin = client.admin();
    let resolved = admin.resolve_offsets(topic, partitions, &ClientPosition::Latest).await;
    let resolved = resolved.with_context(|| format!("look up the offsets of {topic}"))?;
    let extent = |resolved: ResolvedOffset| Extent {
        partition: resolved.partition,
        watermarks: resolved.watermarks.unwrap_or_default(),
    };
    Ok(resolved.into_iter().map(extent).collect())
}

/// Offset of a position in each of the extents, between their ends.
pub(crate) async fn offsets(
    client: &Client,
    topic: &str,
    extents: &[Extent],
    position: &Position,
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
    let resolved = client.admin().resolve_offsets(topic, &partitions, &position).await;
    let resolved = resolved.with_context(|| format!("look up the offsets of {topic}"))?;
    let offset = |extent: &Extent| {
        let found = resolved.iter().find(|resolved| resolved.partition == extent.partition);
        // What has come since the extents were taken does not count.
        let end = extent.watermarks.high_watermark;
        found.map_or(end, |resolved| resolved.offset.min(end))
    };
    Ok(extents.iter().map(offset).collect())
}
