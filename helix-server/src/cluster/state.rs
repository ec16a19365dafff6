//! State of the cluster: nodes, members, shards, topics, producer ids and access control. It is a
//! pure function of shard 0's log. Each command returns a [`ClusterReply`].

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use super::members::{Members, MembersUpdate};
use super::producers::{IssuedEpochs, NamedProducer};
use crate::limits::{
    NAMED_PRODUCERS_MAX, PARTITIONS_MAX, PARTITIONS_PER_TOPIC_MAX, SHARDS_PER_TOPIC_MAX,
    TOPIC_NAME_BYTES_MAX,
};
use crate::log::{
    AccessCommand, AccessState, ClusterCommand, ClusterReply, CreateTopic, Head, MemberCommand,
    PartitionSettings, ProducerOwner, Refusal, SettingsMask, TopicInfo, Verdict,
};
use crate::protocol;
pub use crate::records::RegisteredNode;

/// Slots of consumer groups. Permanent: a group's name selects its slot.
pub(super) const GROUP_SLOTS: usize = 256;

/// New partitions of a topic, in `shards` in turn; in the topic's shards if `shards` is empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ShardTurn {
    pub(super) shards: Vec<u64>,
    pub(super) count: u32,
}

/// Limits that apply enforces. They are equal on all replicas and stored in checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClusterLimits {
    pub partitions_per_topic_max: u32,
    /// Sum over all topics.
    pub partitions_max: u64,
    /// Named producers that are remembered. The least recently used one is evicted; if it returns,
    /// it gets a new id, which does not fence its earlier sessions. Also the limit of the runs of
    /// ids with one owner.
    pub named_producers_max: u32,
}

impl Default for ClusterLimits {
    fn default() -> Self {
        Self {
            partitions_per_topic_max: PARTITIONS_PER_TOPIC_MAX,
            partitions_max: PARTITIONS_MAX,
            named_producers_max: NAMED_PRODUCERS_MAX,
        }
    }
}

/// State of the cluster, as shard 0 replicates it.
///
/// Invariants: `topics` and `names` hold the same topics; `partitions` is the sum of their counts;
/// ids below the `next_` ones are never issued again; `names_by_use` and `epochs` hold exactly the
/// named producers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterState {
    pub(super) limits: ClusterLimits,
    pub(super) version: u64,
    /// Never decreases.
    pub(super) protocol: u32,
    pub(super) nodes: BTreeMap<u64, RegisteredNode>,
    pub(super) members: Members,
    /// Ids of the data shards.
    pub(super) shards: BTreeSet<u64>,
    /// Partitions in each data shard that has any. Follows from `topics`.
    pub(super) shard_partitions: BTreeMap<u64, u64>,
    pub(super) topics: BTreeMap<u64, Arc<TopicInfo>>,
    pub(super) names: BTreeMap<String, u64>,
    /// Partitions of all topics.
    pub(super) partitions: u64,
    pub(super) next_topic_id: u64,
    pub(super) next_partition_id: u64,
    pub(super) next_producer_id: u64,
    pub(super) named: BTreeMap<Arc<str>, NamedProducer>,
    /// Named producers by the index of their last use.
    pub(super) names_by_use: BTreeMap<u64, Arc<str>>,
    /// Shard of each slot of consumer groups; empty before the first group. Never changed.
    pub(super) group_slots: Vec<u64>,
    /// Epochs of each named producer by its id. Follows from `named`.
    pub(super) epochs: BTreeMap<u64, IssuedEpochs>,
    /// Owners of issued producer ids, by the first id of each run. A run extends to the first id of
    /// the next one. Empty while all owners are anonymous. The oldest runs are evicted.
    pub(super) id_owners: BTreeMap<u64, ProducerOwner>,
    /// Tokens and rules. Shared with calls, which keep the state that they were checked against.
    pub(super) access: Arc<AccessState>,
}

pub(super) type CommandResult = Result<ClusterReply, ClusterReply>;

impl ClusterState {
    pub fn new(limits: ClusterLimits) -> Self {
        Self {
            limits,
            version: 0,
            protocol: protocol::FIRST,
            nodes: BTreeMap::new(),
            members: Members::default(),
            shards: BTreeSet::new(),
            shard_partitions: BTreeMap::new(),
            topics: BTreeMap::new(),
            names: BTreeMap::new(),
            partitions: 0,
            next_topic_id: 1,
            next_partition_id: 1,
            next_producer_id: 1,
            named: BTreeMap::new(),
            names_by_use: BTreeMap::new(),
            group_slots: Vec::new(),
            epochs: BTreeMap::new(),
            id_owners: BTreeMap::new(),
            access: Arc::default(),
        }
    }

    /// Applies the entry at `index`. Indexes increase from call to call.
    pub fn apply(&mut self, index: u64, head: &Head) -> Verdict {
        match head {
            Head::Cluster(command) => {
                Verdict::Cluster(self.change(index, command).unwrap_or_else(|reply| reply))
            }
            // Shard 0 has no partitions.
            Head::Batch(batch) => {
                Verdict::Refused(Refusal::UnknownPartition { partition: batch.partition })
            }
            Head::Shard(_) => Verdict::Nothing,
        }
    }

    /// Returns the version. It grows with changes of nodes, members, shards, topics, protocol or
    /// access control.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns the protocol version that every member supports permanently.
    pub fn protocol(&self) -> u32 {
        self.protocol
    }

    /// Returns the tokens and rules.
    pub fn access(&self) -> &Arc<AccessState> {
        &self.access
    }

    pub fn limits(&self) -> ClusterLimits {
        self.limits
    }

    /// Iterates over the registered nodes, sorted by id.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = &RegisteredNode> {
        self.nodes.values()
    }

    pub fn node(&self, node_id: u64) -> Option<&RegisteredNode> {
        self.nodes.get(&node_id)
    }

    pub fn members(&self) -> &Members {
        &self.members
    }

    pub fn topic(&self, name: &str) -> Option<&Arc<TopicInfo>> {
        self.topics.get(self.names.get(name)?)
    }

    pub fn topic_by_id(&self, id: u64) -> Option<&Arc<TopicInfo>> {
        self.topics.get(&id)
    }

    /// Iterates over the topics whose names begin with `prefix`, sorted by name.
    pub fn topics(&self, prefix: &str) -> impl Iterator<Item = &Arc<TopicInfo>> {
        self.topics_from(prefix, "")
    }

    /// Like [`ClusterState::topics`], from the name `first` on: the next page of a listing.
    pub fn topics_from(&self, prefix: &str, first: &str) -> impl Iterator<Item = &Arc<TopicInfo>> {
        let from = (Bound::Included(prefix.max(first)), Bound::Unbounded);
        let names = self.names.range::<str, _>(from);
        let names = names.take_while(move |(name, _)| name.starts_with(prefix));
        names.filter_map(|(_, id)| self.topics.get(id))
    }

    /// Iterates over all topics, sorted by id.
    pub fn all_topics(&self) -> impl ExactSizeIterator<Item = &Arc<TopicInfo>> {
        self.topics.values()
    }

    /// Returns whether the topic was deleted; `false` if this state does not know it yet.
    pub fn is_deleted(&self, topic_id: u64) -> bool {
        topic_id > 0 && topic_id < self.next_topic_id && !self.topics.contains_key(&topic_id)
    }

    /// Returns whether a topic was ever created.
    pub fn has_had_topics(&self) -> bool {
        self.next_topic_id > 1
    }

    /// Returns the number of partitions of all topics.
    pub fn partition_count(&self) -> u64 {
        self.partitions
    }

    /// Returns the shard of a consumer group; `None` before slots have shards.
    pub fn group_shard(&self, group: &str) -> Option<u64> {
        let slot = crc32fast::hash(group.as_bytes()) as usize % GROUP_SLOTS;
        self.group_slots.get(slot).copied()
    }

    fn check_new_topic(&self, new: &CreateTopic) -> Result<(), ClusterReply> {
        check_topic_name(&new.name)?;
        if let Some(topic) = self.topic(&new.name) {
            return Err(match self.difference_of_replicas(topic, new).or(difference(topic, new)) {
                None => ClusterReply::AlreadyExistsEqual(topic.clone()),
                Some(difference) => {
                    ClusterReply::AlreadyExistsDifferent { name: new.name.clone(), difference }
                }
            });
        }
        self.check_growth(0, new.partition_count)?;
        if new.replication_factor == 0 {
            return Err(invalid("replication_factor", "must be at least 1"));
        }
        check_settings(&new.settings)?;
        check_shards(&new.shards)?;
        if !new.shards.iter().all(|shard| self.shards.contains(shard)) {
            return Err(invalid("shards", "all shards of a topic must be registered"));
        }
        let mut factors = new.shards.iter().map(|shard| self.replication_factor_of(*shard));
        let first = factors.next();
        if factors.any(|factor| Some(factor) != first) {
            let what = "the shards of a topic must have equally many replicas";
            return Err(invalid("shards", what));
        }
        Ok(())
    }

    /// Describes how a topic's replication factor differs from the factor of a repeated creation.
    /// Requested shards that follow the cluster's number match every topic.
    fn difference_of_replicas(&self, topic: &TopicInfo, new: &CreateTopic) -> Option<String> {
        let of = |shards: &[u64]| shards.first().map_or(0, |it| self.replication_factor_of(*it));
        let (is, asked) = (of(&topic.shards), of(&new.shards));
        let differ = asked != 0 && is != asked;
        let is = if is == 0 { topic.replication_factor } else { is };
        differ.then(|| format!("replication_factor is {is}, not {asked}"))
    }

    /// Returns the reply that creating this topic would get, without creating it.
    pub fn preview(&self, new: &CreateTopic) -> ClusterReply {
        // Topics are shared by `Arc`, so a copy is cheap enough for an operator's request.
        self.clone().create_topic(new).unwrap_or_else(|reply| reply)
    }

    /// Returns the data shards.
    pub fn shards(&self) -> &BTreeSet<u64> {
        &self.shards
    }

    /// Checks that a topic may grow from `from` to `to` partitions.
    fn check_growth(&self, from: u32, to: u32) -> Result<(), ClusterReply> {
        let most = self.limits.partitions_per_topic_max;
        if to == 0 || to > most {
            return Err(invalid("partition_count", format!("{to} is out of range 1..={most}")));
        }
        if to < from {
            let what =
                format!("{to} is less than the current {from}; partitions cannot be removed");
            return Err(invalid("partition_count", what));
        }
        let (sum, most) = (self.partitions + u64::from(to - from), self.limits.partitions_max);
        if sum > most {
            let what = format!("the cluster would have {sum} partitions; its limit is {most}");
            return Err(invalid("partition_count", what));
        }
        Ok(())
    }

    fn change(&mut self, index: u64, command: &ClusterCommand) -> CommandResult {
        match command {
            ClusterCommand::RegisterNode { node_id, endpoint, version, peer_addr } => self
                .register_node(RegisteredNode {
                    node_id: *node_id,
                    endpoint: endpoint.clone(),
                    version: version.clone(),
                    peer_addr: peer_addr.clone(),
                }),
            ClusterCommand::RegisterShards { shards } => self.register_shards(shards),
            ClusterCommand::CreateTopic(new) => self.create_topic(new),
            ClusterCommand::UpdateTopic { name, topic_id, settings, fields } => {
                self.update_topic(self.find(name, *topic_id)?, settings, *fields)
            }
            ClusterCommand::AddPartitions { name, topic_id, partition_count } => {
                self.add_partitions(self.find(name, *topic_id)?, *partition_count)
            }
            ClusterCommand::DeleteTopic { name, topic_id } => {
                self.delete_topic(&*self.find(name, *topic_id)?)
            }
            ClusterCommand::LeaseProducerIds { count, owner } => {
                self.lease_producer_ids(*count, *owner)
            }
            ClusterCommand::InitProducer { name, owner } => self.init_producer(index, name, *owner),
            ClusterCommand::Members(command) => self.change_members(command),
            ClusterCommand::RaiseProtocol { version } => {
                self.version += u64::from(*version > self.protocol);
                self.protocol = self.protocol.max(*version);
                Ok(ClusterReply::Done)
            }
            ClusterCommand::AssignGroupSlots => self.assign_group_slots(),
            ClusterCommand::Access(command) => self.change_access(command),
        }
    }

    fn register_node(&mut self, node: RegisteredNode) -> CommandResult {
        let node_id = node.node_id;
        if node_id == 0 {
            return Err(invalid("node_id", "must be at least 1"));
        }
        if let Some(refusal) = self.members.refusal(node_id, 0) {
            return Err(invalid("node_id", refusal));
        }
        if self.nodes.get(&node_id) != Some(&node) {
            self.nodes.insert(node_id, node);
            self.version += 1;
        }
        Ok(ClusterReply::Done)
    }

    fn register_shards(&mut self, shards: &[u64]) -> CommandResult {
        check_shards(shards)?;
        let known = self.shards.len();
        self.shards.extend(shards);
        self.version += u64::from(self.shards.len() != known);
        Ok(ClusterReply::Done)
    }

    fn change_members(&mut self, command: &MemberCommand) -> CommandResult {
        let before = self.members.clone();
        let split = match command {
            MemberCommand::PlanSplit(plan) => {
                self.plan_split(plan)?;
                None
            }
            MemberCommand::SplitProgress(progress) => self.members.split_progress(*progress),
            _ => return self.change_only_members(command),
        };
        if let Some(ended) = split {
            self.move_partitions(ended);
        }
        self.version += u64::from(self.members != before);
        Ok(ClusterReply::Done)
    }

    fn change_only_members(&mut self, command: &MemberCommand) -> CommandResult {
        let MembersUpdate { reply, is_changed, removed } =
            self.members.apply(self.version + 1, command)?;
        for node_id in removed {
            self.nodes.remove(&node_id);
        }
        if is_changed {
            // Comes first, because a shard that takes partitions is never given up.
            self.give_up_lost_shards();
            self.open_new_shards();
        }
        self.version += u64::from(is_changed);
        Ok(reply)
    }

    fn change_access(&mut self, command: &AccessCommand) -> CommandResult {
        // Calls may hold the current state. Changes are rare, and it is small.
        let mut access = AccessState::clone(&self.access);
        if access.apply(command)? {
            self.access = Arc::new(access);
            self.version += 1;
        }
        Ok(ClusterReply::Done)
    }

    fn create_topic(&mut self, new: &CreateTopic) -> CommandResult {
        self.check_new_topic(new)?;
        let id = self.next_topic_id;
        let mut topic = TopicInfo {
            id,
            name: new.name.clone(),
            partition_count: 0,
            replication_factor: new.replication_factor,
            settings: PartitionSettings { version: self.version + 1, ..new.settings },
            created_at_us: new.requested_at_us,
            shards: self.in_turn(id, &new.shards),
            extents: Vec::new(),
        };
        self.grow(&mut topic, new.partition_count)?;
        self.next_topic_id += 1;
        self.names.insert(new.name.clone(), topic.id);
        Ok(self.put(topic))
    }

    fn update_topic(
        &mut self,
        topic: Arc<TopicInfo>,
        settings: &PartitionSettings,
        fields: SettingsMask,
    ) -> CommandResult {
        if fields.0 == 0 || !SettingsMask::ALL.contains(fields) {
            return Err(invalid(
                "update_mask",
                "name at least one field; all named fields must exist",
            ));
        }
        let settings = topic.settings.with(settings, fields);
        check_settings(&settings)?;
        if settings == topic.settings {
            return Ok(ClusterReply::Topic(topic));
        }
        let settings = PartitionSettings { version: self.version + 1, ..settings };
        Ok(self.put(TopicInfo { settings, ..TopicInfo::clone(&topic) }))
    }

    fn add_partitions(&mut self, topic: Arc<TopicInfo>, partition_count: u32) -> CommandResult {
        self.check_growth(topic.partition_count, partition_count)?;
        if partition_count == topic.partition_count {
            return Ok(ClusterReply::Topic(topic));
        }
        let mut topic = TopicInfo::clone(&topic);
        let more = partition_count - topic.partition_count;
        self.grow(&mut topic, more)?;
        Ok(self.put(topic))
    }

    fn delete_topic(&mut self, topic: &TopicInfo) -> CommandResult {
        self.names.remove(&topic.name);
        self.topics.remove(&topic.id);
        self.partitions -= u64::from(topic.partition_count);
        self.uncount_partitions(topic);
        self.version += 1;
        Ok(ClusterReply::Done)
    }

    fn assign_group_slots(&mut self) -> CommandResult {
        if self.shards.is_empty() {
            return Err(invalid("shards", "no shard is registered"));
        }
        if self.group_slots.is_empty() {
            self.group_slots = self.shards.iter().copied().cycle().take(GROUP_SLOTS).collect();
            self.version += 1;
        }
        Ok(ClusterReply::Done)
    }

    /// Returns the topic with this name, if it has the expected id; 0 accepts any.
    fn find(&self, name: &str, expected_id: u64) -> Result<Arc<TopicInfo>, ClusterReply> {
        match self.topic(name) {
            Some(topic) if expected_id == 0 || topic.id == expected_id => Ok(topic.clone()),
            Some(topic) => {
                Err(ClusterReply::TopicRecreated { name: name.to_owned(), topic_id: topic.id })
            }
            None => Err(ClusterReply::TopicNotFound { name: name.to_owned() }),
        }
    }

    /// Gives a topic `more` partitions with new ids.
    fn grow(&mut self, topic: &mut TopicInfo, more: u32) -> Result<(), ClusterReply> {
        let mut first_id = self.next_partition_id;
        self.next_partition_id = checked_ids(first_id, more)?;
        self.partitions += u64::from(more);
        self.uncount_partitions(topic);
        for ShardTurn { shards, count } in self.turns(topic, more) {
            topic.extend(first_id, count, shards);
            first_id += u64::from(count);
        }
        for (shard, count) in topic.shard_counts() {
            *self.shard_partitions.entry(shard).or_default() += count;
        }
        Ok(())
    }

    /// Stores a new or changed topic.
    fn put(&mut self, topic: TopicInfo) -> ClusterReply {
        let topic = Arc::new(topic);
        self.topics.insert(topic.id, topic.clone());
        self.version += 1;
        ClusterReply::Topic(topic)
    }
}

pub(super) fn invalid(field: &'static str, what: impl Into<String>) -> ClusterReply {
    ClusterReply::Invalid { field, what: what.into() }
}

/// Returns the id after `count` ids from `first` on.
pub(super) fn checked_ids(first: u64, count: u32) -> Result<u64, ClusterReply> {
    first.checked_add(u64::from(count)).ok_or_else(|| invalid("count", "no ids are left"))
}

/// Returns whether this is a valid topic name.
pub fn is_topic_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=TOPIC_NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(is_allowed)
        && name != "."
        && name != ".."
}

fn check_topic_name(name: &str) -> Result<(), ClusterReply> {
    if is_topic_name(name) {
        return Ok(());
    }
    let what = format!(
        "a topic name has 1..={TOPIC_NAME_BYTES_MAX} ASCII letters, digits, '.', '_' and '-', \
         and is \
         neither \".\" nor \"..\""
    );
    Err(invalid("name", what))
}

fn check_settings(settings: &PartitionSettings) -> Result<(), ClusterReply> {
    if settings.max_batch_bytes == 0 {
        return Err(invalid("config.max_batch_bytes", "must be at least 1"));
    }
    if settings.max_record_bytes == 0 {
        return Err(invalid("config.max_record_bytes", "must be at least 1"));
    }
    // The values of the public enum, without UNSPECIFIED.
    let is_durability = |number| (1..=4).contains(&number);
    if !is_durability(settings.default_durability) {
        return Err(invalid("config.default_durability", "unknown durability"));
    }
    if !is_durability(settings.min_durability) {
        return Err(invalid("config.min_durability", "unknown durability"));
    }
    // 0 stands for ANY.
    if settings.allowed_compression == 1 || !(0..=4).contains(&settings.allowed_compression) {
        return Err(invalid("config.allowed_compression", "unknown compression"));
    }
    // 0 stands for DELETE.
    if settings.cleanup == 1 || !(0..=3).contains(&settings.cleanup) {
        return Err(invalid("config.cleanup", "unknown policy"));
    }
    // 0 stands for HELIX.
    if settings.batch_format == 1 || !(0..=3).contains(&settings.batch_format) {
        return Err(invalid("config.batch_format", "unknown format"));
    }
    Ok(())
}

pub(super) fn check_shards(shards: &[u64]) -> Result<(), ClusterReply> {
    let mut sorted = shards.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    if sorted.len() == shards.len() && is_shard_list(shards) {
        return Ok(());
    }
    Err(invalid("shards", "name each shard once, at least one, and not shard 0"))
}

/// Returns whether these can be the shards of an extent, which may name a shard more than once.
pub(super) fn is_shard_list(shards: &[u64]) -> bool {
    // Shard 0 holds this state and no partitions.
    (1..=SHARDS_PER_TOPIC_MAX).contains(&shards.len()) && !shards.contains(&0)
}

/// Describes how an existing topic differs from the requested one; `None` if it does not.
fn difference(topic: &TopicInfo, new: &CreateTopic) -> Option<String> {
    let (is, asked) = (&topic.settings, &new.settings);
    let mut parts = Vec::new();
    let mut compare = |field: &str, is: u64, asked: u64| {
        if is != asked {
            parts.push(format!("{field} is {is}, not {asked}"));
        }
    };
    // `None` and zero both mean unlimited.
    let limit = |limit: Option<u64>| limit.unwrap_or(0);
    let durability = |number: i32| number.unsigned_abs().into();
    compare("partition_count", topic.partition_count.into(), new.partition_count.into());
    compare("retention_us", limit(is.retention_us), limit(asked.retention_us));
    compare("retention_bytes", limit(is.retention_bytes), limit(asked.retention_bytes));
    compare("max_batch_bytes", is.max_batch_bytes.into(), asked.max_batch_bytes.into());
    compare("max_record_bytes", is.max_record_bytes.into(), asked.max_record_bytes.into());
    let (is_default, asked_default) = (is.default_durability, asked.default_durability);
    compare("default_durability", durability(is_default), durability(asked_default));
    compare("min_durability", durability(is.min_durability), durability(asked.min_durability));
    let number = |number: i32| number.unsigned_abs().into();
    let (is_allowed, asked_allowed) = (is.allowed_compression, asked.allowed_compression);
    compare("allowed_compression", number(is_allowed), number(asked_allowed));
    let validates = |settings: &PartitionSettings| u64::from(!settings.takes_any_records);
    compare("validate_records", validates(is), validates(asked));
    compare("cleanup", number(is.cleanup), number(asked.cleanup));
    let (is_kept, asked_kept) = (is.tombstones_kept_us(), asked.tombstones_kept_us());
    compare("tombstone_retention_us", is_kept, asked_kept);
    compare("batch_format", number(is.batch_format), number(asked.batch_format));
    (!parts.is_empty()).then(|| parts.join("; "))
}

#[cfg(test)]
mod tests;
