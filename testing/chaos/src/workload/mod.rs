//! Producers and readers as an application has them, through the client that it would use.
//! Everything that they do and are told goes into the history; they stop when they are told to.

mod ledger;
mod produce;
mod read;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::bail;
use helix_checker::Event;
use helix_client::{Admin, Client, Config, NewTopic};
use helix_proto::log::v1::{StoredBatch, TopicConfig};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::cluster::{Cluster, Starts};
use crate::direct::Direct;
use crate::recorder::Recorder;

pub(crate) use ledger::Keep;
use ledger::Ledger;
pub(crate) use read::is_out_of_range;

/// The topic that is always there, of which nothing is ever dropped.
pub(crate) const TOPIC: &str = "chaos";

/// Longest time for one call with its retries, and for a batch of a session.
const REQUEST_MAX: Duration = Duration::from_secs(20);

/// How long producers and readers may take to come to rest. A batch ends within `REQUEST_MAX`, and
/// a producer may need an identity or a session before it.
const REST_MAX: Duration = Duration::from_secs(60);

/// A topic, and what may go from it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TopicPlan {
    pub(crate) name: &'static str,
    pub(crate) partitions: u32,
    pub(crate) keep: Keep,
}

impl TopicPlan {
    /// The one of which nothing goes.
    pub(crate) fn kept(partitions: u32) -> Self {
        Self { name: TOPIC, partitions, keep: Keep::All }
    }
}

/// A partition: its number in the history is its place among all.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) topic: &'static str,
    pub(crate) partition: u32,
    pub(crate) keep: Keep,
}

/// What everyone who writes or reads shares.
#[derive(Debug)]
pub(crate) struct Scene {
    pub(crate) recorder: Recorder,
    /// Partitions of [`TOPIC`], which are the first of all.
    pub(crate) partitions: u32,
    places: Vec<Place>,
    ledgers: Vec<Mutex<Ledger>>,
    pub(crate) stats: Stats,
    /// Source of the numbers of producers, streams, readers and sessions.
    ids: AtomicU32,
    nodes: Mutex<Nodes>,
    starts: Starts,
    seed: u64,
}

/// The nodes that there are.
#[derive(Debug, Clone, Default)]
struct Nodes {
    endpoints: Vec<String>,
    direct: Vec<Direct>,
}

/// What is counted beside the history.
#[derive(Debug, Default)]
pub(crate) struct Stats {
    /// Acks by partition.
    acks: Vec<AtomicU64>,
    /// Records that were acked.
    pub(crate) records: AtomicU64,
    /// Acks that said that the batch was there already.
    pub(crate) duplicates: AtomicU64,
    /// Sessions that ended with an error.
    pub(crate) broken_sessions: AtomicU64,
    /// Reads that failed for now.
    pub(crate) failed_reads: AtomicU64,
    /// Readers that were sent to a log's start, since what they were to read had gone.
    pub(crate) sent_on: AtomicU64,
    /// Log starts that moved, as readers were told.
    pub(crate) moved_starts: AtomicU64,
    /// Shards of nodes that repaired themselves.
    pub(crate) repairs: AtomicU64,
    /// Batches that replicas gave directly, leader or not.
    pub(crate) replica_reads: AtomicU64,
}

impl Stats {
    pub(crate) fn acks(&self) -> Vec<u64> {
        self.acks.iter().map(|acks| acks.load(Ordering::Relaxed)).collect()
    }
}

/// Who writes, who reads, and how fast.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    /// Producers with a session each, over all partitions in turn.
    pub(crate) sessions: u32,
    /// Idempotent producers that wait for each ack.
    pub(crate) unary: u32,
    /// Producers without an identity.
    pub(crate) plain: u32,
    /// Producers that append only at the offset that they expect.
    pub(crate) conditional: u32,
    /// Whether there are readers and probes.
    pub(crate) has_readers: bool,
    /// Records of a batch, at most.
    pub(crate) records_max: u32,
    /// The same where retention is to have something to drop.
    pub(crate) bulk_records_max: u32,
    /// Mean pause of a producer between two batches.
    pub(crate) pace: Duration,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            sessions: 6,
            unary: 3,
            plain: 2,
            conditional: 2,
            has_readers: true,
            records_max: 8,
            bulk_records_max: 100,
            pace: Duration::from_millis(20),
        }
    }
}

impl Scene {
    /// Makes the topics, [`TOPIC`] first. The cluster must be healthy. The history goes into that
    /// file.
    pub(crate) async fn set(
        cluster: &Cluster,
        topics: &[TopicPlan],
        seed: u64,
        history: PathBuf,
    ) -> anyhow::Result<Arc<Self>> {
        let mut places = Vec::new();
        for TopicPlan { name, partitions, keep } in topics.iter().copied() {
            places.extend((0..partitions).map(|partition| Place { topic: name, partition, keep }));
        }
        let acks = places.iter().map(|_| AtomicU64::new(0)).collect();
        let scene = Self {
            recorder: Recorder::new(history),
            partitions: topics.first().map_or(0, |topic| topic.partitions),
            ledgers: places.iter().map(|place| Mutex::new(Ledger::new(place.keep))).collect(),
            places,
            stats: Stats { acks, ..Stats::default() },
            ids: AtomicU32::new(1),
            nodes: Mutex::default(),
            starts: cluster.starts(),
            seed,
        };
        scene.meet(cluster);
        let admin = scene.client()?.admin();
        for topic in topics {
            let config = config(topic.keep);
            let topic = NewTopic { config, ..NewTopic::new(topic.name, topic.partitions) };
            admin.create_topic(&topic).await?;
        }
        Ok(Arc::new(scene))
    }

    /// Takes note of the nodes that there are now.
    pub(crate) fn meet(&self, cluster: &Cluster) {
        let (endpoints, direct) = (cluster.endpoints(), cluster.direct());
        *self.nodes.lock().unwrap_or_else(PoisonError::into_inner) = Nodes { endpoints, direct };
    }

    fn nodes(&self) -> Nodes {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// All partitions with their numbers.
    pub(crate) fn places(&self) -> impl Iterator<Item = (u32, Place)> {
        (0..).zip(self.places.iter().copied())
    }

    pub(crate) fn place(&self, number: u32) -> Place {
        self.places[number as usize]
    }

    /// A partition's number, if it is one of ours.
    fn number(&self, topic: &str, partition: u32) -> Option<u32> {
        let mut all = self.places();
        all.find(|(_, place)| (place.topic, place.partition) == (topic, partition)).map(|it| it.0)
    }

    fn ledger(&self, number: u32) -> MutexGuard<'_, Ledger> {
        self.ledgers[number as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a batch begins, from this offset on, as far as it is known.
    pub(crate) fn next_border(&self, number: u32, offset: u64) -> Option<u64> {
        self.ledger(number).next_border(offset)
    }

    /// A final read found these.
    pub(crate) fn found(&self, number: u32, batches: &[StoredBatch]) {
        let mut ledger = self.ledger(number);
        for stored in batches {
            let bytes = stored.batch.as_ref().map_or(0, |batch| batch.payload.len() as u64);
            ledger.on_read(stored.first_offset, bytes);
        }
    }

    /// All replicas were read while nobody wrote.
    pub(crate) fn at_rest(&self) {
        self.places().for_each(|(number, _)| self.ledger(number).at_rest());
    }

    /// Someone was told that a log starts here: that goes into the history if it is news.
    pub(crate) fn starts_at(&self, number: u32, log_start: u64) {
        let mut ledger = self.ledger(number);
        if let Some(allowed) = ledger.on_told(log_start, Instant::now()) {
            let (partition, offset) = (number, log_start);
            let may_trim = Event::MayTrim { partition, offset: allowed };
            self.recorder.add_all([may_trim, Event::Starts { partition, offset }]);
            self.stats.moved_starts.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Trims one partition between two batches, part of the way to its end. True if that was
    /// acknowledged.
    pub(crate) async fn trim(&self, admin: &Admin, number: u32, part: f64) -> bool {
        let Some(offset) = self.ledger(number).cut(part) else { return false };
        self.ledger(number).on_trim(offset);
        let partition = number;
        self.recorder.add(Event::MayTrim { partition, offset });
        let place = self.place(number);
        match admin.trim(place.topic, place.partition, offset).await {
            Ok(watermarks) => {
                self.recorder.add(Event::Trimmed { partition, offset });
                self.starts_at(number, watermarks.log_start_offset);
                true
            }
            Err(_) => false,
        }
    }

    /// A number that nobody else has.
    pub(crate) fn id(&self) -> u32 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    /// A client with connections of its own.
    pub(crate) fn client(&self) -> anyhow::Result<Client> {
        let id = self.id();
        let mut endpoints = self.nodes().endpoints;
        let count = endpoints.len();
        endpoints.rotate_left(id as usize % count);
        let config = Config {
            request_timeout: REQUEST_MAX,
            seed: Some(self.seed ^ u64::from(id)),
            ..Config::new(endpoints)
        };
        Ok(Client::new(config)?)
    }

    fn rng(&self, id: u32) -> StdRng {
        StdRng::seed_from_u64(self.seed.wrapping_mul(31).wrapping_add(u64::from(id)))
    }
}

/// What the topic is told of what may go.
fn config(keep: Keep) -> TopicConfig {
    match keep {
        Keep::All | Keep::Untrimmed => TopicConfig::default(),
        Keep::Bytes(bytes) => {
            TopicConfig { retention_bytes: Some(bytes), ..TopicConfig::default() }
        }
        Keep::Newer(age) => {
            TopicConfig { retention_time: age.try_into().ok(), ..TopicConfig::default() }
        }
    }
}

/// Told to everyone: go on, or come to an end.
type Stop = watch::Receiver<bool>;

/// Running producers and readers.
#[derive(Debug)]
pub(crate) struct Workload {
    stop: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

impl Workload {
    /// Starts everyone. Readers begin at the start of each partition in the first workload of a
    /// run, later ones at `from`.
    pub(crate) fn start(scene: &Arc<Scene>, shape: &Shape, from: &[u64]) -> anyhow::Result<Self> {
        let (stop, stopped) = watch::channel(false);
        let mut tasks = JoinSet::new();
        let count = u32::try_from(scene.places.len())?;
        for place in 0..shape.sessions {
            let partition = place % count;
            let writer = produce::Writer::new(scene, shape, stopped.clone())?;
            tasks.spawn(writer.stream(partition));
        }
        for _ in 0..shape.unary {
            tasks.spawn(produce::Writer::new(scene, shape, stopped.clone())?.one_by_one());
        }
        for _ in 0..shape.plain {
            tasks.spawn(produce::Writer::new(scene, shape, stopped.clone())?.plain());
        }
        for _ in 0..shape.conditional {
            tasks.spawn(produce::Writer::new(scene, shape, stopped.clone())?.conditional());
        }
        if shape.has_readers {
            read::spawn(&mut tasks, scene, from, &stopped)?;
        }
        Ok(Self { stop, tasks })
    }

    /// Tells everyone to stop and waits until all batches have their outcome.
    ///
    /// # Errors
    /// Someone did not come to an end, or panicked.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        self.stop.send_replace(true);
        let rest = async {
            while let Some(task) = self.tasks.join_next().await {
                task?;
            }
            anyhow::Ok(())
        };
        match timeout(REST_MAX, rest).await {
            Ok(result) => result,
            Err(_) => bail!("a client did not come to an end within {REST_MAX:?}"),
        }
    }
}

/// Waits until every partition has a new ack.
///
/// # Errors
/// One had none within `limit`, or a node has ended.
pub(crate) async fn progress(
    scene: &Scene,
    cluster: &mut Cluster,
    limit: Duration,
) -> anyhow::Result<()> {
    let begin = Instant::now();
    let before = scene.stats.acks();
    loop {
        let acks = scene.stats.acks();
        let stuck: Vec<_> =
            (0..acks.len()).filter(|place| acks[*place] == before[*place]).collect();
        if stuck.is_empty() {
            return Ok(());
        }
        cluster.none_has_ended()?;
        if begin.elapsed() > limit {
            let leaders = cluster.leaders().await;
            let level = cluster.level().await.err();
            let level = level.map_or_else(|| "all level".to_owned(), |error| format!("{error:#}"));
            bail!(
                "NO PROGRESS: no ack in partitions {stuck:?} within {limit:?} after everything \
                 was healed; leaders (shard: node, term) {leaders:?}; {level}"
            );
        }
        sleep(Duration::from_millis(10)).await;
    }
}

/// Waits for about this long, or until told to stop. True to go on.
async fn pause(stop: &mut Stop, mean: Duration, rng: &mut StdRng) -> bool {
    let wait = mean.mul_f64(rng.random_range(0.0..2.0));
    // A sender that is gone is a stop too.
    let _ = timeout(wait, stop.wait_for(|stop| *stop)).await;
    !is_stopped(stop)
}

fn is_stopped(stop: &Stop) -> bool {
    *stop.borrow() || stop.has_changed().is_err()
}
