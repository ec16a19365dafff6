//! Offsets of the records that compaction by key has kept in a batch.

use std::fmt;

use bytes::{BufMut, BytesMut};

use crate::limits::BATCH_BYTES_DEFAULT;

/// Maximum encoded size of the offsets, so that a head with them fits the log.
const BYTES_MAX: usize = 56 << 10;

/// Largest number of records in a batch of a compacted topic.
///
/// Up to this number, a bit for each offset fits the head, whichever records stay. In responses
/// each distance takes at most 3 bytes. So a batch of the default limit stays below the 4 MiB that
/// gRPC libraries receive by default.
pub const COMPACTED_OFFSETS_MAX: u32 = 1 << 18;

const _: () = assert!(COMPACTED_OFFSETS_MAX as usize <= BYTES_MAX * 8);
const _: () =
    assert!(BATCH_BYTES_DEFAULT as usize + 3 * (COMPACTED_OFFSETS_MAX as usize) < (4 << 20) - 4096);

const FORM_DISTANCES: u8 = 1;
const FORM_BITMAP: u8 = 2;

/// Offsets of the records in a compacted batch, as distances from its first offset.
#[derive(Clone, PartialEq, Eq)]
pub struct KeptOffsets {
    /// Number of offsets that the batch covers, as it did when it was appended.
    offset_count: u32,
    /// Ascending, below `offset_count`, at least one.
    deltas: Box<[u32]>,
}

impl fmt::Debug for KeptOffsets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeptOffsets({} of {})", self.deltas.len(), self.offset_count)
    }
}

impl KeptOffsets {
    /// Returns the offsets that stayed, of `offset_count` offsets.
    ///
    /// Returns `None` if `deltas` is empty, not ascending, or not below `offset_count`, or if the
    /// encoded form does not fit the head of a batch. Batches of up to [`COMPACTED_OFFSETS_MAX`]
    /// offsets always fit.
    pub fn new(offset_count: u32, deltas: Vec<u32>) -> Option<Self> {
        let is_sorted = deltas.is_sorted_by(|a, b| a < b);
        let is_within = deltas.last().is_some_and(|last| *last < offset_count);
        let kept = Self { offset_count, deltas: deltas.into() };
        (is_sorted && is_within && kept.form().1 <= BYTES_MAX).then_some(kept)
    }

    pub fn offset_count(&self) -> u32 {
        self.offset_count
    }

    pub fn deltas(&self) -> &[u32] {
        &self.deltas
    }

    /// Returns the shorter of the two forms, and its size in bytes.
    fn form(&self) -> (u8, usize) {
        let bitmap = (self.offset_count as usize).div_ceil(8);
        let distances = self.steps().map(varint_len).sum();
        if distances <= bitmap { (FORM_DISTANCES, distances) } else { (FORM_BITMAP, bitmap) }
    }

    /// Returns the number of offsets missing before each one.
    fn steps(&self) -> impl Iterator<Item = u32> {
        let mut next = 0;
        self.deltas.iter().map(move |delta| {
            let step = delta - next;
            next = delta + 1;
            step
        })
    }

    /// Appends the encoding: offset_count u32, form u8, length u16, then `length` bytes.
    pub(super) fn encode_to(&self, bytes: &mut BytesMut) {
        let (form, length) = self.form();
        bytes.put_u32_le(self.offset_count);
        bytes.put_u8(form);
        bytes.put_u16_le(u16::try_from(length).expect("BYTES_MAX fits 16 bits"));
        if form == FORM_DISTANCES {
            self.steps().for_each(|step| put_varint(step, bytes));
            return;
        }
        let start = bytes.len();
        bytes.put_bytes(0, length);
        for delta in &self.deltas {
            bytes[start + *delta as usize / 8] |= 1 << (delta % 8);
        }
    }

    /// Bytes before the form: offset_count, form and length.
    pub(super) const PREFIX_BYTES: usize = 7;

    /// Returns the length of the form, as the prefix states it.
    pub(super) fn form_bytes(prefix: &[u8; Self::PREFIX_BYTES]) -> usize {
        u16::from_le_bytes([prefix[5], prefix[6]]).into()
    }

    /// Decodes what [`Self::encode_to`] wrote. Returns `None` unless these are exactly the bytes
    /// that it writes for `record_count` records.
    pub(super) fn decode(
        prefix: &[u8; Self::PREFIX_BYTES],
        form: &[u8],
        record_count: u32,
    ) -> Option<Self> {
        let offset_count = u32::from_le_bytes([prefix[0], prefix[1], prefix[2], prefix[3]]);
        // Checked before memory is allocated for the offsets.
        if form.len() > BYTES_MAX || record_count as usize > form.len() * 8 {
            return None;
        }
        let mut deltas = Vec::with_capacity(record_count as usize);
        match prefix[4] {
            FORM_DISTANCES => {
                let (mut rest, mut next) = (form, 0_u32);
                while !rest.is_empty() {
                    let delta = next.checked_add(take_varint(&mut rest)?)?;
                    deltas.push(delta);
                    next = delta.checked_add(1)?;
                }
            }
            FORM_BITMAP => {
                let bits = (0_u32..).zip(form).filter(|(_, byte)| **byte != 0);
                let set = bits.flat_map(|(at, byte)| {
                    (0..8).filter(move |bit| byte >> bit & 1 != 0).map(move |bit| at * 8 + bit)
                });
                deltas.extend(set);
            }
            _ => return None,
        }
        let kept = Self::new(offset_count, deltas)?;
        let is_same = kept.deltas.len() == record_count as usize
            && kept.form() == (prefix[4], form.len())
            && kept.deltas.len() < offset_count as usize;
        is_same.then_some(kept)
    }
}

fn varint_len(value: u32) -> usize {
    match value {
        0..=0x7F => 1,
        0x80..=0x3FFF => 2,
        0x4000..=0x1F_FFFF => 3,
        0x20_0000..=0xFFF_FFFF => 4,
        _ => 5,
    }
}

fn put_varint(mut value: u32, bytes: &mut BytesMut) {
    while value > 0x7F {
        bytes.put_u8((value & 0x7F) as u8 | 0x80);
        value >>= 7;
    }
    bytes.put_u8(value as u8);
}

fn take_varint(bytes: &mut &[u8]) -> Option<u32> {
    let mut value = 0_u64;
    for index in 0..5 {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7F) << (7 * index);
        if byte & 0x80 == 0 {
            let value = u32::try_from(value).ok()?;
            return (varint_len(value) == index + 1).then_some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::super::testing::seeded;
    use super::*;

    /// Offsets that the longest bitmap covers.
    const OFFSETS_MAX: u32 = (BYTES_MAX as u32) * 8;

    fn round_trip(kept: &KeptOffsets) -> usize {
        let mut bytes = BytesMut::new();
        kept.encode_to(&mut bytes);
        let (prefix, form) = bytes.split_first_chunk().unwrap();
        assert_eq!(KeptOffsets::form_bytes(prefix), form.len());
        let count = u32::try_from(kept.deltas.len()).unwrap();
        assert_eq!(KeptOffsets::decode(prefix, form, count).as_ref(), Some(kept));
        assert_eq!(KeptOffsets::decode(prefix, form, count + 1), None);
        bytes.len()
    }

    #[test]
    fn layout_is_stable() {
        let encode = |kept: KeptOffsets| {
            let mut bytes = BytesMut::new();
            kept.encode_to(&mut bytes);
            bytes.to_vec()
        };
        let sparse = KeptOffsets::new(1_000, vec![2, 3, 300]).unwrap();
        assert_eq!(encode(sparse), [0xE8, 3, 0, 0, 1, 4, 0, 2, 0, 0xA8, 2]);
        let dense = KeptOffsets::new(10, vec![0, 2, 4, 9]).unwrap();
        assert_eq!(encode(dense), [10, 0, 0, 0, 2, 2, 0, 0b1_0101, 0b10]);
    }

    #[test]
    fn any_offsets_round_trip_in_a_short_form() {
        let mut rng = seeded("any_offsets_round_trip_in_a_short_form");
        for _ in 0..500 {
            let count = rng.random_range(2..5_000_u32);
            let share = rng.random_range(0.0..1.0);
            let mut deltas: Vec<u32> = (0..count).filter(|_| rng.random_bool(share)).collect();
            deltas.truncate(count as usize - 1);
            let Some(kept) = KeptOffsets::new(count, deltas) else { continue };
            assert!(round_trip(&kept) <= 7 + (count as usize).div_ceil(8));
        }
    }

    #[test]
    fn every_batch_within_the_limit_fits_a_head() {
        let half: Vec<u32> = (0..OFFSETS_MAX).filter(|delta| delta % 2 == 0).collect();
        let kept = KeptOffsets::new(OFFSETS_MAX, half.clone()).unwrap();
        assert!(round_trip(&kept) <= super::super::HEAD_BYTES_MAX - 200);
        assert_eq!(KeptOffsets::new(2 * OFFSETS_MAX, half), None);
        // A few records of a large batch always fit.
        round_trip(&KeptOffsets::new(u32::MAX, vec![7, u32::MAX - 1]).unwrap());
    }

    #[test]
    fn rejects_offsets_out_of_order_and_other_encodings() {
        assert_eq!(KeptOffsets::new(5, vec![]), None);
        assert_eq!(KeptOffsets::new(5, vec![1, 1]), None);
        assert_eq!(KeptOffsets::new(5, vec![2, 1]), None);
        assert_eq!(KeptOffsets::new(5, vec![5]), None);
        let prefix = |form, length| [10, 0, 0, 0, form, length, 0];
        assert_eq!(KeptOffsets::decode(&prefix(3, 1), &[1], 1), None, "unknown form");
        assert_eq!(KeptOffsets::decode(&prefix(1, 2), &[0x80, 0], 1), None, "a long varint");
        assert_eq!(KeptOffsets::decode(&prefix(2, 2), &[1, 0], 1), None, "the longer form");
        assert_eq!(KeptOffsets::decode(&prefix(1, 1), &[9], 0), None, "another count");
        let mut rng = seeded("rejects_offsets_out_of_order_and_other_encodings");
        for _ in 0..20_000 {
            let form: Vec<u8> = (0..rng.random_range(0..6)).map(|_| rng.random()).collect();
            let prefix = prefix(rng.random_range(0..4), form.len() as u8);
            let Some(kept) = KeptOffsets::decode(&prefix, &form, rng.random_range(0..20)) else {
                continue;
            };
            let mut bytes = BytesMut::new();
            kept.encode_to(&mut bytes);
            assert_eq!(bytes[7..], form[..]);
        }
    }
}
