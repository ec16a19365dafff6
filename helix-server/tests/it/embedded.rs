//! A node in the test's own process, without a port.

use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt};
use helix_proto::batch;
use helix_proto::log::v1::EncodedBatch;
use helix_server::config::ServerConfig;
use helix_server::embedded::{Embedded, EmbeddedBatch};
use helix_server::error::Error;
use helix_server::metrics::MetricsPage;
use helix_server::server::StartError;
use tokio::time::timeout;

use crate::support::{TestServer, records, soon};

#[path = "../../examples/embedded.rs"]
#[allow(dead_code, reason = "the example has a main function")]
mod example;

const TOPIC: &str = "orders";

async fn opened(config: ServerConfig) -> Embedded {
    let log = Embedded::open(config).await.unwrap();
    log.create_topic(TOPIC, 2).await.unwrap();
    log
}

fn encoded(values: &[&str]) -> EncodedBatch {
    batch::encode(&records(values))
}

fn values(batches: &[EmbeddedBatch]) -> Vec<String> {
    let records = batches.iter().flat_map(|it| batch::decode(&it.batch).unwrap().records);
    records.map(|it| String::from_utf8(it.value.unwrap().to_vec()).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_example_keeps_its_records_only_on_disk() {
    let directory = tempfile::tempdir().unwrap();
    let orders = ["order 1", "order 2", "order 3"];
    for _ in 0..2 {
        assert_eq!(example::run(ServerConfig::in_memory()).await.unwrap(), orders);
    }
    for run in 1..=2 {
        let config = ServerConfig::in_dir(directory.path());
        assert_eq!(example::run(config).await.unwrap(), orders.repeat(run));
    }
}

#[tokio::test]
async fn batches_are_read_and_delivered_as_they_were_appended() {
    let log = opened(ServerConfig::in_memory()).await;
    let mut stream = log.subscribe(TOPIC, 1, 0).await.unwrap();
    let pending = timeout(Duration::from_millis(20), stream.next()).await;
    assert!(pending.is_err(), "nothing is appended yet");
    let sent = [encoded(&["a"]), encoded(&["b", "c"]), encoded(&["d"])];
    let mut offsets = Vec::new();
    for batch in &sent {
        offsets.push(log.append(TOPIC, 1, batch.clone()).await.unwrap());
    }
    assert_eq!(offsets, [0, 1, 3]);
    for (batch, offset) in sent.iter().zip(&offsets) {
        let seen = soon(stream.try_next()).await.unwrap().unwrap();
        assert_eq!((&seen.batch, &seen.first_offset), (batch, offset));
        assert!(seen.append_time_us > 0);
    }
    let all = log.read(TOPIC, 1, 0, 1 << 20).await.unwrap();
    assert_eq!(values(&all), ["a", "b", "c", "d"]);
    // From within a batch, and at least one whatever the limit is.
    let some = log.read(TOPIC, 1, 2, 0).await.unwrap();
    assert_eq!(values(&some), ["b", "c"]);
    assert_eq!(some[0].next_offset(), 3);
    assert_eq!(log.read(TOPIC, 1, 4, 1 << 20).await.unwrap(), []);
    let watermarks = log.watermarks(TOPIC, 1).await.unwrap();
    assert_eq!((watermarks.log_start, watermarks.high_watermark), (0, 4));
    assert_eq!(log.watermarks(TOPIC, 0).await.unwrap().high_watermark, 0);
    let mut page = MetricsPage::default();
    log.node().metrics().write(&mut page);
    let page = page.to_string();
    // The stream has read 4 records, and the three reads 4, 2 and none.
    for line in [
        "helix_appended_batches_total 3",
        "helix_read_records_total 10",
        "helix_fetch_seconds_count 3",
    ] {
        assert!(page.lines().any(|there| there == line), "{line}: {page}");
    }
    log.close().await;
    let ended = soon(stream.next()).await.unwrap().unwrap_err();
    assert!(matches!(ended, Error::Draining), "{ended}");
    assert!(soon(stream.next()).await.is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_passes_from_an_embedded_node_to_a_server_and_back() {
    let directory = tempfile::tempdir().unwrap();
    let config = ServerConfig::in_dir(directory.path());
    let log = opened(config.clone()).await;
    log.append("default", 0, encoded(&["embedded"])).await.unwrap();
    let error = Embedded::open(config.clone()).await.map(drop).unwrap_err();
    assert!(matches!(error, StartError::Open(_)), "it is in use: {error}");
    log.close().await;
    let server = TestServer::start(config.clone(), None).await;
    server.append(&["served"]).await;
    drop(server.channel);
    soon(server.running.shutdown()).await;
    let log = opened(config).await;
    let all = log.read("default", 0, 0, 1 << 20).await.unwrap();
    assert_eq!(values(&all), ["embedded", "served"]);
    log.close().await;
}

#[tokio::test]
async fn errors_are_those_of_a_server() {
    let log = opened(ServerConfig::in_memory()).await;
    let batch = || encoded(&["a"]);
    let error = log.append("none", 0, batch()).await.unwrap_err();
    assert!(matches!(error, Error::TopicNotFound { .. }), "{error}");
    let error = log.append(TOPIC, 2, batch()).await.unwrap_err();
    assert!(matches!(error, Error::PartitionNotFound { partition_count: 2, .. }), "{error}");
    let corrupt = EncodedBatch { crc32: !batch().crc32, ..batch() };
    let error = log.append(TOPIC, 0, corrupt).await.unwrap_err();
    assert!(matches!(error, Error::CorruptBatch { .. }), "{error}");
    let error = log.read(TOPIC, 0, 1, 1).await.unwrap_err();
    assert!(matches!(error, Error::OffsetOutOfRange { requested: 1, .. }), "{error}");
    let error = log.subscribe("none", 0, 0).await.map(drop).unwrap_err();
    assert!(matches!(error, Error::TopicNotFound { .. }), "{error}");
    let mut beyond = log.subscribe(TOPIC, 0, 1).await.unwrap();
    let error = soon(beyond.next()).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::OffsetOutOfRange { .. }), "{error}");
    let error = log.create_topic(TOPIC, 3).await.unwrap_err();
    assert!(matches!(error, Error::TopicAlreadyExists { .. }), "{error}");
    let error = log.create_topic("a/b", 1).await.unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { field: "name", .. }), "{error}");
    let mut deleted = log.subscribe(TOPIC, 0, 0).await.unwrap();
    log.node().cluster().delete_topic(TOPIC, 0).await.unwrap();
    let error = soon(deleted.next()).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::PartitionDeleted { .. }), "{error}");
    log.close().await;

    let peers = vec![(2, "n2:9192".to_owned())];
    let config = ServerConfig { peers, ..ServerConfig::in_memory() };
    let error = Embedded::open(config).await.map(drop).unwrap_err();
    assert!(error.to_string().contains("no port for other nodes"), "{error}");
}
