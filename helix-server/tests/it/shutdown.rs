//! Start and shutdown: open calls end in bounded time, with a reason.

use std::time::Duration;

use helix_proto::log::v1::append_stream_request::Message as Sent;
use helix_proto::log::v1::{
    AppendStreamInit, AppendStreamRequest, ErrorReason, FetchRequest, SubscribeRequest,
    WatchMetadataRequest,
};
use helix_server::config::ServerConfig;
use helix_server::limits::SHUTDOWN_WAIT_MAX;
use helix_server::server::{Server, StartError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tonic::{Code, Status};
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;

use crate::limits::HELLO;
use crate::support::{TestServer, append_request, latest, on_both, reason, soon};

#[tokio::test]
async fn open_streams_end_with_draining_at_shutdown() {
    on_both(async |server: TestServer| {
        server.append(&["a"]).await;
        let request =
            SubscribeRequest { partitions: vec![latest(0)], ..SubscribeRequest::default() };
        let mut subscription = server.consume().subscribe(request).await.unwrap().into_inner();
        let request = WatchMetadataRequest::default();
        let mut watch = server.cluster().watch_metadata(request).await.unwrap().into_inner();
        let init = AppendStreamInit { topic: "default".to_owned(), ..Default::default() };
        let init = AppendStreamRequest { message: Some(Sent::Init(init)) };
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        sender.send(init).await.unwrap();
        let requests = tokio_stream::wrappers::ReceiverStream::new(receiver);
        let mut session = server.produce().append_stream(requests).await.unwrap().into_inner();
        assert!(soon(session.message()).await.unwrap().is_some(), "opened");
        let poll = FetchRequest {
            partitions: vec![latest(0)],
            max_wait: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
            ..FetchRequest::default()
        };
        let mut consume = server.consume();
        let now = FetchRequest { max_wait: None, ..poll.clone() };
        let poll = tokio::spawn(async move { consume.fetch(poll).await.map(drop) });
        tokio::task::yield_now().await;
        // On the same connection: the poll, sent earlier, has arrived before this response.
        assert!(soon(server.consume().fetch(now)).await.is_ok());

        let begin = Instant::now();
        let TestServer { running, channel, .. } = server;
        let stop = tokio::spawn(running.shutdown());
        assert_eq!(reason(&end(&mut subscription).await), ErrorReason::Draining);
        assert_eq!(reason(&end(&mut watch).await), ErrorReason::Draining);
        assert_eq!(reason(&end(&mut session).await), ErrorReason::Draining);
        assert_eq!(reason(&soon(poll).await.unwrap().unwrap_err()), ErrorReason::Draining);
        drop(channel);
        soon(stop).await.unwrap();
        assert!(begin.elapsed() < SHUTDOWN_WAIT_MAX, "{:?}", begin.elapsed());
    })
    .await;
}

#[tokio::test]
async fn connected_client_does_not_delay_shutdown() {
    let server = TestServer::in_memory().await;
    let request = SubscribeRequest { partitions: vec![latest(0)], ..SubscribeRequest::default() };
    // Neither read nor dropped.
    let _subscription = server.consume().subscribe(request).await.unwrap().into_inner();
    let begin = Instant::now();
    let TestServer { running, channel, .. } = server;
    soon(running.shutdown()).await;
    assert!(begin.elapsed() < SHUTDOWN_WAIT_MAX + Duration::from_secs(3));
    let mut produce =
        helix_proto::log::v1::produce_service_client::ProduceServiceClient::new(channel);
    let status = soon(produce.append(append_request(&["late"]))).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
}

#[tokio::test]
async fn request_stream_ends_after_its_responses_at_shutdown() {
    let server = TestServer::in_memory().await;
    let mut reflection = ServerReflectionClient::new(server.channel.clone());
    let question = MessageRequest::ListServices(String::new());
    let question = ServerReflectionRequest { host: String::new(), message_request: Some(question) };
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    sender.send(question).await.unwrap();
    let questions = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let mut answers = reflection.server_reflection_info(questions).await.unwrap().into_inner();
    assert!(soon(answers.message()).await.unwrap().is_some());
    let begin = Instant::now();
    let TestServer { running, channel, .. } = server;
    let stop = tokio::spawn(running.shutdown());
    assert_eq!(soon(answers.message()).await.unwrap(), None);
    drop((channel, reflection));
    soon(stop).await.unwrap();
    assert!(begin.elapsed() < SHUTDOWN_WAIT_MAX, "{:?}", begin.elapsed());
}

#[tokio::test]
async fn unresponsive_client_is_disconnected_at_shutdown() {
    let server = TestServer::in_memory().await;
    let mut client = TcpStream::connect(server.running.local_addr()).await.unwrap();
    client.write_all(HELLO).await.unwrap();
    soon(client.read_u8()).await.expect("it is served");
    let TestServer { running, channel, .. } = server;
    drop(channel);
    // The server can only wait for the client now.
    tokio::time::pause();
    running.shutdown().await;
    tokio::time::resume();
    let mut rest = Vec::new();
    // Ignored: any end is accepted.
    let _ = soon(client.read_to_end(&mut rest)).await;
}

#[tokio::test]
async fn connections_without_open_calls_do_not_delay_the_stop() {
    let server = TestServer::in_memory().await;
    let mut silent = Vec::new();
    for sent in [&[], &HELLO[..10], HELLO] {
        let mut client = TcpStream::connect(server.running.local_addr()).await.unwrap();
        client.write_all(sent).await.unwrap();
        silent.push(client);
    }
    soon(silent[2].read_u8()).await.expect("it is served");
    let TestServer { running, channel, .. } = server;
    let begin = Instant::now();
    soon(running.shutdown()).await;
    // A stop that waits for them lasts at least that long.
    assert!(begin.elapsed() < SHUTDOWN_WAIT_MAX, "{:?}", begin.elapsed());
    drop((silent, channel));
}

#[tokio::test]
async fn error_names_listen_address_in_use() {
    let server = TestServer::in_memory().await;
    let listen_addr = server.running.local_addr();
    let config = ServerConfig { listen_addr, ..ServerConfig::in_memory() };
    let error = Server::start(config).await.map(drop).unwrap_err();
    assert!(matches!(error, StartError::Listen { .. }));
    let message = error.to_string();
    assert!(message.contains(&listen_addr.to_string()), "{message}");
    assert!(message.contains("--listen-addr"), "{message}");
}

#[tokio::test]
async fn data_directory_has_one_server_at_a_time() {
    let directory = tempfile::tempdir().unwrap();
    let config = ServerConfig::in_dir(directory.path());
    let first = Server::start(config.clone()).await.unwrap();
    let error = Server::start(config.clone()).await.map(drop).unwrap_err();
    assert!(matches!(error, StartError::Open(_)), "{error}");
    soon(first.shutdown()).await;
    soon(Server::start(config).await.unwrap().shutdown()).await;
}

#[tokio::test]
async fn banner_states_what_an_ack_means() {
    let memory = TestServer::in_memory().await;
    let banner = memory.running.banner().to_string();
    assert!(banner.contains("all data is lost"), "{banner}");
    let durable = TestServer::durable().await;
    let banner = durable.running.banner().to_string();
    let address = durable.running.local_addr().to_string();
    for part in ["synced", "p50", "I/O", &address] {
        assert!(banner.contains(part), "{part}: {banner}");
    }
}

/// Reads to the end of a stream and returns its final status.
async fn end<T>(stream: &mut tonic::Streaming<T>) -> Status {
    soon(async {
        loop {
            match stream.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("the stream ended as if it were complete"),
                Err(status) => return status,
            }
        }
    })
    .await
}
