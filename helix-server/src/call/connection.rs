//! Tracks one client connection: bytes read, responses its client has not read, its end.

use std::fmt::{self, Display};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::task::Waker;
use std::time::Duration;

use futures_util::task::AtomicWaker;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

use super::begun_calls::AcceptedCalls;
use super::call_shares::ClientAddress;
use super::cancelled_calls::CancelledCalls;
use super::{ClientLoad, LoadPermit, Waiting, permits};
use crate::access::{CallShare, Principal};
use crate::error::{Error, Result};
use crate::limits;
use crate::sync;

/// One open client connection.
#[derive(Debug)]
pub struct ClientConnection {
    load: Arc<ClientLoad>,
    _permit: LoadPermit,
    /// Taken from the node's free window bytes; returned on drop.
    window_bytes: u64,
    /// The client's address, and its share of the calls without credentials.
    peer: OnceLock<(ClientAddress, Arc<CallShare>)>,
    /// Principal of the verified client certificate, or the reason why it has none.
    certificate_principal: OnceLock<std::result::Result<Principal, String>>,
    /// Request bytes of this connection; those of all connections are in `load`.
    request_bytes: Arc<Semaphore>,
    /// Bytes of messages of this connection that have arrived in part: half of the node's.
    arriving_bytes: Arc<Semaphore>,
    /// Requests of this connection that wait for memory, and how many waits have ended.
    waiting_requests: AtomicU64,
    ended_waits: AtomicU64,
    /// Turn of the one message of this connection that waits for the node's turn.
    whole_turn: Arc<Semaphore>,
    read_bytes: AtomicU64,
    is_closed: AtomicBool,
    reader: AtomicWaker,
    /// Responses that the client has not read: since when, id, bytes.
    unread: Mutex<Vec<(Instant, u64, usize)>>,
    pub(super) next_response: AtomicU64,
    calls: Mutex<OpenCalls>,
    pub(super) accepted: AcceptedCalls,
    /// Refused requests whose rest is discarded.
    discards: AtomicUsize,
}

/// Open calls of a connection, and when a call began or ended, or a response was read.
#[derive(Debug)]
struct OpenCalls {
    count: usize,
    changed_at: Instant,
}

/// RAII permit for the bytes of a request, on its connection and on its node.
#[derive(Debug)]
pub struct RequestPermit {
    connection: LoadPermit,
    node: LoadPermit,
}

impl RequestPermit {
    pub fn merge(&mut self, other: Self) {
        self.connection.merge(other.connection);
        self.node.merge(other.node);
    }
}

/// RAII permit for the part of a message that has arrived, on its connection and on its node.
#[derive(Debug)]
pub struct ArrivingPermit {
    connection: LoadPermit,
    node: LoadPermit,
}

impl ArrivingPermit {
    pub fn merge(&mut self, other: Self) {
        self.connection.merge(other.connection);
        self.node.merge(other.node);
    }
}

/// RAII permit to discard the rest of a refused request.
#[derive(Debug)]
pub(crate) struct DiscardPermit {
    connection: Arc<ClientConnection>,
    _permit: LoadPermit,
}

impl Drop for DiscardPermit {
    fn drop(&mut self) {
        self.connection.discards.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts a request as waiting on its connection until it is dropped.
struct ConnectionWait<'a> {
    connection: &'a ClientConnection,
    _waiting: Waiting<'a>,
}

impl<'a> ConnectionWait<'a> {
    fn new(connection: &'a ClientConnection) -> Self {
        Self { connection, _waiting: Waiting::new(&connection.waiting_requests) }
    }
}

impl Drop for ConnectionWait<'_> {
    fn drop(&mut self) {
        self.connection.ended_waits.fetch_add(1, Ordering::Relaxed);
    }
}

/// Memory of a message that has arrived in part, or whole.
#[derive(Debug)]
pub enum MessageClaim {
    /// Permits for what has arrived.
    Part(ArrivingPermit),
    /// The permit for all of it, with the turns of its connection and of the node.
    Whole { permit: RequestPermit, turns: [LoadPermit; 2] },
    /// The permit for a message that has arrived whole.
    Arrived(RequestPermit),
}

impl ClientConnection {
    pub(super) fn new(load: &Arc<ClientLoad>, permit: LoadPermit, window_bytes: u64) -> Arc<Self> {
        let request_bytes = Arc::new(Semaphore::new(load.shares.connection_request_bytes));
        Arc::new(Self {
            load: load.clone(),
            _permit: permit,
            window_bytes,
            peer: OnceLock::new(),
            certificate_principal: OnceLock::new(),
            request_bytes,
            arriving_bytes: Arc::new(Semaphore::new(load.shares.arriving_bytes / 2)),
            waiting_requests: AtomicU64::new(0),
            ended_waits: AtomicU64::new(0),
            whole_turn: Arc::new(Semaphore::new(1)),
            read_bytes: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
            reader: AtomicWaker::new(),
            unread: Mutex::default(),
            next_response: AtomicU64::new(0),
            calls: Mutex::new(OpenCalls { count: 0, changed_at: Instant::now() }),
            accepted: AcceptedCalls::default(),
            discards: AtomicUsize::new(0),
        })
    }

    /// Sets the client's address, which the log shows.
    pub fn set_peer(&self, peer: ClientAddress) {
        // Ignored: a connection has one peer.
        let _ = self.peer.set((peer, self.load.address_share(peer)));
    }

    /// Returns true if the client has connected to the Unix domain socket.
    pub fn is_on_unix_socket(&self) -> bool {
        matches!(self.peer.get(), Some((ClientAddress::Unix, _)))
    }

    /// Returns the share of calls without credentials; `None` if the address is not known.
    pub(super) fn address_share(&self) -> Option<&Arc<CallShare>> {
        self.peer.get().map(|(_, share)| share)
    }

    /// Sets the principal of the client's certificate, which the TLS handshake has verified, or
    /// the reason why it has none.
    pub fn set_certificate_principal(&self, principal: std::result::Result<Principal, String>) {
        // Ignored: a connection has one handshake.
        let _ = self.certificate_principal.set(principal);
    }

    /// Returns the principal of the client's certificate, or the reason why it has none; `None`
    /// without a certificate.
    pub fn certificate_principal(&self) -> Option<&std::result::Result<Principal, String>> {
        self.certificate_principal.get()
    }

    pub fn peer(&self) -> impl Display + '_ {
        struct Shown<'a>(Option<&'a ClientAddress>);
        impl Display for Shown<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.0 {
                    Some(peer) => peer.fmt(f),
                    None => f.write_str("unknown"),
                }
            }
        }
        Shown(self.peer.get().map(|(peer, _)| peer))
    }

    /// Returns the HTTP/2 window of this connection, in bytes.
    pub fn window_bytes(&self) -> u64 {
        self.window_bytes.max(limits::WINDOW_BYTES_MIN)
    }

    /// Counts bytes that arrived.
    pub fn add_read_bytes(&self, bytes: usize) {
        self.read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Returns the number of bytes that have arrived.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// Registers the task that waits for bytes; [`Self::close`] wakes it.
    pub fn register_reader(&self, reader: &Waker) {
        self.reader.register(reader);
    }

    /// Closes the connection, with every call on it.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.wake_reader();
    }

    /// Wakes the task that waits for bytes.
    pub(super) fn wake_reader(&self) {
        self.reader.wake();
    }

    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Returns true if a client has sent less than the HTTP/2 handshake.
    pub fn is_silent(&self) -> bool {
        self.read_bytes() < limits::HANDSHAKE_BYTES
    }

    /// Returns true if no call has been open, and no response unread, for `time`.
    pub fn is_idle_for(&self, time: Duration) -> bool {
        let calls = sync::lock(&self.calls);
        let is_idle = calls.count == 0 && calls.changed_at.elapsed() >= time;
        drop(calls);
        is_idle && self.unread().is_none()
    }

    /// Acquires the permit of a call.
    ///
    /// # Errors
    /// [`Error::Throttled`] if the maximum is open, on this connection or on the node.
    pub fn acquire_call(&self) -> Result<LoadPermit> {
        self.load.acquire_call(self.call_count())
    }

    /// Returns the number of open calls.
    pub fn call_count(&self) -> usize {
        sync::lock(&self.calls).count
    }

    /// Counts calls that the client has cancelled; returns the time until which the connection is
    /// not read, if they are too many.
    ///
    /// Beyond [`limits::CANCELLED_UNPACED`] in a second they also count for the node.
    pub(crate) fn cancel_calls(
        &self,
        count: u32,
        cancelled: &mut CancelledCalls,
    ) -> Option<Instant> {
        let now = Instant::now();
        let (own, many) = cancelled.add(count, now);
        let of_node = match many {
            0 => None,
            many => sync::lock(&self.load.cancelled_calls).add(many, now),
        };
        let until = own.max(of_node);
        until.inspect(|_| self.load.events.cancelled_calls_paced.add())
    }

    /// Acquires the permit to read and discard the rest of a request whose call was refused.
    ///
    /// A connection may have as many as are free after them, and always
    /// [`limits::CALLS_PER_CONNECTION_MIN`] while one is free.
    pub(crate) fn try_acquire_discard(self: &Arc<Self>) -> Option<DiscardPermit> {
        let open = self.discards.load(Ordering::Relaxed);
        if open >= limits::CALLS_PER_CONNECTION_MIN
            && open >= self.load.discards.available_permits()
        {
            return None;
        }
        let permit = self.load.discards.clone().try_acquire_owned().ok()?;
        self.discards.fetch_add(1, Ordering::Relaxed);
        Some(DiscardPermit { connection: self.clone(), _permit: LoadPermit(permit) })
    }

    pub fn load(&self) -> &Arc<ClientLoad> {
        &self.load
    }

    pub(super) fn change_calls(&self, change: impl FnOnce(usize) -> usize) {
        let mut calls = sync::lock(&self.calls);
        *calls = OpenCalls { count: change(calls.count), changed_at: Instant::now() };
    }

    /// Returns the age of the oldest unread response, and the bytes of all unread ones.
    pub fn unread(&self) -> Option<(Duration, usize)> {
        let unread = self.lock();
        let oldest = unread.iter().map(|(since, ..)| *since).min()?;
        Some((oldest.elapsed(), unread.iter().map(|(.., bytes)| bytes).sum()))
    }

    /// Acquires the permit for `bytes` of a request, if that much is free now.
    pub fn try_acquire_request(&self, bytes: usize) -> Option<RequestPermit> {
        let (own, of_node) = self.request_permits(bytes);
        let own = self.request_bytes.clone().try_acquire_many_owned(own).ok()?;
        let of_node = self.load.request_bytes.clone().try_acquire_many_owned(of_node).ok()?;
        Some(RequestPermit { connection: LoadPermit(own), node: LoadPermit(of_node) })
    }

    /// Acquires the permit for `bytes` of a request of this share, after at most `wait_max`.
    ///
    /// # Errors
    /// [`Error::Throttled`] after that wait.
    pub async fn acquire_request(
        self: Arc<Self>,
        share: Option<Arc<CallShare>>,
        bytes: usize,
        wait_max: Duration,
    ) -> Result<RequestPermit> {
        let _waiting = ConnectionWait::new(&self);
        let (own, of_node) = self.request_permits(bytes);
        let wait = async {
            // The connection's permit first: waiting for it delays no other connection.
            let own = self.request_bytes.clone().acquire_many_owned(own).await.ok()?;
            let _waiting = Waiting::new(&self.load.waiting_requests);
            let _turn = memory_turn(share).await;
            let of_node = self.load.request_bytes.clone().acquire_many_owned(of_node).await.ok()?;
            Some(RequestPermit { connection: LoadPermit(own), node: LoadPermit(of_node) })
        };
        timeout(wait_max, wait).await.ok().flatten().ok_or_else(|| self.refuse_request())
    }

    /// Returns true if a request of this connection waits for memory.
    ///
    /// The part that has arrived stays unread and fills the connection's window, so that other
    /// messages of the connection may not arrive.
    pub fn has_waiting_requests(&self) -> bool {
        self.waiting_requests.load(Ordering::Relaxed) > 0
    }

    /// Returns how many requests of this connection have ended a wait for memory.
    pub fn ended_waits(&self) -> u64 {
        self.ended_waits.load(Ordering::Relaxed)
    }

    /// Counts a request that is refused because the memory for requests is in use.
    pub fn refuse_request(&self) -> Error {
        self.load.events.requests_refused.add();
        Error::throttled("bytes of requests to this node")
    }

    /// Acquires the permit for `bytes` of a message that has not arrived whole, if they are free.
    ///
    /// One connection gets at most half of what is free.
    pub fn try_acquire_arriving(&self, bytes: usize) -> Option<ArrivingPermit> {
        let free = self.load.arriving_bytes.available_permits().saturating_sub(bytes);
        let half = self.load.shares.arriving_bytes / 2;
        let held = half.saturating_sub(self.arriving_bytes.available_permits());
        if held + bytes > free {
            return None;
        }
        let bytes = permits(bytes);
        let own = self.arriving_bytes.clone().try_acquire_many_owned(bytes).ok()?;
        let of_node = self.load.arriving_bytes.clone().try_acquire_many_owned(bytes).ok()?;
        Some(ArrivingPermit { connection: LoadPermit(own), node: LoadPermit(of_node) })
    }

    /// Acquires the permit for `bytes` more of a message, or for the whole of it, after at most
    /// `wait_max`.
    ///
    /// Messages that have arrived in part may have all of the memory for them, and then wait for
    /// each other. One of them at a time therefore claims the memory for whole messages. It needs
    /// nothing more to arrive. One connection gets at most half of the memory for parts.
    ///
    /// # Errors
    /// [`Error::Throttled`] after that wait.
    pub async fn acquire_arriving(
        self: Arc<Self>,
        share: Option<Arc<CallShare>>,
        bytes: usize,
        whole_bytes: usize,
        wait_max: Duration,
    ) -> Result<MessageClaim> {
        let _waiting = ConnectionWait::new(&self);
        // Waits for the connection's own permits come first: they delay no other connection.
        let bytes = permits(bytes.min(self.load.shares.arriving_bytes / 2));
        let part = async {
            let own = self.arriving_bytes.clone().acquire_many_owned(bytes).await.ok()?;
            let _waiting = Waiting::new(&self.load.waiting_requests);
            let _turn = memory_turn(share).await;
            let of_node = self.load.arriving_bytes.clone().acquire_many_owned(bytes).await.ok()?;
            let (connection, node) = (LoadPermit(own), LoadPermit(of_node));
            Some(MessageClaim::Part(ArrivingPermit { connection, node }))
        };
        let (own_bytes, node_bytes) = self.request_permits(whole_bytes);
        let whole = async {
            let own_turn = self.whole_turn.clone().acquire_owned().await.ok()?;
            let own = self.request_bytes.clone().acquire_many_owned(own_bytes).await.ok()?;
            let _waiting = Waiting::new(&self.load.waiting_requests);
            let turn = self.load.whole_turn.clone().acquire_owned().await.ok()?;
            let of_node = self.load.request_bytes.clone();
            let of_node = of_node.acquire_many_owned(node_bytes).await.ok()?;
            let permit = RequestPermit { connection: LoadPermit(own), node: LoadPermit(of_node) };
            Some(MessageClaim::Whole { permit, turns: [LoadPermit(own_turn), LoadPermit(turn)] })
        };
        let either = async {
            tokio::select! {
                biased;
                whole = whole => whole,
                part = part => part,
            }
        };
        timeout(wait_max, either).await.ok().flatten().ok_or_else(|| self.refuse_request())
    }

    /// Returns the permits of the connection and of the node that a request needs.
    ///
    /// A request larger than a share needs the whole share, so it is admitted when it is alone.
    fn request_permits(&self, bytes: usize) -> (u32, u32) {
        let shares = &self.load.shares;
        (
            permits(bytes.min(shares.connection_request_bytes)),
            permits(bytes.min(shares.request_bytes)),
        )
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Vec<(Instant, u64, usize)>> {
        sync::lock(&self.unread)
    }
}

async fn memory_turn(share: Option<Arc<CallShare>>) -> Option<OwnedSemaphorePermit> {
    share?.memory_turn().await
}

impl Drop for ClientConnection {
    fn drop(&mut self) {
        *self.load.free_window_bytes() += self.window_bytes;
    }
}
