//! Obstacles: reasons why a replica, a move or a split makes no progress, with a stable name,
//! numbers and the next step.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use super::members::Members;

/// Name of the obstacle of shards that wait for others.
const OTHER_SHARDS_FIRST: &str = "OTHER_SHARDS_FIRST";

/// Maximum number of nodes or shards that an obstacle names.
const LISTED_MAX: usize = 5;

/// Reason why a replica, a move or a split makes no progress.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Obstacle {
    /// Stable name, such as `NODE_UNREACHABLE`. Empty from nodes of earlier versions.
    pub code: String,
    /// Cause, with numbers. Empty if nothing is in the way.
    pub what: String,
    /// Suggested step for the operator.
    pub next_step: String,
}

impl Obstacle {
    pub(super) fn new(code: &str, what: impl Into<String>, next_step: impl Into<String>) -> Self {
        Self { code: code.to_owned(), what: what.into(), next_step: next_step.into() }
    }

    pub fn is_none(&self) -> bool {
        self.what.is_empty()
    }

    pub(super) fn unreachable(node: u64) -> Self {
        Self::new(
            "NODE_UNREACHABLE",
            format!("node {node} cannot be reached"),
            format!(
                "start node {node}, or run `helix cluster cancel-move` for the shard; if the node \
                 will not return, replace or remove it"
            ),
        )
    }

    pub(super) fn not_created(node: u64, is_reachable: bool) -> Self {
        if !is_reachable {
            return Self::unreachable(node);
        }
        Self::new(
            "REPLICA_NOT_CREATED",
            format!("node {node} has not created its replica yet"),
            format!("read the log of node {node}: it says why it cannot create the replica"),
        )
    }

    pub(super) fn no_space(node: u64, why: &str, bytes: u64) -> Self {
        Self::new(
            "NO_SPACE",
            format!("node {node} accepts no entries: {why}; about {bytes} bytes are left to copy"),
            format!(
                "free disk space on node {node}, or run `helix cluster cancel-move` for the shard \
                 and cordon the node"
            ),
        )
    }

    pub(super) fn split_hung(pause: Duration) -> Self {
        Self::new(
            "SPLIT_HUNG",
            format!("the split was cancelled, and starts again in {} s", pause.as_secs() + 1),
            "read the logs of the nodes of the old shard and of the new one for the reason",
        )
    }

    pub(super) fn paused() -> Self {
        Self::new(
            "MOVES_PAUSED",
            "an operator has paused the moves of replicas",
            "run `helix cluster resume-moves`",
        )
    }

    pub(super) fn other_shards_first(waiting: usize) -> Self {
        let what = match waiting {
            0 => "the other shards go first".to_owned(),
            count => format!("the other shards go first: {count} of them are not done"),
        };
        Self::new(OTHER_SHARDS_FIRST, what, "wait; see the other shards")
    }

    /// Returns whether this is only a wait for other shards.
    pub(super) fn waits_for_shards(&self) -> bool {
        self.code == OTHER_SHARDS_FIRST
    }

    pub(super) fn no_leader(shard_id: u64) -> Self {
        Self::new(
            "NO_LEADER",
            format!("no node that responds leads shard {shard_id}"),
            "start the nodes with its replicas; see `helix cluster health`",
        )
    }

    pub(super) fn no_majority(found: &MajorityLack) -> Self {
        let MajorityLack { healthy, count, silent, lagging } = found;
        let needed = count / 2 + 1;
        let mut what = format!(
            "it would leave {healthy} of {count} voters reachable and caught up, {needed} are \
             needed"
        );
        if !silent.is_empty() {
            what += &format!("; nodes that do not respond: {}", list(silent));
        }
        if !lagging.is_empty() {
            what += &format!("; nodes that lag: {}", list(lagging));
        }
        let next_step = match silent.is_empty() {
            true => "wait until they have caught up; see `helix cluster shards`".to_owned(),
            false => format!("start nodes {}, or replace them", list(silent)),
        };
        Self::new("NO_MAJORITY", what, next_step)
    }

    pub(super) fn no_successor(count: usize) -> Self {
        Self::new(
            "NO_SUCCESSOR",
            format!(
                "no remaining voter can take over leadership: none of {count} is reachable and \
                 caught up"
            ),
            "wait until one has caught up; see `helix cluster shards`",
        )
    }

    pub(super) fn state_unknown(why: &str) -> Self {
        Self::new(
            "STATE_UNKNOWN",
            format!("the target replicas are unknown: {why}"),
            "see whether shard 0 has a leader: `helix cluster shards`",
        )
    }

    pub(super) fn uncommitted(why: String) -> Self {
        Self::new("NOT_COMMITTED", why, "it is repeated; if it stays, see `helix cluster health`")
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

/// Voters of a change that has no healthy majority.
#[derive(Debug)]
pub(super) struct MajorityLack {
    /// Voters that respond and are caught up.
    pub(super) healthy: usize,
    pub(super) count: usize,
    /// Nodes that do not respond.
    pub(super) silent: Vec<u64>,
    /// Nodes that respond and are not caught up.
    pub(super) lagging: Vec<u64>,
}

/// Returns a short list of numbers.
pub(super) fn list(numbers: &[u64]) -> String {
    let mut text: Vec<String> = numbers.iter().take(LISTED_MAX).map(u64::to_string).collect();
    if let Some(more) = numbers.len().checked_sub(LISTED_MAX).filter(|more| *more > 0) {
        text.push(format!("and {more} more"));
    }
    text.join(", ")
}

/// Returns how many of this many replicas may fail while a majority remains.
fn may_fail(replicas: usize) -> usize {
    replicas.saturating_sub(1) / 2
}

/// Returns why the other nodes cannot take over a node's replicas; `None` if they can.
///
/// Without the node, a shard would tolerate fewer failures, or would have a single replica left.
pub(super) fn removal_obstacle(members: &Members, node_id: u64) -> Option<Obstacle> {
    let placement = members.placement()?;
    let others: BTreeSet<u64> =
        members.iter().map(|it| it.node_id).filter(|node| *node != node_id).collect();
    let mut short = Vec::new();
    let mut worst = (0, 0);
    for (shard_id, shard) in placement.shards().filter(|(shard_id, _)| *shard_id != 0) {
        let after = shard.after();
        if !after.contains_key(&node_id) {
            continue;
        }
        let wanted = usize::try_from(placement.wanted_replicas(shard)).unwrap_or(usize::MAX);
        let stays = |node: &&u64| members.get(**node).is_some_and(|it| !it.leaving);
        let kept = others.iter().filter(|node| after.contains_key(node)).filter(stays).count();
        let free = others.iter().filter(|node| !after.contains_key(node));
        let free = free.filter(|node| members.may_hold(**node)).count();
        let (before, left) = (wanted.min(after.len()), wanted.min(kept + free));
        if may_fail(left) < may_fail(before) || left < 2 && before > 1 {
            if short.is_empty() || left < worst.0 {
                worst = (left, before);
            }
            short.push(shard_id);
        }
    }
    let first = short.first()?;
    let (left, before) = worst;
    let refusals: Vec<(u64, &'static str)> =
        others.iter().filter_map(|node| Some((*node, members.refusal_to_hold(*node)?))).collect();
    let named: Vec<String> =
        refusals.iter().take(LISTED_MAX).map(|(node, why)| format!("node {node} {why}")).collect();
    let why = match named.is_empty() {
        true => format!("{} nodes would remain", others.len()),
        false => named.join(", "),
    };
    let cordoned: Vec<u64> = refusals
        .iter()
        .filter(|(node, _)| members.get(*node).is_some_and(|it| it.cordoned))
        .map(|(node, _)| *node)
        .collect();
    let mut next_step = match cordoned.is_empty() {
        true => "add a node first".to_owned(),
        false => format!("uncordon nodes {}, or add a node first", list(&cordoned)),
    };
    if let Some(fewer) = [3, 1].into_iter().find(|fewer| *fewer <= left && *fewer < before) {
        next_step += &format!(", or run `helix cluster set-replicas {fewer}`");
    }
    next_step += ", or accept fewer replicas with --fewer-replicas";
    let what = format!(
        "node {node_id} has replicas of {} shards that no other node can take: shard {first} would \
         have {left} of {before} replicas; {why}",
        short.len()
    );
    Some(Obstacle::new("TOO_FEW_NODES", what, next_step))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_short() {
        assert_eq!(list(&[3, 4]), "3, 4");
        assert_eq!(list(&[1, 2, 3, 4, 5, 6, 7]), "1, 2, 3, 4, 5, and 2 more");
    }
}
