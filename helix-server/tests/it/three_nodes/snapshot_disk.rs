//! A replica that fetches records while its disk is full: it waits, still follows leaders, and
//! resumes automatically. Three nodes on simulated disks that can be filled.

use helix_server::node::LogLimits;
use helix_server::shard::ReadBatch;

use crate::simulated_trio::{SHARD, SimulatedTrio};
use crate::trio::{NODES, until};

/// As much as a node reserves: nothing else fits.
const FULL: u64 = 256 << 20;

/// Little log, so that it is purged soon.
const SHORT: LogLimits =
    LogLimits { checkpoint_bytes: 64 << 10, catch_up_bytes: 64 << 10, ..LogLimits::DEFAULT };

#[tokio::test]
async fn fetch_waits_for_disk_space_and_resumes() {
    let mut three = SimulatedTrio::start(SHORT).await;
    three.append(0).await;
    let leader = three.leader().await;
    let away = NODES.into_iter().find(|id| *id != leader).unwrap();
    three.stored(away, 1).await;
    let had = three.shard(away).status().last_index;
    three.stop(away).await;
    let mut count = 1;
    until("the log is purged of what the node lacks", async || {
        for _ in 0..40 {
            three.append(count).await;
            count += 1;
        }
        three.nodes.keys().all(|id| three.shard(*id).status().purged > had).then_some(())
    })
    .await;

    let disk = three.disks.of(away, SHARD);
    disk.set_free_bytes(Some(FULL));
    three.restart(away).await;
    let waits = async |three: &SimulatedTrio| {
        until("the fetch waits for disk space", async || {
            let waits_for = three.shard(away).fetching()?.waits_for?;
            waits_for.contains("disk of this node is full").then_some(())
        })
        .await;
    };
    waits(&three).await;
    // It still follows new leaders and their commits.
    let leader = three.leader().await;
    let next = NODES.into_iter().find(|id| *id != leader && *id != away).unwrap();
    let term = three.shard(away).status().term;
    three.transfer(next).await;
    three.append(count).await;
    count += 1;
    until("it follows the next leader", async || {
        // Leadership may have moved back to the preferred leader since.
        let shard = three.shard(away);
        (shard.status().term > term && shard.leader_hint().is_some()).then_some(())
    })
    .await;
    waits(&three).await;
    // Its last entries may not have been known as committed when it stopped.
    assert!(three.shard(away).status().applied <= had, "no partial state is visible");

    three.disks.of(away, SHARD).set_free_bytes(None);
    let first = three.stored(next, count).await;
    let second = three.stored(away, count).await;
    let place = |it: &ReadBatch| (it.log_id, it.first_offset, it.crc, it.payload.clone());
    assert!(first.iter().map(place).eq(second.iter().map(place)), "the replicas differ");
    assert_eq!(three.shard(away).fetching(), None);
    three.stop_all().await;
}
