//! Runs all targets on the corpus: inputs that reached new code, or a bug.

#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::sync::Mutex;

use helix_fuzz::{TARGETS, corpus};

/// All panics, including those that the server caught in a task.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

#[test]
fn targets_pass_on_the_corpus() {
    std::panic::set_hook(Box::new(|info| {
        eprintln!("{info}");
        PANICS.lock().unwrap().push(info.to_string());
    }));
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
