//! Drives helix-wal alone: appends groups, trims, checkpoints and recycles as a server would,
//! without network, Raft or an async runtime.

mod driver;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use helix_wal::WalStats;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;
use tokio::time::{Duration, Instant};

use self::driver::{WalDriver, WalUnderTest};
use crate::disk::DiskInfo;
use crate::format::grouped;
use crate::host::process_cpu_time;
use crate::load::check_count;
use crate::meter::Percentiles;
use crate::options::{OutputOptions, bytes, duration};
use crate::output::{ModeResult, ReportOutput};
use crate::progress::{self, LiveLine};
use crate::{exit, runner};

/// Existing file names shown in an error.
const NAMES_SHOWN: usize = 3;

/// Flags of `wal`.
#[derive(Debug, Clone, Args)]
pub(crate) struct WalArgs {
    /// Directory to write in; must be empty or missing [default: a temporary one in the working
    /// directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    #[arg(long, default_value = "disk")]
    storage: WalStorageKind,
    /// Write through the page cache, not with direct I/O
    #[arg(long)]
    buffered: bool,
    /// Preparation of segments until they are recycled
    #[arg(long, default_value = "auto")]
    prepare: SegmentPreparation,
    /// Bytes of one append, which becomes one group
    #[arg(long, default_value = "1MiB", value_parser = bytes)]
    group_size: usize,
    /// Bytes of one entry
    #[arg(long, default_value = "100KiB", value_parser = bytes)]
    entry_size: usize,
    /// Appends in flight
    #[arg(long, default_value_t = 2)]
    in_flight: usize,
    /// Bytes of a segment
    #[arg(long, default_value = "64MiB", value_parser = bytes)]
    segment_size: usize,
    /// Bytes kept before the log is trimmed, so that segments are recycled. The warm-up lasts at
    /// least until twice as much is written. 0 never trims: the files of a fresh log grow
    #[arg(long, default_value = "512MiB", value_parser = bytes)]
    keep: usize,
    /// Length of the measured phase
    #[arg(long, default_value = "5s", value_parser = duration)]
    duration: Duration,
    /// Shortest warm-up
    #[arg(long, default_value = "1s", value_parser = duration)]
    warmup: Duration,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    output: OutputOptions,
}

/// Storage of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum WalStorageKind {
    Disk,
    Memory,
}

/// Preparation of the log's segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum SegmentPreparation {
    /// Zero-filled while the disk has idle bandwidth, otherwise allocated
    Auto,
    /// Zero-filled
    Zero,
    /// Allocated
    Allocate,
}

impl From<SegmentPreparation> for helix_wal::Preparation {
    fn from(preparation: SegmentPreparation) -> Self {
        match preparation {
            SegmentPreparation::Auto => Self::Auto,
            SegmentPreparation::Zero => Self::Zero,
            SegmentPreparation::Allocate => Self::Allocate,
        }
    }
}

/// Result of a run.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct WalReport {
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
    /// Disk that was written to.
    disk: Option<DiskInfo>,
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
    notes: Vec<String>,
}

/// Runs the mode and returns its exit code.
///
/// # Errors
/// A flag is out of range, the log could not be opened, or it failed.
pub(crate) fn command(args: &WalArgs) -> Result<u8> {
    check(args).map_err(exit::usage)?;
    let output = ReportOutput::open(&args.output)?;
    output.deliver(&run(args)?)
}

/// Checks the flags and the target directory.
fn check(args: &WalArgs) -> Result<()> {
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

fn run(args: &WalArgs) -> Result<WalReport> {
    let log = WalUnderTest::open(args)?;
    let mut feed = WalDriver::new(log.wal.clone(), args);
    // Only for the line; the log has threads of its own.
    let runtime = runner::runtime(1)?;
    let entered = runtime.enter();
    let bytes = feed.all_bytes.clone();
    let line = LiveLine::show(move |elapsed| {
        let megabytes = bytes.load(Ordering::Relaxed) as f64 / 1e6;
        format!("appending: {} MB in {:.0} s", grouped(megabytes.round()), elapsed.as_secs_f64())
    });
    let warmup_bytes = 2 * args.keep as u64;
    progress::step("warming up");
    feed.run(|feed, elapsed| elapsed < args.warmup || feed.bytes < warmup_bytes)?;
    let warmup_bytes = feed.bytes;
    feed.reset();
    progress::step(&format!("measuring for {:?}", args.duration));
    let (before, cpu, start) = (log.wal.stats(), process_cpu_time(), Instant::now());
    feed.run(|_, elapsed| elapsed < args.duration)?;
    drop((line, entered));
    let (seconds, cpu) =
        (start.elapsed().as_secs_f64().max(1e-9), process_cpu_time().saturating_sub(cpu));
    let after = log.wal.stats();
    let recycled_segments = after.freed_segments - before.freed_segments;
    let report = WalReport {
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
        disk: log.path.as_deref().and_then(DiskInfo::of),
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

impl ModeResult for WalReport {
    fn mode(&self) -> &'static str {
        "wal"
    }

    fn exit_code(&self) -> u8 {
        0
    }

    fn text(&self, _: &Value) -> Result<String> {
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
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        args: WalArgs,
    }

    fn args(line: &str) -> WalArgs {
        Flags::parse_from(format!("wal {line}").split_whitespace()).args
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
