//! Nodes that are down for long: others take their replicas.

use std::time::Duration;

use helix_client::proto::log::v1::{GetPlacementRequest, PlacementShard};

use crate::fleet::{AppendLoad, Fleet, until_long};
use crate::support::soon;

async fn data_shards(fleet: &Fleet, asked: u64) -> Option<Vec<PlacementShard>> {
    let response = fleet.node(asked).cluster().get_placement(GetPlacementRequest {}).await.ok()?;
    let shards = response.into_inner().shards.into_iter();
    Some(shards.filter(|shard| shard.shard_id != 0).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn others_take_the_replicas_of_a_node_that_is_down() {
    let mut fleet = Fleet::replacing(&[1, 2, 3, 4, 5], 4, Duration::from_secs(2)).await;
    let client = fleet.client();
    soon(client.admin().set_replicas(3)).await.unwrap();
    let is_whole = |it: &PlacementShard| it.node_ids.len() == 3 && it.r#move.is_none();
    until_long("each shard has three replicas", async || {
        data_shards(&fleet, 1).await?.iter().all(is_whole).then_some(())
    })
    .await;
    let load = AppendLoad::start(&client);
    fleet.stop(4).await;
    until_long("the others have all replicas", async || {
        let shards = data_shards(&fleet, 1).await?;
        let is_moved = |it: &PlacementShard| is_whole(it) && !it.node_ids.contains(&4);
        shards.iter().all(is_moved).then_some(())
    })
    .await;
    // It deletes what it has, and gets new replicas.
    let others = fleet.ids();
    fleet.start_nodes(&[4], &others).await;
    until_long("the node has replicas again", async || {
        let shards = data_shards(&fleet, 1).await?;
        let has_any = shards.iter().any(|it| it.node_ids.contains(&4));
        (has_any && shards.iter().all(is_whole)).then_some(())
    })
    .await;
    load.stop().await;
    fleet.stop_all().await;
}
