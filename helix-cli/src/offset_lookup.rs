//! Resolves positions to offsets in each partition of a topic.
//! `consume`, `tail`, `offsets`, `topic trim` and backups use it.

mod newest_records;

use std::collections::BTreeMap;

use anyhow::Context;
use helix_client::proto::log::v1::{ErrorDetail, ErrorReason, ResolvedOffset, Watermarks};
use helix_client::{
    Batches, Client, Error as ClientError, FetchOptions, Position as ClientPosition, ReadOptions,
    ReadSource, ReadStart, TopicRef,
};
use helix_proto::error as wire;

use crate::clock;
use crate::position::PositionArg;

/// A partition and its watermarks at the time of the request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PartitionBounds {
    pub(crate) partition: u32,
    pub(crate) watermarks: Watermarks,
}

/// Returns a topic with its id, for reads that must not continue in a later topic of the name.
pub(crate) async fn topic<'a>(client: &Client, name: &'a str) -> anyhow::Result<TopicRef<'a>> {
    let found = client.admin().topic(name).await.with_context(|| format!("look up {name}"))?;
    Ok(TopicRef::with_id(name, found.topic_id))
}

/// Returns the bounds of the given partitions of a topic, or of all if none is given. The leader's
/// watermarks are current; those of any replica may lag.
pub(crate) async fn partition_bounds(
    client: &Client,
    topic: TopicRef<'_>,
    partitions: &[u32],
    source: ReadSource,
) -> anyhow::Result<Vec<PartitionBounds>> {
    let resolved = resolve(client, topic, partitions, &ClientPosition::Latest, source).await?;
    let bounds = |resolved: ResolvedOffset| PartitionBounds {
        partition: resolved.partition,
        watermarks: resolved.watermarks.unwrap_or_default(),
    };
    Ok(resolved.into_iter().map(bounds).collect())
}

async fn resolve(
    client: &Client,
    topic: TopicRef<'_>,
    partitions: &[u32],
    position: &ClientPosition,
    source: ReadSource,
) -> anyhow::Result<Vec<ResolvedOffset>> {
    let resolved = match source {
        ReadSource::Leader => client.admin().resolve_offsets(topic, partitions, position).await,
        ReadSource::AnyReplica => resolve_by_read(client, topic, partitions, position).await,
    };
    resolved.with_context(|| format!("look up the offsets of {}", topic.name))
}

/// Resolves a position with a read of any replica, because only leaders resolve offsets.
async fn resolve_by_read(
    client: &Client,
    topic: TopicRef<'_>,
    partitions: &[u32],
    position: &ClientPosition,
) -> helix_client::Result<Vec<ResolvedOffset>> {
    let partitions = match partitions {
        [] => (0..client.partition_count(topic.name).await?).collect(),
        named => named.to_vec(),
    };
    let start =
        |partition: u32| ReadStart::new(topic.name, partition, position.clone()).in_topic(topic.id);
    let starts: Vec<_> = partitions.into_iter().map(start).collect();
    let read = ReadOptions { clamp: true, source: ReadSource::AnyReplica, ..Default::default() };
    let options = FetchOptions { bytes_max: Some(1), read, ..Default::default() };
    let fetched = client.consumer().fetch_encoded(&starts, &options).await?;
    let resolved = |batches: Batches| ResolvedOffset {
        partition: batches.partition,
        offset: batches.start_offset,
        watermarks: Some(batches.watermarks),
    };
    Ok(fetched.into_iter().map(resolved).collect())
}

/// Resolves a position as [`offsets`] does, for commands that delete records or move offsets: an
/// offset beyond the end is not moved to the end, which would delete or skip everything.
///
/// # Errors
/// `OFFSET_OUT_OF_RANGE`, with the first partition that ends before the position.
pub(crate) async fn existing_offsets(
    client: &Client,
    topic: TopicRef<'_>,
    bounds: &[PartitionBounds],
    position: &PositionArg,
) -> anyhow::Result<Vec<u64>> {
    for PartitionBounds { partition, watermarks } in bounds {
        if let Some(requested) = beyond_end(position, watermarks) {
            let error = out_of_range(requested, *watermarks);
            return Err(error).with_context(|| format!("{}/{partition}", topic.name));
        }
    }
    offsets(client, topic, bounds, position, ReadSource::Leader).await
}

/// Returns the offset that a position names if it is beyond the end.
fn beyond_end(position: &PositionArg, watermarks: &Watermarks) -> Option<u64> {
    let requested = match position {
        PositionArg::Offset(offset) => *offset,
        PositionArg::AfterStart(records) => watermarks.log_start_offset.saturating_add(*records),
        PositionArg::Earliest
        | PositionArg::Latest
        | PositionArg::BeforeEnd(_)
        | PositionArg::At(_)
        | PositionArg::Ago(_) => return None,
    };
    (requested > watermarks.high_watermark).then_some(requested)
}

/// Returns the error of the service for an offset that cannot be read.
fn out_of_range(requested: u64, watermarks: Watermarks) -> ClientError {
    let Watermarks { log_start_offset, high_watermark } = watermarks;
    let message =
        format!("offset {requested} is out of range {log_start_offset}..{high_watermark}");
    let detail = wire::detail(ErrorReason::OffsetOutOfRange);
    let detail = ErrorDetail { watermarks: Some(watermarks), ..detail };
    ClientError::from(wire::to_status(&detail, &message, None))
}

/// Resolves a position in each partition to an offset within its bounds.
pub(crate) async fn offsets(
    client: &Client,
    topic: TopicRef<'_>,
    bounds: &[PartitionBounds],
    position: &PositionArg,
    source: ReadSource,
) -> anyhow::Result<Vec<u64>> {
    let local = |bounds: &PartitionBounds| {
        let Watermarks { log_start_offset, high_watermark } = bounds.watermarks;
        match position {
            PositionArg::Earliest => Some(log_start_offset),
            PositionArg::Latest => Some(high_watermark),
            PositionArg::Offset(offset) => Some((*offset).clamp(log_start_offset, high_watermark)),
            PositionArg::AfterStart(records) => {
                Some(log_start_offset.saturating_add(*records).min(high_watermark))
            }
            PositionArg::BeforeEnd(records) => {
                Some(high_watermark.saturating_sub(*records).max(log_start_offset))
            }
            PositionArg::At(_) | PositionArg::Ago(_) => None,
        }
    };
    if let PositionArg::BeforeEnd(records) = position
        && newest_records::may_have_gaps(client, topic).await?
    {
        return newest_records::starts(client, topic, bounds, *records, source).await;
    }
    let now = clock::now();
    let Some(time) = position.time(now) else {
        // All other positions follow from the watermarks.
        return Ok(bounds.iter().filter_map(local).collect());
    };
    let partitions: Vec<_> = bounds.iter().map(|bounds| bounds.partition).collect();
    let position = ClientPosition::Timestamp(time);
    let resolved = resolve(client, topic, &partitions, &position, source).await?;
    let found: BTreeMap<u32, u64> =
        resolved.iter().map(|resolved| (resolved.partition, resolved.offset)).collect();
    let offset = |bounds: &PartitionBounds| {
        // Ignores records appended after the bounds were read.
        let end = bounds.watermarks.high_watermark;
        found.get(&bounds.partition).map_or(end, |offset| end.min(*offset))
    };
    Ok(bounds.iter().map(offset).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_positions_beyond_the_end_do_not_exist() {
        let watermarks = Watermarks { log_start_offset: 100, high_watermark: 1000 };
        for (position, beyond) in [
            ("1000", None),
            ("1001", Some(1001)),
            ("10000", Some(10000)),
            ("18446744073709551615", Some(u64::MAX)),
            ("5", None),
            ("+900", None),
            ("+901", Some(1001)),
            ("+18446744073709551615", Some(u64::MAX)),
            ("-5000", None),
            ("latest", None),
            ("earliest", None),
            ("@2999-01-01", None),
        ] {
            let position: PositionArg = position.parse().unwrap();
            assert_eq!(beyond_end(&position, &watermarks), beyond, "{position}");
        }
        let error = out_of_range(1001, watermarks);
        assert!(error.is(ErrorReason::OffsetOutOfRange), "{error}");
        assert_eq!(error.watermarks, Some(watermarks));
    }
}
