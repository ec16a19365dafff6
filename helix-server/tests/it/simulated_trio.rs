//! Three nodes in the test's own process on simulated disks, which can be filled and damaged and
//! which outlive their nodes.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use helix_server::limits::ELECTION_TIMEOUT;
use helix_server::log::{Condition, PartitionId};
use helix_server::node::{LogLimits, Node, NodeSettings};
use helix_server::shard::{Durability, NewBatch, ReadBatch, ReadFrom, Shard};
use helix_wal::storage::{SimulatedDisk, Storage};
use tokio::net::TcpListener;

use crate::simulation::settings_on;
use crate::trio::{NODES, STEADY, free_port, until};

/// The data shard with all records.
pub(crate) const SHARD: u64 = 1;

/// Disks by node and shard; they outlive their nodes.
#[derive(Clone, Default)]
pub(crate) struct Disks(Arc<Mutex<BTreeMap<(u64, u64), SimulatedDisk>>>);

impl Disks {
    pub(crate) fn of(&self, node: u64, shard: u64) -> SimulatedDisk {
        let mut disks = self.0.lock().unwrap();
        disks.entry((node, shard)).or_insert_with(|| SimulatedDisk::new(node << 8 | shard)).clone()
    }

    pub(crate) fn open(&self, node: u64, shard: u64) -> Arc<dyn Storage> {
        let disk = self.of(node, shard).reopen();
        self.0.lock().unwrap().insert((node, shard), disk.clone());
        Arc::new(disk)
    }
}

/// A batch of one record. Its payload may be any bytes: a shard does not decode it.
pub(crate) fn one_record(partition: PartitionId, payload: Bytes) -> NewBatch {
    NewBatch {
        partition,
        record_count: 1,
        version: 1,
        compression: 1,
        uncompressed_bytes: 0,
        crc: helix_proto::batch::crc(1, 1, 1, &payload),
        payload,
        producer: None,
        condition: Condition::default(),
        stamps: None,
    }
}

pub(crate) struct SimulatedTrio {
    pub(crate) disks: Disks,
    addresses: BTreeMap<u64, SocketAddr>,
    pub(crate) nodes: BTreeMap<u64, Arc<Node>>,
    log_limits: LogLimits,
    election_timeout: Duration,
    /// Scrub rate of nodes that are opened from now on.
    pub(crate) scrub_rate: u64,
}

impl SimulatedTrio {
    /// Starts nodes with an election timeout of [`STEADY`].
    pub(crate) async fn start(log_limits: LogLimits) -> Self {
        Self::start_with(log_limits, STEADY).await
    }

    /// Starts nodes with the default election timeout, for tests that wait for elections.
    pub(crate) async fn start_hasty(log_limits: LogLimits) -> Self {
        Self::start_with(log_limits, ELECTION_TIMEOUT).await
    }

    async fn start_with(log_limits: LogLimits, election_timeout: Duration) -> Self {
        let mut listeners = Vec::new();
        let mut addresses = BTreeMap::new();
        for node in NODES {
            // Not an ephemeral port, which a client could take while the node is stopped.
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, free_port())).await.unwrap();
            addresses.insert(node, listener.local_addr().unwrap());
            listeners.push(listener);
        }
        let (disks, nodes) = (Disks::default(), BTreeMap::new());
        let scrub_rate = 0;
        let mut three = Self { disks, addresses, nodes, log_limits, election_timeout, scrub_rate };
        let opening = NODES.into_iter().zip(listeners);
        let opening = opening.map(|(node, listener)| three.open(node, listener));
        for (node, opened) in NODES.into_iter().zip(futures_util::future::join_all(opening).await) {
            opened.announce(three.addresses[&node].to_string()).await.unwrap();
            three.nodes.insert(node, opened);
        }
        three
    }

    async fn open(&self, node_id: u64, listener: TcpListener) -> Arc<Node> {
        let disks = self.disks.clone();
        let open = Arc::new(move |shard| disks.open(node_id, shard));
        let settings = NodeSettings {
            node_id,
            topics: vec![("default".to_owned(), 1)],
            log_limits: self.log_limits,
            rack: String::new(),
            replace_down_after: None,
            scrub_rate: self.scrub_rate,
            election_timeout: self.election_timeout,
            busy_poll: false,
            pace: helix_server::limits::PACE,
            ..settings_on(open, node_id)
        };
        let others = self.addresses.iter().filter(|(id, _)| **id != node_id);
        let others = others.map(|(id, address)| (*id, address.to_string())).collect();
        Node::open_among(settings, others, listener).await.unwrap()
    }

    /// Adds a node and waits until it votes in the data shard.
    pub(crate) async fn grow(&mut self, node: u64) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, free_port())).await.unwrap();
        let address = listener.local_addr().unwrap();
        self.addresses.insert(node, address);
        let opening = self.open(node, listener);
        let adding = until("the node can be added", async || {
            let leader = self.first().await;
            // It may not listen yet.
            leader.cluster().add_node(node, address.to_string(), false).await.ok()
        });
        let (opened, _) = tokio::join!(opening, adding);
        opened.announce(address.to_string()).await.unwrap();
        self.nodes.insert(node, opened);
        until("it votes", async || {
            self.shard(self.leader().await).replicas().contains(&node).then_some(())
        })
        .await;
    }

    pub(crate) async fn restart(&mut self, node: u64) {
        let listener = TcpListener::bind(self.addresses[&node]).await.unwrap();
        let opened = self.open(node, listener).await;
        self.nodes.insert(node, opened);
    }

    /// Restarts nodes that need each other to start.
    pub(crate) async fn restart_all(&mut self, nodes: &[u64]) {
        let opening = nodes.iter().map(|node| async {
            let listener = TcpListener::bind(self.addresses[node]).await.unwrap();
            (*node, self.open(*node, listener).await)
        });
        let opened = futures_util::future::join_all(opening).await;
        self.nodes.extend(opened);
    }

    pub(crate) async fn stop(&mut self, node: u64) {
        self.nodes.remove(&node).expect("it runs").close().await;
    }

    pub(crate) async fn stop_all(mut self) {
        while let Some(node) = self.nodes.keys().next() {
            self.stop(*node).await;
        }
    }

    pub(crate) fn shard(&self, node: u64) -> Arc<Shard> {
        self.nodes[&node].shard(SHARD).expect("it is open")
    }

    pub(crate) async fn leader(&self) -> u64 {
        until("there is a leader", async || {
            for id in self.nodes.keys() {
                let Some(shard) = self.nodes[id].shard(SHARD) else { continue };
                if shard.is_leader() && shard.ready().await.is_ok() {
                    return Some(*id);
                }
            }
            None
        })
        .await
    }

    /// Returns the leader of shard 0.
    pub(crate) async fn first(&self) -> Arc<Node> {
        until("shard 0 has a leader", async || {
            self.nodes.values().find(|node| node.cluster().is_leader()).cloned()
        })
        .await
    }

    /// Transfers leadership of the data shard.
    pub(crate) async fn transfer(&self, node: u64) {
        until("the node is the leader", async || {
            let leader = self.leader().await;
            if leader == node {
                return Some(());
            }
            // Ignored: retried.
            let _ = self.shard(leader).transfer(Some(node)).await;
            None
        })
        .await;
    }

    /// Appends a batch at the leader.
    pub(crate) async fn append(&self, number: u64) {
        let payload = Bytes::from(vec![u8::try_from(number % 251).unwrap(); 20_000]);
        until("it is appended", async || {
            let node = &self.nodes[&self.leader().await];
            let located = node.locate("default", 0).ok()?;
            let batch = one_record(located.partition, payload.clone());
            let permit = located
                .shard
                .permit(helix_server::shard::FlowShare::INTERNAL, payload.len())
                .await
                .ok()?;
            located.shard.append(batch, Durability::QuorumSynced, permit).await.ok()
        })
        .await;
    }

    /// Waits until a node's replica has `end` batches, and returns them.
    pub(crate) async fn stored(&self, node: u64, end: u64) -> Vec<ReadBatch> {
        until("the replica has all records", async || {
            let located = self.nodes[&node].locate("default", 0).ok()?;
            let (mut next, mut found) = (0, Vec::new());
            while next < end {
                let read = located.shard.read(
                    located.partition,
                    next,
                    None,
                    1 << 20,
                    ReadFrom::AnyReplica,
                );
                let read = read.await.ok().filter(|read| !read.batches.is_empty())?;
                next = read.next_offset;
                found.extend(read.batches);
            }
            Some(found)
        })
        .await
    }

    /// Expects equal records up to `end` on all running nodes.
    pub(crate) async fn expect_equal(&self, end: u64) {
        let place = |it: &ReadBatch| (it.log_id, it.first_offset, it.crc, it.payload.clone());
        let mut first = None;
        for node in self.nodes.keys() {
            let stored: Vec<_> = self.stored(*node, end).await.iter().map(place).collect();
            assert_eq!(stored.len() as u64, end, "node {node}");
            assert!(*first.get_or_insert_with(|| stored.clone()) == stored, "node {node} differs");
        }
    }
}
