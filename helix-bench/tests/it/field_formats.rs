//! Load tests in the formats of other programs: workload files, and producer performance.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use helix_client::Position;
use serde_json::Value;
use tokio::time::Instant;

use super::{MemoryServer, helix_bench, number};

const WORKLOAD: &str = "
name: a short test
topics: 2
partitionsPerTopic: 2
keyDistributor: RANDOM_NANO
messageSize: 5
payloadFile: payload.data
producersPerTopic: 2
subscriptionsPerTopic: 2
consumerPerSubscription: 2
producerRate: 2000
testDurationMinutes: 0.02
warmupDurationMinutes: 0.005
";

fn write(dir: &Path, name: &str, text: &str) -> PathBuf {
    let path = dir.join(name);
    let mut file = OpenOptions::new().write(true).create_new(true).open(&path).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    path
}

/// Runs a workload, again if the result does not fit, and returns the text and the result.
fn omb(
    server: &MemoryServer,
    dir: &Path,
    workload: &str,
    fits: impl Fn(&Value) -> bool,
) -> (String, Value) {
    write(dir, "payload.data", "12345");
    let path = write(dir, "workload.yaml", workload);
    let plots = dir.join("plots");
    let flags = format!("omb {} --acks quorum-written --plot {}", path.display(), plots.display());
    let ran = server.bench_until(dir, &flags, fits);
    for name in ["rates", "latency"] {
        assert!(plots.join(format!("omb-{name}.svg")).is_file(), "{name}");
    }
    assert_eq!(server.topics("bench-"), [""; 0], "topics of the bench are deleted");
    assert_eq!(server.groups(), [""; 0], "groups of the bench are deleted");
    ran
}

fn sum(list: &Value) -> f64 {
    list.as_array().unwrap().iter().map(number).sum()
}

#[test]
fn workload_is_published_and_consumed_by_each_subscription() {
    let (server, dir) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    let rates = |result: &Value| (sum(&result["publishRate"]), sum(&result["consumeRate"]));
    // Messages that a stall delays are published or consumed in another phase.
    let is_steady = |result: &Value| {
        let (published, consumed) = rates(result);
        (100.0..2100.0).contains(&published) && (consumed / published - 2.0).abs() < 0.2
    };
    let (text, result) = omb(&server, dir.path(), WORKLOAD, is_steady);
    assert_eq!((&result["topics"], &result["partitions"]), (&Value::from(2), &Value::from(2)));
    assert_eq!(result["workload"], "a short test");
    assert!(result["driver"].as_str().unwrap().contains("storage memory"), "{result}");
    // One interval, which may be longer than the test by the time of the last acks.
    assert_eq!(result["publishRate"].as_array().unwrap().len(), 1);
    assert!(is_steady(&result), "{:?}: {text}", rates(&result));
    assert_eq!(sum(&result["publishErrorRate"]), 0.0, "{text}");
    for name in ["publishLatency", "endToEndLatency"] {
        let (p50, max) = (sum(&result[format!("{name}50pct")]), sum(&result[format!("{name}Max")]));
        assert!(p50 > 0.0 && max >= p50, "{name}: {p50}, {max}");
    }
    let quantiles = result["aggregatedEndToEndLatencyQuantiles"].as_object().unwrap();
    assert!(quantiles.contains_key("100.0"), "{quantiles:?}");
    assert!(text.contains("end to end") && !text.contains("did not arrive"), "{text}");
}

#[test]
fn workload_without_a_rate_finds_one() {
    let (server, dir) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    let workload = WORKLOAD.replace("producerRate: 2000", "producerRate: 0");
    let (text, result) = omb(&server, dir.path(), &workload, |_| true);
    assert!(text.contains("is the highest rate that the consumers kept up with"), "{text}");
    assert!(sum(&result["publishRate"]) > 0.0, "{text}");
}

#[test]
fn backlog_is_built_while_consumers_pause_and_is_read() {
    let (server, dir) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    // 5,000 messages for both subscriptions together, which takes 0.6 s.
    let workload = WORKLOAD.replace("producerRate: 2000", "producerRate: 4000");
    let workload = workload.replace("testDurationMinutes: 0.02", "testDurationMinutes: 0.01")
        + "consumerBacklogSizeGB: 0.0000233\n";
    let latency = |result: &Value| {
        let name = "aggregatedEndToEndLatency";
        (number(&result[format!("{name}50pct")]), number(&result[format!("{name}Max")]))
    };
    let (text, result) = omb(&server, dir.path(), &workload, |result| latency(result).1 > 300.0);
    // The first records waited until the backlog was complete.
    let (p50, max) = latency(&result);
    assert!(max > 300.0 && max >= p50, "{max} ms, {text}");
    assert!(!text.contains("did not arrive"), "{text}");
}

/// Returns true once a topic of the bench has records.
fn is_publishing(server: &MemoryServer) -> bool {
    server.topics("bench-omb").iter().any(|topic| {
        let admin = server.admin();
        let ends = server.runtime.block_on(admin.resolve_offsets(topic, &[0], &Position::Latest));
        ends.is_ok_and(|ends| ends.iter().any(|end| end.offset > 0))
    })
}

#[test]
fn failed_workload_ends_and_leaves_no_group() {
    let (server, dir) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    write(dir.path(), "payload.data", "12345");
    // A backlog that would take days.
    let workload = format!("{WORKLOAD}consumerBacklogSizeGB: 1\n");
    let path = write(dir.path(), "workload.yaml", &workload);
    let mut command = Command::new(env!("CARGO_BIN_EXE_helix-bench"));
    command.arg("omb").arg(path).args(["--addr", &server.address, "--acks", "quorum-written"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begin = Instant::now();
    while !is_publishing(&server) {
        assert!(begin.elapsed() < Duration::from_secs(30), "the run has not begun");
        std::thread::yield_now();
    }
    assert_ne!(server.groups(), [""; 0]);
    for topic in server.topics("bench-omb") {
        server.runtime.block_on(server.admin().delete_topic(topic.as_str())).unwrap();
    }
    // Neither producers nor consumers can go on.
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success(), "{output:?}");
    assert_eq!(server.groups(), [""; 0], "{output:?}");
}

#[test]
fn refused_key_is_named_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let workload = WORKLOAD.replace("topics: 2", "topicCount: 2");
    let path = write(dir.path(), "workload.yaml", &workload);
    let output = helix_bench(&["omb", path.to_str().unwrap()]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("line 3: topicCount is not supported"), "{text}");
}

#[test]
fn perf_prints_the_lines_of_the_tool() {
    let (server, dir) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    let flags = "perf --topic perf --create-topic 2 --num-records 1000 --record-size 100 \
                 --throughput 1000 --batch-size 16384 --reporting-interval 300 --producer-props \
                 acks=all linger.ms=2";
    let plots = dir.path().join("plots");
    let flags = format!("{flags} --plot {}", plots.display());
    // A second at 1,000 a second.
    let is_paced = |result: &Value| (0.9..5.0).contains(&number(&result["seconds"]));
    let (text, result) = server.bench_until(dir.path(), &flags, is_paced);
    let lines: Vec<&str> = text.lines().collect();
    let (last, windows) = lines.split_last().unwrap();
    assert!(last.starts_with("1000 records sent, ") && last.ends_with(" ms 99.9th."), "{text}");
    assert!(!windows.is_empty(), "{text}");
    for line in windows {
        assert!(line.contains(" records/sec (") && line.ends_with(" ms max latency."), "{line}");
    }
    assert_eq!((&result["records"], &result["errors"]), (&Value::from(1000), &Value::from(0)));
    assert_eq!(result["latency_us"]["count"], 1000);
    let intervals = result["intervals"].as_array().unwrap();
    assert!(intervals.len() >= windows.len(), "{result}");
    let first = &intervals[0];
    assert!(number(&first["at_seconds"]) >= 0.3 && number(&first["records_per_sec"]) > 0.0);
    for name in ["throughput", "latency"] {
        assert!(plots.join(format!("perf-{name}.svg")).is_file(), "{name}");
    }
    assert!(is_paced(&result), "{result}");
    assert_eq!(result["storage"], "memory");
}
