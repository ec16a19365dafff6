//! Checks before `helix cluster remove-node` and `replace-node`: obstacles, losses of redundancy.
//! The service checks that a majority remains; these checks are about redundancy and mistakes.

use super::members::{self, RequestedChange};
use super::snapshot::ClusterSnapshot;
use crate::args::GlobalArgs;
use crate::commands::confirm::confirm;
use crate::exit::{CliError, Exit};

/// A requested removal.
#[derive(Debug, Clone, Copy)]
pub(super) struct Removal {
    pub(super) node: u64,
    pub(super) lost: bool,
    pub(super) force: bool,
    /// The other nodes need not take its replicas.
    pub(super) fewer_replicas: bool,
    pub(super) yes: bool,
}

/// Effect of a removal on the number of nodes that may fail.
#[derive(Debug, PartialEq, Eq)]
struct RedundancyLoss {
    remaining: usize,
    may_fail_before: usize,
    may_fail_after: usize,
}

impl RedundancyLoss {
    /// Returns the loss if one of `count` nodes is removed. None if redundancy stays as it is.
    fn of(count: usize) -> Option<Self> {
        let remaining = count.checked_sub(1).filter(|remaining| *remaining > 0)?;
        let may_fail = |nodes: usize| nodes.saturating_sub(1) / 2;
        let (may_fail_before, may_fail_after) = (may_fail(count), may_fail(remaining));
        let is_even = remaining % 2 == 0;
        (is_even || may_fail_after < may_fail_before || remaining == 1).then_some(Self {
            remaining,
            may_fail_before,
            may_fail_after,
        })
    }

    fn text(&self) -> String {
        let Self { remaining, may_fail_before: before, may_fail_after: after } = self;
        let nodes =
            if *remaining == 1 { "1 node".to_owned() } else { format!("{remaining} nodes") };
        match (remaining, after) {
            (1, _) => format!("{nodes} remains, and it has the only copy of all records"),
            (_, 0) => format!("{nodes} remain, and none of them may fail; before, {before} could"),
            _ => format!("{nodes} remain, of which {after} may fail; before, {before} could"),
        }
    }
}

impl Removal {
    /// Refuses to remove a node as lost that answers, and asks before redundancy is lost.
    pub(super) async fn check(self, global: &GlobalArgs) -> anyhow::Result<()> {
        let snapshot = ClusterSnapshot::take(global).await?;
        if self.is_alive(&snapshot) && !self.force {
            let hint = format!(
                "helix cluster remove-node {node}   moves everything away first\n\
                 helix cluster remove-node {node} --lost --force   if only some nodes reach it",
                node = self.node
            );
            return Err(not_lost(self.node).hint(hint).into());
        }
        match self.redundancy_loss(&snapshot) {
            Some(loss) if !self.yes => {
                let what = format!("without node {}, {}", self.node, loss.text());
                confirm("node", &self.node.to_string(), &what).await
            }
            _ => Ok(()),
        }
    }

    /// Reports everything that is in the way.
    ///
    /// # Errors
    /// Fails if the service or a check would refuse the removal.
    pub(super) async fn dry_run(self, global: &GlobalArgs) -> anyhow::Result<()> {
        let snapshot = ClusterSnapshot::take(global).await?;
        let mut obstacles = Vec::new();
        let mut verdict = Ok(());
        if self.is_alive(&snapshot) && !self.force {
            obstacles.push(format!("node {} answers, so --lost needs --force", self.node));
            verdict = Err(not_lost(self.node).into());
        }
        if let Some(loss) = self.redundancy_loss(&snapshot) {
            obstacles.push(format!("{}; this needs a confirmation or --yes", loss.text()));
        }
        let (node_id, lost, fewer_replicas) = (self.node, self.lost, self.fewer_replicas);
        let requested = RequestedChange::Remove { node_id, lost, fewer_replicas };
        members::dry_run(global, &snapshot, requested, obstacles, verdict).await
    }

    /// Returns true if the node is declared lost, but answers.
    fn is_alive(self, snapshot: &ClusterSnapshot) -> bool {
        self.lost && snapshot.is_reachable(self.node)
    }

    fn redundancy_loss(self, snapshot: &ClusterSnapshot) -> Option<RedundancyLoss> {
        let metadata = snapshot.metadata()?;
        let is_member =
            |id: u64| metadata.nodes.iter().any(|node| node.node_id == id && !node.leaving);
        let count = metadata.nodes.iter().filter(|node| !node.leaving).count();
        is_member(self.node).then(|| RedundancyLoss::of(count)).flatten()
    }
}

/// A requested replacement of a lost node.
#[derive(Debug, Clone, Copy)]
pub(super) struct Replacement {
    pub(super) node: u64,
    /// None for the same id with an empty data directory; the service checks that.
    pub(super) by: Option<u64>,
    pub(super) force: bool,
}

impl Replacement {
    /// Refuses to replace a node that answers by another one.
    pub(super) async fn check(self, global: &GlobalArgs) -> anyhow::Result<()> {
        if !self.may_be_refused() || !self.is_refused(&ClusterSnapshot::take(global).await?) {
            return Ok(());
        }
        let hint = format!(
            "helix cluster add-node, then helix cluster remove-node {node}   moves everything \
             away\nhelix cluster replace-node {node} --force ...   if only some nodes reach it",
            node = self.node
        );
        Err(not_lost(self.node).hint(hint).into())
    }

    /// Reports everything that is in the way.
    ///
    /// # Errors
    /// Fails if the service or a check would refuse the replacement.
    pub(super) async fn dry_run(
        self,
        global: &GlobalArgs,
        requested: RequestedChange<'_>,
    ) -> anyhow::Result<()> {
        let snapshot = ClusterSnapshot::take(global).await?;
        let (mut obstacles, mut verdict) = (Vec::new(), Ok(()));
        if self.is_refused(&snapshot) {
            obstacles.push(format!("node {} answers, so this needs --force", self.node));
            verdict = Err(not_lost(self.node).into());
        }
        members::dry_run(global, &snapshot, requested, obstacles, verdict).await
    }

    fn may_be_refused(self) -> bool {
        !self.force && self.by.is_some_and(|by| by != self.node)
    }

    fn is_refused(self, snapshot: &ClusterSnapshot) -> bool {
        self.may_be_refused() && snapshot.is_reachable(self.node)
    }
}

/// Returns the refusal to treat a node that answers as lost.
fn not_lost(node: u64) -> CliError {
    let failure =
        CliError::new(Exit::Precondition, format!("node {node} answers, so it is not lost"));
    failure.why("a node that is removed as lost does not hand over its leaderships and records")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asks_where_redundancy_is_lost() {
        let loss =
            |count| RedundancyLoss::of(count).map(|loss| (loss.remaining, loss.may_fail_after));
        let losses: Vec<_> = (1..=6).map(loss).collect();
        assert_eq!(losses, [None, Some((1, 0)), Some((2, 0)), None, Some((4, 1)), None]);
        let text = RedundancyLoss::of(3).unwrap().text();
        assert_eq!(text, "2 nodes remain, and none of them may fail; before, 1 could");
        assert!(RedundancyLoss::of(2).unwrap().text().contains("only copy"));
    }
}
