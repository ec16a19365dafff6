//! Tables of a result of the sequencer.

use serde_json::Value;

use super::{ResultTable, bytes, count, ms, rows, table, text};
use crate::format::known;

const LATENCY_COLUMNS: [&str; 11] = [
    "one in flight",
    "durability",
    "mean us",
    "min",
    "p50",
    "p99",
    "max",
    "of the echo",
    "ack p50",
    "lost",
    "doubled",
];
const STEP_COLUMNS: [&str; 4] = ["one in flight", "lowest %", "mean us", "max"];
const THROUGHPUT_COLUMNS: [&str; 11] = [
    "all publish",
    "message",
    "batch",
    "messages/s",
    "of each node",
    "durability",
    "p50 ms",
    "p99",
    "lost",
    "doubled",
    "order",
];
const CHECK_COLUMNS: [&str; 3] = ["check", "outcome", "detail"];

/// Returns the tables of the parts that were run.
pub(super) fn parts(result: &Value) -> Vec<ResultTable> {
    let us = |value: &Value| known(value.as_f64(), 1);
    // The first row is the echo.
    let echo = result["latency"][0]["latency_us"]["p50"].as_f64();
    let latency = |row: &Value| {
        let seen = &row["latency_us"];
        let mut cells = vec![text(&row["name"]), text(&row["durability"])];
        cells.extend(["mean", "min", "p50", "p99", "max"].map(|name| us(&seen[name])));
        let ratio = seen["p50"].as_f64().zip(echo).map(|(seen, echo)| seen / echo);
        cells.push(known(ratio, 2));
        cells.push(us(&row["ack_us"]["p50"]));
        cells.extend(["lost", "doubled"].map(|name| count(&row[name])));
        cells
    };
    let steps = rows(&result["latency"]).iter().flat_map(|row| {
        rows(&row["steps"]).iter().map(|step| {
            let percent = step["percent"].to_string();
            let percent = percent.trim_end_matches(".0").to_owned();
            vec![text(&row["name"]), percent, us(&step["mean_us"]), us(&step["max_us"])]
        })
    });
    let throughput = |row: &Value| {
        let nodes: Vec<String> = rows(&row["node_messages_per_sec"]).iter().map(count).collect();
        let order = if row["is_order_equal"] == true { "equal" } else { "DIFFERENT" };
        vec![
            text(&row["name"]),
            bytes(&row["size"]),
            count(&row["batch_size"]),
            count(&row["messages_per_sec"]),
            nodes.join(" + "),
            text(&row["durability"]),
            ms(&row["latency_us"]["p50"]),
            ms(&row["latency_us"]["p99"]),
            count(&row["lost"]),
            count(&row["doubled"]),
            order.to_owned(),
        ]
    };
    let check = |row: &Value| vec![text(&row["name"]), text(&row["outcome"]), text(&row["detail"])];
    let part = |name: &str| rows(&result[name]).iter();
    let mut tables = vec![
        table(result, &LATENCY_COLUMNS, part("latency").map(latency).collect()),
        table(result, &STEP_COLUMNS, steps.collect()),
        table(result, &THROUGHPUT_COLUMNS, part("throughput").map(throughput).collect()),
        table(result, &CHECK_COLUMNS, part("check").map(check).collect()),
    ];
    tables.retain(|table| !table.rows.is_empty());
    // The title is that of all tables, and so are the notes.
    let last = tables.len().saturating_sub(1);
    for (number, table) in tables.iter_mut().enumerate() {
        if number > 0 {
            table.title.clear();
        }
        if number < last {
            table.notes.clear();
        }
    }
    tables
}
