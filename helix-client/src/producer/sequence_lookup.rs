//! Looks up the sequence with which a producer continues on a partition.
//!
//! The service states it when a stream of the producer is opened; no batch is sent.

use std::task::Context;

use helix_proto::log::v1::append_stream_request::Message as Request;
use helix_proto::log::v1::append_stream_response::Message as Response;
use helix_proto::log::v1::{AppendStreamInit, AppendStreamRequest, ProducerIdentity};
use tokio::sync::mpsc;
use tonic::Status;

use crate::call_spec::{CallSpec, Repeat};
use crate::client::Client;
use crate::error::Result;

/// Returns the next sequence of a producer on a partition, and the id of the topic.
///
/// # Errors
/// The service's rejection, or the last failure if the leader is unreachable within the request
/// timeout.
pub(super) async fn next_sequence(
    client: &Client,
    topic: &str,
    partition: u32,
    producer: ProducerIdentity,
) -> Result<(u64, u64)> {
    let call = CallSpec::new("sequence lookup", Repeat::Read);
    let opened = client.call_leader((topic, partition), call, |route| {
        let mut produce = route.connection.produce();
        let init = AppendStreamInit {
            topic: topic.to_owned(),
            partition,
            producer: Some(producer),
            ..AppendStreamInit::default()
        };
        async move {
            let (outgoing, mut requests) = mpsc::unbounded_channel();
            let init = AppendStreamRequest { message: Some(Request::Init(init)) };
            outgoing.send(init).expect("the receiver is in scope");
            let next = move |context: &mut Context<'_>| requests.poll_recv(context);
            let request = helix_transport::requests::append_stream(next, tokio_stream::empty());
            let mut responses = produce.append_stream(request).await?.into_inner();
            let first = responses.message().await?;
            match first.and_then(|first| first.message) {
                Some(Response::Opened(opened)) => Ok(tonic::Response::new(opened)),
                _ => Err(Status::internal("the first message of the stream is not `opened`")),
            }
        }
    });
    let opened = opened.await?;
    Ok((opened.next_sequence.unwrap_or(0), opened.topic_id))
}
