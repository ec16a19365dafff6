//! Producer identities.
//!
//! All partitions of a producer share one identity and count their own sequences under it.

use std::sync::Arc;

use helix_proto::log::v1::ProducerIdentity;
use tokio::sync::Mutex;
use tonic::Code;

use crate::client::Client;
use crate::error::{Error, Result};

/// Obtains producer identities. Clones share the current one.
#[derive(Debug, Clone)]
pub(crate) struct Identities {
    client: Client,
    /// Empty for an anonymous producer.
    name: Arc<str>,
    /// The first identity is one of an earlier producer, which is continued.
    is_continued: bool,
    current: Arc<Mutex<Option<ProducerIdentity>>>,
}

impl Identities {
    pub(crate) fn new(client: Client, name: &str) -> Self {
        Self { client, name: name.into(), is_continued: false, current: Arc::default() }
    }

    /// Continues an identity that the service gave to an earlier producer.
    pub(crate) fn continued(client: Client, name: &str, identity: ProducerIdentity) -> Self {
        let current = Arc::new(Mutex::new(Some(identity)));
        Self { client, name: name.into(), is_continued: true, current }
    }

    /// Returns true if the identity is one of an earlier producer, which has sequences already.
    pub(crate) fn is_continued(&self) -> bool {
        self.is_continued
    }

    /// Returns the current identity; requests one if there is none.
    pub(crate) async fn current(&self) -> Result<ProducerIdentity> {
        self.replace(None).await
    }

    /// Returns an identity other than `old`, under which the caller's sequences start at 0.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` for a named producer that needs another identity: claiming the name
    /// again could fence the instance that owns it by now. The same for a continued identity:
    /// records that it has stored would be stored again under another one.
    pub(crate) async fn replace(&self, old: Option<ProducerIdentity>) -> Result<ProducerIdentity> {
        // Held during the request, so that partitions that need a new identity share it.
        let mut current = self.current.lock().await;
        match *current {
            Some(identity) if Some(identity) != old => Ok(identity),
            Some(_) if !self.name.is_empty() || self.is_continued => Err(Error::client(
                Code::FailedPrecondition,
                format!("producer {:?} has lost its identity; create a new producer", self.name),
            )),
            _ => {
                let identity = self.init().await?;
                *current = Some(identity);
                Ok(identity)
            }
        }
    }

    async fn init(&self) -> Result<ProducerIdentity> {
        self.client.init_producer(&self.name).await
    }
}
