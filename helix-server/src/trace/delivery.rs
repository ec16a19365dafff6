//! Deliveries: the first read of each traced batch after it was appended.
//!
//! A waiting reader may get a batch before the producer's call goes on and its trace ends. Reads
//! are therefore remembered while traces are under way.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::span::SpanIds;
use crate::sync;

/// Traced batches that wait for a reader; the oldest is given up for a new one.
const EXPECTED_MAX: usize = 256;

/// Reads that are remembered while traces are under way.
const READS_MAX: usize = 256;

/// Age at which a batch no longer waits for a reader.
const EXPECTED_AGE_MAX: Duration = Duration::from_secs(60);

/// A traced batch that waits for its first reader.
#[derive(Debug)]
pub(super) struct ExpectedDelivery {
    pub(super) partition_id: u64,
    pub(super) offsets: Range<u64>,
    pub(super) topic: String,
    pub(super) partition: u32,
    pub(super) applied: Instant,
    pub(super) applied_us: u64,
    pub(super) ids: SpanIds,
}

impl ExpectedDelivery {
    fn is_in(&self, partition_id: u64, offsets: &Range<u64>) -> bool {
        self.partition_id == partition_id
            && self.offsets.start < offsets.end
            && offsets.start < self.offsets.end
    }
}

#[derive(Debug, Default)]
pub(super) struct Deliveries {
    /// Traces under way, and batches that wait for a reader.
    pending: AtomicUsize,
    state: Mutex<DeliveryState>,
}

#[derive(Debug, Default)]
struct DeliveryState {
    /// Traces under way.
    active: usize,
    expected: VecDeque<ExpectedDelivery>,
    /// Reads since the first trace under way began.
    reads: VecDeque<(u64, Range<u64>, Instant)>,
}

impl Deliveries {
    pub(super) fn is_idle(&self) -> bool {
        self.pending.load(Ordering::Relaxed) == 0
    }

    /// Notes that a trace begins.
    pub(super) fn begin(&self) {
        let mut state = sync::lock(&self.state);
        state.active += 1;
        self.publish(&state);
    }

    /// Ends a trace. Returns its batch and the time of its first read, if it was read already.
    pub(super) fn finish(
        &self,
        expected: Option<ExpectedDelivery>,
    ) -> Option<(ExpectedDelivery, Instant)> {
        let mut state = sync::lock(&self.state);
        let mut delivered = None;
        if let Some(expected) = expected {
            let is_read = |(partition, offsets, _): &&(u64, Range<u64>, Instant)| {
                expected.is_in(*partition, offsets)
            };
            match state.reads.iter().find(is_read).map(|(.., at)| *at) {
                Some(at) => delivered = Some((expected, at)),
                None => {
                    if state.expected.len() == EXPECTED_MAX {
                        state.expected.pop_front();
                    }
                    state.expected.push_back(expected);
                }
            }
        }
        state.active = state.active.saturating_sub(1);
        if state.active == 0 {
            state.reads.clear();
        }
        self.publish(&state);
        delivered
    }

    /// Notes a read. Returns the batches that it delivers first.
    pub(super) fn on_read(
        &self,
        partition_id: u64,
        offsets: &Range<u64>,
    ) -> Vec<(ExpectedDelivery, Instant)> {
        let now = Instant::now();
        let mut state = sync::lock(&self.state);
        if state.active > 0 {
            if state.reads.len() == READS_MAX {
                state.reads.pop_front();
            }
            state.reads.push_back((partition_id, offsets.clone(), now));
        }
        let is_over = |it: &ExpectedDelivery| now.duration_since(it.applied) > EXPECTED_AGE_MAX;
        while state.expected.front().is_some_and(is_over) {
            state.expected.pop_front();
        }
        let (delivered, expected) = std::mem::take(&mut state.expected)
            .into_iter()
            .partition::<Vec<_>, _>(|it| it.is_in(partition_id, offsets));
        state.expected = expected.into();
        self.publish(&state);
        delivered.into_iter().map(|it| (it, now)).collect()
    }

    fn publish(&self, state: &DeliveryState) {
        self.pending.store(state.active + state.expected.len(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expected(partition_id: u64, offsets: Range<u64>) -> ExpectedDelivery {
        ExpectedDelivery {
            partition_id,
            offsets,
            topic: "t".to_owned(),
            partition: 0,
            applied: Instant::now(),
            applied_us: 0,
            ids: SpanIds { trace_id: [1; 16], parent: None, span_id: [2; 8] },
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_read_delivers_a_batch_before_or_after_its_ack() {
        let deliveries = Deliveries::default();
        assert!(deliveries.is_idle());
        deliveries.begin();
        assert!(deliveries.on_read(7, &(0..5)).is_empty());
        assert!(deliveries.finish(Some(expected(7, 3..4))).is_some(), "read before the ack");
        assert!(deliveries.is_idle(), "delivered once");
        deliveries.begin();
        assert!(
            deliveries.finish(Some(expected(7, 5..8))).is_none(),
            "an earlier read is no match"
        );
        assert!(deliveries.on_read(8, &(5..8)).is_empty(), "another partition");
        assert!(deliveries.on_read(7, &(0..5)).is_empty(), "other offsets");
        assert_eq!(deliveries.on_read(7, &(7..9)).len(), 1);
        assert!(deliveries.is_idle());
    }

    #[tokio::test(start_paused = true)]
    async fn batches_without_a_reader_are_given_up() {
        let deliveries = Deliveries::default();
        for offset in 0..2 * EXPECTED_MAX as u64 {
            deliveries.begin();
            assert!(deliveries.finish(Some(expected(1, offset..offset + 1))).is_none());
        }
        assert_eq!(deliveries.pending.load(Ordering::Relaxed), EXPECTED_MAX);
        tokio::time::advance(EXPECTED_AGE_MAX * 2).await;
        assert!(deliveries.on_read(1, &(0..1_000)).is_empty());
        assert!(deliveries.is_idle());
    }
}
