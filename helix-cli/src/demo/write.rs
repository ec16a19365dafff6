//! The writers of the demo: one pipelined, idempotent session for each partition.
//! They do not handle the kill; the client retries.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, bail};
use helix_client::proto::batch;
use helix_client::proto::log::v1::{Durability, EncodedBatch, Record};
use helix_client::{AckFuture, Client, SessionOptions};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::verify::AckedBatch;
use super::workload::{DemoWorkload, TOPIC};

/// Approximate maximum payload of a batch.
const BATCH_BYTES_MAX: usize = 128 << 10;

/// Approximate minimum number of batches of a partition: several times the batches in flight, so
/// that writes remain after the kill.
const BATCHES_MIN: u64 = 4 * BATCHES_IN_FLIGHT as u64;

/// Maximum number of unacked batches of a session.
const BATCHES_IN_FLIGHT: usize = 16;

/// Shared progress counters of the writers.
#[derive(Debug, Clone)]
pub(crate) struct WriteProgress(Arc<ProgressCounters>);

#[derive(Debug)]
struct ProgressCounters {
    sent: AtomicU64,
    acked: watch::Sender<u64>,
    /// Set after the kill: the killed node cannot have acked batches sent later.
    is_after_kill: AtomicBool,
    resumed: watch::Sender<BTreeMap<u32, Resumption>>,
}

/// The first progress of a partition after the kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resumption {
    /// Time of the first ack of a batch sent after the kill.
    At(Instant),
    /// All batches were sent before the kill.
    NothingLeft,
}

impl WriteProgress {
    pub(crate) fn new() -> Self {
        Self(Arc::new(ProgressCounters {
            sent: AtomicU64::new(0),
            acked: watch::Sender::new(0),
            is_after_kill: AtomicBool::new(false),
            resumed: watch::Sender::default(),
        }))
    }

    /// Returns the number of acked records.
    pub(crate) fn acked(&self) -> u64 {
        *self.0.acked.borrow()
    }

    /// Returns the number of records sent but not acked.
    pub(crate) fn in_flight(&self) -> u64 {
        self.0.sent.load(Ordering::Relaxed).saturating_sub(self.acked())
    }

    /// Waits until at least this many records are acked.
    pub(crate) fn reaches(&self, records: u64) -> impl Future<Output = ()> + use<> {
        let mut acked = self.0.acked.subscribe();
        async move {
            // The sender lives as long as the watched writers.
            let _ = acked.wait_for(|acked| *acked >= records).await;
        }
    }

    /// Marks the time of the kill.
    pub(crate) fn note_kill(&self) {
        self.0.is_after_kill.store(true, Ordering::Relaxed);
    }

    /// Waits until all given partitions have progressed after the kill. Returns the sorted times of
    /// those that had batches left.
    pub(crate) fn resume(&self, partitions: &[u32]) -> impl Future<Output = Vec<Instant>> + use<> {
        let mut resumed = self.0.resumed.subscribe();
        let partitions = partitions.to_owned();
        async move {
            let all = |resumed: &BTreeMap<u32, Resumption>| {
                partitions.iter().all(|partition| resumed.contains_key(partition))
            };
            // The sender lives as long as the watched writers.
            let Ok(resumed) = resumed.wait_for(all).await else { return Vec::new() };
            let time = |partition| match resumed.get(partition) {
                Some(Resumption::At(time)) => Some(*time),
                Some(Resumption::NothingLeft) | None => None,
            };
            let mut times: Vec<_> = partitions.iter().filter_map(time).collect();
            times.sort_unstable();
            times
        }
    }

    fn note_resumed(&self, partition: u32, resumption: Resumption) {
        self.0.resumed.send_if_modified(|resumed| {
            let is_first = !resumed.contains_key(&partition);
            resumed.entry(partition).or_insert(resumption);
            is_first
        });
    }
}

/// Result of the writer of a partition.
#[derive(Debug)]
pub(crate) struct WrittenPartition {
    pub(crate) partition: u32,
    pub(crate) acked: Vec<AckedBatch>,
    /// Weakest durability of all acks.
    pub(crate) durability: Durability,
}

/// The writers of all partitions.
#[derive(Debug)]
pub(crate) struct WriterTasks {
    tasks: JoinSet<anyhow::Result<WrittenPartition>>,
    written: Vec<WrittenPartition>,
}

impl WriterTasks {
    pub(crate) fn start(client: &Client, workload: DemoWorkload, progress: &WriteProgress) -> Self {
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

    /// Waits for an event while the writers run.
    ///
    /// # Errors
    /// Fails if a writer fails first.
    pub(crate) async fn during<T>(&mut self, event: impl Future<Output = T>) -> anyhow::Result<T> {
        tokio::pin!(event);
        loop {
            tokio::select! {
                output = &mut event => return Ok(output),
                Some(written) = self.tasks.join_next() => self.written.push(written??),
            }
        }
    }

    /// Waits until all records are acked.
    ///
    /// # Errors
    /// Fails if a writer fails.
    pub(crate) async fn finish(mut self) -> anyhow::Result<Vec<WrittenPartition>> {
        while let Some(written) = self.tasks.join_next().await {
            self.written.push(written??);
        }
        Ok(self.written)
    }
}

/// A sent batch.
struct SentBatch {
    first_sequence: u64,
    record_count: u64,
    is_after_kill: bool,
    ack: AckFuture,
}

async fn write(
    client: &Client,
    workload: DemoWorkload,
    partition: u32,
    progress: &WriteProgress,
) -> anyhow::Result<WrittenPartition> {
    let options =
        SessionOptions { in_flight_batches: BATCHES_IN_FLIGHT, ..SessionOptions::default() };
    let session = client.session(TOPIC, partition, options).await?;
    let (sent_sender, sent) = mpsc::channel(BATCHES_IN_FLIGHT);
    let send_all = async {
        let records = workload.records_of(partition);
        let batch_records = batch_records(&workload, partition);
        let mut first_sequence = 0;
        while first_sequence < records {
            let record_count = batch_records.min(records - first_sequence);
            let batch = encode(&workload, partition, first_sequence, record_count);
            let is_after_kill = progress.0.is_after_kill.load(Ordering::Relaxed);
            let ack = session.append(batch).await?;
            progress.0.sent.fetch_add(record_count, Ordering::Relaxed);
            let sent = SentBatch { first_sequence, record_count, is_after_kill, ack };
            if sent_sender.send(sent).await.is_err() {
                // `collect` has failed and returns the error.
                return Ok(());
            }
            first_sequence += record_count;
        }
        drop(sent_sender);
        session.close().await.map_err(anyhow::Error::from)
    };
    let ((), written) = tokio::try_join!(send_all, collect(partition, sent, progress))?;
    Ok(written)
}

/// Awaits the acks in order.
async fn collect(
    partition: u32,
    mut sent: mpsc::Receiver<SentBatch>,
    progress: &WriteProgress,
) -> anyhow::Result<WrittenPartition> {
    let mut acked = Vec::new();
    let mut durability = Durability::Unspecified;
    while let Some(SentBatch { first_sequence, record_count, is_after_kill, ack }) =
        sent.recv().await
    {
        let ack = ack.await?;
        if is_after_kill {
            progress.note_resumed(partition, Resumption::At(Instant::now()));
        }
        let (Some(first_offset), Some(next_offset)) = (ack.first_offset, ack.next_offset) else {
            bail!("ack without offsets");
        };
        if next_offset - first_offset != record_count {
            bail!("ack of {first_offset}..{next_offset} for {record_count} records");
        }
        acked.push(AckedBatch { first_sequence, record_count, first_offset });
        // Larger enum numbers are weaker.
        if i32::from(ack.durability) > i32::from(durability) {
            durability = ack.durability;
        }
        progress.0.acked.send_modify(|acked| *acked += record_count);
    }
    progress.note_resumed(partition, Resumption::NothingLeft);
    Ok(WrittenPartition { partition, acked, durability })
}

fn batch_records(workload: &DemoWorkload, partition: u32) -> u64 {
    let by_size = (BATCH_BYTES_MAX / workload.record_bytes) as u64;
    by_size.min(workload.records_of(partition).div_ceil(BATCHES_MIN)).max(1)
}

fn encode(workload: &DemoWorkload, partition: u32, first: u64, count: u64) -> EncodedBatch {
    let record = |sequence| Record {
        value: Some(workload.value(partition, sequence).into()),
        ..Record::default()
    };
    let records: Vec<_> = (first..first + count).map(record).collect();
    batch::encode(&records)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn short_runs_have_many_batches() {
        let records = |records, record_bytes| {
            batch_records(&DemoWorkload { seed: 1, records, record_bytes, partitions: 4 }, 0)
        };
        assert_eq!(records(1_000_000, 256), 512);
        assert_eq!(records(20_000, 256), 79);
        assert_eq!(records(3, 256), 1);
        assert_eq!(records(1_000_000, 1 << 19), 1);
    }

    #[tokio::test]
    async fn first_resumption_of_each_partition_counts() {
        let progress = WriteProgress::new();
        let first = Instant::now();
        let second = first + Duration::from_secs(1);
        let resumed = progress.resume(&[3, 1, 0]);
        progress.note_resumed(1, Resumption::At(second));
        progress.note_resumed(1, Resumption::At(second + Duration::from_secs(9)));
        progress.note_resumed(1, Resumption::NothingLeft);
        progress.note_resumed(0, Resumption::NothingLeft);
        progress.note_resumed(3, Resumption::At(first));
        assert_eq!(resumed.await, [first, second]);
    }
}
