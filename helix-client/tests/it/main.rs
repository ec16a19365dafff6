//! Tests of the client against an in-process cluster of three nodes with injected faults.
//!
//! Covers the client's own guarantees; the real server has its own tests.

#![allow(clippy::unwrap_used, reason = "a test that is wrong may panic")]

mod consume;
mod failover;
mod fake_cluster;
mod group_member;
mod produce;
mod recreated;
mod replicas;
mod unix_socket;

use std::future::Future;
use std::time::Duration;

use fake_cluster::FakeCluster;
use helix_client::proto::log::v1::Record;
use helix_client::{Client, Config};

/// Returns `HELIX_SEED`, or a fixed seed if it is not set. Prints it to reproduce a failure.
fn seed() -> u64 {
    let seed = std::env::var("HELIX_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0xC1);
    println!("seed {seed}");
    seed
}

fn config(cluster: &FakeCluster) -> Config {
    Config {
        backoff_min: Duration::from_millis(1),
        backoff_max: Duration::from_millis(20),
        hedge_after: Duration::from_millis(50),
        stall_after: Duration::from_millis(50),
        seed: Some(1),
        ..Config::new(cluster.addresses())
    }
}

fn client(cluster: &FakeCluster) -> Client {
    Client::new(config(cluster)).unwrap()
}

/// Deadline far above a failover, and below the timeouts that it must not wait for.
const DEADLINE: Duration = Duration::from_secs(5);

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future).await.expect("in time")
}

/// Retries until the attempt returns a value.
async fn within_deadline<T>(attempt: impl AsyncFn() -> Option<T>) -> T {
    in_time(async {
        loop {
            if let Some(value) = attempt().await {
                return value;
            }
            tokio::task::yield_now().await;
        }
    })
    .await
}

fn record(value: impl Into<String>) -> Record {
    Record { value: Some(value.into().into()), ..Record::default() }
}
