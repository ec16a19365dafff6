//! `helix cluster placement`, `cordon`, `uncordon`, `set-replicas` and `move-shard`.

use std::fmt::Write;
use std::time::Duration;

use anyhow::Context;
use helix_client::proto::log::v1::{
    GetPlacementResponse, MoveReason, PlacementNode, PlacementShard, ReplicaMove, ShardSplit,
};
use helix_proto::{shown, units};
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::args::GlobalArgs;
use crate::connect::connect;
use crate::exit::{CliError, Exit};
use crate::output::{Output, message};

/// Poll interval while waiting for a move.
const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// Placement of all shards.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct PlacementStatus {
    /// Number of replicas that each data shard should have, as far as there are nodes.
    replicas: u32,
    /// An operator has paused the moves.
    paused: bool,
    nodes: Vec<NodeLoad>,
    shards: Vec<ShardReplicas>,
    /// Moves that start next.
    planned: Vec<MoveRow>,
}

/// Replicas on a node.
#[derive(Debug, Serialize, JsonSchema)]
struct NodeLoad {
    node_id: u64,
    replicas: u32,
    /// Once all moves in progress are done.
    replicas_after: u32,
    rack: Option<String>,
    /// Why it gets no new replicas. None if it does.
    refusal: Option<String>,
}

/// Replicas of a shard. Of shard 0 the voters.
#[derive(Debug, Serialize, JsonSchema)]
struct ShardReplicas {
    shard_id: u32,
    node_ids: Vec<u64>,
    /// Its own number of replicas. 0 if it follows the number of the cluster.
    #[schemars(extend("x-wide" = true))]
    replication_factor: u32,
    /// An added shard, which takes no partitions before it has its replicas.
    #[schemars(extend("x-wide" = true))]
    is_opening: bool,
    #[serde(rename = "move")]
    #[schemars(extend("x-wide" = true))]
    moving: Option<MoveRow>,
    /// The split that the shard is to come from.
    #[schemars(extend("x-wide" = true))]
    split: Option<SplitRow>,
    /// Stable name of the reason why it lacks a replica or cannot move one.
    stuck_code: Option<String>,
    #[schemars(extend("x-wide" = true))]
    stuck_reason: Option<String>,
    /// Node whose replica should move. None if a replica is missing.
    #[schemars(extend("x-wide" = true))]
    stuck_node_id: Option<u64>,
    /// Step that helps.
    #[schemars(extend("x-wide" = true))]
    stuck_next_step: Option<String>,
}

/// A split that makes a new shard.
#[derive(Debug, Serialize, JsonSchema)]
struct SplitRow {
    /// Shard that gives partitions. None before it is chosen.
    parent_shard_id: Option<u64>,
    /// One of so many of its partitions moves.
    parts: u32,
    node_ids: Vec<u64>,
    phase: String,
}

impl SplitRow {
    fn of(split: &ShardSplit) -> Self {
        let name = split.phase().as_str_name();
        Self {
            parent_shard_id: node(split.parent_shard_id.into()),
            parts: split.parts,
            node_ids: split.node_ids.clone(),
            phase: name.strip_prefix("SPLIT_PHASE_").unwrap_or(name).to_owned(),
        }
    }

    fn text(&self) -> String {
        let Some(parent) = self.parent_shard_id else { return "waits for a split".to_owned() };
        let nodes: Vec<String> = self.node_ids.iter().map(u64::to_string).collect();
        let what = match self.phase.as_str() {
            "COPYING" => "copying to",
            "MOVING" => "moving to",
            _ => "cancelled on",
        };
        let nodes = nodes.join(",");
        format!("takes 1 of {} partitions of shard {parent}: {what} nodes {nodes}", self.parts)
    }
}

/// A move of a replica.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct MoveRow {
    shard_id: u32,
    from: Option<u64>,
    to: Option<u64>,
    reason: String,
    #[schemars(extend("x-wide" = true))]
    cancelled: bool,
    #[schemars(extend("x-wide" = true))]
    entries_remaining: u64,
    #[schemars(extend("x-wide" = true))]
    blocked_reason: String,
    /// Stable name of that reason.
    #[schemars(extend("x-wide" = true))]
    blocked_code: String,
    /// Step that helps.
    #[schemars(extend("x-wide" = true))]
    blocked_next_step: String,
    /// Last entry that the new replica has. None if it is not known.
    #[schemars(extend("x-wide" = true))]
    caught_up_to: Option<u64>,
    /// Last committed entry of the shard. None if it is not known.
    #[schemars(extend("x-wide" = true))]
    commit_index: Option<u64>,
    /// Approximate.
    #[schemars(extend("x-wide" = true))]
    bytes_remaining: u64,
}

/// A node that was cordoned or uncordoned.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct CordonedNode {
    node_id: u64,
    cordoned: bool,
}

/// The number of replicas of every data shard.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct WantedReplicas {
    replicas: u32,
}

/// A requested move of a replica.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestedMove {
    pub(super) shard: u32,
    pub(super) from: u64,
    pub(super) to: u64,
}

/// A move of a replica that an operator asked for.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct MovedReplica {
    shard_id: u32,
    from: u64,
    to: u64,
}

fn some(text: &str) -> Option<String> {
    Some(text.to_owned()).filter(|text| !text.is_empty())
}

fn node(node_id: u64) -> Option<u64> {
    Some(node_id).filter(|node| *node != 0)
}

fn reason_name(reason: MoveReason) -> String {
    let name = reason.as_str_name();
    name.strip_prefix("MOVE_REASON_").unwrap_or(name).to_owned()
}

/// Returns the reason of a move in words.
fn reason_text(name: &str) -> &'static str {
    match name {
        "TOO_FEW" => "the shard has too few replicas",
        "TOO_MANY" => "the shard has more replicas than it should",
        "NODE_LEAVES" => "the node is being removed",
        "REPLICA_LOST" => "the node lost its data",
        "SPREAD" => "the numbers of replicas on the nodes differ",
        "MANUAL" => "an operator asked for it",
        "NODE_DOWN" => "the node has not responded for long",
        "RACKS" => "another rack has fewer of its replicas",
        _ => "of a later release",
    }
}

impl From<&GetPlacementResponse> for PlacementStatus {
    fn from(placement: &GetPlacementResponse) -> Self {
        let load = |it: &PlacementNode| NodeLoad {
            node_id: it.node_id,
            replicas: it.replicas,
            replicas_after: it.replicas_after,
            rack: some(&it.rack),
            refusal: some(&it.refusal),
        };
        let shard = |it: &PlacementShard| ShardReplicas {
            shard_id: it.shard_id,
            node_ids: it.node_ids.clone(),
            replication_factor: it.replication_factor,
            is_opening: it.is_opening,
            moving: it.r#move.as_ref().map(|moving| MoveRow::of(it.shard_id, moving)),
            split: it.split.as_ref().map(SplitRow::of),
            stuck_code: some(&it.stuck_code),
            stuck_reason: some(&it.stuck_reason),
            stuck_node_id: node(it.stuck_node_id),
            stuck_next_step: some(&it.stuck_next_step),
        };
        let planned = placement.planned.iter().map(|it| {
            let moving = ReplicaMove {
                from_node_id: it.from_node_id,
                to_node_id: it.to_node_id,
                reason: it.reason,
                ..ReplicaMove::default()
            };
            MoveRow::of(it.shard_id, &moving)
        });
        Self {
            replicas: placement.replicas,
            paused: placement.paused,
            nodes: placement.nodes.iter().map(load).collect(),
            shards: placement.shards.iter().map(shard).collect(),
            planned: planned.collect(),
        }
    }
}

impl MoveRow {
    pub(super) fn of(shard_id: u32, moving: &ReplicaMove) -> Self {
        Self {
            shard_id,
            from: node(moving.from_node_id),
            to: node(moving.to_node_id),
            reason: reason_name(moving.reason()),
            cancelled: moving.cancelled,
            entries_remaining: moving.entries_remaining,
            blocked_reason: moving.blocked_reason.clone(),
            blocked_code: moving.blocked_code.clone(),
            blocked_next_step: moving.blocked_next_step.clone(),
            caught_up_to: node(moving.caught_up_to),
            commit_index: node(moving.commit_index),
            bytes_remaining: moving.bytes_remaining,
        }
    }

    /// Returns the row of a cancelled split, from which this shard was to come.
    pub(super) fn of_split(shard_id: u32) -> Self {
        let cancelled = ReplicaMove { cancelled: true, ..ReplicaMove::default() };
        Self { reason: "SPLIT".to_owned(), ..Self::of(shard_id, &cancelled) }
    }

    /// Returns whether an operator asked for this move.
    pub(super) fn is_manual(&self) -> bool {
        self.reason == "MANUAL"
    }

    /// Returns how far the new replica is; empty if that is not known.
    fn progress(&self) -> String {
        let (Some(upto), Some(commit)) = (self.caught_up_to, self.commit_index) else {
            return String::new();
        };
        let left = units::bytes(self.bytes_remaining);
        format!("has entries up to {upto} of {commit}, about {left} left")
    }

    fn text(&self) -> String {
        let mut text = match (self.from, self.to) {
            (Some(from), Some(to)) if from == to => format!("new replica on node {to}"),
            (Some(from), Some(to)) => format!("from node {from} to node {to}"),
            (None, Some(to)) => format!("new replica on node {to}"),
            (Some(from), None) => format!("off node {from}"),
            (None, None) => String::new(),
        };
        if self.cancelled {
            text += ", cancelled";
        }
        if self.entries_remaining > 0 {
            let _ = write!(text, ", {} entries to fetch", self.entries_remaining);
        }
        text
    }
}

impl PlacementStatus {
    fn text(&self, explain: bool) -> String {
        let mut text = format!("{} replicas a shard, as far as there are nodes\n", self.replicas);
        if self.paused {
            text += "moves are paused; `helix cluster resume-moves` resumes them\n";
        }
        text += "\n";
        text += "NODE  REPLICAS  AFTER MOVES\n";
        for it in &self.nodes {
            let why = it.refusal.as_ref().map(|why| format!("  gets no replicas: it {why}"));
            let rack = it.rack.as_ref().map(|rack| format!("  rack {}", shown::one_line(rack)));
            let why = rack.unwrap_or_default() + &why.unwrap_or_default();
            let _ =
                writeln!(text, "{:<5} {:<9} {}{why}", it.node_id, it.replicas, it.replicas_after);
        }
        text += "\nSHARD  NODES\n";
        for shard in &self.shards {
            let nodes: Vec<String> = shard.node_ids.iter().map(u64::to_string).collect();
            let role = match (shard.shard_id, shard.is_opening) {
                (0, _) => " (voters)",
                (_, true) => " (opening)",
                (_, false) => "",
            };
            let _ = write!(text, "{:<6} {}{role}", shard.shard_id, nodes.join(","));
            if shard.replication_factor != 0 {
                let _ = write!(text, "  replication factor {}", shard.replication_factor);
            }
            if let Some(moving) = &shard.moving {
                let _ = write!(text, "  moving: {}", moving.text());
            }
            if let Some(split) = &shard.split {
                let _ = write!(text, "  {}", split.text());
            }
            text += "\n";
            if !explain {
                continue;
            }
            if let Some(moving) = &shard.moving {
                let _ = writeln!(text, "       because {}", reason_text(&moving.reason));
                let progress = moving.progress();
                if !progress.is_empty() {
                    let _ = writeln!(text, "       {progress}");
                }
                let (code, why) = (&moving.blocked_code, &moving.blocked_reason);
                write_reason(&mut text, code, why, &moving.blocked_next_step);
            }
            if let (Some(code), Some(why)) = (&shard.stuck_code, &shard.stuck_reason) {
                let next_step = shard.stuck_next_step.as_deref().unwrap_or_default();
                write_reason(&mut text, code, why, next_step);
            }
        }
        if explain {
            text += "\nnext:\n";
            for it in &self.planned {
                let why = reason_text(&it.reason);
                let _ = writeln!(text, "  shard {}: {}, because {why}", it.shard_id, it.text());
            }
            if self.planned.is_empty() {
                text += "  nothing\n";
            }
        }
        text
    }
}

/// Writes why something does not go on, and what to do about it; nothing without a reason.
fn write_reason(text: &mut String, code: &str, why: &str, next_step: &str) {
    if why.is_empty() {
        return;
    }
    let code = if code.is_empty() { "waiting" } else { code };
    let _ = writeln!(text, "       {code}: {}", shown::one_line(why));
    if !next_step.is_empty() {
        let _ = writeln!(text, "       to do: {}", shown::one_line(next_step));
    }
}

pub(super) async fn show(global: &GlobalArgs, explain: bool) -> anyhow::Result<()> {
    let admin = connect(global).await?.admin();
    let placement = admin.placement().await.context("get the placement")?;
    let status = PlacementStatus::from(&placement);
    Output { format: global.output }.show_as(&status, || status.text(explain))
}

pub(super) async fn cordon(
    global: &GlobalArgs,
    node_id: u64,
    cordoned: bool,
) -> anyhow::Result<()> {
    let admin = connect(global).await?.admin();
    let verb = if cordoned { "cordon" } else { "uncordon" };
    let set = admin.set_cordoned(node_id, cordoned).await;
    set.with_context(|| format!("{verb} node {node_id}"))?;
    Output { format: global.output }.show(&CordonedNode { node_id, cordoned })
}

pub(super) async fn set_replicas(global: &GlobalArgs, replicas: u32) -> anyhow::Result<()> {
    let admin = connect(global).await?.admin();
    admin.set_replicas(replicas).await.context("set the number of replicas")?;
    Output { format: global.output }.show(&WantedReplicas { replicas })
}

pub(super) async fn move_shard(
    global: &GlobalArgs,
    requested: RequestedMove,
    no_wait: bool,
) -> anyhow::Result<()> {
    let RequestedMove { shard: shard_id, from, to } = requested;
    let admin = connect(global).await?.admin();
    let started = admin.move_shard(shard_id, from, to).await;
    let what = format!("move shard {shard_id} from node {from} to node {to}");
    started.with_context(|| what.clone())?;
    let began = Instant::now();
    let mut done = false;
    let mut last = String::new();
    while !no_wait && !done {
        let placement = admin.placement().await.with_context(|| what.clone())?;
        let status = PlacementStatus::from(&placement);
        let shard = status.shards.iter().find(|it| it.shard_id == shard_id);
        let moving = shard.and_then(|it| it.moving.as_ref());
        if let Some(moving) = moving.filter(|it| (it.from, it.to) == (node(from), node(to))) {
            last = [moving.text(), moving.blocked_reason.clone()].join("; waiting: ");
        } else {
            done = shard.is_some_and(|it| it.node_ids.contains(&to));
            if !done {
                let failure = CliError::new(Exit::Precondition, format!("{what}: cancelled"));
                return Err(failure.hint("helix cluster placement --explain").into());
            }
        }
        if !done && global.timeout.is_some_and(|limit| began.elapsed() >= limit) {
            let what = format!("{what}: not done after {:?}", began.elapsed());
            let failure = CliError::new(Exit::Unavailable, what).why(last);
            return Err(failure.hint("helix cluster placement --explain").into());
        }
        if !done {
            sleep(POLL_INTERVAL).await;
        }
    }
    if no_wait && !global.quiet {
        message!("the move continues; helix cluster placement shows its progress");
    }
    Output { format: global.output }.show(&MovedReplica { shard_id, from, to })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn explains_moves_and_what_is_stuck() {
        let moving = ReplicaMove {
            from_node_id: 1,
            to_node_id: 4,
            reason: MoveReason::NodeLeaves.into(),
            entries_remaining: 7,
            blocked_reason: "node 4 cannot be reached".to_owned(),
            blocked_code: "NODE_UNREACHABLE".to_owned(),
            blocked_next_step: "start node 4".to_owned(),
            caught_up_to: 3,
            commit_index: 10,
            bytes_remaining: 4096,
            ..ReplicaMove::default()
        };
        let shards = vec![
            PlacementShard { shard_id: 0, node_ids: vec![1, 2, 3], ..Default::default() },
            PlacementShard {
                shard_id: 1,
                node_ids: vec![1, 2, 3],
                r#move: Some(moving),
                ..Default::default()
            },
            PlacementShard {
                shard_id: 2,
                node_ids: vec![2, 3],
                is_opening: true,
                stuck_code: "TOO_FEW_NODES".to_owned(),
                stuck_reason: "add a node".to_owned(),
                ..Default::default()
            },
        ];
        let nodes = vec![PlacementNode {
            node_id: 1,
            replicas: 1,
            replicas_after: 0,
            refusal: "is being removed".to_owned(),
            rack: "a".to_owned(),
        }];
        let (planned, paused) = (Vec::new(), true);
        let response = GetPlacementResponse { replicas: 3, nodes, shards, planned, paused };
        let status = PlacementStatus::from(&response);
        let text = status.text(true);
        for part in [
            "1     1         0  rack a  gets no replicas: it is being removed",
            "0      1,2,3 (voters)",
            "1      1,2,3  moving: from node 1 to node 4, 7 entries to fetch",
            "because the node is being removed",
            "moves are paused",
            "has entries up to 3 of 10, about 4 KiB left",
            "NODE_UNREACHABLE: node 4 cannot be reached\n       to do: start node 4",
            "2      2,3 (opening)",
            "TOO_FEW_NODES: add a node",
            "nothing",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!status.text(false).contains("because"));
    }
}
