//! Connections whose small writes go out with what follows them, in fewer packets.
//!
//! HTTP/2 flushes more often than it has to. It opens a stream before it grants room for data, so
//! that the headers of a request would be sent alone, and its body by the next turn of the
//! executor. And a frame that it does not copy it flushes before it looks for the next one, so that
//! the trailers behind a record would be sent alone. Each of these packets wakes the other end.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Writes that are not more than this, together, can wait; they are copied for that. A request's
/// headers have some hundred bytes, and its own messages begin at some hundred more.
const HELD_BYTES_MAX: usize = 4 << 10;

/// Most buffers given to the system at once. HTTP/2 frames are written in two.
const SLICES_MAX: usize = 8;

/// Which flushes of little wait, until the next flush or for a turn of the executor, in which the
/// tasks that are ready run, and write. Nothing waits for more than that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waits {
    /// All of them: for who sends requests.
    Always,
    /// Those behind several buffers at once, a frame and its head, where HTTP/2 flushes once more
    /// in the same turn: for who answers. What was copied together is flushed when it is complete.
    BehindFrames,
}

/// A connection whose small writes wait.
#[derive(Debug)]
pub struct Gathered<S> {
    inner: S,
    waits: Waits,
    /// Written by the caller and not yet by us.
    held: BytesMut,
    /// Whether the last write was of several buffers.
    ends_in_frame: bool,
    /// Whether a flush has waited already for what is held.
    waited: bool,
}

impl<S> Gathered<S> {
    /// Around a connection on which nothing else delays small writes.
    pub fn new(inner: S, waits: Waits) -> Self {
        Self { inner, waits, held: BytesMut::new(), ends_in_frame: false, waited: false }
    }
}

impl<S: AsyncWrite + Unpin> Gathered<S> {
    /// Writes all that is held and some of what is to follow it; how much of the latter.
    fn poll_through(
        &mut self,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let Self { inner, held, waited, .. } = self;
        while !held.is_empty() {
            let mut all = [IoSlice::new(&[]); SLICES_MAX];
            let mut count = 0;
            let slices = std::iter::once(IoSlice::new(held)).chain(buffers.iter().copied());
            for (place, slice) in all.iter_mut().zip(slices) {
                *place = slice;
                count += 1;
            }
            let all = all.get(..count).unwrap_or_default();
            let written = ready!(Pin::new(&mut *inner).poll_write_vectored(context, all))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            let of_held = written.min(held.len());
            held.advance(of_held);
            // What a full socket keeps here has waited, and goes out as soon as there is room.
            *waited = !held.is_empty();
            if written > of_held {
                return Poll::Ready(Ok(written - of_held));
            }
        }
        if buffers.is_empty() {
            return Poll::Ready(Ok(0));
        }
        Pin::new(inner).poll_write_vectored(context, buffers)
    }

    /// Whether a flush is left to the next one. Behind a frame also one that finds nothing held:
    /// the connection inside may hold the frame's end itself.
    fn may_wait(&self) -> bool {
        let by_rule = match self.waits {
            Waits::Always => !self.held.is_empty(),
            Waits::BehindFrames => self.ends_in_frame,
        };
        by_rule && !self.waited
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Gathered<S> {
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
        if self.held.len() + bytes > HELD_BYTES_MAX {
            let written = ready!(self.poll_through(context, buffers))?;
            self.ends_in_frame = ends_in_frame;
            self.waited = false;
            return Poll::Ready(Ok(written));
        }
        for buffer in buffers {
            self.held.extend_from_slice(buffer);
        }
        self.ends_in_frame = ends_in_frame;
        Poll::Ready(Ok(bytes))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Says that it is done while it waits, or HTTP/2 would not bring what it waits for. The task
    /// is woken, and HTTP/2 ends each of its turns with a flush.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.may_wait() {
            self.waited = true;
            context.waker().wake_by_ref();
            return Poll::Ready(Ok(()));
        }
        ready!(self.poll_through(context, &[]))?;
        self.ends_in_frame = false;
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_through(context, &[]))?;
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Gathered<S> {
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

    /// What arrives, a write each; takes no more than so many bytes at once.
    #[derive(Debug, Default)]
    struct Line {
        writes: Vec<Vec<u8>>,
        most: usize,
        /// Writes that it takes before it is full.
        room: Option<usize>,
        flushes: usize,
        is_shut: bool,
    }

    impl AsyncWrite for Line {
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
            if self.room == Some(0) {
                return Poll::Pending;
            }
            self.room = self.room.map(|room| room - 1);
            let all = buffers.iter().flat_map(|buffer| buffer.iter().copied());
            let bytes: Vec<u8> = all.take(self.most).collect();
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

    /// How often a task was woken.
    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// What HTTP/2 does with a connection.
    struct User {
        line: Gathered<Line>,
        woken: Arc<Woken>,
    }

    impl User {
        fn new(waits: Waits, most: usize) -> Self {
            let line = Gathered::new(Line { most, ..Line::default() }, waits);
            Self { line, woken: Arc::default() }
        }

        fn with<T>(
            &mut self,
            act: impl FnOnce(Pin<&mut Gathered<Line>>, &mut Context<'_>) -> T,
        ) -> T {
            let waker = self.woken.clone().into();
            act(Pin::new(&mut self.line), &mut Context::from_waker(&waker))
        }

        fn write(&mut self, buffers: &[&[u8]]) -> usize {
            let slices: Vec<_> = buffers.iter().map(|buffer| IoSlice::new(buffer)).collect();
            match self.with(|line, context| line.poll_write_vectored(context, &slices)) {
                Poll::Ready(written) => written.expect("the line fails nothing"),
                Poll::Pending => unreachable!("the line is always ready"),
            }
        }

        /// What of it has gone out. Who is told that a flush is done although something waits has
        /// to be woken.
        fn flush(&mut self) -> Poll<()> {
            let before = self.woken.0.load(Ordering::Relaxed);
            let polled = self.with(|line, context| line.poll_flush(context));
            let was_woken = self.woken.0.load(Ordering::Relaxed) > before;
            match polled {
                Poll::Ready(Ok(())) if was_woken => Poll::Pending,
                Poll::Ready(Ok(())) => {
                    assert!(self.line.held.is_empty(), "what is held goes out at some time");
                    Poll::Ready(())
                }
                Poll::Ready(Err(error)) => panic!("{error}"),
                Poll::Pending => {
                    assert_eq!(self.line.inner.room, Some(0), "a turn is not waited for");
                    Poll::Pending
                }
            }
        }

        fn writes(&self) -> &[Vec<u8>] {
            &self.line.inner.writes
        }
    }

    #[test]
    fn headers_go_out_with_the_body_that_follows_within_a_turn() {
        let mut user = User::new(Waits::Always, usize::MAX);
        assert_eq!(user.write(&[b"headers"]), 7);
        assert!(user.flush().is_pending());
        let body = vec![1; 100_000];
        assert_eq!(user.write(&[b"head", &body]), 100_004);
        assert!(user.flush().is_ready());
        assert_eq!(user.writes(), [[&b"headershead"[..], &body].concat()]);
    }

    #[test]
    fn trailers_go_out_with_the_record_that_they_follow() {
        let mut user = User::new(Waits::BehindFrames, usize::MAX);
        let record = vec![1; 1 << 10];
        for round in 1..4 {
            user.write(&[b"headers and head", &record]);
            assert!(user.flush().is_pending());
            user.write(&[b"trailers"]);
            assert!(user.flush().is_ready());
            assert_eq!(user.writes().len(), round);
        }
        assert_eq!(user.writes()[2], [&b"headers and head"[..], &record, b"trailers"].concat());
    }

    #[test]
    fn an_answer_that_is_complete_waits_for_nothing() {
        let mut user = User::new(Waits::BehindFrames, usize::MAX);
        user.write(&[b"headers, body and trailers"]);
        assert!(user.flush().is_ready());
        // A record whose trailers do not come waits for one turn.
        user.write(&[b"head", &[1; 500]]);
        assert!(user.flush().is_pending());
        assert!(user.flush().is_ready());
        assert_eq!(user.writes().len(), 2);
    }

    #[test]
    fn a_long_frame_is_flushed_with_its_trailers_or_after_a_turn() {
        let long = [1; 2 * HELD_BYTES_MAX];
        let mut user = User::new(Waits::BehindFrames, usize::MAX);
        // It has gone as far as the line inside, which may hold its end until it is flushed.
        assert_eq!(user.write(&[b"head", &long]), long.len() + 4);
        assert!(user.flush().is_pending());
        user.write(&[b"trailers"]);
        assert_eq!((user.writes().len(), user.line.inner.flushes), (1, 0));
        assert!(user.flush().is_ready());
        assert_eq!((user.writes().len(), user.line.inner.flushes), (2, 1));
        for flushes in 2..4 {
            user.write(&[b"head", &long]);
            assert!(user.flush().is_pending());
            assert!(user.flush().is_ready());
            assert_eq!(user.line.inner.flushes, flushes);
        }
        // One after the other, each with its flush.
        for _ in 0..3 {
            user.write(&[b"head", &long]);
            assert!(user.flush().is_pending());
        }
        assert_eq!(user.line.inner.flushes, 3);
        assert!(user.flush().is_ready());
        assert_eq!(user.line.inner.flushes, 4);
    }

    #[test]
    fn what_nothing_follows_goes_out_after_a_turn() {
        let mut user = User::new(Waits::Always, usize::MAX);
        for round in 1..4 {
            user.write(&[b"a ping"]);
            assert!(user.flush().is_pending());
            user.write(&[b"and another"]);
            assert!(user.flush().is_ready());
            assert!(user.flush().is_ready());
            assert_eq!(user.writes(), vec![b"a pingand another".to_vec(); round]);
        }
        user.write(&[b"the last one"]);
        assert!(user.with(|line, context| line.poll_shutdown(context)).is_ready());
        assert_eq!(user.writes().last(), Some(&b"the last one".to_vec()));
        assert!(user.line.inner.is_shut);
    }

    #[test]
    fn what_a_full_line_has_left_does_not_wait_another_turn() {
        let mut user = User::new(Waits::Always, 3);
        user.line.inner.room = Some(1);
        user.write(&[b"headers"]);
        assert!(user.flush().is_pending());
        assert!(user.flush().is_pending());
        user.line.inner.room = None;
        assert!(user.flush().is_ready());
        assert_eq!(user.writes().concat(), b"headers");
    }

    #[test]
    fn a_line_that_takes_nothing_is_an_error_and_no_endless_loop() {
        let mut user = User::new(Waits::Always, 0);
        user.write(&[b"headers"]);
        assert!(user.flush().is_pending());
        let Poll::Ready(Err(error)) = user.with(|line, context| line.poll_flush(context)) else {
            panic!("it was flushed");
        };
        assert_eq!(error.kind(), io::ErrorKind::WriteZero);
    }

    #[test]
    fn every_byte_arrives_once_and_in_order() {
        let seed = std::env::var("HELIX_SEED").map_or(7, |text| text.parse().expect("a number"));
        println!("gather: HELIX_SEED={seed}");
        let mut random = StdRng::seed_from_u64(seed);
        for round in 0..600 {
            let waits = if round % 2 == 0 { Waits::Always } else { Waits::BehindFrames };
            let mut user = User::new(waits, random.random_range(1..12_000));
            let mut sent = Vec::new();
            for _ in 0..random.random_range(1..40) {
                let buffers: Vec<Vec<u8>> = (0..random.random_range(1..12))
                    .map(|_| (0..random.random_range(0..700)).map(|_| random.random()).collect())
                    .collect();
                let buffers: Vec<&[u8]> = buffers.iter().map(Vec::as_slice).collect();
                let written = user.write(&buffers);
                let all = buffers.concat();
                assert!(written > 0 || all.is_empty());
                sent.extend_from_slice(&all[..written]);
                if random.random_bool(0.3) {
                    let _ = user.flush();
                }
            }
            while user.flush().is_pending() {}
            assert_eq!(user.writes().concat(), sent);
        }
    }
}
