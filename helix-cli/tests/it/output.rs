//! Tests of the output formats, and of JSON results against their schemas.

use serde_json::Value;

use crate::harness::{DevProcess, ServerProcess, helix, json};

/// Returns the violations of a schema by a value. Supports only the keywords in use.
fn violations(value: &Value, schema: &Value, path: &str) -> Vec<String> {
    if let Some(forms) = schema["anyOf"].as_array() {
        let fits = |form: &Value| violations(value, form, path).is_empty();
        let none = || vec![format!("{path} matches no form: {value}")];
        return if forms.iter().any(fits) { Vec::new() } else { none() };
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        Value::Array(all) => all.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let is_number = kind == "integer" && types.contains(&"number");
    if !types.is_empty() && !types.contains(&kind) && !is_number {
        return vec![format!("{path} is {kind}, not {types:?}")];
    }
    let mut all = Vec::new();
    for (index, item) in value.as_array().into_iter().flatten().enumerate() {
        all.extend(violations(item, &schema["items"], &format!("{path}[{index}]")));
    }
    if let Value::Object(fields) = value {
        for (name, field) in fields {
            match schema["properties"].get(name) {
                Some(schema) => all.extend(violations(field, schema, &format!("{path}.{name}"))),
                None => all.push(format!("{path}.{name} is not in the schema")),
            }
        }
        for name in schema["required"].as_array().into_iter().flatten() {
            if !fields.contains_key(name.as_str().unwrap()) {
                all.push(format!("{path}.{name} is missing"));
            }
        }
    }
    all
}

fn schema(words: &[&str]) -> Value {
    let printed = helix(&[words, &["--schema"]].concat(), "");
    assert_eq!(printed.code, 0, "{printed:?}");
    json(&printed.stdout)
}

/// Checks the JSON and JSON Lines output of a command against its schema.
fn check_schema(words: &[&str], json_text: &str, jsonl_text: &str) {
    let schema = schema(words);
    let value = json(json_text);
    assert_eq!(violations(&value, &schema, "$"), Vec::<String>::new(), "{words:?}: {value:#}");
    let item = if value.is_array() { &schema["items"] } else { &schema };
    for line in jsonl_text.lines() {
        assert_eq!(violations(&json(line), item, "$"), Vec::<String>::new(), "{words:?}: {line}");
    }
}

#[test]
fn json_results_match_their_schemas() {
    let dev = DevProcess::start(3);
    dev.ok(&["cluster", "health", "--watch", "--exit-when-healthy", "--timeout", "60s"]);
    let records = "k:v\nno key\n:\n";
    for (words, rest, input) in [
        (&["topic", "create"][..], &["orders", "--partitions", "2"][..], ""),
        (&["topic", "alter"], &["orders", "--retention-bytes", "1GiB"], ""),
        (&["topic", "add-partitions"], &["orders", "--total", "3"], ""),
        (&["produce"], &["orders", "--key-separator", ":"], records),
        (&["topic", "list"], &[], ""),
        (&["group", "seek"], &["billing", "orders", "--to", "earliest"], ""),
        (&["group", "reset"], &["billing", "--to", "latest"], ""),
        (&["group", "list"], &[], ""),
        (&["group", "describe"], &["billing"], ""),
        (&["group", "explain"], &["billing"], ""),
        (&["group", "history"], &["billing"], ""),
        (&["topic", "describe"], &["orders"], ""),
        (&["offsets"], &["orders", "@-1h"], ""),
        (&["trace", "append"], &["orders"], ""),
        (&["cluster", "info"], &[], ""),
        (&["cluster", "health"], &[], ""),
        (&["cluster", "nodes"], &[], ""),
        (&["cluster", "shards"], &[], ""),
        (&["cluster", "transfer-leader"], &["--shard", "1", "--to", "2"], ""),
        (&["topic", "fence"], &["orders", "0", "--token", "writer-2"], ""),
        (&["topic", "trim"], &["orders", "--to", "earliest"], ""),
        (&["check"], &[], ""),
        (&["explain"], &[], ""),
        (&["version"], &[], ""),
    ] {
        let run = |format| {
            // An election may make some nodes lag for a moment.
            let run = dev.run(&[words, rest, &["-o", format]].concat(), input);
            assert!(run.code == 0 || (run.code == 1 && !run.stdout.is_empty()), "{run:?}");
            run.stdout
        };
        let (one, many) = (run("json"), run("jsonl"));
        check_schema(words, &one, &many);
        for format in ["table", "wide"] {
            assert!(!run(format).contains('{') || words == ["explain"], "{words:?}");
        }
    }
    let lines = dev.ok(&["consume", "orders", "-o", "json"]);
    assert!(lines.lines().count() >= 3, "{lines}");
    for line in lines.lines() {
        check_schema(&["consume"], line, "");
    }
    let status = |format| dev.control(&["status", "-o", format]).stdout;
    check_schema(&["dev", "status"], &status("json"), &status("jsonl"));
}

#[test]
fn a_traced_append_is_a_chart_of_its_stages() {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "orders"]);
    let chart = node.ok(&["trace", "append", "orders", "--key", "k", "--value", "v"]);
    assert!(chart.starts_with("appended to orders/0 at offset 0, "), "{chart}");
    for stage in ["queue", "quorum", "apply", "wake-up"] {
        let line = chart.lines().find(|line| line.trim_start().starts_with(stage));
        let line = line.unwrap_or_else(|| panic!("no stage {stage}: {chart}"));
        assert!(line.contains(['#', '|']), "{line}");
    }
    let traced = json(&node.ok(&["trace", "append", "orders", "-o", "json"]));
    assert_eq!((&traced["offset"], &traced["partition"]), (&1.into(), &0.into()));
    assert_eq!(traced["stages"][0]["stage"], "QUEUE");
    let records = node.ok(&["consume", "orders", "-f", "%k=%v\\n"]);
    assert_eq!(records, "k=v\n=trace\n", "the records stay in the topic");
    let missing = helix(&["trace", "append", "none", "--addr", node.address()], "");
    assert_eq!(missing.code, 3, "{missing:?}");
}

#[test]
fn wide_adds_columns_and_jsonl_prints_a_line_per_element() {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "other"]);
    let heading = |format| {
        let text = node.ok(&["topic", "list", "-o", format]);
        text.lines().next().unwrap().to_owned()
    };
    let (table, wide) = (heading("table"), heading("wide"));
    assert!(!table.contains("MIN DURABILITY") && wide.contains("MIN DURABILITY"), "{wide}");
    assert_eq!(node.ok(&["topic", "list", "-o", "jsonl"]).lines().count(), 2);
}

#[test]
fn records_are_printed_in_the_requested_format() {
    let node = ServerProcess::start();
    let sent = ["produce", "default", "-p", "1", "--key-separator", ":"];
    node.ok_with(&sent, "k1:v1\nv2\n");
    let form = ["consume", "default", "-f", "%T/%p@%o %k=%v{json} %V\\n"];
    assert_eq!(node.ok(&form), "default/1@0 k1=\"v1\" 2\ndefault/1@1 =\"v2\" 2\n");
    assert_eq!(node.ok(&["tail", "default", "-n", "1", "-f", "%v;"]), "v2;");
    let wide = node.ok(&["consume", "default", "-o", "wide"]);
    let cells: Vec<_> = wide.lines().next().unwrap().split('\t').collect();
    assert_eq!((cells[0], cells[1], cells[3], cells[4]), ("1", "0", "k1", "v1"));
    assert_eq!(node.ok(&["consume", "default", "--from", "1..2", "-p", "1"]), "v2\n");
    assert_eq!(node.ok(&["consume", "default", "--from", "+1", "-p", "1"]), "v2\n");
    assert_eq!(node.ok(&["consume", "default", "--from", "..-1", "-p", "1"]), "v1\n");
    let both = node.run(&["consume", "default", "-o", "json", "-f", "%o"], "");
    assert_eq!(both.code, 2, "{both:?}");
}

#[test]
fn schema_needs_no_cluster_and_no_arguments() {
    let topic = schema(&["topic", "describe"]);
    assert_eq!(topic["properties"]["partitions"]["type"], "array");
    assert_eq!(helix(&["server", "--schema"], "").code, 2);
    assert_eq!(helix(&["nonsense", "--schema"], "").code, 2);
}
