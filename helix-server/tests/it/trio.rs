//! Three servers in the test's own process that are one cluster, on loopback and real disks.
//! What the tests of the cluster share; where asked, the links between the nodes can be cut.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, TcpListener as StdTcpListener};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use helix_client::{Ack, Client, ProducerOptions};
use helix_proto::log::v1::{
    ErrorReason, FetchRequest, GetHealthRequest, GetHealthResponse, GetMetadataRequest,
    GetNodeStatusRequest, GetTopicRequest, Metadata, PartitionRecords, ReadSource, ShardStatus,
    StoredBatch, Topic, TransferLeaderRequest,
};
use helix_server::config::{AdminAddr, ServerConfig, StorageMode};
use helix_server::limits::{CATCH_UP_BYTES, CHECKPOINT_BYTES};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tonic::Status;

use crate::support::{TestServer, from_offset, reason, records};

pub(crate) const NODES: [u64; 3] = [1, 2, 3];

/// Elections and restarts on a busy machine are over long before.
const PATIENCE: Duration = Duration::from_secs(40);

const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Looks again and again until there is something to see.
pub(crate) async fn until<T>(what: &str, look: impl AsyncFnMut() -> Option<T>) -> T {
    until_within(PATIENCE, what, look).await
}

pub(crate) async fn until_within<T>(
    patience: Duration,
    what: &str,
    mut look: impl AsyncFnMut() -> Option<T>,
) -> T {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(seen) = look().await {
            return seen;
        }
        assert!(Instant::now() < deadline, "not within {patience:?}: {what}");
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// Ports below those that the system hands out by itself, each given out once in this process.
pub(crate) fn free_port() -> u16 {
    const PORTS: std::ops::Range<u32> = 12_000..20_000;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let span = PORTS.end - PORTS.start;
    // Test processes begin at different places, so that they do not meet.
    let first = std::process::id().wrapping_mul(61) % span;
    for _ in 0..span {
        let place = (first + NEXT.fetch_add(1, Ordering::Relaxed)) % span;
        let port = u16::try_from(PORTS.start + place).unwrap();
        if StdTcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
    panic!("no free port on 127.0.0.1");
}

/// The way from one node to another: a TCP proxy. What is sent while it is cut arrives after it
/// is healed, as with a network that repeats what was lost.
struct Link {
    address: String,
    way: watch::Sender<Way>,
    serving: JoinHandle<()>,
}

/// How a link is.
#[derive(Clone, Copy, Default)]
struct Way {
    is_cut: bool,
    /// Pause after each piece of at most 64 KiB.
    pause: Duration,
    /// Connections made before the last change of it have ended.
    breaks: u64,
}

impl Link {
    async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (way, changes) = watch::channel(Way::default());
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(carry(stream, target, changes.clone()));
            }
        });
        Self { address, way, serving }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn carry(near: TcpStream, target: SocketAddr, mut way: watch::Receiver<Way>) {
    let breaks = way.borrow().breaks;
    if way.wait_for(|way| !way.is_cut).await.is_err() {
        return;
    }
    let Ok(far) = TcpStream::connect(target).await else { return };
    near.set_nodelay(true).unwrap();
    far.set_nodelay(true).unwrap();
    let (near_read, near_write) = near.into_split();
    let (far_read, far_write) = far.into_split();
    let mut broken = way.clone();
    tokio::select! {
        () = forward(near_read, far_write, way.clone()) => {}
        () = forward(far_read, near_write, way) => {}
        _ = broken.wait_for(|way| way.breaks > breaks) => {}
    }
}

async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut way: watch::Receiver<Way>) {
    let mut bytes = vec![0; 64 << 10];
    loop {
        let Ok(count @ 1..) = from.read(&mut bytes).await else { return };
        let pause = way.borrow().pause;
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        if way.wait_for(|way| !way.is_cut).await.is_err() {
            return;
        }
        if to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}

/// Where the nodes of a cluster are, and what they are started with.
pub(crate) struct Plan {
    root: TempDir,
    storage: StorageMode,
    listen: BTreeMap<u64, SocketAddr>,
    peer: BTreeMap<u64, SocketAddr>,
    /// By (from, to); none where nothing is to be cut.
    links: BTreeMap<(u64, u64), Link>,
    catch_up_bytes: u64,
    checkpoint_bytes: u64,
}

impl Plan {
    pub(crate) fn new() -> Self {
        let address = || SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
        Self {
            root: tempfile::tempdir().unwrap(),
            storage: StorageMode::Durable,
            listen: NODES.map(|node| (node, address())).into(),
            peer: NODES.map(|node| (node, address())).into(),
            links: BTreeMap::new(),
            catch_up_bytes: CATCH_UP_BYTES,
            checkpoint_bytes: CHECKPOINT_BYTES,
        }
    }

    pub(crate) fn in_memory() -> Self {
        Self { storage: StorageMode::Memory, ..Self::new() }
    }

    /// With links that can be cut.
    pub(crate) async fn linked() -> Self {
        Self::new().with_links().await
    }

    pub(crate) async fn with_links(mut self) -> Self {
        for from in NODES {
            for to in NODES.into_iter().filter(|to| *to != from) {
                self.links.insert((from, to), Link::to(self.peer[&to]).await);
            }
        }
        self
    }

    /// With nodes that hardly keep log for one that is away.
    pub(crate) fn with_short_logs(self) -> Self {
        Self { catch_up_bytes: 2 << 20, checkpoint_bytes: 1 << 20, ..self }
    }

    pub(crate) fn config(&self, node: u64) -> ServerConfig {
        let way = |to: u64| match self.links.get(&(node, to)) {
            Some(link) => link.address.clone(),
            None => self.peer[&to].to_string(),
        };
        ServerConfig {
            shards: Some(3),
            node_id: node,
            storage: self.storage,
            listen_addr: self.listen[&node],
            peer_addr: self.peer[&node],
            admin_addr: Some(AdminAddr::At(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))),
            peers: NODES.map(|to| (to, way(to))).into(),
            data_dir: self.folder(node),
            segment_bytes: 16 << 20,
            tail_bytes: Some(2 << 20),
            catch_up_bytes: self.catch_up_bytes,
            checkpoint_bytes: self.checkpoint_bytes,
            ..ServerConfig::default()
        }
    }

    /// Address of a node's peer port.
    pub(crate) fn peer(&self, node: u64) -> SocketAddr {
        self.peer[&node]
    }

    pub(crate) fn folder(&self, node: u64) -> PathBuf {
        self.root.path().join(format!("node-{node}"))
    }

    /// Begins to start a node, which may wait for others.
    pub(crate) fn launch(&self, node: u64) -> JoinHandle<TestServer> {
        launch(self.config(node))
    }

    fn change_links(&self, node: u64, change: impl Fn(&mut Way)) {
        assert!(!self.links.is_empty(), "the plan has no links");
        let of_node = |(from, to): (u64, u64)| from == node || to == node;
        for (ends, link) in &self.links {
            if of_node(*ends) {
                link.way.send_modify(&change);
            }
        }
    }
}

pub(crate) fn launch(config: ServerConfig) -> JoinHandle<TestServer> {
    tokio::spawn(TestServer::start(config, None))
}

/// The nodes of a cluster that run.
pub(crate) struct Trio {
    pub(crate) plan: Plan,
    nodes: BTreeMap<u64, TestServer>,
}

impl Trio {
    /// Three nodes on disks, formed and well.
    pub(crate) async fn durable() -> Self {
        Self::start(Plan::new()).await
    }

    pub(crate) async fn start(plan: Plan) -> Self {
        let mut trio = Self { plan, nodes: BTreeMap::new() };
        trio.start_nodes(&NODES).await;
        trio.settle().await;
        trio
    }

    /// Nodes that were started already.
    pub(crate) fn of(plan: Plan, nodes: BTreeMap<u64, TestServer>) -> Self {
        Self { plan, nodes }
    }

    pub(crate) async fn start_nodes(&mut self, nodes: &[u64]) {
        let launched: Vec<_> = nodes.iter().map(|node| (*node, self.plan.launch(*node))).collect();
        for (node, server) in launched {
            let server = tokio::time::timeout(PATIENCE, server).await;
            self.nodes.insert(node, server.expect("the node should start").unwrap());
        }
    }

    /// Stops a node as SIGTERM does.
    pub(crate) async fn stop(&mut self, node: u64) {
        let TestServer { running, channel, .. } = self.nodes.remove(&node).expect("it runs");
        drop(channel);
        running.shutdown().await;
    }

    pub(crate) async fn stop_all(&mut self) {
        let nodes = std::mem::take(&mut self.nodes).into_values();
        futures_util::future::join_all(nodes.map(|node| node.running.shutdown())).await;
    }

    /// Cuts all links of a node.
    pub(crate) fn cut_off(&self, node: u64) {
        self.plan.change_links(node, |way| way.is_cut = true);
    }

    pub(crate) fn heal(&self, node: u64) {
        self.plan.change_links(node, |way| way.is_cut = false);
    }

    /// Cuts two nodes off from each other, or joins them again.
    pub(crate) fn part(&self, one: u64, other: u64, is_cut: bool) {
        for ends in [(one, other), (other, one)] {
            self.plan.links[&ends].way.send_modify(|way| way.is_cut = is_cut);
        }
    }

    /// Slows down all links of a node: some 64 KiB each time.
    pub(crate) fn slow_down(&self, node: u64, pause: Duration) {
        self.plan.change_links(node, |way| way.pause = pause);
    }

    /// Slows down the connections that one node makes to another, as [`Self::slow_down`] does, or
    /// cuts them.
    pub(crate) fn hinder(&self, from: u64, to: u64, pause: Duration, is_cut: bool) {
        self.plan.links[&(from, to)].way.send_modify(|way| {
            way.pause = pause;
            way.is_cut = is_cut;
        });
    }

    /// Takes away all links of a node: connections over them end, and others are refused.
    pub(crate) fn isolate(&mut self, node: u64) {
        self.plan.links.retain(|(from, to), _| *from != node && *to != node);
    }

    /// Ends all connections of a node. They are made anew at once.
    pub(crate) fn break_connections(&self, node: u64) {
        self.plan.change_links(node, |way| way.breaks += 1);
    }

    pub(crate) fn node(&self, node: u64) -> &TestServer {
        &self.nodes[&node]
    }

    /// The nodes that run, with their ids.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = (u64, &TestServer)> {
        self.nodes.iter().map(|(id, node)| (*id, node))
    }

    /// Waits until the nodes that run are all there are, agree on the leaders, and serve the
    /// default topic.
    pub(crate) async fn settle(&self) {
        until("all nodes are well and serve the default topic", async || {
            for node in self.nodes.values() {
                let metadata = metadata(node).await;
                let is_known = metadata.topics.iter().any(|route| route.topic == "default");
                if !is_known || metadata.nodes.len() < NODES.len() || !health(node).await.healthy {
                    return None;
                }
                let topic = topic(node, "default").await.ok()?;
                topic
                    .partitions
                    .iter()
                    .find(|it| it.watermarks.is_none())
                    .is_none()
                    .then_some(())?;
            }
            self.agreed_leaders().await.map(drop)
        })
        .await;
    }

    /// Leader of each shard, where all nodes that run say the same.
    async fn agreed_leaders(&self) -> Option<BTreeMap<u32, u64>> {
        let mut agreed: Option<BTreeMap<u32, u64>> = None;
        for node in self.nodes.values() {
            let leaders = leaders(&metadata(node).await)?;
            if agreed.as_ref().is_some_and(|agreed| *agreed != leaders) {
                return None;
            }
            agreed = Some(leaders);
        }
        agreed
    }

    /// Leader of each shard, once all nodes that run say the same and it is one of them.
    pub(crate) async fn leaders(&self) -> BTreeMap<u32, u64> {
        until("all nodes know the same leaders", async || {
            let leaders = self.agreed_leaders().await?;
            leaders.values().all(|leader| self.nodes.contains_key(leader)).then_some(leaders)
        })
        .await
    }

    /// Leader of the shard that a partition of the default topic is in, and the shard.
    pub(crate) async fn leader_of(&self, partition: u32) -> (u64, u32) {
        let leaders = self.leaders().await;
        let (_, node) = self.nodes().next().expect("a node runs");
        let shard = shard_of(&metadata(node).await, "default", partition);
        (leaders[&shard], shard)
    }

    /// Nodes that run and do not lead the partition.
    pub(crate) async fn followers_of(&self, partition: u32) -> Vec<u64> {
        let (leader, _) = self.leader_of(partition).await;
        self.nodes.keys().copied().filter(|node| *node != leader).collect()
    }

    /// What the leader of a partition answers, whoever that is by then.
    pub(crate) async fn ask_leader<T>(
        &self,
        partition: u32,
        ask: impl AsyncFn(&TestServer) -> Result<T, Status>,
    ) -> Result<T, Status> {
        until("the leader answers", async || {
            let (leader, _) = self.leader_of(partition).await;
            match ask(self.node(leader)).await {
                Err(status) if is_elsewhere(&status) => None,
                answer => Some(answer),
            }
        })
        .await
    }

    /// Asks the leader of a shard to hand over to `target`, and waits until all know it.
    pub(crate) async fn transfer(&self, shard_id: u32, target: u64) {
        until("the lead is handed over", async || {
            let leader = self.leaders().await[&shard_id];
            if leader == target {
                return Some(());
            }
            let request = TransferLeaderRequest { shard_id, target_node_id: target };
            // Ignored: looked at again, and repeated, until the target leads.
            let _ = self.nodes[&leader].cluster().transfer_leader(request).await;
            None
        })
        .await;
    }

    /// A client that knows all nodes and finds its way by itself.
    pub(crate) fn client(&self) -> Client {
        let config = helix_client::Config {
            backoff_max: Duration::from_millis(50),
            seed: Some(1),
            ..helix_client::Config::new(self.plan.listen.values().map(SocketAddr::to_string))
        };
        Client::new(config).unwrap()
    }

    /// Appends to a partition of the default topic, wherever its leader is.
    pub(crate) async fn write(&self, partition: u32, values: &[&str]) -> Ack {
        let producer = self.client().producer(ProducerOptions::default());
        producer.append("default", partition, &records(values)[..]).await.unwrap()
    }
}

/// Whether the lead has just moved.
pub(crate) fn is_elsewhere(status: &Status) -> bool {
    [ErrorReason::NotLeader, ErrorReason::NoLeader].contains(&reason(status))
}

pub(crate) async fn metadata(node: &TestServer) -> Metadata {
    let response = node.cluster().get_metadata(GetMetadataRequest::default()).await;
    response.unwrap().into_inner().metadata.unwrap()
}

pub(crate) async fn health(node: &TestServer) -> GetHealthResponse {
    node.cluster().get_health(GetHealthRequest {}).await.unwrap().into_inner()
}

pub(crate) async fn topic(node: &TestServer, name: &str) -> Result<Topic, Status> {
    let request = GetTopicRequest { name: name.to_owned() };
    node.topics().get_topic(request).await.map(|response| response.into_inner().topic.unwrap())
}

/// State of a node's replica of a data shard.
pub(crate) async fn shard_status(node: &TestServer, shard: u32) -> ShardStatus {
    let status = node.cluster().get_node_status(GetNodeStatusRequest {}).await.unwrap();
    let mut shards = status.into_inner().shards.into_iter();
    shards.find(|status| status.shard_id == shard).expect("the shard is here")
}

/// Leader of each shard, where each has one.
fn leaders(metadata: &Metadata) -> Option<BTreeMap<u32, u64>> {
    let leader = |route: &helix_proto::log::v1::ShardRoute| {
        let node = route.leader.as_ref().map(|leader| leader.node_id).filter(|node| *node > 0)?;
        Some((route.shard_id, node))
    };
    metadata.shards.iter().map(leader).collect()
}

pub(crate) fn shard_of(metadata: &Metadata, topic: &str, partition: u32) -> u32 {
    let route = metadata.topics.iter().find(|route| route.topic == topic).unwrap();
    route.shard_ids[partition as usize]
}

/// A read that any replica may answer.
pub(crate) fn from_any(partition: u32, offset: u64) -> FetchRequest {
    FetchRequest {
        partitions: vec![from_offset(partition, offset)],
        source: ReadSource::AnyReplica.into(),
        ..FetchRequest::default()
    }
}

/// What a replica has of a partition, whether it leads or not, from `offset` up to `end`: waits
/// until it has that much.
pub(crate) async fn replica_batches(
    node: &TestServer,
    partition: u32,
    offset: u64,
    end: u64,
) -> Vec<StoredBatch> {
    let (mut next, mut found) = (offset, Vec::new());
    until("the replica has it all", async || {
        while next < end {
            let request = FetchRequest { accept_encoded: true, ..from_any(partition, next) };
            let PartitionRecords { batches, next_offset, .. } = node.fetch_one(request).await;
            if batches.is_empty() {
                return None;
            }
            found.extend(batches);
            next = next_offset;
        }
        Some(())
    })
    .await;
    found
}

/// Every node that runs has the same bytes at the same offsets.
pub(crate) async fn expect_equal_replicas(trio: &Trio, partition: u32, end: u64) {
    let mut first: Option<Vec<StoredBatch>> = None;
    for (id, node) in trio.nodes() {
        let batches = replica_batches(node, partition, 0, end).await;
        match &first {
            Some(first) => assert!(*first == batches, "node {id} differs in partition {partition}"),
            None => first = Some(batches),
        }
    }
}
