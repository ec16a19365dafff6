//! Sealed segments with a damaged footer: they are withheld, by name, and everything else is there.

use std::sync::Arc;

use helix_wal::storage::{Crash, SimulatedDisk};
use helix_wal::{Error, LogId, ReadMode, SegmentReport, SegmentState, inspect};

use crate::common::{ManualWal, PrintOnPanic, entry};
use crate::corruption::{DamageClass, Golden, classify, is_right, options};

const BLOCK: u64 = 4096;

/// Where a footer is damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Trailer,
    /// The last page before it.
    Directory,
}

fn damage(disk: &SimulatedDisk, segment: &SegmentReport, part: Part) {
    let from_end = if part == Part::Trailer { BLOCK } else { 2 * BLOCK };
    disk.flip_bit(&segment.file, 8 * (segment.file_bytes - from_end + 100));
}

fn sealed(golden: &Golden) -> Vec<SegmentReport> {
    let all = inspect(&golden.disk).unwrap().segments;
    let sealed = all.into_iter().filter(|segment| segment.state == SegmentState::Sealed);
    let sealed: Vec<_> = sealed.filter(|segment| segment.entries.is_some()).collect();
    assert!(sealed.len() > 2, "{sealed:?}");
    sealed
}

fn names(error: &Error, segment: &SegmentReport) -> bool {
    matches!(error, Error::Damaged { file, bytes, .. }
        if *file == segment.file && bytes.end <= segment.file_bytes)
}

/// The last sealed segment, if the state file does not know yet that it is, is read by its groups
/// when it has no trailer: nothing of it is missing.
fn is_unsealed(manual: &ManualWal, segment: &SegmentReport, golden: &Golden, part: Part) -> bool {
    let last = sealed(golden).pop().is_some_and(|last| last.id == segment.id);
    last && part == Part::Trailer && manual.recovered.quarantined.is_empty()
}

/// Reads every entry of the log: those of the segment are withheld, all others are right.
fn check(manual: &ManualWal, golden: &Golden, segment: &SegmentReport) {
    let (first, last) = segment.entries.unwrap();
    let purged = golden.truth.durable.purged.map_or(0, |id| id.index + 1);
    for entry in golden.truth.durable.entries.range(purged..).map(|(_, entry)| entry) {
        let index = entry.id.index;
        if (first..=last.index).contains(&index) {
            let error = manual.wal.read(index..index + 1, 1, ReadMode::Blocking).unwrap_err();
            assert!(names(&error, segment), "{index}: {error}");
            let error = manual.wal.heads(index..index + 1, 1, ReadMode::Blocking).unwrap_err();
            assert!(names(&error, segment), "{index}: {error}");
        } else {
            assert!(is_right(&manual.wal, entry), "{index} is not in {}", segment.file);
        }
    }
}

#[test]
fn a_segment_whose_footer_is_damaged_is_withheld_alone() {
    let golden = Golden::marked();
    let mut withheld = 0;
    for segment in sealed(&golden) {
        for part in [Part::Trailer, Part::Directory] {
            let _context = PrintOnPanic(format!("{part:?} of {}", segment.file));
            let disk = golden.disk.fork();
            damage(&disk, &segment, part);
            let mut manual = match ManualWal::open(Arc::new(disk.clone()), options()) {
                Ok(manual) => manual,
                // Something was cut later, and its footer alone knew what was left.
                Err(error) => {
                    assert!(part == Part::Trailer && names(&error, &segment), "{error}");
                    continue;
                }
            };
            if is_unsealed(&manual, &segment, &golden, part) {
                continue;
            }
            withheld += 1;
            assert!(matches!(&manual.recovered.quarantined[..], [error] if names(error, &segment)));
            check(&manual, &golden, &segment);
            // The log goes on, and the next open finds the same.
            let last = manual.wal.state().last.unwrap();
            let next = entry(LogId { term: 9, index: last.index + 1 }, 1, 3, 3);
            manual.wal.append(vec![next.clone()], Box::new(|result| result.unwrap()));
            manual.idle();
            drop(manual);
            disk.crash(Crash::LoseAll);
            let manual = ManualWal::open(Arc::new(disk.reopen()), options()).unwrap();
            assert_eq!(manual.recovered.quarantined.len(), 1);
            check(&manual, &golden, &segment);
            assert!(is_right(&manual.wal, &next));
        }
    }
    assert!(withheld > 3, "{withheld}");
}

/// A position that may have been in a withheld segment is never taken for trimmed, for one that is
/// not there yet, or for the next one that can be read.
#[test]
fn no_position_of_a_withheld_segment_is_passed_over() {
    let golden = Golden::marked();
    for segment in sealed(&golden) {
        for part in [Part::Trailer, Part::Directory] {
            let _context = PrintOnPanic(format!("{part:?} of {}", segment.file));
            let disk = golden.disk.fork();
            damage(&disk, &segment, part);
            let class = classify(&disk, &golden.truth);
            let disk = golden.disk.fork();
            damage(&disk, &segment, part);
            let manual = match ManualWal::open(Arc::new(disk), options()) {
                Ok(manual) if is_unsealed(&manual, &segment, &golden, part) => {
                    assert_eq!(class, DamageClass::Equal);
                    continue;
                }
                Ok(manual) => manual,
                Err(error) => {
                    assert!(part == Part::Trailer && names(&error, &segment), "{error}");
                    continue;
                }
            };
            assert_eq!(class, DamageClass::Reported);
            let (first, last) = segment.entries.unwrap();
            for (_, placement) in golden.truth.placed.range(first..=last.index).map(|(_, p)| p) {
                let Some(placement) = placement else { continue };
                let (stream, first) = (placement.stream, placement.first);
                let read = manual.wal.read_stream(stream, first, u64::MAX, 1, ReadMode::Blocking);
                assert!(names(&read.unwrap_err(), &segment), "{placement:?}");
                let search = manual.wal.search_time(stream, placement.time, ReadMode::Blocking);
                assert!(names(&search.unwrap_err(), &segment), "{placement:?}");
                // What was trimmed is not missed.
                manual.wal.trim(stream, first + u64::from(placement.count));
                let read = manual.wal.read_stream(stream, first, u64::MAX, 1, ReadMode::Blocking);
                assert!(matches!(read, Err(Error::Trimmed { .. })), "{read:?}");
            }
        }
    }
}
