//! Rows without TCP: over a Unix domain socket, and of a node in this process.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Args;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use helix_proto::log::v1::{Durability, StoredBatch};
use helix_server::config::ServerConfig;
use helix_server::embedded::{Embedded, EmbeddedBatch};
use helix_server::error::Error;
use helix_server::node::StorageKind;
use tokio::time::{Instant, timeout};

use super::embedded;
use super::node::{DELIVERY_TIMEOUT, LatencyOutcome, ThroughputOutcome, both_phases};
use super::order::{OrderFindings, StreamOrder};
use crate::budget::SendBudget;
use crate::format::bytes_text;
use crate::load::BenchLoad;
use crate::meter::{LatencyHistogram, LoadMeter};
use crate::progress;
use crate::stamp::Stamper;
use crate::write::{self, stamped};

/// Names of the rows.
const TCP: &str = "gRPC over TCP";
const SOCKET: &str = "gRPC over a Unix socket";
const MEMORY: &str = "embedded, memory";
const DURABLE: &str = "embedded, durable";

/// Bytes that the stream of an embedded node keeps.
const RETENTION_BYTES: u64 = 64 << 20;

/// Flags of the rows without TCP.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct LocalRowArgs {
    /// Add a latency row over the Unix domain socket of a node
    #[arg(long, value_name = "unix:PATH", value_parser = socket, conflicts_with = "check")]
    socket: Option<String>,
    /// Add rows of a node in this process, in memory: latency, and throughput of batches
    #[arg(long, conflicts_with = "check")]
    embedded: bool,
    /// Add rows of a node in this process, on disk in a new directory below this one
    #[arg(long, value_name = "DIR", conflicts_with = "check")]
    embedded_dir: Option<PathBuf>,
}

fn socket(text: &str) -> Result<String, String> {
    helix_proto::address::parse_unix(text).map(|path| format!("unix:{path}"))
}

impl LocalRowArgs {
    /// Returns the rows of a cluster, with their loads: over TCP, and over the socket.
    pub(super) fn cluster_rows(&self, load: &BenchLoad) -> Vec<(&'static str, BenchLoad)> {
        let over_socket = |socket: &String| {
            let mut load = load.clone();
            load.cluster.addr = vec![socket.clone()];
            (SOCKET, load)
        };
        [(TCP, load.clone())].into_iter().chain(self.socket.as_ref().map(over_socket)).collect()
    }

    /// Returns the nodes in this process, each with an empty log.
    fn nodes(&self) -> Result<Vec<LocalNode>> {
        let mut nodes = Vec::new();
        if self.embedded {
            let config = ServerConfig::in_memory();
            nodes.push(LocalNode { name: MEMORY, config, _data: None });
        }
        if let Some(directory) = &self.embedded_dir {
            let data = data_dir(directory)?;
            let config = ServerConfig::in_dir(data.path());
            nodes.push(LocalNode { name: DURABLE, config, _data: Some(data) });
        }
        Ok(nodes)
    }

    /// Measures the latency of nodes in this process.
    ///
    /// # Errors
    /// A node could not be opened, or a message could not be appended or read.
    pub(super) async fn run_embedded(
        &self,
        load: &BenchLoad,
    ) -> Result<Vec<(&'static str, LatencyOutcome)>> {
        let mut outcomes = Vec::new();
        for node in self.nodes()? {
            let latency = latency(load.clone(), node.config);
            outcomes.push((node.name, on_task(latency).await?));
        }
        Ok(outcomes)
    }

    /// Measures the throughput of nodes in this process, as a closed loop.
    ///
    /// # Errors
    /// A node could not be opened, or a message could not be appended or read.
    pub(super) async fn run_embedded_throughput(
        &self,
        load: &BenchLoad,
    ) -> Result<Vec<(&'static str, ThroughputOutcome)>> {
        let mut outcomes = Vec::new();
        for node in self.nodes()? {
            progress::step(&format!("throughput of {}, {}", bytes_text(load.size), node.name));
            let throughput = throughput(load.clone(), node.config);
            outcomes.push((node.name, on_task(throughput).await?));
        }
        Ok(outcomes)
    }
}

/// A node in this process.
struct LocalNode {
    name: &'static str,
    config: ServerConfig,
    /// Data directory, which is removed with this value.
    _data: Option<tempfile::TempDir>,
}

/// Creates a directory that is removed at the end.
fn data_dir(parent: &Path) -> Result<tempfile::TempDir> {
    tempfile::Builder::new()
        .prefix("helix-bench-")
        .tempdir_in(parent)
        .with_context(|| format!("create a data directory in {}", parent.display()))
}

/// Measures on a task, so that the caller and the node share the runtime's threads.
async fn on_task<T: Send + 'static>(
    run: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    tokio::spawn(run).await.context("the run has failed")?
}

/// Opens a node with an empty log.
async fn open(config: ServerConfig) -> Result<Embedded> {
    let config = ServerConfig { default_retention_bytes: RETENTION_BYTES, ..config };
    Embedded::open(config).await.context("open a node in this process")
}

/// Returns the durability of the node's acks.
fn durability(log: &Embedded) -> Durability {
    match log.node().info().storage {
        StorageKind::Durable => Durability::QuorumSynced,
        StorageKind::Memory => Durability::QuorumWritten,
    }
}

/// Publishes from several tasks, each of which also reads the stream.
async fn throughput(load: BenchLoad, config: ServerConfig) -> Result<ThroughputOutcome> {
    let log = Arc::new(open(config).await?);
    let result = embedded::throughput(&load, &log, durability(&log)).await;
    log.close().await;
    result
}

/// Publishes one message at a time, each after it was seen in the stream.
async fn latency(load: BenchLoad, config: ServerConfig) -> Result<LatencyOutcome> {
    let log = open(config).await?;
    let result = measure(&load, &log).await;
    log.close().await;
    result
}

async fn measure(load: &BenchLoad, log: &Embedded) -> Result<LatencyOutcome> {
    log.create_topic(&load.topic, 1).await.context("create the stream")?;
    let durability = durability(log);
    let run = write::run_id(load, std::iter::once(0));
    let stamper = Stamper::new(load.seed, run, 0, load.size);
    let mut order = StreamOrder::from_start(run, 0);
    let mut batches = log.subscribe(&load.topic, 0, 0).await.context("subscribe")?;
    let mut outcome = LatencyOutcome {
        seen: LatencyHistogram::new(),
        meter: LoadMeter::new(),
        findings: OrderFindings::default(),
    };
    let measured_from = Instant::now() + load.warmup.duration.unwrap_or_default();
    let budget = SendBudget::closed_loop(both_phases(load));
    let mut sequence = 0;
    while budget.take(1).await.is_some() {
        let batch = stamped(&stamper, sequence, 1, 0);
        let bytes = batch.payload.len() as u64;
        let sent = Instant::now();
        let published = async {
            log.append(&load.topic, 0, batch).await?;
            Ok::<_, Error>(Instant::now())
        };
        let seen = timeout(DELIVERY_TIMEOUT, see(&mut batches, &mut order, sequence));
        let (acked, seen) = tokio::join!(published, seen);
        let acked = acked.context("append a message")?;
        let Ok(seen) = seen else {
            outcome.findings.lost += 1;
            break;
        };
        let seen = seen.context("read the stream")?;
        if sent >= measured_from {
            outcome.meter.succeed(acked - sent, 1, bytes);
            outcome.meter.ack(durability, false);
            outcome.seen.record(seen - sent);
        }
        sequence += 1;
    }
    outcome.findings.add(order.findings());
    Ok(outcome)
}

/// Waits until the message with this sequence is seen.
async fn see(
    batches: &mut BoxStream<'static, Result<EmbeddedBatch, Error>>,
    order: &mut StreamOrder,
    sequence: u64,
) -> Result<Instant, Error> {
    loop {
        let Some(found) = batches.next().await else { return Err(Error::Draining) };
        let EmbeddedBatch { first_offset, batch, .. } = found?;
        let now = Instant::now();
        let batch = Some(batch);
        let stored = StoredBatch { first_offset, batch, ..StoredBatch::default() };
        let noted = order.note(&stored);
        if noted.is_some_and(|(stamp, records)| stamp.sequence + records > sequence) {
            return Ok(now);
        }
    }
}
