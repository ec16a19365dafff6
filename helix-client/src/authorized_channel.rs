//! A channel whose calls carry the client's token.

use std::task::{Context, Poll};

use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::{Request, Response, header};
use tonic::transport::Channel;

use crate::token::TokenSource;

/// A channel that adds the token to each call.
#[derive(Debug, Clone)]
pub struct AuthorizedChannel {
    channel: Channel,
    token: TokenSource,
}

impl AuthorizedChannel {
    /// Adds the token of this source to the calls on `channel`.
    pub fn new(channel: Channel, token: TokenSource) -> Self {
        Self { channel, token }
    }
}

impl Service<Request<Body>> for AuthorizedChannel {
    type Response = Response<Body>;
    type Error = <Channel as Service<Request<Body>>>::Error;
    type Future = <Channel as Service<Request<Body>>>::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.channel.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if let Some(token) = self.token.header() {
            request.headers_mut().insert(header::AUTHORIZATION, token);
        }
        self.channel.call(request)
    }
}
