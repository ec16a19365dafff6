//! A pipeline of batches to one partition over one stream, acked in order. Survives broken streams
//! and changes of leader: what was not acked is sent again with the sequences that it had.

mod driver;
mod state;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use helix_proto::log::v1::Durability;
use tokio::sync::oneshot;
use tonic::Code;

use crate::append::{Ack, IntoBatch, too_large};
use crate::client::Client;
use crate::error::{Error, Result};
use crate::identity::Identities;
use driver::Driver;
use state::Shared;

/// Settings of a [`Session`].
#[derive(Debug, Clone)]
pub struct SessionOptions {
    /// Durability of every batch. Default: `Unspecified`, the topic's own default.
    pub durability: Durability,
    /// Whether batches carry an identity and a sequence, so that they can be sent again after a
    /// broken stream. Without, a broken stream with batches under way fails the session. Default:
    /// yes.
    pub idempotent: bool,
    /// Stable name, up to 255 bytes: a later producer of the same name fences this one. Default:
    /// empty, anonymous.
    pub producer_name: String,
    /// Fencing token that must hold with every batch, up to 64 bytes. Default: none.
    pub fencing_token: Option<String>,
    /// Most batches that are sent and not acked, at least 1. The service may allow fewer.
    /// Default: 16.
    pub in_flight_batches: usize,
    /// Most payload bytes that are sent and not acked, 1 to 4 GiB - 1. The service may allow fewer.
    /// A batch that is larger than this goes alone. Default: 8 MiB.
    pub in_flight_bytes: usize,
}

impl Default for SessionOptions {
    fn default() -> Self {
        Self {
            durability: Durability::Unspecified,
            idempotent: true,
            producer_name: String::new(),
            fencing_token: None,
            in_flight_batches: 16,
            in_flight_bytes: 8 << 20,
        }
    }
}

/// An open append session. Batches are applied in the order in which they were handed over; after
/// the first that fails, none that comes later is applied, and every call fails with that error.
///
/// A leader that dies, stops or is replaced is no failure: what is not acked is sent to the next
/// one, in order, and the acks come later.
///
/// Dropping it lets what was handed over come to its end; [`Session::close`] waits for that.
#[derive(Debug)]
pub struct Session {
    shared: Arc<Shared>,
}

impl Client {
    /// Opens a session to one partition and waits until the service has accepted it.
    ///
    /// # Errors
    /// The service's refusal, or why its leader could not be reached within the request timeout.
    pub async fn session(
        &self,
        topic: &str,
        partition: u32,
        options: SessionOptions,
    ) -> Result<Session> {
        let identities =
            options.idempotent.then(|| Identities::new(self.clone(), &options.producer_name));
        let (opened, is_open) = oneshot::channel();
        let shared = Arc::new(Shared::new(&options));
        // From here on the session's drop ends the driver, also if this future is dropped.
        let session = Session { shared: shared.clone() };
        let place = (topic.to_owned(), partition);
        let driver = Driver::new(self.clone(), place, options, identities, shared);
        tokio::spawn(driver.run(opened));
        match is_open.await {
            Ok(result) => result.map(|()| session),
            Err(_) => Err(stopped()),
        }
    }
}

impl Session {
    /// Hands over a batch. Waits for room in the pipeline; the returned future resolves with the
    /// ack. Dropping that future does not take the batch back; dropping this one before it is
    /// ready does.
    ///
    /// # Errors
    /// The error that has ended the session. `BATCH_TOO_LARGE` if the batch is larger than
    /// [`Session::batch_bytes_max`]: it was not handed over, and the session goes on.
    pub async fn append(&self, batch: impl IntoBatch) -> Result<Acked> {
        self.append_expecting(batch, None).await
    }

    /// As [`Session::append`], on the condition that the batch's first record gets this offset.
    ///
    /// # Errors
    /// As [`Session::append`].
    pub async fn append_expecting(
        &self,
        batch: impl IntoBatch,
        expected_offset: Option<u64>,
    ) -> Result<Acked> {
        let batch = batch.into_batch();
        // 0: the service has not said.
        let limit = Some(self.batch_bytes_max()).filter(|limit| *limit > 0);
        if let Some(refusal) = limit.and_then(|limit| too_large(batch.payload.len(), limit)) {
            return Err(refusal);
        }
        let room = self.shared.room(batch.payload.len()).await?;
        self.shared.hand_over(batch, expected_offset, room).map(Acked)
    }

    /// The largest payload that the service accepts, in bytes.
    pub fn batch_bytes_max(&self) -> usize {
        self.shared.batch_bytes_max()
    }

    /// Waits until every batch that was handed over has its ack or its error, and ends the stream.
    /// Bounded by the deadlines of the batches.
    ///
    /// # Errors
    /// The error that has ended the session before.
    pub async fn close(self) -> Result<()> {
        self.shared.close();
        self.shared.finished().await;
        self.shared.failure().map_or(Ok(()), Err)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.shared.close();
    }
}

/// The ack of one batch, once it is there.
///
/// Resolves at the latest when the batch's deadline has passed.
#[derive(Debug)]
pub struct Acked(oneshot::Receiver<Result<Ack>>);

impl Future for Acked {
    type Output = Result<Ack>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<Ack>> {
        let answer = ready!(Pin::new(&mut self.0).poll(context));
        Poll::Ready(answer.unwrap_or_else(|_| Err(stopped().with_may_have_applied(true))))
    }
}

/// The driver goes away without an answer only with its runtime.
fn stopped() -> Error {
    Error::client(Code::Cancelled, "the session was stopped")
}
