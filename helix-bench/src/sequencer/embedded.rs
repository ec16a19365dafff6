//! Throughput of a node in this process: several publishers, each of which reads the whole stream.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result};
use futures_util::StreamExt;
use helix_proto::log::v1::{Durability, StoredBatch};
use helix_server::embedded::{Embedded, EmbeddedBatch};
use helix_server::error::Error;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Duration, Instant, timeout};

use super::node::{DELIVERY_TIMEOUT, ThroughputOutcome, both_phases};
use super::order::{OrderFindings, StreamOrder};
use crate::budget::SendBudget;
use crate::interrupt;
use crate::load::BenchLoad;
use crate::meter::{Failures, LatencyHistogram, durability_name};
use crate::stamp::Stamper;
use crate::write::{self, stamped};

/// Stream of an embedded node, which its publishers and subscribers share.
struct EmbeddedStream {
    log: Arc<Embedded>,
    load: BenchLoad,
    run: u64,
    epoch: Instant,
    /// Measured time: from the first instant until before the second one.
    measured: (Instant, Instant),
}

/// Lanes of one publisher, each with the permits for batches that the publisher has seen.
///
/// Concurrent appends to an embedded node have no order, so each batch in flight has its own lane.
struct PublisherLanes {
    first: u32,
    seen: Vec<Arc<Semaphore>>,
}

/// Stream as one subscriber received it.
struct SubscriberOutcome {
    order: StreamOrder,
    latency: LatencyHistogram,
    /// Messages within the measured time: all, and those of the subscriber's own lanes.
    seen: u64,
    own: u64,
}

/// Publishes until the duration has passed, with `in_flight` unseen batches of each publisher, and
/// compares the order that all of them saw.
///
/// # Errors
/// A batch could not be appended, or the stream could not be read.
pub(super) async fn throughput(
    load: &BenchLoad,
    log: &Arc<Embedded>,
    durability: Durability,
) -> Result<ThroughputOutcome> {
    log.create_topic(&load.topic, 1).await.context("create the stream")?;
    let epoch = Instant::now();
    let measured_from = epoch + load.warmup.duration.unwrap_or_default();
    let duration = load.run.duration.unwrap_or_default();
    let stream = Arc::new(EmbeddedStream {
        log: log.clone(),
        load: load.clone(),
        run: write::run_id(load, std::iter::once(0)),
        epoch,
        measured: (measured_from, measured_from + duration),
    });
    let budget = SendBudget::closed_loop(both_phases(load));
    let (end, ended) = watch::channel(None);
    let (mut senders, mut receivers) = (JoinSet::new(), JoinSet::new());
    for publisher in 0..load.clients {
        let first = u32::try_from(publisher * load.in_flight).context("number the lanes")?;
        let seen = (0..load.in_flight).map(|_| Arc::new(Semaphore::new(0))).collect();
        let lanes = PublisherLanes { first, seen };
        for (lane, seen) in (first..).zip(&lanes.seen) {
            senders.spawn(publish(stream.clone(), lane, budget.clone(), seen.clone()));
        }
        receivers.spawn(receive(stream.clone(), lanes, ended.clone()));
    }
    let (mut batches, mut records) = (0, 0);
    while let Some(sent) = senders.join_next().await {
        let sent = sent.context("a publisher has failed")?.context("append a batch")?;
        batches += sent.0;
        records += sent.1;
    }
    let measured = match interrupt::is_requested() {
        true => measured_from.elapsed().min(duration),
        false => duration,
    };
    let reached = log.watermarks(&load.topic, 0).await.context("look up the end")?.high_watermark;
    // Ignored: receivers that failed have reported their errors.
    let _ = end.send(Some(reached));
    let mut received = Vec::with_capacity(load.clients);
    while let Some(subscriber) = receivers.join_next().await {
        let subscriber = subscriber.context("a subscriber has failed")?;
        received.push(subscriber.context("read the stream")?);
    }
    Ok(outcome(&received, (batches, records), reached, measured, durability))
}

/// Publishes on one lane, each batch after the one before was seen. Returns batches and records.
async fn publish(
    stream: Arc<EmbeddedStream>,
    lane: u32,
    budget: Arc<SendBudget>,
    seen: Arc<Semaphore>,
) -> Result<(u64, u64), Error> {
    let EmbeddedStream { log, load, run, epoch, .. } = &*stream;
    let stamper = Stamper::new(load.seed, *run, lane, load.size);
    let (mut batches, mut records) = (0, 0);
    while let Some(slot) = budget.take(load.batch_size).await {
        let sent_ns = u64::try_from(epoch.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let batch = stamped(&stamper, records, slot.records, sent_ns);
        log.append(&load.topic, 0, batch).await?;
        batches += 1;
        records += u64::from(slot.records);
        // A publisher that does not see its messages, or has failed, publishes no more.
        match timeout(DELIVERY_TIMEOUT, seen.acquire()).await {
            Ok(Ok(permit)) => permit.forget(),
            Ok(Err(_)) | Err(_) => break,
        }
    }
    Ok((batches, records))
}

/// Receives up to the end, or until no batch arrives for too long.
async fn receive(
    stream: Arc<EmbeddedStream>,
    lanes: PublisherLanes,
    ended: watch::Receiver<Option<u64>>,
) -> Result<SubscriberOutcome, Error> {
    let received = read_all(&stream, &lanes, ended).await;
    for seen in &lanes.seen {
        seen.close();
    }
    received
}

async fn read_all(
    stream: &EmbeddedStream,
    lanes: &PublisherLanes,
    mut ended: watch::Receiver<Option<u64>>,
) -> Result<SubscriberOutcome, Error> {
    let mut received = SubscriberOutcome {
        order: StreamOrder::from_start(stream.run, 0),
        latency: LatencyHistogram::new(),
        seen: 0,
        own: 0,
    };
    let mut batches = stream.log.subscribe(&stream.load.topic, 0, 0).await?;
    loop {
        let end = *ended.borrow_and_update();
        if end.is_some_and(|end| received.order.next_offset() >= end) {
            return Ok(received);
        }
        let next = tokio::select! {
            next = timeout(DELIVERY_TIMEOUT, batches.next()) => next,
            Ok(()) = ended.changed() => continue,
        };
        // The end of the stream is an error of the node, which it has reported.
        let Ok(Some(batch)) = next else { return Ok(received) };
        received.note(stream, lanes, batch?);
    }
}

impl SubscriberOutcome {
    fn note(&mut self, stream: &EmbeddedStream, lanes: &PublisherLanes, found: EmbeddedBatch) {
        let now = Instant::now();
        let EmbeddedBatch { first_offset, batch, .. } = found;
        let batch = Some(batch);
        let stored = StoredBatch { first_offset, batch, ..StoredBatch::default() };
        let Some((stamp, records)) = self.order.note(&stored) else { return };
        let (from, until) = stream.measured;
        let is_measured = from <= now && now < until;
        self.seen += if is_measured { records } else { 0 };
        let own = stamp.lane.checked_sub(lanes.first).and_then(|lane| usize::try_from(lane).ok());
        if let Some(seen) = own.and_then(|lane| lanes.seen.get(lane)) {
            seen.add_permits(1);
            if is_measured {
                self.own += records;
                let sent = stream.epoch + Duration::from_nanos(stamp.sent_ns);
                self.latency.record(now.saturating_duration_since(sent));
            }
        }
    }
}

/// Combines what the subscribers received. `acked` are batches and records.
fn outcome(
    received: &[SubscriberOutcome],
    acked: (u64, u64),
    reached: u64,
    measured: Duration,
    durability: Durability,
) -> ThroughputOutcome {
    let seconds = measured.as_secs_f64().max(1e-9);
    let (batches, records) = acked;
    let mut outcome = ThroughputOutcome {
        rates: Vec::with_capacity(received.len()),
        seen: LatencyHistogram::new(),
        acks: BTreeMap::from([(durability_name(durability), batches)]),
        findings: OrderFindings::default(),
        is_order_equal: received.windows(2).all(|two| two[0].order.hash() == two[1].order.hash()),
        failures: Failures::default(),
    };
    // Acked messages that are not in the log at all.
    outcome.findings.lost += records.saturating_sub(reached);
    for subscriber in received {
        outcome.rates.push((subscriber.seen as f64 / seconds, subscriber.own as f64 / seconds));
        outcome.seen.merge(&subscriber.latency);
        outcome.findings.add(subscriber.order.findings());
        outcome.findings.lost += reached.saturating_sub(subscriber.order.next_offset());
    }
    outcome
}
