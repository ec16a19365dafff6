//! The planner on random clusters: it converges, undoes nothing, and explains what it cannot do.

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, IteratorRandom};
use rand::{RngExt, SeedableRng};

use super::*;
use crate::cluster::members::Member;
use crate::cluster::obstacle::removal_obstacle;
use crate::log::{FinishMove, ReplicaCreated, SetCordoned, SetRack, TakePlacement};
use crate::raft::replica_id;

/// A cluster whose moves are carried out at once.
#[derive(Debug, Clone)]
struct Cluster {
    members: Members,
    version: u64,
    reachable: BTreeSet<u64>,
    down: BTreeSet<u64>,
}

impl Cluster {
    fn of(nodes: u64, shards: u64, replicas: u32) -> Self {
        let ids = (1..=nodes.min(5)).map(|node| replica_id(node, 1)).collect();
        let mut cluster = Self {
            members: Members::default(),
            version: 0,
            reachable: (1..=nodes).collect(),
            down: BTreeSet::new(),
        };
        let take = TakePlacement { replicas: ids, shards: (1..=shards).collect() };
        cluster.apply(&MemberCommand::TakePlacement(take));
        for node in 6..=nodes {
            cluster.add(node);
        }
        cluster.apply(&MemberCommand::SetReplicas(replicas));
        cluster
    }

    fn add(&mut self, node_id: u64) {
        let member = Member {
            node_id,
            generation: 1,
            joining: None,
            peer_addr: String::new(),
            draining: false,
            leaving: false,
            cordoned: false,
            rack: String::new(),
        };
        self.members.members.insert(node_id, member);
        self.members.generations.insert(node_id, 1);
        self.reachable.insert(node_id);
    }

    fn apply(&mut self, command: &MemberCommand) {
        let applied = self.members.apply(self.version + 1, command);
        let update = applied.unwrap_or_else(|refused| panic!("{command:?}: {refused:?}"));
        self.version += u64::from(update.is_changed);
    }

    fn cordon(&mut self, node_id: u64) {
        let set = MemberCommand::SetCordoned(SetCordoned { node_id, cordoned: true });
        // The last node that may get replicas is not cordoned.
        let _ = self.members.apply(self.version + 1, &set);
    }

    fn set_racks(&mut self, rack_of: impl Fn(u64) -> String) {
        for node_id in self.members.iter().map(|it| it.node_id).collect::<Vec<_>>() {
            let rack = rack_of(node_id);
            self.apply(&MemberCommand::SetRack(SetRack { node_id, rack }));
        }
    }

    /// Sum of the squares of a shard's replicas in each rack: less is better.
    fn crowding<'a>(&self, nodes: impl IntoIterator<Item = &'a u64>) -> usize {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for node in nodes {
            let member = self.members.get(*node);
            *counts.entry(member.map_or("", |it| it.rack.as_str())).or_default() += 1;
        }
        counts.values().map(|count| count * count).sum()
    }

    fn silence(&mut self, node_id: u64, is_down: bool) {
        self.reachable.remove(&node_id);
        if is_down {
            self.down.insert(node_id);
        }
    }

    fn leave(&mut self, node_id: u64) {
        self.members.members.get_mut(&node_id).unwrap().leaving = true;
    }

    /// Makes all replicas of a node lost: it returned with an empty directory.
    fn lose(&mut self, node_id: u64) {
        let generation = self.members.next_generation(node_id).unwrap();
        self.members.members.get_mut(&node_id).unwrap().generation = generation;
        self.members.placement.as_mut().unwrap().renew_vote(node_id, generation);
    }

    fn placement(&self) -> &ReplicaPlacement {
        self.members.placement().unwrap()
    }

    /// Carries out the move of a shard, as its leader does.
    fn carry_out(&mut self, shard_id: u64) {
        let moving = self.placement().shard(shard_id).unwrap().moving.unwrap();
        if let (Some(node_id), false) = (moving.to, moving.is_created) {
            let generation = moving.generation;
            let created = ReplicaCreated { shard_id, node_id, generation };
            self.apply(&MemberCommand::ReplicaCreated(created));
        }
        let (id, cancelled) = (moving.id, moving.is_cancelled);
        self.apply(&MemberCommand::FinishMove(FinishMove { shard_id, id, cancelled }));
    }

    /// Runs the planner until it has nothing to do. Returns its moves.
    fn settle(&mut self, rng: &mut StdRng) -> (Vec<PlannedMove>, Plan) {
        let mut moves = Vec::new();
        let replicas: usize = self.placement().shards().map(|(_, it)| it.replicas.len()).sum();
        // Each replica moves once for what is wrong with it, once to another rack, once to spread.
        let bound = 3 * replicas + 5 * self.placement().shards().count() + 10;
        loop {
            let next = plan(&self.members, &self.reachable, &self.down);
            let running: Vec<u64> = self.placement().moves().map(|(id, _)| id).collect();
            assert!(running.len() + next.steps.len() <= MOVES_MAX, "{next:?}");
            for step in &next.steps {
                let PlanStep::Move(planned) = *step else { panic!("{step:?}") };
                self.check_move(planned);
                moves.push(planned);
                self.apply(&step.command(self.version));
            }
            assert!(moves.len() <= bound, "{} moves: {moves:?}", moves.len());
            let running: Vec<u64> = self.placement().moves().map(|(id, _)| id).collect();
            let Some(done) = running.choose(rng) else { return (moves, next) };
            self.carry_out(*done);
        }
    }

    /// Checks that a move leaves a majority of replicas that respond.
    fn check_move(&self, planned: PlannedMove) {
        let PlannedMove { shard_id, from, to, .. } = planned;
        let shard = self.placement().shard(shard_id).unwrap();
        let is_live = |node: &u64, generation: &u32| {
            self.reachable.contains(node) && !self.members.is_lost(*node, *generation)
        };
        let live = shard.replicas.iter().filter(|(node, it)| is_live(node, it)).count();
        assert!(live > shard.replicas.len() / 2, "{planned:?} {shard:?}");
        let rest: Vec<_> = shard.replicas.iter().filter(|(node, _)| from != Some(**node)).collect();
        let stay = rest.iter().filter(|(node, it)| is_live(node, it)).count();
        let new = usize::from(to.is_some());
        assert!(stay + new > (rest.len() + new) / 2, "{planned:?} {shard:?}");
        let after: BTreeSet<u64> = rest.iter().map(|(node, _)| **node).chain(to).collect();
        let (before, after) = (self.crowding(shard.replicas.keys()), self.crowding(&after));
        match planned.reason {
            MoveReason::Racks => assert!(after < before, "{planned:?} {shard:?}"),
            MoveReason::Spread => assert!(after <= before, "{planned:?} {shard:?}"),
            _ => {}
        }
        if let Some(to) = to {
            assert!(self.members.may_hold(to) && self.reachable.contains(&to), "{planned:?}");
        }
    }

    fn loads(&self) -> BTreeMap<u64, usize> {
        let mut loads: BTreeMap<u64, usize> =
            self.members.iter().map(|it| (it.node_id, 0)).collect();
        for (_, shard) in self.placement().shards().filter(|(id, _)| *id != 0) {
            for node in shard.replicas.keys() {
                *loads.get_mut(node).unwrap() += 1;
            }
        }
        loads
    }
}

/// No move takes a replica back to the node that another one of the same run took it from.
fn expect_nothing_undone(moves: &[PlannedMove]) {
    for (at, first) in moves.iter().enumerate() {
        let is_reverse = |later: &&PlannedMove| {
            later.shard_id == first.shard_id
                && first.from.is_some()
                && first.from != first.to
                && (later.to, later.from) == (first.from, first.to)
        };
        let undone = moves[at + 1..].iter().find(is_reverse);
        assert!(undone.is_none(), "{first:?} is undone by {undone:?}: {moves:?}");
    }
}

/// Expects each shard to have its replicas, or a reason.
fn expect_settled(cluster: &Cluster, last: &Plan) {
    for (shard_id, shard) in cluster.placement().shards() {
        let wanted = cluster.placement().wanted_replicas(shard) as usize;
        let wanted = if shard_id == 0 { 5 } else { wanted };
        let explained = last.stuck.iter().any(|it| it.shard_id == shard_id);
        let is_wrong = |(node, generation): (&u64, &u32)| {
            let is_leaving = cluster.members.get(*node).is_none_or(|it| it.leaving);
            let is_down = shard_id != 0 && cluster.down.contains(node);
            is_leaving || is_down || cluster.members.is_lost(*node, *generation)
        };
        let wrong = shard.replicas.iter().any(is_wrong) || shard.replicas.len() != wanted;
        assert!(!wrong || explained, "shard {shard_id}: {shard:?}, {last:?}, {cluster:?}");
    }
}

fn random_cluster(rng: &mut StdRng) -> Cluster {
    let (nodes, shards) = (rng.random_range(1..=12), rng.random_range(1..=24));
    let replicas = *[1, 3, 5].choose(rng).unwrap();
    let mut cluster = Cluster::of(nodes, shards, replicas);
    let placed = &mut cluster.members.placement.as_mut().unwrap().shards;
    for (_, shard) in placed.iter_mut().filter(|it| *it.0 != 0) {
        if rng.random_bool(0.3) {
            shard.replication_factor = *[1, 3, 5].choose(rng).unwrap();
        }
    }
    cluster
}

/// Returns this many seeds, times `HELIX_ROUNDS`; or only `HELIX_SEED`.
fn seeds(count: u64) -> std::ops::Range<u64> {
    let given = |name: &str| {
        let text = std::env::var(name).ok()?;
        Some(text.parse::<u64>().unwrap_or_else(|_| panic!("{name} is a number")))
    };
    match given("HELIX_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..count * given("HELIX_ROUNDS").unwrap_or(1),
    }
}

/// Prints the seed if the test fails.
struct SeedOnPanic(u64);

impl Drop for SeedOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("HELIX_SEED={}", self.0);
        }
    }
}

#[test]
fn random_clusters_converge_and_undo_nothing() {
    for seed in seeds(200) {
        let _context = SeedOnPanic(seed);
        let mut rng = StdRng::seed_from_u64(seed);
        let mut cluster = random_cluster(&mut rng);
        for _ in 0..rng.random_range(0..4) {
            let node = cluster.members.iter().map(|it| it.node_id).choose(&mut rng).unwrap();
            match rng.random_range(0..6) {
                0 => cluster.cordon(node),
                1 => cluster.lose(node),
                2 => cluster.leave(node),
                3 => cluster.silence(node, rng.random_bool(0.5)),
                4 => cluster.add(13 + rng.random_range(0..4)),
                _ => {
                    let replicas = *[1, 3, 5].choose(&mut rng).unwrap();
                    cluster.apply(&MemberCommand::SetReplicas(replicas));
                }
            }
            let (moves, last) = cluster.settle(&mut rng);
            expect_nothing_undone(&moves);
            expect_settled(&cluster, &last);
        }
    }
}

/// A change ends only after the lost replicas are gone, also if a move that began before the loss,
/// and only spreads replicas, takes the last of them away.
#[test]
fn a_move_that_spreads_a_lost_replica_is_needed() {
    let mut rng = StdRng::seed_from_u64(1);
    let mut cluster = Cluster::of(4, 1, 3);
    cluster.settle(&mut rng);
    let held: Vec<u64> = cluster.placement().shard(1).unwrap().replicas.keys().copied().collect();
    cluster.set_racks(|node| match held.iter().position(|it| *it == node) {
        Some(0 | 1) => "crowded".to_owned(),
        _ => format!("rack of {node}"),
    });
    assert!(needs_no_move(&cluster.members), "a move to another rack is not needed");
    let next = plan(&cluster.members, &cluster.reachable, &BTreeSet::new());
    let [step @ PlanStep::Move(planned)] = next.steps.as_slice() else { panic!("{next:?}") };
    assert_eq!((planned.shard_id, planned.reason), (1, MoveReason::Racks));
    cluster.apply(&step.command(cluster.version));
    assert!(needs_no_move(&cluster.members), "nor is it once it runs");
    cluster.lose(planned.from.unwrap());
    assert!(!needs_no_move(&cluster.members));
    cluster.settle(&mut rng);
    assert!(needs_no_move(&cluster.members), "{:?}", cluster.members);
}

#[test]
fn replica_counts_differ_by_one_at_most() {
    for seed in seeds(100) {
        let _context = SeedOnPanic(seed);
        let mut rng = StdRng::seed_from_u64(seed);
        let mut cluster = random_cluster(&mut rng);
        cluster.settle(&mut rng);
        let loads = cluster.loads();
        let (least, most) = (loads.values().min().unwrap(), loads.values().max().unwrap());
        assert!(most - least <= 1, "{loads:?}");
    }
}

/// Racks come before the numbers of replicas: no replica may be crowded without a reason.
#[test]
fn replicas_spread_over_racks() {
    let mut rack_moves = 0;
    for seed in seeds(300) {
        let _context = SeedOnPanic(seed);
        let mut rng = StdRng::seed_from_u64(seed);
        let mut cluster = random_cluster(&mut rng);
        if rng.random_bool(0.5) {
            // Racks that nodes state only once replicas are spread.
            cluster.settle(&mut rng);
        }
        let racks = rng.random_range(1..=4);
        let salt = rng.random_range(0..100);
        cluster.set_racks(|node| match (node * 7 + salt) % (racks + 1) {
            0 => String::new(),
            rack => format!("r{rack}"),
        });
        for _ in 0..rng.random_range(0..3) {
            let node = cluster.members.iter().map(|it| it.node_id).choose(&mut rng).unwrap();
            match rng.random_range(0..3) {
                0 => cluster.cordon(node),
                1 => cluster.leave(node),
                _ => drop(cluster.reachable.remove(&node)),
            }
        }
        let (moves, last) = cluster.settle(&mut rng);
        rack_moves += moves.iter().filter(|it| it.reason == MoveReason::Racks).count();
        expect_nothing_undone(&moves);
        expect_settled(&cluster, &last);
        for (shard_id, shard) in cluster.placement().shards() {
            let is_live = |(node, generation): (&u64, &u32)| {
                cluster.reachable.contains(node) && !cluster.members.is_lost(*node, *generation)
            };
            let is_explained = last.stuck.iter().any(|it| it.shard_id == shard_id);
            if is_explained || !shard.replicas.iter().all(is_live) {
                continue;
            }
            let now = cluster.crowding(shard.replicas.keys());
            for from in shard.replicas.keys() {
                let may_hold = |it: &&Member| {
                    cluster.members.may_hold(it.node_id)
                        && !shard.replicas.contains_key(&it.node_id)
                };
                for to in cluster.members.iter().filter(may_hold).map(|it| it.node_id) {
                    let kept = shard.replicas.keys().filter(|node| *node != from);
                    let after = cluster.crowding(kept.chain([&to]));
                    assert!(after >= now, "shard {shard_id}: {from} to {to}: {cluster:?}");
                }
            }
        }
    }
    assert!(rack_moves > 20, "{rack_moves}");
}

#[test]
fn crowded_rack_has_a_reason_and_blocks_no_change() {
    let mut cluster = Cluster::of(4, 1, 3);
    let mut rng = StdRng::seed_from_u64(1);
    cluster.settle(&mut rng);
    let holders: Vec<u64> =
        cluster.placement().shard(1).unwrap().replicas.keys().copied().collect();
    let free = (1..=4).find(|node| !holders.contains(node)).unwrap();
    cluster.set_racks(|node| if node == free { "b" } else { "a" }.to_owned());
    cluster.cordon(free);
    let last = plan(&cluster.members, &cluster.reachable, &cluster.down);
    let of_data: Vec<_> = last.stuck.iter().filter(|it| it.shard_id == 1).collect();
    let [stuck] = of_data[..] else { panic!("{last:?}") };
    assert_eq!(stuck.reason.code(), "RACKS");
    let text = format!("{}; {}", stuck.reason, stuck.reason.next_step());
    assert!(text.contains("3 of its 3 replicas are in rack a"), "{text}");
    assert!(text.contains(&format!("node {free} is cordoned; uncordon nodes {free}")), "{text}");
    assert!(last.is_complete());
    let uncordon = SetCordoned { node_id: free, cordoned: false };
    cluster.apply(&MemberCommand::SetCordoned(uncordon));
    let (moves, last) = cluster.settle(&mut rng);
    assert!(moves.iter().any(|it| it.shard_id == 1 && it.to == Some(free)), "{moves:?}");
    assert!(last.steps.is_empty() && last.stuck.iter().all(|it| it.shard_id == 0), "{last:?}");
    // A replica that moves off a node that leaves goes to the rack that loses it.
    let mut six = Cluster::of(6, 4, 3);
    six.set_racks(|node| format!("r{}", node % 3));
    six.settle(&mut rng);
    six.leave(1);
    six.settle(&mut rng);
    for (shard_id, shard) in six.placement().shards().filter(|(id, _)| *id != 0) {
        assert_eq!(six.crowding(shard.replicas.keys()), 3, "shard {shard_id}: {shard:?}");
    }
}

#[test]
fn new_node_gets_its_share_and_a_difference_of_one_moves_nothing() {
    let mut rng = StdRng::seed_from_u64(1);
    let mut cluster = Cluster::of(3, 12, 3);
    assert_eq!(cluster.settle(&mut rng).0, []);
    for node in 4..=6 {
        cluster.add(node);
    }
    let (moves, last) = cluster.settle(&mut rng);
    let spread = moves.iter().filter(|it| it.reason == MoveReason::Spread).count();
    // Each of three nodes gets 6 of 36 replicas; three votes in shard 0 move nothing.
    assert_eq!(spread, 18, "{moves:?}");
    assert!(last.is_complete());
    assert!(cluster.loads().values().all(|load| *load == 6));
    // One more replica somewhere is no reason for a move.
    let mut small = Cluster::of(3, 1, 3);
    small.add(4);
    let spread = small.settle(&mut rng).0;
    assert!(spread.iter().all(|it| it.shard_id == 0), "{spread:?}");
}

#[test]
fn moves_in_progress_count_at_their_target() {
    let mut cluster = Cluster::of(3, 4, 3);
    cluster.add(4);
    let first = plan(&cluster.members, &cluster.reachable, &cluster.down);
    for step in &first.steps {
        cluster.apply(&step.command(cluster.version));
    }
    assert_eq!(first.steps.len(), MOVES_MAX);
    let next = plan(&cluster.members, &cluster.reachable, &cluster.down);
    assert_eq!(next.steps, [], "as many moves as may run");
    let running: Vec<u64> = cluster.placement().moves().map(|(id, _)| id).collect();
    running.into_iter().for_each(|id| cluster.carry_out(id));
    let next = plan(&cluster.members, &cluster.reachable, &cluster.down);
    assert_eq!(next.steps, [], "{:?}", cluster.loads());
}

#[test]
fn replicas_move_off_nodes_that_are_down() {
    let mut rng = StdRng::seed_from_u64(1);
    let mut cluster = Cluster::of(7, 6, 3);
    cluster.settle(&mut rng);
    let holder = *cluster.placement().shard(0).unwrap().replicas.keys().next().unwrap();
    cluster.silence(holder, false);
    assert_eq!(cluster.settle(&mut rng).0, [], "it may return soon");
    cluster.silence(holder, true);
    let (moves, last) = cluster.settle(&mut rng);
    assert!(moves.iter().any(|it| it.reason == MoveReason::NodeDown && it.shard_id != 0));
    assert_eq!(last.stuck, []);
    for (shard_id, shard) in cluster.placement().shards() {
        assert!(!shard.replicas.contains_key(&holder), "shard {shard_id}: {shard:?}");
        assert_eq!(shard.replicas.len(), if shard_id == 0 { 5 } else { 3 });
    }
    cluster.reachable.insert(holder);
    cluster.down.clear();
    cluster.settle(&mut rng);
    let loads = cluster.loads();
    assert!(loads.values().max().unwrap() - loads.values().min().unwrap() <= 1, "{loads:?}");

    // Nothing moves if no other node may get a replica.
    let mut cluster = Cluster::of(3, 1, 3);
    cluster.silence(3, true);
    let (moves, last) = cluster.settle(&mut rng);
    assert_eq!(moves, []);
    let stuck = last.stuck.iter().find(|it| it.shard_id == 1).unwrap();
    assert_eq!((stuck.node_id, stuck.reason.code()), (Some(3), "TOO_FEW_NODES"));
}

#[test]
fn live_replica_is_not_removed_while_a_lost_one_stays() {
    let mut rng = StdRng::seed_from_u64(1);
    let mut cluster = Cluster::of(5, 2, 5);
    cluster.lose(2);
    cluster.reachable.remove(&2);
    cluster.apply(&MemberCommand::SetReplicas(3));
    let moves = cluster.settle(&mut rng).0;
    let first: Vec<_> = moves.iter().filter(|it| it.shard_id == 1).collect();
    assert_eq!(first.first().unwrap().from, Some(2), "{moves:?}");
}

#[test]
fn every_stuck_replica_has_a_reason() {
    let reasons = |cluster: &Cluster| -> Vec<&'static str> {
        let plan = plan(&cluster.members, &cluster.reachable, &cluster.down);
        let data = plan.stuck.iter().filter(|it| it.shard_id != 0);
        data.map(|it| it.reason.code()).collect()
    };
    let mut cluster = Cluster::of(3, 1, 3);
    cluster.reachable = [1].into();
    cluster.leave(3);
    assert_eq!(reasons(&cluster), ["NO_MAJORITY"]);
    let mut cluster = Cluster::of(3, 1, 3);
    cluster.add(4);
    cluster.leave(3);
    cluster.reachable.remove(&4);
    assert_eq!(reasons(&cluster), ["NODES_UNREACHABLE"]);
    let mut cluster = Cluster::of(1, 1, 1);
    cluster.leave(1);
    assert_eq!(reasons(&cluster), ["LAST_REPLICA"]);
    assert_eq!(reasons(&Cluster::of(3, 1, 5)), ["TOO_FEW_NODES"]);
    let mut cluster = Cluster::of(3, 6, 3);
    cluster.add(4);
    cluster.leave(3);
    assert_eq!(reasons(&cluster), ["OTHER_MOVES_FIRST"; 3], "shard 0 gets a vote on node 4, too");
}

/// While moves are paused nothing starts, and each shard that would move has that reason.
#[test]
fn pauses_are_obeyed() {
    let mut paused_shards = 0;
    for seed in seeds(200) {
        let _context = SeedOnPanic(seed);
        let mut rng = StdRng::seed_from_u64(seed);
        let mut cluster = random_cluster(&mut rng);
        for _ in 0..rng.random_range(0..6) {
            let node = cluster.members.iter().map(|it| it.node_id).choose(&mut rng).unwrap();
            match rng.random_range(0..4) {
                0 => cluster.cordon(node),
                1 => cluster.lose(node),
                2 => cluster.leave(node),
                _ => cluster.silence(node, rng.random_bool(0.5)),
            }
        }
        let free = plan(&cluster.members, &cluster.reachable, &cluster.down);
        cluster.apply(&MemberCommand::PauseMoves(true));
        let paused = plan(&cluster.members, &cluster.reachable, &cluster.down);
        assert_eq!(paused.steps, [], "{paused:?}");
        for step in &free.steps {
            let PlanStep::Move(planned) = *step else { panic!("{step:?}") };
            let is_explained = paused
                .stuck
                .iter()
                .any(|it| it.shard_id == planned.shard_id && it.reason == StuckReason::MovesPaused);
            assert!(is_explained || planned.reason == MoveReason::Spread, "{planned:?} {paused:?}");
            paused_shards += u32::from(is_explained);
            let refused = cluster.members.apply(cluster.version + 1, &step.command(0));
            assert!(refused.is_err(), "{step:?}");
        }
        expect_settled(&cluster, &paused);
        assert!(free.is_complete() || !paused.is_complete(), "{free:?} {paused:?}");
        cluster.apply(&MemberCommand::PauseMoves(false));
        assert_eq!(plan(&cluster.members, &cluster.reachable, &cluster.down), free);
    }
    assert!(paused_shards > 50, "{paused_shards}");
}

/// Every reason has a name, numbers where there are any, and a next step.
#[test]
fn reasons_say_what_to_do() {
    let refused = vec![(4, "is cordoned"), (5, "is being removed")];
    let reasons = [
        StuckReason::NoMajority { reachable: 1, needed: 2, silent: vec![2, 3] },
        StuckReason::Unreachable { nodes: vec![4] },
        StuckReason::LastReplica,
        StuckReason::TooFewNodes { replicas: 2, wanted: 3, refused },
        StuckReason::OtherMovesFirst,
        StuckReason::OtherShardsFirst { shards: 2 },
        StuckReason::MovesPaused,
        StuckReason::Racks {
            rack: "a".to_owned(),
            replicas: 2,
            of: 3,
            refused: vec![(6, "is cordoned")],
        },
    ];
    for reason in &reasons {
        let obstacle = reason.obstacle();
        assert_eq!(obstacle.code, reason.code());
        assert!(!obstacle.what.is_empty() && !obstacle.next_step.is_empty(), "{reason:?}");
    }
    let text = |at: usize| format!("{}: {}", reasons[at], reasons[at].next_step());
    assert!(text(0).contains("nodes that do not respond: 2, 3"), "{}", text(0));
    let few = text(3);
    assert!(few.contains("2 of 3 replicas") && few.contains("node 4 is cordoned"), "{few}");
    assert!(few.contains("uncordon nodes 4"), "{few}");
    assert!(text(5).contains("2 of them are not done"), "{}", text(5));
}

#[test]
fn removal_is_refused_if_the_others_cannot_take_its_replicas() {
    let refused = |cluster: &Cluster, node| {
        removal_obstacle(&cluster.members, node).map(|it| format!("{it}; {}", it.next_step))
    };
    // Five of four nodes: three replicas can fail as often as four.
    assert_eq!(refused(&Cluster::of(4, 2, 5), 4), None);
    let three = refused(&Cluster::of(3, 2, 5), 3).unwrap();
    for part in [
        "node 3 has replicas of 2 shards",
        "shard 1 would have 2 of 3 replicas; 2 nodes would remain; add a node first",
        "set-replicas 1",
        "--fewer-replicas",
    ] {
        assert!(three.contains(part), "{part}: {three}");
    }
    assert!(refused(&Cluster::of(2, 1, 3), 1).unwrap().contains("1 of 2 replicas"));
    let mut four = Cluster::of(4, 3, 3);
    let mut rng = StdRng::seed_from_u64(1);
    four.settle(&mut rng);
    assert_eq!(refused(&four, 1), None, "the others take them");
    four.cordon(2);
    four.cordon(3);
    four.cordon(4);
    let text = refused(&four, 1).unwrap();
    assert!(text.contains("node 2 is cordoned, node 3 is cordoned, node 4 is cordoned"), "{text}");
    assert!(text.contains("uncordon nodes 2, 3, 4"), "{text}");
    // A removal without an obstacle leaves each shard what it had.
    for seed in seeds(200) {
        let _context = SeedOnPanic(seed);
        let mut rng = StdRng::seed_from_u64(seed);
        let mut cluster = random_cluster(&mut rng);
        cluster.settle(&mut rng);
        let node = cluster.members.iter().map(|it| it.node_id).choose(&mut rng).unwrap();
        if rng.random_bool(0.5) {
            let other = cluster.members.iter().map(|it| it.node_id).choose(&mut rng).unwrap();
            cluster.cordon(other);
        }
        if cluster.members.iter().count() < 2 || refused(&cluster, node).is_some() {
            continue;
        }
        let before = cluster.placement().clone();
        cluster.leave(node);
        cluster.settle(&mut rng);
        let may_fail = |shard: &PlacedShard| shard.replicas.len().saturating_sub(1) / 2;
        for (shard_id, shard) in cluster.placement().shards().filter(|(id, _)| *id != 0) {
            let had = before.shard(shard_id).unwrap();
            assert!(may_fail(shard) >= may_fail(had), "{had:?} {shard:?} {cluster:?}");
        }
    }
}

#[test]
fn move_to_a_node_that_leaves_is_cancelled() {
    let mut cluster = Cluster::of(3, 1, 3);
    cluster.add(4);
    let (from, to, reason) = (Some(1), Some(4), MoveReason::Manual);
    let step = PlanStep::Move(PlannedMove { shard_id: 1, from, to, reason });
    cluster.apply(&step.command(0));
    cluster.leave(4);
    let steps = plan(&cluster.members, &cluster.reachable, &cluster.down).steps;
    assert!(matches!(steps[..], [PlanStep::Cancel { shard_id: 1, .. }]), "{steps:?}");
}
