//! The wire contract of a batch: checksum, payload layout, encoding and decoding.
//!
//! Pure functions over bytes. Limits and storage are the server's concern.

mod record_scan;

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;

use crate::compression::{self, BatchCodec, DecompressError};
use crate::kafka::{self, KAFKA_BATCH_VERSION, KafkaBatchError};
use crate::log::v1::{Compression, EncodedBatch, Record, RecordList};
pub use record_scan::{ScanError, Walk, find_header, scan, scan_records, walk};

/// Version of a batch whose payload is a serialized `RecordList`. The other one is
/// [`KAFKA_BATCH_VERSION`].
pub const BATCH_VERSION: u32 = 1;

/// Tag byte of `RecordList.records`: field 1, length-delimited.
pub(crate) const RECORD_TAG: u8 = 0x0A;

/// Returns the CRC-32 that the payload's checksum continues from.
///
/// It is the CRC-32 (as in zlib) of the 12 bytes `version`, `record_count`, `compression`, each
/// little endian. `compression` is the number in the message, including unset (0).
pub fn crc_seed(version: u32, record_count: u32, compression: i32) -> u32 {
    let mut head = [0; 12];
    head[..4].copy_from_slice(&version.to_le_bytes());
    head[4..8].copy_from_slice(&record_count.to_le_bytes());
    head[8..].copy_from_slice(&compression.to_le_bytes());
    crc32fast::hash(&head)
}

/// Returns the checksum of a batch: [`crc_seed`] continued over `payload` as it is sent.
pub fn crc(version: u32, record_count: u32, compression: i32, payload: &[u8]) -> u32 {
    let seed = crc_seed(version, record_count, compression);
    let mut hasher = crc32fast::Hasher::new_with_initial(seed);
    hasher.update(payload);
    hasher.finalize()
}

/// Returns true if the batch's checksum matches its bytes.
pub fn is_intact(batch: &EncodedBatch) -> bool {
    batch.crc32 == crc(batch.version, batch.record_count, batch.compression, &batch.payload)
}

/// Builds an uncompressed batch. An empty slice gives an empty batch, which servers reject.
///
/// # Panics
/// If the records serialize to 4 GiB or more, or there are 2^32 records or more.
pub fn encode(records: &[Record]) -> EncodedBatch {
    let bytes: usize = records.iter().map(record_bytes).sum();
    let mut payload = BytesMut::with_capacity(bytes);
    for record in records {
        payload.put_u8(RECORD_TAG);
        record.encode_length_delimited(&mut payload).expect("a BytesMut grows");
    }
    let count = u32::try_from(records.len()).expect("fewer than 2^32 records in a batch");
    from_payload(count, payload.freeze())
}

/// Builds an uncompressed batch from a serialized `RecordList` of `record_count` records.
///
/// # Panics
/// If the payload is 4 GiB or more.
pub fn from_payload(record_count: u32, payload: Bytes) -> EncodedBatch {
    let compression = i32::from(Compression::None);
    EncodedBatch {
        version: BATCH_VERSION,
        record_count,
        compression,
        crc32: crc(BATCH_VERSION, record_count, compression, &payload),
        uncompressed_bytes: u32::try_from(payload.len()).expect("a batch is below 4 GiB"),
        payload,
    }
}

/// Builds a batch of version 2 from a Kafka batch of `record_count` records.
pub fn from_kafka(record_count: u32, payload: Bytes) -> EncodedBatch {
    let compression = i32::from(Compression::Unspecified);
    EncodedBatch {
        version: KAFKA_BATCH_VERSION,
        record_count,
        compression,
        crc32: crc(KAFKA_BATCH_VERSION, record_count, compression, &payload),
        uncompressed_bytes: 0,
        payload,
    }
}

/// Returns the bytes that a record takes in a payload: tag, length prefix, and the record.
pub fn record_bytes(record: &Record) -> usize {
    let bytes = record.encoded_len();
    1 + prost::length_delimiter_len(bytes) + bytes
}

/// Verifies a batch and returns its records; keys and values are slices of its uncompressed
/// payload. See [`kafka::decode`] for the offsets of a batch of version 2.
///
/// # Errors
/// See [`DecodeError`]; decoding the same batch again fails again.
pub fn decode(batch: &EncodedBatch) -> Result<RecordList, DecodeError> {
    if batch.version == KAFKA_BATCH_VERSION {
        return Ok(RecordList { records: kafka::decode(batch)?.records });
    }
    let list = RecordList::decode(uncompressed_payload(batch)?)?;
    if list.records.len() != batch.record_count as usize {
        return Err(DecodeError::Count { expected: batch.record_count, found: list.records.len() });
    }
    Ok(list)
}

/// Verifies a batch and returns its serialized `RecordList`, decompressed if necessary.
///
/// The records are not counted and not decoded, except those of version 2, which are converted.
///
/// # Errors
/// As [`decode`].
pub fn uncompressed_payload(batch: &EncodedBatch) -> Result<Bytes, DecodeError> {
    if batch.version == KAFKA_BATCH_VERSION {
        return kafka::plain_payload(batch);
    }
    if batch.version != BATCH_VERSION {
        return Err(DecodeError::Version(batch.version));
    }
    let codec = BatchCodec::from_wire(batch.compression)
        .map_err(|_| DecodeError::Compression(batch.compression))?;
    if !is_intact(batch) {
        return Err(DecodeError::Checksum);
    }
    let Some(codec) = codec else { return Ok(batch.payload.clone()) };
    let bytes = batch.uncompressed_bytes as usize;
    let decoded = compression::with_decompressor(|decompressor| {
        decompressor.decompress_to_bytes(codec, &batch.payload, bytes)
    });
    Ok(decoded?)
}

/// Returns true if a batch with this `compression` value has an uncompressed payload.
pub fn is_uncompressed(compression: i32) -> bool {
    matches!(Compression::try_from(compression), Ok(Compression::Unspecified | Compression::None))
}

/// The reason why a batch cannot be decoded.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The layout version is unknown.
    #[error("unknown batch version {0}")]
    Version(u32),
    /// The payload has a compression that this crate does not know.
    #[error("unknown compression {0}")]
    Compression(i32),
    /// The payload cannot be decompressed, or not to the stated size.
    #[error("cannot decompress the payload: {0}")]
    Decompress(#[from] DecompressError),
    /// The checksum does not match the bytes.
    #[error("checksum mismatch")]
    Checksum,
    /// The payload is not a Kafka batch.
    #[error("{0}")]
    Kafka(#[from] KafkaBatchError),
    /// The payload is not a `RecordList`.
    #[error("payload is not a list of records")]
    Malformed(#[from] prost::DecodeError),
    /// The payload has another number of records than `record_count`.
    #[error("record_count is {expected} but the payload has {found} records")]
    Count {
        /// `record_count` of the batch.
        expected: u32,
        /// Records in the payload.
        found: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD_BYTES_MAX: usize = 1 << 20;

    pub(super) fn records(values: &[&'static [u8]]) -> Vec<Record> {
        values
            .iter()
            .map(|value| Record { value: Some(Bytes::from_static(value)), ..Record::default() })
            .collect()
    }

    #[test]
    fn checksum_matches_zlib() {
        // python3: zlib.crc32(struct.pack("<III", 1, 2, 1)) and
        //          zlib.crc32(struct.pack("<III", 1, 2, 1) + b"hello helix")
        assert_eq!(crc_seed(1, 2, 1), 0x1AE9_EA18);
        assert_eq!(crc(1, 2, 1, b"hello helix"), 0xB092_75A7);
        assert_eq!(crc(1, 2, 1, b""), crc_seed(1, 2, 1));
    }

    /// Checks the vectors that clients in other languages read, too.
    #[test]
    fn batches_match_the_published_vectors() {
        let published = include_str!("../../docs/client-vectors.json");
        let published: serde_json::Value = serde_json::from_str(published).unwrap();
        let vectors = published["batches"].as_array().unwrap();
        assert!(vectors.len() >= 5, "{vectors:?}");
        let bytes = |digits: &serde_json::Value| -> Vec<u8> {
            let byte =
                |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
            digits.as_str().unwrap().as_bytes().chunks(2).map(byte).collect()
        };
        for vector in vectors {
            let payload = bytes(&vector["payload_hex"]);
            let batch = encode(&RecordList::decode(&payload[..]).unwrap().records);
            assert_eq!(batch.payload, payload, "{vector}");
            assert_eq!(u64::from(batch.version), vector["version"], "{vector}");
            assert_eq!(u64::from(batch.record_count), vector["record_count"], "{vector}");
            assert_eq!(i64::from(batch.compression), vector["compression"], "{vector}");
            assert_eq!(u64::from(batch.crc32), vector["crc32"], "{vector}");
        }
        // Made by the lz4 and zstandard packages of Python.
        let compressed = published["compressed_batches"].as_array().unwrap();
        let mut codecs = Vec::new();
        for vector in compressed {
            let number = |name: &str| u32::try_from(vector[name].as_u64().unwrap()).unwrap();
            let batch = EncodedBatch {
                version: number("version"),
                record_count: number("record_count"),
                compression: i32::try_from(number("compression")).unwrap(),
                crc32: number("crc32"),
                uncompressed_bytes: number("uncompressed_bytes"),
                payload: bytes(&vector["payload_hex"]).into(),
            };
            assert!(is_intact(&batch), "{vector}");
            let payload = uncompressed_payload(&batch).unwrap();
            assert_eq!(payload, bytes(&vector["uncompressed_hex"]), "{vector}");
            assert_eq!(scan(&payload, batch.record_count, RECORD_BYTES_MAX), Ok(()), "{vector}");
            codecs.push(batch.compression);
        }
        assert_eq!(codecs, [Compression::Lz4, Compression::Zstd].map(i32::from));
    }

    #[test]
    fn records_read_back_as_encoded() {
        let mut written = records(&[b"one", b"", b"three"]);
        written[0].key = Some(Bytes::from_static(b"key"));
        written[1].value = None;
        let batch = encode(&written);
        let list = RecordList { records: written.clone() };
        assert_eq!(batch.payload, list.encode_to_vec());
        assert_eq!(batch.payload.len(), written.iter().map(record_bytes).sum::<usize>());
        assert_eq!(scan(&batch.payload, 3, RECORD_BYTES_MAX), Ok(()));
        assert_eq!(decode(&batch).unwrap().records, written);
    }

    #[test]
    fn decoded_values_are_slices_of_the_payload() {
        let batch = encode(&records(&[b"a value that is long enough to see"]));
        let list = decode(&batch).unwrap();
        let value = list.records[0].value.as_ref().unwrap().as_ptr_range();
        let payload = batch.payload.as_ptr_range();
        assert!(payload.start <= value.start && value.end <= payload.end);
    }

    #[test]
    fn detects_every_flipped_bit() {
        let batch = encode(&records(&[b"one", b"two"]));
        for bit in 0..batch.payload.len() * 8 {
            let mut payload = batch.payload.to_vec();
            payload[bit / 8] ^= 1 << (bit % 8);
            let changed = EncodedBatch { payload: payload.into(), ..batch.clone() };
            assert!(matches!(decode(&changed), Err(DecodeError::Checksum)));
        }
        let recounted = EncodedBatch { record_count: 3, ..batch.clone() };
        assert!(!is_intact(&recounted));
        let compressed = EncodedBatch { compression: 0, ..batch };
        assert!(!is_intact(&compressed));
    }

    #[test]
    fn decode_reports_the_reason_of_a_rejection() {
        let batch = encode(&records(&[b"one"]));
        let version = EncodedBatch { version: 3, ..batch.clone() };
        assert!(matches!(decode(&version), Err(DecodeError::Version(3))));
        let unknown = EncodedBatch { compression: 9, ..batch.clone() };
        assert!(matches!(decode(&unknown), Err(DecodeError::Compression(9))));
        let recounted = from_payload(2, batch.payload);
        assert!(matches!(decode(&recounted), Err(DecodeError::Count { expected: 2, found: 1 })));
    }
}
