//! Compaction by key on one replica: carries out the rounds that the shard's log has decided.
//!
//! `pass.rs` decides which records stay, with a map from `key_map.rs`, on the thread of
//! `worker.rs`. The log then rewrites its segments. The leader of the shard proposes rounds
//! ([`crate::cluster`]).

mod key_map;
mod key_table;
mod pass;
mod report;
mod rounds;
#[cfg(test)]
mod tests;
mod waiting;
mod worker;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use helix_proto::compaction::Codecs;
use helix_wal::{CleanMark, CleanRequest, Placement, ReadMode, StoredEntry, Wal};
use tokio::sync::oneshot;
use tokio::time::{Instant, Interval};

use super::Shard;
use crate::limits::{CLEANER_INTERVAL, CLEANER_READ_BYTES, CLEANER_READ_RATE};
use crate::log::{CleanupState, Partition, PartitionId};
use crate::raft::DiskReads;
pub use key_map::KeyMapMemory;
use key_map::PassMemory;
use pass::{CleanFilter, CleanPass, StoredBytes};
pub(super) use report::CleanerReport;
pub use report::{CleanerStats, PartitionCleanup, TableSizes};
pub use rounds::{CompactedPartition, NextRound};
pub use worker::CleanerWorker;

/// A decided round that this replica has not finished in one partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DueRound {
    partition: PartitionId,
    log_start: u64,
    round: CleanupState,
    mark: CleanMark,
}

impl DueRound {
    fn of(partition: &Partition, mark: CleanMark) -> Option<Self> {
        let mut round = partition.cleanup;
        if !partition.settings.is_compacted() {
            // Finishes only what readers need: other replicas may have removed records below
            // `cleaned`.
            round.upto = round.cleaned;
        }
        Self::of_round(partition, round, mark)
    }

    /// Returns the unfinished work of the last round, even if the topic is not compacted here.
    ///
    /// The setting may have been changed there and back. The leader may know both changes, and this
    /// replica only the first.
    fn of_last_round(partition: &Partition, mark: CleanMark) -> Option<Self> {
        Self::of_round(partition, partition.cleanup, mark)
    }

    fn of_round(partition: &Partition, round: CleanupState, mark: CleanMark) -> Option<Self> {
        let due = Self { partition: partition.id, log_start: partition.log_start, round, mark };
        (!due.is_done()).then_some(due)
    }

    /// Returns the offset below which this replica is clean; deleted records count as clean.
    fn clean(&self) -> u64 {
        self.mark.upto.max(self.log_start)
    }

    fn is_done(&self) -> bool {
        self.clean() >= self.round.upto
            && (self.mark.also >= self.round.tombstones_below
                || self.log_start >= self.round.tombstones_below)
    }

    /// Offset below which this pass removes tombstones.
    ///
    /// Everything older must be gone here before: if tombstone and older record went in one pass, a
    /// crash between their segments could leave the older one alone.
    fn tombstones_below(&self) -> u64 {
        let wanted = self.round.tombstones_below;
        if self.clean() >= wanted { wanted } else { self.mark.also.min(self.clean()) }
    }

    /// Returns the offset up to which the partition can be cleaned now, at most `cleanable`.
    ///
    /// `None` if nothing can be done.
    fn end(&self, cleanable: u64) -> Option<u64> {
        // A topic that is no longer compacted may be clean beyond the offset that is still decided.
        let end = cleanable.min(self.round.upto.max(self.clean()));
        let has_records = end > self.clean();
        let has_tombstones = end >= self.clean() && self.tombstones_below() > self.mark.also;
        (has_records || has_tombstones).then_some(end)
    }
}

/// Cleans the partitions of a shard until it drains or is closed.
pub(super) async fn run(shard: Arc<Shard>) {
    let mut tick = tokio::time::interval(CLEANER_INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = shard.closed.cancelled() => return,
            _ = tick.tick() => {}
        }
        loop {
            let due = due_rounds(&shard);
            shard.cleaner.retain(&due);
            if due.is_empty() {
                break;
            }
            let make_cleanable = || shard.make_rounds_cleanable(&due_rounds(&shard));
            let round = tokio::select! {
                biased;
                () = shard.closed.cancelled() => return,
                round = with_ticks(clean_some(&shard), &mut tick, make_cleanable) => round,
            };
            if !matches!(round, Ok(false)) {
                // A pass ran, or a part of it.
                shard.cleaner_worker.clear_codecs();
            }
            match round {
                // More may be due: the next pass, or other partitions.
                Ok(true) => {}
                Ok(false) => break,
                Err(PassError { why, .. }) => {
                    tracing::warn!(shard_id = shard.id(), why, "cannot compact by key yet");
                    break;
                }
            }
        }
        shard.make_rounds_cleanable(&due_rounds(&shard));
    }
}

/// Waits for a pass, and calls `on_tick` at each tick.
///
/// The pass may take long, or wait for memory that other shards use.
async fn with_ticks<T>(
    pass: impl Future<Output = T>,
    tick: &mut Interval,
    on_tick: impl Fn(),
) -> T {
    let mut pass = pin!(pass);
    loop {
        tokio::select! {
            biased;
            done = &mut pass => return done,
            _ = tick.tick() => on_tick(),
        }
    }
}

fn due_rounds(shard: &Shard) -> Vec<DueRound> {
    if shard.wal.is_memory() {
        return Vec::new();
    }
    let marks = shard.wal.clean_marks();
    let mark = |partition: &Partition| marks.get(&partition.id.0).copied().unwrap_or_default();
    shard.machine.read_state(|state| {
        let due = |partition: &Partition| DueRound::of(partition, mark(partition));
        state.partitions_with_rounds().filter_map(due).collect()
    })
}

/// Partitions of a pass, and the offsets up to which they can be cleaned.
type ChosenTables = Vec<(DueRound, u64)>;

/// Chooses partitions that can be cleaned now.
fn choose(shard: &Shard, due: &[DueRound]) -> ChosenTables {
    let end = |due: &DueRound| due.end(shard.wal.cleanable_upto(due.partition.0));
    let ends = due.iter().filter_map(|due| Some((*due, end(due)?)));
    shard.cleaner.choose(ends, Instant::now())
}

/// Waits for memory if a partition can be cleaned now. Returns the memory and the chosen
/// partitions.
///
/// # Errors
/// The wait for memory fails if the process stops.
async fn choose_with_memory(
    key_maps: &KeyMapMemory,
    choose: impl Fn() -> ChosenTables,
) -> io::Result<Option<(Arc<PassMemory>, ChosenTables)>> {
    if choose().is_empty() {
        return Ok(None);
    }
    let memory = key_maps.begin_pass().await?;
    // Chooses again, since rounds, marks and segments may have changed during the wait.
    Ok(Some((memory, choose())))
}

/// A partition whose records are in the map of a pass.
struct FilledTable {
    partition: PartitionId,
    pass: CleanPass,
    /// Ranges that the pass changes.
    dirty: Vec<Range<u64>>,
    /// Its mark after the pass.
    mark: CleanMark,
}

/// Fills the maps of as many partitions as there is memory for. Returns the last failure, too.
///
/// A partition that fails is reported, and does not stop the others.
async fn fill_tables<F>(
    cleaner: &CleanerReport,
    memory: &Arc<PassMemory>,
    chosen: ChosenTables,
    fill: impl Fn(DueRound, u64, CleanPass) -> F,
) -> (Vec<FilledTable>, Option<PassError>)
where
    F: Future<Output = Result<(CleanPass, Vec<Range<u64>>), PassError>>,
{
    let (mut filled, mut failure) = (Vec::new(), None);
    for (due, end) in chosen {
        if !memory.has_part() {
            break;
        }
        cleaner.end_turn(due.partition);
        let tombstones_below = due.tombstones_below();
        let pass = CleanPass::new(due.clean(), tombstones_below, memory.clone());
        let (pass, dirty) = match fill(due, end, pass).await {
            Ok(filled) => filled,
            Err(error) => {
                cleaner.fail([due.partition], &error, Instant::now());
                failure = Some(error);
                continue;
            }
        };
        let is_full = pass.is_full();
        let also = tombstones_below.max(due.mark.also);
        let mark = CleanMark { upto: pass.upto(), also };
        filled.push(FilledTable { partition: due.partition, pass, dirty, mark });
        if is_full {
            break;
        }
    }
    (filled, failure)
}

/// Runs one pass over some of the partitions. Returns false if none can be cleaned now.
///
/// # Errors
/// Says why the pass failed; the partitions are reported as uncleanable.
async fn clean_some(shard: &Arc<Shard>) -> Result<bool, PassError> {
    let choose_now = || choose(shard, &due_rounds(shard));
    let Some((memory, chosen)) = choose_with_memory(&shard.key_maps, choose_now).await? else {
        return Ok(false);
    };
    let fill = move |due, end, pass| fill_table(shard, due, end, pass);
    let (filled, failure) = fill_tables(&shard.cleaner, &memory, chosen, fill).await;
    memory.release_unused();
    if filled.is_empty() {
        return failure.map_or(Ok(false), Err);
    }
    let partitions: Vec<PartitionId> = filled.iter().map(|it| it.partition).collect();
    let (mut passes, mut marks, mut dirty) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    for table in filled {
        let stream = table.partition.0;
        marks.insert(stream, table.mark);
        dirty.insert(stream, table.dirty);
        passes.insert(stream, table.pass);
    }
    let below = passes.iter().map(|(stream, pass)| (*stream, pass.upto())).collect();
    let (sender, done) = oneshot::channel();
    let filter = Arc::new(CleanFilter::new(passes, shard.cleaner_worker.clone()));
    // Ignored: the receiver is gone if the shard has closed.
    let done_sender = Box::new(move |result| drop(sender.send(result)));
    let request = CleanRequest { filter: filter.clone(), below, dirty, marks, done: done_sender };
    shard.wal.clean(request);
    let done = done.await;
    let has_refused = filter.has_refused();
    // On the worker, since freeing a map of many keys takes a while.
    shard.cleaner_worker.run(move || drop(filter)).await?;
    match done {
        Ok(Ok(())) => {
            shard.cleaner.succeed(&partitions);
            Ok(true)
        }
        Ok(Err(error)) => {
            shard.reads.note(&error);
            let mut error = PassError::from(error);
            // The log returns the same error for a batch that the filter refuses and for a busy
            // segment.
            error.is_transient &= !has_refused;
            // One partition may be the reason for all, so they are retried one by one.
            shard.cleaner.fail(partitions, &error, Instant::now());
            Err(error)
        }
        Err(_) => Err(helix_wal::Error::Closed.into()),
    }
}

/// Fills the map of a pass, and finds the ranges of the partition that the pass changes.
async fn fill_table(
    shard: &Shard,
    due: DueRound,
    end: u64,
    pass: CleanPass,
) -> Result<(CleanPass, Vec<Range<u64>>), PassError> {
    let pass = fill(shard, &due, pass, end).await?;
    find_dirty(shard, &due, pass).await
}

/// Reads a partition's records into the map of a pass.
async fn fill(
    shard: &Shard,
    due: &DueRound,
    pass: CleanPass,
    end: u64,
) -> Result<CleanPass, PassError> {
    let range = due.clean()..end;
    let filling = visit_batches(shard, due, pass, range, move |pass, placement, stored, codecs| {
        pass.add(placement, stored, end, codecs)?;
        Ok(pass.is_full())
    });
    let (mut pass, _) = filling.await?;
    if !pass.is_full() {
        pass.reach(end);
    }
    Ok(pass)
}

/// Finds the ranges of a partition that a pass changes.
///
/// In each segment, the range begins at the first changed batch. Segments without a changed batch
/// need not be rewritten.
async fn find_dirty(
    shard: &Shard,
    due: &DueRound,
    mut pass: CleanPass,
) -> Result<(CleanPass, Vec<Range<u64>>), PassError> {
    let mut ranges = Vec::new();
    // Each read begins where the previous share ends, not at the first record of its own share. A
    // quarantined segment may have records in between, and then the read has to fail.
    let mut next = due.log_start;
    let ends = shard.wal.stream_rows(due.partition.0).into_iter().map(|row| row.next);
    for share_end in ends.chain([u64::MAX]) {
        let end = share_end.min(pass.upto());
        let searching =
            visit_batches(shard, due, pass, next..end, |pass, placement, stored, codecs| {
                pass.changes(placement, stored, codecs)
            });
        let changed;
        (pass, changed) = searching.await?;
        ranges.extend(changed.map(|first| first..end));
        next = next.max(share_end);
    }
    Ok((pass, ranges))
}

/// Shows batches of a partition to `visit`, at a bounded rate, until it returns true. Returns the
/// first offset of that batch.
async fn visit_batches<F>(
    shard: &Shard,
    due: &DueRound,
    mut pass: CleanPass,
    range: Range<u64>,
    visit: F,
) -> Result<(CleanPass, Option<u64>), PassError>
where
    F: Fn(&mut CleanPass, &Placement, &StoredBytes<'_>, &mut Codecs) -> Result<bool, String>
        + Copy
        + Send
        + 'static,
{
    let partition = due.partition.0;
    let Range { start: mut offset, end } = range;
    let (mut found, mut last) = (VecDeque::new(), None);
    while offset < end && last.is_none() {
        if found.is_empty() {
            // Not on the worker's thread, which must not wait for the lock of the log.
            let (wal, reads) = (shard.wal.clone(), shard.reads.clone());
            let reading = move || read(&wal, &reads, partition, offset, end);
            found = VecDeque::from(shard.reads.cold(reading).await??);
            if found.is_empty() {
                break;
            }
        }
        let worker = shard.cleaner_worker.clone();
        let work = move || {
            let mut work = StepWork::default();
            while let Some(StoredEntry { placement, head, payload, .. }) = found.pop_front() {
                let stored = StoredBytes { head: &head, payload: &payload };
                work.add(&stored);
                offset = placement.first + u64::from(placement.count);
                if worker.with_codecs(|codecs| visit(&mut pass, &placement, &stored, codecs))? {
                    last = Some(placement.first);
                }
                if last.is_some() || work.is_enough() {
                    break;
                }
            }
            Ok::<_, PassError>((pass, found, offset, last, work))
        };
        let work_done;
        (pass, found, offset, last, work_done) = shard.cleaner_worker.run(work).await??;
        pause_after(shard, work_done).await;
    }
    Ok((pass, last))
}

/// Work that one step has done on batches.
#[derive(Debug, Clone, Copy, Default)]
struct StepWork {
    /// Stored bytes of the payloads.
    read: usize,
    /// Bytes after decompression, which determine the CPU time.
    decoded: usize,
}

impl StepWork {
    fn add(&mut self, entry: &StoredBytes<'_>) {
        self.read += entry.payload.bytes.len();
        self.decoded += entry.decoded_bytes();
    }

    /// Returns whether the step has done enough: a block may decompress to a multiple of its size.
    fn is_enough(&self) -> bool {
        self.decoded >= CLEANER_READ_BYTES
    }
}

/// Counts the work of a step, and pauses to keep the read rate within its limit.
async fn pause_after(shard: &Shard, work: StepWork) {
    shard.cleaner.count_read(work.read as u64);
    let bytes = work.decoded.max(work.read);
    let pause = Duration::from_secs(1).mul_f64(bytes as f64 / CLEANER_READ_RATE as f64);
    tokio::time::sleep(pause).await;
}

/// Reads the next entries of a partition at or after an offset, across gaps.
///
/// Reports damage, so that it is repaired and the partition can be cleaned.
fn read(
    wal: &Wal,
    reads: &DiskReads,
    stream: u64,
    mut offset: u64,
    end: u64,
) -> Result<Vec<StoredEntry>, PassError> {
    loop {
        match wal.read_stream(stream, offset, end, CLEANER_READ_BYTES, ReadMode::Direct) {
            Ok(found) => return Ok(found.unwrap_or_default()),
            Err(helix_wal::Error::Trimmed { first, .. }) if first >= end => return Ok(Vec::new()),
            // A cleaning has removed the first records, or retention has deleted them since.
            Err(helix_wal::Error::Trimmed { first, .. }) if first > offset => offset = first,
            Err(error) => {
                reads.note(&error);
                return Err(error.into());
            }
        }
    }
}

/// The reason why a pass failed.
#[derive(Debug)]
struct PassError {
    why: String,
    /// The next attempt may succeed, and nothing is wrong with the partition.
    is_transient: bool,
}

impl From<String> for PassError {
    fn from(why: String) -> Self {
        Self { why, is_transient: false }
    }
}

impl From<helix_wal::Error> for PassError {
    fn from(error: helix_wal::Error) -> Self {
        let is_unusable = matches!(error, helix_wal::Error::Unusable(_) | helix_wal::Error::Closed);
        Self { why: error.to_string(), is_transient: is_unusable || error.is_shortage() }
    }
}

impl From<io::Error> for PassError {
    /// Converts the error of a step that panicked, or that was lost because the runtime stops.
    fn from(error: io::Error) -> Self {
        Self { why: error.to_string(), is_transient: true }
    }
}
