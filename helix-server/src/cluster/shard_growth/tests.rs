//! New shards case by case, and the shards of new partitions over random logs.

use std::collections::{BTreeMap, BTreeSet};

use rand::RngExt;
use rand::seq::IteratorRandom;

use super::*;
use crate::cluster::planner::{PlanStep, plan};
use crate::cluster::state::ClusterLimits;
use crate::log::testing::seeded;
use crate::log::{
    CancelMove, ClusterCommand, CreateTopic, FinishMove, Head, Joined, MemberCommand,
    PartitionSettings, RemoveMember, ReplaceMember, ReplicaCreated, TakePlacement, Verdict,
};
use crate::raft::replica_id;

struct Cluster {
    state: ClusterState,
    index: u64,
    reachable: BTreeSet<u64>,
}

impl Cluster {
    /// Returns a cluster whose nodes have a replica of each shard, and that wants `replicas`.
    fn of(nodes: u64, shards: u64, replicas: u32) -> Self {
        let state = ClusterState::new(ClusterLimits::default());
        let mut cluster = Self { state, index: 0, reachable: (1..=nodes).collect() };
        let shards: Vec<u64> = (1..=shards).collect();
        cluster.done(ClusterCommand::RegisterShards { shards: shards.clone() });
        cluster.done(ClusterCommand::RaiseProtocol { version: protocol::MORE_SHARDS });
        let ids = (1..=nodes).map(|node| replica_id(node, 1)).collect();
        cluster.member(MemberCommand::TakePlacement(TakePlacement { replicas: ids, shards }));
        cluster.member(MemberCommand::SetReplicas(replicas));
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

    fn done(&mut self, command: ClusterCommand) {
        assert_eq!(self.apply(command), ClusterReply::Done);
    }

    fn member(&mut self, command: MemberCommand) {
        self.done(ClusterCommand::Members(command));
    }

    fn add_shards(&mut self, current: u32, total: u32) -> ClusterReply {
        let add = AddShards { current, total, ..AddShards::default() };
        self.apply(ClusterCommand::Members(MemberCommand::AddShards(add)))
    }

    /// Adds shards with their own number of replicas.
    fn add_shards_with(&mut self, current: u32, total: u32, replicas: u32) -> ClusterReply {
        let add = AddShards { current, total, replicas, split: false };
        self.apply(ClusterCommand::Members(MemberCommand::AddShards(add)))
    }

    fn shard(&self, shard_id: u64) -> PlacedShard {
        self.state.members().placement().unwrap().shard(shard_id).unwrap().clone()
    }

    /// Starts the next planned step. Returns whether there was one.
    fn step(&mut self) -> bool {
        let steps = plan(self.state.members(), &self.reachable, &BTreeSet::new()).steps;
        let Some(step) = steps.into_iter().next() else { return false };
        let version = self.state.version();
        let command = match step {
            PlanStep::Move(_) => step.command(version),
            PlanStep::Cancel { shard_id, id } => {
                MemberCommand::CancelMove(CancelMove { shard_id, id })
            }
        };
        self.member(command);
        true
    }

    /// Replaces a node that lost its directory.
    fn lose(&mut self, node_id: u64) {
        let replace = ReplaceMember {
            lost_node_id: node_id,
            node_id,
            peer_addr: String::new(),
            emptied: false,
        };
        let reply = self.apply(ClusterCommand::Members(MemberCommand::Replace(replace)));
        let ClusterReply::MemberChange(change) = reply else { panic!("{reply:?}") };
        let generation = self.state.members().get(node_id).unwrap().joining.unwrap();
        self.member(MemberCommand::Joined(Joined { node_id, generation }));
        self.member(MemberCommand::Finish(change.id));
    }

    fn create(&mut self, shard_id: u64) {
        let moving = self.shard(shard_id).moving.unwrap();
        let (node_id, generation) = (moving.to.unwrap(), moving.generation);
        let created = ReplicaCreated { shard_id, node_id, generation };
        self.member(MemberCommand::ReplicaCreated(created));
    }

    fn finish(&mut self, shard_id: u64) {
        let moving = self.shard(shard_id).moving.unwrap();
        let finish = FinishMove { shard_id, id: moving.id, cancelled: moving.is_cancelled };
        self.member(MemberCommand::FinishMove(finish));
    }

    /// Plans and carries out moves until none is left.
    fn settle(&mut self) {
        for _ in 0..1_000 {
            let moving: Vec<u64> =
                self.state.members().placement().unwrap().moves().map(|it| it.0).collect();
            if moving.is_empty() && !self.step() {
                return;
            }
            for shard_id in moving {
                let moving = self.shard(shard_id).moving.unwrap();
                if moving.to.is_some() && !moving.is_created {
                    self.create(shard_id);
                }
                self.finish(shard_id);
            }
        }
        panic!("the moves never end");
    }

    fn create_topic(&mut self, name: &str, partition_count: u32) {
        let shards = self.state.shards_with(0).collect();
        let created = self.create_in(name, partition_count, shards);
        assert!(matches!(created, ClusterReply::Topic(_)), "{created:?}");
    }

    fn create_in(&mut self, name: &str, partition_count: u32, shards: Vec<u64>) -> ClusterReply {
        self.apply(ClusterCommand::CreateTopic(CreateTopic {
            name: name.to_owned(),
            partition_count,
            replication_factor: 1,
            settings: PartitionSettings {
                max_batch_bytes: 1,
                max_record_bytes: 1,
                default_durability: 1,
                min_durability: 1,
                ..PartitionSettings::default()
            },
            shards,
            requested_at_us: 1,
        }))
    }

    fn add_partitions(&mut self, name: &str, partition_count: u32) {
        let (name, topic_id) = (name.to_owned(), 0);
        let added = self.apply(ClusterCommand::AddPartitions { name, topic_id, partition_count });
        assert!(matches!(added, ClusterReply::Topic(_)), "{added:?}");
    }

    fn counts(&self, name: &str) -> BTreeMap<u64, u64> {
        self.state.topic(name).unwrap().shard_counts()
    }
}

#[test]
fn added_shard_takes_partitions_once_it_has_its_replicas() {
    let mut cluster = Cluster::of(4, 2, 3);
    cluster.settle();
    assert_eq!(cluster.add_shards(2, 4), ClusterReply::Done);
    assert!(cluster.state.shards().iter().eq(&[1, 2]));
    assert!(cluster.shard(3).replicas.is_empty() && cluster.shard(3).target().is_empty());
    while cluster.step() {}
    let moving = cluster.shard(3).moving.unwrap();
    assert_eq!((moving.from, moving.is_created), (None, false));
    assert!(cluster.shard(3).target().is_empty(), "nothing forms it before its log exists");
    cluster.create(3);
    let first = replica_id(moving.to.unwrap(), moving.generation);
    assert_eq!(cluster.shard(3).target(), [first].into());
    cluster.finish(3);
    assert_eq!(cluster.shard(3).replicas.len(), 1);
    assert!(!cluster.state.shards().contains(&3), "one replica of three");
    cluster.settle();
    assert!(cluster.state.shards().iter().eq(&[1, 2, 3, 4]));
    let placement = cluster.state.members().placement().unwrap();
    let mut load: BTreeMap<u64, usize> = BTreeMap::new();
    for (_, shard) in placement.shards().filter(|it| it.0 != 0) {
        assert_eq!(shard.replicas.len(), 3);
        shard.replicas.keys().for_each(|node| *load.entry(*node).or_default() += 1);
    }
    assert!(load.values().all(|count| *count == 3), "{load:?}");
}

#[test]
fn shard_opens_with_as_many_replicas_as_there_are_nodes() {
    let mut cluster = Cluster::of(1, 1, 5);
    assert_eq!(cluster.add_shards(1, 3), ClusterReply::Done);
    cluster.settle();
    assert!(cluster.state.shards().iter().eq(&[1, 2, 3]));
}

#[test]
fn refuses_wrong_numbers_of_shards() {
    let mut cluster = Cluster::of(3, 2, 3);
    let version = cluster.state.version();
    assert_eq!(cluster.add_shards(7, 2), ClusterReply::Done, "as many as there are");
    let refused = |reply: ClusterReply| match reply {
        ClusterReply::Invalid { field, what } => format!("{field}: {what}"),
        ClusterReply::ChangeInProgress { what } => what,
        other => panic!("{other:?}"),
    };
    let limit = "total: 65 is above the limit of 64 data shards";
    assert_eq!(refused(cluster.add_shards(2, 65)), limit);
    assert_eq!(
        refused(cluster.add_shards(2, 1)),
        "total: 1 is less than the current 2; shards stay permanently"
    );
    assert_eq!(cluster.state.version(), version, "nothing changed");
    // Two operators saw two shards; each adds some.
    assert_eq!(cluster.add_shards(2, 4), ClusterReply::Done);
    let meanwhile = "the cluster has 4 data shards, not 2: shards were added since";
    assert_eq!(refused(cluster.add_shards(2, 6)), meanwhile);
    assert_eq!(cluster.add_shards(2, 4), ClusterReply::Done, "a repeated request");
    assert_eq!(cluster.state.members().placement().unwrap().shards().count(), 5);
}

#[test]
fn shards_with_their_own_number_take_topics_that_ask_for_it() {
    let mut cluster = Cluster::of(5, 1, 5);
    assert_eq!(cluster.add_shards_with(1, 3, 3), ClusterReply::Done);
    cluster.settle();
    let replicas = |cluster: &Cluster| [1, 2, 3].map(|id| cluster.shard(id).replicas.len());
    assert_eq!(replicas(&cluster), [5, 3, 3]);
    cluster.create_topic("plain", 4);
    assert_eq!(cluster.counts("plain"), [(1, 4)].into());
    let created = cluster.create_in("three", 4, vec![2, 3]);
    assert!(matches!(created, ClusterReply::Topic(_)), "{created:?}");
    cluster.add_partitions("three", 8);
    cluster.add_partitions("plain", 8);
    assert_eq!(cluster.counts("three"), [(2, 4), (3, 4)].into());
    assert_eq!(cluster.counts("plain"), [(1, 8)].into());

    let mixed = cluster.create_in("mixed", 4, vec![1, 2]);
    assert!(matches!(mixed, ClusterReply::Invalid { field: "shards", .. }), "{mixed:?}");
    let again = cluster.create_in("three", 8, vec![2, 3]);
    assert!(matches!(again, ClusterReply::AlreadyExistsEqual(_)), "{again:?}");
    let ClusterReply::AlreadyExistsDifferent { difference, .. } =
        cluster.create_in("plain", 8, vec![2, 3])
    else {
        panic!("a topic has one number");
    };
    assert!(difference.contains(", not 3"), "{difference}");

    // The cluster's number changes only the shards that follow it.
    cluster.member(MemberCommand::SetReplicas(1));
    cluster.settle();
    assert_eq!(replicas(&cluster), [1, 3, 3]);
    let refused = |reply| matches!(reply, ClusterReply::Invalid { field: "replicas", .. });
    assert!(refused(cluster.add_shards_with(3, 4, 2)));
    let mut small = Cluster::of(4, 1, 3);
    assert!(refused(small.add_shards_with(1, 2, 5)), "four nodes");
}

#[test]
fn given_up_shard_keeps_its_number_of_replicas() {
    let mut cluster = Cluster::of(5, 1, 5);
    assert_eq!(cluster.add_shards_with(1, 2, 3), ClusterReply::Done);
    assert!(cluster.step());
    cluster.create(2);
    let id = cluster.shard(2).moving.unwrap().id;
    cluster.member(MemberCommand::CancelMove(CancelMove { shard_id: 2, id }));
    cluster.settle();
    assert_eq!(cluster.shard(3).replicas.len(), 3);
}

#[test]
fn first_replica_that_is_given_up_is_no_longer_named() {
    let mut cluster = Cluster::of(3, 1, 3);
    assert_eq!(cluster.add_shards(1, 2), ClusterReply::Done);
    assert!(cluster.step());
    cluster.create(2);
    let moving = cluster.shard(2).moving.unwrap();
    let (node, generation) = (moving.to.unwrap(), moving.generation);
    assert!(cluster.state.members().names_replica(2, node, generation));
    cluster.member(MemberCommand::CancelMove(CancelMove { shard_id: 2, id: moving.id }));
    let has = |cluster: &Cluster, shard_id| {
        cluster.state.members().placement().unwrap().shard(shard_id).is_some()
    };
    assert!(!has(&cluster, 2), "its leader's terms must not be those of another shard");
    assert_eq!(cluster.shard(3), PlacedShard::default());
    assert!(!cluster.state.members().names_replica(2, node, generation));
    assert!(cluster.state.members().is_removed(2, node, generation));
    assert!(!cluster.state.members().is_removed(2, node, generation + 1), "not known yet");
    // Its node had formed the shard alone, and reports so too late.
    let finish = FinishMove { shard_id: 2, id: moving.id, cancelled: false };
    cluster.member(MemberCommand::FinishMove(finish));
    cluster.settle();
    assert!(!has(&cluster, 2) && cluster.state.shards().iter().eq(&[1, 3]));
}

/// Returns a cluster whose shard 2 is new and has this many replicas of five.
fn with_new_shard(nodes: u64, replicas: usize) -> Cluster {
    let mut cluster = Cluster::of(nodes, 1, 5);
    cluster.done(ClusterCommand::RaiseProtocol { version: protocol::LOST_NEW_SHARDS });
    assert_eq!(cluster.add_shards(1, 2), ClusterReply::Done);
    while cluster.shard(2).replicas.len() < replicas {
        assert!(cluster.step());
        cluster.create(2);
        cluster.finish(2);
    }
    cluster
}

fn nodes_of(cluster: &Cluster, shard_id: u64) -> Vec<u64> {
    cluster.shard(shard_id).replicas.into_keys().collect()
}

fn has_shard(cluster: &Cluster, shard_id: u64) -> bool {
    cluster.state.members().placement().unwrap().shard(shard_id).is_some()
}

#[test]
fn new_shard_is_given_up_once_it_has_lost_its_majority() {
    for (replicas, lost, is_given_up) in
        [(1, 1, true), (2, 1, true), (3, 1, false), (3, 2, true), (4, 1, false), (4, 2, true)]
    {
        let mut cluster = with_new_shard(5, replicas);
        for node in nodes_of(&cluster, 2).into_iter().take(lost) {
            cluster.lose(node);
        }
        let what = format!("{lost} of {replicas} replicas lost");
        assert_eq!(!has_shard(&cluster, 2), is_given_up, "{what}");
        cluster.settle();
        let id = if is_given_up { 3 } else { 2 };
        assert!(cluster.state.shards().iter().eq(&[1, id]), "{what}");
        assert_eq!(cluster.shard(id).replicas.len(), 5, "{what}");
        assert!(!is_given_up || cluster.state.members().is_removed(2, 1, 1), "{what}");
    }
}

#[test]
fn new_shard_that_grows_is_given_up_if_either_replica_is_lost() {
    for (is_target, is_cancelled) in [(false, false), (true, false), (true, true)] {
        let mut cluster = with_new_shard(5, 1);
        assert!(cluster.step());
        cluster.create(2);
        let moving = cluster.shard(2).moving.unwrap();
        if is_cancelled {
            let cancel = CancelMove { shard_id: 2, id: moving.id };
            cluster.member(MemberCommand::CancelMove(cancel));
        }
        let node = if is_target { moving.to.unwrap() } else { nodes_of(&cluster, 2)[0] };
        // Both may vote, and neither can elect a leader alone.
        cluster.lose(node);
        assert!(!has_shard(&cluster, 2), "target {is_target}, cancelled {is_cancelled}");
        let finish = FinishMove { shard_id: 2, id: moving.id, cancelled: is_cancelled };
        cluster.member(MemberCommand::FinishMove(finish));
        cluster.settle();
        assert!(cluster.state.shards().iter().eq(&[1, 3]));
    }
}

#[test]
fn new_shard_is_given_up_if_its_only_node_leaves() {
    for nodes in [2, 5] {
        let mut cluster = with_new_shard(nodes, 1);
        let node_id = nodes_of(&cluster, 2)[0];
        let remove = MemberCommand::Remove(RemoveMember { node_id });
        let removed = cluster.apply(ClusterCommand::Members(remove));
        assert!(matches!(removed, ClusterReply::MemberChange(_)), "{removed:?}");
        assert!(!has_shard(&cluster, 2), "of {nodes} nodes");
        cluster.settle();
        assert!(!cluster.state.members().has_data(node_id));
        assert!(cluster.state.shards().iter().eq(&[1, 3]));
    }
}

#[test]
fn new_shard_does_not_open_while_a_node_is_being_replaced() {
    let mut cluster = with_new_shard(3, 2);
    let lost_node_id = nodes_of(&cluster, 2)[0];
    let (node_id, peer_addr) = (lost_node_id, String::new());
    let replace = ReplaceMember { lost_node_id, node_id, peer_addr, emptied: false };
    let reply = cluster.apply(ClusterCommand::Members(MemberCommand::Replace(replace)));
    assert!(matches!(reply, ClusterReply::MemberChange(_)), "{reply:?}");
    // Two nodes may get a replica now, and two have one, of which one is lost.
    assert_eq!(cluster.state.members().holders(), 2);
    assert!(cluster.state.shards().iter().eq(&[1]));
    let generation = cluster.state.members().get(node_id).unwrap().joining.unwrap();
    cluster.member(MemberCommand::Joined(Joined { node_id, generation }));
    cluster.settle();
    assert!(cluster.state.shards().iter().eq(&[1, 3]));
    assert_eq!(cluster.shard(3).replicas.len(), 3);
}

#[test]
fn shards_that_lost_a_majority_stay_if_they_take_partitions() {
    let mut cluster = with_new_shard(5, 1);
    cluster.settle();
    for node in 1..=4 {
        cluster.lose(node);
    }
    assert!(cluster.state.shards().iter().eq(&[1, 2]) && has_shard(&cluster, 2));
}

#[test]
fn lost_new_shard_stays_under_an_older_protocol() {
    let mut cluster = with_new_shard(5, 1);
    cluster.state.protocol = protocol::MORE_SHARDS;
    let node = nodes_of(&cluster, 2)[0];
    cluster.lose(node);
    assert!(has_shard(&cluster, 2));
}

#[test]
fn new_partitions_go_to_the_shards_with_the_fewest() {
    let mut cluster = Cluster::of(3, 3, 3);
    cluster.create_topic("old", 12);
    cluster.add_shards(3, 6);
    cluster.settle();
    cluster.create_topic("one", 1);
    cluster.create_topic("two", 2);
    let of_new = |counts: BTreeMap<u64, u64>| counts.keys().all(|shard| *shard > 3);
    assert!(of_new(cluster.counts("one")) && of_new(cluster.counts("two")));
    assert_eq!(
        cluster.state.shard_partitions,
        [(1, 4), (2, 4), (3, 4), (4, 1), (5, 1), (6, 1)].into()
    );
    cluster.create_topic("wide", 12);
    assert!(cluster.counts("wide").values().eq(&[2, 2, 2, 2, 2, 2]), "a topic is spread evenly");
    // The old topic grows where it has the fewest.
    cluster.add_partitions("old", 14);
    assert_eq!(cluster.counts("old").len(), 5);
    cluster.add_partitions("old", 27);
    let counts = cluster.counts("old");
    assert!(
        counts.values().all(|count| (4..=5).contains(count)) && counts.len() == 6,
        "{counts:?}"
    );
    cluster.apply(ClusterCommand::DeleteTopic { name: "old".to_owned(), topic_id: 0 });
    assert_eq!(cluster.state.shard_partitions.values().sum::<u64>(), 15);
}

#[test]
fn partitions_are_placed_as_before_under_an_older_protocol() {
    let mut cluster = Cluster::of(3, 3, 3);
    cluster.state.protocol = protocol::PLACEMENT;
    cluster.create_topic("a", 1);
    cluster.create_topic("b", 4);
    assert_eq!(cluster.counts("a"), [(2, 1)].into());
    assert_eq!(cluster.counts("b"), [(1, 1), (2, 1), (3, 2)].into());
}

#[test]
fn random_growth_keeps_partitions_in_their_shards() {
    for seed in 0..300 {
        let mut rng = seeded(&format!("shard growth {seed}"));
        let nodes = rng.random_range(1..7);
        let mut cluster = Cluster::of(nodes, rng.random_range(1..4), 3);
        let mut known: BTreeMap<(String, u32), u64> = BTreeMap::new();
        let mut names: Vec<String> = Vec::new();
        for step in 0..25 {
            match rng.random_range(0..4) {
                0 => {
                    let shards = cluster.state.members().placement().unwrap().shards().count() - 1;
                    let shards = u32::try_from(shards).unwrap();
                    cluster.add_shards(shards, (shards + rng.random_range(1..4)).min(64));
                    if rng.random_bool(0.7) {
                        cluster.settle();
                    }
                }
                1 => {
                    let name = format!("t{step}");
                    cluster.create_topic(&name, rng.random_range(1..20));
                    names.push(name);
                }
                _ => {
                    let Some(name) = names.iter().choose(&mut rng) else { continue };
                    let count = cluster.state.topic(name).unwrap().partition_count;
                    cluster.add_partitions(name, count + rng.random_range(0..15));
                }
            }
            let mut sum = 0;
            for name in &names {
                let topic = cluster.state.topic(name).unwrap().clone();
                sum += u64::from(topic.partition_count);
                for (number, location) in (0..).zip(topic.locations()) {
                    let shard = *known.entry((name.clone(), number)).or_insert(location.shard_id);
                    assert_eq!(location.shard_id, shard, "a partition stays in its shard");
                    assert!(cluster.state.shards().contains(&shard), "only in open shards");
                    let runs = topic.runs(shard);
                    let mut rows = runs.iter().flat_map(|run| run.partitions());
                    assert!(rows.any(|row| row == (number, location.partition)));
                }
                let runs = topic.shards().into_iter().flat_map(|shard| topic.runs(shard));
                let rows: u64 = runs.map(|run| u64::from(run.count)).sum();
                assert_eq!(rows, u64::from(topic.partition_count), "each in one shard");
            }
            assert_eq!(cluster.state.shard_partitions.values().sum::<u64>(), sum);
        }
    }
}
