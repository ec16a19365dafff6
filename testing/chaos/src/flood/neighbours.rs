//! Clients of other principals beside the probe client: each keeps a number of calls of one kind
//! open on each of its connections.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::ValueEnum;
use helix_client::{AuthorizedChannel, TokenSource};
use helix_proto::log::v1::access_service_client::AccessServiceClient;
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::topic_service_client::TopicServiceClient;
use helix_proto::log::v1::{
    FetchRequest, GetTopicRequest, ListTopicsRequest, ReadLimits, WhoAmIRequest,
};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::abusive_clients::{LowPriorityRuntime, earliest, partition};
use super::{TOPIC, append, connect};

/// Bytes of a response of the fetches.
const FETCH_BYTES: u64 = 100 << 10;

/// Pause after a failed call, so that a client whose connection is lost does not only count errors.
const FAILED_PAUSE: Duration = Duration::from_millis(1);

/// Kind of calls that a neighbour makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NeighbourCalls {
    /// WhoAmI, which reads nothing
    WhoAmI,
    /// Appends of 1 KiB
    SmallAppends,
    /// Appends of 100 KiB
    LargeAppends,
    /// Fetches of 100 KiB
    Fetches,
    /// ListTopics
    Lists,
    /// GetTopic
    Describes,
}

/// A principal beside the probe client.
#[derive(Debug, Clone)]
pub(crate) struct Neighbour {
    pub(crate) token: TokenSource,
    pub(crate) connections: usize,
    /// Calls that are open at the same time on each connection.
    pub(crate) in_flight: usize,
}

/// Running clients of the neighbours; they stop when this is dropped.
pub(crate) struct Neighbours {
    answered: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
    // Before the runtime: its tasks are aborted first.
    _tasks: JoinSet<()>,
    _runtime: LowPriorityRuntime,
}

impl Neighbours {
    pub(crate) async fn start(
        address: SocketAddr,
        neighbours: &[Neighbour],
        calls: NeighbourCalls,
    ) -> anyhow::Result<Self> {
        let (runtime, mut tasks) = (LowPriorityRuntime::new()?, JoinSet::new());
        let (answered, failed) = <(Arc<AtomicU64>, Arc<AtomicU64>)>::default();
        let mut number = 0;
        for Neighbour { token, connections, in_flight } in neighbours {
            for _ in 0..*connections {
                let channel = runtime.run(connect(address, token.clone())).await?;
                number += 1;
                for _ in 0..*in_flight {
                    let (channel, answered) = (channel.clone(), answered.clone());
                    let failed = failed.clone();
                    let calling = async move {
                        loop {
                            if call(channel.clone(), calls, partition(number)).await.is_ok() {
                                answered.fetch_add(1, Ordering::Relaxed);
                            } else {
                                failed.fetch_add(1, Ordering::Relaxed);
                                sleep(FAILED_PAUSE).await;
                            }
                        }
                    };
                    tasks.spawn_on(calling, runtime.handle());
                }
            }
        }
        Ok(Self { answered, failed, _tasks: tasks, _runtime: runtime })
    }

    /// Returns the calls that were answered and those that failed.
    pub(crate) fn calls(&self) -> (u64, u64) {
        (self.answered.load(Ordering::Relaxed), self.failed.load(Ordering::Relaxed))
    }
}

async fn call(
    channel: AuthorizedChannel,
    calls: NeighbourCalls,
    partition: u32,
) -> Result<(), tonic::Status> {
    match calls {
        NeighbourCalls::WhoAmI => {
            AccessServiceClient::new(channel).who_am_i(WhoAmIRequest::default()).await?;
        }
        NeighbourCalls::SmallAppends => {
            ProduceServiceClient::new(channel).append(append(partition, 1)).await?;
        }
        NeighbourCalls::LargeAppends => {
            ProduceServiceClient::new(channel).append(append(partition, 100)).await?;
        }
        NeighbourCalls::Fetches => {
            let limits = ReadLimits { max_bytes: Some(FETCH_BYTES), ..ReadLimits::default() };
            let request = FetchRequest {
                partitions: vec![earliest(partition)],
                accept_encoded: true,
                limits: Some(limits),
                ..FetchRequest::default()
            };
            ConsumeServiceClient::new(channel).fetch(request).await?;
        }
        NeighbourCalls::Lists => {
            TopicServiceClient::new(channel).list_topics(ListTopicsRequest::default()).await?;
        }
        NeighbourCalls::Describes => {
            let request = GetTopicRequest { name: TOPIC.to_owned() };
            TopicServiceClient::new(channel).get_topic(request).await?;
        }
    }
    Ok(())
}
