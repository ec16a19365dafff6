//! `helix cluster`: info, health, nodes, shards, transfer-leader.
//! Every node is asked for its own view; what they say is put together here, on one side.

pub(crate) mod health;
pub(crate) mod members;
pub(crate) mod rows;
pub(crate) mod view;

use std::time::Duration;

use anyhow::Context;
use helix_client::proto::log::v1::LeaderHint;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::args::{ClusterCommand, Global};
use crate::connect::connect;
use crate::exit::{Exit, Failure};
use crate::output::Output;
use members::Asked;
use view::View;

/// How long a new leader may take to be known after the old one has agreed to hand over.
const TRANSFER_MAX: Duration = Duration::from_secs(5);

/// How often the nodes are asked meanwhile.
const ASK_INTERVAL: Duration = Duration::from_millis(20);

pub(crate) async fn run(global: &Global, command: &ClusterCommand) -> anyhow::Result<()> {
    let output = Output { format: global.output };
    match command {
        ClusterCommand::Info => output.show(&rows::info(&View::ask(global).await?)),
        ClusterCommand::Nodes => output.show(&rows::nodes(&View::ask(global).await?)),
        ClusterCommand::Shards => output.show(&rows::shards(&View::ask(global).await?)),
        ClusterCommand::Health(args) => health::run(global, args).await,
        ClusterCommand::TransferLeader { shard, to } => {
            output.show(&transfer(global, *shard, *to).await?)
        }
        ClusterCommand::AddNode { node, peer_addr, wait } => {
            let asked = Asked::Add { node_id: *node, peer_addr };
            members::change(global, asked, wait).await
        }
        ClusterCommand::RemoveNode { node, lost, wait } => {
            let asked = Asked::Remove { node_id: *node, lost: *lost };
            members::change(global, asked, wait).await
        }
        ClusterCommand::ReplaceNode { node, by, peer_addr, wait } => {
            let asked = Asked::Replace {
                lost_node_id: *node,
                node_id: by.unwrap_or(*node),
                peer_addr: peer_addr.as_deref().unwrap_or_default(),
            };
            members::change(global, asked, wait).await
        }
        ClusterCommand::Drain { node, dry_run } => {
            members::drain(global, *node, true, *dry_run).await
        }
        ClusterCommand::Undrain { node } => members::drain(global, *node, false, false).await,
        ClusterCommand::Balance => members::balance(global).await,
    }
}

/// Who leads a shard after its leadership was moved.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Transferred {
    shard_id: u32,
    leader: u64,
    endpoint: String,
    term: u64,
}

async fn transfer(global: &Global, shard_id: u32, to: Option<u64>) -> anyhow::Result<Transferred> {
    let client = connect(global).await?;
    let leaders = View::ask(global).await?.leaders();
    let Some(before) = leaders.get(&shard_id).cloned() else {
        let failure = Failure::new(Exit::NotFound, format!("the cluster has no shard {shard_id}"));
        return Err(failure.hint("helix cluster shards").into());
    };
    let moved = client.admin().transfer_leader(shard_id, to).await;
    moved.with_context(|| format!("move the leadership of shard {shard_id}"))?;
    let started = Instant::now();
    loop {
        let leader = View::ask(global).await?.leader(shard_id);
        if let Some(LeaderHint { node_id, endpoint, term }) = leader.clone()
            && is_done(node_id, before.as_ref(), to)
        {
            return Ok(Transferred { shard_id, leader: node_id, endpoint, term });
        }
        if started.elapsed() >= TRANSFER_MAX {
            let who = leader.map_or("nobody".to_owned(), |it| format!("node {}", it.node_id));
            let what = format!("{who} leads shard {shard_id} after {TRANSFER_MAX:?}");
            let failure = Failure::new(Exit::Unavailable, what);
            let failure = failure.why("the node that was to take over may be down or behind");
            return Err(failure.hint("helix cluster shards\nhelix cluster health").into());
        }
        sleep(ASK_INTERVAL).await;
    }
}

/// Whether a leader is the one that was asked for, or, if none was, another one than before.
fn is_done(leader: u64, before: Option<&LeaderHint>, to: Option<u64>) -> bool {
    match to {
        Some(target) => leader == target,
        None => before.is_none_or(|before| before.node_id != leader),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_is_done_when_who_was_asked_for_leads() {
        let before = LeaderHint { node_id: 1, ..LeaderHint::default() };
        assert!(is_done(3, Some(&before), Some(3)));
        assert!(!is_done(2, Some(&before), Some(3)));
        assert!(!is_done(1, Some(&before), None));
        assert!(is_done(2, Some(&before), None));
        assert!(is_done(1, None, None));
    }
}
