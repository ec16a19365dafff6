//! Cost of one durable append at steady state: with retention and recycled segments.
//! Latency limits are checked here, not in tests; see docs/benchmarks.md.

#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::hint::black_box;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use helix_wal::storage::{DirStorage, Storage};
use helix_wal::{Entry, LogId, Options, Payload, Placement, Wal};

/// Bytes between two checkpoints. Each checkpoint purges and trims everything before it.
const KEPT_BYTES: u64 = 64 << 20;

/// A log with one stream that is placed, checkpointed and trimmed like a server does.
struct Steady {
    wal: Wal,
    payload: Payload,
    next: u64,
    since: u64,
    done: (Sender<()>, Receiver<()>),
}

impl Steady {
    fn new(wal: Wal, bytes: usize) -> Self {
        let bytes: Bytes = (0..bytes).map(|i| (i * 131 + i / 257) as u8).collect();
        let payload = Payload { crc: crc32fast::hash(&bytes), crc_seed: 0, bytes };
        Self { wal, payload, next: 0, since: 0, done: channel() }
    }

    fn append(&mut self) {
        let id = LogId { term: 1, index: self.next };
        let head = Bytes::from_static(&[7; 48]);
        let entry = Entry { id, stream: 1, head, payload: self.payload.clone() };
        let done = self.done.0.clone();
        let on_durable = move |result: Result<(), helix_wal::Error>| {
            result.unwrap();
            done.send(()).unwrap();
        };
        self.wal.append(vec![entry], Box::new(on_durable));
        self.done.1.recv().unwrap();
        let placement = Placement { stream: 1, first: self.next, count: 1, time: self.next };
        self.wal.place(self.next, Some(placement)).unwrap();
        self.next += 1;
        self.since += self.payload.bytes.len() as u64;
        if self.since > KEPT_BYTES {
            self.checkpoint_and_trim(id);
        }
    }

    fn checkpoint_and_trim(&mut self, at: LogId) {
        self.since = 0;
        self.wal.checkpoint(at, Bytes::from_static(&[1; 512])).unwrap();
        self.wal.purge(at, Box::new(|result| result.unwrap()));
        self.wal.trim(1, self.next);
    }
}

fn durable(directory: &tempfile::TempDir, name: &str, direct: bool) -> Wal {
    let path = directory.path().join(name);
    let storage = if direct { DirStorage::open(path) } else { DirStorage::open_buffered(path) };
    let storage: Arc<dyn Storage> = Arc::new(storage.unwrap());
    let (wal, writer, keeper, _) = Wal::open(storage, Options::default()).unwrap();
    writer.spawn().unwrap();
    keeper.spawn().unwrap();
    wal
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
            let wal = durable(&directory, &format!("{kind}-{bytes}"), direct);
            let mut steady = Steady::new(wal.clone(), bytes);
            // Fills the pool with recycled segments.
            for _ in 0..(4 * KEPT_BYTES) / (bytes as u64).max(100 << 10) {
                steady.append();
            }
            let id = BenchmarkId::new(kind, format!("{} KiB", bytes >> 10));
            group.bench_function(id, |b| b.iter_custom(|rounds| time(&mut steady, rounds)));
            wal.close();
        }
    }
    group.finish();
}

fn memory(c: &mut Criterion) {
    let mut group = c.benchmark_group("append in memory");
    for bytes in [1 << 10, 100 << 10] {
        group.throughput(Throughput::Bytes(bytes as u64));
        let mut steady = Steady::new(Wal::open_memory(Options::default()), bytes);
        let id = BenchmarkId::from_parameter(format!("{} KiB", bytes >> 10));
        group.bench_function(id, |b| b.iter_custom(|rounds| black_box(time(&mut steady, rounds))));
    }
    group.finish();
}

criterion_group!(benches, write, memory);
criterion_main!(benches);
