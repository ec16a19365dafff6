//! Shortages: no disk space, an exceeded quota, no file descriptor, no memory. Nothing is damaged,
//! nothing ends, and everything continues once there is enough again.

use std::io::ErrorKind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use bytes::Bytes;
use helix_wal::storage::{Crash, Fault, Operation, SimulatedDisk};
use helix_wal::{
    Entry, Error, FileCache, LogId, NextStep, Options, Placement, ReadMode, SegmentState, Wal,
    inspect, verify,
};
use rustix::io::Errno;

use crate::common::{
    AppendResults, ManualWal, PrintOnPanic, append, same_entry, small_options, take,
};

fn open(disk: &SimulatedDisk, options: &Options) -> ManualWal {
    ManualWal::open(Arc::new(disk.clone()), options.clone()).unwrap()
}

fn expect_entries(wal: &Wal, entries: &[Entry]) {
    for expected in entries {
        let at = expected.id.index;
        let found = wal.read(at..at + 1, 100_000, ReadMode::Blocking).unwrap().unwrap();
        assert!(same_entry(&found[0], expected), "entry {at}");
    }
}

/// Errors of a disk without space, as kinds and as numbers.
fn no_space(operation: Operation) -> Vec<Fault> {
    let fault = || Fault::next(operation).lasting();
    vec![
        fault().error(ErrorKind::StorageFull),
        fault().error(ErrorKind::QuotaExceeded),
        fault().errno(Errno::NOSPC.raw_os_error()),
        fault().errno(Errno::DQUOT.raw_os_error()),
    ]
}

/// A write into a segment may find no space, as on a file system that copies on write. The group
/// waits, nothing is acknowledged, and the same bytes are written once there is space.
#[test]
fn group_without_space_waits_and_is_written_unchanged() {
    for (seed, fault) in
        no_space(Operation::Write).into_iter().chain(no_space(Operation::Sync)).enumerate()
    {
        let _context = PrintOnPanic(format!("{fault:?}"));
        let disk = SimulatedDisk::new(seed as u64);
        let mut manual = open(&disk, &small_options());
        manual.idle();
        let results = AppendResults::default();
        let mut entries = vec![append(&manual.wal, &results, 3000)];
        manual.idle();
        assert!(matches!(take(&results)[..], [Ok(())]));

        disk.fail(fault);
        entries.push(append(&manual.wal, &results, 9000));
        entries.push(append(&manual.wal, &results, 200));
        for _ in 0..5 {
            manual.idle();
            assert!(take(&results).is_empty(), "neither acknowledged nor refused");
            assert!(matches!(manual.wal.writable(), Err(Error::DiskFull { .. })));
            assert!(matches!(manual.wal.check_spare(), Err(Error::DiskFull { .. })));
            assert!(manual.wal.unsynced_for().is_some());
        }
        expect_entries(&manual.wal, &entries);
        assert_eq!(manual.wal.state().synced, Some(entries[0].id));
        // A crash meanwhile leaves a torn group at most.
        for crash in [Crash::KeepAll, Crash::LoseAll, Crash::Seeded(seed as u64)] {
            let fork = disk.fork();
            fork.crash(crash);
            expect_entries(&open(&fork.reopen(), &small_options()).wal, &entries[..1]);
        }

        disk.heal();
        manual.idle();
        assert!(matches!(take(&results)[..], [Ok(()), Ok(())]));
        manual.wal.writable().unwrap();
        entries.push(append(&manual.wal, &results, 30_000));
        entries.push(append(&manual.wal, &results, 30_000));
        manual.idle();
        assert!(matches!(take(&results)[..], [Ok(()), Ok(())]));
        drop(manual);
        disk.crash(Crash::LoseAll);
        assert_eq!(verify(&disk.reopen()), []);
        let manual = open(&disk.reopen(), &small_options());
        expect_entries(&manual.wal, &entries);
        assert_eq!(manual.wal.state().last, entries.last().map(|entry| entry.id));
    }
}

#[test]
fn waiting_group_does_not_delay_a_close() {
    let disk = SimulatedDisk::new(1);
    let mut manual = open(&disk, &small_options());
    manual.idle();
    let results = AppendResults::default();
    disk.fail(Fault::next(Operation::Write).lasting().error(ErrorKind::StorageFull));
    append(&manual.wal, &results, 3000);
    manual.idle();
    manual.wal.close();
    manual.settle();
    assert!(matches!(take(&results)[..], [Err(Error::Closed)]));
    assert!(manual.wal.has_ended());
}

/// Runs appends, rolls, seals, checkpoints, trims and compactions. Returns the acknowledged
/// entries; refused ones are appended again.
fn work(manual: &mut ManualWal, rounds: u64) -> Vec<Entry> {
    let results = AppendResults::default();
    let mut acknowledged = Vec::new();
    for _ in 0..rounds {
        let mut appended = Vec::new();
        for payload in [9000, 300, 5000] {
            appended.push(append(&manual.wal, &results, payload));
        }
        manual.wal.save_vote(Bytes::from_static(b"v"), Box::new(drop));
        manual.idle();
        let sent = take(&results);
        for (entry, result) in appended.into_iter().zip(sent) {
            match result {
                Ok(()) => acknowledged.push(entry),
                Err(error) => assert!(error.is_shortage(), "{error}"),
            }
        }
        let synced = manual.wal.state().synced;
        let first = acknowledged.first().map_or(0, |entry: &Entry| entry.id.index);
        for entry in &acknowledged {
            let index = entry.id.index;
            let placement = Placement { stream: 1, first: index, count: 1, time: 1 };
            // Ignored: it may be placed already.
            let _ = manual.wal.place(index, Some(placement));
        }
        if let Some(at) = synced
            && acknowledged.last().is_some_and(|last| last.id.index >= at.index)
        {
            match manual.wal.checkpoint(at, Bytes::from_static(b"state")) {
                Ok(()) => manual.wal.purge(at, Box::new(drop)),
                Err(error) => assert!(error.is_shortage(), "{error}"),
            }
            if at.index > first + 6 {
                manual.wal.trim(1, at.index - 3);
            }
        }
        manual.idle();
        let writable = manual.wal.writable();
        assert!(writable.as_ref().err().is_none_or(Error::is_shortage), "{writable:?}");
    }
    acknowledged
}

/// A lasting shortage in any call does not end the log, which continues afterwards.
#[test]
fn shortage_in_any_call_does_not_end_the_log() {
    let kinds = [
        Operation::Write,
        Operation::Sync,
        Operation::Rename,
        Operation::Exchange,
        Operation::Create,
        Operation::Remove,
        Operation::Open,
        Operation::SyncDir,
    ];
    let mut reached = 0;
    for kind in kinds {
        let errnos = match kind {
            Operation::Open => vec![Errno::MFILE],
            Operation::Create => vec![Errno::NOSPC, Errno::NFILE],
            Operation::SyncDir => vec![Errno::NOSPC, Errno::DQUOT],
            _ => vec![Errno::DQUOT, Errno::NOMEM],
        };
        for errno in errnos {
            for after in (0..24).chain([40, 60]) {
                let _context = PrintOnPanic(format!("{errno:?} at {kind:?} number {after}"));
                let disk = SimulatedDisk::new(after);
                let mut manual = open(&disk, &small_options());
                manual.idle();
                let fault = Fault::next(kind).after(after).errno(errno.raw_os_error());
                disk.fail(fault.lasting());
                work(&mut manual, 6);
                reached += u64::from(manual.wal.writable().is_err());
                disk.heal();
                for _ in 0..3 {
                    manual.now += Duration::from_secs(1);
                    manual.idle();
                }
                manual.wal.writable().unwrap();
                let entries = work(&mut manual, 3);
                assert!(entries.len() >= 9, "{}", entries.len());
                drop(manual);
                disk.crash(Crash::LoseAll);
                let disk = disk.reopen();
                assert_eq!(verify(&disk), []);
                let manual = open(&disk, &small_options());
                let last = entries.last().unwrap();
                let found =
                    manual.wal.read_stream(1, last.id.index, u64::MAX, 1, ReadMode::Blocking);
                assert_eq!(found.unwrap().unwrap()[0].id, last.id);
            }
        }
    }
    assert!(reached > 20, "too few shortages were reached: {reached}");
}

/// A directory sync finds no space, then the power is lost: nothing acknowledged is lost.
#[test]
fn power_loss_after_a_directory_sync_without_space_loses_nothing() {
    let mut unsynced = 0;
    for after in 0..40 {
        for crash in [Crash::LoseAll, Crash::KeepAll, Crash::Seeded(after)] {
            let _context = PrintOnPanic(format!("{crash:?} after sync {after}"));
            let disk = SimulatedDisk::new(after);
            let mut manual = open(&disk, &small_options());
            manual.idle();
            let short = Fault::next(Operation::SyncDir).after(after).lasting();
            disk.fail(short.errno(Errno::DQUOT.raw_os_error()));
            let entries = work(&mut manual, 12);
            let at = manual.wal.state().synced.unwrap();
            unsynced += u64::from(manual.wal.checkpoint(at, Bytes::from_static(b"last")).is_err());
            drop(manual);
            disk.crash(crash);
            let disk = disk.reopen();
            assert_eq!(verify(&disk), []);
            let manual = open(&disk, &small_options());
            let Some(last) = entries.last() else { continue };
            assert!(manual.wal.state().last.is_some_and(|found| found >= last.id));
            let purged = manual.wal.state().purged.map_or(0, |purged| purged.index + 1);
            if last.id.index >= purged {
                expect_entries(&manual.wal, std::slice::from_ref(last));
            }
        }
    }
    assert!(unsynced > 60, "{unsynced}");
}

/// Fills the disk, until an append is refused. Returns the log and its entries.
fn full_log(disk: &SimulatedDisk) -> (ManualWal, Vec<Entry>) {
    let mut manual = open(disk, &small_options());
    manual.idle();
    let results = AppendResults::default();
    let mut entries = Vec::new();
    disk.set_free_bytes(Some(0));
    loop {
        let entry = append(&manual.wal, &results, 3000);
        manual.idle();
        match take(&results).pop().unwrap() {
            Ok(()) => entries.push(entry),
            Err(error) => {
                assert!(matches!(error, Error::DiskFull { .. }), "{error}");
                return (manual, entries);
            }
        }
        assert!(entries.len() < 100, "the disk never fills up");
    }
}

/// Starts again and again although nothing becomes free.
#[test]
fn full_disk_allows_any_number_of_restarts() {
    let disk = SimulatedDisk::new(3);
    let (mut manual, entries) = full_log(&disk);
    for restart in 0..8 {
        let _context = PrintOnPanic(format!("restart {restart}"));
        drop(manual);
        // Something else takes what the restart has freed.
        disk.set_free_bytes(Some(0));
        if restart % 2 == 1 {
            disk.crash(Crash::LoseAll);
        }
        manual = open(&disk.reopen(), &small_options());
        manual.idle();
        expect_entries(&manual.wal, &entries);
        manual.wal.save_vote(Bytes::from(vec![restart; 40]), Box::new(|voted| voted.unwrap()));
        manual.idle();
        // Ignored: after a checkpoint it is placed.
        let _ = manual.wal.place(0, None);
        let at = LogId { term: 1, index: 0 };
        manual.wal.checkpoint(at, Bytes::from_static(b"state")).unwrap();
    }
    disk.set_free_bytes(None);
    for _ in 0..3 {
        manual.idle();
    }
    manual.wal.writable().unwrap();
    let results = AppendResults::default();
    append(&manual.wal, &results, 3000);
    manual.idle();
    assert!(matches!(take(&results)[..], [Ok(())]));
}

/// An open that finds no space leaves what it used to the next one.
#[test]
fn interrupted_open_keeps_the_space_for_the_next() {
    let golden = SimulatedDisk::new(3);
    let (manual, entries) = full_log(&golden);
    drop(manual);
    let mut failed = 0;
    for operation in [Operation::Write, Operation::Sync, Operation::Exchange, Operation::Rename] {
        for after in 0..8 {
            let _context = PrintOnPanic(format!("{operation:?} number {after}"));
            let disk = golden.fork().reopen();
            for _ in 0..3 {
                disk.set_free_bytes(Some(0));
                disk.fail(Fault::next(operation).after(after).error(ErrorKind::StorageFull));
                let opened = ManualWal::open(Arc::new(disk.clone()), small_options());
                if let Err(error) = &opened {
                    assert!(error.is_shortage(), "{error}");
                    failed += 1;
                }
                drop(opened);
                disk.heal();
            }
            disk.set_free_bytes(Some(0));
            expect_entries(&open(&disk, &small_options()).wal, &entries);
        }
    }
    assert!(failed > 10, "{failed}");
}

/// Repeated opens that fail use the files of the first one.
#[test]
fn repeated_opens_do_not_fill_the_disk() {
    let disk = SimulatedDisk::new(3);
    let mut manual = open(&disk, &small_options());
    manual.idle();
    let results = AppendResults::default();
    let entries: Vec<Entry> = (0..3).map(|_| append(&manual.wal, &results, 3000)).collect();
    manual.idle();
    drop(manual);
    let new_files = || disk.files().iter().filter(|name| name.ends_with(".new")).count();
    let mut failed = 0;
    for restart in 0..12 {
        // Once when the state is read, and again after the tail was copied.
        disk.fail(no_descriptor(Operation::Open).of("state").after(1 + restart % 2));
        let opened = ManualWal::open(Arc::new(disk.clone()), small_options());
        failed += u64::from(opened.is_err());
        drop(opened);
        assert!(new_files() <= 1, "{:?}", disk.files());
        disk.heal();
    }
    assert!(failed > 5, "{failed}");
    disk.crash(Crash::LoseAll);
    expect_entries(&open(&disk.reopen(), &small_options()).wal, &entries);
}

/// A failed directory sync leaves it open which state a crash restores. The segments of both are
/// needed.
#[test]
fn open_after_failed_directory_sync_overwrites_no_old_segment() {
    let golden = SimulatedDisk::new(3);
    let (manual, entries) = full_log(&golden);
    drop(manual);
    let mut failed = 0;
    for synced in 0..4 {
        for operation in [Operation::Write, Operation::Sync] {
            for after in 0..8 {
                let _context = PrintOnPanic(format!("{synced}, {operation:?} number {after}"));
                let disk = golden.fork().reopen();
                disk.set_free_bytes(Some(0));
                disk.fail(Fault::next(Operation::SyncDir).after(synced).lasting());
                drop(ManualWal::open(Arc::new(disk.clone()), small_options()));
                disk.heal();
                disk.set_free_bytes(Some(0));
                disk.fail(Fault::next(operation).after(after).error(ErrorKind::StorageFull));
                let opened = ManualWal::open(Arc::new(disk.clone()), small_options());
                failed += u64::from(opened.is_err());
                drop(opened);
                disk.crash(Crash::LoseAll);
                let disk = disk.reopen();
                // The crash also lost the spare state file.
                disk.set_free_bytes(None);
                assert_eq!(verify(&disk), []);
                expect_entries(&open(&disk, &small_options()).wal, &entries);
            }
        }
    }
    assert!(failed > 10, "{failed}");
}

/// A footer that finds no space waits, and what frees space does not wait for it.
#[test]
fn seal_without_space_does_not_stop_freeing() {
    let disk = SimulatedDisk::new(3);
    let options = Options { compaction_bytes_per_second: 0, ..small_options() };
    let mut manual = open(&disk, &options);
    manual.idle();
    let results = AppendResults::default();
    let segments = || disk.files().iter().filter(|name| name.ends_with(".seg")).count();
    let roll = |manual: &mut ManualWal, upto: usize| {
        while segments() < upto {
            let index = append(&manual.wal, &results, 9000).id.index;
            while manual.step_writer() == NextStep::Now {}
            let placement = Placement { stream: 1, first: index, count: 1, time: 1 };
            manual.wal.place(index, Some(placement)).unwrap();
        }
    };
    for upto in 2..5 {
        roll(&mut manual, upto);
        manual.idle();
    }
    roll(&mut manual, 5);
    let at = manual.wal.state().synced.unwrap();
    manual.wal.checkpoint(at, Bytes::from_static(b"state")).unwrap();
    manual.wal.purge(at, Box::new(drop));
    while manual.step_writer() == NextStep::Now {}
    // The segments were created as ready ones, so this includes the footer, but not the state.
    disk.fail(Fault::next(Operation::Write).of("ready-").lasting().error(ErrorKind::StorageFull));
    manual.wal.trim(1, at.index - 2);
    for _ in 0..3 {
        manual.idle();
    }
    assert!(segments() < 5, "{:?}", disk.files());
    let sealed = || {
        let segments = inspect(&disk).unwrap().segments;
        segments.iter().filter(|it| it.state == SegmentState::Sealed).count()
    };
    let before = sealed();
    disk.heal();
    manual.now += Duration::from_secs(1);
    manual.idle();
    assert!(sealed() > before, "the seal was not repeated");
}

/// A quota refuses segments although the file system states free space: appends are refused until a
/// segment can be created.
#[test]
fn exceeded_quota_refuses_appends_until_it_is_raised() {
    let disk = SimulatedDisk::new(3);
    let mut manual = open(&disk, &small_options());
    manual.idle();
    disk.fail(Fault::next(Operation::Create).lasting().error(ErrorKind::QuotaExceeded));
    let results = AppendResults::default();
    let mut accepted = 0;
    while manual.wal.writable().is_ok() {
        append(&manual.wal, &results, 3000);
        manual.idle();
        assert!(take(&results).iter().all(Result::is_ok), "refused before it was written");
        accepted += 1;
        assert!(accepted < 100, "the quota is never used up");
    }
    for _ in 0..5 {
        assert!(matches!(manual.wal.writable(), Err(Error::DiskFull { .. })));
        manual.idle();
    }
    let error = manual.wal.writable().unwrap_err().to_string();
    assert!(error.contains("quota"), "{error}");
    disk.heal();
    manual.now += Duration::from_secs(1);
    manual.idle();
    manual.wal.writable().unwrap();
}

/// A log with sealed segments of which none is open, and whose entries are not in memory.
fn sealed_log(disk: &SimulatedDisk) -> (ManualWal, Vec<Entry>) {
    let options = Options { tail_bytes: 0, files: FileCache::new(1), ..small_options() };
    let mut manual = open(disk, &options);
    let results = AppendResults::default();
    let mut entries = Vec::new();
    for index in 0..40 {
        entries.push(append(&manual.wal, &results, 5000));
        manual.settle();
        let placement = Placement { stream: 1, first: index, count: 1, time: 1 };
        manual.wal.place(index, Some(placement)).unwrap();
    }
    manual.wal.save_vote(Bytes::from_static(b"term 7, for 2"), Box::new(|voted| voted.unwrap()));
    manual.idle();
    assert!(take(&results).iter().all(Result::is_ok));
    (manual, entries)
}

fn no_descriptor(operation: Operation) -> Fault {
    Fault::next(operation).lasting().errno(Errno::MFILE.raw_os_error())
}

#[test]
fn reads_without_file_descriptors_find_no_damage() {
    let disk = SimulatedDisk::new(1);
    let (manual, entries) = sealed_log(&disk);
    let segments = inspect(&disk).unwrap().segments;
    let sealed = segments.iter().find(|it| it.state == SegmentState::Sealed).unwrap();
    disk.fail(no_descriptor(Operation::Open));
    let is_short = |error: &Error| matches!(error, Error::Exhausted { .. });
    let error = manual.wal.read(0..1, 10_000, ReadMode::Blocking).unwrap_err();
    assert!(is_short(&error), "{error}");
    let error = manual.wal.read_stream(1, 0, 1, 10_000, ReadMode::Blocking).unwrap_err();
    assert!(is_short(&error), "{error}");
    let error = manual.wal.examine_segment(&sealed.file).unwrap_err();
    assert!(is_short(&error), "{error}");
    let mut scrub = manual.wal.scrub();
    for _ in 0..3 {
        let scrubbed = scrub.step();
        assert!(scrubbed.damage.is_none() && !scrubbed.is_round, "{scrubbed:?}");
        assert!(scrubbed.shortage.as_ref().is_some_and(is_short), "{scrubbed:?}");
    }
    assert!(inspect(&disk).is_err_and(|error| is_short(&error)));
    assert!(verify(&disk).iter().all(|finding| finding.is_unread));
    disk.heal();
    let mut bytes = 0;
    loop {
        let scrubbed = scrub.step();
        assert!(scrubbed.damage.is_none() && scrubbed.shortage.is_none(), "{scrubbed:?}");
        bytes += scrubbed.bytes;
        if scrubbed.is_round {
            break;
        }
    }
    assert!(bytes > sealed.file_bytes / 2, "nothing was skipped: {bytes}");
    assert!(manual.wal.examine_segment(&sealed.file).unwrap().is_clean());
    expect_entries(&manual.wal, &entries);
}

/// Each file may be the first that cannot be opened or read.
#[test]
fn quarantine_without_file_descriptors_keeps_identity_and_vote() {
    let golden = SimulatedDisk::new(1);
    drop(sealed_log(&golden));
    golden.remove_file("0000000000000001.seg");
    let mut failed = 0;
    for (operation, errno) in [
        (Operation::Open, Errno::MFILE),
        (Operation::Open, Errno::NFILE),
        (Operation::ReadDevice, Errno::NOMEM),
        (Operation::SyncDir, Errno::NOSPC),
    ] {
        for after in 0..12 {
            let _context = PrintOnPanic(format!("{errno:?} at {operation:?} number {after}"));
            let disk = golden.fork().reopen();
            disk.fail(Fault::next(operation).after(after).errno(errno.raw_os_error()));
            let quarantined = match Wal::quarantine(&disk, "a file is missing", Bytes::new()) {
                Ok(quarantined) => quarantined,
                Err(error) => {
                    assert!(error.is_shortage(), "{error}");
                    failed += 1;
                    disk.heal();
                    let crashes = after.is_multiple_of(2);
                    if crashes {
                        disk.crash(Crash::Seeded(after));
                    }
                    let disk = disk.reopen();
                    let found = crashes.then(|| Wal::quarantined_log(&disk).unwrap()).flatten();
                    found.unwrap_or_else(|| {
                        Wal::quarantine(&disk, "a file is missing", Bytes::new()).unwrap()
                    })
                }
            };
            assert_eq!(quarantined.identity, small_options().identity);
            assert_eq!(quarantined.vote.as_deref(), Some(&b"term 7, for 2"[..]));
        }
    }
    assert!(failed > 5, "{failed}");
}

/// An open that lacks a file descriptor is no damage, also if a trailer does not verify.
#[test]
fn open_without_file_descriptors_reports_the_shortage() {
    let golden = SimulatedDisk::new(1);
    let (_, entries) = sealed_log(&golden);
    let file = "0000000000000002.seg";
    let len = golden.read_file(file).unwrap().len() as u64;
    golden.flip_bit(file, (len - 4000) * 8);
    let mut failed = 0;
    for after in 0..40 {
        let _context = PrintOnPanic(format!("open number {after}"));
        let disk = golden.fork().reopen();
        let options = Options { files: FileCache::new(1), ..small_options() };
        disk.crash(Crash::LoseAll);
        let disk = disk.reopen();
        disk.fail(no_descriptor(Operation::Open).after(after));
        let opened = ManualWal::open(Arc::new(disk.clone()), options.clone());
        if let Err(error) = &opened {
            assert!(matches!(error, Error::Exhausted { .. }), "{error}");
            failed += 1;
        }
        drop(opened);
        disk.heal();
        let manual = open(&disk, &options);
        assert_eq!(manual.recovered.quarantined.len(), 1);
        expect_entries(&manual.wal, &entries[39..]);
    }
    assert!(failed > 5, "{failed}");
}

/// Logs of a node share their open files.
#[test]
fn logs_share_one_bounded_file_cache() {
    let cache = FileCache::new(3);
    let disks: Vec<SimulatedDisk> = (1..5).map(SimulatedDisk::new).collect();
    let mut logs = Vec::new();
    for disk in &disks {
        drop(sealed_log(disk));
        let options = Options { tail_bytes: 0, files: cache.clone(), ..small_options() };
        logs.push(open(disk, &options));
    }
    for log in &logs {
        for index in 0..40 {
            log.wal.read(index..index + 1, 1, ReadMode::Blocking).unwrap().unwrap();
        }
        assert!(cache.len() <= 3, "{}", cache.len());
    }
    let open_files: u64 = disks.iter().map(SimulatedDisk::open_files).sum();
    assert!(open_files <= 3 + 4 * small_options().open_files_max() as u64, "{open_files}");
    drop(logs);
    assert!(cache.is_empty());
}

/// Calls the log at each of its log messages, from another thread. That needs every lock.
struct LockProbe {
    wal: Arc<Mutex<Option<Wal>>>,
    events: Arc<AtomicUsize>,
    blocked: Arc<Mutex<Vec<String>>>,
}

impl tracing::Subscriber for LockProbe {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().starts_with("helix_wal")
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let Some(wal) = self.wal.lock().unwrap().clone() else { return };
        self.events.fetch_add(1, Ordering::SeqCst);
        let (sent, done) = mpsc::channel();
        std::thread::spawn(move || {
            wal.state();
            // Needs the lock of the state file.
            let _ = wal.checkpoint(LogId { term: 99, index: 0 }, Bytes::new());
            // Ignored: the test does not wait after the deadline.
            let _ = sent.send(());
        });
        if done.recv_timeout(Duration::from_secs(30)).is_err() {
            self.blocked.lock().unwrap().push(event.metadata().name().to_owned());
        }
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// A subscriber may block, for example on a full pipe. It must not block the log.
#[test]
fn nothing_is_logged_under_a_lock() {
    let (wal, events) = (Arc::new(Mutex::new(None)), Arc::new(AtomicUsize::new(0)));
    let blocked = Arc::new(Mutex::new(Vec::new()));
    let probe = LockProbe { wal: wal.clone(), events: events.clone(), blocked: blocked.clone() };
    // A second subscriber, which never calls a log. With a single one, tracing asks only the
    // subscriber of the thread that reaches a call site first, and a thread without any, of another
    // test, disables the call site for all threads.
    let _second = tracing::Dispatch::new(LockProbe {
        wal: Arc::default(),
        events: Arc::default(),
        blocked: Arc::default(),
    });
    tracing::subscriber::with_default(probe, || {
        let disk = SimulatedDisk::new(1);
        let mut manual = open(&disk, &small_options());
        *wal.lock().unwrap() = Some(manual.wal.clone());
        work(&mut manual, 8);
        disk.set_free_bytes(Some(0));
        work(&mut manual, 8);
        disk.fail(Fault::next(Operation::Write).lasting().error(ErrorKind::StorageFull));
        work(&mut manual, 1);
        disk.heal();
        disk.set_free_bytes(None);
        work(&mut manual, 4);
        disk.fail(Fault::next(Operation::Sync));
        append(&manual.wal, &AppendResults::default(), 10);
        manual.settle();
        assert!(matches!(manual.wal.writable(), Err(Error::Poisoned { .. })));
        wal.lock().unwrap().take();
    });
    assert!(events.load(Ordering::SeqCst) > 5, "{events:?}");
    assert_eq!(*blocked.lock().unwrap(), [""; 0]);
}
