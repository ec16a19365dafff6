//! Splits case by case, and over random sequences of commands.

use std::collections::BTreeSet;

use rand::RngExt;
use rand::seq::IteratorRandom;
use tokio::time::Instant;

use super::super::split_driver::next_split;
use super::super::split_tries::SplitTries;
use super::super::state::ClusterLimits;
use super::*;
use crate::log::testing::seeded;
use crate::log::{
    AddShards, ClusterCommand, CreateTopic, Head, MemberCommand, PartitionSettings, RemoveMember,
    TakePlacement, Verdict,
};
use crate::protocol;
use crate::raft::replica_id;

struct Cluster {
    state: ClusterState,
    index: u64,
    reachable: BTreeSet<u64>,
}

impl Cluster {
    /// Returns a cluster with a replica of each shard on each node.
    fn of(nodes: u64, shards: u64) -> Self {
        let state = ClusterState::new(ClusterLimits::default());
        let mut cluster = Self { state, index: 0, reachable: (1..=nodes).collect() };
        let shards: Vec<u64> = (1..=shards).collect();
        cluster.apply(ClusterCommand::RegisterShards { shards: shards.clone() });
        cluster.apply(ClusterCommand::RaiseProtocol { version: protocol::SHARD_SPLITS });
        let ids = (1..=nodes).map(|node| replica_id(node, 1)).collect();
        cluster.member(MemberCommand::TakePlacement(TakePlacement { replicas: ids, shards }));
        cluster.member(MemberCommand::SetReplicas(3));
        cluster
    }

    fn apply(&mut self, command: ClusterCommand) -> ClusterReply {
        self.index += 1;
        let Verdict::Cluster(reply) = self.state.apply(self.index, &Head::Cluster(command)) else {
            panic!("not a reply of the cluster");
        };
        let decoded = ClusterState::decode(&self.state.encode()).unwrap();
        assert_eq!(decoded, self.state, "survives encoding");
        reply
    }

    fn member(&mut self, command: MemberCommand) {
        assert_eq!(self.apply(ClusterCommand::Members(command)), ClusterReply::Done);
    }

    fn add_shards(&mut self, total: u32) {
        let placement = self.state.members().placement().unwrap();
        let current = u32::try_from(placement.shards().count() - 1).unwrap();
        let add = AddShards { current, total, split: true, replicas: 0 };
        self.member(MemberCommand::AddShards(add));
    }

    fn create_topic(&mut self, name: &str, partition_count: u32) {
        let created = self.apply(ClusterCommand::CreateTopic(CreateTopic {
            name: name.to_owned(),
            partition_count,
            replication_factor: 3,
            settings: PartitionSettings {
                max_batch_bytes: 1,
                max_record_bytes: 1,
                default_durability: 1,
                min_durability: 1,
                ..PartitionSettings::default()
            },
            shards: self.state.shards().iter().copied().collect(),
            requested_at_us: 1,
        }));
        assert!(matches!(created, ClusterReply::Topic(_)), "{created:?}");
    }

    /// Carries out the next planned command. Returns whether there was one.
    fn plan(&mut self) -> bool {
        let next = next_split(&self.state, &self.reachable, |_| true);
        if let Some(command) = next.clone() {
            self.member(command);
        }
        next.is_some()
    }

    fn split(&self) -> Option<(u64, PlacedSplit)> {
        let mut splits = self.state.members().placement().unwrap().splits();
        splits.find(|it| it.1.is_planned()).map(|(id, split)| (id, split.clone()))
    }

    fn progress(&mut self, node_id: u64, step: SplitStep) {
        let (shard_id, split) = self.split().unwrap();
        let (id, step) = (split.id, step as u32);
        self.member(MemberCommand::SplitProgress(SplitProgress { shard_id, id, node_id, step }));
    }

    fn build(&mut self) {
        let (_, split) = self.split().unwrap();
        for node in split.replicas.into_keys() {
            self.progress(node, SplitStep::Built);
        }
    }

    fn counts(&self, topic: &str) -> Vec<u64> {
        self.state.topic(topic).unwrap().shard_counts().into_values().collect()
    }
}

#[test]
fn one_shard_becomes_twelve_with_a_partition_each() {
    let mut cluster = Cluster::of(3, 1);
    cluster.create_topic("orders", 12);
    cluster.add_shards(12);
    while cluster.plan() {
        let (target, split) = cluster.split().unwrap();
        assert_eq!(split.parent, 1);
        assert!(!cluster.state.shards().contains(&target), "it takes no partitions yet");
        cluster.build();
        assert!(cluster.state.shards().contains(&target));
    }
    assert_eq!(cluster.counts("orders"), [1; 12]);
    assert_eq!(cluster.state.shards().len(), 12);
    assert_eq!((1..=12).map(|shard| cluster.state.partitions_in(shard)).sum::<u64>(), 12);
}

#[test]
fn each_split_takes_partitions_from_the_fullest_shard() {
    let mut cluster = Cluster::of(6, 3);
    cluster.create_topic("orders", 12);
    cluster.add_shards(6);
    let mut parents = BTreeSet::new();
    while cluster.plan() {
        parents.insert(cluster.split().unwrap().1.parent);
        cluster.build();
    }
    assert_eq!(parents, BTreeSet::from([1, 2, 3]));
    assert_eq!(cluster.counts("orders"), [2; 6]);
    let placement = cluster.state.members().placement().unwrap();
    let new = placement.shards().filter(|it| it.0 > 3).map(|it| it.1.replicas.len());
    assert!(new.eq([3, 3, 3]));
}

#[test]
fn shard_without_partitions_to_take_begins_empty() {
    let mut cluster = Cluster::of(3, 1);
    cluster.create_topic("orders", 1);
    cluster.add_shards(2);
    assert!(cluster.plan());
    assert!(cluster.split().is_none());
    let placement = cluster.state.members().placement().unwrap();
    assert_eq!(placement.splits().count(), 0);
    assert!(!cluster.plan());
}

#[test]
fn only_the_last_replica_ends_a_split() {
    let mut cluster = Cluster::of(3, 1);
    cluster.create_topic("orders", 4);
    cluster.add_shards(2);
    assert!(cluster.plan());
    for step in [SplitStep::Created, SplitStep::Ready] {
        for node in 1..=3 {
            cluster.progress(node, step);
        }
        assert!(cluster.split().unwrap().1.has_reached(step));
    }
    cluster.progress(1, SplitStep::Built);
    cluster.progress(1, SplitStep::Created);
    cluster.progress(2, SplitStep::Built);
    assert_eq!(cluster.counts("orders"), [4]);
    assert!(!cluster.plan(), "one at a time");
    cluster.progress(3, SplitStep::Built);
    assert_eq!(cluster.counts("orders"), [2, 2]);
}

#[test]
fn cancelled_split_moves_nothing_and_is_planned_again() {
    let mut cluster = Cluster::of(4, 1);
    cluster.create_topic("orders", 4);
    cluster.add_shards(2);
    assert!(cluster.plan());
    let (shard_id, first) = cluster.split().unwrap();
    let gone = *first.replicas.keys().next().unwrap();
    for node in first.replicas.keys().filter(|node| **node != gone) {
        cluster.progress(*node, SplitStep::Built);
    }
    cluster.apply(ClusterCommand::Members(MemberCommand::Remove(RemoveMember { node_id: gone })));
    assert!(cluster.plan());
    assert!(cluster.split().unwrap().1.is_cancelled);
    cluster.progress(gone, SplitStep::Built);
    assert_eq!(cluster.counts("orders"), [4], "cancelled first");
    assert!(!cluster.plan(), "the parent has not opened its partitions");
    cluster.member(MemberCommand::EndSplit(EndSplit { shard_id, id: first.id }));
    assert!(cluster.plan());
    let (again, second) = cluster.split().unwrap();
    assert_eq!(again, shard_id);
    let generations = |split: &PlacedSplit| split.generations();
    for (node, generation) in generations(&second) {
        assert_ne!(generations(&first).get(&node), Some(&generation), "never used twice");
    }
    assert!(!second.replicas.contains_key(&gone));
    cluster.build();
    assert_eq!(cluster.counts("orders"), [2, 2]);
}

#[tokio::test(start_paused = true)]
async fn split_that_hangs_is_tried_ever_more_rarely() {
    let mut cluster = Cluster::of(3, 1);
    cluster.create_topic("orders", 4);
    cluster.add_shards(2);
    let (mut tries, mut now) = (SplitTries::default(), Instant::now());
    let mut pauses = Vec::new();
    for _ in 0..12 {
        assert!(cluster.plan());
        let (shard_id, split) = cluster.split().unwrap();
        tries.observe(cluster.state.members().placement().unwrap(), now);
        let cancel = CancelSplit { shard_id, id: split.id, gives_up: false };
        cluster.member(MemberCommand::CancelSplit(cancel));
        cluster.member(MemberCommand::EndSplit(EndSplit { shard_id, id: split.id }));
        tries.observe(cluster.state.members().placement().unwrap(), now);
        let pause = tries.pause(shard_id, now).unwrap();
        pauses.push(pause.as_secs());
        assert_eq!(next_split(&cluster.state, &cluster.reachable, |id| id != shard_id), None);
        now += pause;
        assert_eq!(tries.pause(shard_id, now), None);
    }
    assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]);
    assert!(cluster.plan());
    cluster.build();
    tries.observe(cluster.state.members().placement().unwrap(), now);
    assert_eq!(tries.pause(2, now), None, "its tries are forgotten");
}

#[test]
fn operator_gives_up_a_split() {
    let mut cluster = Cluster::of(3, 1);
    cluster.create_topic("orders", 4);
    cluster.add_shards(3);
    assert!(cluster.plan());
    let (shard_id, split) = cluster.split().unwrap();
    let cancel = |shard_id, id| CancelSplit { shard_id, id, gives_up: true };
    cluster.member(MemberCommand::CancelSplit(cancel(3, 0)));
    cluster.member(MemberCommand::CancelSplit(cancel(shard_id, split.id)));
    cluster.member(MemberCommand::EndSplit(EndSplit { shard_id, id: split.id }));
    assert!(!cluster.plan());
    let placement = cluster.state.members().placement().unwrap();
    assert!(placement.shards().map(|it| it.0).eq([0, 1]));
}

/// Whatever the order of the commands, a partition is in one shard, and in that of the model.
#[test]
fn random_splits_keep_each_partition_in_one_shard() {
    let mut rng = seeded("random_splits_keep_each_partition_in_one_shard");
    for _ in 0..60 {
        let mut cluster = Cluster::of(rng.random_range(3..7), rng.random_range(1..4));
        let (mut topics, mut shards) = (0, 3);
        for _ in 0..60 {
            match rng.random_range(0..8) {
                0 => {
                    topics += 1;
                    cluster.create_topic(&format!("t{topics}"), rng.random_range(1..9));
                }
                1 if topics > 0 => {
                    let name = format!("t{}", rng.random_range(1..=topics));
                    let partition_count = cluster.state.topic(&name).unwrap().partition_count
                        + rng.random_range(1..5);
                    let topic_id = 0;
                    cluster.apply(ClusterCommand::AddPartitions {
                        name,
                        topic_id,
                        partition_count,
                    });
                }
                2 if shards < 12 => {
                    shards = cluster.state.members().placement().unwrap().shards().count() + 1;
                    cluster.add_shards(u32::try_from(shards - 1).unwrap());
                }
                3 | 4 => drop(cluster.plan()),
                _ => {
                    let Some((shard_id, split)) = cluster.split() else { continue };
                    let end = EndSplit { shard_id, id: split.id };
                    if split.is_cancelled {
                        cluster.member(MemberCommand::EndSplit(end));
                        continue;
                    }
                    if rng.random_bool(0.1) {
                        let (id, gives_up) = (split.id, rng.random_bool(0.5));
                        let cancel = CancelSplit { shard_id, id, gives_up };
                        cluster.member(MemberCommand::CancelSplit(cancel));
                        continue;
                    }
                    let before: Vec<_> = cluster.state.all_topics().cloned().collect();
                    let node = *split.replicas.keys().choose(&mut rng).unwrap();
                    cluster.progress(node, SplitStep::Built);
                    let has_ended = cluster.split().is_none();
                    for topic in before {
                        let after = cluster.state.topic_by_id(topic.id).unwrap();
                        let mut position = 0;
                        for (was, is) in topic.locations().zip(after.locations()) {
                            let is_old = was.partition.0 < split.rule.ids_below;
                            let in_parent = is_old && was.shard_id == split.parent;
                            let moves = in_parent && split.rule.moves(topic.id, position);
                            position += u64::from(in_parent);
                            let expected = if moves && has_ended { shard_id } else { was.shard_id };
                            assert_eq!((is.partition, is.shard_id), (was.partition, expected));
                        }
                    }
                }
            }
        }
    }
}
