//! Runs the program against a server in this process. The runs are short: they show that each mode
//! works and that its result, table and plots agree, and measure nothing.
//!
//! A stall of the machine can outlast a short phase: such a run is repeated.

#![allow(clippy::unwrap_used)] // Clippy does not treat test helpers as tests.

mod field_formats;
mod invocation;
mod schema;

use std::fs::OpenOptions;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use helix_client::{Admin, Client, Config};
use helix_server::config::ServerConfig;
use helix_server::server::{RunningServer, Server};
use serde_json::Value;
use tokio::runtime::Runtime;

/// Most runs of the program in a test, if stalls of the machine disturb the first ones.
const RUNS_MAX: usize = 3;

/// Server in memory, which stops when this is dropped.
struct MemoryServer {
    runtime: Runtime,
    running: Option<RunningServer>,
    address: String,
}

impl MemoryServer {
    fn start() -> Self {
        Self::start_with(ServerConfig::in_memory())
    }

    fn start_with(config: ServerConfig) -> Self {
        let runtime = Runtime::new().unwrap();
        let running = runtime.block_on(Server::start(config)).unwrap();
        let address = running.local_addr().to_string();
        Self { runtime, running: Some(running), address }
    }

    fn admin(&self) -> Admin {
        let _entered = self.runtime.enter();
        Client::new(Config::new([self.address.clone()])).unwrap().admin()
    }

    fn topics(&self, prefix: &str) -> Vec<String> {
        let topics = self.runtime.block_on(self.admin().topics(prefix)).unwrap();
        topics.into_iter().map(|topic| topic.name).collect()
    }

    fn groups(&self) -> Vec<String> {
        let groups = self.runtime.block_on(self.admin().groups()).unwrap();
        groups.into_iter().map(|group| group.group).collect()
    }

    /// Runs the program, and returns what it printed and its JSON result.
    fn bench(&self, dir: &Path, arguments: &str) -> (String, Value) {
        let (output, result) = self.attempt(dir, arguments);
        succeeded(&output, result)
    }

    /// Like [`MemoryServer::bench`], but repeats a run without any successful request, and one
    /// whose result does not fit. Any other failure is final, as are lost records.
    fn bench_until(
        &self,
        dir: &Path,
        arguments: &str,
        fits: impl Fn(&Value) -> bool,
    ) -> (String, Value) {
        for _ in 1..RUNS_MAX {
            let (output, result) = self.attempt(dir, arguments);
            // A run that has failed in another way has no result.
            if output.status.code() == Some(1) && result.is_some() {
                continue;
            }
            let (text, result) = succeeded(&output, result);
            if fits(&result) {
                return (text, result);
            }
        }
        self.bench(dir, arguments)
    }

    /// Runs the program, and returns its output and its JSON result, if it has one.
    fn attempt(&self, dir: &Path, arguments: &str) -> (Output, Option<Value>) {
        let json = dir.join("result.json");
        // A run that fails keeps the old contents.
        OpenOptions::new().write(true).create(true).truncate(true).open(&json).unwrap();
        let mut arguments: Vec<&str> = arguments.split_whitespace().collect();
        arguments.extend(["--addr", &self.address, "--json", json.to_str().unwrap()]);
        let output = helix_bench(&arguments);
        let result = OpenOptions::new().read(true).open(&json).unwrap();
        (output, serde_json::from_reader(result).ok())
    }
}

impl Drop for MemoryServer {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            self.runtime.block_on(running.shutdown());
        }
    }
}

/// Returns what a run printed and its JSON result. Fails if the run has failed.
fn succeeded(output: &Output, result: Option<Value>) -> (String, Value) {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let result = result.unwrap();
    // A result in the format of another project has no mode.
    if !result["mode"].is_null() {
        schema::check(&result);
    }
    (text, result)
}

fn helix_bench(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_helix-bench")).args(arguments).output().unwrap()
}

fn stored(path: &Path) -> Value {
    let result = OpenOptions::new().read(true).open(path).unwrap();
    serde_json::from_reader(result).unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Returns true if the field at this path is above 0 in each row of the list.
fn all_above_zero(rows: &Value, field: &str) -> bool {
    let rows = rows.as_array().unwrap();
    rows.iter().all(|row| row.pointer(field).and_then(Value::as_f64).is_some_and(|it| it > 0.0))
}

#[test]
fn pubsub_delivers_each_message_once_to_each_subscriber() {
    let (server, dir) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    let plots = dir.path().join("plots").display().to_string();
    let (text, result) = server.bench_until(
        dir.path(),
        &format!(
            "pubsub --producers 3 --consumers 4 --topics 2 --payload 256B,4KiB --duration \
             300ms --warmup 100ms --plot {plots}"
        ),
        |result| all_above_zero(&result["rows"], "/messages"),
    );
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for row in rows {
        assert!(number(&row["messages"]) > 0.0, "{row}");
        assert_eq!((&row["lost"], &row["doubled"]), (&Value::from(0), &Value::from(0)));
        // Two subscribers for each of two topics: each message is delivered twice.
        assert!(number(&row["ceiling"]["messages_per_sec"]) > 0.0, "{row}");
        assert!(number(&row["ceiling"]["latency_us"]["p50"]) > 0.0, "{row}");
        let deliveries = number(&row["run"]["latency_us"]["count"]);
        assert_eq!(deliveries, 2.0 * number(&row["messages"]));
        assert!(number(&row["run"]["latency_parts_us"]["ack"]["p50"]) > 0.0);
        let bytes = number(&row["messages_per_sec"]) * number(&row["payload_bytes"]);
        assert!((number(&row["payload_bytes_per_sec"]) / bytes - 1.0).abs() < 1e-6);
    }
    assert!(text.contains("4 KiB") && text.contains("of the lower"), "{text}");
    for name in ["messages", "latency", "bytes"] {
        assert!(Path::new(&plots).join(format!("pubsub-{name}.svg")).is_file());
    }
    // The topics are deleted.
    assert_eq!(server.topics("bench-"), [""; 0]);
    // A stored result gives its table again.
    let path = dir.path().join("result.json");
    let tables = helix_bench(&["tables", path.to_str().unwrap()]);
    let tables = String::from_utf8(tables.stdout).unwrap();
    assert_eq!(tables.lines().filter(|line| line.starts_with("| 4 KiB | 32 |")).count(), 1);
}

#[test]
fn pubsub_measures_from_the_intended_send() {
    let (server, dir) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    let (_, result) = server.bench_until(
        dir.path(),
        "pubsub --payload 256B --batch-size 1 --rate 500 --duration 500ms --warmup \
             100ms",
        |result| all_above_zero(&result["rows"], "/messages"),
    );
    assert!(result["rows"][0]["ceiling"].is_null(), "the rate is the limit");
    let run = &result["rows"][0]["run"];
    // A send that is later than intended counts as latency, so both parts are reported.
    assert!(run["latency_parts_us"]["send_delay"].is_object(), "{run}");
    let messages = number(&result["rows"][0]["messages"]);
    assert!((1.0..=251.0).contains(&messages), "{messages} messages of at most 250");
}

#[test]
fn sequencer_shows_one_order_to_all_nodes() {
    let (server, dir) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    let plots = dir.path().join("plots").display().to_string();
    let (text, result) = server.bench_until(
        dir.path(),
        &format!("sequencer --size 64,1400 --duration 300ms --warmup 100ms --plot {plots}"),
        |result| all_above_zero(&result["throughput"], "/messages_per_sec"),
    );
    let latency = result["latency"].as_array().unwrap();
    assert_eq!((latency.len(), latency[1]["steps"].as_array().unwrap().len()), (2, 6));
    assert!(number(&latency[1]["latency_us"]["p50"]) > 0.0);
    let throughput = result["throughput"].as_array().unwrap();
    assert_eq!(throughput.len(), 4);
    for row in throughput {
        assert!(number(&row["messages_per_sec"]) > 0.0, "{row}");
        assert_eq!(row["node_messages_per_sec"].as_array().unwrap().len(), 3);
        assert_eq!((&row["is_order_equal"], &row["lost"]), (&Value::from(true), &Value::from(0)));
    }
    assert!(text.contains("99.999") && text.contains("gRPC over TCP"), "{text}");
    assert!(Path::new(&plots).join("sequencer-latency.svg").is_file());
}

#[test]
fn sequencer_has_rows_without_tcp() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("helix.sock");
    let socket = format!("unix:{}", path.display());
    let config = ServerConfig { listen_socket: Some(path), ..ServerConfig::in_memory() };
    let runtime = Runtime::new().unwrap();
    let running = runtime.block_on(Server::start(config)).unwrap();
    let address = running.local_addr().to_string();
    let server = MemoryServer { runtime, running: Some(running), address };
    let (directory, plots) = (dir.path().to_str().unwrap(), dir.path().join("plots"));
    let sizes = ["--latency-size", "64", "--size", "64"];
    let times = ["--duration", "200ms", "--warmup", "50ms"];
    let rows = ["--socket", &socket, "--embedded", "--embedded-dir", directory];
    let plot = ["--plot", plots.to_str().unwrap()];
    let arguments = [&["sequencer"][..], &sizes, &times, &rows, &plot].concat();
    let (text, result) = server.bench_until(dir.path(), &arguments.join(" "), |result| {
        all_above_zero(&result["throughput"], "/messages_per_sec")
    });
    let latency = result["latency"].as_array().unwrap();
    let found: Vec<(&str, &str)> = latency[1..]
        .iter()
        .map(|row| (row["name"].as_str().unwrap(), row["durability"].as_str().unwrap()))
        .collect();
    assert_eq!(
        found,
        [
            ("gRPC over TCP", "quorum-written"),
            ("gRPC over a Unix socket", "quorum-written"),
            ("embedded, memory", "quorum-written"),
            ("embedded, durable", "quorum-synced"),
        ],
        "{text}"
    );
    for row in &latency[1..] {
        assert!(number(&row["latency_us"]["p50"]) > 0.0, "{row}");
        assert_eq!((&row["lost"], &row["doubled"]), (&Value::from(0), &Value::from(0)), "{row}");
    }
    let throughput = result["throughput"].as_array().unwrap();
    let found: Vec<&str> = throughput.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(found, ["gRPC", "gRPC", "embedded, memory", "embedded, durable"], "{text}");
    for row in throughput {
        assert!(number(&row["messages_per_sec"]) > 0.0, "{row}");
        assert_eq!(row["node_messages_per_sec"].as_array().unwrap().len(), 3, "{row}");
        assert_eq!((&row["lost"], &row["doubled"]), (&Value::from(0), &Value::from(0)), "{row}");
        assert_eq!(row["is_order_equal"], true, "{row}");
    }
    assert!(plots.join("sequencer-latency.svg").is_file());
}

#[test]
fn sequencer_check_passes_over_cut_connections() {
    let (server, dir) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    let (text, result) = server.bench(dir.path(), "sequencer --check --records 6000");
    let outcome = |name: &str| {
        let steps = result["check"].as_array().unwrap();
        let step = steps.iter().find(|step| step["name"] == name);
        step.unwrap_or_else(|| panic!("no {name} in {text}"))["outcome"].clone()
    };
    for name in ["publish", "total order", "rewind", "late join", "cut connections"] {
        assert_eq!(outcome(name), "passed", "{text}");
    }
    assert_eq!(outcome("change of leader"), "not-possible", "one node has no other leader");
}

#[test]
fn single_runs_are_plotted_and_reported_together() {
    let (server, dir) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    let plots = dir.path().join("plots").display().to_string();
    let (text, result) =
        server.bench(dir.path(), &format!("e2e --subscribers 2 --records 200 --plot {plots}"));
    assert!(text.contains("e2e"), "{text}");
    assert_eq!((&result["errors"], &result["records"]), (&Value::from(0), &Value::from(200)));
    assert_eq!(result["latency_us"]["count"], 400);
    // A run of more than a second is drawn over time, and a busy machine may need that long.
    let intervals = result["intervals"].as_array().map_or(0, Vec::len);
    let over = if intervals > 1 { "time" } else { "clients" };
    assert!(Path::new(&plots).join(format!("e2e-latency-{over}.svg")).is_file());
    let (stored, page) = (dir.path().join("result.json"), dir.path().join("page.html"));
    let paths = [stored.to_str().unwrap(), page.to_str().unwrap()];
    assert!(helix_bench(&["report", paths[0], "-o", paths[1]]).status.success());
    assert!(page.is_file());
}

#[test]
fn the_log_and_comparisons_are_plotted_and_their_ratio_is_shown() {
    let (server, dir) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    let path = |name: &str| dir.path().join(name).display().to_string();
    let [log, plots] = ["wal.json", "plots"].map(path);
    let flags = format!(
        "wal --storage memory --keep 0 --group-size 64KiB --entry-size 1KiB --duration 50ms \
         --warmup 0s --json {log} --plot {plots}"
    );
    let output = helix_bench(&flags.split(' ').collect::<Vec<_>>());
    assert!(output.status.success(), "{output:?}");
    let flags = format!("compare --runs 2 --duration 200ms --warmup 50ms --plot {plots}");
    let (_, compared) = server.bench_until(dir.path(), &flags, |compared| {
        all_above_zero(&compared["runs"], "/server/requests")
    });
    assert_eq!((&compared["mode"], &compared["load_mode"]), (&"compare".into(), &"write".into()));
    schema::check(&stored(Path::new(&log)));
    for name in ["wal-throughput", "wal-latency", "compare-throughput", "compare-ratio"] {
        assert!(Path::new(&plots).join(format!("{name}.svg")).is_file(), "{name}");
    }
    let tables = helix_bench(&["tables", &path("result.json"), "--limit", &log]);
    let tables = String::from_utf8(tables.stdout).unwrap();
    assert!(tables.contains("| ceiling MB/s | log MB/s | of the lower |"), "{tables}");
    let row = tables.lines().find(|line| line.starts_with("| write | memory |"));
    assert!(row.is_some_and(|row| !row.contains("| - |")), "{tables}");
}

#[test]
fn flags_without_effect_and_unknown_results_are_rejected() {
    for arguments in [
        &["pubsub", "--topics", "2"][..],
        &["pubsub", "--payload", "8B"],
        &["sequencer", "--check", "--nodes", "1"],
        &["sequencer", "--check", "--plot", "plots"],
        &["ceiling", "--addr", "n1"],
    ] {
        let output = helix_bench(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    }
    assert_eq!(helix_bench(&["tables", "/nonexistent"]).status.code(), Some(1));
}

#[test]
fn connections_are_opened_and_their_requests_delivered() {
    let (server, dir) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    let (text, result) = server.bench_until(
        dir.path(),
        "connections --count 20,50 --rate 200 --duration 500ms --warmup 100ms",
        |result| all_above_zero(&result["rows"], "/run/latency_us/p99"),
    );
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for (row, count) in rows.iter().zip([20, 50]) {
        assert_eq!((&row["count"], &row["opened"]), (&Value::from(count), &Value::from(count)));
        assert_eq!(row["active"], count / 10);
        assert!(number(&row["opened_per_sec"]) > 0.0 && row["run"]["tls"] == false, "{row}");
        assert_eq!((&row["lost"], number(&row["delivered_percent"])), (&Value::from(0), 100.0));
        assert!(number(&row["run"]["latency_us"]["p99"]) > 0.0);
    }
    assert!(text.contains("KiB/connection"), "{text}");
}

#[test]
fn limit_finds_a_rate_and_shows_its_steps() {
    let (server, dir) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    // The bound is far above any latency, so the search ends where the rate is not reached.
    let is_too_high = |step: &Value| step["why"] == "rate not reached";
    let (text, result) = server.bench_until(
        dir.path(),
        "limit --mode write --max-p99 10s --start 500 --batch-size 1 --duration 200ms \
             --warmup 50ms",
        |result| result["steps"].as_array().unwrap().iter().any(is_too_high),
    );
    let steps = result["steps"].as_array().unwrap();
    let highest = number(&result["highest_rate"]);
    let within = steps.iter().filter(|step| step["is_within"] == true);
    // Each rate within the bound was above the ones before it. What counts is what was sent.
    let sent = within.map(|step| {
        let rate = number(&step["rate"]);
        (rate, rate.min(number(&step["run"]["records_per_sec"])))
    });
    let fastest = sent.fold((0.0, 0.0), |a: (f64, f64), b| if b.0 > a.0 { b } else { a });
    assert_eq!(fastest.1, highest);
    assert!(steps.iter().any(is_too_high), "{text}");
    assert_eq!(text.lines().filter(|line| line.ends_with("within")).count() > 0, highest > 0.0);
}

/// Returns the first row whose name contains this.
fn row_of<'a>(result: &'a Value, name: &str) -> &'a Value {
    let mut rows = result["rows"].as_array().unwrap().iter();
    let row = rows.find(|row| row["name"].as_str().unwrap().contains(name));
    row.unwrap_or_else(|| panic!("no row {name} in {result:#}"))
}

#[test]
fn group_measures_each_part_beside_its_reference() {
    let (server, dir) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    let parts = ["read", "commit", "handover", "heartbeat", "memory"].join(",");
    // A killed member's partitions move no earlier than its last heartbeat's session ends, which
    // is at least two thirds of the timeout after the kill, if the heartbeats were not late.
    let killed = |result: &Value| number(&row_of(result, "member killed")["value"]);
    let moved_in = 1_800.0..30_000.0;
    let (text, result) = server.bench_until(
        dir.path(),
        &format!(
            "group --parts {parts} --runs 1 --partitions 4 --records 2000 --committers 3 \
             --leaves 2 --session-timeout 3s --groups 2 --members 2 --heartbeat 1s \
             --empty-groups 50 --duration 1200ms"
        ),
        |result| moved_in.contains(&killed(result)),
    );
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 13, "{text}");
    let row = |name: &str| row_of(&result, name);
    for name in ["one member reads", "commit every second", "p50, one client", "3 clients"] {
        let ratio = number(&row(name)["value"]) / number(&row(name)["reference"]);
        assert!((number(&row(name)["ratio"]) / ratio - 1.0).abs() < 1e-6, "{text}");
    }
    assert!(moved_in.contains(&killed(&result)), "{text}");
    assert_eq!(row("per group")["values"].as_array().unwrap().len(), 1);
    assert!(text.contains("lowest to highest"), "{text}");
    assert_eq!(server.topics("bench-"), [""; 0]);
    assert_eq!(server.groups(), [""; 0], "groups of the bench are deleted");
}

#[test]
fn group_explains_what_it_cannot_measure() {
    let server = MemoryServer::start();
    for (arguments, expected) in [
        (["coordinator", "--kill-command", "true"], "start three nodes with --shards 3"),
        (["restart", "--restart-command", "true"], "the command has not restarted the node"),
        (["restart", "--restart-command", "exit 3"], "exit status: 3"),
    ] {
        let addr = server.address.as_str();
        let flags = ["--partitions", "2", "--duration", "100ms", "--runs", "1", "--addr", addr];
        let output = helix_bench(&[&["group", "--parts"], &arguments[..], &flags].concat());
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && text.contains(expected), "{text}");
    }
}

#[test]
fn compaction_keeps_the_latest_update_of_each_key() {
    let (dir, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let config = ServerConfig {
        segment_bytes: 16 << 20,
        tail_bytes: Some(1 << 20),
        checkpoint_bytes: 1 << 20,
        cleaner_lag: Duration::from_secs(1),
        ..ServerConfig::in_dir(data.path())
    };
    let server = MemoryServer::start_with(config);
    let plots = dir.path().join("plots").display().to_string();
    let flags = format!(
        "compaction --updates 3000 --keys 20 --batch-size 10 --clients 2 --rate 5000 --settle \
         2m --plot {plots}"
    );
    let (text, result) = server.bench(dir.path(), &flags);
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 1, "{text}");
    let row = &rows[0];
    assert!(number(&row["updates"]) >= 3000.0, "{row}");
    assert_eq!((&row["keys"], &row["lost_keys"]), (&Value::from(20), &Value::from(0)));
    assert_eq!(row["records_left"], 20, "one record of each key");
    assert!(number(&row["held_bytes"]) < number(&row["held_bytes_at_last_ack"]) / 2.0, "{row}");
    let amplification = number(&row["held_bytes"]) / number(&row["live_bytes"]);
    assert!((number(&row["amplification"]) / amplification - 1.0).abs() < 1e-6);
    assert_eq!(number(&result["p99_ratio"]), number(&row["p99_ratio"]));
    assert!(text.contains("held/live") && !text.contains("note: pair 1: "), "{text}");
    assert!(Path::new(&plots).join("compaction-ratio.svg").is_file());
    assert_eq!(server.topics("bench-"), [""; 0]);
}

#[test]
fn compaction_says_that_a_log_in_memory_is_not_compacted() {
    let server = MemoryServer::start();
    let flags = "compaction --updates 100 --keys 9 --rate 1000 --settle 0s --addr";
    let flags = flags.split(' ').chain([server.address.as_str()]);
    let output = helix_bench(&flags.collect::<Vec<_>>());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("start the nodes with a shorter --cleaner-lag"), "{text}");
}

/// Returns the exit code of a run whose standard output and error have no reader.
fn code_with_closed_output(arguments: &[&str]) -> Option<i32> {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_helix-bench"));
    command.args(arguments).stdout(writer.try_clone().unwrap()).stderr(writer);
    command.status().unwrap().code()
}

#[test]
fn closed_output_changes_no_exit_code() {
    let (server, dir) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    let plots = dir.path().join("plots");
    let run = [
        "pubsub",
        "--payload",
        "256B,4KiB",
        "--duration",
        "1s",
        "--warmup",
        "50ms",
        "--addr",
        &server.address,
        "--plot",
        plots.to_str().unwrap(),
    ];
    assert_eq!(code_with_closed_output(&run), Some(0));
    assert!(plots.join("pubsub-messages.svg").is_file(), "the work after the output was done");
    assert_eq!(code_with_closed_output(&["tables", "/nonexistent"]), Some(1));
    assert_eq!(code_with_closed_output(&["pubsub", "--topics", "2"]), Some(2));
}
