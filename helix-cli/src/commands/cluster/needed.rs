//! The nodes that must return before a shard can have a leader again.

use std::time::Duration;

use tokio::time::timeout;

use super::snapshot::ClusterSnapshot;
use crate::args::GlobalArgs;

/// Limit of the requests that look for the nodes after a failure.
const LOOK_UP_MAX: Duration = Duration::from_secs(3);

/// Limit of each request; a slower node counts as down.
const ANSWER_MAX: Duration = Duration::from_millis(800);

/// The nodes of a shard of which some must return.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NeededNodes {
    pub(crate) shard_id: u32,
    /// Number of `lost` nodes that suffice.
    count: usize,
    /// Voters that do not answer.
    pub(crate) lost: Vec<u64>,
}

impl NeededNodes {
    /// Returns what is needed for each shard that has too few voters for a leader.
    pub(crate) fn of(snapshot: &ClusterSnapshot) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for shard in snapshot.shard_routes().into_values() {
            let voters = shard.replicas.iter().filter(|node| !shard.learners.contains(node));
            let voters: Vec<u64> = voters.copied().collect();
            // A shard that is still being formed has no voters; then no node is known to be needed.
            if voters.is_empty() {
                continue;
            }
            let lost = voters.iter().copied().filter(|node| !snapshot.is_reachable(*node));
            let mut lost: Vec<u64> = lost.collect();
            lost.sort_unstable();
            let majority = voters.len() / 2 + 1;
            let count = (majority + lost.len()).saturating_sub(voters.len());
            if count > 0 {
                all.push(Self { shard_id: shard.shard_id, count, lost });
            }
        }
        all
    }

    /// Returns "node 2 is needed" or "either of 2, 3 is needed".
    pub(crate) fn text(&self) -> String {
        let list = list(&self.lost);
        match (self.count, self.lost.len()) {
            (1, 1) => format!("node {list} is needed"),
            (count, lost) if count == lost => format!("nodes {list} are needed"),
            (1, _) => format!("either of {list} is needed"),
            (count, _) => format!("{count} of the nodes {list} are needed"),
        }
    }

    /// Describes the shards and what each needs; shards that need the same are named together.
    pub(crate) fn describe(all: &[Self]) -> Option<String> {
        let mut texts: Vec<(String, Vec<u64>)> = Vec::new();
        for needed in all {
            let text = needed.text();
            match texts.iter_mut().find(|(known, _)| *known == text) {
                Some((_, shards)) => shards.push(needed.shard_id.into()),
                None => texts.push((text, vec![needed.shard_id.into()])),
            }
        }
        let line = |(text, shards): &(String, Vec<u64>)| match shards.as_slice() {
            [shard] => format!("shard {shard} has no majority; {text}"),
            shards => format!("the shards {} have no majority; {text}", list(shards)),
        };
        let lines: Vec<_> = texts.iter().map(line).collect();
        (!lines.is_empty()).then(|| lines.join("\n"))
    }
}

/// Asks the nodes which of them are needed, after a failure that a lost majority may explain.
pub(crate) async fn look_up(global: &GlobalArgs) -> Option<String> {
    // The command has used its --timeout up; a short one leaves little time for this.
    let limit = global.timeout.map_or(LOOK_UP_MAX, |timeout| timeout.min(LOOK_UP_MAX));
    let snapshot =
        timeout(limit, ClusterSnapshot::take_within(global, ANSWER_MAX)).await.ok()?.ok()?;
    NeededNodes::describe(&NeededNodes::of(&snapshot))
}

/// Returns numbers separated by commas.
pub(crate) fn list(numbers: &[u64]) -> String {
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::snapshot::tests::snapshot;
    use super::*;

    fn needed(count: usize, lost: &[u64]) -> NeededNodes {
        NeededNodes { shard_id: 1, count, lost: lost.to_vec() }
    }

    #[test]
    fn says_which_nodes_suffice() {
        for (count, lost, text) in [
            (1, &[2][..], "node 2 is needed"),
            (1, &[2, 3], "either of 2, 3 is needed"),
            (2, &[2, 3], "nodes 2, 3 are needed"),
            (2, &[3, 4, 5], "2 of the nodes 3, 4, 5 are needed"),
        ] {
            assert_eq!(needed(count, lost).text(), text);
        }
        let other = NeededNodes { shard_id: 2, ..needed(1, &[2, 3]) };
        let described = NeededNodes::describe(&[needed(1, &[2, 3]), other]).unwrap();
        assert_eq!(described, "the shards 1, 2 have no majority; either of 2, 3 is needed");
        assert_eq!(NeededNodes::describe(&[]), None);
    }

    #[test]
    fn shard_without_voters_needs_no_node() {
        let mut snapshot = snapshot();
        for node in &mut snapshot.nodes {
            let Ok(report) = &mut node.report else { continue };
            report.metadata.shards.iter_mut().for_each(|shard| shard.replicas.clear());
        }
        assert_eq!(NeededNodes::of(&snapshot), []);
    }
}
