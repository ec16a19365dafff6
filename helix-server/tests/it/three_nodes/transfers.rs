//! Planned transfers of leadership under appends without identity, which cannot be repeated
//! safely: none may end with an unknown outcome.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use helix_proto::log::v1::ErrorReason;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use tokio::task::JoinSet;
use tonic::transport::Channel;

use super::failover::read_all;
use crate::support::{append_request, detail, reason, soon};
use crate::trio::{NODES, Trio, TrioPlan, expect_equal_replicas, until};

const WRITERS: u64 = 32;
const TRANSFERS: usize = 30;

/// Appends that each round of transfers must see, so that every transfer is under load.
const APPENDS_PER_TRANSFER: u64 = 100;

/// Appends one value after the other until told to stop. Returns what was acknowledged.
/// Repeats only what was refused unproposed.
async fn write(
    writer: u64,
    mut nodes: Vec<ProduceServiceClient<Channel>>,
    count: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
) -> Vec<String> {
    let (mut acked, mut at) = (Vec::new(), 0);
    for number in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let value = format!("{writer}-{number}");
        loop {
            let Err(status) = nodes[at].append(append_request(&[&value])).await else { break };
            let reasons = [ErrorReason::NotLeader, ErrorReason::NoLeader];
            assert!(reasons.contains(&reason(&status)), "{value}: {status:?}");
            assert!(!detail(&status).may_have_applied, "{value}: {status:?}");
            at = (at + 1) % nodes.len();
        }
        acked.push(value);
        count.fetch_add(1, Ordering::Relaxed);
    }
    acked
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn planned_transfers_leave_no_append_with_an_unknown_outcome() {
    let mut trio = Trio::durable().await;
    let (count, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let nodes = NODES.map(|node| trio.node(node).produce()).into();
        writers.spawn(write(writer, nodes, count.clone(), stop.clone()));
    }
    let admin = trio.client().admin();
    for round in 0..TRANSFERS {
        let enough = count.load(Ordering::Relaxed) + APPENDS_PER_TRANSFER;
        until("appends go on", async || {
            assert!(!writers.is_empty());
            (count.load(Ordering::Relaxed) >= enough).then_some(())
        })
        .await;
        let (leader, shard) = trio.leader_of(0).await;
        match round % 3 {
            0 => trio.transfer(shard, leader % 3 + 1).await,
            1 => {
                admin.set_draining(leader, true, false).await.unwrap();
                admin.set_draining(leader, false, false).await.unwrap();
            }
            // Back to the preferred leader.
            _ => drop(admin.balance_leaders().await.unwrap()),
        }
    }
    stop.store(true, Ordering::Relaxed);
    let mut acked = BTreeSet::new();
    while let Some(writer) = soon(writers.join_next()).await {
        acked.extend(writer.unwrap());
    }
    let end = acked.len() as u64;
    expect_equal_replicas(&trio, 0, end).await;
    // One more shows a second copy behind them.
    let mark = trio.write(0, &["mark"]).await.first_offset.unwrap();
    let read = read_all(&trio, 0, mark).await;
    assert_eq!(read.len(), acked.len(), "nothing is lost, and nothing there twice");
    assert_eq!(read.into_iter().collect::<BTreeSet<_>>(), acked);
    trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_was_asked_for_stays_until_it_has_led_for_a_while() {
    let mut trio = Trio::start(TrioPlan::in_memory()).await;
    let a_while = Duration::from_secs(3600);
    // Again if the machine stalls, and another node is elected.
    until("the shard would move back later", async || {
        trio.transfer(1, 2).await;
        let cluster = trio.node(2).running.node().cluster();
        assert!(cluster.next_balance(&[], a_while).await.is_none());
        let (shard, to) = cluster.next_balance(&[], Duration::ZERO).await?;
        (shard.id() == 1 && to == 1).then_some(())
    })
    .await;
    trio.stop_all().await;
}
