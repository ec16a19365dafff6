//! Tests of conditions: single cases, then against a reference implementation.

use std::collections::HashMap;

use rand::RngExt;

use super::super::testing::{batch_head, seeded};
use super::super::{Condition, FencingToken, ProducerStamp, Watermarks};
use super::*;

const ID: PartitionId = PartitionId(1);

fn token(text: &str) -> FencingToken {
    FencingToken::new(text).expect("a short token")
}

fn expecting(expected_offset: u64) -> Condition {
    Condition { expected_offset: Some(expected_offset), fencing_token: None }
}

fn demanding(text: &str) -> Condition {
    Condition { expected_offset: None, fencing_token: Some(token(text)) }
}

fn batch(record_count: u32, condition: Condition) -> BatchHead {
    BatchHead { condition, ..batch_head(ID.0, record_count) }
}

fn stamped(epoch: u32, first_sequence: u64, count: u32, condition: Condition) -> BatchHead {
    let producer = Some(ProducerStamp::new(9, epoch, first_sequence));
    BatchHead { producer, ..batch(count, condition) }
}

fn mismatch(expected: u64, next: u64) -> Verdict {
    let watermarks = Watermarks { log_start: 0, high_watermark: next };
    Verdict::Refused(Refusal::OffsetMismatch { expected, watermarks })
}

fn fenced(in_force: &str) -> Verdict {
    Verdict::Refused(Refusal::Fenced { in_force: token(in_force) })
}

/// Topic 1 with the partitions 1..=2.
struct Shard {
    state: ShardState,
    index: u64,
}

impl Shard {
    fn new() -> Self {
        let mut shard = Self { state: ShardState::new(StateLimits::default()), index: 0 };
        shard.apply(&Head::Shard(ShardCommand::CreatePartitions {
            cluster_version: 1,
            topic_id: 1,
            runs: vec![PartitionRun { first_id: 1, first_number: 0, stride: 1, count: 2 }],
            settings: PartitionSettings::default(),
        }));
        shard
    }

    fn apply(&mut self, head: &Head) -> Verdict {
        self.index += 1;
        self.state.apply(self.index, head, &mut Effects::default())
    }

    fn append(&mut self, batch: BatchHead) -> Verdict {
        self.apply(&Head::Batch(batch))
    }

    /// Appends a batch that must succeed, and returns its first offset.
    fn appended(&mut self, batch: BatchHead) -> u64 {
        match self.append(batch) {
            Verdict::Appended { first_offset, .. } => first_offset,
            other => panic!("{other:?}"),
        }
    }

    fn fence(&mut self, partition: PartitionId, expected: Option<&str>, text: &str) -> Verdict {
        let (expected, token) = (expected.map(token), token(text));
        self.apply(&Head::Shard(ShardCommand::SetFencingToken { partition, expected, token }))
    }
}

#[test]
fn expected_offset_must_be_the_next_offset() {
    let mut shard = Shard::new();
    assert_eq!(shard.append(batch(2, expecting(1))), mismatch(1, 0));
    assert_eq!(shard.appended(batch(2, expecting(0))), 0);
    for expected in [0, 1, 3, u64::MAX] {
        let before = shard.state.clone();
        assert_eq!(shard.append(batch(2, expecting(expected))), mismatch(expected, 2));
        assert_eq!(shard.state, before);
    }
    assert_eq!(shard.appended(batch(2, Condition::default())), 2);
    assert_eq!(shard.appended(batch(1, expecting(4))), 4);
}

#[test]
fn first_of_two_batches_with_the_same_expected_offset_wins() {
    let mut shard = Shard::new();
    let ours = stamped(0, 0, 1, expecting(0));
    let mut theirs = ours.clone();
    theirs.producer.as_mut().unwrap().producer_id = 10;
    assert_eq!(shard.appended(ours), 0);
    assert_eq!(shard.append(theirs), mismatch(0, 1));
}

#[test]
fn fencing_token_of_a_batch_must_be_in_force() {
    let mut shard = Shard::new();
    assert_eq!(shard.append(batch(1, demanding("one"))), fenced(""));
    shard.appended(batch(1, demanding("")));
    assert_eq!(shard.fence(ID, None, "one"), Verdict::Changed);
    shard.appended(batch(1, demanding("one")));
    assert_eq!(shard.append(batch(1, demanding(""))), fenced("one"));
    assert_eq!(shard.append(batch(1, demanding("onE"))), fenced("one"));
    // A batch without a token passes, and the other partition has its own token.
    shard.appended(batch(1, Condition::default()));
    let other = BatchHead { partition: PartitionId(2), ..batch(1, demanding("")) };
    shard.appended(other);
    assert_eq!(shard.fence(ID, None, ""), Verdict::Changed);
    shard.appended(batch(1, demanding("")));
}

#[test]
fn replaces_token_only_if_the_expected_one_is_in_force() {
    let mut shard = Shard::new();
    assert_eq!(shard.fence(ID, Some("zero"), "one"), fenced(""));
    assert_eq!(shard.fence(ID, Some(""), "one"), Verdict::Changed);
    // The second of two concurrent writers, and a retry of the first.
    assert_eq!(shard.fence(ID, Some(""), "two"), fenced("one"));
    assert_eq!(shard.fence(ID, Some(""), "one"), fenced("one"));
    assert_eq!(shard.fence(ID, Some("one"), "two"), Verdict::Changed);
    assert_eq!(shard.fence(ID, None, "two"), Verdict::Changed);
    let partition = PartitionId(77);
    let unknown = Verdict::Refused(Refusal::UnknownPartition { partition });
    assert_eq!(shard.fence(partition, None, "two"), unknown);
}

#[test]
fn retried_batch_is_a_duplicate_regardless_of_its_condition() {
    let mut shard = Shard::new();
    shard.fence(ID, None, "one");
    let condition = Condition { expected_offset: Some(0), fencing_token: Some(token("one")) };
    let first = stamped(0, 0, 3, condition);
    assert_eq!(shard.appended(first.clone()), 0);
    shard.fence(ID, Some("one"), "two");
    let watermarks = Watermarks { log_start: 0, high_watermark: 3 };
    let duplicate = Verdict::Duplicate { first_offset: 0, next_offset: 3, watermarks };
    assert_eq!(shard.append(first.clone()), duplicate);
    assert_eq!(shard.state.early_verdict(&first), Some(duplicate));
}

#[test]
fn checks_producer_then_token_then_offset() {
    let mut shard = Shard::new();
    shard.appended(stamped(1, 0, 1, Condition::default()));
    shard.fence(ID, None, "one");
    let both = |offset, text| Condition { expected_offset: Some(offset), ..demanding(text) };
    let old_epoch = stamped(0, 0, 1, both(9, "zero"));
    let verdict = shard.append(old_epoch);
    assert!(matches!(verdict, Verdict::Refused(Refusal::ProducerFenced { .. })), "{verdict:?}");
    let gap = shard.append(stamped(1, 5, 1, both(9, "zero")));
    assert!(matches!(gap, Verdict::Refused(Refusal::OutOfOrderSequence { .. })), "{gap:?}");
    assert_eq!(shard.append(stamped(1, 1, 1, both(9, "zero"))), fenced("one"));
    assert_eq!(shard.append(stamped(1, 1, 1, both(9, "one"))), mismatch(9, 1));
    assert_eq!(shard.appended(stamped(1, 1, 1, both(1, "one"))), 1);
}

/// As in an append stream, where each batch continues the sequence of the previous one.
#[test]
fn refuses_batches_of_a_producer_after_a_refused_one() {
    let mut shard = Shard::new();
    assert_eq!(shard.appended(stamped(0, 0, 2, expecting(0))), 0);
    assert_eq!(shard.append(stamped(0, 2, 2, expecting(3))), mismatch(3, 2));
    let next_sequence = 2;
    for (first_sequence, condition) in [(4, expecting(2)), (6, Condition::default())] {
        let refusal =
            Refusal::OutOfOrderSequence { producer_id: 9, sequence: first_sequence, next_sequence };
        let verdict = shard.append(stamped(0, first_sequence, 2, condition));
        assert_eq!(verdict, Verdict::Refused(refusal));
    }
}

#[test]
fn early_verdict_is_given_only_where_it_is_certain() {
    let mut shard = Shard::new();
    shard.appended(batch(5, Condition::default()));
    shard.fence(ID, None, "one");
    let early_verdict = |batch: &BatchHead| shard.state.early_verdict(batch);
    assert_eq!(early_verdict(&batch(1, expecting(4))), Some(mismatch(4, 5)));
    // The partition may still reach that offset or get that token.
    assert_eq!(early_verdict(&batch(1, expecting(6))), None);
    assert_eq!(early_verdict(&batch(1, expecting(5))), None);
    assert_eq!(early_verdict(&batch(1, demanding("two"))), None);
    // An earlier copy of the batch may still be appended.
    assert_eq!(early_verdict(&stamped(0, 0, 1, expecting(4))), None);
}

#[test]
fn token_of_an_empty_partition_survives_a_checkpoint() {
    let mut shard = Shard::new();
    shard.fence(ID, None, &"é".repeat(32));
    let restored = ShardState::decode(&shard.state.encode()).unwrap();
    assert_eq!(restored, shard.state);
    assert_eq!(restored.partition(ID).unwrap().fencing_token, token(&"é".repeat(32)));
}

#[test]
fn reads_checkpoints_of_format_one() {
    let mut shard = Shard::new();
    shard.appended(stamped(3, 0, 4, Condition::default()));
    let mut bytes = shard.state.encode().to_vec();
    assert_eq!(bytes[..2], [8, 2], "the format is the first field");
    bytes[1] = 1;
    assert_eq!(ShardState::decode(&bytes).as_ref(), Ok(&shard.state));
    for unknown in [0, 8] {
        bytes[1] = unknown;
        assert!(ShardState::decode(&bytes).is_err());
    }
}

/// Reference model of one partition: a list of all appended batches.
#[derive(Debug, Default)]
struct Reference {
    /// Producer stamp, record count and first offset of each batch, oldest first.
    counted: Vec<(Option<ProducerStamp>, u32, u64)>,
    end: u64,
    token: String,
}

#[derive(Debug, PartialEq, Eq)]
enum ReferenceVerdict {
    Appended(u64),
    Duplicate(u64),
    SequenceRefused,
    Fenced(String),
    Mismatch(u64),
}

impl Reference {
    fn append(&mut self, batch: &BatchHead) -> ReferenceVerdict {
        if let Some(stamp) = batch.producer {
            let mine = self.counted.iter().filter_map(|(other, count, offset)| {
                let other = (*other)?;
                (other.producer_id == stamp.producer_id).then_some((other, *count, *offset))
            });
            let mine: Vec<_> = mine.collect();
            let epoch = mine.iter().map(|(other, ..)| other.epoch).max();
            if epoch.is_some_and(|epoch| stamp.epoch < epoch) {
                return ReferenceVerdict::SequenceRefused;
            }
            let of_epoch: Vec<_> =
                mine.iter().filter(|(other, ..)| other.epoch == stamp.epoch).collect();
            let next: u64 = of_epoch.iter().map(|(_, count, _)| u64::from(*count)).sum();
            if stamp.first_sequence != next {
                let same = of_epoch.iter().find(|(other, count, _)| {
                    other.first_sequence == stamp.first_sequence && *count == batch.record_count
                });
                return same.map_or(ReferenceVerdict::SequenceRefused, |(.., offset)| {
                    ReferenceVerdict::Duplicate(*offset)
                });
            }
        }
        if let Some(demanded) = &batch.condition.fencing_token
            && demanded.as_str() != self.token
        {
            return ReferenceVerdict::Fenced(self.token.clone());
        }
        if batch.condition.expected_offset.is_some_and(|expected| expected != self.end) {
            return ReferenceVerdict::Mismatch(self.end);
        }
        let first_offset = self.end;
        self.end += u64::from(batch.record_count);
        self.counted.push((batch.producer, batch.record_count, first_offset));
        ReferenceVerdict::Appended(first_offset)
    }
}

fn without_details(verdict: Verdict) -> ReferenceVerdict {
    match verdict {
        Verdict::Appended { first_offset, .. } => ReferenceVerdict::Appended(first_offset),
        Verdict::Duplicate { first_offset, .. } => ReferenceVerdict::Duplicate(first_offset),
        Verdict::Refused(Refusal::Fenced { in_force }) => {
            ReferenceVerdict::Fenced(in_force.as_str().into())
        }
        Verdict::Refused(Refusal::OffsetMismatch { watermarks, .. }) => {
            ReferenceVerdict::Mismatch(watermarks.high_watermark)
        }
        Verdict::Refused(
            Refusal::ProducerFenced { .. }
            | Refusal::OutOfOrderSequence { .. }
            | Refusal::UnknownProducer { .. },
        ) => ReferenceVerdict::SequenceRefused,
        other => panic!("{other:?}"),
    }
}

#[test]
fn verdicts_match_the_reference() {
    let mut rng = seeded("verdicts_match_the_reference");
    let mut seen = HashMap::new();
    for _ in 0..300 {
        let mut shard = Shard::new();
        let mut reference = Reference::default();
        let mut sent: Vec<(Option<ProducerStamp>, u32)> = Vec::new();
        // Fewer than the window of a producer, so that every duplicate is detected.
        for _ in 0..60 {
            let text = ["", "a", "b"][rng.random_range(0..3)];
            if rng.random_bool(0.1) {
                let expected = ["", "a", "b"][rng.random_range(0..3)];
                let expected = rng.random_bool(0.5).then_some(expected);
                let holds = expected.is_none_or(|expected| expected == reference.token);
                let verdict = shard.fence(ID, expected, text);
                assert_eq!(verdict == Verdict::Changed, holds, "{verdict:?}");
                if holds {
                    text.clone_into(&mut reference.token);
                }
            }
            let (producer_id, epoch) = (rng.random_range(0..2), u32::from(rng.random_bool(0.05)));
            let next = shard
                .state
                .next_sequence(ID, &ProducerStamp::new(producer_id, epoch, 0))
                .unwrap_or(0);
            let miss = if rng.random_bool(0.1) { rng.random_range(0..5) } else { 0 };
            let first_sequence = next + miss;
            let stamp = ProducerStamp::new(producer_id, epoch, first_sequence);
            let fresh = (rng.random_bool(0.7).then_some(stamp), rng.random_range(1..3));
            // Sometimes an earlier batch, with any condition.
            let (producer, count) = match sent.len() {
                many @ 1.. if rng.random_bool(0.2) => sent[rng.random_range(0..many)],
                _ => fresh,
            };
            sent.push((producer, count));
            let near = reference.end + rng.random_range(0..3);
            let condition = Condition {
                expected_offset: rng.random_bool(0.5).then(|| near.saturating_sub(1)),
                fencing_token: rng.random_bool(0.4).then(|| token(text)),
            };
            let batch = BatchHead { producer, ..batch(count, condition) };
            let early_verdict = shard.state.early_verdict(&batch);
            let verdict = shard.append(batch.clone());
            let expected = reference.append(&batch);
            *seen.entry(std::mem::discriminant(&expected)).or_insert(0) += 1;
            match early_verdict {
                // The refusals may differ; a duplicate must be the same.
                Some(Verdict::Refused(_)) => assert!(matches!(verdict, Verdict::Refused(_))),
                Some(early) => assert_eq!(early, verdict),
                None => {}
            }
            assert_eq!(without_details(verdict), expected, "{batch:?}");
            if rng.random_bool(0.05) {
                shard.state = ShardState::decode(&shard.state.encode()).unwrap();
            }
        }
    }
    println!("{seen:?}");
    assert!(seen.len() == 5 && seen.values().all(|times| *times > 100), "{seen:?}");
}
