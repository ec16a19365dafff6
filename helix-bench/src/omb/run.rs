//! Run of a workload: search for a rate, warm-up, and the measured test with its intervals.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use helix_client::{Client, GroupConsumer, ProducerOptions};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use super::OmbPlan;
use super::consumers::OmbConsumers;
use super::rate::{RateTrial, START_RATE, find_rate};
use super::result::OmbInterval;
use crate::budget::{PhaseLimits, SendBudget, SendPacer};
use crate::format::grouped;
use crate::interval_meter::{IntervalMeter, RecordTotals, SharedMeter};
use crate::meter::Failures;
use crate::phase::FAILURES_IN_A_ROW_MAX;
use crate::single_sends::{SingleSender, buffer_bytes};
use crate::{interrupt, progress};

/// Interval of the measurements. The format's charts expect it.
const INTERVAL: Duration = Duration::from_secs(10);
/// Limits of the length of a trial of the search for a rate, which is that of the test between
/// them.
const TRIAL_MIN: Duration = Duration::from_millis(500);
const TRIAL_MAX: Duration = Duration::from_secs(5);
/// Interval at which deliveries and the backlog are checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Longest time without a delivery before the outstanding ones count as missing.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time without an ack or a delivery in a test with a backlog.
const STALL_MAX: Duration = Duration::from_secs(60);
/// Longest time in which a backlog is built and read.
const BACKLOG_MAX: Duration = Duration::from_secs(24 * 3600);
/// Most bytes that a consumer reads ahead, which is the client's own default.
const READ_AHEAD_MAX: usize = 16 << 20;
/// Messages that are no backlog.
const BACKLOG_EMPTY_MIN: u64 = 1000;

/// Measurements of a workload.
#[derive(Debug)]
pub(super) struct OmbOutcome {
    /// Messages per second over all producers.
    pub(super) rate: f64,
    pub(super) intervals: Vec<OmbInterval>,
    /// All of the test, with the deliveries after its last interval.
    pub(super) total: IntervalMeter,
    /// Until the last ack.
    pub(super) elapsed: Duration,
    /// Deliveries until the last ack. `total` has those after it, too.
    pub(super) consumed: u64,
    /// Messages of the test that were due and not sent.
    pub(super) missed: u64,
    pub(super) early_end: Option<EarlyEnd>,
    /// Deliveries of acked messages that did not arrive, since the start of the run.
    pub(super) missing: u64,
    /// Deliveries beyond the first one of each message.
    pub(super) repeated: u64,
    /// Since the start of the run.
    pub(super) failures: Failures,
}

/// Reason why a test ended before its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EarlyEnd {
    ProducersGaveUp,
    Stalled,
}

impl EarlyEnd {
    pub(super) fn text(self) -> String {
        match self {
            Self::ProducersGaveUp => {
                format!("all producers gave up after {FAILURES_IN_A_ROW_MAX} failures in a row")
            }
            Self::Stalled => {
                format!("no message was acked or delivered for more than {STALL_MAX:?}")
            }
        }
    }
}

/// End of a load.
#[derive(Debug)]
struct PublishEnd {
    /// Sends that were due and not made.
    missed: u64,
    early: Option<EarlyEnd>,
}

/// Producers and consumers of a workload.
#[derive(Debug)]
pub(super) struct OmbRun<'a> {
    plan: &'a OmbPlan,
    senders: Vec<SingleSender>,
    consumers: OmbConsumers,
    meter: Arc<SharedMeter>,
}

impl<'a> OmbRun<'a> {
    /// Starts the consumers of the topics, and prepares the producers.
    pub(super) fn start(plan: &'a OmbPlan, clients: &[Client], topics: &[String]) -> Self {
        let workload = &plan.workload;
        let (producers, consumers) = (workload.producers(), workload.consumers());
        let client = |number: usize| &clients[number % clients.len()];
        let epoch = Instant::now();
        let meter = Arc::new(SharedMeter::new(producers.max(consumers)));
        let read_ahead = buffer_bytes(consumers).min(READ_AHEAD_MAX);
        let mut members: Vec<GroupConsumer> = Vec::with_capacity(consumers);
        for topic in topics {
            for subscription in 0..workload.subscriptions_per_topic {
                let group = format!("{topic}-sub-{subscription:03}");
                for _ in 0..workload.consumers_per_subscription {
                    // Consumers get connections of their own, if there are enough.
                    let client = client(producers + members.len());
                    let member = client.consumer_group(&group).topics([topic.as_str()]);
                    members.push(member.buffer_bytes(read_ahead).join());
                }
            }
        }
        let options = ProducerOptions {
            buffer_bytes: buffer_bytes(producers),
            ..plan.producer_options.clone()
        };
        let topics = topics.iter().cycle();
        let senders = topics.take(producers).enumerate().map(|(task, topic)| SingleSender {
            producer: client(task).producer(options.clone()),
            topic: topic.clone(),
            messages: plan.pool.producer(task, workload.keys, plan.load.seed),
            epoch,
            meter: meter.clone(),
            task,
        });
        let senders = senders.collect();
        Self { plan, senders, consumers: OmbConsumers::start(members, epoch, &meter), meter }
    }

    /// Makes the measurements, and lets the consumers leave their groups, also after an error.
    ///
    /// # Errors
    /// The groups do not form, a consumer has failed, or no rate is sustained.
    pub(super) async fn measure(mut self) -> Result<OmbOutcome> {
        let measured = self.measure_all().await;
        // Groups with members cannot be deleted.
        let left = self.consumers.leave().await;
        let outcome = measured?;
        left?;
        Ok(outcome)
    }

    async fn measure_all(&mut self) -> Result<OmbOutcome> {
        let plan = self.plan;
        let workload = &plan.workload;
        let partitions = workload.partitions_per_topic as usize * workload.topics;
        self.consumers.join(partitions * workload.subscriptions_per_topic).await?;
        let rate = match workload.rate {
            Some(rate) => rate,
            None => {
                progress::step("looking for the highest rate that the consumers keep up with");
                find_rate(START_RATE, async |rate| self.trial(rate).await).await?
            }
        };
        if !workload.warmup.is_zero() {
            progress::step(&format!("warming up for {:?}", workload.warmup));
            let mut log = IntervalLog::new();
            self.publish_for(workload.warmup, rate, &mut log).await?;
            self.drain(&mut log).await?;
        }
        progress::step(&format!("testing at {} messages/s", grouped(rate.round())));
        self.meter.take();
        let started = Instant::now();
        let mut log = IntervalLog::new();
        let PublishEnd { missed, early: early_end } = match workload.backlog_bytes {
            0 => self.publish_for(workload.duration, rate, &mut log).await?,
            _ => self.publish_with_backlog(rate, &mut log).await?,
        };
        let (elapsed, consumed) = (started.elapsed(), log.total.received);
        self.drain(&mut log).await?;
        let (totals, subscriptions) = (self.meter.totals(), self.subscriptions());
        let failures = self.meter.failures();
        Ok(OmbOutcome {
            rate,
            intervals: log.intervals,
            total: log.total,
            elapsed,
            consumed,
            missed,
            early_end,
            missing: (totals.acked * subscriptions).saturating_sub(totals.received),
            // A failed message may have been appended nevertheless.
            repeated: totals
                .received
                .saturating_sub((totals.acked + totals.failed) * subscriptions),
            failures,
        })
    }

    fn subscriptions(&self) -> u64 {
        self.plan.workload.subscriptions_per_topic as u64
    }

    /// Returns the acked messages that are not delivered yet, over all subscriptions.
    fn backlog(&self) -> u64 {
        let totals = self.meter.totals();
        (totals.acked * self.subscriptions()).saturating_sub(totals.received)
    }

    /// Publishes at a rate for a short time.
    async fn trial(&mut self, rate: f64) -> Result<RateTrial> {
        let length = self.plan.workload.duration.clamp(TRIAL_MIN, TRIAL_MAX);
        let before = self.meter.totals();
        let load = RunningLoad::start(std::mem::take(&mut self.senders), rate, Some(length));
        tokio::select! {
            () = sleep_until(load.budget.start() + length) => {}
            () = interrupt::requested() => {}
        }
        // Before the outstanding acks and deliveries are waited for.
        let (sent, after) = (load.budget.records_dealt(), self.meter.totals());
        let backlog = self.backlog();
        let missed = self.finish(load).await?;
        let failed = self.meter.totals().failed - before.failed;
        self.drain(&mut IntervalLog::new()).await?;
        let ended = after.acked - before.acked + after.failed - before.failed;
        Ok(RateTrial {
            rate,
            seconds: length.as_secs_f64(),
            failed,
            missed,
            unacked: sent.saturating_sub(ended),
            undelivered: backlog / self.subscriptions().max(1),
        })
    }

    /// Publishes at a rate. Ends early after an interval in which the last producer gave up.
    ///
    /// The last interval includes the acks that arrive after the time is over.
    async fn publish_for(
        &mut self,
        duration: Duration,
        rate: f64,
        log: &mut IntervalLog,
    ) -> Result<PublishEnd> {
        let mut load = RunningLoad::start(std::mem::take(&mut self.senders), rate, Some(duration));
        let end = load.budget.start() + duration;
        let early = loop {
            let next = log.next();
            tokio::select! {
                () = sleep_until(next.min(end)) => {}
                () = interrupt::requested() => {}
            }
            self.consumers.check()?;
            if next >= end || interrupt::is_requested() {
                break None;
            }
            if load.has_ended()? {
                break Some(EarlyEnd::ProducersGaveUp);
            }
            log.note(&self.meter, self.backlog());
        };
        let over = Instant::now();
        let missed = self.finish(load).await?;
        log.note_last(&self.meter, self.backlog(), over);
        Ok(PublishEnd { missed, early })
    }

    /// Publishes at a rate until the paused consumers have a backlog, until they have read it, and
    /// then for the duration of the test. Ends early if nothing can build or read the backlog.
    async fn publish_with_backlog(
        &mut self,
        rate: f64,
        log: &mut IntervalLog,
    ) -> Result<PublishEnd> {
        let plan = self.plan;
        let workload = &plan.workload;
        let limits = BacklogLimits::new(
            workload.backlog_bytes,
            workload.message_size,
            workload.backlog_drain_ratio,
        );
        progress::step("building the backlog");
        self.consumers.pause();
        let mut load = RunningLoad::start(std::mem::take(&mut self.senders), rate, None);
        let started = Instant::now();
        let mut stage = BacklogStage::Building;
        let mut stall = StallWatch::new(rate, started);
        let early = loop {
            sleep_until(log.next().min(Instant::now() + CHECK_INTERVAL)).await;
            self.consumers.check()?;
            let now = Instant::now();
            if now >= log.next() {
                log.note(&self.meter, self.backlog());
            }
            if interrupt::is_requested() {
                break None;
            }
            if load.has_ended()? {
                break Some(EarlyEnd::ProducersGaveUp);
            }
            if stall.is_stalled(self.meter.totals(), now) {
                break Some(EarlyEnd::Stalled);
            }
            let stage_before = stage;
            stage = stage.next(self.backlog(), &limits, now, workload.duration);
            match stage {
                BacklogStage::Steady(end) if now >= end => break None,
                _ if stage == stage_before => {}
                BacklogStage::Building => {}
                BacklogStage::Reading => {
                    progress::step(&format!("reading the backlog, built in {:.1?}", now - started));
                    self.consumers.resume();
                }
                BacklogStage::Steady(_) => {
                    progress::step(&format!("the backlog is read after {:.1?}", now - started));
                }
            }
            if !matches!(stage, BacklogStage::Steady(_)) && now - started > BACKLOG_MAX {
                bail!("the backlog is not built and read within {BACKLOG_MAX:?}");
            }
        };
        // Published messages are read, also after an early end.
        self.consumers.resume();
        if let Some(early) = early {
            progress::step(&format!("the test ends early: {}", early.text()));
        }
        let over = Instant::now();
        let missed = self.finish(load).await?;
        log.note_last(&self.meter, self.backlog(), over);
        Ok(PublishEnd { missed, early })
    }

    /// Ends a load, and returns the sends that were due and not made.
    async fn finish(&mut self, load: RunningLoad) -> Result<u64> {
        let (senders, missed) = load.finish().await?;
        self.senders = senders;
        Ok(missed)
    }

    /// Waits until all acked messages are delivered, or until none arrives for too long.
    async fn drain(&mut self, log: &mut IntervalLog) -> Result<()> {
        let (mut received, mut progress_at) = (self.meter.totals().received, Instant::now());
        while self.backlog() > 0 && progress_at.elapsed() < PROGRESS_TIMEOUT {
            self.consumers.check()?;
            sleep(CHECK_INTERVAL).await;
            let now = self.meter.totals().received;
            if now > received {
                (received, progress_at) = (now, Instant::now());
            }
        }
        log.total.merge(&self.meter.take());
        Ok(())
    }
}

/// Producers that send at a rate.
#[derive(Debug)]
struct RunningLoad {
    budget: Arc<SendBudget>,
    pacer: SendPacer,
    tasks: JoinSet<SingleSender>,
    /// Producers whose tasks have ended.
    ended: Vec<SingleSender>,
}

impl RunningLoad {
    fn start(senders: Vec<SingleSender>, rate: f64, duration: Option<Duration>) -> Self {
        let limits = PhaseLimits { records: None, duration };
        let (budget, pacer) = SendBudget::open_loop(limits, rate, 1);
        let mut tasks = JoinSet::new();
        for mut sender in senders {
            let budget = budget.clone();
            tasks.spawn(async move {
                sender.run(&budget).await;
                sender
            });
        }
        Self { budget, pacer, tasks, ended: Vec::new() }
    }

    /// Reports whether no producer sends. Before the end of the budget, all of them have given up.
    ///
    /// # Errors
    /// A producer has panicked.
    fn has_ended(&mut self) -> Result<bool> {
        while let Some(ended) = self.tasks.try_join_next() {
            self.ended.push(ended.context("a producer has failed")?);
        }
        Ok(self.tasks.is_empty())
    }

    /// Stops to send and waits for the acks. Returns the senders, and the sends that were due and
    /// not made.
    async fn finish(self) -> Result<(Vec<SingleSender>, u64)> {
        let Self { budget, pacer, mut tasks, ended: mut senders } = self;
        drop(pacer);
        while let Some(ended) = tasks.join_next().await {
            senders.push(ended.context("a producer has failed")?);
        }
        Ok((senders, budget.sends_missed()))
    }
}

/// Notices that nothing is acked or delivered for too long.
#[derive(Debug)]
struct StallWatch {
    /// Acked and delivered messages.
    progress: (u64, u64),
    since: Instant,
    limit: Duration,
}

impl StallWatch {
    fn new(rate: f64, now: Instant) -> Self {
        // Some messages must be due at a low rate, too.
        let due = Duration::try_from_secs_f64(10.0 / rate).unwrap_or(BACKLOG_MAX).min(BACKLOG_MAX);
        Self { progress: (0, 0), since: now, limit: STALL_MAX + due }
    }

    fn is_stalled(&mut self, totals: RecordTotals, now: Instant) -> bool {
        let progress = (totals.acked, totals.received);
        if self.progress != progress {
            (self.progress, self.since) = (progress, now);
        }
        now - self.since > self.limit
    }
}

/// Intervals of a phase.
#[derive(Debug)]
struct IntervalLog {
    intervals: Vec<OmbInterval>,
    total: IntervalMeter,
    since: Instant,
}

impl IntervalLog {
    fn new() -> Self {
        Self { intervals: Vec::new(), total: IntervalMeter::new(), since: Instant::now() }
    }

    /// Returns the end of the current interval.
    fn next(&self) -> Instant {
        self.since + INTERVAL
    }

    /// Ends the current interval.
    fn note(&mut self, meter: &SharedMeter, backlog: u64) {
        self.note_until(meter.take(), backlog, Instant::now());
    }

    /// Ends the last interval. Its time is over at `over`, although acks arrive after that.
    ///
    /// The rates of a short rest say nothing, and would look like a collapse.
    fn note_last(&mut self, meter: &SharedMeter, backlog: u64, over: Instant) {
        let taken = meter.take();
        if self.intervals.is_empty() || 2 * (over - self.since) >= INTERVAL {
            self.note_until(taken, backlog, over);
        } else {
            self.total.merge(&taken);
        }
    }

    fn note_until(&mut self, taken: IntervalMeter, backlog: u64, now: Instant) {
        let interval = OmbInterval::new(&taken, now.saturating_duration_since(self.since), backlog);
        progress::step(&format!(
            "published {}/s, errors {}/s, consumed {}/s, backlog {}, publish latency p50 {:.2} ms, \
             p99 {:.2} ms",
            grouped(interval.publish_rate.round()),
            grouped(interval.error_rate.round()),
            grouped(interval.consume_rate.round()),
            grouped(backlog as f64),
            taken.publish.percentile_us(50.0) / 1e3,
            taken.publish.percentile_us(99.0) / 1e3,
        ));
        self.intervals.push(interval);
        self.total.merge(&taken);
        self.since = now;
    }
}

/// Stage of a test with a backlog.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BacklogStage {
    /// The consumers are paused.
    Building,
    Reading,
    /// The backlog is read; the test ends at this time.
    Steady(Instant),
}

/// Sizes of a backlog in messages, over all subscriptions.
#[derive(Debug, Clone, Copy)]
struct BacklogLimits {
    full: u64,
    empty: u64,
}

impl BacklogLimits {
    fn new(bytes: u64, message_size: usize, drain_ratio: f64) -> Self {
        let full = bytes.div_ceil(message_size.max(1) as u64);
        let left = ((1.0 - drain_ratio) * full as f64) as u64;
        Self { full, empty: left.max(BACKLOG_EMPTY_MIN) }
    }
}

impl BacklogStage {
    fn next(self, backlog: u64, limits: &BacklogLimits, now: Instant, duration: Duration) -> Self {
        match self {
            Self::Building if backlog >= limits.full => Self::Reading,
            Self::Reading if backlog <= limits.empty => Self::Steady(now + duration),
            stage => stage,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backlog_is_built_and_read_before_the_test_ends() {
        let limits = BacklogLimits::new(1 << 30, 1024, 1.0);
        assert_eq!((limits.full, limits.empty), (1 << 20, BACKLOG_EMPTY_MIN));
        let (now, duration) = (Instant::now(), Duration::from_secs(60));
        let next = |stage: BacklogStage, backlog| stage.next(backlog, &limits, now, duration);
        let building = next(BacklogStage::Building, (1 << 20) - 1);
        assert_eq!(building, BacklogStage::Building);
        let reading = next(building, 1 << 20);
        assert_eq!(reading, BacklogStage::Reading);
        assert_eq!(next(reading, 1001), BacklogStage::Reading);
        let steady = next(reading, 1000);
        assert_eq!(steady, BacklogStage::Steady(now + duration));
        assert_eq!(next(steady, 1 << 20), steady);
    }

    #[test]
    fn short_rest_counts_and_is_no_interval() {
        let meter = SharedMeter::new(1);
        let acks = |count: u64| {
            let ack = |_| meter.note_ack(0, 1, Duration::ZERO, Duration::ZERO);
            (0..count).for_each(ack);
        };
        let mut log = IntervalLog::new();
        let first = log.next();
        acks(100);
        log.note_until(meter.take(), 0, first);
        acks(5);
        log.note_last(&meter, 0, first + INTERVAL / 3);
        assert_eq!((log.intervals.len(), log.total.acked), (1, 105));
        // A rest of more than half an interval has its own rate.
        acks(60);
        log.note_last(&meter, 0, first + INTERVAL * 3 / 5);
        let (rate, expected) = (log.intervals[1].publish_rate, 100.0 / INTERVAL.as_secs_f64());
        assert!((rate / expected - 1.0).abs() < 0.01, "{rate}, not {expected}");
        // A test that is shorter than an interval has one.
        let mut log = IntervalLog::new();
        let over = log.next() - INTERVAL * 9 / 10;
        log.note_last(&meter, 0, over);
        assert_eq!(log.intervals.len(), 1);
    }

    #[test]
    fn only_acks_and_deliveries_are_progress() {
        let start = Instant::now();
        let mut watch = StallWatch::new(10.0, start);
        let at = |seconds| start + Duration::from_secs(seconds);
        let totals = |acked, received, failed| RecordTotals { acked, failed, received };
        assert!(!watch.is_stalled(totals(1, 0, 0), at(1)));
        assert!(!watch.is_stalled(totals(1, 1, 5), at(60)));
        // Failures go on.
        assert!(!watch.is_stalled(totals(1, 1, 9), at(121)));
        assert!(watch.is_stalled(totals(1, 1, 12), at(122)));
        // At a low rate, the next message may not be due for long.
        let mut slow = StallWatch::new(0.001, start);
        assert!(!slow.is_stalled(totals(0, 0, 0), at(10_000)));
        assert!(slow.is_stalled(totals(0, 0, 0), at(10_061)));
    }

    #[test]
    fn part_of_a_backlog_may_stay() {
        let limits = BacklogLimits::new(1 << 30, 1024, 0.75);
        assert_eq!(limits.empty, 1 << 18);
    }
}
