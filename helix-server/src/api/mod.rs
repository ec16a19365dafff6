//! The public gRPC API: one file per service, and what the services share.
//! Knows tonic and the wire; not Raft, not files.

mod append_stream;
mod batch;
mod cluster;
mod consume;
mod group;
mod health;
mod membership;
mod meter;
mod positions;
mod produce;
mod reader;
mod settings;
mod status;
mod subscribe;
mod time;
mod topic;

use std::sync::Arc;

use helix_proto::log::v1::cluster_service_server::ClusterServiceServer;
use helix_proto::log::v1::consume_service_server::ConsumeServiceServer;
use helix_proto::log::v1::group_service_server::GroupServiceServer;
use helix_proto::log::v1::produce_service_server::ProduceServiceServer;
use helix_proto::log::v1::topic_service_server::TopicServiceServer;
use helix_proto::log::v1::{self as wire};
use tonic::service::Routes;

use crate::error::LeaderHint;
use crate::limits::{CONTROL_MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX};
use crate::load::Call;
use crate::log::Watermarks;
use crate::node::Node;
pub use health::health;
pub use meter::{Meter, MeterLayer};

/// The five services of a node.
pub fn routes(node: &Arc<Node>) -> Routes {
    let produce = ProduceServiceServer::new(produce::Produce::new(node));
    let consume = ConsumeServiceServer::new(consume::Consume::new(node));
    let topic = TopicServiceServer::new(topic::Topics::new(node));
    let cluster = ClusterServiceServer::new(cluster::ClusterView::new(node));
    let group = GroupServiceServer::new(group::Groups);
    // Answers are bounded by what was asked for, not by the codec.
    Routes::new(produce.max_decoding_message_size(MESSAGE_BYTES_MAX))
        .add_service(
            consume
                .max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX)
                .max_encoding_message_size(usize::MAX),
        )
        .add_service(topic.max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX))
        .add_service(cluster.max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX))
        .add_service(group.max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX))
}

/// What the call holds of the node's memory; nothing counts where it did not come in by the gate.
fn call_of<T>(request: &tonic::Request<T>) -> Option<Arc<Call>> {
    request.extensions().get::<Arc<Call>>().cloned()
}

fn wire_watermarks(watermarks: Watermarks) -> wire::Watermarks {
    wire::Watermarks {
        log_start_offset: watermarks.log_start,
        high_watermark: watermarks.high_watermark,
    }
}

fn wire_leader(leader: LeaderHint) -> wire::LeaderHint {
    wire::LeaderHint { node_id: leader.node_id, endpoint: leader.endpoint, term: leader.term }
}

/// Shards are few; the wire has 32 bits for their ids.
fn wire_shard_id(shard: u64) -> u32 {
    u32::try_from(shard).expect("shard ids are counted from 0")
}
