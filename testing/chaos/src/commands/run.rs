//! `run`: injects faults of every kind at random moments, in rounds that end with all nodes killed
//! at once.
//!
//! After every round each replica is read in full and the history is checked.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinSet;

use super::CommonArgs;
use super::test_bed::{READY_MAX, TestBed, TestBedOptions};
use crate::disk;
use crate::logger::Logger;
use crate::nemesis::inject;
use crate::schedule::{
    ChaosFault, ChaosFaultBudget, ChaosFaultKind, FaultAction, FaultDurations, FaultSchedule,
};
use crate::segment_damage::SegmentBackup;
use crate::workload::{RetentionRule, TopicPlan, WorkloadShape};

/// Faults in a row that may start before the cluster has recovered from the previous one.
const FAULTS_WITHOUT_RECOVERY_MAX: u32 = 3;

/// Options of `run`.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Cluster, seed and limits.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Number of faults of each kind.
    #[command(flatten)]
    pub faults: FaultCounts,

    /// Faults per round; the last one kills all nodes before the check
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub check_every: u32,

    /// Use short faults, for a quick run
    #[arg(long)]
    pub short: bool,
}

/// Number of faults of each kind. Faults that need peers are skipped with a single node.
#[derive(Debug, Clone, Default, Args)]
pub struct FaultCounts {
    /// Kills of nodes, beside those at the end of each round
    #[arg(long, default_value_t = 60)]
    pub kills: u32,

    /// Pauses of nodes
    #[arg(long, default_value_t = 30)]
    pub pauses: u32,

    /// Network partitions between nodes
    #[arg(long, default_value_t = 30)]
    pub partitions: u32,

    /// Nodes kept away until the others have purged what they lack
    #[arg(long, default_value_t = 4)]
    pub absences: u32,

    /// Trims of logs while they are read
    #[arg(long, default_value_t = 20)]
    pub trims: u32,

    /// Topics deleted and created again while a node is down
    #[arg(long, default_value_t = 4)]
    pub deletions: u32,

    /// Drains and restarts of a node
    #[arg(long, default_value_t = 4)]
    pub drains: u32,

    /// Nodes that lose their disk and are replaced under the same id
    #[arg(long, default_value_t = 4)]
    pub wipes: u32,

    /// Changes in which one node joins and another leaves
    #[arg(long, default_value_t = 4)]
    pub members: u32,

    /// Failing syncs of a node; needs strace
    #[arg(long, default_value_t = 4)]
    pub failed_syncs: u32,

    /// Disk stalls of a node; needs strace
    #[arg(long, default_value_t = 4)]
    pub stalls: u32,

    /// Full disks of a node; needs the right to mount file systems
    #[arg(long, default_value_t = 4)]
    pub full_disks: u32,

    /// Damaged files of a node
    #[arg(long, default_value_t = 4)]
    pub damages: u32,

    /// Segments of a node restored from an older copy
    #[arg(long, default_value_t = 4)]
    pub restores: u32,
}

impl FaultCounts {
    fn budget(&self) -> ChaosFaultBudget {
        ChaosFaultBudget::from([
            (ChaosFaultKind::Kill, self.kills),
            (ChaosFaultKind::Pause, self.pauses),
            (ChaosFaultKind::Partition, self.partitions),
            (ChaosFaultKind::Absence, self.absences),
            (ChaosFaultKind::Trim, self.trims),
            (ChaosFaultKind::Deletion, self.deletions),
            (ChaosFaultKind::Drain, self.drains),
            (ChaosFaultKind::Wipe, self.wipes),
            (ChaosFaultKind::Change, self.members),
            (ChaosFaultKind::FailedSync, self.failed_syncs),
            (ChaosFaultKind::SlowSync, self.stalls),
            (ChaosFaultKind::FullDisk, self.full_disks),
            (ChaosFaultKind::Damage, self.damages),
            (ChaosFaultKind::Restore, self.restores),
        ])
    }
}

/// Log kept by the nodes: a node that is away for some seconds lacks purged entries, but most kills
/// and pauses end before that.
const LOG_KIB: u64 = 4096;

/// Disk size of each node with full-disk faults: its data, its reserve, and a margin.
const DISK_BYTES: u64 = 2 << 30;

/// Retention of the topics with automatic retention.
const KEPT_BYTES: u64 = 2 << 20;
const KEPT_TIME: Duration = Duration::from_secs(20);

/// One topic keeps all records, one is trimmed, and two have automatic retention.
fn topics(partitions: u32) -> Vec<TopicPlan> {
    vec![
        TopicPlan::kept(partitions),
        TopicPlan { name: "trimmed", partitions, keep: RetentionRule::TrimOnly },
        TopicPlan { name: "by-bytes", partitions: 2, keep: RetentionRule::Bytes(KEPT_BYTES) },
        TopicPlan { name: "by-time", partitions: 2, keep: RetentionRule::Age(KEPT_TIME) },
    ]
}

pub(super) async fn run(mut args: RunArgs, program: PathBuf) -> anyhow::Result<()> {
    args.common.log_kib.get_or_insert(LOG_KIB);
    let logger = Logger::new(false);
    let topics = topics(args.common.topic_partitions.div_ceil(2));
    let sessions = topics.iter().map(|topic| topic.partitions).sum();
    let shape = WorkloadShape { sessions, ..WorkloadShape::default() };
    let disk_bytes = (args.faults.full_disks > 0).then_some(DISK_BYTES);
    let (has_client_proxies, catch_up_kib) = (true, None);
    let bed_options = TestBedOptions { topics, has_client_proxies, disk_bytes, catch_up_kib };
    let mut test_bed =
        TestBed::start_with(&args.common, program, logger, shape, bed_options).await?;
    // Faults that are not possible here are skipped and not counted.
    let faults = &mut args.faults;
    if faults.failed_syncs + faults.stalls > 0 && !disk::can_trace().await {
        (faults.failed_syncs, faults.stalls) = (0, 0);
    }
    if test_bed.cluster.ids().iter().any(|id| test_bed.cluster.disk(*id).is_none()) {
        faults.full_disks = 0;
    }
    let result = FaultRun::new(&args, &test_bed).execute(&mut test_bed).await;
    test_bed.end(result).await
}

struct FaultRun<'a> {
    args: &'a RunArgs,
    schedule: FaultSchedule,
    /// Copies of segments from the last full check.
    backup: SegmentBackup,
    /// Trims that run concurrently with later faults.
    trims: JoinSet<u32>,
    trimmed: u32,
    done: BTreeMap<ChaosFaultKind, u32>,
    kill_all_rounds: u32,
    begun: u32,
    faults_without_recovery: u32,
    /// Highest number of bytes rewritten by compaction, over the processes of one moment.
    rewritten: u64,
    /// Highest number of cold segments, which compaction or a snapshot transfer writes.
    cold_segments: u64,
}

impl<'a> FaultRun<'a> {
    fn new(args: &'a RunArgs, test_bed: &TestBed) -> Self {
        let durations =
            if args.short { FaultDurations::short() } else { FaultDurations::default() };
        let ids = test_bed.cluster.ids();
        Self {
            args,
            schedule: FaultSchedule::new(args.common.seed, args.faults.budget(), durations, &ids),
            backup: SegmentBackup::new(test_bed.dir().join("copies")),
            trims: JoinSet::new(),
            trimmed: 0,
            done: BTreeMap::new(),
            kill_all_rounds: 0,
            begun: 0,
            faults_without_recovery: 0,
            rewritten: 0,
            cold_segments: 0,
        }
    }

    async fn execute(mut self, test_bed: &mut TestBed) -> anyhow::Result<()> {
        self.back_up_segments(test_bed).await?;
        test_bed.start_workload()?;
        test_bed.progress().await?;
        while !test_bed.is_over() {
            let leaders: Vec<u64> =
                test_bed.cluster.leaders().await.values().map(|(node, _)| *node).collect();
            let nodes = test_bed.cluster.ids();
            self.poll_compaction_metrics(test_bed).await;
            let ends_round = (self.begun + 1).is_multiple_of(self.args.check_every);
            let fault = if ends_round && self.schedule.left() > 0 {
                self.kill_all_rounds += 1;
                self.schedule.kill_all(&nodes)
            } else {
                let Some(fault) = self.schedule.next(&nodes, &leaders) else { break };
                fault
            };
            self.inject(test_bed, &fault, &leaders).await?;
            if ends_round || fault.needs_repair() {
                self.check_replicas(test_bed).await?;
                self.back_up_segments(test_bed).await?;
                test_bed.start_workload()?;
                test_bed.progress().await?;
            }
            tokio::time::sleep(self.schedule.pause()).await;
        }
        if self.schedule.left() > 0 {
            let left = self.schedule.left();
            test_bed.logger.log(format_args!("out of time: skipped {left} faults"));
        }
        test_bed.progress().await?;
        self.check_replicas(test_bed).await?;
        test_bed.restart_all().await?;
        self.check_replicas(test_bed).await?;
        self.log_stats(test_bed);
        Ok(())
    }

    /// Injects one fault and waits for the recovery.
    async fn inject(
        &mut self,
        test_bed: &mut TestBed,
        fault: &ChaosFault,
        leaders: &[u64],
    ) -> anyhow::Result<()> {
        self.begun += 1;
        test_bed.logger.log(format_args!("{}: {fault} (leaders {leaders:?})", self.begun));
        if fault.needs_healthy_cluster() {
            test_bed.progress().await?;
            test_bed.cluster.wait_until_healthy(READY_MAX).await?;
            self.faults_without_recovery = 0;
        }
        if let FaultAction::Trim { seed } = fault.what {
            self.trim(test_bed, seed)?;
        }
        let is_settled = self.faults_without_recovery == 0;
        inject(
            &mut test_bed.cluster,
            &test_bed.context,
            (test_bed.logger, &self.backup),
            fault,
            is_settled,
        )
        .await
        .with_context(|| format!("{fault}"))?;
        if let Some(kind) = fault.kind() {
            *self.done.entry(kind).or_default() += 1;
        }
        test_bed.context.update_nodes(&test_bed.cluster);
        self.faults_without_recovery += 1;
        if self.schedule.waits_for_recovery()
            || self.faults_without_recovery > FAULTS_WITHOUT_RECOVERY_MAX
        {
            test_bed.progress().await?;
            self.faults_without_recovery = 0;
        }
        Ok(())
    }

    /// Starts to trim every trimmable partition, one after another.
    fn trim(&mut self, test_bed: &TestBed, seed: u64) -> anyhow::Result<()> {
        let (context, client) = (test_bed.context.clone(), test_bed.context.client()?);
        let mut rng = StdRng::seed_from_u64(seed);
        self.trims.spawn(async move {
            let admin = client.admin();
            let mut count = 0;
            for (number, target) in context.all_partitions() {
                // Sometimes to the very end, where the readers are.
                let part = if rng.random_bool(0.3) { 1.0 } else { rng.random_range(0.0..1.0) };
                if target.keep == RetentionRule::TrimOnly
                    && context.trim(&admin, number, part).await
                {
                    count += 1;
                }
            }
            count
        });
        Ok(())
    }

    /// Copies the active segments, to be restored later.
    async fn back_up_segments(&mut self, test_bed: &TestBed) -> anyhow::Result<()> {
        if self.args.faults.restores == 0 {
            return Ok(());
        }
        let ids = test_bed.cluster.ids().into_iter();
        let nodes: Vec<_> = ids.map(|id| test_bed.cluster.data_dir(id)).collect();
        self.backup.refresh(&nodes).await
    }

    async fn check_replicas(&mut self, test_bed: &mut TestBed) -> anyhow::Result<()> {
        test_bed.cluster.heal()?;
        while let Some(count) = self.trims.join_next().await {
            self.trimmed += count?;
        }
        test_bed.check_replicas().await?;
        self.faults_without_recovery = 0;
        Ok(())
    }

    /// Polls the compaction metrics, because nodes lose their counters when they are killed.
    async fn poll_compaction_metrics(&mut self, test_bed: &TestBed) {
        let rewritten = test_bed.cluster.metric("helix_wal_rewritten_bytes_total").await;
        let cold_segments = test_bed.cluster.metric("helix_wal_cold_segments").await;
        self.rewritten = self.rewritten.max(rewritten);
        self.cold_segments = self.cold_segments.max(cold_segments);
    }

    fn log_stats(&self, test_bed: &TestBed) {
        test_bed.log_stats();
        let done: Vec<_> =
            self.done.iter().map(|(kind, count)| format!("{count} {}", kind.name())).collect();
        test_bed.logger.log(format_args!(
            "{} faults: {}; all nodes killed {} times; {} trims acknowledged; compaction rewrote \
             up to {} bytes at a time; up to {} cold segments",
            self.begun,
            done.join(", "),
            self.kill_all_rounds,
            self.trimmed,
            self.rewritten,
            self.cold_segments
        ));
    }
}
