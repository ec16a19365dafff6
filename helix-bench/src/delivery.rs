//! Publishes to topics with subscribers, times each delivery, and finds lost and doubled records.
//!
//! Publishers and subscribers share one process and one clock. A record carries its intended send
//! time, so a late send counts as latency.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;

use anyhow::Context;
use helix_client::{Error, Event, Position, ReadOptions, ReadStart, Records, Subscription};
use helix_proto::log::v1::ResolvedOffset;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Duration, Instant, sleep_until, timeout};

use crate::interrupt;
use crate::load::BenchLoad;
use crate::meter::LoadMeter;
use crate::phase::{self, PhaseResult, RunPhase};
use crate::report::{DELIVERED_TWICE, NOT_DELIVERED};
use crate::stamp::{Stamp, Stamper};
use crate::target::BenchTarget;
use crate::write::{self, BatchSource};

/// Longest time without a record before the outstanding ones count as missing.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(10);

/// Topic of a run, with its publishers and subscribers.
#[derive(Debug)]
pub(crate) struct PublishedTopic {
    pub(crate) load: BenchLoad,
    pub(crate) target: BenchTarget,
}

/// Deliveries of one phase, over all subscribers.
#[derive(Debug)]
pub(crate) struct DeliveryResult {
    /// Latency from the intended send to the delivery. Lost and doubled records are failures.
    pub(crate) meter: LoadMeter,
    /// Acked records that a subscriber of their topic did not receive.
    pub(crate) lost: u64,
    /// Repeated deliveries of a record to a subscriber.
    pub(crate) doubled: u64,
    /// From the start of the phase to the last delivery.
    pub(crate) elapsed: Duration,
}

/// Sequences of the acked records of one lane.
#[derive(Debug)]
pub(crate) struct AckedRecords {
    lane: u32,
    ranges: Vec<Range<u64>>,
}

impl AckedRecords {
    pub(crate) fn new(lane: u32) -> Self {
        Self { lane, ranges: Vec::new() }
    }

    /// Adds the records of a batch. Consecutive batches share a range.
    pub(crate) fn add(&mut self, first_sequence: u64, records: u32) {
        let end = first_sequence + u64::from(records);
        match self.ranges.last_mut() {
            Some(last) if last.end == first_sequence => last.end = end,
            _ => self.ranges.push(first_sequence..end),
        }
    }
}

/// Runs one phase with new subscribers, which start at the current ends, and new publishers.
///
/// The publishers start once all subscribers are at the ends, so that the time in which connections
/// are opened is no latency.
///
/// `load` states the limits and the rate of all publishers together.
///
/// # Errors
/// The ends of a topic cannot be looked up, or a task panicked.
pub(crate) async fn publish(
    topics: &[PublishedTopic],
    load: &BenchLoad,
    epoch: Instant,
    part: RunPhase,
) -> anyhow::Result<(DeliveryResult, PhaseResult)> {
    let mut published = Vec::with_capacity(topics.len());
    let mut subscribers = JoinSet::new();
    let (mut lanes, mut lane_counts) = (Vec::new(), Vec::new());
    // Each subscriber drops its sender once it is at the ends, or has failed.
    let (opening, mut all_opened) = mpsc::channel::<()>(1);
    for PublishedTopic { load, target } in topics {
        let initial_ends = target.ends().await?;
        let run = write::run_id(load, initial_ends.iter().map(|end| end.offset));
        let (sender, receiver) = watch::channel(None);
        published.push(sender);
        for number in 0..load.subscribers {
            // Subscribers get their own connections, as a consumer would, if there are enough.
            let client = target.client(load.clients + number);
            let starts = initial_ends.iter().map(|end| {
                ReadStart::new(&load.topic, end.partition, Position::Offset(end.offset))
            });
            let deliveries = client.consumer().subscribe(starts.collect(), ReadOptions::default());
            let mut subscriber = Subscriber::new(run, epoch, receiver.clone(), PROGRESS_TIMEOUT);
            let ends = initial_ends.iter().map(|end| (end.partition, end.offset));
            subscriber.reached = ends.collect();
            subscriber.opening = Some(opening.clone());
            subscribers.spawn(subscriber.run(deliveries));
        }
        let topic_lanes = write::lanes(load, target, |lane| {
            let lane = u32::try_from(lane).expect("the number of lanes is limited");
            let stamper = Stamper::new(load.seed, run, lane, load.size);
            BatchSource::Timed { stamper, epoch, next_sequence: 0, acked: AckedRecords::new(lane) }
        });
        lane_counts.push(topic_lanes.len());
        lanes.extend(topic_lanes);
    }
    drop(opening);
    tokio::select! {
        // Ignored: a subscriber that is not at the ends by then is measured as it is.
        _ = timeout(PROGRESS_TIMEOUT, all_opened.recv()) => {}
        () = interrupt::requested() => {}
    }
    let (lanes, outcome) = phase::run(lanes, load, part).await?;
    let mut acked = lanes.into_iter().filter_map(write::WriteLane::into_acked);
    for ((PublishedTopic { target, .. }, sender), lanes) in
        topics.iter().zip(&published).zip(lane_counts)
    {
        let ends = target.ends().await?;
        let acked = acked.by_ref().take(lanes).collect();
        // Ignored: a failed subscriber has reported its error.
        let _ = sender.send(Some(Arc::new(PublishedRecords { acked, ends })));
    }
    let mut result =
        DeliveryResult { meter: LoadMeter::new(), lost: 0, doubled: 0, elapsed: Duration::ZERO };
    while let Some(ended) = subscribers.join_next().await {
        let delivered = ended.context("a subscriber has failed")?;
        result.add(&delivered, outcome.started);
    }
    Ok((result, outcome))
}

impl DeliveryResult {
    fn add(&mut self, delivered: &SubscriberResult, started: Instant) {
        let SubscriberResult { meter, lost, doubled, last_at } = delivered;
        self.meter.merge(meter);
        self.lost += lost;
        self.doubled += doubled;
        if let Some(at) = last_at {
            self.elapsed = self.elapsed.max(at.saturating_duration_since(started));
        }
        for (kind, count) in [(NOT_DELIVERED, *lost), (DELIVERED_TWICE, *doubled)] {
            if count > 0 {
                let message = format!(
                    "a subscriber received {} records, {lost} are lost and {doubled} doubled",
                    meter.records
                );
                self.meter.failures.add(kind.to_owned(), count, message);
            }
        }
    }
}

/// Records that were published to a topic in one phase.
#[derive(Debug)]
struct PublishedRecords {
    acked: Vec<AckedRecords>,
    /// Ends of the partitions after the last ack.
    ends: Vec<ResolvedOffset>,
}

/// Records that one subscriber has received.
#[derive(Debug, Default)]
struct DeliveryLedger {
    /// One bit per sequence, by lane.
    lanes: HashMap<u32, Vec<u64>>,
    doubled: u64,
}

impl DeliveryLedger {
    /// Notes a delivery. False if the record was delivered before.
    fn note(&mut self, lane: u32, sequence: u64) -> bool {
        let (word, bit) = position(sequence);
        let seen = self.lanes.entry(lane).or_default();
        if seen.len() <= word {
            seen.resize(word + 1, 0);
        }
        let is_new = seen[word] & bit == 0;
        seen[word] |= bit;
        self.doubled += u64::from(!is_new);
        is_new
    }

    fn lost(&self, acked: &[AckedRecords]) -> u64 {
        let lost = |lane: &AckedRecords| {
            let seen = self.lanes.get(&lane.lane).map_or(&[][..], Vec::as_slice);
            let is_lost = |sequence: &u64| {
                let (word, bit) = position(*sequence);
                seen.get(word).is_none_or(|seen| seen & bit == 0)
            };
            lane.ranges.iter().cloned().flatten().filter(is_lost).count() as u64
        };
        acked.iter().map(lost).sum()
    }
}

fn position(sequence: u64) -> (usize, u64) {
    (usize::try_from(sequence / 64).expect("fits memory"), 1 << (sequence % 64))
}

/// Source of a subscriber's records.
trait Deliveries: Send {
    fn next(&mut self) -> impl Future<Output = Option<Result<Event<Records>, Error>>> + Send;
}

impl Deliveries for Subscription {
    async fn next(&mut self) -> Option<Result<Event<Records>, Error>> {
        Self::next(self).await
    }
}

struct Subscriber {
    run: u64,
    epoch: Instant,
    /// Published records, once they are known.
    published: watch::Receiver<Option<Arc<PublishedRecords>>>,
    progress_timeout: Duration,
    ledger: DeliveryLedger,
    /// Next offset by partition.
    reached: BTreeMap<u32, u64>,
    /// Held until all partitions have been read to their ends.
    opening: Option<mpsc::Sender<()>>,
    /// Partitions that have been read to their ends.
    caught_up: BTreeSet<u32>,
    meter: LoadMeter,
    last_at: Option<Instant>,
}

struct SubscriberResult {
    meter: LoadMeter,
    lost: u64,
    doubled: u64,
    last_at: Option<Instant>,
}

impl Subscriber {
    fn new(
        run: u64,
        epoch: Instant,
        published: watch::Receiver<Option<Arc<PublishedRecords>>>,
        progress_timeout: Duration,
    ) -> Self {
        Self {
            run,
            epoch,
            published,
            progress_timeout,
            ledger: DeliveryLedger::default(),
            reached: BTreeMap::new(),
            opening: None,
            caught_up: BTreeSet::new(),
            meter: LoadMeter::new(),
            last_at: None,
        }
    }

    /// Receives until all records arrived, or none of this run's records arrived for too long.
    async fn run(mut self, deliveries: impl Deliveries) -> SubscriberResult {
        let result = self.receive_all(deliveries).await;
        self.opening = None;
        if let Err(error) = result {
            self.meter.fail(&error);
        }
        // An error may come before all is published; what is lost is known only afterwards.
        let published = match self.published.wait_for(Option::is_some).await {
            Ok(published) => published.clone(),
            Err(_) => None,
        };
        let lost = published.map_or(0, |published| self.ledger.lost(&published.acked));
        let doubled = self.ledger.doubled;
        SubscriberResult { meter: self.meter, lost, doubled, last_at: self.last_at }
    }

    /// Heartbeats and records of other writers do not extend the wait.
    async fn receive_all(&mut self, mut deliveries: impl Deliveries) -> Result<(), Error> {
        let mut last_progress_at = Instant::now();
        loop {
            let published = self.published.borrow_and_update().clone();
            if published.as_ref().is_some_and(|published| self.is_complete(published)) {
                return Ok(());
            }
            let event = tokio::select! {
                event = deliveries.next() => event,
                Ok(()) = self.published.changed() => {
                    // The publishers may have been slow until now, so the wait starts here.
                    last_progress_at = Instant::now();
                    continue;
                }
                () = sleep_until(last_progress_at + self.progress_timeout),
                    if published.is_some() =>
                {
                    return Ok(());
                }
            };
            match event {
                Some(Ok(Event::Data(records))) => {
                    let now = Instant::now();
                    if self.receive(&records, now) {
                        last_progress_at = now;
                    }
                }
                Some(Ok(Event::CaughtUp { partition, .. })) => {
                    self.caught_up.insert(partition);
                    if self.caught_up.len() >= self.reached.len() {
                        self.opening = None;
                    }
                }
                Some(Ok(Event::Heartbeat(_) | Event::Restarted { .. })) => {}
                Some(Err(error)) => return Err(error),
                None => return Ok(()),
            }
        }
    }

    /// Acks that are weaker than a commit may precede the ends, so both are compared.
    fn is_complete(&self, published: &PublishedRecords) -> bool {
        let is_reached = |end: &ResolvedOffset| {
            let reached = self.reached.get(&end.partition);
            reached.is_some_and(|reached| *reached >= end.offset)
        };
        published.ends.iter().all(is_reached) && self.ledger.lost(&published.acked) == 0
    }

    /// True if there were records of this run.
    fn receive(&mut self, records: &Records, now: Instant) -> bool {
        let mut has_any = false;
        for record in &records.records {
            let value = record.value.as_deref().unwrap_or(&[]);
            let Some(stamp) = Stamp::read(value).filter(|stamp| stamp.run == self.run) else {
                continue;
            };
            has_any = true;
            if self.ledger.note(stamp.lane, stamp.sequence) {
                let sent = self.epoch + Duration::from_nanos(stamp.sent_ns);
                let latency = now.saturating_duration_since(sent);
                self.meter.succeed(latency, 1, value.len() as u64);
            }
        }
        if has_any {
            self.last_at = Some(now);
        }
        self.reached.insert(records.partition, records.next_offset);
        has_any
    }
}

#[cfg(test)]
mod tests;
