//! The task that keeps a session's stream open: connects, receives acks, and reconnects.
//!
//! The state of the batches is in `state`.

use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use helix_proto::log::v1::append_stream_request::Message as Request;
use helix_proto::log::v1::append_stream_response::Message as Response;
use helix_proto::log::v1::{
    AppendStreamInit, AppendStreamOpened, AppendStreamRequest, AppendStreamResponse, ErrorReason,
};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tonic::{Code, Streaming};
use tracing::debug;

use super::SessionOptions;
use super::state::{Pipeline, RequestSender, Resume};
use crate::call_spec::Repeat;
use crate::client::Client;
use crate::error::{Error, Result};
use crate::identity::Identities;
use crate::retry::{Retries, RetryDecision};
use crate::routing::{LeaderProbe, ProbePace, Route};

/// Consecutive times that a stream is reopened because the service missed a sequence.
const RESYNCS_MAX: u32 = 3;

/// Consecutive times that a new identity is used because the service forgot the last one.
const RENEWALS_MAX: u32 = 3;

/// Drives the stream of one session: see the module.
pub(super) struct SessionDriver {
    client: Client,
    topic: String,
    partition: u32,
    options: SessionOptions,
    identities: Option<Identities>,
    pipeline: Arc<Pipeline>,
    retries: Retries,
    resyncs: u32,
    /// New identities since the last stream was accepted.
    renewals: u32,
    /// Time when the session last had a stream.
    healthy_at: Instant,
}

/// Reason for the end of a stream.
enum StreamEnd {
    /// The session is closed and everything is acked.
    Finished,
    /// The stream, or the lookup of its leader, failed.
    Failed(Error, Option<Route>),
    /// A failure that no retry can resolve.
    Fatal(Error),
    /// The partition forgot the identity.
    Forgotten,
}

type Opened = oneshot::Sender<Result<()>>;

impl SessionDriver {
    pub(super) fn new(
        client: Client,
        (topic, partition): (String, u32),
        options: SessionOptions,
        identities: Option<Identities>,
        pipeline: Arc<Pipeline>,
    ) -> Self {
        Self {
            client,
            topic,
            partition,
            options,
            identities,
            pipeline,
            retries: Retries::new(Repeat::Always),
            resyncs: 0,
            renewals: 0,
            healthy_at: Instant::now(),
        }
    }

    /// Runs until the session has finished or failed. Reports the first stream to `opened`.
    pub(super) async fn run(mut self, opened: Opened) {
        let mut opened = Some(opened);
        loop {
            let error = match self.stream(&mut opened).await {
                StreamEnd::Finished => return,
                StreamEnd::Fatal(error) => Some(error),
                StreamEnd::Forgotten => self.renew().await.err(),
                StreamEnd::Failed(error, route) => self.recover(error, route.as_ref()).await.err(),
            };
            if self.pipeline.is_finished() {
                return;
            }
            if let Some(error) = error {
                if let Some(opened) = opened.take() {
                    // Ignored: the opener has stopped waiting.
                    let _ = opened.send(Err(error.clone()));
                }
                self.pipeline.fail(error);
                return;
            }
        }
    }

    /// Runs one stream, from the lookup of the leader to its end.
    async fn stream(&mut self, opened: &mut Option<Opened>) -> StreamEnd {
        let route = match self.prepare().await {
            Ok(route) => route,
            Err(error) => return StreamEnd::Failed(error, None),
        };
        let (client, topic) = (self.client.clone(), self.topic.clone());
        let (routing, shard_ids) = (&client.shared.routing, [route.shard_id]);
        let mut probe = LeaderProbe::new(routing, &topic, &shard_ids, &route, ProbePace::Expected);
        let (responses, first, outgoing) = match self.open(&route, &mut probe).await {
            Ok(open) => open,
            Err(error) if self.is_forgotten(&error) => return StreamEnd::Forgotten,
            Err(error) => return StreamEnd::Failed(error, Some(route.clone())),
        };
        match self.pipeline.on_opened(&first, outgoing) {
            Ok(Resume::Open) => {}
            Ok(Resume::Renew) => return StreamEnd::Forgotten,
            Err(error) => return StreamEnd::Fatal(error),
        }
        if let Some(opened) = opened.take() {
            // Ignored: the opener has stopped waiting, and dropping its handle ends the session.
            let _ = opened.send(Ok(()));
        }
        self.renewals = 0;
        let end = self.receive_acks(responses, &route, &mut probe).await;
        self.healthy_at = Instant::now();
        end
    }

    /// Finds the leader, and requests an identity if there is none yet.
    async fn prepare(&self) -> Result<Route> {
        if let Some(identities) = &self.identities
            && self.pipeline.identity().is_none()
        {
            self.pipeline.set_identity(identities.current().await?);
        }
        let core = &self.client.shared;
        let leader = core.routing.leader(&self.topic, self.partition);
        match timeout(core.config.attempt_timeout, leader).await {
            Ok(route) => route.map_err(|error| error.with_may_have_applied(false)),
            Err(_) => Err(Error::timed_out("metadata").with_may_have_applied(false)),
        }
    }

    /// Opens a stream and waits for the service's first message.
    async fn open(
        &self,
        route: &Route,
        probe: &mut LeaderProbe<'_>,
    ) -> Result<(Streaming<AppendStreamResponse>, AppendStreamOpened, RequestSender)> {
        let (outgoing, mut requests) = mpsc::unbounded_channel();
        let init = AppendStreamInit {
            topic: self.topic.clone(),
            partition: self.partition,
            durability: self.options.durability.into(),
            producer: self.pipeline.identity(),
            fencing_token: self.options.fencing_token.clone(),
            topic_id: self.pipeline.topic_id(),
        };
        let init = AppendStreamRequest { message: Some(Request::Init(init)) };
        outgoing.send(init).expect("the receiver is in scope");
        let opening = async {
            let mut produce = route.connection.produce();
            let next = move |context: &mut Context<'_>| requests.poll_recv(context);
            let request = helix_transport::requests::append_stream(next, tokio_stream::empty());
            let mut responses = produce.append_stream(request).await?.into_inner();
            let first = responses.message().await?;
            Ok::<_, tonic::Status>((responses, first))
        };
        let opened = tokio::select! {
            biased;
            opened = timeout(self.client.config().attempt_timeout, opening) => opened
                .map_err(|_| Error::timed_out("opening a session"))
                .and_then(|result| result.map_err(Error::from)),
            () = probe.replaced() => Err(Error::superseded("opening a session")),
        };
        // Only the init message was sent.
        let (responses, first) = opened.map_err(|error| error.with_may_have_applied(false))?;
        match first.and_then(|first| first.message) {
            Some(Response::Opened(opened)) => Ok((responses, opened, outgoing)),
            _ => Err(Error::client(
                Code::Internal,
                "the first message of the session is not `opened`",
            )),
        }
    }

    /// Receives acks until the stream breaks, a batch is overdue, or the session has finished.
    async fn receive_acks(
        &mut self,
        mut responses: Streaming<AppendStreamResponse>,
        route: &Route,
        probe: &mut LeaderProbe<'_>,
    ) -> StreamEnd {
        let pipeline = self.pipeline.clone();
        let finished = pipeline.finished();
        tokio::pin!(finished);
        let overdue = self.overdue();
        tokio::pin!(overdue);
        loop {
            let message = tokio::select! {
                biased;
                message = responses.message() => message,
                () = &mut finished => return StreamEnd::Finished,
                () = &mut overdue => return StreamEnd::Fatal(Error::timed_out("append")),
                error = stalled(&pipeline, probe, self.stream_silence_max()) => {
                    return StreamEnd::Failed(error, Some(route.clone()));
                }
            };
            let acks = match message {
                Ok(Some(AppendStreamResponse { message: Some(Response::Acks(acks)) })) => acks,
                Ok(Some(_)) => {
                    let message = "a session message is not an ack";
                    let error = Error::client(Code::Internal, message);
                    return StreamEnd::Fatal(error.with_may_have_applied(true));
                }
                Ok(None) => return StreamEnd::Failed(ended(), Some(route.clone())),
                Err(status) => return StreamEnd::Failed(Error::from(status), Some(route.clone())),
            };
            if let Err(error) = pipeline.on_acks(&acks) {
                return StreamEnd::Fatal(error);
            }
            probe.on_progress();
            self.retries.on_progress();
            self.resyncs = 0;
        }
    }

    /// Waits until the oldest batch exceeds the request timeout.
    ///
    /// Checks periodically instead of setting a timer for each batch.
    fn overdue(&self) -> impl Future<Output = ()> + use<> {
        let pipeline = self.pipeline.clone();
        let limit = self.client.config().request_timeout;
        let period = (limit / 16).clamp(Duration::from_millis(10), Duration::from_secs(1));
        async move {
            loop {
                sleep(period).await;
                if pipeline.oldest().is_some_and(|oldest| oldest.elapsed() >= limit) {
                    return;
                }
            }
        }
    }

    /// Returns the silence after which a stream with batches in flight is reopened.
    ///
    /// A response may have been lost. Without an identity batches cannot be resent, so there is no
    /// limit.
    fn stream_silence_max(&self) -> Duration {
        match self.identities {
            Some(_) => self.client.config().attempt_timeout,
            None => Duration::MAX,
        }
    }

    /// Handles a failure and waits before the next stream.
    ///
    /// # Errors
    /// The session cannot continue.
    async fn recover(&mut self, error: Error, route: Option<&Route>) -> Result<()> {
        debug!(topic = self.topic, partition = self.partition, %error, "append stream failed");
        if !self.pipeline.on_broken(error.may_have_applied) {
            return Err(error.with_may_have_applied(true));
        }
        if self.is_forgotten(&error) || self.pipeline.has_lost_acked(&error) {
            return self.renew().await;
        }
        let is_redirected =
            route.is_some_and(|route| self.client.shared.routing.on_failure(route, &error));
        let next = if error.is(ErrorReason::OutOfOrderSequence) && self.resyncs < RESYNCS_MAX {
            self.resyncs += 1;
            RetryDecision::Wait(self.client.shared.jitter.draw(self.resyncs))
        } else {
            self.retries.after(&error, is_redirected, &self.client.shared.jitter)
        };
        match next {
            RetryDecision::GiveUp => Err(error),
            RetryDecision::Redirect => Ok(()),
            RetryDecision::Wait(wait) => self.pause(wait, error).await,
        }
    }

    /// Waits, unless the oldest batch, or an idle session, would be overdue before the end.
    async fn pause(&self, wait: Duration, error: Error) -> Result<()> {
        let since = self.pipeline.oldest().unwrap_or(self.healthy_at);
        let end = Instant::now() + wait;
        if end >= since + self.client.config().request_timeout {
            return Err(error);
        }
        tokio::select! {
            () = sleep_until(end) => {}
            () = self.pipeline.finished() => {}
        }
        Ok(())
    }

    /// Requests a new identity, under which all unacked batches are renumbered.
    async fn renew(&mut self) -> Result<()> {
        self.renewals += 1;
        if self.renewals > RENEWALS_MAX {
            let message = "the partition forgot each new producer identity";
            return Err(Error::known(ErrorReason::UnknownProducer, message));
        }
        let identities = self.identities.as_ref().expect("only an identity can be forgotten");
        let identity = identities.replace(self.pipeline.identity()).await?;
        self.pipeline.set_identity(identity);
        Ok(())
    }

    /// Returns true if the partition forgot the identity while no batch was in flight.
    fn is_forgotten(&self, error: &Error) -> bool {
        error.is(ErrorReason::UnknownProducer)
            && self.identities.is_some()
            && self.pipeline.unacked_count() == 0
    }
}

/// Waits until the leader is replaced, or silent for too long, while batches wait for their acks.
///
/// Does not apply to a session without batches in flight.
async fn stalled(pipeline: &Pipeline, probe: &mut LeaderProbe<'_>, silence_max: Duration) -> Error {
    loop {
        probe.due().await;
        match pipeline.oldest() {
            None => probe.on_progress(),
            // The batch was queued during the silence.
            Some(oldest) if probe.is_early(oldest) => probe.on_progress_at(oldest),
            Some(_) if probe.check().await => return Error::superseded("append"),
            Some(oldest) if oldest.max(probe.silent_since()).elapsed() >= silence_max => {
                return Error::timed_out("append");
            }
            Some(_) => {}
        }
    }
}

/// Returns the error of a stream that ended without a status, as a stopping server does it.
fn ended() -> Error {
    let ended = Error::known(ErrorReason::Draining, "the service ended the stream");
    ended.with_may_have_applied(true)
}
