//! Producers that send single records at the times of a budget, and note each ack.
//!
//! The client batches the records. Acks are noted by a task of their own, so that a send that waits
//! for buffer space does not delay them.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use helix_client::{DeliveryFuture, Producer};
use helix_proto::log::v1::Record;
use prost_types::Timestamp;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::budget::SendBudget;
use crate::interval_meter::SharedMeter;
use crate::messages::MessageSource;
use crate::phase::FAILURES_IN_A_ROW_MAX;

/// Sent records that wait to be watched by the task that notes acks.
const UNWATCHED_MAX: usize = 4096;
/// Buffers of all clients together, and the limits of one of them.
const BUFFERS_BYTES: usize = 256 << 20;
const BUFFER_BYTES_MIN: usize = 256 << 10;
const BUFFER_BYTES_MAX: usize = 32 << 20;

/// Returns the bytes that each of this many producers or consumers may buffer.
pub(crate) fn buffer_bytes(clients: usize) -> usize {
    (BUFFERS_BYTES / clients.max(1)).clamp(BUFFER_BYTES_MIN, BUFFER_BYTES_MAX)
}

/// Sends the records of one producer.
#[derive(Debug)]
pub(crate) struct SingleSender {
    pub(crate) producer: Producer,
    pub(crate) topic: String,
    pub(crate) messages: MessageSource,
    /// The event time of a record is its intended send, counted from this moment.
    pub(crate) epoch: Instant,
    pub(crate) meter: Arc<SharedMeter>,
    /// Number of this task in the meter.
    pub(crate) task: usize,
}

/// Record whose ack is outstanding.
#[derive(Debug)]
struct UnackedRecord {
    delivery: DeliveryFuture,
    intended: Instant,
    sent: Instant,
    bytes: u64,
}

impl SingleSender {
    /// Sends until the budget is used up, and waits for the acks.
    ///
    /// Stops early after several sends in a row that the client rejects.
    pub(crate) async fn run(&mut self, budget: &SendBudget) {
        let (watch, unacked) = mpsc::channel(UNWATCHED_MAX);
        let noting = tokio::spawn(note_acks(unacked, self.meter.clone(), self.task));
        self.send_all(budget, watch).await;
        self.producer.flush().await;
        // Ignored: the task is not aborted, and a panic in it has been printed.
        let _ = noting.await;
    }

    async fn send_all(&mut self, budget: &SendBudget, watch: mpsc::Sender<UnackedRecord>) {
        let mut failures_in_a_row = 0;
        while failures_in_a_row < FAILURES_IN_A_ROW_MAX
            && let Some(slot) = budget.take(1).await
        {
            let (key, value) = self.messages.next();
            let bytes = value.len() as u64;
            let sent = Instant::now();
            let intended = slot.intended.unwrap_or(sent);
            let event_time = Some(timestamp(intended.saturating_duration_since(self.epoch)));
            let record = Record { key, value: Some(value), event_time, ..Record::default() };
            match self.producer.send(&self.topic, record).await {
                Ok(delivery) => {
                    failures_in_a_row = 0;
                    let record = UnackedRecord { delivery, intended, sent, bytes };
                    if watch.send(record).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    failures_in_a_row += 1;
                    self.meter.note_failure(self.task, &error);
                }
            }
        }
    }
}

async fn note_acks(
    mut unacked: mpsc::Receiver<UnackedRecord>,
    meter: Arc<SharedMeter>,
    task: usize,
) {
    let mut in_flight = FuturesUnordered::new();
    let mut is_open = true;
    while is_open || !in_flight.is_empty() {
        tokio::select! {
            biased;
            Some((result, intended, sent, bytes)) = in_flight.next(), if !in_flight.is_empty() => {
                let latency = Instant::now().saturating_duration_since(intended);
                match result {
                    Ok(_) => meter.note_ack(task, bytes, latency, sent - intended),
                    Err(error) => meter.note_failure(task, &error),
                }
            }
            record = unacked.recv(), if is_open => match record {
                Some(UnackedRecord { delivery, intended, sent, bytes }) => {
                    in_flight.push(async move { (delivery.await, intended, sent, bytes) });
                }
                None => is_open = false,
            }
        }
    }
}

/// Returns the event time of a moment of the run.
fn timestamp(since_epoch: Duration) -> Timestamp {
    Timestamp {
        seconds: i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since_epoch.subsec_nanos()).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_all_producers_are_bounded() {
        assert_eq!(buffer_bytes(1), BUFFER_BYTES_MAX);
        assert_eq!(buffer_bytes(64), 4 << 20);
        assert_eq!(buffer_bytes(1 << 20), BUFFER_BYTES_MIN);
        assert_eq!(buffer_bytes(0), BUFFER_BYTES_MAX);
    }

    #[test]
    fn event_time_is_the_time_since_the_start() {
        let time = timestamp(Duration::new(3, 7));
        assert_eq!((time.seconds, time.nanos), (3, 7));
        let read = helix_proto::time::system_time(time).unwrap();
        let since = read.duration_since(std::time::SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(since, Duration::new(3, 7));
    }
}
