//! Consumer groups: members that divide the partitions of topics and store their offsets.
//!
//! The service assigns partitions. A member reads a partition only while it is assigned. Before it
//! releases a partition, it stops reading and commits, so that a change of members repeats no
//! record. After a crash, the records since the last commit are read again (at least once).
//!
//! One background task sends heartbeats and commits. Everything else happens in calls of
//! [`GroupConsumer`], so a partition does not move while the application works on its records. The
//! exceptions are the limits of [`GroupConsumerBuilder::release_timeout`] and
//! [`GroupConsumerBuilder::session_timeout`].

mod builder;
mod committer;
mod consumer;
mod fetch_queue;
mod heartbeats;
mod membership;
mod readers;
mod starts;

use helix_proto::log::v1::{CommitFallback, TopicPartition, Watermarks};

use crate::client::Client;
use crate::consumer::{Batches, Records};

pub use builder::{AutoCommit, GroupConsumerBuilder};
pub use committer::OffsetToCommit;
pub use consumer::GroupConsumer;

impl Client {
    /// Returns a builder for a member of this group, with default settings.
    ///
    /// ```no_run
    /// # async fn read(client: helix_client::Client) -> helix_client::Result<()> {
    /// let mut consumer = client.consumer_group("billing").topics(["orders"]).join();
    /// while let Some(records) = consumer.next_records().await {
    ///     for record in records?.records {
    ///         println!("{:?}", record.value);
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn consumer_group(&self, group: impl Into<String>) -> GroupConsumerBuilder {
        GroupConsumerBuilder::new(self.clone(), group.into())
    }
}

/// A partition that a group assigns to its members.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AssignedPartition {
    /// Name of the topic.
    pub topic: String,
    /// Partition.
    pub partition: u32,
    /// Id of the topic. A topic that is deleted and created again has a new id.
    pub topic_id: u64,
}

impl AssignedPartition {
    fn key(&self) -> GroupKey {
        GroupKey { topic_id: self.topic_id, partition: self.partition }
    }
}

impl From<&Records> for AssignedPartition {
    fn from(records: &Records) -> Self {
        let Records { topic, partition, topic_id, .. } = records;
        Self { topic: topic.clone(), partition: *partition, topic_id: *topic_id }
    }
}

impl From<&Batches> for AssignedPartition {
    fn from(batches: &Batches) -> Self {
        let Batches { topic, partition, topic_id, .. } = batches;
        Self { topic: topic.clone(), partition: *partition, topic_id: *topic_id }
    }
}

impl From<TopicPartition> for AssignedPartition {
    fn from(partition: TopicPartition) -> Self {
        let TopicPartition { topic, partition, topic_id } = partition;
        Self { topic, partition, topic_id }
    }
}

impl From<AssignedPartition> for TopicPartition {
    fn from(partition: AssignedPartition) -> Self {
        let AssignedPartition { topic, partition, topic_id } = partition;
        Self { topic, partition, topic_id }
    }
}

/// Identity of a partition within a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct GroupKey {
    topic_id: u64,
    partition: u32,
}

impl GroupKey {
    fn with_topic(self, topic: &str) -> AssignedPartition {
        let Self { topic_id, partition } = self;
        AssignedPartition { topic: topic.to_owned(), partition, topic_id }
    }
}

/// One ownership of a partition. Each assignment of the partition begins a new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct OwnershipId(u64);

/// An event of a group consumer.
#[derive(Debug, Clone, PartialEq)]
pub enum GroupEvent<T> {
    /// Records of one partition, in order.
    Data(T),
    /// All committed records of this partition have been delivered.
    CaughtUp {
        /// Partition.
        partition: AssignedPartition,
        /// State of the partition.
        watermarks: Watermarks,
    },
    /// These partitions were assigned. The next call starts to read them at the group's offsets,
    /// unless [`GroupConsumer::seek`] has set others.
    Assigned(Vec<AssignedPartition>),
    /// These partitions move to other members, and no more of their records follow. Their offsets
    /// can still be committed; the next call releases the partitions.
    Revoked(Vec<AssignedPartition>),
    /// These partitions were lost: the service removed the member, or did not respond for the
    /// session timeout. Other members may read them already, so their offsets can no longer be
    /// committed. The consumer joins again automatically.
    Lost(Vec<AssignedPartition>),
}

/// Start in partitions where the group has no usable offset.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StartPolicy {
    /// Start at the first readable record if the group has never committed, which skips nothing.
    /// Otherwise fail: with `OFFSET_OUT_OF_RANGE` if retention has overtaken the offset, or with
    /// `TOPIC_RECREATED` if the offset belongs to an earlier topic of the same name.
    #[default]
    Safe,
    /// Like `Safe`, but also fail with `NO_COMMITTED_OFFSET` if the group has never committed.
    Fail,
    /// Start at the first readable record.
    Earliest,
    /// Start at the end: read only new records, also in partitions that are added later. The start
    /// is committed, so that a restart skips nothing.
    Latest,
}

impl StartPolicy {
    fn to_wire(self) -> CommitFallback {
        match self {
            Self::Safe => CommitFallback::Unspecified,
            Self::Fail => CommitFallback::Fail,
            Self::Earliest => CommitFallback::Earliest,
            Self::Latest => CommitFallback::Latest,
        }
    }
}
