//! One directed link between two processes that can be cut, slowed and made to lose answers.
//! TCP as it is: a cut link holds bytes back as a network does that is repaired later; it never
//! takes bytes out of a connection that lives on. What loses bytes is reset afterwards.

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

/// Bytes that one direction of a connection holds at most, on top of the kernel's buffers.
const CHUNK_BYTES: usize = 64 << 10;

/// Connections through one proxy; more are closed at once.
const CONNECTIONS_MAX: usize = 256;

const CONNECT_MAX: Duration = Duration::from_secs(3);

/// What a link does. "Forward" is from the side that dials to the one that is dialled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// Passes everything.
    #[default]
    Pass,
    /// Holds everything back, in silence: a black hole for as long as it lasts.
    Stall,
    /// Holds back what goes forward; answers pass.
    StallForward,
    /// Holds back what comes back; requests pass.
    StallBackward,
    /// Resets connections, and new ones as soon as they are made.
    Refuse,
    /// Holds each piece of at most 64 KiB back for this long, which also limits the throughput.
    Delay(Duration),
    /// Requests pass and answers are lost. The next change of mode resets the connections that
    /// lost some.
    Swallow,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Forward,
    Backward,
}

impl Mode {
    fn stalls(self, direction: Direction) -> bool {
        match self {
            Self::Stall => true,
            Self::StallForward => direction == Direction::Forward,
            Self::StallBackward => direction == Direction::Backward,
            Self::Pass | Self::Refuse | Self::Delay(_) | Self::Swallow => false,
        }
    }
}

/// A running proxy. Dropping it ends its connections.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    mode: watch::Sender<Mode>,
    swallowed: Arc<AtomicU64>,
    acceptor: JoinHandle<()>,
}

impl Proxy {
    /// Listens on a loopback port of its own and passes connections on to `target`.
    ///
    /// # Errors
    /// No port is free.
    pub fn start(target: SocketAddr) -> anyhow::Result<Self> {
        let listener = ports::listen()?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let listener = TcpListener::from_std(listener)?;
        let (mode, modes) = watch::channel(Mode::Pass);
        let swallowed = Arc::new(AtomicU64::new(0));
        let link = Link { target, modes, swallowed: swallowed.clone() };
        let acceptor = tokio::spawn(accept(listener, link));
        Ok(Self { address, mode, swallowed, acceptor })
    }

    /// Where to dial.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Changes what the link does, for open connections too. What is sent after this returns is
    /// subject to the new mode, and most of what was under way.
    pub fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// Bytes of answers that were lost so far.
    pub fn swallowed(&self) -> u64 {
        self.swallowed.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // Its connections are in a set of its own and end with it.
        self.acceptor.abort();
    }
}

#[derive(Debug, Clone)]
struct Link {
    target: SocketAddr,
    modes: watch::Receiver<Mode>,
    swallowed: Arc<AtomicU64>,
}

async fn accept(listener: TcpListener, link: Link) {
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
        };
        let Ok((client, _)) = accepted else {
            // Out of descriptors: others may end.
            sleep(Duration::from_millis(10)).await;
            continue;
        };
        if connections.len() < CONNECTIONS_MAX {
            connections.spawn(relay(client, link.clone()));
        }
    }
}

/// One connection, from its first byte to its end.
async fn relay(mut client: TcpStream, mut link: Link) {
    if link.modes.wait_for(|mode| !mode.stalls(Direction::Forward)).await.is_err() {
        return;
    }
    let connecting = timeout(CONNECT_MAX, TcpStream::connect(link.target));
    let is_refused = *link.modes.borrow() == Mode::Refuse;
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
            () = torn(link.modes, &has_lost) => false,
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

/// Waits until the link resets its connections.
async fn torn(mut modes: watch::Receiver<Mode>, has_lost: &AtomicBool) {
    let is_torn = |mode: &Mode| match mode {
        Mode::Refuse => true,
        Mode::Swallow => false,
        _ => has_lost.load(Ordering::Relaxed),
    };
    // An error is the end of the proxy.
    let _ = modes.wait_for(is_torn).await;
}

/// Closes without a farewell, as a machine does that has forgotten the connection.
fn reset(stream: &TcpStream) {
    // If that fails it is closed in the usual way.
    let _ = stream.set_zero_linger();
}

/// Passes one direction on until its end.
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
        // What was read is held until the link lets it pass: the mode counts that is in force
        // when the bytes leave.
        let mode = loop {
            let mode = *passing(&mut link.modes, direction).await?;
            let Mode::Delay(wait) = mode else { break mode };
            sleep(wait).await;
            if !link.modes.borrow().stalls(direction) {
                break mode;
            }
        };
        if mode == Mode::Swallow && direction == Direction::Backward {
            has_lost.store(true, Ordering::Relaxed);
            link.swallowed.fetch_add(count as u64, Ordering::Relaxed);
            continue;
        }
        if has_lost.load(Ordering::Relaxed) && direction == Direction::Backward {
            // A stream with a hole must not go on; `torn` is about to end it.
            return Err(refused());
        }
        to.write_all(&chunk[..count]).await?;
    }
}

async fn passing(
    modes: &mut watch::Receiver<Mode>,
    direction: Direction,
) -> io::Result<watch::Ref<'_, Mode>> {
    modes.wait_for(|mode| !mode.stalls(direction)).await.map_err(|_| refused())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(60);

    /// A server that answers every piece with the same bytes.
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
        let mut answer = vec![0; count];
        timeout(LONG, stream.read_exact(&mut answer)).await.expect("an answer in time")?;
        Ok(answer)
    }

    /// Nothing comes for a while.
    async fn is_silent(stream: &mut TcpStream) -> bool {
        timeout(SHORT, stream.read(&mut [0; 8])).await.is_err()
    }

    #[tokio::test]
    async fn a_stalled_link_is_silent_and_goes_on_where_it_was() {
        let (proxy, mut stream) = through().await;
        proxy.set(Mode::Stall);
        stream.write_all(b"later").await.unwrap();
        assert!(is_silent(&mut stream).await);
        // A new connection gets no further.
        let mut other = TcpStream::connect(proxy.address()).await.unwrap();
        other.write_all(b"x").await.unwrap();
        assert!(is_silent(&mut other).await);
        proxy.set(Mode::Pass);
        assert_eq!(hear(&mut stream, 5).await.unwrap(), b"later");
        assert_eq!(hear(&mut other, 1).await.unwrap(), b"x");
    }

    #[tokio::test]
    async fn one_way_stalls_hold_one_way() {
        // A server that counts what reaches it and speaks first.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Proxy::start(listener.local_addr().unwrap()).unwrap();
        let mut client = TcpStream::connect(proxy.address()).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        proxy.set(Mode::StallForward);
        client.write_all(b"held").await.unwrap();
        server.write_all(b"passes").await.unwrap();
        assert_eq!(hear(&mut client, 6).await.unwrap(), b"passes");
        assert!(is_silent(&mut server).await);
        proxy.set(Mode::StallBackward);
        assert_eq!(hear(&mut server, 4).await.unwrap(), b"held");
        server.write_all(b"held").await.unwrap();
        assert!(is_silent(&mut client).await);
        proxy.set(Mode::Pass);
        assert_eq!(hear(&mut client, 4).await.unwrap(), b"held");
    }

    #[tokio::test]
    async fn a_refusing_link_resets_old_and_new_connections() {
        let (proxy, mut stream) = through().await;
        proxy.set(Mode::Refuse);
        let ended = timeout(LONG, stream.read(&mut [0; 8])).await.unwrap();
        assert!(matches!(ended, Ok(0) | Err(_)));
        let mut other = TcpStream::connect(proxy.address()).await.unwrap();
        let ended = timeout(LONG, other.read(&mut [0; 8])).await.unwrap();
        assert!(matches!(ended, Ok(0) | Err(_)));
        proxy.set(Mode::Pass);
        let mut other = TcpStream::connect(proxy.address()).await.unwrap();
        assert_eq!(ask(&mut other, b"again").await.unwrap(), b"again");
    }

    #[tokio::test]
    async fn swallowed_answers_are_lost_and_the_connection_with_them() {
        let (proxy, mut stream) = through().await;
        proxy.set(Mode::Swallow);
        stream.write_all(b"vanishes").await.unwrap();
        let counted = async {
            while proxy.swallowed() < 8 {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(LONG, counted).await.expect("the answer came and was lost");
        assert!(is_silent(&mut stream).await);
        proxy.set(Mode::Pass);
        let ended = timeout(LONG, stream.read(&mut [0; 8])).await.unwrap();
        assert!(matches!(ended, Ok(0) | Err(_)), "nothing comes after a hole");
    }

    #[tokio::test]
    async fn a_delay_takes_its_time_both_ways() {
        let (proxy, mut stream) = through().await;
        proxy.set(Mode::Delay(SHORT));
        let begin = tokio::time::Instant::now();
        assert_eq!(ask(&mut stream, b"slow").await.unwrap(), b"slow");
        assert!(begin.elapsed() >= 2 * SHORT);
    }

    #[tokio::test]
    async fn much_passes_unchanged_and_ends_as_it_should() {
        let (_proxy, stream) = through().await;
        let sent: Vec<u8> = (0..1_000_000_u32).map(|place| (place % 251) as u8).collect();
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
