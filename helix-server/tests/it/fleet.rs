//! A cluster in the test's own process whose nodes are added and removed, and a load that runs
//! meanwhile: every record is stored once, in order, on every node, and no append fails.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use helix_client::{Admin, Client, ProducerOptions};
use helix_proto::log::v1::{
    AddShardsRequest, FetchRequest, MembershipChange, MembershipPhase, Metadata, PartitionRecords,
    RemoveNodeRequest,
};
use helix_server::config::{AdminAddr, ServerConfig, StorageMode};
use helix_server::limits::ELECTION_TIMEOUT_MS_MAX;
use tempfile::TempDir;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use crate::support::{TestServer, records, values};
use crate::trio::{free_port, from_any, health, launch, metadata, until};

/// Partitions of the default topic.
pub(crate) const PARTITIONS: u32 = 4;

const DATA_SHARDS: u64 = 2;

pub(crate) struct Fleet {
    /// Nodes keep little log, so that a node added later does not find its start.
    short_logs: bool,
    data_shards: u64,
    /// Time after which others take the replicas of a node that does not respond.
    replace_down_after: Option<Duration>,
    /// Racks of the nodes that state one.
    racks: BTreeMap<u64, &'static str>,
    root: TempDir,
    listen: BTreeMap<u64, SocketAddr>,
    peer: BTreeMap<u64, SocketAddr>,
    nodes: BTreeMap<u64, TestServer>,
}

/// Returns a request for data shards up to `total` that begin empty.
pub(crate) fn added(current: u32, total: u32) -> AddShardsRequest {
    AddShardsRequest { current, total, ..AddShardsRequest::default() }
}

/// Returns a request for data shards up to `total` that take partitions of others.
pub(crate) fn split(current: u32, total: u32) -> AddShardsRequest {
    AddShardsRequest { split: true, ..added(current, total) }
}

impl Fleet {
    /// Reserves addresses for the nodes 1 to 6; none runs yet.
    pub(crate) fn new() -> Self {
        let address = || SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
        Self {
            short_logs: false,
            data_shards: DATA_SHARDS,
            replace_down_after: None,
            racks: BTreeMap::new(),
            root: tempfile::tempdir().unwrap(),
            listen: (1..=6).map(|node| (node, address())).collect(),
            peer: (1..=6).map(|node| (node, address())).collect(),
            nodes: BTreeMap::new(),
        }
    }

    /// Starts a cluster of these nodes and waits until it is healthy.
    pub(crate) async fn of(nodes: &[u64]) -> Self {
        let mut fleet = Self::new();
        fleet.start_nodes(nodes, nodes).await;
        fleet.settle().await;
        fleet
    }

    /// As [`Self::of`], with this many data shards.
    pub(crate) async fn with_shards(nodes: &[u64], data_shards: u64) -> Self {
        let mut fleet = Self { data_shards, ..Self::new() };
        fleet.start_nodes(nodes, nodes).await;
        fleet.settle().await;
        fleet
    }

    /// As [`Self::with_shards`], with racks of these nodes and of nodes that are added later.
    pub(crate) async fn in_racks(
        nodes: &[u64],
        data_shards: u64,
        racks: &[(u64, &'static str)],
    ) -> Self {
        let racks = racks.iter().copied().collect();
        let mut fleet = Self { data_shards, racks, ..Self::new() };
        fleet.start_nodes(nodes, nodes).await;
        fleet.settle().await;
        fleet
    }

    /// As [`Self::with_shards`], where the others take the replicas of a node that is down.
    pub(crate) async fn replacing(nodes: &[u64], data_shards: u64, after: Duration) -> Self {
        let mut fleet = Self { data_shards, replace_down_after: Some(after), ..Self::new() };
        fleet.start_nodes(nodes, nodes).await;
        fleet.settle().await;
        fleet
    }

    /// As [`Self::of`], with logs that are purged after some megabytes, and compacted by key soon.
    pub(crate) async fn with_short_logs(nodes: &[u64]) -> Self {
        let mut fleet = Self { short_logs: true, ..Self::new() };
        fleet.start_nodes(nodes, nodes).await;
        fleet.settle().await;
        fleet
    }

    /// Configuration of a node with `others` and itself as peers.
    pub(crate) fn config(&self, node: u64, others: &[u64]) -> ServerConfig {
        let default = ServerConfig::default();
        let (catch_up_bytes, checkpoint_bytes, cleaner_lag) = match self.short_logs {
            true => (2 << 20, 1 << 20, Duration::from_secs(1)),
            false => (default.catch_up_bytes, default.checkpoint_bytes, default.cleaner_lag),
        };
        let named = others.iter().copied().filter(|other| *other != node).chain([node]);
        ServerConfig {
            shards: Some(self.data_shards),
            node_id: node,
            rack: self.racks.get(&node).map(|rack| (*rack).to_owned()),
            replace_down_after: self.replace_down_after,
            topics: vec![("default".to_owned(), 4)],
            storage: StorageMode::Durable,
            listen_addr: self.listen[&node],
            admin_addr: Some(AdminAddr::Off),
            peer_addr: self.peer[&node],
            peers: named.map(|id| (id, self.peer(id))).collect(),
            data_dir: self.data_dir(node),
            segment_bytes: 16 << 20,
            tail_bytes: Some(2 << 20),
            catch_up_bytes,
            checkpoint_bytes,
            cleaner_lag,
            // As `STEADY`.
            election_timeout_ms: ELECTION_TIMEOUT_MS_MAX,
            ..default
        }
    }

    pub(crate) fn peer(&self, node: u64) -> String {
        self.peer[&node].to_string()
    }

    pub(crate) fn data_dir(&self, node: u64) -> PathBuf {
        self.root.path().join(format!("node-{node}"))
    }

    /// Starts a node in the background; it may wait to be added.
    pub(crate) fn launch(&self, node: u64, others: &[u64]) -> JoinHandle<TestServer> {
        launch(self.config(node, others))
    }

    pub(crate) async fn arrived(&mut self, node: u64, start: JoinHandle<TestServer>) {
        let server = tokio::time::timeout(CHANGE_PATIENCE, start).await;
        self.nodes.insert(node, server.expect("the node should start").unwrap());
    }

    pub(crate) async fn start_nodes(&mut self, nodes: &[u64], others: &[u64]) {
        let starts: Vec<_> = nodes.iter().map(|node| (*node, self.launch(*node, others))).collect();
        for (node, start) in starts {
            self.arrived(node, start).await;
        }
    }

    /// Stops a node as SIGTERM does.
    pub(crate) async fn stop(&mut self, node: u64) {
        let TestServer { running, channel, .. } = self.nodes.remove(&node).expect("it runs");
        drop(channel);
        running.shutdown().await;
    }

    pub(crate) async fn stop_all(mut self) {
        let nodes = std::mem::take(&mut self.nodes).into_values();
        futures_util::future::join_all(nodes.map(|node| node.running.shutdown())).await;
    }

    pub(crate) fn node(&self, node: u64) -> &TestServer {
        &self.nodes[&node]
    }

    pub(crate) fn ids(&self) -> Vec<u64> {
        self.nodes.keys().copied().collect()
    }

    /// A client configured with the running nodes; it discovers others.
    pub(crate) fn client(&self) -> Client {
        let addresses = self.nodes.keys().map(|node| self.listen[node].to_string());
        let config = helix_client::Config {
            backoff_max: Duration::from_millis(50),
            request_timeout: CHANGE_PATIENCE,
            seed: Some(1),
            ..helix_client::Config::new(addresses)
        };
        Client::new(config).unwrap()
    }

    pub(crate) fn admin(&self) -> Admin {
        self.client().admin()
    }

    /// Metadata of a running node.
    pub(crate) async fn metadata(&self) -> Metadata {
        metadata(self.nodes.values().next().expect("a node runs")).await
    }

    /// Waits until exactly the running nodes vote in every shard and are healthy.
    pub(crate) async fn settle(&self) {
        let running = self.ids();
        let mut last = String::new();
        let settled = until_long("the running nodes vote and are healthy", async || {
            for (id, node) in &self.nodes {
                let metadata = metadata(node).await;
                let voters = |replicas: &[u64]| replicas == running;
                let is_whole = metadata.shards.len()
                    == 1 + usize::try_from(self.data_shards).unwrap()
                    && metadata.shards.iter().all(|it| voters(&it.replicas))
                    && metadata.shards.iter().all(|it| it.learners.is_empty())
                    && metadata.topics.iter().any(|it| it.topic == "default");
                let health = health(node).await;
                if !is_whole || !health.healthy {
                    let state = format!("node {id}: {:?} {health:?}", metadata.shards);
                    if state != last {
                        println!("{state}");
                        last = state;
                    }
                    return None;
                }
            }
            Some(())
        });
        settled.await;
    }

    /// Starts and adds a node, and waits until it votes in every shard.
    pub(crate) async fn grow(&mut self, node: u64) {
        self.add(node).await;
        self.settle().await;
    }

    /// Starts and adds a node, and waits until that is done.
    pub(crate) async fn add(&mut self, node: u64) {
        let others = self.ids();
        let start = self.launch(node, &others);
        let admin = self.admin();
        let peer = self.peer(node);
        let change = until_long("the node can be added", async || {
            // It may not listen yet.
            admin.add_node(node, &peer, false).await.ok().flatten()
        })
        .await;
        self.arrived(node, start).await;
        self.done(change.id).await;
    }

    /// Address of a node for clients.
    pub(crate) fn listen(&self, node: u64) -> String {
        self.listen[&node].to_string()
    }

    /// Removes a node from the cluster and returns its server, which still runs.
    pub(crate) async fn shrink(&mut self, node: u64) -> TestServer {
        let removed = self.remove(node).await;
        self.settle().await;
        removed
    }

    /// Removes a node as [`Self::shrink`] does, and waits until that is done.
    pub(crate) async fn remove(&mut self, node: u64) -> TestServer {
        let removal = RemoveNodeRequest {
            node_id: node,
            allow_fewer_replicas: true,
            ..RemoveNodeRequest::default()
        };
        let change = self.admin().remove_node_with(removal).await.unwrap().unwrap();
        let removed = self.nodes.remove(&node).unwrap();
        self.done(change.id).await;
        removed
    }

    /// Waits until a change is done or failed.
    pub(crate) async fn done(&self, id: u64) -> MembershipChange {
        let admin = self.admin();
        let mut last = String::new();
        until_long("the change is done", async || {
            let change = admin.membership_change(id).await.ok()?;
            let state = format!("{change:?}");
            if state != last {
                println!("{state}");
                last = state;
            }
            let is_over = [MembershipPhase::Done, MembershipPhase::Failed];
            is_over.contains(&change.phase()).then_some(change)
        })
        .await
    }

    /// Waits until the running nodes agree on the leader of a shard, and returns it.
    pub(crate) async fn leader(&self, shard: u32) -> u64 {
        until("all nodes know the same leader", async || {
            let mut agreed = None;
            for node in self.nodes.values() {
                let shards = metadata(node).await.shards;
                let route = shards.into_iter().find(|route| route.shard_id == shard)?;
                let leader = route.leader?.node_id;
                if *agreed.get_or_insert(leader) != leader || !self.nodes.contains_key(&leader) {
                    return None;
                }
            }
            agreed
        })
        .await
    }

    /// Shards whose leader is this node, as all running nodes know.
    pub(crate) async fn led_by(&self, node: u64) -> Vec<u32> {
        let mut led = Vec::new();
        for shard in 0..=u32::try_from(self.data_shards).unwrap() {
            if self.leader(shard).await == node {
                led.push(shard);
            }
        }
        led
    }

    /// Expects records 0..count of each partition, once and in order, on every running node.
    pub(crate) async fn expect_all(&self, counts: &[u64]) {
        for (partition, &count) in (0..).zip(counts) {
            for (id, node) in &self.nodes {
                let found = all_values(node, partition, count).await;
                let expected = (0..count).map(|number| number.to_string());
                assert!(found.iter().cloned().eq(expected), "node {id}, partition {partition}");
            }
        }
    }
}

/// Waits for the first `count` records on a node and returns their values.
pub(crate) async fn all_values(node: &TestServer, partition: u32, count: u64) -> Vec<String> {
    let (mut next, mut found) = (0, Vec::new());
    until("the replica has all records", async || {
        while next < count {
            let request: FetchRequest = from_any(partition, next);
            let mut answer = node.consume().fetch(request).await.ok()?.into_inner();
            let PartitionRecords { records, next_offset, .. } = answer.partitions.pop()?;
            if records.is_empty() {
                return None;
            }
            found.extend(values(&records));
            next = next_offset;
        }
        Some(())
    })
    .await;
    found
}

/// Deadline of a membership change, which waits for catch-up, elections and syncs.
const CHANGE_PATIENCE: Duration = Duration::from_secs(120);

/// As [`until`], with [`CHANGE_PATIENCE`].
pub(crate) async fn until_long<T>(what: &str, poll: impl AsyncFnMut() -> Option<T>) -> T {
    crate::trio::until_within(CHANGE_PATIENCE, what, poll).await
}

/// One idempotent producer per partition, which appends ascending numbers.
pub(crate) struct AppendLoad {
    stop: watch::Sender<bool>,
    writers: JoinSet<(u32, u64)>,
}

impl AppendLoad {
    pub(crate) fn start(client: &Client) -> Self {
        let (stop, stopped) = watch::channel(false);
        let mut writers = JoinSet::new();
        for partition in 0..PARTITIONS {
            let producer = client.producer(ProducerOptions::default());
            let stopped = stopped.clone();
            writers.spawn(async move {
                let mut number = 0;
                while !*stopped.borrow() {
                    let text = number.to_string();
                    let ack = producer.append("default", partition, &records(&[&text])[..]).await;
                    let ack = ack.unwrap_or_else(|error| panic!("append {number}: {error}"));
                    assert_eq!(ack.first_offset, Some(number));
                    number += 1;
                }
                (partition, number)
            });
        }
        Self { stop, writers }
    }

    /// Stops the load and returns the number of records in each partition.
    pub(crate) async fn stop(self) -> Vec<u64> {
        self.stop.send_replace(true);
        let mut counts = self.writers.join_all().await;
        counts.sort_unstable();
        assert!(counts.iter().all(|(_, count)| *count > 0), "{counts:?}");
        counts.into_iter().map(|(_, count)| count).collect()
    }
}
