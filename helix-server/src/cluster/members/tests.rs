//! Invariants of the members: one change at a time, generations that are never reused, and no
//! target replica before it exists.

use super::*;
use crate::log::RemoveMember;
use crate::records::MembersRecord;

struct Cluster {
    members: Members,
    version: u64,
}

impl Cluster {
    /// Returns a cluster that these nodes have formed together.
    fn of(nodes: &[u64]) -> Self {
        let mut cluster = Self { members: Members::default(), version: 0 };
        let replicas = nodes.iter().map(|node| replica_id(*node, FIRST_GENERATION)).collect();
        assert_eq!(
            cluster.apply(MemberCommand::InitMembers(InitMembers { replicas })),
            Ok(ClusterReply::Done)
        );
        cluster
    }

    fn apply(&mut self, command: MemberCommand) -> Result<ClusterReply, ClusterReply> {
        let before = self.members.clone();
        match self.members.apply(self.version + 1, &command) {
            Ok(outcome) => {
                assert_eq!(outcome.is_changed, self.members != before);
                self.version += u64::from(outcome.is_changed);
                let record = MembersRecord::from(&self.members);
                assert_eq!(record.into_members().unwrap(), self.members, "survives encoding");
                Ok(outcome.reply)
            }
            Err(refused) => {
                assert_eq!(self.members, before, "a refusal changes nothing");
                Err(refused)
            }
        }
    }

    fn change(&mut self, command: MemberCommand) -> MemberChange {
        match self.apply(command) {
            Ok(ClusterReply::MemberChange(change)) => change,
            other => panic!("{other:?}"),
        }
    }

    fn join(&mut self, node_id: u64) -> u32 {
        let generation = self.members.get(node_id).unwrap().joining.unwrap();
        self.apply(MemberCommand::Joined(Joined { node_id, generation })).unwrap();
        generation
    }

    fn finish(&mut self) {
        let id = self.members.running().unwrap().id;
        self.apply(MemberCommand::Finish(id)).unwrap();
        assert!(self.members.running().is_none());
    }

    fn target(&self) -> Vec<(u64, u64)> {
        let ids = self.members.target().into_iter();
        ids.map(|id| (node_of(id), id & u64::from(u32::MAX))).collect()
    }
}

fn add(node_id: u64) -> MemberCommand {
    MemberCommand::Add(AddMember { node_id, peer_addr: format!("n{node_id}:9192") })
}

fn remove(node_id: u64) -> MemberCommand {
    MemberCommand::Remove(RemoveMember { node_id })
}

fn replace(lost_node_id: u64, node_id: u64, emptied: bool) -> MemberCommand {
    let peer_addr = format!("n{node_id}:9192");
    MemberCommand::Replace(ReplaceMember { lost_node_id, node_id, peer_addr, emptied })
}

fn drain(node_id: u64, draining: bool) -> MemberCommand {
    MemberCommand::SetDraining(SetDraining { node_id, draining })
}

#[test]
fn node_is_not_in_the_target_before_it_has_joined() {
    let mut cluster = Cluster::of(&[1]);
    let change = cluster.change(add(2));
    assert_eq!((change.kind, change.id, change.done), (ChangeKind::Add, 1, false));
    assert_eq!(cluster.target(), [(1, 1)]);
    assert_eq!(cluster.apply(MemberCommand::Finish(1)), Ok(ClusterReply::Done));
    assert!(cluster.members.running().is_some(), "it cannot finish yet");
    assert_eq!(cluster.join(2), 2);
    assert_eq!(cluster.target(), [(1, 1), (2, 2)]);
    let version = cluster.members.running().unwrap().version;
    assert_eq!(version, cluster.version, "shards that have seen less have not done it");
    cluster.finish();
    assert_eq!(cluster.change(add(2)).id, change.id, "a repeated command returns the same change");
}

#[test]
fn only_one_change_runs_at_a_time() {
    let mut cluster = Cluster::of(&[1, 2, 3]);
    let first = cluster.change(add(4));
    assert_eq!(cluster.change(add(4)).id, first.id);
    for other in [add(5), remove(3), replace(3, 3, true), replace(3, 6, false)] {
        let refused = cluster.apply(other).unwrap_err();
        let ClusterReply::ChangeInProgress { what } = refused else { panic!("{refused:?}") };
        assert!(what.contains("node 4 is being added"), "{what}");
    }
    // Removing the node that is being added is the exception.
    let second = cluster.change(remove(4));
    assert_eq!(cluster.change(remove(4)).id, second.id);
    assert!(cluster.members.is_abandoned(first.id));
    assert_eq!(cluster.target(), [(1, 1), (2, 1), (3, 1)]);
    cluster.finish();
    assert_eq!(cluster.members.refusal(4, 2).unwrap(), "node 4 was removed from this cluster");
    assert_eq!(cluster.members.refusal(4, 3), None, "added again, unknown to this state");
    assert_eq!(cluster.members.refusal(5, 2), None, "this node was never a member");
}

#[test]
fn generations_are_never_reused() {
    let mut cluster = Cluster::of(&[1, 2, 3]);
    let mut generations = Vec::new();
    for _ in 0..3 {
        cluster.change(add(4));
        generations.push(cluster.join(4));
        cluster.finish();
        cluster.change(remove(4));
        assert_eq!(cluster.target(), [(1, 1), (2, 1), (3, 1)]);
        cluster.finish();
    }
    assert_eq!(generations, [2, 3, 4]);
}

#[test]
fn lost_disk_gets_a_new_generation_in_one_change() {
    let mut cluster = Cluster::of(&[1, 2, 3]);
    let change = cluster.change(replace(3, 3, true));
    assert_eq!(cluster.target(), [(1, 1), (2, 1), (3, 1)], "until the new replicas exist");
    assert_eq!(cluster.change(replace(3, 3, true)).id, change.id);
    assert!(cluster.members.refusal(3, 1).unwrap().contains("replaced"));
    cluster.join(3);
    assert_eq!(cluster.target(), [(1, 1), (2, 1), (3, 2)]);
    // A node that has its data repeats the same change; an empty one has lost its data again.
    assert_eq!(cluster.change(replace(3, 3, false)).id, change.id);
    let again = cluster.change(replace(3, 3, true));
    assert_ne!(again.id, change.id);
    assert!(cluster.members.is_abandoned(change.id));
    assert_eq!(cluster.join(3), 3);
    cluster.finish();
    assert_eq!(cluster.target(), [(1, 1), (2, 1), (3, 3)]);
    assert_ne!(cluster.change(replace(3, 3, true)).id, again.id, "also after the change is done");
}

#[test]
fn node_replaces_another_in_one_change() {
    let mut cluster = Cluster::of(&[1, 2, 3]);
    cluster.change(replace(3, 4, false));
    assert_eq!(cluster.target(), [(1, 1), (2, 1), (3, 1)]);
    cluster.join(4);
    assert_eq!(cluster.target(), [(1, 1), (2, 1), (4, 2)]);
    // If the change is abandoned, the old node stays.
    cluster.change(remove(4));
    assert_eq!(cluster.target(), [(1, 1), (2, 1), (3, 1)]);
    cluster.finish();
    cluster.change(replace(3, 5, false));
    cluster.join(5);
    cluster.finish();
    assert!(cluster.members.get(3).is_none());
    assert_eq!(cluster.apply(replace(3, 6, false)), Err(ClusterReply::NodeNotFound { node_id: 3 }));
}

#[test]
fn rejects_changes_that_leave_too_few_nodes() {
    let mut cluster = Cluster::of(&[1, 2]);
    assert!(matches!(cluster.apply(remove(9)), Err(ClusterReply::NodeNotFound { node_id: 9 })));
    cluster.change(remove(2));
    cluster.finish();
    assert!(matches!(cluster.apply(remove(1)), Err(ClusterReply::NotEnoughNodes { .. })));
    assert!(matches!(cluster.apply(drain(1, true)), Err(ClusterReply::NotEnoughNodes { .. })));
    let mut five = Cluster::of(&[1, 2, 3, 4, 5]);
    assert!(matches!(five.apply(add(6)), Err(ClusterReply::Invalid { .. })));
    for node in 1..=4 {
        five.apply(drain(node, true)).unwrap();
    }
    assert!(matches!(five.apply(drain(5, true)), Err(ClusterReply::NotEnoughNodes { .. })));
    five.apply(drain(4, false)).unwrap();
    five.apply(drain(5, true)).unwrap();
}

#[test]
fn rejects_invalid_commands() {
    let mut cluster = Cluster::of(&[1, 2, 3]);
    let at = |node_id, peer_addr: &str| {
        MemberCommand::Add(AddMember { node_id, peer_addr: peer_addr.to_owned() })
    };
    for wrong in [at(0, "n:1"), at(1 << 32, "n:1"), at(4, ""), at(4, "n"), at(4, ":1")] {
        assert!(matches!(cluster.apply(wrong), Err(ClusterReply::Invalid { .. })));
    }
    assert!(matches!(cluster.apply(replace(3, 2, false)), Err(ClusterReply::Invalid { .. })));
    let mut unknown = Cluster { members: Members::default(), version: 0 };
    assert!(matches!(unknown.apply(add(4)), Err(ClusterReply::Invalid { .. })));
}

#[test]
fn member_can_change_its_address() {
    let mut cluster = Cluster::of(&[1, 2, 3]);
    let command = AddMember { node_id: 2, peer_addr: "elsewhere:1".to_owned() };
    let change = cluster.change(MemberCommand::Add(command));
    assert!(change.done, "there is nothing to wait for");
    assert_eq!(cluster.members.get(2).unwrap().peer_addr, "elsewhere:1");
    assert_eq!(cluster.target().len(), 3);
}

/// A data shard may have other voters than shard 0 while a change is in progress.
#[test]
fn replicas_of_data_shards_are_uncertain_during_a_change() {
    let others = |cluster: &Cluster, of_shard0| cluster.members.others_have_data(1, of_shard0);
    let mut cluster = Cluster::of(&[1]);
    assert_eq!(others(&cluster, Some(false)), Some(false));
    let peer_addr = "n2:9192".to_owned();
    cluster.change(MemberCommand::Add(AddMember { node_id: 2, peer_addr }));
    assert_eq!(others(&cluster, Some(false)), Some(false), "no shard depends on it yet");
    cluster.join(2);
    for of_shard0 in [Some(false), Some(true)] {
        assert_eq!(others(&cluster, of_shard0), None, "node 1 may have the only replica");
    }
    cluster.finish();
    assert_eq!(others(&cluster, Some(true)), Some(true));
    cluster.change(MemberCommand::Remove(RemoveMember { node_id: 2 }));
    assert_eq!(others(&cluster, Some(true)), None, "shard 0 is the last to remove the node");
    cluster.finish();
    assert_eq!(others(&cluster, Some(false)), Some(false));

    let mut cluster = Cluster::of(&[1, 2, 3]);
    cluster.change(MemberCommand::Remove(RemoveMember { node_id: 3 }));
    assert_eq!(others(&cluster, Some(true)), Some(true), "node 2 votes throughout");
    assert_eq!(others(&cluster, None), None);
}
