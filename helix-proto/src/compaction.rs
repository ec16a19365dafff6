//! Compaction by key of one batch: shows its records, and builds the batch with fewer of them.
//!
//! Pure functions over bytes. The server decides which record is the latest of its key.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

use crate::batch::{self, BATCH_VERSION, ScanError};
use crate::compression::{BatchCodec, Compressor, DecompressError, Decompressor};
use crate::kafka::{self, KAFKA_BATCH_VERSION, KafkaBatchError, KafkaBuildError};
use crate::log::v1::EncodedBatch;
use crate::record_fields::{NotARecordError, RecordFields, record_fields};

/// Compressor and decompressor of a cleaner, which reuses them.
#[derive(Debug, Default)]
pub struct Codecs {
    pub(crate) compressor: Compressor,
    pub(crate) decompressor: Decompressor,
}

/// A stored batch: the fields of an [`EncodedBatch`], for code that knows no messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchParts {
    /// Layout version.
    pub version: u32,
    /// Number of records in the payload.
    pub record_count: u32,
    /// Number of the codec.
    pub compression: i32,
    /// Size of the decompressed payload of a compressed batch. For a batch of version 2, the size
    /// of the `RecordList` to which it converts.
    pub uncompressed_bytes: u32,
    /// Checksum over the fields above and the payload.
    pub crc: u32,
    /// The records.
    pub payload: Bytes,
}

impl BatchParts {
    /// Returns the checksum that the payload's checksum continues from.
    pub fn crc_seed(&self) -> u32 {
        batch::crc_seed(self.version, self.record_count, self.compression)
    }

    /// Returns whether `uncompressed_bytes` is stored with the batch.
    pub fn states_uncompressed_bytes(&self) -> bool {
        self.version == KAFKA_BATCH_VERSION || !batch::is_uncompressed(self.compression)
    }

    pub(crate) fn is_intact(&self) -> bool {
        self.crc == batch::crc(self.version, self.record_count, self.compression, &self.payload)
    }
}

impl From<EncodedBatch> for BatchParts {
    fn from(batch: EncodedBatch) -> Self {
        Self {
            version: batch.version,
            record_count: batch.record_count,
            compression: batch.compression,
            uncompressed_bytes: batch.uncompressed_bytes,
            crc: batch.crc32,
            payload: batch.payload,
        }
    }
}

/// A record of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyedRecord<'a> {
    /// Number in the batch as it is stored, from 0.
    pub number: u32,
    /// Key; `None` in batches that are older than the topic's compaction setting.
    pub key: Option<&'a [u8]>,
    /// A keyed record without value is a tombstone.
    pub has_value: bool,
}

impl KeyedRecord<'_> {
    /// Returns whether the record deletes its key.
    pub fn is_tombstone(&self) -> bool {
        self.key.is_some() && !self.has_value
    }
}

/// Decision about a record of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RecordFate {
    /// Stays.
    Stays,
    /// Goes if the batch does not get larger without it.
    MayGo,
    /// Goes.
    MustGo,
}

/// Result of [`compact`].
#[derive(Debug, Clone, PartialEq)]
pub enum CompactedBatch {
    /// Every record stays: none is to go, or the batch would be larger without those that may.
    Unchanged,
    /// No record stays.
    Empty,
    /// The batch with fewer records, and the numbers of those that stay.
    Smaller(BatchParts, Vec<u32>),
}

/// The reason why a stored batch cannot be compacted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompactError {
    /// The layout version is unknown.
    #[error("unknown batch version {0}")]
    Version(u32),
    /// The payload has a compression that this crate does not know.
    #[error("unknown compression {0}")]
    Compression(i32),
    /// The checksum does not match the bytes.
    #[error("checksum mismatch")]
    Checksum,
    /// The payload cannot be decompressed.
    #[error("cannot decompress the payload: {0}")]
    Decompress(#[from] DecompressError),
    /// The payload is not a list of records.
    #[error("{0}")]
    Scan(#[from] ScanError),
    /// The payload is not a Kafka batch.
    #[error("{0}")]
    Kafka(#[from] KafkaBatchError),
    /// The smaller batch cannot be built.
    #[error("{0}")]
    Build(#[from] KafkaBuildError),
    /// A record cannot be decoded.
    #[error("record {number}: {error}")]
    Record {
        /// Number in the batch.
        number: u32,
        /// Why.
        error: NotARecordError,
    },
}

impl CompactError {
    /// Returns whether the checksum matches but the payload is not a list of records.
    ///
    /// Readers cannot decode such a batch. It is stored where records are not validated.
    pub fn is_no_record_list(&self) -> bool {
        match self {
            Self::Decompress(_) | Self::Scan(_) | Self::Record { .. } | Self::Kafka(_) => true,
            Self::Version(_) | Self::Compression(_) | Self::Checksum | Self::Build(_) => false,
        }
    }
}

/// Verifies the checksum of a batch and shows each of its records to `visit`, in order.
///
/// Stops when `visit` returns false. Checks the whole batch first: a batch that fails shows no
/// record.
///
/// # Errors
/// See [`CompactError`]; the same batch fails again.
pub fn visit_records(
    batch: &BatchParts,
    codecs: &mut Codecs,
    mut visit: impl FnMut(KeyedRecord<'_>) -> bool,
) -> Result<(), CompactError> {
    if batch.version == KAFKA_BATCH_VERSION {
        return kafka::visit_records(batch, codecs, visit);
    }
    let (payload, _) = verified_payload(batch, &mut codecs.decompressor)?;
    let mut walk = Walk::new(batch, payload);
    while walk.next_record()?.is_some() {}
    let mut walk = Walk::new(batch, payload);
    while let Some((_, record)) = walk.next_record()? {
        if !visit(record) {
            break;
        }
    }
    Ok(())
}

/// Verifies the checksum of a batch, and builds the batch without the records that `judge` removes.
///
/// The bytes of the records that stay are copied unchanged, under a new checksum. A compressed
/// batch is compressed again with its codec. `payload_max` returns the size limit of the new
/// payload, for the numbers of the records that stay. If the new payload is over that limit,
/// because the producer compressed harder, it is compressed as hard as possible, or stored
/// uncompressed. If no form fits, records that may go stay, and records that must go make the batch
/// larger.
///
/// # Errors
/// See [`CompactError`]; the same batch fails again.
pub fn compact(
    batch: &BatchParts,
    codecs: &mut Codecs,
    mut judge: impl FnMut(KeyedRecord<'_>) -> RecordFate,
    payload_max: impl FnOnce(&[u32]) -> usize,
) -> Result<CompactedBatch, CompactError> {
    if batch.version == KAFKA_BATCH_VERSION {
        return kafka::compact(batch, codecs, judge, payload_max);
    }
    let (payload, codec) = verified_payload(batch, &mut codecs.decompressor)?;
    let (mut kept, mut is_forced) = (Vec::new(), false);
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut walk = Walk::new(batch, payload);
    while let Some((range, record)) = walk.next_record()? {
        let fate = judge(record);
        is_forced |= fate == RecordFate::MustGo;
        if fate != RecordFate::Stays {
            continue;
        }
        kept.push(record.number);
        match ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => ranges.push(range),
        }
    }
    if kept.len() == batch.record_count as usize {
        return Ok(CompactedBatch::Unchanged);
    }
    if kept.is_empty() {
        return Ok(CompactedBatch::Empty);
    }
    let mut smaller = BytesMut::with_capacity(ranges.iter().map(Range::len).sum());
    for range in ranges {
        smaller.extend_from_slice(&payload[range]);
    }
    let count = u32::try_from(kept.len()).expect("fewer than the records of the batch");
    let plain = batch::from_payload(count, smaller.freeze());
    let (form, fits) = codecs.smallest(plain, codec, payload_max(&kept));
    if fits || is_forced {
        return Ok(CompactedBatch::Smaller(form.into(), kept));
    }
    Ok(CompactedBatch::Unchanged)
}

impl Codecs {
    /// Returns the first form of a batch that has at most `payload_max` bytes, and true.
    ///
    /// If none fits, returns the smallest form, and false. The form with the batch's codec comes
    /// first, so that the next compaction uses that codec, too.
    fn smallest(
        &mut self,
        plain: EncodedBatch,
        codec: Option<BatchCodec>,
        payload_max: usize,
    ) -> (EncodedBatch, bool) {
        let fits = |form: &EncodedBatch| form.payload.len() <= payload_max;
        let Some(codec) = codec else {
            let fits = fits(&plain);
            return (plain, fits);
        };
        let usual = self.compressor.recompress(codec, &plain);
        if let Some(usual) = usual.clone().filter(fits) {
            return (usual, true);
        }
        let hardest = self.compressor.compress_hardest(&plain);
        if let Some(hardest) = hardest.clone().filter(fits) {
            return (hardest, true);
        }
        let fits = fits(&plain);
        let forms = usual.into_iter().chain(hardest);
        let smallest = forms.chain([plain]).min_by_key(|form| form.payload.len());
        (smallest.expect("the plain form is there"), fits)
    }
}

fn verified_payload<'a>(
    batch: &'a BatchParts,
    decompressor: &'a mut Decompressor,
) -> Result<(&'a [u8], Option<BatchCodec>), CompactError> {
    if batch.version != BATCH_VERSION {
        return Err(CompactError::Version(batch.version));
    }
    let codec = BatchCodec::from_wire(batch.compression)
        .map_err(|_| CompactError::Compression(batch.compression))?;
    if !batch.is_intact() {
        return Err(CompactError::Checksum);
    }
    let Some(codec) = codec else { return Ok((&batch.payload, None)) };
    let bytes = batch.uncompressed_bytes as usize;
    Ok((decompressor.decompress(codec, &batch.payload, bytes)?, Some(codec)))
}

/// Iterates over the records of a verified payload, and checks their stated number.
struct Walk<'a> {
    payload: &'a [u8],
    walk: batch::Walk<'a>,
    expected: u32,
    number: u32,
    position: usize,
}

impl<'a> Walk<'a> {
    fn new(batch: &BatchParts, payload: &'a [u8]) -> Self {
        let walk = batch::walk(payload, usize::MAX);
        Self { payload, walk, expected: batch.record_count, number: 0, position: 0 }
    }

    /// Returns the next record, and the range of its bytes with tag and length.
    fn next_record(&mut self) -> Result<Option<(Range<usize>, KeyedRecord<'a>)>, CompactError> {
        let (expected, number) = (self.expected, self.number);
        let Some(range) = self.walk.next().transpose()? else {
            return match number == expected {
                true => Ok(None),
                false => Err(ScanError::TooFew { expected, found: number }.into()),
            };
        };
        if number == expected {
            return Err(ScanError::TooMany { expected, byte: self.position }.into());
        }
        let record = &self.payload[range.clone()];
        let RecordFields { key, has_value } =
            record_fields(record).map_err(|error| CompactError::Record { number, error })?;
        let whole = self.position..range.end;
        (self.number, self.position) = (number + 1, range.end);
        let key = key.map(|key| &record[key]);
        Ok(Some((whole, KeyedRecord { number, key, has_value })))
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;
    use crate::compression::UNCOMPRESSED_BYTES_MAX;
    use crate::log::v1::{Compression, Record};

    fn records(count: u32) -> Vec<Record> {
        let record = |number: u32| Record {
            key: Some(Bytes::from(format!("key-{number}"))),
            value: (!number.is_multiple_of(3))
                .then(|| Bytes::from(vec![b'v'; number as usize * 10])),
            ..Record::default()
        };
        (0..count).map(record).collect()
    }

    fn compressed(records: &[Record], codec: Option<BatchCodec>) -> EncodedBatch {
        let plain = batch::encode(records);
        let compress = |codec| Compressor::default().compress(codec, &plain, usize::MAX);
        codec.and_then(compress).unwrap_or(plain)
    }

    fn decode(parts: &BatchParts) -> Vec<Record> {
        let parts = parts.clone();
        let batch = EncodedBatch {
            version: parts.version,
            record_count: parts.record_count,
            compression: parts.compression,
            crc32: parts.crc,
            uncompressed_bytes: parts.uncompressed_bytes,
            payload: parts.payload,
        };
        batch::decode(&batch).unwrap().records
    }

    #[test]
    fn kept_records_are_unchanged_under_a_new_checksum() {
        let mut rng = StdRng::seed_from_u64(7);
        let mut codecs = Codecs::default();
        for round in 0..300 {
            let all = records(rng.random_range(1..40));
            let codec = [None, Some(BatchCodec::Lz4), Some(BatchCodec::Zstd)][round % 3];
            let batch = BatchParts::from(compressed(&all, codec));
            let share = rng.random_range(0.0..1.0);
            let wanted: Vec<bool> = all.iter().map(|_| rng.random_bool(share)).collect();
            let judge = |record: KeyedRecord<'_>| {
                let sent = &all[record.number as usize];
                assert_eq!(record.key, sent.key.as_deref());
                assert_eq!(record.is_tombstone(), sent.value.is_none());
                fate(!wanted[record.number as usize])
            };
            let result = compact(&batch, &mut codecs, judge, |_| batch.payload.len());
            let expected: Vec<u32> =
                (0..).zip(&wanted).filter_map(|(n, wanted)| wanted.then_some(n)).collect();
            match result.unwrap() {
                CompactedBatch::Unchanged => {
                    assert!(codec.is_some() || expected.len() == all.len())
                }
                CompactedBatch::Empty => assert!(expected.is_empty()),
                CompactedBatch::Smaller(smaller, kept) => {
                    assert_eq!(kept, expected);
                    let found = decode(&smaller);
                    let wanted = kept.iter().map(|number| all[*number as usize].clone());
                    assert!(found.into_iter().eq(wanted));
                    assert!(smaller.uncompressed_bytes <= batch.uncompressed_bytes);
                    assert!(smaller.payload.len() <= batch.payload.len());
                }
            }
        }
    }

    #[test]
    fn damaged_batches_and_lies_are_refused() {
        let good = batch::encode(&records(3));
        let mut codecs = Codecs::default();
        let mut refused = |batch: &EncodedBatch| {
            let batch = &BatchParts::from(batch.clone());
            let error = compact(batch, &mut codecs, |_| RecordFate::Stays, |_| 0).unwrap_err();
            let visit = |record: KeyedRecord<'_>| -> bool { panic!("{record:?} was shown") };
            assert_eq!(visit_records(batch, &mut codecs, visit), Err(error.clone()));
            error
        };
        let damaged = EncodedBatch { crc32: good.crc32 ^ 1, ..good.clone() };
        assert_eq!(refused(&damaged), CompactError::Checksum);
        for count in [2, 4] {
            let lie = batch::from_payload(count, good.payload.clone());
            assert!(matches!(refused(&lie), CompactError::Scan(_)));
        }
        let version = EncodedBatch { version: 9, ..good.clone() };
        assert_eq!(refused(&version), CompactError::Version(9));
        let unknown = EncodedBatch { compression: 9, ..good.clone() };
        assert_eq!(refused(&unknown), CompactError::Compression(9));
        let no_record = batch::from_payload(1, Bytes::from_static(&[0x0A, 2, 0x08, 1]));
        assert!(matches!(refused(&no_record), CompactError::Record { number: 0, .. }));
        assert!(refused(&no_record).is_no_record_list());
        assert!(!refused(&damaged).is_no_record_list());
        // The first three records are valid.
        let bytes = [&good.payload[..], &[0x0A, 2, 0x08, 1]].concat();
        let late = batch::from_payload(4, Bytes::from(bytes));
        assert!(matches!(refused(&late), CompactError::Record { number: 3, .. }));
    }

    fn fate(goes: bool) -> RecordFate {
        if goes { RecordFate::MayGo } else { RecordFate::Stays }
    }

    fn keyed(key: &str, value: Vec<u8>) -> Record {
        Record { key: Some(key.to_owned().into()), value: Some(value.into()), ..Record::default() }
    }

    fn random(bytes: usize, seed: u64) -> Vec<u8> {
        let mut rng = StdRng::seed_from_u64(seed);
        (0..bytes).map(|_| rng.random()).collect()
    }

    /// Compresses as a producer with other settings does.
    fn zstd(records: &[Record], level: i32, window_log: u32) -> BatchParts {
        let plain = batch::encode(records);
        let mut context = zstd::bulk::Compressor::new(level).unwrap();
        for parameter in [
            zstd::zstd_safe::CParameter::WindowLog(window_log),
            zstd::zstd_safe::CParameter::EnableLongDistanceMatching(true),
        ] {
            context.set_parameter(parameter).unwrap();
        }
        let payload = Bytes::from(context.compress(&plain.payload).unwrap());
        let compression = Compression::Zstd.into();
        BatchParts {
            version: plain.version,
            record_count: plain.record_count,
            compression,
            uncompressed_bytes: plain.payload.len() as u32,
            crc: batch::crc(plain.version, plain.record_count, compression, &payload),
            payload,
        }
    }

    /// Removes the record of a number.
    fn without(batch: &BatchParts, number: u32, goes: RecordFate) -> CompactedBatch {
        let judge = |record: KeyedRecord<'_>| {
            if record.number == number { goes } else { RecordFate::Stays }
        };
        compact(batch, &mut Codecs::default(), judge, |_| batch.payload.len()).unwrap()
    }

    #[test]
    fn a_batch_that_does_not_shrink_once_keeps_its_codec() {
        let all = [keyed("a", vec![0; 4_000]), keyed("b", random(8, 1))];
        for codec in BatchCodec::ALL {
            let batch = BatchParts::from(compressed(&all, Some(codec)));
            let CompactedBatch::Smaller(smaller, kept) = without(&batch, 0, RecordFate::MayGo)
            else {
                panic!()
            };
            assert_eq!((smaller.compression, kept), (codec.to_wire().into(), vec![1]));
            assert_eq!(decode(&smaller), all[1..]);
        }
    }

    #[test]
    fn a_batch_with_matches_over_long_distances_does_not_get_larger() {
        // Each record has the same megabyte, which only a long window finds again.
        let same = random(1 << 20, 2);
        let all: Vec<Record> = (0..4).map(|n| keyed(&format!("k{n}"), same.clone())).collect();
        let batch = zstd(&all, 19, 23);
        assert!(batch.payload.len() < (1 << 20) + 10_000);
        for goes in [RecordFate::MayGo, RecordFate::MustGo] {
            for number in 0..4 {
                let CompactedBatch::Smaller(smaller, _) = without(&batch, number, goes) else {
                    panic!("record {number} stays")
                };
                let (before, after) = (batch.payload.len(), smaller.payload.len());
                assert!(after <= before, "{after} of {before} bytes");
                assert_eq!(decode(&smaller).len(), 3);
            }
        }
    }

    #[test]
    fn text_that_was_compressed_hard_does_not_get_larger() {
        let mut rng = StdRng::seed_from_u64(3);
        let words: Vec<String> = (0..400).map(|n| format!("{:x}", n * n * 7919 % 99_991)).collect();
        let mut text = || {
            let words = (0..3_000).map(|_| words[rng.random_range(0..words.len())].as_str());
            words.collect::<Vec<_>>().join(" ").into_bytes()
        };
        let all: Vec<Record> = (0..20).map(|n| keyed(&format!("k{n}"), text())).collect();
        let batch = zstd(&all, 19, 22);
        for goes in [RecordFate::MayGo, RecordFate::MustGo] {
            let CompactedBatch::Smaller(smaller, _) = without(&batch, 7, goes) else { panic!() };
            assert!(smaller.payload.len() <= batch.payload.len());
        }
    }

    #[test]
    fn records_that_may_go_stay_where_no_form_fits() {
        let all = [keyed("a", random(50, 4)), keyed("b", random(500, 5)), keyed("c", vec![0; 90])];
        for codec in [None, Some(BatchCodec::Lz4), Some(BatchCodec::Zstd)] {
            let batch = BatchParts::from(compressed(&all, codec));
            let compact_into = |goes: RecordFate| {
                let judge = |record: KeyedRecord<'_>| {
                    if record.number == 0 { goes } else { RecordFate::Stays }
                };
                compact(&batch, &mut Codecs::default(), judge, |_| 10).unwrap()
            };
            assert_eq!(compact_into(RecordFate::MayGo), CompactedBatch::Unchanged);
            let forced = compact_into(RecordFate::MustGo);
            let CompactedBatch::Smaller(parts, kept) = forced else { panic!() };
            assert_eq!((decode(&parts), kept), (all[1..].to_vec(), vec![1, 2]));
        }
    }

    #[test]
    fn the_smallest_form_of_any_size_is_readable() {
        for bytes in [1, 2, 1_000, 1 << 16, (1 << 20) + 1, UNCOMPRESSED_BYTES_MAX - 64] {
            let plain = batch::encode(&[keyed("k", vec![7; bytes])]);
            let hardest = Compressor::default().compress_hardest(&plain).unwrap();
            assert_eq!(decode(&hardest.into()).len(), 1, "{bytes}");
        }
    }
}
