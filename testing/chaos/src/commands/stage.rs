//! What the commands have in common: a folder, a cluster, a topic, a workload that can be stopped
//! and started again, and the end with its figures or its evidence.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use super::Common;
use crate::cluster::{Cluster, ClusterOptions};
use crate::settle::settle;
use crate::voice::Voice;
use crate::workload::{Scene, Shape, TOPIC, TopicPlan, Workload, progress};

/// How long a fresh cluster may take to form, and a healed one to be well again.
pub(super) const READY_MAX: Duration = Duration::from_secs(60);

/// How long the logs may take to be purged of what is written.
const PURGE_MAX: Duration = Duration::from_secs(60);

const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long partitions may be without an ack after everything was healed.
pub(super) const PROGRESS_MAX: Duration = Duration::from_secs(30);

/// Everything that a command works with.
pub(super) struct Stage {
    pub(super) voice: Voice,
    pub(super) cluster: Cluster,
    pub(super) scene: Arc<Scene>,
    pub(super) shape: Shape,
    workload: Option<Workload>,
    /// Where the readers of the next workload begin.
    from: Vec<u64>,
    deadline: Instant,
    folder: Folder,
}

enum Folder {
    Own(TempDir),
    Given(PathBuf),
}

impl Folder {
    fn new(given: Option<&PathBuf>) -> anyhow::Result<Self> {
        match given {
            Some(folder) => Ok(Self::Given(folder.clone())),
            None => {
                let folder = tempfile::Builder::new().prefix("helix-chaos-").tempdir();
                Ok(Self::Own(folder.context("make a folder")?))
            }
        }
    }

    fn path(&self) -> &Path {
        match self {
            Self::Own(folder) => folder.path(),
            Self::Given(folder) => folder,
        }
    }

    /// From now on it stays.
    fn keep(self) -> PathBuf {
        match self {
            Self::Own(folder) => folder.keep(),
            Self::Given(folder) => folder,
        }
    }
}

/// What a command wants beside the usual.
pub(super) struct Setting {
    /// [`TOPIC`](crate::workload::TOPIC) first.
    pub(super) topics: Vec<TopicPlan>,
    pub(super) has_client_proxies: bool,
    /// A file system for each node, where that can be had.
    pub(super) disk_bytes: Option<u64>,
}

impl Stage {
    /// Data shards that the topic's partitions are in.
    pub(super) async fn shards(&self) -> anyhow::Result<Vec<u32>> {
        let client = self.scene.client()?;
        let mut shards = Vec::new();
        for partition in 0..self.scene.partitions {
            shards.push(client.route(TOPIC, partition).await?.shard_id);
        }
        Ok(shards)
    }

    /// Waits until every running node has purged its logs of the entry after each of these.
    pub(super) async fn purged(&mut self, had: &BTreeMap<u32, u64>) -> anyhow::Result<()> {
        let deadline = Instant::now() + PURGE_MAX;
        while !self.cluster.has_purged(had).await {
            self.cluster.none_has_ended()?;
            if Instant::now() > deadline {
                bail!("STUCK: after {PURGE_MAX:?} the logs still have the entries after {had:?}");
            }
            sleep(LOOK_EVERY).await;
        }
        Ok(())
    }

    /// Starts a cluster and makes the topic.
    pub(super) async fn set(
        common: &Common,
        program: PathBuf,
        voice: Voice,
        shape: Shape,
        has_client_proxies: bool,
    ) -> anyhow::Result<Self> {
        let topics = vec![TopicPlan::kept(common.topic_partitions)];
        let setting = Setting { topics, has_client_proxies, disk_bytes: None };
        Self::set_with(common, program, voice, shape, setting).await
    }

    /// Starts a cluster and makes the topics.
    pub(super) async fn set_with(
        common: &Common,
        program: PathBuf,
        voice: Voice,
        shape: Shape,
        setting: Setting,
    ) -> anyhow::Result<Self> {
        let Setting { topics, has_client_proxies, disk_bytes } = setting;
        let folder = Folder::new(common.keep.as_ref())?;
        tokio::fs::create_dir_all(folder.path()).await.context("make the folder")?;
        let is_used = tokio::fs::try_exists(folder.path().join("node-1")).await?;
        ensure!(!is_used, "{} has data of an earlier run; choose another", folder.path().display());
        let (nodes, seed) = (common.nodes, common.seed);
        let history = folder.path().join("history.jsonl");
        let partitions: u32 = topics.iter().map(|topic| topic.partitions).sum();
        voice.say(format_args!("seed {seed}, {nodes} nodes, {partitions} partitions"));
        let folder_path = folder.path().to_owned();
        let options = ClusterOptions {
            program,
            nodes,
            folder: folder_path,
            has_client_proxies,
            log_kib: common.log_kib,
            disk_bytes,
        };
        let made = async {
            let mut cluster = Cluster::start(&options)?;
            cluster.healthy(READY_MAX).await.context("the cluster did not form")?;
            let scene = Scene::set(&cluster, &topics, seed, history).await?;
            anyhow::Ok((cluster, scene))
        };
        let (cluster, scene) = match made.await {
            Ok(made) => made,
            Err(error) => {
                let kept = folder.keep();
                return Err(error.context(format!("logs are kept in {}", kept.display())));
            }
        };
        voice.say("ready");
        Ok(Self {
            voice,
            cluster,
            scene,
            shape,
            workload: None,
            from: vec![0; partitions as usize],
            deadline: voice.started() + common.duration_max,
            folder,
        })
    }

    /// Whether no more should be begun.
    pub(super) fn is_over(&self) -> bool {
        Instant::now() >= self.deadline || self.scene.recorder.is_full()
    }

    /// How long there is until then.
    pub(super) fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Where the nodes' data is.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Starts producers and readers.
    pub(super) fn play(&mut self) -> anyhow::Result<()> {
        self.scene.meet(&self.cluster);
        self.workload = Some(Workload::start(&self.scene, &self.shape, &self.from)?);
        Ok(())
    }

    /// Waits until every partition has a new ack; says how long that took if it was long.
    pub(super) async fn progress(&mut self) -> anyhow::Result<()> {
        let begin = Instant::now();
        progress(&self.scene, &mut self.cluster, PROGRESS_MAX).await?;
        self.voice.say_if_long("  acks everywhere", begin);
        Ok(())
    }

    /// Brings producers and readers to rest, reads every replica, and judges.
    ///
    /// # Errors
    /// Something is wrong.
    pub(super) async fn settle(&mut self) -> anyhow::Result<()> {
        self.cluster.heal()?;
        if let Some(workload) = self.workload.take() {
            let begin = Instant::now();
            workload.stop().await?;
            self.voice.say_if_long("  producers and readers are at rest", begin);
        }
        let (verdict, ends) = settle(&mut self.cluster, &self.scene, self.voice).await?;
        self.from = ends;
        self.voice.say(format_args!("checked: {verdict}"));
        ensure!(verdict.is_good(), "promises were broken");
        Ok(())
    }

    /// Asks every node to stop, one after the other, and starts it again.
    pub(super) async fn restart_all(&mut self) -> anyhow::Result<()> {
        for id in self.cluster.ids() {
            self.cluster.terminate(id).await?;
            self.cluster.start_node(id)?;
            self.cluster.healthy(READY_MAX).await?;
        }
        self.voice.say("every node was restarted");
        Ok(())
    }

    /// The figures of the workload.
    pub(super) fn figures(&self) {
        let stats = &self.scene.stats;
        let of = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
        let acked: u64 = stats.acks().iter().sum();
        self.voice.say(format_args!(
            "{acked} batches with {} records acked, {} of them said to be there already; {} \
             sessions broken, {} reads failed, {} batches read from replicas directly; {} times \
             was the front of a log seen to go, and {} readers were there; {} times did a shard of \
             a node repair itself",
            of(&stats.records),
            of(&stats.duplicates),
            of(&stats.broken_sessions),
            of(&stats.failed_reads),
            of(&stats.replica_reads),
            of(&stats.moved_starts),
            of(&stats.sent_on),
            of(&stats.repairs),
        ));
    }

    /// The end: keeps the evidence if there was an error, else nothing but what was asked for.
    pub(super) async fn end(self, result: anyhow::Result<()>) -> anyhow::Result<()> {
        let Self { cluster, scene, folder, voice, .. } = self;
        // Nodes end and file systems are unmounted before their folder goes.
        drop(cluster);
        let Err(error) = result else { return Ok(()) };
        let folder = folder.keep();
        match scene.recorder.save() {
            Ok(history) => voice.say(format_args!("the history is in {}", history.display())),
            Err(lost) => voice.say(format_args!("the history could not be written: {lost:#}")),
        }
        voice.say(format_args!(
            "data and logs are in {}; the data of a node with a disk of its own is in its image",
            folder.display()
        ));
        Err(error)
    }
}
