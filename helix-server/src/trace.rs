//! Traces: one for each sampled batch, from its append to its first reader.
//!
//! A sampled batch carries a [`BatchStamps`]. Once it is acknowledged, its times go to the exporter
//! (`otlp.rs`), which makes the spans from them. There is no span while the batch is under way, and
//! a batch that is not sampled costs one comparison.

mod context;
mod delivery;
#[cfg(feature = "otlp")]
mod otlp;
mod span;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::clock::Clock;
use crate::limits::TRACES_QUEUED_MAX;
use crate::metrics::Counter;
use crate::random::Random;
use crate::stages::{BatchStamps, ProposalTimes};
pub use context::{TRACEPARENT, TraceContext};
use delivery::{Deliveries, ExpectedDelivery};
#[cfg(feature = "otlp")]
pub use otlp::{OtlpExporter, OtlpSettings};
pub use span::{AppendTrace, DeliveryTrace, FinishedTrace, SpanIds, TraceSpan};

/// True if this program can export traces.
pub const CAN_EXPORT: bool = cfg!(feature = "otlp");

/// Decides which batches are traced, and passes their times to an exporter.
pub struct Tracer {
    sampler: Sampler,
    clock: Arc<dyn Clock>,
    random: Random,
    finished: mpsc::Sender<FinishedTrace>,
    deliveries: Deliveries,
    counts: Arc<TraceCounts>,
}

/// Counts of traces since the start.
#[derive(Debug, Default)]
pub struct TraceCounts {
    pub exported: Counter,
    /// Because the collector was too slow or not there.
    pub dropped: Counter,
}

/// A traced batch that is not acknowledged yet.
#[derive(Debug)]
pub struct ActiveTrace {
    ids: SpanIds,
    started_us: u64,
    stamps: Arc<BatchStamps>,
}

/// The batch of a trace, once its fate is known.
#[derive(Debug, Clone)]
pub struct TracedBatch {
    pub topic: String,
    pub partition: u32,
    pub partition_id: u64,
    pub shard_id: u64,
    pub records: u32,
    pub bytes: u64,
    /// First and next offset; absent if the append failed or was acknowledged before apply.
    pub offsets: Option<(u64, u64)>,
    pub ack: Option<ProposalTimes>,
    pub log_base: Option<Instant>,
    /// Why the append failed.
    pub error: Option<String>,
}

impl fmt::Debug for Tracer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tracer").field("sampler", &self.sampler).finish_non_exhaustive()
    }
}

impl Tracer {
    /// Creates a tracer that samples this share of the batches without a trace context. Returns
    /// the receiver of its traces, for an exporter.
    pub fn new(
        share: f64,
        clock: Arc<dyn Clock>,
        random: Random,
    ) -> (Self, mpsc::Receiver<FinishedTrace>) {
        let (finished, receiver) = mpsc::channel(TRACES_QUEUED_MAX);
        let tracer = Self {
            sampler: Sampler::new(share),
            clock,
            random,
            finished,
            deliveries: Deliveries::default(),
            counts: Arc::default(),
        };
        (tracer, receiver)
    }

    pub fn counts(&self) -> &Arc<TraceCounts> {
        &self.counts
    }

    /// Begins the trace of a batch, if its context or the sampler asks for one.
    ///
    /// A context decides also against a trace.
    pub fn begin(
        &self,
        parent: Option<TraceContext>,
        started: Instant,
    ) -> Option<Box<ActiveTrace>> {
        let is_sampled = match &parent {
            Some(parent) => parent.is_sampled,
            None => self.sampler.takes_next(),
        };
        is_sampled.then(|| self.active(parent, started))
    }

    #[cold]
    fn active(&self, parent: Option<TraceContext>, started: Instant) -> Box<ActiveTrace> {
        let ago = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
        let (high, low) = (self.random.next_u64(), self.random.next_u64());
        // An id of zeroes is invalid.
        let trace_id = (u128::from(high) << 64 | u128::from(low)).max(1).to_be_bytes();
        let ids = SpanIds {
            trace_id: parent.as_ref().map_or(trace_id, |parent| parent.trace_id),
            parent: parent.map(|parent| parent.span_id),
            span_id: self.span_id(),
        };
        self.deliveries.begin();
        Box::new(ActiveTrace {
            ids,
            started_us: self.clock.now_us().saturating_sub(ago),
            stamps: Arc::new(BatchStamps::new(started)),
        })
    }

    fn span_id(&self) -> [u8; 8] {
        self.random.next_u64().max(1).to_be_bytes()
    }

    /// Ends the trace of a batch that is acknowledged, or whose append failed.
    pub fn finish(&self, active: ActiveTrace, batch: TracedBatch) {
        let ActiveTrace { ids, started_us, stamps } = active;
        let applied = stamps.applied();
        let expected =
            batch.offsets.zip(applied).map(|((first, next), applied)| ExpectedDelivery {
                partition_id: batch.partition_id,
                offsets: first..next,
                topic: batch.topic.clone(),
                partition: batch.partition,
                applied,
                applied_us: started_us + micros_between(stamps.started(), applied),
                ids: ids.clone(),
            });
        let acked = Instant::now();
        self.send(FinishedTrace::Append(Box::new(AppendTrace {
            ids,
            started_us,
            stamps,
            acked,
            batch,
        })));
        if let Some((expected, read_at)) = self.deliveries.finish(expected) {
            self.on_delivered(expected, read_at);
        }
    }

    /// Ends the trace of a batch whose caller is gone.
    fn abandon(&self) {
        // Ignored: without offsets nothing is expected.
        let _ = self.deliveries.finish(None);
    }

    /// Notes that a reader gets records of a partition. Costs one atomic read while no trace waits
    /// for a reader.
    pub fn on_read(&self, partition_id: u64, offsets: std::ops::Range<u64>) {
        if self.deliveries.is_idle() {
            return;
        }
        for (expected, read_at) in self.deliveries.on_read(partition_id, &offsets) {
            self.on_delivered(expected, read_at);
        }
    }

    fn on_delivered(&self, expected: ExpectedDelivery, read_at: Instant) {
        let took_us = micros_between(expected.applied, read_at);
        let delivery = DeliveryTrace {
            ids: SpanIds {
                parent: Some(expected.ids.span_id),
                span_id: self.span_id(),
                ..expected.ids
            },
            started_us: expected.applied_us,
            ended_us: expected.applied_us + took_us,
            topic: expected.topic,
            partition: expected.partition,
            offset: expected.offsets.start,
        };
        self.send(FinishedTrace::Delivery(Box::new(delivery)));
    }

    fn send(&self, trace: FinishedTrace) {
        if self.finished.try_send(trace).is_err() {
            self.counts.dropped.add(1);
        }
    }
}

/// The trace of a batch, from its arrival on. Dropped without an end, as with a call that its
/// client cancels, it leaves no trace.
#[derive(Debug)]
pub struct TraceGuard {
    tracer: Arc<Tracer>,
    active: Option<Box<ActiveTrace>>,
}

impl TraceGuard {
    /// As [`Tracer::begin`].
    pub fn begin(
        tracer: &Arc<Tracer>,
        parent: Option<TraceContext>,
        started: Instant,
    ) -> Option<Self> {
        let active = tracer.begin(parent, started)?;
        Some(Self { tracer: tracer.clone(), active: Some(active) })
    }

    pub fn stamps(&self) -> Option<&Arc<BatchStamps>> {
        self.active.as_ref().map(|active| &active.stamps)
    }

    /// As [`Tracer::finish`].
    pub fn finish(mut self, batch: TracedBatch) {
        if let Some(active) = self.active.take() {
            self.tracer.finish(*active, batch);
        }
    }
}

impl Drop for TraceGuard {
    fn drop(&mut self) {
        if self.active.is_some() {
            self.tracer.abandon();
        }
    }
}

fn micros_between(from: Instant, to: Instant) -> u64 {
    u64::try_from(to.saturating_duration_since(from).as_micros()).unwrap_or(u64::MAX)
}

/// Takes a share of the batches, evenly spread. Uses no random numbers, which need a lock.
#[derive(Debug)]
struct Sampler {
    /// Share of [`Sampler::WHOLE`].
    share: u64,
    sum: AtomicU64,
}

impl Sampler {
    const WHOLE: u64 = 1 << 32;

    fn new(share: f64) -> Self {
        let share = (share.clamp(0.0, 1.0) * Self::WHOLE as f64) as u64;
        Self { share, sum: AtomicU64::new(0) }
    }

    fn takes_next(&self) -> bool {
        if self.share == 0 {
            return false;
        }
        let before = self.sum.fetch_add(self.share, Ordering::Relaxed);
        // The sum passes a multiple of the whole.
        before % Self::WHOLE + self.share >= Self::WHOLE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sampler_takes_its_share() {
        for (share, expected) in [(0.0, 0), (0.001, 1), (0.25, 250), (0.5, 500), (1.0, 1_000)] {
            let sampler = Sampler::new(share);
            let taken = (0..1_000).filter(|_| sampler.takes_next()).count();
            assert!(taken.abs_diff(expected) <= 1, "{share}: {taken}");
        }
    }

    #[tokio::test]
    async fn a_context_decides_for_and_against_a_trace() {
        let clock = Arc::new(crate::clock::SystemClock);
        let context = |is_sampled| TraceContext { trace_id: [7; 16], span_id: [8; 8], is_sampled };
        let (never, _traces) = Tracer::new(0.0, clock.clone(), Random::new(Some(1)));
        let now = Instant::now();
        assert!(never.begin(None, now).is_none());
        let active = never.begin(Some(context(true)), now).unwrap();
        assert_eq!((active.ids.trace_id, active.ids.parent), ([7; 16], Some([8; 8])));
        let (always, _traces) = Tracer::new(1.0, clock, Random::new(Some(1)));
        assert!(always.begin(Some(context(false)), now).is_none());
        let active = always.begin(None, now).unwrap();
        assert!(active.ids.parent.is_none() && active.ids.trace_id != [0; 16]);
    }
}
