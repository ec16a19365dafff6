//! What is known about a cluster: its nodes, its topics, and who leads which shard. Pure: no I/O
//! and no waiting. Newer knowledge beats older: topics and nodes by version, leaders by term.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use helix_proto::log::v1::{ErrorReason, LeaderHint, Metadata};
use tokio::time::Instant;

use super::{Route, topic_not_found};
use crate::connection::Connection;
use crate::error::{Error, Result};

/// How long a shard is without a usable leader before a hint of a lower term is believed. Terms
/// only grow within a cluster, so that such a hint is old; but a cluster that was made anew under
/// the same id begins with low ones, and must not be ignored for ever.
const TERM_TRUSTED: Duration = Duration::from_secs(3);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Table {
    cluster_id: String,
    /// Version of the metadata that the nodes and topics are from.
    version: u64,
    /// Address of each node.
    nodes: BTreeMap<u64, String>,
    /// Address whose answer was of use last.
    adviser: Option<String>,
    /// Addresses that did not answer when they were asked last.
    silent: HashSet<String>,
    /// Which of the addresses comes first where there is no adviser.
    turn: usize,
    /// Shard of each partition, by topic.
    topics: HashMap<String, Vec<u32>>,
    shards: HashMap<u32, Shard>,
    /// Rounds of asking, so that whoever waited for one sees that there was one.
    pub(super) rounds: u64,
    /// When the last round ended.
    pub(super) round_at: Option<Instant>,
    /// Whether the last round brought what it was for.
    pub(super) round_was_good: bool,
    /// Why the last round found nobody.
    pub(super) round_failure: Option<Error>,
}

#[derive(Debug, Default)]
struct Shard {
    /// Highest term heard of; hints of lower ones are old.
    term: u64,
    leader: Option<Leader>,
    /// Since when leaders of `term` are forgotten, also if they were heard of again since.
    lost_at: Option<Instant>,
    /// Node ids.
    replicas: Vec<u64>,
}

/// A node that leads a shard, and the way to it.
#[derive(Debug, Clone)]
pub(super) struct Leader {
    node_id: u64,
    term: u64,
    connection: Connection,
}

impl Leader {
    pub(super) fn new(hint: &LeaderHint, connection: Connection) -> Self {
        Self { node_id: hint.node_id, term: hint.term, connection }
    }
}

impl Table {
    pub(super) fn route(&self, topic: &str, partition: u32) -> Result<Route> {
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

    pub(super) fn shard_of(&self, topic: &str, partition: u32) -> Result<u32> {
        let shards = self.topics.get(topic).ok_or_else(|| topic_not_found(topic))?;
        shards.get(partition as usize).copied().ok_or_else(|| {
            let message = format!("topic {topic} has {} partitions", shards.len());
            Error::known(ErrorReason::PartitionNotFound, message)
        })
    }

    pub(super) fn partition_count(&self, topic: &str) -> Option<u32> {
        self.topics.get(topic).map(|shards| shards.len().try_into().unwrap_or(u32::MAX))
    }

    /// Nodes with a replica of a shard, and their addresses as far as they are known.
    pub(super) fn replicas(&self, shard_id: u32) -> Vec<(u64, String)> {
        let replicas = self.shards.get(&shard_id).map_or(&[][..], |shard| &shard.replicas);
        let address = |node_id: &u64| Some((*node_id, self.nodes.get(node_id)?.clone()));
        replicas.iter().filter_map(address).collect()
    }

    /// Whether one of these shards is known to be led by another node than `route` leads to, or
    /// again by the same one at another address.
    pub(super) fn has_moved(&self, shard_ids: &[u32], route: &Route) -> bool {
        let mut leaders = shard_ids.iter().filter_map(|id| self.shards.get(id)?.leader.as_ref());
        leaders.any(|leader| {
            let is_elsewhere = leader.connection.address() != route.connection.address();
            leader.node_id != route.node_id || (is_elsewhere && leader.term > route.term)
        })
    }

    /// Addresses to ask, in the order in which that promises most: the adviser, the nodes that the
    /// cluster has told and the addresses to begin with, and last the silent ones.
    pub(super) fn addresses(&self, seeds: &[String]) -> Vec<String> {
        let mut known: Vec<&String> = Vec::new();
        for address in self.nodes.values().chain(seeds) {
            if !known.contains(&address) {
                known.push(address);
            }
        }
        let turn = self.turn % known.len().max(1);
        known.rotate_left(turn);
        let adviser = self.adviser.as_ref();
        if let Some(adviser) = adviser {
            known.retain(|&address| address != adviser);
        }
        let (silent, lively): (Vec<&String>, Vec<_>) =
            known.into_iter().partition(|&address| self.silent.contains(address));
        adviser.into_iter().chain(lively).chain(silent).cloned().collect()
    }

    pub(super) fn is_silent(&self, address: &str) -> bool {
        self.silent.contains(address)
    }

    /// An address did not answer: others are asked first from now on.
    pub(super) fn on_silence(&mut self, address: &str) {
        self.silent.insert(address.to_owned());
        self.adviser.take_if(|adviser| adviser == address);
    }

    /// An address has answered.
    pub(super) fn on_answer(&mut self, address: &str) {
        self.silent.remove(address);
    }

    /// An answer was of use: that node is asked first.
    pub(super) fn advised_by(&mut self, address: &str) {
        self.adviser = Some(address.to_owned());
    }

    /// What the adviser said was of no use: another node is asked first. The adviser may be cut off
    /// from the others and know no better for long.
    pub(super) fn change_adviser(&mut self) {
        self.adviser = None;
        self.turn = self.turn.wrapping_add(1);
    }

    /// Whether metadata is from another cluster than what is known. A node that has not joined its
    /// cluster yet has no cluster id.
    pub(super) fn is_foreign(&self, metadata: &Metadata) -> bool {
        !self.cluster_id.is_empty() && metadata.cluster_id != self.cluster_id
    }

    /// Another cluster answers at these addresses: everything known is void, terms included.
    pub(super) fn start_over(&mut self) {
        let Self { rounds, .. } = *self;
        *self = Self { rounds, ..Self::default() };
    }

    /// Takes over what metadata says of nodes, of the asked topic and of replicas, unless it is
    /// older than what is known. True if it is not older.
    pub(super) fn learn_cluster(&mut self, asked: &str, metadata: Metadata) -> bool {
        self.cluster_id = metadata.cluster_id;
        let is_older = metadata.version < self.version;
        for route in metadata.shards {
            let shard = self.shards.entry(route.shard_id).or_default();
            if !is_older || shard.replicas.is_empty() {
                shard.replicas = route.replicas;
            }
        }
        if is_older {
            // Better an old answer than none; a leader that knows more refuses.
            for topic in metadata.topics {
                self.topics.entry(topic.topic).or_insert(topic.shard_ids);
            }
            return false;
        }
        self.version = metadata.version;
        self.nodes = metadata
            .nodes
            .into_iter()
            .filter(|node| !node.endpoint.is_empty())
            .map(|node| (node.node_id, node.endpoint))
            .collect();
        self.topics.remove(asked);
        for topic in metadata.topics {
            self.topics.insert(topic.topic, topic.shard_ids);
        }
        true
    }

    /// Takes over a leader, unless one of a later term is known. True if it was taken over.
    pub(super) fn learn(&mut self, shard_id: u32, leader: Leader, now: Instant) -> bool {
        let shard = self.shards.entry(shard_id).or_default();
        let is_distrusted = shard.leader.is_none()
            && shard.lost_at.is_some_and(|lost_at| now >= lost_at + TERM_TRUSTED);
        if leader.term < shard.term && !is_distrusted {
            return false;
        }
        if leader.term != shard.term {
            shard.lost_at = None;
        }
        shard.term = leader.term;
        shard.leader = Some(leader);
        true
    }

    /// As [`Table::learn`], from metadata that is older than what is known: of an equal term it
    /// must not bring back an address that the leader has left.
    pub(super) fn learn_from_old(&mut self, shard_id: u32, leader: Leader, now: Instant) {
        let known = self.shards.get(&shard_id).filter(|shard| shard.leader.is_some());
        if known.is_none_or(|shard| leader.term > shard.term) {
            self.learn(shard_id, leader, now);
        }
    }

    /// Forgets that a node leads a shard, unless another one is known to by now.
    pub(super) fn forget_leader(&mut self, shard_id: u32, node_id: u64, now: Instant) {
        if let Some(shard) = self.shards.get_mut(&shard_id) {
            shard.forget(node_id, now);
        }
    }

    /// Forgets every shard that a node leads: it does not answer.
    pub(super) fn forget_node(&mut self, node_id: u64, now: Instant) {
        for shard in self.shards.values_mut() {
            shard.forget(node_id, now);
        }
    }

    pub(super) fn forget_topic(&mut self, topic: &str) {
        self.topics.remove(topic);
    }

    pub(super) fn knows_topic(&self, topic: &str) -> bool {
        self.topics.contains_key(topic)
    }
}

impl Shard {
    fn forget(&mut self, node_id: u64, now: Instant) {
        if self.leader.take_if(|leader| leader.node_id == node_id).is_some() {
            // A leader that was found again and is lost much later is lost anew.
            self.lost_at.take_if(|lost_at| now >= *lost_at + 3 * TERM_TRUSTED);
            self.lost_at.get_or_insert(now);
        }
    }
}
