//! Probes and metrics over their port.

// Reads the documentation.
#![allow(clippy::disallowed_methods)]

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::hostile::{DEADLINE, expect_api_versions, frame, plain};

/// Sends a request, and returns the status line and the body.
async fn http(addr: SocketAddr, request: &str) -> (String, String) {
    let exchange = async {
        let mut socket = TcpStream::connect(addr).await.unwrap();
        socket.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        socket.read_to_string(&mut response).await.unwrap();
        response
    };
    let response = timeout(DEADLINE, exchange).await.expect("a response");
    let (head, body) = response.split_once("\r\n\r\n").expect("a head");
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

async fn get(addr: SocketAddr, path: &str) -> (String, String) {
    http(addr, &format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n")).await
}

#[tokio::test]
async fn metrics_count_requests_and_are_documented() {
    let gateway = plain().await;
    expect_api_versions(&gateway).await;
    let mut socket = TcpStream::connect(gateway.addr).await.unwrap();
    socket.write_all(&frame(999, 0, b"\xff\xff")).await.unwrap();
    assert_eq!(socket.read(&mut [0]).await.unwrap_or(0), 0);
    let (status, page) = get(gateway.metrics_addr, "/metrics").await;
    assert!(status.contains("200"), "{status}");
    let value = |name: &str| {
        let found = page.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
        found.unwrap_or_else(|| panic!("no {name} in {page}")).parse::<f64>().unwrap()
    };
    assert_eq!(value("helix_kafka_connections_total") as u64, 2);
    assert_eq!(value("helix_kafka_request_seconds_count{api=\"ApiVersions\"}") as u64, 1);
    assert_eq!(value("helix_kafka_ready") as u64, 0, "the cluster is away");
    assert!(value("helix_kafka_sent_bytes_total") > value("helix_kafka_received_bytes_total"));
    assert!(value("process_resident_memory_bytes") > 1e6);
    // The task of the second connection may not have counted its end yet.
    assert!(value("helix_kafka_open_connections") < 3.0);
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/kafka.md");
    let docs = std::fs::read_to_string(docs).unwrap();
    let helps = page.lines().filter_map(|line| line.strip_prefix("# HELP "));
    for (name, help) in helps.map(|line| line.split_once(' ').unwrap()) {
        let row = docs.lines().find(|line| line.starts_with(&format!("| `{name}`")));
        assert!(row.is_some_and(|row| row.contains(help)), "no row of {name}: {help}");
    }
}

#[tokio::test]
async fn probes_say_whether_the_cluster_answers() {
    let gateway = plain().await;
    let addr = gateway.metrics_addr;
    assert!(get(addr, "/livez").await.0.contains("200"));
    let (status, why) = get(addr, "/readyz").await;
    assert!(status.contains("503") && why.contains("cluster"), "{status} {why}");
    assert!(get(addr, "/nowhere").await.0.contains("404"));
    assert!(http(addr, "POST /metrics HTTP/1.1\r\nhost: x\r\n\r\n").await.0.contains("405"));
    let long = format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(32 << 10));
    assert!(http(addr, &long).await.0.contains("431"));
}
