//! The client handle: choice of the cluster, settings, and the handles that it makes.

use std::path::PathBuf;
use std::sync::Arc;

use helix_client::contexts::{ClusterChoice, ContextTls};
use helix_client::{
    AutoCommit, Client, Config, FetchOptions, OnRecreate, ProducerOptions, ReadOptions, ReadSource,
    ReadStart, Records, TokenSource,
};
use helix_proto::log::v1::ProducerIdentity;
use pyo3::prelude::*;

use crate::arguments::{PositionTuple, compression, durability, position, seconds, start_policy};
use crate::batch::Batch;
use crate::failure::Failed;
use crate::group::NativeGroup;
use crate::operation::{Mode, on_runtime};
use crate::process::{OwnedByProcess, runtime};
use crate::producer::NativeProducer;
use crate::stream::NativeStream;

/// A client of one cluster.
#[pyclass(module = "helix._helix", frozen)]
pub(crate) struct NativeClient {
    pub(crate) client: Arc<OwnedByProcess<Client>>,
    pub(crate) mode: Mode,
    #[pyo3(get)]
    addresses: Vec<String>,
    /// Setting that the addresses come from.
    #[pyo3(get)]
    source: String,
}

/// Settings of a client as Python has them. Times are seconds.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct ConnectSettings {
    addresses: Vec<String>,
    context: Option<String>,
    token: Option<Py<PyAny>>,
    token_file: Option<PathBuf>,
    ca_file: Option<PathBuf>,
    certificate_file: Option<PathBuf>,
    key_file: Option<PathBuf>,
    server_name: Option<String>,
    rack: Option<String>,
    request_timeout: Option<f64>,
    connect_timeout: Option<f64>,
    connections_per_node: Option<usize>,
    blocking: bool,
}

/// A partition to read: topic, partition, position, exclusive end, topic id.
type StartTuple = (String, u32, PositionTuple, Option<u64>, u64);

/// Settings of a read.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct ReadSettings {
    clamp: bool,
    any_replica: bool,
    preferred_node: Option<u64>,
    new_partitions: bool,
    skip_undecodable: bool,
    restart_recreated: bool,
}

impl From<ReadSettings> for ReadOptions {
    fn from(settings: ReadSettings) -> Self {
        Self {
            clamp: settings.clamp,
            source: if settings.any_replica { ReadSource::AnyReplica } else { ReadSource::Leader },
            preferred_node: settings.preferred_node,
            lag_max: None,
            new_partitions: settings.new_partitions,
            skip_undecodable: settings.skip_undecodable,
            on_recreate: match settings.restart_recreated {
                true => OnRecreate::Restart,
                false => OnRecreate::Fail,
            },
        }
    }
}

/// Settings of a producer.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct ProducerSettings {
    name: String,
    idempotent: bool,
    identity: Option<(u64, u32)>,
    durability: Option<String>,
    compression: String,
    fencing_token: Option<String>,
    linger: f64,
    batch_bytes: usize,
    batch_records: usize,
    buffer_bytes: usize,
    stop_at_failure: bool,
}

/// Settings of a member of a group.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct GroupSettings {
    topics: Vec<String>,
    member_id: Option<String>,
    static_name: Option<String>,
    client_name: Option<String>,
    session_timeout: f64,
    release_timeout: f64,
    start: String,
    auto_commit: Option<f64>,
    buffer_bytes: usize,
}

pub(crate) fn starts(starts: Vec<StartTuple>) -> Result<Vec<ReadStart>, Failed> {
    let start = |(topic, partition, start, until, topic_id): StartTuple| {
        let position = position(start)?;
        Ok(ReadStart { topic, partition, position, until, topic_id })
    };
    starts.into_iter().map(start).collect()
}

/// Returns a source that calls a Python function before each call.
fn supplied_token(supply: Py<PyAny>) -> TokenSource {
    TokenSource::callback(move || {
        // None while the interpreter ends: the call fails then, and nothing waits for it.
        Python::try_attach(|py| {
            let token = supply.call0(py).and_then(|token| token.extract::<Option<String>>(py));
            token.unwrap_or_else(|error| {
                error.write_unraisable(py, Some(supply.bind(py)));
                None
            })
        })?
    })
}

impl ConnectSettings {
    fn resolve(self, py: Python<'_>) -> PyResult<(Config, String)> {
        let choice = ClusterChoice {
            addr: self.addresses,
            context: self.context,
            token_file: self.token_file,
            rack: self.rack,
            tls: ContextTls {
                ca: self.ca_file,
                cert: self.certificate_file,
                key: self.key_file,
                server_name: self.server_name,
            },
        };
        let cluster = choice.resolve().map_err(Failed::from)?;
        let source = match cluster.source.as_str() {
            "--addr" => "connect()".to_owned(),
            source => source.to_owned(),
        };
        let mut config = cluster.config();
        if let Some(token) = self.token {
            config.token = match token.extract::<String>(py) {
                Ok(token) => TokenSource::fixed(&token).map_err(Failed::from)?,
                Err(_) => supplied_token(token),
            };
        }
        if let Some(timeout) = self.request_timeout {
            config.request_timeout = seconds("request_timeout", timeout)?;
        }
        if let Some(timeout) = self.connect_timeout {
            config.connect_timeout = seconds("connect_timeout", timeout)?;
        }
        if let Some(connections) = self.connections_per_node {
            config.connections_per_node = connections;
        }
        Ok((config, source))
    }
}

#[pymethods]
impl NativeClient {
    /// Creates a client that connects on first use.
    #[new]
    fn new(py: Python<'_>, settings: ConnectSettings) -> PyResult<Self> {
        let mode = if settings.blocking { Mode::Blocking } else { Mode::Async };
        let (config, source) = settings.resolve(py)?;
        let addresses = config.endpoints.clone();
        let _context = runtime()?.enter();
        let client = Client::new(config).map_err(Failed::from)?;
        Ok(Self { client: Arc::new(OwnedByProcess::new(client)), mode, addresses, source })
    }

    /// Fetches metadata, which detects wrong addresses and settings.
    fn check(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let client = self.client.get()?.clone();
        let checking = async move {
            client.admin().metadata(&[""]).await?;
            Ok(())
        };
        self.mode.run(py, on_runtime(checking))
    }

    fn partition_count(&self, py: Python<'_>, topic: String) -> PyResult<Py<PyAny>> {
        let client = self.client.get()?.clone();
        let counting = async move { Ok(client.partition_count(&topic).await?) };
        self.mode.run(py, on_runtime(counting))
    }

    fn producer(&self, topic: String, settings: ProducerSettings) -> PyResult<NativeProducer> {
        let defaults = ProducerOptions::default();
        // One half here, one half in the Rust client.
        let buffer_bytes = (settings.buffer_bytes / 2).max(1);
        let identity = settings.identity;
        let options = ProducerOptions {
            durability: durability(settings.durability.as_deref())?,
            idempotent: settings.idempotent,
            name: settings.name,
            identity: identity.map(|(producer_id, epoch)| ProducerIdentity { producer_id, epoch }),
            fencing_token: settings.fencing_token,
            compression: compression(&settings.compression)?,
            linger: seconds("linger", settings.linger)?,
            batch_bytes: settings.batch_bytes,
            batch_records: settings.batch_records.max(1),
            buffer_bytes,
            stops_at_failure: settings.stop_at_failure,
            ..defaults
        };
        let client = self.client.get()?;
        let _context = runtime()?.enter();
        Ok(NativeProducer::new(client, topic, options, self.mode))
    }

    /// Subscribes to partitions.
    fn subscribe(
        &self,
        partitions: Vec<StartTuple>,
        settings: ReadSettings,
    ) -> PyResult<NativeStream> {
        let client = self.client.get()?;
        let _context = runtime()?.enter();
        let subscription = client.consumer().subscribe(starts(partitions)?, settings.into());
        Ok(NativeStream::new(subscription, self.mode))
    }

    /// Reads what is there, or waits up to `wait` seconds for `bytes_min`. Returns a batch for each
    /// partition.
    #[pyo3(signature = (partitions, settings, *, records_max, bytes_max, bytes_min, wait))]
    fn fetch(
        &self,
        py: Python<'_>,
        partitions: Vec<StartTuple>,
        settings: ReadSettings,
        records_max: Option<u64>,
        bytes_max: Option<u64>,
        bytes_min: u32,
        wait: f64,
    ) -> PyResult<Py<PyAny>> {
        let starts = starts(partitions)?;
        let options = FetchOptions {
            records_max,
            bytes_max,
            wait_max: seconds("wait", wait)?,
            bytes_min,
            read: settings.into(),
        };
        let consumer = self.client.get()?.consumer();
        let fetching = async move { Ok(consumer.fetch(&starts, &options).await?) };
        self.mode.run_with(py, on_runtime(fetching), |py, fetched: Vec<Records>| {
            let batches = fetched.into_iter().map(|records| Batch::new(py, records));
            let batches: Vec<_> = batches.collect::<PyResult<_>>()?;
            Ok(batches.into_pyobject(py)?.into_any().unbind())
        })
    }

    /// Joins a group in the background.
    fn group(&self, group: String, settings: GroupSettings) -> PyResult<NativeGroup> {
        let mut builder = self.client.get()?.consumer_group(group).topics(settings.topics);
        if let Some(id) = settings.member_id {
            builder = builder.member_id(id);
        }
        if let Some(name) = settings.static_name {
            builder = builder.static_member(name);
        }
        if let Some(name) = settings.client_name {
            builder = builder.client_name(name);
        }
        let auto_commit = match settings.auto_commit {
            Some(interval) => AutoCommit::Every(seconds("auto_commit", interval)?),
            None => AutoCommit::Off,
        };
        let builder = builder
            .session_timeout(seconds("session_timeout", settings.session_timeout)?)
            .release_timeout(seconds("release_timeout", settings.release_timeout)?)
            .start(start_policy(&settings.start)?)
            .auto_commit(auto_commit)
            .buffer_bytes(settings.buffer_bytes);
        let _context = runtime()?.enter();
        let is_auto_commit = settings.auto_commit.is_some();
        Ok(NativeGroup::new(builder.join(), is_auto_commit, self.mode))
    }
}
