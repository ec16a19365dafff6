//! Tests of splits: single cases, then random logs of several shards against one shard without
//! splits.

use std::collections::BTreeMap;

use rand::RngExt;

use super::super::testing::{batch_head, seeded};
use super::super::{
    BatchHead, FencingToken, Head, PartitionRun, PartitionSettings, ProducerStamp, Refusal,
    ShardCommand, StateLimits, TopicInfo, Verdict,
};
use super::*;

const TOPIC: u64 = 2;

/// A shard and the index of its last entry.
#[derive(Clone)]
struct Shard {
    state: ShardState,
    index: u64,
    effects: Effects,
}

impl Shard {
    /// A topic with the partitions 1..=6.
    fn new() -> Self {
        let state = ShardState::new(StateLimits::default());
        let mut shard = Self { state, index: 0, effects: Effects::default() };
        shard.create(1, 6);
        shard
    }

    fn create(&mut self, first_id: u64, count: u32) {
        let first_number = u32::try_from(first_id).unwrap() - 1;
        let run = PartitionRun { first_id, first_number, stride: 1, count };
        let (cluster_version, topic_id, runs) = (1, TOPIC, vec![run]);
        let settings = PartitionSettings { version: 1, ..PartitionSettings::default() };
        let create = ShardCommand::CreatePartitions { cluster_version, topic_id, runs, settings };
        self.command(create);
    }

    fn apply(&mut self, head: &Head) -> Verdict {
        self.index += 1;
        self.effects.clear();
        self.state.apply(self.index, head, &mut self.effects)
    }

    fn command(&mut self, command: ShardCommand) -> Verdict {
        self.apply(&Head::Shard(command))
    }

    fn append(&mut self, batch: BatchHead) -> Verdict {
        self.apply(&Head::Batch(batch))
    }

    fn split(&mut self, id: u64, parts: u64, ids_below: u64) {
        let rule = SplitRule { parts, turn: 0, ids_below };
        assert_eq!(self.command(ShardCommand::Split { id, target: 9, rule }), Verdict::Changed);
    }

    /// Returns the new shard of the split in progress.
    fn child(&self) -> Self {
        let split = self.state.split().unwrap();
        let state = ShardState::decode(&split.state).unwrap();
        Self { state, index: split.index, effects: Effects::default() }
    }

    fn ids(&self) -> Vec<u64> {
        self.state.partitions().map(|partition| partition.id.0).collect()
    }

    fn round_trip(&mut self) {
        let decoded = ShardState::decode(&self.state.encode()).unwrap();
        assert_eq!(decoded, self.state);
        self.state = decoded;
    }
}

fn stamped(partition: u64, record_count: u32, first_sequence: u64) -> BatchHead {
    let producer = Some(ProducerStamp::new(9, 0, first_sequence));
    BatchHead { producer, ..batch_head(partition, record_count) }
}

fn is_appended_at(verdict: &Verdict, offset: u64) -> bool {
    matches!(verdict, Verdict::Appended { first_offset, .. } if *first_offset == offset)
}

fn is_unknown(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Refused(Refusal::UnknownPartition { .. }))
}

#[test]
fn new_shard_continues_with_offsets_producers_and_tokens() {
    let mut shard = Shard::new();
    let token = FencingToken::new("t").unwrap();
    assert!(is_appended_at(&shard.append(stamped(1, 3, 0)), 0));
    assert!(is_appended_at(&shard.append(stamped(2, 5, 0)), 0));
    let partition = PartitionId(1);
    shard.command(ShardCommand::SetFencingToken {
        partition,
        expected: None,
        token: token.clone(),
    });
    // Topic 2: positions 0, 2 and 4 move.
    shard.split(10, 2, 7);
    shard.round_trip();
    assert!(is_unknown(&shard.append(stamped(1, 1, 3))), "sealed");
    let early = shard.state.early_verdict(&batch_head(1, 1));
    assert!(is_unknown(&early.unwrap()), "known before apply");
    assert!(is_appended_at(&shard.append(stamped(2, 1, 5)), 5));
    let duplicate = shard.append(stamped(1, 3, 0));
    assert!(matches!(duplicate, Verdict::Duplicate { first_offset: 0, .. }), "{duplicate:?}");
    let mut child = shard.child();
    child.round_trip();
    assert_eq!(child.ids(), [1, 3, 5]);
    assert!(matches!(child.append(stamped(1, 3, 0)), Verdict::Duplicate { first_offset: 0, .. }));
    assert_eq!(child.state.partition(partition).unwrap().fencing_token, token);
    assert!(is_appended_at(&child.append(stamped(1, 1, 3)), 3));
    shard.command(ShardCommand::FinishSplit { id: 10 });
    assert_eq!(shard.effects.dropped, [1, 3, 5].map(PartitionId));
    shard.round_trip();
    assert_eq!(shard.ids(), [2, 4, 6]);
    assert!(is_unknown(&shard.append(stamped(1, 1, 4))));
    for shard in [&mut shard, &mut child] {
        let before = shard.ids();
        shard.create(1, 6);
        assert_eq!(shard.ids(), before, "a partition never returns to a shard");
        shard.create(7, 1);
        assert_eq!(shard.ids().last(), Some(&7), "a later one is new");
    }
}

/// The positions of partitions depend on the splits before. So replicas are copied by the cluster's
/// state, which knows that those have ended.
#[test]
fn replica_behind_the_split_before_would_move_other_partitions() {
    let mut topic = TopicInfo {
        id: TOPIC,
        name: "orders".to_owned(),
        partition_count: 0,
        replication_factor: 1,
        settings: PartitionSettings::default(),
        created_at_us: 0,
        shards: vec![1],
        extents: Vec::new(),
    };
    topic.extend(1, 6, Vec::new());
    let mut shard = Shard::new();
    shard.split(10, 2, 7);
    let behind = shard.clone();
    shard.command(ShardCommand::FinishSplit { id: 10 });
    let rule = SplitRule { parts: 2, turn: 0, ids_below: 7 };
    topic.split_off(1, 9, rule);
    shard.split(11, 2, 7);
    assert_eq!(shard.child().ids(), [2, 6]);
    assert!(topic.moved_by(1, rule).eq([2, 6].map(PartitionId)));
    assert!(behind.state.moved_by(rule).into_iter().eq([1, 3, 5].map(PartitionId)));
}

#[test]
fn sealed_partitions_take_no_changes() {
    let mut shard = Shard::new();
    shard.append(stamped(1, 3, 0));
    shard.split(10, 2, 7);
    let state = shard.child().state;
    let trim = |ids: &[u64]| ShardCommand::Trim {
        starts: ids.iter().map(|id| (PartitionId(*id), 2)).collect(),
    };
    assert!(is_unknown(&shard.command(trim(&[1]))));
    assert_eq!(shard.command(trim(&[1, 2])), Verdict::Changed);
    let (partition, expected) = (PartitionId(1), None);
    let token = FencingToken::new("t").unwrap();
    assert!(is_unknown(&shard.command(ShardCommand::SetFencingToken {
        partition,
        expected,
        token
    })));
    assert_eq!(shard.state.partition(partition).unwrap().log_start, 0);
    assert_eq!(shard.child().state, state);
    shard.split(11, 2, 7);
    assert_eq!(shard.state.split().unwrap().id, 10, "one at a time");
}

#[test]
fn cancelled_split_never_begins_again() {
    let mut shard = Shard::new();
    shard.append(stamped(1, 3, 0));
    shard.split(10, 2, 7);
    shard.command(ShardCommand::CancelSplit { id: 10 });
    assert!(shard.state.split().is_none());
    assert!(is_appended_at(&shard.append(stamped(1, 1, 3)), 3));
    // A copy that another leader had proposed.
    shard.split(10, 2, 7);
    shard.round_trip();
    assert!(shard.state.split().is_none());
    assert!(is_appended_at(&shard.append(stamped(1, 1, 4)), 4));
    shard.command(ShardCommand::FinishSplit { id: 10 });
    assert_eq!(shard.ids(), [1, 2, 3, 4, 5, 6]);
    shard.split(12, 2, 7);
    assert_eq!(shard.child().ids(), [1, 3, 5]);
    // Cancelled before it began.
    shard.command(ShardCommand::FinishSplit { id: 12 });
    shard.command(ShardCommand::CancelSplit { id: 15 });
    shard.split(15, 2, 7);
    assert!(shard.state.split().is_none());
}

#[test]
fn partitions_created_after_the_plan_stay() {
    let mut shard = Shard::new();
    shard.create(7, 4);
    shard.split(10, 2, 7);
    assert_eq!(shard.child().ids(), [1, 3, 5]);
    shard.create(11, 2);
    shard.round_trip();
    shard.command(ShardCommand::FinishSplit { id: 10 });
    assert_eq!(shard.ids(), [2, 4, 6, 7, 8, 9, 10, 11, 12]);
}

#[test]
fn topic_without_partitions_left_is_gone() {
    let mut shard = Shard::new();
    let drop = ShardCommand::DropTopic { cluster_version: 2, topic_id: TOPIC };
    shard.split(10, 2, 7);
    let mut child = shard.child();
    shard.command(drop.clone());
    shard.round_trip();
    shard.command(ShardCommand::FinishSplit { id: 10 });
    assert_eq!(shard.state.topics().len(), 0);
    child.command(drop);
    assert_eq!(child.state.topics().len(), 0);
    assert!(child.state.is_dropped(PartitionId(3)));
}

/// Batches, retries and trims get the same verdicts in shards that split as in a whole shard.
#[test]
fn split_shards_act_as_one() {
    let mut rng = seeded("split_shards_act_as_one");
    for _ in 0..200 {
        let mut one = Shard::new();
        let (mut shards, mut owners) = (vec![Shard::new()], BTreeMap::new());
        let (mut next_split, mut ids) = (10, 6);
        let mut next: BTreeMap<u64, u64> = BTreeMap::new();
        for _ in 0..120 {
            let id = rng.random_range(1..=ids);
            let owner = *owners.get(&id).unwrap_or(&0);
            match rng.random_range(0..12) {
                0 => {
                    // As a split that succeeds: begin, copy, finish.
                    next_split += 1;
                    let parts = rng.random_range(2..5);
                    shards[owner].split(next_split, parts, ids + 1);
                    let child = shards[owner].child();
                    if rng.random_bool(0.3) {
                        shards[owner].command(ShardCommand::CancelSplit { id: next_split });
                        continue;
                    }
                    shards[owner].command(ShardCommand::FinishSplit { id: next_split });
                    for id in child.ids() {
                        owners.insert(id, shards.len());
                    }
                    shards.push(child);
                }
                1 => {
                    ids += 1;
                    one.create(ids, 1);
                    let last = rng.random_range(0..shards.len());
                    shards[last].create(ids, 1);
                    owners.insert(ids, last);
                }
                2 => {
                    let starts = vec![(PartitionId(id), rng.random_range(0..20))];
                    let trim = ShardCommand::Trim { starts };
                    assert_eq!(one.command(trim.clone()), shards[owner].command(trim));
                }
                3 => {
                    one.round_trip();
                    shards[owner].round_trip();
                }
                _ => {
                    let at = next.entry(id).or_default();
                    let back = rng.random_range(0..3);
                    let batch = stamped(id, 1, at.saturating_sub(back));
                    let verdict = one.append(batch.clone());
                    assert_eq!(shards[owner].append(batch), verdict);
                    *at += u64::from(matches!(verdict, Verdict::Appended { .. }));
                }
            }
            let mut all: Vec<u64> = shards.iter().flat_map(Shard::ids).collect();
            all.sort_unstable();
            assert_eq!(all, one.ids(), "each partition is in one shard");
        }
    }
}
