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

/// Cached entries dropped per call, to bound how long the lock is held.
const UNCACHED_MAX: usize = 8192;

impl Wal {
    /// Rewrites the entries of streams through a filter, and then makes marks durable.
    ///
    /// Works like a compaction of the segments that have dirty positions of the streams below the
    /// limits in the request. It has the same rate, and rewrites only sealed segments whose entries
    /// have left the Raft log. A crash leaves each segment either unchanged or rewritten. Entries
    /// that the filter removes leave gaps in their stream, and reads continue after a gap. The last
    /// entry of a stream may be removed, too.
    ///
    /// The callback gets [`Error::Unusable`] if a segment cannot be rewritten yet, if the filter
    /// refuses an entry, if compaction is off, or while another request runs. It gets
    /// [`Error::Damaged`], [`Error::Io`], [`Error::DiskFull`] and [`Error::Exhausted`] if the
    /// compaction fails with them. Some segments may be rewritten by then.
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

    /// Requests a new segment if the active one has positions of the stream below `position`.
    ///
    /// These positions cannot be cleaned before the active segment is sealed. The writer begins the
    /// new segment once it is idle, if a segment is ready. Returns whether one was requested.
    pub fn roll_early(&self, stream: u64, position: u64) -> bool {
        let mut core = self.shared.lock();
        let active = core.log.chain.last_key_value().map(|(id, _)| *id);
        let held = core.log.streams.get(&stream);
        let is_active = held.is_some_and(|held| {
            // Checks all unsealed shares: installed segments may follow the active one in the
            // stream.
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

    /// Drops cached entries that prevent positions of the stream below `position` from being
    /// cleaned.
    ///
    /// A segment is rewritten only once none of its entries is in memory. In an idle log the newest
    /// entries would stay there permanently, since only newer ones replace them. Drops entries of
    /// sealed segments that have left the Raft log, together with all older ones. Readers find them
    /// on disk. Many entries need several calls.
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
        // The last share is not enough: installed segments may have older entries, or none.
        let purged = segments.filter(|held| held.is_purged(upto)).filter_map(|held| held.entries);
        let Some(newest) = purged.map(|(_, last)| last.index).max() else { return };
        let payloads = log.drop_slots_upto(newest, UNCACHED_MAX);
        drop(core);
        drop(payloads);
    }

    /// Returns whether a checkpoint would help to clean positions of the stream below `position`.
    ///
    /// That is so if a segment with such positions is not sealed, or has entries above the last
    /// checkpoint. Entries below the checkpoint wait only for a purge, or until they leave memory.
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

    /// Returns the last entry for which a cleaning may have removed earlier ones; 0 if there is
    /// none.
    ///
    /// Counts cleanings of this log and of the logs that sent entries to it. A state machine that
    /// has applied this entry has all later records that replaced removed ones. A cleaning of this
    /// log only removes entries that have left the Raft log, and those are applied.
    pub fn cleaned_upto(&self) -> u64 {
        self.shared.lock().cleaned_upto
    }

    /// Raises [`Self::cleaned_upto`] to the value of another log, before entries of that log are
    /// staged or installed.
    ///
    /// Becomes durable with these entries, or with any other change of the state file.
    ///
    /// # Errors
    /// [`Error::Unusable`] if `index` is out of range.
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

    /// Returns an upper bound of the time of the first entry at or above a position.
    ///
    /// For an entry in memory that is its time; else it is the time of the stream's newest entry in
    /// the same segment.
    pub fn time_from(&self, stream: u64, position: u64) -> Option<u64> {
        let core = self.shared.lock();
        let stream = core.log.streams.get(&stream)?;
        let in_memory = stream.refs.get(stream.refs.partition_point(|it| it.next() <= position));
        let in_segment = stream.rows.iter().map(|row| row.row).find(|row| row.next > position);
        let times = [in_memory.map(|it| it.time), in_segment.map(|it| it.last_time)];
        times.into_iter().flatten().min()
    }

    /// Returns the position of the stream below which all entries can be rewritten now.
    ///
    /// That is the start of the first share that is not sealed, has not left the Raft log, or has
    /// entries in memory. `u64::MAX` if there is no such share. The caller knows where the stream
    /// ends, even where its last entries were removed and this log never had them.
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
        // Entries in memory before that share are in no segment that can be rewritten.
        let memory = held.refs.front().map_or(u64::MAX, |entry| entry.first);
        disk.min(memory)
    }
}
