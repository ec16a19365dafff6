//! `helix backup DIR`: copies the records that topics have at its start. A later run copies the
//! records appended since. The manifest is replaced only after the files that it lists are synced.
//!
//! Records that are deleted before they are copied become gaps, and the rest is copied.

mod partition_copy;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use helix_client::proto::log::v1::{StoredBatch, Topic as TopicStatus, TopicConfig, Watermarks};
use helix_client::{
    Batches, Client, Error as ClientError, FetchOptions, Position as ClientPosition, ReadOptions,
    ReadSource, ReadStart, TopicRef,
};
use prost_types::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::Instant;

use super::batches::{BatchFileReader, BatchFileWriter, FileDamage, end_offset, is_compacted};
use super::manifest::{
    GapCause, Manifest, SavedGap, SavedPartition, SavedTopic, SavedTopicConfig, batch_file,
    topic_directory,
};
use crate::args::GlobalArgs;
use crate::connect::connect;
use crate::exit::{self, CliError, Exit};
use crate::output::{Output, message};
use crate::progress::ProgressLine;
use crate::{clock, files, offset_lookup, units};

use partition_copy::{Loss, PartitionCopy};

/// Payload requested by one fetch.
const FETCH_BYTES: u64 = 4 << 20;

/// Bytes and time between two checkpoints, from which an interrupted first run continues.
const CHECKPOINT_BYTES: u64 = 256 << 20;
const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(10);

/// Shortest time that deletions stay: each needs several rounds of the cluster before it goes.
const DELETION_KEPT_MIN: Duration = Duration::from_secs(10);

/// Gaps of one topic that are named in messages.
const GAPS_SHOWN_MAX: usize = 10;

/// The backup of a partition after the run.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct BackupRow {
    topic: String,
    partition: u32,
    /// First offset in the backup
    #[schemars(extend("x-wide" = true))]
    log_start_offset: u64,
    /// One past the last offset in the backup
    next_offset: u64,
    record_count: u64,
    /// Records added by this run
    new_records: u64,
    /// Offsets that were deleted before they were copied, in all runs
    missing_offsets: u64,
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
    let metadata = client.admin().metadata(&[""]).await.context("get the cluster id")?;
    let sources = sources(&client, names).await?;
    let (mut manifest, _lock) = open(directory, &metadata.cluster_id, &begun_at)?;
    let progress = ProgressLine::new(global, "backing up");
    let mut run = BackupRun::new(directory, &client, progress, global.quiet);
    let mut rows = Vec::new();
    let mut outcome = BackupOutcome::default();
    for source in &sources {
        let row_count = rows.len();
        match run.topic(&mut manifest, source, &mut rows).await {
            Ok(missing_offsets) => outcome.missing_offsets += missing_offsets,
            Err(error) if is_of_one_topic(&error) => {
                rows.truncate(row_count);
                outcome.failed.push((source.status.name.clone(), error));
            }
            Err(error) => return Err(error),
        }
    }
    if !manifest.is_complete {
        // An interrupted run has copied parts of topics that this run has not completed.
        let done: BTreeSet<&str> = rows.iter().map(|row| row.topic.as_str()).collect();
        for topic in &mut manifest.topics {
            topic.is_partial |= !done.contains(topic.name.as_str());
        }
    }
    manifest.is_complete = true;
    manifest.begun_at = begun_at;
    manifest.save(directory)?;
    outcome.outlived = std::mem::take(&mut run.outlived);
    drop(run);
    remove_earlier_copies(directory, &manifest)?;
    let verdict = outcome.verdict(directory, rows.is_empty());
    Output { format: global.output }.show_with_verdict(&rows, verdict)
}

/// Records and topics that a run could not copy.
#[derive(Debug, Default)]
struct BackupOutcome {
    /// Offsets that were deleted before this run could copy them.
    missing_offsets: u64,
    /// Topics without a new copy, and why.
    failed: Vec<(String, anyhow::Error)>,
    /// Partitions whose copy took longer than deletions stay in them.
    outlived: Vec<String>,
}

impl BackupOutcome {
    /// # Errors
    /// Fails if the run copied less than the topics had at its start.
    fn verdict(mut self, directory: &Path, is_empty: bool) -> anyhow::Result<()> {
        if self.missing_offsets == 0 && self.failed.is_empty() && self.outlived.is_empty() {
            return Ok(());
        }
        if is_empty && !self.failed.is_empty() {
            let (_, error) = self.failed.swap_remove(0);
            return Err(error);
        }
        let mut why: Vec<_> =
            self.failed.iter().map(|(name, error)| format!("{name}: {}", brief(error))).collect();
        if self.missing_offsets > 0 {
            let missing = units::count(self.missing_offsets);
            why.push(format!("{missing} offsets were deleted before they were copied"));
        }
        why.extend(self.outlived.iter().map(|name| {
            format!(
                "{name}: the copy took longer than tombstone_retention_time, so it may have \
                 records of keys that were deleted meanwhile"
            )
        }));
        let failure = CliError::new(Exit::Partly, "the backup is not whole; the rest is saved");
        let verify = format!("helix backup verify {}   lists the gaps", directory.display());
        let hint = match self.failed.is_empty() {
            true => format!("{verify}\nback up more often than retention or trims delete"),
            false => format!("{verify}\nback up the named topics to another directory"),
        };
        Err(failure.why(why.join("\n")).hint(hint).into())
    }
}

/// Returns the time that deletions stay in a topic after all older records of their keys are gone.
fn tombstone_retention(config: &TopicConfig) -> Duration {
    let is_compacted = SavedTopicConfig::from(config).is_compacted();
    let time = config.tombstone_retention_time.filter(|_| is_compacted);
    let time = time.and_then(|time| helix_proto::time::duration(time).ok());
    time.map_or(Duration::MAX, |time| time.max(DELETION_KEPT_MIN))
}

/// Removes the files of copies that later ones have replaced.
fn remove_earlier_copies(directory: &Path, manifest: &Manifest) -> anyhow::Result<()> {
    for topic in &manifest.topics {
        for (index, partition) in topic.partitions.iter().enumerate() {
            // One is left by each run that was interrupted after it had saved the manifest.
            for copy in partition.copy.saturating_sub(2)..partition.copy {
                let path = batch_file(directory, &topic.name, index, copy);
                files::remove(&path).with_context(|| format!("remove {}", path.display()))?;
            }
        }
    }
    Ok(())
}

/// Returns an error and its cause as one line.
fn brief(error: &anyhow::Error) -> String {
    match error.downcast_ref::<CliError>() {
        Some(CliError { what, why, .. }) if !why.is_empty() => format!("{what}: {why}"),
        _ => format!("{error:#}"),
    }
}

/// Returns true if other topics can be copied after this failure.
fn is_of_one_topic(error: &anyhow::Error) -> bool {
    let is_known = error.is::<CliError>() || error.is::<ClientError>();
    is_known && !matches!(exit::of(error), Exit::Unavailable | Exit::Interrupted)
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
        let topic = TopicRef::with_id(&status.name, status.topic_id);
        let bounds = offset_lookup::partition_bounds(client, topic, &[], ReadSource::Leader).await;
        let bounds = match bounds {
            // It was deleted after the list was made, and before the backup.
            Err(error) if names.is_empty() && exit::of(&error) == Exit::NotFound => continue,
            bounds => bounds?,
        };
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
    is_quiet: bool,
    /// The topic that is being copied has been deleted.
    is_deleted: bool,
    saved_at: Instant,
    /// Bytes copied since the last checkpoint.
    unsaved_bytes: u64,
    /// Partitions whose copy took longer than deletions stay in them.
    outlived: Vec<String>,
}

impl<'a> BackupRun<'a> {
    fn new(directory: &'a Path, client: &'a Client, progress: ProgressLine, quiet: bool) -> Self {
        Self {
            directory,
            client,
            progress,
            is_quiet: quiet,
            is_deleted: false,
            saved_at: Instant::now(),
            unsaved_bytes: 0,
            outlived: Vec::new(),
        }
    }

    /// Copies a topic. Returns the number of offsets that were deleted before they were copied.
    async fn topic(
        &mut self,
        manifest: &mut Manifest,
        source: &TopicSource,
        rows: &mut Vec<BackupRow>,
    ) -> anyhow::Result<u64> {
        let name = source.status.name.as_str();
        let path = topic_directory(self.directory, name);
        files::create_directory(&path).with_context(|| format!("create {}", path.display()))?;
        self.is_deleted = false;
        let known = manifest.topic(name);
        let topic_id = source.status.topic_id;
        if known.is_some_and(|known| known.topic_id != 0 && known.topic_id != topic_id) {
            return Err(recreated(name).into());
        }
        let source_config = source.status.config.unwrap_or_default();
        let mut topic = SavedTopic {
            name: name.to_owned(),
            topic_id,
            replication_factor: source.status.replication_factor,
            config: SavedTopicConfig::from(&source_config),
            is_partial: false,
            partitions: known.map(|topic| topic.partitions.clone()).unwrap_or_default(),
        };
        if topic.partitions.len() > source.watermarks.len() {
            return Err(recreated(name).into());
        }
        // A checkpoint states the number of partitions too.
        let added = &source.watermarks[topic.partitions.len()..];
        let begin = |marks: &Watermarks| SavedPartition::begin(marks.log_start_offset, 0);
        topic.partitions.extend(added.iter().map(begin));
        let mut gaps = Vec::new();
        let mut missing_offsets = 0;
        for (index, watermarks) in source.watermarks.iter().enumerate() {
            let earlier = topic.partitions[index].clone();
            let mut before = earlier.clone();
            let source = TopicRef::with_id(name, topic_id);
            let mut copy = self.partition(source, index, &before, *watermarks).await?;
            loop {
                let is_done = copy.step(self).await?;
                if copy.may_lack_deletions(before.next_offset, topic.config.is_compacted()) {
                    if !self.is_quiet {
                        message!("{}: compacted since the last run, copying all of it", copy.name);
                    }
                    before = SavedPartition::begin(watermarks.log_start_offset, before.copy + 1);
                    copy = self.partition(source, index, &before, *watermarks).await?;
                    continue;
                }
                topic.partitions[index] = copy.sync()?;
                // Only a first run saves checkpoints: a later one keeps the previous backup valid.
                if !manifest.is_complete && self.is_checkpoint_due() {
                    manifest.put(topic.clone());
                    manifest.save(self.directory)?;
                    (self.saved_at, self.unsaved_bytes) = (Instant::now(), 0);
                }
                if is_done {
                    break;
                }
            }
            if self.is_deleted && before.copy > earlier.copy {
                // The earlier copy has more than what could still be copied.
                (before, copy.partition) = (earlier.clone(), earlier);
                copy.partition.skip(watermarks.high_watermark, GapCause::TopicDeleted);
                topic.partitions[index] = copy.partition.clone();
            }
            if copy.begun_at.elapsed() >= tombstone_retention(&source_config) {
                self.outlived.push(copy.name.clone());
            }
            let kept = &copy.partition;
            let is_new = |gap: &&SavedGap| gap.next_offset > before.next_offset;
            gaps.extend(kept.gaps.iter().filter(is_new).map(|gap| (index, gap.clone())));
            missing_offsets += kept.missing_offsets().saturating_sub(before.missing_offsets());
            rows.push(BackupRow {
                topic: name.to_owned(),
                partition: partition_number(index),
                log_start_offset: kept.log_start_offset,
                next_offset: kept.next_offset,
                record_count: kept.record_count,
                new_records: kept.record_count - before.record_count,
                missing_offsets: kept.missing_offsets(),
                file_bytes: kept.file_bytes,
            });
        }
        files::sync_directory(&path).with_context(|| format!("sync {}", path.display()))?;
        manifest.put(topic);
        self.report_gaps(name, &gaps);
        Ok(missing_offsets)
    }

    fn is_checkpoint_due(&self) -> bool {
        self.unsaved_bytes >= CHECKPOINT_BYTES || self.saved_at.elapsed() >= CHECKPOINT_INTERVAL
    }

    fn report_gaps(&self, topic: &str, gaps: &[(usize, SavedGap)]) {
        if self.is_quiet {
            return;
        }
        for (partition, gap) in gaps.iter().take(GAPS_SHOWN_MAX) {
            message!("{topic}/{partition}: {gap}");
        }
        let more = gaps.len().saturating_sub(GAPS_SHOWN_MAX);
        if more > 0 {
            message!("{topic}: {} more partitions have gaps", units::count(more as u64));
        }
    }

    /// Opens the copy of a partition at the offset from which it continues.
    async fn partition(
        &mut self,
        topic: TopicRef<'_>,
        index: usize,
        before: &SavedPartition,
        watermarks: Watermarks,
    ) -> anyhow::Result<PartitionCopy> {
        let path = batch_file(self.directory, topic.name, index, before.copy);
        let number = partition_number(index);
        let mut partition = before.clone();
        self.check_continuity(topic, number, &path, &mut partition, watermarks).await?;
        let writer = match before.file_bytes {
            0 => None,
            _ => {
                let writer = BatchFileWriter::open(&path, before.file_prefix());
                Some(writer.with_context(|| format!("write {}", path.display()))?)
            }
        };
        let name = format!("{}/{number}", topic.name);
        let (topic, topic_id) = (topic.name.to_owned(), topic.id);
        let end = watermarks.high_watermark;
        let begun_at = Instant::now();
        let has_holes = false;
        Ok(PartitionCopy {
            topic,
            topic_id,
            number,
            name,
            path,
            writer,
            partition,
            end,
            begun_at,
            has_holes,
        })
    }

    /// Checks that the partition continues where the backup ends. Records deleted since become a
    /// gap.
    ///
    /// # Errors
    /// Fails if the topic was recreated, or if the file is damaged.
    async fn check_continuity(
        &mut self,
        topic: TopicRef<'_>,
        number: u32,
        path: &Path,
        partition: &mut SavedPartition,
        watermarks: Watermarks,
    ) -> anyhow::Result<()> {
        let next = partition.next_offset;
        if watermarks.high_watermark < next {
            return Err(recreated(topic.name).into());
        }
        let last = last_batch(path, partition)?;
        if watermarks.log_start_offset >= next {
            // The last batch of the backup is deleted in the cluster.
            partition.skip(watermarks.log_start_offset, GapCause::Trimmed);
            return Ok(());
        }
        let Some(last) = last.filter(|_| !self.is_deleted) else { return Ok(()) };
        if end_offset(&last).is_none_or(|end| end < next) {
            // Compaction or a gap is at the end of the backup.
            return Ok(());
        }
        let found = match self.fetch(topic, number, next - 1, next).await {
            Ok(found) => found,
            Err(error) => {
                let Some(loss) = Loss::of(&error, next - 1) else { return Err(error) };
                self.is_deleted = loss == Loss::Deleted;
                return Ok(());
            }
        };
        match found.batches.first() {
            Some(found) if *found == last => Ok(()),
            found if is_compacted(found, &last) => Ok(()),
            _ => Err(recreated(topic.name).into()),
        }
    }

    async fn fetch(
        &self,
        topic: TopicRef<'_>,
        partition: u32,
        from: u64,
        until: u64,
    ) -> anyhow::Result<Batches> {
        let from_offset = ClientPosition::Offset(from);
        let start = ReadStart::new(topic.name, partition, from_offset).until(until);
        let start = start.in_topic(topic.id);
        let options = FetchOptions {
            bytes_max: Some(FETCH_BYTES),
            read: ReadOptions::default(),
            ..FetchOptions::default()
        };
        let fetched = self.client.consumer().fetch_encoded(&[start], &options).await;
        let fetched =
            fetched.with_context(|| format!("read {}/{partition} at {from}", topic.name))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_non_empty_directory_without_backup() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        files::replace(&directory.join("letter"), b"dear").unwrap();
        let error = open(directory, "c", "now").map(drop).unwrap_err();
        assert_eq!(exit::of(&error), Exit::Precondition);
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
