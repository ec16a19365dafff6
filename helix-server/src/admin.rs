//! The admin port: HTTP, with or without TLS, for probes, for Prometheus and for the console, apart
//! from the clients' port. One request for each connection, with limits on everything; only the
//! console takes other methods than GET. A probe never waits for other connections.

mod console;
mod group_metrics;
mod node_metrics;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use helix_tls::{Acceptor, TlsSocket};
use hyper::body::Incoming;
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::call::ClientLoad;
use crate::metrics;
use crate::node::Node;
use crate::transport::InProcessConnector;
use console::{AdminBody, Console, Visitor, full};
pub use console::{ConsoleDial, ConsoleSettings};

/// Open connections: some probes and scrapers. A further one replaces the oldest that has not sent
/// its request, else the oldest.
const CONNECTIONS_MAX: usize = 64;

/// Time for a request's header to arrive, and for the whole request with its response.
const HEAD_WAIT_MAX: Duration = Duration::from_secs(5);
const REQUEST_WAIT_MAX: Duration = Duration::from_secs(30);

/// Time for a live tail, whose client calls again afterwards.
const TAIL_WAIT_MAX: Duration = Duration::from_secs(15 * 60);

/// Bytes of a request's header; a longer one is rejected.
const HEAD_BYTES_MAX: usize = 16 << 10;

/// Pause after a failed accept, for example if there is no free file descriptor.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

const PLAIN: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";

const INDEX: &str = "\
/metrics  metrics of this node, for Prometheus
/livez    200 while the process runs
/readyz   200 while this node serves all of its shards, else 503 with the reasons
/console/ console for browsers, unless it is off
";

/// Body of a page of the console that is off.
const CONSOLE_OFF: &str = "the console is off; start the node with --console on\n";

/// The open admin port. Dropping it closes it.
#[derive(Debug)]
pub struct AdminServer {
    local_addr: SocketAddr,
    handler: Arc<AdminHandler>,
    _closing: DropGuard,
}

/// A node that is open, and its clients' load.
#[derive(Debug)]
struct ServedNode {
    node: Arc<Node>,
    load: Arc<ClientLoad>,
}

/// Answers the requests.
#[derive(Debug)]
struct AdminHandler {
    /// Set once the node is open.
    served: OnceLock<ServedNode>,
    started: Instant,
    console: Option<Arc<Console>>,
}

impl AdminServer {
    /// Starts serving; probes are answered also while the node is being opened.
    ///
    /// # Errors
    /// The address of the listener cannot be read.
    pub fn open(
        listener: TcpListener,
        tls: Option<Arc<Acceptor>>,
        console: Option<ConsoleSettings>,
    ) -> io::Result<Self> {
        let local_addr = listener.local_addr()?;
        let console = console.map(|settings| Arc::new(Console::new(settings, local_addr)));
        let served = OnceLock::new();
        let handler = Arc::new(AdminHandler { served, started: Instant::now(), console });
        let closing = CancellationToken::new();
        let serving = serve(listener, handler.clone(), tls);
        tokio::spawn(closing.clone().run_until_cancelled_owned(serving));
        Ok(Self { local_addr, handler, _closing: closing.drop_guard() })
    }

    /// Sets the node once it is open.
    pub fn set_node(
        &self,
        node: &Arc<Node>,
        load: &Arc<ClientLoad>,
        connector: InProcessConnector,
    ) {
        if let Some(console) = &self.handler.console {
            console.set_node(node, connector);
        }
        // Ignored: it is set once.
        let _ = self.handler.served.set(ServedNode { node: node.clone(), load: load.clone() });
    }

    /// Returns the address listened on, with its real port.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Returns true if the port serves the console.
    pub fn has_console(&self) -> bool {
        self.handler.console.is_some()
    }
}

/// Accepts connections until it is dropped, which also closes them.
async fn serve(listener: TcpListener, handler: Arc<AdminHandler>, tls: Option<Arc<Acceptor>>) {
    let mut tasks = JoinSet::new();
    let mut open = OpenConnections::default();
    loop {
        let accepted = listener.accept().await;
        while tasks.try_join_next().is_some() {}
        match accepted {
            Ok((stream, peer)) => {
                let state = Arc::new(RequestState::default());
                let (handler, of_request) = (handler.clone(), state.clone());
                let tls = tls.clone();
                let serving = async move {
                    let local = stream.local_addr().ok();
                    let socket = match tls {
                        None => TlsSocket::plain(stream),
                        // The acceptor has logged and counted an error.
                        Some(tls) => match tls.accept(stream, peer).await {
                            Ok(accepted) => accepted.socket,
                            Err(_) => return,
                        },
                    };
                    let is_encrypted = socket.is_encrypted();
                    let visitor = Visitor { peer, local, is_encrypted };
                    serve_one(socket, visitor, handler, of_request).await;
                };
                let task = tasks.spawn(serve_in_time(serving, state.clone()));
                open.add(AdminConnection { task, state });
            }
            Err(error) => {
                tracing::debug!(%error, "failed to accept a connection to the admin port");
                sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

/// Connections to the admin port, oldest first; some may have ended.
#[derive(Default)]
struct OpenConnections(VecDeque<AdminConnection>);

struct AdminConnection {
    task: AbortHandle,
    state: Arc<RequestState>,
}

/// State of the one request of a connection.
#[derive(Debug, Default)]
struct RequestState {
    /// Set once its header has arrived.
    has_begun: AtomicBool,
    /// Set if its response is a live tail. The console limits the number of tails.
    is_tail: AtomicBool,
}

impl OpenConnections {
    /// Adds a connection. At the limit it replaces another one, which is closed.
    fn add(&mut self, connection: AdminConnection) {
        self.0.retain(|open| !open.task.is_finished());
        if self.0.len() >= CONNECTIONS_MAX {
            let is_idle = |open: &AdminConnection| !open.state.has_begun.load(Ordering::Relaxed);
            let is_short = |open: &AdminConnection| !open.state.is_tail.load(Ordering::Relaxed);
            let mut replaced = self.0.iter().position(is_idle);
            replaced = replaced.or_else(|| self.0.iter().position(is_short));
            if let Some(replaced) = self.0.remove(replaced.unwrap_or(0)) {
                replaced.task.abort();
            }
        }
        self.0.push_back(connection);
    }
}

/// Serves a connection until its deadline, which is later for a live tail.
async fn serve_in_time(serving: impl Future<Output = ()>, state: Arc<RequestState>) {
    tokio::pin!(serving);
    let is_late = timeout(REQUEST_WAIT_MAX, &mut serving).await.is_err();
    if is_late && state.is_tail.load(Ordering::Relaxed) {
        // Ignored: the client is too slow, or gone.
        let _ = timeout(TAIL_WAIT_MAX, serving).await;
    }
}

async fn serve_one(
    stream: TlsSocket<TcpStream>,
    visitor: Visitor,
    handler: Arc<AdminHandler>,
    state: Arc<RequestState>,
) {
    let respond = |request: Request<Incoming>| {
        state.has_begun.store(true, Ordering::Relaxed);
        let (handler, state) = (handler.clone(), state.clone());
        async move {
            let response = handler.respond(request, visitor).await;
            if console::is_tail(&response) {
                state.is_tail.store(true, Ordering::Relaxed);
            }
            Ok::<_, Infallible>(response)
        }
    };
    let serving = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WAIT_MAX)
        .max_buf_size(HEAD_BYTES_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service_fn(respond));
    if let Err(error) = serving.await {
        tracing::debug!(%error, "request to the admin port failed");
    }
}

impl AdminHandler {
    async fn respond(&self, request: Request<Incoming>, visitor: Visitor) -> Response<AdminBody> {
        let path = request.uri().path();
        if path == "/console" || path.starts_with("/console/") {
            return match &self.console {
                Some(console) => console.respond(request, visitor).await,
                None => text(StatusCode::NOT_FOUND, PLAIN, CONSOLE_OFF),
            };
        }
        if request.method() != Method::GET {
            let mut response = text(StatusCode::METHOD_NOT_ALLOWED, PLAIN, "GET only\n");
            response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
            return response;
        }
        match request.uri().path() {
            "/" => text(StatusCode::OK, PLAIN, INDEX),
            "/livez" => text(StatusCode::OK, PLAIN, "alive\n"),
            "/readyz" => {
                let accepted = request.headers().get(ACCEPT).and_then(|it| it.to_str().ok());
                ready(&self.unready(), accepted.is_some_and(|types| types.contains(JSON)))
            }
            "/metrics" => {
                let page =
                    node_metrics::page(self.served.get(), self.started, self.unready()).await;
                text(StatusCode::OK, metrics::CONTENT_TYPE, page.to_string())
            }
            _ => text(StatusCode::NOT_FOUND, PLAIN, INDEX),
        }
    }

    fn unready(&self) -> Vec<String> {
        match self.served.get() {
            Some(served) => served.node.unready().into_iter().map(|it| it.what).collect(),
            None => vec![
                "the node is starting: it is opening its data, or waiting for other nodes of the \
                 cluster; see its log"
                    .to_owned(),
            ],
        }
    }
}

fn ready(reasons: &[String], as_json: bool) -> Response<AdminBody> {
    let is_ready = reasons.is_empty();
    let status = if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    if as_json {
        let body = serde_json::json!({ "ready": is_ready, "reasons": reasons });
        return text(status, JSON, format!("{body}\n"));
    }
    let body = if is_ready { "ready".to_owned() } else { reasons.join("\n") };
    text(status, PLAIN, body + "\n")
}

fn text(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<AdminBody> {
    let mut response = Response::new(full(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
