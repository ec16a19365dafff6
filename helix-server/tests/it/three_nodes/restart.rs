//! A replica whose Raft stopped because its disk had no space for entries that it had accepted: it
//! reports that and is restarted automatically.

use helix_server::node::LogLimits;

use crate::simulated_trio::{SHARD, SimulatedTrio};
use crate::trio::{NODES, until};

const LIMITS: LogLimits =
    LogLimits { checkpoint_bytes: 64 << 20, catch_up_bytes: 64 << 20, ..LogLimits::DEFAULT };

#[tokio::test]
async fn replica_stopped_by_a_full_disk_reports_it_and_restarts() {
    let three = SimulatedTrio::start(LIMITS).await;
    three.append(0).await;
    let leader = three.leader().await;
    let full = NODES.into_iter().find(|id| *id != leader).unwrap();
    three.stored(full, 1).await;
    let disk = three.disks.of(full, SHARD);
    disk.set_free_bytes(Some(0));
    // Entries without records are accepted on a full disk, because some of them free space. The
    // remaining space is enough for the first of them.
    let partition = three.nodes[&leader].locate("default", 0).unwrap().partition;
    until("the replica stops and reports it", async || {
        let leader = three.leader().await;
        for _ in 0..20 {
            // Ignored: leadership may be changing.
            let _ = three.shard(leader).trim(partition, 0).await;
        }
        let node = &three.nodes[&full];
        let says = node.unready().iter().any(|why| why.what.contains("shard 1 has stopped"));
        (says && !node.stopped().is_empty()).then_some(())
    })
    .await;
    disk.set_free_bytes(None);
    until("the replica is open again", async || {
        let node = &three.nodes[&full];
        (node.stopped().is_empty() && node.unready().is_empty()).then_some(())
    })
    .await;
    three.append(1).await;
    three.expect_equal(2).await;
    three.stop_all().await;
}
