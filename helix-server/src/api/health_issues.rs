//! Issues in the health of the cluster, as one node sees them.

use helix_proto::log::v1::{GetHealthResponse, HealthIssue, HealthReason};

use super::{member_changes, wire_shard_id};
use crate::clock::{CLOCK_CONFIRMATION, Clock, ClockOffset};
use crate::error::Error;
use crate::limits::BEHIND_LAG_MAX;
use crate::node::{Node, NodeTls, PeerStatus};
use crate::shard::{AheadPartitions, FetchProgress, Shard};

/// Returns the health of the cluster, as this node sees it.
pub(super) fn collect(node: &Node) -> GetHealthResponse {
    let mut issues = Vec::new();
    let peers = node.peers();
    if node.shutdown_token().is_cancelled() {
        issues.push(HealthIssue {
            reason: HealthReason::Draining.into(),
            message: format!("node {} is shutting down", node.info().node_id),
            ..HealthIssue::default()
        });
    }
    issues.extend(member_changes::issues(node));
    issues.extend(clock_issues(node));
    issues.extend(future_time_issues(node));
    issues.extend(cleanup_issues(node));
    let lost: Vec<&PeerStatus> = peers.iter().filter(|peer| !peer.connected).collect();
    issues.extend(lost.iter().map(|peer| node_down(peer)));
    let lost: Vec<u64> = lost.iter().map(|peer| peer.node_id).collect();
    let registered: Vec<u64> = node.nodes().iter().map(|it| it.node_id).collect();
    issues.extend(unregistered(&node.cluster().nodes(), &registered, &lost));
    issues.extend(leaderless(0, node.cluster().leader_hint().is_some(), &lost));
    let node_id = node.cluster().node_id();
    let own_damage = node.cluster().replica().damage();
    issues.extend(damage_issues(0, node_id, own_damage, node.repair_progress(0)));
    for shard in node.shards() {
        let progress = node.repair_progress(shard.id());
        issues.extend(shard_issues(node, &shard, &lost, progress));
    }
    issues.extend(node.damaged_shards().into_iter().map(|(shard, what)| HealthIssue {
        reason: HealthReason::CorruptLog.into(),
        shard_id: Some(wire_shard_id(shard)),
        message: format!("shard {shard} is quarantined: {what}"),
        ..HealthIssue::default()
    }));
    issues.extend(node.in_repair().into_iter().map(|(shard, what)| HealthIssue {
        reason: HealthReason::CorruptLog.into(),
        shard_id: Some(wire_shard_id(shard)),
        needed_node_ids: vec![node_id],
        message: format!("shard {shard} is being repaired and does not vote: {what}"),
    }));
    issues.extend(node.stopped().into_iter().map(|(shard, what)| HealthIssue {
        reason: HealthReason::StorageFailed.into(),
        shard_id: Some(wire_shard_id(shard)),
        needed_node_ids: vec![node_id],
        message: format!("shard {shard} has stopped and will restart: {what}"),
    }));
    let warnings = node.tls().map(NodeTls::warnings).unwrap_or_default();
    issues.extend(warnings.into_iter().map(|what| HealthIssue {
        reason: HealthReason::Certificate.into(),
        shard_id: None,
        needed_node_ids: vec![node_id],
        message: format!("node {node_id}: {what}"),
    }));
    let jwks_error = node.jwt().and_then(|verifier| verifier.status().error);
    issues.extend(jwks_error.into_iter().map(|what| HealthIssue {
        reason: HealthReason::JwtKeys.into(),
        shard_id: None,
        needed_node_ids: vec![node_id],
        message: format!(
            "node {node_id}: the new JWT keys are not valid, the ones before are in use: {what}"
        ),
    }));
    GetHealthResponse { healthy: issues.is_empty(), issues }
}

/// Returns the issues of clocks that are off.
fn clock_issues(node: &Node) -> Vec<HealthIssue> {
    let issue = |node_id: u64, message: String| HealthIssue {
        reason: HealthReason::ClockSkew.into(),
        shard_id: None,
        needed_node_ids: vec![node_id],
        message,
    };
    let clock = node.clock();
    let off = clock.offsets().into_iter().filter(ClockOffset::is_off);
    let mut issues: Vec<HealthIssue> = off
        .map(|ClockOffset { node_id, offset_us }| {
            let seconds = offset_us.unsigned_abs() / 1_000_000;
            let direction = if offset_us > 0 { "ahead of" } else { "behind" };
            let what = "the time that a majority has reached";
            issue(node_id, format!("the clock of node {node_id} is {seconds} s {direction} {what}"))
        })
        .collect();
    if clock.has_jumped() {
        let (node_id, minutes) = (node.info().node_id, CLOCK_CONFIRMATION.as_secs() / 60);
        issues.push(issue(
            node_id,
            format!(
                "the clock of node {node_id} has jumped; retention by time waits until it has \
                 been steady for {minutes} min"
            ),
        ));
    }
    issues
}

/// Returns an issue for each shard whose newest records have times that are far in the future.
///
/// A node that starts with a wrong clock stamps them. Append times never decrease, so all later
/// records of the partitions get these times too.
fn future_time_issues(node: &Node) -> Vec<HealthIssue> {
    let now_us = node.clock().now_us();
    let issue = |shard: &Shard| {
        let AheadPartitions { count, topic_id, number, ahead } = shard.ahead_of(now_us)?;
        let shard_id = wire_shard_id(shard.id());
        let time = match ahead.as_secs() {
            seconds if seconds < 2 * 3600 => format!("{} min", seconds / 60),
            seconds if seconds < 2 * 86_400 => format!("{} h", seconds / 3600),
            seconds => format!("{} days", seconds / 86_400),
        };
        Some(HealthIssue {
            reason: HealthReason::ClockSkew.into(),
            shard_id: Some(shard_id),
            needed_node_ids: Vec::new(),
            message: format!(
                "the newest append time of {count} partitions of shard {shard_id} is up to {time} \
                 in the future (topic id {topic_id}, partition {number}): a clock was wrong when \
                 they were appended, or is now; later records get that time too, and retention by \
                 time keeps them as much longer"
            ),
        })
    };
    node.shards().iter().filter_map(|shard| issue(shard)).collect()
}

/// Returns an issue for each shard with partitions that this node cannot compact by key.
fn cleanup_issues(node: &Node) -> Vec<HealthIssue> {
    let node_id = node.info().node_id;
    let issue = |shard: &Shard| {
        let uncleanable = shard.uncleanable();
        let (partition, why) = uncleanable.first()?;
        let (count, shard_id) = (uncleanable.len(), wire_shard_id(shard.id()));
        Some(HealthIssue {
            reason: HealthReason::Uncleanable.into(),
            shard_id: Some(shard_id),
            needed_node_ids: Vec::new(),
            message: format!(
                "node {node_id} cannot compact {count} partitions of shard {shard_id} by key; \
                 partition id {partition}: {why}"
            ),
        })
    };
    node.shards().iter().filter_map(|shard| issue(shard)).collect()
}

fn node_down(peer: &PeerStatus) -> HealthIssue {
    let why = peer.last_error.as_deref().unwrap_or("not connected yet");
    HealthIssue {
        reason: HealthReason::NodeDown.into(),
        shard_id: None,
        needed_node_ids: vec![peer.node_id],
        message: format!("node {} at {} is unreachable: {why}", peer.node_id, peer.address),
    }
}

/// Returns an issue for each voter that has no address for clients yet. Unreachable voters have an
/// issue already.
fn unregistered(voters: &[u64], registered: &[u64], lost: &[u64]) -> Vec<HealthIssue> {
    let missing = voters.iter().filter(|id| !registered.contains(id) && !lost.contains(id));
    let issue = |node_id: &u64| HealthIssue {
        reason: HealthReason::NodeDown.into(),
        shard_id: None,
        needed_node_ids: vec![*node_id],
        message: format!("node {node_id} is starting and has not registered an address yet"),
    };
    missing.map(issue).collect()
}

/// Returns the issue of a shard without a leader, which needs the unreachable nodes back.
fn leaderless(shard_id: u64, has_leader: bool, lost: &[u64]) -> Option<HealthIssue> {
    let shard_id = wire_shard_id(shard_id);
    (!has_leader).then(|| HealthIssue {
        reason: HealthReason::NoLeader.into(),
        shard_id: Some(shard_id),
        needed_node_ids: lost.to_vec(),
        message: format!("shard {shard_id} has no known leader, appends fail"),
    })
}

/// Returns the issue of replicas that are behind; only the leader knows them.
fn under_replicated(shard: &Shard) -> Option<HealthIssue> {
    let behind: Vec<(u64, u64)> =
        shard.lags().into_iter().filter(|(_, lag)| *lag > BEHIND_LAG_MAX).collect();
    if behind.is_empty() {
        return None;
    }
    let shard_id = wire_shard_id(shard.id());
    let last = shard.status().last_index;
    let nodes = behind.iter().map(|(node, lag)| behind_message(*node, *lag, last));
    let nodes: Vec<String> = nodes.collect();
    Some(HealthIssue {
        reason: HealthReason::UnderReplicated.into(),
        shard_id: Some(shard_id),
        needed_node_ids: behind.iter().map(|(node, _)| *node).collect(),
        message: format!("shard {shard_id}: {}", nodes.join(", ")),
    })
}

/// Describes a replica that is behind a leader whose log ends with entry `last`.
fn behind_message(node: u64, lag: u64, last: u64) -> String {
    match lag {
        // A leader counts from zero until a replica confirms its first entry.
        _ if lag >= last => format!("node {node} has confirmed nothing since the last election"),
        1 => format!("node {node} lacks 1 entry"),
        _ => format!("node {node} lacks {lag} entries"),
    }
}

/// Returns the issue of this replica if it fetches records that the other logs have purged.
fn fetching(shard: &Shard, node_id: u64) -> Option<HealthIssue> {
    let FetchProgress { bytes_done, bytes_total, waits_for, .. } = shard.fetching()?;
    let shard_id = wire_shard_id(shard.id());
    let waits_for = waits_for.map(|what| format!("; waiting: {what}")).unwrap_or_default();
    Some(HealthIssue {
        reason: HealthReason::UnderReplicated.into(),
        shard_id: Some(shard_id),
        needed_node_ids: vec![node_id],
        message: format!(
            "shard {shard_id}: node {node_id} is fetching, {bytes_done} of {bytes_total} \
             bytes{waits_for}"
        ),
    })
}

fn shard_issues(
    node: &Node,
    shard: &Shard,
    lost: &[u64],
    repair: Option<String>,
) -> impl Iterator<Item = HealthIssue> {
    let node_id = node.cluster().node_id();
    let no_leader = leaderless(shard.id(), !node.lacks_leader(shard), lost);
    let behind = under_replicated(shard);
    let write_error = shard.write_error().map(|error| {
        let reason = match &error {
            Error::DiskFull { .. } => HealthReason::DiskFull,
            Error::CorruptLog { .. } => HealthReason::CorruptLog,
            _ => HealthReason::StorageFailed,
        };
        (reason, error.to_string())
    });
    let shard_id = wire_shard_id(shard.id());
    let write_error = write_error.map(move |(reason, what)| HealthIssue {
        reason: reason.into(),
        shard_id: Some(shard_id),
        needed_node_ids: vec![node_id],
        message: format!("shard {shard_id}: {what}"),
    });
    let damage = damage_issues(shard.id(), node_id, shard.damage(), repair);
    let fetching = fetching(shard, node_id);
    let behind = behind.into_iter().chain(fetching);
    no_leader.into_iter().chain(behind).chain(write_error).chain(damage)
}

/// Returns the issues of damage that a replica of this node withholds and repairs.
fn damage_issues(
    shard_id: u64,
    node_id: u64,
    damage: Vec<String>,
    repair: Option<String>,
) -> impl Iterator<Item = HealthIssue> {
    let shard_id = wire_shard_id(shard_id);
    damage.into_iter().map(move |what| HealthIssue {
        reason: HealthReason::CorruptLog.into(),
        shard_id: Some(shard_id),
        needed_node_ids: vec![node_id],
        message: damage_message(shard_id, &what, repair.as_deref()),
    })
}

/// Describes damage that a replica withholds and repairs in place.
fn damage_message(shard_id: u32, what: &str, repair: Option<&str>) -> String {
    let repair = repair.unwrap_or("it is repaired in place, nothing needs to be done");
    format!("shard {shard_id} does not serve a damaged range: {what}; {repair}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn voter_without_an_address_is_an_issue() {
        let needed = |registered: &[u64], lost: &[u64]| -> Vec<u64> {
            let issues = unregistered(&[1, 2, 3], registered, lost);
            issues.iter().flat_map(|issue| issue.needed_node_ids.clone()).collect()
        };
        assert_eq!(needed(&[1, 2, 3], &[]), Vec::<u64>::new());
        assert_eq!(needed(&[1, 2], &[]), [3]);
        assert_eq!(needed(&[1], &[3]), [2]);
        assert_eq!(needed(&[1, 2, 3, 4], &[]), Vec::<u64>::new());
    }

    #[test]
    fn lag_is_what_a_replica_lacks_not_the_length_of_the_log() {
        assert_eq!(behind_message(2, 1, 9_000), "node 2 lacks 1 entry");
        assert_eq!(behind_message(2, 700, 9_000), "node 2 lacks 700 entries");
        let unknown = "node 2 has confirmed nothing since the last election";
        assert_eq!(behind_message(2, 9_000, 9_000), unknown);
    }
}
