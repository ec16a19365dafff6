//! Routes to partition leaders and replicas.
//!
//! Learns routes from metadata, leader hints and failures. Concurrent lookups share one metadata
//! query round.

mod leader_probe;
mod table;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use helix_proto::log::v1::{
    BatchFormat, ErrorReason, GetMetadataRequest, GetMetadataResponse, LeaderHint, Metadata,
};
use tokio::time::{Instant, sleep, timeout};
use tonic::Code;

use crate::config::Config;
use crate::connection::{Connection, ConnectionCache, parse_address};
use crate::error::{Error, Origin, Result};
pub(crate) use leader_probe::{LeaderProbe, ProbePace};
use table::{KnownLeader, RouteTable};

/// Age up to which a query round without the wanted result is reused.
///
/// During an election this bounds the query rate of a client, regardless of its number of calls.
const FAILED_ROUND_AGE_MAX: Duration = Duration::from_millis(50);

/// Age up to which a successful query round is reused.
///
/// Short, so that leaderships that move one after the other are all found.
const GOOD_ROUND_AGE_MAX: Duration = Duration::from_millis(5);

/// A connection to a partition's leader or, for reads from any replica, to a replica.
#[derive(Debug, Clone)]
pub struct Route {
    /// Shard of the partition.
    pub shard_id: u32,
    /// Node id.
    pub node_id: u64,
    /// Raft term of the leader; 0 for a replica that was not chosen as the leader.
    pub term: u64,
    /// Connection to the node.
    pub connection: Connection,
    /// Id of the topic, as of the last metadata; 0 if the cluster does not report it.
    pub topic_id: u64,
}

/// Routes of one cluster, learned from its nodes on demand.
#[derive(Debug)]
pub(crate) struct Routing {
    config: Config,
    connections: ConnectionCache,
    table: Mutex<RouteTable>,
    /// Held during a query round, so that other callers wait for its result.
    querying: tokio::sync::Mutex<()>,
    /// See [`Routing::next_turn`].
    turn: AtomicUsize,
}

/// Goal of a query round. The round stops at the first response that provides it.
enum RouteQuery<'a> {
    /// The leader of a partition.
    Leader(&'a str, u32),
    /// The shard of a partition.
    Shard(&'a str, u32),
    /// A topic.
    Topic(&'a str),
    /// Any response.
    AnyNode,
    /// A new leader of one of these shards.
    LeaderChange { topic: &'a str, shard_ids: &'a [u32], from: &'a Route },
}

impl RouteQuery<'_> {
    fn topic(&self) -> &str {
        match self {
            Self::Leader(topic, _) | Self::Shard(topic, _) | Self::Topic(topic) => topic,
            Self::LeaderChange { topic, .. } => topic,
            // An empty topic name matches no topic; an empty list would match all of them.
            Self::AnyNode => "",
        }
    }

    /// Returns true if the topic, or its partition, is known.
    fn knows_topic(&self, table: &RouteTable) -> bool {
        match *self {
            Self::Leader(topic, partition) | Self::Shard(topic, partition) => {
                table.shard_of(topic, partition).is_ok()
            }
            Self::Topic(topic) => table.knows_topic(topic),
            Self::AnyNode | Self::LeaderChange { .. } => true,
        }
    }

    fn is_known(&self, table: &RouteTable) -> bool {
        match *self {
            Self::Leader(topic, partition) => table.route(topic, partition).is_ok(),
            Self::Shard(..) | Self::Topic(_) | Self::AnyNode => self.knows_topic(table),
            Self::LeaderChange { shard_ids, from, .. } => table.has_moved(shard_ids, from),
        }
    }

    /// Returns true if this node can provide the result. The silent leader itself is not asked
    /// whether it has been replaced.
    fn concerns(&self, address: &str) -> bool {
        !matches!(*self, Self::LeaderChange { from, .. } if from.connection.address() == address)
    }
}

impl Routing {
    /// Creates the routes of a client, initially unknown.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if `config` has no endpoint or a malformed one.
    pub(crate) fn new(mut config: Config) -> Result<Self> {
        if config.endpoints.is_empty() {
            return Err(Error::client(
                Code::InvalidArgument,
                "no endpoint is configured; set at least one address",
            ));
        }
        for endpoint in &mut config.endpoints {
            *endpoint = parse_address(endpoint)?;
        }
        Ok(Self {
            connections: ConnectionCache::new(config.clone())?,
            config,
            table: Mutex::default(),
            querying: tokio::sync::Mutex::default(),
            turn: AtomicUsize::new(0),
        })
    }

    /// Returns the route to a partition's leader, cached if it is known.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`, `PARTITION_NOT_FOUND`, `NO_LEADER`, or the failure of the query round.
    pub(crate) async fn leader(&self, topic: &str, partition: u32) -> Result<Route> {
        if let Ok(route) = self.table().route(topic, partition) {
            return Ok(route);
        }
        self.refresh(RouteQuery::Leader(topic, partition)).await?;
        self.table().route(topic, partition)
    }

    /// Returns routes to all replicas of a partition, in no particular order.
    ///
    /// Empty if the cluster does not report them: then only the leader can be read.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`, `PARTITION_NOT_FOUND`, or the failure of the query round.
    pub(crate) async fn replicas(&self, topic: &str, partition: u32) -> Result<Vec<Route>> {
        let known = self.table().shard_of(topic, partition);
        if known.is_err() {
            self.refresh(RouteQuery::Shard(topic, partition)).await?;
        }
        let (shard_id, topic_id, replicas) = {
            let table = self.table();
            let shard_id = table.shard_of(topic, partition)?;
            (shard_id, table.topic_id(topic), table.replicas(shard_id))
        };
        // Skips nodes with a malformed address.
        let route = |(node_id, address): (u64, String)| {
            let connection = self.connections.get(&address).ok()?;
            Some(Route { shard_id, node_id, term: 0, connection, topic_id })
        };
        Ok(replicas.into_iter().filter_map(route).collect())
    }

    /// Returns true if a node is in the client's rack.
    pub(crate) fn is_near(&self, node_id: u64) -> bool {
        let rack = self.config.rack.as_deref();
        rack.is_some_and(|rack| self.table().is_in_rack(node_id, rack))
    }

    /// Returns the number of partitions of a topic.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`, or the failure of the query round.
    pub(crate) async fn partition_count(&self, topic: &str) -> Result<u32> {
        if let Some(count) = self.table().partition_count(topic) {
            return Ok(count);
        }
        self.refresh(RouteQuery::Topic(topic)).await?;
        self.table().partition_count(topic).ok_or_else(|| topic_not_found(topic))
    }

    /// Returns the versions of batches that a topic takes, if the topic is known.
    pub(crate) fn known_batch_format(&self, topic: &str) -> Option<BatchFormat> {
        self.table().batch_format(topic)
    }

    /// Returns the id and the number of partitions of a topic, if they are known.
    pub(crate) fn known_topic(&self, topic: &str) -> Option<(u64, u32)> {
        let table = self.table();
        Some((table.topic_id(topic), table.partition_count(topic)?))
    }

    /// Returns a node, rotating over all nodes with each call; `turn` is added to the rotation.
    pub(crate) fn any(&self, turn: usize) -> Result<Connection> {
        let addresses = self.addresses();
        let turn = turn.wrapping_add(self.next_turn());
        self.connections.get(&addresses[turn % addresses.len()])
    }

    /// Returns a number that grows with each call, to rotate over nodes.
    pub(crate) fn next_turn(&self) -> usize {
        self.turn.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the node that most likely responds among those not in `tried`, and adds it there.
    ///
    /// Starts over when all nodes have been tried.
    pub(crate) fn next_untried(&self, tried: &mut Vec<String>) -> Result<Connection> {
        let addresses = self.addresses();
        let next = addresses.iter().find(|address| !tried.contains(address));
        let address = match next {
            Some(address) => address,
            None => {
                tried.clear();
                &addresses[0]
            }
        };
        tried.push(address.clone());
        self.connections.get(address)
    }

    /// Runs a first query round if there was none, so that a call does not start at a dead node.
    pub(crate) async fn ensure_contact(&self) {
        let is_new = self.table().rounds == 0;
        if is_new {
            // Ignored: the call itself reports the failure.
            let _ = self.refresh(RouteQuery::AnyNode).await;
        }
    }

    /// Returns true if there is another address than this one.
    pub(crate) fn has_others(&self, address: &str) -> bool {
        self.addresses().iter().any(|other| other != address)
    }

    /// Learns the node that a removed node names in its error.
    pub(crate) fn learn_other_node(&self, error: &Error) {
        if self.config.leave_removed_nodes
            && let Some(hint) = &error.leader
        {
            self.table().learn_node(hint);
        }
    }

    /// Returns true if the client knows only one address.
    pub(crate) fn has_one_address(&self) -> bool {
        self.addresses().len() == 1
    }

    /// Returns the connection to this address.
    pub(crate) fn node(&self, address: &str) -> Result<Connection> {
        self.connections.get(address)
    }

    /// Records that a node has responded.
    pub(crate) fn on_response(&self, node: &Connection) {
        self.table().on_response(node.address());
    }

    /// Records that a node failed to respond to a call that any node can serve.
    pub(crate) fn on_silence(&self, node: &Connection, error: &Error) {
        if error.origin != Origin::Service {
            self.table().on_silence(node.address());
            self.connections.forget_socket(node.address());
        }
    }

    /// Learns from a failed call over `route`. Returns true if another leader is known.
    ///
    /// Otherwise forgets the leader, so that [`Routing::leader`] queries the cluster again.
    pub(crate) fn on_failure(&self, route: &Route, error: &Error) -> bool {
        let now = Instant::now();
        let hint = error.leader.as_ref().filter(|hint| hint.node_id != route.node_id);
        let leader = hint.and_then(|hint| self.resolve(hint));
        if error.origin != Origin::Service {
            // Other nodes name this node's TCP address, which may still respond.
            self.connections.forget_socket(route.connection.address());
        }
        let mut table = self.table();
        let mut shard_id = route.shard_id;
        if error.origin == Origin::Service {
            table.on_response(route.connection.address());
            if let Some(recreated) = &error.recreated {
                // The leader is right, but the partition may be in another shard by now.
                table.forget_topic(&recreated.topic);
                return false;
            }
            // A request for several partitions may have failed for one in another shard.
            if let Some((topic, partition)) = &error.topic_partition {
                shard_id = table.shard_of(topic, *partition).unwrap_or(shard_id);
            }
            if leader.is_some_and(|leader| table.learn(shard_id, leader, now)) {
                return true;
            }
            table.forget_leader(shard_id, route.node_id, now);
        } else {
            table.on_silence(route.connection.address());
            table.forget_node(route.node_id, now);
        }
        let is_led = table.has_moved(&[shard_id], route);
        if !is_led {
            table.change_preferred();
        }
        is_led
    }

    /// Forgets a topic whose partitions have changed.
    pub(crate) fn forget_topic(&self, topic: &str) {
        self.table().forget_topic(topic);
    }

    /// Queries the cluster for `query`. Reuses a round that has run since the call or just before.
    async fn refresh(&self, query: RouteQuery<'_>) -> Result<()> {
        let rounds_before = self.table().rounds;
        let _one_at_a_time = self.querying.lock().await;
        {
            let table = self.table();
            let age_max = match table.round_was_good {
                true => GOOD_ROUND_AGE_MAX,
                false => FAILED_ROUND_AGE_MAX,
            };
            if table.rounds != rounds_before || is_recent(&table, age_max) {
                // If no node responded, another round would only add its timeouts to the wait of
                // all callers.
                if let Some(failure) = &table.round_failure {
                    return Err(failure.clone());
                }
                if query.knows_topic(&table) {
                    return Ok(());
                }
            }
        }
        self.run_round(query).await
    }

    /// Queries for a new leader, unless a round has finished within `age_max`.
    async fn probe(&self, query: RouteQuery<'_>, age_max: Duration) {
        let _one_at_a_time = self.querying.lock().await;
        if !is_recent(&self.table(), age_max) {
            // Ignored: a failed round brings no new leader, and the table records the failure.
            let _ = self.run_round(query).await;
        }
    }

    /// Runs a query round: asks node after node until one provides the result.
    ///
    /// Asks the next node as soon as one fails, lacks the result, or is silent for `hedge_after`.
    async fn run_round(&self, query: RouteQuery<'_>) -> Result<()> {
        let mut addresses = self.addresses();
        addresses.retain(|address| query.concerns(address));
        let mut round = QueryRound::default();
        let result = self.query_each(&query, addresses, &mut round).await;
        let mut table = self.table();
        table.rounds += 1;
        table.round_at = Some(Instant::now());
        table.round_was_good = result.is_ok() && query.is_known(&table);
        // A query for a new leader skips the current one, which may still respond.
        if !matches!(query, RouteQuery::LeaderChange { .. }) {
            table.round_failure = result.as_ref().err().cloned();
        }
        result
    }

    async fn query_each(
        &self,
        query: &RouteQuery<'_>,
        addresses: Vec<String>,
        round: &mut QueryRound,
    ) -> Result<()> {
        let mut remaining = addresses.into_iter();
        let mut responses = FuturesUnordered::new();
        let mut waiting: Vec<String> = Vec::new();
        loop {
            if let Some(address) = remaining.next() {
                waiting.push(address.clone());
                responses.push(self.query_node(address, query.topic()));
            } else if responses.is_empty() {
                return self.conclude(query, round);
            }
            // After the last node, a response without the result waits for the others only briefly.
            let is_hedged = remaining.len() > 0 || round.has_response;
            let (address, response) = tokio::select! {
                Some(response) = responses.next() => response,
                () = sleep(self.config.hedge_after), if is_hedged => {
                    let mut table = self.table();
                    waiting.iter().for_each(|address| table.on_silence(address));
                    drop(table);
                    if remaining.len() == 0 {
                        return self.conclude(query, round);
                    }
                    continue;
                }
            };
            waiting.retain(|other| *other != address);
            if self.on_metadata(query, address, response, round) {
                return Ok(());
            }
        }
    }

    /// Processes a response. Returns true if it provides the result.
    fn on_metadata(
        &self,
        query: &RouteQuery<'_>,
        address: String,
        response: Result<(Metadata, Connection)>,
        round: &mut QueryRound,
    ) -> bool {
        let (metadata, connection) = match response {
            Ok(response) => response,
            Err(error) => {
                self.table().on_silence(&address);
                self.learn_other_node(&error);
                if error.origin != Origin::Service {
                    self.connections.forget_socket(&address);
                }
                // A final error, such as a malformed address, must not replace a retryable one.
                if round.failure.as_ref().is_none_or(|failure| !failure.retryable) {
                    round.failure = Some(error);
                }
                return false;
            }
        };
        self.table().on_response(&address);
        if self.table().is_foreign(&metadata) {
            round.foreign.get_or_insert((metadata, connection));
            return false;
        }
        round.has_response = true;
        self.learn_all(query.topic(), metadata, &connection);
        let mut table = self.table();
        let is_known = query.is_known(&table);
        if is_known {
            table.prefer(&address);
        }
        is_known
    }

    /// Concludes a round in which no node provided the result.
    fn conclude(&self, query: &RouteQuery<'_>, round: &mut QueryRound) -> Result<()> {
        if round.has_response {
            self.table().change_preferred();
            return Ok(());
        }
        // Switches to another cluster only if no node of the known one responded: one wrong address
        // among right ones must not switch.
        match round.foreign.take() {
            Some((metadata, connection)) if !metadata.cluster_id.is_empty() => {
                self.table().reset();
                self.learn_all(query.topic(), metadata, &connection);
                Ok(())
            }
            _ => Err(round.failure.take().unwrap_or_else(|| {
                Error::known(ErrorReason::NoLeader, "no node has joined a cluster yet")
            })),
        }
    }

    async fn query_node(
        &self,
        address: String,
        topic: &str,
    ) -> (String, Result<(Metadata, Connection)>) {
        let response = self.metadata(&address, topic).await;
        // A metadata request applies nothing, even if the transport fails.
        let response = response.map_err(|error| error.with_may_have_applied(false));
        (address, response)
    }

    async fn metadata(&self, address: &str, topic: &str) -> Result<(Metadata, Connection)> {
        let connection = self.connections.get(address)?;
        let mut cluster = connection.cluster();
        let call = cluster.get_metadata(GetMetadataRequest { topics: vec![topic.to_owned()] });
        let response = timeout(self.config.connect_timeout, call)
            .await
            .map_err(|_| Error::timed_out("metadata"))?
            .map_err(|status| Error::from_status(&status))?;
        let response = response.into_inner();
        self.on_reported(&connection, &response);
        let mut metadata = response
            .metadata
            .ok_or_else(|| Error::client(Code::Internal, "the response has no metadata"))?;
        self.use_sockets(&mut metadata);
        Ok((metadata, connection))
    }

    /// Learns which node is behind a Unix domain socket.
    pub(crate) fn on_reported(&self, connection: &Connection, response: &GetMetadataResponse) {
        let GetMetadataResponse { metadata: Some(metadata), node_id } = response else { return };
        let node = metadata.nodes.iter().find(|node| node.node_id == *node_id);
        let node = node.filter(|node| connection.is_unix() && !node.endpoint.is_empty());
        if let Some(node) = node {
            self.connections.prefer(connection, &node.endpoint);
        }
    }

    /// Replaces the addresses of nodes that are reached over a Unix domain socket, so that each
    /// node has one address here.
    fn use_sockets(&self, metadata: &mut Metadata) {
        for node in &mut metadata.nodes {
            if let Some(socket) = self.connections.preferred(&node.endpoint) {
                node.endpoint = socket;
            }
        }
    }

    fn learn_all(&self, topic: &str, metadata: Metadata, from: &Connection) {
        let leaders: Vec<_> = metadata
            .shards
            .iter()
            .filter_map(|shard| {
                let hint = shard.leader.as_ref().filter(|hint| hint.node_id != 0)?;
                // A node that does not know its own address is used under the queried one.
                let leader = match hint.endpoint.as_str() {
                    "" => KnownLeader::new(hint, from.clone()),
                    _ => self.resolve(hint)?,
                };
                Some((shard.shard_id, leader))
            })
            .collect();
        let now = Instant::now();
        let mut table = self.table();
        let is_current = table.learn_cluster(topic, metadata);
        for (shard_id, leader) in leaders {
            if is_current {
                table.learn(shard_id, leader, now);
            } else {
                table.learn_outdated(shard_id, leader, now);
            }
        }
    }

    fn resolve(&self, hint: &LeaderHint) -> Option<KnownLeader> {
        if hint.node_id == 0 || hint.endpoint.is_empty() {
            return None;
        }
        // Ignores a malformed address.
        let connection = self.connections.get(&hint.endpoint).ok()?;
        Some(KnownLeader::new(hint, connection))
    }

    fn addresses(&self) -> Vec<String> {
        self.table().addresses(&self.config.endpoints)
    }

    fn table(&self) -> MutexGuard<'_, RouteTable> {
        // No code under the lock can panic in the middle of a change.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Responses of a query round so far.
#[derive(Debug, Default)]
struct QueryRound {
    /// A node of the known cluster has responded.
    has_response: bool,
    /// The first response of another cluster.
    foreign: Option<(Metadata, Connection)>,
    /// The first retryable failure of a node, or the last failure if none is retryable.
    failure: Option<Error>,
}

fn is_recent(table: &RouteTable, age_max: Duration) -> bool {
    table.round_at.is_some_and(|at| at.elapsed() < age_max)
}

fn topic_not_found(topic: &str) -> Error {
    Error::known(ErrorReason::TopicNotFound, format!("topic {topic:?} does not exist"))
}
