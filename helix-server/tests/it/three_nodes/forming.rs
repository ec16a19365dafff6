//! Formation of a cluster of three nodes. A node that waits serves no client and logs the reason.

// Tests delete data directories.
#![allow(clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use helix_server::config::ServerConfig;
use tokio::task::JoinHandle;

use crate::captured_log::CapturedLog;
use crate::support::TestServer;
use crate::trio::{NODES, Trio, TrioPlan, expect_equal_replicas, launch, metadata, topic, until};

/// Waits until the log contains these words.
async fn logged(log: &CapturedLog, words: &str) {
    until(&format!("the log says {words:?}"), async || log.text().contains(words).then_some(()))
        .await;
}

/// Aborts a start that still waits, with all its tasks.
async fn abort_start(start: JoinHandle<TestServer>) {
    assert!(!start.is_finished(), "it should wait");
    start.abort();
    assert!(start.await.unwrap_err().is_cancelled());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_nodes_form_one_cluster_in_any_start_order() {
    for order in [[3, 2, 1], [2, 1, 3]] {
        let plan = TrioPlan::new();
        let mut starts = BTreeMap::new();
        for node in order {
            starts.insert(node, plan.launch(node));
            // The next node starts once this one can be reached.
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
        trio.balanced().await;
        for partition in 0..4 {
            let ack = trio.write(partition, &["a", "b"]).await;
            assert_eq!(ack.first_offset, Some(0));
            expect_equal_replicas(&trio, partition, 2).await;
        }
        trio.stop_all().await;
    }
}

#[tokio::test]
async fn normal_start_and_stop_log_leaders_and_no_warning() {
    let (log, _guard) = CapturedLog::capture();
    let mut trio = Trio::start(TrioPlan::in_memory()).await;
    for shard in 0..=3 {
        logged(&log, &format!("became leader shard_id={shard} node=")).await;
    }
    trio.stop_all().await;
    let text = log.text();
    let mut elections = text.lines().filter(|line| line.contains("became leader"));
    assert!(elections.all(|line| line.contains(" INFO ") && line.contains(" term=")), "{text}");
    log.expect_no_warning();
}

#[tokio::test]
async fn new_leader_after_a_loss_is_logged() {
    let (log, _guard) = CapturedLog::capture();
    let mut trio = Trio::start(TrioPlan::linked().await).await;
    trio.write(0, &["a"]).await;
    let (old, shard) = trio.leader_of(0).await;
    let before = log.text().len();
    trio.isolate(old);
    until("the log names another leader", async || {
        let is_new = |line: &str| {
            let found = line.split_once(&format!("became leader shard_id={shard} node="));
            found.is_some_and(|(begin, rest)| {
                let is_other = !rest.starts_with(&format!("{old} "));
                is_other && begin.contains(" INFO ") && rest.contains(" term=")
            })
        };
        log.text()[before..].lines().any(is_new).then_some(())
    })
    .await;
    trio.heal(old);
    trio.settle().await;
    trio.stop_all().await;
}

#[tokio::test]
async fn node_waits_for_its_peers_and_logs_it() {
    let (log, _guard) = CapturedLog::capture();
    let plan = TrioPlan::new();
    let alone = plan.launch(1);
    logged(&log, "all nodes must answer to form a cluster; nodes 2, 3 do not").await;
    let second = plan.launch(2);
    logged(&log, "all nodes must answer to form a cluster; node 3 does not").await;
    let address = format!("http://{}", plan.config(1).listen_addr);
    let endpoint = tonic::transport::Endpoint::from_shared(address).unwrap();
    let call = async {
        let channel = endpoint.connect().await?;
        let mut client =
            helix_proto::log::v1::cluster_service_client::ClusterServiceClient::new(channel);
        let request = helix_proto::log::v1::GetHealthRequest::default();
        Ok::<_, Box<dyn std::error::Error>>(client.get_health(request).await?)
    };
    let answer = tokio::time::timeout(Duration::from_millis(300), call).await;
    assert!(!matches!(answer, Ok(Ok(_))), "it serves no client");
    // Only the third node was missing.
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
async fn nodes_with_different_configurations_do_not_form_a_cluster() {
    let (log, _guard) = CapturedLog::capture();
    let plan = TrioPlan::new();
    let mut odd = plan.config(2);
    odd.peers[2] = (4, odd.peers[2].1.clone());
    let starts = [plan.launch(1), launch(odd), plan.launch(3)];
    logged(&log, "give all of them the same --peer flags").await;
    for start in starts {
        abort_start(start).await;
    }

    let plan = TrioPlan::new();
    let named = |node, name: &str| {
        launch(ServerConfig { cluster_id: Some(name.to_owned()), ..plan.config(node) })
    };
    let starts = [named(1, "blue"), named(2, "green"), named(3, "blue")];
    logged(&log, "give all of them the same --cluster-id").await;
    for start in starts {
        abort_start(start).await;
    }
    for node in NODES {
        assert!(!plan.data_dir(node).join("shard-0").exists(), "no directory was created");
    }
}

#[tokio::test]
async fn node_with_empty_data_directory_is_not_readmitted() {
    let (log, _guard) = CapturedLog::capture();
    let mut trio = Trio::durable().await;
    trio.write(0, &["a"]).await;
    trio.stop(3).await;
    std::fs::remove_dir_all(trio.plan.data_dir(3)).unwrap();
    let wiped = trio.plan.launch(3);
    logged(&log, "has this node already, but the data directory is empty").await;
    let ack = trio.write(0, &["b"]).await;
    assert_eq!(ack.first_offset, Some(1), "the others continue");
    for partition in 1..4 {
        trio.write(partition, &["c"]).await;
    }
    abort_start(wiped).await;
    trio.stop_all().await;
}

/// It would form a cluster of its own if the others did not dial it as a member.
#[tokio::test]
async fn node_with_empty_data_directory_and_no_peers_waits() {
    let (log, _guard) = CapturedLog::capture();
    let mut trio = Trio::durable().await;
    trio.stop(3).await;
    std::fs::remove_dir_all(trio.plan.data_dir(3)).unwrap();
    let base = trio.plan.config(3);
    let wiped = launch(ServerConfig { peers: base.peers[2..].to_vec(), ..base });
    logged(&log, "takes this node for a member, but the data directory is empty").await;
    trio.write(0, &["a"]).await;
    assert!(!trio.plan.data_dir(3).join("shard-0").exists(), "no directory was created");
    abort_start(wiped).await;
    trio.stop_all().await;
}

#[tokio::test]
async fn unknown_node_is_not_admitted() {
    let (log, _guard) = CapturedLog::capture();
    let mut trio = Trio::durable().await;
    let base = trio.plan.config(3);
    let elsewhere = TrioPlan::new();
    let stranger = ServerConfig {
        node_id: 4,
        listen_addr: elsewhere.config(1).listen_addr,
        peer_addr: elsewhere.peer(1),
        data_dir: elsewhere.data_dir(4),
        peers: base.peers[..2].to_vec(),
        ..base
    };
    let start = launch(stranger);
    logged(&log, "does not have this node: have it added with: helix cluster add-node 4").await;
    abort_start(start).await;
    assert_eq!(metadata(trio.node(1)).await.nodes.len(), 3);
    trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_shard_directory_is_rebuilt_while_other_shards_serve() {
    let mut trio = Trio::durable().await;
    for partition in 0..4 {
        trio.write(partition, &["a"]).await;
    }
    trio.stop(2).await;
    let directory = trio.plan.data_dir(2).join("shard-1");
    std::fs::remove_dir_all(&directory).unwrap();
    trio.start_nodes(&[2]).await;
    for partition in 0..4 {
        let ack = trio.write(partition, &["b"]).await;
        assert_eq!(ack.first_offset, Some(1), "the two others are a majority");
    }
    trio.settle().await;
    assert!(!directory.join("repair").exists());
    for partition in 0..4 {
        expect_equal_replicas(&trio, partition, 2).await;
    }
    trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_of_all_nodes_keeps_everything() {
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
