//! When to try again, and after how long. Decides; the waiting is done by the caller.
//! The rules follow the reasons that the service gives, not the gRPC codes.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use helix_proto::log::v1::ErrorReason;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::config::{Config, draw_seed};
use crate::error::{Error, Origin};

/// Times in a row that a hint is followed without a wait. Two nodes that point at each other must
/// not be asked in a tight loop.
const REDIRECTS_MAX: u32 = 3;

/// Times that a node is asked again about a topic that it does not know and the rest of the cluster
/// does: a new topic takes a moment to be known everywhere.
const RECHECKS_MAX: u32 = 20;

/// The same where each time another node is asked.
const FEW_RECHECKS_MAX: u32 = 2;

/// Whether a request may be sent again after an attempt whose outcome is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Repeat {
    /// There is nothing to apply: a read.
    Read,
    /// A second copy does no harm: an idempotent change, an append with its sequence.
    Always,
    /// A second copy would be a second batch.
    UnlessApplied,
}

/// What to do after a failed attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// The error is the caller's.
    GiveUp,
    /// Try again at once, where the hint points.
    Redirect,
    /// Try again after a wait of at least this much, with fresh routes.
    Wait(Duration),
}

/// The retries of one call: how often it was tried, and what that means for the next failure.
#[derive(Debug)]
pub(crate) struct Retries {
    repeat: Repeat,
    /// Waits since the last success.
    waits: u32,
    redirects: u32,
    /// Retries so far that go with reasons which are final otherwise, and how many there may be.
    rechecks: u32,
    rechecks_max: u32,
}

impl Retries {
    pub(crate) fn new(repeat: Repeat) -> Self {
        Self { repeat, waits: 0, redirects: 0, rechecks: 0, rechecks_max: RECHECKS_MAX }
    }

    /// For calls that go from node to node, each of which knows by itself: a few of them are enough
    /// to believe that something does not exist.
    pub(crate) fn ask_few(&mut self) {
        self.rechecks_max = FEW_RECHECKS_MAX;
    }

    /// Decides after a failure. `is_redirected` says that the failure pointed to a leader that was
    /// not asked before.
    pub(crate) fn after(&mut self, error: &Error, is_redirected: bool, jitter: &Jitter) -> Next {
        if error.may_have_applied && self.repeat == Repeat::UnlessApplied {
            return Next::GiveUp;
        }
        if !error.retryable && !self.is_worth_a_second_look(error) {
            return Next::GiveUp;
        }
        if is_redirected && self.redirects < REDIRECTS_MAX {
            self.redirects += 1;
            return Next::Redirect;
        }
        self.redirects = 0;
        let wait = jitter.wait(self.waits, error).max(error.retry_after.unwrap_or_default());
        self.waits = self.waits.saturating_add(1);
        Next::Wait(wait)
    }

    /// A success: the next failure begins a new series.
    pub(crate) fn on_progress(&mut self) {
        *self = Self { rechecks_max: self.rechecks_max, ..Self::new(self.repeat) };
    }

    /// Reasons that another attempt can cure: routes may be old, a node may not have heard of a new
    /// topic yet, bytes may have been damaged on the way.
    fn is_worth_a_second_look(&mut self, error: &Error) -> bool {
        let rechecks_max = match error.reason {
            Some(ErrorReason::TopicNotFound | ErrorReason::PartitionNotFound) => {
                // Said by this library, it is what every node said that could be asked.
                if error.origin == Origin::Service { self.rechecks_max } else { 1 }
            }
            Some(ErrorReason::CorruptBatch | ErrorReason::CorruptLog) => 1,
            _ => 0,
        };
        self.rechecks += 1;
        self.rechecks <= rechecks_max
    }
}

/// Draws the waits: full jitter, so that clients that failed together do not come back together.
#[derive(Debug)]
pub(crate) struct Jitter {
    backoff_min: Duration,
    backoff_max: Duration,
    failover_backoff_max: Duration,
    rng: Mutex<StdRng>,
}

impl Jitter {
    pub(crate) fn new(config: &Config) -> Self {
        let seed = config.seed.unwrap_or_else(draw_seed);
        Self {
            backoff_min: config.backoff_min,
            backoff_max: config.backoff_max,
            failover_backoff_max: config.failover_backoff_max.min(config.backoff_max),
            rng: Mutex::new(StdRng::seed_from_u64(seed)),
        }
    }

    /// A wait between zero and the bound after so many earlier waits.
    pub(crate) fn draw(&self, waits: u32) -> Duration {
        self.draw_below(self.bound(waits))
    }

    /// A wait after this failure: a service that is overloaded gets more and more time, one that
    /// elects a leader does not.
    fn wait(&self, waits: u32, error: &Error) -> Duration {
        let bound = self.bound(waits);
        let is_overloaded = match error.reason {
            Some(reason) => reason == ErrorReason::Throttled,
            // A reason of a later version.
            None => error.origin == Origin::Service,
        };
        self.draw_below(if is_overloaded { bound } else { bound.min(self.failover_backoff_max) })
    }

    fn draw_below(&self, bound: Duration) -> Duration {
        // A panic elsewhere cannot have left the generator half changed.
        let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        bound.mul_f64(rng.random_range(0.0..=1.0))
    }

    fn bound(&self, waits: u32) -> Duration {
        let doubled = self.backoff_min.saturating_mul(2u32.saturating_pow(waits));
        doubled.min(self.backoff_max)
    }
}

#[cfg(test)]
mod tests {
    use helix_proto::error as wire;
    use tonic::Status;

    use super::*;

    fn jitter() -> Jitter {
        Jitter::new(&Config { seed: Some(7), ..Config::default() })
    }

    fn refused(reason: ErrorReason) -> Error {
        Error::from_status(&wire::to_status(&wire::detail(reason), "", None))
    }

    fn broken() -> Error {
        let reset = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        Error::from_status(&Status::from_error(Box::new(reset)))
    }

    #[test]
    fn bounds_double_up_to_the_last() {
        let jitter = jitter();
        let bounds: Vec<_> = (0..9).map(|waits| jitter.bound(waits).as_millis()).collect();
        assert_eq!(bounds, [10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        assert_eq!(jitter.bound(u32::MAX), Duration::from_secs(1));
    }

    #[test]
    fn waits_fill_their_range_and_repeat_with_the_seed() {
        let draws = |jitter: Jitter| (0..1000).map(|_| jitter.draw(20)).collect::<Vec<_>>();
        let waits = draws(jitter());
        assert_eq!(waits, draws(jitter()));
        assert!(waits.iter().all(|wait| *wait <= Duration::from_secs(1)));
        assert!(waits.iter().any(|wait| *wait < Duration::from_millis(50)));
        assert!(waits.iter().any(|wait| *wait > Duration::from_millis(950)));
    }

    #[test]
    fn an_open_outcome_is_repeated_only_where_that_is_safe() {
        let jitter = jitter();
        for error in [broken(), refused(ErrorReason::OutcomeUnknown), Error::timed_out("append")] {
            let next = Retries::new(Repeat::UnlessApplied).after(&error, false, &jitter);
            assert_eq!(next, Next::GiveUp, "{error}");
            let next = Retries::new(Repeat::Always).after(&error, false, &jitter);
            assert!(matches!(next, Next::Wait(_)), "{error}");
        }
    }

    #[test]
    fn what_was_surely_not_applied_is_always_repeated() {
        let jitter = jitter();
        for reason in [ErrorReason::NoLeader, ErrorReason::Throttled, ErrorReason::NotLeader] {
            let next = Retries::new(Repeat::UnlessApplied).after(&refused(reason), false, &jitter);
            assert!(matches!(next, Next::Wait(_)), "{reason:?}");
        }
    }

    #[test]
    fn refusals_are_final() {
        let jitter = jitter();
        for reason in [
            ErrorReason::Fenced,
            ErrorReason::ProducerFenced,
            ErrorReason::BatchTooLarge,
            ErrorReason::DiskFull,
            ErrorReason::ExpectedOffsetMismatch,
        ] {
            let next = Retries::new(Repeat::Always).after(&refused(reason), false, &jitter);
            assert_eq!(next, Next::GiveUp, "{reason:?}");
        }
    }

    #[test]
    fn a_missing_topic_is_looked_up_once_more() {
        let jitter = jitter();
        let mut retries = Retries::new(Repeat::Always);
        let error = Error::known(ErrorReason::TopicNotFound, "nobody knows it");
        assert!(matches!(retries.after(&error, false, &jitter), Next::Wait(_)));
        assert_eq!(retries.after(&error, false, &jitter), Next::GiveUp);
    }

    #[test]
    fn a_topic_that_only_one_node_does_not_know_is_looked_up_for_a_while() {
        let jitter = jitter();
        let mut retries = Retries::new(Repeat::Always);
        let error = refused(ErrorReason::TopicNotFound);
        for _ in 0..RECHECKS_MAX {
            assert!(matches!(retries.after(&error, false, &jitter), Next::Wait(_)));
        }
        assert_eq!(retries.after(&error, false, &jitter), Next::GiveUp);
    }

    #[test]
    fn elections_are_waited_for_in_short_steps() {
        let jitter = jitter();
        let waits = |error: Error| {
            let jitter = &jitter;
            let mut retries = Retries::new(Repeat::Always);
            let wait = move |_| match retries.after(&error, false, jitter) {
                Next::Wait(wait) => wait,
                next => panic!("{next:?}"),
            };
            (0..100).map(wait).max().unwrap()
        };
        let config = Config::default();
        let longest = waits(refused(ErrorReason::NoLeader));
        assert!(longest <= config.failover_backoff_max, "{longest:?}");
        let longest = waits(refused(ErrorReason::Throttled));
        assert!(longest > config.failover_backoff_max, "{longest:?}");
    }

    #[test]
    fn redirects_are_followed_at_once_but_not_for_ever() {
        let jitter = jitter();
        let mut retries = Retries::new(Repeat::UnlessApplied);
        let error = refused(ErrorReason::NotLeader);
        for _ in 0..REDIRECTS_MAX {
            assert_eq!(retries.after(&error, true, &jitter), Next::Redirect);
        }
        assert!(matches!(retries.after(&error, true, &jitter), Next::Wait(_)));
    }

    #[test]
    fn the_services_wait_is_honoured() {
        let wait = Duration::from_secs(5);
        let detail = wire::detail(ErrorReason::Throttled);
        let error = Error::from_status(&wire::to_status(&detail, "", Some(wait)));
        let next = Retries::new(Repeat::Always).after(&error, false, &jitter());
        assert_eq!(next, Next::Wait(wait));
    }
}
