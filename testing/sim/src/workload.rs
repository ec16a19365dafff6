//! Producers and readers as applications have them, through `helix-client`.
//! Everything that they do and are told goes into the history; they stop when they are told to.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use helix_checker::{BatchKey, Event, payload};
use helix_client::{
    Ack, Acked, AppendOptions, Batches, Client, Config, Error, Event as Told, FetchOptions,
    Position, ProducerOptions, ReadOptions, ReadSource, Session, SessionOptions, Start,
};
use helix_proto::log::v1::{EncodedBatch, ErrorReason};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::marks::{Mark, Marks};
use crate::members::Members;
use crate::net::{CLIENT_PORT, dial};
use crate::plan::Plan;
use crate::record::Recorder;
use crate::repeater::Repeater;

/// The topic that everything goes to.
pub const TOPIC: &str = "sim";

/// Longest time for one call with its retries, and for a batch of a session.
const REQUEST_MAX_MS: std::ops::RangeInclusive<u64> = 1_000..=12_000;

/// Batches that a session has under way.
const DEPTH: usize = 8;

/// Pause of a reader that got nothing, or an error.
pub const BREATH: Duration = Duration::from_millis(50);

/// Longest wait of a poll.
const POLL: Duration = Duration::from_millis(300);

/// What everyone who writes or reads shares.
#[derive(Debug, Clone)]
pub struct Scene {
    pub plan: Arc<Plan>,
    pub recorder: Recorder,
    pub marks: Marks,
    pub members: Members,
    ids: Arc<AtomicU32>,
    stop: Arc<AtomicBool>,
    /// How far the run has come; see [`Scene::turn`].
    phase: Arc<AtomicU32>,
    /// Clients that have come to their end.
    ended: Arc<AtomicU32>,
}

/// When the topic is there, and from when on replicas are read for the last time: each such read
/// is a phase.
pub const TOPIC_IS_THERE: u32 = 1;
pub const FINALS: u32 = 2;

impl Scene {
    pub fn new(plan: &Plan, recorder: Recorder, marks: Marks) -> Self {
        let ids = Arc::new(AtomicU32::new(1));
        let (stop, phase, ended) = Default::default();
        let members = Members::new(plan.nodes);
        Self { plan: Arc::new(plan.clone()), recorder, marks, members, ids, stop, phase, ended }
    }

    /// A number that nobody else has.
    pub fn id(&self) -> u32 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// All clients are there from the start, so that nothing that a run does decides what they
    /// draw; each waits for its turn.
    pub async fn turn(&self, phase: u32) {
        while self.phase.load(Ordering::Relaxed) < phase {
            sleep(Duration::from_millis(1)).await;
        }
    }

    pub fn set_phase(&self, phase: u32) {
        self.phase.store(phase, Ordering::Relaxed);
    }

    /// One more client, or final read, has come to its end.
    pub fn on_end(&self) {
        self.ended.fetch_add(1, Ordering::Relaxed);
    }

    pub fn ended(&self) -> u32 {
        self.ended.load(Ordering::Relaxed)
    }

    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    pub fn rng(&self, id: u32) -> StdRng {
        StdRng::seed_from_u64(self.plan.seed.wrapping_mul(31).wrapping_add(u64::from(id)))
    }

    /// A client with connections of its own.
    pub fn client(&self) -> Result<Client, Error> {
        let id = self.id();
        let request_max = self.rng(id).random_range(REQUEST_MAX_MS);
        let nodes = 1..=self.plan.machines();
        let mut endpoints: Vec<_> =
            nodes.map(|node| format!("{}:{CLIENT_PORT}", Plan::host(node))).collect();
        let count = endpoints.len();
        endpoints.rotate_left(id as usize % count);
        Client::new(Config {
            request_timeout: Duration::from_millis(request_max),
            attempt_timeout: Duration::from_secs(5),
            seed: Some(self.plan.seed ^ u64::from(id)),
            dial: dial(),
            ..Config::new(endpoints)
        })
    }

    /// Waits for about this long. False when it is time to stop.
    pub async fn pause(&self, mean: Duration, rng: &mut StdRng) -> bool {
        sleep(mean.mul_f64(rng.random_range(0.0..2.0))).await;
        !self.is_stopped()
    }

    fn end(&self, key: BatchKey, partition: u32, records: u32, result: Result<Ack, Error>) {
        let recorder = &self.recorder;
        recorder.on_end(partition, result.is_ok());
        match result {
            Ok(Ack { first_offset: Some(offset), next_offset, duplicate, .. }) => {
                recorder.add(Event::Acked { key, offset });
                if next_offset != Some(offset + u64::from(records)) {
                    let what = format!("an ack of {key} whose end is {next_offset:?}");
                    recorder.add(Event::Foreign { reader: key.producer, partition, offset, what });
                }
                if duplicate {
                    self.marks.hit(Mark::DuplicateSuppressed);
                }
            }
            Ok(Ack { first_offset: None, .. }) => {
                let what = format!("an ack of {key} without an offset");
                recorder.add(Event::Unknown { key });
                recorder.add(Event::Foreign { reader: key.producer, partition, offset: 0, what });
            }
            Err(error) => {
                if error.is(ErrorReason::DiskFull) {
                    self.marks.hit(Mark::DiskFullEntered);
                }
                let refused = error.is(ErrorReason::ExpectedOffsetMismatch);
                if let Some(next_offset) = error.next_offset.filter(|_| refused) {
                    recorder.add(Event::Refused { key, next_offset });
                } else if error.may_have_applied {
                    self.marks.hit(Mark::OutcomeUnknown);
                    recorder.add(Event::Unknown { key });
                } else {
                    recorder.add(Event::Failed { key });
                }
            }
        }
    }
}

/// Makes the topic, again and again until it is there.
pub async fn set(scene: Scene) -> turmoil::Result {
    let client = scene.client()?;
    let topic = helix_client::NewTopic::new(TOPIC, scene.plan.partitions);
    for _ in 0..20 {
        match client.admin().create_topic(&topic).await {
            Ok(_) => {
                scene.on_end();
                return Ok(());
            }
            Err(error) => scene.recorder.note(&format!("no topic yet: {error}")),
        }
    }
    Err("the topic could not be made".into())
}

/// Everyone who writes; ends when all batches have their outcomes.
pub async fn write(scene: Scene) -> turmoil::Result {
    scene.turn(TOPIC_IS_THERE).await;
    let mut tasks = JoinSet::new();
    for place in 0..scene.plan.sessions {
        let writer = Writer::new(&scene)?;
        tasks.spawn(writer.stream(place % scene.plan.partitions));
    }
    for _ in 0..scene.plan.unary {
        tasks.spawn(Writer::new(&scene)?.one_by_one());
    }
    for _ in 0..scene.plan.plain {
        tasks.spawn(Writer::new(&scene)?.plain());
    }
    for _ in 0..scene.plan.conditional {
        tasks.spawn(Writer::new(&scene)?.conditional());
    }
    for _ in 0..scene.plan.repeaters {
        tasks.spawn(Repeater::new(&scene)?.run());
    }
    all(tasks).await?;
    scene.on_end();
    Ok(())
}

/// Everyone who reads.
pub async fn read(scene: Scene) -> turmoil::Result {
    scene.turn(TOPIC_IS_THERE).await;
    let mut tasks = JoinSet::new();
    tasks.spawn(Reader::new(&scene)?.subscribe());
    tasks.spawn(Reader::new(&scene)?.poll(ReadSource::Leader));
    tasks.spawn(Reader::new(&scene)?.poll(ReadSource::AnyReplica));
    tasks.spawn(Reader::new(&scene)?.probe());
    all(tasks).await?;
    scene.on_end();
    Ok(())
}

async fn all(mut tasks: JoinSet<()>) -> turmoil::Result {
    while let Some(task) = tasks.join_next().await {
        task?;
    }
    Ok(())
}

/// One producer.
struct Writer {
    scene: Scene,
    client: Client,
    producer: u32,
    next: u64,
    rng: StdRng,
}

impl Writer {
    fn new(scene: &Scene) -> Result<Self, Error> {
        let producer = scene.id();
        let (client, rng) = (scene.client()?, scene.rng(producer));
        Ok(Self { scene: scene.clone(), client, producer, next: 0, rng })
    }

    /// Keeps a session to one partition; opens another when it fails.
    async fn stream(mut self, partition: u32) {
        while !self.scene.is_stopped() {
            match self.client.session(TOPIC, partition, SessionOptions::default()).await {
                Ok(session) => self.fill(&session, partition).await,
                Err(_) => drop(self.scene.pause(BREATH, &mut self.rng).await),
            }
        }
    }

    /// Writes through a session until it fails or it is time to stop. Every batch that was handed
    /// over has its outcome in the history when this returns.
    async fn fill(&mut self, session: &Session, partition: u32) {
        let stream = self.scene.id();
        let mut waiting: VecDeque<(BatchKey, u32, Acked)> = VecDeque::new();
        let mut has_failed = false;
        while !has_failed && self.scene.pause(self.scene.plan.pace, &mut self.rng).await {
            let (key, records, batch) = self.make(partition, Some(stream));
            match session.append(batch).await {
                Ok(acked) => waiting.push_back((key, records, acked)),
                Err(error) => {
                    self.scene.end(key, partition, records, Err(error));
                    has_failed = true;
                }
            }
            if waiting.len() >= DEPTH {
                has_failed |= self.take(&mut waiting, partition).await;
            }
        }
        while !waiting.is_empty() {
            has_failed |= self.take(&mut waiting, partition).await;
        }
        if has_failed {
            self.scene.marks.hit(Mark::SessionBroken);
        }
    }

    /// Waits for the oldest batch. True if it failed.
    async fn take(&self, waiting: &mut VecDeque<(BatchKey, u32, Acked)>, partition: u32) -> bool {
        let Some((key, records, acked)) = waiting.pop_front() else { return false };
        let result = acked.await;
        let has_failed = result.is_err();
        self.scene.end(key, partition, records, result);
        has_failed
    }

    /// An idempotent producer with one batch under way, to any partition.
    async fn one_by_one(mut self) {
        let producer = self.client.producer(ProducerOptions::default());
        while self.scene.pause(self.scene.plan.pace, &mut self.rng).await {
            let partition = self.rng.random_range(0..self.scene.plan.partitions);
            let (key, records, batch) = self.make(partition, None);
            let result = producer.append(TOPIC, partition, batch).await;
            self.scene.end(key, partition, records, result);
        }
    }

    /// A producer that cannot repeat what may have been applied.
    async fn plain(mut self) {
        let options = AppendOptions::default();
        while self.scene.pause(self.scene.plan.pace, &mut self.rng).await {
            let partition = self.rng.random_range(0..self.scene.plan.partitions);
            let (key, records, batch) = self.make(partition, None);
            let result = self.client.append(TOPIC, partition, batch, &options).await;
            self.scene.end(key, partition, records, result);
        }
    }

    /// An idempotent producer that appends only at the offset at which it believes the end to be.
    /// A refusal tells it where the end is; others move it all the time, and a batch that came too
    /// late must never turn up.
    async fn conditional(mut self) {
        let producer = self.client.producer(ProducerOptions::default());
        let mut ends = vec![0; self.scene.plan.partitions as usize];
        while self.scene.pause(self.scene.plan.pace, &mut self.rng).await {
            let partition = self.rng.random_range(0..self.scene.plan.partitions);
            let end = &mut ends[partition as usize];
            let (key, records, batch) = self.make(partition, None);
            let expected = Some(*end);
            self.scene.recorder.add(Event::Condition { key, expected, token: None });
            let options = AppendOptions::default().expecting(*end);
            let result = producer.append_with(TOPIC, partition, batch, &options).await;
            let told = match &result {
                Ok(ack) => ack.next_offset,
                Err(error) => error.next_offset,
            };
            match &result {
                Ok(_) => self.scene.marks.hit(Mark::ConditionMet),
                Err(error) if error.is(ErrorReason::ExpectedOffsetMismatch) => {
                    self.scene.marks.hit(Mark::ConditionRefused);
                }
                Err(_) => {}
            }
            *end = told.unwrap_or(*end);
            self.scene.end(key, partition, records, result);
        }
    }

    /// The next batch, noted as invoked.
    fn make(&mut self, partition: u32, stream: Option<u32>) -> (BatchKey, u32, EncodedBatch) {
        let key = BatchKey { producer: self.producer, number: self.next };
        self.next += 1;
        let records = self.rng.random_range(1..=self.scene.plan.records_max);
        let batch = payload::build(key, records);
        self.scene.recorder.add(Event::Invoked { key, partition, records, stream });
        self.scene.recorder.on_begin(partition);
        (key, records, batch)
    }
}

/// One reader of all partitions.
struct Reader {
    scene: Scene,
    client: Client,
    id: u32,
    /// Next offset of each partition.
    next: Vec<u64>,
    rng: StdRng,
}

impl Reader {
    fn new(scene: &Scene) -> Result<Self, Error> {
        let (id, client) = (scene.id(), scene.client()?);
        let next = vec![0; scene.plan.partitions as usize];
        for partition in 0..scene.plan.partitions {
            scene.recorder.add(Event::Opened { reader: id, partition, offset: 0 });
        }
        Ok(Self { scene: scene.clone(), client, id, next, rng: scene.rng(id) })
    }

    fn starts(&self) -> Vec<Start> {
        let places = (0..).zip(&self.next);
        places.map(|(at, next)| Start::new(TOPIC, at, Position::Offset(*next))).collect()
    }

    fn take(&mut self, batches: &Batches) {
        let partition = batches.partition;
        let next = &mut self.next[partition as usize];
        let (events, end) = payload::events(self.id, partition, &batches.batches, *next);
        *next = end;
        self.scene.recorder.add_all(events);
        for stored in &batches.batches {
            let Some(time) = stored.append_time else { continue };
            let time_us = time.seconds.cast_unsigned() * 1_000_000
                + u64::from(time.nanos.cast_unsigned()) / 1_000;
            let offset = stored.first_offset;
            self.scene.recorder.add(Event::Stamped { partition, offset, time_us });
        }
    }

    /// A failed read is tried again. One that says that the log starts later goes on there; one
    /// that says that the log has shrunk is a finding.
    async fn failed(&mut self, error: &Error) {
        if error.is(ErrorReason::OffsetOutOfRange) {
            let partition = error.place.as_ref().map_or(0, |(_, partition)| *partition);
            let offset = self.next.get(partition as usize).copied().unwrap_or(0);
            let start = error.watermarks.unwrap_or_default().log_start_offset;
            let reader = self.id;
            if offset < start {
                self.scene.marks.hit(Mark::ReaderSentToLogStart);
                self.scene.recorder.add(Event::Opened { reader, partition, offset: start });
                self.next[partition as usize] = start;
            } else {
                self.scene.recorder.add(Event::OutOfRange { reader, partition, offset });
            }
        }
        self.scene.pause(BREATH, &mut self.rng).await;
    }

    /// A pushed stream from the leaders.
    async fn subscribe(mut self) {
        while !self.scene.is_stopped() {
            let consumer = self.client.consumer();
            let mut subscription = consumer.subscribe(self.starts(), ReadOptions::default());
            while !self.scene.is_stopped() {
                match timeout(POLL, subscription.next_encoded()).await {
                    Ok(Some(Ok(Told::Data(batches)))) => self.take(&batches),
                    Ok(Some(Ok(Told::CaughtUp { .. } | Told::Heartbeat(_)))) | Err(_) => {}
                    Ok(Some(Err(error))) => {
                        self.failed(&error).await;
                        break;
                    }
                    Ok(None) => break,
                }
            }
        }
    }

    /// A long poll of the leaders, or of one replica after the other.
    async fn poll(mut self, source: ReadSource) {
        let consumer = self.client.consumer();
        while !self.scene.is_stopped() {
            let node = self.rng.random_range(1..=self.scene.plan.machines());
            let read = ReadOptions { source, preferred_node: Some(node), clamp: false };
            let options = FetchOptions { wait_max: POLL, read, ..FetchOptions::default() };
            match consumer.fetch_encoded(&self.starts(), &options).await {
                Ok(all) => all.iter().for_each(|batches| self.take(batches)),
                Err(error) => self.failed(&error).await,
            }
            self.scene.pause(BREATH, &mut self.rng).await;
        }
    }

    /// Asks for the latest offset of one partition after the other.
    async fn probe(mut self) {
        let admin = self.client.admin();
        while self.scene.pause(BREATH, &mut self.rng).await {
            let partition = self.rng.random_range(0..self.scene.plan.partitions);
            self.scene.recorder.add(Event::LatestAsked { probe: self.id, partition });
            let asked = [partition];
            if let Ok(offsets) = admin.resolve_offsets(TOPIC, &asked, &Position::Latest).await {
                for resolved in offsets {
                    let (partition, offset) = (resolved.partition, resolved.offset);
                    self.scene.recorder.add(Event::Latest { probe: self.id, partition, offset });
                }
            }
        }
    }
}
