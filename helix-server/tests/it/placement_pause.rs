//! Pausing moves of replicas, resuming them and cancelling them, also in the middle of a copy and
//! after a change of leader; a removal that the other nodes cannot carry.

use std::time::Duration;

use helix_client::ProducerOptions;
use helix_client::proto::log::v1::{GetPlacementResponse, MembershipPhase, PlacementShard};
use helix_proto::log::v1::{ErrorReason, GetHealthRequest, GetPlacementRequest, HealthReason};

use crate::fleet::{Fleet, until_long};
use crate::support::{records, soon};

/// More entries than a new replica may lack when it gets its vote.
const BATCHES: usize = 6_000;
const BATCH_BYTES: usize = 24 << 10;

async fn placement(fleet: &Fleet) -> Option<GetPlacementResponse> {
    let node = fleet.node(*fleet.ids().first()?);
    Some(node.cluster().get_placement(GetPlacementRequest {}).await.ok()?.into_inner())
}

async fn shard(fleet: &Fleet, shard_id: u32) -> PlacementShard {
    let found = until_long("the placement is known", async || {
        placement(fleet).await?.shards.into_iter().find(|it| it.shard_id == shard_id)
    });
    found.await
}

async fn settled(fleet: &Fleet) -> GetPlacementResponse {
    until_long("nothing moves", async || {
        let found = placement(fleet).await?;
        // Shard 0 lacks voters on fewer than five nodes.
        let rests = |it: &PlacementShard| {
            it.r#move.is_none() && (it.shard_id == 0 || it.stuck_code.is_empty())
        };
        (found.shards.iter().all(rests) && found.planned.is_empty()).then_some(found)
    })
    .await
}

async fn has_pause_issue(fleet: &Fleet) -> bool {
    let node = fleet.node(fleet.ids()[0]);
    let health = node.cluster().get_health(GetHealthRequest::default()).await.unwrap().into_inner();
    health.issues.iter().any(|it| it.reason() == HealthReason::MovesPaused)
}

/// Last entry of a node's replica of shard 1, and its generation.
fn copied(fleet: &Fleet, node: u64) -> Option<(u64, u64)> {
    let shard = fleet.node(node).running.node().shard(1)?;
    let replica = shard.replica();
    Some((replica.status().last_index, replica.id() & u64::from(u32::MAX)))
}

async fn until_appended<T>(appends: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), appends).await.expect("appends continue")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paused_copy_stays_and_continues_under_another_leader() {
    let mut fleet = Fleet::with_shards(&[1, 2, 3], 1).await;
    let client = fleet.client();
    let admin = client.admin();
    soon(admin.set_replicas(3)).await.unwrap();
    fleet.add(4).await;
    let mut found = settled(&fleet).await;
    let producer = client.producer(ProducerOptions::default());
    let content = "x".repeat(BATCH_BYTES);
    let batch = records(&[content.as_str()]);
    for _ in 0..BATCHES / 60 {
        let appends = (0..60).map(|_| producer.append("default", 0, &batch[..]));
        let acks = until_appended(futures_util::future::join_all(appends)).await;
        assert!(acks.iter().all(Result::is_ok));
    }
    // The pause may come too late; then the replica moves on.
    let mut caught = None;
    for _ in 0..8 {
        let holders = found.shards.iter().find(|it| it.shard_id == 1).unwrap().node_ids.clone();
        let leader = fleet.leader(1).await;
        let from = *holders.iter().find(|node| **node != leader).unwrap();
        let to = (1..=4).find(|node| !holders.contains(node)).unwrap();
        soon(admin.move_shard(1, from, to)).await.unwrap();
        until_long("the copy has begun", async || {
            copied(&fleet, to).filter(|(last, _)| *last > 0).map(drop)
        })
        .await;
        soon(admin.set_moves_paused(true)).await.unwrap();
        until_long("the leader stops the copy", async || {
            let row = shard(&fleet, 1).await;
            let is_paused = |it: &str| it == "MOVES_PAUSED";
            let is_over = row.r#move.as_ref().is_none_or(|it| is_paused(&it.blocked_code));
            is_over.then_some(())
        })
        .await;
        if shard(&fleet, 1).await.r#move.is_some() {
            caught = Some((from, to));
            break;
        }
        soon(admin.set_moves_paused(false)).await.unwrap();
        found = settled(&fleet).await;
    }
    let (from, to) = caught.expect("a copy was paused in the middle");
    let row = shard(&fleet, 1).await;
    assert!(row.node_ids.contains(&from) && !row.node_ids.contains(&to), "{row:?}");
    assert!(has_pause_issue(&fleet).await);
    let moving = row.r#move.unwrap();
    assert!(moving.blocked_next_step.contains("resume-moves"), "{moving:?}");
    let leader = fleet.leader(1).await;
    let learners = || {
        let shard = fleet.node(leader).running.node().shard(1).unwrap();
        shard.replica().membership().learners
    };
    assert!(learners().is_empty(), "{:?}", learners());
    let (before, generation) = copied(&fleet, to).unwrap();

    // A manual move is refused, and another leader keeps the pause.
    let refused = admin.move_shard(1, from, to).await.unwrap_err();
    assert!(refused.to_string().contains("paused"), "{refused}");
    let row = shard(&fleet, 1).await;
    let next = row.node_ids.iter().copied().find(|node| *node != leader).unwrap();
    soon(admin.transfer_leader(1, Some(next))).await.unwrap();
    until_long("the new leader reports the pause", async || {
        let moving = shard(&fleet, 1).await.r#move?;
        (moving.blocked_code == "MOVES_PAUSED").then_some(())
    })
    .await;

    // The replica that waits has no leader and needs none: a restart leaves its node ready.
    fleet.stop(to).await;
    let others = fleet.ids();
    fleet.start_nodes(&[to], &others).await;
    until_long("the node of the waiting replica is ready", async || {
        let unready = fleet.node(to).running.node().unready();
        unready.is_empty().then_some(())
    })
    .await;

    soon(admin.set_moves_paused(false)).await.unwrap();
    let mut least = u64::MAX;
    until_long("the copy continues to its end", async || {
        let (last, of) = copied(&fleet, to)?;
        least = least.min(last);
        assert_eq!(of, generation, "the replica is not created again");
        let row = shard(&fleet, 1).await;
        (row.r#move.is_none() && row.node_ids.contains(&to)).then_some(())
    })
    .await;
    assert!(least >= before, "started again at {least} after {before}");
    assert!(!has_pause_issue(&fleet).await);

    // A cancelled move leads back; without one there is nothing to cancel.
    let row = shard(&fleet, 1).await;
    let refused = admin.cancel_move(1).await.unwrap_err();
    assert_eq!(refused.reason, Some(ErrorReason::MembershipChangeRefused), "{refused}");
    let free = (1..=4).find(|node| !row.node_ids.contains(node)).unwrap();
    soon(admin.move_shard(1, to, free)).await.unwrap();
    if let Ok(Some(cancelled)) = admin.cancel_move(1).await {
        assert!(cancelled.cancelled && cancelled.to_node_id == free, "{cancelled:?}");
        let found = settled(&fleet).await;
        let after = found.shards.iter().find(|it| it.shard_id == 1).unwrap();
        assert_eq!(after.node_ids, row.node_ids);
    }
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removal_waits_for_a_pause_and_is_refused_without_other_nodes() {
    let mut fleet = Fleet::with_shards(&[1, 2, 3], 2).await;
    let client = fleet.client();
    let admin = client.admin();
    soon(admin.set_replicas(3)).await.unwrap();
    settled(&fleet).await;
    let refused = admin.remove_node(3, false, true).await.unwrap_err();
    assert_eq!(refused.reason, Some(ErrorReason::NotEnoughNodes), "{refused}");
    let text = refused.to_string();
    assert!(text.contains("2 of 3 replicas") && text.contains("add a node first"), "{text}");
    fleet.add(4).await;
    settled(&fleet).await;
    soon(admin.set_moves_paused(true)).await.unwrap();
    let change = admin.remove_node(3, false, false).await.unwrap().unwrap();
    until_long("the removal says that moves are paused", async || {
        let seen = admin.membership_change(change.id).await.ok()?;
        let is_paused = seen.blocked_reason.contains("paused the moves");
        (seen.phase() != MembershipPhase::Done && is_paused).then_some(())
    })
    .await;
    let found = placement(&fleet).await.unwrap();
    assert!(found.paused && found.planned.is_empty(), "{found:?}");
    let stuck: Vec<_> = found.shards.iter().filter(|it| it.stuck_code == "MOVES_PAUSED").collect();
    assert!(stuck.iter().all(|it| it.stuck_next_step.contains("resume-moves")), "{found:?}");
    assert!(!stuck.is_empty(), "{found:?}");
    soon(admin.set_moves_paused(false)).await.unwrap();
    fleet.done(change.id).await;
    let found = placement(&fleet).await.unwrap();
    assert!(found.shards.iter().all(|it| !it.node_ids.contains(&3)), "{found:?}");
    fleet.stop_all().await;
}
