//! The start of a new cluster: its first Raft membership, shards and topics.

use std::io;

use super::client::Cluster;
use super::state::ClusterState;
use super::topic_changes::TopicSpec;
use crate::error::{Error, Result};
use crate::limits;
use crate::log::ClusterCommand;

/// The initial contents of a new cluster.
#[derive(Debug, Clone)]
pub struct Bootstrap {
    pub shard_count: u64,
    pub topics: Vec<TopicSpec>,
}

impl Cluster {
    /// Forms a single-node cluster, or takes over leadership of the one on disk. If this node has a
    /// peer port (`listens`), the cluster may have more members by now: then it waits for them.
    ///
    /// # Errors
    /// Fails once openraft has stopped, and if the cluster has more members but this node has no
    /// peer port.
    pub async fn form_single_node(&self, listens: bool) -> io::Result<()> {
        if !self.replica().is_formed().await? {
            self.replica().form([self.replica().id()].into()).await?;
            self.replica().known_voters().await;
            return Ok(());
        }
        if self.replica().known_voters().await == [self.replica().id()] {
            return self.replica().elect().await;
        }
        if listens {
            return Ok(());
        }
        let what = format!(
            "this node belongs to a cluster of the nodes {:?}; give the other nodes with --peer",
            self.nodes()
        );
        Err(io::Error::other(what))
    }

    /// Registers the first shards and creates the first topics. Runs on shard 0's leader and may be
    /// repeated.
    ///
    /// # Errors
    /// [`Error::NoLeader`] if this node does not lead shard 0, and the errors of [`Self::command`]
    /// and [`Self::create_topic`].
    pub async fn bootstrap(&self, bootstrap: &Bootstrap) -> Result<()> {
        if !self.replica().wait_ready(limits::READY_WAIT_MAX).await {
            return Err(Error::NoLeader { shard: 0 });
        }
        self.set_initial_protocol().await?;
        if self.machine().read(|state| state.shards().is_empty()) {
            let shards = (1..=bootstrap.shard_count).collect();
            self.command(ClusterCommand::RegisterShards { shards }).await?;
        }
        if !self.machine().read(ClusterState::has_had_topics) {
            for spec in &bootstrap.topics {
                self.create_topic(spec.clone(), false).await?;
            }
        }
        Ok(())
    }
}
