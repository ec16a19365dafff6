//! Splits the bytes of a gRPC body at its messages.
//!
//! Each message follows a length prefix of five bytes.
//!
//! tonic's decoder reserves the whole message length when it has the prefix. If part of the message
//! is already in its buffer, it copies that part and ends up with up to twice the message's size,
//! which stays allocated as long as anything refers to its bytes. A body that is split behind
//! prefixes and at message ends avoids this: a message gets one buffer of its own size.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tonic::Status;
use tonic::codegen::Body;

use crate::PREFIX_BYTES;

/// Messages up to this size stay with their prefixes: copying them costs less than another poll.
const SMALL_BYTES: usize = 4 << 10;

/// Splits the bytes of one direction of a call. Reads length prefixes only.
#[derive(Debug, Default)]
pub struct FrameSplitter {
    prefix: [u8; PREFIX_BYTES],
    prefix_bytes: usize,
    /// Missing bytes of the current message.
    remaining: u64,
    /// Number of messages that have begun.
    begun: u64,
    /// Input that has not been returned yet.
    input: Bytes,
}

/// A piece of a body: a length prefix, part of a message, or a small message with its prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FramePiece {
    /// The bytes.
    pub bytes: Bytes,
    /// Length of the message whose prefix ends in this piece.
    pub message_length: Option<u32>,
}

impl FrameSplitter {
    /// Adds the next bytes of the body. Call it only after [`Self::next`] has returned `None`.
    pub fn push(&mut self, bytes: Bytes) {
        debug_assert!(self.input.is_empty(), "the previous input was not read to its end");
        self.input = bytes;
    }

    /// Returns the next piece of the input, or `None` if more input is needed.
    #[expect(clippy::should_implement_trait, reason = "it continues after it has returned None")]
    pub fn next(&mut self) -> Option<FramePiece> {
        if self.input.is_empty() {
            return None;
        }
        if self.remaining > 0 {
            return Some(FramePiece { bytes: self.split_message(), message_length: None });
        }
        let taken = (PREFIX_BYTES - self.prefix_bytes).min(self.input.len());
        let end = self.prefix_bytes + taken;
        if let (Some(prefix), Some(bytes)) =
            (self.prefix.get_mut(self.prefix_bytes..end), self.input.get(..taken))
        {
            prefix.copy_from_slice(bytes);
        }
        if end < PREFIX_BYTES {
            self.prefix_bytes = end;
            let bytes = std::mem::take(&mut self.input);
            return Some(FramePiece { bytes, message_length: None });
        }
        let [_, length @ ..] = self.prefix;
        let length = u32::from_be_bytes(length);
        self.prefix_bytes = 0;
        self.remaining = u64::from(length);
        self.begun += 1;
        let whole = taken.saturating_add(usize::try_from(length).unwrap_or(usize::MAX));
        let end = if whole <= self.input.len() && whole <= SMALL_BYTES {
            self.remaining = 0;
            whole
        } else {
            taken
        };
        Some(FramePiece { bytes: self.input.split_to(end), message_length: Some(length) })
    }

    fn split_message(&mut self) -> Bytes {
        let available = usize::try_from(self.remaining).unwrap_or(usize::MAX).min(self.input.len());
        self.remaining -= available as u64;
        self.input.split_to(available)
    }

    /// Returns true if the last returned byte ended a message, or none was returned.
    pub fn is_at_boundary(&self) -> bool {
        self.remaining == 0 && self.prefix_bytes == 0
    }

    /// Returns true if no input is left.
    pub fn is_empty(&self) -> bool {
        self.input.is_empty()
    }

    /// Returns true if no message has begun.
    pub fn is_unstarted(&self) -> bool {
        self.begun == 0
    }
}

/// A body that splits the frames of another behind length prefixes and at message ends.
#[derive(Debug)]
pub struct FramedBody<B> {
    body: B,
    splitter: FrameSplitter,
}

impl<B> FramedBody<B> {
    /// Splits `body`.
    pub fn new(body: B) -> Self {
        Self { body, splitter: FrameSplitter::default() }
    }
}

impl<B> Body for FramedBody<B>
where
    B: Body<Data = Bytes, Error = Status> + Unpin,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        loop {
            if let Some(piece) = this.splitter.next() {
                return Poll::Ready(Some(Ok(Frame::data(piece.bytes))));
            }
            match Pin::new(&mut this.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    // An empty frame yields no piece, so that the loop polls the body again.
                    Ok(bytes) => this.splitter.push(bytes),
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                other => return other,
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.splitter.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        // The inner body no longer counts the bytes that are in the splitter.
        if self.splitter.is_empty() { self.body.size_hint() } else { SizeHint::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(length: u32) -> Vec<u8> {
        let prefix = [&[0][..], &length.to_be_bytes()].concat();
        [prefix, vec![7; length as usize]].concat()
    }

    fn pieces(splitter: &mut FrameSplitter, bytes: &[u8]) -> Vec<FramePiece> {
        splitter.push(Bytes::copy_from_slice(bytes));
        std::iter::from_fn(|| splitter.next()).collect()
    }

    #[test]
    fn splits_every_message_once_for_any_input_chunking() {
        let lengths = [3, 0, 10_000, 1, 5_000];
        let body: Vec<u8> = lengths.into_iter().flat_map(message).collect();
        for size in (1..20).chain((20..body.len()).step_by(97)) {
            let mut splitter = FrameSplitter::default();
            let all: Vec<_> =
                body.chunks(size).flat_map(|bytes| pieces(&mut splitter, bytes)).collect();
            let begun: Vec<_> = all.iter().filter_map(|piece| piece.message_length).collect();
            assert_eq!(begun, lengths, "chunks of {size}");
            let bytes: Vec<u8> = all.iter().flat_map(|piece| piece.bytes.clone()).collect();
            assert_eq!(bytes, body, "chunks of {size}");
            assert!(splitter.is_at_boundary() && splitter.is_empty());
        }
    }

    #[test]
    fn separates_long_messages_from_their_prefixes() {
        let body = [message(10), message(10_000), message(20_000), message(2)].concat();
        let all = pieces(&mut FrameSplitter::default(), &body);
        let lengths: Vec<_> = all.iter().map(|piece| piece.bytes.len()).collect();
        assert_eq!(lengths, [15, 5, 10_000, 5, 20_000, 7]);
    }

    #[test]
    fn knows_when_it_is_at_a_message_boundary() {
        let mut splitter = FrameSplitter::default();
        assert!(splitter.is_at_boundary() && splitter.is_unstarted());
        assert_eq!(pieces(&mut splitter, &[0, 0, 0])[0].message_length, None);
        assert!(!splitter.is_at_boundary() && splitter.is_unstarted());
        assert_eq!(pieces(&mut splitter, &[0, 9, 1])[0].message_length, Some(9));
        assert!(!splitter.is_at_boundary() && !splitter.is_unstarted());
        pieces(&mut splitter, &[1; 7]);
        assert!(!splitter.is_at_boundary());
        pieces(&mut splitter, &[1]);
        assert!(splitter.is_at_boundary());
        let piece = &pieces(&mut splitter, &[0, 255, 255, 255, 255])[0];
        assert_eq!(piece.message_length, Some(u32::MAX));
    }
}
