//! What opens once opens again, and what would be refused then is refused at once: an open writes
//! the end of the log anew, so nothing may be taken over that cannot be read back.

use std::sync::Arc;

use bytes::Bytes;
use helix_wal::storage::{Crash, SimulatedDisk};
use helix_wal::{Error, LiveEntry, LogId, Placement, ReadMode, Wal};

use crate::common::{ManualWal, entry, same_entry};
use crate::corruption::options;

/// Past every index, position and number of a segment.
const NUMBERS_END: u64 = 1 << 62;

fn open(disk: &SimulatedDisk) -> Result<ManualWal, Error> {
    ManualWal::open(Arc::new(disk.clone()), options())
}

fn id(index: u64) -> LogId {
    LogId { term: 1, index }
}

/// Entries 0 to 7 in two segments.
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

/// Changes the state file and makes it verify.
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

/// Behind the identity.
fn next_id_at(state: &[u8]) -> usize {
    28 + u32::from_le_bytes(state[24..28].try_into().unwrap()) as usize
}

/// A sealed segment has fewer entries than its successor was begun behind: a truncation was
/// durable. Where the group that said so is gone, though it was the last one, the entries between
/// are not made up.
#[test]
fn a_truncation_that_a_sealed_segment_knows_of_is_not_taken_back() {
    let (disk, mut manual) = two_segments();
    let sealed = segments(&disk)[0].clone();
    place(&manual.wal, 0);
    place(&manual.wal, 1);
    manual.wal.truncate_after(Some(1), Box::new(|result| result.unwrap()));
    manual.settle();
    let disk = at_rest(&disk, manual);
    // Sealed, and the truncation has no mark.
    let trailer = disk.read_file(&sealed).unwrap();
    assert!(trailer[trailer.len() - 4096..].starts_with(b"HLXTRAIL"));
    assert_eq!(open(&disk.fork()).unwrap().wal.state().last, Some(id(1)));
    let (newest, bytes) =
        segments(&disk).pop().map(|name| (name.clone(), disk.read_file(&name).unwrap())).unwrap();
    let group = (0..bytes.len()).step_by(4096).rfind(|at| bytes[*at..].starts_with(b"HLXG"));
    disk.zero(&newest, group.unwrap() as u64..group.unwrap() as u64 + 4096);
    let refused = open(&disk.fork());
    assert!(matches!(refused, Err(Error::Damaged { .. })), "{:?}", refused.err());
    // And whoever gives the end up gets what is left without a gap.
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
        let read = manual.wal.read(next.id.index..next.id.index + 1, 1, ReadMode::Blocking).unwrap();
        assert!(same_entry(&read.unwrap()[0], &next));
    }
}

/// Only what is committed is placed, and only what is placed is sealed. Where nothing else of the
/// commit point came through, whoever opens the log must go on behind that: what a snapshot brings
/// of it would be there twice.
#[test]
fn what_is_sealed_was_committed() {
    let (disk, mut manual) = two_segments();
    (0..8).for_each(|index| place(&manual.wal, index));
    manual.idle();
    let manual = open(&at_rest(&disk, manual)).unwrap();
    let committed = manual.wal.state().committed.expect("a segment is sealed");
    let rows = manual.wal.stream_rows(1);
    assert_eq!(committed, id(rows[0].next - 1));
    assert!(rows[0].sealed && committed.index < 7, "{rows:?}");
}

/// A checkpoint that came from elsewhere goes past entries that nobody has placed: they may be of
/// another branch.
#[test]
fn what_a_checkpoint_ran_ahead_of_was_not_committed() {
    let (disk, mut manual) = two_segments();
    let sealed = segments(&disk)[0].clone();
    manual.wal.checkpoint(LogId { term: 2, index: 6 }, Bytes::new()).unwrap();
    manual.idle();
    let disk = at_rest(&disk, manual);
    let trailer = disk.read_file(&sealed).unwrap();
    assert!(trailer[trailer.len() - 4096..].starts_with(b"HLXTRAIL"), "it is sealed");
    assert_eq!(open(&disk).unwrap().wal.state().committed, None);
}

/// A file with the number of a segment that is sealed takes nothing away from it.
#[test]
fn a_stray_file_never_takes_the_name_of_a_segment() {
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
    assert!(disk.read_file(&stray).is_none(), "it is of no use");
    let manual = open(&disk).unwrap();
    for index in 0..8 {
        let found = manual.wal.read(index..index + 1, usize::MAX, ReadMode::Blocking).unwrap();
        assert!(same_entry(&found.unwrap()[0], &entry(id(index), 1, 10, 5_000)));
    }
}

/// A state file is never written without the segment that the log goes on in.
#[test]
fn a_state_without_segments_is_no_empty_log() {
    let (disk, mut manual) = two_segments();
    manual.wal.save_vote(Bytes::from_static(b"a vote"), Box::new(|result| result.unwrap()));
    manual.idle();
    let disk = at_rest(&disk, manual);
    forge_state(&disk, |state| {
        // Next id, `synced`, flags, two ids, and an empty or a short vote.
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

/// Numbers of segments end before a state file could no longer name the next one.
#[test]
fn a_log_without_a_number_for_its_next_segment_is_refused_unchanged() {
    let (disk, manual) = two_segments();
    let disk = at_rest(&disk, manual);
    let last = |disk: &SimulatedDisk, next_id: u64| {
        forge_state(disk, |state| {
            let at = next_id_at(state);
            state[at..at + 8].copy_from_slice(&next_id.to_le_bytes());
        });
    };
    // The last that there is: it opens, and is refused from then on.
    last(&disk, NUMBERS_END - 2);
    assert_eq!(open(&disk).unwrap().wal.state().last, Some(id(7)));
    let before = disk.files();
    for _ in 0..2 {
        assert!(matches!(open(&disk), Err(Error::Unusable(_))));
        assert_eq!(disk.files(), before);
    }
}

/// The position after the last one of an entry has to be within bounds, too.
#[test]
fn positions_that_end_beyond_all_bounds_are_refused() {
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
