//! Assigns records to partitions.
//!
//! The mapping of keys is stable over versions and client languages: docs/api.md.

/// Returns the partition of a key: CRC-32 (as in zlib) of the key, modulo `partition_count`.
///
/// `partition_count` is at least 1. Adding partitions moves keys.
pub fn of_key(key: &[u8], partition_count: u32) -> u32 {
    crc32fast::hash(key) % partition_count.max(1)
}

/// Round-robin over partitions for records without a key, one whole batch each.
///
/// Full batches cost less than spread ones.
#[derive(Debug, Clone, Copy, Default)]
pub struct StickyPartitioner {
    partition: u32,
    /// Bytes assigned to the current partition.
    bytes: usize,
}

impl StickyPartitioner {
    /// Returns the partition of a record of `record_bytes`, where a batch holds `batch_bytes`.
    pub fn next(&mut self, record_bytes: usize, batch_bytes: usize, partition_count: u32) -> u32 {
        if self.bytes > 0 && self.bytes + record_bytes > batch_bytes {
            self.partition = self.partition.wrapping_add(1);
            self.bytes = 0;
        }
        // The count only shrinks when a topic was deleted and created again.
        self.partition %= partition_count.max(1);
        self.bytes += record_bytes;
        self.partition
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the table of docs/api.md, which clients in other languages implement.
    #[test]
    fn key_partitions_match_the_published_vectors() {
        let page = include_str!("../../docs/api.md");
        let (_, section) = page.split_once("## Partitions of keys").unwrap();
        let table = section.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
        let rows: Vec<_> = table.take_while(|line| line.starts_with('|')).collect();
        assert!(rows.len() >= 6, "{rows:?}");
        for row in rows {
            let cells: Vec<_> = row.split('|').map(str::trim).collect();
            let [_, text, bytes, crc, of_4, of_12, of_1000, _] = cells[..] else { panic!("{row}") };
            let digits: Vec<_> = bytes.bytes().collect();
            let byte =
                |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
            let key: Vec<u8> = digits.chunks(2).map(byte).collect();
            assert!(text.is_empty() || text.as_bytes() == key, "{row}");
            assert_eq!(format!("{:08x}", crc32fast::hash(&key)), crc, "{row}");
            for (count, partition) in [(4, of_4), (12, of_12), (1000, of_1000)] {
                assert_eq!(of_key(&key, count).to_string(), partition, "{row}");
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
    }
}
