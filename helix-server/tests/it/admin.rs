//! The admin port: probes, metrics that count, and limits. Raw HTTP, as any tool speaks it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use helix_proto::log::v1::{
    AppendRequest, CommitFallback, CommitOffsetsRequest, ErrorReason, FetchRequest,
    TrimPartitionRequest,
};
use helix_server::config::{AdminAddr, ServerConfig};
use helix_server::metrics::METRICS;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::captured_log::CapturedLog;
use crate::groups::{TestMember, commit_at, fetch_from_group, groups};
use crate::process::free_address;
use crate::support::{TestServer, append_request, from_offset, reason, soon};
use crate::trio::{Trio, TrioPlan, until};

/// Sends these bytes and reads until the server closes: status and body.
async fn send(addr: SocketAddr, request: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    // A server that refuses early may have closed the connection already.
    let _ = stream.write_all(request.as_bytes()).await;
    let mut answer = Vec::new();
    let _ = soon(stream.read_to_end(&mut answer)).await;
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer with a head");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.expect("an answer has a status"), body.to_owned())
}

async fn get(addr: SocketAddr, path: &str) -> (u16, String) {
    send(addr, &format!("GET {path} HTTP/1.1\r\nHost: helix\r\n\r\n")).await
}

/// Returns the samples of the metrics page by name and labels.
pub(crate) async fn metrics(addr: SocketAddr) -> BTreeMap<String, f64> {
    let (status, page) = get(addr, "/metrics").await;
    assert_eq!(status, 200);
    let lines = page.lines().filter(|line| !line.starts_with('#'));
    let samples = lines.map(|line| {
        let (name, value) = line.rsplit_once(' ').expect("a name and a value");
        (name.to_owned(), value.parse().expect("a number"))
    });
    samples.collect()
}

pub(crate) fn any_port() -> Option<AdminAddr> {
    Some(AdminAddr::At(SocketAddr::from(([127, 0, 0, 1], 0))))
}

fn addr_of(server: &TestServer) -> SocketAddr {
    server.running.admin_addr().expect("it has an admin port")
}

async fn in_memory() -> TestServer {
    TestServer::start(ServerConfig { admin_addr: any_port(), ..ServerConfig::in_memory() }, None)
        .await
}

async fn durable() -> TestServer {
    let directory = tempfile::tempdir().unwrap();
    let config = ServerConfig { admin_addr: any_port(), ..ServerConfig::in_dir(directory.path()) };
    TestServer::start(config, Some(directory)).await
}

#[tokio::test]
async fn serving_node_is_alive_and_ready() {
    let server = in_memory().await;
    let addr = addr_of(&server);
    assert_eq!(get(addr, "/livez").await, (200, "alive\n".to_owned()));
    assert_eq!(get(addr, "/readyz").await, (200, "ready\n".to_owned()));
    let as_json = "GET /readyz HTTP/1.1\r\nHost: helix\r\nAccept: application/json\r\n\r\n";
    let (status, body) = send(addr, as_json).await;
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &body["ready"]), (200, &serde_json::Value::Bool(true)));
    assert!(get(addr, "/").await.1.contains("/metrics"));

    server.running.node().shutdown_token().cancel();
    let (status, why) = get(addr, "/readyz").await;
    assert_eq!(status, 503);
    assert!(why.contains("shutting down"), "{why}");
    assert_eq!(get(addr, "/livez").await.0, 200);
    let (_, body) = send(addr, as_json).await;
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(body["ready"], false);
    assert_eq!(body["reasons"][0], "the node is shutting down");
    assert_eq!(metrics(addr).await["helix_ready"], 0.0);

    server.running.shutdown().await;
    assert!(TcpStream::connect(addr).await.is_err(), "the port ends with its server");
}

#[tokio::test]
async fn admin_port_takes_other_methods_in_the_console_only() {
    let server = in_memory().await;
    let addr = addr_of(&server);
    for method in ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"] {
        let request = format!("{method} /metrics HTTP/1.1\r\nHost: helix\r\n\r\n");
        assert_eq!(send(addr, &request).await.0, 405, "{method}");
        let request = format!("{method} /console/ HTTP/1.1\r\nHost: localhost\r\n\r\n");
        let expected = if method == "POST" { 403 } else { 405 };
        assert_eq!(send(addr, &request).await.0, expected, "{method}: no form of the console");
    }
    assert_eq!(get(addr, "/nothing").await.0, 404);
    let long = format!("GET / HTTP/1.1\r\nHost: helix\r\nX: {}\r\n\r\n", "x".repeat(64 << 10));
    assert_eq!(send(addr, &long).await.0, 431);
    assert_eq!(send(addr, "nonsense\r\n\r\n").await.0, 400);
    assert_eq!(get(addr, "/livez").await.0, 200, "it still serves");
}

/// Returns the time of a probe beside many connections that have sent this.
async fn probe_time(addr: SocketAddr, begun: &str) -> Duration {
    let mut idle = Vec::new();
    for _ in 0..200 {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        // The server may have closed it for a later one.
        let _ = stream.write_all(begun.as_bytes()).await;
        idle.push(stream);
    }
    let begin = Instant::now();
    assert_eq!(get(addr, "/livez").await.0, 200);
    begin.elapsed()
}

#[tokio::test]
async fn idle_connections_do_not_delay_probes() {
    let server = in_memory().await;
    let addr = addr_of(&server);
    // Connections that are silent, within their request, or do not read their response.
    for begun in ["", "GET /livez HT", "GET /metrics HTTP/1.1\r\nHost: helix\r\n\r\n"] {
        let mut times = Vec::new();
        // One attempt may meet a machine that stalls.
        while times.iter().min().is_none_or(|time| *time >= Duration::from_secs(1)) {
            assert!(times.len() < 3, "{times:?} beside {begun:?}");
            times.push(probe_time(addr, begun).await);
        }
    }
}

#[tokio::test]
async fn connection_over_the_limit_replaces_the_oldest_idle_one() {
    let server = in_memory().await;
    let addr = addr_of(&server);
    // Its header is overdue 5 s after the server has accepted it.
    let overdue = Instant::now() + Duration::from_secs(5);
    let mut oldest = TcpStream::connect(addr).await.unwrap();
    let _others: Vec<_> =
        futures_util::future::join_all((0..64).map(|_| TcpStream::connect(addr))).await;
    let mut rest = Vec::new();
    let closed = tokio::time::timeout_at(overdue, oldest.read_to_end(&mut rest)).await;
    closed.expect("it was closed").ok();
    assert_eq!(rest, b"");
}

#[tokio::test]
async fn error_names_admin_port_in_use() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let admin_addr = Some(AdminAddr::At(taken.local_addr().unwrap()));
    let config = ServerConfig { admin_addr, ..ServerConfig::in_memory() };
    let error = helix_server::server::Server::start(config).await.unwrap_err().to_string();
    for part in [&*taken.local_addr().unwrap().to_string(), "--admin-addr off"] {
        assert!(error.contains(part), "{error}");
    }
}

#[tokio::test]
async fn metrics_count_requests() {
    let server = durable().await;
    let addr = addr_of(&server);
    let before = metrics(addr).await;
    let count = |metrics: &BTreeMap<String, f64>, name: &str| {
        *metrics.get(name).unwrap_or_else(|| panic!("there is no {name}"))
    };
    const BATCHES: usize = 7;
    for _ in 0..BATCHES {
        server.append(&["one", "two", "three"]).await;
    }
    let unknown = AppendRequest { topic: "nowhere".to_owned(), ..append_request(&["x"]) };
    let refused = server.produce().append(unknown).await.unwrap_err();
    assert_eq!(reason(&refused).as_str_name(), "ERROR_REASON_TOPIC_NOT_FOUND");
    let start = from_offset(0, 0);
    let request =
        FetchRequest { partitions: vec![start], accept_encoded: true, ..FetchRequest::default() };
    assert_eq!(server.fetch_one(request).await.batches.len(), BATCHES);

    // A log releases the bytes of a batch some time after its ack.
    let after = until("no bytes are in flight", async || {
        let after = metrics(addr).await;
        (count(&after, "helix_shard_in_flight_bytes{shard=\"1\"}") == 0.0).then_some(after)
    })
    .await;
    let moved = |name: &str| count(&after, name) - count(&before, name);
    let batches = BATCHES as f64;
    let append = "helix_calls_total{method=\"helix.log.v1.ProduceService/Append\",code=\"OK\"}";
    for (name, wanted) in [
        ("helix_appended_batches_total", batches),
        ("helix_appended_records_total", 3.0 * batches),
        ("helix_duplicate_batches_total", 0.0),
        ("helix_append_seconds_count", batches),
        ("helix_append_seconds_bucket{le=\"+Inf\"}", batches),
        ("helix_commit_seconds_count", batches),
        ("helix_read_records_total", 3.0 * batches),
        ("helix_fetch_seconds_count", 1.0),
        ("helix_shard_high_watermarks{shard=\"1\"}", 3.0 * batches),
        ("helix_failures_total{reason=\"TOPIC_NOT_FOUND\"}", 1.0),
        (append, batches),
    ] {
        assert_eq!(moved(name), wanted, "{name}");
    }
    for name in [
        "helix_appended_bytes_total",
        "helix_read_bytes_total",
        "helix_shard_last_index{shard=\"1\"}",
        "helix_shard_committed_index{shard=\"1\"}",
        "helix_shard_applied_index{shard=\"1\"}",
        "helix_shard_live_bytes{shard=\"1\"}",
        "helix_wal_groups_total{shard=\"1\"}",
        "helix_wal_group_bytes_total{shard=\"1\"}",
        "helix_wal_sync_seconds_count{shard=\"1\"}",
        "helix_wal_sync_seconds_sum{shard=\"1\"}",
        "helix_uptime_seconds",
    ] {
        assert!(moved(name) > 0.0, "{name} moved by {}", moved(name));
    }
    let rest = [
        ("helix_ready", 1.0),
        ("helix_shard_leads{shard=\"1\"}", 1.0),
        ("helix_shard_has_leader{shard=\"0\"}", 1.0),
        ("helix_wal_writable{shard=\"1\"}", 1.0),
        ("helix_shard_partitions{shard=\"1\"}", 4.0),
    ];
    for (name, wanted) in rest {
        assert_eq!(count(&after, name), wanted, "{name}");
    }
    assert!(count(&after, "helix_disk_free_bytes") > 0.0);
    assert!(count(&after, "process_resident_memory_bytes") > 0.0);
    let open = "helix_calls_open{method=\"helix.log.v1.ProduceService/Append\"}";
    assert_eq!(count(&after, open), 0.0);
}

#[tokio::test]
async fn nodes_in_one_process_have_separate_metrics() {
    let (busy, idle) = (in_memory().await, in_memory().await);
    busy.append(&["a"]).await;
    let name = "helix_appended_batches_total";
    assert_eq!(metrics(addr_of(&busy)).await[name], 1.0);
    assert_eq!(metrics(addr_of(&idle)).await[name], 0.0);
}

/// A cluster exports exactly the metrics of the catalog.
#[tokio::test]
async fn cluster_exports_every_metric_of_the_catalog() {
    let mut trio = Trio::durable().await;
    // Those of TLS and JWTs need certificates and keys.
    let needs_files = |name: &&str| {
        let prefixes = ["helix_certificate_", "helix_tls_", "helix_jwks_"];
        prefixes.iter().any(|prefix| name.starts_with(prefix))
    };
    let names = METRICS.iter().map(|metric| metric.name).filter(|name| !needs_files(name));
    let names: Vec<&str> = names.collect();
    let metric = |sample: &str| {
        let name = sample.split('{').next().unwrap_or_default().to_owned();
        let of_histogram = |suffix: &str| name.strip_suffix(suffix).map(str::to_owned);
        let histogram = ["_bucket", "_sum", "_count"].into_iter().find_map(of_histogram);
        histogram.filter(|name| names.contains(&name.as_str())).unwrap_or(name)
    };
    let client = trio.client();
    client.admin().commit_group_offsets("readers", &[commit_at(0, 0)]).await.unwrap();
    let expected: BTreeSet<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut last = BTreeSet::new();
    // The nodes compare their clocks some time after the start, and only leaders report groups.
    let traffic = until("the nodes export all metrics of the catalog, and no other", async || {
        let mut seen = BTreeSet::new();
        let mut traffic = 0.0;
        for (_, node) in trio.nodes() {
            let metrics = metrics(addr_of(node)).await;
            traffic += metrics
                .iter()
                .filter(|(name, _)| name.starts_with("helix_peer_sent_bytes_total"))
                .map(|(_, bytes)| bytes)
                .sum::<f64>();
            seen.extend(metrics.keys().map(|sample| metric(sample)));
        }
        if seen != last {
            println!("not as expected: {:?}", seen.symmetric_difference(&expected));
            last.clone_from(&seen);
        }
        (seen == expected).then_some(traffic)
    })
    .await;
    assert!(traffic > 0.0, "nodes exchange messages");
    trio.stop_all().await;
}

/// A node that waits for its peers is alive but not ready.
#[tokio::test]
async fn node_that_waits_for_formation_is_not_ready() {
    let plan = TrioPlan::new();
    let addr = free_address();
    let admin_addr = Some(AdminAddr::At(addr));
    let starting = tokio::spawn(helix_server::server::Server::start(ServerConfig {
        admin_addr,
        ..plan.config(1)
    }));
    let why = soon(async {
        loop {
            if let Ok(stream) = TcpStream::connect(addr).await {
                drop(stream);
                break get(addr, "/readyz").await;
            }
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(why.0, 503);
    assert!(why.1.contains("starting"), "{}", why.1);
    assert_eq!(get(addr, "/livez").await.0, 200);
    assert_eq!(metrics(addr).await["helix_ready"], 0.0);
    starting.abort();
}

#[tokio::test]
async fn groups_have_lag_members_and_the_time_of_the_last_commit() {
    let server = in_memory().await;
    server.append(&["a", "b", "c"]).await;
    let commit = CommitOffsetsRequest {
        group: "readers".to_owned(),
        offsets: vec![commit_at(0, 1), commit_at(1, 0)],
        ..CommitOffsetsRequest::default()
    };
    groups(&server).commit_offsets(commit).await.unwrap();
    TestMember::new("a", &["default"]).until_owns(&server, 4).await;
    let page = metrics(addr_of(&server)).await;
    let of = |partition: u32| {
        let labels = format!("group=\"readers\",topic=\"default\",partition=\"{partition}\"");
        page.get(&format!("helix_group_lag_records{{{labels}}}")).copied()
    };
    assert_eq!([of(0), of(1), of(2)], [Some(2.0), Some(0.0), None]);
    assert_eq!(page["helix_group_current_members{group=\"readers\"}"], 1.0);
    assert!(page["helix_group_last_commit_timestamp_seconds{group=\"readers\"}"] > 1e9);
    assert_eq!(page["helix_group_unlisted{shard=\"1\"}"], 0.0);
}

/// An assignment is computed for all changes of an interval, not for each.
#[tokio::test]
async fn members_that_join_together_get_few_assignments() {
    const INTERVAL_SECONDS: f64 = 0.1;
    let server = in_memory().await;
    let mut members: Vec<_> =
        (0..50).map(|number| TestMember::new(&format!("m{number}"), &["default"])).collect();
    let begun = Instant::now();
    let joins = members.iter_mut().map(|member| member.beat(&server));
    for joined in futures_util::future::join_all(joins).await {
        joined.unwrap();
    }
    let count = until("an assignment is computed", async || {
        let count = metrics(addr_of(&server)).await["helix_group_assignments_total"];
        (count > 0.0).then_some(count)
    })
    .await;
    let most = 1.0 + begun.elapsed().as_secs_f64() / INTERVAL_SECONDS;
    assert!(count <= most, "{count} assignments, not {most}");
}

#[tokio::test]
async fn group_events_are_counted_and_fallbacks_logged() {
    let (log, _guard) = CapturedLog::capture();
    let server = in_memory().await;
    server.append(&["a", "b", "c"]).await;
    let counted = async || {
        let page = metrics(addr_of(&server)).await;
        ["assignments", "committed_offsets", "expired_members", "fallbacks"]
            .map(|event| page[&format!("helix_group_{event}_total")])
    };
    assert_eq!(counted().await, [0.0; 4]);
    let commit = CommitOffsetsRequest {
        group: "readers".to_owned(),
        offsets: vec![commit_at(0, 1), commit_at(1, 0)],
        ..CommitOffsetsRequest::default()
    };
    groups(&server).commit_offsets(commit).await.unwrap();
    assert_eq!(counted().await, [0.0, 2.0, 0.0, 0.0]);
    let mut member = TestMember::new("a", &["default"]);
    member.request.session_timeout = Some(prost_types::Duration { seconds: 2, nanos: 0 });
    member.until_owns(&server, 4).await;
    until("the silent member is removed", async || {
        let [assignments, _, expired, _] = counted().await;
        assert!(assignments >= 1.0);
        (expired >= 1.0).then_some(())
    })
    .await;

    // Without a commit the fallback is no surprise, and a readable commit needs none.
    let never = fetch_from_group(2, CommitFallback::Latest);
    server.fetch_one(never).await;
    let fallback = fetch_from_group(0, CommitFallback::Earliest);
    server.fetch_one(fallback.clone()).await;
    assert_eq!(counted().await[3], 0.0);
    assert!(!log.text().contains("starting at the fallback"));
    let trim = TrimPartitionRequest {
        topic: "default".to_owned(),
        trim_offset: 2,
        ..TrimPartitionRequest::default()
    };
    server.topics().trim_partition(trim).await.unwrap();
    // An error is no fallback.
    let refused = server.consume().fetch(fetch_from_group(0, CommitFallback::Fail)).await;
    assert_eq!(reason(&refused.unwrap_err()), ErrorReason::OffsetOutOfRange);
    assert_eq!(counted().await[3], 0.0);
    assert_eq!(server.fetch_one(fallback).await.start_offset, 2);
    assert_eq!(counted().await[3], 1.0);
    let text = log.text();
    let line = text.lines().find(|line| line.contains("starting at the fallback")).unwrap();
    for field in ["WARN", "group=\"readers\"", "topic=default", "partition=0", "offset=2"] {
        assert!(line.contains(field), "{field} is not in {line}");
    }
}
