//! One of three nodes has a full disk. It takes no records as leader or follower, but serves
//! reads, votes and frees space.

use helix_client::ProducerOptions;
use helix_proto::log::v1::{
    AppendRequest, ErrorReason, FetchRequest, HealthReason, TrimPartitionRequest,
};
use tonic::{Code, Status};

use crate::small_disk::SmallDisk;
use crate::support::{
    TestServer, append_request, detail, from_offset, reason, record, records, soon,
};
use crate::trio::{
    Trio, TrioPlan, expect_equal_replicas, health, replica_batches, shard_status, until,
};

const MIB: u64 = 1 << 20;

/// Less than a node reserves, more than votes and freeing space need.
const SPACE_LEFT: u64 = 200 * MIB;

/// The node with the small disk.
const FULL: u64 = 3;

fn megabyte() -> String {
    ".".repeat(usize::try_from(MIB).unwrap() - 100)
}

async fn append(node: &TestServer, partition: u32) -> Result<u64, Status> {
    let request = AppendRequest { partition, ..append_request(&[&megabyte()]) };
    let answer = node.produce().append(request).await?.into_inner();
    Ok(answer.ack.unwrap().next_offset.unwrap())
}

/// Appends `count` megabytes to the leader of a partition and returns the partition's end.
async fn write(trio: &Trio, partition: u32, count: u64) -> u64 {
    let producer = trio.client().producer(ProducerOptions::default());
    let batch = records(&[&megabyte()]);
    let mut end = 0;
    for _ in 0..count {
        let ack = producer.append("default", partition, &batch[..]).await.unwrap();
        end = ack.next_offset.unwrap();
    }
    end
}

async fn is_full(node: &TestServer) -> bool {
    health(node).await.issues.iter().any(|issue| issue.reason() == HealthReason::DiskFull)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_with_full_disk_takes_no_records_but_serves_and_votes() {
    let plan = TrioPlan::new();
    let Some(disk) = SmallDisk::mount(&plan.data_dir(FULL), 640 * MIB) else { return };
    let mut trio = Trio::start(plan).await;
    trio.balanced().await;
    // One partition led by the node with the small disk, and one led by another node.
    let mut by_leader = std::collections::BTreeMap::new();
    for partition in 0..4 {
        by_leader.insert(trio.leader_of(partition).await, partition);
    }
    let led_by = |node: u64| by_leader.iter().find(|((leader, _), _)| *leader == node);
    let (_, own) = led_by(FULL).expect("leaders are spread");
    let ((other_leader, shard), other) =
        led_by(1).or_else(|| led_by(2)).expect("leaders are spread");
    let (own, other_leader, shard, other) = (*own, *other_leader, *shard, *other);
    disk.fill(SPACE_LEFT);

    // As leader it refuses appends and still serves reads.
    let full = trio.node(FULL);
    let mut end = 0;
    let refused = loop {
        match soon(append(full, own)).await {
            Ok(next) => end = next,
            Err(status) => break status,
        }
        assert!(end < 200, "the disk never fills up");
    };
    assert_eq!(reason(&refused), ErrorReason::DiskFull, "{refused}");
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(!detail(&refused).may_have_applied);
    assert!(is_full(full).await);
    let read =
        FetchRequest { partitions: vec![from_offset(own, end - 1)], ..FetchRequest::default() };
    assert_eq!(full.fetch_one(read).await.watermarks.unwrap().high_watermark, end);

    // As follower it takes entries while they fit; the others continue without it.
    let written = write(&trio, other, 80).await;
    let had = shard_status(full, shard).await.last_index;
    let ahead = shard_status(trio.node(other_leader), shard).await.last_index;
    assert!(had < ahead, "the follower has everything: {had} of {ahead}");

    // For partitions of other leaders it redirects: their disks may have space.
    let elsewhere = append(full, other).await.unwrap_err();
    assert_eq!(reason(&elsewhere), ErrorReason::NotLeader, "{elsewhere}");

    // It votes: the node with all entries is elected by this vote alone.
    trio.stop(other_leader).await;
    let next = 3 - other_leader;
    until("the node with all entries is the leader", async || {
        let shard = trio.node(next).running.node().shard(shard.into()).unwrap();
        shard.is_leader().then_some(())
    })
    .await;
    assert!(trio.node(FULL).running.node().shard(shard.into()).unwrap().lags().is_empty());

    // With free space it catches up, and its own partitions take records.
    disk.relieve();
    let resumed = until("writes resume", async || append(trio.node(FULL), own).await.ok());
    assert_eq!(resumed.await, end + 1);
    assert_eq!(write(&trio, other, 1).await, written + 1);
    trio.start_nodes(&[other_leader]).await;
    trio.settle().await;
    expect_equal_replicas(&trio, other, written + 1).await;
    expect_equal_replicas(&trio, own, end + 1).await;
    trio.stop_all().await;
    drop(disk);
}

/// Entries that free space must be accepted where records are refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trim_frees_space_on_a_full_disk() {
    let plan = TrioPlan::new();
    let Some(disk) = SmallDisk::mount(&plan.data_dir(FULL), 640 * MIB) else { return };
    let mut trio = Trio::start(plan).await;
    trio.balanced().await;
    let mut own = None;
    for partition in 0..4 {
        if trio.leader_of(partition).await.0 == FULL {
            own = Some(partition);
        }
    }
    let own = own.expect("leaders are spread");
    disk.fill(SPACE_LEFT);
    let full = trio.node(FULL);
    let mut end = 0;
    while let Ok(next) = soon(append(full, own)).await {
        end = next;
        assert!(end < 200, "the disk never fills up");
    }
    assert!(is_full(full).await);
    let trim = TrimPartitionRequest {
        topic: "default".to_owned(),
        partition: own,
        trim_offset: end,
        topic_id: 0,
    };
    let trimmed = full.topics().trim_partition(trim).await.unwrap().into_inner();
    assert_eq!(trimmed.watermarks.unwrap().log_start_offset, end);
    let resumed = until("writes resume", async || append(full, own).await.ok());
    assert_eq!(resumed.await, end + 1);
    let producer = trio.client().producer(ProducerOptions::default());
    producer.append("default", own, &[record("small")][..]).await.unwrap();
    for (_, node) in trio.nodes() {
        assert_eq!(replica_batches(node, own, end, end + 2).await.len(), 2);
    }
    trio.stop_all().await;
    drop(disk);
}
