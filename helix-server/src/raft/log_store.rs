//! openraft's log storage over the WAL: entries, votes and truncations through one queue.
//! Appends return at once; the WAL's writer tells openraft when they are durable.

use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds, RangeInclusive};

use futures_util::{Stream, StreamExt, stream};
use helix_wal::{Error, How, Wal};
use openraft::storage::{IOFlushed, LogState, RaftLogStorage};
use openraft::{OptionalSend, RaftLogReader};
use tokio::sync::oneshot;

use super::blocking::DiskReads;
use super::codec;
use super::runtime::Yield;
use super::types::{Entry, LogId, TypeConfig, Vote};

/// Most payload bytes read for one append to a follower.
const READ_BYTES_MAX: usize = 1 << 20;

/// The same where the disk has to be read, which a follower asks for that was away: each entry
/// once, so it goes past the page cache. Small, because a sync waits behind the read that it meets
/// at the device.
const COLD_READ_BYTES_MAX: usize = 512 << 10;

/// Heads read at once for apply: openraft answers clients as the stream goes, so memory is the
/// only reason to bound it.
const HEADS_AT_ONCE: usize = 1024;

/// A cheap handle; openraft clones it as its readers.
#[derive(Debug, Clone)]
pub struct LogStore {
    wal: Wal,
    reads: DiskReads,
    /// Whether appends are complete when they come back: in memory.
    completes_at_once: bool,
}

impl LogStore {
    pub fn new(wal: Wal, reads: DiskReads) -> Self {
        let completes_at_once = wal.is_memory();
        Self { wal, reads, completes_at_once }
    }

    async fn entries(&self, start: u64, end: u64) -> io::Result<Vec<Entry>> {
        let wal = self.wal.clone();
        let read = move |how: How| {
            let bytes_max = if how == How::Memory { READ_BYTES_MAX } else { COLD_READ_BYTES_MAX };
            wal.read(start..end, bytes_max, how)
        };
        let entries = self.reads.run_passing(read).await.map_err(to_io)?;
        entries.into_iter().map(codec::from_wal).collect()
    }

    async fn heads(&self, start: u64, end: u64) -> io::Result<Vec<Entry>> {
        let wal = self.wal.clone();
        let read = move |how: How| wal.heads(start..end, HEADS_AT_ONCE, how);
        let entries = self.reads.run(read).await.map_err(to_io)?;
        entries.into_iter().map(codec::from_wal).collect()
    }

    async fn log_id(&self, index: u64) -> io::Result<Option<LogId>> {
        let wal = self.wal.clone();
        let found = self.reads.run(move |how| wal.log_id(index, how)).await.map_err(to_io)?;
        Ok(found.map(codec::raft_id))
    }

    /// `range`, within what the log holds.
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
        Error::Damaged { .. } => io::ErrorKind::InvalidData,
        Error::Trimmed { .. } | Error::Beyond { .. } => io::ErrorKind::NotFound,
        Error::Poisoned { .. } | Error::Io { .. } | Error::Unusable(_) | Error::Closed => {
            io::ErrorKind::Other
        }
    };
    io::Error::new(kind, error)
}

/// A callback for the WAL and the future that it completes.
fn completion() -> (helix_wal::Done, impl Future<Output = io::Result<()>>) {
    let (sender, receiver) = oneshot::channel();
    let done = Box::new(move |result: Result<(), Error>| {
        // Ignored: openraft gave up waiting, which it does only when it stops.
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
    ) -> io::Result<Vec<Entry>> {
        let (mut start, end) = self.clamp(&range);
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

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> io::Result<Vec<Entry>> {
        self.entries(start, end).await
    }

    /// For apply, which needs heads only: payloads stay where they are. A range may go beyond the
    /// log's end, but not beyond that of a log that has failed: its last entries were there, and
    /// openraft takes what it did not get for applied.
    async fn entries_stream<RB>(
        &mut self,
        range: RB,
    ) -> impl Stream<Item = io::Result<Entry>> + OptionalSend
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
                        let what = format!("entry {start} is not in the log, which has ended");
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

    /// The last id of each term: by bisection, since terms only grow.
    async fn get_key_log_ids(&mut self, range: RangeInclusive<LogId>) -> io::Result<Vec<LogId>> {
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
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> io::Result<()> {
        let (done, outcome) = completion();
        self.wal.save_vote(codec::encode_vote(vote), done);
        outcome.await
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> io::Result<()> {
        if let Some(committed) = committed {
            self.wal.set_committed(codec::wal_id(&committed));
        }
        Ok(())
    }

    async fn read_committed(&mut self) -> io::Result<Option<LogId>> {
        Ok(self.wal.state().committed.map(codec::raft_id))
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<TypeConfig>) -> io::Result<()>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let mut held = Vec::new();
        let entries = entries
            .into_iter()
            .map(|entry| {
                let stored = codec::to_wal(&entry);
                if let openraft::EntryPayload::Normal(command) = entry.payload {
                    held.extend(command.held);
                }
                stored
            })
            .collect();
        let written = held.clone();
        let done = Box::new(move |result: Result<(), Error>| {
            if result.is_ok() {
                held.iter().for_each(|held| held.has_synced());
            }
            callback.io_completed(result.map_err(to_io));
            // The bytes are no longer in flight towards this disk.
            drop(held);
        });
        self.wal.append(entries, done);
        written.iter().for_each(|held| held.written());
        if self.completes_at_once {
            // Only speed: where the node has one async thread, whoever tells openraft that this is
            // complete does so meanwhile, and the same turn of its loop commits the entries.
            Yield::default().await;
        }
        Ok(())
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> io::Result<()> {
        let (done, outcome) = completion();
        self.wal.truncate_after(last.map(|id| id.index), done);
        outcome.await
    }

    /// Exact and at once for readers; files go later, after a state file that says so. Only what
    /// a checkpoint covers can be purged, and openraft purges only what a snapshot covers.
    async fn purge(&mut self, upto: LogId) -> io::Result<()> {
        let (done, outcome) = completion();
        self.wal.purge(codec::wal_id(&upto), done);
        outcome.await
    }
}
