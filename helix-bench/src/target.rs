//! What is measured: the cluster, the topic and partitions in it, and the clients that go there.
//! Asks nodes about themselves before and after a run.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use helix_client::{Client, Config, NewTopic, Position};
use helix_proto::log::v1::{ErrorReason, GetNodeStatusResponse, ResolvedOffset, Topic};
use rustix::time::{ClockId, clock_gettime};
use tokio::time::Instant;
use tonic::Code;

use crate::exit::{self, Failure};
use crate::load::Load;

/// Long enough for a pause, short enough that a dead server ends the run.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a first answer may take. A node that starts is up within this.
const FIRST_ANSWER_MAX: Duration = Duration::from_secs(2);

/// A topic of a cluster, and connections to it.
#[derive(Debug)]
pub(crate) struct Target {
    /// For questions; takes no part in the load.
    pub(crate) observer: Client,
    clients: Vec<Client>,
    pub(crate) topic: Topic,
    /// Those under load.
    pub(crate) partitions: Vec<u32>,
    /// Of all nodes, as the cluster tells them.
    pub(crate) addresses: Vec<String>,
}

/// The state of nodes and of this process at one moment.
#[derive(Debug)]
pub(crate) struct Observation {
    pub(crate) at: Instant,
    /// CPU time of this process.
    pub(crate) cpu: Duration,
    /// Nodes that answered.
    pub(crate) nodes: Vec<Seen>,
}

/// What a node said of itself.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) address: String,
    pub(crate) at: Instant,
    pub(crate) status: GetNodeStatusResponse,
}

impl Target {
    /// # Errors
    /// Why the cluster cannot be reached, or what is wrong with the topic.
    pub(crate) async fn connect(load: &Load) -> Result<Self> {
        let probe = Config { request_timeout: FIRST_ANSWER_MAX, ..config(load) };
        Client::connect(probe).await.map_err(|error| unreachable(load, &error))?;
        let observer = Client::new(config(load))?;
        if let Some(partitions) = load.create_topic {
            let replication_factor = load.replication_factor.unwrap_or_default();
            let topic = NewTopic { replication_factor, ..NewTopic::new(&load.topic, partitions) };
            observer.admin().create_topic(&topic).await.context("create the topic")?;
        }
        let topic = observer.admin().topic(&load.topic).await;
        let topic = topic.map_err(|error| no_topic(load, error))?;
        let count = u32::try_from(topic.partitions.len()).context("count partitions")?;
        let partitions = match load.partition {
            None => (0..count).collect(),
            Some(partition) if partition < count => vec![partition],
            Some(partition) => {
                bail!("{}: no partition {partition}, there are {count}", load.topic)
            }
        };
        ensure!(!partitions.is_empty(), "{}: no partitions", load.topic);
        let metadata = observer.admin().metadata(&[&load.topic]).await.context("list nodes")?;
        let advertised = metadata.nodes.into_iter().map(|node| node.endpoint);
        let mut addresses: Vec<_> = advertised.filter(|address| !address.is_empty()).collect();
        if addresses.is_empty() {
            addresses.clone_from(&load.addr);
        }
        let clients =
            (0..load.connections).map(|_| Client::new(config(load))).collect::<Result<_, _>>()?;
        Ok(Self { observer, clients, topic, partitions, addresses })
    }

    /// The client of one of the load's clients.
    pub(crate) fn client(&self, number: usize) -> &Client {
        &self.clients[number % self.clients.len()]
    }

    pub(crate) async fn observe(&self) -> Observation {
        let mut nodes = Vec::with_capacity(self.addresses.len());
        for address in &self.addresses {
            // A node that is down is missing from the report, and that is all.
            if let Ok(status) = self.observer.admin().node_status(Some(address)).await {
                nodes.push(Seen { address: address.clone(), at: Instant::now(), status });
            }
        }
        Observation { at: Instant::now(), cpu: process_cpu_time(), nodes }
    }

    /// Where each partition under load stands.
    ///
    /// # Errors
    /// Why that cannot be found out.
    pub(crate) async fn ends(&self) -> Result<Vec<ResolvedOffset>> {
        let admin = self.observer.admin();
        let partitions = &self.partitions;
        let ends = admin.resolve_offsets(&self.topic.name, partitions, &Position::Latest).await;
        let ends = ends.context("look up the ends of the partitions")?;
        ensure!(ends.len() == partitions.len(), "some partitions have no end");
        Ok(ends)
    }
}

fn unreachable(load: &Load, error: &helix_client::Error) -> Failure {
    let addr = load.addr.join(",");
    let (why, hint) = match error.code {
        Code::Unavailable | Code::DeadlineExceeded => (
            format!("no Helix node answers in time at {addr}, or at the addresses that they gave"),
            "helix dev   starts a cluster here\n--addr HOST:PORT,..   for one elsewhere",
        ),
        _ => (
            format!("what listens at {addr} may not be a Helix node, or one of another version"),
            "--addr HOST:PORT,..   is where a node takes clients, not its admin or peer address",
        ),
    };
    let what = format!("connect to {addr}: {error}");
    Failure { code: exit::FAILED, what, why, hint: hint.to_owned() }
}

fn no_topic(load: &Load, error: helix_client::Error) -> anyhow::Error {
    let topic = &load.topic;
    if !error.is(ErrorReason::TopicNotFound) {
        return anyhow::Error::new(error).context(format!("look up the topic {topic}"));
    }
    let failure = Failure {
        code: exit::FAILED,
        what: format!("the cluster has no topic {topic}"),
        why: String::new(),
        hint: "--create-topic PARTITIONS   creates it first\n--topic NAME   for another one"
            .to_owned(),
    };
    failure.into()
}

fn config(load: &Load) -> Config {
    Config {
        request_timeout: REQUEST_TIMEOUT,
        seed: Some(load.seed),
        ..Config::new(load.addr.iter().cloned())
    }
}

/// CPU time of this process, user and system.
pub(crate) fn process_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    let nanos = u32::try_from(time.tv_nsec).unwrap_or_default();
    Duration::new(seconds, nanos)
}
