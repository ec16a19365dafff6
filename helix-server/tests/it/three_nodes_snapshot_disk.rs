//! A replica that fetches records and whose disk is full: it waits, takes part in everything else,
//! and goes on by itself. Three nodes on simulated disks, which can be filled at will.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use helix_server::log::Condition;
use helix_server::node::{LogLimits, Node, NodeSettings};
use helix_server::shard::{Durability, NewBatch, ReadBatch, ReadFrom, Shard};
use helix_wal::storage::{SimulatedDisk, Storage};
use tokio::net::TcpListener;

use crate::simulation::settings_on;
use crate::three_nodes::{NODES, until};

const SHARD: u64 = 1;

/// Nothing fits beside what must stay free.
const FULL: u64 = 256 << 20;

/// Disks outlive their nodes.
#[derive(Clone, Default)]
struct Disks(Arc<Mutex<BTreeMap<(u64, u64), SimulatedDisk>>>);

impl Disks {
    fn of(&self, node: u64, shard: u64) -> SimulatedDisk {
        let mut disks = self.0.lock().unwrap();
        disks.entry((node, shard)).or_insert_with(|| SimulatedDisk::new(node << 8 | shard)).clone()
    }

    fn open(&self, node: u64, shard: u64) -> Arc<dyn Storage> {
        let disk = self.of(node, shard).reopen();
        self.0.lock().unwrap().insert((node, shard), disk.clone());
        Arc::new(disk)
    }
}

struct Three {
    disks: Disks,
    addresses: BTreeMap<u64, SocketAddr>,
    nodes: BTreeMap<u64, Arc<Node>>,
}

impl Three {
    async fn start() -> Self {
        let mut listeners = Vec::new();
        let mut addresses = BTreeMap::new();
        for node in NODES {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            addresses.insert(node, listener.local_addr().unwrap());
            listeners.push(listener);
        }
        let mut three = Self { disks: Disks::default(), addresses, nodes: BTreeMap::new() };
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
            log_limits: LogLimits { checkpoint_bytes: 64 << 10, catch_up_bytes: 64 << 10 },
            ..settings_on(open, node_id)
        };
        let others = self.addresses.iter().filter(|(id, _)| **id != node_id);
        let others = others.map(|(id, address)| (*id, address.to_string())).collect();
        Node::open_among(settings, others, listener).await.unwrap()
    }

    async fn restart(&mut self, node: u64) {
        let listener = TcpListener::bind(self.addresses[&node]).await.unwrap();
        let opened = self.open(node, listener).await;
        self.nodes.insert(node, opened);
    }

    async fn stop(&mut self, node: u64) {
        self.nodes.remove(&node).expect("it runs").close().await;
    }

    fn shard(&self, node: u64) -> Arc<Shard> {
        self.nodes[&node].shard(SHARD).expect("it is open")
    }

    async fn leader(&self) -> u64 {
        until("there is a leader", async || {
            for id in self.nodes.keys() {
                let shard = self.shard(*id);
                if shard.leads() && shard.ready().await.is_ok() {
                    return Some(*id);
                }
            }
            None
        })
        .await
    }

    /// Appends a batch, wherever the leader is.
    async fn append(&self, number: u64) {
        let payload = Bytes::from(vec![u8::try_from(number % 251).unwrap(); 20_000]);
        until("it is appended", async || {
            let node = &self.nodes[&self.leader().await];
            let located = node.locate("default", 0).ok()?;
            let batch = NewBatch {
                partition: located.partition,
                record_count: 1,
                version: 1,
                compression: 1,
                crc: helix_proto::batch::crc(1, 1, 1, &payload),
                payload: payload.clone(),
                producer: None,
                condition: Condition::default(),
            };
            let permit = located.shard.permit(payload.len()).await.ok()?;
            located.shard.append(batch, Durability::QuorumSynced, permit).await.ok()
        })
        .await;
    }

    /// All batches of a node's replica, once it has as many as this.
    async fn stored(&self, node: u64, end: u64) -> Vec<ReadBatch> {
        until("the replica has it all", async || {
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
}

#[tokio::test]
async fn a_fetch_waits_for_room_on_the_disk_and_goes_on_by_itself() {
    let mut three = Three::start().await;
    three.append(0).await;
    let leader = three.leader().await;
    let away = NODES.into_iter().find(|id| *id != leader).unwrap();
    three.stored(away, 1).await;
    let had = three.shard(away).status().last_index;
    three.stop(away).await;
    let mut count = 1;
    until("the log is purged of what the node lacks", async || {
        for _ in 0..40 {
            three.append(count).await;
            count += 1;
        }
        three.nodes.keys().all(|id| three.shard(*id).status().purged > had).then_some(())
    })
    .await;

    let disk = three.disks.of(away, SHARD);
    disk.set_free_bytes(Some(FULL));
    three.restart(away).await;
    let waits = async |three: &Three| {
        until("it waits for room", async || {
            let waits_for = three.shard(away).fetching()?.waits_for?;
            waits_for.contains("room on this node's disk").then_some(())
        })
        .await;
    };
    waits(&three).await;
    // It hears of other leaders, and of what they do, all the same.
    let leader = three.leader().await;
    let next = NODES.into_iter().find(|id| *id != leader && *id != away).unwrap();
    let term = three.shard(away).status().term;
    three.shard(leader).transfer(Some(next)).await.unwrap();
    three.append(count).await;
    count += 1;
    until("it follows the next leader", async || {
        let status = three.shard(away).status();
        (status.term > term && three.shard(away).leader_hint()?.node_id == next).then_some(())
    })
    .await;
    waits(&three).await;
    assert_eq!(three.shard(away).status().applied, had, "nothing is half there");

    three.disks.of(away, SHARD).set_free_bytes(None);
    let first = three.stored(next, count).await;
    let second = three.stored(away, count).await;
    let place = |it: &ReadBatch| (it.log_id, it.first_offset, it.crc, it.payload.clone());
    assert!(first.iter().map(place).eq(second.iter().map(place)), "the replicas differ");
    assert_eq!(three.shard(away).fetching(), None);
    for node in NODES {
        three.stop(node).await;
    }
}
