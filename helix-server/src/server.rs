//! A whole server: a node behind its gRPC services, from start to stop.
//! Embeddable: it owns no signals, prints nothing and never ends the process.

mod accept;
mod gate;
mod reflection;
mod socket;

pub use accept::Door;

use std::fmt::{self, Display};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::admin::Admin;
use crate::api::{self, MeterLayer, Services};
use crate::clock::SystemClock;
use crate::config::{Config, ConfigError, Storage};
use crate::error::Error;
use crate::limits;
use crate::node::{LogLimits, Node, NodeInfo, NodeSettings, NodeStorage, StorageKind};

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(
        "cannot listen on {addr}: {error}; stop what uses the address, or choose another one with \
         --listen-addr"
    )]
    Listen { addr: SocketAddr, error: io::Error },
    #[error(
        "cannot listen on {addr} for the cluster's other nodes: {error}; stop what uses the \
         address, or choose another one with --peer-addr"
    )]
    PeerListen { addr: SocketAddr, error: io::Error },
    #[error(
        "cannot listen on {addr} for administration: {error}; stop what uses the address, choose \
         another one with --admin-addr, or none with --admin-addr off"
    )]
    AdminListen { addr: SocketAddr, error: io::Error },
    #[error("cannot start the runtime: {0}")]
    Runtime(io::Error),
    #[error("cannot open the node's data: {0}")]
    Open(#[from] Error),
}

/// How to start a server.
#[derive(Debug)]
pub struct Server;

/// A running server. Dropping it leaves it running for as long as its runtime does.
#[derive(Debug)]
pub struct Running {
    node: Arc<Node>,
    local_addr: SocketAddr,
    admin: Option<Admin>,
    /// Says that it stops, to those who ask for its health.
    leaving: CancellationToken,
    /// Ends the accepting of connections and asks the open ones to end.
    closing: CancellationToken,
    serving: JoinHandle<()>,
}

impl Server {
    /// Opens the node and serves it. The listener is bound when this returns.
    pub async fn start(config: Config) -> Result<Running, StartError> {
        config.validate()?;
        let addr = config.listen_addr;
        let listen_error = |error| StartError::Listen { addr, error };
        // Before the data is opened: an address in use is found out at once.
        let listener = TcpListener::bind(addr).await.map_err(listen_error)?;
        let local_addr = listener.local_addr().map_err(listen_error)?;
        let admin = match config.admin_listen_addr() {
            Some(addr) => Some(open_admin(addr).await?),
            None => None,
        };
        let settings = node_settings(&config);
        // With its own address alone a node is its own cluster, to which others can be added.
        let peers: std::collections::BTreeMap<u64, String> = config.peers.iter().cloned().collect();
        let node = if peers.is_empty() {
            Node::open(settings).await?
        } else {
            let addr = config.peer_addr;
            let peer_listener = TcpListener::bind(addr)
                .await
                .map_err(|error| StartError::PeerListen { addr, error })?;
            Node::open_among(settings, peers, peer_listener).await?
        };
        warn_of_logs(&config, node.shards().len() as u64);
        let endpoint = config.advertise_addr.unwrap_or_else(|| local_addr.to_string());
        Self::serve_with(node, local_addr, endpoint, admin, listener).await
    }

    /// Serves an open node on connections of any kind: those of a listener, or simulated ones.
    pub async fn serve<D: Door>(
        node: Arc<Node>,
        local_addr: SocketAddr,
        endpoint: String,
        door: D,
    ) -> Result<Running, StartError> {
        Self::serve_with(node, local_addr, endpoint, None, door).await
    }

    async fn serve_with<D: Door>(
        node: Arc<Node>,
        local_addr: SocketAddr,
        endpoint: String,
        admin: Option<Admin>,
        door: D,
    ) -> Result<Running, StartError> {
        if let Err(error) = node.announce(endpoint).await {
            node.close().await;
            return Err(error.into());
        }

        if let Some(admin) = &admin {
            admin.show(&node);
        }
        let leaving = CancellationToken::new();
        let others = Routes::new(api::health(&node, leaving.clone()));
        let others = reflection::add(others, node.shutdown_token());
        let services = Services::new(&node, others);
        let closing = CancellationToken::new();
        node.load().limit_connections(files_left());
        let meter = MeterLayer::new(node.metrics());
        let serving = accept::serve(door, services, meter, node.load().clone(), closing.clone());
        let serving = tokio::spawn(serving);
        Ok(Running { node, local_addr, admin, leaving, closing, serving })
    }
}

impl Running {
    /// The address listened on, with its real port.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// The address of the admin port, with its real port.
    pub fn admin_addr(&self) -> Option<SocketAddr> {
        self.admin.as_ref().map(Admin::local_addr)
    }

    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Stops the server: open calls get [`limits::SHUTDOWN_WAIT_MAX`] to end, and are cut off
    /// together with their connections then.
    pub async fn shutdown(mut self) {
        self.leaving.cancel();
        // While it still serves: who is turned away hears at once where to go.
        self.node.hand_over().await;
        // Long calls end with DRAINING by themselves, new appends are refused.
        self.node.shutdown_token().cancel();
        self.closing.cancel();
        // It may have ended before, and a second look at an ended task panics.
        if !self.serving.is_finished() {
            let wait = limits::SHUTDOWN_WAIT_MAX + limits::CUT_WAIT_MAX;
            if tokio::time::timeout(wait, &mut self.serving).await.is_err() {
                tracing::error!("connections that were cut off do not end, and are left behind");
                self.serving.abort();
            }
        }
        self.node.close().await;
    }

    /// Resolves, with the reason, when the node cannot go on: its storage failed, or it stopped
    /// accepting connections.
    pub async fn wait_failed(&mut self) -> String {
        tokio::select! {
            reason = self.node.failed() => reason,
            ended = &mut self.serving => match ended {
                Ok(()) => "the server stopped serving".to_owned(),
                Err(error) => format!("the server stopped serving: {error}"),
            },
        }
    }

    /// What people want to know at the start.
    pub fn banner(&self) -> Banner {
        let (sync_p50_us, sync_p99_us) = self.node.sync_probe();
        let info = self.node.info();
        let (local_addr, admin_addr) = (self.local_addr, self.admin_addr());
        Banner { info, local_addr, admin_addr, sync_p50_us, sync_p99_us }
    }
}

/// A few lines about a server that has started.
#[derive(Debug, Clone)]
pub struct Banner {
    info: NodeInfo,
    local_addr: SocketAddr,
    admin_addr: Option<SocketAddr>,
    sync_p50_us: u64,
    sync_p99_us: u64,
}

impl Display for Banner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { info, local_addr, admin_addr, sync_p50_us, sync_p99_us } = self;
        writeln!(f, "helix-server {}, node {}", info.version, info.node_id)?;
        match info.storage {
            StorageKind::Durable => {
                let way = if info.direct_io { "direct I/O" } else { "buffered I/O" };
                writeln!(f, "  durability  an ack means synced to stable storage of a majority")?;
                writeln!(f, "  storage     disk, {way}")?;
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
        if let Some(admin_addr) = admin_addr {
            writeln!(f, "  admin       http://{admin_addr}/metrics")?;
        }
        write!(f, "  listening   {local_addr}")
    }
}

async fn open_admin(addr: SocketAddr) -> Result<Admin, StartError> {
    let error = |error| StartError::AdminListen { addr, error };
    Admin::open(TcpListener::bind(addr).await.map_err(error)?).map_err(error)
}

fn node_settings(config: &Config) -> NodeSettings {
    let storage = match config.storage {
        Storage::Memory => NodeStorage::Memory,
        Storage::Durable => {
            NodeStorage::Folder { path: config.data_dir.clone(), direct_io: !config.no_direct_io }
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
        tail_bytes: usize::try_from(config.tail_bytes()).expect("checked by validate"),
        footer_bytes: usize::try_from(config.footer_bytes()).expect("below the limit"),
        shares: config.shares(),
        log_limits: LogLimits {
            checkpoint_bytes: config.checkpoint_bytes,
            catch_up_bytes: config.catch_up_bytes,
        },
        scrub_rate: config.scrub_rate,
        pace: config.pace,
        idle_poll: Duration::from_micros(config.idle_poll_us.into()),
        clock: Arc::new(SystemClock),
        seed: None,
    }
}

/// A cluster may have more shards than this start was told of.
fn warn_of_logs(config: &Config, shards: u64) {
    let (shares, tail_bytes) = (config.shares(), config.tail_bytes());
    if shards > config.shard_count() && shares.footer_bytes(shards, tail_bytes).is_none() {
        tracing::warn!(
            shards,
            tail_bytes,
            memory_limit = shares.limit,
            "the logs of so many shards may exceed their share of the memory limit; start with \
             --shards {shards}, or raise --memory-limit"
        );
    }
}

/// File descriptors that clients' connections may take.
fn files_left() -> u64 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or(u64::MAX, |limit| limit.saturating_sub(limits::FILES_RESERVED).max(1))
}
