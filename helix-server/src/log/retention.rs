//! Which records of a partition may go, decided by what each segment holds of it as a whole.
//! Says where the log start should be; the shard's log makes it so.

use super::PartitionSettings;

/// How much of a partition is kept. None and zero: unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RetentionPolicy {
    pub time_us: Option<u64>,
    pub bytes: Option<u64>,
}

impl From<&PartitionSettings> for RetentionPolicy {
    fn from(settings: &PartitionSettings) -> Self {
        Self { time_us: settings.retention_us, bytes: settings.retention_bytes }
    }
}

/// One segment's part of a partition: the records with the offsets `first..next`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentShare {
    pub sealed: bool,
    pub first: u64,
    pub next: u64,
    pub bytes: u64,
    /// Append time of the newest record.
    pub last_time_us: u64,
}

/// Where the log start should be, given the partition's shares, oldest first. Drops whole shares
/// from the front, and stops at the first that must stay. Time also ends the share of the segment
/// that is being written, or what nobody appends to would never go: whatever joins that share is
/// newer and lies behind its end. Bytes drop only what is sealed, since that share grows, and would
/// go as a whole each time that it came to the limit.
pub fn log_start_after_retention(
    policy: RetentionPolicy,
    now_us: u64,
    log_start: u64,
    shares: &[SegmentShare],
) -> u64 {
    let limit = |limit: Option<u64>| limit.filter(|&limit| limit > 0);
    let oldest_us = limit(policy.time_us).map_or(0, |time_us| now_us.saturating_sub(time_us));
    let bytes_min = limit(policy.bytes);
    let live = || shares.iter().filter(|share| share.next > log_start);
    let mut live_bytes = live().fold(0, |sum: u64, share| sum.saturating_add(share.bytes));
    let mut start = log_start;
    for share in live() {
        let left_bytes = live_bytes.saturating_sub(share.bytes);
        let too_old = share.last_time_us < oldest_us;
        let too_much = bytes_min.is_some_and(|bytes_min| left_bytes >= bytes_min);
        if !(too_old || share.sealed && too_much) {
            break;
        }
        live_bytes = left_bytes;
        start = share.next;
    }
    start
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::super::testing::seeded;
    use super::*;

    const NONE: RetentionPolicy = RetentionPolicy { time_us: None, bytes: None };

    /// Shares of 10 records and 100 bytes each, the i-th ending at time 1000 * (i + 1); the last
    /// one is not sealed.
    fn shares(count: u64) -> Vec<SegmentShare> {
        let share = |i| SegmentShare {
            sealed: i + 1 < count,
            first: i * 10,
            next: (i + 1) * 10,
            bytes: 100,
            last_time_us: (i + 1) * 1_000,
        };
        (0..count).map(share).collect()
    }

    #[test]
    fn nothing_goes_without_a_limit() {
        for zero in [None, Some(0)] {
            let policy = RetentionPolicy { time_us: zero, bytes: zero };
            assert_eq!(log_start_after_retention(policy, u64::MAX, 7, &shares(5)), 7);
        }
        let policy = RetentionPolicy { time_us: Some(1), bytes: Some(1) };
        assert_eq!(log_start_after_retention(policy, 9, 7, &[]), 7);
    }

    #[test]
    fn time_drops_whole_shares_older_than_the_limit() {
        let policy = RetentionPolicy { time_us: Some(2_000), ..NONE };
        for (now_us, start) in [(0, 0), (3_000, 0), (3_001, 10), (5_001, 30), (6_001, 40)] {
            let is = log_start_after_retention(policy, now_us, 0, &shares(5));
            assert_eq!(is, start, "at {now_us}");
        }
    }

    #[test]
    fn time_drops_what_is_not_sealed_as_well_and_all_of_it_or_nothing() {
        let policy = RetentionPolicy { time_us: Some(2_000), ..NONE };
        for (now_us, start) in [(7_000, 40), (7_001, 50), (1 << 40, 50)] {
            let is = log_start_after_retention(policy, now_us, 0, &shares(5));
            assert_eq!(is, start, "at {now_us}");
        }
        // What is appended behind a log start in the middle of the share keeps it from there on.
        assert_eq!(log_start_after_retention(policy, 7_000, 45, &shares(5)), 45);
        assert_eq!(log_start_after_retention(policy, 7_001, 50, &shares(5)), 50);
    }

    #[test]
    fn bytes_keep_at_least_the_limit() {
        for (bytes, start) in [(1, 40), (100, 40), (101, 30), (200, 30), (450, 0), (9_000, 0)] {
            let policy = RetentionPolicy { bytes: Some(bytes), ..NONE };
            let is = log_start_after_retention(policy, 0, 0, &shares(5));
            assert_eq!(is, start, "{bytes} bytes");
        }
    }

    #[test]
    fn what_lies_below_the_log_start_does_not_count() {
        let policy = RetentionPolicy { bytes: Some(300), ..NONE };
        assert_eq!(log_start_after_retention(policy, 0, 20, &shares(5)), 20);
        // A share that is cut by the log start counts whole: its bytes are still held.
        assert_eq!(log_start_after_retention(policy, 0, 15, &shares(5)), 20);
    }

    #[test]
    fn the_log_start_only_grows_and_stays_at_the_edge_of_a_share() {
        let mut rng = seeded("the_log_start_only_grows_and_stays_at_the_edge_of_a_share");
        for _ in 0..5_000 {
            let shares = shares(rng.random_range(0..8));
            let log_start = rng.random_range(0..90);
            let policy = RetentionPolicy {
                time_us: rng.random_bool(0.5).then(|| rng.random_range(0..8_000)),
                bytes: rng.random_bool(0.5).then(|| rng.random_range(0..900)),
            };
            let now_us = rng.random_range(0..12_000);
            let start = log_start_after_retention(policy, now_us, log_start, &shares);
            assert!(start >= log_start);
            let edge = shares.iter().any(|share| share.next == start);
            assert!(start == log_start || edge);
            assert_eq!(log_start_after_retention(policy, now_us, start, &shares), start);
        }
    }
}
