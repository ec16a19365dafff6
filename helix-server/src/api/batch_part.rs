//! Forms of a stored batch in a response: the part that a plain read takes, or the whole batch.

use std::ops::Range;

use bytes::Bytes;
use helix_proto::batch;
use helix_proto::kafka::KAFKA_BATCH_VERSION;
use helix_proto::log::v1::{EncodedBatch, StoredBatch};

use super::reader::STORED_RECORD_EXTRA_BYTES;
use super::time;
use crate::shard::ReadBatch;

/// Records of a batch that a read may take.
pub(super) struct BatchPart {
    /// Number of its first record in the stored batch.
    pub(super) first_number: u32,
    pub(super) payload: Bytes,
    /// True if later records of the batch are left out.
    pub(super) is_truncated: bool,
}

impl BatchPart {
    /// Returns the records of `stored` with these offsets: at most `records_max`, and the first one
    /// with those after it that fit into `capacity` bytes.
    ///
    /// Decoded records are slices of their payload and keep all of it in memory. Unless the read
    /// takes the whole batch, its part is therefore copied.
    pub(super) fn of(
        stored: &ReadBatch,
        offsets: Range<u64>,
        records_max: u64,
        capacity: u64,
    ) -> Self {
        let payload = &stored.payload;
        let whole = Self { first_number: 0, payload: payload.clone(), is_truncated: false };
        let (mut first_number, mut start, mut end) = (0, 0, 0);
        let (mut count, mut bytes) = (0, 0);
        for (number, range) in (0..).zip(batch::walk(payload, usize::MAX)) {
            let offset = stored.offset_of(number);
            // The caller finds the invalid record again, at its position in the batch.
            let Ok(range) = range else { return whole };
            if offset < offsets.start {
                (first_number, start) = (number + 1, range.end);
                end = start;
                continue;
            }
            bytes += (range.len() + STORED_RECORD_EXTRA_BYTES) as u64;
            if offset >= offsets.end || (count > 0 && (count >= records_max || bytes > capacity)) {
                break;
            }
            count += 1;
            end = range.end;
        }
        if start == 0 && end == payload.len() {
            return whole;
        }
        let is_truncated = end < payload.len();
        Self { first_number, payload: Bytes::copy_from_slice(&payload[start..end]), is_truncated }
    }
}

/// Returns a batch as it is stored.
pub(crate) fn stored_batch(batch: ReadBatch) -> StoredBatch {
    let uncompressed_bytes = match batch.uncompressed_bytes {
        // The log does not store the size of an uncompressed payload.
        0 => u32::try_from(batch.payload.len()).expect("a batch is below 4 GiB"),
        compressed => compressed,
    };
    // The first offset is that of the first record, also where compaction removed some before it.
    // The records of a Kafka batch have distances themselves, from the offset that it was given.
    let first_offset = match batch.version {
        KAFKA_BATCH_VERSION => batch.first_offset,
        _ => batch.offset_of(0),
    };
    let skipped = u32::try_from(first_offset - batch.first_offset).expect("within the batch");
    let deltas = batch.offset_deltas.iter().flat_map(|deltas| deltas.iter());
    StoredBatch {
        first_offset,
        append_time: Some(time::to_timestamp(batch.append_time_us)),
        offset_deltas: deltas.map(|delta| delta - skipped).collect(),
        batch: Some(EncodedBatch {
            version: batch.version,
            record_count: batch.record_count,
            compression: batch.compression,
            crc32: batch.crc,
            uncompressed_bytes,
            payload: batch.payload,
        }),
    }
}

#[cfg(test)]
mod tests {
    use helix_proto::batch::encode;
    use helix_proto::log::v1::Record;
    use helix_wal::LogId;

    use super::*;

    fn stored(values: usize) -> ReadBatch {
        let record = |number: usize| Record {
            value: Some(vec![number as u8; 100].into()),
            ..Record::default()
        };
        let encoded = encode(&(0..values).map(record).collect::<Vec<_>>());
        ReadBatch {
            log_id: LogId::default(),
            first_offset: 10,
            append_time_us: 0,
            version: encoded.version,
            record_count: encoded.record_count,
            offset_count: encoded.record_count,
            offset_deltas: None,
            compression: encoded.compression,
            crc: encoded.crc32,
            uncompressed_bytes: 0,
            payload: encoded.payload,
        }
    }

    #[test]
    fn only_a_read_of_the_whole_batch_keeps_its_memory() {
        let stored = stored(10);
        let memory = stored.payload.as_ptr_range();
        let part = |offsets, records_max, capacity| {
            let part = BatchPart::of(&stored, offsets, records_max, capacity);
            let count = batch::walk(&part.payload, usize::MAX).count();
            let is_slice = memory.contains(&part.payload.as_ptr());
            (part.first_number, count, is_slice, part.is_truncated)
        };
        let most = u64::MAX;
        assert_eq!(part(0..most, most, most), (0, 10, true, false));
        assert_eq!(part(10..20, 10, most), (0, 10, true, false));
        assert_eq!(part(13..most, most, most), (3, 7, false, false));
        assert_eq!(part(13..15, most, most), (3, 2, false, true));
        assert_eq!(part(13..most, 3, most), (3, 3, false, true));
        assert_eq!(part(13..most, most, 300), (3, 2, false, true));
        assert_eq!(part(13..most, most, 1), (3, 1, false, true), "the caller's budget decides");
        assert_eq!(part(0..5, most, most).1, 0);
    }

    #[test]
    fn offsets_of_a_compacted_batch_decide() {
        let deltas = (0..10).map(|number| number * 3 + 1).collect();
        let stored = ReadBatch { offset_count: 40, offset_deltas: Some(deltas), ..stored(10) };
        assert_eq!((stored.offset_of(2), stored.end_offset()), (17, 50));
        assert_eq!(stored.record_count_from(17), 8);
        let part = |offsets| {
            let part = BatchPart::of(&stored, offsets, u64::MAX, u64::MAX);
            (part.first_number, batch::walk(&part.payload, usize::MAX).count(), part.is_truncated)
        };
        assert_eq!(part(0..u64::MAX), (0, 10, false));
        assert_eq!(part(15..u64::MAX), (2, 8, false));
        assert_eq!(part(17..23), (2, 2, true), "the offsets 17 and 20");
        assert_eq!(part(39..u64::MAX), (10, 0, false), "a gap at the end");
    }

    #[test]
    fn an_invalid_record_keeps_its_position() {
        let mut broken = stored(3);
        broken.payload = broken.payload.slice(..broken.payload.len() - 1);
        let part = BatchPart::of(&broken, 11..u64::MAX, u64::MAX, u64::MAX);
        assert_eq!((part.first_number, part.payload.len()), (0, broken.payload.len()));
    }
}
