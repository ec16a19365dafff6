//! Table of a result of compaction by key.

use serde_json::Value;

use super::{ResultTable, count, ms, rows, scaled, table};
use crate::format::known;

const COMPACTION_COLUMNS: [&str; 12] = [
    "updates",
    "keys",
    "updates/s",
    "p99 ms",
    "p99 uncompacted",
    "ratio",
    "live MB",
    "held MB",
    "held/live",
    "clean after s",
    "records left",
    "lost keys",
];

/// Returns the table of the pairs of runs.
pub(super) fn pairs(result: &Value) -> ResultTable {
    let row = |row: &Value| {
        let p99 = |run: &str| ms(&row[run]["latency_us"]["p99"]);
        let mb = |name: &str| count(&scaled(&row[name], 1e-6));
        vec![
            count(&row["updates"]),
            count(&row["keys"]),
            count(&row["table"]["records_per_sec"]),
            p99("table"),
            p99("reference"),
            known(row["p99_ratio"].as_f64(), 3),
            mb("live_bytes"),
            mb("held_bytes"),
            known(row["amplification"].as_f64(), 3),
            known(row["clean_after_secs"].as_f64(), 1),
            count(&row["records_left"]),
            count(&row["lost_keys"]),
        ]
    };
    table(result, &COMPACTION_COLUMNS, rows(&result["rows"]).iter().map(row).collect())
}
