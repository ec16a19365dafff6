//! A replica whose peers' messages this node answers, and a log without a running replica.

use std::sync::Arc;

use helix_wal::Wal;
use openraft::Raft;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::snapshot::fetcher::RecordFetcher;
use crate::raft::{DiskReads, Machine, RepairGuard, ReplicaId, StateMachine, TypeConfig};

/// The Raft group of a shard, as this node runs it.
pub(super) type ShardRaft = Raft<TypeConfig, StateMachine>;

/// A local replica and the parts of it that incoming messages need.
#[derive(Clone)]
pub(super) struct ServedReplica {
    pub(super) replica_id: ReplicaId,
    pub(super) raft: ShardRaft,
    /// Checks that a snapshot can be read: openraft stops if it cannot install one.
    pub(super) machine: Arc<dyn Machine>,
    /// Fetches missing records; `None` for a shard without records.
    pub(super) fetcher: Option<Arc<RecordFetcher>>,
    /// Decides which messages reach openraft while the log is under repair.
    pub(super) repair_guard: Arc<RepairGuard>,
    /// Asked for disk space before an append: openraft stops if it cannot write an entry.
    pub(super) wal: Wal,
    /// Reads of the log for other replicas, which record damage.
    pub(super) reads: DiskReads,
    /// Notified when a candidate with a shorter log asks for this replica's vote.
    pub(super) outranked: Arc<Notify>,
    /// Ends all incoming work for the replica.
    pub(super) stopped: CancellationToken,
}

/// An open log whose replica does not run. It still sends its entries to repairs of other replicas.
#[derive(Debug, Clone)]
pub struct HeldLog {
    pub replica_id: ReplicaId,
    pub wal: Wal,
    /// Reads of the log, which record damage.
    pub reads: DiskReads,
    /// It replaces a quarantined log and is not filled yet.
    pub in_repair: bool,
    /// The vote of the quarantined log is lost, so that of this one is not the replica's last.
    pub vote_lost: bool,
}
