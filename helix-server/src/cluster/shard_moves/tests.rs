//! Steps of a move, and what apply refuses.

use prost::Message;

use super::*;
use crate::cluster::members::FIRST_GENERATION;
use crate::log::{AddMember, Joined, MemberCommand, RemoveMember, ReplaceMember};
use crate::records::MembersRecord;

struct Cluster {
    members: Members,
    version: u64,
}

impl Cluster {
    fn of(nodes: &[u64], shards: &[u64]) -> Self {
        let mut cluster = Self { members: Members::default(), version: 0 };
        let replicas = nodes.iter().map(|node| replica_id(*node, FIRST_GENERATION)).collect();
        let take = TakePlacement { replicas, shards: shards.to_vec() };
        cluster.apply(MemberCommand::TakePlacement(take)).unwrap();
        cluster
    }

    fn apply(&mut self, command: MemberCommand) -> Result<ClusterReply, ClusterReply> {
        let before = self.members.clone();
        let applied = self.members.apply(self.version + 1, &command);
        let record = MembersRecord::from(&self.members);
        assert_eq!(record.into_members().unwrap(), self.members, "survives encoding");
        match applied {
            Ok(outcome) => {
                self.version += u64::from(outcome.is_changed);
                Ok(outcome.reply)
            }
            Err(refused) => {
                assert_eq!(self.members, before, "a refusal changes nothing");
                Err(refused)
            }
        }
    }

    fn add(&mut self, node_id: u64) {
        let peer_addr = format!("n{node_id}:1");
        self.apply(MemberCommand::Add(AddMember { node_id, peer_addr })).unwrap();
        self.join(node_id);
        self.finish();
    }

    fn join(&mut self, node_id: u64) {
        let generation = self.members.get(node_id).unwrap().joining.unwrap();
        self.apply(MemberCommand::Joined(Joined { node_id, generation })).unwrap();
    }

    fn finish(&mut self) {
        let id = self.members.running().unwrap().id;
        self.apply(MemberCommand::Finish(id)).unwrap();
    }

    fn plan(&mut self, shard_id: u64, from: u64, to: u64) -> Result<u64, ClusterReply> {
        let reason = MoveReason::Manual.number();
        self.apply(MemberCommand::PlanMove(PlanMove {
            shard_id,
            from,
            to,
            reason,
            planned_at: 0,
        }))?;
        Ok(self.shard(shard_id).moving.unwrap().id)
    }

    fn create(&mut self, shard_id: u64) -> u32 {
        let ShardMove { to, generation, .. } = self.shard(shard_id).moving.unwrap();
        let created = ReplicaCreated { shard_id, node_id: to.unwrap(), generation };
        self.apply(MemberCommand::ReplicaCreated(created)).unwrap();
        generation
    }

    fn done(&mut self, shard_id: u64, id: u64, cancelled: bool) {
        let finish = FinishMove { shard_id, id, cancelled };
        self.apply(MemberCommand::FinishMove(finish)).unwrap();
    }

    fn shard(&self, shard_id: u64) -> PlacedShard {
        self.members.placement().unwrap().shard(shard_id).unwrap().clone()
    }

    fn voters(&self, shard_id: u64) -> Vec<(u64, u64)> {
        let voters = self.members.shard_target(shard_id).voters.into_iter();
        voters.map(|id| (id >> 32, id & u64::from(u32::MAX))).collect()
    }
}

fn what(refused: Result<u64, ClusterReply>) -> String {
    match refused.unwrap_err() {
        ClusterReply::Invalid { what, .. } | ClusterReply::ChangeInProgress { what } => what,
        ClusterReply::NodeNotFound { node_id } => format!("node {node_id} not found"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn placement_is_taken_over_as_it_is() {
    let cluster = Cluster::of(&[1, 2, 3], &[1, 2]);
    for shard in 0..=2 {
        assert_eq!(cluster.voters(shard), [(1, 1), (2, 1), (3, 1)]);
    }
    assert!(cluster.members.shard_target(7).voters.is_empty());
    let mut legacy = Members::default();
    let take = TakePlacement { replicas: vec![replica_id(1, 1)], shards: Vec::new() };
    legacy.take_placement(&take);
    assert_eq!(legacy.placement(), None, "its shards are not known yet");
}

/// The bytes of checkpoints; later versions must read them.
#[test]
fn encoding_is_golden() {
    let mut cluster = Cluster::of(&[1], &[1]);
    let encoded = |members: &Members| MembersRecord::from(members).encode_to_vec();
    let row: &[u8] = &[0x08, 1, 0x10, 1];
    let replicas = [&[0x12, 4], row].concat();
    let list = |shard_1: &[u8]| {
        let length = |bytes: &[u8]| u8::try_from(bytes.len()).unwrap();
        let shards =
            [&[0x08, 5, 0x12, 6], &replicas[..], &[0x12, length(shard_1)], shard_1].concat();
        [&[0x0a, 4], row, &[0x12, 4], row, &[0x2a, length(&shards)], &shards].concat()
    };
    let shard_1 = [&[0x08, 1], &replicas[..]].concat();
    assert_eq!(encoded(&cluster.members), list(&shard_1));
    let moving = ShardMove {
        id: 7,
        from: Some(1),
        to: Some(2),
        generation: 3,
        is_created: true,
        is_cancelled: false,
        reason: MoveReason::Spread,
    };
    let shards = &mut cluster.members.placement.as_mut().unwrap().shards;
    shards.get_mut(&1).unwrap().moving = Some(moving);
    let of_move = [0x1a, 12, 0x08, 7, 0x10, 1, 0x18, 2, 0x20, 3, 0x28, 1, 0x38, 5];
    assert_eq!(encoded(&cluster.members), list(&[&shard_1[..], &of_move].concat()));
}

#[test]
fn old_replica_leaves_with_the_vote_of_the_new_one() {
    let mut cluster = Cluster::of(&[1, 2, 3], &[1]);
    cluster.add(4);
    let id = cluster.plan(1, 2, 4).unwrap();
    assert_eq!(cluster.voters(1), [(1, 1), (2, 1), (3, 1)], "until the new replica exists");
    cluster.done(1, id, false);
    assert!(cluster.shard(1).moving.is_some(), "it cannot be finished yet");
    let awaited = |cluster: &Cluster| [2, 4].map(|node| cluster.shard(1).awaits_replica(node));
    assert_eq!(awaited(&cluster), [false, true]);
    let generation = cluster.create(1);
    assert!(generation > 2, "not that of its replica of shard 0");
    assert_eq!(cluster.voters(1), [(1, 1), (3, 1), (4, generation.into())]);
    assert!(!cluster.members.is_removed(1, 2, 1), "its files are needed until the move is done");
    cluster.done(1, id, false);
    assert!(cluster.members.is_removed(1, 2, 1));
    assert_eq!(awaited(&cluster), [false, false]);
    assert!(!cluster.members.is_removed(1, 4, generation));
    assert!(!cluster.members.is_removed(1, 2, 9), "this state is older than that replica");
    // It returns under a new generation.
    cluster.plan(1, 4, 2).unwrap();
    assert_eq!(cluster.create(1), 2);
    assert!(cluster.members.is_removed(1, 2, 1) && !cluster.members.is_removed(1, 2, 2));
}

#[test]
fn cancelled_move_leads_back() {
    let mut cluster = Cluster::of(&[1, 2, 3], &[1]);
    cluster.add(4);
    let cancel = |cluster: &mut Cluster, id| {
        cluster.apply(MemberCommand::CancelMove(CancelMove { shard_id: 1, id })).unwrap();
    };
    let first = cluster.plan(1, 2, 4).unwrap();
    cancel(&mut cluster, first);
    assert_eq!(cluster.shard(1).moving, None, "nothing depended on the new replica");
    let id = cluster.plan(1, 2, 4).unwrap();
    assert_ne!(id, first);
    let generation = cluster.create(1);
    cancel(&mut cluster, first);
    assert!(!cluster.shard(1).moving.unwrap().is_cancelled, "this is another move");
    cancel(&mut cluster, id);
    assert_eq!(cluster.voters(1), [(1, 1), (2, 1), (3, 1)]);
    // A leader that had finished the move before it knew of the cancellation.
    cluster.done(1, id, false);
    assert!(cluster.shard(1).moving.is_some());
    assert!(!cluster.members.is_removed(1, 4, generation), "it may still be a voter");
    cluster.done(1, id, true);
    assert_eq!(cluster.shard(1).moving, None);
    assert!(cluster.members.is_removed(1, 4, generation));
}

#[test]
fn refuses_moves_that_make_no_sense() {
    let mut cluster = Cluster::of(&[1, 2, 3], &[1, 2, 3, 4, 5]);
    for node in 4..=6 {
        cluster.add(node);
    }
    assert!(what(cluster.plan(9, 1, 4)).contains("there is no shard 9"));
    assert!(what(cluster.plan(1, 4, 5)).contains("node 4 has no replica of shard 1"));
    assert!(what(cluster.plan(1, 1, 2)).contains("node 2 has a replica of shard 1 already"));
    assert!(what(cluster.plan(1, 1, 1)).contains("node 1 has a replica of shard 1 already"));
    assert!(what(cluster.plan(1, 1, 9)).contains("node 9 not found"));
    assert!(what(cluster.plan(1, 0, 0)).contains("last replica"));
    let cordon = |node_id| MemberCommand::SetCordoned(SetCordoned { node_id, cordoned: true });
    cluster.apply(cordon(4)).unwrap();
    assert!(what(cluster.plan(1, 1, 4)).contains("node 4 is cordoned"));
    for shard in 1..=4 {
        cluster.plan(shard, 1, 5).unwrap();
    }
    assert!(what(cluster.plan(1, 2, 6)).contains("a replica of shard 1 is being moved"));
    assert!(what(cluster.plan(5, 2, 6)).contains("4 replicas are being moved"));
    for node in [1, 2, 3, 5] {
        cluster.apply(cordon(node)).unwrap();
    }
    assert!(matches!(cluster.apply(cordon(6)), Err(ClusterReply::NotEnoughNodes { .. })));
    for wrong in [0, 2, 4, 7] {
        assert!(cluster.apply(MemberCommand::SetReplicas(wrong)).is_err());
    }
}

#[test]
fn paused_moves_stay_and_can_be_cancelled() {
    let mut cluster = Cluster::of(&[1, 2, 3], &[1, 2]);
    cluster.add(4);
    let id = cluster.plan(1, 2, 4).unwrap();
    let generation = cluster.create(1);
    cluster.apply(MemberCommand::PauseMoves(true)).unwrap();
    assert!(what(cluster.plan(2, 2, 4)).contains("paused"));
    assert_eq!(cluster.shard(1).moving.unwrap().generation, generation);
    // Its leader finishes a move of which the voters have changed; others can be cancelled.
    cluster.done(1, id, false);
    assert_eq!(cluster.shard(1).moving, None);
    cluster.apply(MemberCommand::PauseMoves(false)).unwrap();
    let id = cluster.plan(2, 2, 4).unwrap();
    cluster.create(2);
    cluster.apply(MemberCommand::PauseMoves(true)).unwrap();
    cluster.apply(MemberCommand::CancelMove(CancelMove { shard_id: 2, id })).unwrap();
    cluster.done(2, id, true);
    assert_eq!(cluster.shard(2).moving, None);
    // A checkpoint keeps the pause.
    let record = MembersRecord::from(&cluster.members);
    assert_eq!(record.clone().into_members().unwrap(), cluster.members);
    assert!(record.placement.unwrap().paused);
}

#[test]
fn sixth_node_needs_a_placement() {
    let mut cluster = Cluster::of(&[1, 2, 3, 4, 5], &[1]);
    cluster.add(6);
    let target = cluster.members.shard_target(0);
    assert_eq!(target.voters.len(), 5);
    assert_eq!(target.learners, [replica_id(6, 2)].into());
    assert!(cluster.members.shard_target(1).learners.is_empty());
    for node in 7..=32 {
        cluster.add(node);
    }
    let peer_addr = "n33:1".to_owned();
    let refused = cluster.apply(MemberCommand::Add(AddMember { node_id: 33, peer_addr }));
    assert!(matches!(refused, Err(ClusterReply::Invalid { .. })));
}

#[test]
fn node_leaves_after_its_replicas() {
    let mut cluster = Cluster::of(&[1, 2, 3], &[1]);
    cluster.add(4);
    let remove = MemberCommand::Remove(RemoveMember { node_id: 3 });
    cluster.apply(remove).unwrap();
    cluster.finish();
    assert!(cluster.members.get(3).is_some(), "it has replicas");
    let id = cluster.plan(1, 3, 4).unwrap();
    cluster.create(1);
    cluster.done(1, id, false);
    cluster.finish();
    assert!(cluster.members.get(3).is_some(), "it votes in shard 0");
    assert!(cluster.members.shard_target(0).voters.contains(&replica_id(3, 1)));
    let id = cluster.plan(0, 3, 4).unwrap();
    cluster.done(0, id, false);
    assert!(cluster.members.shard_target(0).learners.is_empty());
    cluster.finish();
    assert_eq!(cluster.members.get(3), None);
}

#[test]
fn emptied_node_has_lost_all_earlier_replicas() {
    let mut cluster = Cluster::of(&[1, 2, 3], &[1]);
    let peer_addr = String::new();
    let replace = ReplaceMember { lost_node_id: 3, node_id: 3, peer_addr, emptied: true };
    cluster.apply(MemberCommand::Replace(replace)).unwrap();
    assert!(!cluster.members.is_lost(3, 1));
    assert_eq!(cluster.members.refusal_to_hold(3), Some("has not joined yet"));
    let with_log = |cluster: &Cluster| cluster.members.shards_with_log(3).collect::<Vec<_>>();
    assert_eq!(with_log(&cluster), [1]);
    cluster.join(3);
    assert!(cluster.members.is_lost(3, 1));
    assert!(with_log(&cluster).is_empty(), "a lost replica must not return on an empty log");
    assert_eq!(cluster.voters(0), [(1, 1), (2, 1), (3, 2)], "its vote in shard 0 is renewed");
    assert_eq!(cluster.voters(1), [(1, 1), (2, 1), (3, 1)]);
    let id = cluster.plan(1, 3, 3).unwrap();
    assert!(with_log(&cluster).is_empty(), "not created yet");
    assert_eq!(cluster.create(1), 3);
    assert_eq!(with_log(&cluster), [1]);
    assert_eq!(cluster.voters(1), [(1, 1), (2, 1), (3, 3)]);
    cluster.done(1, id, false);
    assert!(cluster.members.is_removed(1, 3, 1));
}

#[test]
fn only_replicas_that_stay_count_as_others() {
    let mut cluster = Cluster::of(&[1], &[1]);
    assert_eq!(cluster.members.others_have_shard(1, 1), Some(false));
    cluster.add(2);
    cluster.plan(1, 0, 2).unwrap();
    assert_eq!(cluster.members.others_have_shard(1, 1), None);
    let id = cluster.shard(1).moving.unwrap().id;
    cluster.create(1);
    cluster.done(1, id, false);
    assert_eq!(cluster.members.others_have_shard(1, 1), Some(true));
    cluster.plan(1, 2, 0).unwrap();
    assert_eq!(cluster.members.others_have_shard(1, 1), None, "node 2 may have left already");
    assert_eq!(cluster.members.others_have_shard(1, 2), Some(true));
}
