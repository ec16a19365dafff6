//! `helix wal`: inspects, verifies and repairs the logs of a stopped node.
//! Only `repair --drop` changes files. The directory is one log or the data directory of a node,
//! which has a log for each shard.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use helix_proto::kafka::KAFKA_BATCH_VERSION;
use helix_server::log::Head;
use helix_server::raft::decode_head;
use helix_wal::storage::{DirStorage, Storage};
use helix_wal::{
    CleanMark, DamagedEnd, Finding, InspectedEntry, LogId, LogReport, SegmentReport, Wal,
};
use schemars::JsonSchema;
use serde::Serialize;

use crate::args::{DroppablePart, GlobalArgs, WalSubcommand};
use crate::compression::{self, codec_name};
use crate::exit::{CliError, Exit};
use crate::output::{Output, message};
use crate::units;

/// Runs a command. Blocks on the disk, so it must not run on an async runtime.
pub(crate) fn run(global: &GlobalArgs, command: &WalSubcommand) -> anyhow::Result<()> {
    let output = Output { format: global.output };
    match command {
        WalSubcommand::Inspect { dir, codecs } => {
            let logs = open_logs(dir)?;
            if logs.iter().any(|log| log.is_in_use) && !global.quiet {
                message!("a node is using these files; the ends of its logs may be out of date");
            }
            inspect_all(output, &logs, *codecs)
        }
        WalSubcommand::Verify { dir } => {
            let logs = open_logs(dir)?;
            if logs.iter().any(|log| log.is_in_use) {
                let what = format!("a node uses {}", dir.display());
                let failure = CliError::new(Exit::Precondition, what);
                let why = "unfinished writes would look like damage";
                return Err(failure.why(why).hint("stop the node first").into());
            }
            verify(output, dir, &logs)
        }
        WalSubcommand::Repair { dir, drop, yes: _ } => {
            let logs = open_logs(dir)?;
            if logs.iter().any(|log| log.is_in_use) {
                let what = format!("a node uses {}", dir.display());
                let failure = CliError::new(Exit::Precondition, what);
                return Err(failure.hint("stop the node first").into());
            }
            repair(global, dir, logs, *drop)
        }
    }
}

/// Shows the damaged ends of logs, and drops them if requested.
fn repair(
    global: &GlobalArgs,
    root: &Path,
    logs: Vec<Log>,
    drop: Option<DroppablePart>,
) -> anyhow::Result<()> {
    let output = Output { format: global.output };
    let mut ends = Vec::new();
    let mut damage_elsewhere = 0;
    for Log { dir, storage, .. } in logs {
        let storage: Arc<dyn Storage> = Arc::new(storage);
        let end = Wal::damaged_end(&storage).map_err(|error| not_repairable(&dir, &error))?;
        if end.is_none() {
            let findings = helix_wal::verify(storage.as_ref());
            if let Some(unread) = findings.iter().find(|finding| finding.is_unread) {
                let what = format!("{}: {unread}", dir.display());
                return Err(CliError::new(Exit::Error, what).into());
            }
            damage_elsewhere += findings.len();
        }
        if let Some(end) = end {
            let row = DroppedEnd::new(&dir, end, drop.is_some());
            ends.push((dir, storage, row));
        }
    }
    let rows: Vec<_> = ends.iter().map(|(_, _, row)| row).collect();
    let shown = output.show(&rows);
    if drop.is_some() {
        for (dir, storage, _) in &ends {
            let cut = Wal::truncate_damaged_end(storage);
            cut.with_context(|| format!("repair {}", dir.display()))?;
        }
    }
    let verdict: anyhow::Result<()> = match drop {
        _ if damage_elsewhere > 0 => {
            let ranges = damaged_ranges(damage_elsewhere);
            let what = format!("{ranges} not verify, none of them at the end of a log");
            let failure = CliError::new(Exit::VerificationFailed, what);
            let why = "only the end of a log can be dropped; undamaged records can still be read";
            Err(failure.why(why).hint(repair_hint(root)).into())
        }
        _ if ends.is_empty() => {
            if !global.quiet {
                message!("nothing to repair: no damage found");
            }
            Ok(())
        }
        Some(DroppablePart::End) => Ok(()),
        None => {
            let failure = CliError::new(Exit::VerificationFailed, "the end of a log is damaged");
            let why = "nothing was changed; a repair permanently drops the entries listed above";
            let hint = "if the shard has other replicas, start the node: they rebuild this one\n\
                        --drop end --yes   if this is the only replica";
            Err(failure.why(why).hint(hint).into())
        }
    };
    verdict.and(shown)
}

fn not_repairable(dir: &Path, error: &helix_wal::Error) -> anyhow::Error {
    if error.is_shortage() {
        return CliError::new(Exit::Error, format!("{}: {error}", dir.display())).into();
    }
    let failure = CliError::new(Exit::VerificationFailed, format!("{}: {error}", dir.display()));
    let failure = failure.why("the damage is not at the end of the log, so it cannot be dropped");
    failure
        .hint(
            "if the shard has other replicas, start the node: they rebuild this one\nhelix restore",
        )
        .into()
}

/// Returns hints for damage that is not at the end of a log.
fn repair_hint(dir: &Path) -> String {
    format!(
        "helix wal verify {}   names file and bytes\n\
         if the shard has other replicas, start the node: they rebuild this one\n\
         helix restore   if there is a backup",
        dir.display()
    )
}

/// Returns the number of damaged ranges as the start of a sentence.
fn damaged_ranges(count: usize) -> String {
    match count {
        1 => "1 range does".to_owned(),
        _ => format!("{} ranges do", units::count(count as u64)),
    }
}

fn verify(output: Output, dir: &Path, logs: &[Log]) -> anyhow::Result<()> {
    let mut verified = WalVerification { logs: Vec::new(), findings: Vec::new() };
    for log in logs {
        let findings = helix_wal::verify(&log.storage);
        // A log whose state file is damaged has only findings.
        let report = helix_wal::inspect(&log.storage).unwrap_or_default();
        verified.logs.push(VerifiedLog {
            dir: log.dir.clone(),
            segment_count: report.segments.len(),
            used_bytes: report.segments.iter().map(|segment| segment.used_bytes).sum(),
            damaged: findings.iter().filter(|finding| !finding.is_unread).count(),
        });
        verified.findings.extend(findings.into_iter().map(|finding| WalFinding::new(log, finding)));
    }
    output.show_with_verdict(&verified, verdict(dir, &verified.findings))
}

/// # Errors
/// Fails if there are damaged ranges, or if a part of the logs could not be read.
fn verdict(dir: &Path, findings: &[WalFinding]) -> anyhow::Result<()> {
    let unread = findings.iter().filter(|finding| finding.is_unread).count();
    let damaged = findings.len() - unread;
    if damaged == 0 && unread > 0 {
        let failure = CliError::new(Exit::Error, "a part of the logs could not be read");
        let why = "the process has no file descriptor or memory; nothing is known to be damaged";
        return Err(failure.why(why).hint("raise the limit of open files (ulimit -n)").into());
    }
    if damaged == 0 {
        return Ok(());
    }
    let what = format!("{} not verify", damaged_ranges(damaged));
    let failure = CliError::new(Exit::VerificationFailed, what);
    let why = "the disk lost or changed data; nodes never serve damaged bytes";
    let hint = format!(
        "if the shard has other replicas, start the node: they rebuild this one\n\
         helix wal repair {}   if this is the only replica: shows what would be dropped\n\
         helix restore   if there is a backup",
        dir.display()
    );
    Err(failure.why(why).hint(hint).into())
}

/// An opened log.
struct Log {
    dir: PathBuf,
    storage: DirStorage,
    is_in_use: bool,
}

/// Opens the log in a directory, or the logs in its subdirectories.
fn open_logs(dir: &Path) -> anyhow::Result<Vec<Log>> {
    let not_found = || {
        let what = if dir.exists() { "contains no log" } else { "does not exist" };
        let failure = CliError::new(Exit::NotFound, format!("{} {what}", dir.display()));
        failure
            .hint("use the data directory of a node, such as ./helix-data, or one of its shard-N")
    };
    let mut directories = Vec::new();
    if is_log(dir) {
        directories.push(dir.to_owned());
    } else if dir.is_dir() {
        directories = subdirectories(dir).with_context(|| format!("list {}", dir.display()))?;
        directories.retain(|directory| is_log(directory));
    }
    if directories.is_empty() {
        return Err(not_found().into());
    }
    directories.into_iter().map(open).collect()
}

/// Returns true if a directory has files of a log; opening another directory would create a log. A
/// log that lost its other files still has segments.
fn is_log(dir: &Path) -> bool {
    let has = |name: &str| dir.join(name).is_file();
    has("state") || has("lock") || holds_segments(dir)
}

fn holds_segments(dir: &Path) -> bool {
    let is_segment = |entry: &std::fs::DirEntry| entry.path().extension() == Some("seg".as_ref());
    dir.read_dir().is_ok_and(|mut entries| entries.any(|entry| entry.is_ok_and(|e| is_segment(&e))))
}

/// Lists the subdirectories, sorted by name.
fn subdirectories(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries: io::Result<Vec<_>> = dir.read_dir()?.collect();
    let mut directories: Vec<_> = entries?.iter().map(std::fs::DirEntry::path).collect();
    directories.retain(|path| path.is_dir());
    directories.sort();
    Ok(directories)
}

fn open(dir: PathBuf) -> anyhow::Result<Log> {
    let storage = DirStorage::open_buffered(&dir);
    let storage = storage.with_context(|| format!("open {}", dir.display()))?;
    let is_in_use = match storage.lock() {
        Ok(_) => false,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => true,
        // Without it, unfinished writes of a node could look like damage.
        Err(error) if helix_wal::Error::shortage_of(&error).is_some() => {
            return Err(error).with_context(|| format!("lock {}", dir.display()));
        }
        Err(_) => false,
    };
    Ok(Log { dir, storage, is_in_use })
}

/// Lists the logs of a stopped node.
///
/// # Errors
/// Fails if one of them cannot be read.
pub(crate) fn inspect(dir: &Path) -> anyhow::Result<Vec<InspectedLog>> {
    let inspected = |log: &Log| {
        let report = helix_wal::inspect(&log.storage);
        report
            .map(|report| InspectedLog::new(&log.dir, report, None))
            .map_err(|error| unreadable(&log.dir, &error))
    };
    open_logs(dir)?.iter().map(inspected).collect()
}

/// Shows the readable logs. Fails with the error of the first unreadable one.
fn inspect_all(output: Output, logs: &[Log], with_codecs: bool) -> anyhow::Result<()> {
    let mut inspected = Vec::new();
    let mut outcome = Ok(());
    for log in logs {
        let mut codecs = with_codecs.then(CodecCounts::default);
        let report = match &mut codecs {
            None => helix_wal::inspect(&log.storage),
            Some(codecs) => {
                helix_wal::inspect_entries(&log.storage, &mut |entry| codecs.add(entry))
            }
        };
        match report {
            Ok(report) => inspected.push(InspectedLog::new(&log.dir, report, codecs)),
            Err(error) => outcome = outcome.and_then(|()| Err(unreadable(&log.dir, &error))),
        }
    }
    output.show_with_verdict(&inspected, outcome)
}

/// Returns the error of a log that cannot be inspected.
fn unreadable(dir: &Path, error: &helix_wal::Error) -> anyhow::Error {
    let what = format!("inspect {}: {error}", dir.display());
    let helix_wal::Error::Damaged { .. } = error else {
        return CliError::new(Exit::Error, what).into();
    };
    let failure = CliError::new(Exit::VerificationFailed, what);
    let why = "the state file lists the segments and their synced lengths; without it, their \
               content is unknown";
    let hint = "if the shard has other replicas, start the node: they rebuild this one\n\
                helix restore   if there is a backup";
    failure.why(why).hint(hint).into()
}

/// State of a log.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct InspectedLog {
    dir: PathBuf,
    has_vote: bool,
    purged_index: Option<u64>,
    checkpoint_index: Option<u64>,
    checkpoint_bytes: u64,
    committed_index: Option<u64>,
    ready_segments: u64,
    /// Ready segments of which parts are only allocated.
    allocated_segments: u64,
    leftovers: Vec<String>,
    segments: Vec<Segment>,
    /// Partitions that are compacted by key.
    #[serde(skip_serializing_if = "Option::is_none")]
    compacted: Option<Vec<CompactedStream>>,
    /// Batches of all segments by compression, with --codecs.
    #[serde(skip_serializing_if = "Option::is_none")]
    codecs: Option<Vec<CodecShare>>,
}

/// A partition that is compacted by key in this log.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct CompactedStream {
    partition_id: u64,
    /// Below this offset only the latest record of each key is left.
    clean_offset: u64,
    /// Below this offset no tombstone is left.
    tombstones_below: u64,
}

impl CompactedStream {
    fn of((partition_id, mark): (u64, CleanMark)) -> Self {
        Self { partition_id, clean_offset: mark.upto, tombstones_below: mark.also }
    }
}

/// Batches of one compression, or Kafka batches of any.
#[derive(Debug, Default, Serialize, JsonSchema)]
pub(crate) struct CodecShare {
    codec: String,
    batches: u64,
    /// Batches that compaction by key has rewritten.
    compacted_batches: u64,
    records: u64,
    /// Payload bytes in the log.
    stored_bytes: u64,
    uncompressed_bytes: u64,
    /// Uncompressed bytes for each stored byte.
    ratio: Option<f64>,
}

/// Batches by the name of their compression.
#[derive(Debug, Default)]
struct CodecCounts(BTreeMap<String, CodecShare>);

impl CodecCounts {
    /// Counts an entry if it is a batch. Refused batches count too: the log does not know them.
    fn add(&mut self, entry: &InspectedEntry<'_>) {
        let Ok(Head::Batch(batch)) = decode_head(entry.head) else { return };
        // A Kafka batch states its codec in its payload.
        let codec = match batch.version {
            KAFKA_BATCH_VERSION => "kafka".to_owned(),
            _ => codec_name(batch.compression),
        };
        let share = self.0.entry(codec).or_default();
        let stored = entry.payload_bytes as u64;
        share.batches += 1;
        share.compacted_batches += u64::from(batch.kept.is_some());
        share.records += u64::from(batch.record_count);
        share.stored_bytes += stored;
        share.uncompressed_bytes += match batch.uncompressed_bytes {
            0 => stored,
            compressed => compressed.into(),
        };
    }

    fn into_shares(self) -> Vec<CodecShare> {
        let share = |(codec, share): (String, CodecShare)| CodecShare {
            codec,
            ratio: compression::ratio(share.uncompressed_bytes, share.stored_bytes),
            ..share
        };
        self.0.into_iter().map(share).collect()
    }
}

#[derive(Debug, Serialize, JsonSchema)]
struct Segment {
    file: String,
    state: String,
    first_index: Option<u64>,
    last_index: Option<u64>,
    #[schemars(extend("x-wide" = true))]
    last_term: Option<u64>,
    entries: u64,
    #[schemars(extend("x-wide" = true))]
    streams: usize,
    #[schemars(extend("x-wide" = true))]
    frame_bytes: u64,
    used_bytes: u64,
    #[schemars(extend("x-wide" = true))]
    file_bytes: u64,
    /// Bytes of the file that are allocated and were never written.
    #[schemars(extend("x-wide" = true))]
    unwritten_bytes: u64,
    torn_bytes: u64,
}

impl InspectedLog {
    fn new(dir: &Path, report: LogReport, codecs: Option<CodecCounts>) -> Self {
        let index = |id: Option<LogId>| id.map(|id| id.index);
        let compacted: Vec<_> = report.clean_marks.into_iter().map(CompactedStream::of).collect();
        Self {
            dir: dir.to_owned(),
            has_vote: report.vote.is_some(),
            purged_index: index(report.purged),
            checkpoint_index: index(report.checkpoint),
            checkpoint_bytes: report.checkpoint_bytes,
            committed_index: index(report.committed),
            ready_segments: report.ready_segments,
            allocated_segments: report.allocated_segments,
            leftovers: report.leftovers,
            segments: report.segments.into_iter().map(Segment::from).collect(),
            compacted: (!compacted.is_empty()).then_some(compacted),
            codecs: codecs.map(CodecCounts::into_shares),
        }
    }
}

impl From<SegmentReport> for Segment {
    fn from(report: SegmentReport) -> Self {
        Self {
            file: report.file,
            state: report.state.to_string(),
            first_index: report.entries.map(|(first, _)| first),
            last_index: report.entries.map(|(_, last)| last.index),
            last_term: report.entries.map(|(_, last)| last.term),
            entries: report.entries_count,
            streams: report.streams.len(),
            frame_bytes: report.frame_bytes,
            used_bytes: report.used_bytes,
            file_bytes: report.file_bytes,
            unwritten_bytes: report.unwritten_bytes,
            torn_bytes: report.torn_bytes,
        }
    }
}

/// The damaged end of a log, dropped or to be dropped.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct DroppedEnd {
    file: PathBuf,
    first_byte: u64,
    /// One past the last byte.
    next_byte: u64,
    what: String,
    /// True if this run drops it.
    dropped: bool,
    /// Last remaining entry.
    kept_index: Option<u64>,
    /// Later files, which are dropped too.
    #[schemars(extend("x-wide" = true))]
    later_files: Vec<String>,
    /// Dropped entries that still verify, by partition.
    partitions: Vec<DroppedEntries>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct DroppedEntries {
    partition_id: u64,
    /// Number of appended batches.
    entries: u64,
    first_index: u64,
    last_index: u64,
}

impl DroppedEnd {
    fn new(dir: &Path, end: DamagedEnd, dropped: bool) -> Self {
        let partitions = end.streams.into_iter().map(|dropped| DroppedEntries {
            partition_id: dropped.stream,
            entries: dropped.entries,
            first_index: dropped.first_index,
            last_index: dropped.last_index,
        });
        Self {
            file: dir.join(end.file),
            first_byte: end.bytes.start,
            next_byte: end.bytes.end,
            what: end.what,
            dropped,
            kept_index: end.kept.map(|id| id.index),
            later_files: end.later_files,
            partitions: partitions.collect(),
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct WalVerification {
    logs: Vec<VerifiedLog>,
    findings: Vec<WalFinding>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct VerifiedLog {
    dir: PathBuf,
    segment_count: usize,
    /// Verified bytes.
    used_bytes: u64,
    /// Number of damaged ranges.
    damaged: usize,
}

#[derive(Debug, Serialize, JsonSchema)]
struct WalFinding {
    file: PathBuf,
    /// None if the finding is about the whole file, which may be missing.
    first_byte: Option<u64>,
    /// One past the last byte.
    next_byte: Option<u64>,
    what: String,
    /// True if the bytes could not be read for want of open files or memory. They may be good.
    is_unread: bool,
}

impl WalFinding {
    fn new(log: &Log, finding: Finding) -> Self {
        let bytes = Some(finding.bytes).filter(|bytes| !bytes.is_empty());
        Self {
            file: log.dir.join(finding.file),
            first_byte: bytes.as_ref().map(|bytes| bytes.start),
            next_byte: bytes.map(|bytes| bytes.end),
            what: finding.what,
            is_unread: finding.is_unread,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_without_logs_is_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        for (dir, what) in
            [(dir.path(), "contains no log"), (&dir.path().join("missing"), "does not exist")]
        {
            let error = open_logs(dir).map(drop).unwrap_err();
            assert_eq!(crate::exit::of(&error), Exit::NotFound);
            assert!(error.to_string().ends_with(what), "{error}");
        }
        assert!(subdirectories(dir.path()).unwrap().is_empty());
        assert!(!dir.path().join("lock").exists());
    }
}
