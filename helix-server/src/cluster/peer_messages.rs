//! Requests between nodes beside Raft: commands for the cluster's state, and status requests.
//! Each request has one response. Unknown messages are rejected, never skipped.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use prost::Message;

use super::reconcile::ShardProgress;
use crate::log::{ClusterCommand, ClusterReply, Head, Watermarks};
use crate::records::peer_request_record::Kind as PeerRequestKind;
use crate::records::peer_response_record::{
    GroupRows, Kind as PeerResponseKind, LedShards, NamedTopicId, NumberPair, ShardIds, TextPair,
    WatermarkRows,
};
use crate::records::{
    ChangeRecord, PeerRequestRecord, PeerResponseRecord, ProgressRecord, TopicRecord,
};
pub use crate::records::{EntryRange, ReplicaStatusReport};
pub(super) use crate::records::{
    GroupsRequest, ReplicaStatusRequest, SplitRecords, SplitRecordsRequest, WatermarksRequest,
};

/// A request to another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PeerRequest {
    Command(ClusterCommand),
    /// Asks for the version of the cluster's state, confirmed by a majority.
    Version,
    /// Asks for the replica changes of the shards that the receiver leads.
    Progress,
    /// Asks the receiver to transfer the shards that it leads to their preferred leaders.
    Balance,
    /// Asks for the status of the receiver's replica of a shard.
    ReplicaStatus(ReplicaStatusRequest),
    /// Asks the leader of this data shard for an index that covers everything acknowledged before.
    /// Sent from protocol [`GROUPS`](crate::protocol::GROUPS) on.
    ShardIndex(u64),
    /// Asks for the shards that the receiver leads. These are sent from protocol
    /// [`PLACEMENT`](crate::protocol::PLACEMENT) on.
    LedShards,
    /// Asks the leader of a data shard for groups.
    Groups(GroupsRequest),
    /// Asks the leader of a data shard for the readable offsets of partitions.
    Watermarks(WatermarksRequest),
    /// Asks a replica of a shard for records that a split moves. Sent from protocol
    /// [`SHARD_SPLITS`](crate::protocol::SHARD_SPLITS) on.
    SplitRecords(SplitRecordsRequest),
    /// Asks the receiver to record, durably, that logs may have entries of this protocol version.
    /// Sent by shard 0's leader if every member speaks
    /// [`RECORDED_VERSIONS`](crate::protocol::RECORDED_VERSIONS).
    RecordProtocol(u32),
}

/// State of a partition on the leader of its shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartitionReport {
    pub watermarks: Watermarks,
    /// Payload bytes of the readable batches, and bytes on the leader's storage. `None` from nodes
    /// of earlier releases.
    pub bytes: Option<(u64, u64)>,
}

/// The response to a [`PeerRequest`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PeerResponse {
    ClusterReply(ClusterReply),
    /// Version of the cluster's state, or index of a shard.
    Version(u64),
    Progress(Vec<ShardProgress>),
    /// Ids of the shards whose leadership was transferred.
    Moved(Vec<u64>),
    ReplicaStatus(ReplicaStatusReport),
    /// Shards that the sender leads, with its terms.
    LedShards(Vec<(u64, u64)>),
    /// Encoded groups.
    Groups(Vec<Vec<u8>>),
    /// Readable offsets by partition id.
    Watermarks(Vec<(u64, PartitionReport)>),
    SplitRecords(SplitRecords),
    /// Nothing was done; the request has to go to the leader.
    NotLeader,
    /// The outcome is unknown.
    Unknown(String),
}

impl PeerRequest {
    /// Returns whether this request changes state. A lost response leaves its outcome unknown then.
    pub(super) fn is_change(&self) -> bool {
        matches!(self, Self::Command(_))
    }

    /// Returns whether this request may be sent again while the outcome of an attempt is unknown.
    /// A repeated `DeleteTopic` finds no topic, or in old protocols a new one of the same name, so
    /// its sender decides.
    pub(super) fn is_idempotent(&self) -> bool {
        !matches!(self, Self::Command(ClusterCommand::DeleteTopic { .. }))
    }

    pub(super) fn encode(&self) -> Bytes {
        let kind = match self {
            Self::Command(command) => {
                let mut head = BytesMut::new();
                Head::Cluster(command.clone()).encode_to(&mut head);
                PeerRequestKind::Command(head.freeze())
            }
            Self::Version => PeerRequestKind::Version(true),
            Self::Progress => PeerRequestKind::Progress(true),
            Self::Balance => PeerRequestKind::Balance(true),
            Self::ReplicaStatus(asked) => PeerRequestKind::ReplicaStatus(*asked),
            Self::ShardIndex(shard) => PeerRequestKind::ShardIndex(*shard),
            Self::LedShards => PeerRequestKind::LedShards(true),
            Self::Groups(asked) => PeerRequestKind::Groups(asked.clone()),
            Self::Watermarks(asked) => PeerRequestKind::Watermarks(asked.clone()),
            Self::SplitRecords(asked) => PeerRequestKind::SplitRecords(*asked),
            Self::RecordProtocol(version) => PeerRequestKind::RecordProtocol(*version),
        };
        PeerRequestRecord { kind: Some(kind) }.encode_to_vec().into()
    }

    pub(super) fn decode(bytes: Bytes) -> Result<Self, String> {
        let record = PeerRequestRecord::decode(bytes).map_err(|error| error.to_string())?;
        match record.kind {
            Some(PeerRequestKind::Command(head)) => match Head::decode(&head) {
                Ok(Head::Cluster(command)) => Ok(Self::Command(command)),
                Ok(_) => Err("the request is not a command for the cluster's state".to_owned()),
                Err(error) => Err(error.to_string()),
            },
            Some(PeerRequestKind::Version(_)) => Ok(Self::Version),
            Some(PeerRequestKind::Progress(_)) => Ok(Self::Progress),
            Some(PeerRequestKind::Balance(_)) => Ok(Self::Balance),
            Some(PeerRequestKind::ReplicaStatus(asked)) => Ok(Self::ReplicaStatus(asked)),
            Some(PeerRequestKind::ShardIndex(shard)) => Ok(Self::ShardIndex(shard)),
            Some(PeerRequestKind::LedShards(_)) => Ok(Self::LedShards),
            Some(PeerRequestKind::Groups(asked)) => Ok(Self::Groups(asked)),
            Some(PeerRequestKind::Watermarks(asked)) => Ok(Self::Watermarks(asked)),
            Some(PeerRequestKind::SplitRecords(asked)) => Ok(Self::SplitRecords(asked)),
            Some(PeerRequestKind::RecordProtocol(version)) => Ok(Self::RecordProtocol(version)),
            None => Err("the request is unknown to this version".to_owned()),
        }
    }
}

impl PeerResponse {
    pub(super) fn encode(&self) -> Bytes {
        let kind = match self {
            Self::Version(version) => PeerResponseKind::Version(*version),
            Self::Progress(rows) => {
                PeerResponseKind::Progress(ProgressRecord::from(rows.as_slice()))
            }
            Self::Moved(ids) => PeerResponseKind::Moved(ShardIds { ids: ids.clone() }),
            Self::ReplicaStatus(report) => PeerResponseKind::ReplicaStatus(report.clone()),
            Self::LedShards(rows) => {
                let (ids, terms) = rows.iter().copied().unzip();
                PeerResponseKind::LedShards(LedShards { ids, terms })
            }
            Self::Groups(groups) => PeerResponseKind::Groups(GroupRows { groups: groups.clone() }),
            Self::Watermarks(rows) => PeerResponseKind::Watermarks(WatermarkRows {
                partitions: rows.iter().map(|(id, _)| *id).collect(),
                log_starts: rows.iter().map(|(_, it)| it.watermarks.log_start).collect(),
                high_watermarks: rows.iter().map(|(_, it)| it.watermarks.high_watermark).collect(),
                live_bytes: rows.iter().filter_map(|(_, it)| Some(it.bytes?.0)).collect(),
                held_bytes: rows.iter().filter_map(|(_, it)| Some(it.bytes?.1)).collect(),
            }),
            Self::SplitRecords(records) => PeerResponseKind::SplitRecords(records.clone()),
            Self::NotLeader => PeerResponseKind::NotLeader(true),
            Self::Unknown(reason) => PeerResponseKind::Unknown(reason.clone()),
            Self::ClusterReply(reply) => encode_reply(reply),
        };
        PeerResponseRecord { kind: Some(kind) }.encode_to_vec().into()
    }

    pub(super) fn decode(bytes: Bytes) -> Result<Self, String> {
        let record = PeerResponseRecord::decode(bytes).map_err(|error| error.to_string())?;
        let kind = record.kind.ok_or("the response is unknown to this version")?;
        let topic = |record: TopicRecord| {
            record.into_topic().map(Arc::new).map_err(|error| error.to_string())
        };
        Ok(Self::ClusterReply(match kind {
            PeerResponseKind::Version(version) => return Ok(Self::Version(version)),
            PeerResponseKind::Progress(rows) => return rows.into_rows().map(Self::Progress),
            PeerResponseKind::Moved(it) => return Ok(Self::Moved(it.ids)),
            PeerResponseKind::ReplicaStatus(report) => return Ok(Self::ReplicaStatus(report)),
            PeerResponseKind::LedShards(LedShards { ids, terms }) => {
                if ids.len() != terms.len() {
                    return Err("columns of led shards differ in length".to_owned());
                }
                return Ok(Self::LedShards(ids.into_iter().zip(terms).collect()));
            }
            PeerResponseKind::Groups(it) => return Ok(Self::Groups(it.groups)),
            PeerResponseKind::Watermarks(it) => {
                return decode_watermarks(&it).map(Self::Watermarks);
            }
            PeerResponseKind::SplitRecords(it) => return Ok(Self::SplitRecords(it)),
            PeerResponseKind::NotLeader(_) => return Ok(Self::NotLeader),
            PeerResponseKind::Unknown(reason) => return Ok(Self::Unknown(reason)),
            PeerResponseKind::Topic(record) => ClusterReply::Topic(topic(record)?),
            PeerResponseKind::ExistsEqual(record) => {
                ClusterReply::AlreadyExistsEqual(topic(record)?)
            }
            PeerResponseKind::ExistsDifferent(it) => {
                ClusterReply::AlreadyExistsDifferent { name: it.first, difference: it.second }
            }
            PeerResponseKind::TopicNotFound(name) => ClusterReply::TopicNotFound { name },
            PeerResponseKind::TopicRecreated(NamedTopicId { name, topic_id }) => {
                ClusterReply::TopicRecreated { name, topic_id }
            }
            PeerResponseKind::ProducerIds(it) => {
                ClusterReply::ProducerIds { first: it.first, count: it.second }
            }
            PeerResponseKind::Producer(it) => {
                ClusterReply::Producer { producer_id: it.first, epoch: it.second }
            }
            PeerResponseKind::Done(_) => ClusterReply::Done,
            PeerResponseKind::MemberChange(record) => {
                ClusterReply::MemberChange(record.into_change().map_err(|error| error.to_string())?)
            }
            PeerResponseKind::NodeNotFound(node_id) => ClusterReply::NodeNotFound { node_id },
            PeerResponseKind::ChangeInProgress(what) => ClusterReply::ChangeInProgress { what },
            PeerResponseKind::NotEnoughNodes(what) => ClusterReply::NotEnoughNodes { what },
            PeerResponseKind::Invalid(it) => {
                ClusterReply::Invalid { field: field(&it.first), what: it.second }
            }
        }))
    }
}

fn encode_reply(reply: &ClusterReply) -> PeerResponseKind {
    let texts = |first: &str, second: &str| TextPair { first: first.into(), second: second.into() };
    match reply {
        ClusterReply::Topic(topic) => PeerResponseKind::Topic(TopicRecord::from(&**topic)),
        ClusterReply::AlreadyExistsEqual(topic) => {
            PeerResponseKind::ExistsEqual(TopicRecord::from(&**topic))
        }
        ClusterReply::AlreadyExistsDifferent { name, difference } => {
            PeerResponseKind::ExistsDifferent(texts(name, difference))
        }
        ClusterReply::TopicNotFound { name } => PeerResponseKind::TopicNotFound(name.clone()),
        ClusterReply::TopicRecreated { name, topic_id } => {
            let (name, topic_id) = (name.clone(), *topic_id);
            PeerResponseKind::TopicRecreated(NamedTopicId { name, topic_id })
        }
        ClusterReply::ProducerIds { first, count } => {
            PeerResponseKind::ProducerIds(NumberPair { first: *first, second: *count })
        }
        ClusterReply::Producer { producer_id, epoch } => {
            PeerResponseKind::Producer(NumberPair { first: *producer_id, second: *epoch })
        }
        ClusterReply::Done => PeerResponseKind::Done(true),
        ClusterReply::MemberChange(change) => {
            PeerResponseKind::MemberChange(ChangeRecord::from(change))
        }
        ClusterReply::NodeNotFound { node_id } => PeerResponseKind::NodeNotFound(*node_id),
        ClusterReply::ChangeInProgress { what } => PeerResponseKind::ChangeInProgress(what.clone()),
        ClusterReply::NotEnoughNodes { what } => PeerResponseKind::NotEnoughNodes(what.clone()),
        ClusterReply::Invalid { field, what } => PeerResponseKind::Invalid(texts(field, what)),
    }
}

/// Maps a field name of a reply to its static form. The names are part of the public API.
fn field(name: &str) -> &'static str {
    const FIELDS: [&str; 25] = [
        "name",
        "count",
        "node_id",
        "shard_id",
        "from_node_id",
        "to_node_id",
        "replicas",
        "total",
        "peer_endpoint",
        "rack",
        "shards",
        "partition_count",
        "replication_factor",
        "producer_name",
        "config.max_batch_bytes",
        "config.max_record_bytes",
        "config.default_durability",
        "config.min_durability",
        "config.allowed_compression",
        "config.cleanup",
        "config.batch_format",
        "config",
        "token",
        "principal",
        "rules",
    ];
    FIELDS.into_iter().find(|field| *field == name).unwrap_or("request")
}

fn decode_watermarks(rows: &WatermarkRows) -> Result<Vec<(u64, PartitionReport)>, String> {
    let WatermarkRows { partitions, log_starts, high_watermarks, live_bytes, held_bytes } = rows;
    let count = partitions.len();
    let has_bytes = !live_bytes.is_empty() || !held_bytes.is_empty();
    let is_even = log_starts.len() == count
        && high_watermarks.len() == count
        && (!has_bytes || (live_bytes.len() == count && held_bytes.len() == count));
    if !is_even {
        return Err("columns of watermarks differ in length".to_owned());
    }
    let row = |at: usize| {
        let watermarks =
            Watermarks { log_start: log_starts[at], high_watermark: high_watermarks[at] };
        let bytes = has_bytes.then(|| (live_bytes[at], held_bytes[at]));
        (partitions[at], PartitionReport { watermarks, bytes })
    };
    Ok((0..count).map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::obstacle::Obstacle;
    use crate::cluster::reconcile::ChangePhase;
    use crate::cluster::state::{ClusterLimits, ClusterState};
    use crate::log::{ChangeKind, CreateTopic, MemberChange, PartitionSettings, Verdict};

    fn topic() -> ClusterReply {
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
        let new = CreateTopic {
            name: "orders".to_owned(),
            partition_count: 12,
            replication_factor: 3,
            settings,
            shards,
            requested_at_us: 5,
        };
        match state.apply(2, &Head::Cluster(ClusterCommand::CreateTopic(new))) {
            Verdict::Cluster(reply @ ClusterReply::Topic(_)) => reply,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn replies_and_responses_survive_encoding() {
        let name = "orders".to_owned();
        let ClusterReply::Topic(info) = topic() else { unreachable!() };
        let change = MemberChange {
            id: 3,
            kind: ChangeKind::Replace,
            node_id: 4,
            lost_node_id: 2,
            version: 9,
            done: true,
        };
        let replies = [
            ClusterReply::Topic(info.clone()),
            ClusterReply::AlreadyExistsEqual(info),
            ClusterReply::AlreadyExistsDifferent { name: name.clone(), difference: "x".to_owned() },
            ClusterReply::TopicNotFound { name: name.clone() },
            ClusterReply::TopicRecreated { name, topic_id: 9 },
            ClusterReply::ProducerIds { first: 9, count: 3 },
            ClusterReply::Producer { producer_id: 7, epoch: 2 },
            ClusterReply::Done,
            ClusterReply::MemberChange(change),
            ClusterReply::NodeNotFound { node_id: 7 },
            ClusterReply::ChangeInProgress { what: "why".to_owned() },
            ClusterReply::NotEnoughNodes { what: "why".to_owned() },
            ClusterReply::Invalid { field: "partition_count", what: "why".to_owned() },
        ];
        for reply in replies {
            let response = PeerResponse::ClusterReply(reply);
            assert_eq!(PeerResponse::decode(response.encode()).unwrap(), response);
        }
        let report = |bytes| PartitionReport {
            watermarks: Watermarks { log_start: 1, high_watermark: 9 },
            bytes,
        };
        let row = ShardProgress {
            shard_id: 2,
            version: 8,
            phase: ChangePhase::CatchingUp,
            entries: 5,
            bytes: 6,
            caught_up_to: 7,
            commit_index: 8,
            blocked: Obstacle::new("CODE", "why", "what to do"),
        };
        for response in [
            PeerResponse::Version(4),
            PeerResponse::NotLeader,
            PeerResponse::Unknown("x".to_owned()),
            PeerResponse::Progress(vec![row]),
            PeerResponse::Moved(vec![1, 3]),
            PeerResponse::LedShards(vec![(1, 7), (3, 9)]),
            PeerResponse::Groups(vec![vec![1, 2], Vec::new()]),
            PeerResponse::Watermarks(vec![(5, report(Some((3, 4))))]),
            PeerResponse::Watermarks(vec![(5, report(None))]),
            PeerResponse::ReplicaStatus(ReplicaStatusReport {
                term: 3,
                voters: vec![1, 2],
                ..ReplicaStatusReport::default()
            }),
        ] {
            assert_eq!(PeerResponse::decode(response.encode()).unwrap(), response);
        }
    }

    #[test]
    fn requests_survive_encoding_and_garbage_is_rejected() {
        let name = "orders".to_owned();
        for request in [
            PeerRequest::Version,
            PeerRequest::Progress,
            PeerRequest::Balance,
            PeerRequest::ShardIndex(3),
            PeerRequest::LedShards,
            PeerRequest::RecordProtocol(12),
            PeerRequest::Groups(GroupsRequest { shard_id: 2, name: name.clone(), after: 3 }),
            PeerRequest::Watermarks(WatermarksRequest { shard_id: 2, partitions: vec![4, 5] }),
            PeerRequest::ReplicaStatus(ReplicaStatusRequest {
                shard_id: 3,
                ..ReplicaStatusRequest::default()
            }),
            PeerRequest::Command(ClusterCommand::DeleteTopic { name, topic_id: 3 }),
        ] {
            assert_eq!(PeerRequest::decode(request.encode()).unwrap(), request);
        }
        assert!(PeerRequest::decode(Bytes::new()).is_err());
        assert!(PeerRequest::decode(Bytes::from_static(&[0xff; 9])).is_err());
        assert!(PeerResponse::decode(Bytes::new()).is_err());
    }
}
