//! What can be said only at the end: batches that failed and are there, the order of each
//! producer's acks, and the order of each stream.

use std::collections::BTreeMap;

use super::event::BatchKey;
use super::state::{Append, Checker, Mark, Outcome};
use super::verdict::{Class, Verdict};

pub(super) fn judge(checker: &Checker, verdict: &mut Verdict) {
    let Checker { appends, partitions, .. } = checker;
    let mut keys: Vec<_> = appends.keys().copied().collect();
    keys.sort_unstable();
    let all: Vec<(BatchKey, &Append)> = keys.iter().map(|key| (*key, &appends[key])).collect();
    count(verdict, &all);
    failed_ones(verdict, &all);
    acks(verdict, &all);
    let seen = partitions.iter().filter_map(|(partition, place)| {
        Some((*partition, place.reference.as_ref().map(|read| (read.start, read.end))?))
    });
    streams(verdict, &all, &seen.collect());
}

fn count(verdict: &mut Verdict, all: &[(BatchKey, &Append)]) {
    for (_, append) in all {
        match append.outcome {
            Outcome::Acked(_) => verdict.acked += 1,
            Outcome::Failed(_) => verdict.failed += 1,
            Outcome::Open => {
                verdict.open += 1;
                verdict.open_applied += u64::from(append.read.is_some());
            }
        }
    }
}

fn failed_ones(verdict: &mut Verdict, all: &[(BatchKey, &Append)]) {
    for (key, append) in all {
        if let (Outcome::Failed(failed), Some(read)) = (append.outcome, append.read) {
            let what =
                format!("{key} surely failed and was read at {}@{}", append.partition, read.offset);
            verdict.add(Class::FailedAppeared, what, &[append.invoked, failed, read.line]);
        }
    }
}

/// `all` is in the order of producers and, for each, in the order of sending.
fn acks(verdict: &mut Verdict, all: &[(BatchKey, &Append)]) {
    let mut last: BTreeMap<(u32, u32), (BatchKey, Mark)> = BTreeMap::new();
    for (key, append) in all {
        let Outcome::Acked(acked) = append.outcome else { continue };
        let lane = (key.producer, append.partition);
        if let Some((before, at)) = last.insert(lane, (*key, acked))
            && at.offset >= acked.offset
        {
            let what = format!(
                "partition {}: {before} is acked at {}, and {key}, sent later, at {}",
                append.partition, at.offset, acked.offset
            );
            verdict.add(Class::Reordered, what, &[at.line, acked.line]);
        }
    }
}

/// Batches of a stream stand in the order of sending, and none stands behind a missing one. That
/// one is missing is known between the start and the end of a final read.
fn streams(verdict: &mut Verdict, all: &[(BatchKey, &Append)], seen: &BTreeMap<u32, (u64, u64)>) {
    #[derive(Default)]
    struct Stream {
        last: Option<(BatchKey, Mark)>,
        missing: Option<(BatchKey, u64)>,
    }
    let mut known: BTreeMap<u32, Stream> = BTreeMap::new();
    for (key, append) in all {
        let Some(stream) = append.stream else { continue };
        let stream = known.entry(stream).or_default();
        let seen = seen.get(&append.partition);
        let Some(place) = append.place() else {
            // It may have been there, and have been trimmed before anyone read it.
            if seen.is_none_or(|(start, _)| append.floor.offset >= *start) {
                stream.missing.get_or_insert((*key, append.invoked));
            }
            continue;
        };
        let is_covered = seen.is_some_and(|(_, end)| place.offset < *end);
        if let Some((missing, invoked)) = stream.missing.filter(|_| is_covered) {
            let what = format!("{missing} is missing, and {key}, sent later, is there");
            verdict.add(Class::StreamBroken, what, &[invoked, place.line]);
        }
        if let Some((before, at)) = stream.last.replace((*key, place))
            && at.offset >= place.offset
        {
            let what =
                format!("{before} is at {}, and {key}, sent later, at {}", at.offset, place.offset);
            verdict.add(Class::StreamBroken, what, &[at.line, place.line]);
        }
    }
}
