//! Cleaning the streams of a [`Wal`].

use std::collections::BTreeMap;

use super::Wal;
use crate::error::Error;
use crate::shared::cleaning::{CleanRequest, Cleaning};
use crate::shared::signal::WalThread;
use crate::types::CleanMark;

impl Wal {
    /// Rewrites the entries of streams through a filter, and then makes marks durable.
    ///
    /// It is a compaction of all segments with positions of the streams below those in the request:
    /// at the same rate, and only of sealed segments whose entries have left the Raft log. A crash
    /// leaves each segment as it was or rewritten. Entries that the filter removes leave gaps in
    /// their stream, and reads continue after a gap. The last entry below a position should stay.
    ///
    /// The callback gets [`Error::Unusable`] if a segment cannot be rewritten yet, if the filter
    /// refuses an entry, or while another request runs; [`Error::Damaged`], [`Error::DiskFull`] and
    /// [`Error::Exhausted`] as of a compaction. Some segments may be rewritten then.
    pub fn clean(&self, request: CleanRequest) {
        let refused = |request: CleanRequest, what: &str| {
            request.finish(Err(Error::Unusable(what.to_owned())));
        };
        if self.shared.storage.is_none() {
            return refused(request, "an in-memory log is not compacted");
        }
        if self.shared.options.compaction_bytes_per_second == 0 {
            return refused(request, "compaction is off");
        }
        let mut core = self.shared.lock();
        if let Err(error) = core.check_open() {
            drop(core);
            return request.finish(Err(error));
        }
        if core.cleaning.is_some() {
            drop(core);
            return refused(request, "another cleaning is running");
        }
        let streams = request
            .below
            .iter()
            .filter_map(|(stream, below)| core.log.streams.get(stream).map(|held| (held, *below)));
        let shares = streams.flat_map(|(held, below)| {
            held.rows.iter().filter(move |share| share.row.first < below)
        });
        let mut left: Vec<u64> = shares.map(|share| share.row.segment).collect();
        left.sort_unstable();
        left.dedup();
        core.cleaning = Some(Cleaning { request, left });
        let waiting = core.keeper.raise();
        drop(core);
        self.shared.wake(WalThread::Keeper, waiting);
    }

    /// Returns how far streams are clean, by stream.
    pub fn clean_marks(&self) -> BTreeMap<u64, CleanMark> {
        self.shared.lock().clean_marks.clone()
    }

    /// Returns how far a stream is clean.
    pub fn clean_mark(&self, stream: u64) -> CleanMark {
        self.shared.lock().clean_marks.get(&stream).copied().unwrap_or_default()
    }

    /// Returns the position of the stream below which entries can be rewritten now: up to the first
    /// share that is not sealed or has not left the Raft log.
    pub fn cleanable_upto(&self, stream: u64) -> u64 {
        let core = self.shared.lock();
        let log = &core.log;
        let upto = log.purged.zip(log.checkpoint).map(|(a, b)| a.index.min(b.index));
        let in_slots = log.slots.front().map_or(u64::MAX, |slot| slot.id.index);
        let Some(held) = log.streams.get(&stream) else { return 0 };
        let is_free = |segment: u64| {
            log.segment(segment).is_some_and(|held| {
                let last = held.entries.map_or(0, |(_, last)| last.index);
                let is_cold = held.segment.as_ref().is_some_and(|segment| segment.cold);
                held.is_purged(upto) && (is_cold || last < in_slots)
            })
        };
        let free = held.rows.iter().take_while(|share| is_free(share.row.segment));
        let next = free.last().map_or(0, |share| share.row.next);
        // Entries in memory that precede the next share are in no segment that can be rewritten.
        let memory = held.refs.front().map_or(u64::MAX, |entry| entry.first);
        next.min(memory)
    }
}
