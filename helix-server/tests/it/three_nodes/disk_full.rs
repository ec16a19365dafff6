//! One of three nodes has no room on its disk: it takes no records, neither as a leader nor as a
//! follower, and goes on with everything else: it serves reads, votes, and makes room.

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
    Plan, Trio, expect_equal_replicas, health, replica_batches, shard_status, until,
};

const MIB: u64 = 1 << 20;

/// Less than a node keeps free, more than votes and what makes room need.
const LITTLE: u64 = 200 * MIB;

/// The node whose disk is small.
const POOR: u64 = 3;

fn megabyte() -> String {
    ".".repeat(usize::try_from(MIB).unwrap() - 100)
}

async fn append(node: &TestServer, partition: u32) -> Result<u64, Status> {
    let request = AppendRequest { partition, ..append_request(&[&megabyte()]) };
    let answer = node.produce().append(request).await?.into_inner();
    Ok(answer.ack.unwrap().next_offset.unwrap())
}

/// The end of a partition after so many more megabytes in it, through whoever leads it.
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
async fn a_node_without_room_takes_no_records_and_goes_on_with_the_rest() {
    let plan = Plan::new();
    let Some(disk) = SmallDisk::mount(&plan.folder(POOR), 640 * MIB) else { return };
    let mut trio = Trio::start(plan).await;
    // A partition that the poor node leads, and one that another node leads.
    let mut by_leader = std::collections::BTreeMap::new();
    for partition in 0..4 {
        by_leader.insert(trio.leader_of(partition).await, partition);
    }
    let led_by = |node: u64| by_leader.iter().find(|((leader, _), _)| *leader == node);
    let (_, own) = led_by(POOR).expect("leaders are spread");
    let ((rich, shard), other) = led_by(1).or_else(|| led_by(2)).expect("leaders are spread");
    let (own, rich, shard, other) = (*own, *rich, *shard, *other);
    disk.fill(LITTLE);

    // As a leader it refuses, and what was there can be read.
    let poor = trio.node(POOR);
    let mut end = 0;
    let refused = loop {
        match soon(append(poor, own)).await {
            Ok(next) => end = next,
            Err(status) => break status,
        }
        assert!(end < 200, "the disk never fills up");
    };
    assert_eq!(reason(&refused), ErrorReason::DiskFull, "{refused}");
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(!detail(&refused).may_have_applied);
    assert!(is_full(poor).await);
    let read =
        FetchRequest { partitions: vec![from_offset(own, end - 1)], ..FetchRequest::default() };
    assert_eq!(poor.fetch_one(read).await.watermarks.unwrap().high_watermark, end);

    // As a follower it takes what it has room for; the others go on without it.
    let written = write(&trio, other, 80).await;
    let had = shard_status(poor, shard).await.last_index;
    let ahead = shard_status(trio.node(rich), shard).await.last_index;
    assert!(had < ahead, "it has taken everything: {had} of {ahead}");

    // Asked for what it does not lead, it says who does: there may be room there.
    let elsewhere = append(poor, other).await.unwrap_err();
    assert_eq!(reason(&elsewhere), ErrorReason::NotLeader, "{elsewhere}");

    // It votes: the other one, who has everything, is elected by its vote alone.
    trio.stop(rich).await;
    let next = 3 - rich;
    until("the node that has everything leads", async || {
        let shard = trio.node(next).running.node().shard(shard.into()).unwrap();
        shard.is_leader().then_some(())
    })
    .await;
    assert!(trio.node(POOR).running.node().shard(shard.into()).unwrap().lags().is_empty());

    // With room again it takes what it lacks, and its own partitions take records.
    disk.relieve();
    let resumed =
        until("writes resume by themselves", async || append(trio.node(POOR), own).await.ok());
    assert_eq!(resumed.await, end + 1);
    assert_eq!(write(&trio, other, 1).await, written + 1);
    trio.start_nodes(&[rich]).await;
    trio.settle().await;
    expect_equal_replicas(&trio, other, written + 1).await;
    expect_equal_replicas(&trio, own, end + 1).await;
    trio.stop_all().await;
    drop(disk);
}

/// All that frees a full disk is an entry of the log: it must come through where records do not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_room_makes_room_when_records_are_trimmed() {
    let plan = Plan::new();
    let Some(disk) = SmallDisk::mount(&plan.folder(POOR), 640 * MIB) else { return };
    let mut trio = Trio::start(plan).await;
    let mut own = None;
    for partition in 0..4 {
        if trio.leader_of(partition).await.0 == POOR {
            own = Some(partition);
        }
    }
    let own = own.expect("leaders are spread");
    disk.fill(LITTLE);
    let poor = trio.node(POOR);
    let mut end = 0;
    while let Ok(next) = soon(append(poor, own)).await {
        end = next;
        assert!(end < 200, "the disk never fills up");
    }
    assert!(is_full(poor).await);
    let trim =
        TrimPartitionRequest { topic: "default".to_owned(), partition: own, trim_offset: end };
    let trimmed = poor.topics().trim_partition(trim).await.unwrap().into_inner();
    assert_eq!(trimmed.watermarks.unwrap().log_start_offset, end);
    let resumed = until("writes resume by themselves", async || append(poor, own).await.ok());
    assert_eq!(resumed.await, end + 1);
    let producer = trio.client().producer(ProducerOptions::default());
    producer.append("default", own, &[record("small")][..]).await.unwrap();
    for (_, node) in trio.nodes() {
        assert_eq!(replica_batches(node, own, end, end + 2).await.len(), 2);
    }
    trio.stop_all().await;
    drop(disk);
}
