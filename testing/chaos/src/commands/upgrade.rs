//! `upgrade`: nodes of an older release are upgraded and rolled back one by one under load.
//!
//! A random walk changes the program of one node at a time, by a stop or by a kill. As long as one
//! node runs the older release, every node can go back. At the end all are upgraded, the cluster
//! raises its protocol version, and the older release must refuse the data of a node in words.
//! Finally every replica is read and the history is checked.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};
use tokio::time::{Instant, sleep};

use super::test_bed::{READY_MAX, TestBed};
use super::{CommonArgs, parse_duration};
use crate::logger::Logger;
use crate::workload::WorkloadShape;

/// Gauges of the protocol versions, which the older release may not have.
const CURRENT: &str = "helix_protocol_version";
const NEWEST: &str = "helix_newest_protocol_version";

/// Longest time until the cluster raises its protocol version once all nodes are upgraded.
const RAISE_MAX: Duration = Duration::from_secs(30);

/// Longest time until the older release has refused the data of a newer one.
const REFUSAL_MAX: Duration = Duration::from_secs(30);

/// Words of a release that refuses newer data: 0.1.0, and later ones.
const REFUSALS: [&str; 2] = ["was written by a newer program", "the data needs protocol version"];

const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Options of `upgrade`.
#[derive(Debug, Clone, Args)]
pub struct UpgradeArgs {
    /// Cluster, seed and limits.
    #[command(flatten)]
    pub common: CommonArgs,

    /// The older release: its `helix-server`, or its `helix-chaos`
    #[arg(long)]
    pub old: PathBuf,

    /// Changes of a node's program before the last upgrade
    #[arg(long, default_value_t = 12)]
    pub steps: u32,

    /// Time of load after each change ("2s")
    #[arg(long, default_value = "2s", value_parser = parse_duration)]
    pub pause: Duration,
}

pub(super) async fn run(args: UpgradeArgs, program: PathBuf) -> anyhow::Result<()> {
    let CommonArgs { nodes, seed, .. } = args.common;
    ensure!(nodes >= 3, "a cluster of {nodes} stops with a node");
    ensure!(args.old.is_file(), "--old {}: there is no such program", args.old.display());
    let shape = WorkloadShape::default();
    let logger = Logger::new(false);
    let mut test_bed = TestBed::start(&args.common, args.old.clone(), logger, shape, false).await?;
    let result = Upgrade {
        test_bed: &mut test_bed,
        old: args.old,
        new: program,
        upgraded: BTreeSet::new(),
        pause: args.pause,
        rng: StdRng::seed_from_u64(seed),
    }
    .execute(args.steps)
    .await;
    test_bed.end(result).await
}

/// A cluster whose nodes run two releases.
struct Upgrade<'a> {
    test_bed: &'a mut TestBed,
    old: PathBuf,
    new: PathBuf,
    /// Nodes that run the new release.
    upgraded: BTreeSet<u64>,
    pause: Duration,
    rng: StdRng,
}

impl Upgrade<'_> {
    async fn execute(&mut self, steps: u32) -> anyhow::Result<()> {
        let ids = self.test_bed.cluster.ids();
        self.test_bed.start_workload()?;
        self.test_bed.progress().await?;
        // Each node is upgraded once before others are again.
        let mut untried = ids.clone();
        untried.shuffle(&mut self.rng);
        for step in 1..=steps {
            // One node keeps the older release: without it the cluster would raise its version.
            let may_upgrade = self.upgraded.len() + 1 < ids.len();
            let of_upgraded: Vec<u64> = self.upgraded.iter().copied().collect();
            let id = match untried.pop_if(|_| may_upgrade) {
                Some(id) => id,
                None if may_upgrade => *ids.choose(&mut self.rng).context("no node")?,
                None => *of_upgraded.choose(&mut self.rng).context("no node is upgraded")?,
            };
            self.change(step, id).await?;
        }
        ensure!(untried.is_empty(), "{steps} steps are too few: {untried:?} were never upgraded");
        let left: Vec<u64> = ids.iter().filter(|id| !self.upgraded.contains(id)).copied().collect();
        for (step, id) in (steps + 1..).zip(left) {
            self.change(step, id).await?;
        }
        self.wait_until_raised(&ids).await?;
        let id = *ids.choose(&mut self.rng).context("no node")?;
        self.check_refusal(id).await?;
        self.test_bed.progress().await?;
        self.test_bed.check_replicas().await?;
        self.test_bed.log_stats();
        Ok(())
    }

    /// Restarts a node with the other release, at times with a kill or beside one.
    async fn change(&mut self, step: u32, id: u64) -> anyhow::Result<()> {
        let is_killed = self.rng.random_bool(0.3);
        let is_beside = self.rng.random_bool(0.3);
        let ids = self.test_bed.cluster.ids();
        let others: Vec<u64> = ids.into_iter().filter(|other| *other != id).collect();
        let beside = others.choose(&mut self.rng).copied().filter(|_| is_beside);
        let cluster = &mut self.test_bed.cluster;
        match is_killed {
            true => cluster.kill(&[id]).await?,
            false => cluster.terminate(id).await?,
        }
        let is_upgrade = self.upgraded.insert(id);
        if !is_upgrade {
            self.upgraded.remove(&id);
        }
        cluster.set_program(id, if is_upgrade { &self.new } else { &self.old });
        cluster.start_node(id)?;
        if let Some(beside) = beside {
            cluster.kill(&[beside]).await?;
            cluster.start_node(beside)?;
        }
        cluster.wait_until_healthy(READY_MAX).await?;
        self.test_bed.progress().await?;
        let did = if is_upgrade { "upgraded" } else { "rolled back" };
        let how = if is_killed { "after a kill" } else { "after a stop" };
        let beside = beside.map_or(String::new(), |it| format!(", killed node {it} beside it"));
        let upgraded = &self.upgraded;
        self.test_bed
            .logger
            .log(format_args!("{step}: {did} node {id} {how}{beside}; upgraded: {upgraded:?}"));
        sleep(self.pause).await;
        Ok(())
    }

    /// Waits until every node uses the newest protocol version that it speaks.
    async fn wait_until_raised(&mut self, ids: &[u64]) -> anyhow::Result<()> {
        let deadline = Instant::now() + RAISE_MAX;
        loop {
            let cluster = &mut self.test_bed.cluster;
            cluster.check_running()?;
            let (current, newest) = (cluster.metric(CURRENT).await, cluster.metric(NEWEST).await);
            if current == newest && newest > 0 {
                let version = newest / ids.len() as u64;
                self.test_bed
                    .logger
                    .log(format_args!("the cluster uses protocol version {version}"));
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "the protocol version was not raised in {RAISE_MAX:?}"
            );
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Starts the older release on the data of a node, which it must refuse in words, and then the
    /// new one again.
    async fn check_refusal(&mut self, id: u64) -> anyhow::Result<()> {
        let cluster = &mut self.test_bed.cluster;
        cluster.terminate(id).await?;
        let log = cluster.log_of(id);
        let before = tokio::fs::read(&log).await.context("read the log of a node")?.len();
        cluster.set_program(id, &self.old);
        cluster.start_node(id)?;
        let code = cluster.wait_for_exit(id, REFUSAL_MAX).await?;
        let lines = tokio::fs::read(&log).await.context("read the log of a node")?;
        let lines = String::from_utf8_lossy(lines.get(before..).unwrap_or_default()).into_owned();
        let says_why = |line: &&str| REFUSALS.iter().any(|words| line.contains(words));
        let words = lines.lines().rev().find(says_why);
        let words =
            words.with_context(|| format!("the older release does not say why: {lines}"))?;
        ensure!(code != Some(0), "the older release exited with success: {words}");
        self.test_bed.logger.log(format_args!("the older release refuses node {id}: {words}"));
        let cluster = &mut self.test_bed.cluster;
        cluster.set_program(id, &self.new);
        cluster.start_node(id)?;
        cluster.wait_until_healthy(READY_MAX).await
    }
}
