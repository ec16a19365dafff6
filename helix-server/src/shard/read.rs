//! The read path of a shard: committed batches, as they were stored.
//! Nothing at or above the high watermark is ever returned.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use helix_wal::{LogId, ReadMode};

use super::Shard;
use super::watch::{WatchGuard, Watcher};
use crate::error::{Error, Result};
use crate::limits;
use crate::log::{Head, Partition, PartitionId, ProducerStamp, Watermarks};
use crate::raft::{self, ProposeError, node_of};

/// Replicas that may serve a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadFrom {
    /// Only the leader, which has everything that was acknowledged before the call.
    Leader,
    /// Any replica, which has a prefix of that, up to its own high watermark.
    AnyReplica,
}

/// A stored batch.
#[derive(Debug, Clone)]
pub struct ReadBatch {
    /// Id of its log entry, the same on every replica.
    pub log_id: LogId,
    pub first_offset: u64,
    pub record_count: u32,
    /// Number of offsets that it covers; more than its records after compaction by key.
    pub offset_count: u32,
    /// Distances of the records' offsets from the first one, if compaction removed some.
    pub offset_deltas: Option<Arc<[u32]>>,
    pub version: u32,
    pub compression: i32,
    /// Size of the decompressed payload of a compressed batch, and of the `RecordList` that a batch
    /// of version 2 converts to; else 0.
    pub uncompressed_bytes: u32,
    /// Microseconds since the Unix epoch; never decreases within a partition.
    pub append_time_us: u64,
    pub crc: u32,
    pub payload: Bytes,
}

impl ReadBatch {
    /// Returns the offset of a record by its number in the batch.
    pub fn offset_of(&self, number: u32) -> u64 {
        let delta = self.offset_deltas.as_ref().and_then(|deltas| deltas.get(number as usize));
        self.first_offset + u64::from(delta.copied().unwrap_or(number))
    }

    /// Returns the memory of the distances, which a compressed payload does not show.
    pub fn offset_delta_bytes(&self) -> usize {
        self.offset_deltas.as_ref().map_or(0, |deltas| size_of_val(&**deltas))
    }

    /// Returns one past the last offset that the batch covers.
    pub fn end_offset(&self) -> u64 {
        self.first_offset + u64::from(self.offset_count)
    }

    /// Counts the records at or above an offset.
    pub fn record_count_from(&self, offset: u64) -> u64 {
        match &self.offset_deltas {
            None => self.end_offset().saturating_sub(offset.max(self.first_offset)),
            Some(deltas) => {
                let below = offset.saturating_sub(self.first_offset);
                deltas.iter().filter(|delta| u64::from(**delta) >= below).count() as u64
            }
        }
    }
}

/// Result of a read.
#[derive(Debug, Clone, Default)]
pub struct ShardRead {
    /// Batches, starting with the batch that contains the requested offset.
    pub batches: Vec<ReadBatch>,
    /// Offset of the next read: after the last batch, or after a gap if there is none.
    pub next_offset: u64,
    pub watermarks: Watermarks,
}

impl Shard {
    /// Waits until this replica may serve requests that only the leader may serve.
    ///
    /// Does not wait for an election among several replicas. The lease is checked against the
    /// clock at this moment, since the process may have been suspended.
    ///
    /// # Errors
    /// [`Error::NotLeader`], [`Error::NoLeader`], [`Error::Draining`], [`Error::StorageFailed`].
    pub async fn ready(&self) -> Result<()> {
        if self.replica.is_confirmed() && self.replica.is_ready() {
            return Ok(());
        }
        // Boxed because it is rare, to keep the common future small.
        Box::pin(async {
            self.wait_leader().await?;
            if self.replica.is_confirmed() { Ok(()) } else { self.confirm().await }
        })
        .await
    }

    /// Waits until this replica is the leader, as far as it knows.
    async fn wait_leader(&self) -> Result<()> {
        if !self.is_isolated() {
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
            None if self.is_leader() => Err(Error::NoLeader { shard: self.id() }),
            None => Err(self.not_leader()),
        }
    }

    /// Confirms the leadership with a majority, and waits until everything acknowledged before the
    /// call is applied. Uses ReadIndex, which depends on no clock.
    async fn confirm(&self) -> Result<()> {
        let confirmed = self.replica.read_index();
        let error = match tokio::time::timeout(limits::READ_INDEX_WAIT_MAX, confirmed).await {
            Ok(Ok(())) => return Ok(()),
            // The hint may name this replica, or a candidate that is not elected yet.
            Ok(Err(ProposeError::NotLeader { .. })) | Err(_) => {
                Error::NoLeader { shard: self.id() }
            }
            Ok(Err(error)) => self.propose_error(error),
        };
        Err(self.redirect(error).await)
    }

    /// Like [`Self::ready`] where only the leader may serve the read.
    ///
    /// # Errors
    /// As [`Self::ready`].
    pub async fn ready_for(&self, from: ReadFrom) -> Result<()> {
        match from {
            ReadFrom::Leader => self.ready().await,
            ReadFrom::AnyReplica if self.closed.is_cancelled() => {
                let draining = self.draining.is_cancelled();
                // A new replica takes its place on this node, so the client retries here.
                Err(if draining { Error::Draining } else { Error::NoLeader { shard: self.id() } })
            }
            // In repair: it may lack records that readers have seen here before.
            ReadFrom::AnyReplica if self.replica.repair_of().is_some() => Err(self.not_leader()),
            ReadFrom::AnyReplica => Ok(()),
        }
    }

    /// Returns a partition's watermarks as applied here.
    ///
    /// # Errors
    /// [`Error::PartitionDeleted`], or [`Error::NoLeader`] while this replica has not applied the
    /// entry that creates the partition.
    pub fn watermarks(&self, partition: PartitionId) -> Result<Watermarks> {
        self.machine.watermarks(partition).ok_or_else(|| self.missing(partition))
    }

    /// Returns a partition's watermarks for a read that relies on them.
    ///
    /// From the leader, `log_start` and `high_watermark` must be those of everything acknowledged
    /// before the call. While a split has sealed the partition, another shard may already have
    /// acknowledged more, which this replica cannot know.
    ///
    /// # Errors
    /// As [`Self::watermarks`], and [`Error::NoLeader`] for a sealed partition of the leader.
    pub fn watermarks_for(&self, partition: PartitionId, from: ReadFrom) -> Result<Watermarks> {
        let found = self.machine.with(partition, |it| (it.watermarks(), it.is_sealed));
        match found {
            Some((_, true)) if from == ReadFrom::Leader => {
                Err(Error::NoLeader { shard: self.id() })
            }
            Some((watermarks, _)) => Ok(watermarks),
            None => Err(self.missing(partition)),
        }
    }

    pub(super) fn missing(&self, partition: PartitionId) -> Error {
        if self.machine.read_state(|state| state.is_dropped(partition)) {
            return Error::PartitionDeleted { partition };
        }
        Error::NoLeader { shard: self.id() }
    }

    /// Returns watermarks that cover everything acknowledged before the call, by ReadIndex.
    ///
    /// # Errors
    /// As [`Self::ready`] and [`Self::watermarks_for`].
    pub async fn latest(&self, partition: PartitionId) -> Result<Watermarks> {
        self.wait_leader().await?;
        self.confirm().await?;
        self.watermarks_for(partition, ReadFrom::Leader)
    }

    /// Reads batches, starting at the batch that contains `offset`, below `until_offset` if given.
    /// Returns at least one if there is any, then up to `bytes_max`; none at the high watermark.
    ///
    /// # Errors
    /// [`Error::OffsetOutOfRange`] below the log start and, from the leader, above the high
    /// watermark,
    /// [`Error::CorruptLog`] where stored bytes do not verify, and above the high watermark of an
    /// only replica that truncated its last group.
    pub async fn read(
        &self,
        partition: PartitionId,
        offset: u64,
        until_offset: Option<u64>,
        bytes_max: usize,
        from: ReadFrom,
    ) -> Result<ShardRead> {
        self.ready_for(from).await?;
        let mut watermarks = self.watermarks_for(partition, from)?;
        if offset > watermarks.high_watermark && from == ReadFrom::Leader {
            // Clients treat OFFSET_OUT_OF_RANGE as final, so the leadership is confirmed with
            // ReadIndex, not with the lease.
            Box::pin(self.confirm()).await?;
            watermarks = self.watermarks_for(partition, from)?;
        }
        // Only the leader knows the end: another replica may have more than this one.
        let is_beyond = offset > watermarks.high_watermark && from == ReadFrom::Leader;
        if offset < watermarks.log_start {
            return Err(Error::OffsetOutOfRange { requested: offset, watermarks });
        }
        if is_beyond {
            return Err(self.beyond_end(partition, offset, watermarks));
        }
        let below = until_offset
            .map_or(watermarks.high_watermark, |until| until.min(watermarks.high_watermark));
        if offset >= below {
            return Ok(ShardRead { batches: Vec::new(), next_offset: offset, watermarks });
        }
        self.gaps_below(partition, offset, from)?;
        let read_from = |from: u64| {
            let wal = self.wal.clone();
            move |how: ReadMode| wal.read_stream(partition.0, from, below, bytes_max, how)
        };
        let mut position = offset;
        let mut stored = loop {
            let first = match self.reads.run(read_from(position)).await {
                Ok(stored) => break stored,
                Err(helix_wal::Error::Trimmed { first, .. }) => first,
                Err(error) => return Err(self.read_error(error)),
            };
            // Retention may have deleted them, or compaction the first ones that it had left. It
            // may do so again before the next attempt, which begins later each time.
            let is_gap = first > position && first <= self.gaps_below(partition, offset, from)?;
            if !is_gap || offset < self.watermarks(partition)?.log_start {
                return Err(self.missing_offset(partition, offset, from));
            }
            if first >= below {
                return Ok(ShardRead { batches: Vec::new(), next_offset: below, watermarks });
            }
            position = first;
        };
        // Asked again: a round may have been decided and done meanwhile, or a snapshot installed.
        let gaps_below = self.gaps_below(partition, offset, from)?;
        let is_empty = stored.is_empty();
        let next_offset = truncate_at_gap(&mut stored, offset, gaps_below);
        if stored.is_empty() && !is_empty {
            return Err(self.missing_offset(partition, offset, from));
        }
        if is_empty && gaps_below > offset {
            // Everything up to there went away.
            let next_offset = below.min(gaps_below);
            return Ok(ShardRead { batches: Vec::new(), next_offset, watermarks });
        }
        let batches = decode_batches(stored, bytes_max).map_err(|error| Error::CorruptLog {
            what: format!("partition {partition} of shard {}: {error}", self.id()),
        })?;
        let next_offset = batches.last().map_or(next_offset, ReadBatch::end_offset);
        Ok(ShardRead { batches, next_offset, watermarks })
    }

    /// Returns the offset below which compaction by key may have left gaps.
    ///
    /// # Errors
    /// [`Error::NotLeader`] or [`Error::NoLeader`] if this replica may lack records that a reader
    /// from `offset` on relies on.
    fn gaps_below(&self, partition: PartitionId, offset: u64, from: ReadFrom) -> Result<u64> {
        let state = self.machine.with(partition, |it| (it.cleanup, it.log_start));
        let (cleanup, log_start) = state.unwrap_or_default();
        let has_later = from == ReadFrom::Leader || self.has_later_records();
        if has_later && self.is_clean_enough(partition, offset, cleanup.cleaned, log_start) {
            Ok(cleanup.upto)
        } else {
            Err(self.not_clean())
        }
    }

    /// Returns why the leader has no offset above the high watermark.
    ///
    /// A single replica that truncated its last group may have lost it. Clients would take
    /// OFFSET_OUT_OF_RANGE as the word that there never was such a record.
    fn beyond_end(&self, partition: PartitionId, offset: u64, watermarks: Watermarks) -> Error {
        let is_single =
            self.replica.membership().is(&BTreeSet::from([self.replica_id]), &BTreeSet::new());
        match &self.truncated {
            Some(place) if is_single => Error::CorruptLog {
                what: format!(
                    "offset {offset} of partition {partition} is above the end {end}, and the only \
                     replica of shard {shard} lost its last group ({place}) before it started: it \
                     may have been acknowledged; read from {end}, or restore a backup",
                    end = watermarks.high_watermark,
                    shard = self.id(),
                ),
            },
            _ => Error::OffsetOutOfRange { requested: offset, watermarks },
        }
    }

    /// Returns why the log lacks an offset that was within the watermarks. On a follower, a
    /// snapshot may just have replaced those entries, before its watermarks are visible.
    fn missing_offset(&self, partition: PartitionId, requested: u64, from: ReadFrom) -> Error {
        match self.watermarks(partition) {
            Err(error) => error,
            Ok(watermarks) if requested < watermarks.log_start => {
                Error::OffsetOutOfRange { requested, watermarks }
            }
            Ok(_) if from == ReadFrom::AnyReplica => self.not_leader(),
            Ok(_) => Error::CorruptLog {
                what: format!(
                    "partition {partition} of shard {}: offset {requested} is not in the log",
                    self.id()
                ),
            },
        }
    }

    /// Returns the first readable offset whose append time is at or after `time_us`.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub async fn offset_at_time(
        &self,
        partition: PartitionId,
        time_us: u64,
        from: ReadFrom,
    ) -> Result<Option<u64>> {
        self.ready_for(from).await?;
        let watermarks = self.watermarks_for(partition, from)?;
        let wal = self.wal.clone();
        let read = move |how: ReadMode| wal.search_time(partition.0, time_us, how);
        let found = self.reads.run(read).await.map_err(|error| self.read_error(error))?;
        Ok(found
            .map(|offset| offset.max(watermarks.log_start))
            .filter(|offset| *offset < watermarks.high_watermark))
    }

    /// Registers a watcher: `tag` becomes ready when the high watermark changes or the partition is
    /// deleted. The caller reads the watermarks once after this call.
    ///
    /// # Errors
    /// As [`Self::watermarks`].
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

    /// Returns the sequence that the next batch of this producer must have; `None` if the
    /// partition does not track it for this owner.
    pub fn next_sequence(&self, partition: PartitionId, stamp: &ProducerStamp) -> Option<u64> {
        self.machine.next_sequence(partition, stamp)
    }

    /// Checks that an epoch that the partition tracks belongs to the owner of the stamp.
    ///
    /// # Errors
    /// The refusal that a batch with this stamp would get.
    pub fn check_owner(&self, partition: PartitionId, stamp: &ProducerStamp) -> Result<()> {
        Ok(self.machine.check_owner(partition, stamp)?)
    }

    /// Returns whether the shard may have forgotten the producer on the partition. Its batches
    /// with sequence 0 are then refused, since they may be duplicates.
    pub fn has_forgotten(&self, partition: PartitionId, producer_id: u64, epoch: u32) -> bool {
        self.machine.has_forgotten(partition, producer_id, epoch)
    }

    /// Returns the bytes of a partition's frames above the log start, and those still on disk.
    /// The first is an estimate where the log start is within a segment.
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

    /// Returns the bytes of all partitions' frames above the log starts. Yields to other tasks
    /// every [`limits::PARTITIONS_PER_TURN`] partitions.
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

    /// Returns the error of a replica that has not compacted what others may have forgotten. The
    /// client retries here or at another replica.
    fn not_clean(&self) -> Error {
        match self.leader_hint() {
            Some(leader) if leader.node_id != node_of(self.replica_id) => self.not_leader(),
            _ => Error::NoLeader { shard: self.id() },
        }
    }

    fn read_error(&self, error: helix_wal::Error) -> Error {
        match error {
            helix_wal::Error::Damaged { .. }
            | helix_wal::Error::Io { .. }
            | helix_wal::Error::Beyond { .. }
            | helix_wal::Error::Trimmed { .. } => {
                Error::CorruptLog { what: format!("shard {}: {error}", self.id()) }
            }
            helix_wal::Error::Exhausted { .. } => Error::Exhausted { what: error.to_string() },
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

/// Truncates batches after the first offset gap, and returns the offset after the last one.
///
/// The log is read in pieces, and a snapshot may replace entries between two of them. The next
/// read handles batches after a gap. Gaps below `gaps_below`, which compaction by key left, are
/// skipped.
fn truncate_at_gap(stored: &mut Vec<helix_wal::StoredEntry>, offset: u64, gaps_below: u64) -> u64 {
    let mut next_offset = offset;
    let follow = stored.iter().take_while(|entry| {
        let placement = entry.placement;
        let end = placement.first + u64::from(placement.count);
        // An older record after a newer one would take its place in a reader's table.
        debug_assert!(end > next_offset, "the batch at {} was read before", placement.first);
        let follows = placement.first <= next_offset.max(gaps_below) && end > next_offset;
        if follows {
            next_offset = end;
        }
        follows
    });
    let count = follow.count();
    stored.truncate(count);
    next_offset
}

/// Decodes the heads of batches. Leaves out later ones if the offsets that compaction kept take
/// more than `bytes_max`: small heads may have many.
fn decode_batches(
    stored: Vec<helix_wal::StoredEntry>,
    bytes_max: usize,
) -> io::Result<Vec<ReadBatch>> {
    let mut batches = Vec::with_capacity(stored.len());
    let mut delta_bytes = 0;
    for entry in stored {
        let batch = batch(entry)?;
        delta_bytes += batch.offset_delta_bytes();
        if delta_bytes > bytes_max && !batches.is_empty() {
            break;
        }
        batches.push(batch);
    }
    Ok(batches)
}

fn batch(entry: helix_wal::StoredEntry) -> io::Result<ReadBatch> {
    let Head::Batch(head) = raft::decode_head(&entry.head)? else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the entry of a batch is a command",
        ));
    };
    Ok(ReadBatch {
        log_id: entry.id,
        first_offset: entry.placement.first,
        record_count: head.record_count,
        offset_count: entry.placement.count,
        offset_deltas: head.kept.map(|kept| kept.deltas().into()),
        version: head.version,
        compression: head.compression,
        uncompressed_bytes: head.uncompressed_bytes,
        append_time_us: entry.placement.time,
        crc: entry.payload.crc,
        payload: entry.payload.bytes,
    })
}

#[cfg(test)]
mod tests {
    use helix_wal::{Payload, Placement, StoredEntry};

    use super::*;
    use crate::log::testing::batch_head;
    use crate::log::{BatchHead, KeptOffsets};

    /// Returns entries with these first offsets and record counts.
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
        let next_offset = truncate_at_gap(&mut stored, offset, 0);
        (stored.len(), next_offset)
    }

    #[test]
    fn batches_after_an_offset_gap_are_not_returned() {
        assert_eq!(cut(&[(10, 5), (15, 1)], 10), (2, 16));
        assert_eq!(cut(&[(10, 5), (15, 1)], 12), (2, 16), "from within a batch");
        assert_eq!(cut(&[(10, 5), (15, 1)], 9), (0, 9), "the log starts later");
        assert_eq!(cut(&[(10, 5), (16, 1), (17, 1)], 10), (1, 15), "a later piece starts later");
        assert_eq!(cut(&[], 3), (0, 3));
    }

    #[test]
    fn gaps_of_compaction_are_skipped() {
        let cut = |offset, gaps_below| {
            let mut stored = stored(&[(12, 2), (20, 5), (30, 1)]);
            let next_offset = truncate_at_gap(&mut stored, offset, gaps_below);
            (stored.len(), next_offset)
        };
        assert_eq!(cut(10, 31), (3, 31));
        assert_eq!(cut(10, 29), (2, 25), "a gap above what was decided is none of compaction");
        assert_eq!(cut(10, 11), (0, 10));
        assert_eq!(cut(13, 19), (1, 14));
    }

    #[test]
    fn kept_offsets_count_as_bytes_of_a_read() {
        let kept = KeptOffsets::new(1_000, (0..500).map(|number| 2 * number).collect());
        let head = BatchHead { kept: kept.map(Box::new), ..batch_head(7, 500) };
        let head = raft::encode_head(&Head::Batch(head));
        let decoded = |bytes_max| {
            let mut stored = stored(&[(0, 1_000), (1_000, 1_000), (2_000, 1_000)]);
            stored.iter_mut().for_each(|entry| entry.head = head.clone());
            let batches = decode_batches(stored, bytes_max).unwrap();
            (batches.len(), batches.last().map(ReadBatch::end_offset))
        };
        assert_eq!(decoded(1), (1, Some(1_000)), "at least one");
        assert_eq!(decoded(2 * 500 * 4), (2, Some(2_000)));
        assert_eq!(decoded(usize::MAX), (3, Some(3_000)));
    }
}
