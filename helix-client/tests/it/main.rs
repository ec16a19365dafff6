//! The client against a small service of two nodes in this process, which breaks calls on purpose.
//! Holds what the client promises by itself; the real server has its own tests.

#![allow(clippy::unwrap_used, reason = "a test that is wrong may panic")]

mod consume;
mod produce;
mod service;

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

fn client(service: &Service) -> Client {
    let config = Config {
        backoff_min: Duration::from_millis(1),
        backoff_max: Duration::from_millis(20),
        heartbeat_timeout: Duration::from_millis(300),
        seed: Some(1),
        ..Config::new(service.addresses())
    };
    Client::new(config).unwrap()
}

fn record(value: impl Into<String>) -> Record {
    Record { value: Some(value.into().into()), ..Record::default() }
}
