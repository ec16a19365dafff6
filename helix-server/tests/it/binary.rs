//! The program `helix-server` itself: its banner, its signals and its exit codes.
//! Everything else is tested inside the test's process.

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
    /// Starts, and reads the banner up to the address.
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
async fn a_stop_that_is_asked_for_is_a_success() {
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
async fn a_durable_server_says_where_and_how() {
    let folder = tempfile::tempdir().unwrap();
    let data_dir = folder.path().join("data");
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
async fn wrong_usage_and_a_failed_start_have_codes_of_their_own() {
    let wrong: [&[&str]; 4] = [
        &["--storage", "papyrus"],
        &["--topic", "orders"],
        &["--node-id", "0"],
        &["--listen-addr", "0.0.0.0:0"],
    ];
    for arguments in wrong {
        let output = soon(server(arguments).output()).await.unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(arguments[0]), "it names the flag: {said}");
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap().to_string();
    let arguments = ["--storage", "memory", "--listen-addr", &taken];
    let output = soon(server(&arguments).output()).await.unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&taken), "{said}");
}

#[tokio::test]
async fn help_and_version_are_data() {
    for flag in ["--help", "--version"] {
        let output = soon(server(&[flag]).output()).await.unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert!(!output.stdout.is_empty());
    }
}
