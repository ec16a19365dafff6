//! Seeds that every change must pass, with what is checked of each: see `run`.

#![allow(clippy::unwrap_used)] // Helpers are no tests to clippy.

use helix_sim::run::run;

#[test]
fn some_seeds_break_no_promise() {
    for seed in [2, 3] {
        let report = run(seed, false).unwrap_or_else(|failure| {
            panic!("seed {}: {}", failure.seed, failure.what);
        });
        assert!(report.verdict.acked > 100 && report.verdict.finals > 0, "seed {seed}");
    }
}
