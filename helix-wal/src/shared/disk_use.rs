//! Measures the time that the disk takes for the log's groups, and the bandwidth that is left.
//!
//! A group takes a fixed time, which the write and sync of a single block shows, and a time that
//! grows with its bytes. Only the second one uses up bandwidth. It is measured as a share of the
//! time that passes, so bursts, throttling and other users of the disk are included.
//!
//! The fixed time is longer in a file that was only allocated: the file system commits its journal
//! for each first write.

use std::collections::VecDeque;
use std::time::Duration;

/// Period over which the share is measured.
const WINDOW: Duration = Duration::from_millis(250);
/// Shares of time, in thousandths, below which bandwidth is idle and above which it is scarce.
///
/// Zero-filling writes every byte of the log a second time, so it needs about the same share again.
const IDLE_BELOW: u64 = 350;
const SCARCE_ABOVE: u64 = 500;
/// Number of recent single blocks whose median time is the fixed time of a group.
const BLOCK_TIMES: usize = 15;
/// One part in this many of the mean group time comes from the newest group.
const MEAN_WEIGHT: u32 = 8;

#[derive(Debug, Default)]
pub(crate) struct DiskUse {
    /// Blocks of allocated files, and of written ones.
    blocks: [BlockTimes; 2],
    /// Mean time of writing and syncing a group.
    group_time: Duration,
    window: UseWindow,
    /// The last complete window.
    last: UseWindow,
    window_ended: Duration,
    /// The last answer, which holds between the two bounds.
    is_scarce: bool,
}

#[derive(Debug, Default, Clone, Copy)]
struct UseWindow {
    bytes: u64,
    /// Time of the groups without their fixed time.
    transfer: Duration,
    length: Duration,
}

impl UseWindow {
    fn permille(&self) -> u64 {
        let length = self.length.as_nanos().max(1);
        u64::try_from(self.transfer.as_nanos() * 1000 / length).unwrap_or(u64::MAX)
    }

    fn bytes_per_second(&self) -> u64 {
        let length = self.length.as_nanos().max(1);
        u64::try_from(u128::from(self.bytes) * 1_000_000_000 / length).unwrap_or(u64::MAX)
    }
}

impl DiskUse {
    /// Records the write and sync of a single block.
    pub(crate) fn on_block(&mut self, took: Duration, is_written: bool) {
        self.blocks[usize::from(is_written)].add(took);
    }

    /// Returns the fixed time of a group.
    fn fixed_time(&self, is_written: bool) -> Duration {
        let [allocated, written] = &self.blocks;
        // Until there are such blocks, a commit of the journal counts as another block.
        let fixed = match is_written {
            true => written.median.or(allocated.median.map(|time| time / 2)),
            false => allocated.median.or(written.median.map(|time| time * 2)),
        };
        fixed.unwrap_or_default()
    }

    /// Records a group that was synced at `now`.
    pub(crate) fn on_group(&mut self, now: Duration, bytes: u64, took: Duration, is_written: bool) {
        self.end_window(now);
        self.window.bytes += bytes;
        self.window.transfer += took.saturating_sub(self.fixed_time(is_written));
        let old = self.group_time;
        self.group_time =
            if old.is_zero() { took } else { old - old / MEAN_WEIGHT + took / MEAN_WEIGHT };
    }

    /// Returns the mean time of writing and syncing a group.
    pub(crate) fn group_time(&self) -> Duration {
        self.group_time
    }

    /// Returns whether the log leaves too little bandwidth for writing every byte twice.
    pub(crate) fn is_bandwidth_scarce(&mut self, now: Duration) -> bool {
        self.end_window(now);
        let share = self.last.permille();
        self.is_scarce = share > if self.is_scarce { IDLE_BELOW } else { SCARCE_ABOVE };
        self.is_scarce
    }

    /// Returns the bytes of groups per second.
    pub(crate) fn bytes_per_second(&mut self, now: Duration) -> u64 {
        self.end_window(now);
        self.last.bytes_per_second()
    }

    fn end_window(&mut self, now: Duration) {
        let length = now.saturating_sub(self.window_ended);
        if length < WINDOW {
            return;
        }
        self.last = UseWindow { length, ..std::mem::take(&mut self.window) };
        self.window_ended = now;
    }
}

/// Times of single blocks.
#[derive(Debug, Default)]
struct BlockTimes {
    recent: VecDeque<Duration>,
    median: Option<Duration>,
}

impl BlockTimes {
    fn add(&mut self, took: Duration) {
        if self.recent.len() == BLOCK_TIMES {
            self.recent.pop_front();
        }
        self.recent.push_back(took);
        let mut sorted = Vec::from_iter(self.recent.iter().copied());
        sorted.sort_unstable();
        self.median = sorted.get(sorted.len() / 2).copied();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Runs groups one after the other for a second, with a pause after each.
    fn run(disk: &mut DiskUse, from: Duration, took: Duration, pause: Duration) -> Duration {
        let mut now = from;
        while now < from + Duration::from_secs(1) {
            now += took;
            disk.on_group(now, 100_000, took, true);
            now += pause;
        }
        now
    }

    #[test]
    fn long_syncs_use_no_bandwidth() {
        let mut disk = DiskUse::default();
        for block in [MS, 20 * MS, MS] {
            disk.on_block(block, true);
        }
        let now = run(&mut disk, Duration::ZERO, MS + MS / 4, Duration::ZERO);
        assert!(!disk.is_bandwidth_scarce(now));
        assert_eq!(disk.group_time().as_micros() / 10, 125);
        let rate = disk.bytes_per_second(now);
        assert!((79_000_000..81_000_000).contains(&rate), "{rate}");
    }

    #[test]
    fn long_transfers_use_it_and_pauses_leave_it() {
        let mut disk = DiskUse::default();
        disk.on_block(MS, true);
        let now = run(&mut disk, Duration::ZERO, 10 * MS, Duration::ZERO);
        assert!(disk.is_bandwidth_scarce(now));
        // Between the bounds nothing changes.
        let now = run(&mut disk, now, 10 * MS, 12 * MS);
        assert!(disk.is_bandwidth_scarce(now));
        let now = run(&mut disk, now, 10 * MS, 30 * MS);
        assert!(!disk.is_bandwidth_scarce(now));
        let now = run(&mut disk, now, 10 * MS, 12 * MS);
        assert!(!disk.is_bandwidth_scarce(now));
        let now = run(&mut disk, now, 10 * MS, Duration::ZERO);
        assert!(disk.is_bandwidth_scarce(now));
        assert!(!disk.is_bandwidth_scarce(now + Duration::from_secs(1)), "nothing was written");
    }

    #[test]
    fn stalls_of_a_throttled_disk_count() {
        let mut disk = DiskUse::default();
        disk.on_block(MS / 20, true);
        let mut now = Duration::ZERO;
        for group in 0..100 {
            let took = if group % 10 == 0 { 95 * MS } else { MS / 2 };
            now += took;
            disk.on_group(now, 1 << 20, took, true);
        }
        assert!(disk.is_bandwidth_scarce(now));
    }

    #[test]
    fn journal_commits_of_allocated_files_use_no_bandwidth() {
        let mut disk = DiskUse::default();
        disk.on_block(2 * MS, true);
        assert_eq!(disk.fixed_time(false), 4 * MS, "nothing else is known yet");
        disk.on_block(9 * MS, false);
        assert_eq!((disk.fixed_time(false), disk.fixed_time(true)), (9 * MS, 2 * MS));
        for group in 1..100 {
            disk.on_group(group * 10 * MS, 4096, 10 * MS, false);
        }
        assert!(!disk.is_bandwidth_scarce(Duration::from_secs(1)));
        for group in 100..200 {
            disk.on_group(group * 10 * MS, 4096, 10 * MS, true);
        }
        assert!(disk.is_bandwidth_scarce(Duration::from_secs(2)));
    }
}
