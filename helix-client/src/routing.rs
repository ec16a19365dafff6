//! The way to a partition's leader or replicas: the one place that knows, and the one that learns.
//! Asks the cluster's nodes when something is not known, one round for all who wait.

mod lookout;
mod table;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use helix_proto::log::v1::{ErrorReason, GetMetadataRequest, LeaderHint, Metadata};
use tokio::time::{Instant, sleep, timeout};
use tonic::Code;

use crate::config::Config;
use crate::connection::{Connection, Pool};
use crate::error::{Error, Origin, Result};
pub(crate) use lookout::{Lookout, Pace};
use table::{Leader, Table};

/// How old the last round may be for a caller to make do with what it brought, if that was not what
/// was asked for. While an election is on, this and nothing else bounds how often a client asks,
/// however many callers it has.
const ROUND_AGE_MAX: Duration = Duration::from_millis(50);

/// The same after a round that brought what was asked for: leaders that move one after the other
/// are asked for one by one.
const GOOD_ROUND_AGE_MAX: Duration = Duration::from_millis(5);

/// The way to a node that leads a partition or, for reads from any replica, has a copy of it.
#[derive(Debug, Clone)]
pub struct Route {
    /// Shard of the partition.
    pub shard_id: u32,
    /// Node id.
    pub node_id: u64,
    /// Raft term in which it leads; 0 if it was not chosen as the leader.
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
    /// Held while one caller asks around, so that the others wait for its result.
    asking: tokio::sync::Mutex<()>,
    /// See [`Routing::next_turn`].
    turn: AtomicUsize,
}

/// What a round of asking is for: it ends with the first answer after which this is known.
enum Wanted<'a> {
    /// The leader of a partition.
    Leader(&'a str, u32),
    /// The shard of a partition.
    Shard(&'a str, u32),
    /// A topic.
    Topic(&'a str),
    /// Anybody who answers.
    Anybody,
    /// Another leader of one of these shards than this one.
    Move { topic: &'a str, shard_ids: &'a [u32], from: &'a Route },
}

impl Wanted<'_> {
    fn topic(&self) -> &str {
        match self {
            Self::Leader(topic, _) | Self::Shard(topic, _) | Self::Topic(topic) => topic,
            Self::Move { topic, .. } => topic,
            // Names no topic: with none at all, the answer would have all of them.
            Self::Anybody => "",
        }
    }

    /// Whether the topic, or the partition of it, is known.
    fn has_place(&self, table: &Table) -> bool {
        match *self {
            Self::Leader(topic, partition) | Self::Shard(topic, partition) => {
                table.shard_of(topic, partition).is_ok()
            }
            Self::Topic(topic) => table.knows_topic(topic),
            Self::Anybody | Self::Move { .. } => true,
        }
    }

    fn is_known(&self, table: &Table) -> bool {
        match *self {
            Self::Leader(topic, partition) => table.route(topic, partition).is_ok(),
            Self::Shard(..) | Self::Topic(_) | Self::Anybody => self.has_place(table),
            Self::Move { shard_ids, from, .. } => table.has_moved(shard_ids, from),
        }
    }

    /// Whether it is worth while to ask this node. One that keeps silent is not asked whether it
    /// has been replaced.
    fn concerns(&self, asked: &str) -> bool {
        !matches!(*self, Self::Move { from, .. } if from.connection.address() == asked)
    }
}

impl Routing {
    /// # Errors
    /// `INVALID_ARGUMENT` if there is no address to begin with.
    pub(crate) fn new(config: Config) -> Result<Self> {
        if config.endpoints.is_empty() {
            return Err(Error::client(Code::InvalidArgument, "no address to connect to"));
        }
        Ok(Self {
            pool: Pool::new(config.clone()),
            config,
            table: Mutex::default(),
            asking: tokio::sync::Mutex::default(),
            turn: AtomicUsize::new(0),
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
        self.refresh(Wanted::Leader(topic, partition)).await?;
        self.table().route(topic, partition)
    }

    /// The ways to all nodes that have a copy of a partition, in no special order. None if the
    /// cluster does not tell: then the leader is the only one to ask.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`, `PARTITION_NOT_FOUND`, or why no node could be asked.
    pub(crate) async fn replicas(&self, topic: &str, partition: u32) -> Result<Vec<Route>> {
        let known = self.table().shard_of(topic, partition);
        if known.is_err() {
            self.refresh(Wanted::Shard(topic, partition)).await?;
        }
        let (shard_id, replicas) = {
            let table = self.table();
            let shard_id = table.shard_of(topic, partition)?;
            (shard_id, table.replicas(shard_id))
        };
        // An address that nothing can dial is as good as none.
        let route = |(node_id, address): (u64, String)| {
            let connection = self.pool.to(&address).ok()?;
            Some(Route { shard_id, node_id, term: 0, connection })
        };
        Ok(replicas.into_iter().filter_map(route).collect())
    }

    /// Number of partitions of a topic.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`, or why no node could be asked.
    pub(crate) async fn partition_count(&self, topic: &str) -> Result<u32> {
        if let Some(count) = self.table().partition_count(topic) {
            return Ok(count);
        }
        self.refresh(Wanted::Topic(topic)).await?;
        self.table().partition_count(topic).ok_or_else(|| topic_not_found(topic))
    }

    /// Any node, another one with each call, `turn` places on: for callers that ask once.
    pub(crate) fn any(&self, turn: usize) -> Result<Connection> {
        let addresses = self.addresses();
        let turn = turn.wrapping_add(self.next_turn());
        self.pool.to(&addresses[turn % addresses.len()])
    }

    /// A number that grows with each call, for callers that take turns.
    pub(crate) fn next_turn(&self) -> usize {
        self.turn.fetch_add(1, Ordering::Relaxed)
    }

    /// The node that most likely answers, of those that were not tried. Begins anew when all were.
    pub(crate) fn other_than(&self, tried: &mut Vec<String>) -> Result<Connection> {
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
        self.pool.to(address)
    }

    /// Finds out who answers, if nobody was asked before: a call that goes to any node should not
    /// begin with one that is dead.
    pub(crate) async fn meet(&self) {
        let is_new = self.table().rounds == 0;
        if is_new {
            // Ignored: the call itself will say it.
            let _ = self.refresh(Wanted::Anybody).await;
        }
    }

    /// Whether there is another address than this one.
    pub(crate) fn has_others(&self, address: &str) -> bool {
        self.addresses().iter().any(|other| other != address)
    }

    /// The node at this address.
    pub(crate) fn node(&self, address: &str) -> Result<Connection> {
        self.pool.to(address)
    }

    /// Notes that a call was answered, and by whom.
    pub(crate) fn on_answer(&self, node: &Connection) {
        self.table().on_answer(node.address());
    }

    /// Notes that a node failed to answer a call that any node answers.
    pub(crate) fn on_silence(&self, node: &Connection, error: &Error) {
        if error.origin != Origin::Service {
            self.table().on_silence(node.address());
        }
    }

    /// Learns from a failure of the node that `route` leads to. True if another leader is known by
    /// now, which `leader` gives; otherwise the leader is forgotten, and `leader` asks the cluster
    /// again.
    pub(crate) fn on_failure(&self, route: &Route, error: &Error) -> bool {
        let now = Instant::now();
        let hint = error.leader.as_ref().filter(|hint| hint.node_id != route.node_id);
        let leader = hint.and_then(|hint| self.resolve(hint));
        let mut table = self.table();
        let mut shard_id = route.shard_id;
        if error.origin == Origin::Service {
            table.on_answer(route.connection.address());
            // A request for many partitions may have failed for another one than it was routed by.
            if let Some((topic, partition)) = &error.place {
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
            table.change_adviser();
        }
        is_led
    }

    /// Forgets a topic whose partitions have changed.
    pub(crate) fn forget_topic(&self, topic: &str) {
        self.table().forget_topic(topic);
    }

    /// Asks for what is not known. Callers that come while another one asks, or just after, make do
    /// with what that brought.
    async fn refresh(&self, wanted: Wanted<'_>) -> Result<()> {
        let seen = self.table().rounds;
        let _one_at_a_time = self.asking.lock().await;
        {
            let table = self.table();
            let age_max = match table.round_was_good {
                true => GOOD_ROUND_AGE_MAX,
                false => ROUND_AGE_MAX,
            };
            if table.rounds != seen || is_recent(&table, age_max) {
                // Nobody answered the one before: asking again at once would only add up the
                // timeouts of everyone who waits here.
                if let Some(failure) = &table.round_failure {
                    return Err(failure.clone());
                }
                if wanted.has_place(&table) {
                    return Ok(());
                }
            }
        }
        self.ask_around(wanted).await
    }

    /// Asks whether shards have moved, unless somebody has asked within `age_max`.
    async fn look(&self, wanted: Wanted<'_>, age_max: Duration) {
        let _one_at_a_time = self.asking.lock().await;
        if !is_recent(&self.table(), age_max) {
            // Ignored: that nobody answers is no news of a move, and is noted.
            let _ = self.ask_around(wanted).await;
        }
    }

    /// One round: asks node after node until what is wanted is known. The next node is asked as
    /// soon as one has failed, was of no use, or keeps silent for `hedge_after`.
    async fn ask_around(&self, wanted: Wanted<'_>) -> Result<()> {
        let mut addresses = self.addresses();
        addresses.retain(|address| wanted.concerns(address));
        let mut round = Round::default();
        let result = self.ask_each(&wanted, addresses, &mut round).await;
        let mut table = self.table();
        table.rounds += 1;
        table.round_at = Some(Instant::now());
        table.round_was_good = result.is_ok() && wanted.is_known(&table);
        // Asking for a move leaves out the leader: that nobody else answers is not all there is.
        if !matches!(wanted, Wanted::Move { .. }) {
            table.round_failure = result.as_ref().err().cloned();
        }
        result
    }

    async fn ask_each(
        &self,
        wanted: &Wanted<'_>,
        addresses: Vec<String>,
        round: &mut Round,
    ) -> Result<()> {
        let mut left = addresses.into_iter();
        let mut asked = FuturesUnordered::new();
        let mut waiting: Vec<String> = Vec::new();
        loop {
            if let Some(address) = left.next() {
                waiting.push(address.clone());
                asked.push(self.ask(address, wanted.topic()));
            } else if asked.is_empty() {
                return self.conclude(wanted, round);
            }
            // With nobody left to ask, an answer that is there is not held back for long.
            let is_impatient = left.len() > 0 || round.has_answer;
            let (address, answer) = tokio::select! {
                Some(answer) = asked.next() => answer,
                () = sleep(self.config.hedge_after), if is_impatient => {
                    let mut table = self.table();
                    waiting.iter().for_each(|address| table.on_silence(address));
                    drop(table);
                    if left.len() == 0 {
                        return self.conclude(wanted, round);
                    }
                    continue;
                }
            };
            waiting.retain(|other| *other != address);
            if self.take(wanted, address, answer, round) {
                return Ok(());
            }
        }
    }

    /// Takes an answer in. True if what is wanted is known now.
    fn take(
        &self,
        wanted: &Wanted<'_>,
        address: String,
        answer: Result<(Metadata, Connection)>,
        round: &mut Round,
    ) -> bool {
        let (metadata, connection) = match answer {
            Ok(answer) => answer,
            Err(error) => {
                self.table().on_silence(&address);
                // One bad address must not hide that the others may come back.
                if round.failure.as_ref().is_none_or(|failure| !failure.retryable) {
                    round.failure = Some(error);
                }
                return false;
            }
        };
        self.table().on_answer(&address);
        if self.table().is_foreign(&metadata) {
            round.foreign.get_or_insert((metadata, connection));
            return false;
        }
        round.has_answer = true;
        self.learn_all(wanted.topic(), metadata, &connection);
        let mut table = self.table();
        let is_known = wanted.is_known(&table);
        if is_known {
            table.advised_by(&address);
        }
        is_known
    }

    /// Everybody was asked, and what is wanted is not known.
    fn conclude(&self, wanted: &Wanted<'_>, round: &mut Round) -> Result<()> {
        if round.has_answer {
            self.table().change_adviser();
            return Ok(());
        }
        // Only if nobody speaks for the cluster that is known: one wrong address among the right
        // ones must not lead away from it.
        match round.foreign.take() {
            Some((metadata, connection)) if !metadata.cluster_id.is_empty() => {
                self.table().start_over();
                self.learn_all(wanted.topic(), metadata, &connection);
                Ok(())
            }
            _ => Err(round.failure.take().unwrap_or_else(|| {
                Error::known(ErrorReason::NoLeader, "no node is part of a cluster")
            })),
        }
    }

    async fn ask(&self, address: String, topic: &str) -> (String, Result<(Metadata, Connection)>) {
        let answer = self.metadata(&address, topic).await;
        // Asking changes nothing, whatever the transport says.
        let answer = answer.map_err(|error| error.with_may_have_applied(false));
        (address, answer)
    }

    async fn metadata(&self, address: &str, topic: &str) -> Result<(Metadata, Connection)> {
        let connection = self.pool.to(address)?;
        let mut cluster = connection.cluster();
        let call = cluster.get_metadata(GetMetadataRequest { topics: vec![topic.to_owned()] });
        let response = timeout(self.config.connect_timeout, call)
            .await
            .map_err(|_| Error::timed_out("metadata"))?
            .map_err(|status| Error::from_status(&status))?;
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
        let now = Instant::now();
        let mut table = self.table();
        let is_current = table.learn_cluster(topic, metadata);
        for (shard_id, leader) in leaders {
            if is_current {
                table.learn(shard_id, leader, now);
            } else {
                table.learn_from_old(shard_id, leader, now);
            }
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

    fn addresses(&self) -> Vec<String> {
        self.table().addresses(&self.config.endpoints)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Nothing that runs under the lock can panic half way through a change.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a round of asking has brought so far.
#[derive(Debug, Default)]
struct Round {
    /// A node of the known cluster has answered.
    has_answer: bool,
    /// The first answer of another cluster.
    foreign: Option<(Metadata, Connection)>,
    /// Why the last node that failed did.
    failure: Option<Error>,
}

fn is_recent(table: &Table, age_max: Duration) -> bool {
    table.round_at.is_some_and(|at| at.elapsed() < age_max)
}

fn topic_not_found(topic: &str) -> Error {
    Error::known(ErrorReason::TopicNotFound, format!("topic {topic:?} does not exist"))
}
