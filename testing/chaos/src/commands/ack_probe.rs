//! Measures the time from sending a batch to its ack, with one batch at a time per partition.

use std::sync::Arc;
use std::time::Duration;

use helix_client::{Client, Producer, ProducerOptions};
use helix_proto::log::v1::Record;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

/// Topic for probes; its records are not checked.
pub(super) const PROBE_TOPIC: &str = "probe";

/// Writers of one batch at a time, one for each partition.
pub(super) struct AckProbe {
    stop: watch::Sender<bool>,
    writers: JoinSet<()>,
    partitions: Vec<Arc<watch::Sender<PartitionAcks>>>,
}

/// Acks of one partition.
#[derive(Debug)]
pub(super) struct PartitionAcks {
    /// Time at which the batch of the last ack was sent.
    pub(super) sent: Instant,
    /// Time of the last ack.
    pub(super) at: Instant,
    since_taken: AckTimes,
}

/// Acks and errors since the last call of [`AckProbe::take`].
#[derive(Debug, Default)]
pub(super) struct AckTimes {
    times: Vec<Duration>,
    pub(super) errors: u64,
    /// Longest time of a partition without an ack.
    pub(super) gap: Duration,
}

impl AckTimes {
    /// Returns a percentile of the ack times.
    pub(super) fn percentile(&mut self, percent: usize) -> Duration {
        percentile(&mut self.times, percent)
    }

    pub(super) fn count(&self) -> usize {
        self.times.len()
    }
}

/// Returns a percentile; zero of nothing.
pub(super) fn percentile(times: &mut [Duration], percent: usize) -> Duration {
    times.sort_unstable();
    let index = (times.len() * percent).div_ceil(100).saturating_sub(1);
    times.get(index).copied().unwrap_or_default()
}

impl AckProbe {
    pub(super) fn start(client: &Client, topic: &'static str, partitions: u32) -> Self {
        let (stop, stopped) = watch::channel(false);
        let producer = client.producer(ProducerOptions::default());
        let mut writers = JoinSet::new();
        let partitions = (0..partitions).map(|partition| {
            let now = Instant::now();
            let first = PartitionAcks { sent: now, at: now, since_taken: AckTimes::default() };
            let acks = Arc::new(watch::Sender::new(first));
            let of = (topic, partition);
            writers.spawn(write(producer.clone(), of, Arc::clone(&acks), stopped.clone()));
            acks
        });
        let partitions = partitions.collect();
        Self { stop, writers, partitions }
    }

    /// Returns the acks of all partitions since the last call.
    pub(super) fn take(&self) -> AckTimes {
        let mut all = AckTimes::default();
        for partition in &self.partitions {
            partition.send_modify(|acks| {
                let now = Instant::now();
                let taken = std::mem::take(&mut acks.since_taken);
                all.gap = all.gap.max(taken.gap).max(now - acks.at);
                all.times.extend(taken.times);
                all.errors += taken.errors;
                // The next gap begins here.
                acks.at = now;
            });
        }
        all
    }

    /// Returns the acks of each partition as they arrive.
    pub(super) fn partitions(&self) -> Vec<watch::Receiver<PartitionAcks>> {
        self.partitions.iter().map(|acks| acks.subscribe()).collect()
    }

    pub(super) async fn stop(&mut self) -> anyhow::Result<()> {
        self.stop.send_replace(true);
        while let Some(writer) = self.writers.join_next().await {
            writer?;
        }
        Ok(())
    }
}

async fn write(
    producer: Producer,
    (topic, partition): (&str, u32),
    acks: Arc<watch::Sender<PartitionAcks>>,
    stopped: watch::Receiver<bool>,
) {
    let value = Some(vec![7; 100].into());
    let records = [Record { value, ..Record::default() }];
    while !*stopped.borrow() {
        let sent = Instant::now();
        let result = producer.append(topic, partition, &records[..]).await;
        acks.send_modify(|acks| match result {
            Ok(_) => {
                let at = Instant::now();
                acks.since_taken.times.push(at - sent);
                acks.since_taken.gap = acks.since_taken.gap.max(at - acks.at);
                (acks.sent, acks.at) = (sent, at);
            }
            Err(_) => acks.since_taken.errors += 1,
        });
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
