//! Write load: one lane for each request in flight, or one for each stream.
//!
//! Each lane has its own producer, so its batches stay in order.

use std::collections::VecDeque;
use std::sync::Arc;

use anyhow::Result;
use helix_client::{
    Ack, AckFuture, BatchCompressor, Client, Error, Producer, ProducerOptions, Session,
    SessionOptions,
};
use helix_proto::batch;
use helix_proto::log::v1::{EncodedBatch, Record};
use tokio::time::Instant;

use crate::assignment::partitions_of;
use crate::budget::{SendBudget, SendSlot};
use crate::delivery::AckedRecords;
use crate::keyed_updates::KeyedUpdates;
use crate::load::BenchLoad;
use crate::meter::LoadMeter;
use crate::options::AckLevel;
use crate::payload::{BatchPool, record};
use crate::phase::{self, FAILURES_IN_A_ROW_MAX, LoadLane, RunPhase};
use crate::readback::read_back;
use crate::report::BenchReport;
use crate::stamp::Stamper;
use crate::target::BenchTarget;
use crate::verify::{SendOutcome, SentBatches, Verification};
use crate::weak_acks;

/// Least in-flight byte limit of a stream.
const STREAM_BYTES_IN_FLIGHT_MIN: usize = 8 << 20;

/// Runs a write load.
///
/// # Errors
/// The run could not start.
pub(crate) async fn run(load: &BenchLoad) -> Result<BenchReport> {
    let target = BenchTarget::connect(load).await?;
    let is_weak = load.acks != AckLevel::All;
    let initial_ends = if load.verify || is_weak { target.ends().await? } else { Vec::new() };
    let run = run_id(load, initial_ends.iter().map(|end| end.offset));
    let pool = (!load.verify)
        .then(|| BatchPool::new(load.payload, load.size, load.batch_size, load.seed, load.lanes()));
    let source = |lane: usize| match &pool {
        Some(pool) => BatchSource::BatchPool(pool.lane(lane)),
        None => {
            let lane = u32::try_from(lane).expect("the number of lanes is limited");
            BatchSource::Stamped(SentBatches::new(
                Stamper::new(load.seed, run, lane, load.size),
                lane,
            ))
        }
    };
    let lanes = lanes(load, &target, source);
    let (lanes, warmup) = phase::run(lanes, load, RunPhase::Warmup).await?;
    let before = target.observe().await;
    let (lanes, outcome) = phase::run(lanes, load, RunPhase::Measured).await?;
    let after = target.observe().await;
    let mut report = BenchReport::new(load, &target, &before, &after, &warmup, &outcome);
    if load.stream {
        report.note_stream_count(lanes.len());
    }
    // The ceiling stores nothing and reports storage "none".
    if is_weak && report.storage != "none" {
        let mut all = warmup.meter.clone();
        all.merge(&outcome.meter);
        let missing = weak_acks::count_missing(&target, &initial_ends, &all.acked).await;
        report.note_missing(all.acked.values().sum(), missing);
    }
    if load.verify {
        let sent_batches = lanes.into_iter().filter_map(WriteLane::into_sent_batches).collect();
        // A failed verification does not invalidate the measurement.
        report.verify = Some(match read_back(&target, &initial_ends, run, sent_batches).await {
            Ok(findings) => Verification::Written(findings),
            Err(error) => Verification::not_possible(&error),
        });
        report.notes.push(
            "--verify: batches are stamped and built between sends, which costs throughput"
                .to_owned(),
        );
    }
    Ok(report)
}

/// Returns a number that differs between runs against the same partitions, without randomness.
pub(crate) fn run_id(load: &BenchLoad, ends: impl Iterator<Item = u64>) -> u64 {
    let seed = load.seed ^ u64::from(std::process::id()).rotate_left(32);
    // FNV-1a over the end offsets: a run that writes moves at least one of them.
    ends.fold(seed ^ 0xCBF2_9CE4_8422_2325, |hash, end| {
        (hash ^ end).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

/// Creates the lanes of a load. `source` supplies the batches of each.
pub(crate) fn lanes(
    load: &BenchLoad,
    target: &BenchTarget,
    source: impl Fn(usize) -> BatchSource,
) -> Vec<WriteLane> {
    let compressor = Arc::new(BatchCompressor::new(load.compression.into()));
    let mut lanes = Vec::new();
    for client in 0..load.clients {
        let partitions = partitions_of(client, load.clients, &target.partitions);
        let mut add = |partitions: Vec<u32>, path| {
            lanes.push(WriteLane {
                topic: load.topic.clone(),
                batch_size: load.batch_size,
                partitions,
                turn: 0,
                source: source(lanes.len()),
                compressor: compressor.clone(),
                path,
                failures_in_a_row: 0,
            });
        };
        let connection = target.client(client);
        if load.stream {
            for partition in partitions {
                add(
                    vec![partition],
                    AppendPath::Stream(Box::new(StreamPipeline::new(load, connection, partition))),
                );
            }
        } else {
            for lane in 0..load.in_flight {
                let mut partitions = partitions.clone();
                let start = lane * partitions.len() / load.in_flight;
                partitions.rotate_left(start);
                add(partitions, AppendPath::Unary(producer(load, connection)));
            }
        }
    }
    lanes
}

pub(crate) fn producer(load: &BenchLoad, client: &Client) -> Producer {
    client.producer(ProducerOptions {
        durability: load.durability(),
        idempotent: load.idempotent,
        ..ProducerOptions::default()
    })
}

/// Lane that appends batches.
#[derive(Debug)]
pub(crate) struct WriteLane {
    topic: String,
    batch_size: u32,
    partitions: Vec<u32>,
    turn: usize,
    source: BatchSource,
    /// Shared by all lanes.
    compressor: Arc<BatchCompressor>,
    path: AppendPath,
    failures_in_a_row: u32,
}

#[derive(Debug)]
enum AppendPath {
    Unary(Producer),
    Stream(Box<StreamPipeline>),
}

/// Source of a lane's batches.
#[derive(Debug)]
pub(crate) enum BatchSource {
    /// Built in advance.
    BatchPool(BatchPool),
    /// Stamped and noted for verification.
    Stamped(SentBatches),
    /// Stamped with the send time.
    Timed { stamper: Stamper, epoch: Instant, next_sequence: u64, acked: AckedRecords },
    /// Updates of keys, for compaction.
    Keyed(Box<KeyedUpdates>),
}

/// Batch whose ack is outstanding.
#[derive(Debug)]
struct InFlightBatch {
    /// Start of the latency measurement.
    since: Instant,
    sent: Instant,
    is_paced: bool,
    partition: u32,
    records: u32,
    /// Payload bytes before compression.
    bytes: usize,
    /// Number in [`SentBatches`], or the first sequence of a timed batch.
    number: usize,
}

impl InFlightBatch {
    fn note(&self, now: Instant, meter: &mut LoadMeter) {
        meter.succeed(now - self.since, u64::from(self.records), self.bytes as u64);
        if self.is_paced {
            meter.part("service", now - self.sent);
            meter.part("send_delay", self.sent - self.since);
        }
    }
}

impl BatchSource {
    /// Returns the next batch and its number.
    fn next(&mut self, partition: u32, records: u32, since: Instant) -> (EncodedBatch, usize) {
        match self {
            Self::BatchPool(pool) => (pool.next(records), 0),
            Self::Stamped(sent_batches) => {
                let first = sent_batches.next_sequence();
                let number = sent_batches.send(partition, records);
                (stamped(&sent_batches.stamper, first, records, 0), number)
            }
            Self::Timed { stamper, epoch, next_sequence, .. } => {
                let sent_ns = u64::try_from((since - *epoch).as_nanos()).unwrap_or(u64::MAX);
                let first = *next_sequence;
                let batch = stamped(stamper, first, records, sent_ns);
                *next_sequence += u64::from(records);
                (batch, usize::try_from(first).expect("sequences fit"))
            }
            Self::Keyed(updates) => (updates.next(records), 0),
        }
    }

    fn settle(&mut self, sent: &InFlightBatch, result: &Result<Ack, Error>) {
        match self {
            Self::BatchPool(_) => {}
            Self::Stamped(sent_batches) => {
                let outcome = match result {
                    Ok(ack) => SendOutcome::Acked { first_offset: ack.first_offset },
                    Err(error) if error.may_have_applied => SendOutcome::Open,
                    Err(_) => SendOutcome::Refused,
                };
                sent_batches.settle(sent.number, outcome);
            }
            Self::Timed { acked, .. } if result.is_ok() => {
                acked.add(sent.number as u64, sent.records);
            }
            Self::Timed { .. } => {}
            Self::Keyed(updates) if result.is_err() => updates.note_failure(),
            Self::Keyed(_) => {}
        }
    }
}

/// Builds a batch of consecutive stamped records.
pub(crate) fn stamped(stamper: &Stamper, first: u64, records: u32, sent_ns: u64) -> EncodedBatch {
    let sequences = first..first + u64::from(records);
    let records: Vec<Record> =
        sequences.map(|sequence| record(stamper.value(sequence, sent_ns))).collect();
    batch::encode(&records)
}

impl LoadLane for WriteLane {
    async fn run(mut self, budget: Arc<SendBudget>, _: RunPhase) -> (Self, LoadMeter) {
        let mut meter = LoadMeter::with_series(budget.series());
        self.failures_in_a_row = 0;
        match &mut self.path {
            AppendPath::Unary(producer) => {
                let producer = producer.clone();
                self.run_unary(&producer, &budget, &mut meter).await;
            }
            AppendPath::Stream(_) => self.run_stream(&budget, &mut meter).await,
        }
        if self.failures_in_a_row >= FAILURES_IN_A_ROW_MAX {
            meter.give_up(budget.start().elapsed());
        }
        (self, meter)
    }
}

impl WriteLane {
    fn into_sent_batches(self) -> Option<SentBatches> {
        match self.source {
            BatchSource::Stamped(sent_batches) => Some(sent_batches),
            BatchSource::BatchPool(_) | BatchSource::Timed { .. } | BatchSource::Keyed(_) => None,
        }
    }

    /// Returns the updates of a lane that updates keys.
    pub(crate) fn into_updates(self) -> Option<KeyedUpdates> {
        match self.source {
            BatchSource::Keyed(updates) => Some(*updates),
            BatchSource::BatchPool(_) | BatchSource::Stamped(_) | BatchSource::Timed { .. } => None,
        }
    }

    /// Returns the acked records of a lane whose records carry their send time.
    pub(crate) fn into_acked(self) -> Option<AckedRecords> {
        match self.source {
            BatchSource::Timed { acked, .. } => Some(acked),
            BatchSource::BatchPool(_) | BatchSource::Stamped(_) | BatchSource::Keyed(_) => None,
        }
    }

    async fn run_unary(&mut self, producer: &Producer, budget: &SendBudget, meter: &mut LoadMeter) {
        while self.failures_in_a_row < FAILURES_IN_A_ROW_MAX
            && let Some(slot) = budget.take(self.batch_size).await
        {
            let partition = self.partition();
            let (batch, sent) = self.prepare(slot, partition);
            let result = producer.append(&self.topic, partition, batch).await;
            self.conclude(&sent, result, meter);
        }
    }

    /// Keeps the pipeline full. Acks come in send order, so only the oldest is awaited.
    async fn run_stream(&mut self, budget: &SendBudget, meter: &mut LoadMeter) {
        let mut is_over = false;
        loop {
            is_over |= self.failures_in_a_row >= FAILURES_IN_A_ROW_MAX;
            let AppendPath::Stream(pipe) = &mut self.path else { return };
            if !is_over && pipe.has_capacity() {
                tokio::select! {
                    biased;
                    slot = budget.take(self.batch_size) => match slot {
                        Some(slot) => self.send(slot, meter).await,
                        None => is_over = true,
                    },
                    (sent, result) = pipe.oldest(), if !pipe.is_empty() => {
                        self.conclude(&sent, result, meter);
                    }
                }
            } else if !pipe.is_empty() {
                let (sent, result) = pipe.oldest().await;
                self.conclude(&sent, result, meter);
            } else {
                return;
            }
        }
    }

    /// Sends a batch through the pipeline, opening its session first if necessary.
    async fn send(&mut self, slot: SendSlot, meter: &mut LoadMeter) {
        let partition = self.partition();
        let (batch, sent) = self.prepare(slot, partition);
        let AppendPath::Stream(pipe) = &mut self.path else { return };
        if let Err(error) = pipe.send(batch, sent).await {
            let (sent, error) = *error;
            self.conclude(&sent, Err(error), meter);
        }
    }

    fn conclude(
        &mut self,
        sent: &InFlightBatch,
        result: Result<Ack, Error>,
        meter: &mut LoadMeter,
    ) {
        self.failures_in_a_row = if result.is_ok() { 0 } else { self.failures_in_a_row + 1 };
        self.source.settle(sent, &result);
        match result {
            Ok(ack) => {
                sent.note(Instant::now(), meter);
                meter.ack(ack.durability, ack.duplicate);
                meter.count_acked(sent.partition, u64::from(sent.records));
            }
            Err(error) => meter.fail(&error),
        }
    }

    fn partition(&mut self) -> u32 {
        let partition = self.partitions[self.turn % self.partitions.len()];
        self.turn += 1;
        partition
    }

    fn prepare(&mut self, slot: SendSlot, partition: u32) -> (EncodedBatch, InFlightBatch) {
        let since = slot.intended.unwrap_or_else(Instant::now);
        let (batch, number) = self.source.next(partition, slot.records, since);
        let bytes = batch.payload.len();
        let batch = self.compressor.compress(batch);
        // The time to build the batch is not the service's; the delay of a late send is.
        let sent = Instant::now();
        let sent = InFlightBatch {
            since: slot.intended.unwrap_or(sent),
            sent,
            is_paced: slot.intended.is_some(),
            partition,
            records: slot.records,
            bytes,
            number,
        };
        (batch, sent)
    }
}

/// Session with its unacked batches. After a failure the next send opens a new session.
#[derive(Debug)]
struct StreamPipeline {
    client: Client,
    topic: String,
    partition: u32,
    options: SessionOptions,
    session: Option<Session>,
    in_flight: VecDeque<(InFlightBatch, AckFuture)>,
}

impl StreamPipeline {
    fn new(load: &BenchLoad, client: &Client, partition: u32) -> Self {
        let bytes = load.in_flight.saturating_mul(load.size + 64);
        let bytes = bytes.saturating_mul(load.batch_size as usize);
        let options = SessionOptions {
            durability: load.durability(),
            idempotent: load.idempotent,
            in_flight_batches: load.in_flight,
            in_flight_bytes: bytes.max(STREAM_BYTES_IN_FLIGHT_MIN),
            ..SessionOptions::default()
        };
        Self {
            client: client.clone(),
            topic: load.topic.clone(),
            partition,
            options,
            session: None,
            in_flight: VecDeque::with_capacity(load.in_flight),
        }
    }

    fn has_capacity(&self) -> bool {
        self.in_flight.len() < self.options.in_flight_batches
    }

    fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    async fn send(
        &mut self,
        batch: EncodedBatch,
        sent: InFlightBatch,
    ) -> Result<(), Box<(InFlightBatch, Error)>> {
        let session = match self.session.take() {
            Some(session) => session,
            None => {
                let opened = self.client.session(&self.topic, self.partition, self.options.clone());
                match opened.await {
                    Ok(session) => session,
                    Err(error) => return Err(Box::new((sent, error))),
                }
            }
        };
        match session.append(batch).await {
            Ok(acked) => {
                self.in_flight.push_back((sent, acked));
                self.session = Some(session);
                Ok(())
            }
            Err(error) => Err(Box::new((sent, error))),
        }
    }

    /// Waits for the ack of the oldest batch.
    ///
    /// Panics if the pipeline is empty. Cancel safe.
    async fn oldest(&mut self) -> (InFlightBatch, Result<Ack, Error>) {
        let (_, acked) = self.in_flight.front_mut().expect("the pipeline is not empty");
        let result = acked.await;
        let (sent, _) = self.in_flight.pop_front().expect("the pipeline is not empty");
        if result.is_err() {
            self.session = None;
        }
        (sent, result)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Duration;

    use super::*;

    #[test]
    fn open_loop_latency_counts_from_the_scheduled_time() {
        // Due at 0, sent 50 ms late because the previous send was slow, answered 1 ms later.
        let since = Instant::now();
        let sent = since + Duration::from_millis(50);
        let batch = InFlightBatch {
            since,
            sent,
            is_paced: true,
            partition: 0,
            records: 100,
            bytes: 1000,
            number: 0,
        };
        let mut meter = LoadMeter::new();
        batch.note(sent + Duration::from_millis(1), &mut meter);
        let ms = |latencies: &crate::meter::LatencyHistogram| {
            (latencies.percentiles().unwrap().max / 1000.0).round()
        };
        assert_eq!(ms(&meter.latency), 51.0);
        assert_eq!(ms(&meter.parts["service"]), 1.0);
        assert_eq!(ms(&meter.parts["send_delay"]), 50.0);
    }
}
