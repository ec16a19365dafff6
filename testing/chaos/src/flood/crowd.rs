//! Clients that do a node harm: idle ones by the thousand, readers that take nothing, writers that
//! do not wait, and some that speak HTTP/2 only to be a burden.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context;
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
use tokio::time::{sleep, timeout};
use tonic::Streaming;
use tonic::transport::Channel;

use super::harm::{Harm, frame};
use super::{GUESTS_PARTITION, PARTITIONS, TOPIC, append, connect};

/// Batches that each writer has under way.
const UNDER_WAY: usize = 4;

/// What a client says first: the preface, and settings without a word.
const HELLO: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";

/// How far the crowd stands back for the node and the guest, in steps of `nice`.
const NICE: i32 = 10;

/// How long the node may take to close what it does not want.
const SETTLE: Duration = Duration::from_secs(2);

/// How long a stream that was ended may take to say so.
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

pub(crate) struct Crowd {
    address: SocketAddr,
    threads: Threads,
    idle: Arc<Idle>,
    subscriptions: Vec<Streaming<SubscribeResponse>>,
    refused: usize,
    writes: Arc<Writes>,
    busy: JoinSet<()>,
    busy_connections: usize,
}

impl Crowd {
    pub(crate) fn new(address: SocketAddr) -> anyhow::Result<Self> {
        Ok(Self {
            address,
            threads: Threads::new()?,
            idle: Arc::default(),
            subscriptions: Vec::new(),
            refused: 0,
            writes: Arc::default(),
            busy: JoinSet::new(),
            busy_connections: 0,
        })
    }

    /// Connections that have been opened and kept.
    pub(crate) fn open(&self) -> usize {
        self.idle_open() + self.subscriptions.len() + self.busy_connections
    }

    /// Of these, those that have nothing to say.
    pub(crate) fn idle_open(&self) -> usize {
        self.idle.open.load(Ordering::Relaxed)
    }

    /// Connections that the node would not have.
    pub(crate) fn refused(&self) -> usize {
        self.refused + self.idle.closed.load(Ordering::Relaxed)
    }

    /// Batches acknowledged and refused.
    pub(crate) fn writes(&self) -> (u64, u64) {
        let Writes { acked, refused } = &*self.writes;
        (acked.load(Ordering::Relaxed), refused.load(Ordering::Relaxed))
    }

    /// Says hello on so many connections, answers what the node asks, and has nothing to say.
    pub(crate) async fn idle(&mut self, count: usize) {
        for _ in 0..count {
            match self.threads.run(TcpStream::connect(self.address)).await {
                Ok(stream) => self.spawn(idle(stream, self.idle.clone())),
                Err(_) => self.refused += 1,
            }
        }
        // A connection is accepted by the kernel first, and closed by the node then.
        sleep(SETTLE).await;
    }

    pub(crate) async fn write(&mut self, count: usize) -> anyhow::Result<()> {
        for number in 0..count {
            let channel = self.threads.run(connect(self.address)).await?;
            self.busy_connections += 1;
            let partition = partition(number);
            for _ in 0..UNDER_WAY {
                self.spawn(write(channel.clone(), partition, self.writes.clone()));
            }
        }
        Ok(())
    }

    /// Half of them subscribe, half of them fetch as much as they may; none takes anything.
    pub(crate) async fn read_nothing(&mut self, count: usize) {
        for number in 0..count {
            let Ok(channel) = self.threads.run(connect(self.address)).await else {
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
                // Kept, and never asked for a message.
                match consume.subscribe(request).await {
                    Ok(answers) => self.subscriptions.push(answers.into_inner()),
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
                self.spawn(fetch_and_take_nothing(channel, request));
            }
        }
    }

    /// How many of the subscriptions the node has ended.
    pub(crate) async fn readers_ended(&mut self) -> usize {
        let mut ended = 0;
        for answers in &mut self.subscriptions {
            // What had been sent comes first; one that was not ended goes on sending.
            let end = async { while let Ok(Some(_)) = answers.message().await {} };
            ended += usize::from(timeout(END_MAX, end).await.is_ok());
        }
        ended
    }

    /// Each does harm of one of these kinds, over and over.
    pub(crate) fn vandalise(&mut self, count: usize, kinds: &[Harm]) {
        for harm in kinds.iter().copied().cycle().take(count) {
            let address = self.address;
            self.spawn(async move {
                loop {
                    // Ignored: being thrown out is what it is there for.
                    let _ = vandalise(address, harm).await;
                    sleep(Duration::from_millis(20)).await;
                }
            });
        }
    }

    pub(crate) async fn leave(mut self) {
        self.busy.shutdown().await;
    }

    fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.busy.spawn_on(task, self.threads.handle());
    }
}

/// Where the crowd lives. On a machine of their own they would take none of the node's time, nor of
/// the guest's: here they get what those two leave.
struct Threads(Option<Runtime>);

impl Threads {
    fn new() -> anyhow::Result<Self> {
        let nice = || {
            // Ignored: then they are in the way of the others, and that is seen.
            let _ = rustix::process::nice(NICE);
        };
        let runtime = Builder::new_multi_thread().enable_all().on_thread_start(nice).build();
        Ok(Self(Some(runtime.context("threads for the crowd")?)))
    }

    fn handle(&self) -> &Handle {
        self.0.as_ref().expect("there until it is dropped").handle()
    }

    /// What a connection needs to live on is made where it is opened.
    async fn run<T: Send + 'static>(&self, task: impl Future<Output = T> + Send + 'static) -> T {
        self.handle().spawn(task).await.expect("it does not panic")
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Until the node closes the connection, or the crowd leaves.
async fn idle(mut stream: TcpStream, idle: Arc<Idle>) {
    idle.open.fetch_add(1, Ordering::Relaxed);
    // Always an error: that is how it ends.
    let _ = answer(&mut stream).await;
    idle.open.fetch_sub(1, Ordering::Relaxed);
    idle.closed.fetch_add(1, Ordering::Relaxed);
}

/// Acknowledges settings and pings.
async fn answer(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(HELLO).await?;
    let mut payload = Vec::new();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await?;
        let [a, b, c, kind, flags, ..] = head;
        payload.resize(u32::from_be_bytes([0, a, b, c]) as usize, 0);
        stream.read_exact(&mut payload).await?;
        let mut answer = Vec::new();
        match (kind, flags & 1) {
            (4, 0) => frame(&mut answer, 4, 1, 0, &[]),
            (6, 0) => frame(&mut answer, 6, 1, 0, &payload),
            _ => {}
        }
        stream.write_all(&answer).await?;
    }
}

fn partition(number: usize) -> u32 {
    let others = PARTITIONS - 1;
    GUESTS_PARTITION + 1 + u32::try_from(number).unwrap_or_default() % others
}

fn earliest(partition: u32) -> PartitionStart {
    let position = Position::Named(NamedPosition::Earliest.into());
    PartitionStart {
        topic: TOPIC.to_owned(),
        partition,
        start: Some(StartPosition { position: Some(position) }),
        until_offset: None,
    }
}

async fn write(channel: Channel, partition: u32, writes: Arc<Writes>) {
    let mut produce = ProduceServiceClient::new(channel);
    let request = append(partition, 100);
    loop {
        match produce.append(request.clone()).await {
            Ok(_) => writes.acked.fetch_add(1, Ordering::Relaxed),
            Err(_) => writes.refused.fetch_add(1, Ordering::Relaxed),
        };
    }
}

/// Asks, and holds the answer's body without looking at it.
async fn fetch_and_take_nothing(channel: Channel, request: FetchRequest) {
    use tonic::codegen::http::uri::PathAndQuery;

    let mut grpc = tonic::client::Grpc::new(channel);
    if grpc.ready().await.is_err() {
        return;
    }
    let path = PathAndQuery::from_static("/helix.log.v1.ConsumeService/Fetch");
    let codec =
        helix_proto::codec::Codec::<FetchRequest, helix_proto::log::v1::FetchResponse>::default();
    let answers = grpc.server_streaming(tonic::Request::new(request), path, codec).await;
    let _kept = answers;
    std::future::pending::<()>().await;
}

/// One connection's worth of harm.
async fn vandalise(address: SocketAddr, harm: Harm) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(HELLO).await?;
    stream.write_all(&harm.bytes()).await?;
    // Until it is thrown out, or has been there for a while.
    let mut sink = [0; 4096];
    let read = async { while matches!(stream.read(&mut sink).await, Ok(1..)) {} };
    // Ignored: see above.
    let _ = timeout(Duration::from_secs(1), read).await;
    Ok(())
}
