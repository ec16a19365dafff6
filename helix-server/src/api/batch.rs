//! The door for a batch: everything that is checked before it may go on to a shard.
//! A batch in its encoded form passes as one `Bytes`; its records are never decoded.

use helix_proto::batch::{self, BATCH_VERSION, ScanError};
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::{Batch, EncodedBatch, ProducerIdentity, RecordList};

use crate::error::{Error, Result};
use crate::log::{PartitionId, PartitionSettings, ProducerStamp};
use crate::shard::NewBatch;

/// Checks a batch for a partition with these settings.
pub(super) fn admit(
    batch: Option<Batch>,
    partition: PartitionId,
    settings: &PartitionSettings,
) -> Result<NewBatch> {
    let encoded = match batch.and_then(|batch| batch.form) {
        Some(Form::Encoded(encoded)) => checked(encoded, settings)?,
        Some(Form::Records(list)) => encode(&list, settings)?,
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
    })
}

/// Identity and sequence of a batch as the client gave them; both or neither.
pub(super) fn stamp(
    producer: Option<ProducerIdentity>,
    first_sequence: Option<u64>,
    record_count: u32,
) -> Result<Option<ProducerStamp>> {
    let refused =
        |what: &str| Err(Error::InvalidArgument { field: "first_sequence", what: what.to_owned() });
    let (producer, first_sequence) = match (producer, first_sequence) {
        (Some(producer), Some(first_sequence)) => (producer, first_sequence),
        (None, None) => return Ok(None),
        (Some(_), None) => return refused("is required with a producer"),
        (None, Some(_)) => return refused("means nothing without a producer"),
    };
    if producer.producer_id == 0 {
        return Err(Error::InvalidArgument {
            field: "producer.producer_id",
            what: "must be one that InitProducer issued".to_owned(),
        });
    }
    if first_sequence.checked_add(record_count.into()).is_none() {
        return refused("leaves no room for the batch's records");
    }
    let ProducerIdentity { producer_id, epoch } = producer;
    Ok(Some(ProducerStamp { producer_id, epoch, first_sequence }))
}

fn checked(encoded: EncodedBatch, settings: &PartitionSettings) -> Result<EncodedBatch> {
    if encoded.version != BATCH_VERSION {
        return Err(Error::CorruptBatch {
            what: format!("batch version {} is not known to this version", encoded.version),
        });
    }
    if !batch::is_uncompressed(encoded.compression) {
        return Err(Error::UnsupportedCompression { compression: encoded.compression });
    }
    // Before the checksum: what is too large is not worth reading.
    check_batch_bytes(encoded.payload.len(), settings)?;
    if !batch::is_intact(&encoded) {
        return Err(Error::CorruptBatch {
            what: "crc32 does not match the batch; it was damaged on its way, or the client \
                   computes the checksum differently"
                .to_owned(),
        });
    }
    let record_bytes_max = settings.max_record_bytes as usize;
    batch::scan(&encoded.payload, encoded.record_count, record_bytes_max)
        .map_err(|error| scan_error(error, &encoded, record_bytes_max))?;
    Ok(encoded)
}

fn encode(list: &RecordList, settings: &PartitionSettings) -> Result<EncodedBatch> {
    use prost::Message;

    if list.records.is_empty() {
        return Err(Error::EmptyBatch);
    }
    let mut bytes = 0;
    for record in &list.records {
        let record_bytes = record.encoded_len();
        if record_bytes > settings.max_record_bytes as usize {
            return Err(record_too_large(record_bytes, settings.max_record_bytes as usize));
        }
        bytes += batch::record_bytes(record);
    }
    check_batch_bytes(bytes, settings)?;
    Ok(batch::encode(&list.records))
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
    use helix_proto::log::v1::{Compression, Record};

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
        let form = Form::Records(RecordList { records });
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
    fn producer_and_sequence_come_together_or_not_at_all() {
        let producer = Some(ProducerIdentity { producer_id: 7, epoch: 2 });
        let expected = ProducerStamp { producer_id: 7, epoch: 2, first_sequence: 40 };
        assert_eq!(stamp(producer, Some(40), 3).unwrap(), Some(expected));
        assert_eq!(stamp(None, None, 3).unwrap(), None);
        assert!(stamp(producer, None, 3).is_err());
        assert!(stamp(None, Some(40), 3).is_err());
        assert!(stamp(producer, Some(u64::MAX), 3).is_err());
        let nobody = Some(ProducerIdentity { producer_id: 0, epoch: 0 });
        assert!(stamp(nobody, Some(0), 3).is_err());
    }
}
