//! One shard as this node has it: a replicated log that is home to many partitions.
//! Append, read, wait, trim, status; `append.rs` and `read.rs` hold the two ways of a record.

mod append;
mod machine;
mod proposed;
mod pulse;
mod read;
mod upkeep;
mod watch;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use std::{fmt, io};

use bytes::Bytes;
use helix_wal::{Aside, Wal};
use tokio::sync::watch as channel;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::error::{Error, LeaderHint, Result};
use crate::flow::Flow;
use crate::limits;
use crate::log::{
    FencingToken, Head, PartitionId, Refusal, ShardCommand, ShardState, Verdict, Watermarks,
};
use crate::metrics::Metrics;
pub use crate::peer::Fetching;
use crate::peer::Hub;
use crate::raft::{
    Command, DiskReads, LeadershipWatch, Replica, ReplicaId, ReplicaSettings, node_of,
};

pub use append::{Ack, Durability, NewBatch, Pending, Permit};
use machine::ShardMachine;
use proposed::Proposed;
pub use read::{Read, ReadBatch, ReadFrom};
pub use watch::{WatchGuard, Watcher};

/// Where clients reach a node, for leader hints.
pub type Directory = Arc<dyn Fn(u64) -> Option<String> + Send + Sync>;

/// What a shard is opened with.
pub struct ShardSettings {
    pub shard_id: u64,
    pub replica_id: ReplicaId,
    /// Replicas that a new shard is formed of.
    pub members: BTreeSet<ReplicaId>,
    pub directory: Directory,
    pub hub: Arc<Hub>,
    pub wal: Wal,
    /// As recovered by the WAL.
    pub checkpoint: Option<(helix_wal::LogId, Bytes)>,
    pub reads: DiskReads,
    /// The log that this one takes the place of, where it may still lack something of it.
    pub repair_of: Option<Aside>,
    /// Whether acknowledged batches are on stable storage.
    pub durable: bool,
    /// Bytes of batches in flight, at most.
    pub bytes_in_flight: usize,
    /// How far small batches go before large ones: [`Flow::new`].
    pub pace: u32,
    pub clock: Arc<dyn Clock>,
    /// Cancelled when the node shuts down.
    pub draining: CancellationToken,
    pub metrics: Arc<Metrics>,
    pub log_limits: LogLimits,
}

/// How much log a shard's replicas keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogLimits {
    /// Log between two checkpoints of the bookkeeping, at least.
    pub checkpoint_bytes: u64,
    /// Log that is kept for replicas that are behind.
    pub catch_up_bytes: u64,
}

impl Default for LogLimits {
    fn default() -> Self {
        Self { checkpoint_bytes: limits::CHECKPOINT_BYTES, catch_up_bytes: limits::CATCH_UP_BYTES }
    }
}

/// A shard. Held by the node; everybody else borrows it for a call.
pub struct Shard {
    this: Weak<Shard>,
    shard_id: u64,
    replica_id: ReplicaId,
    members: BTreeSet<ReplicaId>,
    directory: Directory,
    hub: Arc<Hub>,
    replica: Replica,
    machine: Arc<ShardMachine>,
    wal: Wal,
    reads: DiskReads,
    flow: Arc<Flow>,
    proposed: Proposed,
    durable: bool,
    clock: Arc<dyn Clock>,
    draining: CancellationToken,
    /// Cancelled when nothing comes to this replica any more: it was closed, has stopped, or its
    /// node was removed. The node may outlive that.
    closed: CancellationToken,
    log_limits: LogLimits,
    metrics: Arc<Metrics>,
    /// Leads, and no majority has confirmed it for a while: somebody else may lead by now.
    cut_off: AtomicBool,
    /// Replicas that the cluster's state wants the shard to have.
    expected: Mutex<BTreeSet<ReplicaId>>,
    /// Cancelled, and renewed, when this replica stops leading or is cut off: what waits for an
    /// outcome then waits no longer.
    reign: channel::Sender<CancellationToken>,
}

/// Figures of a shard.
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
    /// How far this replica is with records that it lacks.
    pub fetching: Option<Fetching>,
    pub wal: helix_wal::Stats,
}

impl Shard {
    /// Recovers the shard and starts its replica and its upkeep.
    pub async fn open(settings: ShardSettings) -> io::Result<Arc<Self>> {
        let machine = Arc::new(ShardMachine::new(settings.wal.clone(), settings.hub.clone()));
        let replica = Replica::open(
            ReplicaSettings {
                shard_id: settings.shard_id,
                replica_id: settings.replica_id,
                wal: settings.wal.clone(),
                reads: settings.reads.clone(),
                machine: machine.clone(),
                checkpoint: settings.checkpoint,
                has_records: true,
                repair_of: settings.repair_of,
            },
            settings.hub.network(settings.shard_id, settings.replica_id, settings.wal.clone()),
        )
        .await?;
        settings.hub.serve_replica(settings.shard_id, &replica, settings.wal.clone());
        let shard = Arc::new_cyclic(|this| Self {
            this: this.clone(),
            shard_id: settings.shard_id,
            replica_id: settings.replica_id,
            members: settings.members,
            directory: settings.directory,
            hub: settings.hub,
            replica,
            machine,
            wal: settings.wal,
            reads: settings.reads,
            flow: Flow::new(settings.bytes_in_flight, settings.pace),
            proposed: Proposed::default(),
            durable: settings.durable,
            clock: settings.clock,
            closed: settings.draining.child_token(),
            draining: settings.draining,
            log_limits: settings.log_limits,
            metrics: settings.metrics,
            cut_off: AtomicBool::new(false),
            expected: Mutex::default(),
            reign: channel::Sender::new(CancellationToken::new()),
        });
        tokio::spawn(upkeep::run(shard.clone()));
        tokio::spawn(pulse::run(Arc::downgrade(&shard)));
        tokio::spawn(pulse::watch_disk(Arc::downgrade(&shard)));
        Ok(shard)
    }

    pub fn id(&self) -> u64 {
        self.shard_id
    }

    pub async fn is_formed(&self) -> io::Result<bool> {
        self.replica.is_formed().await
    }

    /// Gives a new shard its first entry; without effect where it exists.
    pub async fn form(&self) -> io::Result<()> {
        self.replica.form(self.members.clone()).await
    }

    /// Takes up a shard that exists: a single voter need not wait for an election.
    pub async fn take_up(&self) -> io::Result<()> {
        let voters = self.replica.known_voters().await;
        if voters == [self.replica_id] { self.replica.elect().await } else { Ok(()) }
    }

    /// Whether this replica is one of those that a new shard is formed of.
    pub fn may_form(&self) -> bool {
        self.members.contains(&self.replica_id) && self.replica.repair_of().is_none()
    }

    /// Whether this is the replica that should form the shard and lead it at first.
    pub fn is_first_member(&self) -> bool {
        let turn = usize::try_from(self.shard_id).unwrap_or(1).saturating_sub(1);
        let first = self.members.iter().nth(turn % self.members.len().max(1));
        first == Some(&self.replica_id)
    }

    pub fn is_durable(&self) -> bool {
        self.durable
    }

    /// Where the leader is; `None` while there is none, or none that this node reaches.
    pub fn leader_hint(&self) -> Option<LeaderHint> {
        if self.is_cut_off() {
            return None;
        }
        let leadership = self.replica.leadership();
        let node_id = node_of(leadership.leader?);
        // A replica goes by the last leader that it heard of until there is another one.
        if self.hub.peers().iter().any(|peer| peer.node_id == node_id && !peer.connected) {
            return None;
        }
        let endpoint = (self.directory)(node_id).unwrap_or_default();
        Some(LeaderHint { node_id, endpoint, term: leadership.term })
    }

    /// Nodes that have a voting replica of this shard.
    pub fn replicas(&self) -> Vec<u64> {
        self.replica.voters().into_iter().map(node_of).collect()
    }

    /// Nodes that have a replica which does not vote yet.
    pub fn learners(&self) -> Vec<u64> {
        self.replica.membership().learners.into_iter().map(node_of).collect()
    }

    pub fn replica(&self) -> &Replica {
        &self.replica
    }

    /// Says which replicas the shard is to have: log that they lack is kept for them as well.
    pub fn expect_replicas(&self, replicas: BTreeSet<ReplicaId>) {
        *self.expected.lock().expect("no panic while it is held") = replicas;
    }

    /// Every other replica that the shard has or is to have.
    fn others(&self) -> BTreeSet<ReplicaId> {
        let membership = self.replica.membership();
        let mut others: BTreeSet<ReplicaId> = membership.configs.into_iter().flatten().collect();
        others.extend(membership.learners);
        others.extend(self.expected.lock().expect("no panic while it is held").iter());
        others.remove(&self.replica_id);
        others
    }

    pub fn leads(&self) -> bool {
        self.replica.leads()
    }

    /// How many entries each other replica lacks, by node: known to the leader only.
    pub fn lags(&self) -> Vec<(u64, u64)> {
        let last = self.replica.status().last_index;
        let matched = self.replica.matched().into_iter();
        matched.map(|(id, index)| (node_of(id), last.saturating_sub(index))).collect()
    }

    /// Leads, but has not been confirmed by a majority for a while.
    pub fn is_cut_off(&self) -> bool {
        self.cut_off.load(Ordering::Relaxed)
    }

    /// Bytes of batches that are not yet both committed and synced here.
    pub fn flow(&self) -> &Flow {
        &self.flow
    }

    /// How long the oldest of what is not synced has waited.
    pub fn unsynced_for(&self) -> Option<Duration> {
        self.wal.unsynced_for()
    }

    pub fn watch_leadership(&self) -> LeadershipWatch {
        self.replica.watch_leadership()
    }

    /// Follows the control entries that have been applied.
    pub fn watch_changes(&self) -> channel::Receiver<u64> {
        self.machine.watch_changes()
    }

    /// Hands leadership to `node`, or to the replica that is most caught up, and waits until this
    /// one does not lead any more.
    pub async fn transfer(&self, node: Option<u64>) -> Result<()> {
        if !self.leads() {
            return Err(self.not_leader());
        }
        let handed = self.replica.hand_over(node, &self.hub.connected()).await;
        handed.map_err(|error| Error::of_hand_over(self.shard_id, error))
    }

    fn not_leader(&self) -> Error {
        match self.leader_hint() {
            Some(hint) => Error::NotLeader { shard: self.shard_id, leader: Some(hint) },
            None => Error::NoLeader { shard: self.shard_id },
        }
    }

    /// What a caller is told whom this replica does not serve, or does not serve any more. Where
    /// the shard is about to have another leader it is waited for a moment: a caller that is told
    /// where to go need not ask around, and one that asks around finds an answer.
    pub async fn turned_away(&self, error: Error) -> Error {
        let is_lead = matches!(
            error,
            Error::NotLeader { .. }
                | Error::NoLeader { .. }
                | Error::Draining
                | Error::OutcomeUnknown { .. }
        );
        if !is_lead || self.members.len() <= 1 {
            return error;
        }
        let (own, term) = (node_of(self.replica_id), self.term());
        let mut changes = self.watch_leadership();
        let found = async {
            loop {
                // It goes by itself as the leader until another one says that it is.
                let news = |hint: &LeaderHint| hint.node_id != own || hint.term > term;
                if let Some(hint) = self.leader_hint().filter(news) {
                    return Some(hint);
                }
                if !changes.changed().await {
                    return None;
                }
            }
        };
        let found = tokio::time::timeout(limits::LEADER_WAIT_MAX, found).await;
        match (error, found.ok().flatten()) {
            (unknown @ Error::OutcomeUnknown { .. }, _) => unknown,
            (_, Some(leader)) if leader.node_id != own => {
                Error::NotLeader { shard: self.shard_id, leader: Some(leader) }
            }
            (error, _) => error,
        }
    }

    /// A token that is cancelled when this replica stops leading or is cut off.
    fn reign(&self) -> CancellationToken {
        self.reign.borrow().clone()
    }

    /// The replica's log, for those who look at what is stored beneath the API.
    pub fn wal(&self) -> &Wal {
        &self.wal
    }

    /// The term that this replica is in.
    pub fn term(&self) -> u64 {
        self.replica.leadership().term
    }

    /// How far this replica is with records that it lacks; `None` where it lacks none.
    pub fn fetching(&self) -> Option<Fetching> {
        self.hub.fetching(self.shard_id)
    }

    /// Ranges of this replica's log that are damaged and withheld.
    pub fn damage(&self) -> Vec<String> {
        self.replica.damage()
    }

    /// Why appends are refused now, if they are.
    pub fn unwell(&self) -> Option<Error> {
        unwell(&self.wal)
    }

    fn is_disk_full(&self) -> bool {
        matches!(self.wal.writable(), Err(helix_wal::Error::DiskFull { .. }))
    }

    /// Why the log stopped, if it did.
    fn failure(&self) -> Option<String> {
        match self.wal.writable() {
            Err(error @ helix_wal::Error::Poisoned { .. }) => Some(error.to_string()),
            _ => None,
        }
    }

    /// Moves the log start of a partition up to `offset`, and returns where it is then.
    pub async fn trim(&self, partition: PartitionId, offset: u64) -> Result<Watermarks> {
        let latest = self.latest(partition).await?;
        if offset > latest.high_watermark {
            return Err(Error::OffsetOutOfRange { asked: offset, watermarks: latest });
        }
        self.command(ShardCommand::Trim { starts: vec![(partition, offset)] }).await?;
        self.watermarks(partition)
    }

    /// Puts a fencing token in force, where `expected` holds if it is given. What the partition
    /// has by then is at least what was appended before.
    pub async fn set_fencing_token(
        &self,
        partition: PartitionId,
        expected: Option<FencingToken>,
        token: FencingToken,
    ) -> Result<Watermarks> {
        self.ready().await?;
        self.check_writable()?;
        self.command(ShardCommand::SetFencingToken { partition, expected, token }).await?;
        self.watermarks(partition)
    }

    /// The fencing token in force here; the empty one is none.
    pub fn fencing_token(&self, partition: PartitionId) -> Option<FencingToken> {
        self.machine.read_state(|state| Some(state.partition(partition)?.fencing_token.clone()))
    }

    /// The lowest index that the log must keep for replicas that are behind.
    pub fn released(&self) -> u64 {
        self.machine.read_state(ShardState::released)
    }

    /// Proposes a control entry and waits until it is applied.
    pub async fn command(&self, command: ShardCommand) -> Result<()> {
        let command = Command::control(Head::Shard(command));
        let reign = self.reign();
        let outcome =
            self.replica.propose(command, None).await.map_err(|error| self.propose_error(error))?;
        let outcome = tokio::time::timeout(limits::COMMIT_WAIT_MAX, outcome);
        let outcome = tokio::select! {
            biased;
            outcome = outcome => outcome,
            () = reign.cancelled() => return Err(deposed()),
        };
        match outcome {
            Ok(Ok(Verdict::Refused(Refusal::UnknownPartition { partition }))) => {
                Err(self.missing(partition))
            }
            Ok(Ok(Verdict::Refused(refusal))) => Err(refusal.into()),
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(self.propose_error(error)),
            Err(_) => Err(Error::OutcomeUnknown {
                reason: format!("not committed within {:?}", limits::COMMIT_WAIT_MAX),
            }),
        }
    }

    /// Looks at the bookkeeping.
    pub fn read_state<T>(&self, read: impl FnOnce(&ShardState) -> T) -> T {
        self.machine.read_state(read)
    }

    pub fn status(&self) -> ShardStatus {
        let status = self.replica.status();
        let partitions = self.machine.read_state(|state| state.partitions().len());
        ShardStatus {
            synced: status.synced,
            purged: status.purged,
            partition_count: u32::try_from(partitions).unwrap_or(u32::MAX),
            shard_id: self.shard_id,
            leader: status.leads,
            term: status.term,
            last_index: status.last_index,
            committed: status.committed,
            applied: status.applied,
            fetching: self.fetching(),
            wal: status.wal,
        }
    }

    /// Turns away, from now on, also those who would read from any replica.
    pub fn retire(&self) {
        self.closed.cancel();
        // Readers that wait here look again.
        self.machine.watchers().wake_all();
    }

    /// Stops the replica and closes the log, which syncs what it still holds.
    pub async fn close(&self) {
        self.retire();
        self.hub.close_shard(self.shard_id).await;
        self.replica.close().await;
    }
}

/// Why a log takes no appends now, if it does not.
pub fn unwell(wal: &Wal) -> Option<Error> {
    match wal.writable() {
        Ok(()) => None,
        Err(error @ helix_wal::Error::DiskFull { .. }) => {
            Some(Error::DiskFull { what: error.to_string() })
        }
        Err(error) => {
            Some(Error::StorageFailed { what: error.to_string(), may_have_applied: false })
        }
    }
}

/// Accepted by a leader that then lost its lead: the next one may have it, or not.
fn deposed() -> Error {
    Error::OutcomeUnknown { reason: "the shard's leader changed".to_owned() }
}

impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard").field("id", &self.shard_id).finish_non_exhaustive()
    }
}
