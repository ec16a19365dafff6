//! Tests of backups and restores with real nodes: complete, damaged and interrupted ones.
//! Records are compared through the output of `consume`.

// The tests read and damage the files of backups.
#![allow(clippy::disallowed_methods)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::harness::{CommandOutput, ServerProcess, command, helix, json, signal, until};

/// Lines of the topics for interrupted runs; enough to kill the program before the run ends.
const LARGE_LINES: usize = 60_000;

/// Maximum number of attempts to interrupt a run before it ends.
const TRIES: usize = 20;

/// Returns partition, key and value of all records, ordered by partition and offset.
fn contents(node: &ServerProcess, topic: &str) -> Vec<(u64, Value, Value)> {
    let text = node.ok(&["consume", topic, "-o", "jsonl"]);
    let mut records: Vec<_> = text.lines().map(json).collect();
    records.sort_by_key(|record| (record["partition"].as_u64(), record["offset"].as_u64()));
    let record = |record: Value| {
        (record["partition"].as_u64().unwrap(), record["key"].clone(), record["value"].clone())
    };
    records.into_iter().map(record).collect()
}

fn backup(node: &ServerProcess, directory: &Path, more: &[&str]) -> Value {
    let args = ["backup", directory.to_str().unwrap(), "-o", "json"];
    json(&node.ok(&[&args[..], more].concat()))
}

fn restore(node: &ServerProcess, directory: &Path, more: &[&str]) -> CommandOutput {
    node.run(&[&["restore", directory.to_str().unwrap(), "-o", "json"], more].concat(), "")
}

fn verify(directory: &Path) -> CommandOutput {
    helix(&["backup", "verify", directory.to_str().unwrap()], "")
}

/// Returns the files of a backup, except the lock file.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
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
fn backup_is_extended_and_restored() {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "orders", "--partitions", "3", "--retention-time", "9d"]);
    node.ok_with(&KEYED, &lines(500));
    // The first batch of partition 1 now starts below the log start offset.
    node.ok(&["topic", "trim", "orders", "-p", "1", "--to", "+2", "--yes"]);
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path().join("backup");
    let rows = backup(&node, &directory, &["--topic", "orders"]);
    assert_eq!(rows[1]["log_start_offset"], 2);
    let total: u64 =
        rows.as_array().unwrap().iter().map(|row| row["new_records"].as_u64().unwrap()).sum();
    assert_eq!(total, 498);
    assert_eq!(verify(&directory).code, 0);
    let first = contents(&node, "orders");

    // Later records are not in the backup; the next run adds them, and other topics.
    node.ok_with(&KEYED, &lines(100));
    assert_eq!(restore(&node, &directory, &["--as", "before"]).code, 0);
    assert_eq!(contents(&node, "before"), first);
    let rows = backup(&node, &directory, &[]);
    let new: Vec<_> =
        rows.as_array().unwrap().iter().filter(|row| row["topic"] == "orders").collect();
    let total: u64 = new.iter().map(|row| row["new_records"].as_u64().unwrap()).sum();
    assert_eq!(total, 100);
    assert_eq!(verify(&directory).code, 0);

    // Restores all topics to another cluster.
    let other = ServerProcess::start();
    let restored = restore(&other, &directory, &[]);
    assert_eq!(restored.code, 0, "{restored:?}");
    assert_eq!(contents(&other, "orders"), contents(&node, "orders"));
    assert_eq!(contents(&other, "before"), first);
    let rows = json(&restored.stdout);
    let row = |row: &&Value| row["topic"] == "orders" && row["partition"] == 1;
    let row = rows.as_array().unwrap().iter().find(row).unwrap();
    let offsets = [&row["backup_start_offset"], &row["first_offset"], &row["next_offset"]];
    assert_eq!(offsets, [&Value::from(2), &0.into(), &row["record_count"]]);
    let topic = json(&other.ok(&["topic", "describe", "orders", "-o", "json"]));
    assert_eq!(topic["config"]["retention_time"], "777600s");

    // A directory belongs to one cluster, and topics that are not empty are not overwritten.
    assert_eq!(other.run(&["backup", directory.to_str().unwrap()], "").code, 4);
    assert_eq!(restore(&other, &directory, &["--topic", "orders"]).code, 4);
    assert_eq!(restore(&other, &directory, &["--topic", "nowhere"]).code, 3);
    assert_eq!(restore(&other, &directory, &["--as", "one-name-for-all"]).code, 2);
    node.ok(&["topic", "delete", "orders", "--yes"]);
    node.ok(&["topic", "create", "orders", "--partitions", "3"]);
    node.ok_with(&KEYED, &lines(1000));
    let recreated = node.run(&["backup", directory.to_str().unwrap(), "--topic", "orders"], "");
    assert_eq!(recreated.code, 4, "{recreated:?}");
    assert_eq!(verify(&directory).code, 0, "the backup is unchanged");
}

/// Returns the sum of a column of numbers.
fn sum(rows: &Value, name: &str) -> u64 {
    rows.as_array().unwrap().iter().map(|row| row[name].as_u64().unwrap()).sum()
}

#[test]
fn deleted_records_become_gaps_and_the_rest_is_backed_up() {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "orders", "--partitions", "2"]);
    node.ok(&["topic", "create", "other"]);
    for topic in ["orders", "other"] {
        node.ok_with(&["produce", topic, "-p", "0"], "a\nb\n");
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path().join("backup");
    let run = || node.run(&["backup", directory.to_str().unwrap(), "-o", "json"], "");
    assert_eq!(run().code, 0);

    // Offsets 2 to 4 are deleted before a run copies them.
    node.ok_with(&["produce", "orders", "-p", "0"], "c\nd\ne\n");
    node.ok(&["topic", "trim", "orders", "-p", "0", "--to", "5", "--yes"]);
    node.ok_with(&["produce", "orders", "-p", "0"], "f\n");
    node.ok_with(&["produce", "other", "-p", "0"], "c\n");
    let partly = run();
    assert_eq!(partly.code, 5, "{partly:?}");
    assert!(partly.stderr.contains("orders/0: offsets 2..5 are missing"), "{partly:?}");
    let error = json(partly.stderr.lines().last().unwrap())["error"].clone();
    assert!(error["message"].as_str().unwrap().contains("3 offsets were deleted"), "{partly:?}");
    assert!(error["hint"].as_str().unwrap().contains("helix backup verify"), "{partly:?}");
    let rows = json(&partly.stdout);
    assert_eq!((sum(&rows, "new_records"), sum(&rows, "missing_offsets")), (2, 3));
    // The gap is said once, and the directory is continued.
    node.ok_with(&["produce", "orders", "-p", "0"], "g\n");
    let next = run();
    assert_eq!(next.code, 0, "{next:?}");
    assert_eq!(sum(&json(&next.stdout), "new_records"), 1);

    let verified = helix(&["backup", "verify", directory.to_str().unwrap(), "-o", "json"], "");
    assert_eq!(verified.code, 0, "{verified:?}");
    assert!(verified.stderr.contains("3 offsets in 1 partitions are missing"), "{verified:?}");
    let gaps = json(&verified.stdout)["gaps"].clone();
    assert_eq!(gaps.as_array().unwrap().len(), 1, "{gaps}");
    assert_eq!((&gaps[0]["first_offset"], &gaps[0]["next_offset"]), (&2.into(), &5.into()));
    assert_eq!(gaps[0]["cause"], "trimmed");
    let restored = restore(&node, &directory, &["--topic", "orders", "--as", "again"]);
    assert_eq!(restored.code, 0, "{restored:?}");
    assert!(restored.stderr.contains("offsets in 1 partitions are missing"), "{restored:?}");
    assert_eq!(node.ok(&["consume", "again"]), "a\nb\nf\ng\n");
    let kept = ["--topic", "orders", "--as", "kept", "--keep-offsets"];
    let refused = restore(&node, &directory, &kept);
    assert_eq!(refused.code, 4, "{refused:?}");
    assert!(refused.stderr.contains("offsets 2..5 are missing"), "{refused:?}");
    assert!(!node.ok(&["topic", "list"]).contains("kept"));
}

#[test]
fn recreated_topic_does_not_stop_the_others() {
    let node = ServerProcess::start();
    for topic in ["gone", "orders"] {
        node.ok(&["topic", "create", topic]);
        node.ok_with(&["produce", topic, "-p", "0"], "a\nb\n");
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path().join("backup");
    backup(&node, &directory, &[]);
    node.ok(&["topic", "delete", "gone", "--yes"]);
    node.ok(&["topic", "create", "gone"]);
    node.ok_with(&["produce", "orders", "-p", "0"], "c\n");
    let partly = node.run(&["backup", directory.to_str().unwrap(), "-o", "json"], "");
    assert_eq!(partly.code, 5, "{partly:?}");
    assert!(partly.stderr.contains("gone is not the topic in the backup"), "{partly:?}");
    assert_eq!(sum(&json(&partly.stdout), "new_records"), 1);
    assert_eq!(verify(&directory).code, 0);
    // The copy of the deleted topic is kept.
    assert_eq!(restore(&node, &directory, &["--topic", "gone", "--as", "back"]).code, 0);
    assert_eq!(node.ok(&["consume", "back"]), "a\nb\n");
}

/// Deletes records of `orders` while a backup copies them. Returns the directory of a run that met
/// the deletion.
fn backup_with_deletion(node: &ServerProcess, base: &Path, deletion: &[&str]) -> PathBuf {
    for number in 0..TRIES {
        let directory = base.join(number.to_string());
        node.ok(&["topic", "create", "orders", "--partitions", "2"]);
        node.ok_with(&KEYED, &lines(LARGE_LINES));
        let begun = directory.join("topic-orders/partition-0");
        let args = ["backup", directory.to_str().unwrap(), "--addr", node.address()];
        let mut child = command(&args);
        let mut child = child.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let started = Instant::now();
        while !begun.exists() {
            assert!(started.elapsed() < Duration::from_secs(60), "the backup does not begin");
            std::thread::yield_now();
        }
        signal(&child, Signal::STOP);
        node.ok(deletion);
        signal(&child, Signal::CONT);
        let code = child.wait().unwrap().code().unwrap();
        assert_eq!(verify(&directory).code, 0);
        if code != 0 {
            assert_eq!(code, 5);
            return directory;
        }
        // The backup was faster than the deletion.
        node.run(&["topic", "delete", "orders", "--yes"], "");
    }
    panic!("each backup ended before the deletion");
}

#[test]
fn records_deleted_during_a_backup_leave_a_gap() {
    for (deletion, cause) in [
        (&["topic", "delete", "orders", "--yes"][..], "topic_deleted"),
        (&["topic", "trim", "orders", "-p", "1", "--to", "latest", "--yes"], "trimmed"),
    ] {
        let node = ServerProcess::start();
        node.ok(&["topic", "create", "zebras"]);
        node.ok_with(&["produce", "zebras", "-p", "0"], "a\nb\n");
        let base = tempfile::tempdir().unwrap();
        let directory = backup_with_deletion(&node, base.path(), deletion);
        let verified = helix(&["backup", "verify", directory.to_str().unwrap(), "-o", "json"], "");
        let gaps = json(&verified.stdout)["gaps"].clone();
        assert_eq!(gaps[0]["cause"], cause, "{gaps}");
        // The other topic is whole, and the directory is continued.
        assert_eq!(restore(&node, &directory, &["--topic", "zebras", "--as", "back"]).code, 0);
        assert_eq!(node.ok(&["consume", "back"]), "a\nb\n");
        assert_eq!(node.run(&["backup", directory.to_str().unwrap()], "").code, 0);
    }
}

#[test]
fn compressed_batches_are_backed_up_and_restored_as_stored() {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "orders", "--compression", "zstd"]);
    let text = lines(2_000);
    node.ok_with(&[&KEYED[..], &["--compression", "zstd"]].concat(), &text);
    node.ok_with(&KEYED, &lines(3));
    let refused = node.run(&[&KEYED[..], &["--compression", "lz4"]].concat(), &text);
    assert!(refused.code != 0 && refused.stderr.contains("it accepts none, zstd"), "{refused:?}");
    let described =
        |node: &ServerProcess| json(&node.ok(&["topic", "describe", "orders", "-o", "json"]));
    let stored = described(&node);
    let live_bytes = stored["partitions"][0]["live_bytes"].as_u64().unwrap();
    assert!(live_bytes < text.len() as u64 / 3, "{live_bytes} of {}", text.len());
    assert_eq!(stored["config"]["allowed_compression"], "zstd");

    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path().join("backup");
    backup(&node, &directory, &["--topic", "orders"]);
    assert_eq!(verify(&directory).code, 0);
    let other = ServerProcess::start();
    let restored = restore(&other, &directory, &[]);
    assert_eq!(restored.code, 0, "{restored:?}");
    assert_eq!(contents(&other, "orders"), contents(&node, "orders"));
    let restored = described(&other);
    assert_eq!(restored["partitions"][0]["live_bytes"], live_bytes);
    assert_eq!(restored["config"]["allowed_compression"], "zstd");
}

#[test]
fn damaged_backup_is_not_restored() {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "orders", "--partitions", "2"]);
    node.ok_with(&KEYED, &lines(50));
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path().join("backup");
    backup(&node, &directory, &["--topic", "orders"]);
    let files = files(&directory);
    assert_eq!(files.len(), 3, "{files:?}");
    for file in files {
        let good = fs::read(&file).unwrap();
        for index in [0, good.len() / 2, good.len() - 1] {
            let mut bad = good.clone();
            bad[index] ^= 0x10;
            fs::write(&file, bad).unwrap();
            for run in [verify(&directory), restore(&node, &directory, &["--as", "damaged"])] {
                assert_eq!(run.code, 11, "{} byte {index}: {run:?}", file.display());
                let output = format!("{}{}", run.stdout, run.stderr);
                assert!(output.contains(file.to_str().unwrap()), "{output}");
            }
        }
        fs::remove_file(&file).unwrap();
        assert_ne!(verify(&directory).code, 0, "{}", file.display());
        fs::write(&file, good).unwrap();
    }
    assert_eq!(verify(&directory).code, 0);
    assert!(!node.ok(&["topic", "list"]).contains("damaged"));
}

#[test]
fn keep_offsets_restores_offsets() {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "orders", "--partitions", "2", "--max-batch-bytes", "8KiB"]);
    node.ok_with(&KEYED, &lines(20_000));
    node.ok(&["topic", "trim", "orders", "--to", "-777", "--yes"]);
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path().join("backup");
    backup(&node, &directory, &["--topic", "orders"]);
    let restored = restore(&node, &directory, &["--as", "same", "--keep-offsets"]);
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
    let again = restore(&node, &directory, &again);
    assert_eq!(again.code, 0, "{again:?}");
    let elsewhere = restore(&node, &directory, &["--as", "same", "--resume"]);
    assert_eq!(elsewhere.code, 4, "offsets from 0 on do not match: {elsewhere:?}");
}

/// Runs a command and kills it (kill -9) as soon as a condition holds. Returns true if it was still
/// running.
fn killed_when(node: &ServerProcess, args: &[&str], condition: impl Fn() -> bool) -> bool {
    let mut child = command(&[args, &["--addr", node.address()]].concat());
    let mut child = child.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    while !condition() && child.try_wait().unwrap().is_none() {
        assert!(started.elapsed() < Duration::from_secs(60), "condition not reached in time");
        std::thread::yield_now();
    }
    child.kill().unwrap();
    !child.wait().unwrap().success()
}

#[test]
fn interrupted_backup_is_continued() {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "orders", "--partitions", "2"]);
    node.ok_with(&KEYED, &lines(LARGE_LINES));
    let base = tempfile::tempdir().unwrap();
    let mut interrupted = None;
    for number in 0..TRIES {
        let directory = base.path().join(number.to_string());
        let second = directory.join("topic-orders/partition-1");
        let args = ["backup", directory.to_str().unwrap(), "--topic", "orders"];
        if killed_when(&node, &args, || second.exists()) {
            interrupted = Some(directory);
            break;
        }
        fs::remove_dir_all(&directory).unwrap();
    }
    let directory = interrupted.expect("an interrupted run");
    for run in [verify(&directory), restore(&node, &directory, &["--as", "half"])] {
        assert_eq!(run.code, 4, "{run:?}");
        assert!(run.stderr.contains("was interrupted"), "{run:?}");
    }
    backup(&node, &directory, &["--topic", "orders"]);
    assert_eq!(verify(&directory).code, 0);
    // An interrupted later run leaves bytes after the end in the manifest.
    let file = directory.join("topic-orders/partition-0");
    let mut longer = fs::read(&file).unwrap();
    longer.extend_from_slice(&[7; 1000]);
    fs::write(&file, longer).unwrap();
    assert_eq!(verify(&directory).code, 0);
    node.ok_with(&KEYED, &lines(10));
    backup(&node, &directory, &["--topic", "orders"]);
    assert_eq!(verify(&directory).code, 0);
    assert_eq!(restore(&node, &directory, &["--as", "whole"]).code, 0);
    assert_eq!(contents(&node, "whole"), contents(&node, "orders"));
}

#[test]
fn interrupted_restore_is_resumed_with_resume_flag() {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "orders", "--partitions", "2"]);
    node.ok_with(&KEYED, &lines(LARGE_LINES));
    let base = tempfile::tempdir().unwrap();
    let directory = base.path().join("backup");
    backup(&node, &directory, &["--topic", "orders"]);
    let mut interrupted = None;
    for number in 0..TRIES {
        let name = format!("restored-{number}");
        let args = ["restore", directory.to_str().unwrap(), "--as", &name];
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
    let name = interrupted.expect("an interrupted run");
    let refused = restore(&node, &directory, &["--as", &name]);
    assert_eq!(refused.code, 4, "{refused:?}");
    assert!(refused.stderr.contains("has the mark of that restore"), "{refused:?}");
    let token = || {
        let topic = json(&node.ok(&["topic", "describe", &name, "-o", "json"]));
        topic["partitions"][1]["fencing_token"].clone()
    };
    assert_eq!(token(), "restore-unfinished");
    let resumed = restore(&node, &directory, &["--as", &name, "--resume"]);
    assert_eq!(resumed.code, 0, "{resumed:?}");
    let rows = json(&resumed.stdout);
    let new: u64 =
        rows.as_array().unwrap().iter().map(|row| row["new_records"].as_u64().unwrap()).sum();
    assert!((1..LARGE_LINES as u64).contains(&new), "{rows}");
    assert_eq!(contents(&node, &name), contents(&node, "orders"));
    assert_eq!(token(), Value::Null);
    // Resuming a complete restore changes nothing.
    assert_eq!(restore(&node, &directory, &["--as", &name, "--resume"]).code, 0);

    node.ok(&["topic", "create", "other", "--partitions", "2", "--retention-bytes", "1GiB"]);
    node.ok_with(&["produce", "other", "-p", "0"], "something else\n");
    let refused = restore(&node, &directory, &["--as", "other", "--resume"]);
    assert_eq!(refused.code, 4, "{refused:?}");
    assert!(refused.stderr.contains("contains other records"), "{refused:?}");
    let topic = json(&node.ok(&["topic", "describe", "other", "-o", "json"]));
    assert_eq!(topic["config"]["retention_bytes"], 1 << 30, "the topic is unchanged");
    assert_eq!(node.ok(&["consume", "other"]), "something else\n");
}

#[test]
fn restore_that_cannot_be_finished_removes_its_topic() {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "orders", "--partitions", "2"]);
    node.ok_with(&KEYED, &lines(LARGE_LINES));
    let base = tempfile::tempdir().unwrap();
    let directory = base.path().join("backup");
    backup(&node, &directory, &["--topic", "orders"]);
    let (second, aside) = (directory.join("topic-orders/partition-1"), base.path().join("aside"));
    for number in 0..TRIES {
        let name = format!("restored-{number}");
        let args = ["restore", directory.to_str().unwrap(), "--as", &name];
        let mut child = command(&[&args[..], &["--addr", node.address()]].concat());
        let child = child.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        until("the topic is there", || node.run(&["topic", "describe", &name], "").code == 0);
        fs::rename(&second, &aside).unwrap();
        let output = child.wait_with_output().unwrap();
        fs::rename(&aside, &second).unwrap();
        if output.status.success() {
            // It was faster.
            continue;
        }
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("could not be restored and was removed"), "{text}");
        assert_eq!(node.run(&["topic", "describe", &name], "").code, 3);
        return;
    }
    panic!("each restore was faster than the removal of its file");
}

/// Starts a node that compacts tables soon, with a topic that keeps no deletions.
fn start_compacting(directory: &Path) -> ServerProcess {
    let path = directory.to_str().unwrap();
    let node = ServerProcess::start_with(&["--data-dir", path, "--cleaner-lag", "1s"]);
    let table = ["topic", "create", "table", "--partitions", "1", "--cleanup", "compact"];
    node.ok(&[&table[..], &["--tombstone-retention-time", "0s"]].concat());
    node
}

fn put(node: &ServerProcess, records: &str) {
    node.ok_with(&["produce", "table", "--key-separator", ":"], records);
}

/// Returns the keys of the records in a topic, by offset.
fn keys(node: &ServerProcess, topic: &str) -> Vec<(u64, String)> {
    let text = node.ok(&["consume", topic, "-o", "jsonl"]);
    let record = |line: &str| {
        let record = json(line);
        (record["offset"].as_u64().unwrap(), record["key"].as_str().unwrap().to_owned())
    };
    text.lines().map(record).collect()
}

#[test]
fn topics_with_gaps_keep_no_offsets_and_nothing_is_begun() {
    let directory = tempfile::tempdir().unwrap();
    let node = start_compacting(directory.path());
    node.ok(&["topic", "create", "a-plain", "--partitions", "1"]);
    node.ok_with(&["produce", "a-plain"], "x\ny\n");
    put(&node, "a:1\nb:1\nc:1\nd:1\ne:1\n");
    for number in 0..20 {
        put(&node, &format!("z:{number}\n"));
    }
    until("replaced records are gone", || keys(&node, "table").len() == 6);
    let newest = [(1, "b"), (2, "c"), (3, "d"), (4, "e"), (24, "z")];
    let newest: Vec<_> = newest.map(|(offset, key)| (offset, key.to_owned())).into();
    assert_eq!(keys(&node, "table")[1..], newest);
    // The last records are counted, not the last offsets.
    for args in [&["tail", "table", "-n", "5"][..], &["consume", "table", "--from=-5"]] {
        let shown = node.ok(&[args, &["-f", "%k"]].concat());
        assert_eq!(shown, "bcdez", "{args:?}");
    }
    assert_eq!(node.ok(&["tail", "table", "-n", "100", "-f", "%k"]), "abcdez");
    // Also if there is no record at the end.
    node.ok(&["produce", "table", "--key", "z", "--tombstone"]);
    until("the last key is gone", || keys(&node, "table").len() == 5);
    let ends = json(&node.ok(&["offsets", "table", "-o", "json"]));
    assert_eq!(ends[0]["high_watermark"], 26, "{ends}");
    for args in [&["tail", "table", "-n", "3"][..], &["consume", "table", "--from=-3"]] {
        assert_eq!(node.ok(&[args, &["-f", "%k"]].concat()), "cde", "{args:?}");
    }
    put(&node, "z:new\n");
    until("z replaces nothing", || keys(&node, "table").len() == 6);

    let backups = tempfile::tempdir().unwrap();
    let saved = backups.path().join("backup");
    backup(&node, &saved, &["--topic", "a-plain", "--topic", "table"]);
    let other = ServerProcess::start();
    let refused = restore(&other, &saved, &["--keep-offsets"]);
    assert_eq!(refused.code, 4, "{refused:?}");
    assert!(refused.stderr.contains("table/0 at offset 5"), "{refused:?}");
    let listed = other.ok(&["topic", "list"]);
    assert!(!listed.contains("a-plain") && !listed.contains("table"), "{listed}");
    let restored = restore(&other, &saved, &[]);
    assert_eq!(restored.code, 0, "{restored:?}");
    let table = json(&other.ok(&["topic", "describe", "table", "-o", "json"]));
    assert_eq!(
        (&table["config"]["cleanup"], &table["partitions"][0]["fencing_token"]),
        (&"compact".into(), &Value::Null)
    );
}

#[test]
fn later_backups_of_a_table_bring_no_deleted_key_back() {
    let directory = tempfile::tempdir().unwrap();
    let node = start_compacting(directory.path());
    put(&node, "deleted:1\nkept:1\n");
    let backups = tempfile::tempdir().unwrap();
    let saved = backups.path().join("backup");
    backup(&node, &saved, &["--topic", "table"]);
    put(&node, "later:1\n");
    // Nothing is compacted yet, or the whole topic is copied again.
    backup(&node, &saved, &["--topic", "table"]);
    node.ok(&["produce", "table", "--key", "deleted", "--tombstone"]);
    until("the deletion is gone", || {
        put(&node, "kept:2\n");
        !keys(&node, "table").iter().any(|(_, key)| key == "deleted")
    });
    let rows = backup(&node, &saved, &["--topic", "table"]);
    assert_eq!(rows[0]["missing_offsets"], 0, "{rows}");
    assert_eq!(verify(&saved).code, 0);
    assert_eq!(files(&saved).len(), 2, "one manifest, one copy: {:?}", files(&saved));
    let other = ServerProcess::start();
    assert_eq!(restore(&other, &saved, &[]).code, 0);
    let restored = contents(&other, "table");
    assert!(!restored.iter().any(|(_, key, _)| key == "deleted"), "{restored:?}");
    // A run after it continues the new copy.
    put(&node, "more:1\n");
    backup(&node, &saved, &["--topic", "table"]);
    assert_eq!(verify(&saved).code, 0);
}
