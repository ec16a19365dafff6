//! What a shard's leader does next, case by case.

use super::*;
use crate::raft::replica_id;

fn id(node: u64) -> ReplicaId {
    replica_id(node, 1)
}

fn ids(nodes: &[u64]) -> BTreeSet<ReplicaId> {
    nodes.iter().copied().map(id).collect()
}

/// A shard that node 1 leads, with voters 1, 2 and 3 that are all well.
struct Case {
    membership: Membership,
    target: BTreeSet<ReplicaId>,
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
        let Self { membership, target, reached, lags } = self;
        Sight { own: id(1), membership, target, reached, lags }.next()
    }
}

fn is_blocked(step: &Step, words: &str) -> bool {
    matches!(step, Step::Wait { blocked, .. } if blocked.contains(words))
}

#[test]
fn a_new_replica_learns_before_it_votes() {
    assert_eq!(Case::to(&[1, 2, 3]).next(), Step::Done);
    assert_eq!(Case::to(&[1, 2, 3, 4]).next(), Step::AddLearner(id(4)));
    let behind = Case::to(&[1, 2, 3, 4]).learning(4, 5_000).next();
    let wait = Step::Wait { phase: Phase::CatchingUp, entries: 5_000, blocked: String::new() };
    assert_eq!(behind, wait);
    let ready = Case::to(&[1, 2, 3, 4]).learning(4, 10);
    assert_eq!(ready.next(), Step::SetVoters(ids(&[1, 2, 3, 4])));
}

#[test]
fn a_replica_that_cannot_be_reached_is_waited_for() {
    let absent = Case::to(&[1, 2, 3, 4]).lost(4).next();
    assert!(is_blocked(&absent, "node 4 cannot be reached"), "{absent:?}");
    let lost = Case::to(&[1, 2, 3, 4]).learning(4, 5_000).lost(4).next();
    assert!(is_blocked(&lost, "node 4 cannot be reached"), "{lost:?}");
}

#[test]
fn a_replacement_comes_before_the_lost_one_goes() {
    let case = Case::to(&[1, 2, 4]).lost(3);
    assert_eq!(case.next(), Step::AddLearner(id(4)));
    assert_eq!(case.learning(4, 0).next(), Step::SetVoters(ids(&[1, 2, 4])));
}

#[test]
fn what_another_leader_began_is_finished_first() {
    let mut joint = Case::to(&[1, 2, 3]);
    joint.membership.configs = vec![ids(&[1, 2, 3]), ids(&[1, 2, 4])];
    assert_eq!(joint.next(), Step::LeaveJoint);
    joint.membership.is_committed = false;
    let step = joint.next();
    assert!(matches!(step, Step::Wait { phase: Phase::ChangingVoters, .. }), "{step:?}");
}

#[test]
fn learners_that_nobody_wants_any_more_are_dropped() {
    let given_up = Case::to(&[1, 2, 3]).learning(4, 0).next();
    assert_eq!(given_up, Step::DropLearners(ids(&[4])));
}

#[test]
fn voters_do_not_change_without_a_majority_of_those_to_come() {
    assert_eq!(Case::to(&[1, 2]).next(), Step::SetVoters(ids(&[1, 2])));
    let lost = Case::to(&[1, 2]).lost(2).next();
    assert!(is_blocked(&lost, "leave 1 of 2 voters reachable"), "{lost:?}");
    let lagging = Case::to(&[1, 2]).lagging(2).next();
    assert!(is_blocked(&lagging, "leave 1 of 2 voters reachable"), "{lagging:?}");
}

#[test]
fn a_leader_that_goes_hands_over_to_the_one_that_stays_and_lacks_least() {
    let mut case = Case::to(&[2, 3]);
    case.lags.insert(id(2), 9);
    assert_eq!(case.next(), Step::HandOver(id(3)));
    // Where nobody that stays votes yet, they all vote together first.
    let case = Case::to(&[4, 5]).learning(4, 0).learning(5, 0);
    assert_eq!(case.next(), Step::SetVoters(ids(&[1, 4, 5])));
}
