//! The admin port: HTTP, with or without TLS, for probes and for Prometheus, apart from the
//! clients' port. Read-only: GET, one request for each connection, with limits on everything. A
//! probe never waits for other connections.

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
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::metrics;
use crate::node::Node;
use crate::transport::ClientLoad;

/// Open connections: some probes and scrapers. A further one replaces the oldest that has not sent
/// its request, else the oldest.
const CONNECTIONS_MAX: usize = 64;

/// Time for a request's header to arrive, and for the whole request with its response.
const HEAD_WAIT_MAX: Duration = Duration::from_secs(5);
const REQUEST_WAIT_MAX: Duration = Duration::from_secs(30);

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
";

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
}

impl AdminServer {
    /// Starts serving; probes are answered also while the node is being opened.
    ///
    /// # Errors
    /// The address of the listener cannot be read.
    pub fn open(listener: TcpListener, tls: Option<Arc<Acceptor>>) -> io::Result<Self> {
        let local_addr = listener.local_addr()?;
        let handler = Arc::new(AdminHandler { served: OnceLock::new(), started: Instant::now() });
        let closing = CancellationToken::new();
        let serving = serve(listener, handler.clone(), tls);
        tokio::spawn(closing.clone().run_until_cancelled_owned(serving));
        Ok(Self { local_addr, handler, _closing: closing.drop_guard() })
    }

    /// Sets the node once it is open.
    pub fn set_node(&self, node: &Arc<Node>, load: &Arc<ClientLoad>) {
        // Ignored: it is set once.
        let _ = self.handler.served.set(ServedNode { node: node.clone(), load: load.clone() });
    }

    /// Returns the address listened on, with its real port.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
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
                let has_request = Arc::new(AtomicBool::new(false));
                let (handler, has_its_request) = (handler.clone(), has_request.clone());
                let tls = tls.clone();
                let serving = async move {
                    let socket = match tls {
                        None => TlsSocket::plain(stream),
                        // The acceptor has logged and counted an error.
                        Some(tls) => match tls.accept(stream, peer).await {
                            Ok(accepted) => accepted.socket,
                            Err(_) => return,
                        },
                    };
                    serve_one(socket, handler, has_its_request).await;
                };
                // Ignored: the client is too slow, or gone.
                let task = tasks.spawn(async { drop(timeout(REQUEST_WAIT_MAX, serving).await) });
                open.add(AdminConnection { task, has_request });
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
    /// Set once the header of the request has arrived.
    has_request: Arc<AtomicBool>,
}

impl OpenConnections {
    /// Adds a connection. At the limit it replaces another one, which is closed.
    fn add(&mut self, connection: AdminConnection) {
        self.0.retain(|open| !open.task.is_finished());
        if self.0.len() >= CONNECTIONS_MAX {
            let is_idle = |open: &AdminConnection| !open.has_request.load(Ordering::Relaxed);
            let replaced = self.0.iter().position(is_idle).unwrap_or(0);
            if let Some(replaced) = self.0.remove(replaced) {
                replaced.task.abort();
            }
        }
        self.0.push_back(connection);
    }
}

async fn serve_one(
    stream: TlsSocket<TcpStream>,
    handler: Arc<AdminHandler>,
    has_request: Arc<AtomicBool>,
) {
    let respond = |request: Request<Incoming>| {
        has_request.store(true, Ordering::Relaxed);
        let handler = handler.clone();
        async move { Ok::<_, Infallible>(handler.respond(&request).await) }
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
    async fn respond(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
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

fn ready(reasons: &[String], as_json: bool) -> Response<Full<Bytes>> {
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
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
