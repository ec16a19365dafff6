//! Target `calls`: calls to a node in this process, on a simulated disk and clock. Every call ends,
//! at most with a caller's error; acknowledged records survive; other callers are served.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use helix_proto::batch;
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::{
    AppendRequest, AppendResponse, Batch, FetchRequest, FetchResponse, PartitionStart, Record,
    StartPosition, start_position::Position,
};
use helix_server::access::AuthMode;
use helix_server::call::ClientLoad;
use helix_server::clock::TokioClock;
use helix_server::log::PartitionSettings;
use helix_server::memory::MemoryShares;
use helix_server::node::{LogLimits, Node, NodeSettings, NodeStorage};
use helix_server::raft::seed_this_thread;
use helix_server::transport::Services;
use helix_wal::storage::{Crash, SimulatedDisk, Storage};
use http_body_util::{BodyExt, Full};
use prost::Message;
use tonic::Code;
use tonic::codegen::http::{HeaderMap, Request};
use tonic::service::Routes;
use tower::ServiceExt;

use crate::input::Input;
use crate::message::{ApiSchema, records};

/// Topic that no generated request names.
const KEPT: &str = "kept";
/// Timeout of a call. Endless streams are dropped then.
const CALL_TIMEOUT: Duration = Duration::from_secs(90);

/// Largest trailers of a failed call. gRPC libraries replace the status of a call whose trailers
/// are too large for them, mostly from 8 KiB on.
const TRAILER_BYTES_MAX: usize = 4_000;

thread_local! {
    static SCHEMA: OnceCell<ApiSchema> = const { OnceCell::new() };
}

#[derive(Clone, Default)]
pub(crate) struct FuzzDisks(Arc<Mutex<BTreeMap<u64, SimulatedDisk>>>);

impl FuzzDisks {
    fn open(&self, shard: u64) -> Arc<dyn Storage> {
        let mut disks = self.0.lock().unwrap();
        Arc::new(disks.entry(shard).or_insert_with(|| SimulatedDisk::new(shard)).reopen())
    }

    fn crash(&self) {
        for disk in self.0.lock().unwrap().values() {
            disk.crash(Crash::LoseAll);
        }
    }
}

fn settings(disks: &FuzzDisks) -> NodeSettings {
    let disks = disks.clone();
    let open = move |shard| disks.open(shard);
    NodeSettings {
        replace_down_after: None,
        node_id: 1,
        storage: NodeStorage::Simulated(Arc::new(open)),
        cluster_name: None,
        shard_count: 1,
        topics: vec![("default".to_owned(), 2), (KEPT.to_owned(), 1)],
        topic_settings: PartitionSettings {
            default_durability: 1,
            min_durability: 1,
            max_batch_bytes: 1 << 16,
            max_record_bytes: 1 << 15,
            ..PartitionSettings::default()
        },
        segment_bytes: 64 << 10,
        preparation: helix_wal::Preparation::Auto,
        tail_bytes: 16 << 10,
        footer_bytes: 1 << 20,
        shares: MemoryShares::default(),
        log_limits: LogLimits::default(),
        rack: String::new(),
        scrub_rate: 0,
        copy_rate_max: helix_server::limits::COPY_RATE_MAX,
        busy_poll: false,
        pace: helix_server::limits::PACE,
        election_timeout: helix_server::limits::ELECTION_TIMEOUT,
        files: helix_wal::FileCache::default(),
        clock: TokioClock::new(1_700_000_000_000_000),
        auth: AuthMode::Off,
        jwt: None,
        seed: Some(1),
    }
}

pub(crate) fn calls(input: &[u8]) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    seed_this_thread(1);
    SCHEMA.with(|schema| {
        let schema = schema.get_or_init(ApiSchema::from_descriptors);
        runtime.unwrap().block_on(run(schema, Input(input)));
    });
}

async fn run(schema: &ApiSchema, mut input: Input<'_>) {
    let disks = FuzzDisks::default();
    let mut kept: BTreeMap<u64, Vec<Record>> = BTreeMap::new();
    let mut server = FuzzServer::open(&disks).await;
    while !input.is_empty() {
        match input.below(16) {
            0..3 => server.append(&mut kept, records(&mut input)).await,
            3 if input.one_in(4) => {
                disks.crash();
                server.node.close().await;
                server = FuzzServer::open(&disks).await;
            }
            _ => server.call(schema, &mut input).await,
        }
    }
    // Other callers are served and find all acknowledged records.
    let last = Record { value: Some(Bytes::from_static(b"last")), ..Record::default() };
    server.append(&mut kept, vec![last]).await;
    server.check(&kept).await;
    server.node.close().await;
}

pub(crate) struct FuzzServer {
    pub(crate) node: Arc<Node>,
    services: Services,
}

impl FuzzServer {
    pub(crate) async fn open(disks: &FuzzDisks) -> Self {
        let node = Node::open(settings(disks)).await.expect("the node opens");
        node.announce("127.0.0.1:1".to_owned()).await.expect("the node announces its address");
        let load = ClientLoad::new(*node.shares());
        let services = Services::new(&node, &load, Routes::default()).prepare();
        Self { node, services }
    }

    /// Sends a random call.
    async fn call(&self, schema: &ApiSchema, input: &mut Input<'_>) {
        let method = &schema.methods[input.below(schema.methods.len())];
        let count = if method.takes_many { input.below(5) } else { 1 };
        let mut messages: Vec<Vec<u8>> =
            (0..count).map(|_| schema.request(method, input)).collect();
        let is_garbled = input.one_in(8);
        if let Some(message) = messages.last_mut().filter(|it| is_garbled && !it.is_empty()) {
            let at = input.below(message.len());
            message[at] = input.u8();
        }
        let names_kept = |message: &Vec<u8>| message.windows(KEPT.len()).any(|it| it == b"kept");
        if messages.iter().any(names_kept) {
            return;
        }
        let (code, text, _) = self.send(&method.path, &messages).await;
        let path = &method.path;
        match code {
            Code::Unknown | Code::DataLoss => panic!("{path}: {code:?}, {text}"),
            Code::Internal if !is_garbled && !text.contains("decode") => {
                panic!("{path}: {code:?}, {text}")
            }
            _ => {}
        }
    }

    /// Sends a call. Returns the status code, its text and the first response.
    pub(crate) async fn send(
        &self,
        path: &str,
        messages: &[Vec<u8>],
    ) -> (Code, String, Option<Bytes>) {
        let mut body = BytesMut::new();
        for message in messages {
            body.put_u8(0);
            body.put_u32(message.len() as u32);
            body.put_slice(message);
        }
        let request = Request::post(path)
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(tonic::body::Body::new(Full::new(body.freeze())))
            .unwrap();
        let result =
            tokio::time::timeout(CALL_TIMEOUT, self.services.clone().oneshot(request)).await;
        let Ok(Ok(response)) = result else { panic!("{path} has no response") };
        let (parts, mut body) = response.into_parts();
        let mut ended = code(&parts.headers);
        let mut bytes = BytesMut::new();
        let streams = async {
            while let Some(Ok(frame)) = body.frame().await {
                match frame.into_data() {
                    Ok(data) => bytes.extend_from_slice(&data),
                    Err(frame) => ended = ended.take().or(frame.trailers_ref().and_then(code)),
                }
            }
        };
        let is_over = tokio::time::timeout(CALL_TIMEOUT, streams).await.is_ok();
        let endless = path.contains("Subscribe") || path.contains("Watch");
        assert!(is_over || endless, "{path} does not end");
        let first = (bytes.len() > 5).then(|| {
            let length = u32::from_be_bytes(bytes[1..5].try_into().unwrap()) as usize;
            bytes.freeze().slice(5..5 + length)
        });
        let (code, text) = ended.unwrap_or((Code::Ok, String::new()));
        (code, text, first)
    }

    async fn append(&self, kept: &mut BTreeMap<u64, Vec<Record>>, records: Vec<Record>) {
        let form = Some(Form::Encoded(batch::encode(&records)));
        let batch = Some(Batch { form });
        let request = AppendRequest { topic: KEPT.to_owned(), batch, ..AppendRequest::default() };
        let path = "/helix.log.v1.ProduceService/Append";
        let (code, text, response) = self.send(path, &[request.encode_to_vec()]).await;
        assert_eq!(code, Code::Ok, "an append by another caller: {text}");
        let ack = AppendResponse::decode(response.unwrap()).unwrap().ack.unwrap();
        let next = kept.last_key_value().map_or(0, |(first, old)| first + old.len() as u64);
        assert_eq!(ack.first_offset, Some(next), "offsets are dense");
        kept.insert(next, records);
    }

    /// Checks that the topic has exactly the acknowledged records.
    async fn check(&self, kept: &BTreeMap<u64, Vec<Record>>) {
        let mut wanted = kept.values().flatten();
        let mut offset = 0;
        let end = kept.values().map(|records| records.len() as u64).sum();
        while offset < end {
            let start = Some(StartPosition {
                position: Some(Position::Offset(offset)),
                ..StartPosition::default()
            });
            let partition =
                PartitionStart { topic: KEPT.to_owned(), start, ..PartitionStart::default() };
            let request = FetchRequest { partitions: vec![partition], ..FetchRequest::default() };
            let path = "/helix.log.v1.ConsumeService/Fetch";
            let (code, text, response) = self.send(path, &[request.encode_to_vec()]).await;
            assert_eq!(code, Code::Ok, "a fetch by another caller: {text}");
            let response = FetchResponse::decode(response.unwrap()).unwrap();
            let stored = &response.partitions[0].records;
            assert!(!stored.is_empty(), "no record at {offset} of {end}");
            for stored in stored {
                assert_eq!(stored.offset, offset);
                assert_eq!(stored.record.as_ref(), wanted.next(), "different record at {offset}");
                offset += 1;
            }
        }
    }
}

fn code(headers: &HeaderMap) -> Option<(Code, String)> {
    let code = headers.get("grpc-status")?;
    let bytes: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    assert!(bytes <= TRAILER_BYTES_MAX, "{bytes} bytes of trailers: {headers:?}");
    let text = headers.get("grpc-message").map(|text| text.to_str().unwrap_or_default());
    Some((Code::from_bytes(code.as_bytes()), text.unwrap_or_default().to_owned()))
}
