//! Target of a run: the cluster, the topic with its partitions, and the clients.
//!
//! It also observes the nodes before and after a run.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::{StreamExt, TryStreamExt, stream};
use helix_client::contexts::ChosenCluster;
use helix_client::exit::Exit;
use helix_client::{Client, Config, NewTopic, Position};
use helix_proto::log::v1::{
    ErrorReason, GetNodeStatusResponse, ResolvedOffset, Topic, TopicConfig,
};
use tokio::time::Instant;
use tonic::Code;

use crate::exit::BenchFailure;
use crate::host::process_cpu_time;
use crate::load::{BenchLoad, DEFAULT_TOPIC, LoadMode};
use crate::progress;

/// Tolerates a pause of the server, but ends the run soon if the server is down.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest wait for the first response; a starting node is up within this.
const FIRST_ANSWER_MAX: Duration = Duration::from_secs(2);

/// Groups that are deleted at the same time.
const CONCURRENT_DELETIONS: usize = 32;

/// Partitions of the topic that a load creates if it names none.
const DEFAULT_TOPIC_PARTITIONS: u32 = 4;

/// Topic of a cluster, and connections to it.
#[derive(Debug)]
pub(crate) struct BenchTarget {
    /// Client for status requests; not part of the load.
    pub(crate) observer: Client,
    clients: Vec<Client>,
    pub(crate) topic: Topic,
    /// Partitions under load.
    pub(crate) partitions: Vec<u32>,
    /// Addresses of all nodes, as reported by the cluster.
    pub(crate) addresses: Vec<String>,
}

/// State of the nodes and of this process at one moment.
#[derive(Debug)]
pub(crate) struct Observation {
    pub(crate) at: Instant,
    /// CPU time of this process.
    pub(crate) cpu: Duration,
    /// Nodes that answered.
    pub(crate) nodes: Vec<NodeObservation>,
}

/// Status that a node reported.
#[derive(Debug)]
pub(crate) struct NodeObservation {
    pub(crate) address: String,
    pub(crate) at: Instant,
    pub(crate) status: GetNodeStatusResponse,
}

impl BenchTarget {
    /// Connects to the cluster and looks up or creates the topic.
    ///
    /// # Errors
    /// The cluster cannot be reached, or the topic does not fit the load.
    pub(crate) async fn connect(load: &BenchLoad) -> Result<Self> {
        let observer = Self::admin(load).await?;
        if let Some(partitions) = load.create_topic {
            let replication_factor = load.replication_factor.unwrap_or_default();
            let topic = NewTopic { replication_factor, ..NewTopic::new(&load.topic, partitions) };
            observer.admin().create_topic(&topic).await.context("create the topic")?;
        }
        let topic = match observer.admin().topic(&load.topic).await {
            Err(error) if error.is(ErrorReason::TopicNotFound) && load.creates_default_topic => {
                create_default_topic(load, &observer).await?
            }
            topic => topic.map_err(|error| no_topic(load, error))?,
        };
        let count = u32::try_from(topic.partitions.len()).context("count partitions")?;
        let partitions = match load.partition {
            None => (0..count).collect(),
            Some(partition) if partition < count => vec![partition],
            Some(partition) => {
                let what = format!("topic {} has no partition {partition}", load.topic);
                let hint = format!("--partition N   from 0 to {}, or -1 for all", count.max(1) - 1);
                let failure = BenchFailure { hint, ..BenchFailure::new(Exit::NotFound, what) };
                return Err(failure.into());
            }
        };
        ensure!(!partitions.is_empty(), "topic {} has no partitions", load.topic);
        let metadata = observer.admin().metadata(&[&load.topic]).await.context("list nodes")?;
        let advertised = metadata.nodes.into_iter().map(|node| node.endpoint);
        let mut addresses: Vec<_> = advertised.filter(|address| !address.is_empty()).collect();
        if addresses.is_empty() {
            addresses.clone_from(&load.cluster.addr);
        }
        let clients =
            (0..load.connections).map(|_| Ok(Client::new(config(load))?)).collect::<Result<_>>()?;
        Ok(Self { observer, clients, topic, partitions, addresses })
    }

    /// Returns a client for administration, after a node has answered.
    ///
    /// # Errors
    /// The cluster cannot be reached.
    pub(crate) async fn admin(load: &BenchLoad) -> Result<Client> {
        let probe = Config { request_timeout: FIRST_ANSWER_MAX, ..config(load) };
        Client::connect(probe).await.map_err(|error| unreachable(load, &error))?;
        Ok(Client::new(config(load))?)
    }

    /// Returns the connection for client number `number` of the load.
    pub(crate) fn client(&self, number: usize) -> &Client {
        &self.clients[number % self.clients.len()]
    }

    /// Takes the status of all nodes and the CPU time of this process.
    pub(crate) async fn observe(&self) -> Observation {
        let mut nodes = Vec::with_capacity(self.addresses.len());
        for address in &self.addresses {
            // A node that is down is only missing from the report.
            if let Ok(status) = self.observer.admin().node_status(Some(address)).await {
                nodes.push(NodeObservation {
                    address: address.clone(),
                    at: Instant::now(),
                    status,
                });
            }
        }
        Observation { at: Instant::now(), cpu: process_cpu_time(), nodes }
    }

    /// Returns the end offset of each partition under load.
    ///
    /// # Errors
    /// The ends cannot be looked up.
    pub(crate) async fn ends(&self) -> Result<Vec<ResolvedOffset>> {
        let admin = self.observer.admin();
        let partitions = &self.partitions;
        let ends = admin.resolve_offsets(&self.topic.name, partitions, &Position::Latest).await;
        let ends = ends.context("look up the ends of the partitions")?;
        ensure!(ends.len() == partitions.len(), "some partitions have no end offset");
        Ok(ends)
    }
}

/// Creates the topic of a load that names none, and says so.
async fn create_default_topic(load: &BenchLoad, admin: &Client) -> Result<Topic> {
    let topic = NewTopic::new(&load.topic, DEFAULT_TOPIC_PARTITIONS);
    let created = admin.admin().create_topic(&topic).await;
    let created = created.with_context(|| format!("create the topic {}", load.topic))?;
    progress::step(&format!(
        "created the topic {} with {DEFAULT_TOPIC_PARTITIONS} partitions; --topic selects another",
        load.topic
    ));
    Ok(created)
}

fn unreachable(load: &BenchLoad, error: &helix_client::Error) -> BenchFailure {
    let ChosenCluster { addr, source, .. } = &load.cluster;
    let addr = addr.join(",");
    let (exit, why, hint) = match error.code {
        Code::Unavailable | Code::DeadlineExceeded => (
            Exit::Unavailable,
            format!(
                "no Helix node at {addr}, or at the addresses reported there, answered in time"
            ),
            "helix dev   starts a local cluster\n--addr HOST:PORT,..   selects another cluster",
        ),
        _ => (
            Exit::of(error),
            format!("{addr} may not be a Helix node, or runs another version"),
            "--addr HOST:PORT,..   must be the client address, not the admin or peer address",
        ),
    };
    let what = format!("connect to {addr} ({source}): {error}");
    BenchFailure { exit, what, why, hint: hint.to_owned() }
}

fn no_topic(load: &BenchLoad, error: helix_client::Error) -> anyhow::Error {
    let topic = &load.topic;
    if !error.is(ErrorReason::TopicNotFound) {
        return anyhow::Error::new(error).context(format!("look up the topic {topic}"));
    }
    let hint = match load.mode {
        LoadMode::Read => {
            // A load that writes creates only the topic that it uses by default.
            let flags = match topic.as_str() {
                DEFAULT_TOPIC => String::new(),
                named => format!(" --topic {named} --create-topic PARTITIONS"),
            };
            format!("helix-bench write{flags}   creates it and writes records to read")
        }
        _ => "--create-topic PARTITIONS   creates it".to_owned(),
    };
    let failure = BenchFailure {
        hint: format!("{hint}\n--topic NAME   selects another topic"),
        ..BenchFailure::new(Exit::NotFound, format!("the cluster has no topic {topic}"))
    };
    failure.into()
}

/// Creates topics of one partition that keep `retention` bytes.
///
/// # Errors
/// A topic cannot be created.
pub(crate) async fn create_topics(
    client: &Client,
    names: &[&str],
    retention: usize,
    replication_factor: Option<u32>,
) -> Result<()> {
    for name in names {
        let topic = NewTopic {
            replication_factor: replication_factor.unwrap_or_default(),
            config: TopicConfig {
                retention_bytes: Some(retention as u64),
                ..TopicConfig::default()
            },
            ..NewTopic::new(*name, 1)
        };
        let created = client.admin().create_topic(&topic).await;
        created.with_context(|| format!("create the topic {name}"))?;
    }
    Ok(())
}

/// Deletes topics that a run has created.
pub(crate) async fn delete_topics(client: &Client, names: &[&str]) {
    for name in names {
        // Ignored: a cluster that fails here has failed the run before.
        let _ = client.admin().delete_topic(*name).await;
    }
}

/// Deletes the groups whose names have this prefix. They must have no members.
pub(crate) async fn delete_groups(client: &Client, prefix: &str) -> Result<()> {
    let groups = client.admin().groups().await.context("list groups")?;
    let names = groups.into_iter().map(|group| group.group).filter(|name| name.starts_with(prefix));
    let delete = async |name: String| match client.admin().delete_group(&name).await {
        Err(error) if error.is(ErrorReason::GroupNotFound) => Ok(()),
        deleted => deleted.with_context(|| format!("delete the group {name}")),
    };
    stream::iter(names).map(delete).buffer_unordered(CONCURRENT_DELETIONS).try_collect().await
}

/// Returns the client settings of a load.
pub(crate) fn config(load: &BenchLoad) -> Config {
    Config {
        request_timeout: REQUEST_TIMEOUT,
        seed: Some(load.seed),
        ..load.cluster.clone().config()
    }
}
