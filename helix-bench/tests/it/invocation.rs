//! Tests of the choice of the cluster, of exit codes, of interruption and of completion.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use helix_client::Position;
use helix_server::config::ServerConfig;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::time::Instant;

use crate::{MemoryServer, number, schema, stored};

/// Command with its contexts below `home` and no setting of this process.
fn command(home: &Path, arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_helix-bench"));
    command.args(arguments.split_whitespace()).env("XDG_CONFIG_HOME", home);
    for variable in ["HELIX_ADDR", "HELIX_TOKEN", "HELIX_TOKEN_FILE", "HELIX_TLS_CA"] {
        command.env_remove(variable);
    }
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[allow(clippy::disallowed_methods)] // Writes the file of a user.
fn save_contexts(home: &Path, text: &str) {
    std::fs::create_dir_all(home.join("helix")).unwrap();
    std::fs::write(home.join("helix/config.toml"), text).unwrap();
}

#[test]
fn cluster_is_chosen_as_helix_chooses_it() {
    let (server, home) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    let addr = server.address.as_str();
    let run = |env: Option<&str>, flags: &str| {
        let arguments = format!("latency --ops 3 --size 64 --quiet {flags}");
        let mut command = command(home.path(), &arguments);
        command.envs(env.map(|addr| ("HELIX_ADDR", addr)));
        command.output().unwrap()
    };
    assert_eq!(run(Some(addr), "").status.code(), Some(0));
    let nowhere = run(Some("127.0.0.1:1"), "");
    assert_eq!(nowhere.status.code(), Some(6), "{nowhere:?}");
    assert!(stderr(&nowhere).contains("127.0.0.1:1 (HELIX_ADDR)"), "{nowhere:?}");
    assert_eq!(run(Some("127.0.0.1:1"), &format!("--addr {addr}")).status.code(), Some(0));

    let contexts = format!(
        "current = 'lab'\n[contexts.lab]\naddr = ['{addr}']\n[contexts.gone]\naddr = \
         ['127.0.0.1:1']\n"
    );
    save_contexts(home.path(), &contexts);
    assert_eq!(run(None, "").status.code(), Some(0));
    assert_eq!(run(Some("127.0.0.1:1"), "--context lab").status.code(), Some(0));
    let gone = run(Some(addr), "--context gone");
    assert_eq!(gone.status.code(), Some(6), "{gone:?}");
    assert!(stderr(&gone).contains("context gone"), "{gone:?}");
    let unknown = run(None, "--context other");
    assert_eq!(unknown.status.code(), Some(3), "{unknown:?}");
    assert!(stderr(&unknown).contains("defined contexts: gone, lab"), "{unknown:?}");
    assert_eq!(run(Some("n1:99999"), "").status.code(), Some(2));
}

#[test]
fn default_topic_is_created_where_a_load_needs_it() {
    let config = ServerConfig { topics: Vec::new(), ..ServerConfig::in_memory() };
    let (server, home) = (MemoryServer::start_with(config), tempfile::tempdir().unwrap());
    let run = |arguments: &str| {
        let arguments = format!("{arguments} --addr {}", server.address);
        command(home.path(), &arguments).output().unwrap()
    };
    let read = run("read --records 10");
    assert_eq!(read.status.code(), Some(3), "{read:?}");
    assert!(stderr(&read).contains("helix-bench write"), "{read:?}");
    let named = run("read --records 10 --topic orders");
    assert_eq!(named.status.code(), Some(3), "{named:?}");
    let hint = "helix-bench write --topic orders --create-topic PARTITIONS ";
    assert!(stderr(&named).contains(hint), "{named:?}");
    let named = run("write --records 10 --topic orders");
    assert_eq!(named.status.code(), Some(3), "{named:?}");
    assert_eq!(server.topics(""), [""; 0]);
    let first = run("write --records 10");
    assert_eq!(first.status.code(), Some(0), "{first:?}");
    assert_eq!(stderr(&first).matches("created the topic default").count(), 1, "{first:?}");
    let second = run("write --records 10");
    assert!(!stderr(&second).contains("created"), "{second:?}");
    let partition = run("write --records 10 --partition 4");
    assert_eq!(partition.status.code(), Some(3), "{partition:?}");
    assert!(stderr(&partition).contains("from 0 to 3, or -1 for all"), "{partition:?}");
    assert_eq!(server.topics(""), ["default"]);
}

/// Starts a run that writes its result to a file.
fn start(server: &MemoryServer, home: &Path, json: &Path, arguments: &str) -> Child {
    let arguments = format!("{arguments} --addr {} --json {}", server.address, json.display());
    let mut command = command(home, &arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Asks the run to stop once the condition holds, and returns its output.
fn interrupt(child: Child, mut is_time: impl FnMut() -> bool) -> Output {
    let begin = Instant::now();
    while !is_time() {
        assert!(begin.elapsed() < Duration::from_secs(30), "the run has not begun");
        std::thread::yield_now();
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn interrupted_run_keeps_what_it_measured() {
    let (server, home) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    let json = home.path().join("result.json");
    let flags = "write --duration 10m --warmup 0s --batch-size 10";
    let output = interrupt(start(&server, home.path(), &json, flags), || {
        let ends = server.admin();
        let ends = ends.resolve_offsets("default", &[0], &Position::Latest);
        server.runtime.block_on(ends).unwrap()[0].offset > 1000
    });
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let result = stored(&json);
    schema::check(&result);
    assert_eq!(result["interrupted"], true);
    assert!(number(&result["records"]) > 900.0, "{result}");
    assert!(number(&result["records_per_sec"]) > 0.0);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("note: interrupted"), "{text}");
}

#[test]
fn interrupted_rows_are_kept_and_topics_deleted() {
    let (server, home) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    let json = home.path().join("result.json");
    let flags = "pubsub --payload 256B,1KiB --duration 10m --warmup 0s";
    let child = start(&server, home.path(), &json, flags);
    let output = interrupt(child, || !server.topics("bench-").is_empty());
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let result = stored(&json);
    assert_eq!(result["interrupted"], true);
    assert!(result["rows"].as_array().unwrap().len() <= 1, "{result}");
    assert_eq!(server.topics("bench-"), [""; 0]);
}

#[test]
fn uninterrupted_results_have_the_common_fields() {
    let (server, home) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    let (_, result) = server.bench(home.path(), "latency --ops 3");
    assert_eq!((&result["schema"], &result["mode"]), (&Value::from(1), &Value::from("latency")));
    assert_eq!(result["interrupted"], false);
    assert!(result["command"].as_str().unwrap().starts_with("helix-bench latency"), "{result}");
    assert!(number(&result["machine"]["cores"]) >= 1.0);
}

#[test]
fn json_on_standard_output_is_alone() {
    let (server, home) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    let flags = format!("pubsub --payload 256B --duration 1s --json - --addr {}", server.address);
    let output = command(home.path(), &flags).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    schema::check(&serde_json::from_slice(&output.stdout).unwrap());
    let flags = flags.replace("--json -", "--quiet");
    let output = command(home.path(), &flags).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let flags = flags.replace("--quiet", "");
    let output = command(home.path(), &flags).output().unwrap();
    assert_eq!(stderr(&output).lines().next(), Some("payload 256 B, 1 of 1"), "{output:?}");
}

#[test]
fn completes_commands_topics_and_contexts() {
    let (server, home) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    save_contexts(home.path(), "[contexts.lab]\naddr = ['n1:1']\n");
    let completed = |words: &str| {
        let mut command = command(home.path(), &format!("-- helix-bench {words}"));
        command.env("COMPLETE", "fish").env("HELIX_ADDR", &server.address);
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    assert!(completed("conn").starts_with("connections"));
    assert_eq!(completed("write --topic def").trim(), "default");
    assert_eq!(completed("read --context l").trim(), "lab");
}
