//! Tests of the whole log on a simulated disk, stepped by hand.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod inspection;
mod preparation;

use std::sync::Mutex;

use super::*;
use crate::files::open_segment::read_trailer;
use crate::storage::{Crash, Fault, Operation, SimulatedDisk};
use crate::types::{NextStep, Payload};

/// A log with a writer and a keeper that the test steps.
struct Driven {
    disk: SimulatedDisk,
    wal: Wal,
    writer: Writer,
    keeper: Keeper,
    recovered: Recovered,
    now: Duration,
}

fn small() -> Options {
    Options {
        segment_bytes: 64 << 10,
        group_bytes: 16 << 10,
        tail_bytes: 16 << 10,
        reserve_bytes: 0,
        identity: Bytes::from_static(b"test"),
        ..Options::default()
    }
}

impl Driven {
    fn open(disk: &SimulatedDisk, options: Options) -> Self {
        let storage = Arc::new(disk.clone());
        let (wal, writer, keeper, recovered) = Wal::open(storage, options).unwrap();
        Self { disk: disk.clone(), wal, writer, keeper, recovered, now: Duration::ZERO }
    }

    fn new() -> Self {
        Self::open(&SimulatedDisk::new(1), small())
    }

    /// Steps the writer and the keeper until neither has immediate work.
    fn run(&mut self) {
        for _ in 0..10_000 {
            let writer = self.writer.step(self.now);
            let keeper = self.keeper.step(self.now);
            if writer != NextStep::Now && keeper != NextStep::Now {
                return;
            }
        }
        panic!("never comes to rest");
    }

    /// Advances the clock until sync markers are written and pauses are over.
    fn rest(&mut self) {
        for _ in 0..300 {
            self.now += Duration::from_millis(100);
            self.run();
        }
    }

    fn append(&mut self, entries: Vec<Entry>) -> Result<(), Error> {
        let result = outcome(|done| self.wal.append(entries, done), || {});
        self.run();
        result.lock().unwrap().take().expect("the callback has run")
    }

    fn checked(&mut self, call: impl FnOnce(&Wal, DurableCallback)) -> Result<(), Error> {
        let result = outcome(|done| call(&self.wal, done), || {});
        self.run();
        result.lock().unwrap().take().expect("the callback has run")
    }

    fn fill(&mut self, indexes: Range<u64>) {
        for index in indexes {
            self.append(vec![entry(1, index)]).unwrap();
        }
    }

    fn place(&self, indexes: Range<u64>) {
        for index in indexes {
            self.wal.place(index, placement(index)).unwrap();
        }
    }

    fn reopen(self, crash: Crash<'_>) -> Self {
        let Self { disk, wal, writer, keeper, .. } = self;
        disk.crash(crash);
        drop((wal, writer, keeper));
        Self::open(&disk.reopen(), small())
    }

    fn check_log(&self, indexes: Range<u64>) {
        let mut next = indexes.start;
        while next < indexes.end {
            // Alternates, so that each mode reads what the other one brought into memory.
            let mode = if next.is_multiple_of(2) { ReadMode::Blocking } else { ReadMode::Direct };
            let entries = self.wal.read(next..indexes.end, 8 << 10, mode).unwrap().unwrap();
            assert!(!entries.is_empty(), "entry {next} is missing");
            for found in entries {
                let expected = entry(found.id.term, next);
                assert_eq!(found.id.index, next);
                assert_eq!(found.payload.bytes, expected.payload.bytes);
                assert_eq!(found.head, expected.head);
                next += 1;
            }
        }
        let mut next = indexes.start;
        while next < indexes.end {
            let heads = self.wal.heads(next..indexes.end, 7, ReadMode::Blocking).unwrap().unwrap();
            assert!(!heads.is_empty());
            for found in heads {
                assert_eq!(found.id.index, next);
                assert_eq!(found.head, entry(1, next).head);
                assert_eq!(found.payload.crc, entry(1, next).payload.crc);
                assert!(found.payload.bytes.is_empty());
                let id = self.wal.log_id(next, ReadMode::Blocking).unwrap().unwrap();
                assert_eq!(id, Some(found.id));
                next += 1;
            }
        }
    }

    /// Reads both streams from their trims on and compares them with the placements.
    fn check_streams(&self, indexes: Range<u64>, from: Range<u64>) {
        for stream in 1..3 {
            let mut position = from.start;
            let expected = indexes
                .clone()
                .filter_map(|i| placement(i).map(|p| (i, p)))
                .filter(|(_, p)| p.stream == stream && p.first + 2 > from.start);
            for (index, p) in expected {
                let found = self.wal.read_stream(stream, position, u64::MAX, 1, ReadMode::Blocking);
                let found = found.unwrap().unwrap();
                assert_eq!(found.len(), 1, "stream {stream} position {position}");
                assert_eq!((found[0].id.index, found[0].placement), (index, p));
                assert_eq!(found[0].payload.bytes, entry(1, index).payload.bytes);
                assert_eq!(
                    self.wal.search_time(stream, p.time, ReadMode::Blocking).unwrap(),
                    Some(Some(p.first.max(from.start)))
                );
                position = p.first + 2;
            }
            let end = self.wal.read_stream(stream, position, u64::MAX, 1, ReadMode::Blocking);
            assert_eq!(end.unwrap().unwrap().len(), 0);
        }
    }
}

fn outcome(
    call: impl FnOnce(DurableCallback),
    after: impl FnOnce(),
) -> Arc<Mutex<Option<Result<(), Error>>>> {
    let result = Arc::new(Mutex::new(None));
    let told = Arc::clone(&result);
    call(Box::new(move |outcome| {
        assert!(told.lock().unwrap().replace(outcome).is_none(), "told twice");
    }));
    after();
    result
}

fn entry(term: u64, index: u64) -> Entry {
    let bytes = Bytes::from(vec![index as u8; 500 + (index as usize * 131) % 2500]);
    let crc = crate::format::frame::payload_crc(&bytes, 42);
    Entry {
        id: LogId { term, index },
        stream: 1 + index % 2,
        head: Bytes::from(format!("head {index}")),
        payload: Payload { bytes, crc, crc_seed: 42 },
    }
}

/// Every fifth entry is void. The others take two positions of one of two streams.
fn placement(index: u64) -> Option<Placement> {
    let stream = 1 + index % 2;
    let before = (0..index).filter(|i| i % 5 != 4 && 1 + i % 2 == stream).count() as u64;
    let place = Placement { stream, first: before * 2, count: 2, time: 1000 + index };
    (index % 5 != 4).then_some(place)
}

#[test]
fn reads_entries_before_and_after_restart() {
    let mut log = Driven::new();
    assert!(log.recovered.created);
    log.fill(0..20);
    log.check_log(0..20);
    assert_eq!(log.wal.state().synced, Some(LogId { term: 1, index: 19 }));
    for crash in [Crash::LoseAll, Crash::KeepAll, Crash::Seeded(7)] {
        log = log.reopen(crash);
        assert!(!log.recovered.created);
        assert_eq!(log.recovered.state.last, Some(LogId { term: 1, index: 19 }));
        log.check_log(0..20);
    }
    log.fill(20..30);
    log = log.reopen(Crash::LoseAll);
    log.check_log(0..30);
}

#[test]
fn seals_recovers_frees_and_recycles_segments() {
    let mut log = Driven::new();
    for index in 0..300 {
        log.append(vec![entry(1, index)]).unwrap();
        log.wal.place(index, placement(index)).unwrap();
    }
    log.rest();
    assert!(log.wal.stats().segments > 5);
    let rows = log.wal.stream_rows(1);
    assert!(rows.iter().filter(|row| row.sealed).count() >= rows.len() - 1);
    assert!(log.wal.read(0..300, 8 << 10, ReadMode::MemoryOnly).unwrap().is_none());
    assert!(log.wal.read(299..300, 8 << 10, ReadMode::MemoryOnly).unwrap().is_some());
    log.check_log(0..300);
    log.check_streams(0..300, 0..1);

    log.wal.checkpoint(LogId { term: 1, index: 250 }, Bytes::from_static(b"state")).unwrap();
    log = log.reopen(Crash::LoseAll);
    let (at, state) = log.recovered.checkpoint.clone().unwrap();
    assert_eq!((at.index, &state[..]), (250, &b"state"[..]));
    log.place(251..300);
    log.check_log(0..300);
    log.check_streams(0..300, 0..1);

    log.checked(|wal, done| wal.purge(LogId { term: 1, index: 240 }, done)).unwrap();
    assert!(matches!(log.wal.read(240..250, 1, ReadMode::Blocking), Err(Error::Trimmed { .. })));
    log.check_log(241..300);
    log.check_streams(0..300, 0..1);
    let before = log.wal.stats().segments;
    log.wal.trim(1, 100);
    log.wal.trim(2, 100);
    log.rest();
    let after = log.wal.stats().segments;
    assert!(after < before, "{after} of {before} segments");
    let stats = log.wal.stats();
    assert_eq!(stats.freed_segments, before - after);
    assert!(stats.freed_bytes >= stats.freed_segments * 4096);
    assert_eq!(stats.sync_counts.iter().sum::<u64>(), stats.syncs);
    assert_eq!((stats.queued_requests, stats.queued_bytes), (0, 0));
    log.check_streams(0..300, 100..101);
    assert!(matches!(
        log.wal.read_stream(1, 99, 200, 1, ReadMode::Blocking),
        Err(Error::Trimmed { asked: 99, first: 100 })
    ));
    log.wal.drop_stream(2);
    log = log.reopen(Crash::LoseAll);
    assert_eq!(log.wal.stats().segments, after);
    assert_eq!(log.wal.state().purged, Some(LogId { term: 1, index: 240 }));
    log.check_log(241..300);
}

/// A slow reader or scrub never mistakes a freed segment for a damaged one.
#[test]
fn freed_segment_stays_readable_for_its_readers() {
    let mut log = Driven::new();
    log.fill(0..300);
    log.place(0..300);
    log.rest();
    let held = log.wal.shared.lock().log.chain.values().next().unwrap().segment.clone().unwrap();
    assert!(log.disk.files().contains(&held.name()));
    let at = LogId { term: 1, index: 250 };
    log.wal.checkpoint(at, Bytes::from_static(b"state")).unwrap();
    log.checked(|wal, done| wal.purge(at, done)).unwrap();
    log.wal.trim(1, 100);
    log.wal.trim(2, 100);
    // Longer than any wait for readers.
    log.rest();
    assert!(!log.disk.files().contains(&held.name()), "its space is not kept for them");
    let trailer = read_trailer(&held).unwrap();
    assert_eq!(trailer.as_ref(), held.trailer());
    held.read_device(&mut [0; 4096], 0).unwrap();
}

#[test]
fn vote_and_truncation_survive_restart() {
    let mut log = Driven::new();
    log.fill(0..10);
    log.checked(|wal, done| wal.save_vote(Bytes::from_static(b"vote 2"), done)).unwrap();
    log.checked(|wal, done| wal.truncate_after(Some(4), done)).unwrap();
    log.append(vec![entry(2, 5), entry(2, 6)]).unwrap();
    for _ in 0..3 {
        assert_eq!(log.wal.state().vote.as_deref(), Some(&b"vote 2"[..]));
        assert_eq!(log.wal.state().last, Some(LogId { term: 2, index: 6 }));
        log.check_log(0..7);
        let id = log.wal.log_id(5, ReadMode::Blocking).unwrap().unwrap();
        assert_eq!(id, Some(LogId { term: 2, index: 5 }));
        log = log.reopen(Crash::LoseAll);
    }
    log.checked(|wal, done| wal.truncate_after(None, done)).unwrap();
    log = log.reopen(Crash::LoseAll);
    assert_eq!(log.wal.state().last, None);
    log.append(vec![entry(3, 0)]).unwrap();
}

#[test]
fn purge_beyond_end_survives_restart_with_streams() {
    let mut log = Driven::new();
    log.fill(0..10);
    log.place(0..10);
    let at = LogId { term: 4, index: 99 };
    log.wal.checkpoint(at, Bytes::new()).unwrap();
    log.checked(|wal, done| wal.purge(at, done)).unwrap();
    for round in 0..3 {
        assert_eq!(log.wal.state().last, Some(at).filter(|_| round == 0).or(log.wal.state().last));
        log.check_streams(0..10, 0..1);
        log.append(vec![entry(5, 100 + round)]).unwrap();
        log.check_log(100..101 + round);
        log = log.reopen(Crash::LoseAll);
    }
    assert_eq!(log.wal.state().purged, Some(at));
    assert_eq!(log.wal.state().last, Some(LogId { term: 5, index: 102 }));
}

#[test]
fn reports_damage_before_a_sync_marker() {
    let mut log = Driven::new();
    log.fill(0..5);
    log.rest();
    let file = log.disk.files().into_iter().find(|name| name.ends_with(".seg")).unwrap();
    log.disk.flip_bit(&file, (4096 + 300) * 8);
    log.disk.crash(Crash::LoseAll);
    let Driven { disk, wal, writer, keeper, .. } = log;
    drop((wal, writer, keeper));
    let error = Wal::open(Arc::new(disk.reopen()), small()).unwrap_err();
    assert!(
        matches!(&error, Error::Damaged { file: f, bytes, .. } if *f == file
        && bytes.contains(&(4096 + 300))),
        "{error}"
    );
}

#[test]
fn failed_sync_poisons_once_and_fails_all_requests() {
    let mut log = Driven::new();
    log.fill(0..3);
    let reports = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&reports);
    log.wal.on_poisoned(Box::new(move |_| *counted.lock().unwrap() += 1));
    log.disk.fail(Fault::next(Operation::Sync));
    let first = outcome(|done| log.wal.append(vec![entry(1, 3)], done), || {});
    let second = outcome(|done| log.wal.save_vote(Bytes::new(), done), || {});
    assert_eq!(log.writer.step(Duration::ZERO), NextStep::Done);
    for result in [first, second] {
        let result = result.lock().unwrap().take().unwrap();
        assert!(matches!(result, Err(Error::Poisoned { operation: "sync", .. })));
    }
    assert!(matches!(log.append(vec![entry(1, 4)]), Err(Error::Poisoned { .. })));
    assert!(matches!(log.wal.writable(), Err(Error::Poisoned { .. })));
    assert_eq!(*reports.lock().unwrap(), 1);
    let log = log.reopen(Crash::LoseAll);
    log.check_log(0..3);
}

#[test]
fn full_disk_refuses_appends_accepts_votes_and_recovers() {
    let mut log = Driven::new();
    log.rest();
    log.disk.set_free_bytes(Some(0));
    let mut next = 0;
    let error = loop {
        match log.append(vec![entry(1, next), entry(1, next + 1)]) {
            Ok(()) => next += 2,
            Err(error) => break error,
        }
        assert!(next < 1000);
    };
    assert!(matches!(error, Error::DiskFull { .. }), "{error}");
    assert!(matches!(log.wal.writable(), Err(Error::DiskFull { .. })));
    assert_eq!(log.wal.state().last.map(|id| id.index + 1), Some(next));
    log.checked(|wal, done| wal.save_vote(Bytes::from_static(b"v"), done)).unwrap();
    log.check_log(0..next);
    log.disk.set_free_bytes(None);
    log.rest();
    log.wal.writable().unwrap();
    log.append(vec![entry(1, next)]).unwrap();
    let log = log.reopen(Crash::LoseAll);
    log.check_log(0..next + 1);
    assert_eq!(log.wal.state().vote.as_deref(), Some(&b"v"[..]));
}

#[test]
fn append_larger_than_segment_is_split() {
    let mut log = Driven::new();
    log.rest();
    log.append((0..100).map(|index| entry(1, index)).collect()).unwrap();
    log.check_log(0..100);
    let log = log.reopen(Crash::LoseAll);
    log.check_log(0..100);
}

#[test]
fn callbacks_run_newest_first_and_close_finishes_queue() {
    let mut log = Driven::new();
    let order = Arc::new(Mutex::new(Vec::new()));
    for index in 0..3 {
        let order = Arc::clone(&order);
        let done = Box::new(move |_| order.lock().unwrap().push(index));
        log.wal.append(vec![entry(1, index)], done);
    }
    log.wal.close();
    log.run();
    assert_eq!(*order.lock().unwrap(), [2, 1, 0]);
    assert!(matches!(log.append(vec![entry(1, 3)]), Err(Error::Closed)));
    // The directory is unlocked again.
    let log = Driven::open(&log.disk, small());
    assert_eq!(log.recovered.torn_bytes, 0);
    log.check_log(0..3);
}

#[test]
fn dropped_writer_fails_waiting_requests() {
    let log = Driven::new();
    let result = outcome(|done| log.wal.append(vec![entry(1, 0)], done), || {});
    let Driven { wal, writer, .. } = log;
    drop(writer);
    assert!(matches!(*result.lock().unwrap(), Some(Err(Error::Closed))));
    let result = outcome(|done| wal.append(vec![entry(1, 1)], done), || {});
    assert!(matches!(*result.lock().unwrap(), Some(Err(Error::Closed))));
}

#[test]
fn directory_has_one_owner_and_one_identity() {
    let log = Driven::new();
    let again = Wal::open(Arc::new(log.disk.clone()), small());
    assert!(matches!(again, Err(Error::Unusable(_))));
    let disk = log.disk.clone();
    drop(log);
    let other = Options { identity: Bytes::from_static(b"other"), ..small() };
    assert!(matches!(Wal::open(Arc::new(disk.clone()), other), Err(Error::Unusable(_))));
    let any = Options { identity: Bytes::new(), ..small() };
    let (_, _, _, recovered) = Wal::open(Arc::new(disk), any).unwrap();
    assert_eq!(&recovered.identity[..], b"test");
}

#[test]
fn lost_state_file_is_an_error() {
    let mut log = Driven::new();
    log.fill(0..3);
    let disk = log.disk.clone();
    drop(log);
    disk.remove_file("state");
    assert!(matches!(Wal::open(Arc::new(disk), small()), Err(Error::Damaged { .. })));
}

#[test]
fn placements_below_checkpoint_survive_restart() {
    let mut log = Driven::new();
    log.fill(0..30);
    log.place(0..30);
    log.wal.checkpoint(LogId { term: 1, index: 25 }, Bytes::from_static(b"x")).unwrap();
    for _ in 0..2 {
        log = log.reopen(Crash::LoseAll);
        log.check_streams(0..26, 0..1);
    }
    log.place(26..30);
    log.check_streams(0..30, 0..1);
}

#[test]
fn rejects_placement_that_disagrees_with_footer() {
    let mut log = Driven::new();
    log.fill(0..100);
    log.place(0..100);
    log.rest();
    let log = log.reopen(Crash::LoseAll);
    log.place(0..10);
    let wrong = Placement { stream: 2, first: 999, count: 2, time: 1 };
    assert!(matches!(log.wal.place(10, Some(wrong)), Err(Error::Damaged { .. })));
    log.place(10..100);
}

#[test]
fn memory_log_works_without_a_disk() {
    let wal = Wal::open_memory(small());
    for index in 0..300 {
        let result = outcome(|done| wal.append(vec![entry(1, index)], done), || {});
        assert!(matches!(*result.lock().unwrap(), Some(Ok(()))));
        wal.place(index, placement(index)).unwrap();
    }
    let entries = wal.read(10..12, 1 << 20, ReadMode::CachedOnly).unwrap().unwrap();
    assert_eq!(entries.len(), 2);
    let rows = wal.stream_rows(1);
    assert!(rows.len() > 5 && rows[0].sealed && !rows.last().unwrap().sealed);
    wal.purge(LogId { term: 1, index: 299 }, Box::new(|r| r.unwrap()));
    wal.trim(1, 200);
    wal.trim(2, 200);
    assert!(wal.stream_rows(1)[0].next > 200);
    let found = wal.read_stream(1, 200, 300, 1, ReadMode::CachedOnly).unwrap().unwrap();
    assert_eq!(found[0].placement.first, 200);
    wal.drop_stream(1);
    wal.drop_stream(2);
    assert_eq!(wal.stats().segments, 1);
    wal.append(vec![entry(1, 300)], Box::new(|r| r.unwrap()));
}

#[test]
fn threads_work_on_a_real_directory() {
    let directory = tempfile::tempdir().unwrap();
    let open = || {
        let storage = Arc::new(crate::storage::DirStorage::open(directory.path()).unwrap());
        let (wal, writer, keeper, recovered) = Wal::open(storage, small()).unwrap();
        writer.spawn().unwrap();
        keeper.spawn().unwrap();
        (wal, recovered)
    };
    let (wal, _) = open();
    let (told, results) = std::sync::mpsc::channel();
    for index in 0..400 {
        let told = told.clone();
        wal.append(vec![entry(1, index)], Box::new(move |r| told.send(r).unwrap()));
        wal.place(index, placement(index)).unwrap();
    }
    for _ in 0..400 {
        results.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
    }
    wal.close();
    let (wal, recovered) = open();
    assert_eq!(recovered.state.last, Some(LogId { term: 1, index: 399 }));
    let entries = wal.read(0..400, usize::MAX, ReadMode::Blocking).unwrap().unwrap();
    assert_eq!(entries[0].id.index, 0);
    wal.close();
}
