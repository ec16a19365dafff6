//! Results of `helix cluster info`, `nodes` and `shards`, computed from a snapshot.
//! Unknown values are absent, never zero.

use std::collections::BTreeSet;

use helix_client::proto::log::v1::{GetNodeStatusResponse, LeaderHint};
use schemars::JsonSchema;
use serde::Serialize;

use super::snapshot::ClusterSnapshot;
use crate::api_duration::ApiDuration;

/// Summary of the cluster.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ClusterInfo {
    cluster_id: String,
    node_count: usize,
    reachable_nodes: usize,
    shard_count: usize,
    /// Shards with a leader.
    led_shards: usize,
    topic_count: Option<u64>,
    partition_count: Option<u64>,
    nodes: Vec<NodeLeadership>,
}

/// Leaderships of a node.
#[derive(Debug, Serialize, JsonSchema)]
struct NodeLeadership {
    node_id: u64,
    endpoint: String,
    is_reachable: bool,
    shards_led: usize,
    partitions_led: u64,
}

/// A node and its status.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct NodeRow {
    node_id: u64,
    endpoint: String,
    is_reachable: bool,
    #[schemars(extend("x-wide" = true))]
    version: Option<String>,
    /// Protocol version that the cluster uses, as this node knows it.
    #[schemars(extend("x-wide" = true))]
    protocol_version: Option<u32>,
    /// Newest protocol version that the node speaks.
    #[schemars(extend("x-wide" = true))]
    newest_protocol_version: Option<u32>,
    draining: bool,
    shards_led: usize,
    #[schemars(extend("x-wide" = true))]
    storage: Option<String>,
    #[schemars(extend("x-wide" = true))]
    sync_p50: Option<ApiDuration>,
    sync_p99: Option<ApiDuration>,
    free_bytes: Option<u64>,
    #[schemars(extend("x-wide" = true))]
    rss_bytes: Option<u64>,
    #[schemars(extend("x-wide" = true))]
    uptime: Option<ApiDuration>,
    /// Error of a node that does not answer, or that refuses the caller.
    failure: Option<String>,
}

/// A replica of a shard.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct ReplicaRow {
    shard_id: u32,
    /// Node id of the shard's leader.
    leader: Option<u64>,
    node_id: u64,
    /// None if the node answers but does not report this replica.
    role: Option<&'static str>,
    #[schemars(extend("x-wide" = true))]
    term: Option<u64>,
    #[schemars(extend("x-wide" = true))]
    last_index: Option<u64>,
    synced_index: Option<u64>,
    committed_index: Option<u64>,
    #[schemars(extend("x-wide" = true))]
    applied_index: Option<u64>,
    /// Committed entries that this replica has not synced.
    lag: Option<u64>,
    #[schemars(extend("x-wide" = true))]
    partition_count: Option<u32>,
    #[schemars(extend("x-wide" = true))]
    live_bytes: Option<u64>,
    #[schemars(extend("x-wide" = true))]
    held_bytes: Option<u64>,
    /// Bytes of missing records that it has fetched. None if it lacks none.
    fetched_bytes: Option<u64>,
    /// Estimated total of bytes to fetch.
    total_bytes: Option<u64>,
}

pub(crate) fn info(snapshot: &ClusterSnapshot) -> ClusterInfo {
    let leaders = snapshot.leaders();
    let metadata = snapshot.metadata();
    let (topic_count, partition_count) = snapshot.topic_counts();
    let leadership = |node: &super::snapshot::NodeSnapshot| {
        let id = node.node_id;
        let is_led =
            |leader: &Option<LeaderHint>| leader.as_ref().is_some_and(|it| it.node_id == id);
        let led = || leaders.iter().filter(|(_, leader)| is_led(leader)).map(|(shard, _)| *shard);
        NodeLeadership {
            node_id: id,
            endpoint: node.endpoint.clone(),
            is_reachable: node.has_answered(),
            shards_led: led().count(),
            partitions_led: led().map(|shard| snapshot.partitions_of(shard, Some(id))).sum(),
        }
    };
    let shares = snapshot.nodes.iter().map(leadership);
    ClusterInfo {
        cluster_id: metadata.map(|metadata| metadata.cluster_id.clone()).unwrap_or_default(),
        node_count: snapshot.nodes.len(),
        reachable_nodes: snapshot.nodes.iter().filter(|node| node.has_answered()).count(),
        shard_count: leaders.len(),
        led_shards: leaders.values().flatten().count(),
        topic_count,
        partition_count,
        nodes: shares.collect(),
    }
}

pub(crate) fn nodes(snapshot: &ClusterSnapshot) -> Vec<NodeRow> {
    let leaders: Vec<LeaderHint> = snapshot.leaders().into_values().flatten().collect();
    let is_draining = |node_id| {
        let nodes = snapshot.metadata().map(|it| it.nodes.as_slice()).unwrap_or_default();
        nodes.iter().any(|node| node.node_id == node_id && (node.draining || node.leaving))
    };
    let row = |node: &super::snapshot::NodeSnapshot| {
        let status = node.report.as_ref().ok().map(|report| &report.status);
        let time = |of: fn(&GetNodeStatusResponse) -> Option<prost_types::Duration>| {
            status.and_then(of).and_then(ApiDuration::new)
        };
        NodeRow {
            node_id: node.node_id,
            endpoint: node.endpoint.clone(),
            is_reachable: node.has_answered(),
            version: status.map(|status| status.version.clone()),
            protocol_version: status.and_then(|status| status.protocol_version),
            newest_protocol_version: status.and_then(|status| status.newest_protocol_version),
            draining: is_draining(node.node_id),
            shards_led: leaders.iter().filter(|leader| leader.node_id == node.node_id).count(),
            storage: status.map(|status| status.storage.clone()),
            sync_p50: time(|status| status.sync_p50),
            sync_p99: time(|status| status.sync_p99),
            free_bytes: status.map(|status| status.free_bytes),
            rss_bytes: status.map(|status| status.rss_bytes),
            uptime: time(|status| status.uptime),
            failure: node.report.as_ref().err().map(|error| error.message.clone()),
        }
    };
    snapshot.nodes.iter().map(row).collect()
}

pub(crate) fn shards(snapshot: &ClusterSnapshot) -> Vec<ReplicaRow> {
    let mut rows = Vec::new();
    for (shard_id, leader) in snapshot.leaders() {
        let leader = leader.map(|leader| leader.node_id);
        let replicas = replicas(snapshot, shard_id);
        let statuses = replicas.iter().filter_map(|node_id| snapshot.replica(shard_id, *node_id));
        let committed = statuses.map(|status| status.committed_index).max().unwrap_or_default();
        for node_id in replicas {
            let status = snapshot.replica(shard_id, node_id);
            let fetching = status.and_then(|status| status.fetching.as_ref());
            rows.push(ReplicaRow {
                shard_id,
                leader,
                node_id,
                role: match status {
                    _ if !snapshot.is_reachable(node_id) => Some("unreachable"),
                    _ if leader == Some(node_id) => Some("leader"),
                    Some(_) if fetching.is_some() => Some("fetching"),
                    Some(_) if is_learner(snapshot, shard_id, node_id) => Some("learner"),
                    Some(_) => Some("follower"),
                    None => None,
                },
                term: status.map(|status| status.term),
                last_index: status.map(|status| status.last_index),
                synced_index: status.map(|status| status.synced_index),
                committed_index: status.map(|status| status.committed_index),
                applied_index: status.map(|status| status.applied_index),
                lag: status.map(|status| committed.saturating_sub(status.synced_index)),
                partition_count: status.map(|status| status.partition_count),
                live_bytes: status.map(|status| status.live_bytes),
                held_bytes: status.map(|status| status.held_bytes),
                fetched_bytes: fetching.map(|fetching| fetching.fetched_bytes),
                total_bytes: fetching.map(|fetching| fetching.total_bytes),
            });
        }
    }
    rows
}

/// Returns the nodes with a replica of the shard: those in any metadata, and those that report one.
fn replicas(snapshot: &ClusterSnapshot, shard_id: u32) -> BTreeSet<u64> {
    let routes = snapshot.reports().flat_map(|(_, report)| &report.metadata.shards);
    let listed = routes.filter(|route| route.shard_id == shard_id);
    let listed = listed.flat_map(|route| &route.replicas).copied();
    let reporting = snapshot.nodes.iter().map(|node| node.node_id);
    listed
        .chain(reporting.filter(|node_id| snapshot.replica(shard_id, *node_id).is_some()))
        .collect()
}

/// Returns true if any metadata lists a node's replica as a learner, which does not vote yet.
fn is_learner(snapshot: &ClusterSnapshot, shard_id: u32, node_id: u64) -> bool {
    let mut routes = snapshot.reports().flat_map(|(_, report)| &report.metadata.shards);
    routes.any(|route| route.shard_id == shard_id && route.learners.contains(&node_id))
}

#[cfg(test)]
mod tests {
    use super::super::snapshot::tests::snapshot;
    use super::*;

    #[test]
    fn info_counts_leaders_per_node() {
        let info = info(&snapshot());
        assert_eq!((info.node_count, info.reachable_nodes), (3, 2));
        assert_eq!((info.shard_count, info.led_shards), (2, 2));
        assert_eq!((info.topic_count, info.partition_count), (Some(1), Some(3)), "of node 2");
        let led: Vec<_> =
            info.nodes.iter().map(|node| (node.shards_led, node.partitions_led)).collect();
        assert_eq!(led, [(1, 0), (1, 3), (0, 0)]);
    }

    #[test]
    fn silent_node_has_an_error_and_no_status() {
        let rows = nodes(&snapshot());
        assert!(rows[0].is_reachable && rows[0].failure.is_none());
        assert!(!rows[2].is_reachable && rows[2].version.is_none());
        assert_eq!(rows[2].failure.as_deref(), Some("connection refused"));
    }

    #[test]
    fn every_replica_has_a_row_with_its_lag() {
        let rows = shards(&snapshot());
        let of_shard_1: Vec<_> = rows
            .iter()
            .filter(|row| row.shard_id == 1)
            .map(|row| (row.node_id, row.role, row.lag, row.leader))
            .collect();
        let expected = [
            (1, Some("follower"), Some(20), Some(2)),
            (2, Some("leader"), Some(0), Some(2)),
            (3, Some("unreachable"), None, Some(2)),
        ];
        assert_eq!(of_shard_1, expected);
        assert_eq!(rows.len(), 6);
    }
}
