//! The Rust client's consumer of groups against servers: what it reads, commits and gives up.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use helix_client::{
    AssignedPartition, AutoCommit, Client, Config, GroupConsumer, GroupConsumerBuilder, GroupEvent,
    NewTopic, OffsetToCommit, ProducerOptions, Records, StartPolicy,
};
use helix_proto::log::v1::{
    AddPartitionsRequest, CommitOffsetsRequest, DeliveryStatus, DescribeGroupRequest,
    ErrorReason as R, GetOffsetsRequest, LeaveRequest,
};
use helix_server::metrics::MetricsPage;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::groups::{commit_at, describe, groups, offsets};
use crate::support::{TestServer, on_both, reason, record, soon};
use crate::trio::until;

const GROUP: &str = "readers";

fn client(server: &TestServer) -> Client {
    let config = Config {
        backoff_max: Duration::from_millis(50),
        ..Config::new([server.running.local_addr().to_string()])
    };
    Client::new(config).unwrap()
}

fn member(client: &Client) -> GroupConsumerBuilder {
    client.consumer_group(GROUP).topics(["default"])
}

/// Returns the next records, and ignores changes of the assignment.
async fn next_records(consumer: &mut GroupConsumer) -> Records {
    soon(consumer.next_records()).await.expect("the consumer has not ended").unwrap()
}

/// Reads until these many records have arrived. Returns their values by partition.
async fn read(consumer: &mut GroupConsumer, count: usize) -> BTreeMap<u32, Vec<String>> {
    let mut values: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    let mut seen = 0;
    while seen < count {
        let Records { partition, records, .. } = next_records(consumer).await;
        seen += records.len();
        let text =
            |value: Option<bytes::Bytes>| String::from_utf8(value.unwrap().to_vec()).unwrap();
        values.entry(partition).or_default().extend(records.into_iter().map(|it| text(it.value)));
    }
    assert_eq!(seen, count, "{values:?}");
    values
}

/// Waits for the first assignment.
async fn assigned(consumer: &mut GroupConsumer) -> Vec<AssignedPartition> {
    match soon(consumer.next()).await.unwrap().unwrap() {
        GroupEvent::Assigned(partitions) => partitions,
        other => panic!("{other:?}"),
    }
}

/// Committed offsets by partition; none if the group does not exist.
async fn committed(server: &TestServer) -> BTreeMap<u32, u64> {
    let request = GetOffsetsRequest { group: GROUP.to_owned(), ..GetOffsetsRequest::default() };
    let offsets = match groups(server).get_offsets(request).await {
        Ok(response) => response.into_inner().offsets,
        Err(status) => {
            assert_eq!(reason(&status), R::GroupNotFound);
            Vec::new()
        }
    };
    let rows = offsets.into_iter().map(|row| row.committed.unwrap());
    rows.map(|row| (row.partition.unwrap().partition, row.offset)).collect()
}

async fn member_count(server: &TestServer) -> usize {
    let request =
        DescribeGroupRequest { group: GROUP.to_owned(), ..DescribeGroupRequest::default() };
    let described = groups(server).describe_group(request).await;
    described.map_or(0, |described| described.into_inner().members.len())
}

async fn until_members(server: &TestServer, count: usize) {
    until("the group has its members", async || {
        (member_count(server).await == count).then_some(())
    })
    .await;
}

#[tokio::test]
async fn one_member_reads_all_and_the_next_one_continues() {
    on_both(async |server: TestServer| {
        server.append_to(0, &["a", "b"]).await;
        server.append_to(3, &["c"]).await;
        let client = client(&server);
        let mut consumer = member(&client).join();
        let partitions = assigned(&mut consumer).await;
        assert_eq!(partitions.iter().map(|it| it.partition).collect::<Vec<_>>(), [0, 1, 2, 3]);
        let values = read(&mut consumer, 3).await;
        assert_eq!(
            (&values[&0][..], &values[&3][..]),
            (&["a", "b"].map(String::from)[..], &["c".to_owned()][..])
        );
        assert_eq!(consumer.assignment(), partitions);
        assert_eq!(consumer.position(&partitions[0]), Some(2));
        soon(consumer.close()).await.unwrap();
        assert_eq!(committed(&server).await, BTreeMap::from([(0, 2), (3, 1)]));
        assert_eq!(member_count(&server).await, 0);

        server.append_to(0, &["d"]).await;
        let mut consumer = member(&client).join();
        assert_eq!(read(&mut consumer, 1).await[&0], ["d"]);
        soon(consumer.commit_sync()).await.unwrap();
        assert_eq!(committed(&server).await[&0], 3, "the last records count");
    })
    .await;
}

#[tokio::test]
async fn unread_records_are_never_committed() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    let every_ms = AutoCommit::Every(Duration::from_millis(1));
    let mut consumer = member(&client).auto_commit(every_ms).join();
    assigned(&mut consumer).await;
    server.append(&["a"]).await;
    assert_eq!(next_records(&mut consumer).await.next_offset, 1);
    server.append(&["b"]).await;
    // The application fails while it works on "a".
    drop(consumer);
    until_members(&server, 0).await;
    assert!(committed(&server).await.is_empty());

    let mut consumer = member(&client).auto_commit(every_ms).join();
    let first = next_records(&mut consumer).await;
    server.append(&["c"]).await;
    if first.next_offset == 1 {
        next_records(&mut consumer).await;
    }
    let before = next_records(&mut consumer).await;
    assert_eq!(before.next_offset, 3);
    // It has asked beyond everything but "c".
    until("the interval has passed", async || {
        (committed(&server).await.get(&0) == Some(&2)).then_some(())
    })
    .await;
    drop(consumer);
    until_members(&server, 0).await;
    assert_eq!(committed(&server).await, BTreeMap::from([(0, 2)]));
}

#[tokio::test]
async fn without_automatic_commits_only_requests_count() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    server.append(&["a", "b", "c"]).await;
    let mut consumer = member(&client).auto_commit(AutoCommit::Off).join();
    let records = next_records(&mut consumer).await;
    let partition = AssignedPartition::from(&records);
    let offset = OffsetToCommit { metadata: "half".to_owned(), ..OffsetToCommit::new(&records, 2) };
    soon(consumer.commit_offsets([offset])).await.unwrap();
    let row = offsets(&server).await.remove(0).committed.unwrap();
    assert_eq!((row.offset, row.metadata.as_str()), (2, "half"));
    let foreign = AssignedPartition { partition: 9, ..partition };
    let refused = consumer.commit_offsets([OffsetToCommit::new(foreign, 1)]).await.unwrap_err();
    assert!(refused.is(R::PartitionNotOwned), "{refused}");
    soon(consumer.close()).await.unwrap();
    assert_eq!(committed(&server).await[&0], 2);
    let mut consumer = member(&client).auto_commit(AutoCommit::Off).join();
    assert_eq!(read(&mut consumer, 1).await[&0], ["c"]);
    consumer.commit();
    until("the commit is there", async || (committed(&server).await[&0] == 3).then_some(())).await;
}

#[tokio::test]
async fn failed_commits_fail_again_until_they_are_replaced() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    server.append_to(0, &["a"]).await;
    server.append_to(1, &["b"]).await;
    let join = || member(&client).auto_commit(AutoCommit::Off).join();
    let mut consumer = join();
    let mut ends = BTreeMap::new();
    while ends.len() < 2 {
        let records = next_records(&mut consumer).await;
        ends.insert(records.partition, AssignedPartition::from(&records));
    }
    let rejected = || {
        let metadata = "x".repeat(5000);
        OffsetToCommit { metadata, ..OffsetToCommit::new(ends[&0].clone(), 1) }
    };
    let invalid = soon(consumer.commit_offsets([rejected()])).await.unwrap_err();
    assert!(invalid.is(R::InvalidArgument), "{invalid}");
    // The position equals the offset that was rejected.
    let again = soon(consumer.commit_sync()).await.unwrap_err();
    assert!(again.is(R::InvalidArgument), "{again}");
    assert_eq!(committed(&server).await, BTreeMap::from([(1, 1)]), "other partitions go on");
    let replaced = OffsetToCommit::new(ends[&0].clone(), 1);
    soon(consumer.commit_offsets([replaced])).await.unwrap();
    assert_eq!(committed(&server).await, BTreeMap::from([(0, 1), (1, 1)]));
    soon(consumer.commit_offsets([rejected()])).await.unwrap_err();
    let closed = soon(consumer.close()).await.unwrap_err();
    assert!(closed.is(R::InvalidArgument), "{closed}");
    // A seek removes it.
    let mut consumer = join();
    let partitions = assigned(&mut consumer).await;
    soon(consumer.commit_offsets([rejected()])).await.unwrap_err();
    consumer.seek(&partitions[0], 0).unwrap();
    soon(consumer.close()).await.unwrap();
}

#[tokio::test]
async fn longest_durations_mean_never() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    server.append(&["a"]).await;
    let mut consumer = member(&client)
        .auto_commit(AutoCommit::Every(Duration::MAX))
        .release_timeout(Duration::MAX)
        .join();
    assert_eq!(read(&mut consumer, 1).await[&0], ["a"]);
    soon(consumer.close()).await.unwrap();
    assert_eq!(committed(&server).await[&0], 1);
}

#[tokio::test]
async fn partitions_can_be_paused_and_sought() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    server.append_to(0, &["a", "b"]).await;
    let mut consumer = member(&client).join();
    let partitions = assigned(&mut consumer).await;
    // Before the first record.
    consumer.seek(&partitions[0], 1).unwrap();
    assert_eq!(read(&mut consumer, 1).await[&0], ["b"]);
    consumer.pause(&partitions[..1]).unwrap();
    server.append_to(0, &["c"]).await;
    server.append_to(1, &["d"]).await;
    assert_eq!(read(&mut consumer, 1).await[&1], ["d"]);
    until("the service knows", async || {
        let request =
            DescribeGroupRequest { group: GROUP.to_owned(), ..DescribeGroupRequest::default() };
        let described = groups(&server).describe_group(request).await.unwrap().into_inner();
        (described.partitions[0].status() == DeliveryStatus::Paused).then_some(())
    })
    .await;
    consumer.resume(&partitions[..1]).unwrap();
    assert_eq!(read(&mut consumer, 1).await[&0], ["c"]);
    consumer.seek(&partitions[0], 0).unwrap();
    assert_eq!(read(&mut consumer, 3).await[&0], ["a", "b", "c"]);
    let foreign = AssignedPartition { partition: 9, ..partitions[0].clone() };
    for refused in [consumer.seek(&foreign, 0), consumer.pause(std::slice::from_ref(&foreign))] {
        assert!(refused.unwrap_err().is(R::PartitionNotOwned));
    }
}

#[tokio::test]
async fn pauses_in_turn_skip_and_repeat_nothing() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    let mut consumer = member(&client).join();
    let partitions = assigned(&mut consumer).await;
    for round in 0..6 {
        let value = format!("{round}");
        for paused in &partitions {
            consumer.pause(std::slice::from_ref(paused)).unwrap();
            for partition in 0..4 {
                server.append_to(partition, &[&value]).await;
            }
            let others = read(&mut consumer, 3).await;
            assert!(!others.contains_key(&paused.partition), "{others:?}");
            consumer.resume(std::slice::from_ref(paused)).unwrap();
            assert_eq!(read(&mut consumer, 1).await[&paused.partition], [&value[..]]);
        }
    }
    soon(consumer.close()).await.unwrap();
    assert!(committed(&server).await.values().all(|offset| *offset == 24));
}

#[tokio::test]
async fn cancelled_calls_lose_no_event() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    let mut consumer = member(&client).join();
    let (mut assigned, mut offsets) = (0, Vec::new());
    for number in 0..20 {
        server.append(&["x"]).await;
        let read = async {
            while offsets.len() <= number {
                let event = tokio::select! {
                    biased;
                    event = consumer.next() => event.unwrap().unwrap(),
                    () = tokio::task::yield_now() => continue,
                };
                match event {
                    GroupEvent::Data(data) => {
                        offsets.extend(data.records.iter().map(|it| it.offset))
                    }
                    GroupEvent::Assigned(partitions) => assigned += partitions.len(),
                    _ => {}
                }
            }
        };
        soon(read).await;
    }
    assert_eq!((assigned, offsets), (4, (0..20).collect()));
}

#[tokio::test]
async fn dropped_consumer_leaves_at_once() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    let mut consumer = member(&client).session_timeout(Duration::from_secs(600)).join();
    assigned(&mut consumer).await;
    drop(consumer);
    until_members(&server, 0).await;
}

#[tokio::test]
async fn removed_member_learns_it_and_joins_again() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    server.append(&["a"]).await;
    let mut consumer = member(&client).member_id("m1").auto_commit(AutoCommit::Off).join();
    read(&mut consumer, 1).await;
    let request = LeaveRequest { group: GROUP.to_owned(), member_id: "m1".to_owned() };
    groups(&server).leave(request).await.unwrap();
    let GroupEvent::Lost(lost) = soon(consumer.next()).await.unwrap().unwrap() else {
        panic!("the partitions are lost")
    };
    assert_eq!(lost.len(), 4);
    soon(consumer.commit_sync()).await.unwrap();
    assert!(committed(&server).await.is_empty(), "a lost position is not committed");
    assert_eq!(assigned(&mut consumer).await, lost);
    assert_eq!(read(&mut consumer, 1).await[&0], ["a"], "at least once");
}

#[tokio::test]
async fn rejected_join_ends_the_consumer() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    let mut consumer = client.consumer_group(GROUP).topics(["no spaces"]).join();
    let error = soon(consumer.next()).await.unwrap().unwrap_err();
    assert!(error.is(R::InvalidArgument), "{error}");
    assert!(soon(consumer.next()).await.is_none());
    soon(consumer.close()).await.unwrap();
}

#[tokio::test]
async fn overtaken_offset_stops_its_partition_only() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    server.append_to(0, &["a", "b", "c"]).await;
    server.append_to(1, &["d"]).await;
    let offset = CommitOffsetsRequest {
        group: GROUP.to_owned(),
        offsets: vec![commit_at(0, 1)],
        ..CommitOffsetsRequest::default()
    };
    groups(&server).commit_offsets(offset).await.unwrap();
    client.admin().trim("default", 0, 2).await.unwrap();
    let mut consumer = member(&client).join();
    let partitions = assigned(&mut consumer).await;
    let (mut errors, mut values) = (Vec::new(), Vec::new());
    while errors.is_empty() || values.is_empty() {
        match soon(consumer.next()).await.unwrap() {
            Ok(GroupEvent::Data(records)) => values.push(records.partition),
            Ok(_) => {}
            Err(error) => errors.push(error),
        }
    }
    assert!(errors[0].is(R::OffsetOutOfRange), "{}", errors[0]);
    assert_eq!(errors[0].topic_partition, Some(("default".to_owned(), 0)));
    assert_eq!(values, [1]);
    consumer.seek(&partitions[0], 2).unwrap();
    assert_eq!(read(&mut consumer, 1).await[&0], ["c"]);
    drop(consumer);
    until_members(&server, 0).await;

    let mut consumer = member(&client).start(StartPolicy::Earliest).join();
    assert_eq!(read(&mut consumer, 1).await[&0], ["c"], "as the policy says");
    soon(consumer.close()).await.unwrap();
    let mut strict =
        client.consumer_group("new").topics(["default"]).start(StartPolicy::Fail).join();
    assigned(&mut strict).await;
    let error = soon(strict.next()).await.unwrap().unwrap_err();
    assert!(error.is(R::NoCommittedOffset), "{error}");
}

/// The group has no committed offset, so only that of the reader is overtaken.
#[tokio::test]
async fn fallback_of_a_running_reader_is_counted() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    let consumer = member(&client).start(StartPolicy::Earliest).auto_commit(AutoCommit::Off);
    let mut consumer = consumer.join();
    let partitions = assigned(&mut consumer).await;
    server.append_to(0, &["a", "b"]).await;
    read(&mut consumer, 2).await;
    consumer.pause(&partitions[..1]).unwrap();
    server.append_to(0, &["c"]).await;
    server.append_to(0, &["d"]).await;
    client.admin().trim("default", 0, 3).await.unwrap();
    consumer.resume(&partitions[..1]).unwrap();
    assert_eq!(read(&mut consumer, 1).await[&0], ["d"]);
    let mut page = MetricsPage::default();
    server.running.node().metrics().write(&mut page);
    let page = page.to_string();
    assert!(page.lines().any(|line| line == "helix_group_fallbacks_total 1"), "{page}");
}

#[tokio::test]
async fn recreated_topic_is_not_read_silently() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    client.admin().create_topic(&NewTopic::new("orders", 1)).await.unwrap();
    let producer = client.producer(ProducerOptions::default());
    producer.append("orders", 0, &[record("a")][..]).await.unwrap();
    let orders = || client.consumer_group(GROUP).topics(["orders"]);
    let mut consumer = orders().join();
    read(&mut consumer, 1).await;
    soon(consumer.commit_sync()).await.unwrap();
    client.admin().delete_topic("orders").await.unwrap();
    client.admin().create_topic(&NewTopic::new("orders", 1)).await.unwrap();
    let producer = client.producer(ProducerOptions::default());
    producer.append("orders", 0, &[record("b")][..]).await.unwrap();
    let error = loop {
        match soon(consumer.next()).await.unwrap() {
            Ok(GroupEvent::Data(records)) => panic!("{records:?}"),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(error.is(R::TopicRecreated), "{error}");
    let is_recreated = async || {
        let partitions = describe(&server).await.partitions;
        partitions.last().is_some_and(|it| it.status() == DeliveryStatus::TopicRecreated)
    };
    assert!(is_recreated().await, "the group says why the partition stops");
    until("the earlier topic's offsets are forgotten", async || {
        offsets(&server).await.is_empty().then_some(())
    })
    .await;
    assert!(is_recreated().await, "the group remembers the earlier topic");
    let partition = consumer.assignment().remove(0);
    consumer.seek(&partition, 0).unwrap();
    assert_eq!(read(&mut consumer, 1).await[&0], ["b"]);
    soon(consumer.commit_sync()).await.unwrap();
    assert!(!is_recreated().await);
    soon(consumer.close()).await.unwrap();
}

#[tokio::test]
async fn static_member_keeps_its_partitions_across_a_restart() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    let worker = || member(&client).static_member("worker-1");
    let mut first = worker().join();
    assigned(&mut first).await;
    let mut other = member(&client).join();
    let revoked = loop {
        match soon(first.next()).await.unwrap().unwrap() {
            GroupEvent::Revoked(partitions) => break partitions,
            GroupEvent::CaughtUp { .. } => {}
            event => panic!("{event:?}"),
        }
    };
    // The next call releases them.
    let (kept, taken) = {
        let driven = drive(&mut first, || false);
        tokio::select! {
            () = driven => unreachable!("it is driven without end"),
            taken = assigned(&mut other) => (4 - revoked.len(), taken),
        }
    };
    assert_eq!(taken, revoked);
    let before = first.assignment();
    assert_eq!(before.len(), kept);
    soon(first.close()).await.unwrap();
    assert_eq!(member_count(&server).await, 2, "it has not left");
    let mut second = worker().join();
    assert_eq!(assigned(&mut second).await, before);
    assert_eq!(other.assignment(), revoked, "nothing moves");
    // A third process fences the second one, which does not fight for the name.
    let mut third = worker().join();
    assert_eq!(assigned(&mut third).await, before);
    let mut events = Vec::new();
    let error = loop {
        match soon(second.next()).await.unwrap() {
            Ok(event) => events.push(event),
            Err(error) => break error,
        }
    };
    assert!(error.is(R::MemberNameInUse), "{error}");
    assert!(events.contains(&GroupEvent::Lost(before)), "{events:?}");
    soon(third.leave()).await.unwrap();
    soon(other.close()).await.unwrap();
    assert_eq!(member_count(&server).await, 0);
}

/// Calls the consumer until the condition holds.
async fn drive(consumer: &mut GroupConsumer, mut is_done: impl FnMut() -> bool) {
    while !is_done() {
        consumer.next().await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn new_partitions_and_topics_are_read_from_their_beginning() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    let mut consumer = member(&client).pattern("metrics.*").join();
    assigned(&mut consumer).await;
    assert_eq!(consumer.unmatched_topics(), ["metrics.*"]);
    let request = AddPartitionsRequest {
        name: "default".to_owned(),
        partition_count: 5,
        ..AddPartitionsRequest::default()
    };
    server.topics().add_partitions(request).await.unwrap();
    server.append_to(4, &["a"]).await;
    assert_eq!(read(&mut consumer, 1).await[&4], ["a"]);
    client.admin().create_topic(&NewTopic::new("metrics.cpu", 1)).await.unwrap();
    let producer = client.producer(ProducerOptions::default());
    producer.append("metrics.cpu", 0, &[record("b")][..]).await.unwrap();
    let records = next_records(&mut consumer).await;
    assert_eq!((records.topic.as_str(), records.records.len()), ("metrics.cpu", 1));
    client.admin().delete_topic("metrics.cpu").await.unwrap();
    loop {
        match soon(consumer.next()).await.unwrap().unwrap() {
            GroupEvent::Revoked(partitions) => {
                assert_eq!(
                    partitions.iter().map(|it| it.topic.as_str()).collect::<Vec<_>>(),
                    ["metrics.cpu"]
                );
                break;
            }
            GroupEvent::CaughtUp { .. } => {}
            event => panic!("{event:?}"),
        }
    }
}

#[tokio::test]
async fn buffered_bytes_are_bounded() {
    const BYTES_MAX: usize = 1 << 20;
    /// A message beyond the limit, for the only node.
    const MESSAGE_MAX: usize = 2 << 20;
    let server = TestServer::in_memory().await;
    let client = client(&server);
    let producer = client.producer(ProducerOptions::default());
    let value = "x".repeat(100_000);
    for number in 0..120 {
        producer.append("default", number % 4, &[record(&value)][..]).await.unwrap();
    }
    let mut consumer = member(&client).buffer_bytes(BYTES_MAX).join();
    let mut seen = 0;
    while seen < 120 {
        seen += next_records(&mut consumer).await.records.len();
        let mut last = 0;
        until("the buffer is full, or all is read", async || {
            let bytes = consumer.buffered_bytes();
            assert!(bytes <= BYTES_MAX + MESSAGE_MAX, "{bytes} bytes");
            let is_steady = bytes == last;
            last = bytes;
            (is_steady || bytes >= BYTES_MAX).then_some(())
        })
        .await;
    }
}

/// Records that members have seen: the count of each partition and offset.
type Seen = Arc<Mutex<BTreeMap<(u32, u64), u32>>>;

/// A member in a task of its own.
struct Worker {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Worker {
    fn start(mut consumer: GroupConsumer, seen: &Seen) -> Self {
        let (stop, mut stopping) = watch::channel(false);
        let seen = seen.clone();
        let task = tokio::spawn(async move {
            loop {
                let event = tokio::select! {
                    event = consumer.next() => event.unwrap().unwrap(),
                    _ = stopping.wait_for(|stop| *stop) => break,
                };
                if let GroupEvent::Data(Records { partition, records, .. }) = event {
                    let mut seen = seen.lock().unwrap();
                    for record in records {
                        *seen.entry((partition, record.offset)).or_default() += 1;
                    }
                }
            }
            consumer.close().await.unwrap();
        });
        Self { stop, task }
    }

    async fn stop(self) {
        self.stop.send(true).unwrap();
        soon(self.task).await.unwrap();
    }
}

const PARTITIONS: u32 = 12;

fn of_shop(client: &Client) -> GroupConsumerBuilder {
    client.consumer_group(GROUP).topics(["shop"])
}

/// Appends one record to each partition.
async fn append_round(client: &Client) {
    let producer = client.producer(ProducerOptions::default());
    for partition in 0..PARTITIONS {
        producer.append("shop", partition, &[record("x")][..]).await.unwrap();
    }
}

async fn until_seen(seen: &Seen, rounds: u64) {
    until("all records are read", async || {
        let seen = seen.lock().unwrap();
        let all = (0..PARTITIONS).flat_map(|it| (0..rounds).map(move |offset| (it, offset)));
        all.into_iter().all(|it| seen.contains_key(&it)).then_some(())
    })
    .await;
}

/// Waits until every member owns as many partitions.
async fn until_shares(server: &TestServer, shares: &[usize]) {
    until("the members have their shares", async || {
        let request =
            DescribeGroupRequest { group: GROUP.to_owned(), ..DescribeGroupRequest::default() };
        let described = groups(server).describe_group(request).await.ok()?.into_inner();
        let mut owned: Vec<_> = described.members.iter().map(|it| it.owned.len()).collect();
        owned.sort_unstable();
        (owned == shares).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clean_changes_of_members_repeat_no_record() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    client.admin().create_topic(&NewTopic::new("shop", PARTITIONS)).await.unwrap();
    let seen = Seen::default();
    let mut workers = Vec::new();
    let mut rounds = 0;
    for shares in [&[12][..], &[6, 6], &[4, 4, 4]] {
        workers.push(Worker::start(of_shop(&client).join(), &seen));
        append_round(&client).await;
        rounds += 1;
        until_shares(&server, shares).await;
    }
    for shares in [&[6, 6][..], &[12]] {
        append_round(&client).await;
        rounds += 1;
        workers.remove(0).stop().await;
        until_shares(&server, shares).await;
    }
    append_round(&client).await;
    rounds += 1;
    until_seen(&seen, rounds).await;
    workers.remove(0).stop().await;
    let repeated: BTreeSet<_> =
        seen.lock().unwrap().iter().filter(|(_, count)| **count > 1).map(|(it, _)| *it).collect();
    assert!(repeated.is_empty(), "{repeated:?}");
    assert!(committed(&server).await.values().all(|offset| *offset == rounds));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_member_loses_no_record() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    client.admin().create_topic(&NewTopic::new("shop", PARTITIONS)).await.unwrap();
    let seen = Seen::default();
    let timeout = Duration::from_secs(4);
    let survivor = Worker::start(of_shop(&client).session_timeout(timeout).join(), &seen);
    // Its runtime ends, and with it all that the client does in the background.
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let address = server.running.local_addr().to_string();
    let of_killed = Seen::default();
    let killed = runtime.spawn({
        let seen = of_killed.clone();
        async move {
            let client = Client::new(Config::new([address])).unwrap();
            Worker::start(of_shop(&client).session_timeout(timeout).join(), &seen).task.await
        }
    });
    until_shares(&server, &[6, 6]).await;
    append_round(&client).await;
    until("both read", async || {
        let count = |seen: &Seen| seen.lock().unwrap().len();
        (count(&seen) >= 6 && count(&of_killed) >= 6).then_some(())
    })
    .await;
    killed.abort();
    runtime.shutdown_background();
    append_round(&client).await;
    until_seen(&seen, 2).await;
    until_shares(&server, &[12]).await;
    survivor.stop().await;
}

#[tokio::test]
async fn revoked_partitions_can_be_committed_before_they_move() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    for partition in 0..4 {
        server.append_to(partition, &["a", "b"]).await;
    }
    let mut first = member(&client).auto_commit(AutoCommit::Off).join();
    read(&mut first, 8).await;
    let mut second = member(&client).auto_commit(AutoCommit::Off).join();
    let revoked = loop {
        if let GroupEvent::Revoked(partitions) = soon(first.next()).await.unwrap().unwrap() {
            break partitions;
        }
    };
    // They have not moved: the commit is accepted.
    let halves = revoked.iter().map(|it| OffsetToCommit::new(it.clone(), 1));
    soon(first.commit_offsets(halves)).await.unwrap();
    assert!(second.assignment().is_empty());
    let values = {
        let driven = drive(&mut first, || false);
        tokio::select! {
            () = driven => unreachable!("it is driven without end"),
            values = read(&mut second, revoked.len()) => values,
        }
    };
    assert!(values.values().all(|values| values == &["b"]), "{values:?}");
}

#[tokio::test]
async fn unreleased_partitions_are_lost_after_their_timeout() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    for partition in 0..4 {
        server.append_to(partition, &["a"]).await;
    }
    let release_timeout = Duration::from_millis(100);
    let mut first = member(&client).release_timeout(release_timeout).join();
    read(&mut first, 4).await;
    // The first one is busy and does not call.
    let mut second = member(&client).join();
    let taken = assigned(&mut second).await;
    let lost = loop {
        match soon(first.next()).await.unwrap().unwrap() {
            GroupEvent::Lost(partitions) => break partitions,
            GroupEvent::CaughtUp { .. } => {}
            event => panic!("{event:?}"),
        }
    };
    assert_eq!(lost, taken);
}

#[tokio::test]
async fn revoked_partition_is_not_read_after_a_seek() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    for partition in 0..4 {
        server.append_to(partition, &["a", "b"]).await;
    }
    let mut first = member(&client).auto_commit(AutoCommit::Off).join();
    read(&mut first, 8).await;
    let mut second = member(&client).auto_commit(AutoCommit::Off).join();
    let revoked = loop {
        if let GroupEvent::Revoked(partitions) = soon(first.next()).await.unwrap().unwrap() {
            break partitions;
        }
    };
    // The application has not called again, so the partitions are still its own.
    for partition in &revoked {
        first.seek(partition, 0).unwrap();
    }
    first.resume(&revoked).unwrap();
    let mut read_by_first = Vec::new();
    let values = {
        let driven = async {
            loop {
                if let GroupEvent::Data(data) = first.next().await.unwrap().unwrap() {
                    read_by_first.push(data.partition);
                }
            }
        };
        tokio::select! {
            () = driven => unreachable!("it is driven without end"),
            values = read(&mut second, 2 * revoked.len()) => values,
        }
    };
    assert!(values.values().all(|values| values == &["a", "b"]), "{values:?}");
    assert_eq!(read_by_first, [0; 0], "they move to the second member");
}

#[tokio::test]
async fn frequent_changes_do_not_end_a_membership() {
    let server = TestServer::in_memory().await;
    let session = Duration::from_secs(3);
    let mut consumer = member(&client(&server)).session_timeout(session).join();
    let partitions = assigned(&mut consumer).await;
    // Each change ends the heartbeat that waits for one; some of them must still be answered.
    let since = tokio::time::Instant::now();
    let mut changes = 0;
    while since.elapsed() < session * 2 {
        match changes % 2 {
            0 => consumer.pause(&partitions).unwrap(),
            _ => consumer.resume(&partitions).unwrap(),
        }
        changes += 1;
        let turn = Duration::from_millis(20);
        match tokio::time::timeout(turn, consumer.next()).await {
            Ok(Some(Ok(GroupEvent::CaughtUp { .. }))) | Err(_) => {}
            Ok(event) => panic!("after {changes} changes: {event:?}"),
        }
    }
    assert!(changes > 20, "only {changes} changes");
    assert_eq!((consumer.assignment(), member_count(&server).await), (partitions, 1));
}
