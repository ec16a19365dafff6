//! ConsumeService: what there is to read now, or soon; and offsets of places.
//! Following is in `subscribe.rs`, the reading of one partition in `reader.rs`.

use std::collections::HashSet;
use std::sync::Arc;
use std::task::Context;

use futures_util::stream;
use helix_proto::answers;
use helix_proto::log::v1::consume_service_server::ConsumeService;
use helix_proto::log::v1::{
    FetchRequest, FetchResponse, ResolveOffsetsRequest, ResolveOffsetsResponse, ResolvedOffset,
    SubscribeRequest, SubscribeResponse,
};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until};
use tonic::codegen::BoxStream;
use tonic::{Request, Response, Status};

use super::positions::Position;
use super::reader::{self, Budget, Found, Reader, Terms};
use super::status::status_at;
use super::subscribe::Subscription;
use super::{call_of, make_room, time, wire_watermarks};
use crate::error::{Error, Result};
use crate::limits::{
    FETCH_BYTES_DEFAULT, FETCH_BYTES_MAX, FETCH_WAIT_MAX, PARTITION_RESOLVED_BYTES,
    PARTITIONS_PER_CALL_MAX, PARTITIONS_PER_TURN,
};
use crate::load::{Call, Room};
use crate::log::Watermarks;
use crate::node::Node;
use crate::shard::{ReadFrom, Watcher};

pub(super) struct Consume {
    node: Arc<Node>,
}

impl Consume {
    pub(super) fn new(node: &Arc<Node>) -> Self {
        Self { node: node.clone() }
    }

    async fn fetch(
        &self,
        request: FetchRequest,
        call: Option<Arc<Call>>,
    ) -> Result<FetchResponse, Status> {
        let wait = request.max_wait.unwrap_or_default();
        let wait = time::from_duration("max_wait", wait)?.min(FETCH_WAIT_MAX);
        let deadline = Instant::now() + wait;
        // Boxed, since to open takes more than to wait, which it comes before.
        let mut fetch = Box::pin(Fetch::open(&self.node, request)).await?;
        // The request is consumed: what is left of it, its partitions, counts as such.
        if let Some(call) = &call {
            call.handled();
        }
        let since = Instant::now();
        fetch.read_all().await?;
        self.node.metrics().on_fetch(since.elapsed());
        if !fetch.is_satisfied() && !wait.is_zero() {
            fetch.wait(deadline).await?;
        }
        Ok(fetch.answer(call.as_deref()))
    }

    async fn resolve(
        &self,
        request: ResolveOffsetsRequest,
        call: Option<&Call>,
    ) -> Result<Vec<ResolvedOffset>, Status> {
        let position = Position::parse(request.position)?;
        let numbers = if request.partitions.is_empty() {
            self.led_here(&request.topic).await?
        } else if request.partitions.len() > PARTITIONS_PER_CALL_MAX {
            let what = format!("must be at most {PARTITIONS_PER_CALL_MAX}");
            return Err(Error::InvalidArgument { field: "partitions", what }.into());
        } else {
            request.partitions
        };
        make_room(call, numbers.len() * PARTITION_RESOLVED_BYTES).await?;
        let mut offsets = Vec::with_capacity(numbers.len());
        let mut confirmed = HashSet::new();
        for number in numbers {
            if offsets.len().is_multiple_of(PARTITIONS_PER_TURN) {
                yield_now().await;
            }
            let resolved = self
                .resolve_one(&request.topic, number, position, &mut confirmed)
                .await
                .map_err(|error| status_at(&error, &request.topic, number))?;
            offsets.push(resolved);
        }
        Ok(offsets)
    }

    /// The partitions of a topic whose leader this node is.
    async fn led_here(&self, topic: &str) -> Result<Vec<u32>> {
        let topic = self.node.find_topic(topic).await?;
        let shard = |number| topic.place(number).and_then(|it| self.node.shard(it.shard_id));
        let is_led = |number: &u32| shard(*number).is_some_and(|shard| shard.leads());
        Ok((0..topic.partition_count).filter(is_led).collect())
    }

    async fn resolve_one(
        &self,
        topic: &str,
        number: u32,
        position: Position,
        confirmed: &mut HashSet<u64>,
    ) -> Result<ResolvedOffset> {
        let located = self.node.find(topic, number).await?;
        // One confirmation of a shard's leader within the call holds for all of its partitions.
        let watermarks = if confirmed.insert(located.shard.id()) {
            located.shard.latest(located.partition).await?
        } else {
            located.shard.watermarks(located.partition)?
        };
        let offset = position
            .offset(&located.shard, located.partition, watermarks, ReadFrom::Leader)
            .await?;
        let Watermarks { log_start, high_watermark } = watermarks;
        Ok(ResolvedOffset {
            partition: number,
            // A place that cannot be read stands for the nearest one that can. A search by time
            // may have found what was committed after the watermarks were taken.
            offset: match position {
                Position::Time(_) => offset.max(log_start),
                _ => offset.clamp(log_start, high_watermark),
            },
            watermarks: Some(wire_watermarks(watermarks)),
        })
    }
}

#[tonic::async_trait]
impl ConsumeService for Consume {
    type SubscribeStream = BoxStream<SubscribeResponse>;

    async fn fetch(
        &self,
        request: Request<FetchRequest>,
    ) -> Result<Response<FetchResponse>, Status> {
        let call = call_of(&request);
        let is_gated = call.is_some();
        let answer = self.fetch(request.into_inner(), call).await?;
        // Only the gate brings back what was put aside.
        Ok(if is_gated { answers::fetch(answer) } else { Response::new(answer) })
    }

    async fn subscribe(
        &self,
        request: Request<SubscribeRequest>,
    ) -> Result<Response<Self::SubscribeStream>, Status> {
        let call = call_of(&request);
        let request = request.into_inner();
        let is_aside = call.is_some() && request.accept_encoded;
        let subscription = Subscription::open(&self.node, request, call).await?;
        let mut messages = subscription.messages();
        if !is_aside {
            return Ok(Response::new(messages));
        }
        let next = move |context: &mut Context<'_>| messages.as_mut().poll_next(context);
        Ok(answers::subscribe(next, Box::pin(stream::empty())))
    }

    async fn resolve_offsets(
        &self,
        request: Request<ResolveOffsetsRequest>,
    ) -> Result<Response<ResolveOffsetsResponse>, Status> {
        let call = call_of(&request);
        let offsets = self.resolve(request.into_inner(), call.as_deref()).await?;
        Ok(Response::new(ResolveOffsetsResponse { offsets }))
    }
}

/// One call: the partitions, and what was found in each so far.
struct Fetch<'a> {
    node: &'a Node,
    readers: Vec<(Reader, Found)>,
    _places: Room,
    budget: Budget,
    bytes: u64,
    bytes_min: u64,
}

impl<'a> Fetch<'a> {
    async fn open(node: &'a Node, request: FetchRequest) -> Result<Self, Status> {
        let FetchRequest { source, out_of_range, accept_encoded, .. } = request;
        let limits = request.limits.unwrap_or_default();
        let terms = Terms::new(source, out_of_range, &limits, accept_encoded)?;
        let budget = Budget::new(&limits, FETCH_BYTES_DEFAULT as u64, FETCH_BYTES_MAX as u64);
        let (readers, places) = reader::open_all(node, request.partitions, terms).await?;
        let bytes_min = u64::from(request.min_bytes.max(1)).min(budget.bytes());
        let readers = readers.into_iter().map(|reader| (reader, Found::default())).collect();
        Ok(Self { node, readers, _places: places, budget, bytes: 0, bytes_min })
    }

    fn is_satisfied(&self) -> bool {
        self.bytes >= self.bytes_min
            || self.budget.is_spent()
            || self.readers.iter().all(|(reader, _)| reader.is_done())
    }

    /// Begins with any of the partitions, so that a small budget does not starve the last ones.
    async fn read_all(&mut self) -> Result<(), Status> {
        let count = self.readers.len();
        let first = if count == 1 {
            0
        } else {
            usize::try_from(self.node.random_u64() % count as u64).expect("below a usize")
        };
        for place in (first..count).chain(0..first) {
            self.read(place).await?;
        }
        Ok(())
    }

    async fn read(&mut self, place: usize) -> Result<(), Status> {
        let (reader, found) = &mut self.readers[place];
        let now_us = self.node.clock().now_us();
        let later = reader.read(&mut self.budget, FETCH_BYTES_MAX, now_us).await?;
        self.bytes += later.bytes;
        found.append(later);
        Ok(())
    }

    async fn wait(&mut self, deadline: Instant) -> Result<(), Status> {
        let watcher = Watcher::new();
        let mut guards = Vec::with_capacity(self.readers.len());
        for (tag, (reader, _)) in (0..).zip(&self.readers) {
            let guard = reader
                .shard()
                .watch(reader.partition(), tag, &watcher)
                .map_err(|error| reader.status(&error))?;
            guards.push(guard);
        }
        // What was committed before the watch began wakes nobody.
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

    fn answer(self, call: Option<&Call>) -> FetchResponse {
        let records = self.readers.iter().map(|(_, found)| found.record_count()).sum();
        self.node.metrics().on_read(records, self.bytes);
        let answer = |(mut reader, mut found): (Reader, Found)| {
            if let (Some(call), Some(room)) = (call, found.room.take()) {
                call.hold(room);
            }
            reader.answer(found)
        };
        FetchResponse { partitions: self.readers.into_iter().map(answer).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fetch_takes_little_while_it_waits() {
        super::super::expect_small(|(consume, request, call): (&'static Consume, _, _)| {
            consume.fetch(request, call)
        });
    }
}
