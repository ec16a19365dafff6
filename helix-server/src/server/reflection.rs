//! Reflection: what a client without our types asks a server for. The service comes ready made and
//! knows of no stop: it waits for the next question for as long as its client may ask one.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::service::Routes;

/// Adds both versions, since older tools know only the second one. Their streams end when
/// `draining` is cancelled, behind the answers to what was asked before.
pub(super) fn add(routes: Routes, draining: &CancellationToken) -> Routes {
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(helix_proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let valid = "the descriptors were compiled with the types";
    let v1 = reflection().build_v1().expect(valid);
    let v1alpha = reflection().build_v1alpha().expect(valid);
    routes
        .add_service(Ending { service: v1, draining: draining.clone() })
        .add_service(Ending { service: v1alpha, draining: draining.clone() })
}

/// A service whose requests end with the server, as if their clients had ended them.
#[derive(Clone)]
struct Ending<S> {
    service: S,
    draining: CancellationToken,
}

impl<S: NamedService> NamedService for Ending<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Ending<S>
where
    S: Service<http::Request<Body>, Error = Infallible>,
{
    type Response = S::Response;
    type Error = Infallible;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let draining = Box::pin(self.draining.clone().cancelled_owned());
        self.service.call(request.map(|body| Body::new(Questions { body, draining })))
    }
}

struct Questions {
    body: Body,
    draining: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl hyper::body::Body for Questions {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Pending => self.draining.as_mut().poll(context).map(|()| None),
            ready => ready,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
