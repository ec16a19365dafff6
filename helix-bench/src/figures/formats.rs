//! Plots of the load tests in the formats of other programs: `perf` and `omb`.

use super::{Figure, LATENCY, NINES, NamedResult, figure, linear, lines, rows_of, series_name};
use crate::chart::ChartSeries;
use crate::omb::result::PERCENTILES;

/// Latencies of a result of `omb`: label, begin of the keys, and factor to milliseconds.
const OMB_LATENCIES: [(&str, &str, f64); 3] = [
    ("publish", "aggregatedPublishLatency", 1.0),
    ("send delay", "aggregatedPublishDelayLatency", 1e-3),
    ("end to end", "aggregatedEndToEndLatency", 1.0),
];

/// Plots the intervals of the lines that `perf` prints.
pub(super) fn perf(results: &[&NamedResult]) -> Vec<Figure> {
    let over = |measures| lines(results, "intervals", Some("/at_seconds"), measures);
    vec![
        figure(
            "perf-throughput",
            "perf: records per second",
            linear("seconds"),
            linear("records/s"),
            over(&[("records/s", "/records_per_sec", 1.0)]),
        ),
        figure(
            "perf-latency",
            "perf: latency of a record",
            linear("seconds"),
            LATENCY,
            over(&[
                ("p50", "/latency_us/p50", 1e-3),
                ("p99", "/latency_us/p99", 1e-3),
                ("p99.9", "/latency_us/p999", 1e-3),
            ]),
        ),
    ]
}

/// Plots the intervals of a workload, and the latencies of its whole test.
pub(super) fn omb(results: &[&NamedResult]) -> Vec<Figure> {
    let mut figures = vec![
        figure(
            "omb-rates",
            "Workload: messages per second",
            linear("interval, ten seconds each"),
            linear("messages/s"),
            over_intervals(results, &[("published", "publishRate"), ("consumed", "consumeRate")]),
        ),
        figure(
            "omb-latency",
            "Workload: latency from the intended send",
            NINES,
            LATENCY,
            latencies(results),
        ),
    ];
    let backlog = over_intervals(results, &[("backlog", "backlog")]);
    let is_any = backlog.iter().flat_map(|series| &series.points).any(|(_, value)| *value > 0.0);
    if is_any {
        figures.push(figure(
            "omb-backlog",
            "Workload: messages that wait for consumers",
            linear("interval, ten seconds each"),
            linear("messages"),
            backlog,
        ));
    }
    figures
}

/// Returns a line for each list of numbers, which have one number for each interval.
fn over_intervals(results: &[&NamedResult], lists: &[(&str, &str)]) -> Vec<ChartSeries> {
    let mut series = Vec::new();
    for (run, named) in results.iter().enumerate() {
        for (measure, (label, key)) in lists.iter().enumerate() {
            let values = (1_u32..).zip(rows_of(&named.result, key));
            let points = values.filter_map(|(at, value)| Some((f64::from(at), value.as_f64()?)));
            let name = series_name(label, &named.name, results.len());
            series.push(ChartSeries { name, measure, run, points: points.collect() });
        }
    }
    series
}

fn latencies(results: &[&NamedResult]) -> Vec<ChartSeries> {
    let mut series = Vec::new();
    for (run, named) in results.iter().enumerate() {
        for (measure, (label, begin, factor)) in OMB_LATENCIES.into_iter().enumerate() {
            let points = PERCENTILES.into_iter().filter_map(|(end, percent)| {
                let value = named.result[format!("{begin}{end}")].as_f64()?;
                // The number of nines makes the tail visible.
                Some((1.0 / (1.0 - percent / 100.0), value * factor))
            });
            let name = series_name(label, &named.name, results.len());
            series.push(ChartSeries { name, measure, run, points: points.collect() });
        }
    }
    series
}
