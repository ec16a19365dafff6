//! Proxy for one directed link between two processes, which can be held, slowed or made to lose
//! responses.
//!
//! It behaves like TCP: a held link delays bytes as a network does that recovers later, and never
//! drops bytes from a surviving connection. A connection that lost bytes is reset.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

use crate::ports;

/// Bytes held per direction of a connection, in addition to the kernel's buffers.
const CHUNK_BYTES: usize = 64 << 10;

/// Connections through one proxy; more are closed at once.
const CONNECTIONS_MAX: usize = 256;

const CONNECT_MAX: Duration = Duration::from_secs(3);

/// Mode of a link. "Forward" is the direction from the dialling side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LinkMode {
    /// Passes everything.
    #[default]
    Pass,
    /// Holds everything silently.
    HoldAll,
    /// Holds the forward direction; responses pass.
    HoldForward,
    /// Holds the backward direction; requests pass.
    HoldBackward,
    /// Resets existing connections, and new ones when they are made.
    Reset,
    /// Delays each chunk of at most 64 KiB by this time, which also limits the throughput.
    Delay(Duration),
    /// Requests pass and responses are dropped. The next mode change resets the connections that
    /// lost some.
    DropResponses,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Forward,
    Backward,
}

impl LinkMode {
    fn holds(self, direction: Direction) -> bool {
        match self {
            Self::HoldAll => true,
            Self::HoldForward => direction == Direction::Forward,
            Self::HoldBackward => direction == Direction::Backward,
            Self::Pass | Self::Reset | Self::Delay(_) | Self::DropResponses => false,
        }
    }
}

/// Running proxy. Dropping it ends its connections.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    mode: watch::Sender<LinkMode>,
    bytes_dropped: Arc<AtomicU64>,
    acceptor: JoinHandle<()>,
}

impl Proxy {
    /// Listens on a loopback port and forwards connections to `target`.
    ///
    /// # Errors
    /// No port is free.
    pub fn start(target: SocketAddr) -> anyhow::Result<Self> {
        let listener = ports::listen()?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let listener = TcpListener::from_std(listener)?;
        let (mode, modes) = watch::channel(LinkMode::Pass);
        let bytes_dropped = Arc::new(AtomicU64::new(0));
        let link = Link { target, modes, bytes_dropped: bytes_dropped.clone() };
        let acceptor = tokio::spawn(accept(listener, link));
        Ok(Self { address, mode, bytes_dropped, acceptor })
    }

    /// Returns the address to dial.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Changes the mode, also for open connections. It applies to everything that is sent
    /// afterwards and to most bytes in flight.
    pub fn set(&self, mode: LinkMode) {
        self.mode.send_replace(mode);
    }

    /// Returns the response bytes dropped so far.
    pub fn bytes_dropped(&self) -> u64 {
        self.bytes_dropped.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // The connections are in the acceptor's task set and end with it.
        self.acceptor.abort();
    }
}

#[derive(Debug, Clone)]
struct Link {
    target: SocketAddr,
    modes: watch::Receiver<LinkMode>,
    bytes_dropped: Arc<AtomicU64>,
}

async fn accept(listener: TcpListener, link: Link) {
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
        };
        let Ok((client, _)) = accepted else {
            // Out of file descriptors: wait for other connections to end.
            sleep(Duration::from_millis(10)).await;
            continue;
        };
        if connections.len() < CONNECTIONS_MAX {
            connections.spawn(relay(client, link.clone()));
        }
    }
}

/// Relays one connection until its end.
async fn relay(mut client: TcpStream, mut link: Link) {
    if link.modes.wait_for(|mode| !mode.holds(Direction::Forward)).await.is_err() {
        return;
    }
    let connecting = timeout(CONNECT_MAX, TcpStream::connect(link.target));
    let is_refused = *link.modes.borrow() == LinkMode::Reset;
    let Ok(Ok(mut server)) = (if is_refused { Ok(Err(refused())) } else { connecting.await })
    else {
        return reset(&client);
    };
    // Failures show when the connection is used.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let has_lost = AtomicBool::new(false);
    let is_over = {
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        let forward = pump(from_client, to_server, Direction::Forward, link.clone(), &has_lost);
        let backward = pump(from_server, to_client, Direction::Backward, link.clone(), &has_lost);
        tokio::select! {
            both = async { tokio::try_join!(forward, backward) } => both.is_ok(),
            () = wait_for_reset(link.modes, &has_lost) => false,
        }
    };
    if !is_over {
        reset(&client);
        reset(&server);
    }
}

fn refused() -> io::Error {
    io::ErrorKind::ConnectionRefused.into()
}

/// Waits until the mode requires a reset of the connection.
async fn wait_for_reset(mut modes: watch::Receiver<LinkMode>, has_lost: &AtomicBool) {
    let is_torn = |mode: &LinkMode| match mode {
        LinkMode::Reset => true,
        LinkMode::DropResponses => false,
        _ => has_lost.load(Ordering::Relaxed),
    };
    // An error means that the proxy was dropped.
    let _ = modes.wait_for(is_torn).await;
}

/// Makes the close send a reset, as a host does that has forgotten the connection.
fn reset(stream: &TcpStream) {
    // If this fails, the connection is closed normally.
    let _ = stream.set_zero_linger();
}

/// Forwards one direction until its end.
async fn pump(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    direction: Direction,
    mut link: Link,
    has_lost: &AtomicBool,
) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let count = from.read(&mut chunk).await?;
        if count == 0 {
            return to.shutdown().await;
        }
        // The bytes are held until the link lets them pass; the mode at that moment applies.
        let mode = loop {
            let mode = *passing(&mut link.modes, direction).await?;
            let LinkMode::Delay(wait) = mode else { break mode };
            sleep(wait).await;
            if !link.modes.borrow().holds(direction) {
                break mode;
            }
        };
        if mode == LinkMode::DropResponses && direction == Direction::Backward {
            has_lost.store(true, Ordering::Relaxed);
            link.bytes_dropped.fetch_add(count as u64, Ordering::Relaxed);
            continue;
        }
        if has_lost.load(Ordering::Relaxed) && direction == Direction::Backward {
            // A stream with a hole must not continue; `wait_for_reset` is about to end it.
            return Err(refused());
        }
        to.write_all(&chunk[..count]).await?;
    }
}

async fn passing(
    modes: &mut watch::Receiver<LinkMode>,
    direction: Direction,
) -> io::Result<watch::Ref<'_, LinkMode>> {
    modes.wait_for(|mode| !mode.holds(direction)).await.map_err(|_| refused())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(60);

    /// Starts a server that echoes all bytes.
    async fn echo() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut from, mut to) = stream.into_split();
                    tokio::io::copy(&mut from, &mut to).await
                });
            }
        });
        address
    }

    async fn through() -> (Proxy, TcpStream) {
        let proxy = Proxy::start(echo().await).unwrap();
        let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
        assert_eq!(ask(&mut stream, b"hello").await.unwrap(), b"hello");
        (proxy, stream)
    }

    async fn ask(stream: &mut TcpStream, what: &[u8]) -> io::Result<Vec<u8>> {
        stream.write_all(what).await?;
        hear(stream, what.len()).await
    }

    async fn hear(stream: &mut TcpStream, count: usize) -> io::Result<Vec<u8>> {
        let mut response = vec![0; count];
        timeout(LONG, stream.read_exact(&mut response)).await.expect("a response in time")?;
        Ok(response)
    }

    /// Reports whether no bytes arrive for a while.
    async fn is_silent(stream: &mut TcpStream) -> bool {
        timeout(SHORT, stream.read(&mut [0; 8])).await.is_err()
    }

    #[tokio::test]
    async fn held_link_is_silent_and_resumes_where_it_was() {
        let (proxy, mut stream) = through().await;
        proxy.set(LinkMode::HoldAll);
        stream.write_all(b"later").await.unwrap();
        assert!(is_silent(&mut stream).await);
        // A new connection gets no further.
        let mut other = TcpStream::connect(proxy.address()).await.unwrap();
        other.write_all(b"x").await.unwrap();
        assert!(is_silent(&mut other).await);
        proxy.set(LinkMode::Pass);
        assert_eq!(hear(&mut stream, 5).await.unwrap(), b"later");
        assert_eq!(hear(&mut other, 1).await.unwrap(), b"x");
    }

    #[tokio::test]
    async fn one_way_hold_affects_one_direction() {
        // The server sends first.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Proxy::start(listener.local_addr().unwrap()).unwrap();
        let mut client = TcpStream::connect(proxy.address()).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        proxy.set(LinkMode::HoldForward);
        client.write_all(b"held").await.unwrap();
        server.write_all(b"passes").await.unwrap();
        assert_eq!(hear(&mut client, 6).await.unwrap(), b"passes");
        assert!(is_silent(&mut server).await);
        proxy.set(LinkMode::HoldBackward);
        assert_eq!(hear(&mut server, 4).await.unwrap(), b"held");
        server.write_all(b"held").await.unwrap();
        assert!(is_silent(&mut client).await);
        proxy.set(LinkMode::Pass);
        assert_eq!(hear(&mut client, 4).await.unwrap(), b"held");
    }

    #[tokio::test]
    async fn reset_mode_resets_old_and_new_connections() {
        let (proxy, mut stream) = through().await;
        proxy.set(LinkMode::Reset);
        let ended = timeout(LONG, stream.read(&mut [0; 8])).await.unwrap();
        assert!(matches!(ended, Ok(0) | Err(_)));
        let mut other = TcpStream::connect(proxy.address()).await.unwrap();
        let ended = timeout(LONG, other.read(&mut [0; 8])).await.unwrap();
        assert!(matches!(ended, Ok(0) | Err(_)));
        proxy.set(LinkMode::Pass);
        let mut other = TcpStream::connect(proxy.address()).await.unwrap();
        assert_eq!(ask(&mut other, b"again").await.unwrap(), b"again");
    }

    #[tokio::test]
    async fn connection_with_dropped_responses_is_reset() {
        let (proxy, mut stream) = through().await;
        proxy.set(LinkMode::DropResponses);
        stream.write_all(b"vanishes").await.unwrap();
        let counted = async {
            while proxy.bytes_dropped() < 8 {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(LONG, counted).await.expect("the response was dropped");
        assert!(is_silent(&mut stream).await);
        proxy.set(LinkMode::Pass);
        let ended = timeout(LONG, stream.read(&mut [0; 8])).await.unwrap();
        assert!(matches!(ended, Ok(0) | Err(_)), "no bytes follow a hole");
    }

    #[tokio::test]
    async fn delay_applies_to_both_directions() {
        let (proxy, mut stream) = through().await;
        proxy.set(LinkMode::Delay(SHORT));
        let begin = tokio::time::Instant::now();
        assert_eq!(ask(&mut stream, b"slow").await.unwrap(), b"slow");
        assert!(begin.elapsed() >= 2 * SHORT);
    }

    #[tokio::test]
    async fn large_transfers_pass_unchanged() {
        let (_proxy, stream) = through().await;
        let sent: Vec<u8> = (0..1_000_000_u32).map(|index| (index % 251) as u8).collect();
        let (mut from, mut to) = stream.into_split();
        let expected = sent.clone();
        let writer = tokio::spawn(async move {
            to.write_all(&sent).await.unwrap();
            to.shutdown().await.unwrap();
        });
        let mut heard = Vec::new();
        timeout(LONG, from.read_to_end(&mut heard)).await.unwrap().unwrap();
        writer.await.unwrap();
        assert!(heard == expected);
    }
}
