//! OffsetCommit, OffsetFetch and OffsetDelete: the offsets of Helix's groups.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures_util::future::join_all;
use helix_client::Error;
use helix_client::proto::log::v1::{
    CommitStatus, CommittedOffset, ErrorReason, OffsetAndLag, TopicPartition,
};
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::offset_commit_response::{
    OffsetCommitResponsePartition, OffsetCommitResponseTopic,
};
use kafka_protocol::messages::offset_delete_response::{
    OffsetDeleteResponsePartition, OffsetDeleteResponseTopic,
};
use kafka_protocol::messages::offset_fetch_response::{
    OffsetFetchResponseGroup, OffsetFetchResponsePartition, OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic, OffsetFetchResponseTopics,
};
use kafka_protocol::messages::{
    OffsetCommitRequest, OffsetCommitResponse, OffsetDeleteRequest, OffsetDeleteResponse,
    OffsetFetchRequest, OffsetFetchResponse, TopicName,
};

use super::coordinator::check_coordinator;
use crate::context::{RequestContext, text};
use crate::errors::{CallTarget, code_of};

/// Offsets of one commit to the cluster, and bytes of their names and metadata.
const COMMIT_OFFSETS_MAX: usize = 500;
const COMMIT_BYTES_MAX: usize = 40 << 10;

/// Longest metadata of an offset.
const METADATA_BYTES_MAX: usize = 4 << 10;

/// First version of OffsetFetch with several groups, and with an error of the group.
const SEVERAL_SINCE: i16 = 8;
const GROUP_ERROR_SINCE: i16 = 2;

/// Age of the view in which topics are looked up.
const VIEW_AGE_MAX: Duration = Duration::from_secs(5);

/// Answers a commit.
pub(crate) async fn offset_commit(
    context: &RequestContext,
    request: OffsetCommitRequest,
) -> OffsetCommitResponse {
    let group = request.group_id.to_string();
    let mut codes: HashMap<(TopicName, i32), ResponseError> = HashMap::new();
    let mut offsets = Vec::new();
    for topic in &request.topics {
        let view = context.upstream.view_with(&topic.name, VIEW_AGE_MAX).await;
        for partition in &topic.partitions {
            let index = partition.partition_index;
            let metadata = partition.committed_metadata.as_deref().unwrap_or_default();
            let checked = match &view {
                Err(error) => Err(code_of(error, CallTarget::Group)),
                Ok(view) if !view.has_partition(&topic.name, index) => {
                    Err(ResponseError::UnknownTopicOrPartition)
                }
                Ok(_) if metadata.len() > METADATA_BYTES_MAX => {
                    Err(ResponseError::OffsetMetadataTooLarge)
                }
                Ok(view) => match (u32::try_from(index), u64::try_from(partition.committed_offset))
                {
                    (Ok(number), Ok(offset)) => Ok(CommittedOffset {
                        partition: Some(TopicPartition {
                            topic: topic.name.to_string(),
                            partition: number,
                            topic_id: view.topics.get(&**topic.name).map_or(0, |it| it.topic_id),
                        }),
                        offset,
                        metadata: metadata.to_owned(),
                    }),
                    _ => Err(ResponseError::OffsetOutOfRange),
                },
            };
            match checked {
                Ok(offset) => offsets.push(offset),
                Err(code) => {
                    codes.insert((topic.name.clone(), index), code);
                }
            }
        }
    }
    let result = match offsets.is_empty() {
        true => Ok(()),
        false => commit(context, &group, &request, &offsets).await,
    };
    let code_for = |topic: &TopicName, index: i32| match codes.get(&(topic.clone(), index)) {
        Some(code) => code.code(),
        None => result.as_ref().err().map_or(0, ResponseError::code),
    };
    let topics = request.topics.iter().map(|topic| {
        let partitions = topic.partitions.iter().map(|partition| {
            OffsetCommitResponsePartition::default()
                .with_partition_index(partition.partition_index)
                .with_error_code(code_for(&topic.name, partition.partition_index))
        });
        OffsetCommitResponseTopic::default()
            .with_name(topic.name.clone())
            .with_partitions(partitions.collect())
    });
    OffsetCommitResponse::default().with_topics(topics.collect())
}

async fn commit(
    context: &RequestContext,
    group: &str,
    request: &OffsetCommitRequest,
    offsets: &[CommittedOffset],
) -> Result<(), ResponseError> {
    check_coordinator(context, group).await?;
    let groups = &context.state.groups;
    let admin = context.upstream.client().admin();
    let generation = request.generation_id_or_member_epoch;
    if generation < 0 && request.member_id.is_empty() {
        if groups.has_members(group) {
            // Another client reads the partitions.
            return Err(ResponseError::UnknownMemberId);
        }
        for part in parts(offsets) {
            let committing = admin.commit_group_offsets(group, part).await;
            committing.map_err(|error| commit_code(&error))?;
        }
        return Ok(());
    }
    let instance_id = request.group_instance_id.as_deref();
    let check = || {
        groups.with(group, |group, now| {
            group.check_member(&request.member_id, instance_id, generation)?;
            // A commit keeps its member alive. While others join, it is the last one.
            let _ = group.heartbeat(&request.member_id, now);
            Ok(())
        })
    };
    check()?;
    let Some(state) = groups.offsets(group) else { return Err(ResponseError::UnknownMemberId) };
    let mut epoch = state.epoch.lock().await;
    // The generation may have ended while the commit waited for others.
    check()?;
    for part in parts(offsets) {
        match admin.commit_group_offsets_after(group, part, *epoch).await {
            Ok(next) => *epoch = next,
            Err(error) => {
                let is_changed =
                    error.is(ErrorReason::StaleCommit) || error.is(ErrorReason::GroupNotEmpty);
                if is_changed {
                    tracing::warn!(group, %error, "offsets changed elsewhere, members join again");
                    groups.restart(group);
                }
                return Err(commit_code(&error));
            }
        }
    }
    Ok(())
}

fn commit_code(error: &Error) -> ResponseError {
    if error.is(ErrorReason::GroupNotEmpty) {
        return ResponseError::InconsistentGroupProtocol;
    }
    match code_of(error, CallTarget::Group) {
        // A commit may be repeated.
        ResponseError::RequestTimedOut | ResponseError::NotLeaderOrFollower => {
            ResponseError::CoordinatorNotAvailable
        }
        code => code,
    }
}

/// Splits offsets into commits that the cluster takes.
fn parts(offsets: &[CommittedOffset]) -> Vec<&[CommittedOffset]> {
    let mut parts = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (index, offset) in offsets.iter().enumerate() {
        let name = offset.partition.as_ref().map_or(0, |partition| partition.topic.len());
        let size = name + offset.metadata.len() + 32;
        if index > start && (bytes + size > COMMIT_BYTES_MAX || index - start >= COMMIT_OFFSETS_MAX)
        {
            parts.push(&offsets[start..index]);
            (start, bytes) = (index, 0);
        }
        bytes += size;
    }
    if start < offsets.len() {
        parts.push(&offsets[start..]);
    }
    parts
}

/// A committed offset of a response.
struct FetchedOffset {
    offset: i64,
    metadata: String,
}

/// Offsets of a group by topic; partitions without one are absent.
type GroupOffsets = HashMap<String, HashMap<i32, FetchedOffset>>;

async fn offsets_of(context: &RequestContext, group: &str) -> Result<GroupOffsets, ResponseError> {
    check_coordinator(context, group).await?;
    let admin = context.upstream.client().admin();
    let committed = match admin.group_offsets(group, &[]).await {
        Ok(committed) => committed,
        Err(error) if error.is(ErrorReason::GroupNotFound) => return Ok(GroupOffsets::new()),
        Err(error) => {
            return Err(match code_of(&error, CallTarget::Group) {
                code @ ResponseError::GroupAuthorizationFailed => code,
                // The code that clients repeat this request after.
                _ => ResponseError::CoordinatorLoadInProgress,
            });
        }
    };
    let mut offsets = GroupOffsets::new();
    for row in committed {
        let is_deleted = row.status() == CommitStatus::TopicDeleted;
        let OffsetAndLag { committed: Some(committed), .. } = row else { continue };
        let Some(partition) = committed.partition.filter(|_| !is_deleted) else { continue };
        let offset = FetchedOffset {
            offset: i64::try_from(committed.offset).unwrap_or(i64::MAX),
            metadata: committed.metadata,
        };
        let number = i32::try_from(partition.partition).unwrap_or(i32::MAX);
        offsets.entry(partition.topic).or_default().insert(number, offset);
    }
    Ok(offsets)
}

/// Offsets of the wanted partitions, or of all that have one.
fn select(
    wanted: Option<Vec<(TopicName, Vec<i32>)>>,
    mut offsets: GroupOffsets,
) -> Vec<(TopicName, Vec<(i32, FetchedOffset)>)> {
    let Some(wanted) = wanted else {
        let topic = |(name, partitions): (String, HashMap<i32, FetchedOffset>)| {
            (TopicName(text(name)), partitions.into_iter().collect())
        };
        return offsets.into_iter().map(topic).collect();
    };
    let missing = || FetchedOffset { offset: -1, metadata: String::new() };
    wanted
        .into_iter()
        .map(|(name, indexes)| {
            let mut known = offsets.remove(&*name.0).unwrap_or_default();
            let entry = |index: i32| (index, known.remove(&index).unwrap_or_else(missing));
            (name, indexes.into_iter().map(entry).collect())
        })
        .collect()
}

/// Answers a request for committed offsets.
pub(crate) async fn offset_fetch(
    context: &RequestContext,
    request: OffsetFetchRequest,
) -> OffsetFetchResponse {
    if context.version >= SEVERAL_SINCE {
        let groups = request.groups.into_iter().map(|group| async move {
            let response =
                OffsetFetchResponseGroup::default().with_group_id(group.group_id.clone());
            let offsets = match offsets_of(context, &group.group_id).await {
                Ok(offsets) => offsets,
                Err(code) => return response.with_error_code(code.code()),
            };
            let wanted = group.topics.map(|topics| {
                topics.into_iter().map(|topic| (topic.name, topic.partition_indexes)).collect()
            });
            let topics = select(wanted, offsets).into_iter().map(|(name, partitions)| {
                let partition = |(index, offset): (i32, FetchedOffset)| {
                    OffsetFetchResponsePartitions::default()
                        .with_partition_index(index)
                        .with_committed_offset(offset.offset)
                        .with_committed_leader_epoch(-1)
                        .with_metadata(Some(text(offset.metadata)))
                };
                OffsetFetchResponseTopics::default()
                    .with_name(name)
                    .with_partitions(partitions.into_iter().map(partition).collect())
            });
            response.with_topics(topics.collect())
        });
        return OffsetFetchResponse::default().with_groups(join_all(groups).await);
    }
    let wanted = request.topics.map(|topics| {
        let topics = topics.into_iter().map(|topic| (topic.name, topic.partition_indexes));
        topics.collect::<Vec<_>>()
    });
    let (offsets, code) = match offsets_of(context, &request.group_id).await {
        Ok(offsets) => (offsets, 0),
        Err(code) => (GroupOffsets::new(), code.code()),
    };
    let topics = select(wanted, offsets).into_iter().map(|(name, partitions)| {
        let partition = |(index, offset): (i32, FetchedOffset)| {
            OffsetFetchResponsePartition::default()
                .with_partition_index(index)
                .with_committed_offset(offset.offset)
                .with_committed_leader_epoch(-1)
                .with_metadata(Some(text(offset.metadata)))
                .with_error_code(code)
        };
        OffsetFetchResponseTopic::default()
            .with_name(name)
            .with_partitions(partitions.into_iter().map(partition).collect())
    });
    let response = OffsetFetchResponse::default().with_topics(topics.collect());
    match context.version >= GROUP_ERROR_SINCE {
        true => response.with_error_code(code),
        false => response,
    }
}

/// Answers a request to delete offsets. The cluster forgets the offsets of whole topics only.
pub(crate) async fn offset_delete(
    context: &RequestContext,
    request: OffsetDeleteRequest,
) -> OffsetDeleteResponse {
    let group = request.group_id.to_string();
    let failed = |code: ResponseError| OffsetDeleteResponse::default().with_error_code(code.code());
    let offsets = match offsets_of(context, &group).await {
        Ok(offsets) => offsets,
        Err(code) => return failed(code),
    };
    if context.state.groups.has_members(&group) {
        return failed(ResponseError::NonEmptyGroup);
    }
    let admin = context.upstream.client().admin();
    let mut topics = Vec::with_capacity(request.topics.len());
    for topic in request.topics {
        let name = topic.name.to_string();
        let wanted: HashSet<i32> = topic.partitions.iter().map(|it| it.partition_index).collect();
        let known = offsets.get(&name);
        let has_others =
            known.is_some_and(|known| known.keys().any(|index| !wanted.contains(index)));
        let code = match known {
            None => 0,
            Some(_) if has_others => {
                tracing::warn!(group, topic = name, "offsets of a topic are deleted together only");
                ResponseError::InvalidRequest.code()
            }
            Some(_) => {
                let forgotten = admin.forget_group_topic(&group, name.as_str(), false).await;
                forgotten.err().map_or(0, |error| code_of(&error, CallTarget::Group).code())
            }
        };
        let partitions = topic.partitions.iter().map(|partition| {
            OffsetDeleteResponsePartition::default()
                .with_partition_index(partition.partition_index)
                .with_error_code(code)
        });
        let response = OffsetDeleteResponseTopic::default()
            .with_name(topic.name.clone())
            .with_partitions(partitions.collect());
        topics.push(response);
    }
    OffsetDeleteResponse::default().with_topics(topics)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_commits_below_the_limits() {
        let offset = |metadata: usize| CommittedOffset {
            metadata: "m".repeat(metadata),
            ..CommittedOffset::default()
        };
        let many = vec![offset(0); COMMIT_OFFSETS_MAX * 2 + 1];
        assert_eq!(parts(&many).iter().map(|part| part.len()).collect::<Vec<_>>(), [500, 500, 1]);
        let large = vec![offset(METADATA_BYTES_MAX); 20];
        let split = parts(&large);
        assert!(split.len() >= 2 && split.iter().all(|part| part.len() <= 10));
        assert_eq!(split.iter().map(|part| part.len()).sum::<usize>(), 20);
        assert!(parts(&[]).is_empty());
    }
}
