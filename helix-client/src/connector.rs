//! Connections over TCP, on which a request's headers go out with its body.

use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use helix_proto::gather::{Gathered, Waits};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};

/// A channel that connects when it is first used.
pub(crate) fn connect_lazily(endpoint: &Endpoint) -> Channel {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(endpoint.get_tcp_nodelay());
    // Shared out among the addresses of a name.
    tcp.set_connect_timeout(endpoint.get_connect_timeout());
    endpoint.connect_with_connector_lazy(Connector(tcp))
}

struct Connector(HttpConnector);

impl Service<Uri> for Connector {
    type Response = TokioIo<Gathered<TcpStream>>;
    type Error = <HttpConnector as Service<Uri>>::Error;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.0.call(uri);
        Box::pin(async move {
            let tcp = connecting.await?.into_inner();
            Ok(TokioIo::new(Gathered::new(tcp, Waits::Always)))
        })
    }
}
