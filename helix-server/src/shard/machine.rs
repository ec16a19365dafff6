//! The bookkeeping of a data shard behind its lock, as apply drives it and as readers see it.
//! Readers learn of a record only after the WAL knows where it is.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use helix_wal::{Placement, Wal};
use tokio::sync::{Notify, watch};

use super::watch::Watchers;
use crate::limits;
use crate::log::{
    BatchHead, Effects, Head, Partition, PartitionId, ShardState, StateLimits, Verdict, Watermarks,
};
use crate::peer::Hub;
use crate::protocol::FORGOTTEN_PRODUCERS;
use crate::raft::{Machine, to_io};

#[derive(Debug)]
pub(super) struct ShardMachine {
    wal: Wal,
    /// Knows what the cluster speaks.
    hub: Arc<Hub>,
    inner: Mutex<Inner>,
    watchers: Arc<Watchers>,
    /// Payload bytes applied since this replica opened.
    bytes: AtomicU64,
    /// Wakes the upkeep each time that [`limits::UPKEEP_BYTES`] more have been applied.
    upkeep: Notify,
    /// Control entries applied since this replica opened.
    changes: watch::Sender<u64>,
}

#[derive(Debug)]
struct Inner {
    state: ShardState,
    /// Kept between entries, so that an ordinary batch allocates nothing for it.
    effects: Effects,
    /// Partitions appended to since upkeep asked last.
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
            bytes: AtomicU64::new(0),
            upkeep: Notify::new(),
            changes: watch::Sender::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic while it is held")
    }

    pub(super) fn watchers(&self) -> &Arc<Watchers> {
        &self.watchers
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

    /// The verdict on a batch where its place in the log does not matter any more.
    pub(super) fn foregone(&self, batch: &BatchHead) -> Option<Verdict> {
        self.lock().state.foregone(batch)
    }

    pub(super) fn next_sequence(
        &self,
        partition: PartitionId,
        producer_id: u64,
        epoch: u32,
    ) -> Option<u64> {
        self.lock().state.next_sequence(partition, producer_id, epoch)
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

    /// Follows the control entries that have been applied.
    pub(super) fn watch_changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    pub(super) fn take_touched(&self) -> HashSet<PartitionId> {
        std::mem::take(&mut self.lock().touched)
    }

    pub(super) fn applied_bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) async fn upkeep_due(&self) {
        self.upkeep.notified().await;
    }

    fn count(&self, bytes: u64) {
        let before = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        if before / limits::UPKEEP_BYTES != (before + bytes) / limits::UPKEEP_BYTES {
            self.upkeep.notify_one();
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
        // Still under the lock: whoever sees the new watermark finds the entry in the WAL.
        self.wal.place(id.index, placement(head, &verdict)).map_err(to_io)?;
        if let Head::Batch(batch) = head {
            if matches!(verdict, Verdict::Appended { .. }) {
                inner.touched.insert(batch.partition);
                self.watchers.wake(batch.partition);
            }
            self.count(u64::from(batch.payload_bytes));
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
        // Who follows the changes looks at the state while it holds the channel's own lock.
        drop(guard);
        self.changes.send_modify(|count| *count += 1);
        Ok(verdict)
    }

    fn encode(&self) -> Bytes {
        let state = &self.lock().state;
        if self.hub.protocol() >= FORGOTTEN_PRODUCERS {
            state.encode()
        } else {
            state.encode_plain()
        }
    }

    fn restore(&self, bytes: &[u8]) -> io::Result<()> {
        let state = decode(bytes)?;
        {
            let mut inner = self.lock();
            // The WAL forgets trims and dropped streams at a restart, and a snapshot brings others:
            // their owner tells them again.
            for partition in state.partitions() {
                self.wal.trim(partition.id.0, partition.log_start);
            }
            for stream in self.wal.streams() {
                // One that the state does not know may be created by an entry still to be applied.
                if state.is_dropped(PartitionId(stream)) {
                    self.wal.drop_stream(stream);
                }
            }
            inner.state = state;
        }
        // A replica that takes a snapshot has readers: any partition may have moved.
        self.watchers.wake_all();
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
