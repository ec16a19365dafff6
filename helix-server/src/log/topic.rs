//! Topics of the cluster, and the shards of their partitions.
//! Placement is computed, so a topic of any size needs only a few numbers.

use std::collections::{BTreeMap, BTreeSet};

use super::{PartitionId, PartitionRun, PartitionSettings, ROWS_PER_ENTRY_MAX, SplitRule};
use crate::records::PartitionExtent;

/// A topic of the cluster.
///
/// Invariants: `extents` cover the numbers `0..partition_count` in order and without overlap;
/// `shards` is not empty and names each shard once. The list of an extent may name a shard more
/// than once, because a split replaces some of the occurrences of its parent.
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

/// The shard and the id of a partition. The id never changes, the shard only by a split.
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
    ///
    /// An extent has a run for each position of the shard in its list, by first number.
    pub fn runs(&self, shard_id: u64) -> Vec<PartitionRun> {
        let in_shard = self.steps().filter(|row| row.1 == shard_id);
        in_shard.map(|(extent, _, step)| self.run_in(extent, step)).collect()
    }

    /// Returns how many partitions the topic has in each shard that has any.
    pub fn shard_counts(&self) -> BTreeMap<u64, u64> {
        let mut counts = BTreeMap::new();
        for (extent, shard, step) in self.steps() {
            let count = u64::from(self.run_in(extent, step).count);
            *counts.entry(shard).or_default() += count;
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

    /// Returns the partitions of shard `parent` that a split moves, in the order of their numbers.
    pub fn moved_by(&self, parent: u64, rule: SplitRule) -> impl Iterator<Item = PartitionId> {
        let in_parent = self.locations().filter(move |it| it.shard_id == parent);
        let old = in_parent.map(|it| it.partition).filter(move |id| id.0 < rule.ids_below);
        let moved = (0..).zip(old).filter(move |(position, _)| rule.moves(self.id, *position));
        moved.map(|(_, id)| id)
    }

    /// Moves a share of the partitions of shard `parent` to shard `target`.
    ///
    /// An extent with a partition that moves gets a list. If the list would be longer than
    /// [`ROWS_PER_ENTRY_MAX`], the extent is divided into extents of as many partitions.
    pub(crate) fn split_off(&mut self, parent: u64, target: u64, rule: SplitRule) {
        let SplitRule { parts, ids_below, .. } = rule;
        if parts < 2 || parent == target {
            return;
        }
        let mut position = 0;
        let mut extents = Vec::with_capacity(self.extents.len() + 1);
        for extent in &self.extents {
            let below = ids_below.saturating_sub(extent.first_id).min(extent.count.into());
            let below = u32::try_from(below).unwrap_or(extent.count);
            let list = self.list_from(extent, 0);
            let (mut at, mut is_split) = (position, false);
            let turns = list.iter().cycle().take(split_turns(&list, parent, parts, below));
            let split = turns.map(|&shard| {
                let moves = shard == parent && rule.moves(self.id, at);
                at += u64::from(shard == parent);
                is_split |= moves;
                if moves { target } else { shard }
            });
            let split: Vec<u64> = split.collect();
            position += occurrences(&list, parent, below);
            if !is_split {
                extents.push(extent.clone());
                continue;
            }
            push_divided(&mut extents, PartitionExtent { count: below, shards: split, ..*extent });
            if below < extent.count {
                let is_own = !extent.shards.is_empty();
                extents.push(PartitionExtent {
                    first_id: extent.first_id + u64::from(below),
                    first_number: extent.first_number + below,
                    count: extent.count - below,
                    shards: if is_own { self.list_from(extent, below) } else { Vec::new() },
                });
            }
        }
        self.extents = extents;
    }

    /// Returns each extent with the shard of each step before the list repeats.
    fn steps(&self) -> impl Iterator<Item = (&PartitionExtent, u64, u32)> {
        self.extents.iter().flat_map(|extent| {
            let (shards, first) = (self.shards_of(extent), self.first_slot(extent));
            let turns = shards.iter().cycle().skip(first).take(shards.len());
            (0..extent.count).zip(turns).map(move |(step, shard)| (extent, *shard, step))
        })
    }

    /// Returns the partitions of an extent that have the shard of a step.
    fn run_in(&self, extent: &PartitionExtent, step: u32) -> PartitionRun {
        let stride = u32::try_from(self.shards_of(extent).len()).unwrap_or(u32::MAX);
        PartitionRun {
            first_id: extent.first_id + u64::from(step),
            first_number: extent.first_number + step,
            stride,
            count: (extent.count - step).div_ceil(stride),
        }
    }

    /// Returns the shards of an extent, in turn from the partition at `step` on.
    fn list_from(&self, extent: &PartitionExtent, step: u32) -> Vec<u64> {
        let mut list = self.shards_of(extent).to_vec();
        let first = (self.first_slot(extent) + step as usize) % list.len();
        list.rotate_left(first);
        list
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

/// Returns the number of turns after which a split list repeats, at most `count`.
fn split_turns(list: &[u64], parent: u64, parts: u64, count: u32) -> usize {
    let in_list = occurrences(list, parent, u32::try_from(list.len()).unwrap_or(u32::MAX));
    let repeats = parts / greatest_common_divisor(in_list, parts);
    let turns = (list.len() as u64).saturating_mul(repeats);
    usize::try_from(turns.min(count.into())).unwrap_or(usize::MAX)
}

/// Counts a shard in the first `count` turns of a list.
fn occurrences(list: &[u64], shard: u64, count: u32) -> u64 {
    let count_in = |list: &[u64]| list.iter().filter(|it| **it == shard).count() as u64;
    let (rounds, rest) = (count as usize / list.len(), count as usize % list.len());
    rounds as u64 * count_in(list) + count_in(&list[..rest])
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Adds an extent whose list repeats, or names the shard of each partition, with a shorter list.
fn push_divided(extents: &mut Vec<PartitionExtent>, mut extent: PartitionExtent) {
    let period = shortest_period(&extent.shards);
    let covers = extent.shards.len() >= extent.count as usize;
    if covers || extent.shards.len().is_multiple_of(period) {
        extent.shards.truncate(period);
    }
    if extent.shards.len() <= ROWS_PER_ENTRY_MAX {
        extents.push(extent);
        return;
    }
    let mut turns = extent.shards.iter().copied().cycle();
    let piece_max = u32::try_from(ROWS_PER_ENTRY_MAX).unwrap_or(u32::MAX);
    let mut begin = 0;
    while begin < extent.count {
        let count = piece_max.min(extent.count - begin);
        let mut shards: Vec<u64> = turns.by_ref().take(count as usize).collect();
        shards.truncate(shortest_period(&shards));
        extents.push(PartitionExtent {
            first_id: extent.first_id + u64::from(begin),
            first_number: extent.first_number + begin,
            count,
            shards,
        });
        begin += count;
    }
}

/// Returns the smallest `period` for which `list[at] == list[at + period]` throughout the list.
///
/// Source: Knuth, Morris, Pratt, "Fast Pattern Matching in Strings", 1977.
fn shortest_period(list: &[u64]) -> usize {
    // The length of the longest proper prefix that ends at each position.
    let mut borders = vec![0; list.len()];
    let mut border = 0;
    for at in 1..list.len() {
        while border > 0 && list[at] != list[border] {
            border = borders[border - 1];
        }
        border += usize::from(list[at] == list[border]);
        borders[at] = border;
    }
    list.len() - border
}

#[cfg(test)]
mod tests {
    use rand::RngExt;
    use rand::rngs::StdRng;

    use super::*;
    use crate::log::testing::seeded;

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

    /// A topic beside a list of its partitions with their shards.
    struct Modelled {
        topic: TopicInfo,
        partitions: Vec<(u32, u64, u64)>,
        next_id: u64,
    }

    impl Modelled {
        fn new(id: u64, shards: Vec<u64>) -> Self {
            Self { topic: topic(id, shards), partitions: Vec::new(), next_id: 1 }
        }

        fn extend(&mut self, skipped_ids: u64, count: u32, list: Vec<u64>) {
            let first_id = self.next_id + skipped_ids;
            self.next_id = first_id + u64::from(count);
            for step in 0..count {
                let number = self.topic.partition_count + step;
                let shards = if list.is_empty() { &self.topic.shards } else { &list };
                let turn = match list.is_empty() {
                    true => self.topic.id + u64::from(number),
                    false => u64::from(step),
                };
                let shard = shards[(turn % shards.len() as u64) as usize];
                self.partitions.push((number, first_id + u64::from(step), shard));
            }
            self.topic.extend(first_id, count, list);
        }

        /// Returns how many partitions move.
        fn split(&mut self, parent: u64, target: u64, parts: u64, ids_below: u64) -> usize {
            let turn = parts / 2 + target % 3;
            let (mut position, mut moved) = (0, Vec::new());
            for (_, id, shard) in &mut self.partitions {
                if *shard == parent && *id < ids_below {
                    if (self.topic.id + position + turn).is_multiple_of(parts) {
                        *shard = target;
                        moved.push(PartitionId(*id));
                    }
                    position += 1;
                }
            }
            let rule = SplitRule { parts, turn, ids_below };
            assert!(self.topic.moved_by(parent, rule).eq(moved.iter().copied()));
            self.topic.split_off(parent, target, rule);
            moved.len()
        }

        fn check(&self) {
            let topic = &self.topic;
            let location = |&(_, id, shard_id): &(u32, u64, u64)| PartitionLocation {
                shard_id,
                partition: PartitionId(id),
            };
            assert!(topic.locations().eq(self.partitions.iter().map(location)));
            for row in &self.partitions {
                assert_eq!(topic.location(row.0), Some(location(row)));
            }
            assert_eq!(topic.location(topic.partition_count), None);
            let mut counts = BTreeMap::new();
            for shard in topic.shards() {
                let runs = topic.runs(shard);
                assert!(runs.iter().all(|run| run.count > 0 && run.stride > 0));
                let mut rows: Vec<_> = runs.iter().flat_map(|run| run.partitions()).collect();
                rows.sort_unstable();
                let known = self.partitions.iter().filter(|row| row.2 == shard);
                assert!(rows.iter().copied().eq(known.map(|row| (row.0, PartitionId(row.1)))));
                counts.insert(shard, rows.len() as u64);
                for extent in &topic.extents {
                    let firsts = runs.iter().map(|run| run.first_number);
                    let end = extent.first_number + extent.count;
                    let firsts = firsts.filter(|it| (extent.first_number..end).contains(it));
                    assert!(firsts.is_sorted(), "{runs:?}");
                }
            }
            counts.retain(|_, count| *count > 0);
            assert_eq!(topic.shard_counts(), counts);
            let mut restored = TopicInfo { partition_count: 0, extents: vec![], ..topic.clone() };
            for extent in &topic.extents {
                assert!(extent.shards.len() <= ROWS_PER_ENTRY_MAX);
                restored.extend(extent.first_id, extent.count, extent.shards.clone());
            }
            assert_eq!(restored, *topic, "a checkpoint restores the extents");
        }
    }

    fn random_list(rng: &mut StdRng) -> Vec<u64> {
        let mut list: Vec<u64> = (1..=rng.random_range(1..6)).collect();
        let turn = rng.random_range(0..list.len());
        list.rotate_left(turn);
        list
    }

    #[test]
    fn splits_move_the_partitions_of_the_rule() {
        let mut rng = seeded("splits_move_the_partitions_of_the_rule");
        let mut moved = 0;
        for _ in 0..3_000 {
            let mut topic = Modelled::new(rng.random_range(1..40), random_list(&mut rng));
            for _ in 0..rng.random_range(1..14) {
                if topic.partitions.is_empty() || rng.random_bool(0.4) {
                    let list = match rng.random_bool(0.5) {
                        true => random_list(&mut rng),
                        false => Vec::new(),
                    };
                    let skipped = rng.random_range(0..3);
                    topic.extend(skipped, rng.random_range(1..30), list);
                } else {
                    let parent = rng.random_range(1..9);
                    let target = parent % 9 + rng.random_range(1..4);
                    if parent == target {
                        continue;
                    }
                    let parts = rng.random_range(2..7);
                    let ids_below = rng.random_range(0..topic.next_id + 5);
                    moved += topic.split(parent, target, parts, ids_below);
                }
                topic.check();
            }
        }
        assert!(moved > 3_000, "{moved}");
    }

    #[test]
    fn split_list_is_as_short_as_its_period() {
        let mut topic = Modelled::new(4, vec![1, 2, 3]);
        topic.extend(0, 900, Vec::new());
        topic.split(1, 4, 4, 901);
        topic.split(1, 5, 3, 901);
        topic.split(1, 6, 2, 901);
        topic.check();
        let [extent] = &topic.topic.extents[..] else { panic!("{:?}", topic.topic.extents) };
        assert_eq!(extent.shards.len(), 12, "{:?}", extent.shards);
        assert_eq!(topic.topic.shard_counts()[&6], 75);
        let before = topic.topic.clone();
        topic.split(9, 10, 2, 901);
        topic.split(1, 10, 2, 1);
        assert_eq!(topic.topic, before, "none of the partitions moves");
    }

    #[test]
    fn long_lists_divide_an_extent() {
        let mut topic = Modelled::new(6, vec![1]);
        topic.extend(0, 30_000, Vec::new());
        for (target, parts) in [(2, 17), (3, 19), (4, 23)] {
            topic.split(1, target, parts, 20_001);
        }
        topic.check();
        assert_eq!(topic.topic.extents.len(), 15, "the partitions from 20000 on stay together");
    }
}
