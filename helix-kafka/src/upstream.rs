//! The Helix cluster behind the gateway, as one principal sees it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use helix_client::proto::log::v1::{
    AccessOperation, AccessRule, Metadata, ResourceKind, WhoAmIResponse,
};
use helix_client::{Client, Result};
use tokio::time::Instant;

/// Nodes, shards and topics of a cluster, as one principal sees them.
#[derive(Debug, Default)]
pub(crate) struct ClusterView {
    /// Id of the cluster.
    pub(crate) cluster_id: String,
    /// Node that leads shard 0, or 0.
    pub(crate) controller: u64,
    /// Nodes, by their addresses.
    pub(crate) node_ids: HashMap<String, u64>,
    /// Racks of nodes that have one.
    pub(crate) racks: HashMap<u64, String>,
    /// Shards.
    pub(crate) shards: HashMap<u32, ShardView>,
    /// Topics.
    pub(crate) topics: HashMap<String, TopicView>,
}

/// Replicas and leader of a shard.
#[derive(Debug, Default, Clone)]
pub(crate) struct ShardView {
    /// Node id of the leader; 0 while none is known.
    pub(crate) leader: u64,
    /// Term of the leader.
    pub(crate) term: u64,
    /// Node ids of the replicas.
    pub(crate) replicas: Vec<u64>,
}

/// A topic's partitions.
#[derive(Debug)]
pub(crate) struct TopicView {
    /// Id.
    pub(crate) topic_id: u64,
    /// Shard of each partition.
    pub(crate) shard_ids: Vec<u32>,
}

impl ClusterView {
    fn new(metadata: Metadata) -> Self {
        let mut view = Self { cluster_id: metadata.cluster_id, ..Self::default() };
        for node in metadata.nodes {
            if !node.rack.is_empty() {
                view.racks.insert(node.node_id, node.rack);
            }
            view.node_ids.insert(node.endpoint, node.node_id);
        }
        for shard in metadata.shards {
            let leader = shard.leader.unwrap_or_default();
            if shard.shard_id == 0 {
                view.controller = leader.node_id;
            }
            let shard_view =
                ShardView { leader: leader.node_id, term: leader.term, replicas: shard.replicas };
            view.shards.insert(shard.shard_id, shard_view);
        }
        for topic in metadata.topics {
            let topic_view = TopicView { topic_id: topic.topic_id, shard_ids: topic.shard_ids };
            view.topics.insert(topic.topic, topic_view);
        }
        view
    }

    /// Returns true if the topic has this partition.
    pub(crate) fn has_partition(&self, topic: &str, partition: i32) -> bool {
        let count = self.topics.get(topic).map_or(0, |topic| topic.shard_ids.len());
        usize::try_from(partition).is_ok_and(|partition| partition < count)
    }
}

/// Age up to which the rules of a principal are used.
const RIGHTS_AGE_MAX: Duration = Duration::from_secs(2);

/// Returns true if a rule allows the operation. Every operation implies to describe the resource.
fn allows(
    rules: &[AccessRule],
    kind: ResourceKind,
    name: &str,
    operation: AccessOperation,
) -> bool {
    let includes = |rule: &AccessRule| {
        rule.operations().any(|allowed| {
            allowed == operation
                || allowed == AccessOperation::Admin
                || (operation == AccessOperation::Describe
                    && allowed != AccessOperation::Unspecified)
        })
    };
    let matches = |rule: &AccessRule| match rule.resource_kind() {
        ResourceKind::Cluster => rule.operations().any(|it| it == AccessOperation::Admin),
        of_rule => {
            let is_named = match rule.is_prefix {
                true => name.starts_with(&rule.name),
                false => name == rule.name,
            };
            of_rule == kind && is_named && includes(rule)
        }
    };
    rules.iter().any(matches)
}

/// A term as Kafka's leader epoch. Terms grow by one with each election.
pub(crate) fn leader_epoch(term: u64) -> i32 {
    i32::try_from(term).unwrap_or(i32::MAX)
}

/// A principal's client with its view of the cluster.
#[derive(Debug)]
pub(crate) struct Upstream {
    client: Client,
    view: Mutex<Option<(Instant, Arc<ClusterView>)>>,
    rights: Mutex<Option<(Instant, Arc<WhoAmIResponse>)>>,
    /// Held during a query, so that other callers wait for its result.
    querying: tokio::sync::Mutex<()>,
}

impl Upstream {
    /// Wraps a client.
    pub(crate) fn new(client: Client) -> Self {
        Self {
            client,
            view: Mutex::default(),
            rights: Mutex::default(),
            querying: tokio::sync::Mutex::default(),
        }
    }

    /// Returns the client.
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Returns a view of the cluster that is at most `age_max` old.
    ///
    /// # Errors
    /// The last failure if no node responds within the request timeout.
    pub(crate) async fn view(&self, age_max: Duration) -> Result<Arc<ClusterView>> {
        if let Some(view) = self.known(age_max) {
            return Ok(view);
        }
        let _one_at_a_time = self.querying.lock().await;
        if let Some(view) = self.known(age_max) {
            return Ok(view);
        }
        let metadata = self.client.admin().metadata(&[]).await?;
        let view = Arc::new(ClusterView::new(metadata));
        let mut known = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        *known = Some((Instant::now(), view.clone()));
        Ok(view)
    }

    /// Returns a view that has the topic if it exists: an older one is replaced if it lacks it.
    ///
    /// # Errors
    /// The last failure if no node responds within the request timeout.
    pub(crate) async fn view_with(
        &self,
        topic: &str,
        age_max: Duration,
    ) -> Result<Arc<ClusterView>> {
        let view = self.view(age_max).await?;
        match view.topics.contains_key(topic) {
            true => Ok(view),
            false => self.view(Duration::from_millis(50)).await,
        }
    }

    /// Returns true if the principal may do an operation on a resource.
    ///
    /// The cluster checks each call itself; this is for what the gateway does without a call.
    ///
    /// # Errors
    /// The last failure if no node responds within the request timeout.
    pub(crate) async fn may(
        &self,
        kind: ResourceKind,
        name: &str,
        operation: AccessOperation,
    ) -> Result<bool> {
        let known = {
            let rights = self.rights.lock().unwrap_or_else(PoisonError::into_inner);
            let recent = rights.as_ref().filter(|(at, _)| at.elapsed() < RIGHTS_AGE_MAX);
            recent.map(|(_, rights)| rights.clone())
        };
        let rights = match known {
            Some(rights) => rights,
            None => {
                let rights = Arc::new(self.client.admin().who_am_i().await?);
                let mut known = self.rights.lock().unwrap_or_else(PoisonError::into_inner);
                *known = Some((Instant::now(), rights.clone()));
                rights
            }
        };
        Ok(!rights.is_restricted || allows(&rights.rules, kind, name, operation))
    }

    /// Forgets the view after a change.
    pub(crate) fn forget_view(&self) {
        *self.view.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn known(&self, age_max: Duration) -> Option<Arc<ClusterView>> {
        let view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, view) = view.as_ref()?;
        (at.elapsed() <= age_max).then(|| view.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_allow_by_name_and_prefix() {
        let rule =
            |kind: ResourceKind, name: &str, is_prefix, operation: AccessOperation| AccessRule {
                resource_kind: kind.into(),
                name: name.to_owned(),
                is_prefix,
                operations: vec![operation.into()],
            };
        let rules = [
            rule(ResourceKind::Group, "a", false, AccessOperation::Read),
            rule(ResourceKind::Group, "b-", true, AccessOperation::Commit),
        ];
        let may = |name, operation| allows(&rules, ResourceKind::Group, name, operation);
        assert!(may("a", AccessOperation::Read) && may("a", AccessOperation::Describe));
        assert!(!may("aa", AccessOperation::Read) && !may("a", AccessOperation::Commit));
        assert!(may("b-1", AccessOperation::Commit) && !may("b", AccessOperation::Commit));
        assert!(!allows(&rules, ResourceKind::Topic, "a", AccessOperation::Read));
        let admin = [rule(ResourceKind::Cluster, "", false, AccessOperation::Admin)];
        assert!(allows(&admin, ResourceKind::Group, "x", AccessOperation::Commit));
    }
}
