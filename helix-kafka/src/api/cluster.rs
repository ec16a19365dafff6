//! DescribeCluster.

use std::time::Duration;

use kafka_protocol::messages::describe_cluster_response::DescribeClusterBroker;
use kafka_protocol::messages::{BrokerId, DescribeClusterRequest, DescribeClusterResponse};

use crate::context::{RequestContext, text};
use crate::errors::{CallTarget, code_of};

/// Age of the view of the cluster.
const VIEW_AGE_MAX: Duration = Duration::from_secs(1);

/// Answers a request for the brokers.
pub(crate) async fn describe_cluster(
    context: &RequestContext,
    _request: DescribeClusterRequest,
) -> DescribeClusterResponse {
    let brokers = &context.state.brokers;
    let view = match context.upstream.view(VIEW_AGE_MAX).await {
        Ok(view) => view,
        Err(error) => {
            let code = code_of(&error, CallTarget::Cluster);
            return DescribeClusterResponse::default()
                .with_error_code(code.code())
                .with_error_message(Some(text(error.message.clone())));
        }
    };
    let broker = |gateway: &crate::brokers::GatewayOfNode| {
        DescribeClusterBroker::default()
            .with_broker_id(BrokerId(gateway.node_id))
            .with_host(text(gateway.address.host.clone()))
            .with_port(i32::from(gateway.address.port))
    };
    DescribeClusterResponse::default()
        .with_cluster_id(text(view.cluster_id.clone()))
        .with_controller_id(BrokerId(brokers.beside(view.controller).node_id))
        .with_brokers(brokers.up().map(broker).collect())
}
