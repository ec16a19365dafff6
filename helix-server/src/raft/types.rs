//! Type parameters of openraft, bound once so that generics stop here.
//! An entry carries a command: a decoded head, and for batches an opaque payload.

use std::fmt::{self, Display};
use std::sync::Arc;

use bytes::Bytes;
use openraft::RaftTypeConfig;
use openraft::alias::{DefaultEntryOf, LogIdOf};
use openraft::impls::leader_id_std;
use openraft::raft::responder::Responder;
use tokio::sync::oneshot;

use super::proposal_gate::ProposalTicket;
use super::runtime::Runtime;
use crate::flow::FlowPermit;
use crate::log::{Head, Verdict};
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
}

impl ProposalGuard {
    pub fn new(permit: FlowPermit, written: Option<oneshot::Sender<()>>) -> Self {
        Self { permit, written: std::sync::Mutex::new(written) }
    }

    /// Marks the entry as synced to the local disk.
    pub fn mark_synced(&self) {
        self.permit.mark_synced();
    }

    /// Notifies the proposer that the local log has the entry.
    pub fn notify_written(&self) {
        if let Some(written) = sync::lock(&self.written).take() {
            // Ignored: the proposer no longer waits.
            let _ = written.send(());
        }
    }
}

/// Sends the result of a proposal to its proposer, and holds its guard and ticket until then.
#[derive(Debug)]
pub struct ProposalResponder<T> {
    sender: oneshot::Sender<T>,
    _guard: Option<Arc<ProposalGuard>>,
    _ticket: Option<ProposalTicket>,
}

impl<T> ProposalResponder<T> {
    pub fn new(guard: Option<Arc<ProposalGuard>>) -> (Self, oneshot::Receiver<T>) {
        let (sender, receiver) = oneshot::channel();
        (Self { sender, _guard: guard, _ticket: None }, receiver)
    }

    pub(super) fn with_ticket(self, ticket: ProposalTicket) -> Self {
        Self { _ticket: Some(ticket), ..self }
    }
}

impl<T: Send + 'static> Responder<TypeConfig, T> for ProposalResponder<T> {
    fn on_complete(self, result: T) {
        // Ignored: the proposer no longer waits. The entry counts regardless.
        let _ = self.sender.send(result);
    }
}

/// Bytes of a snapshot, which is the state of a [`Machine`](super::Machine) without records.
pub type SnapshotData = Bytes;
