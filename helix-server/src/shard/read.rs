//! Reading from a shard: committed batches, as they were stored.
//! Nothing at or above the high watermark is ever returned.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use helix_wal::{How, LogId};

use super::Shard;
use super::watch::{WatchGuard, Watcher};
use crate::error::{Error, Result};
use crate::limits;
use crate::log::{Head, Partition, PartitionId, Watermarks};
use crate::raft::{self, ProposeError};

/// Which replicas may answer a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadFrom {
    /// The leader: everything that was acknowledged before the call.
    Leader,
    /// Any replica: a prefix of that, up to its own high watermark.
    AnyReplica,
}

/// A stored batch.
#[derive(Debug, Clone)]
pub struct ReadBatch {
    /// Its entry in the log, the same on every replica.
    pub log_id: LogId,
    pub first_offset: u64,
    pub record_count: u32,
    pub version: u32,
    pub compression: i32,
    /// Microseconds since the Unix epoch; never decreases within a partition.
    pub append_time_us: u64,
    pub crc: u32,
    pub payload: Bytes,
}

/// Answer to a read.
#[derive(Debug, Clone, Default)]
pub struct Read {
    /// From the batch that holds the asked offset on.
    pub batches: Vec<ReadBatch>,
    /// Where to go on.
    pub next_offset: u64,
    pub watermarks: Watermarks,
}

impl Shard {
    /// Waits until this replica may serve what only a leader may. Does not wait for an election
    /// among several: who leads then is for the caller to find out.
    ///
    /// Judged now, and by how long ago a majority said so: what this replica last knew of itself
    /// may be from before its process was suspended.
    pub async fn ready(&self) -> Result<()> {
        if self.replica.is_confirmed() && self.replica.is_ready() {
            return Ok(());
        }
        // Boxed, since it is rare.
        Box::pin(async {
            self.lead().await?;
            if self.replica.is_confirmed() { Ok(()) } else { self.confirm().await }
        })
        .await
    }

    /// Waits until this replica leads, as far as it knows.
    async fn lead(&self) -> Result<()> {
        if !self.is_cut_off() {
            let undecided = self.replica.leadership().leader.is_none();
            let wait = if undecided && self.members.len() > 1 {
                limits::LEADER_WAIT_MAX
            } else {
                limits::READY_WAIT_MAX
            };
            if self.replica.wait_ready(wait).await {
                return Ok(());
            }
        }
        match self.failure() {
            Some(what) => Err(Error::StorageFailed { what, may_have_applied: false }),
            None if self.draining.is_cancelled() => Err(Error::Draining),
            None if self.leads() => Err(Error::NoLeader { shard: self.id() }),
            None => Err(self.not_leader()),
        }
    }

    /// Has a majority confirm that this replica leads, and waits until it has applied all that was
    /// acknowledged before the call: by ReadIndex, which looks at no clock.
    async fn confirm(&self) -> Result<()> {
        let confirmed = self.replica.read_index();
        let error = match tokio::time::timeout(limits::READ_INDEX_WAIT_MAX, confirmed).await {
            Ok(Ok(())) => return Ok(()),
            // Who is named may be this replica, or one that does not lead yet.
            Ok(Err(ProposeError::NotLeader { .. })) | Err(_) => {
                Error::NoLeader { shard: self.id() }
            }
            Ok(Err(error)) => self.propose_error(error),
        };
        Err(self.turned_away(error).await)
    }

    /// As [`Self::ready`] where only the leader may answer.
    pub async fn ready_for(&self, from: ReadFrom) -> Result<()> {
        match from {
            ReadFrom::Leader => self.ready().await,
            ReadFrom::AnyReplica if self.closed.is_cancelled() => {
                let draining = self.draining.is_cancelled();
                // Another one takes its place here, and is found where this one was.
                Err(if draining { Error::Draining } else { Error::NoLeader { shard: self.id() } })
            }
            // What it has told readers before is not all here again.
            ReadFrom::AnyReplica if !self.replica.gate().is_open() => Err(self.not_leader()),
            ReadFrom::AnyReplica => Ok(()),
        }
    }

    /// # Errors
    /// [`Error::PartitionDeleted`], or [`Error::NoLeader`] while this replica has not come to the
    /// entry that creates the partition.
    pub fn watermarks(&self, partition: PartitionId) -> Result<Watermarks> {
        self.machine.watermarks(partition).ok_or_else(|| self.missing(partition))
    }

    pub(super) fn missing(&self, partition: PartitionId) -> Error {
        if self.machine.read_state(|state| state.is_dropped(partition)) {
            return Error::PartitionDeleted { partition };
        }
        Error::NoLeader { shard: self.id() }
    }

    /// High watermark that covers everything acknowledged before the call, by ReadIndex.
    pub async fn latest(&self, partition: PartitionId) -> Result<Watermarks> {
        self.lead().await?;
        self.confirm().await?;
        self.watermarks(partition)
    }

    /// Batches from the one that holds `offset` on, below `until_offset` where given: at least
    /// one if there is any, then up to `bytes_max`. None at the high watermark.
    ///
    /// # Errors
    /// [`Error::OffsetOutOfRange`] below the log start and, from the leader, above the high
    /// watermark,
    /// [`Error::CorruptLog`] where stored bytes do not verify.
    pub async fn read(
        &self,
        partition: PartitionId,
        offset: u64,
        until_offset: Option<u64>,
        bytes_max: usize,
        from: ReadFrom,
    ) -> Result<Read> {
        self.ready_for(from).await?;
        let mut watermarks = self.watermarks(partition)?;
        if offset > watermarks.high_watermark && from == ReadFrom::Leader {
            // Whoever is told so does not ask again: no clock is to have a part in it.
            Box::pin(self.confirm()).await?;
            watermarks = self.watermarks(partition)?;
        }
        // Another replica may have more than this one: only the leader knows the end.
        let is_beyond = offset > watermarks.high_watermark && from == ReadFrom::Leader;
        if offset < watermarks.log_start || is_beyond {
            return Err(Error::OffsetOutOfRange { asked: offset, watermarks });
        }
        let below = until_offset
            .map_or(watermarks.high_watermark, |until| until.min(watermarks.high_watermark));
        if offset >= below {
            return Ok(Read { batches: Vec::new(), next_offset: offset, watermarks });
        }
        let wal = self.wal.clone();
        let read = move |how: How| wal.read_stream(partition.0, offset, below, bytes_max, how);
        let mut stored = match self.reads.run(read).await {
            Ok(stored) => stored,
            // Trimmed, or deleted, since we looked.
            Err(helix_wal::Error::Trimmed { .. }) => {
                return Err(self.lacks(partition, offset, from));
            }
            Err(error) => return Err(self.read_error(error)),
        };
        let is_empty = stored.is_empty();
        let next_offset = cut_at_gap(&mut stored, offset);
        if stored.is_empty() && !is_empty {
            return Err(self.lacks(partition, offset, from));
        }
        let batches = stored.into_iter().map(batch).collect::<io::Result<_>>();
        let batches = batches.map_err(|error| Error::CorruptLog {
            what: format!("partition {partition} of shard {}: {error}", self.id()),
        })?;
        Ok(Read { batches, next_offset, watermarks })
    }

    /// Why the log does not have an offset that was within the watermarks. On a replica that does
    /// not lead a snapshot that begins later may just have taken the place of what was there, and
    /// its watermarks are about to be known.
    fn lacks(&self, partition: PartitionId, asked: u64, from: ReadFrom) -> Error {
        match self.watermarks(partition) {
            Err(error) => error,
            Ok(watermarks) if asked < watermarks.log_start => {
                Error::OffsetOutOfRange { asked, watermarks }
            }
            Ok(_) if from == ReadFrom::AnyReplica => self.not_leader(),
            Ok(_) => Error::CorruptLog {
                what: format!(
                    "partition {partition} of shard {}: offset {asked} is not in the log",
                    self.id()
                ),
            },
        }
    }

    /// First readable offset whose append time is at or after `time_us`.
    pub async fn offset_at_time(
        &self,
        partition: PartitionId,
        time_us: u64,
        from: ReadFrom,
    ) -> Result<Option<u64>> {
        self.ready_for(from).await?;
        let watermarks = self.watermarks(partition)?;
        let wal = self.wal.clone();
        let read = move |how: How| wal.search_time(partition.0, time_us, how);
        let found = self.reads.run(read).await.map_err(|error| self.read_error(error))?;
        Ok(found
            .map(|offset| offset.max(watermarks.log_start))
            .filter(|offset| *offset < watermarks.high_watermark))
    }

    /// Makes the watcher's `tag` ready whenever the partition's high watermark moves or the
    /// partition is deleted, from now on: look at the watermarks once after this call.
    pub fn watch(
        &self,
        partition: PartitionId,
        tag: u32,
        watcher: &Arc<Watcher>,
    ) -> Result<WatchGuard> {
        let guard = self.machine.watchers().add(partition, tag, watcher);
        self.watermarks(partition)?;
        Ok(guard)
    }

    pub fn next_sequence(
        &self,
        partition: PartitionId,
        producer_id: u64,
        epoch: u32,
    ) -> Option<u64> {
        self.machine.next_sequence(partition, producer_id, epoch)
    }

    /// Nothing that the producer begins on the partition with sequence 0 is taken: it may have
    /// been there before.
    pub fn has_forgotten(&self, partition: PartitionId, producer_id: u64, epoch: u32) -> bool {
        self.machine.has_forgotten(partition, producer_id, epoch)
    }

    /// Bytes of a partition's frames: those above the log start, as far as that can be told where
    /// it cuts a share in two, and those still on disk.
    pub fn partition_bytes(&self, partition: PartitionId) -> (u64, u64) {
        let Some(log_start) =
            self.machine.with(partition, |p: &Partition| p.watermarks().log_start)
        else {
            return (0, 0);
        };
        let (mut live, mut held) = (0, 0);
        for row in self.wal.stream_rows(partition.0) {
            held += row.bytes;
            let kept = row.next.saturating_sub(log_start.max(row.first));
            let all = row.next.saturating_sub(row.first).max(1);
            live += (u128::from(row.bytes) * u128::from(kept) / u128::from(all)) as u64;
        }
        (live, held)
    }

    /// Bytes of the frames above the log starts, of all partitions: so many that others have their
    /// turn in between.
    pub async fn live_bytes(&self) -> u64 {
        let partitions: Vec<PartitionId> =
            self.machine.read_state(|state| state.partitions().map(|p| p.id).collect());
        let mut sum = 0;
        for some in partitions.chunks(limits::PARTITIONS_PER_TURN) {
            tokio::task::yield_now().await;
            sum += some.iter().map(|id| self.partition_bytes(*id).0).sum::<u64>();
        }
        sum
    }

    fn read_error(&self, error: helix_wal::Error) -> Error {
        match error {
            helix_wal::Error::Damaged { .. }
            | helix_wal::Error::Io { .. }
            | helix_wal::Error::Beyond { .. }
            | helix_wal::Error::Trimmed { .. } => {
                Error::CorruptLog { what: format!("shard {}: {error}", self.id()) }
            }
            helix_wal::Error::Closed if self.draining.is_cancelled() => Error::Draining,
            // This replica is closed, and another one will take its place.
            helix_wal::Error::Closed => Error::NoLeader { shard: self.id() },
            helix_wal::Error::Poisoned { .. }
            | helix_wal::Error::DiskFull { .. }
            | helix_wal::Error::Unusable(_) => {
                Error::StorageFailed { what: error.to_string(), may_have_applied: false }
            }
        }
    }
}

/// Takes away whatever does not follow what is before it, from `offset` on, and says where the rest
/// ends. The log is read in pieces, between which a snapshot may take the place of what was there:
/// what begins later than the last piece has ended is for the next read to judge.
fn cut_at_gap(stored: &mut Vec<helix_wal::StoredEntry>, offset: u64) -> u64 {
    let mut next_offset = offset;
    let follow = stored.iter().take_while(|entry| {
        let placement = entry.placement;
        let follows = placement.first <= next_offset;
        if follows {
            next_offset = placement.first + u64::from(placement.count);
        }
        follows
    });
    let count = follow.count();
    stored.truncate(count);
    next_offset
}

fn batch(entry: helix_wal::StoredEntry) -> io::Result<ReadBatch> {
    let Head::Batch(head) = raft::decode_head(&entry.head)? else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a command among the batches"));
    };
    Ok(ReadBatch {
        log_id: entry.id,
        first_offset: entry.placement.first,
        record_count: entry.placement.count,
        version: head.version,
        compression: head.compression,
        append_time_us: entry.placement.time,
        crc: entry.payload.crc,
        payload: entry.payload.bytes,
    })
}

#[cfg(test)]
mod tests {
    use helix_wal::{Payload, Placement, StoredEntry};

    use super::*;

    /// Entries of so many records each, from these offsets on.
    fn stored(places: &[(u64, u32)]) -> Vec<StoredEntry> {
        let entry = |(index, (first, count)): (u64, &(u64, u32))| StoredEntry {
            id: LogId { term: 1, index },
            placement: Placement { stream: 7, first: *first, count: *count, time: 0 },
            head: Bytes::new(),
            payload: Payload { bytes: Bytes::new(), crc: 0, crc_seed: 0 },
        };
        (1..).zip(places).map(entry).collect()
    }

    fn cut(places: &[(u64, u32)], offset: u64) -> (usize, u64) {
        let mut stored = stored(places);
        let next_offset = cut_at_gap(&mut stored, offset);
        (stored.len(), next_offset)
    }

    #[test]
    fn what_a_snapshot_put_behind_a_gap_is_not_read_as_if_it_followed() {
        assert_eq!(cut(&[(10, 5), (15, 1)], 10), (2, 16));
        assert_eq!(cut(&[(10, 5), (15, 1)], 12), (2, 16), "from amid a batch on");
        assert_eq!(cut(&[(10, 5), (15, 1)], 9), (0, 9), "the log begins later");
        assert_eq!(cut(&[(10, 5), (16, 1), (17, 1)], 10), (1, 15), "a later piece begins later");
        assert_eq!(cut(&[], 3), (0, 3));
    }
}
