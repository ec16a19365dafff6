//! Read patterns for old entries: few large reads, and read-ahead.
//! Other tests check what reads return.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use helix_wal::storage::{CacheMode, Operation, SimulatedDisk};
use helix_wal::{Entry, LogId, Options, Placement, ReadMode};

use crate::common::{ManualWal, entry, same_entry, small_options};

const PAYLOAD: usize = 40 << 10;
const STREAMS: u64 = 4;
const ENTRIES: u64 = 400;
/// Fetch size with which frames of one stream are far enough apart for a read each.
const FETCH: usize = 5 * PAYLOAD + 1000;

/// Builds a log with nothing in memory and interleaved streams.
fn uncached_log() -> (SimulatedDisk, ManualWal) {
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

/// Returns all reads and read-ahead hints of entries, in order.
fn steps(disk: &SimulatedDisk, run: impl FnOnce()) -> Vec<(Operation, Range<u64>)> {
    disk.record(true);
    run();
    let steps = disk.trace().into_iter().map(|step| (step.operation, step.bytes));
    let frames = steps.filter(|(_, bytes)| bytes.end - bytes.start > 4096).collect();
    disk.record(false);
    frames
}

#[test]
fn adjacent_entries_are_fetched_by_one_read() {
    let (disk, manual) = uncached_log();
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
    // A sequential read: the storage reads ahead automatically.
    let (second, more) = read(first);
    assert!(matches!(more[..], [(Operation::Read, _)]), "{more:?}");
    // A read at another position reads only what it needs.
    let (_, elsewhere) = read(first + second + 100);
    assert!(matches!(elsewhere[..], [(Operation::Read, _)]), "{elsewhere:?}");
}

#[test]
fn scattered_entries_are_read_ahead_together() {
    let (disk, manual) = uncached_log();
    let read = |position: u64| {
        steps(&disk, || {
            let got = manual.wal.read_stream(2, position, ENTRIES, FETCH, ReadMode::Blocking);
            assert_eq!(got.unwrap().unwrap().len(), 5);
        })
    };
    let first = read(0);
    let (hints, read_now) = first.split_at(5);
    assert!(hints.iter().all(|step| step.0 == Operation::WillRead), "{first:?}");
    assert_eq!(read_now.len(), 5, "{first:?}");
    for (hints, read) in hints.iter().zip(read_now) {
        assert_eq!((read.0, &read.1), (Operation::Read, &hints.1));
    }
    let second = read(5);
    let hints = second.iter().filter(|step| step.0 == Operation::WillRead).count();
    assert!((10..=20).contains(&hints), "{second:?}");
    let cached = steps(&disk, || {
        let found = manual.wal.read_stream(2, 10, ENTRIES, FETCH, ReadMode::CachedOnly).unwrap();
        assert!(found.is_none());
    });
    assert!(cached.is_empty(), "a cached read issues no I/O: {cached:?}");
}

/// Builds a log of many segments with nothing in memory.
fn long_log(disk: &SimulatedDisk, options: &Options) -> ManualWal {
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

/// A log of many segments keeps few files open and is completely readable.
#[test]
fn long_log_keeps_few_files_open() {
    let disk = SimulatedDisk::new(1);
    let options = Options { tail_bytes: 0, ..small_options() };
    let mut manual = long_log(&disk, &options);
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
fn live_reads_open_only_needed_segments() {
    let disk = SimulatedDisk::new(1);
    let manual = long_log(&disk, &Options { tail_bytes: 0, ..small_options() });
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

#[test]
fn filtered_live_reads_skip_payloads_of_other_streams() {
    let (disk, manual) = uncached_log();
    let last = ENTRIES - 1;
    // The estimate depends on how the entries of a segment lie around the range.
    let (all, one) =
        (manual.wal.live_bytes(0, last), manual.wal.live_bytes_of(0, last, &|s| s == 2));
    assert!(one.abs_diff(all / STREAMS) < all / 100, "{one} of {all}");
    let (mut after, mut indexes) = (0, Vec::new());
    let steps = steps(&disk, || {
        while after < last {
            let piece = manual.wal.read_live_of(after, last, 1 << 20, &|s| s == 2).unwrap();
            indexes.extend(piece.entries.iter().map(|live| live.id.index));
            after = piece.upto;
        }
    });
    assert_eq!(indexes, Vec::from_iter((1..ENTRIES).step_by(STREAMS as usize)));
    let reads = steps.into_iter().filter(|step| step.0 == Operation::Read);
    let reads: Vec<_> = reads.map(|(_, bytes)| bytes.end - bytes.start).collect();
    let footers = reads.iter().filter(|bytes| **bytes < PAYLOAD as u64).count();
    assert_eq!(reads.len() - footers, indexes.len(), "one read for each wanted entry: {reads:?}");
    assert!(reads.iter().all(|bytes| *bytes < 2 * PAYLOAD as u64), "{reads:?}");
}

#[test]
fn filtered_live_reads_pass_segments_in_steps() {
    let disk = SimulatedDisk::new(1);
    let manual = long_log(&disk, &Options { tail_bytes: 0, ..small_options() });
    let (mut after, mut calls, last) = (0, 0, ENTRIES - 1);
    while after < last {
        disk.record(true);
        let piece = manual.wal.read_live_of(after, last, 1 << 20, &|_| false).unwrap();
        let files: BTreeSet<String> = disk.trace().into_iter().map(|step| step.file).collect();
        disk.record(false);
        assert!(piece.entries.is_empty() && piece.upto > after);
        assert!(files.len() <= 64, "{} segments in one call", files.len());
        after = piece.upto;
        calls += 1;
    }
    assert_eq!(calls, ENTRIES.div_ceil(64), "an entry in each segment");
}
