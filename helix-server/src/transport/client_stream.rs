//! A client's connection as HTTP/2 reads it: in turns, so that no client fills the memory or the
//! runtime's queues with calls that it resets.
//!
//! HTTP/2 reads frames until none are left, before it accepts the streams in them, and each call
//! is a task. So one turn of the connection's task reads at most [`limits::TURN_FRAMES_MAX`]
//! frames and [`limits::TURN_BYTES_MAX`] bytes, and the connection is not read while
//! - [`limits::CALLS_UNBEGUN_MAX`] of its calls have not begun,
//! - its client takes no responses and has begun [`limits::CALLS_UNREAD_MAX`] calls since,
//! - its client cancels calls faster than `load/cancelled_calls.rs` allows.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep_until};
use tokio_util::sync::DropGuard;
use tonic::transport::server::Connected;

use super::authority::AuthorityFilter;
use super::client_frames::ClientFrames;
use super::turn_pause::TurnPause;
use crate::call::{CancelledCalls, ClientConnection};
use crate::limits;

/// A client's socket, which [`ClientConnection::close`] can close from another task.
pub(super) struct ClientStream<S> {
    stream: S,
    connection: Arc<ClientConnection>,
    frames: ClientFrames,
    /// Present on a Unix domain socket.
    filter: Option<AuthorityFilter>,
    /// Bytes that were read and belong to a later turn.
    held: BytesMut,
    /// True once the connection was read.
    has_begun: bool,
    /// Frames other than DATA in this turn.
    turn_frames: usize,
    turn_bytes: usize,
    turn_pause: TurnPause,
    cancelled: CancelledCalls,
    /// Fires when the connection is read again.
    pause: Option<Pin<Box<Sleep>>>,
    /// Calls that were accepted when the socket became full, and whether a read waits for it.
    full_since: Option<(u64, bool)>,
    /// Cancels a token when the HTTP/2 server drops the socket.
    _ended: DropGuard,
}

impl<S> ClientStream<S> {
    pub(super) fn new(stream: S, connection: &Arc<ClientConnection>, ended: DropGuard) -> Self {
        Self {
            stream,
            connection: connection.clone(),
            frames: ClientFrames::new(),
            filter: connection.is_on_unix_socket().then(AuthorityFilter::new),
            held: BytesMut::new(),
            has_begun: false,
            turn_frames: 0,
            turn_bytes: 0,
            turn_pause: TurnPause::new(),
            cancelled: CancelledCalls::new(),
            pause: None,
            full_since: None,
            _ended: ended,
        }
    }

    /// Ready if the connection may be read now.
    fn poll_turn(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if !self.has_begun {
            self.has_begun = true;
            self.connection.begin_calls();
        }
        let accepted = self.connection.accepted_calls();
        if self.turn_frames >= limits::TURN_FRAMES_MAX || self.turn_bytes >= limits::TURN_BYTES_MAX
        {
            ready!(self.turn_pause.poll(context));
            (self.turn_frames, self.turn_bytes) = (0, 0);
        }
        ready!(self.connection.poll_begun(context));
        if let Some((since, is_awaited)) = &mut self.full_since
            && accepted.saturating_sub(*since) >= limits::CALLS_UNREAD_MAX
        {
            *is_awaited = true;
            return Poll::Pending;
        }
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(context));
            self.pause = None;
        }
        Poll::Ready(())
    }

    /// Passes bytes that HTTP/2 reads next; returns how many belong to this turn.
    fn pass(&mut self, bytes: &mut [u8]) -> usize {
        let most = limits::TURN_FRAMES_MAX - self.turn_frames;
        let passed = self.frames.pass(bytes, most, self.filter.as_mut());
        self.turn_frames += passed.frames;
        self.turn_bytes += passed.bytes;
        if passed.resets > 0
            && let Some(until) = self.connection.cancel_calls(passed.resets, &mut self.cancelled)
        {
            self.pause = Some(Box::pin(sleep_until(until)));
        }
        passed.bytes
    }

    fn check(&self) -> io::Result<()> {
        if self.connection.is_closed() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }

    /// Notes whether the socket takes what the server writes.
    fn note_written(&mut self, is_full: bool, context: &Context<'_>) {
        match self.full_since {
            None if is_full => self.full_since = Some((self.connection.accepted_calls(), false)),
            Some((_, is_awaited)) if !is_full => {
                self.full_since = None;
                if is_awaited {
                    context.waker().wake_by_ref();
                }
            }
            _ => {}
        }
    }
}

impl<S: AsyncRead + Unpin> ClientStream<S> {
    fn poll_bytes(
        &mut self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.held.is_empty() {
            let mut held = std::mem::take(&mut self.held);
            let count = held.len().min(buffer.remaining());
            let passed = self.pass(&mut held[..count]);
            buffer.put_slice(&held[..passed]);
            held.advance(passed);
            self.held = held;
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let bytes = &mut buffer.filled_mut()[before..];
        self.connection.add_read_bytes(bytes.len());
        let passed = self.pass(bytes);
        self.held.extend_from_slice(&bytes[passed..]);
        buffer.set_filled(before + passed);
        Poll::Ready(Ok(()))
    }
}

impl<S> Connected for ClientStream<S> {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

impl<S: AsyncRead + Unpin> AsyncRead for ClientStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut polled = Poll::Pending;
        if self.poll_turn(context).is_ready() {
            polled = self.poll_bytes(context, buffer);
            if polled.is_pending() {
                // Nothing is left, so this turn was short.
                (self.turn_frames, self.turn_bytes) = (0, 0);
            }
        }
        if polled.is_pending() {
            self.connection.register_reader(context.waker());
        }
        // After the waker is registered, so that a close in between is not missed.
        self.check()?;
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ClientStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check()?;
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        if polled.is_pending() {
            self.note_written(true, context);
        }
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check()?;
        let polled = Pin::new(&mut self.stream).poll_flush(context);
        self.note_written(polled.is_pending(), context);
        polled
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // A closed connection is dropped without a goodbye.
        if self.connection.is_closed() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check()?;
        let polled = Pin::new(&mut self.stream).poll_write_vectored(context, buffers);
        if polled.is_pending() {
            self.note_written(true, context);
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::net::UnixStream;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::call::{ClientAddress, ClientLoad};
    use crate::memory::{MEMORY_LIMIT_MIN, MemoryShares};

    /// Bytes of one read of HTTP/2.
    const READ_BYTES: usize = 8 << 10;

    /// Returns a connection whose client has sent DATA frames of 16 KiB on stream 1.
    async fn connection_with_frames(frames: usize) -> (ClientStream<DuplexStream>, DuplexStream) {
        let load = ClientLoad::new(MemoryShares::of(MEMORY_LIMIT_MIN));
        let connection = load.connect().unwrap();
        connection.set_peer(ClientAddress::Tcp(([127, 0, 0, 1], 1).into()));
        let (mut client, server) = duplex(frames * (17 << 10));
        let frame = [&[0, 0x40, 0, 0, 0, 0, 0, 0, 1][..], &[7; 16 << 10]].concat();
        client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        for _ in 0..frames {
            client.write_all(&frame).await.unwrap();
        }
        let ended = CancellationToken::new().drop_guard();
        (ClientStream::new(server, &connection, ended), client)
    }

    /// Reads until nothing is left or the turn ends; returns the bytes.
    fn read_turn(
        stream: &mut ClientStream<DuplexStream>,
        context: &mut Context<'_>,
    ) -> io::Result<usize> {
        let mut bytes = 0;
        loop {
            let mut buffer = [0; READ_BYTES];
            let mut buffer = ReadBuf::new(&mut buffer);
            match Pin::new(&mut *stream).poll_read(context, &mut buffer) {
                Poll::Ready(read) => read?,
                Poll::Pending => return Ok(bytes),
            }
            if buffer.filled().is_empty() {
                return Ok(bytes);
            }
            bytes += buffer.filled().len();
        }
    }

    #[tokio::test]
    async fn large_messages_are_read_in_turns() {
        let (mut stream, _client) = connection_with_frames(100).await;
        for turn in 0..5 {
            let read = poll_fn(|context| Poll::Ready(read_turn(&mut stream, context).unwrap()));
            // Tokio also ends a task's turn, after 128 reads or writes.
            tokio::task::yield_now().await;
            let bytes = read.await;
            let allowed = limits::TURN_BYTES_MAX..limits::TURN_BYTES_MAX + READ_BYTES;
            assert!(allowed.contains(&bytes), "turn {turn}: {bytes} bytes");
        }
    }

    /// The connections have more to read after each turn, so the worker is never idle.
    #[tokio::test]
    async fn other_sockets_are_served_between_turns() {
        const CONNECTIONS: usize = 4;
        let turns = Arc::new(AtomicUsize::new(0));
        let (mut socket, mut other) = UnixStream::pair().unwrap();
        let mut clients = Vec::new();
        for _ in 0..CONNECTIONS {
            let (mut stream, client) = connection_with_frames(400).await;
            clients.push(client);
            let turns = turns.clone();
            tokio::spawn(poll_fn(move |context| {
                read_turn(&mut stream, context).unwrap();
                turns.fetch_add(1, Ordering::Relaxed);
                Poll::<()>::Pending
            }));
        }
        for _ in 0..10 {
            other.write_all(b"x").await.unwrap();
            let before = turns.load(Ordering::Relaxed);
            socket.read_exact(&mut [0]).await.unwrap();
            let waited = turns.load(Ordering::Relaxed) - before;
            assert!(waited <= 3 * CONNECTIONS, "{waited} turns of other connections");
        }
        assert!(turns.load(Ordering::Relaxed) > 10, "they were read meanwhile");
    }
}
