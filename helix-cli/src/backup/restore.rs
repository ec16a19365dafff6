//! `helix restore DIR`: makes the topics of a backup again, and writes their batches in order.
//! Every file is checked before anything is made; what a file holds is checked again as it is read.

use std::collections::VecDeque;
use std::path::Path;

use anyhow::Context;
use helix_client::proto::batch;
use helix_client::proto::log::v1::{
    Durability, EncodedBatch, StoredBatch, Topic as TopicStatus, TopicConfig, Watermarks,
};
use helix_client::{
    Acked, Client, FetchOptions, NewTopic, Position as ClientPosition, ReadSource, Session,
    SessionOptions, Start,
};
use schemars::JsonSchema;
use serde::Serialize;
use tonic::Code;

use super::batches::{Damage, Reader};
use super::create::records_from;
use super::manifest::{Partition, Topic, file};
use super::{Progress, load, select, verify};
use crate::args::{Global, RestoreArgs};
use crate::commands::spans;
use crate::connect::connect;
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Acks that are waited for at the same time.
const IN_FLIGHT_MAX: usize = 64;

/// Empty records in one batch, at most.
const FILLERS_MAX: u64 = 1 << 16;

/// An empty record in a payload: a tag, and a length of nothing.
const FILLER: [u8; 2] = [0x0A, 0];

/// Fields of a topic's settings, all of which come from the backup.
const FIELDS: [&str; 6] = [
    "retention_time",
    "retention_bytes",
    "max_batch_bytes",
    "max_record_bytes",
    "min_durability",
    "default_durability",
];

/// Where the records of a partition are now.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Row {
    topic: String,
    partition: u32,
    record_count: u64,
    /// Records that this run has written; the others were there from one that was interrupted
    new_records: u64,
    /// Offset of the first record in the backup
    backup_start_offset: u64,
    /// Its offset now
    first_offset: u64,
    /// One past the last offset now
    next_offset: u64,
}

pub(crate) async fn run(global: &Global, args: &RestoreArgs) -> anyhow::Result<()> {
    let manifest = load(&args.dir)?;
    let topics = select(&manifest, &args.topics)?;
    if args.new_name.is_some() && topics.len() != 1 {
        let failure = Failure::new(Exit::Usage, "--as gives a name to one topic");
        return Err(failure.hint("--topic NAME   chooses it").into());
    }
    verify::check_all(&args.dir, &topics)?;
    let client = connect(global).await?;
    let mut restores = Vec::new();
    for topic in topics {
        let name = args.new_name.clone().unwrap_or_else(|| topic.name.clone());
        let keeps = args.keep_offsets;
        restores.push(Restore::prepare(&client, topic, name, args.resume, keeps).await?);
    }
    for restore in &restores {
        restore.check(&args.dir).await?;
    }
    let mut progress = Progress::new(global, "restoring");
    let mut rows = Vec::new();
    for restore in &restores {
        rows.extend(restore.run(&args.dir, &mut progress).await?);
    }
    drop(progress);
    Output { format: global.output }.show(&rows)
}

/// One topic that is to be restored.
struct Restore<'a> {
    client: &'a Client,
    topic: Topic,
    /// Name that it gets.
    name: String,
    config: TopicConfig,
    exists: bool,
    keeps_offsets: bool,
    /// What is there already, by partition.
    present: Vec<Watermarks>,
}

impl<'a> Restore<'a> {
    /// Looks whether it can be restored. Changes nothing.
    ///
    /// # Errors
    /// There is a topic of this name which is not empty, or has more partitions.
    async fn prepare(
        client: &'a Client,
        topic: Topic,
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
            let extents = spans::extents(client, &name, &[], ReadSource::Leader).await?;
            for (present, extent) in present.iter_mut().zip(extents) {
                *present = extent.watermarks;
            }
            if !resume && present.iter().any(|marks| marks.high_watermark > 0) {
                return Err(not_empty(&name).into());
            }
        }
        let exists = found.is_some();
        Ok(Self { client, topic, name, config, exists, keeps_offsets, present })
    }

    /// Makes sure, before anything is changed, that what is there is the beginning of the backup.
    ///
    /// # Errors
    /// It is something else.
    async fn check(&self, folder: &Path) -> anyhow::Result<()> {
        for (place, partition) in self.topic.partitions.iter().enumerate() {
            let number = u32::try_from(place).context("count the partitions")?;
            let path = file(folder, &self.topic.name, place);
            Target::new(self, number, partition).check(&path).await?;
        }
        Ok(())
    }

    async fn run(&self, folder: &Path, progress: &mut Progress) -> anyhow::Result<Vec<Row>> {
        let name = &self.name;
        let ample = self.ample_config();
        self.make(&ample).await.with_context(|| format!("make {name}"))?;
        let mut rows = Vec::new();
        for (place, partition) in self.topic.partitions.iter().enumerate() {
            let number = u32::try_from(place).context("count the partitions")?;
            let path = file(folder, &self.topic.name, place);
            let mut target = Target::new(self, number, partition);
            let written = target.fill(&path, progress).await;
            let new_records = written.with_context(|| format!("restore {name}/{number}"))?;
            rows.push(Row {
                topic: name.clone(),
                partition: number,
                record_count: partition.record_count,
                new_records,
                backup_start_offset: partition.log_start_offset,
                first_offset: target.first_offset,
                next_offset: target.next_offset,
            });
        }
        if ample != self.config {
            let changed = self.client.admin().update_topic(name, &self.config, &FIELDS).await;
            changed.with_context(|| format!("set the limits of {name}"))?;
        }
        Ok(rows)
    }

    /// The topic's settings, with room for batches from a time when it allowed more. Nothing is
    /// dropped by age or size before everything is there.
    fn ample_config(&self) -> TopicConfig {
        let needed = self.topic.partitions.iter().map(|partition| partition.batch_bytes_max).max();
        let raised = |limit: Option<u32>| limit.map(|limit| limit.max(needed.unwrap_or(0)));
        TopicConfig {
            retention_time: Some(prost_types::Duration::default()),
            retention_bytes: Some(0),
            max_batch_bytes: raised(self.config.max_batch_bytes),
            max_record_bytes: raised(self.config.max_record_bytes),
            ..self.config
        }
    }

    async fn make(&self, config: &TopicConfig) -> anyhow::Result<()> {
        let admin = self.client.admin();
        let partition_count = u32::try_from(self.topic.partitions.len())?;
        if self.exists {
            admin.add_partitions(&self.name, partition_count).await?;
            admin.update_topic(&self.name, config, &FIELDS).await?;
            return Ok(());
        }
        // How many replicas there can be is the cluster's affair.
        let config = *config;
        let topic = NewTopic { config, ..NewTopic::new(&self.name, partition_count) };
        admin.create_topic(&topic).await?;
        Ok(())
    }
}

/// # Errors
/// The topic that is there has more partitions.
fn check_partitions(found: &TopicStatus, topic: &Topic) -> anyhow::Result<()> {
    let name = &found.name;
    if found.partitions.len() > topic.partitions.len() {
        let (has, had) = (found.partitions.len(), topic.partitions.len());
        let failure = Failure::new(Exit::Precondition, format!("{name} has {has} partitions"));
        let failure = failure.why(format!("in the backup it has {had}, and keys would move"));
        return Err(failure.hint("--as NAME").into());
    }
    Ok(())
}

fn not_empty(name: &str) -> Failure {
    let failure = Failure::new(Exit::Precondition, format!("{name} is there, and not empty"));
    failure.hint(
        "--as NAME   restores it under another name\n\
         --resume    goes on with a restore that was interrupted",
    )
}

/// A partition on its way back.
struct Target<'a> {
    restore: &'a Restore<'a>,
    number: u32,
    partition: &'a Partition,
    /// Offset of the first record here.
    first_offset: u64,
    /// Offset that the next record of the file gets here.
    next_offset: u64,
    acks: VecDeque<(u64, Acked)>,
}

impl<'a> Target<'a> {
    fn new(restore: &'a Restore<'_>, number: u32, partition: &'a Partition) -> Self {
        let offset = if restore.keeps_offsets { partition.log_start_offset } else { 0 };
        let (first_offset, next_offset) = (offset, offset);
        Self { restore, number, partition, first_offset, next_offset, acks: VecDeque::new() }
    }

    /// Writes what is not there yet. Returns how many records that was.
    async fn fill(&mut self, path: &Path, progress: &mut Progress) -> anyhow::Result<u64> {
        let place = format!("{}/{}", self.restore.name, self.number);
        let present = self.pad(self.present().high_watermark, progress).await?;
        let mut reader = Reader::open(path, self.partition.extent()).map_err(damaged)?;
        self.skip(&mut reader, present)?;
        let mut session = None;
        let mut new_records = 0;
        while let Some(stored) = reader.next().map_err(damaged)? {
            let Some(batch) = self.take(&stored)? else { continue };
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
            progress.add(&place, records, bytes);
        }
        while !self.acks.is_empty() {
            self.confirm().await?;
        }
        if let Some(session) = session {
            session.close().await?;
        }
        Ok(new_records)
    }

    /// What is there already.
    fn present(&self) -> Watermarks {
        self.restore.present[self.number as usize]
    }

    /// See [`Restore::check`].
    async fn check(&mut self, path: &Path) -> anyhow::Result<()> {
        let Watermarks { log_start_offset, high_watermark } = self.present();
        let filled = self.first_offset.min(high_watermark);
        if log_start_offset < filled {
            // Below the first record there are only the empty ones.
            let last = self.batch_before(filled).await?;
            if !last.is_some_and(|last| last.payload.chunks(FILLER.len()).all(|it| it == FILLER)) {
                return Err(self.something_else().into());
            }
        }
        if high_watermark <= self.first_offset {
            return Ok(());
        }
        let mut reader = Reader::open(path, self.partition.extent()).map_err(damaged)?;
        let last = self.skip(&mut reader, high_watermark)?;
        if self.next_offset != high_watermark || self.batch_before(high_watermark).await? != last {
            return Err(self.something_else().into());
        }
        Ok(())
    }

    /// Passes over the batches that are there already. Returns the last of them.
    fn skip(&mut self, reader: &mut Reader, end: u64) -> anyhow::Result<Option<EncodedBatch>> {
        let mut last = None;
        while self.next_offset < end {
            let Some(stored) = reader.next().map_err(damaged)? else { break };
            let Some(batch) = self.take(&stored)? else { continue };
            self.next_offset += u64::from(batch.record_count);
            last = Some(batch);
        }
        Ok(last)
    }

    /// What is to be written of a batch in the file. None: nothing.
    fn take(&self, stored: &StoredBatch) -> anyhow::Result<Option<EncodedBatch>> {
        let batch = from(stored, self.partition.log_start_offset)?;
        if batch.is_some() && self.restore.keeps_offsets {
            self.expect_no_gap(stored)?;
        }
        Ok(batch)
    }

    /// The batch in the topic that ends at an offset.
    async fn batch_before(&self, end: u64) -> anyhow::Result<Option<EncodedBatch>> {
        let Restore { client, name, .. } = self.restore;
        let start = Start::new(name, self.number, ClientPosition::Offset(end - 1)).until(end);
        let fetched = client.consumer().fetch_encoded(&[start], &FetchOptions::default()).await;
        let fetched = fetched.with_context(|| format!("read the end of {name}/{}", self.number))?;
        let batches = fetched.into_iter().flat_map(|fetched| fetched.batches);
        Ok(batches.into_iter().next().and_then(|stored| stored.batch))
    }

    fn something_else(&self) -> Failure {
        let Restore { name, .. } = self.restore;
        let what = format!("{name}/{} holds something else", self.number);
        let failure = Failure::new(Exit::Precondition, what);
        failure.why("it is not what a restore of this backup has begun").hint("--as NAME")
    }

    /// Makes the partition begin where its first record belongs: fills up to there, and trims.
    /// Returns where it ends then.
    async fn pad(&mut self, present: u64, progress: &mut Progress) -> anyhow::Result<u64> {
        if self.first_offset == 0 {
            return Ok(present);
        }
        let place = format!("{}/{}", self.restore.name, self.number);
        if present < self.first_offset {
            let limit = u64::from(self.restore.config.max_batch_bytes.unwrap_or(u32::MAX));
            let most = FILLERS_MAX.min(limit / FILLER.len() as u64).max(1);
            let session = self.open().await?;
            let mut next = present;
            while next < self.first_offset {
                let count = most.min(self.first_offset - next);
                let records = u32::try_from(count).context("count the empty records")?;
                let payload = FILLER.repeat(records as usize);
                let acked = session.append(batch::from_payload(records, payload.into())).await?;
                self.acks.push_back((next, acked));
                next += count;
                while self.acks.len() >= IN_FLIGHT_MAX {
                    self.confirm().await?;
                }
                progress.add(&place, 0, 0);
            }
            while !self.acks.is_empty() {
                self.confirm().await?;
            }
            session.close().await?;
        }
        let Restore { client, name, .. } = self.restore;
        client.admin().trim(name, self.number, self.first_offset).await?;
        Ok(present.max(self.first_offset))
    }

    /// # Errors
    /// A record of the batch would get another offset than it had.
    fn expect_no_gap(&self, stored: &StoredBatch) -> anyhow::Result<()> {
        let first = stored.first_offset.max(self.first_offset);
        let is_dense = stored.offset_deltas.iter().zip(0..).all(|(delta, place)| *delta == place);
        if first == self.next_offset && is_dense {
            return Ok(());
        }
        let what = format!("the backup has no record at offset {}", self.next_offset);
        let failure = Failure::new(Exit::Precondition, what);
        let failure = failure.why("compaction has dropped it, and offsets are given without gaps");
        Err(failure.hint("without --keep-offsets the records move together").into())
    }

    async fn open(&self) -> anyhow::Result<Session> {
        // What is restored is to be as safe as what was lost.
        let durability = Durability::QuorumSynced;
        let options = SessionOptions { durability, ..SessionOptions::default() };
        let Restore { client, name, .. } = self.restore;
        Ok(client.session(name, self.number, options).await?)
    }

    /// Waits for the oldest ack.
    async fn confirm(&mut self) -> anyhow::Result<()> {
        let Some((expected, acked)) = self.acks.pop_front() else { return Ok(()) };
        let ack = acked.await?;
        if ack.first_offset == Some(expected) {
            return Ok(());
        }
        let what = format!("a batch was to get offset {expected} and got {:?}", ack.first_offset);
        let failure = Failure::new(Exit::Precondition, what);
        let failure = failure.why("somebody else writes to the topic while it is restored");
        Err(failure.hint("stop the writers, delete the topic, and restore it again").into())
    }
}

/// The batch as it was stored, or what of it is at or above an offset. None: nothing of it is.
fn from(stored: &StoredBatch, offset: u64) -> anyhow::Result<Option<EncodedBatch>> {
    let Some(encoded) = &stored.batch else { return Ok(None) };
    let kept = records_from(stored, offset);
    if kept == u64::from(encoded.record_count) {
        return Ok(Some(encoded.clone()));
    }
    let mut records = batch::decode(encoded).context("read the first batch")?.records;
    let dropped = records.len().saturating_sub(usize::try_from(kept)?);
    records.drain(..dropped);
    Ok((!records.is_empty()).then(|| batch::encode(&records)))
}

fn damaged(damage: Damage) -> Failure {
    Failure::new(Exit::VerificationFailed, damage.to_string())
        .why("it was whole a moment ago, when all files were checked")
}

#[cfg(test)]
mod tests {
    use helix_client::proto::FILE_DESCRIPTOR_SET;
    use prost_types::FileDescriptorSet;

    use super::super::batches::tests::stored;
    use super::*;

    #[test]
    fn every_setting_of_a_topic_is_put_back() {
        let files: FileDescriptorSet = prost::Message::decode(FILE_DESCRIPTOR_SET).unwrap();
        let messages = files.file.iter().flat_map(|file| &file.message_type);
        let config = messages.into_iter().find(|message| message.name() == "TopicConfig").unwrap();
        let fields: Vec<_> = config.field.iter().map(|field| field.name()).collect();
        assert_eq!(fields, FIELDS);
    }

    #[test]
    fn a_batch_that_begins_too_early_is_cut() {
        let batch = stored(10, &["a", "b", "c"]);
        assert_eq!(from(&batch, 10).unwrap(), batch.batch);
        assert_eq!(from(&batch, 3).unwrap(), batch.batch);
        let cut = from(&batch, 12).unwrap().unwrap();
        let values: Vec<_> = batch::decode(&cut).unwrap().records;
        assert_eq!((cut.record_count, values[0].value.as_deref()), (1, Some(&b"c"[..])));
        assert_eq!(from(&batch, 13).unwrap(), None);
    }
}
