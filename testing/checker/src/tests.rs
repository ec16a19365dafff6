//! Correct histories that must pass, incorrect ones of every class that must fail, and random ones
//! that pass unchanged and fail after a single corruption.

use rand::SeedableRng;
use rand::rngs::StdRng;

use super::random_history::{correct_history, corrupt, lines};
use super::{
    BatchKey, HistoryChecker, HistoryEvent, HistoryLine, HistoryVerdict, ViolationClass, check,
};

const P: u32 = 3;

fn key(producer: u32, number: u64) -> BatchKey {
    BatchKey { producer, number }
}

fn invoked(producer: u32, number: u64) -> HistoryEvent {
    HistoryEvent::Invoked { key: key(producer, number), partition: P, records: 5, stream: None }
}

fn streamed(producer: u32, number: u64) -> HistoryEvent {
    HistoryEvent::Invoked { key: key(producer, number), partition: P, records: 5, stream: Some(1) }
}

fn acked(producer: u32, number: u64, offset: u64) -> HistoryEvent {
    HistoryEvent::Acked { key: key(producer, number), offset }
}

fn failed(producer: u32, number: u64) -> HistoryEvent {
    HistoryEvent::Failed { key: key(producer, number) }
}

fn unknown(producer: u32, number: u64) -> HistoryEvent {
    HistoryEvent::Unknown { key: key(producer, number) }
}

fn opened(reader: u32) -> HistoryEvent {
    HistoryEvent::Opened { reader, partition: P, offset: 0 }
}

fn read(reader: u32, offset: u64, producer: u32, number: u64) -> HistoryEvent {
    HistoryEvent::Read { reader, partition: P, offset, key: key(producer, number), records: 5 }
}

/// Builds a final read of these batches, one after the other.
fn last(replica: u32, batches: &[(u32, u64)]) -> Vec<HistoryEvent> {
    let reader = 100 + replica;
    let replica = u64::from(replica);
    let mut events = vec![HistoryEvent::FinalOpened { reader, partition: P, round: 1, replica }];
    let mut offset = 0;
    for (producer, number) in batches {
        events.push(read(reader, offset, *producer, *number));
        offset += 5;
    }
    events.push(HistoryEvent::FinalEnded { reader, partition: P, high_watermark: offset });
    events
}

fn judge(parts: &[&[HistoryEvent]]) -> HistoryVerdict {
    check(&lines(&parts.concat()))
}

/// Asserts that the history violates exactly this class.
#[track_caller]
fn only(class: ViolationClass, parts: &[&[HistoryEvent]]) {
    let verdict = judge(parts);
    let found: Vec<_> = verdict.counts.keys().copied().collect();
    assert_eq!(found, [class], "{verdict}");
    assert!(verdict.violations.iter().all(|found| !found.lines.is_empty()));
}

#[track_caller]
fn accepted(parts: &[&[HistoryEvent]]) {
    let verdict = judge(parts);
    assert!(verdict.is_good(), "{verdict}");
}

#[test]
fn accepts_simple_history() {
    let all = [(1, 0), (2, 0), (1, 1)];
    accepted(&[
        &[opened(1), invoked(1, 0), invoked(2, 0), acked(1, 0, 0), read(1, 0, 1, 0)],
        &[acked(2, 0, 5), invoked(1, 1), read(1, 5, 2, 0), acked(1, 1, 10), read(1, 10, 1, 1)],
        &last(1, &all),
        &last(2, &all),
        &last(3, &all),
    ]);
}

#[test]
fn accepts_unknown_outcome_applied_or_not() {
    let begin = [invoked(1, 0), unknown(1, 0), invoked(1, 1), acked(1, 1, 5)];
    accepted(&[&begin, &last(1, &[(1, 0), (1, 1)])]);
    let begin = [invoked(1, 0), unknown(1, 0), invoked(1, 1), acked(1, 1, 0)];
    accepted(&[&begin, &last(1, &[(1, 1)])]);
    // An abandoned retry may be appended late, after later batches.
    accepted(&[&begin, &last(1, &[(1, 1), (1, 0)])]);
    // A missing outcome is an unknown outcome.
    let begin = [invoked(1, 0)];
    accepted(&[&begin, &last(1, &[(1, 0)])]);
    accepted(&[&begin, &last(1, &[])]);
}

#[test]
fn accepts_stream_that_ends_anywhere() {
    let begin = [streamed(1, 0), streamed(1, 1), streamed(1, 2), acked(1, 0, 0)];
    let end = [unknown(1, 1), failed(1, 2)];
    accepted(&[&begin, &end, &last(1, &[(1, 0)])]);
    accepted(&[&begin, &end, &last(1, &[(1, 0), (1, 1)])]);
}

#[test]
fn finds_lost_acked_batch() {
    let begin = [invoked(1, 0), acked(1, 0, 0), invoked(1, 1), acked(1, 1, 5)];
    let verdict = judge(&[&begin, &last(1, &[(1, 0)])]);
    assert!(verdict.has(ViolationClass::AckedLost), "{verdict}");
    let lost =
        verdict.violations.iter().find(|found| found.class == ViolationClass::AckedLost).unwrap();
    assert_eq!(lost.lines, [4, 5, 7], "the ack, and the final read");
    assert!(lost.what.contains("batch 1/1 was acked at 3@5"), "{}", lost.what);
}

#[test]
fn finds_duplicated_batch() {
    let begin = [invoked(1, 0), acked(1, 0, 0)];
    only(ViolationClass::Duplicated, &[&begin, &last(1, &[(1, 0), (1, 0)])]);
}

#[test]
fn finds_gap_in_offsets() {
    let begin = [opened(1), invoked(1, 0), acked(1, 0, 0), invoked(1, 1), acked(1, 1, 5)];
    only(ViolationClass::NotDense, &[&begin, &[read(1, 5, 1, 1)]]);
    // So are a step back, and a read that ends before the high watermark.
    let twice = [read(1, 0, 1, 0), read(1, 0, 1, 0)];
    only(ViolationClass::NotDense, &[&begin, &twice]);
    let mut short = last(1, &[(1, 0), (1, 1)]);
    short.pop();
    short.push(HistoryEvent::FinalEnded { reader: 101, partition: P, high_watermark: 11 });
    only(ViolationClass::NotDense, &[&begin, &short]);
}

#[test]
fn finds_reordered_acks_of_producer() {
    // Both are in flight at the same time; without a stream only the acks are ordered.
    let begin = [invoked(1, 0), invoked(1, 1), acked(1, 0, 5), acked(1, 1, 0)];
    only(ViolationClass::Reordered, &[&begin, &last(1, &[(1, 1), (1, 0)])]);
}

#[test]
fn finds_broken_stream_order() {
    let begin = [streamed(1, 0), streamed(1, 1), unknown(1, 0), unknown(1, 1)];
    only(ViolationClass::StreamBroken, &[&begin, &last(1, &[(1, 1), (1, 0)])]);
    only(ViolationClass::StreamBroken, &[&begin, &last(1, &[(1, 1)])]);
}

#[test]
fn finds_later_batch_before_earlier_one() {
    let begin = [invoked(1, 0), acked(1, 0, 5), invoked(2, 0), acked(2, 0, 0)];
    only(ViolationClass::OutOfTime, &[&begin, &last(1, &[(2, 0), (1, 0)])]);
}

#[test]
fn finds_two_contents_at_one_offset() {
    let begin = [opened(1), invoked(1, 0), invoked(2, 0), unknown(2, 0), acked(1, 0, 0)];
    only(ViolationClass::Diverged, &[&begin, &[read(1, 0, 2, 0)]]);
    let wrong = [read(1, 0, 1, 0), opened(2), read(2, 0, 2, 0)];
    only(ViolationClass::Diverged, &[&begin, &wrong]);
    // An ack with the offset of another batch.
    let verdict = judge(&[&begin, &[invoked(1, 1), acked(1, 1, 3)]]);
    assert!(verdict.has(ViolationClass::Diverged), "{verdict}");
}

#[test]
fn finds_vanished_batch() {
    let begin = [opened(1), invoked(1, 0), unknown(1, 0), read(1, 0, 1, 0)];
    let verdict = judge(&[&begin, &last(1, &[])]);
    assert_eq!(verdict.counts.keys().copied().collect::<Vec<_>>(), [ViolationClass::Vanished]);
    // Known only from a high watermark, or the reader gets "out of range".
    let reported = [HistoryEvent::Watermark { session: 1, partition: P, high_watermark: 5 }];
    only(ViolationClass::Vanished, &[&[invoked(1, 0)], &reported, &last(1, &[])]);
    let sent_away = [HistoryEvent::OutOfRange { reader: 1, partition: P, offset: 5 }];
    only(ViolationClass::Vanished, &[&begin, &sent_away]);
    let may_trim = |offset| HistoryEvent::MayTrim { partition: P, offset };
    only(ViolationClass::Vanished, &[&begin, &[may_trim(5)], &sent_away]);
    accepted(&[&begin, &[may_trim(6)], &sent_away]);
}

#[test]
fn finds_record_that_was_never_written() {
    only(ViolationClass::Unwritten, &[&[opened(1), read(1, 0, 9, 9)]]);
    // Also a record that is read before it was written.
    let early = [opened(1), read(1, 0, 1, 0), invoked(1, 0)];
    only(ViolationClass::Unwritten, &[&early]);
    let what = "a record that does not match its number".to_owned();
    let foreign = HistoryEvent::Foreign { reader: 1, partition: P, offset: 0, what };
    only(ViolationClass::Unwritten, &[&[opened(1), foreign]]);
}

#[test]
fn finds_partial_batch() {
    let part =
        HistoryEvent::Read { reader: 1, partition: P, offset: 0, key: key(1, 0), records: 3 };
    only(ViolationClass::Torn, &[&[opened(1), invoked(1, 0), acked(1, 0, 0), part]]);
}

#[test]
fn finds_failed_batch_in_log() {
    let begin = [invoked(1, 0), failed(1, 0)];
    only(ViolationClass::FailedAppeared, &[&begin, &last(1, &[(1, 0)])]);
    // Also if it was read before it failed.
    let begin = [opened(1), invoked(1, 0), read(1, 0, 1, 0), failed(1, 0)];
    only(ViolationClass::FailedAppeared, &[&begin]);
}

#[test]
fn finds_decreasing_high_watermark() {
    let reported =
        |session, high_watermark| HistoryEvent::Watermark { session, partition: P, high_watermark };
    only(ViolationClass::WatermarkBack, &[&[reported(1, 10), reported(1, 10), reported(1, 5)]]);
    accepted(&[&[reported(1, 10), reported(2, 5)]]);
}

#[test]
fn finds_stale_latest_offset() {
    let request = HistoryEvent::LatestAsked { probe: 1, partition: P };
    let latest = |offset| HistoryEvent::Latest { probe: 1, partition: P, offset };
    let begin = [invoked(1, 0), acked(1, 0, 0)];
    only(ViolationClass::LatestStale, &[&begin, &[request.clone(), latest(4)]]);
    only(ViolationClass::LatestStale, &[&[request.clone(), latest(5), request.clone(), latest(4)]]);
    accepted(&[&begin, &[request.clone(), latest(5)]]);
    // A batch acked during the request need not be in the response.
    accepted(&[&[invoked(1, 0), request, acked(1, 0, 0), latest(0)]]);
}

#[test]
fn finds_ack_without_majority() {
    let begin = [HistoryEvent::QuorumLost, invoked(1, 0), acked(1, 0, 0), HistoryEvent::QuorumBack];
    only(ViolationClass::AckedWithoutQuorum, &[&begin]);
    // A batch in flight before the loss may have been decided before it.
    accepted(&[&[invoked(1, 0), HistoryEvent::QuorumLost, acked(1, 0, 0)]]);
    accepted(&[&[
        HistoryEvent::QuorumLost,
        invoked(1, 0),
        HistoryEvent::QuorumBack,
        acked(1, 0, 0),
    ]]);
}

#[test]
fn finds_different_replicas() {
    let begin = [invoked(1, 0), unknown(1, 0), invoked(2, 0), unknown(2, 0)];
    let verdict = judge(&[&begin, &last(1, &[(1, 0)]), &last(2, &[(2, 0)])]);
    assert!(verdict.has(ViolationClass::ReplicasDiffer), "{verdict}");
    let verdict = judge(&[&begin, &last(1, &[(1, 0)]), &last(2, &[(1, 0), (2, 0)])]);
    only(
        ViolationClass::ReplicasDiffer,
        &[&begin, &last(1, &[(1, 0)]), &last(2, &[(1, 0), (2, 0)])],
    );
    assert_eq!(verdict.finals, 2);
}

#[test]
fn finds_broken_offset_condition() {
    let demand = |expected| HistoryEvent::Condition { key: key(1, 0), expected, token: None };
    let begin = [invoked(2, 0), acked(2, 0, 0), invoked(1, 0)];
    only(ViolationClass::ConditionBroken, &[&begin, &[demand(Some(0)), acked(1, 0, 5)]]);
    accepted(&[&begin, &[demand(Some(5)), acked(1, 0, 5)]]);
    let refused = |next_offset| HistoryEvent::Refused { key: key(1, 0), next_offset };
    only(ViolationClass::ConditionBroken, &[&begin, &[demand(Some(5)), refused(5)]]);
    // The next offset of the rejection was passed before the invocation.
    only(ViolationClass::ConditionBroken, &[&begin, &[demand(Some(7)), refused(4)]]);
    accepted(&[&begin, &[demand(Some(0)), refused(5)]]);
    only(
        ViolationClass::FailedAppeared,
        &[&begin, &[demand(Some(0)), refused(5)], &last(1, &[(2, 0), (1, 0)])],
    );
}

#[test]
fn finds_ack_with_old_fencing_token() {
    let with =
        |token| HistoryEvent::Condition { key: key(1, 0), expected: None, token: Some(token) };
    let set = |token| HistoryEvent::TokenSet { partition: P, token };
    only(
        ViolationClass::ConditionBroken,
        &[&[set(1), set(2), invoked(1, 0), with(1), acked(1, 0, 0)]],
    );
    accepted(&[&[set(1), set(2), invoked(1, 0), with(2), acked(1, 0, 0)]]);
    // The token was set while the batch was in flight.
    accepted(&[&[set(1), invoked(1, 0), with(1), set(2), acked(1, 0, 0)]]);
}

#[test]
fn finds_wrong_log_start() {
    let begin = [invoked(1, 0), acked(1, 0, 0), invoked(1, 1), acked(1, 1, 5)];
    let allowed = |offset| HistoryEvent::MayTrim { partition: P, offset };
    let trimmed = |offset| HistoryEvent::Trimmed { partition: P, offset };
    let rest = [
        HistoryEvent::FinalOpened { reader: 101, partition: P, round: 1, replica: 1 },
        HistoryEvent::FinalStarts { reader: 101, partition: P, offset: 5 },
        read(101, 5, 1, 1),
        HistoryEvent::FinalEnded { reader: 101, partition: P, high_watermark: 10 },
    ];
    only(ViolationClass::TrimBroken, &[&begin, &rest]);
    accepted(&[&begin, &[allowed(5)], &rest]);
    accepted(&[&begin, &[allowed(5), trimmed(5)], &rest]);
    only(ViolationClass::TrimBroken, &[&begin, &[allowed(10), trimmed(10)], &rest]);
    only(
        ViolationClass::ReplicasDiffer,
        &[&begin, &[allowed(5)], &rest, &last(2, &[(1, 0), (1, 1)])],
    );
    let reported = [HistoryEvent::Starts { partition: P, offset: 5 }];
    only(ViolationClass::TrimBroken, &[&begin, &[allowed(4)], &reported]);
    accepted(&[&begin, &[allowed(5)], &reported]);
}

/// Verdicts on a prefix do not change the final verdict.
#[test]
fn intermediate_verdicts_do_not_change_result() {
    let events = correct_history(seed(), 400);
    let mut checker = HistoryChecker::default();
    for (at, line) in lines(&events).iter().enumerate() {
        checker.on(&line.event);
        if at % 100 == 0 {
            assert!(checker.verdict().is_good());
        }
    }
    assert_eq!(checker.verdict(), check(&lines(&events)));
}

#[test]
fn finds_decreasing_append_times() {
    let at = |offset, time_us| HistoryEvent::Stamped { partition: P, offset, time_us };
    only(ViolationClass::TimeBack, &[&[at(0, 10), at(5, 9)]]);
    only(ViolationClass::TimeBack, &[&[at(5, 10), at(0, 11)]]);
    only(ViolationClass::TimeBack, &[&[at(0, 10), at(0, 11)]]);
    accepted(&[&[at(0, 10), at(5, 10), at(0, 10), at(10, 12)]]);
}

#[test]
fn finds_inconsistent_history() {
    only(ViolationClass::BadHistory, &[&[acked(1, 0, 0)]]);
    only(ViolationClass::BadHistory, &[&[invoked(1, 0), invoked(1, 0)]]);
    only(ViolationClass::BadHistory, &[&[invoked(1, 0), acked(1, 0, 0), failed(1, 0)]]);
}

#[test]
fn lines_round_trip_as_json() {
    for event in correct_history(1, 200) {
        let line = HistoryLine { at_us: 7, event };
        let text = serde_json::to_string(&line).unwrap();
        assert_eq!(serde_json::from_str::<HistoryLine>(&text).unwrap(), line, "{text}");
    }
}

fn seed() -> u64 {
    let seed = std::env::var("HELIX_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    println!("seed {seed} (set HELIX_SEED to repeat or vary)");
    seed
}

#[test]
fn accepts_random_correct_histories() {
    let seed = seed();
    for round in 0..300 {
        let verdict = check(&lines(&correct_history(seed + round, 400)));
        assert!(verdict.is_good(), "seed {}: {verdict}", seed + round);
        assert!(verdict.acked > 5 && verdict.finals == 6);
    }
}

#[test]
fn finds_random_corruptions() {
    let seed = seed();
    let classes = [
        ViolationClass::AckedLost,
        ViolationClass::Duplicated,
        ViolationClass::NotDense,
        ViolationClass::Reordered,
        ViolationClass::Diverged,
        ViolationClass::Unwritten,
        ViolationClass::Torn,
        ViolationClass::FailedAppeared,
        ViolationClass::WatermarkBack,
        ViolationClass::LatestStale,
        ViolationClass::AckedWithoutQuorum,
        ViolationClass::ReplicasDiffer,
        ViolationClass::Vanished,
        ViolationClass::TrimBroken,
    ];
    for class in classes {
        let mut corrupted = 0;
        for round in 0..120 {
            let mut rng = StdRng::seed_from_u64(seed + round);
            let mut events = correct_history(seed + round, 300);
            if corrupt(&mut events, class, &mut rng).is_none() {
                continue;
            }
            corrupted += 1;
            let verdict = check(&lines(&events));
            assert!(verdict.has(class), "seed {}: {class} was not found: {verdict}", seed + round);
        }
        assert!(corrupted >= 20, "{class}: only {corrupted} histories could be corrupted");
    }
}

#[test]
fn checks_history_of_a_million_lines() {
    let history = lines(&correct_history(seed(), 1_800_000));
    let begin = tokio::time::Instant::now();
    let verdict = check(&history);
    println!("{} lines checked in {:?}", history.len(), begin.elapsed());
    assert!(verdict.is_good(), "{verdict}");
    assert!(verdict.invoked > 100_000);
}
