//! State that all connections of the gateway share.

use std::sync::Arc;
use std::time::Duration;

use helix_client::Client;
use tokio::sync::{Notify, Semaphore};

use crate::batch::ConvertedBatches;
use crate::brokers::{GatewayOfNode, GatewayTable};
use crate::groups::GroupRegistry;
use crate::memory::MemoryBudget;
use crate::metrics::GatewayMetrics;
use crate::principals::PrincipalPool;
use crate::upstream::Upstream;

/// Most append streams to the cluster. Each node takes 1,024 calls a connection.
const APPEND_STREAMS_MAX: usize = 512;

/// Most appends without a stream that are in progress.
const SINGLE_APPENDS_MAX: usize = 256;

/// Part of the memory limit for converted batches.
const CONVERTED_PART: usize = 8;

/// Limits of a gateway.
#[derive(Debug, Clone, Copy)]
pub struct GatewayLimits {
    /// Memory of requests and responses, in bytes.
    pub memory_bytes: usize,
    /// Connections.
    pub connections: usize,
    /// Largest request, in bytes.
    pub request_bytes: usize,
    /// Requests of one connection that wait for their responses.
    pub requests_in_flight: usize,
    /// Time without a request after which a connection is closed.
    pub idle_timeout: Duration,
}

impl Default for GatewayLimits {
    fn default() -> Self {
        Self {
            memory_bytes: 256 << 20,
            connections: 10_000,
            request_bytes: 16 << 20,
            requests_in_flight: 32,
            idle_timeout: Duration::from_secs(600),
        }
    }
}

/// Rules of the gateway that clients notice.
#[derive(Debug, Clone, Copy, Default)]
pub struct GatewayRules {
    /// Partitions of a topic that a request for metadata creates; `None` creates none.
    pub auto_create_partitions: Option<u32>,
    /// Clients must authenticate themselves with SASL.
    pub requires_sasl: bool,
}

/// See the module.
#[derive(Debug)]
pub struct GatewayState {
    /// Limits.
    pub limits: GatewayLimits,
    /// Rules.
    pub rules: GatewayRules,
    /// Gateways of the cluster.
    pub(crate) brokers: GatewayTable,
    /// The cluster with the credentials of the gateway.
    pub(crate) upstream: Arc<Upstream>,
    /// The cluster with the credentials of clients.
    pub(crate) principals: PrincipalPool,
    /// Memory.
    pub(crate) memory: MemoryBudget,
    /// Memory of large requests that are arriving, a part of `memory`.
    pub(crate) arriving: MemoryBudget,
    /// Permits of append streams.
    pub(crate) append_streams: Arc<Semaphore>,
    /// Permits of appends without a stream, for lanes that get none.
    pub(crate) single_appends: Semaphore,
    /// Notified when an append must have a stream, so that idle ones close.
    pub(crate) stream_wanted: Notify,
    /// Consumer groups that this gateway coordinates.
    pub(crate) groups: GroupRegistry,
    /// Native batches as Kafka batches.
    pub(crate) converted: ConvertedBatches,
    /// Counts.
    pub metrics: GatewayMetrics,
}

impl GatewayState {
    /// Returns this gateway as clients see it.
    pub fn broker(&self) -> &GatewayOfNode {
        self.brokers.own()
    }

    /// Creates the state of a gateway.
    pub(crate) fn new(
        client: Client,
        brokers: GatewayTable,
        limits: GatewayLimits,
        rules: GatewayRules,
    ) -> Self {
        let config = client.config().clone();
        Self {
            limits,
            rules,
            brokers,
            upstream: Arc::new(Upstream::new(client)),
            principals: PrincipalPool::new(config),
            memory: MemoryBudget::new(limits.memory_bytes),
            arriving: MemoryBudget::new(limits.memory_bytes / 4 * 3),
            append_streams: Arc::new(Semaphore::new(APPEND_STREAMS_MAX)),
            single_appends: Semaphore::new(SINGLE_APPENDS_MAX),
            stream_wanted: Notify::new(),
            groups: GroupRegistry::default(),
            converted: ConvertedBatches::new(limits.memory_bytes / CONVERTED_PART),
            metrics: GatewayMetrics::default(),
        }
    }
}
