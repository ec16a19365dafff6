//! Status of a shard's replica and its log.

use std::time::Duration;

use super::Shard;
use crate::error::Error;
use crate::peer::FetchProgress;
use crate::raft::Replica;
use crate::sync;

/// Progress of a shard's replica and of its log.
#[derive(Debug, Clone)]
pub struct ShardStatus {
    pub shard_id: u64,
    pub leader: bool,
    pub term: u64,
    pub last_index: u64,
    pub committed: u64,
    pub applied: u64,
    pub synced: u64,
    pub purged: u64,
    pub partition_count: u32,
    /// Progress of fetching missing records; `None` where none are missing.
    pub fetching: Option<FetchProgress>,
    pub wal: helix_wal::WalStats,
}

impl Shard {
    /// Returns how long this replica has led in its current term; `None` if it does not lead.
    pub fn led_for(&self) -> Option<Duration> {
        let leadership = self.replica.leadership();
        let (term, since) = (*sync::lock(&self.led_since))?;
        let is_current = leadership.leader == Some(self.replica_id) && leadership.term == term;
        is_current.then(|| since.elapsed())
    }

    /// Returns the term of this replica.
    pub fn term(&self) -> u64 {
        self.replica.leadership().term
    }

    /// Returns the progress of fetching missing records; `None` where none are missing.
    pub fn fetching(&self) -> Option<FetchProgress> {
        self.hub.fetching(self.shard_id)
    }

    /// Returns descriptions of the damaged ranges of this replica's log, which are not served.
    pub fn damage(&self) -> Vec<String> {
        self.replica.damage()
    }

    /// Returns why the log accepts no appends now.
    pub fn write_error(&self) -> Option<Error> {
        write_error(&self.replica)
    }

    pub fn status(&self) -> ShardStatus {
        let status = self.replica.status();
        let partitions = self.machine.read_state(|state| state.partitions().len());
        ShardStatus {
            synced: status.synced,
            purged: status.purged,
            partition_count: u32::try_from(partitions).unwrap_or(u32::MAX),
            shard_id: self.shard_id,
            leader: status.is_leader,
            term: status.term,
            last_index: status.last_index,
            committed: status.committed,
            applied: status.applied,
            fetching: self.fetching(),
            wal: status.wal,
        }
    }
}

/// Returns why a replica's log accepts no appends now.
pub fn write_error(replica: &Replica) -> Option<Error> {
    match replica.writable() {
        Ok(()) => None,
        Err(error @ helix_wal::Error::DiskFull { .. }) => {
            Some(Error::DiskFull { what: error.to_string() })
        }
        Err(error @ helix_wal::Error::Exhausted { .. }) => {
            Some(Error::Exhausted { what: error.to_string() })
        }
        Err(error) => {
            Some(Error::StorageFailed { what: error.to_string(), may_have_applied: false })
        }
    }
}
