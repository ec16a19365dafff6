//! What nodes ask of each other beside Raft: commands for the cluster's state, and how new it is.
//! One message each way; what is unknown is refused, never skipped.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use prost::{Message, Oneof};

use super::checkpoint::TopicRecord;
use super::members_record::ChangeRecord;
use super::reconcile::{ProgressRecord, ShardProgress};
use super::standing::{AskStanding, Standing};
use super::state::Reply;
use crate::log::{ClusterCommand, Head};

/// A question of another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Question {
    Command(ClusterCommand),
    /// The version of the metadata, confirmed by a majority.
    Version,
    /// How far the shards that the asked node leads are with their replicas.
    Progress,
    /// To hand the shards that the asked node leads to the nodes that should lead them.
    Balance,
    /// How its replica of a shard stands.
    Standing(AskStanding),
}

/// Its answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    Reply(Reply),
    Version(u64),
    Progress(Vec<ShardProgress>),
    /// Shards that were handed over.
    Moved(Vec<u64>),
    Standing(Standing),
    /// Nothing was done: ask the leader.
    NotLeader,
    /// Whether it was done is not known.
    Unknown(String),
}

#[derive(Clone, PartialEq, Message)]
struct QuestionRecord {
    #[prost(oneof = "QuestionKind", tags = "1, 2, 3, 4, 5")]
    kind: Option<QuestionKind>,
}

#[derive(Clone, PartialEq, Oneof)]
enum QuestionKind {
    /// An encoded head.
    #[prost(bytes = "bytes", tag = "1")]
    Command(Bytes),
    #[prost(bool, tag = "2")]
    Version(bool),
    #[prost(bool, tag = "3")]
    Progress(bool),
    #[prost(bool, tag = "4")]
    Balance(bool),
    #[prost(message, tag = "5")]
    Standing(AskStanding),
}

#[derive(Clone, PartialEq, Message)]
struct AnswerRecord {
    #[prost(
        oneof = "AnswerKind",
        tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18"
    )]
    kind: Option<AnswerKind>,
}

#[derive(Clone, PartialEq, Oneof)]
enum AnswerKind {
    #[prost(uint64, tag = "1")]
    Version(u64),
    #[prost(bool, tag = "2")]
    NotLeader(bool),
    #[prost(string, tag = "3")]
    Unknown(String),
    #[prost(message, tag = "4")]
    Topic(TopicRecord),
    #[prost(message, tag = "5")]
    ExistsEqual(TopicRecord),
    /// Name, difference.
    #[prost(message, tag = "6")]
    ExistsDifferent(Texts),
    #[prost(string, tag = "7")]
    TopicNotFound(String),
    /// First id, count.
    #[prost(message, tag = "8")]
    ProducerIds(Numbers),
    /// Id, epoch.
    #[prost(message, tag = "9")]
    Producer(Numbers),
    #[prost(bool, tag = "10")]
    Done(bool),
    /// Field, what.
    #[prost(message, tag = "11")]
    Invalid(Texts),
    #[prost(message, tag = "12")]
    Change(ChangeRecord),
    #[prost(uint64, tag = "13")]
    NodeNotFound(u64),
    #[prost(string, tag = "14")]
    ChangeInProgress(String),
    #[prost(string, tag = "15")]
    NotEnoughNodes(String),
    #[prost(message, tag = "16")]
    Progress(ProgressRecord),
    #[prost(message, tag = "17")]
    Moved(Ids),
    #[prost(message, tag = "18")]
    Standing(Standing),
}

#[derive(Clone, PartialEq, Message)]
struct Ids {
    #[prost(uint64, repeated, tag = "1")]
    ids: Vec<u64>,
}

#[derive(Clone, PartialEq, Message)]
struct Texts {
    #[prost(string, tag = "1")]
    first: String,
    #[prost(string, tag = "2")]
    second: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct Numbers {
    #[prost(uint64, tag = "1")]
    first: u64,
    #[prost(uint32, tag = "2")]
    second: u32,
}

impl Question {
    /// Whether it asks for a change: an answer that is lost leaves open whether it was made.
    pub(super) fn is_change(&self) -> bool {
        matches!(self, Self::Command(_))
    }

    /// Whether it may be asked again while it is open whether the time before has changed
    /// something. A topic to be deleted has a name alone, which may be another one's by then.
    pub(super) fn may_be_repeated(&self) -> bool {
        !matches!(self, Self::Command(ClusterCommand::DeleteTopic { .. }))
    }

    pub(super) fn encode(&self) -> Bytes {
        let kind = match self {
            Self::Command(command) => {
                let mut head = BytesMut::new();
                Head::Cluster(command.clone()).encode_to(&mut head);
                QuestionKind::Command(head.freeze())
            }
            Self::Version => QuestionKind::Version(true),
            Self::Progress => QuestionKind::Progress(true),
            Self::Balance => QuestionKind::Balance(true),
            Self::Standing(asked) => QuestionKind::Standing(*asked),
        };
        QuestionRecord { kind: Some(kind) }.encode_to_vec().into()
    }

    pub(super) fn decode(bytes: Bytes) -> Result<Self, String> {
        let record = QuestionRecord::decode(bytes).map_err(|error| error.to_string())?;
        match record.kind {
            Some(QuestionKind::Command(head)) => match Head::decode(&head) {
                Ok(Head::Cluster(command)) => Ok(Self::Command(command)),
                Ok(_) => Err("only commands for the cluster's state are taken".to_owned()),
                Err(error) => Err(error.to_string()),
            },
            Some(QuestionKind::Version(_)) => Ok(Self::Version),
            Some(QuestionKind::Progress(_)) => Ok(Self::Progress),
            Some(QuestionKind::Balance(_)) => Ok(Self::Balance),
            Some(QuestionKind::Standing(asked)) => Ok(Self::Standing(asked)),
            None => Err("the question is not known to this version".to_owned()),
        }
    }
}

impl Answer {
    pub(super) fn encode(&self) -> Bytes {
        let kind = match self {
            Self::Version(version) => AnswerKind::Version(*version),
            Self::Progress(rows) => AnswerKind::Progress(ProgressRecord::from(rows.as_slice())),
            Self::Moved(ids) => AnswerKind::Moved(Ids { ids: ids.clone() }),
            Self::Standing(standing) => AnswerKind::Standing(standing.clone()),
            Self::NotLeader => AnswerKind::NotLeader(true),
            Self::Unknown(reason) => AnswerKind::Unknown(reason.clone()),
            Self::Reply(reply) => encode_reply(reply),
        };
        AnswerRecord { kind: Some(kind) }.encode_to_vec().into()
    }

    pub(super) fn decode(bytes: Bytes) -> Result<Self, String> {
        let record = AnswerRecord::decode(bytes).map_err(|error| error.to_string())?;
        let kind = record.kind.ok_or("the answer is not known to this version")?;
        let topic = |record: TopicRecord| {
            record.into_topic().map(Arc::new).map_err(|error| error.to_string())
        };
        Ok(Self::Reply(match kind {
            AnswerKind::Version(version) => return Ok(Self::Version(version)),
            AnswerKind::Progress(rows) => return rows.into_rows().map(Self::Progress),
            AnswerKind::Moved(it) => return Ok(Self::Moved(it.ids)),
            AnswerKind::Standing(standing) => return Ok(Self::Standing(standing)),
            AnswerKind::NotLeader(_) => return Ok(Self::NotLeader),
            AnswerKind::Unknown(reason) => return Ok(Self::Unknown(reason)),
            AnswerKind::Topic(record) => Reply::Topic(topic(record)?),
            AnswerKind::ExistsEqual(record) => Reply::AlreadyExistsEqual(topic(record)?),
            AnswerKind::ExistsDifferent(it) => {
                Reply::AlreadyExistsDifferent { name: it.first, difference: it.second }
            }
            AnswerKind::TopicNotFound(name) => Reply::TopicNotFound { name },
            AnswerKind::ProducerIds(it) => Reply::ProducerIds { first: it.first, count: it.second },
            AnswerKind::Producer(it) => Reply::Producer { producer_id: it.first, epoch: it.second },
            AnswerKind::Done(_) => Reply::Done,
            AnswerKind::Change(record) => {
                Reply::Change(record.into_change().map_err(|error| error.to_string())?)
            }
            AnswerKind::NodeNotFound(node_id) => Reply::NodeNotFound { node_id },
            AnswerKind::ChangeInProgress(what) => Reply::ChangeInProgress { what },
            AnswerKind::NotEnoughNodes(what) => Reply::NotEnoughNodes { what },
            AnswerKind::Invalid(it) => Reply::Invalid { field: field(&it.first), what: it.second },
        }))
    }
}

fn encode_reply(reply: &Reply) -> AnswerKind {
    let texts = |first: &str, second: &str| Texts { first: first.into(), second: second.into() };
    match reply {
        Reply::Topic(topic) => AnswerKind::Topic(TopicRecord::from(&**topic)),
        Reply::AlreadyExistsEqual(topic) => AnswerKind::ExistsEqual(TopicRecord::from(&**topic)),
        Reply::AlreadyExistsDifferent { name, difference } => {
            AnswerKind::ExistsDifferent(texts(name, difference))
        }
        Reply::TopicNotFound { name } => AnswerKind::TopicNotFound(name.clone()),
        Reply::ProducerIds { first, count } => {
            AnswerKind::ProducerIds(Numbers { first: *first, second: *count })
        }
        Reply::Producer { producer_id, epoch } => {
            AnswerKind::Producer(Numbers { first: *producer_id, second: *epoch })
        }
        Reply::Done => AnswerKind::Done(true),
        Reply::Change(change) => AnswerKind::Change(ChangeRecord::from(change)),
        Reply::NodeNotFound { node_id } => AnswerKind::NodeNotFound(*node_id),
        Reply::ChangeInProgress { what } => AnswerKind::ChangeInProgress(what.clone()),
        Reply::NotEnoughNodes { what } => AnswerKind::NotEnoughNodes(what.clone()),
        Reply::Invalid { field, what } => AnswerKind::Invalid(texts(field, what)),
    }
}

/// The names of fields that replies use; they are part of the public API.
fn field(name: &str) -> &'static str {
    const FIELDS: [&str; 13] = [
        "name",
        "count",
        "node_id",
        "peer_endpoint",
        "shards",
        "partition_count",
        "replication_factor",
        "producer_name",
        "config.max_batch_bytes",
        "config.max_record_bytes",
        "config.default_durability",
        "config.min_durability",
        "config",
    ];
    FIELDS.into_iter().find(|field| *field == name).unwrap_or("request")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::reconcile::Phase;
    use crate::cluster::state::{ClusterLimits, ClusterState};
    use crate::cluster::{Change, ChangeKind};
    use crate::log::{NewTopic, PartitionSettings, Verdict};

    fn topic() -> Reply {
        let mut state = ClusterState::new(ClusterLimits::default());
        let shards = vec![1, 2, 3];
        state.apply(1, &Head::Cluster(ClusterCommand::RegisterShards { shards: shards.clone() }));
        let settings = PartitionSettings {
            max_batch_bytes: 1,
            max_record_bytes: 1,
            default_durability: 1,
            min_durability: 1,
            ..PartitionSettings::default()
        };
        let new = NewTopic {
            name: "orders".to_owned(),
            partition_count: 12,
            replication_factor: 3,
            settings,
            shards,
            requested_at_us: 5,
        };
        match state.apply(2, &Head::Cluster(ClusterCommand::CreateTopic(new))) {
            Verdict::Cluster(reply @ Reply::Topic(_)) => reply,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_reply_comes_back_as_it_was() {
        let name = "orders".to_owned();
        let Reply::Topic(info) = topic() else { unreachable!() };
        let change = Change {
            id: 3,
            kind: ChangeKind::Replace,
            node_id: 4,
            lost_node_id: 2,
            version: 9,
            done: true,
        };
        let replies = [
            Reply::Topic(info.clone()),
            Reply::AlreadyExistsEqual(info),
            Reply::AlreadyExistsDifferent { name: name.clone(), difference: "x".to_owned() },
            Reply::TopicNotFound { name },
            Reply::ProducerIds { first: 9, count: 3 },
            Reply::Producer { producer_id: 7, epoch: 2 },
            Reply::Done,
            Reply::Change(change),
            Reply::NodeNotFound { node_id: 7 },
            Reply::ChangeInProgress { what: "why".to_owned() },
            Reply::NotEnoughNodes { what: "why".to_owned() },
            Reply::Invalid { field: "partition_count", what: "why".to_owned() },
        ];
        for reply in replies {
            let answer = Answer::Reply(reply);
            assert_eq!(Answer::decode(answer.encode()).unwrap(), answer);
        }
        let row = ShardProgress {
            shard_id: 2,
            version: 8,
            phase: Phase::CatchingUp,
            entries: 5,
            blocked: "why".to_owned(),
        };
        for answer in [
            Answer::Version(4),
            Answer::NotLeader,
            Answer::Unknown("x".to_owned()),
            Answer::Progress(vec![row]),
            Answer::Moved(vec![1, 3]),
            Answer::Standing(Standing { term: 3, voters: vec![1, 2], ..Standing::default() }),
        ] {
            assert_eq!(Answer::decode(answer.encode()).unwrap(), answer);
        }
    }

    #[test]
    fn questions_come_back_and_nonsense_does_not() {
        let name = "orders".to_owned();
        for question in [
            Question::Version,
            Question::Progress,
            Question::Balance,
            Question::Standing(AskStanding { shard_id: 3, ..AskStanding::default() }),
            Question::Command(ClusterCommand::DeleteTopic { name }),
        ] {
            assert_eq!(Question::decode(question.encode()).unwrap(), question);
        }
        assert!(Question::decode(Bytes::new()).is_err());
        assert!(Question::decode(Bytes::from_static(&[0xff; 9])).is_err());
        assert!(Answer::decode(Bytes::new()).is_err());
    }
}
