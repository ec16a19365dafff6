//! ListOffsets and OffsetForLeaderEpoch.

use std::time::{Duration, UNIX_EPOCH};

use futures_util::future::join_all;
use helix_client::proto::log::v1::Watermarks;
use helix_client::{Client, Position};
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::list_offsets_response::{
    ListOffsetsPartitionResponse, ListOffsetsTopicResponse,
};
use kafka_protocol::messages::offset_for_leader_epoch_response::{
    EpochEndOffset, OffsetForLeaderTopicResult,
};
use kafka_protocol::messages::{
    ListOffsetsRequest, ListOffsetsResponse, OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
};

use crate::context::RequestContext;
use crate::errors::{CallTarget, code_of};
use crate::upstream::leader_epoch;

/// Timestamps of ListOffsets that name a position.
const LATEST: i64 = -1;
const EARLIEST: i64 = -2;
const MAX_TIMESTAMP: i64 = -3;

/// First version of ListOffsets that has leader epochs.
const LEADER_EPOCH_SINCE: i16 = 4;

/// Resolved position in a partition.
struct Resolved {
    offset: u64,
    watermarks: Watermarks,
    epoch: i32,
}

/// Resolves one position in several partitions of a topic. If one fails, each is tried alone.
async fn resolve(
    client: &Client,
    topic: &str,
    partitions: &[u32],
    position: &Position,
) -> Vec<Result<Resolved, ResponseError>> {
    if let Ok(all) = resolve_together(client, topic, partitions, position).await {
        return all.into_iter().map(Ok).collect();
    }
    let each = partitions.iter().map(|&partition| async move {
        let one = resolve_together(client, topic, &[partition], position).await?;
        one.into_iter().next().ok_or(ResponseError::UnknownServerError)
    });
    join_all(each).await
}

async fn resolve_together(
    client: &Client,
    topic: &str,
    partitions: &[u32],
    position: &Position,
) -> Result<Vec<Resolved>, ResponseError> {
    let code = |error| match code_of(&error, CallTarget::Topic) {
        // A read has no outcome.
        ResponseError::RequestTimedOut => ResponseError::NotLeaderOrFollower,
        code => code,
    };
    let count = client.partition_count(topic).await.map_err(code)?;
    if partitions.iter().any(|&partition| partition >= count) {
        // A new partition takes a moment to be known here.
        client.forget_topic(topic);
        return Err(ResponseError::UnknownTopicOrPartition);
    }
    let resolved = client.admin().resolve_offsets(topic, partitions, position).await;
    let mut all = Vec::with_capacity(partitions.len());
    let mut resolved = resolved.map_err(code)?;
    for &partition in partitions {
        let term = client.route(topic, partition).await.map_or(0, |route| route.term);
        let index = resolved.iter().position(|offset| offset.partition == partition);
        let Some(index) = index else { return Err(ResponseError::UnknownServerError) };
        let offset = resolved.swap_remove(index);
        all.push(Resolved {
            offset: offset.offset,
            watermarks: offset.watermarks.unwrap_or_default(),
            epoch: leader_epoch(term),
        });
    }
    Ok(all)
}

/// Answers a request for offsets.
pub(crate) async fn list_offsets(
    context: &RequestContext,
    request: ListOffsetsRequest,
) -> ListOffsetsResponse {
    let client = context.upstream.client();
    let topics = request.topics.into_iter().map(|topic| async move {
        // Partitions by their timestamps, so that one call resolves each.
        let mut by_time: Vec<(i64, Vec<i32>)> = Vec::new();
        for partition in &topic.partitions {
            let found = by_time.iter_mut().find(|(time, _)| *time == partition.timestamp);
            match found {
                Some((_, indexes)) => indexes.push(partition.partition_index),
                None => by_time.push((partition.timestamp, vec![partition.partition_index])),
            }
        }
        let name = topic.name.to_string();
        let mut responses = Vec::with_capacity(topic.partitions.len());
        for (time, indexes) in by_time {
            responses.extend(offsets_at(client, &name, time, &indexes).await);
        }
        if context.version < LEADER_EPOCH_SINCE {
            responses.iter_mut().for_each(|response| response.leader_epoch = -1);
        }
        ListOffsetsTopicResponse::default().with_name(topic.name).with_partitions(responses)
    });
    ListOffsetsResponse::default().with_topics(join_all(topics).await)
}

async fn offsets_at(
    client: &Client,
    topic: &str,
    time: i64,
    indexes: &[i32],
) -> Vec<ListOffsetsPartitionResponse> {
    let position = match time {
        LATEST | MAX_TIMESTAMP => Some(Position::Latest),
        EARLIEST => Some(Position::Earliest),
        time => u64::try_from(time)
            .ok()
            .and_then(|time| UNIX_EPOCH.checked_add(Duration::from_millis(time)))
            .map(Position::Timestamp),
    };
    let failed = |index: i32, code: ResponseError| {
        ListOffsetsPartitionResponse::default()
            .with_partition_index(index)
            .with_error_code(code.code())
            .with_timestamp(-1)
            .with_offset(-1)
    };
    let Some(position) = position else {
        let code = ResponseError::InvalidRequest;
        return indexes.iter().map(|&index| failed(index, code)).collect();
    };
    let numbers: Vec<u32> = indexes.iter().filter_map(|&index| u32::try_from(index).ok()).collect();
    if numbers.len() < indexes.len() {
        let code = ResponseError::UnknownTopicOrPartition;
        return indexes.iter().map(|&index| failed(index, code)).collect();
    }
    let resolved = resolve(client, topic, &numbers, &position).await;
    let response = |(&index, resolved): (&i32, Result<Resolved, ResponseError>)| {
        let Resolved { offset, watermarks, epoch } = match resolved {
            Ok(resolved) => resolved,
            Err(code) => return failed(index, code),
        };
        let end = watermarks.high_watermark;
        let offset = match time {
            // The newest record has the latest append time.
            MAX_TIMESTAMP => end.checked_sub(1).filter(|last| *last >= watermarks.log_start_offset),
            LATEST | EARLIEST => Some(offset),
            // No record is that late.
            _ => Some(offset).filter(|offset| *offset < end),
        };
        let offset = offset.and_then(|offset| i64::try_from(offset).ok());
        ListOffsetsPartitionResponse::default()
            .with_partition_index(index)
            .with_timestamp(if time >= 0 && offset.is_some() { time } else { -1 })
            .with_offset(offset.unwrap_or(-1))
            .with_leader_epoch(if offset.is_some() { epoch } else { -1 })
    };
    indexes.iter().zip(resolved).map(response).collect()
}

/// Answers a request for the ends of leader epochs.
///
/// Committed records are never taken back, so what a client has read of an earlier epoch is still
/// there: the end of each known epoch is the end of the partition.
pub(crate) async fn offset_for_leader_epoch(
    context: &RequestContext,
    request: OffsetForLeaderEpochRequest,
) -> OffsetForLeaderEpochResponse {
    let client = context.upstream.client();
    let topics = request.topics.into_iter().map(|topic| async move {
        let name = &topic.topic.to_string();
        let ends = topic.partitions.iter().map(|partition| async move {
            let response = EpochEndOffset::default().with_partition(partition.partition);
            let failed = |code: ResponseError| {
                EpochEndOffset::default()
                    .with_partition(partition.partition)
                    .with_error_code(code.code())
                    .with_leader_epoch(-1)
                    .with_end_offset(-1)
            };
            let Ok(number) = u32::try_from(partition.partition) else {
                return failed(ResponseError::UnknownTopicOrPartition);
            };
            let resolved = resolve(client, name, &[number], &Position::Latest).await.pop();
            match resolved.unwrap_or(Err(ResponseError::UnknownServerError)) {
                Err(code) => failed(code),
                // The client knows a later leader than the cluster.
                Ok(Resolved { epoch, .. }) if partition.leader_epoch > epoch => {
                    response.with_leader_epoch(-1).with_end_offset(-1)
                }
                Ok(Resolved { offset, .. }) => response
                    .with_leader_epoch(partition.leader_epoch)
                    .with_end_offset(i64::try_from(offset).unwrap_or(i64::MAX)),
            }
        });
        let ends = join_all(ends).await;
        OffsetForLeaderTopicResult::default().with_topic(topic.topic).with_partitions(ends)
    });
    OffsetForLeaderEpochResponse::default().with_topics(join_all(topics).await)
}
