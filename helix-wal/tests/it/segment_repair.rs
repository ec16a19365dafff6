//! Repair of sealed segments in place: whatever bit is flipped, the segment becomes what it was, or
//! the repair is refused and nothing changes.

use std::collections::BTreeMap;
use std::sync::Arc;

use helix_wal::storage::{Crash, Fault, Operation, SimulatedDisk};
use helix_wal::{Entry, Error, Placement, SegmentState, inspect, verify};

use crate::common::{ManualWal, PrintOnPanic, TestRng, rounds, seed};
use crate::corruption::{Golden, options, streams_are_right};

/// Entries that other replicas would send.
type Others = (BTreeMap<u64, Entry>, BTreeMap<u64, Placement>);

fn others(golden: &Golden) -> Others {
    let placed = golden.truth.placed.iter();
    let mut entries = golden.truth.durable.entries.clone();
    entries.extend(placed.clone().map(|(index, (entry, _))| (*index, entry.clone())));
    let placements = placed.filter_map(|(index, (_, placement))| Some((*index, (*placement)?)));
    (entries, placements.collect())
}

fn open(disk: &SimulatedDisk) -> ManualWal {
    let mut manual = ManualWal::open(Arc::new(disk.clone()), options()).unwrap();
    manual.settle();
    manual
}

/// Sealed and cold segments, with the end of their groups.
fn sealed(disk: &SimulatedDisk) -> Vec<(String, u64, u64)> {
    let segments = inspect(disk).unwrap().segments.into_iter();
    let sealed = segments.filter(|it| {
        matches!(it.state, SegmentState::Sealed | SegmentState::Cold) && it.entries.is_some()
    });
    let sealed: Vec<_> = sealed.map(|it| (it.file, it.used_bytes, it.file_bytes)).collect();
    assert!(!sealed.is_empty());
    sealed
}

/// A byte of an entry in a sealed segment, and the index of the entry.
fn entry_byte(disk: &SimulatedDisk) -> (String, u64, u64) {
    let disk = disk.fork().reopen();
    let manual = open(&disk);
    for (file, used, _) in sealed(&disk) {
        for byte in (4096 + 128 + 64..used).step_by(501) {
            disk.flip_bit(&file, byte * 8);
            let damage = manual.wal.examine_segment(&file);
            disk.flip_bit(&file, byte * 8);
            let missing = damage.ok().and_then(|it| it.missing().first().copied());
            if let Some(id) = missing {
                return (file, byte, id.index);
            }
        }
    }
    panic!("no entry is in a sealed segment");
}

#[derive(Debug, Default)]
struct Counts {
    repaired: u64,
    uncovered: u64,
    refused: u64,
}

/// Flips a bit of a sealed segment of an open log, and repairs it.
fn flip_and_repair(
    golden: &Golden,
    (entries, placements): &Others,
    file: &str,
    bit: u64,
    counts: &mut Counts,
) {
    let disk = golden.disk.fork().reopen();
    let manual = open(&disk);
    let _context = PrintOnPanic(format!("{file}: bit {bit} of byte {}", bit / 8));
    let (before, names) = (disk.read_file(file).unwrap(), disk.files());
    disk.flip_bit(file, bit);
    let damaged = disk.read_file(file).unwrap();
    let damage = match manual.wal.examine_segment(file) {
        Ok(damage) => damage,
        Err(Error::Damaged { .. }) => {
            counts.refused += 1;
            assert!(damaged == disk.read_file(file).unwrap(), "nothing was changed");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    if damage.is_clean() {
        counts.uncovered += 1;
        return;
    }
    match damage.repair(entries, placements) {
        Ok(()) => {}
        Err(Error::Damaged { .. }) => {
            counts.refused += 1;
            assert!(damaged == disk.read_file(file).unwrap(), "nothing was changed");
            return;
        }
        Err(error) => panic!("{error}"),
    }
    drop(damage);
    counts.repaired += 1;
    // The first block has a part that no checksum of another block repeats.
    if bit / 8 >= 4096 {
        assert!(disk.read_file(file).unwrap() == before, "it is not what it was");
    }
    assert!(manual.wal.examine_segment(file).unwrap().is_clean());
    assert_eq!(disk.files(), names, "the copy has the name of the segment");
    drop(manual);
    let disk = disk.reopen();
    assert_eq!(verify(&disk), []);
    let manual = open(&disk);
    assert!(manual.recovered.quarantined.is_empty());
}

#[test]
fn flipped_bit_of_a_sealed_segment_is_repaired_from_other_replicas() {
    let mut rng = TestRng::new(seed("flipped_bit_of_a_sealed_segment_is_repaired"));
    for (what, mut golden) in
        [("chain", Golden::marked()), ("cold", Golden::compacted()), ("cleaned", Golden::cleaned())]
    {
        let others = others(&golden);
        let mut counts = Counts::default();
        drop(open(&golden.disk));
        golden.disk = golden.disk.reopen();
        for (file, used, len) in sealed(&golden.disk) {
            for _ in 0..60 * rounds() {
                let byte = rng.below(used);
                flip_and_repair(&golden, &others, &file, byte * 8 + rng.below(8), &mut counts);
            }
            // Every part of the footer, and the headers.
            let footer = (len - 5 * 4096..len).step_by(97);
            for byte in (0..64).chain((4096..4096 + 256).step_by(5)).chain(footer) {
                flip_and_repair(&golden, &others, &file, byte * 8 + rng.below(8), &mut counts);
            }
        }
        println!("{what}: {counts:?}");
        // Control frames, and directories of cold segments, are not in other replicas' entries.
        assert!(counts.repaired > 5 * counts.refused, "{what}: {counts:?}");
    }
}

/// With the examination that finds the damage. Metadata and the other files are not counted.
#[test]
fn repair_reads_and_writes_at_most_four_times_the_segment() {
    let golden = Golden::marked();
    let (entries, placements) = others(&golden);
    let disk = golden.disk.fork().reopen();
    // Before the open: a fork would be locked too.
    let (file, byte, _) = entry_byte(&disk);
    let manual = open(&disk);
    disk.flip_bit(&file, byte * 8);
    let segment = disk.read_file(&file).unwrap().len() as u64;
    disk.record(true);
    let damage = manual.wal.examine_segment(&file).unwrap();
    damage.repair(&entries, &placements).unwrap();
    let bytes_of = |kinds: &[Operation]| {
        let trace = disk.trace().into_iter();
        let counted = trace.filter(|it| kinds.contains(&it.operation));
        counted.map(|it| it.bytes.end - it.bytes.start).sum::<u64>()
    };
    let read = bytes_of(&[Operation::Read, Operation::ReadDevice]);
    let written = bytes_of(&[Operation::Write]);
    println!("a segment of {segment} bytes: {read} bytes read, {written} written");
    assert!(read >= segment && read <= 4 * segment, "{read} bytes read of {segment}");
    assert!(written >= segment / 2 && written <= 4 * segment, "{written} of {segment}");
    drop(damage);
    assert!(manual.wal.examine_segment(&file).unwrap().is_clean());
}

#[test]
fn clean_segment_is_repaired_once_its_name_is_durable() {
    let golden = Golden::marked();
    let (entries, placements) = others(&golden);
    let disk = golden.disk.fork().reopen();
    let (file, byte, _) = entry_byte(&disk);
    let manual = open(&disk);
    let before = disk.read_file(&file).unwrap();
    disk.flip_bit(&file, byte * 8);
    let no_space = rustix::io::Errno::NOSPC.raw_os_error();
    disk.fail(Fault::next(Operation::SyncDir).lasting().errno(no_space));
    let damage = manual.wal.examine_segment(&file).unwrap();
    let error = damage.repair(&entries, &placements).unwrap_err();
    assert!(error.is_shortage(), "{error}");
    drop(damage);
    let damage = manual.wal.examine_segment(&file).unwrap();
    assert!(damage.is_clean(), "the copy has the name");
    let nothing = (BTreeMap::new(), BTreeMap::new());
    let error = damage.repair(&nothing.0, &nothing.1).unwrap_err();
    assert!(error.is_shortage(), "{error}");
    disk.heal();
    damage.repair(&nothing.0, &nothing.1).unwrap();
    drop((damage, manual));
    disk.crash(Crash::LoseAll);
    assert!(disk.reopen().read_file(&file).unwrap() == before, "a crash undid the repair");
}

#[test]
fn several_damaged_parts_of_one_segment_are_repaired_together() {
    let golden = Golden::marked();
    let (entries, placements) = others(&golden);
    let disk = golden.disk.fork().reopen();
    let manual = open(&disk);
    for (file, used, len) in sealed(&disk) {
        let before = disk.read_file(&file).unwrap();
        disk.zero(&file, 4096 + 128..used);
        disk.flip_bit(&file, (len - 100) * 8);
        let damage = manual.wal.examine_segment(&file);
        // Other groups and control frames are gone with the entries: it is refused or whole.
        let repaired = damage.and_then(|damage| {
            assert!(!damage.missing().is_empty());
            damage.repair(&entries, &placements)
        });
        match repaired {
            Ok(()) => assert!(disk.read_file(&file).unwrap() == before),
            Err(error) => assert!(matches!(error, Error::Damaged { .. }), "{error}"),
        }
    }
}

#[test]
fn entry_that_differs_or_is_missing_changes_nothing() {
    let golden = Golden::marked();
    let (mut entries, placements) = others(&golden);
    let (file, byte, index) = entry_byte(&golden.disk);
    let disk = golden.disk.fork().reopen();
    let manual = open(&disk);
    disk.flip_bit(&file, byte * 8);
    let damaged = disk.read_file(&file).unwrap();
    let right = entries.remove(&index).unwrap();
    let repair = |entries: &BTreeMap<u64, Entry>| {
        manual.wal.examine_segment(&file).unwrap().repair(entries, &placements)
    };
    let error = repair(&entries).unwrap_err();
    assert!(error.to_string().contains(&format!("entry {index}")), "{error}");
    let mut wrong = right.clone();
    wrong.id.term += 1;
    entries.insert(index, wrong);
    assert!(matches!(repair(&entries), Err(Error::Damaged { .. })));
    let mut wrong = right.clone();
    wrong.head = vec![b'x'; right.head.len()].into();
    entries.insert(index, wrong);
    if !right.head.is_empty() {
        assert!(matches!(repair(&entries), Err(Error::Damaged { .. })));
    }
    assert!(disk.read_file(&file).unwrap() == damaged, "nothing was changed");
    entries.insert(index, right);
    disk.set_free_bytes(Some(1000));
    assert!(matches!(repair(&entries), Err(Error::DiskFull { .. })));
    disk.set_free_bytes(None);
    repair(&entries).unwrap();
    assert!(manual.wal.examine_segment(&file).unwrap().is_clean());
    assert!(streams_are_right(&manual.wal, &golden.truth));
}

/// A crash at any change to the disk leaves the damaged segment or the repaired one.
#[test]
fn crash_during_a_repair_leaves_one_of_both() {
    let mut golden = Golden::marked();
    let (entries, placements) = others(&golden);
    drop(open(&golden.disk));
    golden.disk = golden.disk.reopen();
    let (file, byte, _) = entry_byte(&golden.disk);
    let run = |stop: Option<u64>, crash: Crash<'_>| {
        let disk = golden.disk.fork().reopen();
        let manual = open(&disk);
        disk.flip_bit(&file, byte * 8);
        let damage = manual.wal.examine_segment(&file).unwrap();
        assert!(!damage.is_clean());
        let first = disk.changes();
        disk.stop_at_change(stop.map(|stop| first + stop));
        let repaired = damage.repair(&entries, &placements).is_ok();
        let changes = disk.changes() - first;
        drop((damage, manual));
        disk.crash(crash);
        let disk = disk.reopen();
        let found = verify(&disk);
        assert!(found.iter().all(|it| it.file == file), "{found:?}");
        assert!(!repaired || stop.is_some() || found.is_empty(), "{found:?}");
        drop(open(&disk));
        changes
    };
    let changes = run(None, Crash::LoseAll);
    assert!(changes > 3, "{changes}");
    for stop in 0..changes {
        for crash in [Crash::LoseAll, Crash::KeepAll, Crash::Seeded(stop)] {
            run(Some(stop), crash);
        }
    }
}
