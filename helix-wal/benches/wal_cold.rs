//! Throughput of reads of an uncached log, alone and beside a writer, and of the writer meanwhile.
//! The log has 2 GiB or `HELIX_COLD_MIB`. It is evicted from the page cache before every pass.

#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod support;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use helix_wal::Options;
use helix_wal::storage::DirStorage;
use support::{BenchLog, FETCH_BYTES, evict, payload_bytes, read_cached_first};

const ENTRY_BYTES: usize = 100 << 10;
const STREAMS: u64 = 4;
/// Entries per append of the concurrent writer.
const GROUP_ENTRIES: u64 = 10;
/// Entries that the concurrent writer keeps.
const KEPT_ENTRIES: u64 = 1000;

/// Reads from a position. Returns the bytes read and the next position.
type Read<'a> = dyn Fn(u64) -> (usize, u64) + 'a;

fn open(path: &Path, streams: u64) -> BenchLog {
    BenchLog::open(DirStorage::open(path).unwrap(), Options::default(), ENTRY_BYTES, streams)
}

/// A reader that reads the log repeatedly and evicts it before every pass.
struct Reader<'a> {
    directory: &'a Path,
    end: u64,
    next: u64,
    read: &'a Read<'a>,
}

impl Reader<'_> {
    /// Returns the time to read this many bytes.
    fn run(&mut self, bytes: u64) -> Duration {
        let (mut spent, mut got) = (Duration::ZERO, 0);
        while got < bytes {
            if self.next >= self.end {
                self.next = 0;
                evict(self.directory);
            }
            let start = Instant::now();
            let (some, next) = (self.read)(self.next);
            spent += start.elapsed();
            assert!(some > 0, "nothing at {}", self.next);
            (got, self.next) = (got + some as u64, next);
        }
        // Whole fetches read slightly more than requested.
        spent.mul_f64(bytes as f64 / got as f64)
    }
}

/// Appends to another log until it is dropped, and counts the bytes.
struct ConcurrentWriter {
    stop: Arc<AtomicBool>,
    bytes: Arc<AtomicU64>,
    thread: Option<thread::JoinHandle<()>>,
}

impl ConcurrentWriter {
    fn start(mut log: BenchLog) -> Self {
        let (stop, bytes) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, written) = (Arc::clone(&stop), Arc::clone(&bytes));
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                log.append(GROUP_ENTRIES);
                written.fetch_add(GROUP_ENTRIES * ENTRY_BYTES as u64, Ordering::Relaxed);
                if log.next.is_multiple_of(640) {
                    log.purge();
                    log.wal.trim(0, log.next.saturating_sub(KEPT_ENTRIES));
                }
            }
            log.wal.close();
        });
        Self { stop, bytes, thread: Some(thread) }
    }

    /// Returns the write rate while `run` executes, in MB/s.
    fn rate(&self, run: impl FnOnce()) -> f64 {
        let (start, before) = (Instant::now(), self.bytes.load(Ordering::Relaxed));
        run();
        let bytes = self.bytes.load(Ordering::Relaxed) - before;
        bytes as f64 / start.elapsed().as_secs_f64() / 1e6
    }
}

impl Drop for ConcurrentWriter {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn cold(c: &mut Criterion) {
    let temporary = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let directory = temporary.path().join("log");
    let mib = std::env::var("HELIX_COLD_MIB").map_or(2048, |mib| mib.parse::<u64>().unwrap());
    let mut log = open(&directory, STREAMS);
    while log.bytes() < mib << 20 {
        log.append(GROUP_ENTRIES * STREAMS);
    }
    let (wal, end) = (log.wal.clone(), log.next);
    // Excludes the tail, which is in memory.
    let end = end - 2 * (Options::default().tail_bytes / ENTRY_BYTES) as u64;
    let by_index = |at: u64| {
        let got = read_cached_first(|read_mode| wal.read(at..end, FETCH_BYTES, read_mode).unwrap());
        (got.iter().map(|entry| entry.payload.bytes.len()).sum(), at + got.len() as u64)
    };
    let by_stream = |at: u64| {
        let got = read_cached_first(|read_mode| {
            wal.read_stream(0, at / STREAMS, end, FETCH_BYTES, read_mode).unwrap()
        });
        (payload_bytes(&got), at + got.len() as u64 * STREAMS)
    };
    let writer = Mutex::new(None);
    for beside in [false, true] {
        if beside {
            let log = open(&temporary.path().join("beside"), 1);
            let log = writer.lock().unwrap().insert(ConcurrentWriter::start(log)).rate(|| {
                thread::sleep(Duration::from_secs(4));
            });
            println!("the writer alone: {log:.0} MB/s");
        }
        let name = if beside { "cold, beside a writer" } else { "cold" };
        let mut group = c.benchmark_group(name);
        group.throughput(Throughput::Bytes(FETCH_BYTES as u64));
        let reads: [(&str, &Read<'_>); 2] =
            [("by index", &by_index), ("one stream of four", &by_stream)];
        for (name, read) in reads {
            let mut reader = Reader { directory: &directory, end, next: end, read };
            let mut run = || {
                group.bench_function(name, |b| {
                    b.iter_custom(|rounds| reader.run(rounds * FETCH_BYTES as u64));
                });
            };
            match &*writer.lock().unwrap() {
                Some(writer) => println!("the writer meanwhile: {:.0} MB/s", writer.rate(&mut run)),
                None => run(),
            }
        }
        group.finish();
    }
    drop(writer);
    log.wal.close();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).measurement_time(Duration::from_secs(4));
    targets = cold
}
criterion_main!(benches);
