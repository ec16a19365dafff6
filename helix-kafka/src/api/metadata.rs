//! Metadata: brokers, topics, and the gateway of each partition.

use std::sync::Arc;
use std::time::Duration;

use helix_client::NewTopic;
use helix_client::proto::log::v1::{AccessOperation, ErrorReason, ResourceKind};
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::metadata_response::{
    MetadataResponseBroker, MetadataResponsePartition, MetadataResponseTopic,
};
use kafka_protocol::messages::{BrokerId, MetadataRequest, MetadataResponse, TopicName};

use crate::api::topics::kafka_topic_config;
use crate::context::{RequestContext, text};
use crate::errors::{CallTarget, code_of};
use crate::upstream::{ClusterView, TopicView, leader_epoch};

/// Age of the view that a response may have. Clients ask often while they wait for a topic.
const VIEW_AGE_MAX: Duration = Duration::from_millis(100);

/// Longest name of a topic, in bytes.
const TOPIC_NAME_BYTES_MAX: usize = 249;

/// Answers a request for metadata.
pub(crate) async fn metadata(
    context: &RequestContext,
    request: MetadataRequest,
) -> MetadataResponse {
    let mut response = MetadataResponse::default()
        .with_brokers(brokers(context))
        .with_controller_id(BrokerId(context.state.brokers.own().node_id));
    let view = match context.upstream.view(VIEW_AGE_MAX).await {
        Ok(view) => view,
        Err(error) => {
            let code = match code_of(&error, CallTarget::Topic) {
                code @ ResponseError::TopicAuthorizationFailed => code,
                // The client asks again.
                _ => ResponseError::LeaderNotAvailable,
            };
            let names = request.topics.unwrap_or_default().into_iter();
            let failed = names.filter_map(|topic| topic.name).map(|name| unknown(name, code));
            return response.with_topics(failed.collect());
        }
    };
    response = response
        .with_cluster_id(Some(text(view.cluster_id.clone())))
        .with_controller_id(BrokerId(context.state.brokers.beside(view.controller).node_id));
    let all = |view: &ClusterView| {
        let mut names: Vec<_> = view.topics.keys().cloned().collect();
        names.sort_unstable();
        names
    };
    let names: Vec<String> = match (&request.topics, context.version) {
        (None, _) => all(&view),
        // In version 0 an empty list means all topics.
        (Some(topics), 0) if topics.is_empty() => all(&view),
        (Some(topics), _) => {
            let names = topics.iter().filter_map(|topic| topic.name.as_ref());
            names.map(|name| name.to_string()).collect()
        }
    };
    let may_create = context.version < 4 || request.allow_auto_topic_creation;
    let view = match request.topics.is_some() && may_create {
        true => create_missing(context, view, &names).await,
        false => view,
    };
    let mut topics = Vec::with_capacity(names.len());
    for name in names {
        topics.push(match view.topics.get(&name) {
            Some(topic) => described(context, &view, &name, topic),
            None => {
                let code = missing_code(context, &name).await;
                unknown(TopicName(text(name)), code)
            }
        });
    }
    response.with_topics(topics)
}

/// Returns true if a topic can have this name. A client stops to ask for others.
fn is_topic_name(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    (1..=TOPIC_NAME_BYTES_MAX).contains(&name.len())
        && name.chars().all(is_allowed)
        && !matches!(name, "." | "..")
}

/// Returns the code of a topic that is not in the view. Without a right to it the client learns
/// that at once, whether the topic exists or not, and does not wait for it to appear.
async fn missing_code(context: &RequestContext, name: &str) -> ResponseError {
    if !is_topic_name(name) {
        return ResponseError::InvalidTopicException;
    }
    match context.upstream.may(ResourceKind::Topic, name, AccessOperation::Describe).await {
        Ok(false) => ResponseError::TopicAuthorizationFailed,
        Ok(true) | Err(_) => ResponseError::UnknownTopicOrPartition,
    }
}

/// Returns the gateways that answer, as brokers.
fn brokers(context: &RequestContext) -> Vec<MetadataResponseBroker> {
    let broker = |gateway: &crate::brokers::GatewayOfNode| {
        MetadataResponseBroker::default()
            .with_node_id(BrokerId(gateway.node_id))
            .with_host(text(gateway.address.host.clone()))
            .with_port(i32::from(gateway.address.port))
    };
    context.state.brokers.up().map(broker).collect()
}

fn unknown(name: TopicName, code: ResponseError) -> MetadataResponseTopic {
    MetadataResponseTopic::default().with_name(Some(name)).with_error_code(code.code())
}

fn described(
    context: &RequestContext,
    view: &ClusterView,
    name: &str,
    topic: &TopicView,
) -> MetadataResponseTopic {
    let brokers = &context.state.brokers;
    let partition = |(index, shard_id): (usize, &u32)| {
        let shard = view.shards.get(shard_id);
        let index = i32::try_from(index).unwrap_or(i32::MAX);
        let response = MetadataResponsePartition::default().with_partition_index(index);
        let Some(shard) = shard.filter(|shard| shard.leader != 0) else {
            return response
                .with_leader_id(BrokerId(-1))
                .with_leader_epoch(-1)
                .with_error_code(ResponseError::LeaderNotAvailable.code());
        };
        let leader = BrokerId(brokers.beside(shard.leader).node_id);
        let mut replicas: Vec<_> =
            shard.replicas.iter().map(|&node| BrokerId(brokers.beside(node).node_id)).collect();
        replicas.push(leader);
        replicas.sort_unstable_by_key(|broker| broker.0);
        replicas.dedup();
        response
            .with_leader_id(leader)
            .with_leader_epoch(leader_epoch(shard.term))
            .with_replica_nodes(replicas.clone())
            .with_isr_nodes(replicas)
    };
    let partitions = topic.shard_ids.iter().enumerate().map(partition).collect();
    MetadataResponseTopic::default()
        .with_name(Some(TopicName(text(name.to_owned()))))
        .with_partitions(partitions)
}

/// Creates missing topics if the gateway has to. Returns a view with them.
async fn create_missing(
    context: &RequestContext,
    view: Arc<ClusterView>,
    names: &[String],
) -> Arc<ClusterView> {
    let Some(partition_count) = context.state.rules.auto_create_partitions else { return view };
    let mut has_created = false;
    let is_missing = |name: &&String| !view.topics.contains_key(*name) && is_topic_name(name);
    for name in names.iter().filter(is_missing) {
        let mut topic = NewTopic::new(name.clone(), partition_count);
        topic.config = kafka_topic_config();
        match context.upstream.client().admin().create_topic(&topic).await {
            Ok(_) => {
                tracing::info!(topic = name, partitions = partition_count, "created a topic");
                has_created = true;
            }
            Err(error) if error.is(ErrorReason::TopicAlreadyExists) => has_created = true,
            Err(error) => tracing::warn!(topic = name, %error, "topic not created"),
        }
    }
    if !has_created {
        return view;
    }
    context.upstream.forget_view();
    context.upstream.view(Duration::ZERO).await.unwrap_or(view)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_names_that_no_topic_can_have() {
        let longest = "a".repeat(TOPIC_NAME_BYTES_MAX);
        for name in ["a", "orders.eu-1_B", &longest] {
            assert!(is_topic_name(name), "{name:?}");
        }
        for name in ["", ".", "..", "a b", "a$#!", "a/b", "ä", &format!("{longest}a")] {
            assert!(!is_topic_name(name), "{name:?}");
        }
    }
}
