//! Abusive clients: thousands of idle connections, readers that do not read, writers without
//! backpressure, and clients that send abusive HTTP/2 traffic.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context;
use helix_client::{AuthorizedChannel, TokenSource};
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::{
    FetchRequest, NamedPosition, PartitionStart, ReadLimits, StartPosition, SubscribeRequest,
    SubscribeResponse,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinSet;
use tokio::time::{interval, sleep, timeout};
use tonic::Streaming;

use super::abuse::{AbusePattern, frame};
use super::{PARTITIONS, PROBE_PARTITION, TOPIC, append, connect};

/// Batches in flight per writer.
const BATCHES_IN_FLIGHT: usize = 4;

/// Connection preface and empty SETTINGS.
pub(super) const PREFACE: &[u8] =
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";

/// Header of a TLS record, and its first byte.
const HANDSHAKE_START: &[u8] = &[0x16, 3, 1, 0x40, 0, 1];

/// `nice` value of these clients, so that the node and the probe client run first.
const NICE: i32 = 10;

/// Wait for the node to close excess connections.
const SETTLE: Duration = Duration::from_secs(2);

/// Wait for a stream that was ended to report it.
const END_MAX: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
struct Writes {
    acked: AtomicU64,
    refused: AtomicU64,
}

#[derive(Debug, Default)]
struct Idle {
    open: AtomicUsize,
    closed: AtomicUsize,
}

pub(crate) struct AbusiveClients {
    address: SocketAddr,
    token: TokenSource,
    runtime: LowPriorityRuntime,
    idle: Arc<Idle>,
    subscriptions: Vec<Streaming<SubscribeResponse>>,
    refused: usize,
    writes: Arc<Writes>,
    busy: JoinSet<()>,
    busy_connections: usize,
}

impl AbusiveClients {
    pub(crate) fn new(address: SocketAddr, token: TokenSource) -> anyhow::Result<Self> {
        Ok(Self {
            address,
            token,
            runtime: LowPriorityRuntime::new()?,
            idle: Arc::default(),
            subscriptions: Vec::new(),
            refused: 0,
            writes: Arc::default(),
            busy: JoinSet::new(),
            busy_connections: 0,
        })
    }

    /// Returns the connections that were opened and kept.
    pub(crate) fn open(&self) -> usize {
        self.idle_open() + self.subscriptions.len() + self.busy_connections
    }

    /// Returns the idle connections among these.
    pub(crate) fn idle_open(&self) -> usize {
        self.idle.open.load(Ordering::Relaxed)
    }

    /// Returns the connections that the node refused or closed.
    pub(crate) fn refused(&self) -> usize {
        self.refused + self.idle.closed.load(Ordering::Relaxed)
    }

    /// Returns the batches acknowledged and rejected.
    pub(crate) fn writes(&self) -> (u64, u64) {
        let Writes { acked, refused } = &*self.writes;
        (acked.load(Ordering::Relaxed), refused.load(Ordering::Relaxed))
    }

    /// Opens idle connections that only acknowledge settings and pings.
    pub(crate) async fn idle(&mut self, count: usize) {
        for _ in 0..count {
            match self.runtime.run(TcpStream::connect(self.address)).await {
                Ok(stream) => self.spawn(idle(stream, self.idle.clone())),
                Err(_) => self.refused += 1,
            }
        }
        // The kernel accepts a connection first; the node closes it afterwards.
        sleep(SETTLE).await;
    }

    /// Begins TLS handshakes, evenly over this time, and leaves them half open.
    pub(crate) fn begin_handshakes(&mut self, count: usize, over: Duration) {
        let address = self.address;
        let count = u32::try_from(count).unwrap_or(u32::MAX).max(1);
        let pause = (over / count).max(Duration::from_micros(1));
        self.spawn(async move {
            let mut half_open = JoinSet::new();
            let mut turn = interval(pause);
            for _ in 0..count {
                turn.tick().await;
                half_open.spawn(begin_handshake(address));
                while half_open.try_join_next().is_some() {}
            }
            while half_open.join_next().await.is_some() {}
        });
    }

    pub(crate) async fn write(&mut self, count: usize) -> anyhow::Result<()> {
        for number in 0..count {
            let channel = self.runtime.run(connect(self.address, self.token.clone())).await?;
            self.busy_connections += 1;
            let partition = partition(number);
            for _ in 0..BATCHES_IN_FLIGHT {
                self.spawn(write(channel.clone(), partition, self.writes.clone()));
            }
        }
        Ok(())
    }

    /// Opens readers that do not read: half of them subscribe, half of them fetch without a limit.
    pub(crate) async fn open_stalled_readers(&mut self, count: usize) {
        for number in 0..count {
            let connecting = connect(self.address, self.token.clone());
            let Ok(channel) = self.runtime.run(connecting).await else {
                self.refused += 1;
                continue;
            };
            let mut consume = ConsumeServiceClient::new(channel.clone());
            let partitions = vec![earliest(partition(number))];
            if number % 2 == 0 {
                let request = SubscribeRequest {
                    partitions,
                    accept_encoded: true,
                    ..SubscribeRequest::default()
                };
                // Kept, but never polled for a message.
                match consume.subscribe(request).await {
                    Ok(responses) => self.subscriptions.push(responses.into_inner()),
                    Err(_) => self.refused += 1,
                }
            } else {
                let limits = ReadLimits { max_bytes: Some(u64::MAX), ..ReadLimits::default() };
                let request = FetchRequest {
                    partitions,
                    accept_encoded: true,
                    limits: Some(limits),
                    ..FetchRequest::default()
                };
                self.busy_connections += 1;
                self.spawn(fetch_without_reading(channel, request));
            }
        }
    }

    /// Returns the number of subscriptions that the node has ended.
    pub(crate) async fn readers_ended(&mut self) -> usize {
        let mut ended = 0;
        for responses in &mut self.subscriptions {
            // Buffered messages come first; a stream that was not ended continues.
            let end = async { while let Ok(Some(_)) = responses.message().await {} };
            ended += usize::from(timeout(END_MAX, end).await.is_ok());
        }
        ended
    }

    /// Starts clients that send these patterns of abusive traffic repeatedly.
    pub(crate) fn abuse(&mut self, count: usize, patterns: &[AbusePattern]) {
        for pattern in patterns.iter().copied().cycle().take(count) {
            let address = self.address;
            self.spawn(async move {
                loop {
                    // Ignored: the node is expected to close the connection.
                    let _ = send_abuse(address, pattern).await;
                    sleep(Duration::from_millis(20)).await;
                }
            });
        }
    }

    pub(crate) async fn stop(mut self) {
        self.busy.shutdown().await;
    }

    fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.busy.spawn_on(task, self.runtime.handle());
    }
}

/// Runtime of the abusive clients. Its threads have low priority because real clients would run on
/// other hosts and take no CPU time from the node.
pub(super) struct LowPriorityRuntime(Option<Runtime>);

impl LowPriorityRuntime {
    pub(super) fn new() -> anyhow::Result<Self> {
        let nice = || {
            // Ignored: the clients then compete for CPU, which the result shows.
            let _ = rustix::process::nice(NICE);
        };
        let runtime = Builder::new_multi_thread().enable_all().on_thread_start(nice).build();
        Ok(Self(Some(runtime.context("start threads for abusive clients")?)))
    }

    pub(super) fn handle(&self) -> &Handle {
        self.0.as_ref().expect("present until dropped").handle()
    }

    /// Runs a task here, so that a connection's background tasks also run here.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> T {
        self.handle().spawn(task).await.expect("it does not panic")
    }
}

impl Drop for LowPriorityRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Runs until the node closes the connection or the clients are dropped.
async fn idle(mut stream: TcpStream, idle: Arc<Idle>) {
    idle.open.fetch_add(1, Ordering::Relaxed);
    // Always an error: that is how it ends.
    let _ = acknowledge(&mut stream).await;
    idle.open.fetch_sub(1, Ordering::Relaxed);
    idle.closed.fetch_add(1, Ordering::Relaxed);
}

/// Acknowledges settings and pings.
async fn acknowledge(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(PREFACE).await?;
    let mut payload = Vec::new();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await?;
        let [a, b, c, kind, flags, ..] = head;
        payload.resize(u32::from_be_bytes([0, a, b, c]) as usize, 0);
        stream.read_exact(&mut payload).await?;
        let mut response = Vec::new();
        match (kind, flags & 1) {
            (4, 0) => frame(&mut response, 4, 1, 0, &[]),
            (6, 0) => frame(&mut response, 6, 1, 0, &payload),
            _ => {}
        }
        stream.write_all(&response).await?;
    }
}

pub(super) fn partition(number: usize) -> u32 {
    let others = PARTITIONS - 1;
    PROBE_PARTITION + 1 + u32::try_from(number).unwrap_or_default() % others
}

pub(super) fn earliest(partition: u32) -> PartitionStart {
    let position = Position::Named(NamedPosition::Earliest.into());
    PartitionStart {
        topic: TOPIC.to_owned(),
        partition,
        start: Some(StartPosition { position: Some(position), ..StartPosition::default() }),
        until_offset: None,
        topic_id: 0,
    }
}

async fn write(channel: AuthorizedChannel, partition: u32, writes: Arc<Writes>) {
    let mut produce = ProduceServiceClient::new(channel);
    let request = append(partition, 100);
    loop {
        match produce.append(request.clone()).await {
            Ok(_) => writes.acked.fetch_add(1, Ordering::Relaxed),
            Err(_) => writes.refused.fetch_add(1, Ordering::Relaxed),
        };
    }
}

/// Sends a request and holds the response body without reading it.
async fn fetch_without_reading(channel: AuthorizedChannel, request: FetchRequest) {
    use tonic::codegen::http::uri::PathAndQuery;

    let mut grpc = tonic::client::Grpc::new(channel);
    if grpc.ready().await.is_err() {
        return;
    }
    let path = PathAndQuery::from_static("/helix.log.v1.ConsumeService/Fetch");
    let codec =
        helix_proto::codec::Codec::<FetchRequest, helix_proto::log::v1::FetchResponse>::default();
    let responses = grpc.server_streaming(tonic::Request::new(request), path, codec).await;
    let _kept = responses;
    std::future::pending::<()>().await;
}

/// Sends the start of a TLS handshake, and waits until the node closes the connection.
async fn begin_handshake(address: SocketAddr) {
    let Ok(mut stream) = TcpStream::connect(address).await else { return };
    if stream.write_all(HANDSHAKE_START).await.is_ok() {
        // Ignored: both an end and an error are how it ends.
        let _ = stream.read(&mut [0; 1]).await;
    }
}

/// Sends abusive traffic over one connection.
async fn send_abuse(address: SocketAddr, pattern: AbusePattern) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(PREFACE).await?;
    stream.write_all(&pattern.bytes()).await?;
    // Until the node closes the connection, or for a second.
    let mut sink = [0; 4096];
    let read = async { while matches!(stream.read(&mut sink).await, Ok(1..)) {} };
    // Ignored: both ends of the wait are fine.
    let _ = timeout(Duration::from_secs(1), read).await;
    Ok(())
}
