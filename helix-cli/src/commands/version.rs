//! `helix version`: the versions of this program and of the nodes.
//! An unreachable cluster is not an error.

use schemars::JsonSchema;
use serde::Serialize;

use crate::args::GlobalArgs;
use crate::connect::connect_quickly;
use crate::output::{Output, message};

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct VersionReport {
    /// Version of this program.
    version: &'static str,
    /// Commit that this program was built from. None if the build did not know it.
    commit: Option<&'static str>,
    /// None if no node answers.
    nodes: Option<Vec<Node>>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Node {
    node_id: u64,
    endpoint: String,
    version: String,
}

pub(crate) async fn run(global: &GlobalArgs) -> anyhow::Result<()> {
    let commit = Some(env!("HELIX_COMMIT")).filter(|commit| !commit.is_empty());
    let nodes = nodes(global).await;
    let versions = VersionReport { version: env!("CARGO_PKG_VERSION"), commit, nodes };
    if versions.nodes.is_none() && !global.quiet {
        message!("no node answers at {}", global.addr.join(","));
    }
    Output { format: global.output }.show(&versions)
}

async fn nodes(global: &GlobalArgs) -> Option<Vec<Node>> {
    let client = connect_quickly(global).await?;
    let metadata = client.admin().metadata(&[""]).await.ok()?;
    let node = |node: helix_client::proto::log::v1::Node| Node {
        node_id: node.node_id,
        endpoint: node.endpoint,
        version: node.version,
    };
    Some(metadata.nodes.into_iter().map(node).collect())
}
