//! Notices that the node that is waited for has been replaced: its connection may live on, as that
//! of a process that is stopped or of a leader that is cut off from the others does.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::{Route, Routing, Wanted};

/// Time between two looks where an answer is due.
const DUE_PERIOD: Duration = Duration::from_millis(100);

/// Longest time between two looks where silence is normal: the period grows by half up to this.
const PATIENT_PERIOD_MAX: Duration = Duration::from_secs(5);

/// How soon one looks, and how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// An answer is due.
    Due,
    /// There may be nothing to say.
    Patient,
}

/// Asks the other nodes, while one keeps silent, whether it still leads what it was asked for.
/// Without a silence, and where there is no other node, it does nothing. All of a client's lookouts
/// share their looks: a thousand silent calls ask no more often than one.
#[derive(Debug)]
pub(crate) struct Lookout<'a> {
    routing: &'a Routing,
    topic: &'a str,
    shard_ids: &'a [u32],
    route: &'a Route,
    pace: Pace,
    period: Duration,
    due: Instant,
    /// When the silence began.
    since: Instant,
}

impl<'a> Lookout<'a> {
    /// Looks out for a call about these shards to the node that `route` leads to.
    pub(crate) fn new(
        routing: &'a Routing,
        topic: &'a str,
        shard_ids: &'a [u32],
        route: &'a Route,
        pace: Pace,
    ) -> Self {
        let (period, now) = (Duration::ZERO, Instant::now());
        let mut lookout =
            Self { routing, topic, shard_ids, route, pace, period, due: now, since: now };
        lookout.on_progress_at(now);
        lookout
    }

    /// The node has said something: the silence begins anew.
    pub(crate) fn on_progress(&mut self) {
        self.on_progress_at(Instant::now());
    }

    /// As [`Lookout::on_progress`], at an earlier time.
    pub(crate) fn on_progress_at(&mut self, at: Instant) {
        let stall_after = self.routing.config.stall_after;
        self.period = match self.pace {
            // A node that has failed to answer something else gets less time.
            Pace::Due if self.routing.table().is_silent(self.route.connection.address()) => {
                DUE_PERIOD.min(stall_after)
            }
            Pace::Due => stall_after,
            Pace::Patient => 2 * stall_after,
        };
        self.due = at + self.period;
        self.since = at;
    }

    /// When the silence began.
    pub(crate) fn since(&self) -> Instant {
        self.since
    }

    /// Whether the silence has not lasted long enough, if it is counted from here.
    pub(crate) fn is_early(&self, since: Instant) -> bool {
        since + self.period > Instant::now()
    }

    /// Waits until it is time for a look. Cancel safe.
    pub(crate) async fn due(&self) {
        sleep_until(self.due).await;
    }

    /// Takes a look. True if the node has been replaced. Cancel safe: a look that is not finished
    /// counts as one that has found nothing.
    pub(crate) async fn look(&mut self) -> bool {
        self.period = match self.pace {
            Pace::Due => DUE_PERIOD,
            Pace::Patient => (3 * self.period / 2).min(PATIENT_PERIOD_MAX),
        };
        self.due = Instant::now() + self.period;
        let Self { routing, topic, shard_ids, route, .. } = *self;
        if routing.table().has_moved(shard_ids, route) {
            return true;
        }
        let age_max = match self.pace {
            Pace::Due => DUE_PERIOD,
            Pace::Patient => 2 * DUE_PERIOD,
        };
        if routing.has_others(route.connection.address()) {
            routing.look(Wanted::Move { topic, shard_ids, from: route }, age_max).await;
        }
        routing.table().has_moved(shard_ids, route)
    }

    /// Waits until the node has been replaced. Cancel safe.
    pub(crate) async fn moved(&mut self) {
        loop {
            self.due().await;
            if self.look().await {
                return;
            }
        }
    }
}
