//! Rounds that wait for segments: only sealed segments below the checkpoint can be compacted.
//!
//! New records normally seal segments, and replace older entries in memory. In an idle shard, the
//! replica seals the active segment early and drops its purged entries from memory. It asks for a
//! checkpoint if the last one does not cover the entries. The leader releases the log up to a new
//! checkpoint. So each replica finishes the rounds of an idle shard.

use tokio::time::Instant;

use super::super::Shard;
use super::DueRound;
use crate::limits::CLEANER_SEAL_DELAY;
use crate::log::PartitionId;

impl Shard {
    /// Makes partitions cleanable up to the ends of decided rounds, once some of them have waited
    /// for [`CLEANER_SEAL_DELAY`].
    pub(super) fn make_rounds_cleanable(&self, due: &[DueRound]) {
        let ends: Vec<_> = due.iter().map(|due| (due.partition, due.round.upto)).collect();
        let waiting = self.not_cleanable(&ends);
        if self.cleaner.has_waited(!waiting.is_empty(), Instant::now(), CLEANER_SEAL_DELAY) {
            self.make_cleanable(&waiting);
        }
    }

    /// Makes partitions cleanable up to offsets.
    ///
    /// Returns false if the call has to be repeated, because a segment was sealed early just
    /// before.
    pub fn make_cleanable(&self, wanted: &[(PartitionId, u64)]) -> bool {
        for (id, upto) in self.not_cleanable(wanted) {
            self.wal.uncache(id.0, upto);
        }
        let waiting = self.not_cleanable(wanted);
        waiting.is_empty() || self.seal_early(&waiting)
    }

    /// Asks for a checkpoint, after which the leader releases more of the log.
    pub fn want_checkpoint(&self) {
        self.cleaner.want_checkpoint();
    }

    fn not_cleanable(&self, wanted: &[(PartitionId, u64)]) -> Vec<(PartitionId, u64)> {
        let is_waiting = |(id, upto): &&(PartitionId, u64)| self.wal.cleanable_upto(id.0) < *upto;
        wanted.iter().filter(is_waiting).copied().collect()
    }

    fn seal_early(&self, waiting: &[(PartitionId, u64)]) -> bool {
        if !self.cleaner.may_seal_early(Instant::now(), CLEANER_SEAL_DELAY) {
            return false;
        }
        // One request is enough, since the whole segment is sealed.
        let has_rolled = waiting.iter().any(|(id, upto)| self.wal.roll_early(id.0, *upto));
        let (shard_id, partitions) = (self.id(), waiting.len());
        tracing::debug!(shard_id, partitions, has_rolled, "making records cleanable");
        // Segments that the last checkpoint covers wait for the leader's release, which does not
        // depend on checkpoints of this replica.
        if waiting.iter().any(|(id, upto)| self.wal.needs_checkpoint(id.0, *upto)) {
            self.cleaner.want_checkpoint();
        }
        true
    }
}
