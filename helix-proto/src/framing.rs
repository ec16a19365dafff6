//! Where messages begin and end in a gRPC body: five bytes of head, and as many bytes as it says.
//!
//! A decoder that finds part of a message in its buffer together with the head asks for the whole
//! length once more, and copies what it has; at most it then holds twice the message, for as long
//! as anything refers to its bytes. A body that is cut at heads and ends spares it that: a message
//! gets one buffer of its own size.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tonic::Status;
use tonic::codegen::{Body, BoxFuture, Service, http};
use tonic::server::NamedService;

use crate::messages;

/// A flag, and the length, big endian.
const HEAD_BYTES: usize = 5;

/// Messages up to this size stay with their heads: copying them costs less than another turn.
const SMALL_BYTES: usize = 4 << 10;

/// Cuts the bytes of one direction of a call. Looks at heads only.
#[derive(Debug, Default)]
pub struct Cutter {
    head: [u8; HEAD_BYTES],
    head_bytes: usize,
    /// Bytes that the message under way still lacks.
    left: u64,
    /// Messages that have begun.
    begun: u64,
    /// What has come in and was not given yet.
    rest: Bytes,
}

/// A piece of a body: the head of a message, what follows it, or a small message as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The bytes.
    pub bytes: Bytes,
    /// Length of the message whose head ends in this piece.
    pub begins: Option<u32>,
}

impl Cutter {
    /// The next bytes of the body, after [`Self::next`] gave none.
    pub fn put(&mut self, bytes: Bytes) {
        debug_assert!(self.rest.is_empty(), "everything before it has been taken");
        self.rest = bytes;
    }

    /// The next piece of what was put in.
    #[expect(clippy::should_implement_trait, reason = "it goes on after it gave none")]
    pub fn next(&mut self) -> Option<Piece> {
        if self.rest.is_empty() {
            return None;
        }
        if self.left > 0 {
            return Some(Piece { bytes: self.split_message(), begins: None });
        }
        let taken = (HEAD_BYTES - self.head_bytes).min(self.rest.len());
        let end = self.head_bytes + taken;
        if let (Some(head), Some(bytes)) =
            (self.head.get_mut(self.head_bytes..end), self.rest.get(..taken))
        {
            head.copy_from_slice(bytes);
        }
        if end < HEAD_BYTES {
            self.head_bytes = end;
            return Some(Piece { bytes: std::mem::take(&mut self.rest), begins: None });
        }
        let [_, length @ ..] = self.head;
        let length = u32::from_be_bytes(length);
        self.head_bytes = 0;
        self.left = u64::from(length);
        self.begun += 1;
        let whole = taken.saturating_add(usize::try_from(length).unwrap_or(usize::MAX));
        let end = if whole <= self.rest.len() && whole <= SMALL_BYTES {
            self.left = 0;
            whole
        } else {
            taken
        };
        Some(Piece { bytes: self.rest.split_to(end), begins: Some(length) })
    }

    fn split_message(&mut self) -> Bytes {
        let here = usize::try_from(self.left).unwrap_or(usize::MAX).min(self.rest.len());
        self.left -= here as u64;
        self.rest.split_to(here)
    }

    /// Whether the last byte of a message was the last byte given, or none was.
    pub fn is_between(&self) -> bool {
        self.left == 0 && self.head_bytes == 0
    }

    /// Whether there is nothing left of what was put in.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Whether no message has begun.
    pub fn is_untouched(&self) -> bool {
        self.begun == 0
    }
}

/// A body that gives what another gives, cut at the heads and ends of messages.
#[derive(Debug)]
pub struct Cut<B> {
    body: B,
    cutter: Cutter,
}

impl<B> Cut<B> {
    /// Cuts this body.
    pub fn new(body: B) -> Self {
        Self { body, cutter: Cutter::default() }
    }
}

impl<B> Body for Cut<B>
where
    B: Body<Data = Bytes, Error = Status> + Unpin,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        loop {
            if let Some(piece) = this.cutter.next() {
                return Poll::Ready(Some(Ok(Frame::data(piece.bytes))));
            }
            match Pin::new(&mut this.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    // An empty one says nothing, and would look like none.
                    Ok(bytes) => this.cutter.put(bytes),
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                other => return other,
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.cutter.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        // What has come in already is not counted by the body any more.
        if self.cutter.is_empty() { self.body.size_hint() } else { SizeHint::default() }
    }
}

/// A body that goes around tonic, in the extensions of its request, to be written or read by
/// [`crate::messages`]. tonic keeps what it is good at: headers, statuses, names.
#[derive(Debug, Clone)]
pub struct Aside(Arc<Mutex<Option<tonic::body::Body>>>);

impl Aside {
    /// Puts a body aside.
    pub fn new(body: tonic::body::Body) -> Self {
        Self(Arc::new(Mutex::new(Some(body))))
    }

    /// The body; an empty one after the first time.
    pub fn take(&self) -> tonic::body::Body {
        let mut body = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        body.take().unwrap_or_default()
    }
}

/// Puts the body of a request aside if its method is one of those that carry records; whether it
/// is. The handler takes it with [`messages::single`] or [`messages::stream`].
pub fn put_aside(request: &mut http::Request<tonic::body::Body>) -> bool {
    let instead = match request.uri().path() {
        "/helix.log.v1.ProduceService/Append" => messages::nothing(),
        "/helix.log.v1.ProduceService/AppendStream" | "/helix.raft.v1.PeerService/Exchange" => {
            tonic::body::Body::default()
        }
        _ => return false,
    };
    let body = std::mem::replace(request.body_mut(), instead);
    request.extensions_mut().insert(Aside::new(body));
    true
}

/// An answer's body: what was put [`Aside`] of it, if anything was, and behind that what tonic ends
/// the call with.
#[derive(Debug)]
pub struct Answered {
    aside: Option<tonic::body::Body>,
    /// What tonic made; of a body that was put aside only the end is sent.
    made: tonic::body::Body,
    is_aside: bool,
}

impl Answered {
    /// The answer with the body that it is to have.
    pub fn bring_back(mut answer: http::Response<tonic::body::Body>) -> http::Response<Self> {
        let aside = answer.extensions_mut().remove::<Aside>().map(|aside| aside.take());
        answer.map(|made| Self { is_aside: aside.is_some(), aside, made })
    }

    /// Whether messages come in parts, long ones as they are, and not each as a whole.
    pub fn is_in_parts(&self) -> bool {
        self.is_aside
    }

    /// Ends the call as tonic does it for a stream that fails.
    fn fail(&mut self, status: &Status) -> Result<Frame<Bytes>, Status> {
        self.aside = None;
        self.made = tonic::body::Body::empty();
        let mut trailers = http::HeaderMap::new();
        status.add_header(&mut trailers)?;
        Ok(Frame::trailers(trailers))
    }
}

impl Body for Answered {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if let Some(aside) = &mut this.aside {
            match ready!(Pin::new(aside).poll_frame(context)) {
                Some(Ok(frame)) => return Poll::Ready(Some(Ok(frame))),
                Some(Err(status)) => return Poll::Ready(Some(this.fail(&status))),
                None => this.aside = None,
            }
        }
        loop {
            match ready!(Pin::new(&mut this.made).poll_frame(context)) {
                Some(Ok(frame)) if this.is_aside && frame.is_data() => {}
                other => return Poll::Ready(other),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.aside.is_none() && self.made.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.is_aside { SizeHint::default() } else { self.made.size_hint() }
    }
}

/// A channel whose answers are [`Cut`], and whose requests have the body that was put [`Aside`].
#[derive(Debug, Clone)]
pub struct Answers<S>(pub S);

impl<S> Service<http::Request<tonic::body::Body>> for Answers<S>
where
    S: Service<http::Request<tonic::body::Body>, Response = http::Response<tonic::body::Body>>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Cut<tonic::body::Body>>;
    type Error = S::Error;
    type Future = BoxFuture<Self::Response, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<tonic::body::Body>) -> Self::Future {
        if let Some(aside) = request.extensions_mut().remove::<Aside>() {
            *request.body_mut() = aside.take();
        }
        let answer = self.0.call(request);
        Box::pin(async move { Ok(answer.await?.map(Cut::new)) })
    }
}

/// A service whose requests are [`Cut`], or put [`Aside`] where they carry records.
#[derive(Debug, Clone)]
pub struct Requests<S>(pub S);

impl<S> Service<http::Request<tonic::body::Body>> for Requests<S>
where
    S: Service<http::Request<tonic::body::Body>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<tonic::body::Body>) -> Self::Future {
        if put_aside(&mut request) {
            return self.0.call(request);
        }
        self.0.call(request.map(|body| tonic::body::Body::new(Cut::new(body))))
    }
}

impl<S: NamedService> NamedService for Requests<S> {
    const NAME: &'static str = S::NAME;
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    fn message(length: u32) -> Vec<u8> {
        let head = [&[0][..], &length.to_be_bytes()].concat();
        [head, vec![7; length as usize]].concat()
    }

    fn pieces(cutter: &mut Cutter, bytes: &[u8]) -> Vec<Piece> {
        cutter.put(Bytes::copy_from_slice(bytes));
        std::iter::from_fn(|| cutter.next()).collect()
    }

    #[test]
    fn each_message_begins_once_and_nothing_is_lost_however_the_body_comes() {
        let lengths = [3, 0, 10_000, 1, 5_000];
        let body: Vec<u8> = lengths.into_iter().flat_map(message).collect();
        for size in (1..20).chain((20..body.len()).step_by(97)) {
            let mut cutter = Cutter::default();
            let all: Vec<_> =
                body.chunks(size).flat_map(|bytes| pieces(&mut cutter, bytes)).collect();
            let begun: Vec<_> = all.iter().filter_map(|piece| piece.begins).collect();
            assert_eq!(begun, lengths, "pieces of {size}");
            let bytes: Vec<u8> = all.iter().flat_map(|piece| piece.bytes.clone()).collect();
            assert_eq!(bytes, body, "pieces of {size}");
            assert!(cutter.is_between() && cutter.is_empty());
        }
    }

    #[test]
    fn a_long_message_comes_apart_from_its_head_and_from_its_neighbours() {
        let body = [message(10), message(10_000), message(20_000), message(2)].concat();
        let all = pieces(&mut Cutter::default(), &body);
        let lengths: Vec<_> = all.iter().map(|piece| piece.bytes.len()).collect();
        assert_eq!(lengths, [15, 5, 10_000, 5, 20_000, 7]);
    }

    /// The frames of an answer: the bytes of each, or the status that it ends with.
    fn frames(mut body: Answered) -> Vec<Result<Vec<u8>, String>> {
        let mut context = Context::from_waker(std::task::Waker::noop());
        let mut next = || match Pin::new(&mut body).poll_frame(&mut context) {
            Poll::Ready(frame) => frame.map(|frame| frame.expect("no frame is an error")),
            Poll::Pending => unreachable!("the body is always ready"),
        };
        let text = |frame: Frame<Bytes>| match frame.into_data() {
            Ok(bytes) => Ok(bytes.to_vec()),
            Err(frame) => {
                let trailers = frame.into_trailers().expect("it is one or the other");
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
    fn a_body_that_was_put_aside_takes_the_place_of_the_message_and_not_of_the_end() {
        let made = || http::Response::new(body([data(0), end("0")]));
        let answered = |answer| frames(Answered::bring_back(answer).into_body());
        assert_eq!(answered(made()), [Ok(message(0)), Err("0".to_owned())]);
        let aside = |frames: Vec<_>| {
            let mut answer = made();
            answer.extensions_mut().insert(Aside::new(body(frames)));
            answered(answer)
        };
        let ends = |code: &str| Err(code.to_owned());
        assert_eq!(aside(vec![data(3), data(2)]), [Ok(message(3)), Ok(message(2)), ends("0")]);
        assert_eq!(aside(vec![]), [ends("0")]);
        let fails = vec![data(3), Err(Status::unavailable("gone")), data(2)];
        assert_eq!(aside(fails), [Ok(message(3)), ends("14")]);
    }

    #[test]
    fn between_means_between() {
        let mut cutter = Cutter::default();
        assert!(cutter.is_between() && cutter.is_untouched());
        assert_eq!(pieces(&mut cutter, &[0, 0, 0])[0].begins, None);
        assert!(!cutter.is_between() && cutter.is_untouched());
        assert_eq!(pieces(&mut cutter, &[0, 9, 1])[0].begins, Some(9));
        assert!(!cutter.is_between() && !cutter.is_untouched());
        pieces(&mut cutter, &[1; 7]);
        assert!(!cutter.is_between());
        pieces(&mut cutter, &[1]);
        assert!(cutter.is_between());
        assert_eq!(pieces(&mut cutter, &[0, 255, 255, 255, 255])[0].begins, Some(u32::MAX));
    }
}
