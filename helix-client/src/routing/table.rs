//! The known nodes, topics and shard leaders of a cluster. Performs no I/O and never waits.
//!
//! Newer information replaces older: topics and nodes by metadata version, leaders by term.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use helix_proto::log::v1::{BatchFormat, ErrorReason, LeaderHint, Metadata, TopicRoute};
use tokio::time::Instant;

use super::{Route, topic_not_found};
use crate::connection::Connection;
use crate::error::{Error, Result};

/// Time without a usable leader after which a hint of a lower term is accepted.
///
/// Terms only grow within a cluster, so such a hint is normally stale. But a cluster re-created
/// under the same id starts with low terms, which must not be ignored permanently.
const STALE_TERM_TIMEOUT: Duration = Duration::from_secs(3);

/// Known routes of one cluster.
#[derive(Debug, Default)]
pub(super) struct RouteTable {
    cluster_id: String,
    /// Version of the metadata that the nodes and topics are from.
    version: u64,
    /// Address of each node.
    nodes: BTreeMap<u64, String>,
    /// Rack of each node that states one.
    racks: BTreeMap<u64, String>,
    /// Address with the last useful response, which is queried first.
    preferred: Option<String>,
    /// Addresses that did not respond to their last request.
    silent: HashSet<String>,
    /// Rotation of the addresses while none is preferred.
    turn: usize,
    topics: HashMap<String, KnownTopic>,
    shards: HashMap<u32, Shard>,
    /// Number of query rounds, by which a caller that waited detects a new one.
    pub(super) rounds: u64,
    /// End of the last round.
    pub(super) round_at: Option<Instant>,
    /// The last round provided its result.
    pub(super) round_was_good: bool,
    /// Failure of the last round if no node responded; rounds of leader probes do not change it.
    pub(super) round_failure: Option<Error>,
}

#[derive(Debug)]
struct KnownTopic {
    /// 0 if the cluster does not report it.
    id: u64,
    /// Shard of each partition.
    shard_ids: Vec<u32>,
    /// Batch versions that the topic accepts.
    batch_format: BatchFormat,
}

impl KnownTopic {
    /// Returns the name of a topic, and its known state.
    fn of(route: TopicRoute) -> (String, Self) {
        let batch_format = match route.batch_format() {
            BatchFormat::Unspecified => BatchFormat::Helix,
            known => known,
        };
        let TopicRoute { topic, shard_ids, topic_id: id, .. } = route;
        (topic, Self { id, shard_ids, batch_format })
    }
}

#[derive(Debug, Default)]
struct Shard {
    /// Highest known term; hints of lower terms are stale.
    term: u64,
    leader: Option<KnownLeader>,
    /// Time at which the leader of `term` was first lost, even if it was reported again since.
    lost_at: Option<Instant>,
    /// Node ids.
    replicas: Vec<u64>,
    /// Why the node that sent the last current metadata does not serve the shard.
    fault: Option<ShardFault>,
}

/// Why the node that sent the metadata does not serve a shard.
#[derive(Debug)]
struct ShardFault {
    what: String,
    /// No other node can serve it either, and waiting does not help.
    is_damaged: bool,
}

/// The leader of a shard, and the connection to it.
#[derive(Debug, Clone)]
pub(super) struct KnownLeader {
    node_id: u64,
    term: u64,
    connection: Connection,
}

impl KnownLeader {
    pub(super) fn new(hint: &LeaderHint, connection: Connection) -> Self {
        Self { node_id: hint.node_id, term: hint.term, connection }
    }
}

impl RouteTable {
    pub(super) fn route(&self, topic: &str, partition: u32) -> Result<Route> {
        let shard_id = self.shard_of(topic, partition)?;
        let shard = self.shards.get(&shard_id);
        let leader = shard.and_then(|shard| shard.leader.as_ref());
        let leader = leader.ok_or_else(|| no_leader(shard_id, shard))?;
        Ok(Route {
            shard_id,
            node_id: leader.node_id,
            term: leader.term,
            connection: leader.connection.clone(),
            topic_id: self.topic_id(topic),
        })
    }

    /// Returns the id of a topic; 0 if it is not known.
    pub(super) fn topic_id(&self, topic: &str) -> u64 {
        self.topics.get(topic).map_or(0, |known| known.id)
    }

    /// Returns the batch versions that a topic accepts; `None` if the topic is not known.
    pub(super) fn batch_format(&self, topic: &str) -> Option<BatchFormat> {
        self.topics.get(topic).map(|known| known.batch_format)
    }

    pub(super) fn shard_of(&self, topic: &str, partition: u32) -> Result<u32> {
        let shards = &self.topics.get(topic).ok_or_else(|| topic_not_found(topic))?.shard_ids;
        shards.get(partition as usize).copied().ok_or_else(|| {
            let message = format!("topic {topic} has {} partitions", shards.len());
            Error::known(ErrorReason::PartitionNotFound, message)
        })
    }

    pub(super) fn partition_count(&self, topic: &str) -> Option<u32> {
        let known = self.topics.get(topic)?;
        Some(known.shard_ids.len().try_into().unwrap_or(u32::MAX))
    }

    /// Returns the ids and addresses of the nodes with a replica of a shard.
    ///
    /// Omits nodes whose address is unknown.
    pub(super) fn replicas(&self, shard_id: u32) -> Vec<(u64, String)> {
        let replicas = self.shards.get(&shard_id).map_or(&[][..], |shard| &shard.replicas);
        let address = |node_id: &u64| Some((*node_id, self.nodes.get(node_id)?.clone()));
        replicas.iter().filter_map(address).collect()
    }

    /// Returns true if a node is in this rack.
    pub(super) fn is_in_rack(&self, node_id: u64, rack: &str) -> bool {
        self.racks.get(&node_id).is_some_and(|known| known == rack)
    }

    /// Returns true if one of these shards has another leader than the node of `route`.
    ///
    /// The same node at another address, with a later term, also counts.
    pub(super) fn has_moved(&self, shard_ids: &[u32], route: &Route) -> bool {
        let mut leaders = shard_ids.iter().filter_map(|id| self.shards.get(id)?.leader.as_ref());
        leaders.any(|leader| {
            let is_elsewhere = leader.connection.address() != route.connection.address();
            leader.node_id != route.node_id || (is_elsewhere && leader.term > route.term)
        })
    }

    /// Returns the addresses in query order.
    ///
    /// The preferred one comes first, then known nodes and bootstrap addresses, silent ones last.
    pub(super) fn addresses(&self, seeds: &[String]) -> Vec<String> {
        let mut known: Vec<&String> = Vec::new();
        for address in self.nodes.values().chain(seeds) {
            if !known.contains(&address) {
                known.push(address);
            }
        }
        let turn = self.turn % known.len().max(1);
        known.rotate_left(turn);
        let preferred = self.preferred.as_ref();
        if let Some(preferred) = preferred {
            known.retain(|&address| address != preferred);
        }
        let (silent, responsive): (Vec<&String>, Vec<_>) =
            known.into_iter().partition(|&address| self.silent.contains(address));
        preferred.into_iter().chain(responsive).chain(silent).cloned().collect()
    }

    pub(super) fn is_silent(&self, address: &str) -> bool {
        self.silent.contains(address)
    }

    /// Records that an address did not respond, so that others are queried first.
    pub(super) fn on_silence(&mut self, address: &str) {
        self.silent.insert(address.to_owned());
        self.preferred.take_if(|preferred| preferred == address);
    }

    /// Records that an address has responded.
    pub(super) fn on_response(&mut self, address: &str) {
        self.silent.remove(address);
    }

    /// Records a useful response, so that this address is queried first.
    pub(super) fn prefer(&mut self, address: &str) {
        self.preferred = Some(address.to_owned());
    }

    /// Records a useless response, so that another node is queried first.
    ///
    /// The preferred node may be partitioned from the others and stay outdated for long.
    pub(super) fn change_preferred(&mut self) {
        self.preferred = None;
        self.turn = self.turn.wrapping_add(1);
    }

    /// Returns true if metadata is from another cluster, or from a node that has not joined one.
    pub(super) fn is_foreign(&self, metadata: &Metadata) -> bool {
        !self.cluster_id.is_empty() && metadata.cluster_id != self.cluster_id
    }

    /// Forgets everything, terms included: another cluster responds at these addresses.
    pub(super) fn reset(&mut self) {
        let Self { rounds, .. } = *self;
        *self = Self { rounds, ..Self::default() };
    }

    /// Stores nodes, replicas and the requested topic, unless the metadata is outdated.
    ///
    /// Returns false if it is outdated.
    pub(super) fn learn_cluster(&mut self, topic: &str, metadata: Metadata) -> bool {
        self.cluster_id = metadata.cluster_id;
        let is_older = metadata.version < self.version;
        for route in metadata.shards {
            let shard = self.shards.entry(route.shard_id).or_default();
            if !is_older || shard.replicas.is_empty() {
                shard.replicas = route.replicas;
            }
            if !is_older {
                let fault = ShardFault { what: route.fault, is_damaged: route.is_damaged };
                shard.fault = (!fault.what.is_empty()).then_some(fault);
            }
        }
        if is_older {
            // An outdated entry is better than none; the leader rejects a wrong one.
            for route in metadata.topics {
                let (topic, known) = KnownTopic::of(route);
                self.topics.entry(topic).or_insert(known);
            }
            return false;
        }
        self.version = metadata.version;
        let racks = metadata.nodes.iter().filter(|node| !node.rack.is_empty());
        self.racks = racks.map(|node| (node.node_id, node.rack.clone())).collect();
        self.nodes = metadata
            .nodes
            .into_iter()
            .filter(|node| !node.endpoint.is_empty())
            .map(|node| (node.node_id, node.endpoint))
            .collect();
        self.topics.remove(topic);
        self.topics.extend(metadata.topics.into_iter().map(KnownTopic::of));
        true
    }

    /// Stores a node that another node names, for clients that know no other address of it.
    pub(super) fn learn_node(&mut self, hint: &LeaderHint) {
        if hint.node_id != 0 && !hint.endpoint.is_empty() {
            self.nodes.entry(hint.node_id).or_insert_with(|| hint.endpoint.clone());
        }
    }

    /// Stores a leader, unless one of a later term is known. Returns true if it was stored.
    pub(super) fn learn(&mut self, shard_id: u32, leader: KnownLeader, now: Instant) -> bool {
        let shard = self.shards.entry(shard_id).or_default();
        let is_term_stale = shard.leader.is_none()
            && shard.lost_at.is_some_and(|lost_at| now >= lost_at + STALE_TERM_TIMEOUT);
        if leader.term < shard.term && !is_term_stale {
            return false;
        }
        if leader.term != shard.term {
            shard.lost_at = None;
        }
        shard.term = leader.term;
        shard.leader = Some(leader);
        true
    }

    /// Like [`RouteTable::learn`], from outdated metadata.
    ///
    /// An equal term must not restore an address that the leader has left.
    pub(super) fn learn_outdated(&mut self, shard_id: u32, leader: KnownLeader, now: Instant) {
        let known = self.shards.get(&shard_id).filter(|shard| shard.leader.is_some());
        if known.is_none_or(|shard| leader.term > shard.term) {
            self.learn(shard_id, leader, now);
        }
    }

    /// Forgets that a node leads a shard, unless another leader is known.
    pub(super) fn forget_leader(&mut self, shard_id: u32, node_id: u64, now: Instant) {
        if let Some(shard) = self.shards.get_mut(&shard_id) {
            shard.forget(node_id, now);
        }
    }

    /// Forgets all leaderships of a node that does not respond.
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
            // A leader that was found again and is lost much later restarts the timeout.
            self.lost_at.take_if(|lost_at| now >= *lost_at + 3 * STALE_TERM_TIMEOUT);
            self.lost_at.get_or_insert(now);
        }
    }
}

/// Returns the error of a shard without a known leader.
fn no_leader(shard_id: u32, shard: Option<&Shard>) -> Error {
    match shard.and_then(|shard| shard.fault.as_ref()) {
        Some(ShardFault { what, is_damaged: true }) => Error::known(
            ErrorReason::CorruptLog,
            format!("shard {shard_id} is quarantined, its stored data is damaged: {what}"),
        ),
        Some(ShardFault { what, is_damaged: false }) => Error::known(
            ErrorReason::NoLeader,
            format!("no leader is known for shard {shard_id}; a node does not serve it: {what}"),
        ),
        None => {
            Error::known(ErrorReason::NoLeader, format!("no leader is known for shard {shard_id}"))
        }
    }
}
