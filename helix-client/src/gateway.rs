//! Calls of a gateway, which serves another protocol, through [`Connection`] itself.
//!
//! [`Connection`]: crate::Connection

use helix_proto::log::v1::{InitProducerRequest, ProducerIdentity};
use tonic::Code;

use crate::call_spec::{CallSpec, Repeat};
use crate::client::Client;
use crate::connection::Connection;
use crate::error::{Error, Result};
use crate::routing::Route;

impl Client {
    /// Learns from a failed call over `route`. Returns true if another leader is known, so that the
    /// call can be sent there at once.
    ///
    /// Only for callers of [`Client::route`]; other calls learn themselves.
    pub fn report_failure(&self, route: &Route, error: &Error) -> bool {
        self.shared.routing.on_failure(route, error)
    }

    /// Returns the identity of a new producer; an empty name makes an anonymous one.
    ///
    /// # Errors
    /// The last failure if no node responds within the request timeout.
    pub async fn init_producer(&self, name: &str) -> Result<ProducerIdentity> {
        // An identity whose response is lost is never used, so the request can be repeated.
        let call = CallSpec::new("init producer", Repeat::Always);
        let response = self.call_any(call, |node| {
            let request = InitProducerRequest { producer_name: name.to_owned() };
            async move { node.produce().init_producer(request).await }
        });
        let response = response.await.map_err(|error| error.with_may_have_applied(false))?;
        response
            .producer
            .ok_or_else(|| Error::client(Code::Internal, "the response has no producer identity"))
    }

    /// Returns the connection to the node at this address.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if the address is malformed.
    pub fn node(&self, address: &str) -> Result<Connection> {
        self.shared.routing.node(address)
    }

    /// Forgets the partitions of a topic, so that the next call looks them up again.
    pub fn forget_topic(&self, topic: &str) {
        self.shared.routing.forget_topic(topic);
    }
}
