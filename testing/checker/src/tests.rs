//! Good stories that must pass, hand-made bad ones of every class that must not, and random ones:
//! right as they are, wrong after a single corruption.

use rand::SeedableRng;
use rand::rngs::StdRng;

use super::testing::{corrupt, good, lines};
use super::{BatchKey, Checker, Class, Event, Line, Verdict, check};

const P: u32 = 3;

fn key(producer: u32, number: u64) -> BatchKey {
    BatchKey { producer, number }
}

fn invoked(producer: u32, number: u64) -> Event {
    Event::Invoked { key: key(producer, number), partition: P, records: 5, stream: None }
}

fn streamed(producer: u32, number: u64) -> Event {
    Event::Invoked { key: key(producer, number), partition: P, records: 5, stream: Some(1) }
}

fn acked(producer: u32, number: u64, offset: u64) -> Event {
    Event::Acked { key: key(producer, number), offset }
}

fn failed(producer: u32, number: u64) -> Event {
    Event::Failed { key: key(producer, number) }
}

fn unknown(producer: u32, number: u64) -> Event {
    Event::Unknown { key: key(producer, number) }
}

fn opened(reader: u32) -> Event {
    Event::Opened { reader, partition: P, offset: 0 }
}

fn read(reader: u32, offset: u64, producer: u32, number: u64) -> Event {
    Event::Read { reader, partition: P, offset, key: key(producer, number), records: 5 }
}

/// A final read of these batches, which lie one behind the other.
fn last(replica: u32, batches: &[(u32, u64)]) -> Vec<Event> {
    let reader = 100 + replica;
    let replica = u64::from(replica);
    let mut events = vec![Event::FinalOpened { reader, partition: P, round: 1, replica }];
    let mut offset = 0;
    for (producer, number) in batches {
        events.push(read(reader, offset, *producer, *number));
        offset += 5;
    }
    events.push(Event::FinalEnded { reader, partition: P, high_watermark: offset });
    events
}

fn judge(parts: &[&[Event]]) -> Verdict {
    check(&lines(&parts.concat()))
}

/// The history is wrong in this way and in no other.
#[track_caller]
fn only(class: Class, parts: &[&[Event]]) {
    let verdict = judge(parts);
    let found: Vec<_> = verdict.counts.keys().copied().collect();
    assert_eq!(found, [class], "{verdict}");
    assert!(verdict.violations.iter().all(|found| !found.lines.is_empty()));
}

#[track_caller]
fn accepted(parts: &[&[Event]]) {
    let verdict = judge(parts);
    assert!(verdict.is_good(), "{verdict}");
}

#[test]
fn a_plain_story_is_accepted() {
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
fn an_open_outcome_may_go_either_way() {
    let begin = [invoked(1, 0), unknown(1, 0), invoked(1, 1), acked(1, 1, 5)];
    accepted(&[&begin, &last(1, &[(1, 0), (1, 1)])]);
    let begin = [invoked(1, 0), unknown(1, 0), invoked(1, 1), acked(1, 1, 0)];
    accepted(&[&begin, &last(1, &[(1, 1)])]);
    // A retry that was given up may land late, behind what was sent after it.
    accepted(&[&begin, &last(1, &[(1, 1), (1, 0)])]);
    // An outcome that never came is as open as one that is said to be.
    let begin = [invoked(1, 0)];
    accepted(&[&begin, &last(1, &[(1, 0)])]);
    accepted(&[&begin, &last(1, &[])]);
}

#[test]
fn a_stream_may_end_anywhere() {
    let begin = [streamed(1, 0), streamed(1, 1), streamed(1, 2), acked(1, 0, 0)];
    let end = [unknown(1, 1), failed(1, 2)];
    accepted(&[&begin, &end, &last(1, &[(1, 0)])]);
    accepted(&[&begin, &end, &last(1, &[(1, 0), (1, 1)])]);
}

#[test]
fn an_acked_batch_is_lost() {
    let begin = [invoked(1, 0), acked(1, 0, 0), invoked(1, 1), acked(1, 1, 5)];
    let verdict = judge(&[&begin, &last(1, &[(1, 0)])]);
    assert!(verdict.has(Class::AckedLost), "{verdict}");
    let lost = verdict.violations.iter().find(|found| found.class == Class::AckedLost).unwrap();
    assert_eq!(lost.lines, [4, 5, 7], "the ack, and the final read");
    assert!(lost.what.contains("batch 1/1 was acked at 3@5"), "{}", lost.what);
}

#[test]
fn a_batch_is_there_twice() {
    let begin = [invoked(1, 0), acked(1, 0, 0)];
    only(Class::Duplicated, &[&begin, &last(1, &[(1, 0), (1, 0)])]);
}

#[test]
fn offsets_have_a_gap() {
    let begin = [opened(1), invoked(1, 0), acked(1, 0, 0), invoked(1, 1), acked(1, 1, 5)];
    only(Class::NotDense, &[&begin, &[read(1, 5, 1, 1)]]);
    // A step back is one too, as is a read that ends before the high watermark.
    let twice = [read(1, 0, 1, 0), read(1, 0, 1, 0)];
    only(Class::NotDense, &[&begin, &twice]);
    let mut short = last(1, &[(1, 0), (1, 1)]);
    short.pop();
    short.push(Event::FinalEnded { reader: 101, partition: P, high_watermark: 11 });
    only(Class::NotDense, &[&begin, &short]);
}

#[test]
fn a_producers_order_is_broken() {
    // Both are under way at once; without a stream only the acks count.
    let begin = [invoked(1, 0), invoked(1, 1), acked(1, 0, 5), acked(1, 1, 0)];
    only(Class::Reordered, &[&begin, &last(1, &[(1, 1), (1, 0)])]);
}

#[test]
fn a_streams_order_is_broken() {
    let begin = [streamed(1, 0), streamed(1, 1), unknown(1, 0), unknown(1, 1)];
    only(Class::StreamBroken, &[&begin, &last(1, &[(1, 1), (1, 0)])]);
    only(Class::StreamBroken, &[&begin, &last(1, &[(1, 1)])]);
}

#[test]
fn a_later_batch_stands_before_an_earlier_one() {
    let begin = [invoked(1, 0), acked(1, 0, 5), invoked(2, 0), acked(2, 0, 0)];
    only(Class::OutOfTime, &[&begin, &last(1, &[(2, 0), (1, 0)])]);
}

#[test]
fn an_offset_has_two_contents() {
    let begin = [opened(1), invoked(1, 0), invoked(2, 0), unknown(2, 0), acked(1, 0, 0)];
    only(Class::Diverged, &[&begin, &[read(1, 0, 2, 0)]]);
    let wrong = [read(1, 0, 1, 0), opened(2), read(2, 0, 2, 0)];
    only(Class::Diverged, &[&begin, &wrong]);
    // An ack that names the place of another batch.
    let verdict = judge(&[&begin, &[invoked(1, 1), acked(1, 1, 3)]]);
    assert!(verdict.has(Class::Diverged), "{verdict}");
}

#[test]
fn what_was_read_vanishes() {
    let begin = [opened(1), invoked(1, 0), unknown(1, 0), read(1, 0, 1, 0)];
    let verdict = judge(&[&begin, &last(1, &[])]);
    assert_eq!(verdict.counts.keys().copied().collect::<Vec<_>>(), [Class::Vanished]);
    // Or only its high watermark was told, or the reader is sent away.
    let told = [Event::Watermark { session: 1, partition: P, high_watermark: 5 }];
    only(Class::Vanished, &[&[invoked(1, 0)], &told, &last(1, &[])]);
    let sent_away = [Event::OutOfRange { reader: 1, partition: P, offset: 5 }];
    only(Class::Vanished, &[&begin, &sent_away]);
    let may_trim = |offset| Event::MayTrim { partition: P, offset };
    only(Class::Vanished, &[&begin, &[may_trim(5)], &sent_away]);
    accepted(&[&begin, &[may_trim(6)], &sent_away]);
}

#[test]
fn a_record_comes_from_nowhere() {
    only(Class::Unwritten, &[&[opened(1), read(1, 0, 9, 9)]]);
    // Before it was written, or out of another partition, is from nowhere too.
    let early = [opened(1), read(1, 0, 1, 0), invoked(1, 0)];
    only(Class::Unwritten, &[&early]);
    let what = "a record that does not match its number".to_owned();
    let foreign = Event::Foreign { reader: 1, partition: P, offset: 0, what };
    only(Class::Unwritten, &[&[opened(1), foreign]]);
}

#[test]
fn a_batch_is_torn() {
    let part = Event::Read { reader: 1, partition: P, offset: 0, key: key(1, 0), records: 3 };
    only(Class::Torn, &[&[opened(1), invoked(1, 0), acked(1, 0, 0), part]]);
}

#[test]
fn a_failed_batch_appears() {
    let begin = [invoked(1, 0), failed(1, 0)];
    only(Class::FailedAppeared, &[&begin, &last(1, &[(1, 0)])]);
    // Also if it was read before its failure was told.
    let begin = [opened(1), invoked(1, 0), read(1, 0, 1, 0), failed(1, 0)];
    only(Class::FailedAppeared, &[&begin]);
}

#[test]
fn a_high_watermark_goes_back() {
    let told = |session, high_watermark| Event::Watermark { session, partition: P, high_watermark };
    only(Class::WatermarkBack, &[&[told(1, 10), told(1, 10), told(1, 5)]]);
    accepted(&[&[told(1, 10), told(2, 5)]]);
}

#[test]
fn latest_is_stale() {
    let asked = Event::LatestAsked { probe: 1, partition: P };
    let latest = |offset| Event::Latest { probe: 1, partition: P, offset };
    let begin = [invoked(1, 0), acked(1, 0, 0)];
    only(Class::LatestStale, &[&begin, &[asked.clone(), latest(4)]]);
    only(Class::LatestStale, &[&[asked.clone(), latest(5), asked.clone(), latest(4)]]);
    accepted(&[&begin, &[asked.clone(), latest(5)]]);
    // What was acked while the question was under way need not be in the answer.
    accepted(&[&[invoked(1, 0), asked, acked(1, 0, 0), latest(0)]]);
}

#[test]
fn an_ack_comes_without_a_majority() {
    let begin = [Event::QuorumLost, invoked(1, 0), acked(1, 0, 0), Event::QuorumBack];
    only(Class::AckedWithoutQuorum, &[&begin]);
    // What was under way before may have been decided before.
    accepted(&[&[invoked(1, 0), Event::QuorumLost, acked(1, 0, 0)]]);
    accepted(&[&[Event::QuorumLost, invoked(1, 0), Event::QuorumBack, acked(1, 0, 0)]]);
}

#[test]
fn replicas_differ() {
    let begin = [invoked(1, 0), unknown(1, 0), invoked(2, 0), unknown(2, 0)];
    let verdict = judge(&[&begin, &last(1, &[(1, 0)]), &last(2, &[(2, 0)])]);
    assert!(verdict.has(Class::ReplicasDiffer), "{verdict}");
    let verdict = judge(&[&begin, &last(1, &[(1, 0)]), &last(2, &[(1, 0), (2, 0)])]);
    only(Class::ReplicasDiffer, &[&begin, &last(1, &[(1, 0)]), &last(2, &[(1, 0), (2, 0)])]);
    assert_eq!(verdict.finals, 2);
}

#[test]
fn a_condition_is_not_kept() {
    let demand = |expected| Event::Condition { key: key(1, 0), expected, token: None };
    let begin = [invoked(2, 0), acked(2, 0, 0), invoked(1, 0)];
    only(Class::ConditionBroken, &[&begin, &[demand(Some(0)), acked(1, 0, 5)]]);
    accepted(&[&begin, &[demand(Some(5)), acked(1, 0, 5)]]);
    let refused = |next_offset| Event::Refused { key: key(1, 0), next_offset };
    only(Class::ConditionBroken, &[&begin, &[demand(Some(5)), refused(5)]]);
    // The end that it was refused for had been passed before it came.
    only(Class::ConditionBroken, &[&begin, &[demand(Some(7)), refused(4)]]);
    accepted(&[&begin, &[demand(Some(0)), refused(5)]]);
    only(
        Class::FailedAppeared,
        &[&begin, &[demand(Some(0)), refused(5)], &last(1, &[(2, 0), (1, 0)])],
    );
}

#[test]
fn a_fence_is_passed() {
    let with = |token| Event::Condition { key: key(1, 0), expected: None, token: Some(token) };
    let set = |token| Event::TokenSet { partition: P, token };
    only(Class::ConditionBroken, &[&[set(1), set(2), invoked(1, 0), with(1), acked(1, 0, 0)]]);
    accepted(&[&[set(1), set(2), invoked(1, 0), with(2), acked(1, 0, 0)]]);
    // The token came into force while the batch was under way.
    accepted(&[&[set(1), invoked(1, 0), with(1), set(2), acked(1, 0, 0)]]);
}

#[test]
fn a_log_starts_at_the_wrong_place() {
    let begin = [invoked(1, 0), acked(1, 0, 0), invoked(1, 1), acked(1, 1, 5)];
    let allowed = |offset| Event::MayTrim { partition: P, offset };
    let trimmed = |offset| Event::Trimmed { partition: P, offset };
    let rest = [
        Event::FinalOpened { reader: 101, partition: P, round: 1, replica: 1 },
        Event::FinalStarts { reader: 101, partition: P, offset: 5 },
        read(101, 5, 1, 1),
        Event::FinalEnded { reader: 101, partition: P, high_watermark: 10 },
    ];
    only(Class::TrimBroken, &[&begin, &rest]);
    accepted(&[&begin, &[allowed(5)], &rest]);
    accepted(&[&begin, &[allowed(5), trimmed(5)], &rest]);
    only(Class::TrimBroken, &[&begin, &[allowed(10), trimmed(10)], &rest]);
    only(Class::ReplicasDiffer, &[&begin, &[allowed(5)], &rest, &last(2, &[(1, 0), (1, 1)])]);
    let told = [Event::Starts { partition: P, offset: 5 }];
    only(Class::TrimBroken, &[&begin, &[allowed(4)], &told]);
    accepted(&[&begin, &[allowed(5)], &told]);
}

/// What was found up to any line is found again, and no more, when the rest has followed.
#[test]
fn a_history_is_judged_as_it_grows() {
    let events = good(seed(), 400);
    let mut checker = Checker::default();
    for (place, line) in lines(&events).iter().enumerate() {
        checker.on(&line.event);
        if place % 100 == 0 {
            assert!(checker.verdict().is_good());
        }
    }
    assert_eq!(checker.verdict(), check(&lines(&events)));
}

#[test]
fn append_times_step_back() {
    let at = |offset, time_us| Event::Stamped { partition: P, offset, time_us };
    only(Class::TimeBack, &[&[at(0, 10), at(5, 9)]]);
    only(Class::TimeBack, &[&[at(5, 10), at(0, 11)]]);
    only(Class::TimeBack, &[&[at(0, 10), at(0, 11)]]);
    accepted(&[&[at(0, 10), at(5, 10), at(0, 10), at(10, 12)]]);
}

#[test]
fn a_history_contradicts_itself() {
    only(Class::BadHistory, &[&[acked(1, 0, 0)]]);
    only(Class::BadHistory, &[&[invoked(1, 0), invoked(1, 0)]]);
    only(Class::BadHistory, &[&[invoked(1, 0), acked(1, 0, 0), failed(1, 0)]]);
}

#[test]
fn lines_travel_as_json() {
    for event in good(1, 200) {
        let line = Line { at_us: 7, event };
        let text = serde_json::to_string(&line).unwrap();
        assert_eq!(serde_json::from_str::<Line>(&text).unwrap(), line, "{text}");
    }
}

fn seed() -> u64 {
    let seed = std::env::var("HELIX_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    println!("seed {seed} (set HELIX_SEED to repeat or vary)");
    seed
}

#[test]
fn random_good_stories_are_accepted() {
    let seed = seed();
    for round in 0..300 {
        let verdict = check(&lines(&good(seed + round, 400)));
        assert!(verdict.is_good(), "seed {}: {verdict}", seed + round);
        assert!(verdict.acked > 5 && verdict.finals == 6);
    }
}

#[test]
fn random_corruptions_are_found() {
    let seed = seed();
    let classes = [
        Class::AckedLost,
        Class::Duplicated,
        Class::NotDense,
        Class::Reordered,
        Class::Diverged,
        Class::Unwritten,
        Class::Torn,
        Class::FailedAppeared,
        Class::WatermarkBack,
        Class::LatestStale,
        Class::AckedWithoutQuorum,
        Class::ReplicasDiffer,
        Class::Vanished,
        Class::TrimBroken,
    ];
    for class in classes {
        let mut spoilt = 0;
        for round in 0..120 {
            let mut rng = StdRng::seed_from_u64(seed + round);
            let mut events = good(seed + round, 300);
            if corrupt(&mut events, class, &mut rng).is_none() {
                continue;
            }
            spoilt += 1;
            let verdict = check(&lines(&events));
            assert!(verdict.has(class), "seed {}: {class} was not seen: {verdict}", seed + round);
        }
        assert!(spoilt >= 20, "{class}: only {spoilt} histories could be spoilt");
    }
}

#[test]
fn a_million_operations_are_checked() {
    let history = lines(&good(seed(), 1_800_000));
    let begin = tokio::time::Instant::now();
    let verdict = check(&history);
    println!("{} lines checked in {:?}", history.len(), begin.elapsed());
    assert!(verdict.is_good(), "{verdict}");
    assert!(verdict.invoked > 100_000);
}
