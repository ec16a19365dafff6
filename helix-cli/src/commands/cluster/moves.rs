//! `helix cluster pause-moves`, `resume-moves` and `cancel-move`.

use anyhow::Context;
use schemars::JsonSchema;
use serde::Serialize;

use super::placement::MoveRow;
use crate::args::GlobalArgs;
use crate::connect::connect;
use crate::output::{Output, message};

/// State of the moves of replicas.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct PausedMoves {
    paused: bool,
}

pub(super) async fn pause(global: &GlobalArgs, paused: bool) -> anyhow::Result<()> {
    let admin = connect(global).await?.admin();
    let verb = if paused { "pause" } else { "resume" };
    let set = admin.set_moves_paused(paused).await;
    set.with_context(|| format!("{verb} the moves of replicas"))?;
    Output { format: global.output }.show(&PausedMoves { paused })
}

pub(super) async fn cancel(global: &GlobalArgs, shard: u32) -> anyhow::Result<()> {
    let admin = connect(global).await?.admin();
    let cancelled = admin.cancel_move(shard).await;
    let cancelled = cancelled.with_context(|| format!("cancel the move of shard {shard}"))?;
    let row = match &cancelled {
        Some(moving) => MoveRow::of(shard, moving),
        None => MoveRow::of_split(shard),
    };
    let is_planned = cancelled.is_some() && !row.is_manual();
    if is_planned && !global.quiet {
        message!(
            "the cluster planned this move and plans it again; to prevent it: helix cluster \
             pause-moves, or cordon the node"
        );
    }
    Output { format: global.output }.show(&row)
}
