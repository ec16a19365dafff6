//! Measures the time from sending a batch to its ack, with one batch at a time per partition.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use helix_client::{Client, Producer, ProducerOptions};
use helix_proto::log::v1::Record;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::sync::lock;

/// Topic of the probe; its records are not checked.
pub(super) const PROBE_TOPIC: &str = "probe";

/// Running probes.
pub(super) struct AckProbe {
    stop: watch::Sender<bool>,
    writers: JoinSet<()>,
    times_so_far: Arc<Mutex<AckTimes>>,
}

/// Acks and errors since the last call of [`AckProbe::take`].
#[derive(Debug, Default)]
pub(super) struct AckTimes {
    times: Vec<Duration>,
    pub(super) errors: u64,
}

impl AckTimes {
    /// Returns a percentile of the ack times.
    pub(super) fn percentile(&mut self, percent: usize) -> Duration {
        self.times.sort_unstable();
        let index = (self.times.len() * percent).div_ceil(100).saturating_sub(1);
        self.times.get(index).copied().unwrap_or_default()
    }

    pub(super) fn count(&self) -> usize {
        self.times.len()
    }
}

impl AckProbe {
    pub(super) fn start(client: &Client, partitions: u32) -> Self {
        let (stop, stopped) = watch::channel(false);
        let times_so_far = Arc::new(Mutex::default());
        let mut writers = JoinSet::new();
        for partition in 0..partitions {
            let producer = client.producer(ProducerOptions::default());
            writers.spawn(write(producer, partition, Arc::clone(&times_so_far), stopped.clone()));
        }
        Self { stop, writers, times_so_far }
    }

    /// Returns the times since the last call.
    pub(super) fn take(&self) -> AckTimes {
        std::mem::take(&mut *lock(&self.times_so_far))
    }

    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
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
    times_so_far: Arc<Mutex<AckTimes>>,
    stopped: watch::Receiver<bool>,
) {
    let value = Some(vec![7; 100].into());
    let records = [Record { value, ..Record::default() }];
    while !*stopped.borrow() {
        let sent = Instant::now();
        let result = producer.append(PROBE_TOPIC, partition, &records[..]).await;
        {
            let mut times_so_far = lock(&times_so_far);
            match result {
                Ok(_) => times_so_far.times.push(sent.elapsed()),
                Err(_) => times_so_far.errors += 1,
            }
        }
        // Without a pause one client would use both cores of a small host.
        sleep(Duration::from_millis(2)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_recorded_times() {
        let mut times_so_far = AckTimes::default();
        assert_eq!(times_so_far.percentile(99), Duration::ZERO);
        times_so_far.times = (1..=200).rev().map(Duration::from_millis).collect();
        assert_eq!(times_so_far.percentile(50), Duration::from_millis(100));
        assert_eq!(times_so_far.percentile(99), Duration::from_millis(198));
        assert_eq!(times_so_far.percentile(100), Duration::from_millis(200));
    }
}
