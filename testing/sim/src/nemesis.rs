//! Injects the faults of the plan, and heals them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::FutureExt;
use helix_server::raft::Replica;
use helix_wal::storage::{Fault, Operation};
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

    /// Draws the node of a fault: any node, the node of the last fault, or a leader.
    fn choose<'a>(&mut self, machines: &'a [SimulatedMachine]) -> Option<&'a SimulatedMachine> {
        let (draw, shard) =
            (self.rng.random_range(0..10), self.rng.random_range(1..=self.plan.shards));
        let is_leader = |machine: &&SimulatedMachine| {
            let node = machine.node();
            node.is_some_and(|node| {
                node.shards().iter().any(|it| it.id() == shard && it.is_leader())
            })
        };
        let aimed = match draw {
            0..3 => machines.iter().find(|machine| machine.node_id() == self.last_target),
            3..6 => machines.iter().find(is_leader),
            _ => None,
        };
        aimed.or_else(|| machines.choose(&mut self.rng))
    }

    fn inject(&mut self, sim: &mut Sim<'_>, machines: &[SimulatedMachine], kind: FaultKind) {
        let now = sim.elapsed();
        let Some(machine) = self.choose(machines) else { return };
        self.last_target = machine.node_id();
        if self.plan.kinds.contains(&FaultKind::PowerLoss) && self.rng.random_bool(0.15) {
            // A power loss soon after this fault.
            let after = Duration::from_millis(self.rng.random_range(5..1_500));
            self.ends.push((sim.elapsed() + after, FaultEnd::PowerLoss(vec![self.last_target])));
        }
        let (node, nodes) = (machine.node_id(), machines.len());
        let target = host_index(node);
        let ms = |rng: &mut StdRng, range| Duration::from_millis(rng.random_range(range));
        match kind {
            FaultKind::Partition => {
                let reason = self.reason();
                // A node or a minority isolated, or all nodes apart.
                let alone = self.rng.random_bool(0.2);
                let side = self.rng.random_range(1..=nodes / 2);
                for one in 0..nodes {
                    for other in 0..nodes {
                        let differs =
                            ((one + target) % nodes < side) != ((other + target) % nodes < side);
                        if alone || differs {
                            self.links.cut_both(reason, one, other);
                        }
                    }
                }
                self.marks.hit(CoverageMark::PartitionSymmetric);
                self.ends.push((now + ms(&mut self.rng, 20..8_000), FaultEnd::Links(reason)));
            }
            FaultKind::OneWay => {
                let reason = self.reason();
                let outgoing = self.rng.random_bool(0.5);
                for other in 0..nodes {
                    let (from, to) = if outgoing { (target, other) } else { (other, target) };
                    self.links.cut(reason, from, to);
                }
                self.marks.hit(CoverageMark::PartitionOneWay);
                self.ends.push((now + ms(&mut self.rng, 20..8_000), FaultEnd::Links(reason)));
            }
            FaultKind::NonTransitive => {
                let reason = self.reason();
                // Includes clients: a node may reach them but not its peers.
                let other = self.rng.random_range(0..self.links.count());
                self.links.cut_both(reason, target, other);
                self.marks.hit(CoverageMark::PartitionNonTransitive);
                self.ends.push((now + ms(&mut self.rng, 20..8_000), FaultEnd::Links(reason)));
            }
            FaultKind::Hold => {
                let reason = self.reason();
                let other = self.rng.random_range(0..self.links.count());
                self.links.hold(reason, target, other);
                self.marks.hit(CoverageMark::MessagesHeld);
                self.ends.push((now + ms(&mut self.rng, 5..4_000), FaultEnd::Links(reason)));
            }
            FaultKind::Loss => {
                let reason = self.reason();
                let other = self.rng.random_range(0..self.links.count());
                self.links.cut(reason, target, other);
                self.marks.hit(CoverageMark::MessagesLost);
                self.ends.push((now + ms(&mut self.rng, 1..40), FaultEnd::Links(reason)));
            }
            FaultKind::Reset => {
                let other = self.rng.random_range(0..self.links.count());
                if other != target {
                    net::reset(sim.lookup(self.host(target)), sim.lookup(self.host(other)));
                    self.marks.hit(CoverageMark::ConnectionReset);
                }
            }
            FaultKind::FrameTamperer => {
                net::tamper(Some(StdRng::from_rng(&mut self.rng)), &self.marks);
                self.ends.push((now + ms(&mut self.rng, 500..8_000), FaultEnd::Tampering));
            }
            FaultKind::SlowLink => {
                let other = (target + self.rng.random_range(1..nodes)) % nodes;
                let latency = ms(&mut self.rng, 30..200);
                self.links.slow_down(sim, target, other, latency);
                self.marks.hit(CoverageMark::SlowLink);
                self.ends
                    .push((now + ms(&mut self.rng, 500..8_000), FaultEnd::Slow(target, other)));
            }
            FaultKind::PowerLoss => {
                self.marks.hit(CoverageMark::PowerLoss);
                self.take_down(sim, machine, CrashKind::Power);
            }
            FaultKind::PowerLossMidWrite => {
                let changes = self.rng.random_range(0..40);
                self.disk_of(machine, |disks, shard| disks.stop_soon(shard, changes));
            }
            FaultKind::PowerLossOfAll => {
                self.marks.hit(CoverageMark::PowerLossOfAll);
                for machine in machines {
                    self.take_down(sim, machine, CrashKind::Power);
                }
            }
            FaultKind::Kill => {
                self.marks.hit(CoverageMark::ProcessKilled);
                self.take_down(sim, machine, CrashKind::Process);
            }
            FaultKind::Stop => {
                if machine.node().is_some() {
                    self.marks.hit(CoverageMark::GracefulStop);
                    machine.stop();
                }
            }
            FaultKind::SyncError => {
                let after = self.rng.random_range(0..20);
                let which = *[Operation::Sync, Operation::Sync, Operation::SyncDir]
                    .choose(&mut self.rng)
                    .unwrap_or(&Operation::Sync);
                self.tainted.insert(node);
                if self
                    .disk_of(machine, |it, shard| it.fail(shard, Fault::next(which).after(after)))
                {
                    self.marks.hit(CoverageMark::SyncFailed);
                }
            }
            FaultKind::SyncErrorOfAll => {
                let shard = self.rng.random_range(1..=self.plan.shards);
                for machine in machines {
                    let fault = Fault::next(Operation::Sync).after(self.rng.random_range(0..3));
                    self.tainted.insert(machine.node_id());
                    if machine.disks().fail(shard, fault) {
                        self.marks.hit(CoverageMark::SyncFailed);
                    }
                }
                if self.rng.random_bool(0.5) {
                    let nodes = machines.iter().map(SimulatedMachine::node_id).collect();
                    self.ends
                        .push((now + ms(&mut self.rng, 50..2_000), FaultEnd::PowerLoss(nodes)));
                }
            }
            FaultKind::WriteError => {
                let after = self.rng.random_range(0..20);
                let which = *[Operation::Write, Operation::Rename, Operation::Create]
                    .choose(&mut self.rng)
                    .unwrap_or(&Operation::Write);
                self.tainted.insert(node);
                if self
                    .disk_of(machine, |it, shard| it.fail(shard, Fault::next(which).after(after)))
                {
                    self.marks.hit(CoverageMark::WriteFailed);
                }
            }
            FaultKind::Stall => {
                machine.disks().set_stall(ms(&mut self.rng, 100..2_500));
                self.marks.hit(CoverageMark::DiskStalled);
                self.ends.push((now + ms(&mut self.rng, 200..6_000), FaultEnd::Stall(node)));
            }
            FaultKind::Full => {
                self.tainted.insert(node);
                self.full.insert(node, FULL_BYTES);
                machine.disks().set_free(Some(FULL_BYTES));
                self.ends.push((now + ms(&mut self.rng, 1_000..9_000), FaultEnd::Full(node)));
            }
            FaultKind::FilledUp => {
                // Other data fills the disk, or leaves very little free space.
                let left = self.plan.segment_bytes * self.rng.random_range(0..4);
                self.tainted.insert(node);
                self.full.insert(node, left);
                machine.disks().set_free(Some(left));
                self.marks.hit(CoverageMark::DiskFilledUp);
                self.ends.push((now + ms(&mut self.rng, 500..9_000), FaultEnd::Full(node)));
            }
            FaultKind::Damage => {
                if self.damage.inject(machine, now, &mut self.rng).removed_segment {
                    // The node ends if it tries to rename the segment.
                    self.tainted.insert(node);
                }
            }
            FaultKind::CopyDamage => {
                let is_done = self.damage.inject_copies(machines, None, now, &mut self.rng);
                // A replica that is away meanwhile fetches from damaged ones when it returns.
                if is_done && self.rng.random_bool(0.3) {
                    self.take_down(sim, machine, CrashKind::Process);
                }
            }
            FaultKind::ClockJump => {
                let wrong = self.plan.wrong_clocks.choose(&mut self.rng).copied();
                let jumping = wrong.and_then(|node| machines.get(host_index(node)));
                let minutes_us = self.rng.random_range(-600_000_000..=600_000_000);
                // Days, minutes, or right again.
                let error_us = match jumping.map(|_| self.rng.random_range(0..6)) {
                    None | Some(0) => minutes_us,
                    Some(1) => 0,
                    Some(_) => minutes_us * 500,
                };
                jumping.unwrap_or(machine).clock().set_error(error_us);
                self.marks.hit(CoverageMark::ClockJump);
            }
            FaultKind::Wipe => {
                if machine.is_on() && self.members.lose(node) {
                    self.marks.hit(CoverageMark::NodeWiped);
                    self.take_down(sim, machine, CrashKind::Power);
                    self.wipe(machine);
                }
            }
            FaultKind::Election => {
                // Several nodes campaign at the same time.
                let shard = self.rng.random_range(0..=self.plan.shards);
                let candidates = machines.iter().filter(|_| self.rng.random_bool(0.6));
                for machine in candidates.collect::<Vec<_>>() {
                    let Some(node) = machine.node() else { continue };
                    // A replica in repair must not campaign.
                    let elect = |it: &Replica| {
                        it.repair_of().is_none().then(|| it.elect().now_or_never()).flatten()
                    };
                    let elected = match node.shards().iter().find(|it| it.id() == shard) {
                        Some(it) => elect(it.replica()),
                        None => elect(&node.cluster().replica()),
                    };
                    if elected.is_some_and(|result| result.is_ok()) {
                        self.marks.hit(CoverageMark::ElectionForced);
                    }
                }
            }
            // Done by the operator.
            FaultKind::Transfer | FaultKind::Drain | FaultKind::Grow => {}
        }
    }

    /// Applies a fault to the disk of a random shard, mostly of a data shard.
    fn disk_of(
        &mut self,
        machine: &SimulatedMachine,
        act: impl FnOnce(&crate::disks::NodeDisks, u64) -> bool,
    ) -> bool {
        self.tainted.insert(machine.node_id());
        let shard = match self.rng.random_bool(0.85) {
            true => self.rng.random_range(1..=self.plan.shards),
            false => 0,
        };
        act(machine.disks(), shard)
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
