//! Busy polling: a thread polls while work arrives at short intervals, and sleeps otherwise.
//!
//! An idle CPU sleeps, and waking it takes longer than the work itself. The caller of an append
//! spends that time, and in a virtual machine also an exit to the host. The thread then starts tens
//! of microseconds later, with cold CPU caches. With one request in flight this happens at every
//! append.
//!
//! A polling thread yields its CPU at every turn, so it takes little from other threads. It still
//! uses CPU time for all of the wait. That pays only where the wake-up is a noticeable part of the
//! time between two groups: on a disk that syncs fast, and while work arrives at short intervals.
//! One wait without work stops it, until work arrives within the limit again.

use std::sync::Arc;
use std::time::Duration;

use crate::sync::{AtomicBool, Ordering, yield_now};
use crate::types::NextStep;

/// Checks of the flag between two yields of the CPU, about 50 ns each.
const CHECKS_PER_YIELD: usize = 16;

/// Maximum time between the starts of two groups for which polling pays.
///
/// A sleep delays the next append by about 50 µs, a tenth of it. A caller with one append in flight
/// returns within it on a disk that syncs in 0.1 ms, even if it waits for a majority first.
const GROUP_TIME_MAX: Duration = Duration::from_micros(500);

/// Pause after other threads took the CPU for longer than a whole wait.
///
/// There are then more threads than CPUs, and a thread that yields runs last.
const BACKOFF: Duration = Duration::from_millis(100);

/// Polling state of one thread.
#[derive(Debug)]
pub(crate) struct BusyPoll {
    may_poll: bool,
    raised: Arc<AtomicBool>,
    /// Maximum time of the next poll, from the times of recent groups.
    limit: Duration,
    /// Work arrived within `limit` the last time.
    is_busy: bool,
    /// End of the pause after other threads needed the CPU.
    backoff_until: Duration,
}

impl BusyPoll {
    /// Polls until `raised`, if it may poll at all.
    pub(crate) fn new(may_poll: bool, raised: Arc<AtomicBool>) -> Self {
        let (limit, backoff_until) = (Duration::ZERO, Duration::ZERO);
        Self { may_poll, raised, limit, is_busy: false, backoff_until }
    }

    /// Polls if the last poll found work. A hint: the caller must check the signal under its lock.
    pub(crate) fn poll(&mut self, next: NextStep, clock: impl Fn() -> Duration) {
        // Before an idle wait there has been no work for long.
        let NextStep::After(time) = next else { return };
        if !self.is_busy {
            return;
        }
        let mut now = clock();
        if now < self.backoff_until {
            return;
        }
        let until = now + self.limit.min(time);
        while now < until {
            for _ in 0..CHECKS_PER_YIELD {
                if self.raised.load(Ordering::Acquire) {
                    return;
                }
                std::hint::spin_loop();
            }
            yield_now();
            let before = std::mem::replace(&mut now, clock());
            if now.saturating_sub(before) > self.limit {
                self.backoff_until = now + BACKOFF;
            }
        }
    }

    /// Records the time until work arrived, if work ended the wait, and the mean time of
    /// writing and syncing a group.
    pub(crate) fn record_wait(&mut self, wait: Option<Duration>, group_time: Duration) {
        self.limit = GROUP_TIME_MAX.saturating_sub(group_time);
        self.is_busy = self.may_poll && wait.is_some_and(|wait| wait < self.limit);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::cell::Cell;

    use super::*;

    const GROUP: Duration = Duration::from_micros(300);
    const LIMIT: Duration = Duration::from_micros(200);
    const SOON: NextStep = NextStep::After(Duration::from_millis(20));

    fn polling(raised: Arc<AtomicBool>) -> BusyPoll {
        let mut idle = BusyPoll::new(true, raised);
        idle.record_wait(Some(Duration::ZERO), GROUP);
        idle
    }

    /// Returns the number of clock reads until polling ends, with a microsecond between two
    /// reads.
    fn clock_reads(idle: &mut BusyPoll, next: NextStep) -> u64 {
        let clock_reads = Cell::new(0);
        idle.poll(next, || {
            clock_reads.set(clock_reads.get() + 1);
            Duration::from_micros(clock_reads.get())
        });
        clock_reads.get()
    }

    #[test]
    fn polls_only_after_work_that_arrived_soon() {
        let mut idle = BusyPoll::new(true, Arc::default());
        assert_eq!(clock_reads(&mut idle, SOON), 0, "nothing is known yet");
        for (wait, wanted) in [(Some(LIMIT / 2), 201), (Some(LIMIT), 0), (None, 0)] {
            idle.record_wait(Some(LIMIT / 2), GROUP);
            idle.record_wait(wait, GROUP);
            assert_eq!(clock_reads(&mut idle, SOON), wanted, "{wait:?}");
        }
        idle.record_wait(Some(Duration::ZERO), GROUP);
        assert_eq!(clock_reads(&mut idle, NextStep::Idle), 0);
        assert_eq!(
            clock_reads(&mut idle, NextStep::After(Duration::from_micros(3))),
            4,
            "no longer than asked"
        );
    }

    #[test]
    fn polls_only_while_groups_are_fast() {
        let mut idle = BusyPoll::new(true, Arc::default());
        for (group, wanted) in [(100, 401), (400, 101), (499, 2), (500, 0), (10_000, 0)] {
            idle.record_wait(Some(Duration::ZERO), Duration::from_micros(group));
            assert_eq!(clock_reads(&mut idle, SOON), wanted, "{group}");
        }
    }

    #[test]
    fn work_ends_polling() {
        let mut idle = polling(Arc::new(AtomicBool::new(true)));
        assert_eq!(clock_reads(&mut idle, SOON), 1);
    }

    #[test]
    fn pauses_when_others_need_the_cpu() {
        let mut idle = polling(Arc::default());
        let steps = |idle: &mut BusyPoll, from: Duration, step: Duration| {
            let steps = Cell::new(0);
            idle.poll(SOON, || {
                let passed = steps.replace(steps.get() + 1);
                from + passed * step
            });
            steps.get()
        };
        let long = LIMIT + LIMIT / 20;
        assert_eq!(steps(&mut idle, Duration::ZERO, LIMIT), 2);
        assert_eq!(steps(&mut idle, Duration::ZERO, long), 2, "others had it for too long");
        assert_eq!(steps(&mut idle, BACKOFF, LIMIT), 1, "none of it meanwhile");
        assert_eq!(steps(&mut idle, BACKOFF + long, LIMIT), 2);
    }

    #[test]
    fn never_polls_where_it_may_not() {
        let mut idle = BusyPoll::new(false, Arc::default());
        idle.record_wait(Some(Duration::ZERO), Duration::ZERO);
        assert_eq!(clock_reads(&mut idle, SOON), 0);
    }
}
