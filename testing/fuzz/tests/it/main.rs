//! Every input that once led somewhere new, or to a fault, goes through its target again.

#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use helix_fuzz::TARGETS;

/// What panicked, also where the panic was caught: in a task of the server.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn corpus(target: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{folder:?}: {e}"));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn the_corpus_goes_through() {
    std::panic::set_hook(Box::new(|info| {
        eprintln!("{info}");
        PANICS.lock().unwrap().push(info.to_string());
    }));
    let mut bytes = 0;
    for (name, target) in TARGETS {
        let files = corpus(name);
        assert!(!files.is_empty(), "{name} has no corpus");
        for file in &files {
            let input = std::fs::read(file).unwrap();
            bytes += input.len();
            let input = input.as_slice();
            // It ends nothing here, so that all that fail are named.
            drop(std::panic::catch_unwind(|| target(input)));
            let panics = std::mem::take(&mut *PANICS.lock().unwrap());
            assert!(panics.is_empty(), "{name} with {}: {panics:?}", file.display());
        }
        println!("{name}: {} inputs", files.len());
    }
    assert!(bytes < 1 << 20, "the corpus is kept below 1 MiB, it has {bytes} bytes");
}
