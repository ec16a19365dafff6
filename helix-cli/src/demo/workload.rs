//! The records of the demo: each has an id of its own, bytes that follow from it, and a checksum.
//! Pure; the same seed gives the same records, so the reader needs nothing from the writer.

use std::fmt;

/// Id before and checksum after the body.
const ID_BYTES: usize = 8;
const CRC_BYTES: usize = 4;

/// Fewest bytes of a record.
pub(crate) const RECORD_BYTES_MIN: usize = ID_BYTES + CRC_BYTES;

/// What is written: `records` in all, dealt to the partitions in turn.
///
/// A record's value is drawn so, integers little endian:
/// ```text
/// | id u64 | body, generated from the seed and the id | crc32 u32 of all before |
/// ```
#[derive(Debug, Clone, Copy)]
pub(crate) struct Workload {
    pub(crate) seed: u64,
    pub(crate) records: u64,
    pub(crate) record_bytes: usize,
    pub(crate) partitions: u32,
}

/// Why a value is not one that was written here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Changed {
    Length,
    Checksum,
    /// Intact in itself, but not a record of this partition.
    Foreign,
    /// Intact in itself, but not the bytes that belong to its id.
    Body,
}

impl fmt::Display for Changed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Length => "has the wrong length",
            Self::Checksum => "fails its checksum",
            Self::Foreign => "was not written to this partition",
            Self::Body => "has other bytes than were written",
        })
    }
}

impl Workload {
    /// How many records a partition gets. They are numbered from 0: the sequence.
    pub(crate) fn records_of(&self, partition: u32) -> u64 {
        let partitions = u64::from(self.partitions);
        self.records / partitions + u64::from(u64::from(partition) < self.records % partitions)
    }

    /// The value of one record.
    pub(crate) fn value(&self, partition: u32, sequence: u64) -> Vec<u8> {
        let mut value = Vec::with_capacity(self.record_bytes);
        self.write(self.id(partition, sequence), &mut value);
        value
    }

    /// Checks a value that was read from a partition, and says which record it is.
    pub(crate) fn check(&self, partition: u32, value: &[u8]) -> Result<u64, Changed> {
        if value.len() != self.record_bytes {
            return Err(Changed::Length);
        }
        let (body, crc) = value.split_at(value.len() - CRC_BYTES);
        if crc32fast::hash(body).to_le_bytes() != *crc {
            return Err(Changed::Checksum);
        }
        let id = u64::from_le_bytes(value[..ID_BYTES].try_into().expect("eight bytes"));
        let partitions = u64::from(self.partitions);
        let sequence = id / partitions;
        if id % partitions != u64::from(partition) || sequence >= self.records_of(partition) {
            return Err(Changed::Foreign);
        }
        if !self.is_body(id, &body[ID_BYTES..]) {
            return Err(Changed::Body);
        }
        Ok(sequence)
    }

    fn id(&self, partition: u32, sequence: u64) -> u64 {
        sequence * u64::from(self.partitions) + u64::from(partition)
    }

    fn write(&self, id: u64, value: &mut Vec<u8>) {
        value.extend_from_slice(&id.to_le_bytes());
        let end = self.record_bytes - CRC_BYTES;
        let mut words = Words::new(self.seed, id);
        while value.len() < end {
            let word = words.next().to_le_bytes();
            value.extend_from_slice(&word[..word.len().min(end - value.len())]);
        }
        value.extend_from_slice(&crc32fast::hash(value).to_le_bytes());
    }

    fn is_body(&self, id: u64, body: &[u8]) -> bool {
        let mut words = Words::new(self.seed, id);
        body.chunks(8).all(|chunk| chunk == &words.next().to_le_bytes()[..chunk.len()])
    }
}

/// Generator of a record's body (splitmix64): a few instructions for eight bytes, so that making
/// and checking records does not hide what is measured.
struct Words(u64);

impl Words {
    fn new(seed: u64, id: u64) -> Self {
        // Multiplied, so that neighbouring ids do not walk through the same states.
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

    fn workload() -> Workload {
        Workload { seed: 7, records: 10, record_bytes: 45, partitions: 4 }
    }

    #[test]
    fn every_record_is_dealt_once() {
        let workload = workload();
        let dealt: Vec<_> = (0..4).map(|partition| workload.records_of(partition)).collect();
        assert_eq!(dealt, [3, 3, 2, 2]);
    }

    #[test]
    fn every_record_differs_and_is_recognised() {
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
    fn the_smallest_record_has_no_body() {
        let workload = Workload { record_bytes: RECORD_BYTES_MIN, ..workload() };
        assert_eq!(workload.check(1, &workload.value(1, 2)), Ok(2));
    }

    #[test]
    fn every_changed_bit_is_seen() {
        let workload = workload();
        let value = workload.value(2, 1);
        for bit in 0..value.len() * 8 {
            let mut changed = value.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(workload.check(2, &changed), Err(Changed::Checksum));
        }
        assert_eq!(workload.check(2, &value[1..]), Err(Changed::Length));
    }

    #[test]
    fn records_of_others_are_seen() {
        let workload = workload();
        assert_eq!(workload.check(3, &workload.value(2, 1)), Err(Changed::Foreign));
        assert_eq!(workload.check(2, &workload.value(2, 2)), Err(Changed::Foreign));
        let other_seed = Workload { seed: 8, ..workload };
        assert_eq!(workload.check(2, &other_seed.value(2, 1)), Err(Changed::Body));
    }
}
