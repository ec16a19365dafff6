//! A writer that measures what an application feels: the time from handing a batch over to its
//! ack, one batch at a time to each partition, phase by phase.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use helix_client::{Client, Producer, ProducerOptions};
use helix_proto::log::v1::Record;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

/// The topic of the probe: what it writes is no part of what is checked.
pub(super) const PROBE_TOPIC: &str = "probe";

/// Running probes.
pub(super) struct Probe {
    stop: watch::Sender<bool>,
    writers: JoinSet<()>,
    heard: Arc<Mutex<Heard>>,
}

/// What came back since the phase began.
#[derive(Debug, Default)]
pub(super) struct Heard {
    times: Vec<Duration>,
    pub(super) errors: u64,
}

impl Heard {
    /// The time that this part of the acks did not exceed.
    pub(super) fn percentile(&mut self, percent: usize) -> Duration {
        self.times.sort_unstable();
        let place = (self.times.len() * percent).div_ceil(100).saturating_sub(1);
        self.times.get(place).copied().unwrap_or_default()
    }

    pub(super) fn count(&self) -> usize {
        self.times.len()
    }
}

impl Probe {
    pub(super) fn start(client: &Client, partitions: u32) -> Self {
        let (stop, stopped) = watch::channel(false);
        let heard = Arc::new(Mutex::default());
        let mut writers = JoinSet::new();
        for partition in 0..partitions {
            let producer = client.producer(ProducerOptions::default());
            writers.spawn(write(producer, partition, Arc::clone(&heard), stopped.clone()));
        }
        Self { stop, writers, heard }
    }

    /// What was heard since the last call.
    pub(super) fn take(&self) -> Heard {
        std::mem::take(&mut *self.heard.lock().expect("no panic while it is held"))
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
    heard: Arc<Mutex<Heard>>,
    stopped: watch::Receiver<bool>,
) {
    let value = Some(vec![7; 100].into());
    let records = [Record { value, ..Record::default() }];
    while !*stopped.borrow() {
        let sent = Instant::now();
        let result = producer.append(PROBE_TOPIC, partition, &records[..]).await;
        {
            let mut heard = heard.lock().expect("no panic while it is held");
            match result {
                Ok(_) => heard.times.push(sent.elapsed()),
                Err(_) => heard.errors += 1,
            }
        }
        // Without a pause one client would take both cores of a small machine.
        sleep(Duration::from_millis(2)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_what_was_heard() {
        let mut heard = Heard::default();
        assert_eq!(heard.percentile(99), Duration::ZERO);
        heard.times = (1..=200).rev().map(Duration::from_millis).collect();
        assert_eq!(heard.percentile(50), Duration::from_millis(100));
        assert_eq!(heard.percentile(99), Duration::from_millis(198));
        assert_eq!(heard.percentile(100), Duration::from_millis(200));
    }
}
