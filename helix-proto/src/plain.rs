//! The plain form of a received batch: a `RecordList` kept serialized.
//!
//! An empty record takes two bytes on the wire and a hundred times that decoded, so decoding would
//! let a request allocate far more than its size. The serialized list is a batch's payload already,
//! so its bytes suffice.

use bytes::{BufMut, Bytes, BytesMut};
use prost::encoding::{self, DecodeContext, WireType};
use prost::{DecodeError, Message};

use crate::batch::{RECORD_TAG, record_bytes};
use crate::log::v1::Record;

/// Field number of `RecordList.records`.
const RECORDS: u32 = 1;

/// Serialized records of a `RecordList`. The contents of the records are not validated.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct PlainRecords {
    payload: BytesMut,
}

impl PlainRecords {
    /// Returns the payload of a batch of these records.
    pub fn into_payload(self) -> Bytes {
        self.payload.freeze()
    }

    fn push(&mut self, record: &[u8]) {
        let prefix = prost::length_delimiter_len(record.len());
        self.payload.reserve(1 + prefix + record.len());
        self.payload.put_u8(RECORD_TAG);
        encoding::encode_varint(record.len() as u64, &mut self.payload);
        self.payload.put_slice(record);
    }
}

impl From<&[Record]> for PlainRecords {
    fn from(records: &[Record]) -> Self {
        let bytes = records.iter().map(record_bytes).sum();
        let mut payload = BytesMut::with_capacity(bytes);
        for record in records {
            payload.put_u8(RECORD_TAG);
            record.encode_length_delimited(&mut payload).expect("a BytesMut grows");
        }
        Self { payload }
    }
}

impl Message for PlainRecords {
    fn encode_raw(&self, buffer: &mut impl BufMut) {
        buffer.put_slice(&self.payload);
    }

    fn merge_field(
        &mut self,
        field: u32,
        wire_type: WireType,
        buffer: &mut impl bytes::Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        if field != RECORDS {
            return encoding::skip_field(wire_type, field, buffer, context);
        }
        let mut record = Bytes::new();
        encoding::bytes::merge(wire_type, &mut record, buffer, context)?;
        self.push(&record);
        Ok(())
    }

    fn encoded_len(&self) -> usize {
        self.payload.len()
    }

    fn clear(&mut self) {
        self.payload.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch;
    use crate::log::v1::batch::Form;
    use crate::log::v1::{Batch, RecordList};

    fn records() -> Vec<Record> {
        let value = |value: &'static [u8]| Record {
            value: Some(Bytes::from_static(value)),
            ..Record::default()
        };
        vec![value(b"one"), Record::default(), value(&[7; 300])]
    }

    #[test]
    fn encodes_and_decodes_as_a_record_list() {
        let list = RecordList { records: records() };
        let plain = PlainRecords::from(&records()[..]);
        assert_eq!(plain.encode_to_vec(), list.encode_to_vec());
        assert_eq!(plain.encoded_len(), list.encoded_len());
        assert_eq!(PlainRecords::decode(&*list.encode_to_vec()).unwrap(), plain);
        assert_eq!(plain.into_payload(), batch::encode(&records()).payload);
    }

    #[test]
    fn repeated_list_in_a_batch_extends_the_previous_one() {
        let plain = || PlainRecords::from(&records()[..]);
        let once = Batch { form: Some(Form::Records(plain())) }.encode_to_vec();
        let twice = [once.clone(), once].concat();
        let Some(Form::Records(both)) = Batch::decode(&*twice).unwrap().form else { panic!() };
        assert_eq!(RecordList::decode(both.into_payload()).unwrap().records.len(), 6);
    }

    #[test]
    fn skips_unknown_fields_and_rejects_malformed_ones() {
        // Field 2, a varint; then an empty record.
        let plain = PlainRecords::decode(&[0x10, 0x05, 0x0A, 0x00][..]).unwrap();
        assert_eq!(&plain.into_payload()[..], [0x0A, 0x00]);
        for broken in [&[0x0A, 0x02, 0x00][..], &[0x0A], &[0x08, 0x01]] {
            assert!(PlainRecords::decode(broken).is_err(), "{broken:?}");
        }
    }

    #[test]
    fn a_million_empty_records_take_memory_in_proportion_to_their_bytes() {
        let million = 1_000_000;
        let wire = [RECORD_TAG, 0].repeat(million);
        let plain = PlainRecords::decode(&*wire).unwrap();
        assert!(plain.payload.capacity() <= 4 * wire.len(), "{}", plain.payload.capacity());
        assert_eq!(batch::walk(&plain.into_payload(), 1).count(), million);
    }
}
