//! Decides whether to retry a failed call, and after which wait. The caller waits.
//!
//! The rules follow the service's reasons, not the gRPC codes.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use helix_proto::log::v1::ErrorReason;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::call_spec::Repeat;
use crate::config::{Config, draw_seed};
use crate::error::{Error, Origin};

/// Consecutive leader hints followed without a wait.
///
/// Prevents a tight loop between two nodes that name each other as leader.
const REDIRECTS_MAX: u32 = 3;

/// Retries after a node reports an unknown topic: a new topic takes a moment to reach all nodes.
const RECHECKS_MAX: u32 = 20;

/// Limit instead of [`RECHECKS_MAX`] for calls that use another node for each retry.
const ANY_NODE_RECHECKS_MAX: u32 = 2;

/// Retries after a node refuses the token.
const TOKEN_RECHECKS_MAX: u32 = 3;

/// Decision after a failed attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RetryDecision {
    /// Return the error to the caller.
    GiveUp,
    /// Retry at once at the leader that the hint names.
    Redirect,
    /// Retry after a wait of at least this duration, with refreshed routes.
    Wait(Duration),
}

/// Counts the retries of one call and decides after each failure.
#[derive(Debug)]
pub(crate) struct Retries {
    repeat: Repeat,
    /// Waits since the last success.
    waits: u32,
    redirects: u32,
    /// Retries so far after reasons that are otherwise final.
    rechecks: u32,
    /// Limit of `rechecks`.
    rechecks_max: u32,
}

impl Retries {
    pub(crate) fn new(repeat: Repeat) -> Self {
        Self { repeat, waits: 0, redirects: 0, rechecks: 0, rechecks_max: RECHECKS_MAX }
    }

    /// Lowers the limit of rechecks for calls that use another node for each retry.
    ///
    /// A few independent nodes suffice to conclude that a topic does not exist.
    pub(crate) fn limit_rechecks(&mut self) {
        self.rechecks_max = ANY_NODE_RECHECKS_MAX;
    }

    /// Takes the first report of an unknown topic for final.
    pub(crate) fn skip_rechecks(&mut self) {
        self.rechecks_max = 0;
    }

    /// Decides after a failure. `is_redirected` means that it named a leader not yet tried.
    pub(crate) fn after(
        &mut self,
        error: &Error,
        is_redirected: bool,
        jitter: &Jitter,
    ) -> RetryDecision {
        if error.may_have_applied && self.repeat == Repeat::UnlessApplied {
            return RetryDecision::GiveUp;
        }
        if !error.retryable && !self.can_recheck(error) {
            return RetryDecision::GiveUp;
        }
        if is_redirected && self.redirects < REDIRECTS_MAX {
            self.redirects += 1;
            return RetryDecision::Redirect;
        }
        self.redirects = 0;
        let wait = jitter.wait(self.waits, error).max(error.retry_after.unwrap_or_default());
        self.waits = self.waits.saturating_add(1);
        RetryDecision::Wait(wait)
    }

    /// Resets the counters after a success.
    pub(crate) fn on_progress(&mut self) {
        *self = Self { rechecks_max: self.rechecks_max, ..Self::new(self.repeat) };
    }

    /// Returns true if a final reason may not hold for another attempt.
    ///
    /// Routes may be stale, a node may not know a new topic yet, bytes may be corrupted in transit.
    fn can_recheck(&mut self, error: &Error) -> bool {
        let rechecks_max = match error.reason {
            Some(ErrorReason::TopicNotFound | ErrorReason::PartitionNotFound) => {
                // An error of this library summarizes the responses of all reachable nodes.
                if error.origin == Origin::Service { self.rechecks_max } else { 1 }
            }
            Some(ErrorReason::CorruptBatch | ErrorReason::CorruptLog) => 1,
            // A new token takes a moment to reach all nodes; a supplied one may be newer by now.
            Some(ErrorReason::Unauthenticated) => TOKEN_RECHECKS_MAX,
            _ => 0,
        };
        self.rechecks += 1;
        self.rechecks <= rechecks_max
    }
}

/// Draws waits with full jitter, so that clients that failed together do not retry together.
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

    /// Returns a random wait between zero and the bound after `waits` earlier waits.
    pub(crate) fn draw(&self, waits: u32) -> Duration {
        self.draw_below(self.bound(waits))
    }

    /// Returns a random index below `count`, or 0 if that is 0.
    pub(crate) fn draw_index(&self, count: u32) -> u32 {
        let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        rng.random_range(0..count.max(1))
    }

    /// Returns the wait after a failure.
    ///
    /// The bound grows for an overloaded service; during an election it stays short.
    fn wait(&self, waits: u32, error: &Error) -> Duration {
        let bound = self.bound(waits);
        let is_overloaded = match error.reason {
            Some(reason) => reason == ErrorReason::Throttled,
            // An unknown reason of a later version counts as overload.
            None => error.origin == Origin::Service,
        };
        self.draw_below(if is_overloaded { bound } else { bound.min(self.failover_backoff_max) })
    }

    fn draw_below(&self, bound: Duration) -> Duration {
        // A panic elsewhere cannot have left the generator inconsistent.
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

    fn rejected(reason: ErrorReason) -> Error {
        Error::from_status(&wire::to_status(&wire::detail(reason), "", None))
    }

    fn broken() -> Error {
        let reset = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        Error::from_status(&Status::from_error(Box::new(reset)))
    }

    #[test]
    fn backoff_bound_doubles_up_to_the_maximum() {
        let jitter = jitter();
        let bounds: Vec<_> = (0..9).map(|waits| jitter.bound(waits).as_millis()).collect();
        assert_eq!(bounds, [10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        assert_eq!(jitter.bound(u32::MAX), Duration::from_secs(1));
    }

    #[test]
    fn waits_cover_their_range_and_repeat_with_the_seed() {
        let draws = |jitter: Jitter| (0..1000).map(|_| jitter.draw(20)).collect::<Vec<_>>();
        let waits = draws(jitter());
        assert_eq!(waits, draws(jitter()));
        assert!(waits.iter().all(|wait| *wait <= Duration::from_secs(1)));
        assert!(waits.iter().any(|wait| *wait < Duration::from_millis(50)));
        assert!(waits.iter().any(|wait| *wait > Duration::from_millis(950)));
    }

    #[test]
    fn repeats_an_unknown_outcome_only_if_safe() {
        let jitter = jitter();
        for error in [broken(), rejected(ErrorReason::OutcomeUnknown), Error::timed_out("append")] {
            let next = Retries::new(Repeat::UnlessApplied).after(&error, false, &jitter);
            assert_eq!(next, RetryDecision::GiveUp, "{error}");
            let next = Retries::new(Repeat::Always).after(&error, false, &jitter);
            assert!(matches!(next, RetryDecision::Wait(_)), "{error}");
        }
    }

    #[test]
    fn repeats_what_was_not_applied() {
        let jitter = jitter();
        for reason in [ErrorReason::NoLeader, ErrorReason::Throttled, ErrorReason::NotLeader] {
            let next = Retries::new(Repeat::UnlessApplied).after(&rejected(reason), false, &jitter);
            assert!(matches!(next, RetryDecision::Wait(_)), "{reason:?}");
        }
    }

    #[test]
    fn rejections_are_final() {
        let jitter = jitter();
        for reason in [
            ErrorReason::Fenced,
            ErrorReason::ProducerFenced,
            ErrorReason::ProducerNotOwned,
            ErrorReason::SequenceReused,
            ErrorReason::BatchTooLarge,
            ErrorReason::DiskFull,
            ErrorReason::ExpectedOffsetMismatch,
        ] {
            let next = Retries::new(Repeat::Always).after(&rejected(reason), false, &jitter);
            assert_eq!(next, RetryDecision::GiveUp, "{reason:?}");
        }
    }

    #[test]
    fn rechecks_a_missing_topic_once() {
        let jitter = jitter();
        let mut retries = Retries::new(Repeat::Always);
        let error = Error::known(ErrorReason::TopicNotFound, "no node knows it");
        assert!(matches!(retries.after(&error, false, &jitter), RetryDecision::Wait(_)));
        assert_eq!(retries.after(&error, false, &jitter), RetryDecision::GiveUp);
    }

    #[test]
    fn rechecks_longer_if_a_single_node_does_not_know_a_topic() {
        let jitter = jitter();
        let mut retries = Retries::new(Repeat::Always);
        let error = rejected(ErrorReason::TopicNotFound);
        for _ in 0..RECHECKS_MAX {
            assert!(matches!(retries.after(&error, false, &jitter), RetryDecision::Wait(_)));
        }
        assert_eq!(retries.after(&error, false, &jitter), RetryDecision::GiveUp);
    }

    #[test]
    fn waits_are_short_during_elections() {
        let jitter = jitter();
        let waits = |error: Error| {
            let jitter = &jitter;
            let mut retries = Retries::new(Repeat::Always);
            let wait = move |_| match retries.after(&error, false, jitter) {
                RetryDecision::Wait(wait) => wait,
                next => panic!("{next:?}"),
            };
            (0..100).map(wait).max().unwrap()
        };
        let config = Config::default();
        let longest = waits(rejected(ErrorReason::NoLeader));
        assert!(longest <= config.failover_backoff_max, "{longest:?}");
        let longest = waits(rejected(ErrorReason::Throttled));
        assert!(longest > config.failover_backoff_max, "{longest:?}");
    }

    #[test]
    fn follows_a_limited_number_of_redirects_at_once() {
        let jitter = jitter();
        let mut retries = Retries::new(Repeat::UnlessApplied);
        let error = rejected(ErrorReason::NotLeader);
        for _ in 0..REDIRECTS_MAX {
            assert_eq!(retries.after(&error, true, &jitter), RetryDecision::Redirect);
        }
        assert!(matches!(retries.after(&error, true, &jitter), RetryDecision::Wait(_)));
    }

    #[test]
    fn honours_the_retry_after_of_the_service() {
        let wait = Duration::from_secs(5);
        let detail = wire::detail(ErrorReason::Throttled);
        let error = Error::from_status(&wire::to_status(&detail, "", Some(wait)));
        let next = Retries::new(Repeat::Always).after(&error, false, &jitter());
        assert_eq!(next, RetryDecision::Wait(wait));
    }
}
