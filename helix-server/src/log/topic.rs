//! Topics of the cluster, and the shards of their partitions.
//! Placement is computed, so a topic of any size needs only a few numbers.

use super::{PartitionId, PartitionRun, PartitionSettings};
use crate::records::PartitionExtent;

/// A topic of the cluster.
///
/// Invariants: `extents` cover the numbers `0..partition_count` in order and without overlap;
/// `shards` is not empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicInfo {
    /// Never reused.
    pub id: u64,
    pub name: String,
    pub partition_count: u32,
    pub replication_factor: u32,
    pub settings: PartitionSettings,
    pub created_at_us: u64,
    /// Partition number n is in `shards[(id + n) % shards.len()]`. The id spreads small topics.
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
    /// Returns the shards that the topic is spread over.
    pub fn shards(&self) -> &[u64] {
        &self.shards
    }

    /// Returns the location of the partition with this number.
    pub fn location(&self, number: u32) -> Option<PartitionLocation> {
        if number >= self.partition_count {
            return None;
        }
        let next = self.extents.partition_point(|extent| extent.first_number <= number);
        let extent = self.extents.get(next.checked_sub(1)?)?;
        let partition = PartitionId(extent.first_id + u64::from(number - extent.first_number));
        Some(PartitionLocation { shard_id: self.shard_of(number), partition })
    }

    /// Returns the locations of all partitions, in the order of their numbers.
    pub fn locations(&self) -> impl Iterator<Item = PartitionLocation> {
        self.extents.iter().flat_map(|extent| {
            (0..extent.count).map(|i| PartitionLocation {
                shard_id: self.shard_of(extent.first_number + i),
                partition: PartitionId(extent.first_id + u64::from(i)),
            })
        })
    }

    /// Returns the topic's partitions in one shard, for its `CreatePartitions`.
    pub fn runs(&self, shard_id: u64) -> Vec<PartitionRun> {
        let Some(slot) = self.shards.iter().position(|&shard| shard == shard_id) else {
            return Vec::new();
        };
        let stride = self.shards.len() as u32;
        let run = |extent: &PartitionExtent| {
            let first_slot = self.slot_of(extent.first_number) as u32;
            let step = (slot as u32 + stride - first_slot) % stride;
            (step < extent.count).then(|| PartitionRun {
                first_id: extent.first_id + u64::from(step),
                first_number: extent.first_number + step,
                stride,
                count: (extent.count - step).div_ceil(stride),
            })
        };
        self.extents.iter().filter_map(run).collect()
    }

    /// Appends `count` partitions with ids from `first_id`.
    pub(crate) fn extend(&mut self, first_id: u64, count: u32) {
        let first_number = self.partition_count;
        match self.extents.last_mut() {
            Some(last) if last.first_id + u64::from(last.count) == first_id => last.count += count,
            _ => self.extents.push(PartitionExtent { first_id, first_number, count }),
        }
        self.partition_count += count;
    }

    fn shard_of(&self, number: u32) -> u64 {
        self.shards[self.slot_of(number)]
    }

    fn slot_of(&self, number: u32) -> usize {
        (self.id.wrapping_add(u64::from(number)) % self.shards.len() as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

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
                for (first_id, count) in [(100, 1), (101, 6), (500, 2), (900, 7)] {
                    topic.extend(first_id, count);
                }
                assert_eq!(topic.extents.len(), 3, "adjacent extents are joined");
                let mut by_number = BTreeMap::new();
                for &shard_id in topic.shards() {
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
                assert_eq!(topic.runs(99), []);
            }
        }
    }

    #[test]
    fn small_topics_spread_over_the_shards() {
        let mut counts = BTreeMap::new();
        for id in 1..=30 {
            let mut topic = topic(id, vec![1, 2, 3]);
            topic.extend(id, 1);
            *counts.entry(topic.location(0).unwrap().shard_id).or_insert(0) += 1;
        }
        assert!(counts.values().eq(&[10, 10, 10]));
    }
}
