//! Writes messages to a gRPC body without copying their long fields.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{BufMut, Bytes, BytesMut};
use http_body::{Frame, SizeHint};
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint};
use tokio::task::yield_now;
use tonic::Status;
use tonic::codegen::Body;

/// Shortest `bytes` field that is passed on without a copy. Shorter ones are copied together.
///
/// The limit bounds the number of chunks to one per 4 KiB of a message.
pub const ZERO_COPY_BYTES_MIN: usize = 4 << 10;

/// Copied bytes at which a body stops collecting messages and sends them.
const COLLECT_BYTES: usize = 64 << 10;

/// Returns a body with one message, whose fields `write` writes.
pub(crate) fn single_message<M>(message: M, write: fn(M, &mut ChunkedWriter)) -> tonic::body::Body
where
    M: Message + Unpin + 'static,
{
    let mut message = Some(message);
    tonic::body::Body::new(ChunkedBody::single(
        move |_: &mut Context<'_>, writer: &mut ChunkedWriter| {
            Poll::Ready(message.take().map(|message| {
                writer.begin_message(message.encoded_len())?;
                write(message, writer);
                Ok(())
            }))
        },
    ))
}

/// Returns a body with one message of zero bytes.
pub(crate) fn empty_message() -> tonic::body::Body {
    let write = |_: &mut Context<'_>, writer: &mut ChunkedWriter| {
        Poll::Ready(Some(writer.begin_message(0)))
    };
    tonic::body::Body::new(ChunkedBody::single(write))
}

/// The bytes of outgoing messages as chunks: short fields copied together, long ones shared.
#[derive(Debug, Default)]
pub struct ChunkedWriter {
    chunks: VecDeque<Bytes>,
    /// Copied bytes; they follow `chunks`.
    open: BytesMut,
}

impl ChunkedWriter {
    /// Writes the length prefix of a message.
    ///
    /// # Errors
    /// OUT_OF_RANGE if a gRPC message cannot be that long.
    pub fn begin_message(&mut self, length: usize) -> Result<(), Status> {
        let length = u32::try_from(length).map_err(|_| {
            let limit = u32::MAX;
            Status::out_of_range(format!("a message of {length} bytes; the limit is {limit}"))
        })?;
        self.open.put_u8(0);
        self.open.put_u32(length);
        Ok(())
    }

    /// Writes the key and the length of a field of bytes or of a nested message.
    pub fn begin_field(&mut self, number: u32, length: usize) {
        encode_key(number, WireType::LengthDelimited, &mut self.open);
        encode_varint(length as u64, &mut self.open);
    }

    /// Returns the buffer for short fields, which are copied.
    pub fn buffer(&mut self) -> &mut BytesMut {
        &mut self.open
    }

    /// Writes a `bytes` field; as proto3 does, nothing if it is empty.
    pub fn bytes_field(&mut self, number: u32, bytes: Bytes) {
        if !bytes.is_empty() {
            self.begin_field(number, bytes.len());
            self.push(bytes);
        }
    }

    /// Writes encoded bytes.
    pub(crate) fn push(&mut self, bytes: Bytes) {
        if bytes.len() < ZERO_COPY_BYTES_MIN {
            self.open.extend_from_slice(&bytes);
        } else {
            self.close();
            self.chunks.push_back(bytes);
        }
    }

    fn close(&mut self) {
        if !self.open.is_empty() {
            self.chunks.push_back(self.open.split().freeze());
        }
    }

    fn is_empty(&self) -> bool {
        self.chunks.is_empty() && self.open.is_empty()
    }

    fn is_enough(&self) -> bool {
        !self.chunks.is_empty() || self.open.len() >= COLLECT_BYTES
    }

    fn next(&mut self) -> Option<Bytes> {
        if self.chunks.is_empty() {
            self.close();
        }
        self.chunks.pop_front()
    }
}

/// A body of messages; each poll of `write` adds one to a [`ChunkedWriter`].
pub struct ChunkedBody<F> {
    write: F,
    writer: ChunkedWriter,
    is_single: bool,
    is_done: bool,
    /// Error that ends the body after the messages before it.
    failed: Option<Status>,
    is_yielding: bool,
    /// The pending yield after a long chunk.
    turn: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl<F> fmt::Debug for ChunkedBody<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkedBody").field("is_done", &self.is_done).finish_non_exhaustive()
    }
}

impl<F> ChunkedBody<F> {
    /// Creates a body that ends when `write` returns `None`.
    pub fn new(write: F) -> Self {
        let writer = ChunkedWriter::default();
        Self {
            write,
            writer,
            is_single: false,
            is_done: false,
            failed: None,
            is_yielding: false,
            turn: None,
        }
    }

    /// Creates a body with one message, whose last frame carries the end of the stream.
    pub fn single(write: F) -> Self {
        Self { is_single: true, ..Self::new(write) }
    }

    /// Yields to the executor after each long chunk.
    ///
    /// For bulk transfers without a waiting client, so that latency-sensitive tasks run in between.
    #[must_use]
    pub fn yielding(self) -> Self {
        Self { is_yielding: true, ..self }
    }
}

impl<F> Body for ChunkedBody<F>
where
    F: FnMut(&mut Context<'_>, &mut ChunkedWriter) -> Poll<Option<Result<(), Status>>> + Unpin,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if let Some(turn) = &mut this.turn {
            ready!(turn.as_mut().poll(context));
            this.turn = None;
        }
        let mut is_pending = false;
        while !this.is_done && !is_pending && !this.writer.is_enough() {
            match (this.write)(context, &mut this.writer) {
                Poll::Ready(Some(Ok(()))) => this.is_done = this.is_single,
                Poll::Ready(Some(Err(status))) => {
                    this.is_done = true;
                    this.failed = Some(status);
                }
                Poll::Ready(None) => this.is_done = true,
                Poll::Pending => is_pending = true,
            }
        }
        match this.writer.next() {
            Some(bytes) => {
                if this.is_yielding && bytes.len() >= ZERO_COPY_BYTES_MIN {
                    this.turn = Some(Box::pin(yield_now()));
                }
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            None if is_pending => Poll::Pending,
            None => Poll::Ready(this.failed.take().map(Err)),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.is_done && self.writer.is_empty() && self.failed.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    #[test]
    fn sends_long_chunks_uncopied_and_short_ones_together() {
        let long = Bytes::from(vec![7; ZERO_COPY_BYTES_MIN]);
        let mut parts = VecDeque::from([
            Bytes::from_static(b"one"),
            long.clone(),
            Bytes::from_static(b"two"),
            Bytes::from_static(b"three"),
        ]);
        let mut body = ChunkedBody::new(|_: &mut Context<'_>, writer: &mut ChunkedWriter| {
            let Some(part) = parts.pop_front() else { return Poll::Ready(None) };
            writer.push(part);
            Poll::Ready(Some(Ok(())))
        });
        let mut context = Context::from_waker(Waker::noop());
        let mut next = || match Pin::new(&mut body).poll_frame(&mut context) {
            Poll::Ready(frame) => frame.map(|frame| frame.ok().and_then(|it| it.into_data().ok())),
            Poll::Pending => None,
        };
        assert_eq!(next(), Some(Some(Bytes::from_static(b"one"))));
        let second = next().flatten().expect("a chunk");
        assert_eq!(second.as_ptr(), long.as_ptr());
        assert_eq!(next(), Some(Some(Bytes::from_static(b"twothree"))));
        assert_eq!(next(), None);
    }

    #[test]
    fn single_message_ends_the_stream_with_its_last_frame() {
        let long = Bytes::from(vec![7; ZERO_COPY_BYTES_MIN]);
        let mut body =
            ChunkedBody::single(move |_: &mut Context<'_>, writer: &mut ChunkedWriter| {
                let begun = writer.begin_message(long.len());
                writer.push(long.clone());
                Poll::Ready(Some(begun))
            });
        let mut context = Context::from_waker(Waker::noop());
        let mut ends = Vec::new();
        while let Poll::Ready(Some(frame)) = Pin::new(&mut body).poll_frame(&mut context) {
            assert!(frame.is_ok_and(|frame| frame.is_data()));
            ends.push(body.is_end_stream());
            assert!(ends.len() < 10, "the body has one message");
        }
        assert_eq!(ends, [false, true]);
    }
}
