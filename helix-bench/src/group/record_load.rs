//! Background load: one record at a time in each of some partitions.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use helix_client::{Producer, ProducerOptions};
use helix_proto::log::v1::Record;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use super::plan::GroupBenchPlan;

/// Interval of the records in each partition.
pub(super) const RECORD_INTERVAL: Duration = Duration::from_millis(5);

/// Appends records until it is dropped.
pub(super) struct RecordLoad {
    tasks: JoinSet<helix_client::Result<()>>,
}

impl RecordLoad {
    /// Starts to append to these partitions, independently of each other.
    ///
    /// # Errors
    /// The addresses are not valid.
    pub(super) fn start(
        plan: &GroupBenchPlan,
        topic: &str,
        partitions: impl IntoIterator<Item = u32>,
    ) -> Result<Self> {
        let producer = plan.client()?.producer(ProducerOptions::default());
        let mut tasks = JoinSet::new();
        for partition in partitions {
            tasks.spawn(append(producer.clone(), topic.to_owned(), partition));
        }
        Ok(Self { tasks })
    }

    /// Fails if an append has failed: then nothing says that there were records to read.
    ///
    /// # Errors
    /// The first failed append.
    pub(super) fn check(&mut self) -> Result<()> {
        match self.tasks.try_join_next() {
            None => Ok(()),
            Some(ended) => {
                ended.context("append")?.context("append")?;
                bail!("the load has ended")
            }
        }
    }
}

async fn append(producer: Producer, topic: String, partition: u32) -> helix_client::Result<()> {
    let mut ticks = interval(RECORD_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let record = Record { value: Some("x".into()), ..Record::default() };
    loop {
        ticks.tick().await;
        producer.append(&topic, partition, std::slice::from_ref(&record)).await?;
    }
}
