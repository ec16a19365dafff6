//! Records where they are in an uncompressed payload: found and checked without being decoded.

use std::ops::Range;

use prost::encoding::{WireType, decode_key, decode_varint};

use super::RECORD_TAG;

/// Most bytes of a length prefix: a longer varint does not fit a `u32`.
const LENGTH_BYTES_MAX: usize = 5;

/// Checks that `payload` is exactly `expected` records of at most `record_bytes_max` bytes each.
///
/// `expected` is at least 1. Reads tags and length prefixes only and allocates nothing; the
/// contents of the records are not validated.
///
/// # Errors
/// The first violation and its position.
pub fn scan(payload: &[u8], expected: u32, record_bytes_max: usize) -> Result<(), ScanError> {
    scan_with(payload, expected, record_bytes_max, |_| true)
}

/// Like [`scan`], and checks that each record decodes as a [`Record`](crate::log::v1::Record).
///
/// Skips keys and values, and allocates nothing. Unknown fields are accepted, except groups, which
/// proto3 does not have.
///
/// # Errors
/// As [`scan`], and [`ScanError::NotARecord`].
pub fn scan_records(
    payload: &[u8],
    expected: u32,
    record_bytes_max: usize,
) -> Result<(), ScanError> {
    scan_with(payload, expected, record_bytes_max, is_record)
}

fn scan_with(
    payload: &[u8],
    expected: u32,
    record_bytes_max: usize,
    is_valid: impl Fn(&[u8]) -> bool,
) -> Result<(), ScanError> {
    if expected == 0 {
        return Err(ScanError::Empty);
    }
    let mut walk = walk(payload, record_bytes_max);
    for found in 0..expected {
        let record = walk.next().ok_or(ScanError::TooFew { expected, found })??;
        let byte = record.start;
        if !is_valid(&payload[record]) {
            return Err(ScanError::NotARecord { record: found, byte });
        }
    }
    if walk.position < payload.len() {
        return Err(ScanError::TooMany { expected, byte: walk.position });
    }
    Ok(())
}

/// Returns true if the bytes are a serialized [`Record`](crate::log::v1::Record).
fn is_record(bytes: &[u8]) -> bool {
    all_fields(bytes, |field, wire_type, content| match (field, wire_type) {
        // Key and value.
        (1 | 2, wire_type) => wire_type == WireType::LengthDelimited,
        (3, WireType::LengthDelimited) => is_header(content),
        (4, WireType::LengthDelimited) => is_timestamp(content),
        (3 | 4, _) => false,
        _ => true,
    })
}

fn is_header(bytes: &[u8]) -> bool {
    all_fields(bytes, |field, wire_type, content| match field {
        1 => wire_type == WireType::LengthDelimited && std::str::from_utf8(content).is_ok(),
        2 => wire_type == WireType::LengthDelimited,
        _ => true,
    })
}

fn is_timestamp(bytes: &[u8]) -> bool {
    all_fields(bytes, |field, wire_type, _| {
        !matches!(field, 1 | 2) || wire_type == WireType::Varint
    })
}

/// Returns the value of the first header with this name in the first `records_max` records of an
/// uncompressed payload. Allocates nothing.
pub fn find_header<'a>(payload: &'a [u8], name: &str, records_max: usize) -> Option<&'a [u8]> {
    let records = walk(payload, usize::MAX).take(records_max).map_while(Result::ok);
    records.into_iter().find_map(|record| {
        length_delimited(&payload[record], 3).find_map(|header| {
            let is_named = length_delimited(header, 1).last() == Some(name.as_bytes());
            is_named.then(|| length_delimited(header, 2).last().unwrap_or_default())
        })
    })
}

/// Iterates over the contents of a field with a length, up to the first invalid byte.
fn length_delimited(mut bytes: &[u8], field: u32) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        while !bytes.is_empty() {
            let (found, wire_type) = decode_key(&mut bytes).ok()?;
            let content = content(wire_type, &mut bytes)?;
            if found == field && wire_type == WireType::LengthDelimited {
                return Some(content);
            }
        }
        None
    })
}

/// Content of a field without a length.
const NO_CONTENT: &[u8] = &[];

/// Returns true if the bytes are fields of a message, and all of them are valid. The content of a
/// field without a length is empty.
fn all_fields(mut bytes: &[u8], is_valid: impl Fn(u32, WireType, &[u8]) -> bool) -> bool {
    while !bytes.is_empty() {
        let Ok((field, wire_type)) = decode_key(&mut bytes) else { return false };
        if !content(wire_type, &mut bytes)
            .is_some_and(|content| is_valid(field, wire_type, content))
        {
            return false;
        }
    }
    true
}

/// Removes the content of a field from the front; `None` if it is invalid.
fn content<'a>(wire_type: WireType, bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    match wire_type {
        WireType::Varint => decode_varint(bytes).ok().map(|_| NO_CONTENT),
        WireType::LengthDelimited => {
            decode_varint(bytes).ok().and_then(|length| take(bytes, length))
        }
        WireType::SixtyFourBit => take(bytes, 8).map(|_| NO_CONTENT),
        WireType::ThirtyTwoBit => take(bytes, 4).map(|_| NO_CONTENT),
        WireType::StartGroup | WireType::EndGroup => None,
    }
}

/// Removes this many bytes from the front; `None` if there are fewer.
fn take<'a>(bytes: &mut &'a [u8], length: u64) -> Option<&'a [u8]> {
    let (front, rest) = bytes.split_at_checked(usize::try_from(length).ok()?)?;
    *bytes = rest;
    Some(front)
}

/// Iterates over the records of an uncompressed payload without allocating.
///
/// The iterator ends after the first error.
pub fn walk(payload: &[u8], record_bytes_max: usize) -> Walk<'_> {
    Walk { payload, record_bytes_max, position: 0, record: 0, is_broken: false }
}

/// Iterator over the byte ranges of the records in a payload.
///
/// A range covers one serialized `Record` without its tag and length prefix.
#[derive(Debug, Clone)]
pub struct Walk<'a> {
    payload: &'a [u8],
    record_bytes_max: usize,
    /// First unread byte.
    position: usize,
    /// Number of records read.
    record: u32,
    is_broken: bool,
}

impl Iterator for Walk<'_> {
    type Item = Result<Range<usize>, ScanError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_broken || self.position == self.payload.len() {
            return None;
        }
        let step = self.step();
        self.is_broken = step.is_err();
        Some(step)
    }
}

impl Walk<'_> {
    fn step(&mut self) -> Result<Range<usize>, ScanError> {
        let malformed = |byte| ScanError::Malformed { record: self.record, byte };
        let at = self.position;
        if self.payload[at] != RECORD_TAG {
            return Err(malformed(at));
        }
        let (bytes, prefix) = length(&self.payload[at + 1..]).ok_or_else(|| malformed(at + 1))?;
        let start = at + 1 + prefix;
        if bytes > self.record_bytes_max {
            let bytes_max = self.record_bytes_max;
            return Err(ScanError::RecordTooLarge {
                record: self.record,
                byte: at,
                bytes,
                bytes_max,
            });
        }
        // Compares with the remaining bytes: a sum could overflow where usize is 32 bits.
        if bytes > self.payload.len() - start {
            return Err(malformed(start));
        }
        self.position = start + bytes;
        self.record += 1;
        Ok(start..self.position)
    }
}

/// Reads a length prefix. Returns its value and size, or `None` if truncated or above `u32`.
fn length(bytes: &[u8]) -> Option<(usize, usize)> {
    let mut value = 0u64;
    for (index, byte) in bytes.iter().take(LENGTH_BYTES_MAX).enumerate() {
        value |= u64::from(byte & 0x7F) << (7 * index);
        if byte & 0x80 == 0 {
            let value = u32::try_from(value).ok()?;
            return Some((usize::try_from(value).ok()?, index + 1));
        }
    }
    None
}

/// The reason why a payload does not match its batch. Records and bytes count from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ScanError {
    /// `record_count` is 0.
    #[error("batch has no records")]
    Empty,
    /// The payload ends before the last record.
    #[error("record_count is {expected} but the payload has {found} records")]
    TooFew {
        /// `record_count` of the batch.
        expected: u32,
        /// Records in the payload.
        found: u32,
    },
    /// Bytes follow the last record.
    #[error("record_count is {expected} but the payload continues at byte {byte}")]
    TooMany {
        /// `record_count` of the batch.
        expected: u32,
        /// First byte after the last record.
        byte: usize,
    },
    /// The bytes at this position are not a complete record.
    #[error("record {record} is malformed at byte {byte}")]
    Malformed {
        /// Index of the record.
        record: u32,
        /// First malformed byte.
        byte: usize,
    },
    /// The bytes of a record do not decode as a [`Record`](crate::log::v1::Record).
    #[error("record {record} at byte {byte} is not a Record message")]
    NotARecord {
        /// Index of the record.
        record: u32,
        /// First byte of the record.
        byte: usize,
    },
    /// A record is larger than allowed.
    #[error("record {record} at byte {byte} has {bytes} bytes; the limit is {bytes_max}")]
    RecordTooLarge {
        /// Index of the record.
        record: u32,
        /// Position of the record's tag.
        byte: usize,
        /// Size of the record in bytes.
        bytes: usize,
        /// Limit in bytes.
        bytes_max: usize,
    },
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use prost::Message;
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;
    use crate::batch::encode;
    use crate::batch::tests::records;
    use crate::log::v1::{Header, Record, RecordList};

    const RECORD_BYTES_MAX: usize = 1 << 20;

    #[test]
    fn every_encoded_record_is_valid() {
        let header = |name: &str| Header { name: name.to_owned(), value: Bytes::from_static(b"v") };
        let written = [
            Record::default(),
            Record {
                key: Some(Bytes::new()),
                value: Some(Bytes::from_static(&[0xFF; 300])),
                headers: vec![header(""), header("n\u{e9}")],
                event_time: Some(prost_types::Timestamp { seconds: i64::MIN, nanos: -1 }),
            },
        ];
        assert_eq!(scan_records(&encode(&written).payload, 2, RECORD_BYTES_MAX), Ok(()));
        // An unknown field of each kind: varint, eight bytes, a length, four bytes.
        let later: &[u8] =
            &[0x28, 0x80, 0x01, 0x31, 1, 2, 3, 4, 5, 6, 7, 8, 0x3A, 1, 9, 0x45, 1, 2, 3, 4];
        assert!(Record::decode(later).is_ok() && is_record(later));
    }

    #[test]
    fn bytes_that_are_no_record_are_found() {
        for wrong in [
            &[0, 0][..],                                             // field number 0
            &[0x08, 1],                                              // a key that is a varint
            &[0x12, 5, 1],                                           // a value that is too short
            &[0x1A, 3, 0x0A, 1, 0xFF], // a header whose name is not text
            &[0x1A, 2, 0x10, 1],       // a header whose value is a varint
            &[0x22, 2, 0x0A, 0],       // an event time whose seconds are bytes
            &[0x22, 1, 0x08],          // an event time that ends early
            &[0x2F],                   // wire type 7
            &[0x28, 255, 255, 255, 255, 255, 255, 255, 255, 255, 2], // a varint above 64 bits
        ] {
            assert!(Record::decode(wrong).is_err() && !is_record(wrong), "{wrong:?}");
            let prefix = [RECORD_TAG, 0, RECORD_TAG, u8::try_from(wrong.len()).unwrap()];
            let payload = [&prefix[..], wrong];
            let payload = payload.concat();
            assert_eq!(scan(&payload, 2, RECORD_BYTES_MAX), Ok(()));
            let found = ScanError::NotARecord { record: 1, byte: 4 };
            assert_eq!(scan_records(&payload, 2, RECORD_BYTES_MAX), Err(found));
        }
    }

    #[test]
    fn valid_records_decode_whatever_their_bytes() {
        let mut random = StdRng::seed_from_u64(5);
        let header = Header { name: "name".to_owned(), value: Bytes::from_static(b"value") };
        let record = Record {
            key: Some(Bytes::from_static(b"key")),
            value: Some(Bytes::from_static(b"a value")),
            headers: vec![header],
            event_time: Some(prost_types::Timestamp { seconds: 1_700_000_000, nanos: 5 }),
        };
        let good = record.encode_to_vec();
        let (mut valid, mut invalid) = (0, 0);
        for _ in 0..20_000 {
            let mut bytes = good.clone();
            for _ in 0..random.random_range(1..4) {
                let place = random.random_range(0..bytes.len());
                bytes[place] = random.random();
            }
            let is_decodable = Record::decode(&bytes[..]).is_ok();
            match is_record(&bytes) {
                true => {
                    assert!(is_decodable, "{bytes:?}");
                    valid += 1;
                }
                false => invalid += 1,
            }
        }
        assert!(valid > 1_000 && invalid > 1_000, "{valid} {invalid}");
    }

    #[test]
    fn scan_reports_the_position_of_an_error() {
        let payload = encode(&records(&[b"one", b"two"])).payload;
        let check = |bytes: &[u8], count| scan(bytes, count, RECORD_BYTES_MAX);
        assert_eq!(check(&payload, 2), Ok(()));
        assert_eq!(check(&payload, 0), Err(ScanError::Empty));
        assert_eq!(check(&payload, 3), Err(ScanError::TooFew { expected: 3, found: 2 }));
        assert_eq!(check(&payload, 1), Err(ScanError::TooMany { expected: 1, byte: 7 }));
        assert_eq!(check(&payload[..13], 2), Err(ScanError::Malformed { record: 1, byte: 9 }));
        assert_eq!(check(&payload[1..], 1), Err(ScanError::Malformed { record: 0, byte: 0 }));
        assert_eq!(check(&[0x0A], 1), Err(ScanError::Malformed { record: 0, byte: 1 }));
        assert_eq!(
            check(&[0x0A, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F], 1),
            Err(ScanError::Malformed { record: 0, byte: 1 })
        );
        assert_eq!(
            scan(&payload, 2, 4),
            Err(ScanError::RecordTooLarge { record: 0, byte: 0, bytes: 5, bytes_max: 4 })
        );
    }

    #[test]
    fn scan_never_panics_and_agrees_with_the_decoder() {
        let seed = seed();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let good = encode(&records(&[b"one", b"", b"three", b"four and some more"])).payload;
        for _ in 0..20_000 {
            let mut payload = if rng.random_bool(0.5) {
                good.to_vec()
            } else {
                (0..rng.random_range(0..40)).map(|_| rng.random_range(0..16u8)).collect()
            };
            for _ in 0..rng.random_range(0..4) {
                if !payload.is_empty() {
                    let index = rng.random_range(0..payload.len());
                    payload[index] = rng.random();
                }
            }
            payload.truncate(rng.random_range(0..=payload.len()));
            let expected = rng.random_range(0..6);
            if scan(&payload, expected, rng.random_range(0..64)).is_ok()
                && let Ok(list) = RecordList::decode(&payload[..])
            {
                assert_eq!(list.records.len(), expected as usize, "{payload:?}");
            }
        }
    }

    /// Returns `HELIX_SEED`, or a fixed seed if it is not set.
    fn seed() -> u64 {
        std::env::var("HELIX_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x4E11)
    }
}
