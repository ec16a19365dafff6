//! The records of the demo: a unique id, bytes derived from it and the seed, and a checksum.
//! The same seed gives the same records, so the reader needs no data from the writer.

use std::fmt;

use crate::args::RECORD_BYTES_MIN;

/// Sizes of the id before the body and the checksum after it.
const ID_BYTES: usize = 8;
const CRC_BYTES: usize = 4;

const _: () = assert!(RECORD_BYTES_MIN == ID_BYTES + CRC_BYTES);

/// Topic that the demo writes to.
pub(super) const TOPIC: &str = "demo";

/// The records to write: `records` in total, distributed round-robin over the partitions.
///
/// Layout of a record value, integers little endian:
/// ```text
/// | id u64 | body, generated from the seed and the id | crc32 u32 of the preceding bytes |
/// ```
#[derive(Debug, Clone, Copy)]
pub(crate) struct DemoWorkload {
    pub(crate) seed: u64,
    pub(crate) records: u64,
    pub(crate) record_bytes: usize,
    pub(crate) partitions: u32,
}

/// Difference of a value from the written records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ValueMismatch {
    Length,
    Checksum,
    /// Valid checksum, but not a record of this partition.
    Foreign,
    /// Valid checksum, but not the body of its id.
    Body,
}

impl fmt::Display for ValueMismatch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Length => "has the wrong length",
            Self::Checksum => "does not match its checksum",
            Self::Foreign => "was not written to this partition",
            Self::Body => "has other bytes than the written record",
        })
    }
}

impl DemoWorkload {
    /// Returns the number of records of a partition; their sequence numbers start at 0.
    pub(crate) fn records_of(&self, partition: u32) -> u64 {
        let partitions = u64::from(self.partitions);
        self.records / partitions + u64::from(u64::from(partition) < self.records % partitions)
    }

    /// Returns the value of a record.
    pub(crate) fn value(&self, partition: u32, sequence: u64) -> Vec<u8> {
        let mut value = Vec::with_capacity(self.record_bytes);
        self.write(self.id(partition, sequence), &mut value);
        value
    }

    /// Verifies a value read from a partition and returns its sequence number.
    pub(crate) fn check(&self, partition: u32, value: &[u8]) -> Result<u64, ValueMismatch> {
        if value.len() != self.record_bytes {
            return Err(ValueMismatch::Length);
        }
        let (body, crc) = value.split_at(value.len() - CRC_BYTES);
        if crc32fast::hash(body).to_le_bytes() != *crc {
            return Err(ValueMismatch::Checksum);
        }
        let id = u64::from_le_bytes(value[..ID_BYTES].try_into().expect("eight bytes"));
        let partitions = u64::from(self.partitions);
        let sequence = id / partitions;
        if id % partitions != u64::from(partition) || sequence >= self.records_of(partition) {
            return Err(ValueMismatch::Foreign);
        }
        if !self.is_body(id, &body[ID_BYTES..]) {
            return Err(ValueMismatch::Body);
        }
        Ok(sequence)
    }

    fn id(&self, partition: u32, sequence: u64) -> u64 {
        sequence * u64::from(self.partitions) + u64::from(partition)
    }

    fn write(&self, id: u64, value: &mut Vec<u8>) {
        value.extend_from_slice(&id.to_le_bytes());
        let end = self.record_bytes - CRC_BYTES;
        let mut words = BodyGenerator::new(self.seed, id);
        while value.len() < end {
            let word = words.next().to_le_bytes();
            value.extend_from_slice(&word[..word.len().min(end - value.len())]);
        }
        value.extend_from_slice(&crc32fast::hash(value).to_le_bytes());
    }

    fn is_body(&self, id: u64, body: &[u8]) -> bool {
        let mut words = BodyGenerator::new(self.seed, id);
        body.chunks(8).all(|chunk| chunk == &words.next().to_le_bytes()[..chunk.len()])
    }
}

/// Generates the body of a record with splitmix64.
/// It takes a few instructions for eight bytes, so it hardly affects the measurements.
struct BodyGenerator(u64);

impl BodyGenerator {
    fn new(seed: u64, id: u64) -> Self {
        // The multiplication keeps adjacent ids from sharing generator states.
        Self(seed ^ id.wrapping_add(1).wrapping_mul(0xD6E8_FEB8_6659_FD93))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn workload() -> DemoWorkload {
        DemoWorkload { seed: 7, records: 10, record_bytes: 45, partitions: 4 }
    }

    #[test]
    fn distributes_every_record_once() {
        let workload = workload();
        let counts: Vec<_> = (0..4).map(|partition| workload.records_of(partition)).collect();
        assert_eq!(counts, [3, 3, 2, 2]);
    }

    #[test]
    fn records_are_distinct_and_recognised() {
        let workload = workload();
        let mut bodies = HashSet::new();
        for partition in 0..4 {
            for sequence in 0..workload.records_of(partition) {
                let value = workload.value(partition, sequence);
                assert_eq!(value.len(), 45);
                assert_eq!(workload.check(partition, &value), Ok(sequence));
                assert!(bodies.insert(value[8..41].to_vec()));
            }
        }
    }

    #[test]
    fn smallest_record_has_no_body() {
        let workload = DemoWorkload { record_bytes: RECORD_BYTES_MIN, ..workload() };
        assert_eq!(workload.check(1, &workload.value(1, 2)), Ok(2));
    }

    #[test]
    fn detects_every_changed_bit() {
        let workload = workload();
        let value = workload.value(2, 1);
        for bit in 0..value.len() * 8 {
            let mut changed = value.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(workload.check(2, &changed), Err(ValueMismatch::Checksum));
        }
        assert_eq!(workload.check(2, &value[1..]), Err(ValueMismatch::Length));
    }

    #[test]
    fn detects_records_of_other_partitions_and_seeds() {
        let workload = workload();
        assert_eq!(workload.check(3, &workload.value(2, 1)), Err(ValueMismatch::Foreign));
        assert_eq!(workload.check(2, &workload.value(2, 2)), Err(ValueMismatch::Foreign));
        let other_seed = DemoWorkload { seed: 8, ..workload };
        assert_eq!(workload.check(2, &other_seed.value(2, 1)), Err(ValueMismatch::Body));
    }
}
