//! Who a producer is to the service. One identity is shared by all partitions of a producer; each
//! partition counts its own sequence under it.

use std::sync::Arc;

use helix_proto::log::v1::{InitProducerRequest, ProducerIdentity};
use tokio::sync::Mutex;
use tonic::Code;

use crate::client::{Call, Client};
use crate::error::{Error, Result};
use crate::retry::Repeat;

/// Where identities come from. Clones share the present one.
#[derive(Debug, Clone)]
pub(crate) struct Identities {
    client: Client,
    /// Empty: anonymous.
    name: Arc<str>,
    present: Arc<Mutex<Option<ProducerIdentity>>>,
}

impl Identities {
    pub(crate) fn new(client: Client, name: &str) -> Self {
        Self { client, name: name.into(), present: Arc::default() }
    }

    /// The present identity; asks for one if there is none.
    ///
    /// # Errors
    /// Why none could be had.
    pub(crate) async fn present(&self) -> Result<ProducerIdentity> {
        self.other_than(None).await
    }

    /// An identity that is not `old`: under it, sequences of the asking partition start at 0.
    ///
    /// # Errors
    /// Why none could be had. A named producer does not get another one: to claim the name again
    /// could fence the instance that has taken it over since.
    pub(crate) async fn other_than(
        &self,
        old: Option<ProducerIdentity>,
    ) -> Result<ProducerIdentity> {
        // Held while the service is asked, so that partitions that need a new identity at the same
        // time share one.
        let mut present = self.present.lock().await;
        match *present {
            Some(identity) if Some(identity) != old => Ok(identity),
            Some(_) if !self.name.is_empty() => Err(Error::client(
                Code::FailedPrecondition,
                format!("producer {:?} has lost its place; make a new one", self.name),
            )),
            _ => {
                let identity = self.init().await?;
                *present = Some(identity);
                Ok(identity)
            }
        }
    }

    async fn init(&self) -> Result<ProducerIdentity> {
        // An identity that is lost on the way is never used: asking again is safe.
        let call = Call::new("init producer", Repeat::Always);
        let answer = self
            .client
            .call_any(call, |connection| {
                let request = InitProducerRequest { producer_name: self.name.to_string() };
                async move { connection.produce().init_producer(request).await }
            })
            .await
            .map_err(|error| error.with_may_have_applied(false))?;
        answer.producer.ok_or_else(|| Error::client(Code::Internal, "answer without identity"))
    }
}
