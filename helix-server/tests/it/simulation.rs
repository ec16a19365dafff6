//! A whole node on a simulated disk and a simulated clock: append, crash, recover. The same seed
//! gives the same disk trace and the same results, so no product code bypasses the interfaces for
//! time, randomness and files.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use helix_server::access::AuthMode;
use helix_server::clock::TokioClock;
use helix_server::log::{Condition, PartitionSettings, ProducerStamp};
use helix_server::memory::MemoryShares;
use helix_server::node::{LogLimits, Node, NodeSettings, NodeStorage};
use helix_server::raft::seed_this_thread;
use helix_server::shard::{Durability, NewBatch, ReadFrom};
use helix_wal::storage::{Crash, DiskOperation, SimulatedDisk, Storage};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::process;

/// Disks of one node, one per shard, which outlive its crashes.
#[derive(Debug, Clone)]
struct Disks {
    seed: u64,
    by_shard: Arc<Mutex<BTreeMap<u64, SimulatedDisk>>>,
}

impl Disks {
    fn new(seed: u64) -> Self {
        Self { seed, by_shard: Arc::default() }
    }

    fn open(&self, shard: u64) -> Arc<dyn Storage> {
        let mut disks = self.by_shard.lock().unwrap();
        let disk = disks.entry(shard).or_insert_with(|| {
            let disk = SimulatedDisk::new(self.seed ^ shard);
            disk.record(true);
            disk
        });
        Arc::new(disk.reopen())
    }

    fn crash(&self, life: u64) {
        for disk in self.by_shard.lock().unwrap().values() {
            disk.crash(Crash::Seeded(self.seed ^ life));
        }
    }

    fn traces(&self) -> Vec<(u64, Vec<DiskOperation>)> {
        let disks = self.by_shard.lock().unwrap();
        disks.iter().map(|(shard, disk)| (*shard, disk.trace())).collect()
    }
}

fn settings(disks: &Disks, seed: u64) -> NodeSettings {
    let disks = disks.clone();
    settings_on(Arc::new(move |shard| disks.open(shard)), seed)
}

/// Opens the disk of a shard.
type OpenDisk = Arc<dyn Fn(u64) -> Arc<dyn Storage> + Send + Sync>;

/// A node of one shard with the topic "default".
pub(crate) fn settings_on(open: OpenDisk, seed: u64) -> NodeSettings {
    NodeSettings {
        node_id: 1,
        storage: NodeStorage::Simulated(Arc::new(move |shard| open(shard))),
        cluster_name: None,
        shard_count: 1,
        topics: vec![("default".to_owned(), 4)],
        topic_settings: PartitionSettings {
            default_durability: 1,
            min_durability: 1,
            max_batch_bytes: 1 << 20,
            max_record_bytes: 1 << 20,
            ..PartitionSettings::default()
        },
        segment_bytes: 1 << 20,
        preparation: helix_wal::Preparation::Auto,
        tail_bytes: 64 << 10,
        footer_bytes: 8 << 20,
        files: helix_wal::FileCache::default(),
        shares: MemoryShares::default(),
        log_limits: LogLimits::default(),
        rack: String::new(),
        replace_down_after: None,
        scrub_rate: 0,
        copy_rate_max: helix_server::limits::COPY_RATE_MAX,
        busy_poll: false,
        pace: helix_server::limits::PACE,
        election_timeout: helix_server::limits::ELECTION_TIMEOUT,
        clock: TokioClock::new(1_700_000_000_000_000),
        auth: AuthMode::Off,
        jwt: None,
        seed: Some(seed),
    }
}

/// As [`settings_on`], in a directory.
pub(crate) fn settings_in(directory: &Path, seed: u64) -> NodeSettings {
    NodeSettings {
        storage: NodeStorage::DataDir { path: directory.to_owned(), direct_io: false },
        ..settings_on(Arc::new(|shard| unreachable!("shard {shard} is in a directory")), seed)
    }
}

fn payload(writer: u64, sequence: u64, rng: &mut StdRng) -> Bytes {
    let mut bytes = format!("{writer}:{sequence}:").into_bytes();
    bytes.resize(bytes.len() + rng.random_range(0..20_000), b'.');
    bytes.into()
}

pub(crate) fn batch(node: &Node, partition: u32, sequence: u64, payload: Bytes) -> NewBatch {
    NewBatch {
        partition: node.locate("default", partition).unwrap().partition,
        record_count: 1,
        version: 1,
        compression: 1,
        uncompressed_bytes: 0,
        crc: helix_proto::batch::crc(1, 1, 1, &payload),
        payload,
        producer: Some(ProducerStamp::new(7_000 + u64::from(partition), 0, sequence)),
        condition: Condition::default(),
        stamps: None,
    }
}

/// Repeatedly appends, crashes with appends in flight, recovers, and checks that every acked batch
/// is at its offset. Returns events and disk traces for comparison.
async fn lives(seed: u64) -> (Vec<String>, Vec<(u64, Vec<DiskOperation>)>) {
    seed_this_thread(seed);
    let mut rng = StdRng::seed_from_u64(seed);
    let disks = Disks::new(seed);
    let mut events = Vec::new();
    let mut acked: Vec<BTreeMap<u64, Bytes>> = vec![BTreeMap::new(); 4];
    let mut next = [0_u64; 4];
    for life in 0..4 {
        let node = Node::open(settings(&disks, seed + life)).await.expect("it opens again");
        for partition in 0..4_u32 {
            let located = node.locate("default", partition).unwrap();
            let watermarks = located.shard.latest(located.partition).await.unwrap();
            events.push(format!("life {life} partition {partition}: {watermarks:?}"));
            for (offset, payload) in &acked[partition as usize] {
                let read = located
                    .shard
                    .read(located.partition, *offset, None, 1, ReadFrom::Leader)
                    .await
                    .unwrap();
                assert_eq!(&read.batches[0].payload, payload, "acked offset {offset}");
            }
            // Batches in flight may have been kept: the producer asks for the next sequence.
            let stamp = ProducerStamp::new(7_000 + u64::from(partition), 0, 0);
            let kept = located.shard.next_sequence(located.partition, &stamp);
            next[partition as usize] = kept.unwrap_or(0);
        }
        let appends = rng.random_range(20..60);
        for _ in 0..appends {
            let partition = rng.random_range(0..4_u32);
            let sequence = next[partition as usize];
            let payload = payload(u64::from(partition), sequence, &mut rng);
            let shard = node.locate("default", partition).unwrap().shard;
            let permit = shard
                .permit(helix_server::shard::FlowShare::INTERNAL, payload.len())
                .await
                .unwrap();
            let batch = batch(&node, partition, sequence, payload.clone());
            let ack = shard.append(batch, Durability::QuorumSynced, permit).await.unwrap();
            let (first, _) = ack.offsets.unwrap();
            events.push(format!("life {life} ack {partition}/{first}"));
            assert!(acked[partition as usize].insert(first, payload).is_none());
            next[partition as usize] = sequence + 1;
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..20))).await;
        }
        // In flight at the crash: neither acked nor certainly lost.
        for partition in 0..4_u32 {
            let sequence = next[partition as usize];
            let payload = payload(u64::from(partition), sequence, &mut rng);
            let shard = node.locate("default", partition).unwrap().shard;
            let permit = shard
                .permit(helix_server::shard::FlowShare::INTERNAL, payload.len())
                .await
                .unwrap();
            let batch = batch(&node, partition, sequence, payload);
            drop(shard.propose(batch, Durability::QuorumSynced, permit).await.unwrap());
        }
        disks.crash(life);
        node.close().await;
    }
    (events, disks.traces())
}

/// Runs all lives on a paused clock, which jumps to the next event when all tasks wait.
fn run(seed: u64) -> (Vec<String>, Vec<(u64, Vec<DiskOperation>)>) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    runtime.unwrap().block_on(lives(seed))
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let seed = process::seed(42);
    let (events, traces) = run(seed);
    assert!(events.len() > 50);
    // On further shards' disks the node only checked for existing logs.
    let of_shards = traces.iter().filter(|(shard, _)| *shard <= 1);
    assert!(of_shards.clone().count() == 2 && of_shards.into_iter().all(|(_, it)| it.len() > 20));
    let (events_again, traces_again) = run(seed);
    assert_eq!(events, events_again);
    assert!(traces == traces_again, "the disks saw other operations");
    let (_, other) = run(seed + 1);
    assert!(traces != other, "another seed gives another trace");
}

#[test]
fn acknowledged_batches_survive_crashes_for_many_seeds() {
    let seed = process::seed(1_000);
    for seed in seed..seed + 40 {
        println!("seed {seed}");
        run(seed);
    }
}
