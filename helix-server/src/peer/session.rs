//! One open stream to a peer, as its users see it: a queue of messages out, and who waits for
//! what comes back. Ends as a whole; whoever waits then learns that it has.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};

use helix_proto::raft::v1 as pb;
use pb::exchange_request::Message;
use prost::Message as _;
use tokio::sync::{mpsc, oneshot};

use super::connection::Traffic;
use super::limits::{QUESTIONS_MAX, WINDOW_BYTES};

/// The stream has ended, or takes no more.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub(super) struct Lost(String);

type Acks = mpsc::UnboundedSender<pb::Ack>;
type AnswerResult = pb::answer::Result;

#[derive(Debug)]
pub(super) struct Session {
    /// Unbounded, because what goes in is bounded by windows and by [`QUESTIONS_MAX`].
    outgoing: mpsc::UnboundedSender<pb::ExchangeRequest>,
    /// Bytes of an epoch in flight.
    pub(super) window: u64,
    /// Protocol version that is spoken on it.
    pub(super) protocol: u32,
    traffic: Arc<Traffic>,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Why it ended.
    over: Option<Lost>,
    epochs: BTreeMap<u64, Acks>,
    answers: BTreeMap<u64, oneshot::Sender<AnswerResult>>,
}

impl Session {
    pub(super) fn new(
        outgoing: mpsc::UnboundedSender<pb::ExchangeRequest>,
        opened: &pb::Opened,
        traffic: Arc<Traffic>,
    ) -> Self {
        let (window, protocol) = (opened.window_bytes.min(WINDOW_BYTES), opened.version);
        Self { outgoing, window, protocol, traffic, waiting: Mutex::default() }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().expect("no panic while it is held")
    }

    pub(super) fn send(&self, message: Message) -> Result<(), Lost> {
        let message = pb::ExchangeRequest { message: Some(message) };
        self.traffic.sent.add(message.encoded_len() as u64);
        self.outgoing.send(message).map_err(|_| Lost("the connection ended".to_owned()))
    }

    /// From now on acks of this epoch are kept.
    pub(super) fn open_epoch(&self, id: u64) -> Result<mpsc::UnboundedReceiver<pb::Ack>, Lost> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut waiting = self.waiting();
        if let Some(lost) = &waiting.over {
            return Err(lost.clone());
        }
        waiting.epochs.insert(id, sender);
        Ok(receiver)
    }

    pub(super) fn close_epoch(&self, id: u64) {
        self.waiting().epochs.remove(&id);
    }

    /// The answer to the question or snapshot of this id, which is still to be sent.
    pub(super) fn expect_answer(self: &Arc<Self>, id: u64) -> Result<Expected, Lost> {
        let (sender, receiver) = oneshot::channel();
        let mut waiting = self.waiting();
        if let Some(lost) = &waiting.over {
            return Err(lost.clone());
        }
        if waiting.answers.len() >= QUESTIONS_MAX {
            return Err(Lost("too many questions are open".to_owned()));
        }
        waiting.answers.insert(id, sender);
        Ok(Expected { session: Arc::clone(self), id, receiver })
    }

    /// Gives out what has come back. What nobody waits for any more is dropped.
    pub(super) fn deliver(&self, results: pb::Results) {
        let mut waiting = self.waiting();
        for ack in results.acks {
            if let Some(epoch) = waiting.epochs.get(&ack.epoch) {
                // Ignored: the epoch was given up a moment ago.
                let _ = epoch.send(ack);
            }
        }
        for answer in results.answers {
            let asker = waiting.answers.remove(&answer.id);
            if let (Some(asker), Some(result)) = (asker, answer.result) {
                // Ignored: the asker gave up a moment ago.
                let _ = asker.send(result);
            }
        }
    }

    /// Ends every wait.
    pub(super) fn end(&self, why: &str) {
        let mut waiting = self.waiting();
        waiting.over = Some(Lost(why.to_owned()));
        waiting.epochs.clear();
        waiting.answers.clear();
    }
}

/// An answer that is on its way. Dropping it gives it up.
#[derive(Debug)]
pub(super) struct Expected {
    session: Arc<Session>,
    id: u64,
    receiver: oneshot::Receiver<AnswerResult>,
}

impl Expected {
    pub(super) fn id(&self) -> u64 {
        self.id
    }
}

impl Future for Expected {
    type Output = Result<AnswerResult, Lost>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let received = Pin::new(&mut self.receiver).poll(context);
        received.map_err(|_| Lost("the connection ended before an answer came".to_owned()))
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        self.session.waiting().answers.remove(&self.id);
    }
}
