//! Appends in order: one lane for each partition and producer of a connection.
//!
//! A lane sends the batches of consecutive requests over one append stream, without waiting for
//! acks in between. The first failure ends the stream. Its later batches were not stored then, and
//! the client sends them again, in order: until the failed batch comes again, the lane sends later
//! ones of an idempotent producer back. The lane itself repeats nothing that may have been stored:
//! only an idempotent producer can do that without making a second copy.

mod resend;
mod single;
mod stream;

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use helix_client::proto::log::v1::{Durability, EncodedBatch, ProducerIdentity};
use kafka_protocol::error::ResponseError;
use tokio::sync::{mpsc, oneshot};

use crate::state::GatewayState;
use crate::upstream::Upstream;
use stream::LaneTask;

/// Lanes of a connection that are kept. Beyond, those whose task has ended are removed.
const LANES_KEPT: usize = 1_000;

/// Partition, producer and durability of a lane.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct LaneKey {
    pub(crate) topic: String,
    pub(crate) partition: u32,
    /// Id and epoch of an idempotent producer.
    pub(crate) producer: Option<(u64, u32)>,
    pub(crate) durability: i32,
}

impl LaneKey {
    fn identity(&self) -> Option<ProducerIdentity> {
        self.producer.map(|(producer_id, epoch)| ProducerIdentity { producer_id, epoch })
    }

    fn durability(&self) -> Durability {
        Durability::try_from(self.durability).unwrap_or_default()
    }
}

/// A batch for a lane.
#[derive(Debug)]
pub(crate) struct LaneBatch {
    pub(crate) batch: EncodedBatch,
    /// Kafka's sequence of the first record, with a producer.
    pub(crate) sequence: Option<u32>,
    pub(crate) done: oneshot::Sender<LaneResult>,
}

impl LaneBatch {
    fn payload(&self) -> &Bytes {
        &self.batch.payload
    }
}

/// Offsets of a stored batch, or the code of its failure.
pub(crate) type LaneResult = Result<StoredOffsets, (ResponseError, String)>;

/// Offsets of a stored batch.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StoredOffsets {
    /// Offset of the first record; `None` if the durability does not wait for it.
    pub(crate) first: Option<u64>,
    /// First readable offset of the partition.
    pub(crate) log_start: Option<u64>,
}

/// The lanes of one connection.
#[derive(Debug)]
pub(crate) struct Lanes {
    state: Arc<GatewayState>,
    lanes: HashMap<LaneKey, mpsc::UnboundedSender<LaneBatch>>,
}

impl Lanes {
    pub(crate) fn new(state: Arc<GatewayState>) -> Self {
        Self { state, lanes: HashMap::new() }
    }

    /// Forgets all lanes; batches that were given to them are still sent.
    pub(crate) fn clear(&mut self) {
        self.lanes.clear();
    }

    /// Gives a batch to its lane. Batches of a lane are stored in the order of these calls.
    ///
    /// The requests in flight of the connection bound what waits in lanes.
    pub(crate) fn push(&mut self, upstream: &Arc<Upstream>, key: LaneKey, mut batch: LaneBatch) {
        if let Some(lane) = self.lanes.get(&key) {
            match lane.send(batch) {
                Ok(()) => return,
                // Its task has ended.
                Err(mpsc::error::SendError(unsent)) => batch = unsent,
            }
        }
        if self.lanes.len() >= LANES_KEPT {
            self.lanes.retain(|_, lane| !lane.is_closed());
        }
        let (lane, batches) = mpsc::unbounded_channel();
        // The receiver is in scope.
        let _ = lane.send(batch);
        let task = LaneTask::new(self.state.clone(), upstream.clone(), key.clone());
        tokio::spawn(task.run(batches));
        self.lanes.insert(key, lane);
    }
}

/// Returns the sequence in 64 bits that is nearest to the expected one.
///
/// Kafka's sequences have 31 bits: 0 follows 2^31 - 1.
fn widen_sequence(sequence: u32, expected: u64) -> u64 {
    const PERIOD: u64 = 1 << 31;
    let base = expected / PERIOD;
    let candidates = [base.checked_sub(1), Some(base), base.checked_add(1)];
    let sequence = u64::from(sequence) % PERIOD;
    candidates
        .into_iter()
        .flatten()
        .filter_map(|base| base.checked_mul(PERIOD)?.checked_add(sequence))
        .min_by_key(|candidate| candidate.abs_diff(expected))
        .unwrap_or(sequence)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_wrap_as_kafka_counts_them() {
        const PERIOD: u64 = 1 << 31;
        for expected in [0, 1, 1000, PERIOD - 1, PERIOD, PERIOD + 5, 7 * PERIOD - 1, 7 * PERIOD] {
            // The next batch, a retry of an earlier batch, and a batch that leaves a gap.
            for sequence in [expected, expected.saturating_sub(300), expected + 300] {
                let kafka = u32::try_from(sequence % PERIOD).unwrap();
                assert_eq!(widen_sequence(kafka, expected), sequence, "{sequence} at {expected}");
            }
        }
        assert_eq!(widen_sequence(5, 0), 5);
    }
}
