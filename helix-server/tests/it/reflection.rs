//! A client without generated types: it builds its messages from server reflection and makes the
//! grpcurl calls of docs/api.md.

// The test reads the documentation.
#![allow(clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use prost::Message;
use prost::bytes::Buf;
use prost_reflect::{
    DescriptorPool, DynamicMessage, MessageDescriptor, MethodDescriptor, SerializeOptions,
};
use prost_types::FileDescriptorProto;
use serde_json::{Value, json};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::Channel;
use tonic::{Request, Status};
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{FileDescriptorResponse, ServerReflectionRequest};

use crate::support::{TestServer, soon};

/// Services and descriptors from server reflection.
struct Reflected {
    channel: Channel,
    services: BTreeSet<String>,
    pool: DescriptorPool,
}

async fn ask(channel: &Channel, request: MessageRequest) -> MessageResponse {
    let mut client = ServerReflectionClient::new(channel.clone());
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(request) };
    let answers = client.server_reflection_info(tokio_stream::once(request)).await.unwrap();
    let answer = answers.into_inner().message().await.unwrap().expect("an answer");
    answer.message_response.expect("the response has a message")
}

fn files(answer: MessageResponse) -> Vec<FileDescriptorProto> {
    let MessageResponse::FileDescriptorResponse(FileDescriptorResponse { file_descriptor_proto }) =
        answer
    else {
        panic!("no files: {answer:?}");
    };
    let decoded = file_descriptor_proto.iter().map(|file| FileDescriptorProto::decode(&**file));
    decoded.collect::<Result<_, _>>().unwrap()
}

impl Reflected {
    async fn new(channel: Channel) -> Self {
        let listed = ask(&channel, MessageRequest::ListServices(String::new())).await;
        let MessageResponse::ListServicesResponse(listed) = listed else {
            panic!("no list: {listed:?}");
        };
        let services: BTreeSet<String> = listed.service.into_iter().map(|it| it.name).collect();
        let mut known: BTreeMap<String, FileDescriptorProto> = BTreeMap::new();
        let mut wanted = Vec::new();
        for service in services.iter().filter(|name| name.starts_with("helix.")) {
            let symbol = MessageRequest::FileContainingSymbol(service.clone());
            wanted.extend(files(ask(&channel, symbol).await));
        }
        while let Some(file) = wanted.pop() {
            for name in file.dependency.iter().filter(|name| !known.contains_key(*name)) {
                let named = MessageRequest::FileByFilename(name.clone());
                wanted.extend(files(ask(&channel, named).await));
            }
            known.insert(file.name().to_owned(), file);
        }
        let mut pool = DescriptorPool::new();
        pool.add_file_descriptor_protos(known.into_values()).unwrap();
        Self { channel, services, pool }
    }

    fn method(&self, path: &str) -> MethodDescriptor {
        let (service, method) = path.split_once('/').expect("Service/Method");
        let service = self.pool.get_service_by_name(service).expect("the service is described");
        service.methods().find(|it| it.name() == method).expect("the method is described")
    }

    /// Returns the response, or the first of a stream.
    async fn call(&self, path: &str, request: &Value) -> Result<Value, Status> {
        let method = self.method(path);
        let request = DynamicMessage::deserialize(method.input(), request).unwrap();
        let mut client = tonic::client::Grpc::new(self.channel.clone());
        client.ready().await.unwrap();
        let codec = Dynamic { output: method.output() };
        let path = format!("/{path}").parse().unwrap();
        let request = Request::new(request);
        let answer = if method.is_server_streaming() {
            let mut answers = client.server_streaming(request, path, codec).await?.into_inner();
            answers.message().await?.expect("a first message")
        } else {
            client.unary(request, path, codec).await?.into_inner()
        };
        let options = SerializeOptions::new().use_proto_field_name(true);
        let json = serde_json::value::Serializer;
        Ok(answer.serialize_with_options(json, &options).unwrap())
    }
}

/// A codec of dynamic messages.
struct Dynamic {
    output: MessageDescriptor,
}

struct Output(MessageDescriptor);

struct Input;

impl Codec for Dynamic {
    type Encode = DynamicMessage;
    type Decode = DynamicMessage;
    type Encoder = Input;
    type Decoder = Output;

    fn encoder(&mut self) -> Input {
        Input
    }

    fn decoder(&mut self) -> Output {
        Output(self.output.clone())
    }
}

impl Encoder for Input {
    type Item = DynamicMessage;
    type Error = Status;

    fn encode(&mut self, item: DynamicMessage, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        item.encode(into).map_err(|error| Status::internal(error.to_string()))
    }
}

impl Decoder for Output {
    type Item = DynamicMessage;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<DynamicMessage>, Status> {
        let bytes = from.copy_to_bytes(from.remaining());
        let message = DynamicMessage::decode(self.0.clone(), bytes);
        message.map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

/// The calls in the documentation, as (path, request).
fn documented() -> Vec<(String, Value)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/api.md");
    let page = std::fs::read_to_string(path).unwrap().replace("\\\n", " ");
    let commands = page.lines().filter(|line| line.starts_with("grpcurl -plaintext "));
    commands
        .filter_map(|command| {
            let path = command.split_whitespace().next_back()?;
            let request = command.split('\'').nth(1).unwrap_or("{}");
            let request = serde_json::from_str(request).expect("the request is JSON");
            path.contains('/').then(|| (path.to_owned(), request))
        })
        .collect()
}

#[tokio::test]
async fn client_without_generated_types_calls_every_service() {
    let server = TestServer::in_memory().await;
    let reflected = soon(Reflected::new(server.channel.clone())).await;
    for service in ["Produce", "Consume", "Topic", "Cluster", "Group"] {
        let service = format!("helix.log.v1.{service}Service");
        assert!(reflected.services.contains(&service), "{service}: {:?}", reflected.services);
    }
    assert!(
        !reflected.services.iter().any(|name| name.contains("raft")),
        "the protocol between nodes is not listed"
    );
    let call = async |path: &str, request: Value| {
        soon(reflected.call(&format!("helix.log.v1.{path}"), &request)).await
    };

    let health = call("ClusterService/GetHealth", json!({})).await.unwrap();
    assert_eq!(health["healthy"], true, "{health}");
    let topics = call("TopicService/ListTopics", json!({})).await.unwrap();
    assert_eq!(topics["topics"][0]["name"], "default", "{topics}");
    let append = json!({
        "topic": "default",
        "partition": 1,
        "batch": { "records": { "records": [{ "value": "aGVsbG8=" }, { "value": "" }] } },
    });
    let acked = call("ProduceService/Append", append).await.unwrap();
    assert_eq!(acked["ack"]["next_offset"], "2", "{acked}");
    let start = json!({ "topic": "default", "partition": 1, "start": { "offset": "0" } });
    let fetched = call("ConsumeService/Fetch", json!({ "partitions": [start] })).await.unwrap();
    let records = &fetched["partitions"][0]["records"];
    assert_eq!(records[0]["record"]["value"], "aGVsbG8=", "{fetched}");
    assert_eq!(records.as_array().map(Vec::len), Some(2), "{fetched}");

    let nowhere = json!({ "topic": "nowhere", "batch": { "records": { "records": [{}] } } });
    let refused = call("ProduceService/Append", nowhere).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::NotFound);
    assert_eq!(refused.metadata().get("helix-reason").unwrap(), "TOPIC_NOT_FOUND");
}

#[tokio::test]
async fn documented_calls_succeed() {
    let server = TestServer::in_memory().await;
    let reflected = soon(Reflected::new(server.channel.clone())).await;
    let calls = documented();
    for method in ["Append", "Fetch", "Subscribe", "GetHealth", "ListTopics"] {
        assert!(calls.iter().any(|(path, _)| path.ends_with(&format!("/{method}"))), "{method}");
    }
    for (path, request) in calls {
        let answer = soon(reflected.call(&path, &request)).await;
        let answer = answer.unwrap_or_else(|status| panic!("{path} {request}: {status}"));
        assert!(answer.is_object(), "{path}: {answer}");
    }
}
