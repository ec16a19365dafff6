//! Self-describing records: a stamp names the run, lane, sequence and send time.
//!
//! The bytes that follow are derived from the stamp, so a reader can verify them without a copy.

use bytes::{BufMut, Bytes, BytesMut};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Bytes of a stamp: run (8), lane (4), sequence (8) and send time (8), little endian.
pub(crate) const STAMP_BYTES: usize = 28;

/// Start offsets of a body within a lane's block; consecutive records differ.
const BODY_OFFSETS: usize = 4096;

/// Header of a record's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// Identifies the records of one run.
    pub(crate) run: u64,
    /// Writer within the run.
    pub(crate) lane: u32,
    /// Number of the record within its lane.
    pub(crate) sequence: u64,
    /// Scheduled send time in nanoseconds since the run began; 0 if unused.
    pub(crate) sent_ns: u64,
}

impl Stamp {
    /// Returns `None` if the value is too short for a stamp.
    pub(crate) fn read(value: &[u8]) -> Option<Self> {
        let stamp = value.get(..STAMP_BYTES)?;
        let number =
            |at: usize| u64::from_le_bytes(stamp[at..at + 8].try_into().expect("eight bytes"));
        Some(Self {
            run: number(0),
            lane: u32::from_le_bytes(stamp[8..12].try_into().expect("four bytes")),
            sequence: number(12),
            sent_ns: number(20),
        })
    }

    fn put(&self, out: &mut BytesMut) {
        out.put_u64_le(self.run);
        out.put_u32_le(self.lane);
        out.put_u64_le(self.sequence);
        out.put_u64_le(self.sent_ns);
    }
}

/// Creates and verifies the values of one lane.
#[derive(Debug, Clone)]
pub(crate) struct Stamper {
    run: u64,
    lane: u32,
    /// Bytes of a value, at least [`STAMP_BYTES`].
    size: usize,
    block: Bytes,
}

impl Stamper {
    pub(crate) fn new(seed: u64, run: u64, lane: u32, size: usize) -> Self {
        assert!(size >= STAMP_BYTES, "checked with the flags");
        let mut rng = StdRng::seed_from_u64(seed ^ u64::from(lane).rotate_left(32));
        let mut block = vec![0; size - STAMP_BYTES + BODY_OFFSETS];
        rng.fill(&mut block[..]);
        Self { run, lane, size, block: block.into() }
    }

    pub(crate) fn value(&self, sequence: u64, sent_ns: u64) -> Bytes {
        let mut value = BytesMut::with_capacity(self.size);
        Stamp { run: self.run, lane: self.lane, sequence, sent_ns }.put(&mut value);
        value.extend_from_slice(self.body(sequence));
        value.freeze()
    }

    /// Reports whether a value with this stamp has the bytes that this lane wrote.
    pub(crate) fn is_intact(&self, stamp: &Stamp, value: &[u8]) -> bool {
        (stamp.run, stamp.lane) == (self.run, self.lane)
            && value.get(STAMP_BYTES..) == Some(self.body(stamp.sequence))
    }

    fn body(&self, sequence: u64) -> &[u8] {
        // A prime step keeps equal bodies far apart for any batch size.
        let start = (sequence % BODY_OFFSETS as u64) as usize * 1021 % BODY_OFFSETS;
        &self.block[start..start + self.size - STAMP_BYTES]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognises_values_and_detects_changes() {
        let stamper = Stamper::new(1, 7, 3, 100);
        let value = stamper.value(42, 5);
        assert_eq!(value.len(), 100);
        let stamp = Stamp::read(&value).unwrap();
        assert_eq!(stamp, Stamp { run: 7, lane: 3, sequence: 42, sent_ns: 5 });
        assert!(stamper.is_intact(&stamp, &value));
        assert!(!stamper.is_intact(&stamp, &value[..99]));
        for at in STAMP_BYTES..100 {
            let mut changed = value.to_vec();
            changed[at] ^= 1;
            assert!(!stamper.is_intact(&stamp, &changed));
        }
        // The right bytes with another sequence are wrong.
        assert!(!stamper.is_intact(&Stamp { sequence: 43, ..stamp }, &value));
    }

    #[test]
    fn consecutive_records_and_lanes_differ() {
        let (one, two) = (Stamper::new(1, 7, 1, 64), Stamper::new(1, 7, 2, 64));
        assert_ne!(one.value(0, 0)[STAMP_BYTES..], one.value(1, 0)[STAMP_BYTES..]);
        assert_ne!(one.value(0, 0)[STAMP_BYTES..], two.value(0, 0)[STAMP_BYTES..]);
        assert_eq!(Stamp::read(&[0; STAMP_BYTES - 1]), None);
    }
}
