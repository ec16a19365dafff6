//! Dispatches a request to the service that its path names.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::future::Either;
use helix_proto::log::v1::access_service_server::AccessServiceServer;
use helix_proto::log::v1::cluster_service_server::ClusterServiceServer;
use helix_proto::log::v1::consume_service_server::{ConsumeServiceServer, SERVICE_NAME as CONSUME};
use helix_proto::log::v1::group_service_server::{GroupServiceServer, SERVICE_NAME as GROUP};
use helix_proto::log::v1::produce_service_server::{ProduceServiceServer, SERVICE_NAME as PRODUCE};
use helix_proto::log::v1::topic_service_server::TopicServiceServer;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::service::Routes;

use crate::api::{
    AccessHandler, ClusterHandler, ConsumeHandler, Decompressors, GroupHandler, ProduceHandler,
    TopicHandler,
};
use crate::call::ClientLoad;
use crate::limits::{CONTROL_MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX};
use crate::node::Node;

/// The gRPC services of a node.
///
/// Frequent calls skip tonic's router, which searches a tree, clones the service and boxes the
/// body for each call: those that carry records, heartbeats and commits.
#[derive(Clone)]
pub struct Services {
    produce: ProduceServiceServer<ProduceHandler>,
    consume: ConsumeServiceServer<ConsumeHandler>,
    group: GroupServiceServer<GroupHandler>,
    others: Routes,
    node: Arc<Node>,
}

impl fmt::Debug for Services {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Services").field("others", &self.others).finish_non_exhaustive()
    }
}

impl Services {
    /// Creates the six services of Helix, beside `others`.
    pub fn new(node: &Arc<Node>, load: &Arc<ClientLoad>, others: Routes) -> Self {
        let decompressors = Decompressors::new(load.shares().decompressors);
        let produce = ProduceHandler::new(node, load, &decompressors);
        let produce = ProduceServiceServer::new(produce);
        let consume = ConsumeHandler::new(node, load, &decompressors);
        let consume = ConsumeServiceServer::new(consume);
        let topic = TopicServiceServer::new(TopicHandler::new(node));
        let cluster = ClusterServiceServer::new(ClusterHandler::new(node));
        let group = GroupServiceServer::new(GroupHandler::new(node));
        let access = AccessServiceServer::new(AccessHandler::new(node));
        let others = others
            .add_service(topic.max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX))
            .add_service(cluster.max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX))
            .add_service(access.max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX));
        Self {
            produce: produce.max_decoding_message_size(MESSAGE_BYTES_MAX),
            // The request's limits bound the responses, not the codec.
            consume: consume
                .max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX)
                .max_encoding_message_size(usize::MAX),
            group: group.max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX),
            others,
            node: node.clone(),
        }
    }

    pub(super) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Does work once that each clone would do.
    #[must_use]
    pub fn prepare(self) -> Self {
        Self { others: self.others.prepare(), ..self }
    }
}

impl Service<http::Request<Body>> for Services {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Either<
        BoxFuture<Self::Response, Infallible>,
        <Routes as Service<http::Request<Body>>>::Future,
    >;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // The services beside them are always ready.
        Service::<http::Request<Body>>::poll_ready(&mut self.others, context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match service_of(request.uri().path()) {
            Some(PRODUCE) => Either::Left(self.produce.call(request)),
            Some(CONSUME) => Either::Left(self.consume.call(request)),
            Some(GROUP) => Either::Left(self.group.call(request)),
            _ => Either::Right(self.others.call(request)),
        }
    }
}

/// Returns the service of a path like "/service/method".
fn service_of(path: &str) -> Option<&str> {
    path.strip_prefix('/')?.split_once('/').map(|(service, _)| service)
}
