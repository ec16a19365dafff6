//! Divides the permits for batches between principals.
//!
//! While batches of several principals arrive, a log gets no more small batches than keep it busy.
//! The others wait in their principal's queue, and the queues take turns. So the queue of the log,
//! in which each batch waits behind all earlier ones, stays short: a principal with hundreds of
//! open appends delays another one's batch by a few batches, not by hundreds.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use super::Waiter;
use super::pacer::Rate;
use crate::limits;

/// Identifies the principal that a batch belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FlowShare(u128);

impl FlowShare {
    /// Entries of the service itself.
    pub const INTERNAL: Self = Self(u128::MAX);

    /// Returns the share that an identity of 16 bytes stands for.
    pub const fn new(identity: [u8; 16]) -> Self {
        Self(u128::from_le_bytes(identity))
    }
}

/// Batches that wait for a permit: in turns between shares, and in order of arrival within one.
///
/// Turns are fair in bytes (deficit round robin, Shreedhar and Varghese 1995).
#[derive(Debug, Default)]
pub(super) struct FairQueue {
    /// Never has an empty queue.
    queues: HashMap<FlowShare, ShareQueue>,
    /// Each share with a queue, once; the next turn is at the front.
    turns: VecDeque<FlowShare>,
}

#[derive(Debug, Default)]
struct ShareQueue {
    waiting: VecDeque<Waiter>,
    /// Bytes that the share may still take in its turns.
    credit: usize,
}

impl FairQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// Returns whether a batch of the share waits.
    pub(super) fn has(&self, share: FlowShare) -> bool {
        self.queues.contains_key(&share)
    }

    pub(super) fn push(&mut self, share: FlowShare, waiter: Waiter) {
        let queue = self.queues.entry(share).or_insert_with(|| {
            self.turns.push_back(share);
            ShareQueue::default()
        });
        queue.waiting.push_back(waiter);
    }

    /// Returns the share whose turn it is, and the size of its oldest batch.
    pub(super) fn next(&mut self) -> Option<(FlowShare, usize)> {
        loop {
            let share = *self.turns.front()?;
            let is_alone = self.turns.len() == 1;
            let queue = self.queues.get_mut(&share)?;
            let bytes = queue.waiting.front()?.bytes;
            if queue.credit >= bytes || is_alone {
                return Some((share, bytes));
            }
            queue.credit += limits::SHARE_TURN_BYTES;
            self.turns.rotate_left(1);
        }
    }

    /// Returns the size of the oldest batch of a share.
    pub(super) fn next_of(&self, share: FlowShare) -> Option<usize> {
        self.queues.get(&share)?.waiting.front().map(|waiter| waiter.bytes)
    }

    /// Takes the oldest batch of a share.
    pub(super) fn pop(&mut self, share: FlowShare) -> Option<Waiter> {
        let queue = self.queues.get_mut(&share)?;
        let waiter = queue.waiting.pop_front()?;
        queue.credit = queue.credit.saturating_sub(waiter.bytes);
        if queue.waiting.is_empty() {
            self.queues.remove(&share);
            self.turns.retain(|it| *it != share);
        }
        Some(waiter)
    }
}

/// Small batches in flight of each share, and how many may be while shares compete.
///
/// As in [`super::pacer`], that is a small multiple of the rate times the latency of a batch
/// without a queue, which a periodic probe measures with few batches in flight.
#[derive(Debug)]
pub(super) struct ShareWindow {
    in_flight: HashMap<FlowShare, usize>,
    total: usize,
    last: Option<FlowShare>,
    /// Time of the last batch whose predecessor was of another share.
    competed: Option<Instant>,
    /// Small batches per second.
    rate: Rate,
    /// Latency without a queue; unknown at first.
    base: Option<Duration>,
    probe: Probe,
}

/// Phases of the measurement of the latency without a queue.
#[derive(Debug, Clone, Copy)]
enum Probe {
    /// No measurement starts before `until`.
    Idle { until: Instant },
    /// Waits until few batches are in flight.
    Draining { since: Instant },
    /// Measures batches that started after `since`, and so met few others.
    Measuring { since: Instant, least: Option<Duration>, batches: u32 },
}

impl ShareWindow {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            in_flight: HashMap::new(),
            total: 0,
            last: None,
            competed: None,
            rate: Rate::new(now),
            base: None,
            probe: Probe::Idle { until: now },
        }
    }

    /// Notes the arrival of a batch of any size.
    pub(super) fn on_arrival(&mut self, share: FlowShare, now: Instant) {
        if self.last.replace(share).is_some_and(|last| last != share) {
            self.competed = Some(now);
        }
    }

    pub(super) fn add(&mut self, share: FlowShare) {
        *self.in_flight.entry(share).or_default() += 1;
        self.total += 1;
    }

    pub(super) fn remove(&mut self, share: FlowShare, now: Instant) {
        let Some(count) = self.in_flight.get_mut(&share) else { return };
        *count -= 1;
        self.total -= 1;
        if *count == 0 {
            self.in_flight.remove(&share);
        }
        if matches!(self.probe, Probe::Draining { .. }) && self.total < limits::SHARED_BATCHES_MIN {
            self.probe = Probe::Measuring { since: now, least: None, batches: 0 };
        }
    }

    /// Notes that a batch, in flight since `since`, is committed and synced.
    pub(super) fn on_done(&mut self, now: Instant, since: Instant) {
        self.rate.add(now, 1, self.base.unwrap_or_default());
        let Probe::Measuring { since: begun, least, batches } = &mut self.probe else { return };
        if since < *begun {
            return;
        }
        let took = now.saturating_duration_since(since);
        (*least, *batches) = (Some(least.map_or(took, |it| it.min(took))), *batches + 1);
        if *batches >= limits::PACE_PROBE_BATCHES {
            self.base = *least;
            self.probe = Probe::Idle { until: now + limits::PACE_PROBE_INTERVAL };
        }
    }

    /// Returns whether one more small batch of the share may be in flight.
    pub(super) fn has_capacity(&mut self, share: FlowShare, now: Instant) -> bool {
        self.total < self.batches_max(now) || self.is_below_floor(share)
    }

    /// Every share may have a few batches in flight, regardless of the others.
    pub(super) fn is_below_floor(&self, share: FlowShare) -> bool {
        self.in_flight.get(&share).is_none_or(|count| *count < limits::SHARE_BATCHES_MIN)
    }

    fn batches_max(&mut self, now: Instant) -> usize {
        let ago = |at| now.saturating_duration_since(at);
        if self.competed.is_none_or(|at| ago(at) >= limits::SHARED_AFTER_COMPETITION) {
            return usize::MAX;
        }
        match self.probe {
            Probe::Idle { until } if until <= now => {
                self.probe = Probe::Draining { since: now };
                return limits::SHARED_BATCHES_MIN;
            }
            Probe::Idle { .. } => {}
            Probe::Draining { since } | Probe::Measuring { since, .. }
                if ago(since) < limits::PACE_PROBE_MAX =>
            {
                return limits::SHARED_BATCHES_MIN;
            }
            // The log was too slow for the probe, or had no more small batches. Tries again later.
            Probe::Draining { .. } | Probe::Measuring { .. } => {
                if let Probe::Measuring { least: Some(least), .. } = self.probe {
                    self.base = Some(least);
                }
                self.probe = Probe::Idle { until: now + limits::PACE_PROBE_INTERVAL };
            }
        }
        let Some(base) = self.base else { return usize::MAX };
        let product = self.rate.highest(now, base) * base.as_secs_f64();
        ((f64::from(limits::PACE) * product) as usize).max(limits::SHARED_BATCHES_MIN)
    }
}
