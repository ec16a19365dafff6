//! Checks the rule on all small states, and runs each in a model until nothing changes.

use super::*;
use crate::raft::replica_id;

const LAST: LogId = LogId { term: 3, index: 9_000 };

/// State of a voter in the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Voter {
    Whole,
    /// Damaged in a separate block, in a sealed segment.
    DamagedHere,
    /// Damaged in the same block as all other voters of this kind.
    DamagedShared,
    /// Damaged in a separate block that only a new log replaces.
    NeedsNewLog,
    /// Like [`Self::DamagedHere`], but above the checkpoint, where a start met the damage. The
    /// voter neither votes nor serves, but sends entries to repairs.
    Unreplayed,
    Behind,
    Fetching,
    InRepair,
    /// Its node runs a replica of a later generation, an empty learner.
    Replaced,
    Gone,
}

const STATES: [Voter; 10] = [
    Voter::Whole,
    Voter::DamagedHere,
    Voter::DamagedShared,
    Voter::NeedsNewLog,
    Voter::Unreplayed,
    Voter::Behind,
    Voter::Fetching,
    Voter::InRepair,
    Voter::Replaced,
    Voter::Gone,
];

/// A block of the log. Only voter `n` may be damaged in `Own(n)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Own(usize),
    Shared,
    /// The last acknowledged entry.
    Tail,
}

#[derive(Debug, Clone)]
struct Model {
    voters: Vec<Voter>,
    leader: Option<usize>,
}

fn id(voter: usize) -> ReplicaId {
    replica_id(voter as u64 + 1, 1)
}

fn number(id: ReplicaId) -> usize {
    usize::try_from(node_of(id)).unwrap() - 1
}

impl Model {
    fn blocks(&self) -> impl Iterator<Item = Block> + use<> {
        (0..self.voters.len()).map(Block::Own).chain([Block::Shared, Block::Tail])
    }

    fn has(&self, voter: usize, block: Block) -> bool {
        match self.voters[voter] {
            Voter::Whole => true,
            Voter::DamagedHere | Voter::NeedsNewLog | Voter::Unreplayed => {
                block != Block::Own(voter)
            }
            Voter::DamagedShared => block != Block::Shared,
            Voter::Behind => block != Block::Tail,
            // Fetched records are not part of a log yet.
            Voter::Fetching | Voter::InRepair | Voter::Replaced | Voter::Gone => false,
        }
    }

    fn votes(&self, voter: usize) -> bool {
        let silent = [Voter::InRepair, Voter::Replaced, Voter::Gone, Voter::Unreplayed];
        !silent.contains(&self.voters[voter])
    }

    fn holders(&self, block: Block) -> usize {
        (0..self.voters.len()).filter(|voter| self.has(*voter, block)).count()
    }

    fn majority(&self) -> usize {
        self.voters.len() / 2 + 1
    }

    fn has_quorum(&self) -> bool {
        (0..self.voters.len()).filter(|voter| self.votes(*voter)).count() >= self.majority()
    }

    fn reports(&self) -> BTreeMap<ReplicaId, VoterReport> {
        let whole =
            VoterReport { last: LAST, is_damaged: false, in_repair: false, is_fetching: false };
        let behind = LogId { index: 5, ..LAST };
        let report = |(number, voter): (usize, &Voter)| {
            let report = match voter {
                Voter::Whole => whole,
                Voter::DamagedHere
                | Voter::DamagedShared
                | Voter::NeedsNewLog
                | Voter::Unreplayed => VoterReport { is_damaged: true, ..whole },
                Voter::Behind => VoterReport { last: behind, ..whole },
                Voter::Fetching => VoterReport { last: behind, is_fetching: true, ..whole },
                Voter::InRepair => VoterReport { last: behind, in_repair: true, ..whole },
                // The learner on this node answers under its own id.
                Voter::Replaced => {
                    return Some((
                        replica_id(number as u64 + 1, 2),
                        VoterReport { last: LogId::default(), ..whole },
                    ));
                }
                Voter::Gone => return None,
            };
            Some((id(number), report))
        };
        self.voters.iter().enumerate().filter_map(report).collect()
    }

    fn kind(&self, voter: usize) -> Option<DamageKind> {
        match self.voters[voter] {
            Voter::DamagedHere | Voter::DamagedShared | Voter::Unreplayed => {
                Some(DamageKind::InPlace)
            }
            Voter::NeedsNewLog => Some(DamageKind::NeedsNewLog),
            _ => None,
        }
    }

    fn step_of(&self, voter: usize) -> Option<RepairStep> {
        let own = DamagedReplica {
            id: id(voter),
            is_leader: self.leader == Some(voter),
            kind: self.kind(voter)?,
            last: LAST,
        };
        let configs = [(0..self.voters.len()).map(id).collect()];
        let mut reports = self.reports();
        // A replica does not ask itself.
        reports.remove(&own.id);
        Some(next_step(&own, &configs, &reports))
    }

    /// Checks that a step takes no majority away, and carries it out. Returns whether it changed
    /// anything.
    fn take(&mut self, voter: usize, step: &RepairStep) -> bool {
        match step {
            RepairStep::Wait(why) => {
                assert!(!why.is_empty());
                false
            }
            RepairStep::TransferTo(to) => {
                let to = number(*to);
                assert_eq!(self.voters[to], Voter::Whole, "{self:?}: {voter} to {to}");
                self.leader = Some(to);
                true
            }
            RepairStep::RepairInPlace(from) => {
                assert!(!from.is_empty() && !from.contains(&id(voter)), "{self:?}: {from:?}");
                let damaged = self.blocks().filter(|block| !self.has(voter, *block));
                let is_fetched = |block| from.iter().any(|source| self.has(number(*source), block));
                let repaired = damaged.into_iter().all(is_fetched);
                if repaired {
                    self.voters[voter] = Voter::Whole;
                }
                repaired
            }
            RepairStep::GiveUpLog => {
                let before = self.clone();
                self.voters[voter] = Voter::InRepair;
                for block in before.blocks() {
                    let (had, has) = (before.holders(block), self.holders(block));
                    assert!(
                        had < before.majority() || has >= before.majority(),
                        "{before:?}: {voter} takes the majority of {block:?} away"
                    );
                }
                // So the rule never waits for a leader that cannot be elected.
                assert!(self.has_quorum(), "{before:?}: {voter} stops it");
                true
            }
        }
    }

    /// Runs one event that does not depend on the decision: an election, or a lagging voter that
    /// catches up with a leader.
    fn proceed(&mut self) -> bool {
        let can_lead =
            |model: &Self, voter: usize| model.votes(voter) && model.has(voter, Block::Tail);
        if !self.has_quorum() {
            self.leader = None;
            return false;
        }
        if self.leader.is_none_or(|leader| !can_lead(self, leader)) {
            self.leader = (0..self.voters.len()).find(|voter| can_lead(self, *voter));
        }
        let Some(leader) = self.leader.filter(|leader| self.voters[*leader] == Voter::Whole) else {
            return false;
        };
        let lagging = [Voter::Behind, Voter::Fetching, Voter::InRepair];
        let next =
            (0..self.voters.len()).find(|it| *it != leader && lagging.contains(&self.voters[*it]));
        if let Some(next) = next {
            self.voters[next] = Voter::Whole;
        }
        next.is_some()
    }
}

/// Calls `check` with every state of `count` voters and every leader that it may have.
fn for_all_states(count: usize, mut check: impl FnMut(Model)) {
    let states = STATES.len();
    for code in 0..states.pow(u32::try_from(count).unwrap()) {
        let voters: Vec<Voter> = (0..count)
            .map(|at| STATES[code / states.pow(u32::try_from(at).unwrap()) % states])
            .collect();
        let leaders = (0..count).filter(|at| {
            matches!(
                voters[*at],
                Voter::Whole | Voter::DamagedHere | Voter::DamagedShared | Voter::NeedsNewLog
            )
        });
        let leaders: Vec<Option<usize>> = leaders.map(Some).chain([None]).collect();
        // With five voters the order of equal states does not matter: only sorted ones are tried.
        if count > 3 && !voters.is_sorted_by_key(|it| STATES.iter().position(|other| other == it)) {
            continue;
        }
        for leader in leaders {
            check(Model { voters: voters.clone(), leader });
        }
    }
}

#[test]
fn no_step_takes_a_majority_away() {
    for count in [2, 3, 5] {
        for_all_states(count, |model| {
            for voter in 0..count {
                if let Some(step) = model.step_of(voter) {
                    model.clone().take(voter, &step);
                }
            }
        });
    }
}

#[test]
fn every_block_with_a_whole_copy_is_repaired() {
    for count in [2, 3, 5] {
        for_all_states(count, |start| {
            let mut model = start.clone();
            for _ in 0..4 * count {
                let mut is_changed = model.proceed();
                for voter in 0..count {
                    if let Some(step) = model.step_of(voter) {
                        is_changed |= model.take(voter, &step);
                    }
                }
                if !is_changed {
                    break;
                }
            }
            for voter in 0..count {
                if model.kind(voter) != Some(DamageKind::InPlace) {
                    continue;
                }
                let damaged: Vec<Block> =
                    model.blocks().filter(|block| !model.has(voter, *block)).collect();
                let has_copy = |block: &Block| start.holders(*block) > 0;
                assert!(!damaged.iter().all(has_copy), "{start:?} ends as {model:?}");
            }
        });
    }
}

/// Each step is needed in some state, so the model is not vacuous.
#[test]
fn every_step_is_taken_somewhere() {
    let mut seen = [0_u32; 4];
    for_all_states(3, |model| {
        for voter in 0..3 {
            match model.step_of(voter) {
                Some(RepairStep::Wait(_)) => seen[0] += 1,
                Some(RepairStep::RepairInPlace(_)) => seen[1] += 1,
                Some(RepairStep::TransferTo(_)) => seen[2] += 1,
                Some(RepairStep::GiveUpLog) => seen[3] += 1,
                None => {}
            }
        }
    });
    assert!(seen.iter().all(|count| *count > 0), "{seen:?}");
}

/// Two logs of three cannot be replayed, and the third replica is lost permanently. There is no
/// leader and no majority, but each of the two has the blocks that the other lacks.
#[test]
fn logs_that_cannot_be_replayed_repair_each_other_without_a_leader() {
    for lost in [Voter::Gone, Voter::Replaced, Voter::InRepair] {
        let voters = vec![Voter::Unreplayed, Voter::Unreplayed, lost];
        let mut model = Model { voters, leader: None };
        for voter in [0, 1] {
            let step = model.step_of(voter).unwrap();
            assert!(model.take(voter, &step), "{model:?}: {voter} takes {step:?}");
        }
        assert!(model.has_quorum(), "{model:?}");
    }
}

fn step(own: DamagedReplica, reports: &[(ReplicaId, VoterReport)]) -> RepairStep {
    next_step(&own, &[[id(0), id(1), id(2)].into()], &reports.iter().copied().collect())
}

const WHOLE: VoterReport =
    VoterReport { last: LAST, is_damaged: false, in_repair: false, is_fetching: false };

fn damaged(is_leader: bool, kind: DamageKind) -> DamagedReplica {
    DamagedReplica { id: id(0), is_leader, kind, last: LAST }
}

#[test]
fn successor_of_a_lost_replica_does_not_count_for_it() {
    let learner = replica_id(2, 2);
    let reports = [(learner, WHOLE), (id(2), WHOLE)];
    let waits = step(damaged(false, DamageKind::NeedsNewLog), &reports);
    assert!(
        matches!(&waits, RepairStep::Wait(why) if why.contains("1 of 2 other voters")),
        "{waits:?}"
    );
    let in_place = step(damaged(false, DamageKind::InPlace), &reports);
    assert_eq!(in_place, RepairStep::RepairInPlace(vec![learner, id(2)]), "it may have entries");
    let to = step(damaged(true, DamageKind::InPlace), &reports[..1]);
    assert_eq!(to, RepairStep::RepairInPlace(vec![learner]), "a learner does not take over");
}

#[test]
fn voter_that_is_behind_does_not_count() {
    let behind = VoterReport { last: LogId { index: LAST.index - 1, ..LAST }, ..WHOLE };
    let reports = [(id(1), behind), (id(2), WHOLE)];
    let waits = step(damaged(false, DamageKind::NeedsNewLog), &reports);
    assert!(
        matches!(&waits, RepairStep::Wait(why) if why.contains("node 2 is behind")),
        "{waits:?}"
    );
    let later = VoterReport { last: LogId { term: LAST.term + 1, index: 1 }, ..WHOLE };
    let reports = [(id(1), later), (id(2), WHOLE)];
    assert_eq!(step(damaged(false, DamageKind::NeedsNewLog), &reports), RepairStep::GiveUpLog);
    let fetching = VoterReport { is_fetching: true, ..WHOLE };
    let reports = [(id(1), fetching), (id(2), WHOLE)];
    let waits = step(damaged(false, DamageKind::NeedsNewLog), &reports);
    assert!(matches!(&waits, RepairStep::Wait(why) if why.contains("node 2 fetches")), "{waits:?}");
}

#[test]
fn damaged_leader_transfers_to_whole_replica_although_another_is_in_repair() {
    let in_repair = VoterReport { in_repair: true, ..WHOLE };
    let reports = [(id(1), in_repair), (id(2), WHOLE)];
    assert_eq!(step(damaged(true, DamageKind::InPlace), &reports), RepairStep::TransferTo(id(2)));
    assert_eq!(
        step(damaged(true, DamageKind::NeedsNewLog), &reports),
        RepairStep::TransferTo(id(2))
    );
    let damage = VoterReport { is_damaged: true, ..WHOLE };
    let reports = [(id(1), in_repair), (id(2), damage)];
    let in_place = step(damaged(true, DamageKind::InPlace), &reports);
    assert_eq!(in_place, RepairStep::RepairInPlace(vec![id(1), id(2)]));
}

#[test]
fn both_sets_of_voters_need_a_majority_during_a_change() {
    let own = damaged(false, DamageKind::NeedsNewLog);
    let reports = BTreeMap::from([(id(1), WHOLE), (id(2), WHOLE), (id(3), WHOLE)]);
    let before: BTreeSet<_> = [id(0), id(1), id(2)].into();
    let after: BTreeSet<_> = [id(0), id(4), id(3)].into();
    let joint = next_step(&own, &[before.clone(), after], &reports);
    assert!(matches!(joint, RepairStep::Wait(_)), "{joint:?}");
    let after: BTreeSet<_> = [id(0), id(1), id(3)].into();
    assert_eq!(next_step(&own, &[before, after], &reports), RepairStep::GiveUpLog);
    assert!(matches!(next_step(&own, &[], &reports), RepairStep::Wait(_)));
}
