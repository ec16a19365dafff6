//! ClusterService: metadata, health, node status and membership changes.
//! Every response is this node's view.

use std::collections::HashSet;
use std::sync::Arc;

use futures_util::stream;
use helix_proto::log::v1 as wire;
use helix_proto::log::v1::cluster_service_server::ClusterService;
use helix_proto::log::v1::{
    AddNodeRequest, AddNodeResponse, BalanceLeadersRequest, BalanceLeadersResponse,
    GetHealthRequest, GetHealthResponse, GetMetadataRequest, GetMetadataResponse,
    GetNodeStatusRequest, GetNodeStatusResponse, HealthIssue, HealthReason, Metadata,
    RemoveNodeRequest, RemoveNodeResponse, ReplaceNodeRequest, ReplaceNodeResponse,
    SetDrainingRequest, SetDrainingResponse, ShardRoute, TopicRoute, TransferLeaderRequest,
    TransferLeaderResponse, WatchMembershipChangeRequest, WatchMembershipChangeResponse,
    WatchMetadataRequest, WatchMetadataResponse,
};
use tokio::sync::watch;
use tokio::task::yield_now;
use tokio::time::Instant;
use tonic::codegen::BoxStream;
use tonic::{Request, Response, Status};

use super::{call_memory, member_changes, reserve_response, time, wire_leader, wire_shard_id};
use crate::clock::{CLOCK_CONFIRMATION, ClockOffset};
use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::limits::{BEHIND_LAG_MAX, PARTITION_ROUTED_BYTES, TOPIC_ROUTED_BYTES};
use crate::log::TopicInfo;
use crate::node::{Node, PeerStatus, StorageKind};
use crate::process;
use crate::shard::{FetchProgress, Shard, ShardStatus};
use crate::transport::CallMemory;

pub(crate) struct ClusterHandler {
    node: Arc<Node>,
    started: Instant,
}

impl ClusterHandler {
    pub(crate) fn new(node: &Arc<Node>) -> Self {
        Self { node: node.clone(), started: Instant::now() }
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
        let lost: Vec<&PeerStatus> = peers.iter().filter(|peer| !peer.connected).collect();
        issues.extend(lost.iter().map(|peer| node_down(peer)));
        let lost: Vec<u64> = lost.iter().map(|peer| peer.node_id).collect();
        issues.extend(leaderless(0, self.node.cluster().leader_hint().is_some(), &lost));
        for shard in self.node.shards() {
            let progress = self.node.repair_progress(shard.id());
            issues.extend(shard_issues(&shard, self.node.info().node_id, &lost, progress));
        }
        issues.extend(self.node.damaged_shards().into_iter().map(|(shard, what)| HealthIssue {
            reason: HealthReason::CorruptLog.into(),
            shard_id: Some(wire_shard_id(shard)),
            message: format!("shard {shard} is quarantined: {what}"),
            ..HealthIssue::default()
        }));
        let node_id = self.node.info().node_id;
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
        GetHealthResponse { healthy: issues.is_empty(), issues }
    }

    async fn status(&self) -> GetNodeStatusResponse {
        let info = self.node.info();
        let mut shards = vec![own_status(self.node.cluster())];
        let mut logs = Vec::new();
        for shard in self.node.shards() {
            let status = shard.status();
            logs.push(status.wal.clone());
            shards.push(shard_status(&shard, status, shard.live_bytes().await));
        }
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
            free_bytes: logs.iter().map(|wal| wal.free_bytes).max().unwrap_or(0),
            sync_p50: busiest.map(|wal| time::to_duration(wal.sync_p50_us)),
            sync_p99: busiest.map(|wal| time::to_duration(wal.sync_p99_us)),
            cpu_time_us: process::cpu_time_us(),
            rss_bytes: process::rss_bytes(),
            uptime: prost_types::Duration::try_from(self.started.elapsed()).ok(),
            shards,
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
        let topics = &request.get_ref().topics;
        let metadata = Some(metadata(&self.node, topics, call.as_deref()).await?);
        Ok(Response::new(GetMetadataResponse { metadata }))
    }

    async fn watch_metadata(
        &self,
        request: Request<WatchMetadataRequest>,
    ) -> Result<Response<Self::WatchMetadataStream>, Status> {
        let mut versions = self.node.watch_routes();
        // The first response has the current state.
        versions.mark_changed();
        let watch = MetadataWatch {
            node: self.node.clone(),
            call: call_memory(&request),
            topics: request.into_inner().topics,
            versions,
        };
        let responses = stream::try_unfold(watch, |mut watch| async {
            let metadata = watch.next().await?;
            let response = |metadata| WatchMetadataResponse { metadata: Some(metadata) };
            Ok(metadata.map(|metadata| (response(metadata), watch)))
        });
        Ok(Response::new(Box::pin(responses)))
    }

    async fn get_health(
        &self,
        _: Request<GetHealthRequest>,
    ) -> Result<Response<GetHealthResponse>, Status> {
        Ok(Response::new(self.health()))
    }

    async fn get_node_status(
        &self,
        _: Request<GetNodeStatusRequest>,
    ) -> Result<Response<GetNodeStatusResponse>, Status> {
        Ok(Response::new(self.status().await))
    }

    async fn add_node(
        &self,
        request: Request<AddNodeRequest>,
    ) -> Result<Response<AddNodeResponse>, Status> {
        let change = member_changes::add(&self.node, request.into_inner()).await?;
        Ok(Response::new(AddNodeResponse { change }))
    }

    async fn remove_node(
        &self,
        request: Request<RemoveNodeRequest>,
    ) -> Result<Response<RemoveNodeResponse>, Status> {
        let change = member_changes::remove(&self.node, request.into_inner()).await?;
        Ok(Response::new(RemoveNodeResponse { change }))
    }

    async fn replace_node(
        &self,
        request: Request<ReplaceNodeRequest>,
    ) -> Result<Response<ReplaceNodeResponse>, Status> {
        let change = member_changes::replace(&self.node, request.into_inner()).await?;
        Ok(Response::new(ReplaceNodeResponse { change }))
    }

    async fn watch_membership_change(
        &self,
        request: Request<WatchMembershipChangeRequest>,
    ) -> Result<Response<Self::WatchMembershipChangeStream>, Status> {
        let changes = member_changes::watch(self.node.clone(), request.into_inner().id);
        Ok(Response::new(Box::pin(changes)))
    }

    async fn set_draining(
        &self,
        request: Request<SetDrainingRequest>,
    ) -> Result<Response<SetDrainingResponse>, Status> {
        member_changes::set_draining(&self.node, request.into_inner()).await?;
        Ok(Response::new(SetDrainingResponse {}))
    }

    async fn balance_leaders(
        &self,
        _: Request<BalanceLeadersRequest>,
    ) -> Result<Response<BalanceLeadersResponse>, Status> {
        self.node.check_member()?;
        let moved = self.node.cluster().balance().await?;
        let shard_ids = moved.into_iter().map(wire_shard_id).collect();
        Ok(Response::new(BalanceLeadersResponse { shard_ids }))
    }

    async fn transfer_leader(
        &self,
        request: Request<TransferLeaderRequest>,
    ) -> Result<Response<TransferLeaderResponse>, Status> {
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
            let shard = self.node.shard(shard_id.into()).ok_or_else(|| Error::InvalidArgument {
                field: "shard_id",
                what: format!("there is no shard {shard_id} on this node"),
            })?;
            self.node.cluster().transfer_checked(shard.id(), target).await?;
            shard.leader_hint()
        };
        Ok(Response::new(TransferLeaderResponse { leader: leader.map(wire_leader) }))
    }
}

struct MetadataWatch {
    node: Arc<Node>,
    call: Option<Arc<CallMemory>>,
    topics: Vec<String>,
    versions: watch::Receiver<u64>,
}

impl MetadataWatch {
    async fn next(&mut self) -> Result<Option<Metadata>, Status> {
        let draining = self.node.shutdown_token();
        tokio::select! {
            changed = self.versions.changed() => match changed {
                Ok(()) => {
                    Ok(Some(metadata(&self.node, &self.topics, self.call.as_deref()).await?))
                }
                // The node is gone.
                Err(_) => Ok(None),
            },
            () = draining.cancelled() => Err(Error::Draining.into()),
        }
    }
}

/// Returns the routing data of the named topics, or of all without a name.
async fn metadata(node: &Node, topics: &[String], call: Option<&CallMemory>) -> Result<Metadata> {
    let info = node.info();
    // Read first: data newer than this version is sent again with its own version.
    let version = node.metadata_version();
    let topics = if topics.is_empty() {
        node.topics("", None, usize::MAX)
    } else {
        let mut seen = HashSet::new();
        let names = topics.iter().filter(|name| seen.insert(name.as_str()));
        names.filter_map(|name| node.topic(name).ok()).collect()
    };
    reserve_response(call, topics.iter().map(|topic| routed_bytes(topic)).sum()).await?;
    let mut routes = Vec::with_capacity(topics.len());
    for topic in &topics {
        // Lets other tasks run.
        yield_now().await;
        routes.push(topic_route(topic));
    }
    let members = node.cluster().machine().read(|state| state.members().clone());
    let nodes = node.nodes().into_iter().map(|node| {
        let member = members.get(node.node_id);
        wire::Node {
            draining: member.is_some_and(|member| member.draining),
            leaving: member.is_some_and(|member| member.leaving),
            node_id: node.node_id,
            endpoint: node.endpoint,
            version: node.version,
            ..wire::Node::default()
        }
    });
    Ok(Metadata {
        cluster_id: info.cluster_id,
        version,
        nodes: nodes.collect(),
        shards: shard_routes(node),
        topics: routes,
    })
}

fn topic_route(topic: &TopicInfo) -> TopicRoute {
    let mut shard_ids = Vec::with_capacity(topic.partition_count as usize);
    shard_ids.extend(topic.locations().map(|location| wire_shard_id(location.shard_id)));
    TopicRoute { topic: topic.name.clone(), shard_ids, topic_id: topic.id }
}

fn routed_bytes(topic: &TopicInfo) -> usize {
    let name = 2 * topic.name.len();
    TOPIC_ROUTED_BYTES + name + topic.partition_count as usize * PARTITION_ROUTED_BYTES
}

/// Returns the routes of shard 0 and of the data shards.
fn shard_routes(node: &Node) -> Vec<ShardRoute> {
    let own = ShardRoute {
        shard_id: 0,
        leader: node.cluster().leader_hint().map(wire_leader),
        replicas: node.cluster().nodes(),
        learners: node.cluster().learners(),
    };
    let shards = node.shards();
    std::iter::once(own).chain(shards.iter().map(|shard| shard_route(shard))).collect()
}

fn shard_route(shard: &Shard) -> ShardRoute {
    ShardRoute {
        shard_id: wire_shard_id(shard.id()),
        leader: shard.leader_hint().map(wire_leader),
        replicas: shard.replicas(),
        learners: shard.learners(),
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

fn node_down(peer: &PeerStatus) -> HealthIssue {
    let why = peer.last_error.as_deref().unwrap_or("not connected yet");
    HealthIssue {
        reason: HealthReason::NodeDown.into(),
        shard_id: None,
        needed_node_ids: vec![peer.node_id],
        message: format!("node {} at {} is unreachable: {why}", peer.node_id, peer.address),
    }
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
    let nodes: Vec<String> =
        behind.iter().map(|(node, lag)| format!("node {node} lacks {lag} entries")).collect();
    Some(HealthIssue {
        reason: HealthReason::UnderReplicated.into(),
        shard_id: Some(shard_id),
        needed_node_ids: behind.iter().map(|(node, _)| *node).collect(),
        message: format!("shard {shard_id}: {}", nodes.join(", ")),
    })
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
    let damage = shard.damage().into_iter().map(move |what| HealthIssue {
        reason: HealthReason::CorruptLog.into(),
        shard_id: Some(shard_id),
        needed_node_ids: vec![node_id],
        message: damage_message(shard_id, &what, repair.as_deref()),
    });
    let fetching = fetching(shard, node_id);
    let behind = behind.into_iter().chain(fetching);
    no_leader.into_iter().chain(behind).chain(write_error).chain(damage.collect::<Vec<_>>())
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
