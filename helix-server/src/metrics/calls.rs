//! Metrics of calls to the public services: open calls, status codes and failure reasons.
//! Labels come from the services' descriptors, never from what a client sends.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};

use super::{Counter, MetricName, Metrics, MetricsPage};

/// Label of unknown methods and reasons.
const OTHER: &str = "other";

/// Status codes of gRPC, by number.
const CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];
const OK: usize = 0;
/// Also the code of a call that its client gave up.
const CANCELLED: usize = 1;
const UNKNOWN: usize = 2;

/// Counts calls, once their methods and reasons have been registered.
#[derive(Debug, Default)]
pub struct CallMetrics(OnceLock<CallTable>);

#[derive(Debug)]
struct CallTable {
    methods: NameIndex,
    /// In the order of `methods`.
    rows: Vec<MethodCalls>,
    reasons: NameIndex,
    failures: Vec<Counter>,
}

#[derive(Debug, Default)]
struct MethodCalls {
    open: AtomicI64,
    ended: [Counter; CODES.len()],
}

/// Label values and their indices. The last one stands for all others.
#[derive(Debug)]
struct NameIndex {
    names: Vec<String>,
    indices: HashMap<String, usize>,
}

impl NameIndex {
    fn new(mut names: Vec<String>) -> Self {
        names.push(OTHER.to_owned());
        let indices = names.iter().cloned().zip(0..).collect();
        Self { names, indices }
    }

    fn of(&self, name: &str) -> usize {
        self.indices.get(name).copied().unwrap_or(self.names.len() - 1)
    }
}

impl CallMetrics {
    /// Registers the methods ("package.Service/Method") and reasons; later calls have no effect.
    pub fn register(&self, methods: Vec<String>, reasons: Vec<String>) {
        let rows =
            || std::iter::repeat_with(MethodCalls::default).take(methods.len() + 1).collect();
        let failures =
            || std::iter::repeat_with(Counter::default).take(reasons.len() + 1).collect();
        let (rows, failures) = (rows(), failures());
        let table = CallTable {
            methods: NameIndex::new(methods),
            rows,
            reasons: NameIndex::new(reasons),
            failures,
        };
        // Ignored: later calls register the same names.
        let _ = self.0.set(table);
    }

    pub(super) fn write(&self, page: &mut MetricsPage) {
        let Some(table) = self.0.get() else { return };
        for (method, row) in table.methods.names.iter().zip(&table.rows) {
            let open = row.open.load(Ordering::Relaxed);
            page.put(MetricName::OpenCalls, &[method], u64::try_from(open).unwrap_or(0));
            for (code, ended) in CODES.iter().zip(&row.ended) {
                // Codes that a method has never ended with are left out, except OK.
                if ended.get() > 0 || *code == CODES[OK] {
                    page.put(MetricName::Calls, &[method, code], ended.get());
                }
            }
        }
        for (reason, failures) in table.reasons.names.iter().zip(&table.failures) {
            page.put(MetricName::Failures, &[reason], failures.get());
        }
    }
}

/// A call that has not ended. Dropping it counts it as given up by the client.
#[derive(Debug)]
pub struct OpenCall {
    metrics: Arc<Metrics>,
    method: usize,
    code: usize,
}

impl OpenCall {
    /// Counts a new call. `path` is the request's: "/package.Service/Method".
    pub fn begin(metrics: &Arc<Metrics>, path: &str) -> Option<Self> {
        let table = metrics.calls.0.get()?;
        let method = table.methods.of(path.trim_start_matches('/'));
        table.rows[method].open.fetch_add(1, Ordering::Relaxed);
        Some(Self { metrics: metrics.clone(), method, code: CANCELLED })
    }

    /// Counts the end of the call: its `grpc-status`, and the reason of a failure.
    pub fn end(mut self, code: Option<&str>, reason: Option<&str>) {
        let code = code.and_then(|code| code.parse().ok());
        self.code = code.filter(|code| *code < CODES.len()).unwrap_or(UNKNOWN);
        if self.code != OK
            && let Some(table) = self.metrics.calls.0.get()
        {
            table.failures[table.reasons.of(reason.unwrap_or(OTHER))].add(1);
        }
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        if let Some(table) = self.metrics.calls.0.get() {
            let row = &table.rows[self.method];
            row.open.fetch_sub(1, Ordering::Relaxed);
            row.ended[self.code].add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(metrics: &Metrics) -> String {
        let mut page = MetricsPage::default();
        metrics.write(&mut page);
        page.to_string()
    }

    #[test]
    fn counts_calls_as_open_until_they_end_or_are_dropped() {
        let metrics = Arc::new(Metrics::default());
        assert!(OpenCall::begin(&metrics, "/p.S/M").is_none(), "nothing is registered yet");
        metrics.calls.register(vec!["p.S/M".to_owned()], vec!["DISK_FULL".to_owned()]);
        let begin = |path| OpenCall::begin(&metrics, path).unwrap();
        let (first, second, third) = (begin("/p.S/M"), begin("/p.S/M"), begin("/x.Y/Z"));
        assert!(page(&metrics).contains("helix_calls_open{method=\"p.S/M\"} 2\n"));
        first.end(Some("8"), Some("DISK_FULL"));
        drop(second);
        third.end(Some("99"), Some("anything"));
        begin("/p.S/M").end(Some("0"), None);
        let page = page(&metrics);
        for line in [
            "helix_calls_open{method=\"p.S/M\"} 0",
            "helix_calls_total{method=\"p.S/M\",code=\"OK\"} 1",
            "helix_calls_total{method=\"p.S/M\",code=\"RESOURCE_EXHAUSTED\"} 1",
            "helix_calls_total{method=\"p.S/M\",code=\"CANCELLED\"} 1",
            "helix_calls_total{method=\"other\",code=\"UNKNOWN\"} 1",
            "helix_failures_total{reason=\"DISK_FULL\"} 1",
            "helix_failures_total{reason=\"other\"} 1",
        ] {
            assert!(page.lines().any(|there| there == line), "{line}: {page}");
        }
    }
}
