//! Explores what a crash can leave behind: every short sequence of actions, stopped at every change
//! that its last action makes to the disk, with every way in which what was not synced can have
//! come through. Each state is opened and held against the model, and crashes again meanwhile.
//!
//! Sequences are numbered, the short ones first, so that a part of them is always the same part.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use helix_wal::Options;
use helix_wal::storage::{Crash, CrashEffect, PendingChange};

use crate::common::{TestRng, seed, small_options};
use crate::model::ModelDriver;

/// One action of a sequence.
#[derive(Debug, Clone, Copy)]
pub enum ScriptAction {
    Append(&'static [usize]),
    Vote,
    Truncate,
    Place(u64),
    Commit,
    Checkpoint,
    Purge,
    Install(&'static [usize]),
    Retain(&'static [usize]),
    TrimAll,
    TrimButOne,
    Settle,
    Idle,
    /// Loses power between two actions, keeps everything, and opens again.
    Reopen,
    /// The same, and loses everything that was not synced.
    ReopenLost,
}

fn act(driver: &mut ModelDriver, act: ScriptAction) {
    match act {
        ScriptAction::Append(sizes) => driver.append(sizes),
        ScriptAction::Vote => driver.vote(),
        ScriptAction::Truncate => driver.truncate(),
        ScriptAction::Place(count) => driver.place(count),
        ScriptAction::Commit => driver.commit(),
        ScriptAction::Checkpoint => driver.checkpoint(),
        ScriptAction::Purge => driver.purge_all(),
        ScriptAction::Install(sizes) => driver.install_with(sizes),
        ScriptAction::Retain(sizes) => driver.retain_with(sizes),
        ScriptAction::TrimAll => driver.trim_all(),
        ScriptAction::TrimButOne => driver.trim_but_one(),
        ScriptAction::Settle => driver.settle(),
        ScriptAction::Idle => {
            driver.manual().idle();
            driver.collect_results();
        }
        ScriptAction::Reopen | ScriptAction::ReopenLost => {
            driver.drop_log();
            let stop = driver.disk.stop_at();
            let crash = if matches!(act, ScriptAction::Reopen) { Crash::KeepAll } else { Crash::LoseAll };
            driver.disk.crash(crash);
            driver.disk = driver.disk.reopen();
            driver.term += 1;
            driver.disk.stop_at_change(stop);
            driver.try_open();
        }
    }
}

/// Runs the sequence until the disk stops or the sequence ends.
pub fn play(script: &[ScriptAction], options: &Options, stop: Option<u64>) -> ModelDriver {
    let mut driver = ModelDriver::new(77, options.clone());
    driver.disk.record(true);
    driver.disk.stop_at_change(stop);
    if driver.try_open() {
        for next in script {
            act(&mut driver, *next);
            if driver.disk.stopped() {
                break;
            }
        }
    }
    driver.drop_log();
    driver
}

pub fn changes(script: &[ScriptAction], options: &Options) -> u64 {
    play(script, options, None).disk.changes()
}

/// All ways through for up to 8 changes that matter, and draws for more.
fn ways(pending: &[PendingChange], rng: &mut TestRng) -> Vec<Vec<CrashEffect>> {
    let places: Vec<usize> = (0..pending.len()).filter(|i| matters(&pending[*i])).collect();
    let mut ways = Vec::new();
    if places.len() <= 4 {
        for code in 0..1 << (2 * places.len()) {
            ways.push(choose(pending.len(), &places, |i| ALL[(code >> (2 * i)) & 3]));
        }
    }
    let rest = places.len().saturating_sub(8);
    for other in [CrashEffect::Lost, CrashEffect::Torn, CrashEffect::Garbled] {
        // Beyond eight, the rest all came through or all did not, before or after those eight.
        let windows: &[(usize, CrashEffect)] = match rest {
            0 => &[(0, CrashEffect::Kept)],
            _ => &[
                (0, CrashEffect::Lost),
                (0, CrashEffect::Kept),
                (rest, CrashEffect::Lost),
                (rest, CrashEffect::Kept),
            ],
        };
        for (start, outside) in windows {
            for mask in 0..1u32 << places.len().min(8) {
                ways.push(choose(pending.len(), &places, |i| match i.checked_sub(*start) {
                    Some(bit @ 0..8) if mask >> bit & 1 == 1 => CrashEffect::Kept,
                    Some(0..8) => other,
                    _ => *outside,
                }));
            }
        }
    }
    // Sectors that were written with what they held already can still come out as garbage.
    for _ in 0..16 {
        ways.push((0..pending.len()).map(|_| ALL[rng.below(4) as usize]).collect());
    }
    ways.sort_unstable_by_key(|way| way.iter().map(|fate| *fate as u8).collect::<Vec<_>>());
    ways.dedup();
    ways
}

/// Whether keeping and losing it differ.
fn matters(change: &PendingChange) -> bool {
    !matches!(change, PendingChange::Sector { changes: false, .. })
}

const ALL: [CrashEffect; 4] =
    [CrashEffect::Kept, CrashEffect::Lost, CrashEffect::Torn, CrashEffect::Garbled];

fn choose(len: usize, places: &[usize], fate: impl Fn(usize) -> CrashEffect) -> Vec<CrashEffect> {
    let mut way = vec![CrashEffect::Kept; len];
    for (i, place) in places.iter().enumerate() {
        way[*place] = fate(i);
    }
    way
}

/// Ways through a crash here, all of them or up to `max` drawn ones; how many states that were.
pub fn crash_at(crashed: &ModelDriver, rng: &mut TestRng, max: Option<usize>, context: &str) -> u64 {
    // What led here is of no use to those that go on from here.
    crashed.disk.record(false);
    let pending = crashed.disk.pending();
    let ways = ways(&pending, rng);
    let step = max.map_or(1, |max| ways.len().div_ceil(max));
    let first = rng.below(step as u64) as usize;
    let mut states = 0;
    for (n, way) in ways.iter().skip(first).step_by(step).enumerate() {
        let seed = rng.seed();
        let _told = OnFailure { context, pending: &pending, way, seed };
        states += 1;
        match n {
            n if n % 64 == 3 => states += crash_again(crashed, way, seed),
            n if n.is_multiple_of(4) => survive(crashed, way, seed),
            _ => after_crash(crashed, way, seed).open(),
        }
    }
    states
}

/// Says what state it was, if the test fails in it. Nothing is formatted where it does not.
struct OnFailure<'a> {
    context: &'a str,
    pending: &'a [PendingChange],
    way: &'a [CrashEffect],
    seed: u64,
}

impl Drop for OnFailure<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self { context, pending, way, seed } = self;
            eprintln!("{context}\n{pending:#?}\n{way:?}, fork {seed}");
        }
    }
}

/// The log after power came back, not opened yet.
fn after_crash(crashed: &ModelDriver, way: &[CrashEffect], seed: u64) -> ModelDriver {
    let mut driver = crashed.fork(seed);
    driver.disk.crash(Crash::Chosen(way));
    driver.disk = driver.disk.reopen();
    driver.term += 1;
    driver
}

/// The log opens, is right, takes a shorter group, and survives another crash at any point of that.
fn survive(crashed: &ModelDriver, way: &[CrashEffect], seed: u64) {
    let mut driver = after_crash(crashed, way, seed);
    // The second crash comes while the first is being recovered from, or soon after.
    let stop = driver.disk.changes() + driver.rng.below(24);
    driver.disk.stop_at_change(Some(stop));
    if driver.try_open() {
        driver.append(&[10]);
        driver.vote();
        driver.settle();
    }
    driver.crash();
    driver.append(&[20]);
    driver.check();
    driver.crash();
    driver.check();
}

/// A second crash at every change that the recovery from the first one makes; how many.
fn crash_again(crashed: &ModelDriver, way: &[CrashEffect], seed: u64) -> u64 {
    let mut driver = after_crash(crashed, way, seed);
    let first = driver.disk.changes();
    driver.open();
    let end = driver.disk.changes();
    let mut states = 0;
    for stop in first..end {
        for second in [Crash::LoseAll, Crash::KeepAll, Crash::Seeded(seed ^ stop)] {
            let mut driver = after_crash(crashed, way, seed);
            driver.disk.stop_at_change(Some(stop));
            assert!(!driver.try_open(), "change {stop} of the recovery was not reached");
            driver.disk.crash(second);
            driver.disk = driver.disk.reopen();
            driver.open();
            states += 1;
        }
    }
    states
}

// All short sequences.

/// What a sequence is made of.
const ALPHABET: [ScriptAction; 15] = [
    ScriptAction::Append(&[300]),
    ScriptAction::Append(&[14_000, 20_000]),
    ScriptAction::Vote,
    ScriptAction::Truncate,
    ScriptAction::Place(9),
    ScriptAction::Commit,
    ScriptAction::Purge,
    ScriptAction::TrimAll,
    ScriptAction::TrimButOne,
    ScriptAction::Settle,
    ScriptAction::Idle,
    ScriptAction::Checkpoint,
    ScriptAction::Install(&[]),
    ScriptAction::Install(&[200, 5000]),
    ScriptAction::ReopenLost,
];

/// So many of them, at the end, change the disk themselves: a sequence ends with one of these.
const CHANGING: u64 = 6;

/// An empty disk; sealed segments; recycled ones; ones to be compacted; a log opened before.
fn beginnings() -> [Vec<ScriptAction>; 5] {
    use ScriptAction::*;
    let sealed = [
        &[Vote, Append(&[14_000, 14_000, 500]), Settle, Append(&[14_000, 14_000, 500])][..],
        &[Settle, Place(9), Idle, Checkpoint, Append(&[14_000]), Settle],
    ];
    let round = [
        Append(&[14_000, 14_000]),
        Settle,
        Place(9),
        Commit,
        Checkpoint,
        Purge,
        TrimAll,
        Idle,
    ];
    let scattered = [Append(&[5000, 300, 9000, 300]), Settle, Place(4), Idle];
    let mut cold = scattered.repeat(16);
    cold.extend([Checkpoint, Purge, Settle, TrimButOne]);
    let reopened = vec![Append(&[300, 300]), Vote, Settle, ReopenLost, Append(&[5000]), Settle];
    [Vec::new(), sealed.concat(), round.repeat(3), cold, reopened]
}

/// The sequence of this number, how many of its actions are its beginning, and its length without.
fn sequence(beginnings: &[Vec<ScriptAction>], mut number: u64) -> (Vec<ScriptAction>, usize, u32) {
    let mut length = 1;
    loop {
        let before = (ALPHABET.len() as u64).pow(length - 1);
        let count = beginnings.len() as u64 * before * CHANGING;
        if number < count {
            break;
        }
        number -= count;
        length += 1;
    }
    let mut take = |of: usize| {
        let taken = number % of as u64;
        number /= of as u64;
        taken as usize
    };
    let mut script = beginnings[take(beginnings.len())].clone();
    let skipped = script.len();
    for _ in 1..length {
        script.push(ALPHABET[take(ALPHABET.len())]);
    }
    script.push(ALPHABET[ALPHABET.len() - 1 - take(CHANGING as usize)]);
    (script, skipped, length)
}

/// What the workers share.
struct Exploration {
    beginnings: [Vec<ScriptAction>; 5],
    options: Options,
    seed: u64,
    wanted: u64,
    /// Whether only a part of all is wanted, and of each crash too.
    is_slice: bool,
    next: AtomicU64,
    states: AtomicU64,
    crashes: AtomicU64,
    longest: AtomicU64,
    /// Crashes that were met: another sequence may have led there.
    seen: Mutex<HashSet<u64>>,
    begun: Instant,
}

impl Exploration {
    fn work(&self) {
        while self.states.load(Ordering::Relaxed) < self.wanted {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let found = self.explore(number);
            let before = self.states.fetch_add(found, Ordering::Relaxed);
            if before / 500_000 != (before + found) / 500_000 {
                let rate = (before + found) as f64 / self.begun.elapsed().as_secs_f64();
                println!("{} states, {number} sequences, {rate:.0} states/s", before + found);
            }
        }
    }

    /// Of more than eight changes not every subset can be tried: what counts then is to meet many
    /// different ones.
    fn ways_max(&self, pending: &[PendingChange]) -> Option<usize> {
        match self.is_slice {
            true => Some(WAYS_OF_SLICE),
            false => (pending.iter().filter(|it| matters(it)).count() > 8).then_some(WAYS_OF_MANY),
        }
    }

    /// All crashes during the last action of a sequence; those before it are of shorter ones.
    fn explore(&self, number: u64) -> u64 {
        let (script, skipped, length) = sequence(&self.beginnings, number);
        self.longest.fetch_max(u64::from(length), Ordering::Relaxed);
        let first = changes(&script[..script.len() - 1], &self.options);
        let end = changes(&script, &self.options);
        let mut rng = TestRng::new(self.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut states = 0;
        for stop in first..end {
            let crashed = play(&script, &self.options, Some(stop));
            assert!(crashed.disk.stopped(), "change {stop} of {end} was not reached");
            if self.seen.lock().unwrap().insert(signature(&crashed)) {
                let Self { seed, .. } = self;
                let what = &script[skipped..];
                let context = format!("explore: HELIX_SEED={seed}, sequence {number}, {stop}");
                let max = self.ways_max(&crashed.disk.pending());
                states += crash_at(&crashed, &mut rng, max, &format!("{context}: {what:?}"));
                self.crashes.fetch_add(1, Ordering::Relaxed);
            }
        }
        states
    }
}

/// Equal for crashes with the same disk and the same to be expected of it.
fn signature(crashed: &ModelDriver) -> u64 {
    let mut hasher = DefaultHasher::new();
    crashed.disk.trace().hash(&mut hasher);
    (crashed.truth.calls, crashed.truth.open.len()).hash(&mut hasher);
    hasher.finish()
}

/// How many states are explored here; `HELIX_STATES` asks for more: `just explore-wal`.
const STATES: u64 = 8_000;
/// Ways through one crash: here, and at length where there are too many for all of them.
const WAYS_OF_SLICE: usize = 8;
const WAYS_OF_MANY: usize = 256;

#[test]
fn short_sequences_survive_in_every_way() {
    let asked: Option<u64> = std::env::var("HELIX_STATES").ok().map(|text| text.parse().unwrap());
    let wanted = asked.unwrap_or(STATES);
    let exploration = Exploration {
        beginnings: beginnings(),
        options: Options { tail_bytes: 0, ..small_options() },
        seed: seed("explore"),
        wanted,
        is_slice: asked.is_none(),
        next: AtomicU64::new(0),
        states: AtomicU64::new(0),
        crashes: AtomicU64::new(0),
        longest: AtomicU64::new(0),
        seen: Mutex::default(),
        begun: Instant::now(),
    };
    let workers = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| exploration.work());
        }
    });
    let Exploration { next, states, crashes, longest, begun, .. } = exploration;
    let (states, seconds) = (states.into_inner(), begun.elapsed().as_secs_f64());
    println!(
        "explored {states} states of {} crashes in {} sequences of up to {} actions: \
         {seconds:.0} s, {:.0} states/s on {workers} cores",
        crashes.into_inner(),
        next.into_inner(),
        longest.into_inner(),
        states as f64 / seconds,
    );
    assert!(states >= wanted);
}
