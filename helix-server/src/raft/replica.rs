//! One replica of one shard: openraft over the WAL, as the rest of the server uses it.
//! Proposals are logged in the order of the calls. Leadership is in `leadership`.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use helix_wal::{GroupTimes, QuarantinedLog, Scrub, Wal};
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{ClientWriteError, InitializeError, RaftError};
use openraft::network::RaftNetworkFactory;
use openraft::raft::ClientWriteResponse;
use openraft::{Config, Raft, SnapshotPolicy};
use tokio::sync::{oneshot, watch};

use super::blocking::{DiskReads, FoundDamage};
use super::leadership::watch_metrics;
use super::proposal_gate::ProposalGate;
use super::repair_guard::RepairGuard;
use super::snapshot_records::{RecordStore, SnapshotRecords};
use super::state_machine::{Machine, StateMachine};
use super::timing::ElectionTiming;
use super::types::{Command, ProposalGuard, ProposalResponder, ReplicaId, TimedResult, TypeConfig};
use super::{LogStore, SnapshotData};
use crate::limits;
use crate::log::Verdict;
use crate::metrics::Counter;

/// Everything that a replica is opened with.
#[derive(Debug)]
pub struct ReplicaSettings {
    pub shard_id: u64,
    pub replica_id: ReplicaId,
    pub wal: Wal,
    pub reads: DiskReads,
    pub machine: Arc<dyn Machine>,
    /// Checkpoint that the WAL recovered.
    pub checkpoint: Option<(helix_wal::LogId, Bytes)>,
    /// True if entries carry records, which a snapshot leaves out.
    pub has_records: bool,
    /// Quarantined log that this one replaces. This one may lack entries that were acknowledged
    /// from it, so the replica neither votes nor becomes a candidate until [`Replica::rejoin`].
    pub repair_of: Option<QuarantinedLog>,
    pub timing: ElectionTiming,
}

/// Progress of a replica and of its log.
#[derive(Debug, Clone)]
pub struct ReplicaStatus {
    pub is_leader: bool,
    pub term: u64,
    pub last_index: u64,
    pub synced: u64,
    pub committed: u64,
    pub applied: u64,
    pub purged: u64,
    pub wal: helix_wal::WalStats,
}

/// The parts of a replica that requests from other replicas are passed to.
#[derive(Debug, Clone)]
pub(crate) struct ReplicaParts {
    pub(crate) id: ReplicaId,
    pub(crate) raft: Raft<TypeConfig, StateMachine>,
    pub(crate) machine: Arc<dyn Machine>,
    /// `None` where entries carry no records.
    pub(crate) records: Option<RecordStore>,
    pub(crate) repair_guard: Arc<RepairGuard>,
    pub(crate) wal: Wal,
    pub(crate) reads: DiskReads,
}

/// Interval at which a closing log is checked for its end.
const END_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Longest wait for that end; the last sync is over by then.
const END_WAIT_MAX: Duration = Duration::from_secs(5);

/// Reason why a proposal has no verdict.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    #[error("not the leader")]
    NotLeader { leader: Option<ReplicaId> },
    /// openraft stopped after it had accepted the proposal.
    #[error("{0}")]
    Unknown(String),
    /// The proposal was never accepted.
    #[error("{0}")]
    Stopped(String),
}

type WriteResult = Result<ClientWriteResponse<TypeConfig>, ClientWriteError<TypeConfig>>;

/// Resolves to the verdict of apply on a proposal.
#[derive(Debug)]
pub struct ProposalOutcome {
    receiver: oneshot::Receiver<TimedResult<WriteResult>>,
    group: Option<GroupTimes>,
}

impl ProposalOutcome {
    /// Returns the times of the local disk, once the verdict is known; `None` if the entry was
    /// applied before its sync here.
    pub fn group(&self) -> Option<GroupTimes> {
        self.group
    }
}

impl Future for ProposalOutcome {
    type Output = Result<Verdict, ProposeError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let received = std::task::ready!(Pin::new(&mut self.receiver).poll(context));
        let received = received.map(|(result, group)| {
            self.group = group;
            result
        });
        Poll::Ready(match received {
            Ok(Ok(response)) => Ok(response.data),
            Ok(Err(ClientWriteError::ForwardToLeader(forward))) => {
                Err(ProposeError::NotLeader { leader: forward.leader_id })
            }
            // The entry was in this log, and was replaced by entries of another leader or by a
            // snapshot.
            Ok(Err(ClientWriteError::LogEntryDiscarded(_))) => {
                Err(ProposeError::Unknown("another leader took over".to_owned()))
            }
            Ok(Err(other)) => Err(ProposeError::Stopped(other.to_string())),
            Err(_) => Err(ProposeError::Unknown("the shard stopped".to_owned())),
        })
    }
}

/// A running replica of one shard.
#[derive(Debug)]
pub struct Replica {
    pub(super) id: ReplicaId,
    pub(super) raft: Raft<TypeConfig, StateMachine>,
    pub(super) wal: Wal,
    reads: DiskReads,
    pub(super) applied_term: watch::Receiver<u64>,
    machine: Arc<dyn Machine>,
    records: Option<RecordStore>,
    repair_guard: Arc<RepairGuard>,
    repair_of: Option<QuarantinedLog>,
    pub(super) timing: ElectionTiming,
    /// Closed while leadership is transferred.
    pub(super) gate: Arc<ProposalGate>,
    /// Last term in which this replica asked another one to take over.
    pub(super) transferred_in: AtomicU64,
    /// Reason for which openraft has stopped.
    pub(super) stopped: watch::Receiver<Option<String>>,
    /// Leader changes that this replica has seen.
    pub(super) leader_changes: Arc<Counter>,
}

fn config(shard_id: u64, timing: &ElectionTiming) -> Config {
    Config {
        cluster_name: format!("shard-{shard_id}"),
        // Less than a tick, so that a tick after a late one sends heartbeats too.
        heartbeat_interval: (timing.heartbeat_ms() * 3 / 4).max(1),
        election_timeout_min: timing.wait_min_ms(),
        // Also the promise of followers: openraft's leader lease.
        election_timeout_max: timing.timeout_ms(),
        enable_pre_vote: Some(true),
        // A restarted leader must be elected again, so that its state machine has caught up.
        enable_leader_restore: Some(false),
        max_payload_entries: 1024,
        max_append_entries: Some(1024),
        // The shard triggers checkpoints and purges: only it knows how many bytes were applied
        // and what other replicas still need.
        snapshot_policy: SnapshotPolicy::Never,
        max_in_snapshot_log_to_keep: u64::MAX,
        api_channel_size: Some(1024),
        install_snapshot_timeout: 5_000,
        ..Config::default()
    }
}

impl Replica {
    /// Recovers the state machine, joins it with the log, and starts openraft.
    ///
    /// # Errors
    /// Fails where the checkpoint or the log cannot be read, or openraft does not start.
    pub async fn open<N>(settings: ReplicaSettings, network: N) -> io::Result<Self>
    where
        N: RaftNetworkFactory<TypeConfig>,
        N::Network: openraft::network::NetSnapshot<TypeConfig, SnapshotData = SnapshotData>,
    {
        let ReplicaSettings { shard_id, replica_id, wal, reads, machine, checkpoint, .. } =
            settings;
        let (has_records, repair_of) = (settings.has_records, settings.repair_of);
        let timing = settings.timing;
        let mut store = LogStore::new(wal.clone(), reads.clone());
        let records = has_records.then(|| RecordStore {
            wal: wal.clone(),
            reads: reads.clone(),
            fetched: SnapshotRecords::default(),
        });
        let recovering = StateMachine::recover(
            machine.clone(),
            wal.clone(),
            reads.clone(),
            checkpoint,
            &mut store,
        );
        let mut state_machine = recovering.await?;
        store.set_recovered(state_machine.applied_index());
        if let Some(records) = &records {
            state_machine = state_machine.with_records(records.fetched.clone());
        }
        let applied_term = state_machine.watch_term();
        let config = Config { enable_elect: repair_of.is_none(), ..config(shard_id, &timing) };
        let config = config.validate().map_err(io::Error::other)?;
        let raft = Raft::new(replica_id, Arc::new(config), network, store, state_machine);
        let raft = timing.ticks().scope(raft).await.map_err(io::Error::other)?;
        let in_repair = repair_of.is_some();
        let repair_guard =
            Arc::new(if in_repair { RepairGuard::shut() } else { RepairGuard::default() });
        let (stopping, stopped) = watch::channel(None);
        let leader_changes = Arc::<Counter>::default();
        let (server, all) = (raft.server_metrics(), raft.metrics());
        tokio::spawn(watch_metrics(server, all, leader_changes.clone(), stopping));
        Ok(Self {
            id: replica_id,
            raft,
            wal,
            reads,
            applied_term,
            machine,
            records,
            repair_guard,
            repair_of,
            timing,
            gate: Arc::default(),
            transferred_in: AtomicU64::new(0),
            stopped,
            leader_changes,
        })
    }

    pub fn id(&self) -> ReplicaId {
        self.id
    }

    /// Returns the parts that requests from other replicas are passed to.
    pub(crate) fn parts_for_peers(&self) -> ReplicaParts {
        ReplicaParts {
            id: self.id,
            raft: self.raft.clone(),
            machine: self.machine.clone(),
            records: self.records.clone(),
            repair_guard: self.repair_guard.clone(),
            wal: self.wal.clone(),
            reads: self.reads.clone(),
        }
    }

    /// Returns the replica's log, for a simulation that checks what is stored.
    #[doc(hidden)]
    pub fn wal(&self) -> &Wal {
        &self.wal
    }

    /// Returns why the log accepts no appends now, or `Ok`.
    ///
    /// # Errors
    /// As [`Wal::writable`].
    pub fn writable(&self) -> Result<(), helix_wal::Error> {
        self.wal.writable()
    }

    /// Returns whether the log has been closed or has failed, and its writer has ended.
    pub fn has_ended(&self) -> bool {
        self.wal.has_ended()
    }

    /// Returns the age of the oldest append that is not synced.
    pub fn unsynced_for(&self) -> Option<Duration> {
        self.wal.unsynced_for()
    }

    /// Returns the quarantined log that this one replaces, until [`Self::rejoin`].
    pub fn repair_of(&self) -> Option<&QuarantinedLog> {
        self.repair_of.as_ref().filter(|_| !self.repair_guard.is_open())
    }

    /// Accepts entries of the leader of `term`, while the replica is in repair.
    pub fn accept_leader_of(&self, term: u64) {
        self.repair_guard.admit(term);
    }

    /// Ends the repair: the replica votes again and may be elected.
    /// The caller knows that its log lacks nothing that the replica ever acknowledged.
    pub fn rejoin(&self) {
        self.repair_guard.open();
        self.raft.runtime_config().elect(true);
    }

    /// Allows another replica to start over with an empty log after it lost acknowledged entries.
    /// openraft otherwise takes that for a broken promise. Called on the leader.
    pub async fn allow_reset(&self, id: ReplicaId) {
        // Ignored: the request is repeated until the replica has started over.
        let _ = self.raft.trigger().allow_next_revert(&id, true).await;
    }

    /// Returns descriptions of the damage found in the log.
    pub fn damage(&self) -> Vec<String> {
        self.reads.damage().into_iter().map(|found| found.what).collect()
    }

    /// Returns the damage found in the log, by file.
    pub fn found_damage(&self) -> Vec<FoundDamage> {
        self.reads.damage()
    }

    /// Returns the reads of this replica's log, which record damage.
    pub fn reads(&self) -> &DiskReads {
        &self.reads
    }

    /// Returns a scrub of the log, and the reads that record the damage it finds.
    pub fn scrub(&self) -> (Scrub, DiskReads) {
        (self.wal.scrub(), self.reads.clone())
    }

    /// Returns why openraft has stopped, if it has. It never restarts.
    pub fn stopped(&self) -> Option<String> {
        self.stopped.borrow().clone()
    }

    /// Waits until [`Self::stopped`] returns a reason.
    pub async fn wait_stopped(&self) {
        // Ignored: the sender publishes the reason before it is dropped.
        let _ = self.stopped.clone().wait_for(Option::is_some).await;
    }

    /// Returns whether the shard has been formed, as far as this replica knows.
    ///
    /// # Errors
    /// Fails once openraft has stopped.
    pub async fn is_formed(&self) -> io::Result<bool> {
        self.raft.is_initialized().await.map_err(io::Error::other)
    }

    /// Forms a new shard of `members`; without effect where the shard exists.
    /// Several members may call this at once, since all write the same first entry.
    ///
    /// # Errors
    /// Fails once openraft has stopped.
    pub async fn form(&self, members: BTreeSet<ReplicaId>) -> io::Result<()> {
        if self.is_formed().await? {
            return Ok(());
        }
        match self.raft.initialize(members).await {
            Ok(()) | Err(RaftError::APIError(InitializeError::NotAllowed(_))) => Ok(()),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    /// Proposes a command. Commands are logged in the order in which this returns; queued ones
    /// are appended and synced together.
    ///
    /// # Errors
    /// [`ProposeError::NotLeader`] while leadership is transferred, and [`ProposeError::Stopped`]
    /// once openraft has stopped. The command was not proposed then.
    pub async fn propose(
        &self,
        mut command: Command,
        guard: Option<Arc<ProposalGuard>>,
    ) -> Result<ProposalOutcome, ProposeError> {
        let ticket = self.gate.enter().ok_or(ProposeError::NotLeader { leader: None })?;
        let (responder, receiver) = ProposalResponder::new(guard.clone());
        let responder = responder.with_ticket(ticket);
        command.guard = guard;
        self.raft
            .write(command)
            .responder(responder)
            .await
            .map_err(|fatal| ProposeError::Stopped(fatal.to_string()))?;
        Ok(ProposalOutcome { receiver, group: None })
    }

    /// Proposes a command while no other proposal is open, and waits for its verdict. Other
    /// proposals are refused until then.
    ///
    /// # Errors
    /// As [`Self::propose`], and those of its outcome. [`ProposeError::NotLeader`] also if the open
    /// proposals are not applied within [`limits::SETTLE_WAIT_MAX`].
    pub async fn propose_alone(&self, mut command: Command) -> Result<Verdict, ProposeError> {
        let closed = self.gate.close();
        let settled = tokio::time::timeout(limits::SETTLE_WAIT_MAX, closed.settled());
        settled.await.map_err(|_| ProposeError::NotLeader { leader: None })?;
        let (responder, receiver) = ProposalResponder::new(None);
        command.guard = None;
        self.raft
            .write(command)
            .responder(responder)
            .await
            .map_err(|fatal| ProposeError::Stopped(fatal.to_string()))?;
        ProposalOutcome { receiver, group: None }.await
    }

    /// Returns the matched index of each other replica. Empty where this one is not the leader.
    pub fn matched(&self) -> BTreeMap<ReplicaId, u64> {
        let data = self.raft.data_metrics();
        let data = data.borrow_watched();
        let replication = data.replication.iter().flatten();
        let others = replication.filter(|(id, _)| **id != self.id);
        others.map(|(id, matched)| (*id, matched.map_or(0, |id| id.index))).collect()
    }

    /// Returns the index of the last checkpoint on disk, and the index of the last purged entry.
    pub fn checkpointed(&self) -> (u64, u64) {
        let data = self.raft.data_metrics();
        let data = data.borrow_watched();
        let index = |id: Option<super::types::RaftLogId>| id.map_or(0, |id| id.index);
        (index(data.snapshot), index(data.purged))
    }

    /// Returns the index of the last applied entry.
    pub fn applied(&self) -> u64 {
        self.raft.data_metrics().borrow_watched().last_applied.map_or(0, |id| id.index)
    }

    /// Requests a checkpoint, up to which the log may then be purged.
    pub async fn checkpoint(&self) {
        // Ignored: it fails only when openraft has stopped, which is reported elsewhere.
        let _ = self.raft.trigger().snapshot().await;
    }

    /// Purges the log up to this index, or the last checkpoint if that is lower.
    pub async fn purge(&self, upto: u64) {
        // Ignored: it fails only when openraft has stopped, which is reported elsewhere.
        let _ = self.raft.trigger().purge_log(upto).await;
    }

    /// Returns the histogram of the log's sync times, by [`helix_wal::SYNC_BOUNDS_US`].
    pub fn sync_counts(&self) -> [u64; helix_wal::SYNC_BOUNDS_US.len() + 1] {
        self.wal.sync_counts()
    }

    pub fn status(&self) -> ReplicaStatus {
        let leadership = self.leadership();
        let data = self.raft.data_metrics();
        let data = data.borrow_watched();
        let state = self.wal.state();
        let index = |id: Option<helix_wal::LogId>| id.map_or(0, |id| id.index);
        ReplicaStatus {
            is_leader: leadership.leader == Some(self.id),
            term: leadership.term,
            last_index: index(state.last),
            synced: index(state.synced),
            committed: index(state.committed),
            purged: index(state.purged),
            wal: self.wal.stats(),
            applied: data.last_applied.map_or(0, |id| id.index),
        }
    }

    /// Stops openraft, then closes the log, which syncs its pending appends.
    ///
    /// Afterwards the data directory is free to be opened again, unless the disk takes longer
    /// than [`limits::SHUTDOWN_WAIT_MAX`]. What was acknowledged as synced is on the disk before
    /// that sync, so shutdown need not wait longer.
    pub async fn close(&self) {
        if let Err(error) = self.raft.shutdown().await {
            tracing::warn!(%error, "raft did not stop cleanly");
        }
        let wal = self.wal.clone();
        let closing = self.reads.wait(move || wal.close());
        // A failure is ignored: the blocking pool is gone only when the process is.
        if tokio::time::timeout(limits::SHUTDOWN_WAIT_MAX, closing).await.is_err() {
            let waited = limits::SHUTDOWN_WAIT_MAX;
            tracing::error!(wal = ?self.wal, ?waited, "giving up on the last sync of a log");
            return;
        }
        // Threads have ended by now; the tasks of a simulation have yet to run.
        let ended = async {
            while !self.wal.has_ended() {
                tokio::time::sleep(END_POLL_INTERVAL).await;
            }
        };
        if tokio::time::timeout(END_WAIT_MAX, ended).await.is_err() {
            tracing::error!(wal = ?self.wal, "closed log does not end");
        }
    }
}
