//! A shard whose log is damaged on a single node: commands say neither that it is empty nor that an
//! election runs.

#![allow(clippy::disallowed_methods)] // The test damages a file.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::harness::{ServerProcess, json};

/// Value of a record that is damaged.
const NEEDLE: &str = "needle-in-a-segment";

/// Returns the files of the logs in a data directory.
fn segments(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(segments(&path));
        } else if path.extension() == Some("seg".as_ref()) {
            found.push(path);
        }
    }
    found
}

/// Flips three bytes of the record in the log.
fn damage(directory: &Path) {
    for path in segments(directory) {
        let mut bytes = fs::read(&path).unwrap();
        let at = bytes.windows(NEEDLE.len()).position(|it| it == NEEDLE.as_bytes());
        if let Some(at) = at {
            bytes[at..at + 3].iter_mut().for_each(|byte| *byte ^= 1);
            fs::write(&path, bytes).unwrap();
            return;
        }
    }
    panic!("the record is in no segment");
}

fn row(rows: &str, name: &str) -> Value {
    let rows = json(rows);
    rows.as_array().unwrap().iter().find(|row| row["name"] == name).unwrap().clone()
}

#[test]
fn a_damaged_shard_is_neither_empty_nor_without_a_leader() {
    let directory = tempfile::tempdir().unwrap();
    let node = ServerProcess::start_in(directory.path());
    node.ok(&["topic", "create", "sock", "--partitions", "1"]);
    node.ok(&["topic", "create", "empty", "--partitions", "1"]);
    node.ok_with(&["produce", "sock"], &format!("{NEEDLE}\n"));
    node.ok_with(&["produce", "sock"], "later\n");
    assert!(node.end_by_closing_stdin().success());
    damage(directory.path());
    let node = ServerProcess::start_in(directory.path());

    let listed = row(&node.ok(&["topic", "list", "-o", "json"]), "sock");
    assert_eq!((&listed["record_count"], &listed["live_bytes"]), (&Value::Null, &Value::Null));
    let table = node.ok(&["topic", "list"]);
    let line = table.lines().find(|line| line.starts_with("sock")).unwrap();
    let cells: Vec<_> = line.split_whitespace().collect();
    assert_eq!(cells[3..5], ["-", "-"], "{table}");
    let described = json(&node.ok(&["topic", "describe", "sock", "-o", "json"]));
    let partition = &described["partitions"][0];
    for field in ["watermarks", "live_bytes", "held_bytes"] {
        assert_eq!(partition[field], Value::Null, "{described}");
    }
    let info = json(&node.ok(&["cluster", "info", "-o", "json"]));
    assert!(info["led_shards"].as_u64() < info["shard_count"].as_u64(), "{info}");

    let groups = node.run(&["group", "list", "-o", "json"], "");
    assert_eq!((groups.code, groups.stdout.trim()), (5, "[]"), "{groups:?}");

    // The damage is the reason, at once and not after the request timeout.
    let commands: [(&[&str], &str); 4] = [
        (&["consume", "sock"], ""),
        (&["tail", "sock"], ""),
        (&["offsets", "sock"], ""),
        (&["produce", "sock"], "more\n"),
    ];
    for (args, input) in commands {
        let failed = node.run(&[args, &["-o", "json", "--timeout", "10s"]].concat(), input);
        let error = json(failed.stderr.lines().last().unwrap())["error"].clone();
        assert_eq!(error["reason"], "CORRUPT_LOG", "{args:?}: {failed:?}");
        assert!(error["message"].as_str().unwrap().contains(".seg"), "{error}");
        assert_eq!(failed.code, 1, "{failed:?}");
    }

    let asked = node.run(&["topic", "delete", "sock"], "\n");
    assert_eq!(asked.code, 2, "{asked:?}");
    assert!(asked.stderr.contains("all of its records"), "{asked:?}");
    assert_eq!(row(&node.ok(&["topic", "list", "-o", "json"]), "sock")["name"], "sock");
    node.ok(&["topic", "delete", "sock", "--yes"]);
}
