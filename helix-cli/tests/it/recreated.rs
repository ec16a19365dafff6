//! `consume --follow` and `tail -f` while their topic is deleted and created again.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use crate::harness::{ServerProcess, command};

const PATIENCE: Duration = Duration::from_secs(30);

/// A command that runs until its topic ends, and the lines of its output.
struct Following {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Following {
    fn start(node: &ServerProcess, args: &[&str]) -> Self {
        let mut command = command(&[args, &["--addr", node.address()]].concat());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self { child, lines }
    }

    fn next(&self) -> String {
        self.lines.recv_timeout(PATIENCE).expect("another line")
    }

    /// Waits for the end of the output, then of the command. Returns its exit code and errors.
    fn end(mut self) -> (Option<i32>, String) {
        let ended = self.lines.recv_timeout(PATIENCE);
        assert_eq!(ended, Err(mpsc::RecvTimeoutError::Disconnected));
        let mut errors = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        (self.child.wait().unwrap().code(), errors)
    }
}

fn recreate(node: &ServerProcess) {
    node.ok(&["topic", "delete", "orders", "--yes"]);
    node.ok(&["topic", "create", "orders", "--partitions", "1"]);
    // More records than before: the old offset exists in the new topic too.
    node.ok_with(&["produce", "orders"], "new 0\nnew 1\nnew 2\n");
}

#[test]
fn follow_ends_with_not_found() {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "orders", "--partitions", "1"]);
    node.ok_with(&["produce", "orders"], "old\n");
    let consume = ["consume", "orders", "--follow", "--from", "earliest"];
    let following =
        [Following::start(&node, &consume), Following::start(&node, &["tail", "orders", "-F"])];
    for it in &following {
        assert_eq!(it.next(), "old");
    }
    recreate(&node);
    for it in following {
        let (code, errors) = it.end();
        assert_eq!(code, Some(3), "{errors}");
    }
}

#[test]
fn follow_restarts_on_request() {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "orders", "--partitions", "1"]);
    node.ok_with(&["produce", "orders"], "old\n");
    let consume = ["consume", "orders", "--follow", "--from", "earliest", "-n", "4"];
    let following =
        Following::start(&node, &[&consume[..], &["--on-recreate", "restart"]].concat());
    assert_eq!(following.next(), "old");
    recreate(&node);
    assert_eq!([following.next(), following.next(), following.next()], ["new 0", "new 1", "new 2"]);
    let (code, errors) = following.end();
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("orders was deleted and created again"), "{errors}");
}
