//! Checks the placement of replicas in the cluster's state on all nodes:
//!
//! - No replica of a node gets a generation that another one had.
//! - No move is planned to a node that leaves or is cordoned.
//! - No move is planned while moves are paused.
//! - A move is cancelled only by an operator, or if its target leaves or lost the new replica: a
//!   copy is not thrown away because the leader has changed.
//! - A move that spreads replicas does not leave its target with more than its source.
//! - An added shard takes partitions only once it has its replicas.
//! - A move between racks leaves the shard's replicas in more of them.
//! - Without faults the replicas come to be where they should, on the disks and in the Raft groups.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use helix_server::cluster::{Members, MoveReason, ReplicaPlacement};
use helix_server::node::Node;
use helix_server::raft::{node_of, replica_id};

use crate::cluster::SimulatedMachine;
use crate::coverage::{CoverageMark, CoverageMarks};
use crate::plan::SimulationPlan;
use crate::workload::CancelledShards;

/// Voters of shard 0.
const VOTERS_MAX: usize = 5;

/// Checks the placement, and keeps the state that it needs.
#[derive(Debug)]
pub struct PlacementChecker {
    marks: CoverageMarks,
    /// Version of the state that was checked last, by node.
    versions: BTreeMap<u64, u64>,
    /// The move that got a generation of a node, by both.
    generations: BTreeMap<(u64, u32), u64>,
    /// Data shards that take partitions.
    open: BTreeSet<u64>,
    /// Shards that a split was to make.
    splits: BTreeSet<u64>,
    /// Shards whose moves an operator has cancelled at some time.
    cancelled: CancelledShards,
    /// The planner cancels moves to nodes that are down.
    replaces_down: bool,
}

impl PlacementChecker {
    pub fn new(plan: &SimulationPlan, marks: CoverageMarks, cancelled: CancelledShards) -> Self {
        let (versions, generations, open, splits) = Default::default();
        let placement = plan.placement.as_ref();
        let replaces_down = placement.is_some_and(|it| it.replace_down_after.is_some());
        Self { marks, versions, generations, open, splits, cancelled, replaces_down }
    }

    /// Checks every running node.
    ///
    /// # Errors
    /// The rule that is violated.
    pub fn check(&mut self, machines: &[SimulatedMachine]) -> Result<(), String> {
        for machine in machines {
            let Some(node) = machine.node() else { continue };
            let versions = &mut self.versions;
            let changed = node.cluster().machine().read(|state| {
                let is_new =
                    versions.insert(machine.node_id(), state.version()) != Some(state.version());
                is_new.then(|| (state.version(), state.members().clone(), state.shards().clone()))
            });
            if let Some((version, members, shards)) = changed {
                self.check_members(version, &members)?;
                self.check_shards(&members, &shards)?;
            }
        }
        Ok(())
    }

    /// Checks the shards that take partitions for the first time.
    fn check_shards(&mut self, members: &Members, shards: &BTreeSet<u64>) -> Result<(), String> {
        let Some(placement) = members.placement() else { return Ok(()) };
        let is_first = self.open.is_empty();
        for shard_id in shards {
            if !self.open.insert(*shard_id) || is_first {
                continue;
            }
            self.marks.hit(CoverageMark::AddedShardOpened);
            let nodes = members.iter().filter(|it| members.may_hold(it.node_id)).count();
            let Some(shard) = placement.shard(*shard_id) else {
                return Err(format!("shard {shard_id} opens and is not placed"));
            };
            let wanted = usize::try_from(placement.wanted_replicas(shard)).unwrap_or(0);
            let (wanted, replicas) = (wanted.min(nodes), shard.replicas.len());
            // A node that checks late may see the shard after its replicas or their number changed,
            // and a split has as many as its parent had when it was planned.
            let is_split = self.splits.contains(shard_id);
            if replicas == 0 || (replicas < wanted && replicas < 2 && !is_split) {
                return Err(format!("shard {shard_id} opens with {replicas} of {wanted} replicas"));
            }
        }
        Ok(())
    }

    /// Checks that no split gives a generation twice, and that one runs at a time.
    fn check_splits(
        &mut self,
        version: u64,
        members: &Members,
        placement: &ReplicaPlacement,
    ) -> Result<(), String> {
        let planned = || placement.splits().filter(|it| it.1.is_planned());
        if planned().count() > 1 {
            return Err(format!("two splits run: {:?}", planned().collect::<Vec<_>>()));
        }
        for (shard_id, split) in planned() {
            self.splits.insert(shard_id);
            if split.is_cancelled {
                self.marks.hit(CoverageMark::SplitCancelled);
            }
            for (node, replica) in &split.replicas {
                let key = (*node, replica.generation);
                let first = *self.generations.entry(key).or_insert(split.id);
                if first != split.id {
                    return Err(format!("{first} and split {} have generation {key:?}", split.id));
                }
                if split.id == version && !members.may_hold(*node) {
                    return Err(format!("shard {shard_id} is split to node {node}"));
                }
            }
        }
        let is_done = |id: &u64| {
            placement.shard(*id).is_some_and(|it| it.split.is_none() && !it.replicas.is_empty())
        };
        if self.splits.iter().any(is_done) {
            self.marks.hit(CoverageMark::ShardSplit);
        }
        Ok(())
    }

    fn check_members(&mut self, version: u64, members: &Members) -> Result<(), String> {
        let Some(placement) = members.placement() else { return Ok(()) };
        self.check_splits(version, members, placement)?;
        for (shard_id, moving) in placement.moves().filter(|(shard_id, _)| *shard_id != 0) {
            let Some(to) = moving.to else { continue };
            let first = *self.generations.entry((to, moving.generation)).or_insert(moving.id);
            if first != moving.id {
                return Err(format!(
                    "moves {first} and {} have generation {} of node {to}",
                    moving.id, moving.generation
                ));
            }
            let member = members.get(to);
            let is_gone = member.is_none_or(|it| it.leaving || moving.generation < it.generation);
            let may_be_cancelled = is_gone || self.replaces_down;
            if moving.is_cancelled && !may_be_cancelled && !self.cancelled.contains(shard_id) {
                return Err(format!("shard {shard_id}: no operator cancelled {moving:?}"));
            }
            if moving.id != version {
                continue;
            }
            if placement.is_paused() {
                return Err(format!(
                    "shard {shard_id} moves although moves are paused: {moving:?}"
                ));
            }
            // Planned by the last change.
            self.marks.hit(CoverageMark::ReplicaMoveBegun);
            if member.is_none_or(|it| it.leaving || it.cordoned) {
                return Err(format!("shard {shard_id} moves to {member:?}"));
            }
            if moving.reason == MoveReason::NodeDown {
                self.marks.hit(CoverageMark::DownNodeReplaced);
                if !self.replaces_down {
                    return Err(format!("shard {shard_id}: nothing allows {moving:?}"));
                }
            }
            if let (MoveReason::Racks, Some(from)) = (moving.reason, moving.from) {
                self.marks.hit(CoverageMark::RackMove);
                let rack = |node: u64| members.get(node).map_or("", |it| it.rack.as_str());
                let shard = placement.shard(shard_id);
                let after = shard.map(|shard| shard.after()).unwrap_or_default();
                let count = |name: &str| after.keys().filter(|node| rack(**node) == name).count();
                if rack(from) == rack(to) || count(rack(to)) > count(rack(from)) {
                    return Err(format!("shard {shard_id}: {moving:?} does not help: {after:?}"));
                }
            }
            let loads = loads(members, placement);
            let load = |node: u64| loads.get(&node).copied().unwrap_or(0);
            if let (MoveReason::Spread, Some(from)) = (moving.reason, moving.from)
                && load(to) > load(from)
            {
                return Err(format!(
                    "shard {shard_id}: {moving:?} leaves more replicas at its target: {loads:?}"
                ));
            }
        }
        Ok(())
    }
}

/// Returns the number of replicas of data shards on each node after all moves.
fn loads(members: &Members, placement: &ReplicaPlacement) -> BTreeMap<u64, usize> {
    let mut loads: BTreeMap<u64, usize> = members.iter().map(|it| (it.node_id, 0)).collect();
    for (_, shard) in placement.shards().filter(|(shard_id, _)| *shard_id != 0) {
        for node in shard.after().into_keys() {
            *loads.entry(node).or_default() += 1;
        }
    }
    loads
}

/// Returns why the replicas are not where they should be; `None` if they are.
pub fn problem(machines: &[SimulatedMachine]) -> Option<String> {
    let nodes = || machines.iter().filter_map(|it| Some((it, it.node()?)));
    let Some((_, leader)) = nodes().find(|(_, node)| node.cluster().is_leader()) else {
        return Some("shard 0 has no leader".to_owned());
    };
    let (members, open) =
        leader.cluster().machine().read(|state| (state.members().clone(), state.shards().clone()));
    let Some(placement) = members.placement() else {
        return Some("there is no placement".to_owned());
    };
    if let Some(change) = members.running() {
        return Some(format!("a membership change is in progress: {change:?}"));
    }
    if placement.is_paused() {
        return Some("moves are paused".to_owned());
    }
    if let Some(moving) = placement.moves().next() {
        return Some(format!("a replica moves: {moving:?}"));
    }
    let count = members.iter().count();
    for (shard_id, shard) in placement.shards() {
        let wanted = usize::try_from(placement.wanted_replicas(shard)).unwrap_or(0);
        let wanted = if shard_id == 0 { VOTERS_MAX } else { wanted }.min(count);
        if shard.replicas.len() != wanted {
            return Some(format!("shard {shard_id} wants {wanted} replicas: {shard:?}"));
        }
        if shard_id != 0 && !open.contains(&shard_id) {
            return Some(format!("shard {shard_id} takes no partitions: {shard:?}"));
        }
    }
    if let Some(shard_id) = crowded(&members, placement) {
        return Some(format!("a rack has too many replicas of shard {shard_id}: {members:?}"));
    }
    let loads = loads(&members, placement);
    let (least, most) = (loads.values().min()?, loads.values().max()?);
    // Racks come before the numbers of replicas.
    let has_racks = members.iter().any(|member| !member.rack.is_empty());
    if most - least > 1 && !has_racks {
        return Some(format!("replicas are not spread: {loads:?}"));
    }
    for member in members.iter() {
        let Some((machine, node)) = nodes().find(|(it, _)| it.node_id() == member.node_id) else {
            return Some(format!("node {} does not run", member.node_id));
        };
        if let Some(what) = misplaced(machine, &node, placement) {
            return Some(format!("node {}: {what}", member.node_id));
        }
    }
    let led = || nodes().flat_map(|(_, node)| node.shards()).filter(|it| it.is_leader());
    let mut data = placement.shards().filter(|(shard_id, _)| *shard_id != 0);
    let unreached = data.find(|(shard_id, shard)| {
        let voters: BTreeSet<u64> = shard
            .replicas
            .iter()
            .map(|(node, generation)| replica_id(*node, *generation))
            .collect();
        !led().any(|it| {
            let membership = it.replica().membership();
            it.id() == *shard_id && membership.is(&voters, &BTreeSet::new())
        })
    });
    unreached.map(|(shard_id, shard)| format!("shard {shard_id} has other voters than {shard:?}"))
}

/// Returns a shard with a replica that should be in another rack.
fn crowded(members: &Members, placement: &ReplicaPlacement) -> Option<u64> {
    let rack = |node: u64| members.get(node).map_or("", |member| member.rack.as_str());
    let mut shards = placement.shards();
    let found = shards.find(|(_, shard)| {
        let count = |name: &str| shard.replicas.keys().filter(|node| rack(**node) == name).count();
        let most = shard.replicas.keys().map(|node| count(rack(*node))).max().unwrap_or(0);
        let others = members.iter().map(|it| it.node_id);
        let mut others = others.filter(|node| !shard.replicas.contains_key(node));
        others.any(|node| count(rack(node)) + 2 <= most)
    });
    found.map(|(shard_id, _)| shard_id)
}

/// Returns how the replicas on a node differ from the placement.
fn misplaced(
    machine: &SimulatedMachine,
    node: &Node,
    placement: &ReplicaPlacement,
) -> Option<String> {
    let own = machine.node_id();
    let placed = placement.shards().filter(|(shard_id, _)| *shard_id != 0);
    let placed: BTreeMap<u64, u64> = placed
        .filter_map(|(id, it)| Some((id, replica_id(own, *it.replicas.get(&own)?))))
        .collect();
    let open: BTreeMap<u64, u64> =
        node.shards().iter().map(|it| (it.id(), it.replica().id())).collect();
    if open != placed {
        let generations = |rows: &BTreeMap<u64, u64>| {
            let rows = rows.iter().map(|(shard, id)| (*shard, node_of(*id), id & 0xffff_ffff));
            rows.collect::<Vec<_>>()
        };
        let (open, placed) = (generations(&open), generations(&placed));
        return Some(format!("has (shard, node, generation) {open:?} instead of {placed:?}"));
    }
    let has_files = |shard: &u64| {
        *shard != 0
            && !placed.contains_key(shard)
            && machine.disks().disk(*shard).is_some_and(|disk| has_log(&disk.files()))
    };
    let left = machine.disks().shards().into_iter().find(has_files);
    left.map(|shard| format!("keeps files of shard {shard}"))
}

/// Returns whether these files are of a log.
pub(crate) fn has_log(files: &[String]) -> bool {
    files.iter().any(|name| name == "state" || name.ends_with(".seg"))
}

/// Returns whether every shard keeps a majority without a node's replica. A node that was removed
/// with fewer replicas than wanted leaves shards with two.
pub fn tolerates_loss(machines: &[SimulatedMachine], node_id: u64) -> bool {
    let nodes = machines.iter().filter_map(SimulatedMachine::node);
    let version = |node: &Arc<Node>| node.cluster().machine().read(|state| state.version());
    let Some(newest) = nodes.max_by_key(version) else { return false };
    newest.cluster().machine().read(|state| {
        let Some(placement) = state.members().placement() else { return true };
        // A new shard takes no partitions yet, and is given up.
        let open = placement.shards().filter(|(id, _)| state.shards().contains(id));
        let survives = |replicas: &BTreeMap<u64, u32>| {
            !replicas.contains_key(&node_id) || (replicas.len() - 1) * 2 > replicas.len()
        };
        open.map(|(_, it)| it).all(|it| survives(&it.replicas) && survives(&it.after()))
    })
}
