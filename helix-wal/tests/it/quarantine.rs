//! A damaged log that is put aside for a new one: whatever cuts that short, whose it was and its
//! vote are not forgotten, and nothing takes the new log for the old one. And what is sealed, read
//! anew: every damage is found.

use std::sync::Arc;

use bytes::Bytes;
use helix_wal::storage::{Crash, SimulatedDisk};
use helix_wal::{Error, LogId, Placement, QuarantinedLog, SegmentState, Wal, inspect};

use crate::common::{TestRng, ManualWal, PrintOnPanic, entry, rounds, seed, small_options};

const VOTE: Bytes = Bytes::from_static(b"term 7, for 2");

/// A log of some segments, sealed ones among them, with a vote.
fn golden() -> SimulatedDisk {
    let disk = SimulatedDisk::new(1);
    let mut manual = ManualWal::open(Arc::new(disk.clone()), small_options()).unwrap();
    for index in 0..40 {
        manual.wal.append(vec![entry(LogId { term: 7, index }, 3, 30, 5000)], Box::new(drop));
        if index == 35 {
            manual.wal.save_vote(VOTE, Box::new(drop));
        }
        manual.settle();
        manual.wal
            .place(index, Some(Placement { stream: 3, first: index, count: 1, time: 1 }))
            .unwrap();
    }
    manual.idle();
    manual.wal.close();
    manual.settle();
    assert!(manual.wal.has_ended());
    disk
}

fn newest(disk: &SimulatedDisk) -> String {
    let mut names = disk.files();
    names.retain(|name| name.ends_with(".seg"));
    names.sort_unstable();
    names.pop().unwrap()
}

fn is_damaged(disk: &SimulatedDisk) -> bool {
    matches!(ManualWal::open(Arc::new(disk.reopen()), small_options()), Err(Error::Damaged { .. }))
}

fn put_aside(disk: &SimulatedDisk) -> Result<QuarantinedLog, Error> {
    Wal::quarantine(disk, "a bit is another", Bytes::new())
}

#[test]
fn a_log_that_is_put_aside_makes_way_and_is_gone_at_the_end() {
    let disk = golden();
    disk.remove_file("0000000000000001.seg");
    assert!(is_damaged(&disk));
    let aside = put_aside(&disk).unwrap();
    let whose = small_options().identity;
    // What is missing was sealed: the newest vote cannot have been in it.
    assert_eq!((&aside.identity, &aside.vote), (&whose, &Some(VOTE)));
    assert_eq!(Wal::quarantined_log(&disk).unwrap(), Some(aside.clone()));
    assert!(Wal::exists(&disk).unwrap());
    let manual = ManualWal::open(Arc::new(disk.clone()), small_options()).unwrap();
    assert!(manual.recovered.created);
    assert_eq!(manual.wal.state().last, None);
    drop(manual);
    assert_eq!(Wal::quarantined_log(&disk).unwrap(), Some(aside), "until it is said to be over");
    Wal::end_repair(&disk).unwrap();
    assert_eq!(Wal::quarantined_log(&disk).unwrap(), None);
    assert!(!disk.files().iter().any(|name| name.starts_with("aside")), "{:?}", disk.files());
}

#[test]
fn a_vote_that_may_be_in_what_is_damaged_is_not_known() {
    for spoil in [
        |disk: &SimulatedDisk| disk.flip_bit(&newest(disk), (4096 + 300) * 8),
        |disk: &SimulatedDisk| disk.flip_bit("state", 400),
        |disk: &SimulatedDisk| disk.remove_file(&newest(disk)),
    ] {
        let disk = golden();
        spoil(&disk);
        assert!(is_damaged(&disk));
        let aside = put_aside(&disk).unwrap();
        assert_eq!((aside.identity, aside.vote), (small_options().identity, None));
    }
}

#[test]
fn a_folder_that_says_nothing_of_its_owner_is_told() {
    let disk = SimulatedDisk::new(1);
    assert!(matches!(put_aside(&disk), Err(Error::Damaged { .. })));
    let aside = Wal::quarantine(&disk, "all is gone", small_options().identity).unwrap();
    assert_eq!((aside.identity, aside.vote), (small_options().identity, None));
}

#[test]
fn any_file_of_a_log_says_whose_it_is() {
    let whose = Some(small_options().identity);
    let disk = golden();
    assert_eq!(Wal::identity(&disk).unwrap(), whose);
    disk.flip_bit("state", 400);
    assert_eq!(Wal::identity(&disk).unwrap(), whose, "a segment does");
    let mut segments = disk.files();
    segments.retain(|name| name.ends_with(".seg"));
    for (at, name) in segments.iter().enumerate() {
        disk.flip_bit(name, 4 * 8);
        let is_last = at + 1 == segments.len();
        assert_eq!(Wal::identity(&disk).unwrap(), whose.clone().filter(|_| !is_last), "{name}");
    }
}

#[test]
fn a_crash_while_a_log_is_put_aside_forgets_nothing() {
    let golden = golden();
    golden.remove_file("0000000000000001.seg");
    let mut rng = TestRng::new(seed("a_crash_while_a_log_is_put_aside_forgets_nothing"));
    let whole = golden.fork();
    let before = whole.changes();
    put_aside(&whole).unwrap();
    let steps = whole.changes() - before;
    assert!(steps > 5);
    for step in (0..steps).cycle().take(usize::try_from(steps * 4 * rounds()).unwrap()) {
        let disk = golden.fork();
        disk.stop_at_change(Some(before + step));
        let put = put_aside(&disk);
        let _context = PrintOnPanic(format!("stopped at change {step} of {steps}: {put:?}"));
        disk.crash(Crash::Seeded(rng.seed()));
        let disk = disk.reopen();
        let aside = match Wal::quarantined_log(&disk).unwrap() {
            Some(aside) => aside,
            // Nothing has come of it.
            None => {
                assert!(is_damaged(&disk));
                put_aside(&disk).unwrap()
            }
        };
        assert_eq!((aside.identity, aside.vote), (small_options().identity, Some(VOTE)));
        let manual = ManualWal::open(Arc::new(disk.clone()), small_options()).unwrap();
        assert!(manual.recovered.created, "nothing of the old log is left in the way");
    }
}

/// What a new log is damaged by is another matter than what the one before was.
#[test]
fn a_new_log_that_is_damaged_too_is_put_aside_with_a_vote_of_its_own() {
    let disk = golden();
    disk.flip_bit("state", 400);
    assert_eq!(put_aside(&disk).unwrap().vote, None);
    let mut manual = ManualWal::open(Arc::new(disk.clone()), small_options()).unwrap();
    manual.wal.save_vote(Bytes::from_static(b"term 8"), Box::new(drop));
    manual.idle();
    drop(manual);
    let disk = disk.reopen();
    let aside = put_aside(&disk).unwrap();
    assert_eq!(aside.vote.as_deref(), Some(&b"term 8"[..]));
    let asides = disk.files().iter().filter(|name| name.ends_with("-state")).count();
    assert_eq!(asides, 2, "both are kept: {:?}", disk.files());
}

/// All damage that one round finds, and the bytes that it has read.
fn scrub(disk: &SimulatedDisk) -> (Vec<Error>, u64) {
    let manual = ManualWal::open(Arc::new(disk.reopen()), small_options()).unwrap();
    let (mut scrub, mut found, mut bytes) = (manual.wal.scrub(), Vec::new(), 0);
    loop {
        let scrubbed = scrub.step();
        found.extend(scrubbed.damage);
        bytes += scrubbed.bytes;
        if scrubbed.is_round {
            return (found, bytes);
        }
    }
}

#[test]
fn whatever_is_damaged_in_a_sealed_segment_is_found() {
    let golden = golden();
    let (found, bytes) = scrub(&golden);
    assert!(found.is_empty(), "{found:?}");
    let segments = inspect(&golden).unwrap().segments;
    let sealed: Vec<_> = segments.iter().filter(|it| it.state == SegmentState::Sealed).collect();
    assert!(sealed.len() > 1);
    let used: u64 = sealed.iter().map(|it| it.used_bytes).sum();
    assert!(bytes >= used - sealed.len() as u64 * 4096, "{bytes} of {used}");
    let mut rng = TestRng::new(seed("whatever_is_damaged_in_a_sealed_segment_is_found"));
    for segment in &sealed {
        let spans = [(0, segment.used_bytes), (segment.file_bytes - 4096, segment.file_bytes)];
        for _ in 0..30 * rounds() {
            let (from, to) = spans[usize::try_from(rng.below(2)).unwrap()];
            let byte = from + rng.below(to - from);
            let disk = golden.fork();
            disk.flip_bit(&segment.file, byte * 8 + rng.below(8));
            let damaged = matches!(helix_wal::verify(&disk).as_slice(), [_, ..]);
            let _context = PrintOnPanic(format!("byte {byte} of {}", segment.file));
            let Ok(manual) = ManualWal::open(Arc::new(disk.reopen()), small_options()) else { continue };
            let is_known = !manual.recovered.quarantined.is_empty();
            drop(manual);
            let (found, _) = scrub(&disk);
            assert_eq!(is_known || !found.is_empty(), damaged, "{found:?}");
        }
    }
}

/// All entries of a log that can be read.
fn indexes(manual: &ManualWal) -> Vec<u64> {
    let last = manual.wal.state().last.map_or(0, |id| id.index);
    let is_there = |index: &u64| {
        let read = manual.wal.read(*index..*index + 1, 1, helix_wal::ReadMode::Blocking);
        read.is_ok_and(|found| found.is_some_and(|entries| !entries.is_empty()))
    };
    (0..=last).filter(is_there).collect()
}

#[test]
fn a_damaged_end_is_named_and_given_up_only_when_asked_for() {
    let golden = golden();
    let well: Arc<dyn helix_wal::storage::Storage> = Arc::new(golden.fork());
    assert!(Wal::damaged_end(&well).unwrap().is_none());
    let disk = golden.fork();
    let newest = newest(&disk);
    // Another entry behind the damage.
    let segment = inspect(&disk).unwrap().segments.pop().unwrap();
    assert_eq!(segment.file, newest);
    disk.flip_bit(&newest, (4096 + 300) * 8);
    assert!(is_damaged(&disk));
    let files = disk.files();
    let storage: Arc<dyn helix_wal::storage::Storage> = Arc::new(disk.clone());
    let end = Wal::damaged_end(&storage).unwrap().expect("it is damaged");
    assert_eq!((&end.file, end.bytes.start), (&newest, 4096));
    let (first, last) = segment.entries.unwrap();
    assert_eq!(end.kept.map(|id| id.index), Some(first - 1));
    let lost = end.streams.first().expect("some of it verifies");
    assert_eq!((lost.stream, lost.last_index), (3, last.index));
    assert!(is_damaged(&disk), "nothing was changed");
    assert_eq!(disk.files(), files);
    let before = disk.changes();
    let mut rng = TestRng::new(seed("a_damaged_end_is_named_and_given_up_only_when_asked_for"));
    let whole = disk.fork();
    Wal::truncate_damaged_end(&(Arc::new(whole.clone()) as _)).unwrap();
    let steps = whole.changes() - before;
    let kept: Vec<u64> = (0..first).collect();
    let manual = ManualWal::open(Arc::new(whole.reopen()), small_options()).unwrap();
    assert_eq!(indexes(&manual), kept);
    for step in 0..steps {
        let disk = disk.fork();
        disk.stop_at_change(Some(before + step));
        assert!(Wal::truncate_damaged_end(&(Arc::new(disk.clone()) as _)).is_err());
        disk.crash(Crash::Seeded(rng.seed()));
        let disk = disk.reopen();
        match ManualWal::open(Arc::new(disk.reopen()), small_options()) {
            Ok(manual) => assert_eq!(indexes(&manual), kept, "stopped at {step}"),
            Err(Error::Damaged { .. }) => {
                let end = Wal::damaged_end(&(Arc::new(disk.clone()) as _)).unwrap();
                assert_eq!(end.expect("as before").bytes.start, 4096, "stopped at {step}");
            }
            Err(error) => panic!("stopped at {step}: {error}"),
        }
    }
}
