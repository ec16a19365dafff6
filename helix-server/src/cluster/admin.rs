//! Changing topics: a command to shard 0 first, then control entries to the data shards.
//! The second step is taken by each shard's leader for itself, from shard 0's state, until it
//! holds: also after a crash between the two, and whoever leads by then.

use std::sync::Arc;

use tokio::time::Instant;

use super::door::{Cluster, unexpected};
use super::state::{ClusterState, Reply};
use super::topic::TopicInfo;
use crate::error::{Error, Result};
use crate::limits;
use crate::log::{
    ClusterCommand, NewTopic, PartitionSettings, ROWS_PER_ENTRY_MAX, SettingsMask, ShardCommand,
    ShardState,
};
use crate::shard::Shard;

/// What a new topic is to be.
#[derive(Debug, Clone)]
pub struct TopicSpec {
    pub name: String,
    pub partition_count: u32,
    /// 0: the default.
    pub replication_factor: u32,
    pub settings: PartitionSettings,
}

impl Cluster {
    /// Creates a topic; succeeds without effect where an equal one exists.
    pub async fn create_topic(
        &self,
        spec: TopicSpec,
        validate_only: bool,
    ) -> Result<Arc<TopicInfo>> {
        let nodes = u32::try_from(self.nodes().len()).unwrap_or(u32::MAX);
        if spec.replication_factor != 0 && spec.replication_factor != nodes {
            // Every shard has a replica on each node, and a topic has no shards of its own.
            let what = "a replication_factor other than the number of nodes";
            return Err(Error::Unimplemented { what });
        }
        if self.machine().read(|state| state.shards().is_empty()) {
            self.catch_up().await?;
        }
        let new = NewTopic {
            name: spec.name.clone(),
            partition_count: spec.partition_count,
            replication_factor: nodes,
            settings: spec.settings,
            shards: self.machine().read(|state| state.shards().iter().copied().collect()),
            requested_at_us: self.clock.now_us(),
        };
        if validate_only {
            self.catch_up().await?;
            let reply = self.machine().read(|state| state.preview(&new));
            return topic_of(reply, &spec.name);
        }
        let reply = self.command(ClusterCommand::CreateTopic(new)).await?;
        self.opened(topic_of(reply, &spec.name)?).await
    }

    /// Takes the settings that `fields` names from `settings`.
    pub async fn update_topic(
        &self,
        name: &str,
        settings: PartitionSettings,
        fields: SettingsMask,
    ) -> Result<Arc<TopicInfo>> {
        let command = ClusterCommand::UpdateTopic { name: name.to_owned(), settings, fields };
        self.opened(topic_of(self.command(command).await?, name)?).await
    }

    /// Raises the number of partitions to `partition_count`.
    pub async fn add_partitions(&self, name: &str, partition_count: u32) -> Result<Arc<TopicInfo>> {
        let command = ClusterCommand::AddPartitions { name: name.to_owned(), partition_count };
        self.opened(topic_of(self.command(command).await?, name)?).await
    }

    /// Deletes a topic with its data; succeeds where there is none to delete any more.
    pub async fn delete_topic(&self, name: &str) -> Result<()> {
        // The command has the name alone: what it is to delete is what has that name now.
        self.catch_up().await?;
        let topic = self.topic(name)?;
        self.delete(&topic).await?;
        for &shard_id in topic.shards() {
            // One that is withheld here shows nothing; its other replicas do the work.
            let Ok(shard) = self.shard(shard_id) else { continue };
            let is_gone = |state: &ShardState| state.topic(topic.id).is_none();
            self.wait_shard(&shard, is_gone).await.map_err(made)?;
        }
        // Shard 0's entry may come here later than what its leader made of it.
        if self.machine().read(|state| !state.is_deleted(topic.id)) {
            self.catch_up().await.map_err(made)?;
        }
        Ok(())
    }

    /// Has shard 0 delete this topic. While it is open whether that was done, it is tried again
    /// only after a look that finds the topic still there.
    async fn delete(&self, topic: &TopicInfo) -> Result<()> {
        let deadline = Instant::now() + limits::READY_WAIT_MAX;
        let mut open: Option<Error> = None;
        loop {
            let command = ClusterCommand::DeleteTopic { name: topic.name.clone() };
            let error = match self.command(command).await {
                Ok(Reply::Done) => return Ok(()),
                // An attempt before this one did it.
                Ok(Reply::TopicNotFound { .. }) if open.is_some() => return Ok(()),
                Ok(other) => return topic_of(other, &topic.name).map(drop),
                Err(error @ Error::OutcomeUnknown { .. }) => error,
                Err(error) => return Err(open.unwrap_or(error)),
            };
            if Instant::now() >= deadline || self.catch_up().await.is_err() {
                return Err(error);
            }
            if self.machine().read(|state| state.is_deleted(topic.id)) {
                return Ok(());
            }
            open = Some(error);
        }
    }

    pub fn topic(&self, name: &str) -> Result<Arc<TopicInfo>> {
        self.machine()
            .read(|state| state.topic(name).cloned())
            .ok_or_else(|| Error::TopicNotFound { topic: name.to_owned() })
    }

    /// Waits until a topic is as it should be in all of its shards, and known here.
    async fn opened(&self, topic: Arc<TopicInfo>) -> Result<Arc<TopicInfo>> {
        self.wait_version(topic.settings.version).await.map_err(made)?;
        for &shard_id in topic.shards() {
            let wanted = partitions_in(&topic, shard_id);
            if wanted > 0 {
                let Ok(shard) = self.shard(shard_id) else { continue };
                let version = topic.settings.version;
                let is_open = |found: (u64, usize)| found.0 >= version && found.1 >= wanted;
                let is_there = |state: &ShardState| state.topic(topic.id).is_some_and(is_open);
                self.wait_shard(&shard, is_there).await.map_err(made)?;
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
                    "the change is made, but shard {} has not followed it yet",
                    shard.id()
                ),
            }),
        }
    }

    /// Brings the shards of a node that is alone to what shard 0 says.
    pub async fn settle(&self) -> Result<()> {
        for shard_id in self.machine().read(|state| state.shards().clone()) {
            let shard = self.shard(shard_id)?;
            self.settle_shard(&shard).await?;
        }
        Ok(())
    }

    /// Proposes to a shard that this node leads what it lacks of topics and settings, and that it
    /// drop what is deleted.
    pub async fn settle_shard(&self, shard: &Shard) -> Result<()> {
        let (version, topics): (u64, Vec<Arc<TopicInfo>>) =
            self.machine().read(|state| (state.version(), state.all_topics().cloned().collect()));
        for topic in &topics {
            self.settle_topic(shard, topic, version).await?;
        }
        let present: Vec<u64> = shard.read_state(|state| state.topics().map(|t| t.0).collect());
        for topic_id in present {
            if self.machine().read(|state| state.is_deleted(topic_id)) {
                let cluster_version = self.machine().read(ClusterState::version);
                shard.command(ShardCommand::DropTopic { cluster_version, topic_id }).await?;
            }
        }
        Ok(())
    }

    async fn settle_topic(&self, shard: &Shard, topic: &TopicInfo, version: u64) -> Result<()> {
        let (topic_id, settings) = (topic.id, topic.settings);
        let wanted = partitions_in(topic, shard.id());
        if wanted == 0 {
            return Ok(());
        }
        let present = shard.read_state(|state| state.topic(topic_id));
        let (known_version, count) = present.unwrap_or((settings.version, 0));
        if count < wanted {
            for part in topic.runs(shard.id()).chunks(ROWS_PER_ENTRY_MAX) {
                let runs = part.to_vec();
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

/// What fails once shard 0 has made a change does not say that it was not made.
fn made(error: Error) -> Error {
    match error {
        Error::OutcomeUnknown { .. } => error,
        other => Error::OutcomeUnknown {
            reason: format!("the change is made, but this node does not see it yet: {other}"),
        },
    }
}

fn topic_of(reply: Reply, name: &str) -> Result<Arc<TopicInfo>> {
    match reply {
        Reply::Topic(topic) | Reply::AlreadyExistsEqual(topic) => Ok(topic),
        Reply::AlreadyExistsDifferent { difference, .. } => {
            Err(Error::TopicAlreadyExists { topic: name.to_owned(), difference })
        }
        Reply::TopicNotFound { .. } => Err(Error::TopicNotFound { topic: name.to_owned() }),
        Reply::Invalid { field, what } => Err(Error::InvalidArgument { field, what }),
        other => Err(unexpected(&other)),
    }
}
