//! Highest rate that producers and consumers sustain, for a workload without a rate.

use anyhow::{Context, Result};
use helix_client::exit::Exit;

use crate::exit::BenchFailure;
use crate::format::grouped;
use crate::rate_limit::{RateSearch, STEPS_MAX};
use crate::{interrupt, progress};

/// First rate of the search, in messages per second.
pub(super) const START_RATE: f64 = 10_000.0;
/// Share of a trial's messages that may be late at its end.
const LATE_SHARE_MAX: f64 = 0.02;
/// Messages of this many seconds may be late in a short trial.
const LATE_SECONDS_MIN: f64 = 0.05;

/// Result of a load at one rate, at its end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RateTrial {
    /// Messages per second over all producers.
    pub(super) rate: f64,
    pub(super) seconds: f64,
    /// Messages whose append failed.
    pub(super) failed: u64,
    /// Messages that were due and not sent.
    pub(super) missed: u64,
    /// Messages that were sent and not acked yet.
    pub(super) unacked: u64,
    /// Messages that were acked and not delivered yet, for each subscription.
    pub(super) undelivered: u64,
}

impl RateTrial {
    /// Returns the reason why the rate is too high.
    fn reason(&self) -> Option<&'static str> {
        let late_max = self.rate * (self.seconds * LATE_SHARE_MAX).max(LATE_SECONDS_MIN);
        if self.failed > 0 {
            Some("errors")
        } else if (self.missed + self.unacked) as f64 > late_max {
            Some("rate not reached")
        } else if self.undelivered as f64 > late_max {
            Some("consumers fall behind")
        } else {
            None
        }
    }
}

/// Returns the highest sustained rate. Doubles the rate first, and then bisects. `trial` makes one
/// trial.
///
/// # Errors
/// A trial could not be made, or not even the lowest rate is sustained.
pub(super) async fn find_rate(
    start: f64,
    mut trial: impl AsyncFnMut(f64) -> Result<RateTrial>,
) -> Result<f64> {
    let mut search = RateSearch::new(start);
    let mut steps = 0;
    while let Some(rate) = search.next()
        && steps < STEPS_MAX
    {
        steps += 1;
        let reason = trial(rate).await?.reason();
        if interrupt::is_requested() {
            let what = "interrupted before the highest rate was found";
            return Err(BenchFailure::new(Exit::Interrupted, what).into());
        }
        progress::step(&format!(
            "trial {steps}: {} messages/s, {}",
            grouped(rate.round()),
            reason.unwrap_or("sustained")
        ));
        search.note(rate, reason.is_none());
    }
    search.within.context("no rate from 1 message/s is sustained; check the cluster's health")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// System whose producers and consumers have limits, in messages per second.
    struct SimulatedSystem {
        publish_max: f64,
        consume_max: f64,
        fails_above: f64,
    }

    impl SimulatedSystem {
        fn trial(&self, rate: f64) -> RateTrial {
            let seconds = 5.0;
            let published = rate.min(self.publish_max);
            let behind = (published - self.consume_max).max(0.0) * seconds;
            RateTrial {
                rate,
                seconds,
                failed: u64::from(rate > self.fails_above),
                missed: ((rate - published) * seconds) as u64,
                // Two milliseconds are always on their way.
                unacked: (published * 0.002) as u64,
                undelivered: (behind + published * 0.002) as u64,
            }
        }
    }

    async fn found(system: SimulatedSystem) -> Result<f64> {
        find_rate(START_RATE, async |rate| Ok(system.trial(rate))).await
    }

    #[tokio::test]
    async fn search_finds_the_limit_of_the_slowest_part() {
        let unlimited = f64::INFINITY;
        for (publish_max, consume_max, fails_above, limit) in [
            (200_000.0, unlimited, unlimited, 200_000.0),
            (200_000.0, 50_000.0, unlimited, 50_000.0),
            (200_000.0, 50_000.0, 30_000.0, 30_000.0),
            (300.0, unlimited, unlimited, 300.0),
        ] {
            let system = SimulatedSystem { publish_max, consume_max, fails_above };
            let rate = found(system).await.unwrap();
            // A trial tolerates a small lag, so that a rate slightly above the limit may pass.
            assert!((0.95..1.03).contains(&(rate / limit)), "found {rate} for {limit}");
        }
    }

    #[tokio::test]
    async fn search_without_any_rate_is_an_error() {
        let system =
            SimulatedSystem { publish_max: 1e6, consume_max: 1e6, fails_above: f64::NEG_INFINITY };
        let error = found(system).await.unwrap_err().to_string();
        assert!(error.contains("no rate"), "{error}");
    }
}
