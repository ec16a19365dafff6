//! Target for Kafka batches, whose bytes come from clients.

use bytes::Bytes;
use helix_proto::batch;
use helix_proto::compaction::{
    BatchParts, Codecs, CompactedBatch, KeyedRecord, RecordFate, compact,
};
use helix_proto::compression::{BatchCodec, Compressor, Decompressor};
use helix_proto::kafka::{self, KAFKA_HEADER_BYTES, KafkaBatch, KafkaBatchBuilder};
use helix_proto::log::v1::RecordList;
use prost::Message;

use crate::input::Input;

/// Target `kafka`: bytes are rejected, or are a batch whose records convert, and survive compaction
/// at their offsets. The input is a batch, the records of one behind a valid header, or a built
/// batch that is damaged.
pub(crate) fn kafka(input: &[u8]) {
    let mut input = Input(input);
    let form = input.below(3);
    let codec = input.pick(&[None, Some(BatchCodec::Lz4), Some(BatchCodec::Zstd)]);
    let count = input.u8();
    let flips: Vec<_> = (0..input.below(4)).map(|_| (input.u16(), input.u8())).collect();
    let mut bytes = match form {
        0 => input.0.to_vec(),
        1 => behind_a_header(count, codec, input.0),
        _ => built(count, codec, input.0),
    };
    for (at, flip) in flips {
        let at = usize::from(at).checked_rem(bytes.len()).unwrap_or(0);
        bytes.get_mut(at).into_iter().for_each(|byte| *byte ^= flip);
    }
    let _ = KafkaBatch::parse(&bytes);
    let _ = KafkaBatch::first_of(&bytes);
    seal(&mut bytes);
    let Ok(header) = KafkaBatch::parse(&bytes) else { return };
    let bytes_max = 1 << 20;
    if header.check_records(&mut Decompressor::default(), bytes_max).is_err() {
        return;
    }
    let encoded = batch::from_kafka(header.record_count(), Bytes::copy_from_slice(&bytes));
    let decoded = kafka::decode(&encoded).unwrap();
    assert_eq!(decoded.records.len(), header.record_count() as usize);
    assert!(decoded.offset_deltas.is_sorted_by(|a, b| a < b));
    assert!(decoded.offset_deltas.last().is_none_or(|last| *last <= header.last_offset_delta()));
    let list = RecordList { records: decoded.records };
    assert_eq!(batch::uncompressed_payload(&encoded).unwrap(), list.encode_to_vec());

    let wanted = |number: u32| encoded.crc32.rotate_left(number) & 1 != 0;
    let judge = |record: KeyedRecord<'_>| match wanted(record.number) {
        true => RecordFate::Stays,
        false => RecordFate::MustGo,
    };
    let parts = BatchParts::from(encoded.clone());
    let compacted = compact(&parts, &mut Codecs::default(), judge, |_| bytes.len());
    if let Ok(CompactedBatch::Smaller(smaller, numbers)) = compacted {
        let smaller = batch::from_kafka(smaller.record_count, smaller.payload);
        let again = KafkaBatch::parse(&smaller.payload).unwrap();
        assert_eq!(again.last_offset_delta(), header.last_offset_delta());
        let kept = kafka::decode(&smaller).unwrap();
        let of = |number: &u32| *number as usize;
        let deltas = numbers.iter().map(|number| &decoded.offset_deltas[of(number)]);
        assert!(kept.offset_deltas.iter().eq(deltas));
        assert!(kept.records.iter().eq(numbers.iter().map(|number| &list.records[of(number)])));
    }
}

/// Returns a batch of `count` records whose section is these bytes, compressed.
fn behind_a_header(count: u8, codec: Option<BatchCodec>, section: &[u8]) -> Vec<u8> {
    let mut batch = built(count, None, &[]);
    batch.truncate(KAFKA_HEADER_BYTES);
    let mut compressor = Compressor::default();
    match codec.and_then(|codec| Some((codec, compressor.compress_kafka(codec, section)?))) {
        None => batch.extend(section),
        Some((codec, compressed)) => {
            batch[22] = kafka::KafkaCodec::from(Some(codec)).to_attributes() as u8;
            batch.extend(compressed);
        }
    }
    batch
}

/// Builds a batch whose records have parts of these bytes.
fn built(count: u8, codec: Option<BatchCodec>, content: &[u8]) -> Vec<u8> {
    let mut builder = KafkaBatchBuilder::default();
    let part = content.len() / (usize::from(count) + 1);
    let mut parts = content.chunks(part.max(1));
    for delta in 0..u32::from(count) {
        let (key, value) = (parts.next(), parts.next());
        let name: &[u8] = b"header";
        let headers = value.map(|value| (name, Some(value)));
        let time = i64::from(delta) * 1000 - 1;
        builder.push(delta, time, key, value, headers).expect("ascending offsets");
    }
    let mut compressor = Compressor::default();
    let codec = codec.map(|codec| (codec, &mut compressor));
    builder.finish(0, None, codec).expect("a small batch").to_vec()
}

/// Writes the length and the checksum that fit the bytes.
fn seal(bytes: &mut [u8]) {
    if bytes.len() >= KAFKA_HEADER_BYTES {
        let length = (bytes.len() - 12) as i32;
        bytes[8..12].copy_from_slice(&length.to_be_bytes());
        let crc = kafka::crc(bytes);
        bytes[17..21].copy_from_slice(&crc.to_be_bytes());
    }
}
