//! Creates, updates and deletes topics: first a command to shard 0, then control entries in the
//! data shards. Each data shard's leader derives the second step from shard 0's state and repeats
//! it until it is applied. So it also happens after a crash between the two steps or a failover.

use std::sync::Arc;

use tokio::time::Instant;

use super::client::{Cluster, unexpected};
use super::state::ClusterState;
use crate::error::{Error, Result};
use crate::limits;
use crate::log::{
    ClusterCommand, ClusterReply, CreateTopic, PartitionRun, PartitionSettings, ROWS_PER_ENTRY_MAX,
    SettingsMask, ShardCommand, ShardState, TopicInfo,
};
use crate::protocol;
use crate::raft::node_and_generation;
use crate::shard::Shard;

/// Name and settings of a topic to create.
#[derive(Debug, Clone)]
pub struct TopicSpec {
    pub name: String,
    pub partition_count: u32,
    /// Number of replicas of its shards; 0 for the cluster's number.
    pub replication_factor: u32,
    pub settings: PartitionSettings,
}

impl Cluster {
    /// Creates a topic. Succeeds without effect if an equal one exists.
    ///
    /// # Errors
    /// [`Error::TopicAlreadyExists`] if the settings differ, [`Error::InvalidArgument`],
    /// [`Error::ChangeInProgress`] while shards with its replication factor are added,
    /// [`Error::NoLeader`] while the cluster forms, and the errors of [`Self::command`].
    pub async fn create_topic(
        &self,
        spec: TopicSpec,
        validate_only: bool,
    ) -> Result<Arc<TopicInfo>> {
        let is_forming =
            || self.nodes().is_empty() || self.machine().read(|state| state.shards().is_empty());
        if is_forming() {
            self.catch_up().await?;
        }
        if is_forming() {
            // The members register within moments of the first election.
            return Err(Error::NoLeader { shard: 0 });
        }
        let asked = spec.replication_factor;
        if asked != 0 && self.topic(&spec.name).is_ok() {
            // This copy may be older than a deletion of the topic.
            self.catch_up().await?;
        }
        if let Some(known) = self.topic(&spec.name).ok().filter(|_| asked != 0) {
            // Nothing is added for a topic that cannot be created.
            let replicas = self.replicas_of(&known);
            if replicas != asked {
                let difference = format!("replication_factor is {replicas}, not {asked}");
                return Err(Error::TopicAlreadyExists { topic: spec.name, difference });
            }
        }
        let new = CreateTopic {
            name: spec.name.clone(),
            partition_count: spec.partition_count,
            replication_factor: if asked == 0 { self.replica_count() } else { asked },
            settings: spec.settings,
            shards: self.shards_for(&spec, validate_only).await?,
            requested_at_us: self.clock.now_us(),
        };
        if validate_only {
            self.catch_up().await?;
            let reply = self.machine().read(|state| state.preview(&new));
            return topic_from_reply(reply, &spec.name);
        }
        let reply = self.command(ClusterCommand::CreateTopic(new)).await?;
        self.wait_until_open(topic_from_reply(reply, &spec.name)?).await
    }

    /// Replaces the settings that `fields` names with those in `settings`.
    ///
    /// Here and below, the topic must have the id `expected_id`; 0 accepts any.
    ///
    /// # Errors
    /// [`Error::TopicNotFound`], [`Error::TopicRecreated`], [`Error::InvalidArgument`], and the
    /// errors of [`Self::command`].
    pub async fn update_topic(
        &self,
        name: &str,
        expected_id: u64,
        settings: PartitionSettings,
        fields: SettingsMask,
    ) -> Result<Arc<TopicInfo>> {
        let change = self.begin_change(name, expected_id).await?;
        let (name, topic_id) = (name.to_owned(), change.command_id);
        let command = ClusterCommand::UpdateTopic { name, topic_id, settings, fields };
        self.wait_until_open(change.topic(self.command(command).await?)?).await
    }

    /// Raises the number of partitions to `partition_count`.
    ///
    /// # Errors
    /// As [`Self::update_topic`].
    pub async fn add_partitions(
        &self,
        name: &str,
        expected_id: u64,
        partition_count: u32,
    ) -> Result<Arc<TopicInfo>> {
        let change = self.begin_change(name, expected_id).await?;
        let (name, topic_id) = (name.to_owned(), change.command_id);
        let command = ClusterCommand::AddPartitions { name, topic_id, partition_count };
        self.wait_until_open(change.topic(self.command(command).await?)?).await
    }

    /// Returns the topic that has the name now, and the id to name in the command.
    ///
    /// The command must not change a topic that gets the name before a repeated attempt.
    async fn begin_change(&self, name: &str, expected_id: u64) -> Result<TopicChange> {
        self.catch_up().await?;
        let topic = self.topic_with_id(name, expected_id)?;
        let has_ids = self.protocol() >= protocol::TOPIC_IDS;
        let command_id = if has_ids { topic.id } else { 0 };
        Ok(TopicChange { topic, expected_id, command_id })
    }

    /// Deletes a topic with its data. Succeeds if another attempt has deleted it meanwhile.
    ///
    /// # Errors
    /// As [`Self::update_topic`]. [`Error::OutcomeUnknown`] also if the topic is deleted and this
    /// node has not applied it in time.
    pub async fn delete_topic(&self, name: &str, expected_id: u64) -> Result<()> {
        let change = self.begin_change(name, expected_id).await?;
        self.delete(&change).await?;
        let topic = change.topic;
        for shard_id in topic.shards() {
            // A shard that is not open on this node cannot be checked; its other replicas apply it.
            let Ok(shard) = self.shard(shard_id) else { continue };
            let is_gone = |state: &ShardState| state.topic(topic.id).is_none();
            self.wait_shard(&shard, is_gone).await.map_err(already_applied)?;
        }
        // This node may apply shard 0's entry later than the entries that follow from it.
        if self.machine().read(|state| !state.is_deleted(topic.id)) {
            self.catch_up().await.map_err(already_applied)?;
        }
        Ok(())
    }

    /// Deletes this topic from shard 0's state. After an attempt with an unknown outcome it retries
    /// only if the topic still exists.
    async fn delete(&self, change: &TopicChange) -> Result<()> {
        let topic = &change.topic;
        let deadline = Instant::now() + limits::READY_WAIT_MAX;
        let mut unsettled: Option<Error> = None;
        loop {
            let (name, topic_id) = (topic.name.clone(), change.command_id);
            let command = ClusterCommand::DeleteTopic { name, topic_id };
            let error = match self.command(command).await {
                Ok(ClusterReply::Done) => return Ok(()),
                // An earlier attempt has deleted it.
                Ok(ClusterReply::TopicNotFound { .. } | ClusterReply::TopicRecreated { .. })
                    if unsettled.is_some() =>
                {
                    return Ok(());
                }
                Ok(other) => return change.topic(other).map(drop),
                Err(error @ Error::OutcomeUnknown { .. }) => error,
                Err(error) => return Err(unsettled.unwrap_or(error)),
            };
            if Instant::now() >= deadline || self.catch_up().await.is_err() {
                return Err(error);
            }
            if self.machine().read(|state| state.is_deleted(topic.id)) {
                return Ok(());
            }
            unsettled = Some(error);
        }
    }

    /// Returns the topic with this name, as far as this node knows.
    ///
    /// # Errors
    /// [`Error::TopicNotFound`], also for a topic that is too new for this node.
    pub fn topic(&self, name: &str) -> Result<Arc<TopicInfo>> {
        self.machine()
            .read(|state| state.topic(name).cloned())
            .ok_or_else(|| Error::TopicNotFound { topic: name.to_owned() })
    }

    /// Like [`Self::topic`], if the topic has the expected id; 0 accepts any.
    ///
    /// # Errors
    /// [`Error::TopicRecreated`] with another id, which is lower than the expected one only if this
    /// node's copy of the state is older than the topic.
    pub fn topic_with_id(&self, name: &str, expected_id: u64) -> Result<Arc<TopicInfo>> {
        let topic = match self.topic(name) {
            Err(_) if self.machine().read(|state| state.is_deleted(expected_id)) => {
                return Err(Error::TopicDeleted { topic: name.to_owned(), expected: expected_id });
            }
            found => found?,
        };
        if expected_id == 0 || topic.id == expected_id {
            return Ok(topic);
        }
        let (current, topic) = (topic.id, name.to_owned());
        Err(Error::TopicRecreated { topic, expected: expected_id, current })
    }

    /// Replaces the error of a call on a partition that was deleted with the state of its topic:
    /// deleted, or created again.
    pub async fn explain_deleted(&self, topic: &TopicInfo, error: Error) -> Error {
        if !matches!(error, Error::PartitionDeleted { .. }) {
            return error;
        }
        // Without the leader of shard 0 the copy may be too old to explain the deletion.
        let _ = self.catch_up().await;
        self.topic_with_id(&topic.name, topic.id).map_or_else(|why| why, |_| error)
    }

    /// Waits until this node knows the topic and all its shards have its partitions and settings.
    async fn wait_until_open(&self, topic: Arc<TopicInfo>) -> Result<Arc<TopicInfo>> {
        self.wait_version(topic.settings.version).await.map_err(already_applied)?;
        for shard_id in topic.shards() {
            let wanted = partitions_in(&topic, shard_id);
            if wanted > 0 {
                let Ok(shard) = self.shard(shard_id) else { continue };
                let version = topic.settings.version;
                let is_open = |found: (u64, usize)| found.0 >= version && found.1 >= wanted;
                let is_complete = |state: &ShardState| state.topic(topic.id).is_some_and(is_open);
                self.wait_shard(&shard, is_complete).await.map_err(already_applied)?;
            }
        }
        Ok(topic)
    }

    async fn wait_shard(&self, shard: &Shard, holds: impl Fn(&ShardState) -> bool) -> Result<()> {
        let mut changes = shard.watch_changes();
        let settled = changes.wait_for(|_| shard.read_state(&holds));
        match tokio::time::timeout(limits::READY_WAIT_MAX, settled).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err(Error::Draining),
            Err(_) => Err(Error::OutcomeUnknown {
                reason: format!(
                    "the change is committed, but shard {} has not applied it yet",
                    shard.id()
                ),
            }),
        }
    }

    /// Propagates all topics to the shards of a single-node cluster.
    ///
    /// # Errors
    /// As [`Self::propagate_to_shard`], and if a shard is not open on this node.
    pub async fn propagate_all(&self) -> Result<()> {
        for shard_id in self.machine().read(|state| state.shards().clone()) {
            let shard = self.shard(shard_id)?;
            self.propagate_to_shard(&shard).await?;
        }
        Ok(())
    }

    /// Returns the numbers of topics and of their partitions that this node knows.
    pub fn topic_counts(&self) -> (u64, u64) {
        self.machine().read(|state| (state.all_topics().len() as u64, state.partition_count()))
    }

    /// Proposes to a shard that this node leads the partitions and settings that it lacks, and
    /// drops its deleted topics.
    ///
    /// # Errors
    /// The errors of [`Shard::command`]. A repetition continues.
    pub async fn propagate_to_shard(&self, shard: &Shard) -> Result<()> {
        let (node_id, generation) = node_and_generation(shard.replica().id());
        let known = self.machine().read(|state| {
            let is_named = state.members().names_replica(shard.id(), node_id, generation);
            is_named.then(|| (state.version(), state.all_topics().cloned().collect::<Vec<_>>()))
        });
        // From one version of the state: a replica that was given up has no part of its topics.
        let Some((version, topics)) = known else { return Ok(()) };
        for topic in &topics {
            self.propagate_topic(shard, topic, version).await?;
        }
        let existing: Vec<u64> = shard.read_state(|state| state.topics().map(|t| t.0).collect());
        for topic_id in existing {
            if self.machine().read(|state| state.is_deleted(topic_id)) {
                let cluster_version = self.machine().read(ClusterState::version);
                shard.command(ShardCommand::DropTopic { cluster_version, topic_id }).await?;
            }
        }
        Ok(())
    }

    async fn propagate_topic(&self, shard: &Shard, topic: &TopicInfo, version: u64) -> Result<()> {
        let (topic_id, settings) = (topic.id, topic.settings);
        let wanted = partitions_in(topic, shard.id());
        if wanted == 0 {
            return Ok(());
        }
        let existing = shard.read_state(|state| state.topic(topic_id));
        let (known_version, count) = existing.unwrap_or((settings.version, 0));
        if count < wanted {
            for runs in entries_of(topic.runs(shard.id())) {
                let cluster_version = version;
                let command =
                    ShardCommand::CreatePartitions { cluster_version, topic_id, runs, settings };
                shard.command(command).await?;
            }
        }
        if known_version < settings.version {
            shard.command(ShardCommand::UpdateSettings { topic_id, settings }).await?;
        }
        Ok(())
    }
}

fn partitions_in(topic: &TopicInfo, shard_id: u64) -> usize {
    topic.runs(shard_id).iter().map(|run| run.count as usize).sum()
}

/// Divides runs into entries, so that each entry has the next partitions in the order of their
/// numbers: runs of one list of shards interleave.
///
/// A split counts the partitions of a topic in that order, also while some are still to be created.
fn entries_of(runs: Vec<PartitionRun>) -> Vec<Vec<PartitionRun>> {
    let mut entries: Vec<Vec<PartitionRun>> = Vec::new();
    let (mut group, mut last) = (Vec::new(), 0);
    let mut add = |group: &mut Vec<PartitionRun>| match entries.last_mut() {
        Some(entry) if entry.len() + group.len() <= ROWS_PER_ENTRY_MAX => entry.append(group),
        _ => entries.push(std::mem::take(group)),
    };
    for run in runs {
        if run.first_number > last && !group.is_empty() {
            add(&mut group);
        }
        last = last.max(run.first_number + run.stride * (run.count - 1));
        group.push(run);
    }
    if !group.is_empty() {
        add(&mut group);
    }
    entries
}

/// Turns an error after shard 0 has committed a change into [`Error::OutcomeUnknown`].
fn already_applied(error: Error) -> Error {
    match error {
        Error::OutcomeUnknown { .. } => error,
        other => Error::OutcomeUnknown {
            reason: format!(
                "the change is committed, but this node has not applied it yet: {other}"
            ),
        },
    }
}

/// A change of an existing topic.
struct TopicChange {
    topic: Arc<TopicInfo>,
    expected_id: u64,
    /// Id that the command names; 0 before protocol version [`protocol::TOPIC_IDS`].
    command_id: u64,
}

impl TopicChange {
    /// Converts the reply to the command.
    fn topic(&self, reply: ClusterReply) -> Result<Arc<TopicInfo>> {
        match reply {
            ClusterReply::TopicRecreated { name, topic_id } if self.expected_id > 0 => {
                let (expected, current) = (self.expected_id, topic_id);
                Err(Error::TopicRecreated { topic: name, expected, current })
            }
            ClusterReply::TopicNotFound { name } if self.expected_id > 0 => {
                Err(Error::TopicDeleted { topic: name, expected: self.expected_id })
            }
            // The topic was deleted during the call, which names no id.
            ClusterReply::TopicRecreated { name, .. } => Err(Error::TopicNotFound { topic: name }),
            other => topic_from_reply(other, &self.topic.name),
        }
    }
}

fn topic_from_reply(reply: ClusterReply, name: &str) -> Result<Arc<TopicInfo>> {
    match reply {
        ClusterReply::Topic(topic) | ClusterReply::AlreadyExistsEqual(topic) => Ok(topic),
        ClusterReply::AlreadyExistsDifferent { difference, .. } => {
            Err(Error::TopicAlreadyExists { topic: name.to_owned(), difference })
        }
        ClusterReply::TopicNotFound { .. } => Err(Error::TopicNotFound { topic: name.to_owned() }),
        ClusterReply::Invalid { field, what } => Err(Error::InvalidArgument { field, what }),
        other => Err(unexpected(&other)),
    }
}
