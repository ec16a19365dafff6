//! Tests of the inputs of `helix produce`: each writes what `helix consume` prints.

use crate::harness::{ServerProcess, json};

#[test]
fn json_lines_round_trip() {
    let node = ServerProcess::start();
    for topic in ["one", "two"] {
        node.ok(&["topic", "create", topic, "--partitions", "3"]);
    }
    node.ok_with(&["produce", "one", "-k", "k", "-H", "a=1", "-H", "b="], "hello\nyou\n");
    node.ok_with(&["produce", "one", "--base64", "-p", "2"], "/wA=\n");
    node.ok_with(&["produce", "one", "--event-time", "2026-01-31T10:00:00.25Z"], "timed\n");
    node.ok(&["produce", "one", "-k", "gone", "--tombstone"]);
    let printed = node.ok(&["consume", "one", "-o", "jsonl"]);
    assert_eq!(printed.lines().count(), 5, "{printed}");
    for part in ["\"value_base64\":\"/wA=\"", "\"value\":null", "10:00:00.250Z", "\"name\":\"b\""] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    let sent = node.ok_with(&["produce", "two", "--jsonl", "-o", "json"], &printed);
    assert_eq!(json(&sent)["record_count"], 5);
    let comparable = |text: &str| {
        let mut lines: Vec<_> = text.lines().map(json).collect();
        for line in &mut lines {
            let fields = line.as_object_mut().unwrap();
            fields.remove("topic");
            fields.remove("append_time");
        }
        lines.sort_by_key(|line| (line["partition"].as_u64(), line["offset"].as_u64()));
        lines
    };
    let copied = node.ok(&["consume", "two", "-o", "jsonl"]);
    assert_eq!(comparable(&copied), comparable(&printed));
}

#[test]
#[allow(clippy::disallowed_methods)] // Writes an input file.
fn reads_files_formats_and_pieces() {
    let node = ServerProcess::start();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("lines");
    std::fs::write(&file, "from a file\n").unwrap();
    node.ok(&["produce", "default", file.to_str().unwrap(), "-p", "0"]);
    node.ok_with(&["produce", "default", "-0", "-p", "1"], "two\nlines\0end\0");
    node.ok_with(&["produce", "default", "-f", "%p %k=%v\\n"], "2 a=x y\n3 b=z\n");
    assert_eq!(node.ok(&["consume", "default", "-p", "0"]), "from a file\n");
    assert_eq!(node.ok(&["consume", "default", "-p", "1"]), "two\nlines\nend\n");
    let printed = node.ok(&["consume", "default", "-p", "2-3", "-f", "%p %k=%v\\n"]);
    let mut lines: Vec<_> = printed.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["2 a=x y", "3 b=z"]);
    let missing = node.run(&["produce", "default", "/nowhere"], "");
    assert_eq!(missing.code, 1, "{missing:?}");
    let invalid = node.run(&["produce", "default", "--jsonl"], "{}\n");
    assert_eq!(invalid.code, 2, "{invalid:?}");
    assert!(
        invalid.stderr.contains("line 1") && invalid.stderr.contains("no value"),
        "{invalid:?}"
    );
}
