//! TopicService: creates, describes, changes and deletes topics.
//! The cluster's state decides each change; the shards on this node describe the partitions.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use helix_proto::log::v1::topic_service_server::TopicService;
use helix_proto::log::v1::{
    AddPartitionsRequest, AddPartitionsResponse, CreateTopicRequest, CreateTopicResponse,
    DeleteTopicRequest, DeleteTopicResponse, GetTopicRequest, GetTopicResponse, ListTopicsRequest,
    ListTopicsResponse, PartitionInfo, SetFencingTokenRequest, SetFencingTokenResponse, Topic,
    TrimPartitionRequest, TrimPartitionResponse, UpdateTopicRequest, UpdateTopicResponse,
};
use tokio::task::yield_now;
use tokio::time::timeout;
use tonic::{Request, Response, Status};

use super::authorize::{Visibility, authorize_change};
use super::batch::fencing_token;
use super::page::{cut_page, page_size};
use super::{
    call_memory, recheck, reserve_response, settings, wire_leader, wire_shard_id, wire_watermarks,
};
use crate::call::CallMemory;
use crate::cluster::TopicSpec;
use crate::error::{Error, Result};
use crate::limits::{
    COMPRESSION_WAIT_MAX, PARTITION_DESCRIBED_BYTES, PARTITIONS_PER_PAGE_MAX,
    PARTITIONS_PER_TOPIC_MAX, PARTITIONS_PER_TURN, TOPIC_NAME_BYTES_MAX, TOPICS_PER_PAGE_DEFAULT,
    TOPICS_PER_PAGE_MAX,
};
use crate::log::{PartitionId, PartitionLocation, SettingsMask, TopicInfo};
use crate::node::{LocatedPartition, Node};
use crate::protocol;
use crate::quote::quote;

// The other half covers its heap data and its encoded form.
const _: () = assert!(size_of::<PartitionInfo>() <= PARTITION_DESCRIBED_BYTES / 2);

/// Longest wait for what other nodes know of partitions without a replica here.
const ELSEWHERE_WAIT_MAX: Duration = Duration::from_secs(1);

pub(crate) struct TopicHandler {
    node: Arc<Node>,
}

impl TopicHandler {
    pub(crate) fn new(node: &Arc<Node>) -> Self {
        Self { node: node.clone() }
    }

    /// Creates a topic, or returns the one with the same name and settings.
    ///
    /// # Errors
    /// An argument is not valid, or the topic exists with other settings.
    pub(crate) async fn create(
        &self,
        request: CreateTopicRequest,
        call: Option<&CallMemory>,
    ) -> Result<Topic> {
        check_name(&request.name)?;
        if request.partition_count == 0 {
            return Err(Error::InvalidArgument {
                field: "partition_count",
                what: "must be at least 1".to_owned(),
            });
        }
        let spec = TopicSpec {
            name: request.name,
            partition_count: request.partition_count,
            replication_factor: request.replication_factor,
            settings: settings::from_config(request.config, self.node.topic_settings())?,
        };
        self.check_protocol(settings::fields_of_later_versions(&spec.settings)).await?;
        reserve_response(call, described_bytes(spec.partition_count)).await?;
        let topic = self.node.cluster().create_topic(spec, request.validate_only).await?;
        Ok(self.describe(&topic).await)
    }

    async fn list(
        &self,
        request: &ListTopicsRequest,
        call: Option<&CallMemory>,
    ) -> Result<ListTopicsResponse> {
        let page_size = page_size(request.page_size, TOPICS_PER_PAGE_DEFAULT, TOPICS_PER_PAGE_MAX)?;
        let after = Some(request.page_token.as_str()).filter(|after| !after.is_empty());
        let visible = Visibility::of(&self.node, call)?;
        let is_visible = |name: &str| visible.sees_topic(name);
        let mut found = self.node.visible_topics(&request.prefix, after, page_size + 1, is_visible);
        let count = page_len(found.iter().map(|topic| topic.partition_count), page_size);
        let next_page_token = cut_page(&mut found, count, |topic| topic.name.clone());
        let bytes = found.iter().map(|topic| described_bytes(topic.partition_count)).sum();
        reserve_response(call, bytes).await?;
        let topics = self.describe_all(&found).await;
        Ok(ListTopicsResponse { topics, next_page_token })
    }

    async fn get(&self, request: &GetTopicRequest, call: Option<&CallMemory>) -> Result<Topic> {
        let topic = self.node.find_topic(&request.name, 0).await?;
        reserve_response(call, described_bytes(topic.partition_count)).await?;
        Ok(self.describe(&topic).await)
    }

    async fn update(
        &self,
        request: UpdateTopicRequest,
        call: Option<&CallMemory>,
    ) -> Result<Topic> {
        let mask = request.update_mask.map(|mask| mask.paths).unwrap_or_default();
        let default = self.node.topic_settings();
        let (settings, fields) = settings::change(&mask, request.config, default)?;
        self.check_protocol(fields).await?;
        // Before the change, so that a rejected call changes nothing.
        let partitions = self.node.topic(&request.name).map_or(0, |topic| topic.partition_count);
        reserve_response(call, described_bytes(partitions)).await?;
        let (name, id) = (&request.name, request.topic_id);
        let topic = self.node.cluster().update_topic(name, id, settings, fields).await?;
        Ok(self.describe(&topic).await)
    }

    /// Rejects given settings that some node of the cluster does not know yet.
    async fn check_protocol(&self, fields: SettingsMask) -> Result<()> {
        // The newest version first: it includes the others.
        let later = [
            (SettingsMask::BATCH_FORMAT, "config.batch_format", protocol::KAFKA_BATCHES),
            (SettingsMask::CLEANUP, "config.cleanup", protocol::COMPACTION),
            (
                SettingsMask::TOMBSTONE_RETENTION_TIME,
                "config.tombstone_retention_time",
                protocol::COMPACTION,
            ),
            (
                SettingsMask::VALIDATE_RECORDS,
                "config.validate_records",
                protocol::RECORD_VALIDATION,
            ),
            (
                SettingsMask::ALLOWED_COMPRESSION,
                "config.allowed_compression",
                protocol::COMPRESSION,
            ),
        ];
        let given = later.into_iter().find(|(setting, ..)| fields.contains(*setting));
        let Some((_, field, needed)) = given else { return Ok(()) };
        let cluster = self.node.cluster();
        if cluster.wait_protocol(needed, COMPRESSION_WAIT_MAX).await {
            return Ok(());
        }
        let what = format!(
            "needs protocol version {needed}, but the cluster uses {} until all nodes are upgraded",
            cluster.protocol()
        );
        Err(Error::InvalidArgument { field, what })
    }

    async fn add_partitions(
        &self,
        request: &AddPartitionsRequest,
        call: Option<&CallMemory>,
    ) -> Result<Topic> {
        reserve_response(call, described_bytes(request.partition_count)).await?;
        let cluster = self.node.cluster();
        let AddPartitionsRequest { name, topic_id, partition_count } = request;
        let topic = cluster.add_partitions(name, *topic_id, *partition_count).await?;
        Ok(self.describe(&topic).await)
    }

    async fn trim(&self, request: &TrimPartitionRequest) -> Result<TrimPartitionResponse> {
        let TrimPartitionRequest { topic, partition, trim_offset, topic_id } = request;
        let located = self.node.find(topic, *topic_id, *partition).await?;
        let trimmed = located.shard.trim(located.partition, *trim_offset).await;
        let watermarks = self.explained(&located.topic, *topic_id, trimmed).await?;
        Ok(TrimPartitionResponse { watermarks: Some(wire_watermarks(watermarks)) })
    }

    async fn fence(&self, request: &SetFencingTokenRequest) -> Result<SetFencingTokenResponse> {
        let expected = |text: &str| fencing_token("expected_token", text);
        let expected = request.expected_token.as_deref().map(expected).transpose()?;
        let token = fencing_token("token", &request.token)?;
        let topic_id = request.topic_id;
        let LocatedPartition { shard, partition, topic, .. } =
            self.node.find(&request.topic, topic_id, request.partition).await?;
        let set = shard.set_fencing_token(partition, expected, token).await;
        let watermarks = self.explained(&topic, topic_id, set).await?;
        Ok(SetFencingTokenResponse { watermarks: Some(wire_watermarks(watermarks)) })
    }

    /// Explains the failure of a call that names its topic's id.
    async fn explained<T>(
        &self,
        topic: &TopicInfo,
        expected_id: u64,
        result: Result<T>,
    ) -> Result<T> {
        match result {
            Err(error) if expected_id > 0 => Err(self.node.explain_deleted(topic, error).await),
            result => result,
        }
    }

    async fn describe(&self, topic: &TopicInfo) -> Topic {
        let mut described = self.describe_here(topic).await;
        self.describe_elsewhere(&[topic], std::slice::from_mut(&mut described)).await;
        described
    }

    async fn describe_all(&self, found: &[Arc<TopicInfo>]) -> Vec<Topic> {
        let mut topics = Vec::with_capacity(found.len());
        for topic in found {
            topics.push(self.describe_here(topic).await);
        }
        let found: Vec<&TopicInfo> = found.iter().map(|topic| &**topic).collect();
        self.describe_elsewhere(&found, &mut topics).await;
        topics
    }

    /// Adds the state of partitions whose shards have no replica here, as their leaders report it.
    /// Without a report in time it stays unknown.
    async fn describe_elsewhere(&self, found: &[&TopicInfo], topics: &mut [Topic]) {
        let cluster = self.node.cluster();
        // By shard: each partition with the topic and the number that it has.
        let mut asked: BTreeMap<u64, Vec<(PartitionId, usize, usize)>> = BTreeMap::new();
        for (at, topic) in found.iter().enumerate() {
            let is_elsewhere = |shard: &u64| cluster.is_elsewhere(*shard);
            let elsewhere: BTreeSet<u64> =
                topic.shards().into_iter().filter(is_elsewhere).collect();
            if elsewhere.is_empty() {
                continue;
            }
            for (number, location) in topic.locations().enumerate() {
                if elsewhere.contains(&location.shard_id) {
                    let rows = asked.entry(location.shard_id).or_default();
                    rows.push((location.partition, at, number));
                }
            }
            yield_now().await;
        }
        let reports = asked.iter().map(|(shard_id, rows)| async move {
            let partitions: Vec<PartitionId> = rows.iter().map(|row| row.0).collect();
            let report = cluster.remote_partitions(*shard_id, &partitions);
            timeout(ELSEWHERE_WAIT_MAX, report).await.ok()?.ok()
        });
        for (rows, reports) in asked.values().zip(join_all(reports).await) {
            let Some(reports) = reports else { continue };
            for (partition, at, number) in rows {
                let Some(report) = reports.get(partition) else { continue };
                let Some(described) = topics[*at].partitions.get_mut(*number) else { continue };
                described.watermarks = Some(wire_watermarks(report.watermarks));
                described.live_bytes = report.bytes.map(|bytes| bytes.0);
                described.held_bytes = report.bytes.map(|bytes| bytes.1);
            }
        }
    }

    /// Describes a topic with all of its partitions.
    ///
    /// Yields to other tasks: a topic with many partitions could otherwise delay heartbeats for
    /// longer than an election timeout.
    async fn describe_here(&self, topic: &TopicInfo) -> Topic {
        let mut partitions = Vec::with_capacity(topic.partition_count as usize);
        for (number, location) in (0..).zip(topic.locations()) {
            if partitions.len().is_multiple_of(PARTITIONS_PER_TURN) {
                yield_now().await;
            }
            partitions.push(self.describe_partition(number, location));
        }
        Topic {
            name: topic.name.clone(),
            partitions,
            // The current number of replicas, not the number at the topic's creation.
            replication_factor: self.node.cluster().replicas_of(topic),
            config: Some(settings::to_config(&topic.settings)),
            topic_id: topic.id,
        }
    }

    /// Describes a partition; only its location if this node does not serve its shard.
    fn describe_partition(&self, number: u32, location: PartitionLocation) -> PartitionInfo {
        let PartitionLocation { shard_id, partition } = location;
        let mut described = PartitionInfo {
            partition: number,
            shard_id: wire_shard_id(shard_id),
            ..PartitionInfo::default()
        };
        if let Some(shard) = self.node.shard(shard_id) {
            described.leader = shard.leader_hint().map(wire_leader);
            described.replicas = shard.replicas();
            // A replica that is rebuilt may lack records, and must not look empty.
            let is_whole = shard.replica().repair_of().is_none();
            if let Some(watermarks) = shard.watermarks(partition).ok().filter(|_| is_whole) {
                let (live_bytes, held_bytes) = shard.partition_bytes(partition);
                described.watermarks = Some(wire_watermarks(watermarks));
                described.live_bytes = Some(live_bytes);
                described.held_bytes = Some(held_bytes);
            }
            if let Some(cleanup) = shard.cleanup(partition) {
                described.clean_offset = Some(cleanup.clean_offset);
                described.is_uncleanable = cleanup.uncleanable.is_some();
            }
            let token = shard.fencing_token(partition).filter(|token| !token.is_none());
            described.fencing_token = token.map(|token| token.as_str().to_owned());
        } else if let Some(replicas) = self.node.cluster().replicas_elsewhere(shard_id) {
            described.leader = self.node.cluster().remote_leader(shard_id).map(wire_leader);
            described.replicas = replicas;
        }
        described
    }
}

#[tonic::async_trait]
impl TopicService for TopicHandler {
    async fn create_topic(
        &self,
        request: Request<CreateTopicRequest>,
    ) -> Result<Response<CreateTopicResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        let call = call_memory(&request);
        let topic = Some(self.create(request.into_inner(), call.as_deref()).await?);
        Ok(Response::new(CreateTopicResponse { topic }))
    }

    async fn get_topic(
        &self,
        request: Request<GetTopicRequest>,
    ) -> Result<Response<GetTopicResponse>, Status> {
        let call = call_memory(&request);
        let (call, request) = (call.as_deref(), request.get_ref());
        let get = || self.get(request, call);
        let topic = Some(recheck::read(&self.node, call, request, get).await?);
        Ok(Response::new(GetTopicResponse { topic }))
    }

    async fn list_topics(
        &self,
        request: Request<ListTopicsRequest>,
    ) -> Result<Response<ListTopicsResponse>, Status> {
        let call = call_memory(&request);
        let (call, request) = (call.as_deref(), request.get_ref());
        let list = || self.list(request, call);
        Ok(Response::new(recheck::read(&self.node, call, request, list).await?))
    }

    async fn update_topic(
        &self,
        request: Request<UpdateTopicRequest>,
    ) -> Result<Response<UpdateTopicResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        let call = call_memory(&request);
        let topic = Some(self.update(request.into_inner(), call.as_deref()).await?);
        Ok(Response::new(UpdateTopicResponse { topic }))
    }

    async fn add_partitions(
        &self,
        request: Request<AddPartitionsRequest>,
    ) -> Result<Response<AddPartitionsResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        let call = call_memory(&request);
        let topic = Some(self.add_partitions(request.get_ref(), call.as_deref()).await?);
        Ok(Response::new(AddPartitionsResponse { topic }))
    }

    async fn delete_topic(
        &self,
        request: Request<DeleteTopicRequest>,
    ) -> Result<Response<DeleteTopicResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        let DeleteTopicRequest { name, topic_id } = request.get_ref();
        self.node.cluster().delete_topic(name, *topic_id).await?;
        Ok(Response::new(DeleteTopicResponse {}))
    }

    async fn trim_partition(
        &self,
        request: Request<TrimPartitionRequest>,
    ) -> Result<Response<TrimPartitionResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        Ok(Response::new(self.trim(request.get_ref()).await?))
    }

    async fn set_fencing_token(
        &self,
        request: Request<SetFencingTokenRequest>,
    ) -> Result<Response<SetFencingTokenResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        Ok(Response::new(self.fence(request.get_ref()).await?))
    }
}

/// Returns how many of the next topics fit into a page, given their partition counts.
///
/// At most `topics_max`, and at least one if there is any.
fn page_len(partition_counts: impl Iterator<Item = u32>, topics_max: usize) -> usize {
    let mut partitions = 0;
    let fits = |(at, count): &(usize, u32)| {
        partitions += u64::from(*count);
        *at == 0 || partitions <= PARTITIONS_PER_PAGE_MAX
    };
    partition_counts.take(topics_max).enumerate().take_while(fits).count()
}

/// Returns the memory of a topic's description in a response.
fn described_bytes(partitions: u32) -> usize {
    partitions.min(PARTITIONS_PER_TOPIC_MAX) as usize * PARTITION_DESCRIBED_BYTES
}

fn check_name(name: &str) -> Result<()> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if (1..=TOPIC_NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(is_allowed) {
        return Ok(());
    }
    Err(Error::InvalidArgument {
        field: "name",
        what: format!(
            "must be 1..={TOPIC_NAME_BYTES_MAX} of ASCII letters, digits, '.', '_' and '-', not \
             {}",
            quote(name)
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_a_topic_and_at_most_the_partitions_allowed() {
        let page = |counts: &[u32], topics_max| page_len(counts.iter().copied(), topics_max);
        let max = u32::try_from(PARTITIONS_PER_PAGE_MAX).unwrap();
        assert_eq!(page(&[], 5), 0);
        assert_eq!(page(&[1; 9], 5), 5);
        assert_eq!(page(&[1; 3], 5), 3);
        assert_eq!(page(&[max - 1, 1, 1], 5), 2);
        assert_eq!(page(&[2 * max, 1], 5), 1);
        assert_eq!(page(&[1, 2 * max, 1], 5), 1);
        assert_eq!(page(&[u32::MAX; 3], 5), 1);
    }

    #[test]
    fn rejects_long_names_and_other_characters() {
        for name in ["a", "orders", "Orders.2026_eu-west", &"x".repeat(249)] {
            assert!(check_name(name).is_ok(), "{name}");
        }
        for name in ["", "a b", "a/b", "ä", &"x".repeat(250)] {
            assert!(check_name(name).is_err(), "{name}");
        }
    }
}
