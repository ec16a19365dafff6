//! The state behind the log's lock.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::error::Error;
use crate::files::cold_segment::ColdSegments;
use crate::format::frame::LogPosition;
use crate::format::layout::check_segment_number;
use crate::format::state::{ColdSegmentInfo, PersistedState, StagedSegments};
use crate::memory::live_segment::LiveSegment;
use crate::memory::log::Log;
use crate::shared::cleaning::Cleaning;
use crate::shared::counters::WalCounters;
use crate::shared::disk_use::DiskUse;
use crate::shared::queue::QueuedRequest;
use crate::shared::signal::{WakeSignal, WalThread};
use crate::storage::File;
use crate::sync::{JoinHandle, ThreadId};
use crate::types::{CleanMark, LogId};

/// A file of the pool, not part of the log yet.
#[derive(Debug)]
pub(crate) struct ReadySegment {
    pub name: String,
    /// Open, unless the pool has more files than usual.
    pub file: Option<Arc<dyn File>>,
    pub len: u64,
    /// Every byte was written before. Otherwise parts of it are only allocated.
    pub is_written: bool,
}

/// Everything behind the lock.
pub(crate) struct Core {
    pub log: Log,
    pub queue: VecDeque<QueuedRequest>,
    /// Arrival time of the oldest request that the writer has taken and not synced yet.
    pub in_progress_since: Option<Duration>,
    /// Time of the latest step.
    pub now: Duration,
    /// Number of times that queued appends were refused for lack of space.
    pub epoch: u64,
    pub poisoned: Option<Error>,
    pub closing: bool,
    pub on_poisoned: Option<Box<dyn FnOnce(Error) + Send>>,
    /// Truncations that are not durable yet.
    ///
    /// Until they are, the log in memory is shorter than the one on disk, so no segment may be
    /// sealed from it.
    pub truncations: usize,
    pub writer: WakeSignal,
    pub keeper: WakeSignal,
    pub ready: VecDeque<ReadySegment>,
    pub ready_number: u64,
    /// The keeper prepares a segment, whose space is reserved.
    pub preparing: bool,
    pub next_id: u64,
    /// Everything before this position is durable.
    pub synced_at: LogPosition,
    /// Free and needed bytes at the time that no segment could be created.
    ///
    /// If the needed bytes were free, the file system or a quota refused the segment.
    pub disk_full: Option<(u64, u64)>,
    /// The shortage that the writer waits for.
    pub waiting: Option<Error>,
    pub counters: WalCounters,
    pub disk: DiskUse,
    pub writer_ended: bool,
    pub keeper_ended: bool,
    /// Directory lock, held until both threads have ended.
    pub guard: Option<Box<dyn Send + Sync>>,
    pub threads: Vec<(ThreadId, JoinHandle<()>)>,
    /// Bytes in the current segment of an in-memory log.
    pub memory_bytes: u64,
    /// Staged segments, which survive a restart.
    pub staged: StagedSegments,
    /// Staged segments found by this open, until the caller takes them.
    pub staged_found: Option<ColdSegments>,
    /// Marks of clean streams, as in the state file. Shared, so that readers copy none of them.
    pub clean_marks: Arc<BTreeMap<u64, CleanMark>>,
    /// Last entry for which cleaning, here or in the log that entries came from, may have removed
    /// earlier ones. Only grows.
    pub cleaned_upto: u64,
    /// Version of what the entries mean, as in the state file. Only grows.
    pub entries_version: u32,
    /// The request to clean streams that the keeper works on, or will.
    pub cleaning: Option<Cleaning>,
    /// The writer shall begin a new segment once it is idle.
    pub rolls_early: bool,
}

impl Core {
    pub(crate) fn new(log: Log) -> Self {
        Self {
            log,
            queue: VecDeque::new(),
            in_progress_since: None,
            now: Duration::ZERO,
            epoch: 0,
            poisoned: None,
            closing: false,
            on_poisoned: None,
            truncations: 0,
            writer: WakeSignal::default(),
            keeper: WakeSignal::default(),
            ready: VecDeque::new(),
            ready_number: 0,
            preparing: false,
            next_id: 1,
            synced_at: LogPosition::default(),
            disk_full: None,
            waiting: None,
            counters: WalCounters::default(),
            disk: DiskUse::default(),
            writer_ended: false,
            keeper_ended: false,
            guard: None,
            threads: Vec::new(),
            memory_bytes: 0,
            staged: StagedSegments::default(),
            staged_found: None,
            clean_marks: Arc::default(),
            cleaned_upto: 0,
            entries_version: 0,
            cleaning: None,
            rolls_early: false,
        }
    }

    /// Fails if the log is poisoned or closing.
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        match &self.poisoned {
            Some(error) => Err(error.clone()),
            None if self.closing => Err(Error::Closed),
            None => Ok(()),
        }
    }

    /// Returns the id of a new segment.
    pub(crate) fn take_segment_number(&mut self) -> Result<u64, Error> {
        let id = self.next_id;
        check_segment_number(id)?;
        self.next_id += 1;
        Ok(id)
    }

    pub(crate) fn signal(&mut self, role: WalThread) -> &mut WakeSignal {
        match role {
            WalThread::Writer => &mut self.writer,
            WalThread::Keeper => &mut self.keeper,
        }
    }

    /// Returns the content of the next state file, with this checkpoint.
    pub(crate) fn state(
        &self,
        identity: Bytes,
        checkpoint: Option<(LogId, Bytes)>,
    ) -> PersistedState {
        let upto = checkpoint.as_ref().map(|(at, _)| at.index);
        let live = self.log.chain.iter().filter(|(_, held)| !held.removing);
        PersistedState {
            identity,
            next_id: self.next_id,
            synced: self.synced_at,
            purged: self.log.purged.filter(|purged| upto.is_some_and(|upto| purged.index <= upto)),
            committed: self.log.committed,
            vote: self.log.vote.clone(),
            segments: live.map(|(id, held)| (*id, held.sealed)).collect(),
            cold: self
                .log
                .cold
                .values()
                .filter(|held| !held.removing)
                .filter_map(cold_info)
                .collect(),
            placements: upto.map_or(Vec::new(), |upto| self.log.unsealed_placements(upto)),
            staged: self.staged.clone(),
            clean_marks: Arc::clone(&self.clean_marks),
            cleaned_upto: self.cleaned_upto,
            entries_version: self.entries_version,
            checkpoint,
        }
    }
}

fn cold_info(held: &LiveSegment) -> Option<ColdSegmentInfo> {
    let (first, last) = held.entries?;
    Some(ColdSegmentInfo { id: held.segment.as_ref()?.id, first, last })
}
