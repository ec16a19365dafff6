//! Compaction by key of one Kafka batch: see [`crate::compaction`].

use std::ops::Range;

use bytes::{BufMut, Bytes, BytesMut};

use super::build::seal;
use super::{
    ATTRIBUTE_CODEC, KAFKA_HEADER_BYTES, KafkaBatch, KafkaBatchError, KafkaBuildError, KafkaCodec,
    KafkaRecord, NO_TIMESTAMP, plain_bytes,
};
use crate::batch;
use crate::compaction::{
    BatchParts, Codecs, CompactError, CompactedBatch, KeyedRecord, RecordFate,
};
use crate::compression::{BatchCodec, Compressor, UNCOMPRESSED_BYTES_MAX, compress_bytes_hardest};

/// Verifies the checksum of a batch and shows each of its records: see
/// [`crate::compaction::visit_records`].
pub(crate) fn visit_records(
    parts: &BatchParts,
    codecs: &mut Codecs,
    mut visit: impl FnMut(KeyedRecord<'_>) -> bool,
) -> Result<(), CompactError> {
    let kafka = verified(parts)?;
    let section = codecs.decompressor.decompress_kafka(&kafka, UNCOMPRESSED_BYTES_MAX)?;
    for record in kafka.records(section) {
        record?;
    }
    for (number, record) in (0..).zip(kafka.records(section)) {
        if !visit(keyed(number, &record?)) {
            break;
        }
    }
    Ok(())
}

/// Builds the batch without the records that `judge` removes: see [`crate::compaction::compact`].
pub(crate) fn compact(
    parts: &BatchParts,
    codecs: &mut Codecs,
    mut judge: impl FnMut(KeyedRecord<'_>) -> RecordFate,
    payload_max: impl FnOnce(&[u32]) -> usize,
) -> Result<CompactedBatch, CompactError> {
    let kafka = verified(parts)?;
    let Codecs { compressor, decompressor } = codecs;
    let section = decompressor.decompress_kafka(&kafka, UNCOMPRESSED_BYTES_MAX)?;
    let (mut kept, mut is_forced, mut bytes) = (Vec::new(), false, 0);
    for (number, record) in (0..).zip(kafka.records(section)) {
        let record = record?;
        let fate = judge(keyed(number, &record));
        is_forced |= fate == RecordFate::MustGo;
        if fate == RecordFate::Stays {
            kept.push(number);
            bytes += plain_bytes(&record);
        }
    }
    if kept.len() == parts.record_count as usize {
        return Ok(CompactedBatch::Unchanged);
    }
    if kept.is_empty() {
        return Ok(CompactedBatch::Empty);
    }
    let smaller = rebuild(&kafka, section, &kept)?;
    let codec = kafka.codec().as_batch_codec().flatten();
    let (payload, fits) = smaller.smallest(compressor, codec, payload_max(&kept))?;
    if !fits && !is_forced {
        return Ok(CompactedBatch::Unchanged);
    }
    let record_count = u32::try_from(kept.len()).expect("fewer than the records of the batch");
    let mut parts = BatchParts::from(batch::from_kafka(record_count, payload));
    parts.uncompressed_bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
    Ok(CompactedBatch::Smaller(parts, kept))
}

fn verified(parts: &BatchParts) -> Result<KafkaBatch<'_>, CompactError> {
    if !parts.is_intact() {
        return Err(CompactError::Checksum);
    }
    Ok(KafkaBatch::parse_unverified(&parts.payload)?)
}

fn keyed<'a>(number: u32, record: &KafkaRecord<'a>) -> KeyedRecord<'a> {
    KeyedRecord { number, key: record.key, has_value: record.value.is_some() }
}

/// A compacted batch before its records are compressed.
#[derive(Debug)]
struct CompactedKafka {
    /// Header; codec, length and checksum are still to be written.
    header: [u8; KAFKA_HEADER_BYTES],
    /// The records that stayed.
    section: Vec<u8>,
}

/// Copies the records with these numbers, in order.
///
/// The first offset, the last offset delta and the records' deltas stay unchanged, so that readers
/// find the same offsets.
///
/// # Errors
/// See [`KafkaBatchError`].
fn rebuild(
    batch: &KafkaBatch<'_>,
    section: &[u8],
    kept: &[u32],
) -> Result<CompactedKafka, KafkaBatchError> {
    let mut kept_numbers = kept.iter().copied().peekable();
    let mut max_timestamp = NO_TIMESTAMP;
    let (mut position, mut ranges) = (0, Vec::<Range<usize>>::new());
    for (number, record) in (0..).zip(batch.records(section)) {
        let record = record?;
        let range = position..position + record.bytes.len();
        position = range.end;
        if kept_numbers.next_if_eq(&number).is_none() {
            continue;
        }
        max_timestamp = max_timestamp.max(record.timestamp);
        match ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => ranges.push(range),
        }
    }
    let mut smaller = Vec::with_capacity(ranges.iter().map(Range::len).sum());
    for range in ranges {
        smaller.extend_from_slice(&section[range]);
    }
    let mut header = [0; KAFKA_HEADER_BYTES];
    header.copy_from_slice(&batch.bytes()[..KAFKA_HEADER_BYTES]);
    header[35..43].copy_from_slice(&max_timestamp.to_be_bytes());
    let count = u32::try_from(kept.len()).expect("fewer than the records of the batch");
    header[57..61].copy_from_slice(&count.to_be_bytes());
    Ok(CompactedKafka { header, section: smaller })
}

impl CompactedKafka {
    /// Returns the first form that has at most `payload_max` bytes, and true.
    ///
    /// If none fits, returns the smallest form, and false. The form with the batch's codec comes
    /// first, so that the next compaction uses that codec, too.
    fn smallest(
        &self,
        compressor: &mut Compressor,
        codec: Option<BatchCodec>,
        payload_max: usize,
    ) -> Result<(Bytes, bool), KafkaBuildError> {
        let plain = self.finish(KafkaCodec::None, &self.section)?;
        let fits = |form: &Bytes| form.len() <= payload_max;
        let Some(codec) = codec else {
            let fits = fits(&plain);
            return Ok((plain, fits));
        };
        let usual = compressor.compress_kafka(codec, &self.section);
        let usual = usual.map(|section| self.finish(Some(codec).into(), section)).transpose()?;
        if let Some(usual) = usual.clone().filter(fits) {
            return Ok((usual, true));
        }
        let hardest = compress_bytes_hardest(&self.section);
        let hardest = hardest.map(|it| self.finish(KafkaCodec::Zstd, &it)).transpose()?;
        if let Some(hardest) = hardest.clone().filter(fits) {
            return Ok((hardest, true));
        }
        let fits = fits(&plain);
        let forms = usual.into_iter().chain(hardest).chain([plain]);
        Ok((forms.min_by_key(Bytes::len).expect("the plain form is there"), fits))
    }

    /// Returns the batch with `section`: its records, as compressed by `codec`.
    ///
    /// # Errors
    /// [`KafkaBuildError::TooLarge`].
    fn finish(&self, codec: KafkaCodec, section: &[u8]) -> Result<Bytes, KafkaBuildError> {
        let mut batch = BytesMut::with_capacity(KAFKA_HEADER_BYTES + section.len());
        batch.put_slice(&self.header);
        let attributes = i16::from_be_bytes([self.header[21], self.header[22]]);
        let attributes = (attributes & !ATTRIBUTE_CODEC) | codec.to_attributes();
        batch[21..23].copy_from_slice(&attributes.to_be_bytes());
        batch.put_slice(section);
        seal(&mut batch)?;
        Ok(batch.freeze())
    }
}
