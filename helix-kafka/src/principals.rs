//! Clients of the cluster with the credentials of the gateway's clients.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use helix_client::{Client, Config, Result, TokenSource};

use crate::upstream::Upstream;

/// One client of the cluster for each token in use. Connections with one token share it.
pub(crate) struct PrincipalPool {
    config: Config,
    /// By token. An entry goes with its last connection.
    upstreams: Mutex<HashMap<String, Weak<Upstream>>>,
}

impl fmt::Debug for PrincipalPool {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The keys are secrets.
        formatter.write_str("PrincipalPool")
    }
}

impl PrincipalPool {
    /// Creates a pool of clients with these settings, except for the token.
    pub(crate) fn new(config: Config) -> Self {
        Self { config, upstreams: Mutex::default() }
    }

    /// Returns the cluster as the owner of this token sees it. The token is not checked.
    ///
    /// # Errors
    /// The text cannot be a token.
    pub(crate) fn get(&self, token: &str) -> Result<Arc<Upstream>> {
        let mut upstreams = self.upstreams.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(upstream) = upstreams.get(token).and_then(Weak::upgrade) {
            return Ok(upstream);
        }
        let token_source = TokenSource::fixed(token)?;
        let config = Config { token: token_source, ..self.config.clone() };
        let upstream = Arc::new(Upstream::new(Client::new(config)?));
        upstreams.retain(|_, upstream| upstream.strong_count() > 0);
        upstreams.insert(token.to_owned(), Arc::downgrade(&upstream));
        Ok(upstream)
    }
}
