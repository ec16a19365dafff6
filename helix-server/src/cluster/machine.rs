//! State machine of shard 0: applies its log to the cluster's state and serves reads of it.
//! Entries of shard 0 have no records, so its log is never read by stream.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use helix_wal::Wal;
use tokio::sync::watch;

use super::state::{ClusterLimits, ClusterState};
use super::topic_snapshot::TopicSnapshot;
use crate::log::{AccessState, Head, Verdict};
use crate::raft::{Machine, to_io};
use crate::sync;

/// State machine of shard 0. Readers never see the state go back, even after a reopen.
#[derive(Debug)]
pub struct ClusterMachine {
    inner: Mutex<Inner>,
    version: watch::Sender<u64>,
    /// Tokens and rules of the state that readers see.
    access: watch::Sender<Arc<AccessState>>,
    /// Protocol version of the state that readers see.
    protocol: AtomicU32,
    /// Snapshot of the topics, of the version of the state that was last requested.
    topics: Mutex<Arc<TopicSnapshot>>,
}

#[derive(Debug)]
struct Inner {
    /// The log that is applied.
    wal: Wal,
    /// The state that readers see.
    state: ClusterState,
    /// State of a log that was reopened or replaced and is being replayed, while it is older than
    /// `state`.
    replaying: Option<ClusterState>,
}

impl Inner {
    fn applied(&mut self) -> &mut ClusterState {
        self.replaying.as_mut().unwrap_or(&mut self.state)
    }

    /// Publishes the replayed state once it is as new as the state that readers see.
    fn publish_if_caught_up(&mut self) {
        let has_caught_up = |replaying: &ClusterState| replaying.version() >= self.state.version();
        if self.replaying.as_ref().is_some_and(has_caught_up)
            && let Some(state) = self.replaying.take()
        {
            self.state = state;
        }
    }
}

impl ClusterMachine {
    pub fn new(wal: Wal) -> Self {
        let state = ClusterState::new(ClusterLimits::default());
        let protocol = AtomicU32::new(state.protocol());
        let inner = Mutex::new(Inner { wal, state, replaying: None });
        Self {
            inner,
            version: watch::Sender::new(0),
            access: watch::Sender::default(),
            protocol,
            topics: Mutex::default(),
        }
    }

    /// Applies `wal` from its beginning, in place of the previous log.
    pub fn replay_from(&self, wal: Wal) {
        let mut inner = self.lock();
        inner.wal = wal;
        inner.replaying = Some(ClusterState::new(ClusterLimits::default()));
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        sync::lock(&self.inner)
    }

    pub fn read<T>(&self, read: impl FnOnce(&ClusterState) -> T) -> T {
        read(&self.lock().state)
    }

    /// Returns the topics of the state that readers see. The snapshot is built once per version.
    pub fn topic_snapshot(&self) -> Arc<TopicSnapshot> {
        let mut known = sync::lock(&self.topics);
        let newer = self
            .read(|state| (state.version() != known.version()).then(|| TopicSnapshot::of(state)));
        if let Some(newer) = newer {
            *known = Arc::new(newer);
        }
        known.clone()
    }

    /// Subscribes to the version of the cluster's state.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Returns the protocol version. Cheaper than [`Self::read`], as every append needs it.
    pub fn protocol(&self) -> u32 {
        self.protocol.load(Ordering::Acquire)
    }

    /// Returns the tokens and rules. Cheaper than [`Self::read`], as every call needs them.
    pub fn access(&self) -> Arc<AccessState> {
        self.access.borrow().clone()
    }

    /// Returns whether these are the newest tokens and rules.
    pub fn is_current(&self, access: &Arc<AccessState>) -> bool {
        Arc::ptr_eq(&self.access.borrow(), access)
    }

    /// Subscribes to the tokens and rules.
    pub fn watch_access(&self) -> watch::Receiver<Arc<AccessState>> {
        self.access.subscribe()
    }

    /// Publishes the state that readers see. The version is last, so that a reader of a version
    /// sees the access control and the protocol version that belong to it.
    fn publish(&self) {
        // Under the lock, so that an older state never follows a newer one.
        let inner = self.lock();
        let (version, access) = (inner.state.version(), inner.state.access());
        self.access.send_if_modified(|known| {
            let is_new = !Arc::ptr_eq(known, access);
            if is_new {
                known.clone_from(access);
            }
            is_new
        });
        self.protocol.store(inner.state.protocol(), Ordering::Release);
        self.version.send_if_modified(|known| std::mem::replace(known, version) != version);
    }
}

impl Machine for ClusterMachine {
    fn apply(&self, id: helix_wal::LogId, head: Option<&Head>) -> io::Result<Verdict> {
        let (verdict, wal) = {
            let mut inner = self.lock();
            let applied = inner.applied();
            let verdict = head.map_or(Verdict::Nothing, |head| applied.apply(id.index, head));
            inner.publish_if_caught_up();
            (verdict, inner.wal.clone())
        };
        wal.place(id.index, None).map_err(to_io)?;
        self.publish();
        Ok(verdict)
    }

    fn encode(&self) -> Bytes {
        self.lock().applied().encode()
    }

    fn restore(&self, bytes: &[u8]) -> io::Result<()> {
        let state = ClusterState::decode(bytes)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
        {
            let mut inner = self.lock();
            *inner.applied() = state;
            inner.publish_if_caught_up();
        }
        self.publish();
        Ok(())
    }

    fn check(&self, bytes: &[u8]) -> io::Result<()> {
        ClusterState::decode(bytes)
            .map(drop)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
    }
}
