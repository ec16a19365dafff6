//! `groups`: kills members of a consumer group, its coordinator and leaders of its partitions.
//!
//! The members are processes. Each record must reach one of them, a commit must neither cover a
//! record that none of them received nor move back, and all partitions must flow again after each
//! fault. A group without faults delivers each record once.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use helix_client::Client;
use helix_proto::log::v1::GroupState;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};
use tokio::time::{Instant, sleep};

use super::test_bed::{READY_MAX, TestBed};
use super::{CommonArgs, parse_duration};
use crate::certificates;
use crate::groups::{
    DeliveryCheck, GROUP, GroupWriters, MemberProcess, MemberProcessOptions, SharedCheck, lock,
};
use crate::logger::Logger;
use crate::workload::{TOPIC, WorkloadShape};

/// Longest time until all partitions flow again after a fault, beyond the session timeout.
const FLOW_MAX: Duration = Duration::from_secs(60);

/// Longest time until a line of a member is read.
const REPORT_MAX: Duration = Duration::from_secs(10);

/// Length of the time without faults at the end.
const STEADY: Duration = Duration::from_secs(5);

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Options of `groups`.
#[derive(Debug, Clone, Args)]
pub struct GroupsArgs {
    /// Cluster, seed and limits.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Members of the group
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..=16))]
    pub members: u32,

    /// Number of faults [default: as many as begin within --duration-max]
    #[arg(long)]
    pub faults: Option<u32>,

    /// Session timeout of the members ("6s"); a paused member is paused for half as long again
    #[arg(long, default_value = "6s", value_parser = parse_duration)]
    pub session_timeout: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum GroupFault {
    KillMember,
    LeaveMember,
    PauseMember,
    KillCoordinator,
    KillLeader,
}

impl GroupFault {
    const ALL: [Self; 5] = [
        Self::KillMember,
        Self::LeaveMember,
        Self::PauseMember,
        Self::KillCoordinator,
        Self::KillLeader,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::KillMember => "killed a member",
            Self::LeaveMember => "let a member leave",
            Self::PauseMember => "paused a member",
            Self::KillCoordinator => "killed the coordinator",
            Self::KillLeader => "killed a leader",
        }
    }
}

pub(super) async fn run(args: GroupsArgs, program: PathBuf) -> anyhow::Result<()> {
    ensure!(args.common.nodes >= 3, "a cluster of {} has no second node", args.common.nodes);
    let logger = Logger::new(false);
    let shape = WorkloadShape::default();
    let mut test_bed = TestBed::start(&args.common, program.clone(), logger, shape, false).await?;
    let result = execute(&args, program, &mut test_bed).await;
    test_bed.end(result).await
}

async fn execute(
    args: &GroupsArgs,
    program: PathBuf,
    test_bed: &mut TestBed,
) -> anyhow::Result<()> {
    let mut run = GroupRun::start(args, program, test_bed)?;
    run.wait_until_flowing().await.context("the group has not begun")?;
    let mut rng = StdRng::seed_from_u64(args.common.seed);
    let mut slowest: BTreeMap<GroupFault, (u32, Duration)> = BTreeMap::new();
    let mut order = Vec::new();
    let mut done = 0;
    while args.faults.is_none_or(|faults| done < faults) && !run.test_bed.is_over() {
        // All kinds in turns, in another order each time.
        if order.is_empty() {
            order = GroupFault::ALL.to_vec();
            order.shuffle(&mut rng);
        }
        let Some(fault) = order.pop() else { continue };
        let time = run.inject(fault, &mut rng).await.with_context(|| fault.name())?;
        done += 1;
        let known = slowest.entry(fault).or_default();
        *known = (known.0 + 1, known.1.max(time));
        let millis = time.as_millis();
        run.test_bed
            .logger
            .log(format_args!("{done}: {}, flowing after {millis} ms", fault.name()));
        sleep(Duration::from_millis(rng.random_range(0..1_000))).await;
    }
    run.check_steady().await?;
    let logger = run.test_bed.logger;
    let (acked, delivered, repeated) = run.end().await?;
    for (fault, (count, time)) in slowest {
        let (name, millis) = (fault.name(), time.as_millis());
        logger.log(format_args!("{name} {count} times, flowing after at most {millis} ms"));
    }
    logger.log(format_args!(
        "{acked} records acked, {delivered} delivered, {repeated} of them again after a fault"
    ));
    let wanted = args.faults.unwrap_or(done);
    ensure!(done == wanted, "only {done} of {wanted} faults before --duration-max");
    Ok(())
}

/// A group under test.
struct GroupRun<'a> {
    test_bed: &'a mut TestBed,
    client: Client,
    check: SharedCheck,
    options: MemberProcessOptions,
    members: Vec<MemberProcess>,
    /// `None` once they have stopped.
    writers: Option<GroupWriters>,
}

impl<'a> GroupRun<'a> {
    fn start(
        args: &GroupsArgs,
        program: PathBuf,
        test_bed: &'a mut TestBed,
    ) -> anyhow::Result<Self> {
        let client = test_bed.context.client()?;
        let partitions = test_bed.context.partitions;
        let check: SharedCheck = Arc::new(Mutex::new(DeliveryCheck::new(partitions)));
        let certificates = certificates::directory(test_bed.dir());
        let options = MemberProcessOptions {
            program,
            endpoints: test_bed.cluster.endpoints(),
            session_timeout: args.session_timeout,
            ca: args.common.tls.then(|| certificates.join("ca.pem")),
            log: test_bed.dir().join("members.log"),
        };
        let members = (0..args.members).map(|_| MemberProcess::start(&options, &check));
        let members = members.collect::<anyhow::Result<_>>()?;
        let writers = Some(GroupWriters::start(&client, partitions, &check));
        Ok(Self { test_bed, client, check, options, members, writers })
    }

    /// Injects a fault, waits until all partitions flow again, and removes the fault.
    async fn inject(&mut self, fault: GroupFault, rng: &mut StdRng) -> anyhow::Result<Duration> {
        let time = match fault {
            GroupFault::KillMember | GroupFault::LeaveMember => {
                let member = self.members.swap_remove(rng.random_range(0..self.members.len()));
                match fault {
                    GroupFault::KillMember => member.kill().await?,
                    _ => member.leave().await?,
                }
                // Half of the members come back before the others have their partitions.
                let is_late = rng.random_bool(0.5);
                if !is_late {
                    self.members.push(MemberProcess::start(&self.options, &self.check)?);
                }
                let time = self.wait_until_flowing().await?;
                if is_late {
                    self.members.push(MemberProcess::start(&self.options, &self.check)?);
                }
                time
            }
            GroupFault::PauseMember => {
                let number = rng.random_range(0..self.members.len());
                self.members[number].pause()?;
                let paused_at = Instant::now();
                let time = self.wait_until_flowing().await?;
                let until = paused_at + self.options.session_timeout.mul_f64(1.5);
                tokio::time::sleep_until(until).await;
                self.members[number].resume()?;
                time
            }
            GroupFault::KillCoordinator => {
                let described = self.client.admin().describe_group(GROUP, false).await?;
                self.kill_node(described.coordinator_node_id).await?
            }
            GroupFault::KillLeader => {
                let leaders = self.test_bed.cluster.leaders().await;
                let shards = self.test_bed.shards().await?;
                let led: Vec<u64> =
                    shards.iter().filter_map(|it| Some(leaders.get(it)?.0)).collect();
                self.kill_node(*led.choose(rng).context("no partition has a leader")?).await?
            }
        };
        self.check_commits().await?;
        Ok(time)
    }

    async fn kill_node(&mut self, node: u64) -> anyhow::Result<Duration> {
        self.test_bed.cluster.kill(&[node]).await?;
        let time = self.wait_until_flowing().await?;
        self.test_bed.cluster.start_node(node)?;
        self.test_bed.cluster.wait_until_healthy(READY_MAX).await?;
        Ok(time)
    }

    /// Waits until a member has received a record of each partition that is acknowledged from now
    /// on, and all before it. Returns how long that took.
    async fn wait_until_flowing(&mut self) -> anyhow::Result<Duration> {
        let since = Instant::now();
        // The first record that was not acknowledged yet.
        let mut ends = lock(&self.check).acked_ends();
        ends.iter_mut().for_each(|end| *end += 1);
        self.wait_until_delivered(&ends, self.options.session_timeout + FLOW_MAX).await?;
        Ok(since.elapsed())
    }

    async fn wait_until_delivered(&mut self, ends: &[u64], limit: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + limit;
        loop {
            self.test_bed.cluster.check_running()?;
            for member in &mut self.members {
                if let Some(status) = member.ended() {
                    bail!("a member exited unexpectedly: {status}; see members.log");
                }
            }
            let missing = {
                let check = lock(&self.check);
                if let Some(violation) = check.violation() {
                    bail!("VIOLATION: {violation}");
                }
                check.first_missing(ends)
            };
            let Some((partition, offset)) = missing else { return Ok(()) };
            ensure!(
                Instant::now() < deadline,
                "NO PROGRESS: partition {partition}, offset {offset} is missing after {limit:?}"
            );
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Checks that no commit has moved back, and that all records before each were received.
    async fn check_commits(&mut self) -> anyhow::Result<()> {
        let offsets = self.client.admin().group_offsets(GROUP, &[TOPIC]).await?;
        let committed = {
            let mut check = lock(&self.check);
            for committed in offsets.into_iter().filter_map(|it| it.committed) {
                let partition = committed.partition.context("a commit has no partition")?.partition;
                check.on_commit(partition, committed.offset);
            }
            check.committed()
        };
        self.wait_until_delivered(&committed, REPORT_MAX).await.context("records were committed")
    }

    /// Checks that a group whose members do not change delivers each record once.
    async fn check_steady(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + self.options.session_timeout + FLOW_MAX;
        loop {
            self.wait_until_flowing().await?;
            let before = self.client.admin().describe_group(GROUP, false).await?;
            let losses = lock(&self.check).losses();
            let is_whole = before.members.len() == self.members.len();
            if before.state() == GroupState::Stable && is_whole {
                // Records before were perhaps received by earlier members, and are not acked yet.
                let from = lock(&self.check).seen_ends();
                sleep(STEADY).await;
                self.wait_until_flowing().await?;
                let after = self.client.admin().describe_group(GROUP, false).await?;
                // A busy machine may cost a member its session, at the coordinator or by its own
                // clock.
                let is_same = losses == lock(&self.check).losses();
                if after.group_epoch == before.group_epoch && is_same {
                    let repeated = lock(&self.check).first_repeated(&from);
                    return match repeated {
                        None => Ok(()),
                        Some(what) => bail!("VIOLATION: by a steady group, {what}"),
                    };
                }
            }
            ensure!(Instant::now() < deadline, "NOT STEADY: the group's members still change");
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Stops the writers, and lets the members read all and leave. Returns the counts of the check.
    async fn end(mut self) -> anyhow::Result<(usize, usize, u64)> {
        if let Some(writers) = self.writers.take() {
            writers.stop().await?;
        }
        let ends = lock(&self.check).acked_ends();
        self.wait_until_delivered(&ends, self.options.session_timeout + FLOW_MAX).await?;
        for member in std::mem::take(&mut self.members) {
            member.leave().await?;
        }
        self.check_commits().await?;
        let check = lock(&self.check);
        let open = check.committed().into_iter().zip(&ends).position(|(it, end)| it < *end);
        if let Some(partition) = open {
            bail!("VIOLATION: partition {partition}: the members left without their commits");
        }
        Ok(check.counts())
    }
}
