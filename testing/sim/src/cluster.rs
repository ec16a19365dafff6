//! The nodes: what outlives their crashes, and what runs while they live.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use helix_server::log::PartitionSettings;
use helix_server::memory::Shares;
use helix_server::node::{LogLimits, Node, NodeSettings, NodeStorage};
use helix_server::peer::Network;
use helix_server::server::Server;
use tokio::sync::Notify;
use turmoil::net::TcpListener;

use crate::clock::SkewedClock;
use crate::disks::Disks;
use crate::net::{CLIENT_PORT, ClientDoor, PEER_PORT, SimulatedDialer, incoming};
use crate::plan::Plan;

/// How a node stands, as far as it says itself.
#[derive(Debug, Clone, Default)]
pub enum Standing {
    /// Being opened.
    #[default]
    Opening,
    Open(Weak<Node>),
    /// It cannot be opened, or its storage failed: the process ends.
    Failed(String),
    /// It was asked to stop, and has.
    Stopped,
}

/// One machine. Clones are the same one.
#[derive(Debug, Clone)]
pub struct Machine(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    node_id: u64,
    plan: Plan,
    disks: Disks,
    clock: Arc<SkewedClock>,
    standing: Mutex<Standing>,
    /// The node that was opened last: it may have ended, and still be there.
    last: Mutex<Weak<Node>>,
    stop: Notify,
    life: Mutex<u64>,
    /// Whether it is switched on. One that may join later is not at first.
    is_on: AtomicBool,
}

impl Machine {
    pub fn new(plan: &Plan, node_id: u64) -> Self {
        let place = usize::try_from(node_id - 1).unwrap_or(0);
        Self(Arc::new(Inner {
            node_id,
            disks: Disks::new(plan.seed ^ node_id << 16, plan.disks[place]),
            clock: SkewedClock::new(plan.clock_errors_us[place]),
            plan: plan.clone(),
            standing: Mutex::default(),
            last: Mutex::default(),
            stop: Notify::new(),
            life: Mutex::default(),
            is_on: AtomicBool::new(node_id <= plan.nodes),
        }))
    }

    pub fn node_id(&self) -> u64 {
        self.0.node_id
    }

    pub fn host(&self) -> String {
        Plan::host(self.0.node_id)
    }

    pub fn is_on(&self) -> bool {
        self.0.is_on.load(Ordering::Relaxed)
    }

    /// Whether the next life is one.
    pub fn switch(&self, on: bool) {
        self.0.is_on.store(on, Ordering::Relaxed);
    }

    pub fn disks(&self) -> &Disks {
        &self.0.disks
    }

    pub fn clock(&self) -> &SkewedClock {
        &self.0.clock
    }

    fn lock(&self) -> MutexGuard<'_, Standing> {
        self.0.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn standing(&self) -> Standing {
        self.lock().clone()
    }

    pub fn set_standing(&self, standing: Standing) {
        *self.lock() = standing;
    }

    /// The running node, if it is open.
    pub fn node(&self) -> Option<Arc<Node>> {
        match &*self.lock() {
            Standing::Open(node) => node.upgrade(),
            _ => None,
        }
    }

    /// The node that was opened last, until the machine takes its remains away.
    pub fn last_node(&self) -> Option<Arc<Node>> {
        self.0.last.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    /// Nothing that it left behind is looked at any more: its disks are gone.
    pub fn forget_last(&self) {
        *self.0.last.lock().unwrap_or_else(PoisonError::into_inner) = Weak::new();
    }

    /// How often it was started.
    pub fn life(&self) -> u64 {
        *self.0.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the running node to stop as it does when it is told to.
    pub fn stop(&self) {
        self.0.stop.notify_one();
    }

    fn settings(&self) -> NodeSettings {
        let Inner { node_id, plan, disks, clock, life, .. } = &*self.0;
        let mut life = life.lock().unwrap_or_else(PoisonError::into_inner);
        *life += 1;
        NodeSettings {
            node_id: *node_id,
            storage: NodeStorage::Simulated(Arc::new(disks.clone())),
            cluster_name: None,
            shard_count: plan.shards,
            topics: Vec::new(),
            topic_settings: PartitionSettings {
                default_durability: 1,
                min_durability: 1,
                max_batch_bytes: 24 << 10,
                max_record_bytes: 8 << 10,
                retention_bytes: plan.retention_bytes,
                ..PartitionSettings::default()
            },
            segment_bytes: plan.segment_bytes,
            tail_bytes: plan.tail_bytes,
            footer_bytes: 1 << 20,
            shares: Shares::default(),
            log_limits: LogLimits {
                checkpoint_bytes: plan.checkpoint_bytes,
                catch_up_bytes: plan.catch_up_bytes,
            },
            scrub_rate: plan.scrub_rate,
            idle_poll: Duration::ZERO,
            pace: helix_server::limits::PACE,
            clock: clock.clone(),
            seed: Some(plan.seed ^ node_id << 32 ^ *life),
        }
    }

    /// One life of the node, from start to failure or stop. A process that has ended waits until
    /// the machine takes its remains away.
    pub async fn live(self) -> turmoil::Result {
        if !self.is_on() {
            std::future::pending::<()>().await;
        }
        if let Err(why) = self.run().await {
            self.set_standing(Standing::Failed(why));
        }
        std::future::pending().await
    }

    async fn run(&self) -> Result<(), String> {
        let listen = |port| async move {
            let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
            TcpListener::bind(address).await.map_err(|error| error.to_string())
        };
        let (clients, peers) = (listen(CLIENT_PORT).await?, listen(PEER_PORT).await?);
        let network = Network::new(Arc::new(SimulatedDialer), incoming(peers));
        let Inner { node_id, plan, .. } = &*self.0;
        let others = (1..=plan.nodes).filter(|other| other != node_id);
        let others: BTreeMap<_, _> =
            others.map(|other| (other, format!("{}:{PEER_PORT}", Plan::host(other)))).collect();
        let node = Node::open_among(self.settings(), others, network)
            .await
            .map_err(|error| format!("it does not open: {error}"))?;
        self.set_standing(Standing::Open(Arc::downgrade(&node)));
        *self.0.last.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&node);
        let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, CLIENT_PORT));
        let endpoint = format!("{}:{CLIENT_PORT}", self.host());
        let mut running = Server::serve(node, address, endpoint, ClientDoor(clients))
            .await
            .map_err(|error| format!("it does not serve: {error}"))?;
        tokio::select! {
            biased;
            why = running.wait_failed() => {
                self.set_standing(Standing::Failed(why));
                // It is looked at once more.
                std::future::pending().await
            }
            () = self.0.stop.notified() => {
                // As the binary does: what does not end in time is cut off.
                let _ = tokio::time::timeout(Duration::from_secs(30), running.shutdown()).await;
                self.set_standing(Standing::Stopped);
                Ok(())
            }
        }
    }
}
