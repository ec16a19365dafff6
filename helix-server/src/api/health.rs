//! `grpc.health.v1.Health`: reports which services of a node are serving.
//! Each request reads the node's current state.
//! <https://github.com/grpc/grpc/blob/master/doc/health-checking.md>

use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, stream};
use helix_proto::log::v1::access_service_server::SERVICE_NAME as ACCESS;
use helix_proto::log::v1::cluster_service_server::SERVICE_NAME as CLUSTER;
use helix_proto::log::v1::consume_service_server::SERVICE_NAME as CONSUME;
use helix_proto::log::v1::group_service_server::SERVICE_NAME as GROUP;
use helix_proto::log::v1::produce_service_server::SERVICE_NAME as PRODUCE;
use helix_proto::log::v1::topic_service_server::SERVICE_NAME as TOPIC;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::codegen::BoxStream;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use crate::limits::CONTROL_MESSAGE_BYTES_MAX;
use crate::node::Node;

/// Interval at which each open watch polls the node's state.
const HEALTH_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Capability of the node that a service needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Needs {
    Nothing,
    Reads,
    Writes,
}

impl Needs {
    /// Returns the need of a service by its full name; no name stands for the whole node.
    fn of(service: &str) -> Option<Self> {
        match service {
            "" | ACCESS | CLUSTER => Some(Self::Nothing),
            CONSUME => Some(Self::Reads),
            PRODUCE | TOPIC | GROUP => Some(Self::Writes),
            _ => None,
        }
    }
}

/// Returns the health service; it reports NOT_SERVING once `leaving` is cancelled.
pub fn health(node: &Arc<Node>, leaving: CancellationToken) -> HealthServer<impl Health> {
    HealthServer::new(NodeHealth { node: node.clone(), leaving })
        .max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX)
}

#[derive(Clone)]
struct NodeHealth {
    node: Arc<Node>,
    leaving: CancellationToken,
}

impl NodeHealth {
    fn status(&self, needs: Needs) -> ServingStatus {
        let is_served = match needs {
            Needs::Nothing => true,
            Needs::Reads => self.node.unready().iter().all(|it| it.reads_available),
            Needs::Writes => self.node.unready().is_empty(),
        };
        if is_served && !self.leaving.is_cancelled() {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        }
    }

    /// Streams the status now and at each change, until the node leaves.
    fn watch_status(
        self,
        needs: Option<Needs>,
    ) -> impl Stream<Item = Result<HealthCheckResponse, Status>> {
        stream::unfold((self, None), move |(health, mut sent)| async move {
            loop {
                // Read before the status, so that the last status is still sent.
                let is_leaving = health.leaving.is_cancelled();
                let status = needs.map_or(ServingStatus::ServiceUnknown, |it| health.status(it));
                if sent != Some(status) {
                    sent = Some(status);
                    return Some((Ok(response(status)), (health, sent)));
                }
                if is_leaving {
                    return None;
                }
                tokio::select! {
                    () = sleep(HEALTH_POLL_INTERVAL) => {}
                    () = health.leaving.cancelled() => {}
                }
            }
        })
    }
}

fn response(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

#[tonic::async_trait]
impl Health for NodeHealth {
    type WatchStream = BoxStream<HealthCheckResponse>;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        // The error does not repeat the name, which may be as long as a message.
        let needs = Needs::of(&request.get_ref().service).ok_or_else(|| {
            Status::not_found(format!(
                "unknown service; ask for {PRODUCE}, {CONSUME}, {TOPIC}, {CLUSTER}, or for the \
                 whole node with an empty name"
            ))
        })?;
        Ok(Response::new(response(self.status(needs))))
    }

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let needs = Needs::of(&request.get_ref().service);
        Ok(Response::new(Box::pin(self.clone().watch_status(needs))))
    }
}
