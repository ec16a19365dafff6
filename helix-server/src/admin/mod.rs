//! The admin port: plain HTTP for probes and for Prometheus, apart from the clients' port. GET
//! only, one request a connection, and bounds on everything; it can show, never change.

mod figures;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::metrics;
use crate::node::Node;

/// Connections at a time: some probes and scrapers. Further ones wait to be accepted.
const CONNECTIONS_MAX: usize = 16;

/// Until a request's head has come, and until its answer has gone.
const HEAD_WAIT_MAX: Duration = Duration::from_secs(5);
const REQUEST_WAIT_MAX: Duration = Duration::from_secs(30);

/// Bytes of a request's head; more is refused.
const HEAD_BYTES_MAX: usize = 16 << 10;

/// After an accept that failed, as it does while there are no file descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

const PLAIN: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";

const INDEX: &str = "\
/metrics  figures of this node, for Prometheus
/livez    200 while the process runs
/readyz   200 while this node serves all that it should, else 503 and why
";

/// The open admin port. Dropping it closes it.
#[derive(Debug)]
pub struct Admin {
    local_addr: SocketAddr,
    desk: Arc<Desk>,
    _closing: DropGuard,
}

/// What requests are answered from.
#[derive(Debug)]
struct Desk {
    /// Once it is open.
    node: OnceLock<Arc<Node>>,
    started: Instant,
}

impl Admin {
    /// Answers from now on: probes also while the node is being opened.
    pub fn open(listener: TcpListener) -> io::Result<Self> {
        let local_addr = listener.local_addr()?;
        let desk = Arc::new(Desk { node: OnceLock::new(), started: Instant::now() });
        let closing = CancellationToken::new();
        let serving = serve(listener, desk.clone());
        tokio::spawn(closing.clone().run_until_cancelled_owned(serving));
        Ok(Self { local_addr, desk, _closing: closing.drop_guard() })
    }

    /// The node is open.
    pub fn show(&self, node: &Arc<Node>) {
        // Ignored: a port shows one node, once.
        let _ = self.desk.node.set(node.clone());
    }

    /// The address listened on, with its real port.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }
}

/// Accepts until it is dropped, which also ends the connections.
async fn serve(listener: TcpListener, desk: Arc<Desk>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => {
                let desk = desk.clone();
                connections.spawn(async move {
                    let _place = place;
                    // Ignored: too slow, or gone, and nobody else waits for the answer.
                    let _ = timeout(REQUEST_WAIT_MAX, converse(stream, desk)).await;
                });
            }
            Err(error) => {
                tracing::debug!(%error, "a connection to the admin port was not accepted");
                sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

async fn converse(stream: TcpStream, desk: Arc<Desk>) {
    let answer = |request: Request<Incoming>| {
        let desk = desk.clone();
        async move { Ok::<_, Infallible>(desk.answer(&request).await) }
    };
    let conversation = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WAIT_MAX)
        .max_buf_size(HEAD_BYTES_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service_fn(answer));
    if let Err(error) = conversation.await {
        tracing::debug!(%error, "a request to the admin port failed");
    }
}

impl Desk {
    async fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        if request.method() != Method::GET {
            let mut refusal = text(StatusCode::METHOD_NOT_ALLOWED, PLAIN, "GET only\n");
            refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
            return refusal;
        }
        match request.uri().path() {
            "/" => text(StatusCode::OK, PLAIN, INDEX),
            "/livez" => text(StatusCode::OK, PLAIN, "alive\n"),
            "/readyz" => {
                let accepted = request.headers().get(ACCEPT).and_then(|it| it.to_str().ok());
                ready(&self.unready(), accepted.is_some_and(|types| types.contains(JSON)))
            }
            "/metrics" => {
                let page = figures::page(self.node.get(), self.started, self.unready()).await;
                text(StatusCode::OK, metrics::CONTENT_TYPE, page.to_string())
            }
            _ => text(StatusCode::NOT_FOUND, PLAIN, INDEX),
        }
    }

    fn unready(&self) -> Vec<String> {
        match self.node.get() {
            Some(node) => node.unready().into_iter().map(|it| it.what).collect(),
            None => vec![
                "the node is starting: it opens its data, or waits for the cluster's other nodes; \
                 its log says for which"
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
