//! Computes the in-flight limit of large batches.
//!
//! A log that gets more than it can write builds a queue, and each queued byte delays the next
//! small batch. The smallest window that keeps the log busy is its bandwidth-delay product: its
//! rate times the latency of a batch without a queue (Kleinrock 1979).
//!
//! As in BBR (Cardwell et al., ACM Queue 2016), the rate is the highest recent one. The latency is
//! the lowest of batches that met no queue, which a periodic probe ensures. The window is a small
//! multiple of the product: a log writes one group while the next one gathers, and its rate grows
//! with the size of the groups.
//! Slow syncs or distant followers raise the latency, and so the window.

use std::time::Duration;

use tokio::time::Instant;

use crate::limits;

#[derive(Debug)]
pub(super) struct Pacer {
    bytes_max: usize,
    /// Window as a multiple of the bandwidth-delay product; 0 for no limit.
    gain: u32,
    small_seen: Option<Instant>,
    rate: Rate,
    /// Latency of a batch without a queue; unknown at first.
    base: Option<Duration>,
    probe: Probe,
}

/// Phases of the measurement of the latency without a queue.
#[derive(Debug, Clone, Copy)]
enum Probe {
    /// No measurement starts before `until`.
    Idle { until: Instant },
    /// Waits until no large batch is in flight.
    Draining { since: Instant },
    /// Measures batches that started after `since`, and so met no queue.
    Measuring { since: Instant, shortest: Option<Duration>, batches: u32 },
}

impl Pacer {
    pub(super) fn new(bytes_max: usize, gain: u32, now: Instant) -> Self {
        Self {
            bytes_max,
            gain,
            small_seen: None,
            rate: Rate::new(now),
            base: None,
            probe: Probe::Idle { until: now },
        }
    }

    /// Notes the arrival of a small batch, from which on large ones are limited.
    pub(super) fn on_small(&mut self, now: Instant) {
        let was_paced = is_recent(self.small_seen, now);
        self.small_seen = Some(now);
        let is_due = match self.probe {
            Probe::Idle { until } => until <= now,
            // A probe from before a pause without small batches: large ones were not limited
            // since then, so it starts again.
            Probe::Draining { .. } | Probe::Measuring { .. } => !was_paced,
        };
        if is_due {
            self.probe = Probe::Draining { since: now };
        }
    }

    /// Notes the bytes of large batches in flight.
    pub(super) fn on_large_in_flight(&mut self, now: Instant, bytes: usize) {
        if matches!(self.probe, Probe::Draining { .. }) && bytes == 0 {
            self.probe = Probe::Measuring { since: now, shortest: None, batches: 0 };
        }
    }

    /// Notes that a batch, in flight since `since`, is committed and synced.
    pub(super) fn on_done(&mut self, now: Instant, since: Instant, bytes: usize) {
        self.rate.add(now, bytes, self.base.unwrap_or_default());
        let Probe::Measuring { since: begun, shortest, batches } = &mut self.probe else { return };
        if since < *begun || !is_recent(self.small_seen, now) {
            return;
        }
        let took = now.saturating_duration_since(since);
        let least = shortest.map_or(took, |it| it.min(took));
        (*shortest, *batches) = (Some(least), *batches + 1);
        if *batches >= limits::PACE_PROBE_BATCHES {
            self.base = Some(least);
            self.probe = Probe::Idle { until: now + limits::PACE_PROBE_INTERVAL };
        }
    }

    /// Returns how many bytes of large batches may be in flight.
    pub(super) fn window(&mut self, now: Instant) -> usize {
        let ago = |since: Instant| now.saturating_duration_since(since);
        if !is_recent(self.small_seen, now) || self.gain == 0 {
            return self.bytes_max;
        }
        match self.probe {
            Probe::Draining { since } | Probe::Measuring { since, .. }
                if ago(since) < limits::PACE_PROBE_MAX =>
            {
                // One large batch at a time, since a second one would queue behind it.
                return 0;
            }
            // The log was too slow for the probe, or there was no large batch. Tries again later.
            Probe::Draining { .. } | Probe::Measuring { .. } => {
                if let Probe::Measuring { shortest: Some(shortest), .. } = self.probe {
                    self.base = Some(shortest);
                }
                self.probe = Probe::Idle { until: now + limits::PACE_PROBE_INTERVAL };
            }
            Probe::Idle { .. } => {}
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

/// The highest rate, in bytes per second, of the current and the previous span.
#[derive(Debug)]
pub(super) struct Rate {
    span: Instant,
    highest: f64,
    before: f64,
    /// Start and bytes of the rate sample being counted.
    since: Instant,
    bytes: usize,
}

impl Rate {
    pub(super) fn new(now: Instant) -> Self {
        Self { span: now, highest: 0.0, before: 0.0, since: now, bytes: 0 }
    }

    pub(super) fn add(&mut self, now: Instant, bytes: usize, base: Duration) {
        self.rotate(now, base);
        self.bytes += bytes;
        let elapsed = now.saturating_duration_since(self.since);
        // A sample shorter than a round would be the rate of a single group.
        if elapsed >= limits::PACE_RATE_SPAN_MIN.max(base * 2) {
            self.highest = self.highest.max(self.bytes as f64 / elapsed.as_secs_f64());
            (self.since, self.bytes) = (now, 0);
        }
    }

    pub(super) fn highest(&mut self, now: Instant, base: Duration) -> f64 {
        self.rotate(now, base);
        self.highest.max(self.before)
    }

    fn rotate(&mut self, now: Instant, base: Duration) {
        let span = limits::PACE_RATE_SPAN_MAX.max(base * 8);
        let elapsed = now.saturating_duration_since(self.span);
        if elapsed >= span {
            self.before = if elapsed < span * 2 { self.highest } else { 0.0 };
            (self.span, self.highest) = (now, 0.0);
        }
    }
}
