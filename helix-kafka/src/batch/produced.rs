//! The check of batches that clients send.
//!
//! The node reads every record of a batch before it stores it. Here the checksum and what Kafka
//! gives a code of its own are checked. Gzip and Snappy, which nodes do not store, become LZ4.

use bytes::{BufMut, Bytes, BytesMut};
use helix_client::proto::batch;
use helix_client::proto::compression::{
    BatchCodec, Compressor, UNCOMPRESSED_BYTES_MAX, with_decompressor,
};
use helix_client::proto::kafka::{KAFKA_HEADER_BYTES, KafkaBatch, KafkaBatchError, KafkaCodec};
use helix_client::proto::log::v1::EncodedBatch;
use kafka_protocol::error::ResponseError;

/// Positions in a batch: its length, its checksum, and what that covers, attributes first.
const LENGTH_AT: usize = 8;
const LENGTH_END: usize = 12;
const CRC_AT: usize = 17;
const CHECKED_START: usize = 21;

/// A batch that may be stored.
#[derive(Debug, Clone)]
pub struct ProducedBatch {
    /// The batch as it is stored.
    pub batch: EncodedBatch,
    /// Producer id and epoch, for an idempotent producer.
    pub producer: Option<(u64, u32)>,
    /// Sequence of the first record, with a producer.
    pub sequence: Option<u32>,
    /// Stored with another codec than it came with.
    pub is_recompressed: bool,
}

/// Code and text of a refused batch.
type Refusal = (ResponseError, String);

/// Checks the records of one partition in a request.
///
/// # Errors
/// The code that the client gets, and the reason.
pub fn check_produced(records: Option<Bytes>) -> Result<ProducedBatch, Refusal> {
    let records = records.unwrap_or_default();
    if KafkaBatch::first_of(&records).is_some_and(|first| first.len() < records.len()) {
        let what = "a request has one batch for each partition; this one has more";
        return Err((ResponseError::InvalidRecord, what.to_owned()));
    }
    let refused = |error: KafkaBatchError| (code_of_batch(&error), error.to_string());
    let kafka = KafkaBatch::parse(&records).map_err(refused)?;
    if kafka.is_transactional() {
        let what = "transactions are not supported; leave out transactional.id";
        return Err((ResponseError::InvalidTxnState, what.to_owned()));
    }
    kafka.check_appendable().map_err(refused)?;
    let producer = match (kafka.producer_id(), kafka.producer_epoch()) {
        (-1, _) => None,
        (id, epoch) => match (u64::try_from(id), u32::try_from(epoch)) {
            (Ok(id), Ok(epoch)) => Some((id, epoch)),
            _ => {
                let what = format!("producer id {id} with epoch {epoch} is not valid");
                return Err((ResponseError::InvalidRecord, what));
            }
        },
    };
    let sequence = match producer {
        None => None,
        Some(_) => {
            let sequence = kafka.base_sequence();
            Some(u32::try_from(sequence).map_err(|_| {
                let what = format!("sequence {sequence} of a producer is negative");
                (ResponseError::InvalidRecord, what)
            })?)
        }
    };
    let record_count = kafka.record_count();
    let is_recompressed = matches!(kafka.codec(), KafkaCodec::Gzip | KafkaCodec::Snappy);
    let records = match kafka.codec() {
        KafkaCodec::Gzip | KafkaCodec::Snappy => recompressed(&kafka).map_err(refused)?,
        KafkaCodec::None | KafkaCodec::Lz4 | KafkaCodec::Zstd => records,
    };
    let batch = batch::from_kafka(record_count, records);
    Ok(ProducedBatch { batch, producer, sequence, is_recompressed })
}

/// Returns a batch with LZ4 in place of another codec, or uncompressed if that is smaller. Records
/// and offsets stay as they are, so a retry gets the same bytes.
fn recompressed(kafka: &KafkaBatch<'_>) -> Result<Bytes, KafkaBatchError> {
    let section = with_decompressor(|decompressor| {
        let section = decompressor.decompress_kafka(kafka, UNCOMPRESSED_BYTES_MAX)?;
        Ok::<_, KafkaBatchError>(Bytes::copy_from_slice(section))
    })?;
    let mut compressor = Compressor::default();
    let compressed = compressor.compress_kafka(BatchCodec::Lz4, &section);
    let (codec, records) = match compressed {
        Some(compressed) if compressed.len() < section.len() => (KafkaCodec::Lz4, compressed),
        _ => (KafkaCodec::None, &section[..]),
    };
    let mut batch = BytesMut::with_capacity(KAFKA_HEADER_BYTES + records.len());
    batch.put_slice(&kafka.bytes()[..KAFKA_HEADER_BYTES]);
    batch.put_slice(records);
    let length = batch.len() - LENGTH_END;
    let length = i32::try_from(length)
        .map_err(|_| KafkaBatchError::TooLarge { bytes_max: UNCOMPRESSED_BYTES_MAX })?;
    batch[LENGTH_AT..LENGTH_END].copy_from_slice(&length.to_be_bytes());
    // No other attribute is set.
    batch[CHECKED_START..CHECKED_START + 2].copy_from_slice(&codec.to_attributes().to_be_bytes());
    let crc = crc32c::crc32c(&batch[CHECKED_START..]);
    batch[CRC_AT..CHECKED_START].copy_from_slice(&crc.to_be_bytes());
    Ok(batch.freeze())
}

/// Returns the code of a batch that is refused. Only damage on the way is worth another attempt.
fn code_of_batch(error: &KafkaBatchError) -> ResponseError {
    match error {
        KafkaBatchError::Checksum
        | KafkaBatchError::Length { .. }
        | KafkaBatchError::Truncated { .. } => ResponseError::CorruptMessage,
        KafkaBatchError::Magic(_) => ResponseError::UnsupportedForMessageFormat,
        KafkaBatchError::UnknownCodec(_) | KafkaBatchError::CodecDisabled(_) => {
            ResponseError::UnsupportedCompressionType
        }
        KafkaBatchError::TooLarge { .. } => ResponseError::MessageTooLarge,
        _ => ResponseError::InvalidRecord,
    }
}

#[cfg(test)]
mod tests {
    use helix_client::proto::kafka::KafkaBatchBuilder;

    use super::*;

    fn batch() -> Vec<u8> {
        let mut builder = KafkaBatchBuilder::default();
        builder.push(0, 5, Some(b"k"), Some(b"v"), []).unwrap();
        builder.push(1, 6, None, None, [(&b"h"[..], None)]).unwrap();
        builder.finish(0, None, None).unwrap().to_vec()
    }

    fn refused(bytes: Vec<u8>) -> ResponseError {
        check_produced(Some(bytes.into())).unwrap_err().0
    }

    #[test]
    fn keeps_the_bytes_of_a_batch() {
        let bytes = batch();
        let produced = check_produced(Some(bytes.clone().into())).unwrap();
        assert_eq!(produced.batch.payload, bytes);
        assert_eq!((produced.batch.record_count, produced.producer), (2, None));
        assert!(batch::is_intact(&produced.batch));
    }

    #[test]
    fn reads_the_sequence_of_a_producer() {
        let mut bytes = batch();
        bytes[43..51].copy_from_slice(&7_i64.to_be_bytes());
        bytes[51..53].copy_from_slice(&2_i16.to_be_bytes());
        bytes[53..57].copy_from_slice(&i32::MAX.to_be_bytes());
        let produced = check_produced(Some(sealed(bytes.clone()).into())).unwrap();
        assert_eq!(produced.producer, Some((7, 2)));
        assert_eq!(produced.sequence, Some(i32::MAX as u32));
        bytes[53..57].copy_from_slice(&(-1_i32).to_be_bytes());
        assert_eq!(refused(sealed(bytes)), ResponseError::InvalidRecord);
    }

    #[test]
    fn rejects_what_no_reader_could_read() {
        assert_eq!(refused(Vec::new()), ResponseError::CorruptMessage);
        for length in 1..batch().len() {
            assert_eq!(refused(batch()[..length].to_vec()), ResponseError::CorruptMessage);
        }
        for at in 16..batch().len() {
            let mut bytes = batch();
            bytes[at] ^= 1;
            check_produced(Some(bytes.into())).unwrap_err();
        }
        assert_eq!(refused([batch(), batch()].concat()), ResponseError::InvalidRecord);
        let mut transactional = batch();
        transactional[22] |= 0x10;
        assert_eq!(refused(sealed(transactional)), ResponseError::InvalidTxnState);
        let mut gap = batch();
        gap[23..27].copy_from_slice(&8_i32.to_be_bytes());
        assert_eq!(refused(sealed(gap)), ResponseError::InvalidRecord);
        let mut old = batch();
        old[16] = 1;
        assert_eq!(refused(old), ResponseError::UnsupportedForMessageFormat);
    }

    #[test]
    fn gzip_becomes_another_codec_with_the_same_records() {
        let plain = batch();
        // Deflate without compression, in a gzip member: RFC 1952 and 1951.
        let section = &plain[61..];
        let mut gzip = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0xff, 1];
        let length = u16::try_from(section.len()).unwrap();
        gzip.extend(length.to_le_bytes());
        gzip.extend((!length).to_le_bytes());
        gzip.extend(section);
        gzip.extend(crc32(section).to_le_bytes());
        gzip.extend(u32::from(length).to_le_bytes());
        let mut bytes = [&plain[..61], &gzip].concat();
        let total = i32::try_from(bytes.len() - 12).unwrap();
        bytes[8..12].copy_from_slice(&total.to_be_bytes());
        bytes[22] = 1;
        let produced = check_produced(Some(sealed(bytes).into())).unwrap();
        let stored = KafkaBatch::parse(&produced.batch.payload).unwrap();
        assert!(matches!(stored.codec(), KafkaCodec::None | KafkaCodec::Lz4));
        assert_eq!(stored.record_count(), 2);
        with_decompressor(|decompressor| {
            assert_eq!(decompressor.decompress_kafka(&stored, 1 << 20).unwrap(), section);
        });
    }

    fn crc32(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(u32::MAX, |crc, byte| {
            let mut crc = crc ^ u32::from(*byte);
            for _ in 0..8 {
                crc = if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
            }
            crc
        })
    }

    /// Makes the checksum right again.
    fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
        let crc = crc32c::crc32c(&bytes[21..]);
        bytes[17..21].copy_from_slice(&crc.to_be_bytes());
        bytes
    }
}
