//! ConsumeService: fetches with long polls, and offsets of positions.
//! Subscriptions are in `subscribe.rs`; `reader.rs` reads one partition.

use std::collections::HashSet;
use std::sync::Arc;
use std::task::Context;

use futures_util::stream;
use helix_proto::log::v1::consume_service_server::ConsumeService;
use helix_proto::log::v1::{
    FetchRequest, FetchResponse, ResolveOffsetsRequest, ResolveOffsetsResponse, ResolvedOffset,
    SubscribeRequest, SubscribeResponse,
};
use helix_transport::responses;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until};
use tonic::codegen::BoxStream;
use tonic::{Request, Response, Status};

use super::authorize::{GuardedRequest, authorize_request, reauthorize_reads};

use super::decompressors::Decompressors;
use super::positions::ReadPosition;
use super::read_form::{ReadForm, ReadSources};
use super::reader::{self, FoundRecords, PartitionReadOptions, PartitionReader, ReadBudget};
use super::slow_calls::{ReadTimes, slow_read};
use super::status::status_at;
use super::subscribe::SubscriptionStream;
use super::{call_memory, recheck, reserve_response, time, wire_watermarks};
use crate::access::{AuthMode, QuotaKind, QuotaMeter};
use crate::call::{CallMemory, ClientLoad, LoadPermit};
use crate::error::{Error, Result};
use crate::limits::{
    FETCH_BYTES_DEFAULT, FETCH_BYTES_MAX, FETCH_WAIT_MAX, PARTITION_RESOLVED_BYTES,
    PARTITIONS_PER_CALL_MAX, PARTITIONS_PER_TURN,
};
use crate::log::Watermarks;
use crate::node::{LocatedPartition, Node};
use crate::shard::{ReadFrom, Watcher};
use crate::slow::SlowKind;

pub(crate) struct ConsumeHandler {
    node: Arc<Node>,
    sources: ReadSources,
}

impl ConsumeHandler {
    pub(crate) fn new(
        node: &Arc<Node>,
        load: &Arc<ClientLoad>,
        decompressors: &Arc<Decompressors>,
    ) -> Self {
        let (load, decompressors) = (load.clone(), decompressors.clone());
        Self { node: node.clone(), sources: ReadSources { load, decompressors } }
    }

    async fn fetch(
        &self,
        request: FetchRequest,
        call: Option<Arc<CallMemory>>,
    ) -> Result<FetchResponse, Status> {
        let wait = request.max_wait.unwrap_or_default();
        let wait = time::from_duration("max_wait", wait)?.min(FETCH_WAIT_MAX);
        let started = Instant::now();
        let deadline = started + wait;
        // Boxed: opening takes more memory than the wait after it.
        let meter = call.as_deref().and_then(CallMemory::quota_meter);
        let opened = Fetch::open(&self.node, &self.sources, request, meter);
        let mut fetch = Box::pin(opened).await?;
        // The request is consumed; its partitions have a permit of their own.
        if let Some(call) = &call {
            call.release_request();
        }
        let since = Instant::now();
        fetch.read_all().await?;
        let took = since.elapsed();
        self.node.metrics().on_fetch(took);
        fetch.note_slow(started, since, since + took);
        let (node, call) = (&self.node, call.as_deref());
        if !fetch.is_satisfied() && !wait.is_zero() {
            let topics = fetch.topics();
            let mut checked = None;
            let check = || {
                let topics = topics.iter().map(String::as_str);
                reauthorize_reads(node, call, FetchRequest::METHOD, &mut checked, topics)
            };
            let lost = Box::pin(recheck::lost(node, call, check));
            tokio::select! {
                waited = fetch.wait(deadline) => waited?,
                error = lost => return Err(error.into()),
            }
        }
        // The rules may have changed during the waits for records, disks and memory.
        let topics = fetch.readers.iter().map(|(reader, _)| reader.topic().name.as_str());
        reauthorize_reads(node, call, FetchRequest::METHOD, &mut None, topics)?;
        Ok(fetch.response(call))
    }

    async fn resolve(
        &self,
        request: ResolveOffsetsRequest,
        call: Option<&CallMemory>,
    ) -> Result<ResolveOffsetsResponse, Status> {
        let position = ReadPosition::parse(request.position)?;
        let numbers = if request.partitions.is_empty() {
            self.led_partitions(&request.topic, request.topic_id).await?
        } else if request.partitions.len() > PARTITIONS_PER_CALL_MAX {
            let what = format!("must be at most {PARTITIONS_PER_CALL_MAX}");
            return Err(Error::InvalidArgument { field: "partitions", what }.into());
        } else {
            request.partitions
        };
        reserve_response(call, numbers.len() * PARTITION_RESOLVED_BYTES).await?;
        let mut offsets = Vec::with_capacity(numbers.len());
        let mut confirmed = HashSet::new();
        // The first partition decides, so that all offsets are from one topic.
        let mut topic_id = request.topic_id;
        for number in numbers {
            if offsets.len().is_multiple_of(PARTITIONS_PER_TURN) {
                yield_now().await;
            }
            let resolved = self
                .resolve_one(&request.topic, &mut topic_id, number, &position, &mut confirmed)
                .await
                .map_err(|error| status_at(&error, &request.topic, number))?;
            offsets.push(resolved);
        }
        Ok(ResolveOffsetsResponse { offsets, topic_id })
    }

    /// Returns the partitions of a topic that this node leads.
    async fn led_partitions(&self, topic: &str, topic_id: u64) -> Result<Vec<u32>> {
        let topic = self.node.find_topic(topic, topic_id).await?;
        let shard = |number| topic.location(number).and_then(|it| self.node.shard(it.shard_id));
        let is_led = |number: &u32| shard(*number).is_some_and(|shard| shard.is_leader());
        Ok((0..topic.partition_count).filter(is_led).collect())
    }

    async fn resolve_one(
        &self,
        topic: &str,
        topic_id: &mut u64,
        number: u32,
        position: &ReadPosition,
        confirmed: &mut HashSet<u64>,
    ) -> Result<ResolvedOffset> {
        let located = self.node.find(topic, *topic_id, number).await?;
        let expected_id = std::mem::replace(topic_id, located.topic.id);
        match Self::resolve_in(&self.node, &located, position, confirmed).await {
            Err(error) if expected_id > 0 => {
                Err(self.node.explain_deleted(&located.topic, error).await)
            }
            resolved => resolved,
        }
    }

    async fn resolve_in(
        node: &Node,
        located: &LocatedPartition,
        position: &ReadPosition,
        confirmed: &mut HashSet<u64>,
    ) -> Result<ResolvedOffset> {
        // One confirmation of a shard's leader covers all of its partitions in this call.
        let watermarks = if confirmed.insert(located.shard.id()) {
            located.shard.latest(located.partition).await?
        } else {
            located.shard.watermarks_for(located.partition, ReadFrom::Leader)?
        };
        let offset = position.offset(node, located, watermarks, ReadFrom::Leader).await?;
        let Watermarks { log_start, high_watermark } = watermarks;
        Ok(ResolvedOffset {
            partition: located.number,
            // Clamps to the readable offsets. A search by time may return a record that was
            // committed after the watermarks were read.
            offset: match position {
                ReadPosition::Time(_) | ReadPosition::Committed { .. } => offset.max(log_start),
                _ => offset.clamp(log_start, high_watermark),
            },
            watermarks: Some(wire_watermarks(watermarks)),
        })
    }
}

#[tonic::async_trait]
impl ConsumeService for ConsumeHandler {
    type SubscribeStream = BoxStream<SubscribeResponse>;

    async fn fetch(
        &self,
        request: Request<FetchRequest>,
    ) -> Result<Response<FetchResponse>, Status> {
        authorize_request(&self.node, &request)?;
        let call = call_memory(&request);
        let is_admitted = call.is_some();
        let response = self.fetch(request.into_inner(), call).await?;
        // Only the admission reattaches a detached body.
        Ok(if is_admitted { responses::fetch(response) } else { Response::new(response) })
    }

    async fn subscribe(
        &self,
        request: Request<SubscribeRequest>,
    ) -> Result<Response<Self::SubscribeStream>, Status> {
        authorize_request(&self.node, &request)?;
        let call = call_memory(&request);
        let request = request.into_inner();
        let is_detached = call.is_some() && request.accept_encoded;
        let subscription =
            SubscriptionStream::open(&self.node, &self.sources, request, call).await?;
        let mut messages = subscription.messages();
        if !is_detached {
            return Ok(Response::new(messages));
        }
        let next = move |context: &mut Context<'_>| messages.as_mut().poll_next(context);
        Ok(responses::subscribe(next, Box::pin(stream::empty())))
    }

    async fn resolve_offsets(
        &self,
        request: Request<ResolveOffsetsRequest>,
    ) -> Result<Response<ResolveOffsetsResponse>, Status> {
        let call = call_memory(&request);
        let call = call.as_deref();
        let request = request.into_inner();
        let resolve = || self.resolve(request.clone(), call);
        Ok(Response::new(recheck::read(&self.node, call, &request, resolve).await?))
    }
}

/// One fetch: its partitions, and the records read from each so far.
struct Fetch<'a> {
    node: &'a Node,
    readers: Vec<(PartitionReader, FoundRecords)>,
    _permit: LoadPermit,
    budget: ReadBudget,
    bytes: u64,
    bytes_min: u64,
    /// Quota of the caller.
    meter: Option<Arc<QuotaMeter>>,
    is_over_quota: bool,
}

impl<'a> Fetch<'a> {
    async fn open(
        node: &'a Node,
        sources: &ReadSources,
        request: FetchRequest,
        meter: Option<Arc<QuotaMeter>>,
    ) -> Result<Self, Status> {
        let FetchRequest { source, out_of_range, .. } = request;
        let limits = request.limits.unwrap_or_default();
        let form = ReadForm::new(
            request.accept_encoded,
            &request.accept_compression,
            request.accept_kafka_batches,
        );
        let options = PartitionReadOptions::new(source, out_of_range, &limits, form)?;
        let budget = ReadBudget::new(&limits, FETCH_BYTES_DEFAULT as u64, FETCH_BYTES_MAX as u64);
        let (readers, permit) =
            reader::open_all(node, sources, request.partitions, options).await?;
        let bytes_min = u64::from(request.min_bytes.max(1)).min(budget.bytes());
        let readers = readers.into_iter().map(|reader| (reader, FoundRecords::default())).collect();
        let _permit = permit;
        let is_over_quota = false;
        Ok(Self { node, readers, _permit, budget, bytes: 0, bytes_min, meter, is_over_quota })
    }

    /// Returns the topics, if their rights may be lost during a wait.
    fn topics(&self) -> Vec<String> {
        if self.node.auth_mode() == AuthMode::Off {
            return Vec::new();
        }
        let mut topics: Vec<String> = Vec::new();
        for (reader, _) in &self.readers {
            let name = &reader.topic().name;
            if topics.last() != Some(name) {
                topics.push(name.clone());
            }
        }
        topics
    }

    /// Keeps the fetch if it is among the slowest reads.
    fn note_slow(&self, started: Instant, opened: Instant, ended: Instant) {
        let slow = self.node.slow_calls();
        if slow.is_slow(SlowKind::Read, ended, ended.duration_since(started))
            && let Some((reader, _)) = self.readers.first()
        {
            let records = self.readers.iter().map(|(_, found)| found.record_count()).sum();
            let times = ReadTimes { started, opened, ended };
            slow.keep(ended, slow_read(self.node, reader, times, records, self.bytes));
        }
    }

    fn is_satisfied(&self) -> bool {
        self.bytes >= self.bytes_min
            || self.is_over_quota
            || self.budget.is_spent()
            || self.readers.iter().all(|(reader, _)| reader.is_done())
    }

    /// Reads all partitions, from a random one on, so that a small budget starves none of them.
    async fn read_all(&mut self) -> Result<(), Status> {
        let count = self.readers.len();
        let first = if count == 1 {
            0
        } else {
            usize::try_from(self.node.random_u64() % count as u64).expect("below a usize")
        };
        for index in (first..count).chain(0..first) {
            self.read(index).await?;
        }
        Ok(())
    }

    /// Reads one partition, until the fetch is satisfied or there is no more: a read may end before
    /// a gap, or where the log goes on in memory. Over the caller's quota it reads no more than the
    /// fetch has; a fetch without records is refused.
    async fn read(&mut self, index: usize) -> Result<(), Status> {
        loop {
            if let Some(Err(error)) = self.meter.as_ref().map(|it| it.admit(QuotaKind::BytesOut)) {
                self.node.note_over_quota(&error);
                self.is_over_quota = true;
                return if self.bytes > 0 { Ok(()) } else { Err(error.into()) };
            }
            let (reader, found) = &mut self.readers[index];
            let later = reader.read(self.node, &mut self.budget, FETCH_BYTES_MAX).await?;
            let is_last = later.is_empty() || reader.is_at_end() || reader.is_done();
            self.bytes += later.bytes;
            if let Some(meter) = &self.meter {
                meter.take(QuotaKind::BytesOut, later.bytes);
            }
            found.append(later);
            if is_last || self.is_satisfied() {
                return Ok(());
            }
        }
    }

    async fn wait(&mut self, deadline: Instant) -> Result<(), Status> {
        let watcher = Watcher::new();
        let mut guards = Vec::with_capacity(self.readers.len());
        for (tag, (reader, _)) in (0..).zip(&self.readers) {
            match reader.shard().watch(reader.partition(), tag, &watcher) {
                Ok(guard) => guards.push(guard),
                Err(error) => return Err(reader.failed(self.node, error).await),
            }
        }
        // Records committed before the watch began do not wake it.
        self.read_all().await?;
        while !self.is_satisfied() {
            tokio::select! {
                () = watcher.changed() => {}
                () = sleep_until(deadline) => break,
                () = self.node.shutdown_token().cancelled() => {
                    return if self.bytes > 0 { Ok(()) } else { Err(Error::Draining.into()) };
                }
            }
            for tag in watcher.take_ready() {
                self.read(tag as usize).await?;
            }
        }
        Ok(())
    }

    fn response(self, call: Option<&CallMemory>) -> FetchResponse {
        let records = self.readers.iter().map(|(_, found)| found.record_count()).sum();
        self.node.metrics().on_read(records, self.bytes);
        let response = |(mut reader, mut found): (PartitionReader, FoundRecords)| {
            if let (Some(call), Some(permit)) = (call, found.permit.take()) {
                call.keep_response(permit);
            }
            reader.response(found)
        };
        FetchResponse { partitions: self.readers.into_iter().map(response).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiting_fetch_takes_little_memory() {
        super::super::assert_small_future(
            |(consume, request, call): (&'static ConsumeHandler, _, _)| {
                consume.fetch(request, call)
            },
        );
    }
}
