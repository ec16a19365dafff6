//! Compaction by key of one batch, by codec: reading its keys, and building it with half of its
//! records.
//!
//! Throughput counts the records before compression.

#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::time::Duration;

use bytes::Bytes;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use helix_proto::batch;
use helix_proto::compaction::{
    BatchParts, Codecs, CompactedBatch, KeyedRecord, RecordFate, compact, visit_records,
};
use helix_proto::compression::{BatchCodec, Compressor};
use helix_proto::log::v1::Record;

const CODECS: [(&str, Option<BatchCodec>); 3] =
    [("none", None), ("lz4", Some(BatchCodec::Lz4)), ("zstd", Some(BatchCodec::Zstd))];

/// Records of a batch, and bytes of a value.
const SHAPES: [(&str, u32, usize); 2] = [("1000x100B", 1_000, 100), ("100x8KiB", 100, 8 << 10)];

/// Returns a batch whose values compress to about half.
fn batch_of(records: u32, size: usize, codec: Option<BatchCodec>) -> (BatchParts, u64) {
    let byte = |number: u32, at: usize| match at.is_multiple_of(2) {
        true => 0,
        false => (number as usize * 31 * at % 251) as u8,
    };
    let record = |number: u32| Record {
        key: Some(Bytes::from(format!("key-{number}"))),
        value: Some((0..size).map(|at| byte(number, at)).collect()),
        ..Record::default()
    };
    let plain = batch::encode(&(0..records).map(record).collect::<Vec<_>>());
    let bytes = plain.payload.len() as u64;
    let compress = |codec| Compressor::default().compress(codec, &plain, usize::MAX).unwrap();
    let encoded = codec.map(compress);
    (BatchParts::from(encoded.unwrap_or(plain)), bytes)
}

fn compaction(criterion: &mut Criterion) {
    for (shape, records, size) in SHAPES {
        for (name, codec) in CODECS {
            let (batch, bytes) = batch_of(records, size, codec);
            let mut codecs = Codecs::default();
            let mut group = criterion.benchmark_group(format!("compaction/{shape}/{name}"));
            group.throughput(Throughput::Bytes(bytes));
            group.bench_function("visit", |bench| {
                bench.iter(|| {
                    let mut keys = 0;
                    let visit = |record: KeyedRecord<'_>| {
                        keys += record.key.map_or(0, <[u8]>::len);
                        true
                    };
                    visit_records(black_box(&batch), &mut codecs, visit).unwrap();
                    black_box(keys)
                });
            });
            group.bench_function("compact", |bench| {
                bench.iter(|| {
                    let judge = |it: KeyedRecord<'_>| match it.number.is_multiple_of(2) {
                        true => RecordFate::Stays,
                        false => RecordFate::MustGo,
                    };
                    let kept = compact(black_box(&batch), &mut codecs, judge, |_| usize::MAX);
                    assert!(matches!(kept, Ok(CompactedBatch::Smaller(..))));
                });
            });
            group.finish();
        }
    }
}

criterion_group! {
    name = benches;
    // 12 measurements: together they take ten seconds.
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600));
    targets = compaction
}
criterion_main!(benches);
