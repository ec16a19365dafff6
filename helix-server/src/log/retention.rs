//! Retention: computes a partition's new log start from its part of each segment.
//! The shard's leader then proposes it.

use super::PartitionSettings;

/// Retention limits of a partition. `None` and zero mean unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RetentionPolicy {
    pub time_us: Option<u64>,
    pub bytes: Option<u64>,
}

impl From<&PartitionSettings> for RetentionPolicy {
    fn from(settings: &PartitionSettings) -> Self {
        if !settings.is_deleted_by_retention() {
            return Self::default();
        }
        Self { time_us: settings.retention_us, bytes: settings.retention_bytes }
    }
}

/// A partition's records in one segment, with the offsets `first..next`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartitionSegment {
    pub sealed: bool,
    pub first: u64,
    pub next: u64,
    pub bytes: u64,
    /// Append time of the newest record.
    pub last_time_us: u64,
}

/// Returns the new log start, from the partition's part of each segment, oldest first.
///
/// It drops whole parts from the front, and stops at the first that must stay. Retention by time
/// includes the active segment, since an idle partition would otherwise never expire; later
/// records are above the new log start. Retention by bytes drops sealed segments only, since the
/// part in the active segment would be dropped each time it reached the limit.
pub fn log_start_after_retention(
    policy: RetentionPolicy,
    now_us: u64,
    log_start: u64,
    segments: &[PartitionSegment],
) -> u64 {
    let limit = |limit: Option<u64>| limit.filter(|&limit| limit > 0);
    let oldest_us = limit(policy.time_us).map_or(0, |time_us| now_us.saturating_sub(time_us));
    let bytes_min = limit(policy.bytes);
    let live = || segments.iter().filter(|segment| segment.next > log_start);
    let mut live_bytes = live().fold(0, |sum: u64, segment| sum.saturating_add(segment.bytes));
    let mut start = log_start;
    for segment in live() {
        let left_bytes = live_bytes.saturating_sub(segment.bytes);
        let too_old = segment.last_time_us < oldest_us;
        let too_much = bytes_min.is_some_and(|bytes_min| left_bytes >= bytes_min);
        if !(too_old || segment.sealed && too_much) {
            break;
        }
        live_bytes = left_bytes;
        start = segment.next;
    }
    start
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::super::testing::seeded;
    use super::*;

    const NONE: RetentionPolicy = RetentionPolicy { time_us: None, bytes: None };

    /// Returns segments of 10 records and 100 bytes each. The i-th ends at time 1000 * (i + 1), and
    /// the last one is not sealed.
    fn segments(count: u64) -> Vec<PartitionSegment> {
        let segment = |i| PartitionSegment {
            sealed: i + 1 < count,
            first: i * 10,
            next: (i + 1) * 10,
            bytes: 100,
            last_time_us: (i + 1) * 1_000,
        };
        (0..count).map(segment).collect()
    }

    #[test]
    fn keeps_everything_without_a_limit() {
        for zero in [None, Some(0)] {
            let policy = RetentionPolicy { time_us: zero, bytes: zero };
            assert_eq!(log_start_after_retention(policy, u64::MAX, 7, &segments(5)), 7);
        }
        let policy = RetentionPolicy { time_us: Some(1), bytes: Some(1) };
        assert_eq!(log_start_after_retention(policy, 9, 7, &[]), 7);
    }

    #[test]
    fn compaction_without_delete_keeps_what_retention_would_drop() {
        let limits = PartitionSettings {
            retention_us: Some(1),
            retention_bytes: Some(1),
            ..Default::default()
        };
        for (cleanup, policy) in [
            (0, RetentionPolicy { time_us: Some(1), bytes: Some(1) }),
            (2, NONE),
            (3, RetentionPolicy { time_us: Some(1), bytes: Some(1) }),
        ] {
            let settings = PartitionSettings { cleanup, ..limits };
            assert_eq!(RetentionPolicy::from(&settings), policy, "{cleanup}");
        }
    }

    #[test]
    fn time_limit_drops_whole_old_segments() {
        let policy = RetentionPolicy { time_us: Some(2_000), ..NONE };
        for (now_us, start) in [(0, 0), (3_000, 0), (3_001, 10), (5_001, 30), (6_001, 40)] {
            let is = log_start_after_retention(policy, now_us, 0, &segments(5));
            assert_eq!(is, start, "at {now_us}");
        }
    }

    #[test]
    fn time_limit_drops_the_active_segment_as_a_whole() {
        let policy = RetentionPolicy { time_us: Some(2_000), ..NONE };
        for (now_us, start) in [(7_000, 40), (7_001, 50), (1 << 40, 50)] {
            let is = log_start_after_retention(policy, now_us, 0, &segments(5));
            assert_eq!(is, start, "at {now_us}");
        }
        // Records appended after a log start within the segment keep the rest of it.
        assert_eq!(log_start_after_retention(policy, 7_000, 45, &segments(5)), 45);
        assert_eq!(log_start_after_retention(policy, 7_001, 50, &segments(5)), 50);
    }

    #[test]
    fn byte_limit_keeps_at_least_the_limit() {
        for (bytes, start) in [(1, 40), (100, 40), (101, 30), (200, 30), (450, 0), (9_000, 0)] {
            let policy = RetentionPolicy { bytes: Some(bytes), ..NONE };
            let is = log_start_after_retention(policy, 0, 0, &segments(5));
            assert_eq!(is, start, "{bytes} bytes");
        }
    }

    #[test]
    fn ignores_segments_below_the_log_start() {
        let policy = RetentionPolicy { bytes: Some(300), ..NONE };
        assert_eq!(log_start_after_retention(policy, 0, 20, &segments(5)), 20);
        // A segment that contains the log start counts whole, since its bytes are still stored.
        assert_eq!(log_start_after_retention(policy, 0, 15, &segments(5)), 20);
    }

    #[test]
    fn log_start_only_grows_and_stays_at_segment_edges() {
        let mut rng = seeded("log_start_only_grows_and_stays_at_segment_edges");
        for _ in 0..5_000 {
            let segments = segments(rng.random_range(0..8));
            let log_start = rng.random_range(0..90);
            let policy = RetentionPolicy {
                time_us: rng.random_bool(0.5).then(|| rng.random_range(0..8_000)),
                bytes: rng.random_bool(0.5).then(|| rng.random_range(0..900)),
            };
            let now_us = rng.random_range(0..12_000);
            let start = log_start_after_retention(policy, now_us, log_start, &segments);
            assert!(start >= log_start);
            let edge = segments.iter().any(|segment| segment.next == start);
            assert!(start == log_start || edge);
            assert_eq!(log_start_after_retention(policy, now_us, start, &segments), start);
        }
    }
}
