//! A node as a process, a crowd of clients that do it harm, and one that behaves.
//! Everybody speaks gRPC or HTTP/2 directly: nothing retries or hides anything.

mod crowd;
mod guest;
mod harm;
mod host;

use bytes::Bytes;
use helix_proto::batch as encoding;
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::{AppendRequest, Batch, Record};
use tonic::transport::{Channel, Endpoint};

pub(crate) use crowd::Crowd;
pub(crate) use guest::{Guest, Latencies};
pub use harm::Harm;
pub(crate) use host::Host;

/// Topic of the node, and its partitions: one is the guest's, the others are the crowd's.
const TOPIC: &str = "default";
const PARTITIONS: u32 = 4;
const GUESTS_PARTITION: u32 = 0;

/// A connection whose windows take little of an answer.
async fn connect(address: std::net::SocketAddr) -> Result<Channel, tonic::transport::Error> {
    Endpoint::from_shared(format!("http://{address}"))?
        .initial_stream_window_size(Some(65_535))
        .initial_connection_window_size(Some(65_535))
        .connect()
        .await
}

/// A batch of records of 1 KiB.
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
