//! Context of a request for its handler.

use std::net::SocketAddr;
use std::sync::Arc;

use kafka_protocol::protocol::StrBytes;

use crate::state::GatewayState;
use crate::upstream::Upstream;

/// Context of a request.
#[derive(Debug, Clone)]
pub(crate) struct RequestContext {
    pub(crate) state: Arc<GatewayState>,
    /// The cluster with the credentials of this request.
    pub(crate) upstream: Arc<Upstream>,
    /// Version of the request.
    pub(crate) version: i16,
    /// Name that the client gives itself.
    pub(crate) client_id: String,
    /// Address of the client.
    pub(crate) peer: SocketAddr,
}

/// Returns a string of the protocol.
pub(crate) fn text(text: impl Into<String>) -> StrBytes {
    StrBytes::from_string(text.into())
}
