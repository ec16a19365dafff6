//! Admits calls and their messages.
//!
//! A call needs a call permit, within the share of its principal; each message needs a permit for
//! its decoded size before it is decoded. Until it has arrived whole, a message counts as what has
//! arrived. Where that memory is used up, one message at a time claims the permit for the whole of
//! it, so that half-received messages of different connections cannot block each other. A message
//! that does not arrive in time releases its permit.

use std::convert::Infallible;
use std::future::{Ready, poll_fn, ready as now};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::Either;
use helix_proto::error::{REASON_TRAILER, reason_name};
use helix_proto::log::v1::ErrorReason;
use helix_transport::{FramePiece, FrameSplitter, ResponseBody, detach_body};
use hyper::body::{Body as _, Frame, SizeHint};
use tokio::runtime::Handle;
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};

use super::gate::Gate;
use super::quota_delay::QuotaDelay;
use super::services::Services;
use super::stream_guard::guard;
use super::tracked_body::TrackedBody;
use crate::access::CallSlot;
use crate::call::{
    AcceptedCall, CallAccess, CallMemory, ClientConnection, ClientLoad, LoadPermit, MessageClaim,
    MethodKind, MethodRow,
};
use crate::error::{Error, Result};
use crate::limits;

const HELIX: &str = "/helix.log.v1.";
const APPEND: &str = "/helix.log.v1.ProduceService/Append";
const APPEND_STREAM: &str = "/helix.log.v1.ProduceService/AppendStream";

/// The services of a node behind the admission of one connection's calls.
#[derive(Clone)]
pub(super) struct Admission {
    services: Services,
    load: Arc<ClientLoad>,
    connection: AcceptedCall,
    /// `None` if callers are not checked.
    gate: Option<Arc<Gate>>,
}

impl Admission {
    pub(super) fn new(
        services: Services,
        load: &Arc<ClientLoad>,
        connection: &Arc<ClientConnection>,
    ) -> Self {
        let gate = Gate::new(services.node(), connection);
        Self { services, load: load.clone(), connection: AcceptedCall::new(connection), gate }
    }
}

impl Service<http::Request<Body>> for Admission {
    type Response = http::Response<TrackedBody>;
    type Error = Infallible;
    type Future =
        Either<Ready<Result<Self::Response, Infallible>>, BoxFuture<Self::Response, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<http::Request<Body>>::poll_ready(&mut self.services, context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let permit = match self.connection.acquire_call() {
            Ok(permit) => permit,
            Err(error) => return Either::Left(now(Ok(rejected(&self.connection, request, error)))),
        };
        let Some(gate) = self.gate.clone() else { return self.serve(request, permit, None) };
        match gate.admit(request.uri().path(), request.headers()) {
            Ok(Some(access)) => self.serve(request, permit, Some(access)),
            Ok(None) => {
                // It counts for the client's address while its principal is not known.
                let slot = match self.connection.share_call(None) {
                    Ok(slot) => slot,
                    Err(error) => {
                        return Either::Left(now(Ok(rejected(&self.connection, request, error))));
                    }
                };
                // The clone takes the place of the services that are ready.
                let next = self.clone();
                let mut ready = std::mem::replace(self, next);
                Either::Right(Box::pin(async move {
                    let (parts, body) = request.into_parts();
                    let admitted = gate.admit_newest(parts.uri.path(), &parts.headers).await;
                    let request = http::Request::from_parts(parts, body);
                    drop(slot);
                    match admitted {
                        Ok(access) => ready.serve(request, permit, Some(access)).await,
                        Err(error) => Ok(rejected(&ready.connection, request, error)),
                    }
                }))
            }
            Err(error) => Either::Left(now(Ok(rejected(&self.connection, request, error)))),
        }
    }
}

impl Admission {
    /// Handles a call of this caller.
    fn serve(
        &mut self,
        mut request: http::Request<Body>,
        permit: LoadPermit,
        access: Option<CallAccess>,
    ) -> <Self as Service<http::Request<Body>>>::Future {
        let caller = access.as_ref().and_then(CallAccess::caller);
        let slot = match self.connection.share_call(caller) {
            Ok(slot) => slot,
            Err(error) => return Either::Left(now(Ok(rejected(&self.connection, request, error)))),
        };
        if let (Some(gate), Some(access)) = (&self.gate, &access)
            && let Err(error) = gate.admit_within_quota(request.uri().path(), access)
        {
            let connection = self.connection.connection();
            discard_refused(connection, request.into_body());
            return Either::Right(Box::pin(over_quota(error, (permit, slot))));
        }
        let row = access.as_ref().and_then(CallAccess::row);
        let (load, connection) = (&self.load, &self.connection);
        let call = CallMemory::of_caller(load, connection, Some(permit), slot, access);
        request.extensions_mut().insert(call.clone());
        let kind = CallKind::of(request.uri().path());
        let (mut control, mut stream) = (None, None);
        if let (Some(gate), Some(row)) = (&self.gate, row) {
            match row.kind {
                MethodKind::Data => {}
                MethodKind::Stream => stream = Some((gate.clone(), row)),
                MethodKind::Control => {
                    let (gate, call) = (gate.clone(), call.clone());
                    control = Some(ControlAudit { gate, row, call, is_logged: false });
                }
            }
        }
        let quota = QuotaDelay::new(self.services.node(), &call, kind.is_append, !kind.is_unary);
        let mut request =
            request.map(|body| Body::new(AdmittedBody::new(body, kind, call.clone(), quota)));
        detach_body(&mut request);
        let responding = self.services.call(request);
        Either::Right(Box::pin(async move {
            let response = responding.await?;
            if kind.is_unary {
                call.release_request();
            }
            let response = ResponseBody::attach_body(response);
            if let Some(control) = &mut control {
                // A handler that fails sends no trailers: its headers have the status.
                let text = |name| response.headers().get(name)?.to_str().ok();
                let failure = text("grpc-status").filter(|code| *code != "0");
                control.log(failure.map(|code| text(REASON_TRAILER).unwrap_or(code)));
            }
            let guard = stream.and_then(|(gate, row)| guard(gate.node(), &call, row.method));
            Ok(response.map(|body| TrackedBody { body, call: Some(call), guard }))
        }))
    }
}

fn rejected(
    connection: &Arc<ClientConnection>,
    request: http::Request<Body>,
    error: Error,
) -> http::Response<TrackedBody> {
    discard_refused(connection, request.into_body());
    rejection(error)
}

/// Rejects a call over its quota after [`QuotaDelay::of_refusal`]. It is open until then.
async fn over_quota(
    mut error: Error,
    open: (LoadPermit, Option<CallSlot>),
) -> Result<http::Response<TrackedBody>, Infallible> {
    sleep(QuotaDelay::of_refusal(&mut error)).await;
    drop(open);
    Ok(rejection(error))
}

fn rejection(error: Error) -> http::Response<TrackedBody> {
    let rejection = ResponseBody::attach_body(Status::from(error).into_http::<Body>());
    rejection.map(TrackedBody::rejected)
}

/// Logs a control operation, also if the client resets the call before its response.
struct ControlAudit {
    gate: Arc<Gate>,
    row: &'static MethodRow,
    call: Arc<CallMemory>,
    is_logged: bool,
}

impl ControlAudit {
    fn log(&mut self, failure: Option<&str>) {
        self.is_logged = true;
        if let Some(access) = self.call.access() {
            self.gate.audit(self.row.method, access, failure);
        }
    }
}

impl Drop for ControlAudit {
    fn drop(&mut self) {
        // Before the first check of a right, the handler has changed nothing.
        let is_begun = self.call.access().is_some_and(|access| access.granted().is_some());
        if !self.is_logged && is_begun {
            self.log(Some(reason_name(ErrorReason::OutcomeUnknown)));
        }
    }
}

/// Properties of a call that follow from its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CallKind {
    /// A unary call has one message, which is handled when the call is answered. A message of a
    /// stream is handled when the handler polls for the next one.
    is_unary: bool,
    /// The messages carry records to append.
    is_append: bool,
    /// Memory that a decoded message may take, as a multiple of its encoded size.
    factor: usize,
}

impl CallKind {
    fn of(path: &str) -> Self {
        match path {
            // Records stay encoded.
            APPEND => Self { is_unary: true, is_append: true, factor: 1 },
            APPEND_STREAM => Self { is_unary: false, is_append: true, factor: 1 },
            // Helix has no other client streams; reflection has.
            _ => Self {
                is_unary: path.starts_with(HELIX),
                is_append: false,
                factor: limits::DECODED_FACTOR,
            },
        }
    }

    fn wait_max(self) -> Duration {
        // A stream's message waits for those before it, as it does in its shard.
        if self.is_unary { limits::PERMIT_WAIT_MAX } else { limits::COMMIT_WAIT_MAX }
    }
}

type AcquireClaim = Pin<Box<dyn Future<Output = Result<MessageClaim>> + Send>>;

/// Body of a request; yields each message once its permit is acquired.
struct AdmittedBody {
    body: Body,
    kind: CallKind,
    call: Arc<CallMemory>,
    splitter: FrameSplitter,
    /// Bytes of a message that waits for its permit.
    waiting: Option<(Bytes, AcquireClaim)>,
    /// Stated length of the current message; 0 between messages.
    announced: usize,
    /// Bytes of the current message so far, and at the last check.
    arrived: usize,
    arrived_before: usize,
    /// Waits for memory that had ended on its connection at the last check.
    waits_before: u64,
    /// Bytes of it that have no permit yet; the call's own memory covers them.
    uncounted: usize,
    check_at: Instant,
    /// Memory of the current message.
    claim: Option<MessageClaim>,
    /// Time by which the current message must have arrived.
    deadline: Instant,
    alarm: Option<Pin<Box<Sleep>>>,
    /// True once nothing more arrives.
    is_over: bool,
    /// `None` for a caller without credentials.
    quota: Option<QuotaDelay>,
    /// The first piece of a message that the quota holds back.
    delayed: Option<FramePiece>,
}

impl AdmittedBody {
    fn new(body: Body, kind: CallKind, call: Arc<CallMemory>, quota: Option<QuotaDelay>) -> Self {
        Self {
            body,
            kind,
            call,
            splitter: FrameSplitter::default(),
            waiting: None,
            announced: 0,
            arrived: 0,
            arrived_before: 0,
            waits_before: 0,
            uncounted: 0,
            check_at: Instant::now(),
            claim: None,
            deadline: Instant::now() + limits::MESSAGE_WAIT_MAX,
            alarm: None,
            is_over: false,
            quota,
            delayed: None,
        }
    }

    fn push(&mut self, bytes: Bytes) {
        if self.splitter.is_at_boundary() && !self.splitter.is_unstarted() {
            self.deadline = Instant::now() + limits::MESSAGE_WAIT_MAX;
        }
        self.splitter.push(bytes);
    }

    /// Returns the piece once its message is within the caller's quota and has a permit for it.
    ///
    /// The quota holds back whole messages, so that it never keeps memory of a part of one.
    fn poll_within_quota(
        &mut self,
        piece: FramePiece,
        context: &mut Context<'_>,
    ) -> Poll<Result<Bytes>> {
        if let (Some(quota), Some(length)) = (&mut self.quota, piece.message_length) {
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            match quota.poll_admit(length, context) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => {
                    self.delayed = Some(piece);
                    return Poll::Pending;
                }
            }
            // The server delayed it, not the client.
            self.deadline = Instant::now() + limits::MESSAGE_WAIT_MAX;
        }
        self.poll_admit(piece, context)
    }

    /// Returns the piece once its message has a permit for it.
    ///
    /// The last piece of a message needs the permit for the decoded message.
    fn poll_admit(&mut self, piece: FramePiece, context: &mut Context<'_>) -> Poll<Result<Bytes>> {
        let FramePiece { bytes, message_length } = piece;
        if let Some(length) = message_length {
            self.announced = usize::try_from(length).unwrap_or(usize::MAX);
            self.arrived = 0;
            self.uncounted = 0;
            self.expect_progress();
        }
        self.arrived += bytes.len();
        if self.announced == 0 {
            return Poll::Ready(Ok(bytes));
        }
        // The decoder rejects longer messages by their header.
        let announced = self.announced.min(limits::MESSAGE_BYTES_MAX);
        let bytes_decoded = announced.saturating_mul(self.kind.factor);
        let connection = self.call.connection();
        let wait_max = self.kind.wait_max();
        let acquire: AcquireClaim = if self.splitter.is_at_boundary() {
            self.announced = 0;
            if let Some(MessageClaim::Whole { .. }) = &self.claim {
                self.end_message();
                return Poll::Ready(Ok(bytes));
            }
            if let Some(permit) = connection.try_acquire_request(bytes_decoded) {
                self.claim = Some(MessageClaim::Arrived(permit));
                self.end_message();
                return Poll::Ready(Ok(bytes));
            }
            let share = self.call.share();
            let acquire = connection.clone().acquire_request(share, bytes_decoded, wait_max);
            Box::pin(async { acquire.await.map(MessageClaim::Arrived) })
        } else {
            self.uncounted += bytes.len();
            let is_covered = matches!(self.claim, Some(MessageClaim::Whole { .. }));
            if is_covered || self.uncounted <= limits::ARRIVAL_UNCOUNTED_BYTES {
                return Poll::Ready(Ok(bytes));
            }
            let more = std::mem::take(&mut self.uncounted);
            if let Some(permit) = connection.try_acquire_arriving(more) {
                self.add_claim(MessageClaim::Part(permit));
                return Poll::Ready(Ok(bytes));
            }
            let share = self.call.share();
            Box::pin(connection.clone().acquire_arriving(share, more, bytes_decoded, wait_max))
        };
        self.waiting = Some((bytes, acquire));
        self.poll_waiting(context)
    }

    fn poll_waiting(&mut self, context: &mut Context<'_>) -> Poll<Result<Bytes>> {
        let Some((bytes, acquire)) = &mut self.waiting else { return Poll::Pending };
        match ready!(acquire.as_mut().poll(context)) {
            Ok(claim) => {
                let bytes = std::mem::take(bytes);
                self.waiting = None;
                self.add_claim(claim);
                // The server delayed it, not the client.
                self.deadline = Instant::now() + limits::MESSAGE_WAIT_MAX;
                self.expect_progress();
                Poll::Ready(Ok(bytes))
            }
            Err(error) => {
                self.waiting = None;
                Poll::Ready(Err(error))
            }
        }
    }

    fn add_claim(&mut self, added: MessageClaim) {
        match added {
            MessageClaim::Part(more) => match &mut self.claim {
                Some(MessageClaim::Part(permit)) => permit.merge(more),
                claim => *claim = Some(MessageClaim::Part(more)),
            },
            whole @ MessageClaim::Whole { .. } => self.claim = Some(whole),
            arrived @ MessageClaim::Arrived(_) => {
                self.claim = Some(arrived);
                self.end_message();
            }
        }
    }

    /// Keeps the permit of a message that has arrived whole until it is handled.
    fn end_message(&mut self) {
        if let Some(MessageClaim::Arrived(permit) | MessageClaim::Whole { permit, .. }) =
            self.claim.take()
        {
            self.call.keep_request(permit);
        }
    }

    fn expect_progress(&mut self) {
        self.check_at = Instant::now() + limits::ARRIVAL_CHECK_INTERVAL;
        self.arrived_before = self.arrived;
        self.waits_before = self.call.connection().ended_waits();
    }

    /// Returns true if other messages of the connection waited for memory since the last check.
    ///
    /// Their unread bytes fill the connection's window, so this message may not arrive.
    fn may_lack_window(&self) -> bool {
        let connection = self.call.connection();
        connection.has_waiting_requests() || connection.ended_waits() != self.waits_before
    }

    /// Returns true if the current message holds memory that others may need.
    fn holds_memory(&self) -> bool {
        self.arrived >= limits::ARRIVAL_BYTES_MIN
            || matches!(self.claim, Some(MessageClaim::Whole { .. }))
    }

    /// Returns true if the client must send something before the deadline.
    ///
    /// True for a unary request, the first message of a stream, and the rest of a begun message.
    fn has_deadline(&self) -> bool {
        self.kind.is_unary || self.splitter.is_unstarted() || !self.splitter.is_at_boundary()
    }

    /// Ready once the deadline has passed, or once the message does not arrive while others wait.
    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<Status> {
        if !self.has_deadline() {
            return Poll::Pending;
        }
        loop {
            let is_checked = self.announced > 0 && self.holds_memory();
            let at = if is_checked { self.deadline.min(self.check_at) } else { self.deadline };
            let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep_until(at)));
            if alarm.deadline() != at {
                alarm.as_mut().reset(at);
            }
            ready!(alarm.as_mut().poll(context));
            if at == self.deadline {
                return Poll::Ready(self.deadline_exceeded());
            }
            let has_grown = self.arrived - self.arrived_before >= limits::ARRIVAL_BYTES_MIN;
            if !has_grown && self.call.load().has_waiting_requests() && !self.may_lack_window() {
                return Poll::Ready(self.call.connection().refuse_request().into());
            }
            self.expect_progress();
        }
    }

    fn deadline_exceeded(&self) -> Status {
        self.call.load().events().requests_timed_out.add();
        let wait = limits::MESSAGE_WAIT_MAX;
        Status::deadline_exceeded(format!("the request did not arrive within {wait:?}"))
    }
}

impl hyper::body::Body for AdmittedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let to_frame = |bytes: Result<Bytes>| Some(bytes.map(Frame::data).map_err(Status::from));
        if this.waiting.is_some() {
            return this.poll_waiting(context).map(to_frame);
        }
        if !this.kind.is_unary && this.splitter.is_at_boundary() {
            this.call.release_request();
        }
        loop {
            if let Some(piece) = this.delayed.take().or_else(|| this.splitter.next()) {
                return this.poll_within_quota(piece, context).map(to_frame);
            }
            match Pin::new(&mut this.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(bytes) => this.push(bytes),
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                Poll::Ready(end) => {
                    this.is_over = true;
                    return Poll::Ready(end);
                }
                Poll::Pending => {
                    return this.poll_late(context).map(|status| Some(Err(status)));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.waiting.is_none()
            && self.delayed.is_none()
            && self.splitter.is_empty()
            && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        // The body no longer counts the bytes that the splitter holds.
        let is_empty = self.delayed.is_none() && self.splitter.is_empty();
        if is_empty { self.body.size_hint() } else { SizeHint::default() }
    }
}

impl Drop for AdmittedBody {
    fn drop(&mut self) {
        if !self.is_over {
            // The call stays open as long as its stream.
            discard_rest(std::mem::take(&mut self.body), || Some(self.call.clone()));
        }
    }
}

/// Discards the rest of a request whose call was refused. Beyond the limit its stream is reset.
fn discard_refused(connection: &Arc<ClientConnection>, body: Body) {
    discard_rest(body, || connection.try_acquire_discard());
}

/// Reads the rest of a request whose call has ended, and discards it; resets the stream without a
/// permit to wait for the rest.
///
/// HTTP/2 would reset the stream instead, and later forget it. What arrives for it then counts as a
/// protocol error of the client, though the client sent it before it knew of the end.
fn discard_rest<P: Send + 'static>(mut body: Body, permit: impl FnOnce() -> Option<P>) {
    let mut bytes = 0;
    let mut poll_rest = move |context: &mut Context<'_>| {
        while !body.is_end_stream() && bytes < limits::DISCARD_BYTES_MAX {
            match ready!(Pin::new(&mut body).poll_frame(context)) {
                Some(Ok(frame)) => bytes += frame.data_ref().map_or(0, Bytes::len),
                Some(Err(_)) | None => break,
            }
        }
        Poll::Ready(())
    };
    // The client has mostly sent or cancelled all of it.
    if poll_rest(&mut Context::from_waker(Waker::noop())).is_ready() {
        return;
    }
    let (Ok(runtime), Some(permit)) = (Handle::try_current(), permit()) else { return };
    runtime.spawn(async move {
        let _permit = permit;
        // Ignored: after this time the stream is reset.
        let _ = timeout(limits::DISCARD_WAIT_MAX, poll_fn(poll_rest)).await;
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appends_count_their_encoded_size_and_other_calls_their_decoded_size() {
        assert_eq!(CallKind::of(APPEND), CallKind { is_unary: true, is_append: true, factor: 1 });
        assert_eq!(
            CallKind::of(APPEND_STREAM),
            CallKind { is_unary: false, is_append: true, factor: 1 }
        );
        let factor = limits::DECODED_FACTOR;
        let fetch = CallKind::of("/helix.log.v1.ConsumeService/Fetch");
        assert_eq!(fetch, CallKind { is_unary: true, is_append: false, factor });
        let reflection = CallKind::of("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo");
        assert_eq!(reflection, CallKind { is_unary: false, is_append: false, factor });
    }
}
