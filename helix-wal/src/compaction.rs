//! Compaction: live entries of some sealed segments are written anew, by stream, into cold ones.
//! Offsets, indexes and bytes stay what they are; only where they stand changes.
//!
//! New segments are written and synced, then one state file names them instead of the old ones,
//! then each stream's rows are moved over, then the old ones are freed. Until the state file
//! nothing has changed; a crash at any moment finds either the old ones or the new ones, never
//! both.
//! Every entry is checked as it is read. One that does not verify ends the attempt: the segment is
//! left alone from then on, with its damage, which readers are told of.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, PoisonError};

use bytes::Bytes;
use tracing::{debug, warn};

use crate::choose::{Bounds, Candidate, Choice, choose};
use crate::cold::{Cold, Growing, cold_bytes};
use crate::error::poison;
use crate::footer::DirectoryRow;
use crate::frame::Frame;
use crate::held::Held;
use crate::install::name_of;
use crate::load::{Source, Wanted, load};
use crate::log::Log;
use crate::recovery::read_directory;
use crate::segment::{Segment, Stop};
use crate::shared::Shared;
use crate::storage::Storage;
use crate::tip::frame_bytes_max;
use crate::{Entry, Error, How, Placement};

/// Live bytes that are read into memory before they are written by stream.
const WINDOW_BYTES: u64 = 32 << 20;
/// And most entries, which have a cost of their own.
const WINDOW_ENTRIES: u64 = 128 << 10;
/// Read or written in one step.
const STEP_BYTES: u64 = 1 << 20;
/// Rows that are moved under one hold of the lock.
const ROWS_AT_ONCE: usize = 1024;
/// Slots that are given up at one time, so that old segments have none.
const SLOTS_AT_ONCE: usize = 8192;

/// A live share of an input.
#[derive(Debug, Clone, Copy)]
struct Piece {
    input: usize,
    share: DirectoryRow,
}

/// An entry on its way.
#[derive(Debug)]
struct Moving {
    placement: Placement,
    /// Where retention may cut: shares stay what they were.
    begins_share: bool,
}

/// What a step came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// There was nothing to do.
    Nothing,
    /// So many bytes were read or written, and there is more to do.
    More(u64),
    /// It has to wait for space.
    NoSpace,
    /// Old segments were replaced: these may go.
    Done,
}

/// Compactions of one log, one at a time.
pub(crate) struct Compactor {
    shared: Arc<Shared>,
    storage: Arc<dyn Storage>,
    job: Option<Job>,
    /// Segments that were replaced.
    pub replaced: Vec<Arc<Segment>>,
}

impl fmt::Debug for Compactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compactor").finish_non_exhaustive()
    }
}

/// One compaction.
struct Job {
    inputs: Vec<Arc<Segment>>,
    gathers: bool,
    /// Inputs whose directory is still to be read.
    unread: usize,
    /// By stream and position, from the next to read on.
    pieces: VecDeque<Piece>,
    /// What of them is to be read into memory, by place on disk.
    wanted: VecDeque<(Moving, Wanted)>,
    /// What was read, and once `wanted` is empty: by stream and position.
    window: VecDeque<(Moving, Entry)>,
    sorted: bool,
    left_bytes: u64,
    left_entries: u64,
    growing: Option<Growing>,
    made: VecDeque<Cold>,
    /// Segments that the state file names already, and rows of the first that are to be moved.
    joining: VecDeque<(Arc<Segment>, VecDeque<DirectoryRow>)>,
    is_named: bool,
}

impl Compactor {
    pub(crate) fn new(shared: Arc<Shared>, storage: Arc<dyn Storage>) -> Self {
        Self { shared, storage, job: None, replaced: Vec::new() }
    }

    /// Does one piece of work.
    pub(crate) fn step(&mut self) -> Result<Step, Error> {
        let Some(mut job) = self.job.take() else {
            self.job = self.begin();
            return Ok(if self.job.is_some() { Step::More(0) } else { Step::Nothing });
        };
        match self.advance(&mut job) {
            Ok(Step::Done) => Ok(Step::Done),
            Ok(step) => {
                self.job = Some(job);
                Ok(step)
            }
            Err(Error::DiskFull { .. }) if job.is_whole() => {
                self.job = Some(job);
                Ok(Step::NoSpace)
            }
            Err(Error::Closed) => Ok(Step::Nothing),
            Err(error @ (Error::DiskFull { .. } | Error::Damaged { .. } | Error::Io { .. })) => {
                self.give_up(&job, &error);
                Ok(Step::NoSpace)
            }
            Err(error) => {
                // Perhaps the state file names them: only an open can tell.
                for cold in job.made.drain(..) {
                    drop(cold.keep());
                }
                Err(error)
            }
        }
    }

    /// Chooses segments, and takes care that nobody frees them.
    fn begin(&self) -> Option<Job> {
        let options = &self.shared.options;
        let free = self.storage.free_bytes().unwrap_or(u64::MAX);
        let bounds = Bounds {
            segment_bytes: options.segment_bytes,
            slack: options.compaction_slack_bytes,
            room: free.saturating_sub(options.reserve_bytes),
        };
        let mut core = self.shared.lock();
        core.log.pop_slots(SLOTS_AT_ONCE);
        let candidates = core.log.candidates();
        let Choice { ids, gathers } = choose(&candidates, bounds)?;
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
        Some(Job {
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
            joining: VecDeque::new(),
            is_named: false,
        })
    }

    fn advance(&mut self, job: &mut Job) -> Result<Step, Error> {
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
        if !job.pieces.is_empty() {
            self.plan(job)?;
            return Ok(Step::More(0));
        }
        if let Some(growing) = job.growing.take() {
            return self.finish(job, growing);
        }
        self.name(job)?;
        Ok(Step::More(0))
    }

    /// Takes back what was begun. The new files go with the job.
    fn give_up(&self, job: &Job, error: &Error) {
        warn!(%error, "a compaction was given up");
        let mut core = self.shared.lock();
        for input in &job.inputs {
            if let Some(held) = core.log.segment_mut(input.id) {
                held.busy = false;
                // Reading it again would find the same.
                let name = input.name();
                held.spoiled |= match error {
                    Error::Damaged { file, .. } | Error::Io { file, .. } => *file == name,
                    _ => false,
                };
            }
        }
    }

    // Reading.

    /// Reads the directory of one input: which shares are live.
    fn read_shares(&self, job: &mut Job, at: usize) -> Result<Step, Error> {
        job.unread = at;
        let Some(segment) = job.inputs.get(at) else { return Ok(Step::More(0)) };
        let Some(trailer) = segment.trailer() else { return Ok(Step::More(0)) };
        let directory = read_directory(segment, trailer)?;
        let pages = u64::from(trailer.directory.pages) * crate::layout::BLOCK_BYTES;
        let core = self.shared.lock();
        let live =
            directory.into_iter().filter(|share| core.log.trim_of(share.stream) < share.next);
        job.pieces.extend(live.map(|share| Piece { input: at, share }));
        drop(core);
        if at == 0 {
            let all = job.pieces.make_contiguous();
            all.sort_unstable_by_key(|piece| (piece.share.stream, piece.share.first));
        }
        Ok(Step::More(pages))
    }

    /// Looks up which entries come next, as many as fit into memory.
    fn plan(&self, job: &mut Job) -> Result<(), Error> {
        let (mut bytes, mut entries) = (0, 0);
        let mut wanted = Vec::new();
        while let Some(Piece { input, share }) = job.pieces.front().copied() {
            let full = bytes + share.bytes > WINDOW_BYTES
                || entries + u64::from(share.entries) > WINDOW_ENTRIES;
            if full && !wanted.is_empty() {
                break;
            }
            job.pieces.pop_front();
            (bytes, entries) = (bytes + share.bytes, entries + u64::from(share.entries));
            let Some(segment) = job.inputs.get(input) else { continue };
            let trim = self.shared.lock().log.trim_of(share.stream);
            let mut table = segment.by_stream(&self.shared.cache, How::Blocking);
            let mut begins_share = true;
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
                    let moving = Moving { placement, begins_share };
                    wanted.push((moving, Wanted::of_row(&row, segment)));
                    begins_share = false;
                }
            }
            if next != share.next {
                return Err(rows_disagree(segment));
            }
        }
        // Each input is read once, from its beginning to its end.
        wanted.sort_unstable_by_key(|(_, wanted)| (wanted.segment.id, wanted.offset));
        job.wanted = wanted.into();
        job.sorted = false;
        Ok(())
    }

    // Writing.

    /// Writes the next entries of the window.
    fn write_some(&self, job: &mut Job) -> Result<Step, Error> {
        if !job.sorted {
            let all = job.window.make_contiguous();
            all.sort_unstable_by_key(|(moving, _)| {
                (moving.placement.stream, moving.placement.first)
            });
            job.sorted = true;
        }
        let mut bytes = 0;
        let mut full = None;
        while let Some((Moving { placement, begins_share }, entry)) = job.window.front() {
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
            growing.push(&frame, *placement, *begins_share)?;
            bytes += len;
            job.left_bytes = job.left_bytes.saturating_sub(len);
            job.left_entries = job.left_entries.saturating_sub(1);
            job.window.pop_front();
        }
        self.shared.lock().counters.rewritten_bytes += bytes;
        match full {
            Some(full) => self.finish(job, full),
            None => Ok(Step::More(bytes)),
        }
    }

    fn begin_segment(&self, job: &Job, frame: u64) -> Result<Growing, Error> {
        let left = cold_bytes(job.left_entries.max(1), job.left_bytes.max(frame));
        let mut len = left.min(self.shared.options.segment_bytes);
        while frame_bytes_max(len) < frame {
            len *= 2;
        }
        Growing::begin(&self.shared, &self.storage, len, job.gathers)
    }

    fn finish(&self, job: &mut Job, growing: Growing) -> Result<Step, Error> {
        if let Some((index, input)) = growing.repeated().zip(job.inputs.first()) {
            return Err(input.damaged(0..input.len, &format!("entry {index} comes twice")));
        }
        let cold = growing.finish()?;
        let footer = cold.segment.len - cold.trailer.footer_start;
        job.made.push_back(cold);
        Ok(Step::More(footer))
    }

    // Taking the place of the old ones.

    /// One state file names the new segments instead of the old ones.
    fn name(&self, job: &mut Job) -> Result<(), Error> {
        self.storage.sync_dir().map_err(|e| poison("sync", &self.storage.describe(), &e))?;
        let shared = &self.shared;
        let mut file = shared.state_file.lock().unwrap_or_else(PoisonError::into_inner);
        let named = {
            let core = shared.lock();
            core.check_open()?;
            let mut named = core.state(shared.identity.clone(), file.checkpoint.clone());
            let old = |id: u64| job.inputs.iter().any(|input| input.id == id);
            named.segments.retain(|(id, _)| !old(*id));
            named.cold.retain(|cold| !old(cold.id));
            named.cold.extend(job.made.iter().map(name_of));
            named
        };
        // `DiskFull` changes nothing: it is tried again.
        file.write(self.storage.as_ref(), &named)?;
        let mut core = shared.lock();
        for input in &job.inputs {
            if let Some(held) = core.log.segment_mut(input.id) {
                held.going = true;
            }
        }
        for cold in job.made.drain(..) {
            let (segment, trailer, directory) = cold.keep();
            if let Some(files) = &shared.files {
                segment.open_on_demand(files);
            }
            let held = Held::joining(Arc::clone(&segment), &trailer, &directory);
            core.log.cold.insert(segment.id, held);
            job.joining.push_back((segment, directory.into()));
        }
        drop(core);
        // Until memory says the same nobody else may write it.
        drop(file);
        job.is_named = true;
        Ok(())
    }

    /// Moves rows to the new segments; the old ones go once none is left.
    fn join(&mut self, job: &mut Job) -> Step {
        let mut core = self.shared.lock();
        let log = &mut core.log;
        if let Some((segment, directory)) = job.joining.front_mut() {
            for _ in 0..ROWS_AT_ONCE {
                let Some(share) = directory.pop_front() else { break };
                log.move_row(segment.id, &share, |id| {
                    job.inputs.iter().any(|input| input.id == id)
                });
            }
            if directory.is_empty() {
                job.joining.pop_front();
            }
            return Step::More(0);
        }
        // All at once: whoever walks by index finds each entry in one of them.
        let joined: Vec<u64> =
            log.cold.iter().filter(|(_, h)| h.joining).map(|(id, _)| *id).collect();
        for id in joined {
            if let Some(held) = log.cold.get_mut(&id) {
                (held.busy, held.joining) = (false, false);
            }
        }
        for input in &job.inputs {
            let old = log.remove_segment(input.id);
            debug_assert!(old.is_none_or(|old| old.live_rows == 0), "a row was left behind");
        }
        drop(core);
        self.replaced.append(&mut job.inputs);
        Step::Done
    }
}

impl Job {
    /// Whether all that remains is to name what was written.
    fn is_whole(&self) -> bool {
        let is_read = self.unread == 0 && self.pieces.is_empty() && self.wanted.is_empty();
        is_read && self.window.is_empty() && self.growing.is_none()
    }

    /// Reads some of what is wanted into memory.
    fn read_some(&mut self) -> Result<Step, Error> {
        let mut sources = Vec::new();
        let (mut bytes, mut first) = (0, None);
        while let Some((_, wanted)) = self.wanted.front() {
            // About so much of the disk is read, and the gaps between what is live with it.
            let (segment, start) = *first.get_or_insert((wanted.segment.id, wanted.offset));
            let end = wanted.offset + wanted.len;
            let more = segment == wanted.segment.id && end <= start + STEP_BYTES;
            if !sources.is_empty() && !more {
                break;
            }
            let Some((moving, wanted)) = self.wanted.pop_front() else { break };
            bytes += wanted.len;
            sources.push((moving, Source::Disk(wanted)));
        }
        let places: Vec<Wanted> = wanted_of(&sources);
        let found = load(sources, &[], How::Blocking).map_err(stopped)?;
        if let Some(missed) = places.get(found.len()) {
            // It stopped there, and says why when it is asked for nothing else.
            load(vec![((), Source::Disk(missed.clone()))], &[], How::Blocking).map_err(stopped)?;
            return Err(missed.segment.damaged(0..0, "an entry was not read at first"));
        }
        let copied = |(moving, entry): (Moving, Entry)| {
            // The slices would keep everything in memory that was read with them.
            let mut entry = entry;
            entry.head = Bytes::copy_from_slice(&entry.head);
            entry.payload.bytes = Bytes::copy_from_slice(&entry.payload.bytes);
            (moving, entry)
        };
        self.window.extend(found.into_iter().map(copied));
        Ok(Step::More(bytes))
    }
}

/// What the directory says would be moved is not what the table has: nothing of it is touched.
fn rows_disagree(segment: &Segment) -> Error {
    segment.damaged(0..segment.len, "the directory of streams and their table do not agree")
}

fn wanted_of(sources: &[(Moving, Source)]) -> Vec<Wanted> {
    let wanted = |(_, source): &(Moving, Source)| match source {
        Source::Disk(wanted) => Some(wanted.clone()),
        Source::Memory(_) => None,
    };
    sources.iter().filter_map(wanted).collect()
}

fn stopped(stop: Stop) -> Error {
    match stop {
        Stop::Failed(error) => error,
        Stop::WouldBlock => Error::Unusable("a blocking read did not block".to_owned()),
    }
}

impl Log {
    /// Positions of a stream below this are not needed.
    fn trim_of(&self, stream: u64) -> u64 {
        let stream = self.streams.get(&stream);
        stream.map_or(0, |stream| if stream.dropped { u64::MAX } else { stream.trim })
    }

    /// The segments that may be rewritten: sealed, below the purge point, without slots, whole.
    fn candidates(&self) -> Vec<Candidate> {
        let upto = self.purged.zip(self.checkpoint).map(|(a, b)| a.index.min(b.index));
        let in_slots = self.slots.front().map_or(u64::MAX, |slot| slot.id.index);
        let all = self.held.values().chain(self.cold.values());
        let candidate = |held: &Held| {
            let segment = held.segment.as_ref()?;
            let (first, last) = held.entries?;
            let usable = held.is_purged(upto)
                && !held.busy
                && !held.going
                && !held.spoiled
                && held.live_rows > 0
                && segment.withheld().is_none()
                && (segment.cold || last.index < in_slots);
            usable.then_some(Candidate {
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

    /// Puts a share of a new segment in the place of the row, or the part of a row, that it was
    /// made from. If that was trimmed meanwhile nothing needs it.
    fn move_row(&mut self, segment: u64, share: &DirectoryRow, is_old: impl Fn(u64) -> bool) {
        let Some(stream) = self.streams.get_mut(&share.stream) else { return };
        let Some((old, is_moved)) = stream.replace(segment, share, is_old) else { return };
        if let Some(held) = self.segment_mut(old) {
            held.live_rows = held.live_rows.saturating_sub(usize::from(is_moved));
            held.live_bytes = held.live_bytes.saturating_sub(share.bytes);
        }
        if let Some(held) = self.cold.get_mut(&segment) {
            held.live_rows += 1;
            held.live_bytes += share.bytes;
            held.live_entries += u64::from(share.entries);
        }
        // Trimmed while it was being written: left where it is, it would be counted as live until
        // the next trim, and stay behind when its new segment is compacted in turn.
        self.drop_trimmed_rows(share.stream);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::streams::Row;

    #[test]
    fn a_share_that_was_trimmed_while_it_was_written_counts_as_live_nowhere() {
        let share = |first: u64, next: u64| DirectoryRow {
            stream: 7,
            first,
            next,
            bytes: next - first,
            last_time: 0,
            entries: 1,
            begin: 0,
        };
        let mut log = Log::new(false, 0);
        let sealed = |live_rows| Held { sealed: true, live_rows, ..Held::new(None) };
        log.held.insert(1, sealed(1));
        log.cold.insert(2, sealed(0));
        log.cold.insert(3, sealed(0));
        let stream = log.streams.entry(7).or_default();
        stream.rows.push_back(Row::sealed(1, &share(0, 30)));
        stream.trim = 20;
        // The new segments meet in the middle of it.
        log.move_row(2, &share(0, 12), |id| id == 1);
        log.move_row(3, &share(19, 30), |id| id == 1);
        let rows: Vec<u64> = log.streams[&7].rows.iter().map(|row| row.row.segment).collect();
        assert_eq!(rows, [3]);
        let live = |held: Option<&Held>| held.map(|held| held.live_rows);
        assert_eq!(live(log.held.get(&1)), Some(0));
        assert_eq!([live(log.cold.get(&2)), live(log.cold.get(&3))], [Some(0), Some(1)]);
    }
}
