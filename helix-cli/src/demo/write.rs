//! The writers of the demo: one pipelined, idempotent session for each partition.
//! They know nothing of the node's death; getting through it is the client's business.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, bail};
use helix_client::proto::batch;
use helix_client::proto::log::v1::{Durability, EncodedBatch, Record};
use helix_client::{Acked, Client, SessionOptions};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::TOPIC;
use super::verify::AckedBatch;
use super::workload::Workload;

/// Payload of a batch, about.
const BATCH_BYTES: usize = 128 << 10;

/// Batches of a session that are sent and not acked.
const BATCHES_IN_FLIGHT: usize = 16;

/// How far the writers are, for whoever watches.
#[derive(Debug, Clone)]
pub(crate) struct Progress {
    sent: Arc<AtomicU64>,
    acked: Arc<watch::Sender<u64>>,
}

impl Progress {
    pub(crate) fn new() -> Self {
        Self { sent: Arc::default(), acked: Arc::new(watch::Sender::new(0)) }
    }

    /// Records that have their ack.
    pub(crate) fn acked(&self) -> u64 {
        *self.acked.borrow()
    }

    /// Records that were handed over and have no ack yet.
    pub(crate) fn in_flight(&self) -> u64 {
        self.sent.load(Ordering::Relaxed).saturating_sub(self.acked())
    }

    /// Waits until at least so many records have their ack.
    pub(crate) fn reaches(&self, records: u64) -> impl Future<Output = ()> + use<> {
        let mut acked = self.acked.subscribe();
        async move {
            // The sender lives as long as the watched writers.
            let _ = acked.wait_for(|acked| *acked >= records).await;
        }
    }
}

/// What one partition's writer has done.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) partition: u32,
    pub(crate) acked: Vec<AckedBatch>,
    /// The weakest durability that an ack told.
    pub(crate) durability: Durability,
}

/// All writers.
#[derive(Debug)]
pub(crate) struct Writers {
    tasks: JoinSet<anyhow::Result<Written>>,
    written: Vec<Written>,
}

impl Writers {
    pub(crate) fn start(client: &Client, workload: Workload, progress: &Progress) -> Self {
        let mut tasks = JoinSet::new();
        for partition in 0..workload.partitions {
            let (client, progress) = (client.clone(), progress.clone());
            tasks.spawn(async move {
                write(&client, workload, partition, &progress)
                    .await
                    .with_context(|| format!("write to partition {partition}"))
            });
        }
        Self { tasks, written: Vec::new() }
    }

    /// Waits for an event.
    ///
    /// # Errors
    /// A writer failed meanwhile.
    pub(crate) async fn during<T>(&mut self, event: impl Future<Output = T>) -> anyhow::Result<T> {
        tokio::pin!(event);
        loop {
            tokio::select! {
                happened = &mut event => return Ok(happened),
                Some(written) = self.tasks.join_next() => self.written.push(written??),
            }
        }
    }

    /// Waits until everything is acked.
    ///
    /// # Errors
    /// A writer failed.
    pub(crate) async fn finish(mut self) -> anyhow::Result<Vec<Written>> {
        while let Some(written) = self.tasks.join_next().await {
            self.written.push(written??);
        }
        Ok(self.written)
    }
}

/// A batch that was handed over.
struct Sent {
    first_sequence: u64,
    record_count: u64,
    ack: Acked,
}

async fn write(
    client: &Client,
    workload: Workload,
    partition: u32,
    progress: &Progress,
) -> anyhow::Result<Written> {
    let options =
        SessionOptions { in_flight_batches: BATCHES_IN_FLIGHT, ..SessionOptions::default() };
    let session = client.session(TOPIC, partition, options).await?;
    let (handed_over, sent) = mpsc::channel(BATCHES_IN_FLIGHT);
    let hand_over = async {
        let records = workload.records_of(partition);
        let batch_records = (BATCH_BYTES / workload.record_bytes).max(1) as u64;
        let mut first_sequence = 0;
        while first_sequence < records {
            let record_count = batch_records.min(records - first_sequence);
            let batch = encode(&workload, partition, first_sequence, record_count);
            let ack = session.append(batch).await?;
            progress.sent.fetch_add(record_count, Ordering::Relaxed);
            let sent = Sent { first_sequence, record_count, ack };
            if handed_over.send(sent).await.is_err() {
                // The other side has failed and says why.
                return Ok(());
            }
            first_sequence += record_count;
        }
        drop(handed_over);
        session.close().await.map_err(anyhow::Error::from)
    };
    let ((), written) = tokio::try_join!(hand_over, collect(partition, sent, progress))?;
    Ok(written)
}

/// Takes the acks, in order.
async fn collect(
    partition: u32,
    mut sent: mpsc::Receiver<Sent>,
    progress: &Progress,
) -> anyhow::Result<Written> {
    let mut acked = Vec::new();
    let mut durability = Durability::Unspecified;
    while let Some(Sent { first_sequence, record_count, ack }) = sent.recv().await {
        let ack = ack.await?;
        let (Some(first_offset), Some(next_offset)) = (ack.first_offset, ack.next_offset) else {
            bail!("an ack without offsets");
        };
        if next_offset - first_offset != record_count {
            bail!("an ack of {first_offset}..{next_offset} for {record_count} records");
        }
        acked.push(AckedBatch { first_sequence, record_count, first_offset });
        // The enum counts from the strongest.
        if i32::from(ack.durability) > i32::from(durability) {
            durability = ack.durability;
        }
        progress.acked.send_modify(|acked| *acked += record_count);
    }
    Ok(Written { partition, acked, durability })
}

fn encode(workload: &Workload, partition: u32, first: u64, count: u64) -> EncodedBatch {
    let record = |sequence| Record {
        value: Some(workload.value(partition, sequence).into()),
        ..Record::default()
    };
    let records: Vec<_> = (first..first + count).map(record).collect();
    batch::encode(&records)
}
