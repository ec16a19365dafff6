//! Checks a batch before it goes to a shard.
//! An encoded batch passes as one `Bytes`; its records are checked where they are, not decoded.
//! `compressed.rs` verifies what only decompression shows.

use helix_proto::batch::{self, BATCH_VERSION, ScanError};
use helix_proto::compression::{self, BatchCodec};
use helix_proto::kafka::{self, KAFKA_BATCH_VERSION};
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::{Batch, EncodedBatch, ProducerIdentity, Record};
use helix_proto::plain::PlainRecords;

use super::compressed::{AdmittedBatch, CompressedBatch, PayloadCodec};
use super::kafka_batch;
use super::keys::check_keys;
use super::settings::allowed_codec;
use crate::error::{Error, Result};
use crate::log::{
    Condition, FENCING_TOKEN_BYTES_MAX, FencingToken, PartitionId, PartitionSettings, ProducerStamp,
};
use crate::shard::{Durability, NewBatch};

const HEADER_NAME_BYTES_MAX: usize = 255;

/// Checks a batch against the partition's settings, except for what a compressed payload holds.
pub(super) fn admit(
    batch: Option<Batch>,
    partition: PartitionId,
    settings: &PartitionSettings,
) -> Result<AdmittedBatch> {
    let (encoded, codec) = match batch.and_then(|batch| batch.form) {
        Some(Form::Encoded(encoded)) if encoded.version == KAFKA_BATCH_VERSION => {
            return kafka_batch::admit(encoded, partition, settings);
        }
        Some(Form::Encoded(encoded)) => checked(encoded, settings)?,
        Some(Form::Records(plain)) if settings.takes_helix_batches() => {
            (encode(plain, settings)?, None)
        }
        Some(Form::Records(plain)) => {
            let kafka = as_kafka(encode(plain, settings)?)?;
            return kafka_batch::admit(kafka, partition, settings);
        }
        None => {
            return Err(Error::InvalidArgument {
                field: "batch",
                what: "must hold records or an encoded batch".to_owned(),
            });
        }
    };
    let uncompressed_bytes = codec.map_or(0, |_| encoded.uncompressed_bytes);
    let batch = new_batch(encoded, uncompressed_bytes, partition);
    Ok(match codec {
        None => AdmittedBatch::Uncompressed(batch),
        Some(codec) => {
            let settings = *settings;
            let codec = PayloadCodec::Helix(codec);
            AdmittedBatch::Compressed(CompressedBatch { batch, codec, settings })
        }
    })
}

/// Returns an encoded batch for a partition, without a producer and a condition.
pub(super) fn new_batch(
    encoded: EncodedBatch,
    uncompressed_bytes: u32,
    partition: PartitionId,
) -> NewBatch {
    NewBatch {
        partition,
        record_count: encoded.record_count,
        version: encoded.version,
        compression: encoded.compression,
        uncompressed_bytes,
        payload: encoded.payload,
        crc: encoded.crc32,
        producer: None,
        condition: Condition::default(),
        stamps: None,
    }
}

/// Converts a batch of plain records for a topic that takes only Kafka batches.
fn as_kafka(encoded: EncodedBatch) -> Result<EncodedBatch> {
    let invalid = |what: String| Error::InvalidArgument { field: "batch.records", what };
    let list = batch::decode(&encoded).map_err(|error| invalid(error.to_string()))?;
    kafka::from_records(&list.records, None).map_err(|error| invalid(error.to_string()))
}

/// Builds the condition of a batch whose ack waits for `durability`.
pub(super) fn condition(
    expected_offset: Option<u64>,
    fencing_token: Option<FencingToken>,
    durability: Durability,
) -> Result<Condition> {
    let condition = Condition { expected_offset, fencing_token };
    if durability.is_before_apply() && !condition.is_empty() {
        return Err(Error::InvalidArgument {
            field: "condition",
            what: "needs QUORUM_WRITTEN or QUORUM_SYNCED, whose acks follow the verdict".to_owned(),
        });
    }
    Ok(condition)
}

/// Parses a client's fencing token.
pub(super) fn fencing_token(field: &'static str, text: &str) -> Result<FencingToken> {
    FencingToken::new(text).ok_or_else(|| Error::InvalidArgument {
        field,
        what: format!("must have at most {FENCING_TOKEN_BYTES_MAX} bytes"),
    })
}

/// Builds the stamp from a client's producer and sequence; both or neither must be set.
pub(super) fn stamp(
    producer: Option<ProducerIdentity>,
    first_sequence: Option<u64>,
    record_count: u32,
) -> Result<Option<ProducerStamp>> {
    match producer {
        Some(producer) => numbered(producer, first_sequence, record_count).map(Some),
        None if first_sequence.is_none() => Ok(None),
        None => Err(wrong_sequence("requires a producer")),
    }
}

fn wrong_sequence(what: &str) -> Error {
    Error::InvalidArgument { field: "first_sequence", what: what.to_owned() }
}

/// Like [`stamp`], for a producer.
pub(super) fn numbered(
    producer: ProducerIdentity,
    first_sequence: Option<u64>,
    record_count: u32,
) -> Result<ProducerStamp> {
    let first_sequence =
        first_sequence.ok_or_else(|| wrong_sequence("is required with a producer"))?;
    if producer.producer_id == 0 {
        return Err(Error::InvalidArgument {
            field: "producer.producer_id",
            what: "must be an id from InitProducer".to_owned(),
        });
    }
    if first_sequence.checked_add(record_count.into()).is_none() {
        return Err(wrong_sequence("overflows with the batch's record_count"));
    }
    let ProducerIdentity { producer_id, epoch } = producer;
    Ok(ProducerStamp::new(producer_id, epoch, first_sequence))
}

fn checked(
    encoded: EncodedBatch,
    settings: &PartitionSettings,
) -> Result<(EncodedBatch, Option<BatchCodec>)> {
    if encoded.version != BATCH_VERSION {
        return Err(Error::CorruptBatch {
            what: format!("batch version {} is unknown", encoded.version),
        });
    }
    if !settings.takes_helix_batches() {
        return Err(Error::InvalidArgument {
            field: "batch.encoded.version",
            what: "is 1, which the topic does not take; send version 2, a Kafka batch, or set the \
                   topic's batch_format to any"
                .to_owned(),
        });
    }
    let codec = allowed_codec(encoded.compression, settings)?;
    let bytes = encoded.payload.len();
    if codec.is_some() {
        // So that the batch fits every limit also if it is decompressed for a reader.
        check_batch_bytes(encoded.uncompressed_bytes as usize, settings)?;
    } else if encoded.uncompressed_bytes != 0 && encoded.uncompressed_bytes as usize != bytes {
        // The checksum does not cover it: a wrong value would be lost silently.
        return Err(Error::InvalidArgument {
            field: "batch.encoded.uncompressed_bytes",
            what: format!(
                "is {}, but the uncompressed payload has {bytes} bytes; leave it unset, or set \
                 that",
                encoded.uncompressed_bytes
            ),
        });
    }
    // Before the checksum, which reads the whole payload.
    check_batch_bytes(bytes, settings)?;
    if !batch::is_intact(&encoded) {
        return Err(Error::CorruptBatch {
            what: "crc32 does not match the batch; it was damaged in transit, or the client \
                   computes the checksum differently"
                .to_owned(),
        });
    }
    if let Some(codec) = codec {
        // Before memory is taken for the decompressed payload.
        compression::check_sizes(codec, &encoded.payload, encoded.uncompressed_bytes as usize)
            .map_err(|error| Error::CorruptBatch { what: error.to_string() })?;
        if encoded.record_count == 0 {
            return Err(Error::EmptyBatch);
        }
        return Ok((encoded, Some(codec)));
    }
    check_records(&encoded.payload, encoded.record_count, settings)?;
    check_keys(&encoded.payload, settings)?;
    Ok((encoded, None))
}

/// Checks the number and sizes of the records in an uncompressed payload and, unless the topic
/// takes any, that each is a `Record` message.
pub(super) fn check_records(
    payload: &[u8],
    stated: u32,
    settings: &PartitionSettings,
) -> Result<()> {
    let record_bytes_max = settings.max_record_bytes as usize;
    let scanned = match settings.takes_any_records {
        true => batch::scan(payload, stated, record_bytes_max),
        false => batch::scan_records(payload, stated, record_bytes_max),
    };
    scanned.map_err(|error| scan_error(error, stated, payload, record_bytes_max))
}

/// Encodes the plain form.
///
/// Decodes its records one at a time to check them. Decoded all at once, they could take a hundred
/// times their encoded size.
fn encode(plain: PlainRecords, settings: &PartitionSettings) -> Result<EncodedBatch> {
    use prost::Message;

    let payload = plain.into_payload();
    check_batch_bytes(payload.len(), settings)?;
    let mut count = 0;
    for range in batch::walk(&payload, settings.max_record_bytes as usize) {
        let range = range.map_err(|error| match error {
            ScanError::RecordTooLarge { bytes, bytes_max, .. } => {
                record_too_large(bytes, bytes_max)
            }
            other => Error::CorruptBatch { what: other.to_string() },
        })?;
        let record = Record::decode(payload.slice(range)).map_err(|error| Error::CorruptBatch {
            what: format!("record {count} of the batch is not a Record message: {error}"),
        })?;
        check_headers(count, &record)?;
        count += 1;
    }
    if count == 0 {
        return Err(Error::EmptyBatch);
    }
    // The rule of the encoded form: a decoder skips groups.
    check_records(&payload, count, settings)?;
    check_keys(&payload, settings)?;
    Ok(batch::from_payload(count, payload))
}

fn check_headers(number: u32, record: &Record) -> Result<()> {
    let lengths = record.headers.iter().map(|header| header.name.len());
    match lengths.into_iter().find(|bytes| !(1..=HEADER_NAME_BYTES_MAX).contains(bytes)) {
        None => Ok(()),
        Some(bytes) => Err(Error::InvalidArgument {
            field: "batch.records.headers.name",
            what: format!(
                "record {number} has a header name of {bytes} bytes; it must have \
                 1..={HEADER_NAME_BYTES_MAX}"
            ),
        }),
    }
}

pub(super) fn check_batch_bytes(bytes: usize, settings: &PartitionSettings) -> Result<()> {
    if bytes <= settings.max_batch_bytes as usize {
        return Ok(());
    }
    let bytes_max = u64::from(settings.max_batch_bytes);
    Err(Error::BatchTooLarge { bytes: bytes as u64, bytes_max })
}

pub(super) fn record_too_large(bytes: usize, bytes_max: usize) -> Error {
    Error::RecordTooLarge { bytes: bytes as u64, bytes_max: bytes_max as u64 }
}

/// Converts the error of the scan of a payload whose batch states `stated` records.
fn scan_error(error: ScanError, stated: u32, payload: &[u8], record_bytes_max: usize) -> Error {
    match error {
        ScanError::Empty => Error::EmptyBatch,
        ScanError::TooFew { found, .. } => Error::RecordCountMismatch { stated, counted: found },
        ScanError::TooMany { .. } => {
            let records = batch::walk(payload, record_bytes_max);
            let counted = records.filter(|record| record.is_ok()).count();
            let counted = u32::try_from(counted).expect("a payload is below 4 GiB");
            if counted == stated {
                let what = "something stands behind the records that is not a record";
                return Error::CorruptBatch { what: what.to_owned() };
            }
            Error::RecordCountMismatch { stated, counted }
        }
        ScanError::RecordTooLarge { bytes, bytes_max, .. } => record_too_large(bytes, bytes_max),
        ScanError::Malformed { .. } => Error::CorruptBatch { what: error.to_string() },
        ScanError::NotARecord { .. } => Error::CorruptBatch {
            what: format!(
                "{error}: consumers could not decode it; compare the client with docs/clients.md, \
                 or turn the topic's validate_records off"
            ),
        },
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use helix_proto::compression::{Compressor, Decompressor};

    use super::*;

    const SETTINGS: PartitionSettings = PartitionSettings {
        retention_us: None,
        retention_bytes: None,
        max_batch_bytes: 64,
        max_record_bytes: 16,
        default_durability: 1,
        min_durability: 4,
        version: 1,
        allowed_compression: 0,
        takes_any_records: false,
        cleanup: 0,
        tombstone_retention_us: None,
        batch_format: 0,
    };

    fn records(values: &[&'static str]) -> Vec<Record> {
        let record = |value: &&'static str| Record {
            value: Some(Bytes::from_static(value.as_bytes())),
            ..Record::default()
        };
        values.iter().map(record).collect()
    }

    fn admit_with(form: Form, settings: &PartitionSettings) -> Result<NewBatch> {
        match admit(Some(Batch { form: Some(form) }), PartitionId(1), settings)? {
            AdmittedBatch::Uncompressed(batch) => Ok(batch),
            AdmittedBatch::Compressed(compressed) => {
                compressed.verify_with(&mut Decompressor::default())
            }
        }
    }

    fn admit_encoded(encoded: EncodedBatch) -> Result<NewBatch> {
        admit_with(Form::Encoded(encoded), &SETTINGS)
    }

    fn admit_plain(records: Vec<Record>) -> Result<NewBatch> {
        admit_with(Form::Records(PlainRecords::from(&records[..])), &SETTINGS)
    }

    /// Returns the batch with other fields or another payload, and a checksum that fits.
    fn rebuilt(batch: EncodedBatch) -> EncodedBatch {
        let EncodedBatch { version, record_count, compression, .. } = batch;
        let crc32 = batch::crc(version, record_count, compression, &batch.payload);
        EncodedBatch { crc32, ..batch }
    }

    #[test]
    fn an_encoded_batch_passes_uncopied() {
        let encoded = batch::encode(&records(&["one", "two"]));
        let admitted = admit_encoded(encoded.clone()).unwrap();
        assert_eq!(admitted.payload.as_ptr(), encoded.payload.as_ptr());
        assert_eq!((admitted.record_count, admitted.crc), (2, encoded.crc32));
    }

    #[test]
    fn both_forms_become_the_same_batch() {
        let plain = admit_plain(records(&["one", "two"])).unwrap();
        let encoded = admit_encoded(batch::encode(&records(&["one", "two"]))).unwrap();
        assert_eq!((plain.payload, plain.crc), (encoded.payload, encoded.crc));
    }

    #[test]
    fn each_defect_has_its_error() {
        let good = batch::encode(&records(&["one", "two"]));
        let with = |count| batch::from_payload(count, good.payload.clone());
        assert!(matches!(
            admit_encoded(with(3)),
            Err(Error::RecordCountMismatch { stated: 3, counted: 2 })
        ));
        assert!(matches!(
            admit_encoded(with(1)),
            Err(Error::RecordCountMismatch { stated: 1, counted: 2 })
        ));
        assert!(matches!(admit_encoded(with(0)), Err(Error::EmptyBatch)));
        let version = EncodedBatch { version: 3, ..good.clone() };
        assert!(matches!(admit_encoded(version), Err(Error::CorruptBatch { .. })));
        let unknown = EncodedBatch { compression: 9, ..good.clone() };
        assert!(matches!(admit_encoded(unknown), Err(Error::UnsupportedCompression { .. })));
        let changed = EncodedBatch { crc32: good.crc32 ^ 1, ..good };
        assert!(matches!(admit_encoded(changed), Err(Error::CorruptBatch { .. })));
        let garbage = batch::from_payload(1, Bytes::from_static(b"garbage"));
        assert!(matches!(admit_encoded(garbage), Err(Error::CorruptBatch { .. })));
        assert!(matches!(
            admit(None, PartitionId(1), &SETTINGS),
            Err(Error::InvalidArgument { field: "batch", .. })
        ));
    }

    #[test]
    fn records_that_no_consumer_can_decode_are_rejected_unless_the_topic_takes_them() {
        // Field number 0 is invalid in every message.
        let garbage: Vec<u8> = [&[0x0A, 14][..], &[0; 14]].concat().repeat(4);
        let plain = batch::from_payload(4, garbage.into());
        let any = PartitionSettings { takes_any_records: true, ..SETTINGS };
        let codecs = BatchCodec::ALL
            .map(|codec| Compressor::default().compress(codec, &plain, usize::MAX).unwrap());
        for sent in codecs.into_iter().chain([plain]) {
            match admit_encoded(sent.clone()) {
                Err(Error::CorruptBatch { what }) => {
                    assert!(what.starts_with("record 0 at byte 2 is not a Record"), "{what}");
                }
                other => panic!("{other:?}"),
            }
            assert_eq!(admit_with(Form::Encoded(sent), &any).unwrap().record_count, 4);
        }
    }

    #[test]
    fn compressed_batches_pass_as_they_were_sent() {
        let plain = batch::encode(&records(&["aaaaaaaaaaa"; 4]));
        for codec in BatchCodec::ALL {
            let sent = Compressor::default().compress(codec, &plain, usize::MAX).unwrap();
            let admitted = admit_encoded(sent.clone()).unwrap();
            assert_eq!(admitted.payload.as_ptr(), sent.payload.as_ptr());
            assert_eq!((admitted.record_count, admitted.crc), (4, sent.crc32));
            assert_eq!(admitted.uncompressed_bytes, sent.uncompressed_bytes);
        }
    }

    #[test]
    fn lies_about_a_compressed_batch_are_rejected() {
        let plain = batch::encode(&records(&["aaaaaaaaaaa"; 4]));
        for codec in BatchCodec::ALL {
            let sent = Compressor::default().compress(codec, &plain, usize::MAX).unwrap();
            let counted = |record_count| {
                admit_encoded(rebuilt(EncodedBatch { record_count, ..sent.clone() }))
            };
            assert!(matches!(counted(0), Err(Error::EmptyBatch)));
            for stated in [3, 5] {
                let Err(Error::RecordCountMismatch { stated: 3 | 5, counted: 4 }) = counted(stated)
                else {
                    panic!("{codec:?}: {stated} records were admitted");
                };
            }
            let sized = |uncompressed_bytes| {
                admit_encoded(EncodedBatch { uncompressed_bytes, ..sent.clone() })
            };
            for bytes in [0, 1, 59, 61] {
                assert!(matches!(sized(bytes), Err(Error::CorruptBatch { .. })), "{bytes}");
            }
            let limit = u64::from(SETTINGS.max_batch_bytes);
            let Err(Error::BatchTooLarge { bytes: 65, bytes_max }) = sized(65) else { panic!() };
            assert_eq!(bytes_max, limit);
            assert!(matches!(sized(u32::MAX), Err(Error::BatchTooLarge { .. })));
            let half = sent.payload.slice(..sent.payload.len() / 2);
            let truncated = rebuilt(EncodedBatch { payload: half, ..sent.clone() });
            assert!(matches!(admit_encoded(truncated), Err(Error::CorruptBatch { .. })));
            let damaged = EncodedBatch { crc32: sent.crc32 ^ 1, ..sent.clone() };
            assert!(matches!(admit_encoded(damaged), Err(Error::CorruptBatch { .. })));
            let long = batch::encode(&records(&["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"]));
            let long = Compressor::default().compress(codec, &long, usize::MAX).unwrap();
            let Err(Error::RecordTooLarge { bytes_max: 16, .. }) = admit_encoded(long) else {
                panic!("{codec:?}: a large record was admitted");
            };
        }
    }

    #[test]
    fn topics_refuse_codecs_that_they_do_not_allow() {
        let plain = batch::encode(&records(&["aaaaaaaaaaa"; 4]));
        let lz4 = Compressor::default().compress(BatchCodec::Lz4, &plain, usize::MAX).unwrap();
        for (allowed_compression, is_allowed) in [(0, true), (2, false), (3, true), (4, false)] {
            let settings = PartitionSettings { allowed_compression, ..SETTINGS };
            admit_with(Form::Encoded(plain.clone()), &settings).unwrap();
            match admit_with(Form::Encoded(lz4.clone()), &settings) {
                Ok(_) => assert!(is_allowed),
                Err(Error::UnsupportedCompression { what, allowed }) => {
                    assert!(!is_allowed && what.contains("lz4 is not allowed"), "{what}");
                    assert!(!allowed.contains(&2), "{allowed:?}");
                }
                Err(other) => panic!("{other}"),
            }
        }
    }

    #[test]
    fn limits_hold_for_both_forms() {
        let long = records(&["a record of more than sixteen bytes"]);
        assert!(matches!(
            admit_encoded(batch::encode(&long)),
            Err(Error::RecordTooLarge { bytes_max: 16, .. })
        ));
        assert!(matches!(admit_plain(long), Err(Error::RecordTooLarge { bytes_max: 16, .. })));
        let many = records(&["0123456789"; 6]);
        assert!(matches!(
            admit_encoded(batch::encode(&many)),
            Err(Error::BatchTooLarge { bytes: 84, bytes_max: 64 })
        ));
        assert!(matches!(
            admit_plain(many),
            Err(Error::BatchTooLarge { bytes: 84, bytes_max: 64 })
        ));
        assert!(matches!(admit_plain(Vec::new()), Err(Error::EmptyBatch)));
    }

    #[test]
    fn header_names_are_bounded_in_plain_records() {
        use helix_proto::log::v1::Header;

        let named = |bytes: usize| {
            let header = Header { name: "n".repeat(bytes), value: Bytes::new() };
            vec![Record { headers: vec![header], ..Record::default() }]
        };
        let settings =
            PartitionSettings { max_batch_bytes: 1_000, max_record_bytes: 1_000, ..SETTINGS };
        let admit = |form| admit_with(form, &settings);
        for (bytes, is_fine) in [(0, false), (1, true), (255, true), (256, false)] {
            let admitted = admit(Form::Records(PlainRecords::from(&named(bytes)[..])));
            match admitted {
                Ok(_) => assert!(is_fine, "{bytes}"),
                Err(Error::InvalidArgument { field: "batch.records.headers.name", what }) => {
                    assert!(!is_fine && what.contains("record 0"), "{bytes}: {what}");
                }
                Err(other) => panic!("{bytes}: {other}"),
            }
            // The server does not decode these.
            admit(Form::Encoded(batch::encode(&named(bytes)))).unwrap();
        }
    }

    #[test]
    fn rejects_an_invalid_plain_record_by_its_number() {
        use prost::Message;

        // The second one is field 1, a varint, which no Record has.
        let plain = PlainRecords::decode(&[0x0A, 0x00, 0x0A, 0x02, 0x08, 0x01][..]).unwrap();
        let batch = Batch { form: Some(Form::Records(plain)) };
        let Err(Error::CorruptBatch { what }) = admit(Some(batch), PartitionId(1), &SETTINGS)
        else {
            panic!("it was admitted");
        };
        assert!(what.contains("record 1 "), "{what}");
    }

    #[test]
    fn conditions_need_an_ack_after_the_verdict() {
        let token = fencing_token("fencing_token", &"x".repeat(64)).unwrap();
        assert!(fencing_token("fencing_token", &"x".repeat(65)).is_err());
        for (durability, is_late) in [
            (Durability::QuorumSynced, true),
            (Durability::QuorumWritten, true),
            (Durability::LeaderWritten, false),
            (Durability::None, false),
        ] {
            assert!(condition(None, None, durability).unwrap().is_empty());
            assert_eq!(condition(Some(0), None, durability).is_ok(), is_late);
            assert_eq!(condition(None, Some(token.clone()), durability).is_ok(), is_late);
        }
    }

    #[test]
    fn producer_and_sequence_come_together_or_not_at_all() {
        let producer = Some(ProducerIdentity { producer_id: 7, epoch: 2 });
        let expected = ProducerStamp::new(7, 2, 40);
        assert_eq!(stamp(producer, Some(40), 3).unwrap(), Some(expected));
        assert_eq!(stamp(None, None, 3).unwrap(), None);
        assert!(stamp(producer, None, 3).is_err());
        assert!(stamp(None, Some(40), 3).is_err());
        assert!(stamp(producer, Some(u64::MAX), 3).is_err());
        let zero = Some(ProducerIdentity { producer_id: 0, epoch: 0 });
        assert!(stamp(zero, Some(0), 3).is_err());
    }
}
