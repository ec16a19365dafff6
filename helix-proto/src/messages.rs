//! The messages of a gRPC body without a copy of what is long in them, in both directions.
//!
//! tonic decodes from one contiguous buffer and encodes into one, so that each batch is copied
//! once more on either side than it has to be. [`Messages`] decodes from the frames as they came
//! off the socket, whose bytes the `bytes` fields then are; [`Pieces`] and [`Outgoing`] give the
//! long fields of a message to the socket as they are. What goes over the wire is the same.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http_body::{Frame, SizeHint};
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint};
use tokio::task::yield_now;
use tonic::codegen::Body;
use tonic::{Request, Status, Streaming};

use crate::framing::Aside;

/// The message of a unary call whose body was put [`Aside`], or that was called in this process.
///
/// # Errors
/// As [`Messages::message`]; INTERNAL if there is not just one.
pub async fn single<M>(request: Request<M>, bytes_max: usize) -> Result<M, Status>
where
    M: Message + Default,
{
    let Some(body) = request.extensions().get().map(Aside::take) else {
        return Ok(request.into_inner());
    };
    let mut messages = Messages::new(body, bytes_max);
    let message = messages.message().await?;
    let message = message.ok_or_else(|| Status::internal("a request without a message"))?;
    // Read to the end, or the stream would be reset.
    match messages.message().await? {
        None => Ok(message),
        Some(_) => Err(Status::internal("more than one message in a unary request")),
    }
}

/// The messages of a call with a stream of requests, whose body was put [`Aside`].
pub fn stream<M>(request: &Request<Streaming<M>>, bytes_max: usize) -> Messages<M>
where
    M: Message + Default,
{
    let body = request.extensions().get().map(Aside::take).unwrap_or_default();
    Messages::new(body, bytes_max)
}

/// A body with one message, which `write` writes behind its head.
pub(crate) fn one<M>(message: M, write: fn(M, &mut Pieces)) -> tonic::body::Body
where
    M: Message + Unpin + 'static,
{
    let mut message = Some(message);
    tonic::body::Body::new(Outgoing::single(move |_: &mut Context<'_>, pieces: &mut Pieces| {
        Poll::Ready(message.take().map(|message| {
            pieces.begin(message.encoded_len())?;
            write(message, pieces);
            Ok(())
        }))
    }))
}

/// A body with one message that says nothing: what tonic sees of a unary request.
pub(crate) fn nothing() -> tonic::body::Body {
    let write = |_: &mut Context<'_>, pieces: &mut Pieces| Poll::Ready(Some(pieces.begin(0)));
    tonic::body::Body::new(Outgoing::single(write))
}

/// A flag, and the length, big endian.
const HEAD_BYTES: usize = 5;

/// Pieces of at least this size are passed on as they are. Smaller ones are copied together: there
/// are never many more pieces than four KiB fit into a message.
pub const LONG_BYTES: usize = 4 << 10;

/// A field that is less than this part of the frame it came in is copied, and so is one of fewer
/// bytes than this. Frames may share a buffer with others, which nothing tells from here: a field
/// that is kept holds up to a buffer of the largest frame, and so not many times its own size.
const HELD_PART: usize = 2;
const HELD_BYTES_MIN: usize = 96 << 10;

/// Copied bytes at which a body stops gathering messages and gives what it has.
const GATHER_BYTES: usize = 64 << 10;

/// Bytes, and the size of the frame that they hold in memory.
#[derive(Debug)]
struct Segment {
    bytes: Bytes,
    frame_bytes: usize,
}

/// Bytes in order, in several buffers, none of them empty.
#[derive(Debug, Default)]
struct Segments {
    long: VecDeque<Segment>,
    /// Copied together, behind `long`.
    small: BytesMut,
    bytes: usize,
}

impl Segments {
    fn push(&mut self, bytes: Bytes, frame_bytes: usize) {
        self.bytes += bytes.len();
        if bytes.len() < LONG_BYTES {
            self.small.extend_from_slice(&bytes);
        } else {
            self.close();
            self.long.push_back(Segment { bytes, frame_bytes });
        }
    }

    /// Nothing more is copied to what has been.
    fn close(&mut self) {
        if !self.small.is_empty() {
            let bytes = self.small.split().freeze();
            self.long.push_back(Segment { frame_bytes: bytes.len(), bytes });
        }
    }
}

/// Only after [`Segments::close`].
impl Buf for Segments {
    fn remaining(&self) -> usize {
        self.bytes
    }

    fn chunk(&self) -> &[u8] {
        self.long.front().map_or(&[], |first| &first.bytes)
    }

    fn advance(&mut self, mut count: usize) {
        assert!(count <= self.bytes, "{count} of {} bytes", self.bytes);
        self.bytes -= count;
        while let Some(first) = self.long.front_mut() {
            if count < first.bytes.len() {
                first.bytes.advance(count);
                break;
            }
            count -= first.bytes.len();
            self.long.pop_front();
        }
    }

    fn copy_to_bytes(&mut self, length: usize) -> Bytes {
        assert!(length <= self.bytes, "{length} of {} bytes", self.bytes);
        if let Some(Segment { bytes, frame_bytes }) = self.long.front()
            && length <= bytes.len()
            && length >= HELD_BYTES_MIN.max(frame_bytes / HELD_PART)
        {
            let field = bytes.slice(..length);
            self.advance(length);
            return field;
        }
        let mut field = BytesMut::with_capacity(length);
        field.put(self.take(length));
        field.freeze()
    }
}

/// Messages of one direction of a call. Allocates nothing by a length that it was told.
pub struct Messages<M, B = tonic::body::Body> {
    body: B,
    /// What has come of the message under way, without its head.
    arrived: Segments,
    head: [u8; HEAD_BYTES],
    head_bytes: usize,
    /// Of the last frame, not looked at yet.
    rest: Bytes,
    frame_bytes: usize,
    bytes_max: usize,
    types: PhantomData<fn() -> M>,
}

impl<M, B> fmt::Debug for Messages<M, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Messages").field("arrived", &self.arrived.bytes).finish_non_exhaustive()
    }
}

impl<M, B> Messages<M, B>
where
    M: Message + Default,
    B: Body<Data = Bytes, Error = Status> + Unpin,
{
    /// The messages of a body, none longer than `bytes_max`.
    pub fn new(body: B, bytes_max: usize) -> Self {
        Self {
            body,
            arrived: Segments::default(),
            head: [0; HEAD_BYTES],
            head_bytes: 0,
            rest: Bytes::new(),
            frame_bytes: 0,
            bytes_max,
            types: PhantomData,
        }
    }

    /// Whether a part of a message has come, and the rest has not.
    pub fn is_within(&self) -> bool {
        self.head_bytes > 0
    }

    /// The next message; none at the end of the body.
    ///
    /// # Errors
    /// With the code that the gRPC specification assigns: INTERNAL for what is no message,
    /// OUT_OF_RANGE for one that is too long, and what the body itself ends with. After an error
    /// there is nothing more to be had.
    pub async fn message(&mut self) -> Result<Option<M>, Status> {
        poll_fn(|context| self.poll_message(context)).await
    }

    /// As [`Self::message`].
    ///
    /// # Errors
    /// See there.
    pub fn poll_message(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<M>, Status>> {
        loop {
            if let Some(message) = self.decode()? {
                return Poll::Ready(Ok(Some(message)));
            }
            let frame = match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) if self.head_bytes == 0 => return Poll::Ready(Ok(None)),
                Poll::Ready(None) => {
                    let status = Status::internal("the body ended within a message");
                    return Poll::Ready(Err(status));
                }
                Poll::Ready(Some(frame)) => frame?,
            };
            // A request has no trailers that mean anything.
            if let Ok(bytes) = frame.into_data() {
                self.frame_bytes = bytes.len();
                self.rest = bytes;
            }
        }
    }

    /// A message, if the rest of one is there.
    fn decode(&mut self) -> Result<Option<M>, Status> {
        if self.head_bytes < HEAD_BYTES {
            let taken = (HEAD_BYTES - self.head_bytes).min(self.rest.len());
            self.rest.copy_to_slice(&mut self.head[self.head_bytes..][..taken]);
            self.head_bytes += taken;
            if self.head_bytes < HEAD_BYTES {
                return Ok(None);
            }
        }
        let [flag, length @ ..] = self.head;
        if flag != 0 {
            return Err(Status::internal("a compressed message, without an encoding in use"));
        }
        let length = u32::from_be_bytes(length) as usize;
        if length > self.bytes_max {
            let max = self.bytes_max;
            let what = format!("a message of {length} bytes is too large: at most {max} are taken");
            return Err(Status::out_of_range(what));
        }
        let lacking = length - self.arrived.bytes;
        let here = self.rest.split_to(lacking.min(self.rest.len()));
        if !here.is_empty() {
            self.arrived.push(here, self.frame_bytes);
        }
        if self.arrived.bytes < length {
            return Ok(None);
        }
        self.head_bytes = 0;
        let mut arrived = std::mem::take(&mut self.arrived);
        arrived.close();
        // INTERNAL is what the gRPC specification assigns to an unreadable message.
        M::decode(&mut arrived).map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

/// The bytes of messages on their way out: short ones together, long ones as they are.
#[derive(Debug, Default)]
pub struct Pieces {
    done: VecDeque<Bytes>,
    open: BytesMut,
}

impl Pieces {
    /// Begins a message of this length.
    ///
    /// # Errors
    /// OUT_OF_RANGE if a gRPC message cannot be that long.
    pub fn begin(&mut self, length: usize) -> Result<(), Status> {
        let length = u32::try_from(length)
            .map_err(|_| Status::out_of_range(format!("a message of {length} bytes")))?;
        self.open.put_u8(0);
        self.open.put_u32(length);
        Ok(())
    }

    /// Begins a field of this length: a message or bytes.
    pub fn field(&mut self, number: u32, length: usize) {
        encode_key(number, WireType::LengthDelimited, &mut self.open);
        encode_varint(length as u64, &mut self.open);
    }

    /// Where the short parts of the message go.
    pub fn short(&mut self) -> &mut BytesMut {
        &mut self.open
    }

    /// Adds a field of bytes, or nothing if there are none.
    pub fn payload(&mut self, number: u32, bytes: Bytes) {
        if !bytes.is_empty() {
            self.field(number, bytes.len());
            self.put(bytes);
        }
    }

    fn put(&mut self, bytes: Bytes) {
        if bytes.len() < LONG_BYTES {
            self.open.extend_from_slice(&bytes);
        } else {
            self.close();
            self.done.push_back(bytes);
        }
    }

    fn close(&mut self) {
        if !self.open.is_empty() {
            self.done.push_back(self.open.split().freeze());
        }
    }

    fn is_empty(&self) -> bool {
        self.done.is_empty() && self.open.is_empty()
    }

    fn is_enough(&self) -> bool {
        !self.done.is_empty() || self.open.len() >= GATHER_BYTES
    }

    fn next(&mut self) -> Option<Bytes> {
        if self.done.is_empty() {
            self.close();
        }
        self.done.pop_front()
    }
}

/// A body of messages that `write` puts into [`Pieces`], one each time that it is polled.
pub struct Outgoing<F> {
    write: F,
    pieces: Pieces,
    is_single: bool,
    over: bool,
    /// What the body ends with, behind the messages before it.
    failed: Option<Status>,
    in_turns: bool,
    /// What it waits for after a long frame.
    turn: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl<F> fmt::Debug for Outgoing<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outgoing").field("over", &self.over).finish_non_exhaustive()
    }
}

impl<F> Outgoing<F> {
    /// The body; it ends when `write` gives none.
    pub fn new(write: F) -> Self {
        let pieces = Pieces::default();
        Self {
            write,
            pieces,
            is_single: false,
            over: false,
            failed: None,
            in_turns: false,
            turn: None,
        }
    }

    /// A body with one message. Its end goes out with its last bytes, not behind them.
    pub fn single(write: F) -> Self {
        Self { is_single: true, ..Self::new(write) }
    }

    /// Lets the executor look at sockets and run what is ready after each long piece: for much at
    /// a time that nobody waits for, beside others who wait.
    #[must_use]
    pub fn in_turns(self) -> Self {
        Self { in_turns: true, ..self }
    }
}

impl<F> Body for Outgoing<F>
where
    F: FnMut(&mut Context<'_>, &mut Pieces) -> Poll<Option<Result<(), Status>>> + Unpin,
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
        while !this.over && !is_pending && !this.pieces.is_enough() {
            match (this.write)(context, &mut this.pieces) {
                Poll::Ready(Some(Ok(()))) => this.over = this.is_single,
                Poll::Ready(Some(Err(status))) => {
                    this.over = true;
                    this.failed = Some(status);
                }
                Poll::Ready(None) => this.over = true,
                Poll::Pending => is_pending = true,
            }
        }
        match this.pieces.next() {
            Some(bytes) => {
                if this.in_turns && bytes.len() >= LONG_BYTES {
                    this.turn = Some(Box::pin(yield_now()));
                }
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            None if is_pending => Poll::Pending,
            None => Poll::Ready(this.failed.take().map(Err)),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.over && self.pieces.is_empty() && self.failed.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;
    use crate::log::v1::EncodedBatch;

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
        let mut messages = Messages::new(Frames(frames.into_iter().collect()), 100_000);
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
    fn messages_are_the_same_however_their_bytes_come() {
        let batches = [batch(3), batch(0), batch(20_000), batch(4_096), batch(5_000), batch(1)];
        let body: Vec<u8> = batches.iter().flat_map(encoded).collect();
        for size in (1..20).chain((20..body.len() + 97).step_by(97)) {
            let (read, error) = read(body.chunks(size).map(Bytes::copy_from_slice));
            assert_eq!(read, batches, "frames of {size}");
            assert!(error.is_none(), "frames of {size}: {error:?}");
        }
    }

    #[test]
    fn a_long_field_is_what_came_in() {
        let body = Bytes::from(encoded(&batch(99_000)));
        // As one frame, and as a frame of its own behind the rest, as it is sent from here.
        let rest = body.len() - 99_000;
        for frames in [vec![body.clone()], vec![body.slice(..rest), body.slice(rest..)]] {
            for cut in [false, true] {
                let (read, _) =
                    if cut { read(cut_at_heads(&frames)) } else { read(frames.clone()) };
                assert!(body.as_ptr_range().contains(&read[0].payload.as_ptr()), "cut {cut}");
            }
        }
    }

    /// As the server's gate gives them.
    fn cut_at_heads(frames: &[Bytes]) -> Vec<Bytes> {
        let mut cutter = crate::framing::Cutter::default();
        let cut = frames.iter().flat_map(|frame| {
            cutter.put(frame.clone());
            std::iter::from_fn(|| cutter.next()).map(|piece| piece.bytes).collect::<Vec<_>>()
        });
        cut.collect()
    }

    #[test]
    fn a_field_that_is_little_of_its_frame_is_copied() {
        let body = Bytes::from([encoded(&batch(90_000)), encoded(&batch(99_000))].concat());
        let (read, _) = read([body.clone()]);
        let is_part = |batch: &EncodedBatch| body.as_ptr_range().contains(&batch.payload.as_ptr());
        assert_eq!(read.iter().map(is_part).collect::<Vec<_>>(), [false, true]);
    }

    #[test]
    fn small_frames_are_copied_together() {
        let body = Bytes::from(encoded(&batch(90_000)));
        let mut messages = Messages::<EncodedBatch, _>::new(Frames(VecDeque::new()), 100_000);
        for at in 0..body.len() - 1 {
            messages.rest = body.slice(at..=at);
            assert_eq!(messages.decode().expect("it is right so far"), None);
        }
        assert_eq!(messages.arrived.long.len(), 0);
    }

    #[test]
    fn what_is_no_message_is_an_error() {
        let error = |bytes: &'static [u8]| {
            let (read, status) = read([Bytes::from_static(bytes)]);
            assert_eq!(read, []);
            status.expect("it is no message").code()
        };
        assert_eq!(error(&[1, 0, 0, 0, 1, 0]), tonic::Code::Internal);
        assert_eq!(error(&[0, 255, 255, 255, 255]), tonic::Code::OutOfRange);
        assert_eq!(error(&[0, 0, 0, 0, 1, 255]), tonic::Code::Internal);
        assert_eq!(error(&[0, 0, 0, 0, 2, 8]), tonic::Code::Internal);
        assert_eq!(error(&[0, 0]), tonic::Code::Internal);
    }

    #[test]
    fn long_pieces_go_out_as_they_are_and_short_ones_together() {
        let long = Bytes::from(vec![7; LONG_BYTES]);
        let mut parts = VecDeque::from([
            Bytes::from_static(b"one"),
            long.clone(),
            Bytes::from_static(b"two"),
            Bytes::from_static(b"three"),
        ]);
        let mut body = Outgoing::new(|_: &mut Context<'_>, pieces: &mut Pieces| {
            let Some(part) = parts.pop_front() else { return Poll::Ready(None) };
            pieces.put(part);
            Poll::Ready(Some(Ok(())))
        });
        let mut context = Context::from_waker(Waker::noop());
        let mut next = || match Pin::new(&mut body).poll_frame(&mut context) {
            Poll::Ready(frame) => frame.map(|frame| frame.ok().and_then(|it| it.into_data().ok())),
            Poll::Pending => None,
        };
        assert_eq!(next(), Some(Some(Bytes::from_static(b"one"))));
        let second = next().flatten().expect("a piece");
        assert_eq!(second.as_ptr(), long.as_ptr());
        assert_eq!(next(), Some(Some(Bytes::from_static(b"twothree"))));
        assert_eq!(next(), None);
    }

    #[test]
    fn a_single_message_ends_with_its_last_bytes() {
        let long = Bytes::from(vec![7; LONG_BYTES]);
        let mut body = Outgoing::single(move |_: &mut Context<'_>, pieces: &mut Pieces| {
            let begun = pieces.begin(long.len());
            pieces.put(long.clone());
            Poll::Ready(Some(begun))
        });
        let mut context = Context::from_waker(Waker::noop());
        let mut ends = Vec::new();
        while let Poll::Ready(Some(frame)) = Pin::new(&mut body).poll_frame(&mut context) {
            assert!(frame.is_ok_and(|frame| frame.is_data()));
            ends.push(body.is_end_stream());
            assert!(ends.len() < 10, "it was one message");
        }
        assert_eq!(ends, [false, true]);
    }
}
