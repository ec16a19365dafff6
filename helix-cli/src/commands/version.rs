//! `helix version`: of this program, and of the nodes that answer.
//! A cluster that is not there is no error.

use schemars::JsonSchema;
use serde::Serialize;

use crate::args::Global;
use crate::connect::connect_at_once;
use crate::output::Output;

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Versions {
    /// Of this program.
    version: &'static str,
    /// None: no node answers.
    nodes: Option<Vec<Node>>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Node {
    node_id: u64,
    endpoint: String,
    version: String,
}

pub(crate) async fn run(global: &Global) -> anyhow::Result<()> {
    let versions = Versions { version: env!("CARGO_PKG_VERSION"), nodes: nodes(global).await };
    if versions.nodes.is_none() && !global.quiet {
        eprintln!("no node answers at {}", global.addr.join(","));
    }
    Output { format: global.output }.show(&versions)
}

async fn nodes(global: &Global) -> Option<Vec<Node>> {
    let client = connect_at_once(global).await?;
    let metadata = client.admin().metadata(&[]).await.ok()?;
    let node = |node: helix_client::proto::log::v1::Node| Node {
        node_id: node.node_id,
        endpoint: node.endpoint,
        version: node.version,
    };
    Some(metadata.nodes.into_iter().map(node).collect())
}
