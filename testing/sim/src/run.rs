//! One run: forms a cluster, injects faults while clients use it, heals it and checks everything.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::thread;
use std::time::Duration;

use helix_checker::{GroupCounts, HistoryVerdict};
use helix_server::protocol::ProtocolVersions;
use helix_server::raft::seed_this_thread;
use hermetic::Hermetic;
use turmoil::{Builder, Sim};

use crate::clock;
use crate::clock_witness::ClockWitness;
use crate::cluster::SimulatedMachine;
use crate::coverage::{CoverageMark, CoverageMarks};
use crate::damage;
use crate::final_reads::{self, FinalReadEvents};
use crate::group_watch::GroupStateChecker;
use crate::invariants::InvariantChecker;
use crate::nemesis::Nemesis;
use crate::net;
use crate::operator;
use crate::placement_watch::{self, PlacementChecker};
use crate::plan::{FaultKind, SimulationPlan};
use crate::recorder::Recorder;
use crate::recreation;
use crate::recreation_log::RecreationLog;
use crate::table_watch::TableStateChecker;
use crate::token_holder::{self, TokenLog};
use crate::workload::{self, ClientContext};
use crate::{group_member, group_offsets, group_topics, placer, principals, revocations, tables};

const TICK: Duration = Duration::from_millis(1);

/// Maximum simulated duration of a run.
const RUN_MAX: Duration = Duration::from_secs(3_600);

/// Time limit for the creation of the topic.
const FORM_MAX: Duration = Duration::from_secs(120);

/// Time limit after healing until every partition has a new ack.
const PROGRESS_MAX: Duration = Duration::from_secs(40);

/// Time limit after healing until all damage is repaired.
const REPAIR_MAX: Duration = Duration::from_secs(120);

/// Time limit after all repairs until every node reports good health.
const HEALTH_MAX: Duration = Duration::from_secs(10);

/// Time limit after all repairs until all replicas are where they should be.
const PLACED_MAX: Duration = Duration::from_secs(90);

/// Time limit after healing until every node has accepted the valid tokens.
const TOKENS_MAX: Duration = Duration::from_secs(30);

/// Time limit after healing until a consumer group is stable, and until it has read everything.
///
/// A join that was delayed by a fault may make a member that lives for a session timeout.
const GROUP_MAX: Duration = Duration::from_secs(30);

/// Time for which a stable group must change nothing.
const GROUP_STEADY: Duration = Duration::from_secs(4);

/// Time limit for clients to stop, and for replicas to become equal.
const REST_MAX: Duration = Duration::from_secs(90);

/// Time after which retention has dropped a record that it may drop.
const RETENTION_MARGIN: Duration = Duration::from_secs(5);

/// Maximum number of full reads. A read is repeated if a log changed during it.
const READS_MAX: u32 = 6;

/// Result of a successful run.
#[derive(Debug)]
pub struct RunReport {
    pub plan: SimulationPlan,
    pub verdict: HistoryVerdict,
    pub marks: CoverageMarks,
    pub group: GroupCounts,
    pub simulated: Duration,
    pub faults: BTreeMap<FaultKind, u64>,
    pub crashes: u64,
    /// Hash of the trace: equal for equal runs.
    pub hash: u64,
    pub trace: Vec<String>,
}

/// Failure of a run.
#[derive(Debug)]
pub struct RunFailure {
    pub seed: u64,
    pub what: String,
    pub trace: Vec<String>,
}

/// Runs one seed. Keeps the whole trace if `keeps_trace`.
///
/// # Errors
/// An invariant was violated.
pub fn run(seed: u64, keeps_trace: bool) -> Result<RunReport, RunFailure> {
    run_plan(SimulationPlan::new(seed), keeps_trace)
}

/// Runs a plan.
///
/// # Errors
/// As [`run`].
pub fn run_plan(plan: SimulationPlan, keeps_trace: bool) -> Result<RunReport, RunFailure> {
    let (seed, recorder) = (plan.seed, Recorder::new(keeps_trace));
    // On a new thread, because libraries keep state per thread. The nodes log to the caller's
    // subscriber.
    let dispatch = tracing::dispatcher::get_default(Clone::clone);
    let run = || {
        let hermetic = Hermetic::enter(seed);
        let run = || World::new(plan, recorder.clone(), hermetic).run();
        tracing::dispatcher::with_default(&dispatch, run)
    };
    let joined = thread::scope(|scope| scope.spawn(run).join());
    // A panic in the product is a failure too.
    let what = match joined {
        Ok(Ok(report)) => return Ok(report),
        Ok(Err(what)) => what,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
            format!("a panic: {}", text.unwrap_or_default())
        }
    };
    Err(RunFailure { seed, what, trace: recorder.trace() })
}

struct World {
    plan: SimulationPlan,
    /// Not dropped when a run fails, because dropping it may panic again.
    sim: ManuallyDrop<Sim<'static>>,
    machines: Vec<SimulatedMachine>,
    nemesis: Nemesis,
    watch: InvariantChecker,
    clocks: ClockWitness,
    recreations: RecreationLog,
    tokens: TokenLog,
    groups: Option<GroupStateChecker>,
    tables: Option<TableStateChecker>,
    placement: PlacementChecker,
    context: ClientContext,
    /// Events of the final reads.
    found: FinalReadEvents,
    recorder: Recorder,
    marks: CoverageMarks,
    hermetic: Hermetic,
}

impl World {
    fn new(plan: SimulationPlan, recorder: Recorder, hermetic: Hermetic) -> Self {
        // openraft draws its timeouts from a generator per thread.
        seed_this_thread(plan.seed);
        let mut builder = Builder::new();
        builder
            .tick_duration(TICK)
            .simulation_duration(RUN_MAX)
            .rng_seed(plan.seed)
            .tcp_capacity(1 << 16)
            .min_message_latency(TICK)
            .max_message_latency(TICK);
        let mut sim = builder.build();
        let marks = CoverageMarks::default();
        let machine = |node| SimulatedMachine::new(&plan, marks.clone(), node);
        let machines: Vec<_> = (1..=plan.machines()).map(machine).collect();
        // turmoil runs hosts in the order in which they are added; every seed has its own order.
        for node in &plan.order {
            let Some(machine) = machines.iter().find(|it| it.node_id() == *node) else { continue };
            let machine = machine.clone();
            sim.host(machine.host(), move || machine.clone().run_until_end());
        }
        let context = ClientContext::new(&plan, recorder.clone(), marks.clone());
        let found = FinalReadEvents::default();
        sim.client("topic", workload::create_topic(context.clone()));
        sim.client("writers", workload::write(context.clone()));
        sim.client("readers", workload::read(context.clone()));
        sim.client("operator", operator::operate(context.clone()));
        sim.client(
            "finals",
            final_reads::read(context.clone(), machines.clone(), READS_MAX, found.clone()),
        );
        let recreations = RecreationLog::new(recorder.clone(), marks.clone());
        let hosts = machines.iter().map(SimulatedMachine::host);
        let mut hosts: Vec<String> =
            hosts.chain(["writers", "readers"].map(str::to_owned)).collect();
        if plan.recreates {
            let clients = recreation::run(context.clone(), recreations.clone());
            sim.client("recreation", clients);
            hosts.push("recreation".to_owned());
        }
        if plan.table.is_some() {
            sim.client("tables", tables::run(context.clone()));
            hosts.push("tables".to_owned());
        }
        if let Some(placement) = &plan.placement {
            sim.client("placer", placer::operate(context.clone(), placement.clone()));
            if placement.machines == 7 {
                marks.hit(CoverageMark::SevenNodes);
            }
        }
        let tokens = TokenLog::default();
        if plan.has_tokens {
            let holder = token_holder::run(context.clone(), machines.clone(), tokens.clone());
            sim.client("tokens", holder);
        }
        if plan.has_principals {
            sim.client("principals", principals::run(context.clone()));
            hosts.push("principals".to_owned());
            sim.client("waits", revocations::run(context.clone(), machines.clone()));
        }
        if let Some(group) = &plan.group {
            sim.client("offsets", group_offsets::run(context.clone()));
            hosts.push("offsets".to_owned());
            sim.client("topics", group_topics::operate(context.clone()));
            for slot in 0..group.members {
                let host = format!("member{slot}");
                hosts.push(host.clone());
                sim.client(host, group_member::run(context.clone(), group.clone(), slot));
            }
        }
        if plan.nodes == 5 {
            marks.hit(CoverageMark::FiveNodes);
        }
        let members = context.members.clone();
        let mut nemesis =
            Nemesis::new(&plan, hosts, members.clone(), recorder.clone(), marks.clone());
        nemesis.set_latencies(&sim);
        Self {
            nemesis,
            found,
            recreations,
            tokens,
            clocks: ClockWitness::new(&plan, members.clone(), marks.clone()),
            tables: plan.table.map(|_| TableStateChecker::new(&plan, members.clone())),
            placement: PlacementChecker::new(&plan, marks.clone(), context.cancelled()),
            watch: InvariantChecker::new(
                members,
                recorder.clone(),
                marks.clone(),
                plan.placement.is_some(),
            ),
            groups: plan.group.as_ref().map(|_| GroupStateChecker::new(context.group.clone())),
            sim: ManuallyDrop::new(sim),
            machines,
            context,
            recorder,
            marks,
            hermetic,
            plan,
        }
    }

    /// Simulates one tick.
    fn step(&mut self, may_inject: bool) -> Result<(), String> {
        self.hermetic.set_now(self.sim.elapsed());
        self.recorder.on_tick(self.sim.elapsed(), net::take_wire());
        self.sim.step().map_err(|error| error.to_string())?;
        self.watch.check_nodes(&self.machines)?;
        self.clocks.check(self.sim.elapsed(), &self.machines)?;
        self.recreations.check(&self.machines)?;
        self.tokens.check()?;
        self.placement.check(&self.machines)?;
        if let Some(groups) = &mut self.groups {
            groups.check(&self.machines)?;
        }
        if let Some(tables) = &mut self.tables {
            tables.check(&self.machines)?;
        }
        self.nemesis.tick(&mut self.sim, &self.machines, may_inject)
    }

    /// Simulates until `done` holds, and fails after `limit`.
    fn run_until(
        &mut self,
        what: &str,
        limit: Duration,
        mut done: impl FnMut(&mut Self) -> bool,
    ) -> Result<(), String> {
        let end = self.sim.elapsed() + limit;
        loop {
            self.step(false)?;
            if done(self) {
                return Ok(());
            }
            if self.sim.elapsed() > end {
                return Err(format!("{what} not within {limit:?}: {}", self.describe_nodes()));
            }
        }
    }

    fn run(mut self) -> Result<RunReport, String> {
        self.form()?;
        self.inject_faults()?;
        self.heal()?;
        let verdict = self.judge()?;
        if verdict.open_applied > 0 {
            self.marks.hit(CoverageMark::OpenOutcomeApplied);
        }
        let group = self.context.group.checker().counts();
        self.marks.add(CoverageMark::GroupPartitionMoved, group.moves);
        let report = RunReport {
            simulated: self.sim.elapsed(),
            faults: std::mem::take(&mut self.nemesis.counts),
            crashes: self.nemesis.crashes,
            hash: self.recorder.hash(),
            trace: self.recorder.trace(),
            marks: self.marks.clone(),
            group,
            plan: self.plan.clone(),
            verdict,
        };
        ManuallyDrop::into_inner(self.sim);
        Ok(report)
    }

    fn form(&mut self) -> Result<(), String> {
        self.run_until("a topic", FORM_MAX, |world| world.context.ended() == 1)
    }

    fn inject_faults(&mut self) -> Result<(), String> {
        self.context.set_phase(workload::TOPIC_IS_THERE);
        let end = self.sim.elapsed() + self.plan.duration;
        if self.plan.retention_bytes.is_some() || self.plan.retention_us.is_some() {
            // The trimmed range depends on where segments end on the leader.
            for partition in 0..self.plan.partitions {
                let offset = u64::MAX;
                self.recorder.add(helix_checker::HistoryEvent::MayTrim { partition, offset });
            }
        }
        while self.sim.elapsed() < end {
            self.step(true)?;
        }
        Ok(())
    }

    fn heal(&mut self) -> Result<(), String> {
        self.nemesis.heal(&mut self.sim, &self.machines);
        self.recreations.set_quiet();
        self.context.calm_down();
        self.context.group.calm_down();
        let partitions = 0..self.plan.partitions;
        let before: Vec<_> = partitions.map(|it| self.recorder.acks(it)).collect();
        let done = |world: &mut Self| {
            (0..).zip(&before).all(|(partition, acks)| world.recorder.acks(partition) > *acks)
        };
        self.run_until("a new ack in every partition", PROGRESS_MAX, done)?;
        if self.plan.recreates {
            let is_in_use = |world: &mut Self| world.recreations.is_in_use();
            self.run_until("use of the last recreated topic", PROGRESS_MAX, is_in_use)?;
        }
        // With writers and readers still running: there are always new records to fetch.
        self.run_until("a repair of all damage", REPAIR_MAX, |world| world.nemesis.is_repaired())?;
        self.run_until("good health of all nodes", HEALTH_MAX, |world| {
            world.health_problem().is_none()
        })?;
        self.check_protocol()?;
        self.check_tokens()?;
        self.check_placement()?;
        self.check_steady_group()?;
        self.context.stop();
        let clients = self.client_count() - self.plan.group_members();
        self.run_until("all clients at rest", REST_MAX, |world| world.context.ended() == clients)?;
        self.run_until("a group that has read everything", GROUP_MAX, |world| {
            world.groups.as_ref().is_none_or(|groups| groups.unread(&world.machines).is_none())
        })?;
        self.context.group.stop();
        let clients = self.client_count();
        self.run_until("all members at rest", REST_MAX, |world| world.context.ended() == clients)
    }

    /// Returns the number of clients that end before the final reads.
    fn client_count(&self) -> u32 {
        4 + u32::from(self.plan.recreates)
            + u32::from(self.plan.table.is_some())
            + u32::from(self.plan.has_tokens)
            + u32::from(self.plan.placement.is_some())
            + 2 * u32::from(self.plan.has_principals)
            + 2 * u32::from(self.groups.is_some())
            + self.plan.group_members()
    }

    /// Checks that all moves end, and that the replicas come to be where they should.
    fn check_placement(&mut self) -> Result<(), String> {
        if self.plan.placement.is_none() {
            return Ok(());
        }
        let is_placed = |world: &mut Self| {
            world.context.is_uncordoned() && placement_watch::problem(&world.machines).is_none()
        };
        self.run_until("replicas where they should be", PLACED_MAX, is_placed)?;
        // Each partition takes records where it is now.
        let partitions = 0..self.plan.partitions;
        let before: Vec<_> = partitions.map(|it| self.recorder.acks(it)).collect();
        self.run_until("a new ack in every partition after all moves", PROGRESS_MAX, |world| {
            (0..).zip(&before).all(|(partition, acks)| world.recorder.acks(partition) > *acks)
        })
    }

    /// Checks that the cluster comes to use the newest protocol version.
    fn check_protocol(&mut self) -> Result<(), String> {
        let newest = ProtocolVersions::OWN.newest;
        self.run_until("the newest protocol version", HEALTH_MAX, |world| {
            let nodes = world.machines.iter().filter_map(SimulatedMachine::node);
            nodes.map(|node| node.cluster().protocol()).all(|version| version == newest)
        })?;
        if self.plan.older.is_some() {
            self.marks.hit(CoverageMark::ProtocolRaised);
        }
        Ok(())
    }

    /// Checks that every node accepts the valid tokens again, also with a clock that stays wrong.
    fn check_tokens(&mut self) -> Result<(), String> {
        if !self.plan.has_tokens {
            return Ok(());
        }
        let since_us = clock::right_us(self.sim.elapsed());
        self.run_until("valid tokens accepted by all nodes", TOKENS_MAX, |world| {
            world.tokens.are_accepted(&world.context.members.all(), since_us)
        })
    }

    /// Checks that the group becomes stable, and then changes nothing and repeats no record.
    fn check_steady_group(&mut self) -> Result<(), String> {
        if self.groups.is_none() {
            return Ok(());
        }
        let settled =
            |world: &Self| world.groups.as_ref().map(|groups| groups.settled(&world.machines));
        self.run_until("a stable group", GROUP_MAX, |world| matches!(settled(world), Some(Ok(_))))?;
        let before = settled(self);
        let end = self.sim.elapsed() + GROUP_STEADY;
        self.run_until("a steady group", GROUP_STEADY * 2, |world| world.sim.elapsed() >= end)?;
        // The coordinator may have changed: its state is the same.
        self.run_until("a stable group again", GROUP_MAX, |world| {
            matches!(settled(world), Some(Ok(_)))
        })?;
        let after = settled(self);
        if before != after {
            return Err(format!("a steady group changed: {before:?}, {after:?}"));
        }
        self.marks.hit(CoverageMark::GroupSteady);
        Ok(())
    }

    /// Reads every replica while nothing changes, and checks the whole history.
    fn judge(&mut self) -> Result<HistoryVerdict, String> {
        if let Some(retention_us) = self.plan.retention_us {
            // Until retention has dropped everything, the logs grow by its commands.
            let end = self.sim.elapsed() + Duration::from_micros(retention_us) + RETENTION_MARGIN;
            self.run_until("the end of retention", REST_MAX, |world| world.sim.elapsed() >= end)?;
        }
        let clients = self.client_count();
        for round in 0..READS_MAX {
            let is_level = |world: &mut Self| world.watch.level(&world.machines).is_some();
            self.run_until("equal replicas", REST_MAX, is_level)?;
            let before = self.watch.level(&self.machines);
            self.watch.compare_partitions(&self.machines)?;
            if let Some(groups) = &self.groups {
                groups.compare(&self.machines, &self.context.members.all())?;
            }
            self.context.set_phase(workload::FINALS + round);
            let is_read = |world: &mut Self| world.context.ended() == clients + 1 + round;
            self.run_until("a read of all replicas", REST_MAX, is_read)?;
            if self.watch.level(&self.machines) == before {
                let found = self.found.lock().map(|mut found| std::mem::take(&mut *found));
                self.recorder.add_all(found.unwrap_or_default());
                let verdict = self.recorder.check();
                self.check_disks()?;
                return if verdict.is_good() { Ok(verdict) } else { Err(verdict.to_string()) };
            }
        }
        Err(format!("the logs grew during each of {READS_MAX} full reads"))
    }

    /// Returns a problem that a member reports.
    fn health_problem(&self) -> Option<String> {
        let members = self.context.members.all();
        let machines = self.machines.iter().filter(|it| members.contains(&it.node_id()));
        machines.filter_map(damage::health_problem).next()
    }

    /// Verifies everything on the disks of all members.
    fn check_disks(&self) -> Result<(), String> {
        let members = self.context.members.all();
        for machine in self.machines.iter().filter(|it| members.contains(&it.node_id())) {
            if let Some(what) = damage::disk_problem(machine.disks(), self.plan.segment_bytes) {
                return Err(format!("after the run, node {}, {what}", machine.node_id()));
            }
        }
        Ok(())
    }

    /// Describes the state of each node, for people.
    fn describe_nodes(&self) -> String {
        let describe = |machine: &SimulatedMachine| {
            let shards = machine.node().map(|node| {
                let shards = node.shards().into_iter().map(|shard| {
                    let it = shard.status();
                    let numbers = (it.term, it.last_index, it.committed, it.applied, it.synced);
                    format!("{}: leads {} {numbers:?}", it.shard_id, it.leader)
                });
                shards.collect::<Vec<_>>().join("; ")
            });
            let state = machine.state();
            format!("\n  node {} {state:?} [{}]", machine.node_id(), shards.unwrap_or_default())
        };
        let acks: Vec<_> =
            (0..self.plan.partitions).map(|partition| self.recorder.acks(partition)).collect();
        let nodes: String = self.machines.iter().map(describe).collect();
        let damage = self.nemesis.describe_damage(&self.machines);
        let health = self.health_problem();
        let recreated = self.recreations.describe();
        let placement = self.plan.placement.as_ref();
        let placement = placement.and_then(|_| placement_watch::problem(&self.machines));
        let group = self
            .groups
            .as_ref()
            .map(|groups| (groups.settled(&self.machines).err(), groups.unread(&self.machines)));
        format!(
            "(term, last, committed, applied, synced) by shard; acks {acks:?}; {damage}; health \
             {health:?}; {recreated}; placement {placement:?}; group {group:?}{nodes}"
        )
    }
}
