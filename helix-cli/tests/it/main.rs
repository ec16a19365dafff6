//! End-to-end tests of the program with real nodes and processes.
//! Unit tests of the commands are next to their code.

#![allow(clippy::unwrap_used)] // Clippy does not treat test helpers as tests.

mod backup;
mod bundle;
mod cheat;
mod closed_output;
mod cluster;
mod consume_group;
mod context;
mod damaged;
mod groups;
mod harness;
mod interrupt;
mod many_partitions;
mod output;
mod produce_inputs;
mod recreated;
mod rights;
mod terminal;
mod truth;
mod unusual;
mod wal;

use harness::{DevProcess, ServerProcess, helix, json};

#[test]
fn create_produce_consume_trim_and_delete() {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "orders", "--partitions", "4"]);
    assert_eq!(node.ok_with(&["produce", "orders", "-p", "0"], "hello\n"), "");
    assert_eq!(node.ok(&["consume", "orders", "--from", "earliest"]), "hello\n");
    assert_eq!(node.ok(&["consume", "orders", "--from", "latest"]), "");

    let sent = node.ok_with(&["produce", "orders", "-o", "json", "-p", "2"], "a\nb\n\nc");
    let sent = json(&sent);
    assert_eq!(sent["record_count"], 4);
    assert_eq!(sent["partitions"][0]["partition"], 2);
    assert_eq!(sent["partitions"][0]["next_offset"], 4);
    assert_eq!(node.ok(&["consume", "orders", "-p", "2", "--from", "-3"]), "b\n\nc\n");
    assert_eq!(node.ok(&["consume", "orders", "-p", "2", "--until", "2"]), "a\nb\n");
    assert_eq!(node.ok(&["consume", "orders", "-p", "2", "-n", "1"]), "a\n");
    assert_eq!(node.ok(&["consume", "orders", "-p", "2", "--from", "@2020-01-01", "-n1"]), "a\n");
    assert_eq!(node.ok(&["tail", "orders", "-n", "2"]), "\nc\n");

    let offsets = json(&node.ok(&["offsets", "orders", "-o", "json"]));
    let ends: Vec<_> =
        offsets.as_array().unwrap().iter().map(|row| &row["high_watermark"]).collect();
    assert_eq!(ends, [1, 0, 4, 0]);

    // Nothing is deleted where the offset does not exist in one of the partitions.
    for to in ["5", "10000", "+5"] {
        let refused = node.run(&["topic", "trim", "orders", "--to", to, "--yes"], "");
        assert_eq!(refused.code, 4, "{refused:?}");
        assert!(refused.stderr.contains("(OFFSET_OUT_OF_RANGE)"), "{refused:?}");
    }
    let refused = node.run(&["topic", "trim", "orders", "-p", "2", "--to", "5", "--yes"], "");
    assert!(refused.stderr.contains("offset 5 is out of range 0..4"), "{refused:?}");
    assert_eq!(node.ok(&["consume", "orders", "-p", "2", "-n", "1"]), "a\n");

    node.ok(&["topic", "trim", "orders", "-p", "2", "--to", "3", "--yes"]);
    assert_eq!(node.ok(&["consume", "orders", "-p", "2"]), "c\n");
    let topic = json(&node.ok(&["topic", "describe", "orders", "-o", "json"]));
    assert_eq!(topic["partitions"][2]["watermarks"]["log_start_offset"], 3);

    let listed = node.ok(&["topic", "list"]);
    assert!(listed.starts_with("NAME") && listed.contains("\norders"), "{listed}");
    node.ok(&["topic", "delete", "orders", "--yes"]);
    assert!(!node.ok(&["topic", "list"]).contains("orders"));
}

#[test]
fn commands_dial_a_unix_socket() {
    let directory = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", directory.path().join("helix.sock").display());
    let options = ["--storage", "memory", "--listen-socket", &socket];
    let node = ServerProcess::start_with(&options);
    let ok = |args: &[&str], input: &str| {
        let outcome = helix(&[args, &["--addr", &socket]].concat(), input);
        assert_eq!(outcome.code, 0, "helix {args:?}: {outcome:?}");
        outcome.stdout
    };
    ok(&["produce", "default", "-p", "0"], "hello\n");
    assert_eq!(ok(&["consume", "default", "-p", "0", "--from", "earliest"], ""), "hello\n");
    ok(&["cluster", "health"], "");
    let checked = ok(&["check"], "");
    assert!(checked.contains(&format!("answers at {socket}")), "{checked}");
    drop(node);
    let gone = helix(&["topic", "list", "--addr", &socket], "");
    assert_ne!(gone.code, 0, "{gone:?}");
    assert!(gone.stderr.contains(&socket), "{gone:?}");
    let relative = helix(&["topic", "list", "--addr", "unix:helix.sock"], "");
    assert_eq!(relative.code, 2, "{relative:?}");
    assert!(relative.stderr.contains("the path must be absolute"), "{relative:?}");
}

#[test]
fn fencing_token_is_set_and_replaced_by_its_holder() {
    let node = ServerProcess::start();
    node.ok_with(&["produce", "default", "-p", "1"], "x\n");
    let fence = ["topic", "fence", "default", "1", "-o", "json", "--token"];
    let fenced = json(&node.ok(&[&fence[..], &["one", "--expect", ""]].concat()));
    assert_eq!((&fenced["partition"], &fenced["fencing_token"]), (&1.into(), &"one".into()));
    assert_eq!(fenced["watermarks"]["high_watermark"], 1);
    let described = || {
        let topic = json(&node.ok(&["topic", "describe", "default", "-o", "json"]));
        [0, 1].map(|partition: usize| topic["partitions"][partition]["fencing_token"].clone())
    };
    assert_eq!(described(), [serde_json::Value::Null, "one".into()]);
    let refused = node.run(&[&fence[..], &["two", "--expect", ""]].concat(), "");
    assert_eq!(refused.code, 4, "{refused:?}");
    let error = &json(&refused.stderr)["error"];
    assert_eq!(error["reason"], "FENCED", "{refused:?}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("the current fencing token is \"one\""), "{refused:?}");
    node.ok(&[&fence[..], &["", "--expect", "one"]].concat());
    assert_eq!(described(), [serde_json::Value::Null, serde_json::Value::Null]);
    // Without --expect, any current token is replaced.
    node.ok(&[&fence[..], &["three"]].concat());
}

#[test]
fn keys_select_the_partition_and_are_returned() {
    let node = ServerProcess::start();
    let lines = "customer-7:first\ncustomer-7:second\nno key\n";
    node.ok_with(&["produce", "default", "--key-separator", ":"], lines);
    let records = node.ok(&["consume", "default", "-o", "json"]);
    let records: Vec<_> = records.lines().map(json).collect();
    let keyed: Vec<_> = records.iter().filter(|record| record["key"] == "customer-7").collect();
    assert_eq!(keyed.len(), 2);
    // python3: zlib.crc32(b"customer-7") % 4
    assert!(keyed.iter().all(|record| record["partition"] == 0), "{keyed:?}");
    assert_eq!((&keyed[0]["value"], &keyed[1]["value"]), (&"first".into(), &"second".into()));
    assert!(records.iter().any(|record| record["key"].is_null() && record["value"] == "no key"));
}

#[test]
fn rejected_line_is_reported_and_later_lines_are_not_sent() {
    let node = ServerProcess::start();
    let lines = format!("a\nb\n{}\nc\n", "x".repeat(3 << 20));
    let args = ["produce", "default", "-p", "0", "-o", "json"];
    let refused = node.run(&args, &lines);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.stderr.contains("line 3: "), "{refused:?}");
    let sent = json(&refused.stdout);
    assert_eq!((&sent["record_count"], &sent["failed_line"]), (&2.into(), &3.into()));
    assert_eq!(sent["acked_behind"], 0);
    assert_eq!(node.ok(&["consume", "default"]), "a\nb\n");
}

#[test]
fn settings_are_changed_and_reset() {
    let node = ServerProcess::start();
    let alter = |setting: [&str; 2]| {
        let args = ["topic", "alter", "default", setting[0], setting[1], "-o", "json"];
        json(&node.ok(&args))["config"].clone()
    };
    assert_eq!(alter(["--retention-time", "12h"])["retention_time"], "43200s");
    assert_eq!(alter(["--retention-bytes", "1MiB"])["retention_bytes"], 1 << 20);
    let config = alter(["--retention-time", "default"]);
    assert!(config["retention_time"].is_null());
    assert_eq!(config["retention_bytes"], 1 << 20);
}

#[test]
fn errors_state_action_cause_and_hint() {
    let node = ServerProcess::start();
    let failed = node.run(&["consume", "nowhere"], "");
    assert_eq!(failed.code, 3, "{failed:?}");
    assert!(failed.stderr.contains("(TOPIC_NOT_FOUND)"), "{failed:?}");
    assert!(failed.stderr.contains("\n  why: "), "{failed:?}");
    assert!(failed.stderr.contains("\n  try: helix topic list"), "{failed:?}");
    assert_eq!(failed.stdout, "");

    assert_eq!(node.run(&["produce", "default", "-p", "9"], "x\n").code, 3);
    assert_eq!(node.run(&["topic", "create", "default", "--partitions", "9"], "").code, 4);
    assert_eq!(node.run(&["topic", "create", "no/name"], "").code, 2);
    assert_eq!(node.run(&["topic", "alter", "default"], "").code, 2);
    node.ok_with(&["produce", "default"], "x\n");
    let refused = node.run(&["topic", "delete", "default"], "");
    assert_eq!(refused.code, 2, "{refused:?}");
    assert!(refused.stderr.contains("--yes"), "{refused:?}");

    for args in [
        &["cluster", "health"][..],
        &["cluster", "nodes"],
        &["cluster", "transfer-leader", "--shard", "1"],
    ] {
        let lost = helix(&[args, &["--addr", "127.0.0.1:1"]].concat(), "");
        assert_eq!(lost.code, 6, "{lost:?}");
        let is_health = args.contains(&"health");
        assert_eq!(lost.stderr.contains("helix cluster health"), !is_health, "{lost:?}");
    }
    let lost = helix(&["topic", "list", "--addr", "127.0.0.1:1"], "");
    assert_eq!(lost.code, 6, "{lost:?}");
    assert!(lost.stderr.contains("helix cluster health"), "{lost:?}");
    assert_eq!(helix(&["nonsense"], "").code, 2);
    assert_eq!(helix(&["version", "--addr", "127.0.0.1:1"], "").code, 0);
}

#[test]
fn single_node_is_a_healthy_cluster() {
    let node = ServerProcess::start();
    let health = node.ok(&["cluster", "health", "--watch", "--exit-when-healthy"]);
    assert!(health.contains("Z healthy: "), "{health}");
    let nodes = json(&node.ok(&["cluster", "nodes", "-o", "json"]));
    assert_eq!((&nodes[0]["node_id"], &nodes[0]["storage"]), (&1.into(), &"memory".into()));
    let info = json(&node.ok(&["cluster", "info", "-o", "json"]));
    assert_eq!((&info["node_count"], &info["partition_count"]), (&1.into(), &4.into()));
    let shards = json(&node.ok(&["cluster", "shards", "-o", "json"]));
    assert!(shards.as_array().unwrap().iter().all(|row| row["role"] == "leader"), "{shards}");
}

#[test]
fn dev_node_is_killed_and_restarted() {
    let dev = DevProcess::start(1);
    dev.ok(&["topic", "create", "orders"]);
    dev.ok_with(&["produce", "orders"], "kept\n");
    let killed = dev.control(&["kill", "1"]);
    assert!(killed.stdout.contains("stopped"), "{killed:?}");
    assert_eq!(dev.run(&["cluster", "health"], "").code, 6);
    assert_eq!(dev.control(&["restart", "1"]).code, 0);
    assert_eq!(dev.ok(&["consume", "orders"]), "kept\n");
}

#[test]
fn node_stops_when_stdin_closes() {
    let node = ServerProcess::start();
    assert!(node.end_by_closing_stdin().success());
}

#[test]
fn demo_verifies_every_record() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().to_str().unwrap();
    let args = ["demo", "--nodes", "1", "--records", "20000", "--dir", dir, "-o", "json"];
    let demo = helix(&args, "");
    assert_eq!(demo.code, 0, "{demo:?}");
    let measurements = json(&demo.stdout);
    assert_eq!(measurements["check"]["records_read"], 20_000);
    assert_eq!(measurements["check"]["missing"], 0);
    assert_eq!(measurements["durability"], "QUORUM_SYNCED");
    assert!(measurements["crash"]["acked_records"].as_u64().unwrap() >= 10_000);
    // The data directory is removed.
    assert!(directory.path().read_dir().unwrap().next().is_none());
}
