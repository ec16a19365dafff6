//! Tests of what the program says when the cluster is in trouble: nodes that are stopped in the
//! middle of a write, removals, and outcomes that are unknown.

use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use helix_client::{Client, Config, ProducerOptions};
use helix_proto::batch;
use serde_json::Value;
use tokio::time::Instant;

use crate::harness::{CommandOutput, DevProcess, ServerProcess, command, helix, json, outcome};

/// The timeout allows for an election on a loaded machine; it usually takes a second.
const HEALTHY: [&str; 6] =
    ["cluster", "health", "--watch", "--exit-when-healthy", "--timeout", "60s"];

/// Attempts to stop the followers while the leader still accepts a write.
const ATTEMPTS_MAX: usize = 5;

/// Sends a signal to all nodes of a dev cluster but the leader of shard 1.
fn signal_followers(dev: &DevProcess, leader: u64, signal: &str) {
    let status = json(&dev.control(&["status", "-o", "json"]).stdout);
    for node in status.as_array().unwrap().iter().filter(|node| node["node_id"] != leader) {
        let pid = node["pid"].as_u64().unwrap().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }
}

fn error(output: &CommandOutput) -> Value {
    json(output.stderr.lines().last().unwrap())["error"].clone()
}

/// A producer that has appended a record, so that its next one reaches the leader at once.
struct ConnectedProducer(Child);

impl ConnectedProducer {
    fn start(dev: &DevProcess) -> Self {
        let ends = || dev.ok(&["offsets", "orders", "-o", "json"]);
        let before = ends();
        let args = ["produce", "orders", "-o", "json", "--timeout", "5s", "--addr", dev.address()];
        let mut command = command(&args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.as_mut().unwrap().write_all(b"first\n").unwrap();
        let begin = Instant::now();
        while ends() == before {
            assert!(begin.elapsed() < Duration::from_secs(60), "the first record is not appended");
        }
        Self(child)
    }

    fn finish_with(mut self, input: &str) -> CommandOutput {
        self.0.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = self.0.wait_with_output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        CommandOutput {
            code: output.status.code().unwrap(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }
}

#[test]
fn lost_majority_is_named_and_open_outcomes_are_stated() {
    let dev = DevProcess::start(3);
    dev.ok(&["topic", "create", "orders", "--partitions", "1"]);
    let mut has_open_outcome = false;
    for _ in 0..ATTEMPTS_MAX {
        dev.ok(&HEALTHY);
        let leader = dev.leader_of(1);
        let producer = ConnectedProducer::start(&dev);
        signal_followers(&dev, leader, "-STOP");
        let sent = producer.finish_with("x\n");
        let health = dev.run(&["cluster", "health"], "");
        signal_followers(&dev, leader, "-CONT");

        assert_eq!(sent.code, 6, "{sent:?}");
        let summary = json(&sent.stdout);
        let is_open = summary["may_have_applied"] == true;
        assert_eq!(summary["uncertain_records"], u64::from(is_open), "{summary}");
        assert_eq!(error(&sent)["may_have_applied"], is_open, "{sent:?}");
        if is_open {
            let hint = error(&sent)["hint"].as_str().unwrap().to_owned();
            assert!(hint.contains("--producer"), "{hint}");
        }
        assert_eq!(health.code, 1, "{health:?}");
        assert!(health.stdout.contains("either of "), "{health:?}");
        // The result is the verdict.
        assert_eq!(health.stderr, "", "{health:?}");
        has_open_outcome |= is_open;
        if has_open_outcome {
            break;
        }
    }
    dev.ok(&HEALTHY);
    let leader = dev.leader_of(1);
    for node in [1, 2, 3].into_iter().filter(|node| *node != leader) {
        dev.control(&["kill", &node.to_string()]);
    }
    // Nodes are named only if the remaining one answers within a second.
    let names_nodes = (0..3).any(|_| {
        let created = dev.run(&["topic", "create", "t", "-o", "json", "--timeout", "5s"], "");
        assert_eq!(created.code, 6, "{created:?}");
        assert_eq!(error(&created)["reason"], "NO_LEADER", "{created:?}");
        error(&created)["message"].as_str().unwrap().contains("either of ")
    });
    assert!(names_nodes, "no error names the nodes that are needed");
    assert!(has_open_outcome, "no write met a leader that had just lost its majority");
}

#[test]
fn removals_are_checked_and_confirmed() {
    let dev = DevProcess::start(3);
    dev.ok(&HEALTHY);
    let alive = dev.run(&["cluster", "remove-node", "2", "--lost", "--yes"], "");
    assert_eq!(alive.code, 4, "{alive:?}");
    assert!(
        alive.stderr.contains("node 2 answers") && alive.stderr.contains("--force"),
        "{alive:?}"
    );
    let asked = dev.run(&["cluster", "remove-node", "2"], "");
    assert_eq!(asked.code, 2, "{asked:?}");
    assert!(asked.stderr.contains("2 nodes remain") && asked.stderr.contains("--yes"), "{asked:?}");
    dev.control(&["kill", "3"]);
    let dry = dev.run(&["cluster", "remove-node", "2", "--lost", "--dry-run", "-o", "json"], "");
    assert_eq!(dry.code, 4, "{dry:?}");
    let obstacles = json(&dry.stdout)["obstacles"].to_string();
    for part in ["voters reachable", "needs --force", "2 nodes remain", "node 3 does not answer"] {
        assert!(obstacles.contains(part), "{part}: {obstacles}");
    }
    let replace = ["cluster", "replace-node", "2", "--by", "9", "--peer-addr", "127.0.0.1:1"];
    let alive = dev.run(&replace, "");
    assert_eq!(alive.code, 4, "{alive:?}");
    assert!(alive.stderr.contains("node 2 answers"), "{alive:?}");
    let dry = dev.run(&[&replace[..], &["--dry-run", "-o", "json"]].concat(), "");
    assert_eq!(dry.code, 4, "{dry:?}");
    let obstacles = json(&dry.stdout)["obstacles"].to_string();
    for part in ["cannot be reached", "voters reachable", "needs --force", "node 3 does not answer"]
    {
        assert!(obstacles.contains(part), "{part}: {obstacles}");
    }
    let nodes = json(&dev.ok(&["cluster", "nodes", "-o", "json"]));
    assert_eq!(nodes.as_array().unwrap().len(), 3, "nothing was removed");
}

#[test]
fn transfer_says_where_the_leadership_moves_back() {
    let dev = DevProcess::start(3);
    dev.ok(&HEALTHY);
    // Shard 1 prefers the first node.
    assert_eq!(dev.transfer_leader(1, 2)["moves_back_to"], 1);
    assert_eq!(dev.transfer_leader(1, 1)["moves_back_to"], Value::Null);
}

#[test]
fn named_producer_is_resumed_without_doubles() {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "orders", "--partitions", "3"]);
    let state = tempfile::tempdir().unwrap();
    let run = |args: &[&str], input: &str| {
        let args = [&["produce", "orders", "--addr", node.address()], args].concat();
        let mut command = command(&args);
        command.env("XDG_STATE_HOME", state.path());
        outcome(command, input)
    };
    let line = |line: u32| format!("{{\"key\":\"k{line}\",\"value\":\"v{line}\"}}\n");
    let lines = |count: u32| (0..count).map(line).collect::<String>();
    // Such a line ends a run.
    let cut = |count: u32| lines(count) + "no JSON\n";
    let named = ["--producer", "import", "--jsonl", "-o", "json"];
    let resume = |input: &str| run(&[&named[..], &["--resume"]].concat(), input);
    let unknown = resume("");
    assert_eq!(unknown.code, 3, "{unknown:?}");
    let failed = run(&named, &cut(20));
    assert_ne!(failed.code, 0, "{failed:?}");
    assert_eq!(json(&failed.stdout)["record_count"], 20);
    // Another input, with one other line, without the last lines, or empty.
    let changed = lines(50).replace("\"v7\"", "\"other\"");
    for other in ["{\"value\":\"d\"}\n".repeat(50), changed, lines(19), String::new()] {
        let refused = resume(&other);
        assert_eq!(refused.code, 4, "{refused:?}");
        let text = format!("{}{}", refused.stdout, refused.stderr);
        assert!(text.contains("not that of the last run"), "{refused:?}");
        assert_eq!(node.ok(&["consume", "orders"]).lines().count(), 20, "nothing is appended");
    }
    let resumed = resume(&cut(30));
    assert_ne!(resumed.code, 0, "{resumed:?}");
    let summary = json(&resumed.stdout);
    assert_eq!((&summary["resumed_records"], &summary["record_count"]), (&20.into(), &10.into()));
    let resumed = resume(&lines(50));
    assert_eq!(resumed.code, 0, "{resumed:?}");
    let summary = json(&resumed.stdout);
    assert_eq!((&summary["resumed_records"], &summary["record_count"]), (&30.into(), &20.into()));
    // A run that ended has nothing to resume, whatever the input is.
    for input in [lines(50), lines(60)] {
        let ended = resume(&input);
        assert_eq!(ended.code, 4, "{ended:?}");
        let text = format!("{}{}", ended.stdout, ended.stderr);
        assert!(text.contains("nothing to resume"), "{ended:?}");
    }
    let mut values: Vec<_> = node.ok(&["consume", "orders"]).lines().map(str::to_owned).collect();
    values.sort_unstable();
    values.dedup();
    assert_eq!(values.len(), 50);
    assert_eq!(node.ok(&["consume", "orders"]).lines().count(), 50);
    // The topic must be the one of the first run.
    assert_ne!(run(&named, &cut(1)).code, 0);
    node.ok(&["topic", "add-partitions", "orders", "--total", "4"]);
    let grown = resume(&lines(2));
    assert_eq!(grown.code, 4, "{grown:?}");
}

#[test]
fn json_output_has_json_errors() {
    let node = ServerProcess::start();
    let missing = node.run(&["consume", "nowhere", "-o", "json"], "");
    let error_of = error(&missing);
    assert_eq!(
        (&error_of["reason"], &error_of["code"]),
        (&"TOPIC_NOT_FOUND".into(), &"NOT_FOUND".into())
    );
    assert_eq!(error_of["may_have_applied"], false);
    let usage = helix(&["topic", "create", "-o", "jsonl", "--no-such-flag"], "");
    assert_eq!((usage.code, &error(&usage)["code"]), (2, &"INVALID_ARGUMENT".into()));
    let schema = json(&helix(&["topic", "list", "--schema"], "").stdout);
    let of_errors = &schema["$defs"]["error"]["properties"]["error"];
    assert!(of_errors["properties"]["may_have_applied"].is_object(), "{schema}");
}

#[test]
fn timeout_ends_a_command() {
    let node = ServerProcess::start();
    // Long enough to connect, and shorter than any other wait.
    let args = ["consume", "default", "--follow", "--timeout", "3s"];
    let ended = node.run(&args, "");
    assert_eq!(ended.code, 6, "{ended:?}");
    assert!(ended.stderr.contains("not done after 3s"), "{ended:?}");
}

/// Appends a batch with the right checksum whose second record has field number 0, which no message
/// has.
fn append_garbage(node: &ServerProcess) -> helix_client::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = Client::connect(Config::new([node.address()])).await?;
        let producer = client.producer(ProducerOptions::default());
        let payload: Vec<u8> = vec![0x0A, 0, 0x0A, 2, 0, 0];
        producer.append("orders", 0, batch::from_payload(2, payload.into())).await.map(drop)
    })
}

#[test]
fn undecodable_batch_is_rejected_or_named_and_skipped() {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "orders"]);
    node.ok_with(&["produce", "orders"], "a\n");
    // It is on already. The command waits for the protocol version from which on it counts.
    node.ok(&["topic", "alter", "orders", "--validate-records", "on"]);
    let refused = append_garbage(&node).unwrap_err();
    assert!(refused.message.contains("record 1 at byte 4"), "{refused}");

    node.ok(&["topic", "alter", "orders", "--validate-records", "off"]);
    append_garbage(&node).unwrap();
    node.ok_with(&["produce", "orders"], "b\n");
    let stopped = node.run(&["consume", "orders"], "");
    // Good records come first. Nothing is corrupt on disk.
    assert_eq!((stopped.code, stopped.stdout.as_str()), (4, "a\n"), "{stopped:?}");
    for part in ["batch at offset 1 of orders/0", "stored intact", "(UNDECODABLE_BATCH)"] {
        assert!(stopped.stderr.contains(part), "{part}: {stopped:?}");
    }
    assert!(stopped.stderr.contains("--skip-undecodable"), "{stopped:?}");
    let skipped = node.run(&["consume", "orders", "--skip-undecodable"], "");
    assert_eq!((skipped.code, skipped.stdout.as_str()), (0, "a\nb\n"), "{skipped:?}");
    assert!(skipped.stderr.contains("skipped: batch at offset 1"), "{skipped:?}");
    assert!(skipped.stderr.contains("skipped 1 batch with 2 records"), "{skipped:?}");

    let tail = ["tail", "orders"];
    let stopped = node.run(&tail, "");
    assert_eq!((stopped.code, stopped.stdout.as_str()), (4, "a\n"), "{stopped:?}");
    assert!(stopped.stderr.contains("(UNDECODABLE_BATCH)"), "{stopped:?}");
    let skipped = node.run(&[&tail[..], &["--skip-undecodable"]].concat(), "");
    assert_eq!((skipped.code, skipped.stdout.as_str()), (0, "a\nb\n"), "{skipped:?}");

    // A member of a group prints and commits what is before the batch, and then passes it.
    let read = ["consume", "orders", "--group", "billing"];
    let stopped = node.run(&read, "");
    assert_eq!((stopped.code, stopped.stdout.as_str()), (4, "a\n"), "{stopped:?}");
    assert!(stopped.stderr.contains("(UNDECODABLE_BATCH)"), "{stopped:?}");
    let stopped = node.run(&read, "");
    assert_eq!((stopped.code, stopped.stdout.as_str()), (4, ""), "{stopped:?}");
    let skipped = node.run(&[&read[..], &["--skip-undecodable"]].concat(), "");
    assert_eq!((skipped.code, skipped.stdout.as_str()), (0, "b\n"), "{skipped:?}");
    assert!(skipped.stderr.contains("skipped: batch at offset 1"), "{skipped:?}");
    assert_eq!(node.ok(&read), "", "what was skipped is committed");
}
