//! `helix debug bundle`: what the archive has, and what it hides.

#![allow(clippy::disallowed_methods)] // The test writes and reads files.

use std::fs;

use crate::harness::{ServerProcess, json};

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

#[test]
fn bundle_has_the_state_of_cluster_and_machine_without_secrets() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (archive, settings, log, data) =
        (path("b.tar"), path("server.toml"), path("node.log"), path("data"));
    fs::write(&settings, "node_id = 1\nadmin_token_file = \"/hunter2\"\n").unwrap();
    fs::write(&log, "the first line\nthe last line\n").unwrap();
    let stopped = ServerProcess::start_in(&directory.path().join("data"));
    stopped.ok_with(&["produce", "default"], "zebra\n");
    assert!(stopped.end_by_closing_stdin().success());

    let node = ServerProcess::start();
    let args = ["debug", "bundle", &archive, "--config", &settings, "--log", &log];
    let more = ["--data-dir", &data, "-o", "json"];
    let report = json(&node.ok(&[&args[..], &more].concat()));
    assert_eq!(report["missing_parts"], serde_json::json!([]), "{report}");
    let files: Vec<_> = report["files"].as_array().unwrap().iter().collect();
    for file in ["versions.txt", "nodes.json", "shards.json", "health.json", "server.toml"] {
        assert!(files.iter().any(|it| *it == file), "{file}: {report}");
    }
    for file in ["topics.json", "groups.json"] {
        assert!(files.iter().any(|it| *it == file), "{file}: {report}");
    }
    assert!(files.iter().any(|it| *it == "wal.json"), "{report}");
    let bytes = fs::read(&archive).unwrap();
    assert!(contains(&bytes, "the last line") && contains(&bytes, "node_id = 1"));
    assert!(!contains(&bytes, "hunter2"), "a value that may be secret is in the archive");
    assert!(!contains(&bytes, "zebra"), "a record is in the archive");

    // An archive that exists is replaced only on request.
    let refused = node.run(&["debug", "bundle", &archive], "");
    assert_eq!(refused.code, 4, "{refused:?}");
    assert!(refused.stderr.contains("--force"), "{refused:?}");
    assert_eq!(fs::read(&archive).unwrap(), bytes);

    // Parts that cannot be had do not prevent the others.
    let args = ["debug", "bundle", &archive, "--force", "--admin-addr", "127.0.0.1:1"];
    let partly = node.run(&args, "");
    assert_eq!(partly.code, 5, "{partly:?}");
    assert!(partly.stderr.contains("metrics-"), "{partly:?}");
}
