//! Tests of the decisions about logs that cannot be replayed.

use super::*;
use crate::raft::replica_id;

#[test]
fn repairs_do_not_use_up_attempts() {
    for opening in [Shard0Opening::Start, Shard0Opening::Reopen] {
        let (mut attempt, mut repairs) = (1, 0);
        for _ in 0..REPAIRS_MAX {
            let step = UnreplayedStep::OpenAgain(1);
            let action = after_step(step, opening, &mut attempt, &mut repairs);
            assert_eq!(action, Shard0Action::OpenAgain);
            attempt += 1;
        }
        let step = UnreplayedStep::OpenAgain(1);
        let action = after_step(step, opening, &mut attempt, &mut repairs);
        assert_eq!((action, attempt), (Shard0Action::KeepsMeetingDamage, 1));
    }
}

#[test]
fn running_node_does_not_give_up_log_because_repair_waits() {
    let after = |opening: Shard0Opening, step: UnreplayedStep, mut attempt: u32| {
        after_step(step, opening, &mut attempt, &mut 0)
    };
    let wait = || UnreplayedStep::Wait("no leader".to_owned());
    let no_leader = || UnreplayedStep::WaitForLeader("no leader".to_owned());
    let (start, reopen) = (Shard0Opening::Start, Shard0Opening::Reopen);
    let pause = Shard0Action::Pause("no leader".to_owned());
    assert_eq!(after(reopen, wait(), 1), pause);
    assert_eq!(after(start, wait(), start.attempts() - 1), pause);
    let later = Shard0Action::Later("no leader".to_owned());
    assert_eq!(after(reopen, wait(), reopen.attempts()), later);
    assert_eq!(after(start, wait(), start.attempts()), Shard0Action::GiveUpLog);
    assert_eq!(after(reopen, UnreplayedStep::GiveUpLog, 1), Shard0Action::GiveUpLog);
    assert_eq!(after(reopen, no_leader(), reopen.attempts()), later);
}

#[test]
fn shortage_of_this_node_does_not_give_up_its_log() {
    let full = || helix_wal::Error::DiskFull { free_bytes: 0, needed_bytes: 1 };
    for opening in [Shard0Opening::Start, Shard0Opening::Reopen] {
        let mut attempt = opening.attempts() - 1;
        let counted = attempt;
        for _ in 0..10 * opening.attempts() {
            attempt += 1;
            let step = UnreplayedStep::Shortage(full());
            let action = after_step(step, opening, &mut attempt, &mut 0);
            let expected = match opening {
                Shard0Opening::Reopen => Shard0Action::Later(full().to_string()),
                _ => Shard0Action::Pause(full().to_string()),
            };
            assert_eq!((action, attempt), (expected, counted));
        }
    }
}

/// A node of a cluster must not keep a damaged shard because shard 0 was stopped for a moment.
#[test]
fn damage_is_final_only_for_single_node() {
    let damaged = || Error::CorruptLog { what: "its state is damaged".to_owned() };
    let error = retried_unless_single(damaged(), Some(false));
    assert!(matches!(error, Error::CorruptLog { .. }), "{error}");
    for has_others in [None, Some(true)] {
        let error = retried_unless_single(damaged(), has_others);
        assert!(matches!(error, Error::Unusable { .. }), "{error}");
    }
}

fn voter(node: u64, term: u64) -> ReplicaStatusReport {
    let voters = [1, 2, 3].map(|node| replica_id(node, 1)).to_vec();
    let replica_id = replica_id(node, 1);
    let is_settled = true;
    ReplicaStatusReport { replica_id, term, voters, is_settled, ..Default::default() }
}

fn leader(node: u64, term: u64) -> ReplicaStatusReport {
    ReplicaStatusReport { is_leader: true, ..voter(node, term) }
}

/// Node 2 led term 6 with the vote of node 1; node 3 still believes that it leads term 5.
#[test]
fn stale_leader_plus_two_unreplayed_logs_waits() {
    let held = |node| ReplicaStatusReport { is_damaged: true, ..voter(node, 6) };
    for (own, other) in [(1, 2), (2, 1)] {
        for is_start in [true, false] {
            let found = |own_term, reports: &[ReplicaStatusReport]| {
                current_leader(replica_id(own, 1), own_term, reports, is_start).is_ok()
            };
            assert!(!found(6, &[leader(3, 5), held(other)]));
            assert!(!found(6, &[leader(3, 5)]), "its own vote is later");
            assert!(!found(5, &[leader(3, 5), held(other)]), "the other's is later");
            let ended = ReplicaStatusReport { synced_term: 6, ..held(other) };
            let ended = ReplicaStatusReport { term: 5, ..ended };
            assert!(!found(5, &[leader(3, 5), ended]), "an entry is later");
            // At a start, the leader must not have the only other whole log.
            assert_eq!(found(6, &[leader(3, 6), held(other)]), !is_start);
            assert!(found(6, &[leader(3, 6), voter(other, 6)]));
        }
    }
}

#[test]
fn start_counts_only_whole_voters_in_the_term_of_the_leader() {
    let found = |reports: &[ReplicaStatusReport]| {
        current_leader(replica_id(1, 1), 5, reports, true).is_ok()
    };
    assert!(found(&[leader(2, 6), voter(3, 6)]));
    assert!(!found(&[leader(2, 6), voter(3, 5)]));
    assert!(!found(&[leader(2, 6), voter(4, 6)]), "no voter");
    assert!(!found(&[leader(2, 6), ReplicaStatusReport { in_repair: true, ..voter(3, 6) }]));
    let pair = vec![replica_id(1, 1), replica_id(2, 1)];
    assert!(found(&[ReplicaStatusReport { voters: pair, ..leader(2, 6) }]), "of two voters");
}

/// Another node may give up its log as well, and the two could be a majority.
#[test]
fn start_does_not_give_up_log_while_no_leader_responds() {
    let (start, mut attempt) = (Shard0Opening::Start, 0);
    let pause = Shard0Action::Pause("no leader".to_owned());
    for _ in 0..10 * start.attempts() {
        attempt += 1;
        let step = UnreplayedStep::WaitForLeader("no leader".to_owned());
        assert_eq!(after_step(step, start, &mut attempt, &mut 0), pause);
    }
    assert!(attempt >= FETCH_ATTEMPTS, "entries may be trimmed everywhere");
}
