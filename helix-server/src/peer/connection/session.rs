//! One open stream to a peer: a queue of outgoing messages, and the waiters for results.
//! A stream ends as a whole, and then notifies every waiter.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};

use helix_proto::raft::v1 as pb;
use pb::answer::Result as UnaryResult;
use pb::exchange_request::Message;
use prost::Message as _;
use tokio::sync::{mpsc, oneshot};

use super::traffic::Traffic;
use crate::peer::limits::{UNARY_REQUESTS_MAX, WINDOW_BYTES};
use crate::sync;

/// Reason why a stream has ended or accepts no further request.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub(in crate::peer) struct SessionError(String);

type AckSender = mpsc::UnboundedSender<pb::Ack>;

/// The open stream of one lane.
#[derive(Debug)]
pub(in crate::peer) struct PeerSession {
    /// Unbounded: epoch windows and [`UNARY_REQUESTS_MAX`] bound its content.
    outgoing: mpsc::UnboundedSender<pb::ExchangeRequest>,
    /// Maximum bytes in flight of one epoch.
    pub(in crate::peer) window: u64,
    /// Protocol version of the stream.
    pub(super) protocol: u32,
    traffic: Arc<Traffic>,
    waiters: Mutex<Waiters>,
}

#[derive(Debug, Default)]
struct Waiters {
    /// Set once the stream has ended.
    ended: Option<SessionError>,
    epochs: BTreeMap<u64, AckSender>,
    /// Waiters for unary responses, by request id.
    responses: BTreeMap<u64, oneshot::Sender<UnaryResult>>,
}

impl PeerSession {
    pub(super) fn new(
        outgoing: mpsc::UnboundedSender<pb::ExchangeRequest>,
        opened: &pb::Opened,
        traffic: Arc<Traffic>,
    ) -> Self {
        let (window, protocol) = (opened.window_bytes.min(WINDOW_BYTES), opened.version);
        Self { outgoing, window, protocol, traffic, waiters: Mutex::default() }
    }

    fn waiters(&self) -> MutexGuard<'_, Waiters> {
        sync::lock(&self.waiters)
    }

    /// Queues a message.
    pub(in crate::peer) fn send(&self, message: Message) -> Result<(), SessionError> {
        let message = pb::ExchangeRequest { message: Some(message) };
        self.traffic.sent.add(message.encoded_len() as u64);
        self.outgoing.send(message).map_err(|_| SessionError("the connection ended".to_owned()))
    }

    /// Registers an epoch, whose acks the returned receiver yields.
    pub(in crate::peer) fn open_epoch(
        &self,
        id: u64,
    ) -> Result<mpsc::UnboundedReceiver<pb::Ack>, SessionError> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut waiters = self.waiters();
        if let Some(ended) = &waiters.ended {
            return Err(ended.clone());
        }
        waiters.epochs.insert(id, sender);
        Ok(receiver)
    }

    pub(in crate::peer) fn close_epoch(&self, id: u64) {
        self.waiters().epochs.remove(&id);
    }

    /// Registers a waiter for the response to a unary request or snapshot.
    /// The caller sends the request afterwards.
    pub(in crate::peer) fn expect_response(
        self: &Arc<Self>,
        id: u64,
    ) -> Result<PendingResponse, SessionError> {
        let (sender, receiver) = oneshot::channel();
        let mut waiters = self.waiters();
        if let Some(ended) = &waiters.ended {
            return Err(ended.clone());
        }
        if waiters.responses.len() >= UNARY_REQUESTS_MAX {
            return Err(SessionError(format!(
                "{UNARY_REQUESTS_MAX} requests are in flight on this stream, which is the limit"
            )));
        }
        waiters.responses.insert(id, sender);
        Ok(PendingResponse { session: Arc::clone(self), id, receiver })
    }

    /// Passes results to their waiters. Drops those without a waiter.
    pub(super) fn deliver(&self, results: pb::Results) {
        let mut waiters = self.waiters();
        for ack in results.acks {
            if let Some(epoch) = waiters.epochs.get(&ack.epoch) {
                // Ignored: the epoch was closed meanwhile.
                let _ = epoch.send(ack);
            }
        }
        for response in results.answers {
            let waiter = waiters.responses.remove(&response.id);
            if let (Some(waiter), Some(result)) = (waiter, response.result) {
                // Ignored: the waiter was dropped meanwhile.
                let _ = waiter.send(result);
            }
        }
    }

    /// Ends the stream and notifies every waiter.
    pub(super) fn end(&self, why: &str) {
        let mut waiters = self.waiters();
        waiters.ended = Some(SessionError(why.to_owned()));
        waiters.epochs.clear();
        waiters.responses.clear();
    }
}

/// The response to a unary request or snapshot in flight. Dropping it abandons the response.
#[derive(Debug)]
pub(in crate::peer) struct PendingResponse {
    session: Arc<PeerSession>,
    id: u64,
    receiver: oneshot::Receiver<UnaryResult>,
}

impl PendingResponse {
    pub(in crate::peer) fn id(&self) -> u64 {
        self.id
    }
}

impl Future for PendingResponse {
    type Output = Result<UnaryResult, SessionError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let received = Pin::new(&mut self.receiver).poll(context);
        received.map_err(|_| SessionError("the connection ended before the response".to_owned()))
    }
}

impl Drop for PendingResponse {
    fn drop(&mut self) {
        self.session.waiters().responses.remove(&self.id);
    }
}
