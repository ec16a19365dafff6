//! Bodies that bypass tonic in the extensions of a request or a response.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tonic::Status;
use tonic::codegen::{Body, http};

/// A body that bypasses tonic in the extensions of its request or response.
///
/// tonic sees an empty body instead and handles only headers, statuses and method names.
#[derive(Debug, Clone)]
pub struct DetachedBody(Arc<Mutex<Option<tonic::body::Body>>>);

impl DetachedBody {
    /// Wraps a body for the extensions.
    pub fn new(body: tonic::body::Body) -> Self {
        Self(Arc::new(Mutex::new(Some(body))))
    }

    /// Takes the body out. Returns an empty body from the second call on.
    pub fn take(&self) -> tonic::body::Body {
        let mut body = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        body.take().unwrap_or_default()
    }
}

/// The body of a response: the detached messages, if there are any, then tonic's trailers.
#[derive(Debug)]
pub struct ResponseBody {
    /// None also after it has ended.
    detached: Option<tonic::body::Body>,
    /// Body that tonic made. With a detached body only its trailers are sent.
    tonic: tonic::body::Body,
    was_detached: bool,
}

impl ResponseBody {
    /// Moves the detached body of a response, if it has one, back into the response.
    pub fn attach_body(mut response: http::Response<tonic::body::Body>) -> http::Response<Self> {
        let detached = response.extensions_mut().remove::<DetachedBody>().map(|body| body.take());
        response.map(|tonic| Self { was_detached: detached.is_some(), detached, tonic })
    }

    /// Returns true if a message may come in several chunks, false if each chunk is one message.
    pub fn is_chunked(&self) -> bool {
        self.was_detached
    }

    /// Ends the call with a status in the trailers, as tonic does for a stream that fails.
    fn fail(&mut self, status: &Status) -> Result<Frame<Bytes>, Status> {
        self.detached = None;
        self.tonic = tonic::body::Body::empty();
        let mut trailers = http::HeaderMap::new();
        status.add_header(&mut trailers)?;
        Ok(Frame::trailers(trailers))
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if let Some(detached) = &mut this.detached {
            match ready!(Pin::new(detached).poll_frame(context)) {
                Some(Ok(frame)) => return Poll::Ready(Some(Ok(frame))),
                Some(Err(status)) => return Poll::Ready(Some(this.fail(&status))),
                None => this.detached = None,
            }
        }
        loop {
            match ready!(Pin::new(&mut this.tonic).poll_frame(context)) {
                Some(Ok(frame)) if this.was_detached && frame.is_data() => {}
                other => return Poll::Ready(other),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.detached.is_none() && self.tonic.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.was_detached { SizeHint::default() } else { self.tonic.size_hint() }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    fn message(length: u32) -> Vec<u8> {
        let prefix = [&[0][..], &length.to_be_bytes()].concat();
        [prefix, vec![7; length as usize]].concat()
    }

    /// Returns the frames of a response: the data of each, or the status that ends it.
    fn frames(mut body: ResponseBody) -> Vec<Result<Vec<u8>, String>> {
        let mut context = Context::from_waker(std::task::Waker::noop());
        let mut next = || match Pin::new(&mut body).poll_frame(&mut context) {
            Poll::Ready(frame) => frame.map(|frame| frame.expect("no frame is an error")),
            Poll::Pending => unreachable!("the body is always ready"),
        };
        let text = |frame: Frame<Bytes>| match frame.into_data() {
            Ok(bytes) => Ok(bytes.to_vec()),
            Err(frame) => {
                let trailers = frame.into_trailers().expect("a frame has data or trailers");
                Err(trailers["grpc-status"].to_str().expect("a number").to_owned())
            }
        };
        std::iter::from_fn(&mut next).map(text).collect()
    }

    /// A body of these frames.
    struct Script(VecDeque<Result<Frame<Bytes>, Status>>);

    impl Body for Script {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Ready(self.0.pop_front())
        }
    }

    fn body(frames: impl IntoIterator<Item = Result<Frame<Bytes>, Status>>) -> tonic::body::Body {
        tonic::body::Body::new(Script(frames.into_iter().collect()))
    }

    fn data(length: u32) -> Result<Frame<Bytes>, Status> {
        Ok(Frame::data(message(length).into()))
    }

    fn end(code: &'static str) -> Result<Frame<Bytes>, Status> {
        let name = http::HeaderName::from_static("grpc-status");
        let value = http::HeaderValue::from_static(code);
        Ok(Frame::trailers(http::HeaderMap::from_iter([(name, value)])))
    }

    #[test]
    fn detached_body_replaces_the_message_and_keeps_the_trailers() {
        let made = || http::Response::new(body([data(0), end("0")]));
        let sent = |response| frames(ResponseBody::attach_body(response).into_body());
        assert_eq!(sent(made()), [Ok(message(0)), Err("0".to_owned())]);
        let detached = |frames: Vec<_>| {
            let mut response = made();
            response.extensions_mut().insert(DetachedBody::new(body(frames)));
            sent(response)
        };
        let ends = |code: &str| Err(code.to_owned());
        assert_eq!(detached(vec![data(3), data(2)]), [Ok(message(3)), Ok(message(2)), ends("0")]);
        assert_eq!(detached(vec![]), [ends("0")]);
        let fails = vec![data(3), Err(Status::unavailable("gone")), data(2)];
        assert_eq!(detached(fails), [Ok(message(3)), ends("14")]);
    }
}
