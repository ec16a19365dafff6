//! Injects the faults of the plan, and heals them.

mod injection;
mod steps;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use turmoil::Sim;

use crate::cluster::{MachineState, SimulatedMachine};
use crate::coverage::{CoverageMark, CoverageMarks};
use crate::damage::DamageInjector;
use crate::links::Links;
use crate::membership::{MachineOrder, MembershipTracker};
use crate::net;
use crate::plan::{FaultKind, SimulationPlan, Theme};
use crate::recorder::Recorder;
use steps::StepWatch;

/// Free bytes of a full disk.
///
/// Less than the reserve of a log, so that appends are rejected. More than half of it, which
/// requests in flight may use.
const FULL_BYTES: u64 = 192 << 20;

/// Probability per tick that a link gets another latency.
const LATENCY_CHANGES: f64 = 0.01;

/// Probability per tick of a check whether a replica is fetching: then others are damaged.
const FETCH_CHECKS: f64 = 0.05;

/// Later action of a fault: its end, or a power loss.
#[derive(Debug, Clone)]
enum FaultEnd {
    Links(u64),
    Start(u64),
    Stall(u64),
    Full(u64),
    Slow(usize, usize),
    Tampering,
    PowerLoss(Vec<u64>),
}

/// Kind of a node's crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CrashKind {
    /// Power loss: unsynced data is lost, torn or garbled.
    Power,
    /// End of the process: the page cache survives.
    Process,
}

/// Injects faults.
#[derive(Debug)]
pub struct Nemesis {
    plan: SimulationPlan,
    recorder: Recorder,
    marks: CoverageMarks,
    rng: StdRng,
    links: Links,
    next_at: Duration,
    ends: Vec<(Duration, FaultEnd)>,
    reasons: u64,
    /// Nodes that are down, with the reason that cuts their links.
    down: BTreeMap<u64, u64>,
    /// Nodes whose storage may fail because of a fault.
    tainted: BTreeSet<u64>,
    full: BTreeMap<u64, u64>,
    members: MembershipTracker,
    damage: DamageInjector,
    steps: StepWatch,
    /// Node of the last fault.
    last_target: u64,
    is_over: bool,
    /// Injected faults by kind.
    pub counts: BTreeMap<FaultKind, u64>,
    pub crashes: u64,
}

impl Nemesis {
    /// Creates the nemesis. `hosts` has the nodes first, in order.
    pub fn new(
        plan: &SimulationPlan,
        hosts: Vec<String>,
        members: MembershipTracker,
        recorder: Recorder,
        marks: CoverageMarks,
    ) -> Self {
        Self {
            damage: DamageInjector::new(plan, members.clone(), recorder.clone(), marks.clone()),
            members,
            rng: StdRng::seed_from_u64(plan.seed ^ 0x6e_656d),
            plan: plan.clone(),
            recorder,
            marks,
            links: Links::new(hosts, plan.latency_max),
            next_at: Duration::ZERO,
            ends: Vec::new(),
            reasons: 0,
            down: BTreeMap::new(),
            tainted: BTreeSet::new(),
            full: BTreeMap::new(),
            steps: StepWatch::default(),
            last_target: 1,
            is_over: false,
            counts: BTreeMap::new(),
            crashes: 0,
        }
    }

    /// Executes due actions after a tick. Injects new faults only if `may_inject`.
    ///
    /// # Errors
    /// A node failed without a fault that could be the cause.
    pub fn tick(
        &mut self,
        sim: &mut Sim<'_>,
        machines: &[SimulatedMachine],
        may_inject: bool,
    ) -> Result<(), String> {
        let now = sim.elapsed();
        if self.rng.random_bool(LATENCY_CHANGES) {
            let hosts = self.links.count();
            let one = self.rng.random_range(0..hosts);
            let other = (one + self.rng.random_range(1..hosts)) % hosts;
            self.links.draw_latency(sim, one, other, &mut self.rng);
        }
        self.execute_orders(sim, machines);
        self.take_down_ended(sim, machines, now)?;
        if let Some(node) = self.damage.check_recovery(machines, now)
            && let Some(machine) = machines.get(host_index(node))
        {
            let how = if self.rng.random_bool(0.5) { CrashKind::Power } else { CrashKind::Process };
            self.take_down(sim, machine, how);
        }
        let (due, later) = self.ends.drain(..).partition(|(at, _)| *at <= now);
        self.ends = later;
        let due: Vec<(Duration, FaultEnd)> = due;
        for (_, end) in due {
            self.end(sim, machines, end);
        }
        if may_inject && now >= self.next_at {
            let gap = self.plan.gap.mul_f64(self.rng.random_range(0.1..2.0));
            let is_first = self.next_at.is_zero();
            self.next_at = now + gap;
            if !is_first && let Some(kind) = self.plan.kinds.choose(&mut self.rng).copied() {
                *self.counts.entry(kind).or_default() += 1;
                self.recorder.note(&format!("fault: {kind:?}"));
                self.inject(sim, machines, kind);
            }
        }
        if may_inject
            && self.plan.theme == Some(Theme::Copies)
            && self.rng.random_bool(FETCH_CHECKS)
        {
            self.damage.inject_during_fetch(machines, now, &mut self.rng);
        }
        if self.plan.theme == Some(Theme::Placement) {
            self.crash_at_steps(sim, machines, may_inject);
        }
        self.links.apply(sim);
        Ok(())
    }

    /// Executes the operator's orders.
    fn execute_orders(&mut self, sim: &mut Sim<'_>, machines: &[SimulatedMachine]) {
        for order in self.members.take_orders() {
            let (MachineOrder::Start(node) | MachineOrder::Retire(node)) = order;
            let Some(machine) = machines.get(host_index(node)) else { continue };
            self.recorder.note(&format!("{order:?}"));
            match order {
                MachineOrder::Start(_) => {
                    machine.set_on(true);
                    machine.set_state(MachineState::Opening);
                    sim.bounce(machine.host());
                }
                MachineOrder::Retire(_) => {
                    self.take_down(sim, machine, CrashKind::Process);
                    if let Some(reason) = self.down.remove(&node) {
                        self.links.remove_reason(reason);
                    }
                    machine.set_on(false);
                    self.wipe(machine);
                }
            }
        }
    }

    /// Replaces the disks of a stopped machine with empty disks.
    fn wipe(&mut self, machine: &SimulatedMachine) {
        machine.disks().wipe();
        machine.forget_last_node();
        self.members.on_wipe(machine.node_id());
        self.damage.forget(machine.node_id());
        if let Some(free) = self.full.get(&machine.node_id()) {
            // The machine stays full, and may lack disk space to start.
            machine.disks().set_free(Some(*free));
        } else {
            self.tainted.remove(&machine.node_id());
        }
    }

    /// Crashes the hosts of nodes that have ended, or whose disk has stopped.
    fn take_down_ended(
        &mut self,
        sim: &mut Sim<'_>,
        machines: &[SimulatedMachine],
        now: Duration,
    ) -> Result<(), String> {
        for machine in machines {
            let node = machine.node_id();
            if self.down.contains_key(&node) || !machine.is_on() {
                continue;
            }
            if machine.disks().has_stopped() {
                self.marks.hit(CoverageMark::PowerLossMidWrite);
                self.take_down(sim, machine, CrashKind::Power);
                continue;
            }
            match machine.state() {
                MachineState::Opening | MachineState::Open(_) => {}
                MachineState::Stopped => self.take_down(sim, machine, CrashKind::Process),
                MachineState::Failed(why) if self.tainted.contains(&node) => {
                    self.recorder.note(&format!("node {node} ended: {why}"));
                    self.take_down(sim, machine, CrashKind::Process);
                }
                MachineState::Failed(why) => {
                    return Err(format!("at {now:?} node {node} failed without a cause: {why}"));
                }
            }
        }
        Ok(())
    }

    fn take_down(&mut self, sim: &mut Sim<'_>, machine: &SimulatedMachine, how: CrashKind) {
        let node = machine.node_id();
        if self.down.contains_key(&node) || !machine.is_on() {
            return;
        }
        if matches!(machine.state(), MachineState::Opening) {
            self.marks.hit(CoverageMark::CrashDuringOpen);
        }
        self.recorder.note(&format!("node {node} is down: {how:?}"));
        self.crashes += 1;
        let reason = self.reason();
        self.down.insert(node, reason);
        let seed = self.rng.random();
        match how {
            CrashKind::Power => {
                // Half of the time without closing connections: messages in flight are lost too.
                if self.rng.random_bool(0.5) {
                    for other in 0..self.links.count() {
                        self.links.cut_both(reason, host_index(node), other);
                    }
                    self.links.apply(sim);
                }
                machine.disks().lose_power(seed);
            }
            CrashKind::Process => machine.disks().lose_process(),
        }
        sim.crash(machine.host());
        machine.set_state(MachineState::Stopped);
        let pause = match self.is_over {
            true => Duration::from_millis(100),
            false => Duration::from_millis(match self.rng.random_range(0..4) {
                0 => 0,
                1..3 => self.rng.random_range(0..1_500),
                _ => self.rng.random_range(0..8_000),
            }),
        };
        self.ends.push((sim.elapsed() + pause, FaultEnd::Start(node)));
    }

    fn start(&mut self, sim: &mut Sim<'_>, machine: &SimulatedMachine) {
        let node = machine.node_id();
        // The machine may have been retired meanwhile.
        let Some(reason) = self.down.remove(&node) else { return };
        // Some starts run into remaining faults.
        if self.rng.random_bool(0.7) {
            machine.disks().heal();
            if let Some(free) = self.full.get(&node) {
                machine.disks().set_free(Some(*free));
            } else {
                self.tainted.remove(&node);
            }
        }
        self.links.remove_reason(reason);
        self.links.apply(sim);
        self.recorder.note(&format!("node {node} starts"));
        machine.set_state(MachineState::Opening);
        sim.bounce(machine.host());
    }

    fn end(&mut self, sim: &mut Sim<'_>, machines: &[SimulatedMachine], end: FaultEnd) {
        let machine = |node: u64| machines.get(host_index(node));
        match end {
            FaultEnd::Links(reason) => self.links.remove_reason(reason),
            FaultEnd::Start(node) => {
                if let Some(machine) = machine(node) {
                    self.start(sim, machine);
                }
            }
            FaultEnd::Stall(node) => {
                if let Some(machine) = machine(node) {
                    machine.disks().set_stall(Duration::ZERO);
                }
            }
            FaultEnd::Full(node) => {
                self.full.remove(&node);
                self.marks.hit(CoverageMark::DiskFullLeft);
                if let Some(machine) = machine(node) {
                    machine.disks().set_free(None);
                }
            }
            FaultEnd::PowerLoss(nodes) => {
                for machine in nodes.into_iter().filter_map(machine) {
                    self.marks.hit(CoverageMark::PowerLoss);
                    self.take_down(sim, machine, CrashKind::Power);
                }
            }
            FaultEnd::Tampering => net::tamper(None, &self.marks),
            FaultEnd::Slow(one, other) => {
                self.links.restore_speed(one, other);
                self.links.draw_latency(sim, one, other, &mut self.rng);
            }
        }
    }

    /// Ends all faults and starts all nodes.
    pub fn heal(&mut self, sim: &mut Sim<'_>, machines: &[SimulatedMachine]) {
        self.is_over = true;
        self.recorder.note("healing all faults");
        for (_, end) in std::mem::take(&mut self.ends) {
            if !matches!(end, FaultEnd::Start(_) | FaultEnd::PowerLoss(_)) {
                self.end(sim, machines, end);
            }
        }
        for machine in machines {
            if machine.finish_upgrade() {
                self.take_down(sim, machine, CrashKind::Process);
            }
            machine.disks().heal();
            machine.disks().speed_up();
            self.start(sim, machine);
            machine.disks().heal();
        }
        self.full.clear();
        self.damage.discover_now();
        self.links.apply(sim);
    }

    /// Returns whether all damage is repaired.
    pub fn is_repaired(&self) -> bool {
        !self.members.has_damage()
    }

    /// Describes the remaining damage, for people.
    pub fn describe_damage(&self, machines: &[SimulatedMachine]) -> String {
        self.damage.describe(machines)
    }

    fn reason(&mut self) -> u64 {
        self.reasons += 1;
        self.reasons
    }

    pub fn set_latencies(&mut self, sim: &Sim<'_>) {
        self.links.draw_latencies(sim, &mut self.rng);
    }

    fn host(&self, host_index: usize) -> String {
        self.links.name(host_index).to_owned()
    }
}

/// Converts a node id, counted from 1, to a host index, counted from 0.
fn host_index(node: u64) -> usize {
    usize::try_from(node).unwrap_or(1) - 1
}
