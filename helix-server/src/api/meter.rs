//! Counts the calls: every call to every service of the port passes here, and how it ends stands
//! in its headers or trailers. Costs one small allocation per call, none per message.

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

/// Begins the name of an error reason on the wire.
const REASON_PREFIX: &str = "ERROR_REASON_";

/// Puts a meter before the services.
#[derive(Debug, Clone)]
pub struct MeterLayer {
    metrics: Arc<Metrics>,
}

impl MeterLayer {
    pub fn new(metrics: &Arc<Metrics>) -> Self {
        metrics.calls.name(methods(), reasons());
        Self { metrics: metrics.clone() }
    }
}

/// Every method that the descriptors have, as "package.Service/Method".
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

/// Every reason that an error can have, as it stands in the trailers.
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

#[derive(Debug, Clone)]
pub struct Meter<S> {
    inner: S,
    metrics: Arc<Metrics>,
}

impl<S, Q, B> Service<Request<Q>> for Meter<S>
where
    S: Service<Request<Q>, Response = Response<B>>,
{
    type Response = Response<Metered<B>>;
    type Error = S::Error;
    type Future = Answering<S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let call = OpenCall::begin(&self.metrics, request.uri().path());
        Answering { inner: self.inner.call(request), call }
    }
}

pin_project! {
    /// A call that has no answer yet.
    pub struct Answering<F> {
        #[pin]
        inner: F,
        call: Option<OpenCall>,
    }
}

impl<F, B, E> Future for Answering<F>
where
    F: Future<Output = Result<Response<B>, E>>,
{
    type Output = Result<Response<Metered<B>>, E>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let response = ready!(this.inner.poll(context))?;
        // A call that fails at once has headers only.
        let call = end(this.call.take(), response.headers());
        Poll::Ready(Ok(response.map(|inner| Metered { inner, call })))
    }
}

pin_project! {
    /// An answer on its way out. Its call has ended when the trailers are out, or it is dropped.
    pub struct Metered<B> {
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

/// Ends the call if these headers say how; otherwise it goes on.
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
    fn methods_and_reasons_are_those_of_the_wire() {
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
