//! What a shard does beside serving. Every replica checkpoints its bookkeeping and purges its log;
//! the leader proposes what all must do at the same place: log starts, and what may be purged.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::{LogLimits, Shard};
use crate::limits;
use crate::log::{
    Head, Partition, PartitionId, ROWS_PER_ENTRY_MAX, RetentionPolicy, SegmentShare, ShardCommand,
    log_start_after_retention,
};
use crate::raft::Command;

/// How long upkeep waits for what it proposed.
const PROPOSAL_WAIT_MAX: Duration = Duration::from_secs(5);

/// What has to happen for the next checkpoint.
#[derive(Debug)]
struct CheckpointRule {
    bytes_at_last: u64,
    size_of_last: u64,
    bytes_min: u64,
}

impl CheckpointRule {
    /// A checkpoint pays for itself: it is written once per eight times its size of log, and
    /// not more than once per `bytes_min`; which bounds what a restart replays.
    fn is_due(&self, bytes: u64) -> bool {
        let since = bytes.saturating_sub(self.bytes_at_last);
        since >= self.bytes_min.max(8 * self.size_of_last)
    }

    /// Whether there is anything to checkpoint that comes with a full disk: only what a checkpoint
    /// covers can be purged, and only what is purged can go. While the disk is full nothing is
    /// appended, so that this is due once.
    fn would_help(&self, bytes: u64) -> bool {
        bytes > self.bytes_at_last
    }
}

/// How far back the log must be kept for replicas that are behind, within a bound of bytes.
#[derive(Debug)]
struct Backlog {
    bytes_max: u64,
    /// (bytes applied, index) now and then, oldest first.
    marks: VecDeque<(u64, u64)>,
}

impl Backlog {
    fn mark(&mut self, bytes: u64, index: u64) {
        self.marks.push_back((bytes, index));
        let bound = bytes.saturating_sub(self.bytes_max);
        while self.marks.get(1).is_some_and(|(bytes, _)| *bytes <= bound) {
            self.marks.pop_front();
        }
    }

    /// Index that nobody is waited for below.
    fn bound(&self, bytes: u64) -> u64 {
        let far = |(at, _): &&(u64, u64)| bytes - at >= self.bytes_max;
        self.marks.front().filter(far).map_or(0, |(_, index)| *index)
    }
}

/// Runs until the shard drains or is closed.
pub(super) async fn run(shard: Arc<Shard>) {
    let mut tick = tokio::time::interval(limits::UPKEEP_INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let LogLimits { checkpoint_bytes, catch_up_bytes } = shard.log_limits;
    let mut rule =
        CheckpointRule { bytes_at_last: 0, size_of_last: 0, bytes_min: checkpoint_bytes };
    let mut backlog = Backlog { bytes_max: catch_up_bytes, marks: VecDeque::new() };
    loop {
        let touched = tokio::select! {
            biased;
            () = shard.closed.cancelled() => return,
            _ = tick.tick() => None,
            () = shard.machine.upkeep_due() => Some(shard.machine.take_touched()),
        };
        shard.hub.tidy_fetch(shard.shard_id).await;
        let bytes = shard.machine.applied_bytes();
        if shard.replica.is_ready() {
            retain(&shard, touched).await;
            release(&shard, backlog.bound(bytes)).await;
        }
        if rule.is_due(bytes) || (rule.would_help(bytes) && shard.is_disk_full()) {
            rule.bytes_at_last = bytes;
            rule.size_of_last = shard.machine.read_state(|state| state.encode().len()) as u64;
            backlog.mark(bytes, shard.replica.status().applied);
            shard.replica.checkpoint().await;
        }
        let (checkpoint, purged) = shard.replica.checkpointed();
        let upto = checkpoint.min(shard.released());
        if upto > purged {
            shard.replica.purge(upto).await;
        }
    }
}

/// Proposes that the log be purged where no replica needs it: up to this one's checkpoint, what
/// the others have, and in any case up to `bound`.
async fn release(shard: &Shard, bound: u64) {
    let (checkpoint, _) = shard.replica.checkpointed();
    let matched = shard.replica.matched();
    // One that this leader has not heard of yet may lack everything.
    let has = |id| matched.get(&id).copied().unwrap_or(0);
    let slowest = shard.others().into_iter().map(has).min().unwrap_or(u64::MAX);
    let upto = checkpoint.min(slowest.max(bound));
    if upto <= shard.released() {
        return;
    }
    let command = Command::control(Head::Shard(ShardCommand::Release { index: upto }));
    settle(shard, command).await;
}

/// Proposes what is proposed again by the next round if it is lost.
async fn settle(shard: &Shard, command: Command) {
    if let Ok(outcome) = shard.replica.propose(command, None).await {
        // Ignored: see above.
        let _ = tokio::time::timeout(PROPOSAL_WAIT_MAX, outcome).await;
    }
}

/// Proposes new log starts: of the partitions that grew, or of all (those that only age). Whatever
/// is appended until a proposal is applied lies behind the start that it names.
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
        settle(shard, command).await;
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
