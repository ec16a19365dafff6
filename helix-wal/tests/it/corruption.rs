//! Damage at rest: every bit, every length, every sector of a small log. Whatever it is, nothing
//! wrong is read, nothing that was known to be durable goes missing unnoticed, nothing panics.

use std::sync::Arc;

use bytes::Bytes;
use helix_wal::storage::{Crash, SimulatedDisk};
use helix_wal::{
    Entry, Error, LiveEntry, LogId, Options, Placement, ReadMode, Wal, inspect, verify,
};

use crate::common::{TestRng, ManualWal, PrintOnPanic, entry, rounds, same_entry, seed, small_options};
use crate::truth::{CallbackResults, QueuedOp, Truth};

/// A log with something of everything in it, the same every time and in every version.
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
        let index = self.truth.seen.next();
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

    /// Three segments or more: sealed ones, a conflict, a purge, and an open one with entries that
    /// are not placed yet.
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

    /// At rest, with the last group marked.
    pub fn marked() -> Self {
        let mut golden = Self::build();
        golden.manual().idle();
        golden.rest()
    }

    /// A log whose older entries are in a cold segment, as far as anybody needs them.
    pub fn compacted() -> Self {
        Self::with_cold().rest()
    }

    /// The same, while it receives these entries from elsewhere: they wait for their snapshot.
    pub fn receiving(after: u64, entries: &[LiveEntry]) -> Self {
        let mut golden = Self::with_cold();
        let wal = golden.manual().wal.clone();
        let mut writer = wal.cold_writer().unwrap();
        entries.iter().for_each(|live| writer.write(live.clone()).unwrap());
        wal.retain(after, &mut writer.finish().unwrap()).unwrap();
        drop(wal);
        golden.rest()
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

    /// At rest, with a last group that nothing follows.
    pub fn unmarked() -> Self {
        let mut golden = Self::build();
        golden.manual().idle();
        golden.append(1500);
        golden.settle();
        golden.rest()
    }

    fn rest(mut self) -> Self {
        self.truth.collect_results(&self.acks, false, false);
        assert!(self.truth.open.is_empty());
        self.manual = None;
        self.disk.crash(Crash::LoseAll);
        self.disk = self.disk.reopen();
        self
    }
}

/// An entry whose payload is zeroes but for its beginning: damage in them is all the same.
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

/// How a damaged log presented itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DamageClass {
    /// All there, all right.
    Equal,
    /// All there; something that was damaged says so when it is read.
    Reported,
    /// The last group, which nothing marked, was cut.
    Truncated,
    /// Does not open, and says why.
    Refused,
}

/// Opens and reads everything. Panics on the one thing that must never be: something wrong.
pub fn classify(disk: &SimulatedDisk, truth: &Truth) -> DamageClass {
    // Looking comes first, because opening changes the folder.
    let report = inspect(disk);
    let findings = verify(disk);
    let class = open_and_read(disk, truth);
    if matches!(class, DamageClass::Reported | DamageClass::Refused) {
        let found = findings.len();
        assert!(found > 0, "a close look finds nothing: {class:?}, {report:?}");
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
    assert!(!manual.recovered.created, "taken for empty");
    let committed = state.committed;
    let known = committed.and_then(|id| truth.committed.get(&id.index).copied());
    assert_eq!(committed, known, "the commit point");
    let last = truth.durable.last();
    let cut = state.last != last;
    if cut {
        let before = truth.durable.entries.values().rev().nth(1).map(|entry| entry.id);
        assert_eq!(state.last, before, "more than the last group is missing");
        assert!(manual.recovered.torn_bytes > 0, "cut in silence");
    }
    let mut reported = false;
    for entry in truth.durable.entries.values() {
        if Some(entry.id) <= state.last {
            reported |= !is_right(&manual.wal, entry);
        }
    }
    reported |= !streams_are_right(&manual.wal, truth);
    match (cut, reported) {
        (true, _) => DamageClass::Truncated,
        (false, true) => DamageClass::Reported,
        (false, false) => DamageClass::Equal,
    }
}

/// True if the entry reads back, false if it is reported as damaged.
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

/// True if all streams read back, false if something of them is reported as damaged.
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

/// Places in a file to damage one by one: all, but in the middle of zeroes one in nine.
fn places(bytes: &[u8]) -> impl Iterator<Item = usize> + '_ {
    let near = |at: usize| {
        let start = at.saturating_sub(4);
        let end = (at + 5).min(bytes.len());
        bytes[start..end].iter().any(|byte| *byte != 0)
    };
    (0..bytes.len()).filter(move |at| near(*at) || at % 9 == 0)
}

/// The bits of those places; in the middle of zeroes it is one of each.
fn bits(bytes: &[u8]) -> impl Iterator<Item = (usize, u64)> + '_ {
    let of_byte = |at: usize| {
        let one = at as u64 / 9 % 8;
        let is_empty = bytes[at.saturating_sub(4)..(at + 5).min(bytes.len())] == [0; 9];
        let bits = if is_empty { one..one + 1 } else { 0..8 };
        bits.map(move |bit| (at, bit))
    };
    places(bytes).flat_map(of_byte)
}

/// Counts how damages were classified.
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

/// The files that make up the log. Damage to prepared segments and to the next state file is
/// damage to nothing.
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
fn an_undamaged_log_reads_back() {
    for golden in [Golden::marked(), Golden::unmarked(), Golden::compacted()] {
        assert_eq!(classify(&golden.disk, &golden.truth), DamageClass::Equal);
    }
}

#[test]
fn no_flipped_bit_goes_unnoticed_where_it_matters() {
    let tally = flip_bits(&Golden::marked(), 1);
    println!("{tally:?}");
    assert_eq!(tally.of(DamageClass::Truncated), 0, "all was marked as durable");
    assert!(tally.of(DamageClass::Refused) > 0 && tally.of(DamageClass::Reported) > 0);
}

#[test]
fn no_flipped_bit_of_a_compacted_log_goes_unnoticed_where_it_matters() {
    let tally = flip_bits(&Golden::compacted(), 60_u64.saturating_sub(10 * rounds()).max(2));
    println!("{tally:?}");
    assert_eq!(tally.of(DamageClass::Truncated), 0, "all was marked as durable");
    assert!(tally.of(DamageClass::Refused) > 0 && tally.of(DamageClass::Reported) > 0);
}

#[test]
fn a_flipped_bit_before_the_mark_costs_the_last_group_at_most() {
    let tally = flip_bits(&Golden::unmarked(), 20);
    println!("{tally:?}");
    assert!(tally.of(DamageClass::Truncated) > 0, "the stated limit");
}

#[test]
fn no_shortened_file_goes_unnoticed() {
    for (golden, may_cut) in [(Golden::marked(), false), (Golden::unmarked(), true)] {
        let mut tally = Tally::default();
        for (name, bytes) in files(&golden.disk) {
            let is_edge = |at: &usize| !(2..=509).contains(&(at % 512)) || at.is_multiple_of(37);
            for len in places(&bytes).filter(|at| !may_cut || is_edge(at)) {
                let _context = PrintOnPanic(format!("{name} cut to {len}"));
                let disk = golden.disk.fork();
                disk.truncate(&name, len as u64);
                tally.add(classify(&disk, &golden.truth));
            }
        }
        println!("{tally:?}");
        assert!(may_cut || tally.of(DamageClass::Truncated) == 0);
    }
}

/// Sectors zeroed, or replaced by one from elsewhere: what a misdirected or a lost write leaves.
#[test]
fn no_lost_or_misdirected_sector_goes_unnoticed() {
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
            // The same place in another segment is the likeliest mistake of all.
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
fn a_missing_file_of_a_compacted_log_is_noticed() {
    let golden = Golden::compacted();
    for (name, _) in files(&golden.disk) {
        let disk = golden.disk.fork();
        disk.remove_file(&name);
        let _context = PrintOnPanic(format!("without {name}"));
        assert_eq!(classify(&disk, &golden.truth), DamageClass::Refused, "without {name}");
    }
}

#[test]
fn missing_swapped_and_doubled_files_are_noticed() {
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
            // Sealed ones are withheld; nothing of either is taken for the other.
            let sealed = a != b && class == DamageClass::Reported;
            let wanted = if a == b { DamageClass::Equal } else { DamageClass::Refused };
            assert!(sealed || class == wanted, "{class:?}");
        }
    }
    // A copy under a name that the log could have given: never a second truth.
    for (name, bytes) in &all {
        for copy in ["00000000000000ff.seg", "00000000000000ff.new", "ready-7", "state.tmp"] {
            let disk = golden.disk.fork();
            disk.write_file(copy, bytes.clone());
            let _context = PrintOnPanic(format!("{name} again as {copy}"));
            assert_ne!(classify(&disk, &golden.truth), DamageClass::Truncated);
        }
    }
}

/// Damage in one place must not stop what does not need it, and a close look finds it.
#[test]
fn damage_in_a_sealed_segment_is_reported_and_the_rest_is_served() {
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
fn the_last_group_can_be_told_from_a_torn_one_after_its_mark_only() {
    for (golden, wanted) in [(Golden::unmarked(), DamageClass::Truncated), (Golden::marked(), DamageClass::Refused)] {
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
                goes_on_after_cut(&disk, &golden.truth);
            }
        }
    }
}

/// A cut group stays away, also once something shorter stands in its place.
fn goes_on_after_cut(disk: &SimulatedDisk, truth: &Truth) {
    // `classify` has opened the log already, so the cut itself is done.
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
fn a_freed_segment_takes_no_vote_with_it() {
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
    let golden = golden.rest();
    let manual = ManualWal::open(Arc::new(golden.disk.clone()), options()).unwrap();
    assert_eq!(manual.wal.state().vote.as_deref(), Some(&b"the only vote"[..]));
    assert_eq!(manual.wal.state().last, golden.truth.durable.last());
}

fn segments(disk: &SimulatedDisk) -> Vec<String> {
    disk.files().into_iter().filter(|name| name.ends_with(".seg")).collect()
}
