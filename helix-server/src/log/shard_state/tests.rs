//! Tests of apply: single cases, then invariants over random logs.

use rand::RngExt;
use rand::rngs::StdRng;

use super::super::testing::{batch_head, seeded};
use super::super::{Condition, FencingToken, ProducerOwner, Watermarks};
use super::*;

fn run(first_id: u64, count: u32) -> PartitionRun {
    PartitionRun { first_id, first_number: 0, stride: 1, count }
}

fn settings(version: u64) -> PartitionSettings {
    PartitionSettings { max_batch_bytes: 1 << 20, version, ..PartitionSettings::default() }
}

fn create(cluster_version: u64, topic_id: u64, run: PartitionRun) -> Head {
    Head::Shard(ShardCommand::CreatePartitions {
        cluster_version,
        topic_id,
        runs: vec![run],
        settings: settings(1),
    })
}

fn drop_topic(cluster_version: u64, topic_id: u64) -> Head {
    Head::Shard(ShardCommand::DropTopic { cluster_version, topic_id })
}

fn stamped(partition: u64, record_count: u32, first_sequence: u64) -> BatchHead {
    let producer = Some(ProducerStamp::new(9, 0, first_sequence));
    BatchHead { producer, ..batch_head(partition, record_count) }
}

/// A shard and the index of its last entry.
struct Shard {
    state: ShardState,
    index: u64,
    effects: Effects,
}

impl Shard {
    /// Topic 1 with the partitions 1..=4.
    fn new() -> Self {
        let state = ShardState::new(StateLimits::default());
        let mut shard = Self { state, index: 0, effects: Effects::default() };
        shard.apply(&create(1, 1, run(1, 4)));
        shard
    }

    fn apply(&mut self, head: &Head) -> Verdict {
        self.index += 1;
        self.effects.clear();
        self.state.apply(self.index, head, &mut self.effects)
    }

    fn append(&mut self, batch: BatchHead) -> Verdict {
        self.apply(&Head::Batch(batch))
    }
}

#[test]
fn offsets_are_dense_in_each_partition() {
    let mut shard = Shard::new();
    for (partition, count, first_offset) in [(1, 3, 0), (2, 5, 0), (1, 1, 3), (2, 2, 5)] {
        let next_offset = first_offset + u64::from(count);
        let watermarks = Watermarks { log_start: 0, high_watermark: next_offset };
        let expected = Verdict::Appended { first_offset, next_offset, time_us: 0, watermarks };
        assert_eq!(shard.append(batch_head(partition, count)), expected);
    }
}

#[test]
fn append_times_never_decrease() {
    let mut shard = Shard::new();
    for (proposed_us, expected) in [(5, 5), (3, 5), (9, 9), (0, 9)] {
        let verdict = shard.append(BatchHead { proposed_us, ..batch_head(1, 1) });
        assert!(matches!(verdict, Verdict::Appended { time_us, .. } if time_us == expected));
    }
}

#[test]
fn refused_batch_changes_nothing() {
    let mut shard = Shard::new();
    shard.append(stamped(1, 2, 0));
    shard.state.partitions.get_mut(&PartitionId(2)).unwrap().next_offset = u64::MAX - 1;
    let before = shard.state.clone();
    let unknown = Refusal::UnknownPartition { partition: PartitionId(77) };
    assert_eq!(shard.append(batch_head(77, 1)), Verdict::Refused(unknown));
    assert_eq!(shard.append(batch_head(2, 2)), Verdict::Refused(Refusal::OffsetsExhausted));
    assert_eq!(shard.append(stamped(2, 2, 0)), Verdict::Refused(Refusal::OffsetsExhausted));
    assert!(matches!(shard.append(stamped(1, 2, 5)), Verdict::Refused(_)));
    assert!(matches!(shard.append(stamped(1, 2, 0)), Verdict::Duplicate { .. }));
    assert_eq!(shard.state, before);
    assert!(shard.effects.is_empty());
    assert!(matches!(
        shard.append(batch_head(2, 1)),
        Verdict::Appended { next_offset: u64::MAX, .. }
    ));
}

#[test]
fn duplicate_gets_its_original_offsets() {
    let mut shard = Shard::new();
    shard.append(batch_head(1, 10));
    assert_eq!(shard.state.early_verdict(&stamped(1, 3, 0)), None);
    shard.append(stamped(1, 3, 0));
    shard.append(batch_head(1, 10));
    let watermarks = Watermarks { log_start: 0, high_watermark: 23 };
    let expected = Verdict::Duplicate { first_offset: 10, next_offset: 13, watermarks };
    assert_eq!(shard.state.early_verdict(&stamped(1, 3, 0)), Some(expected.clone()));
    assert_eq!(shard.append(stamped(1, 3, 0)), expected);
    assert_eq!(shard.state.early_verdict(&stamped(1, 3, 3)), None);
    assert_eq!(shard.state.next_sequence(PartitionId(1), &ProducerStamp::new(9, 0, 0)), Some(3));
}

#[test]
fn refuses_forgotten_producers_also_after_a_checkpoint() {
    let mut shard = Shard::new();
    shard.state = ShardState::new(StateLimits { producers_max: 1 });
    shard.apply(&create(1, 2, run(1, 2)));
    let by = |producer_id, epoch| {
        let producer = Some(ProducerStamp::new(producer_id, epoch, 0));
        BatchHead { producer, ..batch_head(1, 1) }
    };
    for (producer_id, epoch) in [(5, 0), (6, 3), (7, 0)] {
        assert_eq!(shard.state.early_verdict(&by(producer_id, epoch)), None);
        shard.append(by(producer_id, epoch));
    }
    let refused = |producer_id| Some(Verdict::Refused(Refusal::UnknownProducer { producer_id }));
    let restored = ShardState::decode(&shard.state.encode()).unwrap();
    assert_eq!(restored, shard.state);
    for state in [&shard.state, &restored] {
        for (producer_id, epoch) in [(4, 0), (5, 0), (6, 0), (6, 3)] {
            assert_eq!(state.early_verdict(&by(producer_id, epoch)), refused(producer_id));
        }
        assert!(state.has_forgotten(PartitionId(2), 5, 0));
        for (producer_id, epoch) in [(6, 4), (8, 0)] {
            assert_eq!(state.early_verdict(&by(producer_id, epoch)), None);
        }
    }
    // As an older node reads it.
    let plain = ShardState::decode(&shard.state.encode_plain()).unwrap();
    assert_eq!(plain.early_verdict(&by(5, 0)), None);
    assert!(!plain.has_forgotten(PartitionId(2), 5, 0));
    assert_eq!(plain.partition(PartitionId(1)), shard.state.partition(PartitionId(1)));
    // It changes no verdict, so replicas may differ in it.
    let [one, other] = [shard.state, plain]
        .map(|mut state| state.apply(9, &Head::Batch(by(5, 0)), &mut Effects::default()));
    assert_eq!(one, other);
}

#[test]
fn repeated_create_adds_only_missing_partitions() {
    let mut shard = Shard::new();
    assert_eq!(shard.effects.created.len(), 4);
    shard.append(batch_head(1, 3));
    let before = shard.state.clone();
    assert_eq!(shard.apply(&create(1, 1, run(1, 4))), Verdict::Changed);
    assert_eq!(shard.state, before);
    shard.apply(&create(2, 1, run(1, 6)));
    assert_eq!(shard.effects.created, [PartitionId(5), PartitionId(6)]);
    let numbers: Vec<u32> = shard.state.topic_partitions(1).map(|it| it.number).collect();
    assert_eq!(numbers, [0, 1, 2, 3, 4, 5]);
    assert_eq!(shard.state.partition(PartitionId(1)).unwrap().next_offset, 3);
}

#[test]
fn create_ignores_ids_of_another_topic() {
    let mut shard = Shard::new();
    let before = shard.state.clone();
    shard.apply(&create(1, 2, run(3, 2)));
    assert_eq!(shard.state, before);
}

#[test]
fn dropped_topic_loses_its_producers_and_never_returns() {
    let mut shard = Shard::new();
    shard.append(stamped(1, 2, 0));
    shard.apply(&drop_topic(5, 1));
    assert_eq!(shard.effects.dropped, [1, 2, 3, 4].map(PartitionId));
    assert!(shard.state.producers().is_empty());
    assert!(matches!(shard.append(batch_head(1, 1)), Verdict::Refused(_)));
    assert!([1, 2, 3, 4].into_iter().all(|id| shard.state.is_dropped(PartitionId(id))));
    assert!([0, 5].into_iter().all(|id| !shard.state.is_dropped(PartitionId(id))));
    let before = shard.state.clone();
    // Proposed by a node that has not seen the drop.
    shard.apply(&create(4, 1, run(1, 4)));
    assert!(shard.effects.is_empty());
    shard.apply(&drop_topic(5, 1));
    assert!(shard.effects.is_empty());
    assert_eq!(shard.state, before);
    // Even with a later version.
    shard.apply(&create(9, 1, run(1, 4)));
    assert_eq!(shard.state, before);
    shard.apply(&create(5, 2, run(5, 1)));
    assert_eq!(shard.effects.created, [PartitionId(5)]);
    assert!(!shard.state.is_dropped(PartitionId(5)));
    shard.apply(&drop_topic(6, 2));
    assert_eq!(shard.state.dropped, BTreeMap::from([(1, 5)]));
}

#[test]
fn late_partition_does_not_count_as_dropped() {
    let mut shard = Shard::new();
    shard.apply(&create(1, 3, run(50, 1)));
    assert!(!shard.state.is_dropped(PartitionId(20)));
    shard.apply(&drop_topic(2, 3));
    assert!(!shard.state.is_dropped(PartitionId(20)));
    shard.apply(&create(2, 2, run(20, 1)));
    assert_eq!(shard.effects.created, [PartitionId(20)]);
}

#[test]
fn later_settings_win() {
    let mut shard = Shard::new();
    let update = |settings| Head::Shard(ShardCommand::UpdateSettings { topic_id: 1, settings });
    for (version, expected, changes) in [(3, 3, true), (2, 3, false), (3, 3, false), (4, 4, true)] {
        shard.apply(&update(settings(version)));
        assert!(shard.state.partitions().all(|it| it.settings.version == expected));
        assert_eq!(shard.effects.updated, if changes { vec![1] } else { vec![] });
    }
    shard.apply(&create(9, 1, run(1, 4)));
    assert!(shard.state.partitions().all(|it| it.settings.version == 4));
}

#[test]
fn trims_raise_the_log_start_up_to_the_high_watermark() {
    let mut shard = Shard::new();
    shard.append(batch_head(1, 10));
    let trim = |start| Head::Shard(ShardCommand::Trim { starts: vec![(PartitionId(1), start)] });
    for (start, expected) in [(4, Some(4)), (3, None), (4, None), (99, Some(10)), (99, None)] {
        shard.apply(&trim(start));
        let trimmed: Vec<_> = expected.map(|it| (PartitionId(1), it)).into_iter().collect();
        assert_eq!(shard.effects.trimmed, trimmed, "to {start}");
    }
    let watermarks = Watermarks { log_start: 10, high_watermark: 10 };
    assert_eq!(shard.state.partition(PartitionId(1)).unwrap().watermarks(), watermarks);
}

#[test]
fn released_index_only_grows_and_never_exceeds_its_entry() {
    let mut shard = Shard::new();
    shard.append(batch_head(1, 1));
    assert_eq!((shard.index, shard.state.released()), (2, 0));
    let release = |index| Head::Shard(ShardCommand::Release { index });
    // The entries have consecutive indices: the third has index 5.
    for (index, expected) in [(1, 1), (0, 1), (99, 5), (3, 5), (7, 7)] {
        assert_eq!(shard.apply(&release(index)), Verdict::Changed);
        assert_eq!(shard.state.released(), expected, "released to {index}");
        assert!(shard.effects.is_empty());
    }
    let restored = ShardState::decode(&shard.state.encode()).unwrap();
    assert_eq!(restored.released(), 7);
    assert_eq!(restored, shard.state);
}

#[test]
fn cluster_commands_change_nothing() {
    let mut shard = Shard::new();
    let before = shard.state.clone();
    let command = super::super::ClusterCommand::LeaseProducerIds {
        count: 1,
        owner: ProducerOwner::ANONYMOUS,
    };
    assert_eq!(shard.apply(&Head::Cluster(command)), Verdict::Nothing);
    assert_eq!(shard.state, before);
}

#[test]
fn checkpoint_of_ten_thousand_idle_partitions_is_small() {
    let mut shard = Shard::new();
    shard.apply(&create(1, 2, run(1_000, 10_000)));
    assert_eq!(shard.effects.created.len(), 10_000);
    let bytes = shard.state.encode();
    assert!(bytes.len() < 200, "{} bytes", bytes.len());
    assert_eq!(ShardState::decode(&bytes).as_ref(), Ok(&shard.state));
}

#[test]
fn damaged_checkpoint_never_panics() {
    let mut rng = seeded("damaged_checkpoint_never_panics");
    assert!(ShardState::decode(&[]).is_err());
    let (state, _) = random_log(&mut rng, 300);
    let bytes = state.encode();
    for _ in 0..5_000 {
        let mut bytes = bytes.to_vec();
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..bytes.len());
            bytes[at] ^= 1 << rng.random_range(0..8);
        }
        bytes.truncate(rng.random_range(0..=bytes.len() * 2).min(bytes.len()));
        let _ = ShardState::decode(&bytes);
    }
}

#[test]
fn replayed_log_gives_equal_bytes() {
    let mut rng = seeded("replayed_log_gives_equal_bytes");
    for _ in 0..30 {
        let (state, log) = random_log(&mut rng, 500);
        let mut again = ShardState::new(state.limits());
        for (index, head) in (1..).zip(&log) {
            again.apply(index, head, &mut Effects::default());
        }
        assert_eq!(again, state);
        assert_eq!(again.encode(), state.encode());
    }
}

/// A replica restored from a checkpoint gives the same verdicts as the original.
#[test]
fn restored_state_gives_the_same_verdicts() {
    let mut rng = seeded("restored_state_gives_the_same_verdicts");
    for _ in 0..30 {
        let (mut state, log) = random_log(&mut rng, 400);
        let mut restored = ShardState::decode(&state.encode()).expect("its own bytes");
        assert_eq!(restored, state);
        for index in log.len() as u64 + 1..log.len() as u64 + 300 {
            let head = random_head(&mut rng, &state);
            let (mut effects, mut effects_restored) = (Effects::default(), Effects::default());
            let verdict = state.apply(index, &head, &mut effects);
            assert_eq!(restored.apply(index, &head, &mut effects_restored), verdict);
            assert_eq!(effects, effects_restored);
        }
        assert_eq!(restored.encode(), state.encode());
    }
}

#[test]
fn random_logs_keep_the_invariants() {
    let mut rng = seeded("random_logs_keep_the_invariants");
    for _ in 0..20 {
        let mut state = ShardState::new(StateLimits { producers_max: 5 });
        let mut counted = BTreeMap::new();
        for index in 1..1_000 {
            let head = random_head(&mut rng, &state);
            let before = state.clone();
            let verdict = state.apply(index, &head, &mut Effects::default());
            if let Head::Batch(batch) = &head {
                match &verdict {
                    Verdict::Appended { first_offset, next_offset, .. } => {
                        let end = counted.insert(batch.partition, *next_offset).unwrap_or(0);
                        assert_eq!(*first_offset, end);
                    }
                    _ => assert_eq!(state, before, "{verdict:?}"),
                }
            }
            check_invariants(&state);
        }
    }
}

fn check_invariants(state: &ShardState) {
    assert!(state.producers().len() <= state.limits().producers_max as usize);
    let in_topics: usize = state.topics().map(|(_, _, partitions)| partitions).sum();
    assert_eq!(in_topics, state.partitions().len());
    for (topic_id, settings, partitions) in state.topics() {
        assert_eq!(state.topic_partitions(topic_id).count(), partitions);
        assert!(partitions > 0);
        for partition in state.topic_partitions(topic_id) {
            assert!(Arc::ptr_eq(&partition.settings, settings));
            assert_eq!(partition.topic_id, topic_id);
            assert!(partition.log_start <= partition.next_offset);
        }
    }
    assert!(state.partitions().all(|partition| !state.is_dropped(partition.id)));
    for ((id, _), _) in state.producers().rows() {
        assert!(state.partition(*id).is_some());
    }
}

fn random_log(rng: &mut StdRng, entries: u64) -> (ShardState, Vec<Head>) {
    let mut state = ShardState::new(StateLimits { producers_max: rng.random_range(1..20) });
    let mut log = Vec::new();
    for index in 1..=entries {
        let head = random_head(rng, &state);
        state.apply(index, &head, &mut Effects::default());
        log.push(head);
    }
    (state, log)
}

/// Returns mostly batches for existing partitions, of producers that are mostly in order.
/// Topics never share ids: those of a topic start at 100 times its own id.
fn random_head(rng: &mut StdRng, state: &ShardState) -> Head {
    // New topics keep coming after others were dropped.
    let topic_id = 1 + rng.random_range(0..4) + state.dropped.len() as u64;
    match rng.random_range(0..100) {
        0..6 => {
            let stride = 1 + topic_id as u32 % 5;
            let count = rng.random_range(1..6);
            let first_id = topic_id * 100;
            let run = PartitionRun { first_id, first_number: 0, stride, count };
            create(rng.random_range(1..9), topic_id, run)
        }
        6..8 => drop_topic(rng.random_range(1..4), topic_id),
        8..10 => Head::Shard(ShardCommand::UpdateSettings {
            topic_id,
            settings: settings(rng.random_range(0..9)),
        }),
        10..14 => Head::Shard(ShardCommand::SetFencingToken {
            partition: random_partition(rng, state),
            expected: rng.random_bool(0.5).then(|| random_token(rng)),
            token: random_token(rng),
        }),
        14..18 => {
            let start = |rng: &mut StdRng| (random_partition(rng, state), rng.random_range(0..99));
            let starts = (0..rng.random_range(0..4)).map(|_| start(rng)).collect();
            Head::Shard(ShardCommand::Trim { starts })
        }
        _ => {
            let id = random_partition(rng, state);
            let producer_id = rng.random_range(1..5);
            let epoch = u32::from(rng.random_bool(0.05));
            let next =
                state.next_sequence(id, &ProducerStamp::new(producer_id, epoch, 0)).unwrap_or(0);
            let back = if rng.random_bool(0.3) { rng.random_range(0..5) } else { 0 };
            let first_sequence = next.saturating_sub(back);
            let end = state.partition(id).map_or(0, |partition| partition.next_offset);
            let miss = u64::from(rng.random_bool(0.3));
            let condition = Condition {
                expected_offset: rng.random_bool(0.3).then_some(end + miss),
                fencing_token: rng.random_bool(0.3).then(|| random_token(rng)),
            };
            let stamp = ProducerStamp::new(producer_id, epoch, first_sequence);
            Head::Batch(BatchHead {
                producer: rng.random_bool(0.7).then_some(stamp),
                proposed_us: rng.random_range(0..1_000),
                condition,
                ..batch_head(id.0, rng.random_range(1..4))
            })
        }
    }
}

/// Returns one of a few tokens, including the empty one.
fn random_token(rng: &mut StdRng) -> FencingToken {
    FencingToken::new(["", "a", "b"][rng.random_range(0..3)]).expect("a short token")
}

fn random_partition(rng: &mut StdRng, state: &ShardState) -> PartitionId {
    let count = state.partitions().len();
    let any = PartitionId(rng.random_range(0..600));
    if count == 0 || rng.random_bool(0.05) {
        return any;
    }
    state.partitions().nth(rng.random_range(0..count)).map_or(any, |it| it.id)
}
