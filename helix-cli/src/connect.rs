//! From the global flags to a client that has spoken to a node.
//! A cluster that is not there is said after seconds; one that is gets the client's full patience.

use std::time::Duration;

use anyhow::Context;
use helix_client::{Client, Config};

use crate::args::Global;

/// How long a first answer may take. A node that starts is up within this.
const FIRST_ANSWER_MAX: Duration = Duration::from_secs(2);

/// Connects to the cluster.
///
/// # Errors
/// No node answers.
pub(crate) async fn connect(global: &Global) -> anyhow::Result<Client> {
    let config = Config::new(global.addr.iter().cloned());
    let probe = Config { request_timeout: FIRST_ANSWER_MAX, ..config.clone() };
    let probe = Client::connect(probe).await;
    probe.with_context(|| format!("connect to {}", global.addr.join(",")))?;
    Ok(Client::new(config)?)
}

/// Connects to the cluster if a node answers at once.
pub(crate) async fn connect_at_once(global: &Global) -> Option<Client> {
    let request_timeout = Duration::from_millis(500);
    let config = Config { request_timeout, ..Config::new(global.addr.iter().cloned()) };
    Client::connect(config).await.ok()
}
