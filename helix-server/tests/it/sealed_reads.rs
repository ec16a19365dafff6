//! Reads of partitions that a split has sealed: the new shard may have later records.

use std::sync::Arc;

use bytes::Bytes;
use helix_server::error::Error;
use helix_server::limits::SHARDS_MAX;
use helix_server::log::{ShardCommand, SplitRule};
use helix_server::node::{LocatedPartition, Node};
use helix_server::shard::{Durability, FlowShare, ReadFrom};
use helix_wal::storage::SimulatedDisk;

use crate::simulated_trio::one_record;
use crate::simulation::settings_on;

/// The leader of the old shard may be the last to know that the split is done.
#[tokio::test]
async fn leader_of_a_sealed_partition_states_no_end() {
    let open = move |shard| Arc::new(SimulatedDisk::new(shard)) as Arc<_>;
    let node = Node::open(settings_on(Arc::new(open), 1)).await.unwrap();
    let mut located = Vec::new();
    for number in 0..4 {
        let found = node.locate("default", number).unwrap();
        let permit = found.shard.permit(FlowShare::INTERNAL, 1).await.unwrap();
        let batch = one_record(found.partition, Bytes::from_static(b"x"));
        found.shard.append(batch, Durability::QuorumSynced, permit).await.unwrap();
        located.push(found);
    }
    let shard = located[0].shard.clone();
    let rule = SplitRule { parts: 2, turn: 0, ids_below: u64::MAX };
    // No state of the cluster plans this split, so nothing ends it.
    let id = u64::MAX;
    let split = ShardCommand::Split { id, target: SHARDS_MAX, rule };
    shard.command_alone(split).await.unwrap();
    let moved = shard.read_state(|state| state.moved_by(rule));
    let is_moved = |it: &LocatedPartition| moved.contains(&it.partition);
    let (sealed, open): (Vec<_>, Vec<_>) = located.into_iter().partition(is_moved);
    assert_eq!((sealed.len(), open.len()), (2, 2));
    for located in &sealed {
        let (shard, partition) = (&located.shard, located.partition);
        let is_refused = |error: Error| matches!(error, Error::NoLeader { .. });
        assert!(is_refused(shard.latest(partition).await.unwrap_err()));
        for offset in [0, 1, 2] {
            let read = shard.read(partition, offset, None, 1, ReadFrom::Leader).await;
            assert!(is_refused(read.unwrap_err()), "offset {offset}");
        }
        assert!(is_refused(shard.trim(partition, 1).await.unwrap_err()));
        assert!(is_refused(
            shard.offset_at_time(partition, u64::MAX, ReadFrom::Leader).await.unwrap_err()
        ));
        let read = shard.read(partition, 0, None, 1, ReadFrom::AnyReplica).await.unwrap();
        assert_eq!(read.batches.len(), 1, "a prefix");
    }
    for located in &open {
        assert_eq!(located.shard.latest(located.partition).await.unwrap().high_watermark, 1);
    }
    shard.command(ShardCommand::CancelSplit { id }).await.unwrap();
    for located in &sealed {
        assert_eq!(located.shard.latest(located.partition).await.unwrap().high_watermark, 1);
    }
    node.close().await;
}
