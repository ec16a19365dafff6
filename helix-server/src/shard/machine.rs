//! The state of a data shard behind its lock: apply changes it, and readers query it.
//! Readers see a record only after the WAL has its placement.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use helix_wal::{Placement, Wal};
use tokio::sync::{Notify, watch};

use super::groups::{self, GroupWatchers};
use super::watch::Watchers;
use crate::limits;
use crate::log::{
    BatchHead, Effects, Head, Partition, PartitionId, ProducerStamp, Refusal, ShardCommand,
    ShardState, StateLimits, Verdict, Watermarks,
};
use crate::peer::Hub;
use crate::protocol::{COMMIT_ORDER, FORGOTTEN_PRODUCERS};
use crate::raft::{Machine, to_io};
use crate::sync;

#[derive(Debug)]
pub(super) struct ShardMachine {
    wal: Wal,
    /// Source of the cluster's protocol version.
    hub: Arc<Hub>,
    inner: Mutex<Inner>,
    watchers: Arc<Watchers>,
    group_watchers: Arc<GroupWatchers>,
    /// Payload bytes applied since this replica opened.
    bytes: AtomicU64,
    /// Wakes maintenance each time that [`limits::MAINTENANCE_BYTES`] more have been applied.
    maintenance: Notify,
    /// Control entries applied since this replica opened, without those of groups.
    changes: watch::Sender<u64>,
    /// Index of the last entry applied since this replica opened. Raft's own number is later.
    applied: AtomicU64,
    /// Bytes of the last encoded state; 0 before the first.
    encoded_bytes: AtomicU64,
}

#[derive(Debug)]
struct Inner {
    state: ShardState,
    /// Reused, so that a batch allocates nothing for it.
    effects: Effects,
    /// Partitions appended to since the last round of maintenance.
    touched: HashSet<PartitionId>,
}

impl ShardMachine {
    pub(super) fn new(wal: Wal, hub: Arc<Hub>) -> Self {
        let state = ShardState::new(StateLimits::default());
        let inner = Inner { state, effects: Effects::default(), touched: HashSet::new() };
        Self {
            wal,
            hub,
            inner: Mutex::new(inner),
            watchers: Arc::default(),
            group_watchers: Arc::default(),
            bytes: AtomicU64::new(0),
            maintenance: Notify::new(),
            changes: watch::Sender::new(0),
            applied: AtomicU64::new(0),
            encoded_bytes: AtomicU64::new(0),
        }
    }

    /// Returns whether the cluster's protocol judges commits of groups by their order.
    pub(super) fn orders_commits(&self) -> bool {
        self.hub.protocol() >= COMMIT_ORDER
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        sync::lock(&self.inner)
    }

    pub(super) fn watchers(&self) -> &Arc<Watchers> {
        &self.watchers
    }

    pub(super) fn group_watchers(&self) -> &Arc<GroupWatchers> {
        &self.group_watchers
    }

    pub(super) fn watermarks(&self, partition: PartitionId) -> Option<Watermarks> {
        self.with(partition, Partition::watermarks)
    }

    pub(super) fn with<T>(
        &self,
        partition: PartitionId,
        read: impl FnOnce(&Partition) -> T,
    ) -> Option<T> {
        self.lock().state.partition(partition).map(read)
    }

    /// Returns the verdict on a batch if it no longer depends on the batch's log index.
    pub(super) fn early_verdict(&self, batch: &BatchHead) -> Option<Verdict> {
        self.lock().state.early_verdict(batch)
    }

    pub(super) fn next_sequence(
        &self,
        partition: PartitionId,
        stamp: &ProducerStamp,
    ) -> Option<u64> {
        self.lock().state.next_sequence(partition, stamp)
    }

    pub(super) fn check_owner(
        &self,
        partition: PartitionId,
        stamp: &ProducerStamp,
    ) -> Result<(), Refusal> {
        self.lock().state.check_owner(partition, stamp)
    }

    pub(super) fn has_forgotten(
        &self,
        partition: PartitionId,
        producer_id: u64,
        epoch: u32,
    ) -> bool {
        self.lock().state.has_forgotten(partition, producer_id, epoch)
    }

    pub(super) fn read_state<T>(&self, read: impl FnOnce(&ShardState) -> T) -> T {
        read(&self.lock().state)
    }

    /// Watches the number of applied control entries.
    pub(super) fn watch_changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    pub(super) fn take_touched(&self) -> HashSet<PartitionId> {
        std::mem::take(&mut self.lock().touched)
    }

    pub(super) fn applied_bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn applied(&self) -> u64 {
        self.applied.load(Ordering::Acquire)
    }

    /// Returns the size of the last checkpoint; 0 before the first.
    pub(super) fn encoded_bytes(&self) -> u64 {
        self.encoded_bytes.load(Ordering::Relaxed)
    }

    pub(super) async fn maintenance_due(&self) {
        self.maintenance.notified().await;
    }

    fn count(&self, bytes: u64) {
        let before = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        if before / limits::MAINTENANCE_BYTES != (before + bytes) / limits::MAINTENANCE_BYTES {
            self.maintenance.notify_one();
        }
    }
}

fn placement(head: &Head, verdict: &Verdict) -> Option<Placement> {
    match (head, verdict) {
        (Head::Batch(batch), Verdict::Appended { first_offset, time_us, .. }) => Some(Placement {
            stream: batch.partition.0,
            first: *first_offset,
            count: batch.record_count,
            time: *time_us,
        }),
        _ => None,
    }
}

impl Machine for ShardMachine {
    fn apply(&self, id: helix_wal::LogId, head: Option<&Head>) -> io::Result<Verdict> {
        let Some(head) = head else {
            self.wal.place(id.index, None).map_err(to_io)?;
            return Ok(Verdict::Nothing);
        };
        let mut guard = self.lock();
        let inner = &mut *guard;
        let verdict = inner.state.apply(id.index, head, &mut inner.effects);
        inner.state.set_split_term(id.index, id.term);
        self.applied.store(id.index, Ordering::Release);
        // Still under the lock, so that readers of the new watermark find the entry in the WAL.
        self.wal.place(id.index, placement(head, &verdict)).map_err(to_io)?;
        if let Head::Batch(batch) = head {
            if matches!(verdict, Verdict::Appended { .. }) {
                inner.touched.insert(batch.partition);
                self.watchers.wake(batch.partition);
            }
            self.count(u64::from(batch.payload_bytes));
            return Ok(verdict);
        }
        if let Head::Shard(ShardCommand::Group(command)) = head {
            let groups = std::mem::take(&mut inner.effects.groups);
            drop(guard);
            // Groups write no payloads, but their entries also make a checkpoint due.
            self.count(groups::logged_bytes(&command.change));
            if !groups.is_empty() {
                self.group_watchers.wake(groups);
            }
            return Ok(verdict);
        }
        for (partition, offset) in inner.effects.trimmed.drain(..) {
            self.wal.trim(partition.0, offset);
        }
        for partition in inner.effects.dropped.drain(..) {
            self.wal.drop_stream(partition.0);
            self.watchers.wake(partition);
        }
        inner.effects.clear();
        // Watchers read the state while they hold the channel's lock, so this lock goes first.
        drop(guard);
        self.changes.send_modify(|count| *count += 1);
        Ok(verdict)
    }

    fn encode(&self) -> Bytes {
        let bytes = self.read_state(|state| match self.hub.protocol() >= FORGOTTEN_PRODUCERS {
            true => state.encode(),
            false => state.encode_plain(),
        });
        self.encoded_bytes.store(bytes.len() as u64, Ordering::Relaxed);
        bytes
    }

    fn restore(&self, bytes: &[u8]) -> io::Result<()> {
        let state = decode(bytes)?;
        let groups: Vec<Arc<str>> = state.groups().iter().map(|(name, _)| name.clone()).collect();
        {
            let mut inner = self.lock();
            // The WAL does not keep trims and dropped streams over a restart, and a snapshot has
            // new ones.
            for partition in state.partitions() {
                self.wal.trim(partition.id.0, partition.log_start);
            }
            // A mark of what is clean may be all that is left of a stream.
            let marks = self.wal.clean_marks();
            let streams = self.wal.streams().into_iter().chain(marks.keys().copied());
            for stream in streams {
                // An unknown stream may be created by an entry that is not applied yet.
                let id = PartitionId(stream);
                if state.is_dropped(id) || state.is_elsewhere(id) {
                    self.wal.drop_stream(stream);
                }
            }
            inner.state = state;
        }
        // A replica that installs a snapshot may have readers of any partition.
        self.watchers.wake_all();
        self.group_watchers.wake_all(groups);
        self.changes.send_modify(|count| *count += 1);
        Ok(())
    }

    fn check(&self, bytes: &[u8]) -> io::Result<()> {
        decode(bytes).map(drop)
    }
}

fn decode(bytes: &[u8]) -> io::Result<ShardState> {
    ShardState::decode(bytes)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
}
