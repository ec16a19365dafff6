//! A server inside the test's own process, and raw clients of its API.
//! Nothing here retries or hides errors: tests see what a client in any language sees.

use std::io::Write;
use std::time::Duration;

use bytes::Bytes;
use helix_proto::batch;
use helix_proto::error::from_status;
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::cluster_service_client::ClusterServiceClient;
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::topic_service_client::TopicServiceClient;
use helix_proto::log::v1::{
    AppendRequest, AppendResponse, Batch, EncodedBatch, ErrorDetail, ErrorReason, FetchRequest,
    NamedPosition, PartitionRecords, PartitionStart, Record, StartPosition, StoredRecord,
};
use helix_proto::plain::PlainRecords;
use helix_server::config::ServerConfig;
use helix_server::server::{RunningServer, Server};
use tempfile::TempDir;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

/// Deadline of a wait in a test.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct TestServer {
    pub(crate) running: RunningServer,
    pub(crate) channel: Channel,
    directory: Option<TempDir>,
}

impl TestServer {
    pub(crate) async fn in_memory() -> Self {
        Self::start(ServerConfig::in_memory(), None).await
    }

    pub(crate) async fn durable() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self::start(ServerConfig::in_dir(directory.path()), Some(directory)).await
    }

    pub(crate) async fn start(config: ServerConfig, directory: Option<TempDir>) -> Self {
        let running = Server::start(config).await.unwrap();
        let channel = connect(&running).await;
        Self { running, channel, directory }
    }

    /// Stops the server and starts it again on the same directory.
    pub(crate) async fn restart(self) -> Self {
        let directory = self.directory.expect("memory does not outlive its server");
        drop(self.channel);
        self.running.shutdown().await;
        Self::start(ServerConfig::in_dir(directory.path()), Some(directory)).await
    }

    pub(crate) fn produce(&self) -> ProduceServiceClient<Channel> {
        ProduceServiceClient::new(self.channel.clone())
    }

    pub(crate) fn consume(&self) -> ConsumeServiceClient<Channel> {
        ConsumeServiceClient::new(self.channel.clone()).max_decoding_message_size(64 << 20)
    }

    pub(crate) fn topics(&self) -> TopicServiceClient<Channel> {
        TopicServiceClient::new(self.channel.clone())
    }

    pub(crate) fn cluster(&self) -> ClusterServiceClient<Channel> {
        ClusterServiceClient::new(self.channel.clone())
    }

    /// Appends to partition 0 of the default topic.
    pub(crate) async fn append(&self, values: &[&str]) -> AppendResponse {
        self.append_to(0, values).await
    }

    pub(crate) async fn append_to(&self, partition: u32, values: &[&str]) -> AppendResponse {
        let request = AppendRequest { partition, ..append_request(values) };
        self.produce().append(request).await.unwrap().into_inner()
    }

    /// Everything in a partition from an offset on, as plain records.
    pub(crate) async fn records(&self, partition: u32, offset: u64) -> Vec<StoredRecord> {
        let start = from_offset(partition, offset);
        let request = FetchRequest { partitions: vec![start], ..FetchRequest::default() };
        self.fetch_one(request).await.records
    }

    pub(crate) async fn fetch_one(&self, request: FetchRequest) -> PartitionRecords {
        let response = self.consume().fetch(request).await.unwrap().into_inner();
        let [partition] = response.partitions.try_into().expect("one partition was asked for");
        partition
    }
}

pub(crate) async fn connect(running: &RunningServer) -> Channel {
    let address = format!("http://{}", running.local_addr());
    Endpoint::from_shared(address).unwrap().connect().await.unwrap()
}

/// Runs a check against a server in memory and against one with a disk.
pub(crate) async fn on_both(check: impl AsyncFn(TestServer)) {
    check(TestServer::in_memory().await).await;
    check(TestServer::durable().await).await;
}

/// Reports a skipped part. Writes directly to stderr, because passing tests capture macros' output.
pub(crate) fn skipped(what: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {what}");
}

/// Awaits a future and panics after [`PATIENCE`].
pub(crate) async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("it should not take that long")
}

pub(crate) fn record(value: &str) -> Record {
    Record { value: Some(Bytes::copy_from_slice(value.as_bytes())), ..Record::default() }
}

pub(crate) fn records(values: &[&str]) -> Vec<Record> {
    values.iter().map(|value| record(value)).collect()
}

pub(crate) fn plain(values: &[&str]) -> Option<Batch> {
    let plain = PlainRecords::from(&records(values)[..]);
    Some(Batch { form: Some(Form::Records(plain)) })
}

pub(crate) fn encoded(values: &[&str]) -> Option<Batch> {
    as_batch(batch::encode(&records(values)))
}

pub(crate) fn as_batch(encoded: EncodedBatch) -> Option<Batch> {
    Some(Batch { form: Some(Form::Encoded(encoded)) })
}

pub(crate) fn append_request(values: &[&str]) -> AppendRequest {
    AppendRequest {
        topic: "default".to_owned(),
        batch: encoded(values),
        ..AppendRequest::default()
    }
}

pub(crate) fn start(partition: u32, position: Position) -> PartitionStart {
    PartitionStart {
        topic: "default".to_owned(),
        partition,
        start: Some(StartPosition { position: Some(position), ..StartPosition::default() }),
        until_offset: None,
        topic_id: 0,
    }
}

pub(crate) fn from_offset(partition: u32, offset: u64) -> PartitionStart {
    start(partition, Position::Offset(offset))
}

pub(crate) fn earliest(partition: u32) -> PartitionStart {
    start(partition, Position::Named(NamedPosition::Earliest.into()))
}

pub(crate) fn latest(partition: u32) -> PartitionStart {
    start(partition, Position::Named(NamedPosition::Latest.into()))
}

/// Returns the typed detail that every error of the service carries.
pub(crate) fn detail(status: &Status) -> ErrorDetail {
    let received = from_status(status);
    received.unwrap_or_else(|| panic!("not one of the service's errors: {status:?}")).detail
}

pub(crate) fn reason(status: &Status) -> ErrorReason {
    detail(status).reason()
}

pub(crate) fn values(records: &[StoredRecord]) -> Vec<String> {
    let value = |stored: &StoredRecord| {
        let value = stored.record.as_ref().unwrap().value.as_ref().unwrap();
        String::from_utf8(value.to_vec()).unwrap()
    };
    records.iter().map(value).collect()
}
