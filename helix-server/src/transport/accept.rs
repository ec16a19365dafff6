//! Accepts client connections and serves HTTP/2 on them, over TLS if the port has it.
//! Bounds their number, their windows and the time for the handshakes. Each connection has its own
//! HTTP/2 server because its window sizes are its own.

use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use futures_util::{StreamExt, stream};
use helix_tls::{AcceptedSocket, Acceptor, TlsSocket};
use helix_transport::{CoalescedIo, FlushPolicy};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixStream};
use tokio::time::{Instant, interval, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::Layer;

use super::admission::Admission;
use super::client_stream::ClientStream;
use super::in_process::{InProcessConnection, InProcessListener};
use super::meter::{Meter, MeterLayer};
use super::services::Services;
use super::socket::CorkedSocket;
use super::unix_socket::UnixSocketListener;
use crate::access::Principal;
use crate::call::{ClientAddress, ClientConnection, ClientLoad};
use crate::limits;
use crate::sync;

/// Source of client connections: a TCP listener, or a simulation's listener.
pub trait Listener: Send + 'static {
    type Socket: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Accepts the next connection; returns it with the client's address.
    fn accept(&mut self) -> impl Future<Output = io::Result<(Self::Socket, SocketAddr)>> + Send;
}

impl Listener for TcpListener {
    type Socket = CorkedSocket;

    async fn accept(&mut self) -> io::Result<(CorkedSocket, SocketAddr)> {
        let (stream, peer) = Self::accept(self).await?;
        Ok((CorkedSocket::new(stream), peer))
    }
}

/// Sources of connections without TLS, beside a port.
#[derive(Debug, Default)]
pub(crate) struct LocalListeners {
    pub(crate) unix: Option<UnixSocketListener>,
    pub(crate) in_process: Option<InProcessListener>,
}

/// Serves connections until `closing` is cancelled, and then until the last connection has ended.
///
/// With `tls` each connection of `listener` begins with a handshake, which does not count as a
/// connection yet. Connections of `local` have no TLS; otherwise they are like the others.
/// Closes connections without open calls within [`limits::SHUTDOWN_IDLE_WAIT_MAX`], and all that
/// are still open after [`limits::SHUTDOWN_WAIT_MAX`].
pub(crate) async fn serve<L: Listener>(
    mut listener: L,
    local: LocalListeners,
    services: Services,
    meter: MeterLayer,
    load: Arc<ClientLoad>,
    tls: Option<Arc<Acceptor>>,
    closing: CancellationToken,
) {
    let LocalListeners { unix: unix_listener, mut in_process } = local;
    let connections = TaskTracker::new();
    let port = ClientPort {
        // Done once here, not for each connection's clone.
        services: services.prepare(),
        meter,
        load: load.clone(),
        closing: closing.clone(),
        refusals: Arc::default(),
    };
    let mut tick = interval(limits::STALLED_CHECK_INTERVAL);
    loop {
        let accepted = tokio::select! {
            () = closing.cancelled() => break,
            _ = tick.tick() => {
                load.close_stalled();
                port.log_refusals(false);
                continue;
            }
            accepted = accept_in_process(&mut in_process) => {
                let (stream, browser) = accepted;
                port.spawn_plain(&connections, stream, ClientAddress::Console(browser));
                continue;
            }
            accepted = accept_unix(unix_listener.as_ref()) => {
                match accepted {
                    Ok(stream) => port.spawn_plain(&connections, stream, ClientAddress::Unix),
                    Err(error) => accept_failed(&error).await,
                }
                continue;
            }
            accepted = listener.accept() => accepted,
        };
        match (accepted, &tls) {
            (Ok((stream, peer)), None) => port.spawn_plain(&connections, stream, peer.into()),
            (Ok((stream, peer)), Some(tls)) => {
                let (port, tls, closing) = (port.clone(), tls.clone(), closing.clone());
                connections.spawn(async move {
                    let accepted = tokio::select! {
                        accepted = tls.accept(stream, peer) => accepted,
                        () = closing.cancelled() => return,
                    };
                    // The acceptor has logged and counted an error.
                    let Ok(accepted) = accepted else { return };
                    if let Some(serving) = port.serve_one(accepted, peer.into()) {
                        serving.await;
                    }
                });
            }
            (Err(error), _) => accept_failed(&error).await,
        }
    }
    drop((listener, unix_listener, in_process));
    connections.close();
    let deadline = sleep(limits::SHUTDOWN_WAIT_MAX);
    tokio::pin!(deadline);
    let mut idle_tick = interval(limits::SHUTDOWN_CHECK_INTERVAL);
    let mut has_closed = false;
    loop {
        tokio::select! {
            () = connections.wait() => return,
            _ = idle_tick.tick() => load.close_idle(),
            () = &mut deadline, if !has_closed => {
                let open = connections.len();
                tracing::warn!(open, "shutdown deadline exceeded, closing connections");
                load.close_all();
                has_closed = true;
            }
            _ = tick.tick() => load.close_stalled(),
        }
    }
}

/// Accepts the next connection of the Unix domain socket; never completes without one.
async fn accept_unix(listener: Option<&UnixSocketListener>) -> io::Result<UnixStream> {
    match listener {
        Some(listener) => listener.accept().await,
        None => pending().await,
    }
}

/// Accepts the next connection of the same process; never completes without one.
async fn accept_in_process(listener: &mut Option<InProcessListener>) -> InProcessConnection {
    let Some(open) = listener else { return pending().await };
    match open.accept().await {
        Some(accepted) => accepted,
        None => {
            *listener = None;
            pending().await
        }
    }
}

/// Waits after a failure: no free file descriptor, or a client that gave up. Neither ends the
/// server.
async fn accept_failed(error: &io::Error) {
    tracing::warn!(%error, "failed to accept a connection");
    sleep(limits::ACCEPT_RETRY_WAIT).await;
}

/// Limits the log messages about refused connections.
///
/// A refused client gets no reason, so the log informs the operator: the first refusal at once,
/// later ones together, at most once in [`limits::REFUSAL_LOG_INTERVAL`].
#[derive(Default)]
struct Refusals {
    unlogged: u64,
    logged_at: Option<Instant>,
}

impl Refusals {
    /// Returns the number of refusals to log now, if any.
    fn due(&mut self) -> Option<u64> {
        let is_early = self.logged_at.is_some_and(|it| it.elapsed() < limits::REFUSAL_LOG_INTERVAL);
        if self.unlogged == 0 || is_early {
            return None;
        }
        self.logged_at = Some(Instant::now());
        Some(std::mem::take(&mut self.unlogged))
    }
}

/// Serves the connections of one port.
#[derive(Clone)]
struct ClientPort {
    services: Services,
    meter: MeterLayer,
    load: Arc<ClientLoad>,
    closing: CancellationToken,
    refusals: Arc<Mutex<Refusals>>,
}

impl ClientPort {
    /// Logs the refusals that are due. With `is_new` there is one more.
    fn log_refusals(&self, is_new: bool) {
        let refused = {
            let mut refusals = sync::lock(&self.refusals);
            refusals.unlogged += u64::from(is_new);
            refusals.due()
        };
        let Some(refused) = refused else { return };
        tracing::warn!(
            refused,
            allowed = self.load.connections_max(),
            "refused connections over the limit; to allow more, raise --memory-limit, and the \
             limit of open files if it is lower"
        );
    }

    /// Serves a connection without TLS on a task of its own.
    fn spawn_plain<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
        &self,
        connections: &TaskTracker,
        stream: S,
        peer: ClientAddress,
    ) {
        let accepted = AcceptedSocket { socket: TlsSocket::plain(stream), names: None };
        if let Some(serving) = self.serve_one(accepted, peer) {
            connections.spawn(serving);
        }
    }

    /// Returns a future that serves a connection to its end. At the limit it returns `None` and
    /// drops the connection, so that the client learns of it at once.
    fn serve_one<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
        &self,
        accepted: AcceptedSocket<S>,
        peer: ClientAddress,
    ) -> Option<impl Future<Output = ()> + use<S>> {
        let AcceptedSocket { socket, names } = accepted;
        let Some(connection) = self.load.connect() else {
            self.log_refusals(true);
            return None;
        };
        connection.set_peer(peer);
        if let Some(names) = names {
            connection.set_certificate_principal(Principal::from_certificate(&names));
        }
        // The meter is outside, so that it also counts calls that admission rejects.
        let admission = Admission::new(self.services.clone(), &self.load, &connection);
        let metered = self.meter.layer(admission);
        Some(serve_one(socket, connection, self.load.clone(), metered, &self.closing))
    }
}

/// Serves one connection to its end.
fn serve_one<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    connection: Arc<ClientConnection>,
    load: Arc<ClientLoad>,
    services: Meter<Admission>,
    closing: &CancellationToken,
) -> impl Future<Output = ()> + use<S> {
    let ended = CancellationToken::new();
    let transport = transport(connection.window_bytes());
    let stream = CoalescedIo::new(stream, FlushPolicy::DeferAfterFrames);
    let stream = ClientStream::new(stream, &connection, ended.clone().drop_guard());
    let closing = closing.clone();
    async move {
        let shutdown = async {
            tokio::select! {
                () = ended.cancelled() => return,
                () = closing.cancelled() => return,
                () = sleep(limits::HANDSHAKE_WAIT_MAX) => {}
            }
            if connection.is_silent() {
                load.events().handshakes_timed_out.add();
                connection.close();
            }
            tokio::select! {
                () = ended.cancelled() => {}
                () = closing.cancelled() => {}
            }
        };
        // Never ends: the end of the connection ends the server, not the end of the stream.
        let incoming = stream::iter([Ok::<_, io::Error>(stream)]).chain(stream::pending());
        let serving = transport.serve_with_incoming_shutdown(services, incoming, shutdown);
        if let Err(error) = serving.await {
            tracing::debug!(%error, "connection failed");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn every_refusal_is_logged_and_never_often() {
        let mut refusals = Refusals::default();
        assert_eq!(refusals.due(), None);
        let mut logged = Vec::new();
        for _ in 0..3 * limits::REFUSAL_LOG_INTERVAL.as_secs() {
            refusals.unlogged += 1;
            logged.extend(refusals.due());
            tokio::time::advance(std::time::Duration::from_secs(1)).await;
        }
        assert_eq!(logged, [1, 10, 10]);
        assert_eq!(refusals.due(), Some(9), "the last ones need no further refusal");
        assert_eq!(refusals.due(), None);
    }
}
