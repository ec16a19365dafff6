//! Runs of the same load with and without a feature, beside each other.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{ResultTable, bytes, count, is_load, ms, rows, text};
use crate::format::known;
use crate::median_range::MedianRange;

/// A feature that runs of one load may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Feature {
    Tls,
    /// The calls have a token, and so a caller whose rights are checked.
    Token,
}

impl Feature {
    pub(super) const ALL: [Self; 2] = [Self::Tls, Self::Token];

    /// Returns the field of a run that has the feature.
    fn field(self) -> &'static str {
        match self {
            Self::Tls => "tls",
            Self::Token => "token",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Tls => "With and without TLS: medians, and the ratio of each pair of runs",
            Self::Token => "With and without a token: medians, and the ratio of each pair of runs",
        }
    }

    fn columns(self) -> Vec<&'static str> {
        let [without, with, p50_without] = match self {
            Self::Tls => ["without TLS", "with TLS", "p50 ms without TLS"],
            Self::Token => ["without token", "with token", "p50 ms without token"],
        };
        let load = ["load", "storage", "clients", "record x batch", "pairs", "unit"];
        let range = "lowest to highest";
        let measures =
            [without, with, "ratio", range, p50_without, with, "server CPU, ratio", range];
        load.into_iter().chain(measures).collect()
    }
}

/// Fields that are equal in runs of one load, beside mode and storage.
const SHAPE: [&str; 5] = ["clients", "connections", "size", "batch_size", "in_flight"];

/// Measure that is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum PairMeasure {
    Records,
    /// The connections that were opened for a run.
    Connections,
}

/// Load and setup of a run; orders the rows.
type RunShape = (PairMeasure, String, String, u64, [u64; 5]);

/// Runs that were made with and without a feature, in the order of the results.
#[derive(Debug)]
pub(super) struct FeaturePairs<'a> {
    feature: Feature,
    by_shape: BTreeMap<RunShape, FeatureSides<'a>>,
}

/// Runs of one load, with their speeds.
#[derive(Debug, Default)]
struct FeatureSides<'a> {
    without: Vec<(f64, &'a Value)>,
    with: Vec<(f64, &'a Value)>,
}

impl<'a> FeaturePairs<'a> {
    /// Finds the pairs among results.
    pub(super) fn among(feature: Feature, results: &'a [Value]) -> Self {
        let mut pairs = Self { feature, by_shape: BTreeMap::new() };
        for result in results {
            if is_load(result) {
                pairs.add(PairMeasure::Records, &result["records_per_sec"], result);
            } else if result["mode"] == "connections" {
                for row in rows(&result["rows"]) {
                    pairs.add(PairMeasure::Connections, &row["opened_per_sec"], &row["run"]);
                }
            }
        }
        pairs.by_shape.retain(|_, sides| !sides.without.is_empty() && !sides.with.is_empty());
        pairs
    }

    fn add(&mut self, measure: PairMeasure, per_sec: &Value, run: &'a Value) {
        // Results of earlier versions do not tell.
        let (Some(per_sec), Some(has_it)) = (per_sec.as_f64(), run[self.feature.field()].as_bool())
        else {
            return;
        };
        let shape = self.shape(measure, run);
        let sides = self.by_shape.entry(shape).or_default();
        let side = if has_it { &mut sides.with } else { &mut sides.without };
        side.push((per_sec, run));
    }

    /// Reports whether a run is in a pair.
    pub(super) fn contains(&self, run: &Value) -> bool {
        let shape = self.shape(PairMeasure::Records, run);
        run[self.feature.field()].is_boolean() && self.by_shape.contains_key(&shape)
    }

    /// Returns the table; `None` without pairs.
    pub(super) fn table(&self) -> Option<ResultTable> {
        let rows = self.by_shape.iter().filter_map(|((measure, ..), sides)| sides.row(*measure));
        let rows: Vec<Vec<String>> = rows.collect();
        let title = self.feature.title().to_owned();
        let (columns, notes) = (self.feature.columns(), Vec::new());
        (!rows.is_empty()).then_some(ResultTable { title, columns, rows, notes })
    }

    fn shape(&self, measure: PairMeasure, run: &Value) -> RunShape {
        let load = &run["load"];
        let flags = ["mode", "stream", "rate", "acks", "compression"];
        let mut mode = flags.map(|name| load[name].to_string()).join(" ");
        // Runs of a pair agree in the other features.
        for other in Feature::ALL.into_iter().filter(|other| *other != self.feature) {
            if run[other.field()] == true {
                mode = format!("{mode} {}", other.field());
            }
        }
        let nodes = run["node_count"].as_u64().unwrap_or_default();
        let numbers = SHAPE.map(|name| load[name].as_u64().unwrap_or_default());
        (measure, mode, text(&run["storage"]), nodes, numbers)
    }
}

impl FeatureSides<'_> {
    fn row(&self, measure: PairMeasure) -> Option<Vec<String>> {
        let pairs = || self.without.iter().zip(&self.with);
        let ratio = MedianRange::of(pairs().map(|(without, with)| with.0 / without.0))?;
        let cpu = |run: &Value| run["cpu"]["server_us_per_request"].as_f64();
        let cpu = pairs().filter_map(|((_, without), (_, with))| Some(cpu(with)? / cpu(without)?));
        let [ratio, cpu] = [Some(ratio), MedianRange::of(cpu)].map(median_and_range);
        let (_, run) = self.without.first()?;
        let load = &run["load"];
        let mode = text(&load["mode"]);
        let (name, unit, clients) = match measure {
            PairMeasure::Connections => {
                ("connections".to_owned(), "opened/s", &load["connections"])
            }
            PairMeasure::Records if load["stream"] == true => {
                (format!("{mode}, stream"), "records/s", &load["clients"])
            }
            PairMeasure::Records => (mode, "records/s", &load["clients"]),
        };
        let speed = |side: &[(f64, &Value)]| {
            let median = MedianRange::of(side.iter().map(|(per_sec, _)| *per_sec));
            count(&median.map_or(Value::Null, |range| Value::from(range.median)))
        };
        let p50 = |side: &[(f64, &Value)]| {
            let all = side.iter().filter_map(|(_, run)| run["latency_us"]["p50"].as_f64());
            ms(&MedianRange::of(all).map_or(Value::Null, |range| Value::from(range.median)))
        };
        Some(vec![
            name,
            text(&run["storage"]),
            count(clients),
            format!("{} x {}", bytes(&load["size"]), count(&load["batch_size"])),
            pairs().count().to_string(),
            unit.to_owned(),
            speed(&self.without),
            speed(&self.with),
            ratio.0,
            ratio.1,
            p50(&self.without),
            p50(&self.with),
            cpu.0,
            cpu.1,
        ])
    }
}

/// Returns the cells of a ratio and of its range.
fn median_and_range(ratio: Option<MedianRange>) -> (String, String) {
    let Some(MedianRange { median, min, max }) = ratio else {
        return (known(None, 2), known(None, 2));
    };
    let [median, min, max] = [median, min, max].map(|ratio| known(Some(ratio), 2));
    (median, format!("{min} to {max}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::table::tables_of_all;

    fn run(tls: bool, clients: u64, per_sec: f64) -> Value {
        json!({
            "records_per_sec": per_sec, "mb_per_sec": 1.0, "errors": 0, "node_count": 1,
            "storage": "memory", "tls": tls, "token": false,
            "latency_us": { "p50": 1e5 / per_sec },
            "cpu": { "server_us_per_request": 1e5 / per_sec },
            "load": {
                "mode": "write", "stream": false, "rate": null, "clients": clients,
                "connections": 4, "size": 1024, "batch_size": 100, "in_flight": 1,
            },
        })
    }

    #[test]
    fn runs_with_tls_are_compared_with_those_without() {
        // Another load, which the pairs must not contain.
        let mut compressed = run(true, 4, 5000.0);
        compressed["load"]["compression"] = json!("lz4");
        let results = [
            run(false, 4, 1000.0),
            run(true, 4, 800.0),
            run(true, 4, 900.0),
            run(false, 4, 1000.0),
            run(false, 16, 5.0),
            compressed,
        ];
        let tables = tables_of_all(&results, &[]).unwrap();
        let cells = [
            "write",
            "memory",
            "4",
            "1 KiB x 100",
            "2",
            "records/s",
            "1,000",
            "850",
            "0.85",
            "0.80 to 0.90",
        ];
        assert_eq!(tables[0].rows.len(), 1);
        assert_eq!(tables[0].rows[0][..10], cells);
        assert_eq!(tables[0].columns.len(), tables[0].rows[0].len());
        // The runs without a counterpart stay in the table of loads.
        assert_eq!((tables.len(), tables[1].rows.len()), (2, 2));
    }

    #[test]
    fn connections_are_compared_by_their_opening() {
        let result = |tls: bool, opened_per_sec: f64| {
            let mut run = run(tls, 10, 1000.0);
            run["load"]["rate"] = json!(1000.0);
            run["load"]["connections"] = json!(100);
            json!({
                "mode": "connections", "title": "",
                "rows": [{ "opened_per_sec": opened_per_sec, "run": run }],
            })
        };
        let results = [result(false, 4000.0), result(true, 1000.0)];
        let pairs = |results: &[Value]| FeaturePairs::among(Feature::Tls, results).table();
        let table = pairs(&results).unwrap();
        assert_eq!(table.rows[0][..3], ["connections", "memory", "100"]);
        assert_eq!(table.rows[0][5..9], ["opened/s", "4,000", "1,000", "0.25"]);
        assert!(pairs(&results[..1]).is_none(), "one side is missing");
    }

    #[test]
    fn runs_with_a_token_are_compared_with_those_without() {
        let with_token = |tls: bool, clients: u64, per_sec: f64| {
            let mut run = run(tls, clients, per_sec);
            run["token"] = json!(true);
            run
        };
        let results = [
            run(false, 4, 1000.0),
            with_token(false, 4, 500.0),
            with_token(false, 4, 1000.0),
            run(false, 4, 1000.0),
            // These differ in two features.
            run(false, 16, 5.0),
            with_token(true, 16, 5.0),
        ];
        let tables = tables_of_all(&results, &[]).unwrap();
        assert_eq!(tables[0].columns[6..8], ["without token", "with token"]);
        assert_eq!(tables[0].rows.len(), 1);
        let cells = ["1,000", "750", "0.75", "0.50 to 1.00", "0.100", "0.150"];
        assert_eq!(tables[0].rows[0][6..12], cells);
        assert_eq!(tables[0].rows[0][12..], ["1.50", "1.00 to 2.00"]);
        assert_eq!((tables.len(), tables[1].rows.len()), (2, 2));
    }
}
