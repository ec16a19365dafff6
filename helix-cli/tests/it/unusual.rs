//! Messages of commands about input that selects nothing, and about nodes that are not as usual.

use crate::harness::{CommandOutput, DevProcess, ServerProcess, command, isolate, json, outcome};

#[test]
fn reads_that_select_nothing_say_so() {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "orders", "--partitions", "2"]);
    node.ok_with(&["produce", "orders", "-p", "0"], "a\nb\nc\n");
    let run = |args: &[&str]| {
        let ended = node.run(args, "");
        (ended.code, ended.stdout, ended.stderr)
    };
    for (args, code, words) in [
        (&["consume", "orders", "-n", "0"][..], 2, "0"),
        (&["tail", "orders", "-n", "0"], 2, "at least 1"),
        (&["consume", "orders", "--from", "5..2"], 2, "the end 2 is before the start 5"),
        (&["consume", "orders", "--from", "5", "--until", "2"], 2, "the end 2 is before"),
        (&["consume", "orders", "--from", "99999"], 4, "beyond the end of every partition"),
        (&["consume", "orders", "-p", "1", "--from", "2"], 4, "beyond the end"),
    ] {
        let (found, stdout, stderr) = run(args);
        assert_eq!((found, stdout.as_str()), (code, ""), "{args:?}: {stderr}");
        assert!(stderr.contains(words), "{args:?}: {stderr}");
    }
    // The end of a partition is no error, and a start that only some have is not either.
    assert_eq!(run(&["consume", "orders", "-p", "0", "--from", "3"]).0, 0);
    let (code, stdout, stderr) = run(&["consume", "orders", "--from", "2"]);
    assert_eq!((code, stdout.as_str()), (0, "c\n"), "{stderr}");
    assert!(stderr.contains("partition 1: ends at 0, before offset 2"), "{stderr}");
    let (code, _, stderr) = run(&["consume", "orders", "--until", "99999"]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stderr.contains("partition 0: ends at 3, before offset 99999"), "{stderr}");
    let (_, _, stderr) = run(&["offsets", "orders", "99999"]);
    assert!(stderr.contains("partition 0: has no offset 99999, the nearest is 3"), "{stderr}");
    let (code, _, stderr) = run(&["topic", "list", "--prefix", "nothing"]);
    assert_eq!(code, 0);
    assert!(stderr.contains("no topic begins with nothing"), "{stderr}");
    let (code, _, stderr) = run(&["consume", "nothing*", "--group", "billing"]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stderr.contains("no topic matches nothing*"), "{stderr}");
}

#[test]
fn lag_of_a_group_has_partitions_without_an_offset() {
    let node = ServerProcess::start();
    node.ok_with(&["produce", "default", "-p", "0"], "a\nb\n");
    node.ok_with(&["produce", "default", "-p", "1"], "c\nd\ne\n");
    node.ok(&["group", "seek", "billing", "default", "--partitions", "0", "--to", "1"]);
    let listed = json(&node.ok(&["group", "list", "-o", "json"]));
    assert_eq!(listed[0]["total_lag"], 4, "{listed}");
}

#[test]
fn dev_nodes_get_settings_and_dead_ones_have_no_version() {
    let dev = DevProcess::start_with(3, |dev| {
        dev.args(["--set", "shards=2", "--set", "scrub-rate=1MiB"]);
    });
    let shards = json(&dev.ok(&["cluster", "shards", "-o", "json"]));
    let ids = shards.as_array().unwrap().iter().map(|row| row["shard_id"].as_u64().unwrap());
    assert_eq!(ids.max(), Some(2), "{shards}");
    assert_eq!(dev.control(&["kill", "2"]).code, 0);
    let versions = json(&dev.ok(&["version", "-o", "json"]));
    for node in versions["nodes"].as_array().unwrap() {
        let is_dead = node["node_id"] == 2;
        assert_eq!(node["version"].is_null(), is_dead, "{versions}");
    }
}

#[test]
fn dev_says_which_variables_it_does_not_pass_on() {
    let port = DevProcess::free_port(1);
    let refused = dev_with_shards(&["--port", &port, "--set", "x=1"]);
    assert_eq!(refused.code, 2, "{refused:?}");
    assert!(refused.stderr.contains("unknown setting"), "{refused:?}");
    // Its data directory is a file, so it ends at once.
    let file = tempfile::NamedTempFile::new().unwrap();
    let dir = file.path().to_str().unwrap();
    let failed = dev_with_shards(&["--port", &port, "--dir", dir]);
    assert_ne!(failed.code, 0, "{failed:?}");
    let told = "HELIX_SHARDS is not passed to the nodes; use --set shards=VALUE";
    assert!(failed.stderr.contains(told), "{failed:?}");
}

#[test]
fn dev_says_how_to_get_the_gateway_for_kafka() {
    // A copy of the program, with nothing beside it.
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("helix");
    std::fs::copy(env!("CARGO_BIN_EXE_helix"), &program).unwrap();
    let mut dev = std::process::Command::new(&program);
    dev.args(["dev", "--memory", "--kafka", "--port", &DevProcess::free_port(3)]);
    isolate(&mut dev);
    dev.env("PATH", directory.path());
    let failed = outcome(dev, "");
    assert_eq!(failed.code, 3, "{failed:?}");
    for words in
        ["the program helix-kafka is neither beside", "cargo build --release -p helix-kafka"]
    {
        assert!(failed.stderr.contains(words), "{failed:?}");
    }
}

/// Runs `helix dev` with a variable of the nodes in its environment.
fn dev_with_shards(args: &[&str]) -> CommandOutput {
    let mut dev = command(&[&["dev", "--nodes", "1"], args].concat());
    dev.env("HELIX_SHARDS", "3");
    outcome(dev, "")
}
