//! `helix backup DIR`: copies what the topics hold at its beginning, or what has come since the
//! last time. The manifest is replaced when the files that it names are on disk, never before.

use std::path::Path;

use anyhow::Context;
use helix_client::proto::log::v1::{StoredBatch, Topic as TopicStatus, Watermarks};
use helix_client::{
    Batches, Client, FetchOptions, Position as ClientPosition, ReadOptions, ReadSource, Start,
};
use prost_types::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;

use super::Progress;
use super::batches::{Reader, Writer, end_offset};
use super::manifest::{Config, Manifest, Partition, Topic, file, topic_folder};
use crate::args::Global;
use crate::commands::spans;
use crate::connect::connect;
use crate::exit::{Exit, Failure};
use crate::output::Output;
use crate::{clock, files};

/// Payload that is asked for at once.
const FETCH_BYTES: u64 = 4 << 20;

/// Bytes after which a first run makes what it has so far the place to go on from.
const KEEP_BYTES: u64 = 256 << 20;

/// What a partition's file holds after the run.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Row {
    topic: String,
    partition: u32,
    /// First offset in the backup
    log_start_offset: u64,
    /// One past the last offset in the backup
    next_offset: u64,
    record_count: u64,
    /// Records that this run has added
    new_records: u64,
    file_bytes: u64,
}

/// A topic, and where its partitions ended when the run began.
struct Source {
    status: TopicStatus,
    ends: Vec<Watermarks>,
}

pub(crate) async fn run(global: &Global, folder: &Path, names: &[String]) -> anyhow::Result<()> {
    let client = connect(global).await?;
    let begun_at = Timestamp::from(clock::now()).to_string();
    let metadata = client.admin().metadata(&[]).await.context("ask for the cluster's id")?;
    let sources = sources(&client, names).await?;
    let (mut manifest, _lock) = open(folder, &metadata.cluster_id, &begun_at)?;
    let mut run = Run { folder, client: &client, progress: Progress::new(global, "backing up") };
    let mut rows = Vec::new();
    for source in &sources {
        run.topic(&mut manifest, source, &mut rows).await?;
    }
    manifest.is_complete = true;
    manifest.begun_at = begun_at;
    manifest.save(folder)?;
    drop(run);
    Output { format: global.output }.show(&rows)
}

/// The topics as they are now; none named: all.
async fn sources(client: &Client, names: &[String]) -> anyhow::Result<Vec<Source>> {
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
        let extents = spans::extents(client, &status.name, &[], ReadSource::Leader).await?;
        let ends = extents.iter().map(|extent| extent.watermarks).collect();
        sources.push(Source { status, ends });
    }
    Ok(sources)
}

/// The backup in a folder, or a new one, and the lock that keeps others away from it.
///
/// # Errors
/// The folder holds something else, or another cluster's backup.
fn open(
    folder: &Path,
    cluster_id: &str,
    begun_at: &str,
) -> anyhow::Result<(Manifest, std::fs::File)> {
    let name = folder.display();
    let refused = |what: String, why: &str| {
        let failure = Failure::new(Exit::Precondition, what).why(why);
        Err(failure.hint("another folder").into())
    };
    files::make_folder(folder).with_context(|| format!("make {name}"))?;
    let known = Manifest::load(folder)?;
    let present = files::names(folder).with_context(|| format!("list {name}"))?;
    if known.is_none() && present.iter().any(|name| name != "lock") {
        return refused(format!("{name} is no backup and not empty"), "its files are not ours");
    }
    let lock = files::lock(&folder.join("lock")).with_context(|| format!("lock {name}"))?;
    let Some(lock) = lock else {
        return refused(format!("{name} is in use"), "another backup to this folder runs");
    };
    if let Some(manifest) = known {
        if manifest.cluster_id != cluster_id {
            let id = &manifest.cluster_id;
            let why = format!("it is of cluster {id}, and this is {cluster_id}");
            return refused(format!("{name} is the backup of another cluster"), &why);
        }
        return Ok((manifest, lock));
    }
    let manifest = Manifest::new(cluster_id, begun_at.to_owned());
    manifest.save(folder)?;
    Ok((manifest, lock))
}

struct Run<'a> {
    folder: &'a Path,
    client: &'a Client,
    progress: Progress,
}

impl Run<'_> {
    async fn topic(
        &mut self,
        manifest: &mut Manifest,
        source: &Source,
        rows: &mut Vec<Row>,
    ) -> anyhow::Result<()> {
        let name = source.status.name.as_str();
        let path = topic_folder(self.folder, name);
        files::make_folder(&path).with_context(|| format!("make {}", path.display()))?;
        let known = manifest.topic(name);
        let mut topic = Topic {
            name: name.to_owned(),
            replication_factor: source.status.replication_factor,
            config: Config::from(&source.status.config.unwrap_or_default()),
            partitions: known.map(|topic| topic.partitions.clone()).unwrap_or_default(),
        };
        if topic.partitions.len() > source.ends.len() {
            return Err(made_anew(name).into());
        }
        for (place, ends) in source.ends.iter().enumerate() {
            let before = topic.partitions.get(place).cloned();
            let mut copy = self.partition(name, place, before.as_ref(), *ends).await?;
            loop {
                let is_done = copy.step(self).await?;
                let partition = copy.keep()?;
                match topic.partitions.get_mut(place) {
                    Some(known) => *known = partition,
                    None => topic.partitions.push(partition),
                }
                // Until a first run is done there is nothing that an unfinished one could spoil.
                if !manifest.is_complete {
                    manifest.put(topic.clone());
                    manifest.save(self.folder)?;
                }
                if is_done {
                    break;
                }
            }
            let kept = &copy.partition;
            rows.push(Row {
                topic: name.to_owned(),
                partition: place_number(place),
                log_start_offset: kept.log_start_offset,
                next_offset: kept.next_offset,
                record_count: kept.record_count,
                new_records: kept.record_count - before.map_or(0, |before| before.record_count),
                file_bytes: kept.file_bytes,
            });
        }
        files::sync_folder(&path).with_context(|| format!("sync {}", path.display()))?;
        manifest.put(topic);
        Ok(())
    }

    /// The copy of a partition, at the place from which it goes on.
    async fn partition(
        &self,
        topic: &str,
        place: usize,
        before: Option<&Partition>,
        ends: Watermarks,
    ) -> anyhow::Result<Copy> {
        let path = file(self.folder, topic, place);
        let partition = place_number(place);
        let started = before.filter(|before| before.file_bytes > 0);
        let (writer, known) = match started {
            Some(before) => {
                self.compare(topic, partition, &path, before, ends).await?;
                (Writer::open(&path, before.extent()), before.clone())
            }
            None => {
                let offset = ends.log_start_offset;
                let (log_start_offset, next_offset) = (offset, offset);
                let known = Partition { log_start_offset, next_offset, ..Partition::default() };
                (Writer::create(&path), known)
            }
        };
        let writer = writer.with_context(|| format!("write {}", path.display()))?;
        let place = format!("{topic}/{partition}");
        let topic = topic.to_owned();
        let end = ends.high_watermark;
        Ok(Copy { topic, number: partition, place, writer, partition: known, end })
    }

    /// Makes sure that the partition goes on from where the backup ends.
    ///
    /// # Errors
    /// It is another one of the same name, or has dropped what the backup lacks, or the file is
    /// damaged.
    async fn compare(
        &self,
        topic: &str,
        partition: u32,
        path: &Path,
        before: &Partition,
        ends: Watermarks,
    ) -> anyhow::Result<()> {
        let next = before.next_offset;
        if ends.high_watermark < next {
            return Err(made_anew(topic).into());
        }
        if ends.log_start_offset > next {
            let what = format!(
                "offsets {next} to {} of {topic}/{partition} are gone",
                ends.log_start_offset
            );
            let failure = Failure::new(Exit::Precondition, what);
            let failure = failure.why("retention or a trim has dropped them since the last backup");
            return Err(failure.hint("a backup to another folder, and more often").into());
        }
        let Some(last) = last(path, before)? else { return Ok(()) };
        if ends.log_start_offset >= next {
            // Nothing is left of it to compare with.
            return Ok(());
        }
        let found = self.fetch(topic, partition, next - 1, next).await?;
        match found.batches.first() {
            Some(found) if *found == last => Ok(()),
            _ => Err(made_anew(topic).into()),
        }
    }

    async fn fetch(
        &self,
        topic: &str,
        partition: u32,
        from: u64,
        until: u64,
    ) -> anyhow::Result<Batches> {
        let start = Start::new(topic, partition, ClientPosition::Offset(from)).until(until);
        let options = FetchOptions {
            bytes_max: Some(FETCH_BYTES),
            read: ReadOptions::default(),
            ..FetchOptions::default()
        };
        let fetched = self.client.consumer().fetch_encoded(&[start], &options).await;
        let fetched = fetched.with_context(|| format!("read {topic}/{partition} at {from}"))?;
        fetched.into_iter().next().context("an answer without partitions")
    }
}

/// The last batch of a file, every byte of which is checked on the way.
fn last(path: &Path, before: &Partition) -> anyhow::Result<Option<StoredBatch>> {
    let mut last = None;
    let damaged = |damage: super::batches::Damage| {
        let failure = Failure::new(Exit::VerificationFailed, damage.to_string());
        failure.hint("a backup to another folder")
    };
    let mut reader = Reader::open(path, before.extent()).map_err(damaged)?;
    while let Some(batch) = reader.next().map_err(damaged)? {
        last = Some(batch);
    }
    Ok(last)
}

fn made_anew(topic: &str) -> Failure {
    let what = format!("{topic} is not the topic that was backed up here before");
    let failure = Failure::new(Exit::Precondition, what);
    failure.why("it was deleted and made anew").hint("a backup to another folder")
}

fn place_number(place: usize) -> u32 {
    u32::try_from(place).expect("partitions are counted with 32 bits")
}

/// A partition on its way into its file.
struct Copy {
    topic: String,
    number: u32,
    /// For people.
    place: String,
    writer: Writer,
    partition: Partition,
    /// Offset to stop before.
    end: u64,
}

impl Copy {
    /// Copies until the end, or until it is time to keep what there is. Whether it is the end.
    async fn step(&mut self, run: &mut Run<'_>) -> anyhow::Result<bool> {
        let mut bytes = 0;
        while self.partition.next_offset < self.end && bytes < KEEP_BYTES {
            let from = self.partition.next_offset;
            let fetched = run.fetch(&self.topic, self.number, from, self.end).await?;
            for batch in &fetched.batches {
                bytes += self.add(batch, run)?;
            }
            // Offsets that compaction has emptied are passed over.
            let next = self.partition.next_offset.max(fetched.next_offset.min(self.end));
            anyhow::ensure!(next > from, "{}: nothing came from offset {from} on", self.place);
            self.partition.next_offset = next;
        }
        Ok(self.partition.next_offset >= self.end)
    }

    /// Bytes of the batch.
    fn add(&mut self, stored: &StoredBatch, run: &mut Run<'_>) -> anyhow::Result<u64> {
        let place = &self.place;
        let (Some(batch), Some(end)) = (&stored.batch, end_offset(stored)) else {
            anyhow::bail!("{place}: a batch at {} makes no sense", stored.first_offset);
        };
        self.writer.append(stored).with_context(|| format!("write {place} into the backup"))?;
        let records = records_from(stored, self.partition.log_start_offset);
        let bytes = batch.payload.len() as u64;
        run.progress.add(place, records, bytes);
        let partition = &mut self.partition;
        partition.next_offset = end;
        partition.record_count += records;
        partition.batch_count += 1;
        let size = u32::try_from(bytes).unwrap_or(u32::MAX);
        partition.batch_bytes_max = partition.batch_bytes_max.max(size);
        Ok(bytes)
    }

    /// Makes what there is so far survive, for the manifest.
    fn keep(&mut self) -> anyhow::Result<Partition> {
        let extent = self.writer.sync().with_context(|| format!("sync {}", self.place))?;
        (self.partition.file_bytes, self.partition.crc32) = (extent.file_bytes, extent.crc32);
        Ok(self.partition.clone())
    }
}

/// Records of a batch at or above an offset.
pub(super) fn records_from(stored: &StoredBatch, offset: u64) -> u64 {
    let count = stored.batch.as_ref().map_or(0, |batch| u64::from(batch.record_count));
    if stored.first_offset >= offset {
        return count;
    }
    let below = offset - stored.first_offset;
    match stored.offset_deltas.as_slice() {
        [] => count.saturating_sub(below),
        deltas => deltas.iter().filter(|delta| u64::from(**delta) >= below).count() as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::super::batches::tests::stored;
    use super::*;

    #[test]
    fn records_below_the_start_do_not_count() {
        let batch = stored(10, &["a", "b", "c"]);
        for (offset, records) in [(0, 3), (10, 3), (11, 2), (13, 0), (99, 0)] {
            assert_eq!(records_from(&batch, offset), records, "{offset}");
        }
        let sparse = StoredBatch { offset_deltas: vec![0, 5, 9], ..batch };
        for (offset, records) in [(10, 3), (11, 2), (15, 2), (16, 1), (20, 0)] {
            assert_eq!(records_from(&sparse, offset), records, "{offset}");
        }
    }

    #[test]
    fn a_folder_with_something_else_in_it_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        files::replace(&folder.join("letter"), b"dear").unwrap();
        let error = open(folder, "c", "now").map(drop).unwrap_err();
        assert_eq!(crate::exit::of(&error), Exit::Precondition);
        assert_eq!(files::names(folder).unwrap(), ["letter"]);
    }

    #[test]
    fn a_folder_belongs_to_one_cluster_and_one_run() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let held = open(folder, "c", "now").unwrap();
        assert!(open(folder, "c", "now").is_err(), "it is in use");
        drop(held);
        assert!(open(folder, "d", "now").is_err(), "it is of another cluster");
        assert!(!open(folder, "c", "now").unwrap().0.is_complete);
    }
}
