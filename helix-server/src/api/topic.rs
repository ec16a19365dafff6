//! TopicService: topics as the cluster knows them, described with what their shards say.
//! What a change means is decided by the cluster's own state.

use std::sync::Arc;

use helix_proto::log::v1::topic_service_server::TopicService;
use helix_proto::log::v1::{
    AddPartitionsRequest, AddPartitionsResponse, CreateTopicRequest, CreateTopicResponse,
    DeleteTopicRequest, DeleteTopicResponse, GetTopicRequest, GetTopicResponse, ListTopicsRequest,
    ListTopicsResponse, PartitionInfo, SetFencingTokenRequest, SetFencingTokenResponse, Topic,
    TrimPartitionRequest, TrimPartitionResponse, UpdateTopicRequest, UpdateTopicResponse,
};
use tonic::{Request, Response, Status};

use super::batch::fencing_token;
use super::{settings, wire_leader, wire_shard_id, wire_watermarks};
use crate::cluster::{Place, TopicInfo, TopicSpec};
use crate::error::{Error, Result};
use crate::limits::{TOPICS_PER_PAGE_DEFAULT, TOPICS_PER_PAGE_MAX};
use crate::node::{Located, Node};

/// Longest name of a topic.
const NAME_BYTES_MAX: usize = 249;

pub(super) struct Topics {
    node: Arc<Node>,
}

impl Topics {
    pub(super) fn new(node: &Arc<Node>) -> Self {
        Self { node: node.clone() }
    }

    async fn create(&self, request: CreateTopicRequest) -> Result<Topic> {
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
        let topic = self.node.cluster().create_topic(spec, request.validate_only).await?;
        Ok(self.describe(&topic))
    }

    fn list(&self, request: &ListTopicsRequest) -> Result<ListTopicsResponse> {
        let page_size = match usize::try_from(request.page_size) {
            Ok(0) => TOPICS_PER_PAGE_DEFAULT,
            Ok(page_size) => page_size.min(TOPICS_PER_PAGE_MAX),
            Err(_) => {
                return Err(Error::InvalidArgument {
                    field: "page_size",
                    what: "must not be negative".to_owned(),
                });
            }
        };
        // A page's token is the last name before it.
        let after = Some(request.page_token.as_str()).filter(|after| !after.is_empty());
        let mut found = self.node.topics(&request.prefix, after, page_size + 1);
        let has_more = found.len() > page_size;
        found.truncate(page_size);
        let last = found.last().filter(|_| has_more);
        let next_page_token = last.map(|topic| topic.name.clone()).unwrap_or_default();
        let topics = found.iter().map(|topic| self.describe(topic)).collect();
        Ok(ListTopicsResponse { topics, next_page_token })
    }

    async fn update(&self, request: UpdateTopicRequest) -> Result<Topic> {
        let mask = request.update_mask.map(|mask| mask.paths).unwrap_or_default();
        let default = self.node.topic_settings();
        let (settings, fields) = settings::change(&mask, request.config, default)?;
        let topic = self.node.cluster().update_topic(&request.name, settings, fields).await?;
        Ok(self.describe(&topic))
    }

    async fn add_partitions(&self, request: &AddPartitionsRequest) -> Result<Topic> {
        let cluster = self.node.cluster();
        let topic = cluster.add_partitions(&request.name, request.partition_count).await?;
        Ok(self.describe(&topic))
    }

    async fn trim(&self, request: &TrimPartitionRequest) -> Result<TrimPartitionResponse> {
        let located = self.node.find(&request.topic, request.partition).await?;
        let watermarks = located.shard.trim(located.partition, request.trim_offset).await?;
        Ok(TrimPartitionResponse { watermarks: Some(wire_watermarks(watermarks)) })
    }

    async fn fence(&self, request: &SetFencingTokenRequest) -> Result<SetFencingTokenResponse> {
        let expected = |text: &str| fencing_token("expected_token", text);
        let expected = request.expected_token.as_deref().map(expected).transpose()?;
        let token = fencing_token("token", &request.token)?;
        let Located { shard, partition, .. } =
            self.node.find(&request.topic, request.partition).await?;
        let watermarks = shard.set_fencing_token(partition, expected, token).await?;
        Ok(SetFencingTokenResponse { watermarks: Some(wire_watermarks(watermarks)) })
    }

    fn describe(&self, topic: &TopicInfo) -> Topic {
        let partitions =
            (0..).zip(topic.places()).map(|(number, place)| self.describe_partition(number, place));
        Topic {
            name: topic.name.clone(),
            partitions: partitions.collect(),
            // As many as there are nodes, whatever there were when it was made.
            replication_factor: u32::try_from(self.node.cluster().nodes().len())
                .unwrap_or(u32::MAX),
            config: Some(settings::to_config(&topic.settings)),
        }
    }

    /// What this node knows: of a partition whose shard it does not have, only the place.
    fn describe_partition(&self, number: u32, place: Place) -> PartitionInfo {
        let Place { shard_id, partition } = place;
        let mut described = PartitionInfo {
            partition: number,
            shard_id: wire_shard_id(shard_id),
            ..PartitionInfo::default()
        };
        if let Some(shard) = self.node.shard(shard_id) {
            let (live_bytes, held_bytes) = shard.partition_bytes(partition);
            described.leader = shard.leader_hint().map(wire_leader);
            described.replicas = shard.replicas();
            described.watermarks = shard.watermarks(partition).ok().map(wire_watermarks);
            described.live_bytes = live_bytes;
            described.held_bytes = held_bytes;
            let token = shard.fencing_token(partition).filter(|token| !token.is_none());
            described.fencing_token = token.map(|token| token.as_str().to_owned());
        }
        described
    }
}

#[tonic::async_trait]
impl TopicService for Topics {
    async fn create_topic(
        &self,
        request: Request<CreateTopicRequest>,
    ) -> Result<Response<CreateTopicResponse>, Status> {
        let topic = Some(self.create(request.into_inner()).await?);
        Ok(Response::new(CreateTopicResponse { topic }))
    }

    async fn get_topic(
        &self,
        request: Request<GetTopicRequest>,
    ) -> Result<Response<GetTopicResponse>, Status> {
        let topic = self.node.find_topic(&request.get_ref().name).await?;
        Ok(Response::new(GetTopicResponse { topic: Some(self.describe(&topic)) }))
    }

    async fn list_topics(
        &self,
        request: Request<ListTopicsRequest>,
    ) -> Result<Response<ListTopicsResponse>, Status> {
        Ok(Response::new(self.list(request.get_ref())?))
    }

    async fn update_topic(
        &self,
        request: Request<UpdateTopicRequest>,
    ) -> Result<Response<UpdateTopicResponse>, Status> {
        let topic = Some(self.update(request.into_inner()).await?);
        Ok(Response::new(UpdateTopicResponse { topic }))
    }

    async fn add_partitions(
        &self,
        request: Request<AddPartitionsRequest>,
    ) -> Result<Response<AddPartitionsResponse>, Status> {
        let topic = Some(self.add_partitions(request.get_ref()).await?);
        Ok(Response::new(AddPartitionsResponse { topic }))
    }

    async fn delete_topic(
        &self,
        request: Request<DeleteTopicRequest>,
    ) -> Result<Response<DeleteTopicResponse>, Status> {
        self.node.cluster().delete_topic(&request.get_ref().name).await?;
        Ok(Response::new(DeleteTopicResponse {}))
    }

    async fn trim_partition(
        &self,
        request: Request<TrimPartitionRequest>,
    ) -> Result<Response<TrimPartitionResponse>, Status> {
        Ok(Response::new(self.trim(request.get_ref()).await?))
    }

    async fn set_fencing_token(
        &self,
        request: Request<SetFencingTokenRequest>,
    ) -> Result<Response<SetFencingTokenResponse>, Status> {
        Ok(Response::new(self.fence(request.get_ref()).await?))
    }
}

fn check_name(name: &str) -> Result<()> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(is_allowed) {
        return Ok(());
    }
    Err(Error::InvalidArgument {
        field: "name",
        what: format!(
            "must be 1..={NAME_BYTES_MAX} of ASCII letters, digits, '.', '_' and '-', not {name:?}"
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_plain() {
        for name in ["a", "orders", "Orders.2026_eu-west", &"x".repeat(249)] {
            assert!(check_name(name).is_ok(), "{name}");
        }
        for name in ["", "a b", "a/b", "ä", &"x".repeat(250)] {
            assert!(check_name(name).is_err(), "{name}");
        }
    }
}
