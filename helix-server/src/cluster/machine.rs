//! The cluster's state behind its lock, as shard 0 applies it and as everybody reads it.
//! Its entries have no records: nothing of this log is ever read by stream.

use std::io;
use std::sync::{Mutex, MutexGuard};

use bytes::Bytes;
use helix_wal::Wal;
use tokio::sync::watch;

use super::state::{ClusterLimits, ClusterState};
use crate::log::{Head, Verdict};
use crate::raft::Machine;

#[derive(Debug)]
pub struct ClusterMachine {
    wal: Wal,
    state: Mutex<ClusterState>,
    version: watch::Sender<u64>,
}

impl ClusterMachine {
    pub fn new(wal: Wal) -> Self {
        let state = Mutex::new(ClusterState::new(ClusterLimits::default()));
        Self { wal, state, version: watch::Sender::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, ClusterState> {
        self.state.lock().expect("no panic while it is held")
    }

    pub fn read<T>(&self, read: impl FnOnce(&ClusterState) -> T) -> T {
        read(&self.lock())
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
        let (verdict, version) = {
            let mut state = self.lock();
            let verdict = head.map_or(Verdict::Nothing, |head| state.apply(id.index, head));
            (verdict, state.version())
        };
        self.wal.place(id.index, None).map_err(io::Error::other)?;
        self.publish(version);
        Ok(verdict)
    }

    fn encode(&self) -> Bytes {
        self.lock().encode()
    }

    fn restore(&self, bytes: &[u8]) -> io::Result<()> {
        let state = ClusterState::decode(bytes)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
        let version = state.version();
        *self.lock() = state;
        self.publish(version);
        Ok(())
    }

    fn check(&self, bytes: &[u8]) -> io::Result<()> {
        ClusterState::decode(bytes)
            .map(drop)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
    }
}
