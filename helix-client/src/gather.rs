//! Connections over TCP whose small writes go out with what follows them.
//!
//! HTTP/2 opens a stream before it grants room for data, so that the headers of a request would be
//! sent alone, and its body by the next turn of the executor: two packets, and two times that the
//! node wakes up. A flush of little waits for one turn instead, in which the tasks that are ready
//! run, the one with the body among them.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use futures_util::future::BoxFuture;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};

/// Writes that are not more than this, together, wait. A request's headers have some hundred bytes
/// and its own messages begin at some hundred more.
const HELD_BYTES_MAX: usize = 1 << 10;

/// Most buffers given to the system at once. HTTP/2 frames are written in two.
const SLICES_MAX: usize = 8;

/// A channel that connects when it is first used.
pub(crate) fn connect_lazily(endpoint: &Endpoint) -> Channel {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(endpoint.get_tcp_nodelay());
    // Shared out among the addresses of a name.
    tcp.set_connect_timeout(endpoint.get_connect_timeout());
    endpoint.connect_with_connector_lazy(Connector(tcp))
}

struct Connector(HttpConnector);

impl Service<Uri> for Connector {
    type Response = Gathered<TokioIo<TcpStream>>;
    type Error = <HttpConnector as Service<Uri>>::Error;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.0.call(uri);
        Box::pin(async move { Ok(Gathered::new(connecting.await?)) })
    }
}

/// A connection whose small writes wait for one turn.
#[derive(Debug)]
struct Gathered<S> {
    inner: S,
    /// Written by the caller and not yet by us.
    held: BytesMut,
    /// Whether a flush has waited already for what is held.
    waited: bool,
}

impl<S> Gathered<S> {
    fn new(inner: S) -> Self {
        Self { inner, held: BytesMut::new(), waited: false }
    }
}

impl<S: Write + Unpin> Gathered<S> {
    /// Writes all that is held and some of what is to follow it; how much of the latter.
    fn poll_through(
        &mut self,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let Self { inner, held, waited } = self;
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
}

impl<S: Write + Unpin> Write for Gathered<S> {
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
        if self.held.len() + bytes > HELD_BYTES_MAX {
            return self.poll_through(context, buffers);
        }
        for buffer in buffers {
            self.held.extend_from_slice(buffer);
        }
        Poll::Ready(Ok(bytes))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.held.is_empty() && !self.waited {
            self.waited = true;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        ready!(self.poll_through(context, &[]))?;
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_through(context, &[]))?;
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

impl<S: Read + Unpin> Read for Gathered<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

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
        is_shut: bool,
    }

    impl Write for Line {
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

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.is_shut = true;
            Poll::Ready(Ok(()))
        }
    }

    fn line(most: usize) -> Gathered<Line> {
        Gathered::new(Line { most, ..Line::default() })
    }

    fn write(line: &mut Gathered<Line>, buffers: &[&[u8]]) -> usize {
        let slices: Vec<_> = buffers.iter().map(|buffer| IoSlice::new(buffer)).collect();
        let mut context = Context::from_waker(Waker::noop());
        match Pin::new(line).poll_write_vectored(&mut context, &slices) {
            Poll::Ready(written) => written.expect("the line fails nothing"),
            Poll::Pending => unreachable!("the line is always ready"),
        }
    }

    fn flush(line: &mut Gathered<Line>) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        Pin::new(line).poll_flush(&mut context).is_ready()
    }

    #[test]
    fn headers_go_out_with_the_body_that_follows_within_a_turn() {
        let mut line = line(usize::MAX);
        assert_eq!(write(&mut line, &[b"headers"]), 7);
        assert!(!flush(&mut line));
        let body = vec![1; 100_000];
        assert_eq!(write(&mut line, &[b"head", &body]), 100_004);
        assert!(flush(&mut line));
        assert_eq!(line.inner.writes, [[&b"headershead"[..], &body].concat()]);
    }

    #[test]
    fn what_nothing_follows_goes_out_after_a_turn() {
        let mut line = line(usize::MAX);
        for round in 1..4 {
            write(&mut line, &[b"a ping"]);
            assert!(!flush(&mut line));
            write(&mut line, &[b"and another"]);
            assert!(flush(&mut line));
            assert!(flush(&mut line));
            assert_eq!(line.inner.writes, vec![b"a pingand another".to_vec(); round]);
        }
        write(&mut line, &[b"the last one"]);
        let mut context = Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut line).poll_shutdown(&mut context).is_ready());
        assert_eq!(line.inner.writes.last(), Some(&b"the last one".to_vec()));
        assert!(line.inner.is_shut);
    }

    #[test]
    fn what_a_full_line_has_left_does_not_wait_another_turn() {
        let mut line = line(3);
        line.inner.room = Some(1);
        write(&mut line, &[b"headers"]);
        assert!(!flush(&mut line));
        assert!(!flush(&mut line));
        line.inner.room = None;
        assert!(flush(&mut line));
        assert_eq!(line.inner.writes.concat(), b"headers");
    }

    #[test]
    fn a_line_that_takes_nothing_is_an_error_and_no_endless_loop() {
        let mut line = line(0);
        write(&mut line, &[b"headers"]);
        assert!(!flush(&mut line));
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(Err(error)) = Pin::new(&mut line).poll_flush(&mut context) else {
            panic!("it was flushed");
        };
        assert_eq!(error.kind(), io::ErrorKind::WriteZero);
    }

    #[test]
    fn every_byte_arrives_once_and_in_order() {
        let mut random = StdRng::seed_from_u64(7);
        for _ in 0..300 {
            let mut line = line(random.random_range(1..3_000));
            let mut sent = Vec::new();
            for _ in 0..random.random_range(1..40) {
                let buffers: Vec<Vec<u8>> = (0..random.random_range(1..12))
                    .map(|_| (0..random.random_range(0..700)).map(|_| random.random()).collect())
                    .collect();
                let buffers: Vec<&[u8]> = buffers.iter().map(Vec::as_slice).collect();
                let written = write(&mut line, &buffers);
                let all = buffers.concat();
                assert!(written > 0 || all.is_empty());
                sent.extend_from_slice(&all[..written]);
                if random.random_bool(0.3) {
                    flush(&mut line);
                }
            }
            while !flush(&mut line) {}
            assert_eq!(line.inner.writes.concat(), sent);
        }
    }
}
