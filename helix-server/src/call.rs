//! Calls of clients and what they make the node hold, within the node's memory shares. Knows
//! neither gRPC nor records.
//!
//! - [`ClientLoad`]: the permits of the node. `connection`: one client connection, with
//!   `begun_calls` and `cancelled_calls`. `call_shares`: shares of the calls by address.
//! - `memory`: one call. `access`: its caller and the right that it was admitted with. `method`:
//!   the kinds of methods.
//! - `limit_events`: counts what the limits refused or closed.

mod access;
mod begun_calls;
mod call_shares;
mod cancelled_calls;
mod connection;
mod limit_events;
mod memory;
mod method;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::error::{Error, Result};
use crate::limits;
use crate::memory::MemoryShares;
use crate::sync;

pub(crate) use access::CallLogin;
pub use access::{CallAccess, OwnedResource};
pub(crate) use begun_calls::AcceptedCall;
use call_shares::AddressShares;
pub use call_shares::ClientAddress;
use cancelled_calls::CancelRate;
pub(crate) use cancelled_calls::CancelledCalls;
pub use connection::{ArrivingPermit, ClientConnection, MessageClaim, RequestPermit};
pub use limit_events::LimitEvents;
pub use memory::CallMemory;
pub(crate) use method::{MethodKind, MethodRow};

/// RAII permit: releases its units (bytes, calls, connections, partitions) on drop.
#[derive(Debug)]
pub struct LoadPermit(OwnedSemaphorePermit);

impl LoadPermit {
    /// Releases all but `bytes`.
    pub fn shrink_to(&mut self, bytes: usize) {
        let surplus = self.0.num_permits().saturating_sub(bytes);
        drop(self.0.split(surplus));
    }

    pub fn bytes(&self) -> usize {
        self.0.num_permits()
    }

    /// Splits off `bytes`, or all that is left.
    pub fn split(&mut self, bytes: usize) -> Self {
        let here = self.bytes();
        Self(self.0.split(bytes.min(here)).expect("no more than there is"))
    }

    /// Adds another permit of the same limit.
    ///
    /// # Panics
    /// Panics if `other` is a permit of another limit.
    pub fn merge(&mut self, other: Self) {
        self.0.merge(other.0);
    }
}

/// Client connections, calls and bytes of one node, with the limits on them.
#[derive(Debug)]
pub struct ClientLoad {
    shares: MemoryShares,
    events: LimitEvents,
    calls: Arc<Semaphore>,
    address_shares: AddressShares,
    request_bytes: Arc<Semaphore>,
    arriving_bytes: Arc<Semaphore>,
    /// Turn of the one message that may claim the memory for all of it before it has arrived.
    whole_turn: Arc<Semaphore>,
    /// Rest of requests whose calls were refused, which is read and discarded.
    discards: Arc<Semaphore>,
    /// Cancelled calls of the connections that cancel many.
    cancelled_calls: Mutex<CancelRate>,
    /// Requests that wait for memory.
    waiting_requests: AtomicU64,
    response_bytes: Arc<Semaphore>,
    partitions_read: Arc<Semaphore>,
    /// Bytes of HTTP/2 windows that no connection has.
    free_window_bytes: Mutex<u64>,
    /// All connections, oldest first; some may be closed.
    connections: Mutex<Vec<Weak<ClientConnection>>>,
    connection_permits: Arc<Semaphore>,
    /// Connections that the memory share allows and the limit of open files does not.
    excluded_connections: AtomicUsize,
    /// Readers that wait for response bytes.
    waiting_readers: AtomicU64,
}

impl ClientLoad {
    pub fn new(shares: MemoryShares) -> Arc<Self> {
        let limit = |count: usize| Arc::new(Semaphore::new(count.min(Semaphore::MAX_PERMITS)));
        Arc::new(Self {
            events: LimitEvents::default(),
            calls: limit(shares.calls),
            address_shares: AddressShares::default(),
            request_bytes: limit(shares.request_bytes),
            arriving_bytes: limit(shares.arriving_bytes),
            whole_turn: limit(1),
            discards: limit(shares.calls),
            cancelled_calls: Mutex::new(CancelRate::new(limits::CANCELLED_PER_SECOND_OF_NODE)),
            waiting_requests: AtomicU64::new(0),
            response_bytes: limit(shares.response_bytes),
            partitions_read: limit(shares.partitions_read),
            free_window_bytes: Mutex::new(shares.window_bytes),
            connections: Mutex::default(),
            connection_permits: limit(shares.connections),
            excluded_connections: AtomicUsize::new(0),
            waiting_readers: AtomicU64::new(0),
            shares,
        })
    }

    pub fn events(&self) -> &LimitEvents {
        &self.events
    }

    pub fn shares(&self) -> &MemoryShares {
        &self.shares
    }

    /// Returns the number of open client connections.
    pub fn connection_count(&self) -> usize {
        self.connections_max().saturating_sub(self.connection_permits.available_permits())
    }

    /// Returns the maximum of open client connections.
    pub fn connections_max(&self) -> usize {
        self.shares.connections.saturating_sub(self.excluded_connections.load(Ordering::Relaxed))
    }

    /// Returns the bytes of responses that clients have not read yet.
    pub fn response_bytes(&self) -> usize {
        self.shares.response_bytes.saturating_sub(self.response_bytes.available_permits())
    }

    /// Returns the bytes of requests that are arriving or being handled.
    pub fn request_bytes(&self) -> usize {
        let arriving = self.arriving_bytes.available_permits();
        let arriving = self.shares.arriving_bytes.saturating_sub(arriving);
        let whole = self.request_bytes.available_permits();
        self.shares.request_bytes.saturating_sub(whole) + arriving
    }

    /// Returns true if a request waits for memory.
    pub fn has_waiting_requests(&self) -> bool {
        self.waiting_requests.load(Ordering::Relaxed) > 0
    }

    /// Returns the number of partitions that are being read.
    pub fn partition_count(&self) -> usize {
        self.shares.partitions_read.saturating_sub(self.partitions_read.available_permits())
    }

    /// Lowers the maximum of connections to `files`; never raises it.
    pub fn limit_connections(&self, files: u64) {
        let allowed = usize::try_from(files).unwrap_or(usize::MAX);
        let surplus = self.connections_max().saturating_sub(allowed);
        let forgotten = self.connection_permits.forget_permits(surplus);
        self.excluded_connections.fetch_add(forgotten, Ordering::Relaxed);
    }

    /// Registers a new connection; `None` if the maximum is open.
    pub fn connect(self: &Arc<Self>) -> Option<Arc<ClientConnection>> {
        let Ok(permit) = self.connection_permits.clone().try_acquire_owned() else {
            self.events.connections_refused.add();
            return None;
        };
        let window_bytes = {
            let mut free = self.free_window_bytes();
            let window_bytes = (*free / limits::WINDOW_PART).min(limits::WINDOW_BYTES_MAX);
            *free -= window_bytes;
            window_bytes
        };
        let connection = ClientConnection::new(self, LoadPermit(permit), window_bytes);
        let mut connections = self.connections();
        if connections.len() == connections.capacity() {
            connections.retain(|it| it.strong_count() > 0);
        }
        connections.push(Arc::downgrade(&connection));
        Some(connection)
    }

    /// Acquires the permit of a call on a connection with `open` calls.
    ///
    /// A connection may have as many calls as are free after them, so it never has more than half
    /// of those that it found free.
    ///
    /// # Errors
    /// [`Error::Throttled`] if the maximum of calls is open.
    pub fn acquire_call(&self, open: usize) -> Result<LoadPermit> {
        let refused = |what| {
            self.events.calls_refused.add();
            Error::throttled(what)
        };
        let free = self.calls.available_permits();
        if open >= limits::CALLS_PER_CONNECTION_MIN && open >= free {
            return Err(refused("calls of this connection"));
        }
        let permit = self.calls.clone().try_acquire_owned();
        permit.map(LoadPermit).map_err(|_| refused("calls of this node"))
    }

    /// Acquires the permit for the partitions that a call reads.
    ///
    /// # Errors
    /// [`Error::Throttled`] if too many are being read.
    pub fn acquire_partitions(&self, count: usize) -> Result<LoadPermit> {
        let count = permits(count.clamp(1, self.shares.partitions_read));
        self.partitions_read.clone().try_acquire_many_owned(count).map(LoadPermit).map_err(|_| {
            self.events.partitions_refused.add();
            Error::throttled("partitions that are being read from this node")
        })
    }

    /// Returns how long the next response may be, at most `bytes`: shorter as less is free.
    pub fn response_bytes_max(&self, bytes: usize) -> usize {
        let reserve = self.shares.response_bytes / limits::RESPONSE_RESERVE_PART;
        let free = self.response_bytes.available_permits().saturating_sub(reserve);
        bytes.min((free / 16).max(limits::RESPONSE_BYTES_MIN))
    }

    /// Acquires the permit for a response of `bytes`, after at most `RESPONSE_WAIT_MAX`.
    ///
    /// # Errors
    /// [`Error::Throttled`] after that wait.
    pub async fn acquire_response(&self, bytes: usize) -> Result<LoadPermit> {
        let count = permits(bytes.min(self.shares.response_bytes));
        let _waiting = Waiting::new(&self.waiting_readers);
        let wait = self.response_bytes.clone().acquire_many_owned(count);
        match timeout(limits::RESPONSE_WAIT_MAX, wait).await {
            Ok(Ok(permit)) => Ok(LoadPermit(permit)),
            Ok(Err(_)) | Err(_) => {
                self.events.answers_refused.add();
                Err(Error::throttled("bytes of responses that clients of this node have not read"))
            }
        }
    }

    /// Acquires the permit for a response of `bytes`, if that much is free now.
    pub fn try_acquire_response(&self, bytes: usize) -> Option<LoadPermit> {
        let count = permits(bytes.min(self.shares.response_bytes));
        self.response_bytes.clone().try_acquire_many_owned(count).ok().map(LoadPermit)
    }

    /// Closes connections whose clients do not read their responses.
    ///
    /// Closes all that stalled for `STALLED_READER_MAX`. While other readers wait for response
    /// bytes, also closes those that stalled longest, from `STALLED_READER_PRESSED_MAX` on, until
    /// a quarter of the share is free.
    pub fn close_stalled(&self) {
        let is_pressed = self.waiting_readers.load(Ordering::Relaxed) > 0;
        let bound = if is_pressed {
            limits::STALLED_READER_PRESSED_MAX
        } else {
            limits::STALLED_READER_MAX
        };
        let mut stalled: Vec<(Duration, usize, Arc<ClientConnection>)> = self
            .open_connections()
            .into_iter()
            .filter_map(|connection| {
                let (age, bytes) = connection.unread()?;
                (age >= bound).then_some((age, bytes, connection))
            })
            .collect();
        stalled.sort_unstable_by_key(|(age, ..)| std::cmp::Reverse(*age));
        let mut freed = 0;
        for (age, bytes, connection) in stalled {
            if age < limits::STALLED_READER_MAX && freed >= self.shares.response_bytes / 4 {
                break;
            }
            freed += bytes;
            self.events.stalled_readers_ended.add();
            tracing::info!(
                peer = %connection.peer(), ?age, bytes,
                "closing connection of a client that does not read its responses"
            );
            connection.close();
        }
    }

    /// Closes connections that a shutdown need not wait for: their clients have no open call.
    pub fn close_idle(&self) {
        for connection in self.open_connections() {
            if connection.is_silent() || connection.is_idle_for(limits::SHUTDOWN_IDLE_WAIT_MAX) {
                connection.close();
            }
        }
    }

    /// Closes every connection, with the calls on it.
    pub fn close_all(&self) {
        for connection in self.open_connections() {
            connection.close();
        }
    }

    fn open_connections(&self) -> Vec<Arc<ClientConnection>> {
        let mut connections = self.connections();
        connections.retain(|it| it.strong_count() > 0);
        connections.iter().filter_map(Weak::upgrade).collect()
    }

    fn free_window_bytes(&self) -> MutexGuard<'_, u64> {
        sync::lock(&self.free_window_bytes)
    }

    fn connections(&self) -> MutexGuard<'_, Vec<Weak<ClientConnection>>> {
        sync::lock(&self.connections)
    }
}

/// Counts a reader or a request as waiting until it is dropped.
struct Waiting<'a>(&'a AtomicU64);

impl<'a> Waiting<'a> {
    fn new(count: &'a AtomicU64) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn permits(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
