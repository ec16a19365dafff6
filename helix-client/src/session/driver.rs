//! The task that keeps a session's stream open: connects, listens for acks, and connects again.
//! Waits; what is true of the batches is in `state`.

use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use helix_proto::appends;
use helix_proto::log::v1::append_stream_request::Message as Request;
use helix_proto::log::v1::append_stream_response::Message as Answer;
use helix_proto::log::v1::{
    AppendStreamInit, AppendStreamOpened, AppendStreamRequest, AppendStreamResponse, ErrorReason,
};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tonic::{Code, Streaming};
use tracing::debug;

use super::SessionOptions;
use super::state::{Outgoing, Resume, Shared};
use crate::client::Client;
use crate::error::{Error, Result};
use crate::identity::Identities;
use crate::retry::{Next, Repeat, Retries};
use crate::routing::{Lookout, Pace, Route};

/// Times in a row that a stream is opened again because the service missed a sequence.
const RESYNCS_MAX: u32 = 3;

/// Times in a row that another identity is taken because the service has forgotten the last.
const RENEWALS_MAX: u32 = 3;

/// See the module.
pub(super) struct Driver {
    client: Client,
    topic: String,
    partition: u32,
    options: SessionOptions,
    identities: Option<Identities>,
    shared: Arc<Shared>,
    retries: Retries,
    resyncs: u32,
    /// Identities taken since the last stream was accepted.
    renewals: u32,
    /// When the session last had a stream.
    well_at: Instant,
}

/// Why the driver is not on a stream any more.
enum Break {
    /// Closed, and everything is acked.
    Finished,
    /// The stream, or the way to it, failed.
    Failed(Error, Option<Route>),
    /// Nothing can cure it.
    Fatal(Error),
    /// The partition has forgotten the identity.
    Forgotten,
}

type Opened = oneshot::Sender<Result<()>>;

impl Driver {
    pub(super) fn new(
        client: Client,
        (topic, partition): (String, u32),
        options: SessionOptions,
        identities: Option<Identities>,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            client,
            topic,
            partition,
            options,
            identities,
            shared,
            retries: Retries::new(Repeat::Always),
            resyncs: 0,
            renewals: 0,
            well_at: Instant::now(),
        }
    }

    /// Runs until the session is finished or has failed. `opened` hears of the first stream.
    pub(super) async fn run(mut self, opened: Opened) {
        let mut opened = Some(opened);
        loop {
            let error = match self.stream(&mut opened).await {
                Break::Finished => return,
                Break::Fatal(error) => Some(error),
                Break::Forgotten => self.renew().await.err(),
                Break::Failed(error, route) => self.recover(error, route.as_ref()).await.err(),
            };
            if self.shared.is_finished() {
                return;
            }
            if let Some(error) = error {
                if let Some(opened) = opened.take() {
                    // Ignored: the opener has stopped waiting.
                    let _ = opened.send(Err(error.clone()));
                }
                self.shared.fail(error);
                return;
            }
        }
    }

    /// One stream, from the way to the leader to its end.
    async fn stream(&mut self, opened: &mut Option<Opened>) -> Break {
        let route = match self.prepare().await {
            Ok(route) => route,
            Err(error) => return Break::Failed(error, None),
        };
        let (client, topic) = (self.client.clone(), self.topic.clone());
        let (routing, shard_ids) = (&client.shared.routing, [route.shard_id]);
        let mut lookout = Lookout::new(routing, &topic, &shard_ids, &route, Pace::Due);
        let (answers, first, outgoing) = match self.open(&route, &mut lookout).await {
            Ok(open) => open,
            Err(error) if self.is_forgotten(&error) => return Break::Forgotten,
            Err(error) => return Break::Failed(error, Some(route.clone())),
        };
        match self.shared.on_opened(&first, outgoing) {
            Ok(Resume::Open) => {}
            Ok(Resume::Renew) => return Break::Forgotten,
            Err(error) => return Break::Fatal(error),
        }
        if let Some(opened) = opened.take() {
            // Ignored: the opener has stopped waiting, and its handle's drop ends the session.
            let _ = opened.send(Ok(()));
        }
        self.renewals = 0;
        let end = self.listen(answers, &route, &mut lookout).await;
        self.well_at = Instant::now();
        end
    }

    /// Finds the leader, and an identity if there is none yet.
    async fn prepare(&self) -> Result<Route> {
        if let Some(identities) = &self.identities
            && self.shared.identity().is_none()
        {
            self.shared.set_identity(identities.present().await?);
        }
        let shared = &self.client.shared;
        let leader = shared.routing.leader(&self.topic, self.partition);
        match timeout(shared.config.attempt_timeout, leader).await {
            Ok(route) => route.map_err(|error| error.with_may_have_applied(false)),
            Err(_) => Err(Error::timed_out("metadata").with_may_have_applied(false)),
        }
    }

    /// Opens a stream and waits for the service's first message.
    async fn open(
        &self,
        route: &Route,
        lookout: &mut Lookout<'_>,
    ) -> Result<(Streaming<AppendStreamResponse>, AppendStreamOpened, Outgoing)> {
        let (outgoing, mut requests) = mpsc::unbounded_channel();
        let init = AppendStreamInit {
            topic: self.topic.clone(),
            partition: self.partition,
            durability: self.options.durability.into(),
            producer: self.shared.identity(),
            fencing_token: self.options.fencing_token.clone(),
        };
        let init = AppendStreamRequest { message: Some(Request::Init(init)) };
        outgoing.send(init).expect("the receiver is right here");
        let opening = async {
            let mut produce = route.connection.produce();
            let next = move |context: &mut Context<'_>| requests.poll_recv(context);
            let requests = appends::append_stream(next, tokio_stream::empty());
            let mut answers = produce.append_stream(requests).await?.into_inner();
            let first = answers.message().await?;
            Ok::<_, tonic::Status>((answers, first))
        };
        let opened = tokio::select! {
            biased;
            opened = timeout(self.client.config().attempt_timeout, opening) => opened
                .map_err(|_| Error::timed_out("opening a session"))
                .and_then(|result| result.map_err(Error::from)),
            () = lookout.moved() => Err(Error::superseded("opening a session")),
        };
        // Nothing but the init message was sent.
        let (answers, first) = opened.map_err(|error| error.with_may_have_applied(false))?;
        match first.and_then(|first| first.message) {
            Some(Answer::Opened(opened)) => Ok((answers, opened, outgoing)),
            _ => Err(Error::client(Code::Internal, "a session that does not begin with `opened`")),
        }
    }

    /// Takes acks until the stream breaks, a batch is overdue, or the session is finished.
    async fn listen(
        &mut self,
        mut answers: Streaming<AppendStreamResponse>,
        route: &Route,
        lookout: &mut Lookout<'_>,
    ) -> Break {
        let shared = self.shared.clone();
        let finished = shared.finished();
        tokio::pin!(finished);
        let overdue = self.overdue();
        tokio::pin!(overdue);
        loop {
            let message = tokio::select! {
                biased;
                message = answers.message() => message,
                () = &mut finished => return Break::Finished,
                () = &mut overdue => return Break::Fatal(Error::timed_out("append")),
                error = stalled(&shared, lookout, self.stream_silence_max()) => {
                    return Break::Failed(error, Some(route.clone()));
                }
            };
            let acks = match message {
                Ok(Some(AppendStreamResponse { message: Some(Answer::Acks(acks)) })) => acks,
                Ok(Some(_)) => {
                    let message = "an answer that is no ack";
                    let error = Error::client(Code::Internal, message);
                    return Break::Fatal(error.with_may_have_applied(true));
                }
                Ok(None) => return Break::Failed(ended(), Some(route.clone())),
                Err(status) => return Break::Failed(Error::from(status), Some(route.clone())),
            };
            if let Err(error) = shared.on_acks(&acks) {
                return Break::Fatal(error);
            }
            lookout.on_progress();
            self.retries.on_progress();
            self.resyncs = 0;
        }
    }

    /// Waits until the oldest batch has been under way for too long. Looks from time to time
    /// instead of setting a timer for each batch.
    fn overdue(&self) -> impl Future<Output = ()> + use<> {
        let shared = self.shared.clone();
        let limit = self.client.config().request_timeout;
        let period = (limit / 16).clamp(Duration::from_millis(10), Duration::from_secs(1));
        async move {
            loop {
                sleep(period).await;
                if shared.oldest().is_some_and(|oldest| oldest.elapsed() >= limit) {
                    return;
                }
            }
        }
    }

    /// Silence on a stream with batches under way after which it is opened again: an answer may
    /// have been lost on the way. Without identity nothing could be sent again.
    fn stream_silence_max(&self) -> Duration {
        match self.identities {
            Some(_) => self.client.config().attempt_timeout,
            None => Duration::MAX,
        }
    }

    /// Decides about a failure and waits before the next stream.
    ///
    /// # Errors
    /// The session cannot go on.
    async fn recover(&mut self, error: Error, route: Option<&Route>) -> Result<()> {
        debug!(topic = self.topic, partition = self.partition, %error, "append stream broke");
        if !self.shared.on_broken(error.may_have_applied) {
            return Err(error.with_may_have_applied(true));
        }
        if self.is_forgotten(&error) || self.shared.has_lost_acked(&error) {
            return self.renew().await;
        }
        let is_redirected =
            route.is_some_and(|route| self.client.shared.routing.on_failure(route, &error));
        let next = if error.is(ErrorReason::OutOfOrderSequence) && self.resyncs < RESYNCS_MAX {
            self.resyncs += 1;
            Next::Wait(self.client.shared.jitter.draw(self.resyncs))
        } else {
            self.retries.after(&error, is_redirected, &self.client.shared.jitter)
        };
        match next {
            Next::GiveUp => Err(error),
            Next::Redirect => Ok(()),
            Next::Wait(wait) => self.pause(wait, error).await,
        }
    }

    /// Waits, unless the batch that waits longest, or an idle session, is overdue before the end.
    async fn pause(&self, wait: Duration, error: Error) -> Result<()> {
        let since = self.shared.oldest().unwrap_or(self.well_at);
        let end = Instant::now() + wait;
        if end >= since + self.client.config().request_timeout {
            return Err(error);
        }
        tokio::select! {
            () = sleep_until(end) => {}
            () = self.shared.finished() => {}
        }
        Ok(())
    }

    /// Takes another identity, for which everything that is not acked is new.
    async fn renew(&mut self) -> Result<()> {
        self.renewals += 1;
        if self.renewals > RENEWALS_MAX {
            let message = "the partition forgets every producer";
            return Err(Error::known(ErrorReason::UnknownProducer, message));
        }
        let identities = self.identities.as_ref().expect("only an identity can be forgotten");
        let identity = identities.other_than(self.shared.identity()).await?;
        self.shared.set_identity(identity);
        Ok(())
    }

    /// Whether the partition has forgotten the identity and no batch is in danger by that.
    fn is_forgotten(&self, error: &Error) -> bool {
        error.is(ErrorReason::UnknownProducer)
            && self.identities.is_some()
            && self.shared.unacked_count() == 0
    }
}

/// Waits until the leader has been replaced while batches wait for their acks, or has kept silent
/// for too long. A session with nothing under way does not care.
async fn stalled(shared: &Shared, lookout: &mut Lookout<'_>, silence_max: Duration) -> Error {
    loop {
        lookout.due().await;
        match shared.oldest() {
            None => lookout.on_progress(),
            // It was handed over during the silence.
            Some(oldest) if lookout.is_early(oldest) => lookout.on_progress_at(oldest),
            Some(_) if lookout.look().await => return Error::superseded("append"),
            Some(oldest) if oldest.max(lookout.since()).elapsed() >= silence_max => {
                return Error::timed_out("append");
            }
            Some(_) => {}
        }
    }
}

/// The service has ended the stream without an error, as a server does that stops.
fn ended() -> Error {
    let ended = Error::known(ErrorReason::Draining, "the service has ended the stream");
    ended.with_may_have_applied(true)
}
