//! Clients that connect with TLS while others leave their handshakes half open.

use std::time::Duration;

use helix_client::{Client, Config};
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::output::print_error;

/// Pause between two clients.
const PAUSE: Duration = Duration::from_millis(50);

/// Longest time until a client is served, with its own retries.
const SERVED_MAX: Duration = Duration::from_secs(5);

/// Outcomes of clients that connected.
#[derive(Debug, Default, Serialize)]
pub(crate) struct NewClients {
    pub(crate) served: u64,
    pub(crate) failed: u64,
}

/// Connects clients one after another, each with a handshake of its own.
pub(crate) async fn connect_new_clients(config: Config, duration: Duration) -> NewClients {
    let config = Config { request_timeout: SERVED_MAX, ..config };
    let mut clients = NewClients::default();
    let end = Instant::now() + duration;
    while Instant::now() < end {
        match Client::connect(config.clone()).await {
            Ok(_) => clients.served += 1,
            Err(error) => {
                clients.failed += 1;
                print_error(format_args!("a new client with TLS: {error}"));
            }
        }
        sleep(PAUSE).await;
    }
    clients
}
