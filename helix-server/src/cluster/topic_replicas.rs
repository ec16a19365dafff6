//! Replication factors of topics: the shards of a new topic are those with as many replicas as it
//! asks for. If there are none, they are added.
//!
//! A topic without a wish goes to the shards that follow the cluster's number of replicas, and so
//! does a topic that asks for that number. Shards with their own number keep it.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::client::Cluster;
use super::placement::ReplicaPlacement;
use super::state::ClusterState;
use super::topic_changes::TopicSpec;
use crate::error::{Error, Result};
use crate::limits::SHARDS_MAX;
use crate::log::{AddShards, TopicInfo};

/// Longest wait until shards that were added for a topic have their replicas.
const OPENING_WAIT_MAX: Duration = Duration::from_secs(20);

/// Shards with the replication factor that a topic asks for.
#[derive(Debug, PartialEq, Eq)]
enum FactorShards {
    /// All of them take partitions.
    Open(Vec<u64>),
    /// Some of them do not have all of their replicas yet.
    Opening,
    /// There are none; this adds them.
    Missing(AddShards),
}

/// Returns the shards with a factor other than the cluster's, or how to add them: as many as there
/// are nodes that may get replicas, so that each node can lead one, and no more than partitions.
fn factor_shards(
    state: &ClusterState,
    placement: &ReplicaPlacement,
    factor: u32,
    partitions: u32,
) -> FactorShards {
    let placed: BTreeSet<u64> = placement
        .shards()
        .filter(|(id, shard)| *id != 0 && shard.replication_factor == factor)
        .map(|(id, _)| id)
        .collect();
    if !placed.is_empty() {
        let open: Vec<u64> = state.shards_with(factor).collect();
        let is_opening = open.len() < placed.len();
        return if is_opening { FactorShards::Opening } else { FactorShards::Open(open) };
    }
    let known = placement.shards().filter(|(id, _)| *id != 0).count() as u64;
    let holders = state.members().holders() as u64;
    let more = holders.min(partitions.into()).min(SHARDS_MAX.saturating_sub(known)).max(1);
    let number = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
    let (current, total) = (number(known), number(known + more));
    FactorShards::Missing(AddShards { current, total, replicas: factor, split: false })
}

impl Cluster {
    /// Returns the number of replicas that the partitions of a topic have or should have.
    pub fn replicas_of(&self, topic: &TopicInfo) -> u32 {
        let own = self.machine().read(|state| {
            topic.shards.first().map_or(0, |shard| state.replication_factor_of(*shard))
        });
        if own == 0 { self.replica_count() } else { own }
    }

    /// Returns the shards for a new topic, and adds shards if none has as many replicas as the
    /// topic asks for. With `validate_only` it adds none and returns others in their place.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the cluster cannot have so many replicas,
    /// [`Error::ChangeInProgress`] if new shards do not get their replicas in time, and the errors
    /// of [`Self::add_shards`].
    pub(super) async fn shards_for(
        &self,
        spec: &TopicSpec,
        validate_only: bool,
    ) -> Result<Vec<u64>> {
        let factor = spec.replication_factor;
        let following = || self.machine().read(|state| state.shards_with(0).collect());
        if factor == 0 || factor == self.replica_count() {
            return Ok(following());
        }
        self.check_factor(factor)?;
        let deadline = Instant::now() + OPENING_WAIT_MAX;
        let mut changes = self.machine().watch();
        loop {
            changes.mark_unchanged();
            let found = self.machine().read(|state| {
                let placement = state.members().placement()?;
                Some(factor_shards(state, placement, factor, spec.partition_count))
            });
            match found {
                Some(FactorShards::Open(shards)) => return Ok(shards),
                _ if validate_only => return Ok(following()),
                Some(FactorShards::Opening) => {}
                Some(FactorShards::Missing(add)) => match self.add_shards(add).await {
                    // Another caller has added shards: they may be these.
                    Ok(()) | Err(Error::ChangeInProgress { .. }) => {}
                    Err(error) => return Err(error),
                },
                None => {
                    let what = "a replication_factor other than the number of nodes before every \
                                node is upgraded";
                    return Err(Error::Unimplemented { what });
                }
            }
            match timeout_at(deadline, changes.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Err(Error::Draining),
                Err(_) => {
                    let what = format!(
                        "shards with {factor} replicas do not have them all yet; \
                         `helix cluster placement --explain` shows why"
                    );
                    return Err(Error::ChangeInProgress { what });
                }
            }
        }
    }

    /// Checks that the cluster can have shards with this many replicas.
    fn check_factor(&self, factor: u32) -> Result<()> {
        let field = "replication_factor";
        if ![1, 3, 5].contains(&factor) {
            let what = format!("{factor} is not one of 1, 3 and 5");
            return Err(Error::InvalidArgument { field, what });
        }
        let holders = self.machine().read(|state| match state.members().placement() {
            Some(_) => state.members().holders(),
            None => self.nodes().len(),
        });
        if holders < factor as usize {
            let what = format!(
                "{factor} is above the number of nodes that may get a replica, {holders}; add \
                 nodes, or ask for fewer replicas"
            );
            return Err(Error::InvalidArgument { field, what });
        }
        Ok(())
    }
}
