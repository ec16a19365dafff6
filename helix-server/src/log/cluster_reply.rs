//! Results of commands to the cluster's state in shard 0.

use std::sync::Arc;

use super::{MemberChange, TopicInfo};

/// Result of a command to the cluster's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClusterReply {
    /// The topic after the command.
    Topic(Arc<TopicInfo>),
    /// The topic already existed as requested. A client that repeats a call takes it as success.
    AlreadyExistsEqual(Arc<TopicInfo>),
    AlreadyExistsDifferent {
        name: String,
        difference: String,
    },
    TopicNotFound {
        name: String,
    },
    /// Nothing changed: the topic with this name has another id than the command names.
    TopicRecreated {
        name: String,
        topic_id: u64,
    },
    /// Leased producer ids: `first..first + count`.
    ProducerIds {
        first: u64,
        count: u32,
    },
    Producer {
        producer_id: u64,
        epoch: u32,
    },
    Done,
    /// The change that was started, or an earlier one with the same effect.
    MemberChange(MemberChange),
    NodeNotFound {
        node_id: u64,
    },
    /// Nothing changed: another change of the members is running.
    ChangeInProgress {
        what: String,
    },
    /// Nothing changed: too few nodes would remain.
    NotEnoughNodes {
        what: String,
    },
    /// Nothing changed: a field of the command is invalid.
    Invalid {
        field: &'static str,
        what: String,
    },
}
