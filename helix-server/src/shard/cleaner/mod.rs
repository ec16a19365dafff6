//! Compaction by key: the part of each replica, once the log has decided a round.
//!
//! `pass.rs` decides about records with a map from `key_map.rs`, and the log rewrites its segments.
//! The leader of the shard proposes rounds ([`crate::cluster`]).

mod key_map;
mod pass;
mod rounds;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use helix_proto::compaction::Codecs;
use helix_wal::{CleanMark, CleanRequest, ReadMode, StoredEntry, Wal};
use tokio::sync::oneshot;

use super::Shard;
use crate::limits::{
    CLEANER_INTERVAL, CLEANER_MAP_BYTES, CLEANER_READ_BYTES, CLEANER_READ_RATE,
    CLEANER_RETRY_DELAY, CLEANER_STREAMS_MAX, CLEANUP_REPORT_MAX,
};
use crate::log::{CleanupState, Partition, PartitionId, ShardState};
use crate::sync;
use pass::{CleanFilter, CleanPass, StoredBytes};
pub use rounds::CompactedPartition;

/// Progress of compaction by key in one partition on this replica.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PartitionCleanup {
    /// Offset below which only the latest record of each key is left here.
    pub clean_offset: u64,
    /// Offset below which the log has decided so.
    pub decided_offset: u64,
    /// Why the last attempt failed.
    pub uncleanable: Option<String>,
}

/// Figures of the cleaner of a shard since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CleanerStats {
    /// Passes that were completed.
    pub passes: u64,
    /// Bytes read into maps of keys.
    pub read_bytes: u64,
    /// Partitions whose decided round is not done here.
    pub behind_partitions: u64,
    /// Partitions whose last attempt failed.
    pub uncleanable_partitions: u64,
}

/// Results of the cleaner for the rest of the shard.
#[derive(Debug, Default)]
pub(super) struct CleanerReport {
    inner: Mutex<ReportState>,
}

#[derive(Debug, Default)]
struct ReportState {
    passes: u64,
    read_bytes: u64,
    /// Partitions that could not be cleaned.
    uncleanable: BTreeMap<PartitionId, CleanFailure>,
}

/// A partition that could not be cleaned.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CleanFailure {
    why: String,
    attempts: u32,
}

/// Work that a decided round leaves to do in one partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DueRound {
    partition: PartitionId,
    log_start: u64,
    round: CleanupState,
    mark: CleanMark,
}

impl DueRound {
    fn of(partition: &Partition, mark: CleanMark) -> Option<Self> {
        let round = partition.cleanup;
        let log_start = partition.log_start;
        let due = Self { partition: partition.id, log_start, round, mark };
        (!due.is_done()).then_some(due)
    }

    /// Offset up to which this replica is clean. What retention has deleted is.
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
}

/// Runs until the shard drains or is closed.
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
            let closed = shard.closed.clone();
            let round = tokio::select! {
                biased;
                () = closed.cancelled() => return,
                round = clean_some(&shard, &due) => round,
            };
            match round {
                // More may be due: the next pass, or other partitions.
                Ok(true) => {}
                Ok(false) => break,
                Err(why) => {
                    tracing::warn!(shard_id = shard.id(), why, "cannot compact by key yet");
                    tokio::select! {
                        biased;
                        () = shard.closed.cancelled() => return,
                        () = tokio::time::sleep(CLEANER_RETRY_DELAY) => {}
                    }
                    break;
                }
            }
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
        compacted(state).filter_map(due).collect()
    })
}

/// Returns the partitions of compacted topics, without a look at those of other topics.
fn compacted(state: &ShardState) -> impl Iterator<Item = &Partition> {
    let topics = state.topics().filter(|(_, settings, _)| settings.is_compacted());
    topics.flat_map(|(topic_id, ..)| state.topic_partitions(topic_id))
}

/// Does one pass over some of the partitions. Returns false if none can be cleaned now.
///
/// # Errors
/// The text says why the pass failed; the partitions are reported as uncleanable.
async fn clean_some(shard: &Arc<Shard>, due: &[DueRound]) -> Result<bool, String> {
    let mut passes = BTreeMap::new();
    let mut marks = BTreeMap::new();
    let mut map_bytes = CLEANER_MAP_BYTES;
    let ends = due.iter().filter_map(|due| Some((*due, cleanable_end(&shard.wal, due)?)));
    let chosen = shard.cleaner.choose(ends);
    let mut failure = None;
    for (due, end) in chosen {
        let tombstones_below = due.tombstones_below();
        let pass = CleanPass::new(due.clean(), tombstones_below, map_bytes);
        let pass = match fill(shard, &due, pass, end).await {
            Ok(pass) => pass,
            Err(why) => {
                shard.cleaner.fail([due.partition], &why);
                failure = Some(why);
                continue;
            }
        };
        map_bytes = map_bytes.saturating_sub(pass.map_bytes());
        let is_full = pass.is_full();
        let also = tombstones_below.max(due.mark.also);
        marks.insert(due.partition.0, CleanMark { upto: pass.upto(), also });
        passes.insert(due.partition.0, pass);
        if is_full || map_bytes < CLEANER_MAP_BYTES / 8 {
            break;
        }
    }
    if passes.is_empty() {
        return failure.map_or(Ok(false), Err);
    }
    let partitions: Vec<PartitionId> = passes.keys().map(|id| PartitionId(*id)).collect();
    let below = passes.iter().map(|(stream, pass)| (*stream, pass.upto())).collect();
    let (sender, done) = oneshot::channel();
    let filter = Arc::new(CleanFilter::new(passes));
    // Ignored where the shard has closed meanwhile.
    let done_sender = Box::new(move |result| drop(sender.send(result)));
    shard.wal.clean(CleanRequest { filter, below, marks, done: done_sender });
    match done.await {
        Ok(Ok(())) => {
            shard.cleaner.succeed(&partitions);
            Ok(true)
        }
        Ok(Err(error)) => {
            let why = error.to_string();
            // Only one of several may be the reason, so they are tried one by one next.
            shard.cleaner.fail(partitions, &why);
            Err(why)
        }
        Err(_) => Err("the log is closed".to_owned()),
    }
}

/// Returns the offset up to which a partition can be cleaned now; `None` if nothing can be done.
fn cleanable_end(wal: &Wal, due: &DueRound) -> Option<u64> {
    let end = wal.cleanable_upto(due.partition.0).min(due.round.upto);
    let has_records = end > due.clean();
    let has_tombstones = end >= due.clean() && due.tombstones_below() > due.mark.also;
    (has_records || has_tombstones).then_some(end)
}

/// Reads a partition's records into the map of a pass, at a bounded rate.
async fn fill(
    shard: &Shard,
    due: &DueRound,
    mut pass: CleanPass,
    end: u64,
) -> Result<CleanPass, String> {
    let partition = due.partition.0;
    let mut offset = due.clean();
    let mut codecs = Codecs::default();
    while offset < end && !pass.is_full() {
        let wal = shard.wal.clone();
        let work = move || {
            let found = read(&wal, partition, offset, end)?;
            let mut bytes = 0;
            for entry in &found {
                let StoredEntry { placement, head, payload, .. } = entry;
                bytes += payload.bytes.len();
                offset = placement.first + u64::from(placement.count);
                pass.add(placement, &StoredBytes { head, payload }, end, &mut codecs)?;
                if pass.is_full() {
                    break;
                }
            }
            if found.is_empty() {
                offset = end;
            }
            Ok::<_, String>((pass, codecs, offset, bytes))
        };
        let done = shard.reads.cold(work).await.map_err(|error| error.to_string())?;
        let bytes;
        (pass, codecs, offset, bytes) = done?;
        shard.cleaner.count_read(bytes as u64);
        let pause = Duration::from_secs(1).mul_f64(bytes as f64 / CLEANER_READ_RATE as f64);
        tokio::time::sleep(pause).await;
    }
    if !pass.is_full() {
        pass.reach(end);
    }
    Ok(pass)
}

/// Reads the next entries of a partition at or after an offset, over gaps.
fn read(wal: &Wal, stream: u64, offset: u64, end: u64) -> Result<Vec<StoredEntry>, String> {
    let read = |offset| wal.read_stream(stream, offset, end, CLEANER_READ_BYTES, ReadMode::Direct);
    let found = match read(offset) {
        // The first records were removed, or retention has deleted them meanwhile.
        Err(helix_wal::Error::Trimmed { first, .. }) if first > offset && first < end => {
            read(first)
        }
        Err(helix_wal::Error::Trimmed { first, .. }) if first >= end => Ok(Some(Vec::new())),
        found => found,
    };
    found.map(Option::unwrap_or_default).map_err(|error| error.to_string())
}

impl CleanerReport {
    /// Forgets failures of partitions that no longer have to be cleaned.
    fn retain(&self, due: &[DueRound]) {
        let mut inner = sync::lock(&self.inner);
        inner.uncleanable.retain(|id, _| due.iter().any(|due| due.partition == *id));
    }

    /// Chooses the partitions of the next pass. Those that failed come last and alone, the one with
    /// the fewest attempts first, so that they stop neither others nor each other.
    fn choose(&self, due: impl Iterator<Item = (DueRound, u64)>) -> Vec<(DueRound, u64)> {
        let inner = sync::lock(&self.inner);
        let attempts = |due: &DueRound| inner.uncleanable.get(&due.partition).map(|it| it.attempts);
        let (mut failed, mut fine): (Vec<_>, Vec<_>) =
            due.partition(|(due, _)| attempts(due).is_some());
        if fine.is_empty() {
            failed.sort_by_key(|(due, _)| attempts(due));
            failed.truncate(1);
            return failed;
        }
        fine.truncate(CLEANER_STREAMS_MAX);
        fine
    }

    fn fail(&self, partitions: impl IntoIterator<Item = PartitionId>, why: &str) {
        let mut inner = sync::lock(&self.inner);
        for partition in partitions {
            let attempts = inner.uncleanable.get(&partition).map_or(0, |it| it.attempts);
            let failure =
                CleanFailure { why: why.to_owned(), attempts: attempts.saturating_add(1) };
            inner.uncleanable.insert(partition, failure);
        }
    }

    fn succeed(&self, partitions: &[PartitionId]) {
        let mut inner = sync::lock(&self.inner);
        inner.passes += 1;
        for partition in partitions {
            inner.uncleanable.remove(partition);
        }
    }

    fn count_read(&self, bytes: u64) {
        sync::lock(&self.inner).read_bytes += bytes;
    }
}

impl Shard {
    /// Returns the last applied entry, and the partitions whose last round up to it is not done
    /// here; 0 and none if the shard has no rounds, or if there are too many to say.
    pub fn cleanup_report(&self) -> (u64, Vec<u64>) {
        let marks = self.wal.clean_marks();
        let mark = |partition: &Partition| marks.get(&partition.id.0).copied().unwrap_or_default();
        let is_memory = self.wal.is_memory();
        let (applied, is_used, not_clean) = self.machine.read_state(|state| {
            let mut is_used = false;
            let mut not_clean = Vec::new();
            for it in compacted(state).filter(|it| !it.cleanup.is_default()) {
                is_used = true;
                if is_memory || DueRound::of(it, mark(it)).is_some() {
                    not_clean.push(it.id.0);
                }
            }
            // Under the state's lock, so that nothing is applied in between.
            (self.machine.applied(), is_used, not_clean)
        });
        match is_used && not_clean.len() <= CLEANUP_REPORT_MAX {
            true => (applied, not_clean),
            false => (0, Vec::new()),
        }
    }

    /// Returns whether this replica may serve records from an offset on: none of them may be older
    /// than a tombstone that other replicas no longer have.
    pub(super) fn is_clean_enough(&self, partition: PartitionId, offset: u64) -> bool {
        let bounds = self.machine.with(partition, |it| (it.cleanup.cleaned, it.log_start));
        let (cleaned, log_start) = bounds.unwrap_or_default();
        // Asks the log last, because it takes a lock.
        offset >= cleaned
            || log_start >= cleaned
            || self.wal.clean_mark(partition.0).upto >= cleaned
    }

    /// Returns how far a partition is compacted by key on this replica; `None` if it never was.
    pub fn cleanup(&self, partition: PartitionId) -> Option<PartitionCleanup> {
        let (round, log_start) = self.machine.with(partition, |it| (it.cleanup, it.log_start))?;
        if round.is_default() {
            return None;
        }
        let mark = self.wal.clean_mark(partition.0);
        let inner = sync::lock(&self.cleaner.inner);
        let failure = inner.uncleanable.get(&partition);
        Some(PartitionCleanup {
            clean_offset: mark.upto.max(log_start).min(round.upto),
            decided_offset: round.upto,
            uncleanable: failure.map(|failure| failure.why.clone()),
        })
    }

    /// Returns partitions that this replica cannot compact, and why.
    pub fn uncleanable(&self) -> Vec<(PartitionId, String)> {
        let inner = sync::lock(&self.cleaner.inner);
        inner.uncleanable.iter().map(|(id, failure)| (*id, failure.why.clone())).collect()
    }

    pub fn cleaner_stats(&self) -> CleanerStats {
        let behind = due_rounds(self).len() as u64;
        let inner = sync::lock(&self.cleaner.inner);
        CleanerStats {
            passes: inner.passes,
            read_bytes: inner.read_bytes,
            behind_partitions: behind,
            uncleanable_partitions: inner.uncleanable.len() as u64,
        }
    }
}
