//! Readers: a subscription, a long poll, one of each replica, and questions for the latest offset.
//! Each goes on from where it was, whatever happens to the nodes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use helix_checker::Event;
use helix_checker::payload::events;
use helix_client::{
    Batches, Client, Error, Event as Told, FetchOptions, Position, ReadOptions, Start,
};
use helix_proto::log::v1::ErrorReason;
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::task::JoinSet;

use super::{Scene, Stop, TOPIC, is_stopped, pause};
use crate::cluster::Starts;
use crate::direct::{Direct, FetchError};

/// Longest wait of a poll, and of a stopping reader.
const POLL: Duration = Duration::from_millis(300);

/// Mean pause between two questions for the latest offset, and after a failed read.
const BREATH: Duration = Duration::from_millis(30);

/// Starts one reader of each kind.
pub(super) fn spawn(
    tasks: &mut JoinSet<()>,
    scene: &Arc<Scene>,
    from: &[u64],
    stop: &Stop,
) -> anyhow::Result<()> {
    tasks.spawn(Reader::new(scene, from, stop)?.subscribe());
    tasks.spawn(Reader::new(scene, from, stop)?.poll());
    tasks.spawn(Reader::new(scene, from, stop)?.probe());
    for direct in &scene.direct {
        tasks.spawn(Reader::new(scene, from, stop)?.follow(direct.clone()));
    }
    Ok(())
}

/// Whether a reader is sent away from an offset that it had reached.
pub(crate) fn is_out_of_range(error: &Error) -> bool {
    error.is(ErrorReason::OffsetOutOfRange)
}

struct Reader {
    scene: Arc<Scene>,
    client: Client,
    id: u32,
    /// Next offset of each partition.
    next: Vec<u64>,
    rng: StdRng,
    stop: Stop,
}

impl Reader {
    fn new(scene: &Arc<Scene>, from: &[u64], stop: &Stop) -> anyhow::Result<Self> {
        let (id, client) = (scene.id(), scene.client()?);
        let opened = (0..).zip(from);
        let opened = opened.map(|(partition, offset)| Event::Opened {
            reader: id,
            partition,
            offset: *offset,
        });
        scene.recorder.add_all(opened);
        let (next, rng, stop) = (from.to_vec(), scene.rng(id), stop.clone());
        Ok(Self { scene: scene.clone(), client, id, next, rng, stop })
    }

    fn starts(&self) -> Vec<Start> {
        let places = (0..).zip(&self.next);
        let start =
            |(partition, next): (u32, &u64)| Start::new(TOPIC, partition, Position::Offset(*next));
        places.map(start).collect()
    }

    fn take(&mut self, batches: &Batches) {
        let next = &mut self.next[batches.partition as usize];
        let (events, end) = events(self.id, batches.partition, &batches.batches, *next);
        *next = end;
        self.scene.recorder.add_all(events);
    }

    /// A failed read is tried again; one that says that the log has shrunk is a finding.
    async fn failed(&mut self, error: &Error) {
        self.scene.stats.failed_reads.fetch_add(1, Ordering::Relaxed);
        if is_out_of_range(error) {
            let partition = error.place.as_ref().map_or(0, |(_, partition)| *partition);
            let offset = self.next.get(partition as usize).copied().unwrap_or(0);
            self.scene.recorder.add(Event::OutOfRange { reader: self.id, partition, offset });
        }
        pause(&mut self.stop, BREATH, &mut self.rng).await;
    }

    /// A pushed stream from the leaders.
    async fn subscribe(mut self) {
        while !is_stopped(&self.stop) {
            let consumer = self.client.consumer();
            let mut subscription = consumer.subscribe(self.starts(), ReadOptions::default());
            loop {
                let told = tokio::select! {
                    told = subscription.next_encoded() => told,
                    _ = self.stop.wait_for(|stop| *stop) => return,
                };
                match told {
                    Some(Ok(Told::Data(batches))) => self.take(&batches),
                    Some(Ok(Told::CaughtUp { .. } | Told::Heartbeat(_))) => {}
                    Some(Err(error)) => {
                        self.failed(&error).await;
                        break;
                    }
                    None => break,
                }
            }
        }
    }

    /// A long poll of the leaders.
    async fn poll(mut self) {
        let consumer = self.client.consumer();
        let options = FetchOptions { wait_max: POLL, ..FetchOptions::default() };
        while !is_stopped(&self.stop) {
            match consumer.fetch_encoded(&self.starts(), &options).await {
                Ok(all) => all.iter().for_each(|batches| self.take(batches)),
                Err(error) => self.failed(&error).await,
            }
            pause(&mut self.stop, BREATH, &mut self.rng).await;
        }
    }

    /// Asks for the latest offset of one partition after the other.
    async fn probe(mut self) {
        let admin = self.client.admin();
        while pause(&mut self.stop, BREATH, &mut self.rng).await {
            let partition = self.rng.random_range(0..self.scene.partitions);
            self.scene.recorder.add(Event::LatestAsked { probe: self.id, partition });
            let asked = [partition];
            match admin.resolve_offsets(TOPIC, &asked, &Position::Latest).await {
                Ok(offsets) => {
                    for resolved in offsets {
                        let (partition, offset) = (resolved.partition, resolved.offset);
                        let probe = self.id;
                        self.scene.recorder.add(Event::Latest { probe, partition, offset });
                    }
                }
                Err(error) => self.failed(&error).await,
            }
        }
    }

    /// Reads one replica, whether it leads or not.
    async fn follow(mut self, direct: Direct) {
        let (scene, starts) = (self.scene.clone(), self.scene.starts.clone());
        let mut session = Session { starts: &starts, node_id: direct.node_id, start: 0, id: 0 };
        while !is_stopped(&self.stop) {
            let mut has_moved = false;
            for partition in 0..scene.partitions {
                let next = self.next[partition as usize];
                let id = session.begin(&scene);
                match direct.fetch((TOPIC, partition), next, Duration::ZERO).await {
                    Ok(read) => {
                        let (mut told, end) = events(self.id, partition, &read.batches, next);
                        has_moved |= end > next;
                        self.next[partition as usize] = end;
                        let batches = &scene.stats.replica_reads;
                        batches.fetch_add(told.len() as u64, Ordering::Relaxed);
                        if let (Some(marks), true) = (read.watermarks, session.is_same()) {
                            let high_watermark = marks.high_watermark;
                            told.push(Event::Watermark { session: id, partition, high_watermark });
                        }
                        scene.recorder.add_all(told);
                    }
                    Err(FetchError::Said(error)) => self.failed(&error).await,
                    Err(FetchError::TimedOut) => {
                        scene.stats.failed_reads.fetch_add(1, Ordering::Relaxed);
                    }
                }
                if is_stopped(&self.stop) {
                    return;
                }
            }
            if !has_moved {
                pause(&mut self.stop, BREATH, &mut self.rng).await;
            }
        }
    }
}

/// Numbers the times between two starts of a node: within one, high watermarks only grow.
struct Session<'a> {
    starts: &'a Starts,
    node_id: u64,
    /// Start of the node that the present session belongs to.
    start: u32,
    id: u32,
}

impl Session<'_> {
    fn now(&self) -> u32 {
        self.starts.get(&self.node_id).map_or(0, |starts| starts.load(Ordering::SeqCst))
    }

    /// The session that a question begins in.
    fn begin(&mut self, scene: &Scene) -> u32 {
        let now = self.now();
        if now != self.start {
            (self.start, self.id) = (now, scene.id());
        }
        self.id
    }

    /// Whether the answer came from the process that was asked.
    fn is_same(&self) -> bool {
        self.now() == self.start
    }
}
