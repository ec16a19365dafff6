//! A snapshot of the cluster: the report of every node, or the error of the request to it.
//! At least one node has reported.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Context;
use futures_util::future::join_all;
use helix_client::proto::log::v1::{
    ErrorReason, GetHealthResponse, GetNodeStatusResponse, HealthReason, LeaderHint, Metadata,
    Node, ShardRoute, ShardStatus,
};
use helix_client::{Admin, Client, Config, Error, Origin};
use tonic::Status;

use crate::args::GlobalArgs;
use crate::connect::config;

/// Timeout of a request to a node; a slower node counts as down.
const REPORT_MAX: Duration = Duration::from_secs(2);

/// Error of a member without an address for clients.
const UNREGISTERED: &str = "it has not registered an address with the cluster yet";

/// The reports of all nodes of a cluster.
#[derive(Debug)]
pub(crate) struct ClusterSnapshot {
    /// Nodes, by id.
    pub(crate) nodes: Vec<NodeSnapshot>,
    /// Addresses of the user without an answer that belong to no known node, and the errors.
    pub(crate) silent: Vec<(String, Error)>,
    /// Nodes at the user's addresses that were removed from the cluster: ids and addresses.
    pub(crate) removed: Vec<(u64, String)>,
}

/// A node and its report.
#[derive(Debug)]
pub(crate) struct NodeSnapshot {
    pub(crate) node_id: u64,
    /// Address for clients; empty until the node has registered it with the cluster.
    pub(crate) endpoint: String,
    /// Unix domain socket at which the node was called, in place of its endpoint.
    pub(crate) socket: Option<String>,
    pub(crate) report: Result<NodeReport, Error>,
}

impl NodeSnapshot {
    /// Returns "node 2 at 127.0.0.1:9093", or "node 2" while its address is not known.
    pub(crate) fn named(&self) -> String {
        match self.endpoint.as_str() {
            "" => format!("node {}", self.node_id),
            endpoint => format!("node {} at {endpoint}", self.node_id),
        }
    }

    /// Returns true if the node has answered, with a report or with an error.
    pub(crate) fn has_answered(&self) -> bool {
        self.report.as_ref().map_or_else(|error| error.origin == Origin::Service, |_| true)
    }
}

/// The responses of a node. None has topics, so their size does not depend on the partitions.
#[derive(Debug)]
pub(crate) struct NodeReport {
    pub(crate) metadata: Metadata,
    pub(crate) status: GetNodeStatusResponse,
    pub(crate) health: GetHealthResponse,
}

impl ClusterSnapshot {
    /// Discovers the nodes through the given addresses and requests a report from each node.
    ///
    /// # Errors
    /// Fails if no node answers, or if the nodes refuse the caller.
    pub(crate) async fn take(global: &GlobalArgs) -> anyhow::Result<Self> {
        Self::take_within(global, REPORT_MAX).await
    }

    /// As [`ClusterSnapshot::take`]; the nodes also prove the shards that they lead by a committed
    /// entry.
    ///
    /// # Errors
    /// As [`ClusterSnapshot::take`].
    pub(crate) async fn take_proved(global: &GlobalArgs) -> anyhow::Result<Self> {
        Self::take_with(global, REPORT_MAX, true).await
    }

    /// Like [`ClusterSnapshot::take`], with a limit of each request.
    ///
    /// # Errors
    /// As [`ClusterSnapshot::take`].
    pub(crate) async fn take_within(global: &GlobalArgs, limit: Duration) -> anyhow::Result<Self> {
        Self::take_with(global, limit, false).await
    }

    async fn take_with(global: &GlobalArgs, limit: Duration, prove: bool) -> anyhow::Result<Self> {
        let config = Config { connect_timeout: limit, attempt_timeout: limit, ..config(global) };
        let admin = Client::new(config)?.admin();
        let found = join_all(global.addr.iter().map(|addr| admin.node_metadata(addr))).await;
        let (found, mut silent) = split(&global.addr, found);
        let removed = take_removed(&admin, &mut silent, found.is_empty()).await;
        let of_query = || format!("query {}", global.addr.join(","));
        if found.is_empty()
            && let Some((_, last)) = silent.pop()
        {
            // A refusal says more than a node that is down.
            let refusal = silent.into_iter().map(|(_, error)| error).find(is_refusal);
            return Err(refusal.unwrap_or(last)).with_context(of_query);
        }
        let unregistered = unregistered_members(&found);
        let known = known_nodes(found);
        silent.retain(|(addr, _)| !known.values().any(|endpoint| endpoint == addr));
        let reports = known.into_iter().map(|(id, addr)| request_report(&admin, id, addr, prove));
        let mut nodes = join_all(reports).await;
        // Without any report, what a refused caller sees is no state of the cluster.
        let mut errors = nodes.iter().filter_map(|node| node.report.as_ref().err());
        if nodes.iter().all(|node| node.report.is_err())
            && let Some(refusal) = errors.find(|error| is_refusal(error))
        {
            return Err(refusal.clone()).with_context(of_query);
        }
        nodes.extend(unregistered);
        nodes.sort_by_key(|node| node.node_id);
        let mut snapshot = Self { nodes, silent, removed: Vec::new() }.without_removed();
        snapshot.removed.extend(removed);
        Ok(snapshot)
    }

    /// Moves removed nodes out of the nodes: what they know is out of date.
    pub(super) fn without_removed(mut self) -> Self {
        let is_removed = |node: &NodeSnapshot| {
            let issues = node.report.as_ref().map(|report| report.health.issues.as_slice());
            issues.is_ok_and(|issues| {
                issues.iter().any(|issue| issue.reason() == HealthReason::Removed)
            })
        };
        let (removed, nodes) = std::mem::take(&mut self.nodes).into_iter().partition(is_removed);
        self.nodes = nodes;
        let removed: Vec<NodeSnapshot> = removed;
        if removed.is_empty() || self.nodes.is_empty() {
            self.nodes.extend(removed);
            self.nodes.sort_by_key(|node| node.node_id);
            return self;
        }
        // A removed node may name others that were removed since.
        let members = self.metadata().map(|metadata| {
            metadata.nodes.iter().map(|node| node.node_id).collect::<BTreeSet<_>>()
        });
        if let Some(members) = members {
            self.nodes.retain(|node| members.contains(&node.node_id));
        }
        self.removed = removed.into_iter().map(|node| (node.node_id, node.endpoint)).collect();
        self
    }

    /// Returns the nodes that answered, with their reports.
    pub(crate) fn reports(&self) -> impl Iterator<Item = (u64, &NodeReport)> {
        self.nodes.iter().filter_map(|node| Some((node.node_id, node.report.as_ref().ok()?)))
    }

    /// Returns the newest metadata.
    pub(crate) fn metadata(&self) -> Option<&Metadata> {
        let all = self.reports().map(|(_, report)| &report.metadata);
        all.max_by_key(|metadata| metadata.version)
    }

    /// Returns the route of each shard, from the newest metadata in which it has voters. A node
    /// that has just created a replica, or rebuilds one, does not know them.
    pub(crate) fn shard_routes(&self) -> BTreeMap<u32, &ShardRoute> {
        let age = |(metadata, shard): &(&Metadata, &ShardRoute)| {
            (!shard.replicas.is_empty(), metadata.version)
        };
        let mut newest: BTreeMap<u32, (&Metadata, &ShardRoute)> = BTreeMap::new();
        for (_, NodeReport { metadata, .. }) in self.reports() {
            for shard in &metadata.shards {
                let known = newest.entry(shard.shard_id).or_insert((metadata, shard));
                *known = std::cmp::max_by_key(*known, (metadata, shard), age);
            }
        }
        newest.into_iter().map(|(id, (_, shard))| (id, shard)).collect()
    }

    /// Returns the leader of each shard that any node knows, from the report with the highest term.
    /// None if no node knows a leader.
    pub(crate) fn leaders(&self) -> BTreeMap<u32, Option<LeaderHint>> {
        let mut leaders: BTreeMap<u32, Option<LeaderHint>> = BTreeMap::new();
        let routes = self.reports().flat_map(|(_, report)| &report.metadata.shards);
        let routes = routes.map(|shard| (shard.shard_id, shard.leader.as_ref()));
        let statuses = self.reports().flat_map(|(_, report)| &report.status.shards);
        let statuses = statuses.map(|shard| (shard.shard_id, shard.leader.as_ref()));
        for (shard_id, hint) in routes.chain(statuses) {
            let known = leaders.entry(shard_id).or_default();
            let hint = hint.filter(|hint| hint.node_id != 0);
            if hint.map(|hint| hint.term) > known.as_ref().map(|known| known.term) {
                *known = hint.cloned();
            }
        }
        leaders
    }

    /// Returns the leader of a shard, if a node knows it.
    pub(crate) fn leader(&self, shard_id: u32) -> Option<LeaderHint> {
        self.leaders().remove(&shard_id).flatten()
    }

    /// Returns the numbers of topics and partitions, from the report with the newest metadata.
    /// None if that node has an earlier version.
    pub(crate) fn topic_counts(&self) -> (Option<u64>, Option<u64>) {
        let newest = self.reports().max_by_key(|(_, report)| report.metadata.version);
        newest.map_or((None, None), |(_, report)| {
            (report.status.topic_count, report.status.partition_count)
        })
    }

    /// Returns the number of partitions of a shard, as its leader reports it, or any replica.
    pub(crate) fn partitions_of(&self, shard_id: u32, leader: Option<u64>) -> u64 {
        let of_leader = leader.and_then(|node_id| self.replica(shard_id, node_id));
        let any = || self.nodes.iter().find_map(|node| self.replica(shard_id, node.node_id));
        of_leader.or_else(any).map_or(0, |status| status.partition_count.into())
    }

    /// Returns true if the node has answered, with a report or with an error.
    pub(crate) fn is_reachable(&self, node_id: u64) -> bool {
        self.nodes.iter().any(|node| node.node_id == node_id && node.has_answered())
    }

    /// Returns a node's replica of a shard, if the node has answered and reports one.
    pub(crate) fn replica(&self, shard_id: u32, node_id: u64) -> Option<&ShardStatus> {
        let (_, report) = self.reports().find(|(id, _)| *id == node_id)?;
        report.status.shards.iter().find(|shard| shard.shard_id == shard_id)
    }
}

/// Returns true if a node refuses the caller: its token, or for want of a right.
pub(crate) fn is_refusal(error: &Error) -> bool {
    matches!(error.reason, Some(ErrorReason::PermissionDenied | ErrorReason::Unauthenticated))
}

/// Returns why a node has no report, after its name: "does not answer: connection refused".
pub(crate) fn failure(error: &Error) -> String {
    let what = match error.origin {
        Origin::Service if is_refusal(error) => "refuses this caller",
        Origin::Service => "answers with an error",
        Origin::Transport | Origin::Client => "does not answer",
    };
    format!("{what}: {}", error.message)
}

/// Takes out the addresses of removed nodes, which refuse to describe the cluster; none if no node
/// does. Returns their ids and addresses.
async fn take_removed(
    admin: &Admin,
    silent: &mut Vec<(String, Error)>,
    is_alone: bool,
) -> Vec<(u64, String)> {
    let mut removed = Vec::new();
    for (addr, error) in std::mem::take(silent) {
        let is_refusal = error.is(ErrorReason::NotLeader) && !is_alone;
        match is_refusal {
            true => match admin.node_status(Some(&addr)).await {
                Ok(status) => removed.push((status.node_id, addr)),
                Err(_) => silent.push((addr, error)),
            },
            false => silent.push((addr, error)),
        }
    }
    removed
}

/// Splits the results into responses and the addresses without one.
fn split(
    addresses: &[String],
    found: Vec<Result<Metadata, Error>>,
) -> (Vec<Metadata>, Vec<(String, Error)>) {
    let mut responses = Vec::new();
    let mut silent = Vec::new();
    for (address, result) in addresses.iter().zip(found) {
        match result {
            Ok(metadata) => responses.push(metadata),
            Err(error) => silent.push((address.clone(), error)),
        }
    }
    (responses, silent)
}

/// Returns the addresses of all nodes in the metadata; the newest metadata takes precedence.
fn known_nodes(mut metadata: Vec<Metadata>) -> BTreeMap<u64, String> {
    metadata.sort_by_key(|metadata| metadata.version);
    let nodes = metadata.into_iter().flat_map(|metadata| metadata.nodes);
    nodes.map(|Node { node_id, endpoint, .. }| (node_id, endpoint)).collect()
}

/// Returns the members of the cluster that have not registered an address yet, as nodes that do
/// not answer. The members are the replicas of shard 0 in the newest metadata.
fn unregistered_members(metadata: &[Metadata]) -> Vec<NodeSnapshot> {
    let Some(newest) = metadata.iter().map(|it| it.version).max() else { return Vec::new() };
    let newest = metadata.iter().filter(|it| it.version == newest);
    let shard0 = newest.flat_map(|it| it.shards.iter().filter(|shard| shard.shard_id == 0));
    let members: BTreeSet<u64> =
        shard0.flat_map(|shard| shard.replicas.iter().chain(&shard.learners)).copied().collect();
    let is_registered =
        |id: u64| metadata.iter().flat_map(|it| &it.nodes).any(|node| node.node_id == id);
    let unregistered = members.into_iter().filter(|id| !is_registered(*id));
    let node = |node_id| NodeSnapshot {
        node_id,
        endpoint: String::new(),
        socket: None,
        report: Err(Error::from_status(&Status::unavailable(UNREGISTERED))),
    };
    unregistered.map(node).collect()
}

async fn request_report(
    admin: &Admin,
    node_id: u64,
    endpoint: String,
    prove: bool,
) -> NodeSnapshot {
    let health = async {
        match prove {
            true => admin.prove_health(&endpoint).await,
            false => admin.node_health(&endpoint).await,
        }
    };
    let responses =
        tokio::join!(admin.node_metadata(&endpoint), admin.node_status(Some(&endpoint)), health,);
    let report = match responses {
        (Ok(metadata), Ok(status), Ok(health)) => Ok(NodeReport { metadata, status, health }),
        (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => Err(error),
    };
    let dialed = admin.dialed_address(&endpoint).ok();
    let socket = dialed.filter(|dialed| *dialed != endpoint);
    NodeSnapshot { node_id, endpoint, socket, report }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn hint(node_id: u64, term: u64) -> Option<LeaderHint> {
        Some(LeaderHint { node_id, endpoint: format!("n{node_id}"), term })
    }

    fn metadata(version: u64, leader: Option<LeaderHint>) -> Metadata {
        Metadata {
            cluster_id: "c".to_owned(),
            version,
            nodes: (1..=3)
                .map(|id| Node { node_id: id, endpoint: format!("n{id}"), ..Node::default() })
                .collect(),
            shards: vec![
                ShardRoute {
                    shard_id: 0,
                    leader: hint(1, 3),
                    replicas: vec![1, 2, 3],
                    ..ShardRoute::default()
                },
                ShardRoute {
                    shard_id: 1,
                    leader,
                    replicas: vec![1, 2, 3],
                    ..ShardRoute::default()
                },
            ],
            topics: Vec::new(),
        }
    }

    fn shard(shard_id: u32, term: u64, last_index: u64, synced_index: u64) -> ShardStatus {
        let (committed_index, applied_index) = (synced_index, synced_index);
        ShardStatus {
            shard_id,
            term,
            last_index,
            synced_index,
            committed_index,
            applied_index,
            partition_count: 3 * shard_id,
            ..ShardStatus::default()
        }
    }

    /// Three nodes: node 2 leads shard 1, as nodes 1 and 2 report; node 3 does not answer.
    pub(crate) fn snapshot() -> ClusterSnapshot {
        let report = |version, leader, shards| NodeReport {
            metadata: metadata(version, leader),
            status: GetNodeStatusResponse {
                shards,
                topic_count: Some(version - 7),
                partition_count: Some(3 * (version - 7)),
                ..GetNodeStatusResponse::default()
            },
            health: GetHealthResponse { healthy: true, issues: Vec::new() },
        };
        let one = report(7, hint(2, 6), vec![shard(0, 3, 9, 9), shard(1, 6, 90, 80)]);
        let two = report(8, hint(2, 6), vec![shard(0, 3, 9, 9), shard(1, 6, 100, 100)]);
        let down = Error::from_status(&Status::unavailable("connection refused"));
        let node = |node_id, report| {
            let endpoint = format!("n{node_id}");
            NodeSnapshot { node_id, endpoint, socket: None, report }
        };
        let nodes = vec![node(1, Ok(one)), node(2, Ok(two)), node(3, Err(down))];
        ClusterSnapshot { nodes, silent: Vec::new(), removed: Vec::new() }
    }

    /// The error of a caller that lacks a right.
    pub(crate) fn denied() -> Error {
        let detail = helix_proto::error::detail(ErrorReason::PermissionDenied);
        let what = "principal \"bob\" may not describe cluster";
        Error::from_status(&helix_proto::error::to_status(&detail, what, None))
    }

    #[test]
    fn node_that_refuses_the_caller_has_answered() {
        let mut snapshot = snapshot();
        assert!(!snapshot.is_reachable(3));
        snapshot.nodes[2].report = Err(denied());
        assert!(snapshot.is_reachable(3) && is_refusal(&denied()));
        assert!(failure(&denied()).starts_with("refuses this caller: principal"));
    }

    #[test]
    fn leader_is_taken_from_the_highest_term() {
        let mut snapshot = snapshot();
        let leader = |snapshot: &ClusterSnapshot| {
            snapshot.leaders()[&1].as_ref().map(|leader| leader.node_id)
        };
        assert_eq!(leader(&snapshot), Some(2));
        let Ok(one) = &mut snapshot.nodes[0].report else { panic!("it answers") };
        one.metadata.shards[1].leader = hint(1, 5);
        assert_eq!(leader(&snapshot), Some(2));
        let Ok(one) = &mut snapshot.nodes[0].report else { panic!("it answers") };
        one.metadata.shards[1].leader = hint(3, 9);
        assert_eq!(leader(&snapshot), Some(3));
    }

    #[test]
    fn shard_without_leader_is_listed() {
        let mut snapshot = snapshot();
        for node in &mut snapshot.nodes {
            if let Ok(report) = &mut node.report {
                report.metadata.shards[1].leader = None;
            }
        }
        assert_eq!(snapshot.leaders()[&1], None);
        assert_eq!(snapshot.metadata().unwrap().version, 8);
    }

    #[test]
    fn one_response_is_enough_to_know_the_nodes() {
        let down = Err(Error::from_status(&Status::unavailable("refused")));
        let addresses = ["n9".to_owned(), "n1".to_owned()];
        let (metadata, silent) = split(&addresses, vec![down, Ok(metadata(1, None))]);
        assert_eq!(silent[0].0, "n9");
        assert_eq!(known_nodes(metadata).into_keys().collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn route_is_from_a_node_that_knows_the_voters() {
        let mut snapshot = snapshot();
        let Ok(two) = &mut snapshot.nodes[1].report else { panic!("it answers") };
        two.metadata.shards[1].replicas.clear();
        assert_eq!(snapshot.shard_routes()[&1].replicas, [1, 2, 3]);
        let Ok(two) = &mut snapshot.nodes[1].report else { panic!("it answers") };
        two.metadata.shards[1].replicas = vec![2, 3];
        assert_eq!(snapshot.shard_routes()[&1].replicas, [2, 3]);
    }

    #[test]
    fn member_without_an_address_is_a_node_that_does_not_answer() {
        let unregistered = |metadata: &[Metadata]| -> Vec<u64> {
            unregistered_members(metadata).iter().map(|node| node.node_id).collect()
        };
        let mut starting = metadata(3, None);
        starting.nodes.truncate(2);
        assert_eq!(unregistered(&[starting.clone()]), [3]);
        assert_eq!(unregistered(&[metadata(3, None)]), Vec::<u64>::new());
        // A node that knows more counts, whichever answers first.
        assert_eq!(unregistered(&[starting.clone(), metadata(3, None)]), Vec::<u64>::new());
        // A node that was removed is in the older metadata only.
        let mut removed = metadata(2, None);
        removed.shards[0].replicas.push(4);
        assert_eq!(unregistered(&[metadata(3, None), removed]), Vec::<u64>::new());
        // A node that is being added is a learner first.
        let mut joining = metadata(4, None);
        joining.shards[0].learners.push(4);
        assert_eq!(unregistered(&[joining]), [4]);
    }

    #[test]
    fn newest_metadata_has_the_address() {
        let mut old = metadata(1, None);
        old.nodes[0].endpoint = "before".to_owned();
        assert_eq!(known_nodes(vec![metadata(2, None), old])[&1], "n1");
    }
}
