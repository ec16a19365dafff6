//! What happened, in the order in which it did: the clients' history for the checker, and a log of
//! everything for comparing two runs of one seed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use helix_checker::{Event, Line, Verdict};

/// Clones are the same record.
#[derive(Debug, Clone, Default)]
pub struct Recorder(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    history: Vec<Line>,
    trace: Vec<String>,
    now: Duration,
    keeps_trace: bool,
    hash: u64,
    acks: BTreeMap<u32, u64>,
    under_way: BTreeMap<u32, u64>,
}

impl Recorder {
    pub fn new(keeps_trace: bool) -> Self {
        Self(Arc::new(Mutex::new(Inner { keeps_trace, ..Inner::default() })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Only ever added to; a panic elsewhere leaves whole lines.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A tick begins. `wire` is what went over the network in the one before, as a number.
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

    pub fn add(&self, event: Event) {
        let mut inner = self.lock();
        let text = format!("{event:?}");
        inner.note(&text);
        let at_us = u64::try_from(inner.now.as_micros()).unwrap_or(u64::MAX);
        inner.history.push(Line { at_us, event });
    }

    pub fn add_all(&self, events: impl IntoIterator<Item = Event>) {
        events.into_iter().for_each(|event| self.add(event));
    }

    /// Notes what is no part of the clients' history.
    pub fn note(&self, text: &str) {
        self.lock().note(text);
    }

    /// A batch is on its way to a partition.
    pub fn on_begin(&self, partition: u32) {
        *self.lock().under_way.entry(partition).or_default() += 1;
    }

    /// It has its outcome.
    pub fn on_end(&self, partition: u32, acked: bool) {
        let mut inner = self.lock();
        if let Some(count) = inner.under_way.get_mut(&partition) {
            *count = count.saturating_sub(1);
        }
        if acked {
            *inner.acks.entry(partition).or_default() += 1;
        }
    }

    pub fn under_way(&self) -> u64 {
        self.lock().under_way.values().sum()
    }

    pub fn acks(&self, partition: u32) -> u64 {
        self.lock().acks.get(&partition).copied().unwrap_or(0)
    }

    pub fn check(&self) -> Verdict {
        helix_checker::check(&self.lock().history)
    }

    pub fn lines(&self) -> usize {
        self.lock().history.len()
    }

    /// A number that two equal runs share.
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
