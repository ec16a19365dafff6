//! Administration: topics, offsets, cluster state, leadership and membership.
//!
//! Calls go to any node or to a partition's leader and are retried until the deadline.

use std::future::Future;
use std::time::Duration;

use futures_util::future::try_join_all;
use helix_proto::log::v1::{
    AddNodeRequest, AddPartitionsRequest, BalanceLeadersRequest, CreateTopicRequest,
    DeleteTopicRequest, ErrorReason, GetHealthRequest, GetHealthResponse, GetMetadataRequest,
    GetNodeStatusRequest, GetNodeStatusResponse, GetTopicRequest, LeaderHint, ListTopicsRequest,
    MembershipChange, Metadata, RemoveNodeRequest, ReplaceNodeRequest, ResolveOffsetsRequest,
    ResolvedOffset, SetDrainingRequest, SetFencingTokenRequest, Topic, TopicConfig,
    TransferLeaderRequest, TrimPartitionRequest, UpdateTopicRequest, WatchMembershipChangeRequest,
    Watermarks,
};
use tokio::time::timeout;
use tonic::{Code, Response, Status};

use crate::client::{CallAttempts, CallSpec, Client};
use crate::consumer::{NodeGroups, Position};
use crate::error::{Error, Result};
use crate::retry::Repeat;

/// Bytes of a partition number in a request.
const NUMBER_BYTES: usize = 5;

/// Topics per page when all are listed.
const PAGE_TOPICS: i32 = 1000;

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
    /// Creates a topic. Succeeds if it already exists with equal settings.
    ///
    /// # Errors
    /// `TOPIC_ALREADY_EXISTS` if it exists with other settings.
    pub async fn create_topic(&self, topic: &NewTopic) -> Result<Topic> {
        let call = CallSpec::new("create topic", Repeat::Always);
        let response = self
            .client
            .call_any(call, |node| {
                let request = CreateTopicRequest {
                    name: topic.name.clone(),
                    partition_count: topic.partition_count,
                    replication_factor: topic.replication_factor,
                    config: Some(topic.config),
                    validate_only: topic.validate_only,
                };
                async move { node.topic().create_topic(request).await }
            })
            .await?;
        self.client.shared.routing.forget_topic(&topic.name);
        required(response.topic)
    }

    /// Returns a topic.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`.
    pub async fn topic(&self, name: &str) -> Result<Topic> {
        let response = self
            .client
            .call_any(CallSpec::new("get topic", Repeat::Read), |node| {
                let request = GetTopicRequest { name: name.to_owned() };
                async move { node.topic().get_topic(request).await }
            })
            .await?;
        required(response.topic)
    }

    /// Returns all topics whose names start with `prefix`, ordered by name.
    ///
    /// # Errors
    /// The last failure if no node responds within the request timeout.
    pub async fn topics(&self, prefix: &str) -> Result<Vec<Topic>> {
        let mut topics = Vec::new();
        let mut page_token = String::new();
        loop {
            let page = self
                .client
                .call_any(CallSpec::new("list topics", Repeat::Read), |node| {
                    let request = ListTopicsRequest {
                        prefix: prefix.to_owned(),
                        page_size: PAGE_TOPICS,
                        page_token: page_token.clone(),
                    };
                    async move { node.topic().list_topics(request).await }
                })
                .await?;
            topics.extend(page.topics);
            if page.next_page_token.is_empty() || page.next_page_token == page_token {
                return Ok(topics);
            }
            page_token = page.next_page_token;
        }
    }

    /// Changes the settings named in `fields`, which are field names of `TopicConfig`.
    ///
    /// A named setting that is unset in `config` returns to the cluster's default.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`.
    pub async fn update_topic(
        &self,
        name: &str,
        config: &TopicConfig,
        fields: &[&str],
    ) -> Result<Topic> {
        let paths: Vec<_> = fields.iter().map(|&field| field.to_owned()).collect();
        let response = self
            .client
            .call_any(CallSpec::new("update topic", Repeat::Always), |node| {
                let request = UpdateTopicRequest {
                    name: name.to_owned(),
                    config: Some(*config),
                    update_mask: Some(prost_types::FieldMask { paths: paths.clone() }),
                };
                async move { node.topic().update_topic(request).await }
            })
            .await?;
        required(response.topic)
    }

    /// Raises the number of partitions to `partition_count`. Keys move to other partitions.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`; `INVALID_ARGUMENT` if the topic has more partitions already.
    pub async fn add_partitions(&self, name: &str, partition_count: u32) -> Result<Topic> {
        let response = self
            .client
            .call_any(CallSpec::new("add partitions", Repeat::Always), |node| {
                let request = AddPartitionsRequest { name: name.to_owned(), partition_count };
                async move { node.topic().add_partitions(request).await }
            })
            .await?;
        self.client.shared.routing.forget_topic(name);
        required(response.topic)
    }

    /// Deletes a topic and its data.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`; with `may_have_applied` if an earlier attempt may have deleted it.
    pub async fn delete_topic(&self, name: &str) -> Result<()> {
        let result = self
            .client
            .call_any(CallSpec::new("delete topic", Repeat::Always), |node| {
                let request = DeleteTopicRequest { name: name.to_owned() };
                async move { node.topic().delete_topic(request).await }
            })
            .await;
        self.client.shared.routing.forget_topic(name);
        result.map(|_| ())
    }

    /// Deletes the records of a partition below `offset`.
    ///
    /// # Errors
    /// `OFFSET_OUT_OF_RANGE` if `offset` is above the high watermark.
    pub async fn trim(&self, topic: &str, partition: u32, offset: u64) -> Result<Watermarks> {
        let call = CallSpec::new("trim", Repeat::Always);
        let response = self
            .client
            .call_leader((topic, partition), call, |leader| {
                let topic = topic.to_owned();
                let request = TrimPartitionRequest { topic, partition, trim_offset: offset };
                async move { leader.topic().trim_partition(request).await }
            })
            .await?;
        Ok(response.watermarks.unwrap_or_default())
    }

    /// Sets a partition's fencing token (up to 64 bytes; empty: none) if `expected` is in force.
    ///
    /// # Errors
    /// `FENCED` if another token is in force; the error has it in `fencing_token`.
    pub async fn set_fencing_token(
        &self,
        topic: &str,
        partition: u32,
        expected: Option<&str>,
        token: &str,
    ) -> Result<Watermarks> {
        // With an expected token, a retry would be rejected because the first attempt succeeded.
        let call = CallSpec::new(
            "set fencing token",
            match expected {
                Some(_) => Repeat::UnlessApplied,
                None => Repeat::Always,
            },
        );
        let response = self
            .client
            .call_leader((topic, partition), call, |leader| {
                let request = SetFencingTokenRequest {
                    topic: topic.to_owned(),
                    partition,
                    expected_token: expected.map(str::to_owned),
                    token: token.to_owned(),
                };
                async move { leader.topic().set_fencing_token(request).await }
            })
            .await?;
        Ok(response.watermarks.unwrap_or_default())
    }

    /// Resolves a position to offsets in partitions of a topic, ordered by partition.
    ///
    /// An empty list selects all partitions.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`, `PARTITION_NOT_FOUND`.
    pub async fn resolve_offsets(
        &self,
        topic: &str,
        partitions: &[u32],
        position: &Position,
    ) -> Result<Vec<ResolvedOffset>> {
        let partitions = match partitions {
            [] => (0..self.client.partition_count(topic).await?).collect(),
            named => named.to_vec(),
        };
        let call = CallSpec::new("resolve offsets", Repeat::Read);
        let mut attempts = CallAttempts::new(&self.client.shared, call);
        let mut offsets = loop {
            let mut groups = NodeGroups::default();
            let mut failure = None;
            for (member, &partition) in partitions.iter().enumerate() {
                match attempts.route((topic, partition)).await {
                    Ok(route) => groups.add(route, member, NUMBER_BYTES),
                    Err(error) => {
                        failure = Some((error, None));
                        break;
                    }
                }
            }
            let (error, route) = match failure {
                Some(failure) => failure,
                None => {
                    let calls = groups.list.iter().map(|group| async {
                        let request = ResolveOffsetsRequest {
                            topic: topic.to_owned(),
                            partitions: group.members.iter().map(|&m| partitions[m]).collect(),
                            position: Some(position.to_wire()),
                        };
                        let mut consume = group.route.connection.consume();
                        let response = attempts.attempt(consume.resolve_offsets(request)).await;
                        response.map_err(|error| (error, Some(group.route.clone())))
                    });
                    match try_join_all(calls).await {
                        Ok(responses) => {
                            break responses
                                .into_iter()
                                .flat_map(|response| response.offsets)
                                .collect::<Vec<_>>();
                        }
                        Err(failure) => failure,
                    }
                }
            };
            let error = attempts.judge(error, route.as_ref())?;
            attempts.pause(error).await?;
        };
        offsets.sort_by_key(|offset| offset.partition);
        Ok(offsets)
    }

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
                node.cluster().get_health(GetHealthRequest {}).await
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

    /// Returns nodes, shards and topics as known to the node at this address. One attempt.
    ///
    /// # Errors
    /// The failure, or a timeout if the node does not respond within the attempt timeout.
    pub async fn node_metadata(&self, address: &str) -> Result<Metadata> {
        let mut cluster = self.client.shared.routing.node(address)?.cluster();
        let call = cluster.get_metadata(GetMetadataRequest::default());
        required(self.once("metadata", call).await?.metadata)
    }

    /// Returns the cluster's health as known to the node at this address. One attempt.
    ///
    /// # Errors
    /// The failure, or a timeout if the node does not respond within the attempt timeout.
    pub async fn node_health(&self, address: &str) -> Result<GetHealthResponse> {
        let mut cluster = self.client.shared.routing.node(address)?.cluster();
        self.once("health", cluster.get_health(GetHealthRequest {})).await
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
        // No topic has this name, so the size of the response does not depend on the topics.
        let request = GetMetadataRequest { topics: vec![String::new()] };
        let response = timeout(limit, cluster.get_metadata(request))
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
            .call_any(CallSpec::new("set draining", Repeat::Always), |node| async move {
                let request = SetDrainingRequest { node_id, draining, validate_only };
                node.cluster().set_draining(request).await
            })
            .await
            .map(|_| ())
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
        let call = CallSpec::new("add node", Repeat::Always);
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
    /// As [`Admin::add_node`]; `NODE_NOT_FOUND`.
    pub async fn remove_node(
        &self,
        node_id: u64,
        lost: bool,
        validate_only: bool,
    ) -> Result<Option<MembershipChange>> {
        let call = CallSpec::new("remove node", Repeat::Always);
        let response = self.client.call_any(call, |node| async move {
            let request = RemoveNodeRequest { node_id, lost, validate_only };
            node.cluster().remove_node(request).await
        });
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
        let call = CallSpec::new("replace node", Repeat::Always);
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
        let metadata = self.metadata(&[]).await?;
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

fn is_reachable(hint: &LeaderHint) -> bool {
    hint.node_id != 0 && !hint.endpoint.is_empty()
}

fn required<T>(field: Option<T>) -> Result<T> {
    field.ok_or_else(|| Error::client(Code::Internal, "the response lacks its content"))
}
