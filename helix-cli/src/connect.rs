//! Connects a client to the cluster that the global options select.
//! The first request has a short timeout, so that an unreachable cluster is reported quickly. Later
//! requests have the client's default timeouts.

use std::time::Duration;

use anyhow::Context;
use helix_client::{Client, Config, Error};

use crate::args::GlobalArgs;

/// Timeout of the first request; long enough for a node that is starting.
const FIRST_RESPONSE_MAX: Duration = Duration::from_secs(2);

/// Shortest timeout of a request; a shorter --timeout ends the command.
const REQUEST_TIMEOUT_MIN: Duration = Duration::from_millis(100);

/// Returns the client's settings: addresses, token, rack and TLS that the global options select.
pub(crate) fn config(global: &GlobalArgs) -> Config {
    let defaults = Config::new(global.addr.iter().cloned());
    let request_timeout = global.timeout.unwrap_or(defaults.request_timeout);
    Config {
        token: global.token.clone(),
        rack: global.client_rack.clone(),
        tls: global.tls_files.clone(),
        pending: global.pending.clone(),
        // The user names the nodes, and has to know that one is gone.
        leave_removed_nodes: false,
        request_timeout: request_timeout.max(REQUEST_TIMEOUT_MIN),
        ..defaults
    }
}

/// Connects to the cluster.
///
/// # Errors
/// Fails if no node answers.
pub(crate) async fn connect(global: &GlobalArgs) -> anyhow::Result<Client> {
    let config = config(global);
    let probe = Config {
        request_timeout: FIRST_RESPONSE_MAX.min(config.request_timeout),
        ..config.clone()
    };
    let probe = Client::connect(probe).await;
    probe.with_context(|| format!("connect to {}", global.addr.join(",")))?;
    Ok(Client::new(config)?)
}

/// Time of a request that only checks a change. A cluster that cannot change refuses for so long.
const CHECK_MAX: Duration = Duration::from_secs(5);

/// Like [`connect`], for checks of changes: an unavailable cluster is reported within seconds.
///
/// # Errors
/// Fails if no node answers.
pub(crate) async fn connect_for_checks(global: &GlobalArgs) -> anyhow::Result<Client> {
    connect(global).await?;
    let config = config(global);
    Ok(Client::new(Config { request_timeout: config.request_timeout.min(CHECK_MAX), ..config })?)
}

/// Connects to the cluster if a node answers within half a second.
///
/// # Errors
/// Fails if no node answers, or if the nodes refuse the caller.
pub(crate) async fn connect_quickly(global: &GlobalArgs) -> Result<Client, Error> {
    let request_timeout = Duration::from_millis(500);
    let config = Config { request_timeout, ..config(global) };
    Client::connect(config).await
}
