//! Racks: replicas of each shard, and the voters of shard 0, spread over them.

use std::collections::{BTreeMap, BTreeSet};

use helix_client::proto::log::v1::GetPlacementResponse;
use helix_proto::log::v1::GetPlacementRequest;

use crate::fleet::{AppendLoad, Fleet, until_long};
use crate::support::soon;

async fn placement(fleet: &Fleet) -> Option<GetPlacementResponse> {
    let node = fleet.node(*fleet.ids().first()?);
    Some(node.cluster().get_placement(GetPlacementRequest {}).await.ok()?.into_inner())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_spread_over_racks_as_nodes_are_added() {
    let racks = [(1, "a"), (2, "a"), (3, "a"), (4, "b"), (5, "c")];
    let mut fleet = Fleet::in_racks(&[1, 2, 3], 3, &racks).await;
    let client = fleet.client();
    let load = AppendLoad::start(&client);
    soon(client.admin().set_replicas(3)).await.unwrap();
    fleet.add(4).await;
    fleet.add(5).await;
    let rack_of: BTreeMap<u64, &str> = racks.into_iter().collect();
    until_long("each shard has a replica in each rack", async || {
        let found = placement(&fleet).await?;
        let is_spread = found.shards.iter().filter(|it| it.shard_id != 0).all(|shard| {
            let racks: BTreeSet<&str> = shard.node_ids.iter().map(|node| rack_of[node]).collect();
            shard.r#move.is_none() && shard.node_ids.len() == 3 && racks.len() == 3
        });
        (is_spread && found.planned.is_empty()).then_some(())
    })
    .await;
    let found = placement(&fleet).await.unwrap();
    for node in &found.nodes {
        assert_eq!(node.rack, rack_of[&node.node_id], "{found:?}");
    }
    for node in fleet.metadata().await.nodes {
        assert_eq!(node.rack, rack_of[&node.node_id]);
    }
    // A move that crowds a rack is refused: the cluster would move a replica back.
    let shard = found.shards.iter().find(|it| it.shard_id == 1).unwrap();
    let to = (1..=3).find(|node| !shard.node_ids.contains(node)).unwrap();
    let refused = client.admin().move_shard(1, 5, to).await.unwrap_err();
    let text = refused.to_string();
    assert!(text.contains("rack a, which would have 2 replicas of shard 1"), "{text}");
    let counts = load.stop().await;
    assert!(!counts.is_empty());
    fleet.stop_all().await;
}
