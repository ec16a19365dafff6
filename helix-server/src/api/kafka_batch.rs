//! Checks Kafka batches, version 2, before they go to a shard.
//! They are stored as they came, but opened once, so that readers can read all of them.

use helix_proto::batch;
use helix_proto::compression::{BatchCodec, Decompressor, UNCOMPRESSED_BYTES_MAX};
use helix_proto::kafka::{self, KafkaBatch, KafkaBatchError};
use helix_proto::log::v1::EncodedBatch;

use super::batch::{check_batch_bytes, new_batch, record_too_large};
use super::compressed::{AdmittedBatch, CompressedBatch, PayloadCodec};
use super::keys::check_keyed_records;
use super::settings::allowed_kafka_codec;
use crate::error::{Error, Result};
use crate::log::{PartitionId, PartitionSettings};
use crate::shard::NewBatch;

/// Checks a batch against the partition's settings, except for what compressed records hold.
pub(super) fn admit(
    encoded: EncodedBatch,
    partition: PartitionId,
    settings: &PartitionSettings,
) -> Result<AdmittedBatch> {
    let codec = check(&encoded, settings)?;
    let mut batch = new_batch(encoded, 0, partition);
    if codec.is_some() {
        let settings = *settings;
        let codec = PayloadCodec::Kafka;
        return Ok(AdmittedBatch::Compressed(CompressedBatch { batch, codec, settings }));
    }
    let bytes_max = settings.max_batch_bytes as usize;
    check_records(&mut batch, settings, &mut Decompressor::default(), bytes_max)?;
    Ok(AdmittedBatch::Uncompressed(batch))
}

/// Checks the batch's fields and its header. Returns the codec of its records.
fn check(encoded: &EncodedBatch, settings: &PartitionSettings) -> Result<Option<BatchCodec>> {
    if !settings.takes_kafka_batches() {
        return Err(Error::InvalidArgument {
            field: "batch.encoded.version",
            what: "is 2, a Kafka batch, which the topic does not take; send version 1, or set the \
                   topic's batch_format to kafka or any"
                .to_owned(),
        });
    }
    if encoded.compression != 0 {
        return Err(Error::InvalidArgument {
            field: "batch.encoded.compression",
            what: format!(
                "is {}, but a Kafka batch states its codec itself; leave it unset",
                encoded.compression
            ),
        });
    }
    // Before the checksums, which read the whole payload.
    check_batch_bytes(encoded.payload.len(), settings)?;
    if !batch::is_intact(encoded) {
        return Err(Error::CorruptBatch {
            what: "crc32 does not match the batch; it was damaged in transit, or the client \
                   computes the checksum differently"
                .to_owned(),
        });
    }
    let kafka = KafkaBatch::parse(&encoded.payload).map_err(kafka_error)?;
    kafka.check_appendable().map_err(kafka_error)?;
    let (stated, counted) = (encoded.record_count, kafka.record_count());
    if stated != counted {
        return Err(Error::RecordCountMismatch { stated, counted });
    }
    allowed_kafka_codec(kafka.codec(), settings)
}

/// Reads every record of a checked batch, and stores the size of its `RecordList` with it.
///
/// Decompresses at most `bytes_max` bytes.
///
/// # Errors
/// [`Error::BatchTooLarge`] for more, and the errors of version 1.
pub(super) fn check_records(
    batch: &mut NewBatch,
    settings: &PartitionSettings,
    decompressor: &mut Decompressor,
    bytes_max: usize,
) -> Result<()> {
    let kafka = KafkaBatch::parse_unverified(&batch.payload).map_err(kafka_error)?;
    let section = decompressor.decompress_kafka(&kafka, bytes_max).map_err(kafka_error)?;
    let record_bytes_max = settings.max_record_bytes as usize;
    let mut plain_bytes = 0;
    for record in kafka.records(section) {
        let record = record.map_err(kafka_error)?;
        if record.bytes.len() > record_bytes_max {
            return Err(record_too_large(record.bytes.len(), record_bytes_max));
        }
        plain_bytes += kafka::plain_bytes(&record);
    }
    if settings.is_compacted() {
        let keys = kafka.records(section).filter_map(Result::ok);
        check_keyed_records(keys.map(|record| record.key.is_some()))?;
    }
    // So that every reader can get the batch converted. Only batches of tiny records grow so much.
    if plain_bytes > UNCOMPRESSED_BYTES_MAX {
        return Err(too_large(plain_bytes, UNCOMPRESSED_BYTES_MAX));
    }
    batch.uncompressed_bytes = u32::try_from(plain_bytes).expect("below the limit");
    Ok(())
}

fn too_large(bytes: usize, bytes_max: usize) -> Error {
    Error::BatchTooLarge { bytes: bytes as u64, bytes_max: bytes_max as u64 }
}

fn kafka_error(error: KafkaBatchError) -> Error {
    match error {
        KafkaBatchError::Empty => Error::EmptyBatch,
        // The size beyond the limit is not known.
        KafkaBatchError::TooLarge { bytes_max } => too_large(bytes_max + 1, bytes_max),
        error => Error::CorruptBatch { what: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use bytes::Bytes;
    use helix_proto::compression::Compressor;
    use helix_proto::kafka::{KAFKA_BATCH_VERSION, KafkaBatchBuilder, KafkaCodec};
    use helix_proto::log::v1::{Record, RecordList};
    use prost::Message;

    use super::*;
    use crate::limits::DECOMPRESS_IN_PLACE_BYTES;

    const SETTINGS: PartitionSettings = PartitionSettings {
        retention_us: None,
        retention_bytes: None,
        max_batch_bytes: 1 << 20,
        max_record_bytes: 1 << 18,
        default_durability: 1,
        min_durability: 4,
        version: 1,
        allowed_compression: 0,
        takes_any_records: false,
        cleanup: 0,
        tombstone_retention_us: None,
        batch_format: 2,
    };

    fn records(value: &[u8], count: usize) -> Vec<Record> {
        let value = Bytes::copy_from_slice(value);
        vec![Record { value: Some(value), ..Record::default() }; count]
    }

    fn encode(records: &[Record], codec: Option<BatchCodec>) -> EncodedBatch {
        let mut compressor = Compressor::default();
        kafka::from_records(records, codec.map(|codec| (codec, &mut compressor))).unwrap()
    }

    fn admit_with(encoded: EncodedBatch, settings: &PartitionSettings) -> Result<NewBatch> {
        match admit(encoded, PartitionId(1), settings)? {
            AdmittedBatch::Uncompressed(batch) => Ok(batch),
            AdmittedBatch::Compressed(compressed) => {
                match compressed.verify_in_place(&mut Decompressor::default()) {
                    ControlFlow::Break(verified) => verified,
                    ControlFlow::Continue(large) => large.verify_with(&mut Decompressor::default()),
                }
            }
        }
    }

    #[test]
    fn batches_pass_as_they_came_with_the_size_of_their_record_list() {
        for value in [1, DECOMPRESS_IN_PLACE_BYTES] {
            for codec in [None, Some(BatchCodec::Lz4), Some(BatchCodec::Zstd)] {
                let records = records(&vec![7; value], 3);
                let encoded = encode(&records, codec);
                let admitted = admit_with(encoded.clone(), &SETTINGS).unwrap();
                assert_eq!(admitted.payload.as_ptr(), encoded.payload.as_ptr());
                assert_eq!((admitted.version, admitted.compression), (KAFKA_BATCH_VERSION, 0));
                let list = RecordList { records };
                assert_eq!(admitted.uncompressed_bytes as usize, list.encoded_len());
            }
        }
    }

    #[test]
    fn only_topics_with_the_setting_take_them() {
        let encoded = encode(&records(b"value", 1), None);
        for (batch_format, is_taken) in [(0, false), (2, true), (3, true), (9, false)] {
            let settings = PartitionSettings { batch_format, ..SETTINGS };
            let admitted = admit_with(encoded.clone(), &settings);
            assert_eq!(admitted.is_ok(), is_taken, "{batch_format}: {admitted:?}");
        }
    }

    #[test]
    fn each_defect_has_its_error() {
        let good = encode(&records(b"value", 2), None);
        let text = |encoded: EncodedBatch| admit_with(encoded, &SETTINGS).unwrap_err().to_string();
        let rebuilt = |count, payload| batch::from_kafka(count, payload);
        let compressed = EncodedBatch { compression: 2, ..good.clone() };
        assert!(text(compressed).contains("leave it unset"));
        let damaged = EncodedBatch { crc32: good.crc32 ^ 1, ..good.clone() };
        assert!(text(damaged).contains("crc32 does not match"));
        let mut bytes = good.payload.to_vec();
        *bytes.last_mut().unwrap() ^= 1;
        assert!(text(rebuilt(2, bytes.into())).contains("CRC-32C"));
        let miscounted = admit_with(rebuilt(3, good.payload), &SETTINGS).unwrap_err();
        let is_mismatch =
            matches!(miscounted, Error::RecordCountMismatch { stated: 3, counted: 2 });
        assert!(is_mismatch, "{miscounted}");
        let empty = rebuilt(0, kafka::empty_batch(0, 0).unwrap());
        assert!(matches!(admit_with(empty, &SETTINGS), Err(Error::EmptyBatch)));
        let garbage = rebuilt(1, Bytes::from_static(&[1; 70]));
        assert!(text(garbage).contains("Kafka message format 1"));
        // Offsets with a gap.
        let mut builder = KafkaBatchBuilder::default();
        builder.push(1, 0, None, None, []).unwrap();
        let gap = rebuilt(1, builder.finish(0, None, None).unwrap());
        assert!(text(gap).contains("lastOffsetDelta 1"));
    }

    #[test]
    fn limits_and_codecs_of_the_topic_hold() {
        let large = encode(&records(&[0; 100], 20_000), Some(BatchCodec::Zstd));
        let error = admit_with(large, &SETTINGS).unwrap_err();
        assert!(matches!(error, Error::BatchTooLarge { bytes_max: 1_048_576, .. }), "{error}");
        let record = encode(&records(&[0; 1 << 18], 1), None);
        let error = admit_with(record, &SETTINGS).unwrap_err();
        assert!(matches!(error, Error::RecordTooLarge { bytes_max: 262_144, .. }), "{error}");
        let lz4 = encode(&records(&[0; 100], 10), Some(BatchCodec::Lz4));
        let zstd_only = PartitionSettings { allowed_compression: 4, ..SETTINGS };
        let error = admit_with(lz4.clone(), &zstd_only).unwrap_err();
        assert!(matches!(error, Error::UnsupportedCompression { .. }), "{error}");
        for codec in [KafkaCodec::Gzip, KafkaCodec::Snappy] {
            let error = allowed_kafka_codec(codec, &SETTINGS).unwrap_err().to_string();
            assert!(error.contains(codec.name()) && error.contains("lz4, zstd"), "{error}");
        }
        let compacted = PartitionSettings { cleanup: 2, ..SETTINGS };
        let error = admit_with(lz4, &compacted).unwrap_err();
        assert!(matches!(error, Error::KeyRequired { record: 0 }), "{error}");
        let tiny = encode(&vec![Record::default(); 100], None);
        let keyed = PartitionSettings { max_batch_bytes: 100, ..SETTINGS };
        assert!(matches!(admit_with(tiny, &keyed), Err(Error::BatchTooLarge { .. })));
    }
}
