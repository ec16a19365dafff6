//! A log that the benchmarks fill, place and purge as a server does.

#![allow(clippy::unwrap_used, clippy::disallowed_methods)]
#![allow(dead_code, unreachable_pub, reason = "no benchmark uses all of it")]

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use bytes::Bytes;
use helix_wal::storage::Storage;
use helix_wal::{Entry, Error, LogId, Options, Payload, Placement, ReadMode, StoredEntry, Wal};
use rustix::fs::{Advice, fadvise};

/// Size of a consumer fetch or a follower request.
pub const FETCH_BYTES: usize = 1 << 20;

/// A log with entries of one size in interleaved streams.
pub struct BenchLog {
    pub wal: Wal,
    /// Entries so far.
    pub next: u64,
    payload: Payload,
    streams: u64,
    durable: (Sender<()>, Receiver<()>),
}

impl BenchLog {
    pub fn open(
        storage: impl Storage + 'static,
        options: Options,
        entry_bytes: usize,
        streams: u64,
    ) -> Self {
        let (wal, writer, keeper, _) = Wal::open(Arc::new(storage), options).unwrap();
        writer.spawn().unwrap();
        keeper.spawn().unwrap();
        Self::of(wal, entry_bytes, streams)
    }

    pub fn of(wal: Wal, entry_bytes: usize, streams: u64) -> Self {
        let bytes: Bytes = (0..entry_bytes).map(|i| (i * 131 + i / 257) as u8).collect();
        let payload = Payload { crc: crc32fast::hash(&bytes), crc_seed: 0, bytes };
        Self { wal, next: 0, payload, streams, durable: channel() }
    }

    /// Appends entries, and returns the time until they were durable.
    pub fn append(&mut self, count: u64) -> Duration {
        let indexes = self.next..self.next + count;
        let entry = |index: u64| Entry {
            id: LogId { term: 1, index },
            stream: index % self.streams,
            head: Bytes::from_static(&[7; 48]),
            payload: self.payload.clone(),
        };
        let entries = indexes.clone().map(entry).collect();
        let durable = self.durable.0.clone();
        let on_durable = move |result: Result<(), Error>| {
            result.unwrap();
            durable.send(()).unwrap();
        };
        let start = Instant::now();
        self.wal.append(entries, Box::new(on_durable));
        self.durable.1.recv().unwrap();
        let took = start.elapsed();
        for index in indexes {
            let (stream, first) = (index % self.streams, index / self.streams);
            let placement = Placement { stream, first, count: 1, time: index };
            self.wal.place(index, Some(placement)).unwrap();
        }
        self.next += count;
        took
    }

    pub fn bytes(&self) -> u64 {
        self.next * self.payload.bytes.len() as u64
    }

    /// Writes a checkpoint, and purges all entries.
    pub fn purge(&self) {
        let at = LogId { term: 1, index: self.next - 1 };
        self.wal.checkpoint(at, Bytes::from_static(&[1; 512])).unwrap();
        self.wal.purge(at, Box::new(|result| result.unwrap()));
    }
}

/// Returns the payload bytes of entries.
pub fn payload_bytes(entries: &[StoredEntry]) -> usize {
    entries.iter().map(|entry| entry.payload.bytes.len()).sum()
}

/// Reads from the cache if all is there, else from the device, as the server does.
pub fn read_cached_first<T>(read: impl Fn(ReadMode) -> Option<T>) -> T {
    read(ReadMode::CachedOnly).or_else(|| read(ReadMode::Blocking)).unwrap()
}

/// Evicts a directory's files from the page cache.
pub fn evict(directory: &Path) {
    for file in std::fs::read_dir(directory).unwrap() {
        let file = std::fs::File::open(file.unwrap().path()).unwrap();
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    }
}
