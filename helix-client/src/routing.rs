//! Where a partition's leader is: the one place that knows, and the one that learns.
//! A partition leads to its shard, a shard to its leader; a higher term beats a lower one.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use helix_proto::log::v1::{ErrorReason, GetMetadataRequest, LeaderHint, Metadata};
use tokio::time::timeout;
use tonic::Code;

use crate::config::Config;
use crate::connection::{Connection, Pool};
use crate::error::{Error, Origin, Result};

/// The way to a partition's leader.
#[derive(Debug, Clone)]
pub struct Route {
    /// Shard of the partition.
    pub shard_id: u32,
    /// Node id of the leader.
    pub node_id: u64,
    /// Raft term in which it leads.
    pub term: u64,
    /// Connection to it.
    pub connection: Connection,
}

/// Routes of one cluster, learned from its nodes as they are needed.
#[derive(Debug)]
pub(crate) struct Routing {
    config: Config,
    pool: Pool,
    table: Mutex<Table>,
    /// Held while one caller refreshes, so that the others wait for its result.
    refreshing: tokio::sync::Mutex<()>,
}

impl Routing {
    /// # Errors
    /// `INVALID_ARGUMENT` if there is no address to begin with.
    pub(crate) fn new(config: Config) -> Result<Self> {
        if config.endpoints.is_empty() {
            return Err(Error::client(Code::InvalidArgument, "no address to connect to"));
        }
        let pool = Pool::new(config.clone());
        Ok(Self {
            config,
            pool,
            table: Mutex::default(),
            refreshing: tokio::sync::Mutex::default(),
        })
    }

    /// The way to the leader of a partition, from memory if it is known.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`, `PARTITION_NOT_FOUND`, `NO_LEADER`, or why no node could be asked.
    pub(crate) async fn leader(&self, topic: &str, partition: u32) -> Result<Route> {
        if let Ok(route) = self.table().route(topic, partition) {
            return Ok(route);
        }
        self.refresh(topic).await?;
        self.table().route(topic, partition)
    }

    /// Number of partitions of a topic.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`, or why no node could be asked.
    pub(crate) async fn partition_count(&self, topic: &str) -> Result<u32> {
        if let Some(count) = self.table().partition_count(topic) {
            return Ok(count);
        }
        self.refresh(topic).await?;
        self.table().partition_count(topic).ok_or_else(|| topic_not_found(topic))
    }

    /// Any node, another one with each `turn`: for calls that every node answers.
    pub(crate) fn any(&self, turn: usize) -> Result<Connection> {
        let addresses = self.addresses();
        self.pool.to(&addresses[turn % addresses.len()])
    }

    /// The node at this address.
    pub(crate) fn node(&self, address: &str) -> Result<Connection> {
        self.pool.to(address)
    }

    /// Learns from a failure of the leader that `route` leads to. True if the failure pointed to
    /// another node, which `leader` now gives; otherwise the leader is forgotten, and `leader`
    /// asks the cluster again.
    pub(crate) fn on_failure(&self, route: &Route, error: &Error) -> bool {
        let hint = error.leader.as_ref().filter(|hint| hint.node_id != route.node_id);
        let leader = hint.and_then(|hint| self.resolve(hint));
        let mut table = self.table();
        if error.origin != Origin::Service {
            table.forget_node(route.node_id);
            return false;
        }
        // A request for many partitions may have failed for another one than it was routed by.
        let place = error.place.as_ref();
        let shard_id = place
            .and_then(|(topic, partition)| table.shard_of(topic, *partition).ok())
            .unwrap_or(route.shard_id);
        if leader.is_some_and(|leader| table.learn(shard_id, leader)) {
            return true;
        }
        table.forget_leader(shard_id, route.node_id);
        false
    }

    /// Forgets a topic whose partitions have changed.
    pub(crate) fn forget_topic(&self, topic: &str) {
        self.table().topics.remove(topic);
    }

    /// Fetches fresh routes of a topic. Callers that come while another one does so wait for its
    /// result.
    async fn refresh(&self, topic: &str) -> Result<()> {
        let seen = self.table().refreshes;
        let _one_at_a_time = self.refreshing.lock().await;
        {
            let table = self.table();
            if table.refreshes != seen {
                // Nobody answered the one before: asking again at once would only add up the
                // timeouts of everyone who waits here.
                if let Some(failure) = &table.refresh_failure {
                    return Err(failure.clone());
                }
                if table.topics.contains_key(topic) {
                    return Ok(());
                }
            }
        }
        let result = self.ask_around(topic).await;
        let mut table = self.table();
        table.refreshes += 1;
        table.refresh_failure = result.as_ref().err().cloned();
        result
    }

    /// Asks one node after the other until one answers.
    async fn ask_around(&self, topic: &str) -> Result<()> {
        let mut failure = None;
        for address in self.addresses() {
            match self.ask(&address, topic).await {
                Ok((metadata, connection)) => {
                    self.learn_all(topic, metadata, &connection);
                    self.table().answered = Some(address);
                    return Ok(());
                }
                Err(error) => failure = Some(error),
            }
        }
        Err(failure.unwrap_or_else(|| Error::known(ErrorReason::NoLeader, "no node to ask")))
    }

    async fn ask(&self, address: &str, topic: &str) -> Result<(Metadata, Connection)> {
        let connection = self.pool.to(address)?;
        let mut cluster = connection.cluster();
        let call = cluster.get_metadata(GetMetadataRequest { topics: vec![topic.to_owned()] });
        let response = timeout(self.config.connect_timeout, call)
            .await
            .map_err(|_| Error::timed_out("metadata"))?
            .map_err(|status| Error::from_status(&status))?;
        // Asking changes nothing, whatever the transport says.
        let metadata = response
            .into_inner()
            .metadata
            .ok_or_else(|| Error::client(Code::Internal, "answer without metadata"))?;
        Ok((metadata, connection))
    }

    fn learn_all(&self, topic: &str, metadata: Metadata, from: &Connection) {
        let leaders: Vec<_> = metadata
            .shards
            .iter()
            .filter_map(|shard| {
                let hint = shard.leader.as_ref().filter(|hint| hint.node_id != 0)?;
                // A node that does not know its own address is reached as it just was.
                let leader = match hint.endpoint.as_str() {
                    "" => Leader::new(hint, from.clone()),
                    _ => self.resolve(hint)?,
                };
                Some((shard.shard_id, leader))
            })
            .collect();
        let mut table = self.table();
        table.learn_cluster(topic, metadata);
        for (shard_id, leader) in leaders {
            table.learn(shard_id, leader);
        }
    }

    fn resolve(&self, hint: &LeaderHint) -> Option<Leader> {
        if hint.node_id == 0 || hint.endpoint.is_empty() {
            return None;
        }
        // An address that nothing can dial is as good as none.
        let connection = self.pool.to(&hint.endpoint).ok()?;
        Some(Leader::new(hint, connection))
    }

    /// Addresses to ask: the one that answered last (a dead one costs a timeout), those that the
    /// cluster has told, and those to begin with.
    fn addresses(&self) -> Vec<String> {
        let table = self.table();
        let mut addresses = Vec::new();
        for address in table.answered.iter().chain(&table.nodes).chain(&self.config.endpoints) {
            if !addresses.contains(address) {
                addresses.push(address.clone());
            }
        }
        addresses
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Nothing that runs under the lock can panic half way through a change.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is known. Pure: no I/O, no waiting.
#[derive(Debug, Default)]
struct Table {
    cluster_id: String,
    /// Version of the metadata that the topics are from.
    version: u64,
    /// Addresses of the nodes.
    nodes: Vec<String>,
    /// Address that answered last.
    answered: Option<String>,
    /// Shard of each partition, by topic.
    topics: HashMap<String, Vec<u32>>,
    shards: HashMap<u32, Shard>,
    /// Counts the rounds of asking, so that a waiting caller sees that there was one.
    refreshes: u64,
    /// Why the last round found nobody.
    refresh_failure: Option<Error>,
}

#[derive(Debug, Default)]
struct Shard {
    /// Highest term heard of; hints of lower ones are stale.
    term: u64,
    leader: Option<Leader>,
}

#[derive(Debug, Clone)]
struct Leader {
    node_id: u64,
    term: u64,
    connection: Connection,
}

impl Leader {
    fn new(hint: &LeaderHint, connection: Connection) -> Self {
        Self { node_id: hint.node_id, term: hint.term, connection }
    }
}

impl Table {
    fn route(&self, topic: &str, partition: u32) -> Result<Route> {
        let shard_id = self.shard_of(topic, partition)?;
        let leader = self.shards.get(&shard_id).and_then(|shard| shard.leader.as_ref());
        let leader = leader.ok_or_else(|| {
            Error::known(ErrorReason::NoLeader, format!("no leader is known for shard {shard_id}"))
        })?;
        Ok(Route {
            shard_id,
            node_id: leader.node_id,
            term: leader.term,
            connection: leader.connection.clone(),
        })
    }

    fn shard_of(&self, topic: &str, partition: u32) -> Result<u32> {
        let shards = self.topics.get(topic).ok_or_else(|| topic_not_found(topic))?;
        shards.get(partition as usize).copied().ok_or_else(|| {
            let message = format!("topic {topic} has {} partitions", shards.len());
            Error::known(ErrorReason::PartitionNotFound, message)
        })
    }

    fn partition_count(&self, topic: &str) -> Option<u32> {
        self.topics.get(topic).map(|shards| shards.len().try_into().unwrap_or(u32::MAX))
    }

    /// Takes over nodes and the asked topic, unless they are older than what is known. A cluster
    /// with another id is another cluster: everything known before is void, terms included.
    fn learn_cluster(&mut self, asked: &str, metadata: Metadata) {
        if metadata.cluster_id != self.cluster_id {
            let refreshes = self.refreshes;
            *self = Self { cluster_id: metadata.cluster_id, refreshes, ..Self::default() };
        }
        if metadata.version < self.version {
            // Better an old answer than none; a leader that knows more refuses.
            for topic in metadata.topics {
                self.topics.entry(topic.topic).or_insert(topic.shard_ids);
            }
            return;
        }
        self.version = metadata.version;
        self.nodes = metadata
            .nodes
            .into_iter()
            .map(|node| node.endpoint)
            .filter(|endpoint| !endpoint.is_empty())
            .collect();
        self.topics.remove(asked);
        for topic in metadata.topics {
            self.topics.insert(topic.topic, topic.shard_ids);
        }
    }

    /// Takes over a leader, unless one of a later term is known. True if it was taken over.
    fn learn(&mut self, shard_id: u32, leader: Leader) -> bool {
        let shard = self.shards.entry(shard_id).or_default();
        if leader.term < shard.term {
            return false;
        }
        shard.term = leader.term;
        shard.leader = Some(leader);
        true
    }

    /// Forgets that a node leads a shard, unless another one is known to by now.
    fn forget_leader(&mut self, shard_id: u32, node_id: u64) {
        if let Some(shard) = self.shards.get_mut(&shard_id)
            && shard.leader.as_ref().is_some_and(|leader| leader.node_id == node_id)
        {
            shard.leader = None;
        }
    }

    /// Forgets every shard that a node leads: it does not answer.
    fn forget_node(&mut self, node_id: u64) {
        for shard in self.shards.values_mut() {
            if shard.leader.as_ref().is_some_and(|leader| leader.node_id == node_id) {
                shard.leader = None;
            }
        }
    }
}

fn topic_not_found(topic: &str) -> Error {
    Error::known(ErrorReason::TopicNotFound, format!("topic {topic:?} does not exist"))
}

#[cfg(test)]
mod tests {
    use helix_proto::error as wire;
    use helix_proto::log::v1::{ErrorDetail, Node, ShardRoute, TopicRoute};

    use super::*;

    fn hint(node_id: u64, term: u64) -> LeaderHint {
        LeaderHint { node_id, endpoint: format!("n{node_id}:9092"), term }
    }

    fn metadata(version: u64, leader: LeaderHint) -> Metadata {
        Metadata {
            cluster_id: "c".to_owned(),
            version,
            nodes: (1..=3)
                .map(|id| Node { node_id: id, endpoint: hint(id, 0).endpoint, ..Node::default() })
                .collect(),
            shards: vec![ShardRoute { shard_id: 1, leader: Some(leader), replicas: vec![1, 2, 3] }],
            topics: vec![TopicRoute { topic: "orders".to_owned(), shard_ids: vec![1, 1] }],
        }
    }

    fn routing() -> Routing {
        Routing::new(Config::new(["seed:9092"])).unwrap()
    }

    fn learn(routing: &Routing, metadata: Metadata) {
        let seed = routing.node("seed:9092").unwrap();
        routing.learn_all("orders", metadata, &seed);
    }

    fn route(routing: &Routing) -> Route {
        routing.table().route("orders", 0).unwrap()
    }

    fn not_leader(hint: LeaderHint) -> Error {
        let detail = ErrorDetail { leader: Some(hint), ..wire::detail(ErrorReason::NotLeader) };
        Error::from_status(&wire::to_status(&detail, "", None))
    }

    #[tokio::test]
    async fn a_partition_leads_to_its_shards_leader() {
        let routing = routing();
        learn(&routing, metadata(1, hint(1, 5)));
        let found = routing.leader("orders", 1).await.unwrap();
        assert_eq!((found.shard_id, found.node_id, found.term), (1, 1, 5));
        assert_eq!(found.connection.address(), "n1:9092");
        assert_eq!(routing.partition_count("orders").await.unwrap(), 2);
        let table = routing.table();
        assert!(table.route("orders", 2).unwrap_err().is(ErrorReason::PartitionNotFound));
        assert!(table.route("none", 0).unwrap_err().is(ErrorReason::TopicNotFound));
    }

    #[tokio::test]
    async fn a_leader_without_address_is_reached_as_it_was_asked() {
        let routing = routing();
        learn(&routing, metadata(1, LeaderHint { endpoint: String::new(), ..hint(1, 5) }));
        assert_eq!(route(&routing).connection.address(), "seed:9092");
    }

    #[tokio::test]
    async fn a_hint_of_a_later_term_redirects() {
        let routing = routing();
        learn(&routing, metadata(1, hint(1, 5)));
        assert!(routing.on_failure(&route(&routing), &not_leader(hint(2, 6))));
        assert_eq!((route(&routing).node_id, route(&routing).term), (2, 6));
    }

    #[tokio::test]
    async fn a_stale_hint_does_not() {
        let routing = routing();
        learn(&routing, metadata(1, hint(1, 5)));
        assert!(!routing.on_failure(&route(&routing), &not_leader(hint(2, 4))));
        let lost = routing.table().route("orders", 0).unwrap_err();
        assert!(lost.is(ErrorReason::NoLeader) && lost.retryable);
        // Metadata from a node that is behind does not bring the old leader back either.
        learn(&routing, metadata(1, hint(3, 4)));
        assert!(routing.table().route("orders", 0).is_err());
        learn(&routing, metadata(2, hint(3, 6)));
        assert_eq!(route(&routing).node_id, 3);
    }

    #[tokio::test]
    async fn a_hint_to_the_node_itself_is_none() {
        let routing = routing();
        learn(&routing, metadata(1, hint(1, 5)));
        assert!(!routing.on_failure(&route(&routing), &not_leader(hint(1, 5))));
        assert!(!routing.on_failure(
            &Route { node_id: 9, ..old_route(&routing) },
            &not_leader(LeaderHint { node_id: 0, ..LeaderHint::default() })
        ));
    }

    fn old_route(routing: &Routing) -> Route {
        let connection = routing.node("n9:9092").unwrap();
        Route { shard_id: 1, node_id: 9, term: 1, connection }
    }

    #[tokio::test]
    async fn a_failure_of_an_old_leader_leaves_the_new_one() {
        let routing = routing();
        learn(&routing, metadata(1, hint(1, 5)));
        let old = route(&routing);
        learn(&routing, metadata(2, hint(2, 6)));
        assert!(!routing.on_failure(&old, &Error::timed_out("append")));
        assert_eq!(route(&routing).node_id, 2);
    }

    #[tokio::test]
    async fn another_cluster_voids_what_was_known() {
        let routing = routing();
        learn(&routing, metadata(9, hint(1, 50)));
        let fresh = Metadata { cluster_id: "d".to_owned(), ..metadata(1, hint(2, 1)) };
        learn(&routing, fresh);
        assert_eq!((route(&routing).node_id, route(&routing).term), (2, 1));
    }

    #[tokio::test]
    async fn a_deleted_topic_is_forgotten() {
        let routing = routing();
        learn(&routing, metadata(1, hint(1, 5)));
        learn(&routing, Metadata { topics: Vec::new(), ..metadata(2, hint(1, 5)) });
        assert!(routing.table().route("orders", 0).unwrap_err().is(ErrorReason::TopicNotFound));
    }
}
