//! ClusterService: metadata, health, and node status.

use helix_proto::log::v1::{
    AddNodeRequest, CreateTopicRequest, ErrorReason, GetHealthRequest, GetMetadataRequest,
    GetNodeStatusRequest, HealthReason, RemoveNodeRequest, ReplaceNodeRequest, SetDrainingRequest,
    TransferLeaderRequest, WatchMembershipChangeRequest, WatchMetadataRequest,
};

use crate::support::{TestServer, reason, soon};

#[tokio::test]
async fn metadata_maps_a_partition_to_an_address() {
    let server = TestServer::in_memory().await;
    let request = GetMetadataRequest::default();
    let response = server.cluster().get_metadata(request).await.unwrap().into_inner();
    let metadata = response.metadata.unwrap();
    assert!(!metadata.cluster_id.is_empty());
    let address = server.running.local_addr().to_string();
    assert_eq!(metadata.nodes.len(), 1);
    assert_eq!((metadata.nodes[0].node_id, &metadata.nodes[0].endpoint), (1, &address));
    assert_eq!(metadata.nodes[0].version, env!("CARGO_PKG_VERSION"));
    let topic = metadata.topics.iter().find(|route| route.topic == "default").unwrap();
    assert_eq!(topic.shard_ids.len(), 4);
    for shard_id in &topic.shard_ids {
        let shard = metadata.shards.iter().find(|shard| shard.shard_id == *shard_id).unwrap();
        assert_eq!(shard.leader.as_ref().unwrap().endpoint, address);
        assert_eq!(shard.replicas, [1]);
    }
    let unknown = GetMetadataRequest { topics: vec!["nowhere".to_owned()] };
    let response = server.cluster().get_metadata(unknown).await.unwrap().into_inner();
    assert!(response.metadata.unwrap().topics.is_empty());
}

/// Shard 0 has no partitions, so that no read meets its damage.
#[tokio::test]
async fn health_names_damage_to_shard_0() {
    let server = TestServer::in_memory().await;
    let (file, what) = ("0000000000000001.seg".to_owned(), "does not verify".to_owned());
    let damage = helix_wal::Error::Damaged { file, bytes: 4096..8192, what };
    server.running.node().cluster().replica().reads().note(&damage);
    let health =
        server.cluster().get_health(GetHealthRequest::default()).await.unwrap().into_inner();
    let issue = health.issues.first().expect("there is an issue");
    assert_eq!((issue.reason(), issue.shard_id), (HealthReason::CorruptLog, Some(0)));
    assert!(!health.healthy);
    assert!(issue.message.contains("0000000000000001.seg"), "{issue:?}");
}

#[tokio::test]
async fn watch_streams_metadata_and_its_changes() {
    let server = TestServer::in_memory().await;
    let request = WatchMetadataRequest::default();
    let mut watch = server.cluster().watch_metadata(request).await.unwrap().into_inner();
    let first = soon(watch.message()).await.unwrap().unwrap().metadata.unwrap();
    let request = CreateTopicRequest {
        name: "orders".to_owned(),
        partition_count: 2,
        ..CreateTopicRequest::default()
    };
    server.topics().create_topic(request).await.unwrap();
    loop {
        let next = soon(watch.message()).await.unwrap().unwrap().metadata.unwrap();
        assert!(next.version > first.version);
        if next.topics.iter().any(|route| route.topic == "orders") {
            break;
        }
    }
}

#[tokio::test]
async fn running_server_is_healthy() {
    let server = TestServer::durable().await;
    let request = GetHealthRequest::default();
    let health = server.cluster().get_health(request).await.unwrap().into_inner();
    assert!(health.healthy, "{health:?}");
    assert!(health.issues.is_empty());
}

#[tokio::test]
async fn node_status_describes_the_node() {
    let durable = TestServer::durable().await;
    durable.append(&["a", "b"]).await;
    let status = durable.cluster().get_node_status(GetNodeStatusRequest {}).await.unwrap();
    let status = status.into_inner();
    assert_eq!((status.node_id, status.storage.as_str()), (1, "disk"));
    assert!(!status.data_dir.is_empty() && status.free_bytes > 0);
    assert!(status.sync_p50.is_some() && status.sync_p99.is_some());
    assert!(status.cpu_time_us > 0 && status.rss_bytes > 0);
    let shard = status.shards.iter().find(|shard| shard.shard_id == 1).unwrap();
    assert_eq!(shard.partition_count, 4);
    assert!(shard.applied_index > 0 && shard.applied_index <= shard.committed_index);
    assert!(shard.committed_index <= shard.last_index);
    assert!(shard.segment_count > 0 && shard.live_bytes > 0);

    let memory = TestServer::in_memory().await;
    let status = memory.cluster().get_node_status(GetNodeStatusRequest {}).await.unwrap();
    let status = status.into_inner();
    assert_eq!((status.storage.as_str(), status.data_dir.as_str()), ("memory", ""));
    assert_eq!((status.sync_p50, status.sync_p99), (None, None));
}

#[tokio::test]
async fn node_without_a_peer_port_refuses_membership_changes() {
    let server = TestServer::in_memory().await;
    let mut cluster = server.cluster();
    let add = |peer_endpoint: &str, rack: &str| AddNodeRequest {
        node_id: 2,
        peer_endpoint: peer_endpoint.to_owned(),
        rack: rack.to_owned(),
        validate_only: true,
    };
    let refused = cluster.add_node(add("127.0.0.1:1", "")).await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::MembershipChangeRefused);
    let refused = cluster.add_node(add("nowhere", "")).await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::InvalidArgument);
    let refused = cluster.add_node(add("127.0.0.1:1", "left")).await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::Unimplemented);
    let remove = |node_id| RemoveNodeRequest { node_id, ..RemoveNodeRequest::default() };
    let refused = cluster.remove_node(remove(1)).await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::NotEnoughNodes);
    let refused = cluster.remove_node(remove(9)).await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::NodeNotFound);
    let drain = SetDrainingRequest { node_id: 1, draining: true, validate_only: false };
    let refused = cluster.set_draining(drain).await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::NotEnoughNodes);
    let replace = ReplaceNodeRequest { lost_node_id: 9, ..ReplaceNodeRequest::default() };
    let refused = cluster.replace_node(replace).await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::NodeNotFound);
    let watch = WatchMembershipChangeRequest { id: 7 };
    let mut changes = cluster.watch_membership_change(watch).await.unwrap().into_inner();
    let refused = changes.message().await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::InvalidArgument);
}

#[tokio::test]
async fn rejects_leadership_transfer_to_an_unknown_node() {
    let server = TestServer::in_memory().await;
    let mut cluster = server.cluster();
    let transfer = |shard_id, target_node_id| TransferLeaderRequest { shard_id, target_node_id };
    for (request, expected) in [
        (transfer(0, 0), ErrorReason::InvalidArgument),
        (transfer(1, 0), ErrorReason::InvalidArgument),
        (transfer(99, 0), ErrorReason::InvalidArgument),
        (transfer(1, 7), ErrorReason::NodeNotFound),
    ] {
        let refused = cluster.transfer_leader(request).await.unwrap_err();
        assert_eq!(reason(&refused), expected, "{request:?}");
    }
}
