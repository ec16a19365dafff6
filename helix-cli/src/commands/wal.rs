//! `helix wal`: looks into the logs of a node that does not run, and checks every byte of them.
//! Changes nothing but for the last resort, `repair`. A folder may be that of one log or that of a
//! node, which has one per shard.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use helix_wal::storage::{DirStorage, Storage};
use helix_wal::{DamagedEnd, Finding, LogId, Report, SegmentReport, Wal};
use schemars::JsonSchema;
use serde::Serialize;

use crate::args::{Droppable, Global, WalCommand};
use crate::exit::{Exit, Failure};
use crate::output::Output;
use crate::units;

/// Waits for the disk: not for a runtime's threads.
pub(crate) fn run(global: &Global, command: &WalCommand) -> anyhow::Result<()> {
    let output = Output { format: global.output };
    match command {
        WalCommand::Inspect { dir } => {
            let logs = open_all(dir)?;
            if logs.iter().any(|log| log.is_in_use) && !global.quiet {
                eprintln!("a node uses these files now: what is said of their ends may be old");
            }
            let inspected: anyhow::Result<Vec<_>> = logs.iter().map(inspect).collect();
            output.show(&inspected?)
        }
        WalCommand::Verify { dir } => {
            let logs = open_all(dir)?;
            if logs.iter().any(|log| log.is_in_use) {
                let what = format!("a node uses {}", dir.display());
                let failure = Failure::new(Exit::Precondition, what);
                let why = "what is being written would look like damage";
                return Err(failure.why(why).hint("stop the node first").into());
            }
            verify(output, &logs)
        }
        WalCommand::Repair { dir, drop, yes: _ } => {
            let logs = open_all(dir)?;
            if logs.iter().any(|log| log.is_in_use) {
                let what = format!("a node uses {}", dir.display());
                let failure = Failure::new(Exit::Precondition, what);
                return Err(failure.hint("stop the node first").into());
            }
            repair(output, logs, *drop)
        }
    }
}

/// Says what is damaged at the ends of these logs, and gives it up where that is asked for.
fn repair(output: Output, logs: Vec<Log>, drop: Option<Droppable>) -> anyhow::Result<()> {
    let mut ends = Vec::new();
    for Log { dir, storage, .. } in logs {
        let storage: Arc<dyn Storage> = Arc::new(storage);
        let end = Wal::damaged_end(&storage).map_err(|error| beyond_repair(&dir, &error))?;
        if let Some(end) = end {
            let row = DroppedEnd::new(&dir, end, drop.is_some());
            ends.push((dir, storage, row));
        }
    }
    let rows: Vec<_> = ends.iter().map(|(_, _, row)| row).collect();
    output.show(&rows)?;
    match drop {
        Some(Droppable::End) => {
            for (dir, storage, _) in &ends {
                let cut = Wal::cut_damaged_end(storage);
                cut.with_context(|| format!("repair {}", dir.display()))?;
            }
            Ok(())
        }
        None if ends.is_empty() => Ok(()),
        None => {
            let failure = Failure::new(Exit::VerificationFailed, "the end of a log is damaged");
            let why = "nothing was changed: what is above would be lost for good";
            let hint = "start the node where others have the shard: they fill it anew\n\
                        --drop end --yes   where this is the only replica";
            Err(failure.why(why).hint(hint).into())
        }
    }
}

fn beyond_repair(dir: &Path, error: &helix_wal::Error) -> anyhow::Error {
    let failure = Failure::new(Exit::VerificationFailed, format!("{}: {error}", dir.display()));
    let failure =
        failure.why("this is not the end of the log: nothing less than all could be dropped");
    failure
        .hint("start the node where others have the shard: they fill it anew\nhelix restore")
        .into()
}

fn verify(output: Output, logs: &[Log]) -> anyhow::Result<()> {
    let mut verified = Verified { logs: Vec::new(), findings: Vec::new() };
    for log in logs {
        let findings = helix_wal::verify(&log.storage);
        // A log whose state file is damaged has only findings.
        let report = helix_wal::inspect(&log.storage).unwrap_or_default();
        verified.logs.push(VerifiedLog {
            dir: log.dir.clone(),
            segment_count: report.segments.len(),
            used_bytes: report.segments.iter().map(|segment| segment.used_bytes).sum(),
            damaged: findings.len(),
        });
        verified.findings.extend(findings.into_iter().map(|finding| Damage::new(log, finding)));
    }
    output.show(&verified)?;
    let damaged = verified.findings.len();
    if damaged == 0 {
        return Ok(());
    }
    let places = if damaged == 1 { "1 place does" } else { "{damaged} places do" };
    let places = places.replace("{damaged}", &units::count(damaged as u64));
    let failure = Failure::new(Exit::VerificationFailed, format!("{places} not verify"));
    let why = "the disk has lost or changed what was written; a node never serves such bytes";
    Err(failure.why(why).into())
}

/// A log that can be looked at.
struct Log {
    dir: PathBuf,
    storage: DirStorage,
    is_in_use: bool,
}

/// The log in this folder, or those in the folders in it.
fn open_all(dir: &Path) -> anyhow::Result<Vec<Log>> {
    let not_found = || {
        let failure = Failure::new(Exit::NotFound, format!("{} holds no log", dir.display()));
        failure.hint("the data folder of a node, such as ./helix-data, or one of its shard-N")
    };
    let mut folders = Vec::new();
    if is_log(dir) {
        folders.push(dir.to_owned());
    } else if dir.is_dir() {
        folders = subfolders(dir).with_context(|| format!("list {}", dir.display()))?;
        folders.retain(|folder| is_log(folder));
    }
    if folders.is_empty() {
        return Err(not_found().into());
    }
    folders.into_iter().map(open).collect()
}

/// Looks for what every log has, because opening a folder as a log would make one.
fn is_log(dir: &Path) -> bool {
    dir.join("state").is_file() || dir.join("lock").is_file()
}

/// In the order of their names. The one place that lists a folder that is no log's.
fn subfolders(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries: io::Result<Vec<_>> = dir.read_dir()?.collect();
    let mut folders: Vec<_> = entries?.iter().map(std::fs::DirEntry::path).collect();
    folders.retain(|path| path.is_dir());
    folders.sort();
    Ok(folders)
}

fn open(dir: PathBuf) -> anyhow::Result<Log> {
    let storage = DirStorage::open_buffered(&dir);
    let storage = storage.with_context(|| format!("open {}", dir.display()))?;
    let lock = storage.lock();
    let is_in_use = lock.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
    Ok(Log { dir, storage, is_in_use })
}

fn inspect(log: &Log) -> anyhow::Result<Inspected> {
    let report = helix_wal::inspect(&log.storage);
    let report = report.with_context(|| format!("inspect {}", log.dir.display()))?;
    Ok(Inspected::new(&log.dir, report))
}

/// One log.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Inspected {
    dir: PathBuf,
    has_vote: bool,
    purged_index: Option<u64>,
    checkpoint_index: Option<u64>,
    checkpoint_bytes: u64,
    committed_index: Option<u64>,
    ready_segments: u64,
    leftovers: Vec<String>,
    segments: Vec<Segment>,
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
    torn_bytes: u64,
}

impl Inspected {
    fn new(dir: &Path, report: Report) -> Self {
        let index = |id: Option<LogId>| id.map(|id| id.index);
        Self {
            dir: dir.to_owned(),
            has_vote: report.vote.is_some(),
            purged_index: index(report.purged),
            checkpoint_index: index(report.checkpoint),
            checkpoint_bytes: report.checkpoint_bytes,
            committed_index: index(report.committed),
            ready_segments: report.ready_segments,
            leftovers: report.leftovers,
            segments: report.segments.into_iter().map(Segment::from).collect(),
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
            torn_bytes: report.torn_bytes,
        }
    }
}

/// The damaged end of a log, which is or would be given up.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct DroppedEnd {
    file: PathBuf,
    first_byte: u64,
    /// One past the last.
    next_byte: u64,
    what: String,
    /// Whether it is given up now.
    dropped: bool,
    /// Last entry that stays.
    kept_index: Option<u64>,
    /// Files behind this one, which go too.
    #[schemars(extend("x-wide" = true))]
    later_files: Vec<String>,
    /// Of what goes and still verifies.
    partitions: Vec<DroppedEntries>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct DroppedEntries {
    partition_id: u64,
    /// Batches that were appended.
    entries: u64,
    first_index: u64,
    last_index: u64,
}

impl DroppedEnd {
    fn new(dir: &Path, end: DamagedEnd, dropped: bool) -> Self {
        let partitions = end.streams.into_iter().map(|lost| DroppedEntries {
            partition_id: lost.stream,
            entries: lost.entries,
            first_index: lost.first_index,
            last_index: lost.last_index,
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
pub(crate) struct Verified {
    logs: Vec<VerifiedLog>,
    findings: Vec<Damage>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct VerifiedLog {
    dir: PathBuf,
    segment_count: usize,
    /// Bytes that were read and checked.
    used_bytes: u64,
    /// How many places do not verify.
    damaged: usize,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Damage {
    file: PathBuf,
    first_byte: u64,
    /// One past the last.
    next_byte: u64,
    what: String,
}

impl Damage {
    fn new(log: &Log, finding: Finding) -> Self {
        Self {
            file: log.dir.join(finding.file),
            first_byte: finding.bytes.start,
            next_byte: finding.bytes.end,
            what: finding.what,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_logs_is_left_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        for dir in [dir.path(), &dir.path().join("missing")] {
            let error = open_all(dir).map(drop).unwrap_err();
            assert_eq!(crate::exit::of(&error), Exit::NotFound);
        }
        assert!(subfolders(dir.path()).unwrap().is_empty());
        assert!(!dir.path().join("lock").exists());
    }
}
