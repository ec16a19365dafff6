//! Traces as a collector gets them, and the stages that an append reports.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use helix_client::{AppendOptions, SessionOptions};
use helix_proto::batch;
use helix_proto::compression::{BatchCodec, Compressor};
use helix_proto::log::v1::{AppendRequest, Header, Record, Stage, StageTime, StoredRecord};
use helix_server::config::{SampleShare, ServerConfig};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use tokio::net::TcpListener;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

use crate::support::{TestServer, append_request, as_batch, record, records, values};
use crate::trio::{Trio, TrioPlan, until};

const TRACE_ID: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT_ID: &str = "b7ad6b7169203331";

fn traceparent(flags: &str) -> String {
    format!("00-{TRACE_ID}-{PARENT_ID}-{flags}")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An OpenTelemetry collector that keeps what it gets.
#[derive(Clone, Default)]
struct Collector {
    spans: Arc<Mutex<Vec<Span>>>,
    /// Values of the resource's attributes, by key.
    resource: Arc<Mutex<BTreeMap<String, String>>>,
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for exported in request.into_inner().resource_spans {
            for attribute in exported.resource.unwrap_or_default().attributes {
                let value = format!("{:?}", attribute.value);
                self.resource.lock().unwrap().insert(attribute.key, value);
            }
            let spans = exported.scope_spans.into_iter().flat_map(|scope| scope.spans);
            self.spans.lock().unwrap().extend(spans);
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    /// Starts a collector; returns it and its endpoint.
    async fn start() -> (Self, String) {
        let collector = Self::default();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let listener = TcpListener::bind(address).await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let service = TraceServiceServer::new(collector.clone());
        let serving = Server::builder().add_service(service);
        tokio::spawn(serving.serve_with_incoming(TcpIncoming::from(listener)));
        (collector, endpoint)
    }

    fn all(&self) -> Vec<Span> {
        self.spans.lock().unwrap().clone()
    }

    /// Waits for a span with this name.
    async fn wait_for(&self, name: &str) -> Span {
        until(name, async || self.all().into_iter().find(|span| span.name == name)).await
    }

    /// Waits until the trace is delivered, and returns its spans by name.
    async fn delivered(&self) -> BTreeMap<String, Span> {
        self.wait_for("delivery").await;
        self.wait_for("append default").await;
        let spans = self.all();
        let count = spans.len();
        let by_name: BTreeMap<_, _> =
            spans.into_iter().map(|span| (span.name.clone(), span)).collect();
        assert_eq!(by_name.len(), count, "one span of each name");
        by_name
    }
}

/// Spans have the time of the system's clock.
#[allow(clippy::disallowed_methods)]
fn now_ns() -> u64 {
    u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()).unwrap()
}

fn with_context(request: AppendRequest, flags: &str) -> Request<AppendRequest> {
    let mut request = Request::new(request);
    request.metadata_mut().insert("traceparent", traceparent(flags).parse().unwrap());
    request
}

/// Checks the spans of one append with a context and of its first read.
fn check_spans(spans: &BTreeMap<String, Span>, began_ns: u64, is_single: bool) {
    let root = &spans["append default"];
    assert_eq!(hex(&root.parent_span_id), PARENT_ID);
    assert_eq!(root.kind(), SpanKind::Server);
    let stages =
        ["queue", "log wait", "log write", "sync", "quorum", "apply", "wake-up", "delivery"];
    let expected: Vec<_> = stages.into_iter().chain(["append default"]).collect();
    for name in &expected {
        let span = spans.get(*name).unwrap_or_else(|| panic!("no span {name:?}: {spans:?}"));
        assert_eq!(hex(&span.trace_id), TRACE_ID, "{name}");
        if *name != "append default" {
            assert_eq!(span.parent_span_id, root.span_id, "{name}");
            assert_eq!(span.kind(), SpanKind::Internal, "{name}");
        }
        let (start, end) = (span.start_time_unix_nano, span.end_time_unix_nano);
        assert!(began_ns <= start + 1_000_000 && start <= end, "{name}: {start} {end}");
        assert!(end <= now_ns() + 1_000_000, "{name} ends in the future");
        assert!(start >= root.start_time_unix_nano, "{name} begins before its parent");
    }
    assert_eq!(spans.len(), expected.len());
    let end = |name: &str| spans[name].end_time_unix_nano;
    let start = |name: &str| spans[name].start_time_unix_nano;
    // Times in microseconds and the log's clock are rounded separately.
    let is_after = |later: u64, earlier: u64| later + 10_000 >= earlier;
    assert!(is_after(start("log wait"), end("queue")));
    assert!(is_after(start("log write"), end("log wait")));
    assert!(is_after(start("sync"), end("log write")));
    assert!(is_after(start("apply"), end("quorum")));
    assert!(is_after(start("wake-up"), end("apply")));
    assert!(is_after(root.end_time_unix_nano, end("wake-up")));
    if is_single {
        assert!(is_after(end("quorum"), end("sync")), "a single node waits for its own sync");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_append_is_one_trace_on_one_node() {
    let (collector, endpoint) = Collector::start().await;
    let directory = tempfile::tempdir().unwrap();
    let config =
        ServerConfig { otlp_endpoint: Some(endpoint), ..ServerConfig::in_dir(directory.path()) };
    let server = TestServer::start(config, Some(directory)).await;
    server.append(&["untraced"]).await;
    let began_ns = now_ns();
    let request = with_context(append_request(&["traced"]), "01");
    server.produce().append(request).await.unwrap();
    let not_sampled = with_context(append_request(&["not sampled"]), "00");
    server.produce().append(not_sampled).await.unwrap();
    assert_eq!(values(&server.records(0, 0).await), ["untraced", "traced", "not sampled"]);
    let spans = collector.delivered().await;
    check_spans(&spans, began_ns, true);
    let attributes = format!("{:?}", spans["append default"].attributes);
    for part in ["messaging.destination.name", "default", "helix.first_offset", "IntValue(1)"] {
        assert!(attributes.contains(part), "{attributes}");
    }
    let resource = collector.resource.lock().unwrap().clone();
    assert!(resource["service.name"].contains("helix"), "{resource:?}");
    let metrics = server.running.node().tracer().unwrap().counts().clone();
    until("the export is counted", async || (metrics.exported.get() == 2).then_some(())).await;
    assert_eq!(metrics.dropped.get(), 0);
    server.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_append_is_one_trace_on_three_nodes() {
    let (collector, endpoint) = Collector::start().await;
    let plan = TrioPlan::new().with_collector(endpoint);
    let mut trio = Trio::start(plan).await;
    let (leader, _) = trio.leader_of(0).await;
    let began_ns = now_ns();
    let request = with_context(append_request(&["traced"]), "01");
    trio.node(leader).produce().append(request).await.unwrap();
    assert_eq!(values(&trio.node(leader).records(0, 0).await), ["traced"]);
    check_spans(&collector.delivered().await, began_ns, false);
    trio.stop_all().await;
}

fn traced_record(value: &str, context: &str) -> Record {
    let header = Header { name: "traceparent".to_owned(), value: context.to_owned().into() };
    Record { headers: vec![header], ..record(value) }
}

fn headers(stored: &StoredRecord) -> Vec<(String, Bytes)> {
    let record = stored.record.as_ref().unwrap();
    record.headers.iter().map(|header| (header.name.clone(), header.value.clone())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn context_of_a_record_is_honoured_and_returned() {
    let (collector, endpoint) = Collector::start().await;
    let config = ServerConfig { otlp_endpoint: Some(endpoint), ..ServerConfig::in_memory() };
    let server = TestServer::start(config, None).await;
    let config = helix_client::Config::new([server.running.local_addr().to_string()]);
    let client = helix_client::Client::new(config).unwrap();
    let session = client.session("default", 0, SessionOptions::default()).await.unwrap();
    let batch = vec![record("first"), traced_record("second", &traceparent("01"))];
    session.append(&batch).await.unwrap().await.unwrap();
    let stored = server.records(0, 0).await;
    assert_eq!(headers(&stored[1]), [("traceparent".to_owned(), traceparent("01").into())]);
    let root = collector.wait_for("append default").await;
    assert_eq!(
        (hex(&root.trace_id), hex(&root.parent_span_id)),
        (TRACE_ID.into(), PARENT_ID.into())
    );
    collector.wait_for("delivery").await;
    // In memory there is neither a write nor a sync.
    assert!(collector.all().iter().all(|span| span.name != "sync" && span.name != "log wait"));

    // Compressed records are not opened for a trace, and invalid contexts are ignored.
    let long = "x".repeat(2_000);
    let plain = batch::encode(&[traced_record(&long, &traceparent("01"))]);
    let compressed = Compressor::default().compress(BatchCodec::Zstd, &plain, 1 << 20);
    let compressed = compressed.expect("it becomes smaller");
    let invalid = batch::encode(&[traced_record("x", "00-zz-1-01")]);
    for batch in [compressed, invalid] {
        let request = AppendRequest { batch: as_batch(batch), ..append_request(&[]) };
        server.produce().append(request).await.unwrap();
    }
    let marker = AppendRequest { partition: 1, ..append_request(&["marker"]) };
    server.produce().append(with_context(marker, "01")).await.unwrap();
    until("the marker's span", async || {
        let spans = collector.all();
        (spans.iter().filter(|span| span.name == "append default").count() == 2).then_some(())
    })
    .await;
    server.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_share_of_appends_without_a_context_is_traced() {
    let (collector, endpoint) = Collector::start().await;
    let config = ServerConfig {
        otlp_endpoint: Some(endpoint),
        trace_sample: SampleShare(500_000),
        ..ServerConfig::in_memory()
    };
    let server = TestServer::start(config, None).await;
    for _ in 0..8 {
        server.append(&["x"]).await;
    }
    // Failed appends are traced too.
    let unknown =
        AppendRequest { batch: as_batch(batch::encode(&records(&["x"]))), ..append_request(&[]) };
    let unknown = AppendRequest {
        condition: Some(helix_proto::log::v1::AppendCondition {
            expected_offset: Some(99),
            fencing_token: None,
        }),
        ..unknown
    };
    for _ in 0..2 {
        server.produce().append(unknown.clone()).await.unwrap_err();
    }
    // The rest is exported when the node stops.
    server.running.shutdown().await;
    let spans = collector.all();
    let roots: Vec<_> = spans.iter().filter(|span| span.name == "append default").collect();
    assert_eq!(roots.len(), 5, "every second one");
    assert!(roots.iter().all(|span| span.parent_span_id.is_empty()));
    let failed: Vec<_> = roots.iter().filter_map(|span| span.status.as_ref()).collect();
    assert_eq!(failed.len(), 1);
    assert!(failed[0].message.contains("99"), "{failed:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_gone_costs_only_traces() {
    let config = ServerConfig {
        otlp_endpoint: Some("http://127.0.0.1:1".to_owned()),
        trace_sample: SampleShare(1_000_000),
        ..ServerConfig::in_memory()
    };
    let server = TestServer::start(config, None).await;
    for _ in 0..3 {
        server.append(&["x"]).await;
    }
    let counts = server.running.node().tracer().unwrap().counts().clone();
    until("traces are dropped", async || (counts.dropped.get() == 3).then_some(())).await;
    server.append(&["y"]).await;
    server.running.shutdown().await;
}

fn stage_names(stages: &[StageTime]) -> Vec<Stage> {
    stages.iter().map(StageTime::stage).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_append_reports_its_stages_if_asked() {
    let server = TestServer::durable().await;
    let plain = server.append(&["x"]).await;
    assert!(plain.stages.is_empty());
    let request = AppendRequest { report_stages: true, ..append_request(&["x"]) };
    let response = server.produce().append(request).await.unwrap().into_inner();
    let mut stages = stage_names(&response.stages);
    stages.sort();
    let expected = [
        Stage::Queue,
        Stage::LogWait,
        Stage::LogWrite,
        Stage::Sync,
        Stage::Quorum,
        Stage::Apply,
        Stage::WakeUp,
    ];
    assert_eq!(stages, expected);
    let config = helix_client::Config::new([server.running.local_addr().to_string()]);
    let client = helix_client::Client::new(config).unwrap();
    let options = AppendOptions::default();
    let batch = records(&["x"]);
    let appended = client.append_with_stages("default", 0, &batch, &options);
    let (ack, stages) = appended.await.unwrap();
    assert_eq!((ack.first_offset, stages.len()), (Some(2), 7));
    server.running.shutdown().await;
}
