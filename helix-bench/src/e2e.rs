//! From publish to delivery: every record carries its intended send time, and each subscriber
//! notes how old it is on arrival. Publishers and subscribers are one process with one clock.

use anyhow::{Context, Result};
use helix_client::{Client, Event, Position, ReadOptions, Start};
use helix_proto::log::v1::ResolvedOffset;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Duration, Instant, timeout};

use crate::load::Load;
use crate::meter::Meter;
use crate::phase::{self, Outcome, Part};
use crate::report::Report;
use crate::stamp::{Stamp, Stamper};
use crate::target::Target;
use crate::write::{self, Source};

/// Longest silence before what is missing is called missing.
const PATIENCE: Duration = Duration::from_secs(10);

/// Runs an end-to-end load.
///
/// # Errors
/// Why it could not begin.
pub(crate) async fn run(load: &Load) -> Result<Report> {
    let target = Target::connect(load).await?;
    let epoch = Instant::now();
    let (_, warmup) = publish(load, &target, epoch, Part::Warmup).await?;
    let before = target.observe().await;
    let (delivered, mut outcome) = publish(load, &target, epoch, Part::Measured).await?;
    let after = target.observe().await;
    outcome
        .meter
        .parts
        .insert("ack", std::mem::replace(&mut outcome.meter.latency, delivered.latency));
    let expected = outcome.meter.records * load.subscribers as u64;
    outcome.meter.failures.merge(&delivered.failures);
    if delivered.records < expected {
        let message = format!("{} of {expected} records were delivered", delivered.records);
        outcome.meter.fail_as("NOT_DELIVERED".to_owned(), message);
    }
    let mut report = Report::new(load, &target, &before, &after, &warmup, &outcome);
    report.notes.push(format!(
        "latency is from the intended send to the delivery at each of {} subscribers; throughput \
         is what was published and acked",
        load.subscribers
    ));
    if delivered.records > expected {
        report.notes.push(format!(
            "{} deliveries of records whose acks did not come, or came twice",
            delivered.records - expected
        ));
    }
    Ok(report)
}

/// One part: new subscribers, from the present ends on, and new publishers. Gives what was
/// delivered and what was published.
async fn publish(
    load: &Load,
    target: &Target,
    epoch: Instant,
    part: Part,
) -> Result<(Meter, Outcome)> {
    let marks = target.ends().await?;
    let run = write::run_id(load, marks.iter().map(|mark| mark.offset));
    let (published, expected) = watch::channel(None);
    let mut subscribers = JoinSet::new();
    for number in 0..load.subscribers {
        // Connections of their own where there are enough, as a consumer would have.
        let client = target.client(load.clients + number).clone();
        let subscriber = Subscriber { run, epoch, expected: expected.clone() };
        subscribers.spawn(subscriber.run(client, load.topic.clone(), marks.clone()));
    }
    let lanes = write::lanes(load, target, |lane| {
        let lane = u32::try_from(lane).expect("fewer lanes than that");
        let stamper = Stamper::new(load.seed, run, lane, load.size);
        Source::Timed { stamper, epoch, next_sequence: 0 }
    });
    let (_, outcome) = phase::run(lanes, load, part).await?;
    // Ignored: a subscriber that failed has said why.
    let _ = published.send(Some(outcome.meter.records));
    let mut delivered = Meter::new();
    while let Some(ended) = subscribers.join_next().await {
        delivered.merge(&ended.context("a subscriber has failed")?);
    }
    Ok((delivered, outcome))
}

struct Subscriber {
    run: u64,
    epoch: Instant,
    /// Records that were published, once that is known.
    expected: watch::Receiver<Option<u64>>,
}

impl Subscriber {
    /// Receives until everything is there, or nothing has come for too long.
    async fn run(mut self, client: Client, topic: String, marks: Vec<ResolvedOffset>) -> Meter {
        let mut meter = Meter::new();
        let starts = marks
            .iter()
            .map(|mark| Start::new(&topic, mark.partition, Position::Offset(mark.offset)));
        let mut subscription =
            client.consumer().subscribe(starts.collect(), ReadOptions::default());
        loop {
            let expected = *self.expected.borrow_and_update();
            if expected.is_some_and(|expected| meter.records >= expected) {
                return meter;
            }
            let event = tokio::select! {
                event = timeout(PATIENCE, subscription.next()) => event,
                Ok(()) = self.expected.changed() => continue,
            };
            match event {
                Ok(Some(Ok(Event::Data(records)))) => {
                    let now = Instant::now();
                    for record in &records.records {
                        self.receive(record.value.as_deref().unwrap_or(&[]), now, &mut meter);
                    }
                }
                Ok(Some(Ok(Event::CaughtUp { .. } | Event::Heartbeat(_)))) => {}
                Ok(Some(Err(error))) => {
                    meter.fail(&error);
                    return meter;
                }
                Ok(None) => return meter,
                // Before the end is known the publishers may simply be slow.
                Err(_) if expected.is_none() => {}
                Err(_) => return meter,
            }
        }
    }

    fn receive(&self, value: &[u8], now: Instant, meter: &mut Meter) {
        let Some(stamp) = Stamp::read(value).filter(|stamp| stamp.run == self.run) else { return };
        let sent = self.epoch + Duration::from_nanos(stamp.sent_ns);
        meter.succeed(now.saturating_duration_since(sent), 1, value.len() as u64);
    }
}
