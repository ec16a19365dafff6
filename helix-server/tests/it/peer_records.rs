//! Replicas of a shard with records, without a node around them. A replica with an empty log
//! fetches the records from replicas that have purged their logs.

// Damages the files of a log on disk.
#![allow(clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use helix_server::limits::SHUTDOWN_WAIT_MAX;
use helix_server::log::{Head, Verdict};
use helix_server::peer::Hub;
use helix_server::raft::{DiskReads, Machine, Replica, ReplicaSettings, replica_id};
use helix_wal::storage::{DirStorage, FaultyStorage, Operation};
use helix_wal::{LogId, Options, Placement, ReadMode, StoredEntry, Wal};
use tempfile::TempDir;
use tokio::net::TcpListener;

use crate::peer_nodes::{CLUSTER, Port, command, hub, listeners, memory_wal};
use crate::trio::until;

const SHARD: u64 = 1;
const STREAM: u64 = 1;

/// A state machine that appends every batch to one stream.
#[derive(Debug)]
struct AppendAll {
    wal: Wal,
    next: Mutex<u64>,
}

impl Machine for AppendAll {
    fn apply(&self, id: LogId, head: Option<&Head>) -> io::Result<Verdict> {
        let mut next = self.next.lock().unwrap();
        let placement = match head {
            Some(Head::Batch(batch)) => {
                let (first, count) = (*next, batch.record_count);
                *next += u64::from(count);
                Some(Placement { stream: STREAM, first, count, time: 7 })
            }
            _ => None,
        };
        self.wal.place(id.index, placement).map_err(io::Error::other)?;
        Ok(Verdict::Nothing)
    }

    fn encode(&self) -> Bytes {
        Bytes::copy_from_slice(&self.next.lock().unwrap().to_le_bytes())
    }

    fn restore(&self, bytes: &[u8]) -> io::Result<()> {
        *self.next.lock().unwrap() = u64::from_le_bytes(bytes.try_into().unwrap());
        Ok(())
    }

    fn check(&self, bytes: &[u8]) -> io::Result<()> {
        let _: [u8; 8] = bytes.try_into().map_err(io::Error::other)?;
        Ok(())
    }
}

struct RecordNode {
    hub: Arc<Hub>,
    port: Port,
    replica: Replica,
    machine: Arc<AppendAll>,
    wal: Wal,
}

impl RecordNode {
    async fn start(
        id: u64,
        peers: &BTreeMap<u64, String>,
        listener: TcpListener,
        wal: Wal,
    ) -> Self {
        let hub = hub(id, peers);
        hub.set_identity(CLUSTER, 1);
        let machine = Arc::new(AppendAll { wal: wal.clone(), next: Mutex::new(0) });
        let settings = ReplicaSettings {
            shard_id: SHARD,
            replica_id: replica_id(id, 1),
            wal: wal.clone(),
            reads: DiskReads::new(false),
            machine: machine.clone(),
            checkpoint: None,
            has_records: true,
            repair_of: None,
            timing: hub.timing().clone(),
        };
        let link = hub.network(SHARD, replica_id(id, 1), wal.clone());
        let replica = Replica::open(settings, link).await.unwrap();
        hub.serve_replica(SHARD, &replica);
        let port = Port::open(&hub, listener);
        Self { hub, port, replica, machine, wal }
    }

    fn applied(&self) -> u64 {
        self.replica.status().applied
    }

    fn stored(&self) -> Vec<StoredEntry> {
        let end = *self.machine.next.lock().unwrap();
        let (mut next, mut found) = (0, Vec::new());
        while next < end {
            let read = self.wal.read_stream(STREAM, next, end, 1 << 20, ReadMode::Blocking);
            let read = read.unwrap().unwrap();
            let last = read.last().expect("it is not the end").placement;
            next = last.first + u64::from(last.count);
            found.extend(read);
        }
        found
    }

    async fn stop(self) {
        self.hub.close_shard(SHARD).await;
        self.replica.close().await;
        self.hub.close();
        self.port.ended().await;
    }
}

/// Writes `count` batches and returns the last index.
async fn write(nodes: &[RecordNode], count: u64) -> u64 {
    let payload = Bytes::from(vec![9; 3000]);
    for number in 0..count {
        until("a leader takes it", async || {
            let node = nodes.iter().find(|node| node.replica.is_ready())?;
            let outcome = node.replica.propose(command(number, payload.clone()), None).await;
            outcome.ok()?.await.ok()
        })
        .await;
    }
    let last = nodes.iter().map(|node| node.replica.status().last_index).max();
    last.expect("there are nodes")
}

async fn join_empty_replica(wal: Wal) {
    let (mut listeners, peers) = listeners(3).await;
    let third = listeners.pop().unwrap();
    let mut nodes = Vec::new();
    for (id, listener) in (1..).zip(listeners) {
        nodes.push(RecordNode::start(id, &peers, listener, memory_wal()).await);
    }
    let members: BTreeSet<u64> = (1..=3).map(|id| replica_id(id, 1)).collect();
    nodes[0].replica.form(members).await.unwrap();
    let last = write(&nodes, 300).await;
    for node in &nodes {
        until("its log is purged", async || {
            node.replica.checkpoint().await;
            let (checkpoint, purged) = node.replica.checkpointed();
            node.replica.purge(checkpoint).await;
            (node.applied() >= last && purged >= last).then_some(())
        })
        .await;
    }

    nodes.push(RecordNode::start(3, &peers, third, wal).await);
    until("it has the purged records", async || (nodes[2].applied() >= last).then_some(())).await;
    let last = write(&nodes, 20).await;
    for node in &nodes {
        until("it has the later records", async || (node.applied() >= last).then_some(())).await;
    }
    let place = |it: &StoredEntry| (it.id, it.placement, it.head.clone(), it.payload.crc);
    let first = nodes[0].stored();
    assert_eq!(first.len(), 320);
    for node in &nodes[1..] {
        let other = node.stored();
        assert!(first.iter().map(place).eq(other.iter().map(place)));
        assert!(first.iter().zip(&other).all(|(a, b)| a.payload.bytes == b.payload.bytes));
    }
    assert_eq!(nodes[2].hub.fetching(SHARD), None);
    for node in nodes {
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_replica_on_disk_fetches_all_records() {
    let directory = TempDir::new().unwrap();
    let storage = Arc::new(DirStorage::open(directory.path()).unwrap());
    let options = Options { segment_bytes: 1 << 20, reserve_bytes: 0, ..Options::default() };
    let (wal, writer, keeper, _) = Wal::open(storage, options).unwrap();
    writer.spawn().unwrap();
    keeper.spawn().unwrap();
    join_empty_replica(wal).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_replica_in_memory_fetches_all_records() {
    join_empty_replica(memory_wal()).await;
}

fn disk_wal(directory: &TempDir) -> Wal {
    let storage = Arc::new(DirStorage::open(directory.path()).unwrap());
    // Small, so that there are several sealed segments and reads go to the disk.
    let options = Options {
        segment_bytes: 128 << 10,
        group_bytes: 16 << 10,
        tail_bytes: 16 << 10,
        reserve_bytes: 0,
        compaction_bytes_per_second: 0,
        ..Options::default()
    };
    let (wal, writer, keeper, _) = Wal::open(storage, options).unwrap();
    writer.spawn().unwrap();
    keeper.spawn().unwrap();
    wal
}

/// Flips a bit of the first batch in a segment of a log, by the number of the segment.
#[expect(clippy::disallowed_methods, reason = "a test damages files")]
fn damage(directory: &TempDir, number: usize) {
    let files = std::fs::read_dir(directory.path()).unwrap().map(|file| file.unwrap().path());
    let mut segments: Vec<_> =
        files.filter(|path| path.extension().is_some_and(|it| it == "seg")).collect();
    segments.sort();
    let mut bytes = std::fs::read(&segments[number]).unwrap();
    let batch = bytes.windows(2000).position(|run| run.iter().all(|byte| *byte == 9)).unwrap();
    bytes[batch + 1000] ^= 1;
    let file = std::fs::File::options().write(true).open(&segments[number]).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &bytes[batch..batch + 2000], batch as u64)
        .unwrap();
    file.sync_all().unwrap();
}

/// Neither the leader nor the other replica can send all records.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fetch_goes_to_another_replica_where_its_source_is_damaged() {
    let (mut listeners, peers) = listeners(3).await;
    let third = listeners.pop().unwrap();
    let directories = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    let mut nodes = Vec::new();
    for ((id, listener), directory) in (1..).zip(listeners).zip(&directories) {
        nodes.push(RecordNode::start(id, &peers, listener, disk_wal(directory)).await);
    }
    let members: BTreeSet<u64> = (1..=3).map(|id| replica_id(id, 1)).collect();
    nodes[0].replica.form(members).await.unwrap();
    let last = write(&nodes, 300).await;
    for node in &nodes {
        until("its log is purged", async || {
            node.replica.checkpoint().await;
            let (checkpoint, purged) = node.replica.checkpointed();
            node.replica.purge(checkpoint).await;
            (node.applied() >= last && purged >= last).then_some(())
        })
        .await;
    }
    // In turn, so that both refuse, whichever is asked first.
    for (number, source) in [(0, 0), (1, 1), (2, 0)] {
        damage(&directories[source], number);
    }

    nodes.push(RecordNode::start(3, &peers, third, memory_wal()).await);
    until("it has the purged records", async || (nodes[2].applied() >= last).then_some(())).await;
    let stored = nodes[2].stored();
    assert_eq!(stored.len(), 300);
    assert!(stored.iter().all(|it| it.payload.bytes.iter().all(|byte| *byte == 9)));
    let damaged = nodes.iter().filter(|node| !node.replica.damage().is_empty()).count();
    assert_eq!(damaged, 2, "each of both sources has refused");
    for node in nodes {
        node.stop().await;
    }
}

/// Runs on paused time.
#[tokio::test]
async fn stalled_disk_does_not_block_shutdown() {
    let directory = TempDir::new().unwrap();
    let storage = FaultyStorage::new(Arc::new(DirStorage::open(directory.path()).unwrap()));
    let options = Options { segment_bytes: 1 << 20, reserve_bytes: 0, ..Options::default() };
    let (wal, writer, keeper, _) = Wal::open(Arc::new(storage.clone()), options).unwrap();
    writer.spawn().unwrap();
    keeper.spawn().unwrap();
    let (mut listeners, peers) = listeners(1).await;
    let node = RecordNode::start(1, &peers, listeners.pop().unwrap(), wal).await;
    node.replica.form([replica_id(1, 1)].into()).await.unwrap();
    until("it leads", async || node.replica.is_ready().then_some(())).await;

    storage.stall(Operation::Sync);
    let outcome = node.replica.propose(command(1, Bytes::from(vec![9; 3000])), None).await.unwrap();
    tokio::time::pause();
    let mut waited = Duration::ZERO;
    let time = async {
        while waited < 2 * SHUTDOWN_WAIT_MAX {
            tokio::time::advance(Duration::from_secs(1)).await;
            waited += Duration::from_secs(1);
        }
    };
    let is_stopped = tokio::select! {
        () = node.replica.close() => true,
        () = time => false,
    };
    tokio::time::resume();
    // Before any assertion: the runtime waits for its threads on exit.
    storage.heal();
    assert!(is_stopped, "it waits for the disk");
    outcome.await.unwrap_err();
    node.hub.close();
    node.port.ended().await;
}
