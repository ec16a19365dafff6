//! A cluster on this machine: one child process and one data directory for each node.
//! `helix demo` and `helix dev` use it. It may have a single node.

use std::path::{Path, PathBuf};

use anyhow::Context;
use futures_util::future::{join_all, select_all, try_join_all};

use crate::child_node::{ChildNode, ChildNodeOptions};
use crate::exit::{CliError, Exit};

/// Options of a local cluster.
#[derive(Debug, Clone)]
pub(crate) struct ClusterPlan {
    /// Ports of each node, starting with node 1.
    pub(crate) ports: Vec<NodePorts>,
    /// Parent of the data directories; None for memory storage.
    pub(crate) directory: Option<PathBuf>,
    /// Hides the output of the nodes.
    pub(crate) is_quiet: bool,
    /// Enables the admin ports, which are derived from the client ports.
    pub(crate) has_admin: bool,
    /// Directory with the certificates; None without TLS.
    pub(crate) tls_dir: Option<PathBuf>,
    /// Further settings of every node: environment variables and their values.
    pub(crate) settings: Vec<(String, String)>,
}

/// Ports of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodePorts {
    pub(crate) client: u16,
    pub(crate) peer: u16,
}

/// The nodes of the cluster, running or not.
#[derive(Debug)]
pub(crate) struct LocalCluster {
    nodes: Vec<ChildNode>,
}

impl ClusterPlan {
    fn nodes(&self) -> Vec<ChildNodeOptions> {
        let numbered = || (1..).zip(&self.ports);
        let peers = match self.ports.len() {
            1 => Vec::new(),
            _ => numbered().map(|(node_id, ports)| (node_id, ports.peer)).collect(),
        };
        let node = |(node_id, ports): (u64, &NodePorts)| ChildNodeOptions {
            node_id,
            port: ports.client,
            peers: peers.clone(),
            data_dir: self.directory.as_deref().map(|directory| node_directory(directory, node_id)),
            is_quiet: self.is_quiet,
            has_admin: self.has_admin,
            tls_dir: self.tls_dir.clone(),
            settings: self.settings.clone(),
        };
        numbered().map(node).collect()
    }
}

/// Returns the data directory of a node.
pub(crate) fn node_directory(directory: &Path, node_id: u64) -> PathBuf {
    directory.join(format!("node-{node_id}"))
}

impl LocalCluster {
    /// Starts the processes; [`LocalCluster::ready`] waits until they answer.
    pub(crate) fn start(plan: &ClusterPlan) -> anyhow::Result<Self> {
        let nodes = plan.nodes().into_iter().map(ChildNode::start).collect::<Result<_, _>>()?;
        Ok(Self { nodes })
    }

    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(crate) fn nodes(&self) -> &[ChildNode] {
        &self.nodes
    }

    /// Returns the client addresses, ordered by node id.
    pub(crate) fn addresses(&self) -> Vec<String> {
        self.nodes.iter().map(ChildNode::address).collect()
    }

    /// Waits until every node knows all nodes and a leader of each shard.
    ///
    /// # Errors
    /// Fails if a node exits or the time is up.
    pub(crate) async fn ready(&mut self) -> anyhow::Result<()> {
        let count = self.nodes.len();
        try_join_all(self.nodes.iter_mut().map(|node| node.ready(Some(count)))).await?;
        Ok(())
    }

    /// Returns the node with this id.
    ///
    /// # Errors
    /// Fails if there is no such node.
    pub(crate) fn node(&mut self, node_id: u64) -> anyhow::Result<&mut ChildNode> {
        let count = self.nodes.len();
        let found = self.nodes.iter_mut().find(|node| node.node_id() == node_id);
        found.ok_or_else(|| {
            let failure = CliError::new(Exit::NotFound, format!("there is no node {node_id}"));
            failure.why(format!("the cluster has nodes 1 to {count}")).into()
        })
    }

    /// Waits until a running node exits on its own; forever if no node runs. Cancel safe.
    pub(crate) async fn node_exited(&mut self) -> &mut ChildNode {
        let running = |node: &&mut ChildNode| node.is_running();
        let exits: Vec<_> = self
            .nodes
            .iter_mut()
            .filter(running)
            .map(|node| {
                Box::pin(async move {
                    node.exited().await;
                    node
                })
            })
            .collect();
        if exits.is_empty() {
            return std::future::pending().await;
        }
        select_all(exits).await.0
    }

    /// Kills all processes (SIGKILL).
    pub(crate) async fn kill(&mut self) -> anyhow::Result<()> {
        let killed = join_all(self.nodes.iter_mut().map(ChildNode::kill)).await;
        killed.into_iter().collect()
    }

    /// Stops all nodes gracefully, or kills them after a timeout.
    pub(crate) async fn stop(&mut self) -> anyhow::Result<()> {
        let stopped = join_all(self.nodes.iter_mut().map(ChildNode::stop)).await;
        stopped.into_iter().collect::<Result<(), _>>().context("stop the cluster")
    }

    /// Adds the last output of a node that exited on its own, if any, to an error.
    pub(crate) fn with_exit_error(&mut self, error: anyhow::Error) -> anyhow::Error {
        match self.nodes.iter_mut().find_map(ChildNode::exit_error) {
            Some(cause) => cause.context(format!("{error:#}")),
            None => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(count: u16) -> ClusterPlan {
        let ports = (0..count).map(|n| NodePorts { client: 9092 + n, peer: 9192 + n }).collect();
        ClusterPlan {
            ports,
            directory: Some(PathBuf::from("data")),
            is_quiet: true,
            has_admin: false,
            tls_dir: None,
            settings: Vec::new(),
        }
    }

    #[test]
    fn nodes_get_ids_directories_and_peers() {
        let nodes = plan(3).nodes();
        let ids: Vec<_> = nodes.iter().map(|node| (node.node_id, node.port)).collect();
        assert_eq!(ids, [(1, 9092), (2, 9093), (3, 9094)]);
        assert_eq!(nodes[2].data_dir, Some(PathBuf::from("data/node-3")));
        for node in &nodes {
            assert_eq!(node.peers, [(1, 9192), (2, 9193), (3, 9194)]);
        }
    }

    #[test]
    fn single_node_has_no_peers() {
        assert!(plan(1).nodes()[0].peers.is_empty());
    }
}
