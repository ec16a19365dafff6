//! Seeds that every change must pass. `run` describes the checks.

#![allow(clippy::unwrap_used)] // Clippy does not treat helper functions as tests.

mod tally;
mod tamper;
mod token_calls;

use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
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

/// Most runs in which the marks must be hit; as a rule a third of them is enough.
///
/// The runs of all seeds change with what a plan draws, so no fixed list of seeds stays right.
const MOST_RUNS: u64 = 24;

/// The required marks that runs have not hit.
fn still_missing(total: &Tally) -> Vec<CoverageMark> {
    let missing = total.missing();
    MUST_MEET.into_iter().filter(|mark| missing.contains(mark)).collect()
}

#[test]
fn slice_of_seeds_hits_required_marks() {
    let next = AtomicU64::new(1);
    let total = Mutex::new(Tally::default());
    let run_until_hit = || {
        while !still_missing(&total.lock().unwrap()).is_empty() {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed > MOST_RUNS {
                return;
            }
            let theme = ["damage", "disks", "space"][seed as usize % 3];
            let said = run_with(seed, &["--duration", "20", "--theme", theme]);
            total.lock().unwrap().merge(&Tally::parse(&said).0);
        }
    };
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(run_until_hit);
        }
    });
    let missing = still_missing(&total.into_inner().unwrap());
    assert!(missing.is_empty(), "not hit by {MOST_RUNS} runs: {missing:?}");
}
