//! `consume --group`: commits what was printed, and leaves the group at the end.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use rustix::process::Signal;

use crate::harness::{ServerProcess, command, json, signal};

const READ: [&str; 4] = ["consume", "default", "--group", "billing"];

#[test]
fn group_continues_after_the_printed_records() {
    let node = ServerProcess::start();
    node.ok_with(&["produce", "default", "-p", "0"], "a\nb\nc\n");
    assert_eq!(node.ok(&[&READ[..], &["-n", "2"]].concat()), "a\nb\n");
    let line = json(&node.ok(&[&READ[..], &["-o", "jsonl"]].concat()));
    assert_eq!((&line["value"], &line["offset"]), (&"c".into(), &2.into()));
    assert_eq!(node.ok(&READ), "");
    node.ok_with(&["produce", "default", "-p", "3"], "d\n");
    assert_eq!(node.ok(&READ), "d\n");
    let other = ["consume", "default", "--group", "other"];
    assert_eq!(node.ok(&[&other[..], &["--start", "latest"]].concat()), "");
    node.ok_with(&["produce", "default", "-p", "3"], "e\n");
    assert_eq!(node.ok(&other), "e\n", "its start was committed");
}

#[test]
fn interrupted_member_commits_and_leaves() {
    let node = ServerProcess::start();
    node.ok_with(&["produce", "default", "-p", "0"], "a\n");
    let args = [&READ[..], &["--follow", "--addr", node.address()]].concat();
    let mut command = command(&args);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "a");
    node.ok_with(&["produce", "default", "-p", "1"], "b\n");
    assert_eq!(lines.next().unwrap().unwrap(), "b");
    signal(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    // It has all partitions at once, and nothing to print.
    assert_eq!(node.ok(&READ), "");
}

#[test]
fn records_are_committed_after_they_are_written() {
    let node = ServerProcess::start();
    node.ok_with(&["produce", "default", "-p", "0"], "a\n");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = command(&[&READ[..], &["--addr", node.address()]].concat());
    command.stdin(Stdio::null()).stdout(writer).stderr(Stdio::null());
    assert_eq!(command.status().unwrap().code(), Some(0), "the reader closed it");
    drop(command);
    assert_eq!(node.ok(&READ), "a\n");
}

#[test]
fn exit_codes_tell_why_a_group_cannot_read() {
    let node = ServerProcess::start();
    let code = |args: &[&str]| node.run(args, "").code;
    assert_eq!(code(&["consume", "missing", "--group", "billing"]), 3);
    assert_eq!(code(&["consume", "default", "--group", "no spaces"]), 2);
    assert_eq!(code(&[&READ[..], &["--from", "earliest"]].concat()), 2);
    assert_eq!(code(&["consume", "default", "--start", "earliest"]), 2);
    assert_eq!(code(&[&READ[..], &["--start", "fail"]].concat()), 3);
    node.ok_with(&["produce", "default", "-p", "0"], "a\nb\nc\n");
    node.ok(&[&READ[..], &["-n", "1"]].concat());
    node.ok(&["topic", "trim", "default", "--partitions", "0", "--before", "2", "--yes"]);
    assert_eq!(code(&READ), 4, "the offset is no longer readable");
    assert_eq!(node.ok(&[&READ[..], &["--start", "earliest"]].concat()), "c\n");
}
