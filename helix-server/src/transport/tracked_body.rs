//! Tracks the bytes of a response until the client has read them, and ends a stream whose caller
//! has lost its right.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use helix_transport::ResponseBody;
use hyper::body::{Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http;

use super::stream_guard::StreamGuard;
use crate::call::CallMemory;

/// Body of a response; its bytes count as unread until the client has read them.
pub(super) struct TrackedBody {
    pub(super) body: ResponseBody,
    /// `None` if the call was rejected.
    pub(super) call: Option<Arc<CallMemory>>,
    /// Ends the stream early; `None` if nothing does.
    pub(super) guard: Option<StreamGuard>,
}

impl TrackedBody {
    pub(super) fn rejected(body: ResponseBody) -> Self {
        Self { body, call: None, guard: None }
    }

    /// Returns the trailers of a stream whose caller has lost its right.
    fn poll_guard(&mut self, context: &mut Context<'_>) -> Option<Frame<Bytes>> {
        let Poll::Ready(status) = self.guard.as_mut()?.as_mut().poll(context) else { return None };
        tracing::info!(reason = status.message(), "ending a stream whose caller lost its right");
        self.guard = None;
        // Drops the stream of the handler.
        let ended = http::Response::new(Body::default());
        self.body = ResponseBody::attach_body(ended).into_body();
        let (parts, _) = status.into_http::<()>().into_parts();
        let mut trailers = parts.headers;
        trailers.remove(http::header::CONTENT_TYPE);
        Some(Frame::trailers(trailers))
    }
}

impl hyper::body::Body for TrackedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if let Some(trailers) = this.poll_guard(context) {
            this.call = None;
            return Poll::Ready(Some(Ok(trailers)));
        }
        let polled = Pin::new(&mut this.body).poll_frame(context);
        let Some(call) = &this.call else { return polled };
        let is_chunked = this.body.is_chunked();
        polled.map_ok(|frame| {
            frame.map_data(|bytes| {
                if is_chunked {
                    call.track_response_part(bytes)
                } else {
                    call.track_response(bytes)
                }
            })
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
