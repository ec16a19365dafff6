//! Checks the table in docs/metrics.md, the dashboard and the alert rules against the catalog.
//! `HELIX_BLESS=1 cargo test -p helix-server --lib reference` updates the table.

// Reads the documentation.
#![allow(clippy::disallowed_methods)]

use std::collections::BTreeSet;
use std::fs;

use super::{METRICS, Metric, MetricKind};
use crate::doc_tables::{expect_table, path};

#[test]
fn docs_table_lists_every_metric() {
    let row = |Metric { name, kind, labels, help }: &Metric| {
        format!("| `{name}` | {} | {} | {help} |\n", labels.join(", "), kind.as_str())
    };
    let head = "| metric | labels | kind | |\n|---|---|---|---|\n";
    expect_table("metrics.md", "metrics", head, METRICS.iter().map(row));
}

/// Returns every sample name that a page can have.
fn samples() -> BTreeSet<String> {
    let of = |metric: &Metric| match metric.kind {
        MetricKind::Histogram => {
            ["_bucket", "_sum", "_count"].map(|suffix| format!("{}{suffix}", metric.name)).to_vec()
        }
        MetricKind::Counter | MetricKind::Gauge => vec![metric.name.to_owned()],
    };
    METRICS.iter().flat_map(of).collect()
}

/// Returns the metric names in an expression: words with our prefixes.
fn named(expression: &str) -> BTreeSet<&str> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("helix_") || word.starts_with("process_")).collect()
}

/// Checks that each expression names metrics, and only known ones.
fn check(place: &str, expressions: &[String]) {
    let known = samples();
    assert!(expressions.len() > 10, "{place}: the expressions were not found");
    for expression in expressions {
        let names = named(expression);
        assert!(!names.is_empty(), "{place}: no Helix metric in {expression}");
        for name in names {
            assert!(known.contains(name), "{place}: unknown metric {name} in {expression}");
        }
    }
}

/// Collects the texts under a key, anywhere in a JSON document.
fn texts(document: &serde_json::Value, key: &str, found: &mut Vec<String>) {
    match document {
        serde_json::Value::Object(members) => {
            for (name, value) in members {
                match value.as_str() {
                    Some(text) if name == key => found.push(text.to_owned()),
                    _ => texts(value, key, found),
                }
            }
        }
        serde_json::Value::Array(elements) => {
            elements.iter().for_each(|element| texts(element, key, found));
        }
        _ => {}
    }
}

#[test]
fn dashboard_uses_known_metrics() {
    let dashboard = fs::read_to_string(path("grafana/helix.json")).unwrap();
    let dashboard: serde_json::Value = serde_json::from_str(&dashboard).unwrap();
    let mut expressions = Vec::new();
    texts(&dashboard, "expr", &mut expressions);
    check("the dashboard", &expressions);
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "panel ids are unique");
}

#[test]
fn alert_rules_use_known_metrics() {
    let rules = fs::read_to_string(path("prometheus/alerts.yml")).unwrap();
    // The file has one line per expression, so that no YAML parser is needed.
    let expression = |line: &str| line.trim().strip_prefix("expr: ").map(str::to_owned);
    let expressions: Vec<_> = rules.lines().filter_map(expression).collect();
    check("the alert rules", &expressions);
    let count = |key: &str| rules.lines().filter(|line| line.trim().starts_with(key)).count();
    for key in ["- alert: ", "for: ", "summary: ", "description: "] {
        assert_eq!(count(key), expressions.len(), "each rule has one {key:?}");
    }
}
