//! The listener of the gateway.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use helix_client::{Client, Config};
use helix_tls::{
    Acceptor, AcceptorOptions, CallerCa, CertificateFiles, CertificateStore, ClientAuth,
    PlaintextRule,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::brokers::{GatewayOfNode, GatewayTable, HostPort};
use crate::connection::{ConnectionEnd, serve_connection};
use crate::probes::serve_probes;
use crate::state::{GatewayLimits, GatewayRules, GatewayState};

/// Wait after a failed accept: usually file descriptors are used up.
const ACCEPT_WAIT: Duration = Duration::from_millis(100);

/// Least time between two log messages about refused connections.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Deadline of a TLS handshake, and open ones.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(10);
const HANDSHAKES_MAX: usize = 256;

/// Time for connections to end when the gateway stops.
const STOP_DEADLINE: Duration = Duration::from_secs(10);

/// Settings of a gateway.
#[derive(Debug, Clone)]
pub struct GatewayOptions {
    /// Address to listen on; port 0 lets the system choose.
    pub listen_addr: SocketAddr,
    /// Address of the port for probes and metrics; none without it.
    pub metrics_addr: Option<SocketAddr>,
    /// Address that clients dial. Default: the one listened on.
    pub advertised_addr: Option<HostPort>,
    /// Gateways of all nodes, this one included. Empty: this one serves the whole cluster.
    pub gateways: Vec<GatewayOfNode>,
    /// The cluster behind the gateway. With SASL, its token is used only before a login.
    pub cluster: Config,
    /// Certificate of the gateway; without it, connections are not encrypted.
    pub tls: Option<CertificateFiles>,
    /// Limits.
    pub limits: GatewayLimits,
    /// Rules that clients notice.
    pub rules: GatewayRules,
}

/// Reason why a gateway does not start.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// The address cannot be listened on.
    #[error("cannot listen on {addr}: {error}")]
    Listen {
        /// Address.
        addr: SocketAddr,
        /// Failure.
        error: io::Error,
    },
    /// The table of gateways is not valid.
    #[error("--gateways: {0}")]
    Gateways(String),
    /// The certificate is not valid.
    #[error("{0}")]
    Tls(String),
    /// The settings of the cluster are not valid.
    #[error("{0}")]
    Cluster(helix_client::Error),
}

/// A gateway that listens.
#[derive(Debug)]
pub struct Gateway {
    listener: TcpListener,
    probes: Option<TcpListener>,
    acceptor: Option<Arc<Acceptor>>,
    state: Arc<GatewayState>,
}

impl Gateway {
    /// Listens. Connections are accepted once [`Gateway::serve`] runs.
    ///
    /// # Errors
    /// See [`GatewayError`].
    pub async fn bind(options: GatewayOptions) -> Result<Self, GatewayError> {
        let addr = options.listen_addr;
        let listening = |error| GatewayError::Listen { addr, error };
        let listener = TcpListener::bind(addr).await.map_err(listening)?;
        let probes = match options.metrics_addr {
            None => None,
            Some(addr) => {
                let listening = |error| GatewayError::Listen { addr, error };
                Some(TcpListener::bind(addr).await.map_err(listening)?)
            }
        };
        let local = listener.local_addr().map_err(listening)?;
        let own = options
            .advertised_addr
            .unwrap_or_else(|| HostPort { host: local.ip().to_string(), port: local.port() });
        let brokers = match options.gateways.is_empty() {
            true => GatewayTable::single(own),
            false => GatewayTable::new(options.gateways, &own).map_err(GatewayError::Gateways)?,
        };
        let client = Client::new(options.cluster).map_err(GatewayError::Cluster)?;
        let acceptor = options.tls.map(acceptor).transpose().map_err(GatewayError::Tls)?;
        let state = GatewayState::new(client, brokers, options.limits, options.rules);
        Ok(Self { listener, probes, acceptor, state: Arc::new(state) })
    }

    /// Returns the address that is listened on.
    ///
    /// # Errors
    /// The system does not tell.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Returns the address of the port for probes and metrics.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.probes.as_ref().and_then(|probes| probes.local_addr().ok())
    }

    /// Returns the shared state, for statistics.
    pub fn state(&self) -> &Arc<GatewayState> {
        &self.state
    }

    /// Serves clients until `stop`; then waits a while for open requests.
    pub async fn serve(self, stop: CancellationToken) {
        let Self { listener, probes, acceptor, state } = self;
        let connections = Arc::new(Semaphore::new(state.limits.connections));
        let tracker = TaskTracker::new();
        let mut refusal_logged_at: Option<Instant> = None;
        let watched = acceptor.as_ref().map(|acceptor| acceptor.store().clone());
        let background = async {
            let certificates = async {
                match watched {
                    Some(store) => store.watch().await,
                    None => std::future::pending().await,
                }
            };
            let probing = async {
                match probes {
                    Some(probes) => serve_probes(probes, state.clone()).await,
                    None => std::future::pending().await,
                }
            };
            let groups = &state.groups;
            let reports = groups.watch_reports(&state);
            tokio::join!(certificates, state.brokers.watch(), groups.watch(), reports, probing);
        };
        let accepting = async {
            loop {
                let (socket, peer) = match listener.accept().await {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        tracing::warn!(%error, "connection not accepted");
                        sleep(ACCEPT_WAIT).await;
                        continue;
                    }
                };
                let Ok(permit) = connections.clone().try_acquire_owned() else {
                    state.metrics.refused.add(1);
                    let is_due = |at: Instant| at.elapsed() >= REFUSAL_LOG_INTERVAL;
                    if refusal_logged_at.is_none_or(is_due) {
                        refusal_logged_at = Some(Instant::now());
                        let limit = state.limits.connections;
                        tracing::warn!(%peer, limit, "connection refused: too many are open");
                    }
                    continue;
                };
                state.metrics.connections.add(1);
                let task = connection(state.clone(), acceptor.clone(), socket, peer, permit);
                let stop = stop.clone();
                let counted = state.clone();
                tracker.spawn(async move {
                    tokio::select! {
                        () = task => {}
                        () = stop.cancelled() => {}
                    }
                    counted.metrics.ended.add(1);
                });
            }
        };
        tokio::select! {
            () = accepting => {}
            () = background => {}
            () = stop.cancelled() => {}
        }
        tracker.close();
        let _ = timeout(STOP_DEADLINE, tracker.wait()).await;
    }
}

async fn connection(
    state: Arc<GatewayState>,
    acceptor: Option<Arc<Acceptor>>,
    socket: TcpStream,
    peer: SocketAddr,
    _permit: OwnedSemaphorePermit,
) {
    // Responses are flushed as a whole, and clients wait for them.
    if let Err(error) = socket.set_nodelay(true) {
        tracing::debug!(%peer, %error, "connection not prepared");
        return;
    }
    let end = match acceptor {
        None => serve_connection(state.clone(), socket, peer).await,
        Some(acceptor) => match acceptor.accept(socket, &peer).await {
            Ok(accepted) => serve_connection(state.clone(), accepted.socket, peer).await,
            // The acceptor logs and counts failed handshakes.
            Err(_) => return,
        },
    };
    match end {
        end if end.is_violation() => {
            state.metrics.protocol_errors.add(1);
            tracing::warn!(%peer, reason = %end, "closed a connection");
        }
        ConnectionEnd::Login(what) => {
            state.metrics.failed_logins.add(1);
            tracing::warn!(%peer, what, "closed a connection");
        }
        end => tracing::debug!(%peer, reason = %end, "connection ended"),
    }
}

fn acceptor(files: CertificateFiles) -> Result<Arc<Acceptor>, String> {
    let store = CertificateStore::open(files, None).map_err(|error| error.to_string())?;
    let options = AcceptorOptions {
        port: "kafka",
        client_auth: ClientAuth::Off,
        caller_ca: CallerCa::Clients,
        plaintext: PlaintextRule::Refuse,
        protocol: b"kafka",
        deadline: HANDSHAKE_DEADLINE,
        handshakes_max: HANDSHAKES_MAX,
    };
    Ok(Arc::new(Acceptor::new(store, options)?))
}
