//! What lives on this node: topics, the partitions and their shards.

use std::sync::Arc;

use super::Node;
use super::slots::Slot;
use crate::cluster::{Place, TopicInfo};
use crate::error::{Error, Result};
use crate::log::{PartitionId, PartitionSettings, Refusal};
use crate::shard::Shard;

/// A partition, found.
#[derive(Debug, Clone)]
pub struct Located {
    pub partition: PartitionId,
    pub shard: Arc<Shard>,
    pub settings: PartitionSettings,
    pub topic: Arc<TopicInfo>,
    pub number: u32,
}

impl Node {
    /// As [`Self::locate`]. What this node does not know it may only not know yet: before it says
    /// no it catches up with the cluster's state.
    pub async fn find(&self, topic: &str, partition: u32) -> Result<Located> {
        match self.locate(topic, partition) {
            Err(Error::TopicNotFound { .. } | Error::PartitionNotFound { .. }) => {
                self.catch_up().await?;
                self.locate(topic, partition)
            }
            found => found,
        }
    }

    /// As [`Self::topic`], see [`Self::find`].
    pub async fn find_topic(&self, name: &str) -> Result<Arc<TopicInfo>> {
        self.check_member()?;
        match self.topic(name) {
            Err(Error::TopicNotFound { .. }) => {
                self.catch_up().await?;
                self.topic(name)
            }
            found => found,
        }
    }

    /// Whether what a producer begins on a partition with sequence 0 cannot be a copy.
    ///
    /// # Errors
    /// The producer was there and may have been forgotten, or its id was never handed out: that
    /// would stand above all that come later.
    pub async fn check_producer(
        &self,
        located: &Located,
        producer_id: u64,
        epoch: u32,
    ) -> Result<()> {
        let Located { shard, partition, .. } = located;
        if shard.next_sequence(*partition, producer_id, epoch).is_some() {
            return Ok(());
        }
        // Boxed, since it is rare.
        Box::pin(async {
            // Whoever does not lead may not have the row yet, and would deny a batch that counted.
            shard.ready().await?;
            let is_known = shard.next_sequence(*partition, producer_id, epoch).is_some();
            let is_new = !shard.has_forgotten(*partition, producer_id, epoch)
                && self.cluster.has_given(producer_id).await?;
            let refused = || Refusal::UnknownProducer { producer_id }.into();
            if is_known || is_new { Ok(()) } else { Err(refused()) }
        })
        .await
    }

    /// Boxed, since it is rare and takes 4 KiB: every call under way would have room for it.
    fn catch_up(&self) -> impl Future<Output = Result<()>> + '_ {
        Box::pin(self.cluster.catch_up())
    }

    /// Finds a partition and its shard.
    pub fn locate(&self, topic: &str, partition: u32) -> Result<Located> {
        self.check_member()?;
        let info = self.cluster.topic(topic)?;
        let Some(Place { shard_id, partition: id }) = info.place(partition) else {
            return Err(Error::PartitionNotFound {
                topic: topic.to_owned(),
                partition,
                partition_count: info.partition_count,
            });
        };
        match self.shards.get(shard_id) {
            Some(Slot::Open(shard)) => Ok(Located {
                partition: id,
                shard,
                settings: info.settings,
                topic: info,
                number: partition,
            }),
            Some(Slot::Withheld(what)) => Err(Error::CorruptLog { what }),
            Some(Slot::Stopped(_)) | None => Err(Error::NoLeader { shard: shard_id }),
        }
    }

    pub fn topic(&self, name: &str) -> Result<Arc<TopicInfo>> {
        self.cluster.topic(name)
    }

    /// Topics by name: those that begin with `prefix` and come after `after`.
    pub fn topics(&self, prefix: &str, after: Option<&str>, limit: usize) -> Vec<Arc<TopicInfo>> {
        self.cluster.machine().read(|state| {
            let first = after.unwrap_or_default();
            let topics = state.topics_from(prefix, first).filter(|t| t.name.as_str() != first);
            topics.take(limit).cloned().collect()
        })
    }

    pub fn shard(&self, id: u64) -> Option<Arc<Shard>> {
        match self.shards.get(id) {
            Some(Slot::Open(shard)) => Some(shard),
            Some(Slot::Withheld(_) | Slot::Stopped(_)) | None => None,
        }
    }

    /// The shards that are served.
    pub fn shards(&self) -> Vec<Arc<Shard>> {
        self.shards.open()
    }
}
