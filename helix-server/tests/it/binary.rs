//! The program `helix-server` itself: its banner, its signals and its exit codes.
//! Failing starts are in `bad_start.rs`; the rest is tested inside the test's process.

use std::process::{ExitStatus, Stdio};

use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStderr, Command};
use tonic::transport::Endpoint;

use crate::support::{append_request, soon};

fn server(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_helix-server"));
    command.args(arguments).stderr(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
    command
}

struct Process {
    child: Child,
    stderr: BufReader<ChildStderr>,
    banner: String,
    address: String,
}

impl Process {
    /// Starts the server and reads its banner up to the address.
    async fn start(arguments: &[&str]) -> Self {
        let mut child = server(arguments).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut banner = String::new();
        let address = loop {
            let begin = banner.len();
            let bytes = soon(stderr.read_line(&mut banner)).await.unwrap();
            assert!(bytes > 0, "it ended: {banner}");
            if let Some(address) = banner[begin..].trim().strip_prefix("listening") {
                break address.trim().to_owned();
            }
        };
        Self { child, stderr, banner, address }
    }

    async fn append(&self) {
        let address = format!("http://{}", self.address);
        let channel = Endpoint::from_shared(address).unwrap().connect().await.unwrap();
        let mut produce = ProduceServiceClient::new(channel);
        soon(produce.append(append_request(&["a"]))).await.unwrap();
    }

    async fn end(mut self, signal: Signal) -> (ExitStatus, String) {
        let pid = i32::try_from(self.child.id().unwrap()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
        let status = soon(self.child.wait()).await.unwrap();
        let mut rest = String::new();
        self.stderr.read_to_string(&mut rest).await.unwrap();
        (status, rest)
    }
}

#[tokio::test]
async fn requested_stop_exits_with_success() {
    for signal in [Signal::TERM, Signal::INT] {
        let memory = ["--storage", "memory", "--listen-addr", "127.0.0.1:0"];
        let process = Process::start(&memory).await;
        assert!(process.banner.contains("all data is lost"), "{}", process.banner);
        process.append().await;
        let (status, log) = process.end(signal).await;
        assert_eq!(status.code(), Some(0), "{log}");
    }
}

#[tokio::test]
async fn durable_banner_names_directory_and_sync_latency() {
    let directory = tempfile::tempdir().unwrap();
    let data_dir = directory.path().join("data");
    let data_dir = data_dir.to_str().unwrap();
    let arguments =
        ["--data-dir", data_dir, "--listen-addr", "127.0.0.1:0", "--topic", "default:1"];
    let process = Process::start(&arguments).await;
    for part in ["synced to stable storage", "I/O", data_dir, "p50", "p99"] {
        assert!(process.banner.contains(part), "{part}: {}", process.banner);
    }
    process.append().await;
    let (status, log) = process.end(Signal::TERM).await;
    assert_eq!(status.code(), Some(0), "{log}");
}

#[tokio::test]
async fn checks_and_prints_configuration() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("helix.toml");
    let path = file.to_str().unwrap();
    // The server's configuration file; the WAL's rule does not apply.
    #[allow(clippy::disallowed_methods)]
    let write = |text: &str| std::fs::write(&file, text).unwrap();
    let run = async |arguments: &[&str]| {
        let mut command = server(arguments);
        let output = soon(command.env("HELIX_SHARDS", "2").output()).await.unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    write("node_id = 3\nstorage = 'memory'\n");
    let (code, _, said) = run(&["--config", path, "--check-config"]).await;
    assert_eq!(code, Some(0), "{said}");
    let (code, printed, said) = run(&["--config", path, "--print-config"]).await;
    assert_eq!(code, Some(0), "{said}");
    for line in ["shards = 2 # HELIX_SHARDS".to_owned(), format!("node_id = 3 # {path}:1")] {
        assert!(printed.lines().any(|printed| printed == line), "{line}: {printed}");
    }
    write(&printed);
    let (code, again, _) = run(&["--config", path, "--print-config"]).await;
    assert_eq!(code, Some(0));
    assert_eq!(again.lines().count(), printed.lines().count());

    write("nodeid = 3\nstorage = 'papyrus'\n");
    for asked in ["--check-config", "--print-config", "--no-direct-io"] {
        let (code, _, said) = run(&["--config", path, asked]).await;
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(&format!("{path}:1: unknown key \"nodeid\"")), "{said}");
        assert!(said.contains(&format!("{path}:2: storage = 'papyrus'")), "{said}");
    }
}

#[tokio::test]
async fn warns_about_an_insecure_public_address() {
    // A documentation address that no machine has: the warning comes before the failure.
    let arguments = ["--storage=memory", "--listen-addr=192.0.2.1:0", "--insecure"];
    let output = soon(server(&arguments).output()).await.unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let warning = said.lines().find(|line| line.contains("WARN")).expect("it warns");
    for part in ["--insecure", "listen-addr", "192.0.2.1:0"] {
        assert!(warning.contains(part), "{part}: {warning}");
    }
}

#[tokio::test]
async fn json_log_has_one_object_per_line() {
    let arguments = ["--storage=memory", "--listen-addr=127.0.0.1:0", "--log-format=json"];
    let mut child = server(&arguments).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut messages = Vec::new();
    while let Some(line) = soon(lines.next_line()).await.unwrap() {
        let line: serde_json::Value = serde_json::from_str(&line).expect("a line of JSON");
        assert!(line["timestamp"].is_string() && line["level"].is_string(), "{line}");
        let message =
            line["fields"]["message"].as_str().expect("the line has a message").to_owned();
        if message == "serving" {
            assert_eq!(line["fields"]["node_id"], 1);
            assert!(line["fields"]["listening"].as_str().unwrap().starts_with("127.0.0.1:"));
            let pid = i32::try_from(child.id().unwrap()).unwrap();
            kill_process(Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
        }
        messages.push(message);
    }
    assert_eq!(soon(child.wait()).await.unwrap().code(), Some(0));
    for wanted in ["serving", "stopping", "stopped"] {
        assert!(messages.iter().any(|message| message == wanted), "{wanted}: {messages:?}");
    }

    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = format!("--listen-addr={}", taken.local_addr().unwrap());
    let output =
        soon(server(&["--storage=memory", &listen, "--log-format=json"]).output()).await.unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let errors: Vec<serde_json::Value> =
        said.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    assert!(errors.iter().any(|line| line["level"] == "ERROR"), "{said}");
}

#[tokio::test]
async fn log_level_filters_messages() {
    for (level, is_there) in [("info", true), ("warn", false)] {
        let arguments = ["--storage=memory", "--listen-addr=127.0.0.1:0", "--log-level", level];
        let (status, log) = Process::start(&arguments).await.end(Signal::TERM).await;
        assert_eq!(status.code(), Some(0), "{log}");
        assert_eq!(log.contains("stopped"), is_there, "{level}: {log}");
    }
}

#[tokio::test]
async fn help_and_version_go_to_standard_output() {
    for flag in ["--help", "--version"] {
        let output = soon(server(&[flag]).output()).await.unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert!(!output.stdout.is_empty());
    }
}
