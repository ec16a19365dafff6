//! GetPlacement of ClusterService: where the replicas are, what moves and why, what cannot move.

use std::collections::BTreeMap;

use helix_proto::log::v1 as wire;
use helix_proto::log::v1::{GetPlacementResponse, PlacementNode, PlacementShard, ReplicaMove};

use super::wire_shard_id;
use crate::cluster::{
    MoveReason, PlacedShard, PlacementReport, PlanStep, PlannedMove, ShardMove, ShardProgress,
};
use crate::error::Result;
use crate::node::Node;

pub(super) async fn get(node: &Node) -> Result<GetPlacementResponse> {
    node.check_member()?;
    let report = node.cluster().placement().await?;
    Ok(response(&report, &node.cluster().preferred_leaders()))
}

fn response(report: &PlacementReport, leaders: &BTreeMap<u64, u64>) -> GetPlacementResponse {
    let PlacementReport { members, open, plan, progress } = report;
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
        refusal: members.refusal_to_hold(member.node_id).unwrap_or_default().to_owned(),
    });
    let shards = placement.shards().map(|(shard_id, shard)| {
        let stuck = plan.stuck.iter().find(|it| it.shard_id == shard_id);
        let row = progress.iter().find(|row| row.shard_id == shard_id);
        PlacementShard {
            shard_id: wire_shard_id(shard_id),
            node_ids: shard.replicas.keys().copied().collect(),
            r#move: shard.moving.as_ref().map(|moving| wire_move(moving, row)),
            stuck_reason: stuck.map(|it| it.reason.to_string()).unwrap_or_default(),
            stuck_code: stuck.map(|it| it.reason.code().to_owned()).unwrap_or_default(),
            preferred_leader: leaders.get(&shard_id).copied().unwrap_or(0),
            is_opening: shard_id != 0 && !open.contains(&shard_id),
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
    }
}

fn wire_move(moving: &ShardMove, row: Option<&ShardProgress>) -> ReplicaMove {
    let blocked_reason = match moving.to.filter(|_| !moving.is_created) {
        Some(to) => format!("node {to} has not created its replica yet"),
        None => row.map(|row| row.blocked.clone()).unwrap_or_default(),
    };
    ReplicaMove {
        from_node_id: moving.from.unwrap_or(0),
        to_node_id: moving.to.unwrap_or(0),
        reason: wire_reason(moving.reason).into(),
        cancelled: moving.is_cancelled,
        entries_remaining: row.map_or(0, |row| row.entries),
        blocked_reason,
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
    }
}
