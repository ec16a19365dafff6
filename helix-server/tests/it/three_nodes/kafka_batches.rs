//! Batches of version 2 and failover: an idempotent producer's batches are stored once and in order
//! while leaders are isolated, and every replica has the bytes that came.

use bytes::Bytes;
use helix_client::SessionOptions;
use helix_proto::compression::{BatchCodec, Compressor};
use helix_proto::kafka::{self, KAFKA_BATCH_VERSION};
use helix_proto::log::v1::{BatchFormat, EncodedBatch, FetchRequest, Record, TopicConfig};

use crate::trio::{Trio, TrioPlan, expect_equal_replicas, from_any, until};

const ROUNDS: usize = 3;
const BATCHES_PER_ROUND: usize = 60;

/// Returns a batch whose records name it.
fn batch(number: usize, compressor: &mut Compressor) -> EncodedBatch {
    let record = |index: usize| Record {
        key: Some(Bytes::from(format!("{number}"))),
        value: Some(format!("{number}.{index} {}", "x".repeat(number * 37 % 2_000)).into()),
        ..Record::default()
    };
    let records: Vec<_> = (0..1 + number % 4).map(record).collect();
    let codec = [None, Some(BatchCodec::Lz4), Some(BatchCodec::Zstd)][number % 3];
    kafka::from_records(&records, codec.map(|codec| (codec, compressor))).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_batches_are_stored_once_and_in_order_across_leaders() {
    let mut trio = Trio::start(TrioPlan::linked().await).await;
    trio.settle().await;
    let client = trio.client();
    let config = TopicConfig { batch_format: BatchFormat::Kafka.into(), ..TopicConfig::default() };
    client.admin().update_topic("default", &config, &["batch_format"]).await.unwrap();
    let session = client.session("default", 0, SessionOptions::default()).await.unwrap();
    let (mut sent, mut end) = (Vec::new(), 0);
    let mut compressor = Compressor::default();
    for _ in 0..ROUNDS {
        let (mut acks, mut isolated) = (Vec::new(), None);
        for number in 0..BATCHES_PER_ROUND {
            if number == BATCHES_PER_ROUND / 3 {
                // Batches are in flight to it.
                isolated = Some(trio.isolate_leader(0).await);
            }
            let batch = batch(sent.len(), &mut compressor);
            acks.push((end, session.append(&batch).await.unwrap()));
            end += u64::from(batch.record_count);
            sent.push(batch);
        }
        for (first_offset, ack) in acks {
            assert_eq!(ack.await.unwrap().first_offset, Some(first_offset));
        }
        trio.heal(isolated.unwrap());
        trio.settle().await;
    }
    session.close().await.unwrap();
    for (id, node) in trio.nodes() {
        let (mut next, mut found) = (0, Vec::new());
        until("the replica has all records", async || {
            while next < end {
                let request = FetchRequest {
                    accept_encoded: true,
                    accept_kafka_batches: true,
                    ..from_any(0, next)
                };
                let read = node.fetch_one(request).await;
                if read.batches.is_empty() {
                    return None;
                }
                next = read.next_offset;
                found.extend(read.batches);
            }
            Some(())
        })
        .await;
        let stored: Vec<_> = found.iter().map(|stored| stored.batch.as_ref().unwrap()).collect();
        assert_eq!(stored.len(), sent.len(), "node {id}");
        for (stored, sent) in stored.iter().zip(&sent) {
            assert_eq!(stored.version, KAFKA_BATCH_VERSION);
            assert!(stored.payload == sent.payload, "node {id} has other bytes");
        }
    }
    // Readers without the format get equal records of all replicas.
    expect_equal_replicas(&trio, 0, end).await;
    trio.stop_all().await;
}
