//! Targets for logs with damaged or forged files, and for installed records.

mod checksums;
mod fixtures;

use std::cell::OnceCell;
use std::collections::BTreeMap;

use bytes::Bytes;
use helix_wal::storage::{Crash, SimulatedDisk};
use helix_wal::{
    Entry, Error, LiveEntry, LogId, Payload, Placement, ReadMode, Wal, inspect, verify,
};

use self::fixtures::{FuzzWal, LogFixture, VOTES, entry, fixtures};
use crate::input::Input;

thread_local! {
    static FIXTURES: OnceCell<[LogFixture; 3]> = const { OnceCell::new() };
}

/// File names to copy to.
const NAMES: [&str; 12] = [
    "state",
    "state.tmp",
    "0000000000000001.seg",
    "0000000000000002.seg",
    "0000000000000003.seg",
    "0000000000000004.new",
    "0000000000000005.seg",
    "0000000000000005.cold",
    "ffffffffffffffff.seg",
    "ffffffffffffffff.new",
    "ready-1",
    "ready-18446744073709551615",
];

/// Offsets of fields in the structures of a file, which are changed more often than other bytes.
const FIELDS: [usize; 24] = [
    0, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 72, 80, 88, 96, 104, 108, 112,
    116,
];

/// Target `wal_damage`: random changes to files. Reads return only what was written, and no vote is
/// invented.
pub(crate) fn damage(input: &[u8]) {
    with_fixture(input, |fixture, mut input| {
        let mut files = fixture.files.clone();
        while !input.is_empty() {
            change(&mut files, &mut input);
        }
        run(fixture, files, false);
    });
}

/// Target `wal_forged`: the same with valid checksums. No panic, no unbounded allocation, and every
/// payload verifies.
pub(crate) fn forged(input: &[u8]) {
    with_fixture(input, |fixture, mut input| {
        let mut files = fixture.files.clone();
        while !input.is_empty() {
            change(&mut files, &mut input);
        }
        for (name, bytes) in &mut files {
            checksums::update_checksums(name, bytes);
        }
        run(fixture, files, true);
    });
}

fn with_fixture(input: &[u8], run: impl Fn(&LogFixture, Input<'_>)) {
    let mut input = Input(input);
    let which = input.below(3);
    FIXTURES.with(|all| run(&all.get_or_init(fixtures)[which], input));
}

/// Changes one file.
fn change(files: &mut Vec<(String, Vec<u8>)>, input: &mut Input<'_>) {
    if files.is_empty() {
        input.0 = &[];
        return;
    }
    let which = input.below(files.len());
    let len = files[which].1.len();
    match input.below(12) {
        0..5 => {
            let at = position_in(&files[which].1, input);
            let width = input.pick(&[1, 2, 4, 8]);
            let number = input.number().to_le_bytes();
            if let Some(field) = files[which].1.get_mut(at..at + width) {
                field.copy_from_slice(&number[..width]);
            }
        }
        5 => {
            let at = position_in(&files[which].1, input);
            let bit = input.below(8);
            if let Some(byte) = files[which].1.get_mut(at) {
                *byte ^= 1 << bit;
            }
        }
        6 => {
            // Copies blocks between or within files.
            let other = input.below(files.len());
            let (from, to, blocks) = (input.below(32), input.below(32), 1 + input.below(8));
            let bytes = files[other].1.iter().skip(4096 * from).take(4096 * blocks);
            let bytes: Vec<u8> = bytes.copied().collect();
            let target = files[which].1.iter_mut().skip(4096 * to);
            target.zip(bytes).for_each(|(to, from)| *to = from);
        }
        7 => {
            let (from, blocks) = (input.below(160), 1 + input.below(16));
            files[which].1.iter_mut().skip(512 * from).take(512 * blocks).for_each(|b| *b = 0);
        }
        8 => {
            let by = input.pick(&[1, 511, 4096, 8192, 60_000]);
            files[which].1.truncate(len.saturating_sub(by));
        }
        9 => files[which].1.resize(len + input.pick(&[1, 4096, 65_536]), 0),
        10 => drop(files.swap_remove(which)),
        _ => {
            let name = input.pick(&NAMES);
            let bytes = files[which].1.clone();
            files.retain(|(known, _)| known != name);
            files.push((name.to_owned(), bytes));
        }
    }
}

/// Chooses a position in a file, mostly of a field.
fn position_in(bytes: &[u8], input: &mut Input<'_>) -> usize {
    let blocks = bytes.len() / 4096;
    let fine = input.below(8);
    let block = match input.below(8) {
        0 => 0,
        1 => 1,
        // From the end: the trailer, the directory, the tables.
        n @ 2..6 => blocks.saturating_sub(n - 1),
        _ => input.below(blocks.max(1)),
    };
    let field = match fine {
        0..4 => input.pick(&FIELDS),
        // Context of a header or trailer; first frame of a group; rows of a table.
        4 => 328 + 8 * input.below(12),
        5 => 120 + 8 * input.below(12),
        6 => 128 + input.pick(&FIELDS),
        _ => input.below(4096),
    };
    4096 * block + field
}

/// Inspects and opens the log, reads everything, appends, and reopens it.
fn run(fixture: &LogFixture, files: Vec<(String, Vec<u8>)>, is_forged: bool) {
    let disk = SimulatedDisk::new(1);
    for (name, bytes) in files {
        disk.write_file(&name, bytes);
    }
    // Must not panic. Their results are checked by the open.
    drop(inspect(&disk));
    drop(verify(&disk));
    let Some(mut manual) = opened(FuzzWal::open(&disk)) else { return };
    check(fixture, &manual.wal, is_forged);
    let state = manual.wal.state();
    let next = state.last.map_or(0, |last| last.index.saturating_add(1));
    let term = state.last.map_or(1, |last| last.term);
    let added = entry(LogId { term, index: next }, 1, 300);
    let result = std::sync::Arc::new(std::sync::Mutex::new(None));
    let received = std::sync::Arc::clone(&result);
    manual
        .wal
        .append(vec![added.clone()], Box::new(move |it| *received.lock().unwrap() = Some(it)));
    manual.idle();
    let result = result.lock().unwrap().take().expect("an append has a result");
    match result {
        Ok(()) => {}
        // Forged indexes may leave no next index or segment id.
        Err(_) if is_forged => return,
        Err(error) => panic!("an append to an opened log: {error}"),
    }
    let read = manual.wal.read(next..next + 1, usize::MAX, ReadMode::Blocking).unwrap().unwrap();
    assert_eq!(read[0].payload.bytes, added.payload.bytes);
    drop(manual);
    disk.crash(Crash::LoseAll);
    let disk = disk.reopen();
    if is_forged && has_used_up_its_numbers(&disk) {
        return;
    }
    let reopened = FuzzWal::open(&disk);
    let manual =
        reopened.unwrap_or_else(|error| panic!("a log that opened once opens again: {error}"));
    assert_eq!(manual.wal.state().last, Some(added.id), "acknowledged entries survive");
    assert_eq!(manual.wal.state().vote, state.vote);
}

/// Returns whether the segment numbers are used up: each open takes one, and they end at 2^62.
fn has_used_up_its_numbers(disk: &SimulatedDisk) -> bool {
    let newest = disk.files().into_iter().filter(|name| name.ends_with(".seg")).max();
    newest.is_some_and(|newest| newest.as_str() > "3ffffffffffffff0")
}

/// Returns the log, or `None` if it was rejected with a proper error.
fn opened(result: Result<FuzzWal, Error>) -> Option<FuzzWal> {
    match result {
        Ok(manual) => Some(manual),
        Err(Error::Damaged { file, what, .. }) => {
            assert!(!file.is_empty() && !what.is_empty());
            None
        }
        Err(Error::Unusable(_) | Error::Io { .. }) => None,
        Err(error) => panic!("open: {error}"),
    }
}

fn check(fixture: &LogFixture, wal: &Wal, is_forged: bool) {
    let state = wal.state();
    if !is_forged {
        let vote = state.vote.as_deref();
        assert!(vote.is_none_or(|vote| VOTES.contains(&vote)), "{vote:?} was never voted");
    }
    let mut next = wal.first_index();
    while state.last.is_some_and(|last| next <= last.index) {
        match wal.read(next..next.saturating_add(50), 1 << 20, ReadMode::Blocking) {
            Ok(found) => {
                let found = found.expect("a blocking read has a result");
                let Some(last) = found.last() else { break };
                next = last.id.index.saturating_add(1);
                found.iter().for_each(|entry| check_entry(fixture, entry, is_forged));
            }
            // Skips the rest of a large gap.
            Err(_) if next > 1000 => break,
            Err(_) => next += 1,
        }
        drop(wal.heads(next..next.saturating_add(3), 3, ReadMode::Blocking));
        drop(wal.log_id(next, ReadMode::Blocking));
    }
    for (index, placement) in &fixture.placed {
        if fixture.placed.len() - (*index as usize) < 12 {
            drop(wal.place(*index, Some(*placement)));
        }
    }
    let mut streams = wal.streams();
    streams.extend([1, 2, 3]);
    for stream in streams {
        drop(wal.stream_rows(stream));
        for position in [0, 1, 5, 20, 40, u64::MAX] {
            check_stream(fixture, wal, stream, position, is_forged);
        }
        for time in [0, 55, 900, u64::MAX] {
            drop(wal.search_time(stream, time, ReadMode::Blocking));
        }
    }
    let last = state.last.map_or(0, |last| last.index);
    for upto in [last, u64::MAX] {
        let _ = wal.live_bytes(0, upto);
        let _ = wal.live_bytes(u64::MAX, upto);
        let Ok(live) = wal.read_live(0, upto, 1 << 20) else { continue };
        for LiveEntry { id, placement, head, payload } in live.entries {
            check_entry(fixture, &Entry { id, stream: placement.stream, head, payload }, is_forged);
        }
    }
    let _ = wal.stats();
    let mut scrub = wal.scrub();
    while !scrub.step().is_round {}
}

fn check_stream(fixture: &LogFixture, wal: &Wal, stream: u64, position: u64, is_forged: bool) {
    let read = wal.read_stream(stream, position, u64::MAX, 1 << 20, ReadMode::Blocking);
    let Ok(Some(found)) = read else { return };
    for stored in found {
        let (id, head, payload) = (stored.id, stored.head, stored.payload);
        check_entry(fixture, &Entry { id, stream, head, payload }, is_forged);
        if !is_forged {
            assert_eq!(fixture.placed.get(&id.index), Some(&stored.placement));
        }
    }
}

/// Checks that an entry verifies and, unless forged, equals the written one.
fn check_entry(fixture: &LogFixture, entry: &Entry, is_forged: bool) {
    let Payload { bytes, crc, crc_seed } = &entry.payload;
    let mut hasher = crc32fast::Hasher::new_with_initial(*crc_seed);
    hasher.update(bytes);
    assert_eq!(hasher.finalize(), *crc, "a payload that does not verify");
    if !is_forged {
        let written = fixture.written.iter().find(|written| written.id == entry.id);
        let written = written.expect("an entry that was never written");
        assert_eq!(written.head, entry.head);
        assert_eq!(written.payload.bytes, *bytes, "different payload");
    }
}

/// Target `wal_install`: records of another log, in any order and at any position. Rejected records
/// leave no trace, installed ones survive a restart.
pub(crate) fn install(input: &[u8]) {
    let mut input = Input(input);
    let disk = SimulatedDisk::new(1);
    let Ok(mut manual) = FuzzWal::open(&disk) else { panic!("an empty disk") };
    let own = input.below(4) as u64;
    for index in 0..own {
        manual.wal.append(
            vec![entry(LogId { term: 1, index }, 1, 50)],
            Box::new(|result| result.unwrap()),
        );
    }
    manual.settle();
    let placed = input.below(4).min(own as usize) as u64;
    for index in 0..placed {
        let placement = Placement { stream: 1, first: index, count: 1, time: index };
        manual.wal.place(index, Some(placement)).unwrap();
    }
    let mut installed = BTreeMap::new();
    let mut cold = Default::default();
    let mut at = LogId { term: 1, index: 10 };
    while !input.is_empty() {
        let mut writer = manual.wal.cold_writer().unwrap();
        let mut pushed = BTreeMap::new();
        for _ in 0..input.below(6) {
            let live = live_entry(&mut input);
            if writer.write(live.clone()).is_ok() {
                pushed.insert(live.id.index, live);
            }
        }
        cold = writer.finish().unwrap();
        at = LogId { term: input.number(), index: input.number() };
        if manual.wal.install(at, Bytes::from_static(b"snapshot"), &mut cold).is_ok() {
            installed.extend(pushed);
        }
        manual.settle();
    }
    drop(cold);
    let state = manual.wal.state();
    check_installed(&manual.wal, &installed);
    drop(manual);
    disk.crash(Crash::LoseAll);
    let manual = FuzzWal::open(&disk.reopen()).unwrap_or_else(|error| panic!("{at:?}: {error}"));
    assert_eq!(manual.wal.state().last, state.last);
    assert_eq!(manual.wal.state().purged, state.purged);
    check_installed(&manual.wal, &installed);
}

fn live_entry(input: &mut Input<'_>) -> LiveEntry {
    let id = LogId { term: input.number(), index: input.number() };
    let (stream, first) = (input.number(), input.number());
    let (count, time) = (input.number() as u32, input.number());
    let size = usize::from(input.u16()) % 40_000;
    let entry = entry(id, stream, size);
    let placement = Placement { stream, first, count, time };
    LiveEntry { id, placement, head: entry.head, payload: entry.payload }
}

/// Checks that every installed record is found by its position.
fn check_installed(wal: &Wal, installed: &BTreeMap<u64, LiveEntry>) {
    for live in installed.values() {
        let Placement { stream, first, count, .. } = live.placement;
        let below = first + u64::from(count);
        let found = wal.read_stream(stream, first, below, usize::MAX, ReadMode::Blocking);
        let found = found.unwrap_or_else(|error| panic!("{:?}: {error}", live.placement)).unwrap();
        assert_eq!(found.len(), 1, "{:?}", live.placement);
        assert_eq!((found[0].id, found[0].placement), (live.id, live.placement));
        assert_eq!(found[0].payload.bytes, live.payload.bytes);
    }
}
