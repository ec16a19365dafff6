//! Outgoing connections over TCP or a simulated network. Both yield tonic channels.

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use tonic::transport::{Channel, Endpoint, Error};

/// Connects to other nodes.
pub trait Dialer: fmt::Debug + Send + Sync + 'static {
    /// Connects now.
    fn connect(&self, endpoint: Endpoint) -> BoxFuture<'static, Result<Channel, Error>>;
    /// Returns a channel that connects on its first call, and again after a failure.
    fn connect_lazily(&self, endpoint: &Endpoint) -> Channel;
    /// Returns the dialer for one node, if that differs: with TLS it verifies the node's identity.
    fn for_node(&self, node_id: u64) -> Option<Arc<dyn Dialer>> {
        let _ = node_id;
        None
    }
}

/// Dials over TCP.
#[derive(Debug, Default)]
pub(super) struct TcpDialer;

impl Dialer for TcpDialer {
    fn connect(&self, endpoint: Endpoint) -> BoxFuture<'static, Result<Channel, Error>> {
        Box::pin(async move { endpoint.connect().await })
    }

    fn connect_lazily(&self, endpoint: &Endpoint) -> Channel {
        endpoint.connect_lazy()
    }
}
