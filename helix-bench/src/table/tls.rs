//! Runs of the same load with and without TLS, beside each other.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{ResultTable, bytes, count, is_load, ms, rows, text};
use crate::compare::MedianRange;
use crate::format::known;

const COLUMNS: [&str; 12] = [
    "load",
    "storage",
    "clients",
    "record x batch",
    "pairs",
    "unit",
    "without TLS",
    "with TLS",
    "ratio",
    "lowest to highest",
    "p50 ms without TLS",
    "with TLS",
];

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

/// Runs that were made with and without TLS, in the order of the results.
#[derive(Debug, Default)]
pub(super) struct TlsPairs<'a> {
    by_shape: BTreeMap<RunShape, TlsSides<'a>>,
}

/// Runs of one load, with their speeds.
#[derive(Debug, Default)]
struct TlsSides<'a> {
    plain: Vec<(f64, &'a Value)>,
    tls: Vec<(f64, &'a Value)>,
}

impl<'a> TlsPairs<'a> {
    /// Finds the pairs among results.
    pub(super) fn among(results: &'a [Value]) -> Self {
        let mut pairs = Self::default();
        for result in results {
            if is_load(result) {
                pairs.add(PairMeasure::Records, &result["records_per_sec"], result);
            } else if result["mode"] == "connections" {
                for row in rows(&result["rows"]) {
                    pairs.add(PairMeasure::Connections, &row["opened_per_sec"], &row["run"]);
                }
            }
        }
        pairs.by_shape.retain(|_, sides| !sides.plain.is_empty() && !sides.tls.is_empty());
        pairs
    }

    fn add(&mut self, measure: PairMeasure, per_sec: &Value, run: &'a Value) {
        // Results of earlier versions do not tell.
        let (Some(per_sec), Some(is_tls)) = (per_sec.as_f64(), run["tls"].as_bool()) else {
            return;
        };
        let sides = self.by_shape.entry(shape(measure, run)).or_default();
        let side = if is_tls { &mut sides.tls } else { &mut sides.plain };
        side.push((per_sec, run));
    }

    /// Reports whether a run is in a pair.
    pub(super) fn contains(&self, run: &Value) -> bool {
        let shape = shape(PairMeasure::Records, run);
        run["tls"].is_boolean() && self.by_shape.contains_key(&shape)
    }

    /// Returns the table; `None` without pairs.
    pub(super) fn table(&self) -> Option<ResultTable> {
        let rows = self.by_shape.iter().filter_map(|((measure, ..), sides)| sides.row(*measure));
        let rows: Vec<Vec<String>> = rows.collect();
        let title = "With and without TLS: medians, and the ratio of each pair of runs".to_owned();
        let (columns, notes) = (COLUMNS.to_vec(), Vec::new());
        (!rows.is_empty()).then_some(ResultTable { title, columns, rows, notes })
    }
}

impl TlsSides<'_> {
    fn row(&self, measure: PairMeasure) -> Option<Vec<String>> {
        let ratios = self.plain.iter().zip(&self.tls).map(|(plain, tls)| tls.0 / plain.0);
        let ratio = MedianRange::of(ratios)?;
        let (_, run) = self.plain.first()?;
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
            self.plain.len().min(self.tls.len()).to_string(),
            unit.to_owned(),
            speed(&self.plain),
            speed(&self.tls),
            known(Some(ratio.median), 2),
            format!("{} to {}", known(Some(ratio.min), 2), known(Some(ratio.max), 2)),
            p50(&self.plain),
            p50(&self.tls),
        ])
    }
}

fn shape(measure: PairMeasure, run: &Value) -> RunShape {
    let load = &run["load"];
    let flags = ["mode", "stream", "rate", "acks", "compression"];
    let mode = flags.map(|name| load[name].to_string()).join(" ");
    let nodes = run["node_count"].as_u64().unwrap_or_default();
    let numbers = SHAPE.map(|name| load[name].as_u64().unwrap_or_default());
    (measure, mode, text(&run["storage"]), nodes, numbers)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::table::tables_of_all;

    fn run(tls: bool, clients: u64, per_sec: f64) -> Value {
        json!({
            "records_per_sec": per_sec, "mb_per_sec": 1.0, "errors": 0, "node_count": 1,
            "storage": "memory", "tls": tls, "latency_us": { "p50": 1e5 / per_sec },
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
        let pairs = TlsPairs::among(&results).table().unwrap();
        assert_eq!(pairs.rows[0][..3], ["connections", "memory", "100"]);
        assert_eq!(pairs.rows[0][5..9], ["opened/s", "4,000", "1,000", "0.25"]);
        assert!(TlsPairs::among(&results[..1]).table().is_none(), "one side is missing");
    }
}
