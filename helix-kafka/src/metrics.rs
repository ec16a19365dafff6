//! Metrics of the gateway, in Prometheus' text format. Counting costs a few atomic additions a
//! request and nothing a record.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::ApiKey;
use tokio::time::Instant;

use crate::process;
use crate::response_codes::ResponseCodes;
use crate::state::GatewayState;
use crate::versions::SERVED_APIS;

/// Content type of the page.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Upper bounds of the buckets of times, in milliseconds.
const BOUNDS_MS: [u64; 12] = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 5_000, 30_000];

/// Number of served APIs.
const APIS: usize = SERVED_APIS.len();

/// A number that only grows.
#[derive(Debug, Default)]
pub struct GatewayCounter(AtomicU64);

impl GatewayCounter {
    /// Adds to the number.
    pub(crate) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// Returns the number.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Requests of one API.
#[derive(Debug, Default)]
struct ApiMetrics {
    /// One for each bound, and one above them.
    buckets: [GatewayCounter; BOUNDS_MS.len() + 1],
    sum_us: GatewayCounter,
    /// Codes in responses. A code is one of Kafka's, so there are few.
    errors: Mutex<BTreeMap<i16, u64>>,
}

/// Counts since the start of the gateway.
#[derive(Debug)]
pub struct GatewayMetrics {
    started: Instant,
    /// Connections accepted.
    pub connections: GatewayCounter,
    /// Connections that have ended.
    pub(crate) ended: GatewayCounter,
    /// Connections closed because too many were open.
    pub(crate) refused: GatewayCounter,
    /// Connections closed because of a defect of a request.
    pub(crate) protocol_errors: GatewayCounter,
    /// Logins that were refused or did not come.
    pub(crate) failed_logins: GatewayCounter,
    /// Bytes of requests and responses.
    pub(crate) received_bytes: GatewayCounter,
    pub(crate) sent_bytes: GatewayCounter,
    /// Native batches that were converted for Kafka readers, and those found converted.
    pub(crate) converted_batches: GatewayCounter,
    pub(crate) converted_hits: GatewayCounter,
    /// Produced batches that were stored with another codec.
    pub(crate) recompressed_batches: GatewayCounter,
    /// Produced batches that were refused before they were sent to the cluster.
    pub(crate) refused_batches: GatewayCounter,
    apis: [ApiMetrics; APIS],
}

impl Default for GatewayMetrics {
    fn default() -> Self {
        Self {
            started: Instant::now(),
            connections: GatewayCounter::default(),
            ended: GatewayCounter::default(),
            refused: GatewayCounter::default(),
            protocol_errors: GatewayCounter::default(),
            failed_logins: GatewayCounter::default(),
            received_bytes: GatewayCounter::default(),
            sent_bytes: GatewayCounter::default(),
            converted_batches: GatewayCounter::default(),
            converted_hits: GatewayCounter::default(),
            recompressed_batches: GatewayCounter::default(),
            refused_batches: GatewayCounter::default(),
            apis: std::array::from_fn(|_| ApiMetrics::default()),
        }
    }
}

impl GatewayMetrics {
    /// Counts a request that was answered after this time.
    pub(crate) fn on_answer(&self, key: ApiKey, time: Duration) {
        let Some(api) = self.api(key) else { return };
        let time_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_MS.partition_point(|bound| *bound <= time_ms);
        api.buckets[bucket].add(1);
        api.sum_us.add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    /// Counts the errors of a response.
    pub(crate) fn on_response(&self, key: ApiKey, response: &impl ResponseCodes) {
        response.visit_codes(&mut |code| self.on_code(key, code));
    }

    /// Counts a code of a response, unless it is 0.
    pub(crate) fn on_code(&self, key: ApiKey, code: i16) {
        if code == 0 {
            return;
        }
        let Some(api) = self.api(key) else { return };
        let mut errors = api.errors.lock().unwrap_or_else(PoisonError::into_inner);
        *errors.entry(code).or_default() += 1;
    }

    fn api(&self, key: ApiKey) -> Option<&ApiMetrics> {
        let index = SERVED_APIS.iter().position(|api| api.key == key)?;
        self.apis.get(index)
    }
}

/// Metrics as text.
#[derive(Debug, Default)]
struct GatewayPage(String);

impl GatewayPage {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = match labels.is_empty() {
            true => writeln!(self.0, "{name} {value}"),
            false => writeln!(self.0, "{name}{{{labels}}} {value}"),
        };
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.head(name, "counter", help);
        self.sample(name, "", value);
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.head(name, "gauge", help);
        self.sample(name, "", value);
    }
}

/// Returns the name of an error as Kafka's documentation has it.
fn error_name(code: i16) -> String {
    let name = match ResponseError::try_from_code(code) {
        None => "None".to_owned(),
        Some(ResponseError::Unknown(code)) => format!("Code{code}"),
        Some(error) => format!("{error:?}"),
    };
    let mut spelled = String::with_capacity(name.len() + 8);
    for (index, letter) in name.char_indices() {
        if letter.is_ascii_uppercase() && index > 0 {
            spelled.push('_');
        }
        spelled.push(letter.to_ascii_uppercase());
    }
    spelled
}

/// Returns the page. `is_ready` is the result of the readiness probe.
pub(crate) fn page(state: &GatewayState, is_ready: bool) -> String {
    let metrics = &state.metrics;
    let mut page = GatewayPage::default();
    page.head("helix_kafka_build_info", "gauge", "Always 1; the label is the version");
    let version = concat!("version=\"", env!("CARGO_PKG_VERSION"), "\"");
    page.sample("helix_kafka_build_info", version, 1);
    let help = "1 while a node of the cluster answers (/readyz), else 0";
    page.gauge("helix_kafka_ready", help, u8::from(is_ready));
    let uptime = metrics.started.elapsed().as_secs_f64();
    page.gauge("helix_kafka_uptime_seconds", "Time since the gateway started", uptime);
    let help = "CPU time of the process, user and system";
    page.head("process_cpu_seconds_total", "counter", help);
    page.sample("process_cpu_seconds_total", "", process::cpu_seconds());
    let help = "Resident memory of the process";
    page.gauge("process_resident_memory_bytes", help, process::resident_bytes());
    let ended = metrics.ended.get();
    let open = metrics.connections.get().saturating_sub(ended);
    page.gauge("helix_kafka_open_connections", "Open connections of clients", open);
    let counters = [
        ("connections", "Accepted connections", &metrics.connections),
        ("refused_connections", "Connections closed because too many were open", &metrics.refused),
        (
            "protocol_errors",
            "Connections closed because of a defect of a request",
            &metrics.protocol_errors,
        ),
        ("failed_logins", "Logins that were refused or did not come", &metrics.failed_logins),
        ("received_bytes", "Bytes of requests", &metrics.received_bytes),
        ("sent_bytes", "Bytes of responses", &metrics.sent_bytes),
        (
            "converted_batches",
            "Native batches that were converted for Kafka's clients",
            &metrics.converted_batches,
        ),
        (
            "converted_batch_hits",
            "Native batches that were found converted",
            &metrics.converted_hits,
        ),
        (
            "recompressed_batches",
            "Batches with gzip or snappy that were stored as LZ4",
            &metrics.recompressed_batches,
        ),
        (
            "refused_batches",
            "Batches that were refused before they were sent to the cluster",
            &metrics.refused_batches,
        ),
    ];
    for (name, help, counter) in counters {
        page.counter(&format!("helix_kafka_{name}_total"), help, counter.get());
    }
    let help = "Memory of requests and responses";
    page.gauge("helix_kafka_memory_bytes", help, state.memory.used());
    let help = "Limit of helix_kafka_memory_bytes";
    page.gauge("helix_kafka_memory_limit_bytes", help, state.limits.memory_bytes);
    let (groups, members) = state.groups.counts();
    page.gauge("helix_kafka_groups", "Groups with members at this gateway", groups);
    page.gauge("helix_kafka_group_members", "Members of these groups", members);
    let help = "Gateways that answer, this one included";
    page.gauge("helix_kafka_gateways_up", help, state.brokers.up().count());
    times(&mut page, metrics);
    errors(&mut page, metrics);
    page.0
}

fn times(page: &mut GatewayPage, metrics: &GatewayMetrics) {
    let name = "helix_kafka_request_seconds";
    page.head(name, "histogram", "Time from a request to its response, by API");
    for (api, counts) in SERVED_APIS.iter().zip(&metrics.apis) {
        let buckets: Vec<u64> = counts.buckets.iter().map(GatewayCounter::get).collect();
        if buckets.iter().all(|count| *count == 0) {
            continue;
        }
        let api = api.key;
        let mut total = 0;
        let bounds = BOUNDS_MS.iter().map(|bound| (*bound as f64 / 1e3).to_string());
        for (bound, count) in bounds.chain(["+Inf".to_owned()]).zip(buckets) {
            total += count;
            let labels = format!("api=\"{api:?}\",le=\"{bound}\"");
            page.sample("helix_kafka_request_seconds_bucket", &labels, total);
        }
        let labels = format!("api=\"{api:?}\"");
        let sum = counts.sum_us.get() as f64 / 1e6;
        page.sample("helix_kafka_request_seconds_sum", &labels, sum);
        page.sample("helix_kafka_request_seconds_count", &labels, total);
    }
}

fn errors(page: &mut GatewayPage, metrics: &GatewayMetrics) {
    let name = "helix_kafka_errors_total";
    page.head(name, "counter", "Error codes in responses, by API; a response may have several");
    for (api, counts) in SERVED_APIS.iter().zip(&metrics.apis) {
        let errors = counts.errors.lock().unwrap_or_else(PoisonError::into_inner);
        for (code, count) in &*errors {
            let labels = format!("api=\"{:?}\",error=\"{}\"", api.key, error_name(*code));
            page.sample(name, &labels, count);
        }
    }
}

#[cfg(test)]
mod tests {
    use kafka_protocol::messages::HeartbeatResponse;

    use super::*;

    #[test]
    fn errors_have_kafkas_names() {
        for (code, name) in [
            (-1, "UNKNOWN_SERVER_ERROR"),
            (6, "NOT_LEADER_OR_FOLLOWER"),
            (27, "REBALANCE_IN_PROGRESS"),
            (0, "NONE"),
            (3000, "CODE3000"),
        ] {
            assert_eq!(error_name(code), name);
        }
    }

    #[test]
    fn times_and_errors_are_counted_by_api() {
        let metrics = GatewayMetrics::default();
        for (api, millis) in [(ApiKey::Produce, 3), (ApiKey::Produce, 90_000), (ApiKey::Fetch, 1)] {
            metrics.on_answer(api, Duration::from_millis(millis));
        }
        metrics.on_response(ApiKey::Heartbeat, &HeartbeatResponse::default());
        metrics.on_response(ApiKey::Heartbeat, &HeartbeatResponse::default().with_error_code(27));
        let mut page = GatewayPage::default();
        times(&mut page, &metrics);
        errors(&mut page, &metrics);
        for line in [
            "helix_kafka_request_seconds_bucket{api=\"Produce\",le=\"0.002\"} 0",
            "helix_kafka_request_seconds_bucket{api=\"Produce\",le=\"0.005\"} 1",
            "helix_kafka_request_seconds_bucket{api=\"Produce\",le=\"30\"} 1",
            "helix_kafka_request_seconds_bucket{api=\"Produce\",le=\"+Inf\"} 2",
            "helix_kafka_request_seconds_sum{api=\"Produce\"} 90.003",
            "helix_kafka_request_seconds_count{api=\"Fetch\"} 1",
            "helix_kafka_errors_total{api=\"Heartbeat\",error=\"REBALANCE_IN_PROGRESS\"} 1",
        ] {
            assert!(page.0.lines().any(|there| there == line), "{line}: {}", page.0);
        }
    }
}
