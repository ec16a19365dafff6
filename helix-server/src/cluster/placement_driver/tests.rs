//! Each state in which a move does not go on has a reason.

use super::*;
use crate::cluster::placement::PlacedShard;

fn report(moving: ShardMove, progress: Vec<ShardProgress>, is_reachable: bool) -> PlacementReport {
    let replicas: BTreeMap<u64, u32> = [(1, 1), (2, 1), (3, 1)].into();
    let shard = PlacedShard { replicas, moving: Some(moving), ..PlacedShard::default() };
    let placement = ReplicaPlacement { replicas: 3, shards: [(1, shard)].into(), is_paused: false };
    let members = Members { placement: Some(placement), ..Members::default() };
    let reachable = if is_reachable { 1..=4 } else { 1..=3 };
    let (plan, reachable, unwritable) = (Plan::default(), reachable.collect(), BTreeMap::new());
    let open = BTreeSet::new();
    let split_pauses = BTreeMap::new();
    PlacementReport { members, open, plan, progress, reachable, unwritable, split_pauses }
}

#[test]
fn every_move_that_does_not_go_on_has_a_reason() {
    let row = |version, phase, blocked| ShardProgress::new(1, version, phase, blocked);
    let none = Obstacle::default;
    let reports: [Option<ShardProgress>; 6] = [
        None,
        Some(row(0, ChangePhase::Pending, none())),
        Some(row(7, ChangePhase::Pending, Obstacle::paused())),
        Some(row(7, ChangePhase::CatchingUp, none())),
        Some(row(7, ChangePhase::ChangingVoters, none())),
        Some(row(7, ChangePhase::Done, none())),
    ];
    for progress in reports {
        for bits in 0..8 {
            let [is_created, is_cancelled, is_reachable] =
                [bits & 1 != 0, bits & 2 != 0, bits & 4 != 0];
            let (from, to, generation) = (Some(2), Some(4), 5);
            let reason = MoveReason::Manual;
            let moving =
                ShardMove { id: 7, from, to, generation, is_created, is_cancelled, reason };
            let rows = progress.iter().cloned().collect();
            let found = report(moving, rows, is_reachable).progress_of(1).unwrap();
            let code = found.blocked.code.as_str();
            let context = format!("{moving:?} {progress:?} {is_reachable}: {found:?}");
            let reported = progress.as_ref().filter(|row| row.version > 0);
            let is_copied = is_cancelled || is_created;
            let expected = match reported {
                _ if !is_copied && !is_reachable => "NODE_UNREACHABLE",
                _ if !is_copied => "REPLICA_NOT_CREATED",
                None => "NO_LEADER",
                Some(row) if !row.blocked.is_none() => "MOVES_PAUSED",
                Some(row) if row.phase == ChangePhase::Done => "",
                Some(_) if !is_cancelled && !is_reachable => "NODE_UNREACHABLE",
                Some(_) => "",
            };
            assert_eq!(code, expected, "{context}");
            assert_eq!(found.blocked.is_none(), code.is_empty(), "{context}");
            assert_eq!(found.blocked.next_step.is_empty(), code.is_empty(), "{context}");
        }
    }
}

#[test]
fn full_disk_of_the_target_is_a_reason() {
    let (from, to, generation, reason) = (Some(2), Some(4), 5, MoveReason::Spread);
    let (is_created, is_cancelled) = (true, false);
    let moving = ShardMove { id: 7, from, to, generation, is_created, is_cancelled, reason };
    let row = ShardProgress::new(1, 7, ChangePhase::CatchingUp, Obstacle::default());
    let mut found = report(moving, vec![ShardProgress { bytes: 4_096, ..row }], true);
    found.unwritable = [(1, "the disk is full".to_owned())].into();
    let blocked = found.progress_of(1).unwrap().blocked;
    assert_eq!(blocked.code, "NO_SPACE");
    assert!(blocked.what.contains("node 4 accepts no entries: the disk is full"), "{blocked}");
    assert!(blocked.what.contains("4096 bytes"), "{blocked}");
}
