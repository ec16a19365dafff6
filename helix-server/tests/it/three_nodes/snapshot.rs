//! A replica that lacks what the others' logs do not have any more: it gets the bookkeeping, and
//! the records by themselves, and ends equal to the others, whatever happens meanwhile.

use std::time::Duration;

use bytes::Bytes;
use helix_client::ProducerOptions;
use helix_proto::log::v1::{
    AppendRequest, ErrorReason, HealthReason, InitProducerRequest, ProducerIdentity, Record,
};
use helix_server::log::Watermarks;
use helix_server::shard::{FetchProgress, ReadBatch, ReadFrom};

use crate::support::{TestServer, append_request, reason};
use crate::trio::{Plan, Trio, from_any, health, shard_status, until};

/// Partitions of the default topic.
const PARTITIONS: u32 = 4;

/// Bytes of a batch. A piece of what is fetched holds a few.
const BATCH_BYTES: usize = 500_000;

/// At least so many batches are written while a node is away.
const BATCHES: u64 = 100;

/// At such a pace what it lacks takes some seconds.
const SLOW: Duration = Duration::from_millis(4);

/// A record whose bytes follow from its number.
fn large(number: u64) -> [Record; 1] {
    let mut value = vec![u8::try_from(number % 251).unwrap(); BATCH_BYTES];
    value[..8].copy_from_slice(&number.to_le_bytes());
    [Record { value: Some(Bytes::from(value)), ..Record::default() }]
}

/// A node that is away while the others purge what it lacks.
struct Gap {
    trio: Trio,
    away: u64,
    shard: u32,
    /// Batches in partition 0, of a record each.
    count: u64,
    /// Its first batch, which is the last that the absent node has, has sequence 0.
    producer: ProducerIdentity,
}

impl Gap {
    /// Takes a node away with `leave`, and writes until the others have purged what it lacks.
    async fn make(plan: Plan, leave: impl AsyncFnOnce(&mut Trio, u64)) -> Self {
        let trio = Trio::start(plan).await;
        let init = InitProducerRequest::default();
        let producer = trio.node(1).produce().init_producer(init).await.unwrap();
        let producer = producer.into_inner().producer.unwrap();
        let mut gap =
            Self { away: trio.followers_of(0).await[0], shard: 0, count: 1, trio, producer };
        assert_eq!(gap.send(0, "before").await, (0, false));
        let trio = &mut gap.trio;
        equal(trio, 0, 1).await;
        let away = gap.away;
        gap.shard = trio.leader_of(0).await.1;
        let had = shard_status(trio.node(away), gap.shard).await.last_index;
        leave(trio, away).await;

        assert_eq!(gap.send(1, "while away").await, (1, false));
        gap.count = 2;
        let client = gap.trio.client();
        let producer = client.producer(ProducerOptions::default());
        let mut written = 0;
        until("the log is purged of what the node lacks", async || {
            while written < BATCHES {
                producer.append("default", 0, &large(written)[..]).await.unwrap();
                written += 1;
            }
            producer.append("default", 0, &large(written)[..]).await.unwrap();
            written += 1;
            for (id, node) in gap.trio.nodes().filter(|(id, _)| *id != away) {
                if shard_status(node, gap.shard).await.purged_index <= had {
                    return None;
                }
                assert_ne!(id, away);
            }
            Some(())
        })
        .await;
        gap.count += written;
        for partition in 1..PARTITIONS {
            producer.append("default", partition, &large(7)[..]).await.unwrap();
        }
        gap
    }

    /// A node that was stopped.
    async fn of_a_stopped_node(plan: Plan) -> Self {
        Self::make(plan.with_short_logs(), async |trio, away| trio.stop(away).await).await
    }

    /// Sends a batch of one record to partition 0; its offset, and whether it was there already.
    async fn send(&self, sequence: u64, value: &str) -> (u64, bool) {
        let request = AppendRequest {
            producer: Some(self.producer),
            first_sequence: Some(sequence),
            ..append_request(&[value])
        };
        let append = async |node: &TestServer| node.produce().append(request.clone()).await;
        let ack = self.trio.ask_leader(0, append).await.unwrap().into_inner().ack.unwrap();
        (ack.first_offset.unwrap(), ack.duplicate)
    }

    fn fetching(&self) -> Option<FetchProgress> {
        fetching(self.trio.node(self.away), self.shard)
    }

    /// Waits until the node has fetched so much more, and is not done.
    async fn fetched(&self, what: &str, more: u64) {
        let before = self.fetching().map_or(0, |it| it.bytes_done);
        let trio = &self.trio;
        until(what, async || {
            let now = fetching(trio.node(self.away), self.shard)?;
            (now.bytes_done >= before + more).then_some(())
        })
        .await;
    }

    /// Waits until all is well, and every node has the same.
    async fn expect_equal(&self) {
        self.trio.settle().await;
        equal(&self.trio, 0, self.count).await;
        for partition in 1..PARTITIONS {
            equal(&self.trio, partition, 1).await;
        }
        assert_eq!(self.fetching(), None);
    }
}

fn fetching(node: &TestServer, shard: u32) -> Option<FetchProgress> {
    node.running.node().shard(u64::from(shard))?.fetching()
}

fn watermarks(node: &TestServer, partition: u32) -> Option<Watermarks> {
    let located = node.running.node().locate("default", partition).unwrap();
    located.shard.watermarks(located.partition).ok()
}

/// What a replica has of a partition, from its log start up to `end`, once it has that much.
async fn stored(node: &TestServer, partition: u32, end: u64) -> (u64, Vec<ReadBatch>) {
    until("the replica has it all", async || {
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

/// Every node that runs has the same bytes, in the same entries, at the same offsets.
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
async fn a_replica_that_lacks_purged_log_gets_the_records_and_goes_on() {
    let mut gap = Gap::of_a_stopped_node(Plan::new()).await;
    gap.trio.start_nodes(&[gap.away]).await;
    gap.expect_equal().await;
    // What came that way outlives a restart, and is all that it would be by the log.
    gap.trio.stop(gap.away).await;
    gap.trio.start_nodes(&[gap.away]).await;
    gap.expect_equal().await;
    let read = gap.trio.node(gap.away).fetch_one(from_any(0, 0)).await;
    assert_eq!(read.records[0].offset, 0);

    gap.trio.transfer(gap.shard, gap.away).await;
    assert_eq!(gap.send(0, "before").await, (0, true), "from before it was away");
    assert_eq!(gap.send(1, "while away").await, (1, true), "it was away then");
    assert_eq!(gap.send(2, "after").await, (gap.count, false));
    gap.count += 1;
    gap.expect_equal().await;
    gap.trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_goes_on_where_a_connection_was_lost() {
    let mut gap = Gap::of_a_stopped_node(Plan::linked().await).await;
    gap.trio.slow_down(gap.away, SLOW);
    gap.trio.start_nodes(&[gap.away]).await;
    for round in 0..3 {
        gap.fetched("it fetches", 5 << 20).await;
        let before = gap.fetching().expect("it is not done").bytes_done;
        let issues = health(gap.trio.node(gap.away)).await.issues;
        let is_told = |issue: &&_| {
            let issue: &helix_proto::log::v1::HealthIssue = issue;
            issue.reason() == HealthReason::UnderReplicated && issue.message.contains("fetching")
        };
        assert!(issues.iter().any(|issue| is_told(&issue)), "{issues:?}");
        let status = shard_status(gap.trio.node(gap.away), gap.shard).await;
        let told = status.fetching.expect("it is not done");
        assert!(told.fetched_bytes >= before && told.total_bytes > before, "{told:?}");
        gap.trio.break_connections(gap.away);
        gap.fetched("it goes on", 1 << 20).await;
        let after = gap.fetching().expect("it is not done").bytes_done;
        assert!(after > before, "round {round}: {after} bytes after {before}");
    }
    gap.trio.slow_down(gap.away, Duration::ZERO);
    gap.expect_equal().await;
    gap.trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_goes_on_with_the_next_leader() {
    let mut gap = Gap::of_a_stopped_node(Plan::linked().await).await;
    gap.trio.slow_down(gap.away, SLOW);
    gap.trio.start_nodes(&[gap.away]).await;
    gap.fetched("it fetches", 10 << 20).await;
    let before = gap.fetching().expect("it is not done").bytes_done;
    let (leader, _) = gap.trio.leader_of(0).await;
    let next = (1..=3).find(|id| *id != leader && *id != gap.away).unwrap();
    gap.trio.transfer(gap.shard, next).await;
    gap.fetched("the next leader's snapshot goes on there", 1 << 20).await;
    let after = gap.fetching().expect("it is not done").bytes_done;
    assert!(after > before, "{after} bytes after {before}");
    gap.trio.slow_down(gap.away, Duration::ZERO);
    gap.expect_equal().await;
    gap.trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_half_fetched_is_not_there_after_a_restart() {
    let mut gap = Gap::of_a_stopped_node(Plan::linked().await).await;
    gap.trio.slow_down(gap.away, SLOW);
    for round in 0..2 {
        gap.trio.start_nodes(&[gap.away]).await;
        if round > 0 {
            let kept = gap.fetching().expect("it is not done").bytes_done;
            assert!(kept > 5 << 20, "{kept} bytes of what was fetched outlived the restart");
        }
        gap.fetched("it fetches", 10 << 20).await;
        // Of what is half here nothing is seen.
        let node = gap.trio.node(gap.away);
        assert_eq!(watermarks(node, 0).unwrap().high_watermark, 1);
        let read = node.fetch_one(from_any(0, 0)).await;
        assert_eq!(read.records.len(), 1);
        gap.trio.stop(gap.away).await;
    }
    gap.trio.slow_down(gap.away, Duration::ZERO);
    gap.trio.start_nodes(&[gap.away]).await;
    gap.expect_equal().await;
    gap.trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_trimmed_meanwhile_is_left_out() {
    let mut gap = Gap::of_a_stopped_node(Plan::linked().await).await;
    gap.trio.slow_down(gap.away, SLOW);
    gap.trio.start_nodes(&[gap.away]).await;
    gap.fetched("it fetches", 5 << 20).await;
    let start = gap.count - 10;
    gap.trio.client().admin().trim("default", 0, start).await.unwrap();
    gap.trio.slow_down(gap.away, Duration::ZERO);
    gap.expect_equal().await;
    let node = gap.trio.node(gap.away);
    assert_eq!(watermarks(node, 0).unwrap().log_start, start);
    let refused = node.consume().fetch(from_any(0, 1)).await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::OffsetOutOfRange);
    assert_eq!(gap.send(1, "while away").await, (1, true), "trimmed, and known all the same");
    gap.trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_go_on_beside_a_fetch_and_arrive_by_the_log() {
    let mut gap = Gap::of_a_stopped_node(Plan::linked().await).await;
    gap.trio.slow_down(gap.away, SLOW);
    gap.trio.start_nodes(&[gap.away]).await;
    gap.fetched("it fetches", 5 << 20).await;
    let client = gap.trio.client();
    let producer = client.producer(ProducerOptions::default());
    for _ in 0..50 {
        let ack = producer.append("default", 0, &meanwhile()).await.unwrap();
        assert_eq!(ack.first_offset, Some(gap.count));
        gap.count += 1;
    }
    assert!(gap.fetching().is_some(), "it is not done");
    gap.trio.slow_down(gap.away, Duration::ZERO);
    gap.expect_equal().await;
    gap.trio.stop_all().await;
}

fn meanwhile() -> Vec<Record> {
    vec![Record { value: Some(Bytes::from_static(b"meanwhile")), ..Record::default() }]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_in_memory_gets_the_records_as_well() {
    let plan = Plan::in_memory().with_links().await.with_short_logs();
    let mut gap = Gap::make(plan, async |trio, away| trio.cut_off(away)).await;
    gap.trio.heal(gap.away);
    gap.expect_equal().await;
    gap.trio.transfer(gap.shard, gap.away).await;
    assert_eq!(gap.send(1, "while away").await, (1, true), "it was away then");
    assert_eq!(gap.send(2, "after").await, (gap.count, false));
    gap.trio.stop_all().await;
}
