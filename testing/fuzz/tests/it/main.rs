//! Runs all targets on the corpus: inputs that reached new code, or a bug. Calls every method with
//! extreme values.

#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::panic::AssertUnwindSafe;
use std::sync::{Mutex, PoisonError};

use helix_fuzz::{TARGETS, corpus};

/// All panics, including those that the server caught in a task.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Held by the test whose panics are in [`PANICS`].
static TURN: Mutex<()> = Mutex::new(());

fn record_panics() {
    std::panic::set_hook(Box::new(|info| {
        eprintln!("{info}");
        PANICS.lock().unwrap().push(info.to_string());
    }));
}

#[test]
fn calls_with_extreme_values_get_an_answer() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    record_panics();
    let mut failed = Vec::new();
    let cases = helix_fuzz::extremes(|name, run| {
        // Caught, so that the failure names the case.
        drop(std::panic::catch_unwind(AssertUnwindSafe(run)));
        let panics = std::mem::take(&mut *PANICS.lock().unwrap());
        if !panics.is_empty() {
            failed.push(format!("{name}: {panics:?}"));
        }
    });
    println!("{cases} cases");
    assert!(failed.is_empty(), "{failed:#?}");
    assert!(cases > 500, "{cases}");
}

#[test]
fn targets_pass_on_the_corpus() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    record_panics();
    let mut corpus = corpus::load().unwrap();
    let bytes: usize = corpus.values().map(Vec::len).sum();
    assert!(bytes < 1 << 20, "the corpus has {bytes} bytes; keep it below 1 MiB");
    for (target, run) in TARGETS {
        let prefix = format!("{target}/");
        let inputs: Vec<_> = corpus.extract_if(.., |name, _| name.starts_with(&prefix)).collect();
        assert!(!inputs.is_empty(), "{target} has no corpus");
        for (name, input) in &inputs {
            // Caught, so that the failure names the input.
            drop(std::panic::catch_unwind(|| run(input)));
            let panics = std::mem::take(&mut *PANICS.lock().unwrap());
            assert!(panics.is_empty(), "{name}: {panics:?}");
        }
        println!("{target}: {} inputs", inputs.len());
    }
    assert!(corpus.is_empty(), "inputs of unknown targets: {:?}", corpus.keys());
}

#[test]
fn corpus_round_trips() {
    let packed = std::fs::read(corpus::path()).unwrap();
    let corpus = corpus::decode(&packed).unwrap();
    assert_eq!(corpus::encode(&corpus), packed);
    let mut damaged = packed;
    damaged[20] ^= 1;
    assert!(corpus::decode(&damaged).is_err());
}
