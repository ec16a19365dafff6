//! Readers: a subscription, a long poll, a reader per replica, a re-reader of old records, and a
//! probe of the latest offset.
//!
//! Each continues from its offset whatever happens to the nodes, or from the log start if that has
//! moved past it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use helix_checker::HistoryEvent;
use helix_checker::payload::events;
use helix_client::{
    Batches, Client, Error, Event as Told, FetchOptions, Position, ReadOptions, ReadSource,
    ReadStart,
};
use helix_proto::log::v1::ErrorReason;
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::task::JoinSet;

use super::{StopSignal, TopicPartition, WorkloadContext, is_stopped, pause};
use crate::cluster::StartCounts;
use crate::node_client::{NodeClient, NodeFetchError};

/// Longest wait of a poll.
const POLL: Duration = Duration::from_millis(300);

/// Mean pause between two requests for the latest offset, and after a failed read.
const PAUSE: Duration = Duration::from_millis(30);

/// Payload bytes of one read of old records.
const REREAD_BYTES: u64 = 256 << 10;

/// Fewest batches that a read of old records takes before the next offset is drawn.
const REREAD_BATCHES: usize = 40;

/// Starts one reader of each kind.
pub(super) fn spawn(
    tasks: &mut JoinSet<()>,
    context: &Arc<WorkloadContext>,
    from: &[u64],
    stop: &StopSignal,
) -> anyhow::Result<()> {
    tasks.spawn(HistoryReader::new(context, from, stop)?.subscribe());
    tasks.spawn(HistoryReader::new(context, from, stop)?.poll());
    tasks.spawn(HistoryReader::new(context, from, stop)?.probe());
    tasks.spawn(HistoryReader::new(context, from, stop)?.reread());
    for node_client in context.nodes().node_clients {
        tasks.spawn(HistoryReader::new(context, from, stop)?.follow(node_client));
    }
    Ok(())
}

/// Reports whether a read failed because its offset is out of range.
pub(crate) fn is_out_of_range(error: &Error) -> bool {
    error.is(ErrorReason::OffsetOutOfRange)
}

struct HistoryReader {
    context: Arc<WorkloadContext>,
    client: Client,
    id: u32,
    /// Next offset of each partition.
    next: Vec<u64>,
    rng: StdRng,
    stop: StopSignal,
}

impl HistoryReader {
    fn new(
        context: &Arc<WorkloadContext>,
        from: &[u64],
        stop: &StopSignal,
    ) -> anyhow::Result<Self> {
        let (id, client) = (context.id(), context.client()?);
        let opened = (0..).zip(from);
        let opened = opened.map(|(partition, offset)| HistoryEvent::Opened {
            reader: id,
            partition,
            offset: *offset,
        });
        context.recorder.add_all(opened);
        let (next, rng, stop) = (from.to_vec(), context.rng(id), stop.clone());
        Ok(Self { context: context.clone(), client, id, next, rng, stop })
    }

    fn starts(&self) -> Vec<ReadStart> {
        let start = |(number, target): (u32, TopicPartition)| {
            let next = Position::Offset(self.next[number as usize]);
            ReadStart::new(target.topic, target.partition, next)
        };
        self.context.all_partitions().map(start).collect()
    }

    /// Records batches from the reader's next offset on.
    fn take(&mut self, batches: &Batches) {
        let Some(number) = self.context.number(&batches.topic, batches.partition) else { return };
        let next = &mut self.next[number as usize];
        let (events, end) = events(self.id, number, &batches.batches, *next);
        *next = end;
        self.context.recorder.add_all(events);
        self.context.note_log_start(number, batches.watermarks.log_start_offset);
    }

    /// Notes a failed read, which is retried. If the log start has moved past the offset, the
    /// reader continues there; the checker decides whether that was allowed.
    async fn failed(&mut self, error: &Error) {
        self.context.stats.failed_reads.fetch_add(1, Ordering::Relaxed);
        let failed = error.topic_partition.as_ref().filter(|_| is_out_of_range(error));
        if let Some(partition) =
            failed.and_then(|(topic, partition)| self.context.number(topic, *partition))
        {
            let (reader, offset) = (self.id, self.next[partition as usize]);
            let log_start = error.watermarks.unwrap_or_default().log_start_offset;
            self.context.note_log_start(partition, log_start);
            self.context.recorder.add(HistoryEvent::OutOfRange { reader, partition, offset });
            if log_start > offset {
                self.next[partition as usize] = log_start;
                self.context.recorder.add(HistoryEvent::Opened {
                    reader,
                    partition,
                    offset: log_start,
                });
                self.context.stats.moved_readers.fetch_add(1, Ordering::Relaxed);
            }
        }
        pause(&mut self.stop, PAUSE, &mut self.rng).await;
    }

    /// Reads old records again from any replica, from a random offset each time. A compaction or
    /// retention may move or drop the records meanwhile.
    async fn reread(mut self) {
        let consumer = self.client.consumer();
        let read = ReadOptions { source: ReadSource::AnyReplica, ..ReadOptions::default() };
        let options =
            FetchOptions { read, bytes_max: Some(REREAD_BYTES), ..FetchOptions::default() };
        loop {
            let number = self.rng.random_range(0..self.next.len());
            let partition = u32::try_from(number).unwrap_or(0);
            let target = self.context.topic_partition(partition);
            let part = self.rng.random_range(0.0..1.0);
            let offset = self.context.tracker(partition).boundary_at(part).unwrap_or(0);
            self.next[number] = offset;
            self.context.recorder.add(HistoryEvent::Opened { reader: self.id, partition, offset });
            let mut batches = 0;
            while batches < REREAD_BATCHES {
                if !pause(&mut self.stop, PAUSE, &mut self.rng).await {
                    return;
                }
                let next = Position::Offset(self.next[number]);
                let start = [ReadStart::new(target.topic, target.partition, next)];
                match consumer.fetch_encoded(&start, &options).await {
                    Ok(read) => {
                        let count: usize = read.iter().map(|read| read.batches.len()).sum();
                        read.iter().for_each(|batches| self.take(batches));
                        if count == 0 {
                            break;
                        }
                        batches += count;
                    }
                    Err(error) => self.failed(&error).await,
                }
            }
        }
    }

    /// Subscribes to the leaders.
    async fn subscribe(mut self) {
        while !is_stopped(&self.stop) {
            let consumer = self.client.consumer();
            let mut subscription = consumer.subscribe(self.starts(), ReadOptions::default());
            loop {
                let received = tokio::select! {
                    received = subscription.next_encoded() => received,
                    _ = self.stop.wait_for(|stop| *stop) => return,
                };
                match received {
                    Some(Ok(Told::Data(batches))) => self.take(&batches),
                    Some(Ok(
                        Told::CaughtUp { .. } | Told::Heartbeat(_) | Told::Restarted { .. },
                    )) => {}
                    Some(Err(error)) => {
                        self.failed(&error).await;
                        break;
                    }
                    None => break,
                }
            }
        }
    }

    /// Long-polls the leaders.
    async fn poll(mut self) {
        let consumer = self.client.consumer();
        let options = FetchOptions { wait_max: POLL, ..FetchOptions::default() };
        while !is_stopped(&self.stop) {
            match consumer.fetch_encoded(&self.starts(), &options).await {
                Ok(all) => all.iter().for_each(|batches| self.take(batches)),
                Err(error) => self.failed(&error).await,
            }
            pause(&mut self.stop, PAUSE, &mut self.rng).await;
        }
    }

    /// Requests the latest offset of one partition at a time.
    async fn probe(mut self) {
        let admin = self.client.admin();
        while pause(&mut self.stop, PAUSE, &mut self.rng).await {
            let number = self.rng.random_range(0..self.next.len());
            let (probe, partition) = (self.id, u32::try_from(number).unwrap_or(0));
            let target = self.context.topic_partition(partition);
            self.context.recorder.add(HistoryEvent::LatestAsked { probe, partition });
            let asked = [target.partition];
            match admin.resolve_offsets(target.topic, &asked, &Position::Latest).await {
                Ok(offsets) => {
                    let received = offsets.into_iter();
                    self.context.recorder.add_all(received.map(|resolved| HistoryEvent::Latest {
                        probe,
                        partition,
                        offset: resolved.offset,
                    }));
                }
                Err(error) => self.failed(&error).await,
            }
        }
    }

    /// Reads one replica, whether it is the leader or not.
    async fn follow(mut self, node_client: NodeClient) {
        let (context, starts) = (self.context.clone(), self.context.starts.clone());
        let mut session =
            NodeSession { starts: &starts, node_id: node_client.node_id, start: 0, id: 0 };
        while !is_stopped(&self.stop) {
            let mut has_moved = false;
            for (partition, target) in context.all_partitions() {
                let next = self.next[partition as usize];
                let id = session.begin(&context);
                let asked = (target.topic, target.partition);
                match node_client.fetch(asked, next, Duration::ZERO).await {
                    Ok(read) => {
                        let (mut received, end) = events(self.id, partition, &read.batches, next);
                        has_moved |= end > next;
                        self.next[partition as usize] = end;
                        let batches = &context.stats.replica_reads;
                        batches.fetch_add(received.len() as u64, Ordering::Relaxed);
                        let watermarks = read.watermarks.unwrap_or_default();
                        context.note_log_start(partition, watermarks.log_start_offset);
                        if read.watermarks.is_some() && session.is_same() {
                            let high_watermark = watermarks.high_watermark;
                            received.push(HistoryEvent::Watermark {
                                session: id,
                                partition,
                                high_watermark,
                            });
                        }
                        context.recorder.add_all(received);
                    }
                    Err(NodeFetchError::Rejected(error)) => self.failed(&error).await,
                    Err(NodeFetchError::TimedOut) => {
                        context.stats.failed_reads.fetch_add(1, Ordering::Relaxed);
                    }
                }
                if is_stopped(&self.stop) {
                    return;
                }
            }
            if !has_moved {
                pause(&mut self.stop, PAUSE, &mut self.rng).await;
            }
        }
    }
}

/// Numbers the periods between two starts of a node; within one, high watermarks only grow.
struct NodeSession<'a> {
    starts: &'a StartCounts,
    node_id: u64,
    /// Start count of the node in the current session.
    start: u32,
    id: u32,
}

impl NodeSession<'_> {
    fn now(&self) -> u32 {
        self.starts.get(&self.node_id).map_or(0, |starts| starts.load(Ordering::SeqCst))
    }

    /// Returns the session in which a request begins.
    fn begin(&mut self, context: &WorkloadContext) -> u32 {
        let now = self.now();
        if now != self.start {
            (self.start, self.id) = (now, context.id());
        }
        self.id
    }

    /// Reports whether the response came from the process to which the request was sent.
    fn is_same(&self) -> bool {
        self.now() == self.start
    }
}
