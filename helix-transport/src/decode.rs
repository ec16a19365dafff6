//! Reads messages from a gRPC body without copying their long fields.
//!
//! prost decodes from the HTTP/2 frames as they came off the socket, so that a `bytes` field is a
//! slice of its frame.

use std::fmt;
use std::future::poll_fn;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes};
use prost::Message;
use tonic::codegen::Body;
use tonic::{Request, Status, Streaming};

use crate::PREFIX_BYTES;
use crate::detached::DetachedBody;
use crate::message_buffer::MessageBuffer;

/// Reads the message of a unary request, from its detached body or, without one, from tonic.
///
/// A request without a [`DetachedBody`] comes from a caller in the same process.
///
/// # Errors
/// As [`MessageStream::message`]; INTERNAL if the body does not have exactly one message.
pub async fn read_unary<M>(request: Request<M>, bytes_max: usize) -> Result<M, Status>
where
    M: Message + Default,
{
    let Some(body) = request.extensions().get().map(DetachedBody::take) else {
        return Ok(request.into_inner());
    };
    let mut messages = MessageStream::new(body, bytes_max);
    let message = messages.message().await?;
    let message = message.ok_or_else(|| Status::internal("a unary request has no message"))?;
    // Read to the end, or the stream would be reset.
    match messages.message().await? {
        None => Ok(message),
        Some(_) => Err(Status::internal("a unary request has more than one message")),
    }
}

/// Returns the messages of a streaming request from its detached body.
pub fn read_messages<M>(request: &Request<Streaming<M>>, bytes_max: usize) -> MessageStream<M>
where
    M: Message + Default,
{
    let body = request.extensions().get().map(DetachedBody::take).unwrap_or_default();
    MessageStream::new(body, bytes_max)
}

/// The messages of one direction of a call. Never allocates by a length that the peer states.
pub struct MessageStream<M, B = tonic::body::Body> {
    body: B,
    /// Received part of the current message, without its prefix.
    received: MessageBuffer,
    prefix: [u8; PREFIX_BYTES],
    prefix_bytes: usize,
    /// Unread rest of the last frame.
    rest: Bytes,
    frame_bytes: usize,
    bytes_max: usize,
    types: PhantomData<fn() -> M>,
}

impl<M, B> fmt::Debug for MessageStream<M, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MessageStream")
            .field("received", &self.received.len())
            .finish_non_exhaustive()
    }
}

impl<M, B> MessageStream<M, B>
where
    M: Message + Default,
    B: Body<Data = Bytes, Error = Status> + Unpin,
{
    /// Reads the messages of `body`, each of at most `bytes_max` bytes.
    pub fn new(body: B, bytes_max: usize) -> Self {
        Self {
            body,
            received: MessageBuffer::default(),
            prefix: [0; PREFIX_BYTES],
            prefix_bytes: 0,
            rest: Bytes::new(),
            frame_bytes: 0,
            bytes_max,
            types: PhantomData,
        }
    }

    /// Returns true if only a part of the current message has arrived.
    pub fn is_mid_message(&self) -> bool {
        self.prefix_bytes > 0
    }

    /// Returns the next message, or `None` at the end of the body.
    ///
    /// # Errors
    /// The codes are those of the gRPC specification: INTERNAL for an unreadable message,
    /// OUT_OF_RANGE for one above the limit, or the body's own status. An error ends the stream.
    pub async fn message(&mut self) -> Result<Option<M>, Status> {
        poll_fn(|context| self.poll_message(context)).await
    }

    /// Polls for the next message; the poll form of [`Self::message`].
    ///
    /// # Errors
    /// As [`Self::message`].
    pub fn poll_message(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<M>, Status>> {
        loop {
            if let Some(message) = self.decode()? {
                return Poll::Ready(Ok(Some(message)));
            }
            let frame = match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) if self.prefix_bytes == 0 => return Poll::Ready(Ok(None)),
                Poll::Ready(None) => {
                    let status = Status::internal("the body ended within a message");
                    return Poll::Ready(Err(status));
                }
                Poll::Ready(Some(frame)) => frame?,
            };
            // Trailers of a request carry nothing.
            if let Ok(bytes) = frame.into_data() {
                self.frame_bytes = bytes.len();
                self.rest = bytes;
            }
        }
    }

    /// Decodes the current message if all of it has arrived.
    fn decode(&mut self) -> Result<Option<M>, Status> {
        if self.prefix_bytes < PREFIX_BYTES {
            let taken = (PREFIX_BYTES - self.prefix_bytes).min(self.rest.len());
            self.rest.copy_to_slice(&mut self.prefix[self.prefix_bytes..][..taken]);
            self.prefix_bytes += taken;
            if self.prefix_bytes < PREFIX_BYTES {
                return Ok(None);
            }
        }
        let [flag, length @ ..] = self.prefix;
        if flag != 0 {
            return Err(Status::internal("the message is compressed, but no encoding is in use"));
        }
        let length = u32::from_be_bytes(length) as usize;
        if length > self.bytes_max {
            let max = self.bytes_max;
            let what = format!("a message of {length} bytes is too large; the limit is {max}");
            return Err(Status::out_of_range(what));
        }
        let missing = length - self.received.len();
        let available = self.rest.split_to(missing.min(self.rest.len()));
        if !available.is_empty() {
            self.received.push(available, self.frame_bytes);
        }
        if self.received.len() < length {
            return Ok(None);
        }
        self.prefix_bytes = 0;
        let mut received = std::mem::take(&mut self.received);
        received.close();
        // INTERNAL is what the gRPC specification assigns to an unreadable message.
        M::decode(&mut received).map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::task::Waker;

    use helix_proto::log::v1::EncodedBatch;
    use http_body::Frame;

    use super::*;
    use crate::splitter::FrameSplitter;

    /// A body of these frames.
    struct Frames(VecDeque<Bytes>);

    impl Body for Frames {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Ready(self.0.pop_front().map(|bytes| Ok(Frame::data(bytes))))
        }
    }

    fn batch(bytes: usize) -> EncodedBatch {
        let payload: Vec<u8> = (0..bytes).map(|at| at as u8).collect();
        EncodedBatch { record_count: bytes as u32, payload: payload.into(), ..Default::default() }
    }

    fn encoded(batch: &EncodedBatch) -> Vec<u8> {
        let message = batch.encode_to_vec();
        [&[0][..], &(message.len() as u32).to_be_bytes(), &message].concat()
    }

    fn read(frames: impl IntoIterator<Item = Bytes>) -> (Vec<EncodedBatch>, Option<Status>) {
        let mut messages = MessageStream::new(Frames(frames.into_iter().collect()), 100_000);
        let mut context = Context::from_waker(Waker::noop());
        let mut all = Vec::new();
        loop {
            match messages.poll_message(&mut context) {
                Poll::Pending => unreachable!("the body is always ready"),
                Poll::Ready(Ok(Some(message))) => all.push(message),
                Poll::Ready(Ok(None)) => return (all, None),
                Poll::Ready(Err(status)) => return (all, Some(status)),
            }
        }
    }

    #[test]
    fn reads_the_same_messages_for_any_framing() {
        let batches = [batch(3), batch(0), batch(20_000), batch(4_096), batch(5_000), batch(1)];
        let body: Vec<u8> = batches.iter().flat_map(encoded).collect();
        for size in (1..20).chain((20..body.len() + 97).step_by(97)) {
            let (read, error) = read(body.chunks(size).map(Bytes::copy_from_slice));
            assert_eq!(read, batches, "frames of {size}");
            assert!(error.is_none(), "frames of {size}: {error:?}");
        }
    }

    #[test]
    fn long_field_is_a_slice_of_its_frame() {
        let body = Bytes::from(encoded(&batch(99_000)));
        // One frame with everything, and the payload in a frame of its own, as `ChunkedBody` sends.
        let rest = body.len() - 99_000;
        for frames in [vec![body.clone()], vec![body.slice(..rest), body.slice(rest..)]] {
            for split in [false, true] {
                let (read, _) =
                    if split { read(split_frames(&frames)) } else { read(frames.clone()) };
                assert!(body.as_ptr_range().contains(&read[0].payload.as_ptr()), "split {split}");
            }
        }
    }

    /// Splits the frames as a server's admission layer does.
    fn split_frames(frames: &[Bytes]) -> Vec<Bytes> {
        let mut splitter = FrameSplitter::default();
        let split = frames.iter().flat_map(|frame| {
            splitter.push(frame.clone());
            std::iter::from_fn(|| splitter.next()).map(|piece| piece.bytes).collect::<Vec<_>>()
        });
        split.collect()
    }

    #[test]
    fn copies_a_field_that_is_a_small_part_of_its_frame() {
        let body = Bytes::from([encoded(&batch(90_000)), encoded(&batch(99_000))].concat());
        let (read, _) = read([body.clone()]);
        let is_part = |batch: &EncodedBatch| body.as_ptr_range().contains(&batch.payload.as_ptr());
        assert_eq!(read.iter().map(is_part).collect::<Vec<_>>(), [false, true]);
    }

    #[test]
    fn copies_small_frames_together() {
        let body = Bytes::from(encoded(&batch(90_000)));
        let mut messages = MessageStream::<EncodedBatch, _>::new(Frames(VecDeque::new()), 100_000);
        for at in 0..body.len() - 1 {
            messages.rest = body.slice(at..=at);
            assert_eq!(messages.decode().expect("a valid message so far"), None);
        }
        assert_eq!(messages.received.slice_count(), 0);
    }

    #[test]
    fn rejects_malformed_messages() {
        let error = |bytes: &'static [u8]| {
            let (read, status) = read([Bytes::from_static(bytes)]);
            assert_eq!(read, []);
            status.expect("the input is malformed").code()
        };
        assert_eq!(error(&[1, 0, 0, 0, 1, 0]), tonic::Code::Internal);
        assert_eq!(error(&[0, 255, 255, 255, 255]), tonic::Code::OutOfRange);
        assert_eq!(error(&[0, 0, 0, 0, 1, 255]), tonic::Code::Internal);
        assert_eq!(error(&[0, 0, 0, 0, 2, 8]), tonic::Code::Internal);
        assert_eq!(error(&[0, 0]), tonic::Code::Internal);
    }
}
