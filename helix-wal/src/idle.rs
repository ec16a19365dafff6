//! How a thread of the log waits: awake for a moment where work has been coming that soon, asleep
//! otherwise.
//!
//! A processor that has nothing to do sleeps, and to wake it takes longer than what is then done:
//! the caller that appends pays for the message to it, in a virtual machine with an exit to the
//! host, and the thread begins tens of microseconds later with what it knew gone from the
//! processor's caches. With one request in flight that is so for every append. Whoever waits awake
//! offers its processor to others at every turn, so that it takes little from them; only where no
//! work comes would it all be for nothing, so one wait that was in vain ends it, until work comes
//! that soon again.

use std::sync::Arc;
use std::time::Duration;

use crate::sync::{AtomicBool, Ordering, yield_now};
use crate::wal::Next;

/// Looks at the flag between two offers of the processor, some 50 ns each.
const LOOKS: usize = 16;

/// How long it is left after others took the processor for longer than a whole wait: there are
/// more of them than processors, and who offers its own to them comes last.
const REST: Duration = Duration::from_millis(100);

/// What one thread knows of its waits.
#[derive(Debug)]
pub(crate) struct Idle {
    limit: Duration,
    raised: Arc<AtomicBool>,
    /// Whether work came within `limit` the last time.
    is_busy: bool,
    /// Until when others need the processor more.
    rests_until: Duration,
}

impl Idle {
    /// Waits awake for up to `limit` each time, until `raised`; not at all with a limit of zero.
    pub(crate) fn new(limit: Duration, raised: Arc<AtomicBool>) -> Self {
        Self { limit, raised, is_busy: false, rests_until: Duration::ZERO }
    }

    /// Waits awake, if that has been worth it. A hint: the caller asks under its lock what is so.
    pub(crate) fn look_out(&mut self, next: Next, clock: impl Fn() -> Duration) {
        // After an idle wait there has been no work for long.
        let Next::After(time) = next else { return };
        if !self.is_busy {
            return;
        }
        let mut now = clock();
        if now < self.rests_until {
            return;
        }
        let until = now + self.limit.min(time);
        while now < until {
            for _ in 0..LOOKS {
                if self.raised.load(Ordering::Acquire) {
                    return;
                }
                std::hint::spin_loop();
            }
            yield_now();
            let before = std::mem::replace(&mut now, clock());
            if now.saturating_sub(before) > self.limit {
                self.rests_until = now + REST;
            }
        }
    }

    /// Notes how long it was until work came, if that is what ended the wait.
    pub(crate) fn note(&mut self, wait: Option<Duration>) {
        self.is_busy = wait.is_some_and(|wait| wait < self.limit);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::cell::Cell;

    use super::*;

    const LIMIT: Duration = Duration::from_micros(200);
    const SOON: Next = Next::After(Duration::from_millis(20));

    /// How often the clock is looked at until it is given up, with a microsecond between two.
    fn looks(idle: &mut Idle, next: Next) -> u64 {
        let looks = Cell::new(0);
        idle.look_out(next, || {
            looks.set(looks.get() + 1);
            Duration::from_micros(looks.get())
        });
        looks.get()
    }

    #[test]
    fn it_stays_awake_only_after_work_that_came_soon() {
        let mut idle = Idle::new(LIMIT, Arc::default());
        assert_eq!(looks(&mut idle, SOON), 0, "nothing is known yet");
        for (wait, wanted) in [(Some(LIMIT / 2), 201), (Some(LIMIT), 0), (None, 0)] {
            idle.note(Some(LIMIT / 2));
            idle.note(wait);
            assert_eq!(looks(&mut idle, SOON), wanted, "{wait:?}");
        }
        idle.note(Some(Duration::ZERO));
        assert_eq!(looks(&mut idle, Next::Idle), 0);
        assert_eq!(
            looks(&mut idle, Next::After(Duration::from_micros(3))),
            4,
            "no longer than asked"
        );
    }

    #[test]
    fn work_ends_it() {
        let raised = Arc::new(AtomicBool::new(true));
        let mut idle = Idle::new(LIMIT, raised);
        idle.note(Some(Duration::ZERO));
        assert_eq!(looks(&mut idle, SOON), 1);
    }

    #[test]
    fn it_rests_where_others_need_the_processor() {
        let mut idle = Idle::new(LIMIT, Arc::default());
        idle.note(Some(Duration::ZERO));
        let steps = |idle: &mut Idle, from: Duration, step: Duration| {
            let steps = Cell::new(0);
            idle.look_out(SOON, || {
                let passed = steps.replace(steps.get() + 1);
                from + passed * step
            });
            steps.get()
        };
        let long = LIMIT + LIMIT / 20;
        assert_eq!(steps(&mut idle, Duration::ZERO, LIMIT), 2);
        assert_eq!(steps(&mut idle, Duration::ZERO, long), 2, "others had it for too long");
        assert_eq!(steps(&mut idle, REST, LIMIT), 1, "none of it meanwhile");
        assert_eq!(steps(&mut idle, REST + long, LIMIT), 2);
    }

    #[test]
    fn without_a_limit_it_never_does() {
        let mut idle = Idle::new(Duration::ZERO, Arc::default());
        idle.note(Some(Duration::ZERO));
        assert_eq!(looks(&mut idle, SOON), 0);
    }
}
