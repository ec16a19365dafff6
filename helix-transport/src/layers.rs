//! Services that detach and attach bodies around tonic's clients and servers.

use std::task::{Context, Poll};

use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::NamedService;

use crate::detached::DetachedBody;
use crate::encode::empty_message;
use crate::splitter::FramedBody;

/// Detaches the body of a request whose method carries records. Returns false for other methods.
///
/// The handler reads the body with [`read_unary`](crate::read_unary) or
/// [`read_messages`](crate::read_messages).
pub fn detach_body(request: &mut http::Request<tonic::body::Body>) -> bool {
    let substitute = match request.uri().path() {
        // tonic insists on one message in a unary request.
        "/helix.log.v1.ProduceService/Append" => empty_message(),
        "/helix.log.v1.ProduceService/AppendStream" | "/helix.raft.v1.PeerService/Exchange" => {
            tonic::body::Body::default()
        }
        _ => return false,
    };
    let body = std::mem::replace(request.body_mut(), substitute);
    request.extensions_mut().insert(DetachedBody::new(body));
    true
}

/// A client's channel that sends detached request bodies and frames the responses.
///
/// Wraps each response in a [`FramedBody`].
#[derive(Debug, Clone)]
pub struct ResponseLayer<S>(pub S);

impl<S> Service<http::Request<tonic::body::Body>> for ResponseLayer<S>
where
    S: Service<http::Request<tonic::body::Body>, Response = http::Response<tonic::body::Body>>,
    S::Future: Send + 'static,
{
    type Response = http::Response<FramedBody<tonic::body::Body>>;
    type Error = S::Error;
    type Future = BoxFuture<Self::Response, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<tonic::body::Body>) -> Self::Future {
        if let Some(body) = request.extensions_mut().remove::<DetachedBody>() {
            *request.body_mut() = body.take();
        }
        let response = self.0.call(request);
        Box::pin(async move { Ok(response.await?.map(FramedBody::new)) })
    }
}

/// A server's service that detaches request bodies with records and frames the others.
///
/// See [`detach_body`]; the other requests get a [`FramedBody`].
#[derive(Debug, Clone)]
pub struct RequestLayer<S>(pub S);

impl<S> Service<http::Request<tonic::body::Body>> for RequestLayer<S>
where
    S: Service<http::Request<tonic::body::Body>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<tonic::body::Body>) -> Self::Future {
        if detach_body(&mut request) {
            return self.0.call(request);
        }
        self.0.call(request.map(|body| tonic::body::Body::new(FramedBody::new(body))))
    }
}

impl<S: NamedService> NamedService for RequestLayer<S> {
    const NAME: &'static str = S::NAME;
}
