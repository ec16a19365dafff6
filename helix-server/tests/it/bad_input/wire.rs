//! Corrupted messages, sent as raw bytes.

use std::time::Duration;

use bytes::{Buf, BufMut, Bytes};
use helix_proto::log::v1::{
    AppendRequest, CreateTopicRequest, FetchRequest, ResolveOffsetsRequest,
};
use helix_server::limits::{CONTROL_MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX};
use prost::Message;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::others_are_served;
use crate::process::seed;
use crate::support::{TestServer, append_request, connect, earliest, plain, soon};

/// A codec that sends and receives messages as raw bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}

/// Deadline of a call, whatever wait the message asks for.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// Sends one message to a method and waits for its first response.
pub(super) async fn call(channel: &Channel, path: &str, message: Bytes) -> Result<(), Status> {
    let mut grpc = Grpc::new(channel.clone()).max_encoding_message_size(usize::MAX);
    grpc.ready().await.unwrap();
    let path = PathAndQuery::try_from(path).unwrap();
    let mut requests = Request::new(tokio_stream::once(message));
    // Corrupted bytes may request a long wait.
    requests.set_timeout(WAIT_MAX);
    let mut answers = grpc.streaming(requests, path, Raw).await?.into_inner();
    answers.message().await.map(drop)
}

/// Valid messages with many fields, to be corrupted.
fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let append = append_request(&["one", "two"]);
    let by_hand = AppendRequest { batch: plain(&["one", "two"]), ..append_request(&[]) };
    let fetch = FetchRequest { partitions: vec![earliest(0), earliest(1)], ..Default::default() };
    let create = CreateTopicRequest {
        name: "orders".to_owned(),
        partition_count: 2,
        config: Some(Default::default()),
        validate_only: true,
        ..Default::default()
    };
    let resolve = ResolveOffsetsRequest {
        topic: "default".to_owned(),
        partitions: vec![0, 1],
        position: earliest(0).start,
        topic_id: 0,
    };
    vec![
        ("/helix.log.v1.ProduceService/Append", append.encode_to_vec()),
        ("/helix.log.v1.ProduceService/Append", by_hand.encode_to_vec()),
        ("/helix.log.v1.ConsumeService/Fetch", fetch.encode_to_vec()),
        ("/helix.log.v1.ConsumeService/ResolveOffsets", resolve.encode_to_vec()),
        ("/helix.log.v1.TopicService/CreateTopic", create.encode_to_vec()),
    ]
}

#[tokio::test]
async fn corrupted_messages_get_errors_and_break_nothing() {
    let server = TestServer::in_memory().await;
    let another = connect(&server.running).await;
    let mut rng = StdRng::seed_from_u64(seed(0xBAD));
    let mut written = 0;
    for round in 0..2_000 {
        let seeds = seeds();
        let (path, mut message) = seeds[round % seeds.len()].clone();
        for _ in 0..rng.random_range(1..5) {
            let place = rng.random_range(0..message.len());
            match rng.random_range(0..3) {
                0 => message[place] = rng.random(),
                1 => message.insert(place, rng.random()),
                _ => message.truncate(place.max(1)),
            }
        }
        // The topic may still exist, and partition 3 belongs to the other client.
        let shown = format!("{path} {message:02x?}");
        match soon(call(&server.channel, path, message.into())).await {
            Ok(()) => {}
            Err(status) => {
                let is_undecodable = status.code() == Code::Internal
                    && status.message().starts_with("failed to decode Protobuf message");
                let is_ours = helix_proto::error::from_status(&status).is_some();
                let is_late = status.message() == "Timeout expired";
                assert!(is_undecodable || is_ours || is_late, "{shown}: {status:?}");
            }
        }
        if round % 100 == 99 {
            let partition_is_ours = written;
            others_may_have_moved(&another, &mut written, partition_is_ours, &shown).await;
        }
    }
}

/// As [`others_are_served`], but a corrupted append may have moved the partition's end.
async fn others_may_have_moved(channel: &Channel, written: &mut u64, least: u64, place: &str) {
    use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;

    let mut consume = ConsumeServiceClient::new(channel.clone());
    let fetch = FetchRequest { partitions: vec![earliest(3)], ..Default::default() };
    let read = soon(consume.fetch(fetch)).await.expect(place).into_inner();
    let end = read.partitions[0].watermarks.unwrap().high_watermark;
    assert!(end >= least, "{place}");
    *written = end;
    others_are_served(channel, written, place).await;
}

#[tokio::test]
async fn rejects_messages_over_the_size_limit() {
    let server = TestServer::in_memory().await;
    let another = connect(&server.running).await;
    let mut written = 0;
    for (path, bytes) in [
        ("/helix.log.v1.ProduceService/Append", MESSAGE_BYTES_MAX + 1),
        ("/helix.log.v1.ProduceService/AppendStream", MESSAGE_BYTES_MAX + 1),
        ("/helix.log.v1.ConsumeService/Fetch", CONTROL_MESSAGE_BYTES_MAX + 1),
        ("/helix.log.v1.TopicService/CreateTopic", CONTROL_MESSAGE_BYTES_MAX + 1),
        ("/helix.log.v1.ClusterService/GetMetadata", CONTROL_MESSAGE_BYTES_MAX + 1),
    ] {
        let status = soon(call(&server.channel, path, vec![0; bytes].into())).await.unwrap_err();
        assert_eq!(status.code(), Code::OutOfRange, "{path}: {status:?}");
        assert!(status.message().contains("too large"), "{path}: {status:?}");
        others_are_served(&another, &mut written, path).await;
    }
    let nowhere = soon(call(&server.channel, "/helix.log.v1.ProduceService/Nothing", Bytes::new()));
    assert_eq!(nowhere.await.unwrap_err().code(), Code::Unimplemented);
}
