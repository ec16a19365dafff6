//! A node process under flood, abusive clients, and a well-behaved probe client.
//!
//! All clients use gRPC or HTTP/2 directly, without retries.

mod abuse;
mod abusive_clients;
mod client_tokens;
mod neighbours;
mod new_clients;
mod node_under_test;
mod probe_client;
mod resets;

use std::net::SocketAddr;

use bytes::Bytes;
use helix_client::{AuthorizedChannel, TokenSource};
use helix_proto::batch as encoding;
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::{AppendRequest, Batch, Record};
use tonic::transport::Endpoint;

pub use abuse::AbusePattern;
pub(crate) use abusive_clients::AbusiveClients;
pub(crate) use client_tokens::CheckedCallers;
pub use neighbours::NeighbourCalls;
pub(crate) use neighbours::{Neighbour, Neighbours};
pub(crate) use new_clients::{NewClients, connect_new_clients};
pub(crate) use node_under_test::{NodeUnderTest, NodeUnderTestOptions};
pub(crate) use probe_client::{CallTimes, ProbeClient};
pub(crate) use resets::{ResetFlood, ResetMix};

/// Topic of the node and its partitions; one is for the probe client, the others for abusive
/// clients.
const TOPIC: &str = "default";
const PARTITIONS: u32 = 4;
const PROBE_PARTITION: u32 = 0;

/// Opens a connection with small flow-control windows.
async fn connect(
    address: SocketAddr,
    token: TokenSource,
) -> Result<AuthorizedChannel, tonic::transport::Error> {
    let channel = Endpoint::from_shared(format!("http://{address}"))?
        .initial_stream_window_size(Some(65_535))
        .initial_connection_window_size(Some(65_535))
        .connect()
        .await?;
    Ok(AuthorizedChannel::new(channel, token))
}

/// Builds a batch of records of 1 KiB.
fn append(partition: u32, records: usize) -> AppendRequest {
    let value = Some(Bytes::from(vec![7; 1024]));
    let records = vec![Record { value, ..Record::default() }; records];
    let form = Form::Encoded(encoding::encode(&records));
    AppendRequest {
        topic: TOPIC.to_owned(),
        partition,
        batch: Some(Batch { form: Some(form) }),
        ..AppendRequest::default()
    }
}
