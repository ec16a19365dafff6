//! The client that behaves: one append of 1 KiB after the other, and after each a read of it.

use std::net::SocketAddr;
use std::time::Duration;

use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::{FetchRequest, PartitionStart, StartPosition};
use tokio::time::{Instant, sleep, timeout};
use tonic::transport::Channel;

use super::{GUESTS_PARTITION, TOPIC, append, connect};

/// Between two rounds: this is no load of its own.
const PAUSE: Duration = Duration::from_millis(2);

/// A call that takes longer than this has failed.
const CALL_MAX: Duration = Duration::from_secs(30);

/// Sorted.
#[derive(Debug, Default)]
pub(crate) struct Latencies {
    pub(crate) appends: Vec<Duration>,
    pub(crate) fetches: Vec<Duration>,
    pub(crate) errors: u64,
}

pub(crate) struct Guest {
    channel: Channel,
}

impl Guest {
    pub(crate) async fn connect(address: SocketAddr) -> anyhow::Result<Self> {
        Ok(Self { channel: connect(address).await? })
    }

    pub(crate) async fn measure(&self, duration: Duration) -> Latencies {
        let mut produce = ProduceServiceClient::new(self.channel.clone());
        let mut consume = ConsumeServiceClient::new(self.channel.clone());
        let mut latencies = Latencies::default();
        let request = append(GUESTS_PARTITION, 1);
        let end = Instant::now() + duration;
        while Instant::now() < end {
            let begun = Instant::now();
            let offset = match timeout(CALL_MAX, produce.append(request.clone())).await {
                Ok(Ok(answer)) => {
                    latencies.appends.push(begun.elapsed());
                    answer.into_inner().ack.and_then(|ack| ack.first_offset)
                }
                failed => {
                    latencies.fail("append", &format!("{failed:?}"));
                    continue;
                }
            };
            let begun = Instant::now();
            match timeout(CALL_MAX, consume.fetch(read(offset.unwrap_or_default()))).await {
                Ok(Ok(answer))
                    if answer.get_ref().partitions.iter().any(|it| !it.batches.is_empty()) =>
                {
                    latencies.fetches.push(begun.elapsed());
                }
                failed => latencies.fail("fetch", &format!("{failed:?}")),
            }
            sleep(PAUSE).await;
        }
        latencies.appends.sort_unstable();
        latencies.fetches.sort_unstable();
        latencies
    }
}

impl Latencies {
    fn fail(&mut self, call: &str, how: &str) {
        self.errors += 1;
        eprintln!("{call}: {}", how.chars().take(300).collect::<String>());
    }
}

fn read(offset: u64) -> FetchRequest {
    let start = PartitionStart {
        topic: TOPIC.to_owned(),
        partition: GUESTS_PARTITION,
        start: Some(StartPosition { position: Some(Position::Offset(offset)) }),
        until_offset: None,
    };
    FetchRequest { partitions: vec![start], accept_encoded: true, ..FetchRequest::default() }
}
