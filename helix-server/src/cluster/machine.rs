//! The cluster's state behind its lock, as shard 0 applies it and as everybody reads it.
//! Its entries have no records: nothing of this log is ever read by stream.

use std::io;
use std::sync::{Mutex, MutexGuard};

use bytes::Bytes;
use helix_wal::Wal;
use tokio::sync::watch;

use super::state::{ClusterLimits, ClusterState};
use crate::log::{Head, Verdict};
use crate::raft::{Machine, to_io};

#[derive(Debug)]
pub struct ClusterMachine {
    inner: Mutex<Inner>,
    version: watch::Sender<u64>,
}

#[derive(Debug)]
struct Inner {
    /// The log that is applied.
    wal: Wal,
    /// What everybody reads.
    state: ClusterState,
    /// What the log has come to, while that is less than what everybody reads: the log was opened
    /// again, or is another one.
    behind: Option<ClusterState>,
}

impl Inner {
    fn applied(&mut self) -> &mut ClusterState {
        self.behind.as_mut().unwrap_or(&mut self.state)
    }

    /// Nobody sees the state go back.
    fn catch_up(&mut self) {
        let is_there = |behind: &ClusterState| behind.version() >= self.state.version();
        if self.behind.as_ref().is_some_and(is_there)
            && let Some(state) = self.behind.take()
        {
            self.state = state;
        }
    }
}

impl ClusterMachine {
    pub fn new(wal: Wal) -> Self {
        let state = ClusterState::new(ClusterLimits::default());
        let inner = Mutex::new(Inner { wal, state, behind: None });
        Self { inner, version: watch::Sender::new(0) }
    }

    /// From now on this log is applied, from its beginning.
    pub fn begin_anew(&self, wal: Wal) {
        let mut inner = self.lock();
        inner.wal = wal;
        inner.behind = Some(ClusterState::new(ClusterLimits::default()));
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic while it is held")
    }

    pub fn read<T>(&self, read: impl FnOnce(&ClusterState) -> T) -> T {
        read(&self.lock().state)
    }

    /// Follows the version of the metadata.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    fn publish(&self, version: u64) {
        self.version.send_if_modified(|known| std::mem::replace(known, version) != version);
    }
}

impl Machine for ClusterMachine {
    fn apply(&self, id: helix_wal::LogId, head: Option<&Head>) -> io::Result<Verdict> {
        let (verdict, version, wal) = {
            let mut inner = self.lock();
            let applied = inner.applied();
            let verdict = head.map_or(Verdict::Nothing, |head| applied.apply(id.index, head));
            inner.catch_up();
            (verdict, inner.state.version(), inner.wal.clone())
        };
        wal.place(id.index, None).map_err(to_io)?;
        self.publish(version);
        Ok(verdict)
    }

    fn encode(&self) -> Bytes {
        self.lock().applied().encode()
    }

    fn restore(&self, bytes: &[u8]) -> io::Result<()> {
        let state = ClusterState::decode(bytes)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
        let version = {
            let mut inner = self.lock();
            *inner.applied() = state;
            inner.catch_up();
            inner.state.version()
        };
        self.publish(version);
        Ok(())
    }

    fn check(&self, bytes: &[u8]) -> io::Result<()> {
        ClusterState::decode(bytes)
            .map(drop)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
    }
}
