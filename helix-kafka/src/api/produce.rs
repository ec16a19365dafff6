//! Produce: batches are stored as they came.

use std::future::Future;
use std::time::Duration;

use helix_client::proto::log::v1::Durability;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::produce_response::{PartitionProduceResponse, TopicProduceResponse};
use kafka_protocol::messages::{ProduceRequest, ProduceResponse, TopicName};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use crate::batch::check_produced;
use crate::context::{RequestContext, text};
use crate::lanes::{LaneBatch, LaneKey, LaneResult, Lanes};

/// Bounds of the time that a request waits for its acks.
const WAIT_MIN: Duration = Duration::from_secs(1);
const WAIT_MAX: Duration = Duration::from_secs(60);

/// A partition of a request, until its result is known.
enum Outcome {
    Known(LaneResult),
    Pending(oneshot::Receiver<LaneResult>),
}

/// Result of a request: `None` if the client waits for no response.
pub(crate) struct ProduceOutcome {
    pub(crate) response: Option<ProduceResponse>,
    /// A batch of a client that waits for no response failed. Its connection is closed, so that the
    /// client notices.
    pub(crate) has_silent_failure: bool,
}

/// Gives the batches of a request to their lanes, and returns the future of the response.
///
/// The order of these calls is the order in which batches of a partition are stored.
pub(crate) fn begin_produce(
    context: &RequestContext,
    lanes: &mut Lanes,
    request: ProduceRequest,
) -> impl Future<Output = ProduceOutcome> + Send + use<> {
    let wait = Duration::from_millis(u64::try_from(request.timeout_ms).unwrap_or(0));
    let deadline = Instant::now() + wait.clamp(WAIT_MIN, WAIT_MAX);
    let refusal = match (request.acks, &request.transactional_id) {
        (_, Some(_)) => {
            let what = "transactions are not supported; leave out transactional.id";
            Some((ResponseError::InvalidTxnState, what.to_owned()))
        }
        (-1..=1, None) => None,
        (acks, None) => {
            let what = format!("acks is {acks}; it must be 0, 1 or -1 (all)");
            Some((ResponseError::InvalidRequiredAcks, what))
        }
    };
    let durability = match request.acks {
        0 => Durability::None,
        1 => Durability::LeaderWritten,
        _ => Durability::QuorumSynced,
    };
    let mut topics = Vec::with_capacity(request.topic_data.len());
    for topic in request.topic_data {
        let mut partitions = Vec::with_capacity(topic.partition_data.len());
        for data in topic.partition_data {
            let outcome = match &refusal {
                Some(refusal) => Outcome::Known(Err(refusal.clone())),
                None => {
                    begin_batch(context, lanes, (&topic.name, data.index), data.records, durability)
                }
            };
            partitions.push((data.index, outcome));
        }
        topics.push((topic.name, partitions));
    }
    let is_silent = request.acks == 0;
    async move {
        let mut has_failure = false;
        let mut responses = Vec::with_capacity(topics.len());
        for (name, partitions) in topics {
            let mut partition_responses = Vec::with_capacity(partitions.len());
            for (index, outcome) in partitions {
                let result = settle(outcome, deadline).await;
                has_failure |= result.is_err();
                partition_responses.push(partition_response(index, result));
            }
            let response = TopicProduceResponse::default()
                .with_name(name)
                .with_partition_responses(partition_responses);
            responses.push(response);
        }
        let response = ProduceResponse::default().with_responses(responses);
        ProduceOutcome {
            response: (!is_silent).then_some(response),
            has_silent_failure: is_silent && has_failure,
        }
    }
}

fn begin_batch(
    context: &RequestContext,
    lanes: &mut Lanes,
    (topic, index): (&TopicName, i32),
    records: Option<bytes::Bytes>,
    durability: Durability,
) -> Outcome {
    let checked = u32::try_from(index)
        .map_err(|_| {
            let what = format!("partition {index} does not exist");
            (ResponseError::UnknownTopicOrPartition, what)
        })
        .and_then(|partition| Ok((partition, check_produced(records)?)));
    let (partition, produced) = match checked {
        Ok(checked) => checked,
        Err((code, what)) => {
            context.state.metrics.refused_batches.add(1);
            tracing::debug!(topic = %**topic, partition = index, what, "refused a batch");
            return Outcome::Known(Err((code, what)));
        }
    };
    context.state.metrics.recompressed_batches.add(u64::from(produced.is_recompressed));
    let key = LaneKey {
        topic: topic.to_string(),
        partition,
        producer: produced.producer,
        durability: durability.into(),
    };
    let (done, result) = oneshot::channel();
    let batch = LaneBatch { batch: produced.batch, sequence: produced.sequence, done };
    lanes.push(&context.upstream, key, batch);
    Outcome::Pending(result)
}

async fn settle(outcome: Outcome, deadline: Instant) -> LaneResult {
    match outcome {
        Outcome::Known(result) => result,
        Outcome::Pending(result) => match timeout_at(deadline, result).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => {
                Err((ResponseError::RequestTimedOut, "the gateway is stopping".to_owned()))
            }
            Err(_) => {
                Err((ResponseError::RequestTimedOut, "the append has no ack in time".to_owned()))
            }
        },
    }
}

fn partition_response(index: i32, result: LaneResult) -> PartitionProduceResponse {
    let response = PartitionProduceResponse::default().with_index(index);
    let offset = |offset: Option<u64>| offset.and_then(|it| i64::try_from(it).ok()).unwrap_or(-1);
    match result {
        Ok(stored) => response
            .with_base_offset(offset(stored.first))
            .with_log_append_time_ms(-1)
            .with_log_start_offset(offset(stored.log_start)),
        Err((code, what)) => response
            .with_error_code(code.code())
            .with_error_message(Some(text(what)))
            .with_base_offset(-1)
            .with_log_append_time_ms(-1)
            .with_log_start_offset(-1),
    }
}
