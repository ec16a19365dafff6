//! Subscriptions: many partitions over one stream, in turn.
//! A subscription lives inside its response stream, without a task or a channel. It reads the next
//! message only when the client's flow-control window has space, so a slow reader holds one
//! message.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use helix_proto::log::v1::subscribe_response::Message;
use helix_proto::log::v1::{
    CaughtUp, GroupMembership, Heartbeat, SubscribeRequest, SubscribeResponse,
};
use tokio::time::{Instant, Sleep, sleep, sleep_until};
use tonic::Status;
use tonic::codegen::BoxStream;

use super::authorize::{GuardedRequest, reauthorize_reads};
use super::group::{check_group, check_id};
use super::read_form::{ReadForm, ReadSources};
use super::reader::{self, PartitionReadOptions, PartitionReader, ReadBudget};
use super::slow_calls::{ReadTimes, slow_read};
use super::status::status_at;
use super::wire_watermarks;
use crate::access::{Caller, QuotaKind, QuotaMeter};
use crate::call::{CallMemory, LoadPermit};
use crate::error::Error;
use crate::limits::{FETCH_BYTES_DEFAULT, HEARTBEAT_INTERVAL, QUOTA_POLL_MAX};
use crate::node::{Node, ReaderMembership};
use crate::shard::{WatchGuard, Watcher};
use crate::slow::SlowKind;

pub(super) struct SubscriptionStream {
    node: Arc<Node>,
    call: Option<Arc<CallMemory>>,
    /// The caller as of the last check of its rights; `None` if the rules are as at the start.
    checked: Option<Caller>,
    _permit: LoadPermit,
    partitions: Vec<SubscribedPartition>,
    /// Indexes of `partitions` that may have records to read, each at most once.
    turns: VecDeque<u32>,
    watcher: Arc<Watcher>,
    budget: ReadBudget,
    /// Messages that are built but not yet polled: at most the two of one turn.
    pending: VecDeque<Message>,
    open_count: usize,
    last_message: Instant,
    heartbeat_interval: Duration,
    heartbeat_timer: Pin<Box<Sleep>>,
    /// The member that reads, if the stream ends once it loses a partition.
    membership: Option<Box<ReaderMembership>>,
    /// Quota of the caller.
    meter: Option<Arc<QuotaMeter>>,
    is_delayed: bool,
}

struct SubscribedPartition {
    reader: PartitionReader,
    /// Keeps the watch; `None` once the reader is done.
    guard: Option<WatchGuard>,
    has_turn: bool,
    was_at_end: bool,
}

impl SubscriptionStream {
    pub(super) async fn open(
        node: &Arc<Node>,
        sources: &ReadSources,
        request: SubscribeRequest,
        call: Option<Arc<CallMemory>>,
    ) -> Result<Self, Status> {
        let SubscribeRequest { source, out_of_range, .. } = request;
        let membership = match request.membership {
            Some(member) => {
                check_group(&member.group)?;
                check_id("membership.member_id", &member.member_id, 1)?;
                let GroupMembership { group, member_id, member_epoch } = member;
                let followed = node.follow_membership(&group, &member_id, member_epoch);
                Some(Box::new(Box::pin(followed).await?))
            }
            None => None,
        };
        let limits = request.limits.unwrap_or_default();
        let form = ReadForm::new(
            request.accept_encoded,
            &request.accept_compression,
            request.accept_kafka_batches,
        );
        let options = PartitionReadOptions::new(source, out_of_range, &limits, form)?;
        let budget = ReadBudget::new(&limits, u64::MAX, u64::MAX);
        let (readers, permit) =
            reader::open_all(node, sources, request.partitions, options).await?;
        let watcher = Watcher::new();
        let partitions = watch_all(node, readers, &watcher).await?;
        let heartbeat_interval = heartbeat_interval(node);
        let last_message = Instant::now();
        let subscription = Self {
            node: node.clone(),
            meter: call.as_deref().and_then(CallMemory::quota_meter),
            is_delayed: false,
            call,
            checked: None,
            _permit: permit,
            // Each partition has a first turn: the watch misses records committed before it.
            turns: (0..).take(partitions.len()).collect(),
            open_count: partitions.iter().filter(|it| !it.reader.is_done()).count(),
            partitions,
            watcher,
            budget,
            pending: VecDeque::new(),
            last_message,
            heartbeat_interval,
            heartbeat_timer: Box::pin(sleep_until(last_message + heartbeat_interval)),
            membership,
        };
        subscription.check_membership()?;
        Ok(subscription)
    }

    /// Checks that the member still has every partition.
    fn check_membership(&self) -> Result<(), Status> {
        let Some(membership) = &self.membership else { return Ok(()) };
        for SubscribedPartition { reader, .. } in &self.partitions {
            let at = |error| status_at(&error, &reader.topic().name, reader.number());
            membership.check(reader.key()).map_err(at)?;
        }
        Ok(())
    }

    /// Checks that the caller may still read every topic, if the rules have changed.
    fn check_rights(&mut self) -> Result<(), Error> {
        let Self { node, call, partitions, checked, .. } = self;
        let topics = partitions.iter().map(|it| it.reader.topic().name.as_str());
        reauthorize_reads(node, call.as_deref(), SubscribeRequest::METHOD, checked, topics)
    }

    pub(super) fn messages(self) -> BoxStream<SubscribeResponse> {
        Box::pin(stream::try_unfold(Box::new(self), |mut subscription| async {
            let message = subscription.next().await?;
            let response = |message| SubscribeResponse { message: Some(message) };
            Ok(message.map(|message| (response(message), subscription)))
        }))
    }

    /// Returns the next message; `None` once every partition has reached its end.
    async fn next(&mut self) -> Result<Option<Message>, Status> {
        loop {
            self.check_rights()?;
            self.node.check_member()?;
            if let Some(message) = self.pending.pop_front() {
                self.last_message = Instant::now();
                return Ok(Some(message));
            }
            if self.open_count == 0 || self.budget.is_spent() {
                return Ok(None);
            }
            if self.node.shutdown_token().is_cancelled() {
                return Err(Error::Draining.into());
            }
            if self.membership.as_mut().is_some_and(|it| it.take_changed()) {
                self.check_membership()?;
            }
            // Heartbeats go on while the caller is over its quota.
            if let Some(wait) = self.quota_wait().filter(|_| !self.turns.is_empty()) {
                self.wait(Some(wait)).await?;
                continue;
            }
            match self.turns.pop_front() {
                Some(index) => self.take_turn(index).await?,
                None => self.wait(None).await?,
            }
        }
    }

    /// Returns the time until the caller may be within its quota; `None` if it is.
    fn quota_wait(&mut self) -> Option<Duration> {
        let meter = self.meter.as_ref()?;
        let wait = meter.wait(QuotaKind::BytesOut);
        if wait.is_some() && !self.is_delayed {
            meter.on_delayed();
            self.node.metrics().on_over_quota(QuotaKind::BytesOut.as_str());
        }
        self.is_delayed = wait.is_some();
        wait.map(|wait| wait.min(QUOTA_POLL_MAX))
    }

    /// Reads one message of one partition.
    async fn take_turn(&mut self, index: u32) -> Result<(), Status> {
        let partition = &mut self.partitions[index as usize];
        partition.has_turn = false;
        if partition.reader.is_done() {
            return Ok(());
        }
        let reader = &mut partition.reader;
        let started = Instant::now();
        let mut found = reader.read(&self.node, &mut self.budget, FETCH_BYTES_DEFAULT).await?;
        let took = started.elapsed();
        let (slow, ended) = (self.node.slow_calls(), started + took);
        if slow.is_slow(SlowKind::Read, ended, took) && !found.is_empty() {
            let times = ReadTimes { started, opened: started, ended };
            let (records, bytes) = (found.record_count(), found.bytes);
            slow.keep(ended, slow_read(&self.node, reader, times, records, bytes));
        }
        if let Some(meter) = &self.meter {
            meter.take(QuotaKind::BytesOut, found.bytes);
        }
        let is_empty = found.is_empty();
        // Without records if it passed a gap at the end, so that the client knows its position.
        if !is_empty || reader.has_moved() {
            if let (Some(call), Some(permit)) = (&self.call, found.permit.take()) {
                call.keep_response(permit);
            }
            self.node.metrics().on_read(found.record_count(), found.bytes);
            self.pending.push_back(Message::Data(reader.response(found)));
        }
        if reader.is_done() {
            partition.guard = None;
            self.open_count -= 1;
        } else if is_empty || reader.is_at_end() {
            // The watch gives it its next turn.
            if !partition.was_at_end {
                partition.was_at_end = true;
                self.pending.push_back(caught_up(reader));
            }
        } else {
            // More than a message behind: CaughtUp is sent again at the end.
            partition.was_at_end = false;
            self.give_turn(index);
        }
        Ok(())
    }

    fn give_turn(&mut self, index: u32) {
        let partition = &mut self.partitions[index as usize];
        if !partition.has_turn && !partition.reader.is_done() {
            partition.has_turn = true;
            self.turns.push_back(index);
        }
    }

    /// Waits until something changes, or for `quota_wait`.
    async fn wait(&mut self, quota_wait: Option<Duration>) -> Result<(), Status> {
        let membership = self.membership.as_mut();
        let group_changed = async {
            match membership {
                Some(membership) => membership.changed().await,
                None => std::future::pending().await,
            }
        };
        let within_quota = async {
            match quota_wait {
                Some(wait) => sleep(wait).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = group_changed => self.check_membership(),
            () = within_quota => Ok(()),
            () = self.watcher.changed() => {
                for index in self.watcher.take_ready() {
                    self.give_turn(index);
                }
                Ok(())
            }
            () = self.heartbeat_timer.as_mut() => self.send_heartbeat().await,
            () = self.node.shutdown_token().cancelled() => Err(Error::Draining.into()),
        }
    }

    /// Sends a heartbeat if no message was sent since the timer was set.
    async fn send_heartbeat(&mut self) -> Result<(), Status> {
        let now = Instant::now();
        if now >= self.last_message + self.heartbeat_interval {
            let mut partitions = Vec::with_capacity(self.open_count);
            for SubscribedPartition { reader, .. } in &self.partitions {
                if reader.is_done() {
                    continue;
                }
                match reader.current_watermarks() {
                    Ok(watermarks) => partitions.push(watermarks),
                    Err(error) => return Err(reader.failed(&self.node, error).await),
                }
            }
            self.pending.push_back(Message::Heartbeat(Heartbeat { partitions }));
            self.last_message = now;
            self.heartbeat_interval = heartbeat_interval(&self.node);
            let indexes = (0..).take(self.partitions.len());
            for index in indexes {
                if self.partitions[index as usize].reader.ends_at_time() {
                    self.give_turn(index);
                }
            }
        }
        self.heartbeat_timer.as_mut().reset(self.last_message + self.heartbeat_interval);
        Ok(())
    }
}

async fn watch_all(
    node: &Node,
    readers: Vec<PartitionReader>,
    watcher: &Arc<Watcher>,
) -> Result<Vec<SubscribedPartition>, Status> {
    let mut partitions = Vec::with_capacity(readers.len());
    for (index, reader) in (0..).zip(readers) {
        let guard = match reader.shard().watch(reader.partition(), index, watcher) {
            Ok(guard) => Some(guard),
            Err(error) => return Err(reader.failed(node, error).await),
        };
        partitions.push(SubscribedPartition { reader, guard, has_turn: true, was_at_end: false });
    }
    Ok(partitions)
}

/// Returns the interval less up to a fifth at random, so that subscriptions spread out.
fn heartbeat_interval(node: &Node) -> Duration {
    let fifth_us = u64::try_from(HEARTBEAT_INTERVAL.as_micros() / 5).expect("some seconds");
    HEARTBEAT_INTERVAL - Duration::from_micros(node.random_u64() % (fifth_us + 1))
}

fn caught_up(reader: &PartitionReader) -> Message {
    Message::CaughtUp(CaughtUp {
        topic: reader.topic().name.clone(),
        partition: reader.number(),
        watermarks: Some(wire_watermarks(reader.watermarks())),
        topic_id: reader.topic().id,
    })
}
