//! Commands on a topic with more partitions than one request may name, and with the longest name.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::harness::{ServerProcess, command, helix, json};

/// More than one request, and more than one call reads at the same time.
const PARTITIONS: u32 = 20_500;

#[test]
fn commands_work_for_many_partitions_with_long_names() {
    let node = ServerProcess::start();
    let topic = "t".repeat(249);
    let topic = topic.as_str();
    let count = PARTITIONS.to_string();
    let last = (PARTITIONS - 1).to_string();
    let last = last.as_str();
    node.ok(&["topic", "create", topic, "-p", &count]);
    for (partition, line) in [("0", "first\n"), ("10000", "middle\n"), (last, "last\n")] {
        node.ok_with(&["produce", topic, "-p", partition], line);
    }
    let sorted = |args: &[&str]| {
        let printed = node.ok(args);
        let mut lines: Vec<_> = printed.lines().map(str::to_owned).collect();
        lines.sort_unstable();
        lines
    };
    let all = ["first", "last", "middle"];

    for args in [
        &["offsets", topic, "-o", "json"][..],
        &["offsets", topic, "@-1h", "-o", "json"],
        &["offsets", topic, "--any-replica", "-o", "json"],
    ] {
        let offsets = json(&node.ok(args));
        let ends = offsets.as_array().unwrap().iter().map(|row| row["high_watermark"].as_u64());
        assert_eq!((ends.len(), ends.sum::<Option<u64>>()), (PARTITIONS as usize, Some(3)));
    }
    assert_eq!(sorted(&["consume", topic]), all);
    assert_eq!(sorted(&["consume", topic, "--any-replica"]), all);
    assert_eq!(sorted(&["consume", topic, "--follow", "--from", "earliest", "-n", "3"]), all);
    assert_eq!(sorted(&["tail", topic, "-n", "3"]), all);

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("backup");
    let path = path.to_str().unwrap();
    let saved = json(&node.ok(&["backup", path, "--topic", topic, "-o", "json"]));
    assert_eq!(saved.as_array().unwrap().len(), PARTITIONS as usize);
    assert_eq!(helix(&["backup", "verify", path], "").code, 0);
    node.ok(&["restore", path, "--as", "restored"]);
    assert_eq!(sorted(&["consume", "restored"]), all);

    let trimmed = node.ok(&["topic", "trim", topic, "--to", "latest", "--yes", "-o", "json"]);
    assert_eq!(json(&trimmed).as_array().unwrap().len(), PARTITIONS as usize);
    assert_eq!(node.ok(&["consume", topic]), "");
}

#[test]
fn followers_read_partitions_that_are_added() {
    let node = ServerProcess::start();
    for (topic, args) in [("one", &["consume", "--follow"][..]), ("two", &["tail", "-f"])] {
        node.ok(&["topic", "create", topic, "-p", "1"]);
        let args = [args, &[topic, "--addr", node.address()]].concat();
        let mut follower = command(&args).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines();
        let (sender, received) = mpsc::channel();
        let reader = thread::spawn(move || {
            while let Some(Ok(line)) = lines.next() {
                // Fails once the test has ended.
                let _ = sender.send(line);
            }
        });
        // It reads from the end on, so its first line shows that it has begun.
        let mut attempts = 0;
        while received.recv_timeout(Duration::from_millis(50)).is_err() {
            attempts += 1;
            assert!(attempts < 300, "{args:?} does not begin");
            node.ok_with(&["produce", topic, "-p", "0"], "begun\n");
        }
        node.ok(&["topic", "add-partitions", topic, "--total", "3"]);
        node.ok_with(&["produce", topic, "-p", "1"], "in one\n");
        node.ok_with(&["produce", topic, "-p", "2"], "in two\n");
        let mut missing = BTreeSet::from(["in one", "in two"]);
        while !missing.is_empty() {
            let line = received.recv_timeout(Duration::from_secs(30));
            let line = line.unwrap_or_else(|_| panic!("{args:?}: {missing:?} is missing"));
            missing.remove(line.as_str());
        }
        follower.kill().unwrap();
        follower.wait().unwrap();
        reader.join().unwrap();
    }
}
