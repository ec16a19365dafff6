//! Commands whose standard output is closed: failures keep their exit code, and work is done.

#![allow(clippy::disallowed_methods)] // The tests damage files.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::harness::{
    CommandOutput, DevProcess, ServerProcess, command, helix, isolate, json, outcome, until,
};

/// State of standard output.
#[derive(Debug, Clone, Copy)]
enum Stdout {
    Open,
    /// As after `>&-`.
    Closed,
    /// A pipe without a reader.
    Broken,
    /// As [`Stdout::Broken`], for standard error too.
    BothBroken,
}

const ALL: [Stdout; 4] = [Stdout::Open, Stdout::Closed, Stdout::Broken, Stdout::BothBroken];

/// Runs `helix` with standard output in this state.
fn run(stdout: Stdout, args: &[&str], input: &str) -> CommandOutput {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = match stdout {
        Stdout::Open => return helix(args, input),
        Stdout::Closed => {
            let mut shell = Command::new("sh");
            shell.args(["-c", "exec \"$0\" \"$@\" >&-", env!("CARGO_BIN_EXE_helix")]).args(args);
            isolate(&mut shell);
            return outcome(shell, input);
        }
        Stdout::Broken | Stdout::BothBroken => command(args),
    };
    if matches!(stdout, Stdout::BothBroken) {
        command.stderr(writer.try_clone().unwrap());
    } else {
        command.stderr(Stdio::null());
    }
    let mut child = command.stdin(Stdio::piped()).stdout(writer).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // Ignores the error: a program that fails early does not read its input.
    let _ = std::io::Write::write_all(&mut stdin, input.as_bytes());
    drop(stdin);
    let code = child.wait().unwrap().code().expect("the process exited with a code");
    CommandOutput { code, stdout: String::new(), stderr: String::new() }
}

/// Returns the commands of the manual, as words.
fn commands_of_the_manual() -> BTreeSet<String> {
    let manual = fs::read_to_string("../docs/cli.md").unwrap();
    let headings = manual.lines().filter_map(|line| line.strip_prefix("### helix "));
    headings.map(str::to_owned).collect()
}

/// A command line, its input, and its exit code.
type Row<'a> = (&'a [&'a str], &'a str, i32);

#[test]
fn closed_output_changes_no_failure() {
    let node = ServerProcess::start();
    let addr = node.address();
    let one_is_dead = format!("{addr},127.0.0.1:1");
    node.ok_with(&["produce", "default", "-p", "0"], "a\nb\n");
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let bundle = path("bundle.tar");
    let (good, bad, fresh) = (path("good"), path("bad"), path("fresh"));
    for backup in [&good, &bad] {
        node.ok(&["backup", backup]);
    }
    flip_last_byte(&Path::new(&bad).join("topic-default/partition-0"));
    let (log, damaged_log) = (path("log"), path("damaged-log"));
    for log in [&log, &damaged_log] {
        write_log(Path::new(log));
    }
    damage_end(Path::new(&damaged_log));
    let demo = directory.path().to_str().unwrap();

    // In the order of the manual. Stopped nodes and dev clusters have tests of their own.
    let rows: &[Row<'_>] = &[
        (&["demo", "--nodes", "1", "--records", "200", "--dir", demo], "", 0),
        (&["dev", "--nodes", "2"], "", 2),
        (&["dev", "kill", "1", "--port", "1"], "", 3),
        (&["dev", "restart", "1", "--port", "1"], "", 3),
        (&["dev", "status", "--port", "1"], "", 3),
        (&["dev", "stop", "--port", "1"], "", 3),
        (&["server", "--print-config"], "", 0),
        (&["server", "--check-config"], "", 0),
        (&["server", "--check-config", "--shards", "0"], "", 2),
        (&["cluster", "info", "--addr", addr], "", 0),
        (&["cluster", "nodes", "--addr", addr], "", 0),
        (&["cluster", "shards", "--addr", addr], "", 0),
        (&["cluster", "health", "--addr", addr], "", 0),
        (&["cluster", "health", "--addr", &one_is_dead], "", 1),
        (&["cluster", "health", "--watch", "--addr", addr, "--exit-when-healthy"], "", 0),
        (&["cluster", "health", "--watch", "--addr", &one_is_dead, "--timeout", "3s"], "", 1),
        (&["cluster", "transfer-leader", "--shard", "99", "--addr", addr], "", 3),
        (&["cluster", "add-node", "9", "127.0.0.1:1", "--dry-run", "--addr", addr], "", 4),
        (&["cluster", "remove-node", "9", "--addr", addr], "", 3),
        (&["cluster", "replace-node", "9", "--addr", addr], "", 3),
        (&["cluster", "drain", "9", "--addr", addr], "", 3),
        (&["cluster", "undrain", "1", "--addr", addr], "", 0),
        (&["cluster", "balance", "--addr", addr], "", 0),
        (&["cluster", "placement", "--addr", addr], "", 0),
        (&["cluster", "cordon", "9", "--addr", addr], "", 3),
        (&["cluster", "uncordon", "1", "--addr", addr], "", 0),
        (&["cluster", "set-replicas", "3", "--addr", addr], "", 0),
        (&["cluster", "add-shards", "1", "--no-wait", "--addr", addr], "", 0),
        (&["cluster", "move-shard", "1", "--from", "1", "--to", "9", "--addr", addr], "", 3),
        (&["cluster", "pause-moves", "--addr", addr], "", 0),
        (&["cluster", "resume-moves", "--addr", addr], "", 0),
        (&["cluster", "cancel-move", "1", "--addr", addr], "", 4),
        (&["topic", "create", "orders", "--addr", addr], "", 0),
        (&["topic", "create", "default", "--partitions", "9", "--addr", addr], "", 4),
        (&["topic", "list", "--addr", addr], "", 0),
        (&["topic", "describe", "default", "--addr", addr], "", 0),
        (&["topic", "describe", "none", "--addr", addr], "", 3),
        (&["topic", "alter", "default", "--retention-time", "9d", "--addr", addr], "", 0),
        (&["topic", "add-partitions", "orders", "--total", "5", "--addr", addr], "", 0),
        (&["topic", "trim", "orders", "--to", "latest", "--yes", "--addr", addr], "", 0),
        (&["topic", "fence", "default", "1", "--token", "x", "--addr", addr], "", 0),
        (
            &["topic", "fence", "default", "1", "--token", "y", "--expect", "z", "--addr", addr],
            "",
            4,
        ),
        (&["topic", "delete", "none", "--yes", "--addr", addr], "", 3),
        (&["group", "list", "--addr", addr], "", 0),
        (&["group", "seek", "readers", "default", "--to", "earliest", "--addr", addr], "", 0),
        (&["group", "seek", "readers", "default", "--to", "99", "--addr", addr], "", 4),
        (&["group", "describe", "readers", "--addr", addr], "", 0),
        (&["group", "describe", "none", "--addr", addr], "", 3),
        (&["group", "explain", "readers", "--addr", addr], "", 0),
        (&["group", "history", "readers", "--addr", addr], "", 0),
        (&["group", "reset", "readers", "--to", "latest", "--addr", addr], "", 0),
        (&["group", "forget", "none", "default", "--yes", "--addr", addr], "", 3),
        (&["group", "delete", "none", "--yes", "--addr", addr], "", 3),
        (&["token", "create", "ana", "--addr", addr], "", 0),
        (&["token", "list", "--addr", addr], "", 0),
        (&["token", "revoke", "none", "--addr", addr], "", 2),
        (&["acl", "allow", "ana", "topic:default=read", "--addr", addr], "", 0),
        (&["acl", "list", "--addr", addr], "", 0),
        (&["acl", "test", "ana", "read", "topic:default", "--addr", addr], "", 0),
        (&["acl", "test", "ana", "write", "topic:default", "--addr", addr], "", 1),
        (&["acl", "remove", "ana", "topic:default=read", "--addr", addr], "", 0),
        (&["quota", "set", "ana", "--requests", "1000000", "--addr", addr], "", 0),
        (&["quota", "list", "--addr", addr], "", 0),
        (&["quota", "remove", "ana", "--addr", addr], "", 0),
        (&["whoami", "--addr", addr], "", 0),
        (&["produce", "orders", "-p", "0", "-o", "json", "--addr", addr], "x\ny\n", 0),
        (&["produce", "orders", "-p", "77", "-o", "json", "--addr", addr], "x\ny\n", 3),
        (&["consume", "default", "--addr", addr], "", 0),
        (&["consume", "none", "--addr", addr], "", 3),
        (&["tail", "default", "--addr", addr], "", 0),
        (&["offsets", "default", "--addr", addr], "", 0),
        (&["trace", "append", "none", "--addr", addr], "", 3),
        (&["wal", "inspect", &log], "", 0),
        (&["wal", "verify", &log], "", 0),
        (&["wal", "verify", &damaged_log], "", 11),
        (&["wal", "repair", &log], "", 0),
        (&["wal", "repair", &damaged_log], "", 11),
        (&["backup", &good, "--addr", addr], "", 0),
        (&["backup", &bad, "--topic", "default", "--addr", addr], "", 11),
        (&["backup", "verify", &good], "", 0),
        (&["backup", "verify", &bad], "", 11),
        (
            &["restore", &good, "--topic", "default", "--as", "again", "--resume", "--addr", addr],
            "",
            0,
        ),
        (&["restore", &bad, "--topic", "default", "--as", "bad", "--addr", addr], "", 11),
        (&["check", "--addr", addr], "", 0),
        (&["check", "--addr", &one_is_dead], "", 1),
        (&["top", "--addr", addr], "", 2),
        (&["debug", "bundle", &bundle, "--force", "--addr", addr], "", 0),
        (&["context", "list"], "", 0),
        (&["context", "add", "-", "--addr", addr], "", 2),
        (&["context", "use", "none"], "", 3),
        (&["context", "remove", "none"], "", 3),
        (&["config", "list"], "", 0),
        (&["config", "explain", "listen_addr"], "", 0),
        (&["config", "explain", "none"], "", 3),
        (&["cert", "ca", "--cluster", "a b"], "", 2),
        (&["cert", "node", "1", "--host", "a", "--ca-dir", &fresh], "", 3),
        (&["cert", "client", "ana", "--ca-dir", &fresh], "", 3),
        (&["explain", "NO_LEADER"], "", 0),
        (&["explain", "NONE"], "", 3),
        (&["cheat"], "", 0),
        (&["completions", "bash"], "", 0),
        (&["version", "--addr", addr], "", 0),
        (&["topic", "list", "--schema"], "", 0),
        (&["nonsense"], "", 2),
        (&["--help"], "", 0),
    ];
    for (args, input, code) in rows {
        for stdout in ALL {
            let ended = run(stdout, args, input);
            assert_eq!(ended.code, *code, "helix {args:?} with output {stdout:?}: {ended:?}");
        }
    }
    // Each command of the manual is in the table.
    let of_row = |(args, _, _): &Row<'_>| [args[0].to_owned(), args[..2.min(args.len())].join(" ")];
    let tested: BTreeSet<String> = rows.iter().flat_map(of_row).collect();
    let manual = commands_of_the_manual();
    assert!(manual.len() > 30, "{manual:?}");
    assert_eq!(manual.difference(&tested).collect::<Vec<_>>(), Vec::<&String>::new());

    // The work of the runs without a reader was done.
    let offsets = json(&node.ok(&["offsets", "orders", "-p", "0", "-o", "json"]));
    assert_eq!(offsets[0]["high_watermark"], 2 * ALL.len());
    let fresh = run(Stdout::Broken, &["backup", &fresh, "--addr", addr], "").code;
    assert_eq!(fresh, 0);
    assert_eq!(helix(&["backup", "verify", &path("fresh")], "").code, 0);
}

#[test]
fn closed_output_does_not_stop_a_repair() {
    let directory = tempfile::tempdir().unwrap();
    write_log(directory.path());
    damage_end(directory.path());
    let path = directory.path().to_str().unwrap();
    assert_eq!(helix(&["wal", "verify", path], "").code, 11);
    let repaired = run(Stdout::Broken, &["wal", "repair", path, "--drop", "end", "--yes"], "");
    assert_eq!(repaired.code, 0, "{repaired:?}");
    assert_eq!(helix(&["wal", "verify", path], "").code, 0);
}

#[test]
fn closed_output_does_not_stop_a_dev_cluster() {
    let port = DevProcess::free_port(1);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut dev = command(&["dev", "--memory", "--nodes", "1", "--port", &port]);
    let mut dev = dev.stdin(Stdio::null()).stdout(writer).stderr(Stdio::null()).spawn().unwrap();
    let begin = Instant::now();
    for stdout in ALL {
        // The cluster answers once it has printed its addresses.
        while run(stdout, &["dev", "status", "--port", &port], "").code != 0 {
            assert!(dev.try_wait().unwrap().is_none(), "the dev cluster has ended");
            assert!(begin.elapsed() < Duration::from_secs(60), "the dev cluster does not start");
            std::thread::yield_now();
        }
    }
    for args in [&["kill", "1"][..], &["restart", "1"], &["stop"]] {
        let args = [&["dev"], args, &["--port", &port]].concat();
        assert_eq!(run(Stdout::Broken, &args, "").code, 0, "{args:?}");
    }
    assert!(dev.wait().unwrap().success());
}

#[test]
fn reader_that_leaves_ends_a_command_that_waits() {
    let node = ServerProcess::start();
    node.ok_with(&["produce", "default", "-p", "0"], "a\n");
    let in_group = ["consume", "default", "-F", "--group", "billing"];
    for (args, has_output) in [
        (&["consume", "default", "-F", "--from", "earliest"][..], true),
        (&["consume", "default", "-F"], false),
        (&["tail", "default", "-F"], true),
        (&in_group[..], true),
        (&["cluster", "health", "--watch"], true),
    ] {
        let mut waiting = command(&[args, &["--addr", node.address()]].concat());
        waiting.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = waiting.spawn().unwrap();
        let mut reader = BufReader::new(child.stdout.take().unwrap());
        if has_output {
            let mut line = String::new();
            assert!(reader.read_line(&mut line).unwrap() > 0, "{args:?}");
        }
        assert!(child.try_wait().unwrap().is_none(), "{args:?} has ended");
        drop(reader);
        // Nothing more is printed.
        until(&format!("{args:?} ends"), || child.try_wait().unwrap().is_some());
        assert_eq!(child.wait().unwrap().code(), Some(0), "{args:?}");
    }
    // The member has committed what it had printed, and left.
    let group = json(&node.ok(&["group", "describe", "billing", "-o", "json"]));
    assert_eq!(group["members"], serde_json::json!([]), "{group}");
    assert_eq!(node.ok(&["consume", "default", "--group", "billing"]), "");
}

/// Writes the log of a node, with a few records.
fn write_log(directory: &Path) {
    let node = ServerProcess::start_in(directory);
    node.ok_with(&["produce", "default"], "a\nb\n");
    assert!(node.end_by_closing_stdin().success());
}

/// Damages the log with the records of a node so that its end can be dropped.
fn damage_end(directory: &Path) {
    let inspected = helix(&["wal", "inspect", directory.to_str().unwrap(), "-o", "json"], "");
    let logs = json(&inspected.stdout);
    let log = logs.as_array().unwrap().last().unwrap();
    let segment = log["segments"].as_array().unwrap().last().unwrap();
    let file = [log["dir"].as_str().unwrap(), segment["file"].as_str().unwrap()];
    let file: PathBuf = file.iter().collect();
    let mut bytes = fs::read(&file).unwrap();
    // The header of the first group; later groups show that it was synced.
    bytes[4096 + 20] ^= 1;
    fs::write(&file, bytes).unwrap();
}

fn flip_last_byte(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(file, bytes).unwrap();
}
