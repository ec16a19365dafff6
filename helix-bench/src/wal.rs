//! Drives helix-wal alone: appends groups, trims, checkpoints and recycles as a server would,
//! without network, Raft or an async runtime.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use helix_proto::batch;
use helix_wal::storage::{BLOCK, DirStorage, Storage};
use helix_wal::{Entry, LogId, Options, Payload, Placement, Wal, WalStats};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;
use tempfile::TempDir;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Duration, Instant};

use crate::args::{SegmentPreparation, WalArgs, WalStorageKind};
use crate::exit::{self, BenchFailure};
use crate::format::grouped;
use crate::host::{HostInfo, process_cpu_time};
use crate::load::check_count;
use crate::meter::{LatencyHistogram, Percentiles};

const TERM: u64 = 1;
const STREAM: u64 = 1;
/// As large as the metadata that a server stores with a batch.
const HEAD: [u8; 48] = [7; 48];
/// Upper bound of the bytes of a frame beside its payload.
const FRAME_OVERHEAD: usize = 256;
/// Log bytes between two checkpoints, as in the server.
const CHECKPOINT_BYTES: u64 = 64 << 20;
/// Existing file names shown in an error.
const NAMES_SHOWN: usize = 3;
/// Bytes of different payloads, more than fits into the CPU caches.
const POOL_BYTES: usize = 16 << 20;

/// Result of a run.
#[derive(Debug, Serialize)]
pub(crate) struct WalReport {
    pub(crate) command: String,
    /// Payload bytes, in units of 10^6 bytes.
    mb_per_sec: f64,
    appends_per_sec: f64,
    records_per_sec: f64,
    errors: u64,
    /// From an append to its callback.
    latency_us: Option<Percentiles>,
    durability: &'static str,
    storage: WalStorageKind,
    dir: Option<PathBuf>,
    direct_io: bool,
    /// Segments that trimming freed for reuse during the measured phase.
    recycled_segments: u64,
    /// True if segments were recycled.
    is_steady: bool,
    /// Recent sync times as measured by the log.
    sync_p50_us: u64,
    sync_p99_us: u64,
    syncs_per_sec: f64,
    /// Mean bytes that were written and synced together.
    group_bytes_mean: f64,
    group_size: usize,
    entry_size: usize,
    in_flight: usize,
    segment_size: usize,
    keep: usize,
    prepare: SegmentPreparation,
    /// Segments prepared during the measured phase, and the zeroes written for that.
    zeroed_segments: u64,
    allocated_segments: u64,
    zeroed_bytes: u64,
    segments: u64,
    held_bytes: u64,
    bytes: u64,
    seconds: f64,
    warmup_bytes: u64,
    cpu_cores: f64,
    client_version: &'static str,
    machine: HostInfo,
    notes: Vec<String>,
}

/// Checks the flags and the target directory.
///
/// # Errors
/// A flag is out of range, or the directory is not empty.
pub(crate) fn check(args: &WalArgs) -> Result<()> {
    ensure!(args.entry_size > 0, "--entry-size must be at least 1");
    ensure!(
        args.group_size >= args.entry_size,
        "--group-size must be at least --entry-size ({}): a group has whole entries",
        args.entry_size
    );
    check_count("--in-flight", args.in_flight)?;
    ensure!(!args.duration.is_zero(), "--duration must be above 0");
    match &args.dir {
        Some(dir) if args.storage == WalStorageKind::Disk => check_empty(dir),
        _ => Ok(()),
    }
}

/// Rejects a directory that is not empty: the log would mix with files of another owner.
#[expect(clippy::disallowed_methods, reason = "checks whether the directory is empty")]
fn check_empty(dir: &Path) -> Result<()> {
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries.with_context(|| format!("--dir {}", dir.display()))?,
    };
    let mut names: Vec<_> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    let shown = names.len().min(NAMES_SHOWN);
    let more = match names.len() - shown {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    ensure!(
        names.is_empty(),
        "--dir {} is not empty: it has {}{more}; name a directory that is empty or missing",
        dir.display(),
        names[..shown].join(", ")
    );
    Ok(())
}

/// Runs the benchmark.
///
/// # Errors
/// The log could not be opened, or it failed.
pub(crate) fn run(args: &WalArgs) -> Result<WalReport> {
    let interrupt = Interrupt::watch()?;
    let log = WalUnderTest::open(args)?;
    let mut feed = WalDriver::new(log.wal.clone(), args, interrupt);
    let warmup_bytes = 2 * args.keep as u64;
    feed.run(|feed, elapsed| elapsed < args.warmup || feed.bytes < warmup_bytes)?;
    let warmup_bytes = feed.bytes;
    feed.reset();
    let (before, cpu, start) = (log.wal.stats(), process_cpu_time(), Instant::now());
    feed.run(|_, elapsed| elapsed < args.duration)?;
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), process_cpu_time().saturating_sub(cpu));
    let after = log.wal.stats();
    let recycled_segments = after.freed_segments - before.freed_segments;
    let report = WalReport {
        command: String::new(),
        mb_per_sec: feed.bytes as f64 / seconds / 1e6,
        appends_per_sec: feed.appends as f64 / seconds,
        records_per_sec: feed.entries as f64 / seconds,
        errors: 0,
        latency_us: feed.latency.percentiles(),
        durability: match args.storage {
            WalStorageKind::Disk => "synced",
            WalStorageKind::Memory => "memory",
        },
        storage: args.storage,
        dir: log.path.clone(),
        direct_io: after.direct_io,
        recycled_segments,
        is_steady: recycled_segments > 0,
        sync_p50_us: after.sync_p50_us,
        sync_p99_us: after.sync_p99_us,
        syncs_per_sec: (after.syncs - before.syncs) as f64 / seconds,
        group_bytes_mean: group_bytes_mean(&before, &after),
        group_size: args.group_size / args.entry_size * args.entry_size,
        entry_size: args.entry_size,
        in_flight: args.in_flight,
        segment_size: args.segment_size,
        keep: args.keep,
        prepare: args.prepare,
        zeroed_segments: after.zeroed_segments - before.zeroed_segments,
        allocated_segments: after.allocated_segments - before.allocated_segments,
        zeroed_bytes: after.zeroed_bytes - before.zeroed_bytes,
        segments: after.segments,
        held_bytes: after.held_bytes,
        bytes: feed.bytes,
        seconds,
        warmup_bytes,
        cpu_cores: cpu.as_secs_f64() / seconds,
        client_version: env!("CARGO_PKG_VERSION"),
        machine: HostInfo::here(),
        notes: notes(args, &after, recycled_segments),
    };
    feed.end()?;
    Ok(report)
}

fn notes(args: &WalArgs, after: &WalStats, recycled_segments: u64) -> Vec<String> {
    let mut notes = Vec::new();
    if args.storage == WalStorageKind::Disk && !after.direct_io && !args.buffered {
        notes.push("the file system has no direct I/O: writes went through the page cache".into());
    }
    if args.keep == 0 {
        notes.push("nothing is trimmed: the files of a fresh log grow".to_owned());
    } else if recycled_segments == 0 && args.storage == WalStorageKind::Disk {
        notes.push(
            "no segment was recycled while it was measured: not a steady state, use a longer \
             --duration"
                .to_owned(),
        );
    }
    notes
}

fn group_bytes_mean(before: &WalStats, after: &WalStats) -> f64 {
    let groups = after.groups.saturating_sub(before.groups).max(1);
    after.group_bytes.saturating_sub(before.group_bytes) as f64 / groups as f64
}

/// Returns a group limit that fits one append with its frame headers, but not two.
fn group_bytes(args: &WalArgs) -> usize {
    let entries = args.group_size / args.entry_size;
    args.group_size + entries * FRAME_OVERHEAD + BLOCK
}

/// The log and its directory.
struct WalUnderTest {
    wal: Wal,
    path: Option<PathBuf>,
    /// Removed with its contents on drop.
    _temporary: Option<TempDir>,
}

impl WalUnderTest {
    fn open(args: &WalArgs) -> Result<Self> {
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

/// Records a request to stop, so that the temporary directory is removed before the exit.
#[derive(Debug, Clone)]
struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    fn watch() -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("start a runtime")?;
        let interrupt = Self(Arc::new(AtomicBool::new(false)));
        let seen = interrupt.0.clone();
        let (is_watched, watched) = channel();
        let watch = async move {
            let (mut interrupted, mut terminated) = signals()?;
            // Ignored: the receiver may be gone.
            let _ = is_watched.send(());
            // A second signal exits at once.
            for is_last in [false, true] {
                tokio::select! {
                    _ = interrupted.recv() => {}
                    _ = terminated.recv() => {}
                }
                seen.store(true, Ordering::Relaxed);
                if is_last {
                    std::process::exit(exit::INTERRUPTED.into());
                }
            }
            std::io::Result::Ok(())
        };
        let thread = thread::Builder::new().name("signals".to_owned());
        thread.spawn(move || runtime.block_on(watch)).context("start a thread")?;
        watched.recv().context("watch for signals")?;
        Ok(interrupt)
    }

    fn check(&self) -> Result<()> {
        match self.0.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(BenchFailure {
                code: exit::INTERRUPTED,
                what: "interrupted".to_owned(),
                ..BenchFailure::default()
            }
            .into()),
        }
    }
}

fn signals() -> std::io::Result<(Signal, Signal)> {
    Ok((signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?))
}

/// Completion of one append.
struct AppendCompletion {
    group: u64,
    sent: Instant,
    result: Result<(), helix_wal::Error>,
}

/// Keeps appends in flight and acts as the state machine: places, trims and checkpoints.
struct WalDriver {
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
    interrupt: Interrupt,
    latency: LatencyHistogram,
    appends: u64,
    entries: u64,
    bytes: u64,
}

impl WalDriver {
    fn new(wal: Wal, args: &WalArgs, interrupt: Interrupt) -> Self {
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
            interrupt,
            latency: LatencyHistogram::new(),
            appends: 0,
            entries: 0,
            bytes: 0,
        }
    }

    fn reset(&mut self) {
        self.latency = LatencyHistogram::new();
        (self.appends, self.entries, self.bytes) = (0, 0, 0);
    }

    /// Appends while `goes_on` is true, then waits for the appends in flight.
    fn run(&mut self, goes_on: impl Fn(&Self, Duration) -> bool) -> Result<()> {
        let start = Instant::now();
        loop {
            self.interrupt.check()?;
            let is_over = !goes_on(self, start.elapsed());
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
        self.bytes += self.entries_per_group * self.entry_bytes;
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
    fn end(&mut self) -> Result<()> {
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

impl WalReport {
    /// Returns the report as a table.
    pub(crate) fn table(&self) -> String {
        let log = match &self.dir {
            Some(dir) => format!(
                "{} in {}",
                if self.direct_io { "direct" } else { "buffered" },
                dir.display()
            ),
            None => "memory".to_owned(),
        };
        let kept = match self.keep {
            0 => "nothing trimmed".to_owned(),
            keep => format!("{} MiB kept", keep >> 20),
        };
        let us = |of: fn(&Percentiles) -> f64| self.latency_us.as_ref().map_or(0.0, of);
        let mut out = format!(
            "wal    {log}: appends of {} KiB in entries of {} KiB, {} in flight, {kept}\n\n\
             {:>12} {:>12} {:>12} {:>12} {:>12} {:>12} {:>12}\n\
             {:>12} {:>12} {:>12.3} {:>12.3} {:>12.3} {:>12.3} {:>12.3}\n\n\
             durability {}, {} syncs/s, {:.0} KiB per group, {:.2} cores, {:.1} s after a warm-up \
             of {} MiB\n",
            self.group_size >> 10,
            self.entry_size >> 10,
            self.in_flight,
            "MB/s",
            "appends/s",
            "p50 ms",
            "p99 ms",
            "max ms",
            "sync p50 ms",
            "sync p99",
            grouped(self.mb_per_sec),
            grouped(self.appends_per_sec),
            us(|latency| latency.p50) / 1e3,
            us(|latency| latency.p99) / 1e3,
            us(|latency| latency.max) / 1e3,
            self.sync_p50_us as f64 / 1e3,
            self.sync_p99_us as f64 / 1e3,
            self.durability,
            grouped(self.syncs_per_sec),
            self.group_bytes_mean / 1024.0,
            self.cpu_cores,
            self.seconds,
            self.warmup_bytes >> 20,
        );
        for note in &self.notes {
            out.push_str(&format!("note: {note}\n"));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{BenchCli, BenchCommand};

    fn args(line: &str) -> WalArgs {
        let line = format!("helix-bench wal {line}");
        let BenchCommand::Wal(args) =
            BenchCli::try_parse_from(line.split_whitespace()).unwrap().command
        else {
            panic!("another command");
        };
        args
    }

    #[test]
    fn rejects_values_out_of_range() {
        assert!(check(&args("")).is_ok());
        for line in ["--group-size 0", "--entry-size 0", "--in-flight 0", "--duration 0"] {
            let error = check(&args(line)).unwrap_err().to_string();
            assert!(error.contains(line.split(' ').next().unwrap()), "{line}: {error}");
        }
        assert!(check(&args("--in-flight 65537")).is_err());
    }

    #[test]
    fn rejects_a_directory_that_is_not_empty() {
        let dir = tempfile::tempdir().unwrap();
        check_empty(dir.path()).unwrap();
        check_empty(&dir.path().join("missing")).unwrap();
        for name in ["d", "b", "a", "c"] {
            let _ = tempfile::Builder::new()
                .prefix(name)
                .rand_bytes(0)
                .tempdir_in(dir.path())
                .unwrap()
                .keep();
        }
        let error = check_empty(dir.path()).unwrap_err().to_string();
        assert!(error.contains("it has a, b, c and 1 more"), "{error}");
    }
}
