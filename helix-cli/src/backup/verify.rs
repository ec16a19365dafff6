//! `helix backup verify DIR`: reads every byte of a backup and checks it. Asks no cluster.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::Serialize;

use super::batches::{Damage, Reader, end_offset};
use super::create::records_from;
use super::manifest::{Partition, Topic, file};
use crate::args::Global;
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// The files of a backup, and what is wrong with them.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Verified {
    files: Vec<VerifiedFile>,
    findings: Vec<Finding>,
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
struct Finding {
    file: PathBuf,
    first_byte: u64,
    /// One past the last
    next_byte: u64,
    what: String,
}

pub(crate) fn run(global: &Global, folder: &Path, names: &[String]) -> anyhow::Result<()> {
    let manifest = super::load(folder)?;
    let mut verified = Verified { files: Vec::new(), findings: Vec::new() };
    for topic in super::select(&manifest, names)? {
        for (place, partition) in topic.partitions.iter().enumerate() {
            let outcome = check(&file(folder, &topic.name, place), partition);
            verified.files.push(VerifiedFile {
                topic: topic.name.clone(),
                partition: place,
                record_count: partition.record_count,
                file_bytes: partition.file_bytes,
                is_damaged: outcome.is_err(),
            });
            verified.findings.extend(outcome.err().map(Finding::from));
        }
    }
    Output { format: global.output }.show(&verified)?;
    match verified.findings.len() {
        0 => Ok(()),
        count => Err(damaged(count).into()),
    }
}

fn damaged(count: usize) -> Failure {
    let plural = if count == 1 { "file is" } else { "files are" };
    let failure = Failure::new(Exit::VerificationFailed, format!("{count} {plural} damaged"));
    failure.hint("a copy of the files that are named, or another backup")
}

/// Checks the files of some topics.
///
/// # Errors
/// What is wrong with each that is damaged.
pub(super) fn check_all(folder: &Path, topics: &[Topic]) -> anyhow::Result<()> {
    let mut findings = Vec::new();
    for topic in topics {
        for (place, partition) in topic.partitions.iter().enumerate() {
            findings.extend(check(&file(folder, &topic.name, place), partition).err());
        }
    }
    if findings.is_empty() {
        return Ok(());
    }
    let lines: Vec<_> = findings.iter().map(Damage::to_string).collect();
    Err(damaged(findings.len()).why(lines.join("\n")).into())
}

/// Reads a file, and compares it with what the manifest says.
fn check(path: &Path, partition: &Partition) -> Result<(), Damage> {
    let mut reader = Reader::open(path, partition.extent())?;
    let (mut batches, mut records) = (0, 0);
    let mut end = partition.log_start_offset;
    while let Some(batch) = reader.next()? {
        batches += 1;
        records += records_from(&batch, partition.log_start_offset);
        end = end_offset(&batch).unwrap_or(end);
    }
    let is_as_told = batches == partition.batch_count && records == partition.record_count;
    if is_as_told && end <= partition.next_offset {
        return Ok(());
    }
    let what = format!(
        "{records} records in {batches} batches up to offset {end}, and the \
                        manifest has others"
    );
    Err(Damage { file: path.to_owned(), bytes: 0..partition.file_bytes, what })
}

impl From<Damage> for Finding {
    fn from(Damage { file, bytes, what }: Damage) -> Self {
        Self { file, first_byte: bytes.start, next_byte: bytes.end, what }
    }
}
