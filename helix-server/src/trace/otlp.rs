//! Exports spans to an OpenTelemetry collector: OTLP over gRPC, without TLS.

use std::sync::Arc;
use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, Status};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

use super::span::SpanValue;
use super::{FinishedTrace, TraceCounts, TraceSpan};
use crate::random::Random;

/// Interval of exports. It also lets the leader's own sync end before its span is made.
const EXPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Traces of one export.
const TRACES_PER_EXPORT: usize = 256;

/// Time of an export; the traces are dropped after it.
const EXPORT_WAIT_MAX: Duration = Duration::from_secs(5);

/// Time of the last export, when the node stops.
const LAST_EXPORT_WAIT_MAX: Duration = Duration::from_secs(1);

/// Time between two lines of the log about a collector that does not answer.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// Address of the collector, and the node that traces name.
#[derive(Debug, Clone)]
pub struct OtlpSettings {
    /// "http://host:port".
    pub endpoint: String,
    pub node_id: u64,
    pub cluster_id: String,
}

/// Sends the traces of a node to a collector.
pub struct OtlpExporter {
    client: TraceServiceClient<Channel>,
    endpoint: String,
    resource: Resource,
    traces: mpsc::Receiver<FinishedTrace>,
    counts: Arc<TraceCounts>,
    random: Random,
    reported: Option<Instant>,
}

impl OtlpExporter {
    /// Creates an exporter. Connects with the first export.
    ///
    /// # Errors
    /// The endpoint is not a URI.
    pub fn new(
        settings: &OtlpSettings,
        traces: mpsc::Receiver<FinishedTrace>,
        counts: Arc<TraceCounts>,
        random: Random,
    ) -> Result<Self, String> {
        let endpoint = Endpoint::from_shared(settings.endpoint.clone());
        let endpoint = endpoint.map_err(|error| error.to_string())?;
        let endpoint = endpoint.connect_timeout(EXPORT_WAIT_MAX);
        let resource = Resource {
            attributes: vec![
                text("service.name", "helix"),
                text("service.version", env!("CARGO_PKG_VERSION")),
                text("service.instance.id", &settings.node_id.to_string()),
                text("helix.cluster_id", &settings.cluster_id),
            ],
            ..Resource::default()
        };
        Ok(Self {
            client: TraceServiceClient::new(endpoint.connect_lazy()),
            endpoint: settings.endpoint.clone(),
            resource,
            traces,
            counts,
            random,
            reported: None,
        })
    }

    /// Exports traces until `stop` is cancelled, and then what is left.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut ticks = interval(EXPORT_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => self.export_all().await,
                () = stop.cancelled() => break,
            }
        }
        self.export(LAST_EXPORT_WAIT_MAX).await;
    }

    async fn export_all(&mut self) {
        while self.export(EXPORT_WAIT_MAX).await == TRACES_PER_EXPORT {}
    }

    /// Exports the traces that are waiting, at most [`TRACES_PER_EXPORT`]. Returns their number.
    async fn export(&mut self, wait_max: Duration) -> usize {
        let mut spans = Vec::new();
        let mut count = 0;
        while count < TRACES_PER_EXPORT
            && let Ok(trace) = self.traces.try_recv()
        {
            let random = &self.random;
            let mut new_id = || random.next_u64().max(1).to_be_bytes();
            spans.extend(trace.spans(&mut new_id).into_iter().map(to_wire));
            count += 1;
        }
        if count == 0 {
            return 0;
        }
        let request = self.request(spans);
        let error = match timeout(wait_max, self.client.export(request)).await {
            Ok(Ok(_)) => None,
            Ok(Err(status)) => Some(status.to_string()),
            Err(_) => Some(format!("no response within {wait_max:?}")),
        };
        match error {
            None => self.counts.exported.add(count as u64),
            Some(error) => {
                self.counts.dropped.add(count as u64);
                self.report(&error);
            }
        }
        count
    }

    fn request(&self, spans: Vec<Span>) -> ExportTraceServiceRequest {
        let scope = InstrumentationScope { name: "helix".to_owned(), ..Default::default() };
        let spans = ScopeSpans { scope: Some(scope), spans, ..ScopeSpans::default() };
        let resource = ResourceSpans {
            resource: Some(self.resource.clone()),
            scope_spans: vec![spans],
            ..ResourceSpans::default()
        };
        ExportTraceServiceRequest { resource_spans: vec![resource] }
    }

    fn report(&mut self, error: &str) {
        let now = Instant::now();
        if self.reported.is_none_or(|last| now.duration_since(last) >= REPORT_INTERVAL) {
            self.reported = Some(now);
            tracing::warn!(endpoint = self.endpoint, error, "dropped traces");
        }
    }
}

fn text(key: &str, value: &str) -> KeyValue {
    attribute(key, Value::StringValue(value.to_owned()))
}

fn attribute(key: &str, value: Value) -> KeyValue {
    let value = Some(AnyValue { value: Some(value) });
    KeyValue { key: key.to_owned(), value, ..KeyValue::default() }
}

fn to_wire(span: TraceSpan) -> Span {
    let kind = if span.is_call { SpanKind::Server } else { SpanKind::Internal };
    let value = |value| match value {
        SpanValue::Text(text) => Value::StringValue(text),
        SpanValue::Number(number) => Value::IntValue(i64::try_from(number).unwrap_or(i64::MAX)),
    };
    let status = span.error.map(|message| Status { message, code: StatusCode::Error.into() });
    Span {
        trace_id: span.ids.trace_id.to_vec(),
        span_id: span.ids.span_id.to_vec(),
        parent_span_id: span.ids.parent.map(|id| id.to_vec()).unwrap_or_default(),
        name: span.name,
        kind: kind.into(),
        start_time_unix_nano: span.start_ns,
        end_time_unix_nano: span.end_ns,
        attributes: span
            .attributes
            .into_iter()
            .map(|(key, it)| attribute(key, value(it)))
            .collect(),
        status,
        ..Span::default()
    }
}
