//! Reads the key of a serialized record without decoding the record.
//!
//! Follows the rules of protobuf: fields come in any order, the last of several counts, and
//! unknown fields are skipped.

use std::ops::Range;

use prost::bytes::Buf;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

/// Field numbers of `Record`.
const KEY: u32 = 1;
const VALUE: u32 = 2;

/// The fields of a record that compaction by key needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordFields {
    /// Bytes of the key within the record; `None` if it has no key, which an empty key is not.
    pub key: Option<Range<usize>>,
    /// The record has a value. A keyed record without one is a tombstone.
    pub has_value: bool,
}

/// A record that is not a serialized `Record`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a Record message")]
pub struct NotARecordError;

/// Reads the key of a serialized record, and whether it has a value.
///
/// # Errors
/// Fails on bytes that are not a `Record`. Headers and the event time are not decoded.
pub fn record_fields(record: &[u8]) -> Result<RecordFields, NotARecordError> {
    let mut found = RecordFields { key: None, has_value: false };
    let mut rest = record;
    while rest.has_remaining() {
        let (tag, wire_type) = decode_key(&mut rest).map_err(|_| NotARecordError)?;
        if tag != KEY && tag != VALUE {
            skip_field(wire_type, tag, &mut rest, DecodeContext::default())
                .map_err(|_| NotARecordError)?;
            continue;
        }
        if wire_type != WireType::LengthDelimited {
            return Err(NotARecordError);
        }
        let bytes = decode_varint(&mut rest).map_err(|_| NotARecordError)?;
        let bytes = usize::try_from(bytes).map_err(|_| NotARecordError)?;
        let start = record.len() - rest.len();
        rest = rest.get(bytes..).ok_or(NotARecordError)?;
        match tag {
            KEY => found.key = Some(start..start + bytes),
            _ => found.has_value = true,
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use prost::Message;
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;
    use crate::log::v1::{Header, Record};

    #[test]
    fn fields_agree_with_decoded_records() {
        let mut rng = StdRng::seed_from_u64(42);
        for _ in 0..5_000 {
            let mut bytes = |share: f64| {
                let is_set = rng.random_bool(share);
                is_set.then(|| Bytes::from(vec![7_u8; rng.random_range(0..300)]))
            };
            let (key, value) = (bytes(0.8), bytes(0.8));
            let header = |n: u8| Header { name: "h".to_owned(), value: vec![n; 9].into() };
            let headers = (0..rng.random_range(0..3)).map(header).collect();
            let record = Record { key, value, headers, event_time: None };
            let mut encoded = record.encode_to_vec();
            if rng.random_bool(0.3) {
                for _ in 0..rng.random_range(1..4) {
                    let at = rng.random_range(0..=encoded.len());
                    match rng.random_range(0..3) {
                        0 => encoded.truncate(at),
                        1 => encoded.insert(at, rng.random()),
                        _ if at < encoded.len() => encoded[at] ^= 1 << rng.random_range(0..8),
                        _ => {}
                    }
                }
            }
            let Ok(fields) = record_fields(&encoded) else {
                assert!(Record::decode(&encoded[..]).is_err());
                continue;
            };
            // Nested fields may still be invalid.
            let Ok(decoded) = Record::decode(&encoded[..]) else { continue };
            let key = fields.key.map(|range| &encoded[range]);
            assert_eq!(key, decoded.key.as_deref());
            assert_eq!(fields.has_value, decoded.value.is_some());
        }
    }

    #[test]
    fn empty_keys_are_keys_and_the_last_one_counts() {
        let record = Record { key: Some(Bytes::new()), ..Record::default() };
        let fields = record_fields(&record.encode_to_vec()).unwrap();
        assert_eq!(fields, RecordFields { key: Some(2..2), has_value: false });
        let twice = [&[0x0A, 1, b'a', 0x12, 0][..], &[0x0A, 1, b'b']].concat();
        let fields = record_fields(&twice).unwrap();
        assert_eq!(fields, RecordFields { key: Some(7..8), has_value: true });
        assert_eq!(record_fields(&[0x0A, 9, 1]), Err(NotARecordError));
        assert_eq!(record_fields(&[0x08, 1]), Err(NotARecordError), "a key that is a number");
        assert_eq!(record_fields(&[]), Ok(RecordFields { key: None, has_value: false }));
    }
}
