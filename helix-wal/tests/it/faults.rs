//! Failing disk operations: only durable requests are acknowledged, the first failure poisons the
//! log, a full disk does not, and every caller gets a result.

use std::io::ErrorKind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use bytes::Bytes;
use helix_wal::storage::{Crash, Fault, FaultyStorage, Operation, SimulatedDisk};
use helix_wal::{Error, LogId, NextStep, Options, ReadMode, Wal};

use crate::common::{
    AppendResults, ManualWal, PrintOnPanic, append, entry, seed, small_options, take,
};
use crate::model::ModelDriver;

fn open(disk: &SimulatedDisk, options: Options) -> ManualWal {
    ManualWal::open(Arc::new(disk.clone()), options).unwrap()
}

/// After a failed write or sync no append is acknowledged and the log stays poisoned, although the
/// disk works again. After a crash all acknowledged entries exist.
#[test]
fn failed_write_or_sync_poisons_permanently() {
    for operation in [Operation::Write, Operation::Sync] {
        for seed in 0..20 {
            let disk = SimulatedDisk::new(seed);
            let mut manual = open(&disk, small_options());
            manual.settle();
            let results = AppendResults::default();
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
            // The disk works again, the log stays poisoned.
            append(&manual.wal, &results, 10);
            manual.wal.save_vote(Bytes::from_static(b"v"), {
                let results = Arc::clone(&results);
                Box::new(move |result| results.lock().unwrap().push(result))
            });
            assert_eq!(manual.step_writer(), NextStep::Done);
            manual.settle();
            let after = take(&results);
            assert_eq!(after.len(), 4, "every caller gets a result");
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

/// Fails the n-th operation of each kind during appends, rolls, seals, checkpoints and frees, and
/// checks the log after a crash.
#[test]
fn failure_of_any_operation_loses_no_acknowledged_entry() {
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
            poisoned += u64::from(driver.run_until_failure());
            driver.disk.heal();
            driver.crash();
            driver.check();
        }
    }
    assert!(poisoned > 100, "too few failures were reached: {poisoned}");
}

impl ModelDriver {
    /// Runs all operations until the first failure. Returns whether there was one.
    fn run_until_failure(&mut self) -> bool {
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
                // Later callers get the same error.
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

/// A roll does not write to a file whose name is not durable.
#[test]
fn failed_directory_sync_stops_acknowledgements() {
    for ready_segments in [0, 2] {
        let disk = SimulatedDisk::new(5);
        let options = Options { ready_segments, ..small_options() };
        let mut manual = open(&disk, options.clone());
        manual.idle();
        let results = AppendResults::default();
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
fn full_disk_rejects_appends_serves_reads_and_resumes() {
    for ready_segments in [0, 1] {
        let disk = SimulatedDisk::new(3);
        let options = Options { ready_segments, ..small_options() };
        let mut manual = open(&disk, options.clone());
        manual.idle();
        let results = AppendResults::default();
        disk.set_free_bytes(Some(0));
        let mut accepted = Vec::new();
        let refused = loop {
            let entry = append(&manual.wal, &results, 3000);
            manual.idle();
            match take(&results).pop().expect("a result") {
                Ok(()) => accepted.push(entry),
                Err(error) => break error,
            }
            assert!(accepted.len() < 100, "the disk never fills up");
        };
        assert!(matches!(refused, Error::DiskFull { .. }), "{refused}");
        assert!(matches!(manual.wal.writable(), Err(Error::DiskFull { .. })));
        // The rejected entry is not in the log, and earlier ones are readable.
        let last = accepted.last().unwrap().id;
        assert_eq!(manual.wal.state().last, Some(last));
        for entry in &accepted {
            let at = entry.id.index;
            let found = manual.wal.read(at..at + 1, 10_000, ReadMode::Blocking).unwrap().unwrap();
            assert_eq!(found[0].payload.bytes, entry.payload.bytes);
        }
        // Votes are still accepted, so that elections work while appends are rejected.
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
        accepted.push(entry);
        drop(manual);
        disk.crash(Crash::LoseAll);
        let manual = open(&disk.reopen(), options);
        let state = manual.wal.state();
        assert_eq!(state.last, Some(accepted.last().unwrap().id));
        assert_eq!(state.vote.as_deref(), Some(&b"a vote on a full disk"[..]));
    }
}

/// The writer requests disk space from the keeper at each attempt. The request must not wake the
/// writer itself, which would then retry in a busy loop.
#[test]
fn request_for_disk_space_does_not_wake_the_writer() {
    let disk = SimulatedDisk::new(3);
    let mut manual = open(&disk, Options { ready_segments: 0, ..small_options() });
    let (writer_wakes, keeper_wakes) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let count = |wakes: &Arc<AtomicUsize>| {
        let wakes = Arc::clone(wakes);
        Box::new(move || {
            wakes.fetch_add(1, Ordering::SeqCst);
        })
    };
    manual.wal.set_wakers(count(&writer_wakes), count(&keeper_wakes));
    manual.idle();
    disk.set_free_bytes(Some(0));
    let results = AppendResults::default();
    let mut votes = 0;
    let wait = loop {
        let sent = Arc::clone(&results);
        let done = Box::new(move |result| sent.lock().unwrap().push(result));
        manual.wal.save_vote(Bytes::from(vec![7; 200]), done);
        votes += 1;
        let before = [&writer_wakes, &keeper_wakes].map(|wakes| wakes.load(Ordering::SeqCst));
        let next = manual.step_writer();
        let woken = [&writer_wakes, &keeper_wakes].map(|wakes| wakes.load(Ordering::SeqCst));
        assert_eq!(woken[0], before[0], "the writer wakes itself after {votes} votes");
        let sent = take(&results);
        if sent.is_empty() {
            assert!(woken[1] > before[1], "the keeper is woken");
            break next;
        }
        assert!(matches!(sent[..], [Ok(())]), "{sent:?}");
        assert!(votes < 1000, "the disk never fills up");
    };
    assert!(matches!(wait, NextStep::After(time) if !time.is_zero()), "{wait:?}");
    disk.set_free_bytes(None);
    manual.idle();
    assert!(matches!(take(&results)[..], [Ok(())]));
}

/// Free space may be gone again before it is used. `writable` wakes the keeper, which checks at
/// once instead of at its next poll.
#[test]
fn writable_after_full_disk_wakes_the_keeper() {
    let disk = SimulatedDisk::new(3);
    let mut manual = open(&disk, small_options());
    let keeper_wakes = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&keeper_wakes);
    let waker = move || {
        count.fetch_add(1, Ordering::SeqCst);
    };
    manual.wal.set_wakers(Box::new(|| ()), Box::new(waker));
    manual.idle();
    disk.set_free_bytes(Some(0));
    let results = AppendResults::default();
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
    let before = keeper_wakes.load(Ordering::SeqCst);
    manual.wal.writable().unwrap();
    assert!(keeper_wakes.load(Ordering::SeqCst) > before);
    disk.set_free_bytes(Some(0));
    manual.step_keeper();
    assert!(matches!(manual.wal.writable(), Err(Error::DiskFull { .. })));
}

#[test]
fn storage_full_error_counts_as_full_disk() {
    // With quotas, a creation may fail although the reported free bytes suffice.
    let disk = SimulatedDisk::new(3);
    let options = Options { ready_segments: 0, ..small_options() };
    let mut manual = open(&disk, options);
    manual.idle();
    disk.fail(Fault::next(Operation::Create).lasting().error(ErrorKind::StorageFull));
    let results = AppendResults::default();
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
fn dropped_writer_fails_all_callers() {
    let disk = SimulatedDisk::new(4);
    let manual = open(&disk, small_options());
    let results = AppendResults::default();
    append(&manual.wal, &results, 10);
    append(&manual.wal, &results, 10);
    let ManualWal { wal, writer, keeper, .. } = manual;
    drop(writer);
    let sent = take(&results);
    assert_eq!(sent.len(), 2);
    assert!(sent.iter().all(Result::is_err));
    append(&wal, &results, 10);
    assert!(matches!(take(&results)[..], [Err(_)]), "a later one too");
    assert!(wal.writable().is_err());
    drop(keeper);
}

/// A panic in a callback ends the writer; all other callers get a result.
#[test]
fn panicking_writer_fails_all_callers() {
    let disk = SimulatedDisk::new(4);
    let manual = open(&disk, small_options());
    let results = AppendResults::default();
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
    assert_eq!(take(&results).len(), 3, "every caller gets a result");
    assert!(wal.writable().is_err());
    drop(keeper);
}

#[test]
fn rejects_only_the_entry_larger_than_a_segment() {
    let disk = SimulatedDisk::new(4);
    let mut manual = open(&disk, small_options());
    let results = AppendResults::default();
    append(&manual.wal, &results, 80 << 10);
    manual.settle();
    assert!(matches!(take(&results)[..], [Err(_)]));
    append(&manual.wal, &results, 10);
    manual.settle();
    assert!(matches!(take(&results)[..], [Ok(())]));
}

#[test]
fn read_errors_do_not_poison_the_log() {
    let disk = SimulatedDisk::new(9);
    let options = Options { tail_bytes: 0, ..small_options() };
    let mut manual = open(&disk, options);
    let results = AppendResults::default();
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
fn rejects_directory_in_use_or_with_other_identity() {
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
fn failed_open_changes_nothing() {
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

/// The server uses `unsynced_for` to detect a stalled disk.
#[test]
fn unsynced_for_is_age_of_oldest_request() {
    let disk = SimulatedDisk::new(1);
    let mut manual = open(&disk, small_options());
    let results = AppendResults::default();
    assert_eq!(manual.wal.unsynced_for(), None);
    append(&manual.wal, &results, 10);
    assert_eq!(manual.wal.unsynced_for(), Some(Duration::ZERO));
    // The writer is not stepped, which looks like a stalled disk.
    manual.now += Duration::from_secs(3);
    manual.step_keeper();
    append(&manual.wal, &results, 10);
    assert_eq!(manual.wal.unsynced_for(), Some(Duration::from_secs(3)), "the oldest counts");
    manual.settle();
    assert_eq!(manual.wal.unsynced_for(), None);
    // Requests that do not fit the first group keep their own start time.
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
    // A clock set by the caller advances between steps too.
    let clock = Arc::new(AtomicUsize::new(100));
    let seconds = Arc::clone(&clock);
    let now = move || Duration::from_secs(seconds.load(Ordering::SeqCst) as u64);
    manual.wal.set_clock(Box::new(now));
    manual.wal.save_vote(Bytes::from_static(b"v"), Box::new(|_| {}));
    clock.store(107, Ordering::SeqCst);
    assert_eq!(manual.wal.unsynced_for(), Some(Duration::from_secs(7)));
    // A poisoned log has no waiting requests.
    disk.fail(Fault::next(Operation::Sync));
    append(&manual.wal, &results, 10);
    let _ = manual.writer.step(Duration::from_secs(107));
    assert_eq!(manual.wal.unsynced_for(), None);
}

#[test]
fn sync_completes_once_everything_before_it_is_durable() {
    let disk = SimulatedDisk::new(1);
    let mut manual = open(&disk, small_options());
    let (results, synced) = (AppendResults::default(), AppendResults::default());
    // One group each.
    let payload = 12 << 10;
    append(&manual.wal, &results, payload);
    let last = append(&manual.wal, &results, payload).id;
    let sent = Arc::clone(&synced);
    manual.wal.sync(Box::new(move |result| sent.lock().unwrap().push(result)));
    manual.step_writer();
    assert_eq!((take(&results).len(), take(&synced).len()), (1, 0));
    manual.step_writer();
    assert!(matches!(take(&synced)[..], [Ok(())]));
    let after = disk.fork();
    after.crash(Crash::LoseAll);
    assert_eq!(open(&after.reopen(), small_options()).wal.state().last, Some(last));
    // Nothing is queued before this one.
    manual.idle();
    let sent = Arc::clone(&synced);
    manual.wal.sync(Box::new(move |result| sent.lock().unwrap().push(result)));
    let changes = disk.changes();
    manual.settle();
    assert!(matches!(take(&synced)[..], [Ok(())]));
    assert_eq!(disk.changes(), changes, "nothing is written");
}

#[test]
fn stalled_sync_is_visible_while_it_lasts() {
    let storage = FaultyStorage::new(Arc::new(SimulatedDisk::new(1)));
    let (wal, writer, keeper, _) = Wal::open(Arc::new(storage.clone()), small_options()).unwrap();
    writer.spawn().unwrap();
    keeper.spawn().unwrap();
    storage.stall(Operation::Sync);
    let (sent, result) = mpsc::channel();
    let entry = entry(LogId { term: 1, index: 0 }, 1, 0, 10);
    wal.append(vec![entry], Box::new(move |durable| sent.send(durable).unwrap()));
    let shown = (0..10_000).any(|_| {
        // The result cannot arrive before the sync continues.
        assert!(result.recv_timeout(Duration::from_millis(1)).is_err(), "it was not synced");
        wal.unsynced_for() > Some(Duration::from_millis(20))
    });
    assert!(shown, "{:?}", wal.unsynced_for());
    storage.heal();
    result.recv().unwrap().unwrap();
    assert_eq!(wal.unsynced_for(), None);
    wal.close();
}

/// Entries that other replicas had space for may be applied before they are written here.
#[test]
fn log_without_space_for_placed_entries_ends_and_reopens() {
    let disk = SimulatedDisk::new(1);
    let mut manual = ManualWal::open(Arc::new(disk.clone()), small_options()).unwrap();
    disk.set_free_bytes(Some(0));
    let (sent, results) = mpsc::channel();
    for index in 0..60 {
        let sent = sent.clone();
        let done = Box::new(move |result| sent.send((index, result)).unwrap());
        manual.wal.append(vec![entry(LogId { term: 1, index }, 3, 30, 5000)], done);
        manual.wal.place(index, None).unwrap();
    }
    manual.settle();
    drop(sent);
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

/// Entries of one append are all kept or all rejected, even if some would fit the active segment.
#[test]
fn append_rejected_by_full_disk_leaves_no_entries() {
    let mut refused = 0;
    for before in 1..100 {
        let disk = SimulatedDisk::new(6);
        let options = Options { ready_segments: 0, ..small_options() };
        let mut manual = open(&disk, options.clone());
        manual.idle();
        disk.set_free_bytes(Some(0));
        let results = AppendResults::default();
        for _ in 0..before {
            append(&manual.wal, &results, 3000);
            manual.idle();
        }
        if take(&results).iter().any(Result::is_err) {
            break;
        }
        let last = manual.wal.state().last.unwrap().index;
        let id = |more| LogId { term: 1, index: last + more };
        let sent = Arc::clone(&results);
        let done = Box::new(move |result| sent.lock().unwrap().push(result));
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
    assert!(refused >= 2, "{refused} appends of which some entries would fit were rejected");
}
