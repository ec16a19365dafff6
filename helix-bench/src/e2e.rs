//! End-to-end latency: each record carries its scheduled send time, and subscribers measure its age
//! on arrival.
//!
//! Publishers and subscribers share one process and one clock.

use std::future::Future;

use anyhow::Context;
use helix_client::{Error, Event, Position, ReadOptions, ReadStart, Records, Subscription};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Duration, Instant, sleep_until};

use crate::load::BenchLoad;
use crate::meter::LoadMeter;
use crate::phase::{self, PhaseResult, RunPhase};
use crate::report::{BenchReport, NOT_DELIVERED};
use crate::stamp::{Stamp, Stamper};
use crate::target::BenchTarget;
use crate::write::{self, BatchSource};

/// Longest time without a record before the outstanding ones count as missing.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs an end-to-end load.
///
/// # Errors
/// The run could not start.
pub(crate) async fn run(load: &BenchLoad) -> anyhow::Result<BenchReport> {
    let target = BenchTarget::connect(load).await?;
    let epoch = Instant::now();
    let (delivered, mut warmup) = publish(load, &target, epoch, RunPhase::Warmup).await?;
    warmup.meter.failures.merge(&delivered.failures);
    let before = target.observe().await;
    let (delivered, mut outcome) = publish(load, &target, epoch, RunPhase::Measured).await?;
    let after = target.observe().await;
    outcome
        .meter
        .parts
        .insert("ack", std::mem::replace(&mut outcome.meter.latency, delivered.latency));
    let expected = outcome.meter.records * load.subscribers as u64;
    outcome.meter.failures.merge(&delivered.failures);
    let mut report = BenchReport::new(load, &target, &before, &after, &warmup, &outcome);
    report.notes.push(format!(
        "latency is from the intended send to the delivery at each of {} subscribers; throughput \
         is what was published and acked",
        load.subscribers
    ));
    if delivered.records > expected {
        report.notes.push(format!(
            "{} deliveries of records without an ack, or duplicate deliveries",
            delivered.records - expected
        ));
    }
    Ok(report)
}

/// Runs one phase with new subscribers, which start at the current ends, and new publishers.
///
/// Returns what was delivered and what was published.
async fn publish(
    load: &BenchLoad,
    target: &BenchTarget,
    epoch: Instant,
    part: RunPhase,
) -> anyhow::Result<(LoadMeter, PhaseResult)> {
    let initial_ends = target.ends().await?;
    let run = write::run_id(load, initial_ends.iter().map(|end| end.offset));
    let (published, expected) = watch::channel(None);
    let mut subscribers = JoinSet::new();
    for number in 0..load.subscribers {
        // Subscribers get their own connections, as a consumer would, if there are enough.
        let client = target.client(load.clients + number);
        let starts = initial_ends
            .iter()
            .map(|end| ReadStart::new(&load.topic, end.partition, Position::Offset(end.offset)));
        let deliveries = client.consumer().subscribe(starts.collect(), ReadOptions::default());
        let expected = expected.clone();
        let subscriber = Subscriber { run, epoch, expected, progress_timeout: PROGRESS_TIMEOUT };
        subscribers.spawn(subscriber.run(deliveries));
    }
    let lanes = write::lanes(load, target, |lane| {
        let lane = u32::try_from(lane).expect("the number of lanes is limited");
        let stamper = Stamper::new(load.seed, run, lane, load.size);
        BatchSource::Timed { stamper, epoch, next_sequence: 0 }
    });
    let (_, outcome) = phase::run(lanes, load, part).await?;
    // Ignored: a failed subscriber has reported its error.
    let _ = published.send(Some(outcome.meter.records));
    let mut delivered = LoadMeter::new();
    while let Some(ended) = subscribers.join_next().await {
        let mut meter = ended.context("a subscriber has failed")?;
        note_undelivered(&mut meter, outcome.meter.records);
        delivered.merge(&meter);
    }
    Ok((delivered, outcome))
}

/// Counts each acked record that one subscriber did not receive as an error.
fn note_undelivered(meter: &mut LoadMeter, published: u64) {
    let missing = published.saturating_sub(meter.records);
    if missing > 0 {
        let message = format!("{} of {published} acked records were delivered", meter.records);
        meter.failures.add(NOT_DELIVERED.to_owned(), missing, message);
    }
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
    /// Number of published records, once it is known.
    expected: watch::Receiver<Option<u64>>,
    progress_timeout: Duration,
}

impl Subscriber {
    /// Receives until all records arrived, or none of this run's records arrived for too long.
    ///
    /// Heartbeats and records of other writers do not extend the wait.
    async fn run(mut self, mut deliveries: impl Deliveries) -> LoadMeter {
        let mut meter = LoadMeter::new();
        let mut last_progress_at = Instant::now();
        loop {
            let expected = *self.expected.borrow_and_update();
            if expected.is_some_and(|expected| meter.records >= expected) {
                return meter;
            }
            let event = tokio::select! {
                event = deliveries.next() => event,
                Ok(()) = self.expected.changed() => {
                    // The publishers may have been slow until now, so the wait starts here.
                    last_progress_at = Instant::now();
                    continue;
                }
                () = sleep_until(last_progress_at + self.progress_timeout),
                    if expected.is_some() =>
                {
                    return meter;
                }
            };
            match event {
                Some(Ok(Event::Data(records))) => {
                    let (now, before) = (Instant::now(), meter.records);
                    for record in &records.records {
                        self.receive(record.value.as_deref().unwrap_or(&[]), now, &mut meter);
                    }
                    if meter.records > before {
                        last_progress_at = now;
                    }
                }
                Some(Ok(
                    Event::CaughtUp { .. } | Event::Heartbeat(_) | Event::Restarted { .. },
                )) => {}
                Some(Err(error)) => {
                    meter.fail(&error);
                    return meter;
                }
                None => return meter,
            }
        }
    }

    fn receive(&self, value: &[u8], now: Instant, meter: &mut LoadMeter) {
        let Some(stamp) = Stamp::read(value).filter(|stamp| stamp.run == self.run) else { return };
        let sent = self.epoch + Duration::from_nanos(stamp.sent_ns);
        meter.succeed(now.saturating_duration_since(sent), 1, value.len() as u64);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::time::SystemTime;

    use helix_client::ConsumedRecord;
    use helix_proto::log::v1::Watermarks;
    use tokio::time::{sleep, timeout};

    use super::*;
    use crate::stamp::STAMP_BYTES;

    const RUN: u64 = 7;

    /// Delivers one record of each run, then heartbeats without end.
    struct RecordsThenHeartbeats(VecDeque<u64>);

    impl Deliveries for RecordsThenHeartbeats {
        async fn next(&mut self) -> Option<Result<Event<Records>, Error>> {
            sleep(Duration::from_millis(1)).await;
            let Some(run) = self.0.pop_front() else {
                return Some(Ok(Event::Heartbeat(Vec::new())));
            };
            let record = ConsumedRecord {
                offset: 0,
                append_time: SystemTime::UNIX_EPOCH,
                key: None,
                value: Some(Stamper::new(1, run, 0, STAMP_BYTES).value(0, 0)),
                headers: Vec::new(),
                event_time: None,
            };
            Some(Ok(Event::Data(Records {
                topic: String::new(),
                partition: 0,
                records: vec![record],
                next_offset: 1,
                watermarks: Watermarks::default(),
                topic_id: 0,
            })))
        }
    }

    #[tokio::test]
    async fn heartbeats_do_not_hide_a_lost_record() {
        let (published, expected) = watch::channel(None);
        let progress_timeout = Duration::from_millis(50);
        let subscriber = Subscriber { run: RUN, epoch: Instant::now(), expected, progress_timeout };
        published.send_replace(Some(3));
        // The record of another run in between is ignored.
        let run = subscriber.run(RecordsThenHeartbeats([RUN, RUN + 1, RUN].into()));
        let mut meter = timeout(Duration::from_secs(30), run).await.unwrap();
        assert_eq!(meter.records, 2);
        note_undelivered(&mut meter, 3);
        assert_eq!(meter.failures.by_kind[NOT_DELIVERED], 1);
        note_undelivered(&mut meter, 1000);
        assert_eq!(meter.failures.count, 1 + 998);
    }

    #[tokio::test]
    async fn waits_for_slow_publishers() {
        let (published, expected) = watch::channel(None);
        let progress_timeout = Duration::from_millis(20);
        let subscriber = Subscriber { run: RUN, epoch: Instant::now(), expected, progress_timeout };
        let run = tokio::spawn(subscriber.run(RecordsThenHeartbeats([RUN; 100].into())));
        // Several times the timeout, but the number of published records is not known yet.
        sleep(Duration::from_millis(100)).await;
        published.send_replace(Some(100));
        let meter = timeout(Duration::from_secs(30), run).await.unwrap().unwrap();
        assert_eq!(meter.records, 100);
    }
}
