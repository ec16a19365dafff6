//! Errors of commands whose caller lacks a right.

use crate::harness::{CommandOutput, ServerProcess, command, outcome};

/// A node that checks the rights of callers with a token, and the token of a caller.
fn node_with_caller(rules: &[&str]) -> (ServerProcess, String) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("admin-token");
    let options = ["--storage", "memory", "--auth", "optional", "--admin-token-file"];
    let node = ServerProcess::start_with(&[&options[..], &[file.to_str().unwrap()]].concat());
    node.ok(&["topic", "create", "orders"]);
    let token = node.ok(&[&["token", "create", "bob", "-q"], rules].concat());
    (node, token.trim().to_owned())
}

fn run_as(node: &ServerProcess, token: &str, args: &[&str], input: &str) -> CommandOutput {
    let mut command = command(args);
    command.env("HELIX_ADDR", node.address()).env("HELIX_TOKEN", token);
    outcome(command, input)
}

#[test]
fn a_missing_right_is_not_a_dead_node() {
    let (node, token) = node_with_caller(&["--allow", "topic:orders=read"]);
    let run = |args: &[&str], input: &str| run_as(&node, &token, args, input);
    for args in [
        &["cluster", "health"][..],
        &["cluster", "info"],
        &["cluster", "nodes"],
        &["cluster", "shards"],
        &["check"],
    ] {
        let refused = run(args, "");
        assert_eq!(refused.code, 1, "{args:?}: {refused:?}");
        for part in ["PERMISSION_DENIED", "may not describe cluster"] {
            assert!(refused.stderr.contains(part), "{args:?}: {refused:?}");
        }
        let all = format!("{}{}", refused.stdout, refused.stderr);
        assert!(!all.contains("NODE_DOWN") && !all.contains("reach"), "{args:?}: {refused:?}");
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("bundle.tar");
    let bundle = run(&["debug", "bundle", file.to_str().unwrap()], "");
    assert_eq!(bundle.code, 5, "{bundle:?}");
    assert!(bundle.stderr.contains("may not describe cluster"), "{bundle:?}");
    let produced = run(&["produce", "orders"], "a\n");
    assert_eq!(produced.code, 1, "{produced:?}");
    assert!(produced.stderr.contains("PERMISSION_DENIED"), "{produced:?}");
    assert!(produced.stderr.contains("topic orders"), "{produced:?}");
    assert_eq!(run(&["version"], "").code, 0);
    // With the right, the same commands work.
    node.ok(&["acl", "allow", "bob", "cluster=describe"]);
    assert_eq!(run(&["cluster", "health"], "").code, 0);
}

#[test]
fn rules_that_can_match_nothing_are_refused_and_rights_that_remain_are_named() {
    let (node, _) = node_with_caller(&[]);
    for args in [
        &["acl", "allow", "bob", "topic:a/b=read"][..],
        &["acl", "allow", "bob*", "topic:a=read"],
        &["token", "create", "bob", "--allow", "group:a b=read"],
        &["token", "create", "bob*"],
        &["token", "create", "bob", "--expires", "99999999999999d"],
        &["quota", "set", "bob*", "--requests", "5"],
    ] {
        let refused = node.run(args, "");
        assert_eq!(refused.code, 2, "{args:?}: {refused:?}");
    }
    node.ok(&["acl", "allow", "bob", "topic:orders=read", "topic:ord*=read"]);
    let removed = node.run(&["acl", "remove", "bob", "topic:orders=read", "-q"], "");
    assert_eq!(removed.code, 0, "{removed:?}");
    let left = "still has topic:orders=read, by the rule topic:ord*=read";
    assert!(removed.stderr.contains(left), "{removed:?}");
    let removed = node.run(&["acl", "remove", "bob", "topic:ord*=read"], "");
    assert!(!removed.stderr.contains("still has"), "{removed:?}");
}
