//! Wall-clock time that does not depend on one clock.
//!
//! With several members it is the latest time that the clocks of a majority have reached, carried
//! on by the monotonic clock between two comparisons. One wrong clock therefore neither stamps
//! records with its time nor lets retention drop them. A single node has only its own clock; there
//! a jump against the monotonic clock counts only once the clock has been steady for a while.

use std::sync::{Arc, RwLock};
use std::time::Duration;

use tokio::time::Instant;

use super::Clock;
use crate::sync;

/// Difference from the agreed time up to which a node's own clock stamps its batches.
pub(super) const CLOCK_TOLERANCE: Duration = Duration::from_secs(10);

/// Smallest change of a single node's clock against the monotonic clock that counts as a jump.
pub(super) const CLOCK_JUMP: Duration = Duration::from_secs(60);

/// Time for which a single node's clock must be steady after a jump.
pub const CLOCK_CONFIRMATION: Duration = Duration::from_secs(10 * 60);

/// Age of the last agreement from which retention by time waits for another one.
pub(super) const AGREEMENT_AGE_MAX: Duration = Duration::from_secs(60);

/// Time of a clock at a moment of the monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockReading {
    pub node_id: u64,
    /// Microseconds since the Unix epoch.
    pub wall_us: u64,
    pub at: Instant,
}

/// Difference of a member's clock from the agreed time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockOffset {
    pub node_id: u64,
    /// Microseconds; positive if the clock is ahead.
    pub offset_us: i64,
}

impl ClockOffset {
    /// Returns whether the difference is above `CLOCK_TOLERANCE`.
    pub fn is_off(&self) -> bool {
        self.offset_us.unsigned_abs() > micros(CLOCK_TOLERANCE)
    }
}

impl ClockReading {
    /// Returns the time of the clock at another moment, if it runs like the monotonic clock.
    fn time_at(&self, at: Instant) -> u64 {
        match at.checked_duration_since(self.at) {
            Some(later) => self.wall_us.saturating_add(micros(later)),
            None => self.wall_us.saturating_sub(micros(self.at - at)),
        }
    }
}

/// A node's own clock, bounded by the agreed time.
#[derive(Debug)]
pub struct AgreedClock {
    own: Arc<dyn Clock>,
    state: RwLock<State>,
}

#[derive(Debug)]
struct State {
    /// The agreed time, or with one member the confirmed time of its clock.
    anchor: ClockReading,
    tolerance: Duration,
    /// Retention by time waits.
    is_held: bool,
    /// Time after a jump, until it is confirmed.
    jumped: Option<ClockReading>,
    /// Last comparison with a majority.
    agreed_at: Option<Instant>,
    offsets: Vec<ClockOffset>,
}

impl AgreedClock {
    /// Starts with the node's own clock. Retention waits for the first [`Self::observe`].
    pub fn new(own: Arc<dyn Clock>) -> Arc<Self> {
        let state = State {
            anchor: ClockReading { node_id: 0, wall_us: own.now_us(), at: Instant::now() },
            tolerance: CLOCK_JUMP,
            is_held: true,
            jumped: None,
            agreed_at: None,
            offsets: Vec::new(),
        };
        Arc::new(Self { own, state: RwLock::new(state) })
    }

    /// Compares the node's clock with those of the other members, as far as they responded.
    ///
    /// `member_count` includes members without a reading.
    pub fn observe(&self, node_id: u64, member_count: usize, others: &[ClockReading]) {
        let own = ClockReading { node_id, wall_us: self.own.now_us(), at: Instant::now() };
        let mut state = sync::write(&self.state);
        if member_count <= 1 {
            state.offsets.clear();
            state.agreed_at = None;
            state.follow(own);
        } else {
            state.agree(own, member_count, others);
        }
    }

    /// Returns the difference of each member's clock from the agreed time at the last comparison.
    pub fn offsets(&self) -> Vec<ClockOffset> {
        sync::read(&self.state).offsets.clone()
    }

    /// Returns whether retention by time waits for an agreement, or for a confirmed clock.
    pub fn is_held(&self) -> bool {
        sync::read(&self.state).is_held
    }

    /// Returns whether the only member's clock has jumped and is not confirmed yet.
    pub fn has_jumped(&self) -> bool {
        sync::read(&self.state).jumped.is_some()
    }
}

impl Clock for AgreedClock {
    fn now_us(&self) -> u64 {
        let own_us = self.own.now_us();
        let (anchor, tolerance) = {
            let state = sync::read(&self.state);
            (state.anchor, micros(state.tolerance))
        };
        let expected_us = anchor.time_at(Instant::now());
        own_us.clamp(expected_us.saturating_sub(tolerance), expected_us.saturating_add(tolerance))
    }

    fn retention_us(&self) -> Option<u64> {
        let state = sync::read(&self.state);
        (!state.is_held).then(|| state.anchor.time_at(Instant::now()))
    }
}

impl State {
    /// Follows the only clock, except for a jump that is not confirmed yet.
    fn follow(&mut self, own: ClockReading) {
        let runs_on =
            |from: &ClockReading| own.wall_us.abs_diff(from.time_at(own.at)) <= micros(CLOCK_JUMP);
        let jumped = self.jumped.filter(runs_on);
        let is_confirmed = jumped.is_some_and(|jumped| own.at - jumped.at >= CLOCK_CONFIRMATION);
        self.tolerance = CLOCK_JUMP;
        if runs_on(&self.anchor) || is_confirmed {
            self.anchor = own;
            self.jumped = None;
            self.is_held = false;
        } else {
            self.jumped = Some(jumped.unwrap_or(own));
            self.is_held = true;
        }
    }

    fn agree(&mut self, own: ClockReading, member_count: usize, others: &[ClockReading]) {
        let majority = member_count / 2 + 1;
        let times = others.iter().chain([&own]).map(|it| (it.node_id, it.time_at(own.at)));
        let times: Vec<(u64, u64)> = times.collect();
        if times.len() < majority {
            match self.agreed_at {
                // The monotonic clock carries the last agreement on.
                Some(at) => self.is_held |= own.at - at > AGREEMENT_AGE_MAX,
                None => {
                    self.follow(own);
                    self.jumped = None;
                    self.is_held = true;
                }
            }
            return;
        }
        let mut walls: Vec<u64> = times.iter().map(|(_, wall_us)| *wall_us).collect();
        walls.sort_unstable_by(|a, b| b.cmp(a));
        let agreed_us = walls[majority - 1];
        self.anchor = ClockReading { wall_us: agreed_us, ..own };
        self.tolerance = CLOCK_TOLERANCE;
        self.is_held = false;
        self.jumped = None;
        self.agreed_at = Some(own.at);
        let offset = |(node_id, wall_us): (u64, u64)| {
            let magnitude = i64::try_from(wall_us.abs_diff(agreed_us)).unwrap_or(i64::MAX);
            let offset_us = if wall_us < agreed_us { -magnitude } else { magnitude };
            ClockOffset { node_id, offset_us }
        };
        self.offsets = times.into_iter().map(offset).collect();
        self.offsets.sort_unstable_by_key(|offset| offset.node_id);
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use tokio::time::advance;

    use super::super::TokioClock;
    use super::*;

    const START_US: u64 = 1_700_000_000_000_000;
    const DAY_US: i64 = 86_400_000_000;
    const POLL: Duration = Duration::from_secs(2);

    /// A clock with an error that can change.
    #[derive(Debug)]
    struct WrongClock {
        right: Arc<TokioClock>,
        error_us: AtomicI64,
    }

    impl WrongClock {
        fn new() -> Arc<Self> {
            let (right, error_us) = (TokioClock::new(START_US), AtomicI64::new(0));
            Arc::new(Self { right, error_us })
        }

        fn set(&self, error_us: i64) {
            self.error_us.store(error_us, Ordering::Relaxed);
        }
    }

    impl Clock for WrongClock {
        fn now_us(&self) -> u64 {
            self.right.now_us().saturating_add_signed(self.error_us.load(Ordering::Relaxed))
        }
    }

    fn reading(clock: &WrongClock, node_id: u64) -> ClockReading {
        ClockReading { node_id, wall_us: clock.now_us(), at: Instant::now() }
    }

    #[tokio::test(start_paused = true)]
    async fn one_wrong_clock_of_three_neither_stamps_nor_retains() {
        for error_us in [3 * DAY_US, -3 * DAY_US] {
            let clocks = [WrongClock::new(), WrongClock::new(), WrongClock::new()];
            let agreed = AgreedClock::new(clocks[0].clone());
            let others = || [reading(&clocks[1], 2), reading(&clocks[2], 3)];
            assert_eq!(agreed.retention_us(), None, "before the first comparison");
            agreed.observe(1, 3, &others());
            let right = || clocks[1].now_us();
            assert_eq!((agreed.now_us(), agreed.retention_us()), (right(), Some(right())));
            // It jumps between two comparisons, and stays wrong.
            clocks[0].set(error_us);
            for _ in 0..100 {
                let tolerance = micros(CLOCK_TOLERANCE);
                assert_eq!(agreed.now_us().abs_diff(right()), tolerance);
                assert_eq!(agreed.retention_us(), Some(right()));
                advance(POLL).await;
                agreed.observe(1, 3, &others());
                let expected = ClockOffset { node_id: 1, offset_us: error_us };
                assert_eq!(agreed.offsets()[0], expected);
                assert!(expected.is_off() && !agreed.offsets()[1].is_off());
            }
            clocks[0].set(0);
            assert_eq!(agreed.now_us(), right());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn two_of_three_use_the_earlier_clock() {
        let clocks = [WrongClock::new(), WrongClock::new()];
        let agreed = AgreedClock::new(clocks[0].clone());
        clocks[1].set(DAY_US);
        agreed.observe(1, 3, &[reading(&clocks[1], 2)]);
        assert_eq!(agreed.retention_us(), Some(clocks[0].now_us()));
    }

    #[tokio::test(start_paused = true)]
    async fn retention_waits_without_a_majority() {
        let clocks = [WrongClock::new(), WrongClock::new()];
        let agreed = AgreedClock::new(clocks[0].clone());
        agreed.observe(1, 3, &[]);
        assert_eq!(agreed.retention_us(), None);
        agreed.observe(1, 3, &[reading(&clocks[1], 2)]);
        assert!(agreed.retention_us().is_some());
        clocks[0].set(DAY_US);
        advance(AGREEMENT_AGE_MAX).await;
        agreed.observe(1, 3, &[]);
        assert_eq!(agreed.retention_us(), Some(clocks[1].now_us()), "carried on");
        advance(POLL).await;
        agreed.observe(1, 3, &[]);
        assert_eq!(agreed.retention_us(), None);
        let tolerance = micros(CLOCK_TOLERANCE);
        assert_eq!(agreed.now_us(), clocks[1].now_us() + tolerance, "the bound stays");
    }

    #[tokio::test(start_paused = true)]
    async fn jump_of_a_single_clock_counts_once_it_is_steady() {
        for error_us in [DAY_US, -DAY_US] {
            let clock = WrongClock::new();
            let agreed = AgreedClock::new(clock.clone());
            let poll = async |count: u32| {
                for _ in 0..count {
                    advance(POLL).await;
                    agreed.observe(1, 1, &[]);
                }
            };
            poll(3).await;
            assert_eq!(agreed.retention_us(), Some(clock.now_us()));
            clock.set(error_us);
            assert!(agreed.now_us().abs_diff(clock.right.now_us()) <= micros(CLOCK_JUMP));
            assert_eq!(agreed.retention_us(), Some(clock.right.now_us()), "until the next poll");
            poll(1).await;
            assert_eq!(agreed.retention_us(), None);
            assert!(agreed.has_jumped() && agreed.is_held());
            // A jump back needs no confirmation.
            clock.set(0);
            poll(1).await;
            assert_eq!(agreed.retention_us(), Some(clock.now_us()));
            clock.set(error_us);
            poll(300).await;
            assert_eq!(agreed.retention_us(), None, "9 min 58 s after the first sight");
            poll(1).await;
            assert_eq!(agreed.retention_us(), Some(clock.now_us()));
            assert_eq!(agreed.now_us(), clock.now_us());
            assert!(!agreed.has_jumped());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn slow_corrections_of_a_single_clock_are_followed() {
        let clock = WrongClock::new();
        let agreed = AgreedClock::new(clock.clone());
        for second in 0..1_000 {
            clock.set(second * 1_000_000);
            advance(POLL).await;
            agreed.observe(1, 1, &[]);
            assert_eq!(agreed.retention_us(), Some(clock.now_us()));
        }
    }
}
