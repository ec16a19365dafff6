//! Tests with three nodes: a dev cluster whose nodes are killed, and the demo.
//! Waits use the commands' own timeouts.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use tokio::time::Instant;

use crate::harness::{CommandOutput, DevProcess, command, helix, json, outcome, signal, until};

/// The timeout allows for an election on a loaded machine; it usually takes a second.
const HEALTHY: [&str; 6] =
    ["cluster", "health", "--watch", "--exit-when-healthy", "--timeout", "60s"];

fn rows(dev: &DevProcess, what: &str) -> Vec<Value> {
    json(&dev.ok(&["cluster", what, "-o", "json"])).as_array().unwrap().clone()
}

#[test]
fn dev_cluster_survives_a_killed_leader() {
    let dev = DevProcess::start(3);
    dev.ok(&HEALTHY);
    let topic = ["topic", "create", "orders", "--partitions", "6", "--replication-factor", "3"];
    dev.ok(&topic);
    let lines: String = (0..600).map(|number| format!("before {number}\n")).collect();
    dev.ok_with(&["produce", "orders"], &lines);

    let victim = dev.leader_of(1).to_string();
    let killed = dev.control(&["kill", &victim]);
    assert!(killed.stdout.contains("stopped"), "{killed:?}");
    let lines: String = (0..600).map(|number| format!("after {number}\n")).collect();
    dev.ok_with(&["produce", "orders"], &lines);

    let health = dev.run(&["cluster", "health"], "");
    assert_eq!(health.code, 1, "{health:?}");
    assert!(health.stdout.contains("NODE_DOWN"), "{health:?}");
    // The majority remains, so no node is needed.
    assert!(!health.stdout.contains("needed") && health.stderr.is_empty(), "{health:?}");
    let is_reachable = |row: &Value| row["is_reachable"].as_bool().unwrap();
    // A node that stalls counts as down, too.
    until("two of three nodes are reachable", || {
        let nodes = rows(&dev, "nodes");
        let is_victim = |row: &Value| row["node_id"].as_u64() == victim.parse().ok();
        assert!(!nodes.iter().any(|row| is_victim(row) && is_reachable(row)), "{nodes:?}");
        assert_eq!(nodes.len(), 3);
        nodes.iter().filter(|row| is_reachable(row)).count() == 2
    });
    until("another node leads", || dev.leader_of(1).to_string() != victim);

    let restarted = dev.control(&["restart", &victim]);
    assert_eq!(restarted.code, 0, "{restarted:?}");
    dev.ok(&HEALTHY);
    assert_eq!(dev.ok(&["consume", "orders"]).lines().count(), 1200);
    until("all nodes are reachable", || rows(&dev, "nodes").iter().all(is_reachable));
    until("all replicas are reachable", || {
        rows(&dev, "shards").iter().all(|row| row["role"] != "unreachable")
    });
}

#[test]
fn cluster_that_starts_is_healthy_once_all_members_answer() {
    let port: u16 = DevProcess::free_port(3).parse().unwrap();
    let addresses: Vec<String> = (port..port + 3).map(|port| format!("127.0.0.1:{port}")).collect();
    let mut dev = command(&["dev", "--memory", "--port", &port.to_string()]);
    let mut dev = dev.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    // Each run knows one node, so the other members come from the cluster.
    let watches = addresses.iter().map(|address| {
        let args = [&HEALTHY[..], &["-o", "json", "--addr", address]].concat();
        let mut watch = command(&args);
        watch.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    let watches: Vec<Child> = watches.collect();
    for (watch, address) in watches.into_iter().zip(&addresses) {
        let ended = watch.wait_with_output().unwrap();
        let stdout = String::from_utf8(ended.stdout).unwrap();
        let stderr = String::from_utf8(ended.stderr).unwrap();
        assert!(ended.status.success(), "{address}: {stdout}{stderr}");
        let states = serde_json::Deserializer::from_str(&stdout).into_iter::<Value>();
        let states: Vec<Value> = states.map(Result::unwrap).collect();
        for state in &states {
            let nodes = state["nodes"].as_array().unwrap();
            let is_healthy = state["healthy"] == true;
            assert!(!is_healthy || nodes.len() == 3, "{address}: {state}");
            assert!(
                is_healthy || state["issues"] != Value::Array(Vec::new()),
                "{address}: {state}"
            );
        }
        assert_eq!(states.last().unwrap()["healthy"], true, "{stdout}");
        for text in [&stdout, &stderr] {
            assert!(!text.contains("of  is") && !text.contains("nodes  are"), "{text}");
        }
    }
    helix(&["dev", "stop", "--port", &port.to_string()], "");
    assert!(dev.wait().unwrap().success());
}

/// Commands that need a leader say what they wait for, and stop soon where they can.
fn lost_majority_is_stated_soon(dev: &DevProcess, victim: u64) {
    let victim = victim.to_string();
    let begin = Instant::now();
    let removal = dev.run(&["cluster", "remove-node", &victim, "--lost", "--dry-run"], "");
    assert_eq!(removal.code, 6, "{removal:?}");
    assert!(!removal.stderr.contains("may have been applied"), "{removal:?}");
    assert!(removal.stderr.contains("waiting for"), "{removal:?}");
    let described = dev.run(&["topic", "describe", "orders"], "");
    assert_eq!(described.code, 5, "{described:?}");
    assert!(described.stdout.contains("orders"), "{described:?}");
    assert!(described.stderr.contains("waiting for"), "{described:?}");
    // Each would wait for the request timeout otherwise, which is half a minute.
    assert!(begin.elapsed() < Duration::from_secs(50), "{:?}", begin.elapsed());

    let args = ["consume", "orders", "--group", "billing", "--follow", "--addr", dev.address()];
    let mut reading = command(&args);
    let mut child = reading.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let told = lines.next().unwrap().unwrap();
    assert!(told.starts_with("waiting for"), "{told}");
    let begin = Instant::now();
    signal(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    // A member that commits and leaves may take ten seconds.
    assert!(begin.elapsed() < Duration::from_secs(9), "{:?}", begin.elapsed());
}

#[test]
fn reads_committed_records_without_a_majority() {
    let dev = DevProcess::start(3);
    dev.ok(&HEALTHY);
    dev.ok(&["topic", "create", "orders", "--partitions", "2", "--replication-factor", "3"]);
    let lines: String = (0..100).map(|number| format!("record {number}\n")).collect();
    dev.ok_with(&["produce", "orders"], &lines);
    // The remaining node must have all records: it cannot get them later.
    until("all replicas are equal", || {
        let rows = rows(&dev, "shards");
        let applied = |row: &Value| row["applied_index"].as_u64();
        rows.iter().all(|row| {
            let mut others = rows.iter().filter(|other| other["shard_id"] == row["shard_id"]);
            applied(row).is_some() && others.all(|other| applied(other) == applied(row))
        })
    });
    let leader = dev.leader_of(1);
    let other = leader % 3 + 1;
    for victim in [leader, other] {
        dev.control(&["kill", &victim.to_string()]);
    }

    lost_majority_is_stated_soon(&dev, leader);

    let explained = dev.ok(&["explain", "NO_LEADER"]);
    assert!(explained.contains("--any-replica"), "{explained}");
    assert!(explained.contains("may still be applied"), "{explained}");
    let mut read: Vec<_> =
        dev.ok(&["consume", "orders", "--any-replica"]).lines().map(str::to_owned).collect();
    read.sort_unstable();
    let mut expected: Vec<_> = lines.lines().map(str::to_owned).collect();
    expected.sort_unstable();
    assert_eq!(read, expected);
    let from_time = ["consume", "orders", "--any-replica", "--from", "@2020-01-01", "-n", "7"];
    assert_eq!(dev.ok(&from_time).lines().count(), 7);
    assert_eq!(dev.ok(&["tail", "orders", "-n", "5", "--any-replica"]).lines().count(), 5);
    let offsets = json(&dev.ok(&["offsets", "orders", "--any-replica", "-o", "json"]));
    let ends = offsets.as_array().unwrap().iter().map(|row| row["high_watermark"].as_u64());
    assert_eq!(ends.sum::<Option<u64>>(), Some(100));
}

#[test]
fn dev_cluster_is_controlled_from_another_process() {
    let mut dev = DevProcess::start(3);
    let status = json(&dev.control(&["status", "-o", "json"]).stdout);
    let states: Vec<_> = status.as_array().unwrap().iter().map(|node| &node["state"]).collect();
    assert_eq!(states, ["running", "running", "running"]);
    assert_eq!(dev.control(&["kill", "9"]).code, 3);
    let again = dev.start_another();
    assert_ne!(again.code, 0, "{again:?}");
    assert!(again.stderr.contains("is in use"), "{again:?}");

    let stopped = dev.control(&["stop"]);
    assert_eq!(stopped.code, 0, "{stopped:?}");
    assert!(dev.wait().success());
    let gone = dev.control(&["status"]);
    assert_eq!(gone.code, 3, "{gone:?}");
    // The directory was named by the user.
    assert!(!dev.is_directory_removed());
    assert_eq!(dev.logs(), ["node-1.log", "node-2.log", "node-3.log"]);
}

#[test]
fn dev_cluster_with_tls_is_used_by_its_context_and_refuses_others() {
    let settings = tempfile::tempdir().unwrap();
    let dev = DevProcess::start_with(3, |dev| {
        dev.arg("--tls").env("XDG_CONFIG_HOME", settings.path());
    });
    let run = |args: &[&str], input: &str| {
        let mut command = command(args);
        command.env("XDG_CONFIG_HOME", settings.path());
        outcome(command, input)
    };
    let ok = |args: &[&str], input: &str| {
        let outcome = run(&[args, &["--context", "dev-tls"]].concat(), input);
        assert_eq!(outcome.code, 0, "helix {args:?}: {outcome:?}");
        outcome.stdout
    };
    ok(&HEALTHY, "");
    ok(&["topic", "create", "orders", "--partitions", "2", "--replication-factor", "3"], "");
    ok(&["produce", "orders"], "hello\n");
    assert_eq!(ok(&["consume", "orders"], ""), "hello\n");
    let contexts = json(&run(&["context", "list", "-o", "json"], "").stdout);
    assert!(contexts[0]["tls"] == true && contexts[0]["is_current"] == false, "{contexts}");
    // Clients without a certificate and without TLS are refused, and get the reason.
    let ca = dev.file("tls/ca.pem");
    for (tls, why) in [
        (vec!["--tls-ca", &ca], "requires a client certificate"),
        (Vec::new(), "the node requires TLS"),
    ] {
        // A connection may end before its request is sent, whose error is then only that.
        until(why, || {
            let refused = dev.run(&[&["topic", "list"][..], &tls[..]].concat(), "");
            assert_ne!(refused.code, 0, "{tls:?}: {refused:?}");
            refused.stderr.contains(why)
        });
    }
}

#[test]
fn transfers_leadership() {
    let dev = DevProcess::start(3);
    dev.ok(&HEALTHY);
    // The cluster moves the leadership of shard 1 back to the first node, but not away from it.
    for target in [2, 3, 1] {
        let moved = dev.transfer_leader(1, target);
        assert_eq!((&moved["shard_id"], &moved["leader"]), (&1.into(), &target.into()));
    }
    dev.ok(&HEALTHY);
    until("the first node leads", || dev.leader_of(1) == 1);

    let nowhere = dev.run(&["cluster", "transfer-leader", "--shard", "99"], "");
    assert_eq!(nowhere.code, 3, "{nowhere:?}");
    until("all nodes are reachable, and all shards have a leader", || {
        let info = json(&dev.ok(&["cluster", "info", "-o", "json"]));
        assert_eq!(info["node_count"], 3);
        info["reachable_nodes"] == 3 && info["shard_count"] == info["led_shards"]
    });
}

#[test]
fn node_is_drained_and_undrained() {
    let dev = DevProcess::start(3);
    dev.ok(&HEALTHY);
    let node = dev.leader_of(1).to_string();
    // Where the other nodes stall, the drained one may win the next election.
    let leads_no_more = (0..3).any(|_| {
        let drained = json(&dev.ok(&["cluster", "drain", &node, "-o", "json"]));
        assert_eq!(drained["draining"], true);
        dev.leader_of(1).to_string() != node
    });
    assert!(leads_no_more, "the drain does not wait until node {node} leads no shard");
    let health = dev.run(&["cluster", "health"], "");
    assert!(health.code == 1 && health.stdout.contains("DRAINING"), "{health:?}");
    dev.ok(&["cluster", "undrain", &node]);
    dev.ok(&HEALTHY);
    let moved = json(&dev.ok(&["cluster", "balance", "-o", "json"]));
    assert!(moved["shard_ids"].is_array(), "{moved}");

    let unreachable = dev.run(&["cluster", "add-node", "9", "127.0.0.1:1", "--dry-run"], "");
    assert_eq!(unreachable.code, 4, "{unreachable:?}");
    assert!(unreachable.stderr.contains("cannot be reached"), "{unreachable:?}");
    let unknown = dev.run(&["cluster", "remove-node", "9"], "");
    assert_eq!(unknown.code, 3, "{unknown:?}");
    let short = dev.run(&["cluster", "remove-node", "3", "--dry-run"], "");
    assert!(short.code == 4 && short.stderr.contains("2 of 3 replicas"), "{short:?}");
    let few = ["cluster", "remove-node", "3", "--fewer-replicas", "--dry-run"];
    let checked = dev.run(&few, "");
    assert!(checked.code == 0 && checked.stderr.contains("nothing was changed"), "{checked:?}");
}

#[test]
fn demo_kills_a_leader_and_verifies_every_record() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().to_str().unwrap();
    let demo: CommandOutput =
        helix(&["demo", "--records", "20000", "--dir", dir, "-o", "json"], "");
    assert_eq!(demo.code, 0, "{demo:?}");
    let measurements = json(&demo.stdout);
    assert_eq!(
        (&measurements["nodes"], &measurements["replication_factor"]),
        (&3.into(), &3.into())
    );
    assert_eq!(measurements["check"]["records_read"], 20_000);
    for finding in ["missing", "doubled", "changed", "out_of_order", "displaced", "gaps"] {
        assert_eq!(measurements["check"][finding], 0, "{finding}: {measurements}");
    }
    assert_eq!(measurements["durability"], "QUORUM_SYNCED");
    assert!(measurements["crash"]["partitions_led"].as_u64().unwrap() >= 1);
    // All of these few records may be in flight at the kill; then no failover is measured.
    let failover = &measurements["crash"]["failover_ms"];
    assert!(failover.is_null() || failover.as_f64().unwrap() > 0.0, "{measurements}");
    assert!(measurements["crash"]["caught_up_ms"].is_f64(), "{measurements}");
    // The data directory is removed.
    assert!(directory.path().read_dir().unwrap().next().is_none());
}
