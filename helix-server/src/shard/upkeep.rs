//! What a leader does beside serving: retention, and checkpoints that let the log be purged.
//! Retention only proposes; the log start moves when the entry is applied, on every replica.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::Shard;
use crate::limits;
use crate::log::{
    Head, Partition, PartitionId, ROWS_PER_ENTRY_MAX, RetentionPolicy, SegmentShare, ShardCommand,
    log_start_after_retention,
};
use crate::raft::Command;

/// What has to happen for the next checkpoint.
#[derive(Debug)]
struct CheckpointRule {
    bytes_at_last: u64,
    size_of_last: u64,
}

impl CheckpointRule {
    /// A checkpoint pays for itself: it is written once per eight times its size of log, and
    /// at least once per [`limits::CHECKPOINT_BYTES`], which bounds what a restart replays.
    fn is_due(&self, bytes: u64) -> bool {
        let since = bytes.saturating_sub(self.bytes_at_last);
        since >= limits::CHECKPOINT_BYTES.max(8 * self.size_of_last)
    }
}

/// Runs until the shard drains.
pub(super) async fn run(shard: Arc<Shard>) {
    let mut tick = tokio::time::interval(limits::UPKEEP_INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut rule = CheckpointRule { bytes_at_last: 0, size_of_last: 0 };
    loop {
        let touched = tokio::select! {
            biased;
            () = shard.draining.cancelled() => return,
            _ = tick.tick() => None,
            () = shard.machine.upkeep_due() => Some(shard.machine.take_touched()),
        };
        if !shard.replica.is_ready() {
            continue;
        }
        retain(&shard, touched).await;
        let bytes = shard.machine.applied_bytes();
        if rule.is_due(bytes) {
            rule.bytes_at_last = bytes;
            rule.size_of_last = shard.machine.read_state(|state| state.encode().len()) as u64;
            shard.replica.checkpoint().await;
        }
    }
}

/// Proposes new log starts: of the partitions that grew, or of all (those that only age).
async fn retain(shard: &Shard, touched: Option<HashSet<PartitionId>>) {
    let now_us = shard.clock.now_us();
    let candidates: Vec<(PartitionId, RetentionPolicy, u64)> = shard.machine.read_state(|state| {
        let limited = |partition: &Partition| {
            let policy = RetentionPolicy::from(&*partition.settings);
            let some = policy.time_us.is_some() || policy.bytes.is_some();
            (some && partition.log_start < partition.next_offset).then_some((
                partition.id,
                policy,
                partition.log_start,
            ))
        };
        match &touched {
            Some(touched) => {
                touched.iter().filter_map(|id| state.partition(*id)).filter_map(limited).collect()
            }
            None => state.partitions().filter_map(limited).collect(),
        }
    });
    let mut starts = Vec::new();
    for (id, policy, log_start) in candidates {
        let shares: Vec<SegmentShare> = shard.wal.stream_rows(id.0).iter().map(share).collect();
        let target = log_start_after_retention(policy, now_us, log_start, &shares);
        if target > log_start {
            starts.push((id, target));
        }
    }
    starts.sort_unstable();
    for part in starts.chunks(ROWS_PER_ENTRY_MAX) {
        let command = Command::control(Head::Shard(ShardCommand::Trim { starts: part.to_vec() }));
        // Not proposed or not applied: the next round finds the same and proposes it again.
        if let Ok(outcome) = shard.replica.propose(command, None).await {
            let _ = tokio::time::timeout(Duration::from_secs(5), outcome).await;
        }
    }
}

fn share(row: &helix_wal::StreamRow) -> SegmentShare {
    SegmentShare {
        sealed: row.sealed,
        first: row.first,
        next: row.next,
        bytes: row.bytes,
        last_time_us: row.last_time,
    }
}
