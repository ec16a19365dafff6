//! Counts every call on the client port with its duration and outcome.
//! The outcome is in the headers or trailers of the response. Costs one small allocation per call,
//! none per message.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use helix_proto::error::REASON_TRAILER;
use helix_proto::log::v1::ErrorReason;
use hyper::HeaderMap;
use hyper::body::{Body, Frame, SizeHint};
use hyper::{Request, Response};
use pin_project_lite::pin_project;
use prost::Message;
use tower::{Layer, Service};

use crate::metrics::{Metrics, OpenCall};

const CODE: &str = "grpc-status";

/// Prefix of an error reason's name on the wire.
const REASON_PREFIX: &str = "ERROR_REASON_";

/// Tower layer that adds a [`Meter`].
#[derive(Debug, Clone)]
pub(crate) struct MeterLayer {
    metrics: Arc<Metrics>,
}

impl MeterLayer {
    pub(crate) fn new(metrics: &Arc<Metrics>) -> Self {
        metrics.calls.register(methods(), reasons());
        Self { metrics: metrics.clone() }
    }
}

/// Returns every public method of the descriptors, as "package.Service/Method".
fn methods() -> Vec<String> {
    let files = prost_types::FileDescriptorSet::decode(helix_proto::FILE_DESCRIPTOR_SET)
        .expect("the descriptors were compiled with the types");
    let public = files.file.iter().filter(|file| file.package() == "helix.log.v1");
    let services = public.flat_map(|file| {
        file.service
            .iter()
            .map(|service| (format!("{}.{}", file.package(), service.name()), service))
    });
    services
        .flat_map(|(path, service)| {
            let name = move |method: &str| format!("{path}/{method}");
            service.method.iter().map(move |method| name(method.name()))
        })
        .collect()
}

/// Returns every error reason, as it is written in the trailers.
fn reasons() -> Vec<String> {
    let known = (1..=i32::from(u8::MAX)).filter_map(|number| ErrorReason::try_from(number).ok());
    known.map(|it| it.as_str_name().trim_start_matches(REASON_PREFIX).to_owned()).collect()
}

impl<S> Layer<S> for MeterLayer {
    type Service = Meter<S>;

    fn layer(&self, inner: S) -> Meter<S> {
        Meter { inner, metrics: self.metrics.clone() }
    }
}

/// Tower service that counts the calls to the inner service.
#[derive(Debug, Clone)]
pub(crate) struct Meter<S> {
    inner: S,
    metrics: Arc<Metrics>,
}

impl<S, Q, B> Service<Request<Q>> for Meter<S>
where
    S: Service<Request<Q>, Response = Response<B>>,
{
    type Response = Response<Metered<B>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let call = OpenCall::begin(&self.metrics, request.uri().path());
        ResponseFuture { inner: self.inner.call(request), call }
    }
}

pin_project! {
    /// A call without a response yet.
    pub(crate) struct ResponseFuture<F> {
        #[pin]
        inner: F,
        call: Option<OpenCall>,
    }
}

impl<F, B, E> Future for ResponseFuture<F>
where
    F: Future<Output = Result<Response<B>, E>>,
{
    type Output = Result<Response<Metered<B>>, E>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let response = ready!(this.inner.poll(context))?;
        // A call that fails early has headers only.
        let call = end(this.call.take(), response.headers());
        Poll::Ready(Ok(response.map(|inner| Metered { inner, call })))
    }
}

pin_project! {
    /// Body of a response. Its call ends with the trailers, or when the body is dropped.
    pub(crate) struct Metered<B> {
        #[pin]
        inner: B,
        call: Option<OpenCall>,
    }
}

impl<B: Body<Data = Bytes>> Body for Metered<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.project();
        let frame = ready!(this.inner.poll_frame(context));
        if let Some(Ok(frame)) = &frame
            && let Some(trailers) = frame.trailers_ref()
        {
            *this.call = end(this.call.take(), trailers);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// Ends the call if the headers have a status; otherwise returns it.
fn end(call: Option<OpenCall>, headers: &HeaderMap) -> Option<OpenCall> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    match (call, text(CODE)) {
        (Some(call), Some(code)) => {
            call.end(Some(code), text(REASON_TRAILER));
            None
        }
        (call, _) => call,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_and_reasons_match_the_descriptors() {
        let methods = methods();
        for method in ["ProduceService/Append", "ConsumeService/Subscribe"] {
            let path = format!("helix.log.v1.{method}");
            assert!(methods.contains(&path), "{path}: {methods:?}");
        }
        assert!(methods.len() < 100, "labels are few");
        let reasons = reasons();
        for reason in ["NOT_LEADER", "DISK_FULL"] {
            assert!(reasons.iter().any(|it| it == reason), "{reason}: {reasons:?}");
        }
        assert!(reasons.len() < 100, "labels are few");
    }
}
