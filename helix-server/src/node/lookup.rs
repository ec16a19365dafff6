//! Lookup of topics, partitions and shards on this node.

use std::sync::Arc;

use super::Node;
use super::shard_slots::ShardSlot;
use crate::error::{Error, Result};
use crate::log::{
    PartitionId, PartitionKey, PartitionLocation, PartitionSettings, ProducerStamp, Refusal,
    TopicInfo,
};
use crate::protocol;
use crate::shard::Shard;

/// A partition with its shard and topic.
#[derive(Debug, Clone)]
pub struct LocatedPartition {
    pub partition: PartitionId,
    pub shard: Arc<Shard>,
    /// As [`Node::settings_in_force`].
    pub settings: PartitionSettings,
    pub topic: Arc<TopicInfo>,
    pub number: u32,
}

impl Node {
    /// Finds a partition of the topic with this name and id; 0 accepts any id.
    ///
    /// Catches up with the cluster's state before it fails, since the topic or partition may be too
    /// new for this node.
    ///
    /// # Errors
    /// [`Error::TopicNotFound`], [`Error::TopicDeleted`], [`Error::TopicRecreated`],
    /// [`Error::PartitionNotFound`], [`Error::CorruptLog`], [`Error::ShardClosed`],
    /// [`Error::NotLeader`] or [`Error::NoLeader`] if the shard is not open here, and
    /// [`Error::NotAMember`] on a removed node.
    pub async fn find(&self, topic: &str, id: u64, partition: u32) -> Result<LocatedPartition> {
        self.find_with(|| self.locate_with_id(topic, id, partition)).await
    }

    /// Like [`Self::find`], for a topic.
    ///
    /// # Errors
    /// As [`Self::find`], except for those of partitions.
    pub async fn find_topic(&self, name: &str, id: u64) -> Result<Arc<TopicInfo>> {
        self.check_member()?;
        self.find_with(|| self.cluster.topic_with_id(name, id)).await
    }

    /// Like [`Self::find`], for the key of a partition, whose shard need not be open here.
    ///
    /// # Errors
    /// As [`Self::find`], except for those of shards.
    pub async fn find_key(&self, topic: &str, id: u64, number: u32) -> Result<PartitionKey> {
        let (topic, _) = self.find_with(|| self.place(topic, id, number)).await?;
        Ok(PartitionKey { topic_id: topic.id, number })
    }

    async fn find_with<T>(&self, find: impl Fn() -> Result<T>) -> Result<T> {
        match find() {
            Err(error) if is_stale(&error) => {
                self.catch_up().await?;
                find()
            }
            found => found,
        }
    }

    /// Checks that a batch with sequence 0 of a producer cannot be a duplicate, and that its
    /// identity was issued to its owner.
    ///
    /// Apply assumes that the owner of the first batch of a producer or epoch on a partition owns
    /// the identity. So such a batch must not be proposed without this check.
    ///
    /// # Errors
    /// [`Refusal::UnknownProducer`] if the producer may have been forgotten, or if its id or its
    /// name's epoch was never issued. Such an id would be higher than all ids that are issued
    /// later; such an epoch would fence the name's producer permanently.
    /// [`Refusal::ProducerNotOwned`] if the identity was issued to another principal.
    pub async fn check_producer(
        &self,
        located: &LocatedPartition,
        stamp: ProducerStamp,
    ) -> Result<()> {
        let LocatedPartition { shard, partition, .. } = located;
        let ProducerStamp { producer_id, epoch, .. } = stamp;
        // A producer without a batch of this epoch has the next sequence 0. An epoch of another
        // owner has none.
        let is_known = || {
            let next = shard.next_sequence(*partition, &stamp);
            next.is_some_and(|next_sequence| next_sequence > 0)
        };
        if is_known() {
            return Ok(());
        }
        // Boxes the rare path so that the future stays small.
        Box::pin(async {
            // A follower may lack the producer's entry and reject a retry of a committed batch.
            shard.ready().await?;
            if is_known() {
                return Ok(());
            }
            shard.check_owner(*partition, &stamp)?;
            if shard.has_forgotten(*partition, producer_id, epoch) {
                return Err(Refusal::UnknownProducer { producer_id }.into());
            }
            self.cluster.check_identity(&stamp).await
        })
        .await
    }

    /// Catches up with the cluster's state. Boxes the rare 4 KiB future so that callers stay small.
    fn catch_up(&self) -> impl Future<Output = Result<()>> + '_ {
        Box::pin(self.cluster.catch_up())
    }

    /// Explains the failure of a call on a partition whose topic was deleted or created again.
    ///
    /// Boxes the rare future so that callers stay small.
    pub fn explain_deleted<'a>(
        &'a self,
        topic: &'a TopicInfo,
        error: Error,
    ) -> impl Future<Output = Error> + 'a {
        Box::pin(self.cluster.explain_deleted(topic, error))
    }

    /// Finds a partition and its shard.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub fn locate(&self, topic: &str, partition: u32) -> Result<LocatedPartition> {
        self.locate_with_id(topic, 0, partition)
    }

    /// Returns the topic of a partition, and the partition's location in the cluster.
    fn place(
        &self,
        topic: &str,
        id: u64,
        partition: u32,
    ) -> Result<(Arc<TopicInfo>, PartitionLocation)> {
        self.check_member()?;
        let info = self.cluster.topic_with_id(topic, id)?;
        match info.location(partition) {
            Some(location) => Ok((info, location)),
            None => Err(Error::PartitionNotFound {
                topic: topic.to_owned(),
                partition,
                partition_count: info.partition_count,
            }),
        }
    }

    fn locate_with_id(&self, topic: &str, id: u64, partition: u32) -> Result<LocatedPartition> {
        let (info, location) = self.place(topic, id, partition)?;
        let PartitionLocation { shard_id, partition: id } = location;
        match self.shards.get(shard_id) {
            Some(ShardSlot::Open(shard)) => Ok(LocatedPartition {
                partition: id,
                shard,
                settings: self.settings_in_force(&info),
                topic: info,
                number: partition,
            }),
            Some(ShardSlot::Damaged(what)) => Err(Error::CorruptLog { what }),
            Some(ShardSlot::Stopped(what)) => Err(Error::ShardClosed { shard: shard_id, what }),
            None => Err(self.cluster.elsewhere(shard_id)),
        }
    }

    /// Returns the settings of the topic, without checks that some member does not know yet.
    pub fn settings_in_force(&self, topic: &TopicInfo) -> PartitionSettings {
        let mut settings = topic.settings;
        // Leaders of a release before the check accept any content. While one is a member, the
        // outcome of an append must not depend on the node that leads.
        settings.takes_any_records |= self.cluster.protocol() < protocol::RECORD_VALIDATION;
        settings
    }

    /// Returns the topic with this name, as far as this node knows.
    ///
    /// # Errors
    /// [`Error::TopicNotFound`], also for a topic that is too new for this node.
    pub fn topic(&self, name: &str) -> Result<Arc<TopicInfo>> {
        self.cluster.topic(name)
    }

    /// Returns up to `limit` topics whose names begin with `prefix` and sort after `after`.
    pub fn topics(&self, prefix: &str, after: Option<&str>, limit: usize) -> Vec<Arc<TopicInfo>> {
        self.visible_topics(prefix, after, limit, |_| true)
    }

    /// Like [`Self::topics`], without the topics that the caller may not see.
    pub fn visible_topics(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
        is_visible: impl Fn(&str) -> bool,
    ) -> Vec<Arc<TopicInfo>> {
        self.cluster.machine().read(|state| {
            let first = after.unwrap_or_default();
            let topics = state.topics_from(prefix, first).filter(|t| t.name.as_str() != first);
            topics.filter(|topic| is_visible(&topic.name)).take(limit).cloned().collect()
        })
    }

    pub fn shard(&self, id: u64) -> Option<Arc<Shard>> {
        match self.shards.get(id) {
            Some(ShardSlot::Open(shard)) => Some(shard),
            Some(ShardSlot::Damaged(_) | ShardSlot::Stopped(_)) | None => None,
        }
    }

    /// Returns the open shards.
    pub fn shards(&self) -> Vec<Arc<Shard>> {
        self.shards.open()
    }
}

/// Returns whether the error may be due to an old copy of the cluster's state. Ids only grow.
fn is_stale(error: &Error) -> bool {
    match error {
        Error::TopicNotFound { .. }
        | Error::TopicDeleted { .. }
        | Error::PartitionNotFound { .. } => true,
        Error::TopicRecreated { expected, current, .. } => current < expected,
        _ => false,
    }
}
