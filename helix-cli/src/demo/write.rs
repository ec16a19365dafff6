//! The writers of the demo: one pipelined, idempotent session for each partition.
//! They know nothing of the node's death; getting through it is the client's business.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, bail};
use helix_client::proto::batch;
use helix_client::proto::log::v1::{Durability, EncodedBatch, Record};
use helix_client::{Acked, Client, SessionOptions};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::TOPIC;
use super::verify::AckedBatch;
use super::workload::Workload;

/// Payload of a batch, about, at most.
const BATCH_BYTES_MAX: usize = 128 << 10;

/// Batches of a partition, about, at least: several times what is in flight, so that half way
/// there is something left to write.
const BATCHES_MIN: u64 = 4 * BATCHES_IN_FLIGHT as u64;

/// Batches of a session that are sent and not acked.
const BATCHES_IN_FLIGHT: usize = 16;

/// How far the writers are, for whoever watches.
#[derive(Debug, Clone)]
pub(crate) struct Progress(Arc<Counts>);

#[derive(Debug)]
struct Counts {
    sent: AtomicU64,
    acked: watch::Sender<u64>,
    /// Set once a node is dead: what is handed over from then on, it cannot have acked.
    is_after_kill: AtomicBool,
    resumed: watch::Sender<BTreeMap<u32, Resumed>>,
}

/// How a partition went on after the kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resumed {
    /// The first ack of a batch that was handed over after it.
    At(Instant),
    /// Everything had been handed over before.
    NothingLeft,
}

impl Progress {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Counts {
            sent: AtomicU64::new(0),
            acked: watch::Sender::new(0),
            is_after_kill: AtomicBool::new(false),
            resumed: watch::Sender::default(),
        }))
    }

    /// Records that have their ack.
    pub(crate) fn acked(&self) -> u64 {
        *self.0.acked.borrow()
    }

    /// Records that were handed over and have no ack yet.
    pub(crate) fn in_flight(&self) -> u64 {
        self.0.sent.load(Ordering::Relaxed).saturating_sub(self.acked())
    }

    /// Waits until at least so many records have their ack.
    pub(crate) fn reaches(&self, records: u64) -> impl Future<Output = ()> + use<> {
        let mut acked = self.0.acked.subscribe();
        async move {
            // The sender lives as long as the watched writers.
            let _ = acked.wait_for(|acked| *acked >= records).await;
        }
    }

    /// Says that a node is dead.
    pub(crate) fn note_kill(&self) {
        self.0.is_after_kill.store(true, Ordering::Relaxed);
    }

    /// Waits until all of these partitions have gone on after the kill. Gives their times, of those
    /// that had anything left, the first one first.
    pub(crate) fn resume(&self, partitions: &[u32]) -> impl Future<Output = Vec<Instant>> + use<> {
        let mut resumed = self.0.resumed.subscribe();
        let partitions = partitions.to_owned();
        async move {
            let all = |resumed: &BTreeMap<u32, Resumed>| {
                partitions.iter().all(|partition| resumed.contains_key(partition))
            };
            // The sender lives as long as the watched writers.
            let Ok(resumed) = resumed.wait_for(all).await else { return Vec::new() };
            let time = |partition| match resumed.get(partition) {
                Some(Resumed::At(time)) => Some(*time),
                Some(Resumed::NothingLeft) | None => None,
            };
            let mut times: Vec<_> = partitions.iter().filter_map(time).collect();
            times.sort_unstable();
            times
        }
    }

    fn note_resumed(&self, partition: u32, how: Resumed) {
        self.0.resumed.send_if_modified(|resumed| {
            let is_first = !resumed.contains_key(&partition);
            resumed.entry(partition).or_insert(how);
            is_first
        });
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
    is_after_kill: bool,
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
        let batch_records = batch_records(&workload, partition);
        let mut first_sequence = 0;
        while first_sequence < records {
            let record_count = batch_records.min(records - first_sequence);
            let batch = encode(&workload, partition, first_sequence, record_count);
            let is_after_kill = progress.0.is_after_kill.load(Ordering::Relaxed);
            let ack = session.append(batch).await?;
            progress.0.sent.fetch_add(record_count, Ordering::Relaxed);
            let sent = Sent { first_sequence, record_count, is_after_kill, ack };
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
    while let Some(Sent { first_sequence, record_count, is_after_kill, ack }) = sent.recv().await {
        let ack = ack.await?;
        if is_after_kill {
            progress.note_resumed(partition, Resumed::At(Instant::now()));
        }
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
        progress.0.acked.send_modify(|acked| *acked += record_count);
    }
    progress.note_resumed(partition, Resumed::NothingLeft);
    Ok(Written { partition, acked, durability })
}

fn batch_records(workload: &Workload, partition: u32) -> u64 {
    let by_size = (BATCH_BYTES_MAX / workload.record_bytes) as u64;
    by_size.min(workload.records_of(partition).div_ceil(BATCHES_MIN)).max(1)
}

fn encode(workload: &Workload, partition: u32, first: u64, count: u64) -> EncodedBatch {
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
    fn a_short_run_has_many_batches_too() {
        let records = |records, record_bytes| {
            batch_records(&Workload { seed: 1, records, record_bytes, partitions: 4 }, 0)
        };
        assert_eq!(records(1_000_000, 256), 512);
        assert_eq!(records(20_000, 256), 79);
        assert_eq!(records(3, 256), 1);
        assert_eq!(records(1_000_000, 1 << 19), 1);
    }

    #[tokio::test]
    async fn every_partition_says_once_how_it_went_on() {
        let progress = Progress::new();
        let first = Instant::now();
        let second = first + Duration::from_secs(1);
        let resumed = progress.resume(&[3, 1, 0]);
        progress.note_resumed(1, Resumed::At(second));
        progress.note_resumed(1, Resumed::At(second + Duration::from_secs(9)));
        progress.note_resumed(1, Resumed::NothingLeft);
        progress.note_resumed(0, Resumed::NothingLeft);
        progress.note_resumed(3, Resumed::At(first));
        assert_eq!(resumed.await, [first, second]);
    }
}
