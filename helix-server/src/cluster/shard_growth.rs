//! Adds data shards while the cluster runs, and chooses the shards of new partitions.
//!
//! [`AddShards`] names new shards that have no replica. The planner adds the first replica of each
//! as it adds any missing replica. The replica's node forms the shard with this replica alone, and
//! the other replicas join as in a move. A shard takes partitions only once it has all of its
//! replicas, so that no record has fewer copies than it should.

use std::collections::BTreeMap;

use super::members::{Member, Members, invalid};
use super::placed_split::PlacedSplit;
use super::placement::{PlacedShard, ShardMove};
use super::shard_moves::check_replicas;
use super::state::{ClusterState, ShardTurn};
use crate::limits::SHARDS_MAX;
use crate::log::{AddShards, ClusterReply, TopicInfo};
use crate::protocol;

impl Members {
    /// Names new shards, which have no replica yet. A repeated command changes nothing.
    pub(super) fn add_shards(&mut self, add: AddShards) -> Result<ClusterReply, ClusterReply> {
        let AddShards { current, total, split, replicas } = add;
        self.check_placed()?;
        self.check_replication(split, replicas)?;
        let Some(placement) = &mut self.placement else { return Ok(ClusterReply::Done) };
        let last = placement.shards.keys().last().copied().unwrap_or(0);
        let known = placement.shards.keys().filter(|id| **id != 0).count() as u64;
        if u64::from(total) == known {
            return Ok(ClusterReply::Done);
        }
        if u64::from(current) != known {
            let what = format!(
                "the cluster has {known} data shards, not {current}: shards were added since"
            );
            return Err(ClusterReply::ChangeInProgress { what });
        }
        let Some(more) = u64::from(total).checked_sub(known) else {
            let what = format!("{total} is less than the current {known}; shards stay permanently");
            return Err(invalid("total", what));
        };
        if last + more > SHARDS_MAX {
            let what = format!("{total} is above the limit of {SHARDS_MAX} data shards");
            return Err(invalid("total", what));
        }
        let split = split.then(PlacedSplit::default);
        let new = PlacedShard { split, replication_factor: replicas, ..PlacedShard::default() };
        placement.shards.extend((last + 1..=last + more).map(|id| (id, new.clone())));
        Ok(ClusterReply::Done)
    }

    /// Checks the number of replicas of new shards; 0 stands for the cluster's number.
    fn check_replication(&self, split: bool, replicas: u32) -> Result<(), ClusterReply> {
        if replicas == 0 {
            return Ok(());
        }
        if split {
            let what = "a shard that comes from a split has as many replicas as its parent";
            return Err(invalid("replicas", what));
        }
        check_replicas(replicas)?;
        let holders = self.holders();
        if holders < replicas as usize {
            let what = format!(
                "{replicas} is above the number of nodes that may get a replica, {holders}; add or \
                 uncordon nodes"
            );
            return Err(invalid("replicas", what));
        }
        Ok(())
    }

    /// Replaces a new shard that is given up after its first replica was created.
    ///
    /// The next shard gets a new id, because the node may have formed the old one. A shard with the
    /// same id would begin with the same terms, by which clients and nodes distinguish leaders.
    pub(super) fn give_up_new_shard(&mut self, shard_id: u64) {
        let Some(placement) = &mut self.placement else { return };
        let given_up = placement.shards.remove(&shard_id);
        let replication_factor = given_up.map_or(0, |shard| shard.replication_factor);
        let last = placement.shards.keys().last().copied().unwrap_or(0).max(shard_id);
        if last < SHARDS_MAX {
            let next = PlacedShard { replication_factor, ..PlacedShard::default() };
            placement.shards.insert(last + 1, next);
        }
    }

    /// Returns the number of nodes that are being replaced, and may get a replica after that.
    fn replaced_holders(&self) -> usize {
        let is_replaced = |it: &&Member| it.joining.is_some() && it.generation > 0;
        self.iter().filter(is_replaced).filter(|it| !it.leaving && !it.cordoned).count()
    }

    /// Returns whether a shard may have lost its majority: half of its replicas or more are on
    /// nodes that leave or lost their data. During a move the voters may be those before it or
    /// after it.
    fn has_lost_majority(&self, shard: &PlacedShard) -> bool {
        if shard.split.is_some() {
            return false;
        }
        let is_gone = |(node, generation): &(&u64, &u32)| {
            self.get(**node).is_none_or(|it| it.leaving || **generation < it.generation)
        };
        let has_lost = |replicas: &BTreeMap<u64, u32>| {
            let gone = replicas.iter().filter(is_gone).count();
            gone > 0 && gone * 2 >= replicas.len()
        };
        let moving = shard.finishable().map(|it| ShardMove { is_cancelled: false, ..*it });
        has_lost(&shard.replicas) || has_lost(&PlacedShard { moving, ..shard.clone() }.after())
    }

    /// Returns whether this is, or is about to be, a replica of the data shard. Always true without
    /// a placement.
    ///
    /// A new shard may have been given up for another one while its leader knew nothing of it.
    pub(super) fn names_replica(&self, shard_id: u64, node_id: u64, generation: u32) -> bool {
        let Some(placement) = self.placement() else { return true };
        placement.shard(shard_id).is_some_and(|it| it.names(node_id, generation))
    }
}

impl ClusterState {
    /// Lets new shards that have all of their replicas take partitions.
    pub(super) fn open_new_shards(&mut self) {
        let Some(placement) = self.members.placement() else { return };
        let nodes = match self.protocol >= protocol::LOST_NEW_SHARDS {
            true => self.members.holders() + self.members.replaced_holders(),
            false => self.members.holders(),
        };
        let wanted = |shard: &PlacedShard| {
            let wanted = usize::try_from(placement.wanted_replicas(shard)).unwrap_or(usize::MAX);
            wanted.min(nodes).max(1)
        };
        let is_new = |(id, shard): &(u64, &PlacedShard)| {
            *id != 0 && !self.shards.contains(id) && shard.replicas.len() >= wanted(shard)
        };
        let new: Vec<u64> = placement.shards().filter(is_new).map(|(id, _)| id).collect();
        self.shards.extend(new);
    }

    /// Gives up new shards that may have lost their majority. They have no partitions yet.
    ///
    /// Without a majority, no replica could be added or moved, and the replacement of a node would
    /// wait permanently.
    pub(super) fn give_up_lost_shards(&mut self) {
        let Some(placement) = self.members.placement() else { return };
        if self.protocol < protocol::LOST_NEW_SHARDS {
            return;
        }
        let is_lost = |(id, shard): &(u64, &PlacedShard)| {
            *id != 0 && !self.shards.contains(id) && self.members.has_lost_majority(shard)
        };
        let lost: Vec<u64> = placement.shards().filter(is_lost).map(|(id, _)| id).collect();
        for shard_id in lost {
            self.members.give_up_new_shard(shard_id);
        }
    }

    /// Returns the data shards that take partitions and have this replication factor; 0 selects the
    /// shards that follow the cluster's number.
    pub(super) fn shards_with(&self, replication_factor: u32) -> impl Iterator<Item = u64> {
        let of_shard = |shard: &u64| self.replication_factor_of(*shard);
        self.shards.iter().copied().filter(move |shard| of_shard(shard) == replication_factor)
    }

    /// Returns a shard's own number of replicas; 0 if it follows the cluster's.
    pub(super) fn replication_factor_of(&self, shard: u64) -> u32 {
        self.members.placement().map_or(0, |it| it.replication_factor(shard))
    }

    /// Orders the shards of a new topic so that its first partitions go to the least loaded shards.
    /// The topic's id rotates shards with equally many partitions.
    pub(super) fn in_turn(&self, topic_id: u64, shards: &[u64]) -> Vec<u64> {
        let mut turns = shards.to_vec();
        if self.protocol < protocol::MORE_SHARDS || turns.is_empty() {
            return turns;
        }
        // The position of the first partition's shard, see `TopicInfo::shards`.
        let first = usize::try_from(topic_id % turns.len() as u64).unwrap_or(0);
        turns.rotate_left(first);
        turns.sort_by_key(|shard| self.partitions_in(*shard));
        turns.rotate_right(first);
        turns
    }

    /// Returns the shards of the next `more` partitions of a topic. Unless the topic uses all
    /// shards in turn, each partition goes to the shard with the fewest partitions of the topic.
    pub(super) fn turns(&self, topic: &TopicInfo, more: u32) -> Vec<ShardTurn> {
        let is_plain = topic.extents.iter().all(|extent| extent.shards.is_empty());
        // New partitions have as many replicas as those that exist.
        let factor = topic.shards.first().map_or(0, |shard| self.replication_factor_of(*shard));
        let shards: Vec<u64> = self.shards_with(factor).collect();
        let has_all = shards.iter().all(|shard| topic.shards.contains(shard));
        let is_new = topic.partition_count == 0;
        if is_new || self.protocol < protocol::MORE_SHARDS || (is_plain && has_all) {
            return vec![ShardTurn { shards: Vec::new(), count: more }];
        }
        let known = topic.shard_counts();
        let count_in = |shard: &u64| known.get(shard).copied().unwrap_or(0);
        let mut counts: BTreeMap<u64, u64> =
            shards.iter().map(|shard| (*shard, count_in(shard))).collect();
        let (mut turns, mut left) = (Vec::new(), more);
        // Fills the least loaded shards up to the next higher count, or all evenly without one.
        while left > 0 {
            let least = counts.values().copied().min().unwrap_or(0);
            let next = counts.values().copied().filter(|count| *count > least).min();
            let mut shards: Vec<u64> =
                counts.iter().filter(|row| *row.1 == least).map(|row| *row.0).collect();
            shards.sort_by_key(|shard| self.partitions_in(*shard));
            let length = shards.len() as u64;
            let capacity = next.map_or(u64::from(left), |next| (next - least) * length);
            let count = u32::try_from(capacity).map_or(left, |capacity| capacity.min(left));
            for (turn, shard) in (0..).zip(&shards) {
                let taken = (u64::from(count) + length - 1 - turn) / length;
                *counts.entry(*shard).or_default() += taken;
            }
            shards.truncate(count as usize);
            turns.push(ShardTurn { shards, count });
            left -= count;
        }
        turns
    }

    /// Returns the number of partitions in a data shard.
    pub(super) fn partitions_in(&self, shard_id: u64) -> u64 {
        self.shard_partitions.get(&shard_id).copied().unwrap_or(0)
    }

    /// Counts the partitions of all topics.
    pub(super) fn count_partitions(&mut self) {
        self.shard_partitions.clear();
        for topic in self.topics.values() {
            for (shard, count) in topic.shard_counts() {
                *self.shard_partitions.entry(shard).or_default() += count;
            }
        }
    }

    /// Subtracts the partitions of a topic before it is deleted or counted again.
    pub(super) fn uncount_partitions(&mut self, topic: &TopicInfo) {
        for (shard, count) in topic.shard_counts() {
            let known = self.shard_partitions.entry(shard).or_default();
            *known = known.saturating_sub(count);
            if *known == 0 {
                self.shard_partitions.remove(&shard);
            }
        }
    }
}

#[cfg(test)]
mod tests;
