//! Commands on a topic with more partitions than one request may name, and with the longest name.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use crate::harness::{ServerProcess, command, helix, json};

/// More than one request, and more than one call reads at the same time.
const PARTITIONS: u32 = 20_500;

#[test]
fn commands_work_for_many_partitions_with_long_names() {
    let node = ServerProcess::start();
    let topic = "t".repeat(249);
    let topic = topic.as_str();
    let count = PARTITIONS.to_string();
    let last = (PARTITIONS - 1).to_string();
    let last = last.as_str();
    node.ok(&["topic", "create", topic, "--partitions", &count]);
    for (partition, line) in [("0", "first\n"), ("10000", "middle\n"), (last, "last\n")] {
        node.ok_with(&["produce", topic, "-p", partition], line);
    }
    let sorted = |args: &[&str]| {
        let printed = node.ok(args);
        let mut lines: Vec<_> = printed.lines().map(str::to_owned).collect();
        lines.sort_unstable();
        lines
    };
    let all = ["first", "last", "middle"];

    for args in [
        &["offsets", topic, "-o", "json"][..],
        &["offsets", topic, "@-1h", "-o", "json"],
        &["offsets", topic, "--any-replica", "-o", "json"],
    ] {
        let offsets = json(&node.ok(args));
        let ends = offsets.as_array().unwrap().iter().map(|row| row["high_watermark"].as_u64());
        assert_eq!((ends.len(), ends.sum::<Option<u64>>()), (PARTITIONS as usize, Some(3)));
    }
    assert_eq!(sorted(&["consume", topic]), all);
    assert_eq!(sorted(&["consume", topic, "--any-replica"]), all);
    assert_eq!(sorted(&["consume", topic, "--follow", "--from", "earliest", "-n", "3"]), all);
    assert_eq!(sorted(&["tail", topic, "-n", "3"]), all);

    // A group has at most 20,000 offsets, a call 1,000.
    let seek = ["group", "seek", "readers", topic, "-p", "0-10500", "--to", "latest", "-o", "json"];
    let sum = |args: &[&str], field: &str| {
        let rows = json(&node.ok(args));
        let rows = rows.as_array().unwrap();
        (rows.len(), rows.iter().map(|row| row[field].as_u64()).sum::<Option<u64>>())
    };
    assert_eq!(sum(&seek, "to"), (10_501, Some(2)));
    let reset = ["group", "reset", "readers", "--to", "earliest", "-o", "json"];
    assert_eq!(sum(&reset, "from"), (10_501, Some(2)));

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("backup");
    let path = path.to_str().unwrap();
    let saved = json(&node.ok(&["backup", path, "--topic", topic, "-o", "json"]));
    assert_eq!(saved.as_array().unwrap().len(), PARTITIONS as usize);
    assert_eq!(helix(&["backup", "verify", path], "").code, 0);
    node.ok(&["restore", path, "--as", "restored"]);
    assert_eq!(sorted(&["consume", "restored"]), all);

    let trimmed = node.ok(&["topic", "trim", topic, "--to", "latest", "--yes", "-o", "json"]);
    assert_eq!(json(&trimmed).as_array().unwrap().len(), PARTITIONS as usize);
    assert_eq!(node.ok(&["consume", topic]), "");
}

/// Relays connections to a node and counts the bytes that the node sends. Its threads end with the
/// test process.
struct CountingProxy {
    address: String,
    sent: Arc<AtomicU64>,
}

impl CountingProxy {
    fn start(node: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let sent = Arc::new(AtomicU64::new(0));
        let count = sent.clone();
        thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                // The node may not listen yet.
                let Ok(node) = TcpStream::connect(&node) else { continue };
                relay(client.try_clone().unwrap(), node.try_clone().unwrap(), Arc::default());
                relay(node, client, count.clone());
            }
        });
        Self { address, sent }
    }
}

fn relay(mut from: TcpStream, mut to: TcpStream, count: Arc<AtomicU64>) {
    thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(len @ 1..) = from.read(&mut buffer) {
            count.fetch_add(len as u64, Ordering::Relaxed);
            if to.write_all(&buffer[..len]).is_err() {
                break;
            }
        }
        // Ignored: either side may have closed the connection.
        let _ = to.shutdown(Shutdown::Both);
    });
}

/// The status of a cluster does not list partitions.
#[test]
fn cluster_status_does_not_grow_with_partitions() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let proxy = CountingProxy::start(port.to_string());
    let node = ServerProcess::start_at(
        &port.to_string(),
        &["--storage", "memory", "--advertise-addr", &proxy.address],
    );
    node.ok(&["topic", "create", "one", "--partitions", &PARTITIONS.to_string()]);
    node.ok(&["topic", "create", "two", "--partitions", "3"]);
    let via_proxy = |args: &[&str]| {
        let before = proxy.sent.load(Ordering::Relaxed);
        let outcome = helix(&[args, &["-o", "json", "--addr", &proxy.address]].concat(), "");
        assert_eq!(outcome.code, 0, "{args:?}: {outcome:?}");
        // The names of partitions and their shards alone would be twice as long.
        let bytes = proxy.sent.load(Ordering::Relaxed) - before;
        assert!((100..10_000).contains(&bytes), "{args:?}: {bytes} bytes");
        json(&outcome.stdout)
    };
    // With the topic `default`.
    let info = via_proxy(&["cluster", "info"]);
    assert_eq!((&info["topic_count"], &info["partition_count"]), (&3.into(), &20_507.into()));
    assert_eq!(info["nodes"][0]["partitions_led"], 20_507);
    assert_eq!(via_proxy(&["cluster", "health"])["healthy"], true);
    for args in [&["cluster", "nodes"][..], &["cluster", "shards"], &["check"]] {
        assert!(!via_proxy(args).as_array().unwrap().is_empty(), "{args:?}");
    }
}

#[test]
fn producer_writes_to_partitions_that_are_added() {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "one", "--partitions", "1"]);
    let args = ["produce", "one", "--key-separator", ":", "-q", "--addr", node.address()];
    let mut producer = command(&args).stdin(Stdio::piped()).spawn().unwrap();
    let mut input = producer.stdin.take().unwrap();
    let mut number = 0;
    let mut write_until = |done: &dyn Fn(&[u64]) -> bool| {
        let limit = number + 400;
        loop {
            number += 1;
            writeln!(input, "{number}:value").unwrap();
            let offsets = json(&node.ok(&["offsets", "one", "-o", "json"]));
            let rows = offsets.as_array().unwrap().iter();
            let ends: Vec<u64> = rows.map(|row| row["high_watermark"].as_u64().unwrap()).collect();
            if done(&ends) {
                return;
            }
            assert!(number < limit, "after {number} lines the ends are {ends:?}");
        }
    };
    write_until(&|ends| ends[0] > 2);
    node.ok(&["topic", "add-partitions", "one", "--total", "3"]);
    write_until(&|ends| ends[1] > 0 && ends[2] > 0);
    drop(input);
    assert!(producer.wait().unwrap().success());
}

#[test]
fn followers_read_partitions_that_are_added() {
    let node = ServerProcess::start();
    for (topic, args) in [("one", &["consume", "--follow"][..]), ("two", &["tail", "-F"])] {
        node.ok(&["topic", "create", topic, "--partitions", "1"]);
        let args = [args, &[topic, "--addr", node.address()]].concat();
        let mut follower = command(&args).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines();
        let (sender, received) = mpsc::channel();
        let reader = thread::spawn(move || {
            while let Some(Ok(line)) = lines.next() {
                // Fails once the test has ended.
                let _ = sender.send(line);
            }
        });
        // It reads from the end on, so its first line shows that it has begun.
        let mut attempts = 0;
        while received.recv_timeout(Duration::from_millis(50)).is_err() {
            attempts += 1;
            assert!(attempts < 300, "{args:?} does not begin");
            node.ok_with(&["produce", topic, "-p", "0"], "begun\n");
        }
        node.ok(&["topic", "add-partitions", topic, "--total", "3"]);
        node.ok_with(&["produce", topic, "-p", "1"], "in one\n");
        node.ok_with(&["produce", topic, "-p", "2"], "in two\n");
        let mut missing = BTreeSet::from(["in one", "in two"]);
        while !missing.is_empty() {
            let line = received.recv_timeout(Duration::from_secs(30));
            let line = line.unwrap_or_else(|_| panic!("{args:?}: {missing:?} is missing"));
            missing.remove(line.as_str());
        }
        follower.kill().unwrap();
        follower.wait().unwrap();
        reader.join().unwrap();
    }
}
