//! Changing the cluster's state: a command to shard 0 first, then control entries to the shards.
//! The second step is repeated until it holds, also after a crash between the two.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::machine::ClusterMachine;
use super::state::{ClusterState, Reply};
use super::topic::TopicInfo;
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::limits;
use crate::log::{
    ClusterCommand, Head, NewTopic, PartitionSettings, ROWS_PER_ENTRY_MAX, SettingsMask,
    ShardCommand, Verdict,
};
use crate::raft::{Command, ProposeError, Replica};
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

/// Producer ids that this node may hand out.
#[derive(Debug, Default)]
struct Lease {
    next: u64,
    end: u64,
}

/// The door to shard 0.
#[derive(Debug)]
pub struct Cluster {
    replica: Replica,
    machine: Arc<ClusterMachine>,
    shards: std::sync::OnceLock<BTreeMap<u64, Arc<Shard>>>,
    clock: Arc<dyn Clock>,
    lease: Mutex<Lease>,
    /// One change of topics at a time: their second steps must not overtake each other.
    changing: tokio::sync::Mutex<()>,
}

impl Cluster {
    pub fn new(replica: Replica, machine: Arc<ClusterMachine>, clock: Arc<dyn Clock>) -> Self {
        Self {
            replica,
            machine,
            shards: std::sync::OnceLock::new(),
            clock,
            lease: Mutex::default(),
            changing: tokio::sync::Mutex::default(),
        }
    }

    /// Names the data shards of this node, once they are open.
    pub fn set_shards(&self, shards: BTreeMap<u64, Arc<Shard>>) {
        // Ignored: a node opens its shards once.
        let _ = self.shards.set(shards);
    }

    pub fn machine(&self) -> &Arc<ClusterMachine> {
        &self.machine
    }

    pub fn replica(&self) -> &Replica {
        &self.replica
    }

    fn shard(&self, id: u64) -> Result<&Arc<Shard>> {
        self.shards.get().and_then(|shards| shards.get(&id)).ok_or_else(|| Error::CorruptLog {
            what: format!("shard {id} could not be opened on this node"),
        })
    }

    /// Proposes a command to shard 0 and waits for its reply.
    pub async fn command(&self, command: ClusterCommand) -> Result<Reply> {
        if !self.replica.wait_ready(limits::READY_WAIT_MAX).await {
            return Err(Error::NoLeader { shard: 0 });
        }
        let command = Command::control(Head::Cluster(command));
        let outcome = self.replica.propose(command, None).await.map_err(failed)?;
        match tokio::time::timeout(limits::COMMIT_WAIT_MAX, outcome).await {
            Ok(Ok(Verdict::Cluster(reply))) => Ok(reply),
            Ok(Ok(other)) => {
                Err(Error::OutcomeUnknown { reason: format!("shard 0 said {other:?}") })
            }
            Ok(Err(error)) => Err(failed(error)),
            Err(_) => Err(Error::OutcomeUnknown {
                reason: format!("not committed within {:?}", limits::COMMIT_WAIT_MAX),
            }),
        }
    }

    /// Creates a topic; succeeds without effect where an equal one exists.
    pub async fn create_topic(
        &self,
        spec: TopicSpec,
        validate_only: bool,
    ) -> Result<Arc<TopicInfo>> {
        let _changing = self.changing.lock().await;
        if spec.replication_factor > 1 {
            return Err(Error::InvalidArgument {
                field: "replication_factor",
                what: format!(
                    "{} replicas need as many nodes, there is 1",
                    spec.replication_factor
                ),
            });
        }
        let shards = self.shards.get().map(|shards| shards.keys().copied().collect());
        let new = NewTopic {
            name: spec.name.clone(),
            partition_count: spec.partition_count,
            replication_factor: 1,
            settings: spec.settings,
            shards: shards.unwrap_or_default(),
            requested_at_us: self.clock.now_us(),
        };
        if validate_only {
            let reply = self.machine.read(|state| state.preview(&new));
            return topic_of(reply, &spec.name);
        }
        let reply = self.command(ClusterCommand::CreateTopic(new)).await?;
        let topic = topic_of(reply, &spec.name)?;
        self.settle_topic(&topic).await?;
        Ok(topic)
    }

    /// Takes the settings that `fields` names from `settings`.
    pub async fn update_topic(
        &self,
        name: &str,
        settings: PartitionSettings,
        fields: SettingsMask,
    ) -> Result<Arc<TopicInfo>> {
        let _changing = self.changing.lock().await;
        let command = ClusterCommand::UpdateTopic { name: name.to_owned(), settings, fields };
        let topic = topic_of(self.command(command).await?, name)?;
        self.settle_topic(&topic).await?;
        Ok(topic)
    }

    /// Raises the number of partitions to `partition_count`.
    pub async fn add_partitions(&self, name: &str, partition_count: u32) -> Result<Arc<TopicInfo>> {
        let _changing = self.changing.lock().await;
        let command = ClusterCommand::AddPartitions { name: name.to_owned(), partition_count };
        let topic = topic_of(self.command(command).await?, name)?;
        self.settle_topic(&topic).await?;
        Ok(topic)
    }

    /// Deletes a topic with its data; succeeds where there is none to delete any more.
    pub async fn delete_topic(&self, name: &str) -> Result<()> {
        let _changing = self.changing.lock().await;
        let topic = self.topic(name)?;
        match self.command(ClusterCommand::DeleteTopic { name: name.to_owned() }).await? {
            Reply::Done => self.drop_everywhere(&topic).await,
            other => topic_of(other, name).map(drop),
        }
    }

    /// Gives a named producer its id and the next epoch, which fences the earlier ones.
    pub async fn init_producer(&self, name: &str) -> Result<(u64, u32)> {
        let command = ClusterCommand::InitProducer { name: name.to_owned() };
        match self.command(command).await? {
            Reply::Producer { producer_id, epoch } => Ok((producer_id, epoch)),
            Reply::Invalid { field, what } => Err(Error::InvalidArgument { field, what }),
            other => Err(unexpected(&other)),
        }
    }

    /// A producer id that nobody else has or gets.
    pub async fn next_producer_id(&self) -> Result<u64> {
        loop {
            {
                let mut lease = self.lease.lock().expect("no panic while it is held");
                if lease.next < lease.end {
                    lease.next += 1;
                    return Ok(lease.next - 1);
                }
            }
            let command =
                ClusterCommand::LeaseProducerIds { count: limits::PRODUCER_IDS_PER_LEASE };
            match self.command(command).await? {
                Reply::ProducerIds { first, count } => {
                    let mut lease = self.lease.lock().expect("no panic while it is held");
                    *lease = Lease { next: first, end: first + u64::from(count) };
                }
                other => return Err(unexpected(&other)),
            }
        }
    }

    pub fn topic(&self, name: &str) -> Result<Arc<TopicInfo>> {
        self.machine
            .read(|state| state.topic(name).cloned())
            .ok_or_else(|| Error::TopicNotFound { topic: name.to_owned() })
    }

    /// Brings the shards to what shard 0 says, after a start: a crash may have come between the
    /// two steps of a change.
    pub async fn settle(&self) -> Result<()> {
        let _changing = self.changing.lock().await;
        let topics: Vec<_> = self.machine.read(|state| state.all_topics().cloned().collect());
        for topic in &topics {
            self.settle_topic(topic).await?;
        }
        for shard in self.shards.get().into_iter().flat_map(BTreeMap::values) {
            let present: Vec<u64> = shard.read_state(|state| state.topics().map(|t| t.0).collect());
            for topic_id in present {
                if self.machine.read(|state| state.is_deleted(topic_id)) {
                    self.drop_from(shard, topic_id).await?;
                }
            }
        }
        Ok(())
    }

    /// Proposes to each shard of the topic what it lacks of partitions and settings.
    async fn settle_topic(&self, topic: &TopicInfo) -> Result<()> {
        let cluster_version = self.machine.read(ClusterState::version);
        let (topic_id, settings) = (topic.id, topic.settings);
        for &shard_id in topic.shards() {
            let runs = topic.runs(shard_id);
            let wanted: usize = runs.iter().map(|run| run.count as usize).sum();
            if wanted == 0 {
                continue;
            }
            let shard = self.shard(shard_id)?;
            let present = shard.read_state(|state| {
                let mut topics = state.topics();
                topics.find(|t| t.0 == topic_id).map(|t| (t.2, t.1.version))
            });
            let (count, version) = present.unwrap_or((0, settings.version));
            if count < wanted {
                for part in runs.chunks(ROWS_PER_ENTRY_MAX) {
                    let runs = part.to_vec();
                    let command = ShardCommand::CreatePartitions {
                        cluster_version,
                        topic_id,
                        runs,
                        settings,
                    };
                    shard.command(command).await?;
                }
            }
            if version != settings.version {
                shard.command(ShardCommand::UpdateSettings { topic_id, settings }).await?;
            }
        }
        Ok(())
    }

    async fn drop_everywhere(&self, topic: &TopicInfo) -> Result<()> {
        for &shard_id in topic.shards() {
            self.drop_from(self.shard(shard_id)?, topic.id).await?;
        }
        Ok(())
    }

    async fn drop_from(&self, shard: &Shard, topic_id: u64) -> Result<()> {
        let cluster_version = self.machine.read(ClusterState::version);
        shard.command(ShardCommand::DropTopic { cluster_version, topic_id }).await
    }
}

fn failed(error: ProposeError) -> Error {
    match error {
        ProposeError::NotLeader { .. } => Error::NoLeader { shard: 0 },
        ProposeError::Unknown(reason) => Error::OutcomeUnknown { reason },
        ProposeError::Stopped(what) => Error::StorageFailed { what, may_have_applied: false },
    }
}

fn unexpected(reply: &Reply) -> Error {
    Error::OutcomeUnknown { reason: format!("shard 0 answered {reply:?}") }
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
