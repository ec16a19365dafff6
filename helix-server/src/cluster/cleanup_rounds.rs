//! Rounds of compaction by key in a shard that this node leads.
//!
//! The leader begins rounds, and records when every replica is clean. It asks all replicas before
//! each of the two steps that depend on it, since a replica may have been rebuilt meanwhile.

use std::collections::{BTreeMap, HashSet};

use futures_util::future::join_all;
use tokio::time::Instant;

use super::client::Cluster;
use crate::error::Result;
use crate::limits::CLEANUP_LAG_MAX;
use crate::log::{CleanupRound, PartitionId, ROWS_PER_ENTRY_MAX, ShardCommand};
use crate::protocol::COMPACTION;
use crate::raft::node_of;
use crate::shard::Shard;

/// Open rounds of a shard, as its leader has seen them.
#[derive(Debug, Default)]
pub struct CleanupRounds {
    open_since: BTreeMap<PartitionId, Instant>,
}

impl Cluster {
    /// Takes the steps that are due in the compaction of a shard's partitions.
    ///
    /// # Errors
    /// Those of a step that has to be repeated.
    pub async fn drive_cleanup(&self, shard: &Shard, rounds: &mut CleanupRounds) -> Result<()> {
        if !shard.is_leader() || self.protocol() < COMPACTION {
            rounds.open_since.clear();
            return Ok(());
        }
        let tables = shard.compacted_partitions();
        rounds.open_since.retain(|id, _| tables.iter().any(|it| it.id == *id && it.is_open()));
        if tables.is_empty() {
            return Ok(());
        }
        shard.ready().await?;
        // At an unknown time no lag and no retention has passed, and nothing can be recorded.
        let Some(now_us) = shard.agreed_time_us() else { return Ok(()) };
        let is_asked = tables.iter().any(|it| it.is_open() || it.keeps_tombstones());
        let clean = if is_asked { self.cleaned_everywhere(shard).await } else { None };
        let is_clean = |id: PartitionId, index: u64| {
            let is_done =
                |clean: &CleanReplicas| clean.index >= index && !clean.not_clean.contains(&id.0);
            clean.as_ref().is_some_and(is_done)
        };
        let mut finished = Vec::new();
        let mut begun: Vec<(PartitionId, CleanupRound)> = Vec::new();
        for (position, table) in tables.into_iter().enumerate() {
            if position % crate::limits::PARTITIONS_PER_TURN == 0 {
                tokio::task::yield_now().await;
            }
            let id = table.id;
            if table.is_open() && is_clean(id, table.state.round_index) {
                finished.push((id, table.state.upto));
                continue;
            }
            // An absent replica holds tombstones back, but not the next round.
            let may_extend = !table.is_open() || clean.is_none() || {
                let since = *rounds.open_since.entry(id).or_insert_with(Instant::now);
                since.elapsed() >= CLEANUP_LAG_MAX
            };
            let may_forget = table.keeps_tombstones() && is_clean(id, table.state.cleaned_index);
            begun.extend(
                shard.next_cleanup(id, now_us, may_extend, may_forget).map(|round| (id, round)),
            );
        }
        for partitions in finished.chunks(ROWS_PER_ENTRY_MAX) {
            let partitions = partitions.to_vec();
            shard.command(ShardCommand::Cleaned { partitions, time_us: now_us }).await?;
        }
        for part in begun.chunks(ROWS_PER_ENTRY_MAX) {
            shard.command(ShardCommand::CleanUp { rounds: part.to_vec() }).await?;
            for (id, _) in part {
                rounds.open_since.remove(id);
            }
        }
        Ok(())
    }

    /// Asks every replica what it has compacted; `None` while one of them does not answer, is in
    /// repair, or lacks records.
    async fn cleaned_everywhere(&self, shard: &Shard) -> Option<CleanReplicas> {
        let others = shard.others();
        let asked = others.iter().map(|replica| async move {
            let report = self.ask_replica_status(node_of(*replica), shard.id(), None).await?;
            let is_whole =
                report.replica_id == *replica && !report.in_repair && !report.is_fetching;
            is_whole.then_some((report.cleanup_index, report.not_clean))
        });
        let mut reports = join_all(asked).await;
        reports.push(Some(shard.cleanup_report()));
        let mut clean = CleanReplicas { index: u64::MAX, not_clean: HashSet::new() };
        for report in reports {
            let (index, not_clean) = report?;
            clean.index = clean.index.min(index);
            clean.not_clean.extend(not_clean);
        }
        Some(clean)
    }
}

/// Common progress of a shard's replicas.
#[derive(Debug)]
struct CleanReplicas {
    /// Every replica has applied the entries up to here.
    index: u64,
    /// Partitions whose last round some replica has not done.
    not_clean: HashSet<u64>,
}
