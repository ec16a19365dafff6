//! Starts and stops a server: a node, its transport and its admin port.
//! Embeddable: handles no signals, prints nothing and never ends the process.

mod copy_rate;
mod jwt;
mod tls;
mod traces;

use std::fmt::{self, Display};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use helix_tls::Acceptor;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::service::Routes;

use crate::access::AuthMode;
use crate::admin::{AdminServer, ConsoleSettings};
use crate::api;
use crate::call::ClientLoad;
use crate::clock::SystemClock;
use crate::config::{
    AuthSetting, ConfigError, ContainerLimits, SecretFile, ServerConfig, StorageMode,
};
use crate::error::Error;
use crate::file_limit::{self, FileBudget, FileLimitTooLow};
use crate::limits;
use crate::node::{
    LogLimits, Network, Node, NodeInfo, NodeSettings, NodeStorage, StorageKind, TokenFile,
    make_first_token,
};
use crate::transport::{
    self, Listener, LocalListeners, MeterLayer, Services, UnixSocketError, UnixSocketListener,
};
use tls::PortsTls;
use traces::{TraceConfig, TraceExport};

/// Reason why a server did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(
        "cannot listen on {addr}: {error}; stop the process that uses the address, or choose \
         another one with --listen-addr"
    )]
    Listen { addr: SocketAddr, error: io::Error },
    #[error("cannot listen on unix:{}, of --listen-socket: {error}", path.display())]
    SocketListen { path: PathBuf, error: UnixSocketError },
    #[error(
        "cannot listen on {addr} for other nodes: {error}; stop the process that uses the \
         address, or choose another one with --peer-addr"
    )]
    PeerListen { addr: SocketAddr, error: io::Error },
    #[error(
        "cannot listen on {addr} for the admin port: {error}; stop the process that uses the \
         address, choose another one with --admin-addr, or close it with --admin-addr off"
    )]
    AdminListen { addr: SocketAddr, error: io::Error },
    #[error("cannot use the certificates: {0}")]
    Tls(String),
    #[error("cannot use the keys of JWTs: {0}")]
    Jwt(String),
    #[error("cannot start the runtime: {0}")]
    Runtime(io::Error),
    #[error(transparent)]
    FileLimit(#[from] FileLimitTooLow),
    #[error("cannot open the node's data: {0}")]
    Open(#[from] Error),
}

/// Starts servers.
#[derive(Debug)]
pub struct Server;

/// The ports of a server beside its listener.
struct Ports {
    local_addr: SocketAddr,
    socket: Option<UnixSocketListener>,
    endpoint: String,
    admin: Option<AdminServer>,
    files: FileBudget,
    tls: PortsTls,
    traces: TraceConfig,
    /// Ends the watches of files: certificates, keys of JWTs, and the rate of copies.
    file_watches: Vec<DropGuard>,
}

/// A running server. Dropping the handle does not stop the server; the end of its runtime does.
#[derive(Debug)]
pub struct RunningServer {
    node: Arc<Node>,
    local_addr: SocketAddr,
    socket_path: Option<PathBuf>,
    load: Arc<ClientLoad>,
    admin: Option<AdminServer>,
    /// Makes the health service report NOT_SERVING.
    leaving: CancellationToken,
    /// Stops accepting connections and asks the open ones to end.
    closing: CancellationToken,
    serving: JoinHandle<()>,
    is_encrypted: bool,
    is_admin_encrypted: bool,
    traces: Option<TraceExport>,
    /// Ends the watches of files: certificates, keys of JWTs, and the rate of copies.
    _file_watches: Vec<DropGuard>,
}

impl Server {
    /// Opens the node and serves it. The listener is bound when this returns.
    ///
    /// The future is boxed: a program that awaits an `async fn` compiles its body again, here with
    /// the whole server.
    ///
    /// # Errors
    /// [`StartError`] names the setting, address or data that prevented the start.
    pub fn start(config: ServerConfig) -> BoxFuture<'static, Result<RunningServer, StartError>> {
        Self::start_unboxed(config).boxed()
    }

    async fn start_unboxed(config: ServerConfig) -> Result<RunningServer, StartError> {
        config.validate()?;
        let files = file_budget(&config)?;
        let addr = config.listen_addr;
        let listen_error = |error| StartError::Listen { addr, error };
        // Before the data is opened, so that an address in use is reported at once.
        let listener = TcpListener::bind(addr).await.map_err(listen_error)?;
        let local_addr = listener.local_addr().map_err(listen_error)?;
        let socket = open_socket(&config).await?;
        let tls = PortsTls::open(&config)?;
        // An empty node may wait for days to join its cluster, and its ports are open meanwhile.
        let mut file_watches: Vec<DropGuard> = tls.watch().into_iter().collect();
        let verifier = config.open_jwt().map_err(StartError::Jwt)?;
        if let Some((verifier, file)) = verifier.clone().zip(config.jwks_file()) {
            file_watches.push(jwt::watch(verifier, file));
        }
        let admin = match config.admin_listen_addr() {
            Some(addr) => {
                let console = config.has_console().then(|| ConsoleSettings {
                    hosts: config.console_hosts.clone(),
                    dial: tls.console_dial.clone(),
                });
                Some(open_admin(addr, tls.admin.clone(), console).await?)
            }
            None => None,
        };
        let settings = NodeSettings { jwt: verifier, ..node_settings(&config, &files) };
        // A node with only its own address forms a cluster to which others can be added.
        let peers: std::collections::BTreeMap<u64, String> = config.peers.iter().cloned().collect();
        let node = if peers.is_empty() {
            Node::open(settings).await?
        } else {
            let addr = config.peer_addr;
            let peer_listener = TcpListener::bind(addr)
                .await
                .map_err(|error| StartError::PeerListen { addr, error })?;
            let network = match tls.peers.clone() {
                Some(tls) => Network::over_tls(peer_listener, tls),
                None => Network::from(peer_listener),
            };
            Node::open_among(settings, peers, network).await?
        };
        if let Some(file) = config.copy_rate_file.clone() {
            file_watches.push(copy_rate::watch(&node, file));
        }
        if let Some(path) = config.first_token_file() {
            let file = Box::new(FirstTokenFile(SecretFile::new(path)));
            tokio::spawn(make_first_token(Arc::downgrade(&node), file));
        }
        warn_of_log_memory(&config, node.shards().len() as u64);
        let endpoint = config.advertise_addr.unwrap_or_else(|| local_addr.to_string());
        let share = config.trace_sample.as_f64();
        let traces = TraceConfig { endpoint: config.otlp_endpoint, share };
        let ports = Ports { local_addr, socket, endpoint, admin, files, tls, traces, file_watches };
        Self::serve_with(node, ports, listener).await
    }

    /// Serves an open node on the connections of any listener, also of a simulated one.
    ///
    /// # Errors
    /// [`StartError::Open`] if the node's endpoint could not be recorded.
    pub async fn serve<L: Listener>(
        node: Arc<Node>,
        local_addr: SocketAddr,
        endpoint: String,
        listener: L,
    ) -> Result<RunningServer, StartError> {
        let files = FileBudget::in_memory(file_limit::current(), 0);
        let tls = PortsTls::default();
        let (socket, admin, file_watches) = (None, None, Vec::new());
        let traces = TraceConfig::default();
        let ports = Ports { local_addr, socket, endpoint, admin, files, tls, traces, file_watches };
        Self::serve_with(node, ports, listener).await
    }

    async fn serve_with<L: Listener>(
        node: Arc<Node>,
        ports: Ports,
        listener: L,
    ) -> Result<RunningServer, StartError> {
        let Ports { local_addr, socket, endpoint, admin, files, tls, traces, file_watches } = ports;
        let traces = traces::start(&traces, &node);
        if let Some(report) = tls.report() {
            node.set_tls(report);
        }
        if let Err(error) = node.announce(endpoint).await {
            node.close().await;
            return Err(error.into());
        }

        let load = ClientLoad::new(*node.shares());
        load.limit_connections(files.clients);
        let (connector, in_process) = transport::in_process();
        if let Some(admin) = &admin {
            admin.set_node(&node, &load, connector);
        }
        let leaving = CancellationToken::new();
        let others = Routes::new(api::health(&node, leaving.clone()));
        let others = api::add_reflection(others, node.shutdown_token());
        let services = Services::new(&node, &load, others);
        let closing = CancellationToken::new();
        let meter = MeterLayer::new(node.metrics());
        let is_encrypted = tls.clients.is_some();
        let is_admin_encrypted = tls.admin.is_some();
        let clients = tls.clients;
        let socket_path = socket.as_ref().map(|socket| socket.path().to_owned());
        let (held, closed) = (load.clone(), closing.clone());
        let local = LocalListeners { unix: socket, in_process: Some(in_process) };
        let serving = transport::serve(listener, local, services, meter, held, clients, closed);
        let serving = tokio::spawn(serving);
        Ok(RunningServer {
            node,
            local_addr,
            socket_path,
            load,
            admin,
            leaving,
            closing,
            serving,
            is_encrypted,
            is_admin_encrypted,
            traces,
            _file_watches: file_watches,
        })
    }
}

impl RunningServer {
    /// Returns the address listened on, with its real port.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Returns the path of the Unix domain socket listened on.
    pub fn socket_path(&self) -> Option<&Path> {
        self.socket_path.as_deref()
    }

    /// Returns the address of the admin port, with its real port.
    pub fn admin_addr(&self) -> Option<SocketAddr> {
        self.admin.as_ref().map(AdminServer::local_addr)
    }

    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Returns the memory that clients occupy, and the counts of reached limits.
    pub fn load(&self) -> &Arc<ClientLoad> {
        &self.load
    }

    /// Stops the server.
    ///
    /// Open calls get [`limits::SHUTDOWN_WAIT_MAX`] to end; then their connections are closed.
    pub async fn shutdown(mut self) {
        self.leaving.cancel();
        // While it still serves, so that clients are redirected to the new leaders at once.
        self.node.transfer_leadership().await;
        // Ends long calls with DRAINING; new appends are rejected.
        self.node.shutdown_token().cancel();
        self.closing.cancel();
        // The task may have ended before; polling its handle again would panic.
        if !self.serving.is_finished() {
            let wait = limits::SHUTDOWN_WAIT_MAX + limits::ABORT_WAIT_MAX;
            if tokio::time::timeout(wait, &mut self.serving).await.is_err() {
                tracing::error!("abandoning connections that did not close in time");
                self.serving.abort();
            }
        }
        self.node.close().await;
        if let Some(traces) = self.traces.take() {
            traces.stop().await;
        }
    }

    /// Waits until the node fails, and returns the reason.
    ///
    /// The node fails when its storage fails or when the transport ends.
    pub async fn wait_failed(&mut self) -> String {
        tokio::select! {
            reason = self.node.failed() => reason,
            ended = &mut self.serving => match ended {
                Ok(()) => "the server stopped serving".to_owned(),
                Err(error) => format!("the server stopped serving: {error}"),
            },
        }
    }

    /// Returns the lines that a server prints at its start.
    pub fn banner(&self) -> Banner {
        let (sync_p50_us, sync_p99_us) = self.node.sync_probe();
        let info = self.node.info();
        let (local_addr, admin_addr) = (self.local_addr, self.admin_addr());
        let socket_path = self.socket_path.clone();
        let Self { is_encrypted, is_admin_encrypted, .. } = *self;
        let has_console = self.admin.as_ref().is_some_and(AdminServer::has_console);
        Banner {
            info,
            local_addr,
            socket_path,
            admin_addr,
            is_encrypted,
            is_admin_encrypted,
            has_console,
            sync_p50_us,
            sync_p99_us,
        }
    }
}

/// Description of a started server, for the operator.
#[derive(Debug, Clone)]
pub struct Banner {
    info: NodeInfo,
    local_addr: SocketAddr,
    socket_path: Option<PathBuf>,
    admin_addr: Option<SocketAddr>,
    is_encrypted: bool,
    is_admin_encrypted: bool,
    has_console: bool,
    sync_p50_us: u64,
    sync_p99_us: u64,
}

impl Display for Banner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { info, local_addr, sync_p50_us, sync_p99_us, .. } = self;
        writeln!(f, "helix-server {}, node {}", info.version, info.node_id)?;
        match info.storage {
            StorageKind::Durable => {
                let io = if info.direct_io { "direct I/O" } else { "buffered I/O" };
                writeln!(f, "  durability  an ack means synced to stable storage of a majority")?;
                writeln!(f, "  storage     disk, {io}")?;
                writeln!(f, "  data        {}", info.data_dir)?;
                writeln!(f, "  sync        p50 {sync_p50_us} us, p99 {sync_p99_us} us")?;
            }
            StorageKind::Memory => {
                writeln!(
                    f,
                    "  durability  NONE BEYOND THIS PROCESS: all data is lost when it ends"
                )?;
                writeln!(f, "  storage     memory")?;
            }
        }
        if info.endpoint != local_addr.to_string() {
            writeln!(f, "  advertised  {}", info.endpoint)?;
        }
        if let Some(admin_addr) = self.admin_addr {
            let scheme = if self.is_admin_encrypted { "https" } else { "http" };
            writeln!(f, "  admin       {scheme}://{admin_addr}/metrics")?;
            if self.has_console {
                writeln!(f, "  console     {scheme}://{admin_addr}/console/")?;
            }
        }
        if let Some(path) = &self.socket_path {
            writeln!(f, "  socket      unix:{}", path.display())?;
        }
        if self.is_encrypted {
            return write!(f, "  listening   {local_addr} (TLS)");
        }
        write!(f, "  listening   {local_addr}")
    }
}

/// The file of the cluster's first token.
struct FirstTokenFile(SecretFile);

impl TokenFile for FirstTokenFile {
    fn store(&self, token: &str) -> io::Result<()> {
        self.0.write(token)
    }

    fn load(&self) -> Option<String> {
        self.0.read()
    }

    fn remove(&self) {
        self.0.remove();
    }

    fn describe(&self) -> String {
        self.0.path().display().to_string()
    }
}

/// Listens on the Unix domain socket, if there is one. Before the data is opened, as for the port.
async fn open_socket(config: &ServerConfig) -> Result<Option<UnixSocketListener>, StartError> {
    let Some(path) = &config.listen_socket else { return Ok(None) };
    let opened = UnixSocketListener::bind(path, config.listen_socket_mode.0).await;
    opened.map(Some).map_err(|error| StartError::SocketListen { path: path.clone(), error })
}

async fn open_admin(
    addr: SocketAddr,
    tls: Option<Arc<Acceptor>>,
    console: Option<ConsoleSettings>,
) -> Result<AdminServer, StartError> {
    let error = |error| StartError::AdminListen { addr, error };
    AdminServer::open(TcpListener::bind(addr).await.map_err(error)?, tls, console).map_err(error)
}

/// Returns the settings of the node of a server.
pub(crate) fn node_settings(config: &ServerConfig, files: &FileBudget) -> NodeSettings {
    let storage = match config.storage {
        StorageMode::Memory => NodeStorage::Memory,
        StorageMode::Durable => {
            NodeStorage::DataDir { path: config.data_dir.clone(), direct_io: !config.no_direct_io }
        }
    };
    NodeSettings {
        node_id: config.node_id,
        storage,
        cluster_name: config.cluster_id.clone(),
        shard_count: config.shard_count(),
        topics: config.topics.clone(),
        topic_settings: config.topic_settings(),
        segment_bytes: config.segment_bytes,
        preparation: config.prepare.into(),
        tail_bytes: usize::try_from(config.tail_bytes()).expect("checked by validate"),
        footer_bytes: usize::try_from(config.footer_bytes()).expect("below the limit"),
        files: files.cache(),
        shares: config.shares(),
        log_limits: LogLimits {
            key_map_bytes: config.shares().key_map_bytes,
            checkpoint_bytes: config.checkpoint_bytes,
            catch_up_bytes: config.catch_up_bytes,
            cleaner_dirty_percent: config.cleaner_dirty_percent,
            cleaner_lag: config.cleaner_lag,
            groups_bytes: limits::GROUPS_BYTES_MAX,
        },
        scrub_rate: config.scrub_rate,
        copy_rate_max: config.copy_rate_max,
        rack: config.rack.clone().unwrap_or_default(),
        replace_down_after: config.replace_down_after,
        pace: config.pace,
        // Under a quota, polling would use up CPU time that is then missing for calls.
        busy_poll: ContainerLimits::of_process().cpus.is_none(),
        election_timeout: Duration::from_millis(config.election_timeout_ms.into()),
        clock: Arc::new(SystemClock),
        auth: match config.auth {
            AuthSetting::Off => AuthMode::Off,
            AuthSetting::Optional => AuthMode::Optional,
            AuthSetting::Required => AuthMode::Required,
        },
        jwt: None,
        seed: None,
    }
}

/// Warns if the cluster has more shards than `--shards` says and their logs exceed their share.
pub(crate) fn warn_of_log_memory(config: &ServerConfig, shards: u64) {
    let (shares, tail_bytes) = (config.shares(), config.tail_bytes());
    if shards > config.shard_count() && shares.footer_bytes(shards, tail_bytes).is_none() {
        tracing::warn!(
            shards,
            tail_bytes,
            memory_limit = shares.limit,
            "the logs of all shards may exceed their share of the memory limit; start with \
             --shards {shards}, or raise --memory-limit"
        );
    }
}

/// Divides the open files that the process may have. The data directory may have more shards than
/// the configuration.
pub(crate) fn file_budget(config: &ServerConfig) -> Result<FileBudget, FileLimitTooLow> {
    let (limit, handshakes) = (file_limit::current(), config.tls_handshakes_max());
    if config.storage == StorageMode::Memory {
        return Ok(FileBudget::in_memory(limit, handshakes));
    }
    let is_shard = |id: &u64| config.data_dir.join(format!("shard-{id}")).is_dir();
    let existing = (1..=limits::SHARDS_MAX).filter(is_shard).count() as u64;
    let shards = existing.max(config.shard_count());
    let budget = FileBudget::new(limit, shards, !config.no_direct_io, handshakes)?;
    tracing::info!(
        open_files = limit,
        shards,
        cached_files = budget.cache_files,
        client_connections = budget.clients,
        "divided the limit of open files"
    );
    Ok(budget)
}
