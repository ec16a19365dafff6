//! The log's threads under a scheduler that tries orders of their steps: callers, writer and keeper
//! meet at the locks of `src/sync.rs`, and at each of them another one may go on. Built only with
//! `--cfg shuttle`: `just interleavings`. A wait never times out there, so a lost wake-up is a
//! deadlock, which the scheduler reports with a schedule to run again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use helix_wal::storage::{Crash, SimulatedDisk};
use helix_wal::{DurableCallback, Entry, Error, LogId, Options, Placement, ReadMode, Wal};
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::thread;

use crate::common::{ManualWal, entry, same_entry, small_options};
use crate::truth::{QueuedOp, Truth};

/// What a callback said, and the disk as it was then.
struct Completion {
    number: usize,
    result: Result<(), Error>,
    disk: SimulatedDisk,
}

/// A log with its threads, and what was asked of it and answered.
#[derive(Clone)]
struct RunningLog {
    wal: Wal,
    disk: SimulatedDisk,
    /// Locked across a call, so that calls have one order.
    truth: Arc<Mutex<Truth>>,
    told: Arc<(Mutex<Vec<Completion>>, Condvar)>,
}

fn options() -> Options {
    // A few looks at the clock.
    let idle_poll = Duration::from_millis(3);
    Options { tail_bytes: 0, compaction_bytes_per_second: 0, idle_poll, ..small_options() }
}

impl RunningLog {
    fn begin() -> Self {
        let disk = SimulatedDisk::new(1);
        let (wal, writer, keeper, _) = Wal::open(Arc::new(disk.clone()), options()).unwrap();
        // A millisecond goes by with every look at the clock.
        let ticks = AtomicU64::new(0);
        let clock = move || Duration::from_millis(ticks.fetch_add(1, Ordering::Relaxed));
        wal.set_clock(Box::new(clock));
        writer.spawn().unwrap();
        keeper.spawn().unwrap();
        Self { wal, disk, truth: Arc::default(), told: Arc::default() }
    }

    fn done(&self, number: usize) -> DurableCallback {
        let (told, disk) = (Arc::clone(&self.told), self.disk.clone());
        Box::new(move |result| {
            let disk = disk.fork();
            told.0.lock().unwrap().push(Completion { number, result, disk });
            told.1.notify_all();
        })
    }

    /// Calls that are one operation; its number.
    fn ask(&self, op: QueuedOp) -> usize {
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
        self.ask(QueuedOp::Append(made(id, payload)))
    }

    /// Waits for the outcome of an operation; whether it is durable.
    fn wait(&self, number: usize) -> bool {
        let mut told = self.told.0.lock().unwrap();
        loop {
            if let Some(told) = told.iter().find(|told| told.number == number) {
                return told.result.is_ok();
            }
            told = self.told.1.wait(told).unwrap();
        }
    }

    /// Applies an entry of the first term. What is applied is committed.
    fn place(&self, index: u64) {
        self.truth.lock().unwrap().committed.insert(index, id(1, index));
        let (stream, first) = (1 + index % 2, index / 2);
        let placement = Placement { stream, first, count: 1, time: index };
        self.wal.place(index, Some(placement)).unwrap();
    }

    /// Closes, and holds what was told against what is on the disk, then and at the end.
    fn end(self, may_close: bool) {
        self.wal.close();
        let Self { wal, disk, truth, told } = self;
        drop(wal);
        let truth = truth.lock().unwrap().clone();
        let told = std::mem::take(&mut *told.0.lock().unwrap());
        let mut numbers: Vec<usize> = told.iter().map(|told| told.number).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (1..=truth.calls).collect::<Vec<_>>(), "each callback runs once");
        for Completion { result, .. } in &told {
            let closed = may_close && matches!(result, Err(Error::Closed));
            assert!(result.is_ok() || closed, "{result:?}");
        }
        let durable = told.iter().filter(|told| told.result.is_ok());
        for told in durable.clone() {
            recovers(&truth, told.number, &told.disk);
        }
        let last = durable.map(|told| told.number).max().unwrap_or(0);
        recovers(&truth, last, &disk);
    }
}

/// Power goes: all up to this operation is there, and of the rest a first part.
fn recovers(truth: &Truth, number: usize, disk: &SimulatedDisk) {
    let mut truth = truth.clone();
    let acks = Arc::new(std::sync::Mutex::new(vec![(number, Ok(()))]));
    truth.collect_results(&acks, true, false);
    disk.crash(Crash::LoseAll);
    let manual = ManualWal::open(Arc::new(disk.reopen()), options()).unwrap();
    truth.recover(&manual.wal, &manual.recovered);
}

fn made(id: LogId, payload: usize) -> Entry {
    entry(id, 1 + id.index % 2, 20, payload)
}

fn id(term: u64, index: u64) -> LogId {
    LogId { term, index }
}

/// Large enough that the third one needs another segment.
const LARGE: usize = 20_000;

/// One who appends, truncates and votes, one who applies, purges and trims, one who reads.
fn at_once() {
    let life = RunningLog::begin();
    life.truth.lock().unwrap().checkpoint_open = Some((id(1, 2), Bytes::from_static(b"state")));
    let (first, appended) = (Arc::new((Mutex::new(Vec::new()), Condvar::new())), life.clone());
    let numbers = Arc::clone(&first);
    let appender = thread::spawn(move || {
        for index in 0..4 {
            let number = appended.append(id(1, index), LARGE);
            numbers.0.lock().unwrap().push(number);
            numbers.1.notify_all();
        }
        appended.append(id(1, 4), 100);
        appended.append(id(1, 5), LARGE);
        appended.ask(QueuedOp::Vote(Bytes::from_static(b"term 2")));
        appended.ask(QueuedOp::Truncate(Some(3)));
        appended.append(id(2, 4), 300);
        let vote = appended.ask(QueuedOp::Vote(Bytes::from_static(b"term 3")));
        assert!(appended.wait(vote));
    });
    let applied = life.clone();
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
        let purge = applied.ask(QueuedOp::Purge(id(1, 1)));
        applied.wal.trim(1, 1);
        applied.wal.trim(2, 1);
        assert!(applied.wait(purge));
    });
    let read = life.clone();
    let reader = thread::spawn(move || {
        for index in 0..4 {
            match read.wal.read(index..index + 1, usize::MAX, ReadMode::Blocking) {
                Ok(found) => {
                    for found in found.unwrap() {
                        assert!(same_entry(&found, &made(id(1, index), LARGE)), "entry {index}");
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
    life.end(false);
}

/// The log is closed while calls come: each is told that it is durable, or that it never will be.
fn closing() {
    let life = RunningLog::begin();
    let appended = life.clone();
    let appender = thread::spawn(move || {
        for index in 0..3 {
            let size = if index == 1 { LARGE } else { 10 };
            appended.append(id(1, index), size);
            appended.ask(QueuedOp::Vote(Bytes::from(index.to_string())));
        }
    });
    life.wal.close();
    appender.join().unwrap();
    life.end(true);
}

/// The last group gets its mark although nobody asks for anything any more: the writer is woken
/// for the first request of all, and for each that comes while it goes to sleep.
fn one_by_one() {
    let life = RunningLog::begin();
    for index in 0..3 {
        let number = life.append(id(1, index), 10);
        assert!(life.wait(number));
    }
    life.end(false);
}

/// An entry is replaced, again and again, while it is written: whoever reads it gets one of them,
/// whole.
fn replaced() {
    let life = RunningLog::begin();
    let size = |term: u64| 100 * term as usize;
    let appended = life.clone();
    let appender = thread::spawn(move || {
        appended.append(id(1, 0), 10);
        for term in 1..4 {
            appended.append(id(term, 1), size(term));
            appended.ask(QueuedOp::Truncate(Some(0)));
        }
        let last = appended.append(id(4, 1), size(4));
        assert!(appended.wait(last));
    });
    let read = life.clone();
    let reader = thread::spawn(move || {
        for _ in 0..6 {
            match read.wal.read(1..2, usize::MAX, ReadMode::Blocking) {
                Ok(found) => {
                    for found in found.unwrap() {
                        assert!(same_entry(&found, &made(found.id, size(found.id.term))), "{found:?}");
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
    life.end(false);
}

/// A segment is freed and its file used again while somebody reads from it.
fn recycled() {
    let life = RunningLog::begin();
    life.truth.lock().unwrap().checkpoint_open = Some((id(1, 2), Bytes::from_static(b"state")));
    for index in 0..3 {
        let number = life.append(id(1, index), LARGE);
        assert!(life.wait(number));
        life.place(index);
    }
    life.wal.checkpoint(id(1, 2), Bytes::from_static(b"state")).unwrap();
    let read = life.clone();
    let reader = thread::spawn(move || {
        for index in 0..2 {
            match read.wal.read(index..index + 1, usize::MAX, ReadMode::Blocking) {
                Ok(found) => assert!(same_entry(&found.unwrap()[0], &made(id(1, index), LARGE))),
                Err(Error::Trimmed { .. }) => {}
                Err(error) => panic!("read {index}: {error}"),
            }
        }
    });
    let purge = life.ask(QueuedOp::Purge(id(1, 1)));
    life.wal.trim(1, 1);
    life.wal.trim(2, 1);
    assert!(life.wait(purge));
    for index in 3..7 {
        let number = life.append(id(1, index), LARGE);
        assert!(life.wait(number));
    }
    reader.join().unwrap();
    life.end(false);
}

fn iterations() -> usize {
    std::env::var("HELIX_ROUNDS").map_or(1, |text| text.parse::<usize>().expect("a number")) * 1000
}

/// Random orders, and orders with few changes of who goes on: what needs exactly those is rare
/// among the first.
fn try_orders(life: fn()) {
    let count = OrdersOnPanic::default();
    let tried = Arc::clone(&count.0);
    let counted = move || {
        tried.fetch_add(1, Ordering::Relaxed);
        life();
    };
    shuttle::check_random(counted.clone(), iterations());
    shuttle::check_pct(counted, iterations(), 3);
}

/// Says how many orders it took, if the test fails: random ones first, then those with few changes.
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
fn callers_writer_and_keeper_at_once() {
    try_orders(at_once);
}

#[test]
fn closing_tells_everybody() {
    try_orders(closing);
}

#[test]
fn no_wake_up_is_lost() {
    try_orders(one_by_one);
}

#[test]
fn an_entry_that_is_replaced_is_read_whole() {
    try_orders(replaced);
}

#[test]
fn no_file_is_used_again_under_a_reader() {
    try_orders(recycled);
}
