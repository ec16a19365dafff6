//! The simulated network as tonic wants it: turmoil's TCP behind a socket, a dialer for peers and
//! one for clients.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::Stream;
use futures_util::future::BoxFuture;
use helix_client::config::Dial;
use helix_server::peer::Dialer;
use helix_server::server::Door;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::codegen::http::Uri;
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint, Error};
use tower::service_fn;
use turmoil::net::{TcpListener, TcpStream};

/// Where clients and peers reach a node.
pub const CLIENT_PORT: u16 = 9092;
pub const PEER_PORT: u16 = 9192;

/// One end of a simulated connection.
#[derive(Debug)]
pub struct Socket(TcpStream);

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buf)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

impl Connected for Socket {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

/// The port that clients dial.
pub struct ClientDoor(pub TcpListener);

impl Door for ClientDoor {
    type Socket = Socket;

    async fn accept(&mut self) -> io::Result<(Socket, SocketAddr)> {
        let (stream, peer) = self.0.accept().await?;
        Ok((Socket(stream), peer))
    }
}

/// What a listener takes in.
pub fn incoming(listener: TcpListener) -> impl Stream<Item = io::Result<Socket>> + Send {
    futures_util::stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await.map(|(stream, _)| Socket(stream));
        Some((accepted, listener))
    })
}

async fn connect(uri: Uri) -> io::Result<TokioIo<Socket>> {
    let host = uri.host().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
    let port = uri.port_u16().ok_or(io::ErrorKind::InvalidInput)?;
    Ok(TokioIo::new(Socket(TcpStream::connect((host.as_str(), port)).await?)))
}

/// A channel over the simulated network that connects at its first call.
pub fn channel(endpoint: &Endpoint) -> Channel {
    endpoint.connect_with_connector_lazy(service_fn(connect))
}

/// The way of clients.
pub fn dial() -> Dial {
    Dial::with(channel)
}

/// The way of peers.
#[derive(Debug)]
pub struct SimulatedDialer;

impl Dialer for SimulatedDialer {
    fn connect(&self, endpoint: Endpoint) -> BoxFuture<'static, Result<Channel, Error>> {
        Box::pin(async move { endpoint.connect_with_connector(service_fn(connect)).await })
    }

    fn connect_lazily(&self, endpoint: &Endpoint) -> Channel {
        channel(endpoint)
    }
}
