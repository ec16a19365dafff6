//! The simulated network as tonic wants it: turmoil's TCP behind a socket, a dialer for peers and
//! one for clients.

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
use helix_server::server::Door;
use hyper_util::rt::TokioIo;
use rand::rngs::StdRng;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::codegen::http::Uri;
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint, Error};
use tower::service_fn;
use turmoil::net::{TcpListener, TcpStream};

use crate::marks::{Mark, Marks};
use crate::tamper::{Fate, Tamper};

/// Where clients and peers reach a node.
pub const CLIENT_PORT: u16 = 9092;
pub const PEER_PORT: u16 = 9192;

thread_local! {
    /// Everything that was written to connections since it was last taken, as one number.
    static WIRE: Cell<u64> = const { Cell::new(0) };
}

/// What went over all connections since it was asked for last: the same bytes in the same pieces
/// and the same order, or another number.
pub fn take_wire() -> u64 {
    WIRE.take()
}

fn on_wire(piece: &[u8]) {
    let crc = u64::from(crc32fast::hash(piece)) << 32 | piece.len() as u64;
    WIRE.set((WIRE.get().rotate_left(5) ^ crc).wrapping_mul(0x9e37_79b9_7f4a_7c15));
}

/// Whether messages between nodes are tampered with.
#[derive(Debug, Default)]
struct Tampering {
    rng: Option<StdRng>,
    marks: Marks,
}

thread_local! {
    static TAMPERING: RefCell<Tampering> = RefCell::default();
}

/// From now on messages between nodes are tampered with, or no more.
pub fn tamper(rng: Option<StdRng>, marks: &Marks) {
    TAMPERING.set(Tampering { rng, marks: marks.clone() });
}

/// Two machines, in order.
type Pair = (IpAddr, IpAddr);

fn pair(one: IpAddr, other: IpAddr) -> Pair {
    (one.min(other), one.max(other))
}

thread_local! {
    /// How often the connections between two machines were reset.
    static RESETS: RefCell<BTreeMap<Pair, u64>> = const { RefCell::new(BTreeMap::new()) };
}

fn resets(pair: Pair) -> u64 {
    RESETS.with_borrow(|resets| resets.get(&pair).copied().unwrap_or(0))
}

/// Ends all connections between two machines, each end as soon as it is used next: what was on its
/// way then is lost, whole or in part.
pub fn reset(one: IpAddr, other: IpAddr) {
    RESETS.with_borrow_mut(|resets| *resets.entry(pair(one, other)).or_default() += 1);
}

/// One end of a simulated connection.
#[derive(Debug)]
pub struct Socket {
    stream: TcpStream,
    pair: Pair,
    /// How often the two machines' connections had been reset when this one was made.
    resets: u64,
    /// Of a connection that a node dials to another one.
    peer: Option<Box<Peer>>,
}

#[derive(Debug, Default)]
struct Peer {
    tamper: Tamper,
    /// Taken, and not on the network yet.
    out: Vec<u8>,
}

impl Socket {
    fn new(stream: TcpStream) -> io::Result<Self> {
        let pair = pair(stream.local_addr()?.ip(), stream.peer_addr()?.ip());
        Ok(Self { stream, pair, resets: resets(pair), peer: None })
    }

    fn for_peer(self) -> Self {
        Self { peer: Some(Box::default()), ..self }
    }

    /// Writes what was taken earlier.
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

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_read(context, buf)
    }
}

impl AsyncWrite for Socket {
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
                peer.tamper.feed(buf, rng.as_mut(), &mut peer.out, |fate| {
                    marks.hit(match fate {
                        Fate::Late => Mark::MessageLate,
                        Fate::Within => Mark::MessageWithinAnother,
                        Fate::Sent | Fate::Twice => Mark::MessageTwice,
                    });
                });
            });
            // Taken in any case; what does not go now goes with the next write or flush.
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
        Ok((Socket::new(stream)?, peer))
    }
}

/// What a listener takes in.
pub fn incoming(listener: TcpListener) -> impl Stream<Item = io::Result<Socket>> + Send {
    futures_util::stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await.and_then(|(stream, _)| Socket::new(stream));
        Some((accepted, listener))
    })
}

async fn connect(uri: Uri) -> io::Result<TokioIo<Socket>> {
    Ok(TokioIo::new(dial_to(uri).await?))
}

async fn connect_to_peer(uri: Uri) -> io::Result<TokioIo<Socket>> {
    Ok(TokioIo::new(dial_to(uri).await?.for_peer()))
}

async fn dial_to(uri: Uri) -> io::Result<Socket> {
    let host = uri.host().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
    let port = uri.port_u16().ok_or(io::ErrorKind::InvalidInput)?;
    Socket::new(TcpStream::connect((host.as_str(), port)).await?)
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
        Box::pin(async move { endpoint.connect_with_connector(service_fn(connect_to_peer)).await })
    }

    fn connect_lazily(&self, endpoint: &Endpoint) -> Channel {
        channel(endpoint)
    }
}
