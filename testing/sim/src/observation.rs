//! State of a replica at the last check, which the next check compares with.

use std::collections::{BTreeMap, BTreeSet};

use helix_wal::{LogId, QuarantinedLog, Wal};

/// Stored vote: term, candidate, and whether the candidate is known to be elected.
pub(crate) type StoredVote = (u64, u64, bool);

/// Observed state of one replica.
#[derive(Debug, Default)]
pub(crate) struct ReplicaObservation {
    /// Running at the last tick.
    pub(crate) is_up: bool,
    /// Log at the last tick. If it was closed since, only this handle still knows what was synced
    /// between the last check and the close.
    pub(crate) wal: Option<Wal>,
    /// Last entry that is known to be on stable storage.
    pub(crate) stable: Option<LogId>,
    /// Last entry on disks that were wiped since, or in a quarantined log.
    ///
    /// The cluster tolerates the loss of one member. The lost entries count towards a majority
    /// until the member is replaced or has all of them again.
    pub(crate) lost: Option<LogId>,
    /// The log replaces a damaged one and may lack entries of it.
    pub(crate) in_repair: bool,
    /// Wipes of the node's disks so far.
    pub(crate) wipes: u64,
    pub(crate) vote: Option<StoredVote>,
    pub(crate) purged: Option<LogId>,
    /// Last committed index that was compared since the node started.
    pub(crate) compared: u64,
    pub(crate) committed: u64,
    pub(crate) leader_term: Option<u64>,
    /// Log start and high watermark by partition, since the node started.
    pub(crate) partitions: BTreeMap<u64, (u64, u64)>,
    /// Restarts of the shard while its node kept running.
    pub(crate) restarts: u64,
    pub(crate) replica_id: u64,
    /// Sets of voters that it knew last. Kept up to date while a member is damaged, and in clusters
    /// with replicas on some of the members.
    pub(crate) configs: Vec<BTreeSet<u64>>,
    /// Sets of voters before their last change.
    pub(crate) configs_before: Vec<BTreeSet<u64>>,
}

impl ReplicaObservation {
    /// Begins to observe a replica of a node whose disks were wiped so often before.
    pub(crate) fn after(wipes: u64) -> Self {
        Self { wipes, ..Self::default() }
    }

    /// Updates `stable` from the log of the last check, which may have been replaced since.
    pub(crate) fn catch_up(&mut self) {
        let Some(wal) = &self.wal else { return };
        let state = wal.state();
        self.stable = state.synced.min(state.last);
    }

    /// Returns whether the replica has voted or has entries, so that its shard may depend on it.
    pub(crate) fn takes_part(&self) -> bool {
        self.replica_id != 0 && (self.stable.is_some() || self.vote.is_some())
    }

    /// Registers the voters that the replica knows.
    pub(crate) fn note_configs(&mut self, configs: Vec<BTreeSet<u64>>) {
        if self.configs != configs {
            self.configs_before = std::mem::replace(&mut self.configs, configs);
        }
    }

    /// Marks the replica as stopped.
    pub(crate) fn end(&mut self) {
        self.catch_up();
        (self.is_up, self.wal) = (false, None);
    }

    /// Resets the state for a new log that replaces a quarantined one.
    pub(crate) fn replace_log(&mut self, quarantined: &QuarantinedLog) {
        *self = Self {
            in_repair: true,
            lost: self.stable.max(self.lost),
            // The vote is kept if the quarantined log had it.
            vote: self.vote.filter(|_| quarantined.vote.is_some()),
            wipes: self.wipes,
            restarts: self.restarts,
            replica_id: self.replica_id,
            ..Self::default()
        };
    }
}
