//! The coordinator of a shard's groups, on the shard's leader: removes silent members, computes
//! assignments, and forgets dropped topics. It only proposes; apply decides.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::client::{Cluster, unexpected};
use super::machine::ClusterMachine;
use super::peer_messages::{PeerRequest, PeerResponse};
use super::state::ClusterState;
use crate::error::{Error, Result};
use crate::limits::{
    DELETED_OFFSETS_KEPT, DELETED_OFFSETS_ROWS_MAX, DELETED_TOPICS_KEPT_MAX,
    GROUP_ASSIGNMENT_INTERVAL, GROUP_PROPOSALS_MAX, READY_WAIT_MAX,
};
use crate::log::{
    Assignment, ClusterCommand, ClusterReply, ConsumerGroup, GroupChange, MatchedTopic,
    ROWS_PER_ENTRY_MAX, TopicInfo, is_pattern,
};
use crate::protocol::GROUPS;
use crate::shard::Shard;

/// Members removed by one entry.
const MEMBERS_PER_ENTRY: usize = 500;

/// Progress of a shard's coordinator, for one term of leadership.
#[derive(Debug, Default)]
pub struct CoordinatorRound {
    term: u64,
    /// Token of the leadership at the first step.
    leadership: Option<CancellationToken>,
    /// Groups that have changed and are not scheduled yet.
    changed: BTreeSet<Arc<str>>,
    /// Version of the cluster's state that the assignments follow.
    version: u64,
    /// Groups to assign, each with its earliest time.
    due: BTreeMap<Arc<str>, Instant>,
    /// Time of the last assignment of each group, kept for [`GROUP_ASSIGNMENT_INTERVAL`].
    assigned: BTreeMap<Arc<str>, Instant>,
    /// Deleted topics with offsets in groups, and the times when the offsets are removed.
    dropped: BTreeMap<Arc<str>, BTreeMap<u64, Instant>>,
}

impl CoordinatorRound {
    /// Resets everything except the changed groups.
    ///
    /// Without a leadership, the next step begins the sessions of all members again.
    fn restart(&mut self, term: u64, leadership: Option<CancellationToken>) {
        let changed = std::mem::take(&mut self.changed);
        *self = Self { term, leadership, changed, ..Self::default() };
    }

    fn is_of(&self, term: u64) -> bool {
        let is_current = |token: &CancellationToken| !token.is_cancelled();
        self.term == term && self.leadership.as_ref().is_some_and(is_current)
    }

    fn schedule(&mut self, group: Arc<str>) {
        let earliest = self.assigned.get(&group).map(|last| *last + GROUP_ASSIGNMENT_INTERVAL);
        self.due.entry(group).or_insert_with(|| earliest.unwrap_or_else(Instant::now));
    }

    /// Returns the next time when the offsets of a deleted topic are removed.
    fn next_forgotten(&self) -> Option<Instant> {
        self.dropped.values().flat_map(BTreeMap::values).min().copied()
    }

    fn take_due(&mut self) -> Vec<Arc<str>> {
        let now = Instant::now();
        self.assigned.retain(|_, last| *last + GROUP_ASSIGNMENT_INTERVAL > now);
        let groups = self.due.iter().filter(|(_, due)| **due <= now);
        let groups: Vec<_> = groups.map(|(group, _)| group.clone()).collect();
        for group in &groups {
            self.due.remove(group);
            self.assigned.insert(group.clone(), now);
        }
        groups
    }
}

impl Cluster {
    /// Takes the due steps for the groups of a shard, if this node is its leader.
    ///
    /// Returns when the next step is due, unless a group changes earlier.
    ///
    /// # Errors
    /// The error of a step, which the caller has to repeat.
    pub async fn coordinate_groups(
        &self,
        shard: &Shard,
        round: &mut CoordinatorRound,
    ) -> Result<Option<Instant>> {
        if !shard.is_leader() {
            shard.take_changed_groups();
            shard.group_sessions().clear();
            shard.gateway_groups().clear();
            *round = CoordinatorRound::default();
            return Ok(None);
        }
        // Taken before the state is read, so that no change is missed.
        round.changed.append(&mut shard.take_changed_groups());
        if shard.read_groups(|groups| groups.is_empty()) {
            round.changed.clear();
            round.dropped.clear();
            shard.group_sessions().clear();
            return Ok(None);
        }
        if let Err(error) = shard.ready().await {
            // Members could not send heartbeats while the shard was not ready.
            round.restart(0, None);
            return Err(error);
        }
        let (term, leadership) = (shard.term(), shard.leadership_token());
        let is_new = !round.is_of(term);
        if is_new {
            // An outdated copy of the cluster's state may lack subscribed topics.
            self.catch_up().await?;
            shard.read_groups(|groups| shard.group_sessions().begin(groups));
            round.restart(term, Some(leadership));
        }
        for group in std::mem::take(&mut round.changed) {
            shard
                .read_groups(|groups| shard.group_sessions().sync_with(&group, groups.get(&group)));
            round.schedule(group);
        }
        let version = self.machine().read(ClusterState::version);
        if is_new || round.version != version {
            let with_members = |(_, group): &(&Arc<str>, &ConsumerGroup)| group.members().len() > 0;
            let groups: Vec<_> = shard.read_groups(|groups| {
                groups.iter().filter(with_members).map(|(name, _)| name.clone()).collect()
            });
            groups.into_iter().for_each(|group| round.schedule(group));
            self.note_dropped_topics(shard, round);
        }
        round.version = version;
        remove_silent_members(shard).await?;
        let due = round.take_due();
        let assigned = in_turns(&due, |group| self.assign_group(shard, group)).await;
        if let Err(error) = assigned {
            due.into_iter().for_each(|group| round.schedule(group));
            return Err(error);
        }
        // Runs last and in small batches, so that members never wait for many of these proposals.
        forget_dropped_topics(shard, &mut round.dropped).await?;
        let next = round.due.values().min().copied();
        let next = next.into_iter().chain(shard.group_sessions().next_expiry());
        Ok(next.chain(round.next_forgotten()).min())
    }

    async fn assign_group(&self, shard: &Shard, name: &Arc<str>) -> Result<()> {
        let Some((topics, assignment)) = self.next_assignment(shard, name).await? else {
            return Ok(());
        };
        let partitions: u64 = topics.iter().map(|topic| u64::from(topic.partition_count)).sum();
        if (assignment.owners.len() as u64) < partitions {
            tracing::warn!(
                group = %name,
                partitions,
                assigned = assignment.owners.len(),
                "leaving out partitions beyond the limits of a group"
            );
        }
        shard.metrics().on_group_assignment();
        shard.change_group(name, GroupChange::Assign(assignment)).await
    }

    /// Returns the next assignment of a group and the topics that the group subscribes to.
    ///
    /// `None` if the current assignment is up to date, or the group has no members.
    async fn next_assignment(
        &self,
        shard: &Shard,
        name: &str,
    ) -> Result<Option<(Vec<MatchedTopic>, Assignment)>> {
        // Read apart, so that only one lock is held at a time.
        let Some(group) = shard.read_groups(|groups| groups.snapshot(name)) else {
            return Ok(None);
        };
        if group.members().len() == 0 {
            return Ok(None);
        }
        if self.is_older_than_assignment(&group) {
            self.catch_up().await?;
        }
        let topics = matched_topics(self.machine(), &group);
        Ok(group.next_assignment(&topics).map(|assignment| (topics, assignment)))
    }

    /// Returns whether this node's copy of the cluster's state is older than the group's
    /// assignment.
    fn is_older_than_assignment(&self, group: &ConsumerGroup) -> bool {
        self.machine().read(|state| {
            group.assigned_topics().iter().any(|(id, count)| match state.topic_by_id(*id) {
                Some(topic) => topic.partition_count < *count,
                None => !state.is_deleted(*id),
            })
        })
    }

    /// Schedules the removal of the offsets in deleted topics.
    ///
    /// The offsets are kept for [`DELETED_OFFSETS_KEPT`], so that operators can see them. They are
    /// removed at once if another topic has the name, the group has many offsets, or the shard has
    /// many deleted topics.
    fn note_dropped_topics(&self, shard: &Shard, round: &mut CoordinatorRound) {
        let mut named: BTreeMap<Arc<str>, (bool, Vec<u64>)> = shard.read_groups(|groups| {
            let topics = |group: &ConsumerGroup| {
                let is_large = group.offsets().nth(DELETED_OFFSETS_ROWS_MAX).is_some();
                (is_large, group.topic_names().map(|(id, _)| id).collect())
            };
            groups.iter().map(|(name, group)| (name.clone(), topics(group))).collect()
        });
        named.retain(|_, (_, topic_ids)| {
            self.machine().read(|state| topic_ids.retain(|id| state.is_deleted(*id)));
            !topic_ids.is_empty()
        });
        let now = Instant::now();
        let before = std::mem::take(&mut round.dropped);
        let mut kept = 0;
        for (group, (is_large, topic_ids)) in named {
            let known = before.get(&group);
            let replaced = self.replaced_topics(shard, &group);
            let due = |topic_id: u64| {
                kept += 1;
                let at_once =
                    is_large || replaced.contains(&topic_id) || kept > DELETED_TOPICS_KEPT_MAX;
                let noted = known.and_then(|known| known.get(&topic_id)).copied();
                let due = noted.unwrap_or(now + DELETED_OFFSETS_KEPT);
                (topic_id, if at_once { now } else { due })
            };
            let topics = topic_ids.into_iter().map(due).collect();
            round.dropped.insert(group, topics);
        }
    }

    /// Returns the topics of a group whose names now belong to other topics.
    fn replaced_topics(&self, shard: &Shard, group: &str) -> BTreeSet<u64> {
        // Read apart, so that only one lock is held at a time.
        let Some(group) = shard.read_groups(|groups| groups.snapshot(group)) else {
            return BTreeSet::new();
        };
        self.machine().read(|state| {
            let is_replaced =
                |id: u64, name: &str| state.topic(name).is_some_and(|other| other.id != id);
            let replaced = group.topic_names().filter(|(id, name)| is_replaced(*id, name));
            replaced.map(|(id, _)| id).collect()
        })
    }

    /// Returns the shard of a group; `None` if the group cannot exist yet.
    ///
    /// # Errors
    /// [`Error::Unimplemented`] before the cluster's protocol has groups.
    pub async fn group_shard(&self, group: &str) -> Result<Option<u64>> {
        if let Some(shard) = self.machine().read(|state| state.group_shard(group)) {
            return Ok(Some(shard));
        }
        self.catch_up().await?;
        if self.protocol() < GROUPS {
            // A new cluster raises its protocol right after its start.
            let mut versions = self.machine().watch();
            let raised = versions.wait_for(|_| self.protocol() >= GROUPS);
            let _ = tokio::time::timeout(PROTOCOL_WAIT_MAX, raised).await;
        }
        if self.protocol() < GROUPS {
            return Err(Error::Unimplemented {
                what: "a consumer group before every node of the cluster is upgraded",
            });
        }
        Ok(self.machine().read(|state| state.group_shard(group)))
    }

    /// Assigns shards to the slots of groups. Happens once in the life of a cluster.
    ///
    /// # Errors
    /// [`Error::NoLeader`] while no shard is registered, and the errors of [`Self::command`] and
    /// [`Self::catch_up`].
    pub async fn assign_group_slots(&self) -> Result<()> {
        match self.command(ClusterCommand::AssignGroupSlots).await? {
            ClusterReply::Done => self.catch_up().await,
            ClusterReply::Invalid { .. } => Err(Error::NoLeader { shard: 0 }),
            other => Err(unexpected(&other)),
        }
    }

    pub(super) async fn local_shard_index(&self, shard_id: u64) -> PeerResponse {
        let Ok(shard) = self.shard(shard_id) else { return PeerResponse::NotLeader };
        match shard.confirmed_index().await {
            Ok(index) => PeerResponse::Version(index),
            Err(_) => PeerResponse::NotLeader,
        }
    }

    /// Waits until this node's replica has everything that was acknowledged before the call.
    ///
    /// Works on followers and on the leader.
    ///
    /// # Errors
    /// [`Error::NoLeader`] if no leader responds, or the replica does not catch up in time.
    pub async fn catch_up_shard(&self, shard: &Shard) -> Result<()> {
        let deadline = Instant::now() + READY_WAIT_MAX;
        loop {
            if shard.is_leader() && shard.ready().await.is_ok() {
                return Ok(());
            }
            if let Some(leader) = shard.leader_hint()
                && leader.node_id != self.node_id()
            {
                let request = PeerRequest::ShardIndex(shard.id());
                if let Ok(PeerResponse::Version(index)) =
                    self.forward(leader.node_id, &request).await
                {
                    return shard.wait_applied(index).await;
                }
            }
            if Instant::now() >= deadline {
                return Err(Error::NoLeader { shard: shard.id() });
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }
}

/// Longest wait for the protocol of a new cluster.
const PROTOCOL_WAIT_MAX: Duration = Duration::from_secs(1);

/// Delay before another request to the leader of a shard.
const RETRY_DELAY: Duration = Duration::from_millis(20);

/// Runs a step for each item, [`GROUP_PROPOSALS_MAX`] concurrently. Returns the last error.
async fn in_turns<'a, T, F>(items: &'a [T], step: impl Fn(&'a T) -> F) -> Result<()>
where
    F: Future<Output = Result<()>>,
{
    let mut outcome = Ok(());
    for items in items.chunks(GROUP_PROPOSALS_MAX) {
        for stepped in join_all(items.iter().map(&step)).await {
            outcome = stepped.and(outcome);
        }
    }
    outcome
}

async fn remove_silent_members(shard: &Shard) -> Result<()> {
    let sessions = shard.group_sessions();
    let expired = sessions.expired();
    let entries = expired.iter().flat_map(|(group, members)| {
        members.chunks(MEMBERS_PER_ENTRY).map(move |members| (group, members))
    });
    let entries: Vec<_> = entries.collect();
    in_turns(&entries, |&(group, members)| async move {
        // Some members may have sent heartbeats during an earlier proposal.
        let members = sessions.end_expired(group, members);
        if !members.is_empty() {
            shard.metrics().on_expired_members(members.len() as u64);
            tracing::info!(%group, ?members, "removing members past their session timeouts");
            shard.change_group(group, GroupChange::RemoveMembers { members }).await?;
        }
        shard.read_groups(|groups| sessions.sync_with(group, groups.get(group)));
        Ok(())
    })
    .await
}

/// Removes the offsets of due dropped topics, with one entry for each of a few groups.
async fn forget_dropped_topics(
    shard: &Shard,
    dropped: &mut BTreeMap<Arc<str>, BTreeMap<u64, Instant>>,
) -> Result<()> {
    let now = Instant::now();
    let due = |(group, topics): (&Arc<str>, &BTreeMap<u64, Instant>)| {
        let topic_ids = topics.iter().filter(|(_, due)| **due <= now).map(|(id, _)| *id);
        let topic_ids: Vec<u64> = topic_ids.take(ROWS_PER_ENTRY_MAX).collect();
        (!topic_ids.is_empty()).then(|| (group.clone(), topic_ids))
    };
    let next: Vec<_> = dropped.iter().filter_map(due).take(GROUP_PROPOSALS_MAX).collect();
    in_turns(&next, |(group, topic_ids)| {
        tracing::info!(%group, ?topic_ids, "forgetting offsets of deleted topics");
        shard.change_group(group, GroupChange::ForgetTopics { topic_ids: topic_ids.clone() })
    })
    .await?;
    for (group, forgotten) in next {
        let Some(topic_ids) = dropped.get_mut(&group) else { continue };
        topic_ids.retain(|topic_id, _| !forgotten.contains(topic_id));
        if topic_ids.is_empty() {
            dropped.remove(&group);
        }
    }
    Ok(())
}

/// Returns the topics that a group subscribes to, in the order of their ids.
pub fn matched_topics(machine: &ClusterMachine, group: &ConsumerGroup) -> Vec<MatchedTopic> {
    let subscriptions = group.subscriptions();
    let (patterns, names): (Vec<&str>, Vec<&str>) =
        subscriptions.into_iter().partition(|text| is_pattern(text));
    let mut topics: BTreeMap<u64, Arc<TopicInfo>> = machine.read(|state| {
        let named = names.into_iter().filter_map(|name| state.topic(name));
        named.map(|topic| (topic.id, topic.clone())).collect()
    });
    if !patterns.is_empty() {
        // Read after the names, so that the newer copy of a topic that matches both is kept.
        let snapshot = machine.topic_snapshot();
        topics.extend(snapshot.matched_by(&patterns).map(|topic| (topic.id, topic.clone())));
    }
    let matched = topics.into_values().map(|topic| MatchedTopic {
        topic_id: topic.id,
        name: topic.name.clone(),
        partition_count: topic.partition_count,
    });
    matched.collect()
}

/// Returns the subscribed names and patterns that match no topic.
pub fn unmatched<'a>(machine: &ClusterMachine, topics: &'a [String]) -> BTreeSet<&'a str> {
    let (patterns, names): (Vec<&str>, Vec<&str>) =
        topics.iter().map(String::as_str).partition(|text| is_pattern(text));
    let mut unmatched: BTreeSet<&str> = machine
        .read(|state| names.into_iter().filter(|name| state.topic(name).is_none()).collect());
    if !patterns.is_empty() {
        let snapshot = machine.topic_snapshot();
        unmatched.extend(patterns.into_iter().filter(|pattern| !snapshot.has_match(pattern)));
    }
    unmatched
}
