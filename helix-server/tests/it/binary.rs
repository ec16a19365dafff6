//! The program `helix-server` itself: its banner, its signals and its exit codes.
//! Failing starts are in `bad_start.rs`; the rest is tested inside the test's process.

use std::future::poll_fn;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_server::limits::SHUTDOWN_WAIT_MAX;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStderr, Command};
use tokio::time::{Instant, timeout};
use tonic::codegen::Service;
use tonic::transport::Endpoint;

use crate::limits::HELLO;
use crate::support::{append_request, skipped, soon};

fn server(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_helix-server"));
    command.args(arguments).stderr(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
    command.env("HELIX_TOPIC", "default:4");
    command
}

/// A request body that never has anything.
type Never = futures_util::stream::Pending<Result<hyper::body::Frame<bytes::Bytes>, tonic::Status>>;

struct Process {
    child: Child,
    stderr: BufReader<ChildStderr>,
    banner: String,
    address: String,
}

impl Process {
    /// Starts the server and reads its banner up to the address.
    async fn start(arguments: &[&str]) -> Self {
        Self::spawn(server(arguments)).await
    }

    /// Starts a command that becomes the server.
    async fn spawn(mut command: Command) -> Self {
        command.stderr(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
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

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id().unwrap()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }

    async fn end(mut self, signal: Signal) -> (ExitStatus, String) {
        self.signal(signal);
        let status = soon(self.child.wait()).await.unwrap();
        let mut rest = String::new();
        self.stderr.read_to_string(&mut rest).await.unwrap();
        (status, rest)
    }
}

/// Returns whether SIGHUP is ignored here. Children inherit that, and then keep to it.
#[allow(clippy::disallowed_methods)] // Reads a file of the system.
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & 1 != 0)
}

#[tokio::test]
async fn requested_stop_exits_with_success() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        if signal == Signal::HUP && hangup_is_ignored() {
            eprintln!(
                "SKIPPED: this process ignores SIGHUP, as under nohup, and so do its children"
            );
            continue;
        }
        let memory = ["--storage", "memory", "--listen-addr", "127.0.0.1:0"];
        let process = Process::start(&memory).await;
        assert!(process.banner.contains("all data is lost"), "{}", process.banner);
        process.append().await;
        let (status, log) = process.end(signal).await;
        assert_eq!(status.code(), Some(0), "{log}");
    }
}

#[tokio::test]
async fn ignored_hangup_stays_ignored() {
    let program = env!("CARGO_BIN_EXE_helix-server");
    let script = "trap '' HUP; exec \"$0\" \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, program, "--storage=memory", "--listen-addr=127.0.0.1:0"]);
    command.env("HELIX_TOPIC", "default:4");
    let process = Process::spawn(command).await;
    process.signal(Signal::HUP);
    process.append().await;
    let (status, log) = process.end(Signal::TERM).await;
    assert_eq!(status.code(), Some(0), "{log}");
}

#[tokio::test]
async fn silent_connections_do_not_delay_the_stop() {
    let arguments = ["--storage=memory", "--listen-addr=127.0.0.1:0"];
    let process = Process::start(&arguments).await;
    let silent = TcpStream::connect(&process.address).await.unwrap();
    let mut greeted = TcpStream::connect(&process.address).await.unwrap();
    greeted.write_all(HELLO).await.unwrap();
    soon(greeted.read_u8()).await.expect("it is served");
    let begin = Instant::now();
    let (status, log) = process.end(Signal::TERM).await;
    assert_eq!(status.code(), Some(0), "{log}");
    // A stop that waits for them lasts at least that long.
    assert!(begin.elapsed() < SHUTDOWN_WAIT_MAX, "{:?}", begin.elapsed());
    drop((silent, greeted));
}

#[tokio::test]
async fn second_signal_ends_a_waiting_stop() {
    let arguments = ["--storage=memory", "--listen-addr=127.0.0.1:0"];
    let mut process = Process::start(&arguments).await;
    let address = format!("http://{}", process.address);
    let channel = Endpoint::from_shared(address).unwrap().connect().await.unwrap();
    // An append whose request never arrives: the stop waits for it.
    let body = http_body_util::StreamBody::new(futures_util::stream::pending());
    let body = tonic::body::Body::new::<http_body_util::StreamBody<Never>>(body);
    let request = tonic::codegen::http::Request::post("/helix.log.v1.ProduceService/Append")
        .header("content-type", "application/grpc")
        .body(body)
        .unwrap();
    let mut calling = channel.clone();
    let call = tokio::spawn(async move {
        poll_fn(|context| calling.poll_ready(context)).await.unwrap();
        calling.call(request).await
    });
    // Its headers are before those of this call, on the same connection.
    let mut produce = ProduceServiceClient::new(channel);
    soon(produce.append(append_request(&["a"]))).await.unwrap();
    let begin = Instant::now();
    let status = loop {
        process.signal(Signal::TERM);
        if let Ok(ended) = timeout(Duration::from_millis(20), process.child.wait()).await {
            break ended.unwrap();
        }
        assert!(begin.elapsed() < SHUTDOWN_WAIT_MAX, "it waits");
    };
    let mut log = String::new();
    process.stderr.read_to_string(&mut log).await.unwrap();
    assert_eq!(status.code(), Some(130), "{log}");
    assert!(log.contains("second signal"), "{log}");
    call.abort();
}

#[tokio::test]
async fn container_limits_apply_and_are_logged() {
    let root = tempfile::tempdir().unwrap();
    let groups = root.path().join("groups");
    // The container's files, not the WAL's.
    #[allow(clippy::disallowed_methods)]
    let write = |name: &str, text: &str| {
        std::fs::create_dir_all(&groups).unwrap();
        std::fs::write(root.path().join(name), text).unwrap();
    };
    write("own", "0::/\n");
    write("groups/memory.max", "314572800\n");
    write("groups/cpu.max", "50000 100000\n");
    let script = "mount --bind \"$1/groups\" /sys/fs/cgroup \
                  && mount --bind \"$1/own\" /proc/$$/cgroup && shift && exec \"$0\" \"$@\"";
    let inside = |arguments: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", script, env!("CARGO_BIN_EXE_helix-server")]);
        command.arg(root.path()).args(arguments);
        command
    };
    let printed = soon(inside(&["--print-config"]).output()).await.unwrap();
    if !printed.status.success() {
        return skipped("no control group can be mounted here: a container was not tried");
    }
    let printed = String::from_utf8(printed.stdout).unwrap();
    let line = "memory_limit = \"272MiB\" # default within the container's limits";
    assert!(printed.lines().any(|printed| printed == line), "{printed}");
    let arguments = ["--storage=memory", "--listen-addr=127.0.0.1:0"];
    let process = Process::spawn(inside(&arguments)).await;
    for part in ["container_memory=314572800", "container_cpus=0.5", "memory_limit=285212672"] {
        assert!(process.banner.contains(part), "{part}: {}", process.banner);
    }
    assert!(!process.banner.contains("WARN"), "{}", process.banner);
    process.end(Signal::TERM).await;
    let process =
        Process::spawn(inside(&[&arguments[..], &["--memory-limit=300MiB"]].concat())).await;
    let warning = process.banner.lines().find(|line| line.contains("WARN")).expect("it warns");
    assert!(warning.contains("lower --memory-limit to 272MiB or less"), "{warning}");
    process.end(Signal::TERM).await;
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

#[tokio::test]
async fn packaged_settings_are_valid() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/server.toml");
    let checked = soon(server(&["--config", file, "--check-config"]).output()).await.unwrap();
    assert!(checked.status.success(), "{checked:?}");
}
