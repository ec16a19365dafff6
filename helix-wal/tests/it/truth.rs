//! Ground truth of a log: its expected contents, including all outcomes that a crash leaves open.
//! Uses the public interface only.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use helix_wal::{Entry, Error, LogId, LogState, Placement, ReadMode, Recovered, Wal};

use crate::common::same_entry;

/// A queued operation. An append of many entries is one `Append` per entry, because a crash may
/// keep a prefix of them.
#[derive(Clone)]
pub enum QueuedOp {
    Append(Entry),
    Vote(Bytes),
    Truncate(Option<u64>),
    Purge(LogId),
}

/// The Raft log as a value.
#[derive(Clone, Default)]
pub struct RaftLog {
    pub vote: Option<Bytes>,
    pub purged: Option<LogId>,
    pub entries: BTreeMap<u64, Entry>,
}

impl RaftLog {
    pub fn apply(&mut self, op: &QueuedOp) {
        match op {
            QueuedOp::Append(entry) => {
                self.entries.insert(entry.id.index, entry.clone());
            }
            QueuedOp::Vote(vote) => self.vote = Some(vote.clone()),
            QueuedOp::Truncate(last) => {
                let first = last.map_or(0, |last| last + 1);
                self.entries.split_off(&first);
            }
            QueuedOp::Purge(upto) => {
                // A different entry at this index belongs to another branch.
                let conflicts = self.entries.get(&upto.index).is_some_and(|e| e.id != *upto);
                let kept = self.entries.split_off(&(upto.index + 1));
                self.entries = if conflicts { BTreeMap::new() } else { kept };
                if self.purged.is_none_or(|purged| purged.index < upto.index) {
                    self.purged = Some(*upto);
                }
            }
        }
    }

    pub fn last(&self) -> Option<LogId> {
        self.entries.last_key_value().map(|(_, entry)| entry.id).or(self.purged)
    }

    /// Returns the index of the next entry.
    pub fn next(&self) -> u64 {
        self.last().map_or(0, |last| last.index + 1)
    }

    pub fn first(&self) -> u64 {
        self.purged.map_or(0, |purged| purged.index + 1)
    }
}

/// Results of callbacks: the number of the last operation covered, and its result.
pub type CallbackResults = Arc<Mutex<Vec<(usize, Result<(), Error>)>>>;

/// Expected state of a log.
#[derive(Clone, Default)]
pub struct Truth {
    /// The log up to the last acknowledged operation.
    pub durable: RaftLog,
    /// Later operations with the number of their call, oldest first. A crash may keep any prefix of
    /// them. The entries of one append share a number.
    pub open: Vec<(usize, QueuedOp)>,
    /// Number of calls so far.
    pub calls: usize,
    /// The log with all queued operations, as readers see it.
    pub queued: RaftLog,
    /// All placed entries by index. Placed entries are acknowledged, so they are permanent.
    pub placed: BTreeMap<u64, (Entry, Option<Placement>)>,
    /// Last index that was placed since the log was opened.
    pub placed_upto: Option<u64>,
    pub trims: BTreeMap<u64, u64>,
    pub dropped: BTreeSet<u64>,
    pub checkpoint: Option<(LogId, Bytes)>,
    /// Checkpoint with an unknown outcome.
    pub checkpoint_open: Option<(LogId, Bytes)>,
    /// Installed entries that become part of the log with that checkpoint, or not at all.
    pub arriving: BTreeMap<u64, (Entry, Option<Placement>)>,
    /// Committed entries that are still in the log, by index.
    pub committed: BTreeMap<u64, LogId>,
}

impl Truth {
    /// Records a call that queues an operation. Returns its number.
    pub fn queue(&mut self, op: QueuedOp) -> usize {
        self.queue_all([op])
    }

    pub fn queue_all(&mut self, ops: impl IntoIterator<Item = QueuedOp>) -> usize {
        self.calls += 1;
        for op in ops {
            self.queued.apply(&op);
            self.open.push((self.calls, op));
        }
        self.calls
    }

    /// Processes the results of callbacks. A success covers all earlier calls, except appends that
    /// were rejected by a full disk. Returns whether there were any.
    pub fn collect_results(
        &mut self,
        acks: &CallbackResults,
        may_fail: bool,
        may_be_full: bool,
    ) -> bool {
        let results = std::mem::take(&mut *acks.lock().unwrap());
        let newest = results.iter().filter(|(_, result)| result.is_ok()).map(|(n, _)| *n).max();
        let mut refused = false;
        for (n, result) in &results {
            match result {
                Ok(()) => {}
                Err(Error::DiskFull { .. }) if may_be_full => {
                    self.open.retain(|(number, _)| number != n);
                    refused = true;
                }
                Err(error) => {
                    assert!(may_fail, "operation {n} failed: {error}");
                    assert!(newest.is_none_or(|ok| ok < *n), "{n} failed, a later one succeeded");
                }
            }
        }
        let acked = self.open.partition_point(|(n, _)| newest.is_some_and(|newest| *n <= newest));
        for (_, op) in self.open.drain(..acked) {
            self.durable.apply(&op);
        }
        if refused {
            self.queued = self.durable.clone();
            for (_, op) in &self.open {
                self.queued.apply(op);
            }
            self.forget_lost_commits(&self.queued.clone());
        }
        refused
    }

    /// Compares a recovered log with all allowed states, and continues from the matching one.
    pub fn recover(&mut self, wal: &Wal, recovered: &Recovered) {
        let state = wal.state();
        assert_eq!(state, recovered.state, "the report differs from the log");
        let found = read_all(wal, &state);
        let mut survived = self.durable.clone();
        let mut kept = 0;
        loop {
            if matches(&survived, &state, &found) {
                break;
            }
            // The state file may have made a purge durable before the queue did.
            if let Some(purged) = self.purged_ahead(&state) {
                let mut survived_purged = survived.clone();
                survived_purged.apply(&QueuedOp::Purge(purged));
                if matches(&survived_purged, &state, &found) {
                    survived = survived_purged;
                    break;
                }
            }
            let Some((_, op)) = self.open.get(kept) else { self.fail_recover(&state, &found) };
            survived.apply(op);
            kept += 1;
        }
        assert_eq!(state.synced, state.last, "recovered entries are durable");
        self.recover_committed(state.committed, &survived);
        self.recover_checkpoint(recovered);
        self.durable = survived.clone();
        self.queued = survived;
        self.open.clear();
        self.placed_upto = self.checkpoint.as_ref().map(|(at, _)| at.index);
    }

    /// Marks the entry and all before it as committed.
    pub fn commit(&mut self, upto: LogId) {
        let entries = self.queued.entries.range(..=upto.index);
        self.committed.extend(entries.map(|(index, entry)| (*index, entry.id)));
    }

    /// Checks that the recovered commit point was committed. Forgets commit points of lost entries,
    /// which another leader may replace.
    fn recover_committed(&mut self, found: Option<LogId>, survived: &RaftLog) {
        if let Some(id) = found {
            let known = self.committed.get(&id.index).copied().or(self.placed_id(id.index));
            assert_eq!(known, Some(id), "a commit point that was never set");
        }
        self.forget_lost_commits(survived);
    }

    fn forget_lost_commits(&mut self, survived: &RaftLog) {
        let next = survived.next();
        self.committed.retain(|index, id| {
            let entry = survived.entries.get(index);
            *index < next && entry.is_none_or(|entry| entry.id == *id)
        });
    }

    fn placed_id(&self, index: u64) -> Option<LogId> {
        self.placed.get(&index).map(|(entry, _)| entry.id)
    }

    /// Returns a queued purge that a checkpoint covers, if the log has applied it.
    fn purged_ahead(&self, state: &LogState) -> Option<LogId> {
        let purged = state.purged?;
        let is_queued =
            |(_, op): &(usize, QueuedOp)| matches!(op, QueuedOp::Purge(upto) if *upto == purged);
        let covers = |at: &Option<(LogId, Bytes)>| at.as_ref().is_some_and(|(at, _)| *at >= purged);
        let covered = covers(&self.checkpoint) || covers(&self.checkpoint_open);
        (covered && self.open.iter().any(is_queued)).then_some(purged)
    }

    fn recover_checkpoint(&mut self, recovered: &Recovered) {
        if recovered.checkpoint != self.checkpoint {
            assert!(
                self.checkpoint_open.is_some() && recovered.checkpoint == self.checkpoint_open,
                "checkpoint is {:?}, not {:?} or {:?}",
                recovered.checkpoint,
                self.checkpoint,
                self.checkpoint_open,
            );
            self.checkpoint = recovered.checkpoint.clone();
            let arrived = std::mem::take(&mut self.arriving);
            self.placed.extend(arrived);
        }
        self.arriving.clear();
        self.checkpoint_open = None;
    }

    fn fail_recover(&self, state: &LogState, found: &[Entry]) -> ! {
        let describe = |log: &RaftLog| {
            let ends = (log.entries.keys().next(), log.last());
            format!("vote {:?}, purged {:?}, entries {ends:?}", log.vote, log.purged)
        };
        panic!(
            "recovered state matches neither the acknowledged operations nor any prefix of the \
             rest\n\
             acknowledged: {}\nqueued:       {}\nrecovered:    {state:?}, {} entries from {:?}",
            describe(&self.durable),
            describe(&self.queued),
            found.len(),
            found.first().map(|entry| entry.id),
        );
    }

    /// Compares all reads with the model.
    pub fn check(&self, wal: &Wal, acknowledged: bool) {
        let state = wal.state();
        assert_eq!(state.last, self.queued.last());
        assert_eq!(state.purged, self.queued.purged);
        if acknowledged {
            assert!(self.open.is_empty(), "{} operations never ended", self.open.len());
            assert_eq!(state.vote, self.queued.vote);
            assert_eq!(state.synced, state.last);
        }
        let found = read_all(wal, &state);
        assert!(matches_entries(&self.queued, &found), "entries differ");
        self.check_ids(wal);
        if self.placed_upto >= self.placed.last_key_value().map(|(index, _)| *index) {
            self.check_streams(wal);
        }
    }

    fn check_ids(&self, wal: &Wal) {
        for (index, entry) in &self.queued.entries {
            assert_eq!(wal.log_id(*index, ReadMode::Blocking).unwrap(), Some(Some(entry.id)));
        }
        if let Some(purged) = self.queued.purged {
            let found = wal.log_id(purged.index, ReadMode::Blocking).unwrap();
            assert_eq!(found, Some(Some(purged)));
        }
        assert_eq!(wal.log_id(self.queued.next(), ReadMode::Blocking).unwrap(), Some(None));
        let mut heads = Vec::new();
        while let next = self.queued.first() + heads.len() as u64
            && next < self.queued.next()
        {
            let some = wal.heads(next..self.queued.next(), 5, ReadMode::Blocking).unwrap().unwrap();
            assert!(!some.is_empty() && some.len() <= 5, "{} heads at {next}", some.len());
            heads.extend(some);
        }
        for (head, entry) in heads.iter().zip(self.queued.entries.values()) {
            assert_eq!((head.id, head.stream, &head.head), (entry.id, entry.stream, &entry.head));
            assert!(head.payload.bytes.is_empty());
            assert_eq!(head.payload.crc, entry.payload.crc);
            assert_eq!(head.payload.crc_seed, entry.payload.crc_seed);
        }
    }

    /// Returns the streams with their placed entries from the trim point on.
    pub fn streams(&self) -> BTreeMap<u64, Vec<(&Entry, Placement)>> {
        let mut streams: BTreeMap<u64, Vec<(&Entry, Placement)>> = BTreeMap::new();
        for (entry, placement) in self.placed.values() {
            if let Some(placement) = placement {
                let rows = streams.entry(placement.stream).or_default();
                let trim = self.trims.get(&placement.stream).copied().unwrap_or(0);
                if placement.first + u64::from(placement.count) > trim {
                    rows.push((entry, *placement));
                }
            }
        }
        streams.retain(|stream, _| !self.dropped.contains(stream));
        streams
    }

    pub fn check_streams(&self, wal: &Wal) {
        for (stream, rows) in self.streams() {
            let Some((_, last)) = rows.last() else { continue };
            let end = last.first + u64::from(last.count);
            let trim = self.trims.get(&stream).copied().unwrap_or(0);
            let mut position = trim.max(rows[0].1.first);
            let mut wanted = rows.iter();
            while position < end {
                let got = wal.read_stream(stream, position, end, 3000, ReadMode::Blocking);
                let got = got.unwrap().expect("a blocking read has a result");
                assert!(!got.is_empty(), "nothing of stream {stream} at {position} of {end}");
                let bytes: usize = got.iter().map(|entry| entry.payload.bytes.len()).sum();
                // The first entry is returned regardless of its size.
                let most = got[0].payload.bytes.len().max(3000);
                assert!(bytes <= most, "{bytes} bytes of {most}");
                for stored in got {
                    let (entry, placement) = wanted.next().expect("no more than there is");
                    assert_eq!(stored.placement, *placement);
                    let id = stored.id;
                    let (head, payload) = (stored.head, stored.payload);
                    let stored = Entry { id, stream: entry.stream, head, payload };
                    assert!(
                        same_entry(&stored, entry),
                        "different bytes at {position} of {stream}"
                    );
                    position = placement.first + u64::from(placement.count);
                }
            }
            assert!(wanted.next().is_none(), "stream {stream} ends early");
            self.check_times(wal, stream, &rows);
        }
        self.check_live(wal);
    }

    /// Checks `read_live` and `read_live_of` with small reads.
    fn check_live(&self, wal: &Wal) {
        self.check_live_of(wal, &|_| true);
        self.check_live_of(wal, &|stream| stream.is_multiple_of(2));
    }

    fn check_live_of(&self, wal: &Wal, wants: &dyn Fn(u64) -> bool) {
        let Some(upto) = self.placed_upto.filter(|upto| *upto > 0) else { return };
        let trim = |stream| self.trims.get(&stream).copied().unwrap_or(0);
        let is_live = |(_, placement): &&(&Entry, Placement)| {
            let Placement { stream, first, count, .. } = *placement;
            let is_kept =
                !self.dropped.contains(&stream) && first + u64::from(count) > trim(stream);
            is_kept && wants(stream)
        };
        let placed = self.placed.range(1..=upto);
        let placed = placed.filter_map(|(_, (entry, p))| p.map(|p| (entry, p)));
        let wanted: Vec<_> = placed.collect();
        let mut wanted = wanted.iter().filter(is_live);
        let mut after = 0;
        while after < upto {
            let found = wal.read_live_of(after, upto, 3000, wants).unwrap();
            assert!(found.upto > after && found.upto <= upto, "{after} to {}", found.upto);
            for live in found.entries {
                assert!(after < live.id.index && live.id.index <= found.upto);
                after = live.id.index;
                let (entry, placement) = wanted.next().expect("no more than there is");
                assert_eq!(live.placement, *placement);
                let (id, head, payload) = (live.id, live.head, live.payload);
                let live = Entry { id, stream: entry.stream, head, payload };
                assert!(same_entry(&live, entry), "different bytes at index {after}");
            }
            after = found.upto;
        }
        assert!(wanted.next().is_none(), "live entries end early");
    }

    fn check_times(&self, wal: &Wal, stream: u64, rows: &[(&Entry, Placement)]) {
        let trim = self.trims.get(&stream).copied().unwrap_or(0);
        let times = rows.iter().map(|(_, placement)| placement.time);
        for time in times.flat_map(|time| [time, time + 1]) {
            let found = wal.search_time(stream, time, ReadMode::Blocking).unwrap().unwrap();
            let wanted = rows.iter().find(|(_, placement)| placement.time >= time);
            // The first kept entry may start below the trim point.
            let wanted = wanted.map(|(_, placement)| placement.first.max(trim));
            assert_eq!(found, wanted, "time {time} of stream {stream}");
        }
    }
}

/// Reads all entries of the Raft log.
pub fn read_all(wal: &Wal, state: &LogState) -> Vec<Entry> {
    try_read_all(wal, state).unwrap()
}

pub fn try_read_all(wal: &Wal, state: &LogState) -> Result<Vec<Entry>, Error> {
    let mut next = state.purged.map_or(0, |purged| purged.index + 1);
    let end = state.last.map_or(0, |last| last.index + 1);
    let mut all = Vec::new();
    while next < end {
        let some = wal.read(next..end, 20_000, ReadMode::Blocking)?;
        let some = some.expect("a blocking read has a result");
        assert!(!some.is_empty(), "nothing at {next} of {end}");
        for entry in some {
            assert_eq!(entry.id.index, next, "entries out of order");
            next += 1;
            all.push(entry);
        }
    }
    Ok(all)
}

fn matches(log: &RaftLog, state: &LogState, found: &[Entry]) -> bool {
    log.vote == state.vote
        && log.purged == state.purged
        && log.last() == state.last
        && matches_entries(log, found)
}

fn matches_entries(log: &RaftLog, found: &[Entry]) -> bool {
    log.entries.len() == found.len()
        && log.entries.values().zip(found).all(|(a, b)| same_entry(a, b))
}
