//! Probes of shards: a committed entry proves that a shard takes writes. Leaders, connections and
//! processes can look well while a shard does not.

use std::time::Duration;

use futures_util::future::join_all;
use helix_proto::log::v1::{HealthIssue, HealthReason};
use tokio::time::Instant;

use super::wire_shard_id;
use crate::node::Node;

/// Longest wait for the commit of a probe. Callers wait two seconds for the health of a node.
const PROBE_WAIT_MAX: Duration = Duration::from_millis(1_500);

/// Time in which further requests get the same result, so that they do not fill the logs.
const RESULT_KEPT: Duration = Duration::from_secs(1);

/// Proves the shards that a node leads.
#[derive(Debug, Default)]
pub(super) struct ShardProver {
    /// End and result of the last round.
    last: tokio::sync::Mutex<Option<(Instant, Vec<HealthIssue>)>>,
}

impl ShardProver {
    /// Returns an issue for each shard that this node leads and that does not commit a probe.
    pub(super) async fn issues(&self, node: &Node) -> Vec<HealthIssue> {
        // Held during a round, so that simultaneous requests share it.
        let mut last = self.last.lock().await;
        if let Some((at, issues)) = &*last
            && at.elapsed() < RESULT_KEPT
        {
            return issues.clone();
        }
        let issues = probe_all(node).await;
        *last = Some((Instant::now(), issues.clone()));
        issues
    }
}

async fn probe_all(node: &Node) -> Vec<HealthIssue> {
    let led = node.shards().into_iter().filter(|shard| shard.is_leader());
    let data = join_all(led.map(|shard| async move {
        let probed = tokio::time::timeout(PROBE_WAIT_MAX, shard.probe()).await;
        issue(node, shard.id(), probed)
    }));
    let own = async {
        if !node.cluster().is_leader() {
            return None;
        }
        let probed = tokio::time::timeout(PROBE_WAIT_MAX, node.cluster().probe()).await;
        issue(node, 0, probed)
    };
    let (own, data) = tokio::join!(own, data);
    own.into_iter().chain(data.into_iter().flatten()).collect()
}

/// Returns the issue of a probe that failed or took too long.
fn issue<E: std::fmt::Display>(
    node: &Node,
    shard_id: u64,
    probed: Result<Result<(), E>, tokio::time::error::Elapsed>,
) -> Option<HealthIssue> {
    let why = match probed {
        Ok(Ok(())) => return None,
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no majority has synced it within {PROBE_WAIT_MAX:?}"),
    };
    let node_id = node.info().node_id;
    Some(HealthIssue {
        reason: HealthReason::NoCommit.into(),
        shard_id: Some(wire_shard_id(shard_id)),
        needed_node_ids: Vec::new(),
        message: format!(
            "shard {shard_id} did not commit a probe of its leader, node {node_id}: {why}"
        ),
    })
}
