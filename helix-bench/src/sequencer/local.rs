//! Latency without TCP: over a Unix domain socket, and of a node in this process.

use std::path::{Path, PathBuf};

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

use super::node::{DELIVERY_TIMEOUT, LatencyOutcome, both_phases};
use super::order::{OrderFindings, StreamOrder};
use crate::budget::SendBudget;
use crate::load::BenchLoad;
use crate::meter::{LatencyHistogram, LoadMeter};
use crate::stamp::Stamper;
use crate::write::{self, stamped};

/// Names of the latency rows.
const TCP: &str = "gRPC over TCP";
const SOCKET: &str = "gRPC over a Unix socket";
const MEMORY: &str = "embedded, memory";
const DURABLE: &str = "embedded, durable";

/// Bytes that the stream of an embedded node keeps.
const RETENTION_BYTES: u64 = 64 << 20;

/// Flags of the latency rows without TCP.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct LocalRowArgs {
    /// Add a latency row over the Unix domain socket of a node
    #[arg(long, value_name = "unix:PATH", value_parser = socket, conflicts_with = "check")]
    socket: Option<String>,
    /// Add a latency row of a node in this process, in memory
    #[arg(long, conflicts_with = "check")]
    embedded: bool,
    /// Add a latency row of a node in this process, on disk in a new directory below this one
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

    /// Measures the rows of nodes in this process.
    ///
    /// # Errors
    /// A node could not be opened, or a message could not be appended or read.
    pub(super) async fn run_embedded(
        &self,
        load: &BenchLoad,
    ) -> Result<Vec<(&'static str, LatencyOutcome)>> {
        let mut outcomes = Vec::new();
        if self.embedded {
            outcomes.push((MEMORY, on_task(load, ServerConfig::in_memory()).await?));
        }
        if let Some(directory) = &self.embedded_dir {
            let data = data_dir(directory)?;
            outcomes.push((DURABLE, on_task(load, ServerConfig::in_dir(data.path())).await?));
        }
        Ok(outcomes)
    }
}

/// Creates a directory that is removed at the end.
fn data_dir(parent: &Path) -> Result<tempfile::TempDir> {
    tempfile::Builder::new()
        .prefix("helix-bench-")
        .tempdir_in(parent)
        .with_context(|| format!("create a data directory in {}", parent.display()))
}

/// Measures on a task, so that the caller and the node share the runtime's threads.
async fn on_task(load: &BenchLoad, config: ServerConfig) -> Result<LatencyOutcome> {
    tokio::spawn(latency(load.clone(), config)).await.context("the run has failed")?
}

/// Publishes one message at a time, each after it was seen in the stream.
async fn latency(load: BenchLoad, config: ServerConfig) -> Result<LatencyOutcome> {
    let config = ServerConfig { default_retention_bytes: RETENTION_BYTES, ..config };
    let log = Embedded::open(config).await.context("open a node in this process")?;
    let result = measure(&load, &log).await;
    log.close().await;
    result
}

async fn measure(load: &BenchLoad, log: &Embedded) -> Result<LatencyOutcome> {
    log.create_topic(&load.topic, 1).await.context("create the stream")?;
    let durability = match log.node().info().storage {
        StorageKind::Durable => Durability::QuorumSynced,
        StorageKind::Memory => Durability::QuorumWritten,
    };
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
