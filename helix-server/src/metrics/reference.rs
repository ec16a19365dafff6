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
    // Prometheus makes a sample of its own for each address that it scrapes.
    METRICS.iter().flat_map(of).chain(["up".to_owned()]).collect()
}

/// Returns the metric names in an expression: words with our prefixes, and `up`.
fn named(expression: &str) -> BTreeSet<&str> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let is_metric =
        |word: &&str| word.starts_with("helix_") || word.starts_with("process_") || *word == "up";
    words.filter(is_metric).collect()
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
    // Operators look for these after an alert.
    for metric in [
        "helix_client_connections",
        "helix_request_bytes",
        "helix_clock_offset_seconds",
        "helix_shard_damaged_ranges",
        "helix_over_quota_total",
        "helix_failed_logins_total",
        "helix_group_lost_records",
        "helix_group_unsubscribed_lag_records",
    ] {
        assert!(expressions.iter().any(|it| named(it).contains(metric)), "no panel for {metric}");
    }
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
    for key in ["- alert: ", "for: ", "summary: ", "description: ", "runbook_url: "] {
        assert_eq!(count(key), expressions.len(), "each rule has one {key:?}");
    }
}

#[test]
fn each_alert_has_its_section() {
    let rules = fs::read_to_string(path("prometheus/alerts.yml")).unwrap();
    let after = |key: &str| -> Vec<String> {
        let values = rules.lines().filter_map(|line| line.trim().strip_prefix(key));
        values.map(|value| value.trim_matches('"').to_owned()).collect()
    };
    let names = after("- alert: ");
    let links = names.iter().map(|name| format!("docs/alerts.md#{}", name.to_lowercase()));
    assert_eq!(after("runbook_url: "), links.collect::<Vec<_>>());
    let runbook = fs::read_to_string(path("alerts.md")).unwrap();
    let sections: Vec<&str> = runbook.lines().filter_map(|it| it.strip_prefix("## ")).collect();
    assert_eq!(sections, names);
}

/// Two alerts with one cause wake an operator twice.
#[test]
fn no_two_alerts_have_the_same_condition() {
    let rules = fs::read_to_string(path("prometheus/alerts.yml")).unwrap();
    let expressions = rules.lines().filter_map(|line| line.trim().strip_prefix("expr: "));
    let mut seen = BTreeSet::new();
    for expression in expressions {
        // The part after `unless` is excluded.
        let condition = expression.split(" unless ").next().unwrap_or_default();
        for part in condition.split(" or ") {
            assert!(seen.insert(part.to_owned()), "two alerts fire for {part}");
        }
    }
}
