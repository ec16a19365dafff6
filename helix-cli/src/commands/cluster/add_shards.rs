//! `helix cluster add-shards`.

use std::time::Duration;

use anyhow::Context;
use helix_client::proto::log::v1::{AddShardsRequest, PlacementShard};
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::args::GlobalArgs;
use crate::connect::connect;
use crate::exit::{CliError, Exit};
use crate::output::{Output, message};

/// Poll interval while waiting for the replicas.
const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// Data shards to add.
pub(super) struct RequestedShards {
    pub(super) count: u32,
    /// Splits existing shards instead of adding empty ones.
    pub(super) split: bool,
    /// Replicas of each; 0 for the cluster's number.
    pub(super) replicas: u32,
}

/// Data shards that were added.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct AddedShards {
    /// Ids of the new shards.
    shard_ids: Vec<u32>,
    /// Data shards of the cluster.
    shards: u32,
}

fn is_data(shard: &&PlacementShard) -> bool {
    shard.shard_id != 0
}

pub(super) async fn run(
    global: &GlobalArgs,
    requested: RequestedShards,
    no_wait: bool,
) -> anyhow::Result<()> {
    let RequestedShards { count, split, replicas } = requested;
    let admin = connect(global).await?.admin();
    let what = format!("add {count} shards");
    let before = admin.placement().await.with_context(|| what.clone())?;
    let current: Vec<u32> = before.shards.iter().filter(is_data).map(|it| it.shard_id).collect();
    let known = u32::try_from(current.len()).unwrap_or(u32::MAX);
    let total = known.saturating_add(count);
    let request = AddShardsRequest { current: known, total, split, replicas };
    admin.add_shards(request).await.with_context(|| what.clone())?;
    let began = Instant::now();
    let shard_ids = loop {
        let placement = admin.placement().await.with_context(|| what.clone())?;
        let is_new = |it: &&PlacementShard| is_data(it) && !current.contains(&it.shard_id);
        let new: Vec<&PlacementShard> = placement.shards.iter().filter(is_new).collect();
        let waiting = new.iter().find(|it| it.is_opening);
        if no_wait || (waiting.is_none() && !new.is_empty()) {
            break new.iter().map(|it| it.shard_id).collect();
        }
        if global.timeout.is_some_and(|limit| began.elapsed() >= limit) {
            let what = format!("{what}: not done after {:?}", began.elapsed());
            let why = waiting.map(|it| match it.stuck_reason.as_str() {
                "" => format!("shard {} has replicas on nodes {:?}", it.shard_id, it.node_ids),
                stuck => format!("shard {}: {stuck}", it.shard_id),
            });
            let failure = CliError::new(Exit::Unavailable, what).why(why.unwrap_or_default());
            return Err(failure.hint("helix cluster placement --explain").into());
        }
        sleep(POLL_INTERVAL).await;
    };
    if no_wait && !global.quiet {
        message!("the shards get their replicas; helix cluster placement shows the progress");
    }
    Output { format: global.output }.show(&AddedShards { shard_ids, shards: total })
}
