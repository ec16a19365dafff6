//! Seeds that every change must pass. `run` describes the checks.

#![allow(clippy::unwrap_used)] // Clippy does not treat helper functions as tests.

mod tally;
mod tamper;
mod token_calls;

use std::process::Command;
use std::thread;
use std::time::Duration;

use helix_sim::coverage::CoverageMark;
use helix_sim::plan::SimulationPlan;
use helix_sim::run::run_plan;
use helix_sim::tally::Tally;

#[test]
fn seeds_pass_all_checks() {
    for seed in [2, 3] {
        let plan =
            SimulationPlan { duration: Duration::from_secs(15), ..SimulationPlan::new(seed) };
        let report = run_plan(plan, false).unwrap_or_else(|failure| {
            panic!("seed {}: {}", failure.seed, failure.what);
        });
        assert!(report.verdict.acked > 100 && report.verdict.finals > 0, "seed {seed}");
    }
}

/// Runs a seed in a subprocess and returns its output, which ends with the hash of the trace.
fn run_seed(seed: u64) -> String {
    run_with(seed, &["--duration", "4"])
}

fn run_with(seed: u64, flags: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_helix-sim"));
    command.args(["--tally", "--seed", &seed.to_string()]).args(flags);
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "seed {seed}: {said}");
    said
}

/// Compares runs at different times and load of the machine.
#[test]
fn equal_seeds_give_byte_identical_runs() {
    let seeds = [4, 5, 6];
    let first: Vec<String> = thread::scope(|scope| {
        let runs = seeds.map(|seed| scope.spawn(move || run_seed(seed)));
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    });
    assert_ne!(
        first[0].lines().last(),
        first[1].lines().last(),
        "different seeds gave the same run"
    );
    for (seed, first) in seeds.into_iter().zip(first) {
        assert_eq!(run_seed(seed), first, "two runs of seed {seed} differ");
    }
}

/// Marks that runs of this length must hit.
const MUST_MEET: [CoverageMark; 8] = [
    CoverageMark::TornTailCut,
    CoverageMark::DamageDone,
    CoverageMark::RepairDone,
    CoverageMark::LeaderChangeWithBatchInFlight,
    CoverageMark::DuplicateSuppressed,
    CoverageMark::DiskFullEntered,
    CoverageMark::DiskFullLeft,
    CoverageMark::SnapshotInstalled,
];

/// Seeds and themes whose runs hit these marks, with some redundancy.
///
/// A change of what a plan draws changes the runs of all seeds.
const SLICE: [(u64, &str); 6] =
    [(8, "damage"), (5, "disks"), (1, "space"), (9, "damage"), (10, "disks"), (2, "space")];

#[test]
fn slice_of_seeds_hits_required_marks() {
    let run = |(seed, theme)| run_with(seed, &["--duration", "20", "--theme", theme]);
    let (one, other) = SLICE.split_at(SLICE.len() / 2);
    let all: Vec<String> = thread::scope(|scope| {
        let halves = [one, other]
            .map(|half| scope.spawn(move || half.iter().copied().map(run).collect::<Vec<_>>()));
        halves.into_iter().flat_map(|half| half.join().unwrap()).collect()
    });
    let mut total = Tally::default();
    all.iter().for_each(|said| total.merge(&Tally::parse(said).0));
    let missing = total.missing();
    let missed: Vec<_> = MUST_MEET.into_iter().filter(|mark| missing.contains(mark)).collect();
    assert!(missed.is_empty(), "never met: {missed:?}");
}
