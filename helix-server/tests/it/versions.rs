//! Clusters of nodes with different protocol versions: they use a version that all of them speak, a
//! newer version is used once the last node speaks it, and a node without a common version is
//! rejected.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use helix_server::error::{Error, Result};
use helix_server::node::{Node, NodeSettings};
use helix_server::peer::Network;
use helix_server::protocol::{COMPRESSION, KAFKA_BATCHES, ProtocolVersions};
use helix_server::raft::replica_id;
use helix_server::shard::Durability;
use tempfile::TempDir;
use tokio::net::TcpListener;

use crate::simulation::{batch, settings_in};
use crate::support::soon;
use crate::trio::{STEADY, free_port, until};

/// Releases that speak only the oldest version, this one, and one without the oldest version.
const NOW: ProtocolVersions =
    ProtocolVersions { oldest: ProtocolVersions::OWN.oldest, newest: ProtocolVersions::OWN.oldest };
const NEXT: ProtocolVersions = ProtocolVersions::OWN;
const LATER: ProtocolVersions =
    ProtocolVersions { oldest: NOW.newest + 1, newest: NEXT.newest + 1 };

struct MixedCluster {
    root: TempDir,
    ports: BTreeMap<u64, SocketAddr>,
    nodes: BTreeMap<u64, Arc<Node>>,
    written: u64,
}

impl MixedCluster {
    async fn start(versions: [ProtocolVersions; 3]) -> Self {
        let address = || SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
        let ports = (1..=4).map(|id| (id, address())).collect();
        let root = tempfile::tempdir().unwrap();
        let mut mixed = Self { root, ports, nodes: BTreeMap::new(), written: 0 };
        let [a, b, c] = versions;
        let (a, b, c) = tokio::join!(mixed.open(1, a), mixed.open(2, b), mixed.open(3, c));
        mixed.nodes = [(1, a), (2, b), (3, c)].map(|(id, node)| (id, node.unwrap())).into();
        mixed
    }

    async fn open(&self, id: u64, versions: ProtocolVersions) -> Result<Arc<Node>> {
        let directory = self.root.path().join(format!("node-{id}"));
        let settings =
            NodeSettings { node_id: id, election_timeout: STEADY, ..settings_in(&directory, id) };
        let peers = self.ports.iter().filter(|(peer, _)| **peer < 4 || id == 4);
        let peers = peers.map(|(peer, address)| (*peer, address.to_string())).collect();
        // A rejected node releases the port a moment later.
        let bind = async || TcpListener::bind(self.ports[&id]).await.ok();
        let listener = until("the port is free", bind).await;
        soon(Node::open_among(settings, peers, Network::from(listener).with_versions(versions)))
            .await
    }

    async fn restart(&mut self, id: u64, versions: ProtocolVersions) {
        self.nodes.remove(&id).unwrap().close().await;
        let node = self.open(id, versions).await.unwrap();
        self.nodes.insert(id, node);
    }

    /// Appends to the default topic at its leader and waits until every node has the record.
    async fn write(&mut self) {
        let payload = Bytes::from(format!("record {}", self.written));
        let ack = until("a leader takes a batch", async || {
            let located = self.nodes.values().filter_map(|node| {
                let located = node.locate("default", 0).ok()?;
                located.shard.is_leader().then_some((node, located.shard))
            });
            let (node, shard) = located.into_iter().next()?;
            let batch = batch(node, 0, self.written, payload.clone());
            let permit =
                shard.permit(helix_server::shard::FlowShare::INTERNAL, payload.len()).await.ok()?;
            shard.append(batch, Durability::QuorumSynced, permit).await.ok()
        })
        .await;
        assert_eq!(ack.offsets.unwrap().0, self.written);
        self.written += 1;
        until("every node has the record", async || {
            let has_all = |node: &Arc<Node>| {
                let located = node.locate("default", 0).ok()?;
                let watermarks = located.shard.watermarks(located.partition).ok()?;
                (watermarks.high_watermark == self.written).then_some(())
            };
            self.nodes.values().map(has_all).collect::<Option<Vec<_>>>()
        })
        .await;
    }

    /// Waits until all nodes are connected, each pair with a common version.
    async fn connected(&self) {
        until("all are connected", async || {
            let is_whole = |node: &Arc<Node>| {
                let connected = |peer: &helix_server::node::PeerStatus| peer.protocol.is_some();
                node.peers().iter().filter(|it| connected(it)).count() == 2
            };
            self.nodes.values().all(is_whole).then_some(())
        })
        .await;
    }

    /// Returns the replica ids of each shard on each node, by the placement of that node's copy of
    /// the cluster's state; `None` without one.
    fn placements(&self) -> Vec<Option<BTreeMap<u64, BTreeSet<u64>>>> {
        let placed = |node: &Arc<Node>| {
            node.cluster().machine().read(|state| {
                let shards = state.members().placement()?.shards();
                let rows = shards.map(|(id, shard)| {
                    let replicas = shard.replicas.iter();
                    (id, replicas.map(|(node, it)| replica_id(*node, *it)).collect())
                });
                Some(rows.collect())
            })
        };
        self.nodes.values().map(placed).collect()
    }

    /// Returns the voters of each shard by its Raft group on each node.
    fn voters(&self) -> Vec<Option<BTreeMap<u64, BTreeSet<u64>>>> {
        let voters = |node: &Arc<Node>| {
            let data = node.shards().into_iter().map(|it| (it.id(), it.replica().voters()));
            let all = data.chain([(0, node.cluster().replica().voters())]);
            Some(all.map(|(id, voters)| (id, voters.into_iter().collect())).collect())
        };
        self.nodes.values().map(voters).collect()
    }

    fn protocols(&self) -> Vec<u32> {
        self.nodes.values().map(|node| node.cluster().protocol()).collect()
    }

    /// Returns for each node whether it takes any records in the default topic.
    fn take_any_records(&self) -> Vec<bool> {
        let settings = |node: &Arc<Node>| node.locate("default", 0).unwrap().settings;
        self.nodes.values().map(|node| settings(node).takes_any_records).collect()
    }

    async fn close(self) {
        for node in self.nodes.into_values() {
            node.close().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn newer_protocol_is_used_once_the_last_node_speaks_it() {
    let mut mixed = MixedCluster::start([NOW, NOW, NEXT]).await;
    for upgraded in [1, 2] {
        mixed.write().await;
        mixed.connected().await;
        // A membership command, after which the version would have been raised.
        mixed.write().await;
        assert_eq!(mixed.protocols(), [NOW.newest; 3], "before node {upgraded} is upgraded");
        // So compressed batches are refused, and settings that name codecs.
        let cluster = mixed.nodes[&3].cluster();
        assert!(!cluster.wait_protocol(COMPRESSION, Duration::from_millis(10)).await);
        assert!(!cluster.wait_protocol(KAFKA_BATCHES, Duration::from_millis(10)).await);
        assert_eq!(mixed.take_any_records(), [true; 3], "as the nodes that cannot validate them");
        assert_eq!(mixed.placements(), [None, None, None]);
        let early = mixed.nodes[&3].cluster().set_cordoned(1, true).await.unwrap_err();
        assert!(matches!(early, Error::Unimplemented { .. }), "{early}");
        let early = mixed.nodes[&3].find_or_place_group("readers").await.unwrap_err();
        assert!(matches!(early, Error::Unimplemented { .. }), "{early}");
        mixed.restart(upgraded, NEXT).await;
    }
    until("all use it", async || (mixed.protocols() == [NEXT.newest; 3]).then_some(())).await;
    mixed.write().await;
    // Each log has the version, so that a quarantined log does not take it along.
    let has_recorded = |node: &Arc<Node>| {
        let data = node.shards();
        let logs = data.iter().map(|it| it.replica().wal().entries_version());
        let own = node.cluster().replica().wal().entries_version();
        logs.chain([own]).all(|version| version == NEXT.newest)
    };
    assert!(mixed.nodes.values().all(has_recorded));
    for version in [COMPRESSION, KAFKA_BATCHES] {
        assert!(mixed.nodes[&1].cluster().wait_protocol(version, Duration::ZERO).await);
    }
    assert_eq!(mixed.take_any_records(), [false; 3]);
    mixed.nodes[&1].find_or_place_group("readers").await.unwrap();
    // The placement is taken over as the replicas are.
    until("the placement is known", async || (mixed.placements() == mixed.voters()).then_some(()))
        .await;

    // There is no downgrade: the data requires the new version, from before it was raised on.
    mixed.nodes.remove(&1).unwrap().close().await;
    let refused = mixed.open(1, NOW).await.unwrap_err();
    let text = refused.to_string();
    assert!(matches!(refused, Error::Unusable { .. }), "{text}");
    assert!(text.contains(&format!("needs protocol version {}", NEXT.newest)), "{text}");
    assert!(text.contains(&format!("speaks version {}", NOW.newest)), "{text}");
    // The next release reads everything.
    let node = mixed.open(1, LATER).await.unwrap();
    mixed.nodes.insert(1, node);
    mixed.write().await;

    // A node that does not speak the version is not added.
    let peer_addr = mixed.ports[&4].to_string();
    let waiting = {
        let settings = mixed.open(4, NOW);
        tokio::select! {
            joined = settings => panic!("{joined:?}"),
            refused = until("the node responds", async || {
                let cluster = mixed.nodes[&2].cluster();
                let refused = cluster.add_node(4, peer_addr.clone(), true).await.unwrap_err();
                (!refused.to_string().contains("cannot be reached")).then_some(refused)
            }) => refused,
        }
    };
    let text = waiting.to_string();
    assert!(
        text.contains("node 4 speaks protocol version 2")
            && text.contains(&format!("uses version {}", NEXT.newest)),
        "{text}"
    );
    mixed.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_without_a_common_protocol_version_is_rejected() {
    let mut mixed = MixedCluster::start([NOW, NOW, LATER]).await;
    let stranger = mixed.nodes.remove(&3).unwrap();
    mixed.write().await;
    let (one, protocol) = (mixed.nodes[&1].clone(), mixed.protocols());
    for (node, peer) in [(&one, 3), (&stranger, 1)] {
        let why = until("the node is rejected", async || {
            let peer = node.peers().into_iter().find(|it| it.node_id == peer)?;
            peer.last_error.filter(|why| why.contains("in common"))
        })
        .await;
        assert!(why.contains("version 2") && why.contains(&LATER.to_string()), "{why}");
        assert!(why.contains("upgrade the older node to a release that speaks both"), "{why}");
    }
    assert_eq!(protocol, [NOW.newest; 2]);
    stranger.close().await;
    mixed.close().await;
}
