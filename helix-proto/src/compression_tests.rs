//! Tests of the codecs: round trips, bytes of other implementations, and forged sizes.

use std::io::Write;

use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

use super::*;
use crate::batch::{DecodeError, decode, encode, is_intact};
use crate::log::v1::Record;

fn record(value: Vec<u8>) -> Record {
    Record { value: Some(value.into()), ..Record::default() }
}

fn compressible(bytes: usize) -> Vec<u8> {
    let text = b"2026-11-26T04:00:00Z INFO appended batch shard=3 offset=1842\n";
    text.iter().copied().cycle().take(bytes).collect()
}

fn noise(rng: &mut StdRng, bytes: usize) -> Vec<u8> {
    let mut noise = vec![0; bytes];
    rng.fill_bytes(&mut noise);
    noise
}

fn compressed(codec: BatchCodec, batch: &EncodedBatch) -> EncodedBatch {
    Compressor::default().compress(codec, batch, usize::MAX).expect("it shrinks")
}

/// Returns the batch with another payload, and a checksum that fits.
fn with_payload(batch: &EncodedBatch, payload: impl Into<Bytes>) -> EncodedBatch {
    let payload = payload.into();
    let crc32 = batch::crc(batch.version, batch.record_count, batch.compression, &payload);
    EncodedBatch { payload, crc32, ..batch.clone() }
}

fn rejection(batch: &EncodedBatch) -> DecompressError {
    match decode(batch) {
        Err(DecodeError::Decompress(error)) => error,
        other => panic!("{other:?}"),
    }
}

fn seeded() -> StdRng {
    let given = std::env::var("HELIX_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or(0xC0DEC);
    println!("HELIX_SEED={seed}");
    StdRng::seed_from_u64(seed)
}

#[test]
fn random_batches_survive_every_codec_with_reused_contexts() {
    let mut rng = seeded();
    let (mut compressor, mut decompressor) = (Compressor::default(), Decompressor::default());
    for _ in 0..300 {
        let value = |rng: &mut StdRng| {
            let bytes_max = if rng.random_bool(0.1) { 200_000 } else { 500 };
            let bytes = rng.random_range(0..bytes_max);
            record(if rng.random_bool(0.3) { noise(rng, bytes) } else { compressible(bytes) })
        };
        let records: Vec<_> = (0..rng.random_range(1..8)).map(|_| value(&mut rng)).collect();
        let plain = encode(&records);
        for codec in BatchCodec::ALL {
            let bytes = compressor.compress_bytes(codec, &plain.payload).unwrap().to_vec();
            let again = decompressor.decompress(codec, &bytes, plain.payload.len()).unwrap();
            assert_eq!(again, plain.payload);
            let owned = decompressor.decompress_to_bytes(codec, &bytes, plain.payload.len());
            assert_eq!(owned.unwrap(), plain.payload);
            let Some(batch) = compressor.compress(codec, &plain, usize::MAX) else {
                assert!(bytes.len() >= plain.payload.len());
                continue;
            };
            assert!(is_intact(&batch) && batch.payload.len() < plain.payload.len());
            assert_eq!(batch.uncompressed_bytes as usize, plain.payload.len());
            assert_eq!(decode(&batch).unwrap().records, records);
        }
    }
}

#[test]
fn bytes_of_other_implementations_decode() {
    // The payload of one record with 64 times "x", by the command lines of LZ4 1.9 (its block) and
    // Zstandard 1.5. Checksums: zlib.crc32(struct.pack("<III", 1, 1, codec) + payload).
    let lz4 = b"\x44\0\0\0\x5f\x0a\x42\x12\x40x\x01\0\x27\x50xxxxx";
    let zstd = b"\x28\xb5\x2f\xfd\x20\x44\x5d\0\0\x28\x0a\x42\x12\x40x\x01\0\x94\x80\x16";
    let golden = [(2, &lz4[..], 0xD38A10F4_u32), (3, &zstd[..], 0x4927F3D4)];
    let plain = encode(&[record(vec![b'x'; 64])]);
    for (compression, payload, crc32) in golden {
        let batch = EncodedBatch {
            version: 1,
            record_count: 1,
            compression,
            crc32,
            uncompressed_bytes: 68,
            payload: Bytes::from_static(payload),
        };
        assert_eq!(batch::uncompressed_payload(&batch).unwrap(), plain.payload);
        assert_eq!(decode(&batch).unwrap(), decode(&plain).unwrap());
    }
}

#[test]
fn incompressible_batches_are_left_as_they_are() {
    let mut rng = seeded();
    let random = encode(&[record(noise(&mut rng, 10_000))]);
    let text = encode(&[record(compressible(10_000))]);
    let mut compressor = Compressor::default();
    for codec in BatchCodec::ALL {
        assert_eq!(compressor.compress(codec, &random, usize::MAX), None);
        assert_eq!(compressor.compress(codec, &text, 10), None, "above the given limit");
        let once = compressor.compress(codec, &text, usize::MAX).unwrap();
        assert_eq!(compressor.compress(codec, &once, usize::MAX), None, "compressed already");
        assert_eq!(compressor.compress_bytes(codec, &[]), None);
        let long = vec![0; UNCOMPRESSED_BYTES_MAX + 1];
        assert_eq!(compressor.compress_bytes(codec, &long), None);
    }
}

#[test]
fn sizes_out_of_bounds_are_rejected_before_the_buffer_grows() {
    let mut compressor = Compressor::default();
    let mut decompressor = Decompressor::default();
    for codec in BatchCodec::ALL {
        let zeros = compressor.compress_bytes(codec, &vec![0; 1 << 20]).unwrap().to_vec();
        let mut reject = |payload: &[u8], stated| {
            let error = decompressor.decompress(codec, payload, stated).unwrap_err();
            assert_eq!(decompressor.buffer.capacity(), 0, "{codec:?}");
            error
        };
        assert_eq!(reject(&zeros, 0), DecompressError::NoSize);
        let (bytes, bytes_max) = (UNCOMPRESSED_BYTES_MAX + 1, UNCOMPRESSED_BYTES_MAX);
        assert_eq!(reject(&zeros, bytes), DecompressError::TooLarge { bytes, bytes_max });
        let stated = (1 << 20) - 1;
        assert_eq!(reject(&zeros, stated), DecompressError::Size { stated, found: 1 << 20 });
        assert_eq!(reject(&[], 5), DecompressError::Header(codec));
        assert_eq!(reject(&zeros[..3], 5), DecompressError::Header(codec));
    }
    // Nine bytes cannot be 8 MiB.
    let header = u32::try_from(UNCOMPRESSED_BYTES_MAX).unwrap().to_le_bytes();
    let bomb = [&header[..], &[0x1F, 0, 1, 0, 255]].concat();
    let stated = UNCOMPRESSED_BYTES_MAX;
    let rejected = decompressor.decompress(BatchCodec::Lz4, &bomb, stated).unwrap_err();
    let expected = DecompressError::Ratio { codec: BatchCodec::Lz4, payload: 9, stated };
    assert_eq!((rejected, decompressor.buffer.capacity()), (expected, 0));
    // A Zstandard header alone: single segment, content size of four bytes.
    let bomb = [&[0x28, 0xB5, 0x2F, 0xFD, 0xA0][..], &header[..], &[1, 0, 0]].concat();
    let rejected = decompressor.decompress(BatchCodec::Zstd, &bomb, stated).unwrap_err();
    let expected = DecompressError::Ratio { codec: BatchCodec::Zstd, payload: 12, stated };
    assert_eq!((rejected, decompressor.buffer.capacity()), (expected, 0));
}

#[test]
fn truncated_and_extended_payloads_are_rejected() {
    let plain = encode(&[record(compressible(3_000)), record(b"end".to_vec())]);
    for codec in BatchCodec::ALL {
        let whole = compressed(codec, &plain);
        for end in 0..whole.payload.len() {
            rejection(&with_payload(&whole, whole.payload.slice(..end)));
        }
        let longer = [&whole.payload[..], &[0]].concat();
        rejection(&with_payload(&whole, longer));
        let twice = [&whole.payload[..], &whole.payload[..]].concat();
        rejection(&with_payload(&whole, twice));
        let stated = EncodedBatch { uncompressed_bytes: 2_999, ..whole.clone() };
        assert!(matches!(rejection(&stated), DecompressError::Size { stated: 2_999, .. }));
    }
}

#[test]
fn payloads_padded_with_empty_blocks_are_rejected() {
    // Single segment, one byte of content size; a raw block of one byte between empty ones.
    let frame = |empty: usize| {
        let header = [0x28, 0xB5, 0x2F, 0xFD, 0x20, 2, 0x10, 0, 0, 0x0A, 0x09, 0, 0, 0];
        let (start, end) = header.split_at(6);
        [start, &[0_u8; 3].repeat(empty), end].concat()
    };
    let batch = encode(&[Record::default()]);
    assert_eq!(batch.payload, [0x0A, 0][..]);
    let zstd = |payload: Vec<u8>| {
        let compression = Compression::Zstd.into();
        with_payload(&EncodedBatch { compression, ..batch.clone() }, payload)
    };
    let error = rejection(&zstd(frame(200_000)));
    let codec = BatchCodec::Zstd;
    assert_eq!(error, DecompressError::Padded { codec, payload: 600_014, stated: 2 });
}

#[test]
fn bytes_that_do_not_shrink_fit_the_bound() {
    let mut rng = seeded();
    let mut compressor = Compressor::default();
    let mut decompressor = Decompressor::default();
    for bytes in [1, 2, 20, 300, 5_000, 70_000, 1 << 20, UNCOMPRESSED_BYTES_MAX] {
        let random = noise(&mut rng, bytes);
        for codec in BatchCodec::ALL {
            let payload = compressor.compress_bytes(codec, &random).unwrap();
            assert_eq!(decompressor.decompress(codec, payload, bytes).unwrap(), random);
        }
    }
}

#[test]
fn frames_without_their_content_size_are_rejected() {
    let plain = encode(&[record(compressible(3_000))]);
    let mut encoder = zstd::stream::Encoder::new(Vec::new(), ZSTD_LEVEL).unwrap();
    encoder.include_contentsize(false).unwrap();
    encoder.write_all(&plain.payload).unwrap();
    let frame = encoder.finish().unwrap();
    let batch = with_payload(&compressed(BatchCodec::Zstd, &plain), frame);
    assert_eq!(rejection(&batch), DecompressError::Header(BatchCodec::Zstd));
}

#[test]
fn damaged_payloads_never_panic() {
    let mut rng = seeded();
    let plain = encode(&[record(compressible(3_000)), record(noise(&mut rng, 200))]);
    let mut decompressor = Decompressor::default();
    for codec in BatchCodec::ALL {
        let whole = compressed(codec, &plain).payload;
        for _ in 0..5_000 {
            let mut payload = whole.to_vec();
            for _ in 0..rng.random_range(1..4) {
                let index = rng.random_range(0..payload.len());
                payload[index] ^= 1 << rng.random_range(0..8);
            }
            let decoded = decompressor.decompress(codec, &payload, plain.payload.len());
            assert!(decoded.is_err() || decoded.unwrap().len() == plain.payload.len());
        }
        // A failed payload leaves the context usable.
        let decoded = decompressor.decompress(codec, &whole, plain.payload.len());
        assert_eq!(decoded.unwrap(), plain.payload);
    }
}

#[test]
fn codecs_convert_to_the_wire_and_back() {
    for codec in BatchCodec::ALL {
        assert_eq!(BatchCodec::from_wire(codec.to_wire().into()), Ok(Some(codec)));
    }
    assert_eq!(BatchCodec::from_wire(0), Ok(None));
    assert_eq!(BatchCodec::from_wire(1), Ok(None));
    assert_eq!(BatchCodec::from_wire(-7), Err(UnknownCompression(-7)));
}
