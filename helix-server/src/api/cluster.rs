//! ClusterService: metadata, health, node status and membership changes.
//! Every response is this node's view.

use std::sync::Arc;

use helix_proto::log::v1 as wire;
use helix_proto::log::v1::cluster_service_server::ClusterService;
use helix_proto::log::v1::{
    AddNodeRequest, AddNodeResponse, BalanceLeadersRequest, BalanceLeadersResponse,
    CancelMoveRequest, CancelMoveResponse, GetHealthRequest, GetHealthResponse, GetMetadataRequest,
    GetMetadataResponse, GetNodeStatusRequest, GetNodeStatusResponse, GetPlacementRequest,
    GetPlacementResponse, HealthIssue, HealthReason, ListSlowCallsRequest, ListSlowCallsResponse,
    MoveShardRequest, MoveShardResponse, RemoveNodeRequest, RemoveNodeResponse, ReplaceNodeRequest,
    ReplaceNodeResponse, SetCordonedRequest, SetCordonedResponse, SetDrainingRequest,
    SetDrainingResponse, SetMovesPausedRequest, SetMovesPausedResponse, SetReplicasRequest,
    SetReplicasResponse, TransferLeaderRequest, TransferLeaderResponse,
    WatchMembershipChangeRequest, WatchMembershipChangeResponse, WatchMetadataRequest,
    WatchMetadataResponse,
};
use tokio::time::Instant;
use tonic::codegen::BoxStream;
use tonic::{Request, Response, Status};

use super::authorize::{authorize_change, authorize_request};
use super::metadata::MetadataSource;
use super::{
    call_memory, member_changes, placement, recheck, slow_calls, time, wire_leader, wire_shard_id,
};
use crate::clock::{CLOCK_CONFIRMATION, Clock, ClockOffset};
use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::limits::BEHIND_LAG_MAX;
use crate::node::{Node, NodeTls, PeerStatus, StorageKind};
use crate::process;
use crate::shard::{AheadPartitions, FetchProgress, Shard, ShardStatus};

pub(crate) struct ClusterHandler {
    node: Arc<Node>,
    metadata: Arc<MetadataSource>,
    started: Instant,
}

impl ClusterHandler {
    pub(crate) fn new(node: &Arc<Node>) -> Self {
        let metadata = MetadataSource::new(node);
        Self { node: node.clone(), metadata, started: Instant::now() }
    }

    fn health(&self) -> GetHealthResponse {
        let mut issues = Vec::new();
        let peers = self.node.peers();
        if self.node.shutdown_token().is_cancelled() {
            issues.push(HealthIssue {
                reason: HealthReason::Draining.into(),
                message: format!("node {} is shutting down", self.node.info().node_id),
                ..HealthIssue::default()
            });
        }
        issues.extend(member_changes::issues(&self.node));
        issues.extend(clock_issues(&self.node));
        issues.extend(future_time_issues(&self.node));
        issues.extend(cleanup_issues(&self.node));
        let lost: Vec<&PeerStatus> = peers.iter().filter(|peer| !peer.connected).collect();
        issues.extend(lost.iter().map(|peer| node_down(peer)));
        let lost: Vec<u64> = lost.iter().map(|peer| peer.node_id).collect();
        let registered: Vec<u64> = self.node.nodes().iter().map(|it| it.node_id).collect();
        issues.extend(unregistered(&self.node.cluster().nodes(), &registered, &lost));
        issues.extend(leaderless(0, self.node.cluster().leader_hint().is_some(), &lost));
        let node_id = self.node.cluster().node_id();
        let own_damage = self.node.cluster().replica().damage();
        issues.extend(damage_issues(0, node_id, own_damage, self.node.repair_progress(0)));
        for shard in self.node.shards() {
            let progress = self.node.repair_progress(shard.id());
            issues.extend(shard_issues(&shard, node_id, &lost, progress));
        }
        issues.extend(self.node.damaged_shards().into_iter().map(|(shard, what)| HealthIssue {
            reason: HealthReason::CorruptLog.into(),
            shard_id: Some(wire_shard_id(shard)),
            message: format!("shard {shard} is quarantined: {what}"),
            ..HealthIssue::default()
        }));
        issues.extend(self.node.in_repair().into_iter().map(|(shard, what)| HealthIssue {
            reason: HealthReason::CorruptLog.into(),
            shard_id: Some(wire_shard_id(shard)),
            needed_node_ids: vec![node_id],
            message: format!("shard {shard} is being repaired and does not vote: {what}"),
        }));
        issues.extend(self.node.stopped().into_iter().map(|(shard, what)| HealthIssue {
            reason: HealthReason::StorageFailed.into(),
            shard_id: Some(wire_shard_id(shard)),
            needed_node_ids: vec![node_id],
            message: format!("shard {shard} has stopped and will restart: {what}"),
        }));
        let warnings = self.node.tls().map(NodeTls::warnings).unwrap_or_default();
        issues.extend(warnings.into_iter().map(|what| HealthIssue {
            reason: HealthReason::Certificate.into(),
            shard_id: None,
            needed_node_ids: vec![node_id],
            message: format!("node {node_id}: {what}"),
        }));
        let jwks_error = self.node.jwt().and_then(|verifier| verifier.status().error);
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

    async fn status(&self) -> GetNodeStatusResponse {
        let info = self.node.info();
        let mut shards = vec![own_status(self.node.cluster())];
        let own_free_bytes = self.node.cluster().replica().status().wal.free_bytes;
        let mut logs = Vec::new();
        for shard in self.node.shards() {
            let status = shard.status();
            logs.push(status.wal.clone());
            shards.push(shard_status(&shard, status, shard.live_bytes().await));
        }
        let (topic_count, partition_count) = self.node.cluster().topic_counts();
        // The log with the most syncs describes the disk best.
        let busiest = logs.iter().filter(|wal| wal.syncs > 0).max_by_key(|wal| wal.syncs);
        let (storage, durability, data_dir) = match info.storage {
            StorageKind::Durable => {
                ("disk", "synced to stable storage of a majority", info.data_dir)
            }
            StorageKind::Memory => {
                ("memory", "in the memory of a majority, lost with the process", String::new())
            }
        };
        GetNodeStatusResponse {
            node_id: info.node_id,
            version: info.version.to_owned(),
            storage: storage.to_owned(),
            data_dir,
            durability: durability.to_owned(),
            // Shard 0's log is open wherever a node runs; the others may be quarantined.
            free_bytes: logs.iter().map(|wal| wal.free_bytes).fold(own_free_bytes, u64::max),
            sync_p50: busiest.map(|wal| time::to_duration(wal.sync_p50_us)),
            sync_p99: busiest.map(|wal| time::to_duration(wal.sync_p99_us)),
            cpu_time_us: process::cpu_time_us(),
            rss_bytes: process::rss_bytes(),
            uptime: prost_types::Duration::try_from(self.started.elapsed()).ok(),
            shards,
            topic_count: Some(topic_count),
            partition_count: Some(partition_count),
        }
    }
}

#[tonic::async_trait]
impl ClusterService for ClusterHandler {
    type WatchMetadataStream = BoxStream<WatchMetadataResponse>;
    type WatchMembershipChangeStream = BoxStream<WatchMembershipChangeResponse>;

    async fn get_metadata(
        &self,
        request: Request<GetMetadataRequest>,
    ) -> Result<Response<GetMetadataResponse>, Status> {
        let call = call_memory(&request);
        let (call, request) = (call.as_deref(), request.get_ref());
        let get = || self.metadata.get(&request.topics, call);
        let metadata = recheck::read(&self.node, call, request, get).await?;
        let node_id = self.node.cluster().node_id();
        Ok(Response::new(GetMetadataResponse { metadata: Some(metadata), node_id }))
    }

    async fn watch_metadata(
        &self,
        request: Request<WatchMetadataRequest>,
    ) -> Result<Response<Self::WatchMetadataStream>, Status> {
        authorize_request(&self.node, &request)?;
        let call = call_memory(&request);
        Ok(self.metadata.watch(request.into_inner().topics, call)?)
    }

    async fn get_health(
        &self,
        request: Request<GetHealthRequest>,
    ) -> Result<Response<GetHealthResponse>, Status> {
        authorize_request(&self.node, &request)?;
        Ok(Response::new(self.health()))
    }

    async fn get_node_status(
        &self,
        request: Request<GetNodeStatusRequest>,
    ) -> Result<Response<GetNodeStatusResponse>, Status> {
        let call = call_memory(&request);
        let status = || async { Ok::<_, Error>(self.status().await) };
        let status = recheck::read(&self.node, call.as_deref(), request.get_ref(), status);
        Ok(Response::new(status.await?))
    }

    async fn list_slow_calls(
        &self,
        request: Request<ListSlowCallsRequest>,
    ) -> Result<Response<ListSlowCallsResponse>, Status> {
        let call = call_memory(&request);
        let call = call.as_deref();
        let list = || async { slow_calls::list(&self.node, call) };
        Ok(Response::new(recheck::read(&self.node, call, request.get_ref(), list).await?))
    }

    async fn add_node(
        &self,
        request: Request<AddNodeRequest>,
    ) -> Result<Response<AddNodeResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        let change = member_changes::add(&self.node, request.into_inner()).await?;
        Ok(Response::new(AddNodeResponse { change }))
    }

    async fn remove_node(
        &self,
        request: Request<RemoveNodeRequest>,
    ) -> Result<Response<RemoveNodeResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        let change = member_changes::remove(&self.node, request.into_inner()).await?;
        Ok(Response::new(RemoveNodeResponse { change }))
    }

    async fn replace_node(
        &self,
        request: Request<ReplaceNodeRequest>,
    ) -> Result<Response<ReplaceNodeResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        let change = member_changes::replace(&self.node, request.into_inner()).await?;
        Ok(Response::new(ReplaceNodeResponse { change }))
    }

    async fn watch_membership_change(
        &self,
        request: Request<WatchMembershipChangeRequest>,
    ) -> Result<Response<Self::WatchMembershipChangeStream>, Status> {
        authorize_request(&self.node, &request)?;
        let changes = member_changes::watch(self.node.clone(), request.into_inner().id);
        Ok(Response::new(Box::pin(changes)))
    }

    async fn set_draining(
        &self,
        request: Request<SetDrainingRequest>,
    ) -> Result<Response<SetDrainingResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        member_changes::set_draining(&self.node, request.into_inner()).await?;
        Ok(Response::new(SetDrainingResponse {}))
    }

    async fn balance_leaders(
        &self,
        request: Request<BalanceLeadersRequest>,
    ) -> Result<Response<BalanceLeadersResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        self.node.check_member()?;
        let moved = self.node.cluster().balance().await?;
        let shard_ids = moved.into_iter().map(wire_shard_id).collect();
        Ok(Response::new(BalanceLeadersResponse { shard_ids }))
    }

    async fn transfer_leader(
        &self,
        request: Request<TransferLeaderRequest>,
    ) -> Result<Response<TransferLeaderResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        let TransferLeaderRequest { shard_id, target_node_id } = request.into_inner();
        let target = Some(target_node_id).filter(|node| *node != 0);
        if let Some(node_id) = target
            && !self.node.cluster().nodes().contains(&node_id)
        {
            return Err(Error::NodeNotFound { node_id }.into());
        }
        let leader = if shard_id == 0 {
            self.node.cluster().transfer_checked(0, target).await?;
            self.node.cluster().leader_hint()
        } else {
            let elsewhere = self.node.cluster().is_elsewhere(shard_id.into());
            let shard = self.node.shard(shard_id.into()).ok_or_else(|| match elsewhere {
                true => self.node.cluster().elsewhere(shard_id.into()),
                false => Error::InvalidArgument {
                    field: "shard_id",
                    what: format!("there is no shard {shard_id} on this node"),
                },
            })?;
            self.node.cluster().transfer_checked(shard.id(), target).await?;
            shard.leader_hint()
        };
        Ok(Response::new(TransferLeaderResponse { leader: leader.map(wire_leader) }))
    }

    async fn get_placement(
        &self,
        request: Request<GetPlacementRequest>,
    ) -> Result<Response<GetPlacementResponse>, Status> {
        authorize_request(&self.node, &request)?;
        Ok(Response::new(placement::get(&self.node).await?))
    }

    async fn set_cordoned(
        &self,
        request: Request<SetCordonedRequest>,
    ) -> Result<Response<SetCordonedResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        self.node.check_member()?;
        let SetCordonedRequest { node_id, cordoned } = request.into_inner();
        self.node.cluster().set_cordoned(node_id, cordoned).await?;
        Ok(Response::new(SetCordonedResponse {}))
    }

    async fn set_replicas(
        &self,
        request: Request<SetReplicasRequest>,
    ) -> Result<Response<SetReplicasResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        self.node.check_member()?;
        self.node.cluster().set_replicas(request.into_inner().replicas).await?;
        Ok(Response::new(SetReplicasResponse {}))
    }

    async fn move_shard(
        &self,
        request: Request<MoveShardRequest>,
    ) -> Result<Response<MoveShardResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        self.node.check_member()?;
        let MoveShardRequest { shard_id, from_node_id, to_node_id } = request.into_inner();
        self.node.cluster().move_shard(shard_id.into(), from_node_id, to_node_id).await?;
        Ok(Response::new(MoveShardResponse {}))
    }

    async fn set_moves_paused(
        &self,
        request: Request<SetMovesPausedRequest>,
    ) -> Result<Response<SetMovesPausedResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        Ok(Response::new(placement::set_paused(&self.node, request.into_inner()).await?))
    }

    async fn cancel_move(
        &self,
        request: Request<CancelMoveRequest>,
    ) -> Result<Response<CancelMoveResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        Ok(Response::new(placement::cancel(&self.node, request.into_inner()).await?))
    }
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
    shard: &Shard,
    node_id: u64,
    lost: &[u64],
    repair: Option<String>,
) -> impl Iterator<Item = HealthIssue> {
    let no_leader = leaderless(shard.id(), shard.leader_hint().is_some(), lost);
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

/// Returns the status of shard 0, which has no partitions.
fn own_status(cluster: &Cluster) -> wire::ShardStatus {
    let status = cluster.replica().status();
    wire::ShardStatus {
        shard_id: 0,
        leader: cluster.leader_hint().map(wire_leader),
        term: status.term,
        last_index: status.last_index,
        synced_index: status.synced,
        committed_index: status.committed,
        applied_index: status.applied,
        purged_index: status.purged,
        partition_count: 0,
        live_bytes: 0,
        held_bytes: status.wal.held_bytes,
        segment_count: u32::try_from(status.wal.segments).unwrap_or(u32::MAX),
        fetching: None,
    }
}

fn shard_status(shard: &Shard, status: ShardStatus, live_bytes: u64) -> wire::ShardStatus {
    let wal = status.wal;
    wire::ShardStatus {
        shard_id: wire_shard_id(status.shard_id),
        leader: shard.leader_hint().map(wire_leader),
        term: status.term,
        last_index: status.last_index,
        synced_index: status.synced,
        committed_index: status.committed,
        applied_index: status.applied,
        purged_index: status.purged,
        partition_count: status.partition_count,
        live_bytes,
        held_bytes: wal.held_bytes,
        segment_count: u32::try_from(wal.segments).unwrap_or(u32::MAX),
        fetching: status.fetching.map(|it| wire::Fetching {
            fetched_bytes: it.bytes_done,
            total_bytes: it.bytes_total,
            waits_for: it.waits_for.unwrap_or_default(),
        }),
    }
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
