//! Tests of `helix wal` on the data directory of a stopped node.

#![allow(clippy::disallowed_methods)] // The tests damage files.

use std::fs;
use std::path::{Path, PathBuf};

use crate::harness::{CommandOutput, ServerProcess, helix, json, until};

/// Returns the data directory of a node with a few records, and the directory of one of its logs.
fn written() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let node = ServerProcess::start_in(directory.path());
    node.ok_with(&["produce", "default"], "a\nb\n");
    assert!(node.end_by_closing_stdin().success());
    let mut logs: Vec<_> = fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("state").is_file())
        .collect();
    logs.sort();
    let log = logs.pop().unwrap();
    (directory, log)
}

fn wal(command: &str, dir: &Path) -> CommandOutput {
    helix(&["wal", command, dir.to_str().unwrap()], "")
}

#[track_caller]
fn assert_damage_explained(outcome: &CommandOutput, what: &str) {
    assert_eq!(outcome.code, 11, "{outcome:?}");
    assert!((outcome.stdout.clone() + &outcome.stderr).contains(what), "{outcome:?}");
    for part in ["\n  why: ", "\n  try: "] {
        assert!(outcome.stderr.contains(part), "{outcome:?}");
    }
}

#[test]
fn undamaged_directory_needs_no_repair() {
    let (directory, _) = written();
    assert_eq!(wal("verify", directory.path()).code, 0);
    let repaired = wal("repair", directory.path());
    assert_eq!(repaired.code, 0, "{repaired:?}");
    assert!(repaired.stderr.starts_with("nothing to repair"), "{repaired:?}");
    let missing = wal("inspect", &directory.path().join("elsewhere"));
    assert_eq!(missing.code, 3, "{missing:?}");
    assert!(missing.stderr.contains("does not exist"), "{missing:?}");
}

#[test]
fn damaged_state_file_is_reported() {
    let (directory, log) = written();
    let state = log.join("state");
    let mut bytes = fs::read(&state).unwrap();
    bytes[20] ^= 1;
    fs::write(&state, &bytes).unwrap();
    for command in ["inspect", "verify", "repair"] {
        assert_damage_explained(&wal(command, directory.path()), "does not verify");
    }
    // The other logs of the node are still listed.
    let path = directory.path().to_str().unwrap();
    let shown = helix(&["wal", "inspect", path, "-o", "json"], "");
    assert!(!json(&shown.stdout).as_array().unwrap().is_empty(), "{shown:?}");

    for gone in ["state", "lock"] {
        fs::remove_file(log.join(gone)).unwrap();
        for command in ["inspect", "verify"] {
            assert_damage_explained(&wal(command, &log), "is missing, but there are segments");
        }
    }
}

#[test]
fn damage_before_the_end_of_a_log_is_reported() {
    let (_folder, log) = written();
    let mut segments: Vec<_> = fs::read_dir(&log)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension() == Some("seg".as_ref()))
        .collect();
    segments.sort();
    // A segment that the state file lists.
    fs::remove_file(&segments[0]).unwrap();
    assert_damage_explained(&wal("verify", &log), "the file is missing");
    let path = log.to_str().unwrap();
    let refused = helix(&["wal", "repair", path, "--drop", "end", "--yes"], "");
    assert_eq!(refused.code, 11, "{refused:?}");
    let found = json(&helix(&["wal", "verify", path, "-o", "json"], "").stdout);
    assert!(found["findings"][0]["first_byte"].is_null(), "{found}");
}

#[test]
fn compression_shows_in_topics_and_logs() {
    let directory = tempfile::tempdir().unwrap();
    let node = ServerProcess::start_in(directory.path());
    let text = "the same line again\n".repeat(2_000);
    node.ok_with(&["produce", "default", "--compression", "zstd"], &text);
    node.ok_with(&["produce", "default"], "a\nb\n");
    let described = json(&node.ok(&["topic", "describe", "default", "-o", "json"]));
    let compression = &described["compression"];
    assert!(compression["compressed_batches"].as_u64() > Some(0), "{compression}");
    assert!(compression["compressed_batches"].as_u64() < compression["sampled_batches"].as_u64());
    assert!(compression["ratio"].as_f64() > Some(2.0), "{compression}");
    assert!(node.end_by_closing_stdin().success());
    let path = directory.path().to_str().unwrap();
    let plain = json(&helix(&["wal", "inspect", path, "-o", "json"], "").stdout);
    assert!(plain[0].get("codecs").is_none(), "{plain}");
    let logs = json(&helix(&["wal", "inspect", path, "--codecs", "-o", "json"], "").stdout);
    let shares: Vec<_> =
        logs.as_array().unwrap().iter().flat_map(|log| log["codecs"].as_array().unwrap()).collect();
    let of = |codec: &str| *shares.iter().find(|share| share["codec"] == codec).unwrap();
    assert_eq!((&of("none")["records"], shares.len()), (&2.into(), 2), "{shares:?}");
    assert_eq!(of("zstd")["records"], 2_000);
    assert!(of("zstd")["ratio"].as_f64() > Some(5.0), "{shares:?}");
    assert_eq!(of("none")["stored_bytes"], of("none")["uncompressed_bytes"]);
}

#[test]
fn compaction_by_key_shows_in_topics_and_logs() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let node = ServerProcess::start_with(&["--data-dir", path, "--cleaner-lag", "1s"]);
    node.ok(&["topic", "create", "table", "--cleanup", "compact"]);
    let refused = node.run(&["produce", "table"], "without a key\n");
    assert_ne!(refused.code, 0, "{refused:?}");
    assert!(refused.stderr.contains("has no key"), "{refused:?}");
    node.ok_with(&["produce", "table", "--key-separator", ":"], "a:1\nb:1\na:2\n");
    node.ok(&["produce", "table", "--key", "b", "--tombstone"]);
    let described = || json(&node.ok(&["topic", "describe", "table", "-o", "json"]));
    until("the topic is compacted", || described()["partitions"][0]["clean_offset"] == 4);
    let config = &described()["config"];
    assert_eq!(
        (&config["cleanup"], &config["tombstone_retention_time"]),
        (&"compact".into(), &"86400s".into())
    );
    assert_eq!(described()["partitions"][0]["is_uncleanable"], false);
    let records = node.ok(&["consume", "table", "-o", "jsonl"]);
    let offsets: Vec<_> = records.lines().map(|line| json(line)["offset"].clone()).collect();
    assert_eq!(offsets, [2, 3], "the latest record of each key: {records}");
    let altered = node.ok(&["topic", "alter", "table", "--cleanup", "delete", "-o", "json"]);
    assert_eq!(json(&altered)["config"]["cleanup"], "delete");
    node.ok_with(&["produce", "table"], "without a key\n");

    assert!(node.end_by_closing_stdin().success());
    let logs = json(&helix(&["wal", "inspect", path, "-o", "json"], "").stdout);
    let logs = logs.as_array().unwrap().iter();
    let compacted: Vec<_> = logs.filter_map(|log| log["compacted"].as_array()).flatten().collect();
    assert_eq!(compacted.len(), 1, "{compacted:?}");
    assert_eq!(compacted[0]["clean_offset"], 4);
    assert_eq!(compacted[0]["tombstones_below"], 0);
}
