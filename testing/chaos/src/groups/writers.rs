//! Writers for a group: one idempotent producer for each partition, with one batch in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use helix_client::{Client, Producer, ProducerOptions};
use helix_proto::log::v1::Record;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{SharedCheck, lock};
use crate::workload::TOPIC;

/// Pause after each batch: the members are under test, and not the rate of writes.
const PACE: Duration = Duration::from_millis(40);

/// Records of a batch, at most.
const RECORDS_MAX: u64 = 5;

/// Running writers.
#[derive(Debug)]
pub(crate) struct GroupWriters {
    stop: watch::Sender<bool>,
    writers: JoinSet<()>,
}

impl GroupWriters {
    pub(crate) fn start(client: &Client, partitions: u32, check: &SharedCheck) -> Self {
        let (stop, stopped) = watch::channel(false);
        let next_value = Arc::new(AtomicU64::new(0));
        let mut writers = JoinSet::new();
        for partition in 0..partitions {
            let producer = client.producer(ProducerOptions::default());
            let (next_value, check) = (next_value.clone(), check.clone());
            writers.spawn(write(producer, partition, next_value, check, stopped.clone()));
        }
        Self { stop, writers }
    }

    /// Stops the writers, and waits for their last acks.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        self.stop.send_replace(true);
        while let Some(writer) = self.writers.join_next().await {
            writer?;
        }
        Ok(())
    }
}

async fn write(
    producer: Producer,
    partition: u32,
    next_value: Arc<AtomicU64>,
    check: SharedCheck,
    stopped: watch::Receiver<bool>,
) {
    while !*stopped.borrow() {
        let first = next_value.fetch_add(RECORDS_MAX, Ordering::Relaxed);
        // Batches of every length.
        let values: Vec<u64> = (first..=first + first / RECORDS_MAX % RECORDS_MAX).collect();
        let record = |it: &u64| Record { value: Some(it.to_string().into()), ..Record::default() };
        let records: Vec<Record> = values.iter().map(record).collect();
        // The outcome of a failed append is not known; if it is in the log, members receive it.
        if let Ok(ack) = producer.append(TOPIC, partition, &records[..]).await
            && let Some(offset) = ack.first_offset
        {
            lock(&check).on_ack(partition, offset, &values);
        }
        sleep(PACE).await;
    }
}
