//! Copies give way to appends: their rate falls while appends are slow, and grows again after. The
//! exact values are tested with the controller, in `peer/copy_rate.rs`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use helix_server::config::{CopyRateFile, ServerConfig};
use helix_server::log::AddShards;
use helix_server::node::{Node, NodeSettings, NodeStorage, SimulatedDisks};
use helix_server::shard::{Durability, FlowShare};
use helix_wal::storage::{SimulatedDisk, Storage};
use tokio::task::JoinSet;

use crate::simulated_trio::one_record;
use crate::simulation::settings_on;
use crate::support::TestServer;
use crate::trio::until;

/// The data shard that appends go to, and that is split.
const SHARD: u64 = 1;

/// At this rate, a split copies its records in some ten seconds.
const RATE_MAX: u64 = 8 << 20;

/// Batches of each of two partitions, one of which the split moves.
const BATCHES: usize = 64;
const BATCH_BYTES: usize = 1_000_000;

const WRITERS: u32 = 64;

/// Disks in memory. Each write of the data shard's log takes the time that the test sets.
#[derive(Default)]
struct SlowDisks {
    by_shard: Mutex<BTreeMap<u64, SimulatedDisk>>,
    delay_us: AtomicU64,
}

impl SlowDisks {
    fn set_delay(&self, delay: Duration) {
        self.delay_us.store(u64::try_from(delay.as_micros()).unwrap(), Ordering::Relaxed);
    }
}

impl SimulatedDisks for SlowDisks {
    fn open(&self, shard_id: u64) -> Arc<dyn Storage> {
        let mut disks = self.by_shard.lock().unwrap();
        Arc::new(disks.entry(shard_id).or_insert_with(|| SimulatedDisk::new(shard_id)).reopen())
    }

    fn write_delay(&self, shard_id: u64) -> Duration {
        let delay = Duration::from_micros(self.delay_us.load(Ordering::Relaxed));
        if shard_id == SHARD { delay } else { Duration::ZERO }
    }
}

/// Appends a batch to a partition of the default topic. `None` while it cannot be appended.
async fn append(node: &Node, partition: u32, bytes: usize) -> Option<()> {
    let located = node.locate("default", partition).ok()?;
    let payload = Bytes::from(vec![7; bytes]);
    let permit = located.shard.permit(FlowShare::INTERNAL, bytes).await.ok()?;
    let batch = one_record(located.partition, payload);
    located.shard.append(batch, Durability::QuorumSynced, permit).await.ok().map(drop)
}

/// Appends small batches until `stop` is set.
fn start_writers(node: &Arc<Node>, stop: &Arc<AtomicBool>) -> JoinSet<()> {
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let (node, stop) = (node.clone(), stop.clone());
        writers.spawn(async move {
            let mut retry = tokio::time::interval(Duration::from_millis(5));
            while !stop.load(Ordering::Relaxed) {
                // Refused while the split moves the partition.
                if append(&node, writer % 2, 100).await.is_none() {
                    retry.tick().await;
                }
            }
        });
    }
    writers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_slow_down_while_appends_are_slow() {
    let disks = Arc::new(SlowDisks::default());
    let settings = NodeSettings {
        storage: NodeStorage::Simulated(disks.clone()),
        topics: vec![("default".to_owned(), 2)],
        segment_bytes: 8 << 20,
        copy_rate_max: RATE_MAX,
        ..settings_on(Arc::new(|shard| unreachable!("shard {shard} has a slow disk")), 1)
    };
    let node = Node::open(settings).await.unwrap();
    node.announce("127.0.0.1:1".to_owned()).await.unwrap();
    for partition in 0..2 {
        for _ in 0..BATCHES {
            until("it is appended", async || append(&node, partition, BATCH_BYTES).await).await;
        }
    }
    let stop = Arc::new(AtomicBool::new(false));
    let mut writers = start_writers(&node, &stop);
    let usual = until("appends were measured", async || node.copy_pace().usual_append).await;
    assert_eq!(node.copy_pace().rate, RATE_MAX);

    let add = AddShards { current: 1, total: 2, split: true, replicas: 0 };
    until("the split is accepted", async || node.cluster().add_shards(add).await.ok()).await;
    until("it copies", async || (node.copy_pace().copied_bytes > 0).then_some(())).await;
    disks.set_delay((usual * 4).max(Duration::from_millis(300)));
    let mut lowest = until("the rate falls", async || {
        Some(node.copy_pace().rate).filter(|rate| *rate < RATE_MAX)
    })
    .await;
    disks.set_delay(Duration::ZERO);
    until("appends are as usual, and the rate grows", async || {
        let rate = node.copy_pace().rate;
        lowest = lowest.min(rate);
        (rate > lowest).then_some(())
    })
    .await;

    node.set_copy_rate_max(4 * RATE_MAX);
    assert_eq!(node.copy_pace().rate_max, 4 * RATE_MAX);
    stop.store(true, Ordering::Relaxed);
    while let Some(ended) = writers.join_next().await {
        ended.unwrap();
    }
    node.close().await;
}

#[tokio::test]
async fn largest_rate_follows_the_configuration_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("helix.toml");
    let write = |text: &str| {
        #[allow(clippy::disallowed_methods)]
        std::fs::write(&path, text).unwrap();
    };
    write("copy_rate_max = '20MiB'\n");
    let copy_rate_file = Some(CopyRateFile::new(&path));
    let config = ServerConfig { copy_rate_file, ..ServerConfig::in_memory() };
    let server = TestServer::start(config, None).await;
    let rate_max = || server.running.node().copy_pace().rate_max;
    until("the file is read", async || (rate_max() == 20 << 20).then_some(())).await;
    write("copy_rate_max = 30_000_000\n");
    until("it is read again", async || (rate_max() == 30_000_000).then_some(())).await;
    server.running.shutdown().await;
}
