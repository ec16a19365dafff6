//! The slowest appends and reads of the last minutes, in bounded memory.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::limits::{SLOW_CALLS_PER_MINUTE, SLOW_MINUTES};
use crate::stages::StageSpan;
use crate::sync;

/// Kind of a slow call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlowKind {
    Append,
    Read,
}

/// A slow append or read.
#[derive(Debug, Clone)]
pub struct SlowCall {
    pub kind: SlowKind,
    /// End of the call, by the node's clock.
    pub at_us: u64,
    pub took: Duration,
    pub topic: String,
    pub partition: u32,
    pub shard_id: u64,
    pub records: u64,
    pub bytes: u64,
    pub stages: Vec<StageSpan>,
}

/// The slowest calls of a node.
#[derive(Debug)]
pub struct SlowCalls {
    opened: Instant,
    appends: SlowestByMinute,
    reads: SlowestByMinute,
}

/// The slowest calls of each minute. A call that is not among them costs two atomic reads.
#[derive(Debug, Default)]
struct SlowestByMinute {
    /// The current minute.
    minute: AtomicU64,
    /// Duration that a call must exceed to be among the slowest of the minute.
    threshold_ns: AtomicU64,
    minutes: Mutex<VecDeque<MinuteOfCalls>>,
}

#[derive(Debug)]
struct MinuteOfCalls {
    minute: u64,
    /// The slowest first.
    calls: Vec<SlowCall>,
}

impl Default for SlowCalls {
    fn default() -> Self {
        let (appends, reads) = Default::default();
        Self { opened: Instant::now(), appends, reads }
    }
}

impl SlowCalls {
    /// Returns whether a call that ends now is among the slowest of its minute.
    pub fn is_slow(&self, kind: SlowKind, now: Instant, took: Duration) -> bool {
        let of_kind = self.of(kind);
        took.as_nanos() > u128::from(of_kind.threshold_ns.load(Ordering::Relaxed))
            || self.minute(now) != of_kind.minute.load(Ordering::Relaxed)
    }

    /// Keeps a call that [`Self::is_slow`]. Never waits: drops the call if another one is being
    /// kept.
    pub fn keep(&self, now: Instant, call: SlowCall) {
        self.of(call.kind).keep(self.minute(now), call);
    }

    /// Returns the calls of the last minutes, the slowest first.
    pub fn list(&self, now: Instant) -> Vec<SlowCall> {
        let oldest = self.minute(now).saturating_sub(SLOW_MINUTES - 1);
        let mut calls = Vec::new();
        for kind in [&self.appends, &self.reads] {
            let minutes = sync::lock(&kind.minutes);
            let recent = minutes.iter().filter(|minute| minute.minute >= oldest);
            calls.extend(recent.flat_map(|minute| minute.calls.iter().cloned()));
        }
        calls.sort_by_key(|call| std::cmp::Reverse(call.took));
        calls
    }

    fn of(&self, kind: SlowKind) -> &SlowestByMinute {
        match kind {
            SlowKind::Append => &self.appends,
            SlowKind::Read => &self.reads,
        }
    }

    /// Numbers the minutes from 1, so that the first call begins the first one.
    fn minute(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.opened).as_secs() / 60 + 1
    }
}

impl SlowestByMinute {
    fn keep(&self, minute: u64, call: SlowCall) {
        let Ok(mut minutes) = self.minutes.try_lock() else { return };
        if minutes.back().is_none_or(|newest| newest.minute < minute) {
            while minutes.len() as u64 >= SLOW_MINUTES {
                minutes.pop_front();
            }
            let calls = Vec::with_capacity(SLOW_CALLS_PER_MINUTE + 1);
            minutes.push_back(MinuteOfCalls { minute, calls });
            self.threshold_ns.store(0, Ordering::Relaxed);
            self.minute.store(minute, Ordering::Relaxed);
        }
        let Some(newest) = minutes.back_mut() else { return };
        let place = newest.calls.partition_point(|kept| kept.took >= call.took);
        newest.calls.insert(place, call);
        newest.calls.truncate(SLOW_CALLS_PER_MINUTE);
        if let Some(last) = newest.calls.get(SLOW_CALLS_PER_MINUTE - 1) {
            let nanos = u64::try_from(last.took.as_nanos()).unwrap_or(u64::MAX);
            self.threshold_ns.store(nanos, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(kind: SlowKind, took_ms: u64) -> SlowCall {
        SlowCall {
            kind,
            at_us: 0,
            took: Duration::from_millis(took_ms),
            topic: "t".to_owned(),
            partition: 0,
            shard_id: 1,
            records: 1,
            bytes: 1,
            stages: Vec::new(),
        }
    }

    fn offer(calls: &SlowCalls, kind: SlowKind, took_ms: u64) -> bool {
        let (now, call) = (Instant::now(), call(kind, took_ms));
        let is_slow = calls.is_slow(kind, now, call.took);
        if is_slow {
            calls.keep(now, call);
        }
        is_slow
    }

    fn listed(calls: &SlowCalls) -> Vec<u128> {
        calls.list(Instant::now()).iter().map(|call| call.took.as_millis()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn keeps_the_slowest_of_each_minute() {
        let calls = SlowCalls::default();
        for took in 1..=20 {
            assert!(offer(&calls, SlowKind::Append, took), "each is slower than the ones before");
        }
        assert!(!offer(&calls, SlowKind::Append, 12), "eight are slower");
        assert!(offer(&calls, SlowKind::Read, 1), "reads are kept apart");
        assert_eq!(listed(&calls), [20, 19, 18, 17, 16, 15, 14, 13, 1]);
        tokio::time::advance(Duration::from_secs(60)).await;
        assert!(offer(&calls, SlowKind::Append, 2), "a new minute begins");
        assert!(listed(&calls).contains(&2));
        tokio::time::advance(Duration::from_secs(14 * 60)).await;
        assert_eq!(listed(&calls), [2], "the first minute is over");
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_bounded() {
        let calls = SlowCalls::default();
        for minute in 0..40 {
            for took in 1..100 {
                offer(&calls, SlowKind::Append, minute * 100 + took);
            }
            tokio::time::advance(Duration::from_secs(60)).await;
        }
        let kept = sync::lock(&calls.appends.minutes);
        assert_eq!(kept.len() as u64, SLOW_MINUTES);
        assert!(kept.iter().all(|minute| minute.calls.len() == SLOW_CALLS_PER_MINUTE));
    }
}
