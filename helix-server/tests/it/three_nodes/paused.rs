//! Nodes that are suspended and go on later, as after SIGSTOP or the move of a virtual machine: a
//! leader that does not know yet what happened meanwhile must not answer from its past.

use std::sync::mpsc;

use helix_server::error::{Error, Result};
use helix_server::node::LogLimits;
use helix_server::shard::{ShardRead, ReadFrom};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

use crate::simulated_trio::{SHARD, Three};
use crate::support::soon;
use crate::trio::until;

/// Opens these nodes anew, on one thread of their own: whatever holds that up suspends them.
async fn on_a_thread_of_their_own(mut three: Three, nodes: &'static [u64]) -> (Three, Runtime) {
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

/// Waits until this node leads, and all have the one record that there is.
async fn lead(three: &Three, node: u64) {
    until("it leads", async || {
        let leader = three.leader().await;
        if leader == node {
            return Some(());
        }
        // Ignored: it is tried again.
        let _ = three.shard(leader).transfer(Some(node)).await;
        None
    })
    .await;
    three.append(0).await;
    three.expect_equal(1).await;
}

fn is_elsewhere(read: &Result<ShardRead>) -> bool {
    matches!(read, Err(Error::NotLeader { .. } | Error::NoLeader { .. }))
}

#[tokio::test]
async fn a_leader_that_goes_on_after_a_pause_does_not_answer_from_its_past() {
    let three = Three::start(LogLimits::default()).await;
    let (mut three, runtime) = on_a_thread_of_their_own(three, &[1]).await;
    lead(&three, 1).await;
    let node = three.nodes.remove(&1).unwrap();
    let located = node.locate("default", 0).unwrap();
    let (resume, resumed) = mpsc::channel();
    let (pausing, paused) = oneshot::channel();
    let reading = runtime.spawn(async move {
        pausing.send(()).unwrap();
        resumed.recv().unwrap();
        // Before anything else on this node goes on.
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
    assert!(is_elsewhere(&below), "it does not know how much there is: {below:?}");
    assert!(is_elsewhere(&at_end), "it is not the end any more: {at_end:?}");
    assert!(is_elsewhere(&beyond), "it is there: {beyond:?}");
    three.nodes.insert(1, node);
    three.expect_equal(4).await;
    three.stop_all().await;
    runtime.shutdown_background();
}

#[tokio::test]
async fn that_an_offset_is_beyond_the_end_is_said_only_with_a_majority() {
    let three = Three::start(LogLimits::default()).await;
    let (three, runtime) = on_a_thread_of_their_own(three, &[2, 3]).await;
    lead(&three, 1).await;
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
    // Those who confirmed it a moment ago may have been silent for long, if clocks mislead.
    let beyond = read(2).await;
    assert!(is_elsewhere(&beyond), "nobody has said that it still leads: {beyond:?}");
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
