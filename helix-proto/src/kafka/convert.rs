//! Conversion between Kafka batches and Helix's own records.
//!
//! What one side cannot carry: Kafka has timestamps in milliseconds, so event times lose their
//! digits below that; a null value of a header becomes an empty one.

use bytes::{BufMut, Bytes, BytesMut};
use prost::encoding::{encode_varint, encoded_len_varint};
use prost_types::Timestamp;

use super::{
    KAFKA_BATCH_VERSION, KafkaBatch, KafkaBatchBuilder, KafkaBatchError, KafkaBuildError,
    KafkaHeader, KafkaRecord, NO_TIMESTAMP,
};
use crate::batch::{self, DecodeError, RECORD_TAG};
use crate::compression::{BatchCodec, Compressor, UNCOMPRESSED_BYTES_MAX, with_decompressor};
use crate::log::v1::{EncodedBatch, Header, Record};

// Tags of the fields of `Record`, `Header` and `Timestamp`: the fields of a payload that is
// written without decoding its records.
const KEY_TAG: u8 = 0x0A;
const VALUE_TAG: u8 = 0x12;
const HEADER_TAG: u8 = 0x1A;
const EVENT_TIME_TAG: u8 = 0x22;
const NAME_TAG: u8 = 0x0A;
const HEADER_VALUE_TAG: u8 = 0x12;
const SECONDS_TAG: u8 = 0x08;
const NANOS_TAG: u8 = 0x10;

/// Records of a Kafka batch, and their offsets.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DecodedKafka {
    /// Distance of each record's offset from the batch's first offset, ascending.
    pub offset_deltas: Vec<u32>,
    /// The records; keys and values are slices of the uncompressed payload.
    pub records: Vec<Record>,
}

/// Verifies a batch of version 2 and returns its records.
///
/// # Errors
/// See [`DecodeError`]; decoding the same batch again fails again.
pub fn decode(batch: &EncodedBatch) -> Result<DecodedKafka, DecodeError> {
    let (kafka, section) = uncompressed(batch)?;
    let slice = |bytes: &[u8]| section.slice_ref(bytes);
    let mut decoded = DecodedKafka::default();
    for record in kafka.records(&section) {
        let record = record?;
        decoded.offset_deltas.push(record.offset_delta);
        let header = |header: KafkaHeader<'_>| Header {
            name: header.name.to_owned(),
            value: header.value.map_or_else(Bytes::new, slice),
        };
        decoded.records.push(Record {
            key: record.key.map(slice),
            value: record.value.map(slice),
            headers: record.headers.map(header).collect(),
            event_time: record.timestamp().map(millisecond_time),
        });
    }
    Ok(decoded)
}

/// Verifies a batch of version 2. Returns its head, and its records uncompressed.
fn uncompressed(batch: &EncodedBatch) -> Result<(KafkaBatch<'_>, Bytes), DecodeError> {
    if batch.version != KAFKA_BATCH_VERSION {
        return Err(DecodeError::Version(batch.version));
    }
    if !batch::is_intact(batch) {
        return Err(DecodeError::Checksum);
    }
    let kafka = KafkaBatch::parse_unverified(&batch.payload)?;
    let (expected, found) = (batch.record_count, kafka.record_count());
    if expected != found {
        return Err(DecodeError::Count { expected, found: found as usize });
    }
    let section = with_decompressor(|decompressor| {
        let section = decompressor.decompress_kafka(&kafka, UNCOMPRESSED_BYTES_MAX)?;
        Ok::<_, KafkaBatchError>(match kafka.codec() {
            super::KafkaCodec::None => batch.payload.slice_ref(section),
            _ => Bytes::copy_from_slice(section),
        })
    })?;
    Ok((kafka, section))
}

/// Verifies a batch of version 2 and returns its records as a serialized `RecordList`.
///
/// # Errors
/// See [`DecodeError`].
pub(crate) fn plain_payload(batch: &EncodedBatch) -> Result<Bytes, DecodeError> {
    let (kafka, section) = uncompressed(batch)?;
    let mut bytes = 0;
    for record in kafka.records(&section) {
        bytes += plain_bytes(&record?);
    }
    Ok(to_plain_payload(&kafka, &section, bytes)?)
}

/// Builds a batch of version 2 from records, compressed if a codec makes it smaller.
///
/// # Errors
/// [`KafkaBuildError`].
pub fn from_records(
    records: &[Record],
    codec: Option<(BatchCodec, &mut Compressor)>,
) -> Result<EncodedBatch, KafkaBuildError> {
    let mut builder = KafkaBatchBuilder::default();
    for (delta, record) in (0..).zip(records) {
        let timestamp = record.event_time.as_ref().map_or(NO_TIMESTAMP, milliseconds);
        let headers = record.headers.iter().map(|it| (it.name.as_bytes(), Some(&it.value[..])));
        builder.push(delta, timestamp, record.key.as_deref(), record.value.as_deref(), headers)?;
    }
    let record_count = builder.record_count();
    let payload = builder.finish(0, None, codec)?;
    Ok(batch::from_kafka(record_count, payload))
}

/// Returns a time in milliseconds since the Unix epoch, without the digits below.
pub fn milliseconds(time: &Timestamp) -> i64 {
    let milliseconds =
        i128::from(time.seconds) * 1000 + i128::from(time.nanos).div_euclid(1_000_000);
    let clamped = milliseconds.clamp(i64::MIN.into(), i64::MAX.into());
    i64::try_from(clamped).expect("it is between the two")
}

/// Returns the time of milliseconds since the Unix epoch.
pub fn millisecond_time(milliseconds: i64) -> Timestamp {
    let nanos = milliseconds.rem_euclid(1000) as i32 * 1_000_000;
    Timestamp { seconds: milliseconds.div_euclid(1000), nanos }
}

/// Returns the bytes that a record takes in the payload of [`to_plain_payload`].
pub fn plain_bytes(record: &KafkaRecord<'_>) -> usize {
    let content = content_bytes(record);
    1 + encoded_len_varint(content as u64) + content
}

fn content_bytes(record: &KafkaRecord<'_>) -> usize {
    let headers = record.headers.map(|header| field_bytes(header_bytes(&header))).sum::<usize>();
    let time =
        record.timestamp().map_or(0, |time| field_bytes(time_bytes(&millisecond_time(time))));
    let of = |bytes: Option<&[u8]>| bytes.map_or(0, |bytes| field_bytes(bytes.len()));
    of(record.key) + of(record.value) + headers + time
}

/// Returns the size of a field behind its tag and length.
fn field_bytes(length: usize) -> usize {
    1 + encoded_len_varint(length as u64) + length
}

fn header_bytes(header: &KafkaHeader<'_>) -> usize {
    // Empty fields are left out.
    let of = |bytes: &[u8]| if bytes.is_empty() { 0 } else { field_bytes(bytes.len()) };
    of(header.name.as_bytes()) + of(header.value.unwrap_or_default())
}

fn time_bytes(time: &Timestamp) -> usize {
    let of = |number: i64| match number {
        0 => 0,
        number => 1 + encoded_len_varint(number.cast_unsigned()),
    };
    of(time.seconds) + of(time.nanos.into())
}

/// Writes the records of a batch as a serialized `RecordList`: the payload of a batch of version 1.
///
/// `section` has the uncompressed records. `capacity` is the sum of [`plain_bytes`], if known.
///
/// # Errors
/// See [`KafkaBatchError`].
pub fn to_plain_payload(
    batch: &KafkaBatch<'_>,
    section: &[u8],
    capacity: usize,
) -> Result<Bytes, KafkaBatchError> {
    let mut payload = BytesMut::with_capacity(capacity);
    for record in batch.records(section) {
        put_record(&record?, &mut payload);
    }
    Ok(payload.freeze())
}

fn put_record(record: &KafkaRecord<'_>, payload: &mut BytesMut) {
    payload.put_u8(RECORD_TAG);
    encode_varint(content_bytes(record) as u64, payload);
    if let Some(key) = record.key {
        put_field(KEY_TAG, key, payload);
    }
    if let Some(value) = record.value {
        put_field(VALUE_TAG, value, payload);
    }
    for header in record.headers {
        payload.put_u8(HEADER_TAG);
        encode_varint(header_bytes(&header) as u64, payload);
        let fields = [
            (NAME_TAG, header.name.as_bytes()),
            (HEADER_VALUE_TAG, header.value.unwrap_or_default()),
        ];
        for (tag, bytes) in fields.into_iter().filter(|(_, bytes)| !bytes.is_empty()) {
            put_field(tag, bytes, payload);
        }
    }
    if let Some(time) = record.timestamp().map(millisecond_time) {
        payload.put_u8(EVENT_TIME_TAG);
        encode_varint(time_bytes(&time) as u64, payload);
        let fields = [(SECONDS_TAG, time.seconds), (NANOS_TAG, time.nanos.into())];
        for (tag, number) in fields.into_iter().filter(|(_, number)| *number != 0) {
            payload.put_u8(tag);
            encode_varint(number.cast_unsigned(), payload);
        }
    }
}

fn put_field(tag: u8, bytes: &[u8], payload: &mut BytesMut) {
    payload.put_u8(tag);
    encode_varint(bytes.len() as u64, payload);
    payload.put_slice(bytes);
}
