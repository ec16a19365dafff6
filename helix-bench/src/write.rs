//! Appends: one lane for each request in flight, or one for each stream.
//! A lane has one producer of its own, so that its batches stay in order.

use std::collections::VecDeque;
use std::sync::Arc;

use anyhow::Result;
use helix_client::{Ack, Acked, Client, Error, Producer, ProducerOptions, Session, SessionOptions};
use helix_proto::batch;
use helix_proto::log::v1::{EncodedBatch, Record};
use tokio::time::Instant;

use crate::args::Acks;
use crate::budget::{Budget, Slot};
use crate::load::Load;
use crate::meter::Meter;
use crate::payload::{Pool, record};
use crate::phase::{self, FAILURES_IN_A_ROW_MAX, Lane, Part};
use crate::place::partitions_of;
use crate::readback::read_back;
use crate::report::Report;
use crate::stamp::Stamper;
use crate::target::Target;
use crate::verify::{Fate, Ledger, Verification};
use crate::weak;

/// Bytes that a stream may always have in flight.
const STREAM_BYTES_MIN: usize = 8 << 20;

/// Runs a write load.
///
/// # Errors
/// Why it could not begin.
pub(crate) async fn run(load: &Load) -> Result<Report> {
    let target = Target::connect(load).await?;
    let is_weak = load.acks != Acks::All;
    let marks = if load.verify || is_weak { target.ends().await? } else { Vec::new() };
    let run = run_id(load, marks.iter().map(|mark| mark.offset));
    let pool = (!load.verify)
        .then(|| Pool::new(load.payload, load.size, load.batch_size, load.seed, load.lanes()));
    let source = |lane: usize| match &pool {
        Some(pool) => Source::Pool(pool.lane(lane)),
        None => {
            let lane = u32::try_from(lane).expect("fewer lanes than that");
            Source::Stamped(Ledger::new(Stamper::new(load.seed, run, lane, load.size), lane))
        }
    };
    let lanes = lanes(load, &target, source);
    let (lanes, warmup) = phase::run(lanes, load, Part::Warmup).await?;
    let before = target.observe().await;
    let (lanes, outcome) = phase::run(lanes, load, Part::Measured).await?;
    let after = target.observe().await;
    let mut report = Report::new(load, &target, &before, &after, &warmup, &outcome);
    if load.stream {
        report.note_in_flight_per_stream(lanes.len());
    }
    // The ceiling, which says so, stores nothing.
    if is_weak && report.storage != "none" {
        let mut all = warmup.meter.clone();
        all.merge(&outcome.meter);
        let missing = weak::count_missing(&target, &marks, &all.acked).await;
        report.note_missing(all.acked.values().sum(), missing);
    }
    if load.verify {
        let ledgers = lanes.into_iter().filter_map(Writer::into_ledger).collect();
        // What was measured stays measured, whatever comes of looking at it afterwards.
        report.verify = Some(match read_back(&target, &marks, run, ledgers).await {
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

/// A number that no other run against these partitions has, without asking for chance.
pub(crate) fn run_id(load: &Load, ends: impl Iterator<Item = u64>) -> u64 {
    let seed = load.seed ^ u64::from(std::process::id()).rotate_left(32);
    // FNV-1a over the ends: every run that has written anything has moved one.
    ends.fold(seed ^ 0xCBF2_9CE4_8422_2325, |hash, end| {
        (hash ^ end).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

/// The lanes of a load. `source` gives each its batches.
pub(crate) fn lanes(load: &Load, target: &Target, source: impl Fn(usize) -> Source) -> Vec<Writer> {
    let mut lanes = Vec::new();
    for client in 0..load.clients {
        let partitions = partitions_of(client, load.clients, &target.partitions);
        let mut add = |partitions: Vec<u32>, path| {
            lanes.push(Writer {
                topic: load.topic.clone(),
                batch_size: load.batch_size,
                partitions,
                turn: 0,
                source: source(lanes.len()),
                path,
                failures_in_a_row: 0,
            });
        };
        let connection = target.client(client);
        if load.stream {
            for partition in partitions {
                add(
                    vec![partition],
                    Path::Stream(Box::new(Pipe::new(load, connection, partition))),
                );
            }
        } else {
            for lane in 0..load.in_flight {
                let mut partitions = partitions.clone();
                let start = lane * partitions.len() / load.in_flight;
                partitions.rotate_left(start);
                add(partitions, Path::Unary(producer(load, connection)));
            }
        }
    }
    lanes
}

pub(crate) fn producer(load: &Load, client: &Client) -> Producer {
    client.producer(ProducerOptions {
        durability: load.durability(),
        idempotent: load.idempotent,
        ..ProducerOptions::default()
    })
}

/// One lane.
#[derive(Debug)]
pub(crate) struct Writer {
    topic: String,
    batch_size: u32,
    partitions: Vec<u32>,
    turn: usize,
    source: Source,
    path: Path,
    failures_in_a_row: u32,
}

#[derive(Debug)]
enum Path {
    Unary(Producer),
    Stream(Box<Pipe>),
}

/// Where a lane's batches come from.
#[derive(Debug)]
pub(crate) enum Source {
    /// Made beforehand.
    Pool(Pool),
    /// Stamped, and kept account of.
    Stamped(Ledger),
    /// Stamped with the time of the send.
    Timed { stamper: Stamper, epoch: Instant, next_sequence: u64 },
}

/// A batch on its way.
#[derive(Debug)]
struct Sent {
    /// What latency counts from.
    since: Instant,
    sent: Instant,
    is_paced: bool,
    partition: u32,
    records: u32,
    bytes: usize,
    /// Number in the ledger.
    number: usize,
}

impl Sent {
    fn note(&self, now: Instant, meter: &mut Meter) {
        meter.succeed(now - self.since, u64::from(self.records), self.bytes as u64);
        if self.is_paced {
            meter.part("service", now - self.sent);
            meter.part("send_delay", self.sent - self.since);
        }
    }
}

impl Source {
    /// The next batch and its number.
    fn next(&mut self, partition: u32, records: u32, since: Instant) -> (EncodedBatch, usize) {
        match self {
            Self::Pool(pool) => (pool.next(records), 0),
            Self::Stamped(ledger) => {
                let first = ledger.next_sequence();
                let number = ledger.send(partition, records);
                (stamped(&ledger.stamper, first, records, 0), number)
            }
            Self::Timed { stamper, epoch, next_sequence } => {
                let sent_ns = u64::try_from((since - *epoch).as_nanos()).unwrap_or(u64::MAX);
                let batch = stamped(stamper, *next_sequence, records, sent_ns);
                *next_sequence += u64::from(records);
                (batch, 0)
            }
        }
    }

    fn settle(&mut self, number: usize, result: &Result<Ack, Error>) {
        let Self::Stamped(ledger) = self else { return };
        let fate = match result {
            Ok(ack) => Fate::Acked { first_offset: ack.first_offset },
            Err(error) if error.may_have_applied => Fate::Open,
            Err(_) => Fate::Refused,
        };
        ledger.settle(number, fate);
    }
}

fn stamped(stamper: &Stamper, first: u64, records: u32, sent_ns: u64) -> EncodedBatch {
    let sequences = first..first + u64::from(records);
    let records: Vec<Record> =
        sequences.map(|sequence| record(stamper.value(sequence, sent_ns))).collect();
    batch::encode(&records)
}

impl Lane for Writer {
    async fn run(mut self, budget: Arc<Budget>, _: Part) -> (Self, Meter) {
        let mut meter = Meter::new();
        self.failures_in_a_row = 0;
        match &mut self.path {
            Path::Unary(producer) => {
                let producer = producer.clone();
                self.run_unary(&producer, &budget, &mut meter).await;
            }
            Path::Stream(_) => self.run_stream(&budget, &mut meter).await,
        }
        if self.failures_in_a_row >= FAILURES_IN_A_ROW_MAX {
            meter.give_up(budget.start().elapsed());
        }
        (self, meter)
    }
}

impl Writer {
    fn into_ledger(self) -> Option<Ledger> {
        match self.source {
            Source::Stamped(ledger) => Some(ledger),
            Source::Pool(_) | Source::Timed { .. } => None,
        }
    }

    async fn run_unary(&mut self, producer: &Producer, budget: &Budget, meter: &mut Meter) {
        while self.failures_in_a_row < FAILURES_IN_A_ROW_MAX
            && let Some(slot) = budget.take(self.batch_size).await
        {
            let partition = self.partition();
            let (batch, sent) = self.prepare(slot, partition);
            let result = producer.append(&self.topic, partition, batch).await;
            self.conclude(&sent, result, meter);
        }
    }

    /// Keeps the pipe full. Acks come in the order of the sends, so only the oldest is waited for.
    async fn run_stream(&mut self, budget: &Budget, meter: &mut Meter) {
        let mut is_over = false;
        loop {
            is_over |= self.failures_in_a_row >= FAILURES_IN_A_ROW_MAX;
            let Path::Stream(pipe) = &mut self.path else { return };
            if !is_over && pipe.has_room() {
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

    /// Puts a batch into the pipe, which is opened first if it is not open.
    async fn send(&mut self, slot: Slot, meter: &mut Meter) {
        let partition = self.partition();
        let (batch, sent) = self.prepare(slot, partition);
        let Path::Stream(pipe) = &mut self.path else { return };
        if let Err(error) = pipe.send(batch, sent).await {
            let (sent, error) = *error;
            self.conclude(&sent, Err(error), meter);
        }
    }

    fn conclude(&mut self, sent: &Sent, result: Result<Ack, Error>, meter: &mut Meter) {
        self.failures_in_a_row = if result.is_ok() { 0 } else { self.failures_in_a_row + 1 };
        self.source.settle(sent.number, &result);
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

    fn prepare(&mut self, slot: Slot, partition: u32) -> (EncodedBatch, Sent) {
        let since = slot.intended.unwrap_or_else(Instant::now);
        let (batch, number) = self.source.next(partition, slot.records, since);
        // What it took to make the batch is not the service's; a late send is.
        let sent = Instant::now();
        let sent = Sent {
            since: slot.intended.unwrap_or(sent),
            sent,
            is_paced: slot.intended.is_some(),
            partition,
            records: slot.records,
            bytes: batch.payload.len(),
            number,
        };
        (batch, sent)
    }
}

/// A session and what is in it. After a failure the next send opens another one.
#[derive(Debug)]
struct Pipe {
    client: Client,
    topic: String,
    partition: u32,
    options: SessionOptions,
    session: Option<Session>,
    under_way: VecDeque<(Sent, Acked)>,
}

impl Pipe {
    fn new(load: &Load, client: &Client, partition: u32) -> Self {
        let bytes = load.in_flight.saturating_mul(load.size + 64);
        let bytes = bytes.saturating_mul(load.batch_size as usize);
        let options = SessionOptions {
            durability: load.durability(),
            idempotent: load.idempotent,
            in_flight_batches: load.in_flight,
            in_flight_bytes: bytes.max(STREAM_BYTES_MIN),
            ..SessionOptions::default()
        };
        Self {
            client: client.clone(),
            topic: load.topic.clone(),
            partition,
            options,
            session: None,
            under_way: VecDeque::with_capacity(load.in_flight),
        }
    }

    fn has_room(&self) -> bool {
        self.under_way.len() < self.options.in_flight_batches
    }

    fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    async fn send(&mut self, batch: EncodedBatch, sent: Sent) -> Result<(), Box<(Sent, Error)>> {
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
                self.under_way.push_back((sent, acked));
                self.session = Some(session);
                Ok(())
            }
            Err(error) => Err(Box::new((sent, error))),
        }
    }

    /// The ack of the oldest batch, which is not empty-handed only if there is one. Nothing is lost
    /// if the future is dropped.
    async fn oldest(&mut self) -> (Sent, Result<Ack, Error>) {
        let (_, acked) = self.under_way.front_mut().expect("asked only if not empty");
        let result = acked.await;
        let (sent, _) = self.under_way.pop_front().expect("as above");
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
    fn open_loop_latency_counts_from_the_intended_time() {
        // Due at 0, sent 50 ms late because the one before was slow, answered 1 ms later.
        let since = Instant::now();
        let sent = since + Duration::from_millis(50);
        let batch = Sent {
            since,
            sent,
            is_paced: true,
            partition: 0,
            records: 100,
            bytes: 1000,
            number: 0,
        };
        let mut meter = Meter::new();
        batch.note(sent + Duration::from_millis(1), &mut meter);
        let ms = |latencies: &crate::meter::Latencies| {
            (latencies.percentiles().unwrap().max / 1000.0).round()
        };
        assert_eq!(ms(&meter.latency), 51.0);
        assert_eq!(ms(&meter.parts["service"]), 1.0);
        assert_eq!(ms(&meter.parts["send_delay"]), 50.0);
    }
}
