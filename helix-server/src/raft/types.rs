//! openraft's type parameters, bound once, so that generics stop here.
//! An entry is a command: a decoded head, and for batches a payload that is never looked into.

use std::fmt::{self, Display};
use std::sync::Arc;

use bytes::Bytes;
use openraft::RaftTypeConfig;
use openraft::alias::{DefaultEntryOf, LogIdOf};
use openraft::impls::leader_id_std;
use openraft::raft::responder::Responder;
use tokio::sync::oneshot;

use super::runtime::Runtime;
use crate::flow::Share;
use crate::log::{Head, Verdict};

/// One replica of one shard, never reused: `node << 32 | generation`.
pub type ReplicaId = u64;

/// The id of a node's replica of a shard.
pub fn replica_id(node_id: u64, generation: u32) -> ReplicaId {
    node_id << 32 | u64::from(generation)
}

/// The node of a replica.
pub fn node_of(replica_id: ReplicaId) -> u64 {
    replica_id >> 32
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct TypeConfig;

impl RaftTypeConfig for TypeConfig {
    type D = Command;
    type R = Verdict;
    type NodeId = ReplicaId;
    /// Addresses live in the cluster's state, not in the membership.
    type Node = ();
    type Term = u64;
    type LeaderId = leader_id_std::LeaderId<u64, ReplicaId>;
    type Vote = openraft::impls::Vote<Self::LeaderId>;
    type Payload = openraft::EntryPayload<Command, ReplicaId, ()>;
    type Entry = DefaultEntryOf<Self>;
    type AsyncRuntime = Runtime;
    type Responder<T>
        = Reply<T>
    where
        T: Send + 'static;
    type Batch<T>
        = openraft::impls::InlineBatch<T>
    where
        T: Send + 'static;
    type ErrorSource = openraft::AnyError;
}

pub(crate) type LogId = LogIdOf<TypeConfig>;
pub(crate) type Vote = openraft::alias::VoteOf<TypeConfig>;
pub(crate) type Entry = openraft::alias::EntryOf<TypeConfig>;
pub(crate) type StoredMembership = openraft::alias::StoredMembershipOf<TypeConfig>;

/// What the log carries.
#[derive(Debug, Clone)]
pub struct Command {
    pub head: Head,
    /// Empty in entries that are read for apply.
    pub payload: helix_wal::Payload,
    /// Only on the proposing node, between the proposal and the local log.
    pub held: Option<Arc<Held>>,
}

impl Command {
    /// A command that is all head.
    pub fn control(head: Head) -> Self {
        Self { head, payload: helix_wal::Payload::default(), held: None }
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

/// What a proposal holds on to: its share of the bytes in flight, until it is both committed (the
/// reply drops it) and synced here (the log's callback drops it).
#[derive(Debug)]
pub struct Held {
    share: Share,
    written: std::sync::Mutex<Option<oneshot::Sender<()>>>,
}

impl Held {
    pub fn new(share: Share, written: Option<oneshot::Sender<()>>) -> Self {
        Self { share, written: std::sync::Mutex::new(written) }
    }

    /// Says that the entry is on stable storage here.
    pub fn has_synced(&self) {
        self.share.has_synced();
    }

    /// Says that the local log has taken the entry.
    pub fn written(&self) {
        if let Some(written) = self.written.lock().expect("no panic while it is held").take() {
            // Ignored: nobody waits for it any more.
            let _ = written.send(());
        }
    }
}

/// Hands the outcome of a proposal to whoever waits, and keeps what it holds until then.
#[derive(Debug)]
pub struct Reply<T> {
    sender: oneshot::Sender<T>,
    _held: Option<Arc<Held>>,
}

impl<T> Reply<T> {
    pub fn new(held: Option<Arc<Held>>) -> (Self, oneshot::Receiver<T>) {
        let (sender, receiver) = oneshot::channel();
        (Self { sender, _held: held }, receiver)
    }
}

impl<T: Send + 'static> Responder<TypeConfig, T> for Reply<T> {
    fn on_complete(self, result: T) {
        // Ignored: the caller went away; the entry counts all the same.
        let _ = self.sender.send(result);
    }
}

/// Bytes of a snapshot: the bookkeeping of a state machine.
pub type SnapshotData = Bytes;
