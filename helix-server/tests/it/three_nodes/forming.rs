//! How three nodes become a cluster, and when they do not: a node that waits serves nobody and
//! says what it waits for.

// A test may lose a folder.
#![allow(clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use helix_server::config::ServerConfig;
use tokio::task::JoinHandle;

use crate::captured_log::Log;
use crate::support::TestServer;
use crate::trio::{
    NODES, Plan, Trio, expect_equal_replicas, launch, metadata, topic, until,
};

/// Waits until the log has these words.
async fn says(log: &Log, words: &str) {
    until(&format!("the log says {words:?}"), async || log.text().contains(words).then_some(()))
        .await;
}

/// Ends a start that still waits, and everything that it began.
async fn give_up(start: JoinHandle<TestServer>) {
    assert!(!start.is_finished(), "it should wait");
    start.abort();
    assert!(start.await.unwrap_err().is_cancelled());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_nodes_form_one_cluster_whatever_the_order() {
    for order in [[3, 2, 1], [2, 1, 3]] {
        let plan = Plan::new();
        let mut starts = BTreeMap::new();
        for node in order {
            starts.insert(node, plan.launch(node));
            // The next one comes when this one can be reached.
            let peer = plan.peer(node);
            until("the peer port is open", async || {
                tokio::net::TcpStream::connect(peer).await.ok().map(drop)
            })
            .await;
        }
        let mut nodes = BTreeMap::new();
        for (node, start) in starts {
            nodes.insert(node, start.await.unwrap());
        }
        let mut trio = Trio::of(plan, nodes);
        trio.settle().await;
        let mut clusters = BTreeSet::new();
        for (_, node) in trio.nodes() {
            let metadata = metadata(node).await;
            clusters.insert(metadata.cluster_id.clone());
            let shards: Vec<u32> = metadata.shards.iter().map(|shard| shard.shard_id).collect();
            assert_eq!(shards, [0, 1, 2, 3], "shard 0 is listed too");
            assert!(metadata.shards.iter().all(|shard| shard.replicas == NODES));
            let listed: Vec<u64> = metadata.nodes.iter().map(|node| node.node_id).collect();
            assert_eq!(listed, NODES);
            assert!(metadata.nodes.iter().all(|node| !node.endpoint.is_empty()));
            let topic = topic(node, "default").await.unwrap();
            assert_eq!((topic.partitions.len(), topic.replication_factor), (4, 3));
            let used: BTreeSet<u32> = topic.partitions.iter().map(|it| it.shard_id).collect();
            assert_eq!(used, [1, 2, 3].into(), "the partitions are spread over the shards");
        }
        assert_eq!(clusters.len(), 1, "{clusters:?}");
        // A busy machine may elect somebody else at first; the lead goes back.
        until("each node leads one data shard", async || {
            let mut leaders = trio.leaders().await;
            leaders.remove(&0);
            (leaders == [(1, 1), (2, 2), (3, 3)].into()).then_some(())
        })
        .await;
        for partition in 0..4 {
            let ack = trio.write(partition, &["a", "b"]).await;
            assert_eq!(ack.first_offset, Some(0));
            expect_equal_replicas(&trio, partition, 2).await;
        }
        trio.stop_all().await;
    }
}

#[tokio::test]
async fn a_node_without_the_others_waits_and_says_so() {
    let (log, _guard) = Log::capture();
    let plan = Plan::new();
    let alone = plan.launch(1);
    says(&log, "all nodes must answer to form a cluster; nodes 2, 3 do not").await;
    let second = plan.launch(2);
    says(&log, "all nodes must answer to form a cluster; node 3 does not").await;
    let address = format!("http://{}", plan.config(1).listen_addr);
    let endpoint = tonic::transport::Endpoint::from_shared(address).unwrap();
    let call = async {
        let channel = endpoint.connect().await?;
        let mut client =
            helix_proto::log::v1::cluster_service_client::ClusterServiceClient::new(channel);
        let request = helix_proto::log::v1::GetHealthRequest {};
        Ok::<_, Box<dyn std::error::Error>>(client.get_health(request).await?)
    };
    let answer = tokio::time::timeout(Duration::from_millis(300), call).await;
    assert!(!matches!(answer, Ok(Ok(_))), "it serves nobody");
    // The third one is all that was missing.
    let third = plan.launch(3);
    let mut nodes = BTreeMap::new();
    for (node, start) in (1..).zip([alone, second, third]) {
        nodes.insert(node, start.await.unwrap());
    }
    let mut trio = Trio::of(plan, nodes);
    trio.settle().await;
    trio.stop_all().await;
}

#[tokio::test]
async fn nodes_that_disagree_about_the_cluster_do_not_form_it() {
    let (log, _guard) = Log::capture();
    let plan = Plan::new();
    let mut odd = plan.config(2);
    odd.peers[2] = (4, odd.peers[2].1.clone());
    let starts = [plan.launch(1), launch(odd), plan.launch(3)];
    says(&log, "give all of them the same --peer flags").await;
    for start in starts {
        give_up(start).await;
    }

    let plan = Plan::new();
    let named = |node, name: &str| {
        launch(ServerConfig { cluster_id: Some(name.to_owned()), ..plan.config(node) })
    };
    let starts = [named(1, "blue"), named(2, "green"), named(3, "blue")];
    says(&log, "give all of them the same --cluster-id").await;
    for start in starts {
        give_up(start).await;
    }
    for node in NODES {
        assert!(!plan.folder(node).join("shard-0").exists(), "nothing was made");
    }
}

#[tokio::test]
async fn a_node_that_lost_its_folder_is_not_taken_back() {
    let (log, _guard) = Log::capture();
    let mut trio = Trio::durable().await;
    trio.write(0, &["a"]).await;
    trio.stop(3).await;
    std::fs::remove_dir_all(trio.plan.folder(3)).unwrap();
    let wiped = trio.plan.launch(3);
    says(&log, "has this node already, but the data directory is empty").await;
    let ack = trio.write(0, &["b"]).await;
    assert_eq!(ack.first_offset, Some(1), "the others go on");
    for partition in 1..4 {
        trio.write(partition, &["c"]).await;
    }
    give_up(wiped).await;
    trio.stop_all().await;
}

/// It would form a cluster of its own, if the others did not dial it as one of theirs.
#[tokio::test]
async fn a_node_that_lost_its_folder_and_is_told_only_of_itself_waits() {
    let (log, _guard) = Log::capture();
    let mut trio = Trio::durable().await;
    trio.stop(3).await;
    std::fs::remove_dir_all(trio.plan.folder(3)).unwrap();
    let base = trio.plan.config(3);
    let wiped = launch(ServerConfig { peers: base.peers[2..].to_vec(), ..base });
    says(&log, "takes this node for a member, but the data directory is empty").await;
    trio.write(0, &["a"]).await;
    assert!(!trio.plan.folder(3).join("shard-0").exists(), "nothing was made");
    give_up(wiped).await;
    trio.stop_all().await;
}

#[tokio::test]
async fn a_stranger_is_not_taken_in() {
    let (log, _guard) = Log::capture();
    let mut trio = Trio::durable().await;
    let base = trio.plan.config(3);
    let elsewhere = Plan::new();
    let stranger = ServerConfig {
        node_id: 4,
        listen_addr: elsewhere.config(1).listen_addr,
        peer_addr: elsewhere.peer(1),
        data_dir: elsewhere.folder(4),
        peers: base.peers[..2].to_vec(),
        ..base
    };
    let start = launch(stranger);
    says(&log, "does not have this node: have it added with: helix cluster add-node 4").await;
    give_up(start).await;
    assert_eq!(metadata(trio.node(1)).await.nodes.len(), 3);
    trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_whose_folder_is_gone_is_filled_anew_and_the_others_are_served() {
    let mut trio = Trio::durable().await;
    for partition in 0..4 {
        trio.write(partition, &["a"]).await;
    }
    trio.stop(2).await;
    let folder = trio.plan.folder(2).join("shard-1");
    std::fs::remove_dir_all(&folder).unwrap();
    trio.start_nodes(&[2]).await;
    for partition in 0..4 {
        let ack = trio.write(partition, &["b"]).await;
        assert_eq!(ack.first_offset, Some(1), "the two others are a majority");
    }
    trio.settle().await;
    assert!(!folder.join("repair").exists());
    for partition in 0..4 {
        expect_equal_replicas(&trio, partition, 2).await;
    }
    trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_of_all_nodes_keeps_everything() {
    let mut trio = Trio::durable().await;
    let cluster_id = metadata(trio.node(1)).await.cluster_id;
    for partition in 0..4 {
        for batch in 0..5 {
            trio.write(partition, &[&format!("{batch}a"), &format!("{batch}b")]).await;
        }
    }
    for _ in 0..2 {
        trio.stop_all().await;
        trio.start_nodes(&NODES).await;
        trio.settle().await;
    }
    assert_eq!(metadata(trio.node(2)).await.cluster_id, cluster_id);
    for partition in 0..4 {
        assert_eq!(trio.write(partition, &["c"]).await.first_offset, Some(10));
        expect_equal_replicas(&trio, partition, 11).await;
    }
    trio.stop_all().await;
}
