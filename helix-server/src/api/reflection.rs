//! `grpc.reflection`: describes the services to clients without the .proto files.
//! tonic's service does not stop at shutdown: its streams wait for the next request of the client.
//! The wrapper here ends them.

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

/// Adds both versions of reflection, since older tools know only v1alpha.
///
/// Their streams end when `draining` is cancelled, after the responses to earlier requests.
pub(crate) fn add_reflection(routes: Routes, draining: &CancellationToken) -> Routes {
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(helix_proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let valid = "the descriptors were compiled with the types";
    let v1 = reflection().build_v1().expect(valid);
    let v1alpha = reflection().build_v1alpha().expect(valid);
    routes
        .add_service(Drainable { service: v1, draining: draining.clone() })
        .add_service(Drainable { service: v1alpha, draining: draining.clone() })
}

/// A service whose request streams end when the server drains, as if their clients ended them.
#[derive(Clone)]
struct Drainable<S> {
    service: S,
    draining: CancellationToken,
}

impl<S: NamedService> NamedService for Drainable<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Drainable<S>
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
        self.service.call(request.map(|body| Body::new(DrainableBody { body, draining })))
    }
}

struct DrainableBody {
    body: Body,
    draining: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl hyper::body::Body for DrainableBody {
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
