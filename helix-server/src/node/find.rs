//! What lives on this node: topics, the partitions and their shards, and what is not served.

use std::sync::Arc;

use super::Node;
use crate::cluster::{Place, TopicInfo};
use crate::error::{Error, Result};
use crate::log::{PartitionId, PartitionSettings};
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

/// A shard's place in the node: a damaged one is withheld, the others go on.
#[derive(Debug)]
pub(super) enum Slot {
    Open(Arc<Shard>),
    Withheld(String),
}

impl Node {
    /// As [`Self::locate`]. What this node does not know it may only not know yet: before it says
    /// no it catches up with the cluster's state.
    pub async fn find(&self, topic: &str, partition: u32) -> Result<Located> {
        match self.locate(topic, partition) {
            Err(Error::TopicNotFound { .. } | Error::PartitionNotFound { .. }) => {
                self.cluster.catch_up().await?;
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
                self.cluster.catch_up().await?;
                self.topic(name)
            }
            found => found,
        }
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
        match self.shards.get(&shard_id) {
            Some(Slot::Open(shard)) => Ok(Located {
                partition: id,
                shard: shard.clone(),
                settings: info.settings,
                topic: info,
                number: partition,
            }),
            Some(Slot::Withheld(what)) => Err(Error::CorruptLog { what: what.clone() }),
            None => Err(Error::NoLeader { shard: shard_id }),
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
        match self.shards.get(&id) {
            Some(Slot::Open(shard)) => Some(shard.clone()),
            Some(Slot::Withheld(_)) | None => None,
        }
    }

    /// The shards that are served.
    pub fn shards(&self) -> Vec<Arc<Shard>> {
        self.shards.keys().filter_map(|id| self.shard(*id)).collect()
    }

    /// The shards that are not served, and why.
    pub fn withheld(&self) -> Vec<(u64, String)> {
        let withheld = self.shards.iter().filter_map(|(id, slot)| match slot {
            Slot::Withheld(what) => Some((*id, what.clone())),
            Slot::Open(_) => None,
        });
        withheld.collect()
    }

    /// Why this node does not serve all that it should, a line each; none: it is ready.
    pub fn unready(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        if self.draining.is_cancelled() {
            reasons.push("the node is shutting down".to_owned());
        }
        let leaderless = |shard: u64| format!("shard {shard}: no leader is known");
        if self.cluster.leader_hint().is_none() {
            reasons.push(leaderless(0));
        }
        for (shard, what) in self.withheld() {
            reasons.push(format!("shard {shard} is withheld: {what}"));
        }
        for shard in self.shards() {
            if shard.leader_hint().is_none() {
                reasons.push(leaderless(shard.id()));
            }
            reasons.extend(shard.unwell().map(|why| format!("shard {}: {why}", shard.id())));
        }
        reasons
    }
}
