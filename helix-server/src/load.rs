//! What clients make a node hold at this moment, within the shares of its memory; and counts of
//! what was refused or ended because of a limit. Knows neither gRPC nor records.

mod connection;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::error::{Error, Result};
use crate::limits;
use crate::memory::Shares;

pub use connection::{Call, Connection, Received};

/// Declares the counters once: field, name of the metric, and what it counts.
macro_rules! limit_events {
    ($($(#[$doc:meta])* $field:ident),+ $(,)?) => {
        /// How often a limit was met since the process started.
        #[derive(Debug, Default)]
        pub struct LimitEvents {
            $($(#[$doc])* pub $field: Counter,)+
        }

        impl LimitEvents {
            /// Each counter with its name.
            pub fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field.get())),+].into_iter()
            }
        }
    };
}

limit_events! {
    /// Connections closed at once, since there were as many as allowed.
    connections_refused,
    /// Connections that did not begin to speak HTTP/2 in time.
    handshakes_timed_out,
    /// Calls refused, since there were as many as allowed.
    calls_refused,
    /// Requests refused: no room for their bytes came free in time.
    requests_refused,
    /// Requests whose bytes did not come in time.
    requests_timed_out,
    /// Reads refused: no room for their answer came free in time.
    answers_refused,
    /// Connections closed, since what they had asked for was not taken.
    stalled_readers_ended,
    /// Reads refused, since too many partitions were being read.
    partitions_refused,
    /// Appends refused: their shard had too much in flight for too long.
    appends_throttled,
}

#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Held for what it stands for; the room comes free when it is dropped.
#[derive(Debug)]
pub struct Room(OwnedSemaphorePermit);

impl Room {
    /// Gives back what is not needed.
    pub fn shrink_to(&mut self, bytes: usize) {
        let surplus = self.0.num_permits().saturating_sub(bytes);
        drop(self.0.split(surplus));
    }

    pub fn bytes(&self) -> usize {
        self.0.num_permits()
    }

    /// So much of it, or all that is left.
    pub fn split(&mut self, bytes: usize) -> Self {
        let here = self.bytes();
        Self(self.0.split(bytes.min(here)).expect("no more than there is"))
    }

    /// Both must come from the same room.
    pub fn merge(&mut self, other: Self) {
        self.0.merge(other.0);
    }
}

#[derive(Debug)]
pub struct Load {
    shares: Shares,
    events: LimitEvents,
    calls: Arc<Semaphore>,
    received: Arc<Semaphore>,
    answers: Arc<Semaphore>,
    partitions_read: Arc<Semaphore>,
    /// Bytes of HTTP/2 windows that no connection has.
    windows: Mutex<u64>,
    /// Connections from those that have been open for longest on; some may be gone.
    connections: Mutex<Vec<Weak<Connection>>>,
    open: Arc<Semaphore>,
    /// Connections that the share of the memory allows and something else does not.
    not_allowed: AtomicUsize,
    /// Readers that wait for room.
    waiting: AtomicU64,
}

impl Load {
    pub fn new(shares: Shares) -> Arc<Self> {
        let room = |count: usize| Arc::new(Semaphore::new(count.min(Semaphore::MAX_PERMITS)));
        Arc::new(Self {
            events: LimitEvents::default(),
            calls: room(shares.calls),
            received: room(shares.received),
            answers: room(shares.answers),
            partitions_read: room(shares.partitions_read),
            windows: Mutex::new(shares.windows),
            connections: Mutex::default(),
            open: room(shares.connections),
            not_allowed: AtomicUsize::new(0),
            waiting: AtomicU64::new(0),
            shares,
        })
    }

    pub fn events(&self) -> &LimitEvents {
        &self.events
    }

    pub fn shares(&self) -> &Shares {
        &self.shares
    }

    /// Client connections that are open.
    pub fn connection_count(&self) -> usize {
        self.connections_max().saturating_sub(self.open.available_permits())
    }

    /// Client connections that are allowed.
    pub fn connections_max(&self) -> usize {
        self.shares.connections.saturating_sub(self.not_allowed.load(Ordering::Relaxed))
    }

    /// Bytes of answers that readers have not taken yet.
    pub fn answer_bytes(&self) -> usize {
        self.shares.answers.saturating_sub(self.answers.available_permits())
    }

    /// Bytes of requests that are arriving or being handled.
    pub fn received_bytes(&self) -> usize {
        self.shares.received.saturating_sub(self.received.available_permits())
    }

    /// Partitions that are being read.
    pub fn partition_count(&self) -> usize {
        self.shares.partitions_read.saturating_sub(self.partitions_read.available_permits())
    }

    /// Takes no more connections than `files` allow for, beside the share of the memory.
    pub fn limit_connections(&self, files: u64) {
        let allowed = usize::try_from(files).unwrap_or(usize::MAX);
        let surplus = self.connections_max().saturating_sub(allowed);
        let forgotten = self.open.forget_permits(surplus);
        self.not_allowed.fetch_add(forgotten, Ordering::Relaxed);
    }

    /// A new connection; `None` where there are as many as allowed.
    pub fn connect(self: &Arc<Self>) -> Option<Arc<Connection>> {
        let Ok(place) = self.open.clone().try_acquire_owned() else {
            self.events.connections_refused.add();
            return None;
        };
        let window = {
            let mut left = self.windows();
            let window = (*left / limits::WINDOW_PART).min(limits::WINDOW_BYTES_MAX);
            *left -= window;
            window
        };
        let connection = Connection::new(self, Room(place), window);
        let mut connections = self.connections();
        if connections.len() == connections.capacity() {
            connections.retain(|it| it.strong_count() > 0);
        }
        connections.push(Arc::downgrade(&connection));
        Some(connection)
    }

    /// A call's place.
    ///
    /// # Errors
    /// [`Error::Throttled`] where there are as many as allowed.
    pub fn call(&self) -> Result<Room> {
        self.calls.clone().try_acquire_owned().map(Room).map_err(|_| {
            self.events.calls_refused.add();
            throttled("calls of this node")
        })
    }

    /// Places for the partitions that a call reads.
    ///
    /// # Errors
    /// [`Error::Throttled`] where too many are being read.
    pub fn partitions(&self, count: usize) -> Result<Room> {
        let count = permits(count.clamp(1, self.shares.partitions_read));
        self.partitions_read.clone().try_acquire_many_owned(count).map(Room).map_err(|_| {
            self.events.partitions_refused.add();
            throttled("partitions that are being read from this node")
        })
    }

    /// How long the next answer should be, of at most `bytes`: the less room there is, the less.
    pub fn answer_bytes_max(&self, bytes: usize) -> usize {
        let reserve = self.shares.answers / limits::ANSWERS_RESERVE_PART;
        let left = self.answers.available_permits().saturating_sub(reserve);
        bytes.min((left / 16).max(limits::ANSWER_BYTES_MIN))
    }

    /// Waits for room for an answer.
    ///
    /// # Errors
    /// [`Error::Throttled`] where none came free in time.
    pub async fn answer(&self, bytes: usize) -> Result<Room> {
        let count = permits(bytes.min(self.shares.answers));
        let _waiting = Waiting::new(&self.waiting);
        let wait = self.answers.clone().acquire_many_owned(count);
        match timeout(limits::ANSWER_WAIT_MAX, wait).await {
            Ok(Ok(room)) => Ok(Room(room)),
            Ok(Err(_)) | Err(_) => {
                self.events.answers_refused.add();
                Err(throttled("bytes of answers that readers of this node have not taken"))
            }
        }
    }

    /// Room for an answer that is there already, if there is any now.
    pub fn answer_now(&self, bytes: usize) -> Option<Room> {
        let count = permits(bytes.min(self.shares.answers));
        self.answers.clone().try_acquire_many_owned(count).ok().map(Room)
    }

    /// Ends connections whose readers stall: all that do so for long, and while other readers wait
    /// for room those that stall for longest.
    pub fn end_stalled(&self) {
        let is_pressed = self.waiting.load(Ordering::Relaxed) > 0;
        let bound = if is_pressed {
            limits::STALLED_READER_PRESSED_MAX
        } else {
            limits::STALLED_READER_MAX
        };
        let mut stalled: Vec<(Duration, usize, Arc<Connection>)> = self
            .open_connections()
            .into_iter()
            .filter_map(|connection| {
                let (age, bytes) = connection.untaken()?;
                (age >= bound).then_some((age, bytes, connection))
            })
            .collect();
        stalled.sort_unstable_by_key(|(age, ..)| std::cmp::Reverse(*age));
        let mut freed = 0;
        for (age, bytes, connection) in stalled {
            if age < limits::STALLED_READER_MAX && freed >= self.shares.answers / 4 {
                break;
            }
            freed += bytes;
            self.events.stalled_readers_ended.add();
            tracing::info!(peer = %connection.peer(), ?age, bytes, "reader does not take its data");
            connection.end();
        }
    }

    /// Ends every connection, with the calls on it.
    pub fn end_all(&self) {
        for connection in self.open_connections() {
            connection.end();
        }
    }

    fn open_connections(&self) -> Vec<Arc<Connection>> {
        let mut connections = self.connections();
        connections.retain(|it| it.strong_count() > 0);
        connections.iter().filter_map(Weak::upgrade).collect()
    }

    fn windows(&self) -> MutexGuard<'_, u64> {
        self.windows.lock().expect("no panic while it is held")
    }

    fn connections(&self) -> MutexGuard<'_, Vec<Weak<Connection>>> {
        self.connections.lock().expect("no panic while it is held")
    }
}

/// Counts a reader as waiting for as long as it lives.
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

pub(crate) fn throttled(what: &'static str) -> Error {
    let retry_after_ms = limits::THROTTLED_RETRY_AFTER.as_millis() as u64;
    Error::Throttled { what, retry_after_ms }
}

fn permits(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MEMORY_LIMIT_MIN;

    fn small() -> Arc<Load> {
        Load::new(Shares { connections: 2, calls: 1, partitions_read: 3, ..least() })
    }

    fn least() -> Shares {
        Shares::of(MEMORY_LIMIT_MIN)
    }

    fn count(load: &Load, name: &str) -> u64 {
        load.events().counts().find(|(it, _)| *it == name).unwrap().1
    }

    #[test]
    fn what_is_full_refuses_counts_and_comes_free_again() {
        let load = small();
        let (first, second) = (load.connect().unwrap(), load.connect().unwrap());
        assert!(load.connect().is_none());
        assert_eq!((count(&load, "connections_refused"), load.connection_count()), (1, 2));
        drop(first);
        assert!(load.connect().is_some());
        drop(second);
        let call = load.call().unwrap();
        assert!(matches!(load.call(), Err(Error::Throttled { .. })));
        drop(call);
        load.call().unwrap();
        let three = load.partitions(3).unwrap();
        assert!(load.partitions(1).is_err());
        drop(three);
        assert_eq!(load.partitions(9).unwrap().bytes(), 3, "alone, it goes on");
        assert_eq!((count(&load, "calls_refused"), count(&load, "partitions_refused")), (1, 1));
    }

    #[test]
    fn windows_are_shared_out_and_come_back() {
        let load = Load::new(Shares::default());
        let open: Vec<_> = (0..500).map(|_| load.connect().unwrap()).collect();
        let windows: Vec<u64> = open.iter().map(|it| it.window_bytes()).collect();
        assert!(windows.is_sorted_by(|a, b| a >= b));
        assert!(windows[0] > 1 << 20, "{}", windows[0]);
        assert!(windows[499] < 2 * limits::WINDOW_BYTES_MIN);
        // A hundred records of 1 KiB and what is around them.
        assert!(windows[17] / limits::FRAME_PART >= 104_000, "{}", windows[17]);
        let beyond: u64 = windows.iter().map(|it| it - limits::WINDOW_BYTES_MIN).sum();
        assert!(beyond <= load.shares().windows);
        drop(open);
        assert_eq!(load.connect().unwrap().window_bytes(), windows[0]);
    }

    #[test]
    fn files_bound_the_connections_too() {
        let load = small();
        load.limit_connections(1);
        let _only = load.connect().unwrap();
        assert!(load.connect().is_none());
        assert_eq!((load.connections_max(), load.connection_count()), (1, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_waits_for_room_and_then_is_throttled() {
        let load = Load::new(least());
        let mut all = load.answer(usize::MAX).await.unwrap();
        assert_eq!(load.answer_bytes(), least().answers);
        assert!(matches!(load.answer(1).await, Err(Error::Throttled { .. })));
        assert_eq!(count(&load, "answers_refused"), 1);
        all.shrink_to(10);
        load.answer(1000).await.unwrap();
        assert_eq!(load.answer_bytes(), 10);
    }

    #[test]
    fn answers_get_shorter_as_the_room_shrinks() {
        let load = Load::new(least());
        assert_eq!(load.answer_bytes_max(1 << 20), 1 << 20);
        let _most = load.answer_now(least().answers * 3 / 5).unwrap();
        let shorter = load.answer_bytes_max(1 << 20);
        assert!(shorter < 1 << 20 && shorter > limits::ANSWER_BYTES_MIN, "{shorter}");
        let _rest = load.answer_now(least().answers / 5).unwrap();
        assert_eq!(load.answer_bytes_max(1 << 20), limits::ANSWER_BYTES_MIN);
        assert_eq!(load.answer_bytes_max(100), 100);
    }

    #[tokio::test(start_paused = true)]
    async fn the_reader_that_stalls_for_long_is_ended_and_no_other() {
        let load = Load::new(least());
        let (stalled, reading) = (load.connect().unwrap(), load.connect().unwrap());
        let out = |connection: &Arc<Connection>| Call::new(&load, connection);
        let _kept = out(&stalled).send(vec![1; 100_000].into());
        tokio::time::advance(limits::STALLED_READER_MAX / 2).await;
        let taken = out(&reading).send(vec![1; 100_000].into());
        load.end_stalled();
        assert!(!stalled.is_ended());
        tokio::time::advance(limits::STALLED_READER_MAX / 2).await;
        load.end_stalled();
        assert!(stalled.is_ended() && !reading.is_ended());
        assert_eq!(count(&load, "stalled_readers_ended"), 1);
        drop(taken);
        assert!(reading.untaken().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn while_others_wait_a_stalled_reader_is_ended_early() {
        let load = Load::new(least());
        let stalled = load.connect().unwrap();
        let call = Call::new(&load, &stalled);
        let _others = load.answer_now(least().answers - 100_000).unwrap();
        call.hold(load.answer_now(100_000).unwrap());
        let kept = call.send(vec![1; 100_000].into());
        let waits = tokio::spawn({
            let load = load.clone();
            async move { load.answer(1).await }
        });
        tokio::time::sleep(limits::STALLED_READER_PRESSED_MAX).await;
        load.end_stalled();
        assert!(stalled.is_ended());
        // Its connection is gone with everything that was on its way.
        drop(kept);
        waits.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn parts_of_an_answer_hold_their_parts_of_its_room() {
        let load = Load::new(least());
        let connection = load.connect().unwrap();
        let call = Call::new(&load, &connection);
        let free = || load.answers.available_permits();
        let all = free();
        // What is around the payloads was not counted with them.
        call.hold(load.answer_now(120_000).unwrap());
        let head = call.send_part(vec![1; 100].into());
        assert!(connection.untaken().is_none(), "what is small counts with what follows it");
        let first = call.send_part(vec![2; 70_000].into());
        let between = call.send_part(vec![3; 50].into());
        let last = call.send_part(vec![4; 50_000].into());
        assert_eq!(free(), all - 70_000 - (50_000 - 150));
        for (part, bytes) in [(&head, 100), (&first, 70_000), (&between, 50), (&last, 50_000)] {
            assert_eq!(part.len(), bytes);
        }
        drop(first);
        assert_eq!(free(), all - (50_000 - 150));
        assert!(connection.untaken().is_some());
        drop(last);
        assert_eq!(free(), all);
        assert!(connection.untaken().is_none());
        // Small as it is, it is all that there is.
        call.hold(load.answer_now(10).unwrap());
        let small = call.send_part(vec![5; 30].into());
        assert!(connection.untaken().is_some() && free() == all - 10);
        drop(small);
        // What nobody took room for is counted when it is long.
        drop(call.send_part(vec![6; 30].into()));
        let long = call.send_part(vec![7; limits::ANSWER_COUNTED_BYTES].into());
        assert_eq!(free(), all - limits::ANSWER_COUNTED_BYTES);
        drop(long);
        assert_eq!(free(), all);
    }
}
