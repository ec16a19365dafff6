//! Backups of real nodes, and topics made again from them: whole, damaged and interrupted ones.
//! What is compared is what `consume` prints.

// Damages and looks at the files of a backup.
#![allow(clippy::disallowed_methods)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::helix::{Node, Outcome, command, helix, json};

/// Bytes of the topics that are interrupted on their way: enough that a kill finds them there.
const LARGE_LINES: usize = 60_000;

/// How often an interruption may come too late.
const TRIES: usize = 20;

/// What is in a topic, by partition and in order: keys and values.
fn contents(node: &Node, topic: &str) -> Vec<(u64, Value, Value)> {
    let text = node.ok(&["consume", topic, "-o", "jsonl"]);
    let mut records: Vec<_> = text.lines().map(json).collect();
    records.sort_by_key(|record| (record["partition"].as_u64(), record["offset"].as_u64()));
    let record = |record: Value| {
        (record["partition"].as_u64().unwrap(), record["key"].clone(), record["value"].clone())
    };
    records.into_iter().map(record).collect()
}

fn backup(node: &Node, folder: &Path, more: &[&str]) -> Value {
    let args = ["backup", folder.to_str().unwrap(), "-o", "json"];
    json(&node.ok(&[&args[..], more].concat()))
}

fn restore(node: &Node, folder: &Path, more: &[&str]) -> Outcome {
    node.run(&[&["restore", folder.to_str().unwrap(), "-o", "json"], more].concat(), "")
}

fn verify(folder: &Path) -> Outcome {
    helix(&["backup", "verify", folder.to_str().unwrap()], "")
}

/// The files of a backup that hold what is backed up.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(self::files(&path));
        } else if path.file_name().unwrap() != "lock" {
            files.push(path);
        }
    }
    files
}

fn lines(count: usize) -> String {
    (0..count).map(|number| format!("key-{}:value {number:0>100}\n", number % 97)).collect()
}

const KEYED: [&str; 4] = ["produce", "orders", "--key-separator", ":"];

#[test]
fn a_backup_goes_on_and_comes_back() {
    let node = Node::start();
    node.ok(&["topic", "create", "orders", "-p", "3", "--retention-time", "9d"]);
    node.ok_with(&KEYED, &lines(500));
    // The first batch of a partition begins before the log does.
    node.ok(&["topic", "trim", "orders", "-p", "1", "--to", "+2", "--yes"]);
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("backup");
    let rows = backup(&node, &folder, &["--topic", "orders"]);
    assert_eq!(rows[1]["log_start_offset"], 2);
    let total: u64 =
        rows.as_array().unwrap().iter().map(|row| row["new_records"].as_u64().unwrap()).sum();
    assert_eq!(total, 498);
    assert_eq!(verify(&folder).code, 0);
    let first = contents(&node, "orders");

    // What comes later is not in it, and comes in with the next run, beside other topics.
    node.ok_with(&KEYED, &lines(100));
    assert_eq!(restore(&node, &folder, &["--as", "before"]).code, 0);
    assert_eq!(contents(&node, "before"), first);
    let rows = backup(&node, &folder, &[]);
    let new: Vec<_> =
        rows.as_array().unwrap().iter().filter(|row| row["topic"] == "orders").collect();
    let total: u64 = new.iter().map(|row| row["new_records"].as_u64().unwrap()).sum();
    assert_eq!(total, 100);
    assert_eq!(verify(&folder).code, 0);

    // To another cluster, all of it.
    let other = Node::start();
    let restored = restore(&other, &folder, &[]);
    assert_eq!(restored.code, 0, "{restored:?}");
    assert_eq!(contents(&other, "orders"), contents(&node, "orders"));
    assert_eq!(contents(&other, "before"), first);
    let rows = json(&restored.stdout);
    let row = |row: &&Value| row["topic"] == "orders" && row["partition"] == 1;
    let row = rows.as_array().unwrap().iter().find(row).unwrap();
    let offsets = [&row["backup_start_offset"], &row["first_offset"], &row["next_offset"]];
    assert_eq!(offsets, [&Value::from(2), &0.into(), &row["record_count"]]);
    let topic = json(&other.ok(&["topic", "describe", "orders", "-o", "json"]));
    assert_eq!(topic["config"]["retention_time"], "9d");

    // A folder belongs to one cluster, and a topic that is not empty is left alone.
    assert_eq!(other.run(&["backup", folder.to_str().unwrap()], "").code, 4);
    assert_eq!(restore(&other, &folder, &["--topic", "orders"]).code, 4);
    assert_eq!(restore(&other, &folder, &["--topic", "nowhere"]).code, 3);
    assert_eq!(restore(&other, &folder, &["--as", "one-name-for-all"]).code, 2);
    node.ok(&["topic", "delete", "orders", "--yes"]);
    node.ok(&["topic", "create", "orders", "-p", "3"]);
    node.ok_with(&KEYED, &lines(1000));
    let made_anew = node.run(&["backup", folder.to_str().unwrap(), "--topic", "orders"], "");
    assert_eq!(made_anew.code, 4, "{made_anew:?}");
    assert_eq!(verify(&folder).code, 0, "and what is in it stays");
}

#[test]
fn nothing_is_restored_from_a_damaged_file() {
    let node = Node::start();
    node.ok(&["topic", "create", "orders", "-p", "2"]);
    node.ok_with(&KEYED, &lines(50));
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("backup");
    backup(&node, &folder, &["--topic", "orders"]);
    let files = files(&folder);
    assert_eq!(files.len(), 3, "{files:?}");
    for file in files {
        let good = fs::read(&file).unwrap();
        for place in [0, good.len() / 2, good.len() - 1] {
            let mut bad = good.clone();
            bad[place] ^= 0x10;
            fs::write(&file, bad).unwrap();
            for run in [verify(&folder), restore(&node, &folder, &["--as", "damaged"])] {
                assert_eq!(run.code, 11, "{} byte {place}: {run:?}", file.display());
                let said = format!("{}{}", run.stdout, run.stderr);
                assert!(said.contains(file.to_str().unwrap()), "{said}");
            }
        }
        fs::remove_file(&file).unwrap();
        assert_ne!(verify(&folder).code, 0, "{}", file.display());
        fs::write(&file, good).unwrap();
    }
    assert_eq!(verify(&folder).code, 0);
    assert!(!node.ok(&["topic", "list"]).contains("damaged"));
}

#[test]
fn offsets_are_kept_where_that_is_asked_for() {
    let node = Node::start();
    node.ok(&["topic", "create", "orders", "-p", "2", "--max-batch-bytes", "8KiB"]);
    node.ok_with(&KEYED, &lines(20_000));
    node.ok(&["topic", "trim", "orders", "--to", "-777", "--yes"]);
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("backup");
    backup(&node, &folder, &["--topic", "orders"]);
    let restored = restore(&node, &folder, &["--as", "same", "--keep-offsets"]);
    assert_eq!(restored.code, 0, "{restored:?}");
    let numbered = |topic| {
        let text = node.ok(&["consume", topic, "-f", "%p %o %k %v\n"]);
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(numbered("same").len(), 2 * 777);
    assert_eq!(numbered("same"), numbered("orders"));
    let offsets = |topic| json(&node.ok(&["offsets", topic, "-o", "json"]));
    assert_eq!(offsets("same"), offsets("orders"));
    let again = ["--as", "same", "--keep-offsets", "--resume"];
    let again = restore(&node, &folder, &again);
    assert_eq!(again.code, 0, "{again:?}");
    let elsewhere = restore(&node, &folder, &["--as", "same", "--resume"]);
    assert_eq!(elsewhere.code, 4, "offsets from 0 on are others: {elsewhere:?}");
}

/// Runs a command and kills it (kill -9) as soon as a condition holds. Whether it was still there.
fn killed_when(node: &Node, args: &[&str], condition: impl Fn() -> bool) -> bool {
    let mut child = command(&[args, &["--addr", node.address()]].concat());
    let mut child = child.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    while !condition() && child.try_wait().unwrap().is_none() {
        assert!(started.elapsed() < Duration::from_secs(60), "it never came so far");
        std::thread::yield_now();
    }
    child.kill().unwrap();
    !child.wait().unwrap().success()
}

#[test]
fn a_backup_that_was_interrupted_goes_on() {
    let node = Node::start();
    node.ok(&["topic", "create", "orders", "-p", "2"]);
    node.ok_with(&KEYED, &lines(LARGE_LINES));
    let base = tempfile::tempdir().unwrap();
    let mut interrupted = None;
    for number in 0..TRIES {
        let folder = base.path().join(number.to_string());
        let second = folder.join("topic-orders/partition-1");
        let args = ["backup", folder.to_str().unwrap(), "--topic", "orders"];
        if killed_when(&node, &args, || second.exists()) {
            interrupted = Some(folder);
            break;
        }
        fs::remove_dir_all(&folder).unwrap();
    }
    let folder = interrupted.expect("one that was interrupted");
    for run in [verify(&folder), restore(&node, &folder, &["--as", "half"])] {
        assert_eq!(run.code, 4, "{run:?}");
        assert!(run.stderr.contains("was interrupted"), "{run:?}");
    }
    backup(&node, &folder, &["--topic", "orders"]);
    assert_eq!(verify(&folder).code, 0);
    // An interrupted later run leaves something behind the end that the manifest names.
    let file = folder.join("topic-orders/partition-0");
    let mut longer = fs::read(&file).unwrap();
    longer.extend_from_slice(&[7; 1000]);
    fs::write(&file, longer).unwrap();
    assert_eq!(verify(&folder).code, 0);
    node.ok_with(&KEYED, &lines(10));
    backup(&node, &folder, &["--topic", "orders"]);
    assert_eq!(verify(&folder).code, 0);
    assert_eq!(restore(&node, &folder, &["--as", "whole"]).code, 0);
    assert_eq!(contents(&node, "whole"), contents(&node, "orders"));
}

#[test]
fn a_restore_that_was_interrupted_goes_on_when_it_is_told_to() {
    let node = Node::start();
    node.ok(&["topic", "create", "orders", "-p", "2"]);
    node.ok_with(&KEYED, &lines(LARGE_LINES));
    let base = tempfile::tempdir().unwrap();
    let folder = base.path().join("backup");
    backup(&node, &folder, &["--topic", "orders"]);
    let mut interrupted = None;
    for number in 0..TRIES {
        let name = format!("restored-{number}");
        let args = ["restore", folder.to_str().unwrap(), "--as", &name];
        let has_some = || {
            let listed = node.run(&["offsets", &name, "-o", "json"], "");
            listed.code == 0 && json(&listed.stdout)[0]["high_watermark"] != 0
        };
        let was_there = killed_when(&node, &args, has_some);
        let ends = json(&node.ok(&["offsets", &name, "-o", "json"]));
        let ends = ends.as_array().unwrap().iter().map(|row| row["high_watermark"].as_u64());
        if was_there && ends.map(Option::unwrap).sum::<u64>() < LARGE_LINES as u64 {
            interrupted = Some(name);
            break;
        }
        node.ok(&["topic", "delete", &name, "--yes"]);
    }
    let name = interrupted.expect("one that was interrupted");
    assert_eq!(restore(&node, &folder, &["--as", &name]).code, 4, "it is not empty");
    let resumed = restore(&node, &folder, &["--as", &name, "--resume"]);
    assert_eq!(resumed.code, 0, "{resumed:?}");
    let rows = json(&resumed.stdout);
    let new: u64 =
        rows.as_array().unwrap().iter().map(|row| row["new_records"].as_u64().unwrap()).sum();
    assert!((1..LARGE_LINES as u64).contains(&new), "{rows}");
    assert_eq!(contents(&node, &name), contents(&node, "orders"));
    // Once more: there is nothing left to do.
    assert_eq!(restore(&node, &folder, &["--as", &name, "--resume"]).code, 0);

    node.ok(&["topic", "create", "other", "-p", "2", "--retention-bytes", "1GiB"]);
    node.ok_with(&["produce", "other", "-p", "0"], "something else\n");
    let refused = restore(&node, &folder, &["--as", "other", "--resume"]);
    assert_eq!(refused.code, 4, "{refused:?}");
    assert!(refused.stderr.contains("holds something else"), "{refused:?}");
    let topic = json(&node.ok(&["topic", "describe", "other", "-o", "json"]));
    assert_eq!(topic["config"]["retention_bytes"], 1 << 30, "and nothing of it is changed");
    assert_eq!(node.ok(&["consume", "other"]), "something else\n");
}
