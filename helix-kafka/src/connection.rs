//! One connection of a client: reads requests, answers them in order.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{
    AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, BufWriter,
};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, timeout};

use crate::api::{produce, sasl, versions};
use crate::context::RequestContext;
use crate::dispatch::{Answer, answer, decode};
use crate::frame::{CheckedRequest, FrameError, ResponseFrame, check_frame, encode_response};
use crate::lanes::Lanes;
use crate::memory::MemoryPermit;
use crate::state::GatewayState;
use crate::versions::served_api;
use kafka_protocol::messages::{ApiKey, ProduceRequest};

/// Time in which a request must have arrived once it has begun, and a response must be taken.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(60);

/// Time in which a connection must be authenticated.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Largest request before a connection is authenticated, in bytes.
const LOGIN_BYTES_MAX: usize = 64 << 10;

/// Largest request that counts as small, in bytes.
const SMALL_BYTES_MAX: usize = 64 << 10;

/// Memory of one list element once it is decoded, in bytes.
const ELEMENT_BYTES: usize = 160;

/// Buffers of a connection, in bytes. 1,000 idle connections have to stay small.
const READ_BUFFER_BYTES: usize = 4 << 10;
const WRITE_BUFFER_BYTES: usize = 8 << 10;

/// Reason for the end of a connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectionEnd {
    /// The client has closed it.
    #[error("closed by the client")]
    Closed,
    /// No request came for the idle timeout.
    #[error("idle")]
    Idle,
    /// The connection failed.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// A request has a defect.
    #[error("{0}")]
    Frame(#[from] FrameError),
    /// A request is too large or has no valid length.
    #[error("a request states {length} bytes; the limit is {limit}")]
    Length {
        /// Stated length.
        length: i64,
        /// Limit.
        limit: usize,
    },
    /// A request or response did not pass in time.
    #[error("{0} timed out")]
    TimedOut(&'static str),
    /// The client did not authenticate itself.
    #[error("{0}")]
    Login(String),
    /// A message cannot be decoded or encoded.
    #[error("{0}")]
    Message(String),
    /// A client that waits for no response sent a batch that was not stored.
    #[error("a batch with acks=0 was not stored")]
    SilentFailure,
}

impl ConnectionEnd {
    /// Returns true if the client has violated the protocol.
    pub(crate) fn is_violation(&self) -> bool {
        matches!(self, Self::Frame(_) | Self::Length { .. } | Self::Message(_))
    }
}

/// A response that is not ready yet, in the order of requests.
type PendingResponse = Pin<Box<dyn Future<Output = PendingOutcome> + Send>>;

/// Next step of the writer.
enum PendingOutcome {
    Write(ResponseFrame, MemoryPermit),
    /// The client waits for no response.
    Nothing(MemoryPermit),
    Close(ConnectionEnd),
}

/// Responses that the writer has yet to finish.
#[derive(Debug, Default)]
struct Unfinished {
    count: AtomicUsize,
    changed: Notify,
}

impl Unfinished {
    async fn wait_until_none(&self) {
        loop {
            let changed = self.changed.notified();
            if self.count.load(Ordering::Acquire) == 0 {
                return;
            }
            changed.await;
        }
    }

    fn finish_one(&self) {
        self.count.fetch_sub(1, Ordering::AcqRel);
        self.changed.notify_waiters();
    }
}

/// Serves a connection until its end.
pub(crate) async fn serve_connection<S>(
    state: Arc<GatewayState>,
    socket: S,
    peer: SocketAddr,
) -> ConnectionEnd
where
    S: AsyncRead + AsyncWrite + Send + 'static,
{
    let (read, write) = tokio::io::split(socket);
    let (responses, pending) = mpsc::channel(state.limits.requests_in_flight);
    let unfinished = Arc::new(Unfinished::default());
    let requests = RequestLoop {
        lanes: Lanes::new(state.clone()),
        login: sasl::Login::new(&state),
        state: state.clone(),
        peer,
        read: BufReader::with_capacity(READ_BUFFER_BYTES, read),
        responses,
        unfinished: unfinished.clone(),
    };
    let writing = write_responses(&state, write, pending, unfinished);
    tokio::pin!(writing);
    tokio::select! {
        end = requests.run() => match end {
            // Accepted requests are answered.
            ConnectionEnd::Closed | ConnectionEnd::Idle => end,
            end => {
                let _ = timeout(TRANSFER_TIMEOUT, writing).await;
                end
            }
        },
        end = &mut writing => end.unwrap_or(ConnectionEnd::Closed),
    }
}

/// Writes responses in the order of their requests. Returns `None` once no more come.
async fn write_responses(
    state: &GatewayState,
    write: impl AsyncWrite + Unpin,
    mut pending: mpsc::Receiver<PendingResponse>,
    unfinished: Arc<Unfinished>,
) -> Option<ConnectionEnd> {
    let mut write = BufWriter::with_capacity(WRITE_BUFFER_BYTES, write);
    while let Some(response) = pending.recv().await {
        match response.await {
            PendingOutcome::Nothing(_permit) => {}
            PendingOutcome::Close(end) => return Some(end),
            PendingOutcome::Write(frame, _permit) => {
                let writing = async {
                    for chunk in &frame.chunks {
                        write.write_all(chunk).await?;
                        state.metrics.sent_bytes.add(chunk.len() as u64);
                    }
                    write.flush().await
                };
                match timeout(TRANSFER_TIMEOUT, writing).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => return Some(error.into()),
                    Err(_) => return Some(ConnectionEnd::TimedOut("a response")),
                }
            }
        }
        unfinished.finish_one();
    }
    let _ = timeout(TRANSFER_TIMEOUT, write.shutdown()).await;
    None
}

struct RequestLoop<R> {
    state: Arc<GatewayState>,
    peer: SocketAddr,
    read: BufReader<R>,
    lanes: Lanes,
    login: sasl::Login,
    responses: mpsc::Sender<PendingResponse>,
    unfinished: Arc<Unfinished>,
}

impl<R: AsyncRead + Unpin + Send> RequestLoop<R> {
    /// Reads and answers requests until the end of the connection.
    async fn run(mut self) -> ConnectionEnd {
        loop {
            if let Err(end) = self.next_request().await {
                return end;
            }
        }
    }

    async fn next_request(&mut self) -> Result<(), ConnectionEnd> {
        let (frame, mut permit) = self.read_frame().await?;
        let began = Instant::now();
        if self.login.expects_token() {
            let response = self.login.on_token(&self.state, frame).await?;
            return self.write(response, permit).await;
        }
        let request = match check_frame(frame) {
            Ok(request) => request,
            Err(FrameError::UnknownApiVersions { correlation_id }) => {
                let response = unknown_api_versions(correlation_id)?;
                return self.write(response, permit).await;
            }
            Err(error) => return Err(error.into()),
        };
        let CheckedRequest { header, body, elements } = request;
        let _elements_permit = match elements * ELEMENT_BYTES {
            bytes if bytes > READ_BUFFER_BYTES => Some(self.state.memory.take(bytes).await),
            _ => None,
        };
        let key = header.api.key;
        if sasl::is_login_api(key) {
            self.unfinished.wait_until_none().await;
            self.lanes.clear();
            let response = self.login.answer(&self.state, &header, body).await?;
            self.state.metrics.on_answer(key, began.elapsed());
            return self.write(response, permit).await;
        }
        let upstream = match self.login.upstream() {
            Some(upstream) => upstream.clone(),
            None if key == ApiKey::ApiVersions => self.state.upstream.clone(),
            None => {
                let what = format!("{key:?} came before SaslAuthenticate");
                return Err(ConnectionEnd::Login(what));
            }
        };
        let context = RequestContext {
            state: self.state.clone(),
            upstream,
            version: header.version,
            client_id: header.client_id.clone(),
            peer: self.peer,
        };
        if key == ApiKey::Produce {
            let request: ProduceRequest = decode(body, header.version)?;
            let outcome = produce::begin_produce(&context, &mut self.lanes, request);
            let state = self.state.clone();
            let response = async move {
                let produce::ProduceOutcome { response, has_silent_failure } = outcome.await;
                state.metrics.on_answer(key, began.elapsed());
                if has_silent_failure {
                    return PendingOutcome::Close(ConnectionEnd::SilentFailure);
                }
                let encoded = response.map(|response| {
                    state.metrics.on_response(key, &response);
                    encode_response(&header, &response)
                });
                match encoded {
                    None => PendingOutcome::Nothing(permit),
                    Some(Ok(frame)) => PendingOutcome::Write(frame, permit),
                    Some(Err(what)) => PendingOutcome::Close(ConnectionEnd::Message(what)),
                }
            };
            return self.enqueue(Box::pin(response)).await;
        }
        // As in Kafka, a request begins once those before it are done; only appends overlap.
        self.unfinished.wait_until_none().await;
        let answering = answer(&context, &header, body);
        tokio::pin!(answering);
        let Answer { frame, permit: response_permit } = tokio::select! {
            answer = &mut answering => answer?,
            () = closed(&mut self.read) => return Err(ConnectionEnd::Closed),
        };
        self.state.metrics.on_answer(key, began.elapsed());
        if let Some(response_permit) = response_permit {
            permit = response_permit;
        }
        self.write(frame, permit).await
    }

    async fn write(&self, frame: ResponseFrame, permit: MemoryPermit) -> Result<(), ConnectionEnd> {
        self.enqueue(Box::pin(std::future::ready(PendingOutcome::Write(frame, permit)))).await
    }

    async fn enqueue(&self, response: PendingResponse) -> Result<(), ConnectionEnd> {
        self.unfinished.count.fetch_add(1, Ordering::AcqRel);
        self.responses.send(response).await.map_err(|_| ConnectionEnd::Closed)
    }

    /// Reads the next frame, with memory for it.
    async fn read_frame(&mut self) -> Result<(Bytes, MemoryPermit), ConnectionEnd> {
        let limits = &self.state.limits;
        let (wait, limit) = match self.login.upstream() {
            Some(_) => (limits.idle_timeout, limits.request_bytes),
            None => (LOGIN_TIMEOUT, LOGIN_BYTES_MAX),
        };
        let length = loop {
            match timeout(wait, self.read.read_i32()).await {
                Ok(Ok(length)) => break length,
                Ok(Err(error)) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                    return Err(ConnectionEnd::Closed);
                }
                Ok(Err(error)) => return Err(error.into()),
                // The client waits for its responses.
                Err(_) if self.unfinished.count.load(Ordering::Acquire) > 0 => {}
                Err(_) if self.login.upstream().is_none() => {
                    return Err(ConnectionEnd::Login("no authentication in time".to_owned()));
                }
                Err(_) => return Err(ConnectionEnd::Idle),
            }
        };
        let count = usize::try_from(length).ok().filter(|length| *length <= limit);
        let Some(count) = count else {
            return Err(ConnectionEnd::Length { length: i64::from(length), limit });
        };
        // Requests that never arrive whole leave memory for small ones.
        let _arriving = match count > SMALL_BYTES_MAX {
            true => Some(self.state.arriving.take(count).await),
            false => None,
        };
        let permit = self.state.memory.take(count).await;
        let mut frame = BytesMut::with_capacity(count);
        let reading = async {
            let mut limited = (&mut self.read).take(count as u64);
            while frame.len() < count {
                if limited.read_buf(&mut frame).await? == 0 {
                    return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof));
                }
            }
            Ok(())
        };
        match timeout(TRANSFER_TIMEOUT, reading).await {
            Ok(result) => result?,
            Err(_) => return Err(ConnectionEnd::TimedOut("a request")),
        }
        self.state.metrics.received_bytes.add(count as u64 + 4);
        Ok((frame.freeze(), permit))
    }
}

/// Waits until the client has closed the connection. Requests that it sends in the meantime stay
/// in the buffer, and end the check.
async fn closed<R: AsyncRead + Unpin>(read: &mut BufReader<R>) {
    match read.fill_buf().await {
        Ok([]) | Err(_) => {}
        Ok(_) => std::future::pending().await,
    }
}

fn unknown_api_versions(correlation_id: i32) -> Result<ResponseFrame, ConnectionEnd> {
    let api = served_api(ApiKey::ApiVersions as i16)
        .ok_or_else(|| ConnectionEnd::Message("ApiVersions is not served".to_owned()))?;
    let header =
        crate::frame::RequestHeader { api, version: 0, correlation_id, client_id: String::new() };
    encode_response(&header, &versions::unknown_version()).map_err(ConnectionEnd::Message)
}
