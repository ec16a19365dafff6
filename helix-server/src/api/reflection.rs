//! `grpc.reflection`: describes the services to clients without the .proto files.
//! tonic's service does not stop at shutdown: its streams wait for the next request of the client.
//! It also repeats unknown names in its errors, of any length. The wrapper here ends the streams
//! and cuts the errors.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::TryFutureExt;
use futures_util::future::MapOk;
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::service::Routes;

use crate::limits::ERROR_TEXT_BYTES_MAX;

const MESSAGE: &str = "grpc-message";

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
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = MapOk<S::Future, fn(http::Response<Body>) -> http::Response<Body>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let draining = Box::pin(self.draining.clone().cancelled_owned());
        let request = request.map(|body| Body::new(DrainableBody { body, draining }));
        self.service.call(request).map_ok(cut_errors)
    }
}

/// Cuts the message of a status that would be too large for a gRPC library.
fn cut_errors(mut response: http::Response<Body>) -> http::Response<Body> {
    cut_message(response.headers_mut());
    response.map(|body| {
        Body::new(body.map_frame(|mut frame| {
            frame.trailers_mut().map(cut_message);
            frame
        }))
    })
}

fn cut_message(headers: &mut http::HeaderMap) {
    let Some(message) = headers.get_mut(MESSAGE) else { return };
    let Some(bytes) = message.as_bytes().get(..ERROR_TEXT_BYTES_MAX) else { return };
    // An escape has three bytes: "%C3".
    let end = bytes.iter().rposition(|byte| *byte == b'%').filter(|at| at + 3 > bytes.len());
    let cut = http::HeaderValue::from_bytes(&bytes[..end.unwrap_or(bytes.len())]);
    *message = cut.expect("a part of a header value");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_long_messages_between_escapes() {
        for shift in ["", "x", "xx"] {
            let text = format!("{shift}{}", "%C3".repeat(2_000));
            let mut headers = http::HeaderMap::new();
            headers.insert(MESSAGE, http::HeaderValue::from_str(&text).unwrap());
            cut_message(&mut headers);
            let cut = headers[MESSAGE].to_str().unwrap();
            assert!(cut.len() > ERROR_TEXT_BYTES_MAX - 3 && cut.len() <= ERROR_TEXT_BYTES_MAX);
            assert!((cut.len() - shift.len()).is_multiple_of(3) && text.starts_with(cut));
        }
    }
}
