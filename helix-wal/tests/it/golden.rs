//! A folder of each version of the format, written once by it and kept (that of version 2 by
//! version 3, less the bytes that it adds): every later version reads it, and goes on with it.
//! `HELIX_GOLDEN=3` writes the one of version 3 anew, which is right only until that version is
//! released.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use helix_wal::storage::{DirStorage, SimulatedDisk};
use helix_wal::{Entry, LiveEntry, LogId, Placement, ReadMode, Wal, verify};

use crate::common::{ManualWal, entry};
use crate::corruption::{DamageClass, Golden, classify, files, is_right, options, streams_are_right};
use crate::truth::Truth;

/// Votes, a truncation, a purge, sealed segments and an open one.
#[test]
fn the_golden_folder_of_version_1_is_readable() {
    golden_is_readable(1, &Golden::marked());
}

/// And cold segments, and trims.
#[test]
fn the_golden_folder_of_version_2_is_readable() {
    golden_is_readable(2, &Golden::compacted());
}

/// And what waits for a snapshot.
#[test]
fn the_golden_folder_of_version_3_is_readable() {
    let received = received();
    golden_is_readable(3, &Golden::receiving(AFTER, &received));
    let manual = ManualWal::open(Arc::new(disk_of(3)), options()).unwrap();
    let (after, mut segments) = manual.wal.take_staged().unwrap();
    assert_eq!((after, segments.first(), segments.last()), (AFTER, Some(200), Some(208)));
    let at = LogId { term: 3, index: 210 };
    manual.wal.install(at, Bytes::from_static(b"a later state"), &mut segments).unwrap();
    for live in &received {
        let Placement { stream, first, .. } = live.placement;
        let got = manual.wal.read_stream(stream, first, first + 1, 1, ReadMode::Blocking);
        assert_eq!(got.unwrap().unwrap()[0].payload.bytes, live.payload.bytes);
    }
}

/// The folders that are kept, with what is in them.
pub fn kept() -> Vec<(&'static str, SimulatedDisk, Truth)> {
    let golden = [Golden::marked(), Golden::compacted(), Golden::receiving(AFTER, &received())];
    let names = ["version 1", "version 2", "version 3"];
    let kept = (1..).zip(names).zip(golden);
    kept.map(|((version, name), golden)| (name, disk_of(version), golden.truth)).collect()
}

const AFTER: u64 = 97;

/// Entries of a stream that the log does not have.
fn received() -> Vec<LiveEntry> {
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

fn folder(version: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/v{version}"))
}

fn disk_of(version: u32) -> SimulatedDisk {
    let disk = SimulatedDisk::new(1);
    for entry in std::fs::read_dir(folder(version)).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        disk.write_file(&name, std::fs::read(entry.path()).unwrap());
    }
    disk
}

/// Writes the folder if `HELIX_GOLDEN` is its version; in any case it must be there and whole.
fn golden_is_readable(version: u32, golden: &Golden) {
    let folder = folder(version);
    if std::env::var("HELIX_GOLDEN").is_ok_and(|value| value == version.to_string()) {
        std::fs::create_dir_all(&folder).unwrap();
        for (name, bytes) in files(&golden.disk) {
            std::fs::write(folder.join(name), bytes).unwrap();
        }
    }
    let disk = disk_of(version);
    assert_eq!(verify(&disk), []);
    assert_eq!(classify(&disk, &golden.truth), DamageClass::Equal);
    // The same on a real folder, where an open may not change the one that is kept.
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    let open = || {
        let storage = DirStorage::open(copy.path()).unwrap();
        ManualWal::open(Arc::new(storage), options()).unwrap()
    };
    let mut manual = open();
    expect_all(&manual.wal, golden);
    // And it can be gone on with.
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
