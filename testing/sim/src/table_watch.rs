//! Checks the compaction by key on all nodes, below their API: once the log says that every replica
//! is clean below an offset, each of them has been (docs/decisions/0049).
//!
//! Readers would rarely notice, since a replica that is not clean refuses most reads.

use std::collections::BTreeMap;
use std::sync::Arc;

use helix_server::raft::node_of;
use helix_server::shard::Shard;

use crate::cluster::SimulatedMachine;
use crate::membership::MembershipTracker;
use crate::plan::SimulationPlan;

/// Checks recorded progress, and keeps the state that it needs.
#[derive(Debug)]
pub struct TableStateChecker {
    members: MembershipTracker,
    /// Number of the initial nodes.
    founders: u64,
    /// Greatest offset below which a replica was clean, by node, shard and partition. A crash may
    /// undo a mark that was reported, but not the compaction.
    clean: BTreeMap<(u64, u64, u64), u64>,
    /// Offset up to which the recorded progress is checked, by shard and partition.
    checked: BTreeMap<(u64, u64), u64>,
}

/// Progress of a partition, as a replica knows it.
struct PartitionProgress {
    partition: u64,
    log_start: u64,
    /// Below this offset every replica is clean, by the log.
    cleaned: u64,
}

impl TableStateChecker {
    pub fn new(plan: &SimulationPlan, members: MembershipTracker) -> Self {
        let founders = plan.nodes;
        Self { members, founders, clean: BTreeMap::new(), checked: BTreeMap::new() }
    }

    /// Checks all nodes after a tick.
    ///
    /// # Errors
    /// The replica that is not clean.
    pub fn check(&mut self, machines: &[SimulatedMachine]) -> Result<(), String> {
        let mut known: Vec<(Arc<Shard>, PartitionProgress)> = Vec::new();
        for machine in machines {
            // Also a node that ended in this tick.
            let shards = machine.last_node().map(|node| node.shards()).unwrap_or_default();
            for shard in shards {
                let marks = shard.replica().wal().clean_marks();
                for progress in progress_of(&shard) {
                    let PartitionProgress { partition, log_start, .. } = progress;
                    let mark = marks.get(&partition).map_or(0, |mark| mark.upto);
                    let key = (machine.node_id(), shard.id(), partition);
                    let clean = self.clean.entry(key).or_default();
                    *clean = mark.max(log_start).max(*clean);
                    known.push((shard.clone(), progress));
                }
            }
        }
        known.iter().try_for_each(|(shard, progress)| self.check_progress(shard, progress))
    }

    fn check_progress(
        &mut self,
        shard: &Shard,
        progress: &PartitionProgress,
    ) -> Result<(), String> {
        let PartitionProgress { partition, cleaned, .. } = *progress;
        let checked = self.checked.entry((shard.id(), partition)).or_default();
        if cleaned <= *checked {
            return Ok(());
        }
        *checked = cleaned;
        // A replica that joined since the leader asked all of them need not be clean.
        let is_founder = |node: &u64| *node <= self.founders && self.members.wipes(*node) == 0;
        for node in shard.replica().voters().into_iter().map(node_of).filter(is_founder) {
            let clean = self.clean.get(&(node, shard.id(), partition)).copied().unwrap_or(0);
            if clean < cleaned {
                return Err(format!(
                    "shard {}, partition {partition}: every replica is recorded as clean below \
                     {cleaned}, but node {node} is only below {clean}",
                    shard.id()
                ));
            }
        }
        Ok(())
    }
}

/// Returns the progress of each partition that had a round.
fn progress_of(shard: &Shard) -> Vec<PartitionProgress> {
    shard.read_state(|state| {
        let rows = state.partitions_with_rounds();
        let progress = rows.map(|it| PartitionProgress {
            partition: it.id.0,
            log_start: it.log_start,
            cleaned: it.cleanup.cleaned,
        });
        progress.collect()
    })
}
