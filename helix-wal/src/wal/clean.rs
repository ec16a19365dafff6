//! Cleaning the streams of a [`Wal`].

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Wal;
use crate::error::Error;
use crate::format::layout::NUMBERS_END;
use crate::memory::stream::StreamShare;
use crate::shared::cleaning::{CleanRequest, Cleaning};
use crate::shared::signal::WalThread;
use crate::types::CleanMark;

/// Cached entries dropped per call, which bounds how long the lock is held.
const UNCACHED_MAX: usize = 8192;

impl Wal {
    /// Rewrites the entries of streams through a filter, and then makes marks durable.
    ///
    /// It is a compaction of all segments with dirty positions of the streams below those in the
    /// request: at the same rate, and only of sealed segments whose entries have left the Raft log.
    /// A crash leaves each segment as it was or rewritten. Entries that the filter removes leave
    /// gaps in their stream, and reads continue after a gap. The last entry of a stream may go too.
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
        let streams = request.dirty.iter().filter_map(|(stream, dirty)| {
            let below = request.below.get(stream)?;
            Some((core.log.streams.get(stream)?, dirty, *below))
        });
        let shares = streams.flat_map(|(held, dirty, below)| {
            held.rows.iter().filter(move |StreamShare { row, .. }| {
                row.first < below
                    && dirty.iter().any(|it| it.start < row.next && row.first < it.end)
            })
        });
        let mut left: Vec<u64> = shares.map(|share| share.row.segment).collect();
        left.sort_unstable();
        left.dedup();
        core.cleaning = Some(Cleaning { request, left });
        let waiting = core.keeper.raise();
        drop(core);
        self.shared.wake(WalThread::Keeper, waiting);
    }

    /// Asks for a new segment if the active one has positions of the stream below `position`, which
    /// cannot be cleaned before that segment is sealed.
    ///
    /// The writer begins it once it is idle, if a segment is ready. Returns whether it was asked.
    pub fn roll_early(&self, stream: u64, position: u64) -> bool {
        let mut core = self.shared.lock();
        let active = core.log.chain.last_key_value().map(|(id, _)| *id);
        let held = core.log.streams.get(&stream);
        let is_active = held.is_some_and(|held| {
            // Not only the last ones: installed segments may follow the active one in the stream.
            let mut unsealed = held.rows.iter().rev().filter(|share| !share.row.sealed);
            unsealed.any(|share| Some(share.row.segment) == active && share.row.first < position)
        });
        if self.shared.storage.is_none() || !is_active || core.check_open().is_err() {
            return false;
        }
        core.rolls_early = true;
        let waiting = core.writer.raise();
        drop(core);
        self.shared.wake(WalThread::Writer, waiting);
        true
    }

    /// Drops cached entries that keep positions of the stream below `position` from being cleaned,
    /// together with older ones.
    ///
    /// The newest entries stay in memory until newer ones replace them, and a segment is rewritten
    /// only once none of its entries is there. In an idle log that would be never. Drops only
    /// entries of sealed segments that have left the Raft log, which readers find on disk. Many
    /// entries need several calls.
    pub fn uncache(&self, stream: u64, position: u64) {
        let mut core = self.shared.lock();
        if self.shared.storage.is_none() || core.check_open().is_err() {
            return;
        }
        let log = &mut core.log;
        let upto = log.purged.zip(log.checkpoint).map(|(a, b)| a.index.min(b.index));
        let Some(held) = log.streams.get(&stream) else { return };
        let shares = held.rows.iter().rev().filter(|share| share.row.first < position);
        let segments = shares.filter_map(|share| log.segment(share.row.segment));
        // Not the last share's: installed segments may have older entries, or none.
        let purged = segments.filter(|held| held.is_purged(upto)).filter_map(|held| held.entries);
        let Some(newest) = purged.map(|(_, last)| last.index).max() else { return };
        let payloads = log.drop_slots_upto(newest, UNCACHED_MAX);
        drop(core);
        drop(payloads);
    }

    /// Returns whether a checkpoint would bring positions of the stream below `position` closer to
    /// being cleaned: the last one does not cover all entries of their segments.
    ///
    /// Once it does, they wait for a purge, or for the end of their segment in memory.
    pub fn needs_checkpoint(&self, stream: u64, position: u64) -> bool {
        let core = self.shared.lock();
        let log = &core.log;
        let covered = log.checkpoint.map(|at| at.index);
        let Some(held) = log.streams.get(&stream) else { return false };
        let mut shares = held.rows.iter().filter(|share| share.row.first < position);
        shares.any(|share| {
            log.segment(share.row.segment).is_some_and(|held| !held.is_purged(covered))
        })
    }

    /// Returns how far streams are clean, by stream. Cheap, whatever their number.
    pub fn clean_marks(&self) -> Arc<BTreeMap<u64, CleanMark>> {
        Arc::clone(&self.shared.lock().clean_marks)
    }

    /// Returns the last entry for which a cleaning may have removed earlier ones, in this log or in
    /// the log that sent them. 0 if nothing was cleaned.
    ///
    /// A state machine that has applied it has everything that took their place. A cleaning of this
    /// log raises it no further than that, since it rewrites only what has left the Raft log.
    pub fn cleaned_upto(&self) -> u64 {
        self.shared.lock().cleaned_upto
    }

    /// Raises [`Self::cleaned_upto`] to what another log states, before entries of that log are
    /// staged or installed. Durable with them, and with any other change of the state file.
    ///
    /// # Errors
    /// [`Error::Unusable`] if no log can have such an entry.
    pub fn raise_cleaned_upto(&self, index: u64) -> Result<(), Error> {
        if index >= NUMBERS_END {
            return Err(Error::Unusable(format!("entry {index} is out of range")));
        }
        let mut core = self.shared.lock();
        core.cleaned_upto = core.cleaned_upto.max(index);
        Ok(())
    }

    /// Returns how far a stream is clean.
    pub fn clean_mark(&self, stream: u64) -> CleanMark {
        self.shared.lock().clean_marks.get(&stream).copied().unwrap_or_default()
    }

    /// Returns an upper bound of the time of the first entry at or above a position: its own time
    /// where it is in memory, else that of the newest entry of the stream in its segment.
    pub fn time_from(&self, stream: u64, position: u64) -> Option<u64> {
        let core = self.shared.lock();
        let stream = core.log.streams.get(&stream)?;
        let in_memory = stream.refs.get(stream.refs.partition_point(|it| it.next() <= position));
        let in_segment = stream.rows.iter().map(|row| row.row).find(|row| row.next > position);
        let times = [in_memory.map(|it| it.time), in_segment.map(|it| it.last_time)];
        times.into_iter().flatten().min()
    }

    /// Returns the position of the stream below which all entries can be rewritten now: the start
    /// of the first share that is not sealed or has not left the Raft log.
    ///
    /// `u64::MAX` if there is no such share. The caller knows how far the stream goes, also where
    /// the last entries were removed and this log never had them.
    pub fn cleanable_upto(&self, stream: u64) -> u64 {
        let core = self.shared.lock();
        let log = &core.log;
        let upto = log.purged.zip(log.checkpoint).map(|(a, b)| a.index.min(b.index));
        let in_slots = log.slots.front().map_or(u64::MAX, |slot| slot.id.index);
        let Some(held) = log.streams.get(&stream) else { return u64::MAX };
        let is_free = |segment: u64| {
            log.segment(segment).is_some_and(|held| {
                let last = held.entries.map_or(0, |(_, last)| last.index);
                let is_cold = held.segment.as_ref().is_some_and(|segment| segment.cold);
                held.is_purged(upto) && (is_cold || last < in_slots)
            })
        };
        let busy = held.rows.iter().find(|share| !is_free(share.row.segment));
        let disk = busy.map_or(u64::MAX, |share| share.row.first);
        // Entries in memory that precede that share are in no segment that can be rewritten.
        let memory = held.refs.front().map_or(u64::MAX, |entry| entry.first);
        disk.min(memory)
    }
}
