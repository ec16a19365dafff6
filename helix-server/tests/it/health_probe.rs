//! Health proved by a committed entry in each shard.

use helix_proto::log::v1::{GetHealthRequest, GetHealthResponse, HealthReason};

use crate::fleet::{Fleet, until_long};
use crate::support::soon;

const PROVE: GetHealthRequest = GetHealthRequest { prove: true };

async fn health(fleet: &Fleet, node: u64) -> GetHealthResponse {
    soon(fleet.node(node).cluster().get_health(PROVE)).await.unwrap().into_inner()
}

/// Last entries of shard 0 and of shard 1 on a node.
fn last_entries(fleet: &Fleet, node: u64) -> [u64; 2] {
    let node = fleet.node(node).running.node();
    let shard = node.shard(1).unwrap();
    [node.cluster().replica().status().last_index, shard.replica().status().last_index]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_led_shard_commits_a_probe() {
    let fleet = Fleet::of(&[1]).await;
    let before = last_entries(&fleet, 1);
    let first = health(&fleet, 1).await;
    assert!(first.healthy, "{first:?}");
    let after = last_entries(&fleet, 1);
    assert!(after[0] > before[0] && after[1] > before[1], "{before:?} {after:?}");
    let plain = fleet.node(1).cluster().get_health(GetHealthRequest::default()).await.unwrap();
    assert!(plain.into_inner().healthy);
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shard_without_a_majority_is_not_proved() {
    let mut fleet = Fleet::of(&[1, 2, 3]).await;
    let leader = fleet.leader(1).await;
    assert!(health(&fleet, leader).await.healthy);
    for node in fleet.ids().into_iter().filter(|node| *node != leader) {
        fleet.stop(node).await;
    }
    until_long("shard 1 is not proved", async || {
        let found = health(&fleet, leader).await;
        let of_shard = found.issues.iter().filter(|it| it.shard_id == Some(1));
        let mut reasons = of_shard.map(|it| it.reason());
        let is_unproved =
            |it: HealthReason| [HealthReason::NoCommit, HealthReason::NoLeader].contains(&it);
        (!found.healthy && reasons.any(is_unproved)).then_some(())
    })
    .await;
    fleet.stop_all().await;
}
