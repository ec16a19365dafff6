//! When to try again, and after how long. Decides; the waiting is done by the caller.
//! The rules follow the reasons that the service gives, not the gRPC codes.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use helix_proto::log::v1::ErrorReason;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::config::{Config, draw_seed};
use crate::error::Error;

/// Times in a row that a hint is followed without a wait. Two nodes that point at each other must
/// not be asked in a tight loop.
const REDIRECTS_MAX: u32 = 3;

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
    /// Whether this call has used up the one retry that goes with some reasons.
    has_rechecked: bool,
}

impl Retries {
    pub(crate) fn new(repeat: Repeat) -> Self {
        Self { repeat, waits: 0, redirects: 0, has_rechecked: false }
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
        let wait = jitter.draw(self.waits).max(error.retry_after.unwrap_or_default());
        self.waits = self.waits.saturating_add(1);
        Next::Wait(wait)
    }

    /// A success: the next failure begins a new series.
    pub(crate) fn on_progress(&mut self) {
        *self = Self::new(self.repeat);
    }

    /// Reasons that one more attempt can cure: routes may be old, bytes may have been damaged on
    /// the way.
    fn is_worth_a_second_look(&mut self, error: &Error) -> bool {
        let is_curable = matches!(
            error.reason,
            Some(
                ErrorReason::TopicNotFound
                    | ErrorReason::PartitionNotFound
                    | ErrorReason::CorruptBatch
                    | ErrorReason::CorruptLog
            )
        );
        is_curable && !std::mem::replace(&mut self.has_rechecked, true)
    }
}

/// Draws the waits: full jitter, so that clients that failed together do not come back together.
#[derive(Debug)]
pub(crate) struct Jitter {
    backoff_min: Duration,
    backoff_max: Duration,
    rng: Mutex<StdRng>,
}

impl Jitter {
    pub(crate) fn new(config: &Config) -> Self {
        let seed = config.seed.unwrap_or_else(draw_seed);
        Self {
            backoff_min: config.backoff_min,
            backoff_max: config.backoff_max,
            rng: Mutex::new(StdRng::seed_from_u64(seed)),
        }
    }

    /// A wait between zero and the bound after so many earlier waits.
    pub(crate) fn draw(&self, waits: u32) -> Duration {
        let bound = self.bound(waits);
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
        let error = refused(ErrorReason::TopicNotFound);
        assert!(matches!(retries.after(&error, false, &jitter), Next::Wait(_)));
        assert_eq!(retries.after(&error, false, &jitter), Next::GiveUp);
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
