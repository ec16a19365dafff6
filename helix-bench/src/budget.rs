//! Hands out sends to the clients of a phase, limited by records and time.
//!
//! In an open loop a dedicated thread releases the sends, because the runtime's timer is too
//! coarse.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Serialize, Serializer};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::interrupt;
use crate::series::RateSeries;

/// Longest sleep of the pacing thread, so that it notices the end of the phase.
const PACER_SLEEP_MAX: Duration = Duration::from_millis(10);

/// Cap for computed times: later than any deadline, but still representable as an `Instant`.
const FAR: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Limits of one phase; the first one reached ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct PhaseLimits {
    pub(crate) records: Option<u64>,
    #[serde(rename = "seconds", serialize_with = "seconds")]
    #[schemars(with = "Option<f64>")]
    pub(crate) duration: Option<Duration>,
}

fn seconds<S: Serializer>(duration: &Option<Duration>, out: S) -> Result<S::Ok, S::Error> {
    duration.map(|duration| duration.as_secs_f64()).serialize(out)
}

/// Hands out sends until the record or time limit is reached, or a stop is requested.
#[derive(Debug)]
pub(crate) struct SendBudget {
    start: Instant,
    deadline: Option<Instant>,
    records_left: AtomicU64,
    records_dealt: AtomicU64,
    pace: Option<SendTimetable>,
    series: Arc<RateSeries>,
}

/// Send schedule of an open loop.
#[derive(Debug)]
struct SendTimetable {
    /// Seconds between two sends.
    interval: f64,
    /// One permit for each send that is due.
    due: Semaphore,
    taken: AtomicU64,
    /// Time of the last taken send, in nanoseconds since the start.
    last_taken_ns: AtomicU64,
}

/// Permission for one send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SendSlot {
    pub(crate) records: u32,
    /// Scheduled time of the send; `None` in a closed loop.
    pub(crate) intended: Option<Instant>,
}

impl SendBudget {
    /// Starts an unpaced budget now.
    pub(crate) fn closed_loop(phase: PhaseLimits) -> Arc<Self> {
        Arc::new(Self::new(phase, Instant::now(), None))
    }

    /// Starts a budget now that releases `rate` records per second in batches of `batch_size`.
    ///
    /// Sends are released only while the [`SendPacer`] lives.
    pub(crate) fn open_loop(
        phase: PhaseLimits,
        rate: f64,
        batch_size: u32,
    ) -> (Arc<Self>, SendPacer) {
        let interval = f64::from(batch_size) / rate;
        let pace = SendTimetable::new(interval);
        let budget = Arc::new(Self::new(phase, Instant::now(), Some(pace)));
        let pacer = SendPacer::spawn(budget.clone());
        (budget, pacer)
    }

    fn new(phase: PhaseLimits, start: Instant, pace: Option<SendTimetable>) -> Self {
        Self {
            start,
            deadline: phase.duration.map(|duration| start + duration),
            records_left: AtomicU64::new(phase.records.unwrap_or(u64::MAX)),
            records_dealt: AtomicU64::new(0),
            pace,
            series: Arc::new(RateSeries::new(start)),
        }
    }

    /// Returns the intervals of the phase.
    pub(crate) fn series(&self) -> &Arc<RateSeries> {
        &self.series
    }

    pub(crate) fn start(&self) -> Instant {
        self.start
    }

    /// Returns the records handed out so far.
    pub(crate) fn records_dealt(&self) -> u64 {
        self.records_dealt.load(Ordering::Relaxed)
    }

    /// Takes the next send, of at most `records_max` records; `None` when the budget is used up.
    ///
    /// In an open loop it waits until a send is due.
    pub(crate) async fn take(&self, records_max: u32) -> Option<SendSlot> {
        if self.is_over(Instant::now()) {
            return None;
        }
        let intended = match &self.pace {
            None => None,
            Some(pace) => Some(pace.next(self.start).await?),
        };
        let records = self.spend(records_max)?;
        Some(SendSlot { records, intended })
    }

    /// Uses up to `records_max` records; `None` when none are left.
    pub(crate) fn spend(&self, records_max: u32) -> Option<u32> {
        let most = u64::from(records_max);
        let left = self
            .records_left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| match left {
                0 => None,
                // Without a record limit nothing is used up.
                u64::MAX => Some(u64::MAX),
                left => Some(left.saturating_sub(most)),
            })
            .ok()?;
        let records = left.min(most);
        self.records_dealt.fetch_add(records, Ordering::Relaxed);
        Some(u32::try_from(records).expect("at most records_max"))
    }

    pub(crate) fn is_over(&self, now: Instant) -> bool {
        interrupt::is_requested()
            || self.is_used_up()
            || self.deadline.is_some_and(|deadline| now >= deadline)
    }

    /// Counts the due sends that an open loop had not made at its end.
    ///
    /// If the record limit ended the phase, those sends were made late.
    pub(crate) fn sends_missed(&self) -> u64 {
        let Some(pace) = &self.pace else { return 0 };
        let due = match self.deadline {
            // A send that is due exactly at the deadline would be too late.
            Some(deadline) if !self.is_used_up() => {
                // An interrupted phase ends before its deadline.
                let end = deadline.min(Instant::now());
                pace.due_by(end - self.start) - 1
            }
            _ => pace.due_by(pace.last_taken()),
        };
        due.saturating_sub(pace.taken.load(Ordering::Relaxed))
    }

    /// Reports whether all records have been handed out.
    pub(crate) fn is_used_up(&self) -> bool {
        self.records_left.load(Ordering::Relaxed) == 0
    }
}

impl SendTimetable {
    fn new(interval: f64) -> Self {
        let (taken, last_taken_ns) = (AtomicU64::new(0), AtomicU64::new(0));
        let interval = interval.min(FAR.as_secs_f64());
        Self { interval, due: Semaphore::new(0), taken, last_taken_ns }
    }

    async fn next(&self, start: Instant) -> Option<Instant> {
        self.due.acquire().await.ok()?.forget();
        let number = self.taken.fetch_add(1, Ordering::Relaxed);
        let now_ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.last_taken_ns.fetch_max(now_ns, Ordering::Relaxed);
        Some(start + self.time_of(number))
    }

    fn last_taken(&self) -> Duration {
        Duration::from_nanos(self.last_taken_ns.load(Ordering::Relaxed))
    }

    fn time_of(&self, number: u64) -> Duration {
        // Exact up to 2^53 sends.
        let time = Duration::try_from_secs_f64(number as f64 * self.interval);
        time.map_or(FAR, |time| time.min(FAR))
    }

    /// Returns how many sends are due after `elapsed`.
    fn due_by(&self, elapsed: Duration) -> u64 {
        ((elapsed.as_secs_f64() / self.interval) as u64).saturating_add(1)
    }
}

/// Pacing thread of an open loop. Ends with its budget or when dropped.
#[derive(Debug)]
pub(crate) struct SendPacer {
    budget: Arc<SendBudget>,
    thread: Option<JoinHandle<()>>,
}

impl SendPacer {
    fn spawn(budget: Arc<SendBudget>) -> Self {
        let paced = budget.clone();
        let thread = thread::Builder::new()
            .name("pacer".to_owned())
            .spawn(move || release_when_due(&paced))
            .expect("spawns the pacing thread");
        Self { budget, thread: Some(thread) }
    }
}

impl Drop for SendPacer {
    fn drop(&mut self) {
        if let Some(pace) = &self.budget.pace {
            pace.due.close();
        }
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // Ignored: a panic there has been printed, and this may run while unwinding.
            let _ = thread.join();
        }
    }
}

fn release_when_due(budget: &SendBudget) {
    let Some(pace) = &budget.pace else { return };
    let mut released = 0;
    while !pace.due.is_closed() {
        let now = Instant::now();
        if budget.is_over(now) {
            pace.due.close();
            return;
        }
        let due = pace.due_by(now - budget.start);
        // A larger step would only be a backlog that the semaphore cannot count.
        let step = due.saturating_sub(released).min(1 << 20);
        pace.due.add_permits(usize::try_from(step).expect("small"));
        released += step;
        let next = budget.start + pace.time_of(released);
        let wait = next.saturating_duration_since(Instant::now());
        if !wait.is_zero() {
            thread::park_timeout(wait.min(PACER_SLEEP_MAX));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(records: u64) -> PhaseLimits {
        PhaseLimits { records: Some(records), duration: None }
    }

    #[tokio::test]
    async fn records_are_handed_out_once() {
        let budget = SendBudget::closed_loop(records(250));
        let mut sends = Vec::new();
        while let Some(slot) = budget.take(100).await {
            assert_eq!(slot.intended, None);
            sends.push(slot.records);
        }
        assert_eq!(sends, [100, 100, 50]);
        assert_eq!(budget.records_dealt(), 250);
    }

    #[tokio::test]
    async fn time_limit_ends_a_budget_without_record_limit() {
        let phase = PhaseLimits { records: None, duration: Some(Duration::ZERO) };
        let budget = SendBudget::closed_loop(phase);
        assert_eq!(budget.take(1).await, None);
    }

    #[tokio::test]
    async fn late_send_keeps_its_scheduled_time() {
        // 1,000 sends per second, taken 20 ms late: the scheduled times stay as planned.
        let (budget, _pacer) = SendBudget::open_loop(records(5), 1_000.0, 1);
        tokio::time::sleep(Duration::from_millis(20)).await;
        for number in 0..5 {
            let slot = budget.take(1).await.unwrap();
            let planned = budget.start() + Duration::from_millis(number);
            assert_eq!(slot.intended, Some(planned));
            assert!(Instant::now() >= planned);
        }
        assert_eq!(budget.take(1).await, None);
    }

    #[tokio::test]
    async fn missed_sends_are_counted() {
        // Long enough for the pacing thread to start on a busy machine.
        let duration = Duration::from_millis(500);
        let phase = PhaseLimits { records: None, duration: Some(duration) };
        let (budget, pacer) = SendBudget::open_loop(phase, 20.0, 1);
        assert!(budget.take(1).await.is_some());
        tokio::time::sleep_until(budget.start() + duration).await;
        assert_eq!(budget.take(1).await, None);
        drop(pacer);
        assert_eq!(budget.sends_missed(), 9);
    }

    #[tokio::test]
    async fn late_sends_count_as_missed_when_records_end_the_phase() {
        // The sends are due within 4 ms and taken after 20 ms; 15 more would have been due by then.
        let (budget, _pacer) = SendBudget::open_loop(records(5), 1_000.0, 1);
        tokio::time::sleep(Duration::from_millis(20)).await;
        while budget.take(1).await.is_some() {}
        assert!(budget.sends_missed() >= 15, "{}", budget.sends_missed());
    }

    #[tokio::test]
    async fn extreme_rates_do_not_overflow() {
        for rate in [1e-20, f64::MIN_POSITIVE, 1e9] {
            let (budget, pacer) = SendBudget::open_loop(records(u64::from(u32::MAX)), rate, 100);
            assert!(budget.take(100).await.is_some());
            drop(pacer);
            assert!(
                budget.start() + SendTimetable::new(100.0 / rate).time_of(u64::MAX)
                    > budget.start()
            );
        }
    }
}
