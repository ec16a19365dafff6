//! Sessions: a pipeline of batches to one partition over one stream, acked in order.
//!
//! A session survives broken streams and changes of leader: it resends unacked batches with their
//! original sequences.

mod driver;
mod state;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use helix_proto::log::v1::{BatchFormat, Durability};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tonic::Code;

use crate::append::{Ack, IntoBatch, too_large};
use crate::client::Client;
use crate::compression::{BatchCompressor, Compression};
use crate::error::{Error, Result};
use crate::identity::Identities;
use driver::SessionDriver;
use state::Pipeline;

/// Settings of a [`Session`].
#[derive(Debug, Clone)]
pub struct SessionOptions {
    /// Durability of every batch. Default: `Unspecified`, the topic's own default.
    pub durability: Durability,
    /// Send an identity and sequences, so that batches can be resent after a broken stream. Without
    /// them, a broken stream with batches in flight fails the session. Default: true.
    pub idempotent: bool,
    /// Stable name, up to 255 bytes: a later producer of the same name fences this one. Default:
    /// empty, anonymous.
    pub producer_name: String,
    /// Fencing token that must hold with every batch, up to 64 bytes. Default: none.
    pub fencing_token: Option<String>,
    /// Id that the topic must have, else the session fails with `TOPIC_RECREATED`. Default: 0, any.
    pub topic_id: u64,
    /// Compression of batches that are built from records. Default: none.
    pub compression: Compression,
    /// Most unacked batches, at least 1. The service may allow fewer.
    /// Default: 16.
    pub in_flight_batches: usize,
    /// Most unacked payload bytes, 1 to 4 GiB - 1. The service may allow fewer. A larger batch is
    /// sent alone. Default: 8 MiB.
    pub in_flight_bytes: usize,
}

impl Default for SessionOptions {
    fn default() -> Self {
        Self {
            durability: Durability::Unspecified,
            idempotent: true,
            producer_name: String::new(),
            fencing_token: None,
            topic_id: 0,
            compression: Compression::None,
            in_flight_batches: 16,
            in_flight_bytes: 8 << 20,
        }
    }
}

/// An open append session.
///
/// Batches are applied in the order of [`Session::append`]. After the first failed batch no later
/// one is applied, and every call fails with that error. If the leader dies, stops or is replaced,
/// the session does not fail: it sends unacked batches to the next leader, in order.
///
/// A session stays with its topic. If that is deleted, the session ends with `TOPIC_NOT_FOUND`, or
/// with `TOPIC_RECREATED` if another topic has its name by then.
///
/// Dropping a session lets queued batches finish; [`Session::close`] waits for them.
#[derive(Debug)]
pub struct Session {
    pipeline: Arc<Pipeline>,
    compressor: BatchCompressor,
    /// Versions of batches that the topic takes.
    format: BatchFormat,
}

impl Client {
    /// Opens a session to one partition and waits until the service has accepted it.
    ///
    /// # Errors
    /// The service's rejection, or the last failure if the leader is unreachable within the request
    /// timeout. Nothing was appended.
    pub async fn session(
        &self,
        topic: &str,
        partition: u32,
        options: SessionOptions,
    ) -> Result<Session> {
        let identities =
            options.idempotent.then(|| Identities::new(self.clone(), &options.producer_name));
        let (opened, is_open) = oneshot::channel();
        let pipeline = Arc::new(Pipeline::new(&options));
        // From here on dropping the session ends the driver, even if this future is dropped.
        let compressor = BatchCompressor::new(options.compression);
        let format = BatchFormat::Helix;
        let mut session = Session { pipeline: pipeline.clone(), compressor, format };
        let partition = (topic.to_owned(), partition);
        let driver = SessionDriver::new(self.clone(), partition, options, identities, pipeline);
        tokio::spawn(driver.run(opened));
        is_open.await.unwrap_or_else(|_| Err(stopped()))?;
        session.format = self.batch_format(topic, Instant::now()).await?;
        Ok(session)
    }
}

impl Session {
    /// Queues a batch, after waiting for capacity in the pipeline.
    ///
    /// The returned future resolves with the ack; dropping it does not cancel the batch. Dropping
    /// the future of this call before it is ready does.
    ///
    /// # Errors
    /// The error that ended the session: open a new one. `BATCH_TOO_LARGE` if the batch is larger
    /// than [`Session::batch_bytes_max`]: it was not queued, and the session continues.
    pub async fn append(&self, batch: impl IntoBatch) -> Result<AckFuture> {
        self.append_expecting(batch, None).await
    }

    /// Like [`Session::append`], on condition that the batch's first record gets this offset.
    ///
    /// # Errors
    /// As [`Session::append`].
    pub async fn append_expecting(
        &self,
        batch: impl IntoBatch,
        expected_offset: Option<u64>,
    ) -> Result<AckFuture> {
        let batch = self.compressor.build(batch, self.format)?;
        // 0 means that the service has not stated a limit.
        let limit = Some(self.batch_bytes_max()).filter(|limit| *limit > 0);
        // The limit holds for both sizes of a compressed batch.
        let bytes = batch.payload.len().max(batch.uncompressed_bytes as usize);
        if let Some(error) = limit.and_then(|limit| too_large(bytes, limit)) {
            return Err(error);
        }
        let permit = self.pipeline.permit(batch.payload.len()).await?;
        self.pipeline.push(batch, expected_offset, permit).map(AckFuture)
    }

    /// Returns the largest payload that the service accepts, in bytes. The limit holds before
    /// compression and after.
    pub fn batch_bytes_max(&self) -> usize {
        self.pipeline.batch_bytes_max()
    }

    /// Waits until every queued batch has its ack or its error, then ends the stream.
    ///
    /// The deadlines of the batches bound the wait.
    ///
    /// # Errors
    /// The error that ended the session earlier.
    pub async fn close(self) -> Result<()> {
        self.pipeline.close();
        self.pipeline.finished().await;
        self.pipeline.failure().map_or(Ok(()), Err)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.pipeline.close();
    }
}

/// Future of the ack of one batch, which resolves by the batch's deadline.
///
/// # Errors
/// The error that ended the session. With `may_have_applied` the batch may have been stored.
#[derive(Debug)]
pub struct AckFuture(oneshot::Receiver<Result<Ack>>);

impl Future for AckFuture {
    type Output = Result<Ack>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<Ack>> {
        let result = ready!(Pin::new(&mut self.0).poll(context));
        Poll::Ready(result.unwrap_or_else(|_| Err(stopped().with_may_have_applied(true))))
    }
}

/// Returns the error of a session whose runtime shut down: only then the driver drops a result.
fn stopped() -> Error {
    Error::client(Code::Cancelled, "the session was stopped")
}
