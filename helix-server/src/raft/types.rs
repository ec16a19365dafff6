//! Type parameters of openraft, bound once so that generics stop here.
//! An entry carries a command: a decoded head, and for batches an opaque payload.

use std::fmt::{self, Display};
use std::sync::Arc;

use bytes::Bytes;
use helix_wal::{GroupStamp, GroupTimes};
use openraft::RaftTypeConfig;
use openraft::alias::{DefaultEntryOf, LogIdOf};
use openraft::impls::leader_id_std;
use openraft::raft::responder::Responder;
use tokio::sync::oneshot;

use super::proposal_gate::ProposalTicket;
use super::runtime::Runtime;
use crate::flow::FlowPermit;
use crate::log::{Head, Verdict};
use crate::stages::BatchStamps;
use crate::sync;

/// Id of one replica of a shard, never reused: `node << 32 | generation`.
pub type ReplicaId = u64;

/// Returns the id of a node's replica.
pub fn replica_id(node_id: u64, generation: u32) -> ReplicaId {
    node_id << 32 | u64::from(generation)
}

/// Returns the node of a replica.
pub fn node_of(replica_id: ReplicaId) -> u64 {
    replica_id >> 32
}

/// Returns the node of a replica, and the generation of its data.
pub fn node_and_generation(replica_id: ReplicaId) -> (u64, u32) {
    let generation = u32::try_from(replica_id & u64::from(u32::MAX)).unwrap_or(0);
    (node_of(replica_id), generation)
}

/// The types that Helix runs openraft with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct TypeConfig;

impl RaftTypeConfig for TypeConfig {
    type D = Command;
    type R = Verdict;
    type NodeId = ReplicaId;
    /// Nothing: addresses are in the cluster's state, not in the membership.
    type Node = ();
    type Term = u64;
    type LeaderId = leader_id_std::LeaderId<u64, ReplicaId>;
    type Vote = openraft::impls::Vote<Self::LeaderId>;
    type Payload = openraft::EntryPayload<Command, ReplicaId, ()>;
    type Entry = DefaultEntryOf<Self>;
    type AsyncRuntime = Runtime;
    type Responder<T>
        = ProposalResponder<T>
    where
        T: Send + 'static;
    type Batch<T>
        = openraft::impls::InlineBatch<T>
    where
        T: Send + 'static;
    type ErrorSource = openraft::AnyError;
}

pub(crate) type RaftLogId = LogIdOf<TypeConfig>;
pub(crate) type Vote = openraft::alias::VoteOf<TypeConfig>;
pub(crate) type RaftEntry = openraft::alias::EntryOf<TypeConfig>;
pub(crate) type StoredMembership = openraft::alias::StoredMembershipOf<TypeConfig>;

/// The content of a normal log entry.
#[derive(Debug, Clone)]
pub struct Command {
    pub head: Head,
    /// Empty in entries that are read only to be applied.
    pub payload: helix_wal::Payload,
    /// Set only on the proposing node, until the local log has the entry.
    pub guard: Option<Arc<ProposalGuard>>,
}

impl Command {
    /// Returns a command without a payload.
    pub fn control(head: Head) -> Self {
        Self { head, payload: helix_wal::Payload::default(), guard: None }
    }
}

impl PartialEq for Command {
    fn eq(&self, other: &Self) -> bool {
        self.head == other.head
            && self.payload.bytes == other.payload.bytes
            && self.payload.crc == other.payload.crc
    }
}

impl Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} + {} bytes", self.head, self.payload.bytes.len())
    }
}

/// Holds the in-flight bytes of a proposal until it is both committed and synced here.
/// The responder drops it on commit, and the log's callback drops it on sync.
#[derive(Debug)]
pub struct ProposalGuard {
    permit: FlowPermit,
    written: std::sync::Mutex<Option<oneshot::Sender<()>>>,
    group: GroupStamp,
    /// Set if the caller or a trace asks for the batch's stages.
    stamps: Option<Arc<BatchStamps>>,
}

impl ProposalGuard {
    pub fn new(
        permit: FlowPermit,
        written: Option<oneshot::Sender<()>>,
        stamps: Option<Arc<BatchStamps>>,
    ) -> Self {
        let (written, group) = (std::sync::Mutex::new(written), GroupStamp::default());
        Self { permit, written, group, stamps }
    }

    pub(super) fn stamps(&self) -> Option<&Arc<BatchStamps>> {
        self.stamps.as_ref()
    }

    /// Marks the entry as synced to the local disk with this group; `None` without a disk.
    pub fn mark_synced(&self, group: Option<GroupTimes>) {
        self.permit.mark_synced();
        if let Some(group) = group {
            self.group.set(group);
            if let Some(stamps) = &self.stamps {
                stamps.stamp_synced(group);
            }
        }
    }

    /// Notifies the proposer that the local log has the entry.
    pub fn notify_written(&self) {
        if let Some(written) = sync::lock(&self.written).take() {
            // Ignored: the proposer no longer waits.
            let _ = written.send(());
        }
    }
}

/// Result of a proposal, with the times of the local disk; `None` if it is not synced here yet.
pub type TimedResult<T> = (T, Option<GroupTimes>);

/// Sends the result of a proposal to its proposer, and holds its guard and ticket until then.
#[derive(Debug)]
pub struct ProposalResponder<T> {
    sender: oneshot::Sender<TimedResult<T>>,
    guard: Option<Arc<ProposalGuard>>,
    _ticket: Option<ProposalTicket>,
}

impl<T> ProposalResponder<T> {
    /// Returns the responder, and the receiver of the result and of the times of the local disk.
    pub fn new(guard: Option<Arc<ProposalGuard>>) -> (Self, oneshot::Receiver<TimedResult<T>>) {
        let (sender, receiver) = oneshot::channel();
        (Self { sender, guard, _ticket: None }, receiver)
    }

    pub(super) fn with_ticket(self, ticket: ProposalTicket) -> Self {
        Self { _ticket: Some(ticket), ..self }
    }
}

impl<T: Send + 'static> Responder<TypeConfig, T> for ProposalResponder<T> {
    fn on_complete(self, result: T) {
        let guard = self.guard.as_ref();
        if let Some(stamps) = guard.and_then(|guard| guard.stamps()) {
            stamps.stamp_applied();
        }
        let group = guard.and_then(|guard| guard.group.get());
        // Ignored: the proposer no longer waits. The entry counts regardless.
        let _ = self.sender.send((result, group));
    }
}

/// Bytes of a snapshot, which is the state of a [`Machine`](super::Machine) without records.
pub type SnapshotData = Bytes;
