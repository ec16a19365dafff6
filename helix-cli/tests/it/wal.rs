//! `helix wal` on the folder of a node that has ended: what is wrong, and what to do about it.

#![allow(clippy::disallowed_methods)] // It damages files.

use std::fs;
use std::path::{Path, PathBuf};

use crate::helix::{Node, Outcome, helix, json};

/// The folder of a node that has written a few records, and that of one of its logs.
fn written() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start_in(folder.path());
    node.ok_with(&["produce", "default"], "a\nb\n");
    assert!(node.end_by_closing_stdin().success());
    let mut logs: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("state").is_file())
        .collect();
    logs.sort();
    let log = logs.pop().unwrap();
    (folder, log)
}

fn wal(command: &str, dir: &Path) -> Outcome {
    helix(&["wal", command, dir.to_str().unwrap()], "")
}

#[track_caller]
fn is_explained(outcome: &Outcome, what: &str) {
    assert_eq!(outcome.code, 11, "{outcome:?}");
    assert!((outcome.stdout.clone() + &outcome.stderr).contains(what), "{outcome:?}");
    for part in ["\n  why: ", "\n  try: "] {
        assert!(outcome.stderr.contains(part), "{outcome:?}");
    }
}

#[test]
fn a_sound_folder_needs_no_repair() {
    let (folder, _) = written();
    assert_eq!(wal("verify", folder.path()).code, 0);
    let repaired = wal("repair", folder.path());
    assert_eq!(repaired.code, 0, "{repaired:?}");
    assert!(repaired.stderr.starts_with("nothing to repair"), "{repaired:?}");
    let missing = wal("inspect", &folder.path().join("elsewhere"));
    assert_eq!(missing.code, 3, "{missing:?}");
    assert!(missing.stderr.contains("does not exist"), "{missing:?}");
}

#[test]
fn a_log_without_a_good_state_file_says_so() {
    let (folder, log) = written();
    let state = log.join("state");
    let mut bytes = fs::read(&state).unwrap();
    bytes[20] ^= 1;
    fs::write(&state, &bytes).unwrap();
    for command in ["inspect", "verify", "repair"] {
        is_explained(&wal(command, folder.path()), "does not verify");
    }
    // The other logs of the node are shown all the same.
    let path = folder.path().to_str().unwrap();
    let shown = helix(&["wal", "inspect", path, "-o", "json"], "");
    assert!(!json(&shown.stdout).as_array().unwrap().is_empty(), "{shown:?}");

    for gone in ["state", "lock"] {
        fs::remove_file(log.join(gone)).unwrap();
        for command in ["inspect", "verify"] {
            is_explained(&wal(command, &log), "is missing beside the segments");
        }
    }
}

#[test]
fn damage_that_is_no_end_of_a_log_is_not_passed_over() {
    let (_folder, log) = written();
    let mut segments: Vec<_> = fs::read_dir(&log)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension() == Some("seg".as_ref()))
        .collect();
    segments.sort();
    // The file of a segment that the state names.
    fs::remove_file(&segments[0]).unwrap();
    is_explained(&wal("verify", &log), "the file is missing");
    let path = log.to_str().unwrap();
    let refused = helix(&["wal", "repair", path, "--drop", "end", "--yes"], "");
    assert_eq!(refused.code, 11, "{refused:?}");
    let found = json(&helix(&["wal", "verify", path, "-o", "json"], "").stdout);
    assert!(found["findings"][0]["first_byte"].is_null(), "{found}");
}
