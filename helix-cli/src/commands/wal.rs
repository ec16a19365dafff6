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
            inspect_all(output, &logs)
        }
        WalCommand::Verify { dir } => {
            let logs = open_all(dir)?;
            if logs.iter().any(|log| log.is_in_use) {
                let what = format!("a node uses {}", dir.display());
                let failure = Failure::new(Exit::Precondition, what);
                let why = "what is being written would look like damage";
                return Err(failure.why(why).hint("stop the node first").into());
            }
            verify(output, dir, &logs)
        }
        WalCommand::Repair { dir, drop, yes: _ } => {
            let logs = open_all(dir)?;
            if logs.iter().any(|log| log.is_in_use) {
                let what = format!("a node uses {}", dir.display());
                let failure = Failure::new(Exit::Precondition, what);
                return Err(failure.hint("stop the node first").into());
            }
            repair(global, dir, logs, *drop)
        }
    }
}

/// Says what is damaged at the ends of these logs, and gives it up where that is asked for.
fn repair(
    global: &Global,
    asked: &Path,
    logs: Vec<Log>,
    drop: Option<Droppable>,
) -> anyhow::Result<()> {
    let output = Output { format: global.output };
    let mut ends = Vec::new();
    let mut damage_elsewhere = 0;
    for Log { dir, storage, .. } in logs {
        let storage: Arc<dyn Storage> = Arc::new(storage);
        let end = Wal::damaged_end(&storage).map_err(|error| beyond_repair(&dir, &error))?;
        if end.is_none() {
            damage_elsewhere += helix_wal::verify(storage.as_ref()).len();
        }
        if let Some(end) = end {
            let row = DroppedEnd::new(&dir, end, drop.is_some());
            ends.push((dir, storage, row));
        }
    }
    let rows: Vec<_> = ends.iter().map(|(_, _, row)| row).collect();
    output.show(&rows)?;
    if drop.is_some() {
        for (dir, storage, _) in &ends {
            let cut = Wal::cut_damaged_end(storage);
            cut.with_context(|| format!("repair {}", dir.display()))?;
        }
    }
    match drop {
        _ if damage_elsewhere > 0 => {
            let places = places(damage_elsewhere);
            let what = format!("{places} not verify, and not at the end of a log");
            let failure = Failure::new(Exit::VerificationFailed, what);
            let why = "only the end of a log can be dropped; the rest is served, but for these";
            Err(failure.why(why).hint(repair_hint(asked)).into())
        }
        _ if ends.is_empty() => {
            if !global.quiet {
                eprintln!("nothing to repair: all of it verifies");
            }
            Ok(())
        }
        Some(Droppable::End) => Ok(()),
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

/// What to do about damage that is no end of a log.
fn repair_hint(dir: &Path) -> String {
    format!(
        "helix wal verify {}   names file and bytes\n\
         start the node where others have the shard: they fill it anew\n\
         helix restore   where there is a backup",
        dir.display()
    )
}

/// How many places are damaged, as the beginning of a sentence.
fn places(count: usize) -> String {
    match count {
        1 => "1 place does".to_owned(),
        _ => format!("{} places do", units::count(count as u64)),
    }
}

fn verify(output: Output, dir: &Path, logs: &[Log]) -> anyhow::Result<()> {
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
    let what = format!("{} not verify", places(damaged));
    let failure = Failure::new(Exit::VerificationFailed, what);
    let why = "the disk has lost or changed what was written; a node never serves such bytes";
    let hint = format!(
        "start the node where others have the shard: they fill it anew\n\
         helix wal repair {}   where this is the only replica: says what could be dropped\n\
         helix restore   where there is a backup",
        dir.display()
    );
    Err(failure.why(why).hint(hint).into())
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
        let what = if dir.exists() { "holds no log" } else { "does not exist" };
        let failure = Failure::new(Exit::NotFound, format!("{} {what}", dir.display()));
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

/// Looks for what every log has, because opening a folder as a log would make one. Segments alone
/// are one that has lost the rest.
fn is_log(dir: &Path) -> bool {
    let has = |name: &str| dir.join(name).is_file();
    has("state") || has("lock") || holds_segments(dir)
}

fn holds_segments(dir: &Path) -> bool {
    let is_segment = |entry: &std::fs::DirEntry| entry.path().extension() == Some("seg".as_ref());
    dir.read_dir().is_ok_and(|mut entries| entries.any(|entry| entry.is_ok_and(|e| is_segment(&e))))
}

/// In the order of their names.
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

/// Shows the logs that can be looked into, and says what is wrong with the first of the others.
fn inspect_all(output: Output, logs: &[Log]) -> anyhow::Result<()> {
    let mut inspected = Vec::new();
    let mut outcome = Ok(());
    for log in logs {
        match helix_wal::inspect(&log.storage) {
            Ok(report) => inspected.push(Inspected::new(&log.dir, report)),
            Err(error) => outcome = outcome.and_then(|()| Err(opaque(&log.dir, &error))),
        }
    }
    output.show(&inspected)?;
    outcome
}

/// A log of which nothing can be said.
fn opaque(dir: &Path, error: &helix_wal::Error) -> anyhow::Error {
    let what = format!("inspect {}: {error}", dir.display());
    let helix_wal::Error::Damaged { .. } = error else {
        return Failure::new(Exit::Error, what).into();
    };
    let failure = Failure::new(Exit::VerificationFailed, what);
    let why = "the state file names the segments of the log and how far they are known to be \
               good: without it nobody knows what they hold";
    let hint = "start the node where others have the shard: they fill it anew\n\
                helix restore   where there is a backup";
    failure.why(why).hint(hint).into()
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
    /// None: it is about the file as a whole, which may be missing.
    first_byte: Option<u64>,
    /// One past the last.
    next_byte: Option<u64>,
    what: String,
}

impl Damage {
    fn new(log: &Log, finding: Finding) -> Self {
        let bytes = Some(finding.bytes).filter(|bytes| !bytes.is_empty());
        Self {
            file: log.dir.join(finding.file),
            first_byte: bytes.as_ref().map(|bytes| bytes.start),
            next_byte: bytes.map(|bytes| bytes.end),
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
        for (dir, what) in
            [(dir.path(), "holds no log"), (&dir.path().join("missing"), "does not exist")]
        {
            let error = open_all(dir).map(drop).unwrap_err();
            assert_eq!(crate::exit::of(&error), Exit::NotFound);
            assert!(error.to_string().ends_with(what), "{error}");
        }
        assert!(subfolders(dir.path()).unwrap().is_empty());
        assert!(!dir.path().join("lock").exists());
    }
}
