//! Plots of results: from a result's JSON to charts, and several results in one chart.

mod formats;

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::chart::{ChartAxis, ChartSeries, ChartUnit, LineChart};
#[cfg(feature = "png")]
use crate::png::PngRenderer;
use crate::progress;
use crate::table::rows;

/// Result with the name by which a chart tells it from others.
#[derive(Debug)]
pub(crate) struct NamedResult {
    pub(crate) name: String,
    pub(crate) result: Value,
}

/// Chart with the name of its file.
#[derive(Debug)]
pub(crate) struct Figure {
    pub(crate) name: String,
    chart: LineChart,
}

impl Figure {
    pub(crate) fn svg(&self) -> String {
        self.chart.svg()
    }
}

const PAYLOAD: ChartAxis =
    ChartAxis { label: "payload of a message", unit: ChartUnit::Bytes, is_log: true };
const RECORD: ChartAxis = ChartAxis { label: "record value", unit: ChartUnit::Bytes, is_log: true };
const CLIENTS: ChartAxis = ChartAxis { label: "clients", unit: ChartUnit::Count, is_log: true };
const LATENCY: ChartAxis = ChartAxis { label: "ms", unit: ChartUnit::Count, is_log: true };
const NINES: ChartAxis =
    ChartAxis { label: "lowest % of the messages", unit: ChartUnit::Nines, is_log: true };

/// Draws the results, and names the files that were written.
///
/// # Errors
/// A result has no plot, or a file cannot be written.
pub(crate) fn draw(results: &[NamedResult], dir: &Path) -> Result<()> {
    for path in write(results, dir)? {
        progress::step(&format!("wrote {path}"));
    }
    Ok(())
}

/// Writes each chart as SVG, and as PNG with the feature `png`, to the directory, which is created.
fn write(results: &[NamedResult], dir: &Path) -> Result<Vec<String>> {
    let figures = figures(results)?;
    let name = dir.display();
    #[expect(clippy::disallowed_methods, reason = "writes the plots that the user asked for")]
    fs::create_dir_all(dir).with_context(|| format!("create {name}"))?;
    let mut names = Vec::with_capacity(figures.len());
    let mut write = |name: String, content: &[u8]| {
        let path = dir.join(name);
        write_file(&path, content)?;
        names.push(path.display().to_string());
        anyhow::Ok(())
    };
    for figure in &figures {
        write(format!("{}.svg", figure.name), figure.svg().as_bytes())?;
    }
    // Afterwards, because it needs a font.
    #[cfg(feature = "png")]
    {
        let renderer = PngRenderer::new()?;
        for figure in &figures {
            write(format!("{}.png", figure.name), &renderer.render(&figure.svg())?)?;
        }
    }
    Ok(names)
}

/// Writes a file, which may exist.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn write_file(path: &Path, content: &[u8]) -> Result<()> {
    let file = OpenOptions::new().write(true).create(true).truncate(true).open(path);
    file.and_then(|mut file| file.write_all(content))
        .with_context(|| format!("write {}", path.display()))
}

fn mode_of(result: &Value) -> &str {
    if formats::is_omb(result) {
        return "omb";
    }
    let mode = result["mode"].as_str().or_else(|| result["load"]["mode"].as_str());
    mode.unwrap_or("unknown")
}

/// Returns the charts of the results. Results of one mode share charts.
///
/// # Errors
/// A result has no plot.
pub(crate) fn figures(results: &[NamedResult]) -> Result<Vec<Figure>> {
    let mut by_mode: BTreeMap<&str, Vec<&NamedResult>> = BTreeMap::new();
    // A check has outcomes and nothing to plot.
    for named in results.iter().filter(|named| rows(&named.result["check"]).is_empty()) {
        by_mode.entry(mode_of(&named.result)).or_default().push(named);
    }
    let mut figures = Vec::new();
    for (mode, results) in by_mode {
        match mode {
            "pubsub" => figures.extend(pubsub(&results)),
            "connections" => figures.extend(connections(&results)),
            "sequencer" => figures.extend(sequencer(&results)),
            "limit" => figures.extend(limit(&results)),
            "compare" => figures.extend(compare(&results)),
            "group" => figures.extend(group(&results)),
            "compaction" => figures.extend(compaction(&results)),
            "wal" => figures.extend(wal(&results)),
            "perf" => figures.extend(formats::perf(&results)),
            "omb" => figures.extend(formats::omb(&results)),
            "write" | "stream" | "read" | "latency" | "e2e" => {
                figures.extend(loads(mode, &results))
            }
            mode => bail!("no plot for a result of mode {mode}"),
        }
    }
    Ok(figures)
}

/// Measure of a chart: name, place in a row, and factor to the unit of the axis.
type Measure = (&'static str, &'static str, f64);

/// Returns the lines of a chart over the rows of each result, one for each measure.
///
/// `x` is the place of a row's position; without it, the rows are numbered.
fn lines(
    results: &[&NamedResult],
    rows: &str,
    x: Option<&str>,
    measures: &[Measure],
) -> Vec<ChartSeries> {
    let mut series = Vec::new();
    for (run, named) in results.iter().enumerate() {
        for (measure, (label, place, factor)) in measures.iter().enumerate() {
            let point = |(number, row): (usize, &Value)| {
                let at = match x {
                    Some(x) => row.pointer(x)?.as_f64()?,
                    None => (number + 1) as f64,
                };
                Some((at, row.pointer(place)?.as_f64()? * factor))
            };
            let numbered = rows_of(&named.result, rows).enumerate();
            let points = sorted(numbered.filter_map(point).collect());
            let name = series_name(label, &named.name, results.len());
            series.push(ChartSeries { name, measure, run, points });
        }
    }
    series
}

fn figure(name: &str, title: &str, x: ChartAxis, y: ChartAxis, series: Vec<ChartSeries>) -> Figure {
    Figure { name: name.to_owned(), chart: LineChart { title: title.to_owned(), x, y, series } }
}

fn linear(label: &'static str) -> ChartAxis {
    ChartAxis { label, unit: ChartUnit::Count, is_log: false }
}

const LATENCIES: [Measure; 3] = [
    ("mean", "/run/latency_us/mean", 1e-3),
    ("p50", "/run/latency_us/p50", 1e-3),
    ("p99", "/run/latency_us/p99", 1e-3),
];

fn pubsub(results: &[&NamedResult]) -> Vec<Figure> {
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

fn connections(results: &[&NamedResult]) -> Vec<Figure> {
    let x = ChartAxis { label: "connections", unit: ChartUnit::Count, is_log: true };
    let series = lines(results, "rows", Some("/count"), &LATENCIES);
    vec![figure("connections-latency", "Connections: latency of a request", x, LATENCY, series)]
}

fn limit(results: &[&NamedResult]) -> Vec<Figure> {
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

fn compare(results: &[&NamedResult]) -> Vec<Figure> {
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
fn group(results: &[&NamedResult]) -> Vec<Figure> {
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
fn compaction(results: &[&NamedResult]) -> Vec<Figure> {
    let measures = [
        ("p99 over that of an uncompacted topic", "p99_ratio"),
        ("held bytes over live bytes", "amplification"),
    ];
    let mut series = Vec::new();
    for (run, named) in results.iter().enumerate() {
        for (measure, (name, place)) in measures.into_iter().enumerate() {
            let pairs = (1_u32..).zip(rows_of(&named.result, "rows"));
            let points = pairs
                .filter_map(|(pair, row)| Some((f64::from(pair), row[place].as_f64()?)))
                .collect();
            let name = series_name(name, &named.name, results.len());
            series.push(ChartSeries { name, measure, run, points });
        }
    }
    let title = "Compaction by key: latency of appends, and space";
    vec![figure("compaction-ratio", title, linear("pair"), linear("ratio"), series)]
}

/// Plots the log alone over the size of an append. Runs with the same storage form a line.
fn wal(results: &[&NamedResult]) -> Vec<Figure> {
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

fn sequencer(results: &[&NamedResult]) -> Vec<Figure> {
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

fn rows_of<'a>(value: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> {
    rows(&value[name]).iter()
}

fn sorted(mut points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

/// Plots single runs over what differs between them: clients, record size, or both.
///
/// Runs with the same storage and number of nodes form a line.
fn loads(mode: &str, results: &[&NamedResult]) -> Vec<Figure> {
    let mut figures = Vec::new();
    for (axis, pointer, over) in
        [(CLIENTS, "/load/clients", "clients"), (RECORD, "/load/size", "size")]
    {
        let at = |named: &NamedResult| named.result.pointer(pointer).and_then(Value::as_f64);
        let mut values: Vec<f64> = results.iter().filter_map(|named| at(named)).collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
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
            ChartAxis { label: "records/s", unit: ChartUnit::Count, is_log: false },
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

/// Names the storage and the nodes of a run.
fn setup(result: &Value) -> String {
    let storage = result["storage"].as_str().unwrap_or("unknown");
    match result["node_count"].as_u64() {
        Some(1) | None => storage.to_owned(),
        Some(nodes) => format!("{storage}, {nodes} nodes"),
    }
}

fn series_name(measure: &str, run: &str, runs: usize) -> String {
    if runs == 1 { measure.to_owned() } else { format!("{measure}, {run}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str, result: Value) -> NamedResult {
        NamedResult { name: name.to_owned(), result }
    }

    fn pubsub_result(name: &str) -> NamedResult {
        let row = |payload: u64| {
            serde_json::json!({
                "payload_bytes": payload, "messages_per_sec": 1000.0,
                "payload_bytes_per_sec": 1e6,
                "run": { "latency_us": { "mean": 900.0, "p50": 800.0, "p99": 4000.0 } },
            })
        };
        named(name, serde_json::json!({ "mode": "pubsub", "rows": [row(1024), row(256)] }))
    }

    fn omb_result(backlog: u64) -> Value {
        serde_json::json!({
            "publishRate": [10.0, 20.0], "consumeRate": [10.0, 19.0], "backlog": [0, backlog],
            "aggregatedPublishLatencyAvg": 1.0, "aggregatedPublishLatency50pct": 1.5,
            "aggregatedPublishDelayLatency50pct": 20, "aggregatedEndToEndLatency50pct": 2.0,
        })
    }

    #[test]
    fn two_results_share_the_charts_of_their_mode() {
        let figures = figures(&[pubsub_result("memory"), pubsub_result("durable")]).unwrap();
        let names: Vec<&str> = figures.iter().map(|figure| figure.name.as_str()).collect();
        assert_eq!(names, ["pubsub-messages", "pubsub-latency", "pubsub-bytes"]);
        let latency = &figures[1].chart.series;
        let names: Vec<&str> = latency.iter().map(|series| series.name.as_str()).collect();
        assert_eq!(names[..4], ["mean, memory", "p50, memory", "p99, memory", "mean, durable"]);
        assert_eq!(latency[0].points, [(256.0, 0.9), (1024.0, 0.9)]);
    }

    #[test]
    fn runs_are_plotted_over_the_flag_that_differs() {
        let run = |clients: u64, storage: &str| {
            named(
                "run",
                serde_json::json!({
                    "records_per_sec": 1000 * clients, "storage": storage, "node_count": 1,
                    "latency_us": { "p50": 100.0, "p99": 200.0, "p999": 300.0 },
                    "load": { "mode": "write", "clients": clients, "size": 1024 },
                }),
            )
        };
        let results = [run(4, "disk"), run(1, "disk"), run(1, "memory"), run(4, "memory")];
        let figures = figures(&results).unwrap();
        let names: Vec<&str> = figures.iter().map(|figure| figure.name.as_str()).collect();
        assert_eq!(names, ["write-throughput-clients", "write-latency-clients"]);
        let throughput = &figures[0].chart.series;
        assert_eq!(throughput.len(), 2);
        assert_eq!(throughput[0].points, [(1.0, 1000.0), (4.0, 4000.0)]);
        assert_eq!(figures[1].chart.series.len(), 6);
    }

    #[test]
    fn every_mode_has_plots() {
        let run = serde_json::json!({
            "records_per_sec": 9.0, "latency_us": { "p50": 1.0, "p99": 2.0, "p999": 3.0 },
        });
        let results = [
            serde_json::json!({ "mode": "limit", "steps": [{ "rate": 10.0, "run": run }] }),
            serde_json::json!({
                "mode": "compare",
                "runs": [{ "throughput_ratio": 0.5, "ceiling": run, "server": run }],
            }),
            serde_json::json!({ "mode": "group", "rows": [
                { "name": "commits", "values": [1.0, 3.0], "reference": 2.0 },
                { "name": "memory", "values": [7.0], "reference": null },
            ] }),
            serde_json::json!({ "mode": "compaction", "rows": [
                { "p99_ratio": 1.25, "amplification": 1.5 },
                { "p99_ratio": null, "amplification": 2.0 },
            ] }),
            serde_json::json!({
                "mode": "wal", "storage": "disk", "group_size": 1 << 20, "mb_per_sec": 500.0,
                "latency_us": { "p50": 1.0, "p99": 2.0, "max": 3.0 },
            }),
            serde_json::json!({ "mode": "perf", "intervals": [
                { "at_seconds": 5.0, "records_per_sec": 7.0, "latency_us": run["latency_us"] },
            ] }),
            omb_result(3),
        ];
        let results: Vec<NamedResult> =
            results.into_iter().map(|result| named("one", result)).collect();
        let figures = figures(&results).unwrap();
        for figure in &figures {
            assert!(figure.chart.series.iter().all(|line| !line.points.is_empty()), "{figure:?}");
        }
        let of = |name: &str| {
            let figure = figures.iter().find(|figure| figure.name == name);
            figure.map(|figure| figure.chart.series[0].points.clone())
        };
        assert_eq!(of("limit-throughput"), Some(vec![(10.0, 9.0)]));
        assert_eq!(of("compare-ratio"), Some(vec![(1.0, 0.5)]));
        assert_eq!(of("group-ratio"), Some(vec![(1.0, 0.5), (2.0, 1.5)]));
        assert_eq!(of("compaction-ratio"), Some(vec![(1.0, 1.25)]));
        assert_eq!(of("wal-throughput"), Some(vec![(1_048_576.0, 500.0)]));
        assert_eq!(of("perf-throughput"), Some(vec![(5.0, 7.0)]));
        assert_eq!(of("omb-rates"), Some(vec![(1.0, 10.0), (2.0, 20.0)]));
        assert_eq!(of("omb-backlog"), Some(vec![(1.0, 0.0), (2.0, 3.0)]));
        assert_eq!(of("omb-latency"), Some(vec![(2.0, 1.5)]));
    }

    #[test]
    fn workload_without_a_backlog_has_no_plot_of_it() {
        let figures = figures(&[named("one", omb_result(0))]).unwrap();
        let names: Vec<&str> = figures.iter().map(|figure| figure.name.as_str()).collect();
        assert_eq!(names, ["omb-rates", "omb-latency"]);
    }

    #[test]
    fn plots_are_written_to_a_new_directory() {
        #[cfg(feature = "png")]
        if PngRenderer::new().is_err() {
            eprintln!("SKIPPED: no known font is installed");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let written = write(&[pubsub_result("one")], &dir.path().join("plots")).unwrap();
        let pictures = if cfg!(feature = "png") { 6 } else { 3 };
        assert_eq!(written.len(), pictures);
        assert!(written[0].ends_with("pubsub-messages.svg"));
        assert!(write(&[named("x", Value::Null)], dir.path()).is_err());
    }
}
