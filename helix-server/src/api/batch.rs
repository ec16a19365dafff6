//! Checks a batch before it goes to a shard.
//! An encoded batch passes as one `Bytes`; its records are never decoded.

use helix_proto::batch::{self, BATCH_VERSION, ScanError};
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::{Batch, EncodedBatch, ProducerIdentity, Record};
use helix_proto::plain::PlainRecords;

use crate::error::{Error, Result};
use crate::log::{
    Condition, FENCING_TOKEN_BYTES_MAX, FencingToken, PartitionId, PartitionSettings, ProducerStamp,
};
use crate::shard::{Durability, NewBatch};

const HEADER_NAME_BYTES_MAX: usize = 255;

/// Checks a batch against the partition's settings.
pub(super) fn admit(
    batch: Option<Batch>,
    partition: PartitionId,
    settings: &PartitionSettings,
) -> Result<NewBatch> {
    let encoded = match batch.and_then(|batch| batch.form) {
        Some(Form::Encoded(encoded)) => checked(encoded, settings)?,
        Some(Form::Records(plain)) => encode(plain, settings)?,
        None => {
            return Err(Error::InvalidArgument {
                field: "batch",
                what: "must hold records or an encoded batch".to_owned(),
            });
        }
    };
    Ok(NewBatch {
        partition,
        record_count: encoded.record_count,
        version: encoded.version,
        compression: encoded.compression,
        payload: encoded.payload,
        crc: encoded.crc32,
        producer: None,
        condition: Condition::default(),
    })
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
    Ok(ProducerStamp { producer_id, epoch, first_sequence })
}

fn checked(encoded: EncodedBatch, settings: &PartitionSettings) -> Result<EncodedBatch> {
    if encoded.version != BATCH_VERSION {
        return Err(Error::CorruptBatch {
            what: format!("batch version {} is unknown", encoded.version),
        });
    }
    if !batch::is_uncompressed(encoded.compression) {
        return Err(Error::UnsupportedCompression { compression: encoded.compression });
    }
    // The checksum does not cover it: a wrong value would be lost silently.
    let bytes = encoded.payload.len();
    if encoded.uncompressed_bytes != 0 && encoded.uncompressed_bytes as usize != bytes {
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
    check_batch_bytes(encoded.payload.len(), settings)?;
    if !batch::is_intact(&encoded) {
        return Err(Error::CorruptBatch {
            what: "crc32 does not match the batch; it was damaged in transit, or the client \
                   computes the checksum differently"
                .to_owned(),
        });
    }
    let record_bytes_max = settings.max_record_bytes as usize;
    batch::scan(&encoded.payload, encoded.record_count, record_bytes_max)
        .map_err(|error| scan_error(error, &encoded, record_bytes_max))?;
    Ok(encoded)
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

fn check_batch_bytes(bytes: usize, settings: &PartitionSettings) -> Result<()> {
    if bytes <= settings.max_batch_bytes as usize {
        return Ok(());
    }
    let bytes_max = u64::from(settings.max_batch_bytes);
    Err(Error::BatchTooLarge { bytes: bytes as u64, bytes_max })
}

fn record_too_large(bytes: usize, bytes_max: usize) -> Error {
    Error::RecordTooLarge { bytes: bytes as u64, bytes_max: bytes_max as u64 }
}

fn scan_error(error: ScanError, encoded: &EncodedBatch, record_bytes_max: usize) -> Error {
    let stated = encoded.record_count;
    match error {
        ScanError::Empty => Error::EmptyBatch,
        ScanError::TooFew { found, .. } => Error::RecordCountMismatch { stated, counted: found },
        ScanError::TooMany { .. } => {
            let records = batch::walk(&encoded.payload, record_bytes_max);
            let counted = records.filter(|record| record.is_ok()).count();
            let counted = u32::try_from(counted).expect("a payload is below 4 GiB");
            Error::RecordCountMismatch { stated, counted }
        }
        ScanError::RecordTooLarge { bytes, bytes_max, .. } => record_too_large(bytes, bytes_max),
        ScanError::Malformed { .. } => Error::CorruptBatch { what: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use helix_proto::log::v1::Compression;

    use super::*;

    const SETTINGS: PartitionSettings = PartitionSettings {
        retention_us: None,
        retention_bytes: None,
        max_batch_bytes: 64,
        max_record_bytes: 16,
        default_durability: 1,
        min_durability: 4,
        version: 1,
    };

    fn records(values: &[&'static str]) -> Vec<Record> {
        let record = |value: &&'static str| Record {
            value: Some(Bytes::from_static(value.as_bytes())),
            ..Record::default()
        };
        values.iter().map(record).collect()
    }

    fn admit_encoded(encoded: EncodedBatch) -> Result<NewBatch> {
        admit(Some(Batch { form: Some(Form::Encoded(encoded)) }), PartitionId(1), &SETTINGS)
    }

    fn admit_plain(records: Vec<Record>) -> Result<NewBatch> {
        let form = Form::Records(PlainRecords::from(&records[..]));
        admit(Some(Batch { form: Some(form) }), PartitionId(1), &SETTINGS)
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
        let version = EncodedBatch { version: 2, ..good.clone() };
        assert!(matches!(admit_encoded(version), Err(Error::CorruptBatch { .. })));
        let lz4 = EncodedBatch { compression: Compression::Lz4.into(), ..good.clone() };
        assert!(matches!(
            admit_encoded(lz4),
            Err(Error::UnsupportedCompression { compression: 2 })
        ));
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
        let admit = |form| admit(Some(Batch { form: Some(form) }), PartitionId(1), &settings);
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
        let expected = ProducerStamp { producer_id: 7, epoch: 2, first_sequence: 40 };
        assert_eq!(stamp(producer, Some(40), 3).unwrap(), Some(expected));
        assert_eq!(stamp(None, None, 3).unwrap(), None);
        assert!(stamp(producer, None, 3).is_err());
        assert!(stamp(None, Some(40), 3).is_err());
        assert!(stamp(producer, Some(u64::MAX), 3).is_err());
        let zero = Some(ProducerIdentity { producer_id: 0, epoch: 0 });
        assert!(stamp(zero, Some(0), 3).is_err());
    }
}
