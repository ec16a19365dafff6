//! A whole cluster on this machine: its nodes are child processes, each with a folder of its own.
//! What `helix demo` and `helix dev` have in common; one node is a cluster as well.

use std::path::{Path, PathBuf};

use anyhow::Context;
use futures_util::future::{join_all, select_all, try_join_all};

use crate::exit::{Exit, Failure};
use crate::node::{Node, NodeOptions};

/// What to start.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// One for each node, beginning with node 1.
    pub(crate) ports: Vec<Ports>,
    /// Has a folder for each node. None: memory storage.
    pub(crate) folder: Option<PathBuf>,
    /// Whether the nodes' own output is kept to themselves.
    pub(crate) is_quiet: bool,
    /// Whether each node has an admin port, which follows from its clients' port.
    pub(crate) has_admin: bool,
}

/// Ports of one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ports {
    pub(crate) client: u16,
    pub(crate) peer: u16,
}

/// The nodes, running or not.
#[derive(Debug)]
pub(crate) struct LocalCluster {
    nodes: Vec<Node>,
}

impl Plan {
    fn nodes(&self) -> Vec<NodeOptions> {
        let numbered = || (1..).zip(&self.ports);
        let peers = match self.ports.len() {
            1 => Vec::new(),
            _ => numbered().map(|(node_id, ports)| (node_id, ports.peer)).collect(),
        };
        let node = |(node_id, ports): (u64, &Ports)| NodeOptions {
            node_id,
            port: ports.client,
            peers: peers.clone(),
            data_dir: self.folder.as_deref().map(|folder| folder_of(folder, node_id)),
            is_quiet: self.is_quiet,
            has_admin: self.has_admin,
        };
        numbered().map(node).collect()
    }
}

/// Folder of one node's data.
pub(crate) fn folder_of(folder: &Path, node_id: u64) -> PathBuf {
    folder.join(format!("node-{node_id}"))
}

impl LocalCluster {
    /// Starts the processes. They may not answer yet: see [`LocalCluster::ready`].
    pub(crate) fn start(plan: &Plan) -> anyhow::Result<Self> {
        let nodes = plan.nodes().into_iter().map(Node::start).collect::<Result<_, _>>()?;
        Ok(Self { nodes })
    }

    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(crate) fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Client addresses, in the order of the node ids.
    pub(crate) fn addresses(&self) -> Vec<String> {
        self.nodes.iter().map(Node::address).collect()
    }

    /// Waits until every node knows all others and a leader in each shard.
    ///
    /// # Errors
    /// A node ended instead, or took too long.
    pub(crate) async fn ready(&mut self) -> anyhow::Result<()> {
        let count = self.nodes.len();
        try_join_all(self.nodes.iter_mut().map(|node| node.ready(Some(count)))).await?;
        Ok(())
    }

    /// The node with this id.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn node(&mut self, node_id: u64) -> anyhow::Result<&mut Node> {
        let count = self.nodes.len();
        let found = self.nodes.iter_mut().find(|node| node.node_id() == node_id);
        found.ok_or_else(|| {
            let failure = Failure::new(Exit::NotFound, format!("there is no node {node_id}"));
            failure.why(format!("the cluster has nodes 1 to {count}")).into()
        })
    }

    /// Waits until a running node ends by itself. Never, if none runs. Dropping the future loses
    /// nothing.
    pub(crate) async fn one_ended(&mut self) -> &mut Node {
        let running = |node: &&mut Node| node.is_running();
        let ends: Vec<_> = self
            .nodes
            .iter_mut()
            .filter(running)
            .map(|node| {
                Box::pin(async move {
                    node.ended().await;
                    node
                })
            })
            .collect();
        if ends.is_empty() {
            return std::future::pending().await;
        }
        select_all(ends).await.0
    }

    /// Ends all processes as a crash would.
    pub(crate) async fn kill(&mut self) -> anyhow::Result<()> {
        let killed = join_all(self.nodes.iter_mut().map(Node::kill)).await;
        killed.into_iter().collect()
    }

    /// Lets all nodes stop by themselves, in bounded time.
    pub(crate) async fn stop(&mut self) -> anyhow::Result<()> {
        let stopped = join_all(self.nodes.iter_mut().map(Node::stop)).await;
        stopped.into_iter().collect::<Result<(), _>>().context("stop the cluster")
    }

    /// The same error, or, if a node has ended by itself, that with its last words.
    pub(crate) fn explain(&mut self, error: anyhow::Error) -> anyhow::Error {
        match self.nodes.iter_mut().find_map(Node::explanation) {
            Some(cause) => cause.context(format!("{error:#}")),
            None => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(count: u16) -> Plan {
        let ports = (0..count).map(|n| Ports { client: 9092 + n, peer: 9192 + n }).collect();
        Plan { ports, folder: Some(PathBuf::from("data")), is_quiet: true, has_admin: false }
    }

    #[test]
    fn nodes_have_ids_folders_and_know_each_other() {
        let nodes = plan(3).nodes();
        let ids: Vec<_> = nodes.iter().map(|node| (node.node_id, node.port)).collect();
        assert_eq!(ids, [(1, 9092), (2, 9093), (3, 9094)]);
        assert_eq!(nodes[2].data_dir, Some(PathBuf::from("data/node-3")));
        for node in &nodes {
            assert_eq!(node.peers, [(1, 9192), (2, 9193), (3, 9194)]);
        }
    }

    #[test]
    fn a_single_node_is_a_cluster_of_its_own() {
        assert!(plan(1).nodes()[0].peers.is_empty());
    }
}
