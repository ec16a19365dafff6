//! Plans moves of replicas: a pure function of the committed placement and of the nodes that are
//! reachable. Shard 0's leader runs it and submits its first step; nothing else plans moves.
//!
//! Goals in this order: replicas on nodes that stay and have their data, as many replicas as there
//! should be, each shard's replicas in different racks, and equal numbers of replicas on all nodes.
//! A move in progress counts as done, both at its source and at its target. Each goal that cannot
//! be reached now has a reason.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::members::Members;
use super::obstacle::{Obstacle, list};
use super::placement::{MoveReason, PlacedShard, ReplicaPlacement, ShardMove};
use crate::limits::{MOVES_MAX, REPLICAS_MAX};
use crate::log::{CancelMove, MemberCommand, PlanMove};

/// A move to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PlannedMove {
    pub shard_id: u64,
    pub from: Option<u64>,
    pub to: Option<u64>,
    pub reason: MoveReason,
}

/// A step to take now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanStep {
    Move(PlannedMove),
    /// The target of this move can no longer get the replica.
    Cancel {
        shard_id: u64,
        id: u64,
    },
}

impl PlanStep {
    /// Returns the command for this step. A move is valid only for this version of the state.
    pub(super) fn command(self, planned_at: u64) -> MemberCommand {
        match self {
            Self::Move(PlannedMove { shard_id, from, to, reason }) => {
                let (from, to, reason) = (from.unwrap_or(0), to.unwrap_or(0), reason.number());
                MemberCommand::PlanMove(PlanMove { shard_id, from, to, reason, planned_at })
            }
            Self::Cancel { shard_id, id } => MemberCommand::CancelMove(CancelMove { shard_id, id }),
        }
    }
}

/// Reason why a shard does not have the replicas that it should have, and no move is possible now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StuckReason {
    /// Too few of its replicas are reachable to change them.
    NoMajority { reachable: usize, needed: usize, silent: Vec<u64> },
    /// The only nodes that may get a replica are unreachable.
    Unreachable { nodes: Vec<u64> },
    /// It would lose its only replica.
    LastReplica,
    /// There are not enough nodes that may have a replica. `refused` has the nodes without one.
    TooFewNodes { replicas: usize, wanted: usize, refused: Vec<(u64, &'static str)> },
    /// As many moves as possible are in progress.
    OtherMovesFirst,
    /// A node that leaves keeps its vote in shard 0 until it has no other replica.
    OtherShardsFirst { shards: usize },
    /// An operator has paused the moves.
    MovesPaused,
    /// A rack has too many of its replicas, and no node of the other racks may get one.
    Racks { rack: String, replicas: usize, of: usize, refused: Vec<(u64, &'static str)> },
}

impl fmt::Display for StuckReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoMajority { reachable, needed, silent } => write!(
                f,
                "{reachable} of its replicas are reachable, {needed} are needed to move one; nodes \
                 that do not respond: {}",
                list(silent)
            ),
            Self::Unreachable { nodes } => {
                write!(f, "the nodes that may get a replica cannot be reached: {}", list(nodes))
            }
            Self::LastReplica => write!(f, "no node may get a replica, and this is the only one"),
            Self::TooFewNodes { replicas, wanted, refused } => {
                write!(f, "it has {replicas} of {wanted} replicas, and no other node may get one")?;
                refused.iter().try_for_each(|(node, why)| write!(f, "; node {node} {why}"))
            }
            Self::Racks { rack, replicas, of, refused } => {
                write!(f, "{replicas} of its {of} replicas are in {}", rack_name(rack))?;
                write!(f, ", and no node of a rack with fewer may get one")?;
                refused.iter().try_for_each(|(node, why)| write!(f, "; node {node} {why}"))
            }
            Self::OtherMovesFirst => write!(f, "{MOVES_MAX} other moves go first"),
            Self::OtherShardsFirst { .. } | Self::MovesPaused => self.obstacle().fmt(f),
        }
    }
}

impl StuckReason {
    /// Returns whether only more nodes help.
    pub fn is_lack_of_nodes(&self) -> bool {
        matches!(self, Self::TooFewNodes { .. } | Self::Racks { .. })
    }

    /// Returns a stable name.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoMajority { .. } => "NO_MAJORITY",
            Self::Unreachable { .. } => "NODES_UNREACHABLE",
            Self::LastReplica => "LAST_REPLICA",
            Self::TooFewNodes { .. } => "TOO_FEW_NODES",
            Self::OtherMovesFirst => "OTHER_MOVES_FIRST",
            Self::OtherShardsFirst { .. } => "OTHER_SHARDS_FIRST",
            Self::MovesPaused => "MOVES_PAUSED",
            Self::Racks { .. } => "RACKS",
        }
    }

    /// Returns what an operator can do about it.
    pub fn next_step(&self) -> String {
        match self {
            Self::NoMajority { silent, .. } | Self::Unreachable { nodes: silent } => format!(
                "start nodes {}; if they will not return, replace them, or remove them with --lost",
                list(silent)
            ),
            Self::LastReplica => "add or uncordon a node".to_owned(),
            Self::TooFewNodes { refused, .. } | Self::Racks { refused, .. } => {
                let is_cordoned = |(_, why): &&(u64, &str)| *why == "is cordoned";
                let cordoned = refused.iter().filter(is_cordoned).map(|(node, _)| *node);
                let cordoned: Vec<u64> = cordoned.collect();
                match cordoned.is_empty() {
                    true if matches!(self, Self::Racks { .. }) => {
                        "start the nodes of the other racks, or add one there".to_owned()
                    }
                    true => "add a node, or run `helix cluster set-replicas`".to_owned(),
                    false => format!("uncordon nodes {}, or add a node", list(&cordoned)),
                }
            }
            Self::OtherMovesFirst => "wait; see the moves in progress".to_owned(),
            Self::OtherShardsFirst { .. } | Self::MovesPaused => self.obstacle().next_step,
        }
    }

    /// Returns this reason as an obstacle.
    pub fn obstacle(&self) -> Obstacle {
        match self {
            Self::OtherShardsFirst { shards } => Obstacle::other_shards_first(*shards),
            Self::MovesPaused => Obstacle::paused(),
            other => Obstacle::new(other.code(), other.to_string(), other.next_step()),
        }
    }
}

fn rack_name(rack: &str) -> String {
    if rack.is_empty() { "nodes without a rack".to_owned() } else { format!("rack {rack}") }
}

/// A shard that does not have the replicas that it should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StuckShard {
    pub shard_id: u64,
    /// Node whose replica should move; `None` if a replica is missing.
    pub node_id: Option<u64>,
    pub reason: StuckReason,
}

/// The steps to take now, and the shards that have to wait.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    pub steps: Vec<PlanStep>,
    /// Sorted by shard.
    pub stuck: Vec<StuckShard>,
}

impl Plan {
    /// Returns whether all shards have the replicas that they should have, except for optional
    /// moves. Shards that lack nodes count as complete.
    pub fn is_complete(&self) -> bool {
        let is_spread = |step: &PlanStep| match step {
            PlanStep::Move(planned) => planned.reason.is_optional(),
            PlanStep::Cancel { .. } => false,
        };
        let lacks_nodes = |stuck: &StuckShard| stuck.reason.is_lack_of_nodes();
        self.steps.iter().all(is_spread) && self.stuck.iter().all(lacks_nodes)
    }

    /// Returns the shards with a step or a reason to wait, except for crowded racks.
    fn shards(&self) -> BTreeSet<u64> {
        let of_step = |step: &PlanStep| match step {
            PlanStep::Move(it) => it.shard_id,
            PlanStep::Cancel { shard_id, .. } => *shard_id,
        };
        let stuck = self.stuck.iter().filter(|it| !matches!(it.reason, StuckReason::Racks { .. }));
        let stuck = stuck.map(|it| it.shard_id);
        self.steps.iter().map(of_step).chain(stuck).collect()
    }

    /// Returns the number of data shards that do not have the replicas that they should have.
    pub(super) fn waiting_shards(&self) -> usize {
        self.shards().into_iter().filter(|shard_id| *shard_id != 0).count()
    }

    /// Turns all steps into reasons to wait. Optional moves are dropped.
    fn pause(&mut self) {
        for step in std::mem::take(&mut self.steps) {
            let (shard_id, node_id) = match step {
                PlanStep::Move(PlannedMove { reason, .. }) if reason.is_optional() => continue,
                PlanStep::Move(PlannedMove { shard_id, from, .. }) => (shard_id, from),
                PlanStep::Cancel { shard_id, .. } => (shard_id, None),
            };
            self.stuck.push(StuckShard { shard_id, node_id, reason: StuckReason::MovesPaused });
        }
        for it in &mut self.stuck {
            if it.reason == StuckReason::OtherMovesFirst {
                it.reason = StuckReason::MovesPaused;
            }
        }
        self.stuck.sort_by_key(|it| it.shard_id);
    }
}

/// Plans the next moves; none without a placement.
///
/// `reachable` has the nodes that respond, including this one. `down` has the nodes that have not
/// responded for so long that other nodes take their replicas.
pub(super) fn plan(members: &Members, reachable: &BTreeSet<u64>, down: &BTreeSet<u64>) -> Plan {
    let Some(placement) = members.placement() else { return Plan::default() };
    let mut planner = Planner::new(members, placement, reachable, down);
    planner.cancel();
    for (shard_id, shard) in placement.shards() {
        planner.repair(shard_id, shard);
    }
    if planner.has_time() {
        planner.spread_racks();
        planner.spread();
    }
    if placement.is_paused() {
        planner.plan.pause();
    }
    planner.plan
}

/// Returns whether all replicas are where they should be, except for moves that only spread them.
pub(super) fn needs_no_move(members: &Members) -> bool {
    let all: BTreeSet<u64> = members.iter().map(|it| it.node_id).collect();
    let is_done = plan(members, &all, &BTreeSet::new()).is_complete();
    let mut moves = members.placement().into_iter().flat_map(ReplicaPlacement::moves);
    let mut leaving = members.iter().filter(|it| it.leaving);
    // A move that only spreads replicas may also take a lost replica away.
    let mut replicas = members.placement().into_iter().flat_map(ReplicaPlacement::shards);
    let has_lost = |(_, shard): (u64, &PlacedShard)| {
        shard.replicas.iter().any(|(node, generation)| members.is_lost(*node, *generation))
    };
    is_done
        && !replicas.any(has_lost)
        && moves.all(|(_, it)| it.reason.is_optional())
        && !leaving.any(|it| members.has_replicas(it.node_id))
}

/// Returns why the planner would undo an operator's move: it crowds a rack.
pub(super) fn rack_objection(
    members: &Members,
    shard_id: u64,
    from: u64,
    to: u64,
) -> Option<String> {
    let after = members.placement()?.shard(shard_id)?.after();
    let rack = |node: u64| members.get(node).map_or("", |member| member.rack.as_str());
    let count = |name: &str| after.keys().filter(|node| rack(**node) == name).count();
    let (old, new) = (rack(from), rack(to));
    if !after.contains_key(&from) || old == new || count(new) < count(old) {
        return None;
    }
    let replicas = count(new) + 1;
    Some(format!(
        "node {to} is in {}, which would have {replicas} replicas of shard {shard_id}, and {} {}; \
         the cluster would move one back, so choose a node of another rack",
        rack_name(new),
        rack_name(old),
        count(old) - 1,
    ))
}

struct Planner<'a> {
    members: &'a Members,
    placement: &'a ReplicaPlacement,
    reachable: &'a BTreeSet<u64>,
    down: &'a BTreeSet<u64>,
    /// Replicas of data shards on each member after all moves.
    load: BTreeMap<u64, usize>,
    moves_left: usize,
    plan: Plan,
}

impl<'a> Planner<'a> {
    fn new(
        members: &'a Members,
        placement: &'a ReplicaPlacement,
        reachable: &'a BTreeSet<u64>,
        down: &'a BTreeSet<u64>,
    ) -> Self {
        let mut load: BTreeMap<u64, usize> = members.iter().map(|it| (it.node_id, 0)).collect();
        for (_, shard) in placement.shards().filter(|(id, _)| *id != 0) {
            for node in shard.after().into_keys() {
                *load.entry(node).or_default() += 1;
            }
        }
        let moves_left = MOVES_MAX.saturating_sub(placement.moves().count());
        Self { members, placement, reachable, down, load, moves_left, plan: Plan::default() }
    }

    fn load(&self, node: u64) -> usize {
        self.load.get(&node).copied().unwrap_or(0)
    }

    fn is_leaving(&self, node: u64) -> bool {
        self.members.get(node).is_none_or(|member| member.leaving)
    }

    /// Returns the number of replicas that a shard should have.
    fn wanted(&self, shard_id: u64, shard: &PlacedShard) -> usize {
        match shard_id {
            0 => REPLICAS_MAX,
            _ => usize::try_from(self.placement.wanted_replicas(shard)).unwrap_or(REPLICAS_MAX),
        }
    }

    /// Returns how many of these replicas respond and have their data.
    fn live<'b>(&self, replicas: impl IntoIterator<Item = (&'b u64, &'b u32)>) -> usize {
        let is_live = |(node, generation): &(&u64, &u32)| {
            self.reachable.contains(node) && !self.members.is_lost(**node, **generation)
        };
        replicas.into_iter().filter(is_live).count()
    }

    fn start(&mut self, planned: PlannedMove) {
        let PlannedMove { shard_id, from, to, .. } = planned;
        if self.moves_left == 0 {
            return self.stuck(shard_id, from, StuckReason::OtherMovesFirst);
        }
        self.moves_left -= 1;
        if shard_id != 0 {
            if let Some(from) = from.and_then(|from| self.load.get_mut(&from)) {
                *from = from.saturating_sub(1);
            }
            if let Some(to) = to {
                *self.load.entry(to).or_default() += 1;
            }
        }
        self.plan.steps.push(PlanStep::Move(planned));
    }

    fn stuck(&mut self, shard_id: u64, node_id: Option<u64>, reason: StuckReason) {
        self.plan.stuck.push(StuckShard { shard_id, node_id, reason });
    }

    /// Cancels the moves to nodes that leave, are down or have lost the new replica.
    fn cancel(&mut self) {
        for (shard_id, moving) in self.placement.moves().filter(|(_, it)| !it.is_cancelled) {
            let Some(to) = moving.to else { continue };
            let is_gone = self.is_leaving(to) || self.down.contains(&to);
            if is_gone || self.members.is_lost(to, moving.generation) {
                self.plan.steps.push(PlanStep::Cancel { shard_id, id: moving.id });
            }
        }
    }

    /// Plans the most urgent move of a shard: off a node that leaves, lost its replica or is down,
    /// or to correct the number of replicas.
    fn repair(&mut self, shard_id: u64, shard: &PlacedShard) {
        if shard.moving.is_some() || shard.split.is_some() {
            return;
        }
        let is_lost = |(node, generation): (&u64, &u32)| self.members.is_lost(*node, *generation);
        let lost = shard.replicas.iter().find(|row| is_lost(*row)).map(|(node, _)| *node);
        let wanted = self.wanted(shard_id, shard);
        let leaving = shard.replicas.keys().copied().filter(|node| self.is_leaving(*node));
        // A leaving node loses its shard 0 vote last, because it learns the plan through shard 0.
        let waits = |node: &u64| shard_id == 0 && self.members.has_data(*node);
        let waiting = leaving.clone().find(waits);
        let leaving = leaving.filter(|node| !waits(node));
        let leaving = leaving.min_by_key(|node| (self.reachable.contains(node), *node));
        let count = shard.replicas.len();
        let down = shard.replicas.keys().copied().find(|node| self.down.contains(node));
        let (from, reason) = match (lost, leaving) {
            (Some(node), _) => (Some(node), MoveReason::ReplicaLost),
            (None, Some(node)) => (Some(node), MoveReason::NodeLeaves),
            (None, None) if count < wanted => (None, MoveReason::TooFew),
            (None, None) if count > wanted => (Some(self.surplus(shard)), MoveReason::TooMany),
            (None, None) if down.is_some() && waiting.is_none() => (down, MoveReason::NodeDown),
            (None, None) => {
                if waiting.is_some() {
                    let shards = waiting.map_or(0, |node| self.data_shards_on(node));
                    self.stuck(shard_id, waiting, StuckReason::OtherShardsFirst { shards });
                }
                return;
            }
        };
        // A new shard has no replica that would have to agree.
        let needed = if count == 0 { 0 } else { count / 2 + 1 };
        let live = self.live(&shard.replicas);
        // A surplus replica is removed without a target.
        let target = match from.is_some() && count > wanted {
            true => Ok(None),
            false => self.target(shard_id, shard, from),
        };
        match target {
            Ok(to) => {
                let rest = shard.replicas.iter().filter(|(node, _)| from != Some(**node));
                let after = self.live(rest) + usize::from(to.is_some());
                let size = count + usize::from(to.is_some()) - usize::from(from.is_some());
                if to.is_none() && reason == MoveReason::NodeDown && shard_id == 0 {
                    // All nodes vote already, so this one keeps its vote until it returns.
                    return;
                }
                if to.is_none() && (from.is_none() || reason == MoveReason::NodeDown) {
                    let count = if from.is_some() { count - 1 } else { count };
                    let refused = self.refused(shard);
                    let reason = StuckReason::TooFewNodes { replicas: count, wanted, refused };
                    return self.stuck(shard_id, from, reason);
                }
                if size == 0 {
                    return self.stuck(shard_id, from, StuckReason::LastReplica);
                }
                if live < needed || after < size / 2 + 1 {
                    let (reachable, needed) = match live < needed {
                        true => (live, needed),
                        false => (after, size / 2 + 1),
                    };
                    let is_silent = |row: &(&u64, &u32)| self.live(std::iter::once(*row)) == 0;
                    let silent = shard.replicas.iter().filter(is_silent);
                    let silent = silent.map(|(node, _)| *node).collect();
                    let reason = StuckReason::NoMajority { reachable, needed, silent };
                    return self.stuck(shard_id, from, reason);
                }
                self.start(PlannedMove { shard_id, from, to, reason });
            }
            Err(nodes) => self.stuck(shard_id, from, StuckReason::Unreachable { nodes }),
        }
    }

    /// Returns the number of data shards with a replica on a node, also during a move.
    fn data_shards_on(&self, node: u64) -> usize {
        let data = self.placement.shards().filter(|(shard_id, _)| *shard_id != 0);
        let holds = |shard: &PlacedShard| {
            shard.generation_on(node).is_some() || shard.replicas.contains_key(&node)
        };
        data.filter(|(_, shard)| holds(shard)).count()
    }

    /// Returns the nodes without a replica of a shard, with the reasons why they get none.
    fn refused(&self, shard: &PlacedShard) -> Vec<(u64, &'static str)> {
        let others = self.members.iter().map(|it| it.node_id);
        let others = others.filter(|node| !shard.replicas.contains_key(node));
        others.filter_map(|node| Some((node, self.members.refusal_to_hold(node)?))).collect()
    }

    /// Returns the node that should get a new replica; `None` if no node may get one.
    ///
    /// Prefers the node that lost the replica, then racks with few replicas of the shard, then
    /// nodes with few replicas.
    ///
    /// # Errors
    /// The nodes that may get one, if all of them are unreachable.
    fn target(
        &self,
        shard_id: u64,
        shard: &PlacedShard,
        from: Option<u64>,
    ) -> Result<Option<u64>, Vec<u64>> {
        let is_lost =
            |node: u64| shard.replicas.get(&node).is_some_and(|it| self.members.is_lost(node, *it));
        let is_free = |node: &u64| {
            let replaces = from == Some(*node) && shard_id != 0 && is_lost(*node);
            self.members.may_hold(*node) && (replaces || !shard.replicas.contains_key(node))
        };
        let free: Vec<u64> = self.members.iter().map(|it| it.node_id).filter(is_free).collect();
        let reached = free.iter().copied().filter(|node| self.reachable.contains(node));
        let rest: Vec<u64> =
            shard.replicas.keys().copied().filter(|node| from != Some(*node)).collect();
        // A node that lost its replica gets it again.
        let best = reached.min_by_key(|node| {
            let in_rack = self.in_rack(&rest, self.rack(*node));
            (from != Some(*node), in_rack, self.load(*node), *node)
        });
        match best {
            None if !free.is_empty() => Err(free),
            best => Ok(best),
        }
    }

    /// Returns the node that loses a replica of a shard with too many.
    fn surplus(&self, shard: &PlacedShard) -> u64 {
        let nodes = shard.replicas.keys().copied();
        let order = |node: &u64| {
            let is_wanted = self.reachable.contains(node) && self.members.may_hold(*node);
            let in_rack = self.in_rack(shard.replicas.keys(), self.rack(*node));
            (!is_wanted, in_rack, self.load(*node), *node)
        };
        nodes.max_by_key(order).unwrap_or(0)
    }

    /// Returns whether replicas may spread: no data shard needs a repair, which would change the
    /// numbers of replicas as well.
    fn has_time(&self) -> bool {
        let is_data_repair = |step: &PlanStep| match step {
            PlanStep::Move(planned) => planned.shard_id != 0,
            PlanStep::Cancel { .. } => true,
        };
        let is_repair =
            |(shard_id, moving): (u64, &ShardMove)| shard_id != 0 && !moving.reason.is_optional();
        let is_waiting = |stuck: &StuckShard| stuck.reason == StuckReason::OtherMovesFirst;
        !self.plan.steps.iter().any(is_data_repair)
            && !self.placement.moves().any(is_repair)
            && !self.plan.stuck.iter().any(is_waiting)
    }

    fn rack(&self, node: u64) -> &str {
        self.members.get(node).map_or("", |member| member.rack.as_str())
    }

    /// Returns how many of these nodes are in a rack.
    fn in_rack<'b>(&self, nodes: impl IntoIterator<Item = &'b u64>, rack: &str) -> usize {
        nodes.into_iter().filter(|node| self.rack(**node) == rack).count()
    }

    /// Moves replicas out of racks with more of a shard than others, by two or more.
    fn spread_racks(&mut self) {
        let racks: BTreeSet<&str> =
            self.members.iter().filter(|it| !it.leaving).map(|it| it.rack.as_str()).collect();
        if racks.len() < 2 {
            return;
        }
        let placement = self.placement;
        for (shard_id, shard) in placement.shards() {
            let is_busy = self.plan.shards().contains(&shard_id) || shard.moving.is_some();
            if is_busy || self.live(&shard.replicas) < shard.replicas.len() {
                continue;
            }
            let count = |rack: &str| self.in_rack(shard.replicas.keys(), rack);
            let fewest = racks.iter().map(|rack| count(rack)).min().unwrap_or(0);
            let order = |node: &u64| (count(self.rack(*node)), self.load(*node), *node);
            let Some(from) = shard.replicas.keys().copied().max_by_key(order) else { continue };
            let most = count(self.rack(from));
            if most < fewest + 2 {
                continue;
            }
            let others = || {
                let others = self.members.iter().map(|it| it.node_id);
                let others = others.filter(|node| !shard.replicas.contains_key(node));
                others.filter(|node| count(self.rack(*node)) + 2 <= most)
            };
            let is_free =
                |node: &u64| self.members.may_hold(*node) && self.reachable.contains(node);
            match others().filter(is_free).min_by_key(order) {
                Some(to) if self.moves_left > 0 => {
                    let (from, to, reason) = (Some(from), Some(to), MoveReason::Racks);
                    self.start(PlannedMove { shard_id, from, to, reason });
                }
                Some(_) => {}
                None => {
                    let why = |node| {
                        let why = self.members.refusal_to_hold(node);
                        Some((node, why.unwrap_or("cannot be reached")))
                    };
                    let refused = others().filter_map(why).collect();
                    let (rack, of) = (self.rack(from).to_owned(), shard.replicas.len());
                    let reason = StuckReason::Racks { rack, replicas: most, of, refused };
                    self.stuck(shard_id, Some(from), reason);
                }
            }
        }
        self.plan.stuck.sort_by_key(|it| it.shard_id);
    }

    /// Moves replicas from nodes with many to nodes with fewer, if that makes a difference.
    fn spread(&mut self) {
        while self.moves_left > 0 {
            let Some(planned) = self.next_spread() else { return };
            self.start(planned);
        }
    }

    /// Returns whether a move leaves a shard's replicas as evenly spread over racks as before.
    fn keeps_racks(&self, shard: &PlacedShard, from: u64, to: u64) -> bool {
        let (old, new) = (self.rack(from), self.rack(to));
        let count = |rack: &str| self.in_rack(shard.replicas.keys(), rack);
        old == new || count(new) < count(old)
    }

    fn next_spread(&self) -> Option<PlannedMove> {
        let nodes = || self.members.iter().map(|it| it.node_id);
        let is_target = |node: &u64| self.members.may_hold(*node) && self.reachable.contains(node);
        let mut sources: Vec<u64> = nodes().filter(|node| !self.is_leaving(*node)).collect();
        sources.sort_by_key(|node| (std::cmp::Reverse(self.load(*node)), *node));
        let mut targets: Vec<u64> = nodes().filter(is_target).collect();
        targets.sort_by_key(|node| (self.load(*node), *node));
        let planned = self.plan.shards();
        for from in sources {
            for to in targets.iter().copied() {
                if self.load(from) < self.load(to) + 2 {
                    break;
                }
                let fits = |(shard_id, shard): &(u64, &PlacedShard)| {
                    *shard_id != 0
                        && shard.moving.is_none()
                        && !planned.contains(shard_id)
                        && shard.replicas.contains_key(&from)
                        && !shard.replicas.contains_key(&to)
                        && self.live(&shard.replicas) == shard.replicas.len()
                        && self.keeps_racks(shard, from, to)
                };
                if let Some((shard_id, _)) = self.placement.shards().find(fits) {
                    let (from, to, reason) = (Some(from), Some(to), MoveReason::Spread);
                    return Some(PlannedMove { shard_id, from, to, reason });
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests;
