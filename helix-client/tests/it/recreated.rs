//! Tests that readers and writers notice a topic that was deleted and created again.
//!
//! Without clamping, and with more records in the new topic than in the old one.

use helix_client::proto::log::v1::ErrorReason;
use helix_client::{
    Error, Event, FetchOptions, OnRecreate, Position, ProducerOptions, ReadOptions, ReadStart,
    RecreatedTopic, SessionOptions, Subscription, TopicRef,
};

use crate::consume::{check, fill};
use crate::fake_cluster::{FakeCluster, NODES, PARTITIONS, TOPIC};
use crate::{client, in_time, record, seed, within_deadline};

fn assert_recreated(error: &Error, (expected_id, id): (u64, u64)) {
    assert!(error.is(ErrorReason::TopicRecreated), "{error}");
    let recreated = RecreatedTopic { topic: TOPIC.to_owned(), expected_id, id };
    assert_eq!(error.recreated, Some(recreated));
}

/// Reads all partitions up to this offset.
async fn read_until(subscription: &mut Subscription, end: u64) {
    let mut next = [0; PARTITIONS as usize];
    while next.iter().any(|next| *next < end) {
        let event = in_time(subscription.next()).await.unwrap();
        if let Event::Data(records) = event.unwrap() {
            check(&records, &mut next[records.partition as usize]);
        }
    }
}

fn starts() -> Vec<ReadStart> {
    let start = |partition| ReadStart::new(TOPIC, partition, Position::Earliest);
    (0..PARTITIONS).map(start).collect()
}

#[tokio::test]
async fn subscription_ends_with_an_error() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    fill(&client, 2).await;
    let mut subscription = client.consumer().subscribe(starts(), ReadOptions::default());
    read_until(&mut subscription, 6).await;
    let ids = cluster.recreate_topic();
    fill(&client, 5).await;
    let error = loop {
        match in_time(subscription.next()).await.unwrap() {
            Ok(Event::Data(records)) => panic!("{records:?}"),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_recreated(&error, ids);
    assert!(in_time(subscription.next()).await.is_none());
}

#[tokio::test]
async fn subscription_restarts_on_request() {
    let cluster = FakeCluster::start(seed(), 0.05).await;
    let client = client(&cluster);
    fill(&client, 2).await;
    let options = ReadOptions { on_recreate: OnRecreate::Restart, ..ReadOptions::default() };
    let mut subscription = client.consumer().subscribe(starts(), options);
    read_until(&mut subscription, 6).await;
    let (old, new) = cluster.recreate_topic();
    fill(&client, 5).await;
    let mut next = [None; PARTITIONS as usize];
    while next.iter().any(|next| next.is_none_or(|next| next < 15)) {
        match in_time(subscription.next()).await.unwrap().unwrap() {
            Event::Restarted { topic, partition, old_topic_id, topic_id } => {
                assert_eq!((topic.as_str(), old_topic_id, topic_id), (TOPIC, old, new));
                assert_eq!(next[partition as usize].replace(0), None, "reported once");
            }
            Event::Data(records) => {
                assert_eq!(records.topic_id, new);
                let next = next[records.partition as usize].as_mut();
                check(&records, next.expect("restarted before"));
            }
            Event::CaughtUp { .. } | Event::Heartbeat(_) => {}
        }
    }
}

#[tokio::test]
async fn subscription_waits_for_the_new_topic() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    fill(&client, 2).await;
    let options = ReadOptions { on_recreate: OnRecreate::Restart, ..ReadOptions::default() };
    let mut subscription = client.consumer().subscribe(starts(), options);
    read_until(&mut subscription, 6).await;
    let lack_topic = |is_missing| {
        (0..NODES).for_each(|node| cluster.set_lacks_topics(node, is_missing));
    };
    lack_topic(true);
    cluster.recreate_topic();
    let reading = tokio::spawn(async move {
        let mut next = [0; PARTITIONS as usize];
        while next.iter().any(|next| *next < 3) {
            match subscription.next().await.unwrap().unwrap() {
                Event::Data(records) => check(&records, &mut next[records.partition as usize]),
                Event::Restarted { .. } | Event::CaughtUp { .. } | Event::Heartbeat(_) => {}
            }
        }
    });
    // More lookups than those after which a missing topic is an error by default.
    let before = cluster.metadata_requests();
    let has_waited = async || (cluster.metadata_requests() > before + 30).then_some(());
    within_deadline(has_waited).await;
    lack_topic(false);
    fill(&client, 1).await;
    in_time(reading).await.unwrap();
}

#[tokio::test]
async fn subscription_without_records_reads_the_new_topic() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    let options = ReadOptions { on_recreate: OnRecreate::Restart, ..ReadOptions::default() };
    let mut subscription = client.consumer().subscribe(starts(), options);
    let event = in_time(subscription.next()).await.unwrap().unwrap();
    assert!(matches!(event, Event::Heartbeat(_)), "{event:?}");
    cluster.recreate_topic();
    fill(&client, 1).await;
    read_until(&mut subscription, 3).await;
}

#[tokio::test]
async fn partitions_that_the_new_topic_lacks_end_alone() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    fill(&client, 1).await;
    let options = ReadOptions { on_recreate: OnRecreate::Restart, ..ReadOptions::default() };
    let subscribe = |starts, new_partitions| {
        client.consumer().subscribe(starts, ReadOptions { new_partitions, ..options })
    };
    let mut upper = subscribe(starts().split_off(2), false);
    let mut all = subscribe(starts(), true);
    read_until(&mut all, 3).await;
    cluster.set_partition_count(2);
    let (_, new) = cluster.recreate_topic();
    // The end shows that the client knows the number of partitions.
    while let Some(event) = in_time(upper.next()).await {
        event.unwrap();
    }
    let producer = client.producer(ProducerOptions::default());
    let mut records = [0; PARTITIONS as usize];
    let mut append_and_read = async |partitions: std::ops::Range<u32>| {
        for partition in partitions.clone() {
            producer.append(TOPIC, partition, &vec![record("new")]).await.unwrap();
        }
        while partitions.clone().any(|partition| records[partition as usize] == 0) {
            if let Event::Data(data) = in_time(all.next()).await.unwrap().unwrap() {
                assert_eq!(data.topic_id, new);
                records[data.partition as usize] += data.records.len();
            }
        }
    };
    append_and_read(0..2).await;
    cluster.set_partition_count(PARTITIONS);
    append_and_read(2..PARTITIONS).await;
}

#[tokio::test]
async fn fetch_continues_only_in_its_topic() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    fill(&client, 2).await;
    let fetch = async |start| {
        client.consumer().fetch(&[start], &FetchOptions::default()).await.map(|mut it| it.remove(0))
    };
    let first = fetch(ReadStart::new(TOPIC, 1, Position::Earliest)).await.unwrap();
    let ids = cluster.recreate_topic();
    assert_eq!(first.topic_id, ids.0);
    fill(&client, 5).await;
    let rest = ReadStart::new(TOPIC, 1, Position::Offset(first.next_offset));
    let error = fetch(rest.clone().in_topic(first.topic_id)).await.unwrap_err();
    assert_recreated(&error, ids);
    assert_eq!(fetch(rest).await.unwrap().topic_id, ids.1, "the id is optional");
}

#[tokio::test]
async fn producer_reports_it_and_starts_a_new_sequence() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    // A name has one identity, which continues in the new topic.
    for name in ["", "named"] {
        let options = ProducerOptions { name: name.to_owned(), ..ProducerOptions::default() };
        let producer = client.producer(options);
        let append = async |value: &str| producer.append(TOPIC, 0, &vec![record(value)]).await;
        for _ in 0..3 {
            append("old").await.unwrap();
        }
        let ids = cluster.recreate_topic();
        let error = append("between").await.unwrap_err();
        assert_recreated(&error, ids);
        assert!(!error.may_have_applied);
        for value in ["0", "1", "2"] {
            let ack = append(value).await.unwrap();
            assert!(!ack.duplicate);
            assert_eq!((ack.first_offset, ack.topic_id), (value.parse().ok(), ids.1));
        }
        assert_eq!(cluster.values(0), ["0", "1", "2"]);
    }
}

#[tokio::test]
async fn producer_changes_its_identity_after_an_unknown_outcome() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let producer = client(&cluster).producer(ProducerOptions::default());
    let append = async |value: &str| producer.append(TOPIC, 0, &vec![record(value)]).await;
    append("old").await.unwrap();
    let old_producers = cluster.producers(0);
    cluster.block_appends();
    let recreate = async {
        cluster.blocked_append().await;
        let ids = cluster.recreate_topic();
        cluster.elect(1);
        cluster.unblock_appends();
        ids
    };
    let (appended, ids) = in_time(async { tokio::join!(append("between"), recreate) }).await;
    let error = appended.unwrap_err();
    assert_recreated(&error, ids);
    assert!(error.may_have_applied);
    append("new").await.unwrap();
    assert_eq!(cluster.values(0), ["new"]);
    assert_ne!(cluster.producers(0), old_producers);
}

#[tokio::test]
async fn queued_records_fail_with_the_batch_in_flight() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let options = ProducerOptions { batch_records: 2, ..ProducerOptions::default() };
    let producer = client(&cluster).producer(options);
    producer.send_to(TOPIC, 0, record("old")).await.unwrap().await.unwrap();
    let ids = cluster.recreate_topic();
    let mut acks = Vec::new();
    for _ in 0..9 {
        acks.push(producer.send_to(TOPIC, 0, record("between")).await.unwrap());
    }
    for ack in acks {
        assert_recreated(&in_time(ack).await.unwrap_err(), ids);
    }
    let ack = producer.send_to(TOPIC, 0, record("new")).await.unwrap().await.unwrap();
    assert_eq!(ack.first_offset, Some(0));
    assert_eq!(cluster.values(0), ["new"]);
}

#[tokio::test]
async fn writer_without_batches_in_the_old_topic_follows() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    // Its route states the id of the old topic.
    client.route(TOPIC, 0).await.unwrap();
    let (_, new) = cluster.recreate_topic();
    let producer = client.producer(ProducerOptions::default());
    let ack = producer.append(TOPIC, 0, &vec![record("a")]).await.unwrap();
    assert_eq!((ack.first_offset, ack.topic_id), (Some(0), new));
    client.route(TOPIC, 0).await.unwrap();
    cluster.recreate_topic();
    let ack = client.append(TOPIC, 0, &vec![record("a")], &Default::default()).await.unwrap();
    assert_eq!(ack.first_offset, Some(0));
}

#[tokio::test]
async fn repeated_deletion_spares_the_new_topic() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let admin = client(&cluster).admin();
    let id = cluster.topic_id();
    cluster.lose_deletion();
    in_time(admin.delete_topic(TOPIC)).await.unwrap();
    assert_eq!(cluster.topic_id(), id + 1, "only one topic was deleted");
    let error = in_time(admin.delete_topic(TopicRef::with_id(TOPIC, id))).await.unwrap_err();
    assert_recreated(&error, (id, id + 1));
    in_time(admin.delete_topic(TOPIC)).await.unwrap();
    assert_eq!(cluster.topic_id(), id + 2);
}

#[tokio::test]
async fn session_ends_with_an_error() {
    let cluster = FakeCluster::start(seed(), 0.0).await;
    let client = client(&cluster);
    let open = async || client.session(TOPIC, 0, SessionOptions::default()).await.unwrap();
    let session = open().await;
    session.append(&vec![record("old")]).await.unwrap().await.unwrap();
    let ids = cluster.recreate_topic();
    let acked = session.append(&vec![record("between")]).await.unwrap();
    let error = in_time(acked).await.unwrap_err();
    assert_recreated(&error, ids);
    assert!(session.append(&vec![record("later")]).await.is_err());
    let ack = open().await.append(&vec![record("new")]).await.unwrap().await.unwrap();
    assert_eq!((ack.first_offset, ack.topic_id), (Some(0), ids.1));
    assert_eq!(cluster.values(0), ["new"]);
    let options = SessionOptions { topic_id: ids.0, ..SessionOptions::default() };
    let error = client.session(TOPIC, 0, options).await.unwrap_err();
    assert_recreated(&error, ids);
}
