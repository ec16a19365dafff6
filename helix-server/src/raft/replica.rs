//! One replica of one shard: openraft over the WAL, as the rest of the server sees it.
//! Proposals keep the order of the calls; everything else is bookkeeping around them.

use std::collections::BTreeSet;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use helix_wal::Wal;
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{ClientWriteError, RaftError};
use openraft::network::RaftNetworkFactory;
use openraft::raft::ClientWriteResponse;
use openraft::{Config, Raft, ReadPolicy, SnapshotPolicy};
use tokio::sync::{oneshot, watch};

use super::blocking::DiskReads;
use super::state_machine::{Machine, StateMachine};
use super::types::{Command, Held, ReplicaId, Reply, TypeConfig};
use super::{LogStore, SnapshotData};
use crate::log::Verdict;

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
}

/// Who leads, as far as this replica knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Leadership {
    pub leader: Option<ReplicaId>,
    pub term: u64,
}

/// Figures of a replica.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReplicaStatus {
    pub leads: bool,
    pub term: u64,
    pub last_index: u64,
    pub committed: u64,
    pub applied: u64,
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
        // Checkpoints are triggered by `shard`, by bytes; each allows a purge up to itself.
        snapshot_policy: SnapshotPolicy::Never,
        max_in_snapshot_log_to_keep: 0,
        purge_batch_size: 1,
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
        let ReplicaSettings { shard_id, replica_id, wal, reads, machine, checkpoint } = settings;
        let mut store = LogStore::new(wal.clone(), reads.clone());
        let machine =
            StateMachine::recover(machine, wal.clone(), reads.clone(), checkpoint, &mut store)
                .await?;
        let applied_term = machine.watch_term();
        let config = config(shard_id).validate().map_err(io::Error::other)?;
        let raft = Raft::new(replica_id, Arc::new(config), network, store, machine)
            .await
            .map_err(io::Error::other)?;
        Ok(Self { id: replica_id, raft, wal, reads, applied_term })
    }

    /// Makes a new shard of this replica alone; without effect where the shard exists.
    pub async fn form_alone(&self) -> io::Result<()> {
        if self.raft.is_initialized().await.map_err(io::Error::other)? {
            // A single voter need not wait for anybody to notice that it is back.
            return self.raft.trigger().elect(false).await.map_err(io::Error::other);
        }
        match self.raft.initialize(BTreeSet::from([self.id])).await {
            Ok(()) => Ok(()),
            Err(RaftError::APIError(openraft::errors::InitializeError::NotAllowed(_))) => Ok(()),
            Err(error) => Err(io::Error::other(error)),
        }
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

    pub fn leadership(&self) -> Leadership {
        let metrics = self.raft.server_metrics();
        let metrics = metrics.borrow_watched();
        Leadership { leader: metrics.current_leader, term: metrics.vote.leader_id.term }
    }

    /// Whether this replica leads and has applied the first entry of its own term: from then on
    /// it has applied everything that any earlier leader may have acknowledged.
    pub fn is_ready(&self) -> bool {
        let leadership = self.leadership();
        leadership.leader == Some(self.id) && *self.applied_term.borrow() == leadership.term
    }

    /// Waits until [`Self::is_ready`]; `false` when that takes longer than `wait`.
    pub async fn wait_ready(&self, wait: Duration) -> bool {
        if self.is_ready() {
            return true;
        }
        let mut metrics = self.raft.server_metrics();
        let mut applied_term = self.applied_term.clone();
        let ready = async {
            while !self.is_ready() {
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
            committed: index(state.committed),
            applied: data.last_applied.map_or(0, |id| id.index),
        }
    }

    /// Stops openraft, then the log, which syncs what it still holds.
    pub async fn close(&self) {
        if let Err(error) = self.raft.shutdown().await {
            tracing::warn!(%error, "raft did not stop cleanly");
        }
        let wal = self.wal.clone();
        // Ignored: the blocking pool is gone only when the process is.
        let _ = self.reads.wait(move || wal.close()).await;
    }
}
