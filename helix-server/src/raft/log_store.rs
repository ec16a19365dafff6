//! The log storage of openraft over the WAL: one queue for entries, votes and truncations.
//! Appends return at once, and the WAL's writer notifies openraft when they are durable.

use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds, RangeInclusive};
use std::sync::Arc;

use futures_util::{Stream, StreamExt, stream};
use helix_wal::{Error, GroupStamp, ReadMode, Wal};
use openraft::storage::{IOFlushed, LogState, RaftLogStorage};
use openraft::{EntryPayload, OptionalSend, RaftLogReader};
use tokio::sync::oneshot;

use super::blocking::DiskReads;
use super::codec;
use super::runtime::Yield;
use super::stamped_entries::StampedEntries;
use super::types::{RaftEntry, RaftLogId, TypeConfig, Vote};
use crate::stages::BatchStamps;

/// Largest read of payload bytes for one append to a follower.
const READ_BYTES_MAX: usize = 1 << 20;

/// Largest such read from the disk, for a follower that catches up.
/// Small, because a sync waits for the read that is at the device.
const COLD_READ_BYTES_MAX: usize = 512 << 10;

/// Heads per read for apply. openraft responds to clients while it streams them, so the limit only
/// bounds memory.
const HEADS_PER_READ: usize = 1024;

/// Cheap handle to the log of a replica. openraft clones it for its readers.
#[derive(Debug, Clone)]
pub struct LogStore {
    wal: Wal,
    reads: DiskReads,
    /// True for a log in memory, where an append is complete when it returns.
    completes_at_once: bool,
    /// Last entry that the state machine has before openraft starts.
    recovered: Option<u64>,
    last_group: Arc<GroupStamp>,
    /// Entries with stamps that are not committed yet; `None` in the clones that only read.
    stamped: Option<Arc<StampedEntries>>,
}

impl LogStore {
    pub fn new(wal: Wal, reads: DiskReads) -> Self {
        let completes_at_once = wal.is_memory();
        let (last_group, stamped) = (wal.last_group(), Some(Arc::default()));
        Self { wal, reads, completes_at_once, recovered: None, last_group, stamped }
    }

    /// States the last entry that the state machine has. A start then reads no entry up to it.
    pub(super) fn set_recovered(&mut self, applied: Option<u64>) {
        self.recovered = applied;
    }

    /// Returns whether openraft asks for this range only to learn the id of the first entry. Every
    /// start does, also where a checkpoint covers the entry.
    fn is_first_id(&self, start: u64, end: u64) -> bool {
        let is_covered = self.recovered.is_some_and(|applied| start <= applied);
        is_covered && start == self.wal.first_index() && end == start + 1
    }

    async fn entries(&self, start: u64, end: u64) -> io::Result<Vec<RaftEntry>> {
        let wal = self.wal.clone();
        let read = move |how: ReadMode| {
            let bytes_max =
                if how == ReadMode::MemoryOnly { READ_BYTES_MAX } else { COLD_READ_BYTES_MAX };
            wal.read(start..end, bytes_max, how)
        };
        let entries = self.reads.run_patiently(read, true).await.map_err(to_io)?;
        entries.into_iter().map(codec::from_wal).collect()
    }

    async fn heads(&self, start: u64, end: u64) -> io::Result<Vec<RaftEntry>> {
        let wal = self.wal.clone();
        let read = move |how: ReadMode| wal.heads(start..end, HEADS_PER_READ, how);
        let entries = self.reads.run_patiently(read, false).await.map_err(to_io)?;
        entries.into_iter().map(codec::from_wal).collect()
    }

    #[cold]
    fn on_stamped(&self, index: u64, stamps: &Arc<BatchStamps>) {
        stamps.stamp_logged();
        if let Some(stamped) = &self.stamped {
            stamped.add(index, stamps.clone());
        }
    }

    async fn log_id(&self, index: u64) -> io::Result<Option<RaftLogId>> {
        let wal = self.wal.clone();
        let read = move |how: ReadMode| wal.log_id(index, how);
        let found = self.reads.run_patiently(read, false).await.map_err(to_io)?;
        Ok(found.map(codec::raft_id))
    }

    /// Limits `range` to the entries of the log.
    fn clamp<RB: RangeBounds<u64>>(&self, range: &RB) -> (u64, u64) {
        let state = self.wal.state();
        let first = self.wal.first_index();
        let end = state.last.map_or(0, |id| id.index + 1);
        let asked_start = match range.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(start) => start.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let asked_end = match range.end_bound() {
            Bound::Included(last) => last.saturating_add(1),
            Bound::Excluded(end) => *end,
            Bound::Unbounded => u64::MAX,
        };
        (asked_start.max(first), asked_end.min(end))
    }
}

pub(crate) fn to_io(error: Error) -> io::Error {
    let kind = match error {
        Error::DiskFull { .. } => io::ErrorKind::StorageFull,
        Error::Exhausted { .. } => io::ErrorKind::ResourceBusy,
        Error::Damaged { .. } => io::ErrorKind::InvalidData,
        Error::Trimmed { .. } | Error::Beyond { .. } => io::ErrorKind::NotFound,
        Error::Poisoned { .. } | Error::Io { .. } | Error::Unusable(_) | Error::Closed => {
            io::ErrorKind::Other
        }
    };
    io::Error::new(kind, error)
}

/// Returns a callback for the WAL and the future that it completes.
fn completion() -> (helix_wal::DurableCallback, impl Future<Output = io::Result<()>>) {
    let (sender, receiver) = oneshot::channel();
    let done = Box::new(move |result: Result<(), Error>| {
        // Ignored: openraft stops waiting only when it stops.
        let _ = sender.send(result);
    });
    let outcome = async move {
        receiver.await.map_err(|_| io::Error::other("the log was closed"))?.map_err(to_io)
    };
    (done, outcome)
}

impl RaftLogReader<TypeConfig> for LogStore {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> io::Result<Vec<RaftEntry>> {
        let (mut start, end) = self.clamp(&range);
        if self.is_first_id(start, end)
            && let Some(log_id) = self.log_id(start).await?
        {
            // The index has the id. The entry may be damaged here and purged everywhere else, so
            // that a replica that needs it could never start.
            return Ok(vec![RaftEntry { log_id, payload: EntryPayload::Blank }]);
        }
        let mut entries = Vec::new();
        while start < end {
            let more = self.entries(start, end).await?;
            if more.is_empty() {
                break;
            }
            start += more.len() as u64;
            entries.extend(more);
        }
        Ok(entries)
    }

    async fn limited_get_log_entries(
        &mut self,
        start: u64,
        end: u64,
    ) -> io::Result<Vec<RaftEntry>> {
        self.entries(start, end).await
    }

    /// Streams entries for apply, without their payloads.
    ///
    /// A range may end beyond the log, unless the log has failed: openraft treats entries that it
    /// does not receive as applied.
    async fn entries_stream<RB>(
        &mut self,
        range: RB,
    ) -> impl Stream<Item = io::Result<RaftEntry>> + OptionalSend
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        let (start, end) = self.clamp(&range);
        let store = self.clone();
        stream::unfold(Some(start), move |next| {
            let (store, range) = (store.clone(), range.clone());
            async move {
                let start = next?;
                let heads = if start < end { store.heads(start, end).await } else { Ok(vec![]) };
                let (heads, next) = match heads {
                    Ok(heads) if !heads.is_empty() => {
                        let next = start + heads.len() as u64;
                        (heads.into_iter().map(Ok).collect(), Some(next))
                    }
                    Ok(_) if store.wal.is_open() || !range.contains(&start) => return None,
                    Ok(_) => {
                        let what = format!(
                            "entry {start} cannot be read: the log was closed or has failed"
                        );
                        (vec![Err(io::Error::other(what))], None)
                    }
                    Err(error) => (vec![Err(error)], None),
                };
                Some((stream::iter(heads), next))
            }
        })
        .flatten()
    }

    async fn read_vote(&mut self) -> io::Result<Option<Vote>> {
        self.wal.state().vote.map(|bytes| codec::decode_vote(&bytes)).transpose()
    }

    /// Returns the last id of each term, by bisection, since terms only grow.
    async fn get_key_log_ids(
        &mut self,
        range: RangeInclusive<RaftLogId>,
    ) -> io::Result<Vec<RaftLogId>> {
        let (mut at, last) = range.into_inner();
        let mut keys = Vec::new();
        while at.committed_leader_id() != last.committed_leader_id() {
            // Invariant: `low` has the term of `at`, `high` has a later one.
            let (mut low, mut high) = (at, last);
            while low.index + 1 < high.index {
                let middle = low.index + (high.index - low.index) / 2;
                let id = self.log_id(middle).await?.ok_or_else(|| {
                    codec::damaged(format!("entry {middle} is missing from the log"))
                })?;
                if id.committed_leader_id() == at.committed_leader_id() {
                    low = id;
                } else {
                    high = id;
                }
            }
            keys.push(low);
            at = high;
        }
        keys.push(last);
        Ok(keys)
    }
}

impl RaftLogStorage<TypeConfig> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> io::Result<LogState<TypeConfig>> {
        let state = self.wal.state();
        Ok(LogState {
            last_purged_log_id: state.purged.map(codec::raft_id),
            last_log_id: state.last.map(codec::raft_id),
        })
    }

    async fn get_log_reader(&mut self) -> Self {
        Self { stamped: None, ..self.clone() }
    }

    async fn save_vote(&mut self, vote: &Vote) -> io::Result<()> {
        let (done, outcome) = completion();
        self.wal.save_vote(codec::encode_vote(vote), done);
        outcome.await
    }

    async fn save_committed(&mut self, committed: Option<RaftLogId>) -> io::Result<()> {
        if let Some(committed) = committed {
            self.wal.set_committed(codec::wal_id(&committed));
            if let Some(stamped) = &self.stamped {
                stamped.on_committed(committed.index);
            }
        }
        Ok(())
    }

    async fn read_committed(&mut self) -> io::Result<Option<RaftLogId>> {
        Ok(self.wal.state().committed.map(codec::raft_id))
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<TypeConfig>) -> io::Result<()>
    where
        I: IntoIterator<Item = RaftEntry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let mut guards = Vec::new();
        let entries = entries
            .into_iter()
            .map(|entry| {
                let stored = codec::to_wal(&entry);
                if let EntryPayload::Normal(command) = entry.payload {
                    if let Some(stamps) = command.guard.as_ref().and_then(|guard| guard.stamps()) {
                        self.on_stamped(entry.log_id.index, stamps);
                    }
                    guards.extend(command.guard);
                }
                stored
            })
            .collect();
        let written = guards.clone();
        let last_group = self.last_group.clone();
        let done = Box::new(move |result: Result<(), Error>| {
            if result.is_ok() {
                let group = last_group.get();
                guards.iter().for_each(|guard| guard.mark_synced(group));
            }
            callback.io_completed(result.map_err(to_io));
            // The bytes are no longer in flight to this disk.
            drop(guards);
        });
        self.wal.append(entries, done);
        written.iter().for_each(|guard| guard.notify_written());
        if self.completes_at_once {
            // Only for speed: on a single async thread, the completion reaches openraft meanwhile,
            // and the same turn of its loop commits the entries.
            Yield::default().await;
        }
        Ok(())
    }

    async fn truncate_after(&mut self, last: Option<RaftLogId>) -> io::Result<()> {
        let (done, outcome) = completion();
        self.wal.truncate_after(last.map(|id| id.index), done);
        outcome.await
    }

    /// Purges entries that a checkpoint covers. Readers see it at once; segment files are deleted
    /// later, after the state file records the purge.
    async fn purge(&mut self, upto: RaftLogId) -> io::Result<()> {
        let (done, outcome) = completion();
        self.wal.purge(codec::wal_id(&upto), done);
        outcome.await
    }
}
