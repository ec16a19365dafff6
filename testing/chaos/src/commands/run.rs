//! `run`: faults of every kind at random moments, in rounds that end with all nodes killed at once.
//! After every round each replica is read whole and everything is checked.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinSet;

use super::Common;
use super::stage::{READY_MAX, Setting, Stage};
use crate::disk;
use crate::files::Shelf;
use crate::nemesis::strike;
use crate::schedule::{Budget, Fault, Kind, Schedule, Tempo, What};
use crate::voice::Voice;
use crate::workload::{Keep, Shape, TopicPlan};

/// Faults in a row that may begin before the cluster has got over the one before.
const HASTE_MAX: u32 = 3;

/// Options of `run`.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Cluster, seed and bounds.
    #[command(flatten)]
    pub common: Common,

    /// How often what happens.
    #[command(flatten)]
    pub faults: Faults,

    /// Faults of a round: the last one kills all nodes, then every replica is read
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub check_every: u32,

    /// Short faults, for a quick look
    #[arg(long)]
    pub short: bool,
}

/// How often what happens. A single node has no peers to be cut off from or replaced by.
#[derive(Debug, Clone, Default, Args)]
pub struct Faults {
    /// Times that nodes are killed, beside the end of each round
    #[arg(long, default_value_t = 60)]
    pub kills: u32,

    /// Times that nodes are stopped and continued
    #[arg(long, default_value_t = 30)]
    pub pauses: u32,

    /// Times that links between nodes are cut
    #[arg(long, default_value_t = 30)]
    pub partitions: u32,

    /// Times that a node is away until the others have purged their logs of what it lacks
    #[arg(long, default_value_t = 4)]
    pub absences: u32,

    /// Times that logs are trimmed while they are read
    #[arg(long, default_value_t = 20)]
    pub trims: u32,

    /// Times that a topic is deleted and made again while a node is down
    #[arg(long, default_value_t = 4)]
    pub deletions: u32,

    /// Times that a node is drained, restarted and taken back
    #[arg(long, default_value_t = 4)]
    pub drains: u32,

    /// Times that a node loses its disk and is replaced by itself
    #[arg(long, default_value_t = 4)]
    pub wipes: u32,

    /// Times that a node comes and another goes
    #[arg(long, default_value_t = 4)]
    pub members: u32,

    /// Times that the syncs of a node fail; needs strace
    #[arg(long, default_value_t = 4)]
    pub failed_syncs: u32,

    /// Times that a node's disk stalls; needs strace
    #[arg(long, default_value_t = 4)]
    pub stalls: u32,

    /// Times that a node's disk is full; needs the right to mount file systems
    #[arg(long, default_value_t = 4)]
    pub full_disks: u32,

    /// Times that a file of a node is damaged
    #[arg(long, default_value_t = 4)]
    pub damages: u32,

    /// Times that a segment of a node is put back as it was at an earlier time
    #[arg(long, default_value_t = 4)]
    pub restores: u32,
}

impl Faults {
    fn budget(&self) -> Budget {
        Budget::from([
            (Kind::Kill, self.kills),
            (Kind::Pause, self.pauses),
            (Kind::Cut, self.partitions),
            (Kind::Absence, self.absences),
            (Kind::Trim, self.trims),
            (Kind::Deletion, self.deletions),
            (Kind::Drain, self.drains),
            (Kind::Wipe, self.wipes),
            (Kind::Change, self.members),
            (Kind::FailedSync, self.failed_syncs),
            (Kind::SlowSync, self.stalls),
            (Kind::FullDisk, self.full_disks),
            (Kind::Damage, self.damages),
            (Kind::Restore, self.restores),
        ])
    }
}

/// Log of the nodes: one that is away for some seconds lacks what the others have purged, while
/// most kills and pauses end before.
const LOG_KIB: u64 = 4096;

/// Disk of each node where disks are to be full: what a node takes, its reserve, and some.
const DISK_BYTES: u64 = 2 << 30;

/// What is kept of the topics that lose their front by themselves.
const KEPT_BYTES: u64 = 2 << 20;
const KEPT_TIME: Duration = Duration::from_secs(20);

/// One topic keeps everything, of one the front is trimmed, of two it goes by itself.
fn topics(partitions: u32) -> Vec<TopicPlan> {
    vec![
        TopicPlan::kept(partitions),
        TopicPlan { name: "trimmed", partitions, keep: Keep::Untrimmed },
        TopicPlan { name: "by-bytes", partitions: 2, keep: Keep::Bytes(KEPT_BYTES) },
        TopicPlan { name: "by-time", partitions: 2, keep: Keep::Newer(KEPT_TIME) },
    ]
}

pub(super) async fn run(mut args: RunArgs, program: PathBuf) -> anyhow::Result<()> {
    args.common.log_kib.get_or_insert(LOG_KIB);
    let voice = Voice::new(false);
    let topics = topics(args.common.topic_partitions.div_ceil(2));
    let sessions = topics.iter().map(|topic| topic.partitions).sum();
    let shape = Shape { sessions, ..Shape::default() };
    let disk_bytes = (args.faults.full_disks > 0).then_some(DISK_BYTES);
    let setting = Setting { topics, has_client_proxies: true, disk_bytes };
    let mut stage = Stage::set_with(&args.common, program, voice, shape, setting).await?;
    // What cannot be done here has been said, and is not counted as if it had been.
    let faults = &mut args.faults;
    if faults.failed_syncs + faults.stalls > 0 && !disk::can_trace().await {
        (faults.failed_syncs, faults.stalls) = (0, 0);
    }
    if stage.cluster.ids().iter().any(|id| stage.cluster.disk(*id).is_none()) {
        faults.full_disks = 0;
    }
    let result = Run::new(&args, &stage).play(&mut stage).await;
    stage.end(result).await
}

struct Run<'a> {
    args: &'a RunArgs,
    schedule: Schedule,
    /// Segments as they were when all replicas were read the last time.
    shelf: Shelf,
    /// Trims that go on beside what comes after them.
    trims: JoinSet<u32>,
    trimmed: u32,
    done: BTreeMap<Kind, u32>,
    massacres: u32,
    begun: u32,
    in_haste: u32,
    /// Most bytes that compaction has written anew, in the processes of one moment.
    rewritten: u64,
    /// Most segments that were written by it, or for records from another replica.
    cold_segments: u64,
}

impl<'a> Run<'a> {
    fn new(args: &'a RunArgs, stage: &Stage) -> Self {
        let tempo = if args.short { Tempo::short() } else { Tempo::default() };
        let ids = stage.cluster.ids();
        Self {
            args,
            schedule: Schedule::new(args.common.seed, args.faults.budget(), tempo, &ids),
            shelf: Shelf::new(stage.folder().join("copies")),
            trims: JoinSet::new(),
            trimmed: 0,
            done: BTreeMap::new(),
            massacres: 0,
            begun: 0,
            in_haste: 0,
            rewritten: 0,
            cold_segments: 0,
        }
    }

    async fn play(mut self, stage: &mut Stage) -> anyhow::Result<()> {
        self.refill(stage).await?;
        stage.play()?;
        stage.progress().await?;
        while !stage.is_over() {
            let leaders: Vec<u64> =
                stage.cluster.leaders().await.values().map(|(node, _)| *node).collect();
            let nodes = stage.cluster.ids();
            self.look(stage).await;
            let ends_round = (self.begun + 1).is_multiple_of(self.args.check_every);
            let fault = if ends_round && self.schedule.left() > 0 {
                self.massacres += 1;
                self.schedule.massacre(&nodes)
            } else {
                let Some(fault) = self.schedule.next(&nodes, &leaders) else { break };
                fault
            };
            self.strike(stage, &fault, &leaders).await?;
            if ends_round || fault.spoils_a_copy() {
                self.settle(stage).await?;
                self.refill(stage).await?;
                stage.play()?;
                stage.progress().await?;
            }
            tokio::time::sleep(self.schedule.breath()).await;
        }
        if self.schedule.left() > 0 {
            let left = self.schedule.left();
            stage.voice.say(format_args!("out of time: {left} faults were left out"));
        }
        stage.progress().await?;
        self.settle(stage).await?;
        stage.restart_all().await?;
        self.settle(stage).await?;
        self.figures(stage);
        Ok(())
    }

    /// One fault, and what is waited for after it.
    async fn strike(
        &mut self,
        stage: &mut Stage,
        fault: &Fault,
        leaders: &[u64],
    ) -> anyhow::Result<()> {
        self.begun += 1;
        stage.voice.say(format_args!("{}: {fault} (leaders {leaders:?})", self.begun));
        if fault.needs_calm() {
            stage.progress().await?;
            stage.cluster.healthy(READY_MAX).await?;
            self.in_haste = 0;
        }
        if let What::Trim { seed } = fault.what {
            self.trim(stage, seed)?;
        }
        let is_settled = self.in_haste == 0;
        strike(&mut stage.cluster, &stage.scene, (stage.voice, &self.shelf), fault, is_settled)
            .await
            .with_context(|| format!("{fault}"))?;
        if let Some(kind) = fault.kind() {
            *self.done.entry(kind).or_default() += 1;
        }
        stage.scene.meet(&stage.cluster);
        self.in_haste += 1;
        if self.schedule.is_patient() || self.in_haste > HASTE_MAX {
            stage.progress().await?;
            self.in_haste = 0;
        }
        Ok(())
    }

    /// Begins to trim every partition that may be, one after the other.
    fn trim(&mut self, stage: &Stage, seed: u64) -> anyhow::Result<()> {
        let (scene, client) = (stage.scene.clone(), stage.scene.client()?);
        let mut rng = StdRng::seed_from_u64(seed);
        self.trims.spawn(async move {
            let admin = client.admin();
            let mut count = 0;
            for (number, place) in scene.places() {
                // Now and then to the very end, where readers are.
                let part = if rng.random_bool(0.3) { 1.0 } else { rng.random_range(0.0..1.0) };
                if place.keep == Keep::Untrimmed && scene.trim(&admin, number, part).await {
                    count += 1;
                }
            }
            count
        });
        Ok(())
    }

    /// Takes copies of segments that are being written to, to be put back later.
    async fn refill(&mut self, stage: &Stage) -> anyhow::Result<()> {
        if self.args.faults.restores == 0 {
            return Ok(());
        }
        let ids = stage.cluster.ids().into_iter();
        let nodes: Vec<_> = ids.map(|id| stage.cluster.data_dir(id)).collect();
        self.shelf.refill(&nodes).await
    }

    async fn settle(&mut self, stage: &mut Stage) -> anyhow::Result<()> {
        stage.cluster.heal()?;
        while let Some(count) = self.trims.join_next().await {
            self.trimmed += count?;
        }
        stage.settle().await?;
        self.in_haste = 0;
        Ok(())
    }

    /// Looks whether there is compaction. What nodes count they forget when they are killed.
    async fn look(&mut self, stage: &Stage) {
        let rewritten = stage.cluster.metric("helix_wal_rewritten_bytes_total").await;
        let cold_segments = stage.cluster.metric("helix_wal_cold_segments").await;
        self.rewritten = self.rewritten.max(rewritten);
        self.cold_segments = self.cold_segments.max(cold_segments);
    }

    fn figures(&self, stage: &Stage) {
        stage.figures();
        let done: Vec<_> =
            self.done.iter().map(|(kind, count)| format!("{count} {}", kind.name())).collect();
        stage.voice.say(format_args!(
            "{} faults: {}; all nodes killed {} times; {} trims acknowledged; compaction wrote up \
             to {} bytes anew in the life of the processes, which had up to {} cold segments",
            self.begun,
            done.join(", "),
            self.massacres,
            self.trimmed,
            self.rewritten,
            self.cold_segments
        ));
    }
}
