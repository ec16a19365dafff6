//! What one record costs from end to end: append it, wait for the ack, fetch it back.
//! Each lane does one thing at a time, so this is latency without a queue.

use std::sync::Arc;

use anyhow::Result;
use helix_client::{Client, Error, FetchOptions, Position, Producer, Start};
use tokio::time::{Duration, Instant};

use crate::budget::{Budget, Slot};
use crate::load::Load;
use crate::meter::Meter;
use crate::payload::Pool;
use crate::phase::{self, FAILURES_IN_A_ROW_MAX, Lane, Part};
use crate::place::partitions_of;
use crate::report::Report;
use crate::target::Target;
use crate::write::producer;

/// Wait of a fetch for a record that was acked: what is acked is readable, so none is needed.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Runs a latency load.
///
/// # Errors
/// Why it could not begin.
pub(crate) async fn run(load: &Load) -> Result<Report> {
    let target = Target::connect(load).await?;
    let pool = Pool::new(load.payload, load.size, 1, load.seed, load.clients);
    let lanes = (0..load.clients)
        .map(|lane| {
            let client = target.client(lane);
            PingPong {
                topic: load.topic.clone(),
                partitions: partitions_of(lane, load.clients, &target.partitions),
                turn: 0,
                client: client.clone(),
                producer: producer(load, client),
                pool: pool.lane(lane),
            }
        })
        .collect();
    let (lanes, warmup) = phase::run(lanes, load, Part::Warmup).await?;
    let before = target.observe().await;
    let (_, outcome) = phase::run(lanes, load, Part::Measured).await?;
    let after = target.observe().await;
    let mut report = Report::new(load, &target, &before, &after, &warmup, &outcome);
    report.notes.push("one operation = append, ack, and fetch of the same record".to_owned());
    Ok(report)
}

/// One lane.
#[derive(Debug)]
struct PingPong {
    topic: String,
    partitions: Vec<u32>,
    turn: usize,
    client: Client,
    producer: Producer,
    pool: Pool,
}

impl Lane for PingPong {
    async fn run(mut self, budget: Arc<Budget>, _: Part) -> (Self, Meter) {
        let mut meter = Meter::new();
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

impl PingPong {
    async fn operate(&mut self, slot: Slot, meter: &mut Meter) -> Result<(), Error> {
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
            [Start::new(&self.topic, partition, Position::Offset(offset)).until(offset + 1)];
        let options =
            FetchOptions { records_max: Some(1), wait_max: WAIT_MAX, ..FetchOptions::default() };
        let fetched = self.client.consumer().fetch_encoded(&start, &options).await?;
        let now = Instant::now();
        if fetched.iter().all(|batches| batches.batches.is_empty()) {
            meter.fail_as("EMPTY".into(), format!("an acked record was not there: {offset}"));
            return Ok(());
        }
        meter.succeed(now - since, 1, bytes);
        meter.ack(ack.durability, ack.duplicate);
        meter.part("append", acked - sent);
        meter.part("fetch", now - acked);
        Ok(())
    }
}
