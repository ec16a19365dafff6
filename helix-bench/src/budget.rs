//! What may still be sent in a part of a run, and when: shared by all of its clients.
//! In an open loop a thread of its own calls the sends, because the runtime's timer is too coarse.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::load::Phase;

/// Longest sleep of the pacing thread, so that it notices the end.
const PACER_SLEEP_MAX: Duration = Duration::from_millis(10);

/// Later than every end, and yet a moment: what lies beyond it is never due.
const FAR: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Deals out sends until the records or the time are used up.
#[derive(Debug)]
pub(crate) struct Budget {
    start: Instant,
    deadline: Option<Instant>,
    records_left: AtomicU64,
    records_given: AtomicU64,
    pace: Option<Pace>,
}

/// The timetable of an open loop.
#[derive(Debug)]
struct Pace {
    /// Seconds between two sends.
    interval: f64,
    /// One permit for each send whose time has come.
    due: Semaphore,
    taken: AtomicU64,
    /// When the last one was taken, in nanoseconds since the start.
    last_taken_ns: AtomicU64,
}

/// One send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) records: u32,
    /// Number of the send in an open loop.
    pub(crate) intended: Option<Instant>,
}

impl Budget {
    /// A budget that begins now.
    pub(crate) fn closed_loop(phase: Phase) -> Arc<Self> {
        Arc::new(Self::new(phase, Instant::now(), None))
    }

    /// A budget that begins now and gives out `rate` records per second in batches of
    /// `batch_size`. Its sends come only while the [`Pacer`] lives.
    pub(crate) fn open_loop(phase: Phase, rate: f64, batch_size: u32) -> (Arc<Self>, Pacer) {
        let interval = f64::from(batch_size) / rate;
        let pace = Pace::new(interval);
        let budget = Arc::new(Self::new(phase, Instant::now(), Some(pace)));
        let pacer = Pacer::spawn(budget.clone());
        (budget, pacer)
    }

    fn new(phase: Phase, start: Instant, pace: Option<Pace>) -> Self {
        Self {
            start,
            deadline: phase.duration.map(|duration| start + duration),
            records_left: AtomicU64::new(phase.records.unwrap_or(u64::MAX)),
            records_given: AtomicU64::new(0),
            pace,
        }
    }

    pub(crate) fn start(&self) -> Instant {
        self.start
    }

    /// Records dealt out so far.
    pub(crate) fn records_given(&self) -> u64 {
        self.records_given.load(Ordering::Relaxed)
    }

    /// The next send, of at most `records_max` records; None when all is used up. Waits for its
    /// time in an open loop.
    pub(crate) async fn take(&self, records_max: u32) -> Option<Slot> {
        if self.is_over(Instant::now()) {
            return None;
        }
        let intended = match &self.pace {
            None => None,
            Some(pace) => Some(pace.next(self.start).await?),
        };
        let records = self.spend(records_max)?;
        Some(Slot { records, intended })
    }

    /// Uses up to `records_max` records; None when there are none left.
    pub(crate) fn spend(&self, records_max: u32) -> Option<u32> {
        let most = u64::from(records_max);
        let left = self
            .records_left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| match left {
                0 => None,
                // No bound on records: nothing is used up.
                u64::MAX => Some(u64::MAX),
                left => Some(left.saturating_sub(most)),
            })
            .ok()?;
        let records = left.min(most);
        self.records_given.fetch_add(records, Ordering::Relaxed);
        Some(u32::try_from(records).expect("at most records_max"))
    }

    pub(crate) fn is_over(&self, now: Instant) -> bool {
        self.is_used_up() || self.deadline.is_some_and(|deadline| now >= deadline)
    }

    /// How far an open loop was behind its timetable at its end: sends whose time had come and
    /// that nobody was free to make. Where the records ended it, they were made later.
    pub(crate) fn sends_missed(&self) -> u64 {
        let Some(pace) = &self.pace else { return 0 };
        let due = match self.deadline {
            // One that falls on the deadline itself would have come too late.
            Some(deadline) if !self.is_used_up() => pace.due_by(deadline - self.start) - 1,
            _ => pace.due_by(pace.last_taken()),
        };
        due.saturating_sub(pace.taken.load(Ordering::Relaxed))
    }

    /// Whether all records have been dealt out.
    pub(crate) fn is_used_up(&self) -> bool {
        self.records_left.load(Ordering::Relaxed) == 0
    }
}

impl Pace {
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

    /// Sends whose time has come after this long.
    fn due_by(&self, elapsed: Duration) -> u64 {
        ((elapsed.as_secs_f64() / self.interval) as u64).saturating_add(1)
    }
}

/// The thread behind an open loop. Ends with its budget or when dropped.
#[derive(Debug)]
pub(crate) struct Pacer {
    budget: Arc<Budget>,
    thread: Option<JoinHandle<()>>,
}

impl Pacer {
    fn spawn(budget: Arc<Budget>) -> Self {
        let paced = budget.clone();
        let thread = thread::Builder::new()
            .name("pacer".to_owned())
            .spawn(move || release_when_due(&paced))
            .expect("a thread can be had");
        Self { budget, thread: Some(thread) }
    }
}

impl Drop for Pacer {
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

fn release_when_due(budget: &Budget) {
    let Some(pace) = &budget.pace else { return };
    let mut released = 0;
    while !pace.due.is_closed() {
        let now = Instant::now();
        if budget.is_over(now) {
            pace.due.close();
            return;
        }
        let due = pace.due_by(now - budget.start);
        // More would only be a backlog that the semaphore cannot count.
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

    fn records(records: u64) -> Phase {
        Phase { records: Some(records), duration: None }
    }

    #[tokio::test]
    async fn records_are_dealt_out_once() {
        let budget = Budget::closed_loop(records(250));
        let mut sends = Vec::new();
        while let Some(slot) = budget.take(100).await {
            assert_eq!(slot.intended, None);
            sends.push(slot.records);
        }
        assert_eq!(sends, [100, 100, 50]);
        assert_eq!(budget.records_given(), 250);
    }

    #[tokio::test]
    async fn time_ends_a_budget_without_records() {
        let phase = Phase { records: None, duration: Some(Duration::ZERO) };
        let budget = Budget::closed_loop(phase);
        assert_eq!(budget.take(1).await, None);
    }

    #[tokio::test]
    async fn a_late_send_keeps_its_intended_time() {
        // 1,000 sends per second: a taker that comes 20 ms late finds the times as planned.
        let (budget, _pacer) = Budget::open_loop(records(5), 1_000.0, 1);
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
    async fn sends_that_nobody_made_are_counted() {
        // Long enough for the pacer's thread to begin on a busy machine.
        let duration = Duration::from_millis(500);
        let phase = Phase { records: None, duration: Some(duration) };
        let (budget, pacer) = Budget::open_loop(phase, 20.0, 1);
        assert!(budget.take(1).await.is_some());
        tokio::time::sleep_until(budget.start() + duration).await;
        assert_eq!(budget.take(1).await, None);
        drop(pacer);
        assert_eq!(budget.sends_missed(), 9);
    }

    #[tokio::test]
    async fn a_rate_that_records_were_late_for_is_counted() {
        // Due within 4 ms, taken after 20: by then 15 more would have been.
        let (budget, _pacer) = Budget::open_loop(records(5), 1_000.0, 1);
        tokio::time::sleep(Duration::from_millis(20)).await;
        while budget.take(1).await.is_some() {}
        assert!(budget.sends_missed() >= 15, "{}", budget.sends_missed());
    }

    #[tokio::test]
    async fn no_rate_breaks_the_timetable() {
        for rate in [1e-20, f64::MIN_POSITIVE, 1e9] {
            let (budget, pacer) = Budget::open_loop(records(u64::from(u32::MAX)), rate, 100);
            assert!(budget.take(100).await.is_some());
            drop(pacer);
            assert!(budget.start() + Pace::new(100.0 / rate).time_of(u64::MAX) > budget.start());
        }
    }
}
