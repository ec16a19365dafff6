//! A replica whose Raft has stopped for good, because its disk had no room for what it had taken
//! already: it says so, and is started again by itself.

use helix_server::node::LogLimits;

use crate::simulated_trio::{SHARD, Three};
use crate::trio::{NODES, until};

const LIMITS: LogLimits = LogLimits { checkpoint_bytes: 64 << 20, catch_up_bytes: 64 << 20 };

#[tokio::test]
async fn a_replica_that_stopped_for_want_of_room_says_so_and_starts_again() {
    let three = Three::start(LIMITS).await;
    three.append(0).await;
    let leader = three.leader().await;
    let poor = NODES.into_iter().find(|id| *id != leader).unwrap();
    three.stored(poor, 1).await;
    let disk = three.disks.of(poor, SHARD);
    disk.set_free_bytes(Some(0));
    // Entries without records are taken also where there is no room for records: among them is what
    // makes room. What is left is for the first of them.
    let partition = three.nodes[&leader].locate("default", 0).unwrap().partition;
    until("it stops, and says so", async || {
        for _ in 0..20 {
            three.shard(leader).trim(partition, 0).await.unwrap();
        }
        let node = &three.nodes[&poor];
        let says = node.unready().iter().any(|why| why.what.contains("shard 1 has stopped"));
        (says && !node.stopped().is_empty()).then_some(())
    })
    .await;
    disk.set_free_bytes(None);
    until("it is open again", async || {
        let node = &three.nodes[&poor];
        (node.stopped().is_empty() && node.unready().is_empty()).then_some(())
    })
    .await;
    three.append(1).await;
    three.expect_equal(2).await;
    three.stop_all().await;
}
