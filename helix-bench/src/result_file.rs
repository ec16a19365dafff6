//! Stored results of all modes.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

/// Reads a stored result.
///
/// # Errors
/// The file cannot be read, or is no JSON.
pub(crate) fn read_result(path: &Path) -> Result<Value> {
    let name = path.display();
    let file = std::fs::OpenOptions::new().read(true).open(path);
    let file = file.with_context(|| format!("open {name}"))?;
    serde_json::from_reader(std::io::BufReader::new(file)).with_context(|| format!("read {name}"))
}

/// Returns the mode of a result; `unknown` without one.
pub(crate) fn mode_of(result: &Value) -> &str {
    if is_omb(result) {
        return "omb";
    }
    let mode = result["mode"].as_str().or_else(|| result["load"]["mode"].as_str());
    mode.unwrap_or("unknown")
}

/// Reports whether a result has the format of `omb`, which has no mode.
fn is_omb(result: &Value) -> bool {
    result["aggregatedPublishLatencyAvg"].is_number()
}
