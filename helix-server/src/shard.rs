//! One shard on this node: a replicated log that holds many partitions.
//! `append.rs` has the append path and `read.rs` the read path.

mod append;
mod append_times;
mod cleaner;
mod gateway_groups;
mod group_sessions;
mod groups;
mod leadership_watch;
mod log_limits;
mod machine;
mod maintenance;
mod read;
mod sequence_tracker;
mod split;
mod status;
mod watch;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use std::{fmt, io};

use bytes::Bytes;
use helix_wal::{QuarantinedLog, Wal};
use tokio::sync::watch as channel;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::error::{Error, LeaderHint, Result};
use crate::flow::FlowControl;
use crate::limits;
use crate::log::{
    FencingToken, Head, PartitionId, Refusal, ShardCommand, ShardState, Verdict, Watermarks,
};
use crate::metrics::Metrics;
pub use crate::peer::FetchProgress;
use crate::peer::Hub;
use crate::raft::{
    Command, DiskReads, LeadershipWatch, Replica, ReplicaId, ReplicaSettings, node_of,
};
use crate::sync;

pub use crate::flow::FlowShare;
pub use append::{AppendPermit, BatchAck, Durability, NewBatch, PendingAck};
pub use append_times::AheadPartitions;
use cleaner::CleanerReport;
pub use cleaner::{
    CleanerStats, CleanerWorker, CompactedPartition, KeyMapMemory, NextRound, PartitionCleanup,
    TableSizes,
};
pub use gateway_groups::{GatewayGroup, GatewayGroupState, GatewayGroups, ReportedMember};
pub use group_sessions::{GroupSessions, HeartbeatDetails, MemberSession};
pub use groups::GroupWatch;
pub use log_limits::LogLimits;
use machine::ShardMachine;
pub use read::{ReadBatch, ReadFrom, ShardRead};
use sequence_tracker::SequenceTracker;
use split::SplitStreams;
pub use status::{ShardStatus, write_error};
pub use watch::{WatchGuard, Watcher};

/// Returns the client endpoint of a node, for leader hints.
pub type EndpointLookup = Arc<dyn Fn(u64) -> Option<String> + Send + Sync>;

/// Everything that a shard is opened with.
pub struct ShardSettings {
    pub shard_id: u64,
    pub replica_id: ReplicaId,
    /// Initial replicas of a new shard.
    pub members: BTreeSet<ReplicaId>,
    pub directory: EndpointLookup,
    pub hub: Arc<Hub>,
    pub wal: Wal,
    /// Checkpoint that the WAL recovered.
    pub checkpoint: Option<(helix_wal::LogId, Bytes)>,
    pub reads: DiskReads,
    /// Quarantined log that this one replaces, and from which it may lack acknowledged entries.
    pub repair_of: Option<QuarantinedLog>,
    /// Where the last group was that recovery truncated; it may have been acknowledged.
    pub truncated: Option<String>,
    /// True if the log is on a disk, so that acknowledged batches are synced.
    pub durable: bool,
    /// Limit of the bytes of batches in flight.
    pub bytes_in_flight: usize,
    /// Limit of large batches while small ones arrive: [`FlowControl::new`].
    pub pace: u32,
    pub clock: Arc<dyn Clock>,
    /// Cancelled when the node shuts down.
    pub draining: CancellationToken,
    pub metrics: Arc<Metrics>,
    /// Shared by the shards of a node.
    pub cleaner_worker: CleanerWorker,
    /// Shared by the shards of a node.
    pub key_maps: KeyMapMemory,
    pub log_limits: LogLimits,
}

/// A shard's replica on this node, and the operations on its partitions.
pub struct Shard {
    this: Weak<Shard>,
    shard_id: u64,
    replica_id: ReplicaId,
    members: BTreeSet<ReplicaId>,
    directory: EndpointLookup,
    hub: Arc<Hub>,
    replica: Replica,
    machine: Arc<ShardMachine>,
    wal: Wal,
    reads: DiskReads,
    flow: Arc<FlowControl>,
    sequences: SequenceTracker,
    truncated: Option<String>,
    durable: bool,
    clock: Arc<dyn Clock>,
    draining: CancellationToken,
    /// Cancelled when this replica is closed, has stopped, or its node was removed. The node may
    /// keep running.
    closed: CancellationToken,
    log_limits: LogLimits,
    metrics: Arc<Metrics>,
    /// True on a leader that no majority has confirmed for a while: another replica may have been
    /// elected.
    isolated: AtomicBool,
    /// True once this node stops.
    stopping: AtomicBool,
    /// Replicas that the shard should have, by the cluster's state.
    expected: Mutex<BTreeSet<ReplicaId>>,
    /// Cancelled, and replaced, when this replica loses its leadership or is isolated.
    leadership_token: channel::Sender<CancellationToken>,
    /// Cancelled, and replaced, when this replica can no longer learn the outcome of proposals.
    proposal_token: channel::Sender<CancellationToken>,
    /// Last term in which this replica led, and since when.
    led_since: Mutex<Option<(u64, tokio::time::Instant)>>,
    /// Sessions of the groups' members; kept on the leader only.
    sessions: GroupSessions,
    gateway_groups: GatewayGroups,
    opened_at: tokio::time::Instant,
    cleaner: CleanerReport,
    cleaner_worker: CleanerWorker,
    key_maps: KeyMapMemory,
    split_streams: Mutex<SplitStreams>,
}

impl Shard {
    /// Runs long work on a blocking thread; a simulation runs it in place.
    ///
    /// # Errors
    /// If the process stops.
    pub async fn run_blocking<T, F>(&self, work: F) -> io::Result<T>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        self.reads.wait(work).await
    }

    /// Recovers the shard, and starts its replica and its maintenance.
    ///
    /// # Errors
    /// As [`Replica::open`].
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
                timing: settings.hub.timing().clone(),
            },
            settings.hub.network(settings.shard_id, settings.replica_id, settings.wal.clone()),
        )
        .await?;
        settings.hub.serve_replica(settings.shard_id, &replica);
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
            flow: FlowControl::new(settings.bytes_in_flight, settings.pace),
            sequences: SequenceTracker::default(),
            truncated: settings.truncated,
            durable: settings.durable,
            clock: settings.clock,
            closed: settings.draining.child_token(),
            draining: settings.draining,
            log_limits: settings.log_limits,
            metrics: settings.metrics,
            isolated: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            expected: Mutex::default(),
            leadership_token: channel::Sender::new(CancellationToken::new()),
            proposal_token: channel::Sender::new(CancellationToken::new()),
            led_since: Mutex::default(),
            sessions: GroupSessions::default(),
            gateway_groups: GatewayGroups::default(),
            opened_at: tokio::time::Instant::now(),
            cleaner: CleanerReport::default(),
            cleaner_worker: settings.cleaner_worker,
            key_maps: settings.key_maps,
            split_streams: Mutex::default(),
        });
        tokio::spawn(cleaner::run(shard.clone()));
        tokio::spawn(maintenance::run(shard.clone()));
        tokio::spawn(leadership_watch::run(Arc::downgrade(&shard)));
        Ok(shard)
    }

    pub fn id(&self) -> u64 {
        self.shard_id
    }

    /// Returns whether the shard has been formed, as far as its replica knows.
    ///
    /// # Errors
    /// Fails once openraft has stopped.
    pub async fn is_formed(&self) -> io::Result<bool> {
        self.replica.is_formed().await
    }

    /// Forms a new shard; without effect where it exists.
    ///
    /// # Errors
    /// Fails once openraft has stopped.
    pub async fn form(&self) -> io::Result<()> {
        self.replica.form(self.members.clone()).await
    }

    /// Forms a shard that was added to the cluster, with this replica as the only one.
    ///
    /// # Errors
    /// Fails once openraft has stopped.
    pub async fn form_alone(&self) -> io::Result<()> {
        self.replica.form([self.replica_id].into()).await
    }

    /// Resumes an existing shard. A single voter starts an election at once.
    ///
    /// # Errors
    /// Fails once openraft has stopped.
    pub async fn resume(&self) -> io::Result<()> {
        let voters = self.replica.known_voters().await;
        if voters == [self.replica_id] { self.replica.elect().await } else { Ok(()) }
    }

    /// Returns whether this replica may form a new shard.
    pub fn may_form(&self) -> bool {
        self.members.contains(&self.replica_id) && self.replica.repair_of().is_none()
    }

    /// Returns whether this replica should form the shard and be its first leader.
    pub fn is_first_member(&self) -> bool {
        let turn = usize::try_from(self.shard_id).unwrap_or(1).saturating_sub(1);
        let first = self.members.iter().nth(turn % self.members.len().max(1));
        first == Some(&self.replica_id)
    }

    pub fn is_durable(&self) -> bool {
        self.durable
    }

    /// Returns the leader; `None` while there is none that this node reaches.
    pub fn leader_hint(&self) -> Option<LeaderHint> {
        if self.is_isolated() {
            return None;
        }
        let leadership = self.replica.leadership();
        let node_id = node_of(leadership.leader?);
        // A replica remembers its last leader until it hears of another one.
        if self.hub.peers().iter().any(|peer| peer.node_id == node_id && !peer.connected) {
            return None;
        }
        let endpoint = (self.directory)(node_id).unwrap_or_default();
        Some(LeaderHint { node_id, endpoint, term: leadership.term })
    }

    /// Returns the nodes with a voter of this shard.
    pub fn replicas(&self) -> Vec<u64> {
        self.replica.voters().into_iter().map(node_of).collect()
    }

    /// Returns the nodes with a learner of this shard.
    pub fn learners(&self) -> Vec<u64> {
        self.replica.membership().learners.into_iter().map(node_of).collect()
    }

    pub fn replica(&self) -> &Replica {
        &self.replica
    }

    /// Sets the replicas that the shard should have. The log that they lack is kept for them.
    pub fn expect_replicas(&self, replicas: BTreeSet<ReplicaId>) {
        *sync::lock(&self.expected) = replicas;
    }

    /// Returns every other replica that the shard has or should have.
    pub fn others(&self) -> BTreeSet<ReplicaId> {
        let membership = self.replica.membership();
        let mut others: BTreeSet<ReplicaId> = membership.configs.into_iter().flatten().collect();
        others.extend(membership.learners);
        others.extend(sync::lock(&self.expected).iter());
        others.remove(&self.replica_id);
        others
    }

    pub fn is_leader(&self) -> bool {
        self.replica.is_leader()
    }

    /// Returns the entries that each other replica lacks, by node. Empty except on the leader.
    pub fn lags(&self) -> Vec<(u64, u64)> {
        let last = self.replica.status().last_index;
        let matched = self.replica.matched().into_iter();
        matched.map(|(id, index)| (node_of(id), last.saturating_sub(index))).collect()
    }

    /// Returns whether this is a leader that no majority has confirmed for a while.
    pub fn is_isolated(&self) -> bool {
        self.isolated.load(Ordering::Relaxed)
    }

    /// Returns the limit of batches that are not yet both committed and synced here.
    pub fn flow(&self) -> &FlowControl {
        &self.flow
    }

    /// Returns the age of the oldest append that is not synced.
    pub fn unsynced_for(&self) -> Option<Duration> {
        self.wal.unsynced_for()
    }

    /// Returns whether this replica is closed, has stopped, or its node was removed.
    pub fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    pub fn watch_leadership(&self) -> LeadershipWatch {
        self.replica.watch_leadership()
    }

    /// Watches the number of applied control entries.
    pub fn watch_changes(&self) -> channel::Receiver<u64> {
        self.machine.watch_changes()
    }

    /// Transfers leadership to `node`, or to the most caught-up replica, and waits until this
    /// replica is no longer the leader.
    ///
    /// # Errors
    /// [`Error::NotLeader`], [`Error::NoLeader`], [`Error::InvalidArgument`] where no such
    /// replica is reachable, [`Error::Throttled`] where open appends do not settle in time,
    /// [`Error::OutcomeUnknown`] where the other replica did not take over in time.
    pub async fn transfer(&self, node: Option<u64>) -> Result<()> {
        if !self.is_leader() {
            return Err(self.not_leader());
        }
        let transferred = self.replica.transfer_leadership(node, &self.hub.connected()).await;
        transferred.map_err(|error| Error::of_transfer(self.shard_id, error))
    }

    /// Transfers leadership as [`Self::transfer`] does, also where open appends do not settle in
    /// time: this node stops, or its disk stalls.
    ///
    /// # Errors
    /// As [`Self::transfer`], without [`Error::Throttled`].
    pub async fn abandon_leadership(&self, node: Option<u64>) -> Result<()> {
        if !self.is_leader() {
            return Err(self.not_leader());
        }
        let transferred = self.replica.abandon_leadership(node, &self.hub.connected()).await;
        transferred.map_err(|error| Error::of_transfer(self.shard_id, error))
    }

    fn not_leader(&self) -> Error {
        match self.leader_hint() {
            Some(hint) => Error::NotLeader { shard: self.shard_id, leader: Some(hint) },
            None => Error::NoLeader { shard: self.shard_id },
        }
    }

    /// Adds the new leader to the error of a request that this replica does not serve.
    ///
    /// It waits for a new leader for a moment, so that the client need not probe the other nodes.
    pub async fn redirect(&self, error: Error) -> Error {
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
                // Until it hears of another leader, a replica reports itself.
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

    /// Returns a token that is cancelled when this replica loses leadership or is isolated.
    pub(crate) fn leadership_token(&self) -> CancellationToken {
        self.leadership_token.borrow().clone()
    }

    /// Returns a token that is cancelled when this replica can no longer learn the outcome of what
    /// it has proposed: it leads another term or none, or no majority has responded for so long
    /// that another leader is probable.
    ///
    /// A shorter silence ends no proposal. The same leader settles them once a majority responds.
    pub(super) fn proposal_token(&self) -> CancellationToken {
        self.proposal_token.borrow().clone()
    }

    /// Returns the error of a proposal whose outcome this replica no longer waits for.
    pub(super) fn lost_outcome(&self) -> Error {
        let reason = if self.is_leader() && self.is_isolated() {
            let waited = self.hub.timing().abandoned_after();
            format!(
                "no majority of the shard's replicas has responded to its leader for {waited:?}"
            )
        } else {
            "the shard's leader changed".to_owned()
        };
        Error::OutcomeUnknown { reason }
    }

    fn is_disk_full(&self) -> bool {
        matches!(self.wal.writable(), Err(helix_wal::Error::DiskFull { .. }))
    }

    /// Returns why the log failed, if it did.
    fn failure(&self) -> Option<String> {
        match self.wal.writable() {
            Err(error @ helix_wal::Error::Poisoned { .. }) => Some(error.to_string()),
            _ => None,
        }
    }

    /// Raises the log start of a partition to `offset`, and returns the new watermarks.
    ///
    /// # Errors
    /// [`Error::OffsetOutOfRange`] above the high watermark, and those of [`Self::command`].
    pub async fn trim(&self, partition: PartitionId, offset: u64) -> Result<Watermarks> {
        let latest = self.latest(partition).await?;
        if offset > latest.high_watermark {
            return Err(Error::OffsetOutOfRange { requested: offset, watermarks: latest });
        }
        self.command(ShardCommand::Trim { starts: vec![(partition, offset)] }).await?;
        self.watermarks(partition)
    }

    /// Sets a partition's fencing token, if the current one is `expected` or `expected` is `None`.
    /// The returned watermarks cover everything that was appended before the new token.
    ///
    /// # Errors
    /// `Error::Fenced` where another token is in force, and those of [`Self::command`].
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

    /// Returns a partition's fencing token as applied here; the empty one stands for none.
    pub fn fencing_token(&self, partition: PartitionId) -> Option<FencingToken> {
        self.machine.read_state(|state| Some(state.partition(partition)?.fencing_token.clone()))
    }

    /// Returns the index up to which the log may be purged, as far as other replicas need it.
    pub fn released(&self) -> u64 {
        self.machine.read_state(ShardState::released)
    }

    /// Proposes a control entry and waits until it is applied.
    ///
    /// # Errors
    /// [`Error::NotLeader`], [`Error::NoLeader`], [`Error::OutcomeUnknown`] where the entry was not
    /// applied in time, or why it was refused.
    pub async fn command(&self, command: ShardCommand) -> Result<()> {
        let command = Command::control(Head::Shard(command));
        let proposal_token = self.proposal_token();
        let outcome =
            self.replica.propose(command, None).await.map_err(|error| self.propose_error(error))?;
        let outcome = tokio::time::timeout(limits::COMMIT_WAIT_MAX, outcome);
        let outcome = tokio::select! {
            biased;
            outcome = outcome => outcome,
            () = proposal_token.cancelled() => return Err(self.lost_outcome()),
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

    /// Runs `read` on the applied state.
    pub fn read_state<T>(&self, read: impl FnOnce(&ShardState) -> T) -> T {
        self.machine.read_state(read)
    }

    /// Waits until this replica refuses all further requests.
    pub async fn closed(&self) {
        self.closed.cancelled().await;
    }

    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Refuses all further requests, including reads from any replica.
    pub fn retire(&self) {
        self.closed.cancel();
        // Waiting readers and members must notice it.
        self.machine.watchers().wake_all();
        self.machine.group_watchers().wake_watchers();
    }

    /// Stops the replica and closes the log, which syncs its pending appends.
    pub async fn close(&self) {
        self.retire();
        self.hub.close_shard(self.shard_id).await;
        self.replica.close().await;
    }
}

impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard").field("id", &self.shard_id).finish_non_exhaustive()
    }
}
