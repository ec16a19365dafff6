//! Limits of a load: the ceiling of its shape, and the log alone.
//!
//! A slow disk or a busy host shows in the limits, too, so the ratio to the lower one is what a
//! node is judged by.

use serde_json::Value;

/// Modes whose records go through the log.
const WRITES: [&str; 3] = ["write", "stream", "pubsub"];

/// Flags that must be equal for a ceiling to be that of a load.
const SHAPE: [&str; 8] =
    ["mode", "size", "batch_size", "clients", "in_flight", "stream", "rate", "compression"];

/// Results of `ceiling` and `wal`.
#[derive(Debug, Default)]
pub(crate) struct KnownLimits<'a> {
    ceilings: Vec<&'a Value>,
    logs: Vec<&'a Value>,
}

/// Limits of one load, in units of 10^6 bytes per second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct LoadLimits {
    pub(crate) ceiling: Option<f64>,
    pub(crate) log: Option<f64>,
}

impl LoadLimits {
    /// Returns the ratio to the lower limit; `None` without any.
    pub(crate) fn ratio(self, mb_per_sec: Option<f64>) -> Option<f64> {
        let lower = self.ceiling.into_iter().chain(self.log).reduce(f64::min)?;
        Some(mb_per_sec? / lower)
    }
}

impl<'a> KnownLimits<'a> {
    /// Finds the limits among results.
    pub(crate) fn among(results: impl IntoIterator<Item = &'a Value>) -> Self {
        let mut limits = Self::default();
        for result in results {
            if is_ceiling(result) {
                limits.ceilings.push(result);
            } else if result["mode"] == "wal" {
                limits.logs.push(result);
            }
        }
        limits
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ceilings.is_empty() && self.logs.is_empty()
    }

    /// Returns the limits of a single run.
    pub(crate) fn of_run(&self, run: &Value) -> LoadLimits {
        let load = &run["load"];
        let is_same_shape =
            |ceiling: &&&Value| SHAPE.iter().all(|flag| ceiling["load"][flag] == load[flag]);
        let ceilings = self.ceilings.iter().filter(is_same_shape);
        let ceiling = ceilings.filter_map(|ceiling| ceiling["mb_per_sec"].as_f64());
        LoadLimits {
            ceiling: ceiling.reduce(f64::max),
            log: self.log_of_load(load, &run["storage"]),
        }
    }

    /// Returns the speed of the log for a load; `None` for compressed batches, of which fewer bytes
    /// reach the log than the load counts.
    pub(crate) fn log_of_load(&self, load: &Value, storage: &Value) -> Option<f64> {
        let is_compressed = load["compression"].as_str().is_some_and(|codec| codec != "none");
        let mode = load["mode"].as_str().unwrap_or_default();
        self.log(mode, storage).filter(|_| !is_compressed)
    }

    /// Returns the speed of the log with this storage, if the mode writes.
    pub(crate) fn log(&self, mode: &str, storage: &Value) -> Option<f64> {
        let is_memory = |storage: &Value| storage == "memory";
        let logs = self.logs.iter().filter(|log| is_memory(&log["storage"]) == is_memory(storage));
        let fastest = logs.filter_map(|log| log["mb_per_sec"].as_f64()).reduce(f64::max);
        fastest.filter(|_| WRITES.contains(&mode) && storage != "none")
    }
}

/// Reports whether a result is that of a ceiling, which stores nothing.
pub(crate) fn is_ceiling(result: &Value) -> bool {
    result["load"].is_object() && result["storage"] == "none" && result["mode"] != "perf"
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn run(storage: &str, clients: u64, mb_per_sec: f64) -> Value {
        let load = json!({ "mode": "write", "clients": clients, "size": 1024 });
        json!({ "storage": storage, "mb_per_sec": mb_per_sec, "load": load })
    }

    #[test]
    fn ratio_is_to_the_lower_limit() {
        let results = [
            run("none", 4, 2000.0),
            run("none", 16, 3000.0),
            json!({ "mode": "wal", "storage": "disk", "mb_per_sec": 500.0 }),
        ];
        let limits = KnownLimits::among(&results);
        let durable = limits.of_run(&run("disk", 4, 250.0));
        assert_eq!(durable, LoadLimits { ceiling: Some(2000.0), log: Some(500.0) });
        assert_eq!(durable.ratio(Some(250.0)), Some(0.5));
        // No log in memory was measured, and no ceiling of one client.
        let memory = limits.of_run(&run("memory", 4, 1000.0));
        assert_eq!(memory.ratio(Some(1000.0)), Some(0.5));
        assert_eq!(limits.of_run(&run("memory", 1, 1000.0)), LoadLimits::default());
        assert_eq!(LoadLimits::default().ratio(Some(1.0)), None);
        assert_eq!(limits.log("read", &Value::from("disk")), None);
    }

    #[test]
    fn compressed_load_has_limits_of_its_own() {
        let compressed = |mut run: Value, codec: &str| {
            run["load"]["compression"] = codec.into();
            run
        };
        let results = [
            compressed(run("none", 4, 2000.0), "none"),
            json!({ "mode": "wal", "storage": "disk", "mb_per_sec": 500.0 }),
        ];
        let limits = KnownLimits::among(&results);
        let plain = limits.of_run(&compressed(run("disk", 4, 250.0), "none"));
        assert_eq!(plain, LoadLimits { ceiling: Some(2000.0), log: Some(500.0) });
        let lz4 = limits.of_run(&compressed(run("disk", 4, 900.0), "lz4"));
        assert_eq!(lz4, LoadLimits::default());
    }
}
