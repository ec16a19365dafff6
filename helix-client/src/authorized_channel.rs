//! A channel whose calls carry the client's token.

use std::task::{Context, Poll};

use tonic::body::Body;
use tonic::codegen::http::{Request, Response, header};
use tonic::codegen::{BoxFuture, Service, StdError};
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::refusal::RefusalNote;
use crate::token::TokenSource;

/// A channel that adds the token to each call.
#[derive(Debug, Clone)]
pub struct AuthorizedChannel {
    channel: Channel,
    token: TokenSource,
    refusal: RefusalNote,
}

impl AuthorizedChannel {
    /// Adds the token of this source to the calls on `channel`.
    pub fn new(channel: Channel, token: TokenSource) -> Self {
        Self { channel, token, refusal: RefusalNote::default() }
    }

    /// Explains failed calls by what the connections of the channel note here.
    pub(crate) fn with_refusal(self, refusal: RefusalNote) -> Self {
        Self { refusal, ..self }
    }
}

impl Service<Request<Body>> for AuthorizedChannel {
    type Response = Response<Body>;
    /// The error of the channel, or the status of a call that the token source failed.
    type Error = StdError;
    type Future = BoxFuture<Self::Response, StdError>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.channel.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        match self.token.header() {
            Ok(Some(token)) => {
                request.headers_mut().insert(header::AUTHORIZATION, token);
            }
            Ok(None) => {}
            Err(status) => return Box::pin(async { Err(status.into()) }),
        }
        let mark = self.refusal.begin();
        let responding = self.channel.call(request);
        let (token, refusal) = (self.token.clone(), self.refusal.clone());
        Box::pin(async move {
            let response = responding.await.map_err(|error| refusal.explain(mark, error))?;
            // A call that is refused has its status in the headers.
            if let Some(Code::Unauthenticated) = response
                .headers()
                .get(Status::GRPC_STATUS)
                .map(|it| Code::from_bytes(it.as_bytes()))
            {
                token.on_refused();
            }
            Ok(response)
        })
    }
}
