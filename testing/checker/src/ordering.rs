//! Rules that need the whole history: failed batches that appear in the log, the order of each
//! producer's acks, and the order of each stream.

use std::collections::BTreeMap;

use super::event::BatchKey;
use super::state::{AppendOutcome, HistoryChecker, InvokedBatch, KnownOffset};
use super::verdict::{HistoryVerdict, ViolationClass};

pub(super) fn judge(checker: &HistoryChecker, verdict: &mut HistoryVerdict) {
    let HistoryChecker { appends, partitions, .. } = checker;
    let mut keys: Vec<_> = appends.keys().copied().collect();
    keys.sort_unstable();
    let all: Vec<(BatchKey, &InvokedBatch)> =
        keys.iter().map(|key| (*key, &appends[key])).collect();
    count(verdict, &all);
    failed_ones(verdict, &all);
    acks(verdict, &all);
    let seen = partitions.iter().filter_map(|(partition, place)| {
        Some((*partition, place.reference.as_ref().map(|read| (read.start, read.end))?))
    });
    streams(verdict, &all, &seen.collect());
}

fn count(verdict: &mut HistoryVerdict, all: &[(BatchKey, &InvokedBatch)]) {
    for (_, append) in all {
        match append.outcome {
            AppendOutcome::Acked(_) => verdict.acked += 1,
            AppendOutcome::Failed(_) => verdict.failed += 1,
            AppendOutcome::Open => {
                verdict.open += 1;
                verdict.open_applied += u64::from(append.read.is_some());
            }
        }
    }
}

fn failed_ones(verdict: &mut HistoryVerdict, all: &[(BatchKey, &InvokedBatch)]) {
    for (key, append) in all {
        if let (AppendOutcome::Failed(failed), Some(read)) = (append.outcome, append.read) {
            let what = format!(
                "{key} failed for certain and was read at {}@{}",
                append.partition, read.offset
            );
            verdict.add(ViolationClass::FailedAppeared, what, &[append.invoked, failed, read.line]);
        }
    }
}

/// Checks the order of acks. `all` is sorted by producer, then by order of sending.
fn acks(verdict: &mut HistoryVerdict, all: &[(BatchKey, &InvokedBatch)]) {
    let mut last: BTreeMap<(u32, u32), (BatchKey, KnownOffset)> = BTreeMap::new();
    for (key, append) in all {
        let AppendOutcome::Acked(acked) = append.outcome else { continue };
        let lane = (key.producer, append.partition);
        if let Some((before, at)) = last.insert(lane, (*key, acked))
            && at.offset >= acked.offset
        {
            let what = format!(
                "partition {}: {before} is acked at {}, but {key}, sent later, at {}",
                append.partition, at.offset, acked.offset
            );
            verdict.add(ViolationClass::Reordered, what, &[at.line, acked.line]);
        }
    }
}

/// Checks that batches of a stream are in the order of sending and none follows a missing one.
///
/// A batch can be known to be missing only between the start and the end of a final read.
fn streams(
    verdict: &mut HistoryVerdict,
    all: &[(BatchKey, &InvokedBatch)],
    seen: &BTreeMap<u32, (u64, u64)>,
) {
    #[derive(Default)]
    struct Stream {
        last: Option<(BatchKey, KnownOffset)>,
        missing: Option<(BatchKey, u64)>,
    }
    let mut known: BTreeMap<u32, Stream> = BTreeMap::new();
    for (key, append) in all {
        let Some(stream) = append.stream else { continue };
        let stream = known.entry(stream).or_default();
        let seen = seen.get(&append.partition);
        let Some(place) = append.place() else {
            // It may have been trimmed before a reader got it.
            if seen.is_none_or(|(start, _)| append.floor.offset >= *start) {
                stream.missing.get_or_insert((*key, append.invoked));
            }
            continue;
        };
        let is_covered = seen.is_some_and(|(_, end)| place.offset < *end);
        if let Some((missing, invoked)) = stream.missing.filter(|_| is_covered) {
            let what = format!("{missing} is missing, but {key}, sent later, is in the log");
            verdict.add(ViolationClass::StreamBroken, what, &[invoked, place.line]);
        }
        if let Some((before, at)) = stream.last.replace((*key, place))
            && at.offset >= place.offset
        {
            let what =
                format!("{before} is at {}, but {key}, sent later, at {}", at.offset, place.offset);
            verdict.add(ViolationClass::StreamBroken, what, &[at.line, place.line]);
        }
    }
}
