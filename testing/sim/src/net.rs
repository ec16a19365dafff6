//! Adapters between turmoil's TCP and tonic: a socket, and dialers for peers and clients.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_util::Stream;
use futures_util::future::BoxFuture;
use helix_client::config::Dial;
use helix_server::peer::Dialer;
use helix_server::transport::Listener;
use hyper_util::rt::TokioIo;
use rand::rngs::StdRng;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::codegen::http::Uri;
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint, Error};
use tower::service_fn;
use turmoil::net::{TcpListener, TcpStream};

use crate::coverage::{CoverageMark, CoverageMarks};
use crate::tamper::{FrameAction, FrameTamperer};

/// Ports of a node for clients and for peers.
pub const CLIENT_PORT: u16 = 9092;
pub const PEER_PORT: u16 = 9192;

thread_local! {
    /// Hash of everything written to connections since the last [`take_wire`].
    static WIRE: Cell<u64> = const { Cell::new(0) };
}

/// Returns and resets the hash of all writes to connections. It depends on the bytes, the size of
/// each write and their order.
pub fn take_wire() -> u64 {
    WIRE.take()
}

fn on_wire(piece: &[u8]) {
    let crc = u64::from(crc32fast::hash(piece)) << 32 | piece.len() as u64;
    WIRE.set((WIRE.get().rotate_left(5) ^ crc).wrapping_mul(0x9e37_79b9_7f4a_7c15));
}

/// Settings for tampering with messages between nodes.
#[derive(Debug, Default)]
struct Tampering {
    rng: Option<StdRng>,
    marks: CoverageMarks,
}

thread_local! {
    static TAMPERING: RefCell<Tampering> = RefCell::default();
}

/// Starts or stops tampering with messages between nodes.
pub fn tamper(rng: Option<StdRng>, marks: &CoverageMarks) {
    TAMPERING.set(Tampering { rng, marks: marks.clone() });
}

/// Addresses of two machines, the lower one first.
type Pair = (IpAddr, IpAddr);

fn pair(one: IpAddr, other: IpAddr) -> Pair {
    (one.min(other), one.max(other))
}

thread_local! {
    /// Resets of the connections between two machines.
    static RESETS: RefCell<BTreeMap<Pair, u64>> = const { RefCell::new(BTreeMap::new()) };
}

fn resets(pair: Pair) -> u64 {
    RESETS.with_borrow(|resets| resets.get(&pair).copied().unwrap_or(0))
}

/// Resets all connections between two machines, each end at its next use. Data in flight is lost,
/// whole or in part.
pub fn reset(one: IpAddr, other: IpAddr) {
    RESETS.with_borrow_mut(|resets| *resets.entry(pair(one, other)).or_default() += 1);
}

/// One end of a simulated connection.
#[derive(Debug)]
pub struct SimulatedSocket {
    stream: TcpStream,
    pair: Pair,
    /// Value of [`resets`] when this connection was made.
    resets: u64,
    /// Set for a connection from one node to another.
    peer: Option<Box<Peer>>,
}

#[derive(Debug, Default)]
struct Peer {
    tamper: FrameTamperer,
    /// Accepted bytes that are not sent yet.
    out: Vec<u8>,
}

impl SimulatedSocket {
    fn new(stream: TcpStream) -> io::Result<Self> {
        let pair = pair(stream.local_addr()?.ip(), stream.peer_addr()?.ip());
        Ok(Self { stream, pair, resets: resets(pair), peer: None })
    }

    fn for_peer(self) -> Self {
        Self { peer: Some(Box::default()), ..self }
    }

    /// Sends bytes that were accepted earlier.
    fn poll_out(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(peer) = &mut self.peer else { return Poll::Ready(Ok(())) };
        while !peer.out.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(context, &peer.out))?;
            on_wire(&peer.out[..written]);
            peer.out.drain(..written);
        }
        Poll::Ready(Ok(()))
    }

    fn check(&self) -> io::Result<()> {
        if resets(self.pair) > self.resets {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        Ok(())
    }
}

impl AsyncRead for SimulatedSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_read(context, buf)
    }
}

impl AsyncWrite for SimulatedSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check()?;
        let this = &mut *self;
        ready!(this.poll_out(context))?;
        if let Some(peer) = &mut this.peer {
            TAMPERING.with_borrow_mut(|tampering| {
                let Tampering { rng, marks } = tampering;
                peer.tamper.process(buf, rng.as_mut(), &mut peer.out, |action| {
                    marks.hit(match action {
                        FrameAction::Late => CoverageMark::MessageLate,
                        FrameAction::InsideMessage => CoverageMark::MessageWithinAnother,
                        FrameAction::Sent | FrameAction::Twice => CoverageMark::MessageTwice,
                    });
                });
            });
            // Accepted in any case; the rest is sent with the next write or flush.
            if let Poll::Ready(Err(error)) = this.poll_out(context) {
                return Poll::Ready(Err(error));
            }
            return Poll::Ready(Ok(buf.len()));
        }
        let written = ready!(Pin::new(&mut this.stream).poll_write(context, buf))?;
        on_wire(&buf[..written]);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_out(context))?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_out(context))?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl Connected for SimulatedSocket {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

/// Listener for clients.
pub struct ClientListener(pub TcpListener);

impl Listener for ClientListener {
    type Socket = SimulatedSocket;

    async fn accept(&mut self) -> io::Result<(SimulatedSocket, SocketAddr)> {
        let (stream, peer) = self.0.accept().await?;
        Ok((SimulatedSocket::new(stream)?, peer))
    }
}

/// Returns the stream of accepted connections.
pub fn incoming(listener: TcpListener) -> impl Stream<Item = io::Result<SimulatedSocket>> + Send {
    futures_util::stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await.and_then(|(stream, _)| SimulatedSocket::new(stream));
        Some((accepted, listener))
    })
}

async fn connect(uri: Uri) -> io::Result<TokioIo<SimulatedSocket>> {
    Ok(TokioIo::new(dial_to(uri).await?))
}

async fn connect_to_peer(uri: Uri) -> io::Result<TokioIo<SimulatedSocket>> {
    Ok(TokioIo::new(dial_to(uri).await?.for_peer()))
}

async fn dial_to(uri: Uri) -> io::Result<SimulatedSocket> {
    let host = uri.host().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
    let port = uri.port_u16().ok_or(io::ErrorKind::InvalidInput)?;
    SimulatedSocket::new(TcpStream::connect((host.as_str(), port)).await?)
}

/// Creates a channel over the simulated network that connects at its first call.
pub fn channel(endpoint: &Endpoint) -> Channel {
    endpoint.connect_with_connector_lazy(service_fn(connect))
}

/// Returns the connector for clients.
pub fn dial() -> Dial {
    Dial::with(channel)
}

/// Dialer for peers.
#[derive(Debug)]
pub struct SimulatedDialer;

impl Dialer for SimulatedDialer {
    fn connect(&self, endpoint: Endpoint) -> BoxFuture<'static, Result<Channel, Error>> {
        Box::pin(async move { endpoint.connect_with_connector(service_fn(connect_to_peer)).await })
    }

    fn connect_lazily(&self, endpoint: &Endpoint) -> Channel {
        channel(endpoint)
    }
}
