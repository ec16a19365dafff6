//! `grpc.health.v1.Health`: whether a node is there, and which of its services do what they should.
//! Looked up when somebody asks, so that it is never older than the answer.
//! <https://github.com/grpc/grpc/blob/master/doc/health-checking.md>

use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, stream};
use helix_proto::log::v1::cluster_service_server::SERVICE_NAME as CLUSTER;
use helix_proto::log::v1::consume_service_server::SERVICE_NAME as CONSUME;
use helix_proto::log::v1::produce_service_server::SERVICE_NAME as PRODUCE;
use helix_proto::log::v1::topic_service_server::SERVICE_NAME as TOPIC;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::codegen::BoxStream;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use crate::node::Node;

/// How often a node looks at itself for each watch that is open.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// The name that stands for the whole node.
const NODE: &str = "";

/// The health service of a node, which serves until `leaving` is cancelled.
pub fn health(node: &Arc<Node>, leaving: CancellationToken) -> HealthServer<impl Health> {
    HealthServer::new(NodeHealth { node: node.clone(), leaving })
}

#[derive(Clone)]
struct NodeHealth {
    node: Arc<Node>,
    leaving: CancellationToken,
}

impl NodeHealth {
    fn status(&self, service: &str) -> ServingStatus {
        let is_served = match service {
            NODE | CLUSTER => true,
            CONSUME => self.node.unready().iter().all(|it| it.reads_go_on),
            PRODUCE | TOPIC => self.node.unready().is_empty(),
            _ => return ServingStatus::ServiceUnknown,
        };
        if is_served && !self.leaving.is_cancelled() {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        }
    }

    /// The status now, and then each that differs from the one before; ends when the node leaves.
    fn follow(self, service: String) -> impl Stream<Item = Result<HealthCheckResponse, Status>> {
        stream::unfold((self, service, None), |(health, service, mut told)| async move {
            loop {
                let leaves = health.leaving.is_cancelled();
                let status = health.status(&service);
                if told != Some(status) {
                    told = Some(status);
                    return Some((Ok(response(status)), (health, service, told)));
                }
                if leaves {
                    return None;
                }
                tokio::select! {
                    () = sleep(LOOK_INTERVAL) => {}
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
        let service = &request.get_ref().service;
        match self.status(service) {
            ServingStatus::ServiceUnknown => Err(Status::not_found(format!(
                "there is no health of {service:?}; ask for {PRODUCE}, {CONSUME}, {TOPIC}, \
                 {CLUSTER}, or for the whole node with no name"
            ))),
            status => Ok(Response::new(response(status))),
        }
    }

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let following = self.clone().follow(request.into_inner().service);
        Ok(Response::new(Box::pin(following)))
    }
}
