//! Adds data shards while faults come, and writes to topics that use them. Each acked record must
//! be read back at its offset once the faults have ended.

use helix_client::proto::log::v1::{AddShardsRequest, GetPlacementResponse, Record};
use helix_client::{Client, FetchOptions, NewTopic, Position, ProducerOptions, ReadStart};
use rand::RngExt;
use rand::rngs::StdRng;

use crate::coverage::CoverageMark;
use crate::workload::ClientContext;

/// Largest number of data shards. Each takes memory on the simulated nodes.
const SHARDS_MAX: u32 = 8;

/// Topics that are created after shards were added.
const TOPICS_MAX: usize = 4;

const PARTITIONS: u32 = 6;

/// Replicas of some shards and topics, whatever the number of the cluster is.
const FACTOR: u32 = 3;

/// Start of the names of these topics, which no group reads.
pub(crate) const NAME_PREFIX: &str = "growth-";

/// An acked record.
#[derive(Debug)]
struct AckedRecord {
    topic: String,
    partition: u32,
    offset: u64,
    value: Vec<u8>,
}

/// Shards that were added, and what was written to topics that use them.
#[derive(Debug, Default)]
pub(crate) struct ShardGrowth {
    topics: Vec<String>,
    acked: Vec<AckedRecord>,
    written: u32,
}

impl ShardGrowth {
    /// Adds up to three shards. Another number of current ones is now and then asked for, too.
    pub(crate) async fn add_shards(
        &mut self,
        context: &ClientContext,
        client: &Client,
        placement: &GetPlacementResponse,
        rng: &mut StdRng,
    ) {
        let data = placement.shards.iter().filter(|it| it.shard_id != 0).count();
        let known = u32::try_from(data).unwrap_or(u32::MAX);
        let total = (known + rng.random_range(1..=3)).min(SHARDS_MAX);
        let current = if rng.random_bool(0.1) { known - 1 } else { known };
        if total <= known {
            return;
        }
        let split = rng.random_bool(0.7);
        // Topics that ask for no number of replicas do not use the shards with their own.
        let has_own = !split && known > 1 && rng.random_bool(0.3);
        let replicas = if has_own { FACTOR } else { 0 };
        let how = if split { "splitting shards" } else { "adding shards" };
        context.recorder.note(&format!("{how}: {total} instead of {current}, {replicas} replicas"));
        let request = AddShardsRequest { current, total, split, replicas };
        match client.admin().add_shards(request).await {
            Ok(()) => context.marks.hit(CoverageMark::ShardsAdded),
            Err(error) => context.recorder.note(&format!("cannot add shards: {error}")),
        }
    }

    /// Creates a topic over the shards that take partitions now, or writes to one.
    pub(crate) async fn write(
        &mut self,
        context: &ClientContext,
        client: &Client,
        rng: &mut StdRng,
    ) {
        if self.topics.len() < TOPICS_MAX && (self.topics.is_empty() || rng.random_bool(0.3)) {
            let name = format!("{NAME_PREFIX}{}", self.topics.len());
            let mut new = NewTopic::new(&name, PARTITIONS);
            new.replication_factor = if rng.random_bool(0.3) { FACTOR } else { 0 };
            match client.admin().create_topic(&new).await {
                Ok(_) => self.topics.push(name),
                Err(error) => context.recorder.note(&format!("cannot create {name}: {error}")),
            }
        }
        let Some(topic) = self.topics.get(rng.random_range(0..self.topics.len().max(1))) else {
            return;
        };
        let producer = client.producer(ProducerOptions::default());
        for partition in 0..PARTITIONS {
            self.written += 1;
            let value = self.written.to_le_bytes().to_vec();
            let record = Record { value: Some(value.clone().into()), ..Record::default() };
            let ack = producer.append(topic, partition, &[record][..]).await;
            if let Ok(Some(offset)) = ack.map(|ack| ack.first_offset) {
                let topic = topic.clone();
                self.acked.push(AckedRecord { topic, partition, offset, value });
            }
        }
    }

    /// Reads all acked records back.
    ///
    /// # Errors
    /// A record that is lost or another one.
    pub(crate) async fn check(
        &self,
        context: &ClientContext,
        client: &Client,
    ) -> Result<(), String> {
        for acked in &self.acked {
            let AckedRecord { topic, partition, offset, value } = acked;
            let start = ReadStart::new(topic.as_str(), *partition, Position::Offset(*offset));
            let found = loop {
                let options = FetchOptions { records_max: Some(1), ..FetchOptions::default() };
                let fetched = client.consumer().fetch(std::slice::from_ref(&start), &options).await;
                match fetched {
                    Ok(found) => {
                        break found.into_iter().flat_map(|it| it.records).next();
                    }
                    Err(error) => {
                        context.recorder.note(&format!("cannot read {acked:?}: {error}"));
                        if context.is_stopped() {
                            // The nodes stop, too.
                            return Ok(());
                        }
                    }
                }
            };
            let is_same = found
                .as_ref()
                .is_some_and(|it| it.offset == *offset && it.value.as_deref() == Some(&value[..]));
            if !is_same {
                return Err(format!("{acked:?} was acked, but {found:?} is there"));
            }
            context.marks.hit(CoverageMark::AddedShardRead);
        }
        Ok(())
    }
}
