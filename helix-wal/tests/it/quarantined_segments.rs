//! Sealed segments with a damaged footer are quarantined by name; all other segments are served.

use std::sync::Arc;

use helix_wal::storage::{Crash, SimulatedDisk};
use helix_wal::{Error, LogId, ReadMode, SegmentReport, SegmentState, inspect};

use crate::common::{ManualWal, PrintOnPanic, entry};
use crate::corruption::{DamageClass, Golden, classify, is_right, options};

const BLOCK: u64 = 4096;

/// Damaged part of a footer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FooterPart {
    Trailer,
    /// Last page before the trailer.
    Directory,
}

fn damage(disk: &SimulatedDisk, segment: &SegmentReport, part: FooterPart) {
    let from_end = if part == FooterPart::Trailer { BLOCK } else { 2 * BLOCK };
    disk.flip_bit(&segment.file, 8 * (segment.file_bytes - from_end + 100));
}

fn sealed(golden: &Golden) -> Vec<SegmentReport> {
    let all = inspect(&golden.disk).unwrap().segments;
    let sealed = all.into_iter().filter(|segment| segment.state == SegmentState::Sealed);
    let sealed: Vec<_> = sealed.filter(|segment| segment.entries.is_some()).collect();
    assert!(sealed.len() > 2, "{sealed:?}");
    sealed
}

fn is_damage_of(error: &Error, segment: &SegmentReport) -> bool {
    matches!(error, Error::Damaged { file, bytes, .. }
        if *file == segment.file && bytes.end <= segment.file_bytes)
}

/// Returns whether the segment is read by its groups, because the state file does not list it as
/// sealed yet and its trailer is missing. No entry is lost then.
fn is_unsealed(
    manual: &ManualWal,
    segment: &SegmentReport,
    golden: &Golden,
    part: FooterPart,
) -> bool {
    let last = sealed(golden).pop().is_some_and(|last| last.id == segment.id);
    last && part == FooterPart::Trailer && manual.recovered.quarantined.is_empty()
}

/// Reads all entries: those of the segment fail with its name, all others are right.
fn check(manual: &ManualWal, golden: &Golden, segment: &SegmentReport) {
    let (first, last) = segment.entries.unwrap();
    let purged = golden.truth.durable.purged.map_or(0, |id| id.index + 1);
    for entry in golden.truth.durable.entries.range(purged..).map(|(_, entry)| entry) {
        let index = entry.id.index;
        if (first..=last.index).contains(&index) {
            let error = manual.wal.read(index..index + 1, 1, ReadMode::Blocking).unwrap_err();
            assert!(is_damage_of(&error, segment), "{index}: {error}");
            let error = manual.wal.heads(index..index + 1, 1, ReadMode::Blocking).unwrap_err();
            assert!(is_damage_of(&error, segment), "{index}: {error}");
        } else {
            assert!(is_right(&manual.wal, entry), "{index} is not in {}", segment.file);
        }
    }
}

#[test]
fn damaged_footer_quarantines_only_its_segment() {
    let golden = Golden::marked();
    let mut quarantined = 0;
    for segment in sealed(&golden) {
        for part in [FooterPart::Trailer, FooterPart::Directory] {
            let _context = PrintOnPanic(format!("{part:?} of {}", segment.file));
            let disk = golden.disk.fork();
            damage(&disk, &segment, part);
            let mut manual = match ManualWal::open(Arc::new(disk.clone()), options()) {
                Ok(manual) => manual,
                // A later truncation is known only from its footer.
                Err(error) => {
                    assert!(
                        part == FooterPart::Trailer && is_damage_of(&error, &segment),
                        "{error}"
                    );
                    continue;
                }
            };
            if is_unsealed(&manual, &segment, &golden, part) {
                continue;
            }
            quarantined += 1;
            let errors = &manual.recovered.quarantined[..];
            assert!(matches!(errors, [error] if is_damage_of(error, &segment)));
            check(&manual, &golden, &segment);
            // The log accepts appends, and the next open finds the same damage.
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
    assert!(quarantined > 3, "{quarantined}");
}

/// A position that may be in a quarantined segment is never reported as trimmed or as beyond the
/// end, and reads never skip it.
#[test]
fn reads_never_skip_positions_of_quarantined_segment() {
    let golden = Golden::marked();
    for segment in sealed(&golden) {
        for part in [FooterPart::Trailer, FooterPart::Directory] {
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
                    assert!(
                        part == FooterPart::Trailer && is_damage_of(&error, &segment),
                        "{error}"
                    );
                    continue;
                }
            };
            assert_eq!(class, DamageClass::Reported);
            let (first, last) = segment.entries.unwrap();
            for (_, placement) in golden.truth.placed.range(first..=last.index).map(|(_, p)| p) {
                let Some(placement) = placement else { continue };
                let (stream, first) = (placement.stream, placement.first);
                let read = manual.wal.read_stream(stream, first, u64::MAX, 1, ReadMode::Blocking);
                assert!(is_damage_of(&read.unwrap_err(), &segment), "{placement:?}");
                let search = manual.wal.search_time(stream, placement.time, ReadMode::Blocking);
                assert!(is_damage_of(&search.unwrap_err(), &segment), "{placement:?}");
                // Trimmed positions are not reported as damaged.
                manual.wal.trim(stream, first + u64::from(placement.count));
                let read = manual.wal.read_stream(stream, first, u64::MAX, 1, ReadMode::Blocking);
                assert!(matches!(read, Err(Error::Trimmed { .. })), "{read:?}");
            }
        }
    }
}
