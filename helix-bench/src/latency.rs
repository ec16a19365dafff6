//! Latency of one record: append it, wait for the ack, fetch it back.
//!
//! Each lane has one request in flight, so this is latency without queueing.

use std::sync::Arc;

use anyhow::Result;
use helix_client::{Client, Error, FetchOptions, Position, Producer, ReadStart};
use tokio::time::{Duration, Instant};

use crate::assignment::partitions_of;
use crate::budget::{SendBudget, SendSlot};
use crate::load::BenchLoad;
use crate::meter::LoadMeter;
use crate::payload::BatchPool;
use crate::phase::{self, FAILURES_IN_A_ROW_MAX, LoadLane, RunPhase};
use crate::report::BenchReport;
use crate::target::BenchTarget;
use crate::write::producer;

/// Longest wait of a fetch for an acked record. Acked records are readable, so none should be
/// needed.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Runs a latency load.
///
/// # Errors
/// The run could not start.
pub(crate) async fn run(load: &BenchLoad) -> Result<BenchReport> {
    let target = BenchTarget::connect(load).await?;
    let pool = BatchPool::new(load.payload, load.size, 1, load.seed, load.clients);
    let lanes = (0..load.clients)
        .map(|lane| {
            let client = target.client(lane);
            LatencyLane {
                topic: load.topic.clone(),
                partitions: partitions_of(lane, load.clients, &target.partitions),
                turn: 0,
                client: client.clone(),
                producer: producer(load, client),
                pool: pool.lane(lane),
            }
        })
        .collect();
    let (lanes, warmup) = phase::run(lanes, load, RunPhase::Warmup).await?;
    let before = target.observe().await;
    let (_, outcome) = phase::run(lanes, load, RunPhase::Measured).await?;
    let after = target.observe().await;
    let mut report = BenchReport::new(load, &target, &before, &after, &warmup, &outcome);
    report.notes.push("one operation = append, ack, and fetch of the same record".to_owned());
    Ok(report)
}

/// Lane that appends and fetches one record at a time.
#[derive(Debug)]
struct LatencyLane {
    topic: String,
    partitions: Vec<u32>,
    turn: usize,
    client: Client,
    producer: Producer,
    pool: BatchPool,
}

impl LoadLane for LatencyLane {
    async fn run(mut self, budget: Arc<SendBudget>, _: RunPhase) -> (Self, LoadMeter) {
        let mut meter = LoadMeter::with_series(budget.series());
        let mut failures_in_a_row = 0;
        while failures_in_a_row < FAILURES_IN_A_ROW_MAX
            && let Some(slot) = budget.take(1).await
        {
            failures_in_a_row = match self.operate(slot, &mut meter).await {
                Ok(()) => 0,
                Err(error) => {
                    meter.fail(&error);
                    failures_in_a_row + 1
                }
            };
        }
        if failures_in_a_row >= FAILURES_IN_A_ROW_MAX {
            meter.give_up(budget.start().elapsed());
        }
        (self, meter)
    }
}

impl LatencyLane {
    async fn operate(&mut self, slot: SendSlot, meter: &mut LoadMeter) -> Result<(), Error> {
        let partition = self.partitions[self.turn % self.partitions.len()];
        self.turn += 1;
        let batch = self.pool.next(1);
        let bytes = batch.payload.len() as u64;
        let sent = Instant::now();
        let since = slot.intended.unwrap_or(sent);
        let ack = self.producer.append(&self.topic, partition, batch).await?;
        let acked = Instant::now();
        let Some(offset) = ack.first_offset else {
            meter.fail_as("NO_OFFSET".into(), "the ack has no offset".into());
            return Ok(());
        };
        let start =
            [ReadStart::new(&self.topic, partition, Position::Offset(offset)).until(offset + 1)];
        let options =
            FetchOptions { records_max: Some(1), wait_max: WAIT_MAX, ..FetchOptions::default() };
        let fetched = self.client.consumer().fetch_encoded(&start, &options).await?;
        let now = Instant::now();
        if fetched.iter().all(|batches| batches.batches.is_empty()) {
            meter.fail_as("EMPTY".into(), format!("the acked record at {offset} is missing"));
            return Ok(());
        }
        meter.succeed(now - since, 1, bytes);
        meter.ack(ack.durability, ack.duplicate);
        meter.part("append", acked - sent);
        meter.part("fetch", now - acked);
        Ok(())
    }
}
