//! Operations that fail while power is on: nothing is acknowledged that is not durable, the first
//! failure is the last, a full disk is no failure, and nobody waits for ever.

use std::io::ErrorKind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use bytes::Bytes;
use helix_wal::storage::{Crash, Fault, FaultyStorage, Operation, SimulatedDisk};
use helix_wal::{Entry, Error, LogId, NextStep, Options, ReadMode, Wal};

use crate::common::{ManualWal, PrintOnPanic, entry, seed, small_options};
use crate::model::ModelDriver;

type Results = Arc<Mutex<Vec<Result<(), Error>>>>;

fn append(wal: &Wal, results: &Results, payload: usize) -> Entry {
    let state = wal.state();
    let id = LogId { term: 1, index: state.last.map_or(0, |last| last.index + 1) };
    let entry = entry(id, 1, 10, payload);
    let results = Arc::clone(results);
    let done = Box::new(move |result| results.lock().unwrap().push(result));
    wal.append(vec![entry.clone()], done);
    entry
}

fn take(results: &Results) -> Vec<Result<(), Error>> {
    std::mem::take(&mut results.lock().unwrap())
}

fn open(disk: &SimulatedDisk, options: Options) -> ManualWal {
    ManualWal::open(Arc::new(disk.clone()), options).unwrap()
}

/// One failure of each kind on the way of an append: none is acknowledged, the log stays poisoned
/// although the disk works again, and after a crash everything acknowledged before is there.
#[test]
fn a_failed_write_or_sync_poisons_for_good() {
    for operation in [Operation::Write, Operation::Sync] {
        for seed in 0..20 {
            let disk = SimulatedDisk::new(seed);
            let mut manual = open(&disk, small_options());
            manual.settle();
            let results = Results::default();
            let before = append(&manual.wal, &results, 100);
            manual.settle();
            assert!(matches!(take(&results)[..], [Ok(())]));

            let reports = Arc::new(AtomicUsize::new(0));
            let counted = Arc::clone(&reports);
            manual.wal.on_poisoned(Box::new(move |error| {
                assert!(matches!(error, Error::Poisoned { .. }));
                counted.fetch_add(1, Ordering::SeqCst);
            }));
            disk.fail(Fault::next(operation));
            append(&manual.wal, &results, 200);
            append(&manual.wal, &results, 5000);
            assert_eq!(manual.step_writer(), NextStep::Done);
            // The disk is well again, the log is not.
            append(&manual.wal, &results, 10);
            manual.wal.save_vote(Bytes::from_static(b"v"), {
                let results = Arc::clone(&results);
                Box::new(move |result| results.lock().unwrap().push(result))
            });
            assert_eq!(manual.step_writer(), NextStep::Done);
            manual.settle();
            let after = take(&results);
            assert_eq!(after.len(), 4, "everybody is told");
            for result in after {
                assert!(matches!(result, Err(Error::Poisoned { .. })), "{result:?}");
            }
            assert!(matches!(manual.wal.writable(), Err(Error::Poisoned { .. })));
            assert_eq!(reports.load(Ordering::SeqCst), 1);
            assert_eq!(manual.wal.state().synced, Some(before.id));
            drop(manual);
            disk.crash(Crash::LoseAll);
            let manual = open(&disk.reopen(), small_options());
            let found = manual.wal.read(0..1, 10_000, ReadMode::Blocking).unwrap().unwrap();
            assert_eq!(found[0].payload.bytes, before.payload.bytes);
        }
    }
}

/// Fails the n-th operation of each kind in a life with rolls, seals, checkpoints and frees, and
/// looks at what is left after a crash.
#[test]
fn a_failure_anywhere_loses_nothing_that_was_acknowledged() {
    let base = seed("failures");
    let kinds = [
        Operation::Write,
        Operation::Sync,
        Operation::Rename,
        Operation::SyncDir,
        Operation::Create,
        Operation::Remove,
        Operation::Open,
    ];
    let mut poisoned = 0;
    for kind in kinds {
        for after in 0..40 {
            let _context = PrintOnPanic(format!("{kind:?} number {after}, HELIX_SEED={base}"));
            let options = small_options();
            let mut driver = ModelDriver::new(base + after, options);
            driver.open();
            driver.disk.fail(Fault::next(kind).after(after));
            poisoned += u64::from(driver.live_with_failures());
            driver.disk.heal();
            driver.crash();
            driver.check();
        }
    }
    assert!(poisoned > 100, "the failures were hardly ever reached: {poisoned}");
}

impl ModelDriver {
    /// Some rounds of everything; ends at the first failure. Whether there was one.
    fn live_with_failures(&mut self) -> bool {
        self.may_fail = true;
        for _ in 0..4 {
            for _ in 0..3 {
                self.append(&[5000, 300]);
                self.vote();
                self.settle();
            }
            self.place(20);
            self.checkpoint();
            self.purge_all();
            self.trim_all();
            self.manual().idle();
            self.collect_results();
            if matches!(self.wal().writable(), Err(Error::Poisoned { .. })) {
                // Whoever comes later hears the same.
                self.append(&[10]);
                self.manual().settle();
                self.collect_results();
                assert!(matches!(self.wal().writable(), Err(Error::Poisoned { .. })));
                let error = self.wal().checkpoint(LogId::default(), Bytes::new());
                assert!(error.is_err());
                return true;
            }
        }
        false
    }
}

/// The order of a roll: a name that was not made durable is not written to.
#[test]
fn a_failed_sync_of_the_folder_acknowledges_nothing_after_it() {
    for ready_segments in [0, 2] {
        let disk = SimulatedDisk::new(5);
        let options = Options { ready_segments, ..small_options() };
        let mut manual = open(&disk, options.clone());
        manual.idle();
        let results = Results::default();
        disk.fail(Fault::next(Operation::SyncDir).lasting());
        let mut acknowledged = Vec::new();
        for _ in 0..10 {
            let entry = append(&manual.wal, &results, 5000);
            manual.settle();
            match &take(&results)[..] {
                [Ok(())] => acknowledged.push(entry),
                [Err(Error::Poisoned { .. })] => {}
                other => panic!("{other:?}"),
            }
        }
        assert!((1..6).contains(&acknowledged.len()), "{}", acknowledged.len());
        drop(manual);
        disk.crash(Crash::LoseAll);
        let manual = open(&disk.reopen(), options);
        for entry in acknowledged {
            let at = entry.id.index;
            let found = manual.wal.read(at..at + 1, 10_000, ReadMode::Blocking).unwrap().unwrap();
            assert_eq!(found[0].payload.bytes, entry.payload.bytes);
        }
    }
}

#[test]
fn a_full_disk_refuses_appends_serves_reads_and_resumes_by_itself() {
    for ready_segments in [0, 1] {
        let disk = SimulatedDisk::new(3);
        let options = Options { ready_segments, ..small_options() };
        let mut manual = open(&disk, options.clone());
        manual.idle();
        let results = Results::default();
        disk.set_free_bytes(Some(0));
        let mut kept = Vec::new();
        let refused = loop {
            let entry = append(&manual.wal, &results, 3000);
            manual.idle();
            match take(&results).pop().expect("an answer") {
                Ok(()) => kept.push(entry),
                Err(error) => break error,
            }
            assert!(kept.len() < 100, "the disk never fills up");
        };
        assert!(matches!(refused, Error::DiskFull { .. }), "{refused}");
        assert!(matches!(manual.wal.writable(), Err(Error::DiskFull { .. })));
        // Nothing of the refused one is in the log, and what was there can be read.
        let last = kept.last().unwrap().id;
        assert_eq!(manual.wal.state().last, Some(last));
        for entry in &kept {
            let at = entry.id.index;
            let found = manual.wal.read(at..at + 1, 10_000, ReadMode::Blocking).unwrap().unwrap();
            assert_eq!(found[0].payload.bytes, entry.payload.bytes);
        }
        // A vote still goes through: elections go on while appends are refused.
        manual.wal.save_vote(Bytes::from_static(b"a vote on a full disk"), {
            let results = Arc::clone(&results);
            Box::new(move |result| results.lock().unwrap().push(result))
        });
        manual.idle();
        assert!(matches!(take(&results)[..], [Ok(())]));

        disk.set_free_bytes(None);
        manual.idle();
        manual.idle();
        assert!(manual.wal.writable().is_ok(), "{:?}", manual.wal.writable());
        let entry = append(&manual.wal, &results, 3000);
        manual.settle();
        assert!(matches!(take(&results)[..], [Ok(())]));
        kept.push(entry);
        drop(manual);
        disk.crash(Crash::LoseAll);
        let manual = open(&disk.reopen(), options);
        let state = manual.wal.state();
        assert_eq!(state.last, Some(kept.last().unwrap().id));
        assert_eq!(state.vote.as_deref(), Some(&b"a vote on a full disk"[..]));
    }
}

/// The writer asks the keeper for room at each attempt. Woken by that itself, it would try again at
/// once, and for ever: who drives the steps as tasks would do nothing else.
#[test]
fn who_waits_for_room_is_not_woken_by_asking_for_it() {
    let disk = SimulatedDisk::new(3);
    let mut manual = open(&disk, Options { ready_segments: 0, ..small_options() });
    let (of_writer, of_keeper) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let count = |wakes: &Arc<AtomicUsize>| {
        let wakes = Arc::clone(wakes);
        Box::new(move || {
            wakes.fetch_add(1, Ordering::SeqCst);
        })
    };
    manual.wal.set_wakers(count(&of_writer), count(&of_keeper));
    manual.idle();
    disk.set_free_bytes(Some(0));
    let results = Results::default();
    let mut votes = 0;
    let waits = loop {
        let told = Arc::clone(&results);
        let done = Box::new(move |result| told.lock().unwrap().push(result));
        manual.wal.save_vote(Bytes::from(vec![7; 200]), done);
        votes += 1;
        let before = [&of_writer, &of_keeper].map(|wakes| wakes.load(Ordering::SeqCst));
        let next = manual.step_writer();
        let woken = [&of_writer, &of_keeper].map(|wakes| wakes.load(Ordering::SeqCst));
        assert_eq!(woken[0], before[0], "the writer wakes itself after {votes} votes");
        let told = take(&results);
        if told.is_empty() {
            assert!(woken[1] > before[1], "the keeper is asked for room");
            break next;
        }
        assert!(matches!(told[..], [Ok(())]), "{told:?}");
        assert!(votes < 1000, "the disk never fills up");
    };
    assert!(matches!(waits, NextStep::After(time) if !time.is_zero()), "{waits:?}");
    disk.set_free_bytes(None);
    manual.idle();
    assert!(matches!(take(&results)[..], [Ok(())]));
}

/// Room that was seen may be gone again before anything was made of it. The keeper finds that out
/// while the segment in use has place, not only when it would have looked by itself.
#[test]
fn who_sees_room_again_has_the_keeper_look_at_once() {
    let disk = SimulatedDisk::new(3);
    let mut manual = open(&disk, small_options());
    let of_keeper = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&of_keeper);
    let waker = move || {
        count.fetch_add(1, Ordering::SeqCst);
    };
    manual.wal.set_wakers(Box::new(|| ()), Box::new(waker));
    manual.idle();
    disk.set_free_bytes(Some(0));
    let results = Results::default();
    for appends in 0.. {
        if manual.wal.writable().is_err() {
            break;
        }
        append(&manual.wal, &results, 3000);
        manual.idle();
        assert!(appends < 1000, "the disk never fills up");
    }
    assert!(take(&results).iter().all(Result::is_ok));
    disk.set_free_bytes(None);
    let before = of_keeper.load(Ordering::SeqCst);
    manual.wal.writable().unwrap();
    assert!(of_keeper.load(Ordering::SeqCst) > before);
    disk.set_free_bytes(Some(0));
    manual.step_keeper();
    assert!(matches!(manual.wal.writable(), Err(Error::DiskFull { .. })));
}

#[test]
fn no_room_is_noticed_by_the_error_too_not_only_by_the_figure() {
    // Quotas refuse what the figure of free bytes promises.
    let disk = SimulatedDisk::new(3);
    let options = Options { ready_segments: 0, ..small_options() };
    let mut manual = open(&disk, options);
    manual.idle();
    disk.fail(Fault::next(Operation::Create).lasting().error(ErrorKind::StorageFull));
    let results = Results::default();
    let mut refused = None;
    for _ in 0..20 {
        append(&manual.wal, &results, 3000);
        manual.idle();
        if let Some(Err(error)) = take(&results).pop() {
            refused = Some(error);
            break;
        }
    }
    assert!(matches!(refused, Some(Error::DiskFull { .. })), "{refused:?}");
    disk.heal();
    manual.idle();
    manual.idle();
    append(&manual.wal, &results, 3000);
    manual.idle();
    assert!(matches!(take(&results)[..], [Ok(())]));
}

#[test]
fn a_writer_that_is_dropped_tells_everybody() {
    let disk = SimulatedDisk::new(4);
    let manual = open(&disk, small_options());
    let results = Results::default();
    append(&manual.wal, &results, 10);
    append(&manual.wal, &results, 10);
    let ManualWal { wal, writer, keeper, .. } = manual;
    drop(writer);
    let told = take(&results);
    assert_eq!(told.len(), 2);
    assert!(told.iter().all(Result::is_err));
    append(&wal, &results, 10);
    assert!(matches!(take(&results)[..], [Err(_)]), "a later one too");
    assert!(wal.writable().is_err());
    drop(keeper);
}

/// A callback that panics takes the writer with it; the others are told nevertheless.
#[test]
fn a_writer_that_panics_tells_everybody() {
    let disk = SimulatedDisk::new(4);
    let manual = open(&disk, small_options());
    let results = Results::default();
    append(&manual.wal, &results, 10);
    let id = LogId { term: 1, index: 1 };
    manual.wal.append(vec![entry(id, 1, 0, 10)], Box::new(|_| panic!("on purpose")));
    append(&manual.wal, &results, 10);
    let ManualWal { wal, mut writer, keeper, now, .. } = manual;
    let died = std::thread::spawn(move || {
        writer.step(now);
    });
    assert!(died.join().is_err());
    append(&wal, &results, 10);
    assert_eq!(take(&results).len(), 3, "everybody is told");
    assert!(wal.writable().is_err());
    drop(keeper);
}

#[test]
fn an_entry_larger_than_a_segment_is_refused_alone() {
    let disk = SimulatedDisk::new(4);
    let mut manual = open(&disk, small_options());
    let results = Results::default();
    append(&manual.wal, &results, 80 << 10);
    manual.settle();
    assert!(matches!(take(&results)[..], [Err(_)]));
    append(&manual.wal, &results, 10);
    manual.settle();
    assert!(matches!(take(&results)[..], [Ok(())]));
}

#[test]
fn read_errors_are_told_and_poison_nothing() {
    let disk = SimulatedDisk::new(9);
    let options = Options { tail_bytes: 0, ..small_options() };
    let mut manual = open(&disk, options);
    let results = Results::default();
    let entry = append(&manual.wal, &results, 3000);
    manual.idle();
    disk.fail(Fault::next(Operation::Read));
    let error = manual.wal.read(0..1, 10_000, ReadMode::Blocking).unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    let found = manual.wal.read(0..1, 10_000, ReadMode::Blocking).unwrap().unwrap();
    assert_eq!(found[0].payload.bytes, entry.payload.bytes);
    append(&manual.wal, &results, 10);
    manual.settle();
    assert!(take(&results).iter().all(Result::is_ok));
}

#[test]
fn a_folder_that_is_in_use_or_belongs_to_someone_else_is_refused() {
    let disk = SimulatedDisk::new(9);
    let manual = open(&disk, small_options());
    let second = ManualWal::open(Arc::new(disk.clone()), small_options());
    assert!(matches!(second.err(), Some(Error::Unusable(_))));
    drop(manual);
    let identity = Bytes::from_static(b"replica two");
    let other = ManualWal::open(Arc::new(disk.clone()), Options { identity, ..small_options() });
    assert!(matches!(other.err(), Some(Error::Unusable(_))));
    let any = Options { identity: Bytes::new(), ..small_options() };
    let manual = open(&disk, any);
    assert_eq!(&manual.recovered.identity[..], b"replica one");
    assert!(!manual.recovered.created);
}

#[test]
fn reads_of_an_open_may_fail_but_never_change_what_is_there() {
    let base = ModelDriver::new(12, small_options());
    let mut driver = base;
    driver.open();
    for _ in 0..4 {
        driver.append(&[500, 9000]);
        driver.vote();
        driver.settle();
    }
    driver.manual().idle();
    driver.collect_results();
    driver.drop_log();
    for kind in [Operation::Open, Operation::List, Operation::ReadDevice, Operation::Read] {
        for after in 0..60 {
            let _context = PrintOnPanic(format!("{kind:?} number {after}"));
            let mut fork = driver.fork(after);
            fork.disk.fail(Fault::next(kind).after(after));
            let opened = ManualWal::open(Arc::new(fork.disk.clone()), fork.options.clone());
            if let Err(error) = &opened {
                assert!(matches!(error, Error::Io { .. } | Error::Poisoned { .. }), "{error}");
            }
            drop(opened);
            fork.disk.heal();
            fork.crash();
            fork.check();
        }
    }
}

/// What the server looks at to see that its disk has stalled.
#[test]
fn what_waits_for_the_disk_says_for_how_long() {
    let disk = SimulatedDisk::new(1);
    let mut manual = open(&disk, small_options());
    let results = Results::default();
    assert_eq!(manual.wal.unsynced_for(), None);
    append(&manual.wal, &results, 10);
    assert_eq!(manual.wal.unsynced_for(), Some(Duration::ZERO));
    // Nobody steps the writer: as far as the log can tell, the disk does not answer.
    manual.now += Duration::from_secs(3);
    manual.step_keeper();
    append(&manual.wal, &results, 10);
    assert_eq!(manual.wal.unsynced_for(), Some(Duration::from_secs(3)), "the oldest counts");
    manual.settle();
    assert_eq!(manual.wal.unsynced_for(), None);
    // Votes wait too, and what does not fit into the first group waits on, from its own time.
    for _ in 0..4 {
        append(&manual.wal, &results, 12 << 10);
        manual.now += Duration::from_secs(1);
        manual.step_keeper();
    }
    let mut waits = Vec::new();
    while let Some(wait) = manual.wal.unsynced_for() {
        waits.push(wait.as_secs());
        manual.step_writer();
    }
    assert_eq!(waits, [4, 3, 2, 1]);
    // A clock of the caller's counts between the steps too.
    let clock = Arc::new(AtomicUsize::new(100));
    let seconds = Arc::clone(&clock);
    let now = move || Duration::from_secs(seconds.load(Ordering::SeqCst) as u64);
    manual.wal.set_clock(Box::new(now));
    manual.wal.save_vote(Bytes::from_static(b"v"), Box::new(|_| {}));
    clock.store(107, Ordering::SeqCst);
    assert_eq!(manual.wal.unsynced_for(), Some(Duration::from_secs(7)));
    // A poisoned log waits for nothing any more.
    disk.fail(Fault::next(Operation::Sync));
    append(&manual.wal, &results, 10);
    let _ = manual.writer.step(Duration::from_secs(107));
    assert_eq!(manual.wal.unsynced_for(), None);
}

#[test]
fn a_stalled_sync_shows_while_it_lasts() {
    let storage = FaultyStorage::new(Arc::new(SimulatedDisk::new(1)));
    let (wal, writer, keeper, _) = Wal::open(Arc::new(storage.clone()), small_options()).unwrap();
    writer.spawn().unwrap();
    keeper.spawn().unwrap();
    storage.stall(Operation::Sync);
    let (told, result) = mpsc::channel();
    let entry = entry(LogId { term: 1, index: 0 }, 1, 0, 10);
    wal.append(vec![entry], Box::new(move |durable| told.send(durable).unwrap()));
    let shown = (0..10_000).any(|_| {
        // A wait with a deadline that cannot come true before the disk goes on.
        assert!(result.recv_timeout(Duration::from_millis(1)).is_err(), "it was not synced");
        wal.unsynced_for() > Some(Duration::from_millis(20))
    });
    assert!(shown, "{:?}", wal.unsynced_for());
    storage.heal();
    result.recv().unwrap().unwrap();
    assert_eq!(wal.unsynced_for(), None);
    wal.close();
}

/// What others had room for may be applied here before it is written.
#[test]
fn a_log_without_room_for_what_is_placed_ends_and_can_be_opened_again() {
    let disk = SimulatedDisk::new(1);
    let mut manual = ManualWal::open(Arc::new(disk.clone()), small_options()).unwrap();
    disk.set_free_bytes(Some(0));
    let (told, results) = mpsc::channel();
    for index in 0..60 {
        let told = told.clone();
        let done = Box::new(move |result| told.send((index, result)).unwrap());
        manual.wal.append(vec![entry(LogId { term: 1, index }, 3, 30, 5000)], done);
        manual.wal.place(index, None).unwrap();
    }
    manual.settle();
    drop(told);
    let results: Vec<_> = results.iter().collect();
    let durable = results.iter().filter(|(_, result)| result.is_ok()).count() as u64;
    assert!((1..60).contains(&durable), "{durable}");
    let is_full = |error: &Error| matches!(error, Error::DiskFull { .. });
    let is_told = |result: &Result<(), Error>| result.as_ref().err().is_none_or(is_full);
    assert!(results.iter().all(|(_, result)| is_told(result)));
    assert!(manual.wal.writable().is_err_and(|error| is_full(&error)));
    assert!(manual.wal.has_ended());
    drop(manual);
    disk.set_free_bytes(None);
    let manual = ManualWal::open(Arc::new(disk.reopen()), small_options()).unwrap();
    assert_eq!(manual.wal.state().last, Some(LogId { term: 1, index: durable - 1 }));
}

/// Entries that are appended together are all there or none is, also where some would still fit
/// into the segment in use.
#[test]
fn a_batch_that_finds_no_room_leaves_nothing_behind() {
    let mut refused = 0;
    for before in 1..100 {
        let disk = SimulatedDisk::new(6);
        let options = Options { ready_segments: 0, ..small_options() };
        let mut manual = open(&disk, options.clone());
        manual.idle();
        disk.set_free_bytes(Some(0));
        let results = Results::default();
        for _ in 0..before {
            append(&manual.wal, &results, 3000);
            manual.idle();
        }
        if take(&results).iter().any(Result::is_err) {
            break;
        }
        let last = manual.wal.state().last.unwrap().index;
        let id = |more| LogId { term: 1, index: last + more };
        let told = Arc::clone(&results);
        let done = Box::new(move |result| told.lock().unwrap().push(result));
        manual.wal.append((1..=5).map(|more| entry(id(more), 1, 10, 3000)).collect(), done);
        manual.idle();
        let expected = match &take(&results)[..] {
            [Ok(())] => last + 5,
            [Err(Error::DiskFull { .. })] => {
                refused += 1;
                last
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(manual.wal.state().last.map(|id| id.index), Some(expected));
        drop(manual);
        disk.crash(Crash::KeepAll);
        disk.set_free_bytes(None);
        let state = open(&disk.reopen(), options).wal.state();
        assert_eq!(state.last.map(|id| id.index), Some(expected), "after {before} entries");
    }
    assert!(refused >= 2, "where there is room for some of them, {refused} were refused");
}
