//! Counts and times of syncs, for statistics.

use std::time::Duration;

use crate::types::SYNC_BOUNDS_US;

/// Number of recent sync times kept for percentiles.
const SYNC_TIMES: usize = 1024;

/// Counters that only the writer and the keeper change.
#[derive(Debug, Default)]
pub(crate) struct WalCounters {
    pub groups: u64,
    pub group_bytes: u64,
    pub syncs: u64,
    pub sync_sum_us: u64,
    /// As in [`crate::WalStats::sync_counts`].
    pub sync_counts: [u64; SYNC_BOUNDS_US.len() + 1],
    pub freed_segments: u64,
    pub freed_bytes: u64,
    /// Microseconds of the last syncs, as a ring buffer.
    pub sync_times: Vec<u32>,
    pub rewritten_bytes: u64,
    pub zeroed_segments: u64,
    pub zeroed_bytes: u64,
    pub allocated_segments: u64,
}

impl WalCounters {
    pub(crate) fn on_group(&mut self, bytes: u64, sync: Duration) {
        self.groups += 1;
        self.group_bytes += bytes;
        let micros = u32::try_from(sync.as_micros()).unwrap_or(u32::MAX);
        self.sync_sum_us += u64::from(micros);
        let class = SYNC_BOUNDS_US.partition_point(|bound| *bound < micros);
        if let Some(count) = self.sync_counts.get_mut(class) {
            *count += 1;
        }
        let place = (self.syncs % SYNC_TIMES as u64) as usize;
        match self.sync_times.get_mut(place) {
            Some(old) => *old = micros,
            None => self.sync_times.push(micros),
        }
        self.syncs += 1;
    }

    pub(crate) fn on_freed(&mut self, bytes: u64) {
        self.freed_segments += 1;
        self.freed_bytes += bytes;
    }

    /// Returns a percentile of the recent sync times.
    pub(crate) fn sync_percentile(&self, percent: usize) -> u64 {
        let mut times = self.sync_times.clone();
        times.sort_unstable();
        let place = (times.len() * percent / 100).min(times.len().saturating_sub(1));
        times.get(place).map_or(0, |micros| u64::from(*micros))
    }
}
