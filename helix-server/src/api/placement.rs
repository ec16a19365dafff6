//! GetPlacement of ClusterService: where the replicas are, what moves and why, what cannot move.

use std::collections::BTreeMap;

use helix_proto::log::v1 as wire;
use helix_proto::log::v1::{
    CancelMoveRequest, CancelMoveResponse, GetPlacementResponse, PlacementNode, PlacementShard,
    ReplicaMove, SetMovesPausedRequest, SetMovesPausedResponse, ShardSplit, SplitPhase,
};

use super::wire_shard_id;
use crate::cluster::{
    MoveReason, PlacedShard, PlacedSplit, PlacementReport, PlanStep, PlannedMove, ShardMove,
    ShardProgress, SplitStep,
};
use crate::error::Result;
use crate::node::Node;

pub(super) async fn get(node: &Node) -> Result<GetPlacementResponse> {
    node.check_member()?;
    let report = node.cluster().placement().await?;
    Ok(response(&report, &node.cluster().preferred_leaders()))
}

pub(super) async fn set_paused(
    node: &Node,
    request: SetMovesPausedRequest,
) -> Result<SetMovesPausedResponse> {
    node.check_member()?;
    node.cluster().pause_moves(request.paused).await?;
    Ok(SetMovesPausedResponse {})
}

pub(super) async fn cancel(node: &Node, request: CancelMoveRequest) -> Result<CancelMoveResponse> {
    node.check_member()?;
    let moving = node.cluster().cancel_move(request.shard_id.into()).await?;
    Ok(CancelMoveResponse { r#move: moving.map(|moving| wire_move(&moving, None)) })
}

fn response(report: &PlacementReport, leaders: &BTreeMap<u64, u64>) -> GetPlacementResponse {
    let PlacementReport { members, open, plan, .. } = report;
    let Some(placement) = members.placement() else { return GetPlacementResponse::default() };
    let count = |replicas_of: &dyn Fn(&PlacedShard) -> BTreeMap<u64, u32>| {
        let mut counts: BTreeMap<u64, u32> = BTreeMap::new();
        for (_, shard) in placement.shards().filter(|(id, _)| *id != 0) {
            for node in replicas_of(shard).into_keys() {
                *counts.entry(node).or_default() += 1;
            }
        }
        counts
    };
    let (now, after) = (count(&|shard| shard.replicas.clone()), count(&PlacedShard::after));
    let of = |counts: &BTreeMap<u64, u32>, node: u64| counts.get(&node).copied().unwrap_or(0);
    let nodes = members.iter().map(|member| PlacementNode {
        node_id: member.node_id,
        replicas: of(&now, member.node_id),
        replicas_after: of(&after, member.node_id),
        rack: member.rack.clone(),
        refusal: members.refusal_to_hold(member.node_id).unwrap_or_default().to_owned(),
    });
    let shards = placement.shards().map(|(shard_id, shard)| {
        let stuck = plan.stuck.iter().find(|it| it.shard_id == shard_id);
        let row = report.progress_of(shard_id);
        let split = shard.split.as_ref().map(|split| report.split_obstacle(shard_id, split));
        let obstacle = stuck.map(|it| it.reason.obstacle()).or(split).unwrap_or_default();
        PlacementShard {
            shard_id: wire_shard_id(shard_id),
            node_ids: shard.replicas.keys().copied().collect(),
            r#move: shard.moving.as_ref().map(|moving| wire_move(moving, row.as_ref())),
            stuck_reason: obstacle.what,
            stuck_code: obstacle.code,
            preferred_leader: leaders.get(&shard_id).copied().unwrap_or(0),
            is_opening: shard_id != 0 && !open.contains(&shard_id),
            stuck_next_step: obstacle.next_step,
            stuck_node_id: stuck.and_then(|it| it.node_id).unwrap_or(0),
            split: shard.split.as_ref().map(wire_split),
            replication_factor: shard.replication_factor,
        }
    });
    let planned = plan.steps.iter().filter_map(|step| match step {
        PlanStep::Move(planned) => Some(wire_planned(planned)),
        PlanStep::Cancel { .. } => None,
    });
    GetPlacementResponse {
        replicas: placement.replicas(),
        nodes: nodes.collect(),
        shards: shards.collect(),
        planned: planned.collect(),
        paused: placement.is_paused(),
    }
}

fn wire_split(split: &PlacedSplit) -> ShardSplit {
    let phase = match split.is_planned() {
        _ if split.is_cancelled => SplitPhase::Cancelled,
        false => SplitPhase::Waiting,
        true if split.has_reached(SplitStep::Ready) => SplitPhase::Moving,
        true => SplitPhase::Copying,
    };
    ShardSplit {
        parent_shard_id: wire_shard_id(split.parent),
        parts: u32::try_from(split.rule.parts).unwrap_or(u32::MAX),
        node_ids: split.replicas.keys().copied().collect(),
        phase: phase.into(),
    }
}

fn wire_move(moving: &ShardMove, row: Option<&ShardProgress>) -> ReplicaMove {
    let blocked = row.map(|row| row.blocked.clone()).unwrap_or_default();
    ReplicaMove {
        from_node_id: moving.from.unwrap_or(0),
        to_node_id: moving.to.unwrap_or(0),
        reason: wire_reason(moving.reason).into(),
        cancelled: moving.is_cancelled,
        entries_remaining: row.map_or(0, |row| row.entries),
        blocked_reason: blocked.what,
        blocked_code: blocked.code,
        blocked_next_step: blocked.next_step,
        caught_up_to: row.map_or(0, |row| row.caught_up_to),
        commit_index: row.map_or(0, |row| row.commit_index),
        bytes_remaining: row.map_or(0, |row| row.bytes),
    }
}

fn wire_planned(planned: &PlannedMove) -> wire::PlannedMove {
    wire::PlannedMove {
        shard_id: wire_shard_id(planned.shard_id),
        from_node_id: planned.from.unwrap_or(0),
        to_node_id: planned.to.unwrap_or(0),
        reason: wire_reason(planned.reason).into(),
    }
}

fn wire_reason(reason: MoveReason) -> wire::MoveReason {
    match reason {
        MoveReason::TooFew => wire::MoveReason::TooFew,
        MoveReason::TooMany => wire::MoveReason::TooMany,
        MoveReason::NodeLeaves => wire::MoveReason::NodeLeaves,
        MoveReason::ReplicaLost => wire::MoveReason::ReplicaLost,
        MoveReason::Spread => wire::MoveReason::Spread,
        MoveReason::Manual => wire::MoveReason::Manual,
        MoveReason::Racks => wire::MoveReason::Racks,
        MoveReason::NodeDown => wire::MoveReason::NodeDown,
    }
}
