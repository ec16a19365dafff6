//! Consumer groups for requests: their shards, their partitions, and committed start positions.

use std::sync::Arc;

use super::Node;
use super::lookup::LocatedPartition;
use super::shard_slots::ShardSlot;
use crate::cluster::{matched_topics, unmatched};
use crate::error::{Error, Result};
use crate::log::{
    CommittedRow, ConsumerGroup, GroupRefusal, MatchedTopic, PartitionId, PartitionKey, Refusal,
    TopicInfo, Watermarks,
};
use crate::shard::{GroupWatch, ReadFrom, Shard};

/// Start of a reader whose group has no usable committed offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommitFallback {
    /// Earliest if the group has never committed, else fail.
    Safe,
    Fail,
    Earliest,
    Latest,
}

/// Start of a partition as a group has it.
enum CommittedStart {
    Offset(u64),
    /// The group has never committed an offset in the partition.
    None,
    /// The group's offsets belong to an earlier topic of the same name, with this id.
    EarlierTopic(u64),
}

impl Node {
    /// Returns the shard of a group on this node.
    ///
    /// # Errors
    /// [`Error::GroupNotFound`] if no group of this cluster can exist yet.
    /// [`Error::ShardClosed`] or [`Error::NoLeader`] if the shard is not open here,
    /// [`Error::CorruptLog`] if that is due to damage on a single node.
    pub async fn find_group(&self, group: &str) -> Result<Arc<Shard>> {
        self.check_member()?;
        match self.cluster.group_shard(group).await? {
            Some(shard) => self.group_shard(shard),
            None => Err(Error::GroupNotFound { group: group.to_owned() }),
        }
    }

    /// Returns the shard in which a group is or will be.
    ///
    /// # Errors
    /// As [`Self::find_group`], without [`Error::GroupNotFound`], and the errors of
    /// [`Cluster::assign_group_slots`](crate::cluster::Cluster::assign_group_slots).
    pub async fn find_or_place_group(&self, group: &str) -> Result<Arc<Shard>> {
        match self.find_group(group).await {
            Err(Error::GroupNotFound { .. }) => {
                self.cluster.assign_group_slots().await?;
                self.find_group(group).await
            }
            found => found,
        }
    }

    fn group_shard(&self, shard_id: u64) -> Result<Arc<Shard>> {
        match self.shards.get(shard_id) {
            Some(ShardSlot::Open(shard)) => Ok(shard),
            // Final for the caller, so only where no other node can coordinate the group.
            Some(ShardSlot::Damaged(what)) if self.is_single_node() => {
                Err(Error::CorruptLog { what })
            }
            Some(ShardSlot::Damaged(what) | ShardSlot::Stopped(what)) => {
                Err(Error::ShardClosed { shard: shard_id, what })
            }
            None => Err(Error::NoLeader { shard: shard_id }),
        }
    }

    /// Returns the topic and the location of a partition, if they exist here.
    pub fn locate_key(
        &self,
        key: PartitionKey,
    ) -> Option<(Arc<TopicInfo>, Arc<Shard>, PartitionId)> {
        let topic = self.topic_of(key.topic_id)?;
        let location = topic.location(key.number)?;
        let shard = self.shard(location.shard_id)?;
        Some((topic, shard, location.partition))
    }

    pub fn topic_of(&self, topic_id: u64) -> Option<Arc<TopicInfo>> {
        self.cluster.machine().read(|state| state.topic_by_id(topic_id).cloned())
    }

    /// Updates this node's copy of the cluster's state if it lacks the topic of a partition.
    ///
    /// # Errors
    /// As [`Cluster::catch_up`](crate::cluster::Cluster::catch_up).
    pub async fn learn_topics(
        &self,
        partitions: impl Iterator<Item = &PartitionKey>,
    ) -> Result<()> {
        let is_behind = self.cluster.machine().read(|state| {
            let is_unknown = |id: u64| state.topic_by_id(id).is_none() && !state.is_deleted(id);
            // In order, so most follow one of the same topic.
            let mut known = None;
            let mut partitions = partitions;
            partitions.any(|it| {
                known.replace(it.topic_id) != Some(it.topic_id) && is_unknown(it.topic_id)
            })
        });
        if is_behind { Box::pin(self.cluster.catch_up()).await } else { Ok(()) }
    }

    /// Returns the watermarks of a partition as this node's replica has them.
    pub fn watermarks_of(&self, key: PartitionKey) -> Option<Watermarks> {
        let (_, shard, partition) = self.locate_key(key)?;
        shard.watermarks(partition).ok()
    }

    /// Like [`Self::watermarks_of`], if they cover an offset or come from the leader; a follower
    /// that is behind does not know the end.
    pub fn known_watermarks(&self, key: PartitionKey, offset: u64) -> Option<Watermarks> {
        let (_, shard, partition) = self.locate_key(key)?;
        let watermarks = shard.watermarks(partition).ok()?;
        (offset <= watermarks.high_watermark || shard.is_leader()).then_some(watermarks)
    }

    /// Returns the topics that a group subscribes to, in the order of their ids.
    pub fn matched_topics(&self, group: &ConsumerGroup) -> Vec<MatchedTopic> {
        matched_topics(self.cluster.machine(), group)
    }

    /// Returns the subscribed names and patterns that match no topic.
    pub fn unmatched_topics(&self, topics: &[String]) -> Vec<String> {
        unmatched(self.cluster.machine(), topics).into_iter().map(str::to_owned).collect()
    }

    /// Returns the offset at which a reader of a group starts, from any node. An offset that the
    /// reader has `reached` takes the place of the committed one.
    ///
    /// # Errors
    /// [`Error::NoCommittedOffset`], [`Error::OffsetOutOfRange`] and [`Error::TopicRecreated`] if
    /// there is no usable offset and the fallback does not say where to start instead.
    pub async fn committed_offset(
        &self,
        group: &str,
        located: &LocatedPartition,
        fallback: CommitFallback,
        reached: Option<u64>,
        from: ReadFrom,
    ) -> Result<u64> {
        let committed = match reached {
            Some(reached) => CommittedStart::Offset(reached),
            None => self.committed_start(group, located).await?,
        };
        // Read after the group: an offset is committed after its records.
        let watermarks = located.shard.watermarks(located.partition)?;
        let Watermarks { log_start, high_watermark } = watermarks;
        let reason = match committed {
            CommittedStart::Offset(offset) => {
                let is_beyond = offset > high_watermark && from == ReadFrom::Leader;
                if offset >= log_start && !is_beyond {
                    return Ok(offset);
                }
                Error::OffsetOutOfRange { requested: offset, watermarks }
            }
            CommittedStart::EarlierTopic(expected) => Error::TopicRecreated {
                topic: located.topic.name.clone(),
                expected,
                current: located.topic.id,
            },
            CommittedStart::None => {
                return match fallback {
                    CommitFallback::Safe | CommitFallback::Earliest => Ok(log_start),
                    CommitFallback::Latest => Ok(high_watermark),
                    CommitFallback::Fail => {
                        Err(Error::NoCommittedOffset { group: group.to_owned() })
                    }
                };
            }
        };
        let offset = match fallback {
            CommitFallback::Safe | CommitFallback::Fail => return Err(reason),
            CommitFallback::Earliest => log_start,
            CommitFallback::Latest => high_watermark,
        };
        self.metrics.on_group_fallback();
        let (topic, partition) = (&located.topic.name, located.number);
        tracing::warn!(group, %topic, partition, offset, %reason, "starting at the fallback");
        Ok(offset)
    }

    async fn committed_start(
        &self,
        group: &str,
        located: &LocatedPartition,
    ) -> Result<CommittedStart> {
        let shard = match self.find_group(group).await {
            Err(Error::GroupNotFound { .. }) => return Ok(CommittedStart::None),
            found => found?,
        };
        self.cluster.catch_up_shard(&shard).await?;
        let key = PartitionKey { topic_id: located.topic.id, number: located.number };
        let name = located.topic.name.as_str();
        Ok(shard.read_groups(|groups| {
            let Some(group) = groups.get(group) else { return CommittedStart::None };
            if let Some(offset) = group.offset(key).and_then(CommittedRow::offset) {
                return CommittedStart::Offset(offset);
            }
            let earlier = group.earlier_topic(key.topic_id, name);
            earlier.map_or(CommittedStart::None, CommittedStart::EarlierTopic)
        }))
    }

    /// Follows a member's partitions for a reader, from this node's replica of the group.
    ///
    /// # Errors
    /// As [`Self::find_group`]. [`GroupRefusal::UnknownMember`], and [`GroupRefusal::StaleEpoch`]
    /// for a future epoch, unless the shard has no leader to ask.
    pub async fn follow_membership(
        &self,
        group: &str,
        member_id: &str,
        epoch: u64,
    ) -> Result<ReaderMembership> {
        let shard = self.find_group(group).await?;
        let current = || {
            shard.read_groups(|groups| {
                let group = groups.get(group)?;
                Some(group.member_epoch(group.member(member_id)?))
            })
        };
        // Either the epoch is wrong or this replica is behind. After a catch-up it has every epoch
        // that a member received, and a member's epochs only grow. A shard without a leader cannot
        // be asked: its open streams continue, and so new ones begin.
        if current().is_none_or(|it| it < epoch)
            && self.cluster.catch_up_shard(&shard).await.is_ok()
        {
            let refusal = match current() {
                None => Some(GroupRefusal::UnknownMember { member_id: member_id.to_owned() }),
                Some(current) if current < epoch => {
                    Some(GroupRefusal::StaleEpoch { epoch, current })
                }
                Some(_) => None,
            };
            if let Some(refusal) = refusal {
                return Err(Refusal::from(refusal).into());
            }
        }
        let watch = shard.watch_group(group);
        let (group, member_id) = (group.to_owned(), member_id.to_owned());
        Ok(ReaderMembership { shard, watch, group, member_id, epoch })
    }
}

/// A member whose partitions are read.
#[derive(Debug)]
pub struct ReaderMembership {
    shard: Arc<Shard>,
    watch: GroupWatch,
    group: String,
    member_id: String,
    epoch: u64,
}

impl ReaderMembership {
    /// Waits until the group has changed.
    pub async fn changed(&mut self) {
        self.watch.changed().await;
    }

    /// Returns whether the group has changed since the last call.
    pub fn take_changed(&mut self) -> bool {
        self.watch.take_changed()
    }

    /// Checks that the member has not lost the partition.
    ///
    /// # Errors
    /// [`GroupRefusal::UnknownMember`] and [`GroupRefusal::NotOwned`].
    pub fn check(&self, partition: PartitionKey) -> Result<()> {
        // Read first: the state is at least as new.
        let is_newer = self.shard.applied() >= self.epoch;
        let (epoch, member_id) = (self.epoch, self.member_id.as_str());
        let lost = self.shard.read_groups(|groups| match groups.get(&self.group) {
            Some(group) if group.has_lost(member_id, epoch, partition) => {
                Some(group.member(member_id).is_some().then(|| group.assignment_epoch()))
            }
            None if is_newer => Some(None),
            Some(_) | None => None,
        });
        match lost {
            None => Ok(()),
            Some(Some(current)) => {
                Err(Refusal::from(GroupRefusal::NotOwned { partition, epoch, current }).into())
            }
            Some(None) => {
                let member_id = self.member_id.clone();
                Err(Refusal::from(GroupRefusal::UnknownMember { member_id }).into())
            }
        }
    }
}
