//! Damage at rest: flipped bits, truncated files and lost sectors of a small log. No read returns
//! wrong data, no entry known to be durable goes missing silently, and nothing panics.

use std::sync::Arc;
use std::sync::mpsc::channel;

use bytes::Bytes;
use helix_wal::storage::{Crash, SimulatedDisk};
use helix_wal::{
    CleanMark, CleanRequest, Entry, EntryFilter, Error, FilteredEntry, LiveEntry, LogId, Options,
    Payload, Placement, ReadMode, Wal, inspect, verify,
};

use crate::common::{
    ManualWal, PrintOnPanic, TestRng, entry, rounds, same_entry, seed, small_options,
};
use crate::truth::{CallbackResults, QueuedOp, Truth};

/// A deterministic log with every feature of the format, equal in every version.
pub struct Golden {
    pub disk: SimulatedDisk,
    manual: Option<ManualWal>,
    pub truth: Truth,
    acks: CallbackResults,
    term: u64,
    next: [u64; 4],
}

pub fn options() -> Options {
    Options { ready_segments: 0, compaction_bytes_per_second: 0, ..small_options() }
}

impl Golden {
    fn new() -> Self {
        Self::with(options())
    }

    fn with(options: Options) -> Self {
        let disk = SimulatedDisk::new(1);
        let manual = ManualWal::open(Arc::new(disk.clone()), options).unwrap();
        let (truth, acks) = (Truth::default(), CallbackResults::default());
        Self { disk, manual: Some(manual), truth, acks, term: 1, next: [0; 4] }
    }

    fn manual(&mut self) -> &mut ManualWal {
        self.manual.as_mut().unwrap()
    }

    fn queue(&mut self, op: QueuedOp) {
        let number = self.truth.queue(op.clone());
        let acks = Arc::clone(&self.acks);
        let done = Box::new(move |result| acks.lock().unwrap().push((number, result)));
        let wal = self.manual().wal.clone();
        match op {
            QueuedOp::Append(entry) => wal.append(vec![entry], done),
            QueuedOp::Vote(vote) => wal.save_vote(vote, done),
            QueuedOp::Truncate(last) => wal.truncate_after(last, done),
            QueuedOp::Purge(upto) => wal.purge(upto, done),
        }
    }

    fn append(&mut self, payload: usize) {
        let index = self.truth.queued.next();
        let id = LogId { term: self.term, index };
        self.queue(QueuedOp::Append(sparse(id, index % 4, index as usize % 30, payload)));
    }

    fn vote(&mut self, vote: &'static str) {
        self.queue(QueuedOp::Vote(Bytes::from_static(vote.as_bytes())));
    }

    fn settle(&mut self) {
        self.manual().settle();
        self.truth.collect_results(&self.acks, false, false);
    }

    fn place_upto(&mut self, last: u64) {
        for index in self.truth.placed_upto.map_or(0, |placed_upto| placed_upto + 1)..=last {
            let entry = self.truth.durable.entries[&index].clone();
            let stream = entry.stream;
            let placement = (stream > 0).then(|| {
                let first = self.next[stream as usize];
                let count = 1 + (index % 3) as u32;
                self.next[stream as usize] += u64::from(count);
                Placement { stream, first, count, time: 100 * index }
            });
            self.manual().wal.place(index, placement).unwrap();
            self.truth.placed.insert(index, (entry, placement));
            self.truth.placed_upto = Some(index);
        }
        let id = self.truth.placed[&last].0.id;
        self.truth.commit(id);
        self.manual().wal.set_committed(id);
    }

    fn checkpoint(&mut self, at: u64) {
        let checkpoint = (self.truth.placed[&at].0.id, Bytes::from_static(b"state machine"));
        self.manual().wal.checkpoint(checkpoint.0, checkpoint.1.clone()).unwrap();
        self.truth.checkpoint = Some(checkpoint);
    }

    /// Builds sealed segments, a conflict, a purge, and an active segment with entries that are not
    /// placed yet.
    fn build() -> Self {
        let mut golden = Self::new();
        golden.vote("first vote");
        for size in [0, 10, 200, 3000, 64, 1] {
            golden.append(size);
        }
        golden.settle();
        golden.place_upto(5);
        for size in [21_000, 20, 27_000] {
            golden.append(size);
            golden.settle();
        }
        golden.term = 2;
        golden.vote("second vote");
        golden.queue(QueuedOp::Truncate(Some(6)));
        for size in [90, 16_000, 33] {
            golden.append(size);
        }
        golden.settle();
        golden.place_upto(9);
        golden.checkpoint(7);
        let purged = golden.truth.placed[&4].0.id;
        golden.queue(QueuedOp::Purge(purged));
        for size in [14_000, 14_000, 5, 14_000, 9, 20_000] {
            golden.append(size);
            golden.settle();
        }
        golden.place_upto(15);
        golden.manual().idle();
        golden.vote("third vote");
        for size in [30, 600, 2] {
            golden.append(size);
        }
        golden.settle();
        golden
    }

    /// Returns a closed log whose last group has a sync marker.
    pub fn marked() -> Self {
        let mut golden = Self::build();
        golden.manual().idle();
        golden.close()
    }

    /// Returns a closed log with the live older entries in a cold segment.
    pub fn compacted() -> Self {
        Self::with_cold().close()
    }

    /// Like `compacted`, with these staged entries that wait for their snapshot.
    pub fn with_staged(after: u64, entries: &[LiveEntry]) -> Self {
        let mut golden = Self::with_cold();
        let wal = golden.manual().wal.clone();
        let mut writer = wal.cold_writer().unwrap();
        entries.iter().for_each(|live| writer.write(live.clone()).unwrap());
        wal.retain(after, &mut writer.finish().unwrap()).unwrap();
        drop(wal);
        golden.close()
    }

    /// Like `compacted`, with a cleaned stream: gaps, rewritten entries and its mark.
    pub fn cleaned() -> Self {
        const STREAM: u64 = 3;
        let mut golden = Self::with_cold();
        let wal = golden.manual().wal.clone();
        let end = wal.stream_rows(STREAM).last().map_or(0, |row| row.next);
        let upto = wal.cleanable_upto(STREAM).min(end);
        let (sender, done) = channel();
        wal.clean(CleanRequest {
            filter: Arc::new(EveryThird),
            below: [(STREAM, upto)].into(),
            dirty: [(STREAM, std::iter::once(0..upto).collect())].into(),
            marks: [(STREAM, CleanMark { upto, also: 1 })].into(),
            done: Box::new(move |result| sender.send(result).unwrap()),
        });
        drop(wal);
        for _ in 0..40 {
            golden.manual().idle();
        }
        done.try_recv().unwrap().unwrap();
        let (mut removed, mut replaced) = (0, 0);
        for (entry, place) in golden.truth.placed.values_mut() {
            let is_cleaned = |p: &Placement| p.stream == STREAM && p.first < upto;
            if !place.as_ref().is_some_and(is_cleaned) {
                continue;
            }
            match EveryThird::verdict(entry) {
                FilteredEntry::Unchanged => {}
                FilteredEntry::Removed => {
                    *place = None;
                    removed += 1;
                }
                FilteredEntry::Replaced { head, payload } => {
                    (entry.head, entry.payload) = (head, payload);
                    replaced += 1;
                }
            }
        }
        assert!(removed > 2 && replaced > 2, "{removed} and {replaced} entries below {upto}");
        golden.close()
    }

    fn with_cold() -> Self {
        let mut golden = Self::with(Options { compaction_bytes_per_second: u64::MAX, ..options() });
        golden.vote("a vote");
        for _ in 0..24 {
            for size in [2500, 700, 3100, 40] {
                golden.append(size);
            }
            golden.settle();
        }
        golden.place_upto(95);
        golden.manual().idle();
        golden.checkpoint(95);
        let purged = golden.truth.placed[&90].0.id;
        golden.queue(QueuedOp::Purge(purged));
        golden.manual().idle();
        for (stream, kept) in [(1, 2), (2, 9), (3, 30)] {
            let trim = golden.next[stream as usize] - kept;
            golden.truth.trims.insert(stream, trim);
            golden.manual().wal.trim(stream, trim);
        }
        golden.manual().idle();
        golden.manual().idle();
        golden.append(100);
        golden.settle();
        golden.manual().idle();
        let cold = golden.disk.files().iter().any(|name| name.ends_with(".cold"));
        assert!(cold, "nothing was compacted: {:?}", golden.manual().wal.stats());
        golden
    }

    /// Returns a closed log whose last group has no sync marker.
    pub fn unmarked() -> Self {
        let mut golden = Self::build();
        golden.manual().idle();
        golden.append(1500);
        golden.settle();
        golden.close()
    }

    fn close(mut self) -> Self {
        self.truth.collect_results(&self.acks, false, false);
        assert!(self.truth.open.is_empty());
        self.manual = None;
        self.disk.crash(Crash::LoseAll);
        self.disk = self.disk.reopen();
        self
    }
}

/// Removes every third entry of a stream, and rewrites every third.
struct EveryThird;

impl EveryThird {
    fn verdict(entry: &Entry) -> FilteredEntry {
        match entry.id.index / 4 % 3 {
            0 => FilteredEntry::Removed,
            1 => {
                let bytes = entry.payload.bytes.slice(..entry.payload.bytes.len().min(50));
                let payload = Payload { crc: crc32fast::hash(&bytes), crc_seed: 0, bytes };
                FilteredEntry::Replaced { head: Bytes::from_static(b"rewritten"), payload }
            }
            _ => FilteredEntry::Unchanged,
        }
    }
}

impl EntryFilter for EveryThird {
    fn filter(&self, _: &Placement, entry: &Entry) -> Result<FilteredEntry, String> {
        Ok(Self::verdict(entry))
    }
}

/// Builds an entry with a payload of zeroes after its start, where all damage is equivalent.
fn sparse(id: LogId, stream: u64, head_len: usize, payload_len: usize) -> Entry {
    let mut made = entry(id, stream, head_len, payload_len.min(200));
    let mut bytes = made.payload.bytes.to_vec();
    bytes.resize(payload_len, 0);
    let mut hasher = crc32fast::Hasher::new_with_initial(made.payload.crc_seed);
    hasher.update(&bytes);
    made.payload.crc = hasher.finalize();
    made.payload.bytes = bytes.into();
    made
}

/// Detected result of a damage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DamageClass {
    /// All entries are readable and right.
    Equal,
    /// The log opens; reads of damaged entries fail.
    Reported,
    /// The last group, without a sync marker, was truncated.
    Truncated,
    /// The log does not open, with a reason.
    Refused,
}

/// Opens and reads everything. Panics on wrong data.
pub fn classify(disk: &SimulatedDisk, truth: &Truth) -> DamageClass {
    // Inspects first, because opening changes files.
    let report = inspect(disk);
    let findings = verify(disk);
    let class = open_and_read(disk, truth);
    if matches!(class, DamageClass::Reported | DamageClass::Refused) {
        let found = findings.len();
        assert!(found > 0, "verify finds nothing: {class:?}, {report:?}");
    }
    class
}

fn open_and_read(disk: &SimulatedDisk, truth: &Truth) -> DamageClass {
    let manual = match ManualWal::open(Arc::new(disk.clone()), options()) {
        Ok(manual) => manual,
        Err(Error::Damaged { .. } | Error::Unusable(_) | Error::Io { .. }) => {
            return DamageClass::Refused;
        }
        Err(error) => panic!("open: {error}"),
    };
    let state = manual.wal.state();
    assert_eq!(state.vote, truth.durable.vote, "the vote");
    assert_eq!(state.purged, truth.durable.purged, "the purge point");
    assert_eq!(manual.recovered.checkpoint, truth.checkpoint, "the checkpoint");
    assert!(!manual.recovered.created, "the log was opened as empty");
    let committed = state.committed;
    let known = committed.and_then(|id| truth.committed.get(&id.index).copied());
    assert_eq!(committed, known, "the commit point");
    let last = truth.durable.last();
    let truncated = state.last != last;
    if truncated {
        let before = truth.durable.entries.values().rev().nth(1).map(|entry| entry.id);
        assert_eq!(state.last, before, "more than the last group is missing");
        assert!(manual.recovered.torn_bytes > 0, "truncated silently");
    }
    let mut reported = false;
    for entry in truth.durable.entries.values() {
        if Some(entry.id) <= state.last {
            reported |= !is_right(&manual.wal, entry);
        }
    }
    reported |= !streams_are_right(&manual.wal, truth);
    match (truncated, reported) {
        (true, _) => DamageClass::Truncated,
        (false, true) => DamageClass::Reported,
        (false, false) => DamageClass::Equal,
    }
}

/// Returns true if the entry reads back, false if it is reported as damaged.
pub fn is_right(wal: &Wal, wanted: &Entry) -> bool {
    let index = wanted.id.index;
    let mut right = true;
    match wal.read(index..index + 1, usize::MAX, ReadMode::Blocking) {
        Ok(got) => {
            let got = got.unwrap();
            assert!(got.len() == 1 && same_entry(&got[0], wanted), "entry {index} is wrong");
        }
        Err(Error::Damaged { .. }) => right = false,
        Err(error) => panic!("read {index}: {error}"),
    }
    match wal.log_id(index, ReadMode::Blocking) {
        Ok(id) => assert_eq!(id, Some(Some(wanted.id)), "id of {index}"),
        Err(Error::Damaged { .. }) => right = false,
        Err(error) => panic!("log id of {index}: {error}"),
    }
    right
}

/// Returns true if all streams read back, false if some entry is reported as damaged.
pub fn streams_are_right(wal: &Wal, truth: &Truth) -> bool {
    let checkpoint = truth.checkpoint.as_ref().map(|(at, _)| at.index);
    for (index, (_, placement)) in &truth.placed {
        if Some(*index) > checkpoint {
            match wal.place(*index, *placement) {
                Ok(()) => {}
                Err(Error::Damaged { .. }) => return false,
                Err(error) => panic!("place {index}: {error}"),
            }
        }
    }
    for (stream, trim) in &truth.trims {
        wal.trim(*stream, *trim);
    }
    let mut right = true;
    for (entry, placement) in truth.placed.values() {
        let Some(placement) = placement else { continue };
        let next = placement.first + u64::from(placement.count);
        let stream = placement.stream;
        let trim = truth.trims.get(&stream).copied().unwrap_or(0);
        if next <= trim {
            continue;
        }
        let first = placement.first.max(trim);
        match wal.read_stream(stream, first, next, usize::MAX, ReadMode::Blocking) {
            Ok(got) => {
                let got = got.unwrap();
                assert_eq!(got.len(), 1, "{placement:?}");
                assert_eq!(got[0].placement, *placement);
                assert_eq!(got[0].id, entry.id);
                assert_eq!(got[0].head, entry.head);
                assert_eq!(got[0].payload.bytes, entry.payload.bytes, "{placement:?} is wrong");
            }
            Err(Error::Damaged { .. }) => right = false,
            Err(error) => panic!("read {placement:?}: {error}"),
        }
        match wal.search_time(stream, placement.time, ReadMode::Blocking) {
            Ok(found) => assert_eq!(found, Some(Some(first)), "time {placement:?}"),
            Err(Error::Damaged { .. }) => right = false,
            Err(error) => panic!("search {placement:?}: {error}"),
        }
    }
    right
}

/// Returns the bytes of a file to damage: all, but only every ninth between zeroes.
fn positions(bytes: &[u8]) -> impl Iterator<Item = usize> + '_ {
    let near = |at: usize| {
        let start = at.saturating_sub(4);
        let end = (at + 5).min(bytes.len());
        bytes[start..end].iter().any(|byte| *byte != 0)
    };
    (0..bytes.len()).filter(move |at| near(*at) || at % 9 == 0)
}

/// Returns the bits of these bytes to flip: all, but only one per byte between zeroes.
fn bits(bytes: &[u8]) -> impl Iterator<Item = (usize, u64)> + '_ {
    let of_byte = |at: usize| {
        let one = at as u64 / 9 % 8;
        let is_empty = bytes[at.saturating_sub(4)..(at + 5).min(bytes.len())] == [0; 9];
        let bits = if is_empty { one..one + 1 } else { 0..8 };
        bits.map(move |bit| (at, bit))
    };
    positions(bytes).flat_map(of_byte)
}

/// Counts damages by class.
#[derive(Debug, Default)]
struct Tally(std::collections::BTreeMap<String, u64>);

impl Tally {
    fn add(&mut self, class: DamageClass) {
        *self.0.entry(format!("{class:?}")).or_default() += 1;
    }

    fn of(&self, class: DamageClass) -> u64 {
        self.0.get(&format!("{class:?}")).copied().unwrap_or(0)
    }
}

/// Returns the files of the log, without prepared segments and the temporary state file, whose
/// damage has no effect.
pub fn files(disk: &SimulatedDisk) -> Vec<(String, Vec<u8>)> {
    let names = disk
        .files()
        .into_iter()
        .filter(|name| name.ends_with(".seg") || name.ends_with(".cold") || name == "state");
    names.map(|name| (name.clone(), disk.read_file(&name).unwrap())).collect()
}

fn flip_bits(golden: &Golden, share: u64) -> Tally {
    let mut rng = TestRng::new(seed("bits"));
    let mut tally = Tally::default();
    for (name, bytes) in files(&golden.disk) {
        for (at, bit) in bits(&bytes) {
            if !rng.one_in(share) {
                continue;
            }
            let _context = PrintOnPanic(format!("bit {bit} of byte {at} of {name}"));
            let disk = golden.disk.fork();
            disk.flip_bit(&name, 8 * at as u64 + bit);
            tally.add(classify(&disk, &golden.truth));
        }
    }
    tally
}

#[test]
fn undamaged_log_reads_back() {
    let cleaned = Golden::cleaned();
    for golden in [Golden::marked(), Golden::unmarked(), Golden::compacted(), cleaned] {
        assert_eq!(classify(&golden.disk, &golden.truth), DamageClass::Equal);
    }
}

#[test]
fn detects_every_relevant_bit_flip() {
    let tally = flip_bits(&Golden::marked(), 1);
    println!("{tally:?}");
    assert_eq!(tally.of(DamageClass::Truncated), 0, "every group has a sync marker");
    assert!(tally.of(DamageClass::Refused) > 0 && tally.of(DamageClass::Reported) > 0);
}

#[test]
fn detects_every_relevant_bit_flip_of_compacted_log() {
    for golden in [Golden::compacted(), Golden::cleaned()] {
        let tally = flip_bits(&golden, 60_u64.saturating_sub(10 * rounds()).max(2));
        println!("{tally:?}");
        assert_eq!(tally.of(DamageClass::Truncated), 0, "every group has a sync marker");
        assert!(tally.of(DamageClass::Refused) > 0 && tally.of(DamageClass::Reported) > 0);
    }
}

#[test]
fn bit_flip_truncates_at_most_the_unmarked_last_group() {
    let tally = flip_bits(&Golden::unmarked(), 20);
    println!("{tally:?}");
    assert!(tally.of(DamageClass::Truncated) > 0, "the documented limit");
}

#[test]
fn detects_every_shortened_file() {
    for (golden, may_truncate) in [(Golden::marked(), false), (Golden::unmarked(), true)] {
        let mut tally = Tally::default();
        for (name, bytes) in files(&golden.disk) {
            let is_edge = |at: &usize| !(2..=509).contains(&(at % 512)) || at.is_multiple_of(37);
            for len in positions(&bytes).filter(|at| !may_truncate || is_edge(at)) {
                let _context = PrintOnPanic(format!("{name} truncated to {len}"));
                let disk = golden.disk.fork();
                disk.truncate(&name, len as u64);
                tally.add(classify(&disk, &golden.truth));
            }
        }
        println!("{tally:?}");
        assert!(may_truncate || tally.of(DamageClass::Truncated) == 0);
    }
}

/// Zeroes sectors or replaces them by others, like lost and misdirected writes.
#[test]
fn detects_lost_and_misdirected_sectors() {
    let golden = Golden::marked();
    let all = files(&golden.disk);
    let mut rng = TestRng::new(seed("sectors"));
    let mut tally = Tally::default();
    for (name, bytes) in &all {
        for start in (0..bytes.len()).step_by(512) {
            let end = (start + 512).min(bytes.len());
            let disk = golden.disk.fork();
            disk.zero(name, start as u64..end as u64);
            let _context = PrintOnPanic(format!("{name} zeroed at {start}"));
            tally.add(classify(&disk, &golden.truth));
            let (other, source) = &all[rng.below(all.len() as u64) as usize];
            let from = 512 * rng.below(source.len() as u64 / 512) as usize;
            // The same offset in another segment is the most likely mistake.
            let from = if rng.one_in(2) { start.min(source.len() - 512) } else { from };
            let mut changed = bytes.clone();
            changed[start..end].copy_from_slice(&source[from..from + end - start]);
            let disk = golden.disk.fork();
            disk.write_file(name, changed);
            let _context = PrintOnPanic(format!("{name} at {start} from {other} at {from}"));
            tally.add(classify(&disk, &golden.truth));
        }
    }
    println!("{tally:?}");
    assert_eq!(tally.of(DamageClass::Truncated), 0);
}

#[test]
fn detects_missing_files_of_compacted_log() {
    let golden = Golden::compacted();
    for (name, _) in files(&golden.disk) {
        let disk = golden.disk.fork();
        disk.remove_file(&name);
        let _context = PrintOnPanic(format!("without {name}"));
        assert_eq!(classify(&disk, &golden.truth), DamageClass::Refused, "without {name}");
    }
}

#[test]
fn detects_missing_swapped_and_duplicated_files() {
    let golden = Golden::marked();
    let all = files(&golden.disk);
    for (name, _) in &all {
        let disk = golden.disk.fork();
        disk.remove_file(name);
        let _context = PrintOnPanic(format!("without {name}"));
        assert_eq!(classify(&disk, &golden.truth), DamageClass::Refused, "without {name}");
    }
    for (a, a_bytes) in &all {
        for (b, b_bytes) in &all {
            let disk = golden.disk.fork();
            disk.write_file(a, b_bytes.clone());
            disk.write_file(b, a_bytes.clone());
            let _context = PrintOnPanic(format!("{a} and {b} swapped"));
            let class = classify(&disk, &golden.truth);
            // Sealed segments are quarantined; neither is read as the other.
            let sealed = a != b && class == DamageClass::Reported;
            let wanted = if a == b { DamageClass::Equal } else { DamageClass::Refused };
            assert!(sealed || class == wanted, "{class:?}");
        }
    }
    // A copy under another valid name must not be used.
    for (name, bytes) in &all {
        for copy in ["00000000000000ff.seg", "00000000000000ff.new", "ready-7", "state.tmp"] {
            let disk = golden.disk.fork();
            disk.write_file(copy, bytes.clone());
            let _context = PrintOnPanic(format!("{name} again as {copy}"));
            assert_ne!(classify(&disk, &golden.truth), DamageClass::Truncated);
        }
    }
}

/// Damage is found, and does not affect reads of other entries.
#[test]
fn damage_in_sealed_segment_is_reported_and_others_are_served() {
    let golden = Golden::marked();
    let first = golden.truth.placed[&3].0.payload.bytes.clone();
    let (name, at) = files(&golden.disk)
        .into_iter()
        .find_map(|(name, bytes)| {
            let at = bytes.windows(16).position(|window| window == &first[100..116])?;
            Some((name, at))
        })
        .unwrap();
    golden.disk.flip_bit(&name, 8 * at as u64);
    let manual = ManualWal::open(Arc::new(golden.disk.clone()), options()).unwrap();
    for (index, (_, placement)) in golden.truth.placed.range(8..) {
        manual.wal.place(*index, *placement).unwrap();
    }
    let mut damaged = Vec::new();
    for (index, (_, placement)) in &golden.truth.placed {
        let Some(placement) = placement else { continue };
        let below = placement.first + 1;
        let read = manual.wal.read_stream(
            placement.stream,
            placement.first,
            below,
            usize::MAX,
            ReadMode::Blocking,
        );
        match read {
            Ok(_) => {}
            Err(Error::Damaged { file, bytes, .. }) => {
                assert!(file.contains(&name), "{file} is not {name}");
                assert!(bytes.contains(&(at as u64)), "{at} is not in {bytes:?}");
                damaged.push(*index);
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(damaged, [3]);
    assert!(manual.wal.writable().is_ok(), "a read error poisons nothing");
}

#[test]
fn damaged_last_group_is_torn_only_without_sync_marker() {
    for (golden, wanted) in
        [(Golden::unmarked(), DamageClass::Truncated), (Golden::marked(), DamageClass::Refused)]
    {
        let last = golden.truth.durable.entries.values().next_back().unwrap();
        let needle: &[u8] =
            if last.payload.bytes.len() > 16 { &last.payload.bytes[..16] } else { &last.head };
        let (name, at) = files(&golden.disk)
            .into_iter()
            .find_map(|(name, bytes)| {
                Some((name, bytes.windows(needle.len()).rposition(|window| window == needle)?))
            })
            .unwrap();
        for bit in 0..8 * needle.len() as u64 {
            let disk = golden.disk.fork();
            disk.flip_bit(&name, 8 * at as u64 + bit);
            let _context = PrintOnPanic(format!("{name} at {at}, {wanted:?}"));
            assert_eq!(classify(&disk, &golden.truth), wanted);
            if wanted == DamageClass::Truncated {
                continues_after_truncation(&disk, &golden.truth);
            }
        }
    }
}

/// A truncated group does not return, also after a shorter group replaces it.
fn continues_after_truncation(disk: &SimulatedDisk, truth: &Truth) {
    // `classify` has opened the log, which truncated it.
    disk.crash(Crash::LoseAll);
    let disk = disk.reopen();
    let mut manual = ManualWal::open(Arc::new(disk.clone()), options()).unwrap();
    let last = manual.wal.state().last.unwrap();
    assert!(Some(last) < truth.durable.last());
    let next = entry(LogId { term: 9, index: last.index + 1 }, 1, 3, 3);
    manual.wal.append(vec![next.clone()], Box::new(|result| result.unwrap()));
    manual.idle();
    drop(manual);
    disk.crash(Crash::LoseAll);
    let manual = ManualWal::open(Arc::new(disk.reopen()), options()).unwrap();
    assert_eq!(manual.wal.state().last, Some(next.id));
    assert!(is_right(&manual.wal, &next));
}

#[test]
fn vote_survives_free_of_its_segment() {
    let mut golden = Golden::new();
    golden.vote("the only vote");
    golden.settle();
    let oldest: Vec<String> = segments(&golden.disk);
    for _ in 0..12 {
        for _ in 0..3 {
            golden.append(20_000);
            golden.settle();
        }
        let last = golden.truth.durable.last().unwrap();
        golden.place_upto(last.index);
        golden.manual().idle();
        golden.checkpoint(last.index);
        golden.queue(QueuedOp::Purge(last));
        for stream in 1..4 {
            let next = golden.next[stream as usize];
            golden.manual().wal.trim(stream, next);
        }
        golden.manual().idle();
        golden.truth.collect_results(&golden.acks, false, false);
    }
    let now = segments(&golden.disk);
    assert!(oldest.iter().all(|name| !now.contains(name)), "{oldest:?} still in {now:?}");
    assert!(now.len() < 5, "{} segments are kept: {now:?}", now.len());
    let golden = golden.close();
    let manual = ManualWal::open(Arc::new(golden.disk.clone()), options()).unwrap();
    assert_eq!(manual.wal.state().vote.as_deref(), Some(&b"the only vote"[..]));
    assert_eq!(manual.wal.state().last, golden.truth.durable.last());
}

fn segments(disk: &SimulatedDisk) -> Vec<String> {
    disk.files().into_iter().filter(|name| name.ends_with(".seg")).collect()
}
