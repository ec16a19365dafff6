//! Encoding of the cluster's state in checkpoints and snapshots of shard 0.
//! Equal states give equal bytes. Unknown fields are errors.

use std::sync::Arc;

use bytes::Bytes;
use prost::Message;

use super::producers::{IssuedEpochs, NamedProducer};
use super::state::{ClusterLimits, ClusterState, GROUP_SLOTS, check_shards, is_shard_list};
use crate::log::{CheckpointError, ProducerOwner, TopicInfo, has_no_unknown_fields};
use crate::protocol;
use crate::records::{
    ClusterStateRecord as StateRecord, MembersRecord, NamedProducerRecord as NamedRecord,
    TopicRecord,
};

/// Format 3 added the slots of consumer groups, format 4 access control, format 5 owners of
/// producer ids, format 6 placement, format 7 shards that are added, format 8 splits. A state
/// without them is written in the format before.
/// Format 1, without members and peer addresses, is still read.
const FORMAT_WITHOUT_SLOTS: u32 = 2;
const FORMAT_WITHOUT_ACCESS: u32 = 3;
const FORMAT_WITHOUT_OWNERS: u32 = 4;
const FORMAT_WITHOUT_PLACEMENT: u32 = 5;
const FORMAT_WITHOUT_NEW_SHARDS: u32 = 6;
const FORMAT_WITHOUT_SPLITS: u32 = 7;
const FORMAT: u32 = 8;
const FORMATS: std::ops::RangeInclusive<u32> = 1..=FORMAT;

impl From<&TopicInfo> for TopicRecord {
    fn from(topic: &TopicInfo) -> Self {
        Self {
            id: topic.id,
            name: topic.name.clone(),
            replication_factor: topic.replication_factor,
            settings: Some(topic.settings),
            created_at_us: topic.created_at_us,
            shards: topic.shards.clone(),
            extents: topic.extents.clone(),
        }
    }
}

impl TopicRecord {
    pub(super) fn into_topic(self) -> Result<TopicInfo, CheckpointError> {
        let id = self.id;
        let broken = |what: &str| CheckpointError::new(format!("topic {id}: {what}"));
        let settings = self.settings.ok_or_else(|| broken("settings are missing"))?;
        if self.shards.is_empty() || self.extents.is_empty() {
            return Err(broken("it has no shards or no partitions"));
        }
        let mut lists =
            self.extents.iter().map(|extent| &extent.shards).filter(|it| !it.is_empty());
        if check_shards(&self.shards).is_err() || !lists.all(|shards| is_shard_list(shards)) {
            return Err(broken("its list of shards is invalid"));
        }
        let mut topic = TopicInfo {
            id,
            name: self.name,
            partition_count: 0,
            replication_factor: self.replication_factor,
            settings,
            created_at_us: self.created_at_us,
            shards: self.shards,
            extents: Vec::new(),
        };
        for extent in &self.extents {
            let fits = extent.first_number == topic.partition_count
                && topic.partition_count.checked_add(extent.count).is_some()
                && extent.first_id.checked_add(u64::from(extent.count)).is_some();
            if !fits {
                return Err(broken("a range of partitions is out of bounds"));
            }
            topic.extend(extent.first_id, extent.count, extent.shards.clone());
        }
        if topic.extents != self.extents {
            return Err(broken("its ids are inconsistent"));
        }
        Ok(topic)
    }
}

impl ClusterState {
    pub fn encode(&self) -> Bytes {
        let topics = self.topics.values().map(|topic| TopicRecord::from(&**topic));
        let named = self.named.iter().map(|(name, producer)| NamedRecord {
            name: name.to_string(),
            producer_id: producer.producer_id,
            epoch: producer.epochs.newest,
            last_used: producer.last_used,
            owner: producer.epochs.owner.to_field(),
            owned_since: producer.epochs.owned_since,
        });
        let record = StateRecord {
            format: match (self.access.is_empty(), self.group_slots.is_empty()) {
                _ if self.protocol >= protocol::SHARD_SPLITS => FORMAT,
                _ if self.protocol >= protocol::MORE_SHARDS => FORMAT_WITHOUT_SPLITS,
                _ if self.members.placement().is_some() => FORMAT_WITHOUT_NEW_SHARDS,
                _ if self.has_producer_owners() => FORMAT_WITHOUT_PLACEMENT,
                (true, true) => FORMAT_WITHOUT_SLOTS,
                (true, false) => FORMAT_WITHOUT_ACCESS,
                (false, _) => FORMAT_WITHOUT_OWNERS,
            },
            partitions_per_topic_max: self.limits.partitions_per_topic_max,
            partitions_max: self.limits.partitions_max,
            named_producers_max: self.limits.named_producers_max,
            version: self.version,
            next_topic_id: self.next_topic_id,
            next_partition_id: self.next_partition_id,
            next_producer_id: self.next_producer_id,
            nodes: self.nodes.values().cloned().collect(),
            topics: topics.collect(),
            named: named.collect(),
            shards: self.shards.iter().copied().collect(),
            members: self.members.is_known().then(|| MembersRecord::from(&self.members)),
            protocol: if self.protocol > protocol::FIRST { self.protocol } else { 0 },
            group_slots: self.group_slots.clone(),
            access: (!self.access.is_empty()).then(|| self.access.to_record()),
            producer_id_firsts: self.id_owners.keys().copied().collect(),
            producer_id_owners: self.id_owners.values().map(|owner| owner.to_field()).collect(),
        };
        record.encode_to_vec().into()
    }

    /// Decodes the state of a checkpoint.
    ///
    /// # Errors
    /// The first value that is invalid, or of a format of a later version.
    pub fn decode(bytes: &[u8]) -> Result<Self, CheckpointError> {
        let record = StateRecord::decode(bytes).map_err(|e| CheckpointError::new(e.to_string()))?;
        if !FORMATS.contains(&record.format) {
            let format = record.format;
            let what = format!("format {format} of the cluster's state is unknown to this version");
            return Err(CheckpointError::new(what));
        }
        if !has_no_unknown_fields(&record, bytes) {
            return Err(CheckpointError::new(
                "the cluster's state has fields that are unknown to this version",
            ));
        }
        let mut state = Self::new(ClusterLimits {
            partitions_per_topic_max: record.partitions_per_topic_max,
            partitions_max: record.partitions_max,
            named_producers_max: record.named_producers_max,
        });
        state.version = record.version;
        state.protocol = record.protocol.max(protocol::FIRST);
        state.next_topic_id = record.next_topic_id;
        state.next_partition_id = record.next_partition_id;
        state.next_producer_id = record.next_producer_id;
        state.shards = record.shards.into_iter().collect();
        if !record.group_slots.is_empty() && record.group_slots.len() != GROUP_SLOTS {
            return Err(CheckpointError::new("the slots of groups are not complete"));
        }
        state.group_slots = record.group_slots;
        if let Some(access) = record.access {
            state.access = Arc::new(access.into_state()?);
        }
        state.nodes = record.nodes.into_iter().map(|node| (node.node_id, node)).collect();
        if let Some(members) = record.members {
            state.members = members.into_members()?;
        }
        for topic in record.topics {
            state.restore_topic(topic)?;
        }
        state.count_partitions();
        for named in record.named {
            state.restore_named(named)?;
        }
        if !state.restore_id_owners(&record.producer_id_firsts, &record.producer_id_owners) {
            return Err(CheckpointError::new("the owners of producer ids are invalid"));
        }
        Ok(state)
    }

    fn restore_topic(&mut self, record: TopicRecord) -> Result<(), CheckpointError> {
        let id = record.id;
        let broken = |what: &str| CheckpointError::new(format!("topic {id}: {what}"));
        let topic = record.into_topic()?;
        let ids_end = topic.extents.iter().map(|it| it.first_id + u64::from(it.count)).max();
        if id >= self.next_topic_id || ids_end > Some(self.next_partition_id) {
            return Err(broken("its ids are inconsistent"));
        }
        self.partitions += u64::from(topic.partition_count);
        let name_is_new = self.names.insert(topic.name.clone(), id).is_none();
        let id_is_new = self.topics.insert(id, Arc::new(topic)).is_none();
        if name_is_new && id_is_new { Ok(()) } else { Err(broken("it appears twice")) }
    }

    fn restore_named(&mut self, record: NamedRecord) -> Result<(), CheckpointError> {
        let name: Arc<str> = record.name.as_str().into();
        let NamedRecord { producer_id, epoch: newest, last_used, owned_since, .. } = record;
        let owner = ProducerOwner::from_field(&record.owner).filter(|_| owned_since <= newest);
        let Some(owner) = owner else {
            return Err(CheckpointError::new(format!("producer {name:?} has an invalid owner")));
        };
        let epochs = IssuedEpochs { newest, owner, owned_since };
        let producer = NamedProducer { producer_id, epochs, last_used };
        let id_is_new = self.epochs.insert(producer_id, epochs).is_none();
        let use_is_new = self.names_by_use.insert(last_used, name.clone()).is_none();
        let name_is_new = self.named.insert(name.clone(), producer).is_none();
        if id_is_new && use_is_new && name_is_new {
            return Ok(());
        }
        Err(CheckpointError::new(format!("producer {name:?} appears twice")))
    }
}
