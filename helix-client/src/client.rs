//! The client handle, and the two retry loops of its calls.
//!
//! A call goes to a partition's leader or to any node. Each attempt and each call has a deadline.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use helix_proto::log::v1::ErrorReason;
use tokio::time::{Instant, sleep_until, timeout_at};
use tonic::{Response, Status};

use crate::call_spec::{CallSpec, Repeat};
use crate::config::Config;
use crate::connection::Connection;
use crate::coordinator::Coordinators;
use crate::error::{Error, Result};
use crate::pending::PendingGuard;
use crate::retry::{Jitter, Retries, RetryDecision};
use crate::routing::{LeaderProbe, ProbePace, Route, Routing};

/// First timeout of an attempt at a change that any node forwards; doubles with each attempt.
const CHANGE_ATTEMPT_TIMEOUT: Duration = Duration::from_secs(2);

/// A client of one cluster. Cheap to clone; clones share connections and routes.
#[derive(Debug, Clone)]
pub struct Client {
    pub(crate) shared: Arc<ClientCore>,
}

#[derive(Debug)]
pub(crate) struct ClientCore {
    pub(crate) config: Config,
    pub(crate) routing: Routing,
    pub(crate) coordinators: Coordinators,
    pub(crate) jitter: Jitter,
}

impl Client {
    /// Creates a client that connects on first use.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if `config` has no endpoint or a malformed one.
    pub fn new(config: Config) -> Result<Self> {
        let shared = ClientCore {
            routing: Routing::new(config.clone())?,
            coordinators: Coordinators::default(),
            jitter: Jitter::new(&config),
            config,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Creates a client and fetches metadata from a node, which detects wrong addresses early.
    ///
    /// # Errors
    /// As [`Client::new`], or the last failure if no node responds within the request timeout.
    pub async fn connect(config: Config) -> Result<Self> {
        let client = Self::new(config)?;
        // No topic has this name, so the size of the response does not depend on the topics.
        client.admin().metadata(&[""]).await?;
        Ok(client)
    }

    /// Returns the settings of this client.
    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// Returns a connection to a partition's leader, for callers that use the generated clients.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`, `PARTITION_NOT_FOUND`; `NO_LEADER` if none is elected yet; or the last
    /// failure if no node responds.
    pub async fn route(&self, topic: &str, partition: u32) -> Result<Route> {
        self.shared.routing.leader(topic, partition).await
    }

    /// Returns the number of partitions of a topic.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`, or the last failure if no node responds.
    pub async fn partition_count(&self, topic: &str) -> Result<u32> {
        self.shared.routing.partition_count(topic).await
    }

    /// Calls a partition's leader until it succeeds, fails permanently, or the deadline passes.
    pub(crate) async fn call_leader<T, F, Fut>(
        &self,
        partition: (&str, u32),
        call: CallSpec,
        attempt: F,
    ) -> Result<T>
    where
        F: Fn(&Route) -> Fut,
        Fut: Future<Output = std::result::Result<Response<T>, Status>>,
    {
        let mut attempts = CallAttempts::new(&self.shared, call);
        loop {
            let error = match attempts.route(partition).await {
                Ok(route) => {
                    let probe = attempts.probe(partition.0, &route);
                    let response = attempt(&route);
                    match attempts.attempt_while(probe, response).await {
                        Ok(response) => return Ok(response),
                        Err(error) => attempts.judge(error, Some(&route))?,
                    }
                }
                Err(error) => attempts.judge(error, None)?,
            };
            attempts.pause(error).await?;
        }
    }

    /// Calls one node after the other until one succeeds, the failure is final, or the deadline
    /// passes.
    ///
    /// If a call can be repeated safely, a silent node is abandoned after a timeout that doubles
    /// with each attempt.
    pub(crate) async fn call_any<T, F, Fut>(&self, call: CallSpec, attempt: F) -> Result<T>
    where
        F: Fn(Connection) -> Fut,
        Fut: Future<Output = std::result::Result<Response<T>, Status>>,
    {
        let routing = &self.shared.routing;
        let mut attempts = CallAttempts::new(&self.shared, call);
        attempts.retries.limit_rechecks();
        let mut attempt_timeout = attempts.first_timeout();
        let mut tried = Vec::new();
        attempts.ensure_contact().await;
        loop {
            let node = routing.next_untried(&mut tried)?;
            let limit = attempts.limit_at(&node, attempt_timeout);
            let error = match attempts.attempt_within(limit, attempt(node.clone())).await {
                Ok(response) => {
                    routing.on_response(&node);
                    return Ok(response);
                }
                Err(error) => error,
            };
            routing.on_silence(&node, &error);
            attempt_timeout = attempt_timeout.saturating_mul(2);
            let error = attempts.judge(error, None)?;
            attempts.pause(error).await?;
        }
    }
}

/// The attempts of one call, within its deadline.
pub(crate) struct CallAttempts<'a> {
    shared: &'a ClientCore,
    call: CallSpec,
    deadline: Instant,
    retries: Retries,
    /// True once the outcome of an attempt was unknown: then the call as a whole may have been
    /// applied, regardless of later attempts.
    may_have_applied: bool,
    last_failure: Option<Error>,
    /// First failure that the service explained.
    explained: Option<Error>,
    wait: Duration,
    pending: Option<PendingGuard>,
}

impl<'a> CallAttempts<'a> {
    pub(crate) fn new(shared: &'a ClientCore, call: CallSpec) -> Self {
        let mut retries = Retries::new(call.repeat);
        if !call.rechecks_topics {
            retries.skip_rechecks();
        }
        Self {
            shared,
            call,
            deadline: call.since + shared.config.request_timeout + call.wait,
            retries,
            may_have_applied: false,
            last_failure: None,
            explained: None,
            wait: Duration::ZERO,
            pending: shared.config.pending.begin(&call),
        }
    }

    /// Learns the nodes if none is known to respond yet.
    pub(crate) async fn ensure_contact(&self) {
        // Ignored: the call itself reports the deadline.
        let _ = timeout_at(self.deadline, self.shared.routing.ensure_contact()).await;
    }

    /// Returns the time after which the first attempt abandons a silent node.
    pub(crate) fn first_timeout(&self) -> Duration {
        match self.call.repeat {
            Repeat::Read => self.shared.config.stall_after,
            Repeat::Always | Repeat::UnlessApplied => CHANGE_ATTEMPT_TIMEOUT,
        }
    }

    /// Returns the limit of an attempt at a node: none if the call cannot be repeated elsewhere.
    pub(crate) fn limit_at(&self, node: &Connection, attempt_timeout: Duration) -> Duration {
        match self.call.repeat {
            Repeat::UnlessApplied => Duration::MAX,
            _ if !self.shared.routing.has_others(node.address()) => Duration::MAX,
            Repeat::Read | Repeat::Always => attempt_timeout,
        }
    }

    pub(crate) async fn route(&self, (topic, partition): (&str, u32)) -> Result<Route> {
        self.within(self.shared.routing.leader(topic, partition)).await
    }

    /// Waits for a lookup until the deadline.
    pub(crate) async fn within<T>(&self, lookup: impl Future<Output = Result<T>>) -> Result<T> {
        match timeout_at(self.deadline, lookup).await {
            // A metadata request does not send the call itself.
            Ok(found) => found.map_err(|error| error.with_may_have_applied(false)),
            Err(_) => Err(Error::timed_out("metadata").with_may_have_applied(false)),
        }
    }

    pub(crate) async fn attempt<T>(
        &self,
        attempt: impl Future<Output = std::result::Result<Response<T>, Status>>,
    ) -> Result<T> {
        self.attempt_within(Duration::MAX, attempt).await
    }

    /// Like [`CallAttempts::attempt`], within `limit` if that is less than the attempt timeout.
    pub(crate) async fn attempt_within<T>(
        &self,
        limit: Duration,
        attempt: impl Future<Output = std::result::Result<Response<T>, Status>>,
    ) -> Result<T> {
        let limit = limit.min(self.shared.config.attempt_timeout).min(self.call.attempt_max);
        let limit = limit + self.call.wait;
        match timeout_at(self.deadline.min(Instant::now() + limit), attempt).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(Error::from_status(&status)),
            Err(_) => Err(self.timed_out()),
        }
    }

    /// Returns the error of an attempt that took too long. If the deadline cuts the last attempt of
    /// a read, the failure before says more.
    fn timed_out(&self) -> Error {
        let is_cut = self.call.repeat == Repeat::Read && Instant::now() >= self.deadline;
        let before = self.last_failure.clone().filter(|_| is_cut);
        before.unwrap_or_else(|| Error::timed_out(self.call.name))
    }

    /// Like [`CallAttempts::attempt`], but ends as soon as the called leader has been replaced.
    pub(crate) async fn attempt_while<T>(
        &self,
        mut probe: LeaderProbe<'_>,
        attempt: impl Future<Output = std::result::Result<Response<T>, Status>>,
    ) -> Result<T> {
        tokio::select! {
            biased;
            result = self.attempt(attempt) => result,
            () = probe.replaced() => Err(Error::superseded(self.call.name)),
        }
    }

    fn probe<'b>(&'b self, topic: &'b str, route: &'b Route) -> LeaderProbe<'b> {
        let pace = if self.call.wait.is_zero() { ProbePace::Expected } else { ProbePace::Patient };
        let shard_ids = std::slice::from_ref(&route.shard_id);
        LeaderProbe::new(&self.shared.routing, topic, shard_ids, route, pace)
    }

    /// Records a failure and decides how long to wait. Returns the error as `Err` if it is final.
    pub(crate) fn judge(&mut self, error: Error, route: Option<&Route>) -> Result<Error> {
        self.judge_with(error, route, false)
    }

    /// Like [`CallAttempts::judge`]; with `has_others` it retries another node without a wait.
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
        if let Some(pending) = &self.pending {
            pending.on_failure(&error);
        }
        let is_explained =
            error.retryable && error.reason.is_some_and(|reason| reason != ErrorReason::NotLeader);
        if is_explained && self.explained.is_none() {
            self.explained = Some(error.clone());
        }
        // A removed node refuses all calls, and no other address is known.
        if route.is_none() && error.is(ErrorReason::NotLeader) {
            self.shared.routing.learn_other_node(&error);
            if self.shared.routing.has_one_address() {
                return Err(self.conclude(error));
            }
        }
        self.wait = match next {
            RetryDecision::GiveUp => return Err(self.conclude(error)),
            RetryDecision::Redirect => Duration::ZERO,
            RetryDecision::Wait(wait) => wait,
        };
        self.last_failure = Some(error.clone());
        Ok(error)
    }

    /// Waits as decided, or fails at once if the deadline is before the end of the wait.
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
        // A timeout or a broken connection says less than the failure before it.
        let error = match &self.explained {
            Some(explained) if error.reason.is_none() => explained.clone().with_last(&error),
            _ => error,
        };
        error.with_may_have_applied(may_have_applied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn first_reason_of_a_call_is_kept() {
        let client = Client::new(Config::new(["127.0.0.1:1"])).unwrap();
        let mut attempts =
            CallAttempts::new(&client.shared, CallSpec::new("append", Repeat::Always));
        let no_leader = || Error::known(ErrorReason::NoLeader, "shard 1 has no leader");
        attempts.judge(no_leader(), None).unwrap();
        let error = attempts.conclude(Error::timed_out("append"));
        assert!(error.is(ErrorReason::NoLeader) && error.may_have_applied, "{error}");
        let message = "shard 1 has no leader; the last attempt: append timed out";
        assert_eq!(error.message, message);
        // A later reason is as good as the first.
        let unknown = Error::known(ErrorReason::OutcomeUnknown, "the leader is gone");
        assert!(attempts.conclude(unknown).is(ErrorReason::OutcomeUnknown));
    }
}
