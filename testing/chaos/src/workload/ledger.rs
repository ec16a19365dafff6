//! What the producers know of a log that loses its front: where acked batches stand, so that trims
//! can be aimed at their borders, and how far retention may have come, so that nothing more goes.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

/// More than a batch takes in the log beside its payload. Too much lets retention go further than
/// it should by that part of a batch, too little would blame it.
const HEAD_BYTES: u64 = 256;

/// What may go from a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// Nothing.
    All,
    /// What somebody trims.
    Untrimmed,
    /// What is not among the last so many bytes.
    Bytes(u64),
    /// What is older than this.
    Newer(Duration),
}

/// One partition's acked batches, from where it was trimmed for sure.
#[derive(Debug)]
pub(crate) struct Ledger {
    keep: Keep,
    /// By first offset.
    acked: BTreeMap<u64, Acked>,
    /// Bytes of batches that may stand anywhere: under way, or given up with an open outcome.
    open_bytes: u64,
    /// The highest log start that anyone was told.
    told: u64,
    /// The highest offset that a trim was asked for.
    asked: u64,
}

#[derive(Debug, Clone, Copy)]
struct Acked {
    bytes: u64,
    /// Before its append time; of one that was only read, unknown.
    invoked: Option<Instant>,
}

impl Ledger {
    pub(super) fn new(keep: Keep) -> Self {
        Self { keep, acked: BTreeMap::new(), open_bytes: 0, told: 0, asked: 0 }
    }

    pub(super) fn on_invoked(&mut self, payload_bytes: u64) {
        self.open_bytes += payload_bytes + HEAD_BYTES;
    }

    pub(super) fn on_acked(&mut self, offset: u64, payload_bytes: u64, invoked: Instant) {
        self.on_failed(payload_bytes);
        let bytes = payload_bytes + HEAD_BYTES;
        self.acked.insert(offset, Acked { bytes, invoked: Some(invoked) });
    }

    /// It was read.
    pub(super) fn on_read(&mut self, offset: u64, payload_bytes: u64) {
        let bytes = payload_bytes + HEAD_BYTES;
        self.acked.entry(offset).or_insert(Acked { bytes, invoked: None });
    }

    /// Everything was read, and nothing is under way: what has not been read is not there.
    pub(super) fn at_rest(&mut self) {
        self.open_bytes = 0;
    }

    /// It is surely not there.
    pub(super) fn on_failed(&mut self, payload_bytes: u64) {
        self.open_bytes = self.open_bytes.saturating_sub(payload_bytes + HEAD_BYTES);
    }

    /// Where the log may start at most. Whatever could have made it go further is counted as if it
    /// had: batches with an open outcome, and what lies between two acked ones.
    fn bound(&self, now: Instant) -> u64 {
        match self.keep {
            Keep::All => 0,
            Keep::Untrimmed => self.asked,
            Keep::Bytes(least) => {
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
            Keep::Newer(age) => {
                let is_young = |invoked: Instant| now.duration_since(invoked) <= age;
                let young = self.acked.iter().find(|(_, it)| it.invoked.is_some_and(is_young));
                young.map_or(u64::MAX, |(offset, _)| *offset)
            }
        }
    }

    /// Someone was told that the log starts here. How far it may, if that is news.
    pub(super) fn on_told(&mut self, log_start: u64, now: Instant) -> Option<u64> {
        if log_start <= self.told {
            return None;
        }
        self.told = log_start;
        let allowed = self.bound(now).min(log_start);
        self.acked = self.acked.split_off(&log_start);
        Some(allowed)
    }

    /// Where a trim can cut between two batches: part of the way from the front to the end.
    pub(super) fn cut(&self, part: f64) -> Option<u64> {
        let place = (self.acked.len() as f64 * part) as usize;
        self.acked.keys().nth(place.min(self.acked.len().saturating_sub(1))).copied()
    }

    /// Where the first batch from here on begins that is known.
    pub(super) fn next_border(&self, offset: u64) -> Option<u64> {
        self.acked.range(offset..).next().map(|(offset, _)| *offset)
    }

    /// A trim is about to be asked for.
    pub(super) fn on_trim(&mut self, offset: u64) {
        self.asked = self.asked.max(offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGE: Duration = Duration::from_secs(10);

    /// Ten batches of ten records and 744 payload bytes, 1000 with their heads, a second apart.
    fn ledger(keep: Keep) -> (Ledger, Instant) {
        let begin = Instant::now();
        let mut ledger = Ledger::new(keep);
        for place in 0..10 {
            ledger.on_invoked(744);
            ledger.on_acked(place * 10, 744, begin + Duration::from_secs(place));
        }
        (ledger, begin)
    }

    #[test]
    fn retention_by_bytes_keeps_at_least_the_limit() {
        let (ledger, now) = ledger(Keep::Bytes(3000));
        assert_eq!(ledger.bound(now), 70);
        let (mut ledger, now) = self::ledger(Keep::Bytes(3001));
        assert_eq!(ledger.bound(now), 60);
        // What is under way may be there.
        ledger.on_invoked(744);
        assert_eq!(ledger.bound(now), 70);
        ledger.on_failed(744);
        assert_eq!(ledger.bound(now), 60);
        assert_eq!(self::ledger(Keep::Bytes(10_001)).0.bound(now), 0);
        // One that was given up is counted until everything is read, and then where it is.
        ledger.on_invoked(744);
        ledger.at_rest();
        assert_eq!(ledger.bound(now), 60);
        ledger.on_read(100, 744);
        assert_eq!(ledger.bound(now), 70);
    }

    #[test]
    fn retention_by_time_keeps_what_is_young() {
        let (ledger, begin) = ledger(Keep::Newer(AGE));
        assert_eq!(ledger.bound(begin + AGE), 0);
        assert_eq!(ledger.bound(begin + AGE + Duration::from_millis(3_500)), 40);
        assert_eq!(ledger.bound(begin + 3 * AGE), u64::MAX);
    }

    #[test]
    fn nothing_else_goes_but_what_is_trimmed() {
        let (mut all, now) = ledger(Keep::All);
        assert_eq!(all.on_told(10, now), Some(0));
        let (mut trimmed, now) = ledger(Keep::Untrimmed);
        let cut = trimmed.cut(0.5).unwrap();
        assert_eq!(cut, 50);
        assert_eq!(trimmed.bound(now), 0);
        trimmed.on_trim(cut);
        assert_eq!(trimmed.on_told(60, now), Some(50), "too far");
        assert_eq!(trimmed.on_told(40, now), None, "known");
        assert_eq!(trimmed.cut(0.0), Some(60));
        assert_eq!(trimmed.cut(1.0), Some(90));
    }
}
