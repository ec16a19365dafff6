//! Tracks what clients make the node hold, within the node's memory shares.
//! Counts the requests that a limit refused and the connections that it closed. Knows neither gRPC
//! nor records.

mod call_shares;
mod connection;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::error::{Error, Result};
use crate::limits;
use crate::memory::MemoryShares;
use crate::sync;

use call_shares::AddressShares;
pub use call_shares::ClientAddress;
pub use connection::{ArrivingPermit, CallMemory, ClientConnection, MessageClaim, RequestPermit};

/// Declares the counters once: the field name is the value of the metric's `limit` label.
macro_rules! limit_events {
    ($($(#[$doc:meta])* $field:ident),+ $(,)?) => {
        /// Counts since the process started, one for each limit.
        #[derive(Debug, Default)]
        pub struct LimitEvents {
            $($(#[$doc])* pub $field: EventCounter,)+
        }

        impl LimitEvents {
            /// Returns each counter with its name.
            pub fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field.get())),+].into_iter()
            }
        }
    };
}

limit_events! {
    /// Connections closed at once because the maximum was open.
    connections_refused,
    /// Connections closed because the HTTP/2 handshake took too long.
    handshakes_timed_out,
    /// Calls rejected because the maximum was open, on the node or on their connection.
    calls_refused,
    /// Calls rejected because their principal, or their address without one, had its share of them.
    principal_calls_refused,
    /// Times that a connection was not read for a while because its client cancelled many calls.
    cancelled_calls_paced,
    /// Requests rejected because the request bytes stayed at their limit.
    requests_refused,
    /// Requests rejected because their bytes did not arrive in time.
    requests_timed_out,
    /// Reads rejected because the response bytes stayed at their limit.
    answers_refused,
    /// Connections closed because the client did not read its responses.
    stalled_readers_ended,
    /// Reads rejected because too many partitions were being read.
    partitions_refused,
    /// Appends rejected because their shard had too many bytes in flight for too long.
    appends_throttled,
}

#[derive(Debug, Default)]
pub struct EventCounter(AtomicU64);

impl EventCounter {
    pub fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

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
mod tests {
    use super::*;
    use crate::memory::MEMORY_LIMIT_MIN;

    fn small() -> Arc<ClientLoad> {
        ClientLoad::new(MemoryShares { connections: 2, calls: 1, partitions_read: 3, ..least() })
    }

    fn least() -> MemoryShares {
        MemoryShares::of(MEMORY_LIMIT_MIN)
    }

    fn count(load: &ClientLoad, name: &str) -> u64 {
        load.events().counts().find(|(it, _)| *it == name).unwrap().1
    }

    #[test]
    fn a_full_limit_rejects_counts_and_frees_again() {
        let load = small();
        let (first, second) = (load.connect().unwrap(), load.connect().unwrap());
        assert!(load.connect().is_none());
        assert_eq!((count(&load, "connections_refused"), load.connection_count()), (1, 2));
        drop(first);
        assert!(load.connect().is_some());
        drop(second);
        let call = load.acquire_call(0).unwrap();
        assert!(matches!(load.acquire_call(0), Err(Error::Throttled { .. })));
        drop(call);
        load.acquire_call(0).unwrap();
        let three = load.acquire_partitions(3).unwrap();
        assert!(load.acquire_partitions(1).is_err());
        drop(three);
        let beyond_limit = load.acquire_partitions(9).unwrap();
        assert_eq!(beyond_limit.bytes(), 3, "admitted when it is alone");
        assert_eq!((count(&load, "calls_refused"), count(&load, "partitions_refused")), (1, 1));
    }

    #[test]
    fn no_connection_takes_more_than_half_of_the_free_calls() {
        let load = ClientLoad::new(MemoryShares { calls: 1_000, ..least() });
        let mut held = Vec::new();
        for half in [500, 250, 125, 63, 31, limits::CALLS_PER_CONNECTION_MIN] {
            let mut open = 0;
            while let Ok(permit) = load.acquire_call(open) {
                held.push(permit);
                open += 1;
            }
            assert_eq!(open, half);
        }
        load.acquire_call(0).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_pauses_while_its_client_cancels_too_many_calls() {
        let load = ClientLoad::new(least());
        let connection = load.connect().unwrap();
        let call = || {
            let permit = load.acquire_call(0).unwrap();
            CallMemory::new(&load, &connection, Some(permit))
        };
        let burst = limits::CANCELLED_PER_SECOND * limits::CANCELLED_BURST.as_secs() as u32;
        for _ in 0..2 * burst {
            call().set_finished();
        }
        for _ in 0..burst {
            drop(call());
        }
        assert_eq!(connection.read_again_at(), None);
        for _ in 0..100 {
            drop(call());
        }
        let until = connection.read_again_at().unwrap();
        let pause = Duration::from_secs(100) / limits::CANCELLED_PER_SECOND;
        assert_eq!(until - tokio::time::Instant::now(), pause);
        tokio::time::advance(pause).await;
        assert_eq!(connection.read_again_at(), None);
    }

    #[test]
    fn connections_share_the_windows_and_return_them() {
        let load = ClientLoad::new(MemoryShares::default());
        let open: Vec<_> = (0..500).map(|_| load.connect().unwrap()).collect();
        let windows: Vec<u64> = open.iter().map(|it| it.window_bytes()).collect();
        assert!(windows.is_sorted_by(|a, b| a >= b));
        assert!(windows[0] > 1 << 20, "{}", windows[0]);
        assert!(windows[499] < 2 * limits::WINDOW_BYTES_MIN);
        // A hundred records of 1 KiB with their framing.
        assert!(windows[17] / limits::FRAME_PART >= 104_000, "{}", windows[17]);
        let beyond: u64 = windows.iter().map(|it| it - limits::WINDOW_BYTES_MIN).sum();
        assert!(beyond <= load.shares().window_bytes);
        drop(open);
        assert_eq!(load.connect().unwrap().window_bytes(), windows[0]);
    }

    #[test]
    fn open_files_limit_the_connections_too() {
        let load = small();
        load.limit_connections(1);
        let _only = load.connect().unwrap();
        assert!(load.connect().is_none());
        assert_eq!((load.connections_max(), load.connection_count()), (1, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_waits_for_response_bytes_and_is_then_throttled() {
        let load = ClientLoad::new(least());
        let mut all = load.acquire_response(usize::MAX).await.unwrap();
        assert_eq!(load.response_bytes(), least().response_bytes);
        assert!(matches!(load.acquire_response(1).await, Err(Error::Throttled { .. })));
        assert_eq!(count(&load, "answers_refused"), 1);
        all.shrink_to(10);
        load.acquire_response(1000).await.unwrap();
        assert_eq!(load.response_bytes(), 10);
    }

    #[test]
    fn responses_get_shorter_as_fewer_bytes_are_free() {
        let load = ClientLoad::new(least());
        assert_eq!(load.response_bytes_max(1 << 20), 1 << 20);
        let _most = load.try_acquire_response(least().response_bytes * 3 / 5).unwrap();
        let shorter = load.response_bytes_max(1 << 20);
        assert!(shorter < 1 << 20 && shorter > limits::RESPONSE_BYTES_MIN, "{shorter}");
        let _rest = load.try_acquire_response(least().response_bytes / 5).unwrap();
        assert_eq!(load.response_bytes_max(1 << 20), limits::RESPONSE_BYTES_MIN);
        assert_eq!(load.response_bytes_max(100), 100);
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_reader_that_stalls_too_long_is_closed() {
        let load = ClientLoad::new(least());
        let (stalled, reading) = (load.connect().unwrap(), load.connect().unwrap());
        let call = |connection: &Arc<ClientConnection>| CallMemory::new(&load, connection, None);
        let _unread = call(&stalled).track_response(vec![1; 100_000].into());
        tokio::time::advance(limits::STALLED_READER_MAX / 2).await;
        let read = call(&reading).track_response(vec![1; 100_000].into());
        load.close_stalled();
        assert!(!stalled.is_closed());
        tokio::time::advance(limits::STALLED_READER_MAX / 2).await;
        load.close_stalled();
        assert!(stalled.is_closed() && !reading.is_closed());
        assert_eq!(count(&load, "stalled_readers_ended"), 1);
        drop(read);
        assert!(reading.unread().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn shutdown_closes_connections_without_open_calls() {
        let load = ClientLoad::new(MemoryShares { connections: 4, ..least() });
        let [silent, idle, calling, reading] = [(); 4].map(|()| load.connect().unwrap());
        for connection in [&idle, &calling, &reading] {
            connection.add_read_bytes(100);
        }
        let call = CallMemory::new(&load, &calling, None);
        let unread = CallMemory::new(&load, &reading, None).track_response(vec![1; 100_000].into());
        load.close_idle();
        assert!(silent.is_closed() && !idle.is_closed());
        tokio::time::advance(limits::SHUTDOWN_IDLE_WAIT_MAX).await;
        load.close_idle();
        assert!(idle.is_closed() && !calling.is_closed() && !reading.is_closed());
        drop((call, unread));
        load.close_idle();
        assert!(!calling.is_closed() && !reading.is_closed(), "their ends may be on their way");
        tokio::time::advance(limits::SHUTDOWN_IDLE_WAIT_MAX).await;
        load.close_idle();
        assert!(calling.is_closed() && reading.is_closed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stalled_reader_is_closed_early_while_others_wait() {
        let load = ClientLoad::new(least());
        let stalled = load.connect().unwrap();
        let call = CallMemory::new(&load, &stalled, None);
        let _others = load.try_acquire_response(least().response_bytes - 100_000).unwrap();
        call.keep_response(load.try_acquire_response(100_000).unwrap());
        let unread = call.track_response(vec![1; 100_000].into());
        let waits = tokio::spawn({
            let load = load.clone();
            async move { load.acquire_response(1).await }
        });
        tokio::time::sleep(limits::STALLED_READER_PRESSED_MAX).await;
        load.close_stalled();
        assert!(stalled.is_closed());
        // The closed connection drops its responses.
        drop(unread);
        waits.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn parts_of_a_response_hold_parts_of_its_permit() {
        let load = ClientLoad::new(least());
        let connection = load.connect().unwrap();
        let call = CallMemory::new(&load, &connection, None);
        let free = || load.response_bytes.available_permits();
        let all = free();
        // The permit covers the payloads, not their framing.
        call.keep_response(load.try_acquire_response(120_000).unwrap());
        let head = call.track_response_part(vec![1; 100].into());
        assert!(connection.unread().is_none(), "a small part counts with the next large one");
        let first = call.track_response_part(vec![2; 70_000].into());
        let between = call.track_response_part(vec![3; 50].into());
        let last = call.track_response_part(vec![4; 50_000].into());
        assert_eq!(free(), all - 70_000 - (50_000 - 150));
        for (part, bytes) in [(&head, 100), (&first, 70_000), (&between, 50), (&last, 50_000)] {
            assert_eq!(part.len(), bytes);
        }
        drop(first);
        assert_eq!(free(), all - (50_000 - 150));
        assert!(connection.unread().is_some());
        drop(last);
        assert_eq!(free(), all);
        assert!(connection.unread().is_none());
        // A small part that is the whole response is counted.
        call.keep_response(load.try_acquire_response(10).unwrap());
        let small = call.track_response_part(vec![5; 30].into());
        assert!(connection.unread().is_some() && free() == all - 10);
        drop(small);
        // A long part without a permit is counted.
        drop(call.track_response_part(vec![6; 30].into()));
        let long = call.track_response_part(vec![7; limits::RESPONSE_COUNTED_BYTES].into());
        assert_eq!(free(), all - limits::RESPONSE_COUNTED_BYTES);
        drop(long);
        assert_eq!(free(), all);
    }
}
