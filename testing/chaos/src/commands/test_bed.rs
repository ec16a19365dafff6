//! Common parts of the commands: a directory, a cluster, topics, a workload that can be stopped and
//! restarted, and the final statistics or evidence.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use super::CommonArgs;
use crate::cluster::{ChaosCluster, ClusterOptions};
use crate::final_check::check_replicas;
use crate::logger::Logger;
use crate::workload::{ChaosWorkload, TOPIC, TopicPlan, WorkloadContext, WorkloadShape, progress};

/// Longest wait for a new cluster to form, or a healed one to be healthy.
pub(super) const READY_MAX: Duration = Duration::from_secs(60);

/// Longest wait for the logs to be purged.
const PURGE_MAX: Duration = Duration::from_secs(60);

const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Longest time that a partition may be without an ack after everything was healed.
pub(super) const PROGRESS_MAX: Duration = Duration::from_secs(30);

/// Cluster and workload of a command.
pub(super) struct TestBed {
    pub(super) logger: Logger,
    pub(super) cluster: ChaosCluster,
    pub(super) context: Arc<WorkloadContext>,
    pub(super) shape: WorkloadShape,
    workload: Option<ChaosWorkload>,
    /// Start offsets of the readers in the next workload.
    from: Vec<u64>,
    deadline: Instant,
    dir: RunDir,
}

enum RunDir {
    Own(TempDir),
    Given(PathBuf),
}

impl RunDir {
    fn new(given: Option<&PathBuf>) -> anyhow::Result<Self> {
        match given {
            Some(dir) => Ok(Self::Given(dir.clone())),
            None => {
                let dir = tempfile::Builder::new().prefix("helix-chaos-").tempdir();
                Ok(Self::Own(dir.context("create a directory")?))
            }
        }
    }

    fn path(&self) -> &Path {
        match self {
            Self::Own(dir) => dir.path(),
            Self::Given(dir) => dir,
        }
    }

    /// Keeps the directory and returns its path.
    fn keep(self) -> PathBuf {
        match self {
            Self::Own(dir) => dir.keep(),
            Self::Given(dir) => dir,
        }
    }
}

/// Options of a test bed.
pub(super) struct TestBedOptions {
    /// [`TOPIC`](crate::workload::TOPIC) first.
    pub(super) topics: Vec<TopicPlan>,
    pub(super) has_client_proxies: bool,
    /// Size of a file system for each node, if file systems can be mounted.
    pub(super) disk_bytes: Option<u64>,
    /// KiB of log that nodes keep for lagging replicas, instead of `--log-kib`.
    pub(super) catch_up_kib: Option<u64>,
}

impl TestBed {
    /// Returns the data shards of the topic's partitions.
    pub(super) async fn shards(&self) -> anyhow::Result<Vec<u32>> {
        let client = self.context.client()?;
        let mut shards = Vec::new();
        for partition in 0..self.context.partitions {
            shards.push(client.route(TOPIC, partition).await?.shard_id);
        }
        Ok(shards)
    }

    /// Waits until every running node has purged the entry after each of these from its logs.
    pub(super) async fn wait_until_purged(
        &mut self,
        had: &BTreeMap<u32, u64>,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + PURGE_MAX;
        while !self.cluster.has_purged(had).await {
            self.cluster.check_running()?;
            if Instant::now() > deadline {
                bail!("STUCK: after {PURGE_MAX:?} the logs still have the entries after {had:?}");
            }
            sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Starts a cluster and creates the topic.
    pub(super) async fn start(
        common: &CommonArgs,
        program: PathBuf,
        logger: Logger,
        shape: WorkloadShape,
        has_client_proxies: bool,
    ) -> anyhow::Result<Self> {
        let topics = vec![TopicPlan::kept(common.topic_partitions)];
        let (disk_bytes, catch_up_kib) = (None, None);
        let bed_options = TestBedOptions { topics, has_client_proxies, disk_bytes, catch_up_kib };
        Self::start_with(common, program, logger, shape, bed_options).await
    }

    /// Starts a cluster and creates the topics.
    pub(super) async fn start_with(
        common: &CommonArgs,
        program: PathBuf,
        logger: Logger,
        shape: WorkloadShape,
        bed_options: TestBedOptions,
    ) -> anyhow::Result<Self> {
        let TestBedOptions { topics, has_client_proxies, disk_bytes, catch_up_kib } = bed_options;
        let dir = RunDir::new(common.keep.as_ref())?;
        tokio::fs::create_dir_all(dir.path()).await.context("create the directory")?;
        let is_used = tokio::fs::try_exists(dir.path().join("node-1")).await?;
        ensure!(
            !is_used,
            "{} has data of an earlier run; choose another directory",
            dir.path().display()
        );
        let (nodes, seed) = (common.nodes, common.seed);
        let history = dir.path().join("history.jsonl");
        let partitions: u32 = topics.iter().map(|topic| topic.partitions).sum();
        logger.log(format_args!("seed {seed}, {nodes} nodes, {partitions} partitions"));
        let dir_path = dir.path().to_owned();
        let options = ClusterOptions {
            program,
            nodes,
            dir: dir_path,
            has_client_proxies,
            log_kib: common.log_kib,
            catch_up_kib,
            shards: common.shards,
            election_timeout_ms: common.election_timeout_ms,
            disk_bytes,
            tls: common.tls,
        };
        let made = async {
            let mut cluster = ChaosCluster::start(&options)?;
            cluster.wait_until_healthy(READY_MAX).await.context("the cluster did not form")?;
            let context = WorkloadContext::create(&cluster, &topics, seed, history).await?;
            anyhow::Ok((cluster, context))
        };
        let (cluster, context) = match made.await {
            Ok(made) => made,
            Err(error) => {
                let kept = dir.keep();
                return Err(error.context(format!("logs are kept in {}", kept.display())));
            }
        };
        logger.log("ready");
        Ok(Self {
            logger,
            cluster,
            context,
            shape,
            workload: None,
            from: vec![0; partitions as usize],
            deadline: logger.started() + common.duration_max,
            dir,
        })
    }

    /// Reports whether no new fault should start.
    pub(super) fn is_over(&self) -> bool {
        Instant::now() >= self.deadline || self.context.recorder.is_full()
    }

    /// Returns the time left.
    pub(super) fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Returns the directory with the nodes' data.
    pub(super) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Starts producers and readers.
    pub(super) fn start_workload(&mut self) -> anyhow::Result<()> {
        self.context.update_nodes(&self.cluster);
        self.workload = Some(ChaosWorkload::start(&self.context, &self.shape, &self.from)?);
        Ok(())
    }

    /// Waits until every partition has a new ack; logs the time if it is long.
    pub(super) async fn progress(&mut self) -> anyhow::Result<()> {
        let begin = Instant::now();
        progress(&self.context, &mut self.cluster, PROGRESS_MAX).await?;
        self.logger.log_if_slow("  acks everywhere", begin);
        Ok(())
    }

    /// Stops the workload, reads every replica and judges the history.
    ///
    /// # Errors
    /// A promise was broken, or the cluster is stuck.
    pub(super) async fn check_replicas(&mut self) -> anyhow::Result<()> {
        self.cluster.heal()?;
        if let Some(workload) = self.workload.take() {
            let begin = Instant::now();
            workload.stop().await?;
            self.logger.log_if_slow("  producers and readers are at rest", begin);
        }
        let (verdict, ends) = check_replicas(&mut self.cluster, &self.context, self.logger).await?;
        self.from = ends;
        self.logger.log(format_args!("checked: {verdict}"));
        ensure!(verdict.is_good(), "promises were broken");
        Ok(())
    }

    /// Restarts every node, one after another.
    pub(super) async fn restart_all(&mut self) -> anyhow::Result<()> {
        for id in self.cluster.ids() {
            self.cluster.terminate(id).await?;
            self.cluster.start_node(id)?;
            self.cluster.wait_until_healthy(READY_MAX).await?;
        }
        self.logger.log("restarted every node");
        Ok(())
    }

    /// Logs the statistics of the workload.
    pub(super) fn log_stats(&self) {
        let stats = &self.context.stats;
        let of = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
        let acked: u64 = stats.acks().iter().sum();
        self.logger.log(format_args!(
            "{acked} batches with {} records acked, {} of them duplicates; {} \
             sessions broken, {} reads failed, {} batches read from replicas directly; {} log \
             start changes seen, {} readers moved to the log start; {} shards of nodes repaired \
             themselves",
            of(&stats.records),
            of(&stats.duplicates),
            of(&stats.broken_sessions),
            of(&stats.failed_reads),
            of(&stats.replica_reads),
            of(&stats.moved_starts),
            of(&stats.moved_readers),
            of(&stats.repairs),
        ));
    }

    /// Ends the run; keeps the evidence after an error.
    pub(super) async fn end(self, result: anyhow::Result<()>) -> anyhow::Result<()> {
        let Self { cluster, context, dir, logger, .. } = self;
        // Nodes are stopped and file systems unmounted before their directory is removed.
        drop(cluster);
        let Err(error) = result else { return Ok(()) };
        logger.log(format_args!("failed: {error:#}"));
        let dir = dir.keep();
        match context.recorder.save() {
            Ok(history) => logger.log(format_args!("the history is in {}", history.display())),
            Err(lost) => logger.log(format_args!("the history could not be written: {lost:#}")),
        }
        logger.log(format_args!(
            "data and logs are in {}; the data of a node with a disk of its own is in its image",
            dir.display()
        ));
        Err(error)
    }
}
