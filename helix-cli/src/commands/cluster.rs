//! `helix cluster`: the status of the cluster, leadership transfers and changes of its nodes.
//! Status commands query every node and merge the reports in this program.

pub(crate) mod add_shards;
pub(crate) mod health;
pub(crate) mod members;
pub(crate) mod moves;
pub(crate) mod needed;
pub(crate) mod placement;
mod removal;
pub(crate) mod snapshot;
pub(crate) mod tables;

use std::time::Duration;

use anyhow::Context;
use helix_client::Client;
use helix_client::proto::log::v1::LeaderHint;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::args::{ClusterSubcommand, GlobalArgs};
use crate::connect::connect;
use crate::exit::{CliError, Exit};
use crate::output::{Output, message};
use members::RequestedChange;
use snapshot::ClusterSnapshot;

/// Maximum time until the nodes report the new leader of an accepted transfer.
const TRANSFER_MAX: Duration = Duration::from_secs(5);

/// Poll interval while waiting for the new leader.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

pub(crate) async fn run(global: &GlobalArgs, command: &ClusterSubcommand) -> anyhow::Result<()> {
    let output = Output { format: global.output };
    match command {
        ClusterSubcommand::Info => {
            output.show(&tables::info(&ClusterSnapshot::take(global).await?))
        }
        ClusterSubcommand::Nodes => {
            output.show(&tables::nodes(&ClusterSnapshot::take(global).await?))
        }
        ClusterSubcommand::Shards => {
            output.show(&tables::shards(&ClusterSnapshot::take(global).await?))
        }
        ClusterSubcommand::Health(args) => health::run(global, args).await,
        ClusterSubcommand::TransferLeader { shard, to } => {
            output.show(&transfer(global, *shard, *to).await?)
        }
        ClusterSubcommand::AddNode { node, peer_addr, wait } => {
            let change = RequestedChange::Add { node_id: *node, peer_addr };
            members::change(global, change, wait).await
        }
        ClusterSubcommand::RemoveNode { node, lost, force, fewer_replicas, yes, wait } => {
            let (node, lost, fewer_replicas) = (*node, *lost, *fewer_replicas);
            let (force, yes) = (*force, *yes);
            let removal = removal::Removal { node, lost, force, fewer_replicas, yes };
            if wait.dry_run {
                return removal.dry_run(global).await;
            }
            removal.check(global).await?;
            let change = RequestedChange::Remove { node_id: node, lost, fewer_replicas };
            members::change(global, change, wait).await
        }
        ClusterSubcommand::ReplaceNode { node, by, peer_addr, force, wait } => {
            let replacement = removal::Replacement { node: *node, by: *by, force: *force };
            let change = RequestedChange::Replace {
                lost_node_id: *node,
                node_id: by.unwrap_or(*node),
                peer_addr: peer_addr.as_deref().unwrap_or_default(),
            };
            if wait.dry_run {
                return replacement.dry_run(global, change).await;
            }
            replacement.check(global).await?;
            members::change(global, change, wait).await
        }
        ClusterSubcommand::Drain { node, dry_run } => {
            members::drain(global, *node, true, *dry_run).await
        }
        ClusterSubcommand::Undrain { node } => members::drain(global, *node, false, false).await,
        ClusterSubcommand::Balance => members::balance(global).await,
        ClusterSubcommand::Placement { explain } => placement::show(global, *explain).await,
        ClusterSubcommand::Cordon { node } => placement::cordon(global, *node, true).await,
        ClusterSubcommand::Uncordon { node } => placement::cordon(global, *node, false).await,
        ClusterSubcommand::SetReplicas { replicas } => {
            placement::set_replicas(global, *replicas).await
        }
        ClusterSubcommand::AddShards { count, split, replicas, no_wait } => {
            let (count, split, replicas) = (*count, *split, *replicas);
            let requested = add_shards::RequestedShards { count, split, replicas };
            add_shards::run(global, requested, *no_wait).await
        }
        ClusterSubcommand::MoveShard { shard, from, to, no_wait } => {
            let requested = placement::RequestedMove { shard: *shard, from: *from, to: *to };
            placement::move_shard(global, requested, *no_wait).await
        }
        ClusterSubcommand::PauseMoves => moves::pause(global, true).await,
        ClusterSubcommand::ResumeMoves => moves::pause(global, false).await,
        ClusterSubcommand::CancelMove { shard } => moves::cancel(global, *shard).await,
    }
}

/// The leader of a shard after a leadership transfer.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct TransferredLeader {
    shard_id: u32,
    leader: u64,
    endpoint: String,
    term: u64,
    /// Node to which the cluster moves the leadership back. None if it stays.
    moves_back_to: Option<u64>,
}

async fn transfer(
    global: &GlobalArgs,
    shard_id: u32,
    to: Option<u64>,
) -> anyhow::Result<TransferredLeader> {
    let client = connect(global).await?;
    let leaders = ClusterSnapshot::take(global).await?.leaders();
    let Some(before) = leaders.get(&shard_id).cloned() else {
        let failure = CliError::new(Exit::NotFound, format!("the cluster has no shard {shard_id}"));
        return Err(failure.hint("helix cluster shards").into());
    };
    let transferred = client.admin().transfer_leader(shard_id, to).await;
    transferred.with_context(|| format!("transfer the leadership of shard {shard_id}"))?;
    let started = Instant::now();
    loop {
        let snapshot = ClusterSnapshot::take(global).await?;
        let leader = snapshot.leader(shard_id);
        if let Some(LeaderHint { node_id, endpoint, term }) = leader.clone()
            && is_done(node_id, before.as_ref(), to)
        {
            let preferred = preferred_leader(&client, &snapshot, shard_id).await;
            let moves_back_to = preferred.filter(|it| *it != node_id);
            if let Some(preferred) = moves_back_to
                && !global.quiet
            {
                message!(
                    "the cluster moves shard {shard_id} back to node {preferred}, its preferred \
                     leader, about 10 s after that node is up to date; to prevent it: helix \
                     cluster drain {preferred}"
                );
            }
            return Ok(TransferredLeader {
                shard_id,
                leader: node_id,
                endpoint,
                term,
                moves_back_to,
            });
        }
        if started.elapsed() >= TRANSFER_MAX {
            let current = leader.map_or("no node".to_owned(), |it| format!("node {}", it.node_id));
            let what = format!("{current} leads shard {shard_id} after {TRANSFER_MAX:?}");
            let failure = CliError::new(Exit::Unavailable, what);
            let failure = failure.why("the target node may be down or lagging");
            return Err(failure.hint("helix cluster shards\nhelix cluster health").into());
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Returns the node that the service prefers as leader of a shard. None for shard 0, which stays
/// where it is.
async fn preferred_leader(
    client: &Client,
    snapshot: &ClusterSnapshot,
    shard_id: u32,
) -> Option<u64> {
    match client.admin().placement().await {
        Ok(found) => {
            let shard = found.shards.iter().find(|shard| shard.shard_id == shard_id)?;
            Some(shard.preferred_leader).filter(|node| *node != 0)
        }
        Err(_) => preferred_by_turn(snapshot, shard_id),
    }
}

/// Returns the preferred leader of a cluster without a placement: in turn over the nodes that may
/// lead.
fn preferred_by_turn(snapshot: &ClusterSnapshot, shard_id: u32) -> Option<u64> {
    let metadata = snapshot.metadata()?;
    let shard = metadata.shards.iter().find(|shard| shard.shard_id == shard_id)?;
    let first = usize::try_from(shard_id).ok()?.checked_sub(1)?;
    let may_lead = |id: &u64| {
        let node = metadata.nodes.iter().find(|node| node.node_id == *id);
        snapshot.is_reachable(*id) && node.is_some_and(|node| !node.draining && !node.leaving)
    };
    let count = shard.replicas.len();
    let turns = (0..count).filter_map(|more| shard.replicas.get((first + more) % count));
    turns.copied().find(|node| may_lead(node))
}

/// Returns true if the leader is the requested one or, without a request, a new one.
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
    fn transfer_is_done_when_the_requested_node_leads() {
        let before = LeaderHint { node_id: 1, ..LeaderHint::default() };
        assert!(is_done(3, Some(&before), Some(3)));
        assert!(!is_done(2, Some(&before), Some(3)));
        assert!(!is_done(1, Some(&before), None));
        assert!(is_done(2, Some(&before), None));
        assert!(is_done(1, None, None));
    }
}
