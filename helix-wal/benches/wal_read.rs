//! Cost of stream reads from memory, from the page cache and from the device.

#![allow(clippy::unwrap_used)]

mod support;

use std::hint::black_box;
use std::io;
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use helix_wal::storage::{DirStorage, File, Storage};
use helix_wal::{Options, ReadMode, Wal};
use support::{BenchLog, FETCH_BYTES, payload_bytes};

const ENTRY_BYTES: usize = 100 << 10;
const ENTRIES: u64 = 1000;

/// A directory whose reads always go to the device.
#[derive(Debug)]
struct UncachedStorage(DirStorage);

#[derive(Debug)]
struct UncachedFile(Arc<dyn File>);

impl Storage for UncachedStorage {
    fn lock(&self) -> io::Result<Box<dyn Send + Sync>> {
        self.0.lock()
    }
    fn list(&self) -> io::Result<Vec<String>> {
        self.0.list()
    }
    fn create(&self, name: &str, len: u64) -> io::Result<Arc<dyn File>> {
        Ok(Arc::new(UncachedFile(self.0.create(name, len)?)))
    }
    fn open(&self, name: &str) -> io::Result<Arc<dyn File>> {
        Ok(Arc::new(UncachedFile(self.0.open(name)?)))
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.0.rename(from, to)
    }
    fn exchange(&self, a: &str, b: &str) -> io::Result<()> {
        self.0.exchange(a, b)
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.remove(name)
    }
    fn sync_dir(&self) -> io::Result<()> {
        self.0.sync_dir()
    }
    fn free_bytes(&self) -> io::Result<u64> {
        self.0.free_bytes()
    }
    fn direct_io(&self) -> bool {
        self.0.direct_io()
    }
    fn describe(&self) -> String {
        self.0.describe()
    }
}

impl File for UncachedFile {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }
    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_at(data, offset)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read_device_at(buf, offset)
    }
    fn try_read_at(&self, _: &mut [u8], _: u64) -> io::Result<bool> {
        Ok(false)
    }
    fn read_device_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read_device_at(buf, offset)
    }
}

/// Builds a log of one stream with one position per entry.
fn filled(storage: impl Storage + 'static, tail_bytes: usize) -> Wal {
    let options = Options { tail_bytes, ..Options::default() };
    let mut log = BenchLog::open(storage, options, ENTRY_BYTES, 1);
    for _ in 0..ENTRIES {
        log.append(1);
    }
    log.wal
}

/// Fetches from `position`, wrapping at the end. Returns the bytes read.
fn fetch(wal: &Wal, position: &mut u64, read_mode: ReadMode) -> usize {
    let got = wal.read_stream(0, *position, ENTRIES, FETCH_BYTES, read_mode).unwrap().unwrap();
    *position = got.last().map_or(0, |last| (last.id.index + 1) % ENTRIES);
    payload_bytes(&got)
}

fn read(c: &mut Criterion) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let open = |name: &str| DirStorage::open(directory.path().join(name)).unwrap();
    let mut group = c.benchmark_group("fetch 1 MiB of 100 KiB entries");
    // Ten entries of 100 KiB fit below 1 MiB.
    group.throughput(Throughput::Bytes(10 * ENTRY_BYTES as u64));

    let wal = filled(open("tail"), 1 << 30);
    let mut position = 0;
    group.bench_function("tail in memory", |b| {
        b.iter(|| black_box(fetch(&wal, &mut position, ReadMode::CachedOnly)));
    });
    wal.close();

    let wal = filled(open("cached"), 0);
    let mut position = 0;
    for _ in 0..ENTRIES {
        fetch(&wal, &mut position, ReadMode::Blocking);
    }
    group.bench_function("page cache", |b| {
        b.iter(|| black_box(fetch(&wal, &mut position, ReadMode::Blocking)));
    });
    wal.close();

    let wal = filled(UncachedStorage(open("cold")), 0);
    let mut position = 0;
    group.bench_function("device", |b| {
        b.iter(|| black_box(fetch(&wal, &mut position, ReadMode::Blocking)));
    });
    wal.close();
    group.finish();
}

criterion_group!(benches, read);
criterion_main!(benches);
