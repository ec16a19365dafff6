//! The next step of a shard's leader, case by case.

use super::*;
use crate::raft::replica_id;

fn id(node: u64) -> ReplicaId {
    replica_id(node, 1)
}

fn ids(nodes: &[u64]) -> BTreeSet<ReplicaId> {
    nodes.iter().copied().map(id).collect()
}

/// A shard led by node 1, with voters 1, 2 and 3 that are all reachable and caught up.
struct Case {
    membership: Membership,
    target: BTreeSet<ReplicaId>,
    followers: BTreeSet<ReplicaId>,
    reached: BTreeSet<u64>,
    lags: BTreeMap<ReplicaId, u64>,
}

impl Case {
    fn to(target: &[u64]) -> Self {
        let configs = vec![ids(&[1, 2, 3])];
        let membership = Membership { configs, learners: ids(&[]), is_committed: true };
        Self {
            membership,
            target: ids(target),
            followers: ids(&[]),
            reached: (1..=5).collect(),
            lags: [(id(2), 0), (id(3), 0)].into(),
        }
    }

    fn learning(mut self, node: u64, lag: u64) -> Self {
        self.membership.learners.insert(id(node));
        self.lags.insert(id(node), lag);
        self
    }

    fn lost(mut self, node: u64) -> Self {
        self.reached.remove(&node);
        self
    }

    fn lagging(mut self, node: u64) -> Self {
        self.lags.insert(id(node), limits::LEARNER_LAG_MAX + 1);
        self
    }

    fn next(&self) -> Step {
        let Self { membership, target, followers, reached, lags } = self;
        ReconcileInput { own: id(1), membership, target, followers, reached, lags }.next()
    }
}

fn is_blocked(step: &Step, words: &str) -> bool {
    matches!(step, Step::Wait { blocked, .. } if blocked.what.contains(words))
}

#[test]
fn new_replica_is_a_learner_before_it_votes() {
    assert_eq!(Case::to(&[1, 2, 3]).next(), Step::Done);
    assert_eq!(Case::to(&[1, 2, 3, 4]).next(), Step::AddLearner(id(4)));
    let behind = Case::to(&[1, 2, 3, 4]).learning(4, 5_000).next();
    let wait =
        Step::Wait { phase: ChangePhase::CatchingUp, entries: 5_000, blocked: Obstacle::default() };
    assert_eq!(behind, wait);
    let ready = Case::to(&[1, 2, 3, 4]).learning(4, 10);
    assert_eq!(ready.next(), Step::SetVoters(ids(&[1, 2, 3, 4])));
}

#[test]
fn followers_learn_without_a_vote() {
    let mut case = Case::to(&[1, 2, 4]);
    case.followers = ids(&[3, 5]);
    assert_eq!(case.next(), Step::AddLearner(id(5)));
    case = case.learning(5, 9_000).learning(4, 0);
    assert_eq!(case.next(), Step::SetVoters(ids(&[1, 2, 4])), "node 3 remains as a learner");
    let mut done = Case::to(&[1, 2, 3]).learning(5, 9_000);
    done.followers = ids(&[5]);
    assert_eq!(done.next(), Step::Done);
    done.followers = ids(&[4, 5]);
    let absent = done.lost(4).next();
    assert!(is_blocked(&absent, "node 4 cannot be reached"), "{absent:?}");
}

#[test]
fn waits_for_an_unreachable_replica() {
    let absent = Case::to(&[1, 2, 3, 4]).lost(4).next();
    assert!(is_blocked(&absent, "node 4 cannot be reached"), "{absent:?}");
    let lost = Case::to(&[1, 2, 3, 4]).learning(4, 5_000).lost(4).next();
    assert!(is_blocked(&lost, "node 4 cannot be reached"), "{lost:?}");
}

#[test]
fn adds_the_replacement_before_it_removes_the_lost_replica() {
    let case = Case::to(&[1, 2, 4]).lost(3);
    assert_eq!(case.next(), Step::AddLearner(id(4)));
    assert_eq!(case.learning(4, 0).next(), Step::SetVoters(ids(&[1, 2, 4])));
}

#[test]
fn finishes_the_change_of_a_previous_leader_first() {
    let mut joint = Case::to(&[1, 2, 3]);
    joint.membership.configs = vec![ids(&[1, 2, 3]), ids(&[1, 2, 4])];
    assert_eq!(joint.next(), Step::LeaveJoint);
    joint.membership.is_committed = false;
    let step = joint.next();
    assert!(matches!(step, Step::Wait { phase: ChangePhase::ChangingVoters, .. }), "{step:?}");
}

/// A leader that left the shard with a joint change of its predecessor, and that the target has
/// again since the move was cancelled.
#[test]
fn removed_leader_leaves_the_next_step_to_its_successor() {
    for target in [&[1, 2, 3], &[2, 3, 4], &[2, 3, 5]] {
        let mut case = Case::to(target);
        case.membership.configs = vec![ids(&[2, 3, 4])];
        let step = case.next();
        assert!(matches!(step, Step::Wait { phase: ChangePhase::ChangingVoters, .. }), "{step:?}");
    }
}

#[test]
fn drops_learners_that_are_not_in_the_target() {
    let abandoned = Case::to(&[1, 2, 3]).learning(4, 0).next();
    assert_eq!(abandoned, Step::DropLearners(ids(&[4])));
}

#[test]
fn voters_change_only_with_a_majority_of_the_new_voters() {
    assert_eq!(Case::to(&[1, 2]).next(), Step::SetVoters(ids(&[1, 2])));
    let lost = Case::to(&[1, 2]).lost(2).next();
    assert!(is_blocked(&lost, "leave 1 of 2 voters reachable"), "{lost:?}");
    let lagging = Case::to(&[1, 2]).lagging(2).next();
    assert!(is_blocked(&lagging, "leave 1 of 2 voters reachable"), "{lagging:?}");
}

#[test]
fn leaving_leader_transfers_to_the_most_caught_up_remaining_voter() {
    let mut case = Case::to(&[2, 3]);
    case.lags.insert(id(2), 9);
    assert_eq!(case.next(), Step::TransferLeadership(id(3)));
    // If no replica in the target votes yet, the leader first votes together with all of them.
    let case = Case::to(&[4, 5]).learning(4, 0).learning(5, 0);
    assert_eq!(case.next(), Step::SetVoters(ids(&[1, 4, 5])));
}
