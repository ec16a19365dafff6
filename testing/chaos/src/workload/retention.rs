//! Tracks acked batches of a partition, to trim at batch boundaries and to bound how far retention
//! may go.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

/// Upper bound of the log bytes of a batch beside its payload. A larger value tolerates retention
/// that drops too much; a smaller one causes false violations.
const METADATA_BYTES_MAX: u64 = 256;

/// Rule by which records of a partition may be dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RetentionRule {
    /// Keeps all records.
    All,
    /// Drops only trimmed records.
    TrimOnly,
    /// Keeps at least the last bytes.
    Bytes(u64),
    /// Keeps records that are younger than this.
    Age(Duration),
}

/// Acked batches of one partition, after its highest known log start.
#[derive(Debug)]
pub(crate) struct RetentionTracker {
    keep: RetentionRule,
    /// By first offset.
    acked: BTreeMap<u64, Acked>,
    /// Bytes of batches with an unknown offset: in flight, or with an unknown outcome.
    open_bytes: u64,
    /// Highest log start that was reported.
    log_start: u64,
    /// Highest offset of a requested trim.
    trim_requested: u64,
}

#[derive(Debug, Clone, Copy)]
struct Acked {
    bytes: u64,
    /// Time before the append time; `None` for a batch that was only read.
    invoked: Option<Instant>,
}

impl RetentionTracker {
    pub(super) fn new(keep: RetentionRule) -> Self {
        Self { keep, acked: BTreeMap::new(), open_bytes: 0, log_start: 0, trim_requested: 0 }
    }

    pub(super) fn on_invoked(&mut self, payload_bytes: u64) {
        self.open_bytes += payload_bytes + METADATA_BYTES_MAX;
    }

    pub(super) fn on_acked(&mut self, offset: u64, payload_bytes: u64, invoked: Instant) {
        self.on_failed(payload_bytes);
        let bytes = payload_bytes + METADATA_BYTES_MAX;
        self.acked.insert(offset, Acked { bytes, invoked: Some(invoked) });
    }

    /// Notes a batch that was read.
    pub(super) fn on_read(&mut self, offset: u64, payload_bytes: u64) {
        let bytes = payload_bytes + METADATA_BYTES_MAX;
        self.acked.entry(offset).or_insert(Acked { bytes, invoked: None });
    }

    /// Notes a full read without batches in flight: unread batches are not in the log.
    pub(super) fn on_all_read(&mut self) {
        self.open_bytes = 0;
    }

    /// Notes a batch that is not in the log.
    pub(super) fn on_failed(&mut self, payload_bytes: u64) {
        self.open_bytes = self.open_bytes.saturating_sub(payload_bytes + METADATA_BYTES_MAX);
    }

    /// Returns the highest allowed log start. Batches with an unknown outcome, and any between two
    /// acked ones, count as present.
    fn log_start_max(&self, now: Instant) -> u64 {
        match self.keep {
            RetentionRule::All => 0,
            RetentionRule::TrimOnly => self.trim_requested,
            RetentionRule::Bytes(least) => {
                let mut bytes = self.open_bytes;
                if bytes >= least {
                    return u64::MAX;
                }
                let mut newest_first = self.acked.iter().rev();
                let edge = newest_first.find(|(_, acked)| {
                    bytes += acked.bytes;
                    bytes >= least
                });
                edge.map_or(0, |(offset, _)| *offset)
            }
            RetentionRule::Age(age) => {
                let is_young = |invoked: Instant| now.duration_since(invoked) <= age;
                let young = self.acked.iter().find(|(_, it)| it.invoked.is_some_and(is_young));
                young.map_or(u64::MAX, |(offset, _)| *offset)
            }
        }
    }

    /// Notes a reported log start. Returns the allowed one if it is new.
    pub(super) fn on_log_start(&mut self, log_start: u64, now: Instant) -> Option<u64> {
        if log_start <= self.log_start {
            return None;
        }
        self.log_start = log_start;
        let allowed = self.log_start_max(now).min(log_start);
        self.acked = self.acked.split_off(&log_start);
        Some(allowed)
    }

    /// Returns an offset between two batches, at this part of the length.
    pub(super) fn boundary_at(&self, part: f64) -> Option<u64> {
        let index = (self.acked.len() as f64 * part) as usize;
        self.acked.keys().nth(index.min(self.acked.len().saturating_sub(1))).copied()
    }

    /// Returns the start of the first known batch at or after this offset.
    pub(super) fn next_boundary(&self, offset: u64) -> Option<u64> {
        self.acked.range(offset..).next().map(|(offset, _)| *offset)
    }

    /// Notes that a trim is about to be requested.
    pub(super) fn on_trim(&mut self, offset: u64) {
        self.trim_requested = self.trim_requested.max(offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGE: Duration = Duration::from_secs(10);

    /// Ten batches of ten records and 744 payload bytes (1000 with metadata), one second apart.
    fn tracker(keep: RetentionRule) -> (RetentionTracker, Instant) {
        let begin = Instant::now();
        let mut tracker = RetentionTracker::new(keep);
        for index in 0..10 {
            tracker.on_invoked(744);
            tracker.on_acked(index * 10, 744, begin + Duration::from_secs(index));
        }
        (tracker, begin)
    }

    #[test]
    fn retention_by_bytes_keeps_at_least_the_limit() {
        let (tracker, now) = tracker(RetentionRule::Bytes(3000));
        assert_eq!(tracker.log_start_max(now), 70);
        let (mut tracker, now) = self::tracker(RetentionRule::Bytes(3001));
        assert_eq!(tracker.log_start_max(now), 60);
        // A batch in flight may be in the log.
        tracker.on_invoked(744);
        assert_eq!(tracker.log_start_max(now), 70);
        tracker.on_failed(744);
        assert_eq!(tracker.log_start_max(now), 60);
        assert_eq!(self::tracker(RetentionRule::Bytes(10_001)).0.log_start_max(now), 0);
        // A batch with an unknown outcome counts until a full read, then at its offset.
        tracker.on_invoked(744);
        tracker.on_all_read();
        assert_eq!(tracker.log_start_max(now), 60);
        tracker.on_read(100, 744);
        assert_eq!(tracker.log_start_max(now), 70);
    }

    #[test]
    fn retention_by_time_keeps_what_is_young() {
        let (tracker, begin) = tracker(RetentionRule::Age(AGE));
        assert_eq!(tracker.log_start_max(begin + AGE), 0);
        assert_eq!(tracker.log_start_max(begin + AGE + Duration::from_millis(3_500)), 40);
        assert_eq!(tracker.log_start_max(begin + 3 * AGE), u64::MAX);
    }

    #[test]
    fn nothing_else_goes_but_what_is_trimmed() {
        let (mut all, now) = tracker(RetentionRule::All);
        assert_eq!(all.on_log_start(10, now), Some(0));
        let (mut trimmed, now) = tracker(RetentionRule::TrimOnly);
        let boundary_at = trimmed.boundary_at(0.5).unwrap();
        assert_eq!(boundary_at, 50);
        assert_eq!(trimmed.log_start_max(now), 0);
        trimmed.on_trim(boundary_at);
        assert_eq!(trimmed.on_log_start(60, now), Some(50), "too far");
        assert_eq!(trimmed.on_log_start(40, now), None, "known");
        assert_eq!(trimmed.boundary_at(0.0), Some(60));
        assert_eq!(trimmed.boundary_at(1.0), Some(90));
    }
}
