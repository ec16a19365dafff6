//! A full disk: appends are refused before anything is written, reads continue, and appends resume
//! automatically. On a simulated disk, and with the real program on a real one.

use std::sync::Arc;
use std::time::Duration;

use helix_client::{
    Client, Error, FetchOptions, Position, ProducerOptions, ReadStart, SessionOptions,
};
use helix_proto::log::v1::{ErrorReason, Record};
use helix_server::error::Error as Refusal;
use helix_server::log::Watermarks;
use helix_server::node::Node;
use helix_server::shard::{Durability, ReadFrom};
use helix_wal::storage::{Fault, Operation, SimulatedDisk};
use tonic::Code;
use tonic::transport::Endpoint;

use crate::process;
use crate::services::serving;
use crate::simulation;
use crate::small_disk::SmallDisk;
use crate::trio::until;

async fn append(node: &Node, sequence: u64) -> Result<u64, Refusal> {
    let payload = vec![b'.'; 40_000].into();
    let shard = node.locate("default", 0).unwrap().shard;
    let permit = shard.permit(helix_server::shard::FlowShare::INTERNAL, 40_000).await?;
    let batch = simulation::batch(node, 0, sequence, payload);
    let ack = shard.append(batch, Durability::QuorumSynced, permit).await?;
    Ok(ack.offsets.unwrap().0)
}

async fn on_a_simulated_disk(disk: SimulatedDisk, cluster: SimulatedDisk) {
    let open = {
        let (disk, cluster) = (disk.clone(), cluster);
        move |shard: u64| -> Arc<dyn helix_wal::storage::Storage> {
            Arc::new(if shard == 1 { disk.reopen() } else { cluster.reopen() })
        }
    };
    let node = Node::open(simulation::settings_on(Arc::new(open), 5)).await.unwrap();
    let located = node.locate("default", 0).unwrap();
    let mut count = 0;
    for round in 0..3 {
        append(&node, count).await.unwrap();
        count += 1;
        disk.set_free_bytes(Some(0));
        let refused = loop {
            match append(&node, count).await {
                Ok(_) => count += 1,
                Err(error) => break error,
            }
            assert!(count < 1_000, "the disk never fills up");
        };
        assert!(matches!(refused, Refusal::DiskFull { .. }), "{refused}");
        let status = located.shard.status();
        for _ in 0..20 {
            let refused = append(&node, count).await.unwrap_err();
            assert!(matches!(refused, Refusal::DiskFull { .. }), "{refused}");
        }
        let after = located.shard.status();
        assert_eq!((status.last_index, status.synced), (after.last_index, after.synced));
        let watermarks = located.shard.latest(located.partition).await.unwrap();
        assert_eq!(watermarks, Watermarks { log_start: 0, high_watermark: count });
        for offset in [0, count / 2, count - 1] {
            let (shard, partition) = (&located.shard, located.partition);
            let read = shard.read(partition, offset, None, 1, ReadFrom::Leader).await.unwrap();
            assert_eq!(read.batches[0].first_offset, offset, "round {round}");
        }
        disk.set_free_bytes(None);
        let resumed = tokio::time::timeout(Duration::from_secs(60), async {
            while append(&node, count).await.is_err() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
        resumed.await.expect("appends resume");
        count += 1;
    }
    node.close().await;
}

#[test]
fn full_simulated_disk_refuses_appends_and_resumes() {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    helix_server::raft::seed_this_thread(5);
    let running = on_a_simulated_disk(SimulatedDisk::new(5), SimulatedDisk::new(6));
    runtime.unwrap().block_on(running);
}

/// Paused time, one thread.
fn simulate(seed: u64, test: impl Future<Output = ()>) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    helix_server::raft::seed_this_thread(seed);
    runtime.unwrap().block_on(test);
}

/// Opens a node on the disks of shard 1 and of shard 0.
async fn open_on(disk: &SimulatedDisk, cluster: &SimulatedDisk, seed: u64) -> Arc<Node> {
    let (disk, cluster) = (disk.clone(), cluster.clone());
    let open = move |shard: u64| -> Arc<dyn helix_wal::storage::Storage> {
        Arc::new(match shard {
            0 => cluster.reopen(),
            1 => disk.reopen(),
            // A restart looks for further shards.
            other => SimulatedDisk::new(other),
        })
    };
    let settings = simulation::settings_on(Arc::new(open), seed);
    // Only the last file of a sealed segment stays open.
    let files = helix_wal::FileCache::new(1);
    Node::open(helix_server::node::NodeSettings { files, ..settings }).await.unwrap()
}

/// Nothing becomes free between the starts: the nodes find the space for them in what they have.
#[test]
fn full_disk_allows_any_number_of_restarts() {
    let (disk, cluster) = (SimulatedDisk::new(5), SimulatedDisk::new(6));
    simulate(5, async {
        let mut node = open_on(&disk, &cluster, 5).await;
        let mut count = 0;
        append(&node, count).await.unwrap();
        count += 1;
        disk.set_free_bytes(Some(0));
        while append(&node, count).await.is_ok() {
            count += 1;
            assert!(count < 1_000, "the disk never fills up");
        }
        for restart in 0..5 {
            node.close().await;
            drop(node);
            disk.set_free_bytes(Some(0));
            cluster.set_free_bytes(Some(0));
            node = open_on(&disk, &cluster, 6 + restart).await;
            let refused = append(&node, count).await.unwrap_err();
            assert!(matches!(refused, Refusal::DiskFull { .. }), "{refused}");
            let located = node.locate("default", 0).unwrap();
            for offset in [0, count - 1] {
                let (shard, partition) = (&located.shard, located.partition);
                let read = shard.read(partition, offset, None, 1, ReadFrom::Leader).await.unwrap();
                assert_eq!(read.batches[0].first_offset, offset, "restart {restart}");
            }
        }
        disk.set_free_bytes(None);
        let resumed = tokio::time::timeout(Duration::from_secs(60), async {
            while append(&node, count).await.is_err() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
        resumed.await.expect("appends resume");
        node.close().await;
    });
}

/// Without space even for shard 0 the start waits.
#[test]
fn start_without_space_for_shard_0_waits() {
    let (disk, cluster) = (SimulatedDisk::new(5), SimulatedDisk::new(6));
    simulate(7, async {
        open_on(&disk, &cluster, 7).await.close().await;
        for name in cluster.files().into_iter().filter(|name| name.starts_with("ready-")) {
            cluster.remove_file(&name);
        }
        cluster.set_free_bytes(Some(0));
        let opening = open_on(&disk, &cluster, 8);
        tokio::pin!(opening);
        let waited = tokio::time::timeout(Duration::from_secs(30), &mut opening).await;
        assert!(waited.is_err(), "it starts without space");
        cluster.set_free_bytes(None);
        let node = opening.await;
        append(&node, 0).await.unwrap();
        node.close().await;
    });
}

/// A group that finds no space in its segment waits; nothing stops.
#[test]
fn append_without_space_in_its_segment_waits() {
    let (disk, cluster) = (SimulatedDisk::new(5), SimulatedDisk::new(6));
    simulate(9, async {
        let node = open_on(&disk, &cluster, 9).await;
        append(&node, 0).await.unwrap();
        let fault = Fault::next(Operation::Write).lasting();
        disk.fail(fault.error(std::io::ErrorKind::QuotaExceeded));
        let waiting = append(&node, 1);
        tokio::pin!(waiting);
        assert!(tokio::time::timeout(Duration::from_secs(5), &mut waiting).await.is_err());
        let refused = append(&node, 2).await.unwrap_err();
        assert!(matches!(refused, Refusal::DiskFull { .. }), "{refused}");
        let located = node.locate("default", 0).unwrap();
        let (shard, partition) = (&located.shard, located.partition);
        let read = shard.read(partition, 0, None, 1, ReadFrom::Leader).await.unwrap();
        assert_eq!(read.batches[0].first_offset, 0);
        disk.heal();
        assert_eq!(waiting.await.unwrap(), 1);
        let resumed = tokio::time::timeout(Duration::from_secs(60), async {
            while append(&node, 2).await.is_err() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
        resumed.await.expect("appends resume");
        assert!(node.stopped().is_empty() && node.restarts().iter().all(|(_, count)| *count == 0));
        node.close().await;
    });
}

/// A read that finds no file descriptor is refused, and nothing is taken for damaged.
#[test]
fn read_without_file_descriptors_is_not_damage() {
    let (disk, cluster) = (SimulatedDisk::new(5), SimulatedDisk::new(6));
    simulate(11, async {
        let node = open_on(&disk, &cluster, 11).await;
        for sequence in 0..120 {
            append(&node, sequence).await.unwrap();
        }
        let located = node.locate("default", 0).unwrap();
        let (shard, partition) = (&located.shard, located.partition);
        tokio::time::sleep(Duration::from_secs(5)).await;
        shard.read(partition, 70, None, 1, ReadFrom::Leader).await.unwrap();
        let fault = Fault::next(Operation::Open).lasting();
        disk.fail(fault.errno(rustix::io::Errno::MFILE.raw_os_error()));
        let refused = shard.read(partition, 0, None, 1, ReadFrom::Leader).await.unwrap_err();
        assert!(matches!(refused, Refusal::Exhausted { .. }), "{refused}");
        assert!(shard.damage().is_empty(), "{:?}", shard.damage());
        disk.heal();
        let read = shard.read(partition, 0, None, 1, ReadFrom::Leader).await.unwrap();
        assert_eq!(read.batches[0].first_offset, 0);
        node.close().await;
    });
}

const MIB: u64 = 1 << 20;

/// Space that a node reserves for votes and other entries, plus a segment that no longer fits.
const LITTLE: u64 = 200 * MIB;

fn value(number: u64) -> Vec<u8> {
    let mut value = format!("{number}:").into_bytes();
    value.resize(usize::try_from(MIB).unwrap() - 100, b'.');
    value
}

/// Appends megabytes until one is refused; returns the next number and the error.
async fn write_until_refused(client: &Client, from: u64) -> (u64, Error) {
    let producer = client.producer(ProducerOptions::default());
    for number in from.. {
        let record = Record { value: Some(value(number).into()), ..Record::default() };
        match producer.append("default", 0, &[record][..]).await {
            Ok(ack) => assert_eq!(ack.first_offset, Some(number)),
            Err(error) => return (number, error),
        }
        assert!(number < from + 400, "the disk never fills up");
    }
    unreachable!("the numbers do not end");
}

fn expect_full(error: &Error) {
    assert!(error.is(ErrorReason::DiskFull), "{error}");
    assert_eq!(error.code, Code::ResourceExhausted);
    assert!(!error.may_have_applied, "{error}");
}

/// Expects all records from the log start to the acked end.
async fn expect_records(client: &Client, first: u64, end: u64) {
    let latest = client.admin().resolve_offsets("default", &[0], &Position::Latest).await.unwrap();
    assert_eq!(latest[0].offset, end, "no refused record is stored");
    let mut offset = first;
    while offset < end {
        let start = ReadStart::new("default", 0, Position::Offset(offset));
        let read = client.consumer().fetch(&[start], &FetchOptions::default()).await.unwrap();
        for record in &read[0].records {
            assert_eq!(record.offset, offset);
            assert!(record.value.as_deref() == Some(&value(offset)[..]), "offset {offset}");
            offset += 1;
        }
    }
}

async fn resume(client: &Client, number: u64) {
    let producer = client.producer(ProducerOptions::default());
    let record = Record { value: Some(value(number).into()), ..Record::default() };
    let ack = until("appends resume", async || {
        match producer.append("default", 0, &[record.clone()][..]).await {
            Ok(ack) => Some(ack),
            Err(error) => {
                expect_full(&error);
                None
            }
        }
    });
    assert_eq!(ack.await.first_offset, Some(number));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_real_disk_refuses_appends_and_resumes() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("data");
    let Some(disk) = SmallDisk::mount(&directory, 640 * MIB) else { return };
    let address = process::free_address();
    let mut arguments = process::arguments(address, &directory);
    arguments.push("--segment-bytes=16MiB".to_owned());
    // The log about the disk cannot be written either.
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let server = process::start_with(&arguments, full.into());
    let client = process::patient_client(address, 1);
    resume(&client, 0).await;

    disk.fill(LITTLE);
    let (end, refused) = write_until_refused(&client, 1).await;
    println!("full after {end} batches: {refused}");
    expect_full(&refused);
    let session = client.session("default", 0, SessionOptions::default()).await.unwrap();
    let batch = [Record { value: Some(value(end).into()), ..Record::default() }];
    expect_full(&session.append(&batch[..]).await.unwrap().await.unwrap_err());
    expect_records(&client, 0, end).await;
    // Cluster and read services are serving; topic and produce services, which write, are not.
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let channel = endpoint.connect().await.unwrap();
    assert_eq!(serving(&channel).await, [true, true, true, false, false, false]);

    // A restart does not change it, and needs only reserved space.
    process::kill(server).await;
    let server = process::start(&arguments);
    expect_records(&client, 0, end).await;
    let (still, refused) = write_until_refused(&client, end).await;
    expect_full(&refused);
    expect_records(&client, 0, still).await;

    // Space freed by the program: retention removes records.
    let trimmed = client.admin().trim("default", 0, still - 1).await.unwrap();
    assert_eq!(trimmed.log_start_offset, still - 1);
    resume(&client, still).await;
    expect_records(&client, still - 1, still + 1).await;

    // Space freed from outside.
    let (end, refused) = write_until_refused(&client, still + 1).await;
    expect_full(&refused);
    disk.relieve();
    resume(&client, end).await;
    expect_records(&client, still - 1, end + 1).await;
    let channel = endpoint.connect().await.unwrap();
    assert_eq!(serving(&channel).await, [true; 6]);
    process::kill(server).await;
    drop(disk);
}
