//! Topics, offsets and the state of the cluster: the calls of people and tools.
//! Each goes to any node or to a partition's leader and is repeated until the deadline.

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

use crate::client::{Call, Client, Series};
use crate::consumer::{Groups, Position};
use crate::error::{Error, Result};
use crate::retry::Repeat;

/// Topics of one page when all are listed.
const PAGE_TOPICS: i32 = 1000;

/// A topic to be made.
#[derive(Debug, Clone)]
pub struct NewTopic {
    /// Name.
    pub name: String,
    /// Partitions, at least 1.
    pub partition_count: u32,
    /// Replicas; 0 is the cluster's default.
    pub replication_factor: u32,
    /// Settings; what is unset takes the cluster's default.
    pub config: TopicConfig,
    /// Check only.
    pub validate_only: bool,
}

impl NewTopic {
    /// A topic with default settings.
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

/// Administration. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Admin {
    client: Client,
}

impl Client {
    /// Administration of the cluster.
    pub fn admin(&self) -> Admin {
        Admin { client: self.clone() }
    }
}

/// Every method returns the service's refusal, or why no node (or the partition's leader) could be
/// reached within the request timeout; what else is special is said there.
impl Admin {
    /// Makes a topic. Succeeds if it is there already with equal settings.
    ///
    /// # Errors
    /// `TOPIC_ALREADY_EXISTS` if it has other settings.
    pub async fn create_topic(&self, topic: &NewTopic) -> Result<Topic> {
        let call = Call::new("create topic", Repeat::Always);
        let answer = self
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
        present(answer.topic)
    }

    /// Describes a topic.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`.
    pub async fn topic(&self, name: &str) -> Result<Topic> {
        let answer = self
            .client
            .call_any(Call::new("get topic", Repeat::Read), |node| {
                let request = GetTopicRequest { name: name.to_owned() };
                async move { node.topic().get_topic(request).await }
            })
            .await?;
        present(answer.topic)
    }

    /// All topics whose names begin with `prefix`, ordered by name.
    ///
    /// # Errors
    /// See [`Admin`].
    pub async fn topics(&self, prefix: &str) -> Result<Vec<Topic>> {
        let mut topics = Vec::new();
        let mut page_token = String::new();
        loop {
            let page = self
                .client
                .call_any(Call::new("list topics", Repeat::Read), |node| {
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

    /// Changes the settings named in `fields` (field names of `TopicConfig`); one that `config`
    /// leaves unset goes back to the cluster's default.
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
        let answer = self
            .client
            .call_any(Call::new("update topic", Repeat::Always), |node| {
                let request = UpdateTopicRequest {
                    name: name.to_owned(),
                    config: Some(*config),
                    update_mask: Some(prost_types::FieldMask { paths: paths.clone() }),
                };
                async move { node.topic().update_topic(request).await }
            })
            .await?;
        present(answer.topic)
    }

    /// Raises the number of partitions to `partition_count`. Keys move to other partitions.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`; `INVALID_ARGUMENT` for fewer than there are.
    pub async fn add_partitions(&self, name: &str, partition_count: u32) -> Result<Topic> {
        let answer = self
            .client
            .call_any(Call::new("add partitions", Repeat::Always), |node| {
                let request = AddPartitionsRequest { name: name.to_owned(), partition_count };
                async move { node.topic().add_partitions(request).await }
            })
            .await?;
        self.client.shared.routing.forget_topic(name);
        present(answer.topic)
    }

    /// Deletes a topic and its data.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`; with `may_have_applied` if an attempt before may have deleted it.
    pub async fn delete_topic(&self, name: &str) -> Result<()> {
        let result = self
            .client
            .call_any(Call::new("delete topic", Repeat::Always), |node| {
                let request = DeleteTopicRequest { name: name.to_owned() };
                async move { node.topic().delete_topic(request).await }
            })
            .await;
        self.client.shared.routing.forget_topic(name);
        result.map(|_| ())
    }

    /// Drops the records of a partition below `offset`.
    ///
    /// # Errors
    /// `OFFSET_OUT_OF_RANGE` above the high watermark.
    pub async fn trim(&self, topic: &str, partition: u32, offset: u64) -> Result<Watermarks> {
        let call = Call::new("trim", Repeat::Always);
        let answer = self
            .client
            .call_leader((topic, partition), call, |leader| {
                let topic = topic.to_owned();
                let request = TrimPartitionRequest { topic, partition, trim_offset: offset };
                async move { leader.topic().trim_partition(request).await }
            })
            .await?;
        Ok(answer.watermarks.unwrap_or_default())
    }

    /// Sets a partition's fencing token (up to 64 bytes; empty: none), if `expected` holds.
    ///
    /// # Errors
    /// `FENCED` if another token holds.
    pub async fn set_fencing_token(
        &self,
        topic: &str,
        partition: u32,
        expected: Option<&str>,
        token: &str,
    ) -> Result<Watermarks> {
        // With an expectation a second attempt could be refused by the first one's success.
        let call = Call::new(
            "set fencing token",
            match expected {
                Some(_) => Repeat::UnlessApplied,
                None => Repeat::Always,
            },
        );
        let answer = self
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
        Ok(answer.watermarks.unwrap_or_default())
    }

    /// Offsets of a position in some partitions of a topic (none named: all), in the order of the
    /// partitions.
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
        let call = Call::new("resolve offsets", Repeat::Read);
        let mut series = Series::new(&self.client.shared, call);
        let mut offsets = loop {
            let mut groups = Groups::default();
            let mut failure = None;
            for (member, &partition) in partitions.iter().enumerate() {
                match series.route((topic, partition)).await {
                    Ok(route) => groups.add(route, member),
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
                        let answer = series.attempt(consume.resolve_offsets(request)).await;
                        answer.map_err(|error| (error, Some(group.route.clone())))
                    });
                    match try_join_all(calls).await {
                        Ok(answers) => {
                            break answers
                                .into_iter()
                                .flat_map(|answer| answer.offsets)
                                .collect::<Vec<_>>();
                        }
                        Err(failure) => failure,
                    }
                }
            };
            let error = series.judge(error, route.as_ref())?;
            series.pause(error).await?;
        };
        offsets.sort_by_key(|offset| offset.partition);
        Ok(offsets)
    }

    /// Nodes, shards and topics (none named: all).
    ///
    /// # Errors
    /// See [`Admin`].
    pub async fn metadata(&self, topics: &[&str]) -> Result<Metadata> {
        let topics: Vec<_> = topics.iter().map(|&topic| topic.to_owned()).collect();
        let answer = self
            .client
            .call_any(Call::new("metadata", Repeat::Read), |node| {
                let request = GetMetadataRequest { topics: topics.clone() };
                async move { node.cluster().get_metadata(request).await }
            })
            .await?;
        present(answer.metadata)
    }

    /// Health of the cluster, with what is wrong.
    ///
    /// # Errors
    /// See [`Admin`].
    pub async fn health(&self) -> Result<GetHealthResponse> {
        self.client
            .call_any(Call::new("health", Repeat::Read), |node| async move {
                node.cluster().get_health(GetHealthRequest {}).await
            })
            .await
    }

    /// State of the node at this address; None asks any node. One attempt.
    ///
    /// # Errors
    /// Why the node did not answer within the attempt timeout.
    pub async fn node_status(&self, address: Option<&str>) -> Result<GetNodeStatusResponse> {
        let node = match address {
            Some(address) => self.client.shared.routing.node(address)?,
            None => self.client.shared.routing.any(0)?,
        };
        let mut cluster = node.cluster();
        self.once("node status", cluster.get_node_status(GetNodeStatusRequest {})).await
    }

    /// Nodes, shards and all topics as the node at this address sees them. One attempt.
    ///
    /// # Errors
    /// Why the node did not answer within the attempt timeout.
    pub async fn node_metadata(&self, address: &str) -> Result<Metadata> {
        let mut cluster = self.client.shared.routing.node(address)?.cluster();
        let call = cluster.get_metadata(GetMetadataRequest::default());
        present(self.once("metadata", call).await?.metadata)
    }

    /// Health of the cluster as the node at this address sees it. One attempt.
    ///
    /// # Errors
    /// Why the node did not answer within the attempt timeout.
    pub async fn node_health(&self, address: &str) -> Result<GetHealthResponse> {
        let mut cluster = self.client.shared.routing.node(address)?.cluster();
        self.once("health", cluster.get_health(GetHealthRequest {})).await
    }

    /// One attempt at something that changes nothing.
    async fn once<T>(
        &self,
        name: &str,
        attempt: impl Future<Output = std::result::Result<Response<T>, Status>>,
    ) -> Result<T> {
        let error = match timeout(self.client.config().attempt_timeout, attempt).await {
            Ok(Ok(answer)) => return Ok(answer.into_inner()),
            Ok(Err(status)) => Error::from_status(&status),
            Err(_) => Error::timed_out(name),
        };
        Err(error.with_may_have_applied(false))
    }

    /// Waits until a node answers and every shard that it knows has a leader.
    ///
    /// # Errors
    /// What was wrong last when the time was over.
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
        let answer = timeout(limit, cluster.get_metadata(GetMetadataRequest::default()))
            .await
            .map_err(|_| Error::timed_out("metadata").with_may_have_applied(false))??;
        let metadata = present(answer.into_inner().metadata)?;
        let is_led = |leader: &Option<LeaderHint>| leader.as_ref().is_some_and(|l| l.node_id != 0);
        if !metadata.shards.is_empty() && metadata.shards.iter().all(|shard| is_led(&shard.leader))
        {
            return Ok(());
        }
        Err(Error::known(ErrorReason::NoLeader, "not every shard has a leader"))
    }

    /// Moves leaders off a node before maintenance and waits until it leads nothing, or ends that
    /// state.
    ///
    /// # Errors
    /// `NODE_NOT_FOUND`; `NOT_ENOUGH_NODES` if nobody else could lead.
    pub async fn set_draining(
        &self,
        node_id: u64,
        draining: bool,
        validate_only: bool,
    ) -> Result<()> {
        self.client
            .call_any(Call::new("set draining", Repeat::Always), |node| async move {
                let request = SetDrainingRequest { node_id, draining, validate_only };
                node.cluster().set_draining(request).await
            })
            .await
            .map(|_| ())
    }

    /// Adds a node that was started with an empty data folder; for a member, changes the address
    /// at which other nodes dial it. The change goes on by itself: see
    /// [`Admin::membership_change`].
    ///
    /// # Errors
    /// `MEMBERSHIP_CHANGE_REFUSED` or `NOT_ENOUGH_NODES` with the check that failed;
    /// `MEMBERSHIP_CHANGE_IN_PROGRESS`.
    pub async fn add_node(
        &self,
        node_id: u64,
        peer_endpoint: &str,
        validate_only: bool,
    ) -> Result<Option<MembershipChange>> {
        let call = Call::new("add node", Repeat::Always);
        let answer = self.client.call_any(call, |node| {
            let peer_endpoint = peer_endpoint.to_owned();
            let rack = String::new();
            let request = AddNodeRequest { node_id, peer_endpoint, rack, validate_only };
            async move { node.cluster().add_node(request).await }
        });
        Ok(answer.await?.change)
    }

    /// Removes a node; one that does not answer only if it is said to be lost.
    ///
    /// # Errors
    /// As [`Admin::add_node`]; `NODE_NOT_FOUND`.
    pub async fn remove_node(
        &self,
        node_id: u64,
        lost: bool,
        validate_only: bool,
    ) -> Result<Option<MembershipChange>> {
        let call = Call::new("remove node", Repeat::Always);
        let answer = self.client.call_any(call, |node| async move {
            let request = RemoveNodeRequest { node_id, lost, validate_only };
            node.cluster().remove_node(request).await
        });
        Ok(answer.await?.change)
    }

    /// Puts `node_id`, which may be the same, with an empty data folder in the place of a node
    /// that is lost. An empty `peer_endpoint` leaves the address as it was.
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
        let call = Call::new("replace node", Repeat::Always);
        let answer = self.client.call_any(call, |node| {
            let request = ReplaceNodeRequest {
                lost_node_id,
                node_id,
                peer_endpoint: peer_endpoint.to_owned(),
                rack: String::new(),
                validate_only,
            };
            async move { node.cluster().replace_node(request).await }
        });
        Ok(answer.await?.change)
    }

    /// How far a change of the cluster's nodes is; 0: the one that runs, or was the last.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if there never was such a change.
    pub async fn membership_change(&self, id: u64) -> Result<MembershipChange> {
        let call = Call::new("membership change", Repeat::Read);
        let answer = self.client.call_any(call, |node| async move {
            let request = WatchMembershipChangeRequest { id };
            let mut changes = node.cluster().watch_membership_change(request).await?.into_inner();
            let first = changes.message().await?;
            Ok(Response::new(first.and_then(|answer| answer.change)))
        });
        present(answer.await?)
    }

    /// Has every shard led by the node that should lead it, now; says which were moved.
    ///
    /// # Errors
    /// See [`Admin`].
    pub async fn balance_leaders(&self) -> Result<Vec<u32>> {
        let call = Call::new("balance leaders", Repeat::Always);
        let answer = self.client.call_any(call, |node| async move {
            node.cluster().balance_leaders(BalanceLeadersRequest {}).await
        });
        Ok(answer.await?.shard_ids)
    }

    /// Moves a shard's leadership to a node; None lets the service choose. Goes to the shard's
    /// leader, wherever it is.
    ///
    /// # Errors
    /// `NODE_NOT_FOUND`; `NO_LEADER` if none came up in time.
    pub async fn transfer_leader(
        &self,
        shard_id: u32,
        target_node_id: Option<u64>,
    ) -> Result<Option<LeaderHint>> {
        let request =
            TransferLeaderRequest { shard_id, target_node_id: target_node_id.unwrap_or(0) };
        let call = Call::new("transfer leader", Repeat::UnlessApplied);
        let mut series = Series::new(&self.client.shared, call);
        let mut hint = None;
        loop {
            let leader = match hint.take() {
                Some(hint) => Ok(hint),
                None => self.leader(shard_id).await,
            };
            let result = match leader {
                Ok(leader) => {
                    let node = self.client.shared.routing.node(&leader.endpoint)?;
                    series.attempt(node.cluster().transfer_leader(request)).await
                }
                Err(error) => Err(error),
            };
            let error = match result {
                Ok(answer) => return Ok(answer.leader),
                Err(error) => series.judge(error, None)?,
            };
            hint = error.leader.clone().filter(is_reachable);
            series.pause(error).await?;
        }
    }

    /// The shard's leader, as the cluster says now.
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

fn present<T>(field: Option<T>) -> Result<T> {
    field.ok_or_else(|| Error::client(Code::Internal, "an answer without its content"))
}
