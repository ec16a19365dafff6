//! Plots of each mode: which values, over what.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    Figure, LATENCY, Measure, NINES, NamedResult, figure, linear, lines, rows_of, series_name,
    sorted,
};
use crate::chart::{ChartAxis, ChartSeries, ChartUnit, LineChart};
use crate::table::rows;

const PAYLOAD: ChartAxis =
    ChartAxis { label: "payload of a message", unit: ChartUnit::Bytes, is_log: true };
const RECORD: ChartAxis = ChartAxis { label: "record value", unit: ChartUnit::Bytes, is_log: true };
const CLIENTS: ChartAxis = ChartAxis { label: "clients", unit: ChartUnit::Count, is_log: true };

const LATENCIES: [Measure; 3] = [
    ("mean", "/run/latency_us/mean", 1e-3),
    ("p50", "/run/latency_us/p50", 1e-3),
    ("p99", "/run/latency_us/p99", 1e-3),
];

pub(super) fn pubsub(results: &[&NamedResult]) -> Vec<Figure> {
    let over = |measures: &[Measure]| lines(results, "rows", Some("/payload_bytes"), measures);
    let title = |what: &str| format!("Publish/subscribe: {what}");
    let has_ceiling =
        |named: &&NamedResult| rows_of(&named.result, "rows").any(|row| row["ceiling"].is_object());
    // Without ceilings, the legend has no entry for them.
    let with_ceiling = |measures: [Measure; 2]| match results.iter().any(has_ceiling) {
        true => over(&measures),
        false => over(&measures[..1]),
    };
    vec![
        figure(
            "pubsub-messages",
            &title("messages per second"),
            PAYLOAD,
            linear("messages/s"),
            with_ceiling([
                ("messages/s", "/messages_per_sec", 1.0),
                ("ceiling", "/ceiling/messages_per_sec", 1.0),
            ]),
        ),
        figure(
            "pubsub-latency",
            &title("latency from intended send to delivery"),
            PAYLOAD,
            LATENCY,
            over(&LATENCIES),
        ),
        figure(
            "pubsub-bytes",
            &title("payload bytes per second"),
            PAYLOAD,
            linear("MB/s"),
            with_ceiling([
                ("MB/s", "/payload_bytes_per_sec", 1e-6),
                ("ceiling", "/ceiling/payload_bytes_per_sec", 1e-6),
            ]),
        ),
    ]
}

pub(super) fn connections(results: &[&NamedResult]) -> Vec<Figure> {
    let x = ChartAxis { label: "connections", unit: ChartUnit::Count, is_log: true };
    let series = lines(results, "rows", Some("/count"), &LATENCIES);
    vec![figure("connections-latency", "Connections: latency of a request", x, LATENCY, series)]
}

pub(super) fn limit(results: &[&NamedResult]) -> Vec<Figure> {
    let asked = ChartAxis { label: "records/s asked for", unit: ChartUnit::Count, is_log: true };
    let over = |measures| lines(results, "steps", Some("/rate"), measures);
    vec![
        figure(
            "limit-latency",
            "Limit: latency over the rate",
            asked,
            LATENCY,
            over(&[
                ("p50", "/run/latency_us/p50", 1e-3),
                ("p99", "/run/latency_us/p99", 1e-3),
                ("p99.9", "/run/latency_us/p999", 1e-3),
            ]),
        ),
        figure(
            "limit-throughput",
            "Limit: records per second over the rate",
            asked,
            linear("records/s"),
            over(&[("records/s", "/run/records_per_sec", 1.0)]),
        ),
    ]
}

pub(super) fn compare(results: &[&NamedResult]) -> Vec<Figure> {
    let over = |measures| lines(results, "runs", None, measures);
    vec![
        figure(
            "compare-throughput",
            "Comparison: records per second of each pair of runs",
            linear("pair"),
            linear("records/s"),
            over(&[
                ("ceiling", "/ceiling/records_per_sec", 1.0),
                ("server", "/server/records_per_sec", 1.0),
            ]),
        ),
        figure(
            "compare-ratio",
            "Comparison: throughput of the server over the ceiling",
            linear("pair"),
            linear("ratio"),
            over(&[("ratio", "/throughput_ratio", 1.0)]),
        ),
    ]
}

/// Plots the values of each run over the median of the reference, one line for each measurement.
pub(super) fn group(results: &[&NamedResult]) -> Vec<Figure> {
    let mut series = Vec::new();
    let mut names: Vec<&str> = Vec::new();
    for (run, named) in results.iter().enumerate() {
        let with_reference = rows_of(&named.result, "rows").filter_map(|row| {
            let reference = row["reference"].as_f64().filter(|reference| *reference > 0.0)?;
            Some((row["name"].as_str()?, rows(&row["values"]), reference))
        });
        for (name, values, reference) in with_reference {
            let measure = names.iter().position(|known| *known == name).unwrap_or(names.len());
            if measure == names.len() {
                names.push(name);
            }
            let is_of_run =
                |named: &&&NamedResult| rows_of(&named.result, "rows").any(|it| it["name"] == name);
            // Parts that were run one by one differ by their names alone.
            let runs = results.iter().filter(is_of_run).count();
            let values = (1_u32..).zip(values.iter().filter_map(Value::as_f64));
            let points = values.map(|(at, value)| (f64::from(at), value / reference)).collect();
            let name = series_name(name, &named.name, runs);
            series.push(ChartSeries { name, measure, run, points });
        }
    }
    let title = "Consumer groups: runs over the median of their reference";
    vec![figure("group-ratio", title, linear("run"), linear("ratio"), series)]
}

/// Plots the pairs of runs in their order.
pub(super) fn compaction(results: &[&NamedResult]) -> Vec<Figure> {
    let measures = [
        ("p99 over that of an uncompacted topic", "/p99_ratio", 1.0),
        ("held bytes over live bytes", "/amplification", 1.0),
    ];
    let series = lines(results, "rows", None, &measures);
    let title = "Compaction by key: latency of appends, and space";
    vec![figure("compaction-ratio", title, linear("pair"), linear("ratio"), series)]
}

/// Plots the log alone over the size of an append. Runs with the same storage form a line.
pub(super) fn wal(results: &[&NamedResult]) -> Vec<Figure> {
    let mut storages: Vec<&str> =
        results.iter().filter_map(|named| named.result["storage"].as_str()).collect();
    storages.sort_unstable();
    storages.dedup();
    let over = |measures: &[Measure]| {
        let mut series = Vec::new();
        for (run, storage) in storages.iter().enumerate() {
            for (measure, (label, place, factor)) in measures.iter().enumerate() {
                let of_storage =
                    results.iter().filter(|named| named.result["storage"] == **storage);
                let point = |named: &&NamedResult| {
                    let value = named.result.pointer(place)?.as_f64()?;
                    Some((named.result["group_size"].as_f64()?, value * factor))
                };
                let points = sorted(of_storage.filter_map(point).collect());
                let name = series_name(label, storage, storages.len());
                series.push(ChartSeries { name, measure, run, points });
            }
        }
        series
    };
    let x = ChartAxis { label: "append", unit: ChartUnit::Bytes, is_log: true };
    vec![
        figure(
            "wal-throughput",
            "The log alone: bytes per second",
            x,
            linear("MB/s"),
            over(&[("MB/s", "/mb_per_sec", 1.0)]),
        ),
        figure(
            "wal-latency",
            "The log alone: latency of an append",
            x,
            LATENCY,
            over(&[
                ("p50", "/latency_us/p50", 1e-3),
                ("p99", "/latency_us/p99", 1e-3),
                ("max", "/latency_us/max", 1e-3),
            ]),
        ),
    ]
}

pub(super) fn sequencer(results: &[&NamedResult]) -> Vec<Figure> {
    let mut throughput = Vec::new();
    let mut latency = Vec::new();
    for (run, named) in results.iter().enumerate() {
        let name = |measure: &str| series_name(measure, &named.name, results.len());
        let kinds = ["batched", "one message a batch", "embedded, memory", "embedded, durable"];
        for (measure, label) in kinds.into_iter().enumerate() {
            let rows = rows(&named.result["throughput"]).iter();
            let of_kind = rows.filter(|row| match row["name"].as_str() {
                Some(name) if name.starts_with("embedded") => name == label,
                _ => measure == usize::from(row["batch_size"] == 1),
            });
            let point =
                |row: &Value| Some((row["size"].as_f64()?, row["messages_per_sec"].as_f64()?));
            let points = sorted(of_kind.filter_map(point).collect());
            if measure < 2 || !points.is_empty() {
                throughput.push(ChartSeries { name: name(label), measure, run, points });
            }
        }
        let with_steps = rows(&named.result["latency"]).iter();
        let with_steps: Vec<&Value> =
            with_steps.filter(|row| rows_of(row, "steps").next().is_some()).collect();
        for (at, row) in with_steps.iter().enumerate() {
            for (measure, (label, value)) in
                [("mean", "mean_us"), ("max", "max_us")].into_iter().enumerate()
            {
                let (measure, label) = match (with_steps.len(), row["name"].as_str()) {
                    (2.., Some(row)) => (2 * at + measure, format!("{row}: {label}")),
                    _ => (measure, label.to_owned()),
                };
                // The number of nines makes the tail visible.
                let point = |step: &Value| {
                    let above = 1.0 - step["percent"].as_f64()? / 100.0;
                    Some((1.0 / above, step[value].as_f64()?))
                };
                let points = sorted(rows_of(row, "steps").filter_map(point).collect());
                if !points.is_empty() {
                    latency.push(ChartSeries { name: name(&label), measure, run, points });
                }
            }
        }
    }
    let size = ChartAxis { label: "message", unit: ChartUnit::Bytes, is_log: true };
    let rate = ChartAxis { label: "messages/s", unit: ChartUnit::Count, is_log: true };
    let us = ChartAxis { label: "us", unit: ChartUnit::Count, is_log: true };
    let chart = |name: &str, title: &str, x, y, series| Figure {
        name: format!("sequencer-{name}"),
        chart: LineChart { title: title.to_owned(), x, y, series },
    };
    vec![
        chart("throughput", "Sequencer: messages per second", size, rate, throughput),
        chart("latency", "Sequencer: latency, one message in flight", NINES, us, latency),
    ]
}

/// Plots single runs over what differs between them: clients, record size, or both.
///
/// Runs with the same storage and number of nodes form a line.
pub(super) fn loads(mode: &str, results: &[&NamedResult]) -> Vec<Figure> {
    let mut figures = over_time(mode, results);
    for (axis, pointer, over) in
        [(CLIENTS, "/load/clients", "clients"), (RECORD, "/load/size", "size")]
    {
        let at = |named: &NamedResult| named.result.pointer(pointer).and_then(Value::as_f64);
        let mut values: Vec<f64> = results.iter().filter_map(|named| at(named)).collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        // Of one run without intervals, a point is all there is.
        if values.len() < 2 && !(over == "clients" && figures.is_empty() && results.len() == 1) {
            continue;
        }
        let chart = |name: &str, title: &str, y, measures: &[(&str, &str, f64)]| {
            let mut lines: BTreeMap<(String, usize), Vec<(f64, f64)>> = BTreeMap::new();
            for named in results {
                for (measure, (_, pointer, factor)) in measures.iter().enumerate() {
                    let value = named.result.pointer(pointer).and_then(Value::as_f64);
                    if let (Some(x), Some(y)) = (at(named), value) {
                        lines
                            .entry((setup(&named.result), measure))
                            .or_default()
                            .push((x, y * factor));
                    }
                }
            }
            let mut setups: Vec<String> = lines.keys().map(|(setup, _)| setup.clone()).collect();
            setups.dedup();
            let line = |((setup, measure), points): ((String, usize), Vec<(f64, f64)>)| {
                let points = sorted(points);
                let run = setups.iter().position(|known| *known == setup).unwrap_or_default();
                let name = series_name(measures[measure].0, &setup, setups.len());
                ChartSeries { name, measure, run, points }
            };
            let series = lines.into_iter().map(line).collect();
            let chart = LineChart { title: format!("{mode}: {title}"), x: axis, y, series };
            Figure { name: format!("{mode}-{name}-{over}"), chart }
        };
        figures.push(chart(
            "throughput",
            "records per second",
            linear("records/s"),
            &[("records/s", "/records_per_sec", 1.0)],
        ));
        figures.push(chart(
            "latency",
            "latency",
            LATENCY,
            &[
                ("p50", "/latency_us/p50", 1e-3),
                ("p99", "/latency_us/p99", 1e-3),
                ("p99.9", "/latency_us/p999", 1e-3),
            ],
        ));
    }
    figures
}

/// Rate and latency of each run, second by second. None of many runs, whose lines look
/// alike.
fn over_time(mode: &str, results: &[&NamedResult]) -> Vec<Figure> {
    const RUNS_MAX: usize = 4;
    let has_line = |named: &&NamedResult| rows_of(&named.result, "intervals").nth(1).is_some();
    if results.len() > RUNS_MAX || !results.iter().any(has_line) {
        return Vec::new();
    }
    let latencies: &[Measure] = match results.len() {
        1 => &[
            ("p50", "/latency_us/p50", 1e-3),
            ("p99", "/latency_us/p99", 1e-3),
            ("max", "/latency_us/max", 1e-3),
        ],
        _ => &[("p99", "/latency_us/p99", 1e-3)],
    };
    let chart = |name: &str, title: &str, y, measures: &[Measure]| {
        let series = lines(results, "intervals", Some("/at_seconds"), measures);
        figure(&format!("{mode}-{name}-time"), &format!("{mode}: {title}"), linear("s"), y, series)
    };
    vec![
        chart(
            "throughput",
            "records per second, over time",
            linear("records/s"),
            &[("records/s", "/records_per_sec", 1.0)],
        ),
        chart("latency", "latency over time", LATENCY, latencies),
    ]
}

/// Names the storage and the nodes of a run.
fn setup(result: &Value) -> String {
    let storage = result["storage"].as_str().unwrap_or("unknown");
    match result["node_count"].as_u64() {
        Some(1) | None => storage.to_owned(),
        Some(nodes) => format!("{storage}, {nodes} nodes"),
    }
}
