//! Background maintenance of a shard: checkpoints, purges and retention.
//! Every replica checkpoints its state and purges its log. The leader proposes new log starts and
//! the index up to which replicas may purge.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::{LogLimits, Shard};
use crate::error::Result;
use crate::limits;
use crate::log::{
    Head, Partition, PartitionId, PartitionSegment, ROWS_PER_ENTRY_MAX, RetentionPolicy,
    ShardCommand, log_start_after_retention,
};
use crate::raft::Command;

/// Trims of one round that are logged one by one.
const TRIMS_LOGGED_MAX: usize = 20;

/// Longest wait for a proposal of maintenance.
const PROPOSAL_WAIT_MAX: Duration = Duration::from_secs(5);

/// Decides when the next checkpoint is due.
#[derive(Debug)]
struct CheckpointRule {
    bytes_at_last: u64,
    size_of_last: u64,
    bytes_min: u64,
}

impl CheckpointRule {
    /// Returns whether at least `bytes_min`, and eight times the size of the last checkpoint, have
    /// been applied since. That bounds both the cost of checkpoints and the replay of a restart.
    fn is_due(&self, bytes: u64) -> bool {
        let since = bytes.saturating_sub(self.bytes_at_last);
        since >= self.bytes_min.max(8 * self.size_of_last)
    }

    /// Returns whether a checkpoint could free space on a full disk: only entries that a checkpoint
    /// covers can be purged. While the disk is full nothing is appended, so this is true once.
    fn would_help(&self, bytes: u64) -> bool {
        bytes > self.bytes_at_last
    }
}

/// Computes the index up to which log is not kept for replicas that are behind.
#[derive(Debug)]
struct Backlog {
    bytes_max: u64,
    /// Samples of (bytes applied, index), oldest first.
    samples: VecDeque<(u64, u64)>,
}

impl Backlog {
    fn sample(&mut self, bytes: u64, index: u64) {
        self.samples.push_back((bytes, index));
        let bound = bytes.saturating_sub(self.bytes_max);
        while self.samples.get(1).is_some_and(|(bytes, _)| *bytes <= bound) {
            self.samples.pop_front();
        }
    }

    /// Returns the index below which replicas that are behind get a snapshot instead.
    fn bound(&self, bytes: u64) -> u64 {
        let is_far = |(at, _): &&(u64, u64)| bytes - at >= self.bytes_max;
        self.samples.front().filter(is_far).map_or(0, |(_, index)| *index)
    }
}

/// Runs until the shard drains or is closed.
pub(super) async fn run(shard: Arc<Shard>) {
    let mut tick = tokio::time::interval(limits::MAINTENANCE_INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let LogLimits { checkpoint_bytes, catch_up_bytes, .. } = shard.log_limits;
    let mut rule =
        CheckpointRule { bytes_at_last: 0, size_of_last: 0, bytes_min: checkpoint_bytes };
    let mut backlog = Backlog { bytes_max: catch_up_bytes, samples: VecDeque::new() };
    loop {
        let touched = tokio::select! {
            biased;
            () = shard.closed.cancelled() => return,
            _ = tick.tick() => None,
            () = shard.machine.maintenance_due() => Some(shard.machine.take_touched()),
        };
        shard.hub.discard_stale_fetch(shard.shard_id).await;
        let bytes = shard.machine.applied_bytes();
        if shard.replica.is_ready() {
            retain(&shard, touched).await;
            release(&shard, backlog.bound(bytes)).await;
        }
        // Also for commands, which count no bytes: a segment is purged as a whole.
        let is_wanted = shard.cleaner.take_wanted_checkpoint()
            && shard.replica.applied() > shard.replica.checkpointed().0;
        let helps = rule.would_help(bytes) && shard.is_disk_full();
        rule.size_of_last = shard.machine.encoded_bytes();
        if rule.is_due(bytes) || is_wanted || helps {
            rule.bytes_at_last = bytes;
            backlog.sample(bytes, shard.replica.status().applied);
            shard.replica.checkpoint().await;
        }
        let (checkpoint, purged) = shard.replica.checkpointed();
        let upto = checkpoint.min(shard.released());
        if upto > purged {
            shard.replica.purge(upto).await;
        }
    }
}

/// Proposes the index up to which the log may be purged: what this replica's checkpoint covers
/// and all others have, or at least `bound`.
async fn release(shard: &Shard, bound: u64) {
    let (checkpoint, _) = shard.replica.checkpointed();
    let matched = shard.replica.matched();
    // A replica that this leader has not heard from may lack everything.
    let has = |id| matched.get(&id).copied().unwrap_or(0);
    let slowest = shard.others().into_iter().map(has).min().unwrap_or(u64::MAX);
    let upto = checkpoint.min(slowest.max(bound));
    if upto <= shard.released() {
        return;
    }
    let command = Command::control(Head::Shard(ShardCommand::Release { index: upto }));
    propose(shard, command).await;
}

impl Shard {
    /// Commits an entry that changes nothing: it releases what is released.
    ///
    /// # Errors
    /// Those of [`Self::command`].
    pub async fn probe(&self) -> Result<()> {
        self.command(ShardCommand::Release { index: self.released() }).await
    }
}

/// Proposes a command that the next round proposes again if it is lost.
async fn propose(shard: &Shard, command: Command) {
    if let Ok(outcome) = shard.replica.propose(command, None).await {
        // Ignored: see above.
        let _ = tokio::time::timeout(PROPOSAL_WAIT_MAX, outcome).await;
    }
}

/// Proposes new log starts of the `touched` partitions, or of all, which also covers idle ones.
/// Records appended before a proposal is applied are above the proposed start.
async fn retain(shard: &Shard, touched: Option<HashSet<PartitionId>>) {
    // At time 0 no record is too old.
    let now_us = shard.clock.retention_us().unwrap_or(0);
    let candidates: Vec<RetainedPartition> = shard.machine.read_state(|state| {
        let limited = |partition: &Partition| {
            let policy = RetentionPolicy::from(&*partition.settings);
            let some = policy.time_us.is_some() || policy.bytes.is_some();
            (some && partition.log_start < partition.next_offset).then_some(RetainedPartition {
                id: partition.id,
                topic_id: partition.topic_id,
                number: partition.number,
                policy,
                log_start: partition.log_start,
            })
        };
        match &touched {
            Some(touched) => {
                touched.iter().filter_map(|id| state.partition(*id)).filter_map(limited).collect()
            }
            None => state.partitions().filter_map(limited).collect(),
        }
    });
    let mut starts = Vec::new();
    for partition in candidates {
        let RetainedPartition { id, policy, log_start, .. } = partition;
        let segments: Vec<PartitionSegment> =
            shard.wal.stream_rows(id.0).iter().map(segment).collect();
        let target = log_start_after_retention(policy, now_us, log_start, &segments);
        if target > log_start {
            if starts.len() < TRIMS_LOGGED_MAX {
                partition.log_trim(shard.id(), target, &segments);
            }
            starts.push((id, target));
        }
    }
    if let Some(more) = starts.len().checked_sub(TRIMS_LOGGED_MAX).filter(|more| *more > 0) {
        tracing::info!(shard_id = shard.id(), partitions = more, "retention trims more partitions");
    }
    starts.sort_unstable();
    for part in starts.chunks(ROWS_PER_ENTRY_MAX) {
        let command = Command::control(Head::Shard(ShardCommand::Trim { starts: part.to_vec() }));
        propose(shard, command).await;
    }
}

/// A partition with a retention limit.
#[derive(Debug, Clone, Copy)]
struct RetainedPartition {
    id: PartitionId,
    topic_id: u64,
    number: u32,
    policy: RetentionPolicy,
    log_start: u64,
}

impl RetainedPartition {
    /// Logs what retention removes: such records are gone without a request of any client.
    fn log_trim(&self, shard_id: u64, target: u64, segments: &[PartitionSegment]) {
        let removed = || segments.iter().filter(|it| it.next > self.log_start && it.first < target);
        let newest_us = removed().map(|it| it.last_time_us).max().unwrap_or(0);
        tracing::info!(
            shard_id,
            topic_id = self.topic_id,
            partition = self.number,
            first_offset = self.log_start,
            next_offset = target,
            bytes = removed().map(|it| it.bytes).sum::<u64>(),
            newest_append_s = newest_us / 1_000_000,
            retention_s = self.policy.time_us.map(|time_us| time_us / 1_000_000),
            retention_bytes = self.policy.bytes,
            "retention trims a partition"
        );
    }
}

fn segment(row: &helix_wal::StreamRow) -> PartitionSegment {
    PartitionSegment {
        sealed: row.sealed,
        first: row.first,
        next: row.next,
        bytes: row.bytes,
        last_time_us: row.last_time,
    }
}
