//! Nodes that are suspended and resumed, as by SIGSTOP or the migration of a virtual machine: a
//! resumed leader must not serve stale reads.

use std::sync::mpsc;

use helix_server::error::{Error, Result};
use helix_server::node::LogLimits;
use helix_server::shard::{ReadFrom, ShardRead};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

use crate::simulated_trio::{SHARD, SimulatedTrio};
use crate::support::soon;
use crate::trio::until;

/// Reopens these nodes on one thread of their own: blocking that thread suspends them.
async fn move_to_own_thread(
    mut three: SimulatedTrio,
    nodes: &'static [u64],
) -> (SimulatedTrio, Runtime) {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    for node in nodes {
        three.stop(*node).await;
        let restart = async move {
            three.restart(*node).await;
            three
        };
        three = runtime.spawn(restart).await.unwrap();
    }
    (three, runtime)
}

/// Makes this node the leader, appends one record, and waits until all nodes have it.
async fn make_leader(three: &SimulatedTrio, node: u64) {
    three.transfer(node).await;
    three.append(0).await;
    three.expect_equal(1).await;
}

fn is_redirect(read: &Result<ShardRead>) -> bool {
    matches!(read, Err(Error::NotLeader { .. } | Error::NoLeader { .. }))
}

#[tokio::test]
async fn resumed_leader_serves_no_stale_reads() {
    let three = SimulatedTrio::start_hasty(LogLimits::default()).await;
    let (mut three, runtime) = move_to_own_thread(three, &[1]).await;
    make_leader(&three, 1).await;
    let node = three.nodes.remove(&1).unwrap();
    let located = node.locate("default", 0).unwrap();
    let (resume, resumed) = mpsc::channel();
    let (pausing, paused) = oneshot::channel();
    let reading = runtime.spawn(async move {
        pausing.send(()).unwrap();
        resumed.recv().unwrap();
        // Before any other task of this node runs.
        let (shard, partition) = (&located.shard, located.partition);
        let read = async |offset| shard.read(partition, offset, None, 1, ReadFrom::Leader).await;
        tokio::join!(read(0), read(1), read(2))
    });
    paused.await.unwrap();
    for number in 1..4 {
        three.append(number).await;
    }
    resume.send(()).unwrap();
    let (below, at_end, beyond) = soon(reading).await.unwrap();
    assert!(is_redirect(&below), "it does not know the end: {below:?}");
    assert!(is_redirect(&at_end), "it is no longer the end: {at_end:?}");
    assert!(is_redirect(&beyond), "the record exists: {beyond:?}");
    three.nodes.insert(1, node);
    three.expect_equal(4).await;
    three.stop_all().await;
    runtime.shutdown_background();
}

#[tokio::test]
async fn offset_out_of_range_needs_a_majority() {
    let three = SimulatedTrio::start(LogLimits::default()).await;
    let (three, runtime) = move_to_own_thread(three, &[2, 3]).await;
    make_leader(&three, 1).await;
    let located = three.nodes[&1].locate("default", 0).unwrap();
    let read = async |offset| {
        let (shard, partition) = (&located.shard, located.partition);
        shard.read(partition, offset, None, 1, ReadFrom::Leader).await
    };
    let refused = read(2).await.unwrap_err();
    assert!(matches!(refused, Error::OffsetOutOfRange { requested: 2, .. }), "{refused}");
    let (resume, resumed) = mpsc::channel();
    let (pausing, paused) = oneshot::channel();
    let pause = runtime.spawn(async move {
        pausing.send(()).unwrap();
        resumed.recv().unwrap();
    });
    paused.await.unwrap();
    // Earlier confirmations do not count: clocks may mislead about their age.
    let beyond = read(2).await;
    assert!(is_redirect(&beyond), "leadership was not confirmed: {beyond:?}");
    resume.send(()).unwrap();
    pause.await.unwrap();
    until("it is confirmed again", async || {
        let shard = three.nodes[&three.leader().await].shard(SHARD)?;
        let beyond = shard.read(located.partition, 2, None, 1, ReadFrom::Leader).await;
        matches!(beyond, Err(Error::OffsetOutOfRange { .. })).then_some(())
    })
    .await;
    drop(located);
    three.stop_all().await;
    runtime.shutdown_background();
}
