//! Encodes control entries as protobuf messages, so that they can be extended.
//! Tags are permanent. Unknown commands and fields are an error.

use bytes::BytesMut;
use prost::{Message, Oneof};

use super::command::{
    ClusterCommand, CreateTopic, PartitionRun, PartitionSettings, SettingsMask, ShardCommand,
};
use super::group::GroupCommandRecord;
use super::{AccessCommand, CleanupRound, FencingToken, HeadError, MemberCommand, PartitionId};

#[derive(Clone, PartialEq, Message)]
struct ShardRecord {
    #[prost(oneof = "ShardChange", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9")]
    change: Option<ShardChange>,
}

#[derive(Clone, PartialEq, Oneof)]
enum ShardChange {
    #[prost(message, tag = "1")]
    CreatePartitions(CreatePartitions),
    #[prost(message, tag = "2")]
    UpdateSettings(UpdateSettings),
    #[prost(message, tag = "3")]
    DropTopic(DropTopic),
    #[prost(message, tag = "4")]
    Trim(Trim),
    #[prost(message, tag = "5")]
    Release(Release),
    #[prost(message, tag = "6")]
    SetFencingToken(SetFencingToken),
    #[prost(message, tag = "7")]
    Group(GroupCommandRecord),
    #[prost(message, tag = "8")]
    CleanUp(CleanUp),
    #[prost(message, tag = "9")]
    Cleaned(Cleaned),
}

#[derive(Clone, PartialEq, Message)]
struct CreatePartitions {
    #[prost(uint64, tag = "1")]
    cluster_version: u64,
    #[prost(uint64, tag = "2")]
    topic_id: u64,
    #[prost(message, repeated, tag = "3")]
    runs: Vec<PartitionRun>,
    #[prost(message, optional, tag = "4")]
    settings: Option<PartitionSettings>,
}

#[derive(Clone, PartialEq, Message)]
struct UpdateSettings {
    #[prost(uint64, tag = "1")]
    topic_id: u64,
    #[prost(message, optional, tag = "2")]
    settings: Option<PartitionSettings>,
}

#[derive(Clone, PartialEq, Message)]
struct DropTopic {
    #[prost(uint64, tag = "1")]
    cluster_version: u64,
    #[prost(uint64, tag = "2")]
    topic_id: u64,
}

/// Two columns of equal length.
#[derive(Clone, PartialEq, Message)]
struct Trim {
    #[prost(uint64, repeated, tag = "1")]
    partitions: Vec<u64>,
    #[prost(uint64, repeated, tag = "2")]
    starts: Vec<u64>,
}

/// Three columns of equal length.
#[derive(Clone, PartialEq, Message)]
struct CleanUp {
    #[prost(uint64, repeated, tag = "1")]
    partitions: Vec<u64>,
    #[prost(uint64, repeated, tag = "2")]
    upto: Vec<u64>,
    #[prost(uint64, repeated, tag = "3")]
    tombstones_below: Vec<u64>,
}

/// Two columns of equal length, and the time.
#[derive(Clone, PartialEq, Message)]
struct Cleaned {
    #[prost(uint64, repeated, tag = "1")]
    partitions: Vec<u64>,
    #[prost(uint64, repeated, tag = "2")]
    upto: Vec<u64>,
    #[prost(uint64, tag = "3")]
    time_us: u64,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct Release {
    #[prost(uint64, tag = "1")]
    index: u64,
}

#[derive(Clone, PartialEq, Message)]
struct SetFencingToken {
    #[prost(uint64, tag = "1")]
    partition: u64,
    #[prost(string, optional, tag = "2")]
    expected: Option<String>,
    #[prost(string, tag = "3")]
    token: String,
}

#[derive(Clone, PartialEq, Message)]
struct ClusterRecord {
    #[prost(oneof = "ClusterChange", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12")]
    change: Option<ClusterChange>,
}

#[derive(Clone, PartialEq, Oneof)]
enum ClusterChange {
    #[prost(message, tag = "1")]
    RegisterNode(RegisterNode),
    #[prost(message, tag = "2")]
    CreateTopic(CreateTopicRecord),
    #[prost(message, tag = "3")]
    UpdateTopic(UpdateTopic),
    #[prost(message, tag = "4")]
    AddPartitions(AddPartitions),
    #[prost(message, tag = "5")]
    DeleteTopic(DeleteTopic),
    #[prost(message, tag = "6")]
    LeaseProducerIds(LeaseProducerIds),
    #[prost(message, tag = "7")]
    InitProducer(InitProducer),
    #[prost(message, tag = "8")]
    RegisterShards(RegisterShards),
    #[prost(message, tag = "9")]
    Members(Members),
    #[prost(message, tag = "10")]
    RaiseProtocol(RaiseProtocol),
    #[prost(message, tag = "11")]
    AssignGroupSlots(AssignGroupSlots),
    #[prost(message, tag = "12")]
    Access(Access),
}

#[derive(Clone, Copy, PartialEq, Message)]
struct AssignGroupSlots {}

#[derive(Clone, Copy, PartialEq, Message)]
struct RaiseProtocol {
    #[prost(uint32, tag = "1")]
    version: u32,
}

#[derive(Clone, PartialEq, Message)]
struct Members {
    #[prost(oneof = "MemberCommand", tags = "1, 2, 3, 4, 5, 6, 7")]
    command: Option<MemberCommand>,
}

#[derive(Clone, PartialEq, Message)]
struct Access {
    #[prost(oneof = "AccessCommand", tags = "1, 2, 3, 4, 5")]
    command: Option<AccessCommand>,
}

#[derive(Clone, PartialEq, Message)]
struct RegisterShards {
    #[prost(uint64, repeated, tag = "1")]
    shards: Vec<u64>,
}

#[derive(Clone, PartialEq, Message)]
struct RegisterNode {
    #[prost(uint64, tag = "1")]
    node_id: u64,
    #[prost(string, tag = "2")]
    endpoint: String,
    #[prost(string, tag = "3")]
    version: String,
    #[prost(string, tag = "4")]
    peer_addr: String,
}

#[derive(Clone, PartialEq, Message)]
struct CreateTopicRecord {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(uint32, tag = "2")]
    partition_count: u32,
    #[prost(uint32, tag = "3")]
    replication_factor: u32,
    #[prost(message, optional, tag = "4")]
    settings: Option<PartitionSettings>,
    #[prost(uint64, repeated, tag = "5")]
    shards: Vec<u64>,
    #[prost(uint64, tag = "6")]
    requested_at_us: u64,
}

#[derive(Clone, PartialEq, Message)]
struct UpdateTopic {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, optional, tag = "2")]
    settings: Option<PartitionSettings>,
    #[prost(uint32, tag = "3")]
    fields: u32,
    /// From protocol version [`TOPIC_IDS`](crate::protocol::TOPIC_IDS) on, as in the next two.
    #[prost(uint64, tag = "4")]
    topic_id: u64,
}

#[derive(Clone, PartialEq, Message)]
struct AddPartitions {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(uint32, tag = "2")]
    partition_count: u32,
    #[prost(uint64, tag = "3")]
    topic_id: u64,
}

#[derive(Clone, PartialEq, Message)]
struct DeleteTopic {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(uint64, tag = "2")]
    topic_id: u64,
}

#[derive(Clone, PartialEq, Message)]
struct LeaseProducerIds {
    #[prost(uint32, tag = "1")]
    count: u32,
}

#[derive(Clone, PartialEq, Message)]
struct InitProducer {
    #[prost(string, tag = "1")]
    name: String,
}

/// Returns whether the message holds all of `bytes`, which prost drops for unknown fields.
/// Replicas that decode an entry differently would diverge.
pub(crate) fn has_no_unknown_fields(message: &impl Message, bytes: &[u8]) -> bool {
    message.encoded_len() == bytes.len()
}

fn malformed(what: impl Into<String>) -> HeadError {
    HeadError::Malformed { what: what.into() }
}

fn unknown_field() -> HeadError {
    malformed("it has fields that are unknown to this version")
}

fn token(text: &str) -> Result<FencingToken, HeadError> {
    FencingToken::new(text).ok_or_else(|| malformed("fencing token is too long"))
}

fn required(settings: Option<PartitionSettings>) -> Result<PartitionSettings, HeadError> {
    settings.ok_or_else(|| malformed("settings are missing"))
}

pub(super) fn encode_shard(command: &ShardCommand, bytes: &mut BytesMut) {
    let change = match command.clone() {
        ShardCommand::CreatePartitions { cluster_version, topic_id, runs, settings } => {
            debug_assert!(runs.iter().all(PartitionRun::is_valid));
            let settings = Some(settings);
            let create = CreatePartitions { cluster_version, topic_id, runs, settings };
            ShardChange::CreatePartitions(create)
        }
        ShardCommand::UpdateSettings { topic_id, settings } => {
            ShardChange::UpdateSettings(UpdateSettings { topic_id, settings: Some(settings) })
        }
        ShardCommand::DropTopic { cluster_version, topic_id } => {
            ShardChange::DropTopic(DropTopic { cluster_version, topic_id })
        }
        ShardCommand::Trim { starts } => {
            let (partitions, starts) = starts.into_iter().map(|(id, start)| (id.0, start)).unzip();
            ShardChange::Trim(Trim { partitions, starts })
        }
        ShardCommand::Release { index } => ShardChange::Release(Release { index }),
        ShardCommand::SetFencingToken { partition, expected, token } => {
            let text = |token: FencingToken| token.as_str().to_owned();
            ShardChange::SetFencingToken(SetFencingToken {
                partition: partition.0,
                expected: expected.map(text),
                token: text(token),
            })
        }
        ShardCommand::CleanUp { rounds } => ShardChange::CleanUp(CleanUp {
            partitions: rounds.iter().map(|(id, _)| id.0).collect(),
            upto: rounds.iter().map(|(_, round)| round.upto).collect(),
            tombstones_below: rounds.iter().map(|(_, round)| round.tombstones_below).collect(),
        }),
        ShardCommand::Cleaned { partitions, time_us } => {
            let (partitions, upto) = partitions.into_iter().map(|(id, upto)| (id.0, upto)).unzip();
            ShardChange::Cleaned(Cleaned { partitions, upto, time_us })
        }
        ShardCommand::Group(command) => ShardChange::Group((*command).into()),
    };
    ShardRecord { change: Some(change) }.encode(bytes).expect("a BytesMut grows");
}

pub(super) fn decode_shard(bytes: &[u8]) -> Result<ShardCommand, HeadError> {
    let record = ShardRecord::decode(bytes).map_err(|error| malformed(error.to_string()))?;
    let whole = has_no_unknown_fields(&record, bytes);
    let change = record.change.ok_or(HeadError::UnknownCommand)?;
    if !whole {
        return Err(unknown_field());
    }
    Ok(match change {
        ShardChange::CreatePartitions(it) => {
            if !PartitionRun::are_valid(it.runs.iter()) {
                return Err(malformed("a run of partitions is out of bounds"));
            }
            ShardCommand::CreatePartitions {
                cluster_version: it.cluster_version,
                topic_id: it.topic_id,
                runs: it.runs,
                settings: required(it.settings)?,
            }
        }
        ShardChange::UpdateSettings(it) => {
            ShardCommand::UpdateSettings { topic_id: it.topic_id, settings: required(it.settings)? }
        }
        ShardChange::DropTopic(it) => {
            ShardCommand::DropTopic { cluster_version: it.cluster_version, topic_id: it.topic_id }
        }
        ShardChange::Trim(it) => {
            if it.partitions.len() != it.starts.len() {
                return Err(malformed("columns of a trim differ in length"));
            }
            let partitions = it.partitions.into_iter().map(PartitionId);
            ShardCommand::Trim { starts: partitions.zip(it.starts).collect() }
        }
        ShardChange::Release(it) => ShardCommand::Release { index: it.index },
        ShardChange::SetFencingToken(it) => ShardCommand::SetFencingToken {
            partition: PartitionId(it.partition),
            expected: it.expected.as_deref().map(token).transpose()?,
            token: token(&it.token)?,
        },
        ShardChange::CleanUp(CleanUp { partitions, upto, tombstones_below }) => {
            if partitions.len() != upto.len() || upto.len() != tombstones_below.len() {
                return Err(malformed("columns of a cleanup differ in length"));
            }
            let rounds = upto.into_iter().zip(tombstones_below);
            let rounds =
                rounds.map(|(upto, tombstones_below)| CleanupRound { upto, tombstones_below });
            let partitions = partitions.into_iter().map(PartitionId);
            ShardCommand::CleanUp { rounds: partitions.zip(rounds).collect() }
        }
        ShardChange::Cleaned(Cleaned { partitions, upto, time_us }) => {
            if partitions.len() != upto.len() {
                return Err(malformed("columns of cleaned partitions differ in length"));
            }
            let partitions = partitions.into_iter().map(PartitionId).zip(upto).collect();
            ShardCommand::Cleaned { partitions, time_us }
        }
        ShardChange::Group(it) => {
            ShardCommand::Group(Box::new(it.into_command().map_err(malformed)?))
        }
    })
}

pub(super) fn encode_cluster(command: &ClusterCommand, bytes: &mut BytesMut) {
    let change = match command.clone() {
        ClusterCommand::RegisterNode { node_id, endpoint, version, peer_addr } => {
            ClusterChange::RegisterNode(RegisterNode { node_id, endpoint, version, peer_addr })
        }
        ClusterCommand::CreateTopic(topic) => ClusterChange::CreateTopic(CreateTopicRecord {
            name: topic.name,
            partition_count: topic.partition_count,
            replication_factor: topic.replication_factor,
            settings: Some(topic.settings),
            shards: topic.shards,
            requested_at_us: topic.requested_at_us,
        }),
        ClusterCommand::UpdateTopic { name, topic_id, settings, fields } => {
            let (settings, fields) = (Some(settings), fields.0);
            ClusterChange::UpdateTopic(UpdateTopic { name, settings, fields, topic_id })
        }
        ClusterCommand::AddPartitions { name, topic_id, partition_count } => {
            ClusterChange::AddPartitions(AddPartitions { name, partition_count, topic_id })
        }
        ClusterCommand::DeleteTopic { name, topic_id } => {
            ClusterChange::DeleteTopic(DeleteTopic { name, topic_id })
        }
        ClusterCommand::LeaseProducerIds { count } => {
            ClusterChange::LeaseProducerIds(LeaseProducerIds { count })
        }
        ClusterCommand::InitProducer { name } => ClusterChange::InitProducer(InitProducer { name }),
        ClusterCommand::RegisterShards { shards } => {
            ClusterChange::RegisterShards(RegisterShards { shards })
        }
        ClusterCommand::Members(command) => {
            ClusterChange::Members(Members { command: Some(command) })
        }
        ClusterCommand::RaiseProtocol { version } => {
            ClusterChange::RaiseProtocol(RaiseProtocol { version })
        }
        ClusterCommand::AssignGroupSlots => ClusterChange::AssignGroupSlots(AssignGroupSlots {}),
        ClusterCommand::Access(command) => ClusterChange::Access(Access { command: Some(command) }),
    };
    ClusterRecord { change: Some(change) }.encode(bytes).expect("a BytesMut grows");
}

pub(super) fn decode_cluster(bytes: &[u8]) -> Result<ClusterCommand, HeadError> {
    let record = ClusterRecord::decode(bytes).map_err(|error| malformed(error.to_string()))?;
    let whole = has_no_unknown_fields(&record, bytes);
    let change = record.change.ok_or(HeadError::UnknownCommand)?;
    if !whole {
        return Err(unknown_field());
    }
    Ok(match change {
        ClusterChange::RegisterNode(it) => ClusterCommand::RegisterNode {
            node_id: it.node_id,
            endpoint: it.endpoint,
            version: it.version,
            peer_addr: it.peer_addr,
        },
        ClusterChange::CreateTopic(it) => ClusterCommand::CreateTopic(CreateTopic {
            name: it.name,
            partition_count: it.partition_count,
            replication_factor: it.replication_factor,
            settings: required(it.settings)?,
            shards: it.shards,
            requested_at_us: it.requested_at_us,
        }),
        ClusterChange::UpdateTopic(it) => ClusterCommand::UpdateTopic {
            name: it.name,
            topic_id: it.topic_id,
            settings: required(it.settings)?,
            fields: SettingsMask(it.fields),
        },
        ClusterChange::AddPartitions(it) => ClusterCommand::AddPartitions {
            name: it.name,
            topic_id: it.topic_id,
            partition_count: it.partition_count,
        },
        ClusterChange::DeleteTopic(it) => {
            ClusterCommand::DeleteTopic { name: it.name, topic_id: it.topic_id }
        }
        ClusterChange::LeaseProducerIds(it) => ClusterCommand::LeaseProducerIds { count: it.count },
        ClusterChange::InitProducer(it) => ClusterCommand::InitProducer { name: it.name },
        ClusterChange::RegisterShards(it) => ClusterCommand::RegisterShards { shards: it.shards },
        ClusterChange::Members(it) => {
            ClusterCommand::Members(it.command.ok_or(HeadError::UnknownCommand)?)
        }
        ClusterChange::RaiseProtocol(it) => ClusterCommand::RaiseProtocol { version: it.version },
        ClusterChange::AssignGroupSlots(_) => ClusterCommand::AssignGroupSlots,
        ClusterChange::Access(it) => {
            ClusterCommand::Access(it.command.ok_or(HeadError::UnknownCommand)?)
        }
    })
}
