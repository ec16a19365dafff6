//! A connection that merges small writes with the writes that follow, to send fewer packets.
//!
//! HTTP/2 flushes more often than necessary. It opens a stream before it grants flow-control
//! capacity, so that a request's headers would be sent alone and its body in the executor's next
//! turn. It also flushes a frame that it does not copy before it looks for the next frame, so that
//! the trailers behind a record would be sent alone. Each such packet wakes the other side.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Largest total of writes that can be deferred; deferred bytes are copied.
///
/// Sized for a request: about a hundred bytes of headers, and some hundred before the payload.
const DEFERRED_BYTES_MAX: usize = 4 << 10;

/// Most buffers given to the system at once. HTTP/2 writes a frame as two.
const SLICES_MAX: usize = 8;

/// Flushes of small writes that a [`CoalescedIo`] defers.
///
/// A deferred flush lasts until the next flush, at most one turn of the executor, in which the
/// tasks that are ready can write more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlushPolicy {
    /// Defers all of them: for the side that sends requests.
    DeferAll,
    /// Defers those after a vectored write, which is a frame and its header: for the side that
    /// responds. HTTP/2 flushes once more in the same turn. Copied frames are flushed at once.
    DeferAfterFrames,
}

/// A connection that defers small writes to merge them with later ones.
#[derive(Debug)]
pub struct CoalescedIo<S> {
    inner: S,
    policy: FlushPolicy,
    /// Bytes that the caller has written and `inner` has not received yet.
    deferred: BytesMut,
    /// True if the last write had several buffers.
    ends_in_frame: bool,
    /// True if a flush of `deferred` has been deferred once already.
    was_deferred: bool,
}

impl<S> CoalescedIo<S> {
    /// Wraps a connection. Nothing else may delay its small writes, such as Nagle's algorithm.
    pub fn new(inner: S, policy: FlushPolicy) -> Self {
        let deferred = BytesMut::new();
        Self { inner, policy, deferred, ends_in_frame: false, was_deferred: false }
    }
}

impl<S: AsyncWrite + Unpin> CoalescedIo<S> {
    /// Writes all deferred bytes and some of `buffers`. Returns how many of the latter.
    fn poll_write_through(
        &mut self,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let Self { inner, deferred, was_deferred, .. } = self;
        while !deferred.is_empty() {
            let mut all = [IoSlice::new(&[]); SLICES_MAX];
            let mut count = 0;
            let slices = std::iter::once(IoSlice::new(deferred)).chain(buffers.iter().copied());
            for (entry, slice) in all.iter_mut().zip(slices) {
                *entry = slice;
                count += 1;
            }
            let all = all.get(..count).unwrap_or_default();
            let written = ready!(Pin::new(&mut *inner).poll_write_vectored(context, all))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            let of_deferred = written.min(deferred.len());
            deferred.advance(of_deferred);
            // Bytes that a full socket leaves here are not deferred a second time.
            *was_deferred = !deferred.is_empty();
            if written > of_deferred {
                return Poll::Ready(Ok(written - of_deferred));
            }
        }
        if buffers.is_empty() {
            return Poll::Ready(Ok(0));
        }
        Pin::new(inner).poll_write_vectored(context, buffers)
    }

    /// Returns true if a flush can be left to the next one.
    ///
    /// After a frame this includes a flush that finds nothing deferred: the inner connection may
    /// hold the frame's end itself.
    fn can_defer(&self) -> bool {
        let by_policy = match self.policy {
            FlushPolicy::DeferAll => !self.deferred.is_empty(),
            FlushPolicy::DeferAfterFrames => self.ends_in_frame,
        };
        by_policy && !self.was_deferred
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for CoalescedIo<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let bytes: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        let ends_in_frame = buffers.len() > 1;
        if self.deferred.len() + bytes > DEFERRED_BYTES_MAX {
            let written = ready!(self.poll_write_through(context, buffers))?;
            self.ends_in_frame = ends_in_frame;
            self.was_deferred = false;
            return Poll::Ready(Ok(written));
        }
        for buffer in buffers {
            self.deferred.extend_from_slice(buffer);
        }
        self.ends_in_frame = ends_in_frame;
        Poll::Ready(Ok(bytes))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Reports success for a deferred flush, or HTTP/2 would not write the bytes to merge with.
    ///
    /// It wakes the task, and HTTP/2 ends each of its turns with a flush.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.can_defer() {
            self.was_deferred = true;
            context.waker().wake_by_ref();
            return Poll::Ready(Ok(()));
        }
        ready!(self.poll_write_through(context, &[]))?;
        self.ends_in_frame = false;
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_through(context, &[]))?;
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for CoalescedIo<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    /// A connection that records each write and accepts at most `write_max` bytes at once.
    #[derive(Debug, Default)]
    struct Wire {
        writes: Vec<Vec<u8>>,
        write_max: usize,
        /// Writes that it accepts before it is full.
        capacity: Option<usize>,
        flushes: usize,
        is_shut: bool,
    }

    impl AsyncWrite for Wire {
        fn poll_write(
            self: Pin<&mut Self>,
            context: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.poll_write_vectored(context, &[IoSlice::new(bytes)])
        }

        fn poll_write_vectored(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buffers: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            if self.capacity == Some(0) {
                return Poll::Pending;
            }
            self.capacity = self.capacity.map(|left| left - 1);
            let all = buffers.iter().flat_map(|buffer| buffer.iter().copied());
            let bytes: Vec<u8> = all.take(self.write_max).collect();
            let written = bytes.len();
            self.writes.push(bytes);
            Poll::Ready(Ok(written))
        }

        fn poll_flush(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.flushes += 1;
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.is_shut = true;
            Poll::Ready(Ok(()))
        }
    }

    /// Counts wake-ups of a task.
    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Writes and flushes as HTTP/2 does.
    struct Http2 {
        wire: CoalescedIo<Wire>,
        woken: Arc<Woken>,
    }

    impl Http2 {
        fn new(policy: FlushPolicy, write_max: usize) -> Self {
            let wire = CoalescedIo::new(Wire { write_max, ..Wire::default() }, policy);
            Self { wire, woken: Arc::default() }
        }

        fn with<T>(
            &mut self,
            act: impl FnOnce(Pin<&mut CoalescedIo<Wire>>, &mut Context<'_>) -> T,
        ) -> T {
            let waker = self.woken.clone().into();
            act(Pin::new(&mut self.wire), &mut Context::from_waker(&waker))
        }

        fn write(&mut self, buffers: &[&[u8]]) -> usize {
            let slices: Vec<_> = buffers.iter().map(|buffer| IoSlice::new(buffer)).collect();
            match self.with(|wire, context| wire.poll_write_vectored(context, &slices)) {
                Poll::Ready(written) => written.expect("the connection does not fail"),
                Poll::Pending => unreachable!("the connection is always ready"),
            }
        }

        /// Flushes. Returns pending if the flush was deferred, in which case the task must have
        /// been woken, or if the connection is full.
        fn flush(&mut self) -> Poll<()> {
            let before = self.woken.0.load(Ordering::Relaxed);
            let polled = self.with(|wire, context| wire.poll_flush(context));
            let was_woken = self.woken.0.load(Ordering::Relaxed) > before;
            match polled {
                Poll::Ready(Ok(())) if was_woken => Poll::Pending,
                Poll::Ready(Ok(())) => {
                    assert!(self.wire.deferred.is_empty(), "the flush sent everything");
                    Poll::Ready(())
                }
                Poll::Ready(Err(error)) => panic!("{error}"),
                Poll::Pending => {
                    assert_eq!(
                        self.wire.inner.capacity,
                        Some(0),
                        "only a full connection is pending"
                    );
                    Poll::Pending
                }
            }
        }

        fn writes(&self) -> &[Vec<u8>] {
            &self.wire.inner.writes
        }
    }

    #[test]
    fn sends_headers_with_the_body_that_follows_within_a_turn() {
        let mut http2 = Http2::new(FlushPolicy::DeferAll, usize::MAX);
        assert_eq!(http2.write(&[b"headers"]), 7);
        assert!(http2.flush().is_pending());
        let body = vec![1; 100_000];
        assert_eq!(http2.write(&[b"head", &body]), 100_004);
        assert!(http2.flush().is_ready());
        assert_eq!(http2.writes(), [[&b"headershead"[..], &body].concat()]);
    }

    #[test]
    fn sends_trailers_with_their_record() {
        let mut http2 = Http2::new(FlushPolicy::DeferAfterFrames, usize::MAX);
        let record = vec![1; 1 << 10];
        for round in 1..4 {
            http2.write(&[b"headers and head", &record]);
            assert!(http2.flush().is_pending());
            http2.write(&[b"trailers"]);
            assert!(http2.flush().is_ready());
            assert_eq!(http2.writes().len(), round);
        }
        assert_eq!(http2.writes()[2], [&b"headers and head"[..], &record, b"trailers"].concat());
    }

    #[test]
    fn flushes_a_complete_response_at_once() {
        let mut http2 = Http2::new(FlushPolicy::DeferAfterFrames, usize::MAX);
        http2.write(&[b"headers, body and trailers"]);
        assert!(http2.flush().is_ready());
        // A record without trailers is deferred for one turn.
        http2.write(&[b"head", &[1; 500]]);
        assert!(http2.flush().is_pending());
        assert!(http2.flush().is_ready());
        assert_eq!(http2.writes().len(), 2);
    }

    #[test]
    fn flushes_a_long_frame_with_its_trailers_or_after_a_turn() {
        let long = [1; 2 * DEFERRED_BYTES_MAX];
        let mut http2 = Http2::new(FlushPolicy::DeferAfterFrames, usize::MAX);
        // The inner connection has the frame, but may hold its end until a flush.
        assert_eq!(http2.write(&[b"head", &long]), long.len() + 4);
        assert!(http2.flush().is_pending());
        http2.write(&[b"trailers"]);
        assert_eq!((http2.writes().len(), http2.wire.inner.flushes), (1, 0));
        assert!(http2.flush().is_ready());
        assert_eq!((http2.writes().len(), http2.wire.inner.flushes), (2, 1));
        for flushes in 2..4 {
            http2.write(&[b"head", &long]);
            assert!(http2.flush().is_pending());
            assert!(http2.flush().is_ready());
            assert_eq!(http2.wire.inner.flushes, flushes);
        }
        // Several frames, each with a flush of its own.
        for _ in 0..3 {
            http2.write(&[b"head", &long]);
            assert!(http2.flush().is_pending());
        }
        assert_eq!(http2.wire.inner.flushes, 3);
        assert!(http2.flush().is_ready());
        assert_eq!(http2.wire.inner.flushes, 4);
    }

    #[test]
    fn sends_a_lone_write_after_one_turn() {
        let mut http2 = Http2::new(FlushPolicy::DeferAll, usize::MAX);
        for round in 1..4 {
            http2.write(&[b"a ping"]);
            assert!(http2.flush().is_pending());
            http2.write(&[b"and another"]);
            assert!(http2.flush().is_ready());
            assert!(http2.flush().is_ready());
            assert_eq!(http2.writes(), vec![b"a pingand another".to_vec(); round]);
        }
        http2.write(&[b"the last one"]);
        assert!(http2.with(|wire, context| wire.poll_shutdown(context)).is_ready());
        assert_eq!(http2.writes().last(), Some(&b"the last one".to_vec()));
        assert!(http2.wire.inner.is_shut);
    }

    #[test]
    fn does_not_defer_the_rest_of_a_partial_write() {
        let mut http2 = Http2::new(FlushPolicy::DeferAll, 3);
        http2.wire.inner.capacity = Some(1);
        http2.write(&[b"headers"]);
        assert!(http2.flush().is_pending());
        assert!(http2.flush().is_pending());
        http2.wire.inner.capacity = None;
        assert!(http2.flush().is_ready());
        assert_eq!(http2.writes().concat(), b"headers");
    }

    #[test]
    fn fails_if_the_connection_accepts_no_bytes() {
        let mut http2 = Http2::new(FlushPolicy::DeferAll, 0);
        http2.write(&[b"headers"]);
        assert!(http2.flush().is_pending());
        let Poll::Ready(Err(error)) = http2.with(|wire, context| wire.poll_flush(context)) else {
            panic!("the flush did not fail");
        };
        assert_eq!(error.kind(), io::ErrorKind::WriteZero);
    }

    #[test]
    fn delivers_every_byte_once_and_in_order() {
        let seed = std::env::var("HELIX_SEED").map_or(7, |text| text.parse().expect("a number"));
        println!("coalesce: HELIX_SEED={seed}");
        let mut random = StdRng::seed_from_u64(seed);
        for round in 0..600 {
            let policy =
                if round % 2 == 0 { FlushPolicy::DeferAll } else { FlushPolicy::DeferAfterFrames };
            let mut http2 = Http2::new(policy, random.random_range(1..12_000));
            let mut sent = Vec::new();
            for _ in 0..random.random_range(1..40) {
                let buffers: Vec<Vec<u8>> = (0..random.random_range(1..12))
                    .map(|_| (0..random.random_range(0..700)).map(|_| random.random()).collect())
                    .collect();
                let buffers: Vec<&[u8]> = buffers.iter().map(Vec::as_slice).collect();
                let written = http2.write(&buffers);
                let all = buffers.concat();
                assert!(written > 0 || all.is_empty());
                sent.extend_from_slice(&all[..written]);
                if random.random_bool(0.3) {
                    let _ = http2.flush();
                }
            }
            while http2.flush().is_pending() {}
            assert_eq!(http2.writes().concat(), sent);
        }
    }
}
