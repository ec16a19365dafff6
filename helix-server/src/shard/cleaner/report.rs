//! Progress of the cleaner, for the rest of the shard, for the leader and for operators.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use helix_wal::CleanMark;
use tokio::time::Instant;

use super::super::Shard;
use super::{DueRound, PassError};
use crate::limits::{
    CLEANER_RETRY_DELAY, CLEANER_STREAMS_MAX, CLEANUP_REPORT_MAX, PARTITIONS_PER_TURN,
};
use crate::log::{Partition, PartitionId};
use crate::sync;

/// Progress of compaction by key in one partition on this replica.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PartitionCleanup {
    /// Offset below which this replica has finished the decided rounds.
    pub clean_offset: u64,
    /// Offset below which the log has decided rounds.
    pub decided_offset: u64,
    /// Why the partition cannot be compacted here; `None` if the last attempt succeeded.
    pub uncleanable: Option<String>,
}

/// Statistics of the cleaner of a shard since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CleanerStats {
    /// Passes that were completed.
    pub passes: u64,
    /// Stored payload bytes read to fill key maps and to find changed segments.
    pub read_bytes: u64,
    /// Partitions whose decided round this replica has not finished.
    pub behind_partitions: u64,
    /// Partitions that this replica serves only in part: see [`Shard::blocked_partitions`].
    pub blocked_partitions: u64,
    /// Partitions that are reported as uncleanable.
    pub uncleanable_partitions: u64,
}

/// Sizes of the compacted partitions in the log of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TableSizes {
    pub bytes: u64,
    /// Bytes of these partitions in segments with records that are not compacted here.
    pub dirty_bytes: u64,
    /// Age of the oldest such segment, by the partition's newest record in it.
    pub lag: Duration,
}

/// Results of the cleaner for the rest of the shard.
#[derive(Debug, Default)]
pub(in crate::shard) struct CleanerReport {
    inner: Mutex<ReportState>,
}

#[derive(Debug, Default)]
struct ReportState {
    passes: u64,
    read_bytes: u64,
    /// Partitions whose last attempt failed.
    failures: BTreeMap<PartitionId, CleanFailure>,
    /// Time of the next retry of a failed partition; `None` for at once.
    retry_at: Option<Instant>,
    /// The last partition that had its turn, not counting retries.
    last_turn: Option<PartitionId>,
    /// The last turn was a retry.
    has_retried: bool,
    /// Start of the time during which decided rounds have waited for segments.
    waiting_since: Option<Instant>,
    /// Time at which a segment was last sealed early.
    sealed_early: Option<Instant>,
    is_checkpoint_wanted: bool,
}

/// A partition that could not be cleaned.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CleanFailure {
    why: String,
    attempts: u32,
    /// Reported to operators as uncleanable.
    is_reported: bool,
}

/// Attempts after which a transient failure is reported, too.
const TRANSIENT_MAX: u32 = 3;

impl CleanFailure {
    fn new(error: &PassError, attempts_before: u32) -> Self {
        let attempts = attempts_before.saturating_add(1);
        let is_reported = !error.is_transient || attempts >= TRANSIENT_MAX;
        Self { why: error.why.clone(), attempts, is_reported }
    }
}

impl ReportState {
    fn uncleanable(&self) -> impl Iterator<Item = (&PartitionId, &CleanFailure)> {
        self.failures.iter().filter(|(_, failure)| failure.is_reported)
    }
}

impl CleanerReport {
    pub(super) fn uncleanable(&self) -> Vec<(PartitionId, String)> {
        let inner = sync::lock(&self.inner);
        inner.uncleanable().map(|(id, failure)| (*id, failure.why.clone())).collect()
    }

    /// Forgets failures of partitions that no longer have to be cleaned.
    pub(super) fn retain(&self, due: &[DueRound]) {
        let mut inner = sync::lock(&self.inner);
        inner.failures.retain(|id, _| due.iter().any(|due| due.partition == *id));
    }

    /// Chooses the partitions of the next pass, beginning after the last turn.
    ///
    /// The turn rotates because a table that needs many passes fills the map in each. A failed
    /// partition is retried alone, the one with the fewest attempts first, so that it stops neither
    /// the others nor other failed partitions. A retry is due after each delay, or at once if the
    /// last retry succeeded. At least one turn of another partition lies between two retries,
    /// unless none is due.
    pub(super) fn choose(
        &self,
        due: impl Iterator<Item = (DueRound, u64)>,
        now: Instant,
    ) -> Vec<(DueRound, u64)> {
        let inner = sync::lock(&self.inner);
        let attempts = |due: &DueRound| inner.failures.get(&due.partition).map(|it| it.attempts);
        let (mut failed, mut fine): (Vec<_>, Vec<_>) =
            due.partition(|(due, _)| attempts(due).is_some());
        let may_retry = fine.is_empty() || !inner.has_retried;
        if !failed.is_empty() && may_retry && inner.retry_at.is_none_or(|at| now >= at) {
            failed.sort_by_key(|(due, _)| attempts(due));
            failed.truncate(1);
            return failed;
        }
        let first = fine.iter().position(|(due, _)| Some(due.partition) > inner.last_turn);
        fine.rotate_left(first.unwrap_or(0));
        fine.truncate(CLEANER_STREAMS_MAX);
        fine
    }

    /// Records that a partition has had its turn.
    pub(super) fn end_turn(&self, partition: PartitionId) {
        let mut inner = sync::lock(&self.inner);
        inner.has_retried = inner.failures.contains_key(&partition);
        if !inner.has_retried {
            inner.last_turn = Some(partition);
        }
    }

    pub(super) fn fail(
        &self,
        partitions: impl IntoIterator<Item = PartitionId>,
        error: &PassError,
        now: Instant,
    ) {
        let mut inner = sync::lock(&self.inner);
        inner.retry_at = Some(now + CLEANER_RETRY_DELAY);
        for partition in partitions {
            let attempts = inner.failures.get(&partition).map_or(0, |it| it.attempts);
            inner.failures.insert(partition, CleanFailure::new(error, attempts));
        }
    }

    pub(super) fn succeed(&self, partitions: &[PartitionId]) {
        let mut inner = sync::lock(&self.inner);
        inner.passes += 1;
        for partition in partitions {
            if inner.failures.remove(partition).is_some() {
                inner.retry_at = None;
            }
        }
    }

    pub(super) fn count_read(&self, bytes: u64) {
        sync::lock(&self.inner).read_bytes += bytes;
    }

    /// Returns whether decided rounds have waited for `delay`. `is_waiting`: whether they wait now.
    pub(super) fn has_waited(&self, is_waiting: bool, now: Instant, delay: Duration) -> bool {
        let mut inner = sync::lock(&self.inner);
        if !is_waiting {
            inner.waiting_since = None;
            return false;
        }
        let since = *inner.waiting_since.get_or_insert(now);
        now.saturating_duration_since(since) >= delay
    }

    /// Returns whether a segment may be sealed early now, and records it: at most once per `delay`.
    pub(super) fn may_seal_early(&self, now: Instant, delay: Duration) -> bool {
        let mut inner = sync::lock(&self.inner);
        let is_soon =
            inner.sealed_early.is_some_and(|at| now.saturating_duration_since(at) < delay);
        if !is_soon {
            inner.sealed_early = Some(now);
        }
        !is_soon
    }

    pub(super) fn want_checkpoint(&self) {
        sync::lock(&self.inner).is_checkpoint_wanted = true;
    }

    /// Returns whether rounds wait for a checkpoint, and resets that.
    pub(in crate::shard) fn take_wanted_checkpoint(&self) -> bool {
        std::mem::take(&mut sync::lock(&self.inner).is_checkpoint_wanted)
    }
}

/// Returns whether a replica with this mark may not serve all of a partition.
fn is_blocked(partition: &Partition, mark: CleanMark) -> bool {
    mark.upto.max(partition.log_start) < partition.cleanup.cleaned
}

impl Shard {
    /// Returns the last applied entry, and the partitions whose last round is not finished here.
    ///
    /// The second number of a partition is the offset below which it is clean. Partitions of topics
    /// that are no longer compacted are included. Returns 0 and no partitions if the shard has no
    /// rounds, or if there are more than [`CLEANUP_REPORT_MAX`] such partitions.
    pub fn cleanup_report(&self) -> (u64, Vec<(u64, u64)>) {
        let marks = self.wal.clean_marks();
        let mark = |partition: &Partition| marks.get(&partition.id.0).copied().unwrap_or_default();
        let is_memory = self.wal.is_memory();
        let (applied, not_clean) = self.machine.read_state(|state| {
            // After a restart the state may have entries that were not applied since.
            let mut known = 0;
            let mut not_clean = Vec::new();
            for it in state.partitions_with_rounds() {
                known = known.max(it.cleanup.round_index).max(it.cleanup.cleaned_index);
                match DueRound::of_last_round(it, mark(it)) {
                    _ if is_memory => not_clean.push((it.id.0, 0)),
                    Some(due) => not_clean.push((it.id.0, due.clean())),
                    None => {}
                }
            }
            // Under the state's lock, so that nothing is applied in between.
            let applied = if known == 0 { 0 } else { known.max(self.machine.applied()) };
            (applied, not_clean)
        });
        match not_clean.len() <= CLEANUP_REPORT_MAX {
            true => (applied, not_clean),
            false => (0, Vec::new()),
        }
    }

    /// Counts the partitions of which this replica may not serve all records.
    ///
    /// Other replicas may have removed tombstones whose older records this replica still has.
    pub fn blocked_partitions(&self) -> u64 {
        let marks = self.wal.clean_marks();
        let mark = |it: &Partition| marks.get(&it.id.0).copied().unwrap_or_default();
        self.machine.read_state(|state| {
            let blocked = state.partitions_with_rounds().filter(|it| is_blocked(it, mark(it)));
            blocked.count() as u64
        })
    }

    /// Returns whether this replica may serve the records from an offset on.
    ///
    /// Other replicas, which are clean below `cleaned`, may have removed tombstones there. Records
    /// that are older than such a tombstone must not be served.
    pub(in crate::shard) fn is_clean_enough(
        &self,
        partition: PartitionId,
        offset: u64,
        cleaned: u64,
        log_start: u64,
    ) -> bool {
        // Checks the log last, because that takes a lock.
        offset >= cleaned
            || log_start >= cleaned
            || self.wal.clean_mark(partition.0).upto >= cleaned
    }

    /// Returns whether this replica has applied the later records that replace those it lacks.
    ///
    /// It lacks records if their source had compacted them beyond the snapshot. A leader has
    /// applied all.
    pub(in crate::shard) fn has_later_records(&self) -> bool {
        self.replica.applied() >= self.wal.cleaned_upto()
    }

    /// Returns how far a partition is compacted by key on this replica; `None` if it never was.
    pub fn cleanup(&self, partition: PartitionId) -> Option<PartitionCleanup> {
        let (round, log_start) = self.machine.with(partition, |it| (it.cleanup, it.log_start))?;
        if round.is_default() {
            return None;
        }
        let mark = self.wal.clean_mark(partition.0);
        let inner = sync::lock(&self.cleaner.inner);
        let failure = inner.failures.get(&partition).filter(|failure| failure.is_reported);
        Some(PartitionCleanup {
            clean_offset: mark.upto.max(log_start).min(round.upto),
            decided_offset: round.upto,
            uncleanable: failure.map(|failure| failure.why.clone()),
        })
    }

    /// Returns partitions that this replica cannot compact, and why.
    pub fn uncleanable(&self) -> Vec<(PartitionId, String)> {
        self.cleaner.uncleanable()
    }

    pub fn cleaner_stats(&self) -> CleanerStats {
        let marks = self.wal.clean_marks();
        let is_on_disk = !self.wal.is_memory();
        let (behind_partitions, blocked_partitions) = self.machine.read_state(|state| {
            state.partitions_with_rounds().fold((0, 0), |(behind, blocked), it| {
                let mark = marks.get(&it.id.0).copied().unwrap_or_default();
                let is_behind = is_on_disk && DueRound::of(it, mark).is_some();
                (behind + u64::from(is_behind), blocked + u64::from(is_blocked(it, mark)))
            })
        });
        let inner = sync::lock(&self.cleaner.inner);
        CleanerStats {
            passes: inner.passes,
            read_bytes: inner.read_bytes,
            behind_partitions,
            blocked_partitions,
            uncleanable_partitions: inner.uncleanable().count() as u64,
        }
    }

    /// Returns the sizes of all compacted partitions. Yields to other tasks every
    /// [`PARTITIONS_PER_TURN`] partitions.
    pub async fn table_sizes(&self) -> TableSizes {
        let marks = self.wal.clean_marks();
        let of = |it: &Partition| (it.id, it.log_start, it.cleanup.upto);
        let tables: Vec<(PartitionId, u64, u64)> =
            self.machine.read_state(|state| state.compacted_partitions().map(of).collect());
        let now_us = self.clock.retention_us().unwrap_or(0);
        let (mut sizes, mut lag_us) = (TableSizes::default(), 0);
        for some in tables.chunks(PARTITIONS_PER_TURN) {
            tokio::task::yield_now().await;
            for (id, log_start, upto) in some {
                let mark = marks.get(&id.0).map_or(0, |mark| mark.upto);
                let clean = mark.min(*upto).max(*log_start);
                for row in self.wal.stream_rows(id.0) {
                    sizes.bytes += row.bytes;
                    if row.next > clean {
                        sizes.dirty_bytes += row.bytes;
                        lag_us = lag_us.max(now_us.saturating_sub(row.last_time));
                    }
                }
            }
        }
        TableSizes { lag: Duration::from_micros(lag_us), ..sizes }
    }
}
