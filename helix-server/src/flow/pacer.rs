//! How many bytes of large batches are worth having in flight.
//!
//! A log that is asked for more than it can do has a queue, and every byte in it is time that the
//! next small batch waits. The least that still keeps the log busy is what it does in the time that
//! one batch takes when there is no queue (Kleinrock 1979: the most throughput for the delay). As
//! BBR does it (Cardwell et al., ACM Queue 2016): the rate is the highest of the last while, the
//! time the shortest of batches that had no queue before them, which has to be made so now and
//! then; some times their product may be in flight, since a log writes one group while the next
//! gathers, and does more bytes in a second the longer its groups are.
//! A log that syncs slowly or whose followers are far has a long time, and so a large window.

use std::time::Duration;

use tokio::time::Instant;

use crate::limits;

#[derive(Debug)]
pub(super) struct Pacer {
    bytes_max: usize,
    /// How many times what the log does while one batch is under way; 0: no bound.
    gain: u32,
    small_seen: Option<Instant>,
    rate: Rate,
    /// What a batch takes when no queue is before it; unknown at first.
    base: Option<Duration>,
    probe: Probe,
}

/// Whether it is being measured what a batch takes.
#[derive(Debug, Clone, Copy)]
enum Probe {
    /// Not again before this.
    Rests { until: Instant },
    /// What is in flight becomes less.
    Drains { since: Instant },
    /// Batches that began after `since` had no queue before them.
    Measures { since: Instant, shortest: Option<Duration>, batches: u32 },
}

impl Pacer {
    pub(super) fn new(bytes_max: usize, gain: u32, now: Instant) -> Self {
        Self {
            bytes_max,
            gain,
            small_seen: None,
            rate: Rate::new(now),
            base: None,
            probe: Probe::Rests { until: now },
        }
    }

    /// A small batch has come: the large ones are to leave it room.
    pub(super) fn on_small(&mut self, now: Instant) {
        let was_paced = is_recent(self.small_seen, now);
        self.small_seen = Some(now);
        let is_due = match self.probe {
            Probe::Rests { until } => until <= now,
            // Begun while others were held back, as they were not since.
            Probe::Drains { .. } | Probe::Measures { .. } => !was_paced,
        };
        if is_due {
            self.probe = Probe::Drains { since: now };
        }
    }

    /// So many bytes of large batches are in flight.
    pub(super) fn on_large_in_flight(&mut self, now: Instant, bytes: usize) {
        if matches!(self.probe, Probe::Drains { .. }) && bytes == 0 {
            self.probe = Probe::Measures { since: now, shortest: None, batches: 0 };
        }
    }

    /// A batch that had its share from `since` on is committed and synced.
    pub(super) fn on_done(&mut self, now: Instant, since: Instant, bytes: usize) {
        self.rate.add(now, bytes, self.base.unwrap_or_default());
        let Probe::Measures { since: begun, shortest, batches } = &mut self.probe else { return };
        if since < *begun || !is_recent(self.small_seen, now) {
            return;
        }
        let took = now.saturating_duration_since(since);
        let least = shortest.map_or(took, |it| it.min(took));
        (*shortest, *batches) = (Some(least), *batches + 1);
        if *batches >= limits::PACE_PROBE_BATCHES {
            self.base = Some(least);
            self.probe = Probe::Rests { until: now + limits::PACE_PROBE_INTERVAL };
        }
    }

    /// How many bytes of large batches may be in flight.
    pub(super) fn window(&mut self, now: Instant) -> usize {
        let ago = |since: Instant| now.saturating_duration_since(since);
        if !is_recent(self.small_seen, now) || self.gain == 0 {
            return self.bytes_max;
        }
        match self.probe {
            Probe::Drains { since } | Probe::Measures { since, .. }
                if ago(since) < limits::PACE_PROBE_MAX =>
            {
                // One at a time: of two, one always waits for the other.
                return 0;
            }
            // Too slow to be measured, or nothing large to measure: another time.
            Probe::Drains { .. } | Probe::Measures { .. } => {
                if let Probe::Measures { shortest: Some(shortest), .. } = self.probe {
                    self.base = Some(shortest);
                }
                self.probe = Probe::Rests { until: now + limits::PACE_PROBE_INTERVAL };
            }
            Probe::Rests { .. } => {}
        }
        let Some(base) = self.base else { return self.bytes_max };
        let bytes = f64::from(self.gain) * self.rate.highest(now, base) * base.as_secs_f64();
        (bytes as usize).clamp(limits::PACED_BYTES_MIN.min(self.bytes_max), self.bytes_max)
    }
}

fn is_recent(small_seen: Option<Instant>, now: Instant) -> bool {
    let ago = |seen| now.saturating_duration_since(seen);
    small_seen.is_some_and(|seen| ago(seen) < limits::PACED_AFTER_SMALL)
}

/// Bytes per second: the highest of the present span and the one before it.
#[derive(Debug)]
struct Rate {
    span: Instant,
    highest: f64,
    before: f64,
    /// What is being counted.
    since: Instant,
    bytes: usize,
}

impl Rate {
    fn new(now: Instant) -> Self {
        Self { span: now, highest: 0.0, before: 0.0, since: now, bytes: 0 }
    }

    fn add(&mut self, now: Instant, bytes: usize, base: Duration) {
        self.turn(now, base);
        self.bytes += bytes;
        let elapsed = now.saturating_duration_since(self.since);
        // Shorter than a round, it would be the rate of a single group.
        if elapsed >= limits::PACE_RATE_SPAN_MIN.max(base * 2) {
            self.highest = self.highest.max(self.bytes as f64 / elapsed.as_secs_f64());
            (self.since, self.bytes) = (now, 0);
        }
    }

    fn highest(&mut self, now: Instant, base: Duration) -> f64 {
        self.turn(now, base);
        self.highest.max(self.before)
    }

    fn turn(&mut self, now: Instant, base: Duration) {
        let span = limits::PACE_RATE_SPAN_MAX.max(base * 8);
        let elapsed = now.saturating_duration_since(self.span);
        if elapsed >= span {
            self.before = if elapsed < span * 2 { self.highest } else { 0.0 };
            (self.span, self.highest) = (now, 0.0);
        }
    }
}
