//! The log under test, and the state machine that drives it.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use helix_proto::batch;
use helix_wal::storage::{BLOCK, DirStorage, Storage};
use helix_wal::{Entry, LogId, Options, Payload, Placement, Wal};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tempfile::TempDir;
use tokio::time::{Duration, Instant};

use super::{WalArgs, WalStorageKind};
use crate::interrupt;
use crate::meter::LatencyHistogram;

const TERM: u64 = 1;
const STREAM: u64 = 1;
/// As large as the metadata that a server stores with a batch.
const HEAD: [u8; 48] = [7; 48];
/// Upper bound of the bytes of a frame beside its payload.
const FRAME_OVERHEAD: usize = 256;
/// Log bytes between two checkpoints, as in the server.
const CHECKPOINT_BYTES: u64 = 64 << 20;
/// Bytes of different payloads, more than fits into the CPU caches.
const POOL_BYTES: usize = 16 << 20;

/// Returns a group limit that fits one append with its frame headers, but not two.
fn group_bytes(args: &WalArgs) -> usize {
    let entries = args.group_size / args.entry_size;
    args.group_size + entries * FRAME_OVERHEAD + BLOCK
}

/// The log and its directory.
pub(super) struct WalUnderTest {
    pub(super) wal: Wal,
    pub(super) path: Option<PathBuf>,
    /// Removed with its contents on drop.
    _temporary: Option<TempDir>,
}

impl WalUnderTest {
    pub(super) fn open(args: &WalArgs) -> Result<Self> {
        let options = Options {
            segment_bytes: args.segment_size as u64,
            group_bytes: group_bytes(args),
            preparation: args.prepare.into(),
            ..Options::default()
        };
        if args.storage == WalStorageKind::Memory {
            return Ok(Self { wal: Wal::open_memory(options), path: None, _temporary: None });
        }
        let (path, temporary) = match &args.dir {
            Some(path) => (path.clone(), None),
            None => {
                // In the working directory, because the system's temporary directory may be in
                // memory.
                let dir = tempfile::Builder::new().prefix("helix-bench-wal-").tempdir_in(".");
                let dir = dir.context("make a temporary directory")?;
                (dir.path().to_owned(), Some(dir))
            }
        };
        let storage = match args.buffered {
            true => DirStorage::open_buffered(&path),
            false => DirStorage::open(&path),
        };
        let storage: Arc<dyn Storage> = Arc::new(storage.context("open the directory")?);
        let (wal, writer, keeper, recovered) = Wal::open(storage, options).context("open")?;
        ensure!(recovered.created, "{} already contains a log", path.display());
        writer.spawn().context("start the writer")?;
        keeper.spawn().context("start the keeper")?;
        Ok(Self { wal, path: Some(path), _temporary: temporary })
    }
}

impl Drop for WalUnderTest {
    /// Stops the log's threads before the directory is removed; they would create new files in it.
    fn drop(&mut self) {
        self.wal.close();
    }
}

/// Completion of one append.
struct AppendCompletion {
    group: u64,
    sent: Instant,
    result: Result<(), helix_wal::Error>,
}

/// Keeps appends in flight and acts as the state machine: places, trims and checkpoints.
pub(super) struct WalDriver {
    wal: Wal,
    entries_per_group: u64,
    entry_bytes: u64,
    in_flight: u64,
    keep: u64,
    payloads: Vec<Payload>,
    done: Receiver<AppendCompletion>,
    on_done: Sender<AppendCompletion>,
    next_group: u64,
    /// Groups that are placed. Later groups may be durable but out of order.
    placed_groups: u64,
    durable: BTreeSet<u64>,
    unsaved_bytes: u64,
    checkpoints: Option<CheckpointThread>,
    pub(super) latency: LatencyHistogram,
    pub(super) appends: u64,
    pub(super) entries: u64,
    pub(super) bytes: u64,
    /// Bytes of the whole run, for its progress.
    pub(super) all_bytes: Arc<AtomicU64>,
}

impl WalDriver {
    pub(super) fn new(wal: Wal, args: &WalArgs) -> Self {
        let mut rng = StdRng::seed_from_u64(args.seed);
        let count = (POOL_BYTES / args.entry_size).clamp(2, 256);
        let payloads = (0..count).map(|_| payload(args.entry_size, &mut rng)).collect();
        let (on_done, done) = channel();
        Self {
            checkpoints: Some(CheckpointThread::spawn(wal.clone())),
            wal,
            entries_per_group: (args.group_size / args.entry_size) as u64,
            entry_bytes: args.entry_size as u64,
            in_flight: args.in_flight as u64,
            keep: args.keep as u64,
            payloads,
            done,
            on_done,
            next_group: 0,
            placed_groups: 0,
            durable: BTreeSet::new(),
            unsaved_bytes: 0,
            latency: LatencyHistogram::new(),
            appends: 0,
            entries: 0,
            bytes: 0,
            all_bytes: Arc::default(),
        }
    }

    pub(super) fn reset(&mut self) {
        self.latency = LatencyHistogram::new();
        (self.appends, self.entries, self.bytes) = (0, 0, 0);
    }

    /// Appends while `goes_on` is true, unless a stop is requested, and waits for the appends in
    /// flight.
    pub(super) fn run(&mut self, goes_on: impl Fn(&Self, Duration) -> bool) -> Result<()> {
        let start = Instant::now();
        loop {
            let is_over = interrupt::is_requested() || !goes_on(self, start.elapsed());
            let in_flight = self.next_group - self.placed_groups - self.durable.len() as u64;
            if is_over && in_flight == 0 {
                return Ok(());
            }
            if !is_over && in_flight < self.in_flight {
                self.append();
            } else {
                let done = self.done.recv().context("the log has dropped an append")?;
                self.on_durable(done)?;
            }
        }
    }

    fn append(&mut self) {
        let group = self.next_group;
        self.next_group += 1;
        let entries = (0..self.entries_per_group).map(|number| self.entry(group, number)).collect();
        let (on_done, sent) = (self.on_done.clone(), Instant::now());
        self.wal.append(
            entries,
            Box::new(move |result| {
                // Ignored: the receiver is gone if the run has failed.
                let _ = on_done.send(AppendCompletion { group, sent, result });
            }),
        );
    }

    fn entry(&self, group: u64, number: u64) -> Entry {
        let position = group * self.entries_per_group + number;
        let payload = &self.payloads[(position % self.payloads.len() as u64) as usize];
        Entry {
            id: LogId { term: TERM, index: position + 1 },
            stream: STREAM,
            head: Bytes::from_static(&HEAD),
            payload: payload.clone(),
        }
    }

    fn on_durable(&mut self, done: AppendCompletion) -> Result<()> {
        done.result.context("append")?;
        self.latency.record(done.sent.elapsed());
        self.appends += 1;
        self.entries += self.entries_per_group;
        let bytes = self.entries_per_group * self.entry_bytes;
        self.bytes += bytes;
        self.all_bytes.fetch_add(bytes, Ordering::Relaxed);
        // Callbacks come newest first, but groups are placed in order.
        self.durable.insert(done.group);
        while self.durable.remove(&self.placed_groups) {
            self.place_group()?;
        }
        Ok(())
    }

    fn place_group(&mut self) -> Result<()> {
        let first = self.placed_groups * self.entries_per_group;
        let next = first + self.entries_per_group;
        for position in first..next {
            let placement = Placement { stream: STREAM, first: position, count: 1, time: position };
            self.wal.place(position + 1, Some(placement)).context("place")?;
        }
        self.placed_groups += 1;
        if self.keep == 0 {
            return Ok(());
        }
        self.unsaved_bytes += self.entries_per_group * self.entry_bytes;
        if self.unsaved_bytes >= CHECKPOINT_BYTES {
            self.unsaved_bytes = 0;
            self.wal.trim(STREAM, next.saturating_sub(self.keep / self.entry_bytes));
            let at = LogId { term: TERM, index: next };
            if self.checkpoints.as_ref().is_some_and(|thread| thread.asked.send(at).is_err()) {
                bail!("a checkpoint failed");
            }
        }
        Ok(())
    }

    /// Waits for the last checkpoint.
    pub(super) fn end(&mut self) -> Result<()> {
        let Some(CheckpointThread { asked, thread }) = self.checkpoints.take() else {
            return Ok(());
        };
        drop(asked);
        match thread.join() {
            Ok(result) => result.context("checkpoint"),
            Err(_) => bail!("the checkpoint thread has failed"),
        }
    }
}

fn payload(size: usize, rng: &mut StdRng) -> Payload {
    let mut bytes = vec![0; size];
    rng.fill(&mut bytes[..]);
    let bytes = Bytes::from(bytes);
    let (crc_seed, crc) = (batch::crc_seed(1, 1, 1), batch::crc(1, 1, 1, &bytes));
    Payload { bytes, crc, crc_seed }
}

/// Thread for checkpoints, which block, as in the server.
struct CheckpointThread {
    asked: Sender<LogId>,
    thread: JoinHandle<Result<(), helix_wal::Error>>,
}

impl CheckpointThread {
    fn spawn(wal: Wal) -> Self {
        let (asked, to_do) = channel();
        let thread = thread::Builder::new()
            .name("checkpoints".to_owned())
            .spawn(move || {
                for at in to_do {
                    wal.checkpoint(at, Bytes::from_static(b"state"))?;
                    // Ignored: a failure poisons the log, and later appends report it.
                    wal.purge(at, Box::new(|_| {}));
                }
                Ok(())
            })
            .expect("spawns the checkpoint thread");
        Self { asked, thread }
    }
}
