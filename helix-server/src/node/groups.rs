//! Consumer groups for requests: locates groups and partitions, and resolves start positions.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::watch;

use super::Node;
use super::lookup::LocatedPartition;
use super::shard_slots::ShardSlot;
use crate::cluster::{matched_topics, unmatched};
use crate::error::{Error, Result};
use crate::log::{
    CommittedRow, ConsumerGroup, GroupRefusal, MatchedTopic, PartitionId, PartitionKey,
    PartitionLocation, Refusal, TopicInfo, Watermarks,
};
use crate::shard::{GroupWatch, ReadFrom, Shard};

/// Longest wait for watermarks from the leader of a shard without a replica here.
const REMOTE_WAIT_MAX: Duration = Duration::from_secs(1);

/// Interval at which a reader polls its group, if the group's shard has no replica here.
const REMOTE_GROUP_INTERVAL: Duration = Duration::from_secs(1);

/// Start of a reader whose group has no usable committed offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommitFallback {
    /// Start at the earliest record if the group has never committed; otherwise fail.
    Safe,
    Fail,
    Earliest,
    Latest,
}

/// Committed start of a group in a partition.
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
            // Callers treat `CorruptLog` as final, so it is returned only if no other node can
            // coordinate the group.
            Some(ShardSlot::Damaged(what)) if self.is_single_node() => {
                Err(Error::CorruptLog { what })
            }
            Some(ShardSlot::Damaged(what) | ShardSlot::Stopped(what)) => {
                Err(Error::ShardClosed { shard: shard_id, what })
            }
            None => Err(self.cluster.elsewhere(shard_id)),
        }
    }

    /// Returns the shard of a group if its replicas are on other nodes.
    async fn remote_group_shard(&self, group: &str) -> Result<Option<u64>> {
        self.check_member()?;
        let shard = self.cluster.group_shard(group).await?;
        Ok(shard.filter(|shard| self.cluster.is_elsewhere(*shard)))
    }

    /// Fetches watermarks of partitions from the leaders of shards without a replica here.
    ///
    /// Partitions of leaders that do not respond in time stay unknown.
    pub async fn learn_watermarks(&self, keys: impl IntoIterator<Item = PartitionKey>) {
        let mut by_shard: BTreeMap<u64, Vec<PartitionId>> = BTreeMap::new();
        let mut topic: Option<Arc<TopicInfo>> = None;
        for key in keys {
            // In order, so most follow one of the same topic.
            if topic.as_ref().is_none_or(|topic| topic.id != key.topic_id) {
                topic = self.topic_of(key.topic_id);
            }
            let location = topic.as_ref().and_then(|topic| topic.location(key.number));
            let Some(PartitionLocation { shard_id, partition }) = location else { continue };
            by_shard.entry(shard_id).or_default().push(partition);
        }
        by_shard.retain(|shard_id, _| self.cluster.is_elsewhere(*shard_id));
        let asked = by_shard.iter().map(|(shard_id, partitions)| async {
            let learning = self.cluster.remote_partitions(*shard_id, partitions);
            // Ignored: the watermarks stay unknown.
            let _ = tokio::time::timeout(REMOTE_WAIT_MAX, learning).await;
        });
        join_all(asked).await;
    }

    /// Returns the current watermarks of a partition whose shard has no replica here.
    ///
    /// `None` if the shard has one, or if the partition does not exist.
    ///
    /// # Errors
    /// [`Error::NoLeader`] if the leader does not respond or does not know the partition.
    pub async fn remote_watermarks(&self, key: PartitionKey) -> Result<Option<Watermarks>> {
        let topic = self.topic_of(key.topic_id);
        let location = topic.as_ref().and_then(|topic| topic.location(key.number));
        let Some(PartitionLocation { shard_id, partition }) = location else { return Ok(None) };
        if !self.cluster.is_elsewhere(shard_id) {
            return Ok(None);
        }
        self.cluster.remote_partitions(shard_id, &[partition]).await?;
        match self.cluster.remembered_watermarks(partition) {
            Some(watermarks) => Ok(Some(watermarks)),
            None => Err(Error::NoLeader { shard: shard_id }),
        }
    }

    /// Returns the first groups after a name in each shard without a replica here.
    ///
    /// The groups of a shard are sorted by name, at most `limit` of them.
    ///
    /// # Errors
    /// [`Error::NoLeader`] if the leader of a shard does not respond.
    pub async fn remote_groups(
        &self,
        after: &str,
        limit: usize,
    ) -> Result<Vec<Vec<(String, ConsumerGroup)>>> {
        let shards = self.cluster.machine().read(|state| state.shards().clone());
        let shards = shards.into_iter().filter(|shard| self.cluster.is_elsewhere(*shard));
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        let asked = shards.map(|shard| self.cluster.remote_groups(shard, after, limit));
        join_all(asked).await.into_iter().collect()
    }

    /// Returns whether the shard of a partition has a leader, and whether the partition is empty.
    ///
    /// Uses the last watermarks that the leader has sent. `None` if the shard has a replica here.
    pub fn remote_state(&self, key: PartitionKey) -> Option<(bool, bool)> {
        let location = self.topic_of(key.topic_id)?.location(key.number)?;
        let is_elsewhere = self.cluster.is_elsewhere(location.shard_id);
        is_elsewhere.then(|| {
            let watermarks = self.cluster.remembered_watermarks(location.partition);
            let is_empty = watermarks.is_some_and(|it| it.log_start == it.high_watermark);
            (self.cluster.remote_leader(location.shard_id).is_some(), is_empty)
        })
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
        match self.locate_key(key) {
            Some((_, shard, partition)) => shard.watermarks(partition).ok(),
            None => self.remembered(key),
        }
    }

    fn remembered(&self, key: PartitionKey) -> Option<Watermarks> {
        let location = self.topic_of(key.topic_id)?.location(key.number)?;
        let is_elsewhere = self.cluster.is_elsewhere(location.shard_id);
        self.cluster.remembered_watermarks(location.partition).filter(|_| is_elsewhere)
    }

    /// Like [`Self::watermarks_of`], but only if the watermarks cover `offset` or come from the
    /// leader.
    ///
    /// A follower that is behind does not know the end.
    pub fn known_watermarks(&self, key: PartitionKey, offset: u64) -> Option<Watermarks> {
        let Some((_, shard, partition)) = self.locate_key(key) else {
            return self.remembered(key).filter(|it| offset <= it.high_watermark);
        };
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

    /// Returns the offset at which a reader of a group starts. Works on any node.
    ///
    /// An offset that the reader has `reached` replaces the committed one.
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
        // Read after the group: records exist before their offset is committed.
        let watermarks = located.shard.watermarks_for(located.partition, from)?;
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
        let key = PartitionKey { topic_id: located.topic.id, number: located.number };
        let name = located.topic.name.as_str();
        let start = |group: Option<&ConsumerGroup>| {
            let Some(group) = group else { return CommittedStart::None };
            if let Some(offset) = group.offset(key).and_then(CommittedRow::offset) {
                return CommittedStart::Offset(offset);
            }
            let earlier = group.earlier_topic(key.topic_id, name);
            earlier.map_or(CommittedStart::None, CommittedStart::EarlierTopic)
        };
        if let Some(shard) = self.remote_group_shard(group).await? {
            let found = self.cluster.remote_groups(shard, group, 0).await?;
            return Ok(start(found.first().map(|(_, group)| group)));
        }
        let shard = match self.find_group(group).await {
            Err(Error::GroupNotFound { .. }) => return Ok(CommittedStart::None),
            found => found?,
        };
        self.cluster.catch_up_shard(&shard).await?;
        Ok(shard.read_groups(|groups| start(groups.get(group))))
    }

    /// Follows a member's partitions as [`Self::follow_membership`] does, for a group whose shard
    /// has no replica here: it is asked for again from time to time.
    async fn follow_remote(
        &self,
        shard_id: u64,
        group: &str,
        member_id: &str,
        epoch: u64,
    ) -> Result<ReaderMembership> {
        let found = self.cluster.remote_groups(shard_id, group, 0).await?;
        let state = found.into_iter().next().map(|(_, state)| state);
        let current = state.as_ref().and_then(|it| Some(it.member_epoch(it.member(member_id)?)));
        let refusal = match current {
            None => Some(GroupRefusal::UnknownMember { member_id: member_id.to_owned() }),
            Some(current) if current < epoch => Some(GroupRefusal::StaleEpoch { epoch, current }),
            Some(_) => None,
        };
        if let Some(refusal) = refusal {
            return Err(Refusal::from(refusal).into());
        }
        let (states, followed) = watch::channel(state);
        let (group, member_id) = (group.to_owned(), member_id.to_owned());
        tokio::spawn(poll_group(self.handler.weak_node(), shard_id, group.clone(), states));
        Ok(ReaderMembership { source: MembershipSource::Remote(followed), group, member_id, epoch })
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
        if let Some(shard_id) = self.remote_group_shard(group).await? {
            return self.follow_remote(shard_id, group, member_id, epoch).await;
        }
        let shard = self.find_group(group).await?;
        let current = || {
            shard.read_groups(|groups| {
                let group = groups.get(group)?;
                Some(group.member_epoch(group.member(member_id)?))
            })
        };
        // Either the epoch is wrong or this replica is behind. After a catch-up, the replica has
        // every epoch that a member has received, because the epochs of a member only grow. Without
        // a leader, the check is skipped: open streams continue, so new streams may start too.
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
        let source = MembershipSource::Local { shard, watch };
        Ok(ReaderMembership { source, group, member_id, epoch })
    }
}

/// Source of the group state for a reader.
#[derive(Debug)]
enum MembershipSource {
    Local {
        shard: Arc<Shard>,
        watch: GroupWatch,
    },
    /// Last state that the leader has sent; `None` if the group does not exist.
    Remote(watch::Receiver<Option<ConsumerGroup>>),
}

/// Asks the leader of a shard without a replica here for a group, until nothing follows it.
///
/// A task of its own: readers with records to send would never get to ask.
async fn poll_group(
    node: Weak<Node>,
    shard_id: u64,
    group: String,
    states: watch::Sender<Option<ConsumerGroup>>,
) {
    loop {
        tokio::select! {
            () = states.closed() => return,
            () = tokio::time::sleep(REMOTE_GROUP_INTERVAL) => {}
        }
        let Some(node) = node.upgrade() else { return };
        // Without a leader to ask, readers keep their partitions.
        if let Ok(found) = node.cluster.remote_groups(shard_id, &group, 0).await {
            states.send_replace(found.into_iter().next().map(|(_, state)| state));
        }
    }
}

/// A member whose partitions are read.
#[derive(Debug)]
pub struct ReaderMembership {
    source: MembershipSource,
    group: String,
    member_id: String,
    epoch: u64,
}

impl ReaderMembership {
    /// Waits until the group may have changed.
    pub async fn changed(&mut self) {
        match &mut self.source {
            MembershipSource::Local { watch, .. } => watch.changed().await,
            MembershipSource::Remote(states) => {
                if states.changed().await.is_err() {
                    // The node stops, and ends its streams.
                    std::future::pending().await
                }
            }
        }
    }

    /// Returns whether the group may have changed since the last call.
    pub fn take_changed(&mut self) -> bool {
        match &mut self.source {
            MembershipSource::Local { watch, .. } => watch.take_changed(),
            MembershipSource::Remote(states) => {
                let has_changed = states.has_changed().unwrap_or(false);
                if has_changed {
                    states.mark_unchanged();
                }
                has_changed
            }
        }
    }

    /// Checks that the member has not lost the partition.
    ///
    /// # Errors
    /// [`GroupRefusal::UnknownMember`] and [`GroupRefusal::NotOwned`].
    pub fn check(&self, partition: PartitionKey) -> Result<()> {
        let (epoch, member_id) = (self.epoch, self.member_id.as_str());
        let lost_in = |group: Option<&ConsumerGroup>, is_newer: bool| match group {
            Some(group) if group.has_lost(member_id, epoch, partition) => {
                Some(group.member(member_id).is_some().then(|| group.assignment_epoch()))
            }
            None if is_newer => Some(None),
            Some(_) | None => None,
        };
        let lost = match &self.source {
            MembershipSource::Local { shard, .. } => {
                // Read first, so that the state is at least as new as this index.
                let is_newer = shard.applied() >= self.epoch;
                shard.read_groups(|groups| lost_in(groups.get(&self.group), is_newer))
            }
            MembershipSource::Remote(states) => lost_in(states.borrow().as_ref(), true),
        };
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
