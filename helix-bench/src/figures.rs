//! Plots of results: from a result's JSON to charts, and several results in one chart.

mod formats;
mod modes;

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
use crate::result_file::mode_of;
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
            "pubsub" => figures.extend(modes::pubsub(&results)),
            "connections" => figures.extend(modes::connections(&results)),
            "sequencer" => figures.extend(modes::sequencer(&results)),
            "limit" => figures.extend(modes::limit(&results)),
            "compare" => figures.extend(modes::compare(&results)),
            "group" => figures.extend(modes::group(&results)),
            "compaction" => figures.extend(modes::compaction(&results)),
            "wal" => figures.extend(modes::wal(&results)),
            "perf" => figures.extend(formats::perf(&results)),
            "omb" => figures.extend(formats::omb(&results)),
            "write" | "stream" | "read" | "latency" | "e2e" => {
                figures.extend(modes::loads(mode, &results))
            }
            mode => {
                let names: Vec<&str> = results.iter().map(|it| it.name.as_str()).collect();
                bail!("{}: no plot for a result of mode {mode}", names.join(", "))
            }
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

fn rows_of<'a>(value: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> {
    rows(&value[name]).iter()
}

fn sorted(mut points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
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
            "records_per_sec": 9.0,
            "latency_us": { "p50": 1.0, "p99": 2.0, "p999": 3.0, "max": 4.0 },
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
            serde_json::json!({ "mode": "read", "intervals": [
                { "at_seconds": 1.0, "records_per_sec": 4.0, "latency_us": run["latency_us"] },
                { "at_seconds": 2.0, "records_per_sec": 6.0, "latency_us": null },
            ] }),
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
        assert_eq!(of("read-throughput-time"), Some(vec![(1.0, 4.0), (2.0, 6.0)]));
        assert_eq!(of("read-latency-time"), Some(vec![(1.0, 0.001)]));
        assert_eq!(of("read-throughput-clients"), None, "a single point is no line");
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
