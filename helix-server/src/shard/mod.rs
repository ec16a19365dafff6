//! One shard as this node has it: a replicated log that is home to many partitions.
//! Append, read, wait, trim, status; `append.rs` and `read.rs` hold the two ways of a record.

mod append;
mod machine;
mod read;
mod upkeep;
mod watch;

use std::io;
use std::sync::{Arc, OnceLock, Weak};

use bytes::Bytes;
use helix_wal::Wal;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::error::{Error, LeaderHint, Result};
use crate::limits;
use crate::log::{Head, PartitionId, ShardCommand, ShardState, Verdict, Watermarks};
use crate::peer::Solitary;
use crate::raft::{Command, DiskReads, Replica, ReplicaId, ReplicaSettings};

pub use append::{Ack, Durability, NewBatch, Pending, Permit};
use machine::ShardMachine;
pub use read::{Read, ReadBatch};
pub use watch::{WatchGuard, Watcher};

/// What a shard is opened with.
#[derive(Debug)]
pub struct ShardSettings {
    pub shard_id: u64,
    pub replica_id: ReplicaId,
    /// Where clients reach this node; goes into leader hints.
    pub node_id: u64,
    pub endpoint: Arc<OnceLock<String>>,
    pub wal: Wal,
    /// As recovered by the WAL.
    pub checkpoint: Option<(helix_wal::LogId, Bytes)>,
    pub reads: DiskReads,
    /// Whether acknowledged batches are on stable storage.
    pub durable: bool,
    pub clock: Arc<dyn Clock>,
    /// Cancelled when the node shuts down.
    pub draining: CancellationToken,
}

/// A shard. Held by the node; everybody else borrows it for a call.
#[derive(Debug)]
pub struct Shard {
    this: Weak<Shard>,
    shard_id: u64,
    replica_id: ReplicaId,
    node_id: u64,
    endpoint: Arc<OnceLock<String>>,
    replica: Replica,
    machine: Arc<ShardMachine>,
    wal: Wal,
    reads: DiskReads,
    permits: Arc<Semaphore>,
    durable: bool,
    clock: Arc<dyn Clock>,
    draining: CancellationToken,
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
    /// Bytes of the frames above the log starts.
    pub live_bytes: u64,
    pub wal: helix_wal::Stats,
}

impl Shard {
    /// Recovers the shard and starts its replica and its upkeep.
    pub async fn open(settings: ShardSettings) -> io::Result<Arc<Self>> {
        let machine = Arc::new(ShardMachine::new(settings.wal.clone()));
        let replica = Replica::open(
            ReplicaSettings {
                shard_id: settings.shard_id,
                replica_id: settings.replica_id,
                wal: settings.wal.clone(),
                reads: settings.reads.clone(),
                machine: machine.clone(),
                checkpoint: settings.checkpoint,
            },
            Solitary,
        )
        .await?;
        replica.form_alone().await?;
        let shard = Arc::new_cyclic(|this| Self {
            this: this.clone(),
            shard_id: settings.shard_id,
            replica_id: settings.replica_id,
            node_id: settings.node_id,
            endpoint: settings.endpoint,
            replica,
            machine,
            wal: settings.wal,
            reads: settings.reads,
            permits: Arc::new(Semaphore::new(limits::SHARD_BYTES_IN_FLIGHT_MAX)),
            durable: settings.durable,
            clock: settings.clock,
            draining: settings.draining,
        });
        tokio::spawn(upkeep::run(shard.clone()));
        Ok(shard)
    }

    pub fn id(&self) -> u64 {
        self.shard_id
    }

    pub fn is_durable(&self) -> bool {
        self.durable
    }

    /// Where the leader is; `None` while there is none.
    pub fn leader_hint(&self) -> Option<LeaderHint> {
        let leadership = self.replica.leadership();
        let node_id = leadership.leader? >> 32;
        let endpoint = if node_id == self.node_id {
            self.endpoint.get().cloned().unwrap_or_default()
        } else {
            String::new()
        };
        Some(LeaderHint { node_id, endpoint, term: leadership.term })
    }

    /// Nodes that have a replica of this shard.
    pub fn replicas(&self) -> Vec<u64> {
        vec![self.node_id]
    }

    /// Why appends are refused now, if they are.
    pub fn unwell(&self) -> Option<Error> {
        match self.wal.writable() {
            Ok(()) => None,
            Err(error @ helix_wal::Error::DiskFull { .. }) => {
                Some(Error::DiskFull { what: error.to_string() })
            }
            Err(error) => {
                Some(Error::StorageFailed { what: error.to_string(), may_have_applied: false })
            }
        }
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

    /// Proposes a control entry and waits until it is applied.
    pub async fn command(&self, command: ShardCommand) -> Result<()> {
        let command = Command::control(Head::Shard(command));
        let outcome =
            self.replica.propose(command, None).await.map_err(|error| self.propose_error(error))?;
        match tokio::time::timeout(limits::COMMIT_WAIT_MAX, outcome).await {
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
        let state = self.wal.state();
        let partitions: Vec<PartitionId> =
            self.machine.read_state(|state| state.partitions().map(|p| p.id).collect());
        ShardStatus {
            synced: state.synced.map_or(0, |id| id.index),
            purged: state.purged.map_or(0, |id| id.index),
            partition_count: u32::try_from(partitions.len()).unwrap_or(u32::MAX),
            live_bytes: partitions.iter().map(|id| self.partition_bytes(*id).0).sum(),
            shard_id: self.shard_id,
            leader: status.leads,
            term: status.term,
            last_index: status.last_index,
            committed: status.committed,
            applied: status.applied,
            wal: self.wal.stats(),
        }
    }

    /// Stops the replica and closes the log, which syncs what it still holds.
    pub async fn close(&self) {
        self.replica.close().await;
    }
}
