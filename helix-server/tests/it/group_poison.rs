//! Consumer groups and reads that meet a batch whose content is not records.

use helix_client::{
    Client, Config, FetchOptions, GroupConsumer, GroupEvent, Position, ReadOptions, ReadStart,
    Records,
};
use helix_proto::batch;
use helix_proto::log::v1::{AppendRequest, ErrorReason as R, TopicConfig, UpdateTopicRequest};
use prost_types::FieldMask;

use crate::support::{TestServer, append_request, as_batch, soon};

const GROUP: &str = "readers";

/// Partition 0 has the records a and b, a batch of two that is not decodable, and the record c.
/// Partition 1 has the record d.
async fn poisoned() -> (TestServer, Client) {
    let server = TestServer::in_memory().await;
    let config = TopicConfig { validate_records: Some(false), ..TopicConfig::default() };
    let update = UpdateTopicRequest {
        name: "default".to_owned(),
        config: Some(config),
        update_mask: Some(FieldMask { paths: vec!["validate_records".to_owned()] }),
        topic_id: 0,
    };
    server.topics().update_topic(update).await.unwrap();
    server.append(&["a", "b"]).await;
    // Field number 0 is invalid in every message.
    let garbage = batch::from_payload(2, vec![0x0A, 0, 0x0A, 2, 0, 0].into());
    let request = AppendRequest { batch: as_batch(garbage), ..append_request(&[]) };
    server.produce().append(request).await.unwrap();
    server.append(&["c"]).await;
    server.append_to(1, &["d"]).await;
    let address = server.running.local_addr().to_string();
    (server, Client::new(Config::new([address])).unwrap())
}

fn offsets(records: &Records) -> Vec<(u32, u64)> {
    records.records.iter().map(|record| (records.partition, record.offset)).collect()
}

/// Reads until an error; returns what came before it.
async fn until_error(consumer: &mut GroupConsumer) -> (Vec<(u32, u64)>, helix_client::Error) {
    let mut seen = Vec::new();
    loop {
        match soon(consumer.next_records()).await.expect("it has not ended") {
            Ok(records) => seen.extend(offsets(&records)),
            Err(error) => return (seen, error),
        }
    }
}

#[tokio::test]
async fn group_delivers_and_commits_what_is_before_an_undecodable_batch() {
    let (_server, client) = poisoned().await;
    let member = || client.consumer_group(GROUP).topics(["default"]);
    let mut consumer = member().join();
    let (mut seen, error) = until_error(&mut consumer).await;
    assert!(error.is(R::UndecodableBatch), "{error}");
    assert_eq!(error.topic_partition, Some(("default".to_owned(), 0)));
    // The other partition is read on.
    while !seen.contains(&(1, 0)) {
        seen.extend(offsets(&soon(consumer.next_records()).await.unwrap().unwrap()));
    }
    seen.sort_unstable();
    assert_eq!(seen, [(0, 0), (0, 1), (1, 0)]);
    let partition = consumer.assignment().remove(0);
    assert_eq!(consumer.position(&partition), Some(2));
    soon(consumer.close()).await.unwrap();

    // The next member begins with the batch, and delivers nothing twice.
    let mut consumer = member().join();
    let (seen, error) = until_error(&mut consumer).await;
    assert!(error.is(R::UndecodableBatch), "{error}");
    assert_eq!(seen, []);
    let partition = consumer.assignment().remove(0);
    consumer.seek(&partition, 4).unwrap();
    assert_eq!(offsets(&soon(consumer.next_records()).await.unwrap().unwrap()), [(0, 4)]);
    soon(consumer.leave()).await.unwrap();
}

#[tokio::test]
async fn seek_past_an_undecodable_batch_drops_its_error() {
    let (_server, client) = poisoned().await;
    let mut consumer = client.consumer_group(GROUP).topics(["default"]).join();
    let partition = loop {
        if let GroupEvent::Data(records) = soon(consumer.next()).await.unwrap().unwrap()
            && records.partition == 0
        {
            assert_eq!(offsets(&records), [(0, 0), (0, 1)]);
            break (&records).into();
        }
    };
    consumer.seek(&partition, 4).unwrap();
    loop {
        let records = soon(consumer.next_records()).await.unwrap().unwrap();
        if records.partition == 0 {
            assert_eq!(offsets(&records), [(0, 4)]);
            break;
        }
    }
}

#[tokio::test]
async fn group_skips_undecodable_batches_if_asked() {
    let (_server, client) = poisoned().await;
    let member = || client.consumer_group(GROUP).topics(["default"]).skip_undecodable(true);
    let mut consumer = member().join();
    let (mut seen, mut skipped) = (Vec::new(), Vec::new());
    while seen.len() < 4 {
        let records = soon(consumer.next_records()).await.unwrap().unwrap();
        seen.extend(offsets(&records));
        skipped.extend(records.undecodable);
    }
    seen.sort_unstable();
    assert_eq!(seen, [(0, 0), (0, 1), (0, 4), (1, 0)]);
    let [skipped] = &skipped[..] else { panic!("{skipped:?}") };
    assert_eq!((skipped.first_offset, skipped.record_count), (2, 2));
    let partition = consumer.assignment().remove(0);
    assert_eq!(consumer.position(&partition), Some(5), "what is skipped counts as read");
    soon(consumer.close()).await.unwrap();
}

#[tokio::test]
async fn fetch_returns_what_is_before_an_undecodable_batch() {
    let (_server, client) = poisoned().await;
    let consumer = client.consumer();
    let fetch = async |offset: u64, skips: bool| {
        let read = ReadOptions { skip_undecodable: skips, ..ReadOptions::default() };
        let options = FetchOptions { read, ..FetchOptions::default() };
        let start = ReadStart::new("default", 0, Position::Offset(offset));
        consumer.fetch(&[start], &options).await.map(|mut fetched| fetched.remove(0))
    };
    let read = fetch(0, false).await.unwrap();
    assert_eq!((offsets(&read), read.next_offset), (vec![(0, 0), (0, 1)], 2));
    let error = fetch(2, false).await.unwrap_err();
    assert!(error.is(R::UndecodableBatch), "{error}");
    assert_eq!(error.topic_partition, Some(("default".to_owned(), 0)));
    let read = fetch(2, true).await.unwrap();
    assert_eq!((offsets(&read), read.next_offset), (vec![(0, 4)], 5));
    assert_eq!(read.undecodable[0].record_count, 2);
}
