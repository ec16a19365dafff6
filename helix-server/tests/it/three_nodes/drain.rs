//! Draining a node, rebalancing leadership, and rolling restarts under load.

use helix_proto::log::v1::{ErrorReason, HealthReason};

use crate::fleet::{AppendLoad, Fleet};
use crate::trio::{health, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drained_node_leads_nothing_until_undrained() {
    let mut fleet = Fleet::of(&[1, 2, 3]).await;
    let admin = fleet.admin();
    let leader = fleet.leader(1).await;
    admin.set_draining(leader, true, true).await.unwrap();
    assert!(fleet.led_by(leader).await.contains(&1), "a dry run moves nothing");
    admin.set_draining(leader, true, false).await.unwrap();
    assert_eq!(fleet.led_by(leader).await, Vec::<u32>::new());
    let other = fleet.ids().into_iter().find(|id| *id != leader).unwrap();
    until("health shows it everywhere", async || {
        let issues = health(fleet.node(other)).await.issues;
        let drains = |needed: &[u64]| needed == [leader];
        let found = issues.iter().any(|issue| {
            issue.reason() == HealthReason::Draining && drains(&issue.needed_node_ids)
        });
        found.then_some(())
    })
    .await;
    assert!(fleet.metadata().await.nodes.iter().all(|it| it.draining == (it.node_id == leader)));
    // The setting survives restarts of that node and of others.
    for node in [leader, other] {
        fleet.stop(node).await;
        fleet.start_nodes(&[node], &[1, 2, 3]).await;
    }
    until("all nodes are back", async || {
        let health = health(fleet.node(other)).await;
        (health.issues.len() == 1).then_some(())
    })
    .await;
    admin.balance_leaders().await.unwrap();
    // It may have been elected while others were down: then it transfers leadership.
    until("the drained node leads nothing", async || {
        fleet.led_by(leader).await.is_empty().then_some(())
    })
    .await;
    // Two of three may drain, the last one may not.
    admin.set_draining(other, true, false).await.unwrap();
    let last = fleet.ids().into_iter().find(|id| ![leader, other].contains(id)).unwrap();
    let refused = admin.set_draining(last, true, false).await.unwrap_err();
    assert_eq!(refused.reason, Some(ErrorReason::NotEnoughNodes));
    for node in [leader, other] {
        admin.set_draining(node, false, false).await.unwrap();
    }
    fleet.settle().await;
    // Nodes 1 and 2 are the preferred leaders of the data shards 1 and 2.
    until("leadership is balanced", async || {
        admin.balance_leaders().await.unwrap();
        let led = [fleet.leader(1).await, fleet.leader(2).await];
        (led == [1, 2]).then_some(())
    })
    .await;
    assert_eq!(admin.balance_leaders().await.unwrap(), Vec::<u32>::new());
    let refused = admin.set_draining(9, true, false).await.unwrap_err();
    assert_eq!(refused.reason, Some(ErrorReason::NodeNotFound));
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolling_restart_under_load_fails_no_append() {
    let mut fleet = Fleet::of(&[1, 2, 3]).await;
    let load = AppendLoad::start(&fleet.client());
    let admin = fleet.admin();
    for drains in [true, false] {
        for node in [1, 2, 3] {
            if drains {
                admin.set_draining(node, true, false).await.unwrap();
            }
            fleet.stop(node).await;
            fleet.start_nodes(&[node], &[1, 2, 3]).await;
            if drains {
                admin.set_draining(node, false, false).await.unwrap();
            }
            fleet.settle().await;
        }
    }
    let counts = load.stop().await;
    fleet.expect_all(&counts).await;
    fleet.stop_all().await;
}
