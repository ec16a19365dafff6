//! Expected offsets and fencing tokens on three nodes: the the log decides, not the leader.

use std::collections::BTreeMap;
use std::time::Duration;

use helix_client::{AppendOptions, ProducerOptions};
use helix_proto::log::v1::ErrorReason;
use tokio::sync::watch;
use tonic::Code;

use crate::conditions::{append_if, demanding, expecting, fence};
use crate::support::{TestServer, detail, reason, record};
use crate::three_nodes::failover::read_all;
use crate::trio::{NODES, Trio, TrioPlan, expect_equal_replicas};

/// Results of one writer.
#[derive(Debug, Default)]
struct WriterResult {
    /// Values by offset.
    won: BTreeMap<u64, String>,
    lost: u64,
}

/// Appends at the last known end until stopped; after a mismatch it continues at the end that the
/// error states. An uncertain outcome fails the test.
async fn compare_and_append(
    client: helix_client::Client,
    writer: u64,
    stop: watch::Receiver<bool>,
) -> WriterResult {
    let producer = client.producer(ProducerOptions::default());
    let (mut result, mut at) = (WriterResult::default(), 0);
    while !*stop.borrow() {
        let value = format!("{writer}/{at}/{}", result.lost);
        let batch = [record(&value)];
        let options = AppendOptions::default().expecting(at);
        match producer.append_with("default", 0, &batch[..], &options).await {
            Ok(ack) => {
                assert_eq!(ack.first_offset, Some(at));
                result.won.insert(at, value);
                at += 1;
            }
            Err(error) => {
                assert!(error.is(ErrorReason::ExpectedOffsetMismatch), "{error}");
                assert_eq!(error.code, Code::Aborted);
                assert!(!error.may_have_applied, "a losing writer knows the outcome: {error}");
                let next = error.next_offset.expect("the error says where the end is");
                assert!(next > at, "{next} after {at}");
                (at, result.lost) = (next, result.lost + 1);
            }
        }
    }
    result
}

/// Of several appends at the same offset exactly one wins, and each writer knows the outcome.
///
/// That holds also if the response was lost with the leader and the batch was retried.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_offset_has_one_winner_across_leader_changes() {
    let mut trio = Trio::start(TrioPlan::linked().await).await;
    let (done, stop) = watch::channel(false);
    let writers: Vec<_> = (0..3)
        .map(|writer| tokio::spawn(compare_and_append(trio.client(), writer, stop.clone())))
        .collect();
    for round in 0..4 {
        let (leader, shard) = trio.leader_of(0).await;
        if round % 2 == 0 {
            trio.transfer(shard, leader % 3 + 1).await;
        } else {
            trio.isolate(leader);
            trio.write(0, &["mark"]).await;
            trio.heal(leader);
            trio.settle().await;
        }
    }
    done.send_replace(true);
    let (mut won, mut lost) = (BTreeMap::new(), 0);
    for writer in writers {
        let result = tokio::time::timeout(Duration::from_secs(60), writer).await;
        let result = result.expect("it stops").unwrap();
        lost += result.lost;
        for (offset, value) in result.won {
            assert_eq!(won.insert(offset, value), None, "offset {offset} was won twice");
        }
    }
    println!("{} wins, {lost} losses", won.len());
    assert!(lost > 0, "the writers never competed");
    let end = *won.last_key_value().expect("a writer has won").0 + 1;
    let read = read_all(&trio, 0, end).await;
    for (offset, value) in &won {
        assert_eq!(&read[usize::try_from(*offset).unwrap()], value);
    }
    // The only other records are the marks, which were written without a condition.
    let marks = read.iter().filter(|value| *value == "mark").count();
    assert_eq!(won.len() + marks, read.len());
    expect_equal_replicas(&trio, 0, end).await;
    trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_survives_leader_changes_and_full_restarts() {
    let mut trio = Trio::durable().await;
    let set = async |trio: &Trio, expected: Option<&str>, token: &str| {
        trio.call_leader(0, async |node: &TestServer| fence(node, expected, token).await).await
    };
    let append = async |trio: &Trio, value: &str, token: &str| {
        let append = async |node: &TestServer| append_if(node, value, demanding(token)).await;
        trio.call_leader(0, append).await
    };
    set(&trio, Some(""), "one").await.unwrap();
    append(&trio, "a", "one").await.unwrap();
    let (leader, shard) = trio.leader_of(0).await;
    trio.transfer(shard, leader % 3 + 1).await;
    append(&trio, "b", "one").await.unwrap();
    let refused = append(&trio, "no", "").await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::Fenced);
    assert_eq!(detail(&refused).fencing_token.as_deref(), Some("one"));
    set(&trio, Some("one"), "two").await.unwrap();
    let (leader, _) = trio.leader_of(0).await;
    trio.stop(leader).await;
    let refused = append(&trio, "no", "one").await.unwrap_err();
    assert_eq!(detail(&refused).fencing_token.as_deref(), Some("two"));
    append(&trio, "c", "two").await.unwrap();
    trio.start_nodes(&[leader]).await;
    trio.settle().await;
    trio.stop_all().await;
    trio.start_nodes(&NODES).await;
    trio.settle().await;
    let refused = set(&trio, Some("one"), "three").await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::Fenced);
    append(&trio, "d", "two").await.unwrap();
    let again = async |node: &TestServer| append_if(node, "no", expecting(3)).await;
    let refused = trio.call_leader(0, again).await.unwrap_err();
    assert_eq!(detail(&refused).next_offset, Some(4));
    assert_eq!(read_all(&trio, 0, 4).await, ["a", "b", "c", "d"]);
    expect_equal_replicas(&trio, 0, 4).await;
    trio.stop_all().await;
}

/// The old leader does not know the new one yet: it must not acknowledge a batch, and its early
/// verdicts must be true.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn isolated_leader_admits_no_append() {
    let mut trio = Trio::start(TrioPlan::linked().await).await;
    trio.write(0, &["a"]).await;
    let old = trio.isolate_leader(0).await;
    let node = trio.node(old);
    let (open, past) =
        tokio::join!(append_if(node, "open", expecting(1)), append_if(node, "past", expecting(0)));
    let open = open.unwrap_err();
    let open_reasons = [ErrorReason::OutcomeUnknown, ErrorReason::NoLeader];
    assert!(open_reasons.contains(&reason(&open)), "{open}");
    let past = past.unwrap_err();
    let past_reasons = [ErrorReason::ExpectedOffsetMismatch, ErrorReason::NoLeader];
    assert!(past_reasons.contains(&reason(&past)), "{past}");
    trio.write(0, &["mark"]).await;
    trio.heal(old);
    trio.settle().await;
    let producer = trio.client().producer(ProducerOptions::default());
    let options = AppendOptions::default().expecting(2);
    producer.append_with("default", 0, &[record("b")][..], &options).await.unwrap();
    assert_eq!(read_all(&trio, 0, 3).await, ["a", "mark", "b"]);
    trio.stop_all().await;
}
