//! One client connection: what it has read, what was sent on it and not yet taken, and its end.

use std::fmt::{self, Display};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::task::Waker;
use std::time::Duration;

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use super::{Load, Room, permits, throttled};
use crate::error::Result;
use crate::limits;

#[derive(Debug)]
pub struct Connection {
    load: Arc<Load>,
    /// Its place among the connections.
    _place: Room,
    /// Its part of the windows, given back at its end.
    window: u64,
    peer: OnceLock<SocketAddr>,
    /// Bytes of requests, as the node's.
    received: Arc<Semaphore>,
    read_bytes: AtomicU64,
    is_ended: AtomicBool,
    reader: AtomicWaker,
    untaken: Mutex<Vec<(Instant, u64, usize)>>,
    next_answer: AtomicU64,
}

/// Room of a request, on its connection and in its node.
#[derive(Debug)]
pub struct Received {
    own: Room,
    of_node: Room,
}

impl Received {
    pub fn merge(&mut self, other: Self) {
        self.own.merge(other.own);
        self.of_node.merge(other.of_node);
    }
}

impl Connection {
    pub(super) fn new(load: &Arc<Load>, place: Room, window: u64) -> Arc<Self> {
        let received = Arc::new(Semaphore::new(load.shares.received_per_connection));
        Arc::new(Self {
            load: load.clone(),
            _place: place,
            window,
            peer: OnceLock::new(),
            received,
            read_bytes: AtomicU64::new(0),
            is_ended: AtomicBool::new(false),
            reader: AtomicWaker::new(),
            untaken: Mutex::default(),
            next_answer: AtomicU64::new(0),
        })
    }

    /// Who is at the other end, for the log.
    pub fn set_peer(&self, peer: SocketAddr) {
        // Ignored: a connection has one other end.
        let _ = self.peer.set(peer);
    }

    pub fn peer(&self) -> impl Display + '_ {
        struct Shown<'a>(Option<&'a SocketAddr>);
        impl Display for Shown<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.0 {
                    Some(peer) => peer.fmt(f),
                    None => f.write_str("unknown"),
                }
            }
        }
        Shown(self.peer.get())
    }

    /// HTTP/2 window of this connection, in bytes.
    pub fn window_bytes(&self) -> u64 {
        self.window.max(limits::WINDOW_BYTES_MIN)
    }

    /// Notes bytes that came in.
    pub fn has_read(&self, bytes: usize) {
        self.read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes that have come in.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// Whoever waits for bytes to come in, to be woken at the end.
    pub fn wakes(&self, reader: &Waker) {
        self.reader.register(reader);
    }

    /// Ends the connection, with every call on it.
    pub fn end(&self) {
        self.is_ended.store(true, Ordering::Release);
        self.reader.wake();
    }

    pub fn is_ended(&self) -> bool {
        self.is_ended.load(Ordering::Acquire)
    }

    /// For how long the oldest answer has not been taken, and the bytes of all that have not.
    pub fn untaken(&self) -> Option<(Duration, usize)> {
        let untaken = self.lock();
        let oldest = untaken.iter().map(|(since, ..)| *since).min()?;
        Some((oldest.elapsed(), untaken.iter().map(|(.., bytes)| bytes).sum()))
    }

    /// Room for so many bytes of a request at once.
    pub fn try_receive(&self, bytes: usize) -> Option<Received> {
        let (own, of_node) = self.received_counts(bytes);
        let own = self.received.clone().try_acquire_many_owned(own).ok()?;
        let of_node = self.load.received.clone().try_acquire_many_owned(of_node).ok()?;
        Some(Received { own: Room(own), of_node: Room(of_node) })
    }

    /// Waits for room for so many bytes of a request.
    ///
    /// # Errors
    /// [`crate::error::Error::Throttled`] where none came free in time.
    pub async fn receive(self: Arc<Self>, bytes: usize, wait_max: Duration) -> Result<Received> {
        let (own, of_node) = self.received_counts(bytes);
        // Its own first: what waits for that keeps nobody else waiting.
        let wait = async {
            let own = self.received.clone().acquire_many_owned(own).await.ok()?;
            let of_node = self.load.received.clone().acquire_many_owned(of_node).await.ok()?;
            Some(Received { own: Room(own), of_node: Room(of_node) })
        };
        timeout(wait_max, wait).await.ok().flatten().ok_or_else(|| {
            self.load.events.requests_refused.add();
            throttled("bytes of requests to this node")
        })
    }

    /// A request beyond the share still gets in when it is alone.
    fn received_counts(&self, bytes: usize) -> (u32, u32) {
        let shares = &self.load.shares;
        (permits(bytes.min(shares.received_per_connection)), permits(bytes.min(shares.received)))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(Instant, u64, usize)>> {
        self.untaken.lock().expect("no panic while it is held")
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        *self.load.windows() += self.window;
    }
}

/// What one call holds: of its requests, until they are handled, and of its answers, until they
/// are taken.
#[derive(Debug)]
pub struct Call {
    load: Arc<Load>,
    connection: Arc<Connection>,
    /// Of what is read and not yet sent.
    room: Mutex<Option<Room>>,
    /// Of what was received and is not yet handled.
    received: Mutex<Option<Received>>,
}

impl Call {
    pub fn new(load: &Arc<Load>, connection: &Arc<Connection>) -> Arc<Self> {
        let (load, connection) = (load.clone(), connection.clone());
        Arc::new(Self { load, connection, room: Mutex::default(), received: Mutex::default() })
    }

    pub fn load(&self) -> &Arc<Load> {
        &self.load
    }

    pub fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Keeps the room of what was received, until [`Call::handled`] or the end of the call.
    pub fn received(&self, room: Received) {
        let mut received = self.received.lock().expect("no panic while it is held");
        match &mut *received {
            Some(received) => received.merge(room),
            None => *received = Some(room),
        }
    }

    /// What was received is in a log, or answered.
    pub fn handled(&self) {
        *self.received.lock().expect("no panic while it is held") = None;
    }

    /// Keeps room until what it was taken for has been sent and taken.
    pub fn hold(&self, room: Room) {
        let mut held = self.lock();
        match &mut *held {
            Some(held) => held.merge(room),
            None => *held = Some(room),
        }
    }

    /// Bytes as they go out: they hold their room, and count as untaken, until they are dropped.
    pub fn send(&self, bytes: Bytes) -> Bytes {
        let held = self.lock().take();
        if held.is_none() && bytes.len() < limits::ANSWER_COUNTED_BYTES {
            return bytes;
        }
        let room = match held {
            Some(mut room) => {
                room.shrink_to(bytes.len());
                Some(room)
            }
            None => self.load.answer_now(bytes.len()),
        };
        self.count(bytes, room)
    }

    /// As [`Self::send`] for some of the bytes of messages: they take their part of the room, which
    /// was taken for no more than all of them.
    pub fn send_part(&self, bytes: Bytes) -> Bytes {
        let mut held = self.lock();
        let room = held.as_mut().map(|room| room.split(bytes.len()));
        let is_last = held.take_if(|rest| rest.bytes() == 0).is_some();
        drop(held);
        // What is small counts as part of its call, unless it is all that does.
        if !is_last && bytes.len() < limits::ANSWER_COUNTED_BYTES {
            return bytes;
        }
        let room = room.or_else(|| self.load.answer_now(bytes.len()));
        self.count(bytes, room)
    }

    fn count(&self, bytes: Bytes, room: Option<Room>) -> Bytes {
        let id = self.connection.next_answer.fetch_add(1, Ordering::Relaxed);
        self.connection.lock().push((Instant::now(), id, bytes.len()));
        let connection = self.connection.clone();
        Bytes::from_owner(Untaken { bytes, id, connection, _room: room })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Room>> {
        self.room.lock().expect("no panic while it is held")
    }
}

/// Bytes on their way out.
#[derive(Debug)]
struct Untaken {
    bytes: Bytes,
    id: u64,
    connection: Arc<Connection>,
    _room: Option<Room>,
}

impl AsRef<[u8]> for Untaken {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Untaken {
    fn drop(&mut self) {
        let mut untaken = self.connection.lock();
        if let Some(place) = untaken.iter().position(|(_, id, _)| *id == self.id) {
            untaken.swap_remove(place);
        }
    }
}
