//! A replica of a shard that is being split serves the replicas of the new shard: the records that
//! move, and the state with which the new shard begins.

use std::collections::HashSet;
use std::sync::Arc;

use super::Shard;
use crate::error::{Error, Result};
use crate::log::{Head, ShardCommand, Verdict};
use crate::raft::Command;
use crate::records::{SplitRecords, SplitRecordsRequest};
use crate::sync;

/// Id of a split, and the streams that it moves.
pub(super) type SplitStreams = Option<(u64, Arc<HashSet<u64>>)>;

/// Largest part of a state in a response.
const STATE_BYTES: usize = 1 << 20;

impl Shard {
    /// Reads records of the streams that a split moves, after `request.after`.
    ///
    /// This replica may not have applied the end of the split before this one. So the streams are
    /// not those that its own state would give: see [`Shard::split_streams`].
    ///
    /// # Errors
    /// The reason why this replica has none for the caller, in words.
    pub async fn split_records(
        &self,
        request: &SplitRecordsRequest,
        moved: Arc<HashSet<u64>>,
    ) -> std::result::Result<SplitRecords, String> {
        if self.is_closed() || self.replica().repair_of().is_some() {
            return Err(format!("the replica of shard {} is closed or in repair", self.id()));
        }
        // Raft's number is never above that of the state, which has all partitions up to there.
        let applied = self.replica().applied();
        let (split, has_ended, forgotten) = self.read_state(|state| {
            let split = state.split().filter(|split| split.id == request.id).cloned();
            // Before the records are read: what they lack later, a later response says.
            (split, state.ended_split() >= request.id, state.forgotten(&moved))
        });
        if has_ended {
            return Err(format!("split {} of shard {} has ended", request.id, self.id()));
        }
        let split = split.filter(|split| split.index <= applied);
        let upto = split.as_ref().map_or(applied, |split| split.index);
        let mut found = SplitRecords { applied, forgotten, ..SplitRecords::default() };
        if let Some(split) = &split {
            (found.term, found.index) = (split.term, split.index);
        }
        if request.after < upto {
            let range = (request.after, upto);
            let read = self.hub.read_records_of(&self.wal, &self.reads, range, moved);
            found.records = read.await?;
        } else if let Some(split) = &split {
            let offset = usize::try_from(request.state_offset).unwrap_or(usize::MAX);
            let end = split.state.len().min(offset.saturating_add(STATE_BYTES));
            found.state_bytes = split.state.len() as u64;
            found.state = split.state.get(offset..end).unwrap_or_default().to_vec();
        }
        Ok(found)
    }

    /// Returns the streams that a split moves, from the cluster's state in which it is in progress.
    /// `compute` is called once for each split, since a shard may have a million partitions. The
    /// result holds until the split ends: new partitions have ids above those of the split.
    ///
    /// # Errors
    /// The error of `compute`.
    pub fn split_streams<E>(
        &self,
        id: u64,
        compute: impl FnOnce() -> std::result::Result<HashSet<u64>, E>,
    ) -> std::result::Result<Arc<HashSet<u64>>, E> {
        let mut known = sync::lock(&self.split_streams);
        if let Some((_, streams)) = known.as_ref().filter(|(of, _)| *of == id) {
            return Ok(streams.clone());
        }
        let streams = Arc::new(compute()?);
        *known = Some((id, streams.clone()));
        Ok(streams)
    }

    /// Proposes a control entry while no other proposal is open, and waits until it is applied.
    ///
    /// Acknowledgements before apply are then given to no batch that this entry refuses.
    ///
    /// # Errors
    /// As [`Shard::command`].
    pub async fn command_alone(&self, command: ShardCommand) -> Result<()> {
        let command = Command::control(Head::Shard(command));
        let wait = crate::limits::COMMIT_WAIT_MAX;
        let proposed = tokio::time::timeout(wait, self.replica.propose_alone(command)).await;
        match proposed {
            Ok(Ok(Verdict::Refused(refusal))) => Err(refusal.into()),
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(self.propose_error(error)),
            Err(_) => {
                Err(Error::OutcomeUnknown { reason: format!("not committed within {wait:?}") })
            }
        }
    }
}
