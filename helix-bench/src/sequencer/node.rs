//! Nodes of the sequencer: each publishes to the stream and waits until it sees its own messages.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use anyhow::{Context, Result};
use helix_client::{
    AckFuture, Batches, Client, Error, Event, Position, ReadOptions, ReadStart, Session,
    SessionOptions, Subscription,
};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Duration, Instant, sleep_until, timeout};

use super::order::{OrderFindings, StreamOrder};
use crate::budget::{PhaseLimits, SendBudget};
use crate::interrupt;
use crate::load::BenchLoad;
use crate::meter::{Failures, LatencyHistogram, LoadMeter};
use crate::progress::{self, LiveLine};
use crate::stamp::Stamper;
use crate::target::BenchTarget;
use crate::write::{self, stamped};

/// Longest wait for a message that was acked.
pub(super) const DELIVERY_TIMEOUT: Duration = Duration::from_secs(10);

/// Stream of one run: a partition from its end at the start of the run.
#[derive(Debug, Clone)]
pub(super) struct EventStream {
    pub(super) topic: String,
    pub(super) run: u64,
    pub(super) start: u64,
    pub(super) epoch: Instant,
    seed: u64,
    size: usize,
}

impl EventStream {
    /// # Errors
    /// The end of the partition cannot be looked up.
    pub(super) async fn at_end(load: &BenchLoad, target: &BenchTarget) -> Result<Self> {
        let ends = target.ends().await?;
        let run = write::run_id(load, ends.iter().map(|end| end.offset));
        let start = ends.first().map_or(0, |end| end.offset);
        let BenchLoad { topic, seed, size, .. } = load.clone();
        Ok(Self { topic, run, start, epoch: Instant::now(), seed, size })
    }

    pub(super) fn subscribe(&self, client: &Client, from: u64) -> Subscription {
        let start = ReadStart::new(&self.topic, 0, Position::Offset(from));
        client.consumer().subscribe(vec![start], ReadOptions::default())
    }

    async fn session(&self, load: &BenchLoad, client: &Client) -> Result<Session, Error> {
        let options = SessionOptions {
            durability: load.durability(),
            in_flight_batches: load.in_flight,
            ..SessionOptions::default()
        };
        client.session(&self.topic, 0, options).await
    }

    fn stamper(&self, lane: u32) -> Stamper {
        Stamper::new(self.seed, self.run, lane, self.size)
    }
}

/// Result of one message in flight at a time.
#[derive(Debug)]
pub(super) struct LatencyOutcome {
    /// From the send of a message until its node sees it in the stream.
    pub(super) seen: LatencyHistogram,
    /// The acks of the same messages.
    pub(super) meter: LoadMeter,
    pub(super) findings: OrderFindings,
}

/// Publishes one message at a time, each after the node has seen the one before.
///
/// # Errors
/// The session could not be opened.
pub(super) async fn latency(load: &BenchLoad, target: &BenchTarget) -> Result<LatencyOutcome> {
    let stream = EventStream::at_end(load, target).await?;
    let client = target.client(0);
    let session = stream.session(load, client).await.context("open a session")?;
    let mut events = stream.subscribe(client, stream.start);
    let mut order = StreamOrder::from_start(stream.run, stream.start);
    let stamper = stream.stamper(0);
    let mut outcome = LatencyOutcome {
        seen: LatencyHistogram::new(),
        meter: LoadMeter::new(),
        findings: OrderFindings::default(),
    };
    let measured_from = Instant::now() + load.warmup.duration.unwrap_or_default();
    let budget = SendBudget::closed_loop(both_phases(load));
    let shown = budget.clone();
    let _line = LiveLine::show(move |elapsed| {
        progress::records_text(
            "one in flight",
            shown.records_dealt(),
            elapsed,
            PhaseLimits { records: None, duration: None },
        )
    });
    let mut sequence = 0;
    while budget.take(1).await.is_some() {
        let batch = stamped(&stamper, sequence, 1, 0);
        let bytes = batch.payload.len() as u64;
        let sent = Instant::now();
        let published = async {
            let ack = session.append(batch).await?.await?;
            Ok::<_, Error>((ack, Instant::now()))
        };
        let seen = timeout(DELIVERY_TIMEOUT, see(&mut events, &mut order, sequence));
        let (published, seen) = tokio::join!(published, seen);
        match published {
            Ok((ack, acked)) if sent >= measured_from => {
                outcome.meter.succeed(acked - sent, 1, bytes);
                outcome.meter.ack(ack.durability, ack.duplicate);
            }
            Ok(_) => {}
            Err(error) => {
                outcome.meter.fail(&error);
                break;
            }
        }
        match seen {
            Ok(Ok(seen)) if sent >= measured_from => outcome.seen.record(seen - sent),
            Ok(Ok(_)) => {}
            Ok(Err(error)) => {
                outcome.meter.fail(&error);
                break;
            }
            Err(_) => {
                outcome.findings.lost += 1;
                break;
            }
        }
        sequence += 1;
    }
    outcome.findings.add(order.findings());
    Ok(outcome)
}

/// Waits until the node sees a message of its own.
async fn see(
    events: &mut Subscription,
    order: &mut StreamOrder,
    sequence: u64,
) -> Result<Instant, Error> {
    loop {
        let Some(batches) = next_batches(events).await? else {
            // The timeout reports that the message was not seen.
            std::future::pending::<()>().await;
            continue;
        };
        let now = Instant::now();
        let mut is_seen = false;
        for stored in &batches.batches {
            let noted = order.note(stored);
            is_seen |= noted.is_some_and(|(stamp, records)| stamp.sequence + records > sequence);
        }
        if is_seen {
            return Ok(now);
        }
    }
}

/// Returns the next batches, or `None` after the end of the subscription.
async fn next_batches(events: &mut Subscription) -> Result<Option<Batches>, Error> {
    loop {
        match events.next_encoded().await.transpose()? {
            None => return Ok(None),
            Some(Event::Data(batches)) => return Ok(Some(batches)),
            Some(Event::CaughtUp { .. } | Event::Heartbeat(_) | Event::Restarted { .. }) => {}
        }
    }
}

pub(super) fn both_phases(load: &BenchLoad) -> PhaseLimits {
    let duration = load.run.duration.zip(load.warmup.duration).map(|(run, early)| run + early);
    PhaseLimits { records: load.run.records, duration }
}

/// Result of nodes that publish as fast as they see their own messages, or at a rate.
#[derive(Debug)]
pub(super) struct ThroughputOutcome {
    /// Messages per second that each node saw of the stream, and of its own.
    pub(super) rates: Vec<(f64, f64)>,
    /// From the intended send of a batch until its node sees it.
    pub(super) seen: LatencyHistogram,
    pub(super) acks: BTreeMap<&'static str, u64>,
    pub(super) findings: OrderFindings,
    pub(super) is_order_equal: bool,
    pub(super) failures: Failures,
}

/// Runs all nodes until the duration has passed, and compares the order that they saw.
///
/// # Errors
/// The ends cannot be looked up, or a task panicked.
pub(super) async fn throughput(
    load: &BenchLoad,
    target: &BenchTarget,
) -> Result<ThroughputOutcome> {
    let stream = EventStream::at_end(load, target).await?;
    let measured_from = Instant::now() + load.warmup.duration.unwrap_or_default();
    let duration = load.run.duration.unwrap_or_default();
    let (budget, _pacer) = match load.rate {
        None => (SendBudget::closed_loop(both_phases(load)), None),
        Some(rate) => {
            let (budget, pacer) = SendBudget::open_loop(both_phases(load), rate, load.batch_size);
            (budget, Some(pacer))
        }
    };
    let shown = budget.clone();
    let line = LiveLine::show(move |elapsed| {
        let limits = PhaseLimits { records: None, duration: None };
        progress::records_text("publishing", shown.records_dealt(), elapsed, limits)
    });
    let (end, ended) = watch::channel(None);
    let (mut senders, mut receivers) = (JoinSet::new(), JoinSet::new());
    for lane in 0..load.clients {
        let client = target.client(lane).clone();
        let lane = u32::try_from(lane).expect("the number of nodes is limited");
        let window = Arc::new(Semaphore::new(load.in_flight));
        let receiver = StreamReceiver {
            order: StreamOrder::from_start(stream.run, stream.start),
            epoch: stream.epoch,
            end: ended.clone(),
            own: Some((lane, window.clone())),
            measured: Some((measured_from, measured_from + duration)),
            progress: None,
        };
        receivers.spawn(receiver.run(stream.subscribe(&client, stream.start)));
        let sender = StreamSender::new(&stream, load, client, lane, budget.clone(), window);
        senders.spawn(sender.run());
    }
    let (mut meter, mut received) = (LoadMeter::new(), Vec::new());
    while let Some(sent) = senders.join_next().await {
        meter.merge(&sent.context("a publisher has failed")?);
    }
    drop(line);
    let measured = match interrupt::is_requested() {
        true => measured_from.elapsed().min(duration),
        false => duration,
    };
    let reached = target.ends().await?.first().map_or(0, |end| end.offset);
    // Ignored: receivers that failed have reported their errors.
    let _ = end.send(Some(reached));
    while let Some(ended) = receivers.join_next().await {
        received.push(ended.context("a subscriber has failed")?);
    }
    let seconds = measured.as_secs_f64().max(1e-9);
    let mut outcome = ThroughputOutcome {
        rates: Vec::new(),
        seen: LatencyHistogram::new(),
        acks: meter.acks.clone(),
        findings: OrderFindings::default(),
        is_order_equal: received.windows(2).all(|two| two[0].order.hash() == two[1].order.hash()),
        failures: meter.failures.clone(),
    };
    // Acked messages that are not in the log at all.
    outcome.findings.lost += meter.records.saturating_sub(reached - stream.start);
    for node in received {
        outcome.rates.push((node.seen as f64 / seconds, node.own as f64 / seconds));
        outcome.seen.merge(&node.latency);
        outcome.findings.add(node.findings(reached));
        outcome.failures.merge(&node.failures);
    }
    Ok(outcome)
}

/// Publishes batches of one node, a bounded number of them before the node sees them.
#[derive(Debug)]
pub(super) struct StreamSender {
    stream: EventStream,
    load: BenchLoad,
    client: Client,
    stamper: Stamper,
    budget: Arc<SendBudget>,
    window: Arc<Semaphore>,
    acks: VecDeque<(AckFuture, Instant, u32)>,
    meter: LoadMeter,
}

impl StreamSender {
    pub(super) fn new(
        stream: &EventStream,
        load: &BenchLoad,
        client: Client,
        lane: u32,
        budget: Arc<SendBudget>,
        window: Arc<Semaphore>,
    ) -> Self {
        let (stamper, meter) = (stream.stamper(lane), LoadMeter::new());
        let (stream, load, acks) = (stream.clone(), load.clone(), VecDeque::new());
        Self { stream, load, client, stamper, budget, window, acks, meter }
    }

    /// Publishes until the budget is used up, and waits for all acks.
    pub(super) async fn run(mut self) -> LoadMeter {
        if let Err(error) = self.publish().await {
            self.meter.fail(&error);
        }
        self.meter
    }

    async fn publish(&mut self) -> Result<(), Error> {
        let session = self.stream.session(&self.load, &self.client).await?;
        let mut sequence = 0;
        while let Some(slot) = self.budget.take(self.load.batch_size).await {
            // A node that does not see its messages, or has failed, publishes no more.
            match timeout(DELIVERY_TIMEOUT, self.window.acquire()).await {
                Ok(Ok(permit)) => permit.forget(),
                Ok(Err(_)) | Err(_) => break,
            }
            let since = slot.intended.unwrap_or_else(Instant::now);
            let sent_ns = (since - self.stream.epoch).as_nanos();
            let sent_ns = u64::try_from(sent_ns).unwrap_or(u64::MAX);
            let batch = stamped(&self.stamper, sequence, slot.records, sent_ns);
            sequence += u64::from(slot.records);
            let ack = session.append(batch).await?;
            self.acks.push_back((ack, since, slot.records));
            if self.acks.len() > self.load.in_flight {
                self.oldest_ack().await?;
            }
        }
        while !self.acks.is_empty() {
            self.oldest_ack().await?;
        }
        session.close().await
    }

    async fn oldest_ack(&mut self) -> Result<(), Error> {
        let Some((ack, since, records)) = self.acks.pop_front() else { return Ok(()) };
        let ack = ack.await?;
        self.meter.succeed(since.elapsed(), u64::from(records), 0);
        self.meter.ack(ack.durability, ack.duplicate);
        Ok(())
    }
}

/// Receives the stream as one subscriber.
#[derive(Debug)]
pub(super) struct StreamReceiver {
    pub(super) order: StreamOrder,
    pub(super) epoch: Instant,
    /// End of the stream, once it is known.
    pub(super) end: watch::Receiver<Option<u64>>,
    /// Lane of this node, and the permits that it gets back by seeing its own batches.
    pub(super) own: Option<(u32, Arc<Semaphore>)>,
    pub(super) measured: Option<(Instant, Instant)>,
    /// Next offset, for those that wait for it.
    pub(super) progress: Option<watch::Sender<u64>>,
}

/// Stream as one subscriber received it.
#[derive(Debug)]
pub(super) struct ReceivedStream {
    pub(super) order: StreamOrder,
    pub(super) failures: Failures,
    latency: LatencyHistogram,
    /// Messages within the measured time.
    seen: u64,
    own: u64,
}

impl ReceivedStream {
    /// Returns the violations; all up to `end` that was not received is lost.
    pub(super) fn findings(&self, end: u64) -> OrderFindings {
        let mut findings = self.order.findings();
        findings.lost += end.saturating_sub(self.order.next_offset());
        findings
    }
}

impl StreamReceiver {
    /// Receives up to the end, or until no batch arrives for too long.
    pub(super) async fn run(mut self, mut events: Subscription) -> ReceivedStream {
        let mut received = ReceivedStream {
            order: self.order.clone(),
            failures: Failures::default(),
            latency: LatencyHistogram::new(),
            seen: 0,
            own: 0,
        };
        if let Err(error) = self.receive(&mut events, &mut received).await {
            let mut meter = LoadMeter::new();
            meter.fail(&error);
            received.failures.merge(&meter.failures);
        }
        if let Some((_, window)) = &self.own {
            window.close();
        }
        received.order = self.order;
        received
    }

    async fn receive(
        &mut self,
        events: &mut Subscription,
        received: &mut ReceivedStream,
    ) -> Result<(), Error> {
        let mut last_progress_at = Instant::now();
        loop {
            let end = *self.end.borrow_and_update();
            if end.is_some_and(|end| self.order.next_offset() >= end) {
                return Ok(());
            }
            let batches = tokio::select! {
                batches = next_batches(events) => batches?,
                Ok(()) = self.end.changed() => {
                    last_progress_at = Instant::now();
                    continue;
                }
                () = sleep_until(last_progress_at + DELIVERY_TIMEOUT), if end.is_some() => {
                    return Ok(());
                }
            };
            let Some(batches) = batches else { return Ok(()) };
            last_progress_at = Instant::now();
            self.note(&batches, last_progress_at, received);
        }
    }

    fn note(&mut self, batches: &Batches, now: Instant, received: &mut ReceivedStream) {
        let is_measured = self.measured.is_some_and(|(from, until)| from <= now && now < until);
        for stored in &batches.batches {
            let Some((stamp, records)) = self.order.note(stored) else { continue };
            received.seen += if is_measured { records } else { 0 };
            if let Some((lane, window)) = &self.own
                && *lane == stamp.lane
            {
                window.add_permits(1);
                if is_measured {
                    received.own += records;
                    let sent = self.epoch + Duration::from_nanos(stamp.sent_ns);
                    received.latency.record(now.saturating_duration_since(sent));
                }
            }
        }
        if let Some(progress) = &self.progress {
            progress.send_replace(self.order.next_offset());
        }
    }
}
