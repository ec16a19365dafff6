//! Seeds that every change must pass, with what is checked of each: see `run`.

#![allow(clippy::unwrap_used)] // Helpers are no tests to clippy.

use std::process::Command;
use std::thread;
use std::time::Duration;

use helix_sim::marks::Mark;
use helix_sim::plan::Plan;
use helix_sim::run::run_plan;
use helix_sim::tally::Tally;

#[test]
fn some_seeds_break_no_promise() {
    for seed in [2, 3] {
        let plan = Plan { duration: Duration::from_secs(15), ..Plan::new(seed) };
        let report = run_plan(plan, false).unwrap_or_else(|failure| {
            panic!("seed {}: {}", failure.seed, failure.what);
        });
        assert!(report.verdict.acked > 100 && report.verdict.finals > 0, "seed {seed}");
    }
}

/// What a run in a process of its own says. At its end stands a number for all that happened, every
/// byte on the network among it and every line of the history.
fn told(seed: u64) -> String {
    tell(seed, &["--duration", "4"])
}

fn tell(seed: u64, flags: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_helix-sim"));
    command.args(["--tally", "--seed", &seed.to_string()]).args(flags);
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "seed {seed}: {said}");
    said
}

/// At other moments, beside others: none of that may show.
#[test]
fn a_seed_gives_the_same_run_down_to_the_bytes_on_the_network() {
    let seeds = [4, 5, 6];
    let first: Vec<String> = thread::scope(|scope| {
        let runs = seeds.map(|seed| scope.spawn(move || told(seed)));
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    });
    assert_ne!(first[0].lines().last(), first[1].lines().last(), "all runs are one");
    for (seed, first) in seeds.into_iter().zip(first) {
        assert_eq!(told(seed), first, "seed {seed} gave two runs");
    }
}

/// What runs of this length must meet, or they show nothing of it.
const MUST_MEET: [Mark; 8] = [
    Mark::TornTailCut,
    Mark::DamageDone,
    Mark::RepairDone,
    Mark::LeaderChangeWithBatchInFlight,
    Mark::DuplicateSuppressed,
    Mark::DiskFullEntered,
    Mark::DiskFullLeft,
    Mark::SnapshotInstalled,
];

/// Seeds with the themes under which they meet it, and some that meet the same: what a plan draws
/// anew makes other runs of all seeds.
const SLICE: [(u64, &str); 6] =
    [(8, "damage"), (5, "disks"), (1, "space"), (9, "damage"), (10, "disks"), (2, "space")];

#[test]
fn a_slice_meets_what_it_is_there_for() {
    let run = |(seed, theme)| tell(seed, &["--duration", "20", "--theme", theme]);
    let (one, other) = SLICE.split_at(SLICE.len() / 2);
    let all: Vec<String> = thread::scope(|scope| {
        let halves = [one, other]
            .map(|half| scope.spawn(move || half.iter().copied().map(run).collect::<Vec<_>>()));
        halves.into_iter().flat_map(|half| half.join().unwrap()).collect()
    });
    let mut total = Tally::default();
    all.iter().for_each(|said| total.take(&Tally::parse(said).0));
    let missing = total.missing();
    let missed: Vec<_> = MUST_MEET.into_iter().filter(|mark| missing.contains(mark)).collect();
    assert!(missed.is_empty(), "never met: {missed:?}");
}
