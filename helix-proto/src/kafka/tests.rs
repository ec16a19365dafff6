//! Tests of Kafka batches: bytes of another implementation, round trips, and forged ones.

use bytes::Bytes;
use prost::Message;
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

use super::lz4_frame::Lz4FrameError;
use super::*;
use crate::batch::{self, DecodeError};
use crate::compression::{BatchCodec, Compressor};
use crate::log::v1::{EncodedBatch, Header, Record, RecordList};

fn seeded() -> StdRng {
    let given = std::env::var("HELIX_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or(0x4AF4A);
    println!("HELIX_SEED={seed}");
    StdRng::seed_from_u64(seed)
}

fn bytes(digits: &str) -> Vec<u8> {
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.as_bytes().chunks(2).map(byte).collect()
}

fn random_records(rng: &mut StdRng, count: usize) -> Vec<Record> {
    let some = |rng: &mut StdRng, bytes_max: usize| {
        rng.random_bool(0.8).then(|| {
            let byte = rng.random_range(b'a'..=b'z');
            Bytes::from(vec![byte; rng.random_range(0..bytes_max)])
        })
    };
    let record = |_| Record {
        key: some(rng, 40),
        value: some(rng, 400),
        headers: (0..rng.random_range(0..3))
            .map(|_| Header {
                name: "ä".repeat(rng.random_range(0..90)),
                value: some(rng, 200).unwrap_or_default(),
            })
            .collect(),
        event_time: rng
            .random_bool(0.7)
            .then(|| millisecond_time(rng.random_range(-5_000_000_000_000..5_000_000_000_000))),
    };
    (0..count).map(record).collect()
}

fn random_codec(rng: &mut StdRng) -> Option<BatchCodec> {
    [None, Some(BatchCodec::Lz4), Some(BatchCodec::Zstd)][rng.random_range(0..3)]
}

fn encode(records: &[Record], codec: Option<BatchCodec>) -> EncodedBatch {
    let mut compressor = Compressor::default();
    from_records(records, codec.map(|codec| (codec, &mut compressor))).unwrap()
}

/// Returns the batch with other bytes and valid checksums.
fn resealed(change: impl FnOnce(&mut Vec<u8>), batch: &EncodedBatch) -> EncodedBatch {
    let mut payload = batch.payload.to_vec();
    change(&mut payload);
    if payload.len() >= KAFKA_HEADER_BYTES {
        build::seal(&mut payload).unwrap();
    }
    batch::from_kafka(batch.record_count, payload.into())
}

#[test]
fn batches_match_the_published_vectors() {
    let published = include_str!("../../../docs/client-vectors.json");
    let published: serde_json::Value = serde_json::from_str(published).unwrap();
    let optional = |digits: &serde_json::Value| digits.as_str().map(bytes).map(Bytes::from);
    let records = published["kafka_records"].as_array().unwrap();
    // Made by kafka-python, which uses the packages lz4, zstandard and python-snappy.
    let mut codecs = Vec::new();
    for vector in published["kafka_batches"].as_array().unwrap() {
        let payload = Bytes::from(bytes(vector["payload_hex"].as_str().unwrap()));
        let encoded = batch::from_kafka(4, payload.clone());
        assert_eq!(vector["version"], encoded.version, "{vector}");
        assert_eq!(vector["record_count"], encoded.record_count, "{vector}");
        assert_eq!(vector["crc32"], encoded.crc32, "{vector}");
        let kafka = KafkaBatch::parse(&payload).unwrap();
        kafka.check_appendable().unwrap();
        assert_eq!(vector["codec"], kafka.codec().name());
        assert_eq!((kafka.last_offset_delta(), kafka.record_count()), (3, 4));
        assert_eq!(kafka.max_timestamp(), 1_764_288_060_123);
        if kafka.codec() == KafkaCodec::None {
            let producer = (kafka.producer_id(), kafka.producer_epoch(), kafka.base_sequence());
            assert_eq!(producer, (4711, 3, 17));
        }
        codecs.push(kafka.codec());
        let is_legacy = matches!(kafka.codec(), KafkaCodec::Gzip | KafkaCodec::Snappy);
        if is_legacy && !cfg!(feature = "kafka-codecs") {
            let error = decode(&encoded).unwrap_err();
            let disabled = KafkaBatchError::CodecDisabled(kafka.codec());
            assert!(matches!(error, DecodeError::Kafka(found) if found == disabled), "{error}");
            continue;
        }
        let decoded = decode(&encoded).unwrap();
        assert_eq!(decoded.records.len(), records.len());
        for (found, expected) in decoded.records.iter().zip(records) {
            assert_eq!(found.key, optional(&expected["key_hex"]));
            assert_eq!(found.value, optional(&expected["value_hex"]));
            let time = millisecond_time(expected["timestamp_ms"].as_i64().unwrap());
            assert_eq!(found.event_time, Some(time));
            let headers: Vec<_> =
                found.headers.iter().map(|it| (&it.name[..], &it.value)).collect();
            let expected = expected["headers"].as_array().unwrap();
            assert_eq!(headers.len(), expected.len());
            for ((name, value), expected) in headers.into_iter().zip(expected) {
                assert_eq!(
                    (expected[0].as_str(), value),
                    (Some(name), &optional(&expected[1]).unwrap_or_default())
                );
            }
        }
        assert_eq!(decoded.offset_deltas, [0, 1, 2, 3]);
    }
    assert_eq!(codecs.len(), 5);
}

#[test]
fn null_and_empty_differ_also_in_headers() {
    let mut builder = KafkaBatchBuilder::default();
    let headers = [(&b"n"[..], None), (b"e", Some(&b""[..]))];
    builder.push(0, NO_TIMESTAMP, None, Some(b""), headers).unwrap();
    builder.push(1, 7, Some(b""), None, []).unwrap();
    let batch = builder.finish(40, None, None).unwrap();
    let kafka = KafkaBatch::parse(&batch).unwrap();
    assert_eq!((kafka.base_offset(), kafka.base_timestamp()), (40, NO_TIMESTAMP));
    let records: Vec<_> = kafka.records(kafka.record_section()).map(Result::unwrap).collect();
    assert_eq!((records[0].key, records[0].value), (None, Some(&b""[..])));
    assert_eq!((records[1].key, records[1].value), (Some(&b""[..]), None));
    assert_eq!((records[0].timestamp(), records[1].timestamp()), (None, Some(7)));
    let headers: Vec<_> = records[0].headers.map(|header| (header.name, header.value)).collect();
    assert_eq!(headers, [("n", None), ("e", Some(&b""[..]))]);
}

#[test]
fn random_batches_survive_every_codec_and_conversion() {
    let mut rng = seeded();
    for _ in 0..200 {
        let count = rng.random_range(1..40);
        let records = random_records(&mut rng, count);
        let encoded = encode(&records, random_codec(&mut rng));
        let kafka = KafkaBatch::parse(&encoded.payload).unwrap();
        kafka.check_appendable().unwrap();
        kafka.check_records(&mut Decompressor::default(), 1 << 20).unwrap();
        let decoded = decode(&encoded).unwrap();
        assert_eq!(decoded.records, records);
        let plain = batch::uncompressed_payload(&encoded).unwrap();
        let list = RecordList { records };
        assert_eq!(plain, list.encode_to_vec());
        assert_eq!(batch::decode(&encoded).unwrap(), list);
    }
}

#[test]
fn frames_of_other_implementations_decode() {
    let expected: Vec<u8> =
        b"0123456789abcdef".iter().copied().cycle().take(vectors::DECODED_BYTES).collect();
    let decode = |codec, section: &[u8], bytes_max| {
        let batch = with_section(codec, section);
        let kafka = KafkaBatch::parse(&batch).unwrap();
        Decompressor::default().decompress_kafka(&kafka, bytes_max).map(<[u8]>::to_vec)
    };
    for (codec, frame) in
        [(KafkaCodec::Lz4, vectors::LZ4_LINKED), (KafkaCodec::Zstd, vectors::ZSTD_STREAM)]
    {
        let frame = bytes(frame);
        for bytes_max in [expected.len(), 1 << 20] {
            assert_eq!(decode(codec, &frame, bytes_max).as_ref(), Ok(&expected));
        }
        let bytes_max = expected.len() - 1;
        assert_eq!(decode(codec, &frame, bytes_max), Err(KafkaBatchError::TooLarge { bytes_max }));
        for byte in 0..frame.len() {
            let mut changed = frame.clone();
            changed[byte] ^= 0x10;
            if let Ok(decoded) = decode(codec, &changed, 1 << 20) {
                // A bit that only says how the frame was made.
                assert_eq!(decoded, expected, "byte {byte} of {}", codec.name());
            }
            assert!(decode(codec, &frame[..byte], 1 << 20).is_err());
        }
    }
}

/// Builds a batch of one record whose record section is this.
fn with_section(codec: KafkaCodec, section: &[u8]) -> Vec<u8> {
    let record = Record::default();
    let mut batch = encode(&[record], None).payload[..KAFKA_HEADER_BYTES].to_vec();
    batch[22] = codec.to_attributes() as u8;
    batch.extend(section);
    build::seal(&mut batch).unwrap();
    batch
}

#[test]
fn bombs_take_no_memory_beyond_the_limit() {
    let bytes_max = 1 << 20;
    let zeros = vec![0; 4 << 20];
    let mut lz4 = Vec::new();
    lz4_frame::encode(&zeros, &mut lz4_flex::block::CompressTable::large(), &mut lz4);
    let mut zstd = Compressor::default();
    let zstd = zstd.compress_kafka(BatchCodec::Zstd, &zeros).unwrap().to_vec();
    for (codec, section) in [(KafkaCodec::Lz4, lz4), (KafkaCodec::Zstd, zstd)] {
        let batch = with_section(codec, &section);
        let kafka = KafkaBatch::parse(&batch).unwrap();
        let mut decompressor = Decompressor::default();
        let error = kafka.check_records(&mut decompressor, bytes_max).unwrap_err();
        assert_eq!(error, KafkaBatchError::TooLarge { bytes_max }, "{}", codec.name());
        assert!(decompressor.buffer.len() <= bytes_max + 1, "{}", decompressor.buffer.len());
    }
    let large = with_section(KafkaCodec::None, &zeros);
    let error = KafkaBatch::parse(&large).unwrap().check_records(&mut Decompressor::default(), 9);
    assert_eq!(error, Err(KafkaBatchError::TooLarge { bytes_max: 9 }));
}

#[test]
fn lz4_frames_of_every_size_decode() {
    let mut rng = seeded();
    let mut table = lz4_flex::block::CompressTable::large();
    for length in [1, 100, 64 << 10, (64 << 10) + 1, 300_000, 5 << 20] {
        let mut plain = vec![0; length];
        rng.fill_bytes(&mut plain[..length / 2]);
        let (mut frame, mut output) = (Vec::new(), Vec::new());
        lz4_frame::encode(&plain, &mut table, &mut frame);
        let decoded = lz4_frame::decode(&frame, &mut output, length).unwrap();
        assert_eq!(output[..decoded], plain);
        let error = lz4_frame::decode(&frame, &mut output, length - 1).unwrap_err();
        assert_eq!(error, Lz4FrameError::TooLarge);
        frame.push(0);
        let error = lz4_frame::decode(&frame, &mut output, length).unwrap_err();
        assert_eq!(error, Lz4FrameError::Malformed);
    }
}

#[test]
fn each_defect_of_a_header_has_its_error() {
    let records = [Record::default(), Record::default()];
    let good = encode(&records, None);
    let error = |change: &dyn Fn(&mut Vec<u8>)| {
        let batch = resealed(change, &good).payload;
        KafkaBatch::parse(&batch).and_then(|batch| batch.check_appendable()).unwrap_err()
    };
    assert_eq!(error(&|it| it.truncate(60)), KafkaBatchError::Truncated { bytes: 60 });
    assert_eq!(error(&|it| it[16] = 1), KafkaBatchError::Magic(1));
    assert_eq!(error(&|it| it[22] = 5), KafkaBatchError::UnknownCodec(5));
    assert_eq!(error(&|it| it[22] = 0x10), KafkaBatchError::Attributes { attributes: 0x10 });
    assert_eq!(error(&|it| it[22] = 0x28), KafkaBatchError::Attributes { attributes: 0x28 });
    assert_eq!(error(&|it| it[21] = 1), KafkaBatchError::Attributes { attributes: 0x100 });
    let offsets = |record_count, last_offset_delta| KafkaBatchError::Offsets {
        record_count,
        last_offset_delta,
    };
    assert_eq!(error(&|it| it[26] = 0), offsets(2, 0));
    assert_eq!(error(&|it| it[26] = 2), offsets(2, 2));
    assert_eq!(error(&|it| it[60] = 0), KafkaBatchError::Empty);
    let negative = |name| KafkaBatchError::Negative { name, value: i32::MIN + 1 };
    assert_eq!(error(&|it| it[23] = 0x80), negative("lastOffsetDelta"));
    let negative = KafkaBatchError::Negative { name: "recordsCount", value: i32::MIN + 2 };
    assert_eq!(error(&|it| it[57] = 0x80), negative);
    let mut longer = good.payload.to_vec();
    longer.push(0);
    let found = longer.len() - 12;
    let stated = i32::try_from(found).unwrap() - 1;
    assert_eq!(KafkaBatch::parse(&longer), Err(KafkaBatchError::Length { stated, found }));
    assert_eq!(KafkaBatch::first_of(&longer), Some(&good.payload[..]));
    assert_eq!(KafkaBatch::first_of(&good.payload[..good.payload.len() - 1]), None);
    assert_eq!(KafkaBatch::first_of(&[0xFF; 61]), None);
}

#[test]
fn each_defect_of_the_records_has_its_error() {
    let records = [Record { value: Some(Bytes::from_static(b"value")), ..Record::default() }];
    let good = encode(&records, None);
    let error = |change: &dyn Fn(&mut Vec<u8>)| {
        let batch = resealed(change, &good).payload;
        let kafka = KafkaBatch::parse(&batch).unwrap();
        kafka.check_records(&mut Decompressor::default(), 1 << 20).unwrap_err()
    };
    let record = |what| KafkaBatchError::Record { record: 0, byte: 0, what };
    // length | attributes | timestamp delta | offset delta | key length | value length | value |
    // header count
    assert_eq!(error(&|it| it[61] = 1), record("its length is negative"));
    assert_eq!(error(&|it| it[61] += 2), record("it is truncated"));
    assert_eq!(error(&|it| it[61] -= 2), record("it is truncated"));
    let order = "its offset delta is not between the previous one and lastOffsetDelta";
    assert_eq!(error(&|it| it[64] = 2), record(order));
    assert_eq!(error(&|it| it[64] = 1), record("its offset delta is negative"));
    assert_eq!(error(&|it| it[65] = 3), record("a length is negative"));
    assert_eq!(error(&|it| it[66] -= 2), record("its header count is negative"));
    assert_eq!(error(&|it| it[66] -= 4), record("its header count is negative"));
    assert_eq!(error(&|it| *it.last_mut().unwrap() = 2), record("it is truncated"));
    let longer = |it: &mut Vec<u8>| {
        it.push(0);
        it[61] += 2;
    };
    assert_eq!(error(&longer), record("bytes follow its headers"));
    assert_eq!(error(&|it| it.push(0)), KafkaBatchError::TooMany { stated: 1, bytes: 1 });
    assert_eq!(error(&|it| it.truncate(61)), KafkaBatchError::TooFew { stated: 1, found: 0 });
    let header = |name: &[u8]| {
        let mut builder = KafkaBatchBuilder::default();
        builder.push(0, 0, None, None, [(name, None)]).unwrap();
        let batch = builder.finish(0, None, None).unwrap();
        let kafka = KafkaBatch::parse(&batch).unwrap();
        kafka.check_records(&mut Decompressor::default(), 1 << 20)
    };
    assert_eq!(header(b"name"), Ok(()));
    assert_eq!(header(&[0xFF]), Err(record("a header name is not UTF-8")));
}

#[test]
fn damaged_batches_never_panic_and_are_never_read_as_others() {
    let mut rng = seeded();
    for _ in 0..3_000 {
        let count = rng.random_range(1..5);
        let records = random_records(&mut rng, count);
        let good = encode(&records, random_codec(&mut rng));
        let mut payload = good.payload.to_vec();
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..payload.len());
            match rng.random_range(0..3) {
                0 => payload.truncate(at.max(1)),
                1 => payload.insert(at, rng.random()),
                _ => payload[at] ^= 1 << rng.random_range(0..8),
            }
        }
        let is_same = payload[CHECKED_START.min(payload.len())..] == good.payload[CHECKED_START..];
        assert!(KafkaBatch::parse(&payload).is_err() || is_same);
        let resealed = resealed(|_| (), &batch::from_kafka(good.record_count, payload.into()));
        let Ok(decoded) = decode(&resealed) else { continue };
        let plain = batch::uncompressed_payload(&resealed).unwrap();
        assert_eq!(RecordList { records: decoded.records }.encode_to_vec(), plain);
    }
}

#[test]
fn an_empty_batch_covers_its_offsets() {
    let empty = empty_batch(100, 41).unwrap();
    let kafka = KafkaBatch::parse(&empty).unwrap();
    assert_eq!((kafka.base_offset(), kafka.last_offset_delta()), (100, 41));
    assert_eq!((kafka.record_count(), empty.len()), (0, KAFKA_HEADER_BYTES));
    kafka.check_records(&mut Decompressor::default(), 0).unwrap();
    assert_eq!(kafka.check_appendable(), Err(KafkaBatchError::Empty));
}

#[test]
fn builder_refuses_what_a_batch_cannot_hold() {
    let mut builder = KafkaBatchBuilder::default();
    builder.push(3, i64::MAX, None, None, []).unwrap();
    let error = builder.push(3, i64::MAX, None, None, []).unwrap_err();
    assert_eq!(error, KafkaBuildError::OffsetDelta(3));
    let error = builder.push(4, -2, None, None, []).unwrap_err();
    assert_eq!(error, KafkaBuildError::Timestamp(-2));
    let error = builder.push(1 << 31, 0, None, None, []).unwrap_err();
    assert_eq!(error, KafkaBuildError::OffsetDelta(1 << 31));
    assert_eq!(builder.record_count(), 1);
    let error = builder.finish(0, Some(2), None).unwrap_err();
    assert_eq!(error, KafkaBuildError::OffsetDelta(2));
}

#[test]
fn times_convert_in_both_directions() {
    for time in [i64::MIN, -62_135_596_800_000, -1, 0, 1, 999, 1_764_288_000_123, i64::MAX] {
        assert_eq!(milliseconds(&millisecond_time(time)), time);
    }
    let time = prost_types::Timestamp { seconds: 1, nanos: 999_999_999 };
    assert_eq!(milliseconds(&time), 1999);
}

#[test]
fn compacted_batches_keep_their_offsets_and_their_records() {
    use crate::compaction::{BatchParts, Codecs, CompactedBatch, KeyedRecord, RecordFate, compact};
    let mut rng = seeded();
    let mut codecs = Codecs::default();
    for round in 0..200 {
        let count = rng.random_range(1..40);
        let records = random_records(&mut rng, count);
        let codec = [None, Some(BatchCodec::Lz4), Some(BatchCodec::Zstd)][round % 3];
        let encoded = encode(&records, codec);
        let header = KafkaBatch::parse(&encoded.payload).unwrap();
        let share = rng.random_range(0.0..1.0);
        let wanted: Vec<bool> = records.iter().map(|_| rng.random_bool(share)).collect();
        let judge = |record: KeyedRecord<'_>| {
            let sent = &records[record.number as usize];
            assert_eq!(record.key, sent.key.as_deref());
            assert_eq!(record.is_tombstone(), sent.key.is_some() && sent.value.is_none());
            match wanted[record.number as usize] {
                true => RecordFate::Stays,
                false => RecordFate::MustGo,
            }
        };
        let parts = BatchParts::from(encoded.clone());
        let compacted = compact(&parts, &mut codecs, judge, |_| 0).unwrap();
        let expected: Vec<u32> =
            (0..).zip(&wanted).filter_map(|(number, wanted)| wanted.then_some(number)).collect();
        let (smaller, kept) = match compacted {
            CompactedBatch::Unchanged => {
                assert_eq!(expected.len(), records.len());
                continue;
            }
            CompactedBatch::Empty => {
                assert!(expected.is_empty());
                continue;
            }
            CompactedBatch::Smaller(smaller, kept) => (smaller, kept),
        };
        assert_eq!(kept, expected);
        assert_eq!((smaller.version, smaller.compression), (KAFKA_BATCH_VERSION, 0));
        let again = batch::from_kafka(smaller.record_count, smaller.payload.clone());
        assert_eq!(again.crc32, smaller.crc);
        let kafka = KafkaBatch::parse(&again.payload).unwrap();
        assert_eq!(kafka.last_offset_delta(), header.last_offset_delta());
        assert_eq!(kafka.base_timestamp(), header.base_timestamp());
        let decoded = decode(&again).unwrap();
        assert_eq!(decoded.offset_deltas, expected);
        assert!(decoded.records.iter().eq(expected.iter().map(|it| &records[*it as usize])));
        let plain = batch::uncompressed_payload(&again).unwrap();
        assert_eq!(plain.len(), smaller.uncompressed_bytes as usize);
        // Compacts again: the numbers count the records that are left.
        let judge = |record: KeyedRecord<'_>| match record.number {
            0 => RecordFate::MustGo,
            _ => RecordFate::Stays,
        };
        match compact(&smaller, &mut codecs, judge, |_| 0).unwrap() {
            CompactedBatch::Empty => assert_eq!(expected.len(), 1),
            CompactedBatch::Smaller(smaller, _) => {
                let again = batch::from_kafka(smaller.record_count, smaller.payload);
                assert_eq!(decode(&again).unwrap().offset_deltas, expected[1..]);
            }
            CompactedBatch::Unchanged => panic!("a record must go"),
        }
    }
}
