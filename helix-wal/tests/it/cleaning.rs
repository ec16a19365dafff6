//! Cleaning rewrites the entries of streams through a filter: what stays is readable at every step
//! and after every crash, and what goes leaves gaps that readers step over.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use helix_wal::storage::{Fault, Operation};
use helix_wal::{
    BackgroundWorker, CleanMark, CleanRequest, Entry, EntryFilter, Error, FilteredEntry, LogId,
    NextStep, Options, Payload, Placement, ReadMode, StoredEntry, Wal,
};

use crate::common::entry;
use crate::compaction::{CompactedLog, options};

/// Removes every third entry of a stream, and shrinks every third.
#[derive(Debug)]
struct Thirds;

impl EntryFilter for Thirds {
    fn filter(&self, placement: &Placement, entry: &Entry) -> Result<FilteredEntry, String> {
        Ok(match placement.first / 3 % 3 {
            0 => FilteredEntry::Removed,
            1 => {
                let Entry { head, payload, .. } = shrunk(entry);
                FilteredEntry::Replaced { head, payload }
            }
            _ => FilteredEntry::Unchanged,
        })
    }
}

/// Returns a rewritten entry; rewriting it again changes nothing.
fn shrunk(entry: &Entry) -> Entry {
    let bytes = entry.payload.bytes.slice(..entry.payload.bytes.len().min(50));
    let crc = crc32fast::hash(&bytes);
    let head = Bytes::from_static(b"rewritten");
    Entry { head, payload: Payload { bytes, crc, crc_seed: 0 }, ..entry.clone() }
}

struct Refuses;

impl EntryFilter for Refuses {
    fn filter(&self, placement: &Placement, _: &Entry) -> Result<FilteredEntry, String> {
        match placement.first {
            30.. => Err(format!("cannot read the entry at {}", placement.first)),
            _ => Ok(FilteredEntry::Removed),
        }
    }
}

/// Removes the entries at these positions.
struct Without(BTreeSet<u64>);

impl EntryFilter for Without {
    fn filter(&self, placement: &Placement, _: &Entry) -> Result<FilteredEntry, String> {
        let is_removed = self.0.contains(&placement.first);
        Ok(if is_removed { FilteredEntry::Removed } else { FilteredEntry::Unchanged })
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// [`Thirds`] with a worker that keeps its work for the test.
#[derive(Default)]
struct Detached {
    queue: Mutex<VecDeque<Work>>,
    /// Called by the next call of the filter.
    on_filter: Mutex<Option<Work>>,
}

impl Detached {
    fn take(&self) -> Option<Work> {
        self.queue.lock().unwrap().pop_front()
    }
}

impl EntryFilter for Detached {
    fn filter(&self, placement: &Placement, entry: &Entry) -> Result<FilteredEntry, String> {
        let on_filter = self.on_filter.lock().unwrap().take();
        if let Some(on_filter) = on_filter {
            on_filter();
        }
        Thirds.filter(placement, entry)
    }

    fn worker(&self) -> Option<&dyn BackgroundWorker> {
        Some(self)
    }
}

impl BackgroundWorker for Detached {
    fn submit(&self, work: Work) {
        self.queue.lock().unwrap().push_back(work);
    }
}

const MARK: CleanMark = CleanMark { upto: 90, also: 7 };

fn clean(
    wal: &Wal,
    filter: Arc<dyn EntryFilter>,
    below: &[(u64, u64)],
) -> Receiver<Result<(), Error>> {
    let (sender, done) = channel();
    wal.clean(CleanRequest {
        filter,
        below: below.iter().copied().collect(),
        dirty: below
            .iter()
            .map(|(stream, _)| (*stream, std::iter::once(0..u64::MAX).collect()))
            .collect(),
        marks: below.iter().map(|(stream, _)| (*stream, MARK)).collect(),
        done: Box::new(move |result| sender.send(result).unwrap()),
    });
    done
}

/// A log of four streams with fifty entries each.
fn filled() -> CompactedLog {
    let mut log = CompactedLog::new(options());
    for round in 0..200 {
        log.append(round % 4, 1500);
    }
    log.checkpoint_and_purge();
    log.finish_work();
    log
}

/// Streams to clean, and the positions below which they are.
const BELOW: [(u64, u64); 2] = [(1, 90), (2, 60)];

/// Applies [`Thirds`] to the expected content.
fn expect_thirds(log: &mut CompactedLog) {
    expect_thirds_of(log, BELOW.into());
}

fn expect_thirds_of(log: &mut CompactedLog, below: BTreeMap<u64, u64>) {
    log.kept.retain(|(stream, first), (entry, _)| {
        if below.get(stream).is_none_or(|end| first >= end) {
            return true;
        }
        if first / 3 % 3 == 1 {
            *entry = shrunk(entry);
        }
        first / 3 % 3 > 0
    });
}

#[test]
fn cleaned_streams_have_gaps_and_others_do_not_change() {
    let mut log = filled();
    let before = log.stats().live_bytes;
    assert_eq!(log.wal().cleaned_upto(), 0);
    let done = clean(&log.wal(), Arc::new(Thirds), &BELOW);
    log.finish_work();
    done.try_recv().unwrap().unwrap();
    expect_thirds(&mut log);
    log.check();
    assert!(log.stats().live_bytes < before - 40_000, "{:?}", log.stats());
    for reopened in [false, true] {
        if reopened {
            log.reopen();
            log.check();
        }
        assert_eq!(*log.wal().clean_marks(), [(1, MARK), (2, MARK)].into());
        assert_eq!(log.wal().cleaned_upto(), log.index);
        let read = |from: u64| {
            let read = log.wal().read_stream(1, from, 150, 1, ReadMode::Blocking);
            read.unwrap().unwrap()[0].placement.first
        };
        // Positions 9..12 went away, and so did 90..93 not.
        assert_eq!([read(8), read(9), read(11), read(12), read(90)], [6, 12, 12, 12, 90]);
        // As after a trim.
        let front = log.wal().read_stream(1, 0, 9, 1, ReadMode::Blocking);
        assert!(matches!(front, Err(Error::Trimmed { asked: 0, first: 3 })), "{front:?}");
        let rows = log.wal().stream_rows(1);
        assert!(rows.len() < 12, "a gap does not split a share: {} rows", rows.len());
    }
    // Other reasons to compact move what is left.
    log.drop_stream(0);
    log.drop_stream(3);
    log.finish_work();
    log.check();
    log.reopen();
    log.check();
    log.retain(1, 10);
    log.finish_work();
    log.check();
    log.drop_stream(1);
    assert_eq!(*log.wal().clean_marks(), [(2, MARK)].into());
}

/// Returns whether an entry has the bytes that it may have: its own or rewritten ones.
fn is_one_of(found: &Entry, original: &Entry) -> bool {
    let same =
        |other: &Entry| found.head == other.head && found.payload.bytes == other.payload.bytes;
    same(original) || same(&shrunk(original))
}

/// Expects that a read of many entries has each position at most once, in order.
fn expect_increasing(log: &CompactedLog, stream: u64) {
    let first = log.wal().stream_rows(stream)[0].first;
    let read = log.wal().read_stream(stream, first, 150, 1 << 20, ReadMode::Blocking);
    let mut next = first;
    for StoredEntry { placement, .. } in read.unwrap().unwrap() {
        assert!(placement.first >= next, "stream {stream}: {} after {next}", placement.first);
        next = placement.first + u64::from(placement.count);
    }
}

/// Expects every entry that stays, with old or new bytes, and removed ones only with old bytes.
/// Returns whether cleaning has changed any.
fn expect_old_or_new(
    log: &CompactedLog,
    original: &BTreeMap<(u64, u64), (Entry, Placement)>,
) -> bool {
    (0..4).for_each(|stream| expect_increasing(log, stream));
    let mut is_changed = false;
    for ((stream, first), (entry, placement)) in original {
        let read = log.wal().read_stream(*stream, *first, first + 1, 1, ReadMode::Blocking);
        let found = match read {
            Err(Error::Trimmed { .. }) => Vec::new(),
            read => read.unwrap().unwrap(),
        };
        let is_cleaned = BELOW.iter().any(|(cleaned, end)| cleaned == stream && first < end);
        match found.first() {
            Some(found) if found.placement == *placement => {
                let Placement { stream, .. } = *placement;
                let (id, head, payload) = (found.id, found.head.clone(), found.payload.clone());
                let found = Entry { id, stream, head, payload };
                assert_eq!(found.id, entry.id);
                assert!(is_one_of(&found, entry) && (is_cleaned || found.head == entry.head));
                is_changed |= found.head != entry.head;
            }
            _ => {
                assert!(is_cleaned && first / 3 % 3 == 0, "stream {stream} lost {first}");
                is_changed = true;
            }
        }
    }
    is_changed
}

#[test]
fn reads_see_old_or_new_entries_at_every_step() {
    let mut log = filled();
    let original = log.kept.clone();
    let done = clean(&log.wal(), Arc::new(Thirds), &BELOW);
    let mut steps = 0;
    while done.try_recv().is_err() {
        match log.manual().step_keeper() {
            NextStep::After(time) => log.manual().now += time,
            NextStep::Now => {}
            other => panic!("{other:?} after {steps} steps"),
        }
        expect_old_or_new(&log, &original);
        steps += 1;
    }
    assert!(steps > 10, "{steps}");
    expect_thirds(&mut log);
    log.check();
}

#[test]
fn a_step_on_another_thread_does_not_stop_the_log() {
    let mut log = filled();
    let filter = Arc::new(Detached::default());
    let done = clean(&log.wal(), filter.clone(), &BELOW);
    let mut steps = 0;
    loop {
        log.finish_work();
        let Some(work) = filter.take() else { break };
        assert!(done.try_recv().is_err(), "a step is left after {steps}");
        assert!(filter.take().is_none(), "one step at a time");
        if steps == 0 {
            // Most of a segment; the keeper seals the one before meanwhile.
            for _ in 0..40 {
                log.append(3, 1500);
            }
            log.checkpoint_and_purge();
            log.check();
        }
        work();
        steps += 1;
    }
    done.try_recv().unwrap().unwrap();
    assert!(steps > 1, "{steps}");
    expect_thirds(&mut log);
    log.check();
    log.reopen();
    log.check();
}

#[test]
fn other_segments_are_compacted_during_a_cleaning() {
    let mut log = filled();
    let filter = Arc::new(Detached::default());
    let done = clean(&log.wal(), filter.clone(), &BELOW);
    log.finish_work();
    // Most of each new segment is dead, and the cleaning has none of them.
    for round in 0..200 {
        log.append(4 + round % 4, 1500);
    }
    log.checkpoint_and_purge();
    for stream in [4, 6, 7] {
        log.drop_stream(stream);
    }
    log.finish_work();
    let segments = |log: &CompactedLog| -> Vec<u64> {
        log.wal().stream_rows(5).iter().map(|row| row.segment).collect()
    };
    let before = segments(&log);
    let mut is_compacted = false;
    while let Some(work) = filter.take() {
        is_compacted |= segments(&log) != before;
        work();
        log.finish_work();
    }
    done.try_recv().unwrap().unwrap();
    assert!(is_compacted, "only after the cleaning");
    expect_thirds(&mut log);
    log.check_streams();
    log.reopen();
    log.check_streams();
}

#[test]
fn a_crash_beside_a_step_on_another_thread_loses_no_entry_that_stays() {
    for case in 0.. {
        // The last step is judged and not collected, or runs too late.
        let (steps, is_judged) = (case / 2, case % 2 == 1);
        let mut log = filled();
        let original = log.kept.clone();
        let filter = Arc::new(Detached::default());
        let done = clean(&log.wal(), filter.clone(), &BELOW);
        log.finish_work();
        for _ in 0..steps {
            if let Some(work) = filter.take() {
                work();
                log.finish_work();
            }
        }
        let is_done = done.try_recv().is_ok();
        let mut last = filter.take();
        if is_judged && let Some(work) = last.take() {
            work();
        }
        log.reopen();
        if let Some(work) = last {
            work();
        }
        let is_changed = expect_old_or_new(&log, &original);
        assert_eq!(is_changed, steps > 0);
        assert_eq!(log.wal().cleaned_upto(), if is_changed { log.index } else { 0 });
        assert_eq!(log.wal().clean_marks().is_empty(), !is_done);
        let done = clean(&log.wal(), Arc::new(Thirds), &BELOW);
        log.finish_work();
        done.try_recv().unwrap().unwrap();
        expect_thirds(&mut log);
        log.check();
        if is_done {
            assert!(steps > 1);
            break;
        }
        assert!(steps < 500, "it never ends");
    }
}

#[test]
fn streams_trimmed_during_a_step_stay_trimmed() {
    let mut log = filled();
    let filter = Arc::new(Detached::default());
    let done = clean(&log.wal(), filter.clone(), &BELOW);
    log.finish_work();
    // All that is cleaned of one stream, and a part of the other.
    let mut trims = [(1, 10), (2, 40)].into_iter();
    while let Some(work) = filter.take() {
        if let Some((stream, entries)) = trims.next() {
            log.retain(stream, entries);
        }
        work();
        log.finish_work();
    }
    done.try_recv().unwrap().unwrap();
    assert!(trims.next().is_none());
    expect_thirds(&mut log);
    for reopened in [false, true] {
        if reopened {
            log.reopen();
        }
        log.check_streams();
        assert_eq!(*log.wal().clean_marks(), [(1, MARK), (2, MARK)].into());
        let front = log.wal().read_stream(1, 117, 120, 1, ReadMode::Blocking);
        assert!(matches!(front, Err(Error::Trimmed { .. })), "{front:?}");
    }
}

#[test]
fn a_step_that_judges_no_entry_stays_in_place() {
    let mut log = filled();
    let filter = Arc::new(Detached::default());
    let done = clean(&log.wal(), filter.clone(), &[(1, 90)]);
    log.finish_work();
    let work = filter.take().unwrap();
    log.retain(1, 10);
    work();
    log.finish_work();
    assert!(filter.take().is_none());
    done.try_recv().unwrap().unwrap();
    log.check_streams();
}

#[test]
fn a_log_that_is_poisoned_during_a_step_ends_without_it() {
    let mut log = filled();
    let filter = Arc::new(Detached::default());
    let done = clean(&log.wal(), filter.clone(), &BELOW);
    log.finish_work();
    let work = filter.take().unwrap();
    log.disk.fail(Fault::next(Operation::Write));
    let next = entry(LogId { term: 1, index: log.index + 1 }, 3, 12, 1500);
    log.wal().append(vec![next], Box::new(|result| drop(result.unwrap_err())));
    assert_eq!(log.manual().step_writer(), NextStep::Done);
    assert_eq!(log.manual().step_keeper(), NextStep::Done);
    assert!(matches!(done.try_recv().unwrap(), Err(Error::Closed)));
    log.reopen();
    work();
    log.check();
}

#[test]
fn a_lost_step_poisons_the_log() {
    let mut log = filled();
    let filter = Arc::new(Detached::default());
    let done = clean(&log.wal(), filter.clone(), &BELOW);
    log.finish_work();
    drop(filter.take().unwrap());
    assert_eq!(log.manual().step_keeper(), NextStep::Done);
    assert!(matches!(done.try_recv().unwrap(), Err(Error::Closed)));
    let error = log.wal().writable().unwrap_err();
    assert!(matches!(error, Error::Poisoned { .. }), "{error}");
    assert!(error.to_string().contains("lost"), "{error}");
    log.reopen();
    log.check();
}

/// Otherwise the step could remove files of the same names after the log is opened again.
#[test]
fn a_closed_log_waits_for_a_step_that_has_begun() {
    let mut log = filled();
    let filter = Arc::new(Detached::default());
    let done = clean(&log.wal(), filter.clone(), &BELOW);
    log.finish_work();
    let (begun, has_begun) = channel();
    let (ended, has_ended) = channel();
    *filter.on_filter.lock().unwrap() = Some(Box::new(move || {
        begun.send(()).unwrap();
        // A keeper that does not wait is faster.
        (0..10_000).for_each(|_| std::thread::yield_now());
        ended.send(()).unwrap();
    }));
    let worker = std::thread::spawn(filter.take().unwrap());
    has_begun.recv().unwrap();
    log.wal().close();
    assert_eq!(log.manual().step_keeper(), NextStep::Done);
    has_ended.try_recv().unwrap();
    assert!(matches!(done.try_recv().unwrap(), Err(Error::Closed)));
    worker.join().unwrap();
    log.reopen();
    log.check();
}

/// The worker does the steps of other logs first, which may take long.
#[test]
fn a_closed_log_takes_back_a_step_that_has_not_begun() {
    let mut log = filled();
    let filter = Arc::new(Detached::default());
    let done = clean(&log.wal(), filter.clone(), &BELOW);
    log.finish_work();
    let work = filter.take().unwrap();
    log.wal().close();
    assert_eq!(log.manual().step_keeper(), NextStep::Done);
    assert!(matches!(done.try_recv().unwrap(), Err(Error::Closed)));
    log.reopen();
    work();
    log.check();
}

/// The removed end of a share stays in its old segment until all shares have moved.
#[test]
fn a_read_of_many_entries_has_none_twice_while_shares_move() {
    let mut log = filled();
    let ends: BTreeSet<u64> = log.wal().stream_rows(1).iter().map(|row| row.next - 3).collect();
    log.kept.retain(|(stream, first), _| *stream != 1 || !ends.contains(first));
    let done = clean(&log.wal(), Arc::new(Without(ends)), &[(1, 150)]);
    loop {
        if let Ok(result) = done.try_recv() {
            result.unwrap();
            break;
        }
        match log.manual().step_keeper() {
            NextStep::After(time) => log.manual().now += time,
            NextStep::Now => {}
            other => panic!("{other:?} before the cleaning has ended"),
        }
        expect_increasing(&log, 1);
    }
    log.check();
}

#[test]
fn a_crash_at_any_step_loses_no_entry_that_stays() {
    for steps in 0.. {
        let mut log = filled();
        let original = log.kept.clone();
        let done = clean(&log.wal(), Arc::new(Thirds), &BELOW);
        for _ in 0..steps {
            if let NextStep::After(time) = log.manual().step_keeper() {
                log.manual().now += time;
            }
        }
        let is_done = done.try_recv().is_ok();
        log.reopen();
        let is_changed = expect_old_or_new(&log, &original);
        // Other logs that get these entries have to know, also before the marks.
        assert_eq!(log.wal().cleaned_upto(), if is_changed { log.index } else { 0 });
        let marks = log.wal().clean_marks();
        if !is_done {
            // Either it is as before, or everything was rewritten before the marks.
            assert!(marks.is_empty() || steps > 10, "after {steps} steps");
        }
        // The next attempt completes it.
        let done = clean(&log.wal(), Arc::new(Thirds), &BELOW);
        log.finish_work();
        done.try_recv().unwrap().unwrap();
        expect_thirds(&mut log);
        log.check();
        if is_done {
            assert!(steps > 10);
            break;
        }
        assert!(steps < 500, "it never ends");
    }
}

/// Readers of the marks copy none of them, and a later change does not touch what they have.
#[test]
fn marks_are_shared_with_their_readers() {
    let mut log = filled();
    let before = log.wal().clean_marks();
    let done = clean(&log.wal(), Arc::new(Thirds), &BELOW);
    log.finish_work();
    done.try_recv().unwrap().unwrap();
    let after = log.wal().clean_marks();
    assert!(Arc::ptr_eq(&after, &log.wal().clean_marks()));
    assert_eq!((before.len(), after.len()), (0, 2));
    log.drop_stream(1);
    assert_eq!((after.len(), log.wal().clean_marks().len()), (2, 1));
}

#[test]
fn a_checkpoint_is_needed_only_for_segments_that_it_does_not_cover() {
    let mut log = filled();
    let end = 150;
    assert!(!log.wal().needs_checkpoint(3, end), "the checkpoint covers everything");
    for _ in 0..40 {
        log.append(3, 1500);
    }
    log.finish_work();
    assert!(!log.wal().needs_checkpoint(3, end));
    assert!(log.wal().needs_checkpoint(3, end + 1));
    assert!(!log.wal().needs_checkpoint(9, end), "an unknown stream");
    log.checkpoint();
    // The segments are not purged, which another checkpoint would not change.
    assert_eq!(log.wal().cleanable_upto(3), end);
    assert!(!log.wal().needs_checkpoint(3, end + 1));
}

#[test]
fn times_from_a_position_on_need_no_read() {
    let mut log = filled();
    for _ in 0..10 {
        log.append(3, 1500);
    }
    log.finish_work();
    let rows = log.wal().stream_rows(3);
    assert!(rows.len() > 2 && rows[0].sealed && !rows.last().unwrap().sealed);
    for (_, placement) in log.kept.values().filter(|(_, it)| it.stream == 3) {
        let row = rows.iter().find(|row| row.next > placement.first).unwrap();
        let expected = if row.sealed { row.last_time } else { placement.time };
        for position in placement.first..placement.first + 3 {
            assert_eq!(log.wal().time_from(3, position), Some(expected));
        }
    }
    assert_eq!(log.wal().time_from(3, 180), None, "the end");
    assert_eq!(log.wal().time_from(9, 0), None, "an unknown stream");
}

#[test]
fn refused_requests_change_nothing_and_can_be_repeated() {
    let mut log = filled();
    let done = clean(&log.wal(), Arc::new(Refuses), &[(1, 90)]);
    let second = clean(&log.wal(), Arc::new(Thirds), &[(2, 60)]);
    let text = |result: Result<(), Error>| result.unwrap_err().to_string();
    assert!(text(second.try_recv().unwrap()).contains("another cleaning is running"));
    log.finish_work();
    assert!(text(done.try_recv().unwrap()).contains("cannot read the entry at"));
    assert_eq!(*log.wal().clean_marks(), BTreeMap::new());
    let done = clean(&log.wal(), Arc::new(Thirds), &[(2, 60)]);
    log.finish_work();
    done.try_recv().unwrap().unwrap();
    expect_thirds_of(&mut log, [(2, 60)].into());
    // The segments before the refused entry may have been rewritten; nothing else has changed.
    log.kept.retain(|(stream, first), _| *stream != 1 || *first >= 30);
    let done = clean(&log.wal(), Arc::new(Without((0..30).step_by(3).collect())), &[(1, 30)]);
    log.finish_work();
    done.try_recv().unwrap().unwrap();
    log.check();

    // An entry that has not left the Raft log cannot be rewritten.
    let end = 150;
    assert_eq!(log.wal().cleanable_upto(3), u64::MAX, "all of it");
    for _ in 0..40 {
        log.append(3, 1500);
    }
    log.finish_work();
    assert_eq!(log.wal().cleanable_upto(3), end);
    let done = clean(&log.wal(), Arc::new(Thirds), &[(3, end + 60)]);
    log.finish_work();
    assert!(text(done.try_recv().unwrap()).contains("cannot be rewritten now"));
    log.checkpoint_and_purge();
    log.finish_work();
    assert!(log.wal().cleanable_upto(3) > end);

    let memory = Wal::open_memory(Options::default());
    let done = clean(&memory, Arc::new(Thirds), &[(1, 9)]);
    assert!(text(done.try_recv().unwrap()).contains("in-memory"));
}

#[test]
fn segments_without_dirty_positions_are_left_alone() {
    let mut log = filled();
    let segments = |log: &CompactedLog, stream: u64| -> Vec<u64> {
        log.wal().stream_rows(stream).iter().map(|row| row.segment).collect()
    };
    let before = segments(&log, 1);
    let rows = log.wal().stream_rows(1);
    let dirty = rows[2].first + 1..rows[2].next;
    let (sender, done) = channel();
    let request = |dirty: Vec<std::ops::Range<u64>>, sender: std::sync::mpsc::Sender<_>| {
        log.wal().clean(CleanRequest {
            filter: Arc::new(Thirds),
            below: [(1, 150)].into(),
            dirty: [(1, dirty)].into(),
            marks: [(1, MARK)].into(),
            done: Box::new(move |result| sender.send(result).unwrap()),
        });
    };
    request(vec![dirty], sender.clone());
    log.finish_work();
    done.try_recv().unwrap().unwrap();
    let after = segments(&log, 1);
    let kept = |at: &usize| after.contains(&before[*at]);
    assert!((0..before.len()).filter(|at| *at != 2).all(|at| kept(&at)), "{before:?} {after:?}");
    assert!(!kept(&2), "{before:?} {after:?}");
    assert_eq!(log.wal().clean_mark(1), MARK);

    // Nothing is dirty: only the mark is written.
    let rewritten = log.stats().rewritten_bytes;
    log.wal().clean(CleanRequest {
        filter: Arc::new(Refuses),
        below: [(2, 150)].into(),
        dirty: BTreeMap::new(),
        marks: [(2, MARK)].into(),
        done: Box::new(move |result| sender.send(result).unwrap()),
    });
    log.finish_work();
    done.try_recv().unwrap().unwrap();
    assert_eq!(log.stats().rewritten_bytes, rewritten);
    log.reopen();
    assert_eq!(log.wal().clean_mark(2), MARK);
}

#[test]
fn a_stream_dropped_during_its_cleaning_gets_no_mark() {
    let mut log = filled();
    let done = clean(&log.wal(), Arc::new(Thirds), &BELOW);
    log.drop_stream(1);
    log.finish_work();
    done.try_recv().unwrap().unwrap();
    expect_thirds(&mut log);
    for reopened in [false, true] {
        if reopened {
            log.reopen();
        }
        assert_eq!(*log.wal().clean_marks(), [(2, MARK)].into());
        log.check_streams();
    }
}

/// A stream whose last entries were removed, perhaps before this log got it, can still be marked.
#[test]
fn the_end_of_a_stream_may_go() {
    let mut log = filled();
    for ends_at in [60, 0] {
        let gone = (ends_at..150).step_by(3).collect();
        log.kept.retain(|(stream, first), _| *stream != 1 || *first < ends_at);
        let done = clean(&log.wal(), Arc::new(Without(gone)), &[(1, 150)]);
        log.finish_work();
        done.try_recv().unwrap().unwrap();
        log.reopen();
        log.check();
        assert_eq!(log.wal().cleanable_upto(1), u64::MAX, "ends at {ends_at}");
        let end = log.wal().stream_rows(1).last().map_or(0, |row| row.next);
        assert_eq!(end, ends_at);
        assert_eq!(log.wal().clean_mark(1), MARK);
        let rest = log.wal().read_stream(1, ends_at, 150, 1, ReadMode::Blocking);
        assert!(rest.unwrap().unwrap().is_empty());
    }
    assert_eq!(log.wal().cleanable_upto(9), u64::MAX, "an unknown stream");
}

#[test]
fn an_idle_log_seals_its_active_segment_on_request() {
    let mut log = filled();
    let mut next = 150;
    while log.wal().cleanable_upto(3) >= next {
        log.append(3, 1500);
        next += 3;
        log.checkpoint_and_purge();
        log.finish_work();
    }
    let end = log.wal().cleanable_upto(3);
    assert!(!log.wal().roll_early(3, end), "nothing of it is needed");
    assert!(!log.wal().roll_early(9, u64::MAX), "an unknown stream");
    assert!(log.wal().roll_early(3, end + 1));
    log.finish_work();
    assert_eq!(log.wal().cleanable_upto(3), u64::MAX, "all of it");
    assert!(!log.wal().roll_early(3, next), "once");
    log.check();
    log.reopen();
    log.check();
    log.append(3, 1500);
    log.finish_work();
    log.check();
}

/// The newest entries of an idle log stay in memory, and their segments with them.
#[test]
fn cached_entries_are_dropped_on_request_and_cleaned() {
    let mut log = CompactedLog::new(Options { tail_bytes: 1 << 20, ..options() });
    for round in 0..200 {
        log.append(round % 4, 1500);
    }
    log.wal().uncache(1, 150);
    log.checkpoint_and_purge();
    log.wal().roll_early(1, 150);
    log.finish_work();
    assert_eq!(log.wal().cleanable_upto(1), 0, "all entries are in memory");
    log.wal().uncache(9, 150);
    log.wal().uncache(1, 0);
    assert_eq!(log.wal().cleanable_upto(1), 0, "nothing below the position");
    log.wal().uncache(1, 1);
    let some = log.wal().cleanable_upto(1);
    assert!((3..150).contains(&some), "only the first segment: {some}");
    log.wal().uncache(1, 150);
    assert_eq!(log.wal().cleanable_upto(1), u64::MAX, "all of it");
    log.check();
    let done = clean(&log.wal(), Arc::new(Thirds), &BELOW);
    log.finish_work();
    done.try_recv().unwrap().unwrap();
    expect_thirds(&mut log);
    log.check();
    log.append(1, 1500);
    log.checkpoint_and_purge();
    log.check();
    log.reopen();
    log.check();
}

#[test]
fn a_cleaning_that_begins_during_a_compaction_misses_nothing() {
    let mut met = 0;
    for steps in 0..80 {
        let mut log = filled();
        let before = log.stats();
        // Half of each segment is dead, so that all are rewritten.
        log.drop_stream(0);
        log.drop_stream(3);
        for _ in 0..steps {
            if let NextStep::After(time) = log.manual().step_keeper() {
                log.manual().now += time;
            }
        }
        let stats = log.stats();
        met += usize::from(
            stats.rewritten_bytes > before.rewritten_bytes && stats.segments >= before.segments,
        );
        let done = clean(&log.wal(), Arc::new(Thirds), &BELOW);
        log.finish_work();
        done.try_recv().unwrap().unwrap();
        expect_thirds(&mut log);
        log.check();
        assert_eq!(*log.wal().clean_marks(), [(1, MARK), (2, MARK)].into());
    }
    assert!(met > 0, "no cleaning began while segments were rewritten");
}
