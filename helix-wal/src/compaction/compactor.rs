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
//! both. Every entry is verified as it is read. Damage ends the attempt, and the damaged segment is
//! never compacted again; its readers get the error.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use tracing::{debug, warn};

use crate::compaction::policy::{
    CompactionCandidate, CompactionChoice, CompactionLimits, choose, choose_listed,
};
use crate::error::{Error, changing};
use crate::files::cold_segment::ColdSegment;
use crate::files::open_segment::read_directory;
use crate::files::segment::{ReadStop, Segment};
use crate::format::footer::DirectoryRow;
use crate::format::frame::Frame;
use crate::format::sizing::{cold_bytes, frame_bytes_max};
use crate::memory::live_segment::LiveSegment;
use crate::memory::log::Log;
use crate::read::load::load_entries;
use crate::read::load::{EntrySource, FrameRef};
use crate::shared::Shared;
use crate::shared::cleaning::{Cleaning, EntryFilter, FilteredEntry};
use crate::storage::Storage;
use crate::sync::IgnorePoison;
use crate::types::{Entry, Placement, ReadMode};
use crate::write::cold_writer::ColdSegmentBuilder;

/// Maximum live bytes in memory, to be written sorted by stream.
const WINDOW_BYTES: u64 = 32 << 20;
/// Maximum entries in memory, which have a cost of their own.
const WINDOW_ENTRIES: u64 = 128 << 10;
/// Bytes read or written in one step.
const STEP_BYTES: u64 = 1 << 20;
/// Rows moved per lock acquisition.
const ROWS_PER_LOCK: usize = 1024;
/// Slots removed at a time, so that old segments have none.
const SLOTS_PER_STEP: usize = 8192;

/// A live share of an input.
#[derive(Debug, Clone, Copy)]
struct LiveShare {
    input: usize,
    share: DirectoryRow,
}

/// An entry being moved.
#[derive(Debug)]
struct MovedEntry {
    placement: Placement,
    /// Number of its share. Shares are preserved, because retention cuts between them.
    share: u64,
}

/// Result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CompactionStep {
    /// There was nothing to do.
    Nothing,
    /// This many bytes were read or written, and there is more to do.
    More(u64),
    /// Waits for disk space.
    NoSpace,
    /// Old segments were replaced and may be freed.
    Done,
    /// The filter of a cleaning refused an entry, or its segments cannot be rewritten now.
    Refused,
}

/// Runs the compactions of a log, one at a time.
pub(crate) struct Compactor {
    shared: Arc<Shared>,
    storage: Arc<dyn Storage>,
    job: Option<CompactionJob>,
    /// Replaced segments.
    pub replaced: Vec<Arc<Segment>>,
}

impl fmt::Debug for Compactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compactor").finish_non_exhaustive()
    }
}

/// A running compaction.
struct CompactionJob {
    inputs: Vec<Arc<Segment>>,
    gathers: bool,
    /// Number of inputs whose directory is not read yet.
    unread: usize,
    /// Live shares by stream and position, from the next one to read.
    pieces: VecDeque<LiveShare>,
    /// Entries to read into memory, by location on disk.
    wanted: VecDeque<(MovedEntry, FrameRef)>,
    /// Entries read; sorted by stream and position once `wanted` is empty.
    window: VecDeque<(MovedEntry, Entry)>,
    sorted: bool,
    left_bytes: u64,
    left_entries: u64,
    growing: Option<ColdSegmentBuilder>,
    made: VecDeque<ColdSegment>,
    /// New segments listed in the state file, with the rows still to be moved to them.
    receiving_rows: VecDeque<(Arc<Segment>, VecDeque<DirectoryRow>)>,
    is_named: bool,
    /// Share of the last planned entry, and of the last written one.
    planned_share: u64,
    written_share: Option<u64>,
    /// Filter of the streams being cleaned, and the position below which each one is.
    cleaning: Option<(Arc<dyn EntryFilter>, BTreeMap<u64, u64>)>,
    /// Inputs that were replaced, and the segments that replaced them.
    replaced: Vec<u64>,
    added: Vec<u64>,
    /// Why the filter refused an entry.
    refusal: Option<String>,
}

impl Compactor {
    pub(crate) fn new(shared: Arc<Shared>, storage: Arc<dyn Storage>) -> Self {
        Self { shared, storage, job: None, replaced: Vec::new() }
    }

    /// Does one piece of work.
    pub(crate) fn step(&mut self) -> Result<CompactionStep, Error> {
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
        match self.advance(&mut job) {
            Ok(CompactionStep::Done) => {
                self.on_replaced(&job);
                Ok(CompactionStep::Done)
            }
            Ok(CompactionStep::Refused) => {
                let error = Error::Unusable(job.refusal.take().unwrap_or_default());
                self.give_up(&job, &error);
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
                self.give_up(&job, &error);
                Ok(CompactionStep::NoSpace)
            }
            Err(error) => {
                // The state file may list the segments: only an open can tell.
                for cold in job.made.drain(..) {
                    drop(cold.into_parts());
                }
                Err(error)
            }
        }
    }

    /// Chooses segments and protects them from being freed.
    fn begin(&self) -> Option<CompactionJob> {
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
        let CompactionChoice { ids, gathers } = match &core.cleaning {
            Some(Cleaning { request, left }) if !left.is_empty() => {
                cleaning = Some((Arc::clone(&request.filter), request.below.clone()));
                choose_listed(&candidates, left, bounds)?
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
        Some(CompactionJob {
            unread: inputs.len(),
            inputs,
            gathers,
            pieces: VecDeque::new(),
            wanted: VecDeque::new(),
            window: VecDeque::new(),
            sorted: false,
            left_bytes,
            left_entries,
            growing: None,
            made: VecDeque::new(),
            receiving_rows: VecDeque::new(),
            is_named: false,
            planned_share: 0,
            written_share: None,
            cleaning,
            replaced: Vec::new(),
            added: Vec::new(),
            refusal: None,
        })
    }

    /// Ends a cleaning that is done, or whose segments cannot be rewritten now.
    fn end_cleaning(&self) -> Result<Option<CompactionStep>, Error> {
        let cleaning = {
            let mut core = self.shared.lock();
            let Some(Cleaning { left, .. }) = &core.cleaning else { return Ok(None) };
            if !left.is_empty() {
                let usable = candidates(&core.log);
                let is_usable = |id: &u64| usable.iter().any(|candidate| candidate.id == *id);
                // Trimmed segments may be gone.
                let is_gone = |id: &u64| core.log.segment(*id).is_none_or(|held| held.removing);
                let is_blocked = |id: &&u64| !is_usable(id) && !is_gone(id);
                let blocked = left.iter().find(is_blocked).copied();
                let left: Vec<u64> = left.iter().copied().filter(|id| !is_gone(id)).collect();
                let Some(blocked) = blocked else {
                    let is_done = left.is_empty();
                    if let Some(cleaning) = &mut core.cleaning {
                        cleaning.left = left;
                    }
                    return Ok(is_done.then_some(CompactionStep::More(0)));
                };
                let cleaning = core.cleaning.take();
                drop(core);
                if let Some(cleaning) = cleaning {
                    let what = format!("segment {blocked:016x} cannot be rewritten now");
                    cleaning.request.finish(Err(Error::Unusable(what)));
                }
                return Ok(Some(CompactionStep::Refused));
            }
            core.cleaning.take()
        };
        let Some(Cleaning { request, .. }) = cleaning else { return Ok(None) };
        let mut file = self.shared.state_file.lock().ignore_poison();
        let (named, before) = {
            let mut core = self.shared.lock();
            core.check_open()?;
            let before = core.clean_marks.clone();
            core.clean_marks.extend(&request.marks);
            (core.state(self.shared.identity.clone(), file.checkpoint.clone()), before)
        };
        let written = file.write(self.storage.as_ref(), &named);
        if written.as_ref().is_err_and(Error::is_shortage) {
            // The file may have the marks all the same, and everything below them is rewritten.
            self.shared.lock().clean_marks = before;
        }
        drop(file);
        match written {
            Err(error) if !error.is_shortage() => {
                request.finish(Err(error.clone()));
                Err(error)
            }
            result => {
                request.finish(result);
                Ok(Some(CompactionStep::More(0)))
            }
        }
    }

    /// Removes the segments that a job has rewritten from the running cleaning.
    ///
    /// A job that began before the cleaning has copied their entries without the filter. So its new
    /// segments have to be rewritten instead.
    fn on_replaced(&self, job: &CompactionJob) {
        let mut core = self.shared.lock();
        let Some(cleaning) = &mut core.cleaning else { return };
        let count = cleaning.left.len();
        cleaning.left.retain(|id| !job.replaced.contains(id));
        if job.cleaning.is_none() && cleaning.left.len() < count {
            cleaning.left.extend(&job.added);
        }
    }

    fn advance(&mut self, job: &mut CompactionJob) -> Result<CompactionStep, Error> {
        if job.is_named {
            return Ok(self.join(job));
        }
        if let Some(at) = job.unread.checked_sub(1) {
            return self.read_shares(job, at);
        }
        if !job.wanted.is_empty() {
            return job.read_some();
        }
        if !job.window.is_empty() {
            return self.write_some(job);
        }
        if job.cleaning.is_some()
            && let Some(growing) = job.growing.take()
        {
            // The size that the next window leaves is not known yet: each gets a segment that fits.
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
    fn give_up(&self, job: &CompactionJob, error: &Error) {
        warn!(%error, "gave up a compaction");
        if job.cleaning.is_some() {
            let cleaning = self.shared.lock().cleaning.take();
            if let Some(cleaning) = cleaning {
                cleaning.request.finish(Err(error.clone()));
            }
        }
        let mut core = self.shared.lock();
        // A shortage is not damage: the next attempt may find what was short.
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

    // Reading.

    /// Reads the directory of one input and collects its live shares.
    fn read_shares(&self, job: &mut CompactionJob, at: usize) -> Result<CompactionStep, Error> {
        job.unread = at;
        let Some(segment) = job.inputs.get(at) else { return Ok(CompactionStep::More(0)) };
        let Some(trailer) = segment.trailer() else { return Ok(CompactionStep::More(0)) };
        let directory = read_directory(segment, trailer)?;
        let pages = u64::from(trailer.directory.pages) * crate::format::layout::BLOCK_BYTES;
        let core = self.shared.lock();
        let live =
            directory.into_iter().filter(|share| core.log.trim_of(share.stream) < share.next);
        job.pieces.extend(live.map(|share| LiveShare { input: at, share }));
        drop(core);
        if at == 0 {
            let all = job.pieces.make_contiguous();
            all.sort_unstable_by_key(|piece| (piece.share.stream, piece.share.first));
        }
        Ok(CompactionStep::More(pages))
    }

    /// Looks up the next entries, as many as fit into memory.
    fn plan(&self, job: &mut CompactionJob) -> Result<(), Error> {
        let (mut bytes, mut entries) = (0, 0);
        let mut wanted = Vec::new();
        while let Some(LiveShare { input, share }) = job.pieces.front().copied() {
            let full = bytes + share.bytes > WINDOW_BYTES
                || entries + u64::from(share.entries) > WINDOW_ENTRIES;
            if full && !wanted.is_empty() {
                break;
            }
            job.pieces.pop_front();
            (bytes, entries) = (bytes + share.bytes, entries + u64::from(share.entries));
            let Some(segment) = job.inputs.get(input) else { continue };
            let trim = self.shared.lock().log.trim_of(share.stream);
            let mut table = segment.by_stream(&self.shared.cache, ReadMode::Blocking);
            job.planned_share += 1;
            let mut next = share.first;
            for number in share.begin..share.begin + share.entries {
                let row = table.get(number).map_err(stopped)?;
                if row.first < next {
                    return Err(rows_disagree(segment));
                }
                next = row.first + u64::from(row.count);
                let placement = Placement {
                    stream: share.stream,
                    first: row.first,
                    count: row.count,
                    time: row.time,
                };
                if row.first + u64::from(row.count) > trim {
                    let moving = MovedEntry { placement, share: job.planned_share };
                    wanted.push((moving, FrameRef::of_row(&row, segment)));
                }
            }
            if next != share.next {
                return Err(rows_disagree(segment));
            }
        }
        // Each input is read once, from start to end.
        wanted.sort_unstable_by_key(|(_, wanted)| (wanted.segment.id, wanted.offset));
        job.wanted = wanted.into();
        job.sorted = false;
        Ok(())
    }

    // Writing.

    /// Writes the next entries of the window.
    fn write_some(&self, job: &mut CompactionJob) -> Result<CompactionStep, Error> {
        if !job.sorted {
            let all = job.window.make_contiguous();
            all.sort_unstable_by_key(|(moving, _)| {
                (moving.placement.stream, moving.placement.first)
            });
            job.sorted = true;
        }
        let mut bytes = 0;
        let mut full = None;
        while let Some((MovedEntry { placement, share }, entry)) = job.window.front() {
            let frame = Frame::entry(entry.id, entry.stream, &entry.head, &entry.payload);
            let len = frame.len() as u64;
            if bytes > 0 && bytes + len > STEP_BYTES {
                break;
            }
            let Some(growing) = &mut job.growing else {
                job.growing = Some(self.begin_segment(job, len)?);
                continue;
            };
            if !growing.fits(frame.len()) {
                full = job.growing.take();
                break;
            }
            let begins_share = job.written_share != Some(*share);
            growing.push(&frame, *placement, begins_share, !begins_share)?;
            job.written_share = Some(*share);
            bytes += len;
            job.left_bytes = job.left_bytes.saturating_sub(len);
            job.left_entries = job.left_entries.saturating_sub(1);
            job.window.pop_front();
        }
        self.shared.lock().counters.rewritten_bytes += bytes;
        match full {
            Some(full) => self.finish(job, full),
            None => Ok(CompactionStep::More(bytes)),
        }
    }

    fn begin_segment(&self, job: &CompactionJob, frame: u64) -> Result<ColdSegmentBuilder, Error> {
        let (entries, bytes) = match job.cleaning {
            None => (job.left_entries, job.left_bytes),
            Some(_) => (job.window.len() as u64, job.window_bytes()),
        };
        let left = cold_bytes(entries.max(1), bytes.max(frame));
        let mut len = left.min(self.shared.options.segment_bytes);
        while frame_bytes_max(len) < frame {
            len *= 2;
        }
        ColdSegmentBuilder::begin(&self.shared, &self.storage, len, job.gathers)
    }

    fn finish(
        &self,
        job: &mut CompactionJob,
        mut growing: ColdSegmentBuilder,
    ) -> Result<CompactionStep, Error> {
        job.written_share = None;
        if let Some((index, input)) = growing.repeated().zip(job.inputs.first()) {
            return Err(input.damaged(0..input.len, &format!("entry {index} occurs twice")));
        }
        let cold = match growing.finish() {
            Ok(cold) => cold,
            Err(error) => {
                // Without it the job would look whole, although its entries are in no segment.
                job.growing = Some(growing);
                return Err(error);
            }
        };
        let footer = cold.segment.len - cold.trailer.footer_start;
        job.made.push_back(cold);
        Ok(CompactionStep::More(footer))
    }

    // Replacing the old segments.

    /// Lists the new segments in the state file instead of the old ones.
    fn name(&self, job: &mut CompactionJob) -> Result<(), Error> {
        self.storage.sync_dir().map_err(|e| changing("sync", &self.storage.describe(), &e))?;
        let shared = &self.shared;
        let mut file = shared.state_file.lock().ignore_poison();
        let named = {
            let mut core = shared.lock();
            core.check_open()?;
            if let (Some(_), Some(purged)) = (&job.cleaning, core.log.purged) {
                // What took the place of the removed entries has left the Raft log.
                core.cleaned_upto = core.cleaned_upto.max(purged.index);
            }
            let mut named = core.state(shared.identity.clone(), file.checkpoint.clone());
            let old = |id: u64| job.inputs.iter().any(|input| input.id == id);
            named.segments.retain(|(id, _)| !old(*id));
            named.cold.retain(|cold| !old(cold.id));
            named.cold.extend(job.made.iter().map(ColdSegment::info));
            named
        };
        // After a shortage the step is repeated.
        let written = file.write(self.storage.as_ref(), &named);
        if written.is_err() && file.is_last_named() {
            // The state file may list the segments, and a crash may find it.
            job.made.iter_mut().for_each(ColdSegment::pin_file);
        }
        written?;
        let mut core = shared.lock();
        for input in &job.inputs {
            if let Some(held) = core.log.segment_mut(input.id) {
                held.removing = true;
            }
        }
        for cold in job.made.drain(..) {
            let (segment, trailer, directory) = cold.into_parts();
            if let Some(files) = &shared.files {
                segment.open_on_demand(files);
            }
            let held = LiveSegment::receiving_rows(Arc::clone(&segment), &trailer, &directory);
            core.log.cold.insert(segment.id, held);
            job.added.push(segment.id);
            job.receiving_rows.push_back((segment, directory.into()));
        }
        drop(core);
        // Locked until memory agrees with the file.
        drop(file);
        job.is_named = true;
        Ok(())
    }

    /// Moves rows to the new segments. The old segments are freed once no row is left.
    fn join(&mut self, job: &mut CompactionJob) -> CompactionStep {
        let mut core = self.shared.lock();
        let log = &mut core.log;
        if let Some((segment, directory)) = job.receiving_rows.front_mut() {
            for _ in 0..ROWS_PER_LOCK {
                let Some(share) = directory.pop_front() else { break };
                log.move_row(segment.id, &share, |id| {
                    job.inputs.iter().any(|input| input.id == id)
                });
            }
            if directory.is_empty() {
                job.receiving_rows.pop_front();
            }
            return CompactionStep::More(0);
        }
        for stream in job.cleaning.iter().flat_map(|(_, below)| below.keys()) {
            log.remove_replaced(*stream, |id| job.inputs.iter().any(|input| input.id == id));
        }
        // All at once, so that a read by index finds each entry in exactly one of them.
        let joined: Vec<u64> =
            log.cold.iter().filter(|(_, h)| h.receiving_rows).map(|(id, _)| *id).collect();
        for id in joined {
            if let Some(held) = log.cold.get_mut(&id) {
                (held.busy, held.receiving_rows) = (false, false);
            }
        }
        for input in &job.inputs {
            let old = log.remove_segment(input.id);
            debug_assert!(old.is_none_or(|old| old.live_rows == 0), "a row was left behind");
        }
        drop(core);
        job.replaced = job.inputs.iter().map(|input| input.id).collect();
        self.replaced.append(&mut job.inputs);
        CompactionStep::Done
    }
}

impl CompactionJob {
    /// Returns whether only the state file remains to be written.
    fn is_whole(&self) -> bool {
        let is_read = self.unread == 0 && self.pieces.is_empty() && self.wanted.is_empty();
        is_read && self.window.is_empty() && self.growing.is_none()
    }

    /// Reads some of the wanted entries into memory.
    fn read_some(&mut self) -> Result<CompactionStep, Error> {
        let mut sources = Vec::new();
        let (mut bytes, mut first) = (0, None);
        while let Some((_, wanted)) = self.wanted.front() {
            // Bounds the bytes read from the disk, including the gaps between live entries.
            let (segment, start) = *first.get_or_insert((wanted.segment.id, wanted.offset));
            let end = wanted.offset + wanted.len;
            let more = segment == wanted.segment.id && end <= start + STEP_BYTES;
            if !sources.is_empty() && !more {
                break;
            }
            let Some((moving, wanted)) = self.wanted.pop_front() else { break };
            bytes += wanted.len;
            sources.push((moving, EntrySource::Disk(wanted)));
        }
        let places: Vec<FrameRef> = wanted_of(&sources);
        let found = load_entries(sources, &[], ReadMode::Blocking).map_err(stopped)?;
        if let Some(missed) = places.get(found.len()) {
            // Reads the missed entry alone to get its error.
            load_entries(vec![((), EntrySource::Disk(missed.clone()))], &[], ReadMode::Blocking)
                .map_err(stopped)?;
            return Err(missed.segment.damaged(0..0, "an entry could not be read at first"));
        }
        for (moving, mut entry) in found {
            match self.filtered(&moving.placement, &entry) {
                Ok(FilteredEntry::Unchanged) => {}
                Ok(FilteredEntry::Replaced { head, payload }) => {
                    (entry.head, entry.payload) = (head, payload);
                }
                Ok(FilteredEntry::Removed) => continue,
                Err(what) => {
                    self.refusal = Some(what);
                    return Ok(CompactionStep::Refused);
                }
            }
            // Copied, because the slices would keep everything in memory that was read with them.
            entry.head = Bytes::copy_from_slice(&entry.head);
            entry.payload.bytes = Bytes::copy_from_slice(&entry.payload.bytes);
            self.window.push_back((moving, entry));
        }
        Ok(CompactionStep::More(bytes))
    }

    fn filtered(&self, placement: &Placement, entry: &Entry) -> Result<FilteredEntry, String> {
        let Some((filter, below)) = &self.cleaning else { return Ok(FilteredEntry::Unchanged) };
        match below.get(&placement.stream) {
            Some(end) if placement.first < *end => filter.filter(placement, entry),
            _ => Ok(FilteredEntry::Unchanged),
        }
    }

    /// Returns the bytes of the frames in the window.
    fn window_bytes(&self) -> u64 {
        let len = |entry: &Entry| {
            Frame::entry(entry.id, entry.stream, &entry.head, &entry.payload).len() as u64
        };
        self.window.iter().map(|(_, entry)| len(entry)).sum()
    }
}

/// Error for a directory and a stream table that disagree. Nothing of the segment is moved.
fn rows_disagree(segment: &Segment) -> Error {
    segment.damaged(0..segment.len, "the directory of streams and the stream table disagree")
}

fn wanted_of(sources: &[(MovedEntry, EntrySource)]) -> Vec<FrameRef> {
    let wanted = |(_, source): &(MovedEntry, EntrySource)| match source {
        EntrySource::Disk(wanted) => Some(wanted.clone()),
        EntrySource::Memory(_) => None,
    };
    sources.iter().filter_map(wanted).collect()
}

fn stopped(stop: ReadStop) -> Error {
    match stop {
        ReadStop::Failed(error) => error,
        ReadStop::WouldBlock => Error::Unusable("a blocking read did not block".to_owned()),
    }
}

/// Returns the segments that may be rewritten: sealed, purged, without slots, and undamaged.
fn candidates(log: &Log) -> Vec<CompactionCandidate> {
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
