//! Offsets of the newest records of partitions with gaps, which compaction by key leaves.
//! Reads back from the end, in steps, until enough records are found.

use futures_util::{StreamExt, TryStreamExt, stream};
use helix_client::proto::log::v1::{CleanupPolicy, Watermarks};
use helix_client::{Client, FetchOptions, Position, ReadOptions, ReadSource, ReadStart, TopicRef};

use super::PartitionBounds;

/// Offsets in one step, at least. Doubles while steps find no record.
const STEP_MIN: u64 = 1000;

/// Payload requested by one fetch.
const FETCH_BYTES: u64 = 1 << 20;

/// Partitions that are read at the same time.
const READS_MAX: usize = 16;

/// Returns whether offsets between the records of a topic may be empty.
pub(super) async fn may_have_gaps(client: &Client, topic: TopicRef<'_>) -> anyhow::Result<bool> {
    let found = client.admin().topic(topic.name).await?;
    let cleanup = found.config.unwrap_or_default().cleanup();
    let is_compacted = !matches!(cleanup, CleanupPolicy::Unspecified | CleanupPolicy::Delete);
    // Gaps stay after a change of the setting.
    let was_cleaned = found.partitions.iter().any(|it| it.clean_offset.is_some_and(|at| at > 0));
    Ok(is_compacted || was_cleaned)
}

/// Returns the offset of the first of the newest `count` records of each partition.
pub(super) async fn starts(
    client: &Client,
    topic: TopicRef<'_>,
    bounds: &[PartitionBounds],
    count: u64,
    source: ReadSource,
) -> anyhow::Result<Vec<u64>> {
    let start = |bounds: &PartitionBounds| start(client, topic, *bounds, count, source);
    stream::iter(bounds).map(start).buffered(READS_MAX).try_collect().await
}

async fn start(
    client: &Client,
    topic: TopicRef<'_>,
    bounds: PartitionBounds,
    count: u64,
    source: ReadSource,
) -> anyhow::Result<u64> {
    let Watermarks { log_start_offset, high_watermark } = bounds.watermarks;
    let (mut wanted, mut end, mut step) = (count, high_watermark, count.max(STEP_MIN));
    while wanted > 0 && end > log_start_offset {
        let begin = end.saturating_sub(step).max(log_start_offset);
        let found = offsets_in(client, topic, bounds.partition, (begin, end), source).await?;
        if let Some(first) = nth_last(&found, wanted) {
            return Ok(first);
        }
        wanted -= found.len() as u64;
        step = if found.is_empty() { step.saturating_mul(2) } else { wanted.max(STEP_MIN) };
        end = begin;
    }
    Ok(if count == 0 { high_watermark } else { log_start_offset })
}

/// Returns the element with which the last `count` begin, if there are as many.
fn nth_last(sorted: &[u64], count: u64) -> Option<u64> {
    let count = usize::try_from(count).ok()?;
    sorted.len().checked_sub(count).and_then(|index| sorted.get(index)).copied()
}

/// Returns the offsets of the records in a range of a partition.
async fn offsets_in(
    client: &Client,
    topic: TopicRef<'_>,
    partition: u32,
    (begin, end): (u64, u64),
    source: ReadSource,
) -> anyhow::Result<Vec<u64>> {
    let lag_max = Some(client.config().request_timeout);
    let read = ReadOptions { clamp: true, source, lag_max, ..ReadOptions::default() };
    let options = FetchOptions { bytes_max: Some(FETCH_BYTES), read, ..FetchOptions::default() };
    let (mut found, mut next) = (Vec::new(), begin);
    while next < end {
        let start = ReadStart::new(topic.name, partition, Position::Offset(next)).until(end);
        let start = start.in_topic(topic.id);
        let fetched = client.consumer().fetch_encoded(&[start], &options).await?;
        let Some(fetched) = fetched.into_iter().next() else { break };
        for stored in &fetched.batches {
            let records = stored.batch.as_ref().map_or(0, |batch| batch.record_count);
            let deltas = match stored.offset_deltas.as_slice() {
                [] => (0..records).collect(),
                deltas => deltas.to_vec(),
            };
            let offsets =
                deltas.into_iter().map(|it| stored.first_offset.saturating_add(it.into()));
            found.extend(offsets.filter(|offset| (next..end).contains(offset)));
        }
        if fetched.next_offset <= next {
            // A replica that lags.
            break;
        }
        next = fetched.next_offset;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_records_begin_with_the_nth_last() {
        assert_eq!(nth_last(&[3, 7, 9], 1), Some(9));
        assert_eq!(nth_last(&[3, 7, 9], 3), Some(3));
        assert_eq!(nth_last(&[3, 7, 9], 4), None);
        assert_eq!(nth_last(&[], 1), None);
        assert_eq!(nth_last(&[3], u64::MAX), None);
    }
}
