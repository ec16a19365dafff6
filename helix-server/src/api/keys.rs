//! Checks that every record of a batch for a compacted topic has a key.

use helix_proto::batch;
use helix_proto::record_fields::record_fields;

use crate::error::{Error, Result};
use crate::log::{COMPACTED_OFFSETS_MAX, PartitionSettings};

/// Checks the records of an uncompressed payload that was scanned before.
///
/// # Errors
/// [`Error::KeyRequired`], [`Error::CorruptBatch`] where a record is none, and
/// [`Error::InvalidArgument`] for more records than a compacted batch can have.
pub(super) fn check_keys(payload: &[u8], settings: &PartitionSettings) -> Result<()> {
    if !settings.is_compacted() {
        return Ok(());
    }
    for (record, range) in (0..).zip(batch::walk(payload, usize::MAX)) {
        check_number(record)?;
        let range = range.map_err(|error| Error::CorruptBatch { what: error.to_string() })?;
        let fields = record_fields(&payload[range]).map_err(|error| Error::CorruptBatch {
            what: format!("record {record} of the batch: {error}"),
        })?;
        if fields.key.is_none() {
            return Err(Error::KeyRequired { record });
        }
    }
    Ok(())
}

/// Checks whether the records of a batch for a compacted topic have keys.
///
/// # Errors
/// As [`check_keys`].
pub(super) fn check_keyed_records(has_key: impl Iterator<Item = bool>) -> Result<()> {
    for (record, has_key) in (0..).zip(has_key) {
        check_number(record)?;
        if !has_key {
            return Err(Error::KeyRequired { record });
        }
    }
    Ok(())
}

/// Checks the number of a record in its batch, from 0.
fn check_number(record: u32) -> Result<()> {
    if record < COMPACTED_OFFSETS_MAX {
        return Ok(());
    }
    Err(Error::InvalidArgument {
        field: "batch.encoded.record_count",
        what: format!(
            "must be at most {COMPACTED_OFFSETS_MAX} on a compacted topic; send smaller batches"
        ),
    })
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use helix_proto::log::v1::Record;

    use super::*;

    fn payload(keys: &[Option<&'static [u8]>]) -> Bytes {
        let record = |key: &Option<&'static [u8]>| Record {
            key: key.map(Bytes::from_static),
            value: Some(Bytes::from_static(b"v")),
            ..Record::default()
        };
        batch::encode(&keys.iter().map(record).collect::<Vec<_>>()).payload
    }

    #[test]
    fn compacted_topics_need_a_key_in_every_record() {
        let compacted = PartitionSettings { cleanup: 2, ..PartitionSettings::default() };
        let both = PartitionSettings { cleanup: 3, ..PartitionSettings::default() };
        let keyless = payload(&[Some(b"a"), Some(b""), None]);
        for settings in [compacted, both] {
            check_keys(&payload(&[Some(b"a"), Some(b"")]), &settings).unwrap();
            let error = check_keys(&keyless, &settings).unwrap_err();
            assert!(matches!(error, Error::KeyRequired { record: 2 }), "{error}");
            // Field 1 as a number.
            let error = check_keys(&[0x0A, 2, 0x08, 1], &settings).unwrap_err();
            assert!(matches!(error, Error::CorruptBatch { .. }), "{error}");
        }
        check_keys(&keyless, &PartitionSettings::default()).unwrap();
    }

    #[test]
    fn compacted_topics_bound_the_records_of_a_batch() {
        let compacted = PartitionSettings { cleanup: 2, ..PartitionSettings::default() };
        let records = |count: u32| payload(&[Some(&b""[..])]).repeat(count as usize);
        check_keys(&records(COMPACTED_OFFSETS_MAX), &compacted).unwrap();
        let error = check_keys(&records(COMPACTED_OFFSETS_MAX + 1), &compacted).unwrap_err();
        assert!(error.to_string().contains("at most 262144"), "{error}");
    }
}
