//! Quarantine of a damaged log, which is replaced by a new one. A crash at any point keeps the
//! identity and the vote, and never mixes up the two logs. Also scrubs: every damage to sealed
//! segments is found.

use std::sync::Arc;

use bytes::Bytes;
use helix_wal::storage::{Crash, SimulatedDisk};
use helix_wal::{Error, LogId, Placement, QuarantinedLog, SegmentState, Wal, inspect};

use crate::common::{ManualWal, PrintOnPanic, TestRng, entry, rounds, seed, small_options};

const VOTE: Bytes = Bytes::from_static(b"term 7, for 2");

/// Builds a log with sealed segments and a vote.
fn golden() -> SimulatedDisk {
    let disk = SimulatedDisk::new(1);
    let mut manual = ManualWal::open(Arc::new(disk.clone()), small_options()).unwrap();
    for index in 0..40 {
        manual.wal.append(vec![entry(LogId { term: 7, index }, 3, 30, 5000)], Box::new(drop));
        if index == 35 {
            manual.wal.save_vote(VOTE, Box::new(drop));
        }
        manual.settle();
        manual
            .wal
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

fn quarantine(disk: &SimulatedDisk) -> Result<QuarantinedLog, Error> {
    Wal::quarantine(disk, "a bit is flipped", Bytes::new())
}

#[test]
fn quarantined_log_is_replaced_and_finally_removed() {
    let disk = golden();
    disk.remove_file("0000000000000001.seg");
    assert!(is_damaged(&disk));
    let quarantined = quarantine(&disk).unwrap();
    let identity = small_options().identity;
    // The missing segment was sealed, so it cannot have the newest vote.
    assert_eq!((&quarantined.identity, &quarantined.vote), (&identity, &Some(VOTE)));
    assert_eq!(Wal::quarantined_log(&disk).unwrap(), Some(quarantined.clone()));
    assert!(Wal::exists(&disk).unwrap());
    let manual = ManualWal::open(Arc::new(disk.clone()), small_options()).unwrap();
    assert!(manual.recovered.created);
    assert_eq!(manual.wal.state().last, None);
    drop(manual);
    assert_eq!(Wal::quarantined_log(&disk).unwrap(), Some(quarantined), "until the repair ends");
    Wal::end_repair(&disk).unwrap();
    assert_eq!(Wal::quarantined_log(&disk).unwrap(), None);
    assert!(!disk.files().iter().any(|name| name.starts_with("aside")), "{:?}", disk.files());
}

#[test]
fn vote_is_unknown_if_it_may_be_damaged() {
    for spoil in [
        |disk: &SimulatedDisk| disk.flip_bit(&newest(disk), (4096 + 300) * 8),
        |disk: &SimulatedDisk| disk.flip_bit("state", 400),
        |disk: &SimulatedDisk| disk.remove_file(&newest(disk)),
    ] {
        let disk = golden();
        spoil(&disk);
        assert!(is_damaged(&disk));
        let quarantined = quarantine(&disk).unwrap();
        assert_eq!((quarantined.identity, quarantined.vote), (small_options().identity, None));
    }
}

#[test]
fn quarantine_takes_given_identity_if_none_is_readable() {
    let disk = SimulatedDisk::new(1);
    assert!(matches!(quarantine(&disk), Err(Error::Damaged { .. })));
    let quarantined =
        Wal::quarantine(&disk, "all files are lost", small_options().identity).unwrap();
    assert_eq!((quarantined.identity, quarantined.vote), (small_options().identity, None));
}

#[test]
fn any_file_of_a_log_has_its_identity() {
    let identity = Some(small_options().identity);
    let disk = golden();
    assert_eq!(Wal::identity(&disk).unwrap(), identity);
    disk.flip_bit("state", 400);
    assert_eq!(Wal::identity(&disk).unwrap(), identity, "read from a segment");
    let mut segments = disk.files();
    segments.retain(|name| name.ends_with(".seg"));
    for (at, name) in segments.iter().enumerate() {
        disk.flip_bit(name, 4 * 8);
        let is_last = at + 1 == segments.len();
        assert_eq!(Wal::identity(&disk).unwrap(), identity.clone().filter(|_| !is_last), "{name}");
    }
}

#[test]
fn crash_during_quarantine_loses_nothing() {
    let golden = golden();
    golden.remove_file("0000000000000001.seg");
    let mut rng = TestRng::new(seed("crash_during_quarantine_loses_nothing"));
    let whole = golden.fork();
    let before = whole.changes();
    quarantine(&whole).unwrap();
    let steps = whole.changes() - before;
    assert!(steps > 5);
    for step in (0..steps).cycle().take(usize::try_from(steps * 4 * rounds()).unwrap()) {
        let disk = golden.fork();
        disk.stop_at_change(Some(before + step));
        let result = quarantine(&disk);
        let _context = PrintOnPanic(format!("stopped at change {step} of {steps}: {result:?}"));
        disk.crash(Crash::Seeded(rng.seed()));
        let disk = disk.reopen();
        let quarantined = match Wal::quarantined_log(&disk).unwrap() {
            Some(quarantined) => quarantined,
            // The quarantine did not take effect.
            None => {
                assert!(is_damaged(&disk));
                quarantine(&disk).unwrap()
            }
        };
        assert_eq!(
            (quarantined.identity, quarantined.vote),
            (small_options().identity, Some(VOTE))
        );
        let manual = ManualWal::open(Arc::new(disk.clone()), small_options()).unwrap();
        assert!(manual.recovered.created, "no file of the old log is left in its place");
    }
}

/// A new log that is damaged too is quarantined with its own vote.
#[test]
fn damaged_replacement_is_quarantined_with_its_own_vote() {
    let disk = golden();
    disk.flip_bit("state", 400);
    assert_eq!(quarantine(&disk).unwrap().vote, None);
    let mut manual = ManualWal::open(Arc::new(disk.clone()), small_options()).unwrap();
    manual.wal.save_vote(Bytes::from_static(b"term 8"), Box::new(drop));
    manual.idle();
    drop(manual);
    let disk = disk.reopen();
    let quarantined = quarantine(&disk).unwrap();
    assert_eq!(quarantined.vote.as_deref(), Some(&b"term 8"[..]));
    let quarantined_states = disk.files().iter().filter(|name| name.ends_with("-state")).count();
    assert_eq!(quarantined_states, 2, "both are kept: {:?}", disk.files());
}

/// Runs one round of scrubbing. Returns all damage and the number of bytes read.
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
fn scrub_finds_every_damage_to_sealed_segments() {
    let golden = golden();
    let (found, bytes) = scrub(&golden);
    assert!(found.is_empty(), "{found:?}");
    let segments = inspect(&golden).unwrap().segments;
    let sealed: Vec<_> = segments.iter().filter(|it| it.state == SegmentState::Sealed).collect();
    assert!(sealed.len() > 1);
    let used: u64 = sealed.iter().map(|it| it.used_bytes).sum();
    assert!(bytes >= used - sealed.len() as u64 * 4096, "{bytes} of {used}");
    let mut rng = TestRng::new(seed("scrub_finds_every_damage_to_sealed_segments"));
    for segment in &sealed {
        let spans = [(0, segment.used_bytes), (segment.file_bytes - 4096, segment.file_bytes)];
        for _ in 0..30 * rounds() {
            let (from, to) = spans[usize::try_from(rng.below(2)).unwrap()];
            let byte = from + rng.below(to - from);
            let disk = golden.fork();
            disk.flip_bit(&segment.file, byte * 8 + rng.below(8));
            let damaged = matches!(helix_wal::verify(&disk).as_slice(), [_, ..]);
            let _context = PrintOnPanic(format!("byte {byte} of {}", segment.file));
            let Ok(manual) = ManualWal::open(Arc::new(disk.reopen()), small_options()) else {
                continue;
            };
            let is_known = !manual.recovered.quarantined.is_empty();
            drop(manual);
            let (found, _) = scrub(&disk);
            assert_eq!(is_known || !found.is_empty(), damaged, "{found:?}");
        }
    }
}

/// Returns the indexes of all readable entries.
fn indexes(manual: &ManualWal) -> Vec<u64> {
    let last = manual.wal.state().last.map_or(0, |id| id.index);
    let is_there = |index: &u64| {
        let read = manual.wal.read(*index..*index + 1, 1, helix_wal::ReadMode::Blocking);
        read.is_ok_and(|found| found.is_some_and(|entries| !entries.is_empty()))
    };
    (0..=last).filter(is_there).collect()
}

#[test]
fn damaged_end_is_truncated_only_on_request() {
    let golden = golden();
    let intact: Arc<dyn helix_wal::storage::Storage> = Arc::new(golden.fork());
    assert!(Wal::damaged_end(&intact).unwrap().is_none());
    let disk = golden.fork();
    let newest = newest(&disk);
    // The damage has entries after it.
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
    let lost = end.streams.first().expect("some entries verify");
    assert_eq!((lost.stream, lost.last_index), (3, last.index));
    assert!(is_damaged(&disk), "the log is unchanged");
    assert_eq!(disk.files(), files);
    let before = disk.changes();
    let mut rng = TestRng::new(seed("damaged_end_is_truncated_only_on_request"));
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
