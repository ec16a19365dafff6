//! Breaks the world as the plan says, and puts it together again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::FutureExt;
use helix_server::raft::Replica;
use helix_wal::storage::{Fault, Operation};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use turmoil::Sim;

use crate::cluster::{Machine, Standing};
use crate::damage::Damage;
use crate::links::Links;
use crate::marks::{Mark, Marks};
use crate::members::{Members, Order};
use crate::net;
use crate::plan::{Kind, Plan};
use crate::record::Recorder;

/// Room that is left on a disk that fills up: less than the reserve that a log keeps free, so that
/// appends are refused, and more than the half of it that what is under way already may use.
const FULL_BYTES: u64 = 192 << 20;

/// How often, per tick, some link gets another latency.
const LATENCY_CHANGES: f64 = 0.01;

/// What ends a fault, or makes it worse.
#[derive(Debug, Clone)]
enum End {
    Links(u64),
    Start(u64),
    Stall(u64),
    Full(u64),
    Slow(usize, usize),
    Tampering,
    PowerLoss(Vec<u64>),
}

/// How a node goes down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Down {
    /// Without a word, and what was not synced is lost, torn or garbled.
    Power,
    /// The process only.
    Process,
}

/// See the module.
#[derive(Debug)]
pub struct Nemesis {
    plan: Plan,
    recorder: Recorder,
    marks: Marks,
    rng: StdRng,
    links: Links,
    next_at: Duration,
    ends: Vec<(Duration, End)>,
    reasons: u64,
    /// Nodes that are down, each with the reason that cuts it off.
    down: BTreeMap<u64, u64>,
    /// Nodes whose storage may fail, for it was made to.
    tainted: BTreeSet<u64>,
    full: BTreeMap<u64, u64>,
    members: Members,
    damage: Damage,
    /// Whom the last fault was for.
    last_struck: u64,
    is_over: bool,
    /// How many faults of each kind there were.
    pub counts: BTreeMap<Kind, u64>,
    pub crashes: u64,
}

impl Nemesis {
    /// `hosts` are all hosts, the nodes first and in order.
    pub fn new(
        plan: &Plan,
        hosts: Vec<String>,
        members: Members,
        recorder: Recorder,
        marks: Marks,
    ) -> Self {
        Self {
            damage: Damage::new(plan, members.clone(), recorder.clone(), marks.clone()),
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
            last_struck: 1,
            is_over: false,
            counts: BTreeMap::new(),
            crashes: 0,
        }
    }

    /// What is due after a tick. `breaks` says whether there may be new faults.
    ///
    /// # Errors
    /// A node has failed, and nothing was done to it that could be the cause.
    pub fn tick(
        &mut self,
        sim: &mut Sim<'_>,
        machines: &[Machine],
        breaks: bool,
    ) -> Result<(), String> {
        let now = sim.elapsed();
        if self.rng.random_bool(LATENCY_CHANGES) {
            let hosts = self.links.count();
            let one = self.rng.random_range(0..hosts);
            let other = (one + self.rng.random_range(1..hosts)) % hosts;
            self.links.draw_latency(sim, one, other, &mut self.rng);
        }
        self.obey(sim, machines);
        self.bury(sim, machines, now)?;
        if let Some(node) = self.damage.tend(machines, now)
            && let Some(machine) = machines.get(place(node))
        {
            let how = if self.rng.random_bool(0.5) { Down::Power } else { Down::Process };
            self.take_down(sim, machine, how);
        }
        let (due, later) = self.ends.drain(..).partition(|(at, _)| *at <= now);
        self.ends = later;
        let due: Vec<(Duration, End)> = due;
        for (_, end) in due {
            self.end(sim, machines, end);
        }
        if breaks && now >= self.next_at {
            let gap = self.plan.gap.mul_f64(self.rng.random_range(0.1..2.0));
            let is_first = self.next_at.is_zero();
            self.next_at = now + gap;
            if !is_first && let Some(kind) = self.plan.kinds.choose(&mut self.rng).copied() {
                *self.counts.entry(kind).or_default() += 1;
                self.recorder.note(&format!("fault: {kind:?}"));
                self.strike(sim, machines, kind);
            }
        }
        self.links.apply(sim);
        Ok(())
    }

    /// Does what the operator has asked for.
    fn obey(&mut self, sim: &mut Sim<'_>, machines: &[Machine]) {
        for order in self.members.take_orders() {
            let (Order::Start(node) | Order::Retire(node)) = order;
            let Some(machine) = machines.get(place(node)) else { continue };
            self.recorder.note(&format!("{order:?}"));
            match order {
                Order::Start(_) => {
                    machine.switch(true);
                    machine.set_standing(Standing::Opening);
                    sim.bounce(machine.host());
                }
                Order::Retire(_) => {
                    self.take_down(sim, machine, Down::Process);
                    if let Some(reason) = self.down.remove(&node) {
                        self.links.forget(reason);
                    }
                    machine.switch(false);
                    self.wipe(machine);
                }
            }
        }
    }

    /// A machine that is down gets other disks.
    fn wipe(&mut self, machine: &Machine) {
        machine.disks().wipe();
        machine.forget_last();
        self.members.on_wipe(machine.node_id());
        self.damage.forget(machine.node_id());
        if let Some(free) = self.full.get(&machine.node_id()) {
            // What fills the machine is there still: it may find no room to begin in.
            machine.disks().set_free(Some(*free));
        } else {
            self.tainted.remove(&machine.node_id());
        }
    }

    /// Takes away nodes that have ended by themselves, and those whose disk has stopped.
    fn bury(
        &mut self,
        sim: &mut Sim<'_>,
        machines: &[Machine],
        now: Duration,
    ) -> Result<(), String> {
        for machine in machines {
            let node = machine.node_id();
            if self.down.contains_key(&node) || !machine.is_on() {
                continue;
            }
            if machine.disks().has_stopped() {
                self.marks.hit(Mark::PowerLossMidWrite);
                self.take_down(sim, machine, Down::Power);
                continue;
            }
            match machine.standing() {
                Standing::Opening | Standing::Open(_) => {}
                Standing::Stopped => self.take_down(sim, machine, Down::Process),
                Standing::Failed(why) if self.tainted.contains(&node) => {
                    self.recorder.note(&format!("node {node} ended: {why}"));
                    self.take_down(sim, machine, Down::Process);
                }
                Standing::Failed(why) => {
                    return Err(format!("at {now:?} node {node} failed without a cause: {why}"));
                }
            }
        }
        Ok(())
    }

    fn take_down(&mut self, sim: &mut Sim<'_>, machine: &Machine, how: Down) {
        let node = machine.node_id();
        if self.down.contains_key(&node) || !machine.is_on() {
            return;
        }
        if matches!(machine.standing(), Standing::Opening) {
            self.marks.hit(Mark::CrashDuringOpen);
        }
        self.recorder.note(&format!("node {node} is down: {how:?}"));
        self.crashes += 1;
        let reason = self.reason();
        self.down.insert(node, reason);
        let seed = self.rng.random();
        match how {
            Down::Power => {
                // Without a farewell to its peers; or with one, and with what it had sent before.
                if self.rng.random_bool(0.5) {
                    for other in 0..self.links.count() {
                        self.links.cut_both(reason, place(node), other);
                    }
                    self.links.apply(sim);
                }
                machine.disks().lose_power(seed);
            }
            Down::Process => machine.disks().lose_process(),
        }
        sim.crash(machine.host());
        machine.set_standing(Standing::Stopped);
        let pause = match self.is_over {
            true => Duration::from_millis(100),
            false => Duration::from_millis(match self.rng.random_range(0..4) {
                0 => 0,
                1..3 => self.rng.random_range(0..1_500),
                _ => self.rng.random_range(0..8_000),
            }),
        };
        self.ends.push((sim.elapsed() + pause, End::Start(node)));
    }

    fn start(&mut self, sim: &mut Sim<'_>, machine: &Machine) {
        let node = machine.node_id();
        // It may have been taken away for good meanwhile.
        let Some(reason) = self.down.remove(&node) else { return };
        // Some starts meet what is left of the faults.
        if self.rng.random_bool(0.7) {
            machine.disks().heal();
            if let Some(free) = self.full.get(&node) {
                machine.disks().set_free(Some(*free));
            } else {
                self.tainted.remove(&node);
            }
        }
        self.links.forget(reason);
        self.links.apply(sim);
        self.recorder.note(&format!("node {node} starts"));
        machine.set_standing(Standing::Opening);
        sim.bounce(machine.host());
    }

    fn end(&mut self, sim: &mut Sim<'_>, machines: &[Machine], end: End) {
        let machine = |node: u64| machines.get(place(node));
        match end {
            End::Links(reason) => self.links.forget(reason),
            End::Start(node) => {
                if let Some(machine) = machine(node) {
                    self.start(sim, machine);
                }
            }
            End::Stall(node) => {
                if let Some(machine) = machine(node) {
                    machine.disks().set_stall(Duration::ZERO);
                }
            }
            End::Full(node) => {
                self.full.remove(&node);
                self.marks.hit(Mark::DiskFullLeft);
                if let Some(machine) = machine(node) {
                    machine.disks().set_free(None);
                }
            }
            End::PowerLoss(nodes) => {
                for machine in nodes.into_iter().filter_map(machine) {
                    self.marks.hit(Mark::PowerLoss);
                    self.take_down(sim, machine, Down::Power);
                }
            }
            End::Tampering => net::tamper(None, &self.marks),
            End::Slow(one, other) => {
                self.links.hasten(one, other);
                self.links.draw_latency(sim, one, other, &mut self.rng);
            }
        }
    }

    /// Whom a fault is for: anyone, the one that the last fault was for, or one that leads.
    fn choose<'a>(&mut self, machines: &'a [Machine]) -> Option<&'a Machine> {
        let (draw, shard) =
            (self.rng.random_range(0..10), self.rng.random_range(1..=self.plan.shards));
        let leads = |machine: &&Machine| {
            let node = machine.node();
            node.is_some_and(|node| node.shards().iter().any(|it| it.id() == shard && it.leads()))
        };
        let aimed = match draw {
            0..3 => machines.iter().find(|machine| machine.node_id() == self.last_struck),
            3..6 => machines.iter().find(leads),
            _ => None,
        };
        aimed.or_else(|| machines.choose(&mut self.rng))
    }

    fn strike(&mut self, sim: &mut Sim<'_>, machines: &[Machine], kind: Kind) {
        let now = sim.elapsed();
        let Some(machine) = self.choose(machines) else { return };
        self.last_struck = machine.node_id();
        if self.plan.kinds.contains(&Kind::PowerLoss) && self.rng.random_bool(0.15) {
            // Soon after whatever comes now.
            let after = Duration::from_millis(self.rng.random_range(5..1_500));
            self.ends.push((sim.elapsed() + after, End::PowerLoss(vec![self.last_struck])));
        }
        let (node, nodes) = (machine.node_id(), machines.len());
        let here = place(node);
        let ms = |rng: &mut StdRng, range| Duration::from_millis(rng.random_range(range));
        match kind {
            Kind::Partition => {
                let reason = self.reason();
                // One node, a minority, or everyone alone.
                let alone = self.rng.random_bool(0.2);
                let side = self.rng.random_range(1..=nodes / 2);
                for one in 0..nodes {
                    for other in 0..nodes {
                        let differs =
                            ((one + here) % nodes < side) != ((other + here) % nodes < side);
                        if alone || differs {
                            self.links.cut_both(reason, one, other);
                        }
                    }
                }
                self.marks.hit(Mark::PartitionSymmetric);
                self.ends.push((now + ms(&mut self.rng, 20..8_000), End::Links(reason)));
            }
            Kind::OneWay => {
                let reason = self.reason();
                let hears = self.rng.random_bool(0.5);
                for other in 0..nodes {
                    let (from, to) = if hears { (here, other) } else { (other, here) };
                    self.links.cut(reason, from, to);
                }
                self.marks.hit(Mark::PartitionOneWay);
                self.ends.push((now + ms(&mut self.rng, 20..8_000), End::Links(reason)));
            }
            Kind::NonTransitive => {
                let reason = self.reason();
                // Clients count as well: a node that they reach and its peers do not.
                let other = self.rng.random_range(0..self.links.count());
                self.links.cut_both(reason, here, other);
                self.marks.hit(Mark::PartitionNonTransitive);
                self.ends.push((now + ms(&mut self.rng, 20..8_000), End::Links(reason)));
            }
            Kind::Hold => {
                let reason = self.reason();
                let other = self.rng.random_range(0..self.links.count());
                self.links.hold(reason, here, other);
                self.marks.hit(Mark::MessagesHeld);
                self.ends.push((now + ms(&mut self.rng, 5..4_000), End::Links(reason)));
            }
            Kind::Loss => {
                let reason = self.reason();
                let other = self.rng.random_range(0..self.links.count());
                self.links.cut(reason, here, other);
                self.marks.hit(Mark::MessagesLost);
                self.ends.push((now + ms(&mut self.rng, 1..40), End::Links(reason)));
            }
            Kind::Reset => {
                let other = self.rng.random_range(0..self.links.count());
                if other != here {
                    net::reset(sim.lookup(self.host(here)), sim.lookup(self.host(other)));
                    self.marks.hit(Mark::ConnectionReset);
                }
            }
            Kind::Tamper => {
                net::tamper(Some(StdRng::from_rng(&mut self.rng)), &self.marks);
                self.ends.push((now + ms(&mut self.rng, 500..8_000), End::Tampering));
            }
            Kind::SlowLink => {
                let other = (here + self.rng.random_range(1..nodes)) % nodes;
                let latency = ms(&mut self.rng, 30..200);
                self.links.slow_down(sim, here, other, latency);
                self.marks.hit(Mark::SlowLink);
                self.ends.push((now + ms(&mut self.rng, 500..8_000), End::Slow(here, other)));
            }
            Kind::PowerLoss => {
                self.marks.hit(Mark::PowerLoss);
                self.take_down(sim, machine, Down::Power);
            }
            Kind::PowerLossMidWrite => {
                let changes = self.rng.random_range(0..40);
                self.disk_of(machine, |disks, shard| disks.stop_soon(shard, changes));
            }
            Kind::PowerLossOfAll => {
                self.marks.hit(Mark::PowerLossOfAll);
                for machine in machines {
                    self.take_down(sim, machine, Down::Power);
                }
            }
            Kind::Kill => {
                self.marks.hit(Mark::ProcessKilled);
                self.take_down(sim, machine, Down::Process);
            }
            Kind::Stop => {
                if machine.node().is_some() {
                    self.marks.hit(Mark::GracefulStop);
                    machine.stop();
                }
            }
            Kind::SyncError => {
                let after = self.rng.random_range(0..20);
                let which = *[Operation::Sync, Operation::Sync, Operation::SyncDir]
                    .choose(&mut self.rng)
                    .unwrap_or(&Operation::Sync);
                self.tainted.insert(node);
                if self
                    .disk_of(machine, |it, shard| it.fail(shard, Fault::next(which).after(after)))
                {
                    self.marks.hit(Mark::SyncFailed);
                }
            }
            Kind::SyncErrorOfAll => {
                let shard = self.rng.random_range(1..=self.plan.shards);
                for machine in machines {
                    let fault = Fault::next(Operation::Sync).after(self.rng.random_range(0..3));
                    self.tainted.insert(machine.node_id());
                    if machine.disks().fail(shard, fault) {
                        self.marks.hit(Mark::SyncFailed);
                    }
                }
                if self.rng.random_bool(0.5) {
                    let nodes = machines.iter().map(Machine::node_id).collect();
                    self.ends.push((now + ms(&mut self.rng, 50..2_000), End::PowerLoss(nodes)));
                }
            }
            Kind::WriteError => {
                let after = self.rng.random_range(0..20);
                let which = *[Operation::Write, Operation::Rename, Operation::Create]
                    .choose(&mut self.rng)
                    .unwrap_or(&Operation::Write);
                self.tainted.insert(node);
                if self
                    .disk_of(machine, |it, shard| it.fail(shard, Fault::next(which).after(after)))
                {
                    self.marks.hit(Mark::WriteFailed);
                }
            }
            Kind::Stall => {
                machine.disks().set_stall(ms(&mut self.rng, 100..2_500));
                self.marks.hit(Mark::DiskStalled);
                self.ends.push((now + ms(&mut self.rng, 200..6_000), End::Stall(node)));
            }
            Kind::Full => {
                self.tainted.insert(node);
                self.full.insert(node, FULL_BYTES);
                machine.disks().set_free(Some(FULL_BYTES));
                self.ends.push((now + ms(&mut self.rng, 1_000..9_000), End::Full(node)));
            }
            Kind::FilledUp => {
                // Something else takes all of the disk, or leaves room for very little.
                let left = self.plan.segment_bytes * self.rng.random_range(0..4);
                self.tainted.insert(node);
                self.full.insert(node, left);
                machine.disks().set_free(Some(left));
                self.marks.hit(Mark::DiskFilledUp);
                self.ends.push((now + ms(&mut self.rng, 500..9_000), End::Full(node)));
            }
            Kind::Damage => {
                if self.damage.strike(machine, now, &mut self.rng).lost_segment {
                    // It ends by itself where it is about to give the segment another name.
                    self.tainted.insert(node);
                }
            }
            Kind::ClockJump => {
                let error = self.rng.random_range(-600_000_000..=600_000_000);
                machine.clock().set_error(error);
                self.marks.hit(Mark::ClockJump);
            }
            Kind::Wipe => {
                if machine.is_on() && self.members.lose(node) {
                    self.marks.hit(Mark::NodeWiped);
                    self.take_down(sim, machine, Down::Power);
                    self.wipe(machine);
                }
            }
            Kind::Election => {
                // Some stand for it at the same time.
                let shard = self.rng.random_range(0..=self.plan.shards);
                let stand = machines.iter().filter(|_| self.rng.random_bool(0.6));
                for machine in stand.collect::<Vec<_>>() {
                    let Some(node) = machine.node() else { continue };
                    // One in repair never stands by itself, and has nobody's leave to.
                    let elect = |it: &Replica| {
                        it.repair_of().is_none().then(|| it.elect().now_or_never()).flatten()
                    };
                    let elected = match node.shards().iter().find(|it| it.id() == shard) {
                        Some(it) => elect(it.replica()),
                        None => elect(&node.cluster().replica()),
                    };
                    if elected.is_some_and(|asked| asked.is_ok()) {
                        self.marks.hit(Mark::ElectionForced);
                    }
                }
            }
            // The operator's part.
            Kind::Transfer | Kind::Drain | Kind::Grow => {}
        }
    }

    /// Does something to the disk of one shard. The data shards' come first.
    fn disk_of(
        &mut self,
        machine: &Machine,
        act: impl FnOnce(&crate::disks::Disks, u64) -> bool,
    ) -> bool {
        self.tainted.insert(machine.node_id());
        let shard = match self.rng.random_bool(0.85) {
            true => self.rng.random_range(1..=self.plan.shards),
            false => 0,
        };
        act(machine.disks(), shard)
    }

    /// From now on everything is well, as soon as all nodes run again.
    pub fn heal(&mut self, sim: &mut Sim<'_>, machines: &[Machine]) {
        self.is_over = true;
        self.recorder.note("everything is healed");
        for (_, end) in std::mem::take(&mut self.ends) {
            if !matches!(end, End::Start(_) | End::PowerLoss(_)) {
                self.end(sim, machines, end);
            }
        }
        for machine in machines {
            machine.disks().heal();
            machine.disks().hurry();
            self.start(sim, machine);
            machine.disks().heal();
        }
        self.full.clear();
        self.damage.hurry();
        self.links.apply(sim);
    }

    /// Whether nobody has to get over damage any more.
    pub fn is_repaired(&self) -> bool {
        self.members.harmed().is_none()
    }

    /// What a node still suffers from; for people.
    pub fn ailing(&self, machines: &[Machine]) -> String {
        self.damage.describe(machines)
    }

    fn reason(&mut self) -> u64 {
        self.reasons += 1;
        self.reasons
    }

    pub fn set_latencies(&mut self, sim: &Sim<'_>) {
        self.links.draw_latencies(sim, &mut self.rng);
    }

    fn host(&self, place: usize) -> String {
        self.links.name(place).to_owned()
    }
}

/// Nodes are numbered from 1, places from 0.
fn place(node: u64) -> usize {
    usize::try_from(node).unwrap_or(1) - 1
}
