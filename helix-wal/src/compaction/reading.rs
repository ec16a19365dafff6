//! Reading: finds the live entries of the inputs, and loads them into memory, a window at a time.

use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;

use crate::compaction::compactor::{CompactionStep, Compactor, STEP_BYTES};
use crate::compaction::job::{CompactionJob, LiveShare, MovedEntry};
use crate::error::Error;
use crate::files::open_segment::read_directory;
use crate::files::segment::{ReadStop, Segment};
use crate::format::layout::BLOCK_BYTES;
use crate::read::load::{EntrySource, FrameRef, load_entries};
use crate::shared::cleaning::FilteredEntry;
use crate::types::{Placement, ReadMode};

/// Maximum live bytes in memory, to be written sorted by stream.
const WINDOW_BYTES: u64 = 32 << 20;
/// Maximum entries in memory, since each has a fixed cost in addition to its bytes.
const WINDOW_ENTRIES: u64 = 128 << 10;

impl Compactor {
    /// Returns how entries are read: past the page cache if possible.
    ///
    /// Entries are read only once. Cached pages of a recycled segment would have to be dropped when
    /// the writer overwrites it.
    pub(super) fn read_mode(&self) -> ReadMode {
        if self.storage.direct_io() { ReadMode::Direct } else { ReadMode::Blocking }
    }

    /// Reads the directory of one input and collects its live shares.
    pub(super) fn read_shares(
        &self,
        job: &mut CompactionJob,
        at: usize,
    ) -> Result<CompactionStep, Error> {
        job.unread = at;
        let Some(segment) = job.inputs.get(at) else { return Ok(CompactionStep::More(0)) };
        let Some(trailer) = segment.trailer() else { return Ok(CompactionStep::More(0)) };
        let directory = read_directory(segment, trailer)?;
        let pages = u64::from(trailer.directory.pages) * BLOCK_BYTES;
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
    pub(super) fn plan(&self, job: &mut CompactionJob) -> Result<(), Error> {
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
}

impl CompactionJob {
    /// Reads some of the wanted entries into memory.
    pub(super) fn read_some(&mut self, mode: ReadMode) -> Result<CompactionStep, Error> {
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
        let found = load_entries(sources, &[], mode).map_err(stopped)?;
        if let Some(missed) = places.get(found.len()) {
            // Reads the missed entry alone to get its error.
            load_entries(vec![((), EntrySource::Disk(missed.clone()))], &[], mode)
                .map_err(stopped)?;
            return Err(missed.segment.damaged(0..0, "an entry could not be read at first"));
        }
        self.loaded.extend(found);
        Ok(CompactionStep::More(bytes))
    }

    /// Passes entries through the filter, as many as one step may decompress. Stops early if it is
    /// cancelled.
    pub(super) fn filter_some(&mut self, is_cancelled: &AtomicBool) -> CompactionStep {
        let mut work = 0;
        while let Some((moving, mut entry)) = self.loaded.pop_front() {
            if let Some(filter) = self.filter_of(&moving.placement) {
                work += filter.work_bytes(&entry);
                match filter.filter(&moving.placement, &entry) {
                    Ok(FilteredEntry::Unchanged) => {}
                    Ok(FilteredEntry::Replaced { head, payload }) => {
                        (entry.head, entry.payload) = (head, payload);
                    }
                    Ok(FilteredEntry::Removed) => continue,
                    Err(what) => {
                        self.refusal = Some(what);
                        return CompactionStep::Refused;
                    }
                }
            }
            // Copied, because the slices would keep the whole buffer of the read in memory.
            entry.head = Bytes::copy_from_slice(&entry.head);
            entry.payload.bytes = Bytes::copy_from_slice(&entry.payload.bytes);
            self.window.push_back((moving, entry));
            if work >= STEP_BYTES || is_cancelled.load(Ordering::Relaxed) {
                break;
            }
        }
        CompactionStep::More(work)
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
