//! `helix backup DIR`: copies the records that topics have at its start. A later run copies the
//! records appended since. The manifest is replaced only after the files that it lists are synced.

use std::path::Path;

use anyhow::Context;
use helix_client::proto::log::v1::{StoredBatch, Topic as TopicStatus, Watermarks};
use helix_client::{
    Batches, Client, FetchOptions, Position as ClientPosition, ReadOptions, ReadSource, ReadStart,
};
use prost_types::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;

use super::batches::{BatchFileReader, BatchFileWriter, FileDamage, end_offset, record_count_from};
use super::manifest::{
    Manifest, SavedPartition, SavedTopic, SavedTopicConfig, batch_file, topic_directory,
};
use super::progress::ProgressLine;
use crate::args::GlobalArgs;
use crate::connect::connect;
use crate::exit::{CliError, Exit};
use crate::output::Output;
use crate::{clock, files, offset_lookup};

/// Payload requested by one fetch.
const FETCH_BYTES: u64 = 4 << 20;

/// Bytes between two checkpoints, from which an interrupted first run continues.
const CHECKPOINT_BYTES: u64 = 256 << 20;

/// The backup of a partition after the run.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct BackupRow {
    topic: String,
    partition: u32,
    /// First offset in the backup
    log_start_offset: u64,
    /// One past the last offset in the backup
    next_offset: u64,
    record_count: u64,
    /// Records added by this run
    new_records: u64,
    file_bytes: u64,
}

/// A topic and the watermarks of its partitions at the start of the run.
struct TopicSource {
    status: TopicStatus,
    watermarks: Vec<Watermarks>,
}

pub(crate) async fn run(
    global: &GlobalArgs,
    directory: &Path,
    names: &[String],
) -> anyhow::Result<()> {
    let client = connect(global).await?;
    let begun_at = Timestamp::from(clock::now()).to_string();
    let metadata = client.admin().metadata(&[]).await.context("get the cluster id")?;
    let sources = sources(&client, names).await?;
    let (mut manifest, _lock) = open(directory, &metadata.cluster_id, &begun_at)?;
    let mut run =
        BackupRun { directory, client: &client, progress: ProgressLine::new(global, "backing up") };
    let mut rows = Vec::new();
    for source in &sources {
        run.topic(&mut manifest, source, &mut rows).await?;
    }
    manifest.is_complete = true;
    manifest.begun_at = begun_at;
    manifest.save(directory)?;
    drop(run);
    Output { format: global.output }.show(&rows)
}

/// Looks up the named topics, or all topics if no name is given.
async fn sources(client: &Client, names: &[String]) -> anyhow::Result<Vec<TopicSource>> {
    let mut topics = Vec::new();
    if names.is_empty() {
        topics = client.admin().topics("").await.context("list topics")?;
    }
    for name in names {
        let topic = client.admin().topic(name).await;
        topics.push(topic.with_context(|| format!("look up {name}"))?);
    }
    let mut sources = Vec::new();
    for status in topics {
        let bounds =
            offset_lookup::partition_bounds(client, &status.name, &[], ReadSource::Leader).await?;
        let watermarks = bounds.iter().map(|partition| partition.watermarks).collect();
        sources.push(TopicSource { status, watermarks });
    }
    Ok(sources)
}

/// Opens or creates the backup in a directory and locks it against other runs.
///
/// # Errors
/// Fails if the directory is in use, is not a backup, or is the backup of another cluster.
fn open(
    directory: &Path,
    cluster_id: &str,
    begun_at: &str,
) -> anyhow::Result<(Manifest, std::fs::File)> {
    let name = directory.display();
    let rejected = |what: String, why: &str| {
        let failure = CliError::new(Exit::Precondition, what).why(why);
        Err(failure.hint("use another directory").into())
    };
    files::create_directory(directory).with_context(|| format!("create {name}"))?;
    let known = Manifest::load(directory)?;
    let present = files::names(directory).with_context(|| format!("list {name}"))?;
    if known.is_none() && present.iter().any(|name| name != "lock") {
        return rejected(format!("{name} is not empty"), "it contains files but no backup");
    }
    let lock = files::lock(&directory.join("lock")).with_context(|| format!("lock {name}"))?;
    let Some(lock) = lock else {
        return rejected(
            format!("{name} is in use"),
            "another backup to this directory is running",
        );
    };
    if let Some(manifest) = known {
        if manifest.cluster_id != cluster_id {
            let id = &manifest.cluster_id;
            let why = format!("the backup is of cluster {id}, this cluster is {cluster_id}");
            return rejected(format!("{name} is a backup of another cluster"), &why);
        }
        return Ok((manifest, lock));
    }
    let manifest = Manifest::new(cluster_id, begun_at.to_owned());
    manifest.save(directory)?;
    Ok((manifest, lock))
}

struct BackupRun<'a> {
    directory: &'a Path,
    client: &'a Client,
    progress: ProgressLine,
}

impl BackupRun<'_> {
    async fn topic(
        &mut self,
        manifest: &mut Manifest,
        source: &TopicSource,
        rows: &mut Vec<BackupRow>,
    ) -> anyhow::Result<()> {
        let name = source.status.name.as_str();
        let path = topic_directory(self.directory, name);
        files::create_directory(&path).with_context(|| format!("create {}", path.display()))?;
        let known = manifest.topic(name);
        let mut topic = SavedTopic {
            name: name.to_owned(),
            replication_factor: source.status.replication_factor,
            config: SavedTopicConfig::from(&source.status.config.unwrap_or_default()),
            partitions: known.map(|topic| topic.partitions.clone()).unwrap_or_default(),
        };
        if topic.partitions.len() > source.watermarks.len() {
            return Err(recreated(name).into());
        }
        for (index, watermarks) in source.watermarks.iter().enumerate() {
            let before = topic.partitions.get(index).cloned();
            let mut copy = self.partition(name, index, before.as_ref(), *watermarks).await?;
            loop {
                let is_done = copy.step(self).await?;
                let partition = copy.sync()?;
                match topic.partitions.get_mut(index) {
                    Some(known) => *known = partition,
                    None => topic.partitions.push(partition),
                }
                // Only a first run saves checkpoints: a later one keeps the previous backup valid.
                if !manifest.is_complete {
                    manifest.put(topic.clone());
                    manifest.save(self.directory)?;
                }
                if is_done {
                    break;
                }
            }
            let kept = &copy.partition;
            rows.push(BackupRow {
                topic: name.to_owned(),
                partition: partition_number(index),
                log_start_offset: kept.log_start_offset,
                next_offset: kept.next_offset,
                record_count: kept.record_count,
                new_records: kept.record_count - before.map_or(0, |before| before.record_count),
                file_bytes: kept.file_bytes,
            });
        }
        files::sync_directory(&path).with_context(|| format!("sync {}", path.display()))?;
        manifest.put(topic);
        Ok(())
    }

    /// Opens the copy of a partition at the offset from which it continues.
    async fn partition(
        &self,
        topic: &str,
        index: usize,
        before: Option<&SavedPartition>,
        watermarks: Watermarks,
    ) -> anyhow::Result<PartitionCopy> {
        let path = batch_file(self.directory, topic, index);
        let partition = partition_number(index);
        let started = before.filter(|before| before.file_bytes > 0);
        let (writer, known) = match started {
            Some(before) => {
                self.check_continuity(topic, partition, &path, before, watermarks).await?;
                (BatchFileWriter::open(&path, before.file_prefix()), before.clone())
            }
            None => {
                let offset = watermarks.log_start_offset;
                let (log_start_offset, next_offset) = (offset, offset);
                let known =
                    SavedPartition { log_start_offset, next_offset, ..SavedPartition::default() };
                (BatchFileWriter::create(&path), known)
            }
        };
        let writer = writer.with_context(|| format!("write {}", path.display()))?;
        let name = format!("{topic}/{partition}");
        let topic = topic.to_owned();
        let end = watermarks.high_watermark;
        Ok(PartitionCopy { topic, number: partition, name, writer, partition: known, end })
    }

    /// Checks that the partition continues where the backup ends.
    ///
    /// # Errors
    /// Fails if the topic was recreated, if records after the backup were deleted, or if the file
    /// is damaged.
    async fn check_continuity(
        &self,
        topic: &str,
        partition: u32,
        path: &Path,
        before: &SavedPartition,
        watermarks: Watermarks,
    ) -> anyhow::Result<()> {
        let next = before.next_offset;
        if watermarks.high_watermark < next {
            return Err(recreated(topic).into());
        }
        if watermarks.log_start_offset > next {
            let what = format!(
                "offsets {next}..{} of {topic}/{partition} are deleted",
                watermarks.log_start_offset
            );
            let failure = CliError::new(Exit::Precondition, what);
            let failure = failure.why("retention or a trim deleted them after the last backup");
            return Err(failure.hint("back up to another directory, and more often").into());
        }
        let Some(last) = last_batch(path, before)? else { return Ok(()) };
        if watermarks.log_start_offset >= next {
            // The last batch of the backup is deleted in the cluster.
            return Ok(());
        }
        let found = self.fetch(topic, partition, next - 1, next).await?;
        match found.batches.first() {
            Some(found) if *found == last => Ok(()),
            _ => Err(recreated(topic).into()),
        }
    }

    async fn fetch(
        &self,
        topic: &str,
        partition: u32,
        from: u64,
        until: u64,
    ) -> anyhow::Result<Batches> {
        let start = ReadStart::new(topic, partition, ClientPosition::Offset(from)).until(until);
        let options = FetchOptions {
            bytes_max: Some(FETCH_BYTES),
            read: ReadOptions::default(),
            ..FetchOptions::default()
        };
        let fetched = self.client.consumer().fetch_encoded(&[start], &options).await;
        let fetched = fetched.with_context(|| format!("read {topic}/{partition} at {from}"))?;
        fetched.into_iter().next().context("the fetch response has no partition")
    }
}

/// Returns the last batch of a file and verifies the whole file.
fn last_batch(path: &Path, before: &SavedPartition) -> anyhow::Result<Option<StoredBatch>> {
    let mut last = None;
    let damaged = |damage: FileDamage| {
        let failure = CliError::new(Exit::VerificationFailed, damage.to_string());
        failure.hint("back up to another directory")
    };
    let mut reader = BatchFileReader::open(path, before.file_prefix()).map_err(damaged)?;
    while let Some(batch) = reader.next().map_err(damaged)? {
        last = Some(batch);
    }
    Ok(last)
}

fn recreated(topic: &str) -> CliError {
    let what = format!("{topic} is not the topic in the backup");
    let failure = CliError::new(Exit::Precondition, what);
    failure.why("it was deleted and created again").hint("back up to another directory")
}

fn partition_number(index: usize) -> u32 {
    u32::try_from(index).expect("partition numbers fit in 32 bits")
}

/// A running copy of a partition to its batch file.
struct PartitionCopy {
    topic: String,
    number: u32,
    /// `topic/partition`, for messages.
    name: String,
    writer: BatchFileWriter,
    partition: SavedPartition,
    /// End offset, exclusive.
    end: u64,
}

impl PartitionCopy {
    /// Copies up to the end or the next checkpoint. Returns true at the end.
    async fn step(&mut self, run: &mut BackupRun<'_>) -> anyhow::Result<bool> {
        let mut bytes = 0;
        while self.partition.next_offset < self.end && bytes < CHECKPOINT_BYTES {
            let from = self.partition.next_offset;
            let fetched = run.fetch(&self.topic, self.number, from, self.end).await?;
            for batch in &fetched.batches {
                bytes += self.add(batch, run)?;
            }
            // Skips offsets that compaction has removed.
            let next = self.partition.next_offset.max(fetched.next_offset.min(self.end));
            anyhow::ensure!(next > from, "{}: no records from offset {from} on", self.name);
            self.partition.next_offset = next;
        }
        Ok(self.partition.next_offset >= self.end)
    }

    /// Appends a batch to the file and returns its payload bytes.
    fn add(&mut self, stored: &StoredBatch, run: &mut BackupRun<'_>) -> anyhow::Result<u64> {
        let name = &self.name;
        let (Some(batch), Some(end)) = (&stored.batch, end_offset(stored)) else {
            anyhow::bail!("{name}: the batch at offset {} is malformed", stored.first_offset);
        };
        self.writer.append(stored).with_context(|| format!("write {name} to the backup"))?;
        let records = record_count_from(stored, self.partition.log_start_offset);
        let bytes = batch.payload.len() as u64;
        run.progress.add(name, records, bytes);
        let partition = &mut self.partition;
        partition.next_offset = end;
        partition.record_count += records;
        partition.batch_count += 1;
        // The limit of a topic holds for both sizes of a compressed batch.
        let size = u32::try_from(bytes).unwrap_or(u32::MAX).max(batch.uncompressed_bytes);
        partition.batch_bytes_max = partition.batch_bytes_max.max(size);
        Ok(bytes)
    }

    /// Syncs the file and returns the state to save in the manifest.
    fn sync(&mut self) -> anyhow::Result<SavedPartition> {
        let prefix = self.writer.sync().with_context(|| format!("sync {}", self.name))?;
        (self.partition.file_bytes, self.partition.crc32) = (prefix.file_bytes, prefix.crc32);
        Ok(self.partition.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_non_empty_directory_without_backup() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        files::replace(&directory.join("letter"), b"dear").unwrap();
        let error = open(directory, "c", "now").map(drop).unwrap_err();
        assert_eq!(crate::exit::of(&error), Exit::Precondition);
        assert_eq!(files::names(directory).unwrap(), ["letter"]);
    }

    #[test]
    fn directory_belongs_to_one_cluster_and_one_run() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let held = open(directory, "c", "now").unwrap();
        assert!(open(directory, "c", "now").is_err(), "directory is in use");
        drop(held);
        assert!(open(directory, "d", "now").is_err(), "backup is of another cluster");
        assert!(!open(directory, "c", "now").unwrap().0.is_complete);
    }
}
