//! `helix version`: the versions of this program and of the nodes.
//! An unreachable cluster is not an error.

use std::time::Duration;

use futures_util::future::join_all;
use helix_client::Error;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::timeout;

use super::cluster::snapshot::{failure, is_refusal};
use crate::args::GlobalArgs;
use crate::connect::connect_quickly;
use crate::output::{Output, message};

/// Limit of the request to each node.
const ANSWER_MAX: Duration = Duration::from_secs(1);

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct VersionReport {
    /// Version of this program.
    version: &'static str,
    /// Commit that this program was built from. None if the build did not know it.
    commit: Option<&'static str>,
    /// None if no node answers, or if the nodes refuse the caller.
    nodes: Option<Vec<Node>>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Node {
    node_id: u64,
    endpoint: String,
    /// None if the node does not answer.
    version: Option<String>,
}

pub(crate) async fn run(global: &GlobalArgs) -> anyhow::Result<()> {
    let commit = Some(env!("HELIX_COMMIT")).filter(|commit| !commit.is_empty());
    let asked = nodes(global).await;
    if let Err(error) = &asked
        && !global.quiet
    {
        let addr = global.addr.join(",");
        match is_refusal(error) {
            true => message!("the cluster at {addr} {}", failure(error)),
            false => message!("no node answers at {addr}"),
        }
    }
    let (version, nodes) = (env!("CARGO_PKG_VERSION"), asked.ok());
    let versions = VersionReport { version, commit, nodes };
    Output { format: global.output }.show(&versions)
}

async fn nodes(global: &GlobalArgs) -> Result<Vec<Node>, Error> {
    let client = connect_quickly(global).await?;
    let metadata = client.admin().metadata(&[""]).await?;
    let admin = client.admin();
    let node = |node: helix_client::proto::log::v1::Node| {
        let admin = &admin;
        async move {
            // The version that the node registered may be the one before, and the node may be gone.
            let status = timeout(ANSWER_MAX, admin.node_status(Some(&node.endpoint))).await;
            let version = match status {
                Ok(Ok(status)) => Some(status.version),
                Ok(Err(error)) if is_refusal(&error) => Some(node.version),
                Ok(Err(_)) | Err(_) => None,
            };
            Node { node_id: node.node_id, endpoint: node.endpoint, version }
        }
    };
    Ok(join_all(metadata.nodes.into_iter().map(node)).await)
}
