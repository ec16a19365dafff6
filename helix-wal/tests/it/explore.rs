//! Explores the states that a crash can leave: runs every short sequence of actions, stops at every
//! disk change of its last action, and applies every combination of surviving unsynced changes.
//! Each state is opened, compared with the model, and crashed again.
//!
//! Sequences are numbered, short ones first, so that a given number of them is deterministic.

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
    /// Crashes, keeps all unsynced changes, and reopens.
    Reopen,
    /// Crashes, loses all unsynced changes, and reopens.
    ReopenLost,
}

fn run_action(driver: &mut ModelDriver, run_action: ScriptAction) {
    match run_action {
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
            let crash = if matches!(run_action, ScriptAction::Reopen) {
                Crash::KeepAll
            } else {
                Crash::LoseAll
            };
            driver.disk.crash(crash);
            driver.disk = driver.disk.reopen();
            driver.term += 1;
            driver.disk.stop_at_change(stop);
            driver.try_open();
        }
    }
}

/// Runs a script until the disk stops or the script ends.
pub fn play(script: &[ScriptAction], options: &Options, stop: Option<u64>) -> ModelDriver {
    let mut driver = ModelDriver::new(77, options.clone());
    driver.disk.record(true);
    driver.disk.stop_at_change(stop);
    if driver.try_open() {
        for next in script {
            run_action(&mut driver, *next);
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

/// Returns all crash outcomes for up to 8 relevant changes, and a selection for more.
fn crash_outcomes(pending: &[PendingChange], rng: &mut TestRng) -> Vec<Vec<CrashEffect>> {
    let relevant: Vec<usize> = (0..pending.len()).filter(|i| is_relevant(&pending[*i])).collect();
    let mut crash_outcomes = Vec::new();
    if relevant.len() <= 4 {
        for code in 0..1 << (2 * relevant.len()) {
            crash_outcomes.push(choose(pending.len(), &relevant, |i| ALL[(code >> (2 * i)) & 3]));
        }
    }
    let rest = relevant.len().saturating_sub(8);
    for other in [CrashEffect::Lost, CrashEffect::Torn, CrashEffect::Garbled] {
        // With more than eight, the others are all kept or all lost, before or after those eight.
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
            for mask in 0..1u32 << relevant.len().min(8) {
                crash_outcomes.push(choose(pending.len(), &relevant, |i| {
                    match i.checked_sub(*start) {
                        Some(bit @ 0..8) if mask >> bit & 1 == 1 => CrashEffect::Kept,
                        Some(0..8) => other,
                        _ => *outside,
                    }
                }));
            }
        }
    }
    // Sectors that were written with equal contents can still become garbage.
    for _ in 0..16 {
        crash_outcomes.push((0..pending.len()).map(|_| ALL[rng.below(4) as usize]).collect());
    }
    crash_outcomes.sort_unstable_by_key(|outcome| {
        outcome.iter().map(|effect| *effect as u8).collect::<Vec<_>>()
    });
    crash_outcomes.dedup();
    crash_outcomes
}

/// Returns whether keeping and losing a change differ.
fn is_relevant(change: &PendingChange) -> bool {
    !matches!(change, PendingChange::Sector { changes: false, .. })
}

const ALL: [CrashEffect; 4] =
    [CrashEffect::Kept, CrashEffect::Lost, CrashEffect::Torn, CrashEffect::Garbled];

fn choose(
    len: usize,
    relevant: &[usize],
    effect: impl Fn(usize) -> CrashEffect,
) -> Vec<CrashEffect> {
    let mut outcome = vec![CrashEffect::Kept; len];
    for (i, place) in relevant.iter().enumerate() {
        outcome[*place] = effect(i);
    }
    outcome
}

/// Explores the outcomes of a crash, all or about `max` of them. Returns the number of states.
pub fn crash_at(
    crashed: &ModelDriver,
    rng: &mut TestRng,
    max: Option<usize>,
    context: &str,
) -> u64 {
    // The states explored from here need no trace.
    crashed.disk.record(false);
    let pending = crashed.disk.pending();
    let crash_outcomes = crash_outcomes(&pending, rng);
    let step = max.map_or(1, |max| crash_outcomes.len().div_ceil(max));
    let first = rng.below(step as u64) as usize;
    let mut states = 0;
    for (n, outcome) in crash_outcomes.iter().skip(first).step_by(step).enumerate() {
        let seed = rng.seed();
        let _context = OnFailure { context, pending: &pending, outcome, seed };
        states += 1;
        match n {
            n if n % 64 == 3 => states += crash_in_recovery(crashed, outcome, seed),
            n if n.is_multiple_of(4) => crash_again_soon(crashed, outcome, seed),
            _ => after_crash(crashed, outcome, seed).open(),
        }
    }
    states
}

/// Guard that describes the state if the test fails. Formats lazily.
struct OnFailure<'a> {
    context: &'a str,
    pending: &'a [PendingChange],
    outcome: &'a [CrashEffect],
    seed: u64,
}

impl Drop for OnFailure<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self { context, pending, outcome, seed } = self;
            eprintln!("{context}\n{pending:#?}\n{outcome:?}, fork {seed}");
        }
    }
}

/// Returns the log after the crash, not opened yet.
fn after_crash(crashed: &ModelDriver, outcome: &[CrashEffect], seed: u64) -> ModelDriver {
    let mut driver = crashed.fork(seed);
    driver.disk.crash(Crash::Chosen(outcome));
    driver.disk = driver.disk.reopen();
    driver.term += 1;
    driver
}

/// Opens the log, checks it, appends a shorter group, and crashes again at a random point.
fn crash_again_soon(crashed: &ModelDriver, outcome: &[CrashEffect], seed: u64) {
    let mut driver = after_crash(crashed, outcome, seed);
    // The second crash comes during the recovery from the first, or soon after.
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

/// Crashes at every disk change of the recovery. Returns the number of states.
fn crash_in_recovery(crashed: &ModelDriver, outcome: &[CrashEffect], seed: u64) -> u64 {
    let mut driver = after_crash(crashed, outcome, seed);
    let first = driver.disk.changes();
    driver.open();
    let end = driver.disk.changes();
    let mut states = 0;
    for stop in first..end {
        for second in [Crash::LoseAll, Crash::KeepAll, Crash::Seeded(seed ^ stop)] {
            let mut driver = after_crash(crashed, outcome, seed);
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

// Enumeration of all short sequences.

/// Actions of a sequence.
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

/// Number of actions at the end of the list that change the disk: a sequence ends with one of them.
const CHANGING: u64 = 6;

/// Initial states: empty, sealed segments, recycled segments, segments to compact, a reopened log.
fn initial_scripts() -> [Vec<ScriptAction>; 5] {
    use ScriptAction::*;
    let sealed = [
        &[Vote, Append(&[14_000, 14_000, 500]), Settle, Append(&[14_000, 14_000, 500])][..],
        &[Settle, Place(9), Idle, Checkpoint, Append(&[14_000]), Settle],
    ];
    let round =
        [Append(&[14_000, 14_000]), Settle, Place(9), Commit, Checkpoint, Purge, TrimAll, Idle];
    let scattered = [Append(&[5000, 300, 9000, 300]), Settle, Place(4), Idle];
    let mut cold = scattered.repeat(16);
    cold.extend([Checkpoint, Purge, Settle, TrimButOne]);
    let reopened = vec![Append(&[300, 300]), Vote, Settle, ReopenLost, Append(&[5000]), Settle];
    [Vec::new(), sealed.concat(), round.repeat(3), cold, reopened]
}

/// Returns the script of a number, the length of its initial part, and the length of the rest.
fn sequence(
    initial_scripts: &[Vec<ScriptAction>],
    mut number: u64,
) -> (Vec<ScriptAction>, usize, u32) {
    let mut length = 1;
    loop {
        let before = (ALPHABET.len() as u64).pow(length - 1);
        let count = initial_scripts.len() as u64 * before * CHANGING;
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
    let mut script = initial_scripts[take(initial_scripts.len())].clone();
    let skipped = script.len();
    for _ in 1..length {
        script.push(ALPHABET[take(ALPHABET.len())]);
    }
    script.push(ALPHABET[ALPHABET.len() - 1 - take(CHANGING as usize)]);
    (script, skipped, length)
}

/// State shared by the workers.
struct Exploration {
    initial_scripts: [Vec<ScriptAction>; 5],
    options: Options,
    seed: u64,
    wanted: u64,
    /// Explores only a part of the outcomes of each crash.
    is_slice: bool,
    next: AtomicU64,
    states: AtomicU64,
    crashes: AtomicU64,
    longest: AtomicU64,
    /// Signatures of explored crashes. Different sequences may lead to the same crash.
    explored: Mutex<HashSet<u64>>,
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

    /// Returns the limit of outcomes per crash. With more than eight relevant changes not every
    /// subset is tested, to reach more crashes.
    fn outcomes_max(&self, pending: &[PendingChange]) -> Option<usize> {
        match self.is_slice {
            true => Some(OUTCOMES_OF_SLICE),
            false => (pending.iter().filter(|it| is_relevant(it)).count() > 8)
                .then_some(OUTCOMES_OF_MANY),
        }
    }

    /// Explores all crashes during the last action of a sequence. Shorter sequences cover the rest.
    fn explore(&self, number: u64) -> u64 {
        let (script, skipped, length) = sequence(&self.initial_scripts, number);
        self.longest.fetch_max(u64::from(length), Ordering::Relaxed);
        let first = changes(&script[..script.len() - 1], &self.options);
        let end = changes(&script, &self.options);
        let mut rng = TestRng::new(self.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut states = 0;
        for stop in first..end {
            let crashed = play(&script, &self.options, Some(stop));
            assert!(crashed.disk.stopped(), "change {stop} of {end} was not reached");
            if self.explored.lock().unwrap().insert(signature(&crashed)) {
                let Self { seed, .. } = self;
                let what = &script[skipped..];
                let context = format!("explore: HELIX_SEED={seed}, sequence {number}, {stop}");
                let max = self.outcomes_max(&crashed.disk.pending());
                states += crash_at(&crashed, &mut rng, max, &format!("{context}: {what:?}"));
                self.crashes.fetch_add(1, Ordering::Relaxed);
            }
        }
        states
    }
}

/// Returns a hash that is equal for crashes with equal disks and expectations.
fn signature(crashed: &ModelDriver) -> u64 {
    let mut hasher = DefaultHasher::new();
    crashed.disk.trace().hash(&mut hasher);
    (crashed.truth.calls, crashed.truth.open.len()).hash(&mut hasher);
    hasher.finish()
}

/// Default number of states. `HELIX_STATES` sets another one (`just explore-wal`).
const STATES: u64 = 8_000;
/// Outcomes per crash: in a default run, and in a long run for crashes with too many outcomes.
const OUTCOMES_OF_SLICE: usize = 8;
const OUTCOMES_OF_MANY: usize = 256;

#[test]
fn short_sequences_survive_every_crash() {
    let requested: Option<u64> =
        std::env::var("HELIX_STATES").ok().map(|text| text.parse().unwrap());
    let wanted = requested.unwrap_or(STATES);
    let exploration = Exploration {
        initial_scripts: initial_scripts(),
        options: Options { tail_bytes: 0, ..small_options() },
        seed: seed("explore"),
        wanted,
        is_slice: requested.is_none(),
        next: AtomicU64::new(0),
        states: AtomicU64::new(0),
        crashes: AtomicU64::new(0),
        longest: AtomicU64::new(0),
        explored: Mutex::default(),
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
