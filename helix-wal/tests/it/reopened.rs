//! A log that opens once opens again; a log that cannot be read back later is rejected at once.
//! An open rewrites the end of the log, so it must not keep data that cannot be read back.

use std::sync::Arc;

use bytes::Bytes;
use helix_wal::storage::{Crash, SimulatedDisk};
use helix_wal::{Error, LiveEntry, LogId, Placement, ReadMode, Wal};

use crate::common::{ManualWal, entry, same_entry};
use crate::corruption::options;

/// Upper bound of indexes, positions and segment numbers.
const NUMBERS_END: u64 = 1 << 62;

fn open(disk: &SimulatedDisk) -> Result<ManualWal, Error> {
    ManualWal::open(Arc::new(disk.clone()), options())
}

fn id(index: u64) -> LogId {
    LogId { term: 1, index }
}

/// Builds a log with entries 0 to 7 in two segments.
fn two_segments() -> (SimulatedDisk, ManualWal) {
    let disk = SimulatedDisk::new(1);
    let mut manual = open(&disk).unwrap();
    for index in 0..8 {
        let entry = entry(id(index), 1, 10, 5_000);
        manual.wal.append(vec![entry], Box::new(|result| result.unwrap()));
        manual.settle();
    }
    assert_eq!(segments(&disk).len(), 2);
    (disk, manual)
}

fn place(wal: &Wal, index: u64) {
    let placement = Placement { stream: 1, first: index, count: 1, time: index };
    wal.place(index, Some(placement)).unwrap();
}

fn at_rest(disk: &SimulatedDisk, manual: ManualWal) -> SimulatedDisk {
    drop(manual);
    disk.crash(Crash::LoseAll);
    disk.reopen()
}

fn segments(disk: &SimulatedDisk) -> Vec<String> {
    disk.files().into_iter().filter(|name| name.ends_with(".seg")).collect()
}

/// Changes the state file and updates its checksum.
fn forge_state(disk: &SimulatedDisk, change: impl Fn(&mut Vec<u8>)) {
    let mut bytes = disk.read_file("state").unwrap();
    let len = u64::from_le_bytes(bytes[16..24].try_into().unwrap()) as usize;
    bytes.truncate(len);
    change(&mut bytes);
    let len = (bytes.len() as u64).to_le_bytes();
    bytes[16..24].copy_from_slice(&len);
    let crc = crc32fast::hash(&bytes[12..]).to_le_bytes();
    bytes[8..12].copy_from_slice(&crc);
    disk.write_file("state", bytes);
}

/// Offset of the next segment id, after the identity.
fn next_id_at(state: &[u8]) -> usize {
    28 + u32::from_le_bytes(state[24..28].try_into().unwrap()) as usize
}

/// A sealed segment with fewer entries than its successor starts after shows a durable truncation.
/// If the group with the truncation is lost, the log must not open with a gap.
#[test]
fn truncation_shown_by_sealed_segment_is_not_undone() {
    let (disk, mut manual) = two_segments();
    let sealed = segments(&disk)[0].clone();
    place(&manual.wal, 0);
    place(&manual.wal, 1);
    manual.wal.truncate_after(Some(1), Box::new(|result| result.unwrap()));
    manual.settle();
    let disk = at_rest(&disk, manual);
    // The segment is sealed, and the truncation has no sync marker.
    let trailer = disk.read_file(&sealed).unwrap();
    assert!(trailer[trailer.len() - 4096..].starts_with(b"HLXTRAIL"));
    assert_eq!(open(&disk.fork()).unwrap().wal.state().last, Some(id(1)));
    let (newest, bytes) =
        segments(&disk).pop().map(|name| (name.clone(), disk.read_file(&name).unwrap())).unwrap();
    let group = (0..bytes.len()).step_by(4096).rfind(|at| bytes[*at..].starts_with(b"HLXG"));
    disk.zero(&newest, group.unwrap() as u64..group.unwrap() as u64 + 4096);
    let refused = open(&disk.fork());
    assert!(matches!(refused, Err(Error::Damaged { .. })), "{:?}", refused.err());
    // Truncating the damaged end leaves a log without a gap.
    let storage = Arc::new(disk.clone()) as Arc<dyn helix_wal::storage::Storage>;
    let end = Wal::damaged_end(&storage).unwrap().expect("it is damaged");
    assert_eq!(end.kept, Some(id(1)));
    Wal::truncate_damaged_end(&storage).unwrap();
    for _ in 0..2 {
        let mut manual = open(&disk).unwrap();
        let last = manual.wal.state().last.unwrap();
        for index in 0..=last.index {
            let found = manual.wal.read(index..index + 1, usize::MAX, ReadMode::Blocking).unwrap();
            assert_eq!(found.unwrap()[0].id.index, index);
        }
        let next = entry(id(last.index + 1), 1, 3, 3);
        manual.wal.append(vec![next.clone()], Box::new(|result| result.unwrap()));
        manual.idle();
        let read =
            manual.wal.read(next.id.index..next.id.index + 1, 1, ReadMode::Blocking).unwrap();
        assert!(same_entry(&read.unwrap()[0], &next));
    }
}

/// Only committed entries are placed, and only placed entries are sealed.
///
/// If the commit point was lost otherwise, it must be recovered from sealed segments: a snapshot
/// would else install their entries twice.
#[test]
fn sealed_entries_count_as_committed() {
    let (disk, mut manual) = two_segments();
    (0..8).for_each(|index| place(&manual.wal, index));
    manual.idle();
    let manual = open(&at_rest(&disk, manual)).unwrap();
    let committed = manual.wal.state().committed.expect("a segment is sealed");
    let rows = manual.wal.stream_rows(1);
    assert_eq!(committed, id(rows[0].next - 1));
    assert!(rows[0].sealed && committed.index < 7, "{rows:?}");
}

/// Entries below a checkpoint of another replica that were never placed here may be of another
/// branch.
#[test]
fn unplaced_entries_below_a_checkpoint_are_not_committed() {
    let (disk, mut manual) = two_segments();
    let sealed = segments(&disk)[0].clone();
    manual.wal.checkpoint(LogId { term: 2, index: 6 }, Bytes::new()).unwrap();
    manual.idle();
    let disk = at_rest(&disk, manual);
    let trailer = disk.read_file(&sealed).unwrap();
    assert!(trailer[trailer.len() - 4096..].starts_with(b"HLXTRAIL"), "it is sealed");
    assert_eq!(open(&disk).unwrap().wal.state().committed, None);
}

/// A prepared file with the number of a sealed segment must not replace it.
#[test]
fn stray_file_never_replaces_a_segment() {
    let (disk, mut manual) = two_segments();
    (0..8).for_each(|index| place(&manual.wal, index));
    manual.idle();
    let disk = at_rest(&disk, manual);
    let sealed = segments(&disk)[0].clone();
    let bytes = disk.read_file(&sealed).unwrap();
    let stray = sealed.replace(".seg", ".new");
    disk.write_file(&stray, vec![7; bytes.len()]);
    drop(open(&disk).unwrap());
    assert_eq!(disk.read_file(&sealed).unwrap(), bytes);
    assert!(disk.read_file(&stray).is_none(), "the stray file is removed");
    let manual = open(&disk).unwrap();
    for index in 0..8 {
        let found = manual.wal.read(index..index + 1, usize::MAX, ReadMode::Blocking).unwrap();
        assert!(same_entry(&found.unwrap()[0], &entry(id(index), 1, 10, 5_000)));
    }
}

/// A state file always names at least the active segment.
#[test]
fn rejects_state_file_without_segments() {
    let (disk, mut manual) = two_segments();
    manual.wal.save_vote(Bytes::from_static(b"a vote"), Box::new(|result| result.unwrap()));
    manual.idle();
    let disk = at_rest(&disk, manual);
    forge_state(&disk, |state| {
        // Next id, `synced`, flags, two ids, and an empty or short vote.
        let vote = next_id_at(state) + 24 + 4 + 32;
        let len = u32::from_le_bytes(state[vote..vote + 4].try_into().unwrap()) as usize;
        let count = vote + 4 + len;
        let segments = u32::from_le_bytes(state[count..count + 4].try_into().unwrap()) as usize;
        assert!(segments > 0);
        state[count..count + 4].fill(0);
        state.drain(count + 4..count + 4 + 9 * segments);
    });
    assert!(matches!(open(&disk), Err(Error::Damaged { .. })));
}

/// Segment numbers end before the state file could not name the next one.
#[test]
fn rejects_log_without_next_segment_number() {
    let (disk, manual) = two_segments();
    let disk = at_rest(&disk, manual);
    let last = |disk: &SimulatedDisk, next_id: u64| {
        forge_state(disk, |state| {
            let at = next_id_at(state);
            state[at..at + 8].copy_from_slice(&next_id.to_le_bytes());
        });
    };
    // The last number: the log opens once, and is rejected from then on.
    last(&disk, NUMBERS_END - 2);
    assert_eq!(open(&disk).unwrap().wal.state().last, Some(id(7)));
    let before = disk.files();
    for _ in 0..2 {
        assert!(matches!(open(&disk), Err(Error::Unusable(_))));
        assert_eq!(disk.files(), before);
    }
}

/// The position after an entry must be within bounds too.
#[test]
fn rejects_positions_out_of_bounds() {
    let (_disk, manual) = two_segments();
    let at = |first, count| Placement { stream: 1, first, count, time: 0 };
    let refused = [at(NUMBERS_END - 1, 1), at(NUMBERS_END - 5, 5), at(u64::MAX, u32::MAX)];
    let mut writer = manual.wal.cold_writer().unwrap();
    for placement in refused {
        assert!(matches!(manual.wal.place(0, Some(placement)), Err(Error::Unusable(_))));
        let helix_wal::Entry { id, head, payload, .. } = entry(id(50), 1, 1, 1);
        let live = LiveEntry { id, placement, head, payload };
        assert!(matches!(writer.write(live), Err(Error::Unusable(_))));
    }
    manual.wal.place(0, Some(at(NUMBERS_END - 6, 5))).unwrap();
}
