//! Tests of contexts, completions and explanations.

use std::io::Read;
use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;

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

/// Returns the first bytes that a client sends to a listener, until it closes the connection.
fn first_bytes(listener: &TcpListener) -> Vec<u8> {
    let (mut client, _) = listener.accept().unwrap();
    client.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut bytes = vec![0; 4 << 10];
    let length = client.read(&mut bytes).unwrap_or(0);
    bytes.truncate(length);
    bytes
}

#[test]
fn a_token_goes_out_encrypted_whichever_source_has_the_ca() {
    let home = tempfile::tempdir().unwrap();
    let made = home.path().join("made");
    let made_text = made.to_str().unwrap();
    assert_eq!(helix(&["cert", "ca", "--cluster", "c", "--dir", made_text], "").code, 0);
    let ca = made.join("ca.pem");
    let ca = ca.to_str().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let add = |name: &str, tls: &[&str]| {
        let args = [&["context", "add", name, "--addr", addr.as_str()], tls].concat();
        assert_eq!(helix_in(&home, None, &args).code, 0);
    };
    add("plain", &[]);
    add("secure", &["--tls-ca", ca]);
    let run = |args: &[&str], env: Option<&str>| {
        let mut command = command(&[args, &["whoami", "--timeout", "200ms"]].concat());
        command.env("XDG_CONFIG_HOME", home.path()).env("HELIX_TOKEN", "secret-token");
        command.env_remove("HELIX_ADDR");
        if let Some(ca) = env {
            command.env("HELIX_TLS_CA", ca);
        }
        outcome(command, "")
    };
    let addressed = ["--addr", addr.as_str()];
    for (args, env) in [
        (&["--context", "plain"][..], Some(ca)),
        (&["--context", "plain", "--tls-ca", ca], None),
        (&["--context", "secure"], None),
        (&["--context", "secure", "--addr", &addr], None),
        (&["--context", "secure"], Some("/nowhere.pem")),
        (&addressed, Some(ca)),
    ] {
        let bytes = std::thread::scope(|scope| {
            let running = scope.spawn(|| run(args, env));
            let bytes = first_bytes(&listener);
            assert_ne!(running.join().unwrap().code, 0, "{args:?}");
            // Connections of retries that were not accepted.
            listener.set_nonblocking(true).unwrap();
            while listener.accept().is_ok() {}
            listener.set_nonblocking(false).unwrap();
            bytes
        });
        assert_eq!(bytes.first(), Some(&0x16), "{args:?} {env:?}: no TLS");
    }
    // Half a setting is refused, and nothing is sent.
    for args in [&["--context", "plain", "--tls-cert", ca][..], &["--tls-server-name", "n1"]] {
        let refused = run(args, None);
        assert_eq!(refused.code, 2, "{refused:?}");
        assert!(refused.stderr.contains("TLS needs the CA of the nodes"), "{refused:?}");
    }
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
    // The cluster of the command is asked, not that of the environment.
    let other = ServerProcess::start();
    other.ok(&["topic", "create", "ordinary"]);
    let addr = other.address();
    assert_eq!(completed(&["--addr", addr, "consume", "ord"]).trim(), "ordinary");
    assert_eq!(completed(&["consume", &format!("--addr={addr}"), "ord"]).trim(), "ordinary");
    for unknown in ["--addr=$B", "--context=none", "--token-file=/nowhere", "--addr=127.0.0.1:1"] {
        assert_eq!(completed(&["consume", unknown, "ord"]).trim(), "", "{unknown}");
    }
    assert_eq!(completed(&["consume", "ord"]).trim(), "orders");
    assert_eq!(completed(&["group", "describe", "b"]).trim(), "billing");
    assert_eq!(completed(&["explain", "no_lea"]).trim(), "NO_LEADER");
    assert_eq!(completed(&["config", "explain", "listen_a"]).trim(), "listen_addr");
    let mut server = command(&["--", "/usr/bin/helix-server", "--node-i"]);
    server.env("COMPLETE", "fish");
    assert!(outcome(server, "").stdout.starts_with("--node-id"));
}
