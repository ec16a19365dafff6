//! Well-behaved client: appends 1 KiB and reads it back, one request at a time.

use std::net::SocketAddr;
use std::time::Duration;

use helix_client::{AuthorizedChannel, TokenSource};
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::{FetchRequest, PartitionStart, StartPosition};
use tokio::time::{Instant, sleep, timeout};

use super::{PROBE_PARTITION, TOPIC, append, connect};
use crate::output::print_error;

/// Pause between rounds, so that the probe itself causes no load.
const PAUSE: Duration = Duration::from_millis(2);

/// Longest time of a request before it counts as failed.
const CALL_MAX: Duration = Duration::from_secs(30);

/// Sorted request times.
#[derive(Debug, Default)]
pub(crate) struct CallTimes {
    pub(crate) appends: Vec<Duration>,
    pub(crate) fetches: Vec<Duration>,
    pub(crate) errors: u64,
}

pub(crate) struct ProbeClient {
    channel: AuthorizedChannel,
}

impl ProbeClient {
    pub(crate) async fn connect(address: SocketAddr, token: TokenSource) -> anyhow::Result<Self> {
        Ok(Self { channel: connect(address, token).await? })
    }

    pub(crate) async fn measure(&self, duration: Duration) -> CallTimes {
        let mut produce = ProduceServiceClient::new(self.channel.clone());
        let mut consume = ConsumeServiceClient::new(self.channel.clone());
        let mut latencies = CallTimes::default();
        let request = append(PROBE_PARTITION, 1);
        let end = Instant::now() + duration;
        while Instant::now() < end {
            let begun = Instant::now();
            let offset = match timeout(CALL_MAX, produce.append(request.clone())).await {
                Ok(Ok(response)) => {
                    latencies.appends.push(begun.elapsed());
                    response.into_inner().ack.and_then(|ack| ack.first_offset)
                }
                failed => {
                    latencies.fail("append", &format!("{failed:?}"));
                    continue;
                }
            };
            let begun = Instant::now();
            match timeout(CALL_MAX, consume.fetch(read(offset.unwrap_or_default()))).await {
                Ok(Ok(response))
                    if response.get_ref().partitions.iter().any(|it| !it.batches.is_empty()) =>
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

impl CallTimes {
    fn fail(&mut self, call: &str, how: &str) {
        self.errors += 1;
        let how: String = how.chars().take(300).collect();
        print_error(format_args!("{call}: {how}"));
    }
}

fn read(offset: u64) -> FetchRequest {
    let start = PartitionStart {
        topic: TOPIC.to_owned(),
        partition: PROBE_PARTITION,
        start: Some(StartPosition {
            position: Some(Position::Offset(offset)),
            ..StartPosition::default()
        }),
        until_offset: None,
        topic_id: 0,
    };
    FetchRequest { partitions: vec![start], accept_encoded: true, ..FetchRequest::default() }
}
