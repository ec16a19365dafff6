//! Administration: topics, offsets, groups, cluster state, leadership, membership and access.
//!
//! Calls go to any node, a partition's leader or a group's coordinator, and are retried until the
//! deadline.

mod access;
mod groups;
mod quotas;
mod topics;

use std::future::Future;
use std::time::Duration;

use helix_proto::log::v1::{
    AddNodeRequest, AddShardsRequest, BalanceLeadersRequest, CancelMoveRequest, ErrorReason,
    GetHealthRequest, GetHealthResponse, GetMetadataRequest, GetNodeStatusRequest,
    GetNodeStatusResponse, GetPlacementRequest, GetPlacementResponse, LeaderHint,
    ListSlowCallsRequest, MembershipChange, Metadata, MoveShardRequest, RemoveNodeRequest,
    ReplaceNodeRequest, ReplicaMove, SetCordonedRequest, SetDrainingRequest, SetMovesPausedRequest,
    SetReplicasRequest, SlowCall, TopicConfig, TransferLeaderRequest, WatchMembershipChangeRequest,
};
use tokio::time::timeout;
use tonic::{Code, Response, Status};

use crate::call_spec::{CallSpec, Repeat};
use crate::client::{CallAttempts, Client};
use crate::error::{Error, Result};
pub use access::AccessGrant;
pub use groups::SeekOptions;

/// A topic to create.
#[derive(Debug, Clone)]
pub struct NewTopic {
    /// Name.
    pub name: String,
    /// Partitions, at least 1.
    pub partition_count: u32,
    /// Replicas; 0 is the cluster's default.
    pub replication_factor: u32,
    /// Settings; an unset one takes the cluster's default.
    pub config: TopicConfig,
    /// Validate the request without creating the topic.
    pub validate_only: bool,
}

impl NewTopic {
    /// Returns a topic with default settings.
    pub fn new(name: impl Into<String>, partition_count: u32) -> Self {
        Self {
            name: name.into(),
            partition_count,
            replication_factor: 0,
            config: TopicConfig::default(),
            validate_only: false,
        }
    }
}

/// Administration of a cluster. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Admin {
    client: Client,
}

impl Client {
    /// Returns the administration handle.
    pub fn admin(&self) -> Admin {
        Admin { client: self.clone() }
    }
}

/// Every method also fails with the last failure if no node, or the partition's leader, can be
/// reached within the request timeout.
impl Admin {
    /// Returns nodes, shards and topics. An empty list selects all topics, and an empty name none.
    ///
    /// # Errors
    /// The last failure if no node responds within the request timeout.
    pub async fn metadata(&self, topics: &[&str]) -> Result<Metadata> {
        let topics: Vec<_> = topics.iter().map(|&topic| topic.to_owned()).collect();
        let response = self
            .client
            .call_any(CallSpec::new("metadata", Repeat::Read), |node| {
                let request = GetMetadataRequest { topics: topics.clone() };
                async move { node.cluster().get_metadata(request).await }
            })
            .await?;
        required(response.metadata)
    }

    /// Returns the health of the cluster, with its problems.
    ///
    /// # Errors
    /// The last failure if no node responds within the request timeout.
    pub async fn health(&self) -> Result<GetHealthResponse> {
        self.client
            .call_any(CallSpec::new("health", Repeat::Read), |node| async move {
                node.cluster().get_health(GetHealthRequest::default()).await
            })
            .await
    }

    /// Returns the status of the node at this address, or of any node for `None`. One attempt.
    ///
    /// # Errors
    /// The failure, or a timeout if the node does not respond within the attempt timeout.
    pub async fn node_status(&self, address: Option<&str>) -> Result<GetNodeStatusResponse> {
        let node = match address {
            Some(address) => self.client.shared.routing.node(address)?,
            None => self.client.shared.routing.any(0)?,
        };
        let mut cluster = node.cluster();
        self.once("node status", cluster.get_node_status(GetNodeStatusRequest {})).await
    }

    /// Returns nodes and shards as known to the node at this address, without topics. One attempt.
    ///
    /// # Errors
    /// The failure, or a timeout if the node does not respond within the attempt timeout.
    pub async fn node_metadata(&self, address: &str) -> Result<Metadata> {
        let routing = &self.client.shared.routing;
        let node = routing.node(address)?;
        let mut cluster = node.cluster();
        let response = self.once("metadata", cluster.get_metadata(without_topics())).await?;
        routing.on_reported(&node, &response);
        required(response.metadata)
    }

    /// Returns the address at which the client calls the node at this address: that of the node's
    /// Unix domain socket if it is in use, else the address itself.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if the address is malformed.
    pub fn dialed_address(&self, address: &str) -> Result<String> {
        Ok(self.client.shared.routing.node(address)?.address().to_owned())
    }

    /// Returns the cluster's health as known to the node at this address. One attempt.
    ///
    /// # Errors
    /// The failure, or a timeout if the node does not respond within the attempt timeout.
    pub async fn node_health(&self, address: &str) -> Result<GetHealthResponse> {
        let mut cluster = self.client.shared.routing.node(address)?.cluster();
        self.once("health", cluster.get_health(GetHealthRequest::default())).await
    }

    /// Returns the health as [`Admin::node_health`] does. The node also proves the shards that it
    /// leads by a committed entry.
    ///
    /// # Errors
    /// As [`Admin::node_health`].
    pub async fn prove_health(&self, address: &str) -> Result<GetHealthResponse> {
        let mut cluster = self.client.shared.routing.node(address)?.cluster();
        self.once("health", cluster.get_health(GetHealthRequest { prove: true })).await
    }

    /// Returns the slowest appends and reads of the node at this address over the last 15 minutes,
    /// the slowest first. One attempt.
    ///
    /// # Errors
    /// The failure, or a timeout if the node does not respond within the attempt timeout.
    pub async fn slow_calls(&self, address: &str) -> Result<Vec<SlowCall>> {
        let mut cluster = self.client.shared.routing.node(address)?.cluster();
        let asked = cluster.list_slow_calls(ListSlowCallsRequest {});
        Ok(self.once("slow calls", asked).await?.calls)
    }

    /// Makes one attempt at a call that changes nothing.
    async fn once<T>(
        &self,
        name: &str,
        attempt: impl Future<Output = std::result::Result<Response<T>, Status>>,
    ) -> Result<T> {
        let error = match timeout(self.client.config().attempt_timeout, attempt).await {
            Ok(Ok(response)) => return Ok(response.into_inner()),
            Ok(Err(status)) => Error::from_status(&status),
            Err(_) => Error::timed_out(name),
        };
        Err(error.with_may_have_applied(false))
    }

    /// Waits until a node responds and every shard that it knows has a leader.
    ///
    /// # Errors
    /// The last failure when `limit` has passed; `NO_LEADER` if a shard has no leader.
    pub async fn ready(&self, limit: Duration) -> Result<()> {
        let started = tokio::time::Instant::now();
        loop {
            let failure = match self.attempt_ready().await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            let wait = self.client.shared.jitter.draw(2);
            if started.elapsed() + wait >= limit {
                return Err(failure);
            }
            tokio::time::sleep(wait).await;
        }
    }

    async fn attempt_ready(&self) -> Result<()> {
        let node = self.client.shared.routing.any(0)?;
        let limit = self.client.config().connect_timeout;
        let mut cluster = node.cluster();
        let response = timeout(limit, cluster.get_metadata(without_topics()))
            .await
            .map_err(|_| Error::timed_out("metadata").with_may_have_applied(false))??;
        let metadata = required(response.into_inner().metadata)?;
        let is_led = |leader: &Option<LeaderHint>| leader.as_ref().is_some_and(|l| l.node_id != 0);
        if !metadata.shards.is_empty() && metadata.shards.iter().all(|shard| is_led(&shard.leader))
        {
            return Ok(());
        }
        Err(Error::known(ErrorReason::NoLeader, "not every shard has a leader"))
    }

    /// Drains a node before maintenance and waits until it leads no shard, or ends draining.
    ///
    /// # Errors
    /// `NODE_NOT_FOUND`; `NOT_ENOUGH_NODES` if no other node can lead.
    pub async fn set_draining(
        &self,
        node_id: u64,
        draining: bool,
        validate_only: bool,
    ) -> Result<()> {
        self.client
            .call_any(CallSpec::new("set draining", repeat(validate_only)), |node| async move {
                let request = SetDrainingRequest { node_id, draining, validate_only };
                node.cluster().set_draining(request).await
            })
            .await
            .map(|_| ())
    }

    /// Returns the nodes with a replica of each shard, the moves in progress, and what comes next
    /// or is in the way.
    ///
    /// # Errors
    /// `UNIMPLEMENTED` until every node of the cluster is upgraded.
    pub async fn placement(&self) -> Result<GetPlacementResponse> {
        let call = CallSpec::new("placement", Repeat::Read);
        let response = self.client.call_any(call, |node| async move {
            node.cluster().get_placement(GetPlacementRequest {}).await
        });
        response.await
    }

    /// Keeps new replicas away from a node, or no longer. Its replicas stay.
    ///
    /// # Errors
    /// `NODE_NOT_FOUND`; `NOT_ENOUGH_NODES` if no other node may get replicas.
    pub async fn set_cordoned(&self, node_id: u64, cordoned: bool) -> Result<()> {
        let call = CallSpec::new("set cordoned", Repeat::Always);
        let response = self.client.call_any(call, |node| async move {
            node.cluster().set_cordoned(SetCordonedRequest { node_id, cordoned }).await
        });
        response.await.map(|_| ())
    }

    /// Sets the number of replicas of every data shard: 1, 3 or 5.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for another number.
    pub async fn set_replicas(&self, replicas: u32) -> Result<()> {
        let call = CallSpec::new("set replicas", Repeat::Always);
        let response = self.client.call_any(call, |node| async move {
            node.cluster().set_replicas(SetReplicasRequest { replicas }).await
        });
        response.await.map(|_| ())
    }

    /// Adds data shards, up to `total`, if the cluster has `current` ones.
    ///
    /// A new shard takes partitions once it has its replicas: [`Admin::placement`] shows them. With
    /// `split`, it also takes a share of the partitions of an existing shard. With `replicas`, it
    /// has its own number of replicas, and only topics that ask for it use it. Succeeds if the
    /// cluster has `total` data shards already.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a number out of range, `MEMBERSHIP_CHANGE_IN_PROGRESS` if the cluster
    /// has another number than `current`, `UNIMPLEMENTED` before every node is upgraded.
    pub async fn add_shards(&self, request: AddShardsRequest) -> Result<()> {
        let call = CallSpec::new("add shards", Repeat::Always);
        let response = self
            .client
            .call_any(call, |node| async move { node.cluster().add_shards(request).await });
        response.await.map(|_| ())
    }

    /// Starts to move a replica of a data shard to a node that has none. [`Admin::placement`] has
    /// the progress.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`, `NODE_NOT_FOUND`, `MEMBERSHIP_CHANGE_REFUSED` or
    /// `MEMBERSHIP_CHANGE_IN_PROGRESS` with what is in the way.
    pub async fn move_shard(
        &self,
        shard_id: u32,
        from_node_id: u64,
        to_node_id: u64,
    ) -> Result<()> {
        let call = CallSpec::new("move shard", Repeat::UnlessApplied);
        let response = self.client.call_any(call, |node| async move {
            let request = MoveShardRequest { shard_id, from_node_id, to_node_id };
            node.cluster().move_shard(request).await
        });
        response.await.map(|_| ())
    }

    /// Pauses all moves of replicas, or resumes them. What was copied stays.
    ///
    /// # Errors
    /// `UNIMPLEMENTED` before every node runs a release that knows pauses.
    pub async fn set_moves_paused(&self, paused: bool) -> Result<()> {
        let call = CallSpec::new("set moves paused", Repeat::Always);
        let response = self.client.call_any(call, |node| async move {
            node.cluster().set_moves_paused(SetMovesPausedRequest { paused }).await
        });
        response.await.map(|_| ())
    }

    /// Cancels the move of a shard's replica, which leads back to the replicas from before, and
    /// returns it. For a shard that a split makes, cancels the split and returns `None`.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for an unknown shard; `MEMBERSHIP_CHANGE_REFUSED` if nothing moves.
    pub async fn cancel_move(&self, shard_id: u32) -> Result<Option<ReplicaMove>> {
        let call = CallSpec::new("cancel move", Repeat::UnlessApplied);
        let response = self.client.call_any(call, |node| async move {
            node.cluster().cancel_move(CancelMoveRequest { shard_id }).await
        });
        Ok(response.await?.r#move)
    }

    /// Adds a node that was started with an empty data directory.
    ///
    /// For a member, changes the address at which other nodes dial it. The change continues in the
    /// background: see [`Admin::membership_change`].
    ///
    /// # Errors
    /// `MEMBERSHIP_CHANGE_REFUSED` or `NOT_ENOUGH_NODES` with the check that failed;
    /// `MEMBERSHIP_CHANGE_IN_PROGRESS` if another change is running: wait for it.
    pub async fn add_node(
        &self,
        node_id: u64,
        peer_endpoint: &str,
        validate_only: bool,
    ) -> Result<Option<MembershipChange>> {
        let call = CallSpec::new("add node", repeat(validate_only));
        let response = self.client.call_any(call, |node| {
            let peer_endpoint = peer_endpoint.to_owned();
            let rack = String::new();
            let request = AddNodeRequest { node_id, peer_endpoint, rack, validate_only };
            async move { node.cluster().add_node(request).await }
        });
        Ok(response.await?.change)
    }

    /// Removes a node. A node that does not respond must be declared lost.
    ///
    /// # Errors
    /// As [`Admin::add_node`]; `NODE_NOT_FOUND`; `NOT_ENOUGH_NODES` if the other nodes cannot take
    /// the replicas of a node that is not lost.
    pub async fn remove_node(
        &self,
        node_id: u64,
        lost: bool,
        validate_only: bool,
    ) -> Result<Option<MembershipChange>> {
        let allow_fewer_replicas = false;
        let request = RemoveNodeRequest { node_id, lost, validate_only, allow_fewer_replicas };
        self.remove_node_with(request).await
    }

    /// Removes a node as [`Admin::remove_node`] does, with all options of the request.
    ///
    /// # Errors
    /// As [`Admin::remove_node`].
    pub async fn remove_node_with(
        &self,
        request: RemoveNodeRequest,
    ) -> Result<Option<MembershipChange>> {
        let call = CallSpec::new("remove node", repeat(request.validate_only));
        let response = self
            .client
            .call_any(call, |node| async move { node.cluster().remove_node(request).await });
        Ok(response.await?.change)
    }

    /// Replaces a lost node by `node_id`, which has an empty data directory and may be the same id.
    ///
    /// An empty `peer_endpoint` keeps the address.
    ///
    /// # Errors
    /// As [`Admin::add_node`]; `NODE_NOT_FOUND`.
    pub async fn replace_node(
        &self,
        lost_node_id: u64,
        node_id: u64,
        peer_endpoint: &str,
        validate_only: bool,
    ) -> Result<Option<MembershipChange>> {
        let call = CallSpec::new("replace node", repeat(validate_only));
        let response = self.client.call_any(call, |node| {
            let request = ReplaceNodeRequest {
                lost_node_id,
                node_id,
                peer_endpoint: peer_endpoint.to_owned(),
                rack: String::new(),
                validate_only,
            };
            async move { node.cluster().replace_node(request).await }
        });
        Ok(response.await?.change)
    }

    /// Returns the progress of a membership change; id 0 is the running or last one.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if there is no such change.
    pub async fn membership_change(&self, id: u64) -> Result<MembershipChange> {
        let call = CallSpec::new("membership change", Repeat::Read);
        let response = self.client.call_any(call, |node| async move {
            let request = WatchMembershipChangeRequest { id };
            let mut changes = node.cluster().watch_membership_change(request).await?.into_inner();
            let first = changes.message().await?;
            Ok(Response::new(first.and_then(|first| first.change)))
        });
        required(response.await?)
    }

    /// Moves shard leaderships to their preferred nodes now. Returns the ids of moved shards.
    ///
    /// # Errors
    /// The last failure if no node responds within the request timeout.
    pub async fn balance_leaders(&self) -> Result<Vec<u32>> {
        let call = CallSpec::new("balance leaders", Repeat::Always);
        let response = self.client.call_any(call, |node| async move {
            node.cluster().balance_leaders(BalanceLeadersRequest {}).await
        });
        Ok(response.await?.shard_ids)
    }

    /// Transfers a shard's leadership to a node. With `None` the service chooses the node.
    ///
    /// # Errors
    /// `NODE_NOT_FOUND`; `NO_LEADER` if the shard has no leader within the request timeout.
    pub async fn transfer_leader(
        &self,
        shard_id: u32,
        target_node_id: Option<u64>,
    ) -> Result<Option<LeaderHint>> {
        let request =
            TransferLeaderRequest { shard_id, target_node_id: target_node_id.unwrap_or(0) };
        let call = CallSpec::new("transfer leader", Repeat::UnlessApplied);
        let mut attempts = CallAttempts::new(&self.client.shared, call);
        let mut hint = None;
        loop {
            let leader = match hint.take() {
                Some(hint) => Ok(hint),
                None => self.leader(shard_id).await,
            };
            let result = match leader {
                Ok(leader) => {
                    let node = self.client.shared.routing.node(&leader.endpoint)?;
                    attempts.attempt(node.cluster().transfer_leader(request)).await
                }
                Err(error) => Err(error),
            };
            let error = match result {
                Ok(response) => return Ok(response.leader),
                Err(error) => attempts.judge(error, None)?,
            };
            hint = error.leader.clone().filter(is_reachable);
            attempts.pause(error).await?;
        }
    }

    /// Returns the shard's current leader.
    async fn leader(&self, shard_id: u32) -> Result<LeaderHint> {
        let metadata = self.metadata(&[""]).await?;
        let shard = metadata.shards.into_iter().find(|shard| shard.shard_id == shard_id);
        let shard = shard.ok_or_else(|| {
            Error::client(Code::NotFound, format!("the cluster has no shard {shard_id}"))
        })?;
        shard.leader.filter(is_reachable).ok_or_else(|| {
            let message = format!("no leader is known for shard {shard_id}");
            Error::known(ErrorReason::NoLeader, message)
        })
    }
}

/// Requests nodes and shards, so that the size of the response does not depend on the topics: no
/// topic has an empty name.
fn without_topics() -> GetMetadataRequest {
    GetMetadataRequest { topics: vec![String::new()] }
}

/// Returns the rule for an idempotent change, or for its validation, which changes nothing.
fn repeat(validate_only: bool) -> Repeat {
    if validate_only { Repeat::Read } else { Repeat::Always }
}

fn is_reachable(hint: &LeaderHint) -> bool {
    hint.node_id != 0 && !hint.endpoint.is_empty()
}

fn required<T>(field: Option<T>) -> Result<T> {
    field.ok_or_else(|| Error::client(Code::Internal, "the response lacks its content"))
}

/// Returns the rows of all pages. `page` gets a token, first the empty one, and returns its rows
/// with the token of the next page, which is empty at the end.
async fn all_pages<T, F>(page: impl Fn(String) -> F) -> Result<Vec<T>>
where
    F: Future<Output = Result<(Vec<T>, String)>>,
{
    let (mut rows, mut token) = (Vec::new(), String::new());
    loop {
        let (more, next) = page(token.clone()).await?;
        rows.extend(more);
        // A service that repeats a token would never end.
        if next.is_empty() || next == token {
            return Ok(rows);
        }
        token = next;
    }
}
