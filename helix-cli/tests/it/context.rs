//! Tests of contexts, completions and explanations.

use std::process::Command;

use tempfile::TempDir;

use crate::harness::{CommandOutput, ServerProcess, command, helix, json, outcome};

/// Runs `helix` with its configuration below `home`, and with HELIX_ADDR if given.
fn helix_in(home: &TempDir, addr: Option<&str>, args: &[&str]) -> CommandOutput {
    let mut command = Command::new(env!("CARGO_BIN_EXE_helix"));
    command.args(args).env_remove("HELIX_ADDR").env("XDG_CONFIG_HOME", home.path());
    if let Some(addr) = addr {
        command.env("HELIX_ADDR", addr);
    }
    outcome(command, "")
}

#[test]
fn context_selects_the_cluster_with_lowest_precedence() {
    let node = ServerProcess::start();
    let home = tempfile::tempdir().unwrap();
    let run = |addr, args: &[&str]| helix_in(&home, addr, args);
    let list = ["topic", "list"];
    let nowhere = "127.0.0.1:1";

    assert_eq!(run(None, &["context", "add", "none"]).code, 2, "addresses are missing");
    let added = run(None, &["context", "add", "lab", "--addr", node.address()]);
    assert_eq!(added.code, 0, "{added:?}");
    assert_eq!(run(None, &list).code, 0, "the first context is the current one");
    assert_eq!(run(None, &["context", "add", "gone", "--addr", nowhere, "--use"]).code, 0);
    let lost = run(None, &list);
    assert_eq!(lost.code, 6, "{lost:?}");
    assert!(lost.stderr.contains("127.0.0.1:1 (context gone)"), "{lost:?}");
    assert_eq!(run(Some(node.address()), &list).code, 0, "the environment takes precedence");
    assert_eq!(run(None, &["topic", "list", "--context", "lab"]).code, 0);
    assert_eq!(run(Some(nowhere), &["topic", "list", "--addr", node.address()]).code, 0);
    assert_eq!(run(Some(node.address()), &["topic", "list", "--context", "gone"]).code, 6);

    let mut words = command(&["--", "helix", "topic", "list", "--context", "la"]);
    words.env("COMPLETE", "fish").env("XDG_CONFIG_HOME", home.path());
    assert_eq!(outcome(words, "").stdout.trim(), "lab", "contexts are completed");

    assert_eq!(run(None, &["context", "use", "-"]).code, 0);
    assert_eq!(run(None, &list).code, 0);
    let contexts = json(&run(None, &["context", "list", "-o", "json"]).stdout);
    let current: Vec<_> = contexts.as_array().unwrap().iter().map(|it| &it["is_current"]).collect();
    assert_eq!(current, [false, true], "{contexts}");
    let removed = run(None, &["context", "remove", "lab"]);
    assert_eq!(removed.code, 0);
    // The current context was removed: the program says what commands use now.
    assert!(
        removed.stderr.contains("no current context; commands use 127.0.0.1:9092"),
        "{removed:?}"
    );
    assert_eq!(run(None, &["context", "use", "lab"]).code, 3);
    assert_eq!(run(None, &["topic", "list", "--context", "lab"]).code, 3);
}

#[test]
fn explains_every_reason() {
    let list = json(&helix(&["explain", "-o", "json"], "").stdout);
    let reasons = list.as_array().unwrap();
    assert!(reasons.len() > 30, "{list}");
    for reason in reasons {
        let page = helix(&["explain", reason["reason"].as_str().unwrap()], "");
        assert_eq!(page.code, 0, "{page:?}");
        for part in ["\n  why: ", "\n  try: "] {
            assert!(page.stdout.contains(part), "{page:?}");
        }
    }
    assert_eq!(helix(&["explain", "NOTHING_OF_THE_KIND"], "").code, 3);
}

#[test]
fn prints_completions_for_shells() {
    for shell in ["bash", "zsh", "fish"] {
        let completions = helix(&["completions", shell], "");
        assert_eq!(completions.code, 0, "{completions:?}");
        // The code calls the program for each completion.
        let call = format!("COMPLETE=\"{shell}\"");
        let bare = call.replace('"', "");
        let is_call = completions.stdout.contains(&call) || completions.stdout.contains(&bare);
        assert!(is_call, "{shell}: {completions:?}");
        let server = helix(&["completions", shell, "--program", "helix-server"], "");
        assert_eq!(server.code, 0, "{server:?}");
        assert!(server.stdout.contains("helix-server"), "{shell}: {server:?}");
    }
}

#[test]
fn completes_what_the_cluster_has() {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "orders"]);
    node.ok(&["group", "seek", "billing", "orders", "--to", "earliest"]);
    let completed = |words: &[&str]| {
        let mut command = command(&[&["--", "helix"], words].concat());
        command.env("COMPLETE", "fish").env("HELIX_ADDR", node.address());
        outcome(command, "").stdout
    };
    assert!(completed(&["cluster", "transf"]).starts_with("transfer-leader"));
    assert_eq!(completed(&["consume", "ord"]).trim(), "orders");
    assert_eq!(completed(&["group", "describe", "b"]).trim(), "billing");
    assert_eq!(completed(&["explain", "no_lea"]).trim(), "NO_LEADER");
    assert_eq!(completed(&["config", "explain", "listen_a"]).trim(), "listen_addr");
    let mut server = command(&["--", "/usr/bin/helix-server", "--node-i"]);
    server.env("COMPLETE", "fish");
    assert!(outcome(server, "").stdout.starts_with("--node-id"));
}
