//! A cluster of three servers in the test's own process, on loopback and real disks.
//! On request the links between the nodes go through proxies that can be cut or slowed.

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
use helix_server::limits::{
    CATCH_UP_BYTES, CHECKPOINT_BYTES, ELECTION_TIMEOUT_MS, ELECTION_TIMEOUT_MS_MAX,
};
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

/// Deadline of a wait. Elections and restarts on a busy machine take far less.
const PATIENCE: Duration = Duration::from_secs(40);

/// Longest election timeout: leaders stay although the process stalls for up to three seconds, as
/// on a busy machine.
pub(crate) const STEADY: Duration = Duration::from_millis(ELECTION_TIMEOUT_MS_MAX as u64);

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Polls until the condition returns a value. Panics after [`PATIENCE`].
pub(crate) async fn until<T>(what: &str, poll: impl AsyncFnMut() -> Option<T>) -> T {
    until_within(PATIENCE, what, poll).await
}

pub(crate) async fn until_within<T>(
    patience: Duration,
    what: &str,
    mut poll: impl AsyncFnMut() -> Option<T>,
) -> T {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(seen) = poll().await {
            return seen;
        }
        assert!(Instant::now() < deadline, "not within {patience:?}: {what}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Returns a free port below the system's ephemeral range, each once in this process.
pub(crate) fn free_port() -> u16 {
    const PORTS: std::ops::Range<u32> = 12_000..20_000;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let span = PORTS.end - PORTS.start;
    // Test processes start at different ports so that they do not collide.
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

/// A TCP proxy from one node to another.
///
/// Bytes sent while it is cut arrive once it is healed, as after retransmission.
struct Link {
    address: String,
    state: watch::Sender<LinkState>,
    serving: JoinHandle<()>,
}

/// State of a link.
#[derive(Clone, Copy, Default)]
struct LinkState {
    is_cut: bool,
    /// Pause after each piece of at most 64 KiB.
    pause: Duration,
    /// Number of breaks. A break ends all connections made before it.
    breaks: u64,
}

impl Link {
    async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (state, changes) = watch::channel(LinkState::default());
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(carry(stream, target, changes.clone()));
            }
        });
        Self { address, state, serving }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn carry(near: TcpStream, target: SocketAddr, mut state: watch::Receiver<LinkState>) {
    let breaks = state.borrow().breaks;
    if state.wait_for(|state| !state.is_cut).await.is_err() {
        return;
    }
    let Ok(far) = TcpStream::connect(target).await else { return };
    near.set_nodelay(true).unwrap();
    far.set_nodelay(true).unwrap();
    let (near_read, near_write) = near.into_split();
    let (far_read, far_write) = far.into_split();
    let mut broken = state.clone();
    tokio::select! {
        () = forward(near_read, far_write, state.clone()) => {}
        () = forward(far_read, near_write, state) => {}
        _ = broken.wait_for(|state| state.breaks > breaks) => {}
    }
}

async fn forward(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut state: watch::Receiver<LinkState>,
) {
    let mut bytes = vec![0; 64 << 10];
    loop {
        let Ok(count @ 1..) = from.read(&mut bytes).await else { return };
        let pause = state.borrow().pause;
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        if state.wait_for(|state| !state.is_cut).await.is_err() {
            return;
        }
        if to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}

/// Addresses and configuration of the nodes of a cluster.
pub(crate) struct TrioPlan {
    root: TempDir,
    storage: StorageMode,
    listen: BTreeMap<u64, SocketAddr>,
    peer: BTreeMap<u64, SocketAddr>,
    /// Links by (from, to); empty if links need not be cut.
    links: BTreeMap<(u64, u64), Link>,
    catch_up_bytes: u64,
    checkpoint_bytes: u64,
    election_timeout_ms: u32,
    /// Collector of traces.
    otlp_endpoint: Option<String>,
}

impl TrioPlan {
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
            election_timeout_ms: ELECTION_TIMEOUT_MS_MAX,
            otlp_endpoint: None,
        }
    }

    pub(crate) fn in_memory() -> Self {
        Self { storage: StorageMode::Memory, ..Self::new() }
    }

    /// A plan with links that can be cut, and quick elections.
    pub(crate) async fn linked() -> Self {
        Self::new().with_links().await
    }

    /// Sets the election timeout to [`STEADY`]. The default without links.
    pub(crate) fn steady(self) -> Self {
        Self { election_timeout_ms: ELECTION_TIMEOUT_MS_MAX, ..self }
    }

    pub(crate) async fn with_links(mut self) -> Self {
        for from in NODES {
            for to in NODES.into_iter().filter(|to| *to != from) {
                self.links.insert((from, to), Link::to(self.peer[&to]).await);
            }
        }
        // Links are there to be cut, and then the other nodes elect a leader.
        self.election_timeout_ms = ELECTION_TIMEOUT_MS;
        self
    }

    /// Makes the nodes export traces.
    #[cfg(feature = "otlp")]
    pub(crate) fn with_collector(self, endpoint: String) -> Self {
        Self { otlp_endpoint: Some(endpoint), ..self }
    }

    /// Makes the nodes keep little log for an absent follower.
    pub(crate) fn with_short_logs(self) -> Self {
        Self { catch_up_bytes: 2 << 20, checkpoint_bytes: 1 << 20, ..self }
    }

    pub(crate) fn config(&self, node: u64) -> ServerConfig {
        let peer_addr = |to: u64| match self.links.get(&(node, to)) {
            Some(link) => link.address.clone(),
            None => self.peer[&to].to_string(),
        };
        ServerConfig {
            shards: Some(3),
            node_id: node,
            topics: vec![("default".to_owned(), 4)],
            storage: self.storage,
            listen_addr: self.listen[&node],
            peer_addr: self.peer[&node],
            admin_addr: Some(AdminAddr::At(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))),
            peers: NODES.map(|to| (to, peer_addr(to))).into(),
            data_dir: self.data_dir(node),
            segment_bytes: 16 << 20,
            tail_bytes: Some(2 << 20),
            catch_up_bytes: self.catch_up_bytes,
            checkpoint_bytes: self.checkpoint_bytes,
            election_timeout_ms: self.election_timeout_ms,
            otlp_endpoint: self.otlp_endpoint.clone(),
            ..ServerConfig::default()
        }
    }

    /// Address of a node's peer port.
    pub(crate) fn peer(&self, node: u64) -> SocketAddr {
        self.peer[&node]
    }

    pub(crate) fn data_dir(&self, node: u64) -> PathBuf {
        self.root.path().join(format!("node-{node}"))
    }

    /// Starts a node in the background; it may wait for other nodes.
    pub(crate) fn launch(&self, node: u64) -> JoinHandle<TestServer> {
        launch(self.config(node))
    }

    fn change_links(&self, node: u64, change: impl Fn(&mut LinkState)) {
        assert!(!self.links.is_empty(), "the plan has no links");
        let of_node = |(from, to): (u64, u64)| from == node || to == node;
        for (ends, link) in &self.links {
            if of_node(*ends) {
                link.state.send_modify(&change);
            }
        }
    }
}

pub(crate) fn launch(config: ServerConfig) -> JoinHandle<TestServer> {
    tokio::spawn(TestServer::start(config, None))
}

/// The running nodes of a cluster.
pub(crate) struct Trio {
    pub(crate) plan: TrioPlan,
    nodes: BTreeMap<u64, TestServer>,
}

impl Trio {
    /// Starts three nodes on disks and waits until they are healthy.
    pub(crate) async fn durable() -> Self {
        Self::start(TrioPlan::new()).await
    }

    pub(crate) async fn start(plan: TrioPlan) -> Self {
        let mut trio = Self { plan, nodes: BTreeMap::new() };
        trio.start_nodes(&NODES).await;
        trio.settle().await;
        trio
    }

    /// Wraps nodes that were started already.
    pub(crate) fn of(plan: TrioPlan, nodes: BTreeMap<u64, TestServer>) -> Self {
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

    /// Isolates a node: cuts all its links until [`Self::heal`].
    pub(crate) fn isolate(&self, node: u64) {
        self.plan.change_links(node, |state| state.is_cut = true);
    }

    /// Isolates the leader of a partition of the default topic before it has lost its leadership,
    /// and returns it.
    pub(crate) async fn isolate_leader(&self, partition: u32) -> u64 {
        until("an isolated node is the leader", async || {
            let (leader, shard) = self.leader_of(partition).await;
            self.isolate(leader);
            let shard = self.node(leader).running.node().shard(shard.into());
            if shard.is_some_and(|shard| shard.is_leader()) {
                return Some(leader);
            }
            self.heal(leader);
            None
        })
        .await
    }

    pub(crate) fn heal(&self, node: u64) {
        self.plan.change_links(node, |state| state.is_cut = false);
    }

    /// Cuts or heals the links between two nodes.
    pub(crate) fn cut_between(&self, one: u64, other: u64, is_cut: bool) {
        for ends in [(one, other), (other, one)] {
            self.plan.links[&ends].state.send_modify(|state| state.is_cut = is_cut);
        }
    }

    /// Slows down all links of a node: pauses after each 64 KiB.
    pub(crate) fn slow_down(&self, node: u64, pause: Duration) {
        self.plan.change_links(node, |state| state.pause = pause);
    }

    /// Slows down or cuts the link from one node to another.
    pub(crate) fn set_link(&self, from: u64, to: u64, pause: Duration, is_cut: bool) {
        self.plan.links[&(from, to)].state.send_modify(|state| {
            state.pause = pause;
            state.is_cut = is_cut;
        });
    }

    /// Removes all links of a node: their connections end, and new ones are refused.
    pub(crate) fn remove_links(&mut self, node: u64) {
        self.plan.links.retain(|(from, to), _| *from != node && *to != node);
    }

    /// Ends all connections of a node, which reconnect at once.
    pub(crate) fn break_connections(&self, node: u64) {
        self.plan.change_links(node, |state| state.breaks += 1);
    }

    pub(crate) fn node(&self, node: u64) -> &TestServer {
        &self.nodes[&node]
    }

    /// Running nodes with their ids.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = (u64, &TestServer)> {
        self.nodes.iter().map(|(id, node)| (*id, node))
    }

    /// Waits until all nodes know each other, agree on the leaders and serve the default topic.
    pub(crate) async fn settle(&self) {
        until("all nodes are healthy and serve the default topic", async || {
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

    /// Waits until each node leads one data shard. A busy machine may elect other nodes first;
    /// leadership is balanced later.
    pub(crate) async fn balanced(&self) {
        until("each node leads one data shard", async || {
            let mut leaders = self.leaders().await;
            leaders.remove(&0);
            (leaders == [(1, 1), (2, 2), (3, 3)].into()).then_some(())
        })
        .await;
    }

    /// Returns the leader of each shard if all running nodes agree.
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

    /// Waits until all running nodes agree on running leaders; returns the leader of each shard.
    pub(crate) async fn leaders(&self) -> BTreeMap<u32, u64> {
        until("all nodes know the same leaders", async || {
            let leaders = self.agreed_leaders().await?;
            leaders.values().all(|leader| self.nodes.contains_key(leader)).then_some(leaders)
        })
        .await
    }

    /// Returns the leader and the shard of a partition of the default topic.
    pub(crate) async fn leader_of(&self, partition: u32) -> (u64, u32) {
        let leaders = self.leaders().await;
        let (_, node) = self.nodes().next().expect("a node runs");
        let shard = shard_of(&metadata(node).await, "default", partition);
        (leaders[&shard], shard)
    }

    /// Running nodes that are followers of the partition.
    pub(crate) async fn followers_of(&self, partition: u32) -> Vec<u64> {
        let (leader, _) = self.leader_of(partition).await;
        self.nodes.keys().copied().filter(|node| *node != leader).collect()
    }

    /// Calls the current leader of a partition, and retries after redirects.
    pub(crate) async fn call_leader<T>(
        &self,
        partition: u32,
        ask: impl AsyncFn(&TestServer) -> Result<T, Status>,
    ) -> Result<T, Status> {
        until("the leader answers", async || {
            let (leader, _) = self.leader_of(partition).await;
            match ask(self.node(leader)).await {
                Err(status) if is_redirect(&status) => None,
                answer => Some(answer),
            }
        })
        .await
    }

    /// Transfers leadership of a shard to `target` and waits until all nodes know it.
    pub(crate) async fn transfer(&self, shard_id: u32, target: u64) {
        until("leadership is transferred", async || {
            let leader = self.leaders().await[&shard_id];
            if leader == target {
                return Some(());
            }
            let request = TransferLeaderRequest { shard_id, target_node_id: target };
            // Ignored: retried until the target is the leader.
            let _ = self.nodes[&leader].cluster().transfer_leader(request).await;
            None
        })
        .await;
    }

    /// A client that knows all nodes and follows redirects.
    pub(crate) fn client(&self) -> Client {
        let config = helix_client::Config {
            backoff_max: Duration::from_millis(50),
            seed: Some(1),
            ..helix_client::Config::new(self.plan.listen.values().map(SocketAddr::to_string))
        };
        Client::new(config).unwrap()
    }

    /// Appends to the leader of a partition of the default topic.
    pub(crate) async fn write(&self, partition: u32, values: &[&str]) -> Ack {
        let producer = self.client().producer(ProducerOptions::default());
        producer.append("default", partition, &records(values)[..]).await.unwrap()
    }
}

/// Returns true if the node is not the leader, or knows none.
pub(crate) fn is_redirect(status: &Status) -> bool {
    [ErrorReason::NotLeader, ErrorReason::NoLeader].contains(&reason(status))
}

pub(crate) async fn metadata(node: &TestServer) -> Metadata {
    let response = node.cluster().get_metadata(GetMetadataRequest::default()).await;
    response.unwrap().into_inner().metadata.unwrap()
}

pub(crate) async fn health(node: &TestServer) -> GetHealthResponse {
    node.cluster().get_health(GetHealthRequest::default()).await.unwrap().into_inner()
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

/// Returns the leader of each shard if every shard has one.
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

/// Reads the batches from `offset` to `end` on any replica; waits until it has them.
pub(crate) async fn replica_batches(
    node: &TestServer,
    partition: u32,
    offset: u64,
    end: u64,
) -> Vec<StoredBatch> {
    let (mut next, mut found) = (offset, Vec::new());
    until("the replica has all records", async || {
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

/// Expects the same bytes at the same offsets on all running nodes.
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
