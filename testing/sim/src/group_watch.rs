//! Checks the consumer group on all nodes, below their API:
//!
//! - A partition has one owner, and is in one member's target.
//! - Epochs and committed offsets never fall.
//! - Replicas that applied the same entries have equal groups. At the same epoch of the group they
//!   have the same members, with the same epochs.
//! - A group that is left alone becomes stable: its members are those that run, and every partition
//!   is read by one of them. Then nothing moves, and no record is delivered again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use helix_checker::GroupPartitionKey;
use helix_server::log::{ConsumerGroup, GroupTable, PartitionKey};
use helix_server::node::Node;
use helix_server::shard::Shard;

use crate::cluster::SimulatedMachine;
use crate::group_context::GroupContext;
use crate::{shard_growth, tables};

/// Ticks between checks.
const EVERY: u64 = 5;

/// A group as a replica had it at the last check.
#[derive(Debug, Default)]
struct GroupObservation {
    /// Start count of the node, and restarts of the shard.
    starts: (u64, u64),
    applied: u64,
    epoch: u64,
    offsets: BTreeMap<PartitionKey, u64>,
}

/// Checks the group, and keeps the state that it needs.
#[derive(Debug)]
pub struct GroupStateChecker {
    context: GroupContext,
    ticks: u64,
    /// By node and shard.
    seen: BTreeMap<(u64, u64), GroupObservation>,
    /// Members and the epochs at which they joined, by shard and epoch of the group.
    members: BTreeMap<(u64, u64), Vec<(String, u64)>>,
}

/// State of a group in which nothing is left to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SettledGroup {
    pub epoch: u64,
    /// Records that were delivered again so far.
    pub repeated: u64,
}

fn to_key(key: PartitionKey) -> GroupPartitionKey {
    GroupPartitionKey { topic_id: key.topic_id, number: key.number }
}

impl GroupStateChecker {
    pub fn new(context: GroupContext) -> Self {
        Self { context, ticks: 0, seen: BTreeMap::new(), members: BTreeMap::new() }
    }

    /// Checks the group on every running node.
    ///
    /// # Errors
    /// The rule that is violated.
    pub fn check(&mut self, machines: &[SimulatedMachine]) -> Result<(), String> {
        if let Some(what) = self.context.violation() {
            return Err(format!("group: {what}"));
        }
        self.ticks += 1;
        if !self.ticks.is_multiple_of(EVERY) {
            return Ok(());
        }
        for machine in machines {
            let Some(node) = machine.node() else { continue };
            let restarts: BTreeMap<u64, u64> = node.restarts().into_iter().collect();
            for shard in node.shards() {
                let restarts = restarts.get(&shard.id()).copied().unwrap_or(0);
                let starts = (machine.start_count(), restarts);
                self.check_replica(machine.node_id(), starts, &shard)?;
            }
        }
        Ok(())
    }

    fn check_replica(
        &mut self,
        node_id: u64,
        starts: (u64, u64),
        shard: &Shard,
    ) -> Result<(), String> {
        // Read first: the state is at least as new.
        let applied = shard.applied();
        let seen = self.seen.entry((node_id, shard.id())).or_default();
        if seen.starts != starts || applied < seen.applied {
            *seen = GroupObservation { starts, ..GroupObservation::default() };
        }
        if applied == seen.applied {
            return Ok(());
        }
        seen.applied = applied;
        let (context, members) = (&self.context, &mut self.members);
        let checked = shard.read_groups(|groups| match groups.get(context.name()) {
            Some(group) => {
                // Every change of the members is a new epoch.
                let joined = joined_members(group);
                let epoch = (shard.id(), group.epoch());
                let known = members.entry(epoch).or_insert_with(|| joined.clone());
                if *known != joined {
                    return Err(format!(
                        "members and their epochs are {joined:?} at epoch {}, but another replica \
                         had {known:?}",
                        group.epoch()
                    ));
                }
                seen.compare(group, context)
            }
            None => {
                seen.offsets.clear();
                Ok(())
            }
        });
        checked.map_err(|what| format!("group on node {node_id}, shard {}: {what}", shard.id()))
    }

    /// Checks that replicas that applied the same entries have equal groups.
    ///
    /// # Errors
    /// The first difference.
    pub fn compare(
        &self,
        machines: &[SimulatedMachine],
        members: &BTreeSet<u64>,
    ) -> Result<(), String> {
        let mut first: BTreeMap<u64, (u64, GroupTable)> = BTreeMap::new();
        for machine in machines.iter().filter(|it| members.contains(&it.node_id())) {
            for shard in machine.node().iter().flat_map(|node| node.shards()) {
                let groups = shard.read_groups(GroupTable::clone);
                let node = machine.node_id();
                let (other, expected) = first.entry(shard.id()).or_insert((node, groups.clone()));
                if *expected != groups {
                    let shard = shard.id();
                    return Err(format!(
                        "shard {shard}: groups differ: node {other} has {expected:?}, node {node} \
                         has {groups:?}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Returns the group if nothing is left to do in it, else why not.
    ///
    /// # Errors
    /// The work that is left, as text.
    pub fn settled(&self, machines: &[SimulatedMachine]) -> Result<SettledGroup, String> {
        if !self.context.has_fixed_topics() {
            return Err("topics are still changed".to_owned());
        }
        let (node, shard) = self.coordinator(machines).ok_or("the group has no coordinator")?;
        let group = shard.read_groups(|groups| groups.get(self.context.name()).cloned());
        let group = group.ok_or("the group does not exist")?;
        let members: Vec<String> = group.members().map(|(id, _)| id.to_string()).collect();
        if members != self.context.running() {
            return Err(format!("members {members:?} instead of {:?}", self.context.running()));
        }
        let unanswered = self.context.unanswered();
        if !unanswered.is_empty() {
            return Err(format!("members {unanswered:?} have no response yet"));
        }
        if !group.is_stable() {
            return Err(format!("the group is not stable: {group:?}"));
        }
        for key in partitions(&node) {
            if !self.context.checker().is_read(key) {
                return Err(format!("no member reads {key:?}: {group:?}"));
            }
        }
        let repeated = self.context.checker().counts().repeated;
        Ok(SettledGroup { epoch: group.epoch(), repeated })
    }

    /// Returns why the group has not read and committed everything; `None` if it has.
    pub fn unread(&self, machines: &[SimulatedMachine]) -> Option<String> {
        let Some((node, shard)) = self.coordinator(machines) else {
            return Some("the group has no coordinator".to_owned());
        };
        for key in partitions(&node) {
            let place = PartitionKey { topic_id: key.topic_id, number: key.number };
            let nodes = machines.iter().filter_map(SimulatedMachine::node);
            let watermarks = nodes.filter_map(|node| node.watermarks_of(place));
            let (start, end) = watermarks.fold((0, 0), |(start, end): (u64, u64), it| {
                (start.max(it.log_start), end.max(it.high_watermark))
            });
            let undelivered = self.context.checker().first_undelivered(key, start);
            if undelivered < end {
                return Some(format!("{key:?} is delivered to {undelivered} of {start}..{end}"));
            }
            let committed = shard.read_groups(|groups| {
                let row = groups.get(self.context.name())?.offset(place)?;
                row.offset()
            });
            if end > start && committed != Some(end) {
                return Some(format!("{key:?} is committed to {committed:?} of {start}..{end}"));
            }
        }
        None
    }

    fn coordinator(&self, machines: &[SimulatedMachine]) -> Option<(Arc<Node>, Arc<Shard>)> {
        machines.iter().filter_map(SimulatedMachine::node).find_map(|node| {
            let has_group = |shard: &Arc<Shard>| {
                shard.is_leader()
                    && shard.read_groups(|groups| groups.get(self.context.name()).is_some())
            };
            let shard = node.shards().into_iter().find(has_group)?;
            Some((node, shard))
        })
    }
}

/// Returns the members of a group with the epochs at which they joined.
fn joined_members(group: &ConsumerGroup) -> Vec<(String, u64)> {
    group.members().map(|(id, member)| (id.to_string(), member.joined_epoch)).collect()
}

/// Returns the partitions of all topics that a node knows and that members read.
fn partitions(node: &Node) -> Vec<GroupPartitionKey> {
    let topics = node.topics("", None, usize::MAX);
    let is_read = |name: &str| name != tables::NAME && !name.starts_with(shard_growth::NAME_PREFIX);
    let keys = topics.iter().filter(|topic| is_read(&topic.name)).flat_map(|topic| {
        let topic_id = topic.id;
        (0..topic.partition_count).map(move |number| GroupPartitionKey { topic_id, number })
    });
    keys.collect()
}

impl GroupObservation {
    /// Checks a later state of the group, and keeps what the next check needs.
    fn compare(&mut self, group: &ConsumerGroup, context: &GroupContext) -> Result<(), String> {
        let (epoch, assignment_epoch) = (group.epoch(), group.assignment_epoch());
        if epoch < self.epoch || assignment_epoch > epoch {
            let before = self.epoch;
            return Err(format!("epochs {epoch} and {assignment_epoch}, {before} before"));
        }
        self.epoch = epoch;
        let mut owned = BTreeMap::new();
        let mut targets = BTreeMap::new();
        for (id, member) in group.members() {
            for key in member.owned.keys() {
                if let Some(other) = owned.insert(*key, id) {
                    return Err(format!("{key:?} is owned by {other} and {id}"));
                }
            }
            for key in member.target.iter() {
                if let Some(other) = targets.insert(*key, id) {
                    return Err(format!("{key:?} is assigned to {other} and {id}"));
                }
            }
        }
        for (key, before) in &self.offsets {
            // The rows of a deleted topic go.
            let Some(row) = group.offset(*key) else { continue };
            if row.offset().is_none_or(|offset| offset < *before) {
                context.checker().offset_fell(to_key(*key), *before, row.offset());
            }
        }
        self.offsets =
            group.offsets().filter_map(|(key, row)| Some((key, row.offset()?))).collect();
        Ok(())
    }
}
