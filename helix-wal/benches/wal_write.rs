//! Cost of one durable append at steady state: with retention and recycled segments.
//! Latency limits are checked here, not in tests; see docs/benchmarks.md.

#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod support;

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use helix_wal::storage::DirStorage;
use helix_wal::{Options, Wal};
use support::BenchLog;

/// Bytes between two checkpoints. Each checkpoint purges and trims everything before it.
const KEPT_BYTES: u64 = 64 << 20;

/// A log of one stream with retention.
struct Steady {
    log: BenchLog,
    kept_from: u64,
}

impl Steady {
    fn new(log: BenchLog) -> Self {
        Self { log, kept_from: 0 }
    }

    fn append(&mut self) {
        self.log.append(1);
        if self.log.bytes() - self.kept_from > KEPT_BYTES {
            self.kept_from = self.log.bytes();
            self.log.purge();
            self.log.wal.trim(0, self.log.next);
        }
    }
}

fn time(steady: &mut Steady, rounds: u64) -> Duration {
    let start = Instant::now();
    for _ in 0..rounds {
        steady.append();
    }
    start.elapsed()
}

fn write(c: &mut Criterion) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut group = c.benchmark_group("append and sync");
    for bytes in [4 << 10, 100 << 10, 1 << 20] {
        group.throughput(Throughput::Bytes(bytes as u64));
        for (kind, direct) in [("direct", true), ("buffered", false)] {
            let path = directory.path().join(format!("{kind}-{bytes}"));
            let storage = match direct {
                true => DirStorage::open(path),
                false => DirStorage::open_buffered(path),
            };
            let log = BenchLog::open(storage.unwrap(), Options::default(), bytes, 1);
            let mut steady = Steady::new(log);
            // Fills the pool with recycled segments.
            for _ in 0..(4 * KEPT_BYTES) / (bytes as u64).max(100 << 10) {
                steady.append();
            }
            let id = BenchmarkId::new(kind, format!("{} KiB", bytes >> 10));
            group.bench_function(id, |b| b.iter_custom(|rounds| time(&mut steady, rounds)));
            steady.log.wal.close();
        }
    }
    group.finish();
}

fn memory(c: &mut Criterion) {
    let mut group = c.benchmark_group("append in memory");
    for bytes in [1 << 10, 100 << 10] {
        group.throughput(Throughput::Bytes(bytes as u64));
        let mut steady = Steady::new(BenchLog::of(Wal::open_memory(Options::default()), bytes, 1));
        let id = BenchmarkId::from_parameter(format!("{} KiB", bytes >> 10));
        group.bench_function(id, |b| b.iter_custom(|rounds| black_box(time(&mut steady, rounds))));
    }
    group.finish();
}

criterion_group!(benches, write, memory);
criterion_main!(benches);
