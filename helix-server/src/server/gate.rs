//! What every call passes on its way in and out: a place among the calls, room for each of its
//! messages before they are decoded, and the counting of what its client has not taken.
//!
//! A message is let in when there is room for the whole of it, so that half-received messages
//! cannot keep each other waiting; one that does not arrive in time gives its room up.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::Either;
use helix_proto::framing::{Answered, Cutter, Piece, put_aside};
use hyper::body::{Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};

use crate::api::Services;
use crate::error::Result;
use crate::limits;
use crate::load::{Call, Connection, Load, Received, Room};

const HELIX: &str = "/helix.log.v1.";
const APPEND: &str = "/helix.log.v1.ProduceService/Append";
const APPEND_STREAM: &str = "/helix.log.v1.ProduceService/AppendStream";

/// The services of a node, for one connection.
#[derive(Clone)]
pub(super) struct Gate {
    services: Services,
    load: Arc<Load>,
    connection: Arc<Connection>,
}

impl Gate {
    pub(super) fn new(services: Services, load: &Arc<Load>, connection: &Arc<Connection>) -> Self {
        Self { services, load: load.clone(), connection: connection.clone() }
    }
}

impl Service<http::Request<Body>> for Gate {
    type Response = http::Response<Answer>;
    type Error = Infallible;
    type Future =
        Either<Ready<Result<Self::Response, Infallible>>, BoxFuture<Self::Response, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<http::Request<Body>>::poll_ready(&mut self.services, context)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let place = match self.load.call() {
            Ok(place) => place,
            Err(error) => {
                let refusal = Status::from(error).into_http::<Body>();
                let refusal = Answered::bring_back(refusal);
                return Either::Left(ready(Ok(refusal.map(|body| Answer { body, held: None }))));
            }
        };
        let call = Call::new(&self.load, &self.connection);
        request.extensions_mut().insert(call.clone());
        let kind = Kind::of(request.uri().path());
        let mut request = request.map(|body| Body::new(Arriving::new(body, kind, call.clone())));
        put_aside(&mut request);
        let answered = self.services.call(request);
        Either::Right(Box::pin(async move {
            let answer = answered.await?;
            if kind.is_unary {
                call.handled();
            }
            let answer = Answered::bring_back(answer);
            Ok(answer.map(|body| Answer { body, held: Some((call, place)) }))
        }))
    }
}

/// What is known of a call by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kind {
    /// One message, which is handled when the call is answered. Else each is handled when the
    /// next one is asked for.
    is_unary: bool,
    /// What a message may take in memory, for each of its bytes.
    factor: usize,
}

impl Kind {
    fn of(path: &str) -> Self {
        match path {
            // Their records stay the bytes that they are.
            APPEND => Self { is_unary: true, factor: 1 },
            APPEND_STREAM => Self { is_unary: false, factor: 1 },
            // No other call of ours has more than one request; of reflection we cannot tell.
            _ => Self { is_unary: path.starts_with(HELIX), factor: limits::DECODED_FACTOR },
        }
    }

    fn wait_max(self) -> Duration {
        // The messages of a stream wait for those before them, as they do in its shard.
        if self.is_unary { limits::PERMIT_WAIT_MAX } else { limits::COMMIT_WAIT_MAX }
    }
}

type Waiting = Pin<Box<dyn Future<Output = Result<Received>> + Send>>;

/// A request's body on its way in.
struct Arriving {
    body: Body,
    kind: Kind,
    call: Arc<Call>,
    cutter: Cutter,
    /// The beginning of a message that waits for room.
    held_back: Option<(Bytes, Waiting)>,
    /// When what is under way must have arrived.
    deadline: Instant,
    alarm: Option<Pin<Box<Sleep>>>,
}

impl Arriving {
    fn new(body: Body, kind: Kind, call: Arc<Call>) -> Self {
        Self {
            body,
            kind,
            call,
            cutter: Cutter::default(),
            held_back: None,
            deadline: Instant::now() + limits::MESSAGE_WAIT_MAX,
            alarm: None,
        }
    }

    fn put(&mut self, bytes: Bytes) {
        if self.cutter.is_between() && !self.cutter.is_untouched() {
            self.deadline = Instant::now() + limits::MESSAGE_WAIT_MAX;
        }
        self.cutter.put(bytes);
    }

    /// A piece of the body has come in; ready with it when there is room for what it begins.
    fn take(&mut self, piece: Piece, context: &mut Context<'_>) -> Poll<Result<Bytes>> {
        let Piece { bytes, begins } = piece;
        let announced = usize::try_from(begins.unwrap_or(0)).unwrap_or(usize::MAX);
        if announced == 0 {
            return Poll::Ready(Ok(bytes));
        }
        // Longer messages are refused by their heads.
        let room = announced.min(limits::MESSAGE_BYTES_MAX).saturating_mul(self.kind.factor);
        let connection = self.call.connection();
        if let Some(room) = connection.try_receive(room) {
            self.call.received(room);
            return Poll::Ready(Ok(bytes));
        }
        let waiting = connection.clone().receive(room, self.kind.wait_max());
        self.held_back = Some((bytes, Box::pin(waiting)));
        self.poll_held_back(context)
    }

    fn poll_held_back(&mut self, context: &mut Context<'_>) -> Poll<Result<Bytes>> {
        let Some((bytes, waiting)) = &mut self.held_back else { return Poll::Pending };
        match waiting.as_mut().poll(context) {
            Poll::Ready(Ok(room)) => {
                self.call.received(room);
                let bytes = std::mem::take(bytes);
                self.held_back = None;
                // It was held back by us, not by the client.
                self.deadline = Instant::now() + limits::MESSAGE_WAIT_MAX;
                Poll::Ready(Ok(bytes))
            }
            Poll::Ready(Err(error)) => {
                self.held_back = None;
                Poll::Ready(Err(error))
            }
            Poll::Pending => Poll::Pending,
        }
    }

    /// Whether the client is to send something within a time: all of a single request, the first
    /// message of a stream, and the rest of any that has begun.
    fn is_due(&self) -> bool {
        self.kind.is_unary || self.cutter.is_untouched() || !self.cutter.is_between()
    }

    /// Ready when the client has taken too long.
    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if !self.is_due() {
            return Poll::Pending;
        }
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep_until(self.deadline)));
        if alarm.deadline() != self.deadline {
            alarm.as_mut().reset(self.deadline);
        }
        alarm.as_mut().poll(context)
    }

    fn late(&self) -> Status {
        self.call.load().events().requests_timed_out.add();
        let wait = limits::MESSAGE_WAIT_MAX;
        let what = format!("the request did not arrive within {wait:?} of its beginning");
        Status::deadline_exceeded(what)
    }
}

impl hyper::body::Body for Arriving {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let passed = |bytes: Result<Bytes>| Some(bytes.map(Frame::data).map_err(Status::from));
        if this.held_back.is_some() {
            return this.poll_held_back(context).map(passed);
        }
        if !this.kind.is_unary && this.cutter.is_between() {
            this.call.handled();
        }
        loop {
            if let Some(piece) = this.cutter.next() {
                return this.take(piece, context).map(passed);
            }
            match Pin::new(&mut this.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(bytes) => this.put(bytes),
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                Poll::Ready(end) => return Poll::Ready(end),
                Poll::Pending => return this.poll_late(context).map(|()| Some(Err(this.late()))),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.held_back.is_none() && self.cutter.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        // What has come in already is not counted by the body any more.
        if self.cutter.is_empty() { self.body.size_hint() } else { SizeHint::default() }
    }
}

/// An answer's body on its way out.
pub(super) struct Answer {
    body: Answered,
    /// None where the call was refused.
    held: Option<(Arc<Call>, Room)>,
}

impl hyper::body::Body for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let polled = Pin::new(&mut this.body).poll_frame(context);
        let Some((call, _)) = &this.held else { return polled };
        let in_parts = this.body.is_in_parts();
        polled.map_ok(|frame| {
            frame.map_data(|bytes| if in_parts { call.send_part(bytes) } else { call.send(bytes) })
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appends_count_as_they_are_and_other_calls_as_what_they_may_become() {
        assert_eq!(Kind::of(APPEND), Kind { is_unary: true, factor: 1 });
        assert_eq!(Kind::of(APPEND_STREAM), Kind { is_unary: false, factor: 1 });
        let factor = limits::DECODED_FACTOR;
        let fetch = Kind::of("/helix.log.v1.ConsumeService/Fetch");
        assert_eq!(fetch, Kind { is_unary: true, factor });
        let reflection = Kind::of("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo");
        assert_eq!(reflection, Kind { is_unary: false, factor });
    }
}
