//! Encodes control entries as protobuf messages, so that they can be extended.
//! Unknown commands and fields are an error.

use bytes::BytesMut;
use prost::Message;

use super::command::{
    ClusterCommand, CreateTopic, PartitionRun, PartitionSettings, SettingsMask, ShardCommand,
};
use super::{
    CleanupRound, FencingToken, GroupCommand, HeadError, PartitionId, ProducerOwner, SplitRule,
};
use crate::records::cluster_command_record::{
    AddPartitions, AssignGroupSlots, Change as ClusterChange, CreateTopic as CreateTopicRecord,
    DeleteTopic, InitProducer, LeaseProducerIds, RaiseProtocol, RegisterNode, RegisterShards,
    UpdateTopic,
};
use crate::records::shard_command_record::{
    Change as ShardChange, CleanUp, Cleaned, CreatePartitions, DropTopic, Release, SetFencingToken,
    Split, Trim, UpdateSettings,
};
use crate::records::{
    AccessCommandRecord, ClusterCommandRecord, MemberCommandRecord, ShardCommandRecord,
};

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

fn owner(field: &[u8]) -> Result<ProducerOwner, HeadError> {
    ProducerOwner::from_field(field).ok_or_else(|| malformed("owner has a wrong form"))
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
        ShardCommand::Split { id, target, rule } => {
            ShardChange::Split(Split { id, target, rule: Some(rule) })
        }
        ShardCommand::CancelSplit { id } => ShardChange::CancelSplit(id),
        ShardCommand::FinishSplit { id } => ShardChange::FinishSplit(id),
    };
    ShardCommandRecord { change: Some(change) }.encode(bytes).expect("a BytesMut grows");
}

pub(super) fn decode_shard(bytes: &[u8]) -> Result<ShardCommand, HeadError> {
    let record = ShardCommandRecord::decode(bytes).map_err(|error| malformed(error.to_string()))?;
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
        ShardChange::Split(Split { id, target, rule }) => {
            let rule = rule.filter(SplitRule::is_valid);
            let rule = rule.ok_or_else(|| malformed("a split has less than two parts"))?;
            ShardCommand::Split { id, target, rule }
        }
        ShardChange::CancelSplit(id) => ShardCommand::CancelSplit { id },
        ShardChange::FinishSplit(id) => ShardCommand::FinishSplit { id },
        ShardChange::Group(it) => {
            ShardCommand::Group(Box::new(GroupCommand::try_from(it).map_err(malformed)?))
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
        ClusterCommand::LeaseProducerIds { count, owner } => {
            let owner = owner.to_field();
            ClusterChange::LeaseProducerIds(LeaseProducerIds { count, owner })
        }
        ClusterCommand::InitProducer { name, owner } => {
            ClusterChange::InitProducer(InitProducer { name, owner: owner.to_field() })
        }
        ClusterCommand::RegisterShards { shards } => {
            ClusterChange::RegisterShards(RegisterShards { shards })
        }
        ClusterCommand::Members(command) => {
            ClusterChange::Members(MemberCommandRecord { command: Some(command) })
        }
        ClusterCommand::RaiseProtocol { version } => {
            ClusterChange::RaiseProtocol(RaiseProtocol { version })
        }
        ClusterCommand::AssignGroupSlots => ClusterChange::AssignGroupSlots(AssignGroupSlots {}),
        ClusterCommand::Access(command) => {
            ClusterChange::Access(AccessCommandRecord { command: Some(command) })
        }
    };
    ClusterCommandRecord { change: Some(change) }.encode(bytes).expect("a BytesMut grows");
}

pub(super) fn decode_cluster(bytes: &[u8]) -> Result<ClusterCommand, HeadError> {
    let record =
        ClusterCommandRecord::decode(bytes).map_err(|error| malformed(error.to_string()))?;
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
        ClusterChange::LeaseProducerIds(it) => {
            ClusterCommand::LeaseProducerIds { count: it.count, owner: owner(&it.owner)? }
        }
        ClusterChange::InitProducer(it) => {
            ClusterCommand::InitProducer { name: it.name, owner: owner(&it.owner)? }
        }
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
