//! Builds Kafka batches.

use bytes::{BufMut, Bytes, BytesMut};
use prost::encoding::{encode_varint, encoded_len_varint};

use super::{
    CHECKED_START, KAFKA_HEADER_BYTES, KafkaCodec, LENGTH_END, MAGIC, NO_PRODUCER, NO_TIMESTAMP,
    crc,
};
use crate::compression::{BatchCodec, Compressor};

/// Builds one Kafka batch of records that are pushed in order.
#[derive(Debug, Default)]
pub struct KafkaBatchBuilder {
    records: BytesMut,
    count: u32,
    /// Timestamp of the first record.
    base_timestamp: Option<i64>,
    max_timestamp: Option<i64>,
    last_delta: Option<u32>,
    /// Reused for the fields of a record.
    scratch: BytesMut,
}

/// The reason why records do not fit into a Kafka batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KafkaBuildError {
    /// The offset delta is not above the one before, or has more than 31 bits.
    #[error("the offset delta {0} of a Kafka record is not above the one before")]
    OffsetDelta(u32),
    /// The timestamp is too far from the first one.
    #[error("the timestamp {0} ms of a Kafka record is too far from the first one in its batch")]
    Timestamp(i64),
    /// A length or a count has more than 31 bits.
    #[error("a Kafka batch is below 2 GiB")]
    TooLarge,
}

impl KafkaBatchBuilder {
    /// Appends a record. Headers are pairs of name and value, in order.
    ///
    /// # Errors
    /// [`KafkaBuildError`]; the record is not appended.
    pub fn push<'h>(
        &mut self,
        offset_delta: u32,
        timestamp_ms: i64,
        key: Option<&[u8]>,
        value: Option<&[u8]>,
        headers: impl IntoIterator<Item = (&'h [u8], Option<&'h [u8]>)>,
    ) -> Result<(), KafkaBuildError> {
        let is_ascending = self.last_delta.is_none_or(|last| offset_delta > last);
        let delta = i32::try_from(offset_delta).ok().filter(|_| is_ascending);
        let delta = delta.ok_or(KafkaBuildError::OffsetDelta(offset_delta))?;
        let base = self.base_timestamp.unwrap_or(timestamp_ms);
        let distance = timestamp_ms.checked_sub(base);
        let distance = distance.ok_or(KafkaBuildError::Timestamp(timestamp_ms))?;
        let fields = &mut self.scratch;
        fields.clear();
        // Attributes: none are defined.
        fields.put_u8(0);
        put_varint(fields, distance);
        put_varint(fields, delta.into());
        put_nullable(fields, key)?;
        put_nullable(fields, value)?;
        // The headers are counted while they are written.
        let (mut count, mut written) = (0_u32, BytesMut::new());
        for (name, value) in headers {
            put_nullable(&mut written, Some(name))?;
            put_nullable(&mut written, value)?;
            count = count.checked_add(1).ok_or(KafkaBuildError::TooLarge)?;
        }
        put_varint(fields, count.into());
        let length = fields.len().saturating_add(written.len());
        let length = i32::try_from(length).map_err(|_| KafkaBuildError::TooLarge)?;
        put_varint(&mut self.records, length.into());
        self.records.put_slice(fields);
        self.records.put_slice(&written);
        self.count += 1;
        self.base_timestamp = Some(base);
        self.max_timestamp = self.max_timestamp.max(Some(timestamp_ms));
        self.last_delta = Some(offset_delta);
        Ok(())
    }

    /// Returns the number of records.
    pub fn record_count(&self) -> u32 {
        self.count
    }

    /// Returns the bytes of the records so far, uncompressed.
    pub fn record_section_bytes(&self) -> usize {
        self.records.len()
    }

    /// Builds the batch, compressed if a codec makes it smaller.
    ///
    /// `last_offset_delta` is for a batch whose last records are gone; `None` means that of the
    /// last record.
    ///
    /// # Errors
    /// [`KafkaBuildError::TooLarge`], and [`KafkaBuildError::OffsetDelta`] if `last_offset_delta`
    /// is below that of a record.
    pub fn finish(
        self,
        base_offset: u64,
        last_offset_delta: Option<u32>,
        codec: Option<(BatchCodec, &mut Compressor)>,
    ) -> Result<Bytes, KafkaBuildError> {
        let last = last_offset_delta.or(self.last_delta).unwrap_or(0);
        if self.last_delta.is_some_and(|delta| last < delta) {
            return Err(KafkaBuildError::OffsetDelta(last));
        }
        let plain = &self.records[..];
        let compressed = codec.and_then(|(codec, compressor)| {
            let bytes = compressor.compress_kafka(codec, plain)?;
            (bytes.len() < plain.len()).then_some((KafkaCodec::from(Some(codec)), bytes))
        });
        let (codec, section) = compressed.unwrap_or((KafkaCodec::None, plain));
        let mut batch = BytesMut::with_capacity(KAFKA_HEADER_BYTES + section.len());
        batch.put_u64(base_offset);
        batch.put_i32(0);
        // No leader epoch.
        batch.put_i32(-1);
        batch.put_i8(MAGIC);
        batch.put_u32(0);
        batch.put_i16(codec.to_attributes());
        batch.put_i32(i32::try_from(last).map_err(|_| KafkaBuildError::OffsetDelta(last))?);
        batch.put_i64(self.base_timestamp.unwrap_or(NO_TIMESTAMP));
        batch.put_i64(self.max_timestamp.unwrap_or(NO_TIMESTAMP));
        batch.put_i64(NO_PRODUCER);
        batch.put_i16(NO_PRODUCER as i16);
        batch.put_i32(NO_PRODUCER as i32);
        batch.put_i32(i32::try_from(self.count).map_err(|_| KafkaBuildError::TooLarge)?);
        batch.put_slice(section);
        seal(&mut batch)?;
        Ok(batch.freeze())
    }
}

/// Builds a batch without records that covers the offsets from `base_offset` to
/// `base_offset + last_offset_delta`, for Kafka readers at offsets whose records are gone.
///
/// # Errors
/// [`KafkaBuildError::OffsetDelta`] above 31 bits.
pub fn empty_batch(base_offset: u64, last_offset_delta: u32) -> Result<Bytes, KafkaBuildError> {
    KafkaBatchBuilder::default().finish(base_offset, Some(last_offset_delta), None)
}

/// Writes the length and the checksum of a batch that is otherwise complete.
pub(super) fn seal(batch: &mut [u8]) -> Result<(), KafkaBuildError> {
    let length = i32::try_from(batch.len() - LENGTH_END).map_err(|_| KafkaBuildError::TooLarge)?;
    batch[8..LENGTH_END].copy_from_slice(&length.to_be_bytes());
    let crc = crc(batch);
    batch[17..CHECKED_START].copy_from_slice(&crc.to_be_bytes());
    Ok(())
}

fn put_nullable(target: &mut BytesMut, bytes: Option<&[u8]>) -> Result<(), KafkaBuildError> {
    let Some(bytes) = bytes else {
        put_varint(target, -1);
        return Ok(());
    };
    let length = i32::try_from(bytes.len()).map_err(|_| KafkaBuildError::TooLarge)?;
    target.reserve(encoded_len_varint(zigzag(length.into())) + bytes.len());
    put_varint(target, length.into());
    target.put_slice(bytes);
    Ok(())
}

fn put_varint(target: &mut BytesMut, value: i64) {
    encode_varint(zigzag(value), target);
}

/// Returns the form in which small negative numbers are short, too.
fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)).cast_unsigned()
}
