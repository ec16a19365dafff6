//! Runs the log's threads under a scheduler that tries different orders of their steps.
//!
//! Callers, writer and keeper synchronize with the primitives of `src/sync.rs`; each use of one may
//! switch threads. Built only with `--cfg shuttle` (`just interleavings`). Waits never time out, so
//! a lost wake-up is a deadlock, which the scheduler reports with a schedule to reproduce it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use helix_wal::storage::{Crash, SimulatedDisk};
use helix_wal::{DurableCallback, Entry, Error, LogId, Options, Placement, ReadMode, Wal};
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::thread;

use crate::common::{ManualWal, entry, same_entry, small_options};
use crate::truth::{QueuedOp, Truth};

/// Result of a callback, with a copy of the disk at that time.
struct Completion {
    number: usize,
    result: Result<(), Error>,
    disk: SimulatedDisk,
}

/// A log with its threads, the operations queued on it and their results.
#[derive(Clone)]
struct RunningLog {
    wal: Wal,
    disk: SimulatedDisk,
    /// Locked during a call, so that calls have one order.
    truth: Arc<Mutex<Truth>>,
    completions: Arc<(Mutex<Vec<Completion>>, Condvar)>,
}

fn options() -> Options {
    Options { tail_bytes: 0, compaction_bytes_per_second: 0, busy_poll: true, ..small_options() }
}

impl RunningLog {
    fn begin() -> Self {
        let disk = SimulatedDisk::new(1);
        let (wal, writer, keeper, _) = Wal::open(Arc::new(disk.clone()), options()).unwrap();
        // Every read of the clock advances it by 50 µs, so that a poll takes a few reads.
        let ticks = AtomicU64::new(0);
        let clock = move || Duration::from_micros(50 * ticks.fetch_add(1, Ordering::Relaxed));
        wal.set_clock(Box::new(clock));
        writer.spawn().unwrap();
        keeper.spawn().unwrap();
        Self { wal, disk, truth: Arc::default(), completions: Arc::default() }
    }

    fn done(&self, number: usize) -> DurableCallback {
        let (completions, disk) = (Arc::clone(&self.completions), self.disk.clone());
        Box::new(move |result| {
            let disk = disk.fork();
            completions.0.lock().unwrap().push(Completion { number, result, disk });
            completions.1.notify_all();
        })
    }

    /// Queues an operation and returns its number.
    fn queue(&self, op: QueuedOp) -> usize {
        let mut truth = self.truth.lock().unwrap();
        let number = truth.queue(op.clone());
        let done = self.done(number);
        match op {
            QueuedOp::Append(entry) => self.wal.append(vec![entry], done),
            QueuedOp::Vote(vote) => self.wal.save_vote(vote, done),
            QueuedOp::Truncate(last) => self.wal.truncate_after(last, done),
            QueuedOp::Purge(upto) => self.wal.purge(upto, done),
        }
        number
    }

    fn append(&self, id: LogId, payload: usize) -> usize {
        self.queue(QueuedOp::Append(entry_of(id, payload)))
    }

    /// Waits for an operation. Returns whether it is durable.
    fn wait(&self, number: usize) -> bool {
        let mut completions = self.completions.0.lock().unwrap();
        loop {
            if let Some(done) = completions.iter().find(|done| done.number == number) {
                return done.result.is_ok();
            }
            completions = self.completions.1.wait(completions).unwrap();
        }
    }

    /// Applies an entry of the first term, which commits it.
    fn place(&self, index: u64) {
        self.truth.lock().unwrap().committed.insert(index, id(1, index));
        let (stream, first) = (1 + index % 2, index / 2);
        let placement = Placement { stream, first, count: 1, time: index };
        self.wal.place(index, Some(placement)).unwrap();
    }

    /// Closes the log. Checks each result against the disk at that time and at the end.
    fn end(self, may_close: bool) {
        self.wal.close();
        let Self { wal, disk, truth, completions } = self;
        drop(wal);
        let truth = truth.lock().unwrap().clone();
        let completions = std::mem::take(&mut *completions.0.lock().unwrap());
        let mut numbers: Vec<usize> = completions.iter().map(|it| it.number).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (1..=truth.calls).collect::<Vec<_>>(), "each callback runs once");
        for Completion { result, .. } in &completions {
            let closed = may_close && matches!(result, Err(Error::Closed));
            assert!(result.is_ok() || closed, "{result:?}");
        }
        let durable = completions.iter().filter(|it| it.result.is_ok());
        for done in durable.clone() {
            recovers(&truth, done.number, &done.disk);
        }
        let last = durable.map(|it| it.number).max().unwrap_or(0);
        recovers(&truth, last, &disk);
    }
}

/// Checks that after power loss all operations up to this one and a prefix of the rest survive.
fn recovers(truth: &Truth, number: usize, disk: &SimulatedDisk) {
    let mut truth = truth.clone();
    let acks = Arc::new(std::sync::Mutex::new(vec![(number, Ok(()))]));
    truth.collect_results(&acks, true, false);
    disk.crash(Crash::LoseAll);
    let manual = ManualWal::open(Arc::new(disk.reopen()), options()).unwrap();
    truth.recover(&manual.wal, &manual.recovered);
}

fn entry_of(id: LogId, payload: usize) -> Entry {
    entry(id, 1 + id.index % 2, 20, payload)
}

fn id(term: u64, index: u64) -> LogId {
    LogId { term, index }
}

/// Payload size with which the third entry needs another segment.
const LARGE: usize = 20_000;

/// Three threads: appends, truncations and votes; applies, purges and trims; reads.
fn concurrent_calls() {
    let log = RunningLog::begin();
    log.truth.lock().unwrap().checkpoint_open = Some((id(1, 2), Bytes::from_static(b"state")));
    let (first, appended) = (Arc::new((Mutex::new(Vec::new()), Condvar::new())), log.clone());
    let numbers = Arc::clone(&first);
    let appender = thread::spawn(move || {
        for index in 0..4 {
            let number = appended.append(id(1, index), LARGE);
            numbers.0.lock().unwrap().push(number);
            numbers.1.notify_all();
        }
        appended.append(id(1, 4), 100);
        appended.append(id(1, 5), LARGE);
        appended.queue(QueuedOp::Vote(Bytes::from_static(b"term 2")));
        appended.queue(QueuedOp::Truncate(Some(3)));
        appended.append(id(2, 4), 300);
        let vote = appended.queue(QueuedOp::Vote(Bytes::from_static(b"term 3")));
        assert!(appended.wait(vote));
    });
    let applied = log.clone();
    let applier = thread::spawn(move || {
        for index in 0..4 {
            let number = {
                let mut numbers = first.0.lock().unwrap();
                while numbers.len() <= index {
                    numbers = first.1.wait(numbers).unwrap();
                }
                numbers[index]
            };
            assert!(applied.wait(number));
            applied.place(index as u64);
        }
        applied.wal.checkpoint(id(1, 2), Bytes::from_static(b"state")).unwrap();
        let purge = applied.queue(QueuedOp::Purge(id(1, 1)));
        applied.wal.trim(1, 1);
        applied.wal.trim(2, 1);
        assert!(applied.wait(purge));
    });
    let read = log.clone();
    let reader = thread::spawn(move || {
        for index in 0..4 {
            match read.wal.read(index..index + 1, usize::MAX, ReadMode::Blocking) {
                Ok(found) => {
                    for found in found.unwrap() {
                        assert!(
                            same_entry(&found, &entry_of(id(1, index), LARGE)),
                            "entry {index}"
                        );
                    }
                }
                Err(Error::Trimmed { .. } | Error::Beyond { .. }) => {}
                Err(error) => panic!("read {index}: {error}"),
            }
        }
    });
    for thread in [appender, applier, reader] {
        thread.join().unwrap();
    }
    log.end(false);
}

/// Closes the log during calls: each completes as durable or as failed.
fn closing() {
    let log = RunningLog::begin();
    let appended = log.clone();
    let appender = thread::spawn(move || {
        for index in 0..3 {
            let size = if index == 1 { LARGE } else { 10 };
            appended.append(id(1, index), size);
            appended.queue(QueuedOp::Vote(Bytes::from(index.to_string())));
        }
    });
    log.wal.close();
    appender.join().unwrap();
    log.end(true);
}

/// The writer wakes for the first request and for each request that arrives while it goes to
/// sleep. The last group gets its sync marker without further requests.
fn one_by_one() {
    let log = RunningLog::begin();
    for index in 0..3 {
        let number = log.append(id(1, index), 10);
        assert!(log.wait(number));
    }
    log.end(false);
}

/// Replaces an entry repeatedly while it is written: readers get one of the versions, complete.
fn replaced() {
    let log = RunningLog::begin();
    let size = |term: u64| 100 * term as usize;
    let appended = log.clone();
    let appender = thread::spawn(move || {
        appended.append(id(1, 0), 10);
        for term in 1..4 {
            appended.append(id(term, 1), size(term));
            appended.queue(QueuedOp::Truncate(Some(0)));
        }
        let last = appended.append(id(4, 1), size(4));
        assert!(appended.wait(last));
    });
    let read = log.clone();
    let reader = thread::spawn(move || {
        for _ in 0..6 {
            match read.wal.read(1..2, usize::MAX, ReadMode::Blocking) {
                Ok(found) => {
                    for found in found.unwrap() {
                        assert!(
                            same_entry(&found, &entry_of(found.id, size(found.id.term))),
                            "{found:?}"
                        );
                    }
                }
                Err(Error::Beyond { .. }) => {}
                Err(error) => panic!("read: {error}"),
            }
        }
    });
    for thread in [appender, reader] {
        thread.join().unwrap();
    }
    log.end(false);
}

/// Frees a segment and reuses its file during a read.
fn recycled() {
    let log = RunningLog::begin();
    log.truth.lock().unwrap().checkpoint_open = Some((id(1, 2), Bytes::from_static(b"state")));
    for index in 0..3 {
        let number = log.append(id(1, index), LARGE);
        assert!(log.wait(number));
        log.place(index);
    }
    log.wal.checkpoint(id(1, 2), Bytes::from_static(b"state")).unwrap();
    let read = log.clone();
    let reader = thread::spawn(move || {
        for index in 0..2 {
            match read.wal.read(index..index + 1, usize::MAX, ReadMode::Blocking) {
                Ok(found) => {
                    assert!(same_entry(&found.unwrap()[0], &entry_of(id(1, index), LARGE)))
                }
                Err(Error::Trimmed { .. }) => {}
                Err(error) => panic!("read {index}: {error}"),
            }
        }
    });
    let purge = log.queue(QueuedOp::Purge(id(1, 1)));
    log.wal.trim(1, 1);
    log.wal.trim(2, 1);
    assert!(log.wait(purge));
    for index in 3..7 {
        let number = log.append(id(1, index), LARGE);
        assert!(log.wait(number));
    }
    reader.join().unwrap();
    log.end(false);
}

fn iterations() -> usize {
    std::env::var("HELIX_ROUNDS").map_or(1, |text| text.parse::<usize>().expect("a number")) * 1000
}

/// Tries random orders, and orders with few thread switches, which are rare among random ones.
fn try_orders(scenario: fn()) {
    let count = OrdersOnPanic::default();
    let tried = Arc::clone(&count.0);
    let counted = move || {
        tried.fetch_add(1, Ordering::Relaxed);
        scenario();
    };
    shuttle::check_random(counted.clone(), iterations());
    shuttle::check_pct(counted, iterations(), 3);
}

/// Guard that prints the number of orders tried if the test fails.
#[derive(Default)]
struct OrdersOnPanic(Arc<AtomicU64>);

impl Drop for OrdersOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let tried = self.0.load(Ordering::Relaxed);
            eprintln!("order {tried} failed, of {} of each kind", iterations());
        }
    }
}

#[test]
fn concurrent_callers_writer_and_keeper_agree() {
    try_orders(concurrent_calls);
}

#[test]
fn close_completes_every_call() {
    try_orders(closing);
}

#[test]
fn no_wake_up_is_lost() {
    try_orders(one_by_one);
}

#[test]
fn replaced_entry_is_read_whole() {
    try_orders(replaced);
}

#[test]
fn file_is_not_reused_during_a_read() {
    try_orders(recycled);
}
