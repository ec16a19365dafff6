//! How old entries are fetched: few and large reads, and some of what comes next in advance.
//! What they return is the business of the other tests.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use helix_wal::storage::{CacheMode, Operation, SimulatedDisk};
use helix_wal::{Entry, LogId, Options, Placement, ReadMode};

use crate::common::{ManualWal, entry, same_entry, small_options};

const PAYLOAD: usize = 40 << 10;
const STREAMS: u64 = 4;
const ENTRIES: u64 = 400;
/// Frames of one stream so far apart are worth a read each.
const FETCH: usize = 5 * PAYLOAD + 1000;

/// A log of which nothing is in memory, with the streams taking turns.
fn cold() -> (SimulatedDisk, ManualWal) {
    let disk = SimulatedDisk::new(1);
    let options =
        Options { segment_bytes: 8 << 20, group_bytes: 1 << 20, tail_bytes: 0, ..small_options() };
    let mut manual = ManualWal::open(Arc::new(disk.clone()), options).unwrap();
    for index in 0..ENTRIES {
        let stream = 1 + index % STREAMS;
        let entry = entry(LogId { term: 1, index }, stream, 10, PAYLOAD);
        manual.wal.append(vec![entry], Box::new(|result| result.unwrap()));
        if index % 20 == 19 {
            manual.settle();
        }
        let first = index / STREAMS;
        manual.wal.place(index, Some(Placement { stream, first, count: 1, time: 1 })).unwrap();
    }
    manual.idle();
    disk.set_cache(CacheMode::Never);
    (disk, manual)
}

/// The reads of entries, and what was told in advance, in the order of the calls.
fn steps(disk: &SimulatedDisk, run: impl FnOnce()) -> Vec<(Operation, Range<u64>)> {
    disk.record(true);
    run();
    let steps = disk.trace().into_iter().map(|step| (step.operation, step.bytes));
    let frames = steps.filter(|(_, bytes)| bytes.end - bytes.start > 4096).collect();
    disk.record(false);
    frames
}

#[test]
fn neighbours_are_fetched_by_one_read() {
    let (disk, manual) = cold();
    let read = |start: u64| {
        let mut got = 0;
        let steps = steps(&disk, || {
            let found =
                manual.wal.read(start..ENTRIES, 1 << 20, ReadMode::Blocking).unwrap().unwrap();
            got = found.len() as u64;
        });
        (got, steps)
    };
    let (first, alone) = read(0);
    assert!(first > 20, "{first}");
    assert!(matches!(alone[..], [(Operation::Read, _)]), "{alone:?}");
    // It comes back: the storage reads ahead by itself of what lies in a row.
    let (second, more) = read(first);
    assert!(matches!(more[..], [(Operation::Read, _)]), "{more:?}");
    // One that starts elsewhere gets what it asks for.
    let (_, elsewhere) = read(first + second + 100);
    assert!(matches!(elsewhere[..], [(Operation::Read, _)]), "{elsewhere:?}");
}

#[test]
fn scattered_entries_are_fetched_at_once() {
    let (disk, manual) = cold();
    let read = |position: u64| {
        steps(&disk, || {
            let got = manual.wal.read_stream(2, position, ENTRIES, FETCH, ReadMode::Blocking);
            assert_eq!(got.unwrap().unwrap().len(), 5);
        })
    };
    let first = read(0);
    let (told, read_now) = first.split_at(5);
    assert!(told.iter().all(|step| step.0 == Operation::WillRead), "{first:?}");
    assert_eq!(read_now.len(), 5, "{first:?}");
    for (told, read) in told.iter().zip(read_now) {
        assert_eq!((read.0, &read.1), (Operation::Read, &told.1));
    }
    let second = read(5);
    let told = second.iter().filter(|step| step.0 == Operation::WillRead).count();
    assert!((10..=20).contains(&told), "{second:?}");
    let cached = steps(&disk, || {
        let found = manual.wal.read_stream(2, 10, ENTRIES, FETCH, ReadMode::CachedOnly).unwrap();
        assert!(found.is_none());
    });
    assert!(cached.is_empty(), "who may not wait asks for nothing: {cached:?}");
}

/// A log of many segments, of which nothing is in memory.
fn long(disk: &SimulatedDisk, options: &Options) -> ManualWal {
    let mut manual = ManualWal::open(Arc::new(disk.clone()), options.clone()).unwrap();
    for index in 0..ENTRIES {
        manual.wal.append(vec![long_entry(index)], Box::new(|r| r.unwrap()));
        manual.settle();
        let placement = Placement { stream: 1, first: index, count: 1, time: 1 };
        manual.wal.place(index, Some(placement)).unwrap();
    }
    manual.idle();
    manual
}

fn long_entry(index: u64) -> Entry {
    entry(LogId { term: 1, index }, 1, 10, 20 << 10)
}

/// A log of many segments needs few open files, and all of it can be read.
#[test]
fn a_long_log_keeps_few_files_open() {
    let disk = SimulatedDisk::new(1);
    let options = Options { tail_bytes: 0, ..small_options() };
    let mut manual = long(&disk, &options);
    for _ in 0..2 {
        assert!(manual.wal.stats().segments > 150);
        assert!(disk.open_files() < 80, "{} files are open", disk.open_files());
        for index in 0..ENTRIES {
            let found = manual.wal.read(index..index + 1, 1, ReadMode::Blocking).unwrap().unwrap();
            assert!(same_entry(&found[0], &long_entry(index)));
        }
        assert!(disk.open_files() < 80, "{} files are open", disk.open_files());
        drop(manual);
        manual = ManualWal::open(Arc::new(disk.clone()), options.clone()).unwrap();
    }
}

#[test]
fn a_piece_of_a_long_log_is_looked_for_where_it_is() {
    let disk = SimulatedDisk::new(1);
    let manual = long(&disk, &Options { tail_bytes: 0, ..small_options() });
    let (mut after, last) = (0, ENTRIES - 1);
    while after < last {
        disk.record(true);
        let piece = manual.wal.read_live(after, last, 100 << 10).unwrap();
        let reads = disk.trace().into_iter().filter(|step| step.operation == Operation::Read);
        let files: BTreeSet<String> = reads.map(|step| step.file).collect();
        disk.record(false);
        let indexes: Vec<u64> = piece.entries.iter().map(|live| live.id.index).collect();
        assert_eq!(indexes, Vec::from_iter(after + 1..=piece.upto));
        assert!(piece.upto == last || indexes.len() > 2, "{indexes:?}");
        assert!(files.len() <= indexes.len() + 1, "{indexes:?} are in {files:?}");
        after = piece.upto;
    }
}
