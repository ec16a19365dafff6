//! Compaction: rewrites live entries of sealed segments into cold segments, sorted by stream.
//!
//! Positions, indexes and bytes of the entries stay the same; only their location changes.
//!
//! 1. New segments are written and synced.
//! 2. One state file lists the new segments instead of the old ones.
//! 3. The rows of each stream are moved to the new segments.
//! 4. The old segments are freed.
//!
//! Before step 2 nothing has changed. A crash leaves either the old segments or the new ones, never
//! both. Every entry is verified as it is read. Damage fails the attempt, and the damaged segment
//! is never compacted again; its readers get the error.
//!
//! This file chooses what to do next. `reading` loads entries, `writing` makes segments of them,
//! and `replacing` has steps 2 and 3. `cleaning` has the request to pass entries through a filter,
//! and `detached` does so on another thread.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tracing::{debug, warn};

use crate::compaction::detached::DetachedStep;
use crate::compaction::job::CompactionJob;
use crate::compaction::policy::{
    CompactionCandidate, CompactionChoice, CompactionLimits, choose, choose_listed,
};
use crate::error::Error;
use crate::files::segment::Segment;
use crate::memory::live_segment::LiveSegment;
use crate::memory::log::Log;
use crate::shared::Shared;
use crate::shared::cleaning::Cleaning;
use crate::storage::Storage;

/// Bytes read, judged or written in one step. Few, so that appends soon get the device and a CPU.
pub(super) const STEP_BYTES: u64 = 256 << 10;
/// Unneeded slots removed at a time, since a segment with slots cannot be compacted.
const SLOTS_PER_STEP: usize = 8192;

/// Result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CompactionStep {
    /// There was nothing to do.
    Nothing,
    /// This many bytes were read, judged or written, and there is more to do.
    More(u64),
    /// A step runs on another thread; the next call polls for its result.
    Detached,
    /// Disk space is short, or the job has failed: try again after a pause.
    NoSpace,
    /// Old segments were replaced and may be freed.
    Done,
    /// The filter of a cleaning refused an entry, or the segments cannot be rewritten now.
    Refused,
}

/// Runs the compactions of a log, one at a time.
pub(crate) struct Compactor {
    pub(super) shared: Arc<Shared>,
    pub(super) storage: Arc<dyn Storage>,
    job: Option<CompactionJob>,
    /// The step on another thread, which owns the job while it runs.
    detached: Option<DetachedStep>,
    /// The last job belonged to a cleaning.
    has_cleaned: bool,
    /// Replaced segments.
    pub replaced: Vec<Arc<Segment>>,
}

impl fmt::Debug for Compactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compactor").finish_non_exhaustive()
    }
}

impl Compactor {
    pub(crate) fn new(shared: Arc<Shared>, storage: Arc<dyn Storage>) -> Self {
        let replaced = Vec::new();
        Self { shared, storage, job: None, detached: None, has_cleaned: false, replaced }
    }

    /// Runs one step of the current job, or begins the next job.
    pub(crate) fn step(&mut self) -> Result<CompactionStep, Error> {
        if let Some(detached) = &self.detached {
            let Some((job, step)) = detached.poll(&self.storage.describe())? else {
                return Ok(CompactionStep::Detached);
            };
            self.detached = None;
            return self.on_advanced(job, Ok(step));
        }
        let Some(mut job) = self.job.take() else {
            if let Some(step) = self.end_cleaning()? {
                return Ok(step);
            }
            self.job = self.begin();
            return Ok(if self.job.is_some() {
                CompactionStep::More(0)
            } else {
                CompactionStep::Nothing
            });
        };
        if let Some(filter) = job.judging_filter()
            && let Some(worker) = filter.worker()
        {
            self.detached = Some(DetachedStep::start(worker, job));
            return Ok(CompactionStep::Detached);
        }
        let advanced = self.advance(&mut job);
        self.on_advanced(job, advanced)
    }

    /// Keeps a job that continues; finishes a job that is done or has failed.
    fn on_advanced(
        &mut self,
        mut job: CompactionJob,
        advanced: Result<CompactionStep, Error>,
    ) -> Result<CompactionStep, Error> {
        match advanced {
            Ok(CompactionStep::Done) => {
                self.on_replaced(&job);
                Ok(CompactionStep::Done)
            }
            Ok(CompactionStep::Refused) => {
                let error = Error::Unusable(job.refusal.take().unwrap_or_default());
                self.give_up(job, &error);
                Ok(CompactionStep::Refused)
            }
            Ok(step) => {
                self.job = Some(job);
                Ok(step)
            }
            Err(error) if error.is_shortage() && job.is_whole() => {
                self.job = Some(job);
                Ok(CompactionStep::NoSpace)
            }
            Err(Error::Closed) => Ok(CompactionStep::Nothing),
            Err(
                error @ (Error::DiskFull { .. }
                | Error::Exhausted { .. }
                | Error::Damaged { .. }
                | Error::Io { .. }),
            ) => {
                self.give_up(job, &error);
                Ok(CompactionStep::NoSpace)
            }
            Err(error) => {
                // The state file may list the new segments; only the next open can tell.
                for cold in job.made.drain(..) {
                    drop(cold.into_parts());
                }
                Err(error)
            }
        }
    }

    /// Cancels a step on another thread, whose job holds files of the log.
    pub(crate) fn cancel_detached(&mut self) {
        if let Some(detached) = self.detached.take() {
            detached.cancel();
        }
    }

    /// Chooses segments and protects them from being freed.
    fn begin(&mut self) -> Option<CompactionJob> {
        let options = &self.shared.options;
        let free = self.storage.free_bytes().unwrap_or(u64::MAX);
        let bounds = CompactionLimits {
            segment_bytes: options.segment_bytes,
            slack: options.compaction_slack_bytes,
            free_bytes: free.saturating_sub(options.reserve_bytes),
        };
        let mut core = self.shared.lock();
        core.log.pop_slots(SLOTS_PER_STEP);
        let candidates = candidates(&core.log);
        let mut cleaning = None;
        let has_cleaned = std::mem::take(&mut self.has_cleaned);
        let CompactionChoice { ids, gathers } = match &core.cleaning {
            Some(Cleaning { request, left }) if !left.is_empty() => {
                // In turn with other segments, because a cleaning may take long. The segments of
                // the cleaning are rewritten anyway.
                let is_other = |c: &&CompactionCandidate| !left.contains(&c.id);
                let others: Vec<_> = candidates.iter().filter(is_other).copied().collect();
                let other = if has_cleaned { choose(&others, bounds) } else { None };
                if let Some(other) = other {
                    other
                } else {
                    self.has_cleaned = true;
                    cleaning = Some((Arc::clone(&request.filter), request.below.clone()));
                    choose_listed(&candidates, left, bounds)?
                }
            }
            _ => choose(&candidates, bounds)?,
        };
        let chosen = || candidates.iter().filter(|c| ids.contains(&c.id));
        let (left_bytes, left_entries) =
            (chosen().map(|c| c.live_bytes).sum(), chosen().map(|c| c.live_entries).sum());
        let mut inputs = Vec::with_capacity(ids.len());
        for id in &ids {
            let held = core.log.segment_mut(*id)?;
            held.busy = true;
            inputs.extend(held.segment.clone());
        }
        drop(core);
        debug!(segments = ?ids, live_bytes = left_bytes, "compacting");
        Some(CompactionJob::new(inputs, gathers, (left_bytes, left_entries), cleaning))
    }

    fn advance(&mut self, job: &mut CompactionJob) -> Result<CompactionStep, Error> {
        if job.is_named {
            return Ok(self.join(job));
        }
        if let Some(at) = job.unread.checked_sub(1) {
            return self.read_shares(job, at);
        }
        if !job.loaded.is_empty() {
            return Ok(job.filter_some(&AtomicBool::new(false)));
        }
        if !job.wanted.is_empty() {
            return job.read_some(self.read_mode());
        }
        if !job.window.is_empty() {
            return self.write_some(job);
        }
        if job.cleaning.is_some()
            && let Some(growing) = job.growing.take()
        {
            // The size of the next window after the filter is unknown, so each window gets a
            // segment that fits it.
            return self.finish(job, growing);
        }
        if !job.pieces.is_empty() {
            self.plan(job)?;
            return Ok(CompactionStep::More(0));
        }
        if let Some(growing) = job.growing.take() {
            return self.finish(job, growing);
        }
        self.name(job)?;
        Ok(CompactionStep::More(0))
    }

    /// Releases the inputs. The new files are removed with the job.
    fn give_up(&self, mut job: CompactionJob, error: &Error) {
        warn!(%error, "cannot compact a segment");
        if job.cleaning.take().is_some() {
            let cleaning = self.shared.lock().cleaning.take();
            if let Some(cleaning) = cleaning {
                cleaning.request.finish(Err(error.clone()));
            }
        }
        let mut core = self.shared.lock();
        // A shortage is not damage: the next attempt may succeed.
        for input in &job.inputs {
            if let Some(held) = core.log.segment_mut(input.id) {
                held.busy = false;
                // Another attempt would find the same damage.
                let name = input.name();
                held.damage_found |= match error {
                    Error::Damaged { file, .. } | Error::Io { file, .. } => *file == name,
                    _ => false,
                };
            }
        }
    }
}

/// Returns the segments that may be rewritten: sealed, purged, without slots, and undamaged.
pub(super) fn candidates(log: &Log) -> Vec<CompactionCandidate> {
    let upto = log.purged.zip(log.checkpoint).map(|(a, b)| a.index.min(b.index));
    let in_slots = log.slots.front().map_or(u64::MAX, |slot| slot.id.index);
    let all = log.chain.values().chain(log.cold.values());
    let candidate = |held: &LiveSegment| {
        let segment = held.segment.as_ref()?;
        let (first, last) = held.entries?;
        let usable = held.is_purged(upto)
            && !held.busy
            && !held.removing
            && !held.damage_found
            && held.live_rows > 0
            && segment.quarantined().is_none()
            && (segment.cold || last.index < in_slots);
        usable.then_some(CompactionCandidate {
            id: segment.id,
            first,
            cold: segment.cold,
            gathered: segment.trailer().is_some_and(|trailer| trailer.gathered),
            len: segment.len,
            live_bytes: held.live_bytes,
            live_entries: held.live_entries,
            live_rows: held.live_rows,
            streams: held.stream_count,
        })
    };
    all.filter_map(candidate).collect()
}
