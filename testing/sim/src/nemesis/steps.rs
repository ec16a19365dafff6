//! Crashes nodes right after a move or a split has taken a step.

use std::collections::{BTreeMap, BTreeSet};

use helix_server::cluster::{PlacedSplit, ReplicaPlacement, ShardMove};
use rand::RngExt;
use rand::seq::IndexedRandom;
use turmoil::Sim;

use super::{CrashKind, Nemesis, host_index};
use crate::cluster::SimulatedMachine;
use crate::coverage::CoverageMark;

/// Probability of a crash after a step.
const STEP_CRASHES: f64 = 0.15;

/// Move and split of a shard, with their progress.
type ShardSteps = (Option<ShardMove>, Option<PlacedSplit>);

/// Notices the steps of moves and splits in the newest state of the cluster.
#[derive(Debug, Default)]
pub(super) struct StepWatch {
    version: u64,
    steps: BTreeMap<u64, ShardSteps>,
}

/// A step that a running node has applied since the last tick.
#[derive(Debug)]
struct PlacementStep {
    shard_id: u64,
    /// Shard that gives partitions to this one.
    parent: Option<u64>,
    /// Nodes with a replica before or after the move or split.
    nodes: BTreeSet<u64>,
}

impl StepWatch {
    fn take(&mut self, machines: &[SimulatedMachine]) -> Vec<PlacementStep> {
        let mut taken = Vec::new();
        for node in machines.iter().filter_map(SimulatedMachine::node) {
            node.cluster().machine().read(|state| {
                let Some(placement) = state.members().placement() else { return };
                if state.version() > self.version {
                    self.version = state.version();
                    taken.extend(self.update(placement));
                }
            });
        }
        taken
    }

    fn update(&mut self, placement: &ReplicaPlacement) -> Vec<PlacementStep> {
        let mut taken = Vec::new();
        for (shard_id, shard) in placement.shards().filter(|(shard_id, _)| *shard_id != 0) {
            let steps = (shard.moving, shard.split.clone());
            let before = self.steps.insert(shard_id, steps.clone()).unwrap_or_default();
            if before != steps {
                let splits = [&before.1, &steps.1].into_iter().flatten();
                let mut nodes: BTreeSet<u64> =
                    shard.replicas.keys().chain(shard.after().keys()).copied().collect();
                nodes.extend(splits.clone().flat_map(|split| split.replicas.keys()));
                let parent = splits.map(|split| split.parent).next();
                taken.push(PlacementStep { shard_id, parent, nodes });
            }
        }
        taken
    }
}

impl Nemesis {
    /// Crashes the leader of shard 0, the leader of a shard, or a node with a replica after some of
    /// the steps that were taken since the last tick.
    pub(super) fn crash_at_steps(
        &mut self,
        sim: &mut Sim<'_>,
        machines: &[SimulatedMachine],
        may_inject: bool,
    ) {
        for step in self.steps.take(machines) {
            if !may_inject || !self.rng.random_bool(STEP_CRASHES) {
                continue;
            }
            let leads = |machine: &&SimulatedMachine, shard_id: u64| {
                machine.node().is_some_and(|node| match shard_id {
                    0 => node.cluster().is_leader(),
                    _ => node.shard(shard_id).is_some_and(|shard| shard.is_leader()),
                })
            };
            let leader = |shard_id| machines.iter().find(|machine| leads(machine, shard_id));
            let chosen = match self.rng.random_range(0..3) {
                0 => leader(0),
                1 => leader(step.parent.unwrap_or(step.shard_id)),
                _ => {
                    let nodes: Vec<u64> = step.nodes.iter().copied().collect();
                    let node = nodes.choose(&mut self.rng).copied();
                    node.and_then(|node| machines.get(host_index(node)))
                }
            };
            let Some(machine) = chosen else { continue };
            self.marks.hit(match step.parent {
                Some(_) => CoverageMark::CrashAtSplitStep,
                None => CoverageMark::CrashAtMoveStep,
            });
            let how = if self.rng.random_bool(0.5) { CrashKind::Power } else { CrashKind::Process };
            self.take_down(sim, machine, how);
        }
    }
}
