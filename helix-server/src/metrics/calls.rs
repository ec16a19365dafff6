//! Calls to the public services: how many are open, how each ended, and why it failed.
//! The labels are those of the services as they are built, whatever a client sends.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};

use super::{Counter, Metrics, Name, Page};

/// What is none of the methods or reasons that were named.
const OTHER: &str = "other";

/// The codes of gRPC, by number.
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
/// Also that of a client that went away before its call had ended.
const CANCELLED: usize = 1;
const UNKNOWN: usize = 2;

/// Nothing is counted before the methods and reasons have been named.
#[derive(Debug, Default)]
pub struct Calls(OnceLock<Table>);

#[derive(Debug)]
struct Table {
    methods: Places,
    /// In the order of `methods`.
    rows: Vec<Row>,
    reasons: Places,
    failures: Vec<Counter>,
}

#[derive(Debug, Default)]
struct Row {
    open: AtomicI64,
    ended: [Counter; CODES.len()],
}

/// Names and their places; the last one is that of all others.
#[derive(Debug)]
struct Places {
    names: Vec<String>,
    places: HashMap<String, usize>,
}

impl Places {
    fn new(mut names: Vec<String>) -> Self {
        names.push(OTHER.to_owned());
        let places = names.iter().cloned().zip(0..).collect();
        Self { names, places }
    }

    fn of(&self, name: &str) -> usize {
        self.places.get(name).copied().unwrap_or(self.names.len() - 1)
    }
}

impl Calls {
    /// Says, once, which methods ("package.Service/Method") and reasons there are.
    pub fn name(&self, methods: Vec<String>, reasons: Vec<String>) {
        let rows = || std::iter::repeat_with(Row::default).take(methods.len() + 1).collect();
        let failures =
            || std::iter::repeat_with(Counter::default).take(reasons.len() + 1).collect();
        let (rows, failures) = (rows(), failures());
        let table =
            Table { methods: Places::new(methods), rows, reasons: Places::new(reasons), failures };
        // Ignored: they are the same every time.
        let _ = self.0.set(table);
    }

    pub(super) fn write(&self, page: &mut Page) {
        let Some(table) = self.0.get() else { return };
        for (method, row) in table.methods.names.iter().zip(&table.rows) {
            let open = row.open.load(Ordering::Relaxed);
            page.put(Name::OpenCalls, &[method], u64::try_from(open).unwrap_or(0));
            for (code, ended) in CODES.iter().zip(&row.ended) {
                // The codes that a method never ends with are left out, but for success.
                if ended.get() > 0 || *code == CODES[OK] {
                    page.put(Name::Calls, &[method, code], ended.get());
                }
            }
        }
        for (reason, failures) in table.reasons.names.iter().zip(&table.failures) {
            page.put(Name::Failures, &[reason], failures.get());
        }
    }
}

/// A call that has not ended. One that is dropped was given up by the client.
#[derive(Debug)]
pub struct OpenCall {
    metrics: Arc<Metrics>,
    method: usize,
    code: usize,
}

impl OpenCall {
    /// `path` is that of the request: "/package.Service/Method".
    pub fn begin(metrics: &Arc<Metrics>, path: &str) -> Option<Self> {
        let table = metrics.calls.0.get()?;
        let method = table.methods.of(path.trim_start_matches('/'));
        table.rows[method].open.fetch_add(1, Ordering::Relaxed);
        Some(Self { metrics: metrics.clone(), method, code: CANCELLED })
    }

    /// How it ended: the code as it stands in `grpc-status`, and why where it failed.
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
        let mut page = Page::default();
        metrics.write(&mut page);
        page.to_string()
    }

    #[test]
    fn a_call_is_open_until_it_ends_or_is_given_up() {
        let metrics = Arc::new(Metrics::default());
        assert!(OpenCall::begin(&metrics, "/p.S/M").is_none(), "nothing is named yet");
        metrics.calls.name(vec!["p.S/M".to_owned()], vec!["DISK_FULL".to_owned()]);
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
