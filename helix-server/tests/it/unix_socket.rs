//! A server's Unix domain socket, as clients of the same machine see it.

// The tests look at the socket's file, and at that of a token.
#![allow(clippy::disallowed_methods)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use helix_client::{
    Client, Config, Event, NewTopic, Position, ProducerOptions, ReadOptions, ReadStart, TokenSource,
};
use helix_proto::log::v1::{ErrorReason, WhoAmIRequest};
use helix_server::config::{AuthSetting, ServerConfig, SocketMode};
use helix_server::server::{Server, StartError};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::captured_log::CapturedLog;
use crate::limits::HELLO;
use crate::raw_http2::{
    CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, RESET, RawClient, call_block, frame,
    message, text,
};
use crate::support::{TestServer, record, soon};
use crate::trio::until;

/// A directory for a socket, and for the other files of a test.
struct SocketDir(TempDir);

impl SocketDir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("helix.sock")
    }

    fn address(&self) -> String {
        format!("unix:{}", self.path().display())
    }

    /// Returns a configuration whose TCP address clients cannot dial: only the socket works.
    fn config(&self) -> ServerConfig {
        ServerConfig {
            listen_socket: Some(self.path()),
            advertise_addr: Some("127.0.0.1:1".to_owned()),
            ..ServerConfig::in_memory()
        }
    }

    fn client(&self) -> Client {
        self.client_with(TokenSource::none())
    }

    fn client_with(&self, token: TokenSource) -> Client {
        let request_timeout = Duration::from_secs(10);
        let config = Config { token, request_timeout, ..Config::new([self.address()]) };
        Client::new(config).unwrap()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_does_everything_over_the_socket() {
    let directory = SocketDir::new();
    let server = Server::start(directory.config()).await.unwrap();
    let banner = server.banner().to_string();
    assert!(banner.contains(&directory.address()), "{banner}");
    let client = directory.client();
    client.admin().create_topic(&NewTopic::new("orders", 2)).await.unwrap();
    let producer = client.producer(ProducerOptions::default());
    for value in ["a", "b", "c"] {
        soon(producer.send("orders", record(value)).await.unwrap()).await.unwrap();
    }
    let starts = (0..2).map(|partition| ReadStart::new("orders", partition, Position::Earliest));
    let mut events = client.consumer().subscribe(starts.collect(), ReadOptions::default());
    let mut found = 0;
    while found < 3 {
        if let Event::Data(data) = soon(events.next()).await.unwrap().unwrap() {
            found += data.records.len();
        }
    }
    // Calls at a node's address reach it over the socket too.
    let metadata = client.admin().node_metadata(&directory.address()).await.unwrap();
    let status = client.admin().node_status(Some(&metadata.nodes[0].endpoint)).await.unwrap();
    assert_eq!(status.node_id, 1);
    drop(events);
    soon(server.shutdown()).await;
    assert!(!directory.path().exists(), "a clean stop removes the socket");
}

#[tokio::test]
async fn connections_over_the_socket_count_like_others() {
    let (log, _guard) = CapturedLog::capture();
    let directory = SocketDir::new();
    let server = TestServer::start(
        ServerConfig { listen_socket: Some(directory.path()), ..ServerConfig::in_memory() },
        None,
    )
    .await;
    let load = server.running.load().clone();
    // The test's own connection is the other one.
    load.limit_connections(2);
    let mut first = UnixStream::connect(directory.path()).await.unwrap();
    first.write_all(HELLO).await.unwrap();
    until("two are open", async || (load.connection_count() == 2).then_some(())).await;
    let mut beyond = UnixStream::connect(directory.path()).await.unwrap();
    let mut rest = Vec::new();
    // Ignored: any end is accepted.
    let _ = soon(beyond.read_to_end(&mut rest)).await;
    let text = log.text();
    assert!(text.contains("refused connections over the limit"), "{text}");
    drop(first);
    until("one is closed", async || (load.connection_count() < 2).then_some(())).await;
    // A connection without calls does not delay the stop.
    let mut idle = UnixStream::connect(directory.path()).await.unwrap();
    idle.write_all(HELLO).await.unwrap();
    soon(idle.read_u8()).await.expect("it is served");
    let TestServer { running, channel, .. } = server;
    drop(channel);
    soon(running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_are_required_over_the_socket_as_well() {
    let directory = SocketDir::new();
    let file = directory.0.path().join("token");
    let config = ServerConfig {
        auth: AuthSetting::Required,
        admin_token_file: Some(file.clone()),
        ..directory.config()
    };
    let server = Server::start(config).await.unwrap();
    let error = directory.client().admin().topics("").await.unwrap_err();
    assert!(error.is(ErrorReason::Unauthenticated), "{error}");
    let topics = until("the first token is accepted", async || {
        let token = fs::read_to_string(&file).ok()?;
        let token = TokenSource::fixed(token.trim()).ok()?;
        directory.client_with(token).admin().topics("").await.ok()
    })
    .await;
    assert_eq!(topics.len(), 1);
    soon(server.shutdown()).await;
}

#[tokio::test]
async fn a_start_replaces_only_the_socket_of_an_ended_process() {
    let directory = SocketDir::new();
    let path = directory.path();
    // Dropping the listener of the standard library leaves the file, as a killed process does.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let listen_socket_mode = SocketMode(0o600);
    let config = ServerConfig { listen_socket_mode, ..directory.config() };
    let server = Server::start(config).await.unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let error = Server::start(directory.config()).await.map(drop).unwrap_err();
    assert!(matches!(error, StartError::SocketListen { .. }), "{error}");
    for part in [&*directory.address(), "--listen-socket", "a process listens on it"] {
        assert!(error.to_string().contains(part), "no {part:?} in {error}");
    }
    directory.client().admin().topics("").await.expect("the first server still has it");
    soon(server.shutdown()).await;
    fs::write(&path, "data").unwrap();
    let error = Server::start(directory.config()).await.map(drop).unwrap_err();
    assert!(error.to_string().contains("not a socket"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"data");
    fs::remove_file(&path).unwrap();
    let server = Server::start(directory.config()).await.unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
    soon(server.shutdown()).await;
}

/// gRPC's C core sends the percent-encoded path of the socket.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_authority_is_accepted_over_the_socket() {
    let directory = SocketDir::new();
    let server = Server::start(directory.config()).await.unwrap();
    let path = directory.path().display().to_string();
    let mut client = RawClient::new(UnixStream::connect(&path).await.unwrap()).await;
    let encoded = path.replace('/', "%2F");
    let authorities =
        [encoded.as_str(), &path, "unix:///a b", "[", "a:b:c", "@", "localhost", "127.0.0.1:9"];
    for authority in authorities {
        // By the static index, and by the name: indexed, and never indexed.
        for name in [vec![0x41], vec![0x01], named(0x40), named(0x10)] {
            let stream = client.next_stream();
            let mut block = [name, text(authority.as_bytes())].concat();
            block.extend(call_block("/helix.log.v1.AccessService/WhoAmI", &[]));
            // The header block in two frames.
            let (first, second) = block.split_at(5);
            client.send(&frame(HEADERS, 0, stream, first)).await;
            client.send(&frame(CONTINUATION, END_HEADERS, stream, second)).await;
            client.send(&frame(DATA, END_STREAM, stream, &message(&WhoAmIRequest {}))).await;
            loop {
                let (kind, flags, of) = client.read().await;
                assert_ne!(kind, RESET, "{authority}");
                if of == stream && kind == HEADERS && flags & END_STREAM != 0 {
                    break;
                }
            }
        }
    }
    // An entry of the dynamic table: the newest one is at 62.
    let stream = client.next_stream();
    let mut block = vec![0x80 | 62];
    block.extend(call_block("/helix.log.v1.AccessService/WhoAmI", &[]));
    client.send(&frame(HEADERS, END_HEADERS, stream, &block)).await;
    client.send(&frame(DATA, END_STREAM, stream, &message(&WhoAmIRequest {}))).await;
    loop {
        let (kind, flags, of) = client.read().await;
        assert_ne!(kind, RESET);
        if of == stream && kind == HEADERS && flags & END_STREAM != 0 {
            break;
        }
    }
    soon(server.shutdown()).await;
}

/// A literal field of HPACK with this first byte and the name of the authority.
fn named(first: u8) -> Vec<u8> {
    [vec![first], text(b":authority")].concat()
}
