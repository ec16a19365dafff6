//! Golden directories: one log per format version, written by that version (the one of version 2 by
//! version 3, without the bytes that it adds). Every later version must read and continue them.
//! `HELIX_GOLDEN=4` rewrites the one of version 4, which is allowed only until its release.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use helix_wal::storage::{DirStorage, SimulatedDisk};
use helix_wal::{Entry, LiveEntry, LogId, Placement, ReadMode, Wal, verify};

use crate::common::{ManualWal, entry};
use crate::corruption::{
    DamageClass, Golden, classify, files, is_right, options, streams_are_right,
};
use crate::truth::Truth;

/// Has votes, a truncation, a purge, sealed segments and an active one.
#[test]
fn reads_golden_directory_of_version_1() {
    golden_is_readable(1, &Golden::marked());
}

/// Also has cold segments and trims.
#[test]
fn reads_golden_directory_of_version_2() {
    golden_is_readable(2, &Golden::compacted());
}

/// Also has staged entries that wait for a snapshot.
#[test]
fn reads_golden_directory_of_version_3() {
    let staged_entries = staged_entries();
    golden_is_readable(3, &Golden::with_staged(AFTER, &staged_entries));
    let manual = ManualWal::open(Arc::new(disk_of(3)), options()).unwrap();
    let (after, mut segments) = manual.wal.take_staged().unwrap();
    assert_eq!((after, segments.first(), segments.last()), (AFTER, Some(200), Some(208)));
    let at = LogId { term: 3, index: 210 };
    manual.wal.install(at, Bytes::from_static(b"a later state"), &mut segments).unwrap();
    for live in &staged_entries {
        let Placement { stream, first, .. } = live.placement;
        let got = manual.wal.read_stream(stream, first, first + 1, 1, ReadMode::Blocking);
        assert_eq!(got.unwrap().unwrap()[0].payload.bytes, live.payload.bytes);
    }
}

/// Also has a cleaned stream, and no staged entries.
#[test]
fn reads_golden_directory_of_version_4() {
    golden_is_readable(4, &Golden::cleaned());
    let manual = ManualWal::open(Arc::new(disk_of(4)), options()).unwrap();
    let marks = manual.wal.clean_marks();
    assert_eq!(marks.keys().copied().collect::<Vec<_>>(), [3]);
    assert!(marks[&3].upto > 0 && marks[&3].also == 1, "{marks:?}");
}

/// Returns all golden logs with their expected contents.
pub fn golden_logs() -> Vec<(&'static str, SimulatedDisk, Truth)> {
    let golden = [
        Golden::marked(),
        Golden::compacted(),
        Golden::with_staged(AFTER, &staged_entries()),
        Golden::cleaned(),
    ];
    let names = ["version 1", "version 2", "version 3", "version 4"];
    let golden_logs = (1..).zip(names).zip(golden);
    golden_logs.map(|((version, name), golden)| (name, disk_of(version), golden.truth)).collect()
}

const AFTER: u64 = 97;

/// Builds entries of a stream that the log does not have.
fn staged_entries() -> Vec<LiveEntry> {
    let live = |n: u64| {
        let id = LogId { term: 3, index: 200 + 2 * n };
        let Entry { head, payload, .. } = entry(id, 9, 10, 700);
        LiveEntry {
            id,
            placement: Placement { stream: 9, first: n, count: 1, time: n },
            head,
            payload,
        }
    };
    (0..5).map(live).collect()
}

fn directory(version: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/v{version}"))
}

fn disk_of(version: u32) -> SimulatedDisk {
    let disk = SimulatedDisk::new(1);
    for entry in std::fs::read_dir(directory(version)).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        disk.write_file(&name, std::fs::read(entry.path()).unwrap());
    }
    disk
}

/// Rewrites the directory if `HELIX_GOLDEN` is its version. Checks that it is intact.
fn golden_is_readable(version: u32, golden: &Golden) {
    let directory = directory(version);
    if std::env::var("HELIX_GOLDEN").is_ok_and(|value| value == version.to_string()) {
        std::fs::create_dir_all(&directory).unwrap();
        for (name, bytes) in files(&golden.disk) {
            std::fs::write(directory.join(name), bytes).unwrap();
        }
    }
    let disk = disk_of(version);
    assert_eq!(verify(&disk), []);
    assert_eq!(classify(&disk, &golden.truth), DamageClass::Equal);
    // The same in a real directory: a copy, because opening changes files.
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(&directory).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    let open = || {
        let storage = DirStorage::open(copy.path()).unwrap();
        ManualWal::open(Arc::new(storage), options()).unwrap()
    };
    let mut manual = open();
    expect_all(&manual.wal, golden);
    // The log can be continued.
    let last = golden.truth.durable.last().unwrap();
    let next = entry(LogId { term: 9, index: last.index + 1 }, 1, 3, 3000);
    manual.wal.append(vec![next.clone()], Box::new(|durable| durable.unwrap()));
    manual.idle();
    drop(manual);
    let manual = open();
    assert_eq!(manual.wal.state().last, Some(next.id));
    assert!(is_right(&manual.wal, &next));
    for entry in golden.truth.durable.entries.values() {
        assert!(is_right(&manual.wal, entry));
    }
    assert!(streams_are_right(&manual.wal, &golden.truth));
}

fn expect_all(wal: &Wal, golden: &Golden) {
    let (state, truth) = (wal.state(), &golden.truth.durable);
    assert_eq!(
        (state.last, state.purged, state.vote),
        (truth.last(), truth.purged, truth.vote.clone())
    );
    assert!(truth.entries.values().all(|entry| is_right(wal, entry)));
    assert!(streams_are_right(wal, &golden.truth));
}
