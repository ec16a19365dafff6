//! Injection of one fault of each kind.

use std::time::Duration;

use futures_util::FutureExt;
use helix_server::raft::Replica;
use helix_wal::storage::{Fault, Operation};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use turmoil::Sim;

use super::{CrashKind, FULL_BYTES, FaultEnd, Nemesis, host_index};
use crate::cluster::SimulatedMachine;
use crate::coverage::CoverageMark;
use crate::disks::NodeDisks;
use crate::plan::FaultKind;
use crate::{net, placement_watch};

impl Nemesis {
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

    /// Injects a fault of this kind, and schedules its end.
    pub(super) fn inject(
        &mut self,
        sim: &mut Sim<'_>,
        machines: &[SimulatedMachine],
        kind: FaultKind,
    ) {
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
                let may_lose = placement_watch::tolerates_loss(machines, node);
                if machine.is_on() && may_lose && self.members.lose(node) {
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
        act: impl FnOnce(&NodeDisks, u64) -> bool,
    ) -> bool {
        self.tainted.insert(machine.node_id());
        let shard = match self.rng.random_bool(0.85) {
            true => self.rng.random_range(1..=self.plan.shards),
            false => 0,
        };
        act(machine.disks(), shard)
    }
}
