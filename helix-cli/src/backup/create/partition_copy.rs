//! The running copy of one partition.

use std::path::PathBuf;

use anyhow::Context;
use helix_client::proto::log::v1::{ErrorReason, StoredBatch};
use helix_client::{Error as ClientError, TopicRef};
use tokio::time::Instant;

use super::{BackupRun, CHECKPOINT_BYTES};
use crate::backup::batches::{BatchFileWriter, end_offset, record_count_from};
use crate::backup::manifest::{GapCause, SavedGap, SavedPartition};

/// Loss of records that a copy meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loss {
    /// The records below this offset are deleted.
    Trimmed { log_start: u64 },
    /// The topic is deleted, and maybe created again.
    Deleted,
}

impl Loss {
    /// Returns the loss that made the read at an offset fail, if a loss did.
    pub(super) fn of(error: &anyhow::Error, offset: u64) -> Option<Self> {
        let error = error.downcast_ref::<ClientError>()?;
        match error.reason? {
            ErrorReason::TopicNotFound
            | ErrorReason::TopicDeleted
            | ErrorReason::PartitionNotFound
            | ErrorReason::TopicRecreated => Some(Self::Deleted),
            ErrorReason::OffsetOutOfRange => {
                let log_start = error.watermarks?.log_start_offset;
                // Committed offsets end only with their topic.
                Some(if log_start > offset { Self::Trimmed { log_start } } else { Self::Deleted })
            }
            _ => None,
        }
    }
}

/// A running copy of a partition to its batch file.
pub(super) struct PartitionCopy {
    pub(super) topic: String,
    pub(super) topic_id: u64,
    pub(super) number: u32,
    /// `topic/partition`, for messages.
    pub(super) name: String,
    pub(super) path: PathBuf,
    /// None until the first batch.
    pub(super) writer: Option<BatchFileWriter>,
    pub(super) partition: SavedPartition,
    /// End offset, exclusive.
    pub(super) end: u64,
    pub(super) begun_at: Instant,
    /// Some offsets that this copy has read no longer have a record.
    pub(super) has_holes: bool,
}

impl PartitionCopy {
    /// Returns whether the copy continues an earlier run, and may lack deletions of records that
    /// the earlier run has copied. Compaction removes a deletion once it has been there for a
    /// while. Without holes, nothing was removed since.
    pub(super) fn may_lack_deletions(&self, continued_at: u64, is_compacted: bool) -> bool {
        let is_new_trim =
            |gap: &SavedGap| gap.cause == GapCause::Trimmed && gap.next_offset > continued_at;
        let has_trims = self.partition.gaps.iter().any(is_new_trim);
        let has_earlier =
            self.partition.batch_count > 0 && continued_at > self.partition.log_start_offset;
        has_earlier && (self.has_holes || is_compacted && has_trims)
    }

    /// Copies up to the end or the next checkpoint. Returns true at the end.
    pub(super) async fn step(&mut self, run: &mut BackupRun<'_>) -> anyhow::Result<bool> {
        let mut bytes = 0;
        while self.partition.next_offset < self.end && bytes < CHECKPOINT_BYTES {
            if run.is_deleted {
                self.partition.skip(self.end, GapCause::TopicDeleted);
                break;
            }
            let from = self.partition.next_offset;
            let topic = TopicRef::with_id(&self.topic, self.topic_id);
            let fetched = match run.fetch(topic, self.number, from, self.end).await {
                Ok(fetched) => fetched,
                Err(error) => {
                    match Loss::of(&error, from) {
                        Some(Loss::Trimmed { log_start }) => {
                            self.partition.skip(log_start.min(self.end), GapCause::Trimmed);
                        }
                        Some(Loss::Deleted) => run.is_deleted = true,
                        None => return Err(error),
                    }
                    continue;
                }
            };
            for batch in &fetched.batches {
                let has_gap = batch.first_offset > self.partition.next_offset;
                self.has_holes |= has_gap || !batch.offset_deltas.is_empty();
                bytes += self.add(batch, run)?;
            }
            // Skips offsets that compaction has removed.
            let next = self.partition.next_offset.max(fetched.next_offset.min(self.end));
            anyhow::ensure!(next > from, "{}: no records from offset {from} on", self.name);
            self.has_holes |= next > self.partition.next_offset;
            self.partition.next_offset = next;
        }
        run.unsaved_bytes += bytes;
        Ok(self.partition.next_offset >= self.end)
    }

    /// Appends a batch to the file and returns its payload bytes.
    fn add(&mut self, stored: &StoredBatch, run: &mut BackupRun<'_>) -> anyhow::Result<u64> {
        let name = &self.name;
        let (Some(batch), Some(end)) = (&stored.batch, end_offset(stored)) else {
            anyhow::bail!("{name}: the batch at offset {} is malformed", stored.first_offset);
        };
        let writer = match &mut self.writer {
            Some(writer) => writer,
            empty => {
                let created = BatchFileWriter::create(&self.path);
                empty.insert(created.with_context(|| format!("write {}", self.path.display()))?)
            }
        };
        writer.append(stored).with_context(|| format!("write {name} to the backup"))?;
        let partition = &mut self.partition;
        partition.shorten_gap(stored.first_offset);
        let records = record_count_from(stored, partition.log_start_offset);
        let bytes = batch.payload.len() as u64;
        run.progress.add(name, records, bytes);
        partition.next_offset = end;
        partition.record_count += records;
        partition.batch_count += 1;
        // The limit of a topic holds for both sizes of a compressed batch.
        let size = u32::try_from(bytes).unwrap_or(u32::MAX).max(batch.uncompressed_bytes);
        partition.batch_bytes_max = partition.batch_bytes_max.max(size);
        Ok(bytes)
    }

    /// Syncs the file and returns the state to save in the manifest.
    pub(super) fn sync(&mut self) -> anyhow::Result<SavedPartition> {
        if let Some(writer) = &mut self.writer {
            let prefix = writer.sync().with_context(|| format!("sync {}", self.name))?;
            (self.partition.file_bytes, self.partition.crc32) = (prefix.file_bytes, prefix.crc32);
        }
        Ok(self.partition.clone())
    }
}
