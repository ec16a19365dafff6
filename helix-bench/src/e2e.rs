//! From publish to delivery: every record carries its intended send time, and each subscriber
//! notes how old it is on arrival. Publishers and subscribers are one process with one clock.

use std::future::Future;

use anyhow::Context;
use helix_client::{Error, Event, Position, ReadOptions, Records, Start, Subscription};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Duration, Instant, sleep_until};

use crate::load::Load;
use crate::meter::Meter;
use crate::phase::{self, Outcome, Part};
use crate::report::{NOT_DELIVERED, Report};
use crate::stamp::{Stamp, Stamper};
use crate::target::Target;
use crate::write::{self, Source};

/// Longest time without a record before what is missing is called missing.
const PATIENCE: Duration = Duration::from_secs(10);

/// Runs an end-to-end load.
///
/// # Errors
/// Why it could not begin.
pub(crate) async fn run(load: &Load) -> anyhow::Result<Report> {
    let target = Target::connect(load).await?;
    let epoch = Instant::now();
    let (delivered, mut warmup) = publish(load, &target, epoch, Part::Warmup).await?;
    warmup.meter.failures.merge(&delivered.failures);
    let before = target.observe().await;
    let (delivered, mut outcome) = publish(load, &target, epoch, Part::Measured).await?;
    let after = target.observe().await;
    outcome
        .meter
        .parts
        .insert("ack", std::mem::replace(&mut outcome.meter.latency, delivered.latency));
    let expected = outcome.meter.records * load.subscribers as u64;
    outcome.meter.failures.merge(&delivered.failures);
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
) -> anyhow::Result<(Meter, Outcome)> {
    let marks = target.ends().await?;
    let run = write::run_id(load, marks.iter().map(|mark| mark.offset));
    let (published, expected) = watch::channel(None);
    let mut subscribers = JoinSet::new();
    for number in 0..load.subscribers {
        // Connections of their own where there are enough, as a consumer would have.
        let client = target.client(load.clients + number);
        let starts = marks
            .iter()
            .map(|mark| Start::new(&load.topic, mark.partition, Position::Offset(mark.offset)));
        let deliveries = client.consumer().subscribe(starts.collect(), ReadOptions::default());
        let expected = expected.clone();
        let subscriber = Subscriber { run, epoch, expected, patience: PATIENCE };
        subscribers.spawn(subscriber.run(deliveries));
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
        let mut meter = ended.context("a subscriber has failed")?;
        note_undelivered(&mut meter, outcome.meter.records);
        delivered.merge(&meter);
    }
    Ok((delivered, outcome))
}

/// Each acked record that one subscriber did not get is an error.
fn note_undelivered(meter: &mut Meter, published: u64) {
    let missing = published.saturating_sub(meter.records);
    if missing > 0 {
        let message = format!("{} of {published} acked records were delivered", meter.records);
        meter.failures.add(NOT_DELIVERED.to_owned(), missing, message);
    }
}

/// Where a subscriber's records come from.
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
    /// Records that were published, once that is known.
    expected: watch::Receiver<Option<u64>>,
    patience: Duration,
}

impl Subscriber {
    /// Receives until everything is there, or none of this run's records has come for too long.
    /// Signs of life, and what others publish, are no reason to wait.
    async fn run(mut self, mut deliveries: impl Deliveries) -> Meter {
        let mut meter = Meter::new();
        let mut well_at = Instant::now();
        loop {
            let expected = *self.expected.borrow_and_update();
            if expected.is_some_and(|expected| meter.records >= expected) {
                return meter;
            }
            let event = tokio::select! {
                event = deliveries.next() => event,
                Ok(()) = self.expected.changed() => {
                    // Until now the publishers may simply have been slow.
                    well_at = Instant::now();
                    continue;
                }
                () = sleep_until(well_at + self.patience), if expected.is_some() => return meter,
            };
            match event {
                Some(Ok(Event::Data(records))) => {
                    let (now, before) = (Instant::now(), meter.records);
                    for record in &records.records {
                        self.receive(record.value.as_deref().unwrap_or(&[]), now, &mut meter);
                    }
                    if meter.records > before {
                        well_at = now;
                    }
                }
                Some(Ok(Event::CaughtUp { .. } | Event::Heartbeat(_))) => {}
                Some(Err(error)) => {
                    meter.fail(&error);
                    return meter;
                }
                None => return meter,
            }
        }
    }

    fn receive(&self, value: &[u8], now: Instant, meter: &mut Meter) {
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

    /// Records of runs, and then signs of life for ever.
    struct Alive(VecDeque<u64>);

    impl Deliveries for Alive {
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
            })))
        }
    }

    #[tokio::test]
    async fn signs_of_life_do_not_make_up_for_a_lost_record() {
        let (published, expected) = watch::channel(None);
        let patience = Duration::from_millis(50);
        let subscriber = Subscriber { run: RUN, epoch: Instant::now(), expected, patience };
        published.send_replace(Some(3));
        // One of another run in between: it is nobody's here.
        let run = subscriber.run(Alive([RUN, RUN + 1, RUN].into()));
        let mut meter = timeout(Duration::from_secs(30), run).await.unwrap();
        assert_eq!(meter.records, 2);
        note_undelivered(&mut meter, 3);
        assert_eq!(meter.failures.by_kind[NOT_DELIVERED], 1);
        note_undelivered(&mut meter, 1000);
        assert_eq!(meter.failures.count, 1 + 998);
    }

    #[tokio::test]
    async fn slow_publishers_are_waited_for() {
        let (published, expected) = watch::channel(None);
        let patience = Duration::from_millis(20);
        let subscriber = Subscriber { run: RUN, epoch: Instant::now(), expected, patience };
        let run = tokio::spawn(subscriber.run(Alive([RUN; 100].into())));
        // Several times what it has patience for, but nobody has said that this is all.
        sleep(Duration::from_millis(100)).await;
        published.send_replace(Some(100));
        let meter = timeout(Duration::from_secs(30), run).await.unwrap().unwrap();
        assert_eq!(meter.records, 100);
    }
}
