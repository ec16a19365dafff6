//! Consumers of a workload: each subscription of a topic is a consumer group.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use helix_client::{ConsumedRecord, GroupConsumer, GroupEvent};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use crate::interval_meter::SharedMeter;

/// Longest wait until all partitions are assigned, and until the members have left.
const STEP_MAX: Duration = Duration::from_secs(60);
/// Interval at which the assignment is checked while the groups form.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// State that all consumers follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConsumerMode {
    /// The groups form. Records are read already.
    Joining,
    Reading,
    Paused,
    Ended,
}

/// Assignment of one member.
#[derive(Debug, Default)]
struct MemberStatus {
    partitions: AtomicUsize,
    is_settled: AtomicBool,
}

/// Members of all groups, each in a task of its own.
#[derive(Debug)]
pub(super) struct OmbConsumers {
    tasks: JoinSet<Result<()>>,
    mode: watch::Sender<ConsumerMode>,
    statuses: Vec<Arc<MemberStatus>>,
}

impl OmbConsumers {
    /// Starts to read with these members. Event times count from `epoch`.
    pub(super) fn start(
        members: Vec<GroupConsumer>,
        epoch: Instant,
        meter: &Arc<SharedMeter>,
    ) -> Self {
        let (mode, receiver) = watch::channel(ConsumerMode::Joining);
        let (mut tasks, mut statuses) = (JoinSet::new(), Vec::with_capacity(members.len()));
        for (task, consumer) in members.into_iter().enumerate() {
            let status = Arc::new(MemberStatus::default());
            statuses.push(status.clone());
            let member = OmbMember { consumer, status, meter: meter.clone(), task, epoch };
            tasks.spawn(member.run(receiver.clone()));
        }
        Self { tasks, mode, statuses }
    }

    /// Waits until the groups have divided their partitions, `partitions` over all groups.
    ///
    /// # Errors
    /// A consumer has failed, or the wait took too long.
    pub(super) async fn join(&mut self, partitions: usize) -> Result<()> {
        let until = Instant::now() + STEP_MAX;
        loop {
            self.check()?;
            let assigned = |status: &Arc<MemberStatus>| status.partitions.load(Ordering::Relaxed);
            let assigned: usize = self.statuses.iter().map(assigned).sum();
            let is_settled = |status: &Arc<MemberStatus>| status.is_settled.load(Ordering::Relaxed);
            if assigned == partitions && self.statuses.iter().all(is_settled) {
                break;
            }
            ensure!(
                Instant::now() < until,
                "the groups have {assigned} of {partitions} partitions after {STEP_MAX:?}"
            );
            sleep(CHECK_INTERVAL).await;
        }
        self.mode.send_replace(ConsumerMode::Reading);
        Ok(())
    }

    /// Stops to read. The members stay in their groups.
    pub(super) fn pause(&self) {
        self.mode.send_replace(ConsumerMode::Paused);
    }

    pub(super) fn resume(&self) {
        self.mode.send_replace(ConsumerMode::Reading);
    }

    /// Fails if a consumer has failed.
    ///
    /// # Errors
    /// The error of the first failed consumer.
    pub(super) fn check(&mut self) -> Result<()> {
        match self.tasks.try_join_next() {
            None => Ok(()),
            Some(ended) => {
                ended.context("a consumer has panicked")?.context("a consumer has failed")?;
                bail!("a consumer has ended")
            }
        }
    }

    /// Lets all members leave their groups, also if some consumers have failed.
    ///
    /// # Errors
    /// A consumer has failed, or the members have not left in time.
    pub(super) async fn leave(mut self) -> Result<()> {
        self.mode.send_replace(ConsumerMode::Ended);
        let all_left = async {
            let mut result = Ok(());
            while let Some(ended) = self.tasks.join_next().await {
                let ended = match ended.context("a consumer has panicked") {
                    Ok(ended) => ended.context("a consumer has failed"),
                    Err(panicked) => Err(panicked),
                };
                result = result.and(ended);
            }
            result
        };
        timeout(STEP_MAX, all_left).await.context("the consumers do not leave their groups")?
    }
}

/// One member of a group.
struct OmbMember {
    consumer: GroupConsumer,
    status: Arc<MemberStatus>,
    meter: Arc<SharedMeter>,
    /// Number of this task in the meter.
    task: usize,
    epoch: Instant,
}

impl OmbMember {
    async fn run(mut self, mut mode: watch::Receiver<ConsumerMode>) -> Result<()> {
        let mut current = *mode.borrow_and_update();
        let mut checks = interval(CHECK_INTERVAL);
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while current != ConsumerMode::Ended {
            tokio::select! {
                biased;
                changed = mode.changed() => {
                    current = match changed {
                        Ok(()) => *mode.borrow_and_update(),
                        Err(_) => ConsumerMode::Ended,
                    };
                    match current {
                        ConsumerMode::Paused => self.consumer.pause(&self.consumer.assignment())?,
                        ConsumerMode::Reading => {
                            self.consumer.resume(&self.consumer.assignment())?;
                        }
                        ConsumerMode::Joining | ConsumerMode::Ended => {}
                    }
                }
                // A member without partitions has no events that would state it.
                _ = checks.tick(), if current == ConsumerMode::Joining => self.note_status(),
                event = self.consumer.next() => {
                    match event.context("the member has ended")?? {
                        GroupEvent::Data(records) => self.note_deliveries(&records.records),
                        GroupEvent::Assigned(assigned) if current == ConsumerMode::Paused => {
                            self.consumer.pause(&assigned)?;
                        }
                        GroupEvent::Assigned(_)
                        | GroupEvent::Revoked(_)
                        | GroupEvent::Lost(_)
                        | GroupEvent::CaughtUp { .. } => {}
                    }
                }
            }
        }
        self.consumer.close().await?;
        Ok(())
    }

    fn note_status(&self) {
        let Self { consumer, status, .. } = self;
        status.partitions.store(consumer.assignment().len(), Ordering::Relaxed);
        status.is_settled.store(consumer.is_settled(), Ordering::Relaxed);
    }

    fn note_deliveries(&self, records: &[ConsumedRecord]) {
        let now = self.epoch.elapsed();
        let deliveries = records.iter().map(|record| {
            let bytes = record.value.as_ref().map_or(0, |value| value.len() as u64);
            let intended = record.event_time.map(since_epoch).unwrap_or_default();
            (bytes, now.saturating_sub(intended))
        });
        self.meter.note_deliveries(self.task, deliveries);
    }
}

/// Returns the time from the start of the run to an event time, which counts from that start.
fn since_epoch(event_time: SystemTime) -> Duration {
    event_time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}
