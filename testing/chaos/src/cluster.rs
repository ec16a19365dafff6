//! Cluster of real nodes on loopback, with a proxy on each link between nodes and to clients.
//!
//! Controls the nodes and queries them one by one.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use helix_client::TlsOptions;
use helix_proto::log::v1::{HealthIssue, HealthReason};
use tokio::time::{Instant, sleep};

use crate::certificates;
use crate::disk::LoopbackDisk;
use crate::metrics;
use crate::node_client::NodeClient;
use crate::node_process::{NodeProcess, NodeProcessOptions};
use crate::ports;
use crate::proxy::{LinkMode, Proxy};

/// Interval between polls of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Options of a cluster.
#[derive(Debug, Clone)]
pub(crate) struct ClusterOptions {
    /// Program that runs a node with the subcommand `node`.
    pub(crate) program: PathBuf,
    /// Nodes: 1, 3 or 5.
    pub(crate) nodes: u64,
    /// Data shards of a new cluster.
    pub(crate) shards: u64,
    /// Directory for data and logs.
    pub(crate) dir: PathBuf,
    /// Puts proxies between clients and nodes too.
    pub(crate) has_client_proxies: bool,
    /// Log that nodes keep for lagging replicas, and between checkpoints.
    pub(crate) log_kib: Option<u64>,
    /// Log that nodes keep for lagging replicas, if it differs from that.
    pub(crate) catch_up_kib: Option<u64>,
    /// Election timeout of the nodes, in milliseconds.
    pub(crate) election_timeout_ms: Option<u32>,
    /// Size of a file system for each node, if file systems can be mounted.
    pub(crate) disk_bytes: Option<u64>,
    /// Encrypts connections between nodes, and those of the workload.
    pub(crate) tls: bool,
}

/// Start counts of the nodes, shared with readers that must notice a restart.
pub(crate) type StartCounts = Arc<BTreeMap<u64, AtomicU32>>;

/// Leader and term of each shard.
pub(crate) type ShardLeaders = BTreeMap<u32, (u64, u64)>;

/// Positions of all replicas, by node: shard, last, committed and applied index.
pub(crate) type ReplicaPositions = Vec<(u64, Vec<[u64; 4]>)>;

/// Running cluster. Dropping it kills its nodes.
#[derive(Debug)]
pub(crate) struct ChaosCluster {
    nodes: BTreeMap<u64, ClusterNode>,
    /// Links from one node to another.
    ///
    /// The link from [`ANY_SOURCE`] leads to a node that joined later: its address is advertised to
    /// the others until they restart with a link of their own.
    links: BTreeMap<(u64, u64), Proxy>,
    /// Links from clients to a node.
    client_links: BTreeMap<u64, Proxy>,
    starts: StartCounts,
    options: ClusterOptions,
}

/// Highest node id in the lifetime of a cluster.
pub(crate) const NODES_MAX: u64 = 9;

/// Not a node id.
const ANY_SOURCE: u64 = 0;

#[derive(Debug)]
struct ClusterNode {
    process: NodeProcess,
    /// Peer address, without proxies.
    peer: SocketAddr,
    node_client: NodeClient,
    /// Address for clients.
    endpoint: SocketAddr,
    /// Admin address.
    admin: SocketAddr,
    disk: Option<LoopbackDisk>,
}

impl ChaosCluster {
    /// Starts all nodes with empty data.
    pub(crate) fn start(options: &ClusterOptions) -> anyhow::Result<Self> {
        ensure!(matches!(options.nodes, 1 | 3 | 5), "a cluster has 1, 3 or 5 nodes");
        if options.tls {
            certificates::make(&certificates::directory(&options.dir))?;
        }
        let ids: Vec<u64> = (1..=options.nodes).collect();
        let mut peer_addresses = BTreeMap::new();
        for id in &ids {
            peer_addresses.insert(*id, ports::free()?);
        }
        let mut links = BTreeMap::new();
        for (from, to) in pairs(&ids) {
            links.insert((from, to), Proxy::start(peer_addresses[&to])?);
        }
        let starts = (1..=NODES_MAX).map(|id| (id, AtomicU32::new(0))).collect();
        let mut cluster = Self {
            nodes: BTreeMap::new(),
            links,
            client_links: BTreeMap::new(),
            starts: Arc::new(starts),
            options: options.clone(),
        };
        for id in ids {
            cluster.add(id, peer_addresses[&id])?;
        }
        for id in cluster.ids() {
            cluster.start_node(id)?;
        }
        Ok(cluster)
    }

    /// Starts a node that waits to be added, and returns its peer address for the others.
    pub(crate) fn join(&mut self, id: u64) -> anyhow::Result<SocketAddr> {
        ensure!((1..=NODES_MAX).contains(&id), "node id {id} is not in 1..={NODES_MAX}");
        let peer = ports::free()?;
        for (other, member) in &self.nodes {
            self.links.insert((*other, id), Proxy::start(peer)?);
            self.links.insert((id, *other), Proxy::start(member.peer)?);
        }
        let known_as = Proxy::start(peer)?;
        let address = known_as.address();
        self.links.insert((ANY_SOURCE, id), known_as);
        self.add(id, peer)?;
        self.start_node(id)?;
        Ok(address)
    }

    /// Stops a node that was removed, and deletes its data.
    pub(crate) async fn leave(&mut self, id: u64) -> anyhow::Result<()> {
        self.terminate(id).await?;
        self.wipe(id).await?;
        self.nodes.remove(&id);
        self.client_links.remove(&id);
        self.links.retain(|(from, to), _| *from != id && *to != id);
        Ok(())
    }

    /// Returns the data directory of a node.
    pub(crate) fn data_dir(&self, id: u64) -> PathBuf {
        self.options.dir.join(format!("node-{id}"))
    }

    /// Deletes the data of a node that is not running.
    pub(crate) async fn wipe(&self, id: u64) -> anyhow::Result<()> {
        let dir = self.data_dir(id);
        let mut entries = tokio::fs::read_dir(&dir).await.context("read the data directory")?;
        // The directory itself stays, because it may be a mount point.
        while let Some(entry) = entries.next_entry().await? {
            let path = entry.path();
            let removed = match entry.file_type().await?.is_dir() {
                true => tokio::fs::remove_dir_all(&path).await,
                false => tokio::fs::remove_file(&path).await,
            };
            removed.with_context(|| format!("delete {}", path.display()))?;
        }
        Ok(())
    }

    fn add(&mut self, id: u64, peer: SocketAddr) -> anyhow::Result<()> {
        let (address, admin) = (ports::free()?, ports::free()?);
        let mut endpoint = address;
        if self.options.has_client_proxies {
            let proxy = Proxy::start(address)?;
            endpoint = proxy.address();
            self.client_links.insert(id, proxy);
        }
        let data_dir = self.data_dir(id);
        let disk = match self.options.disk_bytes {
            Some(bytes) => LoopbackDisk::mount(&data_dir, bytes)?,
            None => None,
        };
        let options = &self.options;
        let node = NodeProcessOptions {
            program: options.program.clone(),
            node_id: id,
            address,
            advertised: endpoint,
            admin,
            peer_address: peer,
            peers: Vec::new(),
            shards: Some(options.shards),
            log_kib: options.log_kib,
            catch_up_kib: options.catch_up_kib,
            election_timeout_ms: options.election_timeout_ms,
            data_dir,
            tls_dir: options.tls.then(|| certificates::directory(&options.dir)),
            log: self.log_of(id),
        };
        let node_client = NodeClient::new(id, address)?;
        let process = NodeProcess::new(node);
        self.nodes.insert(id, ClusterNode { process, peer, node_client, endpoint, admin, disk });
        Ok(())
    }

    /// Returns the peers of a node, each with its own link, and the node itself.
    fn peers(&self, id: u64) -> Vec<(u64, SocketAddr)> {
        let links = self.links.iter().filter(|((from, _), _)| *from == id);
        let links = links.map(|((_, to), proxy)| (*to, proxy.address()));
        links.chain(self.nodes.get(&id).map(|member| (id, member.peer))).collect()
    }

    pub(crate) fn ids(&self) -> Vec<u64> {
        self.nodes.keys().copied().collect()
    }

    /// Returns how many nodes may be down while the others are a majority.
    pub(crate) fn minority(&self) -> usize {
        (self.nodes.len() - 1) / 2
    }

    /// Returns the bootstrap addresses for clients.
    pub(crate) fn endpoints(&self) -> Vec<String> {
        self.nodes.values().map(|node| node.endpoint.to_string()).collect()
    }

    /// Returns the TLS of the workload's clients.
    pub(crate) fn client_tls(&self) -> Option<TlsOptions> {
        let directory = certificates::directory(&self.options.dir);
        self.options.tls.then(|| TlsOptions::new(directory.join("ca.pem")))
    }

    pub(crate) fn node_clients(&self) -> Vec<NodeClient> {
        self.nodes.values().map(|node| node.node_client.clone()).collect()
    }

    pub(crate) fn starts(&self) -> StartCounts {
        self.starts.clone()
    }

    fn node(&mut self, id: u64) -> &mut NodeProcess {
        &mut self.nodes.get_mut(&id).expect("the node is in the cluster").process
    }

    /// Sets the program of a node that is not running.
    pub(crate) fn set_program(&mut self, id: u64, program: &Path) {
        self.node(id).set_program(program);
    }

    /// Returns the file with the output of a node.
    pub(crate) fn log_of(&self, id: u64) -> PathBuf {
        self.options.dir.join(format!("node-{id}.log"))
    }

    /// Starts a node on its data with the current peers.
    pub(crate) fn start_node(&mut self, id: u64) -> anyhow::Result<()> {
        self.starts[&id].fetch_add(1, Ordering::SeqCst);
        let peers = self.peers(id);
        self.node(id).start(peers)
    }

    /// Returns the process id of a running node.
    pub(crate) fn process_id(&mut self, id: u64) -> Option<u32> {
        self.node(id).process_id()
    }

    /// Waits until a node has exited without a request, and returns its exit code.
    pub(crate) async fn wait_for_exit(
        &mut self,
        id: u64,
        limit: Duration,
    ) -> anyhow::Result<Option<i32>> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.node(id).ended() {
                return Ok(status.code());
            }
            ensure!(Instant::now() < deadline, "node {id} still runs after {limit:?}");
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Returns the file system of a node, if it has its own.
    pub(crate) fn disk(&self, id: u64) -> Option<&LoopbackDisk> {
        self.nodes.get(&id)?.disk.as_ref()
    }

    /// Returns a client for one node, without proxies.
    pub(crate) fn client_of(&self, id: u64) -> anyhow::Result<NodeClient> {
        let member = self.nodes.get(&id).with_context(|| format!("there is no node {id}"))?;
        Ok(member.node_client.clone())
    }

    /// Returns the sum of a metric over all running nodes.
    pub(crate) async fn metric(&self, name: &str) -> u64 {
        let mut sum = 0;
        for node in self.nodes.values().filter(|node| !node.process.is_unresponsive()) {
            sum += metrics::sum(node.admin, name).await.unwrap_or(0);
        }
        sum
    }

    /// Waits until a node has scrubbed all sealed segments since its start and is fully repaired.
    ///
    /// Returns the shards that were damaged meanwhile.
    pub(crate) async fn wait_until_repaired(
        &mut self,
        id: u64,
        limit: Duration,
    ) -> anyhow::Result<BTreeSet<u32>> {
        let deadline = Instant::now() + limit;
        let mut hurt = BTreeSet::new();
        loop {
            self.check_running()?;
            let check_repaired = self.check_repaired(id, &mut hurt).await;
            let Err(error) = check_repaired else { break };
            if Instant::now() > deadline {
                let what = format!("NOT REPAIRED: node {id} is still damaged after {limit:?}");
                return Err(error.context(what));
            }
            sleep(POLL_INTERVAL).await;
        }
        self.wait_until_healthy(deadline.saturating_duration_since(Instant::now())).await?;
        Ok(hurt)
    }

    async fn check_repaired(&self, id: u64, hurt: &mut BTreeSet<u32>) -> anyhow::Result<()> {
        let node = self.nodes.get(&id).with_context(|| format!("there is no node {id}"))?;
        let health = node.node_client.health().await?;
        let is_hurt = |it: &&HealthIssue| {
            matches!(it.reason(), HealthReason::CorruptLog | HealthReason::StorageFailed)
        };
        let issues: Vec<_> = health.issues.iter().filter(is_hurt).collect();
        hurt.extend(issues.iter().filter_map(|issue| issue.shard_id));
        if let Some(issue) = issues.first() {
            bail!("{}", issue.message);
        }
        // For the cluster's own log only this metric reports damage.
        let damaged = metrics::sum(node.admin, "helix_shard_damaged_ranges").await?;
        ensure!(damaged == 0, "{damaged} ranges are damaged");
        let rounds = metrics::sum(node.admin, "helix_scrub_rounds_total").await?;
        ensure!(rounds > 0, "the first scrub round is not complete");
        Ok(())
    }

    /// Sends SIGKILL to these nodes at once and waits until they are gone.
    pub(crate) async fn kill(&mut self, ids: &[u64]) -> anyhow::Result<()> {
        for id in ids {
            self.node(*id).begin_kill()?;
        }
        for id in ids {
            self.node(*id).kill().await?;
        }
        Ok(())
    }

    pub(crate) async fn terminate(&mut self, id: u64) -> anyhow::Result<()> {
        self.node(id).terminate().await
    }

    pub(crate) fn pause(&mut self, id: u64) -> anyhow::Result<()> {
        self.node(id).pause()
    }

    pub(crate) fn resume(&mut self, id: u64) -> anyhow::Result<()> {
        self.node(id).resume()
    }

    /// Sets the mode of the link between two nodes. `from` is the node that dials, and the
    /// direction of the leader's data.
    pub(crate) fn set_link(&self, from: u64, to: u64, mode: LinkMode) {
        if let Some(link) = self.links.get(&(from, to)) {
            link.set(mode);
        }
    }

    /// Sets the mode of all links between nodes.
    pub(crate) fn set_links(&self, mode: LinkMode) {
        self.links.values().for_each(|link| link.set(mode));
    }

    /// Sets the mode of the link from clients to a node.
    pub(crate) fn set_client_link(&self, to: u64, mode: LinkMode) {
        if let Some(link) = self.client_links.get(&to) {
            link.set(mode);
        }
    }

    /// Returns the response bytes of a node that were dropped.
    pub(crate) fn bytes_dropped(&self, id: u64) -> u64 {
        self.client_links.get(&id).map_or(0, Proxy::bytes_dropped)
    }

    /// Lets every link pass and every node run.
    pub(crate) fn heal(&mut self) -> anyhow::Result<()> {
        self.set_links(LinkMode::Pass);
        self.client_links.values().for_each(|link| link.set(LinkMode::Pass));
        for id in self.ids() {
            self.resume(id)?;
            if !self.node(id).is_running() {
                self.start_node(id)?;
            }
        }
        Ok(())
    }

    /// Checks that all nodes that should run do.
    ///
    /// # Errors
    /// A node has exited unexpectedly.
    pub(crate) fn check_running(&mut self) -> anyhow::Result<()> {
        for (id, node) in &mut self.nodes {
            if let Some(status) = node.process.ended() {
                bail!("node {id} exited unexpectedly: {status}; see node-{id}.log");
            }
        }
        Ok(())
    }

    /// Returns the leaders that the running nodes report; the highest term counts.
    pub(crate) async fn leaders(&self) -> ShardLeaders {
        let mut leaders = ShardLeaders::new();
        for node in self.nodes.values().filter(|node| !node.process.is_unresponsive()) {
            let Ok(metadata) = node.node_client.metadata().await else { continue };
            for shard in metadata.shards {
                let hint = shard.leader.unwrap_or_default();
                let known = leaders.entry(shard.shard_id).or_insert((0, 0));
                if hint.node_id != 0 && (hint.term, hint.node_id) > (known.1, known.0) {
                    *known = (hint.node_id, hint.term);
                }
            }
        }
        leaders.retain(|_, (node, _)| *node != 0);
        leaders
    }

    /// Waits until every node reports that it is healthy.
    pub(crate) async fn wait_until_healthy(&mut self, limit: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + limit;
        loop {
            self.check_running()?;
            let Err(error) = self.check_healthy().await else { return Ok(()) };
            if Instant::now() > deadline {
                return Err(error.context(format!("not healthy after {limit:?}")));
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    async fn check_healthy(&self) -> anyhow::Result<()> {
        for node in self.nodes.values() {
            let health = node.node_client.health().await?;
            if !health.healthy {
                let issues = health.issues.iter();
                let issues: Vec<_> = issues
                    .map(|issue| format!("{:?}: {}", issue.reason(), issue.message))
                    .collect();
                bail!("node {} reports {}", node.node_client.node_id, issues.join("; "));
            }
        }
        Ok(())
    }

    /// Returns the last index of each data shard's log on a node.
    pub(crate) async fn last_indexes(&self, id: u64) -> anyhow::Result<BTreeMap<u32, u64>> {
        let status = self.nodes[&id].node_client.status().await?;
        let shards = status.shards.into_iter().filter(|shard| shard.shard_id != 0);
        Ok(shards.map(|shard| (shard.shard_id, shard.last_index)).collect())
    }

    /// Returns the data shards with a replica on a node.
    pub(crate) async fn shards_on(&self, id: u64) -> anyhow::Result<BTreeSet<u32>> {
        Ok(self.last_indexes(id).await?.into_keys().collect())
    }

    /// Reports whether every running node has purged the entry after each of these from its logs.
    pub(crate) async fn has_purged(&self, had: &BTreeMap<u32, u64>) -> bool {
        for node in self.nodes.values().filter(|node| !node.process.is_unresponsive()) {
            let Ok(status) = node.node_client.status().await else { return false };
            let shards = status.shards.into_iter().filter(|shard| shard.shard_id != 0);
            let mut lacked =
                shards.map(|s| had.get(&s.shard_id).is_none_or(|had| s.purged_index > *had));
            if !lacked.all(|it| it) {
                return false;
            }
        }
        true
    }

    /// Returns the positions of all replicas if each has applied its whole log and all are equal.
    pub(crate) async fn level(&self) -> anyhow::Result<ReplicaPositions> {
        let mut positions = ReplicaPositions::new();
        for node in self.nodes.values() {
            let status = node.node_client.status().await?;
            let mut shards = Vec::new();
            for shard in status.shards {
                let far = [shard.last_index, shard.committed_index, shard.applied_index];
                ensure!(
                    far.iter().all(|index| *index == far[0]),
                    "node {}, shard {}: last, committed and applied index are {far:?}",
                    status.node_id,
                    shard.shard_id
                );
                shards.push([u64::from(shard.shard_id), far[0], far[1], far[2]]);
            }
            shards.sort_unstable();
            positions.push((status.node_id, shards));
        }
        let mut first: BTreeMap<u64, (u64, [u64; 4])> = BTreeMap::new();
        for (node, row) in positions.iter().flat_map(|(id, rows)| rows.iter().map(|it| (*id, *it)))
        {
            let (other, known) = *first.entry(row[0]).or_insert((node, row));
            ensure!(
                known == row,
                "[shard, last, committed, applied] of node {other} are {known:?}, of node {node} \
                 {row:?}"
            );
        }
        Ok(positions)
    }

    /// Waits until all replicas are level.
    pub(crate) async fn wait_until_level(
        &mut self,
        limit: Duration,
    ) -> anyhow::Result<ReplicaPositions> {
        let deadline = Instant::now() + limit;
        loop {
            self.check_running()?;
            match self.level().await {
                Ok(positions) => return Ok(positions),
                Err(error) if Instant::now() > deadline => {
                    return Err(error.context(format!("not caught up after {limit:?}")));
                }
                Err(_) => sleep(POLL_INTERVAL).await,
            }
        }
    }
}

/// Returns all ordered pairs.
pub(crate) fn pairs(ids: &[u64]) -> impl Iterator<Item = (u64, u64)> {
    ids.iter().flat_map(|from| ids.iter().filter(move |to| *to != from).map(move |to| (*from, *to)))
}
