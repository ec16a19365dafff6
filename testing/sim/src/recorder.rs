//! Records events in order: the clients' history for the checker, and a trace of everything for
//! comparing two runs of one seed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use helix_checker::{HistoryEvent, HistoryLine, HistoryVerdict};

/// Shared recorder of a run. Clones share one record.
#[derive(Debug, Clone, Default)]
pub struct Recorder(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    history: Vec<HistoryLine>,
    trace: Vec<String>,
    now: Duration,
    keeps_trace: bool,
    hash: u64,
    acks: BTreeMap<u32, u64>,
    batches_in_flight: BTreeMap<u32, u64>,
}

impl Recorder {
    pub fn new(keeps_trace: bool) -> Self {
        Self(Arc::new(Mutex::new(Inner { keeps_trace, ..Inner::default() })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Append-only, so a panic elsewhere leaves complete lines.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a tick. `wire` is a hash of the network traffic of the previous tick.
    pub fn on_tick(&self, now: Duration, wire: u64) {
        let mut inner = self.lock();
        inner.now = now;
        if wire != 0 {
            inner.hash = (inner.hash ^ wire).wrapping_mul(0x0100_0000_01b3);
            if inner.keeps_trace {
                let line = format!("{:>10.3} wire {wire:016x}", now.as_secs_f64() * 1000.0);
                inner.trace.push(line);
            }
        }
    }

    pub fn add(&self, event: HistoryEvent) {
        let mut inner = self.lock();
        let text = format!("{event:?}");
        inner.note(&text);
        let at_us = u64::try_from(inner.now.as_micros()).unwrap_or(u64::MAX);
        inner.history.push(HistoryLine { at_us, event });
    }

    pub fn add_all(&self, events: impl IntoIterator<Item = HistoryEvent>) {
        events.into_iter().for_each(|event| self.add(event));
    }

    /// Adds a line to the trace only.
    pub fn note(&self, text: &str) {
        self.lock().note(text);
    }

    /// Counts a batch in flight to a partition.
    pub fn on_begin(&self, partition: u32) {
        *self.lock().batches_in_flight.entry(partition).or_default() += 1;
    }

    /// Counts the outcome of a batch.
    pub fn on_end(&self, partition: u32, acked: bool) {
        let mut inner = self.lock();
        if let Some(count) = inner.batches_in_flight.get_mut(&partition) {
            *count = count.saturating_sub(1);
        }
        if acked {
            *inner.acks.entry(partition).or_default() += 1;
        }
    }

    pub fn batches_in_flight(&self) -> u64 {
        self.lock().batches_in_flight.values().sum()
    }

    pub fn acks(&self, partition: u32) -> u64 {
        self.lock().acks.get(&partition).copied().unwrap_or(0)
    }

    pub fn check(&self) -> HistoryVerdict {
        helix_checker::check(&self.lock().history)
    }

    pub fn lines(&self) -> usize {
        self.lock().history.len()
    }

    /// Hash of the trace: equal for equal runs.
    pub fn hash(&self) -> u64 {
        self.lock().hash
    }

    pub fn trace(&self) -> Vec<String> {
        self.lock().trace.clone()
    }
}

impl Inner {
    fn note(&mut self, text: &str) {
        let line = format!("{:>10.3} {text}", self.now.as_secs_f64() * 1000.0);
        // FNV-1a.
        for byte in line.bytes() {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        if self.keeps_trace {
            self.trace.push(line);
        }
    }
}
