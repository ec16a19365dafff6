//! TCP connections that send a request's headers in one packet with its body.

use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use helix_transport::{CoalescedIo, FlushPolicy};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};

/// Returns a channel that connects on first use.
pub(crate) fn connect_lazily(endpoint: &Endpoint) -> Channel {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(endpoint.get_tcp_nodelay());
    // Divided among the addresses that a name resolves to.
    tcp.set_connect_timeout(endpoint.get_connect_timeout());
    endpoint.connect_with_connector_lazy(Connector(tcp))
}

struct Connector(HttpConnector);

impl Service<Uri> for Connector {
    type Response = TokioIo<CoalescedIo<TcpStream>>;
    type Error = <HttpConnector as Service<Uri>>::Error;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.0.call(uri);
        Box::pin(async move {
            let tcp = connecting.await?.into_inner();
            Ok(TokioIo::new(CoalescedIo::new(tcp, FlushPolicy::DeferAll)))
        })
    }
}
