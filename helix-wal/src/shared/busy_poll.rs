//! Busy polling: a thread polls for work that has been arriving soon, and sleeps otherwise.
//!
//! An idle CPU sleeps, and waking it takes longer than the work itself. The appending caller pays
//! for the wake-up, in a virtual machine with an exit to the host. The thread then starts tens of
//! microseconds later, with cold CPU caches. With one request in flight this happens at every
//! append.
//!
//! A polling thread yields its CPU at every turn, so it takes little from other threads. Polling is
//! useless only if no work arrives. One wait without work therefore stops it, until work arrives
//! soon again.

use std::sync::Arc;
use std::time::Duration;

use crate::sync::{AtomicBool, Ordering, yield_now};
use crate::types::NextStep;

/// Checks of the flag between two yields of the CPU, about 50 ns each.
const CHECKS_PER_YIELD: usize = 16;

/// Pause after other threads took the CPU for longer than a whole wait.
///
/// There are then more threads than CPUs, and a thread that yields runs last.
const BACKOFF: Duration = Duration::from_millis(100);

/// Polling state of one thread.
#[derive(Debug)]
pub(crate) struct BusyPoll {
    limit: Duration,
    raised: Arc<AtomicBool>,
    /// Work arrived within `limit` the last time.
    is_busy: bool,
    /// End of the pause after other threads needed the CPU.
    backoff_until: Duration,
}

impl BusyPoll {
    /// Polls for up to `limit` each time, until `raised`. A limit of zero disables polling.
    pub(crate) fn new(limit: Duration, raised: Arc<AtomicBool>) -> Self {
        Self { limit, raised, is_busy: false, backoff_until: Duration::ZERO }
    }

    /// Polls if that has been worth it. A hint: the caller must check the signal under its lock.
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

    /// Records how long it took until work arrived, if that ended the wait.
    pub(crate) fn record_wait(&mut self, wait: Option<Duration>) {
        self.is_busy = wait.is_some_and(|wait| wait < self.limit);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::cell::Cell;

    use super::*;

    const LIMIT: Duration = Duration::from_micros(200);
    const SOON: NextStep = NextStep::After(Duration::from_millis(20));

    /// Returns how often the clock is read until polling ends, with a microsecond between two
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
        let mut idle = BusyPoll::new(LIMIT, Arc::default());
        assert_eq!(clock_reads(&mut idle, SOON), 0, "nothing is known yet");
        for (wait, wanted) in [(Some(LIMIT / 2), 201), (Some(LIMIT), 0), (None, 0)] {
            idle.record_wait(Some(LIMIT / 2));
            idle.record_wait(wait);
            assert_eq!(clock_reads(&mut idle, SOON), wanted, "{wait:?}");
        }
        idle.record_wait(Some(Duration::ZERO));
        assert_eq!(clock_reads(&mut idle, NextStep::Idle), 0);
        assert_eq!(
            clock_reads(&mut idle, NextStep::After(Duration::from_micros(3))),
            4,
            "no longer than asked"
        );
    }

    #[test]
    fn work_ends_polling() {
        let raised = Arc::new(AtomicBool::new(true));
        let mut idle = BusyPoll::new(LIMIT, raised);
        idle.record_wait(Some(Duration::ZERO));
        assert_eq!(clock_reads(&mut idle, SOON), 1);
    }

    #[test]
    fn pauses_when_others_need_the_cpu() {
        let mut idle = BusyPoll::new(LIMIT, Arc::default());
        idle.record_wait(Some(Duration::ZERO));
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
    fn never_polls_with_zero_limit() {
        let mut idle = BusyPoll::new(Duration::ZERO, Arc::default());
        idle.record_wait(Some(Duration::ZERO));
        assert_eq!(clock_reads(&mut idle, SOON), 0);
    }
}
