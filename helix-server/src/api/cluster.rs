//! ClusterService: metadata, health, node status and membership changes.
//! Every response is this node's view.

use std::sync::Arc;

use helix_proto::log::v1 as wire;
use helix_proto::log::v1::cluster_service_server::ClusterService;
use helix_proto::log::v1::{
    AddNodeRequest, AddNodeResponse, AddShardsRequest, AddShardsResponse, BalanceLeadersRequest,
    BalanceLeadersResponse, CancelMoveRequest, CancelMoveResponse, GetHealthRequest,
    GetHealthResponse, GetMetadataRequest, GetMetadataResponse, GetNodeStatusRequest,
    GetNodeStatusResponse, GetPlacementRequest, GetPlacementResponse, ListSlowCallsRequest,
    ListSlowCallsResponse, MoveShardRequest, MoveShardResponse, RemoveNodeRequest,
    RemoveNodeResponse, ReplaceNodeRequest, ReplaceNodeResponse, SetCordonedRequest,
    SetCordonedResponse, SetDrainingRequest, SetDrainingResponse, SetMovesPausedRequest,
    SetMovesPausedResponse, SetReplicasRequest, SetReplicasResponse, TransferLeaderRequest,
    TransferLeaderResponse, WatchMembershipChangeRequest, WatchMembershipChangeResponse,
    WatchMetadataRequest, WatchMetadataResponse,
};
use tokio::time::Instant;
use tonic::codegen::BoxStream;
use tonic::{Request, Response, Status};

use super::authorize::{authorize_change, authorize_request};
use super::metadata::MetadataSource;
use super::probe::ShardProver;
use super::{
    call_memory, health_issues, member_changes, placement, recheck, slow_calls, time, wire_leader,
    wire_shard_id,
};
use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::log::AddShards;
use crate::node::{Node, StorageKind};
use crate::process;
use crate::shard::{Shard, ShardStatus};

pub(crate) struct ClusterHandler {
    node: Arc<Node>,
    metadata: Arc<MetadataSource>,
    started: Instant,
    prover: ShardProver,
}

impl ClusterHandler {
    pub(crate) fn new(node: &Arc<Node>) -> Self {
        let metadata = MetadataSource::new(node);
        Self {
            node: node.clone(),
            metadata,
            started: Instant::now(),
            prover: ShardProver::default(),
        }
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
            protocol_version: Some(self.node.cluster().protocol()),
            newest_protocol_version: Some(self.node.cluster().newest_protocol()),
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
        let mut health = health_issues::collect(&self.node);
        if request.into_inner().prove {
            health.issues.extend(self.prover.issues(&self.node).await);
            health.healthy = health.issues.is_empty();
        }
        Ok(Response::new(health))
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

    async fn add_shards(
        &self,
        request: Request<AddShardsRequest>,
    ) -> Result<Response<AddShardsResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        self.node.check_member()?;
        let AddShardsRequest { current, total, split, replicas } = request.into_inner();
        let add = AddShards { current, total, split, replicas };
        self.node.cluster().add_shards(add).await?;
        Ok(Response::new(AddShardsResponse {}))
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
