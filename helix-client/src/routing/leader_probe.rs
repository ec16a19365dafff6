//! Detects that a silent leader has been replaced.
//!
//! The connection to a silent leader may stay open, for example if the process is stopped or the
//! leader is partitioned from the other nodes.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::{Route, RouteQuery, Routing};

/// Probe interval where a response is expected.
const EXPECTED_PERIOD: Duration = Duration::from_millis(100);

/// Longest probe interval where silence is normal; the interval grows by half with each probe.
const PATIENT_PERIOD_MAX: Duration = Duration::from_secs(5);

/// Schedule of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProbePace {
    /// A response is expected: probe soon and often.
    Expected,
    /// Silence is normal: probe late and ever more rarely.
    Patient,
}

/// Asks the other nodes, while a leader is silent, whether it still leads these shards.
///
/// Sends nothing unless the leader is silent and there is another node. All probes of a client
/// share query rounds: a thousand silent calls query no more often than one.
#[derive(Debug)]
pub(crate) struct LeaderProbe<'a> {
    routing: &'a Routing,
    topic: &'a str,
    shard_ids: &'a [u32],
    route: &'a Route,
    pace: ProbePace,
    period: Duration,
    due: Instant,
    /// Start of the silence.
    silent_since: Instant,
}

impl<'a> LeaderProbe<'a> {
    /// Creates the probe of a call over `route` about these shards.
    pub(crate) fn new(
        routing: &'a Routing,
        topic: &'a str,
        shard_ids: &'a [u32],
        route: &'a Route,
        pace: ProbePace,
    ) -> Self {
        let (period, now) = (Duration::ZERO, Instant::now());
        let mut probe =
            Self { routing, topic, shard_ids, route, pace, period, due: now, silent_since: now };
        probe.on_progress_at(now);
        probe
    }

    /// Records a message of the leader, which restarts the silence.
    pub(crate) fn on_progress(&mut self) {
        self.on_progress_at(Instant::now());
    }

    /// Like [`LeaderProbe::on_progress`], at an earlier time.
    pub(crate) fn on_progress_at(&mut self, at: Instant) {
        let stall_after = self.routing.config.stall_after;
        self.period = match self.pace {
            // A node that did not respond to another call gets less time.
            ProbePace::Expected
                if self.routing.table().is_silent(self.route.connection.address()) =>
            {
                EXPECTED_PERIOD.min(stall_after)
            }
            ProbePace::Expected => stall_after,
            ProbePace::Patient => 2 * stall_after,
        };
        self.due = at + self.period;
        self.silent_since = at;
    }

    /// Returns the start of the silence.
    pub(crate) fn silent_since(&self) -> Instant {
        self.silent_since
    }

    /// Returns true if a silence since this time is too short for a probe.
    pub(crate) fn is_early(&self, since: Instant) -> bool {
        since + self.period > Instant::now()
    }

    /// Waits until the next probe is due. Cancel safe.
    pub(crate) async fn due(&self) {
        sleep_until(self.due).await;
    }

    /// Probes once. Returns true if the leader has been replaced.
    ///
    /// Cancel safe: a cancelled probe counts as one without a result.
    pub(crate) async fn check(&mut self) -> bool {
        self.period = match self.pace {
            ProbePace::Expected => EXPECTED_PERIOD,
            ProbePace::Patient => (3 * self.period / 2).min(PATIENT_PERIOD_MAX),
        };
        self.due = Instant::now() + self.period;
        let Self { routing, topic, shard_ids, route, .. } = *self;
        if routing.table().has_moved(shard_ids, route) {
            return true;
        }
        let age_max = match self.pace {
            ProbePace::Expected => EXPECTED_PERIOD,
            ProbePace::Patient => 2 * EXPECTED_PERIOD,
        };
        if routing.has_others(route.connection.address()) {
            routing
                .probe(RouteQuery::LeaderChange { topic, shard_ids, from: route }, age_max)
                .await;
        }
        routing.table().has_moved(shard_ids, route)
    }

    /// Waits until the leader has been replaced. Cancel safe.
    pub(crate) async fn replaced(&mut self) {
        loop {
            self.due().await;
            if self.check().await {
                return;
            }
        }
    }
}
