//! Drives compaction by key in the shards that this node leads.
//!
//! The leader begins rounds, and records when every replica is clean. It asks all replicas before
//! it records that, and before it lets tombstones go, since a replica may have been rebuilt.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;

use super::client::Cluster;
use crate::error::Result;
use crate::limits::CLEANER_SEAL_DELAY;
use crate::log::{CleanupRound, CleanupState, PartitionId, ROWS_PER_ENTRY_MAX, ShardCommand};
use crate::protocol::COMPACTION;
use crate::raft::node_of;
use crate::shard::{CompactedPartition, NextRound, Shard};

/// Open rounds and dirty partitions of a shard, as this leader has seen them.
#[derive(Debug, Default)]
pub struct CleanupRounds {
    open_since: BTreeMap<PartitionId, Instant>,
    /// Partitions with records above their last round.
    dirty: BTreeMap<PartitionId, DirtyTable>,
    checkpoints: CheckpointPacer,
}

/// Paces checkpoints while rounds are open.
///
/// Replicas need them, since a replica purges its log only as far as the leader has released it.
#[derive(Debug, Default)]
struct CheckpointPacer {
    /// Index of the newest open round.
    round_index: u64,
    /// Time of the next checkpoint; `None` while no round is open.
    next_at: Option<Instant>,
    /// Number of checkpoints since that round was first seen.
    count: u32,
}

/// Checkpoints in a row for one round, before a pause as long as the lag. The first ones let a
/// replica purge the segment that it has sealed early.
const CHECKPOINTS_MAX: u32 = 3;

impl CheckpointPacer {
    /// Returns whether open rounds have waited long enough for another checkpoint.
    ///
    /// `newest`: log index of the newest open round.
    fn is_due(&mut self, newest: Option<u64>, now: Instant, lag: Duration) -> bool {
        let Some(newest) = newest else {
            *self = Self::default();
            return false;
        };
        let first_at = now + CLEANER_SEAL_DELAY;
        if newest > self.round_index {
            (self.round_index, self.count) = (newest, 0);
            self.next_at = self.next_at.map(|at| at.min(first_at));
        }
        if now < *self.next_at.get_or_insert(first_at) {
            return false;
        }
        self.count += 1;
        let is_last = self.count.is_multiple_of(CHECKPOINTS_MAX);
        self.next_at =
            Some(now + if is_last { lag.max(CLEANER_SEAL_DELAY) } else { CLEANER_SEAL_DELAY });
        true
    }
}

/// Attempts in a row to make late records cleanable, before a pause as long as the lag.
const SEALS_MAX: u32 = 3;

/// A partition with records above its last round.
#[derive(Debug, Clone, Copy)]
struct DirtyTable {
    /// End of that round.
    upto: u64,
    /// Time that the records had waited at `since`, when this leader first saw them.
    waited: Duration,
    since: Instant,
    /// Time of the last attempt to make the records cleanable.
    sealed: Option<Instant>,
    seals: u32,
}

impl CleanupRounds {
    fn clear(&mut self) {
        self.open_since.clear();
        self.dirty.clear();
        self.checkpoints = CheckpointPacer::default();
    }

    fn retain(&mut self, tables: &[CompactedPartition]) {
        let by_id: BTreeMap<_, _> = tables.iter().map(|it| (it.id, it)).collect();
        self.open_since.retain(|id, _| by_id.get(id).is_some_and(|it| it.is_open()));
        self.dirty.retain(|id, dirty| {
            by_id.get(id).is_some_and(|it| it.is_dirty() && it.state.upto == dirty.upto)
        });
    }

    /// Returns whether records of a partition have waited for a round for the longest allowed time.
    ///
    /// `waited` returns how long they have waited when this leader first sees them.
    fn is_late(
        &mut self,
        table: &CompactedPartition,
        now: Instant,
        lag: Duration,
        waited: impl FnOnce() -> Duration,
    ) -> bool {
        if !table.is_dirty() {
            return false;
        }
        let upto = table.state.upto;
        let new = || DirtyTable { upto, waited: waited(), since: now, sealed: None, seals: 0 };
        let dirty = self.dirty.entry(table.id).or_insert_with(new);
        now.saturating_duration_since(dirty.since) + dirty.waited >= lag
    }

    /// Returns whether to make a late partition's records cleanable: [`SEALS_MAX`] times per lag.
    fn must_seal(&self, id: PartitionId, now: Instant, lag: Duration) -> bool {
        self.dirty.get(&id).is_some_and(|dirty| {
            let is_old = |at| now.saturating_duration_since(at) >= lag;
            !dirty.seals.is_multiple_of(SEALS_MAX) || dirty.sealed.is_none_or(is_old)
        })
    }

    fn on_sealed(&mut self, tables: &[(PartitionId, u64)], now: Instant) {
        for (id, _) in tables {
            if let Some(dirty) = self.dirty.get_mut(id) {
                dirty.sealed = Some(now);
                dirty.seals += 1;
            }
        }
    }
}

impl Cluster {
    /// Takes the next steps in the compaction of a shard's partitions, if this node leads it.
    ///
    /// # Errors
    /// The error of a failed step; the next call repeats the step.
    pub async fn drive_cleanup(&self, shard: &Shard, rounds: &mut CleanupRounds) -> Result<()> {
        if !shard.is_leader() || self.protocol() < COMPACTION {
            rounds.clear();
            return Ok(());
        }
        self.yield_if_blocked(shard).await?;
        let tables = shard.compacted_partitions();
        rounds.retain(&tables);
        if tables.is_empty() {
            return Ok(());
        }
        shard.ready().await?;
        let is_asked = tables.iter().any(|it| it.is_open() || it.keeps_tombstones());
        let clean = if is_asked { self.cleaned_everywhere(shard).await } else { None };
        // Read after the replies, because the retention of tombstones begins at this time. Without
        // an agreed time, neither a lag nor a retention can pass.
        let Some(now_us) = shard.agreed_time_us() else { return Ok(()) };
        let (now, lag) = (Instant::now(), shard.cleaner_lag());
        // A copy for a split begins again whenever tombstones go.
        let is_copied = self.is_splitting(shard.id());
        let mut late = Vec::new();
        let mut waiting = None;
        let mut finished = Vec::new();
        let mut begun: Vec<(PartitionId, CleanupRound)> = Vec::new();
        for (position, table) in tables.into_iter().enumerate() {
            if position % crate::limits::PARTITIONS_PER_TURN == 0 {
                tokio::task::yield_now().await;
            }
            let id = table.id;
            let clean_offset = clean.as_ref().and_then(|clean| clean.offset(&table));
            if table.is_open() && clean_offset == Some(table.state.upto) {
                finished.push((id, table.state.upto));
                continue;
            }
            // While a replica does not answer, the round cannot finish, so checkpoints are not
            // urgent.
            if table.is_open() && clean.is_some() {
                waiting = waiting.max(Some(table.state.round_index));
            }
            let waited = || shard.dirty_age(id, table.state.upto, now_us);
            let is_late = rounds.is_late(&table, now, lag, waited);
            if is_late && rounds.must_seal(id, now, lag) {
                late.push((id, table.next_offset));
            }
            // An absent replica holds tombstones back, but not the next round.
            let may_extend = !table.is_open() || clean.is_none() || {
                let since = *rounds.open_since.entry(id).or_insert_with(Instant::now);
                since.elapsed() >= lag
            };
            let is_known = clean.as_ref().is_some_and(|clean| clean.is_as_recorded(&table));
            let may_forget = table.keeps_tombstones() && is_known && !is_copied;
            let limits = NextRound { now_us, may_extend, may_forget, is_late };
            let Some(round) = shard.next_cleanup(id, limits) else { continue };
            // A partition that is written to might never be clean up to the end of its last round.
            let is_extended = table.is_open() && round.upto > table.state.upto;
            let so_far = clean_offset.filter(|offset| is_extended && *offset > table.state.cleaned);
            finished.extend(so_far.map(|offset| (id, offset)));
            begun.push((id, round));
        }
        if shard.make_cleanable(&late) {
            rounds.on_sealed(&late, now);
        }
        if rounds.checkpoints.is_due(waiting, now, lag) {
            shard.want_checkpoint();
        }
        for partitions in finished.chunks(ROWS_PER_ENTRY_MAX) {
            let partitions = partitions.to_vec();
            shard.command(ShardCommand::Cleaned { partitions, time_us: now_us }).await?;
        }
        for part in begun.chunks(ROWS_PER_ENTRY_MAX) {
            shard.command(ShardCommand::CleanUp { rounds: part.to_vec() }).await?;
            for (id, _) in part {
                rounds.open_since.remove(id);
            }
        }
        Ok(())
    }

    /// Transfers leadership to a replica that can serve all partitions, if this one cannot.
    ///
    /// Other replicas may be compacted further. Without a successor, this replica compacts first.
    async fn yield_if_blocked(&self, shard: &Shard) -> Result<()> {
        let blocked_partitions = shard.blocked_partitions();
        if blocked_partitions == 0 {
            return Ok(());
        }
        let Some(to) = self.successor(shard.id(), shard.replica(), false).await else {
            return Ok(());
        };
        let shard_id = shard.id();
        tracing::info!(shard_id, to, blocked_partitions, "transferring leadership to serve tables");
        shard.transfer(Some(to)).await
    }

    /// Asks every replica what it has compacted; `None` while one of them does not answer, is in
    /// repair, or lacks records.
    async fn cleaned_everywhere(&self, shard: &Shard) -> Option<CleanReplicas> {
        let others = shard.others();
        let asked = others.iter().map(|replica| async move {
            let report = self.ask_replica_status(node_of(*replica), shard.id(), None).await?;
            let is_whole =
                report.replica_id == *replica && !report.in_repair && !report.is_fetching;
            let is_valid = is_whole && report.not_clean.len() == report.clean_offsets.len();
            let behind = report.not_clean.into_iter().zip(report.clean_offsets);
            is_valid.then(|| (report.cleanup_index, behind.collect::<Vec<(u64, u64)>>()))
        });
        let mut reports = join_all(asked).await;
        reports.push(Some(shard.cleanup_report()));
        let mut clean = CleanReplicas { index: u64::MAX, behind: HashMap::new() };
        for report in reports {
            let (index, behind) = report?;
            clean.add(index, behind);
        }
        Some(clean)
    }
}

/// Compaction progress that all replicas of a shard have in common.
#[derive(Debug)]
struct CleanReplicas {
    /// Every replica has applied the entries up to here.
    index: u64,
    /// Partitions whose last round a replica has not finished, with the offsets below which every
    /// replica is clean.
    behind: HashMap<u64, u64>,
}

impl CleanReplicas {
    /// Adds the report of a replica.
    fn add(&mut self, index: u64, behind: Vec<(u64, u64)>) {
        self.index = self.index.min(index);
        for (partition, offset) in behind {
            let least = self.behind.entry(partition).or_insert(offset);
            *least = offset.min(*least);
        }
    }

    /// Returns the offset below which every replica is clean, at most the end of the last round.
    ///
    /// `None` while a replica has not applied that round.
    fn offset(&self, table: &CompactedPartition) -> Option<u64> {
        let CleanupState { upto, round_index, .. } = table.state;
        let offset = self.behind.get(&table.id.0).map_or(upto, |offset| upto.min(*offset));
        (self.index >= round_index).then_some(offset)
    }

    /// Returns whether every replica has applied the last `Cleaned`, and is clean as it states.
    fn is_as_recorded(&self, table: &CompactedPartition) -> bool {
        let CleanupState { cleaned, cleaned_index, .. } = table.state;
        let is_clean = self.behind.get(&table.id.0).is_none_or(|offset| *offset >= cleaned);
        self.index >= cleaned_index && is_clean
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_round_gets_few_checkpoints_until_the_lag_has_passed() {
        let (mut pacer, lag) = (CheckpointPacer::default(), Duration::from_secs(3_600));
        let start = Instant::now();
        let mut due = |newest: Option<u64>, seconds: std::ops::Range<u64>| -> Vec<u64> {
            let is_due = |at: &u64| pacer.is_due(newest, start + Duration::from_secs(*at), lag);
            seconds.filter(is_due).collect()
        };
        let delay = CLEANER_SEAL_DELAY.as_secs();
        assert_eq!(due(Some(7), 0..3_000), [delay, 2 * delay, 3 * delay]);
        assert_eq!(due(Some(8), 3_000..3_000 + 2 * delay), [3_000 + delay], "a newer round");
        assert_eq!(due(None, 4_000..4_100), [0; 0], "all are done");
        let last = 5_000 + 3 * delay;
        let first: Vec<u64> = (1..=3).map(|number| 5_000 + number * delay).collect();
        assert_eq!(due(Some(8), 5_000..last + 1), first);
        let again = last + lag.as_secs();
        assert_eq!(due(Some(8), last + 1..again + 1), [again]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_before_a_leader_counts() {
        let (lag, now) = (Duration::from_secs(3_600), Instant::now());
        let state = CleanupState { upto: 100, ..CleanupState::default() };
        let table = CompactedPartition { id: PartitionId(7), state, next_offset: 200 };
        let mut rounds = CleanupRounds::default();
        let mut is_late = |table, seconds, waited| {
            rounds.is_late(table, now + Duration::from_secs(seconds), lag, || {
                Duration::from_secs(waited)
            })
        };
        assert!(!is_late(&table, 0, 3_000));
        assert!(!is_late(&table, 599, 0) && is_late(&table, 600, 0));
        let clean = CompactedPartition { next_offset: 100, ..table };
        assert!(!is_late(&clean, 9_000, 9_000));
    }

    #[test]
    fn progress_is_what_every_replica_has_done() {
        let state = CleanupState {
            upto: 100,
            round_index: 20,
            cleaned: 40,
            cleaned_index: 10,
            ..CleanupState::default()
        };
        let table = CompactedPartition { id: PartitionId(7), state, next_offset: 200 };
        let replicas = |reports: &[(u64, &[(u64, u64)])]| {
            let mut clean = CleanReplicas { index: u64::MAX, behind: HashMap::new() };
            for (index, behind) in reports {
                clean.add(*index, behind.to_vec());
            }
            (clean.offset(&table), clean.is_as_recorded(&table))
        };
        assert_eq!(replicas(&[(20, &[]), (25, &[(8, 3)])]), (Some(100), true));
        // An unfinished round delays neither its finished part nor the removal of older tombstones.
        assert_eq!(replicas(&[(20, &[(7, 90)]), (25, &[(7, 60)])]), (Some(60), true));
        assert_eq!(replicas(&[(20, &[(7, 39)]), (25, &[(7, 90)])]), (Some(39), false));
        // The round is finished, except for tombstones.
        assert_eq!(replicas(&[(20, &[(7, 120)])]), (Some(100), true));
        assert_eq!(replicas(&[(19, &[]), (25, &[])]), (None, true), "not applied");
        assert_eq!(replicas(&[(9, &[]), (25, &[])]), (None, false));
    }
}
