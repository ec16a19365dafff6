//! A crash at every change that short sequences make to the disk, and at each of them with every
//! way in which the unsynced sectors, sizes and names can have come through.

use helix_wal::Options;
use helix_wal::storage::{Crash, Fate, Pending};

use crate::common::{Dice, OnPanic, rounds, seed, small};
use crate::model::Driver;

/// One action of a sequence.
#[derive(Debug, Clone, Copy)]
enum Act {
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

use Act::*;

fn act(driver: &mut Driver, act: Act) {
    match act {
        Append(sizes) => driver.append(sizes),
        Vote => driver.vote(),
        Truncate => driver.truncate(),
        Place(count) => driver.place(count),
        Commit => driver.commit(),
        Checkpoint => driver.checkpoint(),
        Purge => driver.purge_all(),
        Install(sizes) => driver.install_with(sizes),
        Retain(sizes) => driver.retain_with(sizes),
        TrimAll => driver.trim_all(),
        TrimButOne => driver.trim_but_one(),
        Settle => driver.settle(),
        Idle => {
            driver.hand().idle();
            driver.hear();
        }
        Reopen | ReopenLost => {
            driver.drop_log();
            let stop = driver.disk.stop_at();
            let crash = if matches!(act, Reopen) { Crash::KeepAll } else { Crash::LoseAll };
            driver.disk.crash(crash);
            driver.disk = driver.disk.reopen();
            driver.term += 1;
            driver.disk.stop_at_change(stop);
            driver.try_open();
        }
    }
}

/// Runs the sequence until the disk stops or the sequence ends.
fn play(script: &[Act], options: &Options, stop: Option<u64>) -> Driver {
    let mut driver = Driver::new(77, options.clone());
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

fn changes(script: &[Act], options: &Options) -> u64 {
    play(script, options, None).disk.changes()
}

/// All ways through for up to 8 changes that matter, and draws for more.
fn ways(pending: &[Pending], dice: &mut Dice) -> Vec<Vec<Fate>> {
    let matters = |change: &Pending| !matches!(change, Pending::Sector { changes: false, .. });
    let places: Vec<usize> = (0..pending.len()).filter(|i| matters(&pending[*i])).collect();
    let mut ways = Vec::new();
    if places.len() <= 4 {
        for code in 0..1 << (2 * places.len()) {
            ways.push(choose(pending.len(), &places, |i| ALL[(code >> (2 * i)) & 3]));
        }
    }
    let rest = places.len().saturating_sub(8);
    for other in [Fate::Lost, Fate::Torn, Fate::Garbled] {
        // Beyond eight, the rest all came through or all did not, before or after those eight.
        let windows: &[(usize, Fate)] = match rest {
            0 => &[(0, Fate::Kept)],
            _ => &[(0, Fate::Lost), (0, Fate::Kept), (rest, Fate::Lost), (rest, Fate::Kept)],
        };
        for (start, outside) in windows {
            for mask in 0..1u32 << places.len().min(8) {
                ways.push(choose(pending.len(), &places, |i| match i.checked_sub(*start) {
                    Some(bit @ 0..8) if mask >> bit & 1 == 1 => Fate::Kept,
                    Some(0..8) => other,
                    _ => *outside,
                }));
            }
        }
    }
    // Sectors that were written with what they held already can still come out as garbage.
    for _ in 0..16 {
        ways.push((0..pending.len()).map(|_| ALL[dice.below(4) as usize]).collect());
    }
    ways.sort_unstable_by_key(|way| way.iter().map(|fate| *fate as u8).collect::<Vec<_>>());
    ways.dedup();
    ways
}

const ALL: [Fate; 4] = [Fate::Kept, Fate::Lost, Fate::Torn, Fate::Garbled];

fn choose(len: usize, places: &[usize], fate: impl Fn(usize) -> Fate) -> Vec<Fate> {
    let mut way = vec![Fate::Kept; len];
    for (i, place) in places.iter().enumerate() {
        way[*place] = fate(i);
    }
    way
}

/// What follows each crash: the log opens, is right, takes a shorter group, and survives another
/// crash at any point of that.
fn survive(crashed: &Driver, way: &[Fate], seed: u64, full: bool) {
    let mut driver = crashed.fork(seed);
    driver.disk.crash(Crash::Chosen(way));
    driver.disk = driver.disk.reopen();
    driver.term += 1;
    if !full {
        driver.open();
        return;
    }
    // The second crash comes while the first is being recovered from, or soon after.
    let stop = driver.disk.changes() + driver.dice.below(24);
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

/// `skipped` actions are only played: what they do is explored elsewhere.
fn explore(name: &str, script: &[Act], skipped: usize, options: &Options) -> u64 {
    let base = seed(name);
    let mut dice = Dice::new(base);
    let first = if skipped == 0 { 0 } else { changes(&script[..skipped], options) };
    let end = changes(script, options);
    let mut states = 0;
    for stop in (0..rounds()).flat_map(|_| first..end) {
        let crashed = play(script, options, Some(stop));
        assert!(crashed.disk.stopped(), "change {stop} of {end} was not reached");
        let pending = crashed.disk.pending();
        for way in ways(&pending, &mut dice) {
            let seed = dice.seed();
            let _context = OnPanic(format!("{name}: stopped at {stop}\n{pending:#?}\n{way:?}"));
            survive(&crashed, &way, seed, states % 4 == 0);
            states += 1;
        }
    }
    println!("{name}: {states} states after {} changes", end - first);
    states
}

/// Groups of up to eight sectors that matter, truncation, votes.
#[test]
fn groups_survive_in_every_way() {
    let script = [
        Append(&[30, 400, 700]),
        Settle,
        Vote,
        Append(&[1400, 900]),
        Settle,
        Truncate,
        Append(&[50]),
        Settle,
        Idle,
        Append(&[3000]),
        Settle,
    ];
    explore("groups", &script, 0, &small());
}

/// The same on blocks that held something else before.
#[test]
fn recycled_segments_survive_in_every_way() {
    let round =
        [Append(&[14_000, 14_000]), Settle, Place(9), Commit, Checkpoint, Purge, TrimAll, Idle];
    let mut script = Vec::new();
    for _ in 0..4 {
        script.extend(round);
    }
    script.extend([Append(&[300]), Settle, Vote, Settle]);
    let options = small();
    explore("recycled", &script, 20, &options);
}

#[test]
fn rolling_sealing_and_checkpoints_survive_in_every_way() {
    let script = [
        Vote,
        Append(&[14_000, 14_000, 500]),
        Settle,
        Append(&[14_000, 14_000, 500]),
        Place(3),
        Settle,
        Checkpoint,
        Append(&[14_000, 14_000]),
        Settle,
        Place(9),
        Idle,
        Checkpoint,
        Purge,
        Idle,
    ];
    let options = small();
    explore("rolling", &script, 0, &options);
}

#[test]
fn reopening_survives_in_every_way() {
    let script = [
        Append(&[300, 300]),
        Vote,
        Settle,
        Reopen,
        Append(&[5000]),
        Settle,
        ReopenLost,
        Append(&[100]),
        Settle,
        Place(2),
        Checkpoint,
        Reopen,
        Append(&[40]),
        Settle,
    ];
    explore("reopening", &script, 0, &small());
}

#[test]
fn an_append_of_many_groups_survives_in_every_way() {
    let script = [Append(&[6000, 6000, 6000, 100]), Vote, Append(&[30]), Settle, Truncate, Settle];
    let options = Options { group_bytes: 8 << 10, ..small() };
    explore("many groups", &script, 0, &options);
}

/// Sealed segments are rewritten, the state file names others, the old ones go: at every moment of
/// that the old ones or the new ones are there, and each entry once.
#[test]
fn compaction_survives_in_every_way() {
    let round = [Append(&[5000, 300, 9000, 300]), Settle, Place(4), Idle];
    let mut script = Vec::new();
    for _ in 0..16 {
        script.extend(round);
    }
    script.extend([Checkpoint, Purge, Settle]);
    let skipped = script.len();
    script.extend([TrimButOne, Idle, Append(&[200]), Settle, Idle]);
    let options = Options { tail_bytes: 0, ..small() };
    let done = play(&script, &options, None);
    assert!(done.rewritten > 0, "nothing was rewritten");
    explore("compaction", &script, skipped, &options);
}

/// A snapshot with its records: all of it or nothing, and nothing is left lying about.
#[test]
fn a_snapshot_with_records_survives_in_every_way() {
    let script = [
        Append(&[300, 300, 300]),
        Settle,
        Place(2),
        Install(&[200, 5000, 40]),
        Append(&[50, 60]),
        Settle,
        Place(2),
        Install(&[]),
        Append(&[70]),
        Idle,
    ];
    explore("snapshot", &script, 0, &small());
}

/// What was received outlives every crash once that was said, until its snapshot is installed.
#[test]
fn what_was_received_survives_in_every_way() {
    let script = [
        Append(&[300, 300]),
        Settle,
        Place(2),
        Retain(&[200, 40]),
        Checkpoint,
        Retain(&[200, 5000, 40]),
        Append(&[70]),
        Settle,
        Reopen,
        Install(&[300, 20]),
        Append(&[70]),
        Idle,
    ];
    explore("received", &script, 0, &small());
}

/// Cut, a shorter group over the same place, crash again: nothing of the first may come back.
#[test]
fn what_was_cut_never_comes_back() {
    let base = seed("cut");
    for n in 0..300 {
        let _context = OnPanic(format!("cut: HELIX_SEED={base}, round {n}"));
        let mut driver = Driver::new(base + n, small());
        driver.open();
        driver.append(&[200]);
        driver.settle();
        for _ in 0..6 {
            // A long group that loses power before its sync, a short one in its place.
            let sync = driver.disk.changes() + 1;
            driver.disk.stop_at_change(Some(sync));
            let long: Vec<usize> = (0..8).map(|_| 200 + driver.dice.below(600) as usize).collect();
            driver.append(&long);
            driver.settle();
            driver.crash();
            driver.append(&[16]);
            driver.check();
            if driver.dice.one_in(2) {
                driver.crash();
                driver.check();
            }
        }
    }
}
