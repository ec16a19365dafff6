//! Assigns records to partitions.
//!
//! The mapping of keys is stable over versions and client languages: docs/clients.md.

/// Returns the partition of a key: CRC-32 (as in zlib) of the key, modulo `partition_count`.
///
/// `partition_count` is at least 1. Adding partitions moves keys.
pub fn of_key(key: &[u8], partition_count: u32) -> u32 {
    crc32fast::hash(key) % partition_count.max(1)
}

/// Round-robin over partitions for records without a key, a batch or a part of one at a time.
///
/// Full batches cost less than spread ones, so each turn gets a whole batch in the end. The first
/// turns are shorter: so a small input is spread, too, and at no time does a partition have much
/// more than the others.
#[derive(Debug, Clone, Copy, Default)]
pub struct StickyPartitioner {
    partition: u32,
    /// Bytes assigned in the current turn.
    bytes: usize,
    /// Bytes assigned in all turns.
    total_bytes: u64,
}

/// Bytes of the first turns.
const TURN_BYTES_MIN: usize = 16 << 10;

/// A turn gets at most this part of what a partition has by then.
const TURN_PART: u64 = 4;

impl StickyPartitioner {
    /// Returns a partitioner whose first turn is for this partition. A random one keeps many short
    /// runs from filling the first partition.
    pub fn starting_at(partition: u32) -> Self {
        Self { partition, ..Self::default() }
    }

    /// Returns the partition of a record of `record_bytes`, where a batch holds `batch_bytes`.
    pub fn next(&mut self, record_bytes: usize, batch_bytes: usize, partition_count: u32) -> u32 {
        let partition_count = partition_count.max(1);
        let share = self.total_bytes / (TURN_PART * u64::from(partition_count));
        let share = usize::try_from(share).unwrap_or(usize::MAX);
        let turn_bytes = share.max(TURN_BYTES_MIN).min(batch_bytes);
        if self.bytes > 0 && self.bytes.saturating_add(record_bytes) > turn_bytes {
            self.partition = self.partition.wrapping_add(1);
            self.bytes = 0;
        }
        // The count only shrinks when a topic was deleted and created again.
        self.partition %= partition_count;
        self.bytes = self.bytes.saturating_add(record_bytes);
        self.total_bytes = self.total_bytes.saturating_add(record_bytes as u64);
        self.partition
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the vectors that clients in other languages read, too.
    #[test]
    fn key_partitions_match_the_published_vectors() {
        let published = include_str!("../../docs/client-vectors.json");
        let published: serde_json::Value = serde_json::from_str(published).unwrap();
        let vectors = published["partitions"].as_array().unwrap();
        assert!(vectors.len() >= 6, "{vectors:?}");
        for vector in vectors {
            let digits = vector["key_hex"].as_str().unwrap().as_bytes();
            let byte =
                |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
            let key: Vec<u8> = digits.chunks(2).map(byte).collect();
            assert_eq!(u64::from(crc32fast::hash(&key)), vector["crc32"], "{vector}");
            for (count, partition) in vector["partitions"].as_object().unwrap() {
                assert_eq!(u64::from(of_key(&key, count.parse().unwrap())), *partition, "{vector}");
            }
        }
    }

    #[test]
    fn partition_of_key_is_crc32_modulo_count() {
        // python3: zlib.crc32(b"customer-7") % 12
        assert_eq!(of_key(b"customer-7", 12), 8);
        assert_eq!(of_key(b"", 12), 0);
        assert_eq!(of_key(b"anything", 1), 0);
    }

    #[test]
    fn keys_spread_evenly() {
        let mut counts = [0; 8];
        for number in 0..8000 {
            counts[of_key(format!("key-{number}").as_bytes(), 8) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (800..1200).contains(count)), "{counts:?}");
    }

    #[test]
    fn keyless_records_fill_a_batch_before_the_next_partition() {
        let mut sticky = StickyPartitioner::default();
        let partitions: Vec<_> = (0..7).map(|_| sticky.next(40, 100, 3)).collect();
        assert_eq!(partitions, [0, 0, 1, 1, 2, 2, 0]);
        assert_eq!(StickyPartitioner::default().next(1000, 100, 3), 0);
        assert_eq!(StickyPartitioner::starting_at(7).next(10, 100, 3), 1);
    }

    #[test]
    fn keyless_records_spread_evenly_and_fill_batches_in_the_end() {
        let batch_bytes = 256 << 10;
        // From about a hundred thousand short lines on, up to far more than a batch for each.
        for records in [100_000, 1_000_000, 10_000_000] {
            let mut sticky = StickyPartitioner::starting_at(5);
            let (mut bytes, mut turns, mut last) = ([0_u64; 12], 0, None);
            for _ in 0..records {
                let partition = sticky.next(10, batch_bytes, 12);
                bytes[partition as usize] += 10;
                turns += u64::from(last.replace(partition) != Some(partition));
            }
            let (least, most) = (bytes.iter().min().unwrap(), bytes.iter().max().unwrap());
            assert!(*least * 3 >= *most * 2, "{records}: {bytes:?}");
            let fullest = records * 10 / batch_bytes as u64;
            assert!(turns <= fullest + 150, "{records} take {turns} turns");
        }
    }
}
