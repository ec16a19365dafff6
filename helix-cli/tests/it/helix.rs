//! Runs the program, and a node of its own for each test.
//! Nodes keep their data in memory and end with the test, whatever happens.

use std::io::Write;
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;

/// What a run has said.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs `helix` with these arguments and this input.
pub(crate) fn helix(args: &[&str], input: &str) -> Outcome {
    let mut child = command(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_owned();
    // Ignored: a program that fails early does not read its input.
    let writer = thread::spawn(move || drop(stdin.write_all(input.as_bytes())));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    Outcome {
        code: output.status.code().expect("it ended by itself"),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

pub(crate) fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_helix"));
    command.args(args).env_remove("HELIX_ADDR");
    command
}

/// A node in memory.
pub(crate) struct Node {
    child: Child,
    address: String,
}

impl Node {
    /// Starts a node and waits until it answers.
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        drop(listener);
        let args = ["server", "--exit-with-stdin", "--storage", "memory", "--listen-addr"];
        let child = command(&[&args[..], &[&address]].concat())
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let node = Self { child, address };
        // Each waits a while for an answer.
        for _ in 0..10 {
            if node.run(&["topic", "list"], "").code == 0 {
                return node;
            }
        }
        panic!("the node does not answer");
    }

    pub(crate) fn run(&self, args: &[&str], input: &str) -> Outcome {
        helix(&[args, &["--addr", &self.address]].concat(), input)
    }

    /// Standard output of a run that must succeed.
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        self.ok_with(args, "")
    }

    pub(crate) fn ok_with(&self, args: &[&str], input: &str) -> String {
        let outcome = self.run(args, input);
        assert_eq!(outcome.code, 0, "helix {args:?}: {outcome:?}");
        outcome.stdout
    }

    pub(crate) fn end_by_closing_stdin(mut self) -> ExitStatus {
        drop(self.child.stdin.take());
        self.child.wait().unwrap()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Ignored: it may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
