//! Fetch: stored batches as they are, with a long poll.

use std::collections::HashSet;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{join_all, select_all};
use helix_client::proto::kafka::{KAFKA_BATCH_VERSION, empty_batch};
use helix_client::proto::log::v1::start_position::Position;
use helix_client::proto::log::v1::{
    Compression, FetchRequest as NodeRequest, OutOfRangePolicy, PartitionRecords, PartitionStart,
    ReadLimits, ReadSource, StartPosition,
};
use helix_client::{Connection, Error, Route};
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::{ApiKey, FetchRequest};
use tokio::time::{Instant, timeout};

use super::fetch_response::{FetchedPartition, encode_fetch_response};
use crate::batch::place_batch;
use crate::context::RequestContext;
use crate::errors::{CallTarget, code_of};
use crate::frame::{RequestHeader, ResponseFrame};
use crate::memory::MemoryPermit;
use crate::upstream::leader_epoch;

/// Most bytes of records in one response; a node sends no more at once.
const RESPONSE_BYTES_MAX: usize = 8 << 20;

/// Most bytes of records that end a long poll. They are not taken from the memory limit while the
/// poll waits.
const POLL_BYTES_MAX: usize = 64 << 10;

/// Longest wait of a request.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Time for a node's response, besides the wait.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Times that the leaders of a request are looked up.
const ROUTE_ATTEMPTS: u32 = 3;

/// A partition of a request.
#[derive(Debug, Clone)]
struct Wanted {
    /// Position in the request: topic and partition.
    slot: (usize, usize),
    topic: String,
    partition: u32,
    offset: u64,
}

/// Partitions that one node serves.
struct NodePart {
    connection: Connection,
    /// Route of the leader; `None` for a replica.
    route: Option<Route>,
    epoch: i32,
    wanted: Vec<Wanted>,
}

type Topics = Vec<(String, Vec<FetchedPartition>)>;

/// Answers a request for records. The permit holds the memory of the response.
///
/// # Errors
/// The response cannot be encoded.
pub(crate) async fn fetch(
    context: &RequestContext,
    header: &RequestHeader,
    request: FetchRequest,
) -> Result<(ResponseFrame, MemoryPermit), String> {
    let wait = Duration::from_millis(u64::try_from(request.max_wait_ms).unwrap_or(0)).min(WAIT_MAX);
    let deadline = Instant::now() + wait;
    let bytes_max = usize::try_from(request.max_bytes).unwrap_or(0).clamp(1, RESPONSE_BYTES_MAX);
    let bytes_min = usize::try_from(request.min_bytes).unwrap_or(0).min(bytes_max);
    if request.session_epoch > 0 {
        // The client continues a session that it did not get from this gateway.
        let code = ResponseError::FetchSessionIdNotFound.code();
        context.state.metrics.on_code(ApiKey::Fetch, code);
        let permit = context.state.memory.take(1).await;
        return Ok((encode_fetch_response(header, code, Vec::new())?, permit));
    }
    let rack = request.rack_id.to_string();
    loop {
        let mut permit = context.state.memory.take(bytes_max).await;
        let (mut topics, wanted) = partitions(&request);
        let is_settled = read_all(context, &mut topics, &wanted, bytes_max, &rack).await;
        let bytes = records_len(&topics);
        if bytes >= bytes_min || is_settled || Instant::now() >= deadline || wanted.is_empty() {
            count_errors(context, &topics);
            permit.shrink_to(bytes + 1024);
            return Ok((encode_fetch_response(header, 0, topics)?, permit));
        }
        drop(permit);
        if let Some(topics) = poll(context, &request, &wanted, bytes_min, deadline, &rack).await {
            let permit = context.state.memory.take(records_len(&topics) + 1024).await;
            count_errors(context, &topics);
            return Ok((encode_fetch_response(header, 0, topics)?, permit));
        }
    }
}

fn count_errors(context: &RequestContext, topics: &Topics) {
    for partition in topics.iter().flat_map(|(_, partitions)| partitions) {
        context.state.metrics.on_code(ApiKey::Fetch, partition.error_code);
    }
}

fn records_len(topics: &Topics) -> usize {
    topics.iter().flat_map(|(_, partitions)| partitions).map(FetchedPartition::records_len).sum()
}

/// Returns the empty results of a request, and the partitions that can be read.
fn partitions(request: &FetchRequest) -> (Topics, Vec<Wanted>) {
    let mut seen = HashSet::new();
    let mut wanted = Vec::new();
    let mut topics = Vec::with_capacity(request.topics.len());
    for (topic_index, topic) in request.topics.iter().enumerate() {
        let name = topic.topic.to_string();
        let mut results = Vec::with_capacity(topic.partitions.len());
        for (index, partition) in topic.partitions.iter().enumerate() {
            let mut result = FetchedPartition {
                index: partition.partition,
                high_watermark: -1,
                log_start: -1,
                ..FetchedPartition::default()
            };
            let number = u32::try_from(partition.partition);
            match (number, u64::try_from(partition.fetch_offset)) {
                (Err(_), _) => result.error_code = ResponseError::UnknownTopicOrPartition.code(),
                (_, Err(_)) => result.error_code = ResponseError::OffsetOutOfRange.code(),
                (Ok(number), _) if !seen.insert((topic.topic.clone(), number)) => {
                    result.error_code = ResponseError::InvalidRequest.code();
                }
                (Ok(number), Ok(offset)) => wanted.push(Wanted {
                    slot: (topic_index, index),
                    topic: name.clone(),
                    partition: number,
                    offset,
                }),
            }
            results.push(result);
        }
        topics.push((name, results));
    }
    (topics, wanted)
}

/// Reads what is there now. Returns true if a partition failed, so that the client learns it at
/// once.
async fn read_all(
    context: &RequestContext,
    topics: &mut Topics,
    wanted: &[Wanted],
    bytes_max: usize,
    rack: &str,
) -> bool {
    let mut has_failure = topics.iter().flat_map(|(_, all)| all).any(|it| it.error_code != 0);
    let mut rest = wanted.to_vec();
    for attempt in 1..=ROUTE_ATTEMPTS {
        let (parts, unrouted) = by_node(context, std::mem::take(&mut rest), rack).await;
        for (wanted, code) in unrouted {
            has_failure = true;
            result_of(topics, wanted.slot).error_code = code.code();
        }
        let budget = (bytes_max / parts.len().max(1)).max(1);
        let reads = parts.iter().map(|part| read_part(context, part, budget, Duration::ZERO, 0));
        for (part, results) in parts.iter().zip(join_all(reads).await) {
            for (wanted, result) in part.wanted.iter().zip(results) {
                match result {
                    Ok(records) => fill(context, topics, part.epoch, wanted, records),
                    Err(ResponseError::NotLeaderOrFollower) if attempt < ROUTE_ATTEMPTS => {
                        rest.push(wanted.clone());
                    }
                    Err(code) => {
                        has_failure = true;
                        result_of(topics, wanted.slot).error_code = code.code();
                    }
                }
            }
        }
        if rest.is_empty() {
            break;
        }
    }
    has_failure
}

fn result_of(topics: &mut Topics, (topic, partition): (usize, usize)) -> &mut FetchedPartition {
    &mut topics[topic].1[partition]
}

/// Waits for records. Returns the response if one node has all partitions and a small wait is
/// enough; else the caller reads again.
async fn poll(
    context: &RequestContext,
    request: &FetchRequest,
    wanted: &[Wanted],
    bytes_min: usize,
    deadline: Instant,
    rack: &str,
) -> Option<Topics> {
    let (parts, _) = by_node(context, wanted.to_vec(), rack).await;
    let wait = deadline.saturating_duration_since(Instant::now());
    if let [part] = &parts[..]
        && part.wanted.len() == wanted.len()
    {
        let bytes_min = u32::try_from(bytes_min.min(POLL_BYTES_MAX)).unwrap_or(u32::MAX);
        let results = read_part(context, part, POLL_BYTES_MAX, wait, bytes_min).await;
        if results.iter().any(Result::is_err) {
            // The next read has the codes.
            return None;
        }
        let (mut topics, _) = partitions(request);
        for (wanted, result) in part.wanted.iter().zip(results) {
            if let Ok(records) = result {
                fill(context, &mut topics, part.epoch, wanted, records);
            }
        }
        let is_enough = records_len(&topics) >= bytes_min as usize || Instant::now() >= deadline;
        return (is_enough && bytes_min as usize <= POLL_BYTES_MAX).then_some(topics);
    }
    if parts.is_empty() {
        tokio::time::sleep(wait.min(Duration::from_millis(100))).await;
        return None;
    }
    // The first node with records ends the wait.
    let polls = parts.iter().map(|part| Box::pin(read_part(context, part, 1, wait, 1)));
    let _ = select_all(polls).await;
    None
}

/// Groups partitions by the nodes that serve them. Others get a code.
async fn by_node(
    context: &RequestContext,
    wanted: Vec<Wanted>,
    rack: &str,
) -> (Vec<NodePart>, Vec<(Wanted, ResponseError)>) {
    let client = context.upstream.client();
    let view = match rack.is_empty() {
        true => None,
        false => context.upstream.view(Duration::from_secs(5)).await.ok(),
    };
    let mut parts: Vec<NodePart> = Vec::new();
    let mut failed = Vec::new();
    for wanted in wanted {
        let route = match client.route(&wanted.topic, wanted.partition).await {
            Ok(route) => route,
            Err(error) => {
                failed.push((wanted, code_of(&error, CallTarget::Topic)));
                continue;
            }
        };
        let epoch = leader_epoch(route.term);
        let near = view.as_ref().and_then(|view| {
            let shard = view.shards.get(&route.shard_id)?;
            let is_near = |node: &&u64| view.racks.get(node).is_some_and(|of_node| of_node == rack);
            let node_id = shard.replicas.iter().find(is_near)?;
            let (address, _) = view.node_ids.iter().find(|(_, id)| *id == node_id)?;
            client.node(address).ok()
        });
        let near = near.filter(|near| near.address() != route.connection.address());
        let (connection, route) = match near {
            Some(near) => (near, None),
            None => (route.connection.clone(), Some(route)),
        };
        let is_same = |part: &&mut NodePart| {
            part.connection.address() == connection.address()
                && part.route.is_some() == route.is_some()
        };
        match parts.iter_mut().find(is_same) {
            Some(part) => part.wanted.push(wanted),
            None => parts.push(NodePart { connection, route, epoch, wanted: vec![wanted] }),
        }
    }
    (parts, failed)
}

/// Reads the partitions of one node. A partition that fails does not fail the others.
async fn read_part(
    context: &RequestContext,
    part: &NodePart,
    bytes_max: usize,
    wait: Duration,
    bytes_min: u32,
) -> Vec<Result<PartitionRecords, ResponseError>> {
    let mut results: Vec<Option<Result<PartitionRecords, ResponseError>>> =
        part.wanted.iter().map(|_| None).collect();
    loop {
        let open: Vec<usize> =
            (0..results.len()).filter(|&index| results[index].is_none()).collect();
        if open.is_empty() {
            break;
        }
        let request = node_request(part, &open, bytes_max, wait, bytes_min);
        let mut consume = part.connection.consume();
        let error = match timeout(CALL_TIMEOUT + wait, consume.fetch(request)).await {
            Ok(Ok(response)) => {
                let records = response.into_inner().partitions;
                for (&index, records) in open.iter().zip(records) {
                    results[index] = Some(Ok(records));
                }
                break;
            }
            Ok(Err(status)) => Error::from(status),
            Err(_) => Error::from(tonic::Status::deadline_exceeded("fetch timed out")),
        };
        if let Some(route) = &part.route {
            context.upstream.client().report_failure(route, &error);
        }
        let code = match code_of(&error, CallTarget::Topic) {
            // A read has no outcome.
            ResponseError::RequestTimedOut => ResponseError::NotLeaderOrFollower,
            code => code,
        };
        let failed = error.topic_partition.as_ref().and_then(|(topic, partition)| {
            let is_failed = |&&index: &&usize| {
                let wanted = &part.wanted[index];
                wanted.topic == *topic && wanted.partition == *partition
            };
            open.iter().find(is_failed).copied()
        });
        match failed {
            Some(index) => results[index] = Some(Err(code)),
            None => {
                open.into_iter().for_each(|index| results[index] = Some(Err(code)));
                break;
            }
        }
    }
    let missing = || Err(ResponseError::UnknownServerError);
    results.into_iter().map(|result| result.unwrap_or_else(missing)).collect()
}

fn node_request(
    part: &NodePart,
    open: &[usize],
    bytes_max: usize,
    wait: Duration,
    bytes_min: u32,
) -> NodeRequest {
    let start = |&index: &usize| {
        let wanted = &part.wanted[index];
        PartitionStart {
            topic: wanted.topic.clone(),
            partition: wanted.partition,
            start: Some(StartPosition {
                position: Some(Position::Offset(wanted.offset)),
                ..StartPosition::default()
            }),
            until_offset: None,
            topic_id: 0,
        }
    };
    let source = match part.route {
        Some(_) => ReadSource::Unspecified,
        None => ReadSource::AnyReplica,
    };
    NodeRequest {
        partitions: open.iter().map(start).collect(),
        limits: Some(ReadLimits { max_bytes: Some(bytes_max as u64), ..ReadLimits::default() }),
        max_wait: prost_types::Duration::try_from(wait).ok(),
        min_bytes: bytes_min,
        source: source.into(),
        out_of_range: OutOfRangePolicy::Unspecified.into(),
        accept_encoded: true,
        accept_kafka_batches: true,
        accept_compression: vec![Compression::Lz4.into(), Compression::Zstd.into()],
    }
}

/// Puts the records of a partition into its result.
fn fill(
    context: &RequestContext,
    topics: &mut Topics,
    epoch: i32,
    wanted: &Wanted,
    records: PartitionRecords,
) {
    let result = result_of(topics, wanted.slot);
    let watermarks = records.watermarks.unwrap_or_default();
    let offset = |offset: u64| i64::try_from(offset).unwrap_or(i64::MAX);
    result.high_watermark = offset(watermarks.high_watermark);
    result.log_start = offset(watermarks.log_start_offset);
    let mut end = wanted.offset;
    let mut chunks: Vec<Bytes> = Vec::with_capacity(records.batches.len() * 2);
    for stored in &records.batches {
        let is_native =
            stored.batch.as_ref().is_none_or(|batch| batch.version != KAFKA_BATCH_VERSION);
        let batch = match is_native {
            false => {
                Ok(stored.batch.as_ref().map(|batch| batch.payload.clone()).unwrap_or_default())
            }
            true => {
                let cache = &context.state.converted;
                cache.get_or_convert(records.topic_id, wanted.partition, stored).map(
                    |(batch, was_found)| {
                        let metrics = &context.state.metrics;
                        match was_found {
                            true => metrics.converted_hits.add(1),
                            false => metrics.converted_batches.add(1),
                        }
                        batch
                    },
                )
            }
        };
        let placed = batch.and_then(|batch| {
            place_batch(&batch, stored.first_offset, epoch).ok_or_else(|| "no batch".to_owned())
        });
        match placed {
            Ok(placed) => {
                end = end.max(stored.first_offset.saturating_add(last_delta(&placed) + 1));
                chunks.extend(placed);
            }
            Err(what) => {
                let Wanted { topic, partition, .. } = wanted;
                let offset = stored.first_offset;
                tracing::warn!(topic, partition, offset, what, "batch not readable");
                if chunks.is_empty() {
                    result.error_code = ResponseError::CorruptMessage.code();
                }
                result.records = chunks;
                return;
            }
        }
    }
    // Compaction has removed the records up to the next offset.
    if let Some(gap) = records.next_offset.checked_sub(end + 1)
        && let Ok(empty) = empty_batch(end, u32::try_from(gap).unwrap_or(i32::MAX.unsigned_abs()))
    {
        chunks.push(empty);
    }
    result.records = chunks;
}

/// Returns the last offset delta of a placed batch.
fn last_delta([_, rest]: &[Bytes; 2]) -> u64 {
    // Its position in the batch is 23; the first chunk has 16 bytes.
    let bytes: [u8; 4] = rest.get(7..11).and_then(|it| it.try_into().ok()).unwrap_or_default();
    u64::from(u32::from_be_bytes(bytes))
}
