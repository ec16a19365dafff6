//! Machines of the cluster: disks and clock, which outlive crashes, and the node that runs on them.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use helix_server::access::AuthMode;
use helix_server::log::PartitionSettings;
use helix_server::memory::MemoryShares;
use helix_server::node::{LogLimits, Node, NodeSettings, NodeStorage};
use helix_server::peer::Network;
use helix_server::protocol::ProtocolVersions;
use helix_server::server::Server;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::Notify;
use turmoil::net::TcpListener;

use crate::clock::SkewedClock;
use crate::coverage::{CoverageMark, CoverageMarks};
use crate::disks::NodeDisks;
use crate::net::{CLIENT_PORT, ClientListener, PEER_PORT, SimulatedDialer, incoming};
use crate::plan::SimulationPlan;

/// State of the node on a machine.
#[derive(Debug, Clone, Default)]
pub enum MachineState {
    /// The node is being opened.
    #[default]
    Opening,
    Open(Weak<Node>),
    /// The node cannot be opened, or its storage failed: the process ends.
    Failed(String),
    /// The node stopped on request.
    Stopped,
}

/// One machine of the simulated cluster. Clones share it.
#[derive(Debug, Clone)]
pub struct SimulatedMachine(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    node_id: u64,
    plan: SimulationPlan,
    marks: CoverageMarks,
    disks: NodeDisks,
    /// Newest protocol version of the program that was started last; 0 before the first start.
    newest_protocol: AtomicU32,
    /// Later starts are of this release.
    must_upgrade: AtomicBool,
    clock: Arc<SkewedClock>,
    state: Mutex<MachineState>,
    /// Node that was opened last. It may have ended and still be in memory.
    last: Mutex<Weak<Node>>,
    stop: Notify,
    start_count: Mutex<u64>,
    /// The machine is switched on. A spare machine starts switched off.
    is_on: AtomicBool,
}

impl SimulatedMachine {
    pub fn new(plan: &SimulationPlan, marks: CoverageMarks, node_id: u64) -> Self {
        let place = usize::try_from(node_id - 1).unwrap_or(0);
        Self(Arc::new(Inner {
            node_id,
            disks: NodeDisks::new(plan.seed ^ node_id << 16, plan.disks[place]),
            clock: SkewedClock::new(plan.clock_errors_us[place]),
            plan: plan.clone(),
            marks,
            newest_protocol: AtomicU32::new(0),
            must_upgrade: AtomicBool::new(false),
            state: Mutex::default(),
            last: Mutex::default(),
            stop: Notify::new(),
            start_count: Mutex::default(),
            is_on: AtomicBool::new(node_id <= plan.nodes),
        }))
    }

    pub fn node_id(&self) -> u64 {
        self.0.node_id
    }

    pub fn host(&self) -> String {
        SimulationPlan::host(self.0.node_id)
    }

    pub fn is_on(&self) -> bool {
        self.0.is_on.load(Ordering::Relaxed)
    }

    /// Switches the machine on or off, from its next start.
    pub fn set_on(&self, on: bool) {
        self.0.is_on.store(on, Ordering::Relaxed);
    }

    pub fn disks(&self) -> &NodeDisks {
        &self.0.disks
    }

    pub fn clock(&self) -> &SkewedClock {
        &self.0.clock
    }

    fn lock(&self) -> MutexGuard<'_, MachineState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn state(&self) -> MachineState {
        self.lock().clone()
    }

    pub fn set_state(&self, state: MachineState) {
        *self.lock() = state;
    }

    /// Returns the running node, if it is open.
    pub fn node(&self) -> Option<Arc<Node>> {
        match &*self.lock() {
            MachineState::Open(node) => node.upgrade(),
            _ => None,
        }
    }

    /// Returns the node that was opened last, until the simulation drops it.
    pub fn last_node(&self) -> Option<Arc<Node>> {
        self.0.last.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    /// Drops the reference to the last node: its disks are gone.
    pub fn forget_last_node(&self) {
        *self.0.last.lock().unwrap_or_else(PoisonError::into_inner) = Weak::new();
    }

    /// Returns how often the node was started.
    pub fn start_count(&self) -> u64 {
        *self.0.start_count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets all later starts be of this release. Returns whether the node must start once more.
    pub fn finish_upgrade(&self) -> bool {
        self.0.must_upgrade.store(true, Ordering::Relaxed);
        let newest = self.0.newest_protocol.load(Ordering::Relaxed);
        newest != 0 && newest < ProtocolVersions::OWN.newest
    }

    /// Returns the protocol versions of the release that starts now.
    fn release(&self) -> ProtocolVersions {
        let Inner { plan, node_id, newest_protocol, marks, .. } = &*self.0;
        let before = newest_protocol.load(Ordering::Relaxed);
        let is_older = plan.older.as_ref().filter(|older| {
            let until = plan.duration.mul_f64(older.until);
            let seed = plan.seed ^ node_id << 40 ^ self.start_count();
            let is_kept = *node_id == older.keeper || before == 0;
            !self.0.must_upgrade.load(Ordering::Relaxed)
                && turmoil::sim_elapsed().unwrap_or_default() < until
                && (is_kept || StdRng::seed_from_u64(seed).random_bool(0.5))
        });
        let own = ProtocolVersions::OWN;
        let newest = is_older.map_or(own.newest, |older| older.newest);
        newest_protocol.store(newest, Ordering::Relaxed);
        if before != 0 && before < newest {
            marks.hit(CoverageMark::NodeUpgraded);
        } else if before > newest {
            marks.hit(CoverageMark::NodeRolledBack);
        }
        ProtocolVersions { newest, ..own }
    }

    /// Requests a graceful stop of the running node.
    pub fn stop(&self) {
        self.0.stop.notify_one();
    }

    fn settings(&self) -> NodeSettings {
        use helix_wal::Preparation;
        const PREPARATIONS: [Preparation; 3] =
            [Preparation::Auto, Preparation::Zero, Preparation::Allocate];
        let Inner { node_id, plan, disks, clock, start_count, .. } = &*self.0;
        let mut start_count = start_count.lock().unwrap_or_else(PoisonError::into_inner);
        *start_count += 1;
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
                retention_us: plan.retention_us,
                ..PartitionSettings::default()
            },
            segment_bytes: plan.segment_bytes,
            preparation: PREPARATIONS[(*node_id % 3) as usize],
            tail_bytes: plan.tail_bytes,
            footer_bytes: 1 << 20,
            shares: MemoryShares::default(),
            log_limits: LogLimits {
                checkpoint_bytes: plan.checkpoint_bytes,
                catch_up_bytes: plan.catch_up_bytes,
                key_map_bytes: plan
                    .table
                    .map_or(LogLimits::DEFAULT.key_map_bytes, |table| table.key_map_bytes),
                cleaner_lag: plan
                    .table
                    .map_or(LogLimits::DEFAULT.cleaner_lag, |table| table.cleaner_lag),
                ..LogLimits::DEFAULT
            },
            rack: plan.rack_of(*node_id),
            replace_down_after: plan.placement.as_ref().and_then(|it| it.replace_down_after),
            scrub_rate: plan.scrub_rate,
            copy_rate_max: helix_server::limits::COPY_RATE_MAX,
            busy_poll: false,
            pace: helix_server::limits::PACE,
            election_timeout: helix_server::limits::ELECTION_TIMEOUT,
            files: helix_wal::FileCache::default(),
            clock: clock.clone(),
            // Not `Required`: most clients send no tokens.
            auth: match plan.has_tokens || plan.has_principals {
                true => AuthMode::Optional,
                false => AuthMode::Off,
            },
            jwt: None,
            seed: Some(plan.seed ^ node_id << 32 ^ *start_count),
        }
    }

    /// Runs the node from start to failure or stop, then waits until the simulation crashes the
    /// host.
    pub async fn run_until_end(self) -> turmoil::Result {
        if !self.is_on() {
            std::future::pending::<()>().await;
        }
        if let Err(why) = self.run().await {
            let own = ProtocolVersions::OWN.newest;
            let is_older = self.0.newest_protocol.load(Ordering::Relaxed) < own;
            self.set_state(match is_older && why.contains("start a release that speaks") {
                // The node has recorded the newer version. Its operator starts the newer release.
                true => {
                    self.0.marks.hit(CoverageMark::OlderReleaseRefused);
                    self.0.must_upgrade.store(true, Ordering::Relaxed);
                    MachineState::Stopped
                }
                false => MachineState::Failed(why),
            });
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
        let network = network.with_versions(self.release());
        let Inner { node_id, plan, .. } = &*self.0;
        let others = (1..=plan.nodes).filter(|other| other != node_id);
        let others: BTreeMap<_, _> = others
            .map(|other| (other, format!("{}:{PEER_PORT}", SimulationPlan::host(other))))
            .collect();
        let node = Node::open_among(self.settings(), others, network)
            .await
            .map_err(|error| format!("cannot open the node: {error}"))?;
        self.set_state(MachineState::Open(Arc::downgrade(&node)));
        *self.0.last.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&node);
        let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, CLIENT_PORT));
        let endpoint = format!("{}:{CLIENT_PORT}", self.host());
        let mut running = Server::serve(node, address, endpoint, ClientListener(clients))
            .await
            .map_err(|error| format!("cannot serve: {error}"))?;
        tokio::select! {
            biased;
            why = running.wait_failed() => {
                self.set_state(MachineState::Failed(why));
                // Stays for one more check.
                std::future::pending().await
            }
            () = self.0.stop.notified() => {
                // As the binary does: connections that do not end in time are closed.
                let _ = tokio::time::timeout(Duration::from_secs(30), running.shutdown()).await;
                self.set_state(MachineState::Stopped);
                Ok(())
            }
        }
    }
}
