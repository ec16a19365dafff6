//! Decides when the leader proposes a round of compaction by key. Only applied rounds count.

use std::time::Duration;

use helix_wal::StreamRow;

use super::super::Shard;
use crate::log::{CleanupRound, CleanupState, Partition, PartitionId};

/// State and size of a compacted partition on the leader.
#[derive(Debug, Clone, Copy)]
struct TableUse<'a> {
    state: CleanupState,
    log_start: u64,
    tombstones_kept_us: u64,
    /// Offset up to which the leader could compact now.
    cleanable: u64,
    rows: &'a [StreamRow],
    dirty_percent: u32,
    lag_max: Duration,
}

impl TableUse<'_> {
    /// Returns the bytes of rows between two offsets, as if they were spread evenly in each row.
    fn bytes(&self, from: u64, upto: u64) -> u64 {
        let part = |row: &StreamRow| {
            let kept = row.next.min(upto).saturating_sub(row.first.max(from));
            let all = row.next.saturating_sub(row.first).max(1);
            (u128::from(row.bytes) * u128::from(kept) / u128::from(all)) as u64
        };
        self.rows.iter().map(part).sum()
    }

    /// Returns the end of a round that is worth its cost at this time, if there is one.
    fn dirty_end(&self, now_us: u64) -> Option<u64> {
        let from = self.state.upto.max(self.log_start);
        if self.cleanable <= from {
            return None;
        }
        let dirty = self.bytes(from, self.cleanable);
        let all = self.bytes(self.log_start, self.cleanable);
        let oldest = self.rows.iter().find(|row| row.next > from);
        let lag_us = u64::try_from(self.lag_max.as_micros()).unwrap_or(u64::MAX);
        let is_old = oldest.is_some_and(|row| row.last_time.saturating_add(lag_us) < now_us);
        let share = u128::from(dirty) * 100;
        let is_due = share >= u128::from(all) * u128::from(self.dirty_percent) || is_old;
        is_due.then_some(self.cleanable)
    }

    /// Returns the next round, if one is due.
    fn next_round(&self, limits: NextRound) -> Option<CleanupRound> {
        let NextRound { now_us, may_extend, may_forget, is_late } = limits;
        let is_newer = self.cleanable > self.state.upto.max(self.log_start);
        let late_end = (is_late && is_newer).then_some(self.cleanable);
        let dirty_end = self.dirty_end(now_us).or(late_end).filter(|_| may_extend);
        let tombstones_below = match may_forget {
            true => self.state.tombstones_due(now_us, self.tombstones_kept_us),
            false => self.state.tombstones_below,
        };
        let upto = dirty_end.unwrap_or(self.state.upto);
        let round = CleanupRound { upto, tombstones_below };
        let is_new = upto > self.state.upto || tombstones_below > self.state.tombstones_below;
        is_new.then_some(round)
    }
}

/// Conditions of the next round of a partition.
#[derive(Debug, Clone, Copy)]
pub struct NextRound {
    /// Agreed time in µs since the Unix epoch.
    pub now_us: u64,
    /// A new round may begin even if the last one is open.
    pub may_extend: bool,
    /// Every replica is known to be clean as the last `Cleaned` states.
    pub may_forget: bool,
    /// Records have waited for the longest allowed time.
    pub is_late: bool,
}

/// A partition whose compaction the leader drives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompactedPartition {
    pub id: PartitionId,
    pub state: CleanupState,
    pub next_offset: u64,
}

impl CompactedPartition {
    /// Returns whether replicas may still work on the last round.
    pub fn is_open(&self) -> bool {
        self.state.upto > self.state.cleaned
    }

    /// Returns whether there are records above the last round.
    pub fn is_dirty(&self) -> bool {
        self.next_offset > self.state.upto
    }

    /// Returns whether tombstones wait for their retention.
    pub fn keeps_tombstones(&self) -> bool {
        self.state.cleaned > self.state.tombstones_below
    }
}

impl Shard {
    /// Returns the longest time that records wait for compaction by key.
    pub fn cleaner_lag(&self) -> Duration {
        self.log_limits.cleaner_lag
    }

    /// Returns the agreed time in µs since the Unix epoch; `None` while it is not known.
    pub fn agreed_time_us(&self) -> Option<u64> {
        self.clock.retention_us()
    }

    /// Returns the partitions of compacted topics.
    pub fn compacted_partitions(&self) -> Vec<CompactedPartition> {
        if self.wal.is_memory() {
            return Vec::new();
        }
        let of = |it: &Partition| CompactedPartition {
            id: it.id,
            state: it.cleanup,
            next_offset: it.next_offset,
        };
        self.machine.read_state(|state| state.compacted_partitions().map(of).collect())
    }

    /// Returns the least time that the records from an offset on have waited, by append times.
    pub fn dirty_age(&self, partition: PartitionId, from: u64, now_us: u64) -> Duration {
        let time_us = self.wal.time_from(partition.0, from).unwrap_or(now_us);
        Duration::from_micros(now_us.saturating_sub(time_us))
    }

    /// Returns the next round of a partition, if one is due.
    pub fn next_cleanup(&self, partition: PartitionId, limits: NextRound) -> Option<CleanupRound> {
        // Read before the log, so that the log has everything below the next offset.
        let (state, log_start, next_offset, tombstones_kept_us) =
            self.machine.with(partition, |it| {
                (it.cleanup, it.log_start, it.next_offset, it.settings.tombstones_kept_us())
            })?;
        let rows = self.wal.stream_rows(partition.0);
        let cleanable = self.wal.cleanable_upto(partition.0).min(next_offset);
        let table = TableUse {
            state,
            log_start,
            tombstones_kept_us,
            cleanable,
            rows: &rows,
            dirty_percent: self.log_limits.cleaner_dirty_percent,
            lag_max: self.log_limits.cleaner_lag,
        };
        table.next_round(limits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_US: u64 = 3_600_000_000;

    fn row(first: u64, next: u64, bytes: u64, last_time: u64) -> StreamRow {
        StreamRow { segment: 1, sealed: true, first, next, bytes, last_time }
    }

    fn table(rows: &[StreamRow], state: CleanupState, cleanable: u64) -> TableUse<'_> {
        let (dirty_percent, lag_max) = (50, Duration::from_secs(3600));
        let tombstones_kept_us = HOUR_US;
        TableUse {
            state,
            log_start: 0,
            tombstones_kept_us,
            cleanable,
            rows,
            dirty_percent,
            lag_max,
        }
    }

    #[test]
    fn a_round_begins_when_half_is_new_or_old_enough() {
        let rows = [row(0, 100, 1_000, 10), row(100, 200, 900, 20), row(200, 300, 300, 30)];
        let state = CleanupState { upto: 100, cleaned: 100, ..CleanupState::default() };
        let end = |cleanable, now_us| table(&rows, state, cleanable).dirty_end(now_us);
        assert_eq!(end(100, 40), None, "nothing is new");
        assert_eq!(end(200, 40), None, "900 of 1900 bytes");
        assert_eq!(end(300, 40), Some(300));
        assert_eq!(end(200, HOUR_US + 20), None);
        assert_eq!(end(200, HOUR_US + 21), Some(200));
        let first = table(&rows, CleanupState::default(), 100);
        assert_eq!(first.dirty_end(40), Some(100));
        let trimmed = TableUse { log_start: 150, ..table(&rows, state, 200) };
        assert_eq!(trimmed.dirty_end(40), Some(200), "what retention has deleted counts no more");
    }

    #[test]
    fn tombstones_wait_for_their_retention_since_every_replica_was_clean() {
        let state = CleanupState {
            upto: 100,
            cleaned: 80,
            tombstones_next: 80,
            tombstones_next_us: 5 * HOUR_US,
            tombstones_below: 30,
            ..CleanupState::default()
        };
        let table = table(&[], state, 100);
        let round = |upto, tombstones_below| Some(CleanupRound { upto, tombstones_below });
        let next = |table: TableUse<'_>, now_us, may_extend, may_forget| {
            table.next_round(NextRound { now_us, may_extend, may_forget, is_late: false })
        };
        assert_eq!(next(table, 6 * HOUR_US - 1, true, true), None);
        assert_eq!(next(table, 6 * HOUR_US, true, true), round(100, 80));
        assert_eq!(next(table, 6 * HOUR_US, true, false), None, "a replica may not be clean");
        let rows = [row(0, 100, 10, 1), row(100, 200, 100, 2)];
        let table = TableUse { cleanable: 200, rows: &rows, ..table };
        assert_eq!(next(table, 6 * HOUR_US, false, true), round(100, 80));
        assert_eq!(next(table, 6 * HOUR_US, true, true), round(200, 80));
        assert_eq!(next(table, 5 * HOUR_US, true, true), round(200, 30));
    }

    #[test]
    fn late_records_need_no_share_of_the_partition() {
        let state = CleanupState { upto: 100, cleaned: 100, ..CleanupState::default() };
        let rows = [row(0, 100, 1_000, 10), row(100, 110, 10, 20)];
        let next = |cleanable, is_late| {
            let limits = NextRound { now_us: 30, may_extend: true, may_forget: false, is_late };
            table(&rows, state, cleanable).next_round(limits).map(|round| round.upto)
        };
        assert_eq!(next(110, false), None);
        assert_eq!(next(110, true), Some(110));
        assert_eq!(next(100, true), None, "nothing is cleanable yet");
    }
}
