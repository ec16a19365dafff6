//! `helix restore DIR`: recreates the topics of a backup and appends their batches in order.
//! All files are verified before any change, and again while they are read.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::OnceLock;

use anyhow::Context;
use futures_util::{StreamExt, TryStreamExt, stream};
use helix_client::proto::batch;
use helix_client::proto::kafka::KAFKA_BATCH_VERSION;
use helix_client::proto::log::v1::{
    AllowedCompression, BatchFormat, CleanupPolicy, Durability, EncodedBatch, StoredBatch,
    Topic as TopicStatus, TopicConfig, Watermarks,
};
use helix_client::{
    AckFuture, Client, FetchOptions, NewTopic, Position as ClientPosition, ReadSource, ReadStart,
    Session, SessionOptions, TopicRef,
};
use schemars::JsonSchema;
use serde::Serialize;
use tonic::Code;

use super::batches::{BatchFileReader, FileDamage, is_dense, record_count_from};
use super::manifest::{
    SavedGap, SavedPartition, SavedTopic, batch_file, load_complete, select_topics,
};
use super::verify;
use crate::args::{GlobalArgs, RestoreArgs};
use crate::connect::connect;
use crate::exit::{self, CliError, Exit};
use crate::offset_lookup;
use crate::output::Output;
use crate::progress::ProgressLine;

/// Maximum number of unacknowledged batches.
const IN_FLIGHT_MAX: usize = 64;

/// Maximum number of empty records in one batch.
const FILLERS_MAX: u64 = 1 << 16;

/// An empty record in a payload: a tag and a length of 0.
const FILLER: [u8; 2] = [0x0A, 0];

/// Fencing token of the partitions of a topic while it is restored.
const MARK: &str = "restore-unfinished";

/// Partitions that are marked at the same time.
const MARKS_MAX: usize = 64;

/// Fields of the topic settings; all are restored from the backup.
const FIELDS: [&str; 11] = [
    "retention_time",
    "retention_bytes",
    "max_batch_bytes",
    "max_record_bytes",
    "min_durability",
    "default_durability",
    "allowed_compression",
    "validate_records",
    "cleanup",
    "tombstone_retention_time",
    "batch_format",
];

/// The offsets of a restored partition.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct RestoreRow {
    topic: String,
    partition: u32,
    record_count: u64,
    /// Records written by this run; an interrupted run wrote the others
    new_records: u64,
    /// Offsets that the backup lacks, because they were deleted before they were copied
    missing_offsets: u64,
    /// Offset of the first record in the backup
    #[schemars(extend("x-wide" = true))]
    backup_start_offset: u64,
    /// Offset of the same record in the restored topic
    first_offset: u64,
    /// One past the last offset in the restored topic
    next_offset: u64,
}

pub(crate) async fn run(global: &GlobalArgs, args: &RestoreArgs) -> anyhow::Result<()> {
    let manifest = load_complete(&args.dir)?;
    let topics = select_topics(&manifest, &args.topics)?;
    if args.new_name.is_some() && topics.len() != 1 {
        let failure = CliError::new(Exit::Usage, "--as needs exactly one topic");
        return Err(failure.hint("--topic NAME   selects it").into());
    }
    if args.keep_offsets {
        check_gaps(&topics)?;
    }
    verify::check_all(&args.dir, &topics, args.keep_offsets)?;
    if !global.quiet {
        verify::warn_of_missing(&topics);
    }
    let client = connect(global).await?;
    let mut restores = Vec::new();
    for topic in topics {
        let name = args.new_name.clone().unwrap_or_else(|| topic.name.clone());
        let keeps = args.keep_offsets;
        restores.push(TopicRestore::prepare(&client, topic, name, args.resume, keeps).await?);
    }
    for restore in &restores {
        restore.check(&args.dir).await?;
    }
    let mut progress = ProgressLine::new(global, "restoring");
    let mut rows = Vec::new();
    for restore in &restores {
        match restore.run(&args.dir, &mut progress).await {
            Ok(restored) => rows.extend(restored),
            Err(error) => return Err(restore.give_up(error).await),
        }
    }
    drop(progress);
    Output { format: global.output }.show(&rows)
}

/// # Errors
/// Fails if there are records above a gap, which cannot keep their offsets.
fn check_gaps(topics: &[SavedTopic]) -> anyhow::Result<()> {
    for topic in topics {
        for (number, partition) in topic.partitions.iter().enumerate() {
            let is_inside = |gap: &&SavedGap| {
                gap.first_offset >= partition.log_start_offset
                    && gap.next_offset < partition.next_offset
            };
            if let Some(gap) = partition.gaps.iter().find(is_inside) {
                let what = format!("{}/{number} has records above a gap", topic.name);
                let failure = CliError::new(Exit::Precondition, what).why(gap.to_string());
                let hint = "omit --keep-offsets to assign new offsets";
                return Err(failure.hint(hint).into());
            }
        }
    }
    Ok(())
}

/// The restore of one topic.
struct TopicRestore<'a> {
    client: &'a Client,
    topic: SavedTopic,
    /// Name of the restored topic.
    name: String,
    config: TopicConfig,
    /// Id of the existing topic, if there is one.
    exists: Option<u64>,
    keeps_offsets: bool,
    /// Watermarks of the existing topic, by partition.
    present: Vec<Watermarks>,
    /// The topic has the mark of an unfinished restore until the end of this one.
    is_marked: bool,
    /// Id of the topic that this run has begun to fill.
    begun: OnceLock<u64>,
}

impl<'a> TopicRestore<'a> {
    /// Checks that the topic can be restored. Changes nothing.
    ///
    /// # Errors
    /// Fails if a topic of this name exists and is not empty or has more partitions.
    async fn prepare(
        client: &'a Client,
        topic: SavedTopic,
        name: String,
        resume: bool,
        keeps_offsets: bool,
    ) -> anyhow::Result<Self> {
        let config = topic.config.to_wire().context("read the settings in the manifest")?;
        let found = match client.admin().topic(&name).await {
            Ok(found) => Some(found),
            Err(error) if error.code == Code::NotFound => None,
            Err(error) => return Err(error).with_context(|| format!("look up {name}")),
        };
        let mut present = vec![Watermarks::default(); topic.partitions.len()];
        if let Some(found) = &found {
            check_partitions(found, &topic)?;
            let topic_ref = TopicRef::with_id(&name, found.topic_id);
            let bounds =
                offset_lookup::partition_bounds(client, topic_ref, &[], ReadSource::Leader).await?;
            for (present, partition) in present.iter_mut().zip(bounds) {
                *present = partition.watermarks;
            }
            if !resume && is_unfinished(found) {
                return Err(unfinished(&name).into());
            }
            if !resume && present.iter().any(|marks| marks.high_watermark > 0) {
                return Err(not_empty(&name).into());
            }
        }
        let is_marked = found.as_ref().is_none_or(is_unfinished);
        let exists = found.map(|found| found.topic_id);
        let begun = OnceLock::new();
        let restore =
            Self { client, topic, name, config, exists, keeps_offsets, present, is_marked, begun };
        if restore.exists.is_none() {
            // The settings that it will have at the end, which the cluster may not know.
            let checked = restore.create(&restore.config, true).await;
            checked.with_context(|| format!("create {}", restore.name))?;
        }
        Ok(restore)
    }

    /// Checks that the existing records are a prefix of the backup. Changes nothing.
    ///
    /// # Errors
    /// Fails if a partition contains other records.
    async fn check(&self, directory: &Path) -> anyhow::Result<()> {
        for (index, partition) in self.topic.partitions.iter().enumerate() {
            let number = u32::try_from(index).context("count the partitions")?;
            let path = batch_file(directory, &self.topic.name, index, partition.copy);
            let topic_id = self.exists.unwrap_or(0);
            PartitionRestore::new(self, topic_id, number, partition).check(&path).await?;
        }
        Ok(())
    }

    async fn run(
        &self,
        directory: &Path,
        progress: &mut ProgressLine,
    ) -> anyhow::Result<Vec<RestoreRow>> {
        let name = &self.name;
        let relaxed = self.relaxed_config();
        let created = self.create(&relaxed, false).await;
        let topic_id = created.with_context(|| format!("create {name}"))?.topic_id;
        // Ignored: a restore runs once.
        let _ = self.begun.set(topic_id);
        if self.is_marked {
            self.mark(topic_id, None, MARK).await?;
        }
        let mut rows = Vec::new();
        for (index, partition) in self.topic.partitions.iter().enumerate() {
            let number = u32::try_from(index).context("count the partitions")?;
            let path = batch_file(directory, &self.topic.name, index, partition.copy);
            let mut target = PartitionRestore::new(self, topic_id, number, partition);
            let written = target.fill(&path, progress).await;
            let new_records = written.with_context(|| format!("restore {name}/{number}"))?;
            rows.push(RestoreRow {
                topic: name.clone(),
                partition: number,
                record_count: partition.record_count,
                new_records,
                missing_offsets: partition.missing_offsets(),
                backup_start_offset: partition.log_start_offset,
                first_offset: target.first_offset,
                next_offset: target.next_offset,
            });
        }
        if relaxed != self.config {
            let topic = TopicRef::with_id(name, topic_id);
            let changed = self.client.admin().update_topic(topic, &self.config, &FIELDS).await;
            changed.with_context(|| format!("set the limits of {name}"))?;
        }
        if self.is_marked {
            self.mark(topic_id, Some(MARK), "").await?;
        }
        Ok(rows)
    }

    /// Sets the fencing token of every partition.
    async fn mark(&self, id: u64, expected: Option<&str>, token: &str) -> anyhow::Result<()> {
        let (name, admin) = (self.name.as_str(), self.client.admin());
        let set = |partition: u32| {
            let admin = &admin;
            async move {
                let topic = TopicRef::with_id(name, id);
                let set = admin.set_fencing_token(topic, partition, expected, token).await;
                set.with_context(|| format!("mark {name}/{partition}")).map(drop)
            }
        };
        let partitions = 0..u32::try_from(self.topic.partitions.len())?;
        stream::iter(partitions.map(set)).buffer_unordered(MARKS_MAX).try_collect().await
    }

    /// Ends a restore that failed. Removes the topic if this run has created it and a repetition
    /// would fail again; else says that it is not whole.
    async fn give_up(&self, error: anyhow::Error) -> anyhow::Error {
        let (name, Some(topic_id)) = (&self.name, self.begun.get()) else { return error };
        let may_continue = matches!(exit::of(&error), Exit::Unavailable | Exit::Interrupted);
        if self.exists.is_none() && !may_continue {
            let topic = TopicRef::with_id(name, *topic_id);
            let deleted = self.client.admin().delete_topic(topic).await;
            if deleted.is_ok() || deleted.is_err_and(|error| error.code == Code::NotFound) {
                return error.context(format!("{name} could not be restored and was removed"));
            }
        }
        error.context(format!(
            "{name} is only partly restored and has relaxed settings; finish with --resume, or \
             delete it"
        ))
    }

    /// Returns the settings during the restore: without retention, and with limits that fit batches
    /// from a time when the topic allowed larger ones, other compressions, any content or no
    /// keys.
    fn relaxed_config(&self) -> TopicConfig {
        let needed = self.topic.partitions.iter().map(|partition| partition.batch_bytes_max).max();
        let raised = |limit: Option<u32>| limit.map(|limit| limit.max(needed.unwrap_or(0)));
        TopicConfig {
            retention_time: Some(prost_types::Duration::default()),
            retention_bytes: Some(0),
            max_batch_bytes: raised(self.config.max_batch_bytes),
            max_record_bytes: raised(self.config.max_record_bytes),
            allowed_compression: AllowedCompression::Any.into(),
            validate_records: Some(false),
            cleanup: CleanupPolicy::Delete.into(),
            batch_format: BatchFormat::Any.into(),
            ..self.config
        }
    }

    async fn create(
        &self,
        config: &TopicConfig,
        validate_only: bool,
    ) -> anyhow::Result<TopicStatus> {
        let admin = self.client.admin();
        let partition_count = u32::try_from(self.topic.partitions.len())?;
        if let Some(topic_id) = self.exists {
            let topic = TopicRef::with_id(&self.name, topic_id);
            admin.add_partitions(topic, partition_count).await?;
            return Ok(admin.update_topic(topic, config, &FIELDS).await?);
        }
        // Uses the replication factor of this cluster, not that of the backup.
        let config = *config;
        let topic =
            NewTopic { config, validate_only, ..NewTopic::new(&self.name, partition_count) };
        Ok(admin.create_topic(&topic).await?)
    }
}

/// # Errors
/// Fails if the existing topic has more partitions than the backup.
fn check_partitions(found: &TopicStatus, topic: &SavedTopic) -> anyhow::Result<()> {
    let name = &found.name;
    if found.partitions.len() > topic.partitions.len() {
        let (has, had) = (found.partitions.len(), topic.partitions.len());
        let failure = CliError::new(Exit::Precondition, format!("{name} has {has} partitions"));
        let failure = failure
            .why(format!("it has {had} in the backup, and keys would map to other partitions"));
        return Err(failure.hint("--as NAME").into());
    }
    Ok(())
}

/// Returns whether a topic has the mark of a restore that did not finish.
fn is_unfinished(found: &TopicStatus) -> bool {
    found.partitions.iter().any(|partition| partition.fencing_token.as_deref() == Some(MARK))
}

fn unfinished(name: &str) -> CliError {
    let failure =
        CliError::new(Exit::Precondition, format!("the restore of {name} did not finish"));
    failure.why("the topic has the mark of that restore, and relaxed settings").hint(
        "--resume    continues it\n\
         helix topic delete NAME   removes the part that was restored",
    )
}

fn not_empty(name: &str) -> CliError {
    let failure =
        CliError::new(Exit::Precondition, format!("topic {name} exists and is not empty"));
    failure.hint(
        "--as NAME   restores it under another name\n\
         --resume    continues an interrupted restore",
    )
}

/// The restore of one partition.
struct PartitionRestore<'a> {
    restore: &'a TopicRestore<'a>,
    /// Id of the restored topic; 0 before it is known.
    topic_id: u64,
    number: u32,
    partition: &'a SavedPartition,
    /// Offset of the first record in the restored partition.
    first_offset: u64,
    /// Offset of the next record in the restored partition.
    next_offset: u64,
    acks: VecDeque<(u64, AckFuture)>,
}

impl<'a> PartitionRestore<'a> {
    fn new(
        restore: &'a TopicRestore<'_>,
        topic_id: u64,
        number: u32,
        partition: &'a SavedPartition,
    ) -> Self {
        let offset = if restore.keeps_offsets { partition.log_start_offset } else { 0 };
        let (first_offset, next_offset) = (offset, offset);
        let acks = VecDeque::new();
        Self { restore, topic_id, number, partition, first_offset, next_offset, acks }
    }

    /// Appends the missing records and returns their number.
    async fn fill(&mut self, path: &Path, progress: &mut ProgressLine) -> anyhow::Result<u64> {
        let name = format!("{}/{}", self.restore.name, self.number);
        let present = self.pad(self.present().high_watermark, progress).await?;
        let mut reader =
            BatchFileReader::open(path, self.partition.file_prefix()).map_err(damaged)?;
        self.skip(&mut reader, present)?;
        let mut session = None;
        let mut new_records = 0;
        while let Some(stored) = reader.next().map_err(damaged)? {
            let Some(batch) = self.restorable(&stored)? else { continue };
            let (records, bytes) = (u64::from(batch.record_count), batch.payload.len() as u64);
            let session = match &mut session {
                Some(session) => session,
                empty => empty.insert(self.open().await?),
            };
            let acked = session.append(batch).await?;
            self.acks.push_back((self.next_offset, acked));
            self.next_offset += records;
            new_records += records;
            while self.acks.len() >= IN_FLIGHT_MAX {
                self.confirm().await?;
            }
            progress.add(&name, records, bytes);
        }
        while !self.acks.is_empty() {
            self.confirm().await?;
        }
        if let Some(session) = session {
            session.close().await?;
        }
        Ok(new_records)
    }

    /// Returns the watermarks of the existing partition.
    fn present(&self) -> Watermarks {
        self.restore.present[self.number as usize]
    }

    /// See [`TopicRestore::check`].
    async fn check(&mut self, path: &Path) -> anyhow::Result<()> {
        let Watermarks { log_start_offset, high_watermark } = self.present();
        let filled = self.first_offset.min(high_watermark);
        if log_start_offset < filled {
            // Below the first record there may be only empty records.
            let last = self.batch_before(filled).await?;
            if !last.is_some_and(|last| last.payload.chunks(FILLER.len()).all(|it| it == FILLER)) {
                return Err(self.other_records().into());
            }
        }
        if high_watermark <= self.first_offset {
            return Ok(());
        }
        let mut reader =
            BatchFileReader::open(path, self.partition.file_prefix()).map_err(damaged)?;
        let last = self.skip(&mut reader, high_watermark)?;
        if self.next_offset != high_watermark || self.batch_before(high_watermark).await? != last {
            return Err(self.other_records().into());
        }
        Ok(())
    }

    /// Skips the batches that exist already and returns the last of them.
    fn skip(
        &mut self,
        reader: &mut BatchFileReader,
        end: u64,
    ) -> anyhow::Result<Option<EncodedBatch>> {
        let mut last = None;
        while self.next_offset < end {
            let Some(stored) = reader.next().map_err(damaged)? else { break };
            let Some(batch) = self.restorable(&stored)? else { continue };
            self.next_offset += u64::from(batch.record_count);
            last = Some(batch);
        }
        Ok(last)
    }

    /// Returns the part of a batch that belongs to the restored partition, if any.
    fn restorable(&self, stored: &StoredBatch) -> anyhow::Result<Option<EncodedBatch>> {
        let batch = batch_from(stored, self.partition.log_start_offset)?;
        if batch.is_some() && self.restore.keeps_offsets {
            self.expect_no_gap(stored)?;
        }
        Ok(batch)
    }

    /// Fetches the batch of the topic that ends at an offset.
    async fn batch_before(&self, end: u64) -> anyhow::Result<Option<EncodedBatch>> {
        let TopicRestore { client, name, .. } = self.restore;
        let start = ReadStart::new(name, self.number, ClientPosition::Offset(end - 1)).until(end);
        let start = start.in_topic(self.topic_id);
        let fetched = client.consumer().fetch_encoded(&[start], &FetchOptions::default()).await;
        let fetched = fetched.with_context(|| format!("read the end of {name}/{}", self.number))?;
        let batches = fetched.into_iter().flat_map(|fetched| fetched.batches);
        Ok(batches.into_iter().next().and_then(|stored| stored.batch))
    }

    fn other_records(&self) -> CliError {
        let TopicRestore { name, .. } = self.restore;
        let what = format!("{name}/{} contains other records", self.number);
        let failure = CliError::new(Exit::Precondition, what);
        failure.why("they are not from an interrupted restore of this backup").hint("--as NAME")
    }

    /// Makes the partition start at the first record's offset: appends empty records, then trims.
    /// Returns the new end offset.
    async fn pad(&mut self, present: u64, progress: &mut ProgressLine) -> anyhow::Result<u64> {
        if self.first_offset == 0 {
            return Ok(present);
        }
        let name = format!("{}/{}", self.restore.name, self.number);
        if present < self.first_offset {
            let limit = u64::from(self.restore.config.max_batch_bytes.unwrap_or(u32::MAX));
            let count_max = FILLERS_MAX.min(limit / FILLER.len() as u64).max(1);
            let session = self.open().await?;
            let mut next = present;
            while next < self.first_offset {
                let count = count_max.min(self.first_offset - next);
                let records = u32::try_from(count).context("count the empty records")?;
                let payload = FILLER.repeat(records as usize);
                let acked = session.append(batch::from_payload(records, payload.into())).await?;
                self.acks.push_back((next, acked));
                next += count;
                while self.acks.len() >= IN_FLIGHT_MAX {
                    self.confirm().await?;
                }
                progress.add(&name, 0, 0);
            }
            while !self.acks.is_empty() {
                self.confirm().await?;
            }
            session.close().await?;
        }
        let TopicRestore { client, name, .. } = self.restore;
        let topic = TopicRef::with_id(name, self.topic_id);
        client.admin().trim(topic, self.number, self.first_offset).await?;
        Ok(present.max(self.first_offset))
    }

    /// # Errors
    /// Fails if a record of the batch would get another offset than in the backup.
    fn expect_no_gap(&self, stored: &StoredBatch) -> anyhow::Result<()> {
        let first = stored.first_offset.max(self.first_offset);
        if first == self.next_offset && is_dense(stored) {
            return Ok(());
        }
        let what = format!("the backup has no record at offset {}", self.next_offset);
        let failure = CliError::new(Exit::Precondition, what);
        let failure = failure.why("compaction removed it, and offsets are assigned without gaps");
        Err(failure.hint("omit --keep-offsets to assign new offsets").into())
    }

    async fn open(&self) -> anyhow::Result<Session> {
        let durability = Durability::QuorumSynced;
        let topic_id = self.topic_id;
        let options = SessionOptions { durability, topic_id, ..SessionOptions::default() };
        let TopicRestore { client, name, .. } = self.restore;
        Ok(client.session(name, self.number, options).await?)
    }

    /// Waits for the oldest ack.
    async fn confirm(&mut self) -> anyhow::Result<()> {
        let Some((expected, acked)) = self.acks.pop_front() else { return Ok(()) };
        let ack = acked.await?;
        if ack.first_offset == Some(expected) {
            return Ok(());
        }
        let what = format!("a batch got offset {:?} instead of {expected}", ack.first_offset);
        let failure = CliError::new(Exit::Precondition, what);
        let failure = failure.why("another client writes to the topic during the restore");
        Err(failure.hint("stop the writers, delete the topic, and restore it again").into())
    }
}

/// Returns the records of a batch at or above an offset, if any. A whole batch is unchanged, unless
/// it is a Kafka batch with gaps.
fn batch_from(stored: &StoredBatch, offset: u64) -> anyhow::Result<Option<EncodedBatch>> {
    let Some(encoded) = &stored.batch else { return Ok(None) };
    let kept = record_count_from(stored, offset);
    // Offsets are assigned without gaps, and a Kafka batch states those of its records.
    let has_gaps = encoded.version == KAFKA_BATCH_VERSION && !stored.offset_deltas.is_empty();
    if kept == u64::from(encoded.record_count) && !has_gaps {
        return Ok(Some(encoded.clone()));
    }
    let mut records = batch::decode(encoded).context("read the first batch")?.records;
    let dropped = records.len().saturating_sub(usize::try_from(kept)?);
    records.drain(..dropped);
    Ok((!records.is_empty()).then(|| batch::encode(&records)))
}

fn damaged(damage: FileDamage) -> CliError {
    CliError::new(Exit::VerificationFailed, damage.to_string())
        .why("the file changed after it was verified at the start")
}

#[cfg(test)]
mod tests {
    use helix_client::proto::FILE_DESCRIPTOR_SET;
    use prost_types::FileDescriptorSet;

    use super::super::batches::tests::stored;
    use super::*;

    #[test]
    fn restores_every_topic_setting() {
        let files: FileDescriptorSet = prost::Message::decode(FILE_DESCRIPTOR_SET).unwrap();
        let messages = files.file.iter().flat_map(|file| &file.message_type);
        let config = messages.into_iter().find(|message| message.name() == "TopicConfig").unwrap();
        let fields: Vec<_> = config.field.iter().map(|field| field.name()).collect();
        assert_eq!(fields, FIELDS);
    }

    #[test]
    fn drops_records_below_the_offset() {
        let batch = stored(10, &["a", "b", "c"]);
        assert_eq!(batch_from(&batch, 10).unwrap(), batch.batch);
        assert_eq!(batch_from(&batch, 3).unwrap(), batch.batch);
        let kept = batch_from(&batch, 12).unwrap().unwrap();
        let values: Vec<_> = batch::decode(&kept).unwrap().records;
        assert_eq!((kept.record_count, values[0].value.as_deref()), (1, Some(&b"c"[..])));
        assert_eq!(batch_from(&batch, 13).unwrap(), None);
    }
}
