//! `helix backup verify DIR`: verifies every byte of a backup and lists its gaps. Needs no cluster.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::Serialize;

use super::batches::{BatchFileReader, FileDamage, end_offset, is_dense, record_count_from};
use super::manifest::{
    GapCause, SavedPartition, SavedTopic, batch_file, load_complete, select_topics,
};
use crate::args::GlobalArgs;
use crate::exit::{CliError, Exit};
use crate::output::{Output, message};
use crate::units;

/// The batch files of a backup and their damage.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct BackupVerification {
    files: Vec<VerifiedFile>,
    findings: Vec<DamagedRange>,
    /// Ranges that were deleted in the cluster before they were copied
    gaps: Vec<MissingRange>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct MissingRange {
    topic: String,
    partition: usize,
    first_offset: u64,
    /// One past the last offset
    next_offset: u64,
    cause: GapCause,
}

#[derive(Debug, Serialize, JsonSchema)]
struct VerifiedFile {
    topic: String,
    partition: usize,
    record_count: u64,
    file_bytes: u64,
    is_damaged: bool,
}

#[derive(Debug, Serialize, JsonSchema)]
struct DamagedRange {
    file: PathBuf,
    first_byte: u64,
    /// One past the last byte
    next_byte: u64,
    what: String,
}

pub(crate) fn run(global: &GlobalArgs, directory: &Path, names: &[String]) -> anyhow::Result<()> {
    let manifest = load_complete(directory)?;
    let mut verified =
        BackupVerification { files: Vec::new(), findings: Vec::new(), gaps: Vec::new() };
    let topics = select_topics(&manifest, names)?;
    if !global.quiet {
        warn_of_missing(&topics);
    }
    for topic in topics {
        for (index, partition) in topic.partitions.iter().enumerate() {
            let outcome =
                check(&batch_file(directory, &topic.name, index, partition.copy), partition);
            verified.files.push(VerifiedFile {
                topic: topic.name.clone(),
                partition: index,
                record_count: partition.record_count,
                file_bytes: partition.file_bytes,
                is_damaged: outcome.is_err(),
            });
            verified.findings.extend(outcome.err().map(DamagedRange::from));
            verified.gaps.extend(partition.gaps.iter().map(|gap| MissingRange {
                topic: topic.name.clone(),
                partition: index,
                first_offset: gap.first_offset,
                next_offset: gap.next_offset,
                cause: gap.cause,
            }));
        }
    }
    let verdict = match verified.findings.len() {
        0 => Ok(()),
        count => Err(damaged(count).into()),
    };
    Output { format: global.output }.show_with_verdict(&verified, verdict)
}

/// Says which topics of a backup are not whole.
pub(super) fn warn_of_missing(topics: &[SavedTopic]) {
    for topic in topics {
        let name = &topic.name;
        if topic.is_partial {
            message!(
                "{name}: only a part is in the backup; helix backup copies the rest if the topic \
                 still exists"
            );
        }
        let missing: u64 = topic.partitions.iter().map(SavedPartition::missing_offsets).sum();
        let partitions = topic.partitions.iter().filter(|it| !it.gaps.is_empty()).count();
        if missing > 0 {
            let (missing, partitions) = (units::count(missing), units::count(partitions as u64));
            message!(
                "{name}: {missing} offsets in {partitions} partitions are missing; they were \
                 deleted before they were copied"
            );
        }
    }
}

fn damaged(count: usize) -> CliError {
    let plural = if count == 1 { "file is" } else { "files are" };
    let failure = CliError::new(Exit::VerificationFailed, format!("{count} {plural} damaged"));
    failure.hint("replace the named files with copies, or use another backup")
}

/// Verifies the batch files of topics.
///
/// # Errors
/// Fails if a file is damaged; the error lists the damage of every file. With `keeps_offsets`, it
/// also fails if a partition has records above offsets that compaction has removed.
pub(super) fn check_all(
    directory: &Path,
    topics: &[SavedTopic],
    keeps_offsets: bool,
) -> anyhow::Result<()> {
    let mut findings = Vec::new();
    let mut holes = Vec::new();
    for topic in topics {
        for (index, partition) in topic.partitions.iter().enumerate() {
            match check(&batch_file(directory, &topic.name, index, partition.copy), partition) {
                Ok(None) => {}
                Ok(Some(offset)) => {
                    holes.push(format!("{}/{index} at offset {offset}", topic.name))
                }
                Err(damage) => findings.push(damage),
            }
        }
    }
    if findings.is_empty() {
        return match holes.len() {
            0 => Ok(()),
            _ if !keeps_offsets => Ok(()),
            count => Err(compacted(&holes, count).into()),
        };
    }
    let lines: Vec<_> = findings.iter().map(FileDamage::to_string).collect();
    Err(damaged(findings.len()).why(lines.join("\n")).into())
}

/// Returns the error of partitions that cannot keep their offsets.
fn compacted(holes: &[String], count: usize) -> CliError {
    let first: Vec<_> = holes.iter().take(HOLES_SHOWN_MAX).map(String::as_str).collect();
    let what = "the backup has records above offsets that compaction has removed";
    let more = if count > first.len() { ", ..." } else { "" };
    let why = format!(
        "offsets are assigned without gaps; {} of these partitions: {}{more}",
        units::count(count as u64),
        first.join(", ")
    );
    let failure = CliError::new(Exit::Precondition, what).why(why);
    failure.hint("omit --keep-offsets to assign new offsets; nothing was changed")
}

/// Partitions with holes that an error names.
const HOLES_SHOWN_MAX: usize = 10;

/// Reads a batch file and compares its counts with the manifest. Returns the first offset without a
/// record that has records above it, if there is one.
fn check(path: &Path, partition: &SavedPartition) -> Result<Option<u64>, FileDamage> {
    let mut reader = BatchFileReader::open(path, partition.file_prefix())?;
    let (mut batches, mut records) = (0, 0);
    let mut end = partition.log_start_offset;
    let mut hole = None;
    while let Some(batch) = reader.next()? {
        batches += 1;
        let first = batch.first_offset.max(partition.log_start_offset);
        if first != end || !is_dense(&batch) {
            hole = hole.or(Some(end));
        }
        records += record_count_from(&batch, partition.log_start_offset);
        end = end_offset(&batch).unwrap_or(end);
    }
    let counts_match = batches == partition.batch_count && records == partition.record_count;
    if counts_match && end <= partition.next_offset {
        return Ok(hole);
    }
    let what = format!(
        "{records} records in {batches} batches up to offset {end} differ from the manifest"
    );
    Err(FileDamage { file: path.to_owned(), bytes: 0..partition.file_bytes, what })
}

impl From<FileDamage> for DamagedRange {
    fn from(FileDamage { file, bytes, what }: FileDamage) -> Self {
        Self { file, first_byte: bytes.start, next_byte: bytes.end, what }
    }
}
