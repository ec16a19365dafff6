//! Kafka record batches, format 2: the payload of a batch of version 2.
//!
//! Parses, checks, decodes, builds and compacts them. Every length, count and size that a batch
//! states is checked against its bytes or against a limit before memory is taken for it. Kafka's
//! documentation of its message format describes the layout. Numbers are big endian.

mod build;
mod codec;
mod compact;
mod convert;
#[cfg(feature = "kafka-codecs")]
mod legacy_codecs;
mod lz4_frame;
mod records;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod vectors;
mod xxh32;
mod zstd_frame;

pub use build::{KafkaBatchBuilder, KafkaBuildError, empty_batch};
pub use codec::KafkaCodec;
pub(crate) use compact::{compact, visit_records};
pub(crate) use convert::plain_payload;
pub use convert::{
    DecodedKafka, decode, from_records, millisecond_time, milliseconds, plain_bytes,
    to_plain_payload,
};
pub use records::{KafkaHeader, KafkaHeaders, KafkaRecord, KafkaRecords};

use crate::compression::{Decompressor, UNCOMPRESSED_BYTES_MAX};

/// Version of an `EncodedBatch` whose payload is a Kafka record batch.
pub const KAFKA_BATCH_VERSION: u32 = 2;

/// Bytes of a batch before its records.
pub const KAFKA_HEADER_BYTES: usize = 61;

/// Bytes before those that a batch's length counts: the base offset and the length itself.
const LENGTH_END: usize = 12;

/// First byte that the checksum covers: the attributes.
const CHECKED_START: usize = 21;

/// The only format of batches that is read.
const MAGIC: i8 = 2;

/// Timestamp of a record without one, in milliseconds.
pub const NO_TIMESTAMP: i64 = -1;

/// Producer id, epoch and first sequence of a batch without a producer.
const NO_PRODUCER: i64 = -1;

const ATTRIBUTE_CODEC: i16 = 0b111;
const ATTRIBUTE_APPEND_TIME: i16 = 1 << 3;
const ATTRIBUTE_TRANSACTIONAL: i16 = 1 << 4;
const ATTRIBUTE_CONTROL: i16 = 1 << 5;

/// A Kafka record batch whose length, format and checksum were checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KafkaBatch<'a> {
    bytes: &'a [u8],
    codec: KafkaCodec,
    last_offset_delta: u32,
    record_count: u32,
}

impl<'a> KafkaBatch<'a> {
    /// Parses exactly one batch and verifies its checksum. Does not read the records.
    ///
    /// # Errors
    /// See [`KafkaBatchError`].
    pub fn parse(bytes: &'a [u8]) -> Result<Self, KafkaBatchError> {
        let batch = Self::parse_unverified(bytes)?;
        let stated = u32::from_be_bytes(field(bytes, 17));
        match crc(bytes) == stated {
            true => Ok(batch),
            false => Err(KafkaBatchError::Checksum),
        }
    }

    /// Like [`Self::parse`], for bytes whose checksum was verified before.
    ///
    /// # Errors
    /// See [`KafkaBatchError`].
    pub fn parse_unverified(bytes: &'a [u8]) -> Result<Self, KafkaBatchError> {
        if bytes.len() < KAFKA_HEADER_BYTES {
            return Err(KafkaBatchError::Truncated { bytes: bytes.len() });
        }
        let magic = i8::from_be_bytes(field(bytes, 16));
        if magic != MAGIC {
            return Err(KafkaBatchError::Magic(magic));
        }
        let stated = i32::from_be_bytes(field(bytes, 8));
        if usize::try_from(stated).ok() != Some(bytes.len() - LENGTH_END) {
            let found = bytes.len() - LENGTH_END;
            return Err(KafkaBatchError::Length { stated, found });
        }
        let attributes = i16::from_be_bytes(field(bytes, 21));
        let codec = KafkaCodec::from_attributes(attributes)?;
        let count = |at, name| {
            let value = i32::from_be_bytes(field(bytes, at));
            u32::try_from(value).map_err(|_| KafkaBatchError::Negative { name, value })
        };
        let last_offset_delta = count(23, "lastOffsetDelta")?;
        let record_count = count(57, "recordsCount")?;
        // Each record has its own offset.
        if record_count > last_offset_delta.saturating_add(1) {
            return Err(KafkaBatchError::Offsets { record_count, last_offset_delta });
        }
        Ok(Self { bytes, codec, last_offset_delta, record_count })
    }

    /// Returns the bytes of the first batch in a sequence of batches, as its length states, or
    /// `None` if the sequence is shorter than that.
    pub fn first_of(batches: &'a [u8]) -> Option<&'a [u8]> {
        let length = i32::from_be_bytes(*batches.get(8..LENGTH_END)?.first_chunk()?);
        batches.get(..LENGTH_END.checked_add(usize::try_from(length).ok()?)?)
    }

    /// Checks that the batch can be appended: it has records, one for each of its offsets, and no
    /// attribute that only a server sets or that belongs to transactions.
    ///
    /// # Errors
    /// [`KafkaBatchError::Empty`], [`KafkaBatchError::Offsets`] and
    /// [`KafkaBatchError::Attributes`].
    pub fn check_appendable(&self) -> Result<(), KafkaBatchError> {
        let (record_count, last_offset_delta) = (self.record_count, self.last_offset_delta);
        if record_count == 0 {
            return Err(KafkaBatchError::Empty);
        }
        if Some(record_count) != last_offset_delta.checked_add(1) {
            return Err(KafkaBatchError::Offsets { record_count, last_offset_delta });
        }
        match self.attributes() & !ATTRIBUTE_CODEC {
            0 => Ok(()),
            attributes => Err(KafkaBatchError::Attributes { attributes }),
        }
    }

    /// Returns the whole batch.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the offset of the batch's first offset delta, as it stands in the bytes. Batches in
    /// a Helix log have any: `StoredBatch.first_offset` counts.
    pub fn base_offset(&self) -> i64 {
        i64::from_be_bytes(field(self.bytes, 0))
    }

    /// Returns the attributes.
    pub fn attributes(&self) -> i16 {
        i16::from_be_bytes(field(self.bytes, 21))
    }

    /// Returns the codec of the records.
    pub fn codec(&self) -> KafkaCodec {
        self.codec
    }

    /// Returns true if the batch belongs to a transaction.
    pub fn is_transactional(&self) -> bool {
        self.attributes() & ATTRIBUTE_TRANSACTIONAL != 0
    }

    /// Returns true if the batch has markers of transactions instead of records.
    pub fn is_control(&self) -> bool {
        self.attributes() & ATTRIBUTE_CONTROL != 0
    }

    /// Returns the distance of the batch's last offset from its first one. The record with that
    /// offset may be gone after compaction.
    pub fn last_offset_delta(&self) -> u32 {
        self.last_offset_delta
    }

    /// Returns the number of records.
    pub fn record_count(&self) -> u32 {
        self.record_count
    }

    /// Returns the timestamp that the records' timestamps are distances from, in milliseconds.
    pub fn base_timestamp(&self) -> i64 {
        i64::from_be_bytes(field(self.bytes, 27))
    }

    /// Returns the stated largest timestamp, in milliseconds.
    pub fn max_timestamp(&self) -> i64 {
        i64::from_be_bytes(field(self.bytes, 35))
    }

    /// Returns the producer's id, or -1.
    pub fn producer_id(&self) -> i64 {
        i64::from_be_bytes(field(self.bytes, 43))
    }

    /// Returns the producer's epoch, or -1.
    pub fn producer_epoch(&self) -> i16 {
        i16::from_be_bytes(field(self.bytes, 51))
    }

    /// Returns the producer's sequence number of the first record, or -1.
    pub fn base_sequence(&self) -> i32 {
        i32::from_be_bytes(field(self.bytes, 53))
    }

    /// Returns the records as they are in the batch, compressed or not.
    pub fn record_section(&self) -> &'a [u8] {
        &self.bytes[KAFKA_HEADER_BYTES..]
    }

    /// Iterates over the records in `section`, the decompressed
    /// [`record_section`](Self::record_section). See [`KafkaRecords`].
    pub fn records<'s>(&self, section: &'s [u8]) -> KafkaRecords<'s> {
        let append_time =
            (self.attributes() & ATTRIBUTE_APPEND_TIME != 0).then(|| self.max_timestamp());
        KafkaRecords::new(
            section,
            self.record_count,
            self.last_offset_delta,
            self.base_timestamp(),
            append_time,
        )
    }

    /// Decompresses the records and reads all of them. Collects none.
    ///
    /// Takes at most `bytes_max` bytes of memory for them, and at most [`UNCOMPRESSED_BYTES_MAX`].
    ///
    /// # Errors
    /// See [`KafkaBatchError`]: no reader can read such a batch.
    pub fn check_records(
        &self,
        decompressor: &mut Decompressor,
        bytes_max: usize,
    ) -> Result<(), KafkaBatchError> {
        let section = decompressor.decompress_kafka(self, bytes_max.min(UNCOMPRESSED_BYTES_MAX))?;
        for record in self.records(section) {
            record?;
        }
        Ok(())
    }
}

/// Returns the CRC-32C of a whole batch: of everything from its attributes on.
pub fn crc(batch: &[u8]) -> u32 {
    crc32c::crc32c(batch.get(CHECKED_START..).unwrap_or_default())
}

/// Returns the bytes of a field of the header, which is known to be there.
fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut value = [0; N];
    value.copy_from_slice(&bytes[at..at + N]);
    value
}

/// The reason why bytes are not a Kafka batch that this version reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KafkaBatchError {
    /// There are fewer bytes than a header has.
    #[error("the Kafka batch has {bytes} bytes, and its header alone takes {KAFKA_HEADER_BYTES}")]
    Truncated {
        /// Bytes of the batch.
        bytes: usize,
    },
    /// The stated length is not the length of the bytes.
    #[error("the Kafka batch states a length of {stated}, but {found} bytes follow the length")]
    Length {
        /// Stated length.
        stated: i32,
        /// Bytes after the length.
        found: usize,
    },
    /// The format is an older or a later one.
    #[error("Kafka message format {0} is not supported; use format 2, of Kafka 0.11 and later")]
    Magic(i8),
    /// The checksum does not match the bytes.
    #[error("the CRC-32C of the Kafka batch does not match its bytes")]
    Checksum,
    /// A count is negative.
    #[error("the Kafka batch states {name} {value}; it must not be negative")]
    Negative {
        /// Kafka's name of the field.
        name: &'static str,
        /// Value of the field.
        value: i32,
    },
    /// The batch has no records.
    #[error("the Kafka batch has no records")]
    Empty,
    /// The number of records does not fit the offsets.
    #[error(
        "the Kafka batch states {record_count} records, but lastOffsetDelta {last_offset_delta}"
    )]
    Offsets {
        /// Stated number of records.
        record_count: u32,
        /// Stated distance of the last offset.
        last_offset_delta: u32,
    },
    /// A producer must not set these attributes.
    #[error(
        "the Kafka batch has the attributes {attributes:#06x}; producers may only set a codec, and \
         transactions are not supported"
    )]
    Attributes {
        /// The attributes without the codec.
        attributes: i16,
    },
    /// The codec does not exist.
    #[error("the Kafka batch has the unknown codec {0}")]
    UnknownCodec(u8),
    /// This program does not decode the codec.
    #[error("the Kafka batch has codec {}, which is not decoded here; use lz4 or zstd", .0.name())]
    CodecDisabled(KafkaCodec),
    /// The records cannot be decompressed.
    #[error("the records of the Kafka batch are not valid {}", .0.name())]
    Malformed(KafkaCodec),
    /// The decompressed records take too much memory.
    #[error("the records of the Kafka batch have more than {bytes_max} bytes uncompressed")]
    TooLarge {
        /// Limit.
        bytes_max: usize,
    },
    /// A record is malformed. Records and bytes count from 0.
    #[error("record {record} of the Kafka batch, at byte {byte} of its records: {what}")]
    Record {
        /// Number of the record in the batch.
        record: u32,
        /// Position in the decompressed records.
        byte: usize,
        /// Fault of that byte.
        what: &'static str,
    },
    /// The records end before the last one.
    #[error("the Kafka batch states {stated} records but has {found}")]
    TooFew {
        /// Stated number of records.
        stated: u32,
        /// Number of records found.
        found: u32,
    },
    /// Bytes follow the last record.
    #[error("{bytes} bytes follow the last of the {stated} records that the Kafka batch states")]
    TooMany {
        /// Stated number of records.
        stated: u32,
        /// Bytes after the last record.
        bytes: usize,
    },
}
