//! Tables of results: aligned for a terminal, or as Markdown.
//!
//! A table is made from the result's JSON, so a stored result gives the same table as its run.

mod compaction;
mod pairs;
mod result_table;
mod sequencer;

use anyhow::{Result, bail};
use serde_json::Value;

use self::pairs::{Feature, FeaturePairs};
use self::result_table::ResultTable;
use crate::format::{bytes_text, grouped, known};
use crate::limits::{KnownLimits, LoadLimits, is_ceiling};
use crate::result_file::mode_of;

/// Returns the tables of a result.
///
/// # Errors
/// The result is of a mode without tables.
fn tables(result: &Value, limits: &KnownLimits<'_>) -> Result<Vec<ResultTable>> {
    if mode_of(result) == "omb" {
        return Ok(vec![omb(result)]);
    }
    match result["mode"].as_str() {
        Some("pubsub") => Ok(vec![pubsub(result, limits)]),
        Some("connections") => Ok(vec![connections(result)]),
        Some("group") => Ok(vec![group(result)]),
        Some("compaction") => Ok(vec![compaction::pairs(result)]),
        Some("limit") => Ok(vec![limit(result)]),
        Some("sequencer") => Ok(sequencer::parts(result)),
        Some("perf") => Ok(vec![perf(result)]),
        Some("wal") => Ok(vec![wal(result)]),
        Some("compare") => Ok(vec![compare(result, limits)]),
        mode => bail!("no table for a result of mode {}", mode.unwrap_or("unknown")),
    }
}

/// Returns the tables of several results. Runs of one load each share a table.
///
/// Parts of `group` that were run one by one against the same nodes share a table.
///
/// With results of ceilings or of the log alone among them or in `limits`, tables have the ratio to
/// the lower limit. Runs of one load with and without TLS, or a token, are compared in a table of
/// their own.
///
/// # Errors
/// A result is of a mode without tables.
pub(crate) fn tables_of_all(results: &[Value], limits: &[Value]) -> Result<Vec<ResultTable>> {
    let limits = KnownLimits::among(results.iter().chain(limits));
    let pairs = Feature::ALL.map(|feature| FeaturePairs::among(feature, results));
    let is_compared = |run: &Value| pairs.iter().any(|pairs| pairs.contains(run));
    let (loads, modes): (Vec<&Value>, Vec<&Value>) =
        results.iter().partition(|result| is_load(result));
    let loads: Vec<&Value> = loads.into_iter().filter(|run| !is_compared(run)).collect();
    let mut all: Vec<ResultTable> = pairs.iter().filter_map(FeaturePairs::table).collect();
    for result in modes {
        for table in tables(result, &limits)? {
            match all.iter_mut().find(|known| result["mode"] == "group" && known.suits(&table)) {
                Some(known) => known.append(table),
                None => all.push(table),
            }
        }
    }
    if !loads.is_empty() {
        all.push(self::loads(&loads, &limits));
    }
    Ok(all)
}

/// Checks that a result has a table.
///
/// # Errors
/// The result is of a mode without tables.
pub(crate) fn check(result: &Value) -> Result<()> {
    if is_load(result) { Ok(()) } else { tables(result, &KnownLimits::default()).map(drop) }
}

/// Reports whether a result is of one load, not of several rows. The batches of `perf` are made by
/// the client, so it is another load than `write` with the same flags.
fn is_load(result: &Value) -> bool {
    result["load"]["mode"].is_string() && result["mode"] != "perf"
}

/// Returns the tables of a result for a terminal.
///
/// # Errors
/// The result is of a mode without tables.
pub(crate) fn plain(result: &Value) -> Result<String> {
    let tables = tables(result, &KnownLimits::default())?;
    Ok(tables.iter().map(ResultTable::plain).collect::<Vec<_>>().join("\n"))
}

const PUBSUB_COLUMNS: [&str; 13] = [
    "payload",
    "batch",
    "messages/s",
    "MB/s",
    "mean ms",
    "p50",
    "p95",
    "p99",
    "ack p50",
    "ack p99",
    "messages",
    "lost",
    "doubled",
];

fn pubsub(result: &Value, limits: &KnownLimits<'_>) -> ResultTable {
    let row = |row: &Value| {
        let run = &row["run"];
        let (delivered, acked) = (&run["latency_us"], &run["latency_parts_us"]["ack"]);
        vec![
            bytes(&row["payload_bytes"]),
            count(&run["load"]["batch_size"]),
            count(&row["messages_per_sec"]),
            count(&scaled(&row["payload_bytes_per_sec"], 1e-6)),
            ms(&delivered["mean"]),
            ms(&delivered["p50"]),
            ms(&delivered["p95"]),
            ms(&delivered["p99"]),
            ms(&acked["p50"]),
            ms(&acked["p99"]),
            count(&row["messages"]),
            count(&row["lost"]),
            count(&row["doubled"]),
        ]
    };
    let measured = rows(&result["rows"]);
    let mut table = table(result, &PUBSUB_COLUMNS, measured.iter().map(row).collect());
    let limits_of = |row: &Value| {
        let log = limits.log("pubsub", &row["run"]["storage"]);
        let mb_per_sec = |result: &Value| Some(result["payload_bytes_per_sec"].as_f64()? / 1e6);
        // Each row has its own ceiling, measured with it.
        (LoadLimits { ceiling: mb_per_sec(&row["ceiling"]), log }, mb_per_sec(row))
    };
    if !limits.is_empty() || measured.iter().any(|row| row["ceiling"].is_object()) {
        table.add_limits(measured.iter().map(limits_of));
    }
    table
}

const CONNECTIONS_COLUMNS: [&str; 13] = [
    "connections",
    "opened",
    "opened/s",
    "active",
    "requests/s",
    "mean ms",
    "p50",
    "p99",
    "delivered %",
    "lost",
    "KiB/connection",
    "server cores",
    "errors",
];

fn connections(result: &Value) -> ResultTable {
    let row = |row: &Value| {
        let (run, latency) = (&row["run"], &row["run"]["latency_us"]);
        vec![
            count(&row["count"]),
            count(&row["opened"]),
            count(&row["opened_per_sec"]),
            count(&row["active"]),
            count(&run["requests_per_sec"]),
            ms(&latency["mean"]),
            ms(&latency["p50"]),
            ms(&latency["p99"]),
            known(row["delivered_percent"].as_f64(), 3),
            count(&row["lost"]),
            known(row["bytes_per_connection"].as_f64().map(|bytes| bytes / 1024.0), 1),
            known(run["cpu"]["server_cores"].as_f64(), 2),
            count(&run["errors"]),
        ]
    };
    table(result, &CONNECTIONS_COLUMNS, rows(&result["rows"]).iter().map(row).collect())
}

const GROUP_COLUMNS: [&str; 8] = [
    "consumer groups",
    "value",
    "unit",
    "values",
    "against",
    "reference",
    "ratio",
    "lowest to highest",
];

fn group(result: &Value) -> ResultTable {
    let row = |row: &Value| {
        let [low, high] = ["ratio_min", "ratio_max"].map(|name| known(row[name].as_f64(), 3));
        vec![
            text(&row["name"]),
            known(row["value"].as_f64(), 2),
            text(&row["unit"]),
            rows(&row["values"]).len().to_string(),
            text(&row["reference_name"]),
            known(row["reference"].as_f64(), 2),
            known(row["ratio"].as_f64(), 3),
            if row["ratio"].is_null() { "-".to_owned() } else { format!("{low} to {high}") },
        ]
    };
    table(result, &GROUP_COLUMNS, rows(&result["rows"]).iter().map(row).collect())
}

const LIMIT_COLUMNS: [&str; 6] = ["rate", "records/s", "p50 ms", "p99", "p99.9", "outcome"];

fn limit(result: &Value) -> ResultTable {
    let row = |step: &Value| {
        let (run, latency) = (&step["run"], &step["run"]["latency_us"]);
        vec![
            count(&step["rate"]),
            count(&run["records_per_sec"]),
            ms(&latency["p50"]),
            ms(&latency["p99"]),
            ms(&latency["p999"]),
            step["why"].as_str().unwrap_or("within").to_owned(),
        ]
    };
    table(result, &LIMIT_COLUMNS, rows(&result["steps"]).iter().map(row).collect())
}

const LOAD_COLUMNS: [&str; 11] = [
    "load",
    "storage",
    "nodes",
    "clients",
    "record x batch",
    "records/s",
    "MB/s",
    "p50 ms",
    "p99",
    "p99.9",
    "errors",
];

/// Returns the table of runs of one load each, ordered by setup, clients and size.
fn loads(results: &[&Value], limits: &KnownLimits<'_>) -> ResultTable {
    let key = |result: &&&Value| {
        let load = &result["load"];
        let nodes = result["node_count"].as_u64();
        let numbers = ["clients", "size"].map(|name| load[name].as_u64());
        (text(&load["mode"]), nodes, text(&result["storage"]), numbers)
    };
    let mut ordered: Vec<&&Value> = results.iter().collect();
    ordered.sort_by_key(key);
    let row = |result: &&&Value| {
        let (load, latency) = (&result["load"], &result["latency_us"]);
        vec![
            text(&load["mode"]),
            text(&result["storage"]),
            count(&result["node_count"]),
            count(&load["clients"]),
            format!("{} x {}", bytes(&load["size"]), count(&load["batch_size"])),
            count(&result["records_per_sec"]),
            count(&result["mb_per_sec"]),
            ms(&latency["p50"]),
            ms(&latency["p99"]),
            ms(&latency["p999"]),
            count(&result["errors"]),
        ]
    };
    let rows = ordered.iter().map(row).collect();
    let columns = LOAD_COLUMNS.to_vec();
    let mut table = ResultTable { title: String::new(), columns, rows, notes: Vec::new() };
    let limits_of = |run: &&&Value| match is_ceiling(run) {
        true => (LoadLimits::default(), None),
        false => (limits.of_run(run), run["mb_per_sec"].as_f64()),
    };
    if !limits.is_empty() {
        table.add_limits(ordered.iter().map(limits_of));
    }
    table
}

const COMPARE_COLUMNS: [&str; 10] = [
    "load",
    "storage",
    "nodes",
    "clients",
    "ceiling records/s",
    "records/s",
    "ratio",
    "lowest to highest",
    "p50 ms",
    "p99",
];

fn compare(result: &Value, limits: &KnownLimits<'_>) -> ResultTable {
    let (server, ratio) = (&result["server"], &result["throughput_ratio"]);
    let load = &result["runs"][0]["server"]["load"];
    let [low, high] = ["min", "max"].map(|name| known(ratio[name].as_f64(), 3));
    let row = vec![
        text(&result["load_mode"]),
        text(&server["storage"]),
        count(&server["node_count"]),
        count(&load["clients"]),
        count(&result["ceiling"]["records_per_sec"]["median"]),
        count(&server["records_per_sec"]["median"]),
        known(ratio["median"].as_f64(), 3),
        format!("{low} to {high}"),
        ms(&server["p50_us"]["median"]),
        ms(&server["p99_us"]["median"]),
    ];
    let mut table = table(result, &COMPARE_COLUMNS, vec![row]);
    // The comparison has its own ceiling, measured in turns.
    let of_run = LoadLimits {
        ceiling: result["ceiling"]["mb_per_sec"]["median"].as_f64(),
        log: limits.log_of_load(load, &server["storage"]),
    };
    if !limits.is_empty() {
        table.add_limits([(of_run, server["mb_per_sec"]["median"].as_f64())].into_iter());
    }
    table
}

const PERF_COLUMNS: [&str; 11] = [
    "load",
    "storage",
    "nodes",
    "record",
    "batch up to",
    "records/s",
    "MiB/s",
    "p50 ms",
    "p99",
    "p99.9",
    "errors",
];

fn perf(result: &Value) -> ResultTable {
    let latency = &result["latency_us"];
    let row = vec![
        "perf".to_owned(),
        text(&result["storage"]),
        count(&result["node_count"]),
        bytes(&result["load"]["size"]),
        bytes(&result["batch_bytes"]),
        count(&result["records_per_sec"]),
        count(&result["mib_per_sec"]),
        ms(&latency["p50"]),
        ms(&latency["p99"]),
        ms(&latency["p999"]),
        count(&result["errors"]),
    ];
    table(result, &PERF_COLUMNS, vec![row])
}

const OMB_COLUMNS: [&str; 8] = [
    "workload",
    "message",
    "published/s",
    "consumed/s",
    "publish p50 ms",
    "p99",
    "end to end p50 ms",
    "p99",
];

fn omb(result: &Value) -> ResultTable {
    let mean = |list: &str| {
        let values: Vec<f64> = rows(&result[list]).iter().filter_map(Value::as_f64).collect();
        let sum: f64 = values.iter().sum();
        count(&Value::from(sum / values.len().max(1) as f64))
    };
    // The format has milliseconds.
    let latency = |name: &str| known(result[name].as_f64(), 3);
    let row = vec![
        text(&result["workload"]),
        bytes(&result["messageSize"]),
        mean("publishRate"),
        mean("consumeRate"),
        latency("aggregatedPublishLatency50pct"),
        latency("aggregatedPublishLatency99pct"),
        latency("aggregatedEndToEndLatency50pct"),
        latency("aggregatedEndToEndLatency99pct"),
    ];
    let title = format!("omb: {} with {}", text(&result["workload"]), text(&result["driver"]));
    ResultTable { title, columns: OMB_COLUMNS.to_vec(), rows: vec![row], notes: Vec::new() }
}

const WAL_COLUMNS: [&str; 11] = [
    "log alone",
    "durability",
    "append",
    "entry",
    "in flight",
    "MB/s",
    "appends/s",
    "p50 ms",
    "p99",
    "sync p50",
    "sync p99",
];

fn wal(result: &Value) -> ResultTable {
    let row = vec![
        text(&result["storage"]),
        text(&result["durability"]),
        bytes(&result["group_size"]),
        bytes(&result["entry_size"]),
        count(&result["in_flight"]),
        count(&result["mb_per_sec"]),
        count(&result["appends_per_sec"]),
        ms(&result["latency_us"]["p50"]),
        ms(&result["latency_us"]["p99"]),
        ms(&result["sync_p50_us"]),
        ms(&result["sync_p99_us"]),
    ];
    table(result, &WAL_COLUMNS, vec![row])
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn table(result: &Value, columns: &[&'static str], rows: Vec<Vec<String>>) -> ResultTable {
    let notes = self::rows(&result["notes"]).iter().map(text).collect();
    ResultTable { title: text(&result["title"]), columns: columns.to_vec(), rows, notes }
}

/// Returns the elements of an array, or none.
pub(crate) fn rows(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn scaled(value: &Value, factor: f64) -> Value {
    value.as_f64().map_or(Value::Null, |value| Value::from(value * factor))
}

fn count(value: &Value) -> String {
    value.as_f64().map_or_else(|| "-".to_owned(), grouped)
}

/// Formats a number of bytes, which is 0 if it is missing.
fn bytes(value: &Value) -> String {
    bytes_text(value.as_u64().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(0))
}

/// Formats microseconds as milliseconds.
fn ms(value: &Value) -> String {
    known(value.as_f64().map(|us| us / 1e3), 3)
}

#[cfg(test)]
mod tests;
