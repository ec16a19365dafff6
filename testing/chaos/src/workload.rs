//! Workload: producers and readers as in an application, through `helix-client`.
//!
//! All their requests and responses go into the history.

mod produce;
mod read;
mod retention;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::bail;
use helix_checker::HistoryEvent;
use helix_client::{Admin, Client, Config, NewTopic, TlsOptions, TokenSource};
use helix_proto::log::v1::{StoredBatch, TopicConfig};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::cluster::{ChaosCluster, StartCounts};
use crate::history::ChaosRecorder;
use crate::node_client::NodeClient;

pub(crate) use read::is_out_of_range;
pub(crate) use retention::RetentionRule;
use retention::RetentionTracker;

/// Topic that always exists and keeps all records.
pub(crate) const TOPIC: &str = "chaos";

/// Longest time for a request with its retries, or for a batch of a session.
const REQUEST_MAX: Duration = Duration::from_secs(20);

/// Longest wait for producers and readers to stop. A batch ends within `REQUEST_MAX`, but a
/// producer may need an identity or a session first.
const REST_MAX: Duration = Duration::from_secs(60);

/// Topic and the rule by which its records may be dropped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TopicPlan {
    pub(crate) name: &'static str,
    pub(crate) partitions: u32,
    pub(crate) keep: RetentionRule,
}

impl TopicPlan {
    /// Topic that keeps all records.
    pub(crate) fn kept(partitions: u32) -> Self {
        Self { name: TOPIC, partitions, keep: RetentionRule::All }
    }
}

/// Partition of a topic. Its index over all topics is its number in the history.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TopicPartition {
    pub(crate) topic: &'static str,
    pub(crate) partition: u32,
    pub(crate) keep: RetentionRule,
}

/// State shared by all producers and readers.
#[derive(Debug)]
pub(crate) struct WorkloadContext {
    pub(crate) recorder: ChaosRecorder,
    /// Partitions of [`TOPIC`], which come first.
    pub(crate) partitions: u32,
    all_partitions: Vec<TopicPartition>,
    trackers: Vec<Mutex<RetentionTracker>>,
    pub(crate) stats: WorkloadStats,
    /// Source of ids for producers, streams, readers and sessions.
    ids: AtomicU32,
    nodes: Mutex<NodeAddresses>,
    starts: StartCounts,
    tls: Option<TlsOptions>,
    seed: u64,
}

/// Addresses of the current nodes, and a client for each.
#[derive(Debug, Clone, Default)]
struct NodeAddresses {
    endpoints: Vec<String>,
    node_clients: Vec<NodeClient>,
}

/// Counters beside the history.
#[derive(Debug, Default)]
pub(crate) struct WorkloadStats {
    /// Acks by partition.
    acks: Vec<AtomicU64>,
    /// Acked records.
    pub(crate) records: AtomicU64,
    /// Acks of batches that were already in the log.
    pub(crate) duplicates: AtomicU64,
    /// Sessions that failed.
    pub(crate) broken_sessions: AtomicU64,
    /// Failed reads, which are retried.
    pub(crate) failed_reads: AtomicU64,
    /// Readers that moved to the log start because their records had been dropped.
    pub(crate) moved_readers: AtomicU64,
    /// Log start changes that readers saw.
    pub(crate) moved_starts: AtomicU64,
    /// Shards of nodes that repaired themselves.
    pub(crate) repairs: AtomicU64,
    /// Batches read directly from replicas, leader or not.
    pub(crate) replica_reads: AtomicU64,
}

impl WorkloadStats {
    pub(crate) fn acks(&self) -> Vec<u64> {
        self.acks.iter().map(|acks| acks.load(Ordering::Relaxed)).collect()
    }
}

/// Number and speed of producers and readers.
#[derive(Debug, Clone)]
pub(crate) struct WorkloadShape {
    /// Producers with a session each, spread over all partitions.
    pub(crate) sessions: u32,
    /// Idempotent producers that wait for each ack.
    pub(crate) unary: u32,
    /// Producers without an identity.
    pub(crate) plain: u32,
    /// Producers that append only at an expected offset.
    pub(crate) conditional: u32,
    /// Runs readers and offset probes.
    pub(crate) has_readers: bool,
    /// Most records of a batch.
    pub(crate) records_max: u32,
    /// Most records of a batch in partitions with retention.
    pub(crate) bulk_records_max: u32,
    /// Mean pause of a producer between two batches.
    pub(crate) pace: Duration,
}

impl Default for WorkloadShape {
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

impl WorkloadContext {
    /// Creates the topics, [`TOPIC`] first, and records the history to a file. The cluster must be
    /// healthy.
    pub(crate) async fn create(
        cluster: &ChaosCluster,
        topics: &[TopicPlan],
        seed: u64,
        history: PathBuf,
    ) -> anyhow::Result<Arc<Self>> {
        let mut all_partitions = Vec::new();
        for TopicPlan { name, partitions, keep } in topics.iter().copied() {
            all_partitions.extend((0..partitions).map(|partition| TopicPartition {
                topic: name,
                partition,
                keep,
            }));
        }
        let acks = all_partitions.iter().map(|_| AtomicU64::new(0)).collect();
        let context = Self {
            recorder: ChaosRecorder::new(history),
            partitions: topics.first().map_or(0, |topic| topic.partitions),
            trackers: all_partitions
                .iter()
                .map(|target| Mutex::new(RetentionTracker::new(target.keep)))
                .collect(),
            all_partitions,
            stats: WorkloadStats { acks, ..WorkloadStats::default() },
            ids: AtomicU32::new(1),
            nodes: Mutex::default(),
            starts: cluster.starts(),
            tls: cluster.client_tls(),
            seed,
        };
        context.update_nodes(cluster);
        let admin = context.client()?.admin();
        for topic in topics {
            let config = config(topic.keep);
            let topic = NewTopic { config, ..NewTopic::new(topic.name, topic.partitions) };
            admin.create_topic(&topic).await?;
        }
        Ok(Arc::new(context))
    }

    /// Updates the addresses of the current nodes.
    pub(crate) fn update_nodes(&self, cluster: &ChaosCluster) {
        let (endpoints, node_clients) = (cluster.endpoints(), cluster.node_clients());
        *self.nodes.lock().unwrap_or_else(PoisonError::into_inner) =
            NodeAddresses { endpoints, node_clients };
    }

    fn nodes(&self) -> NodeAddresses {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns all partitions with their numbers.
    pub(crate) fn all_partitions(&self) -> impl Iterator<Item = (u32, TopicPartition)> {
        (0..).zip(self.all_partitions.iter().copied())
    }

    pub(crate) fn topic_partition(&self, number: u32) -> TopicPartition {
        self.all_partitions[number as usize]
    }

    /// Returns the number of a partition of this workload.
    fn number(&self, topic: &str, partition: u32) -> Option<u32> {
        let mut all = self.all_partitions();
        all.find(|(_, target)| (target.topic, target.partition) == (topic, partition))
            .map(|it| it.0)
    }

    fn tracker(&self, number: u32) -> MutexGuard<'_, RetentionTracker> {
        self.trackers[number as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the start of the first known batch at or after this offset.
    pub(crate) fn next_boundary(&self, number: u32, offset: u64) -> Option<u64> {
        self.tracker(number).next_boundary(offset)
    }

    /// Notes the batches that a full read found.
    pub(crate) fn record_final_read(&self, number: u32, batches: &[StoredBatch]) {
        let mut tracker = self.tracker(number);
        for stored in batches {
            let bytes = stored.batch.as_ref().map_or(0, |batch| batch.payload.len() as u64);
            tracker.on_read(stored.first_offset, bytes);
        }
    }

    /// Notes that all replicas were read while the workload was stopped.
    pub(crate) fn on_all_read(&self) {
        self.all_partitions().for_each(|(number, _)| self.tracker(number).on_all_read());
    }

    /// Notes a reported log start; a new one goes into the history.
    pub(crate) fn note_log_start(&self, number: u32, log_start: u64) {
        let mut tracker = self.tracker(number);
        if let Some(allowed) = tracker.on_log_start(log_start, Instant::now()) {
            let (partition, offset) = (number, log_start);
            let may_trim = HistoryEvent::MayTrim { partition, offset: allowed };
            self.recorder.add_all([may_trim, HistoryEvent::Starts { partition, offset }]);
            self.stats.moved_starts.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Trims one partition between two batches, at this part of its length. True if acknowledged.
    pub(crate) async fn trim(&self, admin: &Admin, number: u32, part: f64) -> bool {
        let Some(offset) = self.tracker(number).boundary_at(part) else { return false };
        self.tracker(number).on_trim(offset);
        let partition = number;
        self.recorder.add(HistoryEvent::MayTrim { partition, offset });
        let target = self.topic_partition(number);
        match admin.trim(target.topic, target.partition, offset).await {
            Ok(watermarks) => {
                self.recorder.add(HistoryEvent::Trimmed { partition, offset });
                self.note_log_start(number, watermarks.log_start_offset);
                true
            }
            Err(_) => false,
        }
    }

    /// Returns a unique id.
    pub(crate) fn id(&self) -> u32 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns a client with its own connections.
    pub(crate) fn client(&self) -> anyhow::Result<Client> {
        let id = self.id();
        let mut endpoints = self.nodes().endpoints;
        let count = endpoints.len();
        endpoints.rotate_left(id as usize % count);
        let config = Config {
            request_timeout: REQUEST_MAX,
            seed: Some(self.seed ^ u64::from(id)),
            token: TokenSource::from_env()?,
            tls: self.tls.clone(),
            ..Config::new(endpoints)
        };
        Ok(Client::new(config)?)
    }

    fn rng(&self, id: u32) -> StdRng {
        StdRng::seed_from_u64(self.seed.wrapping_mul(31).wrapping_add(u64::from(id)))
    }
}

/// Returns the topic configuration for a rule.
fn config(keep: RetentionRule) -> TopicConfig {
    match keep {
        RetentionRule::All | RetentionRule::TrimOnly => TopicConfig::default(),
        RetentionRule::Bytes(bytes) => {
            TopicConfig { retention_bytes: Some(bytes), ..TopicConfig::default() }
        }
        RetentionRule::Age(age) => {
            TopicConfig { retention_time: age.try_into().ok(), ..TopicConfig::default() }
        }
    }
}

/// Signal for all clients to stop.
type StopSignal = watch::Receiver<bool>;

/// Running producers and readers.
#[derive(Debug)]
pub(crate) struct ChaosWorkload {
    stop: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

impl ChaosWorkload {
    /// Starts all clients. In the first workload of a run readers begin at 0, later at `from`.
    pub(crate) fn start(
        context: &Arc<WorkloadContext>,
        shape: &WorkloadShape,
        from: &[u64],
    ) -> anyhow::Result<Self> {
        let (stop, stopped) = watch::channel(false);
        let mut tasks = JoinSet::new();
        let count = u32::try_from(context.all_partitions.len())?;
        for session in 0..shape.sessions {
            let partition = session % count;
            let writer = produce::HistoryProducer::new(context, shape, stopped.clone())?;
            tasks.spawn(writer.stream(partition));
        }
        for _ in 0..shape.unary {
            tasks.spawn(
                produce::HistoryProducer::new(context, shape, stopped.clone())?.one_by_one(),
            );
        }
        for _ in 0..shape.plain {
            tasks.spawn(produce::HistoryProducer::new(context, shape, stopped.clone())?.plain());
        }
        for _ in 0..shape.conditional {
            tasks.spawn(
                produce::HistoryProducer::new(context, shape, stopped.clone())?.conditional(),
            );
        }
        if shape.has_readers {
            read::spawn(&mut tasks, context, from, &stopped)?;
        }
        Ok(Self { stop, tasks })
    }

    /// Stops all clients and waits until every batch has its outcome.
    ///
    /// # Errors
    /// A client did not stop or panicked.
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
            Err(_) => bail!("a client did not stop within {REST_MAX:?}"),
        }
    }
}

/// Waits until every partition has a new ack.
///
/// # Errors
/// A partition had no ack within `limit`, or a node has exited.
pub(crate) async fn progress(
    context: &WorkloadContext,
    cluster: &mut ChaosCluster,
    limit: Duration,
) -> anyhow::Result<()> {
    let begin = Instant::now();
    let before = context.stats.acks();
    loop {
        let acks = context.stats.acks();
        let stuck: Vec<_> =
            (0..acks.len()).filter(|index| acks[*index] == before[*index]).collect();
        if stuck.is_empty() {
            return Ok(());
        }
        cluster.check_running()?;
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

/// Waits for about `mean`, or until stopped. True to continue.
async fn pause(stop: &mut StopSignal, mean: Duration, rng: &mut StdRng) -> bool {
    let wait = mean.mul_f64(rng.random_range(0.0..2.0));
    // A dropped sender also means stop.
    let _ = timeout(wait, stop.wait_for(|stop| *stop)).await;
    !is_stopped(stop)
}

fn is_stopped(stop: &StopSignal) -> bool {
    *stop.borrow() || stop.has_changed().is_err()
}
