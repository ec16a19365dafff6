//! Compression of a topic, measured on its newest batches.

use std::time::Duration;

use helix_client::proto::kafka::{KAFKA_BATCH_VERSION, KafkaBatch, KafkaCodec};
use helix_client::proto::log::v1 as proto;
use helix_client::{Client, FetchOptions, Position, ReadStart};
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::timeout;

use crate::compression::ratio;

/// Partitions whose newest records are read, evenly spread over the topic.
const PARTITIONS_MAX: usize = 8;

/// Records to read of each partition, rounded up to a batch, and bytes to read of each node.
const RECORDS_MAX: u64 = 1000;
const BYTES_MAX: u64 = 1 << 20;

/// Time to read them. A shard without a leader must not hold back the description of the topic.
const TIME_MAX: Duration = Duration::from_secs(3);

/// Compression of the newest batches.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct TopicCompression {
    /// Batches that were read.
    sampled_batches: u64,
    compressed_batches: u64,
    stored_bytes: u64,
    uncompressed_bytes: u64,
    /// Uncompressed bytes for each stored byte.
    ratio: Option<f64>,
}

/// Reads the newest batches of some partitions. Returns `None` if the caller may not read them, for
/// example because it may only describe the topic.
///
/// # Errors
/// The reason why they could not be read, for now.
pub(crate) async fn of_topic(
    client: &Client,
    topic: &proto::Topic,
) -> Result<Option<TopicCompression>, String> {
    let starts: Vec<ReadStart> = evenly(&topic.partitions)
        .filter_map(|partition| {
            let marks = partition.watermarks?;
            let newest = marks.high_watermark.saturating_sub(RECORDS_MAX);
            let offset = newest.max(marks.log_start_offset);
            let start = ReadStart::new(&topic.name, partition.partition, Position::Offset(offset));
            (offset < marks.high_watermark).then(|| start.in_topic(topic.topic_id))
        })
        .collect();
    let mut compression = TopicCompression {
        sampled_batches: 0,
        compressed_batches: 0,
        stored_bytes: 0,
        uncompressed_bytes: 0,
        ratio: None,
    };
    if starts.is_empty() {
        return Ok(Some(compression));
    }
    let options = FetchOptions { bytes_max: Some(BYTES_MAX), ..FetchOptions::default() };
    let fetched = match timeout(TIME_MAX, client.consumer().fetch_encoded(&starts, &options)).await
    {
        Ok(Ok(fetched)) => fetched,
        Ok(Err(error)) if error.retryable => return Err(error.message.clone()),
        Ok(Err(_)) => return Ok(None),
        Err(_) => return Err("its newest batches could not be read in time".to_owned()),
    };
    let batches = fetched.iter().flat_map(|read| &read.batches);
    for batch in batches.filter_map(|stored| stored.batch.as_ref()) {
        let stored = batch.payload.len() as u64;
        let is_compressed = match batch.version {
            KAFKA_BATCH_VERSION => KafkaBatch::parse_unverified(&batch.payload)
                .is_ok_and(|kafka| kafka.codec() != KafkaCodec::None),
            _ => batch.compression > proto::Compression::None.into(),
        };
        compression.sampled_batches += 1;
        compression.compressed_batches += u64::from(is_compressed);
        compression.stored_bytes += stored;
        compression.uncompressed_bytes +=
            if is_compressed { batch.uncompressed_bytes.into() } else { stored };
    }
    compression.ratio = ratio(compression.uncompressed_bytes, compression.stored_bytes);
    Ok(Some(compression))
}

/// Returns up to [`PARTITIONS_MAX`] elements, evenly spread.
fn evenly<T>(all: &[T]) -> impl Iterator<Item = &T> {
    all.iter().step_by(all.len().div_ceil(PARTITIONS_MAX).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_spread_over_all_partitions() {
        let partitions = |count: usize| evenly(&(0..count).collect::<Vec<_>>()).copied().collect();
        let (none, few, many): (Vec<usize>, Vec<usize>, Vec<usize>) =
            (partitions(0), partitions(3), partitions(100));
        assert_eq!((none.len(), few, many.len()), (0, vec![0, 1, 2], 8));
        assert_eq!(many[7], 91);
    }
}
