//! Real nodes on loopback, each link between them and to them through a proxy of its own.
//! What can be done to them, and what they say when they are asked one by one.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use helix_proto::log::v1::{HealthIssue, HealthReason};
use tokio::time::{Instant, sleep};

use crate::direct::Direct;
use crate::disk::SmallDisk;
use crate::metrics;
use crate::node::{Node, NodeOptions};
use crate::ports;
use crate::proxy::{Mode, Proxy};

/// Between two looks at a condition.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Data shards: leaders on different nodes, and more than one log to lose.
const SHARDS: u64 = 3;

/// What to start.
#[derive(Debug, Clone)]
pub(crate) struct ClusterOptions {
    /// The program that becomes a node with the argument `node`.
    pub(crate) program: PathBuf,
    /// Nodes: 1, 3 or 5.
    pub(crate) nodes: u64,
    /// Folder for data and logs.
    pub(crate) folder: PathBuf,
    /// Whether clients go through proxies too.
    pub(crate) has_client_proxies: bool,
    /// Log that nodes keep for others, and between checkpoints.
    pub(crate) log_kib: Option<u64>,
    /// Give each node a file system of its own of so many bytes, where that can be done.
    pub(crate) disk_bytes: Option<u64>,
}

/// Times that each node was started; shared with whoever must notice a restart.
pub(crate) type Starts = Arc<BTreeMap<u64, AtomicU32>>;

/// Leader and term of each shard.
pub(crate) type Leaders = BTreeMap<u32, (u64, u64)>;

/// How far the replicas are: shard, term, last, committed and applied index, by node.
pub(crate) type Marks = Vec<(u64, Vec<[u64; 4]>)>;

/// A running cluster. Dropping it kills its nodes.
#[derive(Debug)]
pub(crate) struct Cluster {
    nodes: BTreeMap<u64, Member>,
    /// From a node to another. From [`ANYONE`] to a node that joined later: that is the address
    /// which others are told, until they are started again with one of their own.
    links: BTreeMap<(u64, u64), Proxy>,
    /// From clients to a node.
    client_links: BTreeMap<u64, Proxy>,
    starts: Starts,
    options: ClusterOptions,
}

/// Highest number of a node in the life of a cluster.
pub(crate) const NODES_MAX: u64 = 9;

/// No node's number.
const ANYONE: u64 = 0;

#[derive(Debug)]
struct Member {
    process: Node,
    /// Where other nodes reach it, past all proxies.
    peer: SocketAddr,
    direct: Direct,
    /// Where clients begin.
    endpoint: SocketAddr,
    /// Where it says how it is.
    admin: SocketAddr,
    disk: Option<SmallDisk>,
}

impl Cluster {
    /// Starts all nodes with empty data.
    pub(crate) fn start(options: &ClusterOptions) -> anyhow::Result<Self> {
        ensure!(matches!(options.nodes, 1 | 3 | 5), "a cluster has 1, 3 or 5 nodes");
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

    /// Starts a node that waits to be added, and gives the address at which others dial it.
    pub(crate) fn join(&mut self, id: u64) -> anyhow::Result<SocketAddr> {
        ensure!((1..=NODES_MAX).contains(&id), "there is no place for node {id}");
        let peer = ports::free()?;
        for (other, member) in &self.nodes {
            self.links.insert((*other, id), Proxy::start(peer)?);
            self.links.insert((id, *other), Proxy::start(member.peer)?);
        }
        let known_as = Proxy::start(peer)?;
        let address = known_as.address();
        self.links.insert((ANYONE, id), known_as);
        self.add(id, peer)?;
        self.start_node(id)?;
        Ok(address)
    }

    /// Ends the process of a node that was removed, and forgets it and its data.
    pub(crate) async fn leave(&mut self, id: u64) -> anyhow::Result<()> {
        self.terminate(id).await?;
        self.wipe(id).await?;
        self.nodes.remove(&id);
        self.client_links.remove(&id);
        self.links.retain(|(from, to), _| *from != id && *to != id);
        Ok(())
    }

    /// Where a node's data is.
    pub(crate) fn data_dir(&self, id: u64) -> PathBuf {
        self.options.folder.join(format!("node-{id}"))
    }

    /// Deletes the data of a node that is not running.
    pub(crate) async fn wipe(&self, id: u64) -> anyhow::Result<()> {
        let folder = self.data_dir(id);
        let mut entries = tokio::fs::read_dir(&folder).await.context("the folder of a node")?;
        // Not the folder itself: it may be a file system of its own.
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
            Some(bytes) => SmallDisk::mount(&data_dir, bytes)?,
            None => None,
        };
        let options = &self.options;
        let node = NodeOptions {
            program: options.program.clone(),
            node_id: id,
            address,
            advertised: endpoint,
            admin,
            peer_address: peer,
            peers: Vec::new(),
            shards: Some(SHARDS),
            log_kib: options.log_kib,
            data_dir,
            log: options.folder.join(format!("node-{id}.log")),
        };
        let direct = Direct::new(id, address)?;
        let process = Node::new(node);
        self.nodes.insert(id, Member { process, peer, direct, endpoint, admin, disk });
        Ok(())
    }

    /// The nodes that there are now, as this one is told of them: each by its own link, and itself.
    fn peers(&self, id: u64) -> Vec<(u64, SocketAddr)> {
        let links = self.links.iter().filter(|((from, _), _)| *from == id);
        let links = links.map(|((_, to), proxy)| (*to, proxy.address()));
        links.chain(self.nodes.get(&id).map(|member| (id, member.peer))).collect()
    }

    pub(crate) fn ids(&self) -> Vec<u64> {
        self.nodes.keys().copied().collect()
    }

    /// Nodes that may be down while the rest is a majority.
    pub(crate) fn minority(&self) -> usize {
        (self.nodes.len() - 1) / 2
    }

    /// Addresses that clients begin with.
    pub(crate) fn endpoints(&self) -> Vec<String> {
        self.nodes.values().map(|node| node.endpoint.to_string()).collect()
    }

    pub(crate) fn direct(&self) -> Vec<Direct> {
        self.nodes.values().map(|node| node.direct.clone()).collect()
    }

    pub(crate) fn starts(&self) -> Starts {
        self.starts.clone()
    }

    fn node(&mut self, id: u64) -> &mut Node {
        &mut self.nodes.get_mut(&id).expect("only nodes of the cluster are named").process
    }

    /// Starts a node that is not running, on its data, and tells it of the nodes that there are.
    pub(crate) fn start_node(&mut self, id: u64) -> anyhow::Result<()> {
        self.starts[&id].fetch_add(1, Ordering::SeqCst);
        let peers = self.peers(id);
        self.node(id).start(peers)
    }

    /// Id of a node's process, if it runs.
    pub(crate) fn process_id(&mut self, id: u64) -> Option<u32> {
        self.node(id).process_id()
    }

    /// Waits until a node has ended by itself, and gives its exit code.
    pub(crate) async fn ends_by_itself(
        &mut self,
        id: u64,
        limit: Duration,
    ) -> anyhow::Result<Option<i32>> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.node(id).ended() {
                return Ok(status.code());
            }
            ensure!(Instant::now() < deadline, "node {id} goes on after {limit:?}");
            sleep(LOOK_EVERY).await;
        }
    }

    /// The file system that a node has for itself.
    pub(crate) fn disk(&self, id: u64) -> Option<&SmallDisk> {
        self.nodes.get(&id)?.disk.as_ref()
    }

    /// What one node says of its health, past all proxies.
    pub(crate) fn one(&self, id: u64) -> anyhow::Result<Direct> {
        let member = self.nodes.get(&id).with_context(|| format!("there is no node {id}"))?;
        Ok(member.direct.clone())
    }

    /// A metric of all running nodes, added up.
    pub(crate) async fn metric(&self, name: &str) -> u64 {
        let mut sum = 0;
        for node in self.nodes.values().filter(|node| !node.process.is_silent()) {
            sum += metrics::sum(node.admin, name).await.unwrap_or(0);
        }
        sum
    }

    /// Waits until a node has read all that is sealed once since its start, and all of it is whole
    /// and everything else well. Gives the shards that were not for a while.
    pub(crate) async fn whole(
        &mut self,
        id: u64,
        limit: Duration,
    ) -> anyhow::Result<BTreeSet<u32>> {
        let deadline = Instant::now() + limit;
        let mut hurt = BTreeSet::new();
        loop {
            self.none_has_ended()?;
            let is_whole = self.is_whole(id, &mut hurt).await;
            let Err(error) = is_whole else { break };
            if Instant::now() > deadline {
                let what = format!("NOT REPAIRED: node {id} is not whole after {limit:?}");
                return Err(error.context(what));
            }
            sleep(LOOK_EVERY).await;
        }
        self.healthy(deadline.saturating_duration_since(Instant::now())).await?;
        Ok(hurt)
    }

    async fn is_whole(&self, id: u64, hurt: &mut BTreeSet<u32>) -> anyhow::Result<()> {
        let node = self.nodes.get(&id).with_context(|| format!("there is no node {id}"))?;
        let health = node.direct.health().await?;
        let is_hurt = |it: &&HealthIssue| {
            matches!(it.reason(), HealthReason::CorruptLog | HealthReason::StorageFailed)
        };
        let issues: Vec<_> = health.issues.iter().filter(is_hurt).collect();
        hurt.extend(issues.iter().filter_map(|issue| issue.shard_id));
        if let Some(issue) = issues.first() {
            bail!("{}", issue.message);
        }
        // The cluster's own log says of its damage here only.
        let damaged = metrics::sum(node.admin, "helix_shard_damaged_ranges").await?;
        ensure!(damaged == 0, "{damaged} ranges are damaged");
        let rounds = metrics::sum(node.admin, "helix_scrub_rounds_total").await?;
        ensure!(rounds > 0, "it has not read all of its logs yet");
        Ok(())
    }

    /// SIGKILL to all of these at once; returns when they are gone.
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

    /// What the link between two nodes does, in the direction in which it is dialled and data of
    /// the one that leads flows.
    pub(crate) fn set_link(&self, from: u64, to: u64, mode: Mode) {
        if let Some(link) = self.links.get(&(from, to)) {
            link.set(mode);
        }
    }

    /// What all links between nodes do.
    pub(crate) fn set_links(&self, mode: Mode) {
        self.links.values().for_each(|link| link.set(mode));
    }

    /// What the link from clients to a node does.
    pub(crate) fn set_client_link(&self, to: u64, mode: Mode) {
        if let Some(link) = self.client_links.get(&to) {
            link.set(mode);
        }
    }

    /// Bytes of answers of a node that clients did not get.
    pub(crate) fn swallowed(&self, id: u64) -> u64 {
        self.client_links.get(&id).map_or(0, Proxy::swallowed)
    }

    /// Lets every link pass and every node run.
    pub(crate) fn heal(&mut self) -> anyhow::Result<()> {
        self.set_links(Mode::Pass);
        self.client_links.values().for_each(|link| link.set(Mode::Pass));
        for id in self.ids() {
            self.resume(id)?;
            if !self.node(id).is_running() {
                self.start_node(id)?;
            }
        }
        Ok(())
    }

    /// # Errors
    /// A node has ended although nobody asked it to.
    pub(crate) fn none_has_ended(&mut self) -> anyhow::Result<()> {
        for (id, node) in &mut self.nodes {
            if let Some(status) = node.process.ended() {
                bail!("node {id} ended by itself: {status}; see node-{id}.log");
            }
        }
        Ok(())
    }

    /// Leaders as the running nodes tell them; the highest term counts.
    pub(crate) async fn leaders(&self) -> Leaders {
        let mut leaders = Leaders::new();
        for node in self.nodes.values().filter(|node| !node.process.is_silent()) {
            let Ok(metadata) = node.direct.metadata().await else { continue };
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

    /// Waits until every node says that everything is well.
    pub(crate) async fn healthy(&mut self, limit: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + limit;
        loop {
            self.none_has_ended()?;
            let Err(error) = self.is_healthy().await else { return Ok(()) };
            if Instant::now() > deadline {
                return Err(error.context(format!("not healthy after {limit:?}")));
            }
            sleep(LOOK_EVERY).await;
        }
    }

    async fn is_healthy(&self) -> anyhow::Result<()> {
        for node in self.nodes.values() {
            let health = node.direct.health().await?;
            if !health.healthy {
                let issues = health.issues.iter();
                let issues: Vec<_> = issues
                    .map(|issue| format!("{:?}: {}", issue.reason(), issue.message))
                    .collect();
                bail!("node {} says {}", node.direct.node_id, issues.join("; "));
            }
        }
        Ok(())
    }

    /// Last index of each data shard's log on a node.
    pub(crate) async fn last_indexes(&self, id: u64) -> anyhow::Result<BTreeMap<u32, u64>> {
        let status = self.nodes[&id].direct.status().await?;
        let shards = status.shards.into_iter().filter(|shard| shard.shard_id != 0);
        Ok(shards.map(|shard| (shard.shard_id, shard.last_index)).collect())
    }

    /// Whether every running node has purged its logs of the entry after each of these.
    pub(crate) async fn has_purged(&self, had: &BTreeMap<u32, u64>) -> bool {
        for node in self.nodes.values().filter(|node| !node.process.is_silent()) {
            let Ok(status) = node.direct.status().await else { return false };
            let shards = status.shards.into_iter().filter(|shard| shard.shard_id != 0);
            let mut lacked =
                shards.map(|s| had.get(&s.shard_id).is_none_or(|had| s.purged_index > *had));
            if !lacked.all(|it| it) {
                return false;
            }
        }
        true
    }

    /// How far every replica is, if each has applied all that it has and all are equally far.
    pub(crate) async fn level(&self) -> anyhow::Result<Marks> {
        let mut marks = Marks::new();
        for node in self.nodes.values() {
            let status = node.direct.status().await?;
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
            marks.push((status.node_id, shards));
        }
        let (first, shards) = marks.first().context("no nodes")?;
        for (other, theirs) in &marks {
            ensure!(
                shards == theirs,
                "[shard, last, committed, applied] of node {first} are {shards:?}, of node \
                 {other} {theirs:?}"
            );
        }
        Ok(marks)
    }

    /// Waits until all replicas are level.
    pub(crate) async fn caught_up(&mut self, limit: Duration) -> anyhow::Result<Marks> {
        let deadline = Instant::now() + limit;
        loop {
            self.none_has_ended()?;
            match self.level().await {
                Ok(marks) => return Ok(marks),
                Err(error) if Instant::now() > deadline => {
                    return Err(error.context(format!("not caught up after {limit:?}")));
                }
                Err(_) => sleep(LOOK_EVERY).await,
            }
        }
    }
}

/// All ordered pairs.
pub(crate) fn pairs(ids: &[u64]) -> impl Iterator<Item = (u64, u64)> {
    ids.iter().flat_map(|from| ids.iter().filter(move |to| *to != from).map(move |to| (*from, *to)))
}
