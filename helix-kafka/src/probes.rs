//! The port for probes and Prometheus: HTTP without TLS, read-only, apart from the clients' port.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use helix_client::proto::log::v1::ErrorReason;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use crate::metrics;
use crate::state::GatewayState;

/// Open connections; further ones are closed.
const CONNECTIONS_MAX: usize = 64;

/// Time for a request's header to arrive, and for the whole request with its response.
const HEAD_WAIT_MAX: Duration = Duration::from_secs(5);
const REQUEST_WAIT_MAX: Duration = Duration::from_secs(15);

/// Bytes of a request's header; a longer one is rejected.
const HEAD_BYTES_MAX: usize = 16 << 10;

/// Pause after a failed accept.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Age of a node's response that shows that the cluster answers, and the wait for another one.
const READY_AGE_MAX: Duration = Duration::from_secs(2);
const READY_WAIT_MAX: Duration = Duration::from_secs(3);

const PLAIN: &str = "text/plain; charset=utf-8";

const INDEX: &str = "\
/metrics  metrics of this gateway, for Prometheus
/livez    200 while the process runs
/readyz   200 while a node of the cluster answers, else 503 with the reason
";

/// Serves probes until it is dropped.
pub(crate) async fn serve_probes(listener: TcpListener, state: Arc<GatewayState>) {
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let Ok(permit) = permits.clone().try_acquire_owned() else { continue };
                let serving = serve_one(stream, state.clone());
                tokio::spawn(async move {
                    // Ignored: the client is too slow, or gone.
                    let _ = timeout(REQUEST_WAIT_MAX, serving).await;
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::debug!(%error, "connection of a probe not accepted");
                sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

async fn serve_one(stream: TcpStream, state: Arc<GatewayState>) {
    let respond = |request: Request<Incoming>| {
        let state = state.clone();
        async move { Ok::<_, Infallible>(respond(&state, &request).await) }
    };
    let serving = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WAIT_MAX)
        .max_buf_size(HEAD_BYTES_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service_fn(respond));
    if let Err(error) = serving.await {
        tracing::debug!(%error, "request of a probe failed");
    }
}

async fn respond(state: &GatewayState, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    if request.method() != Method::GET {
        let mut response = text(StatusCode::METHOD_NOT_ALLOWED, PLAIN, "GET only\n");
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
        return response;
    }
    match request.uri().path() {
        "/" => text(StatusCode::OK, PLAIN, INDEX),
        "/livez" => text(StatusCode::OK, PLAIN, "alive\n"),
        "/readyz" => match check_ready(state).await {
            Ok(()) => text(StatusCode::OK, PLAIN, "ready\n"),
            Err(why) => text(StatusCode::SERVICE_UNAVAILABLE, PLAIN, why + "\n"),
        },
        "/metrics" => {
            let is_ready = check_ready(state).await.is_ok();
            text(StatusCode::OK, metrics::CONTENT_TYPE, metrics::page(state, is_ready))
        }
        _ => text(StatusCode::NOT_FOUND, PLAIN, INDEX),
    }
}

/// Checks that a node of the cluster answers.
async fn check_ready(state: &GatewayState) -> Result<(), String> {
    match timeout(READY_WAIT_MAX, state.upstream.view(READY_AGE_MAX)).await {
        Ok(Ok(_)) => Ok(()),
        // The gateway needs no token of its own if its clients log in.
        Ok(Err(error)) if error.is(ErrorReason::Unauthenticated) => {
            match state.rules.requires_sasl {
                true => Ok(()),
                false => Err(format!("the cluster refuses the gateway: {}", error.message)),
            }
        }
        Ok(Err(error)) => Err(format!("the cluster does not answer: {}", error.message)),
        Err(_) => Err(format!("no node of the cluster answered within {READY_WAIT_MAX:?}")),
    }
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
