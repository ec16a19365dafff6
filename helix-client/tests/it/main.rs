//! The client against a small service of three nodes in this process, which breaks on purpose.
//! Holds what the client promises by itself; the real server has its own tests.

#![allow(clippy::unwrap_used, reason = "a test that is wrong may panic")]

mod consume;
mod failover;
mod produce;
mod replicas;
mod service;

use std::future::Future;
use std::time::Duration;

use helix_client::proto::log::v1::Record;
use helix_client::{Client, Config};
use service::Service;

/// `HELIX_SEED` if it is set, else one that is the same on every run. Printed, so that a failure
/// can be repeated.
fn seed() -> u64 {
    let seed = std::env::var("HELIX_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0xC1);
    println!("seed {seed}");
    seed
}

fn config(service: &Service) -> Config {
    Config {
        backoff_min: Duration::from_millis(1),
        backoff_max: Duration::from_millis(20),
        hedge_after: Duration::from_millis(50),
        stall_after: Duration::from_millis(50),
        seed: Some(1),
        ..Config::new(service.addresses())
    }
}

fn client(service: &Service) -> Client {
    Client::new(config(service)).unwrap()
}

/// Much more than a failover takes, and less than the timeouts that it must not wait for.
const DEADLINE: Duration = Duration::from_secs(5);

async fn in_time<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, what).await.expect("in time")
}

/// Tries until there is an answer.
async fn within_deadline<T>(attempt: impl AsyncFn() -> Option<T>) -> T {
    in_time(async {
        loop {
            if let Some(answer) = attempt().await {
                return answer;
            }
            tokio::task::yield_now().await;
        }
    })
    .await
}

fn record(value: impl Into<String>) -> Record {
    Record { value: Some(value.into().into()), ..Record::default() }
}
