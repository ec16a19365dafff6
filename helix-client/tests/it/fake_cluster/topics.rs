//! The topic service of a node: describes and deletes the only topic.
//!
//! A deleted topic is created again at once, as by another client.

use helix_client::proto::log::v1::topic_service_server::TopicService;
use helix_client::proto::log::v1::*;
use tonic::{Request, Response, Status};

use super::{FakeNode, Log, TOPIC, broken, rejection};

#[tonic::async_trait]
impl TopicService for FakeNode {
    async fn get_topic(
        &self,
        _: Request<GetTopicRequest>,
    ) -> Result<Response<GetTopicResponse>, Status> {
        let topic_id = self.cluster.state().topic_id;
        let topic = Topic { name: TOPIC.to_owned(), topic_id, ..Topic::default() };
        Ok(Response::new(GetTopicResponse { topic: Some(topic) }))
    }

    async fn delete_topic(
        &self,
        request: Request<DeleteTopicRequest>,
    ) -> Result<Response<DeleteTopicResponse>, Status> {
        let mut state = self.cluster.state();
        state.check_topic(request.get_ref().topic_id)?;
        state.topic_id += 1;
        state.logs.values_mut().for_each(|log| *log = Log::default());
        let is_lost = std::mem::take(&mut state.loses_deletion);
        if is_lost { Err(broken()) } else { Ok(Response::new(DeleteTopicResponse {})) }
    }

    async fn create_topic(
        &self,
        _: Request<CreateTopicRequest>,
    ) -> Result<Response<CreateTopicResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn list_topics(
        &self,
        _: Request<ListTopicsRequest>,
    ) -> Result<Response<ListTopicsResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn update_topic(
        &self,
        _: Request<UpdateTopicRequest>,
    ) -> Result<Response<UpdateTopicResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn add_partitions(
        &self,
        _: Request<AddPartitionsRequest>,
    ) -> Result<Response<AddPartitionsResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn trim_partition(
        &self,
        _: Request<TrimPartitionRequest>,
    ) -> Result<Response<TrimPartitionResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }

    async fn set_fencing_token(
        &self,
        _: Request<SetFencingTokenRequest>,
    ) -> Result<Response<SetFencingTokenResponse>, Status> {
        Err(rejection(ErrorReason::Unimplemented))
    }
}
