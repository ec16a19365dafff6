//! Topics share segments: space of a deleted topic is freed although another topic uses the same
//! segments, and that topic stays readable.

use std::time::Duration;

use bytes::Bytes;
use helix_client::{NewTopic, ProducerOptions};
use helix_proto::log::v1::{DeleteTopicRequest, GetTopicRequest, Record};
use helix_server::config::ServerConfig;

use crate::process::patient_client;
use crate::support::{TestServer, earliest, soon};

/// A little less than the largest record.
const RECORD_BYTES: usize = 1_000_000;
const SEGMENT_BYTES: u64 = 16 << 20;

fn large(number: u64) -> [Record; 1] {
    let mut value = vec![u8::try_from(number % 251).unwrap(); RECORD_BYTES];
    value[..8].copy_from_slice(&number.to_le_bytes());
    [Record { value: Some(Bytes::from(value)), ..Record::default() }]
}

fn held_bytes(server: &TestServer, shard_id: u64) -> u64 {
    server.running.node().shard(shard_id).unwrap().status().wal.held_bytes
}

async fn reads_back(server: &TestServer, count: u64) {
    let mut next = 0;
    while next < count {
        let some = server.records(0, next).await;
        assert!(!some.is_empty(), "nothing at {next}");
        for stored in some {
            let record = stored.record.unwrap();
            assert_eq!((stored.offset, &record.value), (next, &large(next)[0].value));
            next += 1;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleted_topic_frees_space_in_shared_segments() {
    let directory = tempfile::tempdir().unwrap();
    let config = ServerConfig {
        segment_bytes: SEGMENT_BYTES,
        tail_bytes: Some(1 << 20),
        checkpoint_bytes: 1 << 20,
        ..ServerConfig::in_dir(directory.path())
    };
    let server = TestServer::start(config.clone(), None).await;
    let client = patient_client(server.running.local_addr(), 7);
    client.admin().create_topic(&NewTopic::new("doomed", 1)).await.unwrap();
    let producer = client.producer(ProducerOptions::default());
    // Three records of the deleted topic for each of the other.
    let count = 64;
    for number in 0..count {
        producer.append("default", 0, &large(number)[..]).await.unwrap();
        for _ in 0..3 {
            producer.append("doomed", 0, &large(number)[..]).await.unwrap();
        }
    }
    let get = GetTopicRequest { name: "default".to_owned() };
    let topic = server.topics().get_topic(get).await.unwrap().into_inner().topic.unwrap();
    let shard_id = u64::from(topic.partitions[0].shard_id);
    assert!(topic.partitions[0].live_bytes() >= count * RECORD_BYTES as u64);
    assert_eq!(topic.partitions[0].live_bytes, topic.partitions[0].held_bytes);
    let before = held_bytes(&server, shard_id);
    assert!(before >= 4 * count * RECORD_BYTES as u64);
    let delete = DeleteTopicRequest { name: "doomed".to_owned(), topic_id: 0 };
    server.topics().delete_topic(delete).await.unwrap();
    // Remaining: the other topic, half as much again, and the log above the checkpoint.
    let bound = count * RECORD_BYTES as u64 * 3 / 2 + 16 * (1 << 20) + 6 * SEGMENT_BYTES;
    assert!(bound < before * 7 / 8, "{bound} of {before}");
    let freed = async {
        let mut look = tokio::time::interval(Duration::from_millis(50));
        while held_bytes(&server, shard_id) > bound {
            look.tick().await;
        }
    };
    let freed = tokio::time::timeout(Duration::from_secs(60), freed).await;
    assert!(freed.is_ok(), "{} of {before}, not {bound}", held_bytes(&server, shard_id));
    let stats = server.running.node().shard(shard_id).unwrap().status().wal;
    assert!(stats.rewritten_bytes > 0 && stats.cold_segments > 0, "{stats:?}");
    reads_back(&server, count).await;
    drop((producer, client));
    soon(server.running.shutdown()).await;
    let server = TestServer::start(config, None).await;
    reads_back(&server, count).await;
    let first = server.fetch_one(helix_proto::log::v1::FetchRequest {
        partitions: vec![earliest(0)],
        ..Default::default()
    });
    assert_eq!(first.await.records[0].offset, 0);
    soon(server.running.shutdown()).await;
}
