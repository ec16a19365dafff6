//! A replica that lacks purged log fetches the records, installs the snapshot and ends equal to
//! the others, despite restarts, leader changes, trims and writes meanwhile.

use std::time::Duration;

use bytes::Bytes;
use helix_client::ProducerOptions;
use helix_proto::log::v1::{
    AppendRequest, CommitOffsetsRequest, DescribeGroupRequest, ErrorReason, HealthReason,
    InitProducerRequest, ListGroupsRequest, ProducerIdentity, Record,
};
use helix_server::log::Watermarks;
use helix_server::shard::{FetchProgress, ReadBatch, ReadFrom};

use crate::groups::{commit_at, groups};
use crate::support::{TestServer, append_request, reason};
use crate::trio::{Trio, TrioPlan, from_any, health, shard_status, until};

/// Partitions of the default topic.
const PARTITIONS: u32 = 4;

/// Bytes of a batch. A fetched chunk holds a few.
const BATCH_BYTES: usize = 500_000;

/// Least number of batches written while the node is away.
const BATCHES: u64 = 100;

/// Pause per 64 KiB at which the fetch takes some seconds.
const SLOW: Duration = Duration::from_millis(4);

/// A record with bytes derived from its number.
fn large(number: u64) -> [Record; 1] {
    let mut value = vec![u8::try_from(number % 251).unwrap(); BATCH_BYTES];
    value[..8].copy_from_slice(&number.to_le_bytes());
    [Record { value: Some(Bytes::from(value)), ..Record::default() }]
}

/// A node that is absent while the others purge what it lacks.
struct AbsentNode {
    trio: Trio,
    away: u64,
    shard: u32,
    /// Batches in partition 0, one record each.
    count: u64,
    /// Its batch with sequence 0 is the last that the absent node has.
    producer: ProducerIdentity,
    /// A group of this shard, which begins while the node is away.
    group: String,
}

impl AbsentNode {
    /// Stops or isolates a node by `leave`, and writes until the others have purged what it lacks.
    async fn make(plan: TrioPlan, leave: impl AsyncFnOnce(&mut Trio, u64)) -> Self {
        // Only transfers change leaders here.
        let trio = Trio::start(plan.steady()).await;
        let init = InitProducerRequest::default();
        let producer = trio.node(1).produce().init_producer(init).await.unwrap();
        let producer = producer.into_inner().producer.unwrap();
        let mut absent = Self {
            away: trio.followers_of(0).await[0],
            shard: 0,
            count: 1,
            trio,
            producer,
            group: String::new(),
        };
        assert_eq!(absent.send(0, "before").await, (0, false));
        let trio = &mut absent.trio;
        equal(trio, 0, 1).await;
        let away = absent.away;
        absent.shard = trio.leader_of(0).await.1;
        let had = shard_status(trio.node(away), absent.shard).await.last_index;
        leave(trio, away).await;

        assert_eq!(absent.send(1, "while away").await, (1, false));
        absent.count = 2;
        absent.group = absent.begin_group().await;
        let client = absent.trio.client();
        let producer = client.producer(ProducerOptions::default());
        let mut written = 0;
        until("the log is purged of what the node lacks", async || {
            while written < BATCHES {
                producer.append("default", 0, &large(written)[..]).await.unwrap();
                written += 1;
            }
            producer.append("default", 0, &large(written)[..]).await.unwrap();
            written += 1;
            for (id, node) in absent.trio.nodes().filter(|(id, _)| *id != away) {
                if shard_status(node, absent.shard).await.purged_index <= had {
                    return None;
                }
                assert_ne!(id, away);
            }
            Some(())
        })
        .await;
        absent.count += written;
        for partition in 1..PARTITIONS {
            producer.append("default", partition, &large(7)[..]).await.unwrap();
        }
        absent
    }

    /// Stops a node and writes until the others have purged what it lacks.
    async fn of_a_stopped_node(plan: TrioPlan) -> Self {
        Self::make(plan.with_short_logs(), async |trio, away| trio.stop(away).await).await
    }

    /// Sends a batch of one record to partition 0; returns its offset and if it is a duplicate.
    async fn send(&self, sequence: u64, value: &str) -> (u64, bool) {
        let request = AppendRequest {
            producer: Some(self.producer),
            first_sequence: Some(sequence),
            ..append_request(&[value])
        };
        let append = async |node: &TestServer| node.produce().append(request.clone()).await;
        let ack = self.trio.call_leader(0, append).await.unwrap().into_inner().ack.unwrap();
        (ack.first_offset.unwrap(), ack.duplicate)
    }

    /// Commits an offset of a new group in the shard of partition 0; returns the group's name.
    async fn begin_group(&self) -> String {
        let (leader, _) = self.trio.leader_of(0).await;
        let node = self.trio.node(leader);
        for number in 0..1_000 {
            let group = format!("group-{number}");
            let request = CommitOffsetsRequest {
                group: group.clone(),
                offsets: vec![commit_at(0, 1)],
                ..CommitOffsetsRequest::default()
            };
            if groups(node).commit_offsets(request).await.is_err() {
                continue;
            }
            let request = DescribeGroupRequest { group: group.clone(), ..Default::default() };
            let described = groups(node).describe_group(request).await.unwrap().into_inner();
            if described.shard_id == self.shard {
                return group;
            }
        }
        panic!("no group is in shard {}", self.shard);
    }

    fn fetching(&self) -> Option<FetchProgress> {
        fetching(self.trio.node(self.away), self.shard)
    }

    /// Waits until the node has fetched `more` bytes and is not done.
    async fn fetched(&self, what: &str, more: u64) {
        let before = self.fetching().map_or(0, |it| it.bytes_done);
        let trio = &self.trio;
        until(what, async || {
            let now = fetching(trio.node(self.away), self.shard)?;
            (now.bytes_done >= before + more).then_some(())
        })
        .await;
    }

    /// Waits until all nodes are healthy and have equal records.
    async fn expect_equal(&self) {
        self.trio.settle().await;
        equal(&self.trio, 0, self.count).await;
        for partition in 1..PARTITIONS {
            equal(&self.trio, partition, 1).await;
        }
        assert_eq!(self.fetching(), None);
        let request = ListGroupsRequest { page_size: 1_000, ..ListGroupsRequest::default() };
        let listed = groups(self.trio.node(self.away)).list_groups(request).await.unwrap();
        let listed = listed.into_inner().groups;
        assert!(listed.iter().any(|it| it.group == self.group), "the snapshot has the group");
    }
}

fn fetching(node: &TestServer, shard: u32) -> Option<FetchProgress> {
    node.running.node().shard(u64::from(shard))?.fetching()
}

fn watermarks(node: &TestServer, partition: u32) -> Option<Watermarks> {
    let located = node.running.node().locate("default", partition).unwrap();
    located.shard.watermarks(located.partition).ok()
}

/// Waits for `end`; returns the log start of a replica's partition and its batches up to `end`.
async fn stored(node: &TestServer, partition: u32, end: u64) -> (u64, Vec<ReadBatch>) {
    until("the replica has all records", async || {
        let watermarks = watermarks(node, partition)?;
        if watermarks.high_watermark < end {
            return None;
        }
        let located = node.running.node().locate("default", partition).unwrap();
        let (mut next, mut found) = (watermarks.log_start, Vec::new());
        while next < end {
            let read =
                located.shard.read(located.partition, next, None, 8 << 20, ReadFrom::AnyReplica);
            let read = read.await.ok()?;
            next = read.next_offset;
            found.extend(read.batches);
        }
        Some((watermarks.log_start, found))
    })
    .await
}

/// Expects the same bytes in the same entries at the same offsets on all running nodes.
async fn equal(trio: &Trio, partition: u32, end: u64) {
    let mut first: Option<(u64, Vec<ReadBatch>)> = None;
    for (id, node) in trio.nodes() {
        let (start, batches) = stored(node, partition, end).await;
        let Some((first_start, first)) = &first else {
            first = Some((start, batches));
            continue;
        };
        assert_eq!((*first_start, first.len()), (start, batches.len()), "node {id}");
        for (a, b) in first.iter().zip(&batches) {
            let place = |it: &ReadBatch| {
                (it.log_id, it.first_offset, it.record_count, it.append_time_us, it.crc)
            };
            assert_eq!(place(a), place(b), "node {id}, partition {partition}");
            assert!(a.payload == b.payload, "node {id}, partition {partition}: {:?}", place(a));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_that_lacks_purged_log_fetches_records() {
    let mut absent = AbsentNode::of_a_stopped_node(TrioPlan::new()).await;
    absent.trio.start_nodes(&[absent.away]).await;
    absent.expect_equal().await;
    // Fetched records survive a restart and equal those of the log.
    absent.trio.stop(absent.away).await;
    absent.trio.start_nodes(&[absent.away]).await;
    absent.expect_equal().await;
    let read = absent.trio.node(absent.away).fetch_one(from_any(0, 0)).await;
    assert_eq!(read.records[0].offset, 0);

    absent.trio.transfer(absent.shard, absent.away).await;
    assert_eq!(absent.send(0, "before").await, (0, true), "written before it was away");
    assert_eq!(absent.send(1, "while away").await, (1, true), "written while it was away");
    assert_eq!(absent.send(2, "after").await, (absent.count, false));
    absent.count += 1;
    absent.expect_equal().await;
    absent.trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fetch_resumes_after_a_lost_connection() {
    let mut absent = AbsentNode::of_a_stopped_node(TrioPlan::linked().await).await;
    absent.trio.slow_down(absent.away, SLOW);
    absent.trio.start_nodes(&[absent.away]).await;
    for round in 0..3 {
        absent.fetched("the fetch has started", 5 << 20).await;
        let before = absent.fetching().expect("the fetch is not done").bytes_done;
        let issues = health(absent.trio.node(absent.away)).await.issues;
        let is_reported = |issue: &&_| {
            let issue: &helix_proto::log::v1::HealthIssue = issue;
            issue.reason() == HealthReason::UnderReplicated && issue.message.contains("fetching")
        };
        assert!(issues.iter().any(|issue| is_reported(&issue)), "{issues:?}");
        let status = shard_status(absent.trio.node(absent.away), absent.shard).await;
        let fetching = status.fetching.expect("the fetch is not done");
        assert!(fetching.fetched_bytes >= before && fetching.total_bytes > before, "{fetching:?}");
        absent.trio.break_connections(absent.away);
        absent.fetched("the fetch resumes", 1 << 20).await;
        let after = absent.fetching().expect("the fetch is not done").bytes_done;
        assert!(after > before, "round {round}: {after} bytes after {before}");
    }
    absent.trio.slow_down(absent.away, Duration::ZERO);
    absent.expect_equal().await;
    absent.trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fetch_resumes_from_the_next_leader() {
    let mut absent = AbsentNode::of_a_stopped_node(TrioPlan::linked().await).await;
    absent.trio.slow_down(absent.away, SLOW);
    absent.trio.start_nodes(&[absent.away]).await;
    absent.fetched("the fetch has started", 10 << 20).await;
    let before = absent.fetching().expect("the fetch is not done").bytes_done;
    let (leader, _) = absent.trio.leader_of(0).await;
    let next = (1..=3).find(|id| *id != leader && *id != absent.away).unwrap();
    absent.trio.transfer(absent.shard, next).await;
    absent.fetched("the fetch resumes from the next leader", 1 << 20).await;
    let after = absent.fetching().expect("the fetch is not done").bytes_done;
    assert!(after > before, "{after} bytes after {before}");
    absent.trio.slow_down(absent.away, Duration::ZERO);
    absent.expect_equal().await;
    absent.trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partial_fetch_is_invisible_and_kept_across_restarts() {
    let mut absent = AbsentNode::of_a_stopped_node(TrioPlan::linked().await).await;
    absent.trio.slow_down(absent.away, SLOW);
    for round in 0..2 {
        absent.trio.start_nodes(&[absent.away]).await;
        if round > 0 {
            let kept = absent.fetching().expect("the fetch is not done").bytes_done;
            assert!(kept > 5 << 20, "{kept} fetched bytes survived the restart");
        }
        absent.fetched("the fetch has started", 10 << 20).await;
        // A partial fetch is invisible.
        let node = absent.trio.node(absent.away);
        assert_eq!(watermarks(node, 0).unwrap().high_watermark, 1);
        let read = node.fetch_one(from_any(0, 0)).await;
        assert_eq!(read.records.len(), 1);
        absent.trio.stop(absent.away).await;
    }
    absent.trio.slow_down(absent.away, Duration::ZERO);
    absent.trio.start_nodes(&[absent.away]).await;
    absent.expect_equal().await;
    absent.trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_trimmed_during_a_fetch_are_skipped() {
    let mut absent = AbsentNode::of_a_stopped_node(TrioPlan::linked().await).await;
    absent.trio.slow_down(absent.away, SLOW);
    absent.trio.start_nodes(&[absent.away]).await;
    absent.fetched("the fetch has started", 5 << 20).await;
    let start = absent.count - 10;
    absent.trio.client().admin().trim("default", 0, start).await.unwrap();
    absent.trio.slow_down(absent.away, Duration::ZERO);
    absent.expect_equal().await;
    let node = absent.trio.node(absent.away);
    assert_eq!(watermarks(node, 0).unwrap().log_start, start);
    let refused = node.consume().fetch(from_any(0, 1)).await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::OffsetOutOfRange);
    assert_eq!(absent.send(1, "while away").await, (1, true), "trimmed, and still a duplicate");
    absent.trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_during_a_fetch_arrive_through_the_log() {
    let mut absent = AbsentNode::of_a_stopped_node(TrioPlan::linked().await).await;
    absent.trio.slow_down(absent.away, SLOW);
    absent.trio.start_nodes(&[absent.away]).await;
    absent.fetched("the fetch has started", 5 << 20).await;
    let client = absent.trio.client();
    let producer = client.producer(ProducerOptions::default());
    for _ in 0..50 {
        let ack = producer.append("default", 0, &meanwhile()).await.unwrap();
        assert_eq!(ack.first_offset, Some(absent.count));
        absent.count += 1;
    }
    assert!(absent.fetching().is_some(), "the fetch is not done");
    absent.trio.slow_down(absent.away, Duration::ZERO);
    absent.expect_equal().await;
    absent.trio.stop_all().await;
}

fn meanwhile() -> Vec<Record> {
    vec![Record { value: Some(Bytes::from_static(b"meanwhile")), ..Record::default() }]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_replica_fetches_records() {
    let plan = TrioPlan::in_memory().with_links().await.with_short_logs();
    let mut absent = AbsentNode::make(plan, async |trio, away| trio.isolate(away)).await;
    absent.trio.heal(absent.away);
    absent.expect_equal().await;
    absent.trio.transfer(absent.shard, absent.away).await;
    assert_eq!(absent.send(1, "while away").await, (1, true), "written while it was away");
    assert_eq!(absent.send(2, "after").await, (absent.count, false));
    absent.trio.stop_all().await;
}
