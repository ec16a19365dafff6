//! Adds data shards while faults come, and writes to topics that use them. Each acked batch must be
//! at its offset once the faults have ended, and no batch may be there twice.

use std::collections::BTreeMap;

use helix_checker::{BatchKey, payload};
use helix_client::proto::log::v1::{AddShardsRequest, GetPlacementResponse};
use helix_client::{Client, FetchOptions, NewTopic, Position, ReadStart};
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::task::JoinHandle;

use crate::coverage::CoverageMark;
use crate::growth_writer::{AckedBatches, GrowthWriter};
use crate::workload::ClientContext;

/// Largest number of data shards. Each takes memory on the simulated nodes.
const SHARDS_MAX: u32 = 8;

/// Topics that are created after shards were added.
const TOPICS_MAX: usize = 3;

const PARTITIONS: u32 = 6;

/// Replicas of some shards and topics, whatever the number of the cluster is.
const FACTOR: u32 = 3;

/// Start of the names of these topics, which no group reads.
pub(crate) const NAME_PREFIX: &str = "growth-";

/// Shards that were added, and what is written to topics that use them.
#[derive(Debug, Default)]
pub(crate) struct ShardGrowth {
    topics: usize,
    acked: AckedBatches,
    writers: Vec<JoinHandle<()>>,
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
        let replicas = if !split && rng.random_bool(0.3) { FACTOR } else { 0 };
        let how = if split { "splitting shards" } else { "adding shards" };
        context.recorder.note(&format!("{how}: {total} instead of {current}, {replicas} replicas"));
        let request = AddShardsRequest { current, total, split, replicas };
        match client.admin().add_shards(request).await {
            Ok(()) => context.marks.hit(CoverageMark::ShardsAdded),
            Err(error) => context.recorder.note(&format!("cannot add shards: {error}")),
        }
    }

    /// Creates a topic over the shards that take partitions now, and begins to write to it.
    pub(crate) async fn create_topic(
        &mut self,
        context: &ClientContext,
        client: &Client,
        rng: &mut StdRng,
    ) -> turmoil::Result<()> {
        if self.topics == TOPICS_MAX {
            return Ok(());
        }
        let name = format!("{NAME_PREFIX}{}", self.topics);
        let mut new = NewTopic::new(&name, PARTITIONS);
        new.replication_factor = if rng.random_bool(0.3) { FACTOR } else { 0 };
        if let Err(error) = client.admin().create_topic(&new).await {
            context.recorder.note(&format!("cannot create {name}: {error}"));
            return Ok(());
        }
        self.topics += 1;
        for partition in 0..PARTITIONS {
            let writer = GrowthWriter::new(context, &name, partition, &self.acked)?;
            self.writers.push(tokio::spawn(writer.run()));
        }
        Ok(())
    }

    /// Waits for the writers, and reads what was acked.
    ///
    /// # Errors
    /// A batch that is lost, doubled or another one.
    pub(crate) async fn check(
        &mut self,
        context: &ClientContext,
        client: &Client,
    ) -> Result<(), String> {
        for writer in self.writers.drain(..) {
            writer.await.map_err(|error| error.to_string())?;
        }
        let (batches, violation) = {
            let mut state = self.acked.lock();
            (std::mem::take(&mut state.batches), state.violation.take())
        };
        if let Some(violation) = violation {
            return Err(violation);
        }
        for ((topic, partition), acked) in batches {
            let Some(found) = read(context, client, &topic, partition, &acked).await? else {
                // The nodes stop, too.
                return Ok(());
            };
            for (offset, key) in &acked {
                if found.get(offset) != Some(key) {
                    let found = found.get(offset);
                    let what = format!("{key} was acked at {topic}/{partition}/{offset}");
                    return Err(format!("{what}, but {found:?} is there"));
                }
            }
            let mut first: BTreeMap<BatchKey, u64> = BTreeMap::new();
            for (offset, key) in found {
                if let Some(other) = first.insert(key, offset) {
                    let what = format!("{key} is in {topic}/{partition}");
                    return Err(format!("{what} twice, at {other} and {offset}"));
                }
            }
            context.marks.hit(CoverageMark::AddedShardRead);
        }
        Ok(())
    }
}

/// Reads a partition up to the last acked batch. Returns `None` if the run ends before.
async fn read(
    context: &ClientContext,
    client: &Client,
    topic: &str,
    partition: u32,
    acked: &BTreeMap<u64, BatchKey>,
) -> Result<Option<BTreeMap<u64, BatchKey>>, String> {
    let (mut found, mut next) = (BTreeMap::new(), 0);
    while acked.last_key_value().is_some_and(|(last, _)| *last >= next) {
        let start = ReadStart::new(topic, partition, Position::Offset(next));
        let fetched = client.consumer().fetch_encoded(&[start], &FetchOptions::default()).await;
        match fetched {
            Ok(fetched) => {
                for stored in fetched.into_iter().flat_map(|it| it.batches) {
                    let batch = stored.batch.unwrap_or_default();
                    let (key, records) = payload::read(&batch)?;
                    found.insert(stored.first_offset, key);
                    next = stored.first_offset + u64::from(records);
                }
            }
            Err(error) => {
                context.recorder.note(&format!("cannot read {topic}/{partition}: {error}"));
            }
        }
        if context.is_stopped() {
            return Ok(None);
        }
    }
    Ok(Some(found))
}
