//! Crashes at every disk change of selected sequences, with every combination of surviving unsynced
//! sectors, sizes and names. Each sequence covers one mechanism; `explore` covers all short
//! sequences.

use helix_wal::{Options, Preparation};

use crate::common::{PrintOnPanic, TestRng, rounds, seed, small_options};
use crate::explore::ScriptAction::{self, *};
use crate::explore::{changes, crash_at, play};
use crate::model::ModelDriver;

/// Explores crashes of a script, except during its first `skipped` actions.
fn explore(name: &str, script: &[ScriptAction], skipped: usize, options: &Options) -> u64 {
    let base = seed(name);
    let mut rng = TestRng::new(base);
    let first = if skipped == 0 { 0 } else { changes(&script[..skipped], options) };
    let end = changes(script, options);
    let mut states = 0;
    for stop in (0..rounds()).flat_map(|_| first..end) {
        let crashed = play(script, options, Some(stop));
        assert!(crashed.disk.stopped(), "change {stop} of {end} was not reached");
        states += crash_at(&crashed, &mut rng, None, &format!("{name}: stopped at {stop}"));
    }
    println!("{name}: {states} states after {} changes", end - first);
    states
}

/// Covers groups of up to eight sectors, truncation and votes.
#[test]
fn groups_survive_every_crash() {
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
    explore("groups", &script, 0, &small_options());
}

/// Covers segments whose blocks held other data before.
#[test]
fn recycled_segments_survive_every_crash() {
    let round =
        [Append(&[14_000, 14_000]), Settle, Place(9), Commit, Checkpoint, Purge, TrimAll, Idle];
    let mut script = Vec::new();
    for _ in 0..4 {
        script.extend(round);
    }
    script.extend([Append(&[300]), Settle, Vote, Settle]);
    for preparation in [Preparation::Zero, Preparation::Allocate] {
        explore("recycled", &script, 20, &Options { preparation, ..small_options() });
    }
}

#[test]
fn rolls_seals_and_checkpoints_survive_every_crash() {
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
    for preparation in [Preparation::Zero, Preparation::Allocate] {
        explore("rolling", &script, 0, &Options { preparation, ..small_options() });
    }
}

#[test]
fn reopen_survives_every_crash() {
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
    explore("reopening", &script, 0, &small_options());
}

#[test]
fn append_of_many_groups_survives_every_crash() {
    let script = [Append(&[6000, 6000, 6000, 100]), Vote, Append(&[30]), Settle, Truncate, Settle];
    let options = Options { group_bytes: 8 << 10, ..small_options() };
    explore("many groups", &script, 0, &options);
}

/// Compaction rewrites sealed segments, names them in the state file and removes the old ones. At
/// every point either the old or the new segments exist, and each entry exists once.
#[test]
fn compaction_survives_every_crash() {
    let round = [Append(&[5000, 300, 9000, 300]), Settle, Place(4), Idle];
    let mut script = Vec::new();
    for _ in 0..16 {
        script.extend(round);
    }
    script.extend([Checkpoint, Purge, Settle]);
    let skipped = script.len();
    script.extend([TrimButOne, Idle, Append(&[200]), Settle, Idle]);
    let options = Options { tail_bytes: 0, ..small_options() };
    let done = play(&script, &options, None);
    assert!(done.rewritten > 0, "nothing was rewritten");
    explore("compaction", &script, skipped, &options);
}

/// A snapshot with its records is installed completely or not at all, without leftovers.
#[test]
fn snapshot_with_records_survives_every_crash() {
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
    explore("snapshot", &script, 0, &small_options());
}

/// Staged entries survive every crash after they were acknowledged, until their snapshot is
/// installed.
#[test]
fn staged_entries_survive_every_crash() {
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
    explore("staged", &script, 0, &small_options());
}

/// Entries of a truncated group never return, also after a shorter group in the same place.
#[test]
fn truncated_entries_never_return() {
    let base = seed("truncated");
    for n in 0..300 {
        let _context = PrintOnPanic(format!("truncated: HELIX_SEED={base}, round {n}"));
        let mut driver = ModelDriver::new(base + n, small_options());
        driver.open();
        driver.append(&[200]);
        driver.settle();
        for _ in 0..6 {
            // A long group loses power before its sync; a short one replaces it.
            let sync = driver.disk.changes() + 1;
            driver.disk.stop_at_change(Some(sync));
            let long: Vec<usize> = (0..8).map(|_| 200 + driver.rng.below(600) as usize).collect();
            driver.append(&long);
            driver.settle();
            driver.crash();
            driver.append(&[16]);
            driver.check();
            if driver.rng.one_in(2) {
                driver.crash();
                driver.check();
            }
        }
    }
}
