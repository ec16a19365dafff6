//! Compression, decompression and validation of batches, by codec, size and contents.
//!
//! References: a copy of the same bytes, and a context that is created for each call. Only the
//! library can be asked for the latter, so `fresh` calls it directly.

#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::time::Duration;

use bytes::Bytes;
use criterion::{
    BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime,
};
use helix_proto::batch;
use helix_proto::compression::{BatchCodec, Compressor, Decompressor, ZSTD_LEVEL};
use helix_proto::log::v1::{EncodedBatch, Record};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const SIZES: [(&str, usize); 5] =
    [("64B", 64), ("512B", 512), ("4KiB", 4 << 10), ("64KiB", 64 << 10), ("1MiB", 1 << 20)];

/// Largest record of a batch.
const RECORD_BYTES: usize = 1000;

const WORDS: [&str; 16] = [
    "the",
    "log",
    "of",
    "a",
    "partition",
    "is",
    "replicated",
    "to",
    "followers",
    "before",
    "leader",
    "acknowledges",
    "it",
    "and",
    "readers",
    "wait",
];

/// Returns the value bytes of a batch.
fn contents(kind: &str, bytes: usize) -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(bytes as u64);
    let mut text = String::new();
    match kind {
        "zeros" => return vec![0; bytes],
        "random" => return (0..bytes).map(|_| random.random()).collect(),
        "text" => {
            while text.len() < bytes {
                text += WORDS[random.random_range(0..WORDS.len())];
                text.push(' ');
            }
        }
        _ => {
            while text.len() < bytes {
                let (user, cents) = (random.random_range(0..5000), random.random_range(0..100_000));
                text += &format!(
                    "{{\"time\":\"2026-11-26T10:{:02}:{:02}Z\",\"user\":{user},\"path\":\"/orders\
                     /{}\",\"status\":200,\"cents\":{cents}}}\n",
                    random.random_range(0..60),
                    random.random_range(0..60),
                    random.random::<u32>()
                );
            }
        }
    }
    text.truncate(bytes);
    text.into_bytes()
}

/// Returns a batch whose values have these bytes together.
fn uncompressed(kind: &str, bytes: usize) -> EncodedBatch {
    let values = contents(kind, bytes);
    let record =
        |value: &[u8]| Record { value: Some(Bytes::copy_from_slice(value)), ..Record::default() };
    batch::encode(&values.chunks(RECORD_BYTES).map(record).collect::<Vec<_>>())
}

fn fresh_zstd(group: &mut BenchmarkGroup<'_, WallTime>, payload: &[u8], packed: &[u8]) {
    let mut compressed = vec![0; zstd::zstd_safe::compress_bound(payload.len())];
    group.bench_function("zstd/encode-fresh", |bench| {
        bench.iter(|| {
            let mut context = zstd::bulk::Compressor::new(ZSTD_LEVEL).unwrap();
            context.compress_to_buffer(black_box(payload), &mut compressed).unwrap()
        });
    });
    let mut decoded = vec![0; payload.len()];
    group.bench_function("zstd/decode-fresh", |bench| {
        bench.iter(|| {
            let mut context = zstd::bulk::Decompressor::new().unwrap();
            context.decompress_to_buffer(black_box(packed), &mut decoded).unwrap()
        });
    });
}

fn fresh_lz4(group: &mut BenchmarkGroup<'_, WallTime>, payload: &[u8], packed: &[u8]) {
    group.bench_function("lz4/encode-fresh", |bench| {
        bench.iter(|| lz4_flex::block::compress_prepend_size(black_box(payload)));
    });
    group.bench_function("lz4/decode-fresh", |bench| {
        bench.iter(|| lz4_flex::block::decompress_size_prepended(black_box(packed)).unwrap());
    });
}

/// Measures everything that a producer, the leader and a consumer do with one batch.
fn of_batch(criterion: &mut Criterion, kind: &str, size: &str, batch: &EncodedBatch) {
    let mut group = criterion.benchmark_group(format!("codec/{kind}/{size}"));
    let payload = batch.payload.as_ref();
    group.throughput(Throughput::Bytes(payload.len() as u64));
    let mut copy = vec![0; payload.len()];
    group.bench_function("memcpy", |bench| {
        bench.iter(|| black_box(&mut copy[..]).copy_from_slice(black_box(payload)));
    });
    group.bench_function("none/validate", |bench| {
        bench.iter(|| {
            let batch = black_box(batch);
            assert!(batch::is_intact(batch));
            batch::scan_records(&batch.payload, batch.record_count, usize::MAX).unwrap();
        });
    });
    // Without the contents of the records: a topic with validate_records off.
    group.bench_function("none/validate-sizes", |bench| {
        bench.iter(|| {
            let batch = black_box(batch);
            assert!(batch::is_intact(batch));
            batch::scan(&batch.payload, batch.record_count, usize::MAX).unwrap();
        });
    });
    for codec in BatchCodec::ALL {
        let name = codec.name();
        let mut compressor = Compressor::default();
        let packed = compressor.compress_bytes(codec, payload).unwrap().to_vec();
        group.bench_function(format!("{name}/encode"), |bench| {
            bench.iter(|| compressor.compress_bytes(codec, black_box(payload)).unwrap().len());
        });
        let mut decompressor = Decompressor::default();
        group.bench_function(format!("{name}/decode"), |bench| {
            bench.iter(|| {
                let decoded = decompressor.decompress(codec, black_box(&packed), payload.len());
                decoded.unwrap().len()
            });
        });
        let crc = batch::crc(batch.version, batch.record_count, codec.to_wire().into(), &packed);
        group.bench_function(format!("{name}/validate"), |bench| {
            bench.iter(|| {
                let packed = black_box(&packed);
                let (version, records) = (batch.version, batch.record_count);
                assert_eq!(batch::crc(version, records, codec.to_wire().into(), packed), crc);
                let decoded = decompressor.decompress(codec, packed, payload.len()).unwrap();
                batch::scan_records(decoded, records, usize::MAX).unwrap();
            });
        });
        match codec {
            BatchCodec::Lz4 => fresh_lz4(&mut group, payload, &packed),
            BatchCodec::Zstd => fresh_zstd(&mut group, payload, &packed),
        }
    }
    group.finish();
}

fn codec(criterion: &mut Criterion) {
    for kind in ["zeros", "text", "json", "random"] {
        for (size, bytes) in SIZES {
            of_batch(criterion, kind, size, &uncompressed(kind, bytes));
        }
    }
}

criterion_group! {
    name = benches;
    // 240 measurements: together they take some four minutes.
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600));
    targets = codec
}
criterion_main!(benches);
