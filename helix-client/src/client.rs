//! The handle that everything else hangs on, and the two loops that every call goes through:
//! to the leader of a partition, or to any node. Each attempt and each call has a deadline.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};
use tonic::{Response, Status};

use crate::config::Config;
use crate::connection::Connection;
use crate::error::{Error, Result};
use crate::retry::{Jitter, Next, Repeat, Retries};
use crate::routing::{Lookout, Pace, Route, Routing};

/// How long a node may take at first for a change that any node passes on, before another one is
/// asked. Doubles with each.
const CHANGE_PATIENCE: Duration = Duration::from_secs(2);

/// A client of one cluster. Cheap to clone; clones share connections and routes.
#[derive(Debug, Clone)]
pub struct Client {
    pub(crate) shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) routing: Routing,
    pub(crate) jitter: Jitter,
}

impl Client {
    /// A client that connects when it is first used.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if there is no address to begin with.
    pub fn new(config: Config) -> Result<Self> {
        let shared =
            Shared { routing: Routing::new(config.clone())?, jitter: Jitter::new(&config), config };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// A client that has spoken to a node: what is wrong with an address shows here.
    ///
    /// # Errors
    /// As [`Client::new`], or why no node could be reached within the request timeout.
    pub async fn connect(config: Config) -> Result<Self> {
        let client = Self::new(config)?;
        client.admin().metadata(&[]).await?;
        Ok(client)
    }

    /// The settings that it was made with.
    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// The way to the leader of a partition, for callers that speak to it on their own.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`, `PARTITION_NOT_FOUND`, `NO_LEADER`, or why no node could be asked.
    pub async fn route(&self, topic: &str, partition: u32) -> Result<Route> {
        self.shared.routing.leader(topic, partition).await
    }

    /// Number of partitions of a topic.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`, or why no node could be asked.
    pub async fn partition_count(&self, topic: &str) -> Result<u32> {
        self.shared.routing.partition_count(topic).await
    }

    /// Calls the leader of a partition until it succeeds, fails for good, or the deadline passes.
    pub(crate) async fn call_leader<T, F, Fut>(
        &self,
        place: (&str, u32),
        call: Call,
        attempt: F,
    ) -> Result<T>
    where
        F: Fn(Connection) -> Fut,
        Fut: Future<Output = std::result::Result<Response<T>, Status>>,
    {
        let mut series = Series::new(&self.shared, call);
        loop {
            let error = match series.route(place).await {
                Ok(route) => {
                    let lookout = series.lookout(place.0, &route);
                    let answer = attempt(route.connection.clone());
                    match series.attempt_while(lookout, answer).await {
                        Ok(answer) => return Ok(answer),
                        Err(error) => series.judge(error, Some(&route))?,
                    }
                }
                Err(error) => series.judge(error, None)?,
            };
            series.pause(error).await?;
        }
    }

    /// Calls one node after the other until one answers, the failure is final, or the deadline
    /// passes. Where a second copy does no harm, a node that keeps silent is left for the next one,
    /// with more patience each time.
    pub(crate) async fn call_any<T, F, Fut>(&self, call: Call, attempt: F) -> Result<T>
    where
        F: Fn(Connection) -> Fut,
        Fut: Future<Output = std::result::Result<Response<T>, Status>>,
    {
        let routing = &self.shared.routing;
        let mut series = Series::new(&self.shared, call);
        series.retries.ask_few();
        let mut patience = match call.repeat {
            Repeat::Read => self.shared.config.stall_after,
            Repeat::Always | Repeat::UnlessApplied => CHANGE_PATIENCE,
        };
        let mut tried = Vec::new();
        // Ignored: the call itself is told of the deadline.
        let _ = timeout_at(series.deadline, routing.meet()).await;
        loop {
            let node = routing.other_than(&mut tried)?;
            let is_alone = !routing.has_others(node.address());
            let limit = match call.repeat {
                Repeat::UnlessApplied => Duration::MAX,
                _ if is_alone => Duration::MAX,
                Repeat::Read | Repeat::Always => patience,
            };
            let error = match series.attempt_within(limit, attempt(node.clone())).await {
                Ok(answer) => {
                    routing.on_answer(&node);
                    return Ok(answer);
                }
                Err(error) => error,
            };
            routing.on_silence(&node, &error);
            patience = patience.saturating_mul(2);
            let error = series.judge(error, None)?;
            series.pause(error).await?;
        }
    }
}

/// What a call is, beyond its request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    /// For messages.
    pub(crate) name: &'static str,
    pub(crate) repeat: Repeat,
    /// Time that the service may take on purpose, on top of the timeouts.
    pub(crate) wait: Duration,
    /// When the caller began to wait: the deadline counts from there.
    pub(crate) since: Instant,
}

impl Call {
    pub(crate) fn new(name: &'static str, repeat: Repeat) -> Self {
        Self { name, repeat, wait: Duration::ZERO, since: Instant::now() }
    }
}

/// The attempts of one call.
pub(crate) struct Series<'a> {
    shared: &'a Shared,
    call: Call,
    deadline: Instant,
    retries: Retries,
    /// Whether an attempt has failed without saying that it was not applied: then the call as a
    /// whole may have been, whatever later attempts say.
    may_have_applied: bool,
    wait: Duration,
}

impl<'a> Series<'a> {
    pub(crate) fn new(shared: &'a Shared, call: Call) -> Self {
        Self {
            shared,
            call,
            deadline: call.since + shared.config.request_timeout + call.wait,
            retries: Retries::new(call.repeat),
            may_have_applied: false,
            wait: Duration::ZERO,
        }
    }

    pub(crate) async fn route(&self, (topic, partition): (&str, u32)) -> Result<Route> {
        self.within(self.shared.routing.leader(topic, partition)).await
    }

    /// Finds a way within the deadline.
    pub(crate) async fn within(&self, way: impl Future<Output = Result<Route>>) -> Result<Route> {
        match timeout_at(self.deadline, way).await {
            // Asking for the way has sent nothing of the call itself.
            Ok(route) => route.map_err(|error| error.with_may_have_applied(false)),
            Err(_) => Err(Error::timed_out("metadata").with_may_have_applied(false)),
        }
    }

    pub(crate) async fn attempt<T>(
        &self,
        attempt: impl Future<Output = std::result::Result<Response<T>, Status>>,
    ) -> Result<T> {
        self.attempt_within(Duration::MAX, attempt).await
    }

    /// As [`Series::attempt`], within `limit` if that is less than the attempt timeout.
    async fn attempt_within<T>(
        &self,
        limit: Duration,
        attempt: impl Future<Output = std::result::Result<Response<T>, Status>>,
    ) -> Result<T> {
        let limit = limit.min(self.shared.config.attempt_timeout) + self.call.wait;
        match timeout_at(self.deadline.min(Instant::now() + limit), attempt).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(Error::from_status(&status)),
            Err(_) => Err(Error::timed_out(self.call.name)),
        }
    }

    /// As [`Series::attempt`], given up as soon as the node that is asked has been replaced.
    pub(crate) async fn attempt_while<T>(
        &self,
        mut lookout: Lookout<'_>,
        attempt: impl Future<Output = std::result::Result<Response<T>, Status>>,
    ) -> Result<T> {
        tokio::select! {
            biased;
            result = self.attempt(attempt) => result,
            () = lookout.moved() => Err(Error::superseded(self.call.name)),
        }
    }

    fn lookout<'b>(&'b self, topic: &'b str, route: &'b Route) -> Lookout<'b> {
        let pace = if self.call.wait.is_zero() { Pace::Due } else { Pace::Patient };
        let shard_ids = std::slice::from_ref(&route.shard_id);
        Lookout::new(&self.shared.routing, topic, shard_ids, route, pace)
    }

    /// Notes a failure and decides how long to wait: the error comes back as `Err` if it is final.
    pub(crate) fn judge(&mut self, error: Error, route: Option<&Route>) -> Result<Error> {
        self.judge_with(error, route, false)
    }

    /// As [`Series::judge`]. With `has_others` another node may do better at once.
    pub(crate) fn judge_with(
        &mut self,
        error: Error,
        route: Option<&Route>,
        has_others: bool,
    ) -> Result<Error> {
        let has_moved = route.is_some_and(|route| self.shared.routing.on_failure(route, &error));
        let is_redirected = has_moved || has_others;
        let next = self.retries.after(&error, is_redirected, &self.shared.jitter);
        self.may_have_applied |= error.may_have_applied;
        self.wait = match next {
            Next::GiveUp => return Err(self.conclude(error)),
            Next::Redirect => Duration::ZERO,
            Next::Wait(wait) => wait,
        };
        Ok(error)
    }

    /// Waits as decided. Gives up at once if the deadline is nearer than the end of the wait.
    pub(crate) async fn pause(&self, error: Error) -> Result<()> {
        let end = Instant::now() + self.wait;
        if end >= self.deadline {
            return Err(self.conclude(error));
        }
        if !self.wait.is_zero() {
            sleep_until(end).await;
        }
        Ok(())
    }

    fn conclude(&self, error: Error) -> Error {
        let may_have_applied =
            self.call.repeat != Repeat::Read && (self.may_have_applied || error.may_have_applied);
        error.with_may_have_applied(may_have_applied)
    }
}
