//! Checks results against the schemas that the program prints.

use serde_json::Value;

use crate::helix_bench;

/// Checks a result against the schema of its mode.
pub(crate) fn check(result: &Value) {
    let mode = result["mode"].as_str().unwrap();
    let printed = helix_bench(&["schema", mode]);
    assert!(printed.status.success(), "{printed:?}");
    let schema: Value = serde_json::from_slice(&printed.stdout).unwrap();
    assert_eq!(violations(result, &schema, "$"), [""; 0], "{mode}: {result:#}");
}

/// Returns the violations of a schema by a value. Supports only the keywords in use.
fn violations(value: &Value, schema: &Value, path: &str) -> Vec<String> {
    if let Some(forms) = schema["anyOf"].as_array() {
        let is_one = forms.iter().any(|form| violations(value, form, path).is_empty());
        return if is_one { Vec::new() } else { vec![format!("{path} matches no form: {value}")] };
    }
    let is_of = |name: &str| match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        _ => value.is_object(),
    };
    let has_type = match &schema["type"] {
        Value::String(name) => is_of(name),
        Value::Array(names) => names.iter().filter_map(Value::as_str).any(is_of),
        _ => true,
    };
    let mut all = Vec::new();
    if !has_type {
        all.push(format!("{path} is not of type {}", schema["type"]));
    }
    for (index, item) in value.as_array().into_iter().flatten().enumerate() {
        all.extend(violations(item, &schema["items"], &format!("{path}[{index}]")));
    }
    for (name, field) in value.as_object().into_iter().flatten() {
        let known = schema["properties"].get(name).or_else(|| schema.get("additionalProperties"));
        match known {
            Some(schema) => all.extend(violations(field, schema, &format!("{path}.{name}"))),
            None => all.push(format!("{path}.{name} is not in the schema")),
        }
    }
    for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if value.is_object() && value.get(name).is_none() {
            all.push(format!("{path}.{name} is missing"));
        }
    }
    all
}

#[test]
fn schemas_describe_every_field() {
    let single = ["load", "limit", "perf", "wal", "compare"];
    let several = ["pubsub", "sequencer", "connections", "group", "compaction"];
    for mode in single.into_iter().chain(several) {
        let printed = helix_bench(&["schema", mode]);
        let schema: Value = serde_json::from_slice(&printed.stdout).unwrap();
        for name in ["schema", "mode", "command", "interrupted", "client_version", "machine"] {
            assert!(schema["properties"].get(name).is_some(), "{mode} has no {name}");
        }
        let wrong = serde_json::json!({ "mode": mode, "other": 1 });
        let found = violations(&wrong, &schema, "$");
        assert!(found.iter().any(|text| text.contains("$.other is not")), "{found:?}");
        assert!(found.iter().any(|text| text.contains("$.command is missing")), "{found:?}");
    }
}
