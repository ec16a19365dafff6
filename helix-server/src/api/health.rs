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

use crate::limits::CONTROL_MESSAGE_BYTES_MAX;
use crate::node::Node;

/// How often a node looks at itself for each watch that is open.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// What a service needs in order to do what it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Needs {
    Nothing,
    Reads,
    Writes,
}

impl Needs {
    /// By a service's full name; no name stands for the whole node.
    fn of(service: &str) -> Option<Self> {
        match service {
            "" | CLUSTER => Some(Self::Nothing),
            CONSUME => Some(Self::Reads),
            PRODUCE | TOPIC => Some(Self::Writes),
            _ => None,
        }
    }
}

/// The health service of a node, which serves until `leaving` is cancelled.
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
            Needs::Reads => self.node.unready().iter().all(|it| it.reads_go_on),
            Needs::Writes => self.node.unready().is_empty(),
        };
        if is_served && !self.leaving.is_cancelled() {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        }
    }

    /// The status now, and then each that differs from the one before; ends when the node leaves.
    fn follow(
        self,
        needs: Option<Needs>,
    ) -> impl Stream<Item = Result<HealthCheckResponse, Status>> {
        stream::unfold((self, None), move |(health, mut told)| async move {
            loop {
                // Looked at before the status, so that the last one is still told.
                let leaves = health.leaving.is_cancelled();
                let status = needs.map_or(ServingStatus::ServiceUnknown, |it| health.status(it));
                if told != Some(status) {
                    told = Some(status);
                    return Some((Ok(response(status)), (health, told)));
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
        // The name is not repeated: it may be as long as a message.
        let needs = Needs::of(&request.get_ref().service).ok_or_else(|| {
            Status::not_found(format!(
                "there is no health of such a service; ask for {PRODUCE}, {CONSUME}, {TOPIC}, \
                 {CLUSTER}, or for the whole node with no name"
            ))
        })?;
        Ok(Response::new(response(self.status(needs))))
    }

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let needs = Needs::of(&request.get_ref().service);
        Ok(Response::new(Box::pin(self.clone().follow(needs))))
    }
}
