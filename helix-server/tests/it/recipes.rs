//! The recipes of `docs/recipes.md`: the page shows the code of the examples, and the code does
//! what the page says.

// The test reads the repository itself.
#![allow(clippy::disallowed_methods)]

use std::fs;
use std::path::Path;
use std::time::Duration;

use helix_client::{Client, Config, NewTopic, ProducerOptions};
use helix_proto::log::v1::{ErrorReason, Record};

use crate::support::{TestServer, soon, values};
use crate::trio::until;

// Their `main` functions are unused here.
#[allow(dead_code, unreachable_pub)]
#[path = "../../../helix-client/examples/exactly_once.rs"]
mod exactly_once;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../helix-client/examples/leader.rs"]
mod leader;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../helix-client/examples/ledger.rs"]
mod ledger;

use exactly_once::{add_up, last_total};
use leader::take_leadership;
use ledger::Ledger;

fn client(server: &TestServer) -> Client {
    Client::new(Config::new([server.running.local_addr().to_string()])).unwrap()
}

#[test]
fn docs_show_the_code_of_the_examples() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let document = fs::read_to_string(root.join("docs/recipes.md")).unwrap();
    for name in ["ledger", "leader", "exactly_once"] {
        let path = root.join(format!("helix-client/examples/{name}.rs"));
        let source = fs::read_to_string(path).unwrap();
        let begin = format!("// doc: {name}\n");
        let shown = source.split_once(&begin).unwrap().1.split_once("// doc: end").unwrap().0;
        let block = format!("```rust\n{}\n```\n", shown.trim());
        assert!(document.contains(&block), "docs/recipes.md does not show {name}.rs as it is");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ledger_is_never_overdrawn() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    assert_eq!(Ledger::new(&client, "default").book(100).await.unwrap(), Some(100));
    // Together they request 160 of 100.
    let book = async |_| {
        let mut ledger = Ledger::new(&client, "default");
        let mut booked = 0;
        for _ in 0..8 {
            booked += i64::from(ledger.book(-5).await.unwrap().is_some());
        }
        booked
    };
    let booked: i64 = soon(futures_util::future::join_all((0..4).map(book))).await.iter().sum();
    assert_eq!(booked, 20);
    assert_eq!(Ledger::new(&client, "default").book(-1).await.unwrap(), None);
    assert_eq!(Ledger::new(&client, "default").book(7).await.unwrap(), Some(7));
    let amounts = values(&server.records(0, 0).await);
    let mut balance = 0;
    for amount in &amounts {
        balance += amount.parse::<i64>().unwrap();
        assert!(balance >= 0, "{amounts:?}");
    }
    assert_eq!((amounts.len(), balance), (22, 7));
}

fn record(text: &str) -> Record {
    Record { value: Some(text.to_owned().into()), ..Record::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replaced_leader_cannot_write() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    let patience = Duration::from_millis(50);
    let first = soon(take_leadership(&client, "default", "first", patience)).await.unwrap();
    assert_eq!(first.start_offset, 0);
    first.producer.append("default", 0, &[record("a")][..]).await.unwrap();
    // A short silence of the first leader is enough.
    let second = soon(take_leadership(&client, "default", "second", patience)).await.unwrap();
    assert_eq!(second.start_offset, 1);
    let late = first.producer.append("default", 0, &[record("late")][..]).await.unwrap_err();
    assert!(late.is(ErrorReason::Fenced) && !late.may_have_applied, "{late}");
    assert_eq!(late.fencing_token.as_deref(), Some("second"));
    second.producer.append("default", 0, &[record("b")][..]).await.unwrap();
    assert_eq!(values(&server.records(0, 0).await), ["a", "b"]);
    // Several candidates see the same silence, and one token remains in force.
    let tokens = ["third", "fourth", "fifth"];
    let led = futures_util::future::join_all(
        tokens.map(|token| take_leadership(&client, "default", token, patience)),
    );
    let led = soon(led).await.into_iter().map(Result::unwrap);
    let mut admitted = 0;
    for (lead, token) in led.zip(tokens) {
        let append = lead.producer.append("default", 0, &[record(token)][..]).await;
        admitted += usize::from(append.is_ok());
    }
    assert_eq!(admitted, 1, "one token is in force");
}

/// Members that begin, are dropped in the middle of their work, and begin again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn results_count_each_record_once() {
    const ROUNDS: i64 = 30;
    let server = TestServer::in_memory().await;
    let client = client(&server);
    client.admin().create_topic(&NewTopic::new("totals", 4)).await.unwrap();
    let join = || client.consumer_group("totals").topics(["default"]).join();
    let working = || {
        let (client, consumer) = (client.clone(), join());
        tokio::spawn(async move {
            add_up(&client, consumer, "totals").await.map_err(|it| it.to_string())
        })
    };
    let steady = working();
    let producer = client.producer(ProducerOptions::default());
    for round in 1..=ROUNDS {
        let other = working();
        for partition in 0..4 {
            let amount = record(&round.to_string());
            producer.append("default", partition, &[amount][..]).await.unwrap();
        }
        other.abort();
    }
    for partition in 0..4 {
        until("all records are counted", async || {
            let total = last_total(&client, "totals", partition).await.unwrap();
            (total.next_offset == ROUNDS as u64).then_some(())
        })
        .await;
        let total = last_total(&client, "totals", partition).await.unwrap();
        assert_eq!(total.sum, ROUNDS * (ROUNDS + 1) / 2);
    }
    assert!(!steady.is_finished(), "{:?}", steady.await);
    steady.abort();
}
