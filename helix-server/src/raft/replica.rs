//! One replica of one shard: openraft over the WAL, as the rest of the server sees it.
//! Proposals keep the order of the calls; everything else is bookkeeping around them.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use helix_wal::{Aside, Scrub, Wal};
use openraft::alias::WatchReceiverOf;
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{ClientWriteError, RaftError};
use openraft::metrics::RaftServerMetrics;
use openraft::network::RaftNetworkFactory;
use openraft::raft::ClientWriteResponse;
use openraft::{Config, Raft, RaftState, ReadPolicy, SnapshotPolicy};
use openraft_rt::Instant as _;
use openraft_rt_tokio::TokioInstant;
use tokio::sync::{oneshot, watch};

use super::blocking::DiskReads;
use super::gate::Gate;
use super::staging::{RecordStore, Staging};
use super::state_machine::{Machine, StateMachine};
use super::types::{Command, Held, ReplicaId, Reply, TypeConfig, node_of};
use super::{LogStore, SnapshotData};
use crate::limits;
use crate::log::Verdict;
use crate::metrics::Counter;

/// What a replica is made of.
#[derive(Debug)]
pub struct ReplicaSettings {
    pub shard_id: u64,
    pub replica_id: ReplicaId,
    pub wal: Wal,
    pub reads: DiskReads,
    pub machine: Arc<dyn Machine>,
    /// As recovered by the WAL.
    pub checkpoint: Option<(helix_wal::LogId, Bytes)>,
    /// Whether the entries carry records, which a snapshot leaves out.
    pub has_records: bool,
    /// The log that this one takes the place of, and may lack something of that was acknowledged:
    /// the replica neither votes nor stands for election until [`Replica::rejoin`].
    pub repair_of: Option<Aside>,
}

/// Who leads, as far as this replica knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Leadership {
    pub leader: Option<ReplicaId>,
    pub term: u64,
}

/// Follows who leads.
pub struct LeadershipWatch(WatchReceiverOf<TypeConfig, RaftServerMetrics<TypeConfig>>);

impl LeadershipWatch {
    /// Waits for a change since the last call; `false` when there will be none any more.
    pub async fn changed(&mut self) -> bool {
        self.0.changed().await.is_ok()
    }
}

/// Figures of a replica.
#[derive(Debug, Clone)]
pub struct ReplicaStatus {
    pub leads: bool,
    pub term: u64,
    pub last_index: u64,
    pub synced: u64,
    pub committed: u64,
    pub applied: u64,
    pub purged: u64,
    pub wal: helix_wal::Stats,
}

/// How often a log that is being closed is looked at.
const END_LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// ... and for how long: its last sync is over by then.
const END_WAIT_MAX: Duration = Duration::from_secs(5);

/// How a replica stands in its shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stance {
    pub role: Role,
    /// Index of its last entry.
    pub last_index: u64,
}

/// What a replica takes itself and the others for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Role {
    /// Of its vote.
    pub term: u64,
    pub leads: bool,
    /// Replicas that vote: by the membership in force, or by the one before it while that may yet
    /// come back.
    pub voters: BTreeSet<ReplicaId>,
    /// They are a single set of voters, which nothing can take back.
    pub is_settled: bool,
}

/// Why a proposal has no verdict.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    #[error("not the leader")]
    NotLeader { leader: Option<ReplicaId> },
    /// Accepted, and then openraft stopped.
    #[error("{0}")]
    Unknown(String),
    /// Never accepted.
    #[error("{0}")]
    Stopped(String),
}

/// Why leadership was not handed over, or may not have been.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandOverError {
    #[error("no such replica can be reached")]
    NoTarget,
    #[error("{0}")]
    Unknown(String),
}

type Written = Result<ClientWriteResponse<TypeConfig>, ClientWriteError<TypeConfig>>;

/// The verdict on a proposal, once apply has come to it.
#[derive(Debug)]
pub struct Outcome(oneshot::Receiver<Written>);

impl Future for Outcome {
    type Output = Result<Verdict, ProposeError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map(|received| match received {
            Ok(Ok(response)) => Ok(response.data),
            Ok(Err(ClientWriteError::ForwardToLeader(forward))) => {
                Err(ProposeError::NotLeader { leader: forward.leader_id })
            }
            // It was in this log and is not any more: another leader's entries, or a snapshot,
            // stand in its place.
            Ok(Err(ClientWriteError::LogEntryDiscarded(_))) => {
                Err(ProposeError::Unknown("another leader took over".to_owned()))
            }
            Ok(Err(other)) => Err(ProposeError::Stopped(other.to_string())),
            Err(_) => Err(ProposeError::Unknown("the shard stopped".to_owned())),
        })
    }
}

#[derive(Debug)]
pub struct Replica {
    id: ReplicaId,
    raft: Raft<TypeConfig, StateMachine>,
    wal: Wal,
    reads: DiskReads,
    applied_term: watch::Receiver<u64>,
    machine: Arc<dyn Machine>,
    records: Option<RecordStore>,
    gate: Arc<Gate>,
    repair_of: Option<Aside>,
    /// The last term whose lead was handed over from here, or was to be.
    handed_over: AtomicU64,
    /// Why openraft has stopped, once it has.
    stopped: watch::Receiver<Option<String>>,
    /// Leaders that came after another, as far as this replica saw.
    leader_changes: Arc<Counter>,
}

fn config(shard_id: u64) -> Config {
    Config {
        cluster_name: format!("shard-{shard_id}"),
        heartbeat_interval: 100,
        election_timeout_min: 300,
        election_timeout_max: 600,
        enable_pre_vote: Some(true),
        // A restarted leader is elected anew, so that its state machine has caught up by then.
        enable_leader_restore: Some(false),
        max_payload_entries: 1024,
        max_append_entries: Some(1024),
        // Checkpoints are triggered by their owner, by bytes, and so is each purge: what other
        // replicas still need is not openraft's to know.
        snapshot_policy: SnapshotPolicy::Never,
        max_in_snapshot_log_to_keep: u64::MAX,
        api_channel_size: Some(1024),
        install_snapshot_timeout: 5_000,
        ..Config::default()
    }
}

impl Replica {
    /// Recovers the state machine, joins it with the log, and starts openraft.
    pub async fn open<N>(settings: ReplicaSettings, network: N) -> io::Result<Self>
    where
        N: RaftNetworkFactory<TypeConfig>,
        N::Network: openraft::network::NetSnapshot<TypeConfig, SnapshotData = SnapshotData>,
    {
        let ReplicaSettings { shard_id, replica_id, wal, reads, machine, checkpoint, .. } =
            settings;
        let (has_records, repair_of) = (settings.has_records, settings.repair_of);
        let mut store = LogStore::new(wal.clone(), reads.clone());
        let records = has_records.then(|| RecordStore {
            wal: wal.clone(),
            reads: reads.clone(),
            staging: Staging::default(),
        });
        let recovering = StateMachine::recover(
            machine.clone(),
            wal.clone(),
            reads.clone(),
            checkpoint,
            &mut store,
        );
        let mut applying = recovering.await?;
        if let Some(records) = &records {
            applying = applying.with_records(records.staging.clone());
        }
        let applied_term = applying.watch_term();
        let config = Config { enable_elect: repair_of.is_none(), ..config(shard_id) };
        let config = config.validate().map_err(io::Error::other)?;
        let raft = Raft::new(replica_id, Arc::new(config), network, store, applying)
            .await
            .map_err(io::Error::other)?;
        let gate = Arc::new(if repair_of.is_some() { Gate::shut() } else { Gate::default() });
        let (stopping, stopped) = watch::channel(None);
        let leader_changes = Arc::<Counter>::default();
        let (server, all) = (raft.server_metrics(), raft.metrics());
        tokio::spawn(attend(server, all, leader_changes.clone(), stopping));
        Ok(Self {
            id: replica_id,
            raft,
            wal,
            reads,
            applied_term,
            machine,
            records,
            gate,
            repair_of,
            handed_over: AtomicU64::new(0),
            stopped,
            leader_changes,
        })
    }

    /// The log that this replica's takes the place of, for as long as it may lack something of it.
    pub fn repair_of(&self) -> Option<&Aside> {
        self.repair_of.as_ref().filter(|_| !self.gate.is_open())
    }

    /// What of the log was found damaged, in words.
    pub fn damage(&self) -> Vec<String> {
        self.reads.damage()
    }

    /// To read the log anew, and to note what is found.
    pub fn scrub(&self) -> (Scrub, DiskReads) {
        (self.wal.scrub(), self.reads.clone())
    }

    pub fn leader_changes(&self) -> u64 {
        self.leader_changes.get()
    }

    /// What it takes from others.
    pub fn gate(&self) -> Arc<Gate> {
        self.gate.clone()
    }

    /// Says that the log lacks nothing of what this replica once acknowledged: it votes from now
    /// on, and may be elected.
    pub fn rejoin(&self) {
        self.gate.open();
        self.raft.runtime_config().elect(true);
    }

    /// Lets another replica, which has lost what it acknowledged, begin anew: without it openraft
    /// takes that for a broken promise. For the leader.
    pub async fn let_begin_anew(&self, id: ReplicaId) {
        // Ignored: it is asked for again until the replica has begun.
        let _ = self.raft.trigger().allow_next_revert(&id, true).await;
    }

    /// Why openraft has stopped, if it has: it does so for good.
    pub fn stopped(&self) -> Option<String> {
        self.stopped.borrow().clone()
    }

    /// Waits until [`Self::stopped`] has its reason.
    pub async fn wait_stopped(&self) {
        // Ignored: whoever notes the reason does so before it ends.
        let _ = self.stopped.clone().wait_for(Option::is_some).await;
    }

    /// For the peers' room, which hands it what other replicas send.
    pub fn raft(&self) -> Raft<TypeConfig, StateMachine> {
        self.raft.clone()
    }

    /// For the peers' room, which asks it whether it can read a snapshot.
    pub fn machine(&self) -> Arc<dyn Machine> {
        self.machine.clone()
    }

    /// For the peers' room, which copies records from one replica to another.
    pub fn records(&self) -> Option<RecordStore> {
        self.records.clone()
    }

    pub fn id(&self) -> ReplicaId {
        self.id
    }

    /// The replica's log, for those who look at what is stored.
    pub fn wal(&self) -> &Wal {
        &self.wal
    }

    /// Whether the shard has been formed, as far as this replica knows.
    pub async fn is_formed(&self) -> io::Result<bool> {
        self.raft.is_initialized().await.map_err(io::Error::other)
    }

    /// Makes a new shard of these replicas; without effect where the shard exists. Any of them
    /// may do so, also several: they all begin with the same entry.
    pub async fn form(&self, members: BTreeSet<ReplicaId>) -> io::Result<()> {
        if self.is_formed().await? {
            return Ok(());
        }
        match self.raft.initialize(members).await {
            Ok(()) => Ok(()),
            Err(RaftError::APIError(openraft::errors::InitializeError::NotAllowed(_))) => Ok(()),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    /// Stands for election at once. A single voter need not wait for anybody to notice that it
    /// is back.
    pub async fn elect(&self) -> io::Result<()> {
        self.raft.trigger().elect(false).await.map_err(io::Error::other)
    }

    /// Hands a command to the log. Commands are logged in the order in which this returns; those
    /// that wait together are appended and synced together.
    pub async fn propose(
        &self,
        mut command: Command,
        held: Option<Arc<Held>>,
    ) -> Result<Outcome, ProposeError> {
        let (reply, receiver) = Reply::new(held.clone());
        command.held = held;
        self.raft
            .write(command)
            .responder(reply)
            .await
            .map_err(|fatal| ProposeError::Stopped(fatal.to_string()))?;
        Ok(Outcome(receiver))
    }

    /// Replicas that vote, in the order of their ids.
    pub fn voters(&self) -> Vec<ReplicaId> {
        let metrics = self.raft.server_metrics();
        let metrics = metrics.borrow_watched();
        let voters: BTreeSet<_> = metrics.membership_config.membership().voter_ids().collect();
        voters.into_iter().collect()
    }

    /// Follows [`Self::leadership`].
    pub fn watch_leadership(&self) -> LeadershipWatch {
        LeadershipWatch(self.raft.server_metrics())
    }

    /// How far each other replica's log is known to match. Empty where this one does not lead.
    pub fn matched(&self) -> BTreeMap<ReplicaId, u64> {
        let data = self.raft.data_metrics();
        let data = data.borrow_watched();
        let replication = data.replication.iter().flatten();
        let others = replication.filter(|(id, _)| **id != self.id);
        others.map(|(id, matched)| (*id, matched.map_or(0, |id| id.index))).collect()
    }

    /// How long ago a majority last confirmed that this replica leads: `None` where it does not
    /// lead or never was confirmed.
    pub fn confirmed_ago(&self) -> Option<Duration> {
        let data = self.raft.data_metrics();
        let data = data.borrow_watched();
        data.last_quorum_acked
            .map(|at| TokioInstant::now().saturating_duration_since(at.into_inner()))
    }

    /// Whether a majority has confirmed so lately that this replica leads that no other one leads
    /// yet, unless clocks mislead: those who confirmed it vote for nobody for an election timeout.
    /// Not so once it has asked another to take over, for which they do.
    pub fn is_confirmed(&self) -> bool {
        // First: what is known of the lead below is not older.
        let ago = self.confirmed_ago();
        let metrics = self.raft.server_metrics();
        let metrics = metrics.borrow_watched();
        if self.handed_over.load(Ordering::Relaxed) == metrics.vote.leader_id.term {
            return false;
        }
        let voters = metrics.membership_config.membership().get_joint_config();
        let is_alone =
            matches!(voters.as_slice(), [only] if only.len() == 1 && only.contains(&self.id));
        is_alone || ago.is_some_and(|ago| ago < limits::CONFIRMED_FOR)
    }

    pub fn leads(&self) -> bool {
        self.leadership().leader == Some(self.id)
    }

    /// Hands leadership to the replica on `node`, or to the one on a `reached` node that is most
    /// caught up, and waits until this one does not lead any more. Proposals are refused until
    /// the other leads, or its silence has lasted an election timeout.
    pub async fn hand_over(&self, node: Option<u64>, reached: &[u64]) -> Result<(), HandOverError> {
        let voters = self.voters();
        let to = match node {
            Some(node) => voters.into_iter().find(|id| node_of(*id) == node),
            None => {
                let matched = self.matched().into_iter();
                let live = matched
                    .filter(|(id, _)| voters.contains(id) && reached.contains(&node_of(*id)));
                live.max_by_key(|(_, index)| *index).map(|(id, _)| id)
            }
        };
        let to = to.ok_or(HandOverError::NoTarget)?;
        if to == self.id {
            return Ok(());
        }
        let mut leadership = self.watch_leadership();
        // Before it is asked for. It is not given up again within a term.
        self.handed_over.store(self.leadership().term, Ordering::Relaxed);
        let handing = self.raft.trigger().transfer_leader(to).await;
        handing.map_err(|fatal| HandOverError::Unknown(fatal.to_string()))?;
        let gone = async { while self.leads() && leadership.changed().await {} };
        tokio::time::timeout(limits::TRANSFER_WAIT_MAX, gone).await.map_err(|_| {
            HandOverError::Unknown(format!("node {} did not take over in time", node_of(to)))
        })
    }

    /// Index of the last checkpoint on disk, and up to which the log is purged.
    pub fn checkpointed(&self) -> (u64, u64) {
        let data = self.raft.data_metrics();
        let data = data.borrow_watched();
        let index = |id: Option<super::types::LogId>| id.map_or(0, |id| id.index);
        (index(data.snapshot), index(data.purged))
    }

    /// Index of the last entry that was applied.
    pub fn applied(&self) -> u64 {
        self.raft.data_metrics().borrow_watched().last_applied.map_or(0, |id| id.index)
    }

    /// Purges the log up to this index, or the last checkpoint if that is lower.
    pub async fn purge(&self, upto: u64) {
        // Ignored: it fails only when openraft has stopped, which is reported elsewhere.
        let _ = self.raft.trigger().purge_log(upto).await;
    }

    pub fn leadership(&self) -> Leadership {
        let metrics = self.raft.server_metrics();
        let metrics = metrics.borrow_watched();
        // What it said last is not true any more.
        let leader = metrics.current_leader.filter(|_| self.stopped.borrow().is_none());
        Leadership { leader, term: metrics.vote.leader_id.term }
    }

    /// Whether this replica leads and has applied the first entry of its own term: from then on
    /// it has applied everything that any earlier leader may have acknowledged.
    pub fn is_ready(&self) -> bool {
        let leadership = self.leadership();
        leadership.leader == Some(self.id) && *self.applied_term.borrow() == leadership.term
    }

    /// Waits until [`Self::is_ready`]; `false` when that takes longer than `wait`, and at once
    /// where another replica leads.
    pub async fn wait_ready(&self, wait: Duration) -> bool {
        if self.is_ready() {
            return true;
        }
        let mut metrics = self.raft.server_metrics();
        let mut applied_term = self.applied_term.clone();
        let ready = async {
            while !self.is_ready() {
                if self.leadership().leader.is_some_and(|leader| leader != self.id) {
                    return false;
                }
                let changed = tokio::select! {
                    biased;
                    changed = metrics.changed() => changed.is_ok(),
                    changed = applied_term.changed() => changed.is_ok(),
                };
                if !changed {
                    return false;
                }
            }
            true
        };
        tokio::time::timeout(wait, ready).await.unwrap_or(false)
    }

    /// Waits until everything that was committed anywhere before the call is applied here.
    pub async fn read_index(&self) -> Result<(), ProposeError> {
        let linearizer = self.raft.get_read_linearizer(ReadPolicy::ReadIndex).await;
        let linearizer = linearizer.map_err(|error| match error {
            RaftError::APIError(openraft::errors::LinearizableReadError::ForwardToLeader(f)) => {
                ProposeError::NotLeader { leader: f.leader_id }
            }
            // No majority confirms it: somebody else may lead by now.
            RaftError::APIError(openraft::errors::LinearizableReadError::QuorumNotEnough(_)) => {
                ProposeError::NotLeader { leader: None }
            }
            other => ProposeError::Stopped(other.to_string()),
        })?;
        linearizer
            .await_ready(&self.raft)
            .await
            .map(drop)
            .map_err(|fatal| ProposeError::Stopped(fatal.to_string()))
    }

    /// Asks for a checkpoint, after which the log may be purged up to it.
    pub async fn checkpoint(&self) {
        // Ignored: it fails only when openraft has stopped, which is reported elsewhere.
        let _ = self.raft.trigger().snapshot().await;
    }

    /// As openraft's core has it now, not as it was said last. `None` once that has stopped, or
    /// while it changes.
    pub async fn stance(&self) -> Option<Stance> {
        let role = self.role().await?;
        let last_index = self.wal.state().last.map_or(0, |id| id.index);
        // The same before and after: what a leader's log ends with is read while it leads.
        let is_same = self.role().await? == role;
        is_same.then_some(Stance { role, last_index })
    }

    async fn role(&self) -> Option<Role> {
        let id = self.id;
        let role = move |state: &RaftState<TypeConfig>| {
            let vote = state.vote_ref();
            let committed = state.membership_state.committed();
            let in_force = state.membership_state.effective();
            Role {
                term: vote.leader_id.term,
                leads: vote.committed && vote.leader_id.voted_for == id,
                voters: committed.voter_ids().chain(in_force.voter_ids()).collect(),
                is_settled: in_force.log_id() == committed.log_id()
                    && in_force.membership().get_joint_config().len() == 1,
            }
        };
        self.raft.with_raft_state(role).await.ok()
    }

    /// Who this replica follows as a leader that a majority has elected, and in which term.
    pub fn follows(&self) -> Option<(ReplicaId, u64)> {
        let metrics = self.raft.server_metrics();
        let vote = metrics.borrow_watched().vote;
        vote.committed.then_some((vote.leader_id.voted_for, vote.leader_id.term))
    }

    pub fn status(&self) -> ReplicaStatus {
        let leadership = self.leadership();
        let data = self.raft.data_metrics();
        let data = data.borrow_watched();
        let state = self.wal.state();
        let index = |id: Option<helix_wal::LogId>| id.map_or(0, |id| id.index);
        ReplicaStatus {
            leads: leadership.leader == Some(self.id),
            term: leadership.term,
            last_index: index(state.last),
            synced: index(state.synced),
            committed: index(state.committed),
            purged: index(state.purged),
            wal: self.wal.stats(),
            applied: data.last_applied.map_or(0, |id| id.index),
        }
    }

    /// Stops openraft, then the log, which syncs what it still holds. Afterwards the folder is free
    /// for whoever opens it next, unless the disk takes longer than [`limits::SHUTDOWN_WAIT_MAX`]:
    /// what was acknowledged as synced is on it by then, and a stop must not wait for ever.
    pub async fn close(&self) {
        if let Err(error) = self.raft.shutdown().await {
            tracing::warn!(%error, "raft did not stop cleanly");
        }
        let wal = self.wal.clone();
        let closing = self.reads.wait(move || wal.close());
        // A failure is ignored: the blocking pool is gone only when the process is.
        if tokio::time::timeout(limits::SHUTDOWN_WAIT_MAX, closing).await.is_err() {
            let waited = limits::SHUTDOWN_WAIT_MAX;
            tracing::error!(
                wal = ?self.wal, ?waited,
                "the disk does not finish the last sync of a log, which is left without it"
            );
            return;
        }
        // Threads have ended by now; a simulation's tasks have yet to be run.
        let ended = async {
            while !self.wal.has_ended() {
                tokio::time::sleep(END_LOOK_INTERVAL).await;
            }
        };
        if tokio::time::timeout(END_WAIT_MAX, ended).await.is_err() {
            tracing::error!(wal = ?self.wal, "a log that was closed does not end");
        }
    }
}

/// Counts the leaders that come after another, and notes why openraft stopped, also where it did so
/// by a panic.
async fn attend(
    mut server: WatchReceiverOf<TypeConfig, RaftServerMetrics<TypeConfig>>,
    all: WatchReceiverOf<TypeConfig, openraft::RaftMetrics<TypeConfig>>,
    leader_changes: Arc<Counter>,
    stopped: watch::Sender<Option<String>>,
) {
    let mut seen = None;
    loop {
        {
            let metrics = server.borrow_watched();
            if let Some(leader) = metrics.current_leader {
                let now = (metrics.vote.leader_id.term, leader);
                if seen.replace(now).is_some_and(|before| before != now) {
                    leader_changes.add(1);
                }
            }
        }
        if server.changed().await.is_err() {
            break;
        }
    }
    let failure = all.borrow_watched().running_state.as_ref().err().map(ToString::to_string);
    stopped.send_replace(Some(failure.unwrap_or_else(|| "it panicked".to_owned())));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_confirmation_is_over_before_those_who_gave_it_elect_another() {
        let lease = Duration::from_millis(config(1).election_timeout_max);
        assert!(limits::CONFIRMED_FOR * 6 / 5 <= lease, "clocks may differ by a fifth");
    }
}
