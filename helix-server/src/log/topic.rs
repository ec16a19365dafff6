//! Topics of the cluster, and the shards of their partitions.
//! Placement is computed, so a topic of any size needs only a few numbers.

use std::collections::{BTreeMap, BTreeSet};

use super::{PartitionId, PartitionRun, PartitionSettings};
use crate::records::PartitionExtent;

/// A topic of the cluster.
///
/// Invariants: `extents` cover the numbers `0..partition_count` in order and without overlap;
/// `shards` is not empty; no list names a shard twice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicInfo {
    /// Never reused.
    pub id: u64,
    pub name: String,
    pub partition_count: u32,
    pub replication_factor: u32,
    pub settings: PartitionSettings,
    pub created_at_us: u64,
    /// Partition number n is in `shards[(id + n) % shards.len()]`, unless its extent has shards.
    /// The id spreads small topics.
    pub(crate) shards: Vec<u64>,
    pub(crate) extents: Vec<PartitionExtent>,
}

/// The shard and the id of a partition, which never change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartitionLocation {
    pub shard_id: u64,
    pub partition: PartitionId,
}

impl TopicInfo {
    /// Returns the shards that have or may get partitions of the topic, sorted by id.
    pub fn shards(&self) -> BTreeSet<u64> {
        let of_extents = self.extents.iter().flat_map(|extent| &extent.shards);
        self.shards.iter().chain(of_extents).copied().collect()
    }

    /// Returns the location of the partition with this number.
    pub fn location(&self, number: u32) -> Option<PartitionLocation> {
        if number >= self.partition_count {
            return None;
        }
        let next = self.extents.partition_point(|extent| extent.first_number <= number);
        let extent = self.extents.get(next.checked_sub(1)?)?;
        Some(self.location_in(extent, number - extent.first_number))
    }

    /// Returns the locations of all partitions, in the order of their numbers.
    pub fn locations(&self) -> impl Iterator<Item = PartitionLocation> {
        let extents = self.extents.iter();
        extents.flat_map(|extent| (0..extent.count).map(|step| self.location_in(extent, step)))
    }

    /// Returns the topic's partitions in one shard, for its `CreatePartitions`.
    pub fn runs(&self, shard_id: u64) -> Vec<PartitionRun> {
        let run = |extent: &PartitionExtent| {
            let shards = self.shards_of(extent);
            let slot = shards.iter().position(|&shard| shard == shard_id)?;
            let stride = shards.len();
            let step = (slot + stride - self.first_slot(extent)) % stride;
            let (step, stride) = (u32::try_from(step).ok()?, u32::try_from(stride).ok()?);
            (step < extent.count).then(|| PartitionRun {
                first_id: extent.first_id + u64::from(step),
                first_number: extent.first_number + step,
                stride,
                count: (extent.count - step).div_ceil(stride),
            })
        };
        self.extents.iter().filter_map(run).collect()
    }

    /// Returns how many partitions the topic has in each shard that has any.
    pub fn shard_counts(&self) -> BTreeMap<u64, u64> {
        let mut counts = BTreeMap::new();
        for shard in self.shards() {
            let count = self.runs(shard).iter().map(|run| u64::from(run.count)).sum();
            if count > 0 {
                counts.insert(shard, count);
            }
        }
        counts
    }

    /// Appends `count` partitions with ids from `first_id`, in the topic's shards or, if there are
    /// any, in these in turn.
    pub(crate) fn extend(&mut self, first_id: u64, count: u32, shards: Vec<u64>) {
        let first_number = self.partition_count;
        let is_next = |last: &PartitionExtent| {
            last.first_id + u64::from(last.count) == first_id && last.shards.is_empty()
        };
        match self.extents.last_mut() {
            Some(last) if shards.is_empty() && is_next(last) => last.count += count,
            _ => self.extents.push(PartitionExtent { first_id, first_number, count, shards }),
        }
        self.partition_count += count;
    }

    fn location_in(&self, extent: &PartitionExtent, step: u32) -> PartitionLocation {
        let shards = self.shards_of(extent);
        let slot = (self.first_slot(extent) + step as usize) % shards.len();
        let partition = PartitionId(extent.first_id + u64::from(step));
        PartitionLocation { shard_id: shards[slot], partition }
    }

    fn shards_of<'a>(&'a self, extent: &'a PartitionExtent) -> &'a [u64] {
        if extent.shards.is_empty() { &self.shards } else { &extent.shards }
    }

    /// Returns the position of the shard of an extent's first partition in its shards.
    fn first_slot(&self, extent: &PartitionExtent) -> usize {
        if !extent.shards.is_empty() {
            return 0;
        }
        let number = u64::from(extent.first_number);
        (self.id.wrapping_add(number) % self.shards.len() as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topic(id: u64, shards: Vec<u64>) -> TopicInfo {
        TopicInfo {
            id,
            name: "orders".to_owned(),
            partition_count: 0,
            replication_factor: 1,
            settings: PartitionSettings::default(),
            created_at_us: 0,
            shards,
            extents: Vec::new(),
        }
    }

    #[test]
    fn locations_and_runs_agree() {
        for id in 1..6 {
            for shards in 1..5 {
                let mut topic = topic(id, (10..10 + shards).collect());
                for (first_id, count) in [(100, 1), (101, 6), (500, 2), (900, 3)] {
                    topic.extend(first_id, count, Vec::new());
                }
                assert_eq!(topic.extents.len(), 3, "adjacent extents are joined");
                topic.extend(903, 3, vec![12, 20, 11]);
                topic.extend(906, 1, Vec::new());
                assert_eq!(topic.extents.len(), 5, "an extent with shards is not joined");
                let mut by_number = BTreeMap::new();
                for shard_id in topic.shards() {
                    for (number, partition) in
                        topic.runs(shard_id).iter().flat_map(|r| r.partitions())
                    {
                        assert_eq!(
                            by_number.insert(number, PartitionLocation { shard_id, partition }),
                            None
                        );
                    }
                }
                let by_place = (0..16).map(|number| topic.location(number).unwrap());
                assert!(by_place.eq(by_number.values().copied()));
                assert!(topic.locations().eq(by_number.values().copied()));
                assert_eq!(topic.location(16), None);
                let in_20 = topic.location(13).unwrap();
                assert_eq!(in_20, PartitionLocation { shard_id: 20, partition: PartitionId(904) });
                let counts = topic.shard_counts();
                assert_eq!(counts.values().sum::<u64>(), 16);
                assert_eq!(counts[&20], 1);
                assert_eq!(topic.runs(99), []);
            }
        }
    }

    #[test]
    fn small_topics_spread_over_the_shards() {
        let mut counts = BTreeMap::new();
        for id in 1..=30 {
            let mut topic = topic(id, vec![1, 2, 3]);
            topic.extend(id, 1, Vec::new());
            *counts.entry(topic.location(0).unwrap().shard_id).or_insert(0) += 1;
        }
        assert!(counts.values().eq(&[10, 10, 10]));
    }
}
