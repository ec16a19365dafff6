//! Readers: a subscription, a long poll, one of each replica, one that reads old records again, and
//! questions for the latest offset. Each goes on from where it was, whatever happens to the nodes,
//! or from the start of the log if that has moved beyond it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use helix_checker::Event;
use helix_checker::payload::events;
use helix_client::{
    Batches, Client, Error, Event as Told, FetchOptions, Position, ReadOptions, ReadSource, Start,
};
use helix_proto::log::v1::ErrorReason;
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::task::JoinSet;

use super::{Place, Scene, Stop, is_stopped, pause};
use crate::cluster::Starts;
use crate::direct::{Direct, FetchError};

/// Longest wait of a poll, and of a stopping reader.
const POLL: Duration = Duration::from_millis(300);

/// Mean pause between two questions for the latest offset, and after a failed read.
const BREATH: Duration = Duration::from_millis(30);

/// Payload bytes of one read of old records.
const REREAD_BYTES: u64 = 256 << 10;

/// Batches, at least, that one read of old records takes before the next place is drawn.
const REREAD_BATCHES: usize = 40;

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
    tasks.spawn(Reader::new(scene, from, stop)?.reread());
    for direct in scene.nodes().direct {
        tasks.spawn(Reader::new(scene, from, stop)?.follow(direct));
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
        let start = |(number, place): (u32, Place)| {
            let next = Position::Offset(self.next[number as usize]);
            Start::new(place.topic, place.partition, next)
        };
        self.scene.places().map(start).collect()
    }

    /// Batches from where this reader was.
    fn take(&mut self, batches: &Batches) {
        let Some(number) = self.scene.number(&batches.topic, batches.partition) else { return };
        let next = &mut self.next[number as usize];
        let (events, end) = events(self.id, number, &batches.batches, *next);
        *next = end;
        self.scene.recorder.add_all(events);
        self.scene.starts_at(number, batches.watermarks.log_start_offset);
    }

    /// A failed read is tried again. One that says that the log starts further on goes on there;
    /// whether that may be is for the checker to say.
    async fn failed(&mut self, error: &Error) {
        self.scene.stats.failed_reads.fetch_add(1, Ordering::Relaxed);
        let place = error.place.as_ref().filter(|_| is_out_of_range(error));
        if let Some(partition) =
            place.and_then(|(topic, partition)| self.scene.number(topic, *partition))
        {
            let (reader, offset) = (self.id, self.next[partition as usize]);
            let log_start = error.watermarks.unwrap_or_default().log_start_offset;
            self.scene.starts_at(partition, log_start);
            self.scene.recorder.add(Event::OutOfRange { reader, partition, offset });
            if log_start > offset {
                self.next[partition as usize] = log_start;
                self.scene.recorder.add(Event::Opened { reader, partition, offset: log_start });
                self.scene.stats.sent_on.fetch_add(1, Ordering::Relaxed);
            }
        }
        pause(&mut self.stop, BREATH, &mut self.rng).await;
    }

    /// Reads old records again, from any replica: a partition after the other, each time from
    /// another place. What is read may be moved by a compaction meanwhile, or dropped.
    async fn reread(mut self) {
        let consumer = self.client.consumer();
        let read = ReadOptions { source: ReadSource::AnyReplica, ..ReadOptions::default() };
        let options =
            FetchOptions { read, bytes_max: Some(REREAD_BYTES), ..FetchOptions::default() };
        loop {
            let number = self.rng.random_range(0..self.next.len());
            let partition = u32::try_from(number).unwrap_or(0);
            let place = self.scene.place(partition);
            let part = self.rng.random_range(0.0..1.0);
            let offset = self.scene.ledger(partition).cut(part).unwrap_or(0);
            self.next[number] = offset;
            self.scene.recorder.add(Event::Opened { reader: self.id, partition, offset });
            let mut batches = 0;
            while batches < REREAD_BATCHES {
                if !pause(&mut self.stop, BREATH, &mut self.rng).await {
                    return;
                }
                let next = Position::Offset(self.next[number]);
                let start = [Start::new(place.topic, place.partition, next)];
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
            let number = self.rng.random_range(0..self.next.len());
            let (probe, partition) = (self.id, u32::try_from(number).unwrap_or(0));
            let place = self.scene.place(partition);
            self.scene.recorder.add(Event::LatestAsked { probe, partition });
            let asked = [place.partition];
            match admin.resolve_offsets(place.topic, &asked, &Position::Latest).await {
                Ok(offsets) => {
                    let told = offsets.into_iter();
                    self.scene.recorder.add_all(told.map(|resolved| Event::Latest {
                        probe,
                        partition,
                        offset: resolved.offset,
                    }));
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
            for (partition, place) in scene.places() {
                let next = self.next[partition as usize];
                let id = session.begin(&scene);
                let asked = (place.topic, place.partition);
                match direct.fetch(asked, next, Duration::ZERO).await {
                    Ok(read) => {
                        let (mut told, end) = events(self.id, partition, &read.batches, next);
                        has_moved |= end > next;
                        self.next[partition as usize] = end;
                        let batches = &scene.stats.replica_reads;
                        batches.fetch_add(told.len() as u64, Ordering::Relaxed);
                        let marks = read.watermarks.unwrap_or_default();
                        scene.starts_at(partition, marks.log_start_offset);
                        if read.watermarks.is_some() && session.is_same() {
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
