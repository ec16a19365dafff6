//! Runs the program, and a node or dev cluster for each test.
//! Their processes end with the test.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::time::Instant;

/// Time in which a condition comes to hold on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Output of a finished run.
#[derive(Debug)]
pub(crate) struct CommandOutput {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Waits until a condition holds.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    until_some(what, || is_so().then_some(()));
}

/// Waits until there is a value.
pub(crate) fn until_some<T>(what: &str, mut value: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(value) = value() {
            return value;
        }
        assert!(begin.elapsed() < PATIENCE, "never: {what}");
        thread::yield_now();
    }
}

/// Runs `helix` with these arguments and this input.
pub(crate) fn helix(args: &[&str], input: &str) -> CommandOutput {
    outcome(command(args), input)
}

/// Runs a command with this input.
pub(crate) fn outcome(mut command: Command, input: &str) -> CommandOutput {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_owned();
    // Ignores the error: a program that fails early does not read its input.
    let writer = thread::spawn(move || drop(stdin.write_all(input.as_bytes())));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    CommandOutput {
        code: output.status.code().expect("the process exited with a code"),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

pub(crate) fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Returns a command of the program, isolated from the user's settings.
pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_helix"));
    command.args(args);
    isolate(&mut command);
    command
}

/// Removes the user's Helix settings from the environment.
pub(crate) fn isolate(command: &mut Command) {
    command.env_remove("HELIX_ADDR").env_remove("NO_COLOR");
    // Nodes create this topic.
    command.env("HELIX_TOPIC", "default:4");
    command.env("XDG_CONFIG_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/no-settings"));
}

/// Sends a signal to a process.
pub(crate) fn signal(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

/// A running node.
pub(crate) struct ServerProcess {
    child: Child,
    address: String,
}

impl ServerProcess {
    /// Starts a node in memory and waits until it answers.
    pub(crate) fn start() -> Self {
        Self::start_with(&["--storage", "memory"])
    }

    /// Starts a node with this data directory and waits until it answers.
    pub(crate) fn start_in(directory: &Path) -> Self {
        Self::start_with(&["--data-dir", directory.to_str().unwrap()])
    }

    /// Starts a node with these options and waits until it answers.
    pub(crate) fn start_with(options: &[&str]) -> Self {
        Self::start_at(&format!("127.0.0.1:{}", base_port(1)), options)
    }

    /// Starts a node that listens at this address, and waits until it answers.
    pub(crate) fn start_at(address: &str, options: &[&str]) -> Self {
        let args = ["server", "--exit-with-stdin", "--admin-addr", "off", "--listen-addr", address];
        let child = command(&[&args[..], options].concat())
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let node = Self { child, address: address.to_owned() };
        // Each attempt waits for a response.
        until("the node answers", || node.run(&["topic", "list"], "").code == 0);
        node
    }

    pub(crate) fn run(&self, args: &[&str], input: &str) -> CommandOutput {
        helix(&[args, &["--addr", &self.address]].concat(), input)
    }

    /// Runs a command that must succeed and returns its standard output.
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        self.ok_with(args, "")
    }

    pub(crate) fn ok_with(&self, args: &[&str], input: &str) -> String {
        let outcome = self.run(args, input);
        assert_eq!(outcome.code, 0, "helix {args:?}: {outcome:?}");
        outcome.stdout
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    pub(crate) fn signal(&self, asked: Signal) {
        signal(&self.child, asked);
    }

    pub(crate) fn end_by_closing_stdin(mut self) -> ExitStatus {
        drop(self.child.stdin.take());
        self.child.wait().unwrap()
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // Ignores errors: the process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running dev cluster with data on disk.
pub(crate) struct DevProcess {
    child: Child,
    port: String,
    address: String,
    directory: TempDir,
}

impl DevProcess {
    /// Starts a cluster and waits until it is ready.
    pub(crate) fn start(nodes: u16) -> Self {
        Self::start_with(nodes, |_| {})
    }

    /// Starts a cluster by a changed command, and waits until it is ready.
    pub(crate) fn start_with(nodes: u16, change: impl FnOnce(&mut Command)) -> Self {
        let port = base_port(nodes);
        let directory = tempfile::tempdir().unwrap();
        let address: Vec<_> =
            (port..port + nodes).map(|port| format!("127.0.0.1:{port}")).collect();
        let (port, nodes) = (port.to_string(), nodes.to_string());
        let data = directory.path().join("data");
        let args = ["dev", "--nodes", &nodes, "--port", &port, "--dir", data.to_str().unwrap()];
        let mut starting = command(&args);
        change(&mut starting);
        let mut child = starting.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        // If a node does not start, the program fails and its output ends.
        let is_ready = stdout.lines().any(|line| line.unwrap().starts_with("Ctrl-C"));
        let dev = Self { child, port, address: address.join(","), directory };
        assert!(is_ready, "the dev cluster does not start");
        dev
    }

    /// Returns the first of the free ports for a cluster.
    pub(crate) fn free_port(nodes: u16) -> String {
        base_port(nodes).to_string()
    }

    pub(crate) fn run(&self, args: &[&str], input: &str) -> CommandOutput {
        helix(&[args, &["--addr", &self.address]].concat(), input)
    }

    pub(crate) fn ok(&self, args: &[&str]) -> String {
        self.ok_with(args, "")
    }

    pub(crate) fn ok_with(&self, args: &[&str], input: &str) -> String {
        let outcome = self.run(args, input);
        assert_eq!(outcome.code, 0, "helix {args:?}: {outcome:?}");
        outcome.stdout
    }

    /// Returns the leader of a shard. Waits for it: an election may be under way.
    pub(crate) fn leader_of(&self, shard: u64) -> u64 {
        until_some(&format!("shard {shard} has a leader"), || {
            let rows = json(&self.ok(&["cluster", "shards", "-o", "json"]));
            let rows = rows.as_array().unwrap().iter();
            rows.filter(|row| row["shard_id"] == shard).find_map(|row| row["leader"].as_u64())
        })
    }

    /// Transfers the leadership of a shard and returns the result. Repeats a transfer that fails,
    /// because an election was under way or the target was behind.
    pub(crate) fn transfer_leader(&self, shard: u64, to: u64) -> serde_json::Value {
        let (shard, to) = (shard.to_string(), to.to_string());
        let args = ["cluster", "transfer-leader", "--shard", &shard, "--to", &to, "-o", "json"];
        until_some(&format!("node {to} leads shard {shard}"), || {
            let transferred = self.run(&args, "");
            (transferred.code == 0).then(|| json(&transferred.stdout))
        })
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    pub(crate) fn port(&self) -> &str {
        &self.port
    }

    /// Runs another `helix dev` command for this cluster.
    pub(crate) fn control(&self, args: &[&str]) -> CommandOutput {
        helix(&[&["dev"], args, &["--port", &self.port]].concat(), "")
    }

    /// Starts a second dev cluster on the same port.
    pub(crate) fn start_another(&self) -> CommandOutput {
        helix(&["dev", "--memory", "--port", &self.port], "")
    }

    /// Waits for the end of a stopped cluster.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    /// Returns the path of a file in the data directory.
    pub(crate) fn file(&self, name: &str) -> String {
        self.directory.path().join("data").join(name).display().to_string()
    }

    /// Returns the names of the nodes' logs.
    pub(crate) fn logs(&self) -> Vec<String> {
        let entries = self.directory.path().join("data").read_dir().unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut logs: Vec<_> = names.filter(|name| name.ends_with(".log")).collect();
        logs.sort();
        logs
    }

    pub(crate) fn is_directory_removed(&self) -> bool {
        self.directory.path().read_dir().unwrap().next().is_none()
    }
}

impl Drop for DevProcess {
    fn drop(&mut self) {
        // Ignores errors: the process may have ended already. The nodes end with it.
        let _ = self.control(&["stop"]);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a port with `nodes` free ports from it on, and as many from 100 above it. Tests of one
/// process get distinct ports; the process id varies the first port. No client and no
/// `helix demo` takes one of them while its node is down: they are below the ephemeral ports and
/// the ports of `helix demo`.
fn base_port(nodes: u16) -> u16 {
    const PLACES: u16 = 450;
    static TURN: AtomicU16 = AtomicU16::new(0);
    let offset = u16::try_from(std::process::id() % 30).unwrap() * (PLACES / 30);
    (0..PLACES)
        .map(|_| (offset + TURN.fetch_add(1, Ordering::Relaxed)) % PLACES)
        // Ten places of ten ports, and their ports from 100 on.
        .map(|place| 10_000 + place / 10 * 200 + place % 10 * 10)
        .find(|base| {
            let ports = (*base..base + nodes).flat_map(|port| [port, port + 100]);
            ports.into_iter().all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok())
        })
        .expect("free ports")
}
