//! CreateTopics, DeleteTopics, CreatePartitions and DeleteRecords.

use std::time::Duration;

use futures_util::future::join_all;
use helix_client::proto::log::v1::{BatchFormat, ErrorReason, TopicConfig};
use helix_client::{Admin, Error, NewTopic, Position};
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::create_partitions_request::CreatePartitionsTopic;
use kafka_protocol::messages::create_partitions_response::CreatePartitionsTopicResult;
use kafka_protocol::messages::create_topics_request::CreatableTopic;
use kafka_protocol::messages::create_topics_response::CreatableTopicResult;
use kafka_protocol::messages::delete_records_response::{
    DeleteRecordsPartitionResult, DeleteRecordsTopicResult,
};
use kafka_protocol::messages::delete_topics_response::DeletableTopicResult;
use kafka_protocol::messages::{
    CreatePartitionsRequest, CreatePartitionsResponse, CreateTopicsRequest, CreateTopicsResponse,
    DeleteRecordsRequest, DeleteRecordsResponse, DeleteTopicsRequest, DeleteTopicsResponse,
};
use uuid::Uuid;

use super::configs::{ConfigRefusal, apply_config};
use crate::context::{RequestContext, text};
use crate::errors::{CallTarget, code_of};

/// Partitions of a topic that states none.
const DEFAULT_PARTITIONS: u32 = 1;

/// First versions of CreateTopics with the number of partitions, and with topic ids.
const COUNTS_SINCE: i16 = 5;
const TOPIC_ID_SINCE: i16 = 7;

/// First version of DeleteTopics with texts of errors.
const DELETE_TEXT_SINCE: i16 = 5;

/// Age of the view that says whether a topic exists.
const VIEW_AGE_MAX: Duration = Duration::from_millis(50);

/// Returns the settings of topics that the gateway creates.
pub(crate) fn kafka_topic_config() -> TopicConfig {
    TopicConfig { batch_format: BatchFormat::Kafka.into(), ..TopicConfig::default() }
}

/// Code and text of a failed change.
type Refusal = (ResponseError, String);

fn refusal(error: &Error) -> Refusal {
    let code = match code_of(error, CallTarget::Topic) {
        ResponseError::InvalidRequest if error.message.contains("name") => {
            ResponseError::InvalidTopicException
        }
        // Changes may be repeated.
        ResponseError::NotLeaderOrFollower => ResponseError::RequestTimedOut,
        code => code,
    };
    (code, error.message.clone())
}

/// Answers a request to create topics.
pub(crate) async fn create_topics(
    context: &RequestContext,
    request: CreateTopicsRequest,
) -> CreateTopicsResponse {
    let validate_only = request.validate_only;
    let topics = request.topics.into_iter().map(|topic| create(context, topic, validate_only));
    let topics = join_all(topics).await;
    context.upstream.forget_view();
    CreateTopicsResponse::default().with_topics(topics)
}

async fn create(
    context: &RequestContext,
    topic: CreatableTopic,
    validate_only: bool,
) -> CreatableTopicResult {
    let result = CreatableTopicResult::default().with_name(topic.name.clone());
    match try_create(context, topic, validate_only).await {
        Err((code, what)) => result
            .with_error_code(code.code())
            .with_error_message(Some(text(what)))
            .with_num_partitions(-1)
            .with_replication_factor(-1),
        Ok(created) => {
            let mut result = result.with_configs(Some(Vec::new()));
            if context.version >= COUNTS_SINCE {
                result.num_partitions = i32::try_from(created.partitions).unwrap_or(i32::MAX);
                result.replication_factor = i16::try_from(created.replicas).unwrap_or(i16::MAX);
            }
            if context.version >= TOPIC_ID_SINCE {
                result.topic_id = Uuid::from_u128(u128::from(created.topic_id));
            }
            result
        }
    }
}

struct CreatedTopic {
    topic_id: u64,
    partitions: u32,
    replicas: u32,
}

async fn try_create(
    context: &RequestContext,
    topic: CreatableTopic,
    validate_only: bool,
) -> Result<CreatedTopic, Refusal> {
    let name = topic.name.to_string();
    let view = context.upstream.view(VIEW_AGE_MAX).await.map_err(|error| refusal(&error))?;
    if view.topics.contains_key(&name) {
        return Err((ResponseError::TopicAlreadyExists, format!("topic {name:?} exists")));
    }
    if !topic.assignments.is_empty() {
        let what = "the cluster chooses the replicas; leave out assignments".to_owned();
        return Err((ResponseError::InvalidReplicaAssignment, what));
    }
    let partition_count = match topic.num_partitions {
        -1 => DEFAULT_PARTITIONS,
        count => u32::try_from(count).ok().filter(|count| *count > 0).ok_or_else(|| {
            let what = format!("a topic has at least 1 partition, not {count}");
            (ResponseError::InvalidPartitions, what)
        })?,
    };
    let nodes = view.node_ids.len();
    let factor = topic.replication_factor;
    if factor != -1 && !usize::try_from(factor).is_ok_and(|it| (1..=nodes).contains(&it)) {
        let what = format!("the replication factor is {factor}; the cluster has {nodes} nodes");
        return Err((ResponseError::InvalidReplicationFactor, what));
    }
    let mut new = NewTopic::new(name, partition_count);
    new.validate_only = validate_only;
    new.config = kafka_topic_config();
    for config in &topic.configs {
        let value = config.value.as_deref();
        apply_config(&mut new.config, &config.name, value, nodes)
            .map_err(ConfigRefusal::into_code)?;
    }
    let admin = context.upstream.client().admin();
    new.replication_factor = replication_factor(&admin, &new, factor).await?;
    let created = admin.create_topic(&new).await.map_err(|error| refusal(&error))?;
    Ok(CreatedTopic {
        topic_id: created.topic_id,
        partitions: partition_count,
        replicas: created.replication_factor,
    })
}

/// Returns the number of replicas to ask the cluster for; 0 for the cluster's number.
///
/// A topic gets at least as many as its creator asks for. Fewer than the cluster's number do not
/// count: programs ask for one replica without a thought, and an ack means a synced majority.
async fn replication_factor(admin: &Admin, new: &NewTopic, asked: i16) -> Result<u32, Refusal> {
    let Some(asked) = u32::try_from(asked).ok().filter(|asked| *asked > 1) else { return Ok(0) };
    let check = NewTopic { validate_only: true, ..new.clone() };
    let checked = admin.create_topic(&check).await.map_err(|error| refusal(&error))?;
    // The cluster's numbers are odd: an even one tolerates no more failures.
    Ok(if asked <= checked.replication_factor { 0 } else { asked | 1 })
}

/// Answers a request to delete topics.
pub(crate) async fn delete_topics(
    context: &RequestContext,
    request: DeleteTopicsRequest,
) -> DeleteTopicsResponse {
    let admin = context.upstream.client().admin();
    let admin = &admin;
    let results = request.topic_names.into_iter().map(|name| async move {
        let deleted = admin.delete_topic(&*name.0).await;
        let result = DeletableTopicResult::default().with_name(Some(name));
        let Err(error) = deleted else { return result };
        let (code, what) = refusal(&error);
        let result = result.with_error_code(code.code());
        match context.version >= DELETE_TEXT_SINCE {
            true => result.with_error_message(Some(text(what))),
            false => result,
        }
    });
    let results = join_all(results).await;
    context.upstream.forget_view();
    DeleteTopicsResponse::default().with_responses(results)
}

/// Answers a request for more partitions.
pub(crate) async fn create_partitions(
    context: &RequestContext,
    request: CreatePartitionsRequest,
) -> CreatePartitionsResponse {
    let validate_only = request.validate_only;
    let results = request.topics.into_iter().map(|topic| async move {
        let result = CreatePartitionsTopicResult::default().with_name(topic.name.clone());
        match add_partitions(context, topic, validate_only).await {
            Ok(()) => result,
            Err((code, what)) => {
                result.with_error_code(code.code()).with_error_message(Some(text(what)))
            }
        }
    });
    let results = join_all(results).await;
    context.upstream.forget_view();
    CreatePartitionsResponse::default().with_results(results)
}

async fn add_partitions(
    context: &RequestContext,
    topic: CreatePartitionsTopic,
    validate_only: bool,
) -> Result<(), Refusal> {
    let name = topic.name.to_string();
    if topic.assignments.is_some_and(|assignments| !assignments.is_empty()) {
        let what = "the cluster chooses the replicas; leave out assignments".to_owned();
        return Err((ResponseError::InvalidReplicaAssignment, what));
    }
    let view = context.upstream.view(VIEW_AGE_MAX).await.map_err(|error| refusal(&error))?;
    let Some(known) = view.topics.get(&name) else {
        let what = format!("topic {name:?} does not exist");
        return Err((ResponseError::UnknownTopicOrPartition, what));
    };
    let current = known.shard_ids.len();
    let count = u32::try_from(topic.count).ok().filter(|count| *count as usize > current);
    let Some(count) = count else {
        let what = format!("the topic has {current} partitions; {} are not more", topic.count);
        return Err((ResponseError::InvalidPartitions, what));
    };
    if validate_only {
        return Ok(());
    }
    let admin = context.upstream.client().admin();
    admin.add_partitions(name.as_str(), count).await.map(drop).map_err(|error| refusal(&error))
}

/// Answers a request to delete the records below offsets.
pub(crate) async fn delete_records(
    context: &RequestContext,
    request: DeleteRecordsRequest,
) -> DeleteRecordsResponse {
    let topics = request.topics.into_iter().map(|topic| async move {
        let name = &topic.name.to_string();
        let partitions = topic.partitions.iter().map(|partition| async move {
            let result = DeleteRecordsPartitionResult::default()
                .with_partition_index(partition.partition_index);
            match trim(context, name, partition.partition_index, partition.offset).await {
                Ok(log_start) => result.with_low_watermark(log_start),
                Err(code) => result.with_low_watermark(-1).with_error_code(code.code()),
            }
        });
        let partitions = join_all(partitions).await;
        DeleteRecordsTopicResult::default().with_name(topic.name).with_partitions(partitions)
    });
    DeleteRecordsResponse::default().with_topics(join_all(topics).await)
}

async fn trim(
    context: &RequestContext,
    topic: &str,
    partition: i32,
    offset: i64,
) -> Result<i64, ResponseError> {
    let client = context.upstream.client();
    let code = |error: Error| match error.is(ErrorReason::OffsetOutOfRange) {
        true => ResponseError::OffsetOutOfRange,
        false => refusal(&error).0,
    };
    let count = client.partition_count(topic).await.map_err(code)?;
    let partition = u32::try_from(partition).ok().filter(|partition| *partition < count);
    let partition = partition.ok_or(ResponseError::UnknownTopicOrPartition)?;
    let offset = match offset {
        // All records that are there now.
        -1 => {
            let ends = client.admin().resolve_offsets(topic, &[partition], &Position::Latest).await;
            ends.map_err(code)?.first().map_or(0, |end| end.offset)
        }
        offset => u64::try_from(offset).map_err(|_| ResponseError::OffsetOutOfRange)?,
    };
    let watermarks = client.admin().trim(topic, partition, offset).await.map_err(code)?;
    Ok(i64::try_from(watermarks.log_start_offset).unwrap_or(i64::MAX))
}
