//! Commands that are interrupted end soon, with exit code 130, whatever takes their output.

use std::io::{BufRead, BufReader, PipeReader, Write};
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use tokio::time::Instant;

use crate::harness::{ServerProcess, command, signal, until};

/// Time in which an interrupted command ends on a busy machine, less than it would wait otherwise.
const SOON: Duration = Duration::from_secs(15);

/// Starts a command whose output is not read.
fn start_unread(node: &ServerProcess, args: &[&str]) -> (Child, PipeReader) {
    let (reader, writer) = std::io::pipe().unwrap();
    let mut command = command(&[args, &["--addr", node.address()]].concat());
    command.stdin(Stdio::null()).stdout(writer).stderr(Stdio::null());
    (command.spawn().unwrap(), reader)
}

/// Returns whether SIGHUP is ignored here. Children inherit that, and then keep to it.
#[allow(clippy::disallowed_methods)] // Reads a file of the system.
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & 1 != 0)
}

#[test]
fn blocked_output_does_not_delay_an_interrupt() {
    let node = ServerProcess::start();
    let line = "x".repeat(1000);
    node.ok_with(&["produce", "default", "-p", "0"], &[line.as_str(); 500].join("\n"));
    for (args, asked) in [
        (&["consume", "default", "--from", "earliest", "--follow"][..], Signal::TERM),
        (&["consume", "default"], Signal::INT),
        (&["tail", "default", "-n", "500", "-F"], Signal::HUP),
    ] {
        if asked == Signal::HUP && hangup_is_ignored() {
            eprintln!(
                "SKIPPED: this process ignores SIGHUP, as under nohup, and so do its children"
            );
            continue;
        }
        let (mut child, output) = start_unread(&node, args);
        // Linux' default, less a part that a write left over.
        until("the pipe is full", || rustix::io::ioctl_fionread(&output).unwrap() > 60_000);
        let begin = Instant::now();
        signal(&child, asked);
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(130), "{args:?}: {status}");
        assert!(begin.elapsed() < SOON, "{args:?}: {:?}", begin.elapsed());
    }
}

#[test]
fn interrupt_ends_the_search_for_a_node() {
    let interrupted = |args: &[&str]| {
        // Accepts connections and never responds.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = silent.local_addr().unwrap().to_string();
        let mut command = command(&[args, &["--addr", &addr]].concat());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let _connection = silent.accept().unwrap();
        let begin = Instant::now();
        signal(&child, Signal::INT);
        let code = child.wait().unwrap().code();
        assert!(begin.elapsed() < SOON, "{args:?}: {:?}", begin.elapsed());
        code
    };
    for args in [&["produce", "default"][..], &["topic", "list"]] {
        // The search fails after two seconds, before the signal of a test that stalls.
        let codes: Vec<_> = (0..3).map(|_| interrupted(args)).collect();
        assert!(codes.contains(&Some(130)), "{args:?}: {codes:?}");
    }
}

#[test]
fn second_interrupt_ends_the_wait_for_acks() {
    let node = ServerProcess::start();
    let mut command = command(&["produce", "default", "-p", "0", "--addr", node.address()]);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"a\n").unwrap();
    until("the first record is there", || node.ok(&["consume", "default"]) == "a\n");
    node.signal(Signal::STOP);
    input.write_all(b"b\n").unwrap();
    let begin = Instant::now();
    until("it ends", || {
        signal(&child, Signal::INT);
        child.try_wait().unwrap().is_some()
    });
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
}

#[test]
fn member_does_not_wait_for_a_silent_cluster() {
    let node = ServerProcess::start();
    node.ok_with(&["produce", "default", "-p", "0"], "a\n");
    let consume = ["consume", "default", "-g", "billing", "--start", "earliest", "-F"];
    let mut command = command(&[&consume[..], &["--addr", node.address()]].concat());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    // Open until the end: a member whose output has no reader stops with success.
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "a\n");
    node.signal(Signal::STOP);
    let asks = ["topic", "list", "--timeout", "300ms"];
    until("the node is silent", || node.run(&asks, "").code != 0);
    let begin = Instant::now();
    signal(&child, Signal::INT);
    let output = child.wait_with_output().unwrap();
    node.signal(Signal::CONT);
    assert_eq!(output.status.code(), Some(130));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("did not commit and leave the group"), "{text}");
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
}
