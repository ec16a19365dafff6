//! Installation of a snapshot with records of another log: cold segments that become part of the
//! log when the state file names them. Also reads of the live entries that such a log needs.

use std::io::ErrorKind;
use std::sync::Arc;

use bytes::Bytes;
use helix_wal::storage::{CacheMode, Crash, Fault, Operation, SimulatedDisk};
use helix_wal::{
    ColdSegments, Entry, Error, LiveEntry, LogId, Options, Placement, ReadMode, SegmentState, Wal,
    inspect, verify,
};

use crate::common::{ManualWal, PrintOnPanic, TestRng, entry, seed, small_options};

const STATE: &[u8] = b"state of another replica";

/// A manually stepped log, or one in memory, with the end of each stream.
struct TestLog {
    wal: Wal,
    manual: Option<ManualWal>,
    next: [u64; 4],
    term: u64,
}

impl TestLog {
    fn on(disk: &SimulatedDisk) -> Self {
        let manual = ManualWal::open(Arc::new(disk.clone()), small_options()).unwrap();
        Self { wal: manual.wal.clone(), manual: Some(manual), next: [0; 4], term: 1 }
    }

    fn in_memory() -> Self {
        Self { wal: Wal::open_memory(small_options()), manual: None, next: [0; 4], term: 1 }
    }

    fn idle(&mut self) {
        if let Some(manual) = &mut self.manual {
            manual.idle();
            manual.idle();
        }
    }

    /// Appends entries of three interleaved streams and places them. Every fifth has no placement.
    fn fill(&mut self, sizes: &[usize]) {
        for size in sizes {
            let index = self.wal.state().last.map_or(1, |last| last.index + 1);
            let made = entry(LogId { term: self.term, index }, 1 + index % 3, 20, *size);
            self.wal.append(vec![made], Box::new(|result| result.unwrap()));
            if let Some(manual) = &mut self.manual {
                manual.settle();
            }
            let placement = (!index.is_multiple_of(5)).then(|| {
                let stream = 1 + index % 3;
                let first = self.next[stream as usize];
                self.next[stream as usize] += 2;
                Placement { stream, first, count: 2, time: index }
            });
            self.wal.place(index, placement).unwrap();
        }
    }

    fn checkpoint_and_purge(&mut self) {
        self.idle();
        let last = self.wal.state().last.unwrap();
        self.wal.checkpoint(last, Bytes::from_static(b"own")).unwrap();
        self.wal.purge(last, Box::new(|result| result.unwrap()));
        self.idle();
    }

    fn live(&self) -> Vec<LiveEntry> {
        let upto = self.wal.state().last.unwrap().index;
        read_live(&self.wal, 0, upto, 4000)
    }
}

/// Reads all live entries. Asserts that filtered reads return the same ones.
fn read_live(wal: &Wal, after: u64, upto: u64, bytes_max: usize) -> Vec<LiveEntry> {
    let all = read_live_of(wal, after, upto, bytes_max, &|_| true);
    for streams in [&[1][..], &[2, 3], &[]] {
        let wants = |stream: u64| streams.contains(&stream);
        let wanted = all.iter().filter(|live| wants(live.placement.stream));
        let wanted: Vec<_> = wanted.cloned().collect();
        assert_same(&read_live_of(wal, after, upto, bytes_max, &wants), &wanted);
        let bytes = wal.live_bytes_of(after, upto, &wants);
        assert!(wanted.is_empty() || bytes > 0, "{bytes} bytes of {streams:?}");
        assert!(!streams.is_empty() || bytes == 0, "{bytes}");
    }
    all
}

fn read_live_of(
    wal: &Wal,
    mut after: u64,
    upto: u64,
    bytes_max: usize,
    wants: &dyn Fn(u64) -> bool,
) -> Vec<LiveEntry> {
    let mut all = Vec::new();
    while after < upto {
        let found = wal.read_live_of(after, upto, bytes_max, wants).unwrap();
        assert!(found.upto > after && found.upto <= upto);
        after = found.upto;
        all.extend(found.entries);
    }
    all
}

fn assert_same(found: &[LiveEntry], wanted: &[LiveEntry]) {
    let ids = |all: &[LiveEntry]| all.iter().map(|live| live.id).collect::<Vec<_>>();
    assert_eq!(ids(found), ids(wanted));
    for (a, b) in found.iter().zip(wanted) {
        assert_eq!((a.placement, &a.head), (b.placement, &b.head));
        assert_eq!((&a.payload.bytes, a.payload.crc), (&b.payload.bytes, b.payload.crc));
    }
}

/// Asserts that reads by stream and by time return the same entries.
fn assert_streams(wal: &Wal, wanted: &[LiveEntry]) {
    for live in wanted {
        let Placement { stream, first, time, .. } = live.placement;
        // The first kept entry may start below the trim point.
        let at = first + 1;
        let got = wal.read_stream(stream, at, at + 1, 1, ReadMode::Blocking).unwrap().unwrap();
        assert_eq!((got.len(), got[0].id), (1, live.id), "{:?}", live.placement);
        assert_eq!(got[0].payload.bytes, live.payload.bytes);
        let found = wal.search_time(stream, time, ReadMode::Blocking).unwrap().unwrap();
        assert!(found == Some(first) || found == Some(at), "time {time} of {stream}");
    }
    for stream in 1..4 {
        let of = |live: &&LiveEntry| live.placement.stream == stream;
        let all: Vec<_> = wanted.iter().filter(of).collect();
        let Some(first) = all.first() else { continue };
        let mut position = first.placement.first + 1;
        let mut got = Vec::new();
        while got.len() < all.len() {
            let some = wal.read_stream(stream, position, u64::MAX, 2500, ReadMode::Blocking);
            let some = some.unwrap().unwrap();
            assert!(!some.is_empty(), "stream {stream} ends at {position}");
            position = some.last().map_or(0, |e| e.placement.first + 2);
            got.extend(some.into_iter().map(|entry| entry.id));
        }
        assert_eq!(got, all.iter().map(|live| live.id).collect::<Vec<_>>(), "stream {stream}");
    }
}

fn write_cold(wal: &Wal, entries: &[LiveEntry]) -> Result<ColdSegments, Error> {
    let mut writer = wal.cold_writer()?;
    for live in entries {
        writer.write(live.clone())?;
    }
    assert_eq!(writer.last(), entries.last().map(|live| live.id.index));
    writer.finish()
}

const SIZES: [usize; 9] = [500, 3000, 0, 9000, 20_000, 77, 1200, 15_000, 4000];

fn sizes(count: usize) -> Vec<usize> {
    SIZES.iter().copied().cycle().take(count).collect()
}

/// Builds a log with trimmed, unplaced and live entries, most of them below the purge point.
fn source_log(mut log: TestLog) -> TestLog {
    log.fill(&sizes(30));
    log.checkpoint_and_purge();
    log.wal.trim(1, 7);
    log.wal.drop_stream(2);
    log.fill(&sizes(12));
    log.idle();
    log
}

#[test]
fn live_entries_are_copied_to_another_log() {
    for (from_disk, to_disk) in [(true, true), (true, false), (false, true), (false, false)] {
        let _context = PrintOnPanic(format!("from disk {from_disk}, to disk {to_disk}"));
        let disk = SimulatedDisk::new(3);
        let from = source_log(if from_disk { TestLog::on(&disk) } else { TestLog::in_memory() });
        let wanted = from.live();
        assert!(wanted.len() > 10, "{}", wanted.len());
        assert!(wanted.iter().all(|live| live.placement.stream != 2));

        let disk = SimulatedDisk::new(4);
        disk.set_cache(CacheMode::Sometimes);
        let mut to = if to_disk { TestLog::on(&disk) } else { TestLog::in_memory() };
        // The target has the first entries, placed, and then an entry of another branch.
        to.fill(&sizes(4));
        to.term = 7;
        let index = to.wal.state().last.unwrap().index + 1;
        let stray = entry(LogId { term: 7, index }, 1, 3, 400);
        to.wal.append(vec![stray], Box::new(|result| result.unwrap()));
        to.idle();
        let missing: Vec<_> = wanted.iter().filter(|e| e.id.index > 4).cloned().collect();
        let mut cold = write_cold(&to.wal, &missing).unwrap();
        let at = from.wal.state().last.unwrap();
        to.wal.install(at, Bytes::from_static(STATE), &mut cold).unwrap();
        drop(cold);
        assert_eq!(to.wal.state().last, Some(at));
        assert_eq!(to.wal.state().purged, Some(at));
        to.wal.trim(1, 7);
        to.wal.drop_stream(2);
        assert_same(&to.live(), &wanted);
        assert_streams(&to.wal, &wanted);
        // The log continues after it, also after sealing and reopening.
        to.next = from.next;
        to.fill(&sizes(14));
        to.idle();
        let all = to.live();
        assert!(all.len() > wanted.len() + 5);
        assert_streams(&to.wal, &all);
        to.checkpoint_and_purge();
        assert_same(&to.live(), &all);
        assert_streams(&to.wal, &all);
        if to_disk {
            assert!(to.wal.stats().cold_segments > 0);
            drop(to);
            disk.crash(Crash::LoseAll);
            let disk = disk.reopen();
            assert_eq!(verify(&disk), []);
            let to = TestLog::on(&disk);
            to.wal.trim(1, 7);
            to.wal.drop_stream(2);
            assert_same(&to.live(), &all);
            assert_streams(&to.wal, &all);
        }
    }
}

fn cold_files(disk: &SimulatedDisk) -> Vec<String> {
    disk.files().into_iter().filter(|name| name.ends_with(".cold")).collect()
}

fn live_entry(index: u64, stream: u64, first: u64, size: usize) -> LiveEntry {
    let Entry { id, head, payload, .. } = entry(LogId { term: 1, index }, stream, 10, size);
    LiveEntry { id, placement: Placement { stream, first, count: 2, time: index }, head, payload }
}

/// Entries before and after the snapshot are in the same segment. Once sealed, it has two rows per
/// stream.
#[test]
fn snapshot_inside_a_segment_is_read_in_order() {
    let disk = SimulatedDisk::new(1);
    let mut log = TestLog::on(&disk);
    log.fill(&[100, 100, 100, 100]);
    log.idle();
    let before = log.live();
    let next = log.next;
    let installed: Vec<_> = (0..6)
        .map(|i| {
            let stream = 1 + i % 3;
            live_entry(10 + i, stream, next[stream as usize] + 2 * (i / 3), 700)
        })
        .collect();
    let mut cold = write_cold(&log.wal, &installed).unwrap();
    let at = LogId { term: 1, index: 30 };
    log.wal.install(at, Bytes::from_static(STATE), &mut cold).unwrap();
    for stream in 1..4 {
        log.next[stream] += 4;
    }
    log.fill(&[100, 100, 100]);
    let all = log.live();
    assert_eq!(all.len(), before.len() + 6 + 3);
    assert_streams(&log.wal, &all);
    // Two more segments, so that the first one is sealed and evicted from memory.
    log.fill(&sizes(20));
    log.idle();
    let all = log.live();
    assert_streams(&log.wal, &all);
    let (first, rows) = (log.wal.stream_rows(1)[0], log.wal.stream_rows(1));
    let shares = rows.iter().filter(|row| row.segment == first.segment && row.sealed).count();
    assert_eq!(shares, 2, "{rows:?}");
    drop(log);
    disk.crash(Crash::LoseAll);
    let disk = disk.reopen();
    assert_eq!(verify(&disk), []);
    let log = TestLog::on(&disk);
    let wanted: Vec<_> = all.iter().filter(|live| live.id.index <= at.index).cloned().collect();
    assert_same(&read_live(&log.wal, 0, at.index, 1), &wanted);
}

#[test]
fn entries_that_are_not_installed_leave_no_files() {
    let disk = SimulatedDisk::new(1);
    let mut log = TestLog::on(&disk);
    log.fill(&[10, 10]);
    let mut writer = log.wal.cold_writer().unwrap();
    writer.write(live_entry(5, 1, 50, 3000)).unwrap();
    assert_eq!(cold_files(&disk).len(), 1);
    drop(writer);
    assert_eq!(cold_files(&disk), [""; 0]);
    let cold = write_cold(&log.wal, &[live_entry(5, 1, 50, 3000)]).unwrap();
    assert_eq!(cold_files(&disk).len(), 1);
    assert_eq!((cold.first(), cold.last()), (Some(5), Some(5)));
    // After a crash the next open removes them.
    std::mem::forget(cold);
    drop(log);
    disk.crash(Crash::KeepAll);
    let disk = disk.reopen();
    assert_eq!(inspect(&disk).unwrap().leftovers, cold_files(&disk));
    let log = TestLog::on(&disk);
    assert_eq!(cold_files(&disk), [""; 0]);
    assert!(log.wal.read_stream(1, 50, 52, 1, ReadMode::Blocking).unwrap().unwrap().is_empty());
}

#[test]
fn rejects_invalid_entries() {
    let disk = SimulatedDisk::new(1);
    for mut log in [TestLog::on(&disk), TestLog::in_memory()] {
        log.fill(&[10, 10, 10]);
        let install = |at: u64, entries: &[LiveEntry]| {
            let mut cold = write_cold(&log.wal, entries)?;
            log.wal.install(LogId { term: 1, index: at }, Bytes::new(), &mut cold)
        };
        let placed_here = install(9, &[live_entry(3, 1, 50, 10)]);
        assert!(matches!(placed_here, Err(Error::Unusable(_))), "{placed_here:?}");
        let behind_the_snapshot = install(9, &[live_entry(10, 1, 50, 10)]);
        assert!(matches!(behind_the_snapshot, Err(Error::Unusable(_))));
        let known_position = install(9, &[live_entry(8, 2, 0, 10)]);
        assert!(matches!(known_position, Err(Error::Unusable(_))));
        let twice = install(9, &[live_entry(7, 1, 60, 10), live_entry(8, 1, 61, 10)]);
        assert!(matches!(twice, Err(Error::Unusable(_))), "{twice:?}");
        let mut writer = log.wal.cold_writer().unwrap();
        writer.write(live_entry(7, 1, 60, 10)).unwrap();
        assert!(matches!(writer.write(live_entry(7, 1, 62, 10)), Err(Error::Unusable(_))));
        let mut empty = live_entry(8, 1, 62, 10);
        empty.placement.count = 0;
        assert!(matches!(writer.write(empty), Err(Error::Unusable(_))));
        // The log is unchanged.
        log.fill(&[10]);
        assert_eq!(log.wal.state().last, Some(LogId { term: 1, index: 4 }));
        let beyond = log.wal.read_live(0, 5, 100);
        assert!(matches!(beyond, Err(Error::Beyond { asked: 5, next: 5 })), "{beyond:?}");
    }
    assert_eq!(cold_files(&disk), [""; 0]);
}

#[test]
fn rejects_contradicting_checkpoints() {
    let disk = SimulatedDisk::new(1);
    for mut log in [TestLog::on(&disk), TestLog::in_memory()] {
        log.fill(&[10, 10, 10]);
        let install = |term: u64, index: u64| {
            let mut cold = write_cold(&log.wal, &[])?;
            log.wal.install(LogId { term, index }, Bytes::new(), &mut cold)
        };
        install(2, 9).unwrap();
        for (term, index) in [(2, 8), (1, 9), (3, 9), (1, 10)] {
            let refused = install(term, index);
            assert!(matches!(refused, Err(Error::Unusable(_))), "{term} {index}: {refused:?}");
        }
        install(2, 9).unwrap();
        assert_eq!(log.wal.state().last, Some(LogId { term: 2, index: 9 }));
    }
    let log = TestLog::on(&disk.reopen());
    assert_eq!(log.wal.state().last, Some(LogId { term: 2, index: 9 }));
}

#[test]
fn full_disk_rejects_entry_or_install_until_space_is_free() {
    let disk = SimulatedDisk::new(1);
    let options = Options { reserve_bytes: 256 << 10, ready_segments: 0, ..small_options() };
    let manual = ManualWal::open(Arc::new(disk.clone()), options).unwrap();
    let wal = manual.wal;
    let mut writer = wal.cold_writer().unwrap();
    // Space for a segment, but not in addition to the reserve.
    disk.set_free_bytes(Some((256 << 10) + (63 << 10)));
    let refused = writer.write(live_entry(1, 1, 0, 3000));
    assert!(matches!(refused, Err(Error::DiskFull { .. })), "{refused:?}");
    assert_eq!((writer.last(), cold_files(&disk).len()), (None, 0));
    disk.set_free_bytes(Some(1 << 20));
    writer.write(live_entry(1, 1, 0, 3000)).unwrap();
    let mut cold = writer.finish().unwrap();
    let (at, state) = (LogId { term: 1, index: 2 }, Bytes::from(vec![5; 100 << 10]));
    disk.set_free_bytes(Some(0));
    let refused = wal.install(at, state.clone(), &mut cold);
    assert!(matches!(refused, Err(Error::DiskFull { .. })), "{refused:?}");
    assert_eq!(wal.state().purged, None);
    disk.set_free_bytes(None);
    wal.install(at, state, &mut cold).unwrap();
    let got = wal.read_stream(1, 0, 2, 1, ReadMode::Blocking).unwrap().unwrap();
    assert_eq!(got[0].payload.bytes.len(), 3000);
    assert!(wal.writable().is_ok());
}

/// A directory sync without space leaves it open whether the segments are part of the log. They
/// stay, also if they are discarded, and the log continues without them.
#[test]
fn install_without_a_directory_sync_keeps_what_both_states_list() {
    let at = LogId { term: 1, index: 20 };
    let (mut with, mut without) = (0, 0);
    for seed in 0..12 {
        let _context = PrintOnPanic(format!("seed {seed}"));
        let disk = SimulatedDisk::new(seed);
        let mut log = TestLog::on(&disk);
        log.fill(&[300, 300, 300]);
        log.idle();
        let first = log.next[1];
        let mut cold = write_cold(&log.wal, &[live_entry(10, 1, first, 900)]).unwrap();
        disk.fail(Fault::next(Operation::SyncDir).lasting().error(ErrorKind::QuotaExceeded));
        for _ in 0..2 {
            let refused = log.wal.install(at, Bytes::from_static(STATE), &mut cold);
            assert!(matches!(refused, Err(Error::DiskFull { .. })), "{refused:?}");
        }
        let before = log.live();
        assert_eq!(before.len(), 3);
        if seed % 2 == 0 {
            cold.discard();
            log.idle();
            disk.crash(Crash::Seeded(seed));
        } else if seed % 3 == 0 {
            disk.heal();
            log.wal.install(at, Bytes::from_static(STATE), &mut cold).unwrap();
            disk.crash(Crash::LoseAll);
        } else {
            drop((log, cold));
        }
        let disk = disk.reopen();
        disk.heal();
        assert_eq!(verify(&disk), []);
        let log = TestLog::on(&disk);
        if log.wal.state().purged == Some(at) {
            with += 1;
            let found = log.wal.read_stream(1, first, first + 1, 1, ReadMode::Blocking);
            assert_eq!(found.unwrap().unwrap()[0].id.index, 10);
        } else {
            without += 1;
            let last = before.last().unwrap().id;
            assert_eq!(log.wal.state().last, Some(last));
        }
    }
    assert!(with > 2 && without > 0, "{with} with the segments, {without} without");
}

#[test]
fn disk_failure_poisons_the_log() {
    for operation in [Operation::Write, Operation::Sync, Operation::SyncDir] {
        let disk = SimulatedDisk::new(1);
        let log = TestLog::on(&disk);
        let mut writer = log.wal.cold_writer().unwrap();
        writer.write(live_entry(1, 1, 0, 100)).unwrap();
        disk.fail(Fault::next(operation));
        let failed = writer.finish().map(drop);
        assert!(matches!(failed, Err(Error::Poisoned { .. })), "{operation:?}: {failed:?}");
        assert!(matches!(log.wal.writable(), Err(Error::Poisoned { .. })));
        assert!(matches!(log.wal.cold_writer(), Err(Error::Poisoned { .. })));
    }
}

/// After any bit flip in a cold segment, reads return right entries or an error that names the
/// file. Entries of other segments are served.
#[test]
fn damaged_cold_segment_is_reported_and_others_are_served() {
    let base = seed("cold damage");
    let mut rng = TestRng::new(base);
    let disk = SimulatedDisk::new(1);
    let mut log = TestLog::on(&disk);
    log.fill(&[300, 300, 300, 300]);
    log.idle();
    let next = log.next;
    let installed: Vec<_> = (0..9)
        .map(|i| {
            let stream = 1 + i % 3;
            live_entry(10 + i, stream, next[stream as usize] + 2 * (i / 3), 900)
        })
        .collect();
    let mut cold = write_cold(&log.wal, &installed).unwrap();
    let at = LogId { term: 1, index: 20 };
    log.wal.install(at, Bytes::from_static(STATE), &mut cold).unwrap();
    for stream in 1..4 {
        log.next[stream] += 6;
    }
    log.fill(&[300, 300, 300]);
    log.idle();
    let all = log.live();
    drop(log);
    disk.crash(Crash::LoseAll);
    let disk = disk.reopen();
    let name = cold_files(&disk).pop().unwrap();
    let bytes = disk.read_file(&name).unwrap();
    let used = |at: &usize| bytes[at.saturating_sub(8)..(at + 8).min(bytes.len())] != [0; 16];
    let positions: Vec<usize> = (8..bytes.len() - 8).filter(used).collect();
    let (mut reported, mut quarantined) = (0, 0);
    for round in 0..600 {
        let at = positions[rng.below(positions.len() as u64) as usize];
        let bit = 8 * at as u64 + rng.below(8);
        let _context =
            PrintOnPanic(format!("HELIX_SEED={base}, round {round}: bit {bit} of {name}"));
        let disk = disk.fork();
        disk.flip_bit(&name, bit);
        let found = verify(&disk).len() + usize::from(inspect(&disk).is_err());
        let manual = ManualWal::open(Arc::new(disk.clone()), small_options()).unwrap();
        quarantined += manual.recovered.quarantined.len();
        let placements = all.iter().filter(|live| live.id.index > 20);
        for live in placements {
            manual.wal.place(live.id.index, Some(live.placement)).unwrap_or_else(|_| {
                // The entry without placement in between.
                manual.wal.place(live.id.index - 1, None).unwrap();
                manual.wal.place(live.id.index, Some(live.placement)).unwrap();
            });
        }
        let mut damaged = 0;
        for live in &all {
            let Placement { stream, first, .. } = live.placement;
            match manual.wal.read_stream(stream, first, first + 1, 1, ReadMode::Blocking) {
                Ok(got) => {
                    let got = got.unwrap();
                    assert_eq!(got.len(), 1, "{:?} is skipped", live.placement);
                    assert_eq!((got[0].id, &got[0].head), (live.id, &live.head));
                    assert_eq!(got[0].payload.bytes, live.payload.bytes);
                }
                Err(Error::Damaged { file, .. }) => {
                    assert!(file.contains(&name), "{file}");
                    let here = installed.iter().any(|installed| installed.id == live.id);
                    assert!(here, "{} is in another segment", live.id.index);
                    damaged += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
        if damaged > 0 {
            assert!(found > 0, "verify finds nothing");
            reported += 1;
            let mut after = 0;
            let error = loop {
                match manual.wal.read_live(after, 20, 2000) {
                    Ok(found) if found.upto < 20 => after = found.upto,
                    Ok(_) => panic!("{damaged} entries are damaged but none is reported"),
                    Err(error) => break error,
                }
            };
            assert!(matches!(&error, Error::Damaged { file, .. } if *file == name), "{error}");
        }
    }
    assert!(reported > 100 && quarantined > 5, "{reported} reported, {quarantined} withheld");
    let state = inspect(&disk).unwrap().segments.pop().unwrap().state;
    assert_eq!(state, SegmentState::Cold);
}
