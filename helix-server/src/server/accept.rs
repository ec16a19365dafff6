//! Accepting connections: how many, how large their windows are, and that they begin to speak.
//! Each connection is served by itself, since its windows are its own.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::{StreamExt, stream};
use helix_proto::gather::{Gathered, Waits};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::time::{Instant, interval, sleep};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use tonic::transport::server::Connected;
use tower::Layer;

use super::gate::Gate;
use super::socket::Socket;
use crate::api::{Meter, MeterLayer, Services};
use crate::limits;
use crate::load::{Connection, Load};

/// Where connections come in: a listener, or what a simulation has in its place.
pub trait Door: Send + 'static {
    type Socket: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// The next connection, and who is at its other end.
    fn accept(&mut self) -> impl Future<Output = io::Result<(Self::Socket, SocketAddr)>> + Send;
}

impl Door for TcpListener {
    type Socket = Socket;

    async fn accept(&mut self) -> io::Result<(Socket, SocketAddr)> {
        let (stream, peer) = Self::accept(self).await?;
        Ok((Socket::new(stream), peer))
    }
}

/// Serves until `closing`, and then until the last connection has ended: by itself, or because it
/// took too long.
pub(super) async fn serve<D: Door>(
    mut door: D,
    services: Services,
    meter: MeterLayer,
    load: Arc<Load>,
    closing: CancellationToken,
) {
    // What a connection needs of them is made once.
    let services = services.prepare();
    let connections = TaskTracker::new();
    let mut refusals = Refusals::default();
    let mut look = interval(limits::STALLED_LOOK_INTERVAL);
    loop {
        let accepted = tokio::select! {
            () = closing.cancelled() => break,
            _ = look.tick() => {
                load.end_stalled();
                refusals.tell(&load);
                continue;
            }
            accepted = door.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                // Dropped, where there is no place for it: the client hears of it at once.
                let Some(connection) = load.connect() else {
                    refusals.untold += 1;
                    refusals.tell(&load);
                    continue;
                };
                connection.set_peer(peer);
                // Outside of the gate: what is refused there is a call too.
                let gate = meter.layer(Gate::new(services.clone(), &load, &connection));
                connections.spawn(serve_one(stream, connection, load.clone(), gate, &closing));
            }
            // No file descriptor left, or a client that gave up: neither ends the server.
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                sleep(limits::ACCEPT_REST).await;
            }
        }
    }
    drop(door);
    connections.close();
    let late = sleep(limits::SHUTDOWN_WAIT_MAX);
    tokio::pin!(late);
    let mut is_cut = false;
    loop {
        tokio::select! {
            () = connections.wait() => return,
            () = &mut late, if !is_cut => {
                let connections = connections.len();
                tracing::warn!(connections, "some calls did not end in time and are cut off");
                load.end_all();
                is_cut = true;
            }
            _ = look.tick() => load.end_stalled(),
        }
    }
}

/// Connections that were refused and are not in the log yet. Who is refused cannot be told why, so
/// whoever runs the node is: of the first one at once, of others together and not too often.
#[derive(Default)]
struct Refusals {
    untold: u64,
    told: Option<Instant>,
}

impl Refusals {
    /// How many are to be told of now, if any.
    fn due(&mut self) -> Option<u64> {
        let is_early = self.told.is_some_and(|it| it.elapsed() < limits::REFUSALS_TOLD_INTERVAL);
        if self.untold == 0 || is_early {
            return None;
        }
        self.told = Some(Instant::now());
        Some(std::mem::take(&mut self.untold))
    }

    fn tell(&mut self, load: &Load) {
        let Some(refused) = self.due() else { return };
        tracing::warn!(
            refused,
            allowed = load.connections_max(),
            "connections were closed at once: as many are open as the node allows; if that is too \
             few, raise --memory-limit, and the limit of open files if it is the lower one"
        );
    }
}

/// Serves one connection to its end.
fn serve_one<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    connection: Arc<Connection>,
    load: Arc<Load>,
    gate: Meter<Gate>,
    closing: &CancellationToken,
) -> impl Future<Output = ()> + use<S> {
    let ended = CancellationToken::new();
    let transport = transport(connection.window_bytes());
    let stream = Gathered::new(stream, Waits::BehindFrames);
    let stream =
        ClientStream { stream, connection: connection.clone(), _ended: ended.clone().drop_guard() };
    let closing = closing.clone();
    async move {
        let over = async {
            tokio::select! {
                () = ended.cancelled() => return,
                () = closing.cancelled() => return,
                () = sleep(limits::HANDSHAKE_WAIT_MAX) => {}
            }
            if connection.read_bytes() < limits::HANDSHAKE_BYTES {
                load.events().handshakes_timed_out.add();
                connection.end();
            }
            tokio::select! {
                () = ended.cancelled() => {}
                () = closing.cancelled() => {}
            }
        };
        // Its end, and not that of the list, ends the serving.
        let one = stream::iter([Ok::<_, io::Error>(stream)]).chain(stream::pending());
        if let Err(error) = transport.serve_with_incoming_shutdown(gate, one, over).await {
            tracing::debug!(%error, "a connection ended");
        }
    }
}

fn transport(window: u64) -> tonic::transport::Server {
    let frame =
        (window / limits::FRAME_PART).clamp(limits::FRAME_BYTES_MIN, limits::FRAME_BYTES_MAX);
    let window = u32::try_from(window).unwrap_or(u32::MAX >> 1);
    tonic::transport::Server::builder()
        .initial_stream_window_size(window)
        .initial_connection_window_size(window)
        .max_frame_size(frame as u32)
        .max_concurrent_streams(limits::STREAMS_PER_CONNECTION_MAX)
        .http2_max_header_list_size(limits::HEADER_LIST_BYTES_MAX)
        .http2_max_pending_accept_reset_streams(Some(limits::RESETS_PENDING_MAX))
        .http2_max_local_error_reset_streams(Some(limits::RESETS_BY_ERROR_MAX))
        .http2_keepalive_interval(Some(limits::KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(limits::KEEPALIVE_WAIT_MAX))
}

/// A client's socket, which can be ended from outside.
struct ClientStream<S> {
    stream: S,
    connection: Arc<Connection>,
    /// Says that whoever served the socket has dropped it.
    _ended: DropGuard,
}

impl<S> ClientStream<S> {
    fn check(&self) -> io::Result<()> {
        if self.connection.is_ended() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
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
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        if polled.is_pending() {
            self.connection.wakes(context.waker());
        }
        // After the waker is known: an end in between is not missed.
        self.check()?;
        ready!(polled)?;
        self.connection.has_read(buffer.filled().len() - before);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ClientStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // There is nobody to say goodbye to.
        if self.connection.is_ended() {
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
        Pin::new(&mut self.stream).poll_write_vectored(context, buffers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn every_refusal_is_told_of_and_never_often() {
        let mut refusals = Refusals::default();
        assert_eq!(refusals.due(), None);
        let mut told = Vec::new();
        for _ in 0..3 * limits::REFUSALS_TOLD_INTERVAL.as_secs() {
            refusals.untold += 1;
            told.extend(refusals.due());
            tokio::time::advance(std::time::Duration::from_secs(1)).await;
        }
        assert_eq!(told, [1, 10, 10]);
        assert_eq!(refusals.due(), Some(9), "the last ones without another refusal");
        assert_eq!(refusals.due(), None);
    }
}
