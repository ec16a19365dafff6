//! Concurrent appends, reads, placements and trims with real threads in a real directory.
//! Reads return the right bytes, and close waits for queued requests.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use helix_wal::storage::{DirStorage, Fault, FaultyStorage, Operation, Storage};
use helix_wal::{Error, LogId, Options, Placement, ReadMode, Wal};

use crate::common::{TestRng, entry, same_entry, seed};

/// Timeout of all waits, far above their normal duration.
const DEADLINE: Duration = Duration::from_secs(60);

fn options() -> Options {
    Options {
        segment_bytes: 1 << 20,
        group_bytes: 256 << 10,
        tail_bytes: 256 << 10,
        reserve_bytes: 0,
        ..Options::default()
    }
}

fn start(storage: Arc<dyn Storage>) -> Wal {
    let (wal, writer, keeper, _) = Wal::open(storage, options()).unwrap();
    writer.spawn().unwrap();
    keeper.spawn().unwrap();
    wal
}

/// A growing number that threads can wait for.
#[derive(Default)]
struct Progress {
    value: Mutex<u64>,
    changed: Condvar,
}

impl Progress {
    fn raise(&self, to: u64) {
        let mut value = self.value.lock().unwrap();
        *value = (*value).max(to);
        self.changed.notify_all();
    }

    fn get(&self) -> u64 {
        *self.value.lock().unwrap()
    }

    /// Waits until the number is above `seen` and returns it.
    fn above(&self, seen: u64) -> u64 {
        let value = self.value.lock().unwrap();
        let (value, timeout) =
            self.changed.wait_timeout_while(value, DEADLINE, |value| *value <= seen).unwrap();
        assert!(!timeout.timed_out(), "nothing happened after {seen}");
        *value
    }
}

fn size(index: u64) -> usize {
    (index.wrapping_mul(7919) % 9000) as usize
}

fn made(index: u64) -> helix_wal::Entry {
    entry(LogId { term: 1, index }, 1 + index % 4, 16, size(index))
}

fn placed(index: u64) -> Placement {
    Placement { stream: 1 + index % 4, first: 2 * (index / 4), count: 2, time: index }
}

#[test]
fn concurrent_appends_reads_and_trims_return_right_bytes() {
    const ENTRIES: u64 = 8000;
    let seed = seed("threads");
    let directory = tempfile::tempdir().unwrap();
    let wal = start(Arc::new(DirStorage::open(directory.path()).unwrap()));
    let synced = Arc::new(Progress::default());
    let applied = Arc::new(Progress::default());
    let trimmed = Arc::new(AtomicU64::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..3)
            .map(|reader| {
                let (wal, applied) = (wal.clone(), Arc::clone(&applied));
                let (trimmed, stop) = (Arc::clone(&trimmed), Arc::clone(&stop));
                scope.spawn(move || read_along(&wal, &applied, &trimmed, &stop, seed + reader))
            })
            .collect();
        let applier = {
            let (wal, synced) = (wal.clone(), Arc::clone(&synced));
            let (applied, trimmed) = (Arc::clone(&applied), Arc::clone(&trimmed));
            scope.spawn(move || apply(&wal, &synced, &applied, &trimmed, ENTRIES))
        };
        append_along(&wal, &synced, ENTRIES);
        applier.join().unwrap();
        stop.store(true, Ordering::SeqCst);
        applied.raise(ENTRIES + 1);
        let reads: u64 = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
        println!("{reads} entries read along the way");
        assert!(reads > 0);
    });
    // Trims free whole segments: the held bytes are near the kept ones.
    let held = || wal.stats().held_bytes;
    wait_for("segments to be freed", || held() <= 16 << 20);
    wal.close();
    drop(wal);
    let storage = Arc::new(DirStorage::open_buffered(directory.path()).unwrap());
    let (wal, _writer, _keeper, _) = Wal::open(storage, options()).unwrap();
    assert_eq!(wal.state().last, Some(LogId { term: 1, index: ENTRIES - 1 }));
}

fn append_along(wal: &Wal, synced: &Arc<Progress>, entries: u64) {
    let mut next = 0;
    while next < entries {
        let count = 1 + next % 7;
        let some: Vec<_> = (next..(next + count).min(entries)).map(made).collect();
        next += some.len() as u64;
        let (upto, progress) = (next, Arc::clone(synced));
        wal.append(some, Box::new(move |result| result.map(|()| progress.raise(upto)).unwrap()));
        // Bounds the entries in flight, as a server does.
        if next - synced.get() > 200 {
            synced.above(next - 200);
        }
    }
}

fn apply(wal: &Wal, synced: &Progress, applied: &Progress, trimmed: &AtomicU64, entries: u64) {
    let mut next = 0;
    while next < entries {
        let upto = synced.above(next);
        for index in next..upto {
            wal.place(index, Some(placed(index))).unwrap();
        }
        next = upto;
        applied.raise(next);
        if next % 1000 < 200 && next > 1500 {
            checkpoint_and_trim(wal, trimmed, next - 1, next - 1000);
        }
    }
    checkpoint_and_trim(wal, trimmed, entries - 1, entries - 1000);
}

/// Writes a checkpoint at `at`, and purges and trims everything before `kept`.
fn checkpoint_and_trim(wal: &Wal, trimmed: &AtomicU64, at: u64, kept: u64) {
    let at = LogId { term: 1, index: at };
    wal.checkpoint(at, Bytes::from_static(b"state")).unwrap();
    // Notifies readers first: entries below may be gone from now on.
    trimmed.fetch_max(kept, Ordering::SeqCst);
    wal.purge(LogId { term: 1, index: kept - 1 }, Box::new(|result| result.unwrap()));
    for stream in 1..5 {
        wal.trim(stream, 2 * (kept / 4));
    }
}

fn read_along(
    wal: &Wal,
    applied: &Progress,
    trimmed: &AtomicU64,
    stop: &AtomicBool,
    seed: u64,
) -> u64 {
    let mut rng = TestRng::new(seed);
    let mut reads = 0;
    let mut end = applied.above(0);
    while !stop.load(Ordering::SeqCst) {
        let first = trimmed.load(Ordering::SeqCst);
        if first < end {
            let index = first + rng.below(end - first);
            reads += read_by_index(wal, index, end, trimmed, &mut rng);
            reads += read_by_stream(wal, index, trimmed, &mut rng);
        }
        end = applied.get().min(wal.state().last.map_or(0, |last| last.index + 1));
    }
    reads
}

fn read_mode(rng: &mut TestRng) -> ReadMode {
    if rng.one_in(2) { ReadMode::CachedOnly } else { ReadMode::Blocking }
}

fn read_by_index(wal: &Wal, index: u64, end: u64, trimmed: &AtomicU64, rng: &mut TestRng) -> u64 {
    match wal.read(index..end, 30_000, read_mode(rng)) {
        Ok(None) => 0,
        Ok(Some(entries)) => {
            for (got, index) in entries.iter().zip(index..) {
                assert!(same_entry(got, &made(index)), "entry {index} is wrong");
            }
            assert!(!entries.is_empty());
            entries.len() as u64
        }
        Err(Error::Trimmed { .. }) if index < trimmed.load(Ordering::SeqCst) => 0,
        Err(error) => panic!("read {index}: {error}"),
    }
}

fn read_by_stream(wal: &Wal, index: u64, trimmed: &AtomicU64, rng: &mut TestRng) -> u64 {
    let wanted = placed(index);
    match wal.read_stream(wanted.stream, wanted.first, u64::MAX, 30_000, read_mode(rng)) {
        Ok(None) => 0,
        Ok(Some(entries)) => {
            assert!(!entries.is_empty());
            for (n, got) in entries.iter().enumerate() {
                let wanted = made(index + 4 * n as u64);
                assert_eq!(got.placement, placed(index + 4 * n as u64));
                assert_eq!(got.payload.bytes, wanted.payload.bytes, "bytes of {index} are wrong");
            }
            entries.len() as u64
        }
        Err(Error::Trimmed { .. }) if index < trimmed.load(Ordering::SeqCst) + 4 => 0,
        Err(error) => panic!("stream of {index}: {error}"),
    }
}

/// Waits for a condition that the log's threads establish.
fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < deadline, "timed out waiting for {what}");
        std::thread::yield_now();
    }
}

#[test]
fn close_completes_queued_requests_and_rejects_new_ones() {
    let directory = tempfile::tempdir().unwrap();
    for round in 0..20 {
        let wal = start(Arc::new(DirStorage::open(directory.path()).unwrap()));
        let first = wal.state().last.map_or(0, |last| last.index + 1);
        let ended = Arc::new(AtomicUsize::new(0));
        for index in first..first + 50 {
            let ended = Arc::clone(&ended);
            wal.append(
                vec![made(index)],
                Box::new(move |result| {
                    result.unwrap();
                    ended.fetch_add(1, Ordering::SeqCst);
                }),
            );
        }
        wal.close();
        assert_eq!(ended.load(Ordering::SeqCst), 50, "round {round}");
        let late = Arc::new(Mutex::new(None));
        let received = Arc::clone(&late);
        wal.append(vec![made(first + 50)], Box::new(move |r| *received.lock().unwrap() = Some(r)));
        assert!(matches!(*late.lock().unwrap(), Some(Err(Error::Closed))));
        drop(wal);
    }
    let storage = Arc::new(DirStorage::open(directory.path()).unwrap());
    let (wal, _writer, _keeper, recovered) = Wal::open(storage, options()).unwrap();
    assert_eq!(recovered.torn_bytes, 0);
    assert_eq!(wal.state().last, Some(LogId { term: 1, index: 999 }));
    let mut next = 0;
    while next < 1000 {
        let some = wal.read(next..1000, 1 << 20, ReadMode::Blocking).unwrap().unwrap();
        for got in &some {
            assert!(same_entry(got, &made(next)), "entry {next} is wrong");
            next += 1;
        }
    }
}

#[test]
fn failing_disk_fails_all_callers() {
    for operation in [Operation::Write, Operation::Sync] {
        let directory = tempfile::tempdir().unwrap();
        let storage = FaultyStorage::new(Arc::new(DirStorage::open(directory.path()).unwrap()));
        let wal = start(Arc::new(storage.clone()));
        let (poisoned, report) = channel();
        wal.on_poisoned(Box::new(move |error| poisoned.send(error).unwrap()));
        storage.fail(Fault::next(operation).after(20).lasting());
        let (sender, results) = channel();
        let mut acknowledged = 0;
        for index in 0..200 {
            let sender = sender.clone();
            wal.append(vec![made(index)], Box::new(move |result| sender.send(result).unwrap()));
            // The first ones one by one, so that some succeed before the failure.
            if index < 5 {
                results.recv_timeout(DEADLINE).unwrap().unwrap();
                acknowledged += 1;
            }
        }
        drop(sender);
        let mut failed = 0;
        while let Ok(result) = results.recv_timeout(DEADLINE) {
            match result {
                Ok(()) => acknowledged += 1,
                Err(Error::Poisoned { .. }) => failed += 1,
                Err(error) => panic!("{error}"),
            }
        }
        // The failure may come after the last append was accepted.
        while failed == 0 {
            let (sender, result) = channel();
            let next = wal.state().last.map_or(0, |last| last.index + 1);
            wal.append(vec![made(next)], Box::new(move |result| sender.send(result).unwrap()));
            match result.recv_timeout(DEADLINE).unwrap() {
                Ok(()) => acknowledged += 1,
                Err(_) => failed += 1,
            }
        }
        assert!(matches!(report.recv_timeout(DEADLINE), Ok(Error::Poisoned { .. })));
        wal.close();
        drop(wal);
        storage.heal();
        let (wal, _writer, _keeper, _) = Wal::open(Arc::new(storage), options()).unwrap();
        let last = wal.state().last.unwrap().index;
        assert!(last + 1 >= acknowledged, "{acknowledged} acknowledged, the last is {last}");
        for index in 0..acknowledged {
            let got = wal.read(index..index + 1, usize::MAX, ReadMode::Blocking).unwrap().unwrap();
            assert!(same_entry(&got[0], &made(index)), "entry {index} is wrong");
        }
    }
}

#[test]
fn callers_wait_for_their_own_append_only() {
    const CALLERS: u64 = 8;
    let directory = tempfile::tempdir().unwrap();
    let wal = start(Arc::new(DirStorage::open(directory.path()).unwrap()));
    let next = Mutex::new(0_u64);
    std::thread::scope(|scope| {
        for _ in 0..CALLERS {
            scope.spawn(|| {
                for _ in 0..100 {
                    let (sender, result) = channel();
                    {
                        // Indexes are handed out and queued under one lock, as a Raft core does.
                        let mut next = next.lock().unwrap();
                        let done = Box::new(move |result| sender.send(result).unwrap());
                        wal.append(vec![made(*next)], done);
                        *next += 1;
                    }
                    result.recv_timeout(DEADLINE).expect("a result").unwrap();
                }
            });
        }
    });
    wal.close();
}

/// Group commit: requests that arrive during a sync share the next one.
#[test]
fn requests_during_a_sync_share_the_next_one() {
    const WAITING: u64 = 50;
    let directory = tempfile::tempdir().unwrap();
    let storage = FaultyStorage::new(Arc::new(DirStorage::open(directory.path()).unwrap()));
    // All waiting requests fit a group, and no sync marker adds a group.
    let options = Options { group_bytes: 512 << 10, mark_delay: DEADLINE, ..options() };
    let (wal, writer, keeper, _) = Wal::open(Arc::new(storage.clone()), options).unwrap();
    writer.spawn().unwrap();
    keeper.spawn().unwrap();
    let (sender, result) = channel();
    let append = |index| {
        let sender = sender.clone();
        wal.append(vec![made(index)], Box::new(move |result| sender.send(result).unwrap()));
    };
    append(0);
    result.recv_timeout(DEADLINE).expect("a result").unwrap();
    let before = wal.stats().groups;

    storage.stall(Operation::Sync);
    append(1);
    let began = Instant::now();
    while wal.stats().queued_requests > 0 {
        assert!(began.elapsed() < DEADLINE, "the writer did not take the request");
        std::thread::yield_now();
    }
    (2..2 + WAITING).for_each(append);
    assert!(result.try_recv().is_err(), "nothing is acknowledged before its sync");
    storage.heal();
    for _ in 0..=WAITING {
        result.recv_timeout(DEADLINE).expect("a result").unwrap();
    }
    assert_eq!(wal.stats().groups - before, 2);
    wal.close();
}
