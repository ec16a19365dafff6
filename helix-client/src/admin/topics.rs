//! Administration of topics: creation, settings, partitions, deletion, trims, offsets.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::try_join_all;
use helix_proto::log::v1::{
    AddPartitionsRequest, CreateTopicRequest, DeleteTopicRequest, ErrorReason, GetTopicRequest,
    ListTopicsRequest, ResolveOffsetsRequest, ResolvedOffset, SetFencingTokenRequest,
    StartPosition, Topic, TopicConfig, TrimPartitionRequest, UpdateTopicRequest, Watermarks,
};

use super::{Admin, NewTopic, all_pages, repeat, required};
use crate::call_spec::{CallSpec, Repeat};
use crate::client::CallAttempts;
use crate::consumer::{NodeGroups, Position};
use crate::error::Result;
use crate::topic::TopicRef;

/// Bytes of a partition number in a request.
const NUMBER_BYTES: usize = 5;

/// Topics per page when all are listed.
const PAGE_TOPICS: i32 = 1000;

/// Time in which the service may add shards with the replication factor of a new topic.
const SHARDS_WAIT_MAX: Duration = Duration::from_secs(20);

/// Every method also fails with the last failure if no node, or the partition's leader, can be
/// reached within the request timeout.
impl Admin {
    /// Creates a topic. Succeeds if it already exists with equal settings.
    ///
    /// # Errors
    /// `TOPIC_ALREADY_EXISTS` if it exists with other settings.
    pub async fn create_topic(&self, topic: &NewTopic) -> Result<Topic> {
        let mut call = CallSpec::new("create topic", repeat(topic.validate_only));
        if topic.replication_factor != 0 {
            call.wait = SHARDS_WAIT_MAX;
        }
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
        all_pages(|page_token| async move {
            let call = CallSpec::new("list topics", Repeat::Read);
            let response = self.client.call_any(call, |node| {
                let request = ListTopicsRequest {
                    prefix: prefix.to_owned(),
                    page_size: PAGE_TOPICS,
                    page_token: page_token.clone(),
                };
                async move { node.topic().list_topics(request).await }
            });
            let page = response.await?;
            Ok((page.topics, page.next_page_token))
        })
        .await
    }

    /// Changes the settings named in `fields`, which are field names of `TopicConfig`.
    ///
    /// A named setting that is unset in `config` returns to the cluster's default.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`.
    pub async fn update_topic(
        &self,
        topic: impl Into<TopicRef<'_>>,
        config: &TopicConfig,
        fields: &[&str],
    ) -> Result<Topic> {
        let paths: Vec<_> = fields.iter().map(|&field| field.to_owned()).collect();
        let topic = topic.into();
        let call = CallSpec::new("update topic", Repeat::Always);
        let response = self
            .client
            .change_topic(topic, call, |node, topic_id| {
                let request = UpdateTopicRequest {
                    name: topic.name.to_owned(),
                    config: Some(*config),
                    update_mask: Some(prost_types::FieldMask { paths: paths.clone() }),
                    topic_id,
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
    pub async fn add_partitions(
        &self,
        topic: impl Into<TopicRef<'_>>,
        partition_count: u32,
    ) -> Result<Topic> {
        let topic = topic.into();
        let call = CallSpec::new("add partitions", Repeat::Always);
        let response = self
            .client
            .change_topic(topic, call, |node, topic_id| {
                let name = topic.name.to_owned();
                let request = AddPartitionsRequest { name, partition_count, topic_id };
                async move { node.topic().add_partitions(request).await }
            })
            .await?;
        self.client.shared.routing.forget_topic(topic.name);
        required(response.topic)
    }

    /// Deletes a topic and its data.
    ///
    /// Deletes the topic that has the name at the call, never a topic that is created meanwhile.
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`.
    pub async fn delete_topic(&self, topic: impl Into<TopicRef<'_>>) -> Result<()> {
        let topic = topic.into();
        let call = CallSpec::new("delete topic", Repeat::Always);
        // Set if every attempt names the topic's id.
        let has_id = AtomicBool::new(false);
        let result = self
            .client
            .change_topic(topic, call, |node, topic_id| {
                has_id.store(topic_id > 0, Ordering::Relaxed);
                let request = DeleteTopicRequest { name: topic.name.to_owned(), topic_id };
                async move { node.topic().delete_topic(request).await }
            })
            .await;
        self.client.shared.routing.forget_topic(topic.name);
        match result {
            // The topic existed, and an attempt without a response, or another client, has deleted
            // it.
            Err(error)
                if error.may_have_applied
                    && has_id.load(Ordering::Relaxed)
                    && matches!(
                        error.reason,
                        Some(
                            ErrorReason::TopicNotFound
                                | ErrorReason::TopicDeleted
                                | ErrorReason::TopicRecreated
                        )
                    ) =>
            {
                Ok(())
            }
            result => result.map(|_| ()),
        }
    }

    /// Deletes the records of a partition below `offset`.
    ///
    /// # Errors
    /// `OFFSET_OUT_OF_RANGE` if `offset` is above the high watermark.
    pub async fn trim(
        &self,
        topic: impl Into<TopicRef<'_>>,
        partition: u32,
        offset: u64,
    ) -> Result<Watermarks> {
        let topic = topic.into();
        let call = CallSpec::new("trim", Repeat::Always);
        let response = self
            .client
            .call_leader_of(topic, partition, call, |leader, topic_id| {
                let topic = topic.name.to_owned();
                let request =
                    TrimPartitionRequest { topic, partition, trim_offset: offset, topic_id };
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
        topic: impl Into<TopicRef<'_>>,
        partition: u32,
        expected: Option<&str>,
        token: &str,
    ) -> Result<Watermarks> {
        let topic = topic.into();
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
            .call_leader_of(topic, partition, call, |leader, topic_id| {
                let request = SetFencingTokenRequest {
                    topic: topic.name.to_owned(),
                    partition,
                    expected_token: expected.map(str::to_owned),
                    token: token.to_owned(),
                    topic_id,
                };
                async move { leader.topic().set_fencing_token(request).await }
            })
            .await?;
        Ok(response.watermarks.unwrap_or_default())
    }

    /// Resolves a position to offsets in partitions of a topic, ordered by partition.
    ///
    /// An empty list selects all partitions. To read from the offsets, state the topic's id here
    /// and in [`ReadStart::in_topic`](crate::ReadStart::in_topic).
    ///
    /// # Errors
    /// `TOPIC_NOT_FOUND`, `PARTITION_NOT_FOUND`.
    pub async fn resolve_offsets(
        &self,
        topic: impl Into<TopicRef<'_>>,
        partitions: &[u32],
        position: &Position,
    ) -> Result<Vec<ResolvedOffset>> {
        self.resolve_start(topic.into(), partitions, position.to_wire()).await
    }

    /// Like [`Admin::resolve_offsets`], for any position of the service.
    ///
    /// # Errors
    /// As [`Admin::resolve_offsets`]; those of a committed position.
    pub(crate) async fn resolve_start(
        &self,
        topic: TopicRef<'_>,
        partitions: &[u32],
        position: StartPosition,
    ) -> Result<Vec<ResolvedOffset>> {
        let TopicRef { name: topic, id: topic_id } = topic;
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
                            position: Some(position.clone()),
                            topic_id,
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
}
