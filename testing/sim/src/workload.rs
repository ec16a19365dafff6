//! Producers and readers that use `helix-client` as applications do.
//! All of their requests and responses go into the history.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use helix_checker::{BatchKey, HistoryEvent, payload};
use helix_client::{
    Ack, AckFuture, AppendOptions, Batches, Client, Config, Error, Event as ConsumerEvent,
    FetchOptions, Position, ProducerOptions, ReadOptions, ReadSource, ReadStart, Session,
    SessionOptions,
};
use helix_proto::log::v1::{EncodedBatch, ErrorReason};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::coverage::{CoverageMark, CoverageMarks};
use crate::group_context::GroupContext;
use crate::membership::MembershipTracker;
use crate::net::{CLIENT_PORT, dial};
use crate::plan::SimulationPlan;
use crate::raw_producer::RawProducer;
use crate::recorder::Recorder;

/// Topic of all records.
pub const TOPIC: &str = "sim";

/// Range of request timeouts, which include retries, in milliseconds.
const REQUEST_MAX_MS: std::ops::RangeInclusive<u64> = 1_000..=12_000;

/// Maximum batches in flight of a session.
const BATCHES_IN_FLIGHT: usize = 8;

/// Pause after an error or an empty read.
pub const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Maximum wait of a poll.
const POLL: Duration = Duration::from_millis(300);

/// Shards whose moves an operator has cancelled, or tried to.
#[derive(Debug, Clone, Default)]
pub struct CancelledShards(Arc<Mutex<BTreeSet<u64>>>);

impl CancelledShards {
    pub fn contains(&self, shard_id: u64) -> bool {
        self.lock().contains(&shard_id)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// State shared by all clients of a run.
#[derive(Debug, Clone)]
pub struct ClientContext {
    pub plan: Arc<SimulationPlan>,
    pub recorder: Recorder,
    pub marks: CoverageMarks,
    pub members: MembershipTracker,
    pub group: GroupContext,
    ids: Arc<AtomicU32>,
    stop: Arc<AtomicBool>,
    /// Phase of the run; see [`ClientContext::wait_for_phase`].
    phase: Arc<AtomicU32>,
    /// Clients that have ended.
    ended: Arc<AtomicU32>,
    /// Operators change neither members nor placement from now on.
    is_calm: Arc<AtomicBool>,
    /// Every node may get replicas again.
    is_uncordoned: Arc<AtomicBool>,
    cancelled: CancelledShards,
}

/// Phases of a run: the topic exists; the final reads, one phase each.
pub const TOPIC_IS_THERE: u32 = 1;
pub const FINALS: u32 = 2;

impl ClientContext {
    pub fn new(plan: &SimulationPlan, recorder: Recorder, marks: CoverageMarks) -> Self {
        let ids = Arc::new(AtomicU32::new(1));
        let (stop, phase, ended) = Default::default();
        let (is_calm, is_uncordoned) = Default::default();
        let members = MembershipTracker::new(plan.nodes);
        let group = GroupContext::new(plan.seed);
        let plan = Arc::new(plan.clone());
        Self {
            plan,
            recorder,
            marks,
            members,
            group,
            ids,
            stop,
            phase,
            ended,
            is_calm,
            is_uncordoned,
            cancelled: CancelledShards::default(),
        }
    }

    /// Returns a unique id.
    pub fn id(&self) -> u32 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Waits for a phase of the run.
    ///
    /// All clients exist from the start, so that their random draws do not depend on the run.
    pub async fn wait_for_phase(&self, phase: u32) {
        while self.phase.load(Ordering::Relaxed) < phase {
            sleep(Duration::from_millis(1)).await;
        }
    }

    pub fn set_phase(&self, phase: u32) {
        self.phase.store(phase, Ordering::Relaxed);
    }

    /// Counts a client or final read that has ended.
    pub fn on_end(&self) {
        self.ended.fetch_add(1, Ordering::Relaxed);
    }

    pub fn ended(&self) -> u32 {
        self.ended.load(Ordering::Relaxed)
    }

    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Lets the operators of a placement finish what they do, and begin nothing else.
    pub fn calm_down(&self) {
        self.is_calm.store(true, Ordering::Relaxed);
    }

    pub fn is_calm(&self) -> bool {
        self.is_calm.load(Ordering::Relaxed)
    }

    /// Registers that no node is cordoned any longer.
    pub fn on_uncordoned(&self) {
        self.is_uncordoned.store(true, Ordering::Relaxed);
    }

    pub fn is_uncordoned(&self) -> bool {
        self.is_uncordoned.load(Ordering::Relaxed)
    }

    pub fn on_move_cancelled(&self, shard_id: u64) {
        self.cancelled.lock().insert(shard_id);
    }

    pub fn cancelled(&self) -> CancelledShards {
        self.cancelled.clone()
    }

    pub fn rng(&self, id: u32) -> StdRng {
        StdRng::seed_from_u64(self.plan.seed.wrapping_mul(31).wrapping_add(u64::from(id)))
    }

    /// Returns the position of a random member in the list of all machines.
    ///
    /// A client without a library knows the members. Machines that are spare or retired are
    /// switched off and answer nothing, so that each call to one lasts until its timeout.
    pub fn random_member(&self, rng: &mut StdRng) -> usize {
        let members = self.members.all();
        let at = rng.random_range(0..members.len());
        members.iter().nth(at).map_or(0, |node| usize::try_from(*node - 1).unwrap_or(0))
    }

    /// Creates a client with its own connections.
    ///
    /// # Errors
    /// The settings are invalid.
    pub fn client(&self) -> Result<Client, Error> {
        let id = self.id();
        let request_max = self.rng(id).random_range(REQUEST_MAX_MS);
        let nodes = 1..=self.plan.machines();
        let mut endpoints: Vec<_> =
            nodes.map(|node| format!("{}:{CLIENT_PORT}", SimulationPlan::host(node))).collect();
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

    /// Sleeps for a random time with this mean. Returns `false` when the workload stops.
    pub async fn pause(&self, mean: Duration, rng: &mut StdRng) -> bool {
        sleep(mean.mul_f64(rng.random_range(0.0..2.0))).await;
        !self.is_stopped()
    }

    fn end(&self, key: BatchKey, partition: u32, records: u32, result: Result<Ack, Error>) {
        let recorder = &self.recorder;
        recorder.on_end(partition, result.is_ok());
        match result {
            Ok(Ack { first_offset: Some(offset), next_offset, duplicate, .. }) => {
                recorder.add(HistoryEvent::Acked { key, offset });
                if next_offset != Some(offset + u64::from(records)) {
                    let what = format!("an ack of {key} with next offset {next_offset:?}");
                    recorder.add(HistoryEvent::Foreign {
                        reader: key.producer,
                        partition,
                        offset,
                        what,
                    });
                }
                if duplicate {
                    self.marks.hit(CoverageMark::DuplicateSuppressed);
                }
            }
            Ok(Ack { first_offset: None, .. }) => {
                let what = format!("an ack of {key} without an offset");
                recorder.add(HistoryEvent::Unknown { key });
                recorder.add(HistoryEvent::Foreign {
                    reader: key.producer,
                    partition,
                    offset: 0,
                    what,
                });
            }
            Err(error) => {
                if error.is(ErrorReason::DiskFull) {
                    self.marks.hit(CoverageMark::DiskFullEntered);
                }
                let refused = error.is(ErrorReason::ExpectedOffsetMismatch);
                if let Some(next_offset) = error.next_offset.filter(|_| refused) {
                    recorder.add(HistoryEvent::Refused { key, next_offset });
                } else if error.may_have_applied {
                    self.marks.hit(CoverageMark::OutcomeUnknown);
                    recorder.add(HistoryEvent::Unknown { key });
                } else {
                    recorder.add(HistoryEvent::Failed { key });
                }
            }
        }
    }
}

/// Creates the topic, with retries.
pub async fn create_topic(context: ClientContext) -> turmoil::Result {
    let client = context.client()?;
    let topic = helix_client::NewTopic::new(TOPIC, context.plan.partitions);
    for _ in 0..20 {
        match client.admin().create_topic(&topic).await {
            Ok(_) => {
                context.on_end();
                return Ok(());
            }
            Err(error) => context.recorder.note(&format!("cannot create the topic yet: {error}")),
        }
    }
    Err("cannot create the topic".into())
}

/// Runs all producers; ends when all batches have an outcome.
pub async fn write(context: ClientContext) -> turmoil::Result {
    context.wait_for_phase(TOPIC_IS_THERE).await;
    let mut tasks = JoinSet::new();
    for place in 0..context.plan.sessions {
        let writer = SimulatedProducer::new(&context)?;
        tasks.spawn(writer.stream(place % context.plan.partitions));
    }
    for _ in 0..context.plan.unary {
        tasks.spawn(SimulatedProducer::new(&context)?.one_by_one());
    }
    for _ in 0..context.plan.plain {
        tasks.spawn(SimulatedProducer::new(&context)?.plain());
    }
    for _ in 0..context.plan.conditional {
        tasks.spawn(SimulatedProducer::new(&context)?.conditional());
    }
    for _ in 0..context.plan.raw_producers {
        tasks.spawn(RawProducer::new(&context)?.run());
    }
    all(tasks).await?;
    context.on_end();
    Ok(())
}

/// Runs all readers.
pub async fn read(context: ClientContext) -> turmoil::Result {
    context.wait_for_phase(TOPIC_IS_THERE).await;
    let mut tasks = JoinSet::new();
    tasks.spawn(SimulatedReader::new(&context)?.subscribe());
    tasks.spawn(SimulatedReader::new(&context)?.poll(ReadSource::Leader));
    tasks.spawn(SimulatedReader::new(&context)?.poll(ReadSource::AnyReplica));
    tasks.spawn(SimulatedReader::new(&context)?.probe());
    all(tasks).await?;
    context.on_end();
    Ok(())
}

async fn all(mut tasks: JoinSet<()>) -> turmoil::Result {
    while let Some(task) = tasks.join_next().await {
        task?;
    }
    Ok(())
}

/// A producer.
struct SimulatedProducer {
    context: ClientContext,
    client: Client,
    producer: u32,
    next: u64,
    rng: StdRng,
}

impl SimulatedProducer {
    fn new(context: &ClientContext) -> Result<Self, Error> {
        let producer = context.id();
        let (client, rng) = (context.client()?, context.rng(producer));
        Ok(Self { context: context.clone(), client, producer, next: 0, rng })
    }

    /// Keeps a session to one partition open, and reopens it after a failure.
    async fn stream(mut self, partition: u32) {
        while !self.context.is_stopped() {
            match self.client.session(TOPIC, partition, SessionOptions::default()).await {
                Ok(session) => self.write_session(&session, partition).await,
                Err(_) => drop(self.context.pause(RETRY_PAUSE, &mut self.rng).await),
            }
        }
    }

    /// Writes through a session until it fails or the workload stops. All of its batches have an
    /// outcome in the history on return.
    async fn write_session(&mut self, session: &Session, partition: u32) {
        let stream = self.context.id();
        let mut in_flight: VecDeque<(BatchKey, u32, AckFuture)> = VecDeque::new();
        let mut has_failed = false;
        while !has_failed && self.context.pause(self.context.plan.pace, &mut self.rng).await {
            let (key, records, batch) = self.next_batch(partition, Some(stream));
            match session.append(batch).await {
                Ok(acked) => in_flight.push_back((key, records, acked)),
                Err(error) => {
                    self.context.end(key, partition, records, Err(error));
                    has_failed = true;
                }
            }
            if in_flight.len() >= BATCHES_IN_FLIGHT {
                has_failed |= self.take(&mut in_flight, partition).await;
            }
        }
        while !in_flight.is_empty() {
            has_failed |= self.take(&mut in_flight, partition).await;
        }
        if has_failed {
            self.context.marks.hit(CoverageMark::SessionBroken);
        }
    }

    /// Waits for the oldest batch. Returns whether it failed.
    async fn take(
        &self,
        in_flight: &mut VecDeque<(BatchKey, u32, AckFuture)>,
        partition: u32,
    ) -> bool {
        let Some((key, records, acked)) = in_flight.pop_front() else { return false };
        let result = acked.await;
        let has_failed = result.is_err();
        self.context.end(key, partition, records, result);
        has_failed
    }

    /// Writes to all partitions with an idempotent producer, one batch at a time.
    async fn one_by_one(mut self) {
        let producer = self.client.producer(ProducerOptions::default());
        while self.context.pause(self.context.plan.pace, &mut self.rng).await {
            let partition = self.rng.random_range(0..self.context.plan.partitions);
            let (key, records, batch) = self.next_batch(partition, None);
            let result = producer.append(TOPIC, partition, batch).await;
            self.context.end(key, partition, records, result);
        }
    }

    /// Writes without a producer id: an append with an unknown outcome cannot be retried.
    async fn plain(mut self) {
        let options = AppendOptions::default();
        while self.context.pause(self.context.plan.pace, &mut self.rng).await {
            let partition = self.rng.random_range(0..self.context.plan.partitions);
            let (key, records, batch) = self.next_batch(partition, None);
            let result = self.client.append(TOPIC, partition, batch, &options).await;
            self.context.end(key, partition, records, result);
        }
    }

    /// Writes conditionally at the expected end of a partition.
    ///
    /// A mismatch error tells the current end, which other producers move all the time. A batch
    /// that failed must never appear.
    async fn conditional(mut self) {
        let producer = self.client.producer(ProducerOptions::default());
        let mut ends = vec![0; self.context.plan.partitions as usize];
        while self.context.pause(self.context.plan.pace, &mut self.rng).await {
            let partition = self.rng.random_range(0..self.context.plan.partitions);
            let end = &mut ends[partition as usize];
            let (key, records, batch) = self.next_batch(partition, None);
            let expected = Some(*end);
            self.context.recorder.add(HistoryEvent::Condition { key, expected, token: None });
            let options = AppendOptions::default().expecting(*end);
            let result = producer.append_with(TOPIC, partition, batch, &options).await;
            let next_offset = match &result {
                Ok(ack) => ack.next_offset,
                Err(error) => error.next_offset,
            };
            match &result {
                Ok(_) => self.context.marks.hit(CoverageMark::ConditionMet),
                Err(error) if error.is(ErrorReason::ExpectedOffsetMismatch) => {
                    self.context.marks.hit(CoverageMark::ConditionRefused);
                }
                Err(_) => {}
            }
            *end = next_offset.unwrap_or(*end);
            self.context.end(key, partition, records, result);
        }
    }

    /// Builds the next batch and records it as invoked.
    fn next_batch(&mut self, partition: u32, stream: Option<u32>) -> (BatchKey, u32, EncodedBatch) {
        let key = BatchKey { producer: self.producer, number: self.next };
        self.next += 1;
        let records = self.rng.random_range(1..=self.context.plan.records_max);
        let batch = payload::compressed(key, payload::build(key, records));
        self.context.recorder.add(HistoryEvent::Invoked { key, partition, records, stream });
        self.context.recorder.on_begin(partition);
        (key, records, batch)
    }
}

/// A reader of all partitions.
struct SimulatedReader {
    context: ClientContext,
    client: Client,
    id: u32,
    /// Next offset of each partition.
    next: Vec<u64>,
    rng: StdRng,
}

impl SimulatedReader {
    fn new(context: &ClientContext) -> Result<Self, Error> {
        let (id, client) = (context.id(), context.client()?);
        let next = vec![0; context.plan.partitions as usize];
        for partition in 0..context.plan.partitions {
            context.recorder.add(HistoryEvent::Opened { reader: id, partition, offset: 0 });
        }
        Ok(Self { context: context.clone(), client, id, next, rng: context.rng(id) })
    }

    fn starts(&self) -> Vec<ReadStart> {
        let places = (0..).zip(&self.next);
        places.map(|(at, next)| ReadStart::new(TOPIC, at, Position::Offset(*next))).collect()
    }

    fn take(&mut self, batches: &Batches) {
        let partition = batches.partition;
        let next = &mut self.next[partition as usize];
        let (events, end) = payload::events(self.id, partition, &batches.batches, *next);
        *next = end;
        self.context.recorder.add_all(events);
        for stored in &batches.batches {
            let Some(time) = stored.append_time else { continue };
            let time_us = time.seconds.cast_unsigned() * 1_000_000
                + u64::from(time.nanos.cast_unsigned()) / 1_000;
            let offset = stored.first_offset;
            self.context.recorder.add(HistoryEvent::Stamped { partition, offset, time_us });
        }
    }

    /// Handles a failed read. If the log starts later, continues there. If the offset is beyond the
    /// log, records it for the checker.
    async fn failed(&mut self, error: &Error) {
        if error.is(ErrorReason::OffsetOutOfRange) {
            let partition = error.topic_partition.as_ref().map_or(0, |(_, partition)| *partition);
            let offset = self.next.get(partition as usize).copied().unwrap_or(0);
            let start = error.watermarks.unwrap_or_default().log_start_offset;
            let reader = self.id;
            if offset < start {
                self.context.marks.hit(CoverageMark::ReaderSentToLogStart);
                self.context.recorder.add(HistoryEvent::Opened {
                    reader,
                    partition,
                    offset: start,
                });
                self.next[partition as usize] = start;
            } else {
                self.context.recorder.add(HistoryEvent::OutOfRange { reader, partition, offset });
            }
        }
        self.context.pause(RETRY_PAUSE, &mut self.rng).await;
    }

    /// Reads through a subscription to the leaders.
    async fn subscribe(mut self) {
        while !self.context.is_stopped() {
            let consumer = self.client.consumer();
            let mut subscription = consumer.subscribe(self.starts(), ReadOptions::default());
            while !self.context.is_stopped() {
                match timeout(POLL, subscription.next_encoded()).await {
                    Ok(Some(Ok(ConsumerEvent::Data(batches)))) => self.take(&batches),
                    Ok(Some(Ok(
                        ConsumerEvent::CaughtUp { .. }
                        | ConsumerEvent::Heartbeat(_)
                        | ConsumerEvent::Restarted { .. },
                    )))
                    | Err(_) => {}
                    Ok(Some(Err(error))) => {
                        self.failed(&error).await;
                        break;
                    }
                    Ok(None) => break,
                }
            }
        }
    }

    /// Reads by long polls of the leaders or of random replicas.
    async fn poll(mut self, source: ReadSource) {
        let consumer = self.client.consumer();
        while !self.context.is_stopped() {
            let node = self.rng.random_range(1..=self.context.plan.machines());
            let preferred_node = Some(node);
            let read = ReadOptions { source, preferred_node, ..ReadOptions::default() };
            let options = FetchOptions { wait_max: POLL, read, ..FetchOptions::default() };
            match consumer.fetch_encoded(&self.starts(), &options).await {
                Ok(all) => all.iter().for_each(|batches| self.take(batches)),
                Err(error) => self.failed(&error).await,
            }
            self.context.pause(RETRY_PAUSE, &mut self.rng).await;
        }
    }

    /// Resolves the latest offset of random partitions.
    async fn probe(mut self) {
        let admin = self.client.admin();
        while self.context.pause(RETRY_PAUSE, &mut self.rng).await {
            let partition = self.rng.random_range(0..self.context.plan.partitions);
            self.context.recorder.add(HistoryEvent::LatestAsked { probe: self.id, partition });
            let partitions = [partition];
            if let Ok(offsets) = admin.resolve_offsets(TOPIC, &partitions, &Position::Latest).await
            {
                for resolved in offsets {
                    let (partition, offset) = (resolved.partition, resolved.offset);
                    self.context.recorder.add(HistoryEvent::Latest {
                        probe: self.id,
                        partition,
                        offset,
                    });
                }
            }
        }
    }
}
