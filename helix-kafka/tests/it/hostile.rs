//! Hostile requests get an error of Kafka's or a closed connection, and the gateway serves others.
//! No cluster is needed: the nodes' address is closed.

use std::net::SocketAddr;
use std::time::Duration;

use helix_client::Config;
use helix_kafka::{Gateway, GatewayLimits, GatewayOptions, GatewayRules};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Deadline of everything that a test waits for.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) struct TestGateway {
    pub(crate) addr: SocketAddr,
    pub(crate) metrics_addr: SocketAddr,
    stop: CancellationToken,
}

impl Drop for TestGateway {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn gateway(limits: GatewayLimits, rules: GatewayRules) -> TestGateway {
    let options = GatewayOptions {
        listen_addr: "127.0.0.1:0".parse().unwrap(),
        metrics_addr: Some("127.0.0.1:0".parse().unwrap()),
        advertised_addr: None,
        gateways: Vec::new(),
        cluster: Config::new(["127.0.0.1:1"]),
        tls: None,
        limits,
        rules,
    };
    let gateway = Gateway::bind(options).await.unwrap();
    let (addr, stop) = (gateway.local_addr().unwrap(), CancellationToken::new());
    let metrics_addr = gateway.metrics_addr().unwrap();
    tokio::spawn(gateway.serve(stop.clone()));
    TestGateway { addr, metrics_addr, stop }
}

pub(crate) async fn plain() -> TestGateway {
    gateway(GatewayLimits::default(), GatewayRules::default()).await
}

pub(crate) fn frame(key: i16, version: i16, rest: &[u8]) -> Vec<u8> {
    let length = i32::try_from(8 + rest.len()).unwrap();
    let mut bytes = length.to_be_bytes().to_vec();
    bytes.extend(key.to_be_bytes());
    bytes.extend(version.to_be_bytes());
    bytes.extend(7_i32.to_be_bytes());
    bytes.extend(rest);
    bytes
}

/// Reads one response without its length.
async fn response(socket: &mut TcpStream) -> Vec<u8> {
    let reading = async {
        let length = socket.read_i32().await.unwrap();
        let mut bytes = vec![0; usize::try_from(length).unwrap()];
        socket.read_exact(&mut bytes).await.unwrap();
        bytes
    };
    timeout(DEADLINE, reading).await.expect("a response")
}

/// Waits until the gateway has closed the connection, without a response.
async fn closed(socket: &mut TcpStream) {
    let mut byte = [0];
    match timeout(DEADLINE, socket.read(&mut byte)).await.expect("the connection is closed") {
        Ok(0) | Err(_) => {}
        Ok(_) => panic!("a response came"),
    }
}

pub(crate) async fn expect_api_versions(gateway: &TestGateway) {
    let mut socket = TcpStream::connect(gateway.addr).await.unwrap();
    socket.write_all(&frame(18, 0, b"\0\x02me")).await.unwrap();
    let bytes = response(&mut socket).await;
    assert_eq!(bytes[..6], [0, 0, 0, 7, 0, 0], "correlation id and no error");
}

#[tokio::test]
async fn malformed_requests_close_only_their_connection() {
    let gateway = plain().await;
    let requests: &[&[u8]] = &[
        // Lengths: negative, beyond the limit, and less than a header.
        &(-1_i32).to_be_bytes(),
        &i32::MAX.to_be_bytes(),
        &[0, 0, 0, 2, 0, 0],
        // HTTP and TLS.
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03",
        // An unknown API, an unknown version, and a list of two billion topics.
        &frame(999, 0, b"\xff\xff"),
        &frame(3, 99, b"\xff\xff"),
        &frame(3, 9, b"\xff\xff\0\xff\xff\xff\xff\x07\0"),
        // A client id beyond the frame, and a null where none is allowed.
        &frame(3, 1, b"\x7f\xff"),
        &frame(11, 5, b"\xff\xff\xff\xff"),
    ];
    for request in requests {
        let mut socket = TcpStream::connect(gateway.addr).await.unwrap();
        socket.write_all(request).await.unwrap();
        // TLS states a frame that never comes.
        if request.first() == Some(&0x16) {
            socket.shutdown().await.unwrap();
        }
        closed(&mut socket).await;
    }
    expect_api_versions(&gateway).await;
}

#[tokio::test]
async fn unknown_version_of_api_versions_is_answered_with_the_known_ones() {
    let gateway = plain().await;
    let mut socket = TcpStream::connect(gateway.addr).await.unwrap();
    socket.write_all(&frame(18, 99, b"\xff\xff\0\x02a\x02b\0")).await.unwrap();
    let bytes = response(&mut socket).await;
    // Correlation id, error 35, and one API: 18, versions 0 to 4.
    assert_eq!(bytes, [0, 0, 0, 7, 0, 35, 0, 0, 0, 1, 0, 18, 0, 0, 0, 4]);
    // The client asks again on the same connection.
    socket.write_all(&frame(18, 3, b"\xff\xff\0\x02a\x02b\0")).await.unwrap();
    let bytes = response(&mut socket).await;
    assert_eq!(bytes[..6], [0, 0, 0, 7, 0, 0]);
}

#[tokio::test]
async fn nothing_but_a_login_comes_before_a_login() {
    let rules = GatewayRules { requires_sasl: true, ..GatewayRules::default() };
    let gateway = gateway(GatewayLimits::default(), rules).await;
    expect_api_versions(&gateway).await;
    let mut socket = TcpStream::connect(gateway.addr).await.unwrap();
    socket.write_all(&frame(3, 1, b"\xff\xff\xff\xff\xff\xff")).await.unwrap();
    closed(&mut socket).await;
    // An unknown mechanism is answered with the known ones.
    let mut socket = TcpStream::connect(gateway.addr).await.unwrap();
    socket.write_all(&frame(17, 1, b"\xff\xff\0\x05SCRAM")).await.unwrap();
    let bytes = response(&mut socket).await;
    assert_eq!(bytes[4..6], [0, 33]);
    assert!(bytes.windows(5).any(|window| window == b"PLAIN"));
    // Requests are small until then.
    let mut socket = TcpStream::connect(gateway.addr).await.unwrap();
    socket.write_all(&(1_i32 << 20).to_be_bytes()).await.unwrap();
    closed(&mut socket).await;
}

#[tokio::test]
async fn further_connections_and_idle_ones_are_closed() {
    let limits = GatewayLimits {
        connections: 2,
        idle_timeout: Duration::from_millis(300),
        ..GatewayLimits::default()
    };
    let gateway = gateway(limits, GatewayRules::default()).await;
    let mut first = TcpStream::connect(gateway.addr).await.unwrap();
    let mut second = TcpStream::connect(gateway.addr).await.unwrap();
    // Both are accepted before the third.
    let mut third = TcpStream::connect(gateway.addr).await.unwrap();
    closed(&mut third).await;
    closed(&mut first).await;
    closed(&mut second).await;
    expect_api_versions(&gateway).await;
}

#[tokio::test]
async fn requests_that_never_arrive_leave_memory_for_others() {
    let limits = GatewayLimits { memory_bytes: 64 << 20, ..GatewayLimits::default() };
    let gateway = gateway(limits, GatewayRules::default()).await;
    let mut half_open = Vec::new();
    for _ in 0..100 {
        let mut socket = TcpStream::connect(gateway.addr).await.unwrap();
        // A Produce of 16 MiB, of which 100 bytes come.
        let length = 16_i32 << 20;
        socket.write_all(&length.to_be_bytes()).await.unwrap();
        socket.write_all(&frame(0, 3, &[0; 92])[4..]).await.unwrap();
        half_open.push(socket);
    }
    expect_api_versions(&gateway).await;
    let mut byte = [0];
    for socket in &half_open {
        assert!(socket.try_read(&mut byte).is_err(), "no response and no end");
    }
}

/// A Produce with one batch, whose bytes are stated.
fn produce(batch: &[u8]) -> Vec<u8> {
    let head = b"\xff\xff\xff\xff\xff\xff\0\0\x03\xe8\0\0\0\x01\0\x01t\0\0\0\x01\0\0\0\0";
    let length = i32::try_from(batch.len()).unwrap().to_be_bytes();
    frame(0, 3, &[&head[..], &length, batch].concat())
}

/// Returns a batch of 61 bytes and these records, with a right checksum.
fn batch(attributes: u16, count: i32, records: &[u8]) -> Vec<u8> {
    let mut body = attributes.to_be_bytes().to_vec();
    body.extend((count - 1).to_be_bytes());
    body.extend([0; 16]);
    body.extend([0xff; 14]);
    body.extend(count.to_be_bytes());
    body.extend(records);
    let mut bytes = vec![0; 8];
    bytes.extend(i32::try_from(9 + body.len()).unwrap().to_be_bytes());
    bytes.extend([0, 0, 0, 0, 2]);
    bytes.extend(crc32c::crc32c(&body).to_be_bytes());
    bytes.extend(body);
    bytes
}

#[tokio::test]
async fn batches_that_no_reader_could_read_get_kafkas_codes() {
    let gateway = plain().await;
    // One record of seven bytes: its length, and a null key and value.
    let record = b"\x0c\0\0\0\x01\x01\0";
    let good = batch(0, 1, record);
    let changed = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        bytes
    };
    // A gzip member whose 4 GiB of zeros would follow.
    let gzip = b"\x1f\x8b\x08\0\0\0\0\0\0\x03\xff\xff\xff\xff";
    for (what, batch, code) in [
        ("a wrong checksum", changed(20, good[20] ^ 1), 2),
        ("magic 0", changed(16, 0), 43),
        ("magic 1", changed(16, 1), 43),
        ("magic 3", changed(16, 3), 43),
        ("an unknown codec", batch(7, 1, record), 76),
        ("a control batch", batch(0x20, 1, record), 87),
        ("a length beyond the request", changed(8, 0x7f), 2),
        ("damaged gzip", batch(1, 1, gzip), 87),
    ] {
        let mut socket = TcpStream::connect(gateway.addr).await.unwrap();
        socket.write_all(&produce(&batch)).await.unwrap();
        let bytes = response(&mut socket).await;
        let found = i16::from_be_bytes([bytes[19], bytes[20]]);
        assert_eq!(found, code, "{what}");
    }
    expect_api_versions(&gateway).await;
}

#[tokio::test]
async fn requests_are_answered_in_order_while_the_cluster_is_away() {
    let gateway = plain().await;
    let mut socket = TcpStream::connect(gateway.addr).await.unwrap();
    // A batch that is refused, and the versions, in one packet.
    let produce = [
        &b"\xff\xff\xff\xff\xff\xff\0\0\x03\xe8\0\0\0\x01\0\x01t\0\0\0\x01\0\0\0\0"[..],
        b"\0\0\0\x04junk",
    ]
    .concat();
    let requests = [frame(0, 3, &produce), frame(18, 0, b"\xff\xff")].concat();
    socket.write_all(&requests).await.unwrap();
    let bytes = response(&mut socket).await;
    // One topic "t", one partition 0, error 2: CORRUPT_MESSAGE.
    assert_eq!(bytes[..21], *b"\0\0\0\x07\0\0\0\x01\0\x01t\0\0\0\x01\0\0\0\0\0\x02");
    let bytes = response(&mut socket).await;
    assert_eq!(bytes[..6], [0, 0, 0, 7, 0, 0]);
}
