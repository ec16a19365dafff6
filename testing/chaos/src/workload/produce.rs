//! Producers with a session, with one batch at a time, and without an identity.
//!
//! Each batch is recorded before it is sent, and its outcome as soon as it is known.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use helix_checker::{BatchKey, HistoryEvent, payload};
use helix_client::{
    Ack, AckFuture, AppendOptions, Client, Error, ProducerOptions, Session, SessionOptions,
};
use helix_proto::log::v1::{EncodedBatch, ErrorReason};
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::time::Instant;

use super::{RetentionRule, StopSignal, WorkloadContext, WorkloadShape, is_stopped, pause};

/// Batches in flight per session.
const SESSION_IN_FLIGHT: usize = 8;

/// Pause after a session failed to open, in addition to the client's own retries.
const SESSION_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Attempts in a row of a conditional producer.
const CONDITIONAL_ATTEMPTS: usize = 8;

/// Producer that records its batches in the history.
pub(super) struct HistoryProducer {
    context: Arc<WorkloadContext>,
    client: Client,
    producer: u32,
    next: u64,
    shape: WorkloadShape,
    rng: StdRng,
    stop: StopSignal,
}

/// Batch that was sent.
struct Sent {
    key: BatchKey,
    partition: u32,
    records: u32,
    payload_bytes: u64,
    invoked: Instant,
}

impl HistoryProducer {
    pub(super) fn new(
        context: &Arc<WorkloadContext>,
        shape: &WorkloadShape,
        stop: StopSignal,
    ) -> anyhow::Result<Self> {
        let producer = context.id();
        Ok(Self {
            client: context.client()?,
            rng: context.rng(producer),
            producer,
            next: 0,
            shape: shape.clone(),
            context: context.clone(),
            stop,
        })
    }

    /// Keeps a session to one partition, and opens a new one after a failure.
    pub(super) async fn stream(mut self, partition: u32) {
        let target = self.context.topic_partition(partition);
        while !self.is_over() {
            let opening =
                self.client.session(target.topic, target.partition, SessionOptions::default());
            match opening.await {
                Ok(session) => self.fill(&session, partition).await,
                Err(_) => {
                    self.context.stats.broken_sessions.fetch_add(1, Ordering::Relaxed);
                    pause(&mut self.stop, SESSION_RETRY_DELAY, &mut self.rng).await;
                }
            }
        }
    }

    /// Writes through a session until it fails or the workload stops. On return every sent batch
    /// has its outcome in the history.
    async fn fill(&mut self, session: &Session, partition: u32) {
        let stream = self.context.id();
        let mut waiting: VecDeque<(Sent, AckFuture)> = VecDeque::new();
        let mut has_failed = false;
        while !has_failed && pause(&mut self.stop, self.shape.pace, &mut self.rng).await {
            if self.is_over() {
                break;
            }
            let (sent, batch) = self.make(partition, Some(stream));
            match session.append(batch).await {
                Ok(acked) => waiting.push_back((sent, acked)),
                Err(error) => {
                    self.end(&sent, Err(error));
                    has_failed = true;
                }
            }
            if waiting.len() >= SESSION_IN_FLIGHT {
                has_failed |= self.take(&mut waiting).await;
            }
        }
        while !waiting.is_empty() {
            has_failed |= self.take(&mut waiting).await;
        }
        if has_failed {
            self.context.stats.broken_sessions.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits for the oldest batch. True if it failed.
    async fn take(&self, waiting: &mut VecDeque<(Sent, AckFuture)>) -> bool {
        let Some((sent, acked)) = waiting.pop_front() else { return false };
        let result = acked.await;
        let has_failed = result.is_err();
        self.end(&sent, result);
        has_failed
    }

    /// Draws a partition.
    fn draw(&mut self) -> u32 {
        self.rng.random_range(0..u32::try_from(self.context.all_partitions.len()).unwrap_or(1))
    }

    /// Runs an idempotent producer with one batch in flight, to random partitions.
    pub(super) async fn one_by_one(mut self) {
        let producer = self.client.producer(ProducerOptions::default());
        while pause(&mut self.stop, self.shape.pace, &mut self.rng).await && !self.is_over() {
            let number = self.draw();
            let target = self.context.topic_partition(number);
            let (sent, batch) = self.make(number, None);
            let result = producer.append(target.topic, target.partition, batch).await;
            self.end(&sent, result);
        }
    }

    /// Runs a producer that cannot safely retry.
    pub(super) async fn plain(mut self) {
        let options = AppendOptions::default();
        while pause(&mut self.stop, self.shape.pace, &mut self.rng).await && !self.is_over() {
            let number = self.draw();
            let target = self.context.topic_partition(number);
            let (sent, batch) = self.make(number, None);
            let result = self.client.append(target.topic, target.partition, batch, &options).await;
            self.end(&sent, result);
        }
    }

    /// Runs an idempotent producer that appends only at the offset where it believes the end to be.
    ///
    /// A mismatch reports the actual end. Other producers move it all the time, so most attempts
    /// fail, and a failed batch must never appear.
    pub(super) async fn conditional(mut self) {
        let producer = self.client.producer(ProducerOptions::default());
        let mut ends = vec![0; self.context.all_partitions.len()];
        while pause(&mut self.stop, self.shape.pace, &mut self.rng).await && !self.is_over() {
            let number = self.draw();
            let target = self.context.topic_partition(number);
            let end = &mut ends[number as usize];
            for _ in 0..CONDITIONAL_ATTEMPTS {
                let (sent, batch) = self.make(number, None);
                let (key, expected) = (sent.key, Some(*end));
                self.context.recorder.add(HistoryEvent::Condition { key, expected, token: None });
                let options = AppendOptions::default().expecting(*end);
                let result =
                    producer.append_with(target.topic, target.partition, batch, &options).await;
                let has_lost = result.is_err();
                let next_offset = match &result {
                    Ok(ack) => ack.next_offset,
                    Err(error) => error.next_offset,
                };
                *end = next_offset.unwrap_or(*end);
                self.end(&sent, result);
                if !has_lost || self.is_over() {
                    break;
                }
            }
        }
    }

    fn is_over(&self) -> bool {
        is_stopped(&self.stop) || self.context.recorder.is_full()
    }

    /// Builds the next batch and records it.
    fn make(&mut self, partition: u32, stream: Option<u32>) -> (Sent, EncodedBatch) {
        let key = BatchKey { producer: self.producer, number: self.next };
        self.next += 1;
        let most = match self.context.topic_partition(partition).keep {
            RetentionRule::All | RetentionRule::TrimOnly => self.shape.records_max,
            RetentionRule::Bytes(_) | RetentionRule::Age(_) => self.shape.bulk_records_max,
        };
        let records = self.rng.random_range(1..=most);
        let batch = payload::build(key, records);
        let payload_bytes = batch.payload.len() as u64;
        self.context.tracker(partition).on_invoked(payload_bytes);
        self.context.recorder.add(HistoryEvent::Invoked { key, partition, records, stream });
        (Sent { key, partition, records, payload_bytes, invoked: Instant::now() }, batch)
    }

    fn end(&self, sent: &Sent, result: Result<Ack, Error>) {
        let Sent { key, partition, records, payload_bytes, invoked } = *sent;
        let recorder = &self.context.recorder;
        match result {
            Ok(Ack { first_offset: Some(offset), next_offset, duplicate, .. }) => {
                recorder.add(HistoryEvent::Acked { key, offset });
                self.context.tracker(partition).on_acked(offset, payload_bytes, invoked);
                if next_offset != Some(offset + u64::from(records)) {
                    let what = format!("an ack of {key} with next offset {next_offset:?}");
                    recorder.add(HistoryEvent::Foreign {
                        reader: self.producer,
                        partition,
                        offset,
                        what,
                    });
                }
                let stats = &self.context.stats;
                stats.acks[partition as usize].fetch_add(1, Ordering::Relaxed);
                stats.records.fetch_add(u64::from(records), Ordering::Relaxed);
                stats.duplicates.fetch_add(u64::from(duplicate), Ordering::Relaxed);
            }
            Ok(Ack { first_offset: None, .. }) => {
                let what = format!("an ack of {key} without an offset");
                recorder.add(HistoryEvent::Unknown { key });
                recorder.add(HistoryEvent::Foreign {
                    reader: self.producer,
                    partition,
                    offset: 0,
                    what,
                });
            }
            Err(error) if error.may_have_applied => recorder.add(HistoryEvent::Unknown { key }),
            Err(error) => {
                self.context.tracker(partition).on_failed(payload_bytes);
                recorder.add(match error.next_offset {
                    Some(next_offset) if error.is(ErrorReason::ExpectedOffsetMismatch) => {
                        HistoryEvent::Refused { key, next_offset }
                    }
                    _ => HistoryEvent::Failed { key },
                });
            }
        }
    }
}
