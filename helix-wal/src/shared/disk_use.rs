//! Measures the time that the disk takes for the log's groups, and the bandwidth that is left.
//!
//! A group takes a fixed time, which the write and sync of a single block shows, and a time that
//! grows with its bytes. Only the second one uses up bandwidth. It is measured as a share of the
//! time that passes, so bursts, throttling and other users of the disk are included.

use std::collections::VecDeque;
use std::time::Duration;

/// Period over which the share is measured.
const WINDOW: Duration = Duration::from_millis(250);
/// Shares of time, in thousandths, below which bandwidth is idle and above which it is scarce.
///
/// Zero-filling writes every byte of the log a second time, so it needs about the same share again.
const IDLE_BELOW: u64 = 350;
const SCARCE_ABOVE: u64 = 500;
/// Number of recent single blocks whose shortest time is the fixed time of a group.
const BLOCK_TIMES: usize = 16;
/// One part in this many of the mean group time comes from the newest group.
const MEAN_WEIGHT: u32 = 8;

#[derive(Debug, Default)]
pub(crate) struct DiskUse {
    block_times: VecDeque<Duration>,
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
    ///
    /// In a file that was only allocated it includes a commit of the file system's journal.
    pub(crate) fn on_block(&mut self, took: Duration, is_written: bool) {
        if self.block_times.len() == BLOCK_TIMES {
            self.block_times.pop_front();
        }
        self.block_times.push_back(took / fixed_parts(is_written));
    }

    /// Records a group that was synced at `now`.
    pub(crate) fn on_group(&mut self, now: Duration, bytes: u64, took: Duration, is_written: bool) {
        self.end_window(now);
        let fixed = self.block_times.iter().min().copied().unwrap_or_default();
        self.window.bytes += bytes;
        self.window.transfer += took.saturating_sub(fixed * fixed_parts(is_written));
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

/// Returns how often a group pays the fixed time.
fn fixed_parts(is_written: bool) -> u32 {
    if is_written { 1 } else { 2 }
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
        disk.on_block(2 * MS, true);
        disk.on_block(MS, true);
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
    fn allocated_files_pay_the_fixed_time_twice() {
        let mut disk = DiskUse::default();
        disk.on_block(4 * MS, false);
        for group in 1..1000 {
            disk.on_group(group * 4 * MS, 4096, 4 * MS, false);
        }
        assert_eq!(disk.last.transfer, Duration::ZERO);
        disk.on_group(Duration::from_secs(4), 4096, 4 * MS, true);
        assert_eq!(disk.window.transfer, 2 * MS);
    }
}
