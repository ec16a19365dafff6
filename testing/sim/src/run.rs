//! One run: a cluster is made, broken while it is used, healed, and judged.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::thread;
use std::time::Duration;

use helix_checker::Verdict;
use helix_server::raft::seed_this_thread;
use hermetic::Hermetic;
use turmoil::{Builder, Sim};

use crate::cluster::Machine;
use crate::damage;
use crate::finals::{self, Found};
use crate::marks::{Mark, Marks};
use crate::nemesis::Nemesis;
use crate::net;
use crate::operator;
use crate::plan::{Kind, Plan};
use crate::record::Recorder;
use crate::watch::Watch;
use crate::workload::{self, Scene};

const TICK: Duration = Duration::from_millis(1);

/// Simulated time that a run may take at most.
const RUN_MAX: Duration = Duration::from_secs(3_600);

/// How long it may take until there is a topic.
const FORM_MAX: Duration = Duration::from_secs(120);

/// How long a healed cluster may take until every partition has a new ack.
const PROGRESS_MAX: Duration = Duration::from_secs(40);

/// How long whoever was damaged may take until it is as it was.
const REPAIR_MAX: Duration = Duration::from_secs(120);

/// How long clients may take to come to rest, and replicas to become equal.
const REST_MAX: Duration = Duration::from_secs(90);

/// Full reads that are begun again because something changed meanwhile.
const READS_MAX: u32 = 6;

/// What a run has come to.
#[derive(Debug)]
pub struct Report {
    pub plan: Plan,
    pub verdict: Verdict,
    pub marks: Marks,
    pub simulated: Duration,
    pub faults: BTreeMap<Kind, u64>,
    pub crashes: u64,
    /// Equal for equal runs.
    pub hash: u64,
    pub trace: Vec<String>,
}

/// Why a run failed.
#[derive(Debug)]
pub struct Failure {
    pub seed: u64,
    pub what: String,
    pub trace: Vec<String>,
}

/// Runs one seed. Keeps the whole trace if asked to.
///
/// # Errors
/// Something that must hold did not.
pub fn run(seed: u64, keeps_trace: bool) -> Result<Report, Failure> {
    run_plan(Plan::new(seed), keeps_trace)
}

/// As [`run`], with another plan than the seed's own.
///
/// # Errors
/// As [`run`].
pub fn run_plan(plan: Plan, keeps_trace: bool) -> Result<Report, Failure> {
    let (seed, recorder) = (plan.seed, Recorder::new(keeps_trace));
    // On a thread of its own: what the libraries keep for each thread must not come from the run
    // before. The nodes' log goes where the caller's goes.
    let dispatch = tracing::dispatcher::get_default(Clone::clone);
    let run = || {
        let hermetic = Hermetic::enter(seed);
        let run = || World::new(plan, recorder.clone(), hermetic).run();
        tracing::dispatcher::with_default(&dispatch, run)
    };
    let joined = thread::scope(|scope| scope.spawn(run).join());
    // A panic anywhere in the product is a finding like any other.
    let what = match joined {
        Ok(Ok(report)) => return Ok(report),
        Ok(Err(what)) => what,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
            format!("a panic: {}", text.unwrap_or_default())
        }
    };
    Err(Failure { seed, what, trace: recorder.trace() })
}

struct World {
    plan: Plan,
    /// Not dropped when a run fails: what is left of it may panic again.
    sim: ManuallyDrop<Sim<'static>>,
    machines: Vec<Machine>,
    nemesis: Nemesis,
    watch: Watch,
    scene: Scene,
    /// What the final reads have found.
    found: Found,
    recorder: Recorder,
    marks: Marks,
    hermetic: Hermetic,
}

impl World {
    fn new(plan: Plan, recorder: Recorder, hermetic: Hermetic) -> Self {
        // openraft draws its timeouts on whatever thread it runs.
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
        let machines: Vec<_> =
            (1..=plan.machines()).map(|node| Machine::new(&plan, node)).collect();
        // Hosts take their turns in the order in which they came; every seed has its own.
        for node in &plan.order {
            let Some(machine) = machines.iter().find(|it| it.node_id() == *node) else { continue };
            let machine = machine.clone();
            sim.host(machine.host(), move || machine.clone().live());
        }
        let marks = Marks::default();
        let scene = Scene::new(&plan, recorder.clone(), marks.clone());
        let found = Found::default();
        sim.client("setter", workload::set(scene.clone()));
        sim.client("writers", workload::write(scene.clone()));
        sim.client("readers", workload::read(scene.clone()));
        sim.client("operator", operator::operate(scene.clone()));
        sim.client("finals", finals::read(scene.clone(), READS_MAX, found.clone()));
        let hosts = machines.iter().map(Machine::host);
        let hosts = hosts.chain(["writers", "readers"].map(str::to_owned)).collect();
        if plan.nodes == 5 {
            marks.hit(Mark::FiveNodes);
        }
        let members = scene.members.clone();
        let mut nemesis =
            Nemesis::new(&plan, hosts, members.clone(), recorder.clone(), marks.clone());
        nemesis.set_latencies(&sim);
        Self {
            nemesis,
            found,
            watch: Watch::new(members, recorder.clone(), marks.clone()),
            sim: ManuallyDrop::new(sim),
            machines,
            scene,
            recorder,
            marks,
            hermetic,
            plan,
        }
    }

    /// One tick.
    fn step(&mut self, breaks: bool) -> Result<(), String> {
        self.hermetic.set_now(self.sim.elapsed());
        self.recorder.on_tick(self.sim.elapsed(), net::take_wire());
        self.sim.step().map_err(|error| error.to_string())?;
        self.watch.look(&self.machines)?;
        self.nemesis.tick(&mut self.sim, &self.machines, breaks)
    }

    /// Goes on until `done`, or fails after `limit`.
    fn until(
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
                return Err(format!("{what} not within {limit:?}: {}", self.standings()));
            }
        }
    }

    fn run(mut self) -> Result<Report, String> {
        self.form()?;
        self.break_it()?;
        self.heal()?;
        let verdict = self.judge()?;
        if verdict.open_applied > 0 {
            self.marks.hit(Mark::OpenOutcomeApplied);
        }
        let report = Report {
            simulated: self.sim.elapsed(),
            faults: std::mem::take(&mut self.nemesis.counts),
            crashes: self.nemesis.crashes,
            hash: self.recorder.hash(),
            trace: self.recorder.trace(),
            marks: self.marks.clone(),
            plan: self.plan.clone(),
            verdict,
        };
        ManuallyDrop::into_inner(self.sim);
        Ok(report)
    }

    fn form(&mut self) -> Result<(), String> {
        self.until("a topic", FORM_MAX, |world| world.scene.ended() == 1)
    }

    fn break_it(&mut self) -> Result<(), String> {
        self.scene.set_phase(workload::TOPIC_IS_THERE);
        let end = self.sim.elapsed() + self.plan.duration;
        if self.plan.retention_bytes.is_some() {
            // How far it comes depends on where segments end on the leader.
            for partition in 0..self.plan.partitions {
                let offset = u64::MAX;
                self.recorder.add(helix_checker::Event::MayTrim { partition, offset });
            }
        }
        while self.sim.elapsed() < end {
            self.step(true)?;
        }
        Ok(())
    }

    fn heal(&mut self) -> Result<(), String> {
        self.nemesis.heal(&mut self.sim, &self.machines);
        let partitions = 0..self.plan.partitions;
        let before: Vec<_> = partitions.map(|it| self.recorder.acks(it)).collect();
        let done = |world: &mut Self| {
            (0..).zip(&before).all(|(partition, acks)| world.recorder.acks(partition) > *acks)
        };
        self.until("a new ack in every partition", PROGRESS_MAX, done)?;
        // Beside writers and readers: there is always something new to be fetched.
        self.until("a repair of all damage", REPAIR_MAX, |world| world.nemesis.is_repaired())?;
        self.scene.stop();
        self.until("all clients at rest", REST_MAX, |world| world.scene.ended() == 4)
    }

    /// Reads every replica at one moment, and judges the whole history.
    fn judge(&mut self) -> Result<Verdict, String> {
        for round in 0..READS_MAX {
            let is_level = |world: &mut Self| world.watch.level(&world.machines).is_some();
            self.until("equal replicas", REST_MAX, is_level)?;
            let before = self.watch.level(&self.machines);
            self.watch.compare_partitions(&self.machines)?;
            self.scene.set_phase(workload::FINALS + round);
            let is_read = |world: &mut Self| world.scene.ended() == 5 + round;
            self.until("a read of all replicas", REST_MAX, is_read)?;
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

    /// Everything on the disks of all members verifies.
    fn check_disks(&self) -> Result<(), String> {
        let members = self.scene.members.all();
        for machine in self.machines.iter().filter(|it| members.contains(&it.node_id())) {
            if let Some(what) = damage::ailment(machine.disks(), self.plan.segment_bytes) {
                return Err(format!("in the end, node {}, {what}", machine.node_id()));
            }
        }
        Ok(())
    }

    /// For people: how each node stands.
    fn standings(&self) -> String {
        let standing = |machine: &Machine| {
            let shards = machine.node().map(|node| {
                let shards = node.shards().into_iter().map(|shard| {
                    let it = shard.status();
                    let numbers = (it.term, it.last_index, it.committed, it.applied, it.synced);
                    format!("{}: leads {} {numbers:?}", it.shard_id, it.leader)
                });
                shards.collect::<Vec<_>>().join("; ")
            });
            let standing = machine.standing();
            format!("\n  node {} {standing:?} [{}]", machine.node_id(), shards.unwrap_or_default())
        };
        let acks: Vec<_> =
            (0..self.plan.partitions).map(|partition| self.recorder.acks(partition)).collect();
        let nodes: String = self.machines.iter().map(standing).collect();
        let ailing = self.nemesis.ailing(&self.machines);
        format!("(term, last, committed, applied, synced) by shard; acks {acks:?}; {ailing}{nodes}")
    }
}
